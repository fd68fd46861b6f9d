//! What tests and simulators need to run a store for real on disks that do not exist.
//!
//! | Module | Holds |
//! |---|---|
//! | [`power`] | a disk with a volatile cache whose power can be cut after any operation |
//! | [`image`] | what such a disk holds |
//! | [`exec`] | runs asynchronous code on these disks, step by step, from a seed |
//! | [`model`] | what a store must contain after a list of calls |
//! | [`program`] | random programs of calls, and their shrinking |
//! | [`pattern`] | what is written, so that misplaced blocks can be told |
//! | [`rng`] | the seeded generator behind all of it |
//!
//! Everything is a function of its seed.

pub mod crash;
pub mod device;
pub mod exec;
pub mod gates;
pub mod image;
pub mod ledger;
pub mod model;
pub mod pattern;
pub mod power;
pub mod program;
pub mod rng;
pub mod world;

pub use exec::{Exec, Spawner, Stuck};
pub use image::{Fill, Image};
pub use model::{Call, Model, VolId};
pub use power::{DiskFailure, DiskOp, PowerDisk, PowerOptions, Tear, Unmapped};
pub use program::{Kind, Op, Shape};
pub use rng::Rng;
