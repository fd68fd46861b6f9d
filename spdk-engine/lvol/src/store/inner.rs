//! What all handles of a store share: the device, what is used, the blobs, and the locks.
//!
//! # Locks
//! Nothing in [`State`] is borrowed across a wait. Operations mark the blobs they change ([`Inner::begin`]) and exclude
//! each other by that. Metadata of one blob is written under its `md` mutex; the super block under `super_lock`. An
//! operation that needs both a quiet blob and its `md` mutex quiets it first, because I/O in flight may want the mutex.
//! Mutexes of two blobs are only held together by an operation that has marked both.

use crate::{
    alloc::{Clusters, Pages},
    blob::Blob,
    device::Device,
    error::Error,
    hooks::Hooks,
    map::External,
    sync::{Epochs, Gate, LocalMutex, WaitList},
    types::*,
};
use blobstore_format::{Bits, Geometry, SuperBlock};
use std::{
    cell::{Cell, RefCell},
    collections::{BTreeMap, HashMap},
    rc::Rc,
    sync::Arc,
};
use uuid::Uuid;

/// Requests for clearing or copying that one operation keeps in flight.
pub(crate) const IN_FLIGHT: usize = 8;

/// An external device, or the place kept for it while it is absent.
pub(crate) struct ExternalSlot {
    pub(crate) shared: Arc<External>,
    pub(crate) device: RefCell<Option<Rc<dyn Device>>>,
}

/// Where a store is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    Loaded,
    Unloading,
    Ended,
}

/// What changes.
pub(crate) struct State {
    pub(crate) geometry: Geometry,
    pub(crate) super_block: SuperBlock,
    /// The super block on disk says that the store is in use.
    pub(crate) dirty: bool,
    /// A write whose outcome is unknown left something reserved that may be free. Only a recovery can tell, so the store
    /// must not be marked clean.
    pub(crate) uncertain: bool,
    pub(crate) clusters: Clusters,
    pub(crate) pages: Pages,
    pub(crate) blobids: Bits,
    pub(crate) super_blob: Rc<Blob>,
    pub(crate) blobs: BTreeMap<BlobId, Rc<Blob>>,
    /// Names in use, those of volumes in the making included.
    pub(crate) names: HashMap<String, BlobId>,
    pub(crate) uuids: HashMap<Uuid, BlobId>,
    pub(crate) externals: HashMap<String, Rc<ExternalSlot>>,
    pub(crate) name: String,
    pub(crate) uuid: Uuid,
}

/// Flushes, shared by all who wait for one.
#[derive(Default)]
struct Flushes {
    started: Cell<u64>,
    completed: Cell<u64>,
    running: Cell<bool>,
    waiting: WaitList,
}

/// The store behind its handles.
pub(crate) struct Inner {
    pub(crate) device: Rc<dyn Device>,
    pub(crate) hooks: Rc<dyn Hooks>,
    pub(crate) state: RefCell<State>,
    pub(crate) phase: Cell<Phase>,
    /// Operations in progress.
    pub(crate) operations: Gate,
    /// Accesses to the disk by a lookup in a map, of the data path in this crate.
    pub(crate) accesses: Epochs,
    pub(crate) super_lock: LocalMutex,
    /// Held while a volume gets another parent, so that no two such changes close a ring.
    pub(crate) relink: LocalMutex,
    flushes: Flushes,
}

impl Inner {
    pub(crate) fn new(device: Rc<dyn Device>, hooks: Rc<dyn Hooks>, state: State) -> Self {
        Self {
            device,
            hooks,
            state: RefCell::new(state),
            phase: Cell::new(Phase::Loaded),
            operations: Gate::default(),
            accesses: Epochs::default(),
            super_lock: LocalMutex::default(),
            relink: LocalMutex::default(),
            flushes: Flushes::default(),
        }
    }

    pub(crate) fn check_loaded(&self) -> Result<(), Error> {
        if self.phase.get() == Phase::Loaded { Ok(()) } else { Err(Error::Unloaded) }
    }

    pub(crate) fn geometry(&self) -> Geometry {
        self.state.borrow().geometry
    }

    pub(crate) fn cluster_size(&self) -> u64 {
        self.state.borrow().geometry.cluster_size.into()
    }

    /// The blob with this id.
    pub(crate) fn blob(&self, id: BlobId) -> Option<Rc<Blob>> {
        self.state.borrow().blobs.get(&id).cloned()
    }

    /// Makes all completed writes durable, if they are not already. Callers at the same time share flushes.
    pub(crate) async fn flush(&self) -> Result<(), Error> {
        if !self.device.write_cache() {
            return Ok(());
        }
        let flushes = &self.flushes;
        let wanted = flushes.started.get() + 1;
        loop {
            // Either a flush that began after this call has ended, or it is our turn to run one.
            let done = flushes
                .waiting
                .until(|| {
                    if flushes.completed.get() >= wanted {
                        Some(true)
                    } else {
                        (!flushes.running.get()).then_some(false)
                    }
                })
                .await;
            if done {
                return Ok(());
            }
            let number = flushes.started.get() + 1;
            flushes.started.set(number);
            flushes.running.set(true);
            self.state.borrow_mut().clusters.flush_begins();
            let result = self.device.flush().await;
            flushes.running.set(false);
            self.state.borrow_mut().clusters.flush_ends(result.is_ok());
            if result.is_ok() {
                flushes.completed.set(number);
            }
            flushes.waiting.wake_all();
            result?;
        }
    }

    /// Waits until no I/O uses a map lookup made before this call.
    pub(crate) async fn grace(&self) {
        self.accesses.drain().await;
        self.hooks.grace().await;
    }

    /// The slot of an external device; made when there is none.
    pub(crate) fn external(&self, id: &str) -> Rc<ExternalSlot> {
        let mut state = self.state.borrow_mut();
        let slot = state.externals.entry(id.to_owned()).or_insert_with(|| {
            Rc::new(ExternalSlot { shared: Arc::new(External::new(id.to_owned())), device: RefCell::new(None) })
        });
        slot.clone()
    }

    /// The outcome of a write is unknown: what it named stays reserved until the store is recovered.
    pub(crate) fn set_uncertain(&self) {
        self.state.borrow_mut().uncertain = true;
    }
}
