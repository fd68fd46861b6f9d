//! The three masks of a store: which metadata pages, clusters and blob ids are used.
//!
//! They are written only on an orderly unload, and mean something only when the super block is clean. On disk a mask is
//! a header of five bytes (type, length in bits) and its bits, in a run of pages of its own.

use std::fmt;

use thiserror::Error;

use crate::Bits;
use crate::bytes::{put, u32_at};

/// Bytes before the bits.
pub const HEADER: usize = 5;

/// What a mask is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MaskKind {
    /// Used metadata pages: root, chain and extent pages.
    Pages = 0,
    /// Used clusters, those of the metadata included.
    Clusters = 1,
    /// Used blob ids: root pages only.
    BlobIds = 2,
}

impl fmt::Display for MaskKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Pages => "used-page mask",
            Self::Clusters => "used-cluster mask",
            Self::BlobIds => "used-blobid mask",
        })
    }
}

/// Why bytes are not the mask that was looked for.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum MaskError {
    /// Another mask, or none.
    #[error("the {kind}'s type is {found}; it has to be {}", *.kind as u8)]
    Type {
        /// The mask.
        kind: MaskKind,
        /// The type found.
        found: u8,
    },
    /// The length does not fit what is counted.
    #[error("the {kind}'s length is {found} bits; {allowed} are expected")]
    Length {
        /// The mask.
        kind: MaskKind,
        /// The length found, in bits.
        found: u32,
        /// The length allowed, in bits.
        allowed: u32,
    },
    /// The mask's pages cannot hold its bits.
    #[error("the {kind} has {bytes} bytes on the device; {needed} are needed for {bits} bits")]
    Room {
        /// The mask.
        kind: MaskKind,
        /// Bytes of its pages.
        bytes: usize,
        /// Bytes needed.
        needed: u64,
        /// Bits of the mask.
        bits: u32,
    },
}

/// Bytes that a mask of `bits` bits takes, header included.
pub fn bytes_for(bits: u32) -> u64 {
    u64::from(bits.div_ceil(8)) + HEADER as u64
}

/// The mask of `kind` in `bytes` (the mask's pages), which must count `bits` things. A used-cluster mask may be longer,
/// as after an interrupted growth; it is cut.
pub fn parse(kind: MaskKind, bytes: &[u8], bits: u32) -> Result<Bits, MaskError> {
    let needed = bytes_for(bits);
    if (bytes.len() as u64) < needed {
        return Err(MaskError::Room { kind, bytes: bytes.len(), needed, bits });
    }
    if bytes[0] != kind as u8 {
        return Err(MaskError::Type { kind, found: bytes[0] });
    }
    let found = u32_at(bytes, 1);
    let longer_is_fine = kind == MaskKind::Clusters && found > bits;
    if found != bits && !longer_is_fine {
        return Err(MaskError::Length { kind, found, allowed: bits });
    }
    Ok(Bits::from_bytes(&bytes[HEADER..], bits))
}

/// The mask as it goes into a run of pages of `room` bytes.
pub fn emit(kind: MaskKind, bits: &Bits, room: usize) -> Result<Vec<u8>, MaskError> {
    let needed = bytes_for(bits.len());
    if (room as u64) < needed {
        return Err(MaskError::Room { kind, bytes: room, needed, bits: bits.len() });
    }
    let mut out = vec![0; room];
    out[0] = kind as u8;
    put(&mut out, 1, &bits.len().to_le_bytes());
    let end = needed as usize;
    bits.write_to(&mut out[HEADER..end]);
    Ok(out)
}
