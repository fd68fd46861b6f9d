//! Volatile caches and power (rule 1).
#![allow(clippy::unwrap_used)]

mod common;

use std::sync::Arc;

use common::{Bench, MS, REGION, config, params, regions, replica, set, superblock, with_bits};
use mirror_core::meta::{META_BLOCK_BYTES, ReplicaState, Superblock, encode_bits};
use mirror_core::{
    Config, EngineInstance, Epoch, Input, LegError, LegId, MetaUnreadable, OpenAction, OpenError, OpenEvent, OpenInput,
    OpenParams, OpenWaits, Opener, OpenerParams, Options, PromoteError, ReplicaFacts, StopReason, SwapOutcome,
    VolumeId,
};

/// An opener that has promoted members; each with the instance it has now.
struct Opening {
    opener: Opener,
    now: u64,
    out: Vec<OpenAction>,
}

impl Opening {
    fn new(record: &Config, instances: &[(&str, &str)], volatile: bool) -> Self {
        let opener = Opener::new(OpenerParams {
            volume: VolumeId::new("v").unwrap(),
            block_size: 512,
            engine_instance: EngineInstance::new("e6").unwrap(),
            lineage: None,
            local: [].into(),
            dead_engines: [EngineInstance::new("e5").unwrap()].into(),
            in_vain: None,
            options: Options { region_blocks: REGION, ..Options::default() },
            waits: OpenWaits::default(),
        });
        let mut b = Self { opener, now: 1, out: Vec::new() };
        b.input(OpenInput::Start);
        b.input(OpenInput::RecordRead { result: Ok(record.clone()) });
        b.commit();
        for (name, instance) in instances {
            let facts = ReplicaFacts { meta: true, volatile, instance: (*instance).to_owned() };
            b.input(OpenInput::Promoted { replica: replica(name), result: Ok(facts) });
        }
        b
    }

    fn input(&mut self, input: OpenInput) {
        self.opener.apply(self.now, input, &mut self.out);
    }

    fn commit(&mut self) {
        let cas = self.out.iter().rev().find_map(|a| match a {
            OpenAction::DoCas { cas, .. } => Some(*cas),
            _ => None,
        });
        self.input(OpenInput::CasAnswer { cas: cas.unwrap(), outcome: SwapOutcome::Committed });
    }

    /// Connects all legs and gives back what their superblocks name; `None` does not connect.
    fn connect(&mut self, recorded: &[(&str, Option<&str>)]) {
        self.connect_with(recorded, ReplicaState::Member);
    }

    fn connect_with(&mut self, recorded: &[(&str, Option<&str>)], state: ReplicaState) {
        for (leg, (_, instance)) in (0u32..).zip(recorded) {
            self.input(OpenInput::Connected { leg: LegId(leg), up: instance.is_some() });
        }
        for (leg, (name, instance)) in (0u32..).zip(recorded) {
            if let Some(instance) = instance {
                self.input(OpenInput::MetaRead { leg: LegId(leg), result: Ok(area(name, instance, state)) });
            }
        }
        self.now += 10_000 * MS;
        self.input(OpenInput::Tick);
    }

    fn proposed(&self) -> Config {
        let next = self.out.iter().rev().find_map(|a| match a {
            OpenAction::DoCas { next, .. } => Some(next.clone()),
            _ => None,
        });
        next.unwrap()
    }

    fn failed(&self) -> Option<OpenError> {
        self.out.iter().find_map(|a| match a {
            OpenAction::Failed { reason } => Some(reason.clone()),
            _ => None,
        })
    }

    fn ready(&self) -> Option<OpenParams> {
        self.out.iter().find_map(|a| match a {
            OpenAction::Ready(params) => Some((**params).clone()),
            _ => None,
        })
    }
}

/// A meta area without a bit set, whose superblock names an instance.
fn area(name: &str, instance: &str, state: ReplicaState) -> Arc<[u8]> {
    let mut bytes = vec![0; META_BLOCK_BYTES];
    bytes.extend(Superblock { state, ..superblock(name, 5, instance) }.encode().unwrap());
    encode_bits(&regions(&[]), 0, &mut bytes);
    bytes.into()
}

#[test]
fn rule_01_a_member_whose_instance_changed_is_no_source_while_one_is_unchanged() {
    let mut b = Opening::new(&config(&["a", "b"], &[], 1), &[("a", "a2"), ("b", "b1")], true);
    b.connect(&[("a", Some("a1")), ("b", Some("b1"))]);
    let next = b.proposed();
    assert_eq!((next.in_sync, next.rebuilding), (set(&["b"]), set(&["a"])), "a is copied in full");
    b.commit();
    assert!(!b.ready().unwrap().hosts_must_detach);
}

#[test]
fn rule_01_a_superblock_of_an_older_engine_is_good_enough() {
    // The engine of epoch 6 died before it wrote superblocks; power was never lost.
    let record = Config { epoch: Epoch(6), ..config(&["a", "b"], &[], 1) };
    let mut b = Opening::new(&record, &[("a", "a1"), ("b", "b1")], true);
    b.connect(&[("a", Some("a1")), ("b", Some("b1"))]);
    let params = b.ready().unwrap();
    assert_eq!((params.config.in_sync, params.hosts_must_detach), (set(&["a", "b"]), false));
}

#[test]
fn rule_01_when_none_is_unchanged_hosts_must_detach() {
    let mut b = Opening::new(&config(&["a", "b"], &[], 1), &[("a", "a2"), ("b", "b2")], true);
    b.connect(&[("a", Some("a1")), ("b", Some("b1"))]);
    let params = b.ready().unwrap();
    assert!(params.hosts_must_detach && !params.flushed);
    assert_eq!(params.config.in_sync, set(&["a", "b"]));
    let told = OpenEvent::Changed { replicas: set(&["a", "b"]), hosts_must_detach: true };
    assert!(b.out.contains(&OpenAction::Event(told)));
}

#[test]
fn rule_01_a_member_that_could_not_be_asked_may_be_the_unchanged_one() {
    let mut b = Opening::new(&config(&["a", "b"], &[], 1), &[("a", "a2"), ("b", "b1")], true);
    b.connect(&[("a", Some("a1")), ("b", None)]);
    assert!(b.ready().is_none());
    assert!(b.out.contains(&OpenAction::Failed { reason: OpenError::Unread(set(&["b"])) }));
}

#[test]
fn rule_01_disks_without_a_volatile_cache_need_nothing_more() {
    let mut b = Opening::new(&config(&["a", "b"], &[], 1), &[("a", "a2"), ("b", "b2")], false);
    b.connect(&[("a", Some("a1")), ("b", Some("b1"))]);
    let params = b.ready().unwrap();
    assert_eq!((params.config.in_sync, params.hosts_must_detach), (set(&["a", "b"]), false));
}

#[test]
fn rule_01_after_a_clean_close_everything_was_flushed() {
    let record = Config { clean: true, ..config(&["a", "b"], &[], 1) };
    let mut b = Opening::new(&record, &[("a", "a2"), ("b", "b2")], true);
    b.connect(&[("a", Some("a1")), ("b", Some("b1"))]);
    let params = b.ready().unwrap();
    assert!(params.flushed && !params.hosts_must_detach);
}

#[test]
fn rule_01_what_was_closed_in_order_lost_nothing_though_an_opening_failed_since() {
    // The failed opening has raised the record, which says "clean" no more.
    let record = Config { epoch: Epoch(6), ..config(&["a", "b"], &[], 1) };
    let mut b = Opening::new(&record, &[("a", "a2"), ("b", "b2")], true);
    b.connect_with(&[("a", Some("a1")), ("b", Some("b1"))], ReplicaState::ClosedClean);
    let params = b.ready().unwrap();
    assert_eq!((params.config.in_sync, params.hosts_must_detach), (set(&["a", "b"]), false));
}

#[test]
fn rule_01_strict_mode_makes_a_changed_member_equal_before_it_serves() {
    let mut b = Opening::new(&config(&["a", "b"], &[], 2), &[("a", "a2"), ("b", "b1")], true);
    b.connect(&[("a", Some("a1")), ("b", Some("b1"))]);
    let params = b.ready().unwrap();
    assert_eq!((params.equalise_from, params.config.in_sync.len()), (None, 2));
    let changed: Vec<_> = params.legs.iter().filter(|l| l.changed).map(|l| l.replica.clone()).collect();
    assert_eq!(changed, [replica("a")]);
    let options = Options { region_blocks: REGION, ..common::params(&["a"], &[], 1).options };
    let mut core = Bench::new(OpenParams { options, ..params });
    assert_eq!(core.core.status().inherited_regions, 16, "nobody knows where a lacks something");
    let r = core.read(5, 1);
    core.back(0);
    core.back(1);
    assert!(named(&mut core).contains(&(0, String::new())), "until it is equal it may lack something");
    let copied: Vec<u32> = core.copies().iter().map(|io| io.leg.0).collect();
    assert!(!copied.is_empty() && copied.iter().all(|leg| *leg == 1), "read from b alone: {copied:?}");
    core.settle_io();
    assert_eq!(core.result_of(r), Some(Ok(())));
    assert_eq!(core.core.status().inherited_regions, 0);
    assert!(named(&mut core).contains(&(0, "a2".to_owned())));
    for _ in 0..4 {
        let r = core.read(9, 1);
        core.settle_io();
        assert_eq!(core.result_of(r), Some(Ok(())));
    }
}

#[test]
fn rule_01_when_the_only_unchanged_member_goes_the_changed_ones_serve_nothing() {
    let mut p = with_bits(&["a", "b", "c"], &[], 2, &[]);
    p.legs[1].changed = true;
    p.legs[2].changed = true;
    let mut b = Bench::new(p);
    b.settle_meta();
    let r = b.read(5, 1);
    let reads = b.copies();
    b.finish(reads[0], Err(LegError::Media));
    assert!(b.swaps.is_empty(), "before any swap that makes them the set");
    assert!(matches!(b.stopped, Some(StopReason::CacheLost { .. })), "{:?}", b.events);
    assert_eq!(b.result_of(r), Some(Err(mirror_core::HostError::PathGone)));
}

#[test]
fn rule_01_what_an_older_engine_wrote_is_lost_with_the_cache_too() {
    let back_without_cache = |flushed: bool| {
        let mut b = Bench::new(OpenParams { flushed, ..params(&["a", "b"], &[], 1) });
        b.lose(1);
        b.input(Input::LegBack { leg: LegId(1), cache_lost: true });
        b.swaps.len()
    };
    assert_eq!((back_without_cache(false), back_without_cache(true)), (1, 0));
}

/// Instances that the superblocks written since name.
fn named(b: &mut Bench) -> Vec<(u32, String)> {
    let mut named = Vec::new();
    while let Some(meta) = b.metas.first().cloned() {
        if let Some(superblock) = meta.superblock() {
            named.push((meta.leg.0, superblock.instance));
        }
        b.finish_meta(&meta, Ok(()));
    }
    named.sort();
    named.dedup();
    named
}

#[test]
fn rule_01_superblocks_name_the_instance_and_follow_its_changes() {
    let mut p = with_bits(&["a", "b"], &[], 1, &[]);
    p.legs[0].instance = "a1".to_owned();
    p.legs[1].instance = "b1".to_owned();
    let mut b = Bench::new(p);
    assert_eq!(named(&mut b), [(0, "a1".to_owned()), (1, "b1".to_owned())]);
    b.lose(1);
    b.input(Input::LegInstance { leg: LegId(1), instance: "b2".to_owned() });
    b.input(Input::LegBack { leg: LegId(1), cache_lost: true });
    assert!(named(&mut b).contains(&(1, "b2".to_owned())), "nothing was lost: it holds everything");
}

#[test]
fn rule_01_superblocks_name_no_instance_until_hosts_have_detached() {
    let mut p = with_bits(&["a", "b"], &[], 1, &[]);
    p.legs[0].instance = "a2".to_owned();
    p.legs[1].instance = "b2".to_owned();
    p.hosts_must_detach = true;
    let mut b = Bench::new(p);
    assert_eq!(named(&mut b), [(0, String::new()), (1, String::new())], "the next engine refuses them too");
    b.input(Input::HostsDetached);
    assert_eq!(named(&mut b), [(0, "a2".to_owned()), (1, "b2".to_owned())]);
}

#[test]
fn rule_01_a_member_that_could_not_be_asked_keeps_what_its_superblock_names() {
    let mut p = with_bits(&["a", "b"], &[], 2, &[]);
    p.legs.iter_mut().for_each(|leg| leg.instance = "now".to_owned());
    p.legs[0].changed = true;
    let mut b = Bench::new(p);
    let reads = b.metas.clone();
    for read in reads {
        let mut data = vec![0; META_BLOCK_BYTES];
        data.extend(superblock("a", 4, "then").encode().unwrap());
        b.metas.retain(|meta| meta.io != read.io);
        b.input(Input::MetaRead { leg: read.leg, io: read.io, data: data.into() });
    }
    assert_eq!(named(&mut b), [(0, "then".to_owned()), (1, "now".to_owned())]);
}

#[test]
fn rule_01_a_close_while_hosts_must_detach_is_not_clean() {
    let mut p = with_bits(&["a", "b"], &[], 1, &[]);
    p.hosts_must_detach = true;
    let mut b = Bench::new(p);
    b.settle_meta();
    b.input(Input::Close);
    for _ in 0..4 {
        b.settle_io();
        b.settle_meta();
    }
    assert!(b.closed && b.swaps.is_empty(), "{:?}", b.swaps);
}

/// `a` was promoted and connected; its session ended before its superblock was read.
fn read_lost() -> Opening {
    let mut b = Opening::new(&config(&["a"], &[], 1), &[("a", "a1")], true);
    b.input(OpenInput::Connected { leg: LegId(0), up: true });
    b.out.clear();
    b.input(OpenInput::MetaRead { leg: LegId(0), result: Err(MetaUnreadable) });
    b
}

impl Opening {
    /// Time for the next attempt to read `a`: whether it was promoted for it.
    fn promote_again(&mut self, instance: &str) -> bool {
        self.out.clear();
        self.now += 250 * MS;
        self.input(OpenInput::Tick);
        let asked = self.out.iter().any(|a| matches!(a, OpenAction::Promote { .. }));
        let facts = ReplicaFacts { meta: true, volatile: true, instance: instance.to_owned() };
        self.input(OpenInput::Promoted { replica: replica("a"), result: Ok(facts) });
        asked
    }

    /// Connects `a` again: whether it is read then.
    fn connect_again(&mut self) -> bool {
        self.input(OpenInput::Connected { leg: LegId(0), up: true });
        self.out.iter().any(|a| matches!(a, OpenAction::ReadMeta { .. }))
    }
}

#[test]
fn rule_01_a_superblock_whose_session_ended_is_read_again_over_a_new_promote() {
    let mut b = read_lost();
    assert!(b.ready().is_none() && b.failed().is_none(), "a late promote of this engine ended it: nothing was lost");
    assert!(b.promote_again("a1"));
    assert!(b.out.iter().any(|a| matches!(a, OpenAction::Connect { leg: LegId(0), .. })));
    assert!(b.connect_again());
    b.input(OpenInput::MetaRead { leg: LegId(0), result: Ok(area("a", "a1", ReplicaState::Member)) });
    let params = b.ready().unwrap();
    assert!(!params.hosts_must_detach && params.legs[0].up);
}

#[test]
fn rule_01_what_a_replica_says_at_the_last_promote_counts() {
    let mut b = read_lost();
    b.promote_again("a2");
    b.connect_again();
    b.input(OpenInput::MetaRead { leg: LegId(0), result: Ok(area("a", "a1", ReplicaState::Member)) });
    let params = b.ready().unwrap();
    assert!(params.hosts_must_detach, "its power was lost between the two promotes");
    assert_eq!(params.legs[0].instance, "a2");
}

#[test]
fn rule_01_a_superblock_that_cannot_be_read_is_given_up() {
    let mut b = read_lost();
    for attempt in 1..4 {
        assert!(b.ready().is_none(), "attempt {attempt}");
        assert!(b.promote_again("a1") && b.connect_again());
        b.input(OpenInput::MetaRead { leg: LegId(0), result: Err(MetaUnreadable) });
    }
    assert!(b.ready().unwrap().hosts_must_detach, "its disk is bad: nobody knows what it holds");
}

#[test]
fn rule_01_a_replica_that_is_gone_while_its_superblock_is_read_may_be_unchanged() {
    let mut b = read_lost();
    b.now += 5_000 * MS;
    b.input(OpenInput::Tick);
    let failed = b.failed();
    assert_eq!(failed, Some(OpenError::Unread(set(&["a"]))), "not opened, and hosts are not refused: tried again");
}

#[test]
fn rule_15_a_newer_engine_is_found_when_a_superblock_is_read_again() {
    let mut b = read_lost();
    b.now += 250 * MS;
    b.input(OpenInput::Tick);
    b.input(OpenInput::Promoted { replica: replica("a"), result: Err(PromoteError::Newer) });
    assert_eq!(b.failed(), Some(OpenError::Superseded));
}
