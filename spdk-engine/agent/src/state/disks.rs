//! Which disks this node has, and what each was found to be.
//!
//! *What it is.* `disks` (two slots, see [`super::slots`]) in the runtime folder: the wishes as managers gave them, and
//! the identity of each disk: the UUID of its lvstore and that of its device.
//!
//! *Invariants.* Once an identity is recorded under a name, nothing is ever formatted under that name. The name of an
//! lvstore that is being made, and the device that it is made on, are durable before it is begun, so that after a crash it
//! is known as one's own, and nothing else is taken for it. What is told here is what was written.
//!
//! *When things fail.* A file that cannot be read stops the agent's start: without it a disk might be mistaken. A write
//! that fails changes nothing here, so that the same change is written when it is asked for again.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::slots::{Slots, SlotsError};

/// Where a disk's bytes are.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", tag = "kind")]
pub enum Place {
    /// A file, which is made with that many bytes if it is absent and may be made.
    File {
        /// Its path.
        path: PathBuf,
        /// Bytes of a new one; 0: it must be there.
        size: u64,
    },
    /// A block device of this machine.
    Block {
        /// Its path.
        path: PathBuf,
    },
    /// A namespace reached by NVMe/TCP.
    Nvme {
        /// IP address.
        traddr: String,
        /// Port.
        trsvcid: u16,
        /// Subsystem.
        subnqn: String,
        /// Number of the namespace.
        nsid: u32,
    },
}

/// A disk that a manager asked for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DiskWish {
    /// Its name on this node.
    pub name: String,
    /// Where its bytes are.
    pub place: Place,
    /// Whether an empty device may be formatted.
    pub create: bool,
    /// Fingerprint of what may be destroyed.
    #[serde(default)]
    pub erase: String,
    /// The lvstore that must be there.
    #[serde(default)]
    pub uuid: Option<Uuid>,
    /// Identity that the device must have; empty: the one recorded.
    #[serde(default)]
    pub device: String,
}

/// What a disk was found to be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DiskIdentity {
    /// Its lvstore.
    pub lvstore: Uuid,
    /// Its device; empty when that has no identity of its own.
    pub device: String,
}

/// A formatting that was begun.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Forming {
    /// Name of the lvstore that is being made.
    pub lvstore: String,
    /// Identity of the device that it is made on; empty when that has none of its own.
    pub device: String,
}

/// A disk as it is remembered.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DiskRecord {
    /// What was asked for.
    pub wish: DiskWish,
    /// What was found, once that was decided.
    #[serde(default)]
    pub identity: Option<DiskIdentity>,
    /// The formatting under way; none before and after.
    #[serde(default)]
    pub forming: Option<Forming>,
}

/// The file of disks.
#[derive(Debug)]
pub struct DiskStore {
    slots: Slots,
    records: BTreeMap<String, DiskRecord>,
}

impl DiskStore {
    /// Opens the file in the runtime folder.
    ///
    /// # Errors
    /// See [`SlotsError`].
    pub fn open(runtime_dir: &Path) -> Result<Self, SlotsError> {
        let (slots, payload) = Slots::open(runtime_dir, "disks")?;
        let records = match payload {
            None => BTreeMap::new(),
            Some(payload) => serde_json::from_slice(&payload)
                .map_err(|error| SlotsError::Corrupt { path: runtime_dir.join("disks"), detail: error.to_string() })?,
        };
        Ok(Self { slots, records })
    }

    /// All disks.
    pub fn all(&self) -> impl Iterator<Item = &DiskRecord> {
        self.records.values()
    }

    /// Makes a disk's record durable.
    ///
    /// # Errors
    /// See [`SlotsError`].
    pub fn put(&mut self, record: &DiskRecord) -> Result<(), SlotsError> {
        if self.records.get(&record.wish.name) == Some(record) {
            return Ok(());
        }
        let mut next = self.records.clone();
        next.insert(record.wish.name.clone(), record.clone());
        self.write(next)
    }

    /// Forgets a disk durably.
    ///
    /// # Errors
    /// See [`SlotsError`].
    pub fn remove(&mut self, name: &str) -> Result<(), SlotsError> {
        let mut next = self.records.clone();
        match next.remove(name) {
            Some(_) => self.write(next),
            None => Ok(()),
        }
    }

    fn write(&mut self, next: BTreeMap<String, DiskRecord>) -> Result<(), SlotsError> {
        // Plain maps of strings and numbers always serialise.
        let payload = serde_json::to_vec(&next).unwrap_or_default();
        self.slots.write(&payload)?;
        self.records = next;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn disks_survive_and_go() {
        let dir = tempfile::tempdir().unwrap();
        let place = |n: u32| match n {
            0 => Place::File { path: "/d/file".into(), size: 1 << 30 },
            1 => Place::Block { path: "/dev/sdb".into() },
            _ => Place::Nvme { traddr: "127.0.0.1".to_owned(), trsvcid: 4420, subnqn: "nqn.x".to_owned(), nsid: 1 },
        };
        let record = |n: u32| DiskRecord {
            wish: DiskWish {
                name: format!("d{n}"),
                place: place(n),
                create: n == 0,
                erase: String::new(),
                uuid: None,
                device: String::new(),
            },
            identity: (n == 1).then(|| DiskIdentity { lvstore: Uuid::new_v4(), device: "serial".to_owned() }),
            forming: (n == 2).then(|| Forming { lvstore: "addax-1".to_owned(), device: "serial".to_owned() }),
        };
        let records = [record(0), record(1), record(2)];
        let mut store = DiskStore::open(dir.path()).unwrap();
        records.iter().for_each(|record| store.put(record).unwrap());
        assert_eq!(DiskStore::open(dir.path()).unwrap().all().collect::<Vec<_>>(), records.iter().collect::<Vec<_>>());
        store.remove("d1").unwrap();
        store.remove("d1").unwrap();
        assert_eq!(DiskStore::open(dir.path()).unwrap().all().count(), 2);
    }

    #[test]
    fn a_write_that_failed_is_done_when_it_is_asked_for_again() {
        let dir = tempfile::tempdir().unwrap();
        let wish = DiskWish {
            name: "d".to_owned(),
            place: Place::Block { path: "/dev/sdb".into() },
            create: false,
            erase: String::new(),
            uuid: None,
            device: String::new(),
        };
        let record = DiskRecord { wish, identity: None, forming: None };
        let mut store = DiskStore::open(dir.path()).unwrap();
        // Folders in the place of both files: nothing can be written.
        let block = |made: bool| {
            for file in ["disks.a", "disks.b"].map(|file| dir.path().join(file)) {
                let kept = PathBuf::from(format!("{}.kept", file.display()));
                if made {
                    let _ = std::fs::rename(&file, &kept);
                    std::fs::create_dir(&file).unwrap();
                } else {
                    std::fs::remove_dir(&file).unwrap();
                    let _ = std::fs::rename(&kept, &file);
                }
            }
        };
        block(true);
        store.put(&record).unwrap_err();
        assert_eq!(store.all().count(), 0);
        block(false);
        store.put(&record).unwrap();
        assert_eq!(DiskStore::open(dir.path()).unwrap().all().count(), 1);
        block(true);
        store.remove("d").unwrap_err();
        assert_eq!(store.all().count(), 1);
        block(false);
        store.remove("d").unwrap();
        assert_eq!(DiskStore::open(dir.path()).unwrap().all().count(), 0);
    }
}
