//! Reading and writing the store's own structures: super block, masks, metadata pages.

use crate::{
    device::Device,
    error::Error,
    planted::{self, Bug},
    store::Inner,
    sync::all,
};
use blobstore_format::{Geometry, MaskKind, MdPage, SuperBlock, mask, page::PAGE_SIZE};
use futures::StreamExt;
use std::rc::Rc;

/// Reads in flight while metadata is loaded.
pub(crate) const READS: usize = 4;

/// Bytes that a read of neighbouring metadata pages takes at most.
const READ_PIECE: u64 = 1 << 20;

/// Pages that lie at most this many bytes apart are read at once.
const READ_GAP: u64 = 64 << 10;

/// Reads the first bytes of the device, where the super block is.
pub(crate) async fn read_super(device: &dyn Device) -> Result<Vec<u8>, Error> {
    let block = u64::from(device.block_size());
    let len = (PAGE_SIZE as u64).next_multiple_of(block);
    if device.size_bytes() < len {
        return Err(Error::NotAStore(format!("it has only {} bytes", device.size_bytes())));
    }
    Ok(device.read(0, len as usize).await?)
}

/// Writes a super block.
pub(crate) async fn write_super(device: &dyn Device, super_block: &SuperBlock) -> Result<(), Error> {
    let mut bytes = super_block.emit();
    let block = device.block_size() as usize;
    bytes.resize(bytes.len().next_multiple_of(block), 0);
    Ok(device.write(0, &bytes).await?)
}

/// Reads one mask's pages.
pub(crate) async fn read_mask(device: &dyn Device, geometry: &Geometry, kind: MaskKind) -> Result<Vec<u8>, Error> {
    let (offset, len) = geometry.region_bytes(geometry.mask(kind));
    let mut bytes = Vec::with_capacity(len as usize);
    while (bytes.len() as u64) < len {
        let at = bytes.len() as u64;
        bytes.extend(device.read(offset + at, (len - at).min(READ_PIECE) as usize).await?);
    }
    Ok(bytes)
}

/// Pages of a list, read in few requests: `each` gets the index and the raw bytes of every page, in the order of the
/// list, which must ascend.
pub(crate) async fn read_pages(
    device: &dyn Device,
    geometry: &Geometry,
    pages: &[u32],
    mut each: impl FnMut(u32, &[u8]),
) -> Result<(), Error> {
    let size = u64::from(geometry.md_page_size);
    let reads = neighbours(pages, (READ_GAP / size).max(1), (READ_PIECE / size).max(1)).map(|group| async move {
        let (first, last) = (group[0], group[group.len() - 1]);
        let len = (u64::from(last - first) + 1) * size;
        Ok::<_, Error>((group, device.read(geometry.page_offset(first), len as usize).await?))
    });
    let mut reads = futures::stream::iter(reads).buffered(READS);
    let mut result = Ok(());
    while let Some(read) = reads.next().await {
        match read {
            Ok((group, bytes)) => group.iter().for_each(|page| {
                let at = (page - group[0]) as usize * size as usize;
                each(*page, &bytes[at..at + PAGE_SIZE]);
            }),
            // Those in flight end first.
            Err(error) => result = result.and(Err(error)),
        }
    }
    result
}

/// Splits an ascending list into groups that span at most `most` pages, with at most `gap` from one to the next.
fn neighbours(mut rest: &[u32], gap: u64, most: u64) -> impl Iterator<Item = &[u32]> {
    std::iter::from_fn(move || {
        let first = *rest.first()?;
        let near = |pair: &[u32]| u64::from(pair[1] - pair[0]) <= gap && u64::from(pair[1] - first) < most;
        let (group, later) = rest.split_at(1 + rest.windows(2).take_while(|pair| near(pair)).count());
        rest = later;
        Some(group)
    })
}

impl Inner {
    /// Bytes of a metadata page with `content` at its start.
    fn page_bytes(&self, content: &MdPage) -> Vec<u8> {
        let mut bytes = content.emit();
        bytes.resize(self.geometry().md_page_size as usize, 0);
        bytes
    }

    /// Writes one metadata page.
    pub(crate) async fn write_page(&self, index: u32, content: &MdPage) -> Result<(), Error> {
        let bytes = self.page_bytes(content);
        Ok(self.device.write(self.geometry().page_offset(index), &bytes).await?)
    }

    /// Writes several metadata pages, in any order.
    pub(crate) async fn write_pages(&self, pages: &[(u32, MdPage)]) -> Result<(), Error> {
        all(super::IN_FLIGHT, pages.iter().map(|(index, page)| self.write_page(*index, page))).await
    }

    /// Zeroes one metadata page, in one write.
    pub(crate) async fn zero_page(&self, index: u32) -> Result<(), Error> {
        let geometry = self.geometry();
        let bytes = vec![0; geometry.md_page_size as usize];
        Ok(self.device.write(geometry.page_offset(index), &bytes).await?)
    }

    /// Zeroes pages that nothing on disk names any more, durably, and gives them back. Their content no longer matters,
    /// so neither does an error.
    pub(crate) async fn retire_pages(&self, pages: Vec<u32>) {
        let _ = all(super::IN_FLIGHT, pages.iter().map(|page| self.zero_page(*page))).await;
        if planted::is(Bug::LeakPages) {
            return;
        }
        let mut state = self.state.borrow_mut();
        pages.into_iter().for_each(|page| state.pages.give_back(page));
    }

    /// Makes sure, before the first metadata write, that the super block on disk says that the store is in use.
    pub(crate) async fn mark_dirty(&self) -> Result<(), Error> {
        if self.state.borrow().dirty {
            return Ok(());
        }
        let _guard = self.super_lock.lock().await;
        if self.state.borrow().dirty {
            return Ok(());
        }
        let mut super_block = self.state.borrow().super_block.clone();
        super_block.clean = 0;
        if super_block.size == 0 {
            super_block.size = self.geometry().size;
        }
        if !planted::is(Bug::StaysClean) {
            write_super(&*self.device, &super_block).await?;
            self.flush().await?;
        }
        let mut state = self.state.borrow_mut();
        state.super_block = super_block;
        state.dirty = true;
        Ok(())
    }

    /// Writes the three masks and then the super block with the clean mark.
    pub(crate) async fn write_clean(&self) -> Result<(), Error> {
        let _guard = self.super_lock.lock().await;
        let geometry = self.geometry();
        for kind in [MaskKind::Pages, MaskKind::BlobIds, MaskKind::Clusters] {
            let (offset, room) = geometry.region_bytes(geometry.mask(kind));
            if room == 0 {
                continue;
            }
            let bytes = {
                let state = self.state.borrow();
                let bits = match kind {
                    MaskKind::Pages => state.pages.used(),
                    MaskKind::BlobIds => &state.blobids,
                    MaskKind::Clusters => state.clusters.used(),
                };
                mask::emit(kind, bits, room as usize).map_err(|e| Error::Damaged(e.to_string()))?
            };
            self.device.write(offset, &bytes).await?;
        }
        self.flush().await?;
        let mut super_block = self.state.borrow().super_block.clone();
        super_block.clean = 1;
        write_super(&*self.device, &super_block).await?;
        self.flush().await?;
        let mut state = self.state.borrow_mut();
        state.super_block = super_block;
        state.dirty = false;
        Ok(())
    }
}

/// What has to hold between a device and the store on it.
pub(crate) fn check_blocks(device: &Rc<dyn Device>, geometry: &Geometry) -> Result<(), Error> {
    let block = device.block_size();
    if block == 0 || !geometry.md_page_size.is_multiple_of(block) || !geometry.io_unit_size.is_multiple_of(block) {
        return Err(Error::Invalid(format!(
            "the device has blocks of {block} bytes; those of the store's I/O unit ({}) and metadata pages ({}) must be \
             multiples of it",
            geometry.io_unit_size, geometry.md_page_size
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::neighbours;

    #[test]
    fn pages_near_each_other_are_read_at_once() {
        let pages = [0, 1, 3, 30, 31, 32, 33, 34, 35, 36];
        let groups: Vec<&[u32]> = neighbours(&pages, 2, 5).collect();
        assert_eq!(groups, [&[0, 1, 3][..], &[30, 31, 32, 33, 34], &[35, 36]]);
        assert_eq!(neighbours(&[], 2, 5).count(), 0);
    }
}
