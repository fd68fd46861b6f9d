//! Who claims which clusters or metadata pages: as runs, so that neither time nor memory grow with the length of runs.

use std::collections::BTreeMap;

use super::blob::Blob;
use crate::{Bits, BlobId, Geometry};

/// A run of clusters (or one page) and who claims it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Claim {
    first: u64,
    end: u64,
    owner: BlobId,
}

/// Something that two claim, or one claims twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Conflict {
    /// The first of them.
    pub first: u32,
    /// How many.
    pub count: u64,
    /// The owners.
    pub owners: (BlobId, BlobId),
}

/// All claims to one kind of thing, in order.
pub struct Claims {
    claims: Vec<Claim>,
    limit: u64,
}

impl Claims {
    /// The clusters that blobs claim; of those, the ones that lie on the device.
    pub fn clusters<'a>(blobs: impl IntoIterator<Item = &'a Blob>, g: &Geometry) -> Self {
        let runs = blobs.into_iter().flat_map(|blob| {
            blob.map.claimed().map(|(_, run)| (u64::from(run.cluster), u64::from(run.length), blob.id))
        });
        Self::new(runs, g.total_clusters)
    }

    /// The metadata pages that blobs claim.
    pub fn pages<'a>(blobs: impl IntoIterator<Item = &'a Blob>, g: &Geometry) -> Self {
        let pages = blobs
            .into_iter()
            .flat_map(|blob| blob.chain.iter().chain(&blob.extent_pages).map(|page| (u64::from(*page), 1, blob.id)));
        Self::new(pages, g.md_len)
    }

    fn new(runs: impl Iterator<Item = (u64, u64, BlobId)>, limit: u32) -> Self {
        let limit = u64::from(limit);
        let mut claims: Vec<Claim> = runs
            .map(|(first, len, owner)| Claim { first, end: (first + len).min(limit), owner })
            .filter(|claim| claim.first < claim.end)
            .collect();
        claims.sort_unstable();
        Self { claims, limit }
    }

    /// What is claimed twice. Of many claims to the same, each is named with one other.
    pub fn conflicts(&self) -> impl Iterator<Item = Conflict> + '_ {
        let mut longest: Option<Claim> = None;
        self.claims.iter().filter_map(move |claim| {
            let before = longest;
            if before.is_none_or(|before| before.end < claim.end) {
                longest = Some(*claim);
            }
            let before = before.filter(|before| before.end > claim.first)?;
            let count = before.end.min(claim.end) - claim.first;
            Some(Conflict { first: claim.first as u32, count, owners: (before.owner, claim.owner) })
        })
    }

    /// The claimed runs without overlap, rising: first, end.
    pub fn merged(&self) -> Vec<(u64, u64)> {
        let mut out: Vec<(u64, u64)> = Vec::new();
        for claim in &self.claims {
            match out.last_mut() {
                Some((_, end)) if *end >= claim.first => *end = claim.end.max(*end),
                _ => out.push((claim.first, claim.end)),
            }
        }
        out
    }

    /// How many are claimed at `from` or above.
    pub fn count(&self, from: u32) -> u64 {
        let from = u64::from(from);
        self.merged().into_iter().map(|(first, end)| end.saturating_sub(first.max(from))).sum()
    }

    /// Runs that are claimed but not set in `bits`, one for each claim: the first missing one and its owner.
    pub fn unmarked<'a>(&'a self, bits: &'a Bits) -> impl Iterator<Item = (u32, BlobId)> + 'a {
        self.claims.iter().filter_map(|claim| {
            let clear = bits.first_clear(claim.first as u32).map_or(self.limit, u64::from);
            (clear < claim.end).then_some((clear as u32, claim.owner))
        })
    }

    /// Runs that are set in `bits` at `from` or above, but claimed by none: first, end.
    pub fn unclaimed<'a>(&'a self, bits: &'a Bits, from: u32) -> impl Iterator<Item = (u32, u32)> + 'a {
        let mut merged = self.merged().into_iter().peekable();
        let mut at = u64::from(from);
        std::iter::from_fn(move || {
            loop {
                let first = u64::from(bits.first_set(u32::try_from(at).ok()?)?);
                while merged.peek().is_some_and(|(_, end)| *end <= first) {
                    merged.next();
                }
                if let Some((start, end)) = merged.peek()
                    && *start <= first
                {
                    at = *end;
                    continue;
                }
                let clear = bits.first_clear(first as u32).map_or(self.limit, u64::from);
                let end = merged.peek().map_or(clear, |(start, _)| clear.min(*start));
                at = end;
                return Some((first as u32, end as u32));
            }
        })
    }
}

/// Blobs by id.
pub type Blobs = BTreeMap<BlobId, Blob>;

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const N: usize = 40;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(256))]
        #[test]
        fn like_counting_owners_one_by_one(
            runs in prop::collection::vec((0u64..45, 1u64..12, 0u64..4), 0..9),
            set in prop::collection::vec(any::<bool>(), N),
            from in 0u32..8,
        ) {
            let claims = Claims::new(runs.iter().map(|(f, n, o)| (*f, *n, BlobId(*o))), N as u32);
            let mut owners = vec![Vec::new(); N];
            for (first, len, owner) in &runs {
                (*first..(first + len).min(N as u64)).for_each(|n| owners[n as usize].push(*owner));
            }
            let used: Vec<usize> = (0..N).filter(|n| !owners[*n].is_empty()).collect();
            let merged: Vec<usize> = claims.merged().iter().flat_map(|(a, b)| *a as usize..*b as usize).collect();
            prop_assert_eq!(&merged, &used);
            prop_assert_eq!(claims.count(from) as usize, used.iter().filter(|n| **n >= from as usize).count());

            // Everything claimed twice is in some conflict, nothing else is, and everybody concerned is named.
            let mut twice = [false; N];
            let mut named = std::collections::BTreeSet::new();
            for conflict in claims.conflicts() {
                (conflict.first as usize..).take(conflict.count as usize).for_each(|n| twice[n] = true);
                named.extend([conflict.owners.0.0, conflict.owners.1.0]);
            }
            for n in 0..N {
                prop_assert_eq!(twice[n], owners[n].len() > 1, "{}", n);
                for owner in owners[n].iter().filter(|_| owners[n].len() > 1) {
                    prop_assert!(named.contains(owner), "{} of {}", owner, n);
                }
            }

            let mut bits = Bits::new(N as u32);
            set.iter().enumerate().filter(|(_, on)| **on).for_each(|(n, _)| { bits.set(n as u32); });
            let unmarked = used.iter().any(|n| !set[*n]);
            prop_assert_eq!(claims.unmarked(&bits).next().is_some(), unmarked);
            for (n, owner) in claims.unmarked(&bits) {
                prop_assert!(!set[n as usize] && owners[n as usize].contains(&owner.0));
            }
            let leaked: Vec<u32> = claims.unclaimed(&bits, from).flat_map(|(a, b)| a..b).collect();
            let expected = |n: &u32| set[*n as usize] && owners[*n as usize].is_empty();
            prop_assert_eq!(leaked, (from..N as u32).filter(expected).collect::<Vec<_>>());
        }
    }
}
