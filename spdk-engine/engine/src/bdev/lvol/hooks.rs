//! The store's pauses and barriers, across all cores, by messages.
//!
//! *Invariants.* Messages to a core arrive in order: I/O that a core kept or began before it answered a stop is known to
//! the store's owner by then. A core that has stopped counts as done.
//!
//! *When things fail.* A disk that does not answer keeps a pause waiting; every [`TELL_NS`] the log says so.

use std::cell::RefCell;
use std::collections::HashMap;
use std::future::Future;
use std::rc::Rc;

use futures::channel::oneshot;
use futures::future::join_all;
use lvol_core::{BlobId, Hooks, LocalFuture};

use super::percore;
use super::shared::{LvolKey, StoreId};
use crate::reactor::Core;
use crate::reactor::driver::{NANOS_PER_S, Nanos};

/// How often a long wait is told.
const TELL_NS: Nanos = 10 * NANOS_PER_S;

/// Requests of channels that the owner is serving, by volume.
#[derive(Default)]
pub struct Serving {
    counts: RefCell<HashMap<BlobId, u64>>,
    waiting: RefCell<Vec<oneshot::Sender<()>>>,
}

impl Serving {
    /// A request of the volume is being served.
    pub fn begin(&self, blob: BlobId) {
        *self.counts.borrow_mut().entry(blob).or_default() += 1;
    }

    /// It was answered.
    pub fn end(&self, blob: BlobId) {
        let mut counts = self.counts.borrow_mut();
        if let Some(count) = counts.get_mut(&blob) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&blob);
                for sender in self.waiting.take() {
                    let _ = sender.send(());
                }
            }
        }
    }

    /// Ready when no request of the volume (of any, for none) is being served.
    pub async fn drained(&self, blob: Option<BlobId>) {
        loop {
            let is_busy = match blob {
                Some(blob) => self.counts.borrow().contains_key(&blob),
                None => !self.counts.borrow().is_empty(),
            };
            if !is_busy {
                return;
            }
            let (sender, receiver) = oneshot::channel();
            self.waiting.borrow_mut().push(sender);
            let _ = receiver.await;
        }
    }
}

/// The hooks of one store, on its owner core.
pub struct EngineHooks {
    pub core: Core,
    pub store: StoreId,
    pub serving: Rc<Serving>,
}

impl EngineHooks {
    /// Stops all volumes for good and waits for what is under way.
    pub async fn end(&self) {
        let store = self.store;
        let calls = self
            .core
            .peers()
            .iter()
            .map(|peer| self.core.call_async(peer.id, move |core| percore::stop_store(core.clone(), store)))
            .collect::<Vec<_>>();
        self.wait("the end of all I/O", join_all(calls)).await;
        self.wait("the requests of volumes", self.serving.drained(None)).await;
    }

    async fn wait<T>(&self, what: &str, future: impl Future<Output = T>) -> T {
        let mut future = std::pin::pin!(future);
        let mut waited_s = 0;
        loop {
            if let Some(done) = self.core.timeout(TELL_NS, future.as_mut()).await {
                return done;
            }
            waited_s += TELL_NS / NANOS_PER_S;
            tracing::warn!(store = self.store.0, waited_s, what, "a store waits");
        }
    }
}

impl Hooks for EngineHooks {
    fn quiesce(&self, lvol: BlobId) -> LocalFuture<'_, ()> {
        let key = LvolKey { store: self.store, blob: lvol };
        let calls: Vec<_> = self
            .core
            .peers()
            .iter()
            .map(|peer| self.core.call_async(peer.id, move |core| percore::stop(core.clone(), key)))
            .collect();
        Box::pin(async move {
            self.wait("the I/O of a volume", join_all(calls)).await;
            self.wait("the requests of a volume", self.serving.drained(Some(lvol))).await;
        })
    }

    fn resume(&self, lvol: BlobId) {
        let key = LvolKey { store: self.store, blob: lvol };
        for peer in self.core.peers().iter() {
            self.core.post(peer.id, move |core| percore::go_on(core, key));
        }
    }

    fn grace(&self) -> LocalFuture<'_, ()> {
        let store = self.store;
        let barrier = move |core: &Core| {
            let wait = percore::barrier(core, store);
            async move {
                if let Some(wait) = wait {
                    let _ = wait.await;
                }
            }
        };
        let calls: Vec<_> = self.core.peers().iter().map(|peer| self.core.call_async(peer.id, barrier)).collect();
        Box::pin(async move {
            self.wait("I/O that may use a cluster", join_all(calls)).await;
        })
    }
}
