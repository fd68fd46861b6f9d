//! New volumes: thick, thin, and clones of external devices.

use super::{Draft, set_parent};
use crate::{
    blob::{Blob, Fresh},
    device::Device,
    error::Error,
    lvol::Lvol,
    map::Table,
    store::{Inner, Store},
    types::*,
};
use blobstore_format::{
    Metadata,
    extent::ExtentTable,
    metadata::{Extents, Parent},
};
use std::rc::Rc;
use uuid::Uuid;

impl Store {
    /// Makes a volume. A thick one has all its clusters at once, reading as zeroes.
    ///
    /// Errors: [`Error::Exists`], [`Error::Invalid`], [`Error::NoSpace`].
    pub async fn create(&self, options: CreateOptions) -> Result<Lvol, Error> {
        let inner = &*self.inner;
        let _operation = inner.begin(&[])?;
        let draft = inner.draft(&options.name, options.uuid)?;
        let clusters = inner.size_in_clusters(options.size_bytes)?;
        let mut md = draft.metadata(options.thin)?;
        md.flags.set_clear_method(options.clear_method);
        let blob = inner.create_blob(draft, md, clusters, Parent::None).await?;
        Ok(Lvol::new(&self.inner, &blob))
    }

    /// Makes a clone of an external device: a thin volume of `size_bytes` that shows that device where it was not
    /// written. `external_id` is the UUID of the device, as text; `external` the device itself, if it is there.
    ///
    /// Errors: [`Error::Exists`]; [`Error::Invalid`] when the size is not a multiple of the cluster size.
    pub async fn clone_external(
        &self,
        external_id: &str,
        size_bytes: u64,
        external: Option<Rc<dyn Device>>,
        name: &str,
        uuid: Uuid,
    ) -> Result<Lvol, Error> {
        let inner = &*self.inner;
        let _operation = inner.begin(&[])?;
        let draft = inner.draft(name, uuid)?;
        if !size_bytes.is_multiple_of(inner.cluster_size()) {
            let size = inner.cluster_size();
            return Err(Error::Invalid(format!("{size_bytes} bytes are not a multiple of the cluster size, {size}")));
        }
        let clusters = inner.size_in_clusters(size_bytes)?;
        let parent = Parent::External(external_value(external_id)?);
        let mut md = draft.metadata(true)?;
        set_parent(&mut md, &parent);
        let blob = inner.create_blob(draft, md, clusters, parent).await?;
        if let Some(device) = external {
            self.attach_external(external_id, device).await;
        }
        Ok(Lvol::new(&self.inner, &blob))
    }
}

/// The EXTSNAP value for an identity: its text and a NUL.
pub(super) fn external_value(id: &str) -> Result<Vec<u8>, Error> {
    if id.is_empty() || id.len() > 255 || id.contains('\0') {
        return Err(Error::Invalid(format!("{id:?} does not name an external device; 1 to 255 bytes are allowed")));
    }
    let mut value = id.as_bytes().to_vec();
    value.push(0);
    Ok(value)
}

impl Inner {
    /// Writes a new blob and takes it in. Thick ones get all their clusters.
    pub(super) async fn create_blob(
        &self,
        mut draft: Draft<'_>,
        mut md: Metadata,
        clusters: u64,
        parent: Parent,
    ) -> Result<Rc<Blob>, Error> {
        let table = Table::new(clusters, self.backing_of(&parent)?);
        let mut pages = vec![0; table.chunk_count()];
        let mut fresh = Fresh::default();
        let thick = !md.flags.thin();
        if thick {
            fresh.clusters = self.take_zeroed(clusters).await?;
            fresh.clusters.iter().enumerate().for_each(|(n, at)| {
                table.set(n as u64, *at);
            });
            let written = self.write_extent_pages(md.id, &table, 0..table.chunk_count(), &mut pages, &mut fresh).await;
            if let Err(error) = written {
                return Err(self.undo(fresh, error.into()));
            }
        }
        md.extents = Extents::Table(ExtentTable::from_pages(clusters, pages.iter().copied()));
        let chain = match self.write_chain(&md, thick && clusters > 0, None).await {
            Ok(chain) => chain,
            Err(failed) => {
                self.undo(fresh, failed.clone());
                return Err(draft.failed(failed));
            }
        };
        md.extents = Extents::Table(ExtentTable::default());
        let blob = draft.finish(Blob::new(md, table, true, pages, chain, Parent::None));
        self.link(&blob, parent);
        Ok(blob)
    }
}
