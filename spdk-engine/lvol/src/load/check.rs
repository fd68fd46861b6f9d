//! What has to hold between blobs: parents exist, no ring, nothing is owned twice, every lvol has a name.

use super::{Loader, Loading};
use crate::{error::Error, types::*};
use blobstore_format::{
    Bits,
    lvs::{LvolNames, StoreNames},
    metadata::Parent,
};
use std::collections::{HashMap, HashSet};

impl Loader<'_> {
    /// Leaves out blobs whose clusters cannot be right, and those without a usable parent.
    pub(super) fn check_parents(&mut self) {
        let ids: Vec<BlobId> = self.blobs.keys().copied().collect();
        for id in &ids {
            if let Some(reason) = self.blobs.get(id).and_then(|blob| self.wrong_clusters(blob)) {
                self.leave_out(*id, reason);
            }
        }
        let mut good: HashSet<BlobId> = HashSet::new();
        for id in ids {
            self.check_chain(id, &mut good);
        }
    }

    fn wrong_clusters(&self, blob: &Loading) -> Option<String> {
        let (first, end) = (self.geometry.md_clusters(), self.geometry.total_clusters);
        for (n, at) in blob.table.allocated() {
            if at < first || at >= end {
                return Some(format!("its cluster {n} is at {at}; data is at {first} to {}", end - 1));
            }
            if self.clean && !self.masks.clusters.get(at) {
                return Some(format!("its cluster {n}, at {at}, is not marked used"));
            }
        }
        let holes = blob.table.clusters() != blob.table.allocated().count() as u64;
        (holes && !blob.md.flags.thin()).then(|| "it is thick, but does not have all its clusters".into())
    }

    /// Walks up from a blob; leaves out all on the way when the chain does not end well.
    fn check_chain(&mut self, id: BlobId, good: &mut HashSet<BlobId>) {
        let (mut path, mut at) = (Vec::new(), id);
        let problem = loop {
            if good.contains(&at) {
                break None;
            }
            if path.contains(&at) {
                break Some(format!("its chain of parents returns to {at}"));
            }
            let Some(blob) = self.blobs.get(&at) else { break Some(format!("its ancestor {at} is missing")) };
            if let Some(damage) = self.damaged.get(&at) {
                break Some(format!("its ancestor {at} is damaged: {}", damage.reason));
            }
            path.push(at);
            match blob.parent {
                Parent::Snapshot(parent) => at = parent,
                Parent::None | Parent::External(_) => break None,
            }
        };
        match problem {
            None => good.extend(path),
            Some(reason) => path.into_iter().for_each(|id| self.leave_out(id, reason.clone())),
        }
    }

    /// Works out what is used, and leaves out blobs that share a cluster or page.
    pub(super) fn check_claims(&mut self) {
        let (mut pages, mut clusters) = (Bits::new(self.geometry.md_len), Bits::new(self.geometry.total_clusters));
        let (mut twice_pages, mut twice_clusters) = (HashSet::new(), HashSet::new());
        let total = self.blobs.len() as u64;
        for (n, blob) in self.blobs.values().enumerate() {
            if n.is_multiple_of(1024) {
                self.report(LoadStage::Claims, n as u64, total);
            }
            for page in pages_of(blob).filter(|page| *page < self.geometry.md_len) {
                if !pages.set(page) {
                    twice_pages.insert(page);
                }
            }
            for (_, at) in blob.table.allocated().filter(|(_, at)| *at < self.geometry.total_clusters) {
                if !clusters.set(at) {
                    twice_clusters.insert(at);
                }
            }
        }
        self.report(LoadStage::Claims, total, total);
        if !twice_pages.is_empty() || !twice_clusters.is_empty() {
            self.leave_out_sharers(&twice_pages, &twice_clusters);
        }
        for n in pages.iter() {
            self.masks.pages.set(n);
        }
        for n in clusters.iter().chain(0..self.geometry.md_clusters()) {
            self.masks.clusters.set(n);
        }
        for root in self.blobs.keys().filter_map(|id| id.page()) {
            self.masks.blobids.set(root);
        }
    }

    fn leave_out_sharers(&mut self, pages: &HashSet<u32>, clusters: &HashSet<u32>) {
        let mut sharers: HashMap<BlobId, String> = HashMap::new();
        for blob in self.blobs.values() {
            if let Some(page) = pages_of(blob).find(|page| pages.contains(page)) {
                sharers.insert(blob.id, format!("another blob uses metadata page {page} as well"));
            } else if let Some((n, at)) = blob.table.allocated().find(|(_, at)| clusters.contains(at)) {
                sharers.insert(blob.id, format!("its cluster {n}, at {at}, has a second owner"));
            }
        }
        self.leave_out_families(sharers);
    }

    /// Leaves blobs out, and their descendants with them.
    fn leave_out_families(&mut self, blobs: HashMap<BlobId, String>) {
        if blobs.is_empty() {
            return;
        }
        blobs.into_iter().for_each(|(id, reason)| self.leave_out(id, reason));
        let mut good = HashSet::new();
        let ids: Vec<BlobId> = self.blobs.keys().copied().collect();
        ids.into_iter().for_each(|id| self.check_chain(id, &mut good));
    }

    /// Whether the super blob and every lvol have what makes them one. Of lvols with one name or UUID only the first can
    /// be told from the others: those are left out.
    pub(super) fn check_names(&mut self) -> Result<(), Error> {
        let super_blob = self.super_block.super_blob;
        let Some(blob) = self.blobs.get(&super_blob).filter(|_| !self.damaged.contains_key(&super_blob)) else {
            let why = self.damaged.get(&super_blob).map_or("it does not exist", |damage| &damage.reason);
            return Err(Error::Damaged(format!("the super blob {super_blob} is not usable: {why}")));
        };
        let (mut names, mut uuids, mut doubles) = (HashSet::new(), HashSet::new(), HashMap::new());
        StoreNames::of(&blob.md).map_err(|e| Error::Damaged(format!("super blob: {e}")))?;
        for blob in self.blobs.values().filter(|blob| blob.id != super_blob && !self.damaged.contains_key(&blob.id)) {
            let LvolNames { name, uuid } = LvolNames::of(&blob.md).map_err(|e| Error::Damaged(e.to_string()))?;
            if !names.insert(name.clone()) {
                doubles.insert(blob.id, format!("another lvol has its name, {name:?}"));
            } else if !uuid.is_nil() && !uuids.insert(uuid) {
                doubles.insert(blob.id, format!("another lvol has its UUID, {uuid}"));
            }
        }
        self.leave_out_families(doubles);
        Ok(())
    }
}

/// Every metadata page of a blob.
pub(super) fn pages_of(blob: &Loading) -> impl Iterator<Item = u32> + '_ {
    blob.chain.iter().copied().chain(blob.extent_pages.iter().copied().filter(|page| *page != 0))
}
