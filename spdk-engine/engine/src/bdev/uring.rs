//! `uring` and `aio`: a file or block device through the core's io_uring.
//!
//! *What it is.* Both of SPDK's modules have the same device here; they differ in name, description and in what their
//! RPCs take. O_DIRECT is used where the file system has it.
//!
//! *Invariants.* A hole of a file reads as zeroes. Write-zeroes frees space where the file can (`PUNCH_HOLE` reads as
//! zeroes too); a block device zeroes the range. Flush is `fdatasync`.
//!
//! *When things fail.* Errno becomes a status: ENOSPC is Capacity Exceeded (never a media error, so that a full disk is
//! not taken for a broken one), others are media errors of their direction.

use std::any::Any;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use addax_hugepages::Buf;
use nvme_wire::Status;
use serde_json::{Value, json};
use slab::Slab;
use uuid::Uuid;

use super::{Bdev, BdevError, BdevInfo, Bufs, Channel, Io, IoOp, IoTypes};
use crate::reactor::disk::{DiskFile, DiskOp, DiskVerb};
use crate::reactor::{Core, OnDisk};

/// Which of SPDK's modules the device was made by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flavour {
    Uring,
    /// `fallocate`: whether unmap is passed to the file.
    Aio {
        readonly: bool,
        fallocate: bool,
    },
}

/// A file or block device.
#[derive(Debug)]
pub struct FileBdev {
    info: BdevInfo,
    file: Arc<DiskFile>,
    path: PathBuf,
    flavour: Flavour,
    block_size_given: bool,
    num_blocks: AtomicU64,
}

/// What to open.
#[derive(Debug, Clone)]
pub struct FileParams {
    pub name: String,
    pub path: PathBuf,
    /// Bytes; none to take the device's own (512 for files).
    pub block_size: Option<u32>,
    pub uuid: Option<Uuid>,
}

impl FileBdev {
    /// Opens the file.
    pub fn open_file(params: FileParams, flavour: Flavour) -> Result<Self, BdevError> {
        let readonly = matches!(flavour, Flavour::Aio { readonly: true, .. });
        let file = DiskFile::open(&params.path, readonly)
            .map_err(|e| BdevError::io(format!("open {}", params.path.display()), &e))?;
        Self::over(params, flavour, file)
    }

    /// A device over an open file (a simulated one, too).
    pub fn over(params: FileParams, flavour: Flavour, file: Arc<DiskFile>) -> Result<Self, BdevError> {
        let block_size = params.block_size.unwrap_or(file.alignment_bytes.max(512));
        let num_blocks = blocks_of(file.size_bytes, block_size)?;
        let readonly = matches!(flavour, Flavour::Aio { readonly: true, .. });
        // Without it zeroes are written, by the layer above: slower, and right.
        let discards = matches!(flavour, Flavour::Uring | Flavour::Aio { fallocate: true, .. }) && file.punches_holes;
        let info = BdevInfo {
            name: params.name,
            product_name: if flavour == Flavour::Uring { "URING bdev" } else { "AIO disk" },
            uuid: params.uuid.unwrap_or_else(Uuid::new_v4),
            block_size,
            num_blocks,
            physical_block_size: 4096,
            optimal_io_boundary: 0,
            io_types: IoTypes {
                write: !readonly,
                unmap: discards && !readonly,
                write_zeroes: discards && !readonly,
                flush: true,
                reset: true,
                ..IoTypes::READ_WRITE
            },
            write_cache: true,
        };
        Ok(Self {
            info,
            file,
            path: params.path,
            flavour,
            block_size_given: params.block_size.is_some(),
            num_blocks: AtomicU64::new(num_blocks),
        })
    }

    /// Takes up a grown file; the caller tells the registry. True when the size has changed.
    pub fn rescan(&self) -> Result<bool, BdevError> {
        let again = DiskFile::open(&self.path, true).map_err(|e| BdevError::io("rescan", &e))?;
        let blocks = blocks_of(again.size_bytes, self.info.block_size)?;
        Ok(self.num_blocks.swap(blocks, Ordering::Relaxed) != blocks)
    }

    /// The file's path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The module it belongs to.
    #[must_use]
    pub fn flavour(&self) -> Flavour {
        self.flavour
    }
}

fn blocks_of(bytes: u64, block_size: u32) -> Result<u64, BdevError> {
    if block_size < 512 || !block_size.is_power_of_two() || block_size > 65536 {
        let allowed = "a power of two from 512 to 65536";
        return Err(BdevError::Invalid { field: "block_size", value: block_size.to_string(), allowed });
    }
    if bytes == 0 || !bytes.is_multiple_of(u64::from(block_size)) {
        let allowed = "a whole number of blocks, at least one";
        return Err(BdevError::Invalid { field: "file size", value: bytes.to_string(), allowed });
    }
    Ok(bytes / u64::from(block_size))
}

impl Bdev for FileBdev {
    fn info(&self) -> BdevInfo {
        BdevInfo { num_blocks: self.num_blocks(), ..self.info.clone() }
    }
    fn num_blocks(&self) -> u64 {
        self.num_blocks.load(Ordering::Relaxed)
    }
    fn open(&self, _core: &Core) -> Result<Rc<dyn Channel>, BdevError> {
        let (file, block_size) = (Arc::clone(&self.file), u64::from(self.info.block_size));
        Ok(Rc::new(FileChannel(Rc::new(Inner { file, block_size, running: std::cell::RefCell::default() }))))
    }
    /// Punching a hole zeroes the range, of a file and of a block device, or fails.
    fn unmap_reads_zeroes(&self) -> bool {
        true
    }
    fn driver_specific(&self) -> Value {
        let filename = self.path.display().to_string();
        match self.flavour {
            Flavour::Uring => json!({ "uring": { "filename": filename } }),
            Flavour::Aio { readonly, fallocate } => json!({ "aio": { "filename": filename,
                "block_size_override": self.block_size_given, "readonly": readonly, "fallocate": fallocate,
                "nowait": false } }),
        }
    }
    fn config(&self) -> Option<(&'static str, Value)> {
        let mut params = json!({ "name": self.info.name, "filename": self.path.display().to_string(),
            "uuid": self.info.uuid.to_string() });
        if self.block_size_given {
            params["block_size"] = json!(self.info.block_size);
        }
        match self.flavour {
            Flavour::Uring => Some(("bdev_uring_create", params)),
            Flavour::Aio { readonly, fallocate } => {
                params["readonly"] = json!(readonly);
                params["fallocate"] = json!(fallocate);
                Some(("bdev_aio_create", params))
            }
        }
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

struct FileChannel(Rc<Inner>);

struct Inner {
    file: Arc<DiskFile>,
    block_size: u64,
    /// I/O in the kernel, with whether a flush must follow (forced unit access).
    running: std::cell::RefCell<Slab<(Io, bool)>>,
}

impl Channel for FileChannel {
    fn submit(&self, core: &Core, io: Io) {
        let (offset, len) = (io.lba * self.0.block_size, io.blocks * self.0.block_size);
        let file = || Arc::clone(&self.0.file);
        let op = match io.op {
            IoOp::Read => DiskOp::transfer(file(), DiskVerb::Read, offset, io.bufs.clone()),
            IoOp::Write { .. } => DiskOp::transfer(file(), DiskVerb::Write, offset, self.0.aligned(core, &io.bufs)),
            IoOp::Flush => DiskOp::plain(file(), DiskVerb::Flush, 0, 0),
            IoOp::Unmap => DiskOp::plain(file(), DiskVerb::PunchHole, offset, len),
            // Freed space of a file reads as zeroes; a block device may keep old bytes in what it frees.
            IoOp::WriteZeroes if self.0.file.is_block_device => DiskOp::plain(file(), DiskVerb::ZeroRange, offset, len),
            IoOp::WriteZeroes => DiskOp::plain(file(), DiskVerb::PunchHole, offset, len),
            IoOp::Reset => return core.complete(io, Status::SUCCESS),
            IoOp::Compare => return core.complete(io, Status::INVALID_OPCODE.with_dnr()),
        };
        let then_flush = io.op == IoOp::Write { fua: true };
        let tag = self.0.running.borrow_mut().insert((io, then_flush)) as u64;
        core.submit_disk(op, Rc::clone(&self.0) as Rc<dyn OnDisk>, tag);
    }
}

impl Inner {
    /// The buffers as direct I/O takes them: payloads that lie where they were received are copied together.
    fn aligned(&self, core: &Core, bufs: &Bufs) -> Bufs {
        let alignment = self.file.alignment_bytes as usize;
        if bufs.iter().all(|b| b.is_direct_io(alignment)) {
            return bufs.clone();
        }
        let bytes = bufs.iter().map(|b| b.len()).sum();
        let whole = core.pool().take(bytes).unwrap_or_else(|| Buf::alloc_unpooled(bytes));
        let mut at = 0;
        for buf in bufs {
            whole.copy_from_memory(buf, at);
            at += buf.len();
        }
        smallvec::smallvec![whole.into_slice()]
    }
}

impl OnDisk for Inner {
    fn disk_done(self: Rc<Self>, core: &Core, tag: u64, result: i32) {
        let mut running = self.running.borrow_mut();
        let Some((_, then_flush)) = running.get_mut(tag as usize) else { return };
        if result == 0 && std::mem::take(then_flush) {
            let flush = DiskOp::plain(Arc::clone(&self.file), DiskVerb::Flush, 0, 0);
            drop(running);
            return core.submit_disk(flush, self, tag);
        }
        let (io, _) = running.remove(tag as usize);
        drop(running);
        let status = status_of(io.op, result);
        core.complete(io, status);
    }
}

fn status_of(op: IoOp, result: i32) -> Status {
    match -result {
        0 => Status::SUCCESS,
        libc::ENOSPC | libc::EDQUOT => Status::CAPACITY_EXCEEDED,
        libc::EOPNOTSUPP => Status::INVALID_OPCODE.with_dnr(),
        _ if op == IoOp::Read => Status::UNRECOVERED_READ_ERROR,
        _ => Status::WRITE_FAULT,
    }
}
