//! The embedded API server.
#![cfg_attr(test, allow(clippy::unwrap_used))]

pub mod store;
