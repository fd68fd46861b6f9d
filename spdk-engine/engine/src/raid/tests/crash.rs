//! Members lost, and the machine lost, at every step of a raid's life.

use std::rc::Rc;
use std::sync::atomic::Ordering;

use nvme_wire::Status;
use serde_json::json;

use super::*;
use crate::testing::Pending;

/// What a host knows: the last byte that was answered for each block, and those on their way.
#[derive(Default)]
struct Writes {
    running: Vec<(Rc<Pending>, u64, u8)>,
    answered: Vec<(u64, u8)>,
    begun: Vec<(u64, u8)>,
}

impl Writes {
    fn collect(&mut self) {
        let answered = &mut self.answered;
        self.running.retain(|(pending, block, byte)| match pending.status() {
            None => true,
            Some(status) => {
                if status == Status::SUCCESS {
                    answered.push((*block, *byte));
                }
                false
            }
        });
    }

    /// What a block may hold: the last answered, or anything that was begun after it.
    fn allows(&self, block: u64, byte: u8) -> bool {
        let last = self.answered.iter().rev().find(|(b, _)| *b == block).map_or(0, |(_, byte)| *byte);
        let later = self.begun.iter().filter(|(b, _)| *b == block).map(|(_, byte)| *byte);
        byte == last || later.skip_while(|b| *b != last && last != 0).any(|b| b == byte)
    }
}

/// Runs a raid's life for `steps` rounds: writes, a member that is removed, one that is added and rebuilt; `at` a step
/// `event` happens.
fn live(disks: &[Arc<Medium>], steps: u64, at: u64, event: impl Fn(&mut World)) -> (World, Writes) {
    let mut world = world_with(disks);
    world.ok("bdev_raid_set_options", json!({ "process_window_size_kb": 32 }));
    create(&mut world, 3);
    let handles = [world.open("r", 1), world.open("r", 2)];
    disks.iter().for_each(|disk| disk.late_ns.store(30_000, Ordering::Relaxed));
    let mut writes = Writes::default();
    for step in 0..steps {
        if step == at {
            event(&mut world);
        }
        if step == 40 {
            world.begin("bdev_raid_remove_base_bdev", json!({ "name": "d0" }));
        }
        if step == 160 {
            world.begin("bdev_raid_add_base_bdev", json!({ "raid_bdev": "r", "base_bdev": "d3" }));
        }
        let (block, byte) = (step * 7 % DATA, 1 + (step % 251) as u8);
        if !writes.running.iter().any(|(_, b, _)| *b == block) {
            writes.begun.push((block, byte));
            writes.running.push((handles[step as usize % 2].write(block, 1, byte), block, byte));
        }
        world.round();
        writes.collect();
    }
    (world, writes)
}

fn check(world: &mut World, writes: &Writes, when: u64) {
    let handle = world.open("r", 1);
    for core_reads in 0..3 {
        for block in 0..DATA {
            let read = handle.read(block, 1);
            world.until(|| read.status().is_some());
            assert_eq!(read.status(), Some(Status::SUCCESS), "step {when}, block {block}");
            let bytes = read.bytes();
            assert!(
                bytes.iter().all(|b| *b == bytes[0]) && writes.allows(block, bytes[0]),
                "step {when}, read {core_reads}, block {block} holds {} of {:?}",
                bytes[0],
                writes.begun.iter().filter(|(b, _)| *b == block).collect::<Vec<_>>()
            );
        }
    }
    handle.close();
}

#[test]
fn nothing_answered_is_lost_when_a_member_fails_at_any_step() {
    for at in (1..420).step_by(29) {
        for victim in [1, 2, 3] {
            let disks = media(4);
            let failing = Arc::clone(&disks[victim]);
            let (mut world, mut writes) = live(&disks, 420, at, move |_| failing.fail_writes());
            world.until(|| {
                writes.collect();
                writes.running.is_empty()
            });
            until_rebuilt(&mut world);
            check(&mut world, &writes, at);
        }
    }
}

#[test]
fn nothing_answered_is_lost_when_a_member_is_pulled_at_any_step() {
    for at in (1..420).step_by(31) {
        for victim in ["d1", "d2", "d3"] {
            let disks = media(4);
            let (mut world, mut writes) = live(&disks, 420, at, |world| {
                let (app, name) = (world.app.clone(), victim.to_owned());
                world.start(async move { app.registry().unregister(app.core(), &name).await });
            });
            world.until(|| {
                writes.collect();
                writes.running.is_empty()
            });
            until_rebuilt(&mut world);
            check(&mut world, &writes, at);
        }
    }
}

/// Stops the machine after `steps` and finds the raid again, in several orders.
fn stop_and_find(steps: u64, fails: Option<(usize, u64)>) {
    let disks = media(4);
    let (world, writes) = live(&disks, steps, fails.map_or(0, |(_, at)| at), |_| {
        if let Some((index, _)) = fails {
            disks[index].fail_writes();
        }
    });
    drop(world);
    disks.iter().for_each(|disk| disk.heal());
    for order in [[0, 1, 2, 3], [3, 2, 1, 0]] {
        let copies: Vec<_> = disks.iter().map(|disk| disk.copy()).collect();
        let mut world = super::world();
        for index in order {
            world.add_disk(&format!("d{index}"), &copies[index]);
        }
        check(&mut world, &writes, steps);
        until_rebuilt(&mut world);
        check(&mut world, &writes, steps);
    }
}

#[test]
fn nothing_answered_is_lost_when_the_machine_stops_at_any_step() {
    (1..420).step_by(23).for_each(|steps| stop_and_find(steps, None));
}

#[test]
fn nothing_answered_is_lost_when_the_machine_stops_soon_after_a_member_has_failed() {
    for at in [10, 120, 180] {
        (1..=14).for_each(|later| stop_and_find(at + later, Some((1, at))));
    }
}
