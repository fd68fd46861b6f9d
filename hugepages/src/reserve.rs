//! Reserving and releasing hugepages per NUMA node.
//!
//! Contract:
//! - [`Reserver::reserve`] says how many pages of a pool this host's data plane wants to hold in all. Calling it again
//!   with the same number, also after a restart, changes nothing. It gets all of them or leaves the pool as it was.
//! - [`Reserver::release`] gives back what was reserved here and never more. What was in the pool before our first
//!   page is not ours, whatever others did to the pool since.
//! - What is ours is kept in a ledger file and outlives the process. The kernel is told first and the ledger second:
//!   a crash in between leaves pages that no one claims, never a claim on pages of others.
//! - Pages in use when they are released stay usable; the kernel takes each back when its user unmaps it.
//!
//! The kernel has no compare-and-swap for pool sizes. Processes that use this module take turns by the ledger's lock;
//! an administrator who resizes the same pool in the same instant can still be overwritten.

use std::fs;
use std::path::PathBuf;

use crate::ledger::{Entry, Ledger, LedgerError};
use crate::sysfs::{Counts, KernelPages, PoolId, Sysfs, SysfsError};

const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// Why pages could not be reserved or released.
#[derive(Debug, thiserror::Error)]
pub enum ReserveError {
    /// The kernel could not gather enough pages; none were kept.
    #[error("{pool}: {asked} more hugepages asked for, the kernel found {got}; memory is short or fragmented")]
    Shortage {
        /// The pool.
        pool: PoolId,
        /// Pages that were missing to the number asked for.
        asked: u64,
        /// How many of these the kernel found.
        got: u64,
    },
    /// The number of pages cannot be.
    #[error("{pool}: {pages} pages are not allowed: with the {persistent} there the count does not fit 64 bits")]
    Pages {
        /// The pool.
        pool: PoolId,
        /// The number asked for.
        pages: u64,
        /// Size of the pool.
        persistent: u64,
    },
    /// The kernel's pools could not be read or set.
    #[error(transparent)]
    Kernel(#[from] SysfsError),
    /// The ledger could not be used.
    #[error(transparent)]
    Ledger(#[from] LedgerError),
    /// The boot could not be identified, so reservations could not be told from those of an earlier boot.
    #[error("cannot read the boot id from {BOOT_ID}: {0}")]
    BootId(std::io::Error),
}

/// Reserves and releases pages, and remembers which are ours.
#[derive(Debug)]
pub struct Reserver<K = Sysfs> {
    kernel: K,
    ledger: PathBuf,
    boot_id: String,
}

impl Reserver {
    /// The running kernel, with the ledger at `ledger` (beside it a `.lock` and a `.new` file are used).
    ///
    /// # Errors
    /// [`ReserveError::BootId`] when `/proc` is not there.
    pub fn host(ledger: impl Into<PathBuf>) -> Result<Self, ReserveError> {
        let boot_id = fs::read_to_string(BOOT_ID).map_err(ReserveError::BootId)?;
        Ok(Self::new(Sysfs::default(), ledger, boot_id.trim()))
    }
}

impl<K: KernelPages> Reserver<K> {
    /// Any source of pages, with the ledger at `ledger`, which is valid for `boot_id` only.
    pub fn new(kernel: K, ledger: impl Into<PathBuf>, boot_id: impl Into<String>) -> Self {
        Self { kernel, ledger: ledger.into(), boot_id: boot_id.into() }
    }

    /// Holds at least `pages` pages of `pool` for us; returns how many were added for that.
    ///
    /// # Errors
    /// [`ReserveError::Shortage`] when the kernel finds too few; it then holds what it held before. Other errors when
    /// the kernel or the ledger cannot be used.
    pub fn reserve(&self, pool: PoolId, pages: u64) -> Result<u64, ReserveError> {
        let mut ledger = self.open()?;
        let before = self.kernel.counts(pool)?.persistent();
        let entry = ledger.entry(pool).unwrap_or(Entry { pool, pages: 0, baseline: before });
        let held = entry.held(before);
        let asked = pages.saturating_sub(held);
        if asked == 0 {
            return Ok(0);
        }
        let target = before.checked_add(asked).ok_or(ReserveError::Pages { pool, pages, persistent: before })?;
        self.kernel.set_persistent(pool, target)?;
        let got = self.kernel.counts(pool)?.persistent().saturating_sub(before);
        if got < asked {
            self.kernel.set_persistent(pool, before)?;
            return Err(ReserveError::Shortage { pool, asked, got });
        }
        // Someone shrank the pool below the old baseline: what is left is theirs, and ours starts above it.
        let baseline = entry.baseline.min(before);
        let recorded = ledger.record(Entry { pool, pages, baseline });
        if let Err(error) = recorded {
            // Unrecorded pages would stay reserved for ever.
            self.kernel.set_persistent(pool, before)?;
            return Err(error.into());
        }
        tracing::info!(%pool, added = asked, held = pages, "reserved hugepages");
        Ok(asked)
    }

    /// Gives back our pages of `pool`; returns how many that were. None reserved is no error.
    ///
    /// # Errors
    /// When the kernel or the ledger cannot be used. What could not be given back stays recorded as ours.
    pub fn release(&self, pool: PoolId) -> Result<u64, ReserveError> {
        self.release_from(&mut self.open()?, pool)
    }

    /// Gives back our pages of all pools; returns how many that were.
    ///
    /// # Errors
    /// The first error, after all pools were tried.
    pub fn release_all(&self) -> Result<u64, ReserveError> {
        let mut ledger = self.open()?;
        let results: Vec<_> = ledger.pools().into_iter().map(|pool| self.release_from(&mut ledger, pool)).collect();
        results.into_iter().sum()
    }

    /// How many pages of `pool` are ours now.
    ///
    /// # Errors
    /// When the kernel or the ledger cannot be read.
    pub fn held(&self, pool: PoolId) -> Result<u64, ReserveError> {
        Ok(held_of(&self.open()?, pool, self.kernel.counts(pool)?))
    }

    /// Counts of every pool, with our share, under one turn of the ledger.
    pub(crate) fn shares(&self) -> Result<Vec<(PoolId, Counts, u64)>, ReserveError> {
        let ledger = self.open()?;
        let share = |pool| {
            let counts = self.kernel.counts(pool)?;
            Ok((pool, counts, held_of(&ledger, pool, counts)))
        };
        self.kernel.pools()?.into_iter().map(share).collect()
    }

    /// The kernel's side.
    pub fn kernel(&self) -> &K {
        &self.kernel
    }

    fn open(&self) -> Result<Ledger, LedgerError> {
        Ledger::open(&self.ledger, &self.boot_id)
    }

    fn release_from(&self, ledger: &mut Ledger, pool: PoolId) -> Result<u64, ReserveError> {
        let Some(entry) = ledger.entry(pool) else { return Ok(0) };
        let before = self.kernel.counts(pool)?.persistent();
        let held = entry.held(before);
        let target = before - held;
        let mut after = before;
        if held > 0 {
            self.kernel.set_persistent(pool, target)?;
            after = self.kernel.counts(pool)?.persistent();
        }
        let left = held.min(after.saturating_sub(target));
        ledger.record(Entry { pages: left, ..entry })?;
        tracing::info!(%pool, released = held - left, left, "released hugepages");
        Ok(held - left)
    }
}

fn held_of(ledger: &Ledger, pool: PoolId, counts: Counts) -> u64 {
    ledger.entry(pool).map_or(0, |entry| entry.held(counts.persistent()))
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;
    use crate::page_size::PageSize;
    use crate::sysfs::tests::write_pool;

    const POOL: PoolId = PoolId { node: 0, page_size: PageSize::MIB_2 };
    const OTHER: PoolId = PoolId { node: 1, page_size: PageSize::MIB_2 };

    /// A kernel that finds at most `limit` pages for each pool.
    #[derive(Debug)]
    struct Model {
        limit: u64,
        persistent: RefCell<BTreeMap<PoolId, u64>>,
    }

    impl Model {
        fn new(limit: u64, start: u64) -> Self {
            Self { limit, persistent: RefCell::new([(POOL, start), (OTHER, start)].into()) }
        }

        fn size(&self, pool: PoolId) -> u64 {
            self.persistent.borrow()[&pool]
        }
    }

    impl KernelPages for Model {
        fn pools(&self) -> Result<Vec<PoolId>, SysfsError> {
            Ok(self.persistent.borrow().keys().copied().collect())
        }

        fn counts(&self, pool: PoolId) -> Result<Counts, SysfsError> {
            let persistent = self.persistent.borrow().get(&pool).copied().ok_or(SysfsError::NoPool(pool))?;
            // Surplus pages are there all the time, to catch code that takes them for reserved ones.
            Ok(Counts { total: persistent + 3, free: persistent, surplus: 3 })
        }

        fn set_persistent(&self, pool: PoolId, pages: u64) -> Result<(), SysfsError> {
            let mut all = self.persistent.borrow_mut();
            let size = all.get_mut(&pool).ok_or(SysfsError::NoPool(pool))?;
            *size = pages.min(self.limit.max(*size));
            Ok(())
        }
    }

    fn reserver(dir: &tempfile::TempDir, model: Model) -> Reserver<Model> {
        Reserver::new(model, dir.path().join("ledger.json"), "boot")
    }

    #[test]
    fn reserving_is_idempotent_also_after_a_restart() {
        let dir = tempfile::tempdir().unwrap();
        let first = reserver(&dir, Model::new(100, 10));
        assert_eq!(first.reserve(POOL, 8).unwrap(), 8);
        assert_eq!(first.reserve(POOL, 8).unwrap(), 0);
        let second = reserver(&dir, Model::new(100, 18));
        assert_eq!(second.reserve(POOL, 5).unwrap(), 0);
        assert_eq!(second.reserve(POOL, 9).unwrap(), 1);
        assert_eq!(second.release(POOL).unwrap(), 9);
        assert_eq!(second.kernel().size(POOL), 10);
        assert_eq!(second.release(POOL).unwrap(), 0);
    }

    #[test]
    fn a_shortage_says_how_many_were_found_and_keeps_none() {
        let dir = tempfile::tempdir().unwrap();
        let reserver = reserver(&dir, Model::new(12, 10));
        let error = reserver.reserve(POOL, 5).unwrap_err();
        assert!(matches!(error, ReserveError::Shortage { asked: 5, got: 2, .. }), "{error}");
        assert_eq!((reserver.kernel().size(POOL), reserver.held(POOL).unwrap()), (10, 0));
        assert_eq!(reserver.reserve(POOL, 2).unwrap(), 2);
    }

    #[test]
    fn pages_that_cannot_be_recorded_are_given_back() {
        let dir = tempfile::tempdir().unwrap();
        let reserver = reserver(&dir, Model::new(100, 10));
        fs::create_dir(dir.path().join("ledger.new")).unwrap();
        assert!(matches!(reserver.reserve(POOL, 5), Err(ReserveError::Ledger(_))));
        assert_eq!(reserver.kernel().size(POOL), 10);
    }

    #[test]
    fn all_pools_are_released_together() {
        let dir = tempfile::tempdir().unwrap();
        let reserver = reserver(&dir, Model::new(100, 1));
        reserver.reserve(POOL, 4).unwrap();
        reserver.reserve(OTHER, 6).unwrap();
        assert_eq!(reserver.release_all().unwrap(), 10);
        assert_eq!((reserver.kernel().size(POOL), reserver.kernel().size(OTHER)), (1, 1));
    }

    #[test]
    fn an_unknown_pool_and_an_absurd_count_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let reserver = reserver(&dir, Model::new(100, 1));
        let unknown = PoolId { node: 7, ..POOL };
        assert!(matches!(reserver.reserve(unknown, 1), Err(ReserveError::Kernel(SysfsError::NoPool(_)))));
        assert!(matches!(reserver.reserve(POOL, u64::MAX), Err(ReserveError::Pages { .. })));
        assert_eq!(reserver.kernel().size(POOL), 1);
    }

    #[test]
    fn sysfs_files_are_changed_and_restored() {
        let dir = tempfile::tempdir().unwrap();
        let sizes = dir.path().join("sys/devices/system/node/node0/hugepages");
        write_pool(&sizes, PageSize::MIB_2, Counts { total: 4, free: 4, surplus: 0 });
        let reserver = Reserver::new(Sysfs::new(dir.path().join("sys")), dir.path().join("ledger.json"), "boot");
        reserver.reserve(POOL, 16).unwrap();
        assert_eq!(reserver.kernel().counts(POOL).unwrap().total, 20);
        reserver.release(POOL).unwrap();
        assert_eq!(reserver.kernel().counts(POOL).unwrap().total, 4);
    }

    #[derive(Debug, Clone)]
    enum Step {
        Reserve(u64),
        Release,
        Resize(u64),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![(0..40_u64).prop_map(Step::Reserve), Just(Step::Release), (0..60_u64).prop_map(Step::Resize)]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]

        /// With an administrator who resizes at will: a release takes no more than was added since the last one, and
        /// never goes below the smallest size that the pool had without us.
        #[test]
        fn a_release_never_takes_pages_of_others(steps in proptest::collection::vec(step(), 1..24)) {
            let dir = tempfile::tempdir().unwrap();
            let reserver = reserver(&dir, Model::new(50, 10));
            let (mut added, mut floor) = (0, None::<u64>);
            for step in steps {
                let before = reserver.kernel().size(POOL);
                match step {
                    Step::Reserve(pages) => match reserver.reserve(POOL, pages) {
                        Ok(more) => {
                            prop_assert_eq!(reserver.kernel().size(POOL), before + more);
                            prop_assert!(reserver.held(POOL).unwrap() >= pages);
                            if more > 0 {
                                floor = Some(floor.unwrap_or(before).min(before));
                            }
                            added += more;
                        }
                        Err(_) => prop_assert_eq!(reserver.kernel().size(POOL), before),
                    },
                    Step::Release => {
                        let released = reserver.release(POOL).unwrap();
                        prop_assert_eq!(reserver.kernel().size(POOL), before - released);
                        prop_assert!(released <= added);
                        prop_assert!(released == 0 || Some(before - released) >= floor);
                        (added, floor) = (0, None);
                    }
                    Step::Resize(pages) => reserver.kernel().set_persistent(POOL, pages).unwrap(),
                }
            }
        }
    }
}
