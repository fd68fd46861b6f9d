//! What all cores share of a store and its volumes, and the volume as a device ([`LvolBdev`]).
//!
//! *Invariants.* What changes while I/O runs is atomic; descriptions for reports are behind mutexes that only control
//! calls take. The cluster map is the store's own ([`lvol_core::Map`]), read without locks.

use std::any::Any;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use lvol_core::{BlobId, LvolInfo, Map};
use serde_json::{Value, json};
use uuid::Uuid;

use super::channel::LvolChannel;
use super::durability::Durability;
use crate::bdev::registry::Entry;
use crate::bdev::{Bdev, BdevError, BdevInfo, Channel, IoTypes};
use crate::reactor::{Core, CoreId};

/// Names a loaded store within the process; never used again for another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StoreId(pub u64);

/// One volume within the process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct LvolKey {
    pub store: StoreId,
    pub blob: BlobId,
}

/// A lock whose holder cannot leave anything half-done.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A store as every core knows it.
#[derive(Debug)]
pub struct StoreShared {
    pub id: StoreId,
    /// The core that the store lives on.
    pub owner: CoreId,
    pub uuid: Uuid,
    /// The device that it is on.
    pub base: Arc<Entry>,
    /// Bytes of a block: those of the base device at the time of formatting.
    pub block_size: u32,
    /// Blocks of a cluster.
    pub cluster_blocks: u64,
    /// Whether the base device may lose completed writes with power until flushed.
    pub write_cache: bool,
    /// External devices in use, by their UUID as the store has it.
    pub externals: Mutex<HashMap<String, Arc<Entry>>>,
    pub durability: Durability,
}

impl StoreShared {
    /// A store on `base` with clusters of `cluster_blocks` blocks.
    #[must_use]
    pub fn new(id: StoreId, owner: CoreId, uuid: Uuid, base: Arc<Entry>, block_size: u32, cluster_blocks: u64) -> Self {
        let write_cache = base.bdev.info().write_cache;
        Self {
            id,
            owner,
            uuid,
            base,
            block_size,
            cluster_blocks,
            write_cache,
            externals: Mutex::default(),
            durability: Durability::default(),
        }
    }

    /// Whether metadata that I/O may rest on could be lost with power now.
    #[must_use]
    pub fn has_volatile_metadata(&self) -> bool {
        self.write_cache && self.durability.is_volatile()
    }

    /// The external device of that identity, if it is there.
    #[must_use]
    pub fn external(&self, id: &str) -> Option<Arc<Entry>> {
        lock(&self.externals).get(id).cloned()
    }
}

/// What reports say of a volume: refreshed from the store before they are given.
#[derive(Debug, Clone)]
pub struct Report {
    pub info: LvolInfo,
    /// Names of its clones.
    pub clones: Vec<String>,
}

/// A volume as its channels know it.
#[derive(Debug)]
pub struct Volume {
    pub store: Arc<StoreShared>,
    pub blob: BlobId,
    pub map: Arc<Map>,
    num_blocks: AtomicU64,
    read_only: AtomicBool,
}

impl Volume {
    /// Its key.
    #[must_use]
    pub fn key(&self) -> LvolKey {
        LvolKey { store: self.store.id, blob: self.blob }
    }

    /// Whether writes are refused.
    #[must_use]
    pub fn is_read_only(&self) -> bool {
        self.read_only.load(Ordering::Relaxed)
    }

    /// Blocks now.
    #[must_use]
    pub fn num_blocks(&self) -> u64 {
        self.num_blocks.load(Ordering::Relaxed)
    }
}

/// A volume as a device.
#[derive(Debug)]
pub struct LvolBdev {
    pub volume: Arc<Volume>,
    /// The device's name: the volume's UUID, or the store's with the blob id for a volume that has none.
    pub name: String,
    uuid: Uuid,
    report: Mutex<Report>,
}

/// Namespace of UUIDs of volumes without one.
const DERIVED: Uuid = Uuid::from_u128(0x52c1_6f6e_0b0c_4c62_9c5f_6d1e_2f5c_91a7);

impl LvolBdev {
    /// The volume described by `report`, whose map is `map`.
    #[must_use]
    pub fn new(store: Arc<StoreShared>, map: Arc<Map>, report: Report) -> Self {
        let info = &report.info;
        let name = unique_id(&store, info);
        let uuid = info.uuid.unwrap_or_else(|| Uuid::new_v5(&DERIVED, name.as_bytes()));
        let volume = Volume {
            num_blocks: AtomicU64::new(info.num_clusters * store.cluster_blocks),
            read_only: AtomicBool::new(info.read_only),
            blob: info.id,
            store,
            map,
        };
        Self { volume: Arc::new(volume), name, uuid, report: Mutex::new(report) }
    }

    /// What is known of it.
    #[must_use]
    pub fn report(&self) -> Report {
        lock(&self.report).clone()
    }

    /// Takes up news from the store; true when the size has changed.
    pub fn update(&self, report: Report) -> bool {
        let blocks = report.info.num_clusters * self.volume.store.cluster_blocks;
        self.volume.read_only.store(report.info.read_only, Ordering::Relaxed);
        *lock(&self.report) = report;
        self.volume.num_blocks.swap(blocks, Ordering::Relaxed) != blocks
    }
}

/// The name of a volume's device.
#[must_use]
pub fn unique_id(store: &StoreShared, info: &LvolInfo) -> String {
    match info.uuid {
        Some(uuid) => uuid.to_string(),
        None => format!("{}_{}", store.uuid, info.id.0),
    }
}

impl Bdev for LvolBdev {
    fn info(&self) -> BdevInfo {
        let writable = !self.volume.is_read_only();
        let base = self.volume.store.base.bdev.info();
        BdevInfo {
            name: self.name.clone(),
            product_name: "Logical Volume",
            uuid: self.uuid,
            block_size: self.volume.store.block_size,
            num_blocks: self.num_blocks(),
            physical_block_size: base.physical_block_size,
            optimal_io_boundary: u32::try_from(self.volume.store.cluster_blocks).unwrap_or(0),
            io_types: IoTypes {
                write: writable,
                unmap: writable,
                write_zeroes: writable,
                // Beyond SPDK, which does not pass flushes on: metadata and data may be in a volatile cache.
                flush: base.io_types.flush,
                reset: true,
                seek_hole: true,
                seek_data: true,
                ..IoTypes::READ_WRITE
            },
            write_cache: base.write_cache,
        }
    }

    fn num_blocks(&self) -> u64 {
        self.volume.num_blocks()
    }

    fn open(&self, core: &Core) -> Result<Rc<dyn Channel>, BdevError> {
        Ok(Rc::new(LvolChannel::open(core, &self.volume)?))
    }

    /// Unmapped ranges of a volume read as zeroes whatever its medium does.
    fn unmap_reads_zeroes(&self) -> bool {
        true
    }

    fn holds_guest_data(&self) -> bool {
        true
    }

    fn driver_specific(&self) -> Value {
        let Report { info, clones } = self.report();
        let mut lvol = json!({ "lvol_store_uuid": self.volume.store.uuid.to_string(),
            "base_bdev": self.volume.store.base.bdev.info().name, "thin_provision": info.thin,
            "num_allocated_clusters": info.allocated_clusters, "snapshot": info.is_snapshot, "clone": info.is_clone });
        if let (true, Some(parent)) = (info.is_clone, &info.parent_name) {
            lvol["base_snapshot"] = json!(parent);
        }
        if info.is_snapshot && !clones.is_empty() {
            lvol["clones"] = json!(clones);
        }
        lvol["esnap_clone"] = json!(info.is_esnap_clone);
        if let (true, Some(external)) = (info.is_esnap_clone, &info.external) {
            lvol["external_snapshot_name"] = json!(external);
        }
        json!({ "lvol": lvol })
    }

    /// None: examine finds it on its disk.
    fn config(&self) -> Option<(&'static str, Value)> {
        None
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
