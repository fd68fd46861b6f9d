//! Rules that the simulated surroundings of the core can break on purpose.
//!
//! *What it is.* `mirror_core::PlantedBug` breaks rules that the core and the opener keep. Other rules are kept by what
//! is around them: replicas, target sessions, the runner, the agents. Their models here can break those, to show that
//! the checks notice it.

/// A rule that a model breaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ModelBug {
    /// The runner takes the payload from the guest's buffer for each leg anew.
    Rule04CaptureAgain,
    /// A replica takes a deallocation for a hint: some blocks keep what they held.
    Rule05UnmapIsAHint,
    /// A replica grants a new session while the disk still works on the old one's I/O.
    Rule13NoDrain,
    /// A replica answers a promote before the epoch is durable: a restart forgets it.
    Rule14EpochForgotten,
    /// The clock of an engine stands still while its machine is suspended.
    Rule16ClockStops,
    /// A restored arbiter serves at once.
    Rule21NoHold,
    /// The recovery reads replicas that an old engine still writes to.
    Rule21ReadUnfenced,
    /// An agent deletes the data of a replica as soon as it is asked to.
    Rule22DeleteAtOnce,
    /// The target still executes what arrives late on a connection that its host has replaced.
    Rule17LateCommands,
}

impl ModelBug {
    /// All of them.
    pub const ALL: &[Self] = &[
        Self::Rule04CaptureAgain,
        Self::Rule05UnmapIsAHint,
        Self::Rule13NoDrain,
        Self::Rule14EpochForgotten,
        Self::Rule16ClockStops,
        Self::Rule17LateCommands,
        Self::Rule21NoHold,
        Self::Rule21ReadUnfenced,
        Self::Rule22DeleteAtOnce,
    ];
}
