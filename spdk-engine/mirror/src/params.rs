//! What a core is started with: legs, bounds and times. Plain values without behaviour; [`crate::Core::open`] checks them.

use crate::config::{Config, Epoch, ReplicaId};
use crate::events::{LegId, Nanos};
use crate::meta::RegionBits;

/// A leg at the time of opening.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LegInit {
    /// Its number.
    pub leg: LegId,
    /// Its replica.
    pub replica: ReplicaId,
    /// It is on this machine.
    pub local: bool,
    /// It is connected; otherwise the grace window starts at the first input.
    pub up: bool,
    /// It has a meta area.
    pub meta: bool,
    /// Its instance (see [`crate::ReplicaFacts`]); empty when it has none.
    pub instance: String,
    /// It may lack acknowledged writes (rule 1): no source until it was made equal.
    pub changed: bool,
}

/// What is known of the regions when a volume with meta areas is opened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MetaInit {
    /// Regions in which members may differ; one bit for each region of the volume.
    pub inherited: RegionBits,
    /// Epoch of the last engine that may have served: stamps are trusted on members whose superblock has it.
    pub served: Option<Epoch>,
}

/// Bounds and times of a core.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Options {
    /// How long a lost connection is waited for (rule 12).
    pub grace_ns: Nanos,
    /// How long after an announced restart, and how long when most but not all members are lost at once.
    pub grace_long_ns: Nanos,
    /// Pause before a swap that was not settled is tried again.
    pub swap_retry_ns: Nanos,
    /// Most host commands in flight; more are answered [`crate::HostError::Busy`].
    pub max_inflight: u32,
    /// Blocks copied at a time. 0 means 1 MiB.
    pub copy_window_blocks: u32,
    /// Copies at a time, over all joiners.
    pub copy_queue_depth: u32,
    /// Read from a member on this machine when there is one.
    pub prefer_local: bool,
    /// How long an answer of every member allows reads to be answered (rule 16). The same on all engines of a volume.
    pub lease_ns: Nanos,
    /// How long a read is held back while members do not confirm; after that the host is sent to another path.
    pub lease_hold_ns: Nanos,
    /// Blocks of a region: a power of two. 0 is the usual of the volume's size, which all replicas share.
    pub region_blocks: u64,
    /// Most live regions: so many are made equal after a crash at most, apart from those that were inherited before.
    pub live_regions_max: u32,
    /// How long a live region stays so without writes.
    pub clear_idle_ns: Nanos,
    /// Longest time that changes are held back for a snapshot.
    pub snapshot_hold_max_ns: Nanos,
    /// The rule this core breaks on purpose.
    #[cfg(feature = "planted-bugs")]
    pub bug: Option<crate::PlantedBug>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            grace_ns: 1_000_000_000,
            grace_long_ns: 10_000_000_000,
            swap_retry_ns: 100_000_000,
            // Eight host queues of 128, the usual most of one Linux initiator per volume.
            max_inflight: 1024,
            copy_window_blocks: 0,
            copy_queue_depth: 4,
            prefer_local: true,
            lease_ns: 10_000_000_000,
            // As long as the usual host waits for a command before it resets the path by itself.
            lease_hold_ns: 30_000_000_000,
            region_blocks: 0,
            // 8 GiB in regions of 1 MiB: wide enough for random writes to stay hot, copied in the background in seconds.
            live_regions_max: 8192,
            clear_idle_ns: 5_000_000_000,
            // Shorter than the usual host waits for a command before it resets the path by itself.
            snapshot_hold_max_ns: 20_000_000_000,
            #[cfg(feature = "planted-bugs")]
            bug: None,
        }
    }
}

/// What is needed to start a core.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OpenParams {
    /// The volume.
    pub volume: crate::config::VolumeId,
    /// Bytes of a block: a power of two from 512.
    pub block_size: u32,
    /// Size of the volume in blocks; equals `config.size_blocks`.
    pub num_blocks: u64,
    /// The record as it stands at the arbiter, at this engine's own epoch.
    pub config: Config,
    /// One leg for every member of `S`; legs for those of `R` that are connected.
    pub legs: Vec<LegInit>,
    /// When set, members may be unequal (strict mode after an unclean stop): this one is copied over the other
    /// members before any host command is served.
    pub equalise_from: Option<LegId>,
    /// When set, legs with a meta area keep write-intent bits and superblocks. Not together with `equalise_from`.
    pub meta: Option<MetaInit>,
    /// The volume was closed in order before: nothing that members hold waits for a flush.
    pub flushed: bool,
    /// No member is certain to hold every acknowledged write (rule 1). The runner refuses hosts that were attached
    /// until all of them have detached or restarted, and then says [`crate::Input::HostsDetached`].
    pub hosts_must_detach: bool,
    /// Bounds and times.
    pub options: Options,
}
