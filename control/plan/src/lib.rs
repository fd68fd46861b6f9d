//! The decisions of the control plane, as pure functions: a snapshot and the time in, actions out.
//!
//! *What it is.* [`plan`] looks at one object in the snapshot ([`observed::Observed`]) and says what its owner has to
//! do now ([`action::Action`]). Nothing here talks to an API server or an agent, knows a clock or draws a random
//! number, so every decision can be tried in a test in microseconds, and made twice it is the same.
//!
//! *Flow.* `ownership` first: a manager acts only on what it owns. Then the kind's own file decides.
//!
//! *Invariants.* Plans look at levels: whatever was missed, the next plan asks for it again. At rest they ask for
//! nothing. No plan ever asks for the removal of data that a volume's record names (consistency rule 22), and none
//! initialises a record while any replica holds data (rule 21).
//!
//! *When things fail.* See the contract of [`action`]: the doer stops at the first failure and plans again.

#![cfg_attr(test, allow(clippy::unwrap_used))]

pub mod action;
pub mod attachment;
pub mod engine;
pub mod evict;
pub mod hash;
pub mod instance_manager;
pub mod node;
pub mod observed;
pub mod ownership;
pub mod related;
mod replenish;
pub mod replica;
pub mod scheduler;
pub mod setting;
pub mod volume;
mod write;

#[cfg(test)]
mod build;
#[cfg(test)]
mod world;

use jiff::Timestamp;

use crate::action::{Action, Key, Kind};
use crate::observed::Observed;
use crate::ownership::Verdict;

/// What this manager is to do for one object now: nothing if another owns it, a claim if it should own it, else what
/// the kind's plan says. The object need not exist: see [`related::bootstrap`].
pub fn plan(observed: &Observed, key: &Key, now: Timestamp) -> Vec<Action> {
    match ownership::verdict(observed, key, now) {
        Verdict::NotMine => Vec::new(),
        Verdict::Claim => ownership::claim(observed, key),
        Verdict::Mine => plan_owned(observed, key, now),
    }
}

fn plan_owned(observed: &Observed, key: &Key, now: Timestamp) -> Vec<Action> {
    let name = key.name.as_str();
    match key.kind {
        Kind::Volume => volume::plan(observed, name, now),
        Kind::VolumeAttachment => attachment::plan(observed, name, now),
        Kind::Engine => engine::plan(observed, name, now),
        Kind::Replica => replica::plan(observed, name, now),
        Kind::Node => node::plan(observed, name, now),
        Kind::InstanceManager => instance_manager::plan(observed, name, now),
        Kind::Setting => setting::plan(observed, name, now),
    }
}
