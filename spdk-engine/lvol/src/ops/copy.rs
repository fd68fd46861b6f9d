//! Copying the clusters of one volume, without its ancestors', to another device.

use crate::{
    blob::Blob,
    device::Device,
    error::Error,
    store::{IN_FLIGHT, Inner},
    sync::all,
    types::CopyProgress,
};
use std::{cell::Cell, rc::Rc};

impl Inner {
    /// Copies every cluster of its own to the same place on `target`.
    pub(crate) async fn shallow_copy(
        &self,
        blob: &Rc<Blob>,
        target: &Rc<dyn Device>,
        progress: &dyn Fn(CopyProgress),
    ) -> Result<(), Error> {
        if !blob.data_read_only() {
            return Err(Error::NotPermitted(format!("{:?} is not read-only", blob.name())));
        }
        let (cluster, size, block) =
            (self.cluster_size(), blob.num_clusters() * self.cluster_size(), target.block_size());
        if target.size_bytes() < size {
            return Err(Error::Invalid(format!("the target has {} bytes; {size} are needed", target.size_bytes())));
        }
        if block == 0 || !self.device.block_size().is_multiple_of(block) {
            return Err(Error::Invalid(format!("blocks of {block} bytes do not divide those of the store")));
        }
        let _operation = self.begin(&[blob])?;
        let table = blob.map.table();
        let report = Cell::new(CopyProgress { copied_clusters: 0, total_clusters: table.allocated().count() as u64 });
        progress(report.get());
        let jobs = table.allocated().map(|(n, at)| {
            let (report, source) = (&report, self.geometry().cluster_offset(at));
            async move {
                let _access = self.accesses.enter();
                target.copy_from(&*self.device, source, n * cluster, cluster).await?;
                let mut now = report.get();
                now.copied_clusters += 1;
                report.set(now);
                progress(now);
                Ok::<_, Error>(())
            }
        });
        all(IN_FLIGHT, jobs).await?;
        if target.write_cache() {
            target.flush().await?;
        }
        Ok(())
    }
}
