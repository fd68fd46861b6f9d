//! Finding root pages, and following their chains.

use super::{Loader, Loading};
use crate::{
    error::Error,
    map::{Backing, Table},
    store::{READS, read_pages},
    types::*,
};
use blobstore_format::{
    MdPage, Metadata,
    extent::{CLUSTERS_PER_PAGE, ExtentTable, MAX_CLUSTERS},
    metadata::{Extents, MetadataError, Parent, Reading},
    page::{NO_PAGE, PAGE_SIZE},
};
use std::collections::{BTreeMap, HashSet};

/// Bytes that the scan reads at once.
const SCAN_PIECE: u64 = 1 << 20;

/// A chain that is not complete yet.
struct Chain {
    pages: Vec<MdPage>,
    places: Vec<u32>,
    seen: HashSet<u32>,
}

impl Chain {
    fn next(&self) -> Option<u32> {
        self.pages.last().map(|page| page.next).filter(|next| *next != NO_PAGE)
    }
}

impl Loader<'_> {
    /// Reads every blob's metadata, but not its extent pages.
    pub(super) async fn read_blobs(&mut self) -> Result<(), Error> {
        let mut open = if self.clean { self.read_roots().await? } else { self.scan().await? };
        let total = open.len() as u64;
        while !open.is_empty() {
            let (complete, rest): (Vec<_>, Vec<_>) = open.into_iter().partition(|(_, chain)| chain.next().is_none());
            for (id, chain) in complete {
                self.take_in(id, chain)?;
            }
            open = rest.into_iter().collect();
            self.report(LoadStage::Blobs, total - open.len() as u64, total);
            open = self.follow(open).await?;
        }
        Ok(())
    }

    /// The root pages that the mask of blob ids names.
    async fn read_roots(&mut self) -> Result<BTreeMap<BlobId, Chain>, Error> {
        let roots: Vec<u32> = self.masks.blobids.iter().collect();
        let mut open = BTreeMap::new();
        let mut bad = Vec::new();
        read_pages(&*self.device, &self.geometry, &roots, |index, bytes| {
            let id = BlobId::from_page(index);
            match MdPage::parse(bytes) {
                Ok(page) if page.is_root_at(index) => drop(open.insert(id, root(index, page))),
                Ok(page) => bad.push((id, format!("its root page belongs to {} as number {}", page.id, page.sequence))),
                Err(error) => bad.push((id, format!("root page: {error}"))),
            }
        })
        .await?;
        bad.into_iter().for_each(|(id, reason)| self.leave_out(id, reason));
        Ok(open)
    }

    /// The root pages that the metadata region holds. A damaged one is as if it were not there, but is reported.
    async fn scan(&mut self) -> Result<BTreeMap<BlobId, Chain>, Error> {
        let size = u64::from(self.geometry.md_page_size);
        let start = self.geometry.page_offset(0);
        let (end, total) = (start + u64::from(self.geometry.md_len) * size, u64::from(self.geometry.md_len));
        let mut open = BTreeMap::new();
        let mut at = start;
        let device = self.device.clone();
        while at < end {
            let mut pieces = Vec::new();
            while pieces.len() < READS && at < end {
                let data = device.next_data(at, end).await?.clamp(at, end);
                at = start + (data - start) / size * size;
                if at < end {
                    let len = (SCAN_PIECE.max(size) / size * size).min(end - at);
                    pieces.push((at, len));
                    at += len;
                }
            }
            let reads = pieces.iter().map(|(at, len)| device.read(*at, *len as usize));
            let reads = futures::future::join_all(reads).await;
            for ((at, _), bytes) in pieces.into_iter().zip(reads) {
                let first = ((at - start) / size) as u32;
                for (index, bytes) in (first..).zip(bytes?.chunks_exact(size as usize)) {
                    self.scan_page(index, &bytes[..PAGE_SIZE], &mut open);
                }
            }
            self.report(LoadStage::Scan, (at - start) / size, total);
        }
        Ok(open)
    }

    fn scan_page(&mut self, index: u32, bytes: &[u8], open: &mut BTreeMap<BlobId, Chain>) {
        let id = BlobId::from_page(index);
        // Cheaper than a CRC: the id and sequence number that only a root page at this place has.
        if bytes[..8] != id.0.to_le_bytes() || bytes[8..12] != [0; 4] {
            return;
        }
        match MdPage::parse(bytes) {
            Ok(page) => drop(open.insert(id, root(index, page))),
            Err(error) => {
                tracing::warn!(blob = %id, %error, "a damaged root page is passed over");
                let reason = format!("root page: {error}; passed over, its space is free");
                self.damaged.insert(id, DamagedBlob { id, name: None, reason });
            }
        }
    }

    /// Reads the next page of every open chain.
    async fn follow(&mut self, open: BTreeMap<BlobId, Chain>) -> Result<BTreeMap<BlobId, Chain>, Error> {
        let mut wanted: BTreeMap<u32, Vec<BlobId>> = BTreeMap::new();
        let mut chains = BTreeMap::new();
        for (id, mut chain) in open {
            let Some(next) = chain.next() else { continue };
            if next >= self.geometry.md_len {
                let reason = format!("its chain leads to page {next} of {}", self.geometry.md_len);
                self.break_chain(id, &chain, reason);
            } else if !chain.seen.insert(next) {
                let reason = format!("its chain returns to page {next}");
                if !self.clean {
                    return Err(Error::Damaged(format!("blob {id}: {reason}")));
                }
                self.break_chain(id, &chain, reason);
            } else {
                wanted.entry(next).or_default().push(id);
                chains.insert(id, chain);
            }
        }
        let mut broken = Vec::new();
        let places: Vec<u32> = wanted.keys().copied().collect();
        read_pages(&*self.device, &self.geometry, &places, |index, bytes| {
            let page = MdPage::parse(bytes);
            for id in wanted.get(&index).into_iter().flatten() {
                let Some(chain) = chains.get_mut(id) else { continue };
                chain.places.push(index);
                match &page {
                    Ok(page) if page.id == *id && page.sequence as usize == chain.pages.len() => {
                        chain.pages.push(page.clone());
                    }
                    Ok(page) => broken.push((
                        *id,
                        format!("page {index} of its chain belongs to {} as number {}", page.id, page.sequence),
                    )),
                    Err(error) => broken.push((*id, format!("page {index} of its chain: {error}"))),
                }
            }
        })
        .await?;
        for (id, reason) in broken {
            if let Some(chain) = chains.remove(&id) {
                self.break_chain(id, &chain, reason);
            }
        }
        Ok(chains)
    }

    /// Leaves a blob out whose chain leads nowhere; the pages found so far stay reserved.
    fn break_chain(&mut self, id: BlobId, chain: &Chain, reason: String) {
        chain.places.iter().for_each(|page| {
            self.masks.pages.set(*page);
        });
        self.leave_out(id, reason);
        if let Some(root) = id.page() {
            self.masks.blobids.set(root);
        }
    }

    /// Parses a complete chain.
    fn take_in(&mut self, id: BlobId, chain: Chain) -> Result<(), Error> {
        let reading = if self.clean { Reading::Load } else { Reading::Replay };
        match Metadata::parse(id, &chain.pages, reading) {
            Ok(md) => self.add(md, chain.places),
            Err(error) => {
                if !self.clean && matches!(error, MetadataError::Descriptor { .. }) {
                    return Err(Error::Damaged(format!("blob {id}: {error}")));
                }
                self.break_chain(id, &chain, error.to_string());
            }
        }
        Ok(())
    }

    fn add(&mut self, mut md: Metadata, chain: Vec<u32>) {
        let id = md.id;
        let clusters = md.num_clusters();
        let (mut problem, mut pages) = (None, Vec::new());
        if md.flags.unknown_invalid() != 0 {
            problem = Some(format!("it has unknown flags, {:#x}", md.flags.invalid));
        } else if clusters > MAX_CLUSTERS {
            problem = Some(format!("it has {clusters} clusters; at most {MAX_CLUSTERS} are allowed"));
        }
        let parent = md.parent().unwrap_or_else(|error| {
            problem.get_or_insert(error.to_string());
            Parent::None
        });
        let table = Table::new(if clusters > MAX_CLUSTERS { 0 } else { clusters }, Backing::Zeroes);
        let none = Extents::Table(ExtentTable::default());
        let table_mode = match std::mem::replace(&mut md.extents, none) {
            Extents::Table(extents) => {
                pages.extend(extents.pages().take(table.chunk_count()));
                true
            }
            Extents::Runs(runs) => {
                let mut n = 0u64;
                for run in runs {
                    if run.cluster != 0 {
                        (0..run.length).for_each(|i| {
                            table.set(n + u64::from(i), run.cluster.saturating_add(i));
                        });
                    }
                    n += u64::from(run.length);
                }
                false
            }
        };
        pages.resize(table.chunk_count(), 0);
        debug_assert_eq!(crate::map::CHUNK, u64::from(CLUSTERS_PER_PAGE));
        let blob = Loading { id, md, table, table_mode, extent_pages: pages, chain, parent, odd_chunks: Vec::new() };
        self.blobs.insert(id, blob);
        if let Some(problem) = problem {
            self.leave_out(id, problem);
        }
    }
}

fn root(index: u32, page: MdPage) -> Chain {
    Chain { pages: vec![page], places: vec![index], seen: HashSet::from([index]) }
}
