//! The manifest's entries. Fields that no test needs are left out.

use std::collections::BTreeMap;

use serde::Deserialize;

use crate::{Sparse, packed};

/// How an image came about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Class {
    /// By an orderly end.
    Clean,
    /// By a kill.
    Dirty,
    /// By hand.
    Crafted,
}

/// What SPDK did with an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SpdkLoad {
    /// Opened it.
    Loads,
    /// Found no store.
    Refuses,
    /// Never came back.
    Hangs,
    /// Died.
    Crashes,
    /// Opened it, with errors in its log.
    #[serde(rename = "loads with errors")]
    LoadsWithErrors,
}

/// A store as SPDK reports it.
#[derive(Clone, Debug, Deserialize)]
#[allow(missing_docs)]
pub struct Store {
    pub name: String,
    pub uuid: String,
    pub cluster_size: u64,
    pub io_unit_size: u64,
    pub total_data_clusters: u64,
    pub free_clusters: u64,
    pub max_growable_size: u64,
    /// Free clusters once opened again after recovery: the true number.
    pub free_clusters_second_load: Option<u64>,
}

impl Store {
    /// The number of free clusters without SPDK's miscount right after recovery.
    pub fn free(&self) -> u64 {
        self.free_clusters_second_load.unwrap_or(self.free_clusters)
    }
}

/// An lvol as SPDK reports it.
#[derive(Clone, Debug, Deserialize)]
#[allow(missing_docs)]
pub struct Lvol {
    pub name: String,
    pub uuid: String,
    /// `snapshot`, `clone`, `esnap clone` or `lvol`.
    #[serde(default)]
    pub kind: Option<String>,
    #[serde(default)]
    pub thin: bool,
    #[serde(default)]
    pub read_only: bool,
    /// Bytes; none when SPDK shows no device.
    pub size: Option<u64>,
    pub parent: Option<String>,
    #[serde(default)]
    pub clones: Vec<String>,
    pub num_allocated_clusters: u64,
    /// SHA-256 of the whole contents; none when part of them cannot be read.
    pub sha256: Option<String>,
    /// SHA-256 of each 1 MiB that is not all zero.
    #[serde(default)]
    pub chunks: BTreeMap<u64, String>,
    /// Chunks that SPDK cannot read.
    #[serde(default)]
    pub unreadable_chunks: Vec<u64>,
}

/// The device below external clones.
#[derive(Clone, Debug, Deserialize)]
#[allow(missing_docs)]
pub struct External {
    pub uuid: String,
    pub block_size: u32,
    pub size: u64,
    file: String,
}

impl External {
    /// The device's contents, unpacked.
    pub fn image(&self) -> Sparse {
        Sparse::unpack(&packed(&self.file), self.size)
    }
}

/// What SPDK finds once the half-made or half-deleted snapshot is taken out by hand.
#[derive(Clone, Debug, Deserialize)]
#[allow(missing_docs)]
pub struct Finished {
    pub store: Store,
    pub lvols: Vec<Lvol>,
}

/// An image and what is known of it.
#[derive(Clone, Debug, Deserialize)]
#[allow(missing_docs)]
pub struct Case {
    pub name: String,
    file: String,
    pub class: Class,
    pub about: String,
    pub clean_flag: u32,
    pub device_size: u64,
    pub block_size: u32,
    pub md_page_size: u32,
    /// Whether the device could unmap when the image was written.
    pub unmap: bool,
    pub external: Option<External>,
    /// Lvols without a device as long as the external device is absent.
    #[serde(default)]
    pub without_external: Option<Vec<String>>,
    /// Crafted only: what was changed.
    #[serde(default)]
    pub change: Option<String>,
    pub spdk_load: SpdkLoad,
    pub store: Option<Store>,
    pub lvols: Option<Vec<Lvol>>,
    #[serde(default)]
    pub before: Option<Vec<Lvol>>,
    #[serde(default)]
    pub finished_by_hand: Option<Finished>,
}

impl Case {
    /// The image, unpacked.
    pub fn image(&self) -> Sparse {
        Sparse::unpack(&packed(&self.file), self.device_size)
    }

    /// Whether metadata was damaged on purpose (not merely written in an old style).
    pub fn is_damaged(&self) -> bool {
        self.class == Class::Crafted && self.name != "crafted-base" && !self.name.starts_with("crafted-old-")
    }

    /// What an implementation has to find: SPDK's findings, where SPDK crashes those by hand. None when SPDK refuses or
    /// hangs.
    pub fn expected(&self) -> Option<(&Store, &[Lvol])> {
        if let Some(finished) = &self.finished_by_hand {
            return Some((&finished.store, &finished.lvols));
        }
        Some((self.store.as_ref()?, self.lvols.as_deref().unwrap_or_default()))
    }
}

#[derive(Deserialize)]
struct Manifest {
    images: Vec<Case>,
}

pub(crate) fn parse(text: &[u8]) -> Vec<Case> {
    let manifest: Manifest = serde_json::from_slice(text).expect("manifest.json is as it was written");
    manifest.images
}
