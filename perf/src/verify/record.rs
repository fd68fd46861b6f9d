//! Records of the write log: 24 bytes each, with a checksum.
//!
//! *Layout (little-endian).* 0 CRC-32C of bytes 4 to 23, 4 kind, 5 flags, 6 units (u16), 8 first unit or run (u64),
//! 16 value (u64).
//!
//! *When things fail.* Bytes that are not a record give `None`; whether that is the end of a log that was cut off or
//! damage in its middle is for the reader of the file to say.

use nvme_wire::crc32c;

/// Bytes of a record.
pub const RECORD_BYTES: usize = 24;

/// One change of the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Record {
    /// A run begins; later I/Os have serial numbers above `serial`. What was in flight is of unknown fate.
    Run { run: u32, serial: u64 },
    /// A write is about to be sent.
    Issue { first: u64, units: u16, serial: u64 },
    /// It was acknowledged.
    Ack { first: u64, units: u16 },
    /// It ended with an error; it may be there or not.
    Fail { first: u64, units: u16 },
    /// A read has returned a write that was not acknowledged, or has settled what is there.
    Seen { unit: u64, seq: u32, settled: bool },
    /// The state of a range of units, in a compacted log.
    State { first: u64, units: u16, bits: u64 },
}

const SETTLED: u8 = 1;

impl Record {
    /// The units it is about.
    #[must_use]
    pub fn units(&self) -> (u64, u16) {
        match *self {
            Self::Run { .. } => (0, 0),
            Self::Seen { unit, .. } => (unit, 1),
            Self::Issue { first, units, .. }
            | Self::Ack { first, units }
            | Self::Fail { first, units }
            | Self::State { first, units, .. } => (first, units),
        }
    }

    /// Its bytes.
    #[must_use]
    pub fn encode(&self) -> [u8; RECORD_BYTES] {
        let (kind, flags, value) = match *self {
            Self::Run { serial, .. } => (1, 0, serial),
            Self::Issue { serial, .. } => (2, 0, serial),
            Self::Ack { .. } => (3, 0, 0),
            Self::Fail { .. } => (4, 0, 0),
            Self::Seen { seq, settled, .. } => (5, if settled { SETTLED } else { 0 }, u64::from(seq)),
            Self::State { bits, .. } => (6, 0, bits),
        };
        let (first, units) = match *self {
            Self::Run { run, .. } => (u64::from(run), 0),
            _ => self.units(),
        };
        let mut bytes = [0; RECORD_BYTES];
        bytes[4] = kind;
        bytes[5] = flags;
        bytes[6..8].copy_from_slice(&units.to_le_bytes());
        bytes[8..16].copy_from_slice(&first.to_le_bytes());
        bytes[16..].copy_from_slice(&value.to_le_bytes());
        let crc = crc32c(&bytes[4..]);
        bytes[..4].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    /// From bytes; `None` when they are no record.
    #[must_use]
    pub fn decode(bytes: &[u8; RECORD_BYTES]) -> Option<Self> {
        let (crc, rest) = bytes.split_first_chunk::<4>()?;
        if crc32c(rest) != u32::from_le_bytes(*crc) {
            return None;
        }
        let units = u16::from_le_bytes([bytes[6], bytes[7]]);
        let first = u64::from_le_bytes(*bytes[8..].first_chunk()?);
        let value = u64::from_le_bytes(*bytes[16..].first_chunk()?);
        match bytes[4] {
            1 => Some(Self::Run { run: u32::try_from(first).ok()?, serial: value }),
            2 => Some(Self::Issue { first, units, serial: value }),
            3 => Some(Self::Ack { first, units }),
            4 => Some(Self::Fail { first, units }),
            5 => Some(Self::Seen { unit: first, seq: u32::try_from(value).ok()?, settled: bytes[5] & SETTLED != 0 }),
            6 => Some(Self::State { first, units, bits: value }),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_read_back_and_damage_is_seen() {
        let all = [
            Record::Run { run: 3, serial: 1 << 40 },
            Record::Issue { first: 1 << 33, units: 32, serial: 9 },
            Record::Ack { first: 5, units: 1 },
            Record::Fail { first: 6, units: 2 },
            Record::Seen { unit: 7, seq: 8, settled: true },
            Record::Seen { unit: 7, seq: 8, settled: false },
            Record::State { first: 0, units: u16::MAX, bits: 77 },
        ];
        for record in all {
            let bytes = record.encode();
            assert_eq!(Record::decode(&bytes), Some(record));
            for bit in 0..RECORD_BYTES * 8 {
                let mut damaged = bytes;
                damaged[bit / 8] ^= 1 << (bit % 8);
                assert_eq!(Record::decode(&damaged), None, "{record:?} bit {bit}");
            }
        }
        assert_eq!(Record::decode(&[0; RECORD_BYTES]), None, "a hole in a file is no record");
    }
}
