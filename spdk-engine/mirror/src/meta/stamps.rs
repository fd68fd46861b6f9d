//! The area of region stamps: per region, when it was changed last.

use super::{
    META_BLOCK_BYTES, SECTOR_BYTES, SECTOR_HEADER, SECTOR_PAYLOAD, SECTORS_PER_BLOCK, open_sector, put, seal_sector,
    u64_at,
};
use crate::config::Epoch;

const STAMP_BYTES: usize = 8;
const STAMPS_PER_SECTOR: usize = SECTOR_PAYLOAD / STAMP_BYTES;
/// When a region was changed last: the engine's epoch, and the number of changes of who gets writes in its time.
///
/// An epoch belongs to one engine, so no two engines of a lineage give the same stamp, and later ones are higher. The
/// configuration number alone would not do: see [`crate::Core`]'s module on stamps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Stamp(u64);

impl Stamp {
    /// Equal to no member's: what the replica holds there is not known, or not whole.
    pub const UNKNOWN: Self = Self(u64::MAX);

    /// A stamp of an engine's time.
    #[must_use]
    pub fn new(epoch: Epoch, change: u32) -> Self {
        Self(epoch.0 << 32 | u64::from(change))
    }
}

/// Stamps in one meta block.
pub const STAMPS_PER_BLOCK: u32 = (STAMPS_PER_SECTOR * SECTORS_PER_BLOCK) as u32;
/// Tells a sector of stamps from one of bits.
const STAMPS_AREA: u32 = 1 << 31;

/// One meta block of the area of stamps, appended to `out`; `block` counts from the start of that area, and `stamps`
/// are those of the regions from `block * STAMPS_PER_BLOCK` on. Those that are missing become 0.
pub fn encode_stamps(stamps: impl Iterator<Item = Stamp>, block: u32, out: &mut Vec<u8>) {
    let mut stamps = stamps;
    let base = out.len();
    out.resize(base + META_BLOCK_BYTES, 0);
    for sector in 0..SECTORS_PER_BLOCK {
        let at = base + sector * SECTOR_BYTES;
        let bytes = &mut out[at..at + SECTOR_BYTES];
        for (i, stamp) in stamps.by_ref().take(STAMPS_PER_SECTOR).enumerate() {
            put(bytes, SECTOR_HEADER + i * STAMP_BYTES, &stamp.0.to_le_bytes());
        }
        seal_sector(bytes, STAMPS_AREA | (block * SECTORS_PER_BLOCK as u32 + sector as u32));
    }
}

/// The stamps of one meta block; `None` where the sector is bad or missing.
#[must_use]
pub fn decode_stamps(block: u32, bytes: &[u8]) -> Vec<Option<Stamp>> {
    let mut stamps = Vec::with_capacity(STAMPS_PER_BLOCK as usize);
    for sector in 0..SECTORS_PER_BLOCK {
        let number = STAMPS_AREA | block.wrapping_mul(SECTORS_PER_BLOCK as u32).wrapping_add(sector as u32);
        let at = sector * SECTOR_BYTES;
        let payload = bytes.get(at..at + SECTOR_BYTES).and_then(|sector| open_sector(sector, number));
        stamps.extend((0..STAMPS_PER_SECTOR).map(|i| payload.map(|p| Stamp(u64_at(p, i * STAMP_BYTES)))));
    }
    stamps
}
