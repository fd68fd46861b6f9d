//! A set of regions, and the area of write-intent bits.

use super::{
    Geometry, META_BLOCK_BYTES, SECTOR_BYTES, SECTOR_HEADER, SECTOR_PAYLOAD, SECTORS_PER_BLOCK, open_sector,
    seal_sector,
};

const BITS_PER_SECTOR: u32 = SECTOR_PAYLOAD as u32 * 8;
/// Bits in one meta block.
pub const BITS_PER_BLOCK: u32 = BITS_PER_SECTOR * SECTORS_PER_BLOCK as u32;

/// A set of regions.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RegionBits {
    words: Vec<u64>,
    len: u32,
}

impl RegionBits {
    /// None of `len` regions.
    #[must_use]
    pub fn empty(len: u32) -> Self {
        Self { words: vec![0; len.div_ceil(u64::BITS) as usize], len }
    }

    /// All of `len` regions.
    #[must_use]
    pub fn full(len: u32) -> Self {
        let mut all = Self { words: vec![u64::MAX; len.div_ceil(u64::BITS) as usize], len };
        if let (Some(last), rest @ 1..) = (all.words.last_mut(), len % u64::BITS) {
            *last = (1 << rest) - 1;
        }
        all
    }

    /// How many regions there are.
    #[must_use]
    pub fn len(&self) -> u32 {
        self.len
    }

    /// Whether no region is in the set.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.words.iter().all(|w| *w == 0)
    }

    /// How many regions are in the set.
    #[must_use]
    pub fn count(&self) -> u32 {
        self.words.iter().map(|w| w.count_ones()).sum()
    }

    /// Whether a region is in the set.
    #[must_use]
    pub fn contains(&self, region: u32) -> bool {
        self.words.get((region / u64::BITS) as usize).is_some_and(|w| w >> (region % u64::BITS) & 1 != 0)
    }

    /// Puts a region in. One beyond the end is ignored.
    pub fn insert(&mut self, region: u32) {
        if region < self.len {
            self.words[(region / u64::BITS) as usize] |= 1 << (region % u64::BITS);
        }
    }

    /// Takes a region out.
    pub fn remove(&mut self, region: u32) {
        if region < self.len {
            self.words[(region / u64::BITS) as usize] &= !(1 << (region % u64::BITS));
        }
    }

    /// Puts all regions of another set of the same volume in.
    pub fn union_with(&mut self, other: &Self) {
        for region in other.iter() {
            self.insert(region);
        }
    }

    /// The first region in the set that is not below `from`.
    #[must_use]
    pub fn next(&self, from: u32) -> Option<u32> {
        let mut at = (from / u64::BITS) as usize;
        let mut word = self.words.get(at)? & (u64::MAX << (from % u64::BITS));
        while word == 0 {
            at += 1;
            word = *self.words.get(at)?;
        }
        Some(u32::try_from(at).unwrap_or(u32::MAX) * u64::BITS + word.trailing_zeros())
    }

    /// One bit for each region, lowest bit of the lowest byte first.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes: Vec<u8> = self.words.iter().flat_map(|word| word.to_le_bytes()).collect();
        bytes.truncate(self.len.div_ceil(u8::BITS) as usize);
        bytes
    }

    /// What [`Self::to_bytes`] gave for `len` regions; `None` for bytes of another length, or with a bit behind the end.
    #[must_use]
    pub fn from_bytes(len: u32, bytes: &[u8]) -> Option<Self> {
        if bytes.len() != len.div_ceil(u8::BITS) as usize {
            return None;
        }
        let mut set = Self::empty(len);
        for (byte, value) in (0u32..).zip(bytes) {
            for bit in (0..u8::BITS).filter(|bit| value >> bit & 1 != 0) {
                let region = byte * u8::BITS + bit;
                if region >= len {
                    return None;
                }
                set.insert(region);
            }
        }
        Some(set)
    }

    /// The regions in the set, lowest first.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        std::iter::successors(self.next(0), |last| self.next(last + 1))
    }
}

/// One meta block of the area of bits, appended to `out`; `block` counts from the start of that area.
pub fn encode_bits(bits: &RegionBits, block: u32, out: &mut Vec<u8>) {
    let base = out.len();
    out.resize(base + META_BLOCK_BYTES, 0);
    let first = block.saturating_mul(BITS_PER_BLOCK);
    let mut next = bits.next(first);
    for sector in 0..SECTORS_PER_BLOCK as u32 {
        let start = first + sector * BITS_PER_SECTOR;
        let at = base + sector as usize * SECTOR_BYTES;
        let bytes = &mut out[at..at + SECTOR_BYTES];
        while let Some(region) = next.filter(|r| *r < start + BITS_PER_SECTOR) {
            let bit = region - start;
            bytes[SECTOR_HEADER + (bit / 8) as usize] |= 1 << (bit % 8);
            next = bits.next(region + 1);
        }
        seal_sector(bytes, block * SECTORS_PER_BLOCK as u32 + sector);
    }
}

/// The whole area of bits, and how many of its sectors were bad or missing: their regions are all in the set.
#[must_use]
pub fn decode_bits(geometry: &Geometry, bytes: &[u8]) -> (RegionBits, u32) {
    let mut bits = RegionBits::empty(geometry.regions());
    let mut bad = 0;
    for number in 0..geometry.regions().div_ceil(BITS_PER_SECTOR) {
        let at = number as usize * SECTOR_BYTES;
        let start = number * BITS_PER_SECTOR;
        match bytes.get(at..at + SECTOR_BYTES).and_then(|sector| open_sector(sector, number)) {
            Some(payload) => {
                for (byte, value) in (0u32..).zip(payload).filter(|(_, value)| **value != 0) {
                    (0..8).filter(|bit| value >> bit & 1 != 0).for_each(|bit| bits.insert(start + byte * 8 + bit));
                }
            }
            None => {
                bad += 1;
                (start..start + BITS_PER_SECTOR).for_each(|region| bits.insert(region));
            }
        }
    }
    (bits, bad)
}
