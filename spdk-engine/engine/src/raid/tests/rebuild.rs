//! Members that are added or come back, under I/O.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::atomic::Ordering;

use nvme_wire::Status;
use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::bdev::{Bufs, IoOp};
use crate::raid::control::Raids;
use crate::testing::{Handle, Pending};
use blobstore_format::raid::MemberState;

fn small_windows(world: &mut World) {
    world.ok("bdev_raid_set_options", json!({ "process_window_size_kb": 32 }));
}

#[test]
fn a_new_member_is_rebuilt_and_recorded() {
    let disks = media(3);
    let mut world = world_with(&disks);
    small_windows(&mut world);
    create(&mut world, 2);
    let handle = world.open("r", 1);
    let write = handle.write(0, DATA, 3);
    world.until(|| write.status().is_some());
    world.ok("bdev_raid_remove_base_bdev", json!({ "name": "d0" }));
    disks[2].put(DATA_OFFSET, &[0xff; 4096]);
    assert_eq!(world.ok("bdev_raid_add_base_bdev", json!({ "raid_bdev": "r", "base_bdev": "d2" })), json!(true));
    let shown = raid(&mut world);
    assert_eq!((&shown["process"]["type"], &shown["process"]["target"]), (&json!("rebuild"), &json!("d2")));
    assert!(shown["process"]["progress"]["percent"].as_u64().unwrap() < 100);
    assert_eq!(shown["num_base_bdevs_operational"], 2);
    let again = world.call("bdev_raid_add_base_bdev", json!({ "raid_bdev": "r", "base_bdev": "d0" })).unwrap_err();
    assert_eq!(again.code, -1, "{again:?}");
    assert_eq!(superblock(&disks[1]).members[0].state, MemberState::Missing);
    until_rebuilt(&mut world);
    assert!(same_data(&[&disks[1], &disks[2]]));
    let sb = superblock(&disks[2]);
    assert_eq!((sb.members[0].uuid, sb.members[0].state), (disks[2].uuid, MemberState::Configured));
    assert_eq!(sb, superblock(&disks[1]));
    let full = world.call("bdev_raid_add_base_bdev", json!({ "raid_bdev": "r", "base_bdev": "d0" })).unwrap_err();
    assert_eq!(full.code, -22, "{full:?}");
}

#[test]
fn a_lost_member_that_comes_back_is_rebuilt_in_full() {
    let disks = media(2);
    let mut world = world_with(&disks);
    create(&mut world, 2);
    world.pull_disk("d1");
    let handle = world.open("r", 2);
    let write = handle.write(0, DATA, 3);
    world.until(|| write.status().is_some());
    assert_eq!(write.status(), Some(Status::SUCCESS));
    world.add_disk("d1-again", &disks[1]);
    until_rebuilt(&mut world);
    let shown = raid(&mut world);
    assert_eq!(
        (&shown["num_base_bdevs_operational"], &shown["base_bdevs_list"][1]["name"]),
        (&json!(2), &json!("d1-again"))
    );
    assert!(same_data(&[&disks[0], &disks[1]]));
}

#[test]
fn a_second_lost_member_waits_for_the_first_rebuild() {
    let disks = media(3);
    let mut world = world_with(&disks);
    small_windows(&mut world);
    create(&mut world, 3);
    world.pull_disk("d1");
    world.pull_disk("d2");
    let handle = world.open("r", 2);
    let write = handle.write(0, DATA, 4);
    world.until(|| write.status().is_some());
    disks.iter().for_each(|disk| disk.late_ns.store(1_000_000, Ordering::Relaxed));
    world.add_disk("d1", &disks[1]);
    world.add_disk("d2", &disks[2]);
    assert_eq!(raid(&mut world)["process"]["target"], "d1");
    while raid(&mut world)["num_base_bdevs_operational"] != 3 || !raid(&mut world)["process"].is_null() {
        world.rounds(10);
    }
    assert!(same_data(&[&disks[0], &disks[1]]) && same_data(&[&disks[0], &disks[2]]));
}

#[test]
fn a_target_that_fails_leaves_and_the_raid_goes_on() {
    let disks = media(3);
    let mut world = world_with(&disks);
    small_windows(&mut world);
    create(&mut world, 2);
    world.ok("bdev_raid_remove_base_bdev", json!({ "name": "d0" }));
    world.ok("bdev_raid_add_base_bdev", json!({ "raid_bdev": "r", "base_bdev": "d2" }));
    disks[2].fail_writes();
    until_rebuilt(&mut world);
    let shown = raid(&mut world);
    assert_eq!((&shown["num_base_bdevs_operational"], &shown["num_base_bdevs_discovered"]), (&json!(1), &json!(1)));
    assert!(world.app.registry().claimed_by("d2").is_none());
    disks[2].heal();
    world.ok("bdev_raid_add_base_bdev", json!({ "raid_bdev": "r", "base_bdev": "d2" }));
    until_rebuilt(&mut world);
    assert_eq!(raid(&mut world)["num_base_bdevs_discovered"], 2);
}

#[test]
fn losing_the_only_source_ends_rebuild_and_raid() {
    let disks = media(3);
    let mut world = world_with(&disks);
    create(&mut world, 2);
    world.ok("bdev_raid_remove_base_bdev", json!({ "name": "d0" }));
    disks.iter().for_each(|disk| disk.late_ns.store(1_000_000, Ordering::Relaxed));
    world.ok("bdev_raid_add_base_bdev", json!({ "raid_bdev": "r", "base_bdev": "d2" }));
    world.pull_disk("d1");
    world.rounds(500);
    assert_eq!(world.ok("bdev_raid_get_bdevs", json!({ "category": "all" })), json!([]));
    assert!(world.app.registry().claimed_by("d2").is_none());
    assert_eq!(superblock(&disks[1]).members[0].state, MemberState::Missing, "its data is what counts");
}

#[test]
fn deleting_a_raid_ends_its_rebuild() {
    let disks = media(3);
    let mut world = world_with(&disks);
    create(&mut world, 2);
    world.ok("bdev_raid_remove_base_bdev", json!({ "name": "d0" }));
    world.ok("bdev_raid_set_options", json!({ "process_window_size_kb": 4, "process_max_bandwidth_mb_sec": 1 }));
    world.ok("bdev_raid_add_base_bdev", json!({ "raid_bdev": "r", "base_bdev": "d2" }));
    world.rounds(100);
    assert!(!raid(&mut world)["process"].is_null());
    world.ok("bdev_raid_delete", json!({ "name": "r" }));
    assert!(["d1", "d2"].iter().all(|name| world.app.registry().claimed_by(name).is_none()));
}

#[test]
fn a_raid_that_grows_during_a_rebuild_is_rebuilt_to_its_end() {
    let disks = media(3);
    let mut world = world_with(&disks);
    small_windows(&mut world);
    create(&mut world, 2);
    world.ok("bdev_raid_remove_base_bdev", json!({ "name": "d0" }));
    disks.iter().for_each(|disk| disk.late_ns.store(1_000_000, Ordering::Relaxed));
    world.ok("bdev_raid_add_base_bdev", json!({ "raid_bdev": "r", "base_bdev": "d2" }));
    for index in [1, 2] {
        disks[index].grow(DATA_OFFSET + DATA + 32);
        world.app.registry().resized(&format!("d{index}"));
    }
    let handle = world.open("r", 1);
    while world.app.registry().find("r").unwrap().bdev.num_blocks() == DATA {
        world.round();
    }
    let write = handle.write(DATA + 1, 8, 6);
    world.until(|| write.status().is_some());
    until_rebuilt(&mut world);
    let data = |n: usize| disks[n].blocks(DATA_OFFSET..DATA_OFFSET + DATA + 32);
    assert!(data(1) == data(2));
}

/// A host that writes and reads at random, one I/O per block at a time, and knows what each block holds.
struct Host {
    handles: Vec<Handle>,
    model: BTreeMap<u64, u8>,
    running: Vec<(Rc<Pending>, u64, u64, Option<u8>)>,
}

impl Host {
    fn step(&mut self, choice: u64, byte: u8) {
        let (lba, blocks) = (choice % DATA, 1 + choice / DATA % 7);
        let blocks = blocks.min(DATA - lba);
        let busy = |r: &(Rc<Pending>, u64, u64, Option<u8>)| r.1 < lba + blocks && lba < r.1 + r.2;
        if self.running.iter().any(busy) {
            return;
        }
        let handle = &self.handles[(choice / 1000) as usize % self.handles.len()];
        let pending = match choice / 7 % 8 {
            0..=3 => (handle.write(lba, blocks, byte), Some(byte)),
            4 => (handle.begin(IoOp::WriteZeroes, lba, blocks, Bufs::new()), Some(0)),
            _ => (handle.read(lba, blocks), None),
        };
        self.running.push((pending.0, lba, blocks, pending.1));
    }

    fn collect(&mut self) {
        let model = &mut self.model;
        self.running.retain(|(pending, lba, blocks, byte)| {
            let Some(status) = pending.status() else { return true };
            assert_eq!(status, Status::SUCCESS);
            match byte {
                Some(byte) => model.extend((*lba..lba + blocks).map(|b| (b, *byte))),
                None => {
                    for (block, bytes) in (*lba..).zip(pending.bytes().chunks(4096)) {
                        let expected = model.get(&block).copied().unwrap_or(0);
                        assert!(bytes.iter().all(|b| *b == expected), "block {block}: {} not {expected}", bytes[0]);
                    }
                }
            }
            false
        });
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    /// Rebuilds while two cores read and write: nothing that was answered is lost, and in the end all members are equal.
    #[test]
    fn a_rebuild_under_writes_equals_the_model(seed in any::<u64>(), late in 1u64..400_000) {
        let disks = media(3);
        let mut world = world_with(&disks);
        small_windows(&mut world);
        create(&mut world, 2);
        disks.iter().for_each(|disk| disk.late_ns.store(late, Ordering::Relaxed));
        let handles = vec![world.open("r", 1), world.open("r", 2)];
        let host = RefCell::new(Host { handles, model: BTreeMap::new(), running: Vec::new() });
        let mut random = seed | 1;
        let mut next = move || {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            random
        };
        // The host stops with the rebuild: later writes would cover what it has left out.
        let mut during = 0;
        let raids = world.app.module(Raids::default);
        let is_rebuilding = || raids.list.borrow()[0].process.borrow().is_some();
        for step in 0..5000u64 {
            if step == 300 {
                world.begin("bdev_raid_remove_base_bdev", json!({ "name": "d0" }));
            }
            if step == 700 {
                world.begin("bdev_raid_add_base_bdev", json!({ "raid_bdev": "r", "base_bdev": "d2" }));
            }
            during += u64::from(is_rebuilding());
            if during > 0 && !is_rebuilding() {
                break;
            }
            let mut host = host.borrow_mut();
            host.step(next() >> 8, (next() >> 16) as u8);
            world.round();
            host.collect();
        }
        prop_assert!(during > 20, "the rebuild was over after {} steps", during);
        until_rebuilt(&mut world);
        let mut host = host.into_inner();
        world.until(|| { host.collect(); host.running.is_empty() });
        prop_assert_eq!(&raid(&mut world)["num_base_bdevs_discovered"], 2);
        for block in 0..DATA {
            let expected = vec![host.model.get(&block).copied().unwrap_or(0); 4096];
            for disk in &disks[1..] {
                prop_assert!(disk.blocks(DATA_OFFSET + block..DATA_OFFSET + block + 1) == expected, "block {}", block);
            }
        }
    }
}
