//! The agent of a node: instance manager of replicas and engines, owner of the node's data-plane process.
//!
//! *What it is.* A gRPC server (`addax.engine.v1`) above, one JSON-RPC socket below. [`Agent::run`] is the whole of it:
//!
//! ```text
//!  managers, other agents ──gRPC, mTLS──▶ server ─▶ replica ─┐
//!                                             └──▶ engine ───┤──▶ rpc ──Unix socket──▶ addax-engine or spdk_tgt
//!  Kubernetes API ◀── arbiter (read, CAS) ──────────┘        │        ▲
//!                                     state (files) ◀────────┘   supervise (start, watch, restart, adopt)
//! ```
//! | Module | Holds |
//! |---|---|
//! | [`supervise`] | the data-plane process: started, watched, restarted, adopted |
//! | [`rpc`] | the JSON-RPC client, typed |
//! | [`state`] | disks, replicas' durable state, the engines to hold |
//! | [`disk`] | disks: lvstores opened, made, imported |
//! | [`replica`] | replicas: export, promote (rules 13 and 14) |
//! | [`engine`] | volumes: open, swaps, rebuilds, close (rules 6, 7, 15 and 23) |
//! | [`arbiter`] | the record at the Kubernetes API |
//! | [`hub`], [`server`] | what is there and what changed; the gRPC services |
//!
//! *Invariants.*
//! - The data plane outlives the agent: neither the agent's end nor its restart disturbs I/O.
//! - Everything asked for is durable before it is answered, and put back after a restart of either process.
//! - On a stock `spdk_tgt` replicas work by the same rules; engines are its `raid1`, as best effort.
//! - One owner task per replica and per engine; no lock is held across an await; every wait has a deadline.
//!
//! *When things fail.* A data plane that dies is started again and given its replicas with nobody on their allow-lists;
//! its engines are opened again with a new epoch, unless another node has taken them over. An arbiter that is away
//! stops acknowledgements that need it, and nothing else.

#![cfg_attr(test, allow(clippy::unwrap_used))]

pub mod arbiter;
pub mod disk;
pub mod engine;
pub mod error;
pub mod hub;
pub mod machine;
pub mod replica;
pub mod rpc;
pub mod server;
pub mod state;
pub mod supervise;
pub mod tls;

#[cfg(test)]
pub(crate) mod fake_plane;
mod run;

pub use machine::Machine;
pub use run::{Agent, AgentConfig, DataPlaneConfig, RunError};
pub use supervise::stop_data_plane;
