//! Reactors: one thread per core, each the only owner of its connections, channels and requests.
//!
//! *What it is.* A [`Reactor`] is a loop over one [`Driver`]: events of disks and sockets, mail from other cores,
//! timers, local tasks, and completions of I/O. Code that runs on a core gets a [`Core`], the handle to all of it.
//! Core 0 is the *control core*: it owns the registry of devices, the targets' configuration, admin queues and the RPC
//! socket, and never carries I/O queues; so RPC does not wait behind I/O. The others are data cores.
//!
//! *Flow.* [`Reactor::turn`] = poll driver → deliver events → hot sockets → mail → timers → tasks → completions →
//! flushes, until nothing is left; then spin for as long as [`idle`] finds worth it, then park in the driver. Every
//! wake-up of a parked core, whether from a socket, a disk, a timer or a message, comes through the driver.
//!
//! *Hot sockets.* A socket that carries traffic is asked directly in each turn ([`OnReady::poll`]): a receive that finds
//! nothing costs less than the readiness event that it makes superfluous. A socket that stays silent while others keep
//! the core busy, and every socket before the core parks, is handed back to the driver.
//!
//! *Invariants.* No locks on the I/O path; nothing here blocks but [`Driver::park`]. Completions are delivered from the
//! loop, never from inside a submit, so a device may complete at once without re-entering its submitter.
//!
//! *When things fail.* A panic on a core ends the process: half a data plane is worse than a restarted one.

mod courtesy;
pub mod disk;
pub mod driver;
mod exec;
mod hot;
pub mod idle;
pub mod mail;
pub mod net;
pub mod timer;
pub mod uring;

use std::any::{Any, TypeId};
use std::cell::{Cell, RefCell};
use std::collections::{HashMap, VecDeque};
use std::future::Future;
use std::os::fd::RawFd;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use addax_hugepages::BufPool;
use slab::Slab;

use crate::bdev::{Io, IoSink, IoStatus};
use courtesy::Courtesy;
use disk::DiskOp;
use driver::{Driver, Event, Nanos};
use exec::LocalTasks;
use hot::HotList;
use idle::{Idle, Policy};
use mail::{MailSlot, Mailbox};
use timer::{TimerFn, TimerId, Timers};

/// Index of a reactor; 0 is the control core.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CoreId(pub u32);

/// The control core.
pub const CONTROL: CoreId = CoreId(0);

/// What [`OnReady::poll`] found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Polled {
    Worked,
    Nothing,
    /// Nothing is wanted from the socket until [`Core::poll_again`].
    Paused,
}

/// Told when a watched socket can be read or written.
pub trait OnReady {
    /// There is something to read, or the peer has ended the stream.
    fn readable(self: Rc<Self>, core: &Core);
    /// An earlier [`Core::want_write`] has come true.
    fn writable(self: Rc<Self>, core: &Core);
    /// Receives once, if the socket was watched by [`Core::watch_hot`].
    fn poll(self: Rc<Self>, core: &Core) -> Polled {
        self.readable(core);
        Polled::Worked
    }
    /// The turn ends: [`Core::queue_flush`] asked for this call.
    fn turn_ends(self: Rc<Self>, _core: &Core) {}
}

/// Told when a disk operation has ended.
pub trait OnDisk {
    /// `result` is 0 or a negative errno; transfers are always whole.
    fn disk_done(self: Rc<Self>, core: &Core, tag: u64, result: i32);
}

/// Names a watched socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct WatchId(u64);

/// How a core has spent its time, in nanoseconds since its start; readable from any thread.
#[derive(Debug, Default)]
pub struct CoreStats {
    /// Turns that did work.
    pub busy_ns: AtomicU64,
    /// Turns that found nothing.
    pub spin_ns: AtomicU64,
    /// Sleep.
    pub parked_ns: AtomicU64,
    /// Thread id of the core's thread.
    pub tid: AtomicU64,
}

/// What other threads know of a core.
#[derive(Debug, Clone)]
pub struct Peer {
    pub id: CoreId,
    pub mail: Mailbox,
    pub stats: Arc<CoreStats>,
    /// The processor the thread is pinned to, if it is.
    pub cpu: Option<u32>,
}

struct Watch {
    fd: RawFd,
    generation: u32,
    handler: Rc<dyn OnReady>,
    /// Asked in each turn while there is traffic, see [`OnReady::poll`].
    polled: bool,
}

struct PendingDisk {
    op: Box<DiskOp>,
    sink: Rc<dyn OnDisk>,
    tag: u64,
}

/// Whether completions are being delivered, and the time at which somebody first asked for it.
#[derive(Debug, Clone, Copy)]
enum Delivery {
    None,
    Began,
    Timed(Nanos),
}

struct CoreInner {
    id: CoreId,
    driver: RefCell<Box<dyn Driver>>,
    now: Cell<Nanos>,
    peers: RefCell<Arc<Vec<Peer>>>,
    pool: BufPool,
    watches: RefCell<Slab<Watch>>,
    generation: Cell<u32>,
    disks: RefCell<Slab<PendingDisk>>,
    timers: RefCell<Timers>,
    tasks: LocalTasks,
    hot: HotList,
    done: RefCell<VecDeque<Done>>,
    flushes: RefCell<Vec<Rc<dyn OnReady>>>,
    deferred: RefCell<VecDeque<Box<dyn FnOnce(&Core)>>>,
    locals: RefCell<HashMap<TypeId, Rc<dyn Any>>>,
    /// See [`Core::completion_clock`].
    delivery: Cell<Delivery>,
    stop: Cell<bool>,
}

/// An I/O that has ended and whose submitter is to be told.
struct Done {
    sink: Rc<dyn IoSink>,
    tag: u64,
    status: IoStatus,
}

/// Handle to the reactor of the current thread.
#[derive(Clone)]
pub struct Core(Rc<CoreInner>);

impl std::fmt::Debug for Core {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Core").field(&self.0.id).finish()
    }
}

impl Core {
    /// Which core this is.
    #[must_use]
    pub fn id(&self) -> CoreId {
        self.0.id
    }

    /// The time at the start of this turn of the loop.
    #[must_use]
    pub fn now(&self) -> Nanos {
        self.0.now.get()
    }

    /// The time now, read from the machine: for what must not take a moment before a pause for the present.
    #[must_use]
    pub fn clock(&self) -> Nanos {
        self.0.driver.borrow().now()
    }

    /// The time at which the core began to deliver the present completions, read from the machine at the first question:
    /// as good as [`Self::clock`] for what is answered when all of them are delivered, at a fraction of its cost.
    #[must_use]
    pub fn completion_clock(&self) -> Nanos {
        match self.0.delivery.get() {
            Delivery::None => self.clock(),
            Delivery::Began => {
                let read = self.clock();
                self.0.delivery.set(Delivery::Timed(read));
                read
            }
            Delivery::Timed(read) => read,
        }
    }

    /// The pool of I/O buffers.
    #[must_use]
    pub fn pool(&self) -> &BufPool {
        &self.0.pool
    }

    /// All cores, this one included, by [`CoreId`].
    #[must_use]
    pub fn peers(&self) -> Arc<Vec<Peer>> {
        Arc::clone(&self.0.peers.borrow())
    }

    /// The data cores (every core but the control core; the control core itself when there is no other).
    #[must_use]
    pub fn data_cores(&self) -> Vec<CoreId> {
        let peers = self.0.peers.borrow();
        let data: Vec<_> = peers.iter().map(|p| p.id).filter(|id| *id != CONTROL).collect();
        if data.is_empty() { vec![CONTROL] } else { data }
    }

    /// Runs `message` on another core (or on this one, from its loop).
    pub fn post(&self, to: CoreId, message: impl FnOnce(&Core) + Send + 'static) {
        let peers = self.peers();
        if let Some(peer) = peers.get(to.0 as usize) {
            peer.mail.post(message);
        }
    }

    /// Runs `work` on another core and gives its answer back here; `None` when that core has stopped.
    pub fn call<T: Send + 'static>(
        &self,
        to: CoreId,
        work: impl FnOnce(&Core) -> T + Send + 'static,
    ) -> impl Future<Output = Option<T>> + 'static {
        let (sender, receiver) = futures::channel::oneshot::channel();
        self.post(to, move |core| {
            let _ = sender.send(work(core));
        });
        async move { receiver.await.ok() }
    }

    /// Runs a future made by `work` on another core and gives its output back here.
    pub fn call_async<T, F>(
        &self,
        to: CoreId,
        work: impl FnOnce(&Core) -> F + Send + 'static,
    ) -> impl Future<Output = Option<T>> + 'static
    where
        T: Send + 'static,
        F: Future<Output = T> + 'static,
    {
        let (sender, receiver) = futures::channel::oneshot::channel();
        self.post(to, move |core| {
            let future = work(core);
            core.spawn(async move {
                let _ = sender.send(future.await);
            });
        });
        async move { receiver.await.ok() }
    }

    /// Runs a control task on this core.
    pub fn spawn(&self, future: impl Future<Output = ()> + 'static) {
        self.0.tasks.spawn(future);
    }

    /// Runs `work` from the loop, later in this turn.
    pub fn defer(&self, work: impl FnOnce(&Core) + 'static) {
        self.0.deferred.borrow_mut().push_back(Box::new(work));
    }

    /// Resolves after `delay_ns`; dropped before that, it leaves no timer behind.
    pub fn sleep(&self, delay_ns: Nanos) -> Sleep {
        let (sender, done) = futures::channel::oneshot::channel::<()>();
        let sender = RefCell::new(Some(sender));
        let timer = self.after(delay_ns, Rc::new(move |_| drop(sender.borrow_mut().take())));
        Sleep { core: self.clone(), timer, done }
    }

    /// The future's output, or `None` when `limit_ns` passes first (the future is then dropped).
    pub async fn timeout<T>(&self, limit_ns: Nanos, future: impl Future<Output = T>) -> Option<T> {
        let sleep = std::pin::pin!(self.sleep(limit_ns));
        let future = std::pin::pin!(future);
        match futures::future::select(future, sleep).await {
            futures::future::Either::Left((value, _)) => Some(value),
            futures::future::Either::Right(_) => None,
        }
    }

    /// Calls `call` once, `delay_ns` from now.
    pub fn after(&self, delay_ns: Nanos, call: TimerFn) -> TimerId {
        self.0.timers.borrow_mut().add(self.0.now.get() + delay_ns, call)
    }

    /// Forgets a timer; harmless when it has already run.
    pub fn cancel(&self, timer: TimerId) {
        self.0.timers.borrow_mut().cancel(timer);
    }

    /// Starts a disk operation; `sink` is told of its end once, from the loop.
    pub fn submit_disk(&self, op: DiskOp, sink: Rc<dyn OnDisk>, tag: u64) {
        let mut disks = self.0.disks.borrow_mut();
        let entry = disks.vacant_entry();
        let key = entry.key();
        let pending = entry.insert(PendingDisk { op: Box::new(op), sink, tag });
        self.0.driver.borrow_mut().submit_disk(&mut pending.op, key as u64);
    }

    /// Watches a socket for reading.
    pub fn watch(&self, fd: RawFd, handler: Rc<dyn OnReady>) -> WatchId {
        let token = self.add_watch(fd, handler, false);
        self.0.driver.borrow_mut().watch(fd, token);
        WatchId(token)
    }

    /// Watches a socket that carries I/O: while it does, [`OnReady::poll`] is called in each turn instead of
    /// [`OnReady::readable`] for each event.
    pub fn watch_hot(&self, fd: RawFd, handler: Rc<dyn OnReady>) -> WatchId {
        let token = self.add_watch(fd, Rc::clone(&handler), true);
        self.0.hot.add(token, fd, handler);
        WatchId(token)
    }

    /// Ends the pause of a socket that has answered [`Polled::Paused`].
    pub fn poll_again(&self, watch: WatchId) {
        let found = self.with_watch(watch.0, |w| (w.fd, Rc::clone(&w.handler)));
        if let Some((fd, handler)) = found {
            self.0.hot.add(watch.0, fd, handler);
        }
    }

    fn add_watch(&self, fd: RawFd, handler: Rc<dyn OnReady>, polled: bool) -> u64 {
        let generation = self.0.generation.get().wrapping_add(1) & 0x00ff_ffff;
        self.0.generation.set(generation);
        let key = self.0.watches.borrow_mut().insert(Watch { fd, generation, handler, polled });
        u64::from(generation) << 32 | key as u64
    }

    /// Asks for one `writable` call.
    pub fn want_write(&self, watch: WatchId) {
        if let Some(fd) = self.with_watch(watch.0, |w| w.fd) {
            self.0.driver.borrow_mut().want_write(fd, watch.0);
        }
    }

    /// Ends a watch; its handler is not called again.
    pub fn unwatch(&self, watch: WatchId) {
        if let Some(fd) = self.with_watch(watch.0, |w| w.fd) {
            let watch_slot = self.0.watches.borrow_mut().remove((watch.0 & 0xffff_ffff) as usize);
            self.0.hot.remove(watch.0);
            self.0.driver.borrow_mut().unwatch(fd, watch.0);
            drop(watch_slot);
        }
    }

    fn with_watch<T>(&self, token: u64, f: impl FnOnce(&Watch) -> T) -> Option<T> {
        let watches = self.0.watches.borrow();
        let watch = watches.get((token & 0xffff_ffff) as usize)?;
        (u64::from(watch.generation) == token >> 32).then(|| f(watch))
    }

    /// Ends an I/O: its submitter is told from the loop.
    pub fn complete(&self, io: Io, status: IoStatus) {
        let (sink, tag) = io.finish(self.now(), status);
        self.0.done.borrow_mut().push_back(Done { sink, tag, status });
    }

    /// Calls [`OnReady::turn_ends`] at the end of this turn; the caller sees to it that it asks once.
    pub fn queue_flush(&self, socket: Rc<dyn OnReady>) {
        self.0.flushes.borrow_mut().push(socket);
    }

    /// This core's instance of `T`, made by `make` at the first call.
    pub fn local<T: 'static>(&self, make: impl FnOnce() -> T) -> Rc<T> {
        let key = TypeId::of::<T>();
        if let Some(found) = self.0.locals.borrow().get(&key).cloned().and_then(|any| any.downcast::<T>().ok()) {
            return found;
        }
        let made: Rc<T> = Rc::new(make());
        self.0.locals.borrow_mut().insert(key, Rc::clone(&made) as Rc<dyn Any>);
        made
    }

    /// Ends this core's loop after the present turn.
    pub fn stop(&self) {
        self.0.stop.set(true);
    }
}

/// See [`Core::sleep`].
#[derive(Debug)]
pub struct Sleep {
    core: Core,
    timer: TimerId,
    done: futures::channel::oneshot::Receiver<()>,
}

impl Future for Sleep {
    type Output = ();

    fn poll(mut self: std::pin::Pin<&mut Self>, context: &mut std::task::Context<'_>) -> std::task::Poll<()> {
        std::pin::Pin::new(&mut self.done).poll(context).map(|_| ())
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        self.core.cancel(self.timer);
    }
}

/// The loop of one core.
pub struct Reactor {
    core: Core,
    mail: MailSlot,
    idle: Idle,
    stats: Arc<CoreStats>,
    events: Vec<Event>,
    /// Emptied and put back by each turn, so that its room is kept.
    flushing: Vec<Rc<dyn OnReady>>,
    /// Turns without work since the clock was read.
    stale_turns: u32,
}

impl std::fmt::Debug for Reactor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Reactor").field("core", &self.core).finish()
    }
}

/// Most events, messages or completions of one kind handled before the loop looks at the others.
const BATCH: usize = 256;
/// Turns without work that share one reading of the clock: reading it costs as much as the rest of such a turn.
const STALE_TURNS: u32 = 8;

impl Reactor {
    /// Makes a core on the current thread.
    #[must_use]
    pub fn new(id: CoreId, driver: Box<dyn Driver>, pool: BufPool, policy: Policy) -> (Self, Peer) {
        let (mail, slot) = mail::mailbox(driver.waker());
        let stats = Arc::new(CoreStats::default());
        let now = driver.now();
        let inner = Rc::new(CoreInner {
            id,
            now: Cell::new(now),
            driver: RefCell::new(driver),
            peers: RefCell::new(Arc::new(Vec::new())),
            pool,
            watches: RefCell::new(Slab::new()),
            generation: Cell::new(0),
            disks: RefCell::new(Slab::new()),
            timers: RefCell::new(Timers::default()),
            tasks: LocalTasks::new(mail.clone()),
            hot: HotList::default(),
            done: RefCell::new(VecDeque::new()),
            flushes: RefCell::new(Vec::new()),
            deferred: RefCell::new(VecDeque::new()),
            locals: RefCell::new(HashMap::new()),
            delivery: Cell::new(Delivery::None),
            stop: Cell::new(false),
        });
        let peer = Peer { id, mail, stats: Arc::clone(&stats), cpu: None };
        let reactor = Self {
            core: Core(inner),
            mail: slot,
            idle: Idle::new(policy, now),
            stats,
            events: Vec::new(),
            flushing: Vec::new(),
            stale_turns: 0,
        };
        (reactor, peer)
    }

    /// Tells the core of all the cores; before the first turn.
    pub fn set_peers(&self, peers: Arc<Vec<Peer>>) {
        *self.core.0.peers.borrow_mut() = peers;
    }

    /// The handle for code on this core.
    #[must_use]
    pub fn core(&self) -> &Core {
        &self.core
    }

    /// Runs until [`Core::stop`].
    pub fn run(&mut self) {
        let mut mark = self.core.now();
        let mut courtesy = Courtesy::new(mark);
        let mut was_working = true;
        while !self.core.0.stop.get() {
            let worked = self.turn();
            let now = self.core.now();
            if now != mark {
                let bucket = if was_working { &self.stats.busy_ns } else { &self.stats.spin_ns };
                add(bucket, now.saturating_sub(mark));
                mark = now;
            }
            was_working = worked;
            if worked {
                self.idle.worked(now);
                if courtesy.is_due(now) {
                    self.offer(&mut courtesy);
                }
            } else if self.idle.is_over(now) {
                self.park();
                let after = self.core.now();
                add(&self.stats.parked_ns, after.saturating_sub(mark));
                mark = after;
            }
        }
    }

    /// Lets another thread have the processor, if one waits for it.
    fn offer(&mut self, courtesy: &mut Courtesy) {
        self.refresh_clock();
        let before = self.core.now();
        std::thread::yield_now();
        self.refresh_clock();
        courtesy.offered(before, self.core.now());
    }

    /// Sleeps until there is something to do.
    fn park(&mut self) {
        self.mail.announce_park(true);
        if let Some(message) = self.mail.take() {
            self.mail.announce_park(false);
            self.refresh_clock();
            message(&self.core);
            self.idle.worked(self.core.now());
            return;
        }
        let until = self.core.0.timers.borrow_mut().next_due();
        let mut events = std::mem::take(&mut self.events);
        {
            let mut driver = self.core.0.driver.borrow_mut();
            self.core.0.hot.cool_all(|fd, token| driver.watch_once(fd, token));
            driver.park(until, &mut events);
        }
        self.mail.announce_park(false);
        self.refresh_clock();
        self.idle.woke(self.core.now());
        self.deliver(&mut events);
        self.events = events;
    }

    fn refresh_clock(&mut self) {
        self.stale_turns = 0;
        let now = self.core.0.driver.borrow().now();
        self.core.0.now.set(now);
    }

    /// One pass over everything that may have happened; true when there was something.
    pub fn turn(&mut self) -> bool {
        if self.stale_turns == 0 || self.stale_turns >= STALE_TURNS {
            self.refresh_clock();
        }
        let mut events = std::mem::take(&mut self.events);
        self.core.0.driver.borrow_mut().poll(&mut events);
        let mut worked = self.deliver(&mut events);
        self.events = events;
        worked |= self.core.0.hot.poll(&self.core);
        worked |= self.run_mail();
        worked |= self.run_timers();
        worked |= self.core.0.tasks.run(BATCH);
        worked |= self.run_deferred();
        worked |= self.run_completions();
        worked |= self.run_flushes();
        if worked {
            self.stale_turns = 0;
            self.cool_silent();
        } else {
            self.stale_turns += 1;
        }
        worked
    }

    fn deliver(&mut self, events: &mut Vec<Event>) -> bool {
        let worked = !events.is_empty();
        for event in events.drain(..) {
            match event {
                Event::Disk { token, result } => self.disk_event(token, result),
                Event::Readable { token } => self.readable(token),
                Event::Writable { token } => {
                    if let Some(handler) = self.core.with_watch(token, |w| Rc::clone(&w.handler)) {
                        handler.writable(&self.core);
                    }
                }
            }
        }
        worked
    }

    fn readable(&self, token: u64) {
        let found = self.core.with_watch(token, |w| (w.polled, w.fd, Rc::clone(&w.handler)));
        match found {
            Some((true, fd, handler)) => self.core.0.hot.add(token, fd, handler),
            Some((false, _, handler)) => handler.readable(&self.core),
            None => {}
        }
    }

    /// Hands sockets that have been silent for long in a busy core back to the driver.
    fn cool_silent(&self) {
        let mut driver = self.core.0.driver.borrow_mut();
        self.core.0.hot.cool_silent(|fd, token| driver.watch_once(fd, token));
    }

    fn disk_event(&self, token: u64, result: i32) {
        let key = token as usize;
        let mut disks = self.core.0.disks.borrow_mut();
        let Some(pending) = disks.get_mut(key) else { return };
        let again = result == -libc::EAGAIN || result == -libc::EINTR;
        if again || (result > 0 && !pending.op.advance(result as usize)) {
            self.core.0.driver.borrow_mut().submit_disk(&mut pending.op, token);
            return;
        }
        let short = result == 0 && pending.op.remaining() > 0;
        let pending = disks.remove(key);
        drop(disks);
        // A file that ends before the transfer does has been cut under us: no data, no success.
        let result = if short { -libc::EIO } else { result.min(0) };
        pending.sink.disk_done(&self.core, pending.tag, result);
    }

    fn run_mail(&self) -> bool {
        for count in 0..BATCH {
            let Some(message) = self.mail.take() else { return count > 0 };
            message(&self.core);
        }
        true
    }

    fn run_timers(&self) -> bool {
        let mut worked = false;
        let now = self.core.now();
        loop {
            let due = self.core.0.timers.borrow_mut().pop_due(now);
            let Some(call) = due else { return worked };
            call(&self.core);
            worked = true;
        }
    }

    fn run_deferred(&self) -> bool {
        // What queues itself again has its next turn after everything else had one.
        let count = self.core.0.deferred.borrow().len().min(BATCH);
        for _ in 0..count {
            let next = self.core.0.deferred.borrow_mut().pop_front();
            let Some(work) = next else { break };
            work(&self.core);
        }
        count > 0
    }

    fn run_completions(&self) -> bool {
        self.core.0.delivery.set(Delivery::Began);
        let any = self.deliver_completions();
        self.core.0.delivery.set(Delivery::None);
        any
    }

    fn deliver_completions(&self) -> bool {
        for count in 0..BATCH {
            let next = self.core.0.done.borrow_mut().pop_front();
            let Some(Done { sink, tag, status }) = next else { return count > 0 };
            sink.io_done(&self.core, tag, status);
        }
        true
    }

    fn run_flushes(&mut self) -> bool {
        std::mem::swap(&mut *self.core.0.flushes.borrow_mut(), &mut self.flushing);
        let any = !self.flushing.is_empty();
        for socket in self.flushing.drain(..) {
            socket.turn_ends(&self.core);
        }
        any
    }
}

/// Adds to a counter that only this thread writes.
fn add(counter: &AtomicU64, value: u64) {
    counter.store(counter.load(Ordering::Relaxed).wrapping_add(value), Ordering::Relaxed);
}
