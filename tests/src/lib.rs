//! End-to-end tests: what they share.
//!
//! The tests themselves are under `tests/`. `setup.sh` beside this crate's manifest installs the programs they
//! need.

pub mod chaos;
pub mod cluster;
pub mod disk_image;
pub mod door;
pub mod engine;
pub mod guest;
pub mod kube;
pub mod kubectl;
pub mod load;
pub mod lvol_plane;
pub mod netns;
pub mod nvme_tcp;
pub mod pauses;
pub mod programs;
pub mod python;
pub mod spdk;
pub mod verify;
