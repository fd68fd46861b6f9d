//! Block devices: one trait, submit and complete.
//!
//! *What it is.* A [`Bdev`] is what any core may hold: the device's description and a way to [`Bdev::open`] a
//! [`Channel`] on a core. A channel belongs to its core and takes [`Io`]s. The submitter names a sink and a tag; the
//! device gives the `Io` back through [`Core::complete`], and the sink is told from the core's loop. There is no boxed
//! future and no allocation per I/O.
//!
//! *Flow.* submitter → [`Chan::submit`] (bounds, support, statistics, emulation) → [`Channel::submit`] → … →
//! [`Core::complete`] → [`IoSink::io_done`].
//!
//! *Invariants.* Each submitted `Io` is completed exactly once, whatever happens to the device. Buffers are whole blocks
//! in total length. A channel that was dropped by its owner still completes what it had accepted.
//!
//! *When things fail.* Errors are NVMe statuses: what a remote drive says passes through unchanged. A device that has no
//! room now queues (bounded by the queue depths above it); it never refuses for lack of memory.

pub mod crypto;
pub mod delay;
pub mod error;
pub mod examine;
pub mod lvol;
pub mod malloc;
pub mod null;
pub mod over;
pub mod passthru;
pub mod registry;
pub mod remote;
pub mod rpc;
pub mod stats;
pub mod uring;

use std::fmt::Debug;
use std::rc::Rc;
use std::sync::Arc;

use nvme_wire::Status;
use serde_json::Value;
use uuid::Uuid;

pub use crate::reactor::disk::Bufs;
use crate::reactor::driver::Nanos;
use crate::reactor::{Core, CoreId};
use stats::CoreIoStats;
pub use stats::IoStats;

/// Handles to the same data, for another I/O with it. Nearly always it is one buffer.
#[must_use]
pub fn share(bufs: &Bufs) -> Bufs {
    match bufs.as_slice() {
        [one] => smallvec::smallvec![one.clone()],
        _ => bufs.clone(),
    }
}

/// How an I/O ended: an NVMe status.
pub type IoStatus = Status;

/// What an I/O asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IoOp {
    Read,
    /// `fua`: durable before completion.
    Write {
        fua: bool,
    },
    /// Everything completed before is durable afterwards.
    Flush,
    /// The range need not be kept; it reads as zeroes where the device says so.
    Unmap,
    WriteZeroes,
    /// The range must hold the buffers' bytes, else Compare Failure.
    Compare,
    /// Ends all I/O of this channel, one way or another.
    Reset,
}

/// Whom to tell when an I/O has ended.
pub trait IoSink {
    /// Called once per I/O, from the core's loop.
    fn io_done(self: Rc<Self>, core: &Core, tag: u64, status: IoStatus);
    /// Offers the data of a whole read where it lies, instead of a copy of it in the read's buffers; false when it must
    /// be copied. What is lent never changes. [`Self::io_done`] follows in either case.
    fn lend(&self, _tag: u64, _data: &addax_hugepages::BufSlice) -> bool {
        false
    }
}

/// One I/O on its way through a device.
pub struct Io {
    pub op: IoOp,
    /// First block.
    pub lba: u64,
    /// Number of blocks.
    pub blocks: u64,
    /// Data of reads, writes and compares.
    pub bufs: Bufs,
    sink: Rc<dyn IoSink>,
    tag: u64,
    account: Option<Account>,
}

/// The counters of a channel, counted by `Rc`: a clone per I/O must not touch what other cores hold too.
struct Counters(Arc<CoreIoStats>);

/// Where and since when an I/O is counted.
struct Account {
    stats: Rc<Counters>,
    start: Nanos,
    block_size: u32,
}

impl Debug for Io {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?} lba {} blocks {} tag {}", self.op, self.lba, self.blocks, self.tag)
    }
}

impl Io {
    /// An I/O with its data.
    #[must_use]
    pub fn new(op: IoOp, lba: u64, blocks: u64, bufs: Bufs, sink: Rc<dyn IoSink>, tag: u64) -> Self {
        Self { op, lba, blocks, bufs, sink, tag, account: None }
    }

    /// Bytes of data.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bufs.iter().map(|b| b.len()).sum()
    }

    /// Puts `sink` and `tag` in the place of whom to tell, and gives back who that was: for a device that passes the
    /// very I/O on to another and wants to see it end.
    pub(crate) fn divert(&mut self, sink: Rc<dyn IoSink>, tag: u64) -> Origin {
        let (sink, tag) = (std::mem::replace(&mut self.sink, sink), std::mem::replace(&mut self.tag, tag));
        Origin { sink, tag, op: self.op, blocks: self.blocks, account: self.account.take() }
    }

    /// Answers a read with zeroes: lent where the submitter takes that, else written to the buffers.
    pub fn zero(&self, core: &Core) {
        let bytes = self.bytes();
        if bytes <= ZERO_BUFFER_BYTES && self.sink.lend(self.tag, &zeroes(core, bytes)) {
            return;
        }
        self.bufs.iter().for_each(|b| b.fill(0));
    }

    /// Called by the core's loop: books the I/O and says whom to tell.
    pub(crate) fn finish(self, now: Nanos, status: IoStatus) -> (Rc<dyn IoSink>, u64) {
        if let Some(Account { stats, start, block_size }) = &self.account {
            stats.0.book(self.op, self.blocks * u64::from(*block_size), now.saturating_sub(*start), status);
        }
        (self.sink, self.tag)
    }
}

/// Whom to tell of the end of a diverted I/O (see [`Io::divert`]).
pub(crate) struct Origin {
    sink: Rc<dyn IoSink>,
    tag: u64,
    op: IoOp,
    blocks: u64,
    account: Option<Account>,
}

impl Origin {
    /// Books the I/O and tells its submitter; to be called from the core's loop, as [`IoSink::io_done`] is.
    pub(crate) fn finish(self, core: &Core, status: IoStatus) {
        if let Some(Account { stats, start, block_size }) = &self.account {
            let bytes = self.blocks * u64::from(*block_size);
            stats.0.book(self.op, bytes, core.now().saturating_sub(*start), status);
        }
        self.sink.io_done(core, self.tag, status);
    }
}

/// Which kinds of I/O a device does itself (SPDK's `supported_io_types`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IoTypes {
    pub read: bool,
    pub write: bool,
    pub unmap: bool,
    pub flush: bool,
    pub reset: bool,
    /// Natively; a device that writes has it by emulation anyway.
    pub write_zeroes: bool,
    pub compare: bool,
    pub compare_and_write: bool,
    pub abort: bool,
    pub copy: bool,
    pub zcopy: bool,
    pub nvme_admin: bool,
    pub nvme_io: bool,
    pub seek_hole: bool,
    pub seek_data: bool,
}

impl IoTypes {
    /// Reads, writes, nothing else.
    pub const READ_WRITE: Self = Self {
        read: true,
        write: true,
        unmap: false,
        flush: false,
        reset: false,
        write_zeroes: false,
        compare: false,
        compare_and_write: false,
        abort: false,
        copy: false,
        zcopy: false,
        nvme_admin: false,
        nvme_io: false,
        seek_hole: false,
        seek_data: false,
    };

    /// What all of several devices do.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self {
            read: self.read && other.read,
            write: self.write && other.write,
            unmap: self.unmap && other.unmap,
            flush: self.flush && other.flush,
            reset: self.reset && other.reset,
            write_zeroes: self.write_zeroes && other.write_zeroes,
            compare: self.compare && other.compare,
            compare_and_write: self.compare_and_write && other.compare_and_write,
            abort: self.abort && other.abort,
            copy: self.copy && other.copy,
            zcopy: self.zcopy && other.zcopy,
            nvme_admin: self.nvme_admin && other.nvme_admin,
            nvme_io: self.nvme_io && other.nvme_io,
            seek_hole: self.seek_hole && other.seek_hole,
            seek_data: self.seek_data && other.seek_data,
        }
    }
}

/// A device's description. Numbers that may change (size) are read anew through [`Bdev::info`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BdevInfo {
    pub name: String,
    pub product_name: &'static str,
    pub uuid: Uuid,
    /// Bytes per block: a power of two, 512 to 65536.
    pub block_size: u32,
    pub num_blocks: u64,
    /// Bytes that the medium writes at once; 0 when unknown.
    pub physical_block_size: u32,
    /// Blocks that one I/O should not cross; 0 for none.
    pub optimal_io_boundary: u32,
    pub io_types: IoTypes,
    /// Whether completed writes may be lost with power until flushed.
    pub write_cache: bool,
}

/// A block device.
pub trait Bdev: Send + Sync + Debug {
    /// The description now.
    fn info(&self) -> BdevInfo;
    /// Number of blocks now; read for every I/O, so it must be cheap.
    fn num_blocks(&self) -> u64;
    /// Makes a channel for `core`. May be called on any core and more than once.
    fn open(&self, core: &Core) -> Result<Rc<dyn Channel>, BdevError>;
    /// The only core that can open it, if there is one; others go through [`remote`].
    fn home(&self) -> Option<CoreId> {
        None
    }
    /// Whether an unmapped range reads as zeroes from then on.
    fn unmap_reads_zeroes(&self) -> bool {
        false
    }
    /// Whether a guest writes what it holds: such a device is never searched for stores and arrays of ours by itself.
    fn holds_guest_data(&self) -> bool {
        false
    }
    /// Whether other processes may serve the same data to the same hosts: when it goes away here, hosts are to look for
    /// another path, not to take its namespace for deleted.
    fn has_other_paths(&self) -> bool {
        false
    }
    /// The member `driver_specific` of `bdev_get_bdevs`.
    fn driver_specific(&self) -> Value {
        Value::Object(serde_json::Map::new())
    }
    /// The RPC `(method, params)` that makes this device again, for `save_config`; none when examine finds it.
    fn config(&self) -> Option<(&'static str, Value)>;
    /// For downcasts by the module that made it.
    fn as_any(&self) -> &dyn std::any::Any;
}

/// A device as one core uses it.
pub trait Channel {
    /// Takes an I/O; it comes back through [`Core::complete`].
    fn submit(&self, core: &Core, io: Io);
    /// The owner lets the channel go. I/O already taken is still completed.
    fn close(&self, _core: &Core) {}
    /// Copies blocks within the medium at once, where that is no more than moving memory; none where it is more.
    fn copy_now(&self, _from: u64, _to: u64, _blocks: u64) -> Option<IoStatus> {
        None
    }
    /// Tells `watcher` of every change of the way to the medium from now on; a local medium has none.
    fn watch_path(&self, _core: &Core, _watcher: PathWatcher) {}
}

/// Whether a remote medium can be reached through a channel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PathState {
    /// A new session serves the channel; the one before it is closed for good.
    Up,
    /// The session is lost; everything in flight has been completed with a path error.
    Down,
    /// The other side refuses a session.
    Refused,
}

/// Told of changes of a path, on the channel's core.
pub type PathWatcher = Rc<dyn Fn(&Core, PathState)>;

/// Why a device operation was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BdevError {
    #[error("no block device {0}")]
    NotFound(String),
    #[error("a block device named {0} exists already")]
    Exists(String),
    #[error("block device {name} is claimed by {by}")]
    Claimed { name: String, by: &'static str },
    #[error("{field} {value}: {allowed}")]
    Invalid { field: &'static str, value: String, allowed: &'static str },
    #[error("out of memory for {0}")]
    NoMemory(&'static str),
    #[error("{what}: {source_text}")]
    Io { what: String, errno: i32, source_text: String },
}

impl BdevError {
    /// The errno that SPDK answers in this case (positive).
    #[must_use]
    pub fn errno(&self) -> i32 {
        match self {
            Self::NotFound(_) => libc::ENODEV,
            Self::Exists(_) => libc::EEXIST,
            Self::Claimed { .. } => libc::EPERM,
            Self::Invalid { .. } => libc::EINVAL,
            Self::NoMemory(_) => libc::ENOMEM,
            Self::Io { errno, .. } => *errno,
        }
    }

    /// From an operating system error.
    #[must_use]
    pub fn io(what: impl Into<String>, error: &std::io::Error) -> Self {
        Self::Io { what: what.into(), errno: error.raw_os_error().unwrap_or(libc::EIO), source_text: error.to_string() }
    }
}

/// A channel with what the layer above all devices does: bounds, support, statistics, emulation.
#[derive(Clone)]
pub struct Chan {
    channel: Rc<dyn Channel>,
    bdev: Arc<dyn Bdev>,
    /// Counted without touching a shared counter: I/O of this channel stays on its core.
    stats: Rc<Counters>,
    block_size: u32,
    io_types: IoTypes,
}

impl Debug for Chan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Chan").field("bdev", &self.bdev).finish()
    }
}

/// Zeroes for emulated write-zeroes: one buffer per core, sent as often as needed.
const ZERO_BUFFER_BYTES: usize = 128 << 10;

struct ZeroBuffer(addax_hugepages::BufSlice);

/// So many zeroes, at most [`ZERO_BUFFER_BYTES`].
fn zeroes(core: &Core, bytes: usize) -> addax_hugepages::BufSlice {
    let zeroes = core.local(|| ZeroBuffer(addax_hugepages::Buf::alloc_unpooled(ZERO_BUFFER_BYTES).into_slice()));
    zeroes.0.slice(..bytes)
}

impl Chan {
    /// Opens a device for this core, through its home core where it has one.
    pub fn open(core: &Core, bdev: &Arc<dyn Bdev>, stats: &Arc<IoStats>) -> Result<Self, BdevError> {
        let channel = match bdev.home() {
            Some(home) if home != core.id() => remote::open(core, Arc::clone(bdev), home),
            _ => bdev.open(core)?,
        };
        let info = bdev.info();
        Ok(Self {
            channel,
            bdev: Arc::clone(bdev),
            stats: Rc::new(Counters(stats.of_core(core.id()))),
            block_size: info.block_size,
            io_types: info.io_types,
        })
    }

    /// The device behind it.
    #[must_use]
    pub fn bdev(&self) -> &Arc<dyn Bdev> {
        &self.bdev
    }

    /// Number of blocks now.
    #[must_use]
    pub fn num_blocks(&self) -> u64 {
        self.bdev.num_blocks()
    }

    /// Takes an I/O; it comes back through its sink.
    pub fn submit(&self, core: &Core, mut io: Io) {
        let stats = Rc::clone(&self.stats);
        io.account = Some(Account { stats, start: core.now(), block_size: self.block_size });
        match io.op {
            IoOp::Flush if !self.io_types.flush => core.complete(io, Status::SUCCESS),
            IoOp::Flush | IoOp::Reset => self.channel.submit(core, io),
            _ => self.submit_range(core, io),
        }
    }

    fn submit_range(&self, core: &Core, io: Io) {
        let num_blocks = self.bdev.num_blocks();
        if io.lba.checked_add(io.blocks).is_none_or(|end| end > num_blocks) {
            return core.complete(io, Status::LBA_OUT_OF_RANGE);
        }
        let supported = match io.op {
            IoOp::Read => self.io_types.read,
            IoOp::Write { .. } => self.io_types.write,
            IoOp::Unmap => self.io_types.unmap,
            IoOp::Compare => self.io_types.compare,
            _ => true,
        };
        if !supported {
            return core.complete(io, Status::INVALID_OPCODE.with_dnr());
        }
        if io.op == IoOp::WriteZeroes && !self.io_types.write_zeroes {
            return self.emulate_zeroes(core, io);
        }
        self.channel.submit(core, io);
    }

    fn emulate_zeroes(&self, core: &Core, io: Io) {
        if !self.io_types.write {
            return core.complete(io, Status::INVALID_OPCODE.with_dnr());
        }
        let run = Rc::new(ZeroRun {
            channel: Rc::clone(&self.channel),
            zeroes: zeroes(core, ZERO_BUFFER_BYTES),
            block_size: u64::from(self.block_size),
            io: std::cell::RefCell::new(Some(io)),
            done: std::cell::Cell::new(0),
        });
        run.step(core);
    }

    /// Copies blocks within the medium, see [`Channel::copy_now`].
    pub fn copy_now(&self, from: u64, to: u64, blocks: u64) -> Option<IoStatus> {
        let end = from.max(to).checked_add(blocks);
        if end.is_none_or(|end| end > self.bdev.num_blocks()) {
            return Some(Status::LBA_OUT_OF_RANGE);
        }
        self.channel.copy_now(from, to, blocks)
    }

    /// Tells `watcher` of changes of the path, see [`Channel::watch_path`].
    pub fn watch_path(&self, core: &Core, watcher: PathWatcher) {
        self.channel.watch_path(core, watcher);
    }

    /// Lets the channel go.
    pub fn close(&self, core: &Core) {
        self.channel.close(core);
    }
}

/// One emulated write-zeroes: writes of the zero buffer, one after another.
struct ZeroRun {
    channel: Rc<dyn Channel>,
    zeroes: addax_hugepages::BufSlice,
    block_size: u64,
    io: std::cell::RefCell<Option<Io>>,
    done: std::cell::Cell<u64>,
}

impl ZeroRun {
    fn step(self: &Rc<Self>, core: &Core) {
        let Some((lba, blocks)) = self.io.borrow().as_ref().map(|io| (io.lba, io.blocks)) else { return };
        let left = blocks - self.done.get();
        if left == 0 {
            return self.end(core, Status::SUCCESS);
        }
        let now = left.min(ZERO_BUFFER_BYTES as u64 / self.block_size);
        let bytes = (now * self.block_size) as usize;
        let bufs = smallvec::smallvec![self.zeroes.slice(..bytes)];
        let op = IoOp::Write { fua: false };
        let part = Io::new(op, lba + self.done.get(), now, bufs, Rc::clone(self) as Rc<dyn IoSink>, now);
        self.channel.submit(core, part);
    }

    fn end(&self, core: &Core, status: IoStatus) {
        if let Some(io) = self.io.borrow_mut().take() {
            core.complete(io, status);
        }
    }
}

impl IoSink for ZeroRun {
    fn io_done(self: Rc<Self>, core: &Core, tag: u64, status: IoStatus) {
        if !status.is_success() {
            return self.end(core, status);
        }
        self.done.set(self.done.get() + tag);
        self.step(core);
    }
}
