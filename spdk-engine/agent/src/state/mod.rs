//! What the agent knows durably: disks, the state of replicas, the engines to hold.
//!
//! *What it is.* Files in the agent's runtime folder, each a record in two slots (see [`slots`]): `disks` and `engines`,
//! and for every replica `replicas/<name>` with its [`ReplicaRecord`]: volume, size, where its lvol is, lineage and the
//! promoted epoch and instance (consistency rules 13 and 14). The lvol itself stays a pure image.
//!
//! *Invariants.* The record is durable before the lvol is made and is removed after it. It names the lvstore by UUID, so
//! it is never taken for the record of what another disk holds. The promoted epoch never falls. What the engine writes
//! beside the data (superblock, write-intent bits) is in a second lvol, see [`MetaArea`]; the agent does not read it.
//!
//! *When things fail.* [`StateError`] names the file. Nothing is repaired here.

mod disks;
mod engines;
pub mod slots;

pub use disks::{DiskIdentity, DiskRecord, DiskStore, DiskWish, Forming, Place};
pub use engines::{EngineStore, EngineWish, MemberWish, Served};

use std::fs;
use std::path::{Path, PathBuf};

use mirror_core::meta::{Geometry, META_BLOCK_BYTES, MetaError};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use slots::{Slots, SlotsError, remove_file, sync_folder};

/// Replica sizes are multiples of this.
pub const BLOCK_SIZE: u32 = 4096;

/// Ends the names of meta lvols; replicas may not be called so.
pub const META_SUFFIX: &str = "-meta";
/// The longest name of an lvol.
const LVOL_NAME_MAX: usize = 63;

/// Name of the meta lvol of a replica: its own with a suffix, or, where that is too long for an lvol, one made from it.
#[must_use]
pub fn meta_lvol_name(replica: &str) -> String {
    if replica.len() + META_SUFFIX.len() <= LVOL_NAME_MAX {
        return format!("{replica}{META_SUFFIX}");
    }
    format!("{}{META_SUFFIX}", Uuid::new_v5(&Uuid::NAMESPACE_OID, replica.as_bytes()).simple())
}

/// The meta area of a replica: a small lvol beside the data's, for the engine.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MetaArea {
    /// Its lvol; `None` until that was made.
    #[serde(default)]
    pub lvol: Option<Uuid>,
}

impl MetaArea {
    /// Bytes that the meta area of a volume of `size` bytes needs.
    ///
    /// # Errors
    /// What is wrong with the size.
    pub fn bytes_for(size: u64) -> Result<u64, MetaError> {
        let geometry = Geometry::for_volume(size / u64::from(BLOCK_SIZE), BLOCK_SIZE)?;
        Ok(geometry.blocks().saturating_mul(META_BLOCK_BYTES as u64))
    }
}

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
    /// The disk that it is on, by its name on this node.
    pub disk: String,
    /// The lvstore that it is in.
    pub lvstore: Uuid,
    /// Its lvol; `None` until that was made.
    #[serde(default)]
    pub lvol: Option<Uuid>,
    /// Its meta area; `None` for replicas from before there were any.
    #[serde(default)]
    pub meta: Option<MetaArea>,
    /// Identity of the copy; its namespace's UUID comes from it.
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
    /// It was deleted while its disk was away: the lvol goes as soon as the disk is back.
    #[serde(default)]
    pub deleted: bool,
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
}

/// The file of one replica.
#[derive(Debug)]
pub struct ReplicaFile {
    folder: PathBuf,
    name: String,
    slots: Slots,
}

impl ReplicaFile {
    /// Opens the file of a replica; `None` as record when there is none.
    ///
    /// # Errors
    /// See [`StateError`].
    pub fn open(folder: &Path, name: &str) -> Result<(Self, Option<ReplicaRecord>), StateError> {
        let (slots, payload) = Slots::open(folder, name)?;
        let file = Self { folder: folder.to_owned(), name: name.to_owned(), slots };
        let Some(payload) = payload else { return Ok((file, None)) };
        let bad = |reason: String| StateError::Record { path: folder.join(name), reason };
        let record: ReplicaRecord = serde_json::from_slice(&payload).map_err(|error| bad(error.to_string()))?;
        if record.replica != name {
            return Err(bad(format!("it is of replica '{}'", record.replica)));
        }
        Ok((file, Some(record)))
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
}

/// Removes the record of a replica, whatever is in its files.
///
/// # Errors
/// See [`StateError`].
pub fn remove_replica(folder: &Path, name: &str) -> Result<(), StateError> {
    remove_file(&folder.join(format!("{name}.a")))?;
    remove_file(&folder.join(format!("{name}.b")))?;
    Ok(sync_folder(folder)?)
}

/// The names of all replicas that have a record in a folder.
///
/// # Errors
/// [`StateError::Io`].
pub fn replica_names(folder: &Path) -> Result<Vec<String>, StateError> {
    let io = |source| StateError::Io { path: folder.to_owned(), source };
    let mut names = std::collections::BTreeSet::new();
    for entry in fs::read_dir(folder).map_err(io)? {
        let file_name = entry.map_err(io)?.file_name();
        if let Some((name, "a" | "b")) = file_name.to_str().and_then(|text| text.rsplit_once('.')) {
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
            disk: "d".to_owned(),
            lvstore: Uuid::new_v4(),
            lvol: None,
            meta: None,
            uuid: Uuid::new_v4(),
            lineage: String::new(),
            promoted_epoch: 0,
            promoted_instance: String::new(),
            created: 0,
            running: false,
            deleted: false,
        }
    }

    #[test]
    fn a_record_is_made_found_and_removed() {
        let dir = tempfile::tempdir().unwrap();
        let (mut file, none) = ReplicaFile::open(dir.path(), "r1").unwrap();
        assert_eq!(none, None);
        let mut record = record("r1");
        file.save(&record).unwrap();
        record.promoted_epoch = 3;
        file.save(&record).unwrap();
        assert_eq!(ReplicaFile::open(dir.path(), "r1").unwrap().1, Some(record));
        assert_eq!(replica_names(dir.path()).unwrap(), ["r1"]);
        remove_replica(dir.path(), "r1").unwrap();
        remove_replica(dir.path(), "r1").unwrap();
        assert!(replica_names(dir.path()).unwrap().is_empty());
    }

    #[test]
    fn a_record_from_before_there_were_meta_areas_has_none() {
        let mut value = serde_json::to_value(record("r1")).unwrap();
        value.as_object_mut().unwrap().remove("meta").unwrap();
        assert_eq!(serde_json::from_value::<ReplicaRecord>(value).unwrap().meta, None);
    }

    #[test]
    fn names_and_sizes_of_meta_lvols_are_what_lvols_may_have() {
        assert_eq!(meta_lvol_name("v-r-1"), "v-r-1-meta");
        let (long, other) = ("a".repeat(63), "a".repeat(62));
        assert!(meta_lvol_name(&long).len() <= LVOL_NAME_MAX && meta_lvol_name(&long).ends_with(META_SUFFIX));
        assert_ne!(meta_lvol_name(&long), meta_lvol_name(&other));
        // Two superblock slots, one block of bits, one of stamps.
        assert_eq!(MetaArea::bytes_for(1 << 20).unwrap(), 4 * 4096);
        assert!(MetaArea::bytes_for(1 << 40).unwrap() < 9 << 20, "the most regions that there are");
        assert!(MetaArea::bytes_for(0).is_err());
    }

    #[test]
    fn a_record_of_another_replica_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let (mut file, _) = ReplicaFile::open(dir.path(), "r1").unwrap();
        file.save(&record("r2")).unwrap();
        assert!(matches!(ReplicaFile::open(dir.path(), "r1"), Err(StateError::Record { .. })));
    }
}
