//! Where a blob's clusters lie, as far as they are allocated.

use std::collections::BTreeMap;

use crate::extent::{CLUSTERS_PER_PAGE, Run};

/// A blob's clusters. Memory is bounded by the metadata that lists them, whatever length the blob claims.
#[derive(Clone, Debug, Default)]
pub struct ClusterMap {
    len: u64,
    /// Extent pages by the cluster they begin with.
    pages: BTreeMap<u64, Vec<u32>>,
    /// Run-length extents with the cluster each begins with.
    runs: Vec<(u64, Run)>,
}

impl ClusterMap {
    pub(super) fn of_runs(list: &[Run]) -> Self {
        let mut map = Self::default();
        for run in list {
            map.runs.push((map.len, *run));
            map.len += u64::from(run.length);
        }
        map
    }

    pub(super) fn set_len(&mut self, len: u64) {
        self.len = len;
    }

    pub(super) fn insert_page(&mut self, start: u64, clusters: Vec<u32>) {
        self.pages.insert(start, clusters);
    }

    /// Length in clusters.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether the blob has no clusters at all.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The device's cluster that holds cluster `at`; none when it is not allocated or beyond the end.
    pub fn get(&self, at: u64) -> Option<u32> {
        if at >= self.len {
            return None;
        }
        let start = at - at % u64::from(CLUSTERS_PER_PAGE);
        if let Some(page) = self.pages.get(&start) {
            return page.get((at - start) as usize).copied().filter(|cluster| *cluster != 0);
        }
        let found = self.runs.partition_point(|(first, _)| *first <= at).checked_sub(1)?;
        let (first, run) = self.runs[found];
        // A run that leaves the numbers of clusters is found and named when the blob is examined.
        (run.cluster != 0).then(|| run.cluster.wrapping_add((at - first) as u32))
    }

    /// The allocated clusters as runs: cluster of the blob, run on the device.
    pub fn allocated(&self) -> impl Iterator<Item = (u64, Run)> + '_ {
        self.listed(self.len)
    }

    /// Like [`ClusterMap::allocated`], with those beyond the end that extent pages still list.
    pub(super) fn claimed(&self) -> impl Iterator<Item = (u64, Run)> + '_ {
        self.listed(u64::MAX)
    }

    fn listed(&self, end: u64) -> impl Iterator<Item = (u64, Run)> + '_ {
        let pages = self.pages.iter().flat_map(move |(start, clusters)| {
            let count = end.saturating_sub(*start).min(clusters.len() as u64) as usize;
            join(*start, &clusters[..count])
        });
        pages.chain(self.runs.iter().filter(|(_, run)| run.cluster != 0).copied())
    }

    /// Number of allocated clusters.
    pub fn num_allocated(&self) -> u64 {
        self.allocated().map(|(_, run)| u64::from(run.length)).sum()
    }
}

/// An extent page's entries as runs, unallocated ones left out.
fn join(start: u64, clusters: &[u32]) -> Vec<(u64, Run)> {
    let mut out: Vec<(u64, Run)> = Vec::new();
    for (i, cluster) in clusters.iter().enumerate().filter(|(_, cluster)| **cluster != 0) {
        let at = start + i as u64;
        if let Some((first, run)) = out.last_mut()
            && *first + u64::from(run.length) == at
            && u64::from(run.cluster) + u64::from(run.length) == u64::from(*cluster)
        {
            run.length += 1;
        } else {
            out.push((at, Run { cluster: *cluster, length: 1 }));
        }
    }
    out
}
