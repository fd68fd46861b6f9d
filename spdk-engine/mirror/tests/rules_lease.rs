//! The lease of reads (rule 16).
#![allow(clippy::unwrap_used)]

mod common;

use common::{Bench, MS, params, set};
use mirror_core::{HostError, Input, LegError, LegId, Op, StopReason, SwapReason};

const LEASE: u64 = 10_000 * MS;

/// Members that have all just confirmed; probes from now on are answered by the test.
fn confirmed(members: &[&str]) -> Bench {
    let mut b = Bench::of(members);
    let w = b.write(0, 1);
    b.reply_all(w);
    b.hold_probes = true;
    b
}

fn probed(b: &Bench) -> Vec<u32> {
    b.probes.iter().map(|io| io.leg.0).collect()
}

fn answer_probe(b: &mut Bench, leg: u32, result: Result<(), LegError>) {
    let at = b.probes.iter().position(|io| io.leg == LegId(leg)).unwrap();
    let io = b.probes.remove(at);
    b.input(Input::LegDone { leg: io.leg, io: io.io, result });
}

#[test]
fn rule_16_the_first_read_waits_until_every_member_has_confirmed() {
    let mut b = Bench::of(&["a", "b", "c"]);
    b.hold_probes = true;
    let r = b.read(0, 1);
    assert!(probed(&b).is_empty(), "nothing is asked before there is something to answer");
    b.reply_all(r);
    assert_eq!((b.result_of(r), probed(&b)), (None, vec![1, 2]), "the member that was read has confirmed by that");
    answer_probe(&mut b, 1, Ok(()));
    assert_eq!(b.result_of(r), None);
    answer_probe(&mut b, 2, Ok(()));
    assert_eq!(b.result_of(r), Some(Ok(())));
}

#[test]
fn rule_16_writes_confirm_for_free() {
    let mut b = confirmed(&["a", "b"]);
    b.advance(LEASE / 2 - MS);
    let r = b.read(0, 1);
    b.reply_all(r);
    assert_eq!((b.result_of(r), probed(&b)), (Some(Ok(())), vec![]));
}

#[test]
fn rule_16_a_completion_confirms_the_time_of_its_sending_and_not_that_of_its_arrival() {
    let mut b = confirmed(&["a", "b"]);
    let slow = b.write(8, 1);
    b.advance(LEASE - MS);
    b.reply_all(slow);
    let r = b.read(0, 1);
    b.advance(MS);
    let read = b.ios_of(r)[0].leg.0;
    b.reply_all(r);
    assert_eq!((b.result_of(r), probed(&b)), (None, vec![1 - read]));
}

#[test]
fn rule_16_a_member_that_answers_nothing_of_use_is_asked_with_pauses_and_leaves_in_the_end() {
    let mut b = confirmed(&["a", "b"]);
    b.advance(LEASE);
    let r = b.read(0, 1);
    b.reply_all(r);
    let [bad] = probed(&b)[..] else { panic!("one member is read and one is asked: {:?}", probed(&b)) };
    let mut asked = 0;
    while b.swaps.is_empty() {
        answer_probe(&mut b, bad, Err(LegError::Other));
        asked += 1;
        assert!(probed(&b).is_empty() && asked < 20, "not again at once, nor for ever");
        assert_eq!(b.result_of(r), None);
        b.advance(LEASE / 20);
    }
    assert_eq!(asked, 8);
    b.commit();
    assert_eq!(b.result_of(r), Some(Ok(())), "the other member alone is asked now");
}

#[test]
fn rule_16_a_stale_member_holds_the_answer_and_the_range() {
    let mut b = confirmed(&["a", "b"]);
    b.advance(LEASE);
    let r = b.read(0, 1);
    b.reply_all(r);
    assert_eq!((b.result_of(r), b.core.status().held_reads), (None, 1));
    let w = b.write(0, 1);
    assert!(b.ios_of(w).is_empty(), "the data that is held must stay true");
    let asked = probed(&b);
    assert_eq!(asked.len(), 1, "one question per member at a time");
    answer_probe(&mut b, asked[0], Err(LegError::Media));
    assert_eq!(b.result_of(r), Some(Ok(())), "an error of the disk is an answer on the session");
    assert_eq!((b.legs_of(w), b.core.status().held_reads), (vec![0, 1], 0));
}

#[test]
fn rule_16_a_steady_reader_waits_for_nothing() {
    let mut b = Bench::of(&["a", "b"]);
    let w = b.write(0, 1);
    b.reply_all(w);
    b.hold_probes = true;
    for step in 0..40 {
        b.advance(1000 * MS);
        let r = b.read(0, 1);
        b.reply_all(r);
        assert_eq!(b.result_of(r), Some(Ok(())), "second {step}");
        for leg in probed(&b) {
            answer_probe(&mut b, leg, Ok(()));
        }
    }
}

#[test]
fn rule_16_no_reads_no_probes() {
    let mut b = confirmed(&["a", "b"]);
    b.advance(100 * LEASE);
    let w = b.write(0, 1);
    b.reply_all(w);
    b.advance(100 * LEASE);
    assert!(probed(&b).is_empty() && b.ios.is_empty());
}

#[test]
fn rule_16_a_lost_member_is_waited_for_until_it_has_left() {
    let mut b = confirmed(&["a", "b"]);
    b.advance(LEASE);
    b.lose(1);
    answer_probe(&mut b, 0, Ok(())); // The sign of life that rule 12 asks for.
    let r = b.read(0, 1);
    b.reply_all(r);
    assert_eq!((b.result_of(r), probed(&b)), (None, vec![]));
    b.advance(1000 * MS);
    assert_eq!(b.asked().next.in_sync, set(&["a"]));
    assert_eq!(b.result_of(r), None, "the swap may fail: another engine may have promoted it");
    b.commit();
    assert_eq!(b.result_of(r), Some(Ok(())));
}

#[test]
fn rule_16_a_member_that_is_back_is_asked() {
    let mut b = confirmed(&["a", "b"]);
    b.advance(LEASE);
    b.lose(1);
    answer_probe(&mut b, 0, Ok(())); // The sign of life that rule 12 asks for.
    let r = b.read(0, 1);
    b.reply_all(r);
    b.back(1);
    assert_eq!((b.result_of(r), probed(&b)), (None, vec![1]));
    b.lose(1);
    b.back(1);
    assert_eq!(probed(&b), [1], "the question that was lost is asked again");
    answer_probe(&mut b, 1, Ok(()));
    assert_eq!(b.result_of(r), Some(Ok(())));
}

#[test]
fn rule_16_a_probe_that_finds_a_newer_epoch_stops_everything() {
    let mut b = confirmed(&["a", "b"]);
    b.advance(LEASE);
    let r = b.read(0, 1);
    b.reply_all(r);
    let leg = probed(&b)[0];
    answer_probe(&mut b, leg, Err(LegError::Fenced));
    assert_eq!(b.stopped, Some(StopReason::Fenced { leg: LegId(leg) }));
    assert_eq!(b.result_of(r), Some(Err(HostError::PathGone)));
}

#[test]
fn rule_16_a_read_is_not_held_for_ever() {
    let mut b = confirmed(&["a", "b"]);
    b.advance(LEASE);
    let r = b.read(0, 1);
    b.reply_all(r);
    assert_eq!(b.wake, Some(b.now + 30_000 * MS));
    b.advance(29_999 * MS);
    assert_eq!(b.result_of(r), None);
    b.advance(MS);
    assert_eq!(b.result_of(r), Some(Err(HostError::PathGone)));
    assert!(b.stopped.is_none());
}

#[test]
fn rule_16_a_joiner_confirms_from_when_its_swap_is_sent() {
    let mut b = Bench::new(params(&["a"], &["b"], 1));
    b.settle_io();
    assert_eq!(b.asked().reason, SwapReason::Join);
    b.hold_probes = true;
    b.advance(LEASE);
    let r = b.read(0, 1);
    b.reply_all(r);
    // The request may be committed already, and the next engine may have promoted the joiner alone.
    assert_eq!((b.result_of(r), probed(&b)), (None, vec![1]));
    answer_probe(&mut b, 1, Ok(()));
    assert_eq!(b.result_of(r), Some(Ok(())));
}

#[test]
fn rule_16_a_joiner_outside_the_set_confirms_nothing_and_holds_up_nothing() {
    let mut b = Bench::new(params(&["a"], &["b"], 1));
    b.hold_probes = true;
    let r = b.read(60, 1);
    b.reply_all(r);
    assert_eq!((b.result_of(r), probed(&b)), (Some(Ok(())), vec![]));
}

#[test]
fn rule_16_closing_waits_for_reads_that_are_held() {
    let mut b = confirmed(&["a", "b"]);
    b.advance(LEASE);
    let r = b.read(0, 1);
    b.reply_all(r);
    b.input(Input::Close);
    assert!(b.ios.iter().all(|io| io.op != Op::Flush));
    let leg = probed(&b)[0];
    answer_probe(&mut b, leg, Ok(()));
    assert_eq!((b.result_of(r), b.ios.len()), (Some(Ok(())), 2));
}
