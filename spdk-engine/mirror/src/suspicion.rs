//! Who is the suspect when members are lost: they, or the engine itself (rule 12).
//!
//! *What it is.* A cut at the engine's own end takes all members away at once, but is noticed of one after the other: a
//! connection without I/O is found dead seconds later. Judged one by one each of them looks like a single loss, and `S`
//! would shrink to what is left. So when a member's connection is lost, every other member is asked for a sign of life
//! at once, a probe as the lease sends it; by the time at which the lost one would leave, whoever has not answered
//! looks bad too. Members that left as lost a short time before still count. When most of all these look bad, the
//! engine is the suspect, and its members get the long window.
//!
//! *What looks bad.* A member is
//! - *lost*: its connection is;
//! - *silent*: connected, but it has answered nothing that was sent since the last loss whose short window is over;
//! - *gone*: it left `S` as lost, less than `grace_long_ns` before the first of those lost now, and is not back.
//!
//! *Invariants.* A member that answers is no reason to wait: a single failure is over within `grace_ns`. One probe per
//! leg at a time. Nothing is asked while nobody is lost. Most members that really fail leave after the long window.
//!
//! *When things fail.* A silent member that answers late ends the suspicion with its answer. One that never does is ended by
//! its initiator, and is lost then.

use crate::LEGS_MAX;
use crate::config::ReplicaId;
use crate::core::Core;
use crate::events::{Action, DropReason, LegId, Nanos, Op, Payload};
use crate::legs::{Leg, Link, Owner, Role};

/// Members that left as lost, with the time.
#[derive(Debug, Default)]
pub(crate) struct Gone(Vec<(ReplicaId, Nanos)>);

impl Gone {
    fn note(&mut self, replica: &ReplicaId, now: Nanos) {
        self.back(replica);
        if self.0.len() == LEGS_MAX {
            self.0.remove(0);
        }
        self.0.push((replica.clone(), now));
    }

    /// The engine reaches it again.
    pub(crate) fn back(&mut self, replica: &ReplicaId) {
        self.0.retain(|(gone, _)| gone != replica);
    }
}

/// Since when a member that may still come back is lost.
fn lost_since(leg: &Leg) -> Option<Nanos> {
    match leg.link {
        Link::Lost { since, .. } if leg.role == Role::Member && leg.eject.is_none() => Some(since),
        _ => None,
    }
}

/// A member that stays, or that leaves for nothing but being lost.
fn is_counted(leg: &Leg) -> bool {
    leg.role == Role::Member && matches!(leg.eject, None | Some(DropReason::Lost))
}

impl Core {
    /// Whether the engine is the suspect now. Asks members for a sign of life when another one is lost.
    pub(crate) fn is_suspect(&mut self, now: Nanos, out: &mut Vec<Action>) -> bool {
        let Some(first) = self.legs.iter().filter_map(lost_since).min() else { return false };
        self.ask_for_signs(now, out);
        let remembered = self.options.grace_long_ns;
        self.gone.0.retain(|(_, at)| at.saturating_add(remembered) > first);
        let lost = self.legs.mask(|l| is_counted(l) && !l.is_up());
        let counted = self.legs.mask(is_counted);
        if self.bends_one_by_one() {
            return lost.len() * 2 > counted.len();
        }
        let bad = lost.or(self.silent(now).and(counted)).len() + self.gone.0.len();
        bad * 2 > counted.len() + self.gone.0.len()
    }

    /// Probes to members that have answered nothing since the last loss.
    fn ask_for_signs(&mut self, now: Nanos, out: &mut Vec<Action>) {
        let last = self.legs.iter().filter_map(lost_since).max();
        let is_due = |l: &Leg| !l.probing && l.probe_after <= now && l.is_sendable();
        let due = self.legs.mask(|l| l.role == Role::Member && l.confirmed < last && is_due(l));
        for id in due.iter() {
            if let Some(leg) = self.legs.get_mut(id) {
                leg.probing = true;
            }
            self.send(id, Owner::Probe, Op::Read, (0, 1), Payload::Probe, out);
        }
    }

    /// Members that are connected and have answered nothing since the last loss whose short window is over.
    fn silent(&self, now: Nanos) -> crate::legs::LegMask {
        let over = |since: &Nanos| since.saturating_add(self.options.grace_ns) <= now;
        let last = self.legs.iter().filter_map(lost_since).filter(over).max();
        self.legs.mask(|l| l.is_up() && l.confirmed < last)
    }

    /// A member leaves `S`.
    pub(crate) fn note_gone(&mut self, id: LegId) {
        let Some(leg) = self.legs.get(id) else { return };
        if leg.eject == Some(DropReason::Lost) && !leg.is_up() {
            self.gone.note(&leg.replica, self.now);
        }
    }

    /// Rule 12 broken on purpose: each loss is judged alone.
    fn bends_one_by_one(&self) -> bool {
        #[cfg(feature = "planted-bugs")]
        {
            self.options.bug == Some(crate::PlantedBug::Rule12OneByOne)
        }
        #[cfg(not(feature = "planted-bugs"))]
        {
            false
        }
    }
}
