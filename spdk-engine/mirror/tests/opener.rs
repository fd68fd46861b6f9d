//! The opener, by rule.
#![allow(clippy::unwrap_used)]

mod common;

use common::opening::{Bench, clean};

use common::{MS, config, replica, set};
use mirror_core::{
    Config, ConfigNumber, EngineInstance, Epoch, LegId, Lineage, OpenAction, OpenError, OpenEvent, OpenInput,
    PromoteError, RecordError, SwapOutcome,
};

#[test]
fn rule_15_the_epoch_is_raised_before_anybody_is_promoted() {
    let mut b = Bench::new();
    b.record(clean(&["a", "b"], &[], 1));
    let (_, next) = b.asked().unwrap();
    assert_eq!((next.epoch, next.engine_instance.as_str(), next.clean), (Epoch(6), "e6", false));
    assert_eq!(next.config_number, ConfigNumber(10), "no set changed");
    assert!(b.promotes().is_empty());
    b.cas(SwapOutcome::Committed);
    assert_eq!(b.promotes(), ["a", "b"]);
}

#[test]
fn after_a_clean_close_all_promoted_members_stay() {
    let mut b = Bench::raised(&clean(&["a", "b"], &[], 1));
    b.promoted("a", Ok(()));
    b.promoted("b", Ok(()));
    assert!(b.asked().is_none(), "nothing changed, nothing to swap");
    let params = b.connect();
    assert_eq!(params.config.in_sync, set(&["a", "b"]));
    assert!(params.legs.iter().all(|l| l.up) && params.legs[1].local);
    assert_eq!(params.equalise_from, None);
    assert!(b.opener.is_finished());
    mirror_core::Core::open(params).unwrap();
}

#[test]
fn rule_15_members_not_promoted_leave_by_cas_before_anything_is_served() {
    let mut b = Bench::raised(&clean(&["a", "b", "c"], &[], 1));
    b.promoted("a", Ok(()));
    b.promoted("c", Ok(()));
    b.promoted("b", Err(PromoteError::Unreachable));
    b.advance(1_999 * MS);
    assert!(b.asked().is_none() && b.ready().is_none());
    b.advance(MS);
    let ready = b.connect_all();
    assert!(ready.is_none(), "the swap comes first");
    let (_, next) = b.asked().unwrap();
    assert_eq!((next.in_sync, next.config_number), (set(&["a", "c"]), ConfigNumber(11)));
    let waits = b.out.iter().all(|a| !matches!(a, OpenAction::Ready(_)));
    assert!(waits, "the swap comes first");
}

#[test]
fn rule_15_a_replica_outside_the_set_is_never_a_source() {
    let mut b = Bench::raised(&clean(&["a"], &["b"], 1));
    b.promoted("b", Ok(()));
    b.promoted("a", Err(PromoteError::Unreachable));
    b.advance(30_000 * MS);
    assert_eq!(b.promotes(), ["a"], "tried again");
    b.promoted("a", Err(PromoteError::Unreachable));
    b.advance(30_000 * MS);
    assert_eq!(b.failed(), Some(OpenError::NoMember { promoted: 0, needed: 1 }));
}

#[test]
fn after_an_unclean_stop_one_member_is_the_source_and_the_others_are_rebuilt() {
    let mut b = Bench::raised(&config(&["a", "b", "c"], &["d"], 1));
    for name in ["d", "a", "b", "c"] {
        b.promoted(name, Ok(()));
    }
    assert!(b.connect_all().is_none());
    let (_, next) = b.asked().unwrap();
    assert_eq!(
        (&next.in_sync, &next.rebuilding),
        (&set(&["b"]), &set(&["a", "c", "d"])),
        "the local one is the source"
    );
    b.cas(SwapOutcome::Committed);
    let params = b.ready().unwrap();
    assert_eq!(params.legs.len(), 4);
    mirror_core::Core::open(params).unwrap();
}

#[test]
fn strict_mode_keeps_its_members_and_makes_them_equal_first() {
    let mut b = Bench::raised(&config(&["a", "b"], &[], 2));
    b.promoted("a", Ok(()));
    b.advance(10_000 * MS);
    assert!(b.asked().is_none() && b.failed().is_none(), "one is fewer than the minimum");
    b.promoted("b", Ok(()));
    let params = b.connect();
    assert_eq!(params.config.in_sync, set(&["a", "b"]));
    let source = params.legs.iter().find(|l| Some(l.leg) == params.equalise_from).unwrap();
    assert_eq!(source.replica, replica("b"));
    mirror_core::Core::open(params).unwrap();
}

#[test]
fn a_single_member_needs_no_rebuild_after_an_unclean_stop() {
    let mut b = Bench::raised(&config(&["a"], &[], 1));
    b.promoted("a", Ok(()));
    let params = b.connect();
    assert_eq!((params.config.in_sync, params.config.config_number), (set(&["a"]), ConfigNumber(10)));
}

#[test]
fn rule_07_a_cas_of_unknown_outcome_is_settled_unchanged() {
    let mut b = Bench::new();
    b.record(clean(&["a"], &[], 1));
    let (first, next) = b.asked().unwrap();
    b.cas(SwapOutcome::Unknown);
    assert!(b.asked().is_none() && b.promotes().is_empty());
    b.advance(250 * MS);
    let (second, again) = b.asked().unwrap();
    assert_ne!(first, second);
    assert_eq!(next, again);
    b.cas(SwapOutcome::Refused { current: next });
    assert_eq!(b.promotes(), ["a"], "the first attempt had been committed");
}

#[test]
fn rule_15_a_last_change_of_the_old_engine_is_built_upon() {
    let mut b = Bench::new();
    b.record(clean(&["a", "b"], &[], 1));
    let mut current = config(&["a"], &[], 1);
    current.config_number = ConfigNumber(11);
    b.cas(SwapOutcome::Refused { current });
    let (_, next) = b.asked().unwrap();
    assert_eq!((next.epoch, next.in_sync), (Epoch(6), set(&["a"])));
}

/// Up to the moment where one of two members was promoted and the other cannot be.
fn half_promoted(record: &Config, dead: &[&str]) -> Bench {
    let mut b = Bench::with(dead);
    b.record(record.clone());
    b.cas(SwapOutcome::Committed);
    b.promoted("a", Ok(()));
    b.promoted("b", Err(PromoteError::Unusable));
    b
}

#[test]
fn rule_16_the_old_engines_lease_is_waited_for_when_a_member_was_not_promoted() {
    let mut b = half_promoted(&config(&["a", "b"], &[], 1), &[]);
    assert!(b.out.iter().any(|a| matches!(a, OpenAction::Event(OpenEvent::LeaseWait { .. }))));
    assert!(b.out.contains(&OpenAction::WakeAt { at: b.now + 11_000 * MS }));
    b.advance(10_999 * MS);
    assert!(!b.goes_on(), "the sets are not even swapped: the next engine would not wait for the oldest");
    b.advance(MS);
    assert!(b.connect_all().is_none());
    assert_eq!(b.asked().unwrap().1.in_sync, set(&["a"]));
}

#[test]
fn rule_16_the_last_member_that_is_promoted_ends_the_wait() {
    let mut b = Bench::raised(&config(&["a", "b"], &[], 1));
    b.promoted("a", Ok(()));
    b.promoted("b", Err(PromoteError::Unreachable));
    b.advance(5_000 * MS);
    assert_eq!((b.promotes(), b.goes_on()), (vec!["b".to_owned()], false));
    b.promoted("b", Ok(()));
    assert!(b.goes_on());
}

#[test]
fn rule_16_nothing_is_waited_for_when_all_are_promoted_or_the_old_engine_is_dead_or_closed() {
    let mut b = Bench::raised(&config(&["a", "b"], &[], 1));
    b.promoted("a", Ok(()));
    b.promoted("b", Ok(()));
    assert!(b.goes_on());
    assert!(half_promoted(&config(&["a", "b"], &[], 1), &["e4", "e5"]).goes_on());
    assert!(half_promoted(&clean(&["a", "b"], &[], 1), &[]).goes_on());
}

#[test]
fn rule_16_a_dead_engine_that_is_not_the_records_proves_nothing() {
    let b = half_promoted(&config(&["a", "b"], &[], 1), &["e4"]);
    assert!(!b.goes_on() && !b.opener.follows_dead(), "e5 came after it, and may still read");
}

#[test]
fn rule_16_the_engine_that_the_record_is_of_in_the_end_has_to_be_dead() {
    let mut b = Bench::with(&["e5"]);
    b.record(config(&["a", "b"], &[], 1));
    assert!(b.opener.follows_dead());
    // Its last change, which the arbiter had not executed yet.
    let current = Config { config_number: ConfigNumber(11), ..config(&["a", "b"], &[], 1) };
    b.cas(SwapOutcome::Refused { current });
    b.cas(SwapOutcome::Committed);
    b.promoted("a", Ok(()));
    b.promoted("b", Err(PromoteError::Unusable));
    assert!(b.goes_on() && b.opener.follows_dead());
}

#[test]
fn rule_21_a_newer_epoch_a_missing_record_and_another_lineage_end_the_attempt() {
    let mut b = Bench::new();
    b.record(clean(&["a"], &[], 1));
    let mut current = config(&["a"], &[], 1);
    current.epoch = Epoch(6);
    current.engine_instance = EngineInstance::new("other").unwrap();
    b.cas(SwapOutcome::Refused { current });
    assert_eq!(b.failed(), Some(OpenError::Superseded));

    let mut b = Bench::new();
    b.input(OpenInput::RecordRead { result: Err(RecordError::NotFound) });
    assert_eq!(b.failed(), Some(OpenError::NoRecord));

    let mut b = Bench::new();
    b.record(Config { lineage: Lineage::new("other").unwrap(), ..clean(&["a"], &[], 1) });
    assert!(matches!(b.failed(), Some(OpenError::Lineage { .. })));

    let mut b = Bench::raised(&clean(&["a", "b"], &[], 1));
    b.promoted("a", Ok(()));
    b.promoted("b", Err(PromoteError::Newer));
    assert_eq!(b.failed(), Some(OpenError::Superseded));
}

#[test]
fn a_replica_without_usable_data_is_not_waited_for() {
    let mut b = Bench::raised(&clean(&["a", "b"], &[], 1));
    b.promoted("b", Err(PromoteError::Unusable));
    b.promoted("a", Ok(()));
    assert!(b.connect_all().is_none());
    assert_eq!(b.asked().unwrap().1.in_sync, set(&["a"]));
}

#[test]
fn an_arbiter_that_does_not_answer_is_asked_again_and_given_up_at_last() {
    let mut b = Bench::new();
    b.input(OpenInput::RecordRead { result: Err(RecordError::Unavailable) });
    b.advance(250 * MS);
    assert_eq!(b.out[0], OpenAction::ReadRecord);
    b.advance(60_000 * MS);
    assert_eq!(b.failed(), Some(OpenError::ArbiterTimeout));
}

#[test]
fn a_member_that_was_promoted_but_does_not_connect_is_given_to_the_core_as_lost() {
    let mut b = Bench::raised(&clean(&["a", "b"], &["c"], 1));
    for name in ["a", "b", "c"] {
        b.promoted(name, Ok(()));
    }
    b.input(OpenInput::Connected { leg: LegId(0), up: true });
    b.advance(2_000 * MS);
    let params = b.ready().unwrap();
    let legs: Vec<_> = params.legs.iter().map(|l| (l.replica.as_str(), l.up)).collect();
    assert_eq!(legs, [("a", true), ("b", false)], "a replica of R is added later");
    mirror_core::Core::open(params).unwrap();
}
