//! The two CRC-32C conventions on disk. Both use the Castagnoli polynomial, reflected; they differ in start value and
//! final inversion.

use crc_fast::{CrcAlgorithm, Digest};

/// CRC of super blocks and metadata pages: the standard CRC-32C.
pub fn blobstore(bytes: &[u8]) -> u32 {
    crc_fast::crc32_iscsi(bytes)
}

/// CRC of RAID superblocks: start value 0, no final inversion.
pub fn raid(bytes: &[u8]) -> u32 {
    let mut digest = Digest::new_with_init_state(CrcAlgorithm::Crc32Iscsi, 0);
    digest.update(bytes);
    !(digest.finalize() as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bit by bit, from the definition.
    fn slow(bytes: &[u8], start: u32) -> u32 {
        let mut crc = start;
        for byte in bytes {
            crc ^= u32::from(*byte);
            for _ in 0..8 {
                crc = (crc >> 1) ^ (0x82f6_3b78 * (crc & 1));
            }
        }
        crc
    }

    #[test]
    fn both_follow_the_definition() {
        assert_eq!(blobstore(b"123456789"), 0xe306_9283);
        for len in [0, 1, 7, 16, 255, 256, 4092, 16576] {
            let bytes: Vec<u8> = (0..len).map(|i| (i * 7 + 3) as u8).collect();
            assert_eq!(blobstore(&bytes), !slow(&bytes, !0), "{len}");
            assert_eq!(raid(&bytes), slow(&bytes, 0), "{len}");
        }
    }
}
