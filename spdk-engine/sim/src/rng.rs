//! Random numbers for runs: small, seeded, the same on every machine (SplitMix64).

#[derive(Debug, Clone)]
pub(crate) struct Rng(u64);

impl Rng {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed ^ 0x9e37_79b9_7f4a_7c15)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number in `[low, high)`; `low` when that is empty.
    pub(crate) fn range(&mut self, low: u64, high: u64) -> u64 {
        if high <= low { low } else { low + self.next() % (high - low) }
    }

    pub(crate) fn index(&mut self, len: usize) -> usize {
        usize::try_from(self.range(0, len as u64)).unwrap_or(0)
    }

    /// True `n` times in a thousand.
    pub(crate) fn permille(&mut self, n: u64) -> bool {
        self.range(0, 1000) < n
    }
}
