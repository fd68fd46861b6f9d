//! Examination of new devices: modules that keep their metadata on a medium look for it and bring up what they find.
//!
//! *Flow.* A device is registered → each examiner in turn looks at it, until one has claimed it → whoever waits in
//! [`settled`] goes on. Devices registered meanwhile (what was found, too) are examined in tasks of their own.
//!
//! *What is examined.* With automatic examination (the default), every device but those that hold a guest's data
//! ([`super::Bdev::holds_guest_data`]): a guest's bytes must never be taken for a store or an array of ours. Those, and
//! any device when automatic examination is off, are examined when `bdev_examine` names them, now or when they appear.
//!
//! *Invariants.* A device that is claimed is not examined. Examiners see a device one after another.
//!
//! *When things fail.* An examiner that finds nothing, or damage, says so in the log and leaves the device alone. One
//! that does not end holds up those who wait for [`WAIT_NS`] at most; its work goes on.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::rc::Rc;
use std::sync::Arc;

use futures::channel::oneshot;
use futures::future::LocalBoxFuture;
use serde::Deserialize;
use serde_json::{Value, json};

use super::registry::Entry;
use crate::app::App;
use crate::reactor::driver::{NANOS_PER_S, Nanos};
use crate::rpc::{Methods, RpcError, RpcResult, When, params};

/// Longest wait for examinations to end.
pub const WAIT_NS: Nanos = 120 * NANOS_PER_S;

/// Looks at one device; ready when all that it found is registered.
pub type Examiner = Rc<dyn Fn(App, Arc<Entry>) -> LocalBoxFuture<'static, ()>>;

/// The state of examination, on the control core.
struct Examination {
    automatic: Cell<bool>,
    /// Devices named by `bdev_examine`.
    named: RefCell<BTreeSet<String>>,
    examiners: RefCell<Vec<(&'static str, Examiner)>>,
    pending: Cell<usize>,
    waiting: RefCell<Vec<oneshot::Sender<()>>>,
}

impl Default for Examination {
    fn default() -> Self {
        Self {
            automatic: Cell::new(true),
            named: RefCell::default(),
            examiners: RefCell::default(),
            pending: Cell::new(0),
            waiting: RefCell::default(),
        }
    }
}

/// Examines what is registered from now on by `examiners`, in their order.
pub fn start(app: &App, examiners: Vec<(&'static str, Examiner)>) {
    let state = app.module(Examination::default);
    *state.examiners.borrow_mut() = examiners;
    let app_in_watch = app.clone();
    app.registry().watch(move |entry| {
        if is_wanted(&state, entry) {
            examine(&app_in_watch, &state, entry);
        }
    });
}

fn is_wanted(state: &Examination, entry: &Entry) -> bool {
    if state.automatic.get() && !entry.bdev.holds_guest_data() {
        return true;
    }
    state.named.borrow().iter().any(|name| entry.is_called(name))
}

fn examine(app: &App, state: &Rc<Examination>, entry: &Arc<Entry>) {
    if !entry.bdev.info().io_types.read {
        return;
    }
    let busy = busy(app);
    let (app, state, entry) = (app.clone(), Rc::clone(state), Arc::clone(entry));
    app.core().clone().spawn(async move {
        run_examiners(&app, &state, &entry).await;
        drop(busy);
    });
}

/// While it lives, [`settled`] waits: for what a new device brings about beside its examination.
pub struct Busy(Rc<Examination>);

/// Something that a new device brings about begins.
#[must_use]
pub fn busy(app: &App) -> Busy {
    let state = app.module(Examination::default);
    state.pending.set(state.pending.get() + 1);
    Busy(state)
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.pending.set(self.0.pending.get() - 1);
        if self.0.pending.get() == 0 {
            for waiter in self.0.waiting.borrow_mut().drain(..) {
                let _ = waiter.send(());
            }
        }
    }
}

async fn run_examiners(app: &App, state: &Examination, entry: &Arc<Entry>) {
    let name = entry.bdev.info().name;
    let examiners = state.examiners.borrow().clone();
    for (module, examiner) in examiners {
        if let Some(by) = app.registry().claimed_by(&name) {
            tracing::debug!(bdev = name, by, "claimed: not examined further");
            return;
        }
        tracing::debug!(bdev = name, module, "examine");
        examiner(app.clone(), Arc::clone(entry)).await;
    }
}

/// Waits until no examination runs, [`WAIT_NS`] at most.
pub async fn settled(app: &App) {
    let state = app.module(Examination::default);
    if state.pending.get() == 0 {
        return;
    }
    let (sender, receiver) = oneshot::channel();
    state.waiting.borrow_mut().push(sender);
    if app.core().timeout(WAIT_NS, receiver).await.is_none() {
        let pending = state.pending.get();
        tracing::warn!(pending, "examination of devices takes long; it goes on, but is not waited for any more");
    }
}

/// Sets whether new devices are examined without being named.
pub fn set_automatic(app: &App, automatic: bool) {
    app.module(Examination::default).automatic.set(automatic);
}

/// Adds this module's methods.
pub fn register(m: &mut Methods) {
    m.add("bdev_examine", When::Runtime, |app, params| async move { examine_named(&app, params) });
    m.add("bdev_wait_for_examine", When::Runtime, |app, params| async move {
        params::none(params.as_ref(), "bdev_wait_for_examine")?;
        settled(&app).await;
        Ok(json!(true))
    });
    m.add_config("bdev", |app| {
        let state = app.module(Examination::default);
        let named = state.named.borrow();
        named.iter().map(|name| ("bdev_examine".to_owned(), json!({ "name": name }))).collect()
    });
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Examine {
    name: String,
}

fn examine_named(app: &App, params: Option<Value>) -> RpcResult {
    let request: Examine = params::decode(params, params::decode_failed)?;
    let state = app.module(Examination::default);
    let entry = app.registry().find(&request.name);
    // SPDK refuses it whenever it examines by itself; here some devices are never examined by themselves.
    let is_guest = entry.as_ref().is_some_and(|e| e.bdev.holds_guest_data());
    if state.automatic.get() && !is_guest {
        return Err(RpcError::errno(libc::EINVAL));
    }
    if !state.named.borrow_mut().insert(request.name) {
        return Err(RpcError::errno(libc::EEXIST));
    }
    if let Some(entry) = entry {
        examine(app, &state, &entry);
    }
    Ok(json!(true))
}
