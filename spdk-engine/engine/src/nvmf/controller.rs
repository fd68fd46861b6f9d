//! Controllers: what a host's Connect to the admin queue makes. Control core only.
//!
//! *States.* connected → enabled (CC.EN) ⇄ disabled → ended. A controller ends when its admin connection does, when its
//! keep alive timer expires, or when the target wants it to.
//!
//! *Invariants.* A controller is gone (see [`Controller::is_gone`]) only after all its I/O queues are closed and their
//! I/O has completed; until then it keeps its number. An ending controller takes no new queues.
//!
//! *When things fail.* I/O queues that do not drain within [`RESET_NS`] after a reset or shutdown set CSTS.CFS.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;

use nvme_wire::Status;
use nvme_wire::features::AsyncEvent;
use nvme_wire::property::{Capabilities, Configuration, ControllerStatus, Shutdown, VERSION_2_0, offset};

use super::address::Address;
use super::admin;
use super::ana::AnaStates;
use super::conn::{Conn, Owner};
use super::events::Events;
use super::features::Features;
use super::options::TransportOptions;
use super::poll_group;
use super::queues::{QueueKey, QueueRef};
use super::subsystem::Subsystem;
use super::target::Target;
use super::wait::Waiters;
use crate::reactor::Core;
use crate::reactor::driver::{NANOS_PER_MS, Nanos};
use crate::reactor::timer::TimerId;

/// How long I/O may take to drain after a reset or shutdown before the controller reports itself failed.
pub const RESET_NS: Nanos = 12_500 * NANOS_PER_MS;
/// Keep alive timeout of a discovery controller whose host asks for none.
const DISCOVERY_KEEP_ALIVE_MS: u32 = 120_000;

/// What a Connect to an admin queue says.
#[derive(Debug, Clone)]
pub struct Association {
    /// The host's name for itself.
    pub host: Rc<str>,
    pub hostid: [u8; 16],
    pub cntlid: u16,
    pub listen: Address,
    pub ana: Arc<AnaStates>,
    pub kato_ms: u32,
}

/// A controller; see the module.
pub struct Controller {
    pub target: Rc<Target>,
    pub subsystem: Rc<Subsystem>,
    pub options: TransportOptions,
    association: Association,
    conn: Rc<Conn>,
    pub features: Features,
    pub events: Events,
    cc: Cell<Configuration>,
    csts: Cell<ControllerStatus>,
    aqa: Cell<u32>,
    asq: Cell<u64>,
    acq: Cell<u64>,
    keep_alive_ms: Cell<u32>,
    last_keep_alive: Cell<Nanos>,
    keep_alive_timer: Cell<Option<TimerId>>,
    association_timer: Cell<Option<TimerId>>,
    queues: RefCell<BTreeMap<u16, QueueRef>>,
    queues_changed: Waiters,
    ending: Cell<bool>,
    gone: Cell<bool>,
}

impl std::fmt::Debug for Controller {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Controller").field("cntlid", &self.cntlid()).field("host", &self.host()).finish()
    }
}

impl Controller {
    /// A controller of `subsystem` whose admin queue is `conn`.
    pub fn new(
        core: &Core,
        target: Rc<Target>,
        subsystem: Rc<Subsystem>,
        options: TransportOptions,
        association: Association,
        conn: Rc<Conn>,
    ) -> Rc<Self> {
        let discovery = subsystem.is_discovery();
        let kato_ms = options.keep_alive_ms(association.kato_ms);
        let keep_alive_ms = if discovery && kato_ms == 0 { DISCOVERY_KEEP_ALIVE_MS } else { kato_ms };
        let events = if discovery {
            Events::for_discovery(kato_ms != 0)
        } else {
            Events::for_io(subsystem.config.ana_reporting)
        };
        let controller = Rc::new(Self {
            features: Features::new(association.hostid),
            events,
            target,
            subsystem,
            options,
            association,
            conn,
            cc: Cell::default(),
            csts: Cell::default(),
            aqa: Cell::new(0),
            asq: Cell::new(0),
            acq: Cell::new(0),
            keep_alive_ms: Cell::new(keep_alive_ms),
            last_keep_alive: Cell::new(core.now()),
            keep_alive_timer: Cell::new(None),
            association_timer: Cell::new(None),
            queues: RefCell::default(),
            queues_changed: Waiters::default(),
            ending: Cell::new(false),
            gone: Cell::new(false),
        });
        controller.arm_keep_alive(core);
        controller
    }

    pub fn cntlid(&self) -> u16 {
        self.association.cntlid
    }

    pub fn host(&self) -> &str {
        &self.association.host
    }

    pub fn hostid(&self) -> [u8; 16] {
        self.association.hostid
    }

    /// The listener that the admin queue came by.
    pub fn listen(&self) -> Address {
        self.association.listen
    }

    /// ANA states of that listener.
    pub fn ana(&self) -> &Arc<AnaStates> {
        &self.association.ana
    }

    /// The admin connection.
    pub fn conn(&self) -> &Rc<Conn> {
        &self.conn
    }

    pub fn is_discovery(&self) -> bool {
        self.subsystem.is_discovery()
    }

    /// Whether CC.EN is set.
    pub fn is_enabled(&self) -> bool {
        self.cc.get().enable
    }

    /// Whether it has ended or is about to.
    pub fn is_ending(&self) -> bool {
        self.ending.get()
    }

    /// Whether it has ended with all its I/O.
    pub fn is_gone(&self) -> bool {
        self.gone.get()
    }

    // I/O queues.

    /// Whether an I/O queue may be connected now.
    pub fn takes_queues(&self) -> bool {
        let cc = self.cc.get();
        !self.is_ending() && !self.is_discovery() && cc.enable && cc.shutdown == 0 && cc.iosqes == 6 && cc.iocqes == 4
    }

    pub fn has_qid(&self, qid: u16) -> bool {
        self.queues.borrow().contains_key(&qid)
    }

    /// Whether any of these queues is still here.
    pub fn has_any(&self, keys: &[QueueKey]) -> bool {
        self.queues.borrow().values().any(|q| keys.contains(&q.key))
    }

    /// All I/O queues by number.
    pub fn queues(&self) -> Vec<(u16, QueueRef)> {
        self.queues.borrow().iter().map(|(qid, q)| (*qid, *q)).collect()
    }

    /// An I/O queue was sent to its data core.
    pub fn queue_sent(&self, qid: u16, queue: QueueRef) {
        self.queues.borrow_mut().insert(qid, queue);
    }

    /// An I/O queue has ended and drained.
    pub fn queue_gone(&self, qid: u16, key: QueueKey) {
        let mut queues = self.queues.borrow_mut();
        if queues.get(&qid).is_some_and(|q| q.key == key) {
            queues.remove(&qid);
        }
        let none = queues.is_empty();
        drop(queues);
        self.queues_changed.wake();
        self.subsystem.changed.wake();
        if none && self.is_ending() {
            self.finish();
        }
    }

    /// Asks for the end of the I/O queues that `which` picks, and says which those are.
    pub fn close_queues(&self, core: &Core, which: impl Fn(&QueueRef) -> bool) -> Vec<QueueKey> {
        let picked: Vec<QueueRef> = self.queues.borrow().values().filter(|q| which(q)).copied().collect();
        for queue in &picked {
            let key = queue.key;
            core.post(queue.core, move |core| poll_group::close(core, key));
        }
        picked.into_iter().map(|q| q.key).collect()
    }

    // The end.

    /// Ends the controller: closes its connections and waits, in the background, for its I/O.
    pub fn end(self: &Rc<Self>, core: &Core, why: &str) {
        if self.ending.replace(true) {
            return;
        }
        tracing::info!(nqn = %self.subsystem.nqn(), cntlid = self.cntlid(), host = %self.host(), why, "controller ends");
        for timer in [self.keep_alive_timer.take(), self.association_timer.take()].into_iter().flatten() {
            core.cancel(timer);
        }
        self.conn.close(core);
        self.close_queues(core, |_| true);
        if self.queues.borrow().is_empty() {
            self.finish();
        }
    }

    fn finish(&self) {
        if !self.gone.replace(true) {
            self.subsystem.remove_controller(self);
        }
    }

    // Keep alive.

    /// The keep alive timeout in ms; 0 for none.
    pub fn keep_alive_ms(&self) -> u32 {
        self.keep_alive_ms.get()
    }

    /// Sets the keep alive timeout, which restarts the timer.
    pub fn set_keep_alive(self: &Rc<Self>, core: &Core, wish_ms: u32) {
        self.keep_alive_ms.set(self.options.keep_alive_ms(wish_ms));
        self.kept_alive(core);
        self.arm_keep_alive(core);
    }

    /// The host has sent a Keep Alive.
    pub fn kept_alive(&self, core: &Core) {
        self.last_keep_alive.set(core.now());
    }

    fn arm_keep_alive(self: &Rc<Self>, core: &Core) {
        if let Some(timer) = self.keep_alive_timer.take() {
            core.cancel(timer);
        }
        let period = Nanos::from(self.keep_alive_ms.get()) * NANOS_PER_MS;
        if period == 0 || self.is_ending() {
            return;
        }
        let weak = Rc::downgrade(self);
        let tick = move |core: &Core| {
            let Some(controller) = weak.upgrade() else { return };
            if core.now().saturating_sub(controller.last_keep_alive.get()) > period {
                controller.csts.set(ControllerStatus { fatal: true, ..controller.csts.get() });
                controller.end(core, "keep alive timer expired");
            } else {
                controller.arm_keep_alive(core);
            }
        };
        self.keep_alive_timer.set(Some(core.after(period, Rc::new(tick))));
    }

    // Events.

    /// Reports an event to the host, at once or with its next request.
    pub fn raise(&self, core: &Core, event: AsyncEvent) {
        if let Some((slot, completion)) = self.events.raise(event) {
            self.conn.complete(core, slot, completion);
        }
    }

    /// A namespace was added, removed or changed.
    pub fn namespace_changed(&self, core: &Core, nsid: u32) {
        self.events.note_changed(nsid);
        self.raise(core, AsyncEvent::NamespaceAttribute);
    }

    // Properties.

    /// Property Get.
    pub fn property(&self, at: u32, eight: bool) -> Result<u64, Status> {
        let wide = |base: u32, value: u64| match (at - base, eight) {
            (0, true) => Ok(value),
            (0, false) => Ok(value & 0xFFFF_FFFF),
            (4, false) => Ok(value >> 32),
            _ => Err(Status::CONNECT_INVALID_PARAMETERS),
        };
        match at {
            offset::CAP | 0x04 => wide(offset::CAP, self.capabilities()),
            offset::ASQ | 0x2C => wide(offset::ASQ, self.asq.get()),
            offset::ACQ | 0x34 => wide(offset::ACQ, self.acq.get()),
            _ if eight => Err(Status::CONNECT_INVALID_PARAMETERS),
            offset::VS => Ok(VERSION_2_0.into()),
            offset::CC => Ok(self.cc.get().raw().into()),
            offset::CSTS => Ok(self.csts.get().raw().into()),
            offset::NSSR => Ok(0),
            offset::AQA => Ok(self.aqa.get().into()),
            offset::CRTO => Ok(30),
            _ => Err(Status::CONNECT_INVALID_PARAMETERS),
        }
    }

    fn capabilities(&self) -> u64 {
        Capabilities { max_queue_entries: u32::from(self.options.max_queue_depth), ..Capabilities::default() }.raw()
    }

    /// Property Set.
    pub fn set_property(self: &Rc<Self>, core: &Core, at: u32, eight: bool, value: u64) -> Result<(), Status> {
        let wide = |base: u32, cell: &Cell<u64>| {
            let old = cell.get();
            let new = match (at - base, eight) {
                (0, true) => value,
                (0, false) => old & !0xFFFF_FFFF | value & 0xFFFF_FFFF,
                (4, false) => old & 0xFFFF_FFFF | value << 32,
                _ => return Err(Status::CONNECT_INVALID_PARAMETERS),
            };
            cell.set(new);
            Ok(())
        };
        match at {
            offset::ASQ | 0x2C => wide(offset::ASQ, &self.asq),
            offset::ACQ | 0x34 => wide(offset::ACQ, &self.acq),
            _ if eight => Err(Status::CONNECT_INVALID_PARAMETERS),
            offset::CC => self.configure(core, value as u32),
            offset::CSTS => {
                if ControllerStatus::from_raw(value as u32).subsystem_reset {
                    self.csts.set(ControllerStatus { subsystem_reset: false, ..self.csts.get() });
                }
                Ok(())
            }
            offset::AQA => {
                self.aqa.set(value as u32);
                Ok(())
            }
            _ => Err(Status::CONNECT_INVALID_PARAMETERS),
        }
    }

    fn configure(self: &Rc<Self>, core: &Core, raw: u32) -> Result<(), Status> {
        let (old, new) = (self.cc.get(), Configuration::from_raw(raw));
        if new.arbitration != old.arbitration || new.page_size != old.page_size {
            return Err(Status::CONNECT_INVALID_PARAMETERS);
        }
        self.cc.set(new);
        if new.shutdown != 0 && old.shutdown == 0 {
            self.begin_shutdown(core);
        } else if new.enable && !old.enable {
            if let Some(timer) = self.association_timer.take() {
                core.cancel(timer);
            }
            self.csts.set(ControllerStatus { ready: true, shutdown: Shutdown::Normal, ..self.csts.get() });
            self.kept_alive(core);
        } else if !new.enable && old.enable {
            self.begin_reset(core);
        }
        Ok(())
    }

    fn begin_shutdown(self: &Rc<Self>, core: &Core) {
        if let Some(timer) = self.keep_alive_timer.take() {
            core.cancel(timer);
        }
        self.csts.set(ControllerStatus { shutdown: Shutdown::InProgress, ..self.csts.get() });
        self.after_queues(core, |csts| ControllerStatus { shutdown: Shutdown::Complete, ..csts });
    }

    fn begin_reset(self: &Rc<Self>, core: &Core) {
        self.after_queues(core, |csts| ControllerStatus { ready: false, shutdown: Shutdown::Normal, ..csts });
    }

    /// Closes all I/O queues and changes CSTS by `then` once they have drained.
    fn after_queues(self: &Rc<Self>, core: &Core, then: impl FnOnce(ControllerStatus) -> ControllerStatus + 'static) {
        self.close_queues(core, |_| true);
        self.arm_association(core);
        if self.queues.borrow().is_empty() {
            self.csts.set(then(self.csts.get()));
            return;
        }
        let (controller, core) = (Rc::clone(self), core.clone());
        core.clone().spawn(async move {
            let none = || controller.queues.borrow().is_empty();
            if core.timeout(RESET_NS, controller.queues_changed.until(none)).await.is_none() {
                tracing::error!(cntlid = controller.cntlid(), "I/O did not drain after a reset: controller failed");
                controller.csts.set(ControllerStatus { fatal: true, ..controller.csts.get() });
                controller.queues_changed.until(none).await;
            }
            controller.csts.set(then(controller.csts.get()));
        });
    }

    fn arm_association(self: &Rc<Self>, core: &Core) {
        let weak = Rc::downgrade(self);
        let end = move |core: &Core| {
            if let Some(controller) = weak.upgrade() {
                controller.end(core, "not enabled again in time after a reset or shutdown");
            }
        };
        let timer = core.after(self.options.association_timeout(), Rc::new(end));
        if let Some(old) = self.association_timer.replace(Some(timer)) {
            core.cancel(old);
        }
    }
}

impl Owner for Controller {
    fn execute(self: Rc<Self>, core: &Core, _conn: &Rc<Conn>, slot: u16) {
        admin::execute(&self, core, slot);
    }

    fn lost(self: Rc<Self>, core: &Core, _conn: &Rc<Conn>) {
        self.end(core, "admin connection closed");
    }
}
