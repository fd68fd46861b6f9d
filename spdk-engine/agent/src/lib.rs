//! The agent of a node.
#![cfg_attr(test, allow(clippy::unwrap_used))]

pub mod error;
pub mod hub;
pub mod replica;
pub mod rpc;
pub mod state;
pub mod supervise;

#[cfg(test)]
pub(crate) mod fake_plane;
