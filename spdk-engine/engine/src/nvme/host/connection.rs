//! A connection of the initiator: one socket and its [`Qpair`] on the core that uses them.
//!
//! *Flow.* [`Conn::open`] waits for the socket and for the initialisation; then [`Conn::submit`] for I/O, whose end
//! the [`Owner`] hears, and [`Conn::call`] for commands that are awaited. What is submitted in a turn of the loop goes
//! out in one vectored send.
//!
//! *Invariants.* One turn does bounded work for a connection: one receive and what is in it.
//! [`Owner::lost`] is called at most once, never from inside a call into the connection, and only after the socket was
//! closed: nothing of the session can reach the controller any more from here.
//!
//! *When things fail.* Any error of the socket or the protocol, and any command that misses its deadline, loses the
//! whole connection: a controller that does not answer cannot be told apart from one that is gone.

use std::cell::{Cell, RefCell};
use std::io::ErrorKind;
use std::rc::Rc;

use futures::channel::oneshot;
use nvme_wire::Cqe;
use slab::Slab;

use super::qpair::{Command, Completion, Params, Qpair, Target};
use super::{HostError, Loss};
use crate::reactor::driver::{NANOS_PER_MS, Nanos};
use crate::reactor::net::Stream;
use crate::reactor::{Core, OnReady, Polled, WatchId};

/// Completions handled per turn.
const PUMP_COMPLETIONS: u32 = 128;
/// How often deadlines are looked at while there are any.
const DEADLINE_TICK_NS: Nanos = 100 * NANOS_PER_MS;
/// Marks tags of awaited commands.
const CALL: u64 = 1 << 63;

/// Who uses a connection.
pub trait Owner {
    /// A command given to [`Conn::submit`] has ended.
    fn completed(self: Rc<Self>, core: &Core, tag: u64, cqe: &Cqe);
    /// The connection has ended, and every command with it.
    fn lost(self: Rc<Self>, core: &Core, loss: &Loss);
}

/// A connection; see the module.
pub struct Conn {
    stream: RefCell<Option<Box<dyn Stream>>>,
    qpair: RefCell<Qpair>,
    owner: RefCell<Option<Rc<dyn Owner>>>,
    calls: RefCell<Slab<oneshot::Sender<Cqe>>>,
    opening: RefCell<Option<oneshot::Sender<()>>>,
    loss: RefCell<Option<Loss>>,
    watch: Cell<Option<WatchId>>,
    connected: Cell<bool>,
    writing: Cell<bool>,
    flush_queued: Cell<bool>,
    ticking: Cell<bool>,
}

impl std::fmt::Debug for Conn {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Conn").field("loss", &self.loss.borrow()).finish_non_exhaustive()
    }
}

enum Step {
    Ended(Completion),
    /// Nothing is left to parse.
    Dry,
    Lost(Loss),
}

/// Closes a connection whose opening was given up.
struct Opening<'a> {
    core: &'a Core,
    conn: Option<Rc<Conn>>,
}

impl Drop for Opening<'_> {
    fn drop(&mut self) {
        if let Some(conn) = self.conn.take() {
            conn.close(self.core);
        }
    }
}

impl Conn {
    /// Waits until `stream` is connected and initialised.
    ///
    /// # Errors
    /// [`HostError::Lost`] when the connect or the initialisation fails, [`HostError::Deadline`] after `limit_ns`. The
    /// socket is closed then.
    pub async fn open(
        core: &Core,
        stream: Box<dyn Stream>,
        params: Params,
        limit_ns: Nanos,
    ) -> Result<Rc<Self>, HostError> {
        let (sender, opened) = oneshot::channel();
        let raw = stream.raw();
        let conn = Rc::new(Self {
            stream: RefCell::new(Some(stream)),
            qpair: RefCell::new(Qpair::new(params)),
            owner: RefCell::new(None),
            calls: RefCell::default(),
            opening: RefCell::new(Some(sender)),
            loss: RefCell::new(None),
            watch: Cell::new(None),
            connected: Cell::new(false),
            writing: Cell::new(true),
            flush_queued: Cell::new(false),
            ticking: Cell::new(false),
        });
        let watch = core.watch_hot(raw, Rc::clone(&conn) as Rc<dyn OnReady>);
        conn.watch.set(Some(watch));
        core.want_write(watch);
        let mut opening = Opening { core, conn: Some(Rc::clone(&conn)) };
        let what = "initialise the connection";
        match core.timeout(limit_ns, opened).await {
            Some(Ok(())) => {
                opening.conn = None;
                Ok(conn)
            }
            Some(Err(_)) => Err(HostError::Lost { what, loss: conn.loss() }),
            None => Err(HostError::Deadline { what }),
        }
    }

    /// Who hears of submitted commands and of the end.
    pub fn set_owner(&self, owner: Rc<dyn Owner>) {
        *self.owner.borrow_mut() = Some(owner);
    }

    /// Whether commands can be submitted.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.stream.borrow().is_some() && self.qpair.borrow().is_ready()
    }

    /// Commands that can be submitted now.
    #[must_use]
    pub fn room(&self) -> usize {
        if self.is_open() { self.qpair.borrow().slots().free() } else { 0 }
    }

    /// Commands in flight.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.qpair.borrow().slots().used()
    }

    fn loss(&self) -> Loss {
        self.loss.borrow().clone().unwrap_or(Loss::Closed)
    }

    /// Closes the socket. Nobody is told of what was in flight, but awaited commands fail.
    pub fn close(&self, core: &Core) {
        drop(self.owner.borrow_mut().take());
        self.shut(core, Loss::Closed);
    }

    fn shut(&self, core: &Core, loss: Loss) {
        if let Some(watch) = self.watch.take() {
            core.unwatch(watch);
        }
        if self.stream.borrow_mut().take().is_some() {
            *self.loss.borrow_mut() = Some(loss);
        }
        drop(self.opening.borrow_mut().take());
        drop(std::mem::take(&mut *self.calls.borrow_mut()));
    }

    fn lost(&self, core: &Core, loss: Loss) {
        self.shut(core, loss.clone());
        let owner = self.owner.borrow_mut().take();
        if let Some(owner) = owner {
            owner.lost(core, &loss);
        }
    }

    /// Sends a command that must end within `limit_ns`, later in this turn together with others. The owner hears of its
    /// end by `tag` (below 2^63). Back when there is no room, see [`Self::room`].
    pub fn submit(self: &Rc<Self>, core: &Core, command: Command, tag: u64, limit_ns: Nanos) -> Result<(), Command> {
        if self.stream.borrow().is_none() {
            return Err(command);
        }
        let deadline = core.now().saturating_add(limit_ns);
        self.qpair.borrow_mut().submit(command, tag, deadline)?;
        if limit_ns != Nanos::MAX {
            self.tick(core);
        }
        self.queue_flush(core);
        Ok(())
    }

    /// Sends a command and waits for its completion, whatever its status; without `limit_ns` for as long as it takes.
    ///
    /// # Errors
    /// When there is no room, or the connection ends.
    pub async fn call(
        self: &Rc<Self>,
        core: &Core,
        what: &'static str,
        command: Command,
        limit_ns: Option<Nanos>,
    ) -> Result<Cqe, HostError> {
        let (sender, receiver) = oneshot::channel();
        let key = self.calls.borrow_mut().insert(sender);
        if self.submit(core, command, CALL | key as u64, limit_ns.unwrap_or(Nanos::MAX)).is_err() {
            self.calls.borrow_mut().try_remove(key);
            let open = self.is_open();
            return Err(if open { HostError::QueueFull { what } } else { HostError::Lost { what, loss: self.loss() } });
        }
        receiver.await.map_err(|_| HostError::Lost { what, loss: self.loss() })
    }

    fn tick(self: &Rc<Self>, core: &Core) {
        if self.ticking.replace(true) {
            return;
        }
        let weak = Rc::downgrade(self);
        core.after(
            DEADLINE_TICK_NS,
            Rc::new(move |core| {
                if let Some(conn) = weak.upgrade() {
                    conn.ticked(core);
                }
            }),
        );
    }

    fn ticked(self: &Rc<Self>, core: &Core) {
        self.ticking.set(false);
        if self.stream.borrow().is_none() {
            return;
        }
        let (expired, more) = {
            let qpair = self.qpair.borrow();
            (qpair.slots().expired(core.now()), qpair.slots().has_deadlines())
        };
        if expired {
            self.lost(core, Loss::Deadline);
        } else if more {
            self.tick(core);
        }
    }

    fn queue_flush(self: &Rc<Self>, core: &Core) {
        if !self.writing.get() && !self.flush_queued.replace(true) {
            core.queue_flush(Rc::clone(self) as Rc<dyn OnReady>);
        }
    }

    /// Takes what was received, or receives once and takes that.
    fn pump(self: &Rc<Self>, core: &Core) -> Polled {
        let (mut completions, mut received) = (0, false);
        while completions < PUMP_COMPLETIONS {
            match self.step() {
                Step::Ended(completion) => {
                    completions += 1;
                    self.ended(core, &completion);
                }
                Step::Dry if received || completions > 0 => break,
                Step::Dry => match self.receive() {
                    Ok(true) => received = true,
                    Ok(false) => return Polled::Nothing,
                    Err(loss) => return self.broken(core, loss),
                },
                Step::Lost(loss) => return self.broken(core, loss),
            }
        }
        self.after_pump(core);
        Polled::Worked
    }

    fn broken(&self, core: &Core, loss: Loss) -> Polled {
        // Best effort: the peer should hear why, if its socket still takes it.
        let _ = self.send();
        self.lost(core, loss);
        Polled::Worked
    }

    fn ended(&self, core: &Core, completion: &Completion) {
        if completion.tag & CALL != 0 {
            let sender = self.calls.borrow_mut().try_remove((completion.tag & !CALL) as usize);
            if let Some(sender) = sender {
                let _ = sender.send(completion.cqe);
            }
            return;
        }
        let owner = self.owner.borrow().clone();
        if let Some(owner) = owner {
            owner.completed(core, completion.tag, &completion.cqe);
        }
    }

    fn after_pump(self: &Rc<Self>, core: &Core) {
        let (ready, output) = {
            let mut qpair = self.qpair.borrow_mut();
            (qpair.is_ready(), !qpair.output().is_empty())
        };
        if ready && let Some(opening) = self.opening.borrow_mut().take() {
            let _ = opening.send(());
        }
        if output {
            self.queue_flush(core);
        }
    }

    fn step(&self) -> Step {
        let mut qpair = self.qpair.borrow_mut();
        match qpair.next() {
            Some(completion) => Step::Ended(completion),
            None => qpair.fault().map_or(Step::Dry, |fault| Step::Lost(Loss::Protocol(fault))),
        }
    }

    /// Receives once; false when nothing is there.
    fn receive(&self) -> Result<bool, Loss> {
        let mut stream = self.stream.borrow_mut();
        let Some(stream) = stream.as_mut() else { return Ok(false) };
        let mut qpair = self.qpair.borrow_mut();
        let result = match qpair.target() {
            Target::Scratch(space) => stream.recv(space),
            Target::Payload(part, space) => stream.recv_split(&part, space),
        };
        match result {
            Ok(0) => Err(Loss::PeerClosed),
            Ok(count) => {
                qpair.received(count);
                Ok(true)
            }
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(false),
            Err(error) => Err(Loss::Socket(error.to_string())),
        }
    }

    /// Sends until all is sent or the socket is full.
    fn send(&self) -> Result<(), Loss> {
        let mut stream = self.stream.borrow_mut();
        let Some(stream) = stream.as_mut() else { return Ok(()) };
        let mut qpair = self.qpair.borrow_mut();
        while !qpair.output().is_empty() {
            let result = stream.send(&qpair.output().pieces());
            match result {
                Ok(count) => qpair.output().sent(count),
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    self.writing.set(true);
                    return Ok(());
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(Loss::Socket(error.to_string())),
            }
        }
        Ok(())
    }
}

impl OnReady for Conn {
    fn readable(self: Rc<Self>, core: &Core) {
        self.poll(core);
    }

    fn writable(self: Rc<Self>, core: &Core) {
        self.writing.set(false);
        if !self.connected.replace(true) {
            let result = match self.stream.borrow_mut().as_mut() {
                Some(stream) => stream.connect_result(),
                None => return,
            };
            if let Err(error) = result {
                return self.lost(core, Loss::Socket(error.to_string()));
            }
            if let Some(watch) = self.watch.get() {
                core.poll_again(watch);
            }
        }
        self.turn_ends(core);
    }

    fn poll(self: Rc<Self>, core: &Core) -> Polled {
        if self.connected.get() { self.pump(core) } else { Polled::Paused }
    }

    fn turn_ends(self: Rc<Self>, core: &Core) {
        self.flush_queued.set(false);
        if self.writing.get() {
            return;
        }
        if let Err(loss) = self.send() {
            return self.lost(core, loss);
        }
        if self.writing.get()
            && let Some(watch) = self.watch.get()
        {
            core.want_write(watch);
        }
    }
}
