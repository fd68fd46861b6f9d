//! Disks: folders of this node that hold replica files.
//!
//! *What it is.* A disk is a folder with a marker file (`addax-disk.json`, a UUID) and a folder `replicas/`. The UUID
//! tells a manager whether the disk that is mounted there is the one it knows.
//!
//! *Invariants.* A marker is written only into a folder without replicas. It is never rewritten.
//!
//! *When things fail.* A folder that is absent, not writable, or has replicas without a readable marker, is reported
//! with its error and used for nothing.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::slots::sync_folder;

/// Name of the marker file.
pub const MARKER_FILE: &str = "addax-disk.json";
/// Name of the folder with the replicas' files.
pub const REPLICAS_DIR: &str = "replicas";

/// Why a disk cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DiskError {
    /// No disk has that name.
    #[error("disk '{0}' is not one of this node's disks")]
    Unknown(String),
    /// The file system failed.
    #[error("disk {path}: {reason}")]
    Unusable {
        /// The folder.
        path: PathBuf,
        /// Why.
        reason: String,
    },
}

#[derive(Debug, Serialize, Deserialize)]
struct Marker {
    version: u32,
    uuid: Uuid,
}

/// What is known of a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskInfo {
    /// Its name on this node.
    pub name: String,
    /// Its folder.
    pub path: PathBuf,
    /// Its marker's UUID.
    pub uuid: Option<Uuid>,
    /// Size of the file system in bytes.
    pub size_bytes: u64,
    /// Bytes that can still be written.
    pub available_bytes: u64,
    /// Why it cannot be used.
    pub error: Option<String>,
}

/// The disks of this node, by name.
#[derive(Clone, Debug, Default)]
pub struct Disks {
    folders: BTreeMap<String, PathBuf>,
}

impl Disks {
    /// The disks of these names and folders.
    pub fn new(folders: BTreeMap<String, PathBuf>) -> Self {
        Self { folders }
    }

    /// The folder with the replicas of a disk, which is ready to be used.
    ///
    /// # Errors
    /// See [`DiskError`].
    pub fn replicas_dir(&self, name: &str) -> Result<PathBuf, DiskError> {
        let path = self.folders.get(name).ok_or_else(|| DiskError::Unknown(name.to_owned()))?;
        prepare(path)?;
        Ok(path.join(REPLICAS_DIR))
    }

    /// Names and folders of all replicas' disks that can be used.
    pub fn usable(&self) -> Vec<(String, PathBuf)> {
        let usable = |name: &String| self.replicas_dir(name).ok().map(|dir| (name.clone(), dir));
        self.folders.keys().filter_map(usable).collect()
    }

    /// What is known of every disk.
    pub fn list(&self) -> Vec<DiskInfo> {
        self.folders.iter().map(|(name, path)| inspect(name, path)).collect()
    }
}

fn inspect(name: &str, path: &Path) -> DiskInfo {
    let mut info = DiskInfo {
        name: name.to_owned(),
        path: path.to_owned(),
        uuid: None,
        size_bytes: 0,
        available_bytes: 0,
        error: None,
    };
    match prepare(path) {
        Ok(uuid) => info.uuid = Some(uuid),
        Err(error) => info.error = Some(error.to_string()),
    }
    match nix::sys::statvfs::statvfs(path) {
        Ok(stat) => {
            info.size_bytes = stat.blocks() * stat.fragment_size();
            info.available_bytes = stat.blocks_available() * stat.fragment_size();
        }
        Err(error) => {
            info.error.get_or_insert_with(|| format!("disk {}: {error}", path.display()));
        }
    }
    info
}

/// Makes a folder a disk, or finds that it is one.
fn prepare(path: &Path) -> Result<Uuid, DiskError> {
    let unusable = |reason: String| DiskError::Unusable { path: path.to_owned(), reason };
    let replicas = path.join(REPLICAS_DIR);
    let marker = path.join(MARKER_FILE);
    match fs::read(&marker) {
        Ok(text) => {
            let marker: Marker = serde_json::from_slice(&text)
                .map_err(|error| unusable(format!("{MARKER_FILE} cannot be read: {error}")))?;
            fs::create_dir_all(&replicas).map_err(|error| unusable(error.to_string()))?;
            Ok(marker.uuid)
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            if fs::read_dir(&replicas).is_ok_and(|mut entries| entries.next().is_some()) {
                return Err(unusable(format!("it holds replicas but no {MARKER_FILE}")));
            }
            mark(path).map_err(|error| unusable(error.to_string()))
        }
        Err(error) => Err(unusable(format!("{MARKER_FILE} cannot be read: {error}"))),
    }
}

fn mark(path: &Path) -> std::io::Result<Uuid> {
    // Not create_dir_all: a disk whose mount is missing must not become a folder on the root disk.
    fs::metadata(path)?;
    fs::create_dir_all(path.join(REPLICAS_DIR))?;
    let marker = Marker { version: 1, uuid: Uuid::new_v4() };
    let new = path.join(format!("{MARKER_FILE}.new"));
    let mut file = fs::File::create(&new)?;
    file.write_all(&serde_json::to_vec_pretty(&marker)?)?;
    file.sync_all()?;
    fs::rename(&new, path.join(MARKER_FILE))?;
    sync_folder(path).map_err(std::io::Error::other)?;
    Ok(marker.uuid)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn disks(path: &Path) -> Disks {
        Disks::new(BTreeMap::from([("d".to_owned(), path.to_owned())]))
    }

    #[test]
    fn a_marker_is_made_once_and_kept() {
        let dir = tempfile::tempdir().unwrap();
        let first = disks(dir.path()).list().remove(0);
        assert!(first.error.is_none() && first.uuid.is_some() && first.size_bytes >= first.available_bytes);
        assert_eq!(disks(dir.path()).list().remove(0).uuid, first.uuid);
        assert!(disks(dir.path()).replicas_dir("d").unwrap().is_dir());
    }

    #[test]
    fn replicas_without_a_readable_marker_are_not_touched() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join(REPLICAS_DIR)).unwrap();
        fs::write(dir.path().join(REPLICAS_DIR).join("x.img"), b"").unwrap();
        assert!(disks(dir.path()).replicas_dir("d").unwrap_err().to_string().contains("no addax-disk.json"));
        fs::write(dir.path().join(MARKER_FILE), b"{").unwrap();
        let info = disks(dir.path()).list().remove(0);
        assert!(info.uuid.is_none() && info.error.unwrap().contains("cannot be read"));
        assert!(disks(dir.path()).usable().is_empty());
    }

    #[test]
    fn an_absent_folder_is_not_made() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("unmounted");
        assert!(disks(&path).replicas_dir("d").is_err());
        assert!(!path.exists());
        assert!(matches!(disks(&path).replicas_dir("other"), Err(DiskError::Unknown(_))));
    }
}
