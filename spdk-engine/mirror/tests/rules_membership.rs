//! Rules about membership and sessions, by number.
#![allow(clippy::unwrap_used)]

mod common;

use common::{Bench, MS, config, params, replica, set};
use mirror_core::{
    ConfigNumber, DropReason, EngineInstance, Epoch, Event, HostError, Input, LegError, LegId, Op, StopReason,
    SwapOutcome, SwapReason,
};

fn add(b: &mut Bench, leg: u32, name: &str) {
    b.input(Input::AddLeg { leg: LegId(leg), replica: replica(name), local: false, meta: false });
}

#[test]
fn rule_06_ack_waits_for_cas() {
    let mut b = Bench::of(&["a", "b"]);
    let w = b.write(0, 1);
    b.reply(w, 0, Ok(()));
    b.reply(w, 1, Err(LegError::Media));
    assert_eq!(b.asked().next.in_sync, set(&["a"]));
    let later = b.write(10, 1);
    assert_eq!(b.legs_of(later), [0], "nothing goes to the member that failed");
    b.reply_all(later);
    let flush = b.host(Op::Flush, 0, 0);
    b.reply_all(flush);
    assert!(b.done.is_empty(), "this acknowledgement and all later ones wait: {:?}", b.done);
    b.commit();
    assert_eq!(b.done.len(), 3);
    assert_eq!(b.drops, [(LegId(1), DropReason::WriteFailed(LegError::Media))]);
    assert_eq!(b.core.config().config_number, ConfigNumber(11));
}

#[test]
fn rule_06_the_set_never_becomes_empty() {
    let mut b = Bench::of(&["a", "b"]);
    b.lose(0);
    b.advance(1000 * MS);
    b.commit();
    assert_eq!(b.core.config().in_sync, set(&["b"]));
    let w = b.write(0, 1);
    b.lose(1);
    b.advance(100_000 * MS);
    assert!(b.swaps.is_empty() && b.done.is_empty());
    b.back(1);
    b.reply_all(w);
    assert_eq!(b.result_of(w), Some(Ok(())));
}

#[test]
fn rule_06_strict_mode_freezes_at_its_minimum_and_thaws() {
    let mut b = Bench::new(params(&["a", "b"], &[], 2));
    b.lose(1);
    let w = b.write(0, 1);
    b.reply_all(w);
    b.advance(60_000 * MS);
    assert!(b.swaps.is_empty() && b.result_of(w).is_none());
    assert!(b.has_event(|e| *e == Event::Frozen) && b.core.status().frozen);
    b.back(1);
    assert_eq!(b.legs_of(w), [1], "what it missed is sent again");
    b.reply_all(w);
    assert_eq!(b.result_of(w), Some(Ok(())));
    assert!(b.has_event(|e| *e == Event::Thawed));
}

#[test]
fn rule_06_a_frozen_volume_is_healed_by_a_new_replica_under_its_frozen_writes() {
    let mut b = Bench::new(params(&["a", "b"], &[], 2));
    let frozen = b.write(0, 20);
    b.reply(frozen, 0, Ok(()));
    b.reply(frozen, 1, Err(LegError::Media));
    let behind = b.write(4, 1);
    assert!(b.swaps.is_empty() && b.core.status().frozen);
    add(&mut b, 2, "c");
    b.commit();
    b.settle_io();
    assert_eq!(b.asked().reason, SwapReason::Join);
    assert_eq!(b.asked().next.in_sync, set(&["a", "b", "c"]));
    assert!(b.done.is_empty());
    b.commit();
    assert_eq!(b.asked().next.in_sync, set(&["a", "c"]));
    b.commit();
    b.settle_io();
    assert_eq!((b.result_of(frozen), b.result_of(behind)), (Some(Ok(())), Some(Ok(()))));
}

#[test]
fn rule_06_a_copy_under_a_frozen_write_comes_from_a_member_that_has_it() {
    let mut b = Bench::new(params(&["a", "b"], &[], 2));
    b.lose(1);
    let w = b.write(0, 1);
    b.reply_all(w);
    b.advance(1000 * MS);
    assert!(b.core.status().frozen);
    add(&mut b, 2, "c");
    b.commit();
    let first = b.copies().into_iter().find(|io| io.lba == 0).unwrap();
    assert_eq!(first.leg, LegId(0));
    // a is lost before it answers; b is back, but does not have the write yet.
    b.lose(0);
    b.back(1);
    assert!(b.copies().iter().all(|io| io.lba != 0), "not from b: {:?}", b.copies());
    b.reply(w, 1, Ok(()));
    assert!(b.copies().iter().any(|io| io.lba == 0 && io.leg == LegId(1)), "now it has it");
}

#[test]
fn rule_06_a_lost_member_is_taken_back_until_its_swap_is_sent() {
    // Two members fail at once in strict mode: only one may leave, the other comes back.
    let mut b = Bench::new(params(&["a", "b", "c"], &[], 2));
    let w = b.write(0, 1);
    b.lose(2);
    b.reply(w, 0, Ok(()));
    b.reply(w, 1, Err(LegError::Media));
    b.advance(1000 * MS);
    // c's window is over: b and c are marked, one leaves.
    assert_eq!(b.asked().next.in_sync.len(), 2);
    let left = b.asked().next.in_sync.clone();
    b.commit();
    if left.contains(&replica("c")) {
        b.back(2);
        b.settle_io();
        assert_eq!(b.result_of(w), Some(Ok(())));
        assert!(!b.core.status().frozen);
    }
}

#[test]
fn rule_07_unknown_outcome_is_settled_by_the_same_swap_again() {
    let mut b = Bench::of(&["a", "b"]);
    let w = b.write(0, 1);
    b.reply(w, 0, Ok(()));
    b.reply(w, 1, Err(LegError::Media));
    let first = b.asked().clone();
    b.answer(SwapOutcome::Unknown);
    assert!(b.swaps.is_empty() && b.result_of(w).is_none());
    b.advance(100 * MS);
    let again = b.asked().clone();
    assert_ne!(first.swap, again.swap);
    assert_eq!((&first.expect, &first.next), (&again.expect, &again.next));
    // A late answer to the first attempt means nothing any more.
    b.input(Input::SwapAnswer { swap: first.swap, outcome: SwapOutcome::Committed });
    assert_eq!(b.result_of(w), None);
    // The first attempt had been committed: the second finds its own proposal.
    b.answer(SwapOutcome::Refused { current: again.next.clone() });
    assert_eq!(b.result_of(w), Some(Ok(())));
}

#[test]
fn rule_07_a_record_that_did_not_move_is_tried_again() {
    let mut b = Bench::of(&["a", "b"]);
    let w = b.write(0, 1);
    b.reply(w, 0, Ok(()));
    b.reply(w, 1, Err(LegError::Media));
    b.answer(SwapOutcome::Refused { current: config(&["a", "b"], &[], 1) });
    assert!(b.result_of(w).is_none() && b.stopped.is_none());
    b.advance(100 * MS);
    b.commit();
    assert_eq!(b.result_of(w), Some(Ok(())));
}

#[test]
fn rule_07_a_joiner_stays_required_while_the_outcome_is_unknown() {
    let mut b = Bench::new(params(&["a"], &["b"], 1));
    b.settle_io();
    assert_eq!(b.asked().reason, SwapReason::Join);
    b.answer(SwapOutcome::Unknown);
    // The joiner fails now. The queued request may still commit {a, b}.
    b.lose(1);
    let w = b.write(0, 1);
    b.reply_all(w);
    b.advance(50 * MS);
    assert_eq!(b.result_of(w), None);
    b.advance(1000 * MS);
    assert_eq!(b.asked().reason, SwapReason::Join, "settled first, removed after");
    assert_eq!(b.result_of(w), None);
    b.commit();
    assert_eq!(b.result_of(w), None);
    assert_eq!(b.asked().next.in_sync, set(&["a"]));
    b.commit();
    assert_eq!(b.result_of(w), Some(Ok(())));
}

#[test]
fn rule_08_k_rises_with_every_change_of_a_set() {
    let mut b = Bench::of(&["a"]);
    add(&mut b, 1, "b");
    let start = b.asked().next.clone();
    assert_eq!((start.config_number, &start.rebuilding), (ConfigNumber(11), &set(&["b"])));
    b.commit();
    b.settle_io();
    let join = b.asked().next.clone();
    assert_eq!(join.config_number, ConfigNumber(12));
    assert_eq!((&join.in_sync, join.rebuilding.len()), (&set(&["a", "b"]), 0));
}

#[test]
fn rule_08_an_abandoned_rebuild_leaves_the_record() {
    let mut b = Bench::new(params(&["a"], &["b"], 1));
    let copy_write = loop {
        let io = b.copies()[0];
        if io.leg == LegId(1) {
            break io;
        }
        b.finish(io, Ok(()));
    };
    b.finish(copy_write, Err(LegError::NoSpace));
    assert_eq!(b.drops, [(LegId(1), DropReason::CopyFailed(LegError::NoSpace))]);
    assert_eq!((b.asked().reason, b.asked().next.rebuilding.len()), (SwapReason::AbandonRebuild, 0));
    assert_eq!(b.asked().next.config_number, ConfigNumber(11));
}

#[test]
fn rule_10_the_joiner_gets_writes_and_is_waited_for_before_it_is_added() {
    let mut b = Bench::new(params(&["a"], &["b"], 1));
    let w = b.write(60, 1);
    assert_eq!(b.legs_of(w), [0, 1]);
    b.reply(w, 0, Ok(()));
    assert_eq!(b.result_of(w), None);
    b.reply(w, 1, Ok(()));
    assert_eq!(b.result_of(w), Some(Ok(())));
}

#[test]
fn rule_10_the_joiner_is_never_a_source_until_added() {
    let mut b = Bench::new(params(&["a"], &["b"], 1));
    let all_from_a = |b: &mut Bench| {
        (0..4).all(|i| {
            let r = b.read(i, 1);
            let ok = b.legs_of(r) == [0];
            b.reply_all(r);
            ok
        })
    };
    assert!(all_from_a(&mut b));
    b.settle_io();
    assert!(all_from_a(&mut b), "not while the swap is under way");
    b.answer(SwapOutcome::Unknown);
    assert!(all_from_a(&mut b), "nor while its outcome is unknown");
    b.advance(100 * MS);
    b.commit();
    assert!(!all_from_a(&mut b));
}

#[test]
fn rule_10_a_window_is_copied_under_a_lock_and_flushed_before_joining() {
    let mut b = Bench::new(params(&["a"], &["b"], 1));
    let first = b.copies()[0];
    assert_eq!((first.leg.0, first.op, first.lba, first.blocks), (0, Op::Read, 0, 16));
    let inside = b.write(15, 1);
    let outside = b.write(40, 1);
    assert!(b.ios_of(inside).is_empty(), "the window is locked");
    assert_eq!(b.legs_of(outside), [0, 1]);
    b.finish(first, Ok(()));
    let second = b.copies().into_iter().find(|c| c.leg.0 == 1).unwrap();
    assert_eq!((second.op, second.lba, second.payload), (Op::Write { fua: false }, 0, first.payload));
    b.finish(second, Ok(()));
    assert_eq!(b.legs_of(inside), [0, 1]);
    b.reply_all(inside);
    b.reply_all(outside);
    while let Some(io) = b.copies().first().copied() {
        b.finish(io, Ok(()));
    }
    assert!(b.swaps.is_empty());
    let flush: Vec<_> = b.ios.clone();
    assert_eq!(flush.iter().map(|io| (io.leg.0, io.op)).collect::<Vec<_>>(), [(1, Op::Flush)]);
    b.finish(flush[0], Ok(()));
    assert_eq!(b.asked().reason, SwapReason::Join);
}

#[test]
fn rule_10_a_joiner_lost_within_grace_goes_on_and_is_dropped_after_it() {
    let mut b = Bench::new(params(&["a"], &["b"], 1));
    let w = b.write(60, 1);
    b.reply(w, 0, Ok(()));
    b.lose(1);
    b.advance(500 * MS);
    b.back(1);
    b.settle_io();
    assert_eq!((b.result_of(w), b.asked().reason), (Some(Ok(())), SwapReason::Join));

    let mut b = Bench::new(params(&["a"], &["b"], 1));
    let w = b.write(60, 1);
    b.reply(w, 0, Ok(()));
    b.lose(1);
    b.advance(1000 * MS);
    assert_eq!(b.drops, [(LegId(1), DropReason::Lost)]);
    assert_eq!(b.result_of(w), Some(Ok(())), "a joiner outside S holds nothing up once it is dropped");
}

#[test]
fn rule_10_copying_asks_another_member_and_gives_up_when_none_can_read() {
    let mut b = Bench::new(params(&["a", "b"], &["c"], 1));
    let first = b.copies()[0];
    b.finish(first, Err(LegError::Media));
    let retry = b.copies().into_iter().find(|c| c.lba == first.lba).unwrap();
    assert_ne!(retry.leg, first.leg);
    b.finish(retry, Err(LegError::Media));
    assert_eq!(b.drops, [(LegId(2), DropReason::NoSource)]);
    assert_eq!(b.core.config().in_sync, set(&["a", "b"]), "the volume stays as it is");
}

#[test]
fn rule_12_a_lost_member_is_waited_for_and_its_writes_are_sent_again() {
    let mut b = Bench::of(&["a", "b", "c"]);
    let w = b.write(0, 1);
    b.reply(w, 0, Ok(()));
    b.reply(w, 2, Ok(()));
    b.lose(1);
    b.advance(999 * MS);
    assert!(b.swaps.is_empty() && b.result_of(w).is_none());
    b.back(1);
    assert_eq!(b.legs_of(w), [1]);
    b.reply_all(w);
    assert_eq!(b.result_of(w), Some(Ok(())));
    b.advance(10_000 * MS);
    assert!(b.swaps.is_empty());
}

#[test]
fn rule_12_after_the_grace_window_it_leaves() {
    let mut b = Bench::of(&["a", "b", "c"]);
    b.lose(1);
    assert_eq!(b.wake, Some(b.now + 1000 * MS));
    b.advance(1000 * MS);
    assert_eq!(b.asked().next.in_sync, set(&["a", "c"]));
}

#[test]
fn rule_12_an_announced_restart_is_waited_for_longer() {
    let mut b = Bench::of(&["a", "b", "c"]);
    b.input(Input::LegLost { leg: LegId(1), announced: true });
    b.advance(9_999 * MS);
    assert!(b.swaps.is_empty());
    b.advance(MS);
    assert_eq!(b.asked().reason, SwapReason::Leave);
}

#[test]
fn rule_12_when_all_members_are_lost_the_engine_is_the_suspect() {
    let mut b = Bench::of(&["a", "b", "c"]);
    (0..3).for_each(|leg| b.lose(leg));
    b.advance(100_000 * MS);
    assert!(b.swaps.is_empty() && b.has_event(|e| *e == Event::Suspect));
    // The first one back does not condemn the others: they get a window from now on.
    b.back(0);
    b.advance(500 * MS);
    assert!(b.swaps.is_empty());
    b.back(1);
    b.back(2);
    b.advance(20_000 * MS);
    assert!(b.swaps.is_empty());
}

#[test]
fn rule_12_when_most_are_lost_they_are_waited_for_longer() {
    let mut b = Bench::of(&["a", "b", "c"]);
    b.lose(0);
    b.lose(1);
    b.advance(9_999 * MS);
    assert!(b.swaps.is_empty());
    b.advance(MS);
    assert_eq!(b.asked().next.in_sync, set(&["c"]));
}

/// Answers the probe of a leg; the others wait.
fn sign_of_life(b: &mut Bench, leg: u32) {
    let at = b.probes.iter().position(|io| io.leg == LegId(leg));
    let io = b.probes.remove(at.unwrap_or_else(|| panic!("leg {leg} is not asked")));
    b.input(Input::LegDone { leg: io.leg, io: io.io, result: Ok(()) });
}

#[test]
fn rule_12_a_member_that_is_silent_while_another_is_lost_looks_bad_too() {
    let mut b = Bench::of(&["a", "b", "c"]);
    b.hold_probes = true;
    b.lose(1);
    let asked: Vec<u32> = b.probes.iter().map(|io| io.leg.0).collect();
    assert_eq!(asked, [0, 2], "all others are asked for a sign of life at once");
    sign_of_life(&mut b, 0);
    b.advance(1000 * MS);
    assert!(b.swaps.is_empty() && b.has_event(|e| *e == Event::Suspect), "two of three look bad");
    b.advance(500 * MS);
    assert!(b.swaps.is_empty());
    sign_of_life(&mut b, 2);
    assert_eq!(b.asked().next.in_sync, set(&["a", "c"]), "it was one alone after all, and its window is over");
}

#[test]
fn rule_12_a_cut_that_is_noticed_of_one_after_the_other_ejects_nobody() {
    let mut b = Bench::of(&["a", "b", "c"]);
    b.hold_probes = true;
    b.lose(1);
    sign_of_life(&mut b, 0); // The one on this machine.
    b.advance(2000 * MS);
    b.lose(2);
    sign_of_life(&mut b, 0);
    b.advance(7_999 * MS);
    assert!(b.swaps.is_empty(), "{:?}", b.swaps);
    b.back(1);
    b.back(2);
    b.advance(20_000 * MS);
    assert!(b.swaps.is_empty());
}

/// `b` was lost alone and has left.
fn one_left() -> Bench {
    let mut b = Bench::of(&["a", "b", "c"]);
    b.lose(1);
    b.advance(1000 * MS);
    b.commit();
    b.advance(1000 * MS);
    b
}

#[test]
fn rule_12_one_that_left_shortly_before_still_looks_bad() {
    let mut b = one_left();
    b.lose(2);
    b.advance(9_999 * MS);
    assert!(b.swaps.is_empty(), "two of three were lost within two seconds");
    b.back(2);
    b.advance(20_000 * MS);
    assert!(b.swaps.is_empty() && b.core.config().in_sync == set(&["a", "c"]));
}

#[test]
fn rule_12_a_double_failure_that_is_real_is_survived() {
    let mut b = one_left();
    b.lose(2);
    b.advance(10_000 * MS);
    assert_eq!(b.asked().next.in_sync, set(&["a"]));
}

#[test]
fn rule_12_one_that_left_long_before_or_is_back_says_nothing() {
    let mut b = one_left();
    b.advance(9_000 * MS);
    b.lose(2);
    b.advance(1000 * MS);
    assert_eq!(b.asked().next.in_sync, set(&["a"]), "ten seconds apart");
    let mut b = one_left();
    add(&mut b, 3, "b");
    b.lose(2);
    b.advance(1000 * MS);
    assert_eq!(b.swaps.last().unwrap().next.in_sync, set(&["a", "c"]), "the rebuild of b starts first");
    b.commit();
    assert_eq!(b.asked().next.in_sync, set(&["a"]), "the engine reaches b");
}

#[test]
fn rule_12_a_lost_member_of_two_is_a_single_loss() {
    let mut b = Bench::of(&["a", "b"]);
    b.lose(1);
    b.advance(1000 * MS);
    assert_eq!(b.asked().next.in_sync, set(&["a"]), "the other one answers");
    let mut b = Bench::of(&["a", "b"]);
    b.hold_probes = true;
    b.lose(1);
    b.advance(9_999 * MS);
    assert!(b.swaps.is_empty(), "the other one does not");
}

#[test]
fn rule_12_a_latecomer_is_not_taken_back_once_its_swap_is_sent() {
    let mut b = Bench::of(&["a", "b"]);
    b.lose(1);
    b.advance(1000 * MS);
    b.back(1);
    let w = b.write(0, 1);
    assert_eq!(b.legs_of(w), [0]);
    assert!(b.drops.is_empty());
    b.commit();
    assert_eq!(b.drops, [(LegId(1), DropReason::Lost)]);
}

#[test]
fn rule_13_fenced_stops_everything() {
    let mut b = Bench::of(&["a", "b"]);
    let (w, r) = (b.write(0, 1), b.read(0, 1));
    b.reply(w, 0, Ok(()));
    b.reply(w, 1, Err(LegError::Fenced));
    assert_eq!(b.stopped, Some(StopReason::Fenced { leg: LegId(1) }));
    for id in [w, r] {
        assert_eq!(b.result_of(id), Some(Err(HostError::PathGone)));
    }
    let late = b.write(5, 1);
    assert_eq!(b.result_of(late), Some(Err(HostError::PathGone)));
    assert_eq!(b.drops.len(), 2);
}

#[test]
fn rule_13_a_refused_reconnect_stops_everything() {
    let mut b = Bench::of(&["a", "b"]);
    b.lose(0);
    b.input(Input::LegFenced { leg: LegId(0) });
    assert_eq!(b.stopped, Some(StopReason::Fenced { leg: LegId(0) }));
}

#[test]
fn rule_15_another_owner_in_the_record_stops_everything() {
    let mut b = Bench::of(&["a", "b"]);
    let w = b.write(0, 1);
    b.reply(w, 0, Ok(()));
    b.reply(w, 1, Err(LegError::Media));
    let mut current = config(&["b"], &[], 1);
    current.epoch = Epoch(6);
    current.engine_instance = EngineInstance::new("e6").unwrap();
    b.answer(SwapOutcome::Refused { current });
    assert!(matches!(b.stopped, Some(StopReason::Superseded { .. })));
    assert_eq!(b.result_of(w), Some(Err(HostError::PathGone)));
}

#[test]
fn an_orderly_removal_keeps_writing_until_it_is_recorded() {
    let mut b = Bench::of(&["a", "b"]);
    b.input(Input::RemoveLeg { leg: LegId(1) });
    let w = b.write(0, 1);
    assert_eq!(b.legs_of(w), [0, 1]);
    let r = b.read(8, 1);
    assert_eq!(b.legs_of(r), [0]);
    b.reply_all(w);
    assert_eq!(b.result_of(w), Some(Ok(())), "nothing waits for the swap: both have the write");
    b.commit();
    assert_eq!(b.drops, [(LegId(1), DropReason::Removed)]);
    b.input(Input::RemoveLeg { leg: LegId(0) });
    assert!(b.swaps.is_empty() && b.has_event(|e| matches!(e, Event::RemoveRefused { .. })));
}

#[test]
fn legs_that_may_not_be_added_are_dropped() {
    let mut b = Bench::of(&["a", "b"]);
    add(&mut b, 0, "c");
    add(&mut b, 2, "b");
    add(&mut b, 16, "c");
    assert_eq!(b.drops.len(), 3);
    assert!(b.drops.iter().all(|d| d.1 == DropReason::Refused) && b.swaps.is_empty());
}

#[test]
fn strict_mode_after_an_unclean_stop_serves_nothing_before_all_are_equal() {
    let mut p = params(&["a", "b"], &[], 2);
    p.equalise_from = Some(LegId(0));
    let mut b = Bench::new(p);
    let (w, r) = (b.write(0, 1), b.read(5, 1));
    assert!(b.ios_of(w).is_empty() && b.ios_of(r).is_empty());
    while let Some(io) = b.ios.first().copied() {
        let served = b.has_event(|e| *e == Event::Equalised);
        assert!(served || io.op != Op::Read || io.leg == LegId(0), "only the source is read");
        b.finish(io, Ok(()));
    }
    assert_eq!((b.result_of(w), b.result_of(r)), (Some(Ok(())), Some(Ok(()))));
    assert!(b.has_event(|e| *e == Event::Equalised) && b.swaps.is_empty());
}

#[test]
fn equalising_takes_another_source_when_the_first_leaves() {
    let mut p = params(&["a", "b", "c"], &[], 2);
    p.equalise_from = Some(LegId(0));
    let mut b = Bench::new(p);
    let r = b.read(5, 1);
    b.lose(0);
    b.advance(1000 * MS);
    b.commit();
    b.settle_io();
    assert_eq!((b.result_of(r), &b.core.config().in_sync), (Some(Ok(())), &set(&["b", "c"])));
}

#[test]
fn equalising_takes_another_source_when_the_first_cannot_be_read() {
    let mut p = params(&["a", "b", "c"], &[], 2);
    p.equalise_from = Some(LegId(0));
    let mut b = Bench::new(p);
    let r = b.read(5, 1);
    let copy = b.copies()[0];
    b.finish(copy, Err(LegError::Media));
    assert_eq!(b.asked().next.in_sync, set(&["b", "c"]));
    b.commit();
    b.settle_io();
    assert_eq!(b.result_of(r), Some(Ok(())));
    assert!(b.swaps.is_empty());
}

#[test]
fn equalising_waits_for_copies_in_flight_before_it_takes_another_source() {
    let mut p = params(&["a", "b", "c"], &[], 2);
    p.equalise_from = Some(LegId(0));
    let mut b = Bench::new(p);
    // The first window is read from a and on its way to both, the one beside it cannot be read.
    let reads = b.copies();
    b.finish(reads[0], Ok(()));
    let late: Vec<_> = b.copies().into_iter().filter(|io| io.op != Op::Read).collect();
    assert_eq!(late.iter().map(|io| io.leg.0).collect::<Vec<_>>(), [1, 2], "one read feeds both");
    b.finish(reads[1], Err(LegError::Media));
    b.commit();
    assert_eq!(b.core.config().in_sync, set(&["b", "c"]));
    assert_eq!(b.copies(), late, "nothing is read or written beside it");
    b.finish(late[0], Ok(()));
    assert_eq!(b.copies(), late[1..]);
    b.finish(late[1], Ok(()));
    assert!(b.copies().iter().all(|io| io.lba < 32 && io.op == Op::Read), "from the first block on");
    let r = b.read(5, 1);
    b.settle_io();
    assert_eq!(b.result_of(r), Some(Ok(())));
}

#[test]
fn equalising_goes_on_with_a_member_that_comes_back_late() {
    let mut p = params(&["a", "b"], &[], 2);
    p.equalise_from = Some(LegId(0));
    let mut b = Bench::new(p);
    let r = b.read(5, 1);
    b.lose(1);
    b.advance(60_000 * MS);
    b.settle_io();
    assert_eq!(b.result_of(r), None);
    b.back(1);
    b.settle_io();
    assert_eq!(b.result_of(r), Some(Ok(())));
}

#[test]
fn a_frozen_volume_is_healed_under_several_writes_that_failed() {
    // b cannot be written and may not leave; then a has no room for two writes at once.
    let mut b = Bench::new(params(&["a", "b"], &[], 2));
    let first = b.write(0, 1);
    b.reply(first, 0, Ok(()));
    b.reply(first, 1, Err(LegError::Media));
    let (second, third) = (b.write(20, 1), b.write(40, 1));
    b.reply(second, 0, Err(LegError::NoSpace));
    b.reply(third, 0, Err(LegError::NoSpace));
    add(&mut b, 2, "c");
    b.commit();
    b.settle_io();
    assert_eq!(b.asked().next.in_sync, set(&["a", "b", "c"]));
    b.commit();
    b.commit();
    b.settle_io();
    assert_eq!(b.result_of(first), Some(Ok(())));
    for id in [second, third] {
        assert_eq!(b.result_of(id), Some(Err(HostError::NoSpace)));
    }
}
