//! A connection: one socket and its [`Session`], pumped on the core that has it.
//!
//! *Flow.* one receive → each command in it to the [`Owner`] → completions → one vectored send for all that gathered in
//! the turn of the loop. The turn is the batch: the host works on one batch of answers while this end receives the next.
//!
//! *Invariants.* One turn does bounded work for a connection ([`PUMP_COMMANDS`], [`PUMP_BYTES`], one receive) and then lets the others
//! have theirs. While a host does not take its answers nothing is received from it. [`Owner::lost`] is called at most once, from the loop. After [`Conn::close`] or
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
use crate::reactor::{Core, OnReady, Polled, WatchId};

/// Commands taken per turn.
const PUMP_COMMANDS: u32 = 128;
/// Bytes of data moved by the commands of a turn: what a device has put into memory is sent while caches still have it.
const PUMP_BYTES: u32 = 1 << 20;
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

/// The connection has ended.
struct Lost;

enum Step {
    Execute(u16),
    /// Nothing is left to parse.
    Dry,
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
            self.watch.set(Some(core.watch_hot(raw, Rc::clone(self) as Rc<dyn OnReady>)));
        }
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

    /// Sends at the end of this turn what is waiting.
    pub fn queue_flush(self: &Rc<Self>, core: &Core) {
        if !self.writing.get() && !self.flush_queued.replace(true) {
            core.queue_flush(Rc::clone(self) as Rc<dyn OnReady>);
        }
    }

    /// Handles at once all that has arrived, whatever it takes. One that was lost or closed, now or before, has nothing.
    pub fn pump_all(self: &Rc<Self>, core: &Core) {
        while self.owner.borrow().is_some() && self.pump(core) == Polled::Worked {}
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

    /// Takes what was received, or receives once and takes that.
    fn pump(self: &Rc<Self>, core: &Core) -> Polled {
        let (mut commands, mut bytes) = (0, 0);
        let mut received = false;
        loop {
            match self.step() {
                Step::Execute(slot) => {
                    commands += 1;
                    bytes += self.session.borrow().transfer_len(slot);
                    let Some(owner) = self.owner() else { return Polled::Worked };
                    owner.execute(core, self, slot);
                    if commands == PUMP_COMMANDS || bytes >= PUMP_BYTES {
                        break;
                    }
                }
                Step::Dry if received || commands > 0 => break,
                Step::Dry => match self.receive() {
                    Ok(Polled::Worked) => received = true,
                    Ok(other) => {
                        // What was parsed may wait for a buffer, or have been answered, without a command to execute.
                        self.after_pump(core);
                        return other;
                    }
                    Err(Lost) => {
                        self.lost(core);
                        return Polled::Worked;
                    }
                },
                Step::Lost => {
                    self.lost(core);
                    return Polled::Worked;
                }
            }
        }
        self.after_pump(core);
        Polled::Worked
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
        // A turn takes only so much, and the socket may have nothing to say any more: the rest is for the next turns.
        if self.pump(core) == Polled::Worked
            && let Some(watch) = self.watch.get()
        {
            core.poll_again(watch);
        }
    }

    fn step(&self) -> Step {
        let mut session = self.session.borrow_mut();
        if let Some(slot) = session.next_command() {
            return Step::Execute(slot);
        }
        match session.fault() {
            Some(Fault::Broken(reason)) => {
                if reason != Reason::Stopped {
                    tracing::warn!(peer = ?self.peer, %reason, "connection closed");
                }
                Step::Lost
            }
            _ => Step::Dry,
        }
    }

    /// Receives once.
    fn receive(&self) -> Result<Polled, Lost> {
        let mut stream = self.stream.borrow_mut();
        let Some(stream) = stream.as_mut() else { return Ok(Polled::Nothing) };
        let mut session = self.session.borrow_mut();
        let result = match session.target() {
            Target::Paused => return Ok(Polled::Paused),
            Target::Scratch(space) => stream.recv(space),
            Target::Payload(part, space) => stream.recv_split(&part, space),
        };
        match result {
            Ok(0) => Err(Lost),
            Ok(count) => {
                session.received(count);
                Ok(Polled::Worked)
            }
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(Polled::Nothing),
            Err(_) => Err(Lost),
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
        self.pump(core);
    }

    fn writable(self: Rc<Self>, core: &Core) {
        self.writing.set(false);
        self.turn_ends(core);
    }

    fn poll(self: Rc<Self>, core: &Core) -> Polled {
        self.pump(core)
    }

    fn turn_ends(self: Rc<Self>, core: &Core) {
        self.flush_queued.set(false);
        if self.writing.get() {
            return;
        }
        let was_clogged = self.session.borrow().is_clogged();
        if !self.send() {
            return self.lost(core);
        }
        let Some(watch) = self.watch.get() else { return };
        if self.writing.get() {
            core.want_write(watch);
        }
        if was_clogged && !self.session.borrow().is_clogged() {
            core.poll_again(watch);
        }
    }
}
