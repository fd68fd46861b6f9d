//! Header and data digests: CRC-32C (TCP Transport 1.0, 3.3.1.1).
//!
//! Both go on the wire least significant byte first. A wrong header digest ends the connection; a wrong data digest
//! only fails the command.

use std::fmt;

/// Bytes of a header or data digest.
pub const DIGEST_SIZE: usize = 4;

/// CRC-32C of `bytes`, as digests use it (3.3.1.1).
pub fn crc32c(bytes: &[u8]) -> u32 {
    crc_fast::crc32_iscsi(bytes)
}

/// CRC-32C of data that comes in pieces.
#[derive(Clone)]
pub struct DataDigest(crc_fast::Digest);

impl DataDigest {
    /// The digest of no data.
    pub fn new() -> Self {
        Self(crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc32Iscsi))
    }

    /// Takes in the next piece.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The digest of all pieces so far.
    pub fn value(&self) -> u32 {
        self.0.finalize() as u32
    }

    /// The digest as it goes on the wire.
    pub fn to_bytes(&self) -> [u8; DIGEST_SIZE] {
        self.value().to_le_bytes()
    }

    /// Whether `received`, as it came from the wire, is the digest of all pieces so far. When not, the command ends
    /// with [`Status::TRANSIENT_TRANSPORT_ERROR`](crate::Status::TRANSIENT_TRANSPORT_ERROR); the connection stays.
    pub fn matches(&self, received: [u8; DIGEST_SIZE]) -> bool {
        self.to_bytes() == received
    }
}

impl Default for DataDigest {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for DataDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DataDigest({:#010x})", self.value())
    }
}
