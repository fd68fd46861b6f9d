//! What goes into the core and what comes out: inputs, actions, results, reasons.
//!
//! *What it is.* The whole vocabulary between the core and whoever runs it (the engine's device, the simulator).
//! Plain values without behaviour.
//!
//! *Duties of the runner.*
//! - Carry out actions in the order given; feed every outcome back as an input; call in one thread at a time.
//! - Every [`Action::LegIo`] gets exactly one [`Input::LegDone`] while its leg is up. When a connection is lost, one
//!   [`Input::LegLost`] may stand for all I/O that was in flight on it; after it nothing may touch the buffers of
//!   that I/O. `LegDone` for I/O that the core no longer knows is ignored.
//! - A replica whose instance changed since it was promoted or since the last session has perhaps lost what was not
//!   flushed: `LegBack` says so. Between promote and connect, the leg is given to the core as not up.
//! - [`Input::LegBack`] is sent only on a new session, after the replica has ended and drained the old one (rule 13).
//! - After [`Action::LegDrop`] the connection is ended and its I/O is answered (`LegDone` with any result, or one
//!   `LegLost`); only then may the leg number be used again.
//! - The payload of a host write is captured once before `Input::Host` (rule 4) and is kept until every `LegIo` that
//!   names it is done, which may be after `HostDone` if a leg was dropped meanwhile.
//! - Every [`Action::Swap`] gets exactly one [`Input::SwapAnswer`], within the runner's own deadline
//!   ([`SwapOutcome::Unknown`] when it passed).
//! - The time given with an input is read from the clock after the inputs before it had arrived. An engine that was
//!   stopped in between must not answer a read by a time from before the stop (rule 16).
//! - A meta write is durable when it is answered (force unit access, or a flush after it). `MetaIo` is answered as
//!   `LegIo` is, but a read that succeeded by [`Input::MetaRead`].
//! - I/O that hangs is the runner's to end: its transport's timeout turns it into `LegLost`.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::config::{Config, ConfigVersion, ReplicaId, SnapshotId, TreeVersion};
use crate::meta::MetaError;

/// A point in time in nanoseconds of a clock that never goes back and that runs on while the machine is suspended
/// (rule 16). Only differences count.
pub type Nanos = u64;

/// Number of a leg (a connection to one replica); chosen by the runner, below [`crate::LEGS_MAX`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LegId(pub u32);

/// Number of a host command; chosen by the runner, unique among commands in flight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HostId(pub u64);

/// Number of an I/O on a leg; chosen by the core, never used twice in one run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct IoId(pub u64);

/// Number of a swap; chosen by the core, never used twice in one run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SwapId(pub u64);

/// Number of a copy buffer of `copy_window_blocks`, below [`crate::Core::copy_slots`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CopySlot(pub u32);

/// What a command does. The same for hosts and for legs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Op {
    /// Read.
    Read,
    /// Write; with `fua` it is durable when it is acknowledged.
    Write {
        /// Force unit access.
        fua: bool,
    },
    /// Make all completed writes durable. Has no range.
    Flush,
    /// Deallocate; the blocks read as zeroes afterwards (rule 5).
    Unmap,
    /// Write zeroes.
    WriteZeroes,
}

impl Op {
    /// Whether the command changes blocks.
    #[must_use]
    pub fn changes_blocks(self) -> bool {
        matches!(self, Op::Write { .. } | Op::Unmap | Op::WriteZeroes)
    }
}

/// What is done with a leg's meta area, in blocks of [`crate::meta::META_BLOCK_BYTES`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MetaOp {
    /// Read blocks.
    Read {
        /// First block.
        block: u64,
        /// Number of blocks.
        blocks: u32,
    },
    /// Write blocks durably.
    Write {
        /// First block.
        block: u64,
        /// The bytes of one or more whole blocks.
        data: Arc<[u8]>,
    },
}

/// Where the data of a leg's I/O lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Payload {
    /// The host command this I/O serves: its buffer for reads and writes; only a label for the other operations.
    Host(HostId),
    /// A copy buffer.
    Copy(CopySlot),
    /// A block that nobody looks at: the runner gives each such read a buffer of its own.
    Probe,
    /// No data (flushes that the core itself asks for).
    None,
}

/// Why an I/O on a leg failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
pub enum LegError {
    /// The connection is lost; whether the replica executed the I/O is unknown.
    #[error("connection lost")]
    Gone,
    /// The disk cannot read or write these blocks.
    #[error("media error")]
    Media,
    /// The replica refused the session: a newer epoch exists.
    #[error("fenced by a newer epoch")]
    Fenced,
    /// The disk has no room.
    #[error("no space")]
    NoSpace,
    /// Any other definite failure.
    #[error("other error")]
    Other,
}

/// Why a host command failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
pub enum HostError {
    /// This engine is no longer the volume's: retry on another path. Nothing is known about the outcome.
    #[error("path gone")]
    PathGone,
    /// No member could read or write these blocks.
    #[error("media error")]
    Media,
    /// At least one member has no room; the blocks hold what they held before, or part of the new data.
    #[error("no space")]
    NoSpace,
    /// The range is empty or reaches beyond the end of the volume.
    #[error("out of range")]
    OutOfRange,
    /// More commands in flight than `max_inflight`: retry.
    #[error("too many commands in flight")]
    Busy,
    /// The device is being closed: retry on another path.
    #[error("closing")]
    Closing,
}

impl HostError {
    /// Whether the host should send the same command again, on this or on another path.
    #[must_use]
    pub fn is_retryable(self) -> bool {
        matches!(self, HostError::PathGone | HostError::Busy | HostError::Closing)
    }
}

/// Result of a host command.
pub type HostResult = Result<(), HostError>;

/// Arbiter's answer to a swap.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SwapOutcome {
    /// The record is now what was proposed.
    Committed,
    /// The record was not what was expected; here is what it is.
    Refused {
        /// The record as the arbiter holds it.
        current: Config,
    },
    /// Nobody knows: timed out, or the connection broke.
    Unknown,
}

/// Why a leg leaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DropReason {
    /// Its connection did not come back within the grace window.
    Lost,
    /// It failed a write that others have.
    WriteFailed(LegError),
    /// It answers, but with nothing that tells whether its session holds (rule 16).
    Unusable(LegError),
    /// Its disk lost acknowledged writes that were not flushed (rule 1).
    CacheLost,
    /// Its meta area cannot be read or written.
    MetaFailed(LegError),
    /// Copying to it failed.
    CopyFailed(LegError),
    /// No member could deliver the blocks to copy.
    NoSource,
    /// It did not take a snapshot that the other members have (rule 19).
    SnapshotMissed,
    /// The runner asked.
    Removed,
    /// The engine stopped or closed.
    Stopped,
    /// Its number was in use, or its replica is a member or joiner already.
    Refused,
}

/// Why a swap is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SwapReason {
    /// Members leave (rule 6).
    Leave,
    /// Replicas start rebuilding (rule 8).
    StartRebuild,
    /// Replicas stop rebuilding without having joined (rule 8).
    AbandonRebuild,
    /// A rebuilt replica joins (rule 10).
    Join,
    /// All members have a snapshot (rule 19).
    Snapshot,
    /// The device is closed in order.
    Close,
}

/// Why there is no snapshot. What replicas have taken under its name is to be deleted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SnapshotError {
    /// Members may differ.
    #[error("members are still being made equal after an unclean stop ({regions} regions): try again later")]
    Unequal {
        /// Regions left; 0 when all of the volume is copied.
        regions: u32,
    },
    /// One at a time.
    #[error("snapshot {other} is being taken: only one at a time is allowed")]
    Busy {
        /// The other one.
        other: SnapshotId,
    },
    /// The hold ended before all was done.
    #[error("it took longer than hosts may be held back")]
    TooSlow,
    /// Nobody is waited for under that name; the hold may have ended meanwhile.
    #[error("it is not being taken, or no longer")]
    NotHeld,
    /// No member has it.
    #[error("no member has taken it")]
    NobodyTookIt,
    /// Members without it cannot leave.
    #[error("{missed:?} did not take it, and the in-sync set may not shrink so far")]
    MayNotShrink {
        /// Which.
        missed: Vec<ReplicaId>,
    },
    /// The last member could not flush.
    #[error("the last member could not flush: {0}")]
    Flush(LegError),
    /// The runner gave it up.
    #[error("it was given up")]
    Aborted,
    /// The volume is being closed, or is closed.
    #[error("the volume is being closed")]
    Closing,
    /// The engine stopped. Whether the record names it is unknown.
    #[error("the engine stopped meanwhile")]
    Stopped,
}

/// Why the core stopped for good.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StopReason {
    /// A replica refused the session: a newer epoch exists.
    Fenced {
        /// Which.
        leg: LegId,
    },
    /// The arbiter's record belongs to another engine, epoch or lineage.
    Superseded {
        /// What the record says.
        current: ConfigVersion,
    },
    /// The last member lost acknowledged writes (rule 1).
    CacheLost {
        /// Which.
        leg: LegId,
    },
    /// The last member could not flush while closing; the record does not say "clean".
    CloseFailed {
        /// Which.
        leg: LegId,
    },
}

/// What happened, for logs, metrics and conditions. Nothing depends on it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// A leg's connection is lost; the grace window runs.
    LegLost {
        /// Which.
        leg: LegId,
    },
    /// A leg is back and its I/O is being replayed.
    LegBack {
        /// Which.
        leg: LegId,
        /// I/O sent again.
        replayed: u32,
    },
    /// Most members are lost at once: the engine is the suspect and ejects nobody (rule 12).
    Suspect,
    /// `S` may not shrink further: acknowledgements wait (rule 6).
    Frozen,
    /// Acknowledgements that waited go on.
    Thawed,
    /// A member could not read blocks; another was asked.
    ReadFailed {
        /// Which.
        leg: LegId,
        /// First block.
        lba: u64,
        /// Count.
        blocks: u32,
        /// Why.
        error: LegError,
    },
    /// A write failed on some members and the range was made equal on all of them.
    RangeRepaired {
        /// First block.
        lba: u64,
        /// Count.
        blocks: u32,
    },
    /// The record changed.
    ConfigChanged {
        /// The new record.
        config: Box<Config>,
    },
    /// The outcome of a swap is unknown; it is tried again until it is settled (rule 7).
    SwapUnknown {
        /// Which.
        swap: SwapId,
    },
    /// Copying to a replica began.
    RebuildStarted {
        /// Which leg.
        leg: LegId,
        /// Which replica.
        replica: ReplicaId,
    },
    /// A replica joined `S`.
    Joined {
        /// Which leg.
        leg: LegId,
        /// Which replica.
        replica: ReplicaId,
    },
    /// All members are equal after an unclean stop: no region is inherited any more, or, without bits, the full copy
    /// is done and hosts are served.
    Equalised,
    /// A member that cannot leave cannot keep its meta area; it is tried again. As long as it does not carry the record,
    /// acknowledgements wait.
    MetaFailed {
        /// Which.
        leg: LegId,
        /// Why.
        error: LegError,
        /// Why, when there is nothing to be written.
        why: Option<MetaError>,
    },
    /// The runner asked to remove a member that must stay.
    RemoveRefused {
        /// Which.
        leg: LegId,
    },
}

/// What the core is told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Input {
    /// A host command. For `Flush`, `lba` and `blocks` are ignored.
    Host {
        /// Its number.
        id: HostId,
        /// What to do.
        op: Op,
        /// First block.
        lba: u64,
        /// Number of blocks.
        blocks: u32,
    },
    /// An I/O on a leg is done.
    LegDone {
        /// Which leg.
        leg: LegId,
        /// Which I/O.
        io: IoId,
        /// How it ended.
        result: Result<(), LegError>,
    },
    /// A read of a leg's meta area succeeded. One that failed is told by `LegDone`.
    MetaRead {
        /// Which leg.
        leg: LegId,
        /// Which I/O.
        io: IoId,
        /// The bytes.
        data: Arc<[u8]>,
    },
    /// A leg's connection is lost; everything in flight on it has an unknown outcome.
    LegLost {
        /// Which.
        leg: LegId,
        /// The restart was announced: the longer grace window counts.
        announced: bool,
    },
    /// A leg has a new session of the same epoch; the replica drained the old one first.
    LegBack {
        /// Which.
        leg: LegId,
        /// The replica's disk may have lost writes that were not flushed (its machine lost power).
        cache_lost: bool,
    },
    /// A leg's replica has this instance now. Before the `LegBack` of a session with a changed one, and after `AddLeg`.
    LegInstance {
        /// Which.
        leg: LegId,
        /// See [`crate::ReplicaFacts`].
        instance: String,
    },
    /// All hosts that were attached before this engine opened have detached or restarted.
    HostsDetached,
    /// A replica refused a new session for good: it was promoted to a newer epoch (rule 13). The core stops.
    LegFenced {
        /// Which.
        leg: LegId,
    },
    /// The arbiter's answer.
    SwapAnswer {
        /// To which swap.
        swap: SwapId,
        /// What it said.
        outcome: SwapOutcome,
    },
    /// A connected replica outside `S` is to be rebuilt.
    AddLeg {
        /// Its number.
        leg: LegId,
        /// Its name.
        replica: ReplicaId,
        /// It is on this machine.
        local: bool,
        /// It has a meta area. Not used when the core was opened without any.
        meta: bool,
    },
    /// A replica is to leave in order.
    RemoveLeg {
        /// Which.
        leg: LegId,
    },
    /// A snapshot is to be taken: hold changes back, for at most so long. Answered by `SnapshotHeld` or `SnapshotDone`.
    SnapshotBegin {
        /// Its name; never used before.
        id: SnapshotId,
        /// Longest hold.
        hold_ns: Nanos,
    },
    /// These replicas have the snapshot. Answered by `SnapshotDone`.
    SnapshotTaken {
        /// Which.
        id: SnapshotId,
        /// Who has it.
        replicas: BTreeSet<ReplicaId>,
    },
    /// There will be no such snapshot. Nothing happens when the record may name it already.
    SnapshotAbort {
        /// Which.
        id: SnapshotId,
    },
    /// Finish, flush, record a clean close.
    Close,
    /// Time passed (asked for by [`Action::WakeAt`]).
    Tick,
}

/// What the core asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Send an I/O to a leg.
    LegIo {
        /// Which leg.
        leg: LegId,
        /// Number of the I/O, to be given back in `LegDone`.
        io: IoId,
        /// What to do.
        op: Op,
        /// First block.
        lba: u64,
        /// Number of blocks.
        blocks: u32,
        /// Where the data lies.
        payload: Payload,
    },
    /// Read or write a leg's meta area, on the session that carries its data.
    MetaIo {
        /// Which leg.
        leg: LegId,
        /// Number of the I/O, to be given back in `LegDone` or `MetaRead`.
        io: IoId,
        /// What to do.
        op: MetaOp,
    },
    /// Answer the host.
    HostDone {
        /// Which command.
        id: HostId,
        /// How it ended.
        result: HostResult,
    },
    /// Ask the arbiter to replace the record of version `expect` by `next`.
    Swap {
        /// Number of the swap, to be given back in `SwapAnswer`.
        swap: SwapId,
        /// What the record must be now.
        expect: ConfigVersion,
        /// What it becomes.
        next: Box<Config>,
        /// Why.
        reason: SwapReason,
    },
    /// All members are equal, flushed and still: they are to take the snapshot now.
    SnapshotHeld {
        /// Which.
        id: SnapshotId,
        /// Who is to take it.
        members: Vec<ReplicaId>,
    },
    /// How a snapshot ended.
    SnapshotDone {
        /// Which.
        id: SnapshotId,
        /// The version of the tree that has it.
        result: Result<TreeVersion, SnapshotError>,
    },
    /// Send `Tick` at this time. Replaces the previous request.
    WakeAt {
        /// When.
        at: Nanos,
    },
    /// End this connection; do not reconnect by itself.
    LegDrop {
        /// Which.
        leg: LegId,
        /// Why.
        reason: DropReason,
    },
    /// How far a rebuild is.
    Progress {
        /// Which leg.
        leg: LegId,
        /// Blocks copied.
        copied: u64,
        /// Blocks in all.
        total: u64,
    },
    /// Something worth telling.
    Event(Event),
    /// This core answers nothing with success ever again; all host commands were failed with `PathGone`.
    Stopped {
        /// Why.
        reason: StopReason,
    },
    /// Closed in order: everything is flushed, and the record says "clean", or, when regions are still inherited, their
    /// bits say which.
    Closed,
}
