//! The on-disk formats of SPDK's blobstore, of the lvolstore on it, and of its RAID superblock.
//!
//! Bytes come in, typed values go out, and the reverse; what is emitted is byte for byte what SPDK writes for the same
//! contents. Nothing here does I/O: the `image` reader and the checker take whatever can read from it by a trait.
//!
//! | Module | Holds |
//! |---|---|
//! | [`superblock`] | the super block of a blobstore |
//! | [`geometry`] | where everything lies on a device, for a new store and for one found |
//! | [`bits`], [`mask`] | bit arrays, and the masks of used pages, clusters and blob ids |
//! | [`page`], [`descriptor`] | metadata pages and the descriptors in them |
//! | [`extent`] | extent tables, extent pages, run-length lists of clusters |
//! | [`metadata`] | one blob's metadata as a whole, parsed from and emitted as a chain of pages |
//! | [`lvs`] | what makes a blobstore an lvolstore: names, UUIDs, parents |
//! | [`repair`] | what becomes of unfinished snapshots |
//! | [`image`], [`read`] | a read-only reader of whole images |
//! | [`check`], [`dump`] | what is wrong in an image, and what it holds |
//! | [`raid`] | the RAID superblock of a member disk |
//!
//! # Invariants
//! * All integers on disk are little-endian. "Page" is a metadata page; its contents are always [`PAGE_SIZE`] bytes,
//!   also where the store's metadata pages are larger (the rest of such a page is meaningless).
//! * No parser panics or allocates more than its input justifies, whatever the bytes are.
//! * A parser that refuses names the field, its value and what is allowed. What SPDK tolerates is tolerated.
//! * Reserved bytes and unknown flags or descriptors are kept, so that writing back loses nothing.
#![warn(missing_docs)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod bytes;

pub mod bits;
pub mod check;
pub mod crc;
pub mod descriptor;
pub mod dump;
pub mod extent;
pub mod geometry;
pub mod id;
pub mod image;
pub mod lvs;
pub mod mask;
pub mod metadata;
pub mod page;
pub mod raid;
pub mod read;
pub mod repair;
pub mod superblock;

pub use bits::Bits;
pub use geometry::Geometry;
pub use id::BlobId;
pub use mask::MaskKind;
pub use metadata::Metadata;
pub use page::{MdPage, PAGE_SIZE};
pub use read::ReadAt;
pub use superblock::SuperBlock;
