//! Whatever comes in, in any order: no panic, one answer per command, no success after a stop, only lawful records.
#![allow(clippy::unwrap_used)]

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use common::{MS, Meta, config, geometry, params, regions, replica, with_bits};
use mirror_core::meta::{META_BLOCK_BYTES, RegionBits, decode_bits};
use mirror_core::{
    Action, Config, Core, DropReason, Event, HostId, Input, IoId, LegError, LegId, MetaOp, Op, Options, Payload,
    ReplicaId, SnapshotError, SnapshotId, SwapId, SwapOutcome,
};
use proptest::prelude::*;

#[derive(Debug, Clone)]
enum Step {
    Host { op: u8, lba: u64, blocks: u32 },
    Finish { pick: usize, result: u8 },
    Stranger { leg: u32, io: u64 },
    Lost(u32),
    Back { leg: u32, cache_lost: bool },
    Swap { pick: u8 },
    WrongSwap(u64),
    Add { leg: u32, name: u8 },
    Remove(u32),
    Pass(u64),
    Snapshot,
    Taken(u8),
    Abort,
    Close,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        12 => (0u8..6, 0u64..66, 0u32..20).prop_map(|(op, lba, blocks)| Step::Host { op, lba, blocks }),
        30 => (any::<usize>(), 0u8..40).prop_map(|(pick, result)| Step::Finish { pick, result }),
        1 => (0u32..99, any::<u64>()).prop_map(|(leg, io)| Step::Stranger { leg, io }),
        2 => (0u32..20).prop_map(Step::Lost),
        4 => (0u32..20, proptest::bool::weighted(0.1)).prop_map(|(leg, cache_lost)| Step::Back { leg, cache_lost }),
        8 => (0u8..6).prop_map(|pick| Step::Swap { pick }),
        1 => any::<u64>().prop_map(Step::WrongSwap),
        2 => (0u32..20, 0u8..5).prop_map(|(leg, name)| Step::Add { leg, name }),
        1 => (0u32..20).prop_map(Step::Remove),
        3 => (0u64..1500).prop_map(Step::Pass),
        3 => Just(Step::Snapshot),
        5 => any::<u8>().prop_map(Step::Taken),
        1 => Just(Step::Abort),
        1 => Just(Step::Close),
    ]
}

struct Any {
    core: Core,
    now: u64,
    ios: Vec<(LegId, IoId)>,
    metas: Vec<Meta>,
    /// The volume has meta areas: what is on them, by replica.
    disks: Option<BTreeMap<ReplicaId, RegionBits>>,
    legs: BTreeMap<LegId, ReplicaId>,
    /// Replicas that are members although their meta area failed.
    without: BTreeSet<ReplicaId>,
    swaps: Vec<(SwapId, Config)>,
    /// Commands given, and how often each was answered.
    answers: BTreeMap<HostId, u32>,
    stopped: bool,
    record: Config,
    /// Snapshots begun, and how often each was answered.
    snapshots: BTreeMap<SnapshotId, u32>,
    /// Hosts may change nothing until then.
    still_until: u64,
    /// Who has the latest snapshot.
    taken: BTreeSet<ReplicaId>,
}

/// Longest hold of a snapshot.
const HOLD: u64 = 2000 * MS;

impl Any {
    fn input(&mut self, input: Input) {
        let mut out = Vec::new();
        self.core.apply(self.now, input, &mut out);
        let mut dropped = Vec::new();
        for action in out {
            match action {
                Action::LegIo { leg, io, op, lba, blocks, payload } => {
                    assert!(lba + u64::from(blocks) <= common::BLOCKS);
                    if op.changes_blocks() && matches!(payload, Payload::Host(_)) {
                        assert!(self.now >= self.still_until, "written while members take a snapshot");
                        self.check_bits(lba, blocks);
                    }
                    self.ios.push((leg, io));
                }
                Action::HostDone { id, result } => {
                    *self.answers.entry(id).or_default() += 1;
                    assert!(!(self.stopped && result.is_ok()), "success after a stop");
                }
                Action::Swap { swap, expect, next, .. } => {
                    assert_eq!(expect, self.record.version(), "a swap expects the record that stands");
                    self.record.check_successor(&next).unwrap();
                    if next.tree != self.record.tree {
                        assert!(next.in_sync.is_subset(&self.taken), "a member lacks the snapshot");
                        assert_eq!(next.tree.last.as_ref().map(|l| &l.replicas), Some(&next.in_sync));
                    }
                    self.swaps.push((swap, *next));
                }
                Action::MetaIo { leg, io, op } => self.metas.push(Meta { leg, io, op }),
                Action::Event(Event::MetaFailed { leg, .. }) => self.without.extend(self.legs.get(&leg).cloned()),
                Action::LegDrop { leg, reason } => {
                    if reason != DropReason::Refused {
                        self.legs.remove(&leg);
                    }
                    dropped.push(leg);
                }
                Action::SnapshotHeld { members, .. } => {
                    assert!(!members.is_empty());
                    assert_eq!(self.core.status().inherited_regions, 0, "rule 19");
                    self.still_until = self.now + HOLD;
                }
                Action::SnapshotDone { id, result } => {
                    // A word on one that is not being taken is answered, too, and ends nothing.
                    if result != Err(SnapshotError::NotHeld) && !matches!(result, Err(SnapshotError::Busy { .. })) {
                        self.still_until = 0;
                    }
                    if result != Err(SnapshotError::NotHeld) {
                        *self.snapshots.entry(id).or_default() += 1;
                    }
                }
                Action::Stopped { .. } => self.stopped = true,
                _ => {}
            }
        }
        // The runner ends connections: what was in flight on them is lost.
        for leg in dropped {
            self.lose(leg);
            self.input(Input::LegLost { leg, announced: false });
        }
    }

    /// What is in flight on a leg is lost; half of it was executed.
    fn lose(&mut self, leg: LegId) {
        self.ios.retain(|(l, _)| *l != leg);
        let (lost, kept) = std::mem::take(&mut self.metas).into_iter().partition(|m| m.leg == leg);
        self.metas = kept;
        for meta in lost {
            let meta: Meta = meta;
            if meta.io.0.is_multiple_of(2) {
                self.execute(&meta);
            }
        }
    }

    fn execute(&mut self, meta: &Meta) {
        let (Some(disks), Some(replica)) = (&mut self.disks, self.legs.get(&meta.leg)) else { return };
        if let MetaOp::Write { block: 2, data } = &meta.op {
            disks.insert(replica.clone(), decode_bits(&geometry(), data).0);
        }
    }

    /// Rules 9 and 18: whatever happened before, every recorded member's disk says that this region is written.
    fn check_bits(&self, lba: u64, blocks: u32) {
        let Some(disks) = &self.disks else { return };
        let (first, last) = geometry().regions_of(lba, blocks);
        for member in self.record.in_sync.iter().filter(|m| !self.without.contains(*m)) {
            let set = (first..=last).all(|region| disks.get(member).is_some_and(|bits| bits.contains(region)));
            assert!(set, "{lba}+{blocks} is written but its bits are not set on {member}");
        }
    }

    /// Ends one I/O on a meta area.
    fn finish_meta(&mut self, meta: &Meta, result: Result<(), LegError>) -> Input {
        let (leg, io) = (meta.leg, meta.io);
        if result.is_ok() || io.0.is_multiple_of(2) {
            self.execute(meta);
        }
        match (&meta.op, result) {
            (MetaOp::Read { blocks, .. }, Ok(())) => {
                Input::MetaRead { leg, io, data: Arc::from(vec![0; *blocks as usize * META_BLOCK_BYTES]) }
            }
            (_, result) => Input::LegDone { leg, io, result },
        }
    }

    fn step(&mut self, number: u64, step: Step) {
        let input = match step {
            Step::Host { op, lba, blocks } => {
                let op = match op {
                    0 | 1 => Op::Read,
                    2 => Op::Write { fua: true },
                    3 => Op::Flush,
                    4 => Op::Unmap,
                    _ => Op::Write { fua: false },
                };
                self.answers.insert(HostId(number), 0);
                Input::Host { id: HostId(number), op, lba, blocks }
            }
            Step::Finish { pick, result } if self.ios.len() + self.metas.len() > 0 => {
                let result = match result {
                    0 => Err(LegError::Media),
                    1 => Err(LegError::NoSpace),
                    2 => Err(LegError::Gone),
                    3 => Err(LegError::Other),
                    _ => Ok(()),
                };
                let pick = pick % (self.ios.len() + self.metas.len());
                if let Some(pick) = pick.checked_sub(self.ios.len()) {
                    let meta = self.metas.remove(pick);
                    self.finish_meta(&meta, result)
                } else {
                    let (leg, io) = self.ios.remove(pick);
                    Input::LegDone { leg, io, result }
                }
            }
            Step::Finish { .. } => Input::Tick,
            Step::Stranger { leg, io } => Input::LegDone { leg: LegId(leg), io: IoId(io), result: Ok(()) },
            Step::Lost(leg) => {
                self.lose(LegId(leg));
                Input::LegLost { leg: LegId(leg), announced: leg % 2 == 0 }
            }
            Step::Back { leg, cache_lost } => {
                self.lose(LegId(leg));
                Input::LegBack { leg: LegId(leg), cache_lost }
            }
            Step::Swap { pick } if !self.swaps.is_empty() => {
                let (swap, next) = self.swaps.remove(0);
                let outcome = match pick {
                    0 => SwapOutcome::Unknown,
                    1 => SwapOutcome::Refused { current: self.record.clone() },
                    _ => {
                        self.record = next;
                        SwapOutcome::Committed
                    }
                };
                Input::SwapAnswer { swap, outcome }
            }
            Step::Swap { .. } => Input::Tick,
            Step::WrongSwap(swap) => {
                Input::SwapAnswer { swap: SwapId(swap | 1 << 40), outcome: SwapOutcome::Committed }
            }
            Step::Add { leg, name } => {
                let replica = replica(["a", "b", "c", "d", "e"][usize::from(name)]);
                let leg = LegId(leg);
                if !self.legs.values().any(|r| *r == replica) && leg.0 < 16 {
                    self.legs.entry(leg).or_insert_with(|| replica.clone());
                }
                Input::AddLeg { leg, replica, local: false, meta: self.disks.is_some() }
            }
            Step::Remove(leg) => Input::RemoveLeg { leg: LegId(leg) },
            Step::Pass(ms) => {
                self.now += ms * MS;
                Input::Tick
            }
            Step::Snapshot => {
                let id = snapshot(number);
                self.snapshots.insert(id.clone(), 0);
                Input::SnapshotBegin { id, hold_ns: HOLD }
            }
            Step::Taken(mask) => {
                let bits = (0..8).cycle().map(|bit| mask & (1 << bit) != 0);
                self.taken =
                    self.record.in_sync.iter().zip(bits).filter(|(_, has)| *has).map(|(r, _)| r.clone()).collect();
                Input::SnapshotTaken { id: self.latest(), replicas: self.taken.clone() }
            }
            Step::Abort => Input::SnapshotAbort { id: self.latest() },
            Step::Close => Input::Close,
        };
        self.input(input);
    }

    /// The snapshot that is not answered, or any.
    fn latest(&self) -> SnapshotId {
        let open = self.snapshots.iter().find(|(_, answers)| **answers == 0);
        open.map_or_else(|| snapshot(0), |(id, _)| id.clone())
    }
}

fn snapshot(number: u64) -> SnapshotId {
    SnapshotId::new(&format!("s{number}")).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(64) })]
    #[test]
    fn any_input_in_any_order_keeps_the_contract(
        min in 1u32..3,
        equalise in any::<bool>(),
        inherited in proptest::option::of(proptest::collection::vec(0u32..16, 0..4)),
        steps in proptest::collection::vec(step(), 1..400),
    ) {
        let (members, joiners) = (["a", "b", "c"], ["d"]);
        let mut p = match &inherited {
            Some(inherited) => with_bits(&members, &joiners, min, inherited),
            None => params(&members, &joiners, min),
        };
        p.equalise_from = (equalise && min == 2 && inherited.is_none()).then_some(LegId(1));
        p.options = Options { max_inflight: 16, live_regions_max: 4, ..p.options };
        let legs = p.legs.iter().map(|l| (l.leg, l.replica.clone())).collect();
        // What an earlier engine left: nothing that this one may rely on.
        let disks = inherited.map(|_| members.iter().map(|m| (replica(m), regions(&[]))).collect());
        let core = Core::open(p).unwrap();
        let record = config(&["a", "b", "c"], &["d"], min);
        let mut any = Any {
            core,
            now: 1,
            ios: Vec::new(),
            metas: Vec::new(),
            disks,
            legs,
            without: BTreeSet::new(),
            swaps: Vec::new(),
            answers: BTreeMap::new(),
            stopped: false,
            record,
            snapshots: BTreeMap::new(),
            still_until: 0,
            taken: BTreeSet::new(),
        };
        for (number, step) in (0u64..).zip(steps) {
            any.step(number, step);
            prop_assert!(any.answers.values().all(|n| *n <= 1), "answered twice");
            prop_assert!(any.snapshots.values().all(|n| *n <= 1), "a snapshot ended twice");
            prop_assert!(!any.core.config().in_sync.is_empty());
        }
        // What is not answered is known to be in flight.
        let waiting = any.answers.values().filter(|n| **n == 0).count();
        prop_assert_eq!(waiting, any.core.status().inflight);
    }
}
