//! The operations on volumes, one module each. What each writes in which order, and why that survives a crash, is in
//! [`crate::crash`].

mod attrs;
mod clone;
mod copy;
mod create;
mod delete;
mod inflate;
mod merge;
mod relink;
mod resize;
mod snapshot;
mod space;

use crate::{
    alloc::Taken,
    blob::{Blob, Failed, Fresh, extent_page, runs},
    error::Error,
    map::{Backing, Table},
    store::{IN_FLIGHT, Inner},
    sync::all,
    types::*,
};
use blobstore_format::{
    Metadata,
    descriptor::Flags,
    extent::MAX_CLUSTERS,
    lvs::{self, LvolNames},
    metadata::{Parent, internal},
};
use std::rc::Rc;
use uuid::Uuid;

/// A volume in the making: its name, UUID and root page are reserved until it is finished or dropped.
pub(crate) struct Draft<'a> {
    inner: &'a Inner,
    id: BlobId,
    root: u32,
    names: LvolNames,
    finished: bool,
    keep_root: bool,
}

impl Draft<'_> {
    /// Metadata of a blob that begins with the volume's names.
    fn metadata(&self, thin: bool) -> Result<Metadata, Error> {
        let mut md = Metadata::new(self.id, thin);
        md.xattrs = self.names.xattrs().map_err(|e| Error::Invalid(e.to_string()))?;
        Ok(md)
    }

    /// Its root page may have been written: it stays reserved.
    fn failed(&mut self, failed: Failed) -> Error {
        self.keep_root |= !failed.certain;
        failed.error
    }

    /// The volume is on disk: it takes its place among the others.
    fn finish(mut self, blob: Blob) -> Rc<Blob> {
        let blob = Rc::new(blob);
        let mut state = self.inner.state.borrow_mut();
        state.blobids.set(self.root);
        state.names.insert(self.names.name.clone(), self.id);
        state.uuids.insert(self.names.uuid, self.id);
        state.blobs.insert(self.id, blob.clone());
        self.finished = true;
        blob
    }
}

impl Drop for Draft<'_> {
    fn drop(&mut self) {
        if self.finished {
            return;
        }
        let mut state = self.inner.state.borrow_mut();
        state.names.remove(&self.names.name);
        state.uuids.remove(&self.names.uuid);
        if !self.keep_root {
            state.pages.give_back(self.root);
        }
    }
}

impl Inner {
    /// Reserves what a new volume needs first.
    pub(crate) fn draft(&self, name: &str, uuid: Uuid) -> Result<Draft<'_>, Error> {
        lvs::check_name(name).map_err(|e| Error::Invalid(e.to_string()))?;
        let mut state = self.state.borrow_mut();
        if state.names.contains_key(name) {
            return Err(Error::Exists(name.to_owned()));
        }
        if uuid.is_nil() {
            return Err(Error::Invalid("a volume's UUID must not be nil".into()));
        }
        if state.uuids.contains_key(&uuid) {
            return Err(Error::Exists(uuid.to_string()));
        }
        let root = state.pages.take().ok_or(Error::NoSpace("no metadata page is free"))?;
        let id = BlobId::from_page(root);
        state.names.insert(name.to_owned(), BlobId::INVALID);
        state.uuids.insert(uuid, BlobId::INVALID);
        drop(state);
        let names = LvolNames { name: name.to_owned(), uuid };
        Ok(Draft { inner: self, id, root, names, finished: false, keep_root: false })
    }

    /// A size in whole clusters, rounded up.
    pub(crate) fn size_in_clusters(&self, bytes: u64) -> Result<u64, Error> {
        let clusters = bytes.div_ceil(self.cluster_size());
        if clusters > MAX_CLUSTERS {
            return Err(Error::Invalid(format!("{clusters} clusters; at most {MAX_CLUSTERS} are allowed")));
        }
        Ok(clusters)
    }

    /// What shows through the holes of a blob with this parent.
    pub(crate) fn backing_of(&self, parent: &Parent) -> Result<Backing, Error> {
        Ok(match parent {
            Parent::None => Backing::Zeroes,
            Parent::External(id) => Backing::External(self.external(&lvs::name_text(id)).shared.clone()),
            Parent::Snapshot(id) => {
                let blob = self.blob(*id).ok_or_else(|| Error::NotFound(format!("the snapshot {id}")))?;
                Backing::Parent(blob.map.clone())
            }
        })
    }

    /// Notes in memory that a blob has another parent.
    pub(crate) fn link(&self, blob: &Blob, parent: Parent) {
        let old = std::mem::replace(&mut blob.state.borrow_mut().parent, parent.clone());
        if let Parent::Snapshot(id) = old
            && let Some(old) = self.blob(id)
        {
            old.state.borrow_mut().clones.retain(|clone| *clone != blob.id);
        }
        if let Parent::Snapshot(id) = parent
            && let Some(new) = self.blob(id)
        {
            let mut state = new.state.borrow_mut();
            state.clones.push(blob.id);
            state.is_snapshot = true;
        }
    }

    /// Makes clusters of a new or growing thick blob, which read as zeroes, durably.
    pub(crate) async fn take_zeroed(&self, count: u64) -> Result<Vec<u32>, Error> {
        let taken: Vec<Taken> =
            self.state.borrow_mut().clusters.take_many(count).ok_or(Error::NoSpace("too few clusters are free"))?;
        let clusters: Vec<u32> = taken.iter().map(|t| t.cluster).collect();
        let mut unknown: Vec<u32> = taken.iter().filter(|t| !t.zeroed).map(|t| t.cluster).collect();
        if !unknown.is_empty() {
            let runs = runs(&mut unknown);
            let done = async {
                all(IN_FLIGHT, runs.iter().map(|(first, count)| self.make_zero(*first, *count))).await?;
                self.flush().await
            }
            .await;
            if let Err(error) = done {
                return Err(self.undo(Fresh { clusters, pages: Vec::new() }, error.into()));
            }
        }
        Ok(clusters)
    }

    /// Writes new extent pages for some chunks of a table, puts their places into `pages` and notes them as fresh.
    pub(crate) async fn write_extent_pages(
        &self,
        blob: BlobId,
        table: &Table,
        chunks: impl IntoIterator<Item = usize>,
        pages: &mut [u32],
        fresh: &mut Fresh,
    ) -> Result<(), Error> {
        let mut writes = Vec::new();
        for chunk in chunks {
            let page = self.state.borrow_mut().pages.take_for_extents();
            let page = page.ok_or(Error::NoSpace("no metadata page is free"))?;
            fresh.pages.push(page);
            pages[chunk] = page;
            writes.push((page, extent_page(blob, table, chunk)));
        }
        self.mark_dirty().await?;
        self.write_pages(&writes).await
    }
}

/// Writes a blob's parent into its metadata.
pub(crate) fn set_parent(md: &mut Metadata, parent: &Parent) {
    if !matches!(parent, Parent::Snapshot(_)) {
        md.remove_internal_xattr(internal::SNAPSHOT);
    }
    if !matches!(parent, Parent::External(_)) {
        md.remove_internal_xattr(internal::EXTERNAL_SNAPSHOT);
        md.flags.invalid &= !Flags::EXTERNAL;
    }
    match parent {
        Parent::None => {}
        Parent::Snapshot(id) => md.set_internal_id(internal::SNAPSHOT, *id),
        Parent::External(id) => {
            md.set_internal_xattr(internal::EXTERNAL_SNAPSHOT, id.clone());
            md.flags.invalid |= Flags::EXTERNAL;
        }
    }
}
