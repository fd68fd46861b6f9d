//! Making a clone independent: of its whole chain, or of its direct parent.

use super::set_parent;
use crate::{
    blob::{Blob, Fill, Next},
    error::Error,
    map::Backing,
    store::Inner,
    types::CopyProgress,
};
use blobstore_format::{descriptor::Flags, metadata::Parent};
use std::rc::Rc;

/// Clusters between two reports of progress.
const STEP: usize = 256;

/// Keeps a blob's clusters from being given back by unmap, until dropped.
struct Keep<'a>(&'a Blob);

impl<'a> Keep<'a> {
    fn new(blob: &'a Blob) -> Self {
        blob.keep_clusters.set(true);
        Self(blob)
    }
}

impl Drop for Keep<'_> {
    fn drop(&mut self) {
        self.0.keep_clusters.set(false);
    }
}

impl Inner {
    /// Gives a blob every cluster, and no parent.
    pub(crate) async fn inflate(&self, blob: &Rc<Blob>, progress: &dyn Fn(CopyProgress)) -> Result<(), Error> {
        let _operation = self.begin(&[blob])?;
        if !blob.thin() {
            return Ok(());
        }
        self.detach(blob, true, progress).await
    }

    /// Copies what the direct parent owns, and makes the grandparent the parent. Of a clone of an external device
    /// everything is copied, as SPDK does.
    pub(crate) async fn decouple(&self, blob: &Rc<Blob>, progress: &dyn Fn(CopyProgress)) -> Result<(), Error> {
        let _operation = self.begin(&[blob])?;
        let parent = blob.state.borrow().parent.clone();
        match parent {
            Parent::None => Err(Error::Invalid(format!("{:?} has no parent", blob.name()))),
            Parent::External(_) => self.detach(blob, true, progress).await,
            Parent::Snapshot(id) => {
                let parent = self.blob(id).ok_or_else(|| Error::NotFound(format!("the snapshot {id}")))?;
                let mut operation = self.begin(&[])?;
                operation.add(&parent)?;
                self.detach(blob, false, progress).await
            }
        }
    }

    async fn detach(&self, blob: &Rc<Blob>, all: bool, progress: &dyn Fn(CopyProgress)) -> Result<(), Error> {
        let _keep = Keep::new(blob);
        let needed = needed(blob, all);
        if needed.len() as u64 > u64::from(self.state.borrow().clusters.free()) {
            return Err(Error::NoSpace("too few clusters are free"));
        }
        let mut report = CopyProgress { copied_clusters: 0, total_clusters: needed.len() as u64 };
        progress(report);
        for step in needed.chunks(STEP) {
            self.allocate(blob, step.iter().copied(), Fill::Shown).await?;
            report.copied_clusters += step.len() as u64;
            progress(report);
        }
        let _relink = self.relink.lock().await;
        let parent = if all { Parent::None } else { self.grandparent(blob) };
        let backing = self.backing_of(&parent)?;
        let _md = blob.md.lock().await;
        let (mut md, extent_pages) = {
            let state = blob.state.borrow();
            (state.md.clone(), state.extent_pages.clone())
        };
        set_parent(&mut md, &parent);
        if all {
            md.flags.invalid &= !Flags::THIN;
        }
        let table = blob.map.table();
        let next = Next { md, table: &table, extent_pages, flush_first: true };
        self.commit(blob, next).await.map_err(|failed| failed.error)?;
        blob.map.replace(table.with_backing(backing));
        self.link(blob, parent);
        Ok(())
    }

    fn grandparent(&self, blob: &Blob) -> Parent {
        let Parent::Snapshot(parent) = blob.state.borrow().parent else { return Parent::None };
        self.blob(parent).map_or(Parent::None, |parent| parent.state.borrow().parent.clone())
    }
}

/// The clusters that a blob lacks: all, or those that its direct parent owns.
fn needed(blob: &Blob, all: bool) -> Vec<u64> {
    let table = blob.map.table();
    let holes = |n: &u64| table.get(*n) == 0;
    match table.backing() {
        Backing::Parent(parent) if !all => {
            parent.table().allocated().map(|(n, _)| n).filter(|n| *n < table.clusters()).filter(holes).collect()
        }
        _ => (0..table.clusters()).filter(holes).collect(),
    }
}
