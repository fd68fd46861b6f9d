//! The garbage collector: deletes objects whose owners are gone, finishes foreground and orphaning deletions, empties
//! namespaces that are being deleted, and forgets old events.
//!
//! *Flow.* One task keeps the owner graph from a watch of everything. Each change puts the objects that it may concern
//! into a queue; [`Collector::examine`] looks at one of them in the store as it is now and takes one step. The step is a
//! change like any other, comes back through the watch, and leads to the next step.
//!
//! *Invariants.* Level triggered: a step depends only on the store, never on which event led there. Every deletion names
//! the uid and version that were looked at, so nothing newer is deleted by mistake.
//!
//! *When things fail.* A step that fails goes back into the queue. A collector that the history has left behind starts
//! over from a full list.

use std::{
    collections::{BTreeSet, HashMap},
    time::Duration,
};

use jiff::Timestamp;
use serde_json::Value;
use tokio_util::sync::CancellationToken;

use crate::{
    error::ApiError,
    registry::builtin,
    rest::{Api, DeleteOptions, FOREGROUND, ORPHAN, Propagation, meta},
    store::{Entry, Event, Key, Scope, StoreError},
};

/// Wait before failed steps are tried again.
const RETRY: Duration = Duration::from_secs(1);
/// Time between searches for old events.
const EVENT_SWEEP: Duration = Duration::from_secs(60);
/// Age at which events are forgotten, as in kube-apiserver.
const EVENT_AGE_SECONDS_MAX: i64 = 3600;

/// Runs the collector until shutdown.
pub async fn run(api: Api, shutdown: CancellationToken) {
    let mut collector = Collector { api, graph: Graph::default(), queue: BTreeSet::new() };
    let mut sweep = tokio::time::interval(EVENT_SWEEP);
    sweep.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        let result = tokio::select! {
            () = shutdown.cancelled() => return,
            result = collector.follow(&mut sweep) => result,
        };
        match result {
            Err(StoreError::Closed) => return,
            Err(error) => tracing::info!(%error, "the garbage collector starts over"),
            Ok(never) => match never {},
        }
    }
}

/// What an owner reference leads to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Owner {
    /// A living object.
    Solid,
    /// An object that waits for its dependents to go first.
    Waiting,
    /// Nothing.
    Absent,
}

/// Who refers to whom, by uid.
#[derive(Debug, Default)]
struct Graph {
    owners: HashMap<Key, Vec<String>>,
    dependents: HashMap<String, BTreeSet<Key>>,
    by_uid: HashMap<String, Key>,
}

impl Graph {
    fn remove(&mut self, key: &Key, object: &Value) {
        for owner in self.owners.remove(key).unwrap_or_default() {
            if let Some(dependents) = self.dependents.get_mut(&owner) {
                dependents.remove(key);
                if dependents.is_empty() {
                    self.dependents.remove(&owner);
                }
            }
        }
        self.by_uid.remove(meta::text(object, "uid"));
    }

    fn insert(&mut self, key: &Key, object: &Value) {
        let owners: Vec<String> = owner_references(object).map(|owner| text(owner, "uid").to_owned()).collect();
        for owner in &owners {
            self.dependents.entry(owner.clone()).or_default().insert(key.clone());
        }
        if !owners.is_empty() {
            self.owners.insert(key.clone(), owners);
        }
        self.by_uid.insert(meta::text(object, "uid").to_owned(), key.clone());
    }

    fn dependents(&self, object: &Value) -> Vec<Key> {
        self.dependents.get(meta::text(object, "uid")).into_iter().flatten().cloned().collect()
    }
}

fn owner_references(object: &Value) -> impl Iterator<Item = &Value> {
    object["metadata"]["ownerReferences"].as_array().into_iter().flatten()
}

fn text<'a>(value: &'a Value, field: &str) -> &'a str {
    value[field].as_str().unwrap_or_default()
}

#[derive(Debug)]
struct Collector {
    api: Api,
    graph: Graph,
    queue: BTreeSet<Key>,
}

impl Collector {
    /// Starts from a full list and follows the changes; ends only by an error.
    async fn follow(&mut self, sweep: &mut tokio::time::Interval) -> Result<std::convert::Infallible, StoreError> {
        let all = self.api.store.list(&Scope::all(), None, None)?;
        self.graph = Graph::default();
        for (key, entry) in &all.entries {
            self.graph.insert(key, &entry.value);
            self.queue.insert(key.clone());
        }
        let mut changes = self.api.store.watch(Scope::all(), all.revision)?;
        loop {
            self.work().await;
            let retry = !self.queue.is_empty();
            tokio::select! {
                batch = changes.next() => batch?.iter().for_each(|event| self.note(event)),
                _ = sweep.tick() => self.forget_old_events().await?,
                () = tokio::time::sleep(RETRY), if retry => {}
            }
        }
    }

    /// Takes a change into the graph and queues what it may concern.
    fn note(&mut self, event: &Event) {
        if let Some(previous) = &event.previous {
            self.graph.remove(&event.key, &previous.value);
            let owners =
                owner_references(&previous.value).filter_map(|owner| self.graph.by_uid.get(text(owner, "uid")));
            self.queue.extend(owners.cloned());
        }
        if let Some(object) = &event.value {
            self.graph.insert(&event.key, object);
            self.queue.insert(event.key.clone());
        }
        let object = event.value.as_ref().or(event.previous.as_ref().map(|entry| &entry.value));
        if let Some(object) = object.filter(|object| event.value.is_none() || meta::is_deleting(object)) {
            self.queue.extend(self.graph.dependents(object));
        }
        if event.value.is_none() && !event.key.namespace.is_empty() {
            self.queue.insert(Key::new(builtin::NAMESPACES, "", &event.key.namespace));
        }
    }

    /// Examines everything queued once; what fails stays queued.
    async fn work(&mut self) {
        for key in std::mem::take(&mut self.queue) {
            if let Err(error) = self.examine(&key).await {
                // Conflicts are the normal course: the object changed meanwhile and is looked at again.
                tracing::debug!(%error, ?key, "garbage collection step");
                self.queue.insert(key);
            }
        }
    }

    /// Takes the next step for one object, if there is any to take.
    async fn examine(&self, key: &Key) -> Result<(), ApiError> {
        let Some(entry) = self.api.store.get(key) else { return Ok(()) };
        let object = &entry.value;
        if key.resource == builtin::NAMESPACES && meta::is_deleting(object) {
            return self.empty_namespace(key, &entry).await;
        }
        if !key.namespace.is_empty() && self.api.store.get(&Key::new(builtin::NAMESPACES, "", &key.namespace)).is_none()
        {
            return self.delete(key, &entry, Propagation::Background).await;
        }
        if meta::is_deleting(object) {
            let finalizers = meta::finalizers(object);
            if finalizers.contains(&ORPHAN) {
                return self.orphan_dependents(key, &entry).await;
            }
            if finalizers.contains(&FOREGROUND) {
                return self.delete_dependents(key, &entry).await;
            }
            return Ok(());
        }
        self.check_owners(key, &entry).await
    }

    async fn check_owners(&self, key: &Key, entry: &Entry) -> Result<(), ApiError> {
        let owners: Vec<(&Value, Owner)> =
            owner_references(&entry.value).map(|owner| (owner, self.owner(key, owner))).collect();
        let any = |state: Owner| owners.iter().any(|(_, found)| *found == state);
        if owners.is_empty() || !(any(Owner::Absent) || any(Owner::Waiting)) {
            return Ok(());
        }
        if any(Owner::Solid) {
            let gone: Vec<String> = owners
                .iter()
                .filter(|(_, state)| *state == Owner::Absent)
                .map(|(owner, _)| text(owner, "uid").to_owned())
                .collect();
            if gone.is_empty() {
                return Ok(());
            }
            return self.drop_owners(key, entry, &gone).await;
        }
        let has_dependents = !self.graph.dependents(&entry.value).is_empty();
        let foreground = any(Owner::Waiting) && has_dependents;
        self.delete(key, entry, if foreground { Propagation::Foreground } else { Propagation::Background }).await
    }

    fn owner(&self, key: &Key, reference: &Value) -> Owner {
        // An owner of a kind not served here cannot be looked up: nothing is deleted on a guess.
        let Some(kind) = self.api.registry.by_kind(text(reference, "apiVersion"), text(reference, "kind")) else {
            return Owner::Solid;
        };
        if kind.namespaced && key.namespace.is_empty() {
            return Owner::Solid;
        }
        let namespace = if kind.namespaced { key.namespace.as_str() } else { "" };
        let Some(owner) = self.api.store.get(&kind.key(namespace, text(reference, "name"))) else {
            return Owner::Absent;
        };
        if meta::text(&owner.value, "uid") != text(reference, "uid") {
            return Owner::Absent;
        }
        let waits = meta::is_deleting(&owner.value) && meta::finalizers(&owner.value).contains(&FOREGROUND);
        if waits { Owner::Waiting } else { Owner::Solid }
    }

    async fn delete(&self, key: &Key, entry: &Entry, propagation: Propagation) -> Result<(), ApiError> {
        let Some(kind) = self.api.registry.by_storage(&key.resource) else { return Ok(()) };
        let options = DeleteOptions {
            uid: Some(meta::text(&entry.value, "uid").to_owned()),
            resource_version: Some(entry.revision.to_string()),
            propagation: (propagation == Propagation::Foreground).then_some(propagation),
            dry_run: false,
        };
        match self.api.delete(kind, &key.namespace, &key.name, &options).await {
            Err(error) if error.code() == 404 => Ok(()),
            result => result.map(|_| ()),
        }
    }

    /// Deletes the dependents of an object that waits for them, or lets it go when there are none left.
    async fn delete_dependents(&self, key: &Key, entry: &Entry) -> Result<(), ApiError> {
        let uid = meta::text(&entry.value, "uid");
        let mut blocked = false;
        for dependent in self.graph.dependents(&entry.value) {
            let Some(found) = self.api.store.get(&dependent) else { continue };
            blocked |= owner_references(&found.value)
                .any(|owner| text(owner, "uid") == uid && owner["blockOwnerDeletion"] == true);
            if !meta::is_deleting(&found.value) {
                self.check_owners(&dependent, &found).await?;
            }
        }
        if blocked {
            return Ok(());
        }
        self.api.edit(key, entry, |object| meta::set_finalizer(object, FOREGROUND, false)).await
    }

    /// Takes the object out of its dependents' owners, and then lets it go.
    async fn orphan_dependents(&self, key: &Key, entry: &Entry) -> Result<(), ApiError> {
        let uid = meta::text(&entry.value, "uid").to_owned();
        for dependent in self.graph.dependents(&entry.value) {
            if let Some(found) = self.api.store.get(&dependent) {
                self.drop_owners(&dependent, &found, std::slice::from_ref(&uid)).await?;
            }
        }
        self.api.edit(key, entry, |object| meta::set_finalizer(object, ORPHAN, false)).await
    }

    async fn drop_owners(&self, key: &Key, entry: &Entry, uids: &[String]) -> Result<(), ApiError> {
        let keep = |owner: &&Value| !uids.iter().any(|uid| uid == text(owner, "uid"));
        let kept: Vec<Value> = owner_references(&entry.value).filter(keep).cloned().collect();
        let kept = (!kept.is_empty()).then_some(Value::Array(kept));
        self.api.edit(key, entry, |object| meta::set_or_remove(object, "ownerReferences", kept)).await
    }

    /// Deletes what is in a namespace, or the namespace when nothing is.
    async fn empty_namespace(&self, key: &Key, entry: &Entry) -> Result<(), ApiError> {
        let scope = Scope { resource: None, namespace: Some(key.name.clone()) };
        let content =
            self.api.store.list(&scope, None, None).map_err(|error| ApiError::internal(error.to_string()))?.entries;
        for (inside, found) in &content {
            if !meta::is_deleting(&found.value) {
                self.delete(inside, found, Propagation::Background).await?;
            }
        }
        if content.is_empty() && meta::finalizers(&entry.value).is_empty() {
            return self.api.remove(key, entry).await;
        }
        Ok(())
    }

    async fn forget_old_events(&self) -> Result<(), StoreError> {
        let oldest = self.api.clock.now().as_second() - EVENT_AGE_SECONDS_MAX;
        for (key, entry) in self.api.store.list(&Scope::resource(builtin::EVENTS, None), None, None)?.entries {
            if last_seen_second(&entry.value) < oldest
                && let Err(error) = self.api.remove(&key, &entry).await
            {
                tracing::debug!(%error, ?key, "forgetting an event");
            }
        }
        Ok(())
    }
}

/// When an event was last seen, in seconds since 1970.
fn last_seen_second(event: &Value) -> i64 {
    let dates = [
        &event["series"]["lastObservedTime"],
        &event["lastTimestamp"],
        &event["eventTime"],
        &event["metadata"]["creationTimestamp"],
    ];
    let seconds = dates.into_iter().filter_map(|date| date.as_str()?.parse::<Timestamp>().ok());
    seconds.map(Timestamp::as_second).max().unwrap_or(i64::MAX)
}
