//! Keeps a queue depth of I/O running on one core, for any [`Workload`], and measures it.
//!
//! *Flow.* ask the workload for I/O until every slot is taken → [`Workload::flush`] → submit → … → [`Workload::done`],
//! then ask again, once per turn of the loop, so that what ends together is refilled together.
//!
//! *Measures.* Latency runs from the first submission to the final end, retries and reconnects included. A *pause* is a
//! time of at least [`PAUSE_MIN_NS`] during which I/O was outstanding and none ended.
//!
//! *When things fail.* An I/O error is the workload's to judge and is counted here; above `max_errors`, or when the
//! workload cannot go on, nothing new is issued and the report says why.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use addax_engine::nvme::host::HostError;
use addax_engine::reactor::Core;
use addax_engine::reactor::driver::{NANOS_PER_MS, Nanos};
use addax_engine::reactor::net::KernelNet;
use addax_hugepages::{Buf, BufSlice};
use futures::channel::oneshot;
use hdrhistogram::Histogram;
use serde::Serialize;

use crate::pace::Pace;
use crate::session::{IoError, IoSink, Session, SessionIo, SessionParams, SessionStats};

/// Shortest time without completions that is listed as a pause.
pub const PAUSE_MIN_NS: Nanos = 100 * NANOS_PER_MS;
/// Most pauses that are kept.
const PAUSES_MAX: usize = 10_000;
/// Most errors that are described.
const ERROR_SAMPLES: usize = 16;
/// When to ask a workload again that had nothing to do although nothing was outstanding.
const ASK_AGAIN_NS: Nanos = NANOS_PER_MS;
/// Longest time between two looks at what else there is to do.
const ASK_AT_LEAST_NS: Nanos = 100 * NANOS_PER_MS;

/// An I/O that a workload wants done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    pub write: bool,
    /// Byte offset on the namespace; whole blocks.
    pub offset: u64,
    pub bytes: u32,
}

/// What a workload wants next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    Io(Request),
    /// Nothing until some I/O has ended.
    Wait,
    /// Nothing any more.
    Done,
}

/// What to do, apart from doing it.
pub trait Workload: Send + 'static {
    /// Data that every buffer starts with.
    fn prepare(&mut self, buffer: &mut [u8]);
    /// The next I/O for `slot`; the data of a write goes into `buffer`. `elapsed` is the time since the start.
    fn next(&mut self, slot: usize, buffer: &mut [u8], elapsed: Nanos) -> Next;
    /// Called after a batch of [`Self::next`], before any of it is sent.
    ///
    /// # Errors
    /// Why nothing of the batch may be sent.
    fn flush(&mut self) -> Result<(), String>;
    /// The I/O of `slot` has ended; the data of a read is in `buffer`.
    fn done(&mut self, slot: usize, request: &Request, buffer: &[u8], result: Result<(), &IoError>);
    /// How much is done, from 0 to 1.
    fn progress(&self, elapsed: Nanos) -> f64;
    /// Whether [`Self::done`] needs the data of reads.
    fn wants_data(&self) -> bool;
}

/// Counters that other threads look at while a worker runs.
#[derive(Debug, Default)]
pub struct Live {
    pub read_ios: AtomicU64,
    pub read_bytes: AtomicU64,
    pub write_ios: AtomicU64,
    pub write_bytes: AtomicU64,
    pub errors: AtomicU64,
    /// Progress in millionths.
    pub progress_ppm: AtomicU64,
    /// The connection is down.
    pub down: AtomicBool,
    /// Set from outside to end early.
    pub stop: AtomicBool,
}

/// How a worker is to work.
#[derive(Debug, Clone)]
pub struct WorkerParams {
    pub session: SessionParams,
    /// I/Os in flight in all.
    pub depth: usize,
    /// Bytes of the largest I/O.
    pub io_bytes: usize,
    /// Errors after which nothing new is issued; 0 for no limit.
    pub max_errors: u64,
    /// When it may issue.
    pub pace: Pace,
    pub live: Arc<Live>,
}

/// A time without completions, in nanoseconds since the start of the worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Pause {
    pub start_ns: Nanos,
    pub length_ns: Nanos,
}

/// One direction's measures.
#[derive(Debug, Clone)]
pub struct Measures {
    pub bytes: u64,
    /// Latencies in nanoseconds, one for each I/O that succeeded.
    pub latency: Histogram<u64>,
}

impl Default for Measures {
    fn default() -> Self {
        Self { bytes: 0, latency: histogram() }
    }
}

/// 1 ns to an hour at three digits; values beyond are counted as the largest.
fn histogram() -> Histogram<u64> {
    let made = Histogram::new_with_bounds(1, 3_600_000_000_000, 3);
    // The bounds are constants that the constructor accepts.
    made.unwrap_or_else(|error| unreachable!("histogram bounds: {error}"))
}

/// What a worker has measured.
#[derive(Debug, Clone, Default)]
pub struct WorkerReport {
    pub read: Measures,
    pub write: Measures,
    pub elapsed_ns: Nanos,
    pub errors: u64,
    pub error_samples: Vec<String>,
    pub pauses: Vec<Pause>,
    pub session: SessionStats,
    /// I/O queues that were connected at the start.
    pub queues: usize,
    /// Why it ended early, if it did.
    pub aborted: Option<String>,
}

/// Finds pauses from submissions and completions; the last of either is enough to know.
#[derive(Debug, Default)]
pub struct PauseFinder {
    outstanding: u64,
    quiet_since: Nanos,
    pauses: Vec<Pause>,
}

impl PauseFinder {
    /// I/O was issued.
    pub fn issued(&mut self, now: Nanos) {
        if self.outstanding == 0 {
            self.quiet_since = now;
        }
        self.outstanding += 1;
    }

    /// I/O has ended.
    pub fn ended(&mut self, now: Nanos) {
        let length_ns = now.saturating_sub(self.quiet_since);
        if length_ns >= PAUSE_MIN_NS && self.pauses.len() < PAUSES_MAX {
            self.pauses.push(Pause { start_ns: self.quiet_since, length_ns });
        }
        self.quiet_since = now;
        self.outstanding = self.outstanding.saturating_sub(1);
    }

    /// What was found.
    #[must_use]
    pub fn pauses(&self) -> &[Pause] {
        &self.pauses
    }
}

struct Slot {
    buffer: Buf,
    request: Option<(Request, Nanos)>,
}

struct Inner<W> {
    workload: W,
    slots: Vec<Slot>,
    free: Vec<usize>,
    report: WorkerReport,
    pauses: PauseFinder,
    pace: Pace,
    /// Nothing new is issued.
    ending: bool,
}

/// A worker; see the module.
struct Worker<W> {
    session: Rc<Session>,
    params: WorkerParams,
    block_size: u64,
    began: Nanos,
    inner: RefCell<Inner<W>>,
    issue_queued: Cell<bool>,
    /// A timer for the next turn of its pace runs.
    waits: Cell<bool>,
    finished: RefCell<Option<oneshot::Sender<()>>>,
}

/// Runs a workload on this core to its end. `check` sees the session before the first I/O, and may refuse it.
///
/// # Errors
/// When the first connect fails, or what `check` says. The workload is given back in any case.
pub async fn run<W: Workload>(
    core: Core,
    params: WorkerParams,
    workload: W,
    check: impl FnOnce(&Session) -> Result<(), String>,
) -> (Result<WorkerReport, String>, W) {
    let opened = Session::open(&core, Rc::new(KernelNet), params.session.clone()).await;
    let session = match opened {
        Ok(session) => session,
        Err(error) => return (Err(describe(&params, &error)), workload),
    };
    if let Err(error) = check(&session) {
        session.close().await;
        return (Err(error), workload);
    }
    let (sender, finished) = oneshot::channel();
    let worker = Worker::new(&core, session, params, workload, sender);
    worker.session.set_sink(Rc::clone(&worker) as Rc<dyn IoSink>);
    worker.queue_issue(&core);
    let _ = finished.await;
    worker.session.close().await;
    let began = worker.began;
    // Deferred work of this turn may still hold the worker.
    let mut worker = worker;
    let inner = loop {
        match Rc::try_unwrap(worker) {
            Ok(worker) => break worker.inner.into_inner(),
            Err(shared) => worker = shared,
        }
        core.sleep(ASK_AGAIN_NS).await;
    };
    let _ = began;
    (Ok(inner.report), inner.workload)
}

fn describe(params: &WorkerParams, error: &HostError) -> String {
    let controller = &params.session.controller;
    format!("connect to {} at {} as {}: {error}", controller.subnqn, controller.address, controller.hostnqn)
}

impl<W: Workload> Worker<W> {
    fn new(
        core: &Core,
        session: Rc<Session>,
        params: WorkerParams,
        mut workload: W,
        finished: oneshot::Sender<()>,
    ) -> Rc<Self> {
        let slots = (0..params.depth).map(|_| {
            let mut buffer = Buf::alloc_unpooled(params.io_bytes);
            if let Some(bytes) = buffer.get_mut() {
                workload.prepare(bytes);
            }
            Slot { buffer, request: None }
        });
        let slots: Vec<_> = slots.collect();
        let report = WorkerReport { queues: session.queues(), ..WorkerReport::default() };
        let inner = Inner {
            workload,
            free: (0..slots.len()).rev().collect(),
            slots,
            report,
            pauses: PauseFinder::default(),
            pace: params.pace,
            ending: false,
        };
        Rc::new(Self {
            block_size: u64::from(session.namespace().limits.block_size),
            session,
            params,
            began: core.now(),
            inner: RefCell::new(inner),
            issue_queued: Cell::new(false),
            waits: Cell::new(false),
            finished: RefCell::new(Some(finished)),
        })
    }

    fn elapsed(&self, core: &Core) -> Nanos {
        core.now().saturating_sub(self.began)
    }

    fn queue_issue(self: &Rc<Self>, core: &Core) {
        if !self.issue_queued.replace(true) {
            let worker = Rc::clone(self);
            core.defer(move |core| {
                worker.issue_queued.set(false);
                worker.issue(core);
            });
        }
    }

    /// Issues again after a time, unless that is to happen already.
    fn issue_after(self: &Rc<Self>, core: &Core, time: Nanos) {
        if !self.waits.replace(true) {
            let worker = Rc::clone(self);
            core.after(
                time,
                Rc::new(move |core| {
                    worker.waits.set(false);
                    worker.queue_issue(core);
                }),
            );
        }
    }

    /// Fills the free slots; ends when there is nothing more to do.
    fn issue(self: &Rc<Self>, core: &Core) {
        let elapsed = self.elapsed(core);
        let live = &self.params.live;
        let mut inner = self.inner.borrow_mut();
        inner.ending |= live.stop.load(Ordering::Relaxed);
        let (batch, turn) = inner.choose(elapsed);
        let flushed = inner.workload.flush();
        match flushed {
            Ok(()) => self.submit(&mut inner, &batch, elapsed),
            Err(error) => {
                inner.abort(error);
                inner.take_back(&batch);
            }
        }
        live.progress_ppm.store((inner.workload.progress(elapsed) * 1e6) as u64, Ordering::Relaxed);
        live.down.store(!self.session.is_up(), Ordering::Relaxed);
        if let Some(turn) = turn {
            // An end from outside is looked for now and then.
            self.issue_after(core, turn.min(ASK_AT_LEAST_NS));
        }
        if inner.free.len() < inner.slots.len() {
            return;
        }
        if inner.ending {
            inner.report.elapsed_ns = elapsed;
            inner.report.session = self.session.stats();
            inner.report.pauses = inner.pauses.pauses().to_vec();
            drop(self.finished.borrow_mut().take());
        } else if turn.is_none() {
            self.issue_after(core, ASK_AGAIN_NS);
        }
    }

    fn submit(&self, inner: &mut Inner<W>, batch: &[usize], elapsed: Nanos) {
        for slot in batch {
            let Some((request, _)) = inner.slots[*slot].request else { continue };
            inner.pauses.issued(elapsed);
            let buf: BufSlice = inner.slots[*slot].buffer.slice(..request.bytes as usize);
            self.session.submit(SessionIo {
                write: request.write,
                lba: request.offset / self.block_size,
                blocks: (u64::from(request.bytes) / self.block_size) as u32,
                buf,
                tag: *slot as u64,
            });
        }
    }

    fn book(&self, inner: &mut Inner<W>, request: &Request, latency_ns: Nanos, result: &Result<(), IoError>) {
        let live = &self.params.live;
        if let Err(error) = result {
            let kind = if request.write { "write" } else { "read" };
            inner.report.errors += 1;
            live.errors.fetch_add(1, Ordering::Relaxed);
            if inner.report.error_samples.len() < ERROR_SAMPLES {
                let Request { offset, bytes, .. } = request;
                inner.report.error_samples.push(format!("{kind} of {bytes} bytes at byte {offset}: {error}"));
            }
            if self.params.max_errors > 0 && inner.report.errors >= self.params.max_errors {
                inner.abort(format!("{} I/O errors", inner.report.errors));
            }
            return;
        }
        let (measures, ios, bytes) = if request.write {
            (&mut inner.report.write, &live.write_ios, &live.write_bytes)
        } else {
            (&mut inner.report.read, &live.read_ios, &live.read_bytes)
        };
        measures.bytes += u64::from(request.bytes);
        measures.latency.saturating_record(latency_ns.max(1));
        ios.fetch_add(1, Ordering::Relaxed);
        bytes.fetch_add(u64::from(request.bytes), Ordering::Relaxed);
    }
}

impl<W: Workload> IoSink for Worker<W> {
    fn io_done(self: Rc<Self>, core: &Core, tag: u64, result: Result<(), IoError>) {
        let now = self.elapsed(core);
        let slot = tag as usize;
        let mut guard = self.inner.borrow_mut();
        let inner = &mut *guard;
        let Some((request, since)) = inner.slots.get_mut(slot).and_then(|s| s.request.take()) else { return };
        inner.pauses.ended(now);
        self.book(inner, &request, now.saturating_sub(since), &result);
        let bytes = request.bytes as usize;
        let outcome = result.as_ref().copied();
        if request.write || !inner.workload.wants_data() {
            inner.workload.done(slot, &request, &[], outcome);
        } else if let Some(data) = inner.slots[slot].buffer.get_mut() {
            inner.workload.done(slot, &request, &data[..bytes], outcome);
        } else {
            // Somebody still holds the buffer: judge a copy, and use a buffer of our own from now on.
            let copy = inner.slots[slot].buffer.to_vec();
            inner.slots[slot].buffer = Buf::alloc_unpooled(self.params.io_bytes);
            inner.workload.done(slot, &request, &copy[..bytes], outcome);
        }
        inner.free.push(slot);
        drop(guard);
        self.queue_issue(core);
    }
}

impl<W: Workload> Inner<W> {
    fn abort(&mut self, why: String) {
        self.ending = true;
        self.report.aborted.get_or_insert(why);
    }

    /// Asks for I/O while there are free slots and turns; the slots taken, and the time to the next turn if that is what
    /// is missing.
    fn choose(&mut self, elapsed: Nanos) -> (Vec<usize>, Option<Nanos>) {
        let mut batch = Vec::new();
        while !self.ending {
            let Some(slot) = self.free.last().copied() else { break };
            if !self.slots[slot].buffer.is_unique() {
                self.slots[slot].buffer = Buf::alloc_unpooled(self.slots[slot].buffer.len());
            }
            let Some(bytes) = self.slots[slot].buffer.get_mut() else { break };
            let before = self.pace;
            if let Err(turn) = self.pace.take(elapsed) {
                return (batch, Some(turn));
            }
            match self.workload.next(slot, bytes, elapsed) {
                Next::Io(request) => {
                    self.slots[slot].request = Some((request, elapsed));
                    self.free.pop();
                    batch.push(slot);
                }
                Next::Wait => {
                    self.pace = before;
                    break;
                }
                Next::Done => self.ending = true,
            }
        }
        (batch, None)
    }

    /// Undoes [`Self::choose`] for what must not be sent.
    fn take_back(&mut self, batch: &[usize]) {
        for slot in batch {
            self.slots[*slot].request = None;
            self.free.push(*slot);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Nanos = NANOS_PER_MS;

    #[test]
    fn a_pause_is_time_without_completions_while_something_is_outstanding() {
        let mut finder = PauseFinder::default();
        finder.issued(0);
        finder.issued(10 * MS);
        finder.ended(20 * MS);
        finder.ended(150 * MS);
        // Idle time is no pause.
        finder.issued(900 * MS);
        finder.ended(950 * MS);
        assert_eq!(finder.pauses(), [Pause { start_ns: 20 * MS, length_ns: 130 * MS }]);
    }

    #[test]
    fn quick_completions_are_no_pause() {
        let mut finder = PauseFinder::default();
        for step in 0..100 {
            finder.issued(step * 10 * MS);
            finder.ended((step * 10 + 9) * MS);
        }
        assert_eq!(finder.pauses(), []);
    }

    #[test]
    fn latencies_beyond_the_range_are_kept_as_the_largest() {
        let mut measures = Measures::default();
        measures.latency.saturating_record(u64::MAX);
        assert_eq!(measures.latency.len(), 1);
    }
}
