//! Logical volumes on SPDK's blobstore format.
//!
//! A [`Store`] is an lvolstore on one [`Device`]; its [`Lvol`]s are thin or thick volumes, snapshots and clones. What is
//! on disk is exactly what SPDK writes, so that a disk moves freely between the two. This crate knows nothing of the
//! engine: a device is a trait, what must not run beside I/O is bracketed by [`Hooks`], and the cluster map of a volume
//! is shared with data cores through [`Map`].
//!
//! | Module | Holds |
//! |---|---|
//! | [`device`] | the seam to whatever holds the bytes; [`memory`] is one for tests |
//! | [`hooks`] | what the engine does when I/O must pause |
//! | [`map`] | cluster maps that other cores read without locks |
//! | [`store`] | the store: format, load, unload, grow, names |
//! | [`lvol`] | one volume: data path and operations |
//! | [`types`] | options and reports |
//! | [`error`] | errors and the errno SPDK answers in each case |
//!
//! # Invariants
//! * A store lives on one thread. Every method is `async`, driven by whatever executor polls it; nothing is spawned, no
//!   clock is read and no random number drawn, so the same calls on the same device give the same bytes.
//! * A future returned here must be driven to its end. One that is dropped half-way leaves the store in memory behind
//!   what is on disk, as a crash would; the store then has to be loaded anew.
//! * After any crash, power loss included, the store opens, every volume is as before or after the operation in flight,
//!   and nothing leaks. [`crash`] says for each operation why.
#![warn(missing_docs)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod alloc;
mod blob;
mod load;
mod ops;
mod sync;
#[cfg(test)]
mod tests;

pub mod crash;
pub mod device;
pub mod error;
pub mod hooks;
pub mod lvol;
pub mod map;
pub mod memory;
pub mod planted;
pub mod store;
#[cfg(feature = "testing")]
pub mod testing;
pub mod types;

pub use device::{Device, DeviceError, LocalFuture};
pub use error::Error;
pub use hooks::{Hooks, NoHooks};
pub use lvol::Lvol;
pub use map::{Map, MapView, Place};
pub use memory::MemoryDevice;
pub use store::Store;
pub use types::*;
