//! The checker: finds and names every inconsistency in a blobstore, without changing it.
//!
//! It looks at the whole store at once, whatever the super block says of its state: super block, geometry, masks (when
//! the store is clean), every metadata page, every blob by itself, and all of them against each other. A damaged part
//! does not end the check of the others. Like the [reader](crate::image) it ends on every input and takes memory in
//! proportion to what was written; the number of findings listed is bounded too.
//!
//! | Severity | Meaning |
//! |---|---|
//! | error | an lvol or the store cannot be opened, or data is at risk |
//! | warning | inconsistent, but nothing is lost: loading repairs it, or leaves it as it is |
//! | note | worth knowing, not wrong: such as a store that was not unloaded in order |

mod rules;

use std::fmt;
use std::io;

use serde::Serialize;
use thiserror::Error;

use crate::image::{Image, ImageError, Mode};
use crate::superblock::SuperError;
use crate::{BlobId, ReadAt};

/// Findings listed of one kind; further ones are counted.
pub const MAX_OF_KIND: usize = 100;

/// How bad a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// Worth knowing.
    Note,
    /// Inconsistent, but nothing is lost.
    Warning,
    /// Something cannot be opened, or data is at risk.
    Error,
}

impl fmt::Display for Severity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Note => "note",
            Self::Warning => "warning",
            Self::Error => "error",
        })
    }
}

/// What a finding is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// The super block's CRC, version or a field of it.
    SuperBlock,
    /// Not an lvolstore.
    StoreType,
    /// The super block's numbers do not fit each other or the device.
    Geometry,
    /// The store was not unloaded in order.
    NotClean,
    /// The device is larger than the store.
    DeviceLarger,
    /// A mask's header.
    Mask,
    /// A metadata page is used, but not marked so.
    PageNotMarked,
    /// A cluster is used, but not marked so.
    ClusterNotMarked,
    /// A blob exists, but is not marked so.
    BlobNotMarked,
    /// A metadata page is marked as used, but no blob uses it.
    PageLeaked,
    /// A cluster is marked as used, but no blob uses it.
    ClusterLeaked,
    /// A metadata page's CRC is wrong.
    PageDamaged,
    /// A metadata page is in order, but no blob uses it.
    PageOrphaned,
    /// A page that belongs to a blob's chain is missing, damaged or elsewhere.
    Chain,
    /// A chain of pages that goes round.
    ChainCycle,
    /// A blob's descriptors.
    Metadata,
    /// Flags that are not known.
    UnknownFlags,
    /// A descriptor of a type that is not known.
    UnknownDescriptor,
    /// Flags that contradict the rest of the metadata.
    FlagsContradict,
    /// Two xattrs of one name.
    DuplicateXattr,
    /// An extent page is missing, damaged, or not the one for its place.
    ExtentPage,
    /// A resize was interrupted.
    Resized,
    /// A thick lvol with clusters that are not allocated.
    ThickHole,
    /// A cluster that the device does not have.
    ClusterBeyondDevice,
    /// An lvol's cluster within the store's metadata.
    ClusterInMetadata,
    /// A cluster with two owners.
    ClusterShared,
    /// A metadata page with two owners.
    PageShared,
    /// A clone without its snapshot.
    ParentMissing,
    /// A clone of itself.
    ParentCycle,
    /// A clone whose snapshot cannot be opened.
    ParentLost,
    /// A snapshot that can be written.
    ParentWritable,
    /// A snapshot was being made or deleted.
    UnfinishedSnapshot,
    /// Of such a snapshot nothing can be decided.
    Undecided,
    /// The super blob is missing or cannot be used.
    SuperBlob,
    /// A name is missing or cannot be used.
    Name,
    /// Two lvols of one name.
    SameName,
    /// A UUID is missing or cannot be used.
    Uuid,
    /// Two lvols of one UUID.
    SameUuid,
    /// After a crash the store cannot be recovered.
    Recovery,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Debug names are CamelCase; the text is that of the JSON form.
        for (i, c) in format!("{self:?}").chars().enumerate() {
            if c.is_ascii_uppercase() && i > 0 {
                f.write_str("-")?;
            }
            write!(f, "{}", c.to_ascii_lowercase())?;
        }
        Ok(())
    }
}

/// Where a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Place {
    /// The store as a whole.
    Store,
    /// The super block.
    SuperBlock,
    /// The used-page mask.
    PageMask,
    /// The used-cluster mask.
    ClusterMask,
    /// The used-blobid mask.
    BlobidMask,
    /// A metadata page, by its index in the metadata region.
    Page(u32),
    /// Clusters of the device: the first, and how many.
    Clusters(u32, u64),
    /// The blob named with the finding.
    Blob,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Store => f.write_str("store"),
            Self::SuperBlock => f.write_str("super block"),
            Self::PageMask => f.write_str("used-page mask"),
            Self::ClusterMask => f.write_str("used-cluster mask"),
            Self::BlobidMask => f.write_str("used-blobid mask"),
            Self::Page(index) => write!(f, "page {index}"),
            Self::Clusters(first, 1) => write!(f, "cluster {first}"),
            Self::Clusters(first, count) => write!(f, "clusters {first} to {}", u64::from(*first) + count - 1),
            Self::Blob => f.write_str("blob"),
        }
    }
}

/// Something that was found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// How bad it is.
    pub severity: Severity,
    /// What it is about.
    pub kind: Kind,
    /// Where it is.
    pub place: Place,
    /// The blob it concerns.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub blob: Option<BlobId>,
    /// That blob's name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// What is wrong: field, value, and what is allowed.
    pub message: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} [{}] {}", self.severity, self.kind, self.place)?;
        match (&self.blob, &self.name) {
            (Some(blob), Some(name)) => write!(f, " {blob} ({name:?})")?,
            (Some(blob), None) => write!(f, " {blob}")?,
            _ => {}
        }
        write!(f, ": {}", self.message)
    }
}

/// What an engine would do with the store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    /// Open it.
    Opens {
        /// Lvols that can be used.
        lvols: usize,
        /// Blobs that cannot be opened.
        lost: usize,
        /// Unfinished snapshots that are removed.
        removed: usize,
    },
    /// Refuse it, for this reason.
    Refused(String),
}

/// Everything that was found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Report {
    /// The findings, in the order of the store's parts.
    pub findings: Vec<Finding>,
    /// Findings that were counted, not listed: there were too many of one kind.
    pub not_listed: u64,
    /// What an engine would do.
    pub outcome: Outcome,
}

impl Report {
    /// Whether nothing is wrong: there are notes at most.
    pub fn is_clean(&self) -> bool {
        self.count(Severity::Error) == 0 && self.count(Severity::Warning) == 0
    }

    /// Number of listed findings of a severity.
    pub fn count(&self, severity: Severity) -> usize {
        self.findings.iter().filter(|finding| finding.severity == severity).count()
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for finding in &self.findings {
            writeln!(f, "{finding}")?;
        }
        if self.not_listed > 0 {
            writeln!(f, "{} further findings are not listed", self.not_listed)?;
        }
        match &self.outcome {
            Outcome::Opens { lvols, lost, removed } => {
                write!(f, "the store opens: {lvols} lvols")?;
                if *lost > 0 {
                    write!(f, ", {lost} cannot be opened")?;
                }
                if *removed > 0 {
                    write!(f, ", {removed} unfinished snapshots are removed")?;
                }
            }
            Outcome::Refused(reason) => write!(f, "the store cannot be opened: {reason}")?,
        }
        let [errors, warnings] = [Severity::Error, Severity::Warning].map(|severity| self.count(severity));
        write!(f, "; {errors} errors, {warnings} warnings")
    }
}

/// Why there is nothing to check.
#[derive(Debug, Error)]
pub enum CheckError {
    /// It cannot be read.
    #[error("reading at byte {offset}: {error}")]
    Io {
        /// Where.
        offset: u64,
        /// Why.
        error: io::Error,
    },
    /// No blobstore.
    #[error("this is not a blobstore: {0}")]
    NoBlobstore(SuperError),
}

/// Checks the blobstore in `src`.
pub fn check(src: &(impl ReadAt + ?Sized)) -> Result<Report, CheckError> {
    let (findings, not_listed) = rules::run(src)?;
    let outcome = match Image::open(src, Mode::AsMarked) {
        Ok(image) => {
            Outcome::Opens { lvols: image.lvols().count(), lost: image.lost.len(), removed: image.removed.len() }
        }
        Err(ImageError::Io { offset, error }) => return Err(CheckError::Io { offset, error }),
        Err(error) => Outcome::Refused(error.to_string()),
    };
    Ok(Report { findings, not_listed, outcome })
}
