//! The area of region stamps: per region, the configuration number of its last change.

use super::{
    META_BLOCK_BYTES, SECTOR_BYTES, SECTOR_HEADER, SECTOR_PAYLOAD, SECTORS_PER_BLOCK, open_sector, put, seal_sector,
    u64_at,
};
use crate::config::ConfigNumber;

const STAMP_BYTES: usize = 8;
const STAMPS_PER_SECTOR: usize = SECTOR_PAYLOAD / STAMP_BYTES;
/// Stamps in one meta block.
pub const STAMPS_PER_BLOCK: u32 = (STAMPS_PER_SECTOR * SECTORS_PER_BLOCK) as u32;
/// Tells a sector of stamps from one of bits.
const STAMPS_AREA: u32 = 1 << 31;

/// One meta block of the area of stamps, appended to `out`; `block` counts from the start of that area, and `stamps`
/// are those of the regions from `block * STAMPS_PER_BLOCK` on. Those that are missing become 0: never changed.
pub fn encode_stamps(stamps: &[ConfigNumber], block: u32, out: &mut Vec<u8>) {
    let base = out.len();
    out.resize(base + META_BLOCK_BYTES, 0);
    for sector in 0..SECTORS_PER_BLOCK {
        let at = base + sector * SECTOR_BYTES;
        let bytes = &mut out[at..at + SECTOR_BYTES];
        let mine = stamps.iter().skip(sector * STAMPS_PER_SECTOR).take(STAMPS_PER_SECTOR);
        for (i, stamp) in mine.enumerate() {
            put(bytes, SECTOR_HEADER + i * STAMP_BYTES, &stamp.0.to_le_bytes());
        }
        seal_sector(bytes, STAMPS_AREA | (block * SECTORS_PER_BLOCK as u32 + sector as u32));
    }
}

/// The stamps of one meta block; `None` where the sector is bad or missing.
#[must_use]
pub fn decode_stamps(block: u32, bytes: &[u8]) -> Vec<Option<ConfigNumber>> {
    let mut stamps = Vec::with_capacity(STAMPS_PER_BLOCK as usize);
    for sector in 0..SECTORS_PER_BLOCK {
        let number = STAMPS_AREA | block.wrapping_mul(SECTORS_PER_BLOCK as u32).wrapping_add(sector as u32);
        let at = sector * SECTOR_BYTES;
        let payload = bytes.get(at..at + SECTOR_BYTES).and_then(|sector| open_sector(sector, number));
        stamps.extend((0..STAMPS_PER_SECTOR).map(|i| payload.map(|p| ConfigNumber(u64_at(p, i * STAMP_BYTES)))));
    }
    stamps
}
