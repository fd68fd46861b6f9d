//! Rules that can be broken on purpose, to show that the checker notices.
//!
//! Where `mirror_core::PlantedBug` has the same notion the name is the same. The others are readings of a rule that
//! look right and are not; for each the checker shows a way to lose a write or to read a stale one.

/// A rule broken on purpose.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Bug {
    /// A write is acknowledged when one member has it.
    Rule01AckFirst,
    /// Reads do not wait for unacknowledged writes.
    Rule03ReadsDoNotWait,
    /// Acknowledgements do not wait for the swap that removes a failed member.
    Rule06AckBeforeSwap,
    /// `S` may fall below `minInSync`.
    Rule06StrictShrinks,
    /// A swap of unknown outcome is taken for committed.
    Rule07AssumeCommitted,
    /// After a swap of unknown outcome the record is read, and what it shows is taken for the outcome.
    Rule07RereadProves,
    /// `k` stays when the sets change.
    Rule08SameNumber,
    /// A joiner takes over no write-intent bit before the swap that adds it.
    Rule09JoinWithoutBits,
    /// A joiner gets no writes before it is a member.
    Rule10JoinWithoutMirroring,
    /// A joiner gets writes, but its answer is not required before the swap that adds it is known to be committed.
    Rule10AnswerNotRequired,
    /// "Fenced" is taken for success.
    Rule13FencedCountsAsDone,
    /// A new session does not wait for the I/O of the older one.
    Rule13NoDrain,
    /// A replica forgets the epoch it was promoted to when it restarts.
    Rule14EpochForgotten,
    /// Members that were not promoted stay in `S` when the volume is opened.
    Rule15OpenKeepsUnpromoted,
    /// A replica of `R` counts as a member when the volume is opened.
    Rule15OpenTakesRebuilding,
    /// Write-intent bits are read before the promote.
    Rule15BitsBeforePromote,
    /// An engine reads without asking whether its members confirmed it lately.
    Rule16NoReadGate,
    /// An engine that could not promote all members starts without waiting.
    Rule16NoWait,
    /// An engine that could not promote all members swaps them out at once and waits only then: when it dies while it
    /// waits, the next one finds a record whose members it can all promote, and does not wait.
    Rule16WaitAfterSwap,
    /// The lease counts members of the committed `S` alone, not those that a swap under way would add.
    Rule16LeaseOnCommittedSet,
    /// Only the record's last owner is proved dead, and older engines are forgotten.
    Rule16LastOwnerDead,
    /// Regions that may differ are read as they are.
    Rule18ReadInherited,
    /// Data goes out before the write-intent bit is durable on all of `S`.
    Rule18DataBeforeBits,
    /// A write-intent bit is cleared although a write is under way.
    Rule18ClearThoughWritten,
}

impl Bug {
    /// All of them.
    pub const ALL: [Self; 24] = [
        Self::Rule01AckFirst,
        Self::Rule03ReadsDoNotWait,
        Self::Rule06AckBeforeSwap,
        Self::Rule06StrictShrinks,
        Self::Rule07AssumeCommitted,
        Self::Rule07RereadProves,
        Self::Rule08SameNumber,
        Self::Rule09JoinWithoutBits,
        Self::Rule10JoinWithoutMirroring,
        Self::Rule10AnswerNotRequired,
        Self::Rule13FencedCountsAsDone,
        Self::Rule13NoDrain,
        Self::Rule14EpochForgotten,
        Self::Rule15OpenKeepsUnpromoted,
        Self::Rule15OpenTakesRebuilding,
        Self::Rule15BitsBeforePromote,
        Self::Rule16NoReadGate,
        Self::Rule16NoWait,
        Self::Rule16WaitAfterSwap,
        Self::Rule16LeaseOnCommittedSet,
        Self::Rule16LastOwnerDead,
        Self::Rule18ReadInherited,
        Self::Rule18DataBeforeBits,
        Self::Rule18ClearThoughWritten,
    ];
}
