//! Carries actions out: the one place that writes to the API server.
//!
//! *Contract.* The one of `addax_plan::action`: in order, the first failure ends the pass; every patch holds only for
//! the version that the plan saw, or the one that an earlier write of the same pass made; what the API server answers
//! is in the datastore before the pass ends.
//!
//! *When things fail.* A conflict says that the snapshot is old: the object is read again, so that the repetition does
//! not depend on the watch's speed. When it is unknown whether a write was done (no answer, or an error of the server),
//! the object is read before the next pass of the same key: no plan runs on a snapshot that is older than its own
//! writes.

use std::collections::{BTreeSet, HashMap};
use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use addax_api::{GROUP, VERSION};
use addax_plan::action::{Action, AgentCall, Key, Kind, Object, ObjectRef, Severity};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Event, EventSource, ObjectReference};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, Time};
use kube::api::{DeleteParams, ObjectMeta, Patch, PatchParams, PostParams, Preconditions};
use kube::{Api, Client};
use serde::Serialize;
use serde_json::{Value, json};

use crate::agents::{Agents, CallError};
use crate::datastore::{Datastore, Stored, with_kind};

/// Deadline of a call of the API server.
const API_DEADLINE: Duration = Duration::from_secs(15);
/// What writes are made as.
const COMPONENT: &str = "addax-manager";
/// The longest message of an event, in bytes: the API allows no more.
const EVENT_MESSAGE_MAX: usize = 1024;

/// Why a pass ended early.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ActError {
    /// The snapshot was old.
    #[error("{kind} {name} has changed meanwhile")]
    Conflict {
        /// The kind.
        kind: &'static str,
        /// The object.
        name: String,
    },
    /// The API server refused, or could not be reached.
    #[error("{doing} {kind} {name}: {source}")]
    Api {
        /// What was asked.
        doing: &'static str,
        /// The kind.
        kind: &'static str,
        /// The object.
        name: String,
        /// What it said.
        source: Box<kube::Error>,
    },
    /// The API server did not answer in time.
    #[error("{doing} {kind} {name}: no answer within {} s", API_DEADLINE.as_secs())]
    Deadline {
        /// What was asked.
        doing: &'static str,
        /// The kind.
        kind: &'static str,
        /// The object.
        name: String,
    },
    /// The agent.
    #[error(transparent)]
    Agent(#[from] CallError),
    /// This manager may not act.
    #[error("the lease of this node has run out")]
    NotAlive,
}

/// Carries actions out.
pub(crate) struct Actor {
    store: Arc<Datastore>,
    agents: Arc<Agents>,
    client: Client,
    namespace: String,
    /// Objects whose writes have an unknown outcome, by the key whose pass wrote them.
    unsure: Mutex<HashMap<Key, BTreeSet<Key>>>,
}

impl std::fmt::Debug for Actor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Actor").field("namespace", &self.namespace).finish_non_exhaustive()
    }
}

impl std::fmt::Debug for Call<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {} {}", self.doing, self.kind.as_str(), self.name)
    }
}

/// What a pass has written so far: the versions by which later writes go.
#[derive(Debug, Default)]
struct Pass {
    versions: HashMap<Key, String>,
    requeue_at: Option<Timestamp>,
}

impl Pass {
    fn version<'a>(&'a self, object: &'a ObjectRef) -> &'a str {
        self.versions.get(&Key::new(object.kind, &object.name)).unwrap_or(&object.resource_version)
    }
}

/// A call of the API server, for errors.
#[derive(Clone, Copy)]
struct Call<'a> {
    doing: &'static str,
    kind: Kind,
    name: &'a str,
}

impl Actor {
    pub(crate) fn new(store: Arc<Datastore>, agents: Arc<Agents>, client: Client, namespace: String) -> Self {
        Self { store, agents, client, namespace, unsure: Mutex::default() }
    }

    /// Makes the snapshot as new as the writes that earlier passes of this key have made. Call it before the plan.
    pub(crate) async fn settle(&self, key: &Key) -> Result<(), ActError> {
        let unsure = self.lock().get(key).cloned().unwrap_or_default();
        for object in unsure {
            with_kind!(object.kind, K => self.refresh::<K>(&object.name).await?);
            let mut unsure = self.lock();
            if let Some(objects) = unsure.get_mut(key) {
                objects.remove(&object);
                if objects.is_empty() {
                    unsure.remove(key);
                }
            }
        }
        Ok(())
    }

    /// Carries the actions of one plan out. Returns when to plan again, if that was asked for.
    pub(crate) async fn carry_out(&self, key: &Key, actions: Vec<Action>) -> Result<Option<Timestamp>, ActError> {
        let mut pass = Pass::default();
        for action in actions {
            let written = written_key(&action);
            let result = self.carry_out_one(&mut pass, action).await;
            if let (Err(error), Some(written)) = (&result, written)
                && is_unsure(error)
            {
                self.lock().entry(key.clone()).or_default().insert(written);
            }
            result?;
        }
        Ok(pass.requeue_at)
    }

    async fn carry_out_one(&self, pass: &mut Pass, action: Action) -> Result<(), ActError> {
        match action {
            Action::Create(object) => self.create_any(pass, *object).await,
            Action::PatchSpec { object, patch } => {
                with_kind!(object.kind, K => self.patch::<K>(pass, &object, patch, false).await)
            }
            Action::PatchStatus { object, patch } => {
                with_kind!(object.kind, K => self.patch::<K>(pass, &object, patch, true).await)
            }
            Action::Delete { object } => with_kind!(object.kind, K => self.delete::<K>(pass, &object).await),
            Action::Confirm { object } => with_kind!(object.kind, K => self.confirm::<K>(pass, &object).await),
            Action::Agent { node, call } => self.call_agent(&node, &call).await,
            Action::Event { object, severity, reason, message } => {
                self.tell(&object, severity, reason, message).await;
                Ok(())
            }
            Action::RequeueAt(at) => {
                pass.requeue_at = Some(pass.requeue_at.map_or(at, |earlier| earlier.min(at)));
                Ok(())
            }
        }
    }

    async fn create_any(&self, pass: &mut Pass, object: Object) -> Result<(), ActError> {
        match object {
            Object::VolumeAttachment(object) => self.create(pass, &object).await,
            Object::Engine(object) => self.create(pass, &object).await,
            Object::Replica(object) => self.create(pass, &object).await,
            Object::Node(object) => self.create(pass, &object).await,
            Object::InstanceManager(object) => self.create(pass, &object).await,
            Object::Setting(object) => self.create(pass, &object).await,
        }
    }

    async fn create<K: Stored + Serialize>(&self, pass: &mut Pass, object: &K) -> Result<(), ActError> {
        let name = object.name_any();
        let call = Call { doing: "create", kind: K::KIND, name: &name };
        let params = PostParams { field_manager: Some(COMPONENT.to_owned()), ..PostParams::default() };
        match self.ask(call, self.api::<K>().create(&params, object)).await {
            Ok(new) => {
                tracing::info!(object = ?call, "done");
                self.take(pass, new);
                Ok(())
            }
            Err(error) => self.old_snapshot::<K>(call, error).await,
        }
    }

    async fn patch<K: Stored>(
        &self,
        pass: &mut Pass,
        object: &ObjectRef,
        mut patch: Value,
        status: bool,
    ) -> Result<(), ActError> {
        let doing = if status { "patch the status of" } else { "patch" };
        let call = Call { doing, kind: K::KIND, name: &object.name };
        patch["metadata"]["resourceVersion"] = json!(pass.version(object));
        let (api, params, merge) = (self.api::<K>(), PatchParams::apply(COMPONENT), Patch::Merge(&patch));
        let answer = match status {
            true => self.ask(call, api.patch_status(&object.name, &params, &merge)).await,
            false => self.ask(call, api.patch(&object.name, &params, &merge)).await,
        };
        match answer {
            Ok(new) => {
                tracing::debug!(object = ?call, %patch, "done");
                self.take(pass, new);
                Ok(())
            }
            Err(error) => self.old_snapshot::<K>(call, error).await,
        }
    }

    async fn delete<K: Stored>(&self, pass: &mut Pass, object: &ObjectRef) -> Result<(), ActError> {
        let call = Call { doing: "delete", kind: K::KIND, name: &object.name };
        let preconditions =
            Preconditions { uid: Some(object.uid.clone()), resource_version: Some(pass.version(object).to_owned()) };
        let params = DeleteParams::background().preconditions(preconditions);
        match self.ask(call, self.api::<K>().delete(&object.name, &params)).await {
            Ok(answer) => {
                tracing::info!(object = ?call, "done");
                match answer.left() {
                    // It waits for its finalizers.
                    Some(waiting) => self.take(pass, waiting),
                    None => self.store.answered_end::<K>(&object.name, &object.uid),
                }
                Ok(())
            }
            Err(error) if code(&error) == Some(404) => {
                self.store.answered_end::<K>(&object.name, &object.uid);
                Ok(())
            }
            Err(error) => self.old_snapshot::<K>(call, error).await,
        }
    }

    async fn confirm<K: Stored>(&self, pass: &Pass, object: &ObjectRef) -> Result<(), ActError> {
        let call = Call { doing: "read", kind: K::KIND, name: &object.name };
        let now = self.ask(call, self.api::<K>().get_opt(&object.name)).await?;
        let same = now.as_ref().is_some_and(|now| {
            now.uid().as_deref() == Some(object.uid.as_str())
                && now.resource_version().as_deref() == Some(pass.version(object))
        });
        if same {
            return Ok(());
        }
        match now {
            Some(now) => self.store.answered(now),
            None => self.store.answered_end::<K>(&object.name, &object.uid),
        }
        Err(conflict(call))
    }

    async fn call_agent(&self, node: &str, call: &AgentCall) -> Result<(), ActError> {
        // Writes to the API server are fenced by versions; an agent knows none, so look at the clock once more.
        if !self.store.is_alive(Timestamp::now()) {
            return Err(ActError::NotAlive);
        }
        self.agents.call(node, call).await?;
        tracing::info!(node, ?call, "done");
        Ok(())
    }

    /// Reads an object into the snapshot.
    async fn refresh<K: Stored>(&self, name: &str) -> Result<(), ActError> {
        let call = Call { doing: "read", kind: K::KIND, name };
        let uid = self.store.uid::<K>(name).unwrap_or_default();
        match self.ask(call, self.api::<K>().get_opt(name)).await? {
            Some(object) => self.store.answered(object),
            None => self.store.answered_end::<K>(name, &uid),
        }
        Ok(())
    }

    /// What a refused write means for the snapshot: after a conflict it is made new.
    async fn old_snapshot<K: Stored>(&self, call: Call<'_>, error: ActError) -> Result<(), ActError> {
        if !matches!(code(&error), Some(404 | 409)) {
            return Err(error);
        }
        self.refresh::<K>(call.name).await?;
        if code(&error) == Some(404) && self.store.uid::<K>(call.name).is_none() && call.doing == "create" {
            // Not the object is missing but its namespace.
            return Err(error);
        }
        Err(conflict(call))
    }

    fn take<K: Stored>(&self, pass: &mut Pass, object: K) {
        let key = Key::new(K::KIND, &object.name_any());
        pass.versions.insert(key, object.resource_version().unwrap_or_default());
        self.store.answered(object);
    }

    async fn tell(&self, object: &ObjectRef, severity: Severity, reason: String, message: String) {
        let event = self.event(object, severity, reason, message);
        let api: Api<Event> = Api::namespaced(self.client.clone(), &self.namespace);
        let call = Call { doing: "tell of", kind: object.kind, name: &object.name };
        if let Err(error) = self.ask(call, api.create(&PostParams::default(), &event)).await {
            tracing::warn!(%error, "an event is lost");
        }
    }

    fn event(&self, object: &ObjectRef, severity: Severity, reason: String, mut message: String) -> Event {
        let (now, me) = (Timestamp::now(), self.store.read(|observed| observed.this_node.name.clone()));
        message.truncate(message.floor_char_boundary(EVENT_MESSAGE_MAX));
        let severity = match severity {
            Severity::Normal => "Normal",
            Severity::Warning => "Warning",
        };
        Event {
            metadata: ObjectMeta {
                name: Some(format!("{}.{}", object.name, uuid::Uuid::new_v4().simple())),
                namespace: Some(self.namespace.clone()),
                ..ObjectMeta::default()
            },
            involved_object: ObjectReference {
                api_version: Some(format!("{GROUP}/{VERSION}")),
                kind: Some(object.kind.as_str().to_owned()),
                name: Some(object.name.clone()),
                namespace: Some(self.namespace.clone()),
                uid: Some(object.uid.clone()),
                resource_version: Some(object.resource_version.clone()),
                field_path: None,
            },
            type_: Some(severity.to_owned()),
            action: Some(reason.clone()),
            reason: Some(reason),
            message: Some(message),
            source: Some(EventSource { component: Some(COMPONENT.to_owned()), host: Some(me.clone()) }),
            reporting_component: Some(COMPONENT.to_owned()),
            reporting_instance: Some(me),
            first_timestamp: Some(Time(now)),
            last_timestamp: Some(Time(now)),
            event_time: Some(MicroTime(now)),
            count: Some(1),
            ..Event::default()
        }
    }

    async fn ask<T>(
        &self,
        call: Call<'_>,
        answer: impl Future<Output = Result<T, kube::Error>>,
    ) -> Result<T, ActError> {
        let (doing, kind, name) = (call.doing, call.kind.as_str(), call.name.to_owned());
        match tokio::time::timeout(API_DEADLINE, answer).await {
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(source)) => Err(ActError::Api { doing, kind, name, source: Box::new(source) }),
            Err(_) => Err(ActError::Deadline { doing, kind, name }),
        }
    }

    fn api<K: Stored>(&self) -> Api<K> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Key, BTreeSet<Key>>> {
        self.unsure.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn conflict(call: Call<'_>) -> ActError {
    ActError::Conflict { kind: call.kind.as_str(), name: call.name.to_owned() }
}

/// The HTTP status of a refusal.
fn code(error: &ActError) -> Option<u16> {
    match error {
        ActError::Api { source, .. } => match source.as_ref() {
            kube::Error::Api(status) => Some(status.code),
            _ => None,
        },
        _ => None,
    }
}

/// Whether the write may have been done all the same: only a refusal for a reason of the request's own says no.
fn is_unsure(error: &ActError) -> bool {
    match error {
        ActError::Api { .. } => code(error).is_none_or(|code| code >= 500),
        ActError::Deadline { .. } => true,
        _ => false,
    }
}

/// The object that an action writes.
fn written_key(action: &Action) -> Option<Key> {
    match action {
        Action::Create(object) => Some(object.key()),
        Action::PatchSpec { object, .. } | Action::PatchStatus { object, .. } | Action::Delete { object } => {
            Some(Key::new(object.kind, &object.name))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests;
