#![allow(clippy::unwrap_used)]
mod chunks;
mod faults;
mod flow;
pub mod host;
