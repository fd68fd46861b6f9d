//! Descriptors: what a metadata page says, one after the other, each `type: u8, length: u32` and its payload.
//!
//! A page's descriptors end at a padding descriptor of length 0, or where no further header fits. None crosses a page
//! border. [`iter`] walks them without interpreting; the payloads are parsed here ([`Flags`], [`Xattr`]) and in
//! [`extent`](crate::extent).

use std::fmt;

use thiserror::Error;

use crate::bytes::{put, u16_at, u32_at, u64_at};

/// Bytes of a descriptor's header.
pub const HEADER: usize = 5;
/// Descriptor types.
pub mod kind {
    /// Ends the page when its length is 0; skipped otherwise.
    pub const PADDING: u8 = 0;
    /// A run-length list of clusters.
    pub const EXTENT_RLE: u8 = 1;
    /// An extended attribute.
    pub const XATTR: u8 = 2;
    /// The blob's flags.
    pub const FLAGS: u8 = 3;
    /// An extended attribute of the blobstore itself.
    pub const INTERNAL_XATTR: u8 = 4;
    /// A list of extent pages.
    pub const EXTENT_TABLE: u8 = 5;
    /// A list of clusters; alone in its page.
    pub const EXTENT_PAGE: u8 = 6;
}

/// Why a descriptor cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum DescriptorError {
    /// It is longer than the rest of its page.
    #[error("descriptor {kind:#04x} at byte {at} has length {length}; the page has room for {room}")]
    Overrun {
        /// Byte within the page's descriptors.
        at: usize,
        /// Its type.
        kind: u8,
        /// Length of its payload.
        length: u32,
        /// Bytes up to the page's end.
        room: usize,
    },
    /// Its length does not fit its type.
    #[error("descriptor {kind:#04x} at byte {at} has length {length}; allowed is {allowed}")]
    Length {
        /// Byte within the page's descriptors.
        at: usize,
        /// Its type.
        kind: u8,
        /// Length of its payload.
        length: usize,
        /// What the type allows.
        allowed: &'static str,
    },
    /// An xattr whose parts do not add up to its length.
    #[error("the xattr at byte {at} has length {length}, but its name ({name}) and value ({value}) need {}", 4 + name + value)]
    Xattr {
        /// Byte within the page's descriptors.
        at: usize,
        /// Length of its payload.
        length: usize,
        /// Recorded length of its name.
        name: usize,
        /// Recorded length of its value.
        value: usize,
    },
    /// A type that is not known.
    #[error("descriptor {kind:#04x} at byte {at} is of an unknown type; 0x00 to 0x06 are known")]
    Unknown {
        /// Byte within the page's descriptors.
        at: usize,
        /// Its type.
        kind: u8,
    },
}

/// A descriptor, not interpreted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Raw<'a> {
    /// Byte within the page's descriptors.
    pub at: usize,
    /// One of [`kind`], or another.
    pub kind: u8,
    /// Its contents.
    pub payload: &'a [u8],
}

/// The descriptors in `bytes` (a page's), padding left out. Ends after the first error.
pub fn iter(bytes: &[u8]) -> impl Iterator<Item = Result<Raw<'_>, DescriptorError>> {
    let mut at = 0;
    std::iter::from_fn(move || {
        loop {
            let start = at;
            let rest = bytes.get(start..).filter(|rest| rest.len() >= HEADER)?;
            let (kind, length) = (rest[0], u32_at(rest, 1));
            if kind == kind::PADDING && length == 0 {
                at = bytes.len();
                return None;
            }
            let room = rest.len() - HEADER;
            let Some(payload) = rest[HEADER..].get(..length as usize) else {
                at = bytes.len();
                return Some(Err(DescriptorError::Overrun { at: start, kind, length, room }));
            };
            at = start + HEADER + payload.len();
            if kind != kind::PADDING {
                return Some(Ok(Raw { at: start, kind, payload }));
            }
        }
    })
}

/// A descriptor's bytes.
pub fn emit(kind: u8, payload: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(HEADER + payload.len());
    out.push(kind);
    out.extend_from_slice(&(payload.len() as u32).to_le_bytes());
    out.extend_from_slice(payload);
    out
}

/// How a blob's clusters are cleared when they are released.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClearMethod {
    /// As the store does by default: unmap.
    Default = 0,
    /// Not at all.
    None = 1,
    /// Unmap.
    Unmap = 2,
    /// Write zeroes.
    WriteZeroes = 3,
}

/// The three words of a flags descriptor. Unknown bits are kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flags {
    /// Bits without whose knowledge a blob must not be opened.
    pub invalid: u64,
    /// Bits without whose knowledge a blob must not be written.
    pub data_ro: u64,
    /// Bits without whose knowledge a blob's metadata must not be written.
    pub md_ro: u64,
}

impl Flags {
    /// In `invalid`: clusters are allocated when they are first written.
    pub const THIN: u64 = 1;
    /// In `invalid`: there are internal xattrs.
    pub const INTERNAL_XATTRS: u64 = 2;
    /// In `invalid`: clusters are listed in extent pages.
    pub const EXTENT_TABLE: u64 = 4;
    /// In `invalid`: a clone of an external device.
    pub const EXTERNAL: u64 = 8;
    /// All known bits of `invalid`.
    pub const KNOWN_INVALID: u64 = 0xf;
    /// In `data_ro`, and all that is known of it: read-only.
    pub const READ_ONLY: u64 = 1;
    /// In `md_ro`, and all that is known of it: the clear method.
    pub const CLEAR_METHOD: u64 = 3;
    /// Bytes of the payload.
    pub const SIZE: usize = 24;

    /// Whether clusters are allocated when they are first written.
    pub fn thin(self) -> bool {
        self.invalid & Self::THIN != 0
    }

    /// Whether the blob is a clone of an external device.
    pub fn external(self) -> bool {
        self.invalid & Self::EXTERNAL != 0
    }

    /// Bits of `invalid` that are not known: the blob must not be opened.
    pub fn unknown_invalid(self) -> u64 {
        self.invalid & !Self::KNOWN_INVALID
    }

    /// Bits of `data_ro` that are not known.
    pub fn unknown_data_ro(self) -> u64 {
        self.data_ro & !Self::READ_ONLY
    }

    /// Bits of `md_ro` that are not known.
    pub fn unknown_md_ro(self) -> u64 {
        self.md_ro & !Self::CLEAR_METHOD
    }

    /// Whether the contents must not be written: read-only, or an unknown bit.
    pub fn data_is_read_only(self) -> bool {
        self.data_ro != 0
    }

    /// Whether the metadata must not be written.
    pub fn metadata_is_read_only(self) -> bool {
        self.data_is_read_only() || self.unknown_md_ro() != 0
    }

    /// How released clusters are cleared.
    pub fn clear_method(self) -> ClearMethod {
        match self.md_ro & Self::CLEAR_METHOD {
            0 => ClearMethod::Default,
            1 => ClearMethod::None,
            2 => ClearMethod::Unmap,
            _ => ClearMethod::WriteZeroes,
        }
    }

    /// Sets how released clusters are cleared.
    pub fn set_clear_method(&mut self, method: ClearMethod) {
        self.md_ro = self.md_ro & !Self::CLEAR_METHOD | method as u64;
    }

    /// The flags in a descriptor of type [`kind::FLAGS`].
    pub fn parse(raw: &Raw) -> Result<Self, DescriptorError> {
        if raw.payload.len() != Self::SIZE {
            let length = raw.payload.len();
            return Err(DescriptorError::Length { at: raw.at, kind: raw.kind, length, allowed: "24" });
        }
        let word = |at| u64_at(raw.payload, at);
        Ok(Self { invalid: word(0), data_ro: word(8), md_ro: word(16) })
    }

    /// The descriptor's bytes.
    pub fn emit(self) -> Vec<u8> {
        let mut payload = [0; Self::SIZE];
        put(&mut payload, 0, &self.invalid.to_le_bytes());
        put(&mut payload, 8, &self.data_ro.to_le_bytes());
        put(&mut payload, 16, &self.md_ro.to_le_bytes());
        emit(kind::FLAGS, &payload)
    }
}

/// An extended attribute. Names are bytes: nothing keeps other writers to UTF-8.
#[derive(Clone, PartialEq, Eq)]
pub struct Xattr {
    /// Its name, without terminator.
    pub name: Vec<u8>,
    /// Its value.
    pub value: Vec<u8>,
}

impl Xattr {
    /// An attribute.
    pub fn new(name: impl AsRef<[u8]>, value: impl Into<Vec<u8>>) -> Self {
        Self { name: name.as_ref().to_vec(), value: value.into() }
    }

    /// The attribute in a descriptor of type [`kind::XATTR`] or [`kind::INTERNAL_XATTR`].
    pub fn parse(raw: &Raw) -> Result<Self, DescriptorError> {
        let payload = raw.payload;
        let (name, value) = (usize::from(u16_at(payload, 0)), usize::from(u16_at(payload, 2)));
        if payload.len() != 4 + name + value {
            return Err(DescriptorError::Xattr { at: raw.at, length: payload.len(), name, value });
        }
        Ok(Self { name: payload[4..4 + name].to_vec(), value: payload[4 + name..].to_vec() })
    }

    /// The descriptor's bytes. Lengths must be below 65536: longer ones do not fit a page in any case.
    pub fn emit(&self, kind: u8) -> Vec<u8> {
        let mut payload = Vec::with_capacity(4 + self.name.len() + self.value.len());
        payload.extend_from_slice(&(self.name.len() as u16).to_le_bytes());
        payload.extend_from_slice(&(self.value.len() as u16).to_le_bytes());
        payload.extend_from_slice(&self.name);
        payload.extend_from_slice(&self.value);
        emit(kind, &payload)
    }
}

impl fmt::Debug for Xattr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}={:?}", String::from_utf8_lossy(&self.name), self.value.escape_ascii().to_string())
    }
}
