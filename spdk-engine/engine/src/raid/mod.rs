//! `raid1` as SPDK's: mirrored devices with superblocks, members that come, go and fail, rebuilds.
//!
//! | Module | Job |
//! |---|---|
//! | [`array`] | what a raid consists of and what follows from a superblock: decisions without I/O |
//! | [`control`] | one raid on the control core: claims, sequences, what they publish |
//! | [`examine`] | finding the raid that a device belongs to |
//! | [`rebuild`] | rebuilding a member, correcting unreadable blocks |
//! | [`shared`] | what every core knows |
//! | [`core_raid`], `core_io` | the raid on one core; its I/O |
//! | [`device`], [`io`] | the block device; superblocks on members |
//! | [`rpc`] | the methods `bdev_raid_*` |
//!
//! *States.* `configuring` until every expected member is there, then `online`; `offline` does not last, the raid goes.
//!
//! This device is for compatibility with disks and configurations of SPDK; volumes are [`crate::mirror`]. Where SPDK
//! loses data it differs, and only there: a write that a member has failed is answered after the superblocks say so; the
//! last whole member is not given up for an I/O error; blocks are corrected under a hold; superblocks are flushed.

pub mod array;
pub mod control;
mod core_io;
pub mod core_raid;
pub mod device;
pub mod examine;
pub mod io;
pub mod rebuild;
pub mod rpc;
pub mod shared;
#[cfg(test)]
mod tests;

pub use rpc::{driver_specific, register};
