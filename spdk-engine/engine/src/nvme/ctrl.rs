//! An attached controller on the control core: its sessions, its namespaces, and how it is lost and found again.
//!
//! *What it is.* A [`Ctrl`] owns the admin queue and knows which cores have a queue ([`super::queue`]). A *session* is
//! the admin queue with all I/O queues made after it; whatever part of it is lost, all of it ends, as with SPDK.
//!
//! *Flow of a loss.* Every core closes its connection and says so, the admin queue is closed, and only then a new
//! session is tried: at once, and then as [`Timeouts`] say. It serves I/O when every core's queue is connected.
//!
//! *Invariants.* At most one session exists, and it is named by a number that rises. No connection of a new session is
//! made before every connection of the old one was closed. A controller that refuses the host is not asked again
//! sooner than the reconnect delay.
//!
//! *When things fail.* Without timeouts there is one attempt; if it fails, I/O fails with a path error until a reset is
//! asked for. Past `fast_io_fail_timeout_sec` I/O fails while attempts go on; past `ctrlr_loss_timeout_sec` the
//! controller and its devices are removed.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::{Rc, Weak};
use std::sync::Arc;

use futures::channel::oneshot;
use futures::future::join_all;
use nvme_wire::features::AsyncEvent;
use serde_json::Value;

use super::device::NvmeBdev;
use super::host::controller::connect_socket;
use super::host::{Controller, ControllerEvents, ControllerParams, HostError, Loss};
use super::options::{Attach, Options, Timeouts};
use super::queue::{self, Down};
use super::shared::Shared;
use crate::app::App;
use crate::reactor::driver::{NANOS_PER_MS, NANOS_PER_S, Nanos};
use crate::reactor::{Core, CoreId};

/// First wait between attempts for a caller that replays by itself and so has to know soon; doubles up to the
/// reconnect delay.
const QUICK_RETRY_NS: Nanos = 50 * NANOS_PER_MS;
/// How long a core may take to close its connection before it is given up on.
const CLOSE_NS: Nanos = 5 * NANOS_PER_S;

/// All attached controllers, and the module's options.
#[derive(Default)]
pub struct Controllers {
    pub by_name: RefCell<BTreeMap<String, Rc<Ctrl>>>,
    pub options: RefCell<Options>,
    next_id: Cell<u64>,
}

impl Controllers {
    /// The table of the control core.
    pub fn of(core: &Core) -> Rc<Self> {
        core.local(Self::default)
    }

    /// The controller of that name.
    #[must_use]
    pub fn find(&self, name: &str) -> Option<Rc<Ctrl>> {
        self.by_name.borrow().get(name).cloned()
    }

    fn by_id(core: &Core, id: u64) -> Option<Rc<Ctrl>> {
        Self::of(core).by_name.borrow().values().find(|c| c.shared.id == id).cloned()
    }

    /// An identifier that was not used before.
    pub fn fresh_id(&self) -> u64 {
        self.next_id.set(self.next_id.get() + 1);
        self.next_id.get()
    }
}

/// How a controller is, in SPDK's words.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    Enabled,
    Resetting,
    ReconnectDelayed,
    Failed,
    Deleting,
}

impl State {
    /// The word in RPC answers.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Enabled => "enabled",
            Self::Resetting => "resetting",
            Self::ReconnectDelayed => "reconnect_is_delayed",
            Self::Failed => "failed",
            Self::Deleting => "deleting",
        }
    }
}

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

    /// Makes a new session and puts it to use.
    async fn bring_up(self: &Rc<Self>) -> Result<(), HostError> {
        let session = self.session.get() + 1;
        self.session.set(session);
        let made = self.make_session(session).await;
        if made.is_err() {
            let why = if self.failing.get() { Down::Failed } else { Down::Reconnecting };
            self.end_session(why).await;
        }
        made
    }

    async fn make_session(self: &Rc<Self>, session: u64) -> Result<(), HostError> {
        let core = self.core().clone();
        let net = Rc::clone(self.app.net());
        let controller = Controller::connect(&core, &*net, self.params.clone()).await?;
        *self.controller.borrow_mut() = Some(Rc::clone(&controller));
        self.check(session)?;
        self.shared.learn(&controller, &self.trid);
        controller.watch(&core, Rc::new(SessionEvents { ctrl: Rc::downgrade(self), session }));
        self.scan(&controller).await?;
        self.open_seats(session, &controller).await?;
        self.check(session)?;
        self.failing.set(false);
        self.restored.set(session);
        self.state.set(State::Enabled);
        Ok(())
    }

    /// Whether the session is still worth going on with.
    fn check(&self, session: u64) -> Result<(), HostError> {
        if self.is_deleting() || self.session.get() != session || self.broken.get() == session {
            return Err(HostError::Lost { what: "new session", loss: Loss::Closed });
        }
        Ok(())
    }

    /// Connects every core's queue that is not; more may come while it does.
    async fn open_seats(self: &Rc<Self>, session: u64, controller: &Rc<Controller>) -> Result<(), HostError> {
        loop {
            let wanting = self.assign(controller);
            if wanting.is_empty() {
                return Ok(());
            }
            let core = self.core().clone();
            let mut opening = Vec::new();
            for (seat, instance, qid) in wanting {
                let stream = connect_socket(&**self.app.net(), &self.params)?;
                let (id, spec) = (self.shared.id, controller.queue(qid));
                opening.push(
                    core.call_async(seat, move |core| {
                        queue::connect(core.clone(), id, instance, session, stream, spec)
                    }),
                );
            }
            for outcome in join_all(opening).await {
                outcome.unwrap_or(Err(HostError::Lost { what: "I/O queue", loss: Loss::Closed }))?;
            }
            self.check(session)?;
        }
    }

    /// Gives a queue identifier to every seat without one; a seat for which there is none fails its I/O.
    fn assign(&self, controller: &Controller) -> Vec<(CoreId, u64, u16)> {
        let mut seats = self.seats.borrow_mut();
        let mut given = Vec::new();
        for index in 0..seats.len() {
            if seats[index].qid.is_some() {
                continue;
            }
            let most = controller.io_queues().min(0xFFFE) as u16;
            let Some(qid) = self.free_qid(&seats, most) else {
                tracing::error!(controller = self.shared.name, most, "no I/O queue left for another core");
                self.post_down(&seats[index], Down::Failed);
                continue;
            };
            seats[index].qid = Some(qid);
            given.push((seats[index].core, seats[index].instance, qid));
        }
        given
    }

    /// In turn: the controller may not have noticed yet that an identifier given back just now is free.
    fn free_qid(&self, seats: &[Seat], most: u16) -> Option<u16> {
        let last = self.last_qid.get().min(most);
        let used = |qid: &u16| seats.iter().any(|s| s.qid == Some(*qid));
        let qid = (last + 1..=most).chain(1..=last).find(|qid| !used(qid))?;
        self.last_qid.set(qid);
        Some(qid)
    }

    fn post_down(&self, seat: &Seat, why: Down) {
        let (id, instance) = (self.shared.id, seat.instance);
        self.core().post(seat.core, move |core| queue::down(core, id, instance, why));
    }

    fn post_all(&self, why: Down) {
        self.failing.set(self.failing.get() || why == Down::Failed);
        self.seats.borrow().iter().for_each(|seat| self.post_down(seat, why));
    }

    /// Closes every connection of the session; done when every core has said so.
    async fn end_session(&self, why: Down) {
        let core = self.core().clone();
        let mut closing = Vec::new();
        for seat in self.seats.borrow_mut().iter_mut() {
            seat.qid = None;
            let (id, instance) = (self.shared.id, seat.instance);
            closing.push(core.call(seat.core, move |core| queue::down(core, id, instance, why)));
        }
        let controller = self.controller.borrow_mut().take();
        if let Some(controller) = controller {
            controller.close(&core);
        }
        if core.timeout(CLOSE_NS, join_all(closing)).await.is_none() {
            tracing::error!(controller = self.shared.name, "a core does not close its connection");
        }
    }

    /// Part of the session is lost.
    fn session_lost(self: &Rc<Self>, session: u64, loss: &str) {
        if session != self.session.get() {
            return;
        }
        match self.state.get() {
            State::Enabled => {
                tracing::warn!(controller = self.shared.name, loss, "session lost");
                self.start_recovery();
            }
            // Whoever holds the devices is to let them go, so nothing may wait for a next session.
            State::Deleting => self.post_all(Down::Failed),
            _ => self.broken.set(session),
        }
    }

    fn start_recovery(self: &Rc<Self>) {
        self.state.set(State::Resetting);
        let ctrl = Rc::clone(self);
        self.core().spawn(async move { ctrl.recover().await });
    }

    /// Ends the session and tries for a new one as long as the timeouts allow.
    async fn recover(self: Rc<Self>) {
        let core = self.core().clone();
        let lost_at = core.now();
        self.failing.set(false);
        self.end_session(Down::Reconnecting).await;
        self.arm_fast_fail();
        let mut quick = QUICK_RETRY_NS;
        while !self.is_deleting() {
            self.state.set(State::Resetting);
            let outcome = self.bring_up().await;
            if self.is_deleting() {
                break;
            }
            self.answer_waiters(outcome.is_ok());
            let Err(error) = outcome else {
                tracing::info!(controller = self.shared.name, "session restored");
                return;
            };
            tracing::warn!(controller = self.shared.name, %error, "no new session");
            if error.is_refused_host() {
                self.post_all(Down::Refused);
            }
            let Some(delay) = self.next_attempt(lost_at, error.is_refused_host(), &mut quick) else {
                return self.give_up().await;
            };
            self.state.set(State::ReconnectDelayed);
            let (sender, woken) = oneshot::channel();
            *self.wake.borrow_mut() = Some(sender);
            let _ = core.timeout(delay, woken).await;
        }
        self.answer_waiters(false);
    }

    /// How long to wait before another attempt; `None` when there is to be none.
    fn next_attempt(&self, lost_at: Nanos, refused: bool, quick: &mut Nanos) -> Option<Nanos> {
        let full = Nanos::from(self.timeouts.reconnect_delay_sec) * NANOS_PER_S;
        if full == 0 {
            return None;
        }
        let delay = if self.shared.no_replay && !refused { (*quick).min(full) } else { full };
        *quick = quick.saturating_mul(2);
        match u64::try_from(self.timeouts.ctrlr_loss_sec) {
            Ok(loss) if self.core().now() >= lost_at + loss * NANOS_PER_S => None,
            _ => Some(delay),
        }
    }

    /// No more attempts: SPDK keeps a controller without timeouts, and removes one that was waited for in vain.
    async fn give_up(self: &Rc<Self>) {
        if self.timeouts.ctrlr_loss_sec == 0 {
            self.state.set(State::Failed);
            self.post_all(Down::Failed);
            return;
        }
        tracing::error!(controller = self.shared.name, "lost for too long; the controller is removed");
        self.state.set(State::Deleting);
        self.remove().await;
    }

    fn arm_fast_fail(self: &Rc<Self>) {
        let limit = Nanos::from(self.timeouts.fast_io_fail_sec) * NANOS_PER_S;
        if limit == 0 {
            return;
        }
        let (ctrl, lost) = (Rc::downgrade(self), self.session.get());
        let fail = move |ctrl: &Rc<Self>| {
            let never_back = !matches!(ctrl.state.get(), State::Enabled | State::Deleting) && ctrl.recovering(lost);
            if never_back {
                ctrl.post_all(Down::Failed);
            }
        };
        self.core().after(limit, Rc::new(move |_| ctrl.upgrade().iter().for_each(&fail)));
    }

    /// Whether no session since `lost` was ever in use.
    fn recovering(&self, lost: u64) -> bool {
        self.restored.get() <= lost
    }

    fn answer_waiters(&self, done: bool) {
        for waiter in std::mem::take(&mut *self.waiters.borrow_mut()) {
            let _ = waiter.send(done);
        }
    }

    fn wake_up(&self) {
        let wake = self.wake.borrow_mut().take();
        if let Some(wake) = wake {
            let _ = wake.send(());
        }
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

struct SessionEvents {
    ctrl: Weak<Ctrl>,
    session: u64,
}

impl ControllerEvents for SessionEvents {
    fn event(self: Rc<Self>, core: &Core, event: AsyncEvent) {
        let Some(ctrl) = self.ctrl.upgrade() else { return };
        tracing::debug!(controller = ctrl.shared.name, ?event, "event");
        if matches!(event, AsyncEvent::NamespaceAttribute | AsyncEvent::AnaChange) {
            core.spawn(async move { ctrl.scan_after_event().await });
        }
    }

    fn lost(self: Rc<Self>, _core: &Core, loss: &Loss) {
        if let Some(ctrl) = self.ctrl.upgrade() {
            ctrl.session_lost(self.session, &loss.to_string());
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

/// From a data core: an I/O asks for a reset.
pub async fn reset(core: Core, id: u64) -> bool {
    match Controllers::by_id(&core, id) {
        Some(ctrl) => ctrl.reset().await,
        None => false,
    }
}
