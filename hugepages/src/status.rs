//! The hugepage pools of a host at a glance.
//!
//! A [`Status`] is a snapshot: one row per NUMA node and page size, read one after the other. It serialises for
//! programs and prints as a table for people. Reading it changes nothing; it fails only when the kernel's files or the
//! ledger cannot be read.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::reserve::{ReserveError, Reserver};
use crate::sysfs::{KernelPages, PoolId};

/// One page size on one NUMA node. All counts are pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolStatus {
    /// Node and page size.
    #[serde(flatten)]
    pub pool: PoolId,
    /// Pages in the pool.
    pub total: u64,
    /// Pages no one has faulted in.
    pub free: u64,
    /// Pages in use above the size that was set.
    pub surplus: u64,
    /// Pages that are in the pool because we reserved them.
    pub reserved_by_us: u64,
}

/// All pools of a host, by node and then by page size. Empty on a kernel without hugepages.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// The pools.
    pub pools: Vec<PoolStatus>,
}

impl Status {
    /// Reads the state of all pools.
    ///
    /// # Errors
    /// When the kernel's files or the ledger cannot be read.
    pub fn read<K: KernelPages>(reserver: &Reserver<K>) -> Result<Self, ReserveError> {
        let row = |(pool, counts, reserved_by_us): (PoolId, crate::Counts, u64)| PoolStatus {
            pool,
            total: counts.total,
            free: counts.free,
            surplus: counts.surplus,
            reserved_by_us,
        };
        Ok(Self { pools: reserver.shares()?.into_iter().map(row).collect() })
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.pools.is_empty() {
            return write!(f, "this kernel has no hugepages");
        }
        write!(f, "{:<5} {:>8} {:>8} {:>8} {:>8} {:>8}", "NODE", "SIZE", "TOTAL", "FREE", "SURPLUS", "OURS")?;
        for row in &self.pools {
            let PoolId { node, page_size } = row.pool;
            let (total, free, surplus, ours) = (row.total, row.free, row.surplus, row.reserved_by_us);
            write!(f, "\n{node:<5} {page_size:>8} {total:>8} {free:>8} {surplus:>8} {ours:>8}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::page_size::PageSize;
    use crate::sysfs::tests::{pool, write_pool};
    use crate::sysfs::{Counts, Sysfs};

    #[test]
    fn every_pool_has_a_row_with_our_share() {
        let dir = tempfile::tempdir().unwrap();
        for node in 0..2 {
            let sizes = dir.path().join(format!("sys/devices/system/node/node{node}/hugepages"));
            write_pool(&sizes, PageSize::MIB_2, Counts { total: 6, free: 2, surplus: 1 });
            write_pool(&sizes, PageSize::GIB_1, Counts { total: 0, free: 0, surplus: 0 });
        }
        let reserver = Reserver::new(Sysfs::new(dir.path().join("sys")), dir.path().join("ledger.json"), "boot");

        assert_eq!(reserver.reserve(pool(1, PageSize::GIB_1), 3).unwrap(), 3);
        let status = Status::read(&reserver).unwrap();
        let ours: Vec<u64> = status.pools.iter().map(|row| row.reserved_by_us).collect();
        assert_eq!(ours, [0, 0, 0, 3]);
        let table = status.to_string();
        assert_eq!(table.lines().count(), 5);
        assert_eq!(
            table.lines().last().unwrap().split_whitespace().collect::<Vec<_>>(),
            ["1", "1", "GiB", "3", "0", "0", "3"]
        );
    }

    #[test]
    fn rows_serialise_flat() {
        let row = PoolStatus { pool: pool(1, PageSize::MIB_2), total: 4, free: 3, surplus: 0, reserved_by_us: 2 };
        let json = serde_json::to_value(row).unwrap();
        assert_eq!(json["node"], 1);
        assert_eq!(json["page_size"], 2 << 20);
        assert_eq!(json["reserved_by_us"], 2);
    }

    #[test]
    fn a_kernel_without_hugepages_says_so() {
        let dir = tempfile::tempdir().unwrap();
        let reserver = Reserver::new(Sysfs::new(dir.path()), dir.path().join("ledger.json"), "boot");
        assert_eq!(Status::read(&reserver).unwrap().to_string(), "this kernel has no hugepages");
    }
}
