//! The shortest way of host I/O through the core, for the usual case.
//!
//! *What it is.* In the quiet state (see [`crate::quiet`]) nearly every input is one of two: a read or write whose range
//! overlaps nothing and whose regions are live, or a leg's success that either is not the last one or answers the host
//! without setting anything else free. These need neither queues nor a list of actions: [`Core::quick_host`] and
//! [`Core::quick_done`] say in one value what follows. A runner may call them itself, before [`Core::apply`] with the same
//! input; `apply` begins with them, too.
//!
//! *Invariants.* They do exactly what `apply` would do without them (`tests` hold them against it), or nothing at all and
//! say `None`: each looks at everything first and changes the state only when it will go through with it.
//!
//! *When things fail.* Whatever fails is no usual case: `None`.

use crate::core::{Core, LockOwner};
use crate::events::{HostId, IoId, LegId, Nanos, Op};
use crate::host::{HostOp, Stage};
use crate::legs::{IoIds, LegMask, Owner};
use crate::overlap::LockKind;

/// A host command that is to be sent to legs, unchanged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sent {
    legs: LegMask,
    ids: IoIds,
}

impl Sent {
    /// The legs, each with the number of its I/O, in the order in which they are to be sent.
    pub fn ios(self) -> impl Iterator<Item = (LegId, IoId)> {
        self.legs.iter().map(move |leg| (leg, self.ids.on(leg)))
    }
}

/// What a leg's success leads to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answered {
    /// Nothing yet.
    Waits,
    /// This host command has succeeded and is to be answered.
    Host(HostId),
}

impl Core {
    /// Takes a host command if it is a usual one: it is to be sent to these legs at once.
    pub fn quick_host(&mut self, now: Nanos, id: HostId, op: Op, lba: u64, blocks: u32) -> Option<Sent> {
        let end = lba.checked_add(u64::from(blocks)).filter(|end| *end <= self.num_blocks)?;
        let usual = self.is_quick(now) && op != Op::Flush && blocks > 0 && self.host.has_room();
        if !usual || !self.locks.is_free(lba, end) {
            return None;
        }
        let (kind, legs) = if op == Op::Read {
            let source = self.legs.choose_source(self.options.prefer_local, LegMask::EMPTY)?;
            (LockKind::Read, LegMask::of(source))
        } else {
            (LockKind::Write, self.expected)
        };
        let mut marked = false;
        if let Some(wib) = self.wib.as_mut().filter(|_| op != Op::Read) {
            marked = wib.begin_write(wib.geometry.regions_of(lba, blocks), now);
            if !marked {
                return None;
            }
        }
        self.now = now;
        let need = if op == Op::Read { LegMask::EMPTY } else { legs };
        let started = HostOp { need, sent: legs, stage: Stage::Running, marked, ..HostOp::new(id, op, lba, blocks) };
        let (slot, generation) = self.host.insert(started);
        let key = self.locks.acquire_free(lba, end, kind, LockOwner::Host(slot));
        if let Some(live) = self.host.get_mut(slot) {
            live.lock = Some(key);
        }
        let ids = self.book_sent(legs, Owner::Host { slot, generation }, op, None);
        Some(Sent { legs, ids })
    }

    /// Takes the success of a leg's I/O if it is a usual one. An I/O that was sent more than `late_after` ago is none.
    pub fn quick_done(&mut self, now: Nanos, leg: LegId, io: IoId, late_after: Nanos) -> Option<Answered> {
        if !self.is_quick(now) {
            return None;
        }
        let (place, entry) = self.io.get(io, leg)?;
        let Owner::Host { slot, generation } = entry.owner else { return None };
        if now.saturating_sub(entry.sent) > late_after {
            return None;
        }
        let op = self.host.get(slot).filter(|o| o.generation == generation)?;
        if op.stage != Stage::Running || op.settled || op.op == Op::Flush || !op.failed.is_empty() {
            return None;
        }
        let mut ok = op.ok;
        ok.insert(leg);
        let ends = op.op == Op::Read || self.has_all(op, ok);
        if ends && !self.may_answer(now, op) {
            return None;
        }
        self.now = now;
        let entry = self.io.answered(place, leg);
        self.legs.book_answered(leg, entry, Ok(()));
        if ends {
            return self.end_alone(slot).map(Answered::Host);
        }
        let op = self.host.get_mut(slot)?;
        op.sent.remove(leg);
        op.ok = ok;
        Some(Answered::Waits)
    }

    /// Nobody waits for the command's range, its members carry the record, and a read's lease is far from its end.
    #[inline]
    fn may_answer(&self, now: Nanos, op: &HostOp) -> bool {
        let holds = match op.op {
            Op::Read => {
                let until = self.lease.valid_until;
                now < until && now.saturating_add(self.options.lease_ns / 2) <= until
            }
            _ => self.meta.carried,
        };
        holds && op.lock.is_some_and(|key| self.locks.is_alone(key))
    }

    /// Ends a command for whose range nobody waits.
    #[inline(always)]
    fn end_alone(&mut self, slot: u32) -> Option<HostId> {
        let op = self.host.remove(slot)?;
        if op.marked {
            self.unmark(op.lba, op.blocks);
        }
        if let Some(key) = op.lock {
            self.locks.release_alone(key);
        }
        Some(op.id)
    }

    fn is_quick(&self, now: Nanos) -> bool {
        #[cfg(test)]
        if self.without_quick {
            return false;
        }
        now < self.quiet_until
    }
}

#[cfg(test)]
mod tests;
