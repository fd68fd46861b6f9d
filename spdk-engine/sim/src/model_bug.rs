//! Rules that the simulated surroundings of the core can break on purpose.
//!
//! *What it is.* `mirror_core::PlantedBug` breaks rules that the core and the opener keep. Other rules are kept by what
//! is around them: replicas, target sessions, the runner, the agents. Their models here can break those, to show that
//! the checks notice it.

mirror_core::planted_bugs! {
    /// A rule that a model breaks.
    pub enum ModelBug {
        /// Hosts that may hold acknowledged writes which no copy has are served on.
        Rule01HostsStay,
        /// The runner takes the payload from the guest's buffer for each leg anew.
        Rule04CaptureAgain,
        /// A replica takes a deallocation for a hint: some blocks keep what they held.
        Rule05UnmapIsAHint,
        /// A record that was rebuilt goes on under the old lineage.
        Rule11SameLineage,
        /// A replica grants a new session while the disk still works on the old one's I/O.
        Rule13NoDrain,
        /// A replica answers a promote before the epoch is durable: a restart forgets it.
        Rule14EpochForgotten,
        /// The clock of an engine stands still while its machine is suspended.
        Rule16ClockStops,
        /// An agent takes all older engines for dead when the last owner in the record is.
        Rule16LastOwnerDead,
        /// The target still executes what arrives late on a connection that its host has replaced.
        Rule17LateCommands,
        /// A restored arbiter serves at once.
        Rule21NoHold,
        /// The recovery reads replicas that an old engine still writes to.
        Rule21ReadUnfenced,
        /// An agent deletes the data of a replica as soon as it is asked to.
        Rule22DeleteAtOnce,
        /// Engines have the manager swap for them, which may be away.
        Rule23ManagerSwaps,
    }
}
