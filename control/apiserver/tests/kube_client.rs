//! The server as the `kube` crate sees it, over HTTP.
#![allow(clippy::unwrap_used)]

mod common;

use std::{collections::BTreeMap, pin::pin, time::Duration};

use addax_apiserver::{
    Embedded, Server, ServerConfig,
    fault::{Fault, FaultHook, Outcome},
    http::Limits,
    store::StoreOptions,
};
use common::{config, gadget, gadgets, gadgets_in, resource, start};
use futures::{StreamExt, TryStreamExt};
use k8s_openapi::{
    api::core::v1::{ConfigMap, Namespace, Secret},
    apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition,
    apimachinery::pkg::apis::meta::v1::OwnerReference,
};
use kube::{
    Api, Client, Resource, ResourceExt,
    api::{
        DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PostParams, Preconditions, PropagationPolicy,
        ValidationDirective, WatchEvent, WatchParams,
    },
    core::Status,
    runtime::{WatchStreamExt, conditions, wait, watcher},
};
use serde_json::{Value, json};

/// Longest wait for what must happen in the end.
const WAIT: Duration = Duration::from_secs(20);

fn refusal<T: std::fmt::Debug>(result: Result<T, kube::Error>) -> Box<Status> {
    match result {
        Err(kube::Error::Api(status)) => status,
        other => panic!("not a refusal: {other:?}"),
    }
}

fn fields(status: &Status) -> Vec<String> {
    status.details.iter().flat_map(|details| &details.causes).map(|cause| cause.field.clone()).collect()
}

async fn until_gone(api: &Api<DynamicObject>, name: &str) {
    tokio::time::timeout(WAIT, async {
        while api.get_opt(name).await.unwrap().is_some() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await
    .unwrap_or_else(|_| panic!("{name} is still there"));
}

async fn server() -> (Server, Client) {
    start(config()).await
}

#[tokio::test]
async fn objects_are_created_read_changed_and_deleted() {
    let (server, client) = server().await;
    let api = gadgets(&client);
    let created = api.create(&PostParams::default(), &gadget("a", json!({"size": 2}))).await.unwrap();
    assert!(created.uid().is_some() && created.creation_timestamp().is_some());
    assert_eq!(created.metadata.generation, Some(1));
    assert_eq!(created.data["spec"], json!({"size": 2, "mode": "safe"}), "defaults are filled in");

    let again = refusal(api.create(&PostParams::default(), &gadget("a", json!({"size": 2}))).await);
    assert_eq!((again.code, again.reason.as_str()), (409, "AlreadyExists"));

    let mut changed = api.get("a").await.unwrap();
    changed.data["spec"]["size"] = json!(4);
    let replaced = api.replace("a", &PostParams::default(), &changed).await.unwrap();
    assert_eq!(replaced.metadata.generation, Some(2));
    let stale = refusal(api.replace("a", &PostParams::default(), &changed).await);
    assert_eq!((stale.code, stale.reason.as_str()), (409, "Conflict"));
    changed.metadata.resource_version = None;
    let same = api.replace("a", &PostParams::default(), &changed).await.unwrap();
    assert_eq!(same.resource_version(), replaced.resource_version(), "a write that changes nothing commits nothing");

    let merged = api
        .patch("a", &PatchParams::default(), &Patch::Merge(json!({"metadata": {"labels": {"k": "v"}}})))
        .await
        .unwrap();
    assert_eq!(merged.labels()["k"], "v");
    assert_eq!(merged.metadata.generation, Some(2), "labels are no new generation");
    let operations: json_patch::Patch = serde_json::from_value(json!([
        {"op": "test", "path": "/spec/size", "value": 4}, {"op": "replace", "path": "/spec/size", "value": 6},
    ]))
    .unwrap();
    let patched = api.patch("a", &PatchParams::default(), &Patch::Json::<()>(operations)).await.unwrap();
    assert_eq!(patched.data["spec"]["size"], 6);
    let apply = api.patch("a", &PatchParams::apply("me"), &Patch::Apply(gadget("a", json!({"size": 8})))).await;
    assert_eq!(refusal(apply).code, 415);

    assert!(api.delete("a", &DeleteParams::default()).await.unwrap().is_right());
    assert_eq!(refusal(api.get("a").await).code, 404);
    server.shutdown().await;
}

#[tokio::test]
async fn names_can_be_generated_and_are_checked() {
    let (server, client) = server().await;
    let api = gadgets(&client);
    let mut object = gadget("", json!({"size": 2}));
    object.metadata.name = None;
    object.metadata.generate_name = Some("gen-".to_owned());
    let (first, second) = (
        api.create(&PostParams::default(), &object).await.unwrap(),
        api.create(&PostParams::default(), &object).await.unwrap(),
    );
    assert!(first.name_any().starts_with("gen-") && first.name_any() != second.name_any());
    for name in ["Upper", "under_score", "-dash"] {
        let refused = refusal(api.create(&PostParams::default(), &gadget(name, json!({"size": 2}))).await);
        assert_eq!((refused.code, fields(&refused)), (422, vec!["metadata.name".to_owned()]));
    }
    let nowhere =
        refusal(gadgets_in(&client, "nowhere").create(&PostParams::default(), &gadget("a", json!({"size": 2}))).await);
    assert_eq!(nowhere.code, 404);
    server.shutdown().await;
}

#[tokio::test]
async fn invalid_objects_are_refused_field_by_field() {
    let (server, client) = server().await;
    let api = gadgets(&client);
    let bad = json!({"size": 3, "mode": "quick", "tags": ["a", "a"], "labels": {"k": 1}});
    let refused = refusal(api.create(&PostParams::default(), &gadget("bad", bad)).await);
    assert_eq!((refused.code, refused.reason.as_str()), (422, "Invalid"));
    let mut found = fields(&refused);
    found.sort();
    assert_eq!(found, ["spec.labels.k", "spec.mode", "spec.size", "spec.tags[1]"]);
    assert!(
        refused.message.contains(r#"Unsupported value: "quick": supported values: "fast", "safe""#),
        "{}",
        refused.message
    );
    let details = refused.details.unwrap();
    assert_eq!(
        (details.kind.as_str(), details.group.as_str(), details.name.as_str()),
        ("Gadget", "test.example", "bad")
    );

    let rule = refusal(api.create(&PostParams::default(), &gadget("bad", json!({"size": 4, "limit": 2}))).await);
    assert!(rule.message.contains("size cannot be above limit"), "{}", rule.message);
    api.create(&PostParams::default(), &gadget("a", json!({"size": 4}))).await.unwrap();
    let transition =
        refusal(api.patch("a", &PatchParams::default(), &Patch::Merge(json!({"spec": {"size": 2}}))).await);
    assert_eq!(transition.code, 422);
    assert!(transition.message.contains("size cannot shrink"), "{}", transition.message);
    server.shutdown().await;
}

#[tokio::test]
async fn unknown_fields_are_dropped_or_refused_as_asked() {
    let (server, client) = server().await;
    let api = gadgets(&client);
    let object = |name: &str| gadget(name, json!({"size": 2, "sise": 3}));
    let dropped = api.create(&PostParams::default(), &object("a")).await.unwrap();
    assert!(dropped.data["spec"].get("sise").is_none());
    let strict = PatchParams { field_validation: Some(ValidationDirective::Strict), ..PatchParams::default() };
    let refused = refusal(api.patch("a", &strict, &Patch::Merge(json!({"spec": {"sise": 4}}))).await);
    assert_eq!(refused.code, 400);
    assert!(refused.message.contains(r#"strict decoding error: unknown field "spec.sise""#), "{}", refused.message);
    let dry = PostParams { dry_run: true, ..PostParams::default() };
    api.create(&dry, &object("b")).await.unwrap();
    assert!(api.get_opt("b").await.unwrap().is_none());
    server.shutdown().await;
}

#[tokio::test]
async fn status_is_written_by_its_subresource_only() {
    let (server, client) = server().await;
    let api = gadgets(&client);
    let mut object = gadget("a", json!({"size": 2}));
    object.data["status"] = json!({"state": "made up"});
    let created = api.create(&PostParams::default(), &object).await.unwrap();
    assert!(created.data.get("status").is_none());
    let patch = json!({"status": {"state": "ready"}, "spec": {"size": 8}, "metadata": {"labels": {"k": "v"}}});
    let patched = api.patch_status("a", &PatchParams::default(), &Patch::Merge(patch)).await.unwrap();
    assert_eq!(patched.data["status"]["state"], "ready");
    assert_eq!(patched.data["spec"]["size"], 2);
    assert!(patched.labels().is_empty());
    assert_eq!(patched.metadata.generation, Some(1));
    let main = json!({"status": {"state": "lost"}, "spec": {"size": 4}});
    let patched = api.patch("a", &PatchParams::default(), &Patch::Merge(main)).await.unwrap();
    assert_eq!((patched.data["status"]["state"].clone(), patched.metadata.generation), (json!("ready"), Some(2)));
    let mut replaced = patched.clone();
    replaced.data["status"] = json!({"state": "replaced"});
    let replaced = api.replace_status("a", &PostParams::default(), &replaced).await.unwrap();
    assert_eq!(replaced.data["status"]["state"], "replaced");
    server.shutdown().await;
}

#[tokio::test]
async fn finalizers_hold_an_object_until_they_are_gone() {
    let (server, client) = server().await;
    let api = gadgets(&client);
    let mut object = gadget("a", json!({"size": 2}));
    object.metadata.finalizers = Some(vec!["test.example/hold".to_owned()]);
    let created = api.create(&PostParams::default(), &object).await.unwrap();
    let marked = api.delete("a", &DeleteParams::default()).await.unwrap().left().unwrap();
    assert!(marked.metadata.deletion_timestamp.is_some());
    assert_eq!(marked.metadata.generation, Some(2));
    let more = Patch::Merge(json!({"metadata": {"finalizers": ["test.example/hold", "test.example/more"]}}));
    assert_eq!(refusal(api.patch("a", &PatchParams::default(), &more).await).code, 422);
    api.patch("a", &PatchParams::default(), &Patch::Merge(json!({"metadata": {"finalizers": null}}))).await.unwrap();
    assert!(api.get_opt("a").await.unwrap().is_none());
    let again = api.create(&PostParams::default(), &gadget("a", json!({"size": 2}))).await.unwrap();
    assert_ne!(again.uid(), created.uid());
    let preconditions = Preconditions { uid: created.uid(), resource_version: None };
    let other = DeleteParams { preconditions: Some(preconditions), ..DeleteParams::default() };
    assert_eq!(refusal(api.delete("a", &other).await).code, 409);
    server.shutdown().await;
}

fn owned_by(name: &str, owner: &DynamicObject) -> DynamicObject {
    let mut object = gadget(name, json!({"size": 2}));
    let reference: OwnerReference = owner.owner_ref(&resource()).unwrap();
    object.metadata.owner_references = Some(vec![OwnerReference { block_owner_deletion: Some(true), ..reference }]);
    object
}

#[tokio::test]
async fn dependents_go_with_their_owners() {
    let (server, client) = server().await;
    let api = gadgets(&client);
    let create = |object: DynamicObject| {
        let api = api.clone();
        async move { api.create(&PostParams::default(), &object).await.unwrap() }
    };
    let owner = create(gadget("owner", json!({"size": 2}))).await;
    let child = create(owned_by("child", &owner)).await;
    create(owned_by("grandchild", &child)).await;
    api.delete("owner", &DeleteParams::background()).await.unwrap();
    until_gone(&api, "grandchild").await;
    assert!(api.get_opt("child").await.unwrap().is_none());

    create(owned_by("late", &owner)).await;
    until_gone(&api, "late").await;

    let owner = create(gadget("owner", json!({"size": 2}))).await;
    let mut held = owned_by("held", &owner);
    held.metadata.finalizers = Some(vec!["test.example/hold".to_owned()]);
    create(held).await;
    assert!(api.delete("owner", &DeleteParams::foreground()).await.unwrap().is_left());
    let deleting =
        |object: Option<&DynamicObject>| object.is_some_and(|object| object.metadata.deletion_timestamp.is_some());
    tokio::time::timeout(WAIT, wait::await_condition(api.clone(), "held", deleting)).await.unwrap().unwrap();
    assert!(api.get_opt("owner").await.unwrap().is_some(), "the owner waits for its dependents");
    api.patch("held", &PatchParams::default(), &Patch::Merge(json!({"metadata": {"finalizers": null}}))).await.unwrap();
    until_gone(&api, "owner").await;

    let owner = create(gadget("owner", json!({"size": 2}))).await;
    create(owned_by("kept", &owner)).await;
    let orphan = DeleteParams { propagation_policy: Some(PropagationPolicy::Orphan), ..DeleteParams::default() };
    api.delete("owner", &orphan).await.unwrap();
    until_gone(&api, "owner").await;
    assert!(api.get("kept").await.unwrap().owner_references().is_empty());
    server.shutdown().await;
}

#[tokio::test]
async fn lists_select_and_come_in_pages_of_one_version() {
    let (server, client) = server().await;
    let api = gadgets(&client);
    for (n, mode) in ["fast", "safe", "fast", "safe", "safe"].iter().enumerate() {
        let mut object = gadget(&format!("g{n}"), json!({"size": 2, "mode": mode}));
        object.metadata.labels = Some(BTreeMap::from([("n".to_owned(), n.to_string())]));
        api.create(&PostParams::default(), &object).await.unwrap();
    }
    let names =
        |list: kube::core::ObjectList<DynamicObject>| list.items.iter().map(ResourceExt::name_any).collect::<Vec<_>>();
    let list = |params: ListParams| {
        let api = api.clone();
        async move { api.list(&params).await }
    };
    assert_eq!(names(list(ListParams::default().labels("n in (1,3)")).await.unwrap()), ["g1", "g3"]);
    assert_eq!(names(list(ListParams::default().fields("spec.mode=fast")).await.unwrap()), ["g0", "g2"]);
    assert_eq!(names(list(ListParams::default().fields("metadata.name=g4")).await.unwrap()), ["g4"]);
    assert_eq!(refusal(list(ListParams::default().fields("spec.size=2")).await).code, 400);

    let first = list(ListParams::default().limit(2)).await.unwrap();
    assert_eq!(first.metadata.remaining_item_count, Some(3));
    let version = first.metadata.resource_version.clone();
    let token = first.metadata.continue_.clone().unwrap();
    assert_eq!(names(first), ["g0", "g1"]);
    api.delete("g3", &DeleteParams::default()).await.unwrap();
    api.create(&PostParams::default(), &gadget("g9", json!({"size": 2}))).await.unwrap();
    let second = list(ListParams::default().limit(9).continue_token(&token)).await.unwrap();
    assert_eq!(second.metadata.resource_version, version);
    assert_eq!(names(second), ["g2", "g3", "g4"], "the second page shows what the first one began with");
    server.api().store.compact_history();
    assert_eq!(refusal(list(ListParams::default().continue_token(&token)).await).code, 410);

    let deleted = api.delete_collection(&DeleteParams::default(), &ListParams::default().labels("n")).await.unwrap();
    assert_eq!(deleted.left().unwrap().items.len(), 4);
    assert_eq!(names(list(ListParams::default()).await.unwrap()), ["g9"]);
    server.shutdown().await;
}

#[tokio::test]
async fn watches_give_every_change_and_bookmarks() {
    let limits = Limits { bookmark_interval: Duration::from_millis(50), ..Limits::default() };
    let (server, client) = start(ServerConfig { limits, ..config() }).await;
    let api = gadgets(&client);
    let version = api.list(&ListParams::default()).await.unwrap().metadata.resource_version.unwrap();
    api.create(&PostParams::default(), &gadget("a", json!({"size": 2}))).await.unwrap();
    api.patch("a", &PatchParams::default(), &Patch::Merge(json!({"spec": {"size": 4}}))).await.unwrap();
    let elsewhere = gadgets_in(&client, "kube-system");
    let last = elsewhere.create(&PostParams::default(), &gadget("b", json!({"size": 2}))).await.unwrap();
    let mut events = pin!(api.watch(&WatchParams::default(), &version).await.unwrap());
    let mut seen = Vec::new();
    while let Some(event) = events.try_next().await.unwrap() {
        match event {
            WatchEvent::Added(object) => seen.push(("added", object.name_any())),
            WatchEvent::Modified(object) => {
                seen.push(("modified", object.name_any()));
                api.delete("a", &DeleteParams::default()).await.unwrap();
            }
            WatchEvent::Deleted(object) => {
                assert!(object.resource_version() > last.resource_version(), "a deletion carries its own version");
                seen.push(("deleted", object.name_any()));
            }
            WatchEvent::Bookmark(mark) if seen.len() == 3 => {
                assert_eq!(mark.metadata.resource_version, server.api().store.revision().to_string());
                break;
            }
            WatchEvent::Bookmark(_) => {}
            WatchEvent::Error(status) => panic!("{status:?}"),
        }
    }
    assert_eq!(seen, [("added", "a".to_owned()), ("modified", "a".to_owned()), ("deleted", "a".to_owned())]);
    server.shutdown().await;
}

#[tokio::test]
async fn selected_watches_see_objects_come_and_go() {
    let (server, client) = server().await;
    let api = gadgets(&client);
    let version = api.list(&ListParams::default()).await.unwrap().metadata.resource_version.unwrap();
    let mut events = pin!(api.watch(&WatchParams::default().labels("k=v"), &version).await.unwrap());
    api.create(&PostParams::default(), &gadget("a", json!({"size": 2}))).await.unwrap();
    for labels in [json!({"k": "v"}), json!({"k": "other"})] {
        let patch = json!({"metadata": {"labels": labels}});
        api.patch("a", &PatchParams::default(), &Patch::Merge(patch)).await.unwrap();
    }
    assert!(matches!(events.try_next().await.unwrap(), Some(WatchEvent::Added(_))));
    assert!(matches!(events.try_next().await.unwrap(), Some(WatchEvent::Deleted(_))));
    server.shutdown().await;
}

#[tokio::test]
async fn a_watch_that_lost_its_place_is_told_to_list_again() {
    let (server, client) = server().await;
    let api = gadgets(&client);
    api.create(&PostParams::default(), &gadget("a", json!({"size": 2}))).await.unwrap();
    server.api().store.compact_history();
    let mut events = pin!(api.watch(&WatchParams::default(), "1").await.unwrap());
    match events.try_next().await.unwrap() {
        Some(WatchEvent::Error(status)) => assert_eq!(status.code, 410),
        other => panic!("{other:?}"),
    }
    assert!(events.try_next().await.unwrap().is_none());
    server.shutdown().await;
}

/// Follows a list with the runtime's watcher while objects change, watches are cut and history is forgotten.
async fn follow(streaming: bool) {
    let cuts = std::sync::atomic::AtomicUsize::new(0);
    let faults = FaultHook::new(move |request| match request.verb {
        "watch" if cuts.fetch_add(1, std::sync::atomic::Ordering::Relaxed).is_multiple_of(2) => {
            Outcome::CutWatch(3).into()
        }
        _ => Fault::default(),
    });
    let store = StoreOptions { history_events_max: 8, ..StoreOptions::default() };
    let (server, client) = start(ServerConfig { faults, store, ..config() }).await;
    let api = gadgets(&client);
    let watcher_config =
        if streaming { watcher::Config::default().streaming_lists() } else { watcher::Config::default().page_size(3) };
    let writer = kube::runtime::reflector::store::Writer::new(resource());
    let reader = writer.as_reader();
    let stream = kube::runtime::reflector(writer, watcher(api.clone(), watcher_config)).default_backoff();
    let task = tokio::spawn(stream.for_each(|_| async {}));
    for round in 0..30 {
        let object = gadget(&format!("g{round}"), json!({"size": 2}));
        api.create(&PostParams::default(), &object).await.unwrap();
        if round % 3 == 0 {
            api.delete(&format!("g{}", round / 2), &DeleteParams::default()).await.ok();
        }
    }
    let mut expected: Vec<_> =
        api.list(&ListParams::default()).await.unwrap().items.iter().map(ResourceExt::name_any).collect();
    expected.sort();
    let converge = async {
        loop {
            let mut seen: Vec<_> = reader.state().iter().map(|object| object.name_any()).collect();
            seen.sort();
            if seen == expected {
                return;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(WAIT, converge).await.expect("the reflector converges");
    task.abort();
    server.shutdown().await;
}

#[tokio::test]
async fn a_reflector_converges_over_cut_watches() {
    follow(false).await;
}

#[tokio::test]
async fn a_reflector_with_streaming_lists_converges_over_cut_watches() {
    follow(true).await;
}

#[tokio::test]
async fn built_in_kinds_and_namespaces() {
    let (server, client) = server().await;
    let namespaces: Api<Namespace> = Api::all(client.clone());
    let names: Vec<_> =
        namespaces.list(&ListParams::default()).await.unwrap().items.iter().map(ResourceExt::name_any).collect();
    assert_eq!(names, ["addax-system", "default", "kube-system"]);
    assert_eq!(refusal(namespaces.delete("default", &DeleteParams::default()).await).code, 403);
    let namespace: Namespace = serde_json::from_value(json!({"metadata": {"name": "work"}})).unwrap();
    let uid = namespaces.create(&PostParams::default(), &namespace).await.unwrap().uid().unwrap();

    let secrets: Api<Secret> = Api::namespaced(client.clone(), "work");
    let secret: Secret = serde_json::from_value(json!({"metadata": {"name": "s"}, "stringData": {"k": "v"}})).unwrap();
    let secret = secrets.create(&PostParams::default(), &secret).await.unwrap();
    assert_eq!(secret.data.unwrap()["k"].0, b"v");
    assert_eq!(secret.type_.as_deref(), Some("Opaque"));
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), "work");
    let map: ConfigMap =
        serde_json::from_value(json!({"metadata": {"name": "m"}, "data": {"a": "b"}, "immutable": true})).unwrap();
    maps.create(&PostParams::default(), &map).await.unwrap();
    let changed = maps.patch("m", &PatchParams::default(), &Patch::Strategic(json!({"data": {"a": "c"}}))).await;
    assert_eq!(refusal(changed).code, 422);
    let gadgets = gadgets_in(&client, "work");
    gadgets.create(&PostParams::default(), &gadget("a", json!({"size": 2}))).await.unwrap();

    namespaces.delete("work", &DeleteParams::default()).await.unwrap();
    let gone = wait::await_condition(namespaces.clone(), "work", conditions::is_deleted(&uid));
    tokio::time::timeout(WAIT, gone).await.unwrap().unwrap();
    assert!(gadgets.get_opt("a").await.unwrap().is_none());
    server.shutdown().await;
}

#[tokio::test]
async fn events_are_one_resource_in_two_groups() {
    use k8s_openapi::api::{core::v1::Event as CoreEvent, core::v1::ObjectReference};
    use kube::runtime::events::{Event, EventType, Recorder};
    let (server, client) = server().await;
    let reference = ObjectReference {
        api_version: Some("test.example/v1".into()),
        kind: Some("Gadget".into()),
        name: Some("a".into()),
        namespace: Some("default".into()),
        uid: Some("u".into()),
        ..ObjectReference::default()
    };
    let recorder = Recorder::new(client.clone(), "tester".into());
    let event = Event {
        type_: EventType::Normal,
        reason: "Made".into(),
        note: Some("it is made".into()),
        action: "Make".into(),
        secondary: None,
    };
    recorder.publish(&event, &reference).await.unwrap();
    recorder.publish(&event, &reference).await.unwrap();
    let events: Api<CoreEvent> = Api::namespaced(client.clone(), "default");
    let found = events.list(&ListParams::default().fields("involvedObject.uid=u")).await.unwrap().items;
    assert_eq!(found.len(), 1);
    assert_eq!(found[0].message.as_deref(), Some("it is made"));
    assert_eq!(found[0].series.as_ref().unwrap().count, Some(2));
    server.shutdown().await;
}

#[tokio::test]
async fn definitions_are_served_and_established() {
    let (server, client) = server().await;
    let crds: Api<CustomResourceDefinition> = Api::all(client.clone());
    let established = wait::await_condition(crds.clone(), "gadgets.test.example", conditions::is_crd_established());
    tokio::time::timeout(WAIT, established).await.unwrap().unwrap();
    assert_eq!(refusal(crds.delete("gadgets.test.example", &DeleteParams::default()).await).code, 405);
    let discovery = kube::discovery::Discovery::new(client.clone()).run().await.unwrap();
    let (resource, capabilities) =
        discovery.resolve_gvk(&kube::api::GroupVersionKind::gvk("test.example", "v1", "Gadget")).unwrap();
    assert_eq!(resource.plural, "gadgets");
    assert!(capabilities.supports_operation(kube::discovery::verbs::WATCH));
    let aggregated = kube::discovery::Discovery::new(client).run_aggregated().await.unwrap();
    assert!(aggregated.has_group("test.example"));
    server.shutdown().await;
}

#[tokio::test]
async fn injected_faults_reach_the_client() {
    let outcome = std::sync::Arc::new(std::sync::Mutex::new(Outcome::Serve));
    let faults = FaultHook::new({
        let outcome = outcome.clone();
        move |_| outcome.lock().unwrap().clone().into()
    });
    let (server, client) = start(ServerConfig { faults, ..config() }).await;
    let api = gadgets(&client);
    let create = |name: &'static str| {
        let api = api.clone();
        async move { api.create(&PostParams::default(), &gadget(name, json!({"size": 2}))).await }
    };
    for (fault, code) in [(Outcome::Conflict, 409), (Outcome::TooManyRequests, 429), (Outcome::InternalError, 500)] {
        *outcome.lock().unwrap() = fault;
        assert_eq!(refusal(create("refused").await).code, code);
    }
    *outcome.lock().unwrap() = Outcome::LoseAnswer;
    assert_eq!(refusal(create("lost").await).code, 504);
    *outcome.lock().unwrap() = Outcome::Serve;
    assert!(api.get_opt("refused").await.unwrap().is_none());
    assert!(api.get_opt("lost").await.unwrap().is_some(), "only the answer was lost");
    server.shutdown().await;
}

#[tokio::test]
async fn watches_of_one_client_are_bounded() {
    let limits = Limits { watches_per_client_max: 2, ..Limits::default() };
    let (server, client) = start(ServerConfig { limits, ..config() }).await;
    let api = gadgets(&client);
    let first = api.watch(&WatchParams::default(), "0").await.unwrap();
    let _second = api.watch(&WatchParams::default(), "0").await.unwrap();
    assert_eq!(refusal(api.watch(&WatchParams::default(), "0").await.map(|_| ())).code, 429);
    drop(first);
    let again = async {
        while api.watch(&WatchParams::default(), "0").await.is_err() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(WAIT, again).await.expect("a closed watch frees its place");
    server.shutdown().await;
}

#[tokio::test]
async fn everything_is_there_after_a_restart() {
    let directory = tempfile::tempdir().unwrap();
    let config = || ServerConfig { data_file: Some(directory.path().join("data")), ..config() };
    let (server, client) = start(config()).await;
    let created = gadgets(&client).create(&PostParams::default(), &gadget("a", json!({"size": 2}))).await.unwrap();
    drop(client);
    server.shutdown().await;
    let (server, client) = start(config()).await;
    let found = gadgets(&client).get("a").await.unwrap();
    assert_eq!((found.uid(), found.resource_version()), (created.uid(), created.resource_version()));
    server.shutdown().await;
}

#[tokio::test]
async fn concurrent_patches_all_land() {
    let directory = tempfile::tempdir().unwrap();
    let (server, client) = start(ServerConfig { data_file: Some(directory.path().join("data")), ..config() }).await;
    let api = gadgets(&client);
    api.create(&PostParams::default(), &gadget("a", json!({"size": 2}))).await.unwrap();
    let patches = (0..32).map(|n| {
        let api = api.clone();
        async move {
            let patch = json!({"metadata": {"labels": {format!("l{n}"): "x"}}});
            api.patch("a", &PatchParams::default(), &Patch::Merge(patch)).await.unwrap();
        }
    });
    futures::future::join_all(patches).await;
    assert_eq!(api.get("a").await.unwrap().labels().len(), 32);
    server.shutdown().await;
}

#[tokio::test]
async fn a_client_in_the_same_process_needs_no_socket() {
    let embedded = Embedded::start(&config()).await.unwrap();
    let client = Client::new(embedded.service(), "default");
    let api = gadgets(&client);
    api.create(&PostParams::default(), &gadget("a", json!({"size": 2}))).await.unwrap();
    let mut events = pin!(api.watch(&WatchParams::default(), "0").await.unwrap());
    assert!(matches!(events.try_next().await.unwrap(), Some(WatchEvent::Added(_))));
    let metadata = api.get_metadata("a").await.unwrap();
    assert_eq!(metadata.name_any(), "a");
    let value: Value = serde_json::to_value(metadata).unwrap();
    assert!(value.get("spec").is_none());
    embedded.shutdown().await;
}
