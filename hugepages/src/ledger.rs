//! What was reserved, kept in a file so that a restart still knows it.
//!
//! The file is locked while a ledger is open, so that two processes of one host take turns; waiting for the lock ends
//! after [`LOCK_DEADLINE`]. It is replaced as a whole by rename, so a crash leaves the old or the new one. It names the
//! boot it belongs to: pools do not outlive a boot, so a ledger of an earlier boot counts as empty. A file that cannot
//! be understood is an error and stays as it is, because a guess could release pages of someone else.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::sysfs::PoolId;

/// Longest wait for another process; its turn takes as long as the kernel needs to gather pages.
const LOCK_DEADLINE: Duration = Duration::from_secs(10);
const LOCK_POLL: Duration = Duration::from_millis(10);

/// Why the ledger could not be used.
#[derive(Debug, thiserror::Error)]
pub enum LedgerError {
    /// A file operation failed.
    #[error("cannot {action} the hugepage ledger {path}: {source}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// Another process kept the lock too long.
    #[error("the hugepage ledger {path} stayed locked by another process for {} s", LOCK_DEADLINE.as_secs())]
    Locked {
        /// The lock file.
        path: PathBuf,
    },
    /// The content is not a ledger.
    #[error("the hugepage ledger {path} cannot be understood ({source}); remove it to forget the reservations in it")]
    Content {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: serde_json::Error,
    },
}

/// Our share of one pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Entry {
    pub(crate) pool: PoolId,
    /// Pages added by us.
    pub(crate) pages: u64,
    /// Size of the pool before our first page. Below it nothing is ours, whatever else changed the pool since.
    pub(crate) baseline: u64,
}

impl Entry {
    /// How many of our pages a pool of this size still holds. Less than `pages` when someone shrank the pool.
    pub(crate) fn held(&self, persistent: u64) -> u64 {
        self.pages.min(persistent.saturating_sub(self.baseline))
    }
}

#[derive(Debug, Serialize, Deserialize)]
struct Content {
    boot_id: String,
    entries: Vec<Entry>,
}

/// The open and locked ledger.
#[derive(Debug)]
pub(crate) struct Ledger {
    path: PathBuf,
    content: Content,
    /// Dropping it unlocks.
    _lock: File,
}

impl Ledger {
    /// Locks and reads the ledger, creating its directory when needed. A missing file is an empty ledger.
    pub(crate) fn open(path: &Path, boot_id: &str) -> Result<Self, LedgerError> {
        if let Some(dir) = path.parent() {
            fs::create_dir_all(dir).map_err(failed("create the directory of", path))?;
        }
        let lock = lock(&path.with_extension("lock"))?;
        let content = read(path)?.filter(|content| content.boot_id == boot_id);
        let content = content.unwrap_or_else(|| Content { boot_id: boot_id.to_owned(), entries: Vec::new() });
        Ok(Self { path: path.to_owned(), content, _lock: lock })
    }

    pub(crate) fn entry(&self, pool: PoolId) -> Option<Entry> {
        self.content.entries.iter().find(|entry| entry.pool == pool).copied()
    }

    pub(crate) fn pools(&self) -> Vec<PoolId> {
        self.content.entries.iter().map(|entry| entry.pool).collect()
    }

    /// Sets the entry of a pool and writes the file; an entry without pages is removed.
    pub(crate) fn record(&mut self, entry: Entry) -> Result<(), LedgerError> {
        self.content.entries.retain(|other| other.pool != entry.pool);
        if entry.pages > 0 {
            self.content.entries.push(entry);
        }
        self.write()
    }

    fn write(&self) -> Result<(), LedgerError> {
        let text = serde_json::to_vec_pretty(&self.content)
            .map_err(|source| LedgerError::Content { path: self.path.clone(), source })?;
        let new = self.path.with_extension("new");
        File::create(&new)
            .and_then(|mut file| file.write_all(&text).and_then(|()| file.sync_all()))
            .and_then(|()| fs::rename(&new, &self.path))
            .map_err(failed("write", &self.path))
    }
}

fn read(path: &Path) -> Result<Option<Content>, LedgerError> {
    let text = match fs::read(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        other => other.map_err(failed("read", path))?,
    };
    let content = serde_json::from_slice(&text);
    content.map(Some).map_err(|source| LedgerError::Content { path: path.to_owned(), source })
}

fn lock(path: &Path) -> Result<File, LedgerError> {
    let open = OpenOptions::new().create(true).truncate(false).write(true).open(path);
    let file = open.map_err(failed("open the lock of", path))?;
    let deadline = Instant::now() + LOCK_DEADLINE;
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(TryLockError::WouldBlock) if Instant::now() < deadline => std::thread::sleep(LOCK_POLL),
            Err(TryLockError::WouldBlock) => return Err(LedgerError::Locked { path: path.to_owned() }),
            Err(TryLockError::Error(source)) => return Err(failed("lock", path)(source)),
        }
    }
}

fn failed(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> LedgerError {
    let path = path.to_owned();
    move |source| LedgerError::Io { action, path, source }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::page_size::PageSize;

    const POOL: PoolId = PoolId { node: 1, page_size: PageSize::MIB_2 };

    #[test]
    fn entries_survive_reopening_and_vanish_at_zero_pages() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run/ledger.json");
        let entry = Entry { pool: POOL, pages: 3, baseline: 7 };
        Ledger::open(&path, "boot").unwrap().record(entry).unwrap();
        let mut ledger = Ledger::open(&path, "boot").unwrap();
        assert_eq!(ledger.entry(POOL), Some(entry));
        ledger.record(Entry { pages: 0, ..entry }).unwrap();
        drop(ledger);
        assert_eq!(Ledger::open(&path, "boot").unwrap().entry(POOL), None);
    }

    #[test]
    fn a_ledger_of_an_earlier_boot_is_empty() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ledger.json");
        Ledger::open(&path, "first").unwrap().record(Entry { pool: POOL, pages: 3, baseline: 0 }).unwrap();
        assert_eq!(Ledger::open(&path, "second").unwrap().entry(POOL), None);
    }

    #[test]
    fn what_cannot_be_understood_is_an_error_and_stays() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ledger.json");
        fs::write(&path, "half a led").unwrap();
        assert!(matches!(Ledger::open(&path, "boot"), Err(LedgerError::Content { .. })));
        assert_eq!(fs::read(&path).unwrap(), b"half a led");
    }

    #[test]
    fn a_shrunk_pool_holds_less_of_ours() {
        let entry = Entry { pool: POOL, pages: 4, baseline: 10 };
        assert_eq!([20, 14, 12, 10, 3].map(|persistent| entry.held(persistent)), [4, 4, 2, 0, 0]);
    }
}
