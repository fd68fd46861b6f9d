//! The data file: opening, the flusher's loop, compaction. Format in [`super::log`].
//!
//! Only the flusher thread touches the file after it is opened. A lock file beside it keeps a second process away.

use std::{
    fs::{File, OpenOptions, TryLockError},
    io::{Seek, SeekFrom, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    sync::{Arc, PoisonError},
};

use serde_json::Value;

use super::{
    Key, Shared, StoreError,
    log::{self, FILE_MAGIC, FrameKind, PAYLOAD_BYTES_MAX},
    open_error,
    state::{Staged, State, stamp},
};

/// Payload size at which a compaction starts the next base frame.
const BASE_PAYLOAD_BYTES: usize = 1 << 20;

/// The open data file.
#[derive(Debug)]
pub(super) struct DataFile {
    path: PathBuf,
    file: File,
    /// Length of the part known to be good; the next frame goes there.
    good_bytes: u64,
    /// Length right after the last compaction.
    base_bytes: u64,
    /// Held for its lock alone.
    _lock: File,
}

impl DataFile {
    /// Opens or creates the file and loads it into `state`.
    pub(super) fn open(path: &Path, state: &mut State) -> Result<Self, StoreError> {
        let lock = lock(path)?;
        let io = |source| open_error(path, source);
        if !path.try_exists().map_err(io)? {
            write_base(path, &[], 0).and_then(|()| rename_base(path)).map_err(io)?;
        }
        let mut file = OpenOptions::new().read(true).write(true).open(path).map_err(io)?;
        let bytes = std::fs::read(path).map_err(io)?;
        let scan = log::scan(&bytes)?;
        let base_bytes = load(scan.frames, state)?;
        if scan.good_bytes < bytes.len() {
            tracing::warn!(cut_bytes = bytes.len() - scan.good_bytes, "cutting the torn tail of the data file");
            file.set_len(scan.good_bytes as u64).and_then(|()| file.sync_all()).map_err(io)?;
        }
        file.seek(SeekFrom::Start(scan.good_bytes as u64)).map_err(io)?;
        Ok(Self { path: path.to_owned(), file, good_bytes: scan.good_bytes as u64, base_bytes, _lock: lock })
    }

    /// Makes staged changes durable and publishes them, until the store is closed.
    pub(super) fn flush_loop(mut self, shared: &Arc<Shared>) {
        loop {
            let batch = {
                let mut state = shared.lock();
                while !state.has_staged() && !state.closed {
                    state = shared.work.wait(state).unwrap_or_else(PoisonError::into_inner);
                }
                if !state.has_staged() {
                    break;
                }
                state.take_staged()
            };
            self.flush(shared, split(batch));
            self.compact_if_due(shared);
        }
        // Wake watchers so that they see the end.
        shared.published.send_modify(|_| ());
    }

    /// Writes each part as one frame and publishes it. A part that fails takes back all parts behind it too.
    fn flush(&mut self, shared: &Shared, parts: Vec<Vec<Staged>>) {
        let mut parts = parts.into_iter();
        while let Some(part) = parts.next() {
            let written = self.append(&frame_of(&part));
            let mut state = shared.lock();
            match written {
                Ok(()) => state.publish(part),
                Err(error) => {
                    tracing::error!(%error, "data file");
                    if let StoreError::Failed(why) = &error {
                        state.failed = Some(why.clone());
                    }
                    state.roll_back(part.into_iter().chain(parts.by_ref().flatten()), &error);
                }
            }
            shared.published.send_replace(state.published);
        }
    }

    /// Writes one frame and syncs it.
    fn append(&mut self, frame: &[u8]) -> Result<(), StoreError> {
        if let Err(error) = self.file.write_all(frame) {
            return Err(self.undo_write(&error));
        }
        // After a failed sync the kernel may have dropped the pages: nothing more can be known about the file.
        self.file.sync_data().map_err(|error| StoreError::Failed(format!("syncing the data file failed: {error}")))?;
        self.good_bytes += frame.len() as u64;
        Ok(())
    }

    fn undo_write(&mut self, error: &std::io::Error) -> StoreError {
        let undone = self
            .file
            .set_len(self.good_bytes)
            .and_then(|()| self.file.sync_all())
            .and_then(|()| self.file.seek(SeekFrom::Start(self.good_bytes)));
        match undone {
            Ok(_) => StoreError::Write(error.to_string()),
            Err(undo) => StoreError::Failed(format!("a write failed ({error}) and could not be undone ({undo})")),
        }
    }

    fn compact_if_due(&mut self, shared: &Shared) {
        let (due, live, revision) = {
            let state = shared.lock();
            let log_bytes = self.good_bytes - self.base_bytes;
            let due = state.failed.is_none() && log_bytes > state.compact_bytes_min().max(4 * state.live_bytes);
            let live: Vec<(Key, u64, Arc<Value>)> = if due {
                state.objects.iter().map(|(key, entry)| (key.clone(), entry.revision, entry.value.clone())).collect()
            } else {
                Vec::new()
            };
            (due, live, state.published)
        };
        if !due {
            return;
        }
        self.base_bytes = self.good_bytes;
        if let Err(error) = write_base(&self.path, &live, revision) {
            // The old file is whole and in use; compaction is tried again when the log has grown as much once more.
            tracing::warn!(%error, "compacting the data file failed");
            return;
        }
        if let Err(error) = self.switch_to_base() {
            // The old file may or may not come back after a crash, so a write to either could be lost.
            let why = format!("switching to the compacted data file failed: {error}");
            tracing::error!(why, "data file");
            shared.lock().failed = Some(why);
        }
    }

    /// Puts the compacted file in the place of the old one.
    fn switch_to_base(&mut self) -> std::io::Result<()> {
        rename_base(&self.path)?;
        self.file = OpenOptions::new().read(true).write(true).open(&self.path)?;
        self.good_bytes = self.file.seek(SeekFrom::End(0))?;
        self.base_bytes = self.good_bytes;
        Ok(())
    }
}

/// Takes the lock file beside the data file.
fn lock(path: &Path) -> Result<File, StoreError> {
    let lock_path = beside(path, "lock");
    let lock = OpenOptions::new()
        .create(true)
        .truncate(false)
        .write(true)
        .open(&lock_path)
        .map_err(|source| open_error(&lock_path, source))?;
    match lock.try_lock() {
        Ok(()) => Ok(lock),
        Err(TryLockError::WouldBlock) => Err(StoreError::InUse(path.display().to_string())),
        Err(TryLockError::Error(source)) => Err(open_error(&lock_path, source)),
    }
}

fn beside(path: &Path, extension: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".");
    name.push(extension);
    PathBuf::from(name)
}

/// Writes a file beside the data file that holds only the live objects.
fn write_base(path: &Path, live: &[(Key, u64, Arc<Value>)], revision: u64) -> std::io::Result<()> {
    let temporary = beside(path, "new");
    // Secrets are in it: for the owner's eyes only.
    let mut file = OpenOptions::new().create(true).truncate(true).write(true).mode(0o600).open(&temporary)?;
    let mut out = FILE_MAGIC.to_vec();
    let mut payload = Vec::new();
    for (key, revision, value) in live {
        log::encode_record(&mut payload, *revision, key, Some(&serde_json::to_vec(value.as_ref())?));
        if payload.len() >= BASE_PAYLOAD_BYTES {
            log::encode_frame(&mut out, FrameKind::Base, *revision, &payload);
            payload.clear();
        }
    }
    if !payload.is_empty() {
        log::encode_frame(&mut out, FrameKind::Base, revision, &payload);
    }
    log::encode_frame(&mut out, FrameKind::End, revision, &[]);
    file.write_all(&out)?;
    file.sync_all()?;
    Ok(())
}

/// Puts the file written by [`write_base`] in the data file's place, durably.
fn rename_base(path: &Path) -> std::io::Result<()> {
    std::fs::rename(beside(path, "new"), path)?;
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    File::open(directory)?.sync_all()
}

/// Cuts a group commit into parts that fit a frame each: one part, unless the changes are very large.
fn split(batch: Vec<Staged>) -> Vec<Vec<Staged>> {
    let mut parts: Vec<Vec<Staged>> = Vec::new();
    let mut bytes = PAYLOAD_BYTES_MAX;
    for staged in batch {
        let more = staged.encoded.as_ref().map_or(0, Vec::len);
        match parts.last_mut() {
            Some(part) if bytes + more <= PAYLOAD_BYTES_MAX => {
                bytes += more;
                part.push(staged);
            }
            _ => {
                bytes = more;
                parts.push(vec![staged]);
            }
        }
    }
    parts
}

fn frame_of(part: &[Staged]) -> Vec<u8> {
    let mut payload = Vec::new();
    for staged in part {
        log::encode_record(&mut payload, staged.revision, &staged.key, staged.encoded.as_deref());
    }
    let mut frame = Vec::with_capacity(payload.len() + log::HEADER_BYTES);
    log::encode_frame(&mut frame, FrameKind::Log, part.last().map_or(0, |last| last.revision), &payload);
    frame
}

/// Replays the frames into the state. Returns the length of the base in bytes, as an estimate for the next compaction.
fn load(frames: Vec<log::Frame>, state: &mut State) -> Result<u64, StoreError> {
    let mut base_bytes = 0;
    for frame in frames {
        let remember = frame.kind == FrameKind::Log;
        for record in frame.records {
            let bytes = record.value.as_ref().map_or(0, Vec::len);
            if !remember {
                base_bytes += bytes as u64;
            }
            let value = record.value.map(|json| parse(&json, record.revision)).transpose()?;
            state.apply(record.revision, record.key, value, bytes, remember);
        }
        if frame.kind == FrameKind::End {
            state.start_history_at(frame.revision);
        }
    }
    Ok(base_bytes)
}

fn parse(json: &[u8], revision: u64) -> Result<Arc<Value>, StoreError> {
    let mut value: Value = serde_json::from_slice(json).map_err(|error| StoreError::Corrupt {
        offset_bytes: 0,
        what: format!("the object of revision {revision} is not JSON: {error}"),
    })?;
    stamp(&mut value, revision);
    Ok(Arc::new(value))
}
