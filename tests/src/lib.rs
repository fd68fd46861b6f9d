//! End-to-end tests: what they share.
//!
//! The tests themselves are under `tests/`. `setup.sh` beside this crate's manifest installs the programs they
//! need.

pub mod guest;
pub mod spdk;
