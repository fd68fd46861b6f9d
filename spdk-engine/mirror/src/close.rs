//! Closing in order: drain, flush every member, clear the bits, tell the superblocks, then the record.
//!
//! ```text
//! Running ─▶ Draining ─▶ ClosingFlush ─▶ ClosingMeta ─▶ ClosingSwap ─▶ Closed
//!                                             └─ regions are still inherited, or a meta area fails: Closed, the record
//!                                                stays unclean
//! ```
//! *Invariants.* The record says "clean" only when all members are equal and flushed. Regions that are not equal yet are
//! not waited for, as that may take long: their bits stay, and the next engine goes on with them.
//!
//! *When things fail.* A member that cannot flush leaves by a swap first; when it is the last one, the core stops and
//! the record stays unclean.

use crate::config::Config;
use crate::core::{Core, Life};
use crate::events::{Action, DropReason, LegError, LegId, Op, Payload, StopReason, SwapReason};
use crate::legs::{Leg, LegMask, Owner, Role};

impl Core {
    /// Ends an orderly close step by step: drain, flush every member; the swap follows in `pump_swap`.
    pub(crate) fn pump_close(&mut self, out: &mut Vec<Action>) {
        if self.life == Life::Draining
            && self.host.is_empty()
            && self.copies.is_idle()
            && self.repairs.is_idle()
            && self.regions.is_idle()
            && self.marks.is_idle()
            && self.barrier.is_none()
        {
            self.life = Life::ClosingFlush { sent: LegMask::EMPTY, done: LegMask::EMPTY };
        }
        if self.life == Life::ClosingMeta && self.is_stuck_on_meta() {
            return self.closed(out); // Nobody knows how long that takes.
        }
        if self.life == Life::ClosingMeta && self.meta.carried && self.meta_is_settled() {
            // Regions that are not equal yet keep their bits, and the record does not say "clean". Nor does it while
            // hosts have to detach: the next engine must refuse them too.
            if self.inherited_left() > 0 || self.hosts_must_detach {
                return self.closed(out);
            }
            self.life = Life::ClosingSwap;
        }
        let Life::ClosingFlush { mut sent, done } = self.life else { return };
        for leg in self.expected.without(sent.or(done)).iter() {
            if self.legs.get(leg).is_some_and(Leg::is_sendable) {
                sent.insert(leg);
                self.send(leg, Owner::CloseFlush, Op::Flush, (0, 0), Payload::None, out);
            }
        }
        self.life = Life::ClosingFlush { sent, done };
        let stuck = self.is_stuck_on_meta();
        if self.expected.without(done).is_empty() && (self.meta.carried || stuck) {
            self.life = Life::ClosingMeta;
            // Regions that clear must have their stamps everywhere.
            if let Some(wib) = self.wib.as_mut().filter(|_| !stuck) {
                wib.clear_all();
            }
            self.meta.closing = self.inherited_left() == 0 && !self.hosts_must_detach;
            self.meta.outdate();
            self.rescan = true;
        }
    }

    pub(crate) fn close_flush_done(&mut self, leg: LegId, result: Result<(), LegError>, out: &mut Vec<Action>) {
        if let Life::ClosingFlush { sent, done } = &mut self.life {
            sent.remove(leg);
            match result {
                Ok(()) => done.insert(leg),
                Err(LegError::Gone) => {}
                Err(error) => {
                    if !self.eject_or_drop(leg, DropReason::WriteFailed(error)) {
                        self.stop(StopReason::CloseFailed { leg }, out);
                    }
                }
            }
        }
    }

    /// The record with the orderly close, once everything else is done.
    pub(crate) fn plan_close(&self) -> Option<(Config, SwapReason)> {
        (self.life == Life::ClosingSwap).then(|| {
            let mut next = self.gate.config.clone();
            next.clean = true;
            (next, SwapReason::Close)
        })
    }

    /// The close is recorded.
    pub(crate) fn closed(&mut self, out: &mut Vec<Action>) {
        self.life = Life::Closed;
        for leg in self.legs.iter_mut().filter(|l| l.role != Role::Dropped) {
            leg.role = Role::Dropped;
            out.push(Action::LegDrop { leg: leg.id, reason: DropReason::Stopped });
        }
        out.push(Action::Closed);
    }
}
