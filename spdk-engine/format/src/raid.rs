//! The RAID superblock at the start of every member disk.
//!
//! Unlike a blobstore's, its CRC starts at 0 and is not inverted, and covers its `length` bytes only. Reserved bytes and
//! flags are kept. A superblock of another major version is refused, a newer minor one is read, as SPDK does.

use std::fmt;

use thiserror::Error;
use uuid::Uuid;

use crate::bytes::{array, put, u16_at, u32_at, u64_at};
use crate::crc;

/// The first eight bytes.
pub const SIGNATURE: [u8; 8] = *b"SPDKRAID";
/// The major version that is read and written.
pub const MAJOR: u16 = 1;
/// The minor version that is written.
pub const MINOR: u16 = 0;
/// Bytes before the members.
pub const HEADER: usize = 256;
/// Bytes of a member.
pub const MEMBER: usize = 64;
/// The longest superblock, in bytes.
pub const MAX_SIZE: usize = HEADER + MEMBER * 255;
/// The longest name, in bytes.
pub const MAX_NAME: usize = 63;
/// Data of a member begins at least this many bytes after its start.
pub const MIN_DATA_OFFSET: u64 = 1 << 20;
const AT_CRC: usize = 16;

/// Why bytes are not a RAID superblock.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum RaidError {
    /// Fewer bytes than its header has, or than it says it has.
    #[error("the RAID superblock has {have} bytes; {need} are needed")]
    Short {
        /// Bytes given.
        have: usize,
        /// Bytes needed.
        need: usize,
    },
    /// Not a member.
    #[error("the signature is {:?}; a RAID member has \"SPDKRAID\"", String::from_utf8_lossy(.0))]
    Signature([u8; 8]),
    /// A length that does not fit the number of members.
    #[error("the RAID superblock's length is {length}; {members} members take {}", HEADER + MEMBER * *.members as usize)]
    Length {
        /// As recorded.
        length: u32,
        /// Members recorded.
        members: u8,
    },
    /// Damaged.
    #[error("the RAID superblock's CRC is {stored:#010x}; its contents have {computed:#010x}")]
    Crc {
        /// As recorded.
        stored: u32,
        /// As the contents have it.
        computed: u32,
    },
    /// Made by a version that is not known here.
    #[error("the RAID superblock's version is {0}.{1}; {MAJOR}.x is known")]
    Version(u16, u16),
    /// A field that cannot have this value.
    #[error("the RAID superblock's {field} is {value}; allowed is {allowed}")]
    Field {
        /// The field's name.
        field: &'static str,
        /// Its value.
        value: u64,
        /// What it may be.
        allowed: &'static str,
    },
    /// A name that is too long, or none, or no text.
    #[error("the RAID superblock's name is {0:?}; 1 to {MAX_NAME} bytes of UTF-8 text, ended by NUL, are allowed")]
    Name(String),
}

/// How members make up the array.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Level {
    /// Striped.
    Raid0,
    /// Mirrored.
    Raid1,
    /// Striped, with one chunk of parity per stripe.
    Raid5f,
    /// One member after the other.
    Concat,
}

impl Level {
    fn code(self) -> u32 {
        match self {
            Self::Raid0 => 0,
            Self::Raid1 => 1,
            Self::Raid5f => 95,
            Self::Concat => 99,
        }
    }

    fn parse(code: u32) -> Result<Self, RaidError> {
        match code {
            0 => Ok(Self::Raid0),
            1 => Ok(Self::Raid1),
            95 => Ok(Self::Raid5f),
            99 => Ok(Self::Concat),
            other => {
                let allowed = "0 (raid0), 1 (raid1), 95 (raid5f) or 99 (concat)";
                Err(RaidError::Field { field: "level", value: other.into(), allowed })
            }
        }
    }
}

/// What has become of a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MemberState {
    /// Removed.
    Missing,
    /// In use.
    Configured,
    /// Failed an I/O.
    Failed,
    /// Waiting to take another's place.
    Spare,
}

impl MemberState {
    fn code(self) -> u32 {
        match self {
            Self::Missing => 0,
            Self::Configured => 1,
            Self::Failed => 2,
            Self::Spare => 3,
        }
    }

    fn parse(code: u32) -> Result<Self, RaidError> {
        match code {
            0 => Ok(Self::Missing),
            1 => Ok(Self::Configured),
            2 => Ok(Self::Failed),
            3 => Ok(Self::Spare),
            other => {
                let allowed = "0 (missing), 1 (configured), 2 (failed) or 3 (spare)";
                Err(RaidError::Field { field: "member state", value: other.into(), allowed })
            }
        }
    }
}

/// A member as the superblock lists it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// UUID of the member's device.
    pub uuid: Uuid,
    /// Where its data begins, in blocks.
    pub data_offset: u64,
    /// Length of its data, in blocks.
    pub data_size: u64,
    /// What has become of it.
    pub state: MemberState,
    /// Unused; kept.
    pub flags: u32,
    /// Its place in the array.
    pub slot: u8,
    reserved: [u8; 23],
}

impl Member {
    /// A member.
    pub fn new(uuid: Uuid, data_offset: u64, data_size: u64, state: MemberState, slot: u8) -> Self {
        Self { uuid, data_offset, data_size, state, flags: 0, slot, reserved: [0; 23] }
    }

    fn parse(bytes: &[u8]) -> Result<Self, RaidError> {
        Ok(Self {
            uuid: Uuid::from_bytes(array(bytes, 0)),
            data_offset: u64_at(bytes, 16),
            data_size: u64_at(bytes, 24),
            state: MemberState::parse(u32_at(bytes, 32))?,
            flags: u32_at(bytes, 36),
            slot: array::<1>(bytes, 40)[0],
            reserved: array(bytes, 41),
        })
    }

    fn emit(&self, out: &mut [u8]) {
        put(out, 0, self.uuid.as_bytes());
        put(out, 16, &self.data_offset.to_le_bytes());
        put(out, 24, &self.data_size.to_le_bytes());
        put(out, 32, &self.state.code().to_le_bytes());
        put(out, 36, &self.flags.to_le_bytes());
        put(out, 40, &[self.slot]);
        put(out, 41, &self.reserved);
    }
}

/// A RAID superblock.
#[derive(Clone, PartialEq, Eq)]
pub struct RaidSuperblock {
    /// Minor version.
    pub minor: u16,
    /// Unused; kept.
    pub flags: u32,
    /// UUID of the array.
    pub uuid: Uuid,
    /// Name of the array, 1 to [`MAX_NAME`] bytes.
    pub name: String,
    /// Length of the array, in blocks.
    pub raid_size: u64,
    /// Bytes of a block.
    pub block_size: u32,
    /// How members make up the array.
    pub level: Level,
    /// Length of a strip, in blocks; 0 for raid1.
    pub strip_size: u32,
    /// Unused; kept.
    pub state: u32,
    /// Grows with every write; the highest is the newest.
    pub seq_number: u64,
    /// Places in the array; members' slots are below it.
    pub num_base_bdevs: u8,
    /// The members, at most 255.
    pub members: Vec<Member>,
    name_tail: [u8; 64],
    reserved: [u8; 118],
}

impl RaidSuperblock {
    /// A superblock of this version, never written yet (sequence number 0).
    pub fn new(uuid: Uuid, name: String, level: Level, block_size: u32, strip_size: u32, members: Vec<Member>) -> Self {
        let num_base_bdevs = u8::try_from(members.len()).unwrap_or(u8::MAX);
        Self {
            minor: MINOR,
            flags: 0,
            uuid,
            name,
            raid_size: 0,
            block_size,
            level,
            strip_size,
            state: 0,
            seq_number: 0,
            num_base_bdevs,
            members,
            name_tail: [0; 64],
            reserved: [0; 118],
        }
    }

    /// How many bytes the superblock at the start of `bytes` takes: to be read before [`RaidSuperblock::parse`], which
    /// needs all of them. `bytes` has to hold [`HEADER`] bytes.
    pub fn length(bytes: &[u8]) -> Result<usize, RaidError> {
        if bytes.len() < HEADER {
            return Err(RaidError::Short { have: bytes.len(), need: HEADER });
        }
        if bytes[..8] != SIGNATURE {
            return Err(RaidError::Signature(array(bytes, 0)));
        }
        let (length, members) = (u32_at(bytes, 12), bytes[255]);
        let need = HEADER + MEMBER * usize::from(members);
        if length as usize != need {
            return Err(RaidError::Length { length, members });
        }
        Ok(need)
    }

    /// The superblock at the start of `bytes`.
    pub fn parse(bytes: &[u8]) -> Result<Self, RaidError> {
        let need = Self::length(bytes)?;
        let Some(bytes) = bytes.get(..need) else { return Err(RaidError::Short { have: bytes.len(), need }) };
        let (stored, computed) = (u32_at(bytes, AT_CRC), crc_of(bytes));
        if stored != computed {
            return Err(RaidError::Crc { stored, computed });
        }
        let (major, minor) = (u16_at(bytes, 8), u16_at(bytes, 10));
        if major != MAJOR {
            return Err(RaidError::Version(major, minor));
        }
        let (name, name_tail) = parse_name(array(bytes, 40))?;
        let num_base_bdevs = bytes[136];
        let members = bytes[HEADER..].chunks_exact(MEMBER).map(Member::parse).collect::<Result<Vec<_>, _>>()?;
        if let Some(member) = members.iter().find(|m| m.slot >= num_base_bdevs) {
            let allowed = "less than num_base_bdevs";
            return Err(RaidError::Field { field: "member slot", value: member.slot.into(), allowed });
        }
        let block_size = u32_at(bytes, 112);
        if block_size == 0 {
            return Err(RaidError::Field { field: "block_size", value: 0, allowed: "1 or more" });
        }
        Ok(Self {
            minor,
            flags: u32_at(bytes, 20),
            uuid: Uuid::from_bytes(array(bytes, 24)),
            name,
            raid_size: u64_at(bytes, 104),
            block_size,
            level: Level::parse(u32_at(bytes, 116))?,
            strip_size: u32_at(bytes, 120),
            state: u32_at(bytes, 124),
            seq_number: u64_at(bytes, 128),
            num_base_bdevs,
            members,
            name_tail,
            reserved: array(bytes, 137),
        })
    }

    /// The bytes on disk with their CRC, not padded to blocks.
    pub fn emit(&self) -> Result<Vec<u8>, RaidError> {
        let count = u8::try_from(self.members.len()).map_err(|_| {
            let value = self.members.len() as u64;
            RaidError::Field { field: "base_bdevs_size", value, allowed: "at most 255" }
        })?;
        let name = self.name.as_bytes();
        if name.is_empty() || name.len() > MAX_NAME || name.contains(&0) {
            return Err(RaidError::Name(self.name.clone()));
        }
        let mut out = vec![0; HEADER + MEMBER * self.members.len()];
        put(&mut out, 0, &SIGNATURE);
        put(&mut out, 8, &MAJOR.to_le_bytes());
        put(&mut out, 10, &self.minor.to_le_bytes());
        let length = out.len() as u32;
        put(&mut out, 12, &length.to_le_bytes());
        put(&mut out, 20, &self.flags.to_le_bytes());
        put(&mut out, 24, self.uuid.as_bytes());
        put(&mut out, 40, &self.name_tail);
        put(&mut out, 40, name);
        put(&mut out, 40 + name.len(), &[0]);
        put(&mut out, 104, &self.raid_size.to_le_bytes());
        put(&mut out, 112, &self.block_size.to_le_bytes());
        put(&mut out, 116, &self.level.code().to_le_bytes());
        put(&mut out, 120, &self.strip_size.to_le_bytes());
        put(&mut out, 124, &self.state.to_le_bytes());
        put(&mut out, 128, &self.seq_number.to_le_bytes());
        put(&mut out, 136, &[self.num_base_bdevs]);
        put(&mut out, 137, &self.reserved);
        put(&mut out, 255, &[count]);
        for (member, place) in self.members.iter().zip(out[HEADER..].chunks_exact_mut(MEMBER)) {
            member.emit(place);
        }
        let crc = crc_of(&out);
        put(&mut out, AT_CRC, &crc.to_le_bytes());
        Ok(out)
    }
}

impl fmt::Debug for RaidSuperblock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RaidSuperblock")
            .field("uuid", &self.uuid)
            .field("name", &self.name)
            .field("level", &self.level)
            .field("raid_size", &self.raid_size)
            .field("block_size", &self.block_size)
            .field("strip_size", &self.strip_size)
            .field("seq_number", &self.seq_number)
            .field("num_base_bdevs", &self.num_base_bdevs)
            .field("members", &self.members)
            .finish_non_exhaustive()
    }
}

/// The name, and the field with the name blanked: what follows the NUL is kept.
fn parse_name(mut field: [u8; 64]) -> Result<(String, [u8; 64]), RaidError> {
    let refused = || RaidError::Name(field.escape_ascii().to_string());
    let len = field.iter().position(|b| *b == 0).filter(|len| *len > 0).ok_or_else(refused)?;
    let name = std::str::from_utf8(&field[..len]).map_err(|_| refused())?.to_owned();
    field[..len].fill(0);
    Ok((name, field))
}

fn crc_of(bytes: &[u8]) -> u32 {
    let mut copy = bytes.to_vec();
    put(&mut copy, AT_CRC, &[0; 4]);
    crc::raid(&copy)
}
