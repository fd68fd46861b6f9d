//! `addax-perf`: load and verification for NVMe/TCP namespaces, with the initiator that volumes use.
//!
//! | Module | Job |
//! |---|---|
//! | [`cli`], [`units`] | command line; sizes, times, processors |
//! | [`access`] | which block comes next: sequential, random, mixed |
//! | [`session`] | one host association: connect, reconnect, retry what was in flight |
//! | [`worker`] | keeps a queue depth of I/O running on one core; latencies, pauses |
//! | [`load`] | the workload that only measures |
//! | [`verify`] | the workload that judges |
//! | [`run`], [`progress`] | puts them together on the engine's reactors |
//! | [`report`] | results as tables and JSON |
//! | [`bench`] | races of data planes over a matrix of cells, and their comparison |
//! | [`plane`], [`wirehost`] | a data plane as a process; a small host for what load is not |
//!
//! Exit codes: 0 all right, 1 mismatch, 2 usage, 3 I/O error or no connection.

#![cfg_attr(test, allow(clippy::unwrap_used))]

pub mod access;
pub mod bench;
pub mod cli;
pub mod load;
pub mod pace;
pub mod plane;
pub mod progress;
pub mod report;
pub mod run;
pub mod session;
pub mod units;
pub mod verify;
pub mod wirehost;
pub mod worker;
