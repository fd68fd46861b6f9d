//! Addax's data plane: reactors, block devices, NVMe/TCP target and initiator, mirror, and SPDK's JSON-RPC.
//!
//! | Module | Job |
//! |---|---|
//! | [`reactor`] | one loop per core; seams for clock, disk, net |
//! | [`bdev`] | the block device trait and the simple devices |
//! | [`raid`], [`mirror`] | SPDK's raid1; the replicated volume |
//! | [`nvme`], [`nvmf`] | NVMe/TCP initiator and target |
//! | [`keyring`] | names for key files |
//! | [`rpc`], [`events`] | JSON-RPC socket, methods, events for agents |
//! | [`app`], [`start`] | what modules share; start and stop of the process |
//!
//! Control state (registry, targets, admin queues, RPC) lives on core 0, the control core; I/O queues live on data cores.

#![cfg_attr(test, allow(clippy::unwrap_used))]

pub mod app;
pub mod bdev;
pub mod cpus;
pub mod events;
pub mod keyring;
pub mod mirror;
pub mod nvme;
pub mod nvmf;
pub mod raid;
pub mod reactor;
pub mod rpc;
pub mod start;
#[cfg(test)]
pub mod testing;
