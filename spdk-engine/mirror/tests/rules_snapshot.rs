//! Snapshots (rule 19): what the core holds back, whom it asks, what it records.
#![allow(clippy::unwrap_used)]

mod common;

use common::{Bench, MS, opened, params, replica, set, warm};
use mirror_core::{
    DropReason, HostError, Input, LegError, LegId, Op, Options, SnapshotError, SnapshotId, SwapOutcome, SwapReason,
    TreeVersion,
};

const HOLD: u64 = 5_000 * MS;

fn id(name: &str) -> SnapshotId {
    SnapshotId::new(name).unwrap()
}

fn begin(b: &mut Bench, name: &str) {
    b.input(Input::SnapshotBegin { id: id(name), hold_ns: HOLD });
}

fn taken(b: &mut Bench, name: &str, by: &[&str]) {
    b.input(Input::SnapshotTaken { id: id(name), replicas: set(by) });
}

fn ended(b: &Bench) -> Option<Result<TreeVersion, SnapshotError>> {
    b.snapshots.last().map(|(_, result)| result.clone())
}

/// Two members, settled, region 0 hot.
fn two() -> Bench {
    let mut b = opened(&["a", "b"], &[]);
    warm(&mut b, 0);
    b
}

/// A snapshot that members are to take now.
fn held(b: &mut Bench, name: &str) {
    begin(b, name);
    b.settle_io();
    assert_eq!(b.held.last().map(|(held, _)| held.clone()), Some(id(name)));
}

#[test]
fn changes_in_flight_are_finished_and_flushed_before_members_are_asked_and_later_ones_wait() {
    let mut b = two();
    let before = b.write(0, 1);
    begin(&mut b, "s");
    let (after, flush) = (b.write(1, 1), b.host(Op::Flush, 0, 0));
    let read = b.read(2, 1);
    assert_eq!(b.legs_of(before), [0, 1]);
    assert!(b.ios_of(after).is_empty() && b.ios_of(flush).is_empty() && b.held.is_empty());
    assert_eq!(b.ios_of(read).len(), 1, "reads change nothing");
    b.reply_all(before);
    assert!(b.held.is_empty(), "not flushed");
    let flushes: Vec<_> = b.ios.iter().filter(|io| io.op == Op::Flush).copied().collect();
    assert_eq!(flushes.len(), 2);
    b.finish(flushes[0], Ok(()));
    assert!(b.held.is_empty());
    b.finish(flushes[1], Ok(()));
    assert_eq!(b.held, [(id("s"), vec![replica("a"), replica("b")])]);
    taken(&mut b, "s", &["a", "b"]);
    assert!(b.ios_of(after).is_empty(), "nothing is written before the record names it");
    let asked = b.asked().clone();
    assert_eq!((asked.reason, asked.next.tree.version), (SwapReason::Snapshot, TreeVersion(1)));
    assert_eq!(asked.next.config_number, asked.expect.config_number.next());
    let last = asked.next.tree.last.clone().unwrap();
    assert_eq!((last.id, last.replicas), (id("s"), set(&["a", "b"])));
    b.commit();
    assert_eq!(ended(&b), Some(Ok(TreeVersion(1))));
    assert_eq!((b.legs_of(after), b.legs_of(flush)), (vec![0, 1], vec![0, 1]));
    b.settle_meta();
    b.settle_io();
    assert_eq!((b.result_of(after), b.result_of(flush)), (Some(Ok(())), Some(Ok(()))));
}

#[test]
fn superblocks_carry_the_trees_version() {
    let mut b = two();
    held(&mut b, "s");
    taken(&mut b, "s", &["a", "b"]);
    b.commit();
    let written: Vec<_> = b.metas.iter().filter_map(|m| m.superblock()).collect();
    assert!(!written.is_empty() && written.iter().all(|s| s.record.tree.version == TreeVersion(1)));
}

#[test]
fn rule_19_none_while_regions_are_inherited() {
    let mut b = opened(&["a", "b"], &[3]);
    begin(&mut b, "s");
    assert_eq!(ended(&b), Some(Err(SnapshotError::Unequal { regions: 1 })));
    let w = b.write(0, 1);
    b.settle_meta();
    b.settle_io();
    assert_eq!(b.result_of(w), Some(Ok(())), "nothing is held");
    begin(&mut b, "t");
    b.settle_io();
    assert_eq!(b.held.len(), 1, "they are equal by now");
}

#[test]
fn rule_19_none_while_members_are_copied_in_full() {
    let mut p = params(&["a", "b"], &[], 2);
    p.equalise_from = Some(LegId(0));
    let mut b = Bench::new(p);
    begin(&mut b, "s");
    assert_eq!(ended(&b), Some(Err(SnapshotError::Unequal { regions: 0 })));
}

#[test]
fn rule_19_a_member_that_missed_it_leaves_before_the_record_names_it() {
    let mut b = opened(&["a", "b", "c"], &[]);
    warm(&mut b, 0);
    held(&mut b, "s");
    let w = b.write(0, 1);
    taken(&mut b, "s", &["a", "c"]);
    let asked = b.asked().clone();
    assert_eq!(
        (asked.reason, asked.next.in_sync, asked.next.tree.version),
        (SwapReason::Leave, set(&["a", "c"]), TreeVersion(0))
    );
    b.commit();
    assert!(b.drops.contains(&(LegId(1), DropReason::SnapshotMissed)));
    assert!(b.ios_of(w).is_empty());
    assert_eq!(b.asked().reason, SwapReason::Snapshot);
    b.commit();
    assert_eq!(ended(&b), Some(Ok(TreeVersion(1))));
    assert_eq!(b.core.config().tree.last.as_ref().unwrap().replicas, set(&["a", "c"]));
    assert_eq!(b.legs_of(w), [0, 2]);
}

#[test]
fn a_member_that_may_not_leave_undoes_the_snapshot() {
    let mut b = Bench::new(common::with_bits(&["a", "b"], &[], 2, &[]));
    b.settle_meta();
    warm(&mut b, 0);
    held(&mut b, "s");
    let w = b.write(0, 1);
    taken(&mut b, "s", &["a"]);
    assert_eq!(ended(&b), Some(Err(SnapshotError::MayNotShrink { missed: vec![replica("b")] })));
    assert!(b.swaps.is_empty());
    assert_eq!(b.legs_of(w), [0, 1]);
    held(&mut b, "t");
    taken(&mut b, "t", &[]);
    assert_eq!(ended(&b), Some(Err(SnapshotError::NobodyTookIt)));
}

#[test]
fn rule_12_an_engine_that_is_cut_off_ejects_nobody_for_missing_a_snapshot() {
    let mut b = opened(&["a", "b", "c"], &[]);
    warm(&mut b, 0);
    held(&mut b, "s");
    (0..3).for_each(|leg| b.lose(leg));
    taken(&mut b, "s", &["a"]);
    let missed = vec![replica("b"), replica("c")];
    assert_eq!(ended(&b), Some(Err(SnapshotError::MayNotShrink { missed })));
    b.advance(1_000 * MS);
    assert!(b.swaps.is_empty());
}

#[test]
fn a_member_that_is_lost_meanwhile_leaves_by_its_window_and_the_others_go_on() {
    let mut b = opened(&["a", "b", "c"], &[]);
    warm(&mut b, 0);
    b.lose(2);
    begin(&mut b, "s");
    b.settle_io();
    assert!(b.held.is_empty(), "it may still come back");
    b.advance(Options::default().grace_ns);
    assert_eq!(b.asked().reason, SwapReason::Leave);
    b.commit();
    b.settle_io();
    assert_eq!(b.held, [(id("s"), vec![replica("a"), replica("b")])]);
    taken(&mut b, "s", &["a", "b"]);
    b.commit();
    assert_eq!(ended(&b), Some(Ok(TreeVersion(1))));
}

#[test]
fn the_hold_ends_by_itself_and_a_late_word_counts_for_nothing() {
    let mut b = two();
    held(&mut b, "s");
    let w = b.write(0, 1);
    b.advance(HOLD);
    assert_eq!(ended(&b), Some(Err(SnapshotError::TooSlow)));
    assert_eq!(b.legs_of(w), [0, 1]);
    taken(&mut b, "s", &["a", "b"]);
    assert_eq!(ended(&b), Some(Err(SnapshotError::NotHeld)));
    assert!(b.swaps.is_empty());
}

#[test]
fn rule_07_a_swap_of_unknown_outcome_is_settled_while_hosts_go_on_after_the_hold() {
    let mut b = two();
    held(&mut b, "s");
    let w = b.write(0, 1);
    taken(&mut b, "s", &["a", "b"]);
    b.answer(SwapOutcome::Unknown);
    b.input(Input::SnapshotAbort { id: id("s") });
    assert_eq!(ended(&b), None, "the record may name it");
    assert!(b.ios_of(w).is_empty());
    b.advance(HOLD);
    assert_eq!((ended(&b), b.legs_of(w)), (None, vec![0, 1]));
    b.settle_io();
    b.commit();
    assert_eq!(ended(&b), Some(Ok(TreeVersion(1))));
}

#[test]
fn given_up_closed_or_stopped_it_ends_and_nothing_is_left_waiting() {
    let mut b = two();
    held(&mut b, "s");
    let w = b.write(0, 1);
    begin(&mut b, "t");
    assert_eq!(ended(&b), Some(Err(SnapshotError::Busy { other: id("s") })));
    b.input(Input::SnapshotAbort { id: id("s") });
    assert_eq!((ended(&b), b.legs_of(w)), (Some(Err(SnapshotError::Aborted)), vec![0, 1]));
    b.settle_io();
    held(&mut b, "u");
    let w = b.write(0, 1);
    b.input(Input::Close);
    assert_eq!((ended(&b), b.legs_of(w)), (Some(Err(SnapshotError::Closing)), vec![0, 1]));
    let mut b = two();
    held(&mut b, "s");
    let w = b.write(0, 1);
    b.input(Input::LegFenced { leg: LegId(0) });
    assert_eq!((ended(&b), b.result_of(w)), (Some(Err(SnapshotError::Stopped)), Some(Err(HostError::PathGone))));
    begin(&mut b, "t");
    assert_eq!(ended(&b), Some(Err(SnapshotError::Stopped)));
}

#[test]
fn rule_19_nobody_joins_between_the_asking_and_the_record() {
    let mut b = opened(&["a"], &[]);
    b.input(Input::AddLeg { leg: LegId(1), replica: replica("b"), local: false, meta: true });
    b.commit();
    held(&mut b, "s");
    b.settle_io();
    b.settle_meta();
    b.settle_io();
    assert!(b.swaps.is_empty(), "copied and flushed, but members are being asked");
    taken(&mut b, "s", &["a"]);
    assert_eq!(b.asked().reason, SwapReason::Snapshot);
    b.commit();
    b.settle_meta();
    b.settle_io();
    assert_eq!(b.asked().reason, SwapReason::Join);
    assert_eq!(b.asked().next.tree.last.as_ref().unwrap().replicas, set(&["a"]), "the joiner has missed it");
}

#[test]
fn held_commands_count_among_those_in_flight_and_keep_their_order() {
    let mut p = common::with_bits(&["a", "b"], &[], 1, &[]);
    p.options.max_inflight = 3;
    let mut b = Bench::new(p);
    b.settle_meta();
    warm(&mut b, 0);
    held(&mut b, "s");
    let held_back: Vec<_> = (0..3).map(|_| b.write(0, 1)).collect();
    let refused = b.write(0, 1);
    assert_eq!(b.result_of(refused), Some(Err(HostError::Busy)));
    b.input(Input::SnapshotAbort { id: id("s") });
    for w in held_back {
        assert_eq!(b.legs_of(w), [0, 1], "one at a time, as they came");
        b.reply_all(w);
    }
}

#[test]
fn a_member_that_cannot_flush_leaves_and_the_last_one_ends_the_snapshot() {
    let mut b = two();
    begin(&mut b, "s");
    let flush = b.ios.iter().find(|io| io.op == Op::Flush && io.leg == LegId(1)).copied().unwrap();
    b.finish(flush, Err(LegError::Media));
    let flush = b.ios.iter().find(|io| io.op == Op::Flush).copied().unwrap();
    b.finish(flush, Err(LegError::Media));
    assert_eq!(ended(&b), Some(Err(SnapshotError::Flush(LegError::Media))));
}
