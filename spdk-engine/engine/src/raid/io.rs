//! I/O that a control sequence waits for, and superblocks on members.
//!
//! *What it is.* One `async` call per I/O; and reading, writing and clearing what lies at the start of a member. The
//! control core carries no I/O: [`load`] and [`store`] work on a data core.
//!
//! *Invariants.* A stored superblock is followed by a flush: what it records may be relied on once the call returns.
//!
//! *When things fail.* A device that cannot be read is told apart from one without a superblock.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use addax_hugepages::Buf;
use blobstore_format::raid::{HEADER, RaidError, RaidSuperblock};
use futures::channel::oneshot;
use nvme_wire::Status;

use crate::bdev::registry::Entry;
use crate::bdev::{Bufs, Chan, Io, IoOp, IoSink, IoStatus};
use crate::reactor::driver::{NANOS_PER_S, Nanos};
use crate::reactor::{Core, CoreId};

/// Longest wait for a superblock to be read or written.
const DEADLINE_NS: Nanos = 60 * NANOS_PER_S;

/// Resolves a future with the status of one I/O.
pub struct Once(RefCell<Option<oneshot::Sender<IoStatus>>>);

impl Once {
    /// A sink, and what resolves when it is told.
    pub fn new() -> (Rc<Self>, oneshot::Receiver<IoStatus>) {
        let (sender, receiver) = oneshot::channel();
        (Rc::new(Self(RefCell::new(Some(sender)))), receiver)
    }
}

impl IoSink for Once {
    fn io_done(self: Rc<Self>, _core: &Core, _tag: u64, status: IoStatus) {
        if let Some(sender) = self.0.borrow_mut().take() {
            let _ = sender.send(status);
        }
    }
}

/// One I/O on a channel.
pub async fn run(core: &Core, chan: &Chan, op: IoOp, (lba, blocks): (u64, u64), bufs: Bufs) -> IoStatus {
    let (sink, done) = Once::new();
    chan.submit(core, Io::new(op, lba, blocks, bufs, sink, 0));
    done.await.unwrap_or(Status::INTERNAL_ERROR)
}

/// The core that control sequences do their I/O on.
#[must_use]
pub fn worker(core: &Core) -> CoreId {
    core.data_cores().first().copied().unwrap_or(core.id())
}

/// The superblock on a device, if there is a sound one.
///
/// # Errors
/// EIO when it cannot be read.
pub async fn load(core: &Core, entry: &Arc<Entry>) -> Result<Option<RaidSuperblock>, i32> {
    let (entry_there, worker) = (Arc::clone(entry), worker(core));
    let read = core.call_async(worker, move |core| load_here(core.clone(), entry_there));
    core.timeout(DEADLINE_NS, read).await.flatten().unwrap_or(Err(libc::EIO))
}

async fn load_here(core: Core, entry: Arc<Entry>) -> Result<Option<RaidSuperblock>, i32> {
    let chan = entry.open(&core).map_err(|e| e.errno())?;
    let loaded = load_from(&core, &chan).await;
    chan.close(&core);
    if let Err(error) = &loaded {
        tracing::warn!(bdev = entry.bdev.info().name, %error, "cannot look for a raid superblock");
    }
    loaded.map_err(|_| libc::EIO)
}

async fn load_from(core: &Core, chan: &Chan) -> Result<Option<RaidSuperblock>, IoStatus> {
    let info = chan.bdev().info();
    let block_size = info.block_size as usize;
    let mut wanted = HEADER;
    loop {
        let blocks = wanted.div_ceil(block_size) as u64;
        if blocks > info.num_blocks {
            return Ok(None);
        }
        let buf = Buf::alloc_unpooled(blocks as usize * block_size).into_slice();
        let status = run(core, chan, IoOp::Read, (0, blocks), smallvec::smallvec![buf.clone()]).await;
        if !status.is_success() {
            return Err(status);
        }
        match RaidSuperblock::parse(&buf.to_vec()) {
            Ok(superblock) => return Ok(Some(superblock)),
            Err(RaidError::Short { need, .. }) if need > wanted => wanted = need,
            Err(RaidError::Signature(_)) => return Ok(None),
            Err(error) => {
                tracing::warn!(bdev = info.name, %error, "not taken for a member of a raid");
                return Ok(None);
            }
        }
    }
}

/// Writes `bytes` at the start of a device, durably.
///
/// # Errors
/// EIO when it cannot.
pub async fn store(core: &Core, entry: Arc<Entry>, bytes: Vec<u8>) -> Result<(), i32> {
    let name = entry.bdev.info().name;
    let written = core.call_async(worker(core), move |core| store_here(core.clone(), entry, bytes));
    let outcome = core.timeout(DEADLINE_NS, written).await.flatten().unwrap_or(Err(libc::EIO));
    if outcome.is_err() {
        tracing::error!(bdev = name, "the raid superblock cannot be written");
    }
    outcome
}

async fn store_here(core: Core, entry: Arc<Entry>, mut bytes: Vec<u8>) -> Result<(), i32> {
    let block_size = entry.bdev.info().block_size as usize;
    bytes.resize(bytes.len().next_multiple_of(block_size), 0);
    let blocks = (bytes.len() / block_size) as u64;
    let chan = entry.open(&core).map_err(|e| e.errno())?;
    let bufs = smallvec::smallvec![Buf::copy_of(&bytes).into_slice()];
    let mut status = run(&core, &chan, IoOp::Write { fua: false }, (0, blocks), bufs).await;
    if status.is_success() {
        status = run(&core, &chan, IoOp::Flush, (0, 0), Bufs::new()).await;
    }
    chan.close(&core);
    if status.is_success() { Ok(()) } else { Err(libc::EIO) }
}
