//! The store as a whole, on disks whose power can be cut.
//!
//! By default a share of it runs, in less than a minute; `LVOL_TESTS=full` (`make lvol-crash`) runs all of it.
//! `LVOL_SEEDS=17` or `LVOL_SEEDS=0..100` chooses the programs.
#![allow(clippy::unwrap_used)]

mod crash;
mod golden;
mod holes;
mod planted;
mod property;
mod scale;
mod space;
mod support;
