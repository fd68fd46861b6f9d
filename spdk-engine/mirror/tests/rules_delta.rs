//! Rules about stamps and rebuilds that copy only what changed, by number.
#![allow(clippy::unwrap_used)]

mod common;

use common::{Bench, MS, REGION, opened, replica, set, warm, with_bits};
use mirror_core::meta::{RegionBits, Stamp, decode_stamps};
use mirror_core::{Input, LegError, LegId, Op, OpenParams, Payload, SwapReason};

/// First meta block of the stamps of these volumes.
const STAMPS: usize = 3;

fn stamps_of(disk: &[u8]) -> Vec<Option<Stamp>> {
    let mut stamps = decode_stamps(0, &disk[STAMPS * 4096..(STAMPS + 1) * 4096]);
    stamps.truncate(16);
    stamps
}

/// Lets time pass until no region is live.
fn cool(b: &mut Bench) {
    b.advance(5_000 * MS);
    b.settle_io();
    b.settle_meta();
    assert_eq!(b.core.status().live_regions, 0);
}

/// Member b is lost and leaves.
fn without_b(b: &mut Bench) {
    b.lose(1);
    b.advance(1_000 * MS);
    assert_eq!(b.asked().reason, SwapReason::Leave);
    b.commit();
    b.settle_meta();
}

fn add(b: &mut Bench, leg: u32, name: &str, disk: Vec<u8>) {
    b.disks.insert(LegId(leg), disk);
    b.input(Input::AddLeg { leg: LegId(leg), replica: replica(name), local: false, meta: true });
}

/// Runs the rebuild of a leg to its end; gives the regions that were copied to it.
fn rebuild(b: &mut Bench, leg: u32) -> Vec<u64> {
    let mut copied = Vec::new();
    for _ in 0..1000 {
        while let Some(io) = b.ios.first().copied() {
            if io.leg == LegId(leg) && io.op != Op::Flush && matches!(io.payload, Payload::Copy(_)) {
                copied.push(io.lba / REGION);
            }
            b.finish(io, Ok(()));
        }
        b.settle_meta();
        if !b.swaps.is_empty() {
            let joins = b.swaps[0].reason == SwapReason::Join;
            b.commit();
            b.settle_meta();
            if joins {
                break;
            }
        }
    }
    copied.sort_unstable();
    copied.dedup();
    copied
}

/// What the next engine is given: these members with their meta areas.
fn next_engine(members: &[&str], rebuilding: &[&str], disks: &[Vec<u8>], inherited: &[u32]) -> Bench {
    let mut p: OpenParams = with_bits(members, rebuilding, 1, inherited);
    p.config.epoch.0 = 6;
    p.meta.as_mut().unwrap().served = Some(mirror_core::Epoch(5));
    let disks = (0u32..).map(LegId).zip(disks.iter().cloned()).collect();
    let b = Bench::with_disks(p, disks);
    assert!(!b.metas.is_empty());
    b
}

#[test]
fn rule_09_a_region_is_stamped_in_the_step_that_sets_its_bit_and_once() {
    let mut b = opened(&["a", "b"], &[]);
    without_b(&mut b);
    let before = stamps_of(&b.disks[&LegId(0)]);
    let w = b.write(3 * REGION, 1);
    assert_eq!(b.metas.len(), 2, "bits and stamps at the same time");
    let (first, second) = (b.metas[0].clone(), b.metas[1].clone());
    b.finish_meta(&first, Ok(()));
    assert!(b.ios_of(w).is_empty(), "data waits for both");
    b.finish_meta(&second, Ok(()));
    assert_eq!(b.legs_of(w), [0]);
    b.reply_all(w);
    let after = stamps_of(&b.disks[&LegId(0)]);
    let changed: Vec<usize> = (0..16).filter(|r| before[*r] != after[*r]).collect();
    assert_eq!(changed, [3]);
    cool(&mut b);
    let w = b.write(3 * REGION, 1);
    assert_eq!(b.metas.len(), 1, "its stamp is there already");
    b.settle_meta();
    b.reply_all(w);
}

#[test]
fn rule_09_only_what_changed_is_copied_to_a_member_that_was_away() {
    let mut b = opened(&["a", "b"], &[]);
    warm(&mut b, 1);
    cool(&mut b);
    warm(&mut b, 9);
    without_b(&mut b);
    warm(&mut b, 4);
    cool(&mut b);
    let disk = b.disks[&LegId(1)].clone();
    add(&mut b, 2, "b", disk);
    assert_eq!(rebuild(&mut b, 2), [4, 9], "9 was live when it left");
    assert_eq!(b.core.config().in_sync, set(&["a", "b"]));
    assert_eq!(stamps_of(&b.disks[&LegId(2)]), stamps_of(&b.disks[&LegId(0)]), "taken over before the swap");
}

#[test]
fn rule_11_a_superblock_of_another_lineage_means_a_full_copy() {
    let mut b = opened(&["a", "b"], &[]);
    without_b(&mut b);
    let mut disk = b.disks[&LegId(1)].clone();
    let mut superblock = common::superblock("b", 5, "");
    superblock.record.lineage = mirror_core::Lineage::new("other").unwrap();
    superblock.sequence = 9;
    disk[4096..8192].copy_from_slice(&superblock.encode().unwrap());
    add(&mut b, 2, "b", disk);
    assert_eq!(rebuild(&mut b, 2), (0..16).collect::<Vec<_>>());
}

#[test]
fn rule_09_a_replica_without_stamps_gets_everything_and_a_fresh_one_too() {
    let mut b = opened(&["a"], &[]);
    add(&mut b, 1, "b", vec![0; 64 * 4096]);
    assert_eq!(rebuild(&mut b, 1), (0..16).collect::<Vec<_>>());
    let mut b = opened(&["a", "b"], &[]);
    without_b(&mut b);
    let mut disk = b.disks[&LegId(1)].clone();
    disk[STAMPS * 4096 + 20] ^= 1; // The sector of all of its stamps.
    add(&mut b, 2, "b", disk);
    assert_eq!(rebuild(&mut b, 2), (0..16).collect::<Vec<_>>());
}

#[test]
fn rule_08_an_interrupted_rebuild_goes_on_where_it_was_and_copies_again_what_was_written_since() {
    let mut b = opened(&["a", "b"], &[]);
    without_b(&mut b);
    (0..8).for_each(|region| warm(&mut b, region));
    cool(&mut b);
    let disk = b.disks[&LegId(1)].clone();
    add(&mut b, 2, "b", disk);
    b.commit();
    b.settle_meta();
    // All is copied and flushed, and taken over; the swap that adds it never comes.
    b.settle_io();
    b.settle_meta();
    assert_eq!(b.asked().reason, SwapReason::Join);
    let (a, joiner) = (b.disks[&LegId(0)].clone(), b.disks[&LegId(2)].clone());
    // The engine dies; the next one does not reach b at first, and a host writes what was copied.
    let mut b = next_engine(&["a"], &[], &[a], &[]);
    b.settle_meta();
    warm(&mut b, 5);
    cool(&mut b);
    add(&mut b, 1, "b", joiner);
    assert_eq!(rebuild(&mut b, 1), [5]);
}

#[test]
fn rule_09_what_was_copied_and_not_flushed_is_copied_again() {
    let mut b = opened(&["a", "b"], &[]);
    without_b(&mut b);
    (0..8).for_each(|region| warm(&mut b, region));
    cool(&mut b);
    let disk = b.disks[&LegId(1)].clone();
    add(&mut b, 2, "b", disk);
    b.commit();
    b.settle_meta();
    while let Some(io) = b.ios.iter().find(|io| io.op != Op::Flush).copied() {
        b.finish(io, Ok(()));
    }
    let (a, joiner) = (b.disks[&LegId(0)].clone(), b.disks[&LegId(2)].clone());
    let mut b = next_engine(&["a"], &["b"], &[a, joiner], &[]);
    b.settle_meta();
    assert_eq!(rebuild(&mut b, 1), (0..8).collect::<Vec<_>>());
}

#[test]
fn rule_09_inherited_regions_and_its_own_bits_count_as_changed() {
    let mut b = opened(&["a", "b"], &[]);
    warm(&mut b, 2);
    // The engine dies with region 2 live; b is not there.
    let (a, other) = (b.disks[&LegId(0)].clone(), b.disks[&LegId(1)].clone());
    let mut b = next_engine(&["a"], &[], &[a], &[2]);
    b.settle_meta();
    b.settle_io();
    cool(&mut b);
    add(&mut b, 1, "b", other);
    assert_eq!(rebuild(&mut b, 1), [2]);
}

#[test]
fn rule_09_acknowledgements_wait_for_the_new_stamps_of_what_is_live() {
    let mut b = opened(&["a", "b"], &[]);
    let w = b.write(0, 1);
    b.settle_meta();
    b.reply(w, 0, Ok(()));
    b.reply(w, 1, Err(LegError::Media));
    b.commit();
    let (supers, stamps): (Vec<_>, Vec<_>) = b.metas.clone().into_iter().partition(|m| m.superblock().is_some());
    assert_eq!((supers.len(), stamps.len()), (1, 1));
    b.finish_meta(&supers[0], Ok(()));
    assert_eq!(b.result_of(w), None, "b would be taken for equal if all died now");
    b.finish_meta(&stamps[0], Ok(()));
    assert_eq!(b.result_of(w), Some(Ok(())));
}

#[test]
fn rule_08_a_joiner_that_leaves_makes_new_stamps_before_its_swap_is_committed() {
    let mut b = opened(&["a"], &[]);
    add(&mut b, 1, "b", vec![0; 64 * 4096]);
    b.commit();
    b.settle_meta();
    warm(&mut b, 7);
    b.settle_io();
    b.settle_meta();
    assert_eq!(b.asked().reason, SwapReason::Join);
    b.answer(mirror_core::SwapOutcome::Refused { current: b.core.config().clone() });
    let joiner = b.disks[&LegId(1)].clone();
    let before = stamps_of(&joiner)[7];
    b.lose(1);
    b.now += 10_000 * MS;
    b.input(Input::Tick);
    b.settle_io();
    b.settle_meta();
    if b.swaps.is_empty() {
        b.advance(1_000 * MS);
    }
    // Whatever becomes of the swap: region 7 was live, and what is written there now b does not get.
    while !b.swaps.is_empty() {
        b.commit();
        b.settle_meta();
    }
    warm(&mut b, 7);
    assert_ne!(stamps_of(&b.disks[&LegId(0)])[7], before);
}

#[test]
fn one_read_feeds_all_replicas_that_lack_a_region() {
    let mut b = opened(&["a"], &[]);
    add(&mut b, 1, "b", vec![0; 64 * 4096]);
    add(&mut b, 2, "c", vec![0; 64 * 4096]);
    b.commit();
    b.commit();
    b.settle_meta();
    let mut reads = 0;
    let mut writes = RegionBits::empty(64);
    for _ in 0..500 {
        let Some(io) = b.ios.first().copied() else { break };
        reads += u32::from(io.op == Op::Read);
        if matches!(io.op, Op::Write { .. }) {
            writes.insert(io.leg.0 * 20 + (io.lba / REGION) as u32);
        }
        b.finish(io, Ok(()));
    }
    b.settle_meta();
    assert!(reads <= 18, "but for what was under way before the second one was known: {reads}");
    assert_eq!(writes.count(), 32);
    for _ in 0..20 {
        b.settle_meta();
        b.settle_io();
        if !b.swaps.is_empty() {
            b.commit();
        }
    }
    assert_eq!(b.core.config().in_sync, set(&["a", "b", "c"]));
}

#[test]
fn reads_of_a_rebuild_are_spread_over_members() {
    let mut b = opened(&["a", "b"], &[]);
    add(&mut b, 2, "c", vec![0; 64 * 4096]);
    b.commit();
    b.settle_meta();
    let mut legs: Vec<u32> = b.copies().iter().filter(|io| io.op == Op::Read).map(|io| io.leg.0).collect();
    legs.sort_unstable();
    assert_eq!(legs, [0, 1]);
}

#[test]
fn the_status_tells_what_is_copied_and_what_is_not() {
    let mut b = opened(&["a", "b"], &[]);
    without_b(&mut b);
    warm(&mut b, 4);
    cool(&mut b);
    let disk = b.disks[&LegId(1)].clone();
    add(&mut b, 2, "b", disk);
    b.commit();
    b.settle_meta();
    let rebuilds = b.core.status().rebuilds;
    assert_eq!((rebuilds[0].copied, rebuilds[0].total, rebuilds[0].skipped), (0, 4, 60));
}
