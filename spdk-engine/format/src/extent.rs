//! Where a blob's clusters lie: an extent table that names extent pages, or (old) run-length lists of clusters.
//!
//! Both are kept as the runs they are on disk, so that a blob of any claimed length takes no more memory than its
//! metadata. Cluster 0 and page 0 stand for "not allocated": both always belong to the store's own metadata.

use thiserror::Error;

use crate::BlobId;
use crate::bytes::{put, u32_at, u64_at};
use crate::descriptor::{self, DescriptorError, Raw, kind};
use crate::page::{DESCRIPTORS, MdPage, NO_PAGE};

/// Clusters that one extent page lists.
pub const CLUSTERS_PER_PAGE: u32 = 512;
/// The longest a blob can be, in clusters: an extent page names its first cluster in 32 bits.
pub const MAX_CLUSTERS: u64 = 1 << 32;

/// Number of extent pages of a blob of `clusters` clusters.
pub fn pages_for(clusters: u64) -> u64 {
    clusters.div_ceil(u64::from(CLUSTERS_PER_PAGE))
}

/// A run of clusters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// The first cluster on the device; 0 for clusters that are not allocated.
    pub cluster: u32,
    /// Number of clusters.
    pub length: u32,
}

impl Run {
    /// Whether `next` goes on where this run ends, so that both are one.
    fn joins(self, next: Run) -> bool {
        let length_fits = self.length.checked_add(next.length).is_some();
        let follows = match self.cluster {
            0 => next.cluster == 0,
            first => u64::from(first) + u64::from(self.length) == u64::from(next.cluster),
        };
        length_fits && follows
    }

    /// The runs in a descriptor of type [`kind::EXTENT_RLE`]. Runs of length 0 are left out.
    pub fn parse(raw: &Raw) -> Result<Vec<Run>, DescriptorError> {
        check_pairs(raw)?;
        let runs = raw.payload.chunks_exact(8).map(|c| Run { cluster: u32_at(c, 0), length: u32_at(c, 4) });
        Ok(runs.filter(|run| run.length != 0).collect())
    }
}

/// Adds a run at the end, joined to the last one where possible, as SPDK writes them.
pub fn push_run(runs: &mut Vec<Run>, run: Run) {
    match runs.last_mut() {
        _ if run.length == 0 => {}
        Some(last) if last.joins(run) => last.length += run.length,
        _ => runs.push(run),
    }
}

/// A run of extent pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableRun {
    /// The index of an extent page; 0 for extent pages without any cluster.
    pub page: u32,
    /// Number of extent pages: 1 unless `page` is 0.
    pub count: u32,
}

/// A blob's extent table.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExtentTable {
    /// Length of the blob in clusters.
    pub num_clusters: u64,
    /// Its extent pages.
    pub runs: Vec<TableRun>,
}

impl ExtentTable {
    /// The table of a blob of `num_clusters` clusters with these extent pages (0: none).
    pub fn from_pages(num_clusters: u64, pages: impl IntoIterator<Item = u32>) -> Self {
        let mut table = Self { num_clusters, runs: Vec::new() };
        for page in pages {
            table.push(TableRun { page, count: 1 });
        }
        table
    }

    /// Adds entries at the end; those without page are joined.
    pub fn push(&mut self, run: TableRun) {
        match self.runs.last_mut() {
            _ if run.count == 0 => {}
            Some(TableRun { page: 0, count }) if run.page == 0 && count.checked_add(run.count).is_some() => {
                *count += run.count;
            }
            _ => self.runs.push(run),
        }
    }

    /// Number of extent pages, those that do not exist included.
    pub fn len(&self) -> u64 {
        self.runs.iter().fold(0, |sum, run| sum.saturating_add(run.count.into()))
    }

    /// Whether there is no entry.
    pub fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    /// All entries in order, one for each extent page: its index, or 0. A parsed table has at most 2^23.
    pub fn pages(&self) -> impl Iterator<Item = u32> + '_ {
        self.runs.iter().flat_map(|run| std::iter::repeat_n(run.page, run.count as usize))
    }

    /// The extent pages that exist: position in the table, page index.
    pub fn allocated(&self) -> impl Iterator<Item = (u64, u32)> + '_ {
        let mut position = 0u64;
        self.runs.iter().filter_map(move |run| {
            let at = position;
            position = position.saturating_add(run.count.into());
            (run.page != 0).then_some((at, run.page))
        })
    }

    /// One descriptor's part of a table: its `num_clusters` and entries, as they are.
    pub fn parse_piece(raw: &Raw) -> Result<(u64, Vec<TableRun>), DescriptorError> {
        check_pairs(raw)?;
        let entries = raw.payload[8..].chunks_exact(8);
        Ok((u64_at(raw.payload, 0), entries.map(|c| TableRun { page: u32_at(c, 0), count: u32_at(c, 4) }).collect()))
    }
}

/// Why a page is not a usable extent page.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ExtentPageError {
    /// Not the only page of its kind of chain.
    #[error("an extent page's sequence number is {0}; it has to be 0")]
    Sequence(u32),
    /// Linked to another page.
    #[error("an extent page's next page is {0}; it has to be {NO_PAGE:#x} (none)")]
    Next(u32),
    /// Something else, such as a blob's root page.
    #[error("an extent page's descriptor is of type {0:#04x}; it has to be 0x06")]
    Kind(u8),
    /// Something follows the descriptor.
    #[error("an extent page holds a second descriptor, of length {0}; one alone is allowed")]
    Second(usize),
    /// The descriptor cannot be read.
    #[error(transparent)]
    Descriptor(#[from] DescriptorError),
    /// It begins elsewhere than the table says.
    #[error("the extent page begins with cluster {found} of the blob; by its place it has to be {expected}")]
    Start {
        /// As recorded.
        found: u32,
        /// By its place in the table.
        expected: u64,
    },
    /// It lists more than an extent page may.
    #[error("the extent page lists {0} clusters; 1 to {CLUSTERS_PER_PAGE} are allowed")]
    Count(usize),
}

/// The contents of an extent page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExtentPage {
    /// The blob's cluster that the first entry is about.
    pub start_cluster: u32,
    /// Clusters on the device; 0 where none is allocated.
    pub clusters: Vec<u32>,
}

impl ExtentPage {
    /// The contents of a page. Its id is not looked at: after a snapshot, pages keep the id of the blob that wrote them.
    pub fn parse(page: &MdPage) -> Result<Self, ExtentPageError> {
        if page.sequence != 0 {
            return Err(ExtentPageError::Sequence(page.sequence));
        }
        let bytes = page.descriptors();
        if bytes[0] != kind::EXTENT_PAGE {
            return Err(ExtentPageError::Kind(bytes[0]));
        }
        let mut all = descriptor::iter(bytes);
        let raw = match all.next() {
            Some(raw) => raw?,
            None => return Err(ExtentPageError::Kind(kind::PADDING)),
        };
        if let Some(second) = all.next() {
            return Err(ExtentPageError::Second(second.map_or(usize::MAX, |raw| raw.payload.len())));
        }
        if page.next != NO_PAGE {
            return Err(ExtentPageError::Next(page.next));
        }
        let length = raw.payload.len();
        if length <= 4 || !length.is_multiple_of(4) {
            let allowed = "a multiple of 4, at least 8";
            return Err(DescriptorError::Length { at: raw.at, kind: raw.kind, length, allowed }.into());
        }
        let clusters: Vec<u32> = raw.payload[4..].chunks_exact(4).map(|c| u32_at(c, 0)).collect();
        if clusters.len() > CLUSTERS_PER_PAGE as usize {
            return Err(ExtentPageError::Count(clusters.len()));
        }
        Ok(Self { start_cluster: u32_at(raw.payload, 0), clusters })
    }

    /// Like [`ExtentPage::parse`] for the page at `position` of a blob's table: it has to begin with that cluster.
    pub fn parse_at(page: &MdPage, position: u64) -> Result<Self, ExtentPageError> {
        let extents = Self::parse(page)?;
        let expected = position.saturating_mul(CLUSTERS_PER_PAGE.into());
        if u64::from(extents.start_cluster) != expected {
            return Err(ExtentPageError::Start { found: extents.start_cluster, expected });
        }
        Ok(extents)
    }

    /// The page on disk, written by blob `id`. There must be 1 to [`CLUSTERS_PER_PAGE`] entries; further ones are cut.
    pub fn emit(&self, id: BlobId) -> MdPage {
        let clusters = &self.clusters[..self.clusters.len().min(CLUSTERS_PER_PAGE as usize)];
        let mut payload = vec![0; 4 + 4 * clusters.len()];
        put(&mut payload, 0, &self.start_cluster.to_le_bytes());
        for (i, cluster) in clusters.iter().enumerate() {
            put(&mut payload, 4 + 4 * i, &cluster.to_le_bytes());
        }
        let mut page = MdPage::new(id, 0);
        let bytes = descriptor::emit(kind::EXTENT_PAGE, &payload);
        debug_assert!(bytes.len() <= DESCRIPTORS);
        put(page.descriptors_mut(), 0, &bytes);
        page
    }
}

/// Refuses a payload that is not made of pairs of 32-bit numbers.
fn check_pairs(raw: &Raw) -> Result<(), DescriptorError> {
    let length = raw.payload.len();
    if length == 0 || !length.is_multiple_of(8) {
        let allowed = "a multiple of 8, not 0";
        return Err(DescriptorError::Length { at: raw.at, kind: raw.kind, length, allowed });
    }
    Ok(())
}
