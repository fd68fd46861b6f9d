//! The byte format of the data file: encoding and scanning, no I/O.
//!
//! ```text
//! file   := magic[8] base* end log*
//! frame  := magic u32 | kind u32 | payload length u32 | payload CRC32C u32 | revision u64 | header CRC32C u32 | payload
//! payload (base, log) := record*        payload (end) := empty
//! record := revision u64 | key length u32 | value length u32 (0xffff_ffff = deleted) | key | value
//! ```
//! All integers are little endian. *Base* frames hold the live objects at the moment of a compaction; the *end* frame
//! closes them and carries the revision counter of that moment. Each *log* frame is one group commit.
//!
//! Invariants: the part up to and including *end* is written to a temporary file, synced and renamed, so it is never
//! torn. A log frame is written only after the frame before it is durable, so only the last frame can be torn.
//!
//! When things fail: a bad frame with nothing readable behind it is a torn tail, and is cut. A bad frame with a good one
//! behind it, or a damaged base, is corruption: [`scan`] refuses, because cutting there would lose acknowledged writes.

use crc_fast::{CrcAlgorithm, checksum};

use super::{Key, StoreError};

/// First bytes of every data file; the last byte is the format's version.
pub const FILE_MAGIC: [u8; 8] = *b"ADDAXKV\x01";
/// First bytes of every frame. Not valid UTF-8, so no JSON text can contain it.
const FRAME_MAGIC: [u8; 4] = [0xFA, 0xCE, 0xAD, 0xDA];
/// Bytes before the payload of a frame.
pub const HEADER_BYTES: usize = 28;
/// Largest payload of one frame: a group commit is cut before it grows past this.
pub const PAYLOAD_BYTES_MAX: usize = 64 << 20;
const DELETED: u32 = u32::MAX;

/// What a frame holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FrameKind {
    /// Live objects at the last compaction.
    Base = 1,
    /// The end of the base, with the revision counter at that moment.
    End = 2,
    /// One group commit.
    Log = 3,
}

impl FrameKind {
    fn from_u32(raw: u32) -> Option<Self> {
        match raw {
            1 => Some(Self::Base),
            2 => Some(Self::End),
            3 => Some(Self::Log),
            _ => None,
        }
    }
}

/// One change: the object's JSON, or `None` when it was deleted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// The revision at which the change happened.
    pub revision: u64,
    /// The object's key.
    pub key: Key,
    /// JSON text of the object, `None` for a deletion.
    pub value: Option<Vec<u8>>,
}

/// A decoded frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    /// What the records mean.
    pub kind: FrameKind,
    /// The revision counter after this frame.
    pub revision: u64,
    /// The changes, oldest first.
    pub records: Vec<Record>,
}

/// What [`scan`] found.
#[derive(Debug)]
pub struct Scan {
    /// All good frames, in file order.
    pub frames: Vec<Frame>,
    /// Length of the good part in bytes; what follows is a torn tail.
    pub good_bytes: usize,
}

fn crc(bytes: &[u8]) -> u32 {
    // The CRC is 32 bits wide; the library returns every width as u64.
    checksum(CrcAlgorithm::Crc32Iscsi, bytes) as u32
}

fn length_u32(bytes: usize) -> u32 {
    u32::try_from(bytes).unwrap_or(DELETED - 1)
}

/// Appends one record to a payload.
pub fn encode_record(payload: &mut Vec<u8>, revision: u64, key: &Key, value: Option<&[u8]>) {
    let key = key.encode();
    payload.extend_from_slice(&revision.to_le_bytes());
    payload.extend_from_slice(&length_u32(key.len()).to_le_bytes());
    payload.extend_from_slice(&value.map_or(DELETED, |value| length_u32(value.len())).to_le_bytes());
    payload.extend_from_slice(key.as_bytes());
    payload.extend_from_slice(value.unwrap_or_default());
}

/// Appends one frame to `out`.
pub fn encode_frame(out: &mut Vec<u8>, kind: FrameKind, revision: u64, payload: &[u8]) {
    let start = out.len();
    out.extend_from_slice(&FRAME_MAGIC);
    out.extend_from_slice(&(kind as u32).to_le_bytes());
    out.extend_from_slice(&length_u32(payload.len()).to_le_bytes());
    out.extend_from_slice(&crc(payload).to_le_bytes());
    out.extend_from_slice(&revision.to_le_bytes());
    let header_crc = crc(&out[start..]);
    out.extend_from_slice(&header_crc.to_le_bytes());
    out.extend_from_slice(payload);
}

/// Reads a whole data file.
///
/// # Errors
/// [`StoreError::Corrupt`] when the file is not a data file, its base is damaged, or a good frame follows a bad one.
pub fn scan(bytes: &[u8]) -> Result<Scan, StoreError> {
    if bytes.get(..FILE_MAGIC.len()) != Some(&FILE_MAGIC[..]) {
        return Err(corrupt(0, "the file does not start with the data file's magic and version"));
    }
    let mut frames = Vec::new();
    let mut offset = FILE_MAGIC.len();
    let mut base_ended = false;
    while offset < bytes.len() {
        let Some((frame, length)) = decode_frame(&bytes[offset..]) else {
            break;
        };
        let in_place = match frame.kind {
            FrameKind::Base => !base_ended,
            FrameKind::End => !std::mem::replace(&mut base_ended, true),
            FrameKind::Log => base_ended,
        };
        if !in_place {
            return Err(corrupt(offset, "a frame of this kind cannot be here"));
        }
        frames.push(frame);
        offset += length;
    }
    if !base_ended {
        return Err(corrupt(offset, "the compacted base is damaged or cut short"));
    }
    if let Some(later) = next_frame(bytes, offset) {
        return Err(corrupt(offset, &format!("a damaged frame is followed by a good one at byte {later}")));
    }
    Ok(Scan { frames, good_bytes: offset })
}

fn corrupt(offset: usize, what: &str) -> StoreError {
    StoreError::Corrupt { offset_bytes: offset as u64, what: what.to_owned() }
}

/// The offset of the first good frame after the bad one at `bad`.
fn next_frame(bytes: &[u8], bad: usize) -> Option<usize> {
    (bad + 1..bytes.len().saturating_sub(HEADER_BYTES - 1))
        .find(|&at| bytes[at..].starts_with(&FRAME_MAGIC) && decode_frame(&bytes[at..]).is_some())
}

/// Decodes the frame at the start of `bytes`; `None` when it is short or any checksum or length is wrong.
fn decode_frame(bytes: &[u8]) -> Option<(Frame, usize)> {
    let header = bytes.get(..HEADER_BYTES)?;
    if !header.starts_with(&FRAME_MAGIC) || u32_at(header, 24)? != crc(&header[..24]) {
        return None;
    }
    let kind = FrameKind::from_u32(u32_at(header, 4)?)?;
    let length = u32_at(header, 8)? as usize;
    let payload = bytes.get(HEADER_BYTES..HEADER_BYTES.checked_add(length)?)?;
    if u32_at(header, 12)? != crc(payload) {
        return None;
    }
    let records = decode_records(payload)?;
    Some((Frame { kind, revision: u64_at(header, 16)?, records }, HEADER_BYTES + length))
}

fn decode_records(mut payload: &[u8]) -> Option<Vec<Record>> {
    let mut records = Vec::new();
    while !payload.is_empty() {
        let revision = u64_at(payload, 0)?;
        let key_length = u32_at(payload, 8)? as usize;
        let value_length = u32_at(payload, 12)?;
        let key_end = 16_usize.checked_add(key_length)?;
        let key = Key::decode(std::str::from_utf8(payload.get(16..key_end)?).ok()?)?;
        let (value, end) = if value_length == DELETED {
            (None, key_end)
        } else {
            let end = key_end.checked_add(value_length as usize)?;
            (Some(payload.get(key_end..end)?.to_vec()), end)
        };
        records.push(Record { revision, key, value });
        payload = payload.get(end..)?;
    }
    Some(records)
}

fn u32_at(bytes: &[u8], offset: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(offset..offset + 4)?.try_into().ok()?))
}

fn u64_at(bytes: &[u8], offset: usize) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(offset..offset + 8)?.try_into().ok()?))
}
