//! Stores on their owner core: loading, serving the channels' requests, reports, the end.
//!
//! *What it is.* A store of lvol-core lives on one data core; [`Owned`] is it with what the engine adds. Control calls
//! run here by `call_async` from the control core; channels ask through [`serve`].
//!
//! *When things fail.* Requests for a store that is not there any more fail with an internal error.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;

use lvol_core::device::{Device, LocalFuture};
use lvol_core::{
    BlobId, Error, FormatOptions, Hooks, LoadOptions, LoadProgress, LoadReport, LoadStage, Lvol, Map, Store, StoreInfo,
};
use nvme_wire::Status;

use super::asks::{Ask, Want, answer, status_of};
use super::device::BaseDevice;
use super::hooks::{EngineHooks, Serving};
use super::shared::{LvolKey, Report, StoreId, StoreShared, lock};
use super::stores;
use crate::bdev::IoStatus;
use crate::bdev::registry::Entry;
use crate::reactor::driver::{NANOS_PER_S, Nanos};
use crate::reactor::{CONTROL, Core};

/// How often the progress of a load is told within a stage.
const TELL_NS: Nanos = NANOS_PER_S;

/// A store on its owner core.
pub struct Owned {
    pub shared: Arc<StoreShared>,
    pub store: Store,
    device: Rc<BaseDevice>,
    hooks: Rc<EngineHooks>,
    serving: Rc<Serving>,
}

/// The stores that live on this core, those being loaded included (by their devices).
#[derive(Default)]
struct OwnedStores {
    stores: RefCell<HashMap<StoreId, Rc<Owned>>>,
    loading: RefCell<HashMap<StoreId, Rc<BaseDevice>>>,
}

/// A store that was opened, as the control core learns of it.
#[derive(Debug)]
pub struct Opened {
    pub shared: Arc<StoreShared>,
    pub info: StoreInfo,
    pub volumes: Vec<NewVolume>,
    pub report: LoadReport,
}

/// A volume as the control core learns of it.
#[derive(Debug)]
pub struct NewVolume {
    pub map: Arc<Map>,
    pub report: Report,
}

/// What to do with a device.
#[derive(Debug, Clone)]
pub enum Open {
    Format(FormatOptions),
    Load,
}

/// The store, if it is on this core.
#[must_use]
pub fn find(core: &Core, id: StoreId) -> Option<Rc<Owned>> {
    core.local(OwnedStores::default).stores.borrow().get(&id).cloned()
}

/// Whether the device has an lvolstore.
///
/// # Errors
/// [`Error::Damaged`] for one that cannot be used.
pub async fn probe(core: Core, entry: Arc<Entry>) -> Result<bool, Error> {
    let device = open_device(&core, &entry)?;
    let device = device as Rc<dyn Device>;
    Ok(Store::probe(&device).await?.is_some())
}

fn open_device(core: &Core, entry: &Arc<Entry>) -> Result<Rc<BaseDevice>, Error> {
    BaseDevice::open(core, entry).map_err(|error| {
        tracing::error!(%error, "cannot open a device for a store");
        Error::Device(lvol_core::DeviceError::Gone)
    })
}

/// Makes or loads the store on a device; it lives on this core from then on.
///
/// # Errors
/// As lvol-core's `format` and `load`.
pub async fn open(core: Core, id: StoreId, base: Arc<Entry>, how: Open) -> Result<Opened, Error> {
    let device = open_device(&core, &base)?;
    let all = core.local(OwnedStores::default);
    all.loading.borrow_mut().insert(id, Rc::clone(&device));
    let opened = open_on(&core, id, base, how, device).await;
    all.loading.borrow_mut().remove(&id);
    let (owned, report) = opened?;
    let opened = Opened {
        shared: Arc::clone(&owned.shared),
        info: owned.store.info(),
        volumes: owned.store.lvols().iter().map(|lvol| owned.describe(lvol)).collect(),
        report,
    };
    all.stores.borrow_mut().insert(id, Rc::new(owned));
    Ok(opened)
}

async fn open_on(
    core: &Core,
    id: StoreId,
    base: Arc<Entry>,
    how: Open,
    device: Rc<BaseDevice>,
) -> Result<(Owned, LoadReport), Error> {
    let serving = Rc::new(Serving::default());
    let hooks = Rc::new(EngineHooks { core: core.clone(), store: id, serving: Rc::clone(&serving) });
    let (as_device, as_hooks) = (Rc::clone(&device) as Rc<dyn Device>, Rc::clone(&hooks) as Rc<dyn Hooks>);
    let externals: RefCell<HashMap<String, Arc<Entry>>> = RefCell::default();
    let (store, report) = match how {
        Open::Format(options) => (Store::format(as_device, as_hooks, options).await?, LoadReport::default()),
        Open::Load => {
            let name = base.bdev.info().name;
            let find = |external: &str| find_external(core, id, external.to_owned(), &externals);
            let told = Cell::new(None);
            let progress = |p: LoadProgress| tell_progress(core, &name, &told, p);
            Store::load(as_device, as_hooks, LoadOptions::default(), &find, &progress).await?
        }
    };
    let info = store.info();
    let block_size = info.io_unit_size;
    let cluster_blocks = u64::from(info.cluster_size / block_size);
    let shared = Arc::new(StoreShared::new(id, core.id(), info.uuid, base, block_size, cluster_blocks));
    *lock(&shared.externals) = externals.into_inner();
    Ok((Owned { shared, store, device, hooks, serving }, report))
}

/// Asks the control core for an external device and opens it here.
fn find_external<'a>(
    core: &'a Core,
    id: StoreId,
    external: String,
    found: &'a RefCell<HashMap<String, Arc<Entry>>>,
) -> LocalFuture<'a, Option<Rc<dyn Device>>> {
    Box::pin(async move {
        let name = external.clone();
        let entry = core.call(CONTROL, move |core| stores::claim_external(core, id, &name)).await.flatten()?;
        let device = open_device(core, &entry).ok()?;
        found.borrow_mut().insert(external, entry);
        Some(device as Rc<dyn Device>)
    })
}

/// Passes progress on to the control core: each new stage, and within one now and then.
fn tell_progress(core: &Core, base: &str, told: &Cell<Option<(LoadStage, Nanos)>>, progress: LoadProgress) {
    let now = core.clock();
    let is_due = told.get().is_none_or(|(stage, at)| stage != progress.stage || now >= at + TELL_NS);
    if is_due {
        told.set(Some((progress.stage, now)));
        let base = base.to_owned();
        core.post(CONTROL, move |core| stores::load_progress(core, &base, progress));
    }
}

/// Makes everything fail at once on the store's device, also while it is being loaded.
pub fn set_gone(core: &Core, id: StoreId) {
    let all = core.local(OwnedStores::default);
    if let Some(device) = all.loading.borrow().get(&id) {
        device.set_gone();
    }
    if let Some(owned) = all.stores.borrow().get(&id) {
        owned.device.set_gone();
    }
}

/// How a store ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// In order: it is clean on the disk.
    Unload,
    /// Deleted, with all volumes.
    Destroy,
    /// As it is, without a write.
    Abandon,
}

/// Ends a store whose volumes have no I/O any more, and forgets it.
///
/// # Errors
/// As the store's own end; it is forgotten nevertheless.
pub async fn end(core: Core, id: StoreId, how: End) -> Result<(), Error> {
    let all = core.local(OwnedStores::default);
    let Some(owned) = all.stores.borrow_mut().remove(&id) else { return Err(Error::Unloaded) };
    owned.serving.drained(None).await;
    let ended = match how {
        End::Unload => owned.store.unload().await,
        End::Destroy => owned.store.destroy().await,
        End::Abandon => {
            owned.store.abandon();
            Ok(())
        }
    };
    if ended.is_err() {
        owned.store.abandon();
    }
    ended
}

/// Stops all I/O of the store for good and unloads it: for the end of the process.
///
/// # Errors
/// As the store's `unload`.
pub async fn stop_and_unload(core: Core, id: StoreId) -> Result<(), Error> {
    let owned = find(&core, id).ok_or(Error::Unloaded)?;
    owned.hooks.end().await;
    owned.store.unload().await
}

impl Owned {
    /// The volume of that id.
    ///
    /// # Errors
    /// [`Error::NotFound`].
    pub fn lvol(&self, blob: BlobId) -> Result<Lvol, Error> {
        self.store.lvol(blob).ok_or_else(|| Error::NotFound(format!("blob {blob:?}")))
    }

    /// Opens a device on this core for an operation of the store.
    ///
    /// # Errors
    /// When it cannot be opened.
    pub fn open_device(&self, core: &Core, entry: &Arc<Entry>) -> Result<Rc<dyn Device>, Error> {
        open_device(core, entry).map(|device| device as Rc<dyn Device>)
    }

    /// What the control core wants to know of a volume.
    #[must_use]
    pub fn describe(&self, lvol: &Lvol) -> NewVolume {
        NewVolume { map: lvol.map(), report: self.report(lvol) }
    }

    /// What reports say of a volume.
    #[must_use]
    pub fn report(&self, lvol: &Lvol) -> Report {
        let info = lvol.info();
        let clones = info.clones.iter().filter_map(|id| self.store.lvol(*id)).map(|l| l.info().name).collect();
        Report { info, clones }
    }

    /// What reports say of all volumes.
    #[must_use]
    pub fn reports(&self) -> Vec<Report> {
        self.store.lvols().iter().map(|lvol| self.report(lvol)).collect()
    }

    async fn run(&self, lvol: &Lvol, want: Want) -> IoStatus {
        let writes = self.shared.durability.change();
        let done = match want {
            Want::Clusters { first, last } => lvol.ensure_allocated(first..last + 1).await,
            Want::Zeroes { offset, len } => lvol.write_zeroes(offset, len).await,
            Want::Unmapped { offset, len } => lvol.unmap(offset, len).await,
        };
        drop(writes);
        match done {
            Ok(()) => Status::SUCCESS,
            Err(error) => {
                tracing::debug!(store = self.shared.id.0, blob = ?lvol.id(), ?want, %error, "a request of a volume failed");
                status_of(&error)
            }
        }
    }
}

/// Serves requests of a volume's channel; each is answered by itself.
pub fn serve(core: &Core, key: LvolKey, asks: Vec<Ask>) {
    let owned = find(core, key.store);
    let lvol = owned.as_ref().and_then(|owned| owned.store.lvol(key.blob));
    let (Some(owned), Some(lvol)) = (owned, lvol) else {
        // Answered from the loop, as always.
        return core.defer(move |core| asks.iter().for_each(|ask| answer(core, *ask, Status::INTERNAL_ERROR)));
    };
    for ask in asks {
        owned.serving.begin(key.blob);
        let (owned, lvol, core_in_task) = (Rc::clone(&owned), lvol.clone(), core.clone());
        core.spawn(async move {
            let status = owned.run(&lvol, ask.want).await;
            owned.serving.end(key.blob);
            answer(&core_in_task, ask, status);
        });
    }
}
