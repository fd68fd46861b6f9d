//! A connection: one socket and its [`Session`], pumped on the core that has it.
//!
//! *Flow.* readable → receive and parse → each command to the [`Owner`] → completions → one vectored send for all that
//! gathered in a turn of the loop.
//!
//! *Invariants.* One readiness event does bounded work ([`PUMP_COMMANDS`], [`PUMP_BYTES`]) and then queues itself
//! behind the other work of the core. [`Owner::lost`] is called at most once, from the loop. After [`Conn::close`] or
//! [`Conn::detach`] the owner hears no more.
//!
//! *When things fail.* Any socket error loses the connection. A terminated session (see [`Fault`]) waits
//! [`TERMINATED_NS`] for the peer to close.

use std::cell::{Cell, RefCell, RefMut};
use std::io::ErrorKind;
use std::net::SocketAddr;
use std::rc::Rc;

use super::session::{Completion, Fault, Reason, Session, Target};
use crate::reactor::driver::{NANOS_PER_MS, Nanos};
use crate::reactor::net::Stream;
use crate::reactor::{Core, OnReady, WatchId};

/// Commands handled per readiness event.
const PUMP_COMMANDS: u32 = 64;
/// Bytes received per readiness event.
const PUMP_BYTES: usize = 1 << 20;
/// How long the peer may take to close after a termination request.
pub const TERMINATED_NS: Nanos = 30_000 * NANOS_PER_MS;
/// How long commands wait before they ask the pool for buffers again.
const BUFFER_RETRY_NS: Nanos = NANOS_PER_MS / 10;

/// Who executes the commands of a connection.
pub trait Owner {
    /// Executes a command of the session; it is answered by [`Conn::complete`] or later.
    fn execute(self: Rc<Self>, core: &Core, conn: &Rc<Conn>, slot: u16);
    /// The connection has ended; the owner closes it.
    fn lost(self: Rc<Self>, core: &Core, conn: &Rc<Conn>);
}

/// A connection; see the module.
pub struct Conn {
    stream: RefCell<Option<Box<dyn Stream>>>,
    session: RefCell<Session>,
    owner: RefCell<Option<Rc<dyn Owner>>>,
    watch: Cell<Option<WatchId>>,
    writing: Cell<bool>,
    pump_queued: Cell<bool>,
    flush_queued: Cell<bool>,
    terminating: Cell<bool>,
    retry_armed: Cell<bool>,
    /// This end and the other.
    pub local: Option<SocketAddr>,
    pub peer: Option<SocketAddr>,
}

impl std::fmt::Debug for Conn {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Conn").field("peer", &self.peer).finish()
    }
}

enum Step {
    Execute(u16),
    /// Nothing more to read or parse now.
    Blocked,
    Lost,
}

impl Conn {
    /// Takes over a socket and its session; [`Self::start`] begins to use them.
    pub fn new(stream: Box<dyn Stream>, session: Session) -> Rc<Self> {
        let (local, peer) = (stream.local_addr().ok(), stream.peer_addr().ok());
        Rc::new(Self {
            stream: RefCell::new(Some(stream)),
            session: RefCell::new(session),
            owner: RefCell::new(None),
            watch: Cell::new(None),
            writing: Cell::new(false),
            pump_queued: Cell::new(false),
            flush_queued: Cell::new(false),
            terminating: Cell::new(false),
            retry_armed: Cell::new(false),
            local,
            peer,
        })
    }

    /// Watches the socket for `owner` and handles what is there already.
    pub fn start(self: &Rc<Self>, core: &Core, owner: Rc<dyn Owner>) {
        self.set_owner(owner);
        let raw = self.stream.borrow().as_ref().map(|s| s.raw());
        if let Some(raw) = raw {
            self.watch.set(Some(core.watch(raw, Rc::clone(self) as Rc<dyn OnReady>)));
        }
        self.queue_pump(core);
    }

    /// Hands the connection to another owner.
    pub fn set_owner(&self, owner: Rc<dyn Owner>) {
        *self.owner.borrow_mut() = Some(owner);
    }

    /// The session. Not to be held across calls into the connection.
    pub fn session(&self) -> RefMut<'_, Session> {
        self.session.borrow_mut()
    }

    /// Whether the socket is still open.
    pub fn is_open(&self) -> bool {
        self.stream.borrow().is_some()
    }

    /// Closes the socket. Commands that execute are still completed into the void.
    pub fn close(&self, core: &Core) {
        self.unwatch(core);
        drop(self.stream.borrow_mut().take());
        self.session.borrow_mut().stop();
        drop(self.owner.borrow_mut().take());
    }

    /// Reads no more. Commands that execute are still answered, as far as the socket takes the answers at once.
    pub fn drain(&self, core: &Core) {
        self.unwatch(core);
        self.session.borrow_mut().drain();
        drop(self.owner.borrow_mut().take());
    }

    /// Sends what the socket takes at once, then closes it.
    pub fn flush_and_close(&self, core: &Core) {
        let _ = self.send();
        self.close(core);
    }

    /// Takes socket and session out, to move them to another core; `None` when the connection is closed already.
    pub fn detach(&self, core: &Core) -> Option<(Box<dyn Stream>, Session)> {
        self.unwatch(core);
        drop(self.owner.borrow_mut().take());
        let stream = self.stream.borrow_mut().take()?;
        let session = self.session.borrow_mut().take();
        Some((stream, session))
    }

    fn unwatch(&self, core: &Core) {
        if let Some(watch) = self.watch.take() {
            core.unwatch(watch);
        }
    }

    /// Answers a command; the answer is sent later in the turn, with others.
    pub fn complete(self: &Rc<Self>, core: &Core, slot: u16, completion: impl Into<Completion>) {
        self.session.borrow_mut().complete(slot, completion.into());
        self.queue_flush(core);
    }

    /// Sends later in this turn what is waiting.
    pub fn queue_flush(self: &Rc<Self>, core: &Core) {
        if !self.writing.get() && !self.flush_queued.replace(true) {
            let conn = Rc::clone(self);
            core.defer(move |core| {
                conn.flush_queued.set(false);
                conn.flush(core);
            });
        }
    }

    /// Handles at once all that has arrived, whatever it takes.
    pub fn pump_all(self: &Rc<Self>, core: &Core) {
        while self.pump(core) {}
    }

    /// Reads and parses later in this turn.
    pub fn queue_pump(self: &Rc<Self>, core: &Core) {
        if !self.pump_queued.replace(true) {
            let conn = Rc::clone(self);
            core.defer(move |core| {
                conn.pump_queued.set(false);
                conn.pump_and_requeue(core);
            });
        }
    }

    fn owner(&self) -> Option<Rc<dyn Owner>> {
        self.owner.borrow().clone()
    }

    fn lost(self: &Rc<Self>, core: &Core) {
        let owner = self.owner.borrow_mut().take();
        if let Some(owner) = owner {
            owner.lost(core, self);
        }
    }

    fn pump_and_requeue(self: &Rc<Self>, core: &Core) {
        if self.pump(core) {
            self.queue_pump(core);
        }
    }

    /// Bounded work; true when there may be more.
    fn pump(self: &Rc<Self>, core: &Core) -> bool {
        let mut commands = 0;
        let mut bytes = 0;
        while commands < PUMP_COMMANDS && bytes < PUMP_BYTES {
            match self.step(&mut bytes) {
                Step::Execute(slot) => {
                    commands += 1;
                    let Some(owner) = self.owner() else { return false };
                    owner.execute(core, self, slot);
                }
                Step::Blocked => {
                    self.after_pump(core);
                    return bytes >= PUMP_BYTES;
                }
                Step::Lost => {
                    self.lost(core);
                    return false;
                }
            }
        }
        self.after_pump(core);
        true
    }

    fn after_pump(self: &Rc<Self>, core: &Core) {
        let (fault, starved, output) = {
            let mut session = self.session.borrow_mut();
            (session.fault(), session.is_starved(), !session.output().is_empty())
        };
        if output {
            self.queue_flush(core);
        }
        if let Some(Fault::Terminated(error)) = fault
            && !self.terminating.replace(true)
        {
            tracing::warn!(peer = ?self.peer, %error, "connection terminated");
            let conn = Rc::downgrade(self);
            core.after(
                TERMINATED_NS,
                Rc::new(move |core| {
                    if let Some(conn) = conn.upgrade() {
                        conn.lost(core);
                    }
                }),
            );
        }
        if starved && !self.retry_armed.replace(true) {
            let conn = Rc::downgrade(self);
            core.after(
                BUFFER_RETRY_NS,
                Rc::new(move |core| conn.upgrade().into_iter().for_each(|c| c.retry_buffers(core))),
            );
        }
    }

    fn retry_buffers(self: &Rc<Self>, core: &Core) {
        self.retry_armed.set(false);
        self.session.borrow_mut().retry_buffers();
        self.pump_and_requeue(core);
    }

    /// Parses, and receives when there is nothing to parse.
    fn step(&self, bytes: &mut usize) -> Step {
        let mut stream = self.stream.borrow_mut();
        let Some(stream) = stream.as_mut() else { return Step::Blocked };
        let mut session = self.session.borrow_mut();
        loop {
            if let Some(slot) = session.next_command() {
                return Step::Execute(slot);
            }
            if let Some(Fault::Broken(reason)) = session.fault() {
                if reason != Reason::Stopped {
                    tracing::warn!(peer = ?self.peer, %reason, "connection closed");
                }
                return Step::Lost;
            }
            if *bytes >= PUMP_BYTES {
                return Step::Blocked;
            }
            let (result, direct) = match session.target() {
                Target::Paused => return Step::Blocked,
                Target::Scratch(space) => (stream.recv(space), false),
                Target::Payload(part) => (stream.recv_memory(&part, 0), true),
            };
            match result {
                Ok(0) => return Step::Lost,
                Ok(count) => {
                    *bytes += count;
                    session.received(count, direct);
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Step::Blocked,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => return Step::Lost,
            }
        }
    }

    fn flush(self: &Rc<Self>, core: &Core) {
        if self.writing.get() {
            return;
        }
        let was_clogged = self.session.borrow().is_clogged();
        if !self.send() {
            return self.lost(core);
        }
        if self.writing.get()
            && let Some(watch) = self.watch.get()
        {
            core.want_write(watch);
        }
        if was_clogged && !self.session.borrow().is_clogged() {
            self.queue_pump(core);
        }
    }

    /// Sends until all is sent or the socket is full; false when the connection is lost.
    fn send(&self) -> bool {
        let mut stream = self.stream.borrow_mut();
        let Some(stream) = stream.as_mut() else { return true };
        let mut session = self.session.borrow_mut();
        while !session.output().is_empty() {
            let result = stream.send(&session.output().pieces());
            match result {
                Ok(count) => session.output().sent(count),
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    self.writing.set(true);
                    return true;
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => return false,
            }
        }
        true
    }
}

impl OnReady for Conn {
    fn readable(self: Rc<Self>, core: &Core) {
        self.pump_and_requeue(core);
    }

    fn writable(self: Rc<Self>, core: &Core) {
        self.writing.set(false);
        self.flush(core);
    }
}
