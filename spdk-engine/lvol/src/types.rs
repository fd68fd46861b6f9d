//! Options and reports of stores and volumes.

use uuid::Uuid;

/// The id of a blob: `1 << 32` plus the index of its root page. Stays the same while the volume exists.
pub use blobstore_format::BlobId;

/// Longest name of a store or volume, in bytes.
pub const NAME_MAX: usize = blobstore_format::lvs::MAX_NAME;

/// How space is cleared when it is given back, or when a store is made. `Default` means unmap.
pub use blobstore_format::descriptor::ClearMethod;

/// How to make a store.
#[derive(Clone, Debug)]
pub struct FormatOptions {
    /// Name, 1 to 63 bytes.
    pub name: String,
    /// UUID of the store. The caller draws it, so that the store itself is deterministic.
    pub uuid: Uuid,
    /// Bytes of a cluster: a multiple of 4096 and of the metadata page size.
    pub cluster_size: u32,
    /// How the device is cleared first; `Default` means unmap.
    pub clear_method: ClearMethod,
    /// Metadata pages per cluster, in percent.
    pub md_pages_per_cluster_ratio: u32,
    /// Least size of a metadata page in bytes, 0 for what the device asks; a power of two from 4096 to 65536.
    pub md_page_size: u32,
}

impl FormatOptions {
    /// SPDK's defaults: clusters of 4 MiB, one metadata page per cluster, unmap.
    pub fn new(name: impl Into<String>, uuid: Uuid) -> Self {
        Self {
            name: name.into(),
            uuid,
            cluster_size: 4 << 20,
            clear_method: ClearMethod::Unmap,
            md_pages_per_cluster_ratio: 100,
            md_page_size: 0,
        }
    }
}

/// How to load a store.
#[derive(Clone, Debug, Default)]
pub struct LoadOptions {
    /// Rebuild the masks from the metadata even if the store was unloaded in order.
    pub force_recovery: bool,
}

/// What a load is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoadStage {
    /// Scanning the metadata region for root pages, after a dirty stop.
    Scan,
    /// Reading root and chain pages.
    Blobs,
    /// Reading extent pages.
    Extents,
    /// Ending snapshots and deletions that were cut short.
    Repair,
    /// Checking who owns which page and cluster.
    Claims,
}

/// How far a load is: `done` of `total` pages of the stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoadProgress {
    /// The stage.
    pub stage: LoadStage,
    /// Pages done.
    pub done: u64,
    /// Pages in all.
    pub total: u64,
}

/// A blob that could not be loaded. Everything it names stays reserved, so that nothing of it is overwritten.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DamagedBlob {
    /// Which.
    pub id: BlobId,
    /// Its name, where it could be read.
    pub name: Option<String>,
    /// What is wrong.
    pub reason: String,
}

/// What a load found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LoadReport {
    /// The store had not been unloaded in order (or recovery was asked for): what is used was worked out anew.
    pub recovered: bool,
    /// Blobs that were left out.
    pub damaged: Vec<DamagedBlob>,
    /// Snapshots in the making or deletion that were ended: name and what was done.
    pub repaired: Vec<String>,
}

/// What a store is, for reports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreInfo {
    /// UUID.
    pub uuid: Uuid,
    /// Name.
    pub name: String,
    /// Bytes of a cluster.
    pub cluster_size: u32,
    /// Bytes of the unit of I/O.
    pub io_unit_size: u32,
    /// Bytes of a metadata page.
    pub md_page_size: u32,
    /// Clusters for data in all.
    pub total_data_clusters: u64,
    /// Clusters free.
    pub free_clusters: u64,
    /// Metadata pages in all.
    pub total_md_pages: u32,
    /// Metadata pages free.
    pub free_md_pages: u32,
    /// Bytes to which the device may grow and still be used in full.
    pub max_growable_size: u64,
}

/// How to make a volume.
#[derive(Clone, Debug)]
pub struct CreateOptions {
    /// Name, 1 to 63 bytes, unique in the store.
    pub name: String,
    /// UUID, drawn by the caller.
    pub uuid: Uuid,
    /// Bytes; rounded up to whole clusters.
    pub size_bytes: u64,
    /// Whether clusters are allocated at their first write only.
    pub thin: bool,
    /// How clusters are cleared when given back.
    pub clear_method: ClearMethod,
}

/// What a volume is, for reports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LvolInfo {
    /// Id of its blob.
    pub id: BlobId,
    /// Name.
    pub name: String,
    /// UUID; `None` in a store of an older SPDK (its identifier is then `<store uuid>_<blob id in decimal>`).
    pub uuid: Option<Uuid>,
    /// Clusters.
    pub num_clusters: u64,
    /// Clusters of its own.
    pub allocated_clusters: u64,
    /// Whether clusters are allocated at their first write.
    pub thin: bool,
    /// Whether it refuses writes.
    pub read_only: bool,
    /// Whether it is a snapshot in SPDK's sense: others are, or since the load were, clones of it.
    pub is_snapshot: bool,
    /// Whether it has a parent snapshot.
    pub is_clone: bool,
    /// Whether its (nearest) parent is an external device.
    pub is_esnap_clone: bool,
    /// Whether an external device that it needs is absent.
    pub is_degraded: bool,
    /// Parent snapshot.
    pub parent: Option<BlobId>,
    /// Name of the parent snapshot.
    pub parent_name: Option<String>,
    /// Clones of it, by id.
    pub clones: Vec<BlobId>,
    /// Identity of the external device that it is a clone of: the UUID of a bdev.
    pub external: Option<String>,
    /// How clusters are cleared when given back.
    pub clear_method: ClearMethod,
}

/// The space that a volume takes, in clusters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SpaceUse {
    /// Of its own.
    pub allocated: u64,
    /// Seen by it, but owned by a snapshot of its chain.
    pub shared: u64,
    /// Given back if it were deleted now: its own ones, unless a single clone would inherit them.
    pub exclusive: u64,
}

/// How far a copy to another device is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CopyProgress {
    /// Clusters copied.
    pub copied_clusters: u64,
    /// Clusters to copy in all.
    pub total_clusters: u64,
}
