//! What the agent knows durably: disks, the state of replicas, the engines to hold.
//!
//! *What it is.* A replica's data is a sparse file `<disk>/replicas/<name>.img`, a pure image. Beside it lie two slots
//! (`<name>.a`, `<name>.b`, see [`slots`]) with its [`ReplicaRecord`]: volume, size, lineage and the promoted epoch and
//! instance (consistency rules 13 and 14). `engines.json` in the runtime folder tells which engines this node holds.
//!
//! *Invariants.* The record is durable before the image is made and is removed after it, so an image without a record
//! was damaged and is refused, never taken for a fresh replica. The promoted epoch never falls.
//!
//! *When things fail.* [`StateError`] names the file. Nothing is repaired here.

mod disk;
mod engines;
pub mod slots;

pub use disk::{DiskError, DiskInfo, Disks, MARKER_FILE, REPLICAS_DIR};
pub use engines::{EngineStore, EngineWish, MemberWish};

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use slots::{Slots, SlotsError, remove_file, sync_folder};

/// Replica sizes are multiples of this.
pub const BLOCK_SIZE: u32 = 4096;

/// The durable state of a replica.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ReplicaRecord {
    /// Its name.
    pub replica: String,
    /// The volume that it is a copy of.
    pub volume: String,
    /// Size in bytes.
    pub size: u64,
    /// UUID of its device.
    pub uuid: Uuid,
    /// The lineage under which it was promoted; empty before the first promote.
    #[serde(default)]
    pub lineage: String,
    /// The promoted epoch; 0 before the first promote.
    #[serde(default)]
    pub promoted_epoch: u64,
    /// The promoted engine instance.
    #[serde(default)]
    pub promoted_instance: String,
    /// Seconds since 1970 when it was made.
    #[serde(default)]
    pub created: u64,
    /// Whether it is to be exported.
    #[serde(default)]
    pub running: bool,
}

impl ReplicaRecord {
    /// Whether it never was promoted, so that it holds no data of any volume.
    pub fn is_fresh(&self) -> bool {
        self.promoted_epoch == 0
    }
}

/// Why a replica's files cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StateError {
    /// The slots.
    #[error(transparent)]
    Slots(#[from] SlotsError),
    /// The file system.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The record is whole, but not a replica's.
    #[error("{path}: the record cannot be understood: {reason}")]
    Record {
        /// The slots' path without suffix.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// There is an image, but no record.
    #[error(
        "{0} has no record (.a, .b) beside it: what it holds is unknown, so it is not used; delete the replica to free it"
    )]
    Orphan(PathBuf),
    /// There is a record, but no image.
    #[error("{0} is gone, although its record says that it held data")]
    ImageGone(PathBuf),
    /// The image has another length than the record says.
    #[error("{path} has {found} bytes; its record says {expected}")]
    ImageSize {
        /// The image.
        path: PathBuf,
        /// Its length.
        found: u64,
        /// The length it should have.
        expected: u64,
    },
}

/// The files of one replica.
#[derive(Debug)]
pub struct ReplicaFiles {
    folder: PathBuf,
    name: String,
    slots: Slots,
}

impl ReplicaFiles {
    /// Opens the files of a replica; `None` as record when there are none.
    ///
    /// # Errors
    /// See [`StateError`]: an image without a readable record is one.
    pub fn open(folder: &Path, name: &str) -> Result<(Self, Option<ReplicaRecord>), StateError> {
        let (slots, payload) = Slots::open(folder, name)?;
        let files = Self { folder: folder.to_owned(), name: name.to_owned(), slots };
        let Some(payload) = payload else {
            if files.image().exists() {
                return Err(StateError::Orphan(files.image()));
            }
            return Ok((files, None));
        };
        let bad = |reason: String| StateError::Record { path: folder.join(name), reason };
        let record: ReplicaRecord = serde_json::from_slice(&payload).map_err(|error| bad(error.to_string()))?;
        if record.replica != name {
            return Err(bad(format!("it is of replica '{}'", record.replica)));
        }
        Ok((files, Some(record)))
    }

    /// Path of the image.
    pub fn image(&self) -> PathBuf {
        self.folder.join(format!("{}.img", self.name))
    }

    /// Makes a record durable.
    ///
    /// # Errors
    /// See [`StateError`].
    pub fn save(&mut self, record: &ReplicaRecord) -> Result<(), StateError> {
        let payload = serde_json::to_vec(record)
            .map_err(|error| StateError::Record { path: self.folder.join(&self.name), reason: error.to_string() })?;
        Ok(self.slots.write(&payload)?)
    }

    /// Makes sure that the image is there with the record's size. It is made only for a replica that is fresh.
    ///
    /// # Errors
    /// See [`StateError`].
    pub fn ensure_image(&self, record: &ReplicaRecord) -> Result<(), StateError> {
        let path = self.image();
        let io = |source| StateError::Io { path: path.clone(), source };
        let length = match fs::metadata(&path) {
            Ok(meta) => Some(meta.len()),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
            Err(error) => return Err(io(error)),
        };
        match length {
            Some(found) if found == record.size => Ok(()),
            None | Some(0) if record.is_fresh() => {
                let file = File::options().create(true).truncate(false).write(true).open(&path).map_err(io)?;
                file.set_len(record.size).and_then(|()| file.sync_all()).map_err(io)?;
                Ok(sync_folder(&self.folder)?)
            }
            None => Err(StateError::ImageGone(path)),
            Some(found) => Err(StateError::ImageSize { path, found, expected: record.size }),
        }
    }

    /// Bytes that the image takes on the disk.
    pub fn allocated_bytes(&self) -> u64 {
        fs::metadata(self.image()).map_or(0, |meta| meta.blocks() * 512)
    }
}

/// Removes all files of a replica, whatever state they are in.
///
/// # Errors
/// See [`StateError`].
pub fn delete_replica_files(folder: &Path, name: &str) -> Result<(), StateError> {
    // The image goes first: a record without an image can be deleted again, an image without a record looks like loss.
    remove_file(&folder.join(format!("{name}.img")))?;
    sync_folder(folder)?;
    remove_file(&folder.join(format!("{name}.a")))?;
    remove_file(&folder.join(format!("{name}.b")))?;
    Ok(sync_folder(folder)?)
}

/// Whether any file of a replica is there.
pub fn has_replica_files(folder: &Path, name: &str) -> bool {
    ["img", "a", "b"].iter().any(|suffix| folder.join(format!("{name}.{suffix}")).exists())
}

/// The names of all replicas that have a file in a folder.
///
/// # Errors
/// [`StateError::Io`].
pub fn replica_names(folder: &Path) -> Result<Vec<String>, StateError> {
    let io = |source| StateError::Io { path: folder.to_owned(), source };
    let mut names = std::collections::BTreeSet::new();
    for entry in fs::read_dir(folder).map_err(io)? {
        let file_name = entry.map_err(io)?.file_name();
        if let Some((name, "img" | "a" | "b")) = file_name.to_str().and_then(|text| text.rsplit_once('.')) {
            names.insert(name.to_owned());
        }
    }
    Ok(names.into_iter().collect())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn record(name: &str) -> ReplicaRecord {
        ReplicaRecord {
            replica: name.to_owned(),
            volume: "v".to_owned(),
            size: 1 << 20,
            uuid: Uuid::new_v4(),
            lineage: String::new(),
            promoted_epoch: 0,
            promoted_instance: String::new(),
            created: 0,
            running: false,
        }
    }

    #[test]
    fn a_replica_is_made_found_and_deleted() {
        let dir = tempfile::tempdir().unwrap();
        let (mut files, none) = ReplicaFiles::open(dir.path(), "r1").unwrap();
        assert_eq!(none, None);
        let mut record = record("r1");
        files.save(&record).unwrap();
        files.ensure_image(&record).unwrap();
        assert_eq!(fs::metadata(files.image()).unwrap().len(), 1 << 20);
        record.promoted_epoch = 3;
        files.save(&record).unwrap();
        let (files, found) = ReplicaFiles::open(dir.path(), "r1").unwrap();
        assert_eq!(found, Some(record.clone()));
        files.ensure_image(&record).unwrap();
        assert_eq!(replica_names(dir.path()).unwrap(), ["r1"]);
        delete_replica_files(dir.path(), "r1").unwrap();
        delete_replica_files(dir.path(), "r1").unwrap();
        assert!(replica_names(dir.path()).unwrap().is_empty());
    }

    #[test]
    fn an_image_without_a_record_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("r1.img"), b"data").unwrap();
        assert!(matches!(ReplicaFiles::open(dir.path(), "r1"), Err(StateError::Orphan(_))));
        fs::write(dir.path().join("r1.a"), b"").unwrap();
        assert!(matches!(ReplicaFiles::open(dir.path(), "r1"), Err(StateError::Slots(SlotsError::Corrupt { .. }))));
    }

    #[test]
    fn a_lost_or_cut_image_is_not_made_anew() {
        let dir = tempfile::tempdir().unwrap();
        let (mut files, _) = ReplicaFiles::open(dir.path(), "r1").unwrap();
        let mut record = record("r1");
        record.promoted_epoch = 1;
        files.save(&record).unwrap();
        assert!(matches!(files.ensure_image(&record), Err(StateError::ImageGone(_))));
        assert!(!files.image().exists());
        fs::write(files.image(), b"short").unwrap();
        assert!(matches!(files.ensure_image(&record), Err(StateError::ImageSize { found: 5, .. })));
    }

    #[test]
    fn a_crash_before_the_image_was_made_is_finished() {
        let dir = tempfile::tempdir().unwrap();
        let (mut files, _) = ReplicaFiles::open(dir.path(), "r1").unwrap();
        let record = record("r1");
        files.save(&record).unwrap();
        fs::write(files.image(), b"").unwrap();
        files.ensure_image(&record).unwrap();
        assert_eq!(fs::metadata(files.image()).unwrap().len(), record.size);
    }
}
