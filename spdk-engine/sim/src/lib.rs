//! A seeded, deterministic simulator around the mirror core and its opener.
//!
//! *What it is.* Two engines, three replicas with disks and sessions, one arbiter, a network that delays, loses and
//! cuts, hosts that write unique values and retry, one that goes on reading from an engine that was replaced, and a
//! manager that opens the volume elsewhere when it doubts the engine. The engines run `mirror_core::Core` and
//! `mirror_core::Opener`: the very code of the product. One seed is one run; the same seed gives the same run.
//!
//! *What is checked.*
//! - Each block is linearisable: no acknowledged write lost, no stale read, no read that flips back ([`history`]).
//! - Every record that the arbiter accepts is a lawful successor: `S` never empty nor below its minimum, `k` rises,
//!   the epoch never falls.
//! - A replica outside the recorded `S` is never read from by the engine that owns the epoch.
//! - An engine that reaches no replica ejects none.
//! - A replica never admits an epoch below one that it admitted before.
//! - An engine that was replaced acknowledges nothing that was given to it afterwards.
//! - Data of a write is sent only when the write-intent bits of its regions are set on the disks of all recorded
//!   members (rules 9 and 18), a bit is cleared only when all of them have flushed the region, and only regions that
//!   were found set are made equal.
//! - A rebuild copies only regions that may have changed since the replica left ([`delta`]).
//! - Nothing is acknowledged by a record that the members' superblocks do not carry (rule 6).
//! - A record that was rebuilt has a lineage of its own (rule 11).
//! - What an engine asks of the arbiter waits for nobody else, whether the manager is there or not (rule 23).
//! - Hosts are made to detach only when every member may have lost its cache (rule 1).
//! - When faults end, everything goes on: all commands are answered, all replicas rebuilt and byte-equal, the close
//!   is recorded as clean.
//! - A snapshot that the record names is the same on all members, and a moment of the history (rule 19).
//!
//! *What is not simulated yet.* Deleting and reverting snapshots, resizing, forced opens, bit rot.
//!
//! *When a run fails* it says why, with the seed; [`shrink`] then looks for a run with fewer faults and commands
//! that fails too.

#![cfg_attr(test, allow(clippy::unwrap_used))]
#![forbid(unsafe_code)]

mod arbiter;
mod client;
mod delta;
mod disk;
mod engine;
mod faults;
pub mod history;
mod manager;
mod meta;
mod model_bug;
mod replica;
mod rng;
mod shrink;
mod snapshot;
mod suspicion;
mod world;

pub use faults::{Fault, FaultKind};
pub use model_bug::ModelBug;
pub use shrink::{Shrunk, shrink};
pub use world::{Outcome, Scenario, run};
