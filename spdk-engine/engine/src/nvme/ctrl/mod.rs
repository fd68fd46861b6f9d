//! An attached controller on the control core: its sessions, its namespaces, and how it is lost and found again.
//!
//! *What it is.* A [`Ctrl`] owns the admin queue and knows which cores have a queue ([`super::queue`]). A *session* is
//! the admin queue with all I/O queues made after it; whatever part of it is lost, all of it ends, as with SPDK.
//!
//! *Flow of a loss.* Every core closes its connection and says so, the admin queue is closed, and only then a new
//! session is tried: at once, and then as [`Timeouts`] say (`recovery`). It serves I/O when every core's queue is connected.
//!
//! *Invariants.* At most one session exists, and it is named by a number that rises. No connection of a new session is
//! made before every connection of the old one was closed. A controller that refuses the host is not asked again
//! sooner than the reconnect delay.
//!
//! *When things fail.* Without timeouts there is one attempt, and none with `addax_no_replay`; if it fails, I/O fails with
//! a path error until a reset is asked for. Past `fast_io_fail_timeout_sec` I/O fails while attempts go on; past `ctrlr_loss_timeout_sec` the
//! controller and its devices are removed.

mod recovery;
mod session;
mod table;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;

use futures::channel::oneshot;
use futures::future::join_all;
use serde_json::Value;

pub use self::table::{Controllers, State};
use super::device::NvmeBdev;
use super::host::{Controller, ControllerParams, HostError};
use super::options::{Attach, Timeouts};
use super::queue::{self, Down};
use super::shared::Shared;
use crate::app::App;
use crate::reactor::driver::{NANOS_PER_S, Nanos};
use crate::reactor::{Core, CoreId};

/// How long a controller whose I/O makes no progress may take to give a sign of life.
const SIGN_OF_LIFE_NS: Nanos = NANOS_PER_S;

/// A core that uses the controller.
#[derive(Debug)]
struct Seat {
    core: CoreId,
    instance: u64,
    qid: Option<u16>,
}

/// An attached controller; see the module.
pub struct Ctrl {
    app: App,
    pub shared: Arc<Shared>,
    pub attach: Attach,
    pub params: ControllerParams,
    pub timeouts: Timeouts,
    /// SPDK's JSON of the path.
    pub trid: Value,
    generate_uuids: bool,
    pub(super) state: Cell<State>,
    session: Cell<u64>,
    /// The session that was lost while it was not in use yet.
    broken: Cell<u64>,
    controller: RefCell<Option<Rc<Controller>>>,
    seats: RefCell<Vec<Seat>>,
    /// The queue identifier given out last.
    last_qid: Cell<u16>,
    pub(super) bdevs: RefCell<BTreeMap<u32, Arc<NvmeBdev>>>,
    wake: RefCell<Option<oneshot::Sender<()>>>,
    waiters: RefCell<Vec<oneshot::Sender<bool>>>,
    /// I/O fails at present, also that of cores which come now.
    failing: Cell<bool>,
    /// The last session that was put to use.
    restored: Cell<u64>,
    /// The session whose namespaces are being read; 0 for none.
    scanning: Cell<u64>,
    scan_again: Cell<bool>,
}

impl std::fmt::Debug for Ctrl {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ctrl").field("name", &self.shared.name).field("state", &self.state.get()).finish()
    }
}

/// What an attach has decided on.
#[derive(Debug)]
pub struct Plan {
    pub attach: Attach,
    pub params: ControllerParams,
    pub timeouts: Timeouts,
    pub trid: Value,
    pub retries: i32,
    pub generate_uuids: bool,
}

impl Ctrl {
    /// Attaches a controller: connects, and registers its namespaces. It is in the table from the beginning, so that a
    /// second call with the same name is refused.
    ///
    /// # Errors
    /// When the first session cannot be made; nothing is left of it then.
    pub async fn attach(app: &App, plan: Plan) -> Result<Rc<Self>, HostError> {
        let table = Controllers::of(app.core());
        let name = plan.attach.name.clone();
        let id = table.fresh_id();
        let ctrl = Rc::new(Self {
            app: app.clone(),
            shared: Arc::new(Shared::new(id, name.clone(), plan.attach.addax_no_replay, plan.retries)),
            attach: plan.attach,
            params: plan.params,
            timeouts: plan.timeouts,
            trid: plan.trid,
            generate_uuids: plan.generate_uuids,
            state: Cell::new(State::Resetting),
            session: Cell::new(0),
            broken: Cell::new(0),
            controller: RefCell::new(None),
            seats: RefCell::default(),
            last_qid: Cell::new(0),
            bdevs: RefCell::default(),
            wake: RefCell::new(None),
            waiters: RefCell::default(),
            failing: Cell::new(false),
            restored: Cell::new(0),
            scanning: Cell::new(0),
            scan_again: Cell::new(false),
        });
        table.by_name.borrow_mut().insert(name.clone(), Rc::clone(&ctrl));
        match ctrl.bring_up().await {
            Ok(()) => {
                tracing::info!(controller = name, address = %ctrl.params.address, "attached");
                Ok(ctrl)
            }
            Err(error) => {
                ctrl.state.set(State::Deleting);
                ctrl.remove().await;
                Err(error)
            }
        }
    }

    pub(super) fn core(&self) -> &Core {
        self.app.core()
    }

    pub(super) fn app(&self) -> &App {
        &self.app
    }

    pub(super) fn controller(&self) -> Option<Rc<Controller>> {
        self.controller.borrow().clone()
    }

    pub(super) fn generates_uuids(&self) -> bool {
        self.generate_uuids
    }

    /// Begins a scan of the present session and names it; none when one runs already, which is made to look again.
    pub(super) fn begin_scan(&self) -> Option<u64> {
        let session = self.session.get();
        let free = self.scanning.replace(session) != session;
        self.scan_again.set(!free);
        free.then_some(session)
    }

    /// A scan has read the namespaces: whether it is to look again, or none when its session is over.
    pub(super) fn end_scan(&self, session: u64) -> Option<bool> {
        if self.scanning.get() != session {
            return None;
        }
        self.scanning.set(0);
        Some(self.scan_again.replace(false))
    }

    /// How it is.
    #[must_use]
    pub fn state(&self) -> State {
        self.state.get()
    }

    /// Whether it was attached successfully and is not being removed.
    #[must_use]
    pub fn is_attached(&self) -> bool {
        self.restored.get() > 0 && !self.is_deleting()
    }

    /// Names of its devices, by namespace.
    #[must_use]
    pub fn device_names(&self) -> Vec<String> {
        self.bdevs.borrow().values().map(|device| device.name().to_owned()).collect()
    }

    /// Controller identifier of the present session.
    #[must_use]
    pub fn cntlid(&self) -> Option<u16> {
        self.controller.borrow().as_ref().map(|c| c.cntlid())
    }

    /// Cores that have a queue.
    #[must_use]
    pub fn cores(&self) -> Vec<CoreId> {
        self.seats.borrow().iter().map(|s| s.core).collect()
    }

    fn is_deleting(&self) -> bool {
        self.state.get() == State::Deleting
    }

    /// Ends the session and makes a new one now; true when that succeeded.
    pub async fn reset(self: &Rc<Self>) -> bool {
        let (sender, outcome) = oneshot::channel();
        self.waiters.borrow_mut().push(sender);
        match self.state.get() {
            State::Enabled | State::Failed => self.start_recovery(),
            State::ReconnectDelayed => self.wake_up(),
            State::Resetting => {}
            State::Deleting => self.answer_waiters(false),
        }
        outcome.await.unwrap_or(false)
    }

    /// Removes the controller and its devices.
    pub async fn detach(self: &Rc<Self>) {
        let was = self.state.replace(State::Deleting);
        self.wake_up();
        if was != State::Enabled {
            self.post_all(Down::Failed);
        }
        self.remove().await;
    }

    async fn remove(self: &Rc<Self>) {
        self.answer_waiters(false);
        if self.controller.borrow().is_none() {
            self.post_all(Down::Failed);
        }
        let devices: Vec<_> = std::mem::take(&mut *self.bdevs.borrow_mut()).into_values().collect();
        let core = self.core().clone();
        let removing = devices.iter().map(|device| self.app.registry().unregister(&core, device.name()));
        for outcome in join_all(removing).await {
            if let Err(error) = outcome {
                tracing::debug!(controller = self.shared.name, %error, "device is gone already");
            }
        }
        let controller = self.controller.borrow_mut().take();
        self.end_session(Down::Failed).await;
        if let Some(controller) = controller {
            controller.shutdown(&core).await;
        }
        let table = Controllers::of(&core);
        let mut by_name = table.by_name.borrow_mut();
        if by_name.get(&self.shared.name).is_some_and(|c| Rc::ptr_eq(c, self)) {
            by_name.remove(&self.shared.name);
        }
    }
}

/// From a data core: it wants a queue.
pub fn want_queue(core: &Core, id: u64, from: CoreId, instance: u64) {
    let Some(ctrl) = Controllers::by_id(core, id) else {
        return core.post(from, move |core| queue::down(core, id, instance, Down::Failed));
    };
    let seat = Seat { core: from, instance, qid: None };
    if ctrl.failing.get() || ctrl.is_deleting() {
        ctrl.post_down(&seat, Down::Failed);
    }
    ctrl.seats.borrow_mut().push(seat);
    let controller = ctrl.controller.borrow().clone();
    if let Some(controller) = controller.filter(|_| ctrl.state.get() == State::Enabled) {
        core.spawn(async move {
            let session = ctrl.session.get();
            if let Err(error) = ctrl.open_seats(session, &controller).await {
                ctrl.session_lost(session, &error.to_string());
            }
        });
    }
}

/// From a data core: it needs its queue no more and has closed it.
pub fn release_queue(core: &Core, id: u64, from: CoreId, instance: u64) {
    if let Some(ctrl) = Controllers::by_id(core, id) {
        ctrl.seats.borrow_mut().retain(|s| s.core != from || s.instance != instance);
    }
}

/// From a data core: its connection of that session is lost.
pub fn lost(core: &Core, id: u64, session: u64, loss: &str) {
    if let Some(ctrl) = Controllers::by_id(core, id) {
        ctrl.session_lost(session, loss);
    }
}

/// From a data core: I/O of that session makes no progress. A controller that gives no sign of life either is lost.
pub fn ask(core: &Core, id: u64, session: u64) {
    let Some(ctrl) = Controllers::by_id(core, id) else { return };
    let controller = ctrl.controller().filter(|_| ctrl.state.get() == State::Enabled && ctrl.session.get() == session);
    if let Some(controller) = controller {
        controller.ask(core, SIGN_OF_LIFE_NS);
    }
}

/// From a data core: an I/O asks for a reset.
pub async fn reset(core: Core, id: u64) -> bool {
    match Controllers::by_id(&core, id) {
        Some(ctrl) => ctrl.reset().await,
        None => false,
    }
}
