//! Creation, reads and writes, members that leave, errors, sizes.

use nvme_wire::Status;
use serde_json::{Value, json};

use super::*;
use crate::bdev::{Bufs, IoOp};
use blobstore_format::raid::MemberState;

#[test]
fn a_raid_with_superblocks_is_made_as_the_format_says() {
    let disks = media(2);
    let mut world = world_with(&disks);
    create(&mut world, 2);
    let shown = raid(&mut world);
    assert_eq!(shown["state"], "online");
    assert_eq!(shown["base_bdevs_list"][1]["data_offset"], DATA_OFFSET);
    assert_eq!(shown["base_bdevs_list"][1]["data_size"], DATA);
    for (slot, disk) in disks.iter().enumerate() {
        let sb = superblock(disk);
        assert_eq!((sb.seq_number, sb.raid_size, sb.block_size, sb.members.len()), (1, DATA, 4096, 2));
        assert_eq!((sb.members[slot].uuid, sb.members[slot].slot), (disk.uuid, slot as u8));
        assert_eq!(sb.uuid.to_string(), shown["uuid"]);
    }
    let handle = world.open("r", 1);
    let write = handle.write(3, 4, 7);
    world.until(|| write.status().is_some());
    assert_eq!(write.status(), Some(Status::SUCCESS));
    assert_eq!(disks[0].blocks(DATA_OFFSET + 3..DATA_OFFSET + 7), vec![7; 4 * 4096]);
    assert!(same_data(&[&disks[0], &disks[1]]));
    let zeroes = handle.begin(IoOp::Unmap, 3, 2, Bufs::new());
    let flush = handle.begin(IoOp::Flush, 0, 0, Bufs::new());
    let reset = handle.begin(IoOp::Reset, 0, 0, Bufs::new());
    world.until(|| [&zeroes, &flush, &reset].iter().all(|io| io.status() == Some(Status::SUCCESS)));
    assert_eq!(disks[1].blocks(DATA_OFFSET + 3..DATA_OFFSET + 5), vec![0; 2 * 4096]);
    handle.close();

    assert_eq!(world.ok("bdev_raid_delete", json!({ "name": "r", "clear_sb": true })), json!(true));
    assert!(disks.iter().all(|disk| disk.blocks(0..2) == vec![0; 8192]));
    assert_eq!(world.ok("bdev_raid_get_bdevs", json!({ "category": "all" })), json!([]));
    assert!(world.app.registry().claimed_by("d0").is_none());
}

#[test]
fn refused_calls_leave_nothing_behind() {
    let disks = media(3);
    let mut world = world_with(&disks);
    create(&mut world, 2);
    let create = |members: Value| json!({ "name": "s", "raid_level": "1", "base_bdevs": members });
    let mut refused = |params: Value, code: i64| {
        let error = world.call("bdev_raid_create", params.clone()).unwrap_err();
        assert_eq!(error.code, code, "{params} {error:?}");
    };
    refused(create(json!(["d2", "d1"])), -1);
    refused(create(json!(["d2"])), -22);
    refused(json!({ "name": "s", "raid_level": "raid9", "base_bdevs": ["d2", "x"] }), -32700);
    refused(json!({ "name": "s", "raid_level": "raid1", "base_bdevs": ["d2", "x"], "strip_size_kb": 4 }), -22);
    refused(json!({ "name": "s".repeat(64), "raid_level": "raid1", "base_bdevs": ["d2", "x"] }), -22);
    refused(json!({ "name": "r", "raid_level": "raid1", "base_bdevs": ["d2", "x"] }), -17);
    assert!(world.app.registry().claimed_by("d2").is_none());
    world.ok("bdev_raid_remove_base_bdev", json!({ "name": "d1" }));
    let error = world.call("bdev_raid_create", create(json!(["d2", "d1"]))).unwrap_err();
    assert_eq!(error.code, -17, "a member of another raid: {error:?}");
    assert!(world.app.registry().claimed_by("d2").is_none());
    assert_eq!(superblock(&disks[1]).seq_number, 1, "a refused disk keeps what it has");
}

#[test]
fn absent_members_are_awaited_by_name() {
    let disks = media(2);
    let mut world = world();
    let params = json!({ "name": "r", "raid_level": "raid1", "base_bdevs": ["d0", "d1"] });
    assert_eq!(world.ok("bdev_raid_create", params), json!(true));
    assert_eq!(raid(&mut world)["state"], "configuring");
    world.add_disk("d1", &disks[1]);
    assert_eq!(raid(&mut world)["num_base_bdevs_discovered"], 1);
    world.add_disk("d0", &disks[0]);
    let shown = raid(&mut world);
    assert_eq!((&shown["state"], &shown["superblock"]), (&json!("online"), &json!(false)));
    assert_eq!(shown["base_bdevs_list"][0]["data_offset"], 0);
    let saved = world.saved("bdev");
    assert_eq!(saved[1].1["base_bdevs"], json!(["d0", "d1"]));
    world.pull_disk("d0");
    assert_eq!(world.saved("bdev")[1].1["base_bdevs"], json!(["removed_base_bdev_0", "d1"]));
}

#[test]
fn a_write_that_a_member_fails_is_answered_once_the_others_say_so() {
    let disks = media(3);
    let mut world = world_with(&disks);
    create(&mut world, 3);
    disks[1].fail_writes();
    let handles = [world.open("r", 1), world.open("r", 2)];
    let writes = [handles[0].write(0, 2, 1), handles[1].write(8, 2, 2), handles[0].write(16, 2, 3)];
    while writes.iter().any(|w| w.status().is_none()) {
        world.round();
        if writes.iter().any(|w| w.status() == Some(Status::SUCCESS)) {
            assert_eq!(superblock(&disks[0]).members[1].state, MemberState::Failed);
        }
    }
    assert!(writes.iter().all(|w| w.status() == Some(Status::SUCCESS)));
    let shown = raid(&mut world);
    assert_eq!(shown["num_base_bdevs_operational"], 2);
    assert_eq!(shown["base_bdevs_list"][1]["name"], Value::Null);
    assert_eq!(shown["base_bdevs_list"][1]["data_size"], DATA);
    assert!(same_data(&[&disks[0], &disks[2]]));
    assert_eq!(superblock(&disks[1]).seq_number, 1);
}

#[test]
fn the_last_member_is_kept_whatever_fails() {
    let disks = media(2);
    let mut world = world_with(&disks);
    create(&mut world, 2);
    disks.iter().for_each(|disk| disk.fail_writes());
    let handle = world.open("r", 1);
    let write = handle.write(0, 1, 1);
    world.until(|| write.status().is_some());
    assert!(!write.status().unwrap().is_success());
    world.rounds(200);
    let shown = raid(&mut world);
    assert_eq!((&shown["state"], &shown["num_base_bdevs_operational"]), (&json!("online"), &json!(1)));
    disks.iter().for_each(|disk| disk.heal());
    let write = handle.write(0, 1, 1);
    world.until(|| write.status().is_some());
    assert_eq!(write.status(), Some(Status::SUCCESS));
    handle.close();
    world.ok("bdev_raid_remove_base_bdev", json!({ "name": "d1" }));
    assert_eq!(world.ok("bdev_raid_get_bdevs", json!({ "category": "all" })), json!([]));
}

#[test]
fn a_read_is_answered_by_another_member_and_the_blocks_are_corrected() {
    let disks = media(2);
    let mut world = world_with(&disks);
    create(&mut world, 2);
    let handle = world.open("r", 1);
    let write = handle.write(0, 8, 9);
    world.until(|| write.status().is_some());
    disks[0].put(DATA_OFFSET + 2, &[0; 4096]);
    disks[0].fail_reads(DATA_OFFSET + 2..DATA_OFFSET + 3);
    let read = handle.read(0, 8);
    world.until(|| read.status().is_some());
    assert_eq!((read.status(), read.bytes()), (Some(Status::SUCCESS), vec![9; 8 * 4096]));
    world.until(|| disks[0].blocks(DATA_OFFSET + 2..DATA_OFFSET + 3) == vec![9; 4096]);
    assert_eq!(raid(&mut world)["num_base_bdevs_operational"], 2);

    disks[0].fail_writes();
    let read = handle.read(0, 8);
    world.until(|| read.status().is_some());
    assert_eq!(read.status(), Some(Status::SUCCESS));
    while raid(&mut world)["num_base_bdevs_operational"] != 1 {
        world.round();
    }
    disks[1].fail_reads(0..u64::MAX);
    let read = handle.read(0, 8);
    world.until(|| read.status().is_some());
    assert_eq!(read.status(), Some(Status::UNRECOVERED_READ_ERROR));
    world.rounds(200);
    assert_eq!(raid(&mut world)["num_base_bdevs_operational"], 1);
}

#[test]
fn reads_go_to_the_less_busy_member() {
    let disks = media(2);
    let mut world = world_with(&disks);
    create(&mut world, 2);
    let handle = world.open("r", 1);
    // The raid itself is examined, which reads.
    world.rounds(100);
    let before: Vec<u64> = disks.iter().map(|d| d.count.load(std::sync::atomic::Ordering::Relaxed)).collect();
    let reads: Vec<_> = (0..16).map(|n| handle.read(n, 1)).collect();
    world.until(|| reads.iter().all(|r| r.status().is_some()));
    let after: Vec<u64> = disks.iter().map(|d| d.count.load(std::sync::atomic::Ordering::Relaxed)).collect();
    assert_eq!((after[0] - before[0], after[1] - before[1]), (8, 8));
}

#[test]
fn the_raid_grows_with_its_smallest_member() {
    let disks = media(2);
    let mut world = world_with(&disks);
    create(&mut world, 2);
    let seq = superblock(&disks[0]).seq_number;
    for (index, expected) in [(0, DATA), (1, DATA + 32)] {
        disks[index].grow(DATA_OFFSET + DATA + 32);
        world.app.registry().resized(&format!("d{index}"));
        world.rounds(200);
        assert_eq!(world.app.registry().find("r").unwrap().bdev.num_blocks(), expected);
    }
    let sb = superblock(&disks[1]);
    assert_eq!((sb.raid_size, sb.members[0].data_size, sb.seq_number), (DATA + 32, DATA + 32, seq + 1));
    let handle = world.open("r", 2);
    let write = handle.write(DATA + 30, 2, 5);
    world.until(|| write.status().is_some());
    assert_eq!(write.status(), Some(Status::SUCCESS));
}

#[test]
fn pulling_the_disks_one_by_one_ends_the_raid_with_the_last() {
    let disks = media(3);
    let mut world = world_with(&disks);
    create(&mut world, 3);
    let handle = world.open("r", 1);
    for (index, left) in [(0, 2), (2, 1)] {
        world.pull_disk(&format!("d{index}"));
        assert_eq!(raid(&mut world)["num_base_bdevs_operational"], left);
        let write = handle.write(index, 1, index as u8 + 1);
        world.until(|| write.status().is_some());
        assert_eq!(write.status(), Some(Status::SUCCESS));
    }
    assert_eq!(superblock(&disks[1]).members[2].state, MemberState::Missing);
    handle.close();
    world.pull_disk("d1");
    world.rounds(200);
    assert!(world.app.registry().find("r").is_none());
}
