//! A data plane as a process beside this one: its JSON-RPC socket, its life, and what the kernel says of it.
//!
//! | Module | Job |
//! |---|---|
//! | [`rpc`] | calls over the Unix socket, blocking, with a deadline |
//! | [`process`] | start, stop, freeze; never outlives its handle |
//! | [`procfs`] | memory and processor time of a process |
//!
//! Addax's engine and a stock SPDK target are driven by the same code: that they can be is the point of comparing them.

pub mod process;
pub mod procfs;
pub mod rpc;
