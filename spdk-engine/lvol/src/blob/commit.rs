//! How a blob's chain of pages is replaced: the one write that counts is that of the root page.
//!
//! Sequence: super block in use (once per load) → pages of the chain but the root, at places that nothing names → flush,
//! if there were any, or if the caller wrote pages or data that the new root names → root page in place → flush → old
//! pages of the chain zeroed and given back.
//!
//! Before the root is durable, the disk holds the old chain whole; after it, the new one. Places are reused only after
//! the second flush, so nothing the old root names is overwritten before.
//!
//! When the root's write or the flush after it fails, either may be on disk. The old root is then written once more: if
//! that succeeds, nothing has happened. If not, everything that either names stays reserved, and the store is not marked
//! clean any more: the next load recovers and finds out.

use super::{Blob, Inner};
use crate::{
    error::Error,
    map::Table,
    planted::{self, Bug},
};
use blobstore_format::{
    MdPage, Metadata,
    extent::{ExtentTable, Run, push_run},
    metadata::{self, Extents},
};

/// The state that a blob is to have.
pub(crate) struct Next<'a> {
    /// Flags and attributes.
    pub(crate) md: Metadata,
    /// Its clusters.
    pub(crate) table: &'a Table,
    /// Its extent pages.
    pub(crate) extent_pages: Vec<u32>,
    /// Something was written that must be durable before the root.
    pub(crate) flush_first: bool,
}

/// Clusters and pages that were taken for a change and are given back if it does not happen.
#[derive(Default)]
pub(crate) struct Fresh {
    pub(crate) clusters: Vec<u32>,
    pub(crate) pages: Vec<u32>,
}

/// A change that did not happen, as far as is known.
#[derive(Clone, Debug)]
pub(crate) struct Failed {
    pub(crate) error: Error,
    /// Nothing of it can be on disk.
    pub(crate) certain: bool,
}

impl From<Error> for Failed {
    fn from(error: Error) -> Self {
        Self { error, certain: true }
    }
}

impl From<crate::DeviceError> for Failed {
    fn from(error: crate::DeviceError) -> Self {
        Self { error: error.into(), certain: true }
    }
}

/// What goes into the chain about clusters.
fn extents(table_mode: bool, table: &Table, extent_pages: &[u32]) -> Extents {
    if table_mode {
        return Extents::Table(ExtentTable::from_pages(table.clusters(), extent_pages.iter().copied()));
    }
    let mut runs = Vec::new();
    let mut at = 0;
    let hole = |runs: &mut Vec<Run>, mut len: u64| {
        while len > 0 {
            let piece = len.min(u64::from(u32::MAX)) as u32;
            push_run(runs, Run { cluster: 0, length: piece });
            len -= u64::from(piece);
        }
    };
    for (n, cluster) in table.allocated() {
        hole(&mut runs, n - at);
        push_run(&mut runs, Run { cluster, length: 1 });
        at = n + 1;
    }
    hole(&mut runs, table.clusters() - at);
    Extents::Runs(runs)
}

impl Blob {
    /// The root page as it is on disk; `None` when the blob is not there yet.
    fn emit_root(&self) -> Result<Option<MdPage>, Error> {
        let state = self.state.borrow();
        if state.chain.is_empty() {
            return Ok(None);
        }
        let mut md = state.md.clone();
        md.extents = extents(state.table_mode, &self.map.table(), &state.extent_pages);
        let mut pages = md.emit().map_err(|e| Error::Invalid(e.to_string()))?;
        metadata::chain(&mut pages, &state.chain).map_err(|e| Error::Damaged(e.to_string()))?;
        Ok(Some(pages.swap_remove(0)))
    }
}

impl Inner {
    /// Gives back what was taken for a change that failed; keeps it reserved when the change may be on disk.
    pub(crate) fn undo(&self, fresh: Fresh, failed: Failed) -> Error {
        if failed.certain {
            let mut state = self.state.borrow_mut();
            fresh.clusters.into_iter().for_each(|cluster| state.clusters.give_back(cluster));
            fresh.pages.into_iter().for_each(|page| state.pages.give_back(page));
        } else {
            self.set_uncertain();
        }
        failed.error
    }

    /// Writes a chain for `md`, whose root page replaces that of `old` (if there is one), and returns its pages. They are
    /// used from then on.
    pub(crate) async fn write_chain(
        &self,
        md: &Metadata,
        flush_first: bool,
        old: Option<&Blob>,
    ) -> Result<Vec<u32>, Failed> {
        let Some(root) = md.id.page() else {
            return Err(Error::Damaged(format!("{} is no id of a blob", md.id)).into());
        };
        let mut pages = md.emit().map_err(|e| Error::Invalid(e.to_string()))?;
        let mut places = vec![root];
        let mut fresh = Fresh::default();
        for _ in 1..pages.len() {
            let place = self.state.borrow_mut().pages.take();
            let Some(place) = place else {
                return Err(self.undo(fresh, Error::NoSpace("no metadata page is free").into()).into());
            };
            places.push(place);
            fresh.pages.push(place);
        }
        let written = async {
            metadata::chain(&mut pages, &places).map_err(|e| Error::Damaged(e.to_string()))?;
            self.mark_dirty().await?;
            let rest: Vec<_> = places.iter().copied().zip(pages.iter().cloned()).skip(1).collect();
            self.write_pages(&rest).await?;
            if (flush_first || !rest.is_empty()) && !planted::is(Bug::RootBeforeChain) {
                self.flush().await?;
            }
            Ok::<_, Error>(())
        }
        .await;
        if let Err(error) = written {
            return Err(self.undo(fresh, error.into()).into());
        }
        let committed = async {
            self.write_page(root, &pages[0]).await?;
            if planted::is(Bug::CommitNotDurable) { Ok(()) } else { self.flush().await }
        }
        .await;
        match committed {
            Ok(()) => Ok(places),
            Err(error) => {
                let certain = self.restore_root(root, old).await.is_ok();
                Err(Failed { error: self.undo(fresh, Failed { error, certain }), certain })
            }
        }
    }

    /// Writes a root page, whose replacement or removal failed, as it was: of a blob as it is in memory, or of none.
    pub(crate) async fn restore_root(&self, root: u32, old: Option<&Blob>) -> Result<(), Error> {
        let page = match old {
            Some(blob) => blob.emit_root()?,
            None => None,
        };
        match page {
            Some(page) => self.write_page(root, &page).await?,
            None => self.zero_page(root).await?,
        }
        self.flush().await
    }

    /// Brings a blob into its next state on disk, and in memory all but the map. The caller holds the blob's `md` mutex,
    /// and exchanges the map (and what depends on it) at once when this has returned.
    pub(crate) async fn commit(&self, blob: &Blob, next: Next<'_>) -> Result<(), Failed> {
        let Next { mut md, table, extent_pages, flush_first } = next;
        let table_mode = blob.state.borrow().table_mode;
        md.extents = extents(table_mode, table, &extent_pages);
        let chain = self.write_chain(&md, flush_first, Some(blob)).await?;
        md.extents = Extents::Table(ExtentTable::default());
        let old = {
            let mut state = blob.state.borrow_mut();
            state.md = md;
            state.extent_pages = extent_pages;
            std::mem::replace(&mut state.chain, chain)
        };
        self.retire_pages(old.into_iter().skip(1).collect()).await;
        Ok(())
    }

    /// Commits a change of flags and attributes alone. Takes the blob's `md` mutex.
    pub(crate) async fn commit_md(&self, blob: &Blob, change: impl FnOnce(&mut Metadata)) -> Result<(), Error> {
        let _md = blob.md.lock().await;
        let (mut md, extent_pages) = {
            let state = blob.state.borrow();
            (state.md.clone(), state.extent_pages.clone())
        };
        change(&mut md);
        let table = blob.map.table();
        let next = Next { md, table: &table, extent_pages, flush_first: false };
        self.commit(blob, next).await.map_err(|failed| failed.error)
    }
}
