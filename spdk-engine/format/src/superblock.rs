//! The super block: the first 4096 bytes of a blobstore's device.
//!
//! Parsing checks what SPDK checks before it looks further: signature, version, CRC. Whether the numbers make a store
//! that fits the device is the matter of [`Geometry::of`](crate::Geometry::of). Reserved bytes are kept.

use std::fmt;

use thiserror::Error;

use crate::bytes::{array, put, u32_at, u64_at};
use crate::{BlobId, crc};

/// Bytes of a super block.
pub const SIZE: usize = 4096;
/// The first eight bytes.
pub const SIGNATURE: [u8; 8] = *b"SPDKBLOB";
/// The version that is written.
pub const VERSION: u32 = 3;
/// The oldest version that is read.
pub const OLDEST_VERSION: u32 = 1;
const RESERVED: usize = 96;
const CRC: usize = 4092;

/// Why bytes are not a super block.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum SuperError {
    /// Fewer bytes than a super block has.
    #[error("the super block is {0} bytes long; {SIZE} are needed")]
    Short(usize),
    /// Not a blobstore.
    #[error("the signature is {:?}; a blobstore has \"SPDKBLOB\"", String::from_utf8_lossy(.0))]
    Signature([u8; 8]),
    /// Made by a blobstore that is not known here.
    #[error("the super block's version is {0}; {OLDEST_VERSION} to {VERSION} are known")]
    Version(u32),
    /// Damaged.
    #[error("the super block's CRC is {stored:#010x}; its contents have {computed:#010x}")]
    Crc {
        /// As recorded.
        stored: u32,
        /// As the contents have it.
        computed: u32,
    },
}

/// A run of metadata pages, counted from the start of the device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Region {
    /// First page.
    pub start: u32,
    /// Number of pages.
    pub len: u32,
}

impl Region {
    /// The page after the last.
    pub fn end(self) -> u64 {
        u64::from(self.start) + u64::from(self.len)
    }
}

/// What a blobstore is used for: text of up to 16 bytes, padded with NUL.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct BsType(pub [u8; 16]);

impl BsType {
    /// The type of an lvolstore.
    pub const LVOLSTORE: Self = Self(*b"LVOLSTORE\0\0\0\0\0\0\0");

    /// The text up to the first NUL.
    pub fn text(&self) -> String {
        let len = self.0.iter().position(|b| *b == 0).unwrap_or(self.0.len());
        String::from_utf8_lossy(&self.0[..len]).into_owned()
    }
}

impl fmt::Debug for BsType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.text())
    }
}

/// The super block's fields, with zeroes kept where an old store has them (see [`Geometry`](crate::Geometry) for their
/// meaning).
#[derive(Clone, PartialEq, Eq)]
pub struct SuperBlock {
    /// Format version, [`OLDEST_VERSION`] to [`VERSION`].
    pub version: u32,
    /// Bytes of the super block; 4096. Not checked by readers.
    pub length: u32,
    /// 1 after an orderly unload, 0 while a store is in use or after a crash.
    pub clean: u32,
    /// The blob that describes the store; [`BlobId::INVALID`] for none.
    pub super_blob: BlobId,
    /// Bytes of a cluster.
    pub cluster_size: u32,
    /// Where the mask of used metadata pages lies.
    pub used_page_mask: Region,
    /// Where the mask of used clusters lies.
    pub used_cluster_mask: Region,
    /// First page of the metadata region.
    pub md_start: u32,
    /// Pages of the metadata region.
    pub md_len: u32,
    /// What the blobstore is used for.
    pub bstype: BsType,
    /// Where the mask of used blob ids lies; length 0 in old stores, which are then recovered on every load.
    pub used_blobid_mask: Region,
    /// Bytes of the device; 0 (old) means all of it.
    pub size: u64,
    /// Bytes of the smallest I/O; 0 (old) means 4096.
    pub io_unit_size: u32,
    /// Bytes of a metadata page; 0 (old) means 4096.
    pub md_page_size: u32,
    reserved: Box<[u8; CRC - RESERVED]>,
}

impl SuperBlock {
    /// A super block of the version written today, not clean, without super blob, with all sizes and places zero.
    pub fn new(bstype: BsType) -> Self {
        Self {
            version: VERSION,
            length: SIZE as u32,
            clean: 0,
            super_blob: BlobId::INVALID,
            cluster_size: 0,
            used_page_mask: Region::default(),
            used_cluster_mask: Region::default(),
            md_start: 0,
            md_len: 0,
            bstype,
            used_blobid_mask: Region::default(),
            size: 0,
            io_unit_size: 0,
            md_page_size: 0,
            reserved: Box::new([0; CRC - RESERVED]),
        }
    }

    /// The super block in the first 4096 of `bytes`.
    pub fn parse(bytes: &[u8]) -> Result<Self, SuperError> {
        let Some(bytes) = bytes.get(..SIZE) else { return Err(SuperError::Short(bytes.len())) };
        if bytes[..8] != SIGNATURE {
            return Err(SuperError::Signature(array(bytes, 0)));
        }
        let version = u32_at(bytes, 8);
        if !(OLDEST_VERSION..=VERSION).contains(&version) {
            return Err(SuperError::Version(version));
        }
        let (stored, computed) = (u32_at(bytes, CRC), crc::blobstore(&bytes[..CRC]));
        if stored != computed {
            return Err(SuperError::Crc { stored, computed });
        }
        let region = |at| Region { start: u32_at(bytes, at), len: u32_at(bytes, at + 4) };
        Ok(Self {
            version,
            length: u32_at(bytes, 12),
            clean: u32_at(bytes, 16),
            super_blob: BlobId(u64_at(bytes, 20)),
            cluster_size: u32_at(bytes, 28),
            used_page_mask: region(32),
            used_cluster_mask: region(40),
            md_start: u32_at(bytes, 48),
            md_len: u32_at(bytes, 52),
            bstype: BsType(array(bytes, 56)),
            used_blobid_mask: region(72),
            size: u64_at(bytes, 80),
            io_unit_size: u32_at(bytes, 88),
            md_page_size: u32_at(bytes, 92),
            reserved: Box::new(array(bytes, RESERVED)),
        })
    }

    /// The bytes on disk, with their CRC.
    pub fn emit(&self) -> Vec<u8> {
        let mut out = vec![0; SIZE];
        put(&mut out, 0, &SIGNATURE);
        put(&mut out, 8, &self.version.to_le_bytes());
        put(&mut out, 12, &self.length.to_le_bytes());
        put(&mut out, 16, &self.clean.to_le_bytes());
        put(&mut out, 20, &self.super_blob.0.to_le_bytes());
        put(&mut out, 28, &self.cluster_size.to_le_bytes());
        for (at, region) in [(32, self.used_page_mask), (40, self.used_cluster_mask), (72, self.used_blobid_mask)] {
            put(&mut out, at, &region.start.to_le_bytes());
            put(&mut out, at + 4, &region.len.to_le_bytes());
        }
        put(&mut out, 48, &self.md_start.to_le_bytes());
        put(&mut out, 52, &self.md_len.to_le_bytes());
        put(&mut out, 56, &self.bstype.0);
        put(&mut out, 80, &self.size.to_le_bytes());
        put(&mut out, 88, &self.io_unit_size.to_le_bytes());
        put(&mut out, 92, &self.md_page_size.to_le_bytes());
        put(&mut out, RESERVED, &self.reserved[..]);
        let crc = crc::blobstore(&out[..CRC]);
        put(&mut out, CRC, &crc.to_le_bytes());
        out
    }

    /// Whether the masks on disk may be trusted: an orderly end, and all three masks exist.
    pub fn masks_are_valid(&self) -> bool {
        self.clean != 0 && self.used_blobid_mask.len != 0
    }

    /// Whether any reserved byte is set, which no known writer does.
    pub fn reserved_is_used(&self) -> bool {
        self.reserved.iter().any(|b| *b != 0)
    }
}

impl fmt::Debug for SuperBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SuperBlock")
            .field("version", &self.version)
            .field("length", &self.length)
            .field("clean", &self.clean)
            .field("super_blob", &self.super_blob)
            .field("cluster_size", &self.cluster_size)
            .field("used_page_mask", &self.used_page_mask)
            .field("used_cluster_mask", &self.used_cluster_mask)
            .field("used_blobid_mask", &self.used_blobid_mask)
            .field("md_start", &self.md_start)
            .field("md_len", &self.md_len)
            .field("bstype", &self.bstype)
            .field("size", &self.size)
            .field("io_unit_size", &self.io_unit_size)
            .field("md_page_size", &self.md_page_size)
            .finish_non_exhaustive()
    }
}
