//! The target on real reactors and real sockets, driven by a small host and by its RPC methods.
#![allow(clippy::unwrap_used)]
mod admin;
mod engine;
mod fences;
mod host;
mod io;
