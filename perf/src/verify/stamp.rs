//! Self-describing blocks: every 512-byte sector says where and when it was written, and by whom.
//!
//! *What it is.* A *unit* is 4096 bytes, the smallest thing that is written; it has eight sectors. Each sector carries
//! a [`Stamp`] (log, volume, unit, sequence number, run, I/O), its place in the unit, a pattern derived from all of
//! these, and a CRC-32C. So a sector found anywhere can be told apart: right, older, of another place, of another
//! volume, damaged.
//!
//! *Layout of a sector (little-endian).* 0 magic, 8 log, 16 volume, 24 unit, 32 sequence, 36 run, 40 serial,
//! 48 first unit of the I/O, 56 units of the I/O (u16), 58 sector, 59 zero, 60 pattern, 508 CRC-32C of bytes 0 to 507.
//!
//! *When things fail.* Reading never fails: bytes that mean nothing are [`Sector::Foreign`], a sector with our magic
//! and a wrong checksum is [`Sector::Damaged`].

use nvme_wire::crc32c;

/// Bytes of a unit.
pub const UNIT_BYTES: usize = 4096;
/// Bytes of a sector.
pub const SECTOR_BYTES: usize = 512;
/// Sectors of a unit.
pub const SECTORS: usize = UNIT_BYTES / SECTOR_BYTES;

const MAGIC: &[u8; 8] = b"ADXVRFY1";
const PATTERN_AT: usize = 60;
const CRC_AT: usize = SECTOR_BYTES - 4;

/// What a written unit says of itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stamp {
    /// The write log it belongs to.
    pub log: u64,
    /// [`volume_hash`] of the volume's name.
    pub volume: u64,
    /// Number of the unit on the volume.
    pub unit: u64,
    /// Sequence number of the write among those of this unit; from 1.
    pub seq: u32,
    /// Run of the verifier that wrote it.
    pub run: u32,
    /// Number of the I/O; later I/Os of a log have higher ones.
    pub serial: u64,
    /// First unit of the I/O.
    pub io_first: u64,
    /// Units of the I/O.
    pub io_units: u16,
}

/// What a sector turned out to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sector {
    /// All zeroes.
    Zero,
    /// Nothing of a verifier's.
    Foreign,
    /// A verifier's magic, a wrong checksum.
    Damaged,
    /// Whole; `index` is the place in its unit that it was written for.
    Valid { stamp: Stamp, index: u8 },
}

/// The hash by which blocks name their volume (64-bit FNV-1a).
#[must_use]
pub fn volume_hash(name: &str) -> u64 {
    name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3))
}

fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

fn write_sector(stamp: &Stamp, index: usize, sector: &mut [u8]) {
    let (header, pattern) = sector.split_at_mut(PATTERN_AT);
    header[..8].copy_from_slice(MAGIC);
    header[8..16].copy_from_slice(&stamp.log.to_le_bytes());
    header[16..24].copy_from_slice(&stamp.volume.to_le_bytes());
    header[24..32].copy_from_slice(&stamp.unit.to_le_bytes());
    header[32..36].copy_from_slice(&stamp.seq.to_le_bytes());
    header[36..40].copy_from_slice(&stamp.run.to_le_bytes());
    header[40..48].copy_from_slice(&stamp.serial.to_le_bytes());
    header[48..56].copy_from_slice(&stamp.io_first.to_le_bytes());
    header[56..58].copy_from_slice(&stamp.io_units.to_le_bytes());
    header[58] = index as u8;
    header[59] = 0;
    let mut state = mix(stamp.log ^ stamp.volume.rotate_left(17))
        ^ mix(stamp.unit << 3 | index as u64)
        ^ mix(u64::from(stamp.run) << 32 | u64::from(stamp.seq));
    for word in pattern[..CRC_AT - PATTERN_AT].chunks_exact_mut(8) {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        word.copy_from_slice(&mix(state).to_le_bytes());
    }
    let crc = crc32c(&sector[..CRC_AT]);
    sector[CRC_AT..].copy_from_slice(&crc.to_le_bytes());
}

/// Fills a unit ([`UNIT_BYTES`] long) with the block that `stamp` describes.
pub fn write_unit(stamp: &Stamp, unit: &mut [u8]) {
    for (index, sector) in unit.chunks_exact_mut(SECTOR_BYTES).enumerate() {
        write_sector(stamp, index, sector);
    }
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..).and_then(<[u8]>::first_chunk).map_or(0, |b| u64::from_le_bytes(*b))
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..).and_then(<[u8]>::first_chunk).map_or(0, |b| u32::from_le_bytes(*b))
}

/// Looks at one sector ([`SECTOR_BYTES`] long).
#[must_use]
pub fn read_sector(bytes: &[u8]) -> Sector {
    if !bytes.starts_with(MAGIC) {
        return if bytes.iter().all(|b| *b == 0) { Sector::Zero } else { Sector::Foreign };
    }
    if bytes.len() != SECTOR_BYTES || crc32c(&bytes[..CRC_AT]) != u32_at(bytes, CRC_AT) {
        return Sector::Damaged;
    }
    let stamp = Stamp {
        log: u64_at(bytes, 8),
        volume: u64_at(bytes, 16),
        unit: u64_at(bytes, 24),
        seq: u32_at(bytes, 32),
        run: u32_at(bytes, 36),
        serial: u64_at(bytes, 40),
        io_first: u64_at(bytes, 48),
        io_units: u32_at(bytes, 56) as u16,
    };
    Sector::Valid { stamp, index: bytes[58] }
}

/// Looks at a unit ([`UNIT_BYTES`] long), sector by sector.
#[must_use]
pub fn read_unit(bytes: &[u8]) -> [Sector; SECTORS] {
    let mut sectors = [Sector::Foreign; SECTORS];
    for (sector, bytes) in sectors.iter_mut().zip(bytes.chunks_exact(SECTOR_BYTES)) {
        *sector = read_sector(bytes);
    }
    sectors
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stamp() -> Stamp {
        Stamp { log: 7, volume: volume_hash("v"), unit: 12, seq: 3, run: 2, serial: 99, io_first: 8, io_units: 8 }
    }

    #[test]
    fn what_is_written_is_read_back() {
        let mut unit = vec![0; UNIT_BYTES];
        write_unit(&stamp(), &mut unit);
        for (index, sector) in read_unit(&unit).into_iter().enumerate() {
            assert_eq!(sector, Sector::Valid { stamp: stamp(), index: index as u8 });
        }
    }

    #[test]
    fn every_flipped_bit_is_seen() {
        let mut unit = vec![0; UNIT_BYTES];
        write_unit(&stamp(), &mut unit);
        for bit in 0..SECTOR_BYTES * 8 {
            let mut sector = unit[..SECTOR_BYTES].to_vec();
            sector[bit / 8] ^= 1 << (bit % 8);
            let seen = read_sector(&sector);
            assert!(matches!(seen, Sector::Damaged | Sector::Foreign), "bit {bit}: {seen:?}");
        }
    }

    #[test]
    fn sectors_of_different_writes_have_different_patterns() {
        let pattern = |stamp: Stamp, index| {
            let mut sector = vec![0; SECTOR_BYTES];
            write_sector(&stamp, index, &mut sector);
            sector[PATTERN_AT..CRC_AT].to_vec()
        };
        let base = pattern(stamp(), 0);
        assert_ne!(base, pattern(stamp(), 1));
        assert_ne!(base, pattern(Stamp { seq: 4, ..stamp() }, 0));
        assert_ne!(base, pattern(Stamp { run: 3, ..stamp() }, 0));
        assert_ne!(base, pattern(Stamp { unit: 13, ..stamp() }, 0));
        assert_ne!(base, pattern(Stamp { log: 8, ..stamp() }, 0));
    }

    #[test]
    fn zeroes_and_strangers_are_told_apart() {
        assert_eq!(read_sector(&[0; SECTOR_BYTES]), Sector::Zero);
        assert_eq!(read_sector(&[1; SECTOR_BYTES]), Sector::Foreign);
    }
}
