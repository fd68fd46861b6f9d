//! Rebuilding a member in the background, and correcting what a member could not read.
//!
//! *Flow.* The member joins as target with the boundary at 0. Window by window: the range is held against hosts, copied
//! from whole members, then the boundary moves past it in the same step that lifts the hold. When all is copied, the
//! target is flushed and the superblocks list it, under a hold of all I/O.
//!
//! *Invariants.* Below the boundary the target has what the others have, and gets every write; above it, it gets none.
//! Progress is not kept on disk: a rebuild that was interrupted starts again. One rebuild at a time in a raid.
//!
//! *When things fail.* Blocks that no whole member can read, or that the target cannot write, end the rebuild and the
//! target leaves. A raid that has grown meanwhile is rebuilt to its new end before the target counts.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

use addax_hugepages::{Buf, BufSlice};
use futures::channel::oneshot;

use super::control::{Raid, Raids};
use super::core_raid::{CoreRaid, Verdict, apply_everywhere};
use super::examine;
use super::io::{self, Once};
use super::shared::{Held, MemberId, Shared, next_number};
use crate::bdev::{Bufs, Io, IoOp, IoStatus};
use crate::reactor::Core;
use crate::reactor::driver::{NANOS_PER_MS, NANOS_PER_S, Nanos};

/// Copies that run at once.
const DEPTH: u64 = 16;
/// Most bytes of one copy; a larger window is copied in several goes.
const COPY_BYTES_MAX: u64 = 1 << 20;
/// How long the copying of one window may take.
const WINDOW_DEADLINE_NS: Nanos = 120 * NANOS_PER_S;
/// How often a rebuild that waits for its bandwidth looks whether it is to stop.
const PACE_NS: Nanos = 100 * NANOS_PER_MS;

/// A rebuild.
pub struct Process {
    id: u64,
    pub slot: usize,
    member: MemberId,
    /// First block not copied yet.
    pub offset: Cell<u64>,
    /// Why it is to stop.
    stop: Cell<Option<i32>>,
    /// How the copying ended.
    ended: Cell<Option<Result<(), i32>>>,
    waiting: RefCell<Vec<oneshot::Sender<()>>>,
    /// When the next window may begin.
    not_before: Cell<Nanos>,
}

/// Makes the member in `slot`, which has been claimed, the target of a rebuild; part of a job.
///
/// # Errors
/// When a core cannot open it; it has left again then.
pub async fn start(raid: &Rc<Raid>, slot: usize) -> Result<(), i32> {
    let (Some(shared), Some(member)) = (raid.shared(), raid.as_member(slot)) else { return Err(libc::ENODEV) };
    let id = member.id;
    shared.publish(|layout| {
        layout.members[slot] = Some(member);
        layout.target = Some(id.slot);
        layout.boundary = 0;
    });
    let core = raid.app.core();
    if let Err(error) = apply_everywhere(core, &shared, None).await {
        tracing::error!(raid = shared.name, slot, %error, "a rebuild cannot start");
        take_back(raid, &shared, slot, None).await;
        return Err(error.errno());
    }
    let process = Rc::new(Process {
        id: next_number(),
        slot,
        member: id,
        offset: Cell::new(0),
        stop: Cell::new(None),
        ended: Cell::new(None),
        waiting: RefCell::default(),
        not_before: Cell::new(0),
    });
    *raid.process.borrow_mut() = Some(Rc::clone(&process));
    tracing::warn!(raid = shared.name, slot, "rebuild started");
    core.spawn(run(Rc::clone(raid), process));
    Ok(())
}

/// Takes the target out again, under the hold given.
async fn take_back(raid: &Rc<Raid>, shared: &Arc<Shared>, slot: usize, hold: Option<u64>) {
    let out = |layout: &mut super::shared::Layout| {
        layout.members[slot] = None;
        layout.target = None;
        layout.boundary = 0;
    };
    raid.release(shared, hold.unwrap_or(0), out).await;
    raid.unclaim(slot);
    raid.array.borrow_mut().lost();
}

async fn run(raid: Rc<Raid>, process: Rc<Process>) {
    let outcome = match raid.shared() {
        Some(shared) => copy_all(&raid, &shared, &process).await,
        None => Err(libc::ENODEV),
    };
    process.ended.set(Some(outcome));
    process.waiting.borrow_mut().clear();
    let finished = raid.job(async move |raid| {
        finish(&raid, &process).await;
        Ok(())
    });
    let _ = finished.await;
}

/// Ends a rebuild for the reason given; part of a job.
pub async fn stop(raid: &Rc<Raid>, process: &Rc<Process>, errno: i32) {
    process.stop.set(process.stop.get().or(Some(errno)));
    if process.ended.get().is_none() {
        let (sender, ended) = oneshot::channel();
        process.waiting.borrow_mut().push(sender);
        // Every step of the copying has a deadline, and each looks whether it is to go on.
        let _ = ended.await;
    }
    finish(raid, process).await;
}

/// What follows the copying; part of a job.
async fn finish(raid: &Rc<Raid>, process: &Rc<Process>) {
    let is_current = raid.process.borrow().as_ref().is_some_and(|p| Rc::ptr_eq(p, process));
    let (true, Some(shared), Some(ended)) = (is_current, raid.shared(), process.ended.get()) else { return };
    let mut outcome = process.stop.get().map_or(ended, Err);
    if outcome.is_ok() && process.offset.get() < shared.num_blocks() {
        process.ended.set(None);
        raid.app.core().spawn(run(Rc::clone(raid), Rc::clone(process)));
        return;
    }
    let (hold, _) = raid.hold(&shared, Held::Everything).await;
    if outcome.is_ok() {
        outcome = flush_target(raid, process).await;
    }
    let slot = process.slot;
    match outcome {
        Ok(()) => {
            raid.array.borrow_mut().book_rebuilt(slot);
            raid.record().await;
            let whole = |layout: &mut super::shared::Layout| {
                layout.target = None;
                layout.boundary = 0;
            };
            raid.release(&shared, hold, whole).await;
            tracing::warn!(raid = shared.name, slot, "rebuild finished");
        }
        Err(errno) => {
            take_back(raid, &shared, slot, Some(hold)).await;
            // No superblock lists it: nothing had to be recorded.
            raid.remember(process.member, Verdict::Out);
            tracing::error!(raid = shared.name, slot, errno, "rebuild ended before its time; the member is out");
        }
    }
    *raid.process.borrow_mut() = None;
    for entry in raid.later.take() {
        raid.app.core().spawn(examine::examine(raid.app.clone(), entry));
    }
}

async fn flush_target(raid: &Raid, process: &Process) -> Result<(), i32> {
    let Some(member) = raid.as_member(process.slot) else { return Err(libc::ENODEV) };
    let core = raid.app.core();
    let flushed = core.call_async(io::worker(core), move |core| {
        let core = core.clone();
        async move {
            let chan = member.entry.open(&core).map_err(|e| e.errno())?;
            let status = io::run(&core, &chan, IoOp::Flush, (0, 0), Bufs::new()).await;
            chan.close(&core);
            if status.is_success() { Ok(()) } else { Err(libc::EIO) }
        }
    });
    core.timeout(WINDOW_DEADLINE_NS, flushed).await.flatten().unwrap_or(Err(libc::EIO))
}

async fn copy_all(raid: &Rc<Raid>, shared: &Arc<Shared>, process: &Process) -> Result<(), i32> {
    let core = raid.app.core();
    let options = raid.app.module(Raids::default).options.get();
    let block_size = u64::from(shared.block_size);
    let window = (u64::from(options.process_window_size_kb) * 1024).div_ceil(block_size);
    let chunk = window.div_ceil(DEPTH).min((COPY_BYTES_MAX / block_size).max(1));
    let (id, shared_there, bytes) = (process.id, Arc::clone(shared), chunk * block_size);
    let opened = core.call(io::worker(core), move |core| Copier::open(core, id, &shared_there, bytes as usize));
    opened.await.unwrap_or(Err(libc::ENODEV))?;
    let mut outcome = Ok(());
    while outcome.is_ok() && process.offset.get() < shared.num_blocks() {
        pace(core, process, window * block_size, options.process_max_bandwidth_mb_sec).await;
        outcome = process.stop.get().map_or(Ok(()), Err);
        if outcome.is_ok() {
            outcome = copy_window(raid, shared, process, window, chunk).await;
        }
    }
    core.post(io::worker(core), move |core| Copier::close(core, id));
    outcome
}

/// Waits until the bandwidth allows the next window.
async fn pace(core: &Core, process: &Process, bytes: u64, mb_sec: u32) {
    if mb_sec == 0 {
        return;
    }
    while process.stop.get().is_none() {
        let left = process.not_before.get().saturating_sub(core.now());
        if left == 0 {
            break;
        }
        core.sleep(left.min(PACE_NS)).await;
    }
    let cost = u128::from(bytes) * u128::from(NANOS_PER_S) / (u128::from(mb_sec) << 20);
    process.not_before.set(core.now() + u64::try_from(cost).unwrap_or(NANOS_PER_S));
}

async fn copy_window(
    raid: &Rc<Raid>,
    shared: &Arc<Shared>,
    process: &Process,
    window: u64,
    chunk: u64,
) -> Result<(), i32> {
    let start = process.offset.get();
    let range = start..(start + window).min(shared.num_blocks());
    let (hold, held) = raid.hold(shared, Held::Range(range.clone())).await;
    let core = raid.app.core();
    let mut outcome = if held { process.stop.get().map_or(Ok(()), Err) } else { Err(libc::ETIMEDOUT) };
    if outcome.is_ok() {
        let (id, target, range) = (process.id, process.member, range.clone());
        let copied =
            core.call_async(io::worker(core), move |core| Copier::copy(core.clone(), id, target, range, chunk));
        outcome = core.timeout(WINDOW_DEADLINE_NS, copied).await.flatten().unwrap_or(Err(libc::ETIMEDOUT));
    }
    let end = range.end;
    let done = outcome.is_ok();
    raid.release(shared, hold, |layout| {
        if done {
            layout.boundary = end;
        }
    })
    .await;
    if done {
        process.offset.set(end);
    }
    outcome
}

/// What copies, on its core, with its buffers.
struct Copier {
    raid: Rc<CoreRaid>,
    buffers: Vec<BufSlice>,
    block_size: usize,
}

/// The copiers of one core, by rebuild.
#[derive(Default)]
struct Copiers(RefCell<HashMap<u64, Rc<Copier>>>);

impl Copier {
    fn open(core: &Core, id: u64, shared: &Arc<Shared>, bytes: usize) -> Result<(), i32> {
        let raid = CoreRaid::acquire(core, shared).map_err(|e| e.errno())?;
        let buffers = (0..DEPTH).map(|_| Buf::alloc_unpooled(bytes).into_slice()).collect();
        let copier = Rc::new(Self { raid, buffers, block_size: shared.block_size as usize });
        core.local(Copiers::default).0.borrow_mut().insert(id, copier);
        Ok(())
    }

    fn close(core: &Core, id: u64) {
        if let Some(copier) = core.local(Copiers::default).0.borrow_mut().remove(&id) {
            copier.raid.release(core);
        }
    }

    async fn copy(core: Core, id: u64, target: MemberId, range: Range<u64>, chunk: u64) -> Result<(), i32> {
        let copier = core.local(Copiers::default).0.borrow().get(&id).cloned().ok_or(libc::ENODEV)?;
        let mut start = range.start;
        while start < range.end {
            let end = (start + DEPTH * chunk).min(range.end);
            let starts = (start..end).step_by(usize::try_from(chunk).map_err(|_| libc::EINVAL)?);
            let copies = starts.zip(&copier.buffers).map(|(lba, buffer)| {
                let blocks = chunk.min(end - lba);
                let buffer = buffer.slice(..blocks as usize * copier.block_size);
                copy_blocks(&core, &copier.raid, target, (lba, blocks), buffer)
            });
            let statuses = futures::future::join_all(copies).await;
            if !statuses.iter().all(|status| status.is_success()) {
                return Err(libc::EIO);
            }
            start = end;
        }
        Ok(())
    }
}

/// Reads from any whole member but `to`, and writes to `to`.
async fn copy_blocks(
    core: &Core,
    raid: &Rc<CoreRaid>,
    to: MemberId,
    (lba, blocks): (u64, u64),
    buffer: BufSlice,
) -> IoStatus {
    let (sink, done) = Once::new();
    let bufs: Bufs = smallvec::smallvec![buffer];
    raid.read_internally(core, Io::new(IoOp::Read, lba, blocks, bufs.clone(), sink, 0), Some(to));
    let read = done.await.unwrap_or(nvme_wire::Status::INTERNAL_ERROR);
    if !read.is_success() {
        return read;
    }
    let (sink, done) = Once::new();
    let io = Io::new(IoOp::Write { fua: false }, lba, blocks, bufs, sink, 0);
    if raid.write_internally(core, to, io).is_none() {
        return nvme_wire::Status::INTERNAL_PATH_ERROR;
    }
    done.await.unwrap_or(nvme_wire::Status::INTERNAL_ERROR)
}

/// Writes blocks that `member` could not read back to it, from another member; a member that does not take them fails.
///
/// The range is held meanwhile: a host that writes the same blocks must not have its data replaced by what was read
/// before.
pub async fn correct(raid: &Rc<Raid>, member: MemberId, lba: u64, blocks: u64) {
    let Some(shared) = raid.shared() else { return };
    let (hold, held) = raid.hold(&shared, Held::Range(lba..lba + blocks)).await;
    let mut outcome = None;
    if held {
        let (core, shared_there) = (raid.app.core(), Arc::clone(&shared));
        let corrected = core.call_async(io::worker(core), move |core| {
            let core = core.clone();
            async move { correct_here(&core, &shared_there, member, lba, blocks).await }
        });
        outcome = core.timeout(WINDOW_DEADLINE_NS, corrected).await.flatten();
    }
    raid.release(&shared, hold, |_| {}).await;
    match outcome {
        Some(status) if status.is_success() => {
            tracing::warn!(raid = shared.name, slot = member.slot, lba, blocks, "unreadable blocks were written anew");
        }
        Some(_) => raid.fail(member),
        None => tracing::error!(raid = shared.name, slot = member.slot, lba, blocks, "blocks could not be corrected"),
    }
}

async fn correct_here(core: &Core, shared: &Arc<Shared>, member: MemberId, lba: u64, blocks: u64) -> IoStatus {
    let Ok(raid) = CoreRaid::acquire(core, shared) else { return nvme_wire::Status::INTERNAL_ERROR };
    let buffer = Buf::alloc_unpooled((blocks * u64::from(shared.block_size)) as usize).into_slice();
    let status = copy_blocks(core, &raid, member, (lba, blocks), buffer).await;
    raid.release(core);
    status
}
