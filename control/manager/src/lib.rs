//! The manager of one node: it brings what is seen to what is wanted, for every object that its node owns.
//!
//! ```text
//!            ┌──────────── API server ◀───────────────┐
//!   watches  │                                        │ writes
//!            ▼                                        │
//!        datastore ──wakes──▶ queues ─▶ controllers ─▶ act
//!            ▲  (Observed)                 plan       │ calls
//!   streams  │                                        ▼
//!            └───────────── agents (gRPC) ◀───────────┘
//! ```
//!
//! *Invariants.* Decisions are made by `addax_plan` alone. One place reads into the snapshot (`datastore`), one place
//! writes to the API server (`act`; the lease of the node is the exception, `lease`). A manager acts only while its
//! node's lease holds, and only on what its node owns.
//!
//! *When things fail.* Nothing is given up: watches, streams, renewals and passes are repeated with growing delays.
//!
//! *At rest* there is no write but the renewals of the lease, and no timer but those of renewals, the next lease's end
//! and the probes of connections.

#![cfg_attr(test, allow(clippy::unwrap_used))]

mod act;
mod agents;
mod bootstrap;
mod clock;
mod controllers;
mod datastore;
mod lease;
mod queue;
mod tls;

pub use bootstrap::{Manager, ManagerConfig, ManagerError};
pub use tls::TlsFiles;
