//! The record in doubt, and deletion (rules 11, 21 and 22).
#![allow(clippy::unwrap_used)]

mod common;

use std::collections::BTreeMap;

use common::{config, replica, set};
use mirror_core::recover::{AskReason, Evidence, KeepReason, Recovery, ReplicaKnows, Report, may_delete, recover};
use mirror_core::{Config, ConfigNumber, EngineInstance, Epoch, Lineage};

/// A replica that knows configuration `k` with these members, promoted to epoch 5.
fn knows(k: u64, in_sync: &[&str]) -> Report {
    let record = Config { config_number: ConfigNumber(k), ..config(in_sync, &[], 1) };
    Report::Knows(Box::new(ReplicaKnows { record, promoted: Epoch(5) }))
}

fn change(report: &Report, change: impl FnOnce(&mut ReplicaKnows)) -> Report {
    let Report::Knows(mut knows) = report.clone() else { panic!("{report:?} knows nothing") };
    change(&mut knows);
    Report::Knows(knows)
}

fn evidence(record: Option<Config>, replicas: &[(&str, Report)]) -> Evidence {
    let replicas: BTreeMap<_, _> = replicas.iter().map(|(name, report)| (replica(name), report.clone())).collect();
    let (new_lineage, author) = (Lineage::new("l2").unwrap(), EngineInstance::new("operator").unwrap());
    Evidence { record, replicas, new_lineage, author }
}

fn rebuilt(evidence: &Evidence) -> Config {
    match recover(evidence) {
        Recovery::Rebuild(config) => *config,
        other => panic!("{other:?}"),
    }
}

#[test]
fn rule_21_a_record_that_is_gone_is_rebuilt_from_the_replica_that_knows_most() {
    let e = evidence(None, &[("a", knows(12, &["a"])), ("b", knows(11, &["a", "b"])), ("c", Report::Empty)]);
    let record = rebuilt(&e);
    assert_eq!((record.in_sync.clone(), record.config_number), (set(&["a"]), ConfigNumber(13)));
    assert_eq!((record.epoch, record.clean, record.size_blocks), (Epoch(5), false, common::BLOCKS));
    record.check().unwrap();
}

#[test]
fn rule_11_a_rebuilt_record_begins_a_new_lineage() {
    let e = evidence(None, &[("a", knows(12, &["a"]))]);
    assert_eq!(rebuilt(&e).lineage.as_str(), "l2");
}

#[test]
fn rule_21_one_known_replica_that_was_not_read_holds_everything() {
    // b alone looks lawful. a was the last member, and the restored record does not know it.
    let restored = config(&["a", "b"], &[], 1);
    let e = evidence(Some(restored.clone()), &[("a", Report::Unread), ("b", knows(10, &["a", "b"]))]);
    assert_eq!(recover(&e), Recovery::Wait(set(&["a"])));
    let e = evidence(Some(restored), &[("a", knows(11, &["a"])), ("b", knows(10, &["a", "b"]))]);
    assert_eq!(rebuilt(&e).in_sync, set(&["a"]));
    let e = evidence(None, &[("a", Report::Unread), ("b", knows(10, &["a", "b"]))]);
    assert_eq!(recover(&e), Recovery::Wait(set(&["a"])));
}

#[test]
fn rule_21_a_record_as_new_as_all_replicas_is_kept() {
    let replicas = [("a", knows(10, &["a", "b"])), ("b", knows(9, &["a", "b", "c"])), ("c", knows(8, &["a", "c"]))];
    let record = config(&["a", "b"], &[], 1);
    assert_eq!(recover(&evidence(Some(record.clone()), &replicas)), Recovery::Keep);
    // A record whose last swap was not carried yet is newer than all of them.
    let next = Config { config_number: ConfigNumber(11), in_sync: set(&["a"]), ..record };
    assert_eq!(recover(&evidence(Some(next), &replicas)), Recovery::Keep);
}

#[test]
fn rule_21_a_record_that_is_kept_is_raised_above_the_fence_of_the_recovery() {
    let fenced = |k| change(&knows(k, &["a", "b"]), |k| k.promoted = Epoch(6));
    let record = config(&["a", "b"], &[], 1);
    let e = evidence(Some(record.clone()), &[("a", fenced(10)), ("b", fenced(9))]);
    let Recovery::Raise(raised) = recover(&e) else { panic!("{:?}", recover(&e)) };
    assert_eq!((raised.epoch, raised.engine_instance.as_str()), (Epoch(6), "operator"));
    let same = Config { epoch: record.epoch, engine_instance: record.engine_instance.clone(), ..*raised.clone() };
    assert_eq!(same, record, "lineage, sets and number stay");
    record.check_successor(&raised).unwrap();
}

#[test]
fn rule_21_a_replica_of_a_newer_epoch_shows_that_the_record_is_old() {
    let newer = change(&knows(10, &["a", "b"]), |k| (k.promoted, k.record.epoch) = (Epoch(8), Epoch(7)));
    let e = evidence(Some(config(&["a", "b"], &[], 1)), &[("a", newer), ("b", knows(10, &["a", "b"]))]);
    let record = rebuilt(&e);
    assert_eq!((record.epoch, record.config_number), (Epoch(8), ConfigNumber(11)));
}

#[test]
fn rule_21_a_volume_is_never_initialised() {
    let none = evidence(None, &[("a", Report::Empty), ("b", Report::Empty)]);
    assert_eq!(recover(&none), Recovery::Ask(AskReason::NoData));
    assert_eq!(recover(&evidence(None, &[])), Recovery::Ask(AskReason::NoData));
    let lost = evidence(None, &[("a", Report::Empty), ("b", knows(10, &["a"]))]);
    assert_eq!(recover(&lost), Recovery::Ask(AskReason::MembersGone(set(&["a"]))));
}

#[test]
fn rule_21_a_member_whose_disk_was_emptied_is_no_member() {
    let e = evidence(None, &[("a", Report::Empty), ("b", knows(10, &["a", "b"]))]);
    assert_eq!(rebuilt(&e).in_sync, set(&["b"]));
}

#[test]
fn rule_21_what_contradicts_itself_is_left_to_an_operator() {
    let other = change(&knows(12, &["b"]), |k| k.record.lineage = Lineage::new("x").unwrap());
    let e = evidence(None, &[("a", knows(12, &["a"])), ("b", other)]);
    assert!(matches!(recover(&e), Recovery::Ask(AskReason::Lineages(l)) if l.len() == 2));
    let e = evidence(None, &[("a", knows(12, &["a"])), ("b", knows(12, &["b"]))]);
    assert!(matches!(recover(&e), Recovery::Ask(AskReason::Contradiction(..))));
    let e = evidence(None, &[("a", knows(12, &["a", "z"]))]);
    assert_eq!(recover(&e), Recovery::Ask(AskReason::Unknown(replica("z"))));
}

#[test]
fn rule_21_all_members_closed_in_order_make_a_clean_record() {
    let closed = change(&knows(10, &["a", "b"]), |k| k.record.clean = true);
    let e = evidence(None, &[("a", closed.clone()), ("b", closed.clone())]);
    assert!(rebuilt(&e).clean);
    let e = evidence(None, &[("a", closed), ("b", knows(10, &["a", "b"]))]);
    assert!(!rebuilt(&e).clean);
}

#[test]
fn rule_22_data_goes_only_after_a_swap_took_the_replica_out() {
    let record = config(&["a"], &["b"], 1);
    let old = knows(9, &["a", "b", "c"]);
    assert_eq!(may_delete(Some(&record), &replica("a"), &old), Err(KeepReason::Recorded("in_sync")));
    assert_eq!(may_delete(Some(&record), &replica("b"), &old), Err(KeepReason::Recorded("rebuilding")));
    assert_eq!(may_delete(Some(&record), &replica("c"), &old), Ok(()));
    assert_eq!(may_delete(Some(&record), &replica("c"), &Report::Empty), Ok(()));
}

#[test]
fn rule_22_an_orphan_as_new_as_the_record_or_without_a_record_stays() {
    let record = config(&["a"], &[], 1);
    let c = replica("c");
    assert_eq!(may_delete(None, &c, &knows(1, &["c"])), Err(KeepReason::NoRecord));
    assert_eq!(may_delete(None, &c, &Report::Empty), Err(KeepReason::NoRecord));
    assert_eq!(may_delete(Some(&record), &c, &Report::Unread), Err(KeepReason::Unread));
    let as_new = may_delete(Some(&record), &c, &knows(10, &["c"]));
    assert!(matches!(as_new, Err(KeepReason::AsNewAsRecord { .. })));
    let promoted = change(&knows(9, &["c"]), |k| k.promoted = Epoch(6));
    assert!(matches!(may_delete(Some(&record), &c, &promoted), Err(KeepReason::AsNewAsRecord { .. })));
    let other = change(&knows(9, &["c"]), |k| k.record.lineage = Lineage::new("x").unwrap());
    assert!(matches!(may_delete(Some(&record), &c, &other), Err(KeepReason::Lineage { .. })));
}
