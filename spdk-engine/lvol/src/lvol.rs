//! One volume of a store: its data path, and what can be done to it.
//!
//! An [`Lvol`] is a handle; clones are the same volume. After the volume was deleted, or the store ended, every method
//! answers [`Error::NotFound`] or [`Error::Unloaded`].
//!
//! Operations that change the structure (snapshot, delete, resize, …) on one volume exclude each other: the second is
//! refused with [`Error::Busy`], as SPDK does. I/O goes on beside them, but for the moments bracketed by
//! [`crate::Hooks::quiesce`].

use crate::{device::Device, error::Error, map::Map, store::Inner, types::*};
use std::{ops::Range, rc::Rc, sync::Arc};
use uuid::Uuid;

/// A volume: an lvol, snapshot or clone.
#[derive(Clone)]
pub struct Lvol {
    _store: Rc<Inner>,
}

impl Lvol {
    /// The id of its blob.
    pub fn id(&self) -> BlobId {
        unreachable!()
    }

    /// What it is.
    pub fn info(&self) -> LvolInfo {
        unreachable!()
    }

    /// The space it takes. Walks the maps of its chain.
    pub fn space(&self) -> SpaceUse {
        unreachable!()
    }

    /// Its size in bytes.
    pub fn size_bytes(&self) -> u64 {
        unreachable!()
    }

    /// Its cluster map, to be read on any core.
    pub fn map(&self) -> Arc<Map> {
        unreachable!()
    }

    // ---- data path ----

    /// Reads `len` bytes. Offset and length are multiples of the I/O unit.
    pub async fn read(&self, _offset: u64, _len: usize) -> Result<Vec<u8>, Error> {
        Err(Error::Unloaded)
    }

    /// Writes, allocating clusters where there are none, copied from the parent where the write does not cover them.
    pub async fn write(&self, _offset: u64, _data: &[u8]) -> Result<(), Error> {
        Err(Error::Unloaded)
    }

    /// Makes a range read as zeroes. A thin volume without parent gives whole clusters back; a thick one keeps them.
    pub async fn write_zeroes(&self, _offset: u64, _len: u64) -> Result<(), Error> {
        Err(Error::Unloaded)
    }

    /// Gives a range up, which then reads as zeroes, also on a clone (whose parent shows data there). A thin volume
    /// without parent gives whole clusters back.
    pub async fn unmap(&self, _offset: u64, _len: u64) -> Result<(), Error> {
        Err(Error::Unloaded)
    }

    /// Makes all completed writes durable.
    pub async fn flush(&self) -> Result<(), Error> {
        Err(Error::Unloaded)
    }

    /// Gives the volume its own cluster for each of a range of clusters, with the data that showed there. Ranges asked
    /// for at once share their metadata writes. For the fast path: when this has returned, the map holds the clusters and
    /// writes may go to the disk directly; a write that must be durable by itself needs a flush after it.
    ///
    /// Errors: [`Error::NoSpace`] (clusters got so far stay), [`Error::NotPermitted`] on a read-only volume.
    pub async fn ensure_allocated(&self, _clusters: Range<u64>) -> Result<(), Error> {
        Err(Error::Unloaded)
    }

    // ---- operations ----

    /// Renames it. Errors: [`Error::Exists`], [`Error::NotPermitted`] when read-only.
    pub async fn rename(&self, _name: &str) -> Result<(), Error> {
        Err(Error::Unloaded)
    }

    /// Changes its size, rounded up to whole clusters. What is cut off is lost.
    pub async fn resize(&self, _size_bytes: u64) -> Result<(), Error> {
        Err(Error::Unloaded)
    }

    /// Makes it read-only for good.
    pub async fn set_read_only(&self) -> Result<(), Error> {
        Err(Error::Unloaded)
    }

    /// Makes a read-only snapshot that takes over all clusters; this volume becomes a thin clone of it.
    pub async fn snapshot(&self, _name: &str, _uuid: Uuid) -> Result<Lvol, Error> {
        Err(Error::Unloaded)
    }

    /// Makes a thin, writable clone of this read-only volume.
    pub async fn clone_to(&self, _name: &str, _uuid: Uuid) -> Result<Lvol, Error> {
        Err(Error::Unloaded)
    }

    /// Deletes it. The single clone of a snapshot inherits its clusters. Errors: [`Error::NotPermitted`] with two or more
    /// clones.
    pub async fn delete(&self) -> Result<(), Error> {
        Err(Error::Unloaded)
    }

    /// Gives it every cluster, copied from the chain, and no parent; it is thick afterwards. `progress` is called after
    /// each batch.
    pub async fn inflate(&self, _progress: &dyn Fn(CopyProgress)) -> Result<(), Error> {
        Err(Error::Unloaded)
    }

    /// Copies what the direct parent owns and re-points to the grandparent, if any.
    pub async fn decouple_parent(&self, _progress: &dyn Fn(CopyProgress)) -> Result<(), Error> {
        Err(Error::Unloaded)
    }

    /// Makes another snapshot the parent of this thin volume. The content changes where it has no clusters.
    pub async fn set_parent(&self, _snapshot: &Lvol) -> Result<(), Error> {
        Err(Error::Unloaded)
    }

    /// Makes an external device the parent of this thin volume.
    pub async fn set_external_parent(&self, _external_id: &str, _device: Rc<dyn Device>) -> Result<(), Error> {
        Err(Error::Unloaded)
    }

    /// Copies the clusters of its own (not those of its ancestors) to the same offsets of another device. It must be
    /// read-only. `progress` is called after each cluster; the first call says the total.
    pub async fn shallow_copy(&self, _target: &Rc<dyn Device>, _progress: &dyn Fn(CopyProgress)) -> Result<(), Error> {
        Err(Error::Unloaded)
    }

    // ---- attributes ----

    /// The value of a user attribute, `name` and `uuid` included.
    pub fn xattr(&self, _name: &str) -> Option<Vec<u8>> {
        None
    }

    /// The names of all user attributes, in order.
    pub fn xattr_names(&self) -> Vec<String> {
        Vec::new()
    }

    /// Sets a user attribute durably. `name` and `uuid` are refused.
    pub async fn set_xattr(&self, _name: &str, _value: &[u8]) -> Result<(), Error> {
        Err(Error::Unloaded)
    }

    /// Removes a user attribute durably.
    pub async fn remove_xattr(&self, _name: &str) -> Result<(), Error> {
        Err(Error::Unloaded)
    }
}
