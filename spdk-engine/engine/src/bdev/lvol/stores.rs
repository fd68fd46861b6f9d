//! Stores on the control core: which there are, their devices in the registry, their claims.
//!
//! *States of a store.* opening (its device is claimed) → ready → closing. What a store is made of lives on its owner
//! core ([`super::owner`]); here are the names, the claims and the registered volumes.
//!
//! *Invariants.* The base device is claimed while the store is open, the external devices of clones while they are used.
//! Names of stores are unique in the process. A volume has a device unless an external device that it needs is absent
//! (it is *degraded*); it gets its device when that one appears, and loses it when that one goes.
//!
//! *When things fail.* A store that cannot be opened is left alone, and the log says why. When the base device is
//! removed, the store is unloaded while that still works and given up otherwise.

use std::cell::{Cell, OnceCell, RefCell};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::future::Future;
use std::rc::Rc;
use std::sync::Arc;

use futures::future::join_all;
use lvol_core::{BlobId, Error, LoadProgress, StoreInfo};
use serde_json::json;
use uuid::Uuid;

use super::owner::{self, End, NewVolume, Open, Owned};
use super::percore;
use super::shared::{LvolBdev, Report, StoreId, StoreShared, lock};
use crate::app::App;
use crate::bdev::registry::{Access, BdevEvent, Desc, Entry};
use crate::bdev::{BdevError, examine};
use crate::reactor::driver::{NANOS_PER_MS, NANOS_PER_S, Nanos};
use crate::reactor::{Core, CoreId};

/// The module's name in the registry.
pub const MODULE: &str = "lvol";
/// Longest wait for the cores to let go of a store whose volumes are unregistered.
const LET_GO_NS: Nanos = 30 * NANOS_PER_S;
/// How often it is looked.
const LOOK_NS: Nanos = NANOS_PER_MS;
/// Longest orderly end of one store when the process stops.
pub const STOP_NS: Nanos = 20 * NANOS_PER_S;

/// Everything about lvols on the control core.
pub struct Lvols {
    app: App,
    stores: RefCell<Vec<Rc<LvolStore>>>,
    next: Cell<u64>,
    /// Names of stores that are being made.
    reserved: RefCell<BTreeSet<String>>,
    externals: RefCell<HashMap<(StoreId, String), Desc>>,
    /// External devices that calls under way need, with how many do.
    held: RefCell<HashMap<(StoreId, String), usize>>,
    /// Stores by the external devices that they wait for.
    missing: RefCell<HashMap<String, BTreeSet<StoreId>>>,
}

/// One store.
pub struct LvolStore {
    pub shared: Arc<StoreShared>,
    name: RefCell<String>,
    base: RefCell<Option<Desc>>,
    volumes: RefCell<BTreeMap<u64, Rc<Volume>>>,
    by_blob: RefCell<HashMap<BlobId, u64>>,
    next: Cell<u64>,
    closing: Cell<bool>,
}

/// One volume.
pub struct Volume {
    new: NewVolume,
    report: RefCell<Report>,
    bdev: RefCell<Option<Arc<LvolBdev>>>,
}

/// Why a store was not opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error(transparent)]
    Device(#[from] BdevError),
    #[error("a store named {0} exists already")]
    Exists(String),
    #[error(transparent)]
    Store(#[from] Error),
}

impl OpenError {
    /// The positive errno.
    #[must_use]
    pub fn errno(&self) -> i32 {
        match self {
            Self::Device(error) => error.errno(),
            Self::Exists(_) => libc::EEXIST,
            Self::Store(error) => error.errno(),
        }
    }
}

#[derive(Default)]
struct Place(OnceCell<Rc<Lvols>>);

impl LvolStore {
    /// Its name.
    #[must_use]
    pub fn name(&self) -> String {
        self.name.borrow().clone()
    }

    /// Whether it is being closed.
    #[must_use]
    pub fn is_closing(&self) -> bool {
        self.closing.get()
    }

    /// The device that it is on.
    #[must_use]
    pub fn base_name(&self) -> String {
        self.shared.base.bdev.info().name
    }

    /// Its volumes, oldest first.
    #[must_use]
    pub fn volumes(&self) -> Vec<Rc<Volume>> {
        self.volumes.borrow().values().cloned().collect()
    }

    /// The volume of that id.
    #[must_use]
    pub fn volume(&self, blob: BlobId) -> Option<Rc<Volume>> {
        let number = *self.by_blob.borrow().get(&blob)?;
        self.volumes.borrow().get(&number).cloned()
    }

    fn alias(&self, lvol: &str) -> String {
        format!("{}/{lvol}", self.name.borrow())
    }

    fn insert(&self, volume: Rc<Volume>) {
        let number = self.next.get();
        self.next.set(number + 1);
        self.by_blob.borrow_mut().insert(volume.blob(), number);
        self.volumes.borrow_mut().insert(number, volume);
    }

    fn forget(&self, blob: BlobId) {
        if let Some(number) = self.by_blob.borrow_mut().remove(&blob) {
            self.volumes.borrow_mut().remove(&number);
        }
    }
}

impl Volume {
    /// The id of its blob.
    #[must_use]
    pub fn blob(&self) -> BlobId {
        self.new.report.info.id
    }

    /// What is known of it.
    #[must_use]
    pub fn report(&self) -> Report {
        self.report.borrow().clone()
    }

    /// Its device, unless it is degraded.
    #[must_use]
    pub fn bdev(&self) -> Option<Arc<LvolBdev>> {
        self.bdev.borrow().clone()
    }

    /// Takes up news; true when the size of its device has changed.
    fn update(&self, report: Report) -> bool {
        let bdev = self.bdev.borrow();
        let resized = bdev.as_ref().is_some_and(|bdev| bdev.update(report.clone()));
        *self.report.borrow_mut() = report;
        resized
    }
}

impl Lvols {
    /// The application's.
    #[must_use]
    pub fn of(app: &App) -> Rc<Self> {
        let place = app.module(Place::default);
        let made = place.0.get_or_init(|| {
            let lvols = Rc::new(Self {
                app: app.clone(),
                stores: RefCell::default(),
                next: Cell::new(1),
                reserved: RefCell::default(),
                externals: RefCell::default(),
                held: RefCell::default(),
                missing: RefCell::default(),
            });
            lvols.watch_for_externals();
            lvols
        });
        Rc::clone(made)
    }

    fn on(core: &Core) -> Option<Rc<Self>> {
        core.local(Place::default).0.get().cloned()
    }

    /// All stores, oldest first.
    #[must_use]
    pub fn stores(&self) -> Vec<Rc<LvolStore>> {
        self.stores.borrow().clone()
    }

    /// The store of that id.
    #[must_use]
    pub fn store(&self, id: StoreId) -> Option<Rc<LvolStore>> {
        self.stores.borrow().iter().find(|s| s.shared.id == id).cloned()
    }

    /// The store of that name.
    #[must_use]
    pub fn store_named(&self, name: &str) -> Option<Rc<LvolStore>> {
        self.stores.borrow().iter().find(|s| *s.name.borrow() == name).cloned()
    }

    /// The store with that UUID.
    #[must_use]
    pub fn store_with_uuid(&self, uuid: Uuid) -> Option<Rc<LvolStore>> {
        self.stores.borrow().iter().find(|s| s.shared.uuid == uuid).cloned()
    }

    /// The volume whose device has that name.
    #[must_use]
    pub fn volume_named(&self, name: &str) -> Option<(Rc<LvolStore>, Rc<Volume>)> {
        let entry = self.app.registry().find(name)?;
        let key = entry.bdev.as_any().downcast_ref::<LvolBdev>()?.volume.key();
        let store = self.store(key.store)?;
        let volume = store.volume(key.blob)?;
        Some((store, volume))
    }

    /// Runs an operation on the store's owner core.
    ///
    /// # Errors
    /// Those of the operation; [`Error::Unloaded`] when the store is not there any more.
    pub async fn on_owner<T, F, R>(&self, store: &LvolStore, operation: F) -> Result<T, Error>
    where
        T: Send + 'static,
        R: Future<Output = Result<T, Error>> + 'static,
        F: FnOnce(Core, Rc<Owned>) -> R + Send + 'static,
    {
        let id = store.shared.id;
        let call = self.app.core().call_async(store.shared.owner, move |core| {
            let (owned, core) = (owner::find(core, id), core.clone());
            async move {
                let owned = owned.ok_or(Error::Unloaded)?;
                operation(core, owned).await
            }
        });
        call.await.unwrap_or(Err(Error::Unloaded))
    }

    /// The data core with the fewest stores.
    fn choose_owner(&self) -> CoreId {
        let stores = self.stores.borrow();
        let load = |core: &CoreId| stores.iter().filter(|s| s.shared.owner == *core).count();
        self.app.core().data_cores().into_iter().min_by_key(load).unwrap_or(crate::reactor::CONTROL)
    }

    /// Keeps a name for a store that is being made or renamed.
    ///
    /// # Errors
    /// [`OpenError::Exists`].
    pub fn reserve(self: &Rc<Self>, name: &str) -> Result<Reserved, OpenError> {
        let taken = self.store_named(name).is_some() || !self.reserved.borrow_mut().insert(name.to_owned());
        if taken { Err(OpenError::Exists(name.to_owned())) } else { Ok(Reserved(Rc::clone(self), name.to_owned())) }
    }

    /// Makes or loads the store on a device and registers its volumes.
    ///
    /// # Errors
    /// When the device cannot be claimed, the store not be opened, or its name is in use.
    pub async fn open(self: &Rc<Self>, entry: &Arc<Entry>, how: Open) -> Result<Rc<LvolStore>, OpenError> {
        let base_name = entry.bdev.info().name;
        let id = StoreId(self.next.get());
        self.next.set(id.0 + 1);
        let owner = self.choose_owner();
        let desc = self.claim_base(&base_name, id, owner)?;
        let is_new = matches!(how, Open::Format(_));
        let base = Arc::clone(entry);
        let call = self.app.core().call_async(owner, move |core| owner::open(core.clone(), id, base, how));
        let opened = match call.await.unwrap_or(Err(Error::Unloaded)) {
            Ok(opened) => opened,
            Err(error) => {
                self.drop_externals(id);
                return Err(error.into());
            }
        };
        let name = opened.info.name.clone();
        let clashes = !is_new && (self.store_named(&name).is_some() || self.reserved.borrow().contains(&name));
        if clashes || self.store_with_uuid(opened.info.uuid).is_some() {
            let give_up = move |core: &Core| owner::end(core.clone(), id, End::Abandon);
            let _ = self.app.core().call_async(owner, give_up).await;
            self.drop_externals(id);
            return Err(OpenError::Exists(name));
        }
        tell_opened(&base_name, &opened);
        let store = Rc::new(LvolStore {
            shared: opened.shared,
            name: RefCell::new(name.clone()),
            base: RefCell::new(Some(desc)),
            volumes: RefCell::default(),
            by_blob: RefCell::default(),
            next: Cell::new(0),
            closing: Cell::new(false),
        });
        self.stores.borrow_mut().push(Rc::clone(&store));
        for volume in opened.volumes {
            self.apply(&store, volume);
        }
        self.look_for_missing(id);
        let fields = json!({ "base_bdev": base_name, "uuid": store.shared.uuid.to_string(), "state": "open",
            "recovered": opened.report.recovered, "damaged": opened.report.damaged.len() });
        self.app.events().push("lvstore", &name, fields);
        Ok(store)
    }

    fn claim_base(self: &Rc<Self>, name: &str, id: StoreId, owner: CoreId) -> Result<Desc, BdevError> {
        let (lvols, base) = (Rc::downgrade(self), name.to_owned());
        self.app.registry().open(name, Access::WriteOne(MODULE), move |event| {
            let Some(lvols) = lvols.upgrade() else { return };
            match (event, lvols.store(id)) {
                (BdevEvent::Removing, Some(store)) => {
                    tracing::warn!(base, store = store.name(), "the base device is being removed: its store is closed");
                    let lvols = Rc::clone(&lvols);
                    lvols.app.core().clone().spawn(async move {
                        if let Err(error) = lvols.close(&store, End::Unload).await {
                            tracing::warn!(store = store.name(), %error, "a store was not unloaded in order");
                        }
                    });
                }
                (BdevEvent::Removing, None) => lvols.app.core().post(owner, move |core| owner::set_gone(core, id)),
                (BdevEvent::Resized, _) => {
                    tracing::info!(base, "the base device of a store has another size; it is used after a grow");
                }
            }
        })
    }

    /// Takes up what the store says of a volume: a new one gets its device, a known one its new report.
    pub fn apply(&self, store: &Rc<LvolStore>, new: NewVolume) -> Rc<Volume> {
        if let Some(volume) = store.volume(new.report.info.id) {
            if volume.update(new.report)
                && let Some(bdev) = volume.bdev()
            {
                self.app.registry().resized(&bdev.name);
            }
            return volume;
        }
        let report = RefCell::new(new.report.clone());
        let volume = Rc::new(Volume { new, report, bdev: RefCell::default() });
        store.insert(Rc::clone(&volume));
        self.register(store, &volume);
        volume
    }

    /// Gives a volume its device, if it can have one and has none.
    pub fn register(&self, store: &Rc<LvolStore>, volume: &Rc<Volume>) {
        let report = volume.report();
        if volume.bdev.borrow().is_some() {
            return;
        }
        if report.info.is_degraded {
            if let Some(external) = &report.info.external {
                self.missing.borrow_mut().entry(external.clone()).or_default().insert(store.shared.id);
            }
            tracing::warn!(
                lvol = store.alias(&report.info.name),
                external = report.info.external,
                "degraded: no device"
            );
            return;
        }
        let alias = store.alias(&report.info.name);
        let map = Arc::clone(&volume.new.map);
        let bdev = Arc::new(LvolBdev::new(Arc::clone(&store.shared), map, report));
        *volume.bdev.borrow_mut() = Some(Arc::clone(&bdev));
        if let Err(error) = self.app.registry().register(bdev, vec![alias.clone()], MODULE) {
            tracing::error!(lvol = alias, %error, "a volume has no device");
            *volume.bdev.borrow_mut() = None;
        }
    }

    /// Takes a volume's device away; ready when nobody uses it any more.
    pub async fn unregister(&self, volume: &Volume) {
        let bdev = volume.bdev.borrow_mut().take();
        if let Some(bdev) = bdev
            && let Err(error) = self.app.registry().unregister(self.app.core(), &bdev.name).await
        {
            tracing::debug!(%error, "a volume's device is gone already");
        }
    }

    /// Forgets a volume that was deleted.
    pub fn forget(&self, store: &LvolStore, blob: BlobId) {
        store.forget(blob);
    }

    /// The name of a store has changed on the disk.
    pub fn renamed(&self, store: &LvolStore, name: &str) {
        let old = store.name.replace(name.to_owned());
        for volume in store.volumes().iter().filter(|v| v.bdev.borrow().is_some()) {
            let lvol = volume.report.borrow().info.name.clone();
            if let Err(error) = self.app.registry().rename_alias(&format!("{old}/{lvol}"), &format!("{name}/{lvol}")) {
                tracing::error!(%error, lvol, "a volume keeps its old alias");
            }
        }
    }

    /// Closes a store: volumes are unregistered, then it ends on its owner core, then its claims go.
    ///
    /// # Errors
    /// As the store's end; it is closed nevertheless.
    pub async fn close(self: &Rc<Self>, store: &Rc<LvolStore>, how: End) -> Result<(), Error> {
        if store.closing.replace(true) {
            return Err(Error::Busy("the store is being closed".to_owned()));
        }
        join_all(store.volumes().iter().map(|volume| self.unregister(volume))).await;
        self.let_go(store).await;
        let id = store.shared.id;
        let end = move |core: &Core| owner::end(core.clone(), id, how);
        let ended = self.app.core().call_async(store.shared.owner, end).await.unwrap_or(Err(Error::Unloaded));
        self.drop_externals(id);
        self.stores.borrow_mut().retain(|s| !Rc::ptr_eq(s, store));
        drop(store.base.borrow_mut().take());
        let state = if ended.is_ok() { "closed" } else { "failed" };
        let fields = json!({ "base_bdev": store.base_name(), "uuid": store.shared.uuid.to_string(), "state": state });
        self.app.events().push("lvstore", &store.name(), fields);
        ended
    }

    /// Waits until no core has a channel of the store any more.
    async fn let_go(&self, store: &LvolStore) {
        let (core, id) = (self.app.core(), store.shared.id);
        let deadline = core.now() + LET_GO_NS;
        loop {
            let peers = core.peers();
            let gone = join_all(peers.iter().map(|p| core.call(p.id, move |c| percore::is_gone(c, id)))).await;
            if gone.iter().all(|gone| gone.unwrap_or(true)) {
                return;
            }
            if core.now() >= deadline {
                tracing::error!(store = store.name(), "I/O of a store that is being closed does not end");
                return;
            }
            core.sleep(LOOK_NS).await;
        }
    }

    /// Asks the owner for fresh reports of one volume of a store, or of all.
    ///
    /// # Errors
    /// When the store or the volume is gone.
    pub async fn refresh(&self, store: &Rc<LvolStore>, blob: Option<BlobId>) -> Result<(), Error> {
        let ask = move |_, owned: Rc<Owned>| async move {
            Ok(match blob {
                Some(blob) => vec![owned.report(&owned.lvol(blob)?)],
                None => owned.reports(),
            })
        };
        let reports = self.on_owner(store, ask).await?;
        for report in reports {
            if let Some(volume) = store.volume(report.info.id) {
                volume.update(report);
            }
        }
        Ok(())
    }

    /// Asks the owner for the state of a store.
    pub async fn info(&self, store: &LvolStore) -> Result<StoreInfo, Error> {
        self.on_owner(store, |_, owned| async move { Ok(owned.store.info()) }).await
    }

    /// Stops all I/O of all stores and unloads them, the newest first; for the end of the process.
    pub async fn stop_all(&self) {
        for store in self.stores().into_iter().rev() {
            let id = store.shared.id;
            let stop = move |core: &Core| owner::stop_and_unload(core.clone(), id);
            let call = self.app.core().call_async(store.shared.owner, stop);
            match self.app.core().timeout(STOP_NS, call).await {
                Some(Some(Ok(()))) => tracing::info!(store = store.name(), "unloaded"),
                Some(Some(Err(error))) => tracing::error!(store = store.name(), %error, "not unloaded in order"),
                Some(None) => tracing::error!(store = store.name(), "not unloaded: its core has stopped"),
                None => tracing::error!(store = store.name(), "not unloaded in time; it is recovered at its next load"),
            }
        }
    }

    // ---- external devices ----

    fn watch_for_externals(self: &Rc<Self>) {
        let lvols = Rc::downgrade(self);
        self.app.registry().watch(move |entry| {
            let Some(lvols) = lvols.upgrade() else { return };
            let id = entry.bdev.info().uuid.to_string();
            let waiting = lvols.missing.borrow_mut().remove(&id).unwrap_or_default();
            for store in waiting {
                lvols.external_came(store, &id, entry);
            }
        });
    }

    /// External devices that appeared while the store was loaded.
    fn look_for_missing(self: &Rc<Self>, id: StoreId) {
        let missing = self.missing.borrow();
        let ours: Vec<String> = missing.iter().filter(|(_, s)| s.contains(&id)).map(|(name, _)| name.clone()).collect();
        drop(missing);
        for external in ours {
            if let Some(entry) = self.app.registry().find(&external) {
                self.external_came(id, &external, &entry);
            }
        }
    }

    fn external_came(self: &Rc<Self>, store: StoreId, id: &str, entry: &Arc<Entry>) {
        let Some(store) = self.store(store).filter(|s| !s.is_closing()) else { return };
        if let Err(error) = self.claim(store.shared.id, id) {
            tracing::error!(external = id, %error, "an external device came that cannot be claimed");
            return;
        }
        lock(&store.shared.externals).insert(id.to_owned(), Arc::clone(entry));
        let (lvols, id, entry) = (Rc::clone(self), id.to_owned(), Arc::clone(entry));
        let busy = examine::busy(&self.app);
        self.app.core().spawn(async move {
            let _busy = busy;
            let attached = lvols.on_owner(&store, move |core, owned| async move {
                let device = owned.open_device(&core, &entry)?;
                let volumes = owned.store.attach_external(&id, device).await;
                Ok(volumes.iter().map(|lvol| owned.describe(lvol)).collect::<Vec<_>>())
            });
            match attached.await {
                Ok(volumes) => {
                    for new in volumes {
                        let volume = lvols.apply(&store, new);
                        lvols.register(&store, &volume);
                    }
                }
                Err(error) => tracing::error!(%error, "an external device could not be used"),
            }
        });
    }

    /// Claims an external device for a store; once is enough for all its clones.
    ///
    /// # Errors
    /// When it is absent or has a writer.
    pub fn claim(self: &Rc<Self>, store: StoreId, id: &str) -> Result<(), BdevError> {
        let key = (store, id.to_owned());
        if self.externals.borrow().contains_key(&key) {
            return Ok(());
        }
        let lvols = Rc::downgrade(self);
        let external = id.to_owned();
        let desc = self.app.registry().open(id, Access::WriteNone(MODULE), move |event| {
            if let (BdevEvent::Removing, Some(lvols)) = (event, lvols.upgrade()) {
                lvols.external_goes(store, external.clone());
            }
        })?;
        self.externals.borrow_mut().insert(key, desc);
        Ok(())
    }

    /// Claims a device as an external one of a store while a call needs it, and beyond if a clone uses it by then.
    ///
    /// # Errors
    /// As [`Self::claim`].
    pub fn hold(self: &Rc<Self>, store: &Rc<LvolStore>, entry: &Arc<Entry>) -> Result<Held, BdevError> {
        let id = entry.bdev.info().uuid.to_string();
        self.claim(store.shared.id, &id)?;
        lock(&store.shared.externals).insert(id.clone(), Arc::clone(entry));
        *self.held.borrow_mut().entry((store.shared.id, id.clone())).or_default() += 1;
        Ok(Held { lvols: Rc::clone(self), store: Rc::clone(store), id })
    }

    /// Gives up the claims of external devices that no clone of the store uses.
    pub fn release_unused(&self, store: &LvolStore) {
        let id = store.shared.id;
        let used: BTreeSet<String> =
            store.volumes().iter().filter_map(|v| v.report.borrow().info.external.clone()).collect();
        let held = self.held.borrow();
        let unused = |key: &(StoreId, String)| key.0 == id && !used.contains(&key.1) && !held.contains_key(key);
        let keys: Vec<_> = self.externals.borrow().keys().filter(|key| unused(key)).cloned().collect();
        for key in keys {
            lock(&store.shared.externals).remove(&key.1);
            self.forget_external(id, &key.1);
            self.externals.borrow_mut().remove(&key);
        }
    }

    fn forget_external(&self, store: StoreId, id: &str) {
        for peer in self.app.core().peers().iter() {
            let id = id.to_owned();
            self.app.core().post(peer.id, move |core| percore::forget_external(core, store, &id));
        }
    }

    fn external_goes(self: &Rc<Self>, id: StoreId, external: String) {
        let Some(store) = self.store(id) else { return };
        tracing::warn!(store = store.name(), external, "an external device is being removed: its clones are degraded");
        let lvols = Rc::clone(self);
        self.app.core().spawn(async move {
            let name = external.clone();
            let detached = lvols.on_owner(&store, move |_, owned| async move {
                let volumes = owned.store.detach_external(&name);
                Ok(volumes.iter().map(|lvol| owned.describe(lvol)).collect::<Vec<_>>())
            });
            let affected = detached.await.unwrap_or_default();
            let volumes: Vec<_> = affected.into_iter().map(|new| lvols.apply(&store, new)).collect();
            join_all(volumes.iter().map(|volume| lvols.unregister(volume))).await;
            lock(&store.shared.externals).remove(&external);
            lvols.forget_external(id, &external);
            lvols.missing.borrow_mut().entry(external.clone()).or_default().insert(id);
            lvols.externals.borrow_mut().remove(&(id, external));
        });
    }

    fn drop_externals(&self, id: StoreId) {
        self.externals.borrow_mut().retain(|(store, _), _| *store != id);
        for waiting in self.missing.borrow_mut().values_mut() {
            waiting.remove(&id);
        }
    }
}

/// See [`Lvols::hold`].
pub struct Held {
    lvols: Rc<Lvols>,
    store: Rc<LvolStore>,
    /// The device's identity, as the store keeps it.
    pub id: String,
}

impl Drop for Held {
    fn drop(&mut self) {
        let key = (self.store.shared.id, self.id.clone());
        let mut held = self.lvols.held.borrow_mut();
        if let Some(count) = held.get_mut(&key) {
            *count -= 1;
            if *count == 0 {
                held.remove(&key);
            }
        }
        drop(held);
        self.lvols.release_unused(&self.store);
    }
}

/// A name kept for a store in the making.
pub struct Reserved(Rc<Lvols>, String);

impl Drop for Reserved {
    fn drop(&mut self) {
        self.0.reserved.borrow_mut().remove(&self.1);
    }
}

fn tell_opened(base: &str, opened: &owner::Opened) {
    for blob in &opened.report.damaged {
        tracing::error!(base, store = opened.info.name, id = ?blob.id, lvol = blob.name, reason = blob.reason, "a volume is left out");
    }
    for repaired in &opened.report.repaired {
        tracing::warn!(base, store = opened.info.name, repaired, "ended what a crash had cut short");
    }
    let (store, volumes) = (&opened.info.name, opened.volumes.len());
    tracing::info!(base, store, volumes, recovered = opened.report.recovered, "lvolstore open");
}

/// Called on the control core for a store that is being loaded: claims an external device that it needs.
pub fn claim_external(core: &Core, store: StoreId, id: &str) -> Option<Arc<Entry>> {
    let lvols = Lvols::on(core)?;
    let entry = lvols.app.registry().find(id)?;
    match lvols.claim(store, id) {
        Ok(()) => Some(entry),
        Err(error) => {
            tracing::warn!(external = id, %error, "an external device cannot be used");
            None
        }
    }
}

/// Called on the control core while a store is loaded.
pub fn load_progress(core: &Core, base: &str, progress: LoadProgress) {
    if let Some(lvols) = Lvols::on(core) {
        let stage = format!("{:?}", progress.stage).to_lowercase();
        tracing::info!(base, stage, done = progress.done, total = progress.total, "loading an lvolstore");
        let fields = json!({ "stage": stage, "done": progress.done, "total": progress.total });
        lvols.app.events().push("lvstore_loading", base, fields);
    }
}
