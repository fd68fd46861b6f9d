//! Everything an image's metadata region holds, before it is given a meaning.
//!
//! Memory is bounded by what was written to the region: pages that are all zero are not kept.

use std::collections::BTreeMap;

use super::{ImageError, PageProblem};
use crate::bytes::{u32_at, u64_at};
use crate::page::{PAGE_SIZE, PageError};
use crate::superblock::{BsType, SIZE};
use crate::{Bits, BlobId, Geometry, MaskKind, MdPage, ReadAt, SuperBlock, mask};

/// Bytes read at once.
const CHUNK: u64 = 1 << 20;
static ZEROES: [u8; PAGE_SIZE] = [0; PAGE_SIZE];

/// A page that is not all zero, but damaged: what its header seems to say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Damaged {
    /// What is wrong with it.
    pub error: PageError,
    /// The blob it seems to belong to.
    pub id: BlobId,
    /// Its sequence number, as it seems.
    pub sequence: u32,
}

/// The super block, the geometry that follows from it, and all metadata pages.
pub struct Scan {
    /// The super block.
    pub super_block: SuperBlock,
    /// Where everything lies.
    pub geometry: Geometry,
    pages: BTreeMap<u32, Result<MdPage, Damaged>>,
}

impl Scan {
    /// Reads super block and metadata region. The store has to be of type `bstype`, when one is given.
    pub fn read(src: &(impl ReadAt + ?Sized), bstype: Option<BsType>) -> Result<Self, ImageError> {
        if src.size() < SIZE as u64 {
            return Err(crate::superblock::SuperError::Short(src.size() as usize).into());
        }
        let super_block = SuperBlock::parse(&read(src, 0, SIZE)?)?;
        if let Some(expected) = bstype
            && expected != super_block.bstype
        {
            return Err(ImageError::Type { found: super_block.bstype, expected });
        }
        let geometry = Geometry::of(&super_block, src.size())?;
        let mut scan = Self { super_block, geometry, pages: BTreeMap::new() };
        scan.read_pages(src)?;
        Ok(scan)
    }

    fn read_pages(&mut self, src: &(impl ReadAt + ?Sized)) -> Result<(), ImageError> {
        let g = self.geometry;
        let page_size = u64::from(g.md_page_size);
        let at_once = (CHUNK / page_size) as u32;
        let mut index = 0;
        while index < g.md_len {
            let offset = g.page_offset(index);
            let Some(data) = src.next_data(offset).map_err(|error| ImageError::Io { offset, error })? else { break };
            let skip = data.saturating_sub(offset) / page_size;
            index = match u32::try_from(u64::from(index) + skip) {
                Ok(index) if index < g.md_len => index,
                _ => break,
            };
            let count = at_once.min(g.md_len - index);
            let bytes = read(src, g.page_offset(index), (u64::from(count) * page_size) as usize)?;
            for (i, page) in bytes.chunks_exact(page_size as usize).enumerate() {
                if page[..PAGE_SIZE] != ZEROES {
                    let seems = |error| Damaged { error, id: BlobId(u64_at(page, 0)), sequence: u32_at(page, 8) };
                    self.pages.insert(index + i as u32, MdPage::parse(page).map_err(seems));
                }
            }
            index += count;
        }
        Ok(())
    }

    /// A metadata page.
    pub fn page(&self, index: u32) -> Result<&MdPage, PageProblem> {
        if index >= self.geometry.md_len {
            return Err(PageProblem::Outside { md_len: self.geometry.md_len });
        }
        match self.pages.get(&index) {
            None => Err(PageProblem::Empty),
            Some(Err(damaged)) => Err(PageProblem::Damaged(damaged.error.clone())),
            Some(Ok(page)) => Ok(page),
        }
    }

    /// All pages that are not all zero.
    pub fn pages(&self) -> impl Iterator<Item = (u32, Result<&MdPage, &Damaged>)> {
        self.pages.iter().map(|(index, page)| (*index, page.as_ref()))
    }

    /// The blobs whose root pages are undamaged.
    pub fn roots(&self) -> impl Iterator<Item = BlobId> + '_ {
        let good = self.pages.iter().filter_map(|(index, page)| Some((*index, page.as_ref().ok()?)));
        good.filter(|(index, page)| page.is_root_at(*index)).map(|(index, _)| BlobId::from_page(index))
    }

    /// A mask, as it is on disk.
    pub fn mask(&self, src: &(impl ReadAt + ?Sized), kind: MaskKind) -> Result<Bits, ImageError> {
        let bits = self.geometry.mask_bits(kind);
        let (offset, room) = self.geometry.region_bytes(self.geometry.mask(kind));
        let len = room.min(mask::bytes_for(bits));
        Ok(mask::parse(kind, &read(src, offset, len as usize)?, bits)?)
    }
}

pub(super) fn read(src: &(impl ReadAt + ?Sized), offset: u64, len: usize) -> Result<Vec<u8>, ImageError> {
    let mut bytes = vec![0; len];
    src.read_at(offset, &mut bytes).map_err(|error| ImageError::Io { offset, error })?;
    Ok(bytes)
}
