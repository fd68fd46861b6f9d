//! The crash table, row by row, and what each rule prevents ("else"), on real processes: kill -9, SIGSTOP, networks that
//! swallow packets, an arbiter whose answers are late, a disk that hangs. Which test shows what, and what processes cannot
//! show, is the table in `docs/CONSISTENCY.md`.
//!
//! *How.* All tests share one cluster of three nodes, each in a network namespace. Every test has a volume of its own under
//! a load that judges what it reads ([`scene`]). A test that fails takes the cluster with it; the next one makes another.
//!
//! *Asserted in all of them.* The host sees a pause and no error; no block is lost, stale or torn, while things go wrong and
//! at the end; in the end all copies are in sync, and equal byte by byte on their disks.

#![allow(clippy::unwrap_used)]

mod arbiter;
mod disks;
mod engines;
mod hosts;
mod members;
mod scene;
