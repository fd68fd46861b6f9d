//! Superblocks, joiners and meta areas that fail, by number.
#![allow(clippy::unwrap_used)]

mod common;

use common::{Bench, MS, Meta, REGION, opened, params, replica, set, warm, with_bits};
use mirror_core::meta::ReplicaState;
use mirror_core::{
    ConfigNumber, Core, CoreError, DropReason, Epoch, Event, Input, LegError, LegId, MetaOp, Op, SwapReason,
};

fn add(b: &mut Bench, leg: u32, name: &str) {
    b.input(Input::AddLeg { leg: LegId(leg), replica: replica(name), local: false, meta: true });
}

#[test]
fn rule_09_a_joiner_has_live_and_inherited_bits_before_the_swap_that_adds_it() {
    let mut b = opened(&["a", "b"], &[7]);
    warm(&mut b, 0);
    b.lose(1); // Keeps region 7 from being made equal.
    add(&mut b, 2, "c");
    b.commit();
    let mine: Vec<Meta> = b.metas.iter().filter(|m| m.leg == LegId(2)).cloned().collect();
    assert!(matches!(mine[0].op, MetaOp::Read { block: 0, blocks: 3 }));
    b.finish_meta(&mine[0], Ok(()));
    let stamps = b.metas.iter().find(|m| m.leg == LegId(2)).cloned().unwrap();
    assert!(matches!(stamps.op, MetaOp::Read { block: 3, blocks: 1 }));
    b.finish_meta(&stamps, Ok(()));
    b.settle_io();
    assert!(b.swaps.is_empty(), "copied and flushed, but without bits");
    let bits = b.metas.iter().find(|m| m.leg == LegId(2)).cloned().unwrap();
    assert_eq!(bits.bits(), Some(vec![0, 7]));
    b.finish_meta(&bits, Ok(()));
    assert!(b.swaps.is_empty());
    let mut mine = b.metas.iter().filter(|m| m.leg == LegId(2)).cloned();
    let (stamps, superblock) = (mine.next().unwrap(), mine.next().unwrap());
    assert_eq!(superblock.superblock().unwrap().state, ReplicaState::Rebuilding);
    b.finish_meta(&superblock, Ok(()));
    assert!(b.swaps.is_empty(), "and without stamps");
    assert!(matches!(stamps.op, MetaOp::Write { block: 3, .. }));
    b.finish_meta(&stamps, Ok(()));
    assert_eq!((b.asked().reason, b.asked().next.in_sync.len()), (SwapReason::Join, 3));
    b.commit();
    let member = b.metas.iter().find_map(|m| m.superblock().filter(|_| m.leg == LegId(2))).unwrap();
    assert_eq!((member.state, member.record.config_number), (ReplicaState::Member, b.core.config().config_number));
}

#[test]
fn rule_09_new_bits_wait_for_a_joiner_too() {
    let mut b = Bench::new(with_bits(&["a"], &["b"], 1, &[]));
    b.settle_meta();
    let w = b.write(60, 1);
    assert_eq!(b.bit_writes(), [(0, vec![15]), (1, vec![15])]);
    let metas = b.metas.clone();
    b.finish_meta(&metas[0], Ok(()));
    assert!(b.ios_of(w).is_empty());
    b.finish_meta(&metas[1], Ok(()));
    assert_eq!(b.legs_of(w), [0, 1]);
    assert_eq!(b.core.dirty_regions().unwrap().iter().collect::<Vec<_>>(), [15], "to be stamped when k changes");
}

#[test]
fn rule_06_acknowledgements_wait_until_the_survivors_carry_the_record() {
    let mut b = opened(&["a", "b", "c"], &[]);
    warm(&mut b, 0);
    let w = b.write(0, 1);
    b.reply(w, 0, Ok(()));
    b.reply(w, 1, Err(LegError::Media));
    b.reply(w, 2, Ok(()));
    b.commit();
    assert_eq!(b.result_of(w), None, "committed, but no survivor knows");
    for stamps in b.metas.clone().iter().filter(|m| m.superblock().is_none()) {
        b.finish_meta(stamps, Ok(()));
    }
    let supers = b.metas.clone();
    assert_eq!(supers.iter().map(|m| m.leg.0).collect::<Vec<_>>(), [0, 2]);
    let says = supers[0].superblock().unwrap();
    assert_eq!(
        (says.record.config_number, says.record.epoch, says.record.in_sync),
        (ConfigNumber(11), Epoch(5), set(&["a", "c"]))
    );
    b.finish_meta(&supers[0], Ok(()));
    assert_eq!(b.result_of(w), None);
    b.finish_meta(&supers[1], Ok(()));
    assert_eq!(b.result_of(w), Some(Ok(())));
}

#[test]
fn rule_06_superblocks_alternate_between_slots_and_rise() {
    let mut b = Bench::new(with_bits(&["a", "b"], &[], 1, &[]));
    let mut seen = Vec::new();
    for _ in 0..40 {
        let Some(meta) = b.metas.first().cloned() else { break };
        if let (MetaOp::Write { block, .. }, Some(s), LegId(0)) = (&meta.op, meta.superblock(), meta.leg) {
            seen.push((*block, s.sequence, s.state));
        }
        b.finish_meta(&meta, Ok(()));
    }
    assert_eq!(seen, [(1, 1, ReplicaState::Member)]);
    b.input(Input::RemoveLeg { leg: LegId(1) });
    b.commit();
    let next = b.metas[0].clone();
    assert!(matches!(next.op, MetaOp::Write { block: 0, .. }) && next.superblock().unwrap().sequence == 2);
}

#[test]
fn rule_06_the_first_acknowledgement_waits_for_the_superblocks_of_this_engine() {
    let mut b = Bench::new(with_bits(&["a", "b"], &[], 1, &[]));
    let f = b.host(Op::Flush, 0, 0);
    b.reply_all(f);
    assert_eq!(b.result_of(f), None);
    let reads = b.metas.clone();
    reads.iter().for_each(|m| b.finish_meta(m, Ok(())));
    let later = b.metas.clone();
    assert!(later.iter().all(|m| m.superblock().is_none()), "bits and stamps first: a superblock vouches for them");
    later.iter().for_each(|m| b.finish_meta(m, Ok(())));
    assert_eq!(b.result_of(f), None);
    b.settle_meta();
    assert_eq!(b.result_of(f), Some(Ok(())));
}

/// b leaves as its meta area fails; then a's superblock fails, which cannot leave. A write is in flight on a.
fn survivor_without_superblock() -> (Bench, mirror_core::HostId) {
    let mut b = opened(&["a", "b"], &[]);
    let w = b.write(0, 1);
    let metas = b.metas.clone();
    b.finish_meta(&metas[0], Ok(()));
    b.finish_meta(&metas[1], Err(LegError::Media));
    assert_eq!(b.asked().next.in_sync, set(&["a"]));
    assert!(b.ios_of(w).is_empty());
    b.commit();
    assert_eq!(b.drops, [(LegId(1), DropReason::MetaFailed(LegError::Media))]);
    assert_eq!(b.legs_of(w), [0]);
    for meta in b.metas.clone() {
        b.finish_meta(&meta, Err(LegError::Media)); // Superblock and stamps.
    }
    assert!(b.has_event(|e| matches!(e, Event::MetaFailed { leg: LegId(0), .. })));
    b.reply_all(w);
    (b, w)
}

#[test]
fn rule_06_a_last_member_that_cannot_carry_the_record_acknowledges_nothing_until_it_does() {
    let (mut b, w) = survivor_without_superblock();
    let cold = b.write(40, 1);
    b.reply_all(cold);
    assert_eq!((b.result_of(w), b.result_of(cold)), (None, None), "an old copy of the record knows b as a member");
    assert!(b.core.status().frozen && b.metas.is_empty());
    let read = b.read(60, 1);
    b.reply_all(read);
    assert_eq!(b.result_of(read), Some(Ok(())));
    // It is tried again by itself, and again.
    b.now = b.wake.unwrap();
    b.input(Input::Tick);
    let again = b.metas[0].clone();
    b.finish_meta(&again, Err(LegError::Media));
    b.now = b.wake.unwrap();
    b.input(Input::Tick);
    assert_eq!(b.result_of(w), None);
    b.settle_meta();
    b.reply_all(cold); // It has waited for its stamp: else b could be taken for equal one day.
    assert_eq!((b.result_of(w), b.result_of(cold)), (Some(Ok(())), Some(Ok(()))));
    assert!(!b.core.status().frozen);
}

#[test]
fn rule_06_a_last_member_without_its_bits_goes_on_as_long_as_it_carries_the_record() {
    let mut b = opened(&["a"], &[]);
    let w = b.write(0, 1);
    let bits = b.metas[0].clone();
    b.finish_meta(&bits, Err(LegError::Media));
    b.reply_all(w);
    assert_eq!(b.result_of(w), Some(Ok(())), "there is nobody it could differ from");
}

#[test]
fn rule_06_a_new_replica_takes_the_place_of_one_that_cannot_carry_the_record() {
    let (mut b, w) = survivor_without_superblock();
    add(&mut b, 2, "c");
    for _ in 0..300 {
        b.now = b.wake.unwrap_or(b.now).max(b.now + MS);
        b.input(Input::Tick);
        for meta in b.metas.clone() {
            let result = if meta.leg == LegId(0) { Err(LegError::Media) } else { Ok(()) };
            b.finish_meta(&meta, result);
        }
        b.settle_io();
        if !b.swaps.is_empty() {
            b.commit();
        }
    }
    assert_eq!(b.core.config().in_sync, set(&["c"]));
    assert_eq!(b.result_of(w), Some(Ok(())));
}

#[test]
fn rule_21_a_close_that_no_meta_area_carries_is_not_clean() {
    let mut b = opened(&["a"], &[]);
    b.input(Input::LegInstance { leg: LegId(0), instance: "a2".to_owned() });
    let superblock = b.metas[0].clone();
    b.finish_meta(&superblock, Err(LegError::Media));
    b.input(Input::Close);
    b.settle_io();
    assert!(b.closed && b.swaps.is_empty(), "{:?}", b.swaps);
}

#[test]
fn rule_01_an_instance_without_room_in_a_superblock_tells_nothing_and_freezes_nothing() {
    let mut p = with_bits(&["a", "b"], &[], 1, &[]);
    p.legs[0].instance = "x".repeat(200);
    p.legs[1].instance = "b1".to_owned();
    let mut b = Bench::new(p);
    let mut named = Vec::new();
    while let Some(meta) = b.metas.first().cloned() {
        named.extend(meta.superblock().map(|s| s.instance));
        b.finish_meta(&meta, Ok(()));
    }
    assert_eq!(named, [String::new(), "b1".to_owned()]);
    let f = b.host(Op::Flush, 0, 0);
    b.reply_all(f);
    assert_eq!(b.result_of(f), Some(Ok(())));
    b.input(Input::LegInstance { leg: LegId(1), instance: "y".repeat(200) });
    assert!(b.metas.iter().filter_map(Meta::superblock).all(|s| s.instance.is_empty()) && !b.metas.is_empty());
}

#[test]
fn rule_06_a_frozen_volume_with_cold_writes_is_healed_by_a_new_replica() {
    let mut b = Bench::new(with_bits(&["a", "b"], &[], 2, &[3]));
    b.settle_meta();
    warm(&mut b, 0);
    b.lose(1);
    let (hot, cold, inherited) = (b.write(0, 1), b.write(20, 1), b.write(3 * REGION, 1));
    b.reply_all(hot);
    b.advance(20_000 * MS);
    assert!(b.core.status().frozen && b.done.len() == 1);
    add(&mut b, 2, "c");
    b.commit();
    for _ in 0..200 {
        b.settle_meta();
        b.settle_io();
        if !b.swaps.is_empty() {
            b.commit();
        }
    }
    assert_eq!(b.core.config().in_sync, set(&["a", "c"]));
    assert!([hot, cold, inherited].iter().all(|w| b.result_of(*w) == Some(Ok(()))), "{:?}", b.done);
}

#[test]
fn close_clears_the_bits_and_tells_the_superblocks_before_the_swap() {
    let mut b = opened(&["a", "b"], &[]);
    warm(&mut b, 3);
    b.input(Input::Close);
    b.settle_io();
    assert!(b.swaps.is_empty());
    assert_eq!(b.bit_writes(), [(0, vec![]), (1, vec![])]);
    let states: Vec<_> = b.metas.iter().filter_map(Meta::superblock).map(|s| s.state).collect();
    assert_eq!(states, [ReplicaState::ClosedClean; 2]);
    b.settle_meta();
    assert!(b.asked().next.clean);
    b.commit();
    assert!(b.closed);
}

#[test]
fn legs_without_a_meta_area_are_left_alone() {
    let mut p = with_bits(&["a", "b"], &[], 1, &[]);
    p.legs[1].meta = false;
    let mut b = Bench::new(p);
    b.settle_meta();
    let w = b.write(0, 1);
    assert_eq!(b.bit_writes(), [(0, vec![0])]);
    b.settle_meta();
    assert_eq!(b.legs_of(w), [0, 1]);
    let mut b = Bench::of(&["a", "b"]);
    add(&mut b, 2, "c");
    b.commit();
    b.settle_io();
    assert!(b.metas.is_empty() && b.asked().reason == SwapReason::Join, "opened without any");
}

#[test]
fn parameters_of_meta_areas_that_contradict_each_other_are_refused() {
    let mut p = with_bits(&["a"], &[], 1, &[]);
    p.options.region_blocks = 3;
    assert!(matches!(Core::open(p).err(), Some(CoreError::Meta(_))));
    let mut p = with_bits(&["a"], &[], 1, &[]);
    p.options.region_blocks = 8;
    assert_eq!(Core::open(p).err(), Some(CoreError::Regions { given: 16, regions: 8 }));
    let mut p = with_bits(&["a", "b"], &[], 2, &[]);
    p.equalise_from = Some(LegId(0));
    assert_eq!(Core::open(p).err(), Some(CoreError::EqualiseWithBits(0)));
    let mut p = params(&["a"], &[], 1);
    p.options.live_regions_max = 0;
    assert!(matches!(Core::open(p).err(), Some(CoreError::Bound { name: "live_regions_max", .. })));
}
