//! What a core looks like from outside. Nothing here changes it.

use crate::config::{Config, ReplicaId};
use crate::core::{Core, Life};
use crate::events::{IoId, LegId, Nanos};
use crate::legs::{Leg, Role};
use crate::rebuild::CopyProgress;
use crate::wib::Wib;

/// What the core looks like from outside, for status reports.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Status {
    /// The committed record.
    pub config: Config,
    /// Host commands in flight.
    pub inflight: usize,
    /// A swap is under way.
    pub swapping: bool,
    /// `S` may not shrink further and acknowledgements wait.
    pub frozen: bool,
    /// Members are being made equal; hosts wait.
    pub equalising: bool,
    /// Reads whose data is there and whose answer waits until every member has confirmed (rule 16).
    pub held_reads: usize,
    /// Hosts that were attached before it was opened have to detach (rule 1).
    pub hosts_must_detach: bool,
    /// Rebuilds under way.
    pub rebuilds: Vec<Rebuild>,
    /// Legs whose connection is lost.
    pub lost: Vec<LegId>,
    /// Members that have failed and are to leave, as soon as `S` may shrink.
    pub leaving: Vec<LegId>,
    /// Regions in which members may still differ since an earlier engine.
    pub inherited_regions: u32,
    /// Regions with writes in flight or lately.
    pub live_regions: u32,
    /// Writes to meta areas so far, over all legs.
    pub meta_writes: u64,
    /// Inputs so far after which everything was looked at, not host I/O alone.
    pub full_passes: u64,
    /// Stopped or closed.
    pub finished: bool,
}

/// A rebuild from outside.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rebuild {
    /// Which leg.
    pub leg: LegId,
    /// Which replica.
    pub replica: ReplicaId,
    /// Blocks of regions that were copied.
    pub copied: u64,
    /// Blocks of all regions that have to be copied; 0 until that is known.
    pub total: u64,
    /// Blocks that need not be copied, as they did not change while the replica was away.
    pub skipped: u64,
}

impl Core {
    /// The committed record.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.gate.config
    }

    /// Number of copy buffers (of `copy_window_blocks` each) the runner provides.
    #[must_use]
    pub fn copy_slots(&self) -> u32 {
        self.copies.depth() + 1 + self.regions.depth()
    }

    /// Blocks of a copy buffer.
    #[must_use]
    pub fn copy_window_blocks(&self) -> u32 {
        self.copies.window()
    }

    pub(crate) fn inherited_left(&self) -> u32 {
        self.wib.as_ref().map_or(0, |w| w.inherited_left)
    }

    /// Whether one more host command would be accepted.
    #[must_use]
    pub fn has_room(&self) -> bool {
        self.life == Life::Running && self.host.has_room()
    }

    /// When an I/O that is in flight was sent; the time that was told with the input that led to it.
    #[must_use]
    pub fn sent_at(&self, leg: LegId, io: IoId) -> Option<Nanos> {
        self.io.get(io, leg).map(|(_, entry)| entry.sent)
    }

    /// Whether the core has stopped or closed.
    #[must_use]
    pub fn is_finished(&self) -> bool {
        matches!(self.life, Life::Stopped | Life::Closed)
    }

    /// What it looks like from outside.
    #[must_use]
    pub fn status(&self) -> Status {
        let rebuild = |leg: &Leg| {
            let CopyProgress { copied, total, planned } = self.copies.progress(leg.id);
            let skipped = if planned { self.num_blocks - total } else { 0 };
            Rebuild { leg: leg.id, replica: leg.replica.clone(), copied, total, skipped }
        };
        Status {
            config: self.gate.config.clone(),
            inflight: self.host.len(),
            swapping: self.gate.pending.is_some(),
            frozen: self.frozen,
            equalising: self.barrier.is_some(),
            held_reads: self.lease.held,
            hosts_must_detach: self.hosts_must_detach,
            rebuilds: self.legs.iter().filter(|l| l.is_mirrored_joiner() || l.unequal).map(rebuild).collect(),
            lost: self.legs.iter().filter(|l| !l.is_up() && l.role != Role::Dropped).map(|l| l.id).collect(),
            leaving: self.legs.iter().filter(|l| l.role == Role::Member && l.is_failed()).map(|l| l.id).collect(),
            inherited_regions: self.inherited_left(),
            live_regions: self.wib.as_ref().map_or(0, Wib::live_len),
            meta_writes: self.meta.writes,
            full_passes: self.full_passes,
            finished: self.is_finished(),
        }
    }
}
