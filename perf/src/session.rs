//! One association of this host with a subsystem, on one core: connects, sends I/O, and when the connection is lost,
//! reconnects and sends again what was in flight, as a real host does.
//!
//! *States.* Up: a controller and its I/O queues. Down: reconnecting, every [`BACKOFF_FIRST_NS`], later less often, for
//! at most [`SessionParams::ctrl_loss_ns`]. Dead: given up; everything ends with an error.
//!
//! *Invariants.* An I/O that was submitted ends exactly once, through [`IoSink::io_done`], never from inside
//! [`Session::submit`]. It is sent again only after the socket it was sent on is closed, or after its error.
//!
//! *What is retried.* Everything when a connection ends. Path errors and aborts by queue deletion until the loss timeout;
//! other errors without Do Not Retry at most [`RETRIES_MAX`] times. The rest is the caller's to count.
//!
//! *When things fail.* The loss of any queue ends the whole association: Linux does the same, and half a controller helps
//! no one.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;

use addax_engine::nvme::host::controller::connect_socket;
use addax_engine::nvme::host::{
    Command, Conn, Controller, ControllerEvents, ControllerParams, Data, HostError, Loss, NamespaceInfo, Owner,
    open_queue,
};
use addax_engine::reactor::Core;
use addax_engine::reactor::driver::{NANOS_PER_MS, Nanos};
use addax_engine::reactor::net::Net;
use addax_hugepages::BufSlice;
use nvme_wire::command::{BlockRange, IoCommand};
use nvme_wire::features::AsyncEvent;
use nvme_wire::{Cqe, Sgl, Status};
use serde::Serialize;
use slab::Slab;

/// Pause before the first attempt to reconnect, and before an I/O is sent again after an error.
pub const BACKOFF_FIRST_NS: Nanos = 100 * NANOS_PER_MS;
/// Longest pause between attempts.
pub const BACKOFF_MAX_NS: Nanos = 500 * NANOS_PER_MS;
/// How often an I/O that failed without Do Not Retry is sent again.
pub const RETRIES_MAX: u32 = 5;
/// Errors of attempts that are kept for the report.
const MESSAGES_MAX: usize = 16;

/// How to connect and when to give up.
#[derive(Debug, Clone)]
pub struct SessionParams {
    pub controller: ControllerParams,
    pub nsid: u32,
    /// I/O queues wanted.
    pub queues: u16,
    /// How long a lost connection is tried again, and an I/O sent again.
    pub ctrl_loss_ns: Nanos,
}

/// An I/O to be done.
#[derive(Debug, Clone)]
pub struct SessionIo {
    pub write: bool,
    pub lba: u64,
    pub blocks: u32,
    pub buf: BufSlice,
    /// Given back with the result.
    pub tag: u64,
}

/// Who hears of the end of I/O.
pub trait IoSink {
    /// An I/O has ended.
    fn io_done(self: Rc<Self>, core: &Core, tag: u64, result: Result<(), IoError>);
}

/// Why an I/O has failed for good.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum IoError {
    #[error("{0}")]
    Status(Status),
    #[error("connection lost and not restored in time: {0}")]
    Unreachable(String),
}

/// A time without connection, in nanoseconds since the start of the session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Outage {
    pub start_ns: Nanos,
    /// Until the connection was back, or the attempts were given up.
    pub length_ns: Nanos,
}

/// What a session has been through.
#[derive(Debug, Clone, Default)]
pub struct SessionStats {
    pub reconnects: u64,
    /// I/Os that were sent again.
    pub retries: u64,
    pub outages: Vec<Outage>,
    /// Why connections ended or could not be made; the first few.
    pub messages: Vec<String>,
}

struct Pending {
    io: SessionIo,
    since: Nanos,
    attempts: u32,
    /// Sent on the present association and not ended.
    sent: bool,
}

struct Up {
    controller: Rc<Controller>,
    conns: Vec<Rc<Conn>>,
}

enum State {
    Up(Up),
    Down { since: Nanos },
    Dead(String),
}

/// A session; see the module.
pub struct Session {
    core: Core,
    net: Rc<dyn Net>,
    params: SessionParams,
    sink: RefCell<Option<Rc<dyn IoSink>>>,
    state: RefCell<State>,
    namespace: RefCell<NamespaceInfo>,
    pending: RefCell<Slab<Pending>>,
    waiting: RefCell<VecDeque<usize>>,
    next_conn: Cell<usize>,
    /// Tells associations apart, so that late news of an old one is not taken for the present one's.
    association: Cell<u64>,
    pump_queued: Cell<bool>,
    closed: Cell<bool>,
    began: Nanos,
    stats: RefCell<SessionStats>,
}

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Session").field("subnqn", &self.params.controller.subnqn).finish_non_exhaustive()
    }
}

struct Ears {
    session: std::rc::Weak<Session>,
    association: u64,
}

impl Ears {
    fn session(&self) -> Option<Rc<Session>> {
        self.session.upgrade().filter(|s| s.association.get() == self.association)
    }
}

impl Owner for Ears {
    fn completed(self: Rc<Self>, core: &Core, tag: u64, cqe: &Cqe) {
        if let Some(session) = self.session() {
            session.completed(core, tag as usize, cqe.status());
        }
    }
    fn lost(self: Rc<Self>, _core: &Core, loss: &Loss) {
        if let Some(session) = self.session() {
            session.lost(loss);
        }
    }
}

impl ControllerEvents for Ears {
    fn event(self: Rc<Self>, _core: &Core, event: AsyncEvent) {
        tracing::info!(?event, "event of the controller");
    }
    fn lost(self: Rc<Self>, _core: &Core, loss: &Loss) {
        if let Some(session) = self.session() {
            session.lost(loss);
        }
    }
}

async fn connect(core: &Core, net: &dyn Net, params: &SessionParams) -> Result<(Up, NamespaceInfo), HostError> {
    let controller = Controller::connect(core, net, params.controller.clone()).await?;
    let made = connect_queues(core, net, params, &controller).await;
    if made.is_err() {
        controller.close(core);
    }
    made
}

/// Asks what the namespace is, over an association of its own.
///
/// # Errors
/// The first step that failed.
pub async fn probe(core: &Core, net: &dyn Net, params: &SessionParams) -> Result<NamespaceInfo, HostError> {
    let controller = Controller::connect(core, net, params.controller.clone()).await?;
    let namespace = namespace(core, &controller, params.nsid).await;
    controller.shutdown(core).await;
    namespace
}

async fn namespace(core: &Core, controller: &Rc<Controller>, nsid: u32) -> Result<NamespaceInfo, HostError> {
    let namespaces = controller.namespaces(core).await?;
    namespaces.into_iter().find(|n| n.nsid == nsid).ok_or_else(|| HostError::Invalid {
        field: "nsid",
        value: nsid.to_string(),
        allowed: "an active namespace of the subsystem is needed",
    })
}

async fn connect_queues(
    core: &Core,
    net: &dyn Net,
    params: &SessionParams,
    controller: &Rc<Controller>,
) -> Result<(Up, NamespaceInfo), HostError> {
    let namespace = namespace(core, controller, params.nsid).await?;
    let queues = u32::from(params.queues).min(controller.io_queues()) as u16;
    let mut conns: Vec<Rc<Conn>> = Vec::new();
    for qid in 1..=queues.max(1) {
        let spec = controller.queue(qid);
        let opened = match connect_socket(net, &spec.params) {
            Ok(stream) => open_queue(core, stream, &spec).await,
            Err(error) => Err(error),
        };
        match opened {
            Ok(conn) => conns.push(conn),
            Err(error) => {
                conns.iter().for_each(|conn| conn.close(core));
                return Err(error);
            }
        }
    }
    Ok((Up { controller: Rc::clone(controller), conns }, namespace))
}

impl Session {
    /// Connects. The first connect is not tried again.
    ///
    /// # Errors
    /// The first step that failed.
    pub async fn open(core: &Core, net: Rc<dyn Net>, params: SessionParams) -> Result<Rc<Self>, HostError> {
        let (up, namespace) = connect(core, &*net, &params).await?;
        let session = Rc::new(Self {
            core: core.clone(),
            net,
            params,
            sink: RefCell::new(None),
            state: RefCell::new(State::Down { since: core.now() }),
            namespace: RefCell::new(namespace),
            pending: RefCell::default(),
            waiting: RefCell::default(),
            next_conn: Cell::new(0),
            association: Cell::new(0),
            pump_queued: Cell::new(false),
            closed: Cell::new(false),
            began: core.now(),
            stats: RefCell::default(),
        });
        session.came_up(up);
        Ok(session)
    }

    /// Who hears of the end of I/O.
    pub fn set_sink(&self, sink: Rc<dyn IoSink>) {
        *self.sink.borrow_mut() = Some(sink);
    }

    /// The namespace as it was at the last connect.
    #[must_use]
    pub fn namespace(&self) -> NamespaceInfo {
        self.namespace.borrow().clone()
    }

    /// I/O queues connected now.
    #[must_use]
    pub fn queues(&self) -> usize {
        match &*self.state.borrow() {
            State::Up(up) => up.conns.len(),
            _ => 0,
        }
    }

    /// Whether I/O can be sent now.
    #[must_use]
    pub fn is_up(&self) -> bool {
        matches!(*self.state.borrow(), State::Up(_))
    }

    /// What it has been through so far.
    #[must_use]
    pub fn stats(&self) -> SessionStats {
        self.stats.borrow().clone()
    }

    /// Takes an I/O.
    pub fn submit(self: &Rc<Self>, io: SessionIo) {
        let pending = Pending { io, since: self.core.now(), attempts: 0, sent: false };
        let key = self.pending.borrow_mut().insert(pending);
        self.waiting.borrow_mut().push_back(key);
        self.queue_pump();
    }

    /// Ends the association in good order.
    pub async fn close(self: &Rc<Self>) {
        self.closed.set(true);
        self.association.set(self.association.get() + 1);
        let state = self.state.replace(State::Dead("closed".to_owned()));
        if let State::Up(up) = state {
            up.conns.iter().for_each(|conn| conn.close(&self.core));
            up.controller.shutdown(&self.core).await;
        }
        drop(self.sink.borrow_mut().take());
    }

    fn note(&self, message: String) {
        tracing::info!(message);
        let mut stats = self.stats.borrow_mut();
        if stats.messages.len() < MESSAGES_MAX && stats.messages.last() != Some(&message) {
            stats.messages.push(message);
        }
    }

    fn queue_pump(self: &Rc<Self>) {
        if !self.pump_queued.replace(true) {
            let session = Rc::clone(self);
            self.core.defer(move |core| {
                session.pump_queued.set(false);
                session.pump(core);
            });
        }
    }

    /// Sends what waits, as far as there is room; ends it when there is no hope.
    fn pump(self: &Rc<Self>, core: &Core) {
        loop {
            let Some(key) = self.waiting.borrow_mut().pop_front() else { return };
            let dead = match &*self.state.borrow() {
                State::Dead(why) => Some(why.clone()),
                _ => None,
            };
            if let Some(why) = dead {
                self.end(core, key, Err(IoError::Unreachable(why)));
            } else if !self.send(core, key) {
                self.waiting.borrow_mut().push_front(key);
                return;
            }
        }
    }

    fn conn_with_room(&self) -> Option<Rc<Conn>> {
        let state = self.state.borrow();
        let State::Up(up) = &*state else { return None };
        let start = self.next_conn.get();
        let count = up.conns.len();
        let found = (0..count).map(|i| (start + i) % count).find(|i| up.conns[*i].room() > 0)?;
        self.next_conn.set((found + 1) % count);
        Some(Rc::clone(&up.conns[found]))
    }

    /// Sends one; false when there is no room.
    fn send(&self, core: &Core, key: usize) -> bool {
        let Some(conn) = self.conn_with_room() else { return false };
        let mut all = self.pending.borrow_mut();
        let Some(pending) = all.get_mut(key) else { return true };
        let io = &pending.io;
        let range = BlockRange::new(io.lba, io.blocks);
        let bufs = [io.buf.clone()].into_iter().collect();
        let (command, data) = if io.write {
            (IoCommand::Write(range), Data::Send(bufs))
        } else {
            (IoCommand::Read(range), Data::Receive(bufs))
        };
        let sqe = command.to_sqe(0, self.params.nsid, Sgl::NONE);
        if conn.submit(core, Command { sqe, data }, key as u64, self.params.controller.io_ns).is_err() {
            return false;
        }
        pending.sent = true;
        pending.attempts += 1;
        if pending.attempts > 1 {
            self.stats.borrow_mut().retries += 1;
        }
        true
    }

    fn completed(self: &Rc<Self>, core: &Core, key: usize, status: Status) {
        let again = {
            let mut all = self.pending.borrow_mut();
            let Some(pending) = all.get_mut(key).filter(|p| p.sent) else { return };
            pending.sent = false;
            let waited = core.now().saturating_sub(pending.since);
            is_retried(status, pending.attempts, waited < self.params.ctrl_loss_ns)
        };
        if again {
            tracing::debug!(%status, "sent again after an error");
            let session = Rc::clone(self);
            let retry = move |_: &Core| {
                session.waiting.borrow_mut().push_back(key);
                session.queue_pump();
            };
            self.core.after(BACKOFF_FIRST_NS, Rc::new(retry));
        } else {
            let result = if status.is_success() { Ok(()) } else { Err(IoError::Status(status)) };
            self.end(core, key, result);
        }
        self.queue_pump();
    }

    fn end(&self, core: &Core, key: usize, result: Result<(), IoError>) {
        let ended = self.pending.borrow_mut().try_remove(key);
        let sink = self.sink.borrow().clone();
        if let (Some(pending), Some(sink)) = (ended, sink) {
            let tag = pending.io.tag;
            drop(pending);
            sink.io_done(core, tag, result);
        }
    }

    fn came_up(self: &Rc<Self>, up: Up) {
        let association = self.association.get() + 1;
        self.association.set(association);
        let ears = Rc::new(Ears { session: Rc::downgrade(self), association });
        for conn in &up.conns {
            conn.set_owner(Rc::clone(&ears) as Rc<dyn Owner>);
        }
        up.controller.watch(&self.core, ears);
        let broken = up.conns.iter().any(|conn| !conn.is_open());
        *self.state.borrow_mut() = State::Up(up);
        if broken {
            // It ended before anybody listened.
            self.lost(&Loss::PeerClosed);
        }
        self.queue_pump();
    }

    fn lost(self: &Rc<Self>, loss: &Loss) {
        let now = self.core.now();
        let State::Up(up) = self.state.replace(State::Down { since: now }) else { return };
        self.association.set(self.association.get() + 1);
        self.note(format!("connection lost: {loss}"));
        up.conns.iter().for_each(|conn| conn.close(&self.core));
        up.controller.close(&self.core);
        drop(up);
        let sent: Vec<usize> = {
            let mut all = self.pending.borrow_mut();
            all.iter_mut().filter_map(|(key, p)| std::mem::take(&mut p.sent).then_some(key)).collect()
        };
        // Oldest first, before what was never sent.
        let mut waiting = self.waiting.borrow_mut();
        sent.into_iter().rev().for_each(|key| waiting.push_front(key));
        drop(waiting);
        let session = Rc::clone(self);
        self.core.spawn(async move { session.reconnect().await });
    }

    async fn reconnect(self: Rc<Self>) {
        let State::Down { since } = *self.state.borrow() else { return };
        let give_up = since.saturating_add(self.params.ctrl_loss_ns);
        let mut pause = BACKOFF_FIRST_NS;
        loop {
            self.core.sleep(pause).await;
            if self.closed.get() {
                return;
            }
            let left = give_up.saturating_sub(self.core.now()).max(BACKOFF_FIRST_NS);
            let attempt = connect(&self.core, &*self.net, &self.params);
            let error = match self.core.timeout(left, attempt).await {
                Some(Ok((up, namespace))) => return self.reconnected(since, up, namespace),
                Some(Err(error)) => error.to_string(),
                None => "no connection in time".to_owned(),
            };
            self.note(format!("reconnect: {error}"));
            if self.core.now() >= give_up {
                return self.give_up(since, error);
            }
            pause = (pause * 3 / 2).min(BACKOFF_MAX_NS);
        }
    }

    fn outage(&self, since: Nanos) {
        let outage =
            Outage { start_ns: since.saturating_sub(self.began), length_ns: self.core.now().saturating_sub(since) };
        self.stats.borrow_mut().outages.push(outage);
    }

    fn reconnected(self: &Rc<Self>, since: Nanos, up: Up, namespace: NamespaceInfo) {
        if self.closed.get() {
            up.conns.iter().for_each(|conn| conn.close(&self.core));
            return up.controller.close(&self.core);
        }
        self.outage(since);
        self.stats.borrow_mut().reconnects += 1;
        if !namespace.is_same_medium(&self.namespace.borrow()) {
            self.note("the namespace is another after the reconnect".to_owned());
        }
        *self.namespace.borrow_mut() = namespace;
        self.came_up(up);
    }

    fn give_up(self: &Rc<Self>, since: Nanos, error: String) {
        self.outage(since);
        *self.state.borrow_mut() = State::Dead(error);
        self.queue_pump();
    }
}

/// Whether an I/O that ended so is sent again.
fn is_retried(status: Status, attempts: u32, in_time: bool) -> bool {
    if status.is_success() || !in_time {
        return false;
    }
    if status.is_path_error() || status.is(Status::ABORTED_SQ_DELETION) {
        return true;
    }
    !status.dnr() && attempts <= RETRIES_MAX
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn path_errors_are_retried_until_time_is_up_and_others_a_few_times() {
        assert!(!is_retried(Status::SUCCESS, 1, true));
        assert!(is_retried(Status::ANA_INACCESSIBLE, 1000, true));
        assert!(is_retried(Status::ABORTED_SQ_DELETION.with_dnr(), 9, true));
        assert!(!is_retried(Status::ANA_INACCESSIBLE, 1, false));
        assert!(is_retried(Status::INTERNAL_ERROR, RETRIES_MAX, true));
        assert!(!is_retried(Status::INTERNAL_ERROR, RETRIES_MAX + 1, true));
        assert!(!is_retried(Status::LBA_OUT_OF_RANGE.with_dnr(), 1, true));
    }
}
