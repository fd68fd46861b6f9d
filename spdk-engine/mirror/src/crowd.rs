//! A filter of ranges: says quickly that a range overlaps none of those that are live.
//!
//! *What it is.* The volume is cut into small granules, and granules are counted in buckets by a hash. A range counts in
//! the bucket of each of its granules; a range of very many is only counted as *wide*. When no range is wide and all
//! buckets of another one are zero, it overlaps nothing. When they are not, it may: the caller looks at the ranges.
//!
//! *Invariants.* Every range that was added and not removed is counted, so "alone" is never said wrongly.
//!
//! *Cost.* Independent of how many ranges are live, for those of a few granules.

/// Buckets. With a hundred small ranges live, one in twenty is looked at for nothing.
const BUCKETS: usize = 1 << BUCKET_BITS;
const BUCKET_BITS: u32 = 11;
/// A range of more granules is wide.
const WIDE: u64 = 64;

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct Crowd {
    buckets: Box<[u32]>,
    wide: u32,
    live: u32,
    /// Blocks of a granule, as a power of two.
    shift: u32,
}

impl Crowd {
    /// An empty filter with granules of `1 << shift` blocks.
    pub(crate) fn new(shift: u32) -> Self {
        Self { buckets: vec![0; BUCKETS].into_boxed_slice(), wide: 0, live: 0, shift }
    }

    /// First and last granule.
    fn granules(&self, start: u64, end: u64) -> (u64, u64) {
        (start >> self.shift, end.saturating_sub(1).max(start) >> self.shift)
    }

    #[inline]
    pub(crate) fn add(&mut self, start: u64, end: u64) {
        self.live += 1;
        let (first, last) = self.granules(start, end);
        if last - first >= WIDE {
            self.wide += 1;
        } else {
            (first..=last).for_each(|granule| self.buckets[bucket(granule)] += 1);
        }
    }

    /// Takes out a range that was added.
    pub(crate) fn remove(&mut self, start: u64, end: u64) {
        self.live -= 1;
        let (first, last) = self.granules(start, end);
        if last - first >= WIDE {
            self.wide -= 1;
        } else {
            (first..=last).for_each(|granule| self.buckets[bucket(granule)] -= 1);
        }
    }

    /// True when no live range overlaps this one, which is not live. False says nothing.
    pub(crate) fn is_free(&self, start: u64, end: u64) -> bool {
        self.all_are(start, end, 0)
    }

    /// True when no other live range overlaps this one, which is live. False says nothing.
    pub(crate) fn is_alone(&self, start: u64, end: u64) -> bool {
        self.all_are(start, end, 1)
    }

    #[inline]
    fn all_are(&self, start: u64, end: u64, count: u32) -> bool {
        let (first, last) = self.granules(start, end);
        if self.wide > 0 || last - first >= WIDE {
            return self.live == count;
        }
        (first..=last).all(|granule| self.buckets[bucket(granule)] == count)
    }
}

/// Neighbours lie in different buckets, and so do most granules that are a power of two apart.
fn bucket(granule: u64) -> usize {
    (granule.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (u64::BITS - BUCKET_BITS)) as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn what_is_said_to_be_alone_overlaps_nothing(
            ranges in proptest::collection::vec((0u64..2000, 1u64..900), 1..40),
            asked in (0u64..2000, 1u64..900),
            gone in any::<proptest::sample::Index>(),
        ) {
            let mut crowd = Crowd::new(3);
            let mut live: Vec<(u64, u64)> = ranges.iter().map(|(start, len)| (*start, start + len)).collect();
            live.iter().for_each(|(start, end)| crowd.add(*start, *end));
            let (start, end) = live.swap_remove(gone.index(ranges.len()));
            let overlaps = |(s, e): &&(u64, u64)| *s < asked.0 + asked.1 && asked.0 < *e;
            if crowd.is_alone(start, end) {
                prop_assert!(!live.iter().any(|(s, e)| *s < end && start < *e));
            }
            crowd.remove(start, end);
            if crowd.is_free(asked.0, asked.0 + asked.1) {
                prop_assert_eq!(live.iter().find(overlaps), None);
            }
            live.iter().for_each(|(start, end)| crowd.remove(*start, *end));
            prop_assert!(crowd.is_free(0, u64::MAX) && crowd.is_free(5, 6));
        }
    }

    #[test]
    fn small_ranges_apart_are_alone() {
        let mut crowd = Crowd::new(3);
        for at in 0..32 {
            assert!(crowd.is_free(at * 8, at * 8 + 8), "{at}");
            crowd.add(at * 8, at * 8 + 8);
        }
        assert!((0..32).all(|at| crowd.is_alone(at * 8, at * 8 + 8)));
        assert!(!crowd.is_free(9, 10));
        crowd.add(4, 12);
        assert!(!crowd.is_alone(0, 8) && !crowd.is_alone(8, 16) && crowd.is_alone(16, 24));
        crowd.add(0, 1 << 40);
        assert!(!crowd.is_alone(16, 24), "beside a wide one nothing is");
    }
}
