//! Memory for the data path: hugepages where the host has them, plain pages where it does not.
//!
//! | Module | Job |
//! |---|---|
//! | [`map`] | one anonymous mapping ([`Region`]), huge or plain, on a NUMA node when asked |
//! | [`pool`] | [`BufPool`]: fixed-size, 4096-aligned I/O buffers carved from one region |
//! | [`buf`] | [`Buf`] and [`BufSlice`]: the reference-counted handles, and the aliasing contract |
//! | [`Intake`] | a receive buffer whose filled parts are handed on without copying |
//! | [`reserve`] | reserve and release hugepages per NUMA node, and remember which are ours |
//! | [`sysfs`] | the kernel's hugepage pools, behind a seam |
//! | [`status`] | what each node has, what is free, what is ours |
//!
//! Nothing here needs hugepages to run: a missing page costs one warning and some speed, never a start-up.
//! `unsafe` stays in the modules that open with `#![allow(unsafe_code)]`, and each block says why it is sound.

#![cfg_attr(test, allow(clippy::unwrap_used))]

pub mod buf;
mod free_list;
mod intake;
mod ledger;
pub mod map;
mod memory;
mod page_size;
pub mod pool;
pub mod reserve;
pub mod status;
mod sys;
pub mod sysfs;

pub use buf::{Buf, BufSlice};
pub use intake::Intake;
pub use ledger::LedgerError;
pub use map::{Hugepages, MapError, MapPolicy, Region, RegionKind};
pub use memory::Memory;
pub use page_size::{PageSize, ParsePageSizeError};
pub use pool::{BufPool, ClassConfig, ClassStats, PoolConfig, PoolError, PoolStats, TakeError};
pub use reserve::{ReserveError, Reserver};
pub use status::{PoolStatus, Status};
pub use sysfs::{Counts, KernelPages, PoolId, Sysfs, SysfsError};

/// Alignment in bytes of every buffer: what `O_DIRECT` asks for on every disk in use.
pub const BUFFER_ALIGN: usize = 4096;
