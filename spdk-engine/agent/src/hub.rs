//! What this node has and what changed, for any number of watchers.
//!
//! *What it is.* A table of objects, each with the version of its last change. A watcher remembers the version that it
//! has seen and asks for what is newer.
//!
//! *Invariants.* A watcher's memory here is one number, so a slow one costs nothing and is never cut off for being
//! slow: it sees the newest state of each object, and changes between may be merged into one message. Order is that of
//! the changes.
//!
//! *When things fail.* Names of objects that went are kept for [`GONE_MAX`] changes. A watcher that is further behind
//! gets [`Behind`] and begins anew.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use addax_proto::engine_v1 as pb;
use pb::event::Object;
use tokio::sync::watch;

/// How many objects that went are remembered.
pub const GONE_MAX: usize = 1024;

/// Which object.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Key {
    /// The agent itself.
    Info,
    /// A disk by name.
    Disk(String),
    /// A replica by name.
    Replica(String),
    /// An engine by volume.
    Engine(String),
}

/// The watcher has missed that objects went and must begin anew.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("too far behind: watch again")]
pub struct Behind;

#[derive(Debug)]
struct Entry {
    version: u64,
    object: Object,
    gone: bool,
}

#[derive(Debug, Default)]
struct Table {
    version: u64,
    entries: BTreeMap<Key, Entry>,
    /// Everything that went at or before this version may be forgotten.
    forgotten: u64,
}

/// The table of objects; cheap to clone.
#[derive(Clone, Debug)]
pub struct Hub {
    table: Arc<Mutex<Table>>,
    version: watch::Sender<u64>,
}

impl Default for Hub {
    fn default() -> Self {
        Self { table: Arc::default(), version: watch::Sender::new(0) }
    }
}

impl Hub {
    /// Tells an object's whole state. Nothing happens when it is as it was.
    pub fn set(&self, key: Key, object: Object) {
        self.change(key, object, false);
    }

    /// Tells that a disk, a replica or an engine went.
    pub fn remove(&self, key: Key) {
        let object = match &key {
            Key::Replica(name) => Object::ReplicaGone(name.clone()),
            Key::Engine(volume) => Object::EngineGone(volume.clone()),
            Key::Disk(name) => Object::DiskGone(name.clone()),
            Key::Info => return,
        };
        self.change(key, object, true);
    }

    fn change(&self, key: Key, object: Object, gone: bool) {
        let version = {
            let mut table = self.table.lock().unwrap_or_else(PoisonError::into_inner);
            match table.entries.get(&key) {
                Some(entry) if entry.object == object => return,
                None if gone => return,
                _ => {}
            }
            table.version += 1;
            let version = table.version;
            table.entries.insert(key, Entry { version, object, gone });
            table.forget_surplus();
            version
        };
        self.version.send_replace(version);
    }

    /// What is there now, and the version that this is.
    pub fn all(&self) -> (Vec<Object>, u64) {
        let table = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        let objects = table.entries.values().filter(|entry| !entry.gone).map(|entry| entry.object.clone()).collect();
        (objects, table.version)
    }

    /// What changed after a version, in order, and the version that this is.
    ///
    /// # Errors
    /// [`Behind`].
    pub fn after(&self, seen: u64) -> Result<(Vec<Object>, u64), Behind> {
        let table = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        if seen < table.forgotten {
            return Err(Behind);
        }
        let mut newer: Vec<&Entry> = table.entries.values().filter(|entry| entry.version > seen).collect();
        newer.sort_by_key(|entry| entry.version);
        Ok((newer.into_iter().map(|entry| entry.object.clone()).collect(), table.version))
    }

    /// A channel that wakes at every change.
    pub fn subscribe(&self) -> watch::Receiver<u64> {
        self.version.subscribe()
    }

    /// A disk as last told.
    pub fn disk(&self, name: &str) -> Option<pb::Disk> {
        match self.get(&Key::Disk(name.to_owned())) {
            Some(Object::Disk(disk)) => Some(disk),
            _ => None,
        }
    }

    /// A replica as last told.
    pub fn replica(&self, name: &str) -> Option<pb::Replica> {
        match self.get(&Key::Replica(name.to_owned())) {
            Some(Object::Replica(replica)) => Some(replica),
            _ => None,
        }
    }

    /// An engine as last told.
    pub fn engine(&self, volume: &str) -> Option<pb::Engine> {
        match self.get(&Key::Engine(volume.to_owned())) {
            Some(Object::Engine(engine)) => Some(engine),
            _ => None,
        }
    }

    /// The agent as last told.
    pub fn info(&self) -> Option<pb::Info> {
        match self.get(&Key::Info) {
            Some(Object::Info(info)) => Some(info),
            _ => None,
        }
    }

    fn get(&self, key: &Key) -> Option<Object> {
        let table = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        table.entries.get(key).filter(|entry| !entry.gone).map(|entry| entry.object.clone())
    }
}

impl Table {
    fn forget_surplus(&mut self) {
        let gone = self.entries.iter().filter(|(_, entry)| entry.gone);
        let mut gone: Vec<(u64, Key)> = gone.map(|(key, entry)| (entry.version, key.clone())).collect();
        if gone.len() <= GONE_MAX {
            return;
        }
        gone.sort_unstable();
        let surplus = gone.len() - GONE_MAX;
        for (version, key) in gone.into_iter().take(surplus) {
            self.entries.remove(&key);
            self.forgotten = self.forgotten.max(version);
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn replica(name: &str, epoch: u64) -> Object {
        Object::Replica(pb::Replica { name: name.to_owned(), promoted_epoch: epoch, ..Default::default() })
    }

    fn key(name: &str) -> Key {
        Key::Replica(name.to_owned())
    }

    #[test]
    fn a_watcher_sees_each_change_once_and_the_newest_state() {
        let hub = Hub::default();
        hub.set(key("b"), replica("b", 1));
        let (all, seen) = hub.all();
        assert_eq!(all, [replica("b", 1)]);
        hub.set(key("b"), replica("b", 1));
        assert_eq!(hub.after(seen).unwrap().0, []);
        hub.set(key("b"), replica("b", 2));
        hub.set(key("a"), replica("a", 1));
        hub.set(key("b"), replica("b", 3));
        let (changes, seen) = hub.after(seen).unwrap();
        assert_eq!(changes, [replica("a", 1), replica("b", 3)]);
        hub.remove(key("a"));
        hub.remove(key("never"));
        assert_eq!(hub.after(seen).unwrap().0, [Object::ReplicaGone("a".to_owned())]);
        assert_eq!(hub.all().0, [replica("b", 3)]);
        assert!(hub.replica("a").is_none() && hub.replica("b").is_some());
    }

    #[test]
    fn one_far_behind_begins_anew_and_memory_is_bounded() {
        let hub = Hub::default();
        for n in 0..2 * GONE_MAX {
            let name = n.to_string();
            hub.set(key(&name), replica(&name, 1));
            hub.remove(key(&name));
        }
        assert_eq!(hub.after(0), Err(Behind));
        assert_eq!(hub.table.lock().unwrap().entries.len(), GONE_MAX);
        let (all, seen) = hub.all();
        assert!(all.is_empty());
        assert_eq!(hub.after(seen).unwrap().0, []);
    }
}
