#![allow(clippy::unwrap_used)]
use super::*;
use crate::fake_plane::{Fabric, FakePlane};
use crate::supervise::{self, Plane};
use std::path::Path;

struct Node {
    plane: FakePlane,
    status: watch::Sender<PlaneStatus>,
    replicas: Replicas,
    hub: Hub,
    dir: tempfile::TempDir,
}

async fn connect(plane: &FakePlane) -> PlaneStatus {
    let plane: Plane = supervise::tests::greet(&plane.socket).await;
    PlaneStatus { plane: Some(Arc::new(plane)), ..PlaneStatus::default() }
}

async fn node(stock: bool) -> Node {
    let dir = tempfile::tempdir().unwrap();
    let plane = FakePlane::serve(dir.path(), stock, Fabric::default());
    let (status, receiver) = watch::channel(connect(&plane).await);
    let hub = Hub::default();
    let replicas = open(dir.path(), receiver, &hub).await;
    Node { plane, status, replicas, hub, dir }
}

async fn open(dir: &Path, plane: watch::Receiver<PlaneStatus>, hub: &Hub) -> Replicas {
    let disk = dir.join("disk");
    std::fs::create_dir_all(&disk).unwrap();
    let context = ReplicaContext {
        plane,
        hub: hub.clone(),
        data_address: "127.0.0.1:4420".parse().unwrap(),
        shutdown: CancellationToken::new(),
    };
    Replicas::open(Disks::new(BTreeMap::from([("d".to_owned(), disk)])), context).await.unwrap()
}

fn request(create: bool) -> pb::StartReplicaRequest {
    pb::StartReplicaRequest {
        name: "v-r-1".to_owned(),
        volume: "v".to_owned(),
        disk: "d".to_owned(),
        size_bytes: 1 << 20,
        create,
    }
}

fn promotion(epoch: u64, instance: &str) -> Promotion {
    Promotion { volume: "v".to_owned(), epoch, instance: instance.to_owned(), lineage: "l".to_owned() }
}

const NQN: &str = "nqn.2026-11.io.addax:replica:v-r-1";

fn hosts(plane: &FakePlane) -> Vec<String> {
    plane.state.lock().unwrap().subsystems[NQN].hosts.iter().cloned().collect()
}

#[tokio::test]
async fn a_new_replica_lets_nobody_in_until_a_promote() {
    let node = node(false).await;
    let replica = node.replicas.start(request(true)).await.unwrap();
    assert_eq!(replica.state(), pb::State::Running);
    assert!(replica.fresh && replica.promoted_epoch == 0);
    assert!(hosts(&node.plane).is_empty());
    assert!(!node.plane.connect(NQN, &host_nqn("v", 1, "e1")));
    let replica = node.replicas.promote("v-r-1", promotion(1, "e1")).await.unwrap();
    assert!(!replica.fresh && replica.promoted_epoch == 1 && replica.lineage == "l");
    assert_eq!(hosts(&node.plane), [host_nqn("v", 1, "e1")]);
    assert_eq!(node.replicas.start(request(true)).await.unwrap().promoted_epoch, 1);
    assert_eq!(node.hub.replica("v-r-1").unwrap().promoted_instance, "e1");
}

#[tokio::test]
async fn an_older_or_another_engine_of_the_epoch_is_refused() {
    let node = node(false).await;
    node.replicas.start(request(true)).await.unwrap();
    node.replicas.promote("v-r-1", promotion(5, "e5")).await.unwrap();
    for (epoch, instance) in [(4, "e4"), (4, "e5"), (5, "e6")] {
        let error = node.replicas.promote("v-r-1", promotion(epoch, instance)).await.unwrap_err();
        assert!(matches!(error, AgentError::Superseded(_)), "{error}");
    }
    let other = Promotion { lineage: "other".to_owned(), ..promotion(5, "e5") };
    assert!(matches!(node.replicas.promote("v-r-1", other).await, Err(AgentError::Superseded(_))));
    assert_eq!(hosts(&node.plane), [host_nqn("v", 5, "e5")]);
    let wrong = Promotion { volume: "w".to_owned(), ..promotion(9, "e9") };
    assert!(matches!(node.replicas.promote("v-r-1", wrong).await, Err(AgentError::Forbidden(_))));
}

#[tokio::test]
async fn a_promote_waits_for_old_sessions_to_drain_before_it_is_durable() {
    for stock in [false, true] {
        let node = node(stock).await;
        node.replicas.start(request(true)).await.unwrap();
        node.replicas.promote("v-r-1", promotion(1, "e1")).await.unwrap();
        assert!(node.plane.connect(NQN, &host_nqn("v", 1, "e1")));
        node.plane.state.lock().unwrap().lingering = true;
        let replicas = node.replicas.clone();
        let promote = tokio::spawn(async move { replicas.promote("v-r-1", promotion(2, "e2")).await });
        // The old host is out, its session still there: nobody new may come in and nothing may be durable yet.
        node.plane.wait_until("polled for the old session", |s| s.called("get_controllers").len() >= 6).await;
        assert!(hosts(&node.plane).is_empty());
        let folder = node.dir.path().join("disk/replicas");
        let (_, record) = state::ReplicaFiles::open(&folder, "v-r-1").unwrap();
        assert_eq!(record.unwrap().promoted_epoch, 1);
        assert!(!promote.is_finished());
        node.plane.drain(NQN);
        assert_eq!(promote.await.unwrap().unwrap().promoted_epoch, 2);
        assert_eq!(hosts(&node.plane), [host_nqn("v", 2, "e2")]);
    }
}

#[tokio::test]
async fn the_same_promote_again_ends_the_session_that_is_there() {
    let node = node(false).await;
    node.replicas.start(request(true)).await.unwrap();
    node.replicas.promote("v-r-1", promotion(1, "e1")).await.unwrap();
    assert!(node.plane.connect(NQN, &host_nqn("v", 1, "e1")));
    node.replicas.promote("v-r-1", promotion(1, "e1")).await.unwrap();
    assert!(node.plane.state.lock().unwrap().subsystems[NQN].sessions.is_empty());
    assert!(node.plane.connect(NQN, &host_nqn("v", 1, "e1")));
}

#[tokio::test]
async fn a_new_data_plane_gets_the_export_again_with_nobody_in() {
    let node = node(false).await;
    node.replicas.start(request(true)).await.unwrap();
    node.replicas.promote("v-r-1", promotion(3, "e3")).await.unwrap();
    node.plane.kill();
    node.status.send_replace(PlaneStatus { reason: "killed".to_owned(), ..PlaneStatus::default() });
    let error = node.replicas.promote("v-r-1", promotion(4, "e4")).await.unwrap_err();
    assert!(matches!(error, AgentError::Unavailable(_)), "{error}");
    let second = FakePlane::serve(node.dir.path(), false, Fabric::default());
    node.status.send_replace(connect(&second).await);
    second.wait_until("exported", |s| s.subsystems.get(NQN).is_some_and(|sub| !sub.listeners.is_empty())).await;
    assert!(hosts(&second).is_empty());
    let error = node.replicas.promote("v-r-1", promotion(2, "e2")).await.unwrap_err();
    assert!(matches!(error, AgentError::Superseded(_)));
    node.replicas.promote("v-r-1", promotion(3, "e3")).await.unwrap();
    assert_eq!(hosts(&second), [host_nqn("v", 3, "e3")]);
}

#[tokio::test]
async fn a_new_agent_keeps_the_session_of_the_promoted_engine_and_ends_others() {
    let node = node(false).await;
    node.replicas.start(request(true)).await.unwrap();
    node.replicas.promote("v-r-1", promotion(3, "e3")).await.unwrap();
    assert!(node.plane.connect(NQN, &host_nqn("v", 3, "e3")));
    node.plane.state.lock().unwrap().subsystems.get_mut(NQN).unwrap().hosts.insert("nqn.stranger".to_owned());
    assert!(node.plane.connect(NQN, "nqn.stranger"));
    let hub = Hub::default();
    let again = open(node.dir.path(), node.status.subscribe(), &hub).await;
    node.plane.wait_until("the stranger is out", |s| s.subsystems[NQN].hosts.len() == 1).await;
    assert_eq!(node.plane.state.lock().unwrap().subsystems[NQN].sessions, [host_nqn("v", 3, "e3")]);
    assert_eq!(again.start(request(false)).await.unwrap().promoted_epoch, 3);
}

#[tokio::test]
async fn stop_and_delete_are_idempotent() {
    let node = node(false).await;
    let error = node.replicas.start(request(false)).await.unwrap_err();
    assert!(matches!(error, AgentError::NotFound { .. }));
    node.replicas.start(request(true)).await.unwrap();
    node.replicas.stop("v-r-1").await.unwrap();
    node.replicas.stop("v-r-1").await.unwrap();
    assert!(node.plane.state.lock().unwrap().subsystems.is_empty());
    assert!(node.plane.state.lock().unwrap().bdevs.is_empty());
    let error = node.replicas.promote("v-r-1", promotion(1, "e")).await.unwrap_err();
    assert!(matches!(error, AgentError::Forbidden(_)));
    assert_eq!(node.replicas.start(request(false)).await.unwrap().state(), pb::State::Running);
    node.replicas.delete("v-r-1", "d").await.unwrap();
    node.replicas.delete("v-r-1", "d").await.unwrap();
    assert!(node.replicas.list().is_empty() && !node.replicas.has("v-r-1"));
    assert_eq!(std::fs::read_dir(node.dir.path().join("disk/replicas")).unwrap().count(), 0);
    assert!(node.replicas.start(request(true)).await.unwrap().fresh);
}

#[tokio::test]
async fn damaged_state_is_told_refused_and_deletable() {
    let node = node(false).await;
    node.replicas.start(request(true)).await.unwrap();
    node.replicas.promote("v-r-1", promotion(1, "e")).await.unwrap();
    let folder = node.dir.path().join("disk/replicas");
    for slot in ["a", "b"] {
        std::fs::write(folder.join(format!("v-r-1.{slot}")), b"rubbish").unwrap();
    }
    let hub = Hub::default();
    let again = open(node.dir.path(), node.status.subscribe(), &hub).await;
    let error = again.start(request(true)).await.unwrap_err();
    assert!(matches!(error, AgentError::Damaged(_)), "{error}");
    let replica = hub.replica("v-r-1").unwrap();
    assert_eq!(replica.state(), pb::State::Error);
    assert!(!replica.fresh, "damaged is not fresh");
    assert!(matches!(again.promote("v-r-1", promotion(2, "e2")).await, Err(AgentError::Damaged(_))));
    again.delete("v-r-1", "d").await.unwrap();
    assert!(again.start(request(true)).await.unwrap().fresh);
}

#[tokio::test]
async fn bad_requests_name_field_value_and_rule() {
    let node = node(false).await;
    for size in [0, 1, 4095, 4097, u64::MAX] {
        let error =
            node.replicas.start(pb::StartReplicaRequest { size_bytes: size, ..request(true) }).await.unwrap_err();
        assert!(error.to_string().contains("size_bytes") && error.to_string().contains(&size.to_string()), "{error}");
    }
    for name in ["", "../x", "A", "a/b", "a.b"] {
        let error = node.replicas.start(pb::StartReplicaRequest { name: name.to_owned(), ..request(true) }).await;
        assert!(matches!(error, Err(AgentError::Invalid { field: "name", .. })), "{name}");
    }
    let error = node.replicas.start(pb::StartReplicaRequest { disk: "x".to_owned(), ..request(true) }).await;
    assert!(matches!(error, Err(AgentError::NotFound { kind: "disk", .. })));
    node.replicas.start(request(true)).await.unwrap();
    let bigger = pb::StartReplicaRequest { size_bytes: 2 << 20, ..request(true) };
    assert!(matches!(node.replicas.start(bigger).await, Err(AgentError::Exists(_))));
    let other = pb::StartReplicaRequest { volume: "w".to_owned(), ..request(true) };
    assert!(matches!(node.replicas.start(other).await, Err(AgentError::Exists(_))));
    assert!(matches!(node.replicas.promote("v-r-1", promotion(0, "e")).await, Err(AgentError::Invalid { .. })));
    assert!(matches!(node.replicas.promote("v-r-1", promotion(1, "a:b")).await, Err(AgentError::Invalid { .. })));
}

#[tokio::test]
async fn a_failing_export_is_retried_until_it_works() {
    let node = node(false).await;
    let failure = (-32602, "Invalid parameters".to_owned());
    node.plane.state.lock().unwrap().failing.insert("nvmf_subsystem_add_listener".to_owned(), failure);
    let replica = node.replicas.start(request(true)).await.unwrap();
    assert_eq!(replica.state(), pb::State::Starting);
    assert!(replica.message.contains("Invalid parameters"));
    node.plane.state.lock().unwrap().failing.clear();
    node.plane.wait_until("listening", |s| s.subsystems.get(NQN).is_some_and(|sub| !sub.listeners.is_empty())).await;
    node.replicas.promote("v-r-1", promotion(1, "e")).await.unwrap();
}
