//! A metadata page: header, descriptors, the next page of the chain, CRC.
//!
//! Contents are always [`PAGE_SIZE`] bytes. Root and extent pages have sequence number 0, further pages of a blob's
//! chain 1, 2, ... A page's place is its index within the metadata region.

use std::fmt;

use thiserror::Error;

use crate::bytes::{array, put, u32_at, u64_at};
use crate::{BlobId, crc};

/// Bytes of a metadata page that carry data.
pub const PAGE_SIZE: usize = 4096;
/// Bytes of a page's descriptors.
pub const DESCRIPTORS: usize = 4072;
/// The `next` field of the last page.
pub const NO_PAGE: u32 = u32::MAX;
const AT_DESCRIPTORS: usize = 16;
const AT_NEXT: usize = 4088;
const AT_CRC: usize = 4092;

/// Why bytes are not a metadata page.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum PageError {
    /// Fewer bytes than a page has.
    #[error("the page is {0} bytes long; {PAGE_SIZE} are needed")]
    Short(usize),
    /// Damaged, or never written.
    #[error("the page's CRC is {stored:#010x}; its contents have {computed:#010x}")]
    Crc {
        /// As recorded.
        stored: u32,
        /// As the contents have it.
        computed: u32,
    },
}

/// A metadata page.
#[derive(Clone, PartialEq, Eq)]
pub struct MdPage {
    /// The blob that wrote it. On an extent page not necessarily the blob that owns it now: not to be checked there.
    pub id: BlobId,
    /// Number in the chain.
    pub sequence: u32,
    /// Zero; kept.
    pub reserved: u32,
    /// The next page of the chain, or [`NO_PAGE`].
    pub next: u32,
    descriptors: Box<[u8; DESCRIPTORS]>,
}

impl MdPage {
    /// An empty last page.
    pub fn new(id: BlobId, sequence: u32) -> Self {
        Self { id, sequence, reserved: 0, next: NO_PAGE, descriptors: Box::new([0; DESCRIPTORS]) }
    }

    /// The page in the first 4096 of `bytes`.
    pub fn parse(bytes: &[u8]) -> Result<Self, PageError> {
        let Some(bytes) = bytes.get(..PAGE_SIZE) else { return Err(PageError::Short(bytes.len())) };
        let (stored, computed) = (u32_at(bytes, AT_CRC), crc::blobstore(&bytes[..AT_CRC]));
        if stored != computed {
            return Err(PageError::Crc { stored, computed });
        }
        Ok(Self {
            id: BlobId(u64_at(bytes, 0)),
            sequence: u32_at(bytes, 8),
            reserved: u32_at(bytes, 12),
            next: u32_at(bytes, AT_NEXT),
            descriptors: Box::new(array(bytes, AT_DESCRIPTORS)),
        })
    }

    /// The 4096 bytes on disk, with their CRC.
    pub fn emit(&self) -> Vec<u8> {
        let mut out = vec![0; PAGE_SIZE];
        put(&mut out, 0, &self.id.0.to_le_bytes());
        put(&mut out, 8, &self.sequence.to_le_bytes());
        put(&mut out, 12, &self.reserved.to_le_bytes());
        put(&mut out, AT_DESCRIPTORS, &self.descriptors[..]);
        put(&mut out, AT_NEXT, &self.next.to_le_bytes());
        let crc = crc::blobstore(&out[..AT_CRC]);
        put(&mut out, AT_CRC, &crc.to_le_bytes());
        out
    }

    /// The descriptors as bytes; see [`descriptor::iter`](crate::descriptor::iter).
    pub fn descriptors(&self) -> &[u8; DESCRIPTORS] {
        &self.descriptors
    }

    /// The descriptors as bytes, to be changed.
    pub fn descriptors_mut(&mut self) -> &mut [u8; DESCRIPTORS] {
        &mut self.descriptors
    }

    /// Whether this is the root page of the blob that belongs at page `index`.
    pub fn is_root_at(&self, index: u32) -> bool {
        self.sequence == 0 && self.id == BlobId::from_page(index)
    }
}

impl fmt::Debug for MdPage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MdPage")
            .field("id", &self.id)
            .field("sequence", &self.sequence)
            .field("next", &self.next)
            .field("descriptors", &crate::descriptor::iter(&self.descriptors[..]).collect::<Vec<_>>())
            .finish()
    }
}
