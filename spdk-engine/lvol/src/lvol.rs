//! One volume of a store: its data path, and what can be done to it.
//!
//! An [`Lvol`] is a handle; clones are the same volume. After the volume was deleted, or the store ended, every method
//! answers [`Error::NotFound`] or [`Error::Unloaded`].
//!
//! Operations that change the structure (snapshot, delete, resize, …) on one volume exclude each other: the second is
//! refused with [`Error::Busy`], as SPDK does. I/O goes on beside them, but for the moments bracketed by
//! [`crate::Hooks::quiesce`]. I/O on a degraded volume is refused with [`Error::NoExternal`].

use crate::{
    blob::{Blob, Fill},
    device::Device,
    error::Error,
    map::Map,
    planted::{self, Bug},
    store::{Inner, Store},
    sync::Inside,
    types::*,
};
use std::{ops::Range, rc::Rc, sync::Arc};
use uuid::Uuid;

/// A volume: an lvol, snapshot or clone.
#[derive(Clone)]
pub struct Lvol {
    inner: Rc<Inner>,
    blob: Rc<Blob>,
}

impl PartialEq for Lvol {
    fn eq(&self, other: &Self) -> bool {
        Rc::ptr_eq(&self.blob, &other.blob)
    }
}

impl std::fmt::Debug for Lvol {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Lvol").field("id", &self.blob.id).field("name", &self.blob.name()).finish_non_exhaustive()
    }
}

impl Lvol {
    pub(crate) fn new(inner: &Rc<Inner>, blob: &Rc<Blob>) -> Self {
        Self { inner: inner.clone(), blob: blob.clone() }
    }

    /// Store and blob, if both still exist.
    pub(crate) fn parts(&self) -> Result<(&Inner, &Rc<Blob>), Error> {
        self.inner.check_loaded()?;
        self.blob.check()?;
        Ok((&self.inner, &self.blob))
    }

    /// Goes in for I/O; `writing` for what changes the content.
    async fn enter(&self, writing: bool) -> Result<Inside<'_>, Error> {
        self.parts()?;
        let inside = self.blob.io.enter().await;
        // It may have been deleted, or made read-only, while this waited.
        self.check_io(writing)?;
        Ok(inside)
    }

    fn check_io(&self, writing: bool) -> Result<(), Error> {
        self.parts()?;
        self.inner.check_external(&self.blob)?;
        if writing && self.blob.data_read_only() {
            return Err(Error::NotPermitted(format!("{:?} is read-only", self.blob.name())));
        }
        Ok(())
    }

    /// The store that it is in.
    pub fn store(&self) -> Store {
        Store { inner: self.inner.clone() }
    }

    /// The id of its blob.
    pub fn id(&self) -> BlobId {
        self.blob.id
    }

    /// Its name.
    pub fn name(&self) -> String {
        self.blob.name()
    }

    /// Its UUID; `None` in a store of an older SPDK.
    pub fn uuid(&self) -> Option<Uuid> {
        self.blob.state.borrow().uuid
    }

    /// What it is.
    pub fn info(&self) -> LvolInfo {
        self.inner.info(&self.blob)
    }

    /// The space it takes. Walks the maps of its chain.
    pub fn space(&self) -> SpaceUse {
        self.inner.space(&self.blob)
    }

    /// Its size in bytes.
    pub fn size_bytes(&self) -> u64 {
        self.blob.num_clusters() * self.inner.cluster_size()
    }

    /// Its cluster map, to be read on any core.
    pub fn map(&self) -> Arc<Map> {
        self.blob.map.clone()
    }

    /// The external device at the end of its chain, while it is attached.
    pub fn external_device(&self) -> Option<Rc<dyn Device>> {
        let external = self.blob.map.external()?;
        self.inner.external(external.id()).device.borrow().clone()
    }

    // ---- data path ----

    /// Reads `len` bytes. Offset and length are multiples of the I/O unit.
    pub async fn read(&self, offset: u64, len: usize) -> Result<Vec<u8>, Error> {
        let _inside = self.enter(false).await?;
        self.inner.read(&self.blob, offset, len).await
    }

    /// Writes, allocating clusters where there are none, copied from the parent where the write does not cover them.
    ///
    /// Errors: [`Error::NoSpace`]; [`Error::NotPermitted`] when read-only; [`Error::Invalid`] beyond the end.
    pub async fn write(&self, offset: u64, data: &[u8]) -> Result<(), Error> {
        let _inside = self.enter(true).await?;
        self.inner.write(&self.blob, offset, data).await
    }

    /// Makes a range read as zeroes. A thin volume without parent gives whole clusters back; a thick one keeps them.
    pub async fn write_zeroes(&self, offset: u64, len: u64) -> Result<(), Error> {
        let _inside = self.enter(true).await?;
        self.inner.zero(&self.blob, offset, len, false).await
    }

    /// Gives a range up, which then reads as zeroes, also on a clone (whose parent shows data there). A thin volume
    /// without parent gives whole clusters back.
    pub async fn unmap(&self, offset: u64, len: u64) -> Result<(), Error> {
        let _inside = self.enter(true).await?;
        self.inner.zero(&self.blob, offset, len, true).await
    }

    /// Makes all completed writes durable.
    pub async fn flush(&self) -> Result<(), Error> {
        self.parts()?;
        if planted::is(Bug::NoFlush) {
            return Ok(());
        }
        self.inner.flush().await
    }

    /// Gives the volume its own cluster for each of a range of clusters, with the data that showed there. Ranges asked
    /// for at once share their metadata writes. For the fast path: when this has returned, the map holds the clusters and
    /// writes may go to the disk directly (unless an unmap beside them released one again: look the map up anew); a write
    /// that must be durable by itself needs a flush after it.
    ///
    /// The I/O that this is for counts as in flight: it is served also while [`crate::Hooks::quiesce`] waits for it.
    ///
    /// Errors: [`Error::NoSpace`] (clusters got so far stay), [`Error::NotPermitted`] on a read-only volume.
    pub async fn ensure_allocated(&self, clusters: Range<u64>) -> Result<(), Error> {
        self.check_io(true)?;
        let _inside = self.blob.io.enter_now();
        self.inner.allocate(&self.blob, clusters, Fill::Shown).await
    }

    // ---- operations ----

    /// Renames it. Errors: [`Error::Exists`], [`Error::Invalid`], [`Error::NotPermitted`] when read-only.
    pub async fn rename(&self, name: &str) -> Result<(), Error> {
        let (inner, blob) = self.parts()?;
        inner.rename(blob, name).await
    }

    /// Changes its size, rounded up to whole clusters. What is cut off is lost; what is added reads as zeroes, or on a
    /// clone as its parent.
    ///
    /// Errors: [`Error::NotPermitted`] when read-only, [`Error::NoSpace`], [`Error::Busy`].
    pub async fn resize(&self, size_bytes: u64) -> Result<(), Error> {
        let (inner, blob) = self.parts()?;
        inner.resize(blob, inner.size_in_clusters(size_bytes)?).await
    }

    /// Makes it read-only for good.
    pub async fn set_read_only(&self) -> Result<(), Error> {
        let (inner, blob) = self.parts()?;
        inner.set_read_only(blob).await
    }

    /// Makes a read-only snapshot that takes over all clusters; this volume becomes a thin clone of it.
    ///
    /// Errors: [`Error::Exists`], [`Error::Invalid`] on a read-only volume, [`Error::NoSpace`], [`Error::Busy`].
    pub async fn snapshot(&self, name: &str, uuid: Uuid) -> Result<Lvol, Error> {
        let (inner, blob) = self.parts()?;
        let snapshot = inner.snapshot(blob, name, uuid).await?;
        Ok(Self::new(&self.inner, &snapshot))
    }

    /// Makes a thin, writable clone of this read-only volume.
    ///
    /// Errors: [`Error::Exists`], [`Error::Invalid`] when it is not read-only, [`Error::NoSpace`], [`Error::Busy`].
    pub async fn clone_to(&self, name: &str, uuid: Uuid) -> Result<Lvol, Error> {
        let (inner, blob) = self.parts()?;
        let clone = inner.clone_blob(blob, name, uuid).await?;
        Ok(Self::new(&self.inner, &clone))
    }

    /// Deletes it. The single clone of a snapshot inherits its clusters. Errors: [`Error::NotPermitted`] with two or more
    /// clones, [`Error::Busy`].
    pub async fn delete(&self) -> Result<(), Error> {
        let (inner, blob) = self.parts()?;
        inner.delete(blob).await
    }

    /// Gives it every cluster, copied from the chain, and no parent; it is thick afterwards. `progress` is called at the
    /// start and after each batch.
    ///
    /// Errors: [`Error::NoSpace`], [`Error::Busy`]. What was copied until then stays.
    pub async fn inflate(&self, progress: &dyn Fn(CopyProgress)) -> Result<(), Error> {
        let (inner, blob) = self.parts()?;
        inner.inflate(blob, progress).await
    }

    /// Copies what the direct parent owns and re-points to the grandparent, if any. Of a clone of an external device
    /// everything is copied.
    ///
    /// Errors: [`Error::Invalid`] without parent, [`Error::NoSpace`], [`Error::Busy`].
    pub async fn decouple_parent(&self, progress: &dyn Fn(CopyProgress)) -> Result<(), Error> {
        let (inner, blob) = self.parts()?;
        inner.decouple(blob, progress).await
    }

    /// Makes another snapshot of the same size the parent of this thin volume. The content changes where it has no
    /// clusters.
    ///
    /// Errors: [`Error::Exists`] when it is the parent already; [`Error::Invalid`] when it is no snapshot, of another
    /// size, or a descendant, or this volume is not thin; [`Error::Busy`].
    pub async fn set_parent(&self, snapshot: &Lvol) -> Result<(), Error> {
        let (inner, blob) = self.parts()?;
        let (_, parent) = snapshot.parts()?;
        if !Rc::ptr_eq(&self.inner, &snapshot.inner) {
            return Err(Error::Invalid("the snapshot is in another store".into()));
        }
        inner.set_parent(blob, parent).await
    }

    /// Copies the clusters of its own (not those of its ancestors) to the same offsets of another device. It must be
    /// read-only. `progress` is called after each cluster; the first call says the total.
    ///
    /// Errors: [`Error::NotPermitted`] when not read-only; [`Error::Invalid`] when the target is too small or its blocks
    /// do not divide the store's.
    pub async fn shallow_copy(&self, target: &Rc<dyn Device>, progress: &dyn Fn(CopyProgress)) -> Result<(), Error> {
        let (inner, blob) = self.parts()?;
        inner.shallow_copy(blob, target, progress).await
    }

    // ---- attributes ----

    /// The value of a user attribute, `name` and `uuid` included.
    pub fn xattr(&self, name: &str) -> Option<Vec<u8>> {
        self.blob.state.borrow().md.xattr(name).map(<[u8]>::to_vec)
    }

    /// The names of all user attributes, in order.
    pub fn xattr_names(&self) -> Vec<String> {
        let state = self.blob.state.borrow();
        state.md.xattrs.iter().map(|xattr| String::from_utf8_lossy(&xattr.name).into_owned()).collect()
    }

    /// Sets a user attribute durably. `name` and `uuid` are refused.
    pub async fn set_xattr(&self, name: &str, value: &[u8]) -> Result<(), Error> {
        let (inner, blob) = self.parts()?;
        inner.change_xattr(blob, name, Some(value)).await
    }

    /// Removes a user attribute durably.
    pub async fn remove_xattr(&self, name: &str) -> Result<(), Error> {
        let (inner, blob) = self.parts()?;
        inner.change_xattr(blob, name, None).await
    }
}
