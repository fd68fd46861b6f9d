//! The mirror core: one writer engine, N replicas, as a state machine without I/O, threads or clock.
//!
//! *What it is.* [`Core`] takes [`Input`]s (host commands, completions, connection changes, arbiter answers, time)
//! and appends [`Action`]s. [`Opener`] does the same for the way from the arbiter's record to a running core. The
//! engine's device runs them on a reactor, the simulator on simulated disks and networks; it is the same code.
//!
//! *Flow of a write.*
//! ```text
//! Host ─▶ range lock (rule 2) ─▶ bits durable (rule 18) ─▶ LegIo to every member and joiner ─▶ all have it? ─▶ HostDone
//!                                          │ one failed                                            ▲ rule 6: only now
//!                                          └─▶ Swap: S without it ─▶ Committed ─▶ superblocks of the survivors
//! ```
//! *Flow of a read.* Range lock, shared with other reads (rule 3: it waits for overlapping writes until they are
//! acknowledged, and they for it) ─▶ one member of `S` ─▶ another one if the first cannot ─▶ `HostDone`.
//!
//! A read is answered only while every member has confirmed within the lease that no newer engine exists ([`lease`]).
//!
//! *Flow of a rebuild.* `AddLeg` ─▶ swap into `R` ─▶ every write goes to the joiner too and its answer is required ─▶
//! its meta area is read, regions that differ are copied under a range lock ─▶ flush, stamps, bits, superblock ─▶ swap into
//! `S` ─▶ member.
//!
//! *After a crash.* Bits of all members ─▶ inherited regions ─▶ each is made equal before it is touched, the rest in the
//! background ─▶ it goes on as a live region ─▶ flushed and cleared when idle.
//!
//! *A snapshot.* Changes are held ─▶ drained and flushed ─▶ the runner has every member take it ─▶ members without it leave
//! ─▶ swap: the record names it ─▶ changes go on ([`snapshot`]).
//!
//! *Invariants.*
//! 1. A host command gets exactly one `HostDone`.
//! 2. A write is acknowledged only when every leg in `S` of the record *and* of any record that may yet be committed
//!    has it (see [`gate`]).
//! 3. Reads and copies come from members of `S` only, never from one that failed a write or is being made equal.
//! 4. `S` never becomes empty and never falls below `minInSync`; acknowledgements freeze instead.
//! 5. After [`Action::Stopped`] nothing is answered with success any more.
//!
//! *When things fail.*
//! - *A connection is lost*: I/O is kept and sent again at `LegBack`; after the grace window the member leaves. When
//!   all members are lost, nobody leaves (rule 12: the engine is the suspect). When most but not all are lost, the
//!   longer window counts: an engine that still reaches the arbiter must in the end be able to go on with the rest.
//! - *A write fails on some members* (media): they leave by a swap and the write is acknowledged after it. *It fails
//!   on all, or any member has no space*: the host gets the error, after the range was read from one member and
//!   written to all others, so that later reads are stable whichever member serves them. The lock is held meanwhile.
//!   A member that cannot take that either leaves. Lack of space alone ejects nobody.
//! - *A read fails*: another member is asked; the host gets the error when none can deliver.
//! - *A swap's outcome is unknown*: acknowledgements that depend on it wait; the same swap is sent until settled.
//! - *A replica says "fenced"*, or the arbiter shows another epoch, instance or lineage: [`Action::Stopped`].
//! - *Strict mode cannot shrink*: frozen. A lost member may still come back at any time; a new replica can be added
//!   and joins although writes are frozen (their ranges are *settled*, see [`overlap`]).

#![cfg_attr(test, allow(clippy::unwrap_used))]
#![forbid(unsafe_code)]

mod close;
pub mod config;
mod core;
mod crowd;
pub mod events;
pub mod force;
mod gate;
mod host;
mod lease;
mod legmeta;
mod legs;
mod legstamps;
mod marks;
mod membership;
pub mod meta;
mod open;
pub mod opener;
pub mod overlap;
mod params;
mod quick;
mod quiet;
mod rebuild;
pub mod recover;
mod regions;
mod repair;
mod snapshot;
mod stamps;
mod status;
mod suspicion;
mod wib;

pub use crate::config::{
    Config, ConfigError, ConfigNumber, ConfigVersion, EngineInstance, Epoch, LastSnapshot, Lineage, ReplicaId,
    SnapshotId, Tree, TreeVersion, VolumeId,
};
pub use crate::core::Core;
pub use crate::events::{
    Action, CopySlot, DropReason, Event, HostError, HostId, HostResult, Input, IoId, LegError, LegId, MetaOp, Nanos,
    Op, Payload, SnapshotError, StopReason, SwapId, SwapOutcome, SwapReason,
};
pub use crate::open::CoreError;
pub use crate::opener::{
    MetaUnreadable, OpenAction, OpenError, OpenEvent, OpenInput, OpenWaits, Opener, OpenerParams, PromoteError,
    RaisedInVain, RecordError, ReplicaFacts,
};
pub use crate::params::{LegInit, MetaInit, OpenParams, Options};
pub use crate::quick::{Answered, Sent};
pub use crate::status::{Rebuild, Status};

/// Most legs of one mirror. Volumes have 2 or 3 replicas; a few more while replicas are moved.
pub const LEGS_MAX: usize = 16;

/// An enumeration of rules that can be broken on purpose, with the list of all of them. Not behind the feature: the
/// models around the core break rules of their own without it.
#[macro_export]
macro_rules! planted_bugs {
    ($(#[$doc:meta])* pub enum $name:ident { $($(#[$what:meta])* $bug:ident,)* }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum $name { $($(#[$what])* $bug,)* }

        impl $name {
            /// All of them.
            pub const ALL: &[Self] = &[$(Self::$bug,)*];
        }
    };
}

#[cfg(feature = "planted-bugs")]
planted_bugs! {
/// Rules that can be broken on purpose, to show that the simulator notices.
pub enum PlantedBug {
    /// A write is acknowledged when one member has it.
    Rule01AckFirst,
    /// A member that may have lost acknowledged writes is a source like any other when the volume is opened.
    Rule01AnySource,
    /// A member that comes back without what it had not flushed stays.
    Rule01CacheLossIgnored,
    /// Overlapping writes run at the same time.
    Rule02NoOverlapOrder,
    /// Reads do not wait for unacknowledged writes, nor writes for reads.
    Rule03ReadsDoNotWait,
    /// Acknowledgements do not wait for the swap that removes a failed member.
    Rule06AckBeforeSwap,
    /// Strict mode lets members leave although too few would stay.
    Rule06StrictShrinks,
    /// A last member whose meta area fails acknowledges without carrying the record.
    Rule06BrokenNeedNotCarry,
    /// A swap of unknown outcome is taken for committed.
    Rule07AssumeCommitted,
    /// `k` stays as it is when a set changes.
    Rule08SameNumber,
    /// Stamps are configuration numbers: two engines may give the same one, and a joiner that leaves does not raise it.
    Rule08StampsByNumber,
    /// A joiner does not take over its source's bits.
    Rule09JoinWithoutBits,
    /// A joiner does not take over its source's stamps.
    Rule09JoinWithoutStamps,
    /// Regions that may differ keep their stamps when the record changes.
    Rule09DirtyNotStamped,
    /// A joiner gets no writes before it is a member.
    Rule10JoinWithoutMirroring,
    /// An engine that lost all members ejects all but one.
    Rule12EjectAlthoughSuspect,
    /// Each loss is judged by itself, so that one after the other takes `S` down.
    Rule12OneByOne,
    /// "Fenced" is taken for success.
    Rule13FencedCountsAsDone,
    /// Members that were not promoted stay in `S` when the volume is opened.
    Rule15OpenKeepsUnpromoted,
    /// Reads are answered without any confirmation of the members.
    Rule16NoReadGate,
    /// The new engine does not wait until the old one's lease is over.
    Rule16NoWait,
    /// Data goes out before the bit of its region is durable.
    Rule18DataBeforeBits,
    /// Inherited regions are read without being made equal.
    Rule18ReadInherited,
    /// Live bits clear without a flush.
    Rule18ClearBeforeFlush,
    /// A live bit clears though a write to its region began since the flush did.
    Rule18ClearThoughWritten,
    /// A snapshot is taken while regions are inherited.
    Rule19SnapshotWhileInherited,
    /// Hosts write while a snapshot is taken.
    Rule19SnapshotUnderWrites,
    /// Members are not flushed before a snapshot.
    Rule19SnapshotUnflushed,
    /// A member that did not take a snapshot stays in `S`.
    Rule19MissedStays,
}
}
