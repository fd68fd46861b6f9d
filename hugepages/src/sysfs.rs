//! The kernel's hugepage pools, as sysfs shows them.
//!
//! One pool is one page size on one NUMA node: `devices/system/node/node<N>/hugepages/hugepages-<size>kB/`. A kernel
//! without NUMA has only `kernel/mm/hugepages/`, which is shown as node 0.
//!
//! [`KernelPages`] is the seam: the reservation logic is tested against a model of the kernel that runs out of memory
//! on demand. [`Sysfs`] does the file access, below a root that tests replace. It keeps no state, so every call sees
//! what other programs changed in between.

use std::fmt;
use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::page_size::PageSize;

/// One page size on one NUMA node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct PoolId {
    /// NUMA node number.
    pub node: u32,
    /// Page size.
    pub page_size: PageSize,
}

impl fmt::Display for PoolId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "node {}, {}", self.node, self.page_size)
    }
}

/// What a pool holds, in pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counts {
    /// Pages in the pool, surplus included.
    pub total: u64,
    /// Pages no one has faulted in.
    pub free: u64,
    /// Pages in use above the size that was set; the kernel takes each back when it is freed.
    pub surplus: u64,
}

impl Counts {
    /// The pool size that was set, which is what reserving and releasing change.
    #[must_use]
    pub fn persistent(&self) -> u64 {
        self.total.saturating_sub(self.surplus)
    }
}

/// A sysfs file that could not be used.
#[derive(Debug, thiserror::Error)]
pub enum SysfsError {
    /// The kernel has no such pool.
    #[error("the kernel has no hugepage pool for {0}")]
    NoPool(PoolId),
    /// A file or directory could not be read.
    #[error("cannot read {path}: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// A file could not be written; without root rights this is the usual error.
    #[error("cannot set {path} to {pages} pages: {source}")]
    Write {
        /// The file.
        path: PathBuf,
        /// The pool size that was to be set.
        pages: u64,
        /// The system's error.
        source: io::Error,
    },
    /// A file holds something else than a page count.
    #[error("{path} holds {text:?} where a page count is expected")]
    Count {
        /// The file.
        path: PathBuf,
        /// What it holds.
        text: String,
    },
}

/// Access to the kernel's hugepage pools.
pub trait KernelPages {
    /// All pools, by node and then by size.
    ///
    /// # Errors
    /// When the list cannot be read.
    fn pools(&self) -> Result<Vec<PoolId>, SysfsError>;

    /// What a pool holds now.
    ///
    /// # Errors
    /// [`SysfsError::NoPool`] when there is no such pool, else when its files cannot be read.
    fn counts(&self, pool: PoolId) -> Result<Counts, SysfsError>;

    /// Asks the kernel to size a pool. The kernel may stop short without an error: read the counts afterwards.
    ///
    /// # Errors
    /// [`SysfsError::NoPool`] when there is no such pool, else when the file cannot be written.
    fn set_persistent(&self, pool: PoolId, pages: u64) -> Result<(), SysfsError>;
}

/// The pools below a sysfs root.
#[derive(Debug, Clone)]
pub struct Sysfs {
    root: PathBuf,
}

impl Sysfs {
    /// Uses `root` in place of `/sys`.
    #[must_use]
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    fn nodes_dir(&self) -> PathBuf {
        self.root.join("devices/system/node")
    }

    fn global_dir(&self) -> PathBuf {
        self.root.join("kernel/mm/hugepages")
    }

    fn has_numa(&self) -> bool {
        self.nodes_dir().is_dir()
    }

    fn size_dir(&self, pool: PoolId) -> Result<PathBuf, SysfsError> {
        let sizes = if self.has_numa() {
            self.nodes_dir().join(format!("node{}/hugepages", pool.node))
        } else if pool.node == 0 {
            self.global_dir()
        } else {
            return Err(SysfsError::NoPool(pool));
        };
        let dir = sizes.join(pool.page_size.dir_name());
        if dir.is_dir() { Ok(dir) } else { Err(SysfsError::NoPool(pool)) }
    }

    fn nodes(&self) -> Result<Vec<u32>, SysfsError> {
        let number = |name: &str| name.strip_prefix("node").and_then(|digits| digits.parse().ok());
        Ok(entry_names(&self.nodes_dir())?.iter().filter_map(|name| number(name)).collect())
    }
}

impl Default for Sysfs {
    /// The running kernel's, at `/sys`.
    fn default() -> Self {
        Self::new("/sys")
    }
}

impl KernelPages for Sysfs {
    fn pools(&self) -> Result<Vec<PoolId>, SysfsError> {
        let mut pools = Vec::new();
        if self.has_numa() {
            for node in self.nodes()? {
                let sizes = self.nodes_dir().join(format!("node{node}/hugepages"));
                pools.extend(page_sizes(&sizes)?.map(|page_size| PoolId { node, page_size }));
            }
        } else {
            pools.extend(page_sizes(&self.global_dir())?.map(|page_size| PoolId { node: 0, page_size }));
        }
        pools.sort_unstable();
        Ok(pools)
    }

    fn counts(&self, pool: PoolId) -> Result<Counts, SysfsError> {
        let dir = self.size_dir(pool)?;
        Ok(Counts {
            total: read_count(&dir.join("nr_hugepages"))?,
            free: read_count(&dir.join("free_hugepages"))?,
            surplus: read_count(&dir.join("surplus_hugepages"))?,
        })
    }

    fn set_persistent(&self, pool: PoolId, pages: u64) -> Result<(), SysfsError> {
        let path = self.size_dir(pool)?.join("nr_hugepages");
        OpenOptions::new()
            .write(true)
            .truncate(true)
            .open(&path)
            .and_then(|mut file| file.write_all(pages.to_string().as_bytes()))
            .map_err(|source| SysfsError::Write { path, pages, source })
    }
}

/// Page sizes below a `hugepages` directory. The directory is missing on a node without memory and on a kernel without
/// hugepages; both simply have no pools.
fn page_sizes(dir: &Path) -> Result<impl Iterator<Item = PageSize>, SysfsError> {
    let names = match entry_names(dir) {
        Err(SysfsError::Read { source, .. }) if source.kind() == io::ErrorKind::NotFound => Vec::new(),
        other => other?,
    };
    Ok(names.into_iter().filter_map(|name| PageSize::from_dir_name(&name).ok()))
}

fn entry_names(dir: &Path) -> Result<Vec<String>, SysfsError> {
    let failed = |source| SysfsError::Read { path: dir.to_owned(), source };
    let name = |entry: fs::DirEntry| entry.file_name().to_string_lossy().into_owned();
    fs::read_dir(dir).map_err(failed)?.map(|entry| entry.map(name).map_err(failed)).collect()
}

fn read_count(path: &Path) -> Result<u64, SysfsError> {
    let text = fs::read_to_string(path).map_err(|source| SysfsError::Read { path: path.to_owned(), source })?;
    text.trim().parse().map_err(|_| SysfsError::Count { path: path.to_owned(), text })
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn pool(node: u32, page_size: PageSize) -> PoolId {
        PoolId { node, page_size }
    }

    /// Writes the files of one pool below a fake root.
    pub(crate) fn write_pool(sizes: &Path, size: PageSize, counts: Counts) {
        let dir = sizes.join(size.dir_name());
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join("nr_hugepages"), format!("{}\n", counts.total)).unwrap();
        fs::write(dir.join("free_hugepages"), format!("{}\n", counts.free)).unwrap();
        fs::write(dir.join("surplus_hugepages"), format!("{}\n", counts.surplus)).unwrap();
    }

    const COUNTS: Counts = Counts { total: 12, free: 5, surplus: 2 };

    #[test]
    fn pools_of_all_nodes_are_listed_in_order_and_other_entries_skipped() {
        let root = tempfile::tempdir().unwrap();
        let nodes = root.path().join("devices/system/node");
        for node in [10, 2, 0] {
            let sizes = nodes.join(format!("node{node}/hugepages"));
            write_pool(&sizes, PageSize::GIB_1, COUNTS);
            write_pool(&sizes, PageSize::MIB_2, COUNTS);
        }
        fs::create_dir_all(nodes.join("power")).unwrap();
        fs::create_dir_all(nodes.join("node3")).unwrap();
        let expected: Vec<PoolId> =
            [0, 2, 10].iter().flat_map(|&n| [pool(n, PageSize::MIB_2), pool(n, PageSize::GIB_1)]).collect();
        assert_eq!(Sysfs::new(root.path()).pools().unwrap(), expected);
    }

    #[test]
    fn a_kernel_without_numa_is_one_node() {
        let root = tempfile::tempdir().unwrap();
        write_pool(&root.path().join("kernel/mm/hugepages"), PageSize::MIB_2, COUNTS);
        let sysfs = Sysfs::new(root.path());
        assert_eq!(sysfs.pools().unwrap(), [pool(0, PageSize::MIB_2)]);
        assert_eq!(sysfs.counts(pool(0, PageSize::MIB_2)).unwrap(), COUNTS);
        assert!(matches!(sysfs.counts(pool(1, PageSize::MIB_2)), Err(SysfsError::NoPool(_))));
    }

    #[test]
    fn a_kernel_without_hugepages_has_no_pools() {
        let root = tempfile::tempdir().unwrap();
        assert_eq!(Sysfs::new(root.path()).pools().unwrap(), []);
    }

    #[test]
    fn setting_replaces_the_whole_count() {
        let root = tempfile::tempdir().unwrap();
        let sizes = root.path().join("devices/system/node/node0/hugepages");
        write_pool(&sizes, PageSize::MIB_2, Counts { total: 1000, free: 1000, surplus: 0 });
        let sysfs = Sysfs::new(root.path());
        sysfs.set_persistent(pool(0, PageSize::MIB_2), 7).unwrap();
        assert_eq!(sysfs.counts(pool(0, PageSize::MIB_2)).unwrap().total, 7);
    }

    #[test]
    fn a_file_that_holds_no_count_is_named() {
        let root = tempfile::tempdir().unwrap();
        let sizes = root.path().join("devices/system/node/node0/hugepages");
        write_pool(&sizes, PageSize::MIB_2, COUNTS);
        fs::write(sizes.join("hugepages-2048kB/free_hugepages"), "many").unwrap();
        let error = Sysfs::new(root.path()).counts(pool(0, PageSize::MIB_2)).unwrap_err();
        assert!(error.to_string().contains("free_hugepages holds \"many\""), "{error}");
    }
}
