//! What a volume is and how much space it takes, for reports.

use crate::{
    blob::Blob,
    error::Error,
    map::Place,
    store::Inner,
    types::{LvolInfo, SpaceUse},
};
use blobstore_format::{lvs, metadata::Parent};

impl Inner {
    pub(crate) fn info(&self, blob: &Blob) -> LvolInfo {
        let state = blob.state.borrow();
        let parent = match &state.parent {
            Parent::Snapshot(id) => Some(*id),
            Parent::None | Parent::External(_) => None,
        };
        LvolInfo {
            id: blob.id,
            name: state.name.clone(),
            uuid: state.uuid,
            num_clusters: blob.num_clusters(),
            allocated_clusters: state.allocated,
            thin: state.md.flags.thin(),
            read_only: state.md.flags.data_is_read_only(),
            is_snapshot: state.is_snapshot,
            is_clone: parent.is_some(),
            is_esnap_clone: matches!(state.parent, Parent::External(_)),
            is_degraded: self.is_degraded(blob),
            parent,
            parent_name: parent.and_then(|id| self.blob(id)).map(|blob| blob.name()),
            clones: state.clones.clone(),
            external: match &state.parent {
                Parent::External(id) => Some(lvs::name_text(id)),
                Parent::None | Parent::Snapshot(_) => None,
            },
            clear_method: state.md.flags.clear_method(),
        }
    }

    fn is_degraded(&self, blob: &Blob) -> bool {
        self.check_external(blob).is_err()
    }

    /// Fails when the external device at the end of the blob's chain is absent.
    pub(crate) fn check_external(&self, blob: &Blob) -> Result<(), Error> {
        let state = self.state.borrow();
        if state.externals.is_empty() {
            return Ok(());
        }
        let Some(external) = blob.map.external() else { return Ok(()) };
        let there = state.externals.get(external.id()).is_some_and(|slot| slot.device.borrow().is_some());
        if there { Ok(()) } else { Err(Error::NoExternal(external.id().to_owned())) }
    }

    pub(crate) fn space(&self, blob: &Blob) -> SpaceUse {
        let table = blob.map.table();
        let mut view = blob.map.view();
        let shared = if blob.backed_by_zeroes() {
            0
        } else {
            (0..table.clusters()).filter(|n| matches!(view.place(*n), Place::Ancestor(_))).count() as u64
        };
        let state = blob.state.borrow();
        let exclusive = match state.clones[..] {
            [] => state.allocated,
            [clone] => match self.blob(clone) {
                Some(clone) => {
                    let clone = clone.map.table();
                    let stays = |n: &u64| *n >= clone.clusters() || clone.get(*n) != 0;
                    table.allocated().filter(|(n, _)| stays(n)).count() as u64
                }
                None => 0,
            },
            _ => 0,
        };
        SpaceUse { allocated: state.allocated, shared, exclusive }
    }
}
