//! A small durable record in two files that are written in turn.
//!
//! *What it is.* `<name>.a` and `<name>.b`; each holds one header line (format, sequence, length, SHA-256) and the
//! payload. A write goes to the file that does not hold the latest record.
//!
//! *Invariants.* [`Slots::write`] returns only when file and folder are on the disk. A crash at any point of a write
//! leaves the other file, hence the record before. A record counts only when its checksum fits.
//!
//! *When things fail.* One bad file: the other counts, and the next write replaces the bad one. Both bad, or one bad
//! and the other absent: [`SlotsError::Corrupt`]; what cannot be read is never taken for "nothing there".

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

const MAGIC: &str = "addax-slot-1";
const SUFFIXES: [&str; 2] = ["a", "b"];

/// Why a record cannot be read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SlotsError {
    /// The file system failed.
    #[error("{path}: {source}")]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// There are files, but none holds a whole record.
    #[error(
        "{path}.a and {path}.b: no whole record in either ({detail}); the state is lost, and with it the right to use the data"
    )]
    Corrupt {
        /// The files' path without suffix.
        path: PathBuf,
        /// What is wrong with each.
        detail: String,
    },
}

fn io_error(path: &Path) -> impl FnOnce(io::Error) -> SlotsError + '_ {
    move |source| SlotsError::Io { path: path.to_owned(), source }
}

#[derive(Debug, PartialEq, Eq)]
enum Slot {
    Absent,
    Bad(&'static str),
    Whole { sequence: u64, payload: Vec<u8> },
}

/// A record in two files.
#[derive(Debug)]
pub struct Slots {
    folder: PathBuf,
    name: String,
    sequence: u64,
    next: usize,
}

impl Slots {
    /// Opens the record `name` in `folder`; `None` as payload when neither file is there.
    ///
    /// # Errors
    /// See [`SlotsError`].
    pub fn open(folder: &Path, name: &str) -> Result<(Self, Option<Vec<u8>>), SlotsError> {
        let mut slots = Self { folder: folder.to_owned(), name: name.to_owned(), sequence: 0, next: 0 };
        let read = [slots.read(0)?, slots.read(1)?];
        let whole = |slot: &Slot| match slot {
            Slot::Whole { sequence, .. } => Some(*sequence),
            _ => None,
        };
        let latest = match (whole(&read[0]), whole(&read[1])) {
            (Some(a), Some(b)) => usize::from(b > a),
            (Some(_), None) => 0,
            (None, Some(_)) => 1,
            (None, None) if read == [Slot::Absent, Slot::Absent] => return Ok((slots, None)),
            (None, None) => return Err(slots.corrupt(&read)),
        };
        let [a, b] = read;
        let Slot::Whole { sequence, payload } = (if latest == 0 { a } else { b }) else {
            return Ok((slots, None));
        };
        slots.sequence = sequence;
        slots.next = 1 - latest;
        Ok((slots, Some(payload)))
    }

    fn corrupt(&self, read: &[Slot; 2]) -> SlotsError {
        let words = |slot: &Slot| match slot {
            Slot::Bad(reason) => *reason,
            _ => "absent",
        };
        SlotsError::Corrupt {
            path: self.folder.join(&self.name),
            detail: format!("a: {}, b: {}", words(&read[0]), words(&read[1])),
        }
    }

    fn path(&self, slot: usize) -> PathBuf {
        self.folder.join(format!("{}.{}", self.name, SUFFIXES[slot]))
    }

    fn read(&self, slot: usize) -> Result<Slot, SlotsError> {
        let path = self.path(slot);
        match fs::read(&path) {
            Ok(bytes) => Ok(parse(&bytes)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Slot::Absent),
            Err(error) => Err(io_error(&path)(error)),
        }
    }

    /// Makes `payload` the record. It is durable when this returns.
    ///
    /// # Errors
    /// [`SlotsError::Io`]: the record is the one before, or this one; the next write settles it.
    pub fn write(&mut self, payload: &[u8]) -> Result<(), SlotsError> {
        let sequence = self.sequence + 1;
        let path = self.path(self.next);
        let mut file = File::create(&path).map_err(io_error(&path))?;
        file.write_all(&encode(sequence, payload)).map_err(io_error(&path))?;
        file.sync_all().map_err(io_error(&path))?;
        sync_folder(&self.folder)?;
        self.sequence = sequence;
        self.next = 1 - self.next;
        Ok(())
    }

    /// Removes both files.
    ///
    /// # Errors
    /// [`SlotsError::Io`].
    pub fn remove(&mut self) -> Result<(), SlotsError> {
        // The older one first: a crash between the two must not bring an older record to light.
        for slot in [self.next, 1 - self.next] {
            remove_file(&self.path(slot))?;
        }
        sync_folder(&self.folder)?;
        self.sequence = 0;
        self.next = 0;
        Ok(())
    }
}

/// Removes a file; absent is fine.
pub(super) fn remove_file(path: &Path) -> Result<(), SlotsError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(io_error(path)(error)),
        _ => Ok(()),
    }
}

/// Makes the names in a folder durable.
pub(super) fn sync_folder(folder: &Path) -> Result<(), SlotsError> {
    File::open(folder).and_then(|file| file.sync_all()).map_err(io_error(folder))
}

fn checksum(sequence: u64, payload: &[u8]) -> String {
    let mut hash = Sha256::new();
    hash.update(sequence.to_le_bytes());
    hash.update(payload);
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

fn encode(sequence: u64, payload: &[u8]) -> Vec<u8> {
    let header = format!("{MAGIC} {sequence} {} {}\n", payload.len(), checksum(sequence, payload));
    [header.as_bytes(), payload].concat()
}

fn parse(bytes: &[u8]) -> Slot {
    let Some(end) = bytes.iter().position(|byte| *byte == b'\n') else {
        return Slot::Bad("no header");
    };
    let payload = &bytes[end + 1..];
    let Ok(header) = std::str::from_utf8(&bytes[..end]) else {
        return Slot::Bad("bad header");
    };
    let fields: Vec<&str> = header.split(' ').collect();
    let [magic, sequence, length, sum] = fields[..] else {
        return Slot::Bad("bad header");
    };
    let (Ok(sequence), Ok(length)) = (sequence.parse::<u64>(), length.parse::<usize>()) else {
        return Slot::Bad("bad header");
    };
    if magic != MAGIC {
        return Slot::Bad("unknown format");
    }
    if length != payload.len() {
        return Slot::Bad("bad length");
    }
    if sum != checksum(sequence, payload) {
        return Slot::Bad("bad checksum");
    }
    Slot::Whole { sequence, payload: payload.to_vec() }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn latest(folder: &Path) -> Result<Option<Vec<u8>>, SlotsError> {
        Slots::open(folder, "r").map(|(_, payload)| payload)
    }

    #[test]
    fn the_last_write_counts_also_after_reopening() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(latest(dir.path()).unwrap(), None);
        for n in 0..5_u8 {
            let (mut slots, _) = Slots::open(dir.path(), "r").unwrap();
            slots.write(&[n]).unwrap();
            slots.write(&[n, n]).unwrap();
            assert_eq!(latest(dir.path()).unwrap(), Some(vec![n, n]));
        }
    }

    #[test]
    fn a_write_cut_or_spoilt_at_any_byte_leaves_the_record_before() {
        let dir = tempfile::tempdir().unwrap();
        let (mut slots, _) = Slots::open(dir.path(), "r").unwrap();
        slots.write(b"before").unwrap();
        slots.write(b"after!").unwrap();
        let path = dir.path().join("r.b");
        let whole = fs::read(&path).unwrap();
        for cut in 0..whole.len() {
            fs::write(&path, &whole[..cut]).unwrap();
            assert_eq!(latest(dir.path()).unwrap(), Some(b"before".to_vec()), "cut at {cut}");
        }
        for at in 0..whole.len() {
            for flip in [0x01, 0x80, 0xff] {
                let mut spoilt = whole.clone();
                spoilt[at] ^= flip;
                fs::write(&path, &spoilt).unwrap();
                assert_eq!(latest(dir.path()).unwrap(), Some(b"before".to_vec()), "byte {at} ^ {flip:#x}");
            }
        }
        fs::write(&path, [&whole[..], b"x"].concat()).unwrap();
        assert_eq!(latest(dir.path()).unwrap(), Some(b"before".to_vec()));
    }

    #[test]
    fn a_bad_file_is_replaced_by_the_next_write() {
        let dir = tempfile::tempdir().unwrap();
        let (mut slots, _) = Slots::open(dir.path(), "r").unwrap();
        slots.write(b"1").unwrap();
        slots.write(b"2").unwrap();
        fs::write(dir.path().join("r.b"), b"").unwrap();
        let (mut slots, payload) = Slots::open(dir.path(), "r").unwrap();
        assert_eq!(payload, Some(b"1".to_vec()));
        slots.write(b"3").unwrap();
        fs::write(dir.path().join("r.a"), b"").unwrap();
        assert_eq!(latest(dir.path()).unwrap(), Some(b"3".to_vec()));
    }

    #[test]
    fn nothing_readable_is_an_error_and_not_absence() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("r.a"), b"").unwrap();
        let error = latest(dir.path()).unwrap_err();
        assert!(matches!(error, SlotsError::Corrupt { .. }));
        assert!(error.to_string().contains("a: no header, b: absent"), "{error}");
        fs::write(dir.path().join("r.b"), b"addax-slot-1 1 1 0\nx").unwrap();
        assert!(latest(dir.path()).unwrap_err().to_string().contains("b: bad checksum"));
    }

    #[test]
    fn removed_is_absent() {
        let dir = tempfile::tempdir().unwrap();
        let (mut slots, _) = Slots::open(dir.path(), "r").unwrap();
        slots.write(b"1").unwrap();
        slots.write(b"2").unwrap();
        slots.remove().unwrap();
        assert_eq!(latest(dir.path()).unwrap(), None);
        slots.remove().unwrap();
    }
}
