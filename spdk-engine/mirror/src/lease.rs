//! The lease of reads: an engine that was replaced and does not know it must not answer old data (rule 16).
//!
//! *What it is.* Writes need every member, so fencing one member ends them. A read needs one member only, perhaps one
//! that the new engine could not reach. So a read is answered with success only while *every* required member has
//! answered an I/O that was sent within the last `lease_ns`: up to the moment of sending nobody had been promoted on
//! that member. A new engine that did not promote all of `S` waits for `lease_ns` and a margin after its first promote
//! of a member (see [`crate::opener`]); by then every answer that could still allow a read here is too old.
//!
//! *How.* Each completion renews its leg for free. Members that were not asked lately get a probe, a read of one block:
//! when half of the lease is over ahead of need, so that a steady stream of reads waits for nothing, and when it is over
//! while the answer is held back. A volume without reads sends no probes.
//!
//! *Invariants.* Required is whoever an acknowledgement needs by the record or by a swap under way: a replica that may be in
//! `S` by the record that the next engine finds. One probe per leg at a time. A read that is held keeps its range
//! lock; its data stays what it was, as no overlapping write can run.
//!
//! *When things fail.* A member that is lost confirms nothing: the read waits until it is back or has left `S`, but no
//! longer than `lease_hold_ns`; then the host is told to take another path. One that answers with nothing that
//! confirms is asked [`VAIN_PROBES_MAX`] times, with pauses, and leaves. A probe that finds a newer epoch stops the core.

use crate::core::Core;
use crate::events::{Action, DropReason, HostError, LegError, LegId, Nanos, Op, Payload};
use crate::host::Stage;
use crate::legs::{Leg, LegMask, Owner};

/// Probes in a row that confirm nothing, after which a member leaves.
const VAIN_PROBES_MAX: u32 = 8;
/// Part of a lease between two of them.
const VAIN_PAUSE_PART: Nanos = 20;

/// What is known about the lease.
#[derive(Debug, Default)]
pub(crate) struct Lease {
    /// Members that must confirm.
    pub(crate) required: LegMask,
    /// A time until which it is known to hold; in truth it may hold longer.
    pub(crate) valid_until: Nanos,
    /// Reads that are held back.
    pub(crate) held: usize,
    /// A read found less than half of the lease left.
    renew: bool,
}

impl Lease {
    /// Reads are held back, or the lease is to be renewed.
    pub(crate) fn wants_pump(&self) -> bool {
        self.held > 0 || self.renew
    }
}

impl Core {
    /// Answers a read whose data is there, now or when the members have confirmed.
    pub(crate) fn answer_read(&mut self, slot: u32, out: &mut Vec<Action>) {
        if self.lease_holds() {
            self.answer(slot, Ok(()), out);
        } else if let Some(op) = self.host.get_mut(slot) {
            op.stage = Stage::Confirming;
            op.hold_until = self.now.saturating_add(self.options.lease_hold_ns);
            self.lease.held += 1;
        }
    }

    /// Whether a read may be answered now. Cheap while more than half of the lease is left.
    fn lease_holds(&mut self) -> bool {
        let half = self.options.lease_ns / 2;
        if self.now.saturating_add(half) > self.lease.valid_until {
            self.lease.valid_until = self.lease_end();
            self.lease.renew |= self.now.saturating_add(half) > self.lease.valid_until;
        }
        self.now < self.lease.valid_until || self.bends_lease()
    }

    /// When the lease ends by what the members have confirmed so far; 0 when one never has.
    fn lease_end(&self) -> Nanos {
        let confirmed = |id| self.legs.get(id).and_then(|l| l.confirmed);
        let end = |id| confirmed(id).map_or(0, |at| at.saturating_add(self.options.lease_ns));
        self.lease.required.iter().map(end).min().unwrap_or(0)
    }

    /// Asks members that have not confirmed for half a lease, lets go what the lease allows, gives up what waited for
    /// too long.
    pub(crate) fn pump_lease(&mut self, out: &mut Vec<Action>) {
        if self.lease.held == 0 && !self.lease.renew {
            return; // The usual case.
        }
        if self.lease.held > 0 && self.lease_holds() {
            self.end_holds(|_| Some(Ok(())), out);
        }
        let now = self.now;
        self.end_holds(|until| (until <= now).then_some(Err(HostError::PathGone)), out);
        if self.lease.held > 0 || std::mem::take(&mut self.lease.renew) {
            self.send_probes(out);
        }
        self.lease.renew = false;
    }

    /// Answers reads that are held back, as `result` says by the end of their wait.
    fn end_holds(&mut self, result: impl Fn(Nanos) -> Option<crate::HostResult>, out: &mut Vec<Action>) {
        if self.lease.held == 0 {
            return;
        }
        for slot in 0..self.host.slots() {
            let held = self.host.get(slot).filter(|o| o.stage == Stage::Confirming);
            if let Some(result) = held.and_then(|o| result(o.hold_until)) {
                self.answer(slot, result, out);
            }
        }
    }

    fn send_probes(&mut self, out: &mut Vec<Action>) {
        let old = self.now.saturating_sub(self.options.lease_ns / 2);
        let is_due = |l: &Leg| !l.probing && l.probe_after <= self.now && l.is_sendable();
        let stale = |l: &Leg| l.confirmed.is_none_or(|at| at < old) && is_due(l);
        let stale = self.legs.mask(stale).and(self.lease.required);
        for id in stale.iter() {
            if let Some(leg) = self.legs.get_mut(id) {
                leg.probing = true;
            }
            self.send(id, Owner::Probe, Op::Read, (0, 1), Payload::Probe, out);
        }
    }

    /// A member that answers, but with nothing that confirms, is asked again after a pause. It leaves when it goes on so,
    /// if others stay: it would hold every read back.
    pub(crate) fn probe_done(&mut self, id: LegId, result: Result<(), LegError>) {
        let after = self.now.saturating_add(self.options.lease_ns / VAIN_PAUSE_PART);
        let Some(leg) = self.legs.get_mut(id) else { return };
        leg.probing = false;
        match result {
            // That its session is lost is told by another input, and a new one is asked anew.
            Ok(()) | Err(LegError::Media | LegError::NoSpace | LegError::Gone | LegError::Fenced) => {
                leg.vain_probes = 0
            }
            Err(error @ LegError::Other) => {
                (leg.probe_after, leg.vain_probes) = (after, leg.vain_probes + 1);
                if leg.vain_probes >= VAIN_PROBES_MAX {
                    leg.vain_probes = 0;
                    self.eject_or_drop(id, DropReason::Unusable(error));
                }
            }
        }
    }

    /// When a read is held back for too long.
    pub(crate) fn lease_deadline(&self) -> Option<Nanos> {
        if self.lease.held == 0 {
            return None;
        }
        let held = (0..self.host.slots()).filter_map(|slot| self.host.get(slot)).map(|o| o.hold_until);
        held.chain(self.legs.iter().map(|l| l.probe_after).filter(|at| *at > self.now)).min()
    }

    /// Rule 16 broken on purpose.
    fn bends_lease(&self) -> bool {
        #[cfg(feature = "planted-bugs")]
        {
            self.options.bug == Some(crate::PlantedBug::Rule16NoReadGate)
        }
        #[cfg(not(feature = "planted-bugs"))]
        {
            false
        }
    }
}
