//! One blob of an image, with everything that is wrong with it taken by itself.
//!
//! Examining never gives up at the first problem: what the blob claims is gathered as far as it can be read, because
//! even the clusters of a blob that cannot be opened must not be given to another.

use std::collections::BTreeSet;

use super::map::ClusterMap;
use super::problem::Problem;
use super::scan::Scan;
use crate::extent::{CLUSTERS_PER_PAGE, ExtentPage, ExtentPageError, ExtentTable};
use crate::metadata::{Extents, MetadataError, Reading};
use crate::page::NO_PAGE;
use crate::{BlobId, Geometry, MdPage, Metadata};

/// Problems kept for one blob; further ones are only counted.
const MAX_PROBLEMS: usize = 64;

/// A blob as found.
#[derive(Clone, Debug)]
pub struct Blob {
    /// Its id.
    pub id: BlobId,
    /// Its root page and the chain that follows, as far as it could be followed.
    pub chain: Vec<u32>,
    /// Its extent pages that could be read.
    pub extent_pages: Vec<u32>,
    /// Its metadata, as far as it could be read.
    pub metadata: Option<Metadata>,
    /// Its clusters, as far as they could be read.
    pub map: ClusterMap,
    /// What is wrong with it.
    pub problems: Vec<Problem>,
    /// Problems beyond those listed.
    pub more_problems: u64,
}

impl Blob {
    /// Reads blob `id`.
    pub fn examine(scan: &Scan, id: BlobId) -> Self {
        let mut blob = Self {
            id,
            chain: Vec::new(),
            extent_pages: Vec::new(),
            metadata: None,
            map: ClusterMap::default(),
            problems: Vec::new(),
            more_problems: 0,
        };
        let pages = blob.follow(scan);
        blob.interpret(&pages);
        match blob.metadata.as_ref().map(|metadata| metadata.extents.clone()) {
            Some(Extents::Table(table)) => blob.extents(scan, &table),
            Some(Extents::Runs(runs)) => blob.map = ClusterMap::of_runs(&runs),
            None => {}
        }
        blob.check_clusters(&scan.geometry);
        blob
    }

    /// Whether it can be opened.
    pub fn opens(&self) -> bool {
        self.problems.iter().all(Problem::is_harmless)
    }

    /// The first reason why it cannot be opened.
    pub fn first_problem(&self) -> Option<&Problem> {
        self.problems.iter().find(|p| !p.is_harmless())
    }

    pub(super) fn problem(&mut self, problem: Problem) {
        if self.problems.len() < MAX_PROBLEMS {
            self.problems.push(problem);
        } else {
            self.more_problems += 1;
        }
    }

    /// Follows the chain; no page is visited twice, so the walk ends.
    fn follow(&mut self, scan: &Scan) -> Vec<MdPage> {
        let Some(mut index) = self.id.page() else {
            let error = MetadataError::Id { sequence: 0, expected: BlobId::INVALID, found: self.id };
            self.problem(error.into());
            return Vec::new();
        };
        let (mut pages, mut seen) = (Vec::new(), BTreeSet::new());
        loop {
            let page = match scan.page(index) {
                Ok(page) => page.clone(),
                Err(problem) => {
                    self.problem(Problem::Page { page: index, problem });
                    break;
                }
            };
            seen.insert(index);
            self.chain.push(index);
            let next = page.next;
            pages.push(page);
            if next == NO_PAGE {
                break;
            }
            if seen.contains(&next) {
                self.problem(Problem::Cycle { from: index, to: next });
                break;
            }
            index = next;
        }
        pages
    }

    fn interpret(&mut self, pages: &[MdPage]) {
        if pages.is_empty() {
            return;
        }
        // Of a chain that broke off only what it claims is of interest: that something is missing is known.
        let broken = !self.problems.is_empty();
        match Metadata::parse(self.id, pages, if broken { Reading::Replay } else { Reading::Load }) {
            Ok(metadata) => self.metadata = Some(metadata),
            Err(error) => {
                self.problem(error.into());
                self.metadata = Metadata::parse(self.id, pages, Reading::Replay).ok();
            }
        }
    }

    fn extents(&mut self, scan: &Scan, table: &ExtentTable) {
        let mut len = table.num_clusters;
        let entries: Vec<(u64, u32)> = table.allocated().collect();
        for (position, page) in entries {
            let Some(extents) = self.extent_page(scan, position, page) else { continue };
            let start = position.saturating_mul(CLUSTERS_PER_PAGE.into());
            let found = extents.clusters.len();
            let rest = table.num_clusters.saturating_sub(start);
            let expected = rest.min(u64::from(CLUSTERS_PER_PAGE));
            if found as u64 != expected {
                if rest > u64::from(CLUSTERS_PER_PAGE) {
                    self.problem(Problem::ExtentGap { page, found, expected });
                } else {
                    // The shorter of both: what was to be cut off is cut off, what was to be added is not there yet.
                    len = len.min(start + found as u64);
                    let (table, listed) = (table.num_clusters, start + found as u64);
                    self.problem(Problem::Resized { table, listed });
                }
            }
            let thin = self.metadata.as_ref().is_some_and(|m| m.flags.thin());
            if !thin && let Some(hole) = extents.clusters.iter().position(|cluster| *cluster == 0) {
                self.problem(MetadataError::ThickHole(start + hole as u64).into());
            }
            self.extent_pages.push(page);
            self.map.insert_page(start, extents.clusters);
        }
        self.map.set_len(len);
    }

    fn extent_page(&mut self, scan: &Scan, position: u64, page: u32) -> Option<ExtentPage> {
        let found = match scan.page(page) {
            Ok(found) => found,
            Err(problem) => {
                self.problem(Problem::ExtentPageLost { page, problem });
                return None;
            }
        };
        match ExtentPage::parse_at(found, position) {
            Ok(extents) => Some(extents),
            Err(error) => {
                // One that begins elsewhere still claims its clusters.
                let claims = matches!(error, ExtentPageError::Start { .. }).then(|| ExtentPage::parse(found).ok());
                self.problem(Problem::ExtentPage { page, error });
                claims.flatten()
            }
        }
    }

    fn check_clusters(&mut self, g: &Geometry) {
        let (total, metadata) = (g.total_clusters, g.md_clusters());
        let mut found = Vec::new();
        for (at, run) in self.map.claimed() {
            let (first, end) = (u64::from(run.cluster), u64::from(run.cluster) + u64::from(run.length));
            if end > u64::from(total) {
                let cluster = first.max(u64::from(total));
                found.push(Problem::ClusterBeyond { at: at + (cluster - first), cluster, total });
            }
            if run.cluster < metadata {
                found.push(Problem::ClusterInMetadata { at, cluster: run.cluster, metadata });
            }
            if found.len() > MAX_PROBLEMS {
                break;
            }
        }
        found.into_iter().for_each(|problem| self.problem(problem));
    }
}
