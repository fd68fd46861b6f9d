//! Which clusters and metadata pages are free, and which free clusters are known to read as zeroes. No I/O.
//!
//! # Invariants
//! * Clusters of the metadata, 0 among them, are used for ever; so an entry of 0 in a map can stand for a hole.
//! * The lowest free one is given first, as SPDK does. A hint keeps that from being a scan.
//! * A cluster is "zeroed" only when zeroes were made durable there since it was last used. After a load nothing is known.

use blobstore_format::Bits;
use std::collections::HashSet;

/// The clusters of a store.
#[derive(Clone, Debug)]
pub(crate) struct Clusters {
    used: Bits,
    zeroed: Bits,
    /// Cleared, but not yet flushed.
    clearing: HashSet<u32>,
    /// Cleared, with the flush under way that makes it durable.
    flushing: HashSet<u32>,
    free: u32,
    /// No cluster below is free.
    hint: u32,
}

/// A cluster just taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Taken {
    /// Its number on the disk.
    pub(crate) cluster: u32,
    /// Whether it reads as zeroes, durably.
    pub(crate) zeroed: bool,
}

impl Clusters {
    /// `total` clusters, of which the first `metadata` are taken.
    pub(crate) fn new(total: u32, metadata: u32) -> Self {
        let mut used = Bits::new(total);
        (0..metadata).for_each(|n| {
            used.set(n);
        });
        Self::from_used(used)
    }

    pub(crate) fn from_used(used: Bits) -> Self {
        let (len, count) = (used.len(), used.count());
        Self {
            used,
            zeroed: Bits::new(len),
            clearing: HashSet::new(),
            flushing: HashSet::new(),
            free: len - count,
            hint: 0,
        }
    }

    pub(crate) fn used(&self) -> &Bits {
        &self.used
    }

    pub(crate) fn free(&self) -> u32 {
        self.free
    }

    pub(crate) fn take(&mut self) -> Option<Taken> {
        let cluster = self.used.first_clear(self.hint)?;
        self.used.set(cluster);
        self.free -= 1;
        self.hint = cluster + 1;
        self.clearing.remove(&cluster);
        self.flushing.remove(&cluster);
        Some(Taken { cluster, zeroed: self.zeroed.clear(cluster) })
    }

    /// Takes `count` clusters, or none.
    pub(crate) fn take_many(&mut self, count: u64) -> Option<Vec<Taken>> {
        if count > u64::from(self.free) {
            return None;
        }
        (0..count).map(|_| self.take()).collect()
    }

    /// Gives a cluster back whose content is unknown.
    pub(crate) fn give_back(&mut self, cluster: u32) {
        if self.used.clear(cluster) {
            self.free += 1;
            self.hint = self.hint.min(cluster);
        }
    }

    /// Gives a cluster back that was cleared; `durable` when nothing can bring its old content back.
    pub(crate) fn give_back_zeroed(&mut self, cluster: u32, durable: bool) {
        self.give_back(cluster);
        if durable {
            self.zeroed.set(cluster);
        } else {
            self.clearing.insert(cluster);
        }
    }

    /// Every free cluster reads as zeroes, durably.
    pub(crate) fn all_free_are_zeroed(&mut self) {
        for n in 0..self.used.len() {
            if !self.used.get(n) {
                self.zeroed.set(n);
            }
        }
    }

    /// A flush begins: what was cleared before will be durable with it.
    pub(crate) fn flush_begins(&mut self) {
        self.flushing.extend(self.clearing.drain());
    }

    /// The flush ended.
    pub(crate) fn flush_ends(&mut self, ok: bool) {
        for cluster in std::mem::take(&mut self.flushing) {
            if ok {
                self.zeroed.set(cluster);
            } else {
                self.clearing.insert(cluster);
            }
        }
    }

    /// More clusters, all free.
    pub(crate) fn grow(&mut self, total: u32) {
        self.free += total.saturating_sub(self.used.len());
        self.used.resize(total);
        self.zeroed.resize(total);
    }
}

/// The metadata pages of a store.
#[derive(Clone, Debug)]
pub(crate) struct Pages {
    used: Bits,
    free: u32,
    hint: u32,
}

impl Pages {
    pub(crate) fn from_used(used: Bits) -> Self {
        let free = used.len() - used.count();
        Self { used, free, hint: 0 }
    }

    pub(crate) fn used(&self) -> &Bits {
        &self.used
    }

    pub(crate) fn free(&self) -> u32 {
        self.free
    }

    /// Takes the lowest page for a root or a chain.
    pub(crate) fn take(&mut self) -> Option<u32> {
        let page = self.used.first_clear(self.hint)?;
        self.hint = page + 1;
        self.mark(page);
        Some(page)
    }

    /// Takes the lowest page for extents: never page 0, which stands for "none" in an extent table.
    pub(crate) fn take_for_extents(&mut self) -> Option<u32> {
        let page = self.used.first_clear(self.hint.max(1))?;
        if self.hint > 0 {
            self.hint = page + 1;
        }
        self.mark(page);
        Some(page)
    }

    pub(crate) fn give_back(&mut self, page: u32) {
        if self.used.clear(page) {
            self.free += 1;
            self.hint = self.hint.min(page);
        }
    }

    fn mark(&mut self, page: u32) {
        self.used.set(page);
        self.free -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn metadata_clusters_are_never_given() {
        let mut clusters = Clusters::new(10, 3);
        assert_eq!(clusters.free(), 7);
        assert_eq!(clusters.take(), Some(Taken { cluster: 3, zeroed: false }));
        assert_eq!(clusters.take_many(7), None);
        assert_eq!(clusters.take_many(6).unwrap().len(), 6);
        assert_eq!(clusters.take(), None);
        clusters.grow(12);
        assert_eq!(clusters.take_many(2).unwrap()[1].cluster, 11);
    }

    #[test]
    fn a_cluster_is_zeroed_only_after_a_flush_and_until_it_is_used() {
        let mut clusters = Clusters::new(4, 1);
        clusters.all_free_are_zeroed();
        assert!(clusters.take().unwrap().zeroed);
        clusters.give_back_zeroed(1, false);
        assert!(!clusters.take().unwrap().zeroed, "not flushed yet");
        clusters.give_back_zeroed(1, false);
        clusters.flush_begins();
        clusters.flush_ends(false);
        assert!(!clusters.take().unwrap().zeroed, "the flush failed");
        clusters.give_back_zeroed(1, false);
        clusters.flush_begins();
        assert!(!clusters.take().unwrap().zeroed);
        clusters.give_back(1);
        clusters.flush_ends(true);
        assert!(!clusters.take().unwrap().zeroed, "used again during the flush");
        clusters.give_back_zeroed(1, false);
        clusters.flush_begins();
        clusters.flush_ends(true);
        assert!(clusters.take().unwrap().zeroed);
    }

    #[test]
    fn page_zero_is_for_roots_only() {
        let mut pages = Pages::from_used(Bits::new(4));
        assert_eq!(pages.take_for_extents(), Some(1));
        assert_eq!(pages.take(), Some(0));
        assert_eq!(pages.take_for_extents(), Some(2));
        pages.give_back(0);
        pages.give_back(1);
        assert_eq!(pages.take_for_extents(), Some(1));
        assert_eq!(pages.take(), Some(0));
        assert_eq!((pages.take(), pages.take(), pages.free()), (Some(3), None, 0));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn takes_the_lowest_free_one_like_a_set(ops in prop::collection::vec((any::<bool>(), 0u32..40), 0..200)) {
            let mut clusters = Clusters::new(40, 2);
            let mut free: std::collections::BTreeSet<u32> = (2..40).collect();
            for (take, n) in ops {
                if take {
                    prop_assert_eq!(clusters.take().map(|t| t.cluster), free.pop_first());
                } else if n >= 2 {
                    clusters.give_back(n);
                    free.insert(n);
                }
                prop_assert_eq!(clusters.free() as usize, free.len());
            }
        }
    }
}
