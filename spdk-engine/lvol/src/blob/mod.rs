//! One blob in memory: its map, its metadata, and how a change of either reaches the disk.

mod clear;
mod commit;
mod extents;
mod fill;
mod io;

pub(crate) use clear::runs;
pub(crate) use commit::{Failed, Fresh, Next};
pub(crate) use extents::extent_page;
pub(crate) use fill::Fill;

use crate::{
    error::Error,
    map::{Backing, Map, Table},
    store::Inner,
    sync::{Closed, Gate, Inside, LocalMutex, WaitList},
    types::*,
};
use blobstore_format::{
    Metadata,
    descriptor::{ClearMethod, Flags},
    lvs,
    metadata::Parent,
};
use extents::Queue;
use std::{
    cell::{Cell, RefCell},
    collections::HashSet,
    rc::Rc,
    sync::Arc,
};
use uuid::Uuid;

/// A blob.
pub(crate) struct Blob {
    pub(crate) id: BlobId,
    pub(crate) map: Arc<Map>,
    pub(crate) state: RefCell<BlobState>,
    /// Serialises writes of this blob's metadata.
    pub(crate) md: LocalMutex,
    /// I/O in flight through this crate.
    pub(crate) io: Gate,
    /// An operation that changes it is running.
    pub(crate) locked: Cell<bool>,
    /// It was deleted.
    pub(crate) removed: Cell<bool>,
    /// Clusters must not be given back by unmap: an inflate counts on them.
    pub(crate) keep_clusters: Cell<bool>,
    /// Clusters of this blob that are being allocated or released.
    pub(crate) busy: RefCell<HashSet<u64>>,
    pub(crate) busy_ended: WaitList,
    /// Extent entries that wait to be written.
    queue: Queue,
}

/// What is known of a blob beside its map.
pub(crate) struct BlobState {
    /// Flags and attributes; its `extents` are not kept up to date.
    pub(crate) md: Metadata,
    /// Whether clusters are listed in extent pages, rather than in the chain.
    pub(crate) table_mode: bool,
    /// Per chunk the page that lists it, or 0.
    pub(crate) extent_pages: Vec<u32>,
    /// The pages of its chain, root first.
    pub(crate) chain: Vec<u32>,
    /// Clusters of its own.
    pub(crate) allocated: u64,
    pub(crate) parent: Parent,
    /// Volumes that have it as their parent.
    pub(crate) clones: Vec<BlobId>,
    /// It has, or had since the load, clones.
    pub(crate) is_snapshot: bool,
    pub(crate) name: String,
    pub(crate) uuid: Option<Uuid>,
}

impl Blob {
    /// A blob as it stands on disk.
    pub(crate) fn new(
        md: Metadata,
        table: Table,
        table_mode: bool,
        extent_pages: Vec<u32>,
        chain: Vec<u32>,
        parent: Parent,
    ) -> Self {
        let name = md.xattr(lvs::NAME).map(lvs::name_text).unwrap_or_default();
        let uuid = md.xattr(lvs::UUID).and_then(lvs::parse_uuid).filter(|uuid| !uuid.is_nil());
        let allocated = table.allocated().count() as u64;
        Self {
            id: md.id,
            map: Arc::new(Map::new(table)),
            state: RefCell::new(BlobState {
                md,
                table_mode,
                extent_pages,
                chain,
                allocated,
                parent,
                clones: Vec::new(),
                is_snapshot: false,
                name,
                uuid,
            }),
            md: LocalMutex::default(),
            io: Gate::default(),
            locked: Cell::new(false),
            removed: Cell::new(false),
            keep_clusters: Cell::new(false),
            busy: RefCell::default(),
            busy_ended: WaitList::default(),
            queue: Queue::default(),
        }
    }

    pub(crate) fn num_clusters(&self) -> u64 {
        self.map.table().clusters()
    }

    pub(crate) fn flags(&self) -> Flags {
        self.state.borrow().md.flags
    }

    pub(crate) fn thin(&self) -> bool {
        self.flags().thin()
    }

    /// Whether data must not be written.
    pub(crate) fn data_read_only(&self) -> bool {
        self.flags().data_is_read_only()
    }

    /// Whether metadata must not be changed by the user.
    pub(crate) fn md_read_only(&self) -> bool {
        self.flags().metadata_is_read_only()
    }

    pub(crate) fn clear_method(&self) -> ClearMethod {
        self.flags().clear_method()
    }

    /// Whether nothing shows through its holes but zeroes.
    pub(crate) fn backed_by_zeroes(&self) -> bool {
        matches!(self.map.table().backing(), Backing::Zeroes)
    }

    pub(crate) fn name(&self) -> String {
        self.state.borrow().name.clone()
    }

    /// Fails when the blob was deleted.
    pub(crate) fn check(&self) -> Result<(), Error> {
        if self.removed.get() { Err(Error::NotFound(format!("the volume {}", self.name()))) } else { Ok(()) }
    }
}

/// An operation in progress: the blobs that it changes are marked until it is dropped.
pub(crate) struct Operation<'a> {
    blobs: Vec<Rc<Blob>>,
    _running: Inside<'a>,
}

impl Operation<'_> {
    /// Marks another blob.
    pub(crate) fn add(&mut self, blob: &Rc<Blob>) -> Result<(), Error> {
        blob.check()?;
        if blob.locked.replace(true) {
            return Err(Error::Busy(format!("another operation on {:?} is in progress", blob.name())));
        }
        self.blobs.push(blob.clone());
        Ok(())
    }
}

impl Drop for Operation<'_> {
    fn drop(&mut self) {
        self.blobs.iter().for_each(|blob| blob.locked.set(false));
    }
}

/// A blob whose I/O is held back.
pub(crate) struct Quiet<'a> {
    inner: &'a Inner,
    blob: &'a Blob,
    closed: Option<Closed<'a>>,
}

impl Drop for Quiet<'_> {
    fn drop(&mut self) {
        drop(self.closed.take());
        self.inner.hooks.resume(self.blob.id);
    }
}

impl Inner {
    /// Begins an operation on some blobs.
    pub(crate) fn begin(&self, blobs: &[&Rc<Blob>]) -> Result<Operation<'_>, Error> {
        self.check_loaded()?;
        let mut operation = Operation { blobs: Vec::new(), _running: self.operations.enter_now() };
        blobs.iter().try_for_each(|blob| operation.add(blob))?;
        Ok(operation)
    }

    /// Holds the blob's I/O back and waits until none is in flight. The engine's comes first: it may be waiting for a
    /// request that is served here.
    pub(crate) async fn quiet<'a>(&'a self, blob: &'a Blob) -> Quiet<'a> {
        self.hooks.quiesce(blob.id).await;
        // From here on the hook is undone also if this future is dropped.
        let mut quiet = Quiet { inner: self, blob, closed: None };
        quiet.closed = Some(blob.io.close().await);
        quiet
    }
}
