//! The project's gRPC interfaces, generated at build time from the `.proto` files beside this crate.
//!
//! `addax.engine.v1` is what managers and other agents ask of a node's agent; the file itself is the contract.

/// `addax.engine.v1`: disks, replicas, engines and their state changes on one node.
#[allow(missing_debug_implementations, clippy::all)]
pub mod engine_v1 {
    tonic::include_proto!("addax.engine.v1");
}
