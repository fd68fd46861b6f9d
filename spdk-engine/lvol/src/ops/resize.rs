//! Changing the size of a volume.
//!
//! An extent page whose number of entries changes is written anew at another place, and the chain with the new size names
//! it: so size and entries change in one write.

use crate::{
    blob::{Blob, Fresh, Next},
    error::Error,
    map::{CHUNK, Table},
    store::Inner,
};
use std::rc::Rc;

impl Inner {
    /// Makes a blob so many clusters long.
    pub(crate) async fn resize(&self, blob: &Rc<Blob>, clusters: u64) -> Result<(), Error> {
        if blob.md_read_only() {
            return Err(Error::NotPermitted(format!("{:?} is read-only", blob.name())));
        }
        if clusters == blob.num_clusters() {
            return Ok(());
        }
        let _operation = self.begin(&[blob])?;
        if clusters > blob.num_clusters() { self.extend(blob, clusters).await } else { self.cut(blob, clusters).await }
    }

    /// Beside running I/O: what there is stays where it is.
    async fn extend(&self, blob: &Rc<Blob>, clusters: u64) -> Result<(), Error> {
        let _md = blob.md.lock().await;
        let old = blob.map.table();
        let table = old.resized(clusters);
        let mut fresh = Fresh::default();
        if !blob.thin() {
            fresh.clusters = self.take_zeroed(clusters - old.clusters()).await?;
            fresh.clusters.iter().enumerate().for_each(|(n, at)| {
                table.set(old.clusters() + n as u64, *at);
            });
        }
        let first_new = (old.clusters() / CHUNK) as usize;
        let chunks = (first_new..table.chunk_count()).filter(|chunk| !table.chunk_is_empty(*chunk)).collect();
        self.commit_size(blob, table, chunks, fresh).await.map(|_| ())
    }

    /// With I/O held back until the size is durable.
    async fn cut(&self, blob: &Rc<Blob>, clusters: u64) -> Result<(), Error> {
        let quiet = self.quiet(blob).await;
        let md = blob.md.lock().await;
        let old = blob.map.table();
        let table = old.resized(clusters);
        let border = (clusters / CHUNK) as usize;
        let chunks = (border..table.chunk_count()).filter(|chunk| !table.chunk_is_empty(*chunk)).collect();
        let pages = self.commit_size(blob, table, chunks, Fresh::default()).await?;
        drop(md);
        drop(quiet);
        let cut = old.allocated().filter(|(n, _)| *n >= clusters).map(|(_, at)| at).collect();
        self.grace().await;
        self.retire_clusters(cut, blob.clear_method()).await;
        self.retire_pages(pages).await;
        Ok(())
    }

    /// Commits a table of another size, with new extent pages for `chunks`. Returns the pages that were replaced, or cut
    /// off; for a blob that grew they are given back here. The caller holds the `md` mutex.
    async fn commit_size(
        &self,
        blob: &Blob,
        table: Table,
        chunks: Vec<usize>,
        mut fresh: Fresh,
    ) -> Result<Vec<u32>, Error> {
        let (md, old_pages, table_mode) = {
            let state = blob.state.borrow();
            (state.md.clone(), state.extent_pages.clone(), state.table_mode)
        };
        let mut pages = vec![0; table.chunk_count()];
        let border = blob.num_clusters().min(table.clusters()) / CHUNK;
        let kept = pages.len().min(old_pages.len()).min(border as usize);
        pages[..kept].copy_from_slice(&old_pages[..kept]);
        if table_mode {
            let written = self.write_extent_pages(blob.id, &table, chunks, &mut pages, &mut fresh).await;
            if let Err(error) = written {
                return Err(self.undo(fresh, error.into()));
            }
        }
        let next = Next { md, table: &table, extent_pages: pages, flush_first: true };
        if let Err(failed) = self.commit(blob, next).await {
            return Err(self.undo(fresh, failed));
        }
        // From the map as it is now: an unmap beside this may have made a hole meanwhile, which must not be filled again.
        let old_size = blob.num_clusters();
        let now = blob.map.table().resized(table.clusters());
        table.allocated().filter(|(n, _)| *n >= old_size).for_each(|(n, at)| {
            now.set(n, at);
        });
        blob.state.borrow_mut().allocated = now.allocated().count() as u64;
        blob.map.replace(now);
        let grown = table.clusters() > old_size;
        let replaced: Vec<u32> = old_pages[kept..].iter().copied().filter(|page| *page != 0).collect();
        if grown {
            self.retire_pages(replaced).await;
            return Ok(Vec::new());
        }
        Ok(replaced)
    }
}
