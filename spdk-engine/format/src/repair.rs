//! What becomes of a snapshot that was being made or deleted when the store went down.
//!
//! Both operations move clusters between two blobs in several writes. They leave a mark (SNAPTMP, SNAPRM) on the snapshot
//! that names the other blob; whether that blob names the snapshot as its parent tells how far it came:
//!
//! | The other blob's parent | While being made | While being deleted | So |
//! |---|---|---|---|
//! | is the snapshot | it is linked | nothing has moved yet | keep it, read-only, without mark |
//! | is not the snapshot | not linked yet | everything has moved | remove it; its clusters are the other's |
//!
//! Where the snapshot is removed, whatever it lists that the other blob does not list is free, and extent pages that both
//! list are the other's.

use crate::metadata::{MetadataError, Parent, internal};
use crate::{BlobId, Metadata};

/// The mark of an unfinished operation on a snapshot, with the other blob.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mark {
    /// It was being made of this blob.
    Creating(BlobId),
    /// It was being deleted, and this was its one clone.
    Deleting(BlobId),
}

impl Mark {
    /// The mark on a blob. Of two marks, that of deletion counts.
    pub fn of(blob: &Metadata) -> Result<Option<Self>, MetadataError> {
        if let Some(other) = blob.internal_id(internal::SNAPSHOT_PENDING_REMOVAL)? {
            return Ok(Some(Self::Deleting(other)));
        }
        Ok(blob.internal_id(internal::SNAPSHOT_IN_PROGRESS)?.map(Self::Creating))
    }

    /// The other blob.
    pub fn other(self) -> BlobId {
        match self {
            Self::Creating(id) | Self::Deleting(id) => id,
        }
    }
}

/// What becomes of a marked snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It stays, read-only; the mark goes.
    Keep,
    /// It goes.
    Remove,
}

/// The verdict on a marked snapshot, by the blob that its mark names.
pub fn verdict(snapshot: BlobId, other: &Metadata) -> Result<Verdict, MetadataError> {
    let linked = other.parent()? == Parent::Snapshot(snapshot);
    Ok(if linked { Verdict::Keep } else { Verdict::Remove })
}
