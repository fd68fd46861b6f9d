//! Giving clusters back that nothing names any more.

use super::Inner;
use crate::{error::Error, store::IN_FLIGHT, sync::all};
use blobstore_format::descriptor::ClearMethod;
use std::cell::RefCell;

/// Clusters that one request clears at most, so that a device is not held up by a single one.
const RUN: u32 = 4096;

/// Joins clusters to runs (first, count).
pub(crate) fn runs(clusters: &mut [u32]) -> Vec<(u32, u32)> {
    clusters.sort_unstable();
    let mut runs: Vec<(u32, u32)> = Vec::new();
    for cluster in clusters {
        match runs.last_mut() {
            Some((first, count)) if *first + *count == *cluster && *count < RUN => *count += 1,
            _ => runs.push((*cluster, 1)),
        }
    }
    runs
}

impl Inner {
    /// Clears clusters as their blob asks for, and gives them back. What un-named them must be durable, and no I/O may use
    /// them any more. An error only means that their content is unknown, which an allocation copes with.
    pub(crate) async fn retire_clusters(&self, mut clusters: Vec<u32>, method: ClearMethod) {
        let (durable, failed) = (!self.device.write_cache(), RefCell::new(Vec::new()));
        let runs = runs(&mut clusters);
        let jobs = runs.iter().map(|(first, count)| {
            let failed = &failed;
            async move {
                if !matches!(self.clear_run(*first, *count, method).await, Ok(true)) {
                    failed.borrow_mut().push(*first);
                }
                Ok::<_, Error>(())
            }
        });
        let _ = all(IN_FLIGHT, jobs).await;
        let failed = failed.into_inner();
        let mut state = self.state.borrow_mut();
        for (first, count) in runs {
            let zeroed = !failed.contains(&first);
            for cluster in first..first + count {
                if zeroed {
                    state.clusters.give_back_zeroed(cluster, durable);
                } else {
                    state.clusters.give_back(cluster);
                }
            }
        }
    }

    /// Clears a run; answers whether it reads as zeroes now.
    async fn clear_run(&self, first: u32, count: u32, method: ClearMethod) -> Result<bool, Error> {
        let (offset, len) = (self.geometry().cluster_offset(first), u64::from(count) * self.cluster_size());
        match method {
            ClearMethod::None => Ok(false),
            ClearMethod::Default | ClearMethod::Unmap => {
                if !self.device.can_unmap() {
                    return Ok(false);
                }
                self.device.unmap(offset, len).await?;
                Ok(self.device.unmap_reads_zeroes())
            }
            ClearMethod::WriteZeroes => {
                self.device.write_zeroes(offset, len).await?;
                Ok(true)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn neighbours_are_cleared_together() {
        assert_eq!(super::runs(&mut [9, 3, 5, 4, 10]), [(3, 3), (9, 2)]);
        assert_eq!(super::runs(&mut []), []);
        let mut many: Vec<u32> = (1..=5000).collect();
        assert_eq!(super::runs(&mut many), [(1, 4096), (4097, 904)]);
    }
}
