//! The object store: a crash-safe, ordered, watchable map from [`Key`] to JSON object, on one file or in memory.
//!
//! *What it is.* One global revision counter; every change takes the next revision and is compared with the revision the
//! writer expects. The store stamps `metadata.resourceVersion` with the revision, so stored values must be objects that
//! have a `metadata` object.
//!
//! *Flow.* [`Store::commit`] checks the expectation, stages the change and waits. One flusher thread takes everything
//! staged so far, writes it as one frame, syncs the file, and only then publishes it to readers, watchers and writers
//! (group commit). In memory, a change is published at once.
//!
//! *Invariants.*
//! - An answered commit is on disk. Readers and watchers see nothing that a crash could take back.
//! - Revisions only grow, across restarts too.
//! - A watcher sees each change of its scope once, in order, or is told that it lost its place ([`StoreError::Expired`]).
//!   Watchers have no buffer: each is a position in one bounded history, so a slow one costs nothing and is cut when the
//!   history leaves it behind.
//!
//! *When things fail.* A failed write is rolled back by truncation and reported to its writers; the store goes on. A
//! failed sync, or a failed rollback, leaves the file unknown: every later write is refused until the store is reopened.

mod file;
mod key;
pub mod log;
mod state;
#[cfg(test)]
mod tests;

use std::{
    path::{Path, PathBuf},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread::JoinHandle,
};

pub use key::{Key, Scope};
use serde_json::Value;
use state::{Staged, State};
use tokio::sync::{oneshot, watch};

/// Most changes that may wait for the disk; more are refused with [`StoreError::Busy`].
const STAGED_MAX: usize = 4096;
/// Largest object, in bytes of JSON, as a cluster's database has it.
pub const OBJECT_BYTES_MAX: usize = 3 << 19;
/// Most events one call of [`Watcher::next`] returns, so that no watcher holds the lock for long.
const WATCH_BATCH_MAX: usize = 256;

/// What went wrong in the store.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The object is not at the revision the writer expected.
    #[error("the object is at revision {current}, not at the expected one")]
    Conflict {
        /// Its latest revision, 0 when it does not exist. It may not be published yet: see [`Store::published`].
        current: u64,
    },
    /// The asked revision is older than the history, or was never given out.
    #[error("revision {asked} is not in the history, which spans {oldest} to {newest}")]
    Expired {
        /// The revision asked for.
        asked: u64,
        /// The oldest revision that can be asked for.
        oldest: u64,
        /// The newest revision.
        newest: u64,
    },
    /// Too many changes wait for the disk.
    #[error("{STAGED_MAX} changes already wait for the disk")]
    Busy,
    /// The change could not be made durable; it was rolled back.
    #[error("writing the data file failed and was rolled back: {0}")]
    Write(String),
    /// The data file is in an unknown state; only a restart helps.
    #[error("the store refuses writes until it is reopened: {0}")]
    Failed(String),
    /// The data file is damaged.
    #[error("data file is damaged at byte {offset_bytes}: {what}; restore it from a copy")]
    Corrupt {
        /// Where in the file.
        offset_bytes: u64,
        /// What is wrong there.
        what: String,
    },
    /// The data file cannot be opened.
    #[error("cannot open data file {path}: {source}")]
    Open {
        /// The data file.
        path: String,
        /// The system's error.
        source: Arc<std::io::Error>,
    },
    /// Another process has the data file open.
    #[error("data file {0} is in use by another process")]
    InUse(String),
    /// The value is not an object with a `metadata` object.
    #[error("the value to store is not an object with metadata")]
    NotAnObject,
    /// The object is too large.
    #[error("the object has {bytes} bytes of JSON; allowed are {OBJECT_BYTES_MAX}")]
    TooLarge {
        /// Its size.
        bytes: usize,
    },
    /// The store was closed.
    #[error("the store is closed")]
    Closed,
}

/// What the writer expects to find.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Expect {
    /// No object at the key.
    Absent,
    /// The object at exactly this revision.
    Revision(u64),
}

/// An object in the store. Cloning is cheap.
#[derive(Debug, Clone)]
pub struct Entry {
    /// The revision of its last change.
    pub revision: u64,
    /// The object, with `metadata.resourceVersion` set to the revision.
    pub value: Arc<Value>,
    /// Length of its JSON text.
    bytes: usize,
}

/// One published change.
#[derive(Debug, Clone)]
pub struct Event {
    /// The revision of the change.
    pub revision: u64,
    /// The object's key.
    pub key: Key,
    /// The object after the change, `None` when it was deleted.
    pub value: Option<Arc<Value>>,
    /// The object before the change, `None` when it was created.
    pub previous: Option<Entry>,
    bytes: usize,
}

/// A list of objects as of one revision.
#[derive(Debug, Clone)]
pub struct Listing {
    /// The revision of the list.
    pub revision: u64,
    /// The objects, in key order.
    pub entries: Vec<(Key, Entry)>,
}

/// Limits and thresholds, with defaults fit for a single machine.
#[derive(Debug, Clone)]
pub struct StoreOptions {
    /// Most events kept for watchers and for paged lists.
    pub history_events_max: usize,
    /// Most bytes of objects kept in the history.
    pub history_bytes_max: usize,
    /// The file is compacted when its log part is larger than this and than four times the live objects.
    pub compact_bytes_min: u64,
}

impl Default for StoreOptions {
    /// In memory an object takes several times its JSON: the history tens of MiB at most.
    fn default() -> Self {
        Self { history_events_max: 4096, history_bytes_max: 16 << 20, compact_bytes_min: 8 << 20 }
    }
}

/// What the flusher and the callers share.
#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    work: Condvar,
    /// The newest published revision; watchers wait on it.
    published: watch::Sender<u64>,
}

impl Shared {
    /// The state, even after a panic elsewhere: every change to it is made in one step, after all checks.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The store. Dropping it flushes what is staged and ends the flusher.
#[derive(Debug)]
pub struct Store {
    shared: Arc<Shared>,
    flusher: Mutex<Option<JoinHandle<()>>>,
}

impl Store {
    /// A store that lives in memory only.
    pub fn in_memory(options: StoreOptions) -> Self {
        Self { shared: shared(State::new(options, false)), flusher: Mutex::new(None) }
    }

    /// Opens the data file, creating it when it does not exist. A torn tail is cut.
    ///
    /// # Errors
    /// [`StoreError::Corrupt`], [`StoreError::InUse`] or [`StoreError::Open`].
    pub fn open(path: &Path, options: StoreOptions) -> Result<Self, StoreError> {
        let mut state = State::new(options, true);
        let file = file::DataFile::open(path, &mut state)?;
        let shared = shared(state);
        let flusher = std::thread::Builder::new()
            .name("apiserver-store".to_owned())
            .spawn({
                let shared = shared.clone();
                move || file.flush_loop(&shared)
            })
            .map_err(|source| open_error(path, source))?;
        Ok(Self { shared, flusher: Mutex::new(Some(flusher)) })
    }

    /// The published object at the key.
    pub fn get(&self, key: &Key) -> Option<Entry> {
        self.shared.lock().objects.get(key).cloned()
    }

    /// The newest published revision.
    pub fn revision(&self) -> u64 {
        self.shared.lock().published
    }

    /// The published objects of a scope, after a key if given, as of a past revision if given.
    ///
    /// # Errors
    /// [`StoreError::Expired`] when `at` is not in the history.
    pub fn list(&self, scope: &Scope, after: Option<&Key>, at: Option<u64>) -> Result<Listing, StoreError> {
        self.shared.lock().list(scope, after, at)
    }

    /// Writes (`Some`) or deletes (`None`) one object and waits until the change is durable.
    ///
    /// # Errors
    /// [`StoreError::Conflict`] when the expectation does not hold; [`StoreError::Busy`], [`StoreError::Write`],
    /// [`StoreError::Failed`] or [`StoreError::Closed`] when the change cannot be made durable.
    pub async fn commit(&self, key: Key, expect: Expect, value: Option<Value>) -> Result<Entry, StoreError> {
        let encoded = match &value {
            Some(value) => Some(encode(value)?),
            None => None,
        };
        let durable = {
            let mut state = self.shared.lock();
            let (staged, durable) = Staged::new(key, value, encoded);
            state.stage(staged, expect)?;
            if state.has_file {
                self.shared.work.notify_one();
            } else {
                let staged = state.take_staged();
                state.publish(staged);
                self.shared.published.send_replace(state.published);
            }
            durable
        };
        durable.await.unwrap_or(Err(StoreError::Closed))
    }

    /// Waits while `revision` is on its way to the disk, so that a writer that lost against it can read again.
    pub async fn published(&self, revision: u64) {
        let mut published = self.shared.published.subscribe();
        while self.shared.lock().is_staged(revision) {
            if published.changed().await.is_err() {
                return;
            }
        }
    }

    /// Watches a scope for changes after a revision.
    ///
    /// # Errors
    /// [`StoreError::Expired`] when the revision is not in the history.
    pub fn watch(&self, scope: Scope, since: u64) -> Result<Watcher, StoreError> {
        self.shared.lock().check_history(since)?;
        Ok(Watcher { shared: self.shared.clone(), wake: self.shared.published.subscribe(), scope, position: since })
    }

    /// Forgets the history up to now, as a compaction of a real cluster's database does. For tests and for operators.
    pub fn compact_history(&self) {
        let mut state = self.shared.lock();
        let published = state.published;
        state.forget_until(published);
    }

    /// Flushes what is staged and ends the flusher; later commits are refused.
    pub fn close(&self) {
        self.shared.lock().closed = true;
        self.shared.work.notify_all();
        self.shared.published.send_modify(|_| ());
        let flusher = self.flusher.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(flusher) = flusher {
            // A panic of the flusher was reported when it happened; there is nothing to add here.
            let _ = flusher.join();
        }
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        self.close();
    }
}

fn shared(state: State) -> Arc<Shared> {
    let (published, _) = watch::channel(state.published);
    Arc::new(Shared { state: Mutex::new(state), work: Condvar::new(), published })
}

fn open_error(path: &Path, source: std::io::Error) -> StoreError {
    StoreError::Open { path: PathBuf::from(path).display().to_string(), source: Arc::new(source) }
}

/// The JSON text to store: without the resource version, which is the record's revision.
fn encode(value: &Value) -> Result<Vec<u8>, StoreError> {
    if !value.get("metadata").is_some_and(Value::is_object) {
        return Err(StoreError::NotAnObject);
    }
    let encoded = serde_json::to_vec(value).map_err(|_| StoreError::NotAnObject)?;
    if encoded.len() > OBJECT_BYTES_MAX {
        return Err(StoreError::TooLarge { bytes: encoded.len() });
    }
    Ok(encoded)
}

type Durable = oneshot::Receiver<Result<Entry, StoreError>>;

/// A position in the history of a scope.
#[derive(Debug)]
pub struct Watcher {
    shared: Arc<Shared>,
    wake: watch::Receiver<u64>,
    scope: Scope,
    position: u64,
}

impl Watcher {
    /// The revision up to which everything was returned.
    pub fn position(&self) -> u64 {
        self.position
    }

    /// The next changes, oldest first, never empty. Cancel safe.
    ///
    /// # Errors
    /// [`StoreError::Expired`] when the history has left this watcher behind; [`StoreError::Closed`] at the end.
    pub async fn next(&mut self) -> Result<Vec<Arc<Event>>, StoreError> {
        loop {
            self.wake.borrow_and_update();
            let batch = self.take_ready()?;
            if !batch.is_empty() {
                return Ok(batch);
            }
            if self.shared.lock().closed {
                return Err(StoreError::Closed);
            }
            self.wake.changed().await.map_err(|_| StoreError::Closed)?;
        }
    }

    /// The changes that are there already; empty when there are none.
    ///
    /// # Errors
    /// [`StoreError::Expired`] as for [`Watcher::next`].
    pub fn take_ready(&mut self) -> Result<Vec<Arc<Event>>, StoreError> {
        let state = self.shared.lock();
        state.check_history(self.position)?;
        let (batch, position) = state.events_after(&self.scope, self.position, WATCH_BATCH_MAX);
        self.position = position;
        Ok(batch)
    }
}
