//! Finding raids by their superblocks, in any order.

use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::bdev::BdevInfo;
use crate::raid::array::{Array, Judgement, State, judge};
use blobstore_format::raid::{Level, Member, MemberState};

#[test]
fn a_raid_is_found_again_in_either_order() {
    for order in [[0, 1], [1, 0]] {
        let disks = media(2);
        let mut world = world_with(&disks);
        create(&mut world, 2);
        let handle = world.open("r", 1);
        let write = handle.write(5, 3, 8);
        world.until(|| write.status().is_some());
        drop(world);
        let mut world = super::world();
        world.add_disk("a", &disks[order[0]]);
        let shown = raid(&mut world);
        assert_eq!((&shown["state"], &shown["num_base_bdevs_discovered"]), (&json!("configuring"), &json!(1)));
        world.add_disk("b", &disks[order[1]]);
        assert_eq!(raid(&mut world)["state"], "online");
        assert_eq!(superblock(&disks[0]).seq_number, 2, "written at every assembly");
        let handle = world.open("r", 2);
        let read = handle.read(5, 3);
        world.until(|| read.status().is_some());
        assert_eq!(read.bytes(), vec![8; 3 * 4096]);
    }
}

#[test]
fn a_removed_disk_never_decides_and_is_rebuilt_when_it_is_there() {
    for order in [[0, 1], [1, 0]] {
        let disks = media(2);
        let mut world = world_with(&disks);
        create(&mut world, 2);
        world.ok("bdev_raid_remove_base_bdev", json!({ "name": "d1" }));
        let handle = world.open("r", 1);
        let write = handle.write(0, DATA, 8);
        world.until(|| write.status().is_some());
        drop(world);
        let mut world = super::world();
        world.add_disk("a", &disks[order[0]]);
        world.add_disk("b", &disks[order[1]]);
        while raid(&mut world)["num_base_bdevs_discovered"] != 2 {
            world.rounds(10);
        }
        until_rebuilt(&mut world);
        assert!(same_data(&[&disks[0], &disks[1]]));
        assert_eq!(disks[1].blocks(DATA_OFFSET..DATA_OFFSET + 1), vec![8; 4096]);
    }
}

#[test]
fn a_replaced_disk_is_no_member_any_more() {
    let disks = media(3);
    let mut world = world_with(&disks);
    create(&mut world, 2);
    world.ok("bdev_raid_remove_base_bdev", json!({ "name": "d1" }));
    world.ok("bdev_raid_add_base_bdev", json!({ "raid_bdev": "r", "base_bdev": "d2" }));
    until_rebuilt(&mut world);
    let refused = world.call("bdev_raid_add_base_bdev", json!({ "raid_bdev": "r", "base_bdev": "d1" })).unwrap_err();
    assert_eq!(refused.code, -22);
    drop(world);
    let mut world = super::world();
    for (name, disk) in [("b", 1), ("a", 0), ("c", 2)] {
        world.add_disk(name, &disks[disk]);
    }
    let shown = raid(&mut world);
    assert_eq!((&shown["state"], &shown["base_bdevs_list"][1]["name"]), (&json!("online"), &json!("c")));
    assert!(world.app.registry().claimed_by("b").is_none());
}

#[test]
fn damaged_and_strange_superblocks_are_left_alone() {
    let disks = media(2);
    let mut world = world_with(&disks);
    create(&mut world, 2);
    drop(world);
    let mut bytes = disks[0].blocks(0..1);
    bytes[300] ^= 1;
    disks[0].put(0, &bytes);
    disks[1].fail_reads(0..1);
    let mut striped = superblock(&disks[1]);
    striped.level = Level::Raid0;
    striped.uuid = uuid(77);
    let third = medium(2);
    striped.members[0].uuid = third.uuid;
    third.put(0, &striped.emit().unwrap());
    let mut world = world_with(&[Arc::clone(&disks[0]), Arc::clone(&disks[1]), third]);
    assert_eq!(world.ok("bdev_raid_get_bdevs", json!({ "category": "all" })), json!([]));
    assert!(["d0", "d1", "d2"].iter().all(|name| world.app.registry().claimed_by(name).is_none()));
}

/// One raid's life as superblocks: each member has the newest one that was written to it.
fn life(members: usize, steps: &[(usize, bool)]) -> (Vec<RaidSuperblock>, RaidSuperblock) {
    let entry = |n: usize| Member::new(uuid(n as u128), 256, 64, MemberState::Configured, n as u8);
    let list = (0..members).map(entry).collect();
    let mut newest = RaidSuperblock::new(uuid(100), "r".into(), Level::Raid1, 4096, 0, list);
    (newest.raid_size, newest.seq_number) = (64, 1);
    let mut disks = vec![newest.clone(); members];
    for (who, there) in steps {
        let whole = newest.members.iter().filter(|m| m.state == MemberState::Configured).count();
        let entry = &mut newest.members[who % members];
        let state = match (entry.state, there) {
            (MemberState::Configured, _) if whole > 1 => MemberState::Missing,
            (MemberState::Missing, true) => MemberState::Configured,
            _ => continue,
        };
        entry.state = state;
        newest.seq_number += 1;
        for (disk, entry) in disks.iter_mut().zip(&newest.members) {
            if entry.state == MemberState::Configured {
                *disk = newest.clone();
            }
        }
    }
    (disks, newest)
}

fn device(number: usize) -> BdevInfo {
    let mut info = crate::testing::disk::info("x", uuid(number as u128), 4096, 320);
    info.name = format!("d{number}");
    info
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// Whatever the order, the raid that comes of it is the one of the newest superblock, over exactly its members; a disk
    /// that the newest lists as lost never counts without a rebuild.
    #[test]
    fn every_order_gives_the_same_raid(
        members in 2usize..5,
        steps in proptest::collection::vec((0usize..5, any::<bool>()), 0..8),
        order in Just(()).prop_perturb(|(), mut rng| rng.random::<u64>()),
    ) {
        let (disks, newest) = life(members, &steps);
        let mut present: Vec<usize> = (0..members).collect();
        let mut random = order | 1;
        present.sort_by_cached_key(|_| { random ^= random << 13; random ^= random >> 7; random ^= random << 17; random });
        let mut known: Option<Array> = None;
        let mut seen: Vec<usize> = Vec::new();
        for disk in &present {
            seen.push(*disk);
            // Making a raid anew looks at all the others once more.
            let mut queue = vec![*disk];
            while let Some(disk) = queue.pop() {
                match judge(&disks[disk], &device(disk), known.as_ref()) {
                    Judgement::Make { slot } => {
                        let mut array = Array::from_superblock(&disks[disk]).unwrap();
                        if let Some(slot) = slot {
                            array.claimed(slot, &device(disk)).unwrap();
                            array.configured(slot);
                        }
                        known = Some(array);
                        queue.extend(seen.iter().filter(|d| **d != disk));
                    }
                    Judgement::Join { slot } => {
                        let array = known.as_mut().unwrap();
                        array.claimed(slot, &device(disk)).unwrap();
                        array.configured(slot);
                    }
                    Judgement::Rejoin { .. } | Judgement::Leave(_) => {}
                }
                if let Some(array) = &mut known
                    && array.state == State::Configuring
                    && array.discovered() == array.operational
                    && present.len() == seen.len()
                {
                    array.start().unwrap();
                }
            }
        }
        let array = known.unwrap();
        prop_assert_eq!(array.superblock.as_ref().unwrap().seq_number, newest.seq_number);
        for (slot, entry) in newest.members.iter().enumerate() {
            prop_assert_eq!(array.slots[slot].configured, entry.state == MemberState::Configured);
        }
        prop_assert_eq!(array.num_blocks, 64);
    }
}
