//! The shared watches: one per kind, one for leases. They feed the datastore and nothing else reads the API at rest.
//!
//! *When things fail.* A watch that has died without a word is found by the lease (see `lease`) and begun anew. The watcher lists and watches again with growing delays, for ever. An object that cannot be read
//! (written by a newer version, say) is reported and left as it was here; the watch goes on.

use std::collections::BTreeSet;
use std::pin::pin;
use std::sync::Arc;

use addax_api::{LABEL_NODE, Resource, ResourceExt};
use futures::{Stream, StreamExt};
use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::Lease;
use kube::core::DeserializeGuard;
use kube::runtime::watcher::{self, Event, watcher};
use kube::runtime::{WatchStreamExt, watcher::Error};
use kube::{Api, Client};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::{Datastore, Stored, with_kind};
use crate::queue::delay;
use addax_plan::action::Kind;

/// Starts every watch. Each says once through the channel that its first list is in.
pub(crate) fn start(
    store: &Arc<Datastore>,
    client: &Client,
    namespace: &str,
    tasks: &TaskTracker,
    shutdown: &CancellationToken,
) -> mpsc::Receiver<()> {
    let (synced, all) = mpsc::channel(WATCHES);
    for kind in Kind::ALL {
        with_kind!(kind, K => {
            let watch = Watch::<K> {
                store: store.clone(),
                api: Api::namespaced(client.clone(), namespace),
                guarded: Api::namespaced(client.clone(), namespace),
                synced: Some(synced.clone()),
                listing: Listing::default(),
            };
            tasks.spawn(shutdown.clone().run_until_cancelled_owned(watch.run()));
        });
    }
    let leases = watch_leases(store.clone(), Api::namespaced(client.clone(), namespace), synced);
    tasks.spawn(shutdown.clone().run_until_cancelled_owned(leases));
    all
}

/// How many watches there are.
pub(crate) const WATCHES: usize = Kind::ALL.len() + 1;

struct Watch<K: Stored> {
    store: Arc<Datastore>,
    api: Api<K>,
    guarded: Api<DeserializeGuard<K>>,
    synced: Option<mpsc::Sender<()>>,
    listing: Listing<K>,
}

/// A list on its way.
struct Listing<K> {
    objects: Vec<K>,
    unreadable: BTreeSet<String>,
}

impl<K> Default for Listing<K> {
    fn default() -> Self {
        Self { objects: Vec::new(), unreadable: BTreeSet::new() }
    }
}

impl<K: Stored> Watch<K> {
    async fn run(mut self) {
        loop {
            let (store, guarded) = (self.store.clone(), self.guarded.clone());
            let mut events = pin!(watcher(guarded, watcher::Config::default()).default_backoff());
            while let Some(event) = next(&store, &mut events).await {
                match event {
                    Ok(event) => self.take(event).await,
                    Err(error) => report(K::KIND.as_str(), &error),
                }
            }
        }
    }

    async fn take(&mut self, event: Event<DeserializeGuard<K>>) {
        match event {
            Event::Init => self.listing = Listing::default(),
            Event::InitApply(DeserializeGuard(Ok(object))) => self.listing.objects.push(object),
            Event::InitApply(DeserializeGuard(Err(invalid))) => {
                self.unreadable(&invalid);
                self.listing.unreadable.extend(invalid.metadata.name);
            }
            Event::InitDone => {
                let Listing { objects, unreadable } = std::mem::take(&mut self.listing);
                for name in self.store.listed(objects, &unreadable) {
                    self.read_back(&name).await;
                }
                if let Some(synced) = self.synced.take() {
                    // The receiver goes once everybody has told.
                    let _ = synced.try_send(());
                }
            }
            Event::Apply(DeserializeGuard(Ok(object))) => self.store.watched(object),
            Event::Apply(DeserializeGuard(Err(invalid))) => self.unreadable(&invalid),
            Event::Delete(guard) => self.store.watched_end(K::KIND, guard.meta()),
        }
    }

    fn unreadable(&self, invalid: &kube::core::error_boundary::InvalidObject) {
        let name = invalid.metadata.name.as_deref().unwrap_or_default();
        tracing::error!(kind = K::KIND.as_str(), name, error = invalid.error, "the object cannot be read");
    }

    /// Asks for an object until the server says what became of it.
    async fn read_back(&self, name: &str) {
        for failures in 0.. {
            let uid = self.store.uid::<K>(name).unwrap_or_default();
            match self.api.get_opt(name).await {
                Ok(Some(object)) => return self.store.answered(object),
                Ok(None) => return self.store.answered_end::<K>(name, &uid),
                Err(error) => tracing::warn!(kind = K::KIND.as_str(), name, %error, "the object cannot be asked for"),
            }
            tokio::time::sleep(delay(failures)).await;
        }
    }
}

async fn watch_leases(store: Arc<Datastore>, api: Api<Lease>, synced: mpsc::Sender<()>) {
    let mut synced = Some(synced);
    let mut listing = Vec::new();
    loop {
        let config = watcher::Config::default().labels(LABEL_NODE);
        let mut events = pin!(watcher(api.clone(), config).default_backoff());
        while let Some(event) = next(&store, &mut events).await {
            match event {
                Ok(Event::Init) => listing.clear(),
                Ok(Event::InitApply(lease)) => listing.push(lease),
                Ok(Event::InitDone) => {
                    store.leases_listed(&std::mem::take(&mut listing), Timestamp::now());
                    if let Some(synced) = synced.take() {
                        let _ = synced.try_send(());
                    }
                }
                Ok(Event::Apply(lease)) => store.lease_watched(&lease, Timestamp::now()),
                Ok(Event::Delete(lease)) => store.lease_ended(&lease.name_any()),
                Err(error) => report("Lease", &error),
            }
        }
    }
}

/// The next event; `None` when the watch is to begin anew.
async fn next<E>(store: &Datastore, events: &mut (impl Stream<Item = E> + Unpin)) -> Option<E> {
    tokio::select! {
        event = events.next() => event,
        () = store.watches_stale.notified() => None,
    }
}

fn report(kind: &str, error: &Error) {
    match error {
        // The server ends watches now and then: this is how it goes.
        Error::WatchError(status) if status.code == 410 => tracing::debug!(kind, "the watch begins anew"),
        _ => tracing::warn!(kind, %error, "the watch is interrupted"),
    }
}
