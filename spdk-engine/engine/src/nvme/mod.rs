//! NVMe/TCP initiator: namespaces of other targets as block devices (`bdev_nvme`).
//!
//! | Module | Job | Core |
//! |---|---|---|
//! | [`host`] | the initiator proper: connections, controllers, queues | any |
//! | [`ctrl`], [`scan`] | an attached controller, its sessions and its namespaces | control |
//! | [`queue`], [`task`] | its I/O queue on a core, and the I/O on it | data |
//! | [`device`], [`shared`] | the block device; what all cores know of a controller | both |
//! | [`options`], [`rpc`] | options, `bdev_nvme_*` methods, saved configuration | control |
//!
//! *Invariants.* I/O of a session that was lost is either replayed on the next, after the old connection was closed, or
//! completed with a path error, as the attach decided; never both, and never is it forgotten. Every command has a
//! deadline.
//!
//! *When things fail.* See [`ctrl`] for lost controllers and [`host::connection`] for broken connections.

pub mod ctrl;
pub mod device;
pub mod host;
pub mod options;
pub mod queue;
pub mod rpc;
pub mod scan;
pub mod shared;
pub mod task;
#[cfg(test)]
mod tests;

use crate::rpc::Methods;

/// Adds this module's methods.
pub fn register(methods: &mut Methods) {
    rpc::register(methods);
}
