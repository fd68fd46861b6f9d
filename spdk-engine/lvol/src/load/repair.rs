//! Ending snapshots that were being made, and deletions of snapshots that were under way, when the store was cut off.
//!
//! A snapshot bears SNAPTMP from its first write on, and SNAPRM from the begin of its deletion; both name the volume that
//! is, or is to be, its clone. If that volume names the snapshot as its parent, the snapshot is whole and stays. If not,
//! the volume has all clusters of its own, or has inherited them, and the snapshot goes. All of it is planned on what was
//! read, before anything is written, so that the claims of what remains are right at once: no leak, and no look at maps
//! that nobody uses.

use super::{Loader, Loading, check::pages_of, name_of};
use crate::{
    planted::{self, Bug},
    types::BlobId,
};
use blobstore_format::{
    descriptor::Flags,
    metadata::{Parent, internal},
};

/// One repair, in the order in which they are carried out: what a removed snapshot used may be used again once it is
/// gone, and a mark goes only when all that it stands for is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Repair {
    /// The snapshot goes: its root page is zeroed.
    Remove(BlobId),
    /// An extent page of the blob is written anew, in place.
    Rewrite(BlobId, usize),
    /// The snapshot stays: its metadata is written without marks.
    Keep(BlobId),
}

impl Loader<'_> {
    /// Decides what to repair, and brings what was read into the state after it.
    pub(super) fn plan_repairs(&mut self) -> Vec<Repair> {
        if planted::is(Bug::NoRepair) {
            return Vec::new();
        }
        let marked: Vec<(BlobId, &'static str, BlobId)> = self
            .blobs
            .values()
            .filter(|blob| !self.damaged.contains_key(&blob.id))
            .filter_map(|blob| {
                [internal::SNAPSHOT_PENDING_REMOVAL, internal::SNAPSHOT_IN_PROGRESS].into_iter().find_map(|mark| {
                    let other = blob.md.internal_id(mark).ok()??;
                    Some((blob.id, mark, other))
                })
            })
            .collect();
        let mut repairs = Vec::new();
        for (id, mark, other) in marked {
            self.repair_snapshot(id, mark, other, &mut repairs);
        }
        if !self.clean {
            for blob in self.blobs.values() {
                repairs.extend(blob.odd_chunks.iter().map(|chunk| Repair::Rewrite(blob.id, *chunk)));
            }
        }
        repairs.sort_unstable();
        repairs
    }

    fn repair_snapshot(&mut self, id: BlobId, mark: &'static str, other: BlobId, repairs: &mut Vec<Repair>) {
        if !self.usable(other) {
            self.leave_out(
                id,
                format!("it bears the mark {mark}, and the volume {other} that this names is not usable"),
            );
            return;
        }
        let name = self.blobs.get(&id).and_then(|blob| name_of(&blob.md)).unwrap_or_default();
        let needed = self.blobs.values().any(|blob| blob.id != id && blob.parent == Parent::Snapshot(id));
        if !needed {
            self.repaired.push(format!("the snapshot {name:?} ({mark}) was removed"));
            if let Some(blob) = self.blobs.remove(&id) {
                self.unmark(&blob);
            }
            repairs.push(Repair::Remove(id));
            return;
        }
        self.repaired.push(format!("the snapshot {name:?} ({mark}) was kept"));
        repairs.push(Repair::Keep(id));
        if let Some(blob) = self.blobs.get_mut(&id) {
            blob.md.remove_internal_xattr(internal::SNAPSHOT_PENDING_REMOVAL);
            blob.md.remove_internal_xattr(internal::SNAPSHOT_IN_PROGRESS);
            blob.md.flags.data_ro |= Flags::READ_ONLY;
        }
        self.return_inheritance(id, other, repairs);
    }

    /// Drops what a removed blob used from the masks. What others use as well they claim later.
    fn unmark(&mut self, blob: &Loading) {
        pages_of(blob).for_each(|page| {
            self.masks.pages.clear(page);
        });
        blob.table.allocated().for_each(|(_, at)| {
            self.masks.clusters.clear(at);
        });
        if let Some(root) = blob.id.page() {
            self.masks.blobids.clear(root);
        }
    }

    /// Takes back from a clone what it was given of a snapshot that stays after all: SPDK merges extent pages in place
    /// before it commits the clone.
    fn return_inheritance(&mut self, snapshot: BlobId, clone: BlobId, repairs: &mut Vec<Repair>) {
        let (Some(parent), Some(child)) = (self.blobs.get(&snapshot), self.blobs.get(&clone)) else { return };
        let mut chunks: Vec<usize> = Vec::new();
        for (n, at) in parent.table.allocated() {
            if child.table.get(n) == at {
                child.table.set(n, 0);
                chunks.push((n / crate::map::CHUNK) as usize);
            }
        }
        chunks.dedup();
        repairs.extend(chunks.into_iter().map(|chunk| Repair::Rewrite(clone, chunk)));
    }
}
