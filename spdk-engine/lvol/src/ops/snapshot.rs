//! Snapshots: a new blob takes over all clusters, and the volume becomes its thin clone.

use super::{Draft, set_parent};
use crate::{
    blob::{Blob, Failed, Next},
    error::Error,
    map::{Backing, Table},
    planted::{self, Bug},
    store::Inner,
};
use blobstore_format::{
    Metadata,
    descriptor::Flags,
    extent::ExtentTable,
    metadata::{Extents, Parent, internal},
};
use std::rc::Rc;
use uuid::Uuid;

impl Inner {
    /// Takes a snapshot of a writable blob. Its I/O is held back while the two chains are written.
    pub(crate) async fn snapshot(&self, blob: &Rc<Blob>, name: &str, uuid: Uuid) -> Result<Rc<Blob>, Error> {
        let draft = self.draft(name, uuid)?;
        if blob.data_read_only() || blob.md_read_only() {
            return Err(Error::Invalid(format!(
                "{:?} is read-only; no snapshot is taken of such volumes",
                blob.name()
            )));
        }
        let mut operation = self.begin(&[blob])?;
        self.mark_dirty().await?;
        let quiet = self.quiet(blob).await;
        let snapshot = self.split(draft, blob).await?;
        operation.add(&snapshot)?;
        drop(quiet);
        // The snapshot stands. What is left only spares the next load a look at it, so that an error changes nothing.
        if let Err(error) = self.commit_md(&snapshot, |_| {}).await {
            tracing::warn!(%error, snapshot = name, "the mark of a snapshot in the making stays until the next load");
        }
        Ok(snapshot)
    }

    /// Moves the clusters of a quiet blob to a new one.
    async fn split(&self, mut draft: Draft<'_>, blob: &Rc<Blob>) -> Result<Rc<Blob>, Error> {
        let _md = blob.md.lock().await;
        let table = blob.map.table();
        let (mut md, origin, table_mode, extent_pages, parent) = {
            let state = blob.state.borrow();
            let md = draft.metadata(true)?;
            (md, state.md.clone(), state.table_mode, state.extent_pages.clone(), state.parent.clone())
        };
        md.flags.invalid = origin.flags.invalid;
        md.flags.md_ro = origin.flags.md_ro;
        if !planted::is(Bug::NoMark) {
            md.set_internal_id(internal::SNAPSHOT_IN_PROGRESS, blob.id);
        }
        set_parent(&mut md, &parent);
        let snapshot = Blob::new(
            md.clone(),
            table.with_backing(table.backing().clone()),
            table_mode,
            vec![0; extent_pages.len()],
            Vec::new(),
            Parent::None,
        );
        let next = Next { md, table: &table, extent_pages: extent_pages.clone(), flush_first: false };
        if let Err(failed) = self.commit(&snapshot, next).await {
            return Err(draft.failed(failed));
        }
        let empty = Table::new(table.clusters(), Backing::Parent(snapshot.map.clone()));
        if let Err(failed) = self.commit(blob, clone_of(&snapshot, origin, &empty)).await {
            return Err(self.take_back(&mut draft, &snapshot, failed).await);
        }
        blob.state.borrow_mut().allocated = 0;
        blob.map.replace(empty);
        seal(&mut snapshot.state.borrow_mut().md);
        let snapshot = draft.finish(snapshot);
        self.link(blob, Parent::Snapshot(snapshot.id));
        self.link(&snapshot, parent);
        Ok(snapshot)
    }

    /// Removes a snapshot from disk whose original did not turn into its clone. Where the original may have, nothing is
    /// touched: a recovery decides.
    async fn take_back(&self, draft: &mut Draft<'_>, snapshot: &Blob, failed: Failed) -> Error {
        let pages: Vec<u32> = snapshot.state.borrow().chain[1..].to_vec();
        let removed = failed.certain
            && async {
                self.zero_page(draft.root).await?;
                self.flush().await
            }
            .await
            .is_ok();
        if removed {
            self.retire_pages(pages).await;
        } else {
            draft.keep_root = true;
            self.set_uncertain();
        }
        failed.error
    }
}

/// The metadata of the original as a clone of its new snapshot.
fn clone_of<'a>(snapshot: &Blob, mut md: Metadata, empty: &'a Table) -> Next<'a> {
    set_parent(&mut md, &Parent::Snapshot(snapshot.id));
    md.flags.invalid |= Flags::THIN;
    md.extents = Extents::Table(ExtentTable::default());
    Next { md, table: empty, extent_pages: vec![0; empty.chunk_count()], flush_first: false }
}

/// Ends the making of a snapshot in its metadata.
fn seal(md: &mut Metadata) {
    md.remove_internal_xattr(internal::SNAPSHOT_IN_PROGRESS);
    md.flags.data_ro |= Flags::READ_ONLY;
}
