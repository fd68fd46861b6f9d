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
pub mod hash;
pub mod observed;
pub mod ownership;
mod write;
