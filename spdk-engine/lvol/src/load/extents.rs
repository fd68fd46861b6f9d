//! Reading extent pages into the maps.

use super::Loader;
use crate::{error::Error, map::CHUNK, store::read_pages, types::*};
use blobstore_format::{MdPage, extent::ExtentPage};
use std::{cell::Cell, collections::BTreeMap};

impl Loader<'_> {
    /// Reads every extent page that a blob names, each once, in the order of their places.
    pub(super) async fn read_extents(&mut self) -> Result<(), Error> {
        let mut users: BTreeMap<u32, Vec<(BlobId, usize)>> = BTreeMap::new();
        let mut problems = Vec::new();
        for blob in self.blobs.values() {
            for (chunk, page) in blob.extent_pages.iter().enumerate().filter(|(_, page)| **page != 0) {
                if *page < self.geometry.md_len {
                    users.entry(*page).or_default().push((blob.id, chunk));
                } else {
                    problems.push((blob.id, format!("it names page {page} of {}", self.geometry.md_len)));
                }
            }
        }
        let places: Vec<u32> = users.keys().copied().collect();
        let (done, total) = (Cell::new(0), places.len() as u64);
        let (device, geometry) = (self.device.clone(), self.geometry);
        let mut found = Vec::new();
        for batch in places.chunks(1024) {
            read_pages(&*device, &geometry, batch, |index, bytes| {
                found.push((index, MdPage::parse(bytes).map_err(|e| e.to_string())));
            })
            .await?;
            for (index, page) in found.drain(..) {
                for (id, chunk) in users.get(&index).into_iter().flatten() {
                    let taken = page.clone().and_then(|page| self.take_extents(*id, *chunk, &page));
                    if let Err(reason) = taken {
                        problems.push((*id, format!("extent page {index}: {reason}")));
                    }
                }
            }
            done.set(done.get() + batch.len() as u64);
            self.report(LoadStage::Extents, done.get(), total);
        }
        for (id, reason) in problems {
            if !self.clean {
                return Err(Error::Damaged(format!("blob {id}: {reason}")));
            }
            self.leave_out(id, reason);
        }
        Ok(())
    }

    /// Puts an extent page into a blob's map.
    fn take_extents(&mut self, id: BlobId, chunk: usize, page: &MdPage) -> Result<(), String> {
        let page = ExtentPage::parse_at(page, chunk as u64).map_err(|e| e.to_string())?;
        let Some(blob) = self.blobs.get_mut(&id) else { return Ok(()) };
        let expected = blob.table.chunk_len(chunk);
        if page.clusters.len() != expected {
            // As after a crash of SPDK amid a resize: it rewrites the page before the size changes.
            blob.odd_chunks.push(chunk);
        }
        for (i, at) in page.clusters.iter().enumerate().take(expected).filter(|(_, at)| **at != 0) {
            blob.table.set(chunk as u64 * CHUNK + i as u64, *at);
        }
        Ok(())
    }
}
