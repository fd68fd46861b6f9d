//! Taking a snapshot on all members at one moment (rule 19).
//!
//! *What it is.* The core's part: it holds changes back, tells the runner when the members are equal and still, takes the
//! runner's word on who has the snapshot, has the record say so, and lets changes go on. The snapshot itself is taken by the
//! runner, on each replica, while everything is held:
//! ```text
//! Begin ─▶ Draining ─▶ Flushing ─▶ Held ──(SnapshotTaken)──▶ Recording ─▶ done: tree version and name are in the record
//!            changes     every       SnapshotHeld: the          members without it leave first (rule 6)
//!            in flight   member      runner asks replicas
//! ```
//! Reads pass: they change nothing. Copies to joiners go on, too: a joiner is no member, misses the snapshot, and has its
//! writes in its head only. Nobody joins between `Held` and the record, so that `S` only shrinks.
//!
//! *Invariants.*
//! - It begins only while no region is inherited and no member is being made equal.
//! - From `SnapshotHeld` to the end of the hold no member is written to by a host.
//! - The record names a snapshot only when every member of its `S` has it. What a replica outside that set has under the
//!   same name is not the snapshot.
//! - Held commands keep their order and their places among `max_inflight`.
//!
//! *When things fail.* [`SnapshotError`]; changes go on at once, and what replicas have taken is the runner's to delete. The
//! hold ends by itself at its deadline, whatever the runner does. A swap that is under way then is waited for without a
//! hold: all members have the snapshot already, and only whether it counts is open.

use std::collections::{BTreeSet, VecDeque};

use crate::config::{Config, LastSnapshot, ReplicaId, SnapshotId};
use crate::core::{Core, Life};
use crate::events::{Action, DropReason, LegError, LegId, Nanos, Op, Payload, SnapshotError, SwapReason};
use crate::host::Stage as HostStage;
use crate::legs::{Leg, LegMask, Owner, Role};

#[derive(Debug, Clone, PartialEq, Eq)]
enum Stage {
    /// Changes in flight are finished.
    Draining,
    /// Flushes: sent, done.
    Flushing { sent: LegMask, done: LegMask },
    /// The replicas take it.
    Held,
    /// These have it; the record is to say so.
    Recording { taken: BTreeSet<ReplicaId> },
}

/// The snapshot under way.
#[derive(Debug)]
pub(crate) struct Snapshot {
    id: SnapshotId,
    stage: Stage,
    /// When changes go on, come what may.
    until: Nanos,
    /// Changes are held back.
    holds: bool,
    /// Commands that are held back, in their order.
    waiting: VecDeque<u32>,
}

impl Snapshot {
    /// What the runner hears of it when the core stops; held commands are failed with all others.
    pub(crate) fn stopped(self) -> Action {
        Action::SnapshotDone { id: self.id, result: Err(SnapshotError::Stopped) }
    }
}

impl Core {
    /// Changes are held back for a snapshot.
    pub(crate) fn holds_changes(&self) -> bool {
        self.snapshot.as_ref().is_some_and(|s| s.holds)
    }

    /// Keeps a command back until the snapshot is taken.
    pub(crate) fn hold_back(&mut self, slot: u32) {
        self.host.set_stage(slot, HostStage::Held);
        if let Some(snapshot) = &mut self.snapshot {
            snapshot.waiting.push_back(slot);
        }
    }

    /// When the hold ends by itself.
    pub(crate) fn snapshot_deadline(&self) -> Option<Nanos> {
        self.snapshot.as_ref().filter(|s| s.holds).map(|s| s.until)
    }

    /// Nobody may join: members of `S` are being asked for a snapshot.
    pub(crate) fn keeps_joiners_out(&self) -> bool {
        self.snapshot.as_ref().is_some_and(|s| s.stage != Stage::Draining)
    }

    pub(crate) fn apply_snapshot_begin(&mut self, id: SnapshotId, hold_ns: Nanos, out: &mut Vec<Action>) {
        let unequal = self.inherited_left() > 0 && !self.bends_inherited();
        let refusal = if self.life != Life::Running {
            Some(SnapshotError::Closing)
        } else if let Some(other) = &self.snapshot {
            Some(SnapshotError::Busy { other: other.id.clone() })
        } else if unequal || self.barrier.is_some() || self.legs.iter().any(|l| l.unequal) {
            Some(SnapshotError::Unequal { regions: self.inherited_left() })
        } else {
            None
        };
        if let Some(error) = refusal {
            out.push(Action::SnapshotDone { id, result: Err(error) });
            return;
        }
        let until = self.now.saturating_add(hold_ns.min(self.options.snapshot_hold_max_ns));
        let holds = !self.bends_drain();
        self.snapshot = Some(Snapshot { id, stage: Stage::Draining, until, holds, waiting: VecDeque::new() });
    }

    /// The runner's word: these replicas have the snapshot.
    pub(crate) fn apply_snapshot_taken(&mut self, id: &SnapshotId, taken: BTreeSet<ReplicaId>, out: &mut Vec<Action>) {
        let held = self.snapshot.as_ref().is_some_and(|s| s.id == *id && s.stage == Stage::Held);
        if !held {
            out.push(Action::SnapshotDone { id: id.clone(), result: Err(SnapshotError::NotHeld) });
            return;
        }
        let staying = |l: &Leg| l.role == Role::Member && l.eject.is_none();
        let missed = self.legs.mask(|l| staying(l) && !taken.contains(&l.replica));
        let have = self.legs.mask(|l| staying(l) && taken.contains(&l.replica));
        if have.is_empty() {
            return self.end_snapshot(Err(SnapshotError::NobodyTookIt), out);
        }
        if !self.bends_missed() {
            // Rule 12: who misses it because the engine is cut off has done nothing.
            let suspect = self.suspect && !missed.is_empty() && !self.bends_suspicion();
            if missed.len() > self.may_still_leave() || suspect {
                let missed = missed.iter().filter_map(|id| self.legs.get(id)).map(|l| l.replica.clone()).collect();
                return self.end_snapshot(Err(SnapshotError::MayNotShrink { missed }), out);
            }
            for leg in missed.iter() {
                self.eject_or_drop(leg, DropReason::SnapshotMissed);
            }
        }
        if let Some(snapshot) = &mut self.snapshot {
            snapshot.stage = Stage::Recording { taken };
        }
    }

    /// The runner gives it up.
    pub(crate) fn apply_snapshot_abort(&mut self, id: &SnapshotId, out: &mut Vec<Action>) {
        if self.snapshot.as_ref().is_some_and(|s| s.id == *id) && !self.is_recording() {
            self.end_snapshot(Err(SnapshotError::Aborted), out);
        }
    }

    /// The volume is being closed: held commands are finished first, and no snapshot begins or goes on.
    pub(crate) fn close_snapshot(&mut self, out: &mut Vec<Action>) {
        if self.snapshot.is_some() && !self.is_recording() {
            self.end_snapshot(Err(SnapshotError::Closing), out);
        }
    }

    /// The swap that records it is under way.
    fn is_recording(&self) -> bool {
        self.snapshot.is_some() && self.gate.pending.as_ref().is_some_and(|s| s.reason == SwapReason::Snapshot)
    }

    /// Moves the snapshot under way.
    pub(crate) fn pump_snapshot(&mut self, out: &mut Vec<Action>) {
        let Some(snapshot) = &self.snapshot else { return };
        if snapshot.holds && snapshot.until <= self.now {
            if !self.is_recording() {
                return self.end_snapshot(Err(SnapshotError::TooSlow), out);
            }
            self.release_held();
        }
        self.drain_for_snapshot();
        self.flush_for_snapshot(out);
    }

    fn drain_for_snapshot(&mut self) {
        if self.snapshot.as_ref().is_none_or(|s| s.stage != Stage::Draining) {
            return;
        }
        let changes = |slot: u32| self.host.get(slot).is_some_and(|o| o.op != Op::Read && o.stage != HostStage::Held);
        let drained = !(0..self.host.slots()).any(changes) || self.bends_drain();
        // Whether a joiner is a member is open while its swap is.
        if drained && self.repairs.is_idle() && self.gate.pending.is_none() {
            self.set_stage(Stage::Flushing { sent: LegMask::EMPTY, done: LegMask::EMPTY });
        }
    }

    fn set_stage(&mut self, stage: Stage) {
        if let Some(snapshot) = &mut self.snapshot {
            snapshot.stage = stage;
        }
    }

    /// What is in a snapshot must not be lost with a disk's cache: nothing would make the copies equal again.
    fn flush_for_snapshot(&mut self, out: &mut Vec<Action>) {
        let Some(Stage::Flushing { mut sent, done }) = self.snapshot.as_ref().map(|s| s.stage.clone()) else { return };
        let staying = self.legs.mask(|l| l.role == Role::Member && l.eject.is_none());
        let need = if self.bends_flush() { LegMask::EMPTY } else { staying };
        for leg in need.without(sent.or(done)).iter() {
            if self.legs.get(leg).is_some_and(Leg::is_sendable) {
                sent.insert(leg);
                self.send(leg, Owner::SnapshotFlush, Op::Flush, (0, 0), Payload::None, out);
            }
        }
        self.set_stage(Stage::Flushing { sent, done });
        if !need.without(done).is_empty() {
            return;
        }
        self.set_stage(Stage::Held);
        if let Some(snapshot) = &self.snapshot {
            let members = staying.iter().filter_map(|id| self.legs.get(id)).map(|l| l.replica.clone()).collect();
            out.push(Action::SnapshotHeld { id: snapshot.id.clone(), members });
        }
    }

    pub(crate) fn snapshot_flush_done(&mut self, leg: LegId, result: Result<(), LegError>, out: &mut Vec<Action>) {
        let Some(Stage::Flushing { sent, done }) = self.snapshot.as_mut().map(|s| &mut s.stage) else { return };
        sent.remove(leg);
        match result {
            Ok(()) => done.insert(leg),
            Err(LegError::Gone) => {}
            Err(error) => {
                if !self.eject_or_drop(leg, DropReason::WriteFailed(error)) {
                    self.end_snapshot(Err(SnapshotError::Flush(error)), out);
                }
            }
        }
    }

    /// A leg left; its number may be used again.
    pub(crate) fn forget_snapshot_flush(&mut self, leg: LegId) {
        if let Some(Stage::Flushing { sent, done }) = self.snapshot.as_mut().map(|s| &mut s.stage) {
            sent.remove(leg);
            done.remove(leg);
        }
    }

    /// The record with the snapshot, once every member by the record has it.
    pub(crate) fn plan_snapshot(&self) -> Option<(Config, SwapReason)> {
        let snapshot = self.snapshot.as_ref()?;
        let Stage::Recording { taken } = &snapshot.stage else { return None };
        let members = &self.gate.config.in_sync;
        if !members.is_subset(taken) && !self.bends_missed() {
            return None; // Those without it leave first.
        }
        let mut next = self.next_config();
        next.tree.version = next.tree.version.next();
        next.tree.last = Some(LastSnapshot { id: snapshot.id.clone(), replicas: members.clone() });
        Some((next, SwapReason::Snapshot))
    }

    /// The record names it.
    pub(crate) fn snapshot_recorded(&mut self, out: &mut Vec<Action>) {
        let version = self.gate.config.tree.version;
        self.end_snapshot(Ok(version), out);
    }

    /// Ends the snapshot, told to the runner, and the hold.
    pub(crate) fn end_snapshot(&mut self, result: Result<crate::TreeVersion, SnapshotError>, out: &mut Vec<Action>) {
        self.release_held();
        if let Some(snapshot) = self.snapshot.take() {
            self.rescan = true;
            out.push(Action::SnapshotDone { id: snapshot.id, result });
        }
    }

    /// Held commands go on, in their order.
    fn release_held(&mut self) {
        let Some(snapshot) = &mut self.snapshot else { return };
        snapshot.holds = false;
        for slot in std::mem::take(&mut snapshot.waiting) {
            self.host.set_stage(slot, HostStage::Waiting);
            self.admit(slot);
        }
    }

    /// Rule 19 broken on purpose: a snapshot is taken while members may differ.
    fn bends_inherited(&self) -> bool {
        self.bends(BentBy::Inherited)
    }

    /// Rule 19 broken on purpose: hosts are not held.
    fn bends_drain(&self) -> bool {
        self.bends(BentBy::Drain)
    }

    /// Rule 19 broken on purpose: what is in a disk's cache is in the snapshot.
    fn bends_flush(&self) -> bool {
        self.bends(BentBy::Flush)
    }

    /// Rule 19 broken on purpose: a member without the snapshot stays.
    fn bends_missed(&self) -> bool {
        self.bends(BentBy::Missed)
    }

    fn bends(&self, how: BentBy) -> bool {
        #[cfg(feature = "planted-bugs")]
        {
            let bug = match how {
                BentBy::Inherited => crate::PlantedBug::Rule19SnapshotWhileInherited,
                BentBy::Drain => crate::PlantedBug::Rule19SnapshotUnderWrites,
                BentBy::Flush => crate::PlantedBug::Rule19SnapshotUnflushed,
                BentBy::Missed => crate::PlantedBug::Rule19MissedStays,
            };
            self.options.bug == Some(bug)
        }
        #[cfg(not(feature = "planted-bugs"))]
        {
            let _ = how;
            false
        }
    }
}

/// Ways to break rule 19.
#[derive(Debug, Clone, Copy)]
enum BentBy {
    Inherited,
    Drain,
    Flush,
    Missed,
}
