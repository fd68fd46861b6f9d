//! Allocating and releasing clusters of a blob beside its running I/O.
//!
//! Allocation: take a cluster in memory → fill it (copied from what shows there, or zeroes where they may be missing) →
//! flush, if anything was filled → write the extent page that names it, in place; where the chunk has no page yet, write a
//! new one, flush, and commit the chain with it → only now the map shows it, and the write that asked for it goes on.
//! Copies run without any lock. Entries of a blob that wait at once are written together: one write per extent page.
//!
//! An entry on disk so never names a cluster whose content is not durable. The entry itself needs no flush: without it the
//! hole is as it was, and the user's flush covers both. Whoever relies on an entry having *gone* flushes.
//!
//! Release: hole in the map → grace: no I/O uses the cluster → entry 0 written like above → flush → cluster cleared and
//! given back. A crash before the entry is durable finds the old data, one after it zeroes.
//!
//! While a cluster of the blob changes so, it is in `busy`; others that want it wait for that.

use super::{Blob, Failed, Fill, Fresh, Inner, Next};
use crate::{
    alloc::Taken,
    error::Error,
    map::{CHUNK, Table},
    planted::{self, Bug},
    sync::WaitList,
    types::BlobId,
};
use blobstore_format::{MdPage, extent::ExtentPage};
use std::{
    cell::RefCell,
    collections::{BTreeMap, HashSet},
    rc::Rc,
};

/// Clusters that one caller allocates at once.
const BATCH: usize = 64;

/// An entry of a map: cluster of the blob, cluster of the disk or 0.
pub(crate) type Entry = (u64, u32);

/// Entries that wait to be written, with those who wait for them.
#[derive(Default)]
pub(super) struct Queue(RefCell<Vec<(Entry, Rc<Ticket>)>>);

/// The outcome for one who waits.
#[derive(Default)]
struct Ticket(RefCell<Option<Result<(), Failed>>>);

/// Clusters of a blob that change; until it is dropped.
struct Busy<'a> {
    busy: &'a RefCell<HashSet<u64>>,
    ended: &'a WaitList,
    clusters: Vec<u64>,
}

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        let mut busy = self.busy.borrow_mut();
        for cluster in &self.clusters {
            busy.remove(cluster);
        }
        drop(busy);
        self.ended.wake_all();
    }
}

/// The extent page for one chunk of a table.
pub(crate) fn extent_page(blob: BlobId, table: &Table, chunk: usize) -> MdPage {
    let clusters = table.chunk(chunk);
    ExtentPage { start_cluster: (chunk as u64 * CHUNK) as u32, clusters }.emit(blob)
}

impl Blob {
    /// Waits until a cluster does not change.
    async fn not_busy(&self, cluster: u64) {
        self.busy_ended.until(|| (!self.busy.borrow().contains(&cluster)).then_some(())).await;
    }

    fn make_busy(&self, clusters: Vec<u64>) -> Busy<'_> {
        self.busy.borrow_mut().extend(&clusters);
        Busy { busy: &self.busy, ended: &self.busy_ended, clusters }
    }
}

impl Inner {
    /// Gives the blob its own clusters where it has none. On an error those got so far stay.
    pub(crate) async fn allocate(
        &self,
        blob: &Blob,
        wanted: impl IntoIterator<Item = u64>,
        fill: Fill,
    ) -> Result<(), Error> {
        let mut wanted = wanted.into_iter().peekable();
        while wanted.peek().is_some() {
            let mut holes = Vec::new();
            let mut blocked = None;
            {
                let (table, busy) = (blob.map.table(), blob.busy.borrow());
                while let Some(n) = wanted.peek().copied().filter(|_| holes.len() < BATCH) {
                    if n >= table.clusters() {
                        return Err(Error::Invalid(format!("the volume has {} clusters", table.clusters())));
                    }
                    if busy.contains(&n) {
                        blocked = Some(n);
                        break;
                    }
                    if table.get(n) == 0 {
                        holes.push(n);
                    }
                    wanted.next();
                }
            }
            if !holes.is_empty() {
                self.allocate_batch(blob, holes, fill).await?;
            } else if let Some(cluster) = blocked {
                blob.not_busy(cluster).await;
            }
        }
        Ok(())
    }

    async fn allocate_batch(&self, blob: &Blob, holes: Vec<u64>, fill: Fill) -> Result<(), Error> {
        let busy = blob.make_busy(holes);
        let taken: Vec<(u64, Taken)> = {
            let mut state = self.state.borrow_mut();
            busy.clusters.iter().map_while(|n| state.clusters.take().map(|taken| (*n, taken))).collect()
        };
        if !taken.is_empty() {
            let filled = async {
                let wrote = self.fill(blob, &taken, fill).await?;
                if wrote && !planted::is(Bug::ExtentBeforeData) { self.flush().await } else { Ok(()) }
            }
            .await;
            if let Err(error) = filled {
                let clusters = taken.iter().map(|(_, taken)| taken.cluster).collect();
                return Err(self.undo(Fresh { clusters, pages: Vec::new() }, error.into()));
            }
            let entries: Vec<Entry> = taken.iter().map(|(n, taken)| (*n, taken.cluster)).collect();
            if let Err(failed) = self.write_entries(blob, &entries).await {
                // Some may have been written although others failed: the map says which.
                let table = blob.map.table();
                let clusters = entries.iter().filter(|(n, at)| table.get(*n) != *at).map(|(_, at)| *at).collect();
                return Err(self.undo(Fresh { clusters, pages: Vec::new() }, failed));
            }
        }
        if taken.len() < busy.clusters.len() { Err(Error::NoSpace("no cluster is free")) } else { Ok(()) }
    }

    /// Gives whole clusters of a thin blob without parent back; does nothing for another blob. Holes are left alone.
    pub(crate) async fn release(&self, blob: &Blob, clusters: &[u64]) -> Result<(), Error> {
        for batch in clusters.chunks(CHUNK as usize) {
            self.release_batch(blob, batch).await?;
        }
        Ok(())
    }

    async fn release_batch(&self, blob: &Blob, clusters: &[u64]) -> Result<(), Error> {
        let mut waiting: Vec<u64> = clusters.to_vec();
        while !waiting.is_empty() {
            let (now, later): (Vec<u64>, Vec<u64>) = {
                let busy = blob.busy.borrow();
                waiting.iter().partition(|n| !busy.contains(n))
            };
            if let (true, Some(first)) = (now.is_empty(), later.first()) {
                blob.not_busy(*first).await;
            }
            self.release_now(blob, now).await?;
            waiting = later;
        }
        Ok(())
    }

    async fn release_now(&self, blob: &Blob, clusters: Vec<u64>) -> Result<(), Error> {
        if !blob.thin() || !blob.backed_by_zeroes() || blob.keep_clusters.get() {
            return Ok(());
        }
        let table = blob.map.table();
        let entries: Vec<Entry> =
            clusters.into_iter().map(|n| (n, table.set(n, 0))).filter(|(_, at)| *at != 0).collect();
        if entries.is_empty() {
            return Ok(());
        }
        let busy = blob.make_busy(entries.iter().map(|(n, _)| *n).collect());
        blob.state.borrow_mut().allocated -= entries.len() as u64;
        self.grace().await;
        let holes: Vec<Entry> = entries.iter().map(|(n, _)| (*n, 0)).collect();
        let mut written = self.write_entries(blob, &holes).await;
        if written.is_ok() && !planted::is(Bug::ReuseBeforeUnnamed) {
            written = self.flush().await.map_err(|error| Failed { error, certain: false });
        }
        if let Err(failed) = written {
            if failed.certain {
                let table = blob.map.table();
                entries.iter().for_each(|(n, at)| {
                    table.set(*n, *at);
                });
                blob.state.borrow_mut().allocated += entries.len() as u64;
                return Err(failed.error);
            }
            // The hole may or may not be on disk. In memory it stays, so that the next write of its extent page settles
            // it; the cluster stays reserved.
            self.set_uncertain();
            return Err(failed.error);
        }
        drop(busy);
        self.retire_clusters(entries.into_iter().map(|(_, at)| at).collect(), blob.clear_method()).await;
        Ok(())
    }

    /// Writes entries to disk and then into the map, together with those of others that wait at the same time.
    async fn write_entries(&self, blob: &Blob, entries: &[Entry]) -> Result<(), Failed> {
        let ticket = Rc::new(Ticket::default());
        blob.queue.0.borrow_mut().extend(entries.iter().map(|entry| (*entry, ticket.clone())));
        let _md = blob.md.lock().await;
        if let Some(result) = ticket.0.take() {
            return result;
        }
        let batch = std::mem::take(&mut *blob.queue.0.borrow_mut());
        let all: Vec<Entry> = batch.iter().map(|(entry, _)| *entry).collect();
        let result = self.commit_entries(blob, &all).await;
        for (_, ticket) in batch {
            ticket.0.borrow_mut().get_or_insert_with(|| result.clone());
        }
        ticket.0.take().unwrap_or(result)
    }

    /// Writes entries to disk and then into the map. The caller holds the blob's `md` mutex.
    async fn commit_entries(&self, blob: &Blob, entries: &[Entry]) -> Result<(), Failed> {
        if !blob.state.borrow().table_mode {
            let table = blob.map.table().patched(entries);
            let (md, extent_pages) = {
                let state = blob.state.borrow();
                (state.md.clone(), state.extent_pages.clone())
            };
            self.commit(blob, Next { md, table: &table, extent_pages, flush_first: false }).await?;
            show(blob, entries);
            return Ok(());
        }
        let mut chunks: BTreeMap<usize, Vec<Entry>> = BTreeMap::new();
        for entry in entries {
            chunks.entry((entry.0 / CHUNK) as usize).or_default().push(*entry);
        }
        let page_of = |chunk: usize| blob.state.borrow().extent_pages.get(chunk).copied().unwrap_or(0);
        let (known, new): (BTreeMap<_, _>, BTreeMap<_, _>) = chunks.into_iter().partition(|(n, _)| page_of(*n) != 0);
        let known = self.rewrite_pages(blob, known).await;
        let new = self.add_pages(blob, new).await;
        match (known, new) {
            (Ok(()), new) => new,
            (known, Ok(())) => known,
            (Err(known), Err(new)) => Err(Failed { certain: known.certain && new.certain, ..known }),
        }
    }

    /// Rewrites extent pages in place.
    async fn rewrite_pages(&self, blob: &Blob, chunks: BTreeMap<usize, Vec<Entry>>) -> Result<(), Failed> {
        if chunks.is_empty() {
            return Ok(());
        }
        self.mark_dirty().await?;
        let pages = emit_pages(blob, &chunks, |chunk| blob.state.borrow().extent_pages[chunk]);
        if let Err(error) = self.write_pages(&pages).await {
            // Any of them may be on disk: written as they were, none is.
            let old: BTreeMap<_, _> = chunks.keys().map(|chunk| (*chunk, Vec::new())).collect();
            let pages = emit_pages(blob, &old, |chunk| blob.state.borrow().extent_pages[chunk]);
            let restored = async { self.write_pages(&pages).await.and(self.flush().await) }.await;
            return Err(Failed { error, certain: restored.is_ok() });
        }
        chunks.values().for_each(|entries| show(blob, entries));
        Ok(())
    }

    /// Writes extent pages for chunks that had none, and the chain that names them.
    async fn add_pages(&self, blob: &Blob, chunks: BTreeMap<usize, Vec<Entry>>) -> Result<(), Failed> {
        let chunks: BTreeMap<_, _> =
            chunks.into_iter().filter(|(_, entries)| entries.iter().any(|e| e.1 != 0)).collect();
        if chunks.is_empty() {
            return Ok(());
        }
        let mut fresh = Fresh::default();
        let (md, mut extent_pages) = {
            let state = blob.state.borrow();
            (state.md.clone(), state.extent_pages.clone())
        };
        for chunk in chunks.keys() {
            let page = self.state.borrow_mut().pages.take_for_extents();
            let Some(page) = page else {
                return Err(self.undo(fresh, Error::NoSpace("no metadata page is free").into()).into());
            };
            fresh.pages.push(page);
            extent_pages[*chunk] = page;
        }
        let pages = emit_pages(blob, &chunks, |chunk| extent_pages[chunk]);
        let written = async {
            self.mark_dirty().await?;
            self.write_pages(&pages).await
        }
        .await;
        if let Err(error) = written {
            return Err(self.undo(fresh, error.into()).into());
        }
        let table = blob.map.table();
        if let Err(failed) = self.commit(blob, Next { md, table: &table, extent_pages, flush_first: true }).await {
            let certain = failed.certain;
            return Err(Failed { error: self.undo(fresh, failed), certain });
        }
        chunks.values().for_each(|entries| show(blob, entries));
        Ok(())
    }
}

/// The extent pages of some chunks with new entries.
fn emit_pages(blob: &Blob, chunks: &BTreeMap<usize, Vec<Entry>>, place: impl Fn(usize) -> u32) -> Vec<(u32, MdPage)> {
    let table = blob.map.table();
    let pages = chunks.iter().map(|(chunk, entries)| {
        let mut clusters = table.chunk(*chunk);
        let start = *chunk as u64 * CHUNK;
        for (n, at) in entries {
            clusters[(n - start) as usize] = *at;
        }
        (place(*chunk), ExtentPage { start_cluster: start as u32, clusters }.emit(blob.id))
    });
    pages.collect()
}

/// Puts entries that are on disk into the map.
fn show(blob: &Blob, entries: &[Entry]) {
    let table = blob.map.table();
    let mut state = blob.state.borrow_mut();
    for (n, at) in entries {
        if table.set(*n, *at) == 0 && *at != 0 {
            state.allocated += 1;
        }
    }
}
