//! What can be wrong with one blob.

use thiserror::Error;

use crate::BlobId;
use crate::extent::ExtentPageError;
use crate::lvs::LvsError;
use crate::metadata::MetadataError;
use crate::page::PageError;

/// Why a metadata page cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum PageProblem {
    /// Not within the metadata region.
    #[error("lies outside the metadata region of {md_len} pages")]
    Outside {
        /// Pages of the region.
        md_len: u32,
    },
    /// Never written, or wiped.
    #[error("holds nothing but zeroes")]
    Empty,
    /// Damaged.
    #[error("is damaged: {0}")]
    Damaged(PageError),
}

/// Something wrong with a blob.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Problem {
    /// A page of its chain.
    #[error("metadata page {page} {problem}")]
    Page {
        /// Its index.
        page: u32,
        /// What is wrong.
        problem: PageProblem,
    },
    /// A chain that comes back to itself.
    #[error("metadata page {from} names page {to} as next, which is already in the chain")]
    Cycle {
        /// The last page.
        from: u32,
        /// The page met again.
        to: u32,
    },
    /// The contents of its chain.
    #[error("its metadata is wrong: {0}")]
    Metadata(#[from] MetadataError),
    /// A page that its table names, but cannot be used at all.
    #[error("extent page {page} {problem}")]
    ExtentPageLost {
        /// Its index.
        page: u32,
        /// What is wrong.
        problem: PageProblem,
    },
    /// A page that its table names, but is not the extent page for that place.
    #[error("page {page} cannot be its extent page: {error}")]
    ExtentPage {
        /// Its index.
        page: u32,
        /// What is wrong.
        error: ExtentPageError,
    },
    /// An extent page with too few entries, and others after it.
    #[error("extent page {page} lists {found} clusters; {expected} are needed, as others follow")]
    ExtentGap {
        /// Its index.
        page: u32,
        /// Clusters listed.
        found: usize,
        /// Clusters needed.
        expected: u64,
    },
    /// The last extent page and the table give different lengths, as after an interrupted resize.
    #[error("its extent table gives {table} clusters, its last extent page {listed}: a resize was interrupted")]
    Resized {
        /// By the table.
        table: u64,
        /// By the extent page.
        listed: u64,
    },
    /// A cluster that no device has.
    #[error("cluster {at} of it is cluster {cluster} of the device, which has {total}")]
    ClusterBeyond {
        /// Cluster of the blob.
        at: u64,
        /// On the device.
        cluster: u64,
        /// Clusters of the device.
        total: u32,
    },
    /// A cluster of the store's own metadata.
    #[error(
        "cluster {at} of it is cluster {cluster} of the device, within the store's metadata (clusters below {metadata})"
    )]
    ClusterInMetadata {
        /// Cluster of the blob.
        at: u64,
        /// On the device.
        cluster: u32,
        /// Clusters taken by metadata.
        metadata: u32,
    },
    /// A cluster with two owners.
    #[error("cluster {cluster} of the device belongs to it and to blob {other}")]
    ClusterShared {
        /// On the device.
        cluster: u32,
        /// The other owner.
        other: BlobId,
    },
    /// A metadata page with two owners.
    #[error("metadata page {page} belongs to it and to blob {other}")]
    PageShared {
        /// Its index.
        page: u32,
        /// The other owner.
        other: BlobId,
    },
    /// A clone without its snapshot.
    #[error("its parent, blob {0}, does not exist")]
    ParentMissing(BlobId),
    /// A clone of itself, or of a clone of its own.
    #[error("its parent, blob {0}, is itself or one of its own clones")]
    ParentCycle(BlobId),
    /// A clone whose snapshot cannot be opened.
    #[error("its parent, blob {0}, cannot be opened")]
    ParentLost(BlobId),
    /// An unfinished snapshot whose other blob cannot be opened, so that nothing can be decided.
    #[error(
        "it is a snapshot that was not finished, and blob {0}, which it was made of or is the parent of, cannot be opened"
    )]
    Undecided(BlobId),
    /// A name that another lvol has.
    #[error("its name {name:?} is that of blob {other}")]
    SameName {
        /// The name.
        name: String,
        /// The other lvol.
        other: BlobId,
    },
    /// A UUID that another lvol has.
    #[error("its UUID is that of blob {0}")]
    SameUuid(BlobId),
    /// Not an lvol.
    #[error(transparent)]
    Lvs(#[from] LvsError),
}

impl Problem {
    /// Whether the blob can still be opened.
    pub fn is_harmless(&self) -> bool {
        matches!(self, Self::Resized { .. })
    }

    /// Whether a store with this blob cannot be recovered after a crash: it is not known which clusters are used.
    pub fn stops_recovery(&self) -> bool {
        match self {
            Self::Cycle { .. } | Self::ExtentPageLost { .. } => true,
            Self::ExtentPage { error, .. } => !matches!(error, ExtentPageError::Start { .. }),
            Self::Metadata(error) => matches!(
                error,
                MetadataError::Descriptor { .. } | MetadataError::TableEntry { .. } | MetadataError::EmptyRuns
            ),
            _ => false,
        }
    }

    /// The metadata page it is about, if any.
    pub fn page(&self) -> Option<u32> {
        match self {
            Self::Page { page, .. }
            | Self::ExtentPageLost { page, .. }
            | Self::ExtentPage { page, .. }
            | Self::ExtentGap { page, .. }
            | Self::PageShared { page, .. } => Some(*page),
            Self::Cycle { from, .. } => Some(*from),
            _ => None,
        }
    }
}
