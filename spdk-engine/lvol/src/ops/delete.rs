//! Deleting a volume anywhere in a chain.

use super::{
    merge::{Merge, Side, merge},
    set_parent,
};
use crate::{
    blob::{Blob, Fresh, Next},
    error::Error,
    planted::{self, Bug},
    store::Inner,
};
use blobstore_format::metadata::{Parent, internal};
use std::rc::Rc;

/// What a deletion leaves to be given back once its root page is gone.
struct Left {
    clusters: Vec<u32>,
    pages: Vec<u32>,
}

impl Inner {
    /// Deletes a blob. Its single clone inherits its clusters.
    pub(crate) async fn delete(&self, blob: &Rc<Blob>) -> Result<(), Error> {
        let mut operation = self.begin(&[blob])?;
        let clones = blob.state.borrow().clones.clone();
        let clone = match clones[..] {
            [] => None,
            [id] => Some(self.blob(id).ok_or_else(|| Error::NotFound(format!("the clone {id}")))?),
            _ => {
                let text = format!("{:?} has {} clones; at most one is allowed", blob.name(), clones.len());
                return Err(Error::NotPermitted(text));
            }
        };
        if let Some(clone) = &clone {
            operation.add(clone)?;
        }
        self.mark_dirty().await?;
        let quiet = self.quiet(blob).await;
        let left = match &clone {
            None => everything(blob),
            Some(clone) => self.bequeath(blob, clone).await?,
        };
        let mut gone = self.remove_root(blob).await;
        if let Err(error) = &gone {
            if clone.is_none() {
                if self.restore_root(blob.id.page().unwrap_or(0), Some(blob)).await.is_err() {
                    self.set_uncertain();
                }
                return Err(error.clone());
            }
            gone = self.remove_root(blob).await;
        }
        self.forget(blob);
        drop(quiet);
        if gone.is_err() {
            // The clone has the clusters and the mark of removal is durable: a recovery would end this. Until then what
            // the root names stays reserved.
            self.set_uncertain();
            return Ok(());
        }
        self.grace().await;
        if clone.is_none() || !planted::is(Bug::LeakClusters) {
            self.retire_clusters(left.clusters, blob.clear_method()).await;
        }
        self.retire_pages(left.pages).await;
        Ok(())
    }

    /// Moves the clusters of a snapshot to its single clone. Both are marked by the operation.
    async fn bequeath(&self, snapshot: &Rc<Blob>, clone: &Rc<Blob>) -> Result<Left, Error> {
        let id = clone.id;
        self.commit_md(snapshot, |md| md.set_internal_id(internal::SNAPSHOT_PENDING_REMOVAL, id)).await?;
        let quiet = self.quiet(clone).await;
        let result = self.inherit(snapshot, clone).await;
        drop(quiet);
        if result.is_err() {
            let unmarked = self.commit_md(snapshot, |md| {
                md.remove_internal_xattr(internal::SNAPSHOT_PENDING_REMOVAL);
            });
            if unmarked.await.is_err() {
                self.set_uncertain();
            }
        }
        result
    }

    /// Commits a quiet clone with the clusters and the parent of its snapshot.
    async fn inherit(&self, snapshot: &Rc<Blob>, clone: &Rc<Blob>) -> Result<Left, Error> {
        let _md = clone.md.lock().await;
        let parent = snapshot.state.borrow().parent.clone();
        let backing = self.backing_of(&parent)?;
        let (table, theirs) = (clone.map.table(), snapshot.map.table());
        let (mut md, merged) = {
            let (state, snapshot) = (clone.state.borrow(), snapshot.state.borrow());
            let mine = Side { table: &table, pages: &state.extent_pages };
            let theirs = Side { table: &theirs, pages: &snapshot.extent_pages };
            (state.md.clone(), merge(mine, theirs, backing, state.table_mode))
        };
        let Merge { table, mut pages, rewrite, left_clusters, left_pages } = merged;
        set_parent(&mut md, &parent);
        let mut fresh = Fresh::default();
        let flush_first = !rewrite.is_empty();
        if let Err(error) = self.write_extent_pages(clone.id, &table, rewrite, &mut pages, &mut fresh).await {
            return Err(self.undo(fresh, error.into()));
        }
        if let Err(failed) = self.commit(clone, Next { md, table: &table, extent_pages: pages, flush_first }).await {
            return Err(self.undo(fresh, failed));
        }
        clone.state.borrow_mut().allocated = table.allocated().count() as u64;
        clone.map.replace(table);
        self.link(clone, parent);
        let chain = snapshot.state.borrow().chain.clone();
        Ok(Left { clusters: left_clusters, pages: left_pages.into_iter().chain(chain).collect() })
    }

    /// Zeroes the root page of a blob: it is gone.
    async fn remove_root(&self, blob: &Blob) -> Result<(), Error> {
        let root = blob.id.page().ok_or_else(|| Error::Damaged(format!("{} is no id of a blob", blob.id)))?;
        self.zero_page(root).await?;
        self.flush().await
    }

    /// Takes a blob out of memory.
    fn forget(&self, blob: &Rc<Blob>) {
        blob.removed.set(true);
        self.link(blob, Parent::None);
        let mut state = self.state.borrow_mut();
        let (name, uuid) = {
            let blob = blob.state.borrow();
            (blob.name.clone(), blob.uuid)
        };
        if state.names.get(&name) == Some(&blob.id) {
            state.names.remove(&name);
        }
        if let Some(uuid) = uuid.filter(|uuid| state.uuids.get(uuid) == Some(&blob.id)) {
            state.uuids.remove(&uuid);
        }
        if let Some(root) = blob.id.page() {
            state.blobids.clear(root);
        }
        state.blobs.remove(&blob.id);
    }
}

/// All that a blob names.
fn everything(blob: &Blob) -> Left {
    let state = blob.state.borrow();
    let pages = state.chain.iter().chain(state.extent_pages.iter().filter(|page| **page != 0));
    Left { clusters: blob.map.table().allocated().map(|(_, at)| at).collect(), pages: pages.copied().collect() }
}
