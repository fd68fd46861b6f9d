//! Each action against the embedded API server, with a snapshot that is old where that matters.

use super::*;
use addax_api::{NAMESPACE, Setting, SettingSpec, Volume, VolumeSpec, crds};
use addax_apiserver::fault::{Fault, FaultHook, Outcome};
use addax_apiserver::{Embedded, ServerConfig};
use addax_plan::observed::{Tabled, ThisNode};

struct World {
    actor: Actor,
    store: Arc<Datastore>,
    volumes: Api<Volume>,
    events: Api<Event>,
    _server: Embedded,
}

async fn world_with(faults: FaultHook) -> World {
    let config = ServerConfig { crds: crds(), faults, ..ServerConfig::default() };
    let server = Embedded::start(&config).await.unwrap();
    let client = Client::new(server.service(), NAMESPACE);
    let store = Arc::new(Datastore::new(ThisNode { name: "n1".to_owned(), ..ThisNode::default() }));
    let agents = Arc::new(Agents::new(store.clone(), None).unwrap());
    World {
        actor: Actor::new(store.clone(), agents, client.clone(), NAMESPACE.to_owned()),
        store,
        volumes: Api::namespaced(client.clone(), NAMESPACE),
        events: Api::namespaced(client, NAMESPACE),
        _server: server,
    }
}

async fn world() -> World {
    world_with(FaultHook::none()).await
}

impl World {
    /// A volume that the snapshot knows.
    async fn volume(&self, name: &str) -> ObjectRef {
        let volume = Volume::new(name, VolumeSpec::with_size(1 << 20));
        let volume = self.volumes.create(&PostParams::default(), &volume).await.unwrap();
        self.store.watched(volume.clone());
        volume.reference()
    }

    /// Somebody else changes it.
    async fn touch(&self, name: &str) -> ObjectRef {
        let patch = json!({"metadata": {"labels": {"touched": "yes"}}});
        self.volumes.patch(name, &PatchParams::default(), &Patch::Merge(&patch)).await.unwrap().reference()
    }

    fn here(&self, name: &str) -> Option<ObjectRef> {
        self.store.read(|observed| observed.volumes.get(name).map(Tabled::reference))
    }

    async fn act(&self, actions: Vec<Action>) -> Result<Option<Timestamp>, ActError> {
        self.actor.carry_out(&key(), actions).await
    }
}

fn key() -> Key {
    Key::new(Kind::Volume, "v")
}

fn own(object: &ObjectRef, node: &str) -> Action {
    Action::PatchStatus { object: object.clone(), patch: json!({"status": {"ownerID": node}}) }
}

fn grow(object: &ObjectRef) -> Action {
    Action::PatchSpec { object: object.clone(), patch: json!({"spec": {"size": 2 << 20}}) }
}

fn is_conflict(result: &Result<Option<Timestamp>, ActError>) -> bool {
    matches!(result, Err(ActError::Conflict { .. }))
}

#[tokio::test]
async fn later_writes_of_a_pass_go_by_the_version_of_the_earlier_ones() {
    let world = world().await;
    let object = world.volume("v").await;
    world.act(vec![grow(&object), own(&object, "n1"), Action::Delete { object: object.clone() }]).await.unwrap();
    assert_eq!(world.here("v"), None);
    assert!(world.volumes.get_opt("v").await.unwrap().is_none());
}

#[tokio::test]
async fn what_is_answered_is_in_the_snapshot() {
    let world = world().await;
    let object = world.volume("v").await;
    world.act(vec![own(&object, "n1")]).await.unwrap();
    let owner = world.store.read(|observed| observed.volumes.get("v").unwrap().owner().to_owned());
    assert_eq!(owner, "n1");
}

#[tokio::test]
async fn a_write_by_an_old_version_is_a_conflict_and_makes_the_snapshot_new() {
    let world = world().await;
    let old = world.volume("v").await;
    let new = world.touch("v").await;
    for action in [own(&old, "n1"), grow(&old), Action::Delete { object: old.clone() }] {
        world.store.answered_end::<Volume>("v", "nobody");
        assert!(is_conflict(&world.act(vec![action]).await));
        assert_eq!(world.here("v").as_ref(), Some(&new));
    }
}

#[tokio::test]
async fn what_is_not_confirmed_ends_the_pass() {
    let world = world().await;
    let old = world.volume("v").await;
    world.act(vec![Action::Confirm { object: old.clone() }]).await.unwrap();
    let new = world.touch("v").await;
    let result = world.act(vec![Action::Confirm { object: old.clone() }, Action::Delete { object: new.clone() }]).await;
    assert!(is_conflict(&result));
    assert_eq!(world.here("v"), Some(new));
    world.volumes.delete("v", &DeleteParams::default()).await.unwrap();
    assert!(is_conflict(&world.act(vec![Action::Confirm { object: old }]).await));
    assert_eq!(world.here("v"), None);
}

#[tokio::test]
async fn an_object_that_is_gone_is_a_conflict_for_patches_and_no_error_for_deletions() {
    let world = world().await;
    let object = world.volume("v").await;
    world.volumes.delete("v", &DeleteParams::default()).await.unwrap();
    assert!(is_conflict(&world.act(vec![own(&object, "n1")]).await));
    assert_eq!(world.here("v"), None);
    world.act(vec![Action::Delete { object }]).await.unwrap();
}

#[tokio::test]
async fn what_exists_already_is_taken_into_the_snapshot() {
    let world = world().await;
    let setting = || {
        let mut setting = Setting::new("default-replica-count", SettingSpec { value: "2".to_owned() });
        setting.metadata.namespace = Some(NAMESPACE.to_owned());
        vec![Action::Create(Box::new(Object::Setting(setting)))]
    };
    world.act(setting()).await.unwrap();
    let uid = world.store.uid::<Setting>("default-replica-count").unwrap();
    world.store.watched_end(
        Kind::Setting,
        &ObjectMeta { name: Some("default-replica-count".to_owned()), uid: Some(uid), ..ObjectMeta::default() },
    );
    assert!(is_conflict(&world.act(setting()).await));
    assert!(world.store.uid::<Setting>("default-replica-count").is_some());
}

#[tokio::test]
async fn a_write_whose_answer_is_lost_is_read_before_the_next_plan() {
    let lose = FaultHook::new(|request| match (request.verb, request.subresource.as_str()) {
        ("patch", "status") => Fault::from(Outcome::LoseAnswer),
        _ => Fault::default(),
    });
    let world = world_with(lose).await;
    let object = world.volume("v").await;
    assert!(matches!(world.act(vec![own(&object, "n1")]).await, Err(ActError::Api { .. })));
    assert_eq!(world.here("v"), Some(object.clone()));
    world.actor.settle(&key()).await.unwrap();
    assert_ne!(world.here("v"), Some(object));
    assert!(world.actor.lock().is_empty());
}

#[tokio::test]
async fn events_are_told_and_their_failure_is_none() {
    let event = |object: &ObjectRef| Action::Event {
        object: object.clone(),
        severity: Severity::Warning,
        reason: "Degraded".to_owned(),
        message: "ä".repeat(EVENT_MESSAGE_MAX),
    };
    let world = world().await;
    let object = world.volume("v").await;
    world.act(vec![event(&object)]).await.unwrap();
    let told = world.events.list(&kube::api::ListParams::default()).await.unwrap().items;
    assert_eq!(told.len(), 1);
    assert_eq!(told[0].involved_object.uid.as_ref(), Some(&object.uid));
    assert_eq!(told[0].type_.as_deref(), Some("Warning"));

    let world = world_with(FaultHook::new(|request| match request.resource.as_str() {
        "events" => Fault::from(Outcome::InternalError),
        _ => Fault::default(),
    }))
    .await;
    let object = world.volume("v").await;
    world.act(vec![event(&object), own(&object, "n1")]).await.unwrap();
}

#[tokio::test]
async fn without_a_lease_no_agent_is_asked() {
    let world = world().await;
    let call = AgentCall::StopEngine { volume: "v".to_owned() };
    let result = world.act(vec![Action::Agent { node: "n1".to_owned(), call }]).await;
    assert!(matches!(result, Err(ActError::NotAlive)));
}

#[tokio::test]
async fn the_earliest_of_several_times_counts() {
    let world = world().await;
    let at = |second| Timestamp::from_second(second).unwrap();
    let times = [30, 10, 20].map(|second| Action::RequeueAt(at(second)));
    assert_eq!(world.act(times.to_vec()).await.unwrap(), Some(at(10)));
}
