//! The write log: an append-only file from which the model can be made again after any end of this process.
//!
//! *Format.* A header of 512 bytes (magic, version, bytes of a unit, log identifier, units, volume name, CRC-32C), then
//! [`Record`]s. A record of an issued write is in the file before the write is sent; records of acknowledgements follow
//! with the next flush. What is lost by `kill -9` is therefore at most the knowledge that a write was acknowledged,
//! which then counts as "may be there or not".
//!
//! *Durability.* Appends survive the end of the process, not that of the machine, unless `sync` is set.
//!
//! *Growth.* Above [`COMPACT_BYTES`] and twice the size after the last compaction, the file is written anew from the
//! model beside the old one and renamed over it; the I/O waits meanwhile (24 bytes for each run of equal units).
//!
//! *When things fail.* A cut-off end is dropped and reported; anything else that is not a log, or damage before a later
//! whole record, is an error: a judge does not guess. The file is locked against a second user.

use std::fs::{File, OpenOptions};
use std::io::{self, BufReader, BufWriter, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use nvme_wire::crc32c;

use super::judge::{Identity, Rules};
use super::model::{Model, ModelError};
use super::record::{RECORD_BYTES, Record};
use super::stamp::{UNIT_BYTES, volume_hash};

/// Size from which a log is compacted.
pub const COMPACT_BYTES: u64 = 64 << 20;
/// Longest volume name, as that of an NQN.
pub const NAME_BYTES_MAX: usize = 223;

const HEADER_BYTES: usize = 512;
const MAGIC: &[u8; 8] = b"ADXVLOG1";
const VERSION: u32 = 1;

/// Why a log cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    #[error("log {path}: {what}: {error}")]
    Io { path: PathBuf, what: &'static str, error: io::Error },
    #[error("log {path} is in use by another process")]
    InUse { path: PathBuf },
    #[error("log {path} is not a write log of version {VERSION}: {what}")]
    NotALog { path: PathBuf, what: &'static str },
    #[error("log {path} is damaged at byte {at}: a record with a wrong checksum is followed by whole ones")]
    Damaged { path: PathBuf, at: u64 },
    #[error("log {path} is inconsistent at byte {at}: {error}")]
    Inconsistent { path: PathBuf, at: u64, error: ModelError },
    #[error("volume name {name:?} is not allowed: 1 to {NAME_BYTES_MAX} bytes are")]
    Name { name: String },
}

/// What the header says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Header {
    /// Identifier of the log, in every block.
    pub log: u64,
    /// Units of the volume.
    pub units: u64,
    /// Name of the volume, in every block as a hash.
    pub volume: String,
}

impl Header {
    /// Which blocks belong to the log.
    #[must_use]
    pub fn identity(&self) -> Identity {
        Identity { log: self.log, volume: volume_hash(&self.volume) }
    }

    fn encode(&self) -> [u8; HEADER_BYTES] {
        let name = self.volume.as_bytes();
        let mut bytes = [0; HEADER_BYTES];
        bytes[..8].copy_from_slice(MAGIC);
        bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
        bytes[12..16].copy_from_slice(&(UNIT_BYTES as u32).to_le_bytes());
        bytes[16..24].copy_from_slice(&self.log.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.units.to_le_bytes());
        bytes[32..34].copy_from_slice(&(name.len() as u16).to_le_bytes());
        bytes[34..34 + name.len()].copy_from_slice(name);
        let crc = crc32c(&bytes[..HEADER_BYTES - 4]);
        bytes[HEADER_BYTES - 4..].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Self, &'static str> {
        let (body, crc) = bytes.split_at(HEADER_BYTES - 4);
        if !body.starts_with(MAGIC) {
            return Err("its first bytes are others");
        }
        if crc != crc32c(body).to_le_bytes() {
            return Err("the checksum of its header is wrong");
        }
        let u64_at = |at: usize| body[at..].first_chunk().map_or(0, |b| u64::from_le_bytes(*b));
        if body[8..12] != VERSION.to_le_bytes() || body[12..16] != (UNIT_BYTES as u32).to_le_bytes() {
            return Err("its version or the size of its units is another");
        }
        let len = usize::from(u16::from_le_bytes([body[32], body[33]]));
        let name = body.get(34..34 + len).and_then(|n| std::str::from_utf8(n).ok());
        let volume = name.filter(|_| len <= NAME_BYTES_MAX).ok_or("its volume name is not valid")?;
        Ok(Self { log: u64_at(16), units: u64_at(24), volume: volume.to_owned() })
    }
}

/// An open log; see the module.
#[derive(Debug)]
pub struct WriteLog {
    path: PathBuf,
    file: File,
    header: Header,
    pending: Vec<u8>,
    bytes: u64,
    bytes_compacted: u64,
    sync: bool,
}

/// A log that was read.
#[derive(Debug)]
pub struct Opened {
    pub log: WriteLog,
    pub model: Model,
    /// Bytes at the end that were cut off in the middle of an append.
    pub dropped_bytes: u64,
}

impl WriteLog {
    /// Makes the log of a volume of which nothing is known. An existing file is replaced.
    pub fn create(path: &Path, header: Header, rules: Rules, sync: bool) -> Result<Opened, LogError> {
        if header.volume.is_empty() || header.volume.len() > NAME_BYTES_MAX {
            return Err(LogError::Name { name: header.volume });
        }
        let model = Model::new(header.identity(), header.units, rules);
        let (file, bytes) = write_snapshot(path, &header, &model)?;
        let log = Self { path: path.into(), file, header, pending: Vec::new(), bytes, bytes_compacted: bytes, sync };
        Ok(Opened { log, model, dropped_bytes: 0 })
    }

    /// Opens a log and makes its model.
    pub fn open(path: &Path, rules: Rules, sync: bool) -> Result<Opened, LogError> {
        let fail = |what| move |error| LogError::Io { path: path.into(), what, error };
        let mut file = OpenOptions::new().read(true).append(true).open(path).map_err(fail("open"))?;
        lock(path, &file)?;
        let meta = file.metadata().map_err(fail("read"))?;
        if std::fs::metadata(path).map_err(fail("read"))?.ino() != meta.ino() {
            // Its user has compacted it between our open and our lock.
            return Err(LogError::InUse { path: path.into() });
        }
        let len = meta.len();
        let mut header = [0; HEADER_BYTES];
        let not_a_log = |what| LogError::NotALog { path: path.into(), what };
        file.read_exact(&mut header).map_err(|_| not_a_log("it is too short"))?;
        let header = Header::decode(&header).map_err(not_a_log)?;
        let mut model = Model::new(header.identity(), header.units, rules);
        let good = replay(path, &mut BufReader::with_capacity(1 << 20, &file), &mut model)?;
        if good < len {
            file.set_len(good).map_err(fail("cut off an incomplete end"))?;
        }
        file.seek(SeekFrom::End(0)).map_err(fail("seek"))?;
        let log = Self { path: path.into(), file, header, pending: Vec::new(), bytes: good, bytes_compacted: 0, sync };
        Ok(Opened { log, model, dropped_bytes: len - good })
    }

    /// What the header says.
    #[must_use]
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// Bytes in the file.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Takes a record; it is in the file after the next [`Self::flush`].
    pub fn push(&mut self, record: &Record) {
        self.pending.extend_from_slice(&record.encode());
    }

    /// Brings all records into the file. `model` is their sum, for compaction.
    pub fn flush(&mut self, model: &Model) -> Result<(), LogError> {
        if self.pending.is_empty() {
            return Ok(());
        }
        let fail = |error| LogError::Io { path: self.path.clone(), what: "append", error };
        self.file.write_all(&self.pending).map_err(fail)?;
        if self.sync {
            self.file.sync_data().map_err(fail)?;
        }
        self.bytes += self.pending.len() as u64;
        self.pending.clear();
        if self.bytes > COMPACT_BYTES.max(self.bytes_compacted * 2) {
            self.compact(model)?;
        }
        Ok(())
    }

    /// Writes the file anew from the model.
    pub fn compact(&mut self, model: &Model) -> Result<(), LogError> {
        self.pending.clear();
        self.header.units = model.len();
        let (file, bytes) = write_snapshot(&self.path, &self.header, model)?;
        self.file = file;
        self.bytes = bytes;
        self.bytes_compacted = bytes;
        Ok(())
    }
}

fn lock(path: &Path, file: &File) -> Result<(), LogError> {
    match file.try_lock() {
        Ok(()) => Ok(()),
        Err(std::fs::TryLockError::WouldBlock) => Err(LogError::InUse { path: path.into() }),
        Err(std::fs::TryLockError::Error(error)) => Err(LogError::Io { path: path.into(), what: "lock", error }),
    }
}

/// Writes a whole log beside `path`, then puts it in its place.
fn write_snapshot(path: &Path, header: &Header, model: &Model) -> Result<(File, u64), LogError> {
    let fail = |what| move |error| LogError::Io { path: path.into(), what, error };
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".new");
    let beside = path.with_file_name(name);
    let file = OpenOptions::new().create(true).append(true).open(&beside).map_err(fail("create"))?;
    lock(path, &file)?;
    file.set_len(0).map_err(fail("create"))?;
    let mut writer = BufWriter::with_capacity(1 << 20, &file);
    let mut written = writer.write_all(&header.encode());
    model.snapshot(|record| {
        if written.is_ok() {
            written = writer.write_all(&record.encode());
        }
    });
    written.and_then(|()| writer.flush()).map_err(fail("write"))?;
    drop(writer);
    file.sync_all().map_err(fail("sync"))?;
    std::fs::rename(&beside, path).map_err(fail("rename"))?;
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    File::open(folder).and_then(|folder| folder.sync_all()).map_err(fail("sync the folder"))?;
    let bytes = file.metadata().map_err(fail("read"))?.len();
    Ok((file, bytes))
}

/// Applies all records; the size up to the end of the last whole one.
fn replay(path: &Path, reader: &mut impl Read, model: &mut Model) -> Result<u64, LogError> {
    let fail = |error| LogError::Io { path: path.into(), what: "read", error };
    let mut at = HEADER_BYTES as u64;
    let mut bad = None;
    let mut bytes = [0; RECORD_BYTES];
    while read_record(reader, &mut bytes).map_err(fail)? {
        match (Record::decode(&bytes), bad) {
            (Some(_), Some(at)) => return Err(LogError::Damaged { path: path.into(), at }),
            (Some(record), None) => {
                let inconsistent = |error| LogError::Inconsistent { path: path.into(), at, error };
                model.apply(&record).map_err(inconsistent)?;
            }
            (None, _) => bad = bad.or(Some(at)),
        }
        at += RECORD_BYTES as u64;
    }
    Ok(bad.unwrap_or(at))
}

/// Whether there was a whole record.
fn read_record(reader: &mut impl Read, bytes: &mut [u8; RECORD_BYTES]) -> io::Result<bool> {
    match reader.read_exact(bytes) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
        Err(error) => Err(error),
    }
}
