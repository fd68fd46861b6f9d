//! What goes into the opener and what comes out. Plain values without behaviour.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::LEGS_MAX;
use crate::config::{
    Config, ConfigError, ConfigNumber, ConfigVersion, EngineInstance, Epoch, Lineage, ReplicaId, VolumeId,
};
use crate::events::{LegId, Nanos, SwapId, SwapOutcome};
use crate::params::{OpenParams, Options};

/// Times of an opener.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OpenWaits {
    /// After the first promoted member: how long the others are waited for before they leave `S`.
    pub promote_wait_ns: Nanos,
    /// Pause before a promote or a swap is tried again.
    pub retry_ns: Nanos,
    /// How long connecting may take before the core starts without a leg.
    pub connect_wait_ns: Nanos,
    /// How long reading the bits of connected members may take, with all that is tried again.
    pub bits_wait_ns: Nanos,
    /// When the attempt is given up. Longer than `Options::lease_ns` and the margin together.
    pub give_up_ns: Nanos,
    /// Added to `Options::lease_ns` when the old engine's lease is waited for: what clocks may differ in that time.
    pub lease_margin_ns: Nanos,
}

impl Default for OpenWaits {
    fn default() -> Self {
        Self {
            promote_wait_ns: 2_000_000_000,
            retry_ns: 250_000_000,
            connect_wait_ns: 2_000_000_000,
            bits_wait_ns: 5_000_000_000,
            give_up_ns: 60_000_000_000,
            lease_margin_ns: 1_000_000_000,
        }
    }
}

/// What is needed to open.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OpenerParams {
    /// The volume.
    pub volume: VolumeId,
    /// Bytes of a block.
    pub block_size: u32,
    /// This run of the engine; never used before.
    pub engine_instance: EngineInstance,
    /// When set, a record of another lineage is refused.
    pub lineage: Option<Lineage>,
    /// Replicas on this machine.
    pub local: BTreeSet<ReplicaId>,
    /// Engines of which it is known that they *and all engines before them* have ended. When the record is one of theirs,
    /// nobody's lease is waited for (rule 16). An engine that served, and is known to have ended, is one: before it
    /// served, all older ones were fenced everywhere, or their lease was over. So is one that never served, but was
    /// raised on top of such a one ([`crate::Opener::follows_dead`]). Any other last owner is not: it may never have
    /// served, and one before it may still be reading.
    pub dead_engines: BTreeSet<EngineInstance>,
    /// Epochs that the runner's own last attempts raised without ever serving; see [`RaisedInVain`].
    pub in_vain: Option<RaisedInVain>,
    /// Bounds and times of the core.
    pub options: Options,
    /// Times of the opener.
    pub waits: OpenWaits,
}

/// What an attempt that failed leaves behind: the record is at an epoch whose engine never served.
///
/// Bits are trusted when the replica's superblock is of the last engine that served. The next attempt of the same
/// runner is told by this which one that was ([`crate::Opener::raised_in_vain`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RaisedInVain {
    /// Epoch of the last engine that may have served.
    pub served: Epoch,
    /// The epoch that the record was raised to in vain.
    pub raised: Epoch,
}

/// Why a meta area could not be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the meta area cannot be read")]
pub struct MetaUnreadable;

/// Why the record could not be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RecordError {
    /// The arbiter has no record of this volume.
    #[error("no record")]
    NotFound,
    /// The arbiter did not answer; it is asked again.
    #[error("arbiter unavailable")]
    Unavailable,
}

/// Why a replica was not promoted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PromoteError {
    /// No answer; tried again.
    #[error("unreachable")]
    Unreachable,
    /// The replica knows a newer epoch.
    #[error("a newer epoch exists")]
    Newer,
    /// The replica has no data of this volume and lineage, or cannot serve it.
    #[error("unusable")]
    Unusable,
}

/// What a replica says of itself when it is promoted.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ReplicaFacts {
    /// It has a meta area beside its data.
    pub meta: bool,
    /// Its disk has a volatile cache: what was written and not flushed is gone when power is lost (rule 1).
    pub volatile: bool,
    /// A text that changes whenever what was not flushed may be gone: names the start of the machine, for devices that
    /// keep data in a process that of the process too. At most [`crate::meta::INSTANCE_BYTES_MAX`] bytes.
    pub instance: String,
}

/// Why opening failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The arbiter has no record (rule 21: not a new volume).
    #[error("the arbiter has no record of the volume")]
    NoRecord,
    /// The record breaks an invariant.
    #[error("the record is invalid: {0}")]
    BadRecord(#[from] ConfigError),
    /// The record is of another lineage.
    #[error("the record has lineage {found}, expected {expected}")]
    Lineage {
        /// Expected.
        expected: Lineage,
        /// Found.
        found: Lineage,
    },
    /// More replicas than legs.
    #[error("the record names {0} replicas: at most {LEGS_MAX} are allowed")]
    TooManyReplicas(usize),
    /// Another engine has a newer epoch.
    #[error("superseded by a newer epoch")]
    Superseded,
    /// Not enough members of the latest in-sync set could be promoted in time.
    #[error("{promoted} members of the in-sync set were promoted in time: {needed} are required")]
    NoMember {
        /// Promoted.
        promoted: usize,
        /// Required.
        needed: usize,
    },
    /// Whether members lost acknowledged writes is not known, as they were promoted but could not be connected and read.
    #[error("members {0:?} could not be read: whether they hold every acknowledged write is not known")]
    Unread(BTreeSet<ReplicaId>),
    /// A replica knows more than the record: that is an old copy (rule 21), and has to be recovered first.
    #[error("replica {replica} knows config_number {found}, the record has {recorded}: the record is an old copy")]
    RecordOld {
        /// Which.
        replica: ReplicaId,
        /// What it knows.
        found: ConfigNumber,
        /// What the record says.
        recorded: ConfigNumber,
    },
    /// The arbiter did not answer in time.
    #[error("the arbiter did not answer in time")]
    ArbiterTimeout,
}

/// What the opener is told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OpenInput {
    /// Begin. Exactly once.
    Start,
    /// Answer to [`OpenAction::ReadRecord`].
    RecordRead {
        /// The record.
        result: Result<Config, RecordError>,
    },
    /// Answer to [`OpenAction::DoCas`].
    CasAnswer {
        /// Which.
        cas: SwapId,
        /// What the arbiter said.
        outcome: SwapOutcome,
    },
    /// Answer to [`OpenAction::Promote`].
    Promoted {
        /// Which replica.
        replica: ReplicaId,
        /// `Ok` when epoch and instance are durable and older sessions ended and drained (rule 13).
        result: Result<ReplicaFacts, PromoteError>,
    },
    /// Answer to [`OpenAction::Connect`].
    Connected {
        /// Which leg.
        leg: LegId,
        /// Whether it is up.
        up: bool,
    },
    /// Answer to [`OpenAction::ReadMeta`].
    MetaRead {
        /// Which leg.
        leg: LegId,
        /// The bytes of all blocks asked for.
        result: Result<Arc<[u8]>, MetaUnreadable>,
    },
    /// Time passed.
    Tick,
}

/// What the opener asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OpenAction {
    /// Read the arbiter's record.
    ReadRecord,
    /// Replace the record of version `expect` by `next`.
    DoCas {
        /// Number, given back in the answer.
        cas: SwapId,
        /// What the record must be now.
        expect: ConfigVersion,
        /// What it becomes.
        next: Config,
    },
    /// Raise a replica to this epoch.
    Promote {
        /// Which replica.
        replica: ReplicaId,
        /// The new epoch.
        epoch: Epoch,
        /// The new owner.
        engine_instance: EngineInstance,
    },
    /// Open a session at the new epoch. One that there was before on this leg has ended with the promote.
    Connect {
        /// Number of the leg.
        leg: LegId,
        /// Which replica.
        replica: ReplicaId,
    },
    /// Read the meta area of a connected leg, in blocks of [`crate::meta::META_BLOCK_BYTES`].
    ReadMeta {
        /// Which leg.
        leg: LegId,
        /// First block.
        block: u64,
        /// Number of blocks.
        blocks: u32,
    },
    /// Send `Tick` at this time. Replaces the previous request.
    WakeAt {
        /// When.
        at: Nanos,
    },
    /// Something worth telling.
    Event(OpenEvent),
    /// Start a core with this.
    Ready(Box<OpenParams>),
    /// Opening failed; end what was connected.
    Failed {
        /// Why.
        reason: OpenError,
    },
}

/// What happened. Nothing depends on it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OpenEvent {
    /// The epoch is this engine's.
    EpochRaised {
        /// The new epoch.
        epoch: Epoch,
        /// The previous engine closed in order.
        was_clean: bool,
    },
    /// A replica was promoted.
    Promoted {
        /// Which.
        replica: ReplicaId,
    },
    /// A replica could not be promoted.
    NotPromoted {
        /// Which.
        replica: ReplicaId,
        /// Why.
        error: PromoteError,
    },
    /// Not all of `S` were promoted: an older engine may still answer reads until this time (rule 16).
    LeaseWait {
        /// When its lease is over.
        until: Nanos,
    },
    /// A member's bits were read.
    BitsRead {
        /// Which replica.
        replica: ReplicaId,
        /// Regions that are set.
        set: u32,
        /// They are of the last engine; otherwise every region counts as set.
        trusted: bool,
    },
    /// Members that may lack acknowledged writes, as their machines lost power (rule 1).
    Changed {
        /// Which.
        replicas: BTreeSet<ReplicaId>,
        /// All that were promoted: hosts that were attached must detach first.
        hosts_must_detach: bool,
    },
    /// The sets were decided.
    Decided {
        /// The new record.
        config: Config,
        /// Members that left.
        dropped: BTreeSet<ReplicaId>,
    },
}
