//! Stores as one core uses them: the base device's channel, I/O in flight, volumes that are stopped for a moment.
//!
//! *What it is.* One [`Cores`] per core, found by [`Core::local`]. A [`StoreCore`] exists on a core while the core has a
//! channel of one of the store's volumes.
//!
//! *Flow.* The store's owner core asks for stops and barriers by messages (see [`super::hooks`]): [`stop`], [`go_on`],
//! [`barrier`].
//!
//! *Invariants.* A stopped volume sends nothing to the disk; I/O that arrives is kept, in order, and looked up anew
//! afterwards. What is kept is bounded by the queues above.

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, HashSet};
use std::rc::Rc;
use std::sync::Arc;

use futures::channel::oneshot;

use super::channel::Inner;
use super::flights::Flights;
use super::shared::{LvolKey, StoreId, StoreShared};
use crate::bdev::{BdevError, Chan};
use crate::reactor::Core;

/// All stores on this core.
#[derive(Default)]
pub struct Cores {
    stores: RefCell<HashMap<StoreId, Rc<StoreCore>>>,
    channels: RefCell<HashMap<u64, Rc<Inner>>>,
    next_channel: Cell<u64>,
    /// Volumes that are stopped, also where no channel of theirs is open yet.
    stopped: RefCell<HashSet<LvolKey>>,
    /// Stores that are stopped for good.
    ended: RefCell<HashSet<StoreId>>,
}

/// One store on this core.
pub struct StoreCore {
    pub shared: Arc<StoreShared>,
    /// The base device.
    pub base: Chan,
    /// I/O that went to a disk by a lookup in a map of this store.
    pub flights: Flights,
    externals: RefCell<HashMap<String, Chan>>,
    /// Ids of the open channels of its volumes.
    channels: RefCell<Vec<(LvolKey, u64)>>,
}

impl Cores {
    /// This core's.
    #[must_use]
    pub fn of(core: &Core) -> Rc<Self> {
        core.local(Self::default)
    }

    /// The store on this core, made where it is not there yet.
    ///
    /// # Errors
    /// When the base device cannot be opened.
    pub fn store(&self, core: &Core, shared: &Arc<StoreShared>) -> Result<Rc<StoreCore>, BdevError> {
        if let Some(store) = self.stores.borrow().get(&shared.id) {
            return Ok(Rc::clone(store));
        }
        let store = Rc::new(StoreCore {
            shared: Arc::clone(shared),
            base: shared.base.open(core)?,
            flights: Flights::default(),
            externals: RefCell::default(),
            channels: RefCell::default(),
        });
        self.stores.borrow_mut().insert(shared.id, Rc::clone(&store));
        Ok(store)
    }

    /// The id of a new channel.
    #[must_use]
    pub fn next_channel(&self) -> u64 {
        self.next_channel.set(self.next_channel.get() + 1);
        self.next_channel.get()
    }

    /// Whether the volume is stopped.
    #[must_use]
    pub fn is_stopped(&self, key: LvolKey) -> bool {
        self.stopped.borrow().contains(&key) || self.ended.borrow().contains(&key.store)
    }

    /// The channel of that id, while it is open or has something left to do.
    #[must_use]
    pub fn channel(&self, id: u64) -> Option<Rc<Inner>> {
        self.channels.borrow().get(&id).cloned()
    }

    /// A channel was opened.
    pub fn add(&self, channel: Rc<Inner>) {
        channel.store.channels.borrow_mut().push((channel.volume.key(), channel.id));
        self.channels.borrow_mut().insert(channel.id, channel);
    }

    /// A channel was closed and has nothing left to do; its store goes from this core with its last one.
    pub fn remove(&self, core: &Core, channel: &Inner) {
        let Some(channel) = self.channels.borrow_mut().remove(&channel.id) else { return };
        let store = &channel.store;
        store.channels.borrow_mut().retain(|(_, id)| *id != channel.id);
        if store.channels.borrow().is_empty() {
            self.stores.borrow_mut().remove(&store.shared.id);
            store.base.close(core);
            store.drop_externals(core);
        }
    }

    fn channels_where(&self, store: StoreId, wanted: impl Fn(LvolKey) -> bool) -> Vec<Rc<Inner>> {
        let stores = self.stores.borrow();
        let Some(store) = stores.get(&store) else { return Vec::new() };
        let (open, channels) = (store.channels.borrow(), self.channels.borrow());
        let wanted = open.iter().filter(|(key, _)| wanted(*key));
        wanted.filter_map(|(_, id)| channels.get(id).cloned()).collect()
    }
}

impl StoreCore {
    /// The channel of an external device, opened at its first use.
    pub fn external(&self, core: &Core, id: &str) -> Option<Chan> {
        if let Some(chan) = self.externals.borrow().get(id) {
            return Some(chan.clone());
        }
        let entry = self.shared.external(id)?;
        let chan = match entry.open(core) {
            Ok(chan) => chan,
            Err(error) => {
                tracing::error!(external = id, %error, "cannot open the external device of a clone");
                return None;
            }
        };
        self.externals.borrow_mut().insert(id.to_owned(), chan.clone());
        Some(chan)
    }

    fn drop_externals(&self, core: &Core) {
        for (_, chan) in self.externals.borrow_mut().drain() {
            chan.close(core);
        }
    }
}

/// Stops a volume on this core; resolves when it has nothing at a disk any more.
pub async fn stop(core: Core, key: LvolKey) {
    let cores = Cores::of(&core);
    cores.stopped.borrow_mut().insert(key);
    let channels = cores.channels_where(key.store, |k| k == key);
    // Every channel is stopped before any is waited for.
    let waits: Vec<_> = channels.iter().filter_map(|c| c.stop(&core)).collect();
    futures::future::join_all(waits).await;
}

/// Stops all volumes of a store on this core for good; resolves when they have nothing at a disk any more.
pub async fn stop_store(core: Core, store: StoreId) {
    let cores = Cores::of(&core);
    cores.ended.borrow_mut().insert(store);
    let channels = cores.channels_where(store, |_| true);
    let waits: Vec<_> = channels.iter().filter_map(|c| c.stop(&core)).collect();
    futures::future::join_all(waits).await;
}

/// Lets a volume go on.
pub fn go_on(core: &Core, key: LvolKey) {
    let cores = Cores::of(core);
    cores.stopped.borrow_mut().remove(&key);
    if cores.is_stopped(key) {
        return;
    }
    for channel in cores.channels_where(key.store, |k| k == key) {
        channel.go_on(core);
    }
}

/// Resolves when all I/O of the store that is at a disk now has ended; none when there is none.
pub fn barrier(core: &Core, store: StoreId) -> Option<oneshot::Receiver<()>> {
    let cores = Cores::of(core);
    let stores = cores.stores.borrow();
    stores.get(&store).and_then(|s| s.flights.barrier())
}

/// Closes the channels of an external device that goes away, on this core.
pub fn forget_external(core: &Core, store: StoreId, id: &str) {
    let cores = Cores::of(core);
    let found = cores.stores.borrow().get(&store).cloned();
    if let Some(chan) = found.and_then(|s| s.externals.borrow_mut().remove(id)) {
        chan.close(core);
    }
}

/// Whether this core has let go of the store.
#[must_use]
pub fn is_gone(core: &Core, store: StoreId) -> bool {
    !Cores::of(core).stores.borrow().contains_key(&store)
}
