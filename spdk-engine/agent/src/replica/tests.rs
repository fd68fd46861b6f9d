#![allow(clippy::unwrap_used)]
use super::*;
use crate::disk::{DiskContext, DiskState};
use crate::fake_plane::{Fabric, FakeLvol, FakePlane, FakeStore, ready_disk};
use crate::state::DiskStore;
use crate::supervise::{self, Plane};
use mirror_core::meta::{ReplicaState, Superblock};
use mirror_core::{Config, ConfigNumber, EngineInstance, Epoch, Lineage, ReplicaId, VolumeId};
use std::path::Path;
use uuid::Uuid;

struct Node {
    plane: FakePlane,
    fabric: Fabric,
    status: watch::Sender<PlaneStatus>,
    disks: Disks,
    replicas: Replicas,
    hub: Hub,
    dir: tempfile::TempDir,
    shutdown: CancellationToken,
}

async fn connect(plane: &FakePlane) -> PlaneStatus {
    let plane: Plane = supervise::tests::greet(&plane.socket).await;
    PlaneStatus { plane: Some(Arc::new(plane)), ..PlaneStatus::default() }
}

async fn node(stock: bool) -> Node {
    let (dir, fabric) = (tempfile::tempdir().unwrap(), Fabric::default());
    let plane = FakePlane::serve(dir.path(), stock, fabric.clone());
    let (status, receiver) = watch::channel(connect(&plane).await);
    let hub = Hub::default();
    let shutdown = CancellationToken::new();
    let (disks, replicas) = open(dir.path(), receiver, &hub, &shutdown).await;
    ready_disk(&disks, &dir.path().join("disk")).await;
    Node { plane, fabric, status, disks, replicas, hub, dir, shutdown }
}

async fn open(
    dir: &Path,
    plane: watch::Receiver<PlaneStatus>,
    hub: &Hub,
    shutdown: &CancellationToken,
) -> (Disks, Replicas) {
    let context =
        DiskContext { node: "n".to_owned(), plane: plane.clone(), hub: hub.clone(), shutdown: shutdown.clone() };
    let disks = Disks::open(DiskStore::open(dir).unwrap(), context);
    let context = ReplicaContext {
        folder: dir.join("replicas"),
        plane,
        hub: hub.clone(),
        data_address: "127.0.0.1:4420".parse().unwrap(),
        machine: crate::machine::Machine::named("m", "b1"),
        shutdown: shutdown.clone(),
    };
    let replicas = Replicas::open(disks.clone(), context).await.unwrap();
    (disks, replicas)
}

impl Node {
    fn lvols(&self) -> Vec<String> {
        let disks = self.fabric.disks.lock().unwrap();
        disks.values().flat_map(|store| store.lvols.keys().cloned()).collect()
    }

    /// What is done to the lvstore by somebody else.
    fn with_store<T>(&self, change: impl FnOnce(&mut FakeStore) -> T) -> T {
        change(self.fabric.disks.lock().unwrap().values_mut().next().unwrap())
    }
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

/// The superblock of the only member of volume `v` at epoch 3.
pub(super) fn superblock(replica: &str, number: u64, lineage: &str) -> Superblock {
    let replica = ReplicaId::new(replica).unwrap();
    Superblock {
        volume: VolumeId::new("v").unwrap(),
        record: Config {
            lineage: Lineage::new(lineage).unwrap(),
            epoch: Epoch(3),
            engine_instance: EngineInstance::new("e3").unwrap(),
            config_number: ConfigNumber(number),
            in_sync: [replica.clone()].into(),
            rebuilding: [].into(),
            min_in_sync: 1,
            size_blocks: 256,
            clean: false,
            tree: Default::default(),
        },
        replica,
        block_size: 4096,
        region_blocks: 256,
        state: ReplicaState::Member,
        instance: String::new(),
        sequence: 1,
    }
}

fn promotion(epoch: u64, instance: &str) -> Promotion {
    Promotion { volume: "v".to_owned(), epoch, instance: instance.to_owned(), lineage: "l".to_owned(), expected: None }
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
        let folder = node.dir.path().join("replicas");
        let (_, record) = state::ReplicaFile::open(&folder, "v-r-1").unwrap();
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
    let second = FakePlane::serve(node.dir.path(), false, node.fabric.clone());
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
    node.shutdown.cancel();
    let shutdown = CancellationToken::new();
    let (_, again) = open(node.dir.path(), node.status.subscribe(), &hub, &shutdown).await;
    node.plane.wait_until("the stranger is out", |s| s.subsystems[NQN].hosts.len() == 1).await;
    assert_eq!(node.plane.state.lock().unwrap().subsystems[NQN].sessions, [host_nqn("v", 3, "e3")]);
    assert_eq!(again.start(request(false)).await.unwrap().promoted_epoch, 3);
}

#[tokio::test]
async fn rule_22_data_stays_that_knows_as_much_as_the_record_by_which_it_is_to_go() {
    let node = node(false).await;
    node.replicas.start(request(true)).await.unwrap();
    node.replicas.promote("v-r-1", promotion(3, "e3")).await.unwrap();
    let meta = node.with_store(|store| store.lvols["v-r-1-meta"].uuid.clone());
    let superblock = superblock("v-r-1", 8, "l");
    node.plane.state.lock().unwrap().metas.insert(meta, superblock.encode().unwrap());
    let permit = |number| {
        let record = pb::Record {
            lineage: "l".to_owned(),
            epoch: 3,
            config_number: number,
            in_sync: vec!["v-r-0".to_owned()],
            ..pb::Record::default()
        };
        Some(Permit::parse(record).unwrap())
    };
    let error = node.replicas.delete_by("v-r-1", "d", permit(8)).await.unwrap_err();
    assert!(matches!(&error, AgentError::Forbidden(why) if why.contains("config_number 8")), "{error}");
    assert_eq!(node.lvols(), ["v-r-1", "v-r-1-meta"]);
    assert_eq!(node.hub.replica("v-r-1").unwrap().state(), pb::State::Running, "a refusal changes nothing");
    node.replicas.delete_by("v-r-1", "d", permit(9)).await.unwrap();
    assert_eq!(node.lvols(), Vec::<String>::new());
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
    assert_eq!(node.lvols(), ["v-r-1", "v-r-1-meta"]);
    let error = node.replicas.promote("v-r-1", promotion(1, "e")).await.unwrap_err();
    assert!(matches!(error, AgentError::Forbidden(_)));
    assert_eq!(node.replicas.start(request(false)).await.unwrap().state(), pb::State::Running);
    node.replicas.delete("v-r-1", "d").await.unwrap();
    node.replicas.delete("v-r-1", "d").await.unwrap();
    assert!(node.replicas.list().is_empty() && !node.replicas.has("v-r-1"));
    assert_eq!(node.lvols(), Vec::<String>::new());
    assert_eq!(std::fs::read_dir(node.dir.path().join("replicas")).unwrap().count(), 0);
    assert!(node.replicas.start(request(true)).await.unwrap().fresh);
}

#[tokio::test]
async fn damaged_state_is_told_refused_and_deletable() {
    let node = node(false).await;
    node.replicas.start(request(true)).await.unwrap();
    node.replicas.promote("v-r-1", promotion(1, "e")).await.unwrap();
    let folder = node.dir.path().join("replicas");
    for slot in ["a", "b"] {
        std::fs::write(folder.join(format!("v-r-1.{slot}")), b"rubbish").unwrap();
    }
    let hub = Hub::default();
    node.shutdown.cancel();
    let shutdown = CancellationToken::new();
    let (disks, again) = open(node.dir.path(), node.status.subscribe(), &hub, &shutdown).await;
    let mut state = disks.state("d");
    let ready = state.wait_for(|state| matches!(state, DiskState::Ready(_)));
    tokio::time::timeout(Duration::from_secs(30), ready).await.unwrap().unwrap();
    let error = again.start(request(true)).await.unwrap_err();
    assert!(matches!(error, AgentError::Damaged(_)), "{error}");
    let replica = hub.replica("v-r-1").unwrap();
    assert_eq!(replica.state(), pb::State::Error);
    assert!(!replica.fresh, "damaged is not fresh");
    assert!(matches!(again.promote("v-r-1", promotion(2, "e2")).await, Err(AgentError::Damaged(_))));
    again.delete("v-r-1", "d").await.unwrap();
    assert_eq!(node.lvols(), Vec::<String>::new());
    assert!(again.start(request(true)).await.unwrap().fresh);
}

#[tokio::test]
async fn bad_requests_name_field_value_and_rule() {
    let node = node(false).await;
    for size in [0, 1, 4096, (1 << 20) + 4096, u64::MAX] {
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

#[tokio::test]
async fn an_lvol_without_a_record_is_neither_used_nor_deleted() {
    let node = node(false).await;
    let lvol = FakeLvol { uuid: Uuid::new_v4().to_string(), size: 1 << 20, clusters: 1 };
    node.with_store(|store| store.lvols.insert("v-r-1".to_owned(), lvol));
    let error = node.replicas.start(request(true)).await.unwrap_err();
    assert!(matches!(&error, AgentError::Damaged(text) if text.contains("without a record")), "{error}");
    node.replicas.delete("v-r-1", "d").await.unwrap();
    assert_eq!(node.lvols(), ["v-r-1"]);
    node.disks.look("d");
    let listed = async {
        while node.hub.disk("d").unwrap().unmanaged_count == 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(30), listed).await.unwrap();
    let disk = node.hub.disk("d").unwrap();
    assert_eq!((disk.unmanaged[0].name.as_str(), disk.unmanaged_bytes), ("v-r-1", 1 << 20));
    node.disks.remove("d").await.unwrap();
}

#[tokio::test]
async fn a_lost_or_exchanged_lvol_is_damage_and_not_made_anew() {
    let node = node(false).await;
    node.replicas.start(request(true)).await.unwrap();
    for lost in [true, false] {
        node.replicas.stop("v-r-1").await.unwrap();
        node.with_store(|store| match lost {
            true => drop(store.lvols.remove("v-r-1")),
            false => {
                let lvol = FakeLvol { uuid: Uuid::new_v4().to_string(), size: 1 << 20, clusters: 0 };
                store.lvols.insert("v-r-1".to_owned(), lvol);
            }
        });
        let error = node.replicas.start(request(true)).await.unwrap_err();
        assert!(matches!(error, AgentError::Damaged(_)), "{error}");
    }
}

#[tokio::test]
async fn a_crash_between_record_and_lvol_is_finished() {
    let node = node(false).await;
    let failure = (-32602, "Invalid parameters".to_owned());
    node.plane.state.lock().unwrap().failing.insert("bdev_lvol_create".to_owned(), failure);
    let replica = node.replicas.start(request(true)).await.unwrap();
    assert_eq!(replica.state(), pb::State::Starting);
    // As if the lvol had been made and the agent had died before it noted that.
    let uuid = Uuid::new_v4();
    let lvol = FakeLvol { uuid: uuid.to_string(), size: 1 << 20, clusters: 0 };
    node.with_store(|store| store.lvols.insert("v-r-1".to_owned(), lvol));
    node.plane.state.lock().unwrap().failing.clear();
    node.plane.wait_until("exported", |s| s.subsystems.get(NQN).is_some_and(|sub| !sub.listeners.is_empty())).await;
    let (_, record) = state::ReplicaFile::open(&node.dir.path().join("replicas"), "v-r-1").unwrap();
    assert_eq!(record.unwrap().lvol, Some(uuid));
}

#[tokio::test]
async fn what_was_deleted_while_its_disk_was_away_goes_when_it_is_back() {
    let node = node(false).await;
    node.replicas.start(request(true)).await.unwrap();
    let (path, away) = (node.dir.path().join("disk"), node.dir.path().join("pulled"));
    std::fs::rename(&path, &away).unwrap();
    node.plane.state.lock().unwrap().bases.clear();
    node.plane.state.lock().unwrap().bdevs.clear();
    let second = FakePlane::serve(node.dir.path(), false, node.fabric.clone());
    node.status.send_replace(connect(&second).await);
    let mut state = node.disks.state("d");
    let gone = |state: &DiskState| matches!(state, DiskState::Away(away) if away.reason == "DeviceMissing");
    tokio::time::timeout(Duration::from_secs(30), state.wait_for(gone)).await.unwrap().unwrap();
    assert!(matches!(node.disks.remove("d").await, Err(AgentError::Forbidden(_))));
    node.replicas.delete("v-r-1", "d").await.unwrap();
    assert!(node.replicas.list().is_empty());
    assert_eq!(node.lvols(), ["v-r-1", "v-r-1-meta"]);
    assert!(matches!(node.replicas.start(request(true)).await, Err(AgentError::Exists(_))));
    std::fs::rename(&away, &path).unwrap();
    let buried = async {
        while !node.lvols().is_empty() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(30), buried).await.unwrap();
}

/// The manager's call may end before the owner has answered: the name must be free all the same.
#[tokio::test]
async fn a_start_that_made_nothing_leaves_no_owner_although_its_caller_is_gone() {
    let node = node(false).await;
    let lvol = FakeLvol { uuid: Uuid::new_v4().to_string(), size: 1 << 20, clusters: 1 };
    node.with_store(|store| store.lvols.insert("v-r-1".to_owned(), lvol));
    let started = futures::FutureExt::now_or_never(node.replicas.start(request(true)));
    assert!(started.is_none(), "the call was not given up");
    assert!(node.replicas.has("v-r-1"), "nothing is under way");
    // Also a deletion that comes while the start is under way deletes nothing that has no record.
    let deleted = node.replicas.delete("v-r-1", "d").await;
    assert!(matches!(deleted, Ok(()) | Err(AgentError::Unavailable(_))), "{deleted:?}");
    let free = async {
        while node.replicas.has("v-r-1") {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(30), free).await.unwrap();
    node.replicas.delete("v-r-1", "d").await.unwrap();
    assert_eq!(node.lvols(), ["v-r-1"]);
    node.disks.remove("d").await.unwrap();
}

#[tokio::test]
async fn a_device_that_was_away_comes_back_with_nobody_in() {
    let node = node(false).await;
    node.replicas.start(request(true)).await.unwrap();
    node.replicas.promote("v-r-1", promotion(3, "e3")).await.unwrap();
    assert!(node.plane.connect(NQN, &host_nqn("v", 3, "e3")));
    {
        // What a data plane does when a device goes: the namespace is gone, host and session stay.
        let mut state = node.plane.state.lock().unwrap();
        state.bases.clear();
        state.bdevs.clear();
        state.subsystems.get_mut(NQN).unwrap().namespaces.clear();
    }
    // The disk is looked at.
    node.status.send_modify(|_| {});
    node.plane.wait_until("exported again", |state| !state.subsystems[NQN].namespaces.is_empty()).await;
    {
        let state = node.plane.state.lock().unwrap();
        assert!(state.subsystems[NQN].hosts.is_empty() && state.subsystems[NQN].sessions.is_empty());
    }
    node.replicas.promote("v-r-1", promotion(3, "e3")).await.unwrap();
    assert_eq!(hosts(&node.plane), [host_nqn("v", 3, "e3")]);
}

#[tokio::test]
async fn an_export_that_cannot_be_reached_is_not_said_to_be_gone() {
    let node = node(false).await;
    node.replicas.start(request(true)).await.unwrap();
    let up = node.status.borrow().clone();
    let unreachable = PlaneStatus { reason: "no answer".to_owned(), ..PlaneStatus::default() };
    node.status.send_replace(unreachable.clone());
    let error = node.replicas.stop("v-r-1").await.unwrap_err();
    assert!(matches!(&error, AgentError::Unavailable(text) if text.contains("no answer")), "{error}");
    let error = node.replicas.delete("v-r-1", "d").await.unwrap_err();
    assert!(matches!(error, AgentError::Unavailable(_)), "{error}");
    assert_eq!(node.plane.state.lock().unwrap().subsystems.len(), 1);
    // It is not forgotten, although nobody asks again.
    node.status.send_replace(up);
    node.plane.wait_until("taken away", |state| state.subsystems.is_empty()).await;
    node.status.send_replace(PlaneStatus { ended: true, ..unreachable });
    node.replicas.stop("v-r-1").await.unwrap();
}

#[tokio::test]
async fn a_record_that_was_repaired_by_hand_is_used_again_on_its_disk() {
    let node = node(false).await;
    node.replicas.start(request(true)).await.unwrap();
    let slots = ["a", "b"].map(|slot| node.dir.path().join("replicas").join(format!("v-r-1.{slot}")));
    let good = slots.clone().map(|slot| std::fs::read(slot).unwrap());
    slots.iter().for_each(|slot| std::fs::write(slot, b"rubbish").unwrap());
    let hub = Hub::default();
    node.shutdown.cancel();
    let shutdown = CancellationToken::new();
    let (disks, again) = open(node.dir.path(), node.status.subscribe(), &hub, &shutdown).await;
    let mut state = disks.state("d");
    let ready = state.wait_for(|state| matches!(state, DiskState::Ready(_)));
    tokio::time::timeout(Duration::from_secs(30), ready).await.unwrap().unwrap();
    assert!(matches!(again.start(request(false)).await, Err(AgentError::Damaged(_))));
    slots.iter().zip(good).for_each(|(slot, good)| std::fs::write(slot, good).unwrap());
    let replica = again.start(request(false)).await.unwrap();
    assert_eq!((replica.state(), replica.disk.as_str()), (pb::State::Running, "d"), "{replica:?}");
    assert!(matches!(disks.remove("d").await, Err(AgentError::Forbidden(_))), "it counts as one of the disk's");
}

/// A stock data plane looks only where it is told to.
#[tokio::test]
async fn the_device_of_a_disk_is_examined_by_name() {
    let node = node(true).await;
    {
        let mut state = node.plane.state.lock().unwrap();
        state.bases.clear();
        state.bdevs.clear();
    }
    node.status.send_modify(|_| {});
    node.plane.wait_until("examined", |state| !state.called("bdev_examine").is_empty()).await;
    let state = node.plane.state.lock().unwrap();
    let examined: Vec<&str> = state
        .calls
        .iter()
        .filter(|(method, _)| method == "bdev_examine")
        .map(|(_, params)| params["name"].as_str().unwrap())
        .collect();
    assert!(!examined.is_empty() && examined.iter().all(|name| *name == "d.d"), "{examined:?}");
}

/// What is exported: number and device of each namespace, by the names of lvols.
fn exported(node: &Node) -> Vec<(u64, String)> {
    let names: std::collections::BTreeMap<String, String> =
        node.with_store(|store| store.lvols.iter().map(|(name, lvol)| (lvol.uuid.clone(), name.clone())).collect());
    let state = node.plane.state.lock().unwrap();
    let namespace =
        |ns: &serde_json::Value| (ns["nsid"].as_u64().unwrap(), names[ns["bdev_name"].as_str().unwrap()].clone());
    let mut all: Vec<_> = state.subsystems[NQN].namespaces.iter().map(namespace).collect();
    all.sort();
    all
}

fn both() -> Vec<(u64, String)> {
    vec![(1, "v-r-1".to_owned()), (2, "v-r-1-meta".to_owned())]
}

fn record_of(node: &Node) -> state::ReplicaRecord {
    state::ReplicaFile::open(&node.dir.path().join("replicas"), "v-r-1").unwrap().1.unwrap()
}

#[tokio::test]
async fn the_meta_area_is_exported_beside_the_data_by_any_data_plane() {
    for stock in [false, true] {
        let node = node(stock).await;
        node.replicas.start(request(true)).await.unwrap();
        assert_eq!(exported(&node), both());
        let uuid = node.with_store(|store| store.lvols["v-r-1-meta"].uuid.clone());
        assert_eq!(record_of(&node).meta.unwrap().lvol.unwrap().to_string(), uuid);
        node.disks.look("d");
        assert_eq!(node.hub.disk("d").unwrap().unmanaged_count, 0);
        node.replicas.delete("v-r-1", "d").await.unwrap();
        assert!(node.lvols().is_empty());
    }
}

#[tokio::test]
async fn a_meta_lvol_that_its_record_does_not_name_is_made_again() {
    let node = node(false).await;
    let failure = (-32602, "Invalid parameters".to_owned());
    node.plane.state.lock().unwrap().failing.insert("bdev_lvol_create".to_owned(), failure);
    node.replicas.start(request(true)).await.unwrap();
    // As if both lvols had been made and the agent had died before it noted that.
    let lvol = || FakeLvol { uuid: Uuid::new_v4().to_string(), size: 1 << 20, clusters: 0 };
    let left = lvol();
    node.with_store(|store| {
        store.lvols.insert("v-r-1".to_owned(), lvol());
        store.lvols.insert("v-r-1-meta".to_owned(), left.clone());
    });
    node.plane.state.lock().unwrap().failing.clear();
    node.plane.wait_until("exported", |s| s.subsystems.get(NQN).is_some_and(|sub| !sub.listeners.is_empty())).await;
    assert_eq!(exported(&node), both());
    assert_ne!(record_of(&node).meta.unwrap().lvol.unwrap().to_string(), left.uuid, "it may hold anything");
}

#[tokio::test]
async fn a_lost_meta_area_is_replaced_by_an_empty_one_and_a_foreign_one_is_not_used() {
    let node = node(false).await;
    node.replicas.start(request(true)).await.unwrap();
    let first = record_of(&node).meta;
    node.replicas.stop("v-r-1").await.unwrap();
    node.with_store(|store| store.lvols.remove("v-r-1-meta").unwrap());
    node.replicas.start(request(false)).await.unwrap();
    assert_eq!(exported(&node), both());
    assert_ne!(record_of(&node).meta, first);
    node.replicas.stop("v-r-1").await.unwrap();
    node.with_store(|store| store.lvols.get_mut("v-r-1-meta").unwrap().uuid = Uuid::new_v4().to_string());
    let error = node.replicas.start(request(false)).await.unwrap_err();
    assert!(matches!(&error, AgentError::Damaged(text) if text.contains("v-r-1-meta")), "{error}");
}

#[tokio::test]
async fn a_replica_from_before_there_were_meta_areas_goes_on_without() {
    let node = node(false).await;
    node.replicas.start(request(true)).await.unwrap();
    node.shutdown.cancel();
    node.replicas.stop("v-r-1").await.ok();
    let folder = node.dir.path().join("replicas");
    let (mut file, record) = state::ReplicaFile::open(&folder, "v-r-1").unwrap();
    file.save(&state::ReplicaRecord { meta: None, running: true, ..record.unwrap() }).unwrap();
    node.with_store(|store| store.lvols.remove("v-r-1-meta").unwrap());
    node.plane.state.lock().unwrap().subsystems.clear();
    let shutdown = CancellationToken::new();
    let (_, again) = open(node.dir.path(), node.status.subscribe(), &Hub::default(), &shutdown).await;
    node.plane.wait_until("exported", |s| s.subsystems.get(NQN).is_some_and(|sub| !sub.listeners.is_empty())).await;
    assert_eq!(exported(&node), [(1, "v-r-1".to_owned())]);
    assert_eq!(again.start(request(false)).await.unwrap().state(), pb::State::Running);
    assert_eq!(node.lvols(), ["v-r-1"]);
}

#[tokio::test]
async fn names_of_meta_areas_are_no_names_of_replicas() {
    let node = node(false).await;
    let request = pb::StartReplicaRequest { name: "v-r-1-meta".to_owned(), ..request(true) };
    let error = node.replicas.start(request).await.unwrap_err();
    assert!(matches!(&error, AgentError::Invalid { field: "name", .. }), "{error}");
}
