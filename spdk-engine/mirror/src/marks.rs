//! What stands between a command's range lock and its I/O: inherited regions, and the bits of cold ones (rule 18).
//!
//! *Flow.*
//! ```text
//! range lock ─▶ inherited? ──no──▶ read: go
//!                  │ yes              └ change: ready? ──yes (hot)──▶ go
//!                  ▼                            │ no
//!               Parked until equal           Marking: room in the table ─▶ bits durable on all ─▶ go
//! ```
//! A command that waits here keeps its place before those that came after it, as a retry must not overtake what its host
//! had sent before (rule 17). But its range is on *hold*: copies and the making-equal pass it, so nothing can wait in a
//! circle (see [`crate::overlap`]). It counts as a write of its regions from its marking to its answer, so no bit clears
//! under it; one that waits for its range does not count yet, so the table always empties.
//!
//! *Clearing.* When live regions have been idle for a while, or the table is crowded, a *round* begins: the quiet
//! regions are noted, every leg that counts is flushed, and the bits of those in which no write began meanwhile are
//! cleared, with one meta write per leg.
//!
//! *Invariants.* Data of a write goes out only when the bits of all its regions are durable on every leg that an
//! acknowledgement needs. One round at a time.
//!
//! *When things fail.* A leg that is lost is waited for, or leaves; a bit that cannot become durable on a member
//! therefore holds up the write as a missing answer does. A leg that cannot flush leaves; the last one is taken as
//! flushed, as there is nobody it could differ from.

use std::collections::VecDeque;

use crate::core::{Core, Life};
use crate::events::{Action, DropReason, LegError, LegId, Nanos, Op, Payload};
use crate::host::Stage;
use crate::legs::{Leg, LegMask, Owner};

/// Commands that wait for bits, and the clearing round.
#[derive(Debug, Default)]
pub(crate) struct Marks {
    /// Wait for room in the table; first come, first served.
    room: VecDeque<u32>,
    /// Wait until their bits are durable.
    marked: Vec<u32>,
    /// Legs that the round's flush was sent to and those that are done; `None` without a round.
    round: Option<(LegMask, LegMask)>,
    /// When to look for idle regions.
    pub(crate) look_at: Option<Nanos>,
}

impl Marks {
    pub(crate) fn is_idle(&self) -> bool {
        self.round.is_none()
    }

    /// No round, and no command waits for bits.
    pub(crate) fn is_quiet(&self) -> bool {
        self.round.is_none() && self.room.is_empty() && self.marked.is_empty()
    }
}

impl Core {
    /// A command has its range. True when it may be sent; else it is on hold until its regions allow it.
    pub(crate) fn enter_regions(&mut self, slot: u32) -> bool {
        let Some(op) = self.host.get(slot).filter(|o| o.stage == Stage::Waiting && !o.marked) else { return true };
        let (op, lba, blocks, lock) = (op.op, op.lba, op.blocks, op.lock);
        let (Some(wib), Some(key)) = (self.wib.as_mut(), lock) else { return true };
        let range = wib.geometry.regions_of(lba, blocks);
        let stage = if wib.touches_inherited(range) && !bends_read(&self.options, op) {
            self.regions.want(wib.inherited_of(range));
            Stage::Parked
        } else if op == Op::Read {
            return true;
        } else if wib.begin_write(range, self.now) {
            self.host.set_marked(slot);
            return true;
        } else {
            self.marks.room.push_back(slot);
            Stage::Marking
        };
        self.host.set_stage(slot, stage);
        self.locks.hold(key, &mut self.granted);
        self.take_granted();
        false
    }

    /// Its regions allow it: it goes on as soon as no copy is passing it.
    fn end_hold(&mut self, slot: u32) {
        self.host.set_stage(slot, Stage::Waiting);
        if let Some(key) = self.host.get(slot).and_then(|o| o.lock) {
            self.locks.unhold(key, &mut self.granted);
            self.take_granted();
        }
    }

    /// A change is answered: it no longer counts at its regions.
    pub(crate) fn unmark(&mut self, lba: u64, blocks: u32) {
        if let Some(wib) = self.wib.as_mut() {
            wib.end_write(wib.geometry.regions_of(lba, blocks));
        }
    }

    /// Regions became equal: commands that waited for them go on.
    pub(crate) fn resume_parked(&mut self) {
        for slot in 0..self.host.slots() {
            let Some(op) = self.host.get(slot).filter(|o| o.stage == Stage::Parked) else { continue };
            let equal = self.wib.as_ref().is_none_or(|w| {
                let range = w.geometry.regions_of(op.lba, op.blocks);
                !w.touches_inherited(range)
            });
            if equal {
                self.end_hold(slot);
            }
        }
    }

    /// Sets the bits of commands for which there is room now.
    pub(crate) fn pump_marks(&mut self) {
        if !self.marks.room.is_empty() {
            self.mark_waiting();
            self.resume_marked(); // Regions of theirs may have become ready since.
        }
    }

    fn mark_waiting(&mut self) {
        while let Some(slot) = self.marks.room.front().copied() {
            let Some(wib) = self.wib.as_mut() else { return };
            if let Some(op) = self.host.get(slot) {
                let range = wib.geometry.regions_of(op.lba, op.blocks);
                if !wib.has_room(range) {
                    return;
                }
                wib.mark(range, self.now);
                self.host.set_marked(slot);
                self.marks.marked.push(slot);
            }
            self.marks.room.pop_front();
            self.meta.pump = true;
            let idle = self.options.clear_idle_ns;
            self.marks.look_at.get_or_insert(self.now.saturating_add(idle));
        }
    }

    /// Commands whose regions are all ready go on.
    pub(crate) fn resume_marked(&mut self) {
        let mut waiting = std::mem::take(&mut self.marks.marked);
        waiting.retain(|slot| {
            let Some(wib) = self.wib.as_ref() else { return false };
            let Some(op) = self.host.get(*slot).filter(|o| o.stage == Stage::Marking) else { return false };
            let ready = wib.is_ready(wib.geometry.regions_of(op.lba, op.blocks));
            if ready {
                self.end_hold(*slot);
            }
            !ready
        });
        self.marks.marked = waiting;
    }

    /// Starts a clearing round when it is time, and moves the one under way.
    pub(crate) fn pump_clear(&mut self, out: &mut Vec<Action>) {
        let Some(wib) = self.wib.as_mut() else { return };
        if self.marks.round.is_none() {
            let due = self.marks.look_at.is_some_and(|at| at <= self.now);
            let crowded = !self.marks.room.is_empty() || (self.regions.is_stalled() && wib.is_crowded());
            if !(crowded || (due && self.life == Life::Running)) {
                return;
            }
            let idle = self.options.clear_idle_ns;
            if due {
                let next = wib.oldest_idle(idle);
                self.marks.look_at = next.map(|at| at.max(self.now.saturating_add(idle / 2)));
            }
            if wib.cool(self.now.saturating_sub(idle), crowded) == 0 {
                return;
            }
            self.marks.round = Some((LegMask::EMPTY, LegMask::EMPTY));
        }
        self.move_round(out);
    }

    fn move_round(&mut self, out: &mut Vec<Action>) {
        let Some((mut sent, done)) = self.marks.round else { return };
        let skips = self.bends_clear();
        for leg in self.expected.without(sent.or(done)).iter().filter(|_| !skips) {
            if self.legs.get(leg).is_some_and(Leg::is_sendable) {
                sent.insert(leg);
                self.send(leg, Owner::ClearFlush, Op::Flush, (0, 0), Payload::None, out);
            }
        }
        self.marks.round = Some((sent, done));
        if !skips && !self.expected.without(done).is_empty() {
            return;
        }
        // A region that clears must have its stamp everywhere: after a crash nothing else tells that it changed.
        if !skips && !self.meta.carried {
            return;
        }
        self.marks.round = None;
        if let Some(wib) = self.wib.as_mut() {
            wib.clear_cooled();
            let idle = self.options.clear_idle_ns;
            let next = wib.oldest_idle(idle);
            self.marks.look_at = next.map(|at| at.max(self.now.saturating_add(idle / 2)));
        }
        self.meta.pump = true;
        self.rescan = true;
    }

    pub(crate) fn clear_flush_done(&mut self, leg: LegId, result: Result<(), LegError>) {
        let Some((sent, _)) = &mut self.marks.round else { return };
        sent.remove(leg);
        let flushed = match result {
            Ok(()) => true,
            Err(LegError::Gone) => false,
            Err(error) => !self.eject_or_drop(leg, DropReason::WriteFailed(error)),
        };
        if let Some((_, done)) = self.marks.round.as_mut().filter(|_| flushed) {
            done.insert(leg);
        }
    }

    /// A leg that left was flushed or not; its number may be used again.
    pub(crate) fn forget_flushed(&mut self, leg: LegId) {
        if let Some((sent, done)) = &mut self.marks.round {
            sent.remove(leg);
            done.remove(leg);
        }
    }

    /// Rule 18 broken on purpose: bits clear without a flush.
    fn bends_clear(&self) -> bool {
        #[cfg(feature = "planted-bugs")]
        {
            self.options.bug == Some(crate::PlantedBug::Rule18ClearBeforeFlush)
        }
        #[cfg(not(feature = "planted-bugs"))]
        {
            false
        }
    }
}

/// Rule 18 broken on purpose: reads do not care whether their region is equal.
fn bends_read(options: &crate::Options, op: Op) -> bool {
    #[cfg(feature = "planted-bugs")]
    if options.bug == Some(crate::PlantedBug::Rule18ReadInherited) {
        return op == Op::Read;
    }
    let _ = (options, op);
    false
}
