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
