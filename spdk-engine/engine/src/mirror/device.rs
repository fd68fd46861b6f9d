//! One mirror on its home core: carries out what the core decides.
//!
//! *What it is.* The runner of `mirror_core::Core` as that crate's `events` module asks of one: it turns I/O of hosts
//! into inputs, actions into I/O on legs, timers and messages to the control core, and gives every outcome back.
//!
//! *Invariants.* All of it runs on the home core. Payload is captured by the target before it comes here; each leg's I/O
//! holds its own handles to the buffers, so they live as long as any leg may read them. Every swap is answered exactly
//! once: by the agent, or as unknown after [`SWAP_DEADLINE_NS`].
//!
//! *Waking late.* A process that was stopped (SIGSTOP, a frozen machine) finds answers in its sockets that arrived before
//! another engine took the volume over. An answer older than [`LATE_NS`] therefore counts only after the leg has answered
//! a read on the same session: a promote has ended that session, so nothing is acknowledged after a takeover.
//!
//! *More than the core takes.* While a volume stands still hosts go on to send, more than the core keeps in flight. What it
//! calls busy waits here, in order, and is told again when there is room: hosts repeat a busy command a few times only, and
//! then fail it.
//!
//! *When things fail.* A leg whose channel does not exist any more answers "gone".

mod hot;
mod meta;
mod snapshot;

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::rc::Rc;

use addax_hugepages::{Buf, BufSlice};
use mirror_core::{
    Action, CopySlot, DropReason, Event, HostError, HostId, Input, IoId, LegError, LegId, Op, OpenParams, Payload,
    SwapId, SwapOutcome,
};
use nvme_wire::Status;
use serde_json::{Value, json};
use slab::Slab;

use self::hot::{Port, leg_op};
pub use self::meta::LegChans;
use super::convert::{ConfigJson, host_status, leg_result};
use crate::bdev::{Bufs, Chan, Io, IoOp, IoSink, IoStatus, PathState, share};
use crate::events::EventRing;
use crate::reactor::driver::{NANOS_PER_S, Nanos};
use crate::reactor::timer::TimerId;
use crate::reactor::{CONTROL, Core};

/// How long the agent may take to answer a swap before it counts as unknown.
pub const SWAP_DEADLINE_NS: Nanos = 15 * NANOS_PER_S;

/// An answer that comes later than this may have waited for this process to wake, long after another engine took over: it
/// proves what the leg did, and nothing about who may tell it now.
const LATE_NS: Nanos = NANOS_PER_S;
/// Questions after late answers; a leg that is just slow must get through in the end.
const QUESTIONS_MAX: u32 = 3;
/// Pause between two tellings of a leg's progress.
const PROGRESS_NS: Nanos = NANOS_PER_S / 5;
/// Most I/O of hosts that waits for room in the core.
const WAITING_MAX: usize = 1 << 16;
/// Tag of an I/O whose outcome nobody waits for.
const NO_RUN: u64 = u64::MAX;

/// The mirrors whose home is this core, by name.
#[derive(Default)]
pub struct Table(RefCell<HashMap<String, Rc<Device>>>);

impl Table {
    /// The mirror of that name on this core.
    pub fn find(core: &Core, name: &str) -> Option<Rc<Device>> {
        core.local(Self::default).0.borrow().get(name).cloned()
    }

    pub fn insert(core: &Core, device: &Rc<Device>) {
        core.local(Self::default).0.borrow_mut().insert(device.name.clone(), Rc::clone(device));
    }

    pub fn remove(core: &Core, name: &str) -> Option<Rc<Device>> {
        core.local(Self::default).0.borrow_mut().remove(name)
    }
}

/// How far a mirror's life has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    Open,
    Closing,
    Closed,
    Stopped,
}

impl State {
    /// The word in RPC answers.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Open => "open",
            Self::Closing => "closing",
            Self::Closed => "closed",
            Self::Stopped => "stopped",
        }
    }
}

struct Leg {
    replica: String,
    chans: LegChans,
    state: &'static str,
    /// Of the replica (rule 1), and the one that its next session will find, when that is another one.
    instance: String,
    next_instance: Option<String>,
    copied: u64,
    /// When progress was last told.
    told: Nanos,
}

struct PendingSwap {
    swap: SwapId,
    value: Value,
    timer: TimerId,
}

/// What an I/O on a leg is about.
enum Part {
    Data,
    MetaRead(BufSlice),
    /// A write, with the flush that is still to come if the device has a volatile cache.
    MetaWrite,
    MetaFlush,
}

struct LegRun {
    leg: LegId,
    io: IoId,
    part: Part,
    /// When it, or the question that follows a late answer, was sent.
    sent: Nanos,
    /// Questions asked about it so far.
    asked: u32,
}

/// One mirror.
pub struct Device {
    name: String,
    block_size: u32,
    machine: RefCell<mirror_core::Core>,
    hosts: RefCell<Slab<Io>>,
    /// I/O of hosts for which the core had no room.
    waiting: RefCell<VecDeque<Io>>,
    /// What waits is being told again.
    admitting: Cell<bool>,
    legs: RefCell<BTreeMap<LegId, Leg>>,
    /// For their data, by number.
    ports: RefCell<Vec<Option<Rc<Port>>>>,
    /// What is in flight to meta areas, and questions after late answers.
    runs: RefCell<Slab<LegRun>>,
    /// One per slot of the core, made at its first use and kept: a window's data lives here between its read and its
    /// writes, whatever else joins or leaves meanwhile.
    copy_buffers: RefCell<HashMap<CopySlot, BufSlice>>,
    swap: RefCell<Option<PendingSwap>>,
    wake: Cell<Option<TimerId>>,
    /// Blocks written by copies, over all legs.
    copied: Cell<u64>,
    state: Cell<State>,
    /// The latest time the core was told; it never goes back.
    latest: Cell<Nanos>,
    /// Room for the actions of an input.
    actions: RefCell<Vec<Action>>,
    /// Taken down: late completions change nothing any more.
    dead: Cell<bool>,
    closing: RefCell<Vec<futures::channel::oneshot::Sender<()>>>,
    /// Calls about snapshots that wait.
    snapshots: RefCell<snapshot::Snapshots>,
}

impl Device {
    /// Starts a mirror over open channels, one per leg of `params`.
    ///
    /// # Errors
    /// What contradicts itself in the parameters.
    pub fn open(
        core: &Core,
        name: String,
        params: OpenParams,
        chans: Vec<(LegId, String, LegChans)>,
    ) -> Result<Rc<Self>, mirror_core::CoreError> {
        let in_sync: Vec<String> = params.config.in_sync.iter().map(ToString::to_string).collect();
        let joiners: Vec<_> = params
            .legs
            .iter()
            .filter(|l| !params.config.in_sync.contains(&l.replica))
            .map(|l| (l.leg, l.replica.clone(), l.local))
            .collect();
        let instances: BTreeMap<_, _> = params.legs.iter().map(|l| (l.leg, l.instance.clone())).collect();
        let block_size = params.block_size;
        let device = Rc::new(Self {
            name,
            block_size,
            machine: RefCell::new(mirror_core::Core::open(params)?),
            hosts: RefCell::default(),
            waiting: RefCell::default(),
            admitting: Cell::new(false),
            legs: RefCell::default(),
            ports: RefCell::default(),
            runs: RefCell::default(),
            copy_buffers: RefCell::default(),
            swap: RefCell::new(None),
            wake: Cell::new(None),
            copied: Cell::new(0),
            state: Cell::new(State::Open),
            latest: Cell::new(0),
            actions: RefCell::default(),
            dead: Cell::new(false),
            closing: RefCell::default(),
            snapshots: RefCell::default(),
        });
        for (leg, replica, chans) in chans {
            let state = if in_sync.contains(&replica) { "in_sync" } else { "rebuilding" };
            let instance = instances.get(&leg).cloned().unwrap_or_default();
            device.attach(core, leg, (replica, instance), chans, state);
        }
        tracing::info!(mirror = device.name, joiners = joiners.len(), "mirror opened");
        device.input(core, Input::Tick);
        Ok(device)
    }

    fn attach(
        self: &Rc<Self>,
        core: &Core,
        leg: LegId,
        (replica, instance): (String, String),
        chans: LegChans,
        state: &'static str,
    ) {
        let weak = Rc::downgrade(self);
        let watcher = Rc::new(move |core: &Core, path: PathState| {
            let Some(device) = weak.upgrade() else { return };
            // Changes of a path may be told from inside a submit: the core takes them from the loop.
            core.defer(move |core| device.path_changed(core, leg, path));
        });
        chans.data.watch_path(core, watcher);
        self.open_port(leg, &chans.data);
        let fresh = Leg { replica, chans, state, instance, next_instance: None, copied: 0, told: 0 };
        self.legs.borrow_mut().insert(leg, fresh);
    }

    fn path_changed(self: &Rc<Self>, core: &Core, leg: LegId, path: PathState) {
        let is_up = path == PathState::Up;
        let changed = {
            let mut legs = self.legs.borrow_mut();
            let Some(leg) = legs.get_mut(&leg) else { return };
            let next = if is_up { leg.next_instance.take() } else { None };
            next.inspect(|instance| leg.instance.clone_from(instance))
        };
        let cache_lost = changed.is_some();
        if let Some(instance) = changed {
            self.input(core, Input::LegInstance { leg, instance });
        }
        match path {
            PathState::Up => self.input(core, Input::LegBack { leg, cache_lost }),
            PathState::Down | PathState::Refused => self.input(core, Input::LegLost { leg, announced: false }),
        }
    }

    /// Adds a connected replica that is to be rebuilt, under the first free number from `first` on (so that a number is
    /// not used again soon); false when all are taken.
    pub fn add_leg(
        self: &Rc<Self>,
        core: &Core,
        first: u32,
        replica: mirror_core::ReplicaId,
        (local, instance): (bool, String),
        chans: LegChans,
    ) -> bool {
        let count = mirror_core::LEGS_MAX as u32;
        let free = (0..count).map(|n| LegId((first + n) % count)).find(|leg| !self.legs.borrow().contains_key(leg));
        let Some(leg) = free else {
            chans.close(core);
            return false;
        };
        let meta = chans.meta.is_some();
        self.attach(core, leg, (replica.to_string(), instance.clone()), chans, "rebuilding");
        self.input(core, Input::AddLeg { leg, replica, local, meta });
        self.input(core, Input::LegInstance { leg, instance });
        true
    }

    /// The next session of a replica's leg finds this instance: what was not flushed before is lost if it is another one
    /// than now (rule 1). False without such a leg.
    pub fn set_instance(self: &Rc<Self>, core: &Core, replica: &str, instance: &str) -> bool {
        let found = {
            let mut legs = self.legs.borrow_mut();
            let Some((id, leg)) = legs.iter_mut().find(|(_, l)| l.replica == replica) else { return false };
            leg.next_instance = (leg.instance != instance).then(|| instance.to_owned());
            (*id, leg.next_instance.is_some())
        };
        let (id, changed) = found;
        if changed && !self.machine.borrow().status().lost.contains(&id) {
            // A session that seems to be there is of a time that is over.
            self.reset_leg(core, id);
        }
        true
    }

    /// No host is left that was attached before the mirror was made (rule 1).
    pub fn hosts_detached(self: &Rc<Self>, core: &Core) {
        self.input(core, Input::HostsDetached);
    }

    /// Takes a replica out in order.
    pub fn remove_leg(self: &Rc<Self>, core: &Core, replica: &str) -> bool {
        let leg = self.legs.borrow().iter().find(|(_, l)| l.replica == replica).map(|(id, _)| *id);
        if let Some(leg) = leg {
            self.input(core, Input::RemoveLeg { leg });
        }
        leg.is_some()
    }

    /// The agent's answer to a swap; false when no such swap is waiting.
    pub fn swap_answer(self: &Rc<Self>, core: &Core, swap: u64, outcome: SwapOutcome) -> bool {
        let waiting = {
            let mut slot = self.swap.borrow_mut();
            slot.take_if(|p| p.swap.0 == swap)
        };
        let Some(pending) = waiting else { return false };
        core.cancel(pending.timer);
        self.input(core, Input::SwapAnswer { swap: pending.swap, outcome });
        true
    }

    /// Drains, flushes and records the clean close; resolves when that is done or can no longer be.
    pub fn close(self: &Rc<Self>, core: &Core) -> futures::channel::oneshot::Receiver<()> {
        let (sender, receiver) = futures::channel::oneshot::channel();
        if matches!(self.state.get(), State::Closed | State::Stopped) {
            let _ = sender.send(());
            return receiver;
        }
        self.closing.borrow_mut().push(sender);
        if self.state.get() == State::Open {
            self.set_state(core, State::Closing, "closing");
        }
        self.input(core, Input::Close);
        receiver
    }

    /// Ends the device at once: hosts are answered with a path error, legs are let go.
    pub fn destroy(self: &Rc<Self>, core: &Core) {
        if let Some(timer) = self.wake.take() {
            core.cancel(timer);
        }
        if let Some(pending) = self.swap.borrow_mut().take() {
            core.cancel(pending.timer);
        }
        self.state.set(State::Stopped);
        self.dead.set(true);
        let hosts: Vec<Io> = self.hosts.borrow_mut().drain().chain(self.waiting.borrow_mut().drain(..)).collect();
        for io in hosts {
            core.complete(io, Status::INTERNAL_PATH_ERROR);
        }
        self.ports.borrow_mut().clear();
        for leg in std::mem::take(&mut *self.legs.borrow_mut()).into_values() {
            leg.chans.close(core);
        }
        self.closing.borrow_mut().clear();
        self.snapshots.borrow_mut().clear();
    }

    /// The state for RPC answers.
    pub fn describe(&self) -> Value {
        let machine = self.machine.borrow();
        let status = machine.status();
        let legs: Vec<Value> = self
            .legs
            .borrow()
            .iter()
            .map(|(id, leg)| {
                let lost = status.lost.contains(id);
                let rebuild = status.rebuilds.iter().find(|r| r.leg == *id);
                let total = rebuild.map_or(status.config.size_blocks, |r| r.total);
                let (copied, skipped) = rebuild.map_or((leg.copied, 0), |r| (r.copied, r.skipped));
                json!({ "replica": leg.replica, "bdev_name": leg.chans.data.bdev().info().name,
                    "meta_bdev_name": leg.chans.meta.as_ref().map(|meta| meta.bdev().info().name),
                    "instance": leg.next_instance.as_ref().unwrap_or(&leg.instance),
                    "state": if lost { "lost" } else { leg.state }, "copied_blocks": copied, "total_blocks": total,
                    "skipped_blocks": skipped })
            })
            .collect();
        json!({ "name": self.name, "state": self.state.get().word(),
            "config": ConfigJson::of(&status.config, self.block_size), "legs": legs,
            "pending_swap": self.swap.borrow().as_ref().map(|p| p.value.clone()), "inflight": status.inflight,
            "frozen": status.frozen, "equalising": status.equalising, "held_reads": status.held_reads,
            "hosts_must_detach": status.hosts_must_detach,
            "inherited_regions": status.inherited_regions, "live_regions": status.live_regions,
            "meta_writes": status.meta_writes, "copied_blocks": self.copied.get() })
    }

    /// Takes an I/O of a host.
    pub fn submit(self: &Rc<Self>, core: &Core, io: Io) {
        let op = match io.op {
            IoOp::Read => Op::Read,
            IoOp::Write { fua } => Op::Write { fua },
            IoOp::Flush => Op::Flush,
            IoOp::Unmap => Op::Unmap,
            IoOp::WriteZeroes => Op::WriteZeroes,
            IoOp::Reset => return core.complete(io, Status::SUCCESS),
            IoOp::Compare => return core.complete(io, Status::INVALID_OPCODE.with_dnr()),
        };
        if self.state.get() == State::Stopped {
            return core.complete(io, Status::INTERNAL_PATH_ERROR);
        }
        let (lba, Ok(blocks)) = (io.lba, u32::try_from(io.blocks)) else {
            return core.complete(io, Status::INVALID_FIELD.with_dnr());
        };
        let id = HostId(self.hosts.borrow_mut().insert(io) as u64);
        self.begin(core, id, op, (lba, blocks));
    }

    /// The time to tell the core: it never goes back.
    fn advance(&self, now: Nanos) -> Nanos {
        let now = now.max(self.latest.get());
        self.latest.set(now);
        now
    }

    fn input(self: &Rc<Self>, core: &Core, input: Input) {
        self.input_at(core, core.now(), input);
    }

    fn input_at(self: &Rc<Self>, core: &Core, now: Nanos, input: Input) {
        if self.dead.get() {
            return;
        }
        let now = self.advance(now);
        // Empty but for its room; an action that leads to an input at once finds a new one here.
        let mut out = self.actions.take();
        self.machine.borrow_mut().apply(now, input, &mut out);
        for action in out.drain(..) {
            self.act(core, action);
        }
        self.actions.replace(out);
        self.admit_waiting(core);
    }

    fn admit_waiting(self: &Rc<Self>, core: &Core) {
        if !self.waiting.borrow().is_empty() && !self.admitting.replace(true) {
            self.admit(core);
            self.admitting.set(false);
        }
    }

    /// Tells the core of I/O that waited, as long as it has room or has ended.
    fn admit(self: &Rc<Self>, core: &Core) {
        while self.state.get() != State::Open || self.machine.borrow().has_room() {
            let Some(io) = self.waiting.borrow_mut().pop_front() else { return };
            self.submit(core, io);
        }
    }

    fn act(self: &Rc<Self>, core: &Core, action: Action) {
        match action {
            Action::LegIo { leg, io, op, lba, blocks, payload } => {
                self.leg_io(core, (leg, io), op, (lba, blocks), payload);
            }
            Action::MetaIo { leg, io, op } => self.meta_io(core, (leg, io), op),
            Action::HostDone { id, result } => {
                let io = self.hosts.borrow_mut().try_remove(id.0 as usize);
                let Some(io) = io else { return };
                let mut waiting = self.waiting.borrow_mut();
                if result == Err(HostError::Busy) && waiting.len() < WAITING_MAX {
                    return waiting.push_back(io);
                }
                drop(waiting);
                core.complete(io, result.map_or_else(host_status, |()| Status::SUCCESS));
            }
            Action::Swap { swap, expect, next, reason } => {
                let value = json!({ "swap": swap.0, "next": ConfigJson::of(&next, self.block_size),
                    "expect_config_number": expect.config_number.0, "reason": format!("{reason:?}") });
                self.ask_swap(core, swap, value);
            }
            Action::WakeAt { at } => self.wake_at(core, at),
            Action::LegDrop { leg, reason } => self.drop_leg(core, leg, reason),
            Action::Progress { leg, copied, total } => self.progress(core, leg, copied, total),
            Action::Event(event) => self.tell(core, event),
            Action::Stopped { reason } => {
                tracing::warn!(mirror = self.name, ?reason, "mirror stopped");
                self.finish(core, State::Stopped, &format!("{reason:?}"));
            }
            Action::Closed => self.finish(core, State::Closed, "closed"),
            Action::SnapshotHeld { id, members } => self.snapshots.borrow_mut().held(&id, members),
            Action::SnapshotDone { id, result } => self.snapshots.borrow_mut().done(&id, result),
        }
    }

    fn leg_io(
        self: &Rc<Self>,
        core: &Core,
        (leg, io): (LegId, IoId),
        op: Op,
        (lba, blocks): (u64, u32),
        payload: Payload,
    ) {
        let (op, blocks) = (leg_op(op), if op == Op::Flush { 0 } else { blocks });
        let bufs = match (op, payload) {
            (IoOp::Read | IoOp::Write { .. }, Payload::Host(id)) => self.host_bufs(id),
            (IoOp::Read | IoOp::Write { .. }, Payload::Copy(slot)) => self.copy_bufs(slot, blocks),
            (IoOp::Read, Payload::Probe) => {
                smallvec::smallvec![Buf::alloc_unpooled(self.block_size as usize).into_slice()]
            }
            _ => Bufs::new(),
        };
        // What is copied often is a hole. Told as zeroes it stays one, and fits on a disk that is full.
        let is_copy = matches!((op, payload), (IoOp::Write { .. }, Payload::Copy(_)));
        if is_copy {
            self.copied.set(self.copied.get() + u64::from(blocks));
        }
        let (op, bufs) =
            if is_copy && bufs.iter().all(is_zero) { (IoOp::WriteZeroes, Bufs::new()) } else { (op, bufs) };
        self.send_data(core, (leg, io), op, (lba, u64::from(blocks)), bufs);
    }

    fn send(
        self: &Rc<Self>,
        core: &Core,
        chan: &Chan,
        (leg, io, part): (LegId, IoId, Part),
        op: IoOp,
        (lba, blocks): (u64, u64),
        bufs: Bufs,
    ) {
        let run = LegRun { leg, io, part, sent: core.now(), asked: 0 };
        let tag = self.runs.borrow_mut().insert(run) as u64;
        chan.submit(core, Io::new(op, lba, blocks, bufs, Rc::clone(self) as Rc<dyn IoSink>, tag));
    }

    /// Answers an I/O that cannot be sent, from the loop.
    fn refuse(self: &Rc<Self>, core: &Core, (leg, io): (LegId, IoId), error: LegError) {
        let device = Rc::clone(self);
        core.defer(move |core| device.input(core, Input::LegDone { leg, io, result: Err(error) }));
    }

    fn data_chan(&self, leg: LegId) -> Option<Chan> {
        self.legs.borrow().get(&leg).map(|l| l.chans.data.clone())
    }

    /// Ends the session of a leg; whatever follows is told as changes of its path.
    fn reset_leg(self: &Rc<Self>, core: &Core, leg: LegId) {
        if let Some(chan) = self.data_chan(leg) {
            let sink = Rc::clone(self) as Rc<dyn IoSink>;
            chan.submit(core, Io::new(IoOp::Reset, 0, 0, Bufs::new(), sink, NO_RUN));
        }
    }

    fn host_bufs(&self, id: HostId) -> Bufs {
        self.hosts.borrow().get(id.0 as usize).map(|io| share(&io.bufs)).unwrap_or_default()
    }

    fn copy_bufs(&self, slot: CopySlot, blocks: u32) -> Bufs {
        let window = self.machine_window_bytes();
        let mut buffers = self.copy_buffers.borrow_mut();
        let buffer = buffers.entry(slot).or_insert_with(|| Buf::alloc_unpooled(window).into_slice());
        smallvec::smallvec![buffer.slice(..blocks as usize * self.block_size as usize)]
    }

    fn machine_window_bytes(&self) -> usize {
        // Repairs of a host's range use these buffers too, in parts of at most one window.
        self.machine.borrow().copy_window_blocks() as usize * self.block_size as usize
    }

    fn wake_at(self: &Rc<Self>, core: &Core, at: Nanos) {
        if let Some(timer) = self.wake.take() {
            core.cancel(timer);
        }
        let device = Rc::clone(self);
        let timer = core.after(
            at.saturating_sub(core.now()),
            Rc::new(move |core| {
                device.wake.set(None);
                device.input(core, Input::Tick);
            }),
        );
        self.wake.set(Some(timer));
    }

    fn ask_swap(self: &Rc<Self>, core: &Core, swap: SwapId, value: Value) {
        let device = Rc::clone(self);
        let unknown = Rc::new(move |core: &Core| {
            tracing::warn!(mirror = device.name, swap = swap.0, "no answer to a swap in time");
            device.swap_answer(core, swap.0, SwapOutcome::Unknown);
        });
        let timer = core.after(SWAP_DEADLINE_NS, unknown);
        self.event(core, "swap", value.clone());
        *self.swap.borrow_mut() = Some(PendingSwap { swap, value, timer });
    }

    fn drop_leg(&self, core: &Core, leg: LegId, reason: DropReason) {
        self.close_port(leg);
        let Some(dropped) = self.legs.borrow_mut().remove(&leg) else { return };
        dropped.chans.close(core);
        tracing::warn!(mirror = self.name, replica = dropped.replica, ?reason, "leg dropped");
        let fields = json!({ "replica": dropped.replica, "state": "out", "reason": format!("{reason:?}") });
        self.event(core, "leg", fields);
        let (name, replica) = (self.name.clone(), dropped.replica);
        core.post(CONTROL, move |core| super::leg_dropped(core, &name, &replica));
    }

    fn progress(&self, core: &Core, leg: LegId, copied: u64, total: u64) {
        let mut legs = self.legs.borrow_mut();
        let Some(leg) = legs.get_mut(&leg) else { return };
        leg.copied = copied;
        // Windows are small; a reader wants to see movement, and the ring of events has room for other things.
        if copied < total && core.now().saturating_sub(leg.told) < PROGRESS_NS {
            return;
        }
        leg.told = core.now();
        let fields = json!({ "replica": leg.replica, "copied_blocks": copied, "total_blocks": total });
        drop(legs);
        self.event(core, "progress", fields);
    }

    fn tell(&self, core: &Core, event: Event) {
        let mut legs = self.legs.borrow_mut();
        let mut leg_event = |leg: LegId, state: &'static str, keep: bool| {
            let found = legs.get_mut(&leg)?;
            if keep {
                found.state = state;
            }
            Some(json!({ "replica": found.replica, "state": state }))
        };
        let fields = match event {
            Event::LegLost { leg } => leg_event(leg, "lost", false),
            Event::LegBack { leg, .. } => leg_event(leg, "back", false),
            Event::Joined { leg, .. } => leg_event(leg, "in_sync", true),
            Event::RebuildStarted { leg, .. } => leg_event(leg, "rebuilding", true),
            other => {
                tracing::info!(mirror = self.name, event = ?other, "mirror event");
                drop(legs);
                let state = json!({ "state": self.state.get().word(), "reason": format!("{other:?}") });
                return self.event(core, "mirror_state", state);
            }
        };
        drop(legs);
        if let Some(fields) = fields {
            tracing::info!(mirror = self.name, %fields, "leg event");
            self.event(core, "leg", fields);
        }
    }

    fn finish(&self, core: &Core, state: State, reason: &str) {
        self.set_state(core, state, reason);
        for waiter in self.closing.borrow_mut().drain(..) {
            let _ = waiter.send(());
        }
    }

    fn set_state(&self, core: &Core, state: State, reason: &str) {
        self.state.set(state);
        self.event(core, "mirror_state", json!({ "state": state.word(), "reason": reason }));
    }

    fn event(&self, core: &Core, kind: &'static str, fields: Value) {
        let name = self.name.clone();
        core.post(CONTROL, move |core| core.local(|| EventRing::new(core.clone())).push(kind, &name, fields));
    }
}

impl Device {
    /// Asks a leg that has answered late whether its session still holds; its answer then counts instead.
    fn ask_again(self: &Rc<Self>, core: &Core, run: LegRun) {
        let LegRun { leg, io, part, asked, .. } = run;
        let Some(chan) = self.data_chan(leg) else {
            return self.input(core, Input::LegDone { leg, io, result: Err(LegError::Gone) });
        };
        let run = LegRun { leg, io, part, sent: core.now(), asked: asked + 1 };
        let tag = self.runs.borrow_mut().insert(run) as u64;
        let into = smallvec::smallvec![Buf::alloc_unpooled(self.block_size as usize).into_slice()];
        chan.submit(core, Io::new(IoOp::Read, 0, 1, into, Rc::clone(self) as Rc<dyn IoSink>, tag));
    }
}

/// Whether all bytes are zero; data mostly shows in the first few.
fn is_zero(buf: &BufSlice) -> bool {
    let mut chunk = [0; 4096];
    let mut at = 0;
    while at < buf.len() {
        let count = chunk.len().min(buf.len() - at);
        buf.copy_to(at, &mut chunk[..count]);
        if chunk[..count].iter().any(|byte| *byte != 0) {
            return false;
        }
        at += count;
    }
    true
}

impl IoSink for Device {
    fn io_done(self: Rc<Self>, core: &Core, tag: u64, status: IoStatus) {
        let run = self.runs.borrow_mut().try_remove(tag as usize);
        if let Some(run) = run {
            self.run_done(core, run, status);
        }
    }
}

impl Device {
    /// Takes the end of an I/O of a leg.
    fn run_done(self: &Rc<Self>, core: &Core, run: LegRun, status: IoStatus) {
        if status.is_success() && matches!(run.part, Part::MetaWrite) && self.flush_meta(core, run.leg, run.io) {
            return;
        }
        // Not the time of the turn: the lease of reads is judged by it, and this process may have been stopped in between.
        let now = core.completion_clock();
        let late = now.saturating_sub(run.sent) > LATE_NS;
        if status.is_success() && late && run.asked < QUESTIONS_MAX {
            return self.ask_again(core, run);
        }
        let (leg, io, result) = (run.leg, run.io, leg_result(status));
        if result == Err(LegError::Gone) && !status.is(Status::HOST_PATHING_ERROR) {
            // Said by the other side while the session lives: a session that is trusted no more has to end, so that its
            // end and its successor are told, and the leg is not waited for in vain.
            self.reset_leg(core, leg);
        }
        match (run.part, result) {
            (Part::MetaRead(into), Ok(())) => {
                let mut data = vec![0; into.len()];
                into.copy_to(0, &mut data);
                self.input_at(core, now, Input::MetaRead { leg, io, data: data.into() });
            }
            (_, result) => self.input_at(core, now, Input::LegDone { leg, io, result }),
        }
    }
}
