//! Giving a thin volume another parent.

use super::{create::external_value, set_parent};
use crate::{
    blob::{Blob, Next},
    device::Device,
    error::Error,
    lvol::Lvol,
    store::Inner,
};
use blobstore_format::{lvs, metadata::Parent};
use std::rc::Rc;

impl Inner {
    /// Makes a snapshot of the same length the parent.
    pub(crate) async fn set_parent(&self, blob: &Rc<Blob>, snapshot: &Rc<Blob>) -> Result<(), Error> {
        let _relink = self.relink.lock().await;
        let name = blob.name();
        let invalid = |text: String| Err(Error::Invalid(text));
        if blob.id == snapshot.id {
            return invalid(format!("{name:?} cannot be its own parent"));
        }
        if blob.state.borrow().parent == Parent::Snapshot(snapshot.id) {
            return Err(Error::Exists(snapshot.name()));
        }
        if !blob.thin() {
            return invalid(format!("{name:?} is not thin"));
        }
        if !snapshot.state.borrow().is_snapshot {
            return invalid(format!("{:?} is not a snapshot", snapshot.name()));
        }
        if blob.num_clusters() != snapshot.num_clusters() {
            return invalid(format!("{:?} has another size than {name:?}", snapshot.name()));
        }
        if self.is_ancestor(blob, snapshot) {
            return invalid(format!("{name:?} is an ancestor of {:?}", snapshot.name()));
        }
        let _operation = self.begin(&[blob, snapshot])?;
        self.change_parent(blob, Parent::Snapshot(snapshot.id)).await
    }

    /// Whether `old` is somewhere up the chain of `young`.
    fn is_ancestor(&self, old: &Blob, young: &Blob) -> bool {
        let mut parent = young.state.borrow().parent.clone();
        while let Parent::Snapshot(id) = parent {
            if id == old.id {
                return true;
            }
            parent = self.blob(id).map_or(Parent::None, |blob| blob.state.borrow().parent.clone());
        }
        false
    }

    /// Commits another parent for a marked blob.
    async fn change_parent(&self, blob: &Rc<Blob>, parent: Parent) -> Result<(), Error> {
        let backing = self.backing_of(&parent)?;
        let _quiet = self.quiet(blob).await;
        let _md = blob.md.lock().await;
        let (mut md, extent_pages) = {
            let state = blob.state.borrow();
            (state.md.clone(), state.extent_pages.clone())
        };
        set_parent(&mut md, &parent);
        let table = blob.map.table();
        let next = Next { md, table: &table, extent_pages, flush_first: false };
        self.commit(blob, next).await.map_err(|failed| failed.error)?;
        blob.map.replace(table.with_backing(backing));
        self.link(blob, parent);
        Ok(())
    }
}

impl Lvol {
    /// Makes an external device the parent of this thin volume. The content changes where it has no clusters.
    ///
    /// Errors: [`Error::Exists`] when it is the parent already; [`Error::Invalid`] when this volume is not thin, or the
    /// device's size is not a multiple of the cluster size.
    pub async fn set_external_parent(&self, external_id: &str, device: Rc<dyn Device>) -> Result<(), Error> {
        let (inner, blob) = self.parts()?;
        let size = inner.cluster_size();
        let _relink = inner.relink.lock().await;
        if !device.size_bytes().is_multiple_of(size) {
            let text = format!("{} bytes are not a multiple of the cluster size, {size}", device.size_bytes());
            return Err(Error::Invalid(text));
        }
        if blob.state.borrow().uuid.is_some_and(|uuid| uuid.to_string() == external_id) {
            return Err(Error::Invalid(format!("{:?} cannot be its own parent", blob.name())));
        }
        let same = |id: &[u8]| lvs::name_text(id) == external_id;
        if matches!(&blob.state.borrow().parent, Parent::External(id) if same(id)) {
            return Err(Error::Exists(external_id.to_owned()));
        }
        if !blob.thin() {
            return Err(Error::Invalid(format!("{:?} is not thin", blob.name())));
        }
        let parent = Parent::External(external_value(external_id)?);
        let _operation = inner.begin(&[blob])?;
        inner.change_parent(blob, parent).await?;
        self.store().attach_external(external_id, device).await;
        Ok(())
    }
}
