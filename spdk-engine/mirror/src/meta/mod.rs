//! The meta area of a replica: what lies beside the data, byte by byte.
//!
//! *What it is.* Pure encode and decode of the small device that accompanies each replica's data, in blocks of 4 KiB:
//! ```text
//! block 0   1   2 ...............  then ..................
//!      [superblock slots][write-intent bits][region stamps]
//! ```
//! Numbers are little-endian; every checksum is CRC-32C. Two superblock slots are written in turns, and the valid one
//! with the higher sequence number counts ([`Superblock`]). Bits and stamps lie in sectors of 512 bytes with a header
//! each, because a torn write mixes whole sectors:
//!
//! | bytes | field |
//! |---|---|
//! | 0..4 | CRC of bytes 4..512 |
//! | 4..8 | number of the sector in its area; the top bit is set in the area of stamps |
//! | 8..512 | 4032 bits of regions (lowest bit of the lowest byte first), or 63 stamps of 8 bytes |
//!
//! A set bit says: members may differ in this region. A stamp says when a region was changed last ([`Stamp`]). A bad
//! sector counts as all bits set, never as none; a bad stamp as unknown.
//!
//! *Invariants.* The layout follows from the volume's size and region size alone ([`Geometry`]). A region is a power of
//! two of blocks, and there are at most [`REGIONS_MAX`]. Decoding never panics, whatever the bytes.
//!
//! *When things fail.* [`MetaError`] names field, value and what is allowed; a damaged superblock is an error, damaged
//! bits are counted and taken as set.

mod bits;
mod stamps;
mod superblock;

pub use bits::{BITS_PER_BLOCK, RegionBits, decode_bits, encode_bits};
pub use stamps::{STAMPS_PER_BLOCK, Stamp, decode_stamps, encode_stamps};
pub use superblock::{INSTANCE_BYTES_MAX, ReplicaState, Superblock, newest_superblock};

/// Bytes of a meta block.
pub const META_BLOCK_BYTES: usize = 4096;
/// Blocks of the superblock slots.
pub const SUPERBLOCK_SLOTS: u64 = 2;
/// Most regions of a volume.
pub const REGIONS_MAX: u64 = 1 << 20;
/// Smallest region of a real volume.
pub const REGION_BYTES_MIN: u64 = 1 << 20;

const SECTOR_BYTES: usize = 512;
const SECTOR_HEADER: usize = 8;
const SECTOR_PAYLOAD: usize = SECTOR_BYTES - SECTOR_HEADER;
const SECTORS_PER_BLOCK: usize = META_BLOCK_BYTES / SECTOR_BYTES;

/// What is wrong with a layout or a superblock.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MetaError {
    /// Not a region size.
    #[error("region_blocks is {0}: a power of two is allowed that gives 1 to {REGIONS_MAX} regions")]
    RegionBlocks(u64),
    /// Too few bytes.
    #[error("a superblock has {0} bytes here: {META_BLOCK_BYTES} are required")]
    Short(usize),
    /// Not a superblock at all.
    #[error("magic is {0:#018x}: this is no superblock")]
    Magic(u64),
    /// Damaged.
    #[error("crc is {found:#010x}, the bytes give {computed:#010x}: the superblock is damaged")]
    Crc {
        /// In the block.
        found: u32,
        /// Of the bytes.
        computed: u32,
    },
    /// Written by something newer.
    #[error("version is {0}: only version 1 is known")]
    Version(u32),
    /// A field out of range.
    #[error("{field} is {value}: {allowed}")]
    Field {
        /// Which.
        field: &'static str,
        /// What it holds.
        value: u64,
        /// What it may hold.
        allowed: &'static str,
    },
    /// A name that is none.
    #[error("{field} is not a name")]
    Name {
        /// Which.
        field: &'static str,
    },
}

/// Where things lie in the meta area of a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    size_blocks: u64,
    region_shift: u32,
    regions: u32,
}

impl Geometry {
    /// A layout with regions of a given size.
    ///
    /// # Errors
    /// [`MetaError::RegionBlocks`] unless it is a power of two that gives 1 to [`REGIONS_MAX`] regions.
    pub fn new(size_blocks: u64, region_blocks: u64) -> Result<Self, MetaError> {
        let error = Err(MetaError::RegionBlocks(region_blocks));
        if !region_blocks.is_power_of_two() {
            return error;
        }
        let regions = size_blocks.div_ceil(region_blocks);
        match u32::try_from(regions) {
            Ok(count) if (1..=REGIONS_MAX).contains(&regions) => {
                Ok(Self { size_blocks, region_shift: region_blocks.trailing_zeros(), regions: count })
            }
            _ => error,
        }
    }

    /// The layout of a volume: the smallest region of at least 1 MiB of which there are at most [`REGIONS_MAX`].
    ///
    /// # Errors
    /// [`MetaError::RegionBlocks`] when the volume is empty.
    pub fn for_volume(size_blocks: u64, block_size: u32) -> Result<Self, MetaError> {
        let least = (REGION_BYTES_MIN / u64::from(block_size.max(1))).max(1);
        let fair = size_blocks.div_ceil(REGIONS_MAX).max(1);
        let region = least.max(fair).checked_next_power_of_two().unwrap_or(1 << 63);
        Self::new(size_blocks, region)
    }

    /// Blocks of the volume.
    #[must_use]
    pub fn size_blocks(&self) -> u64 {
        self.size_blocks
    }

    /// Blocks of a region; the last one may have fewer.
    #[must_use]
    pub fn region_blocks(&self) -> u64 {
        1 << self.region_shift
    }

    /// Number of regions.
    #[must_use]
    pub fn regions(&self) -> u32 {
        self.regions
    }

    /// The region of a block of the volume.
    #[must_use]
    pub fn region_of(&self, lba: u64) -> u32 {
        u32::try_from(lba >> self.region_shift).unwrap_or(u32::MAX)
    }

    /// First block and block behind the last one of a region.
    #[must_use]
    pub fn range_of(&self, region: u32) -> (u64, u64) {
        let start = u64::from(region) << self.region_shift;
        (start, start.saturating_add(self.region_blocks()).min(self.size_blocks))
    }

    /// First and last region of a range that is not empty.
    #[must_use]
    pub fn regions_of(&self, lba: u64, blocks: u32) -> (u32, u32) {
        (self.region_of(lba), self.region_of(lba + u64::from(blocks.max(1)) - 1))
    }

    /// First meta block of the bits.
    #[must_use]
    pub fn bits_start(&self) -> u64 {
        SUPERBLOCK_SLOTS
    }

    /// Meta blocks of the bits.
    #[must_use]
    pub fn bits_blocks(&self) -> u32 {
        self.regions.div_ceil(BITS_PER_BLOCK)
    }

    /// First meta block of the stamps.
    #[must_use]
    pub fn stamps_start(&self) -> u64 {
        self.bits_start() + u64::from(self.bits_blocks())
    }

    /// Meta blocks of the stamps.
    #[must_use]
    pub fn stamps_blocks(&self) -> u32 {
        self.regions.div_ceil(STAMPS_PER_BLOCK)
    }

    /// Meta blocks in all: what the meta device must have at least.
    #[must_use]
    pub fn blocks(&self) -> u64 {
        self.stamps_start() + u64::from(self.stamps_blocks())
    }
}

/// Seals a sector: number and checksum.
fn seal_sector(sector: &mut [u8], number: u32) {
    put(sector, 4, &number.to_le_bytes());
    let crc = crc_fast::crc32_iscsi(&sector[4..]);
    put(sector, 0, &crc.to_le_bytes());
}

/// The payload of a sector that is whole and is the one with that number.
fn open_sector(sector: &[u8], number: u32) -> Option<&[u8]> {
    let whole = sector.len() == SECTOR_BYTES
        && u32_at(sector, 4) == number
        && u32_at(sector, 0) == crc_fast::crc32_iscsi(&sector[4..]);
    whole.then(|| &sector[SECTOR_HEADER..])
}

/// A field at a fixed place; one outside the slice reads as zero.
fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut out = [0; N];
    if let Some(field) = bytes.get(at..at.saturating_add(N)) {
        out.copy_from_slice(field);
    }
    out
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(array(bytes, at))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(array(bytes, at))
}

fn put(bytes: &mut [u8], at: usize, field: &[u8]) {
    if let Some(place) = bytes.get_mut(at..at.saturating_add(field.len())) {
        place.copy_from_slice(field);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regions_are_at_least_a_mebibyte_and_at_most_a_million() {
        let small = Geometry::for_volume(100, 512).unwrap();
        assert_eq!((small.region_blocks(), small.regions(), small.blocks()), (2048, 1, 2 + 1 + 1));
        let tib = Geometry::for_volume(1 << 31, 512).unwrap();
        assert_eq!((tib.region_blocks(), tib.regions()), (2048, 1 << 20));
        assert_eq!((tib.bits_blocks(), tib.stamps_blocks()), (33, 2081));
        let more = Geometry::for_volume((1 << 31) + 1, 512).unwrap();
        assert_eq!((more.region_blocks(), more.regions()), (4096, (1 << 19) + 1));
        assert!(Geometry::for_volume(0, 512).is_err());
        assert!(Geometry::for_volume(u64::MAX, 4096).is_ok());
        assert_eq!(Geometry::new(10, 3), Err(MetaError::RegionBlocks(3)));
        assert!(Geometry::new(1 << 30, 1).is_err());
    }

    #[test]
    fn ranges_of_regions_cover_the_volume_once() {
        let geometry = Geometry::new(21, 4).unwrap();
        let ranges: Vec<_> = (0..geometry.regions()).map(|r| geometry.range_of(r)).collect();
        assert_eq!(ranges, [(0, 4), (4, 8), (8, 12), (12, 16), (16, 20), (20, 21)]);
        assert_eq!(
            (geometry.regions_of(3, 1), geometry.regions_of(3, 2), geometry.regions_of(20, 1)),
            ((0, 0), (0, 1), (5, 5))
        );
    }
}
