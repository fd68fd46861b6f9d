//! A controller as one core uses it: the core's I/O queue, and the I/O that is on it or waits for it.
//!
//! *What it is.* All channels of a core to namespaces of one controller share a [`PathQueue`]. It is made with the first
//! channel and goes with the last. The control core ([`super::ctrl`]) hands it connections and takes them away; between
//! the two go only messages.
//!
//! *Invariants.* An I/O belongs to at most one session. When a session ends, its socket is closed first; only then its
//! I/O is replayed on the next one or, where the controller was attached with `addax_no_replay`, completed with a path
//! error. I/O goes out in the order of its arrival. Watchers hear only of losses that I/O has heard of: of
//! [`PathState::Down`] after all I/O was completed with a path error, then of [`PathState::Up`] when a new session
//! serves the channel. Neither the first session nor one that takes over held I/O is news: whoever replays at `Up` would
//! do twice what is under way already.
//!
//! *When things fail.* A lost connection is reported to the control core, which ends the whole session: see there. Where
//! the caller replays, it waits for no deadline of seconds when the other side hangs: as soon as I/O makes no progress for
//! [`PROGRESS_NS`] the controller is asked for a sign of life ([`ctrl::ask`]). One that answers is merely slow and may be.

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, VecDeque};
use std::rc::{Rc, Weak};
use std::sync::Arc;

use nvme_wire::{Cqe, Status};
use slab::Slab;

use super::ctrl;
use super::host::{Conn, HostError, Loss, NsLimits, Owner, QueueSpec, open_queue};
use super::shared::Shared;
use super::task::Task;
use crate::bdev::{Bufs, Io, IoOp, IoSink, IoStatus, PathState, PathWatcher};
use crate::reactor::driver::{NANOS_PER_MS, Nanos};
use crate::reactor::net::Stream;
use crate::reactor::{CONTROL, Core};

/// Wait before another try where the controller names none.
const RETRY_NS: Nanos = 10 * NANOS_PER_MS;
/// How often it is looked whether I/O makes progress, while there is any.
pub const PROGRESS_NS: Nanos = 300 * NANOS_PER_MS;
/// Unit of the controller's own retry delays.
const RETRY_UNIT_NS: Nanos = 100 * NANOS_PER_MS;
/// What I/O ends with that cannot reach the controller.
pub const NO_PATH: Status = Status::HOST_PATHING_ERROR;

/// How far a queue is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// The first connection is being made: I/O waits.
    Connecting,
    Up,
    /// Between sessions: I/O waits, or fails where it is not replayed.
    Down,
    /// No session is to be expected soon: I/O fails.
    Failed,
}

/// What the control core says of a session that has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Down {
    /// Another one is tried.
    Reconnecting,
    /// The other side refuses the host; said after `Reconnecting`.
    Refused,
    /// No other is tried for now, or it has taken too long.
    Failed,
}

/// The queues of one core, by controller.
#[derive(Default)]
struct Queues {
    by_id: RefCell<HashMap<u64, Rc<PathQueue>>>,
    next_instance: Cell<u64>,
}

impl Queues {
    fn find(core: &Core, id: u64, instance: u64) -> Option<Rc<PathQueue>> {
        let queues = core.local(Self::default);
        let found = queues.by_id.borrow().get(&id).cloned();
        found.filter(|q| q.instance == instance)
    }
}

/// One controller on one core; see the module.
pub struct PathQueue {
    shared: Arc<Shared>,
    /// Tells this queue from an earlier one of the same controller on this core.
    instance: u64,
    state: Cell<State>,
    /// The session being connected or in use; 0 for none.
    session: Cell<u64>,
    conn: RefCell<Option<Rc<Conn>>>,
    io_ns: Cell<Nanos>,
    tasks: RefCell<Slab<Task>>,
    /// I/O with commands still to be sent, in order.
    waiting: RefCell<VecDeque<usize>>,
    sequence: Cell<u64>,
    /// Commands that have ended.
    ended: Cell<u64>,
    /// A look at the progress is due.
    looking: Cell<bool>,
    watchers: RefCell<Vec<(u64, PathWatcher)>>,
    told: Cell<PathState>,
    users: Cell<usize>,
    next_user: Cell<u64>,
}

impl PathQueue {
    /// This core's queue to a controller, with one more user.
    pub fn acquire(core: &Core, shared: &Arc<Shared>) -> (Rc<Self>, u64) {
        let queues = core.local(Queues::default);
        let found = queues.by_id.borrow().get(&shared.id).cloned();
        let queue = found.unwrap_or_else(|| {
            let instance = queues.next_instance.get() + 1;
            queues.next_instance.set(instance);
            let queue = Rc::new(Self::new(Arc::clone(shared), instance));
            queues.by_id.borrow_mut().insert(shared.id, Rc::clone(&queue));
            let (id, from) = (shared.id, core.id());
            core.post(CONTROL, move |core| ctrl::want_queue(core, id, from, instance));
            queue
        });
        queue.users.set(queue.users.get() + 1);
        let user = queue.next_user.get() + 1;
        queue.next_user.set(user);
        (queue, user)
    }

    fn new(shared: Arc<Shared>, instance: u64) -> Self {
        Self {
            shared,
            instance,
            state: Cell::new(State::Connecting),
            session: Cell::new(0),
            conn: RefCell::new(None),
            io_ns: Cell::new(0),
            tasks: RefCell::default(),
            waiting: RefCell::default(),
            sequence: Cell::new(0),
            ended: Cell::new(0),
            looking: Cell::new(false),
            watchers: RefCell::default(),
            told: Cell::new(PathState::Up),
            users: Cell::new(0),
            next_user: Cell::new(0),
        }
    }

    /// A user leaves; the queue goes with the last one, once its I/O has ended.
    pub fn release(self: &Rc<Self>, core: &Core, user: u64) {
        self.watchers.borrow_mut().retain(|(id, _)| *id != user);
        self.users.set(self.users.get().saturating_sub(1));
        self.leave_if_unused(core);
    }

    fn leave_if_unused(self: &Rc<Self>, core: &Core) {
        if self.users.get() > 0 || !self.tasks.borrow().is_empty() {
            return;
        }
        let queues = core.local(Queues::default);
        let (id, instance, from) = (self.shared.id, self.instance, core.id());
        let ours = queues.by_id.borrow().get(&id).is_some_and(|q| Rc::ptr_eq(q, self));
        if !ours {
            return;
        }
        queues.by_id.borrow_mut().remove(&id);
        self.close_conn(core);
        core.post(CONTROL, move |core| ctrl::release_queue(core, id, from, instance));
    }

    fn close_conn(&self, core: &Core) {
        self.session.set(0);
        let conn = self.conn.borrow_mut().take();
        if let Some(conn) = conn {
            conn.close(core);
        }
    }

    /// Tells `watcher` of changes until `user` leaves.
    pub fn watch(&self, user: u64, watcher: PathWatcher) {
        self.watchers.borrow_mut().push((user, watcher));
    }

    /// Takes an I/O.
    pub fn submit(self: &Rc<Self>, core: &Core, nsid: u32, limits: NsLimits, io: Io) {
        match self.state.get() {
            State::Failed => return core.complete(io, NO_PATH),
            State::Down if self.shared.no_replay => return core.complete(io, NO_PATH),
            _ => {}
        }
        if io.op == IoOp::Reset {
            return self.reset(core, io);
        }
        if io.blocks == 0 && io.op != IoOp::Flush {
            return core.complete(io, Status::SUCCESS);
        }
        let sequence = self.sequence.get() + 1;
        self.sequence.set(sequence);
        let retries = if self.shared.no_replay { 0 } else { self.shared.retries };
        let task = Task::new(io, nsid, limits, retries, sequence);
        let key = self.tasks.borrow_mut().insert(task);
        self.waiting.borrow_mut().push_back(key);
        self.drain(core);
        self.look_later(core);
    }

    /// Looks after a while, and as long as there is I/O, whether it makes progress.
    fn look_later(self: &Rc<Self>, core: &Core) {
        if !self.shared.no_replay || self.looking.replace(true) {
            return;
        }
        let (queue, ended) = (Rc::downgrade(self), self.ended.get());
        let look = move |core: &Core| {
            if let Some(queue) = queue.upgrade() {
                queue.look(core, ended);
            }
        };
        core.after(PROGRESS_NS, Rc::new(look));
    }

    fn look(self: &Rc<Self>, core: &Core, ended: u64) {
        self.looking.set(false);
        if self.state.get() != State::Up || self.tasks.borrow().is_empty() {
            return;
        }
        if self.ended.get() == ended {
            let (id, session) = (self.shared.id, self.session.get());
            core.post(CONTROL, move |core| ctrl::ask(core, id, session));
        }
        self.look_later(core);
    }

    /// Asks the control core to end the session and make a new one.
    fn reset(&self, core: &Core, io: Io) {
        let id = self.shared.id;
        let outcome = core.call_async(CONTROL, move |core| ctrl::reset(core.clone(), id));
        let on_core = core.clone();
        core.spawn(async move {
            let done = outcome.await.unwrap_or(false);
            on_core.complete(io, if done { Status::SUCCESS } else { NO_PATH });
        });
    }
}

/// The way of I/O through the session.
impl PathQueue {
    /// Sends commands as long as the queue takes them.
    fn drain(&self, core: &Core) {
        let conn = self.conn.borrow().clone();
        let Some(conn) = conn.filter(|_| self.state.get() == State::Up) else { return };
        let mut waiting = self.waiting.borrow_mut();
        let mut tasks = self.tasks.borrow_mut();
        let mut room = conn.room();
        while room > 0
            && let Some(key) = waiting.front().copied()
        {
            let Some(task) = tasks.get_mut(key) else {
                waiting.pop_front();
                continue;
            };
            if let Some(command) = task.next_command() {
                // There is room, and a connection that closes under us reports its loss, which rewinds the task.
                let _ = conn.submit(core, command, key as u64, self.io_ns.get());
                room -= 1;
            }
            if task.is_issued() {
                waiting.pop_front();
            }
        }
    }

    fn end(self: &Rc<Self>, core: &Core, key: usize, status: Status) {
        let retry = {
            let tasks = self.tasks.borrow();
            let Some(task) = tasks.get(key) else { return };
            task.retries != 0 && is_passing(status)
        };
        if retry {
            return self.park(core, key, status);
        }
        let task = self.tasks.borrow_mut().remove(key);
        core.complete(task.io, status);
        self.leave_if_unused(core);
    }

    /// Lets an I/O wait a moment before it is tried again.
    fn park(self: &Rc<Self>, core: &Core, key: usize, status: Status) {
        let sequence = {
            let mut tasks = self.tasks.borrow_mut();
            let Some(task) = tasks.get_mut(key) else { return };
            task.rewind();
            task.parked = true;
            task.retries -= i32::from(task.retries > 0);
            task.sequence
        };
        let delay = match status.crd() {
            0 => RETRY_NS,
            which => Nanos::from(self.shared.retry_delay(which)) * RETRY_UNIT_NS,
        };
        let queue = Rc::downgrade(self);
        core.after(delay, Rc::new(move |core| unpark(core, &queue, key, sequence)));
    }

    /// Everything in flight will have to be sent again, in the order of arrival.
    fn rewind_all(&self) {
        let mut tasks = self.tasks.borrow_mut();
        let mut order: Vec<(u64, usize)> = tasks.iter().map(|(key, task)| (task.sequence, key)).collect();
        order.sort_unstable();
        tasks.iter_mut().for_each(|(_, task)| task.rewind());
        *self.waiting.borrow_mut() = order.into_iter().map(|(_, key)| key).collect();
    }

    /// Ends everything with a path error, in the order of arrival.
    fn fail_all(self: &Rc<Self>, core: &Core) {
        self.waiting.borrow_mut().clear();
        let mut tasks: Vec<Task> = self.tasks.borrow_mut().drain().collect();
        tasks.sort_unstable_by_key(|task| task.sequence);
        for task in tasks {
            core.complete(task.io, NO_PATH);
        }
        self.leave_if_unused(core);
    }

    /// Tells watchers of a change, behind all completions given before.
    fn tell(self: &Rc<Self>, core: &Core, state: PathState) {
        if self.told.replace(state) == state || self.watchers.borrow().is_empty() {
            return;
        }
        let marker = Rc::new(Marker { queue: Rc::downgrade(self), state });
        core.complete(Io::new(IoOp::Reset, 0, 0, Bufs::new(), marker, 0), Status::SUCCESS);
    }

    fn lose(self: &Rc<Self>, core: &Core, why: Down) {
        if why == Down::Refused {
            if self.told.get() == PathState::Down {
                self.tell(core, PathState::Refused);
            }
            return;
        }
        self.close_conn(core);
        self.state.set(if why == Down::Failed { State::Failed } else { State::Down });
        if why != Down::Failed && !self.shared.no_replay {
            return self.rewind_all();
        }
        self.fail_all(core);
        if self.told.get() == PathState::Up {
            self.tell(core, PathState::Down);
        }
    }
}

/// Whether a failure may pass by itself, so that SPDK's initiator would try again.
fn is_passing(status: Status) -> bool {
    let passing = [Status::TRANSIENT_TRANSPORT_ERROR, Status::COMMAND_INTERRUPTED, Status::NAMESPACE_NOT_READY];
    !status.is_success()
        && !status.dnr()
        && (status.crd() > 0 || status.is_path_error() || passing.iter().any(|p| status.is(*p)))
}

fn unpark(core: &Core, queue: &Weak<PathQueue>, key: usize, sequence: u64) {
    let Some(queue) = queue.upgrade() else { return };
    {
        let mut tasks = queue.tasks.borrow_mut();
        let Some(task) = tasks.get_mut(key).filter(|t| t.sequence == sequence && t.parked) else { return };
        task.parked = false;
    }
    queue.waiting.borrow_mut().push_back(key);
    queue.drain(core);
}

/// Travels with the completions, to tell of a change after them.
struct Marker {
    queue: Weak<PathQueue>,
    state: PathState,
}

impl IoSink for Marker {
    fn io_done(self: Rc<Self>, core: &Core, _tag: u64, _status: IoStatus) {
        let Some(queue) = self.queue.upgrade() else { return };
        let watchers: Vec<PathWatcher> = queue.watchers.borrow().iter().map(|(_, w)| Rc::clone(w)).collect();
        for watcher in watchers {
            watcher(core, self.state);
        }
    }
}

/// Who owns the connection of one session: the queue, as long as it is in that session.
struct SessionOwner {
    queue: Weak<PathQueue>,
    session: u64,
}

impl Owner for SessionOwner {
    fn completed(self: Rc<Self>, core: &Core, tag: u64, cqe: &Cqe) {
        let Some(queue) = self.queue.upgrade() else { return };
        queue.ended.set(queue.ended.get().wrapping_add(1));
        let key = tag as usize;
        let status = cqe.status();
        let ended = {
            let mut tasks = queue.tasks.borrow_mut();
            let Some(task) = tasks.get_mut(key) else { return };
            let ended = task.ended(status);
            if !status.is_success() && queue.waiting.borrow().front() == Some(&key) {
                queue.waiting.borrow_mut().pop_front();
            }
            ended
        };
        if let Some(status) = ended {
            queue.end(core, key, status);
        }
        queue.drain(core);
    }

    fn lost(self: Rc<Self>, core: &Core, loss: &Loss) {
        let Some(queue) = self.queue.upgrade() else { return };
        let (id, session, text) = (queue.shared.id, self.session, loss.to_string());
        queue.lose(core, Down::Reconnecting);
        core.post(CONTROL, move |core| ctrl::lost(core, id, session, &text));
    }
}

/// From the control core: connects this core's queue over a fresh socket.
///
/// # Errors
/// When the queue cannot be connected, or the session ended meanwhile.
pub async fn connect(
    core: Core,
    id: u64,
    instance: u64,
    session: u64,
    stream: Box<dyn Stream>,
    spec: QueueSpec,
) -> Result<(), HostError> {
    let gone = HostError::Lost { what: "I/O queue", loss: Loss::Closed };
    let Some(queue) = Queues::find(&core, id, instance) else { return Ok(()) };
    queue.session.set(session);
    let conn = open_queue(&core, stream, &spec).await?;
    if queue.session.get() != session {
        conn.close(&core);
        return Err(gone);
    }
    conn.set_owner(Rc::new(SessionOwner { queue: Rc::downgrade(&queue), session }));
    if !conn.is_open() {
        return Err(gone);
    }
    *queue.conn.borrow_mut() = Some(conn);
    queue.io_ns.set(spec.params.io_ns);
    queue.state.set(State::Up);
    queue.tell(&core, PathState::Up);
    queue.drain(&core);
    Ok(())
}

/// From the control core: the session is over.
pub fn down(core: &Core, id: u64, instance: u64, why: Down) {
    if let Some(queue) = Queues::find(core, id, instance) {
        queue.lose(core, why);
    }
}

/// Whether this core's queue is connected, and the I/O that it has.
#[must_use]
pub fn describe(core: &Core, id: u64) -> Option<(bool, usize)> {
    let queues = core.local(Queues::default);
    let by_id = queues.by_id.borrow();
    by_id.get(&id).map(|q| (q.state.get() == State::Up, q.tasks.borrow().len()))
}
