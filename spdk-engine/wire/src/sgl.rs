//! SGL descriptors (Base 2.0, 4.1.2; TCP Transport 1.0, 3.4).
//!
//! A command over TCP has exactly one, in its data pointer, and it only says how much data there is and whether it is
//! in the capsule. Any other form ends the connection, as the amount of data that follows is then unknown.

use crate::pdu::{Fes, TermError};

/// An SGL descriptor of a form NVMe/TCP uses (Base 2.0, 4.1.2; TCP Transport 1.0, 3.4).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sgl {
    /// Transport SGL Data Block, transport-specific: the data goes by data PDUs.
    Transport {
        /// Bytes.
        length: u32,
    },
    /// SGL Data Block by offset: the data is in the command capsule.
    InCapsule {
        /// Bytes from the start of the capsule's data.
        offset: u64,
        /// Bytes.
        length: u32,
    },
}

const SGL_TYPE_IN_CAPSULE: u8 = 0x01;
const SGL_TYPE_TRANSPORT: u8 = 0x5A;
/// Offset of SGL1 in a CapsuleCmd PDU: common header 8, data pointer 24.
const SGL_PDU_OFFSET: u32 = 32;

impl Sgl {
    /// No data.
    pub const NONE: Self = Self::Transport { length: 0 };

    /// Data of `length` bytes, moved by data PDUs.
    pub const fn transport(length: u32) -> Self {
        Self::Transport { length }
    }

    /// Data of `length` bytes at the start of the capsule's data.
    pub const fn in_capsule(length: u32) -> Self {
        Self::InCapsule { offset: 0, length }
    }

    /// Bytes described.
    pub const fn length(self) -> u32 {
        match self {
            Self::Transport { length } | Self::InCapsule { length, .. } => length,
        }
    }

    /// Reads a descriptor.
    ///
    /// # Errors
    /// FES 6 for any other descriptor type; the address of a transport descriptor is not looked at.
    pub fn parse(bytes: &[u8; 16]) -> Result<Self, TermError> {
        let [a0, a1, a2, a3, a4, a5, a6, a7, l0, l1, l2, l3, _, _, _, kind] = *bytes;
        let length = u32::from_le_bytes([l0, l1, l2, l3]);
        match kind {
            SGL_TYPE_TRANSPORT => Ok(Self::Transport { length }),
            SGL_TYPE_IN_CAPSULE => {
                Ok(Self::InCapsule { offset: u64::from_le_bytes([a0, a1, a2, a3, a4, a5, a6, a7]), length })
            }
            _ => Err(TermError::new(Fes::UnsupportedParameter, SGL_PDU_OFFSET + 8)),
        }
    }

    /// Checks the descriptor of a received command: `max_io` bytes by data PDUs, `max_in_capsule` bytes in the
    /// capsule, which carried `capsule_data` bytes.
    ///
    /// # Errors
    /// FES 5 when a limit is exceeded, FES 6 for an in-capsule offset other than 0, FES 1 (offset of PLEN) when the
    /// descriptor and the PDU disagree on the amount of in-capsule data.
    pub fn check(self, max_io: u32, max_in_capsule: u32, capsule_data: u32) -> Result<(), TermError> {
        match self {
            Self::Transport { length } if length > max_io => Err(TermError::new(Fes::LimitExceeded, 0)),
            Self::Transport { .. } => Ok(()),
            Self::InCapsule { offset: 1.., .. } => Err(TermError::new(Fes::UnsupportedParameter, SGL_PDU_OFFSET)),
            Self::InCapsule { length, .. } if length > max_in_capsule => Err(TermError::new(Fes::LimitExceeded, 0)),
            Self::InCapsule { length, .. } if length != capsule_data => Err(TermError::new(Fes::InvalidHeaderField, 4)),
            Self::InCapsule { .. } => Ok(()),
        }
    }

    /// The descriptor as bytes.
    pub fn encode(self) -> [u8; 16] {
        let mut out = [0; 16];
        let (address, kind) = match self {
            Self::Transport { .. } => (0, SGL_TYPE_TRANSPORT),
            Self::InCapsule { offset, .. } => (offset, SGL_TYPE_IN_CAPSULE),
        };
        out[..8].copy_from_slice(&address.to_le_bytes());
        out[8..12].copy_from_slice(&self.length().to_le_bytes());
        out[15] = kind;
        out
    }
}
