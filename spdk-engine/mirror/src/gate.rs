//! The acknowledgement gate: which legs must have a write before the host may hear of it (rules 1, 6, 7, 10).
//!
//! *What it is.* The committed record, the one swap that may be under way, and the set of legs that follows from
//! both: a leg is *required* while its replica is in `S` of the committed record **or** of a proposed record whose
//! fate is not known. No acknowledgement looks at anything else. So:
//! - a member that failed stays required until the swap that removes it has succeeded: this acknowledgement and all
//!   later ones wait (rule 6);
//! - a joiner is required from before its swap is sent (rule 10) and stays so while the outcome is unknown (rule 7).
//!
//! *Swaps.* One at a time. A swap of unknown outcome is sent again unchanged, with the same expected version, until
//! the arbiter says that it is committed or shows a record. All attempts expect the same base, so at most one of
//! them can ever take effect, and once one has, a request that is still queued somewhere finds another version and
//! fails. Reading the record instead would prove nothing about such a request.
//!
//! *When things fail.* A record that is neither the base nor the proposal means that another engine owns the volume
//! (or the record was rewritten): the caller stops for good.

use crate::config::Config;
use crate::events::{Nanos, SwapId, SwapOutcome, SwapReason};

#[derive(Debug)]
pub(crate) struct PendingSwap {
    pub(crate) id: SwapId,
    pub(crate) next: Config,
    pub(crate) reason: SwapReason,
    /// When to try again; `None` while a request is in flight.
    pub(crate) retry_at: Option<Nanos>,
}

/// What an answer means.
#[derive(Debug)]
pub(crate) enum Verdict {
    /// The proposal is the record now.
    Committed(SwapReason),
    /// Not settled: try again later.
    Unsettled { unknown: bool },
    /// Somebody else's record.
    Superseded(Box<Config>),
    /// An answer to nothing.
    Ignored,
}

#[derive(Debug)]
pub(crate) struct Gate {
    pub(crate) config: Config,
    pub(crate) pending: Option<PendingSwap>,
    next_swap: u64,
}

/// Same version and same sets.
fn is_same_record(a: &Config, b: &Config) -> bool {
    a.version() == b.version() && a.in_sync == b.in_sync && a.rebuilding == b.rebuilding
}

impl Gate {
    pub(crate) fn new(config: Config) -> Self {
        Self { config, pending: None, next_swap: 0 }
    }

    /// Whether an acknowledgement must wait for this replica.
    pub(crate) fn requires(&self, replica: &crate::ReplicaId) -> bool {
        self.config.in_sync.contains(replica)
            || self.pending.as_ref().is_some_and(|swap| swap.next.in_sync.contains(replica))
    }

    fn fresh_id(&mut self) -> SwapId {
        let id = SwapId(self.next_swap);
        self.next_swap += 1;
        id
    }

    /// Starts a swap. Only when none is pending.
    pub(crate) fn propose(&mut self, next: Config, reason: SwapReason) -> SwapId {
        debug_assert!(self.pending.is_none(), "one swap at a time");
        let id = self.fresh_id();
        self.pending = Some(PendingSwap { id, next, reason, retry_at: None });
        id
    }

    /// The pending swap with a new number, when its time to be tried again has come.
    pub(crate) fn retry(&mut self, now: Nanos) -> Option<(SwapId, Config, SwapReason)> {
        if self.pending.as_ref().is_none_or(|s| s.retry_at.is_none_or(|at| at > now)) {
            return None;
        }
        let id = self.fresh_id();
        let pending = self.pending.as_mut()?;
        pending.id = id;
        pending.retry_at = None;
        Some((id, pending.next.clone(), pending.reason))
    }

    /// Takes the arbiter's answer.
    pub(crate) fn answer(&mut self, id: SwapId, outcome: SwapOutcome, retry_at: Nanos) -> Verdict {
        let Some(pending) = self.pending.as_mut().filter(|s| s.id == id && s.retry_at.is_none()) else {
            return Verdict::Ignored;
        };
        match outcome {
            SwapOutcome::Committed => self.commit(),
            SwapOutcome::Refused { current } if is_same_record(&current, &pending.next) => self.commit(),
            SwapOutcome::Refused { current } if current.version() != self.config.version() => {
                Verdict::Superseded(Box::new(current))
            }
            SwapOutcome::Refused { .. } => {
                pending.retry_at = Some(retry_at);
                Verdict::Unsettled { unknown: false }
            }
            SwapOutcome::Unknown => {
                pending.retry_at = Some(retry_at);
                Verdict::Unsettled { unknown: true }
            }
        }
    }

    pub(crate) fn commit(&mut self) -> Verdict {
        match self.pending.take() {
            Some(pending) => {
                self.config = pending.next;
                Verdict::Committed(pending.reason)
            }
            None => Verdict::Ignored,
        }
    }
}
