//! Host commands: from acceptance to `HostDone` (rules 1, 2, 3, 6).
//!
//! *What it is.* The slab of live commands and their life:
//! ```text
//! (Held, see `snapshot` ─▶) Waiting (for the range lock) ◀─▶ Parked, Marking (see `marks`)
//!    └─▶ Running ─▶ answered
//!           ├─▶ Repairing (failed write: the range is made equal) ─▶ answered
//!           └─▶ Confirming (read: the members confirm the lease) ─▶ answered
//! ```
//! A running change or flush keeps four sets of legs: `need` (whom it was meant for), `sent` (in flight), `ok` and
//! `failed`. It is acknowledged when `need ∩ expected ⊆ ok`, where `expected` is the core's current set of required
//! legs; so it needs no list of its own of what it waits for, and a swap that removes a member releases it.
//!
//! *Invariants.* At most `max_inflight` live commands; a slot is reused only with a new generation, so a late
//! completion cannot be taken for another command's.
//!
//! *When things fail.* See the crate's documentation; the decision is in [`Core::judge_failures`].

use crate::core::{Core, Life, LockOwner};
use crate::events::{Action, DropReason, Event, HostError, HostId, HostResult, LegError, LegId, Nanos, Op, Payload};
use crate::legs::{Leg, LegMask, Owner};
use crate::overlap::{LockKey, LockKind};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stage {
    Free,
    /// Held back while a snapshot is taken.
    Held,
    /// Touches an inherited region.
    Parked,
    /// Waits until the bits of its regions are durable.
    Marking,
    Waiting,
    Running,
    Repairing,
    /// A read whose data is there: the answer waits until the members have confirmed (rule 16).
    Confirming,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct HostOp {
    pub(crate) id: HostId,
    pub(crate) op: Op,
    pub(crate) lba: u64,
    pub(crate) blocks: u32,
    pub(crate) stage: Stage,
    pub(crate) generation: u32,
    pub(crate) lock: Option<LockKey>,
    pub(crate) need: LegMask,
    pub(crate) sent: LegMask,
    pub(crate) ok: LegMask,
    pub(crate) failed: LegMask,
    /// Of those that failed: they had no room.
    pub(crate) full: LegMask,
    pub(crate) error: Option<LegError>,
    /// For a read that is held back: when that is given up.
    pub(crate) hold_until: Nanos,
    /// Its lock is settled: copies may have read its range, so it can no longer be undone by a repair.
    pub(crate) settled: bool,
    /// It counts as a write of its regions.
    pub(crate) marked: bool,
}

impl HostOp {
    /// A command that waits for its range.
    pub(crate) fn new(id: HostId, op: Op, lba: u64, blocks: u32) -> Self {
        Self {
            id,
            op,
            lba,
            blocks,
            stage: Stage::Waiting,
            generation: 0,
            lock: None,
            need: LegMask::EMPTY,
            sent: LegMask::EMPTY,
            ok: LegMask::EMPTY,
            failed: LegMask::EMPTY,
            full: LegMask::EMPTY,
            error: None,
            hold_until: Nanos::MAX,
            settled: false,
            marked: false,
        }
    }
}

/// The live commands.
#[derive(Debug)]
pub(crate) struct HostOps {
    slots: Vec<HostOp>,
    free: Vec<u32>,
    max: u32,
}

impl HostOps {
    pub(crate) fn new(max: u32) -> Self {
        Self { slots: Vec::new(), free: Vec::new(), max }
    }

    pub(crate) fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub(crate) fn has_room(&self) -> bool {
        self.len() < self.max as usize
    }

    pub(crate) fn slots(&self) -> u32 {
        u32::try_from(self.slots.len()).unwrap_or(u32::MAX)
    }

    pub(crate) fn get(&self, slot: u32) -> Option<&HostOp> {
        self.slots.get(slot as usize).filter(|o| o.stage != Stage::Free)
    }

    pub(crate) fn get_mut(&mut self, slot: u32) -> Option<&mut HostOp> {
        self.slots.get_mut(slot as usize).filter(|o| o.stage != Stage::Free)
    }

    pub(crate) fn set_stage(&mut self, slot: u32, stage: Stage) {
        if let Some(op) = self.get_mut(slot) {
            op.stage = stage;
        }
    }

    pub(crate) fn set_marked(&mut self, slot: u32) {
        if let Some(op) = self.get_mut(slot) {
            op.marked = true;
        }
    }

    /// Takes a command in; its slot and generation.
    pub(crate) fn insert(&mut self, fresh: HostOp) -> (u32, u32) {
        if let Some(slot) = self.free.pop() {
            let place = &mut self.slots[slot as usize];
            let generation = place.generation.wrapping_add(1);
            *place = HostOp { generation, ..fresh };
            return (slot, generation);
        }
        self.slots.push(fresh);
        (self.slots() - 1, fresh.generation)
    }

    pub(crate) fn remove(&mut self, slot: u32) -> Option<HostOp> {
        let op = self.slots.get_mut(slot as usize).filter(|o| o.stage != Stage::Free)?;
        let gone = *op;
        op.stage = Stage::Free;
        self.free.push(slot);
        Some(gone)
    }

    /// Forgets what a leg that left did. What is in flight on it stays noted until it is answered.
    pub(crate) fn forget_leg(&mut self, leg: LegId) {
        for op in &mut self.slots {
            op.need.remove(leg);
            op.ok.remove(leg);
            op.failed.remove(leg);
            op.full.remove(leg);
        }
    }

    /// Answers every live command with an error.
    pub(crate) fn fail_all(&mut self, error: HostError, out: &mut Vec<Action>) {
        for slot in 0..self.slots() {
            if let Some(op) = self.remove(slot) {
                out.push(Action::HostDone { id: op.id, result: Err(error) });
            }
        }
    }
}

/// What the host hears of a leg's error.
pub(crate) fn host_error(error: LegError) -> HostError {
    match error {
        LegError::NoSpace => HostError::NoSpace,
        LegError::Gone | LegError::Media | LegError::Fenced | LegError::Other => HostError::Media,
    }
}

impl Core {
    pub(crate) fn apply_host(&mut self, id: HostId, op: Op, lba: u64, blocks: u32, out: &mut Vec<Action>) {
        let end = lba.checked_add(u64::from(blocks)).filter(|end| *end <= self.num_blocks && blocks > 0);
        let refusal = match end {
            _ if self.life != Life::Running => Some(HostError::Closing),
            None if op != Op::Flush => Some(HostError::OutOfRange),
            _ if !self.host.has_room() => Some(HostError::Busy),
            _ => None,
        };
        if let Some(error) = refusal {
            out.push(Action::HostDone { id, result: Err(error) });
            return;
        }
        let (lba, blocks) = if op == Op::Flush { (0, 0) } else { (lba, blocks) };
        let (slot, _) = self.host.insert(HostOp::new(id, op, lba, blocks));
        if op != Op::Read && self.snapshot.is_some() && self.holds_changes() {
            self.hold_back(slot);
        } else {
            self.admit(slot);
        }
    }

    /// Asks for the range of a command; a flush has none.
    pub(crate) fn admit(&mut self, slot: u32) {
        let Some(HostOp { op, lba, blocks, .. }) = self.host.get(slot).copied() else { return };
        if op == Op::Flush {
            self.ready.push_back(LockOwner::Host(slot));
            return;
        }
        let kind = if op == Op::Read { LockKind::Read } else { LockKind::Write };
        let end = lba + u64::from(blocks);
        let (key, granted) = self.locks.acquire(lba, end, kind, LockOwner::Host(slot));
        if let Some(live) = self.host.get_mut(slot) {
            live.lock = Some(key);
        }
        if granted {
            self.ready.push_back(LockOwner::Host(slot));
        }
    }

    /// Its range is its own now: send it.
    pub(crate) fn start_host(&mut self, slot: u32, out: &mut Vec<Action>) {
        if self.wib.is_some() && !self.enter_regions(slot) {
            return;
        }
        let expected = self.expected;
        let Some(op) = self.host.get_mut(slot).filter(|o| o.stage == Stage::Waiting) else { return };
        op.stage = Stage::Running;
        if op.op == Op::Read {
            self.send_read(slot, out);
        } else {
            op.need = expected;
            self.send_change(slot, out);
            self.judge(slot, out);
        }
    }

    /// Sends a change or flush to every leg that needs it, can take it and does not have it.
    fn send_change(&mut self, slot: u32, out: &mut Vec<Action>) {
        let Some(live) = self.host.get_mut(slot) else { return };
        let todo = live.need.and(self.expected).without(live.ok.or(live.failed).or(live.sent));
        let todo = todo.and(self.legs.mask(Leg::is_sendable));
        if todo.is_empty() {
            return;
        }
        live.sent = live.sent.or(todo);
        let op = *live;
        let (owner, payload) = (Owner::Host { slot, generation: op.generation }, Payload::Host(op.id));
        if op.op == Op::Flush {
            for leg in todo.iter() {
                self.send(leg, owner, op.op, (op.lba, op.blocks), payload, out);
            }
            return;
        }
        let ids = self.book_sent(todo, owner, op.op, None);
        let (op, lba, blocks) = (op.op, op.lba, op.blocks);
        out.extend(todo.iter().map(|leg| Action::LegIo { leg, io: ids.on(leg), op, lba, blocks, payload }));
    }

    /// Sends a read to one member that has not failed it. Waits when all that are left are lost.
    fn send_read(&mut self, slot: u32, out: &mut Vec<Action>) {
        let Some(op) = self.host.get(slot).copied() else { return };
        if !op.sent.is_empty() {
            return;
        }
        if let Some(leg) = self.legs.choose_source(self.options.prefer_local, op.failed) {
            if let Some(live) = self.host.get_mut(slot) {
                live.sent.insert(leg);
            }
            let owner = Owner::Host { slot, generation: op.generation };
            self.send(leg, owner, Op::Read, (op.lba, op.blocks), Payload::Host(op.id), out);
            return;
        }
        let may_come = self.legs.mask(|l| l.role == crate::legs::Role::Member && l.eject.is_none() && !l.unequal);
        if may_come.without(op.failed).is_empty() {
            let error = op.error.map_or(HostError::Media, host_error);
            self.answer(slot, Err(error), out);
        }
    }

    pub(crate) fn host_io_done(
        &mut self,
        slot: u32,
        generation: u32,
        leg: LegId,
        result: Result<(), LegError>,
        out: &mut Vec<Action>,
    ) {
        let Some(op) = self.host.get_mut(slot).filter(|o| o.generation == generation) else { return };
        op.sent.remove(leg);
        self.rescan |= op.settled; // A copy may wait for a member that has it.
        match result {
            Ok(()) => op.ok.insert(leg),
            // Unknown outcome: sent again when the leg is back.
            Err(LegError::Gone) => {}
            Err(error) => {
                op.failed.insert(leg);
                if error == LegError::NoSpace {
                    op.full.insert(leg);
                }
                op.error = Some(error);
            }
        }
        if op.op != Op::Read {
            self.judge(slot, out);
            return;
        }
        match result {
            Ok(()) => self.answer_read(slot, out),
            Err(error) => {
                let (lba, blocks) = (op.lba, op.blocks);
                if error != LegError::Gone {
                    out.push(Action::Event(Event::ReadFailed { leg, lba, blocks, error }));
                }
                self.send_read(slot, out);
            }
        }
    }

    /// Decides whether a running change or flush can be answered.
    pub(crate) fn judge(&mut self, slot: u32, out: &mut Vec<Action>) {
        let Some(op) = self.host.get(slot).copied() else { return };
        if op.stage != Stage::Running || op.op == Op::Read {
            return;
        }
        if self.has_all(&op, op.ok) {
            if !self.meta.carried {
                return; // Rule 6: the members carry the record first.
            }
            // `need ∩ expected` cannot be empty here: S never is, and its legs stay expected.
            self.answer(slot, Ok(()), out);
            return;
        }
        let missing = op.need.and(self.expected).without(op.ok);
        if self.now < self.quiet_until && op.failed.is_empty() {
            return; // The usual case: nobody has failed, some have not answered yet.
        }
        let leaving = self.legs.mask(Leg::is_failed);
        let may_answer = missing.without(op.failed.or(leaving));
        if may_answer.is_empty() {
            self.judge_failures(slot, op, missing.and(op.failed).without(leaving), out);
        }
        if self.frozen {
            self.settle_frozen();
        }
    }

    /// Whether everyone who must have a change or flush has it, when `ok` have it.
    pub(crate) fn has_all(&self, op: &HostOp, ok: LegMask) -> bool {
        op.need.and(self.expected).without(ok).is_empty() || self.bends_ack_first(op, ok)
    }

    /// Rule 1 broken on purpose.
    fn bends_ack_first(&self, op: &HostOp, ok: LegMask) -> bool {
        #[cfg(feature = "planted-bugs")]
        if self.options.bug == Some(crate::PlantedBug::Rule01AckFirst) {
            return op.op != Op::Flush && !ok.is_empty();
        }
        let _ = (op, ok);
        false
    }

    /// Every leg has answered or is leaving; `fresh` are those that failed and are not yet leaving.
    fn judge_failures(&mut self, slot: u32, op: HostOp, fresh: LegMask, out: &mut Vec<Action>) {
        if fresh.is_empty() {
            return; // Waits for the swap that removes those that leave (rule 6).
        }
        let staying = self.legs.mask(|l| l.role == crate::legs::Role::Member && l.eject.is_none());
        // After it is settled a copy may have taken the range to a replica that joined since.
        let holders = if op.settled { staying.without(op.failed) } else { op.ok.and(staying) };
        let someone_has_it = !holders.is_empty();
        let member_full = !op.full.and(fresh).and(staying).is_empty() && op.op != Op::Flush;
        if someone_has_it && (op.settled || !member_full) {
            let reason = DropReason::WriteFailed(op.error.unwrap_or(LegError::Other));
            for leg in fresh.iter() {
                self.eject_or_drop(leg, reason);
            }
            return;
        }
        if op.op == Op::Flush {
            self.answer(slot, Err(host_error(op.error.unwrap_or(LegError::Other))), out);
            return;
        }
        if let Some(live) = self.host.get_mut(slot) {
            live.stage = Stage::Repairing;
            // Lack of space is what the host can act on, so it wins over other errors; that of a joiner is not its.
            live.error = Some(if member_full { LegError::NoSpace } else { LegError::Media });
        }
        self.repairs.enqueue(slot);
    }

    /// Answers the host and lets those go on that waited for the range.
    pub(crate) fn answer(&mut self, slot: u32, result: HostResult, out: &mut Vec<Action>) {
        if let Some(op) = self.host.remove(slot) {
            self.lease.held -= usize::from(op.stage == Stage::Confirming);
            out.push(Action::HostDone { id: op.id, result });
            if op.marked {
                self.unmark(op.lba, op.blocks);
            }
            if let Some(key) = op.lock {
                self.release_lock(key);
            }
        }
    }

    /// Looks at every live command again: links, roles or the record changed.
    pub(crate) fn rescan_hosts(&mut self, out: &mut Vec<Action>) {
        for slot in 0..self.host.slots() {
            match self.host.get(slot).map(|o| (o.stage, o.op)) {
                Some((Stage::Running, Op::Read)) => self.send_read(slot, out),
                Some((Stage::Running, _)) => {
                    self.send_change(slot, out);
                    self.judge(slot, out);
                }
                _ => {}
            }
        }
        if self.frozen {
            self.settle_frozen();
        }
    }

    /// Frozen writes that every healthy member has: copies may read their ranges, so that a new replica can join.
    fn settle_frozen(&mut self) {
        let healthy = self.legs.mask(Leg::is_healthy_member);
        if healthy.is_empty() {
            return;
        }
        for slot in 0..self.host.slots() {
            let Some(op) = self.host.get_mut(slot) else { continue };
            let ready = op.stage == Stage::Running && op.op.changes_blocks() && !op.settled;
            if ready && healthy.without(op.ok).is_empty() {
                op.settled = true;
                let lock = op.lock;
                if let Some(key) = lock {
                    self.locks.settle(key, &mut self.granted);
                }
            }
        }
        self.take_granted();
    }

    /// Legs that do not have some settled write that overlaps the range. It was settled when every healthy member had
    /// it; one that was lost then and is back since would give a copy the data from before it.
    pub(crate) fn behind_settled(&self, lba: u64, blocks: u32) -> LegMask {
        let end = lba + u64::from(blocks);
        let overlaps = |o: &&HostOp| o.lba < end && lba < o.lba + u64::from(o.blocks);
        let settled = |o: &&HostOp| o.settled && o.stage == Stage::Running;
        let ops = (0..self.host.slots()).filter_map(|slot| self.host.get(slot)).filter(settled).filter(overlaps);
        let have = ops.fold(LegMask::ALL, |have, op| have.and(op.ok));
        LegMask::ALL.without(have)
    }

    /// The count of commands sent again to a leg that is back.
    pub(crate) fn replay(&mut self, leg: LegId, out: &mut Vec<Action>) -> u32 {
        let before = self.legs.get(leg).map_or(0, |l| l.inflight);
        self.rescan_hosts(out);
        self.legs.get(leg).map_or(0, |l| l.inflight).saturating_sub(before)
    }
}
