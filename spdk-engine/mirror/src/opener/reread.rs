//! The opener's part about meta areas that could not be read: they are read again over a new promote.
//!
//! *Why.* A promote that was given up may still arrive, later than the one that was answered. It names this very engine, so
//! that the replica does as it is told: it ends the session on which its meta area is being read. Nothing was lost, but
//! a replica that cannot be read counts as one that lost its cache (rule 1), and hosts would be refused for nothing.
//!
//! *What it does.* The replica is promoted anew, connected and read, [`READS_MAX`] times at most and no longer than
//! `OpenWaits::bits_wait_ns` allows. What it says of itself at the last promote is what counts: it may have lost power
//! since the one before. A replica that is not back in time is *unread*: it may be unchanged.
//!
//! *When things fail.* A replica that knows a newer epoch ends the opening. A read that fails the last time is final.

use super::bits::MemberBits;
use super::{OpenAction, OpenError, Opener, Phase, PromoteError, ReplicaFacts, promote};
use crate::config::ReplicaId;
use crate::events::{LegId, Nanos};

/// How often a meta area is read at most.
const READS_MAX: u32 = 4;

impl Opener {
    /// A read failed: what is known of the replica's bits now.
    pub(super) fn read_failed(&mut self, now: Nanos, replica: &ReplicaId, reads: u32) {
        let bits = if reads >= READS_MAX {
            MemberBits::Unreadable
        } else {
            MemberBits::Again { reads, at: Some(now.saturating_add(self.params.waits.retry_ns)) }
        };
        self.bits.insert(replica.clone(), bits);
    }

    /// Asks for the promotes that are due. Its connection counts for nothing until there is a new one.
    pub(super) fn promote_again(&mut self, now: Nanos, out: &mut Vec<OpenAction>) {
        let Some(config) = &self.config else { return };
        for (replica, bits) in &mut self.bits {
            if let MemberBits::Again { at, .. } = bits
                && at.take_if(|at| *at <= now).is_some()
            {
                if let Some(leg) = self.legs.iter_mut().find(|l| l.replica == *replica) {
                    leg.up = false;
                }
                out.push(promote(config, replica));
            }
        }
    }

    /// Whether the replica was promoted again in order to be read.
    fn is_promoted_again(&self, replica: &ReplicaId) -> Option<u32> {
        match self.bits.get(replica) {
            Some(MemberBits::Again { reads, at: None }) if matches!(self.phase, Phase::ReadingBits { .. }) => {
                Some(*reads)
            }
            _ => None,
        }
    }

    /// The answer to such a promote.
    pub(super) fn apply_promoted_again(
        &mut self,
        now: Nanos,
        replica: &ReplicaId,
        result: Result<ReplicaFacts, PromoteError>,
        out: &mut Vec<OpenAction>,
    ) {
        let Some(reads) = self.is_promoted_again(replica) else { return };
        let Some(leg) = self.legs.iter_mut().find(|l| l.replica == *replica) else { return };
        match result {
            Ok(facts) => {
                (leg.meta, leg.instance) = (facts.meta, facts.instance.clone());
                out.push(OpenAction::Connect { leg: leg.leg, replica: replica.clone() });
                if let Some(candidate) = self.candidates.get_mut(replica) {
                    candidate.facts = facts;
                }
            }
            Err(PromoteError::Newer) => self.fail(OpenError::Superseded, out),
            Err(PromoteError::Unreachable | PromoteError::Unusable) => self.read_failed(now, replica, reads + 1),
        }
    }

    /// The answer to the connection after it.
    pub(super) fn apply_connected_again(&mut self, now: Nanos, leg: LegId, up: bool, out: &mut Vec<OpenAction>) {
        let Some(replica) = self.legs.iter().find(|l| l.leg == leg).map(|l| l.replica.clone()) else { return };
        let Some(reads) = self.is_promoted_again(&replica) else { return };
        let Some(init) = self.legs.iter_mut().find(|l| l.leg == leg) else { return };
        init.up = up;
        if !up {
            self.read_failed(now, &replica, reads + 1);
        } else if init.meta {
            self.ask_bits(leg, &replica, reads + 1, out);
        } else {
            self.bits.insert(replica, MemberBits::Unreadable);
        }
    }

    /// When the next of them is due.
    pub(super) fn next_read(&self) -> Option<Nanos> {
        let due = |bits: &MemberBits| match bits {
            MemberBits::Again { at, .. } => *at,
            _ => None,
        };
        self.bits.values().filter_map(due).min()
    }
}
