//! From what was read to a store in memory, and the repairs on disk.

use super::{Loader, Loading, repair::Repair};
use crate::{
    alloc::{Clusters, Pages},
    blob::{Blob, extent_page},
    error::Error,
    hooks::Hooks,
    store::{Inner, State},
    types::*,
};
use blobstore_format::{lvs::StoreNames, metadata::Parent};
use std::{
    collections::{BTreeMap, HashMap},
    rc::Rc,
};

impl Loader<'_> {
    /// Builds the store and carries out the repairs.
    pub(super) async fn finish(self, hooks: Rc<dyn Hooks>, repairs: Vec<Repair>) -> Result<(Inner, LoadReport), Error> {
        let report = LoadReport {
            recovered: self.forced || self.super_block.clean == 0,
            damaged: self.damaged.values().cloned().collect(),
            repaired: self.repaired.clone(),
        };
        let (progress, rebuilt) = (self.progress, !self.clean);
        let inner = self.build(hooks)?;
        if rebuilt {
            // Whatever made this necessary, the masks on disk do not say what is used.
            inner.mark_dirty().await?;
        }
        let total = repairs.len() as u64;
        for (n, repair) in repairs.into_iter().enumerate() {
            progress(LoadProgress { stage: LoadStage::Repair, done: n as u64, total });
            inner.repair(repair).await?;
        }
        progress(LoadProgress { stage: LoadStage::Repair, done: total, total });
        Ok((inner, report))
    }

    fn build(self, hooks: Rc<dyn Hooks>) -> Result<Inner, Error> {
        let Self { device, super_block, geometry, masks, blobs, damaged, .. } = self;
        let (mut all, mut parents) = (BTreeMap::new(), Vec::new());
        for (id, loading) in blobs.into_iter().filter(|(id, _)| !damaged.contains_key(id)) {
            let Loading { md, table, table_mode, extent_pages, chain, parent, .. } = loading;
            all.insert(id, Rc::new(Blob::new(md, table, table_mode, extent_pages, chain, Parent::None)));
            parents.push((id, parent));
        }
        let Some(super_blob) = all.remove(&super_block.super_blob) else {
            return Err(Error::Damaged("the super blob is missing".into()));
        };
        let names = StoreNames::of(&super_blob.state.borrow().md).map_err(|e| Error::Damaged(e.to_string()))?;
        let mut state = State {
            geometry,
            dirty: super_block.clean == 0,
            super_block,
            uncertain: false,
            clusters: Clusters::from_used(masks.clusters),
            pages: Pages::from_used(masks.pages),
            blobids: masks.blobids,
            super_blob,
            blobs: BTreeMap::new(),
            names: HashMap::new(),
            uuids: HashMap::new(),
            externals: HashMap::new(),
            name: names.name,
            uuid: names.uuid,
        };
        for (id, blob) in &all {
            let blob = blob.state.borrow();
            state.names.entry(blob.name.clone()).or_insert(*id);
            if let Some(uuid) = blob.uuid {
                state.uuids.entry(uuid).or_insert(*id);
            }
        }
        state.blobs = all;
        let inner = Inner::new(device, hooks, state);
        for (id, parent) in parents {
            let Some(blob) = inner.blob(id) else { continue };
            let backing = inner.backing_of(&parent)?;
            blob.map.replace(blob.map.table().with_backing(backing));
            inner.link(&blob, parent);
        }
        Ok(inner)
    }
}

impl Inner {
    async fn repair(&self, repair: Repair) -> Result<(), Error> {
        self.mark_dirty().await?;
        match repair {
            Repair::Keep(id) => match self.blob(id) {
                Some(blob) => self.commit_md(&blob, |_| {}).await,
                None => Ok(()),
            },
            Repair::Remove(id) => {
                let Some(root) = id.page() else { return Ok(()) };
                self.zero_page(root).await?;
                self.flush().await
            }
            Repair::Rewrite(id, chunk) => {
                let Some(blob) = self.blob(id) else { return Ok(()) };
                let page = blob.state.borrow().extent_pages.get(chunk).copied().unwrap_or(0);
                if page == 0 {
                    return Ok(());
                }
                self.write_page(page, &extent_page(id, &blob.map.table(), chunk)).await?;
                self.flush().await
            }
        }
    }
}
