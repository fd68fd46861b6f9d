//! Taking a larger device into use while the store runs.
//!
//! One write of the super block, with the new size and cluster-mask length and not clean, then a flush. Before it the new
//! clusters do not exist; after it they are free, which needs no mask because the store is not clean.

use super::{Store, write_super};
use crate::error::Error;
use blobstore_format::geometry::GeometryError;

impl Store {
    /// Takes the present size of the device into use, without interruption.
    ///
    /// Errors: [`Error::NoSpace`] when the room kept for the cluster mask is too small, or the device shrank. A device
    /// that did not grow is no error.
    pub async fn grow(&self) -> Result<(), Error> {
        let inner = &self.inner;
        let _operation = inner.begin(&[])?;
        let _guard = inner.super_lock.lock().await;
        let size = inner.device.size_bytes();
        let (old, mut super_block) = {
            let state = inner.state.borrow();
            (state.geometry, state.super_block.clone())
        };
        if size == old.size {
            return Ok(());
        }
        let geometry = old.grown(size).map_err(|error| match error {
            GeometryError::MaskRoom { .. } => Error::NoSpace("the room kept for the cluster mask is too small"),
            GeometryError::Size { .. } => Error::NoSpace("the device has become smaller"),
            error => Error::Invalid(error.to_string()),
        })?;
        super_block.clean = 0;
        super_block.size = geometry.size;
        super_block.used_cluster_mask = geometry.used_cluster_mask;
        write_super(&*inner.device, &super_block).await?;
        inner.flush().await?;
        let mut state = inner.state.borrow_mut();
        state.clusters.grow(geometry.total_clusters);
        state.geometry = geometry;
        state.super_block = super_block;
        state.dirty = true;
        Ok(())
    }
}
