//! Which extent comes next: sequential or random, read or write.
//!
//! *What it is.* An endless, seeded sequence over a range of extents of equal size. Sequential ones start over at the
//! end; reads and writes of a sequential mix share one sequence, as fio's do.

use clap::ValueEnum;
use serde::Serialize;

/// Kind of load.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Pattern {
    Read,
    Write,
    Randread,
    Randwrite,
    Rw,
    Randrw,
}

impl Pattern {
    /// Whether extents come in random order.
    #[must_use]
    pub fn is_random(self) -> bool {
        matches!(self, Self::Randread | Self::Randwrite | Self::Randrw)
    }

    /// Percentage of reads; `mix` applies where there are both.
    #[must_use]
    pub fn read_percent(self, mix: u32) -> u32 {
        match self {
            Self::Read | Self::Randread => 100,
            Self::Write | Self::Randwrite => 0,
            Self::Rw | Self::Randrw => mix,
        }
    }
}

/// SplitMix64: a small generator of good quality, for load and not for secrets.
#[derive(Debug, Clone)]
pub struct Rng(u64);

impl Rng {
    /// The sequence of a seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next number.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `bound`, which is above 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        // Multiply-shift: the bias is below 2^-32 for any range of blocks.
        ((u128::from(self.next_u64()) * u128::from(bound)) >> 64) as u64
    }

    /// Fills a buffer.
    pub fn fill(&mut self, bytes: &mut [u8]) {
        for chunk in bytes.chunks_mut(8) {
            let word = self.next_u64().to_le_bytes();
            chunk.copy_from_slice(&word[..chunk.len()]);
        }
    }
}

/// The next extent to use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Choice {
    pub write: bool,
    /// Number of the extent in the range.
    pub extent: u64,
}

/// The sequence; see the module.
#[derive(Debug, Clone)]
pub struct Access {
    random: bool,
    read_percent: u32,
    first: u64,
    extents: u64,
    cursor: u64,
    rng: Rng,
}

impl Access {
    /// A sequence over the extents `first..first + extents`; `extents` is at least 1.
    #[must_use]
    pub fn new(pattern: Pattern, mix: u32, first: u64, extents: u64, seed: u64) -> Self {
        Self {
            random: pattern.is_random(),
            read_percent: pattern.read_percent(mix),
            first,
            extents: extents.max(1),
            cursor: 0,
            rng: Rng::new(seed),
        }
    }

    /// The next extent.
    #[allow(clippy::should_implement_trait)]
    pub fn next(&mut self) -> Choice {
        let extent = if self.random {
            self.rng.below(self.extents)
        } else {
            let now = self.cursor;
            self.cursor = (now + 1) % self.extents;
            now
        };
        let read = match self.read_percent {
            0 => false,
            100 => true,
            percent => self.rng.below(100) < u64::from(percent),
        };
        Choice { write: !read, extent: self.first + extent }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sequential_access_starts_over() {
        let mut access = Access::new(Pattern::Write, 70, 10, 3, 1);
        let extents: Vec<_> = (0..5).map(|_| access.next().extent).collect();
        assert_eq!(extents, [10, 11, 12, 10, 11]);
    }

    #[test]
    fn a_seed_gives_the_same_sequence_within_the_range() {
        let sequence = |seed| {
            let mut access = Access::new(Pattern::Randrw, 70, 5, 100, seed);
            (0..1000).map(|_| access.next()).collect::<Vec<_>>()
        };
        assert_eq!(sequence(7), sequence(7));
        assert_ne!(sequence(7), sequence(8));
        assert!(sequence(7).iter().all(|c| (5..105).contains(&c.extent)));
    }

    #[test]
    fn the_mix_is_the_share_of_reads() {
        let reads = |pattern, mix| {
            let mut access = Access::new(pattern, mix, 0, 100, 3);
            (0..10_000).filter(|_| !access.next().write).count()
        };
        assert_eq!(reads(Pattern::Randread, 0), 10_000);
        assert_eq!(reads(Pattern::Write, 70), 0);
        assert!((6_500..7_500).contains(&reads(Pattern::Randrw, 70)));
        assert!((1_500..2_500).contains(&reads(Pattern::Rw, 20)));
    }
}
