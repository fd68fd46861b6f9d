//! Making a range equal again after a write that the host is told failed (consistency of reads, rule 18's idea).
//!
//! *What it is.* When a write fails on every member, or any member has no space, the host gets the error. Until then
//! the members may differ in that range: some have the new data, some the old, some a part. Reads from one member
//! and then from another would flip. So, with the write's range still locked: read the range from one member, write
//! it to all other legs, window by window, then answer. The source is preferably a member that *failed* the write:
//! its old content fits where the others have room already, which matters when disks are full.
//!
//! *States.* queued ─▶ Read ─▶ Reading ─▶ Writing ─▶ (next window) … ─▶ settling ─▶ answered.
//!
//! *Invariants.* One repair at a time reads or writes, in its own copy buffer (the last slot). The host is answered only when every
//! leg that acknowledgements need has the range, so a leg that failed the repair has left by a swap before.
//!
//! *When things fail.* Source unreadable: another member, from the start of the range. None readable: all members
//! but one leave, so that what is left is the same for every reader. A member that has no room for the range becomes the
//! source, so that of several full disks none is taken for a broken one. A leg that cannot take the range leaves.

use std::collections::VecDeque;

use crate::core::Core;
use crate::events::{Action, CopySlot, DropReason, Event, HostError, LegError, LegId, Op, Payload};
use crate::host::host_error;
use crate::legs::{Leg, LegMask, Owner, Role};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Read,
    Reading,
    Writing,
}

#[derive(Debug, Clone, Copy)]
struct Active {
    slot: u32,
    stage: Stage,
    source: LegId,
    /// Blocks of the range that are equal.
    offset: u64,
    tried: LegMask,
    sent: LegMask,
    done: LegMask,
    /// Members that had no room for what the source holds.
    full: LegMask,
    /// Legs that were on their way out and did not get a part of what is equal.
    skipped: LegMask,
}

/// A range that waits for its repair.
#[derive(Debug, Clone, Copy)]
struct Queued {
    slot: u32,
    /// Legs that do not have what others may have read there already: no source while there is another.
    without: LegMask,
}

/// A range that is final on every leg that stays.
#[derive(Debug, Clone, Copy)]
struct Settled {
    slot: u32,
    /// Legs that were on their way out then and do not have it.
    skipped: LegMask,
}

/// Repairs waiting, the one under way, and those that are done but for legs on their way out.
#[derive(Debug, Default)]
pub(crate) struct Repairs {
    queue: VecDeque<Queued>,
    active: Option<Active>,
    settling: Vec<Settled>,
}

impl Repairs {
    pub(crate) fn enqueue(&mut self, slot: u32) {
        self.queue.push_back(Queued { slot, without: LegMask::EMPTY });
    }

    /// Forgets what a leg that left did.
    pub(crate) fn forget_leg(&mut self, leg: LegId) {
        if let Some(active) = &mut self.active {
            active.tried.remove(leg);
            active.sent.remove(leg);
            active.done.remove(leg);
            active.full.remove(leg);
            active.skipped.remove(leg);
        }
        self.queue.iter_mut().for_each(|q| q.without.remove(leg));
        self.settling.iter_mut().for_each(|s| s.skipped.remove(leg));
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.active.is_none() && self.queue.is_empty() && self.settling.is_empty()
    }
}

impl Core {
    /// Moves the repair under way, or starts the next one.
    pub(crate) fn pump_repair(&mut self, out: &mut Vec<Action>) {
        loop {
            if self.repairs.active.is_none() {
                let Some(Queued { slot, without }) = self.repairs.queue.front().copied() else { break };
                let tried = self.sources_to_spare(without);
                let Some(source) = self.repair_source(slot, tried) else { break };
                self.repairs.queue.pop_front();
                self.repairs.active = Some(fresh(slot, source, tried));
            }
            while self.step_repair(out) {}
            if self.repairs.active.is_some() {
                break;
            }
        }
        self.finish_settled(out);
    }

    /// Legs that must not be the source of a range that was settled without them. When nobody else is left, what they hold is
    /// the range; then rebuilds, whose copies may have read it elsewhere, begin anew.
    fn sources_to_spare(&mut self, without: LegMask) -> LegMask {
        if without.is_empty() || !self.legs.mask(stays).without(without).is_empty() {
            return without;
        }
        for leg in self.legs.mask(|l| l.role != Role::Member).iter() {
            self.eject_or_drop(leg, DropReason::WriteFailed(LegError::Media));
        }
        LegMask::EMPTY
    }

    /// A member to take the range from, preferably one that failed the write.
    fn repair_source(&mut self, slot: u32, tried: LegMask) -> Option<LegId> {
        let failed = self.host.get(slot).map_or(LegMask::EMPTY, |o| o.failed);
        let others = self.legs.mask(|l| !failed.contains(l.id));
        let local = self.options.prefer_local;
        self.legs.choose_source(local, tried.or(others)).or_else(|| self.legs.choose_source(local, tried))
    }

    /// Legs that must get the range.
    fn repair_targets(&self, source: LegId) -> LegMask {
        let mut targets = self.expected.without(self.legs.mask(Leg::is_failed));
        targets.remove(source);
        targets
    }

    /// One step; true when another may be possible at once.
    fn step_repair(&mut self, out: &mut Vec<Action>) -> bool {
        let Some(active) = self.repairs.active else { return false };
        let Some(op) = self.host.get(active.slot).copied() else {
            self.repairs.active = None;
            return false;
        };
        let window = u64::from(self.copies.window()).min(u64::from(op.blocks) - active.offset);
        let range = (op.lba + active.offset, u32::try_from(window).unwrap_or(u32::MAX));
        match active.stage {
            Stage::Read if self.repair_targets(active.source).is_empty() => self.settle_repair(active),
            Stage::Read => self.repair_read(active, range, out),
            Stage::Reading => false,
            Stage::Writing => self.repair_write(active, range, u64::from(op.blocks), out),
        }
    }

    fn repair_read(&mut self, active: Active, range: (u64, u32), out: &mut Vec<Action>) -> bool {
        if active.tried.contains(active.source) || !self.legs.get(active.source).is_some_and(stays) {
            return self.change_source(active);
        }
        if !self.legs.get(active.source).is_some_and(Leg::is_sendable) {
            return false; // Lost: it comes back or leaves.
        }
        self.repairs.active = Some(Active { stage: Stage::Reading, ..active });
        let payload = Payload::Copy(CopySlot(self.copies.depth()));
        self.send(active.source, Owner::Repair, Op::Read, range, payload, out);
        false
    }

    /// The source cannot deliver: another one, from the start.
    fn change_source(&mut self, active: Active) -> bool {
        let mut tried = active.tried;
        tried.insert(active.source);
        if let Some(source) = self.repair_source(active.slot, tried) {
            self.repairs.active = Some(fresh(active.slot, source, tried));
            return true;
        }
        let staying = self.legs.mask(stays);
        let untried = staying.without(tried);
        self.repairs.active = Some(Active { tried, ..active });
        if !untried.is_empty() {
            return false; // Lost members may come back.
        }
        let Some(kept) = staying.iter().next() else { return false };
        for leg in self.expected.iter().filter(|l| *l != kept) {
            self.eject_or_drop(leg, DropReason::WriteFailed(LegError::Media));
        }
        self.settle_repair(Active { source: kept, ..active })
    }

    fn repair_write(&mut self, active: Active, range: (u64, u32), total: u64, out: &mut Vec<Action>) -> bool {
        // Not before everything that was sent is answered: it would be in flight beside what comes next.
        if active.sent.is_empty()
            && let Some(leg) = active.full.iter().next()
        {
            // What a full member holds takes no room there, and less elsewhere than what did not fit.
            let mut tried = active.tried;
            tried.insert(active.source);
            self.repairs.active = Some(fresh(active.slot, leg, tried));
            return true;
        }
        let targets = self.repair_targets(active.source);
        let mut sent = active.sent;
        for leg in targets.without(active.done.or(sent).or(active.full)).iter() {
            if self.legs.get(leg).is_some_and(Leg::is_sendable) {
                sent.insert(leg);
                let payload = Payload::Copy(CopySlot(self.copies.depth()));
                self.send(leg, Owner::Repair, Op::Write { fua: false }, range, payload, out);
            }
        }
        if !targets.without(active.done).is_empty() {
            self.repairs.active = Some(Active { sent, ..active });
            return false;
        }
        let offset = active.offset + u64::from(range.1);
        if offset < total {
            let skipped = active.skipped.or(self.on_their_way_out());
            self.repairs.active = Some(Active { offset, skipped, ..fresh(active.slot, active.source, active.tried) });
            return true;
        }
        self.settle_repair(active)
    }

    /// The range is final on every leg that stays; copies may read it, hosts not yet. The next repair may start: what
    /// holds this one up may need a new replica, whose copy waits for the ranges of the repairs behind it.
    fn settle_repair(&mut self, active: Active) -> bool {
        self.repairs.active = None;
        let skipped = active.skipped.or(self.on_their_way_out());
        self.repairs.settling.push(Settled { slot: active.slot, skipped });
        if let Some(op) = self.host.get_mut(active.slot) {
            op.settled = true;
            let lock = op.lock;
            if let Some(key) = lock {
                self.locks.settle(key, &mut self.granted);
                self.take_granted();
            }
        }
        false
    }

    /// Legs that acknowledgements need until a swap has taken them out.
    fn on_their_way_out(&self) -> LegMask {
        self.expected.and(self.legs.mask(Leg::is_failed))
    }

    /// Answers the hosts of repairs that are done, once the legs that failed have left. A leg that was welcome again
    /// instead, having come back before a swap could take it out, gets the range after all.
    fn finish_settled(&mut self, out: &mut Vec<Action>) {
        if self.repairs.settling.is_empty() || !self.on_their_way_out().is_empty() {
            return;
        }
        for Settled { slot, skipped } in std::mem::take(&mut self.repairs.settling) {
            let without = self.expected.and(skipped);
            if !without.is_empty() {
                self.repairs.queue.push_back(Queued { slot, without });
                continue;
            }
            if let Some(op) = self.host.get(slot).copied() {
                out.push(Action::Event(Event::RangeRepaired { lba: op.lba, blocks: op.blocks }));
                let error = op.error.map_or(HostError::Media, host_error);
                self.answer(slot, Err(error), out);
            }
        }
        self.rescan = true;
    }

    pub(crate) fn repair_io_done(
        &mut self,
        leg: LegId,
        reads: bool,
        result: Result<(), LegError>,
        out: &mut Vec<Action>,
    ) {
        let Some(mut active) = self.repairs.active else { return };
        if reads {
            if active.stage != Stage::Reading || leg != active.source {
                return;
            }
            active.stage = if result.is_ok() { Stage::Writing } else { Stage::Read };
            self.repairs.active = Some(active);
            if result.is_err_and(|e| e != LegError::Gone) {
                self.change_source(active);
            }
        } else if active.stage == Stage::Writing && active.sent.contains(leg) {
            active.sent.remove(leg);
            match result {
                Ok(()) => active.done.insert(leg),
                Err(LegError::Gone) => {}
                Err(LegError::NoSpace) if self.may_be_source(active, leg) => active.full.insert(leg),
                Err(error) => {
                    self.eject_or_drop(leg, DropReason::WriteFailed(error));
                }
            }
            self.repairs.active = Some(active);
        }
        self.pump_repair(out);
    }
}

impl Core {
    fn may_be_source(&self, active: Active, leg: LegId) -> bool {
        !active.tried.contains(leg) && self.legs.get(leg).is_some_and(|l| stays(l) && !l.unequal)
    }
}

/// A member that is not to leave.
fn stays(leg: &Leg) -> bool {
    leg.role == Role::Member && leg.eject.is_none()
}

fn fresh(slot: u32, source: LegId, tried: LegMask) -> Active {
    let none = LegMask::EMPTY;
    Active { slot, stage: Stage::Read, source, offset: 0, tried, sent: none, done: none, full: none, skipped: none }
}
