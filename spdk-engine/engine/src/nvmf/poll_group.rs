//! The I/O queues of one data core, and the namespaces they use.
//!
//! *What it is.* [`PollGroup`] is core-local. A queue comes from the control core by [`adopt`] and lives here until its
//! connection is lost or [`close`] asks for its end. Namespaces are opened once per subsystem and core, for as long as
//! the core has a queue of that subsystem.
//!
//! *Invariants.* No state of the control core is touched: both sides talk by messages. A queue is reported gone
//! ([`super::queues::gone`]) only after its socket is closed *and* every I/O it had started has completed; a namespace
//! is reported removed only after every I/O on it has completed on this core.
//!
//! *When things fail.* A namespace that cannot be opened here is absent here and its commands fail; the error is
//! logged.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap};
use std::rc::Rc;
use std::sync::Arc;

use addax_hugepages::BufSlice;
use futures::channel::oneshot;
use nvme_wire::Status;

use super::ana::AnaStates;
use super::conn::{Conn, Owner};
use super::io;
use super::queues::{self, QueueKey};
use super::session::Session;
use super::wait::Waiters;
use crate::bdev::registry::Entry;
use crate::bdev::{Chan, IoSink, IoStatus};
use crate::reactor::Core;
use crate::reactor::driver::{NANOS_PER_MS, Nanos};
use crate::reactor::net::Stream;

/// How long a queue that the target closes may take to answer what executes before its socket is closed anyway.
const DRAIN_GRACE_NS: Nanos = 100 * NANOS_PER_MS;

/// A namespace as the control core tells it to the data cores.
#[derive(Debug, Clone)]
pub struct NamespaceUse {
    pub nsid: u32,
    pub entry: Arc<Entry>,
    pub ana_group: u32,
}

/// An I/O queue on its way to its data core: a connection whose Connect was accepted and is to be answered there.
#[derive(Debug)]
pub struct Adoption {
    pub key: QueueKey,
    pub subsystem: u64,
    pub namespaces: Vec<NamespaceUse>,
    pub ana: Option<Arc<AnaStates>>,
    pub stream: Box<dyn Stream>,
    pub session: Session,
    /// The slot of the Connect.
    pub connect: u16,
    pub cntlid: u16,
    /// Queue size, 0's based.
    pub sqsize: u16,
    pub flow_control: bool,
}

/// What `nvmf_get_stats` tells of one group.
#[derive(Debug, Clone, Copy, Default)]
pub struct GroupStats {
    pub io_qpairs: u64,
    pub current_io_qpairs: u64,
    pub completed_nvme_io: u64,
}

/// The I/O queues of a core.
#[derive(Default)]
pub struct PollGroup {
    queues: RefCell<HashMap<QueueKey, Rc<IoQueue>>>,
    tables: RefCell<HashMap<u64, Rc<NamespaceTable>>>,
    stats: Cell<GroupStats>,
}

/// The namespaces of one subsystem, opened on this core.
pub struct NamespaceTable {
    subsystem: u64,
    namespaces: RefCell<BTreeMap<u32, Rc<OpenNamespace>>>,
    queues: Cell<u32>,
}

/// A namespace opened on this core.
pub struct OpenNamespace {
    pub chan: Chan,
    pub block_shift: u32,
    pub ana_group: Cell<u32>,
    running: Cell<u32>,
    idle: Waiters,
}

impl OpenNamespace {
    fn open(core: &Core, namespace: &NamespaceUse) -> Option<Rc<Self>> {
        let chan = match namespace.entry.open(core) {
            Ok(chan) => chan,
            Err(error) => {
                tracing::error!(nsid = namespace.nsid, %error, "cannot open a namespace on this core");
                return None;
            }
        };
        let block_shift = chan.bdev().info().block_size.trailing_zeros();
        let ana_group = Cell::new(namespace.ana_group);
        Some(Rc::new(Self { chan, block_shift, ana_group, running: Cell::new(0), idle: Waiters::default() }))
    }
}

impl NamespaceTable {
    /// The namespace of that number.
    pub fn get(&self, nsid: u32) -> Option<Rc<OpenNamespace>> {
        self.namespaces.borrow().get(&nsid).cloned()
    }

    fn add(&self, core: &Core, namespace: &NamespaceUse) {
        if let Some(open) = OpenNamespace::open(core, namespace) {
            self.namespaces.borrow_mut().insert(namespace.nsid, open);
        }
    }
}

fn group(core: &Core) -> Rc<PollGroup> {
    core.local(PollGroup::default)
}

/// Takes over a queue and answers its Connect.
pub fn adopt(core: &Core, adoption: Adoption) {
    let group = group(core);
    let table = group.table(core, adoption.subsystem, &adoption.namespaces);
    table.queues.set(table.queues.get() + 1);
    let conn = Conn::new(adoption.stream, adoption.session);
    let queue = Rc::new(IoQueue {
        key: adoption.key,
        conn: Rc::clone(&conn),
        table,
        ana: adoption.ana,
        group: Rc::clone(&group),
        started: RefCell::new(Vec::new()),
        running: Cell::new(0),
        closing: Cell::new(false),
        settling: RefCell::default(),
    });
    group.queues.borrow_mut().insert(queue.key, Rc::clone(&queue));
    let mut stats = group.stats.get();
    stats.io_qpairs += 1;
    group.stats.set(stats);
    let (sqsize, flow_control) = (adoption.sqsize, adoption.flow_control);
    let dw0 = nvme_wire::fabrics::ConnectResponse { cntlid: adoption.cntlid, ..Default::default() }.dw0();
    conn.session().complete_connect(adoption.connect, false, sqsize, flow_control, dw0);
    conn.queue_flush(core);
    conn.start(core, queue);
}

/// Ends a queue; the control core hears when it is gone.
pub fn close(core: &Core, key: QueueKey) {
    let queue = group(core).queues.borrow().get(&key).cloned();
    if let Some(queue) = queue {
        queue.drain(core);
    }
}

/// Adds a namespace to the subsystem's queues of this core.
pub fn add_namespace(core: &Core, subsystem: u64, namespace: &NamespaceUse) {
    let table = group(core).tables.borrow().get(&subsystem).cloned();
    if let Some(table) = table {
        table.add(core, namespace);
    }
}

/// Puts a namespace of the subsystem's queues on this core into another ANA group.
pub fn set_ana_group(core: &Core, subsystem: u64, nsid: u32, group: u32) {
    let table = self::group(core).tables.borrow().get(&subsystem).cloned();
    if let Some(namespace) = table.and_then(|table| table.get(nsid)) {
        namespace.ana_group.set(group);
    }
}

/// Takes a namespace away; ready when all its I/O on this core has completed.
pub fn remove_namespace(core: &Core, subsystem: u64, nsid: u32) -> impl Future<Output = ()> + use<> {
    let table = group(core).tables.borrow().get(&subsystem).cloned();
    let namespace = table.and_then(|t| t.namespaces.borrow_mut().remove(&nsid));
    let core = core.clone();
    async move {
        if let Some(namespace) = namespace {
            namespace.idle.until(|| namespace.running.get() == 0).await;
            namespace.chan.close(&core);
        }
    }
}

/// Aborts a command that has not begun to execute; false when there is none.
pub fn abort(core: &Core, key: QueueKey, cid: u16) -> bool {
    let queue = group(core).queues.borrow().get(&key).cloned();
    queue.is_some_and(|queue| {
        let aborted = queue.conn.session().abort(cid);
        queue.conn.queue_flush(core);
        aborted
    })
}

/// Executes all that has arrived on a queue; ready when all of it has completed.
pub fn settle(core: &Core, key: QueueKey) -> impl Future<Output = ()> + use<> {
    let queue = group(core).queues.borrow().get(&key).cloned();
    let wait = queue.and_then(|queue| queue.settle(core));
    async move {
        if let Some(wait) = wait {
            let _ = wait.await;
        }
    }
}

/// Counters of this core.
pub fn stats(core: &Core) -> GroupStats {
    let group = group(core);
    GroupStats { current_io_qpairs: group.queues.borrow().len() as u64, ..group.stats.get() }
}

impl PollGroup {
    fn table(&self, core: &Core, subsystem: u64, namespaces: &[NamespaceUse]) -> Rc<NamespaceTable> {
        if let Some(table) = self.tables.borrow().get(&subsystem) {
            return Rc::clone(table);
        }
        let table = Rc::new(NamespaceTable { subsystem, namespaces: RefCell::default(), queues: Cell::new(0) });
        for namespace in namespaces {
            table.add(core, namespace);
        }
        self.tables.borrow_mut().insert(subsystem, Rc::clone(&table));
        table
    }

    fn forget(&self, core: &Core, queue: &IoQueue) {
        self.queues.borrow_mut().remove(&queue.key);
        let table = &queue.table;
        table.queues.set(table.queues.get() - 1);
        if table.queues.get() == 0 {
            self.tables.borrow_mut().remove(&table.subsystem);
            for namespace in std::mem::take(&mut *table.namespaces.borrow_mut()).into_values() {
                namespace.chan.close(core);
            }
        }
    }
}

/// Commands that were executing when [`settle`] was called, by slot, and whom to tell when they have ended.
struct Settling {
    slots: Vec<u16>,
    done: oneshot::Sender<()>,
}

/// An I/O queue.
pub struct IoQueue {
    key: QueueKey,
    pub conn: Rc<Conn>,
    pub table: Rc<NamespaceTable>,
    pub ana: Option<Arc<AnaStates>>,
    group: Rc<PollGroup>,
    /// The namespace of each command that executes, by slot.
    started: RefCell<Vec<Option<Rc<OpenNamespace>>>>,
    running: Cell<u32>,
    closing: Cell<bool>,
    settling: RefCell<Vec<Settling>>,
}

impl IoQueue {
    /// Books a command as executing on `namespace`; [`Self::finish`] must follow.
    pub fn begin(&self, slot: u16, namespace: &Rc<OpenNamespace>) {
        let mut started = self.started.borrow_mut();
        let index = usize::from(slot);
        if started.len() <= index {
            started.resize(index + 1, None);
        }
        started[index] = Some(Rc::clone(namespace));
        namespace.running.set(namespace.running.get() + 1);
        self.running.set(self.running.get() + 1);
    }

    /// A command booked by [`Self::begin`] has ended.
    pub fn finish(self: &Rc<Self>, core: &Core, slot: u16, status: IoStatus) {
        let namespace = self.started.borrow_mut().get_mut(usize::from(slot)).and_then(Option::take);
        let Some(namespace) = namespace else { return };
        namespace.running.set(namespace.running.get() - 1);
        if namespace.running.get() == 0 {
            namespace.idle.wake();
        }
        self.running.set(self.running.get() - 1);
        self.count_completion();
        if status.is(Status::INTERNAL_PATH_ERROR) {
            // This engine is no longer the volume's. A host would use up its retries on answers; a connection that
            // ends makes it keep the command and look for the volume again.
            self.closing.set(true);
            self.conn.close(core);
        }
        self.conn.complete(core, slot, status);
        if !self.settling.borrow().is_empty() {
            self.settle_slot(slot);
        }
        if self.closing.get() && self.running.get() == 0 {
            self.gone(core);
        }
    }

    /// Answers a command that never began.
    pub fn refuse(&self, core: &Core, slot: u16, status: IoStatus) {
        self.count_completion();
        self.conn.complete(core, slot, status);
    }

    fn count_completion(&self) {
        let mut stats = self.group.stats.get();
        stats.completed_nvme_io += 1;
        self.group.stats.set(stats);
    }

    fn settle(self: &Rc<Self>, core: &Core) -> Option<oneshot::Receiver<()>> {
        self.conn.pump_all(core);
        let started = self.started.borrow();
        let executing = started.iter().enumerate().filter(|(_, n)| n.is_some());
        let slots: Vec<u16> = executing.map(|(index, _)| index as u16).collect();
        if slots.is_empty() {
            return None;
        }
        let (done, wait) = oneshot::channel();
        self.settling.borrow_mut().push(Settling { slots, done });
        Some(wait)
    }

    fn settle_slot(&self, slot: u16) {
        let mut settling = self.settling.borrow_mut();
        for entry in settling.iter_mut() {
            entry.slots.retain(|s| *s != slot);
        }
        let (ended, rest): (Vec<_>, Vec<_>) = settling.drain(..).partition(|s| s.slots.is_empty());
        *settling = rest;
        for entry in ended {
            let _ = entry.done.send(());
        }
    }

    /// Lets what executes end and be answered, for a moment, then closes the socket. Without this, a host would see
    /// every drop as a PDU cut in the middle; hosts take that worse than an orderly end.
    fn drain(self: &Rc<Self>, core: &Core) {
        if self.closing.replace(true) {
            return;
        }
        self.conn.drain(core);
        if self.running.get() == 0 {
            return self.gone(core);
        }
        let conn = Rc::downgrade(&self.conn);
        core.after(DRAIN_GRACE_NS, Rc::new(move |core| conn.upgrade().into_iter().for_each(|c| c.close(core))));
    }

    /// Closes the socket now and reports the queue gone when its I/O has completed.
    fn end(self: &Rc<Self>, core: &Core) {
        if self.closing.replace(true) {
            return;
        }
        self.conn.close(core);
        if self.running.get() == 0 {
            self.gone(core);
        }
    }

    fn gone(&self, core: &Core) {
        self.conn.flush_and_close(core);
        self.group.forget(core, self);
        queues::gone(core, self.key);
    }
}

impl Owner for IoQueue {
    fn execute(self: Rc<Self>, core: &Core, _conn: &Rc<Conn>, slot: u16) {
        io::execute(&self, core, slot);
    }

    fn lost(self: Rc<Self>, core: &Core, _conn: &Rc<Conn>) {
        self.end(core);
    }
}

impl IoSink for IoQueue {
    fn io_done(self: Rc<Self>, core: &Core, tag: u64, status: IoStatus) {
        self.finish(core, tag as u16, status);
    }

    fn lend(&self, tag: u64, data: &BufSlice) -> bool {
        self.conn.session().lend(tag as u16, data)
    }
}
