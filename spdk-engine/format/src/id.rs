//! Blob ids: the index of a blob's root page in the metadata region, with a mark above it.

use std::fmt;

/// The id of a blob, as it stands on disk.
///
/// A blob's id is `1 << 32` plus the index of its root page. Other values occur in damaged metadata only, except
/// [`BlobId::INVALID`] and [`BlobId::EXTERNAL`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlobId(pub u64);

impl BlobId {
    /// No blob.
    pub const INVALID: Self = Self(u64::MAX);
    /// "The parent is an external device"; in memory only, never on disk.
    pub const EXTERNAL: Self = Self(u64::MAX - 1);

    /// The id of the blob whose root page has this index.
    pub const fn from_page(page: u32) -> Self {
        Self(1 << 32 | page as u64)
    }

    /// The index of the root page; `None` when this is not the id of a blob.
    pub const fn page(self) -> Option<u32> {
        if self.0 >> 32 == 1 { Some(self.0 as u32) } else { None }
    }
}

impl fmt::Debug for BlobId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for BlobId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

/// As text, like [`Display`](fmt::Display): numbers of this size are not safe in JSON.
impl serde::Serialize for BlobId {
    fn serialize<S: serde::Serializer>(&self, out: S) -> Result<S::Ok, S::Error> {
        out.collect_str(self)
    }
}
