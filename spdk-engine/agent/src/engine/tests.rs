#![allow(clippy::unwrap_used)]
use super::*;
use crate::arbiter::{Fault, MemoryArbiter, record_to_config};
use crate::disk::{DiskContext, Disks};
use crate::fake_plane::{Fabric, FakePlane, ready_disk};
use crate::replica::{ReplicaContext, Replicas};
use crate::server::Services;
use crate::state::DiskStore;
use crate::supervise;
use addax_api::VolumeConfig;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use mirror_core::meta::RegionBits;
use serde_json::json;

mod recovery;

const SIZE: u64 = 1 << 20;
const UUID: &str = "6d1c0c5e-6b6a-4d57-8f0a-2f6f2cbb7a10";

/// One node: a fake data plane and an agent's parts, reachable by gRPC.
struct Node {
    dir: tempfile::TempDir,
    plane: FakePlane,
    status: watch::Sender<PlaneStatus>,
    services: Services,
    agent: String,
    server: tokio::task::JoinHandle<()>,
    data: SocketAddr,
    fabric: Fabric,
    machine: Machine,
    shutdown: CancellationToken,
}

async fn up(plane: &FakePlane) -> PlaneStatus {
    let plane = supervise::tests::greet(&plane.socket).await;
    PlaneStatus { plane: Some(Arc::new(plane)), ..PlaneStatus::default() }
}

impl Node {
    async fn new(number: u8, stock: bool, fabric: &Fabric, arbiter: &MemoryArbiter) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let data: SocketAddr = format!("127.0.0.{number}:4420").parse().unwrap();
        let plane = FakePlane::serve(dir.path(), stock, fabric.clone());
        plane.listen_at(&data.ip().to_string(), data.port());
        let (status, receiver) = watch::channel(up(&plane).await);
        let shutdown = CancellationToken::new();
        let machine = Machine::named(&format!("m{number}"), "b1");
        let services = parts(dir.path(), data, receiver, (arbiter, &machine), &shutdown).await;
        let (agent, server) = serve("127.0.0.1:0", &services, &shutdown).await;
        Self { dir, plane, status, services, agent, server, data, fabric: fabric.clone(), machine, shutdown }
    }

    /// The data plane dies and another one is started.
    async fn restart_plane(&mut self) {
        self.restart_plane_failing(&[]).await;
    }

    /// The same; the next call of each of these methods fails on the new one.
    async fn restart_plane_failing(&mut self, once: &[&str]) {
        self.kill_plane();
        self.plane = FakePlane::serve(self.dir.path(), false, self.fabric.clone());
        self.plane.state.lock().unwrap().failing_once = once.iter().map(|method| (*method).to_owned()).collect();
        self.plane.listen_at(&self.data.ip().to_string(), self.data.port());
        self.status.send_replace(up(&self.plane).await);
    }

    fn kill_plane(&self) {
        self.plane.kill();
        self.status.send_replace(PlaneStatus { reason: "killed".to_owned(), ..PlaneStatus::default() });
    }

    /// The agent dies and another one is started, on the same data plane.
    async fn restart_agent(&mut self, arbiter: &MemoryArbiter) {
        self.shutdown.cancel();
        self.shutdown = CancellationToken::new();
        let status = self.status.subscribe();
        self.services = parts(self.dir.path(), self.data, status, (arbiter, &self.machine), &self.shutdown).await;
        (&mut self.server).await.unwrap();
        (self.agent, self.server) = serve(&self.agent, &self.services, &self.shutdown).await;
    }

    /// The machine loses power: everything on it ends. Nothing is started again yet.
    fn lose_power(&self) {
        self.shutdown.cancel();
        self.kill_plane();
    }

    /// The machine is started again, in that boot.
    async fn boot(&mut self, boot: &str, arbiter: &MemoryArbiter) {
        self.machine = Machine::named(self.machine.identity(), boot);
        self.plane = FakePlane::serve(self.dir.path(), false, self.fabric.clone());
        self.plane.listen_at(&self.data.ip().to_string(), self.data.port());
        self.status.send_replace(up(&self.plane).await);
        self.restart_agent(arbiter).await;
        // Its disk is exported again.
        let wait = async {
            while self.services.replicas.list().iter().any(|replica| replica.state() != pb::State::Running) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(30), wait).await.unwrap();
    }

    /// Hosts that the volume's subsystem lets in.
    fn admitted(&self) -> Vec<String> {
        let state = self.plane.state.lock().unwrap();
        state.subsystems["nqn.2026-11.io.addax:volume:v"].hosts.iter().cloned().collect()
    }

    /// What the last mirror here was made of.
    fn created(&self) -> serde_json::Value {
        let state = self.plane.state.lock().unwrap();
        let made = state.calls.iter().rev().find(|(method, _)| method == "addax_mirror_create");
        made.unwrap().1.clone()
    }

    async fn add_replica(&self, name: &str) {
        let request = pb::StartReplicaRequest {
            name: name.to_owned(),
            volume: "v".to_owned(),
            disk: "d".to_owned(),
            size_bytes: SIZE,
            create: true,
        };
        self.services.replicas.start(request).await.unwrap();
    }

    fn member(&self, replica: &str) -> pb::Member {
        pb::Member {
            replica: replica.to_owned(),
            agent: self.agent.clone(),
            address: Some(pb::Address {
                traddr: self.data.ip().to_string(),
                trsvcid: u32::from(self.data.port()),
                nqn: addax_api::nqn::replica_nqn(replica),
            }),
        }
    }

    async fn wait_engine(&self, what: &str, holds: impl Fn(&pb::Engine) -> bool) -> pb::Engine {
        let mut version = self.services.hub.subscribe();
        let wait = async {
            loop {
                if let Some(engine) = self.services.hub.engine("v").filter(|engine| holds(engine)) {
                    return engine;
                }
                version.changed().await.unwrap();
            }
        };
        let found = tokio::time::timeout(Duration::from_secs(30), wait).await;
        found.unwrap_or_else(|_| panic!("never: {what}; {:#?}", self.services.hub.engine("v")))
    }

    async fn running(&self) -> pb::Engine {
        self.wait_engine("running", |engine| engine.state() == pb::State::Running && !engine.replicas.is_empty()).await
    }
}

/// The agent for other agents: its address and the task.
async fn serve(
    address: &str,
    services: &Services,
    shutdown: &CancellationToken,
) -> (String, tokio::task::JoinHandle<()>) {
    let listener = tokio::net::TcpListener::bind(address).await.unwrap();
    let agent = listener.local_addr().unwrap().to_string();
    let incoming = tonic::transport::server::TcpIncoming::from(listener);
    let service = pb::replicas_server::ReplicasServer::new(services.clone());
    let server = tonic::transport::Server::builder().add_service(service);
    // Connections end with it, as with an agent that dies.
    let server = server.serve_with_incoming_shutdown(incoming, shutdown.clone().cancelled_owned());
    (agent, tokio::spawn(async move { server.await.unwrap() }))
}

async fn parts(
    dir: &std::path::Path,
    data_address: SocketAddr,
    plane: watch::Receiver<PlaneStatus>,
    (arbiter, machine): (&MemoryArbiter, &Machine),
    shutdown: &CancellationToken,
) -> Services {
    let hub = Hub::default();
    let context =
        DiskContext { node: "n".to_owned(), plane: plane.clone(), hub: hub.clone(), shutdown: shutdown.clone() };
    let disks = Disks::open(DiskStore::open(dir).unwrap(), context);
    let context = ReplicaContext {
        folder: dir.join("replicas"),
        plane: plane.clone(),
        hub: hub.clone(),
        data_address,
        machine: machine.clone(),
        shutdown: shutdown.clone(),
    };
    let replicas = Replicas::open(disks.clone(), context).await.unwrap();
    ready_disk(&disks, &dir.join("disk")).await;
    let context = EngineContext {
        plane,
        hub: hub.clone(),
        data_address,
        arbiter: Arc::new(arbiter.clone()),
        peers: Peers::new(replicas.clone(), None),
        machine: machine.clone(),
        shutdown: shutdown.clone(),
    };
    let engines = Engines::open(EngineStore::open(dir).unwrap(), context);
    Services { disks, replicas, engines, hub, shutdown: shutdown.clone() }
}

fn record(in_sync: &[&str]) -> mirror_core::Config {
    let record = VolumeConfig {
        lineage: "l".to_owned(),
        epoch: 0,
        engine_instance: String::new(),
        config_number: 1,
        in_sync: in_sync.iter().map(|name| (*name).to_owned()).collect(),
        rebuilding: Vec::new(),
        min_in_sync: 1,
        size: i64::try_from(SIZE).unwrap(),
        clean: true,
        snapshots: Default::default(),
    };
    record_to_config(&record).unwrap()
}

struct Cluster {
    nodes: Vec<Node>,
    arbiter: MemoryArbiter,
}

const NAMES: [&str; 3] = ["v-r-0", "v-r-1", "v-r-2"];

/// Nodes with a replica of volume `v` each; the record is there and clean.
async fn cluster(nodes: u8) -> Cluster {
    cluster_with(nodes, |_| false).await
}

/// As [`cluster`], with stock data planes on some nodes.
async fn cluster_with(nodes: u8, stock: fn(u8) -> bool) -> Cluster {
    let (fabric, arbiter) = (Fabric::default(), MemoryArbiter::default());
    let mut made = Vec::new();
    for number in 0..nodes {
        let node = Node::new(number + 1, stock(number), &fabric, &arbiter).await;
        node.add_replica(NAMES[usize::from(number)]).await;
        made.push(node);
    }
    arbiter.put("v", record(&NAMES[..usize::from(nodes)]));
    Cluster { nodes: made, arbiter }
}

impl Cluster {
    fn request(&self) -> pb::StartEngineRequest {
        pb::StartEngineRequest {
            volume: "v".to_owned(),
            size_bytes: SIZE,
            replicas: self.nodes.iter().zip(NAMES).map(|(node, name)| node.member(name)).collect(),
            allowed_hosts: vec!["nqn.2014-08.org.example:host-1".to_owned()],
            uuid: UUID.to_owned(),
        }
    }

    async fn open(&self, node: usize) -> pb::Engine {
        self.nodes[node].services.engines.start(self.request()).await.unwrap();
        self.nodes[node].running().await
    }
}

fn modes(engine: &pb::Engine) -> Vec<(&str, pb::Mode)> {
    engine.replicas.iter().map(|replica| (replica.replica.as_str(), replica.mode())).collect()
}

fn in_sync(arbiter: &MemoryArbiter) -> Vec<String> {
    arbiter.get("v").unwrap().in_sync.iter().map(|replica| replica.as_str().to_owned()).collect()
}

#[tokio::test]
async fn a_volume_opens_with_all_members_promoted_and_is_closed_cleanly() {
    let cluster = cluster(3).await;
    let engine = cluster.open(0).await;
    assert_eq!(engine.epoch, 1);
    assert!(engine.replicas.iter().all(|replica| replica.mode() == pb::Mode::InSync));
    let record = cluster.arbiter.get("v").unwrap();
    assert_eq!((record.epoch.0, record.in_sync.len(), record.clean), (1, 3, false));
    for (node, name) in cluster.nodes.iter().zip(NAMES) {
        let replica = node.services.hub.replica(name).unwrap();
        assert_eq!((replica.promoted_epoch, &replica.promoted_instance), (1, &engine.engine_instance));
    }
    {
        let state = cluster.nodes[0].plane.state.lock().unwrap();
        let subsystem = &state.subsystems["nqn.2026-11.io.addax:volume:v"];
        assert_eq!(subsystem.hosts.len(), 1);
        assert_eq!(subsystem.namespaces[0]["uuid"], json!(UUID));
        let made = state.calls.iter().rfind(|(method, _)| method == "nvmf_create_subsystem").unwrap();
        assert_eq!((&made.1["ana_reporting"], &made.1["min_cntlid"]), (&json!(true), &json!(1025)), "{made:?}");
    }
    // Asking again changes nothing.
    assert_eq!(cluster.nodes[0].services.engines.start(cluster.request()).await.unwrap().epoch, 1);
    let stopped = cluster.nodes[0].services.engines.stop("v").await.unwrap();
    assert_eq!(stopped.state(), pb::State::Stopped);
    assert!(cluster.arbiter.get("v").unwrap().clean);
    {
        let state = cluster.nodes[0].plane.state.lock().unwrap();
        let steps = ["addax_mirror_close", "nvmf_subsystem_listener_set_ana_state", "addax_mirror_delete"];
        let taken: Vec<_> = state.calls.iter().filter(|(method, _)| steps.contains(&method.as_str())).collect();
        let close = taken.iter().position(|(method, _)| method == "addax_mirror_close").unwrap();
        let told = &taken[close - 1].1["ana_state"];
        assert_eq!(told, "inaccessible", "hosts keep their commands before anything ends: {taken:?}");
        assert!(state.mirrors.is_empty() && state.controllers.is_empty());
        assert!(!state.subsystems.contains_key("nqn.2026-11.io.addax:volume:v"));
    }
    assert!(cluster.nodes[0].services.engines.list().is_empty());
    assert_eq!(cluster.nodes[0].services.engines.stop("v").await.unwrap().state(), pb::State::Stopped);
}

#[tokio::test]
async fn a_member_that_cannot_be_promoted_leaves_before_the_volume_serves() {
    let cluster = cluster(3).await;
    cluster.nodes[2].kill_plane();
    let engine = cluster.open(0).await;
    assert_eq!(in_sync(&cluster.arbiter), ["v-r-0", "v-r-1"]);
    assert!(modes(&engine).contains(&("v-r-2", pb::Mode::Out)));
}

#[tokio::test]
async fn swaps_are_carried_out_and_unknown_outcomes_settled() {
    let cluster = cluster(2).await;
    cluster.open(0).await;
    cluster.arbiter.fault(Fault::Held);
    cluster.arbiter.fault(Fault::CommittedSilently);
    cluster.nodes[0].plane.ask_swap("v.v", |next| {
        next["in_sync"] = json!(["v-r-0"]);
        next["config_number"] = json!(2);
    });
    let node = &cluster.nodes[0];
    node.plane.wait_until("settled", |state| state.mirrors["v.v"].pending.is_none()).await;
    assert_eq!(node.plane.state.lock().unwrap().mirrors["v.v"].state, "open");
    assert_eq!(in_sync(&cluster.arbiter), ["v-r-0"]);
    assert_eq!(cluster.arbiter.release(), 0, "a queued request was committed after the matter was settled");
    let engine = node.wait_engine("told", |engine| engine.config_number == 2).await;
    assert!(modes(&engine).contains(&("v-r-1", pb::Mode::Out)));
}

#[tokio::test]
async fn a_swap_against_a_newer_epoch_ends_the_engine_and_it_stays_ended() {
    let cluster = cluster(2).await;
    cluster.open(0).await;
    // Another node takes the volume over.
    let engine = cluster.open(1).await;
    assert_eq!(engine.epoch, 2);
    cluster.nodes[0].plane.ask_swap("v.v", |next| {
        next["in_sync"] = json!(["v-r-0"]);
        next["config_number"] = json!(9);
    });
    let lost = cluster.nodes[0].wait_engine("lost", |engine| engine.state() == pb::State::Error).await;
    assert!(lost.message.contains("another engine"), "{}", lost.message);
    assert!(cluster.nodes[0].plane.state.lock().unwrap().mirrors.is_empty());
    assert_eq!(cluster.arbiter.get("v").unwrap().epoch.0, 2);
    // A restart of its data plane or its agent does not bring it back either.
    let mut cluster = cluster;
    cluster.nodes[0].restart_plane().await;
    let arbiter = cluster.arbiter.clone();
    cluster.nodes[0].restart_agent(&arbiter).await;
    cluster.nodes[0].wait_engine("lost", |engine| engine.state() == pb::State::Error).await;
    assert_eq!(cluster.arbiter.get("v").unwrap().epoch.0, 2);
    // But a manager may ask for it.
    cluster.open(0).await;
    assert_eq!(cluster.arbiter.get("v").unwrap().epoch.0, 3);
}

#[tokio::test]
async fn an_engine_that_was_superseded_is_stopped_without_a_drain_that_cannot_end() {
    let cluster = cluster(2).await;
    cluster.open(0).await;
    cluster.open(1).await;
    let stopped = cluster.nodes[0].services.engines.stop("v").await.unwrap();
    assert_eq!(stopped.state(), pb::State::Stopped);
    let record = cluster.arbiter.get("v").unwrap();
    assert_eq!((record.epoch.0, record.clean), (2, false));
    let state = cluster.nodes[0].plane.state.lock().unwrap();
    assert!(state.called("mirror_close").is_empty());
    assert!(state.mirrors.is_empty() && !state.subsystems.contains_key("nqn.2026-11.io.addax:volume:v"));
}

#[tokio::test]
async fn a_restarted_data_plane_reopens_by_itself_with_a_new_epoch() {
    let mut cluster = cluster(3).await;
    let first = cluster.open(0).await;
    cluster.nodes[0].restart_plane().await;
    let second = cluster.nodes[0].wait_engine("epoch 2", |e| e.epoch == 2 && e.state() == pb::State::Running).await;
    assert_ne!(first.engine_instance, second.engine_instance);
    // Unclean: all stay members. Their meta areas hold nothing of the last engine, so every region may differ.
    let record = cluster.arbiter.get("v").unwrap();
    assert_eq!((record.in_sync.len(), record.rebuilding.len()), (3, 0));
    let created = cluster.nodes[0].created();
    let regions = RegionBits::full(u32::try_from(SIZE.div_ceil(1 << 20)).unwrap());
    assert_eq!(created["inherited"], json!(BASE64.encode(regions.to_bytes())));
    assert_eq!(created["legs"][1]["meta_bdev_name"], json!("m.v.v-r-1.2n2"));
    let controllers: Vec<String> = cluster.nodes[0].plane.state.lock().unwrap().controllers.keys().cloned().collect();
    assert_eq!(controllers, ["m.v.v-r-0.2", "m.v.v-r-1.2", "m.v.v-r-2.2"]);
}

#[tokio::test]
async fn members_without_a_meta_area_are_copied_from_one_that_has_one() {
    let mut cluster = cluster(3).await;
    for node in &cluster.nodes {
        let mut state = node.plane.state.lock().unwrap();
        state.subsystems.values_mut().for_each(|subsystem| subsystem.namespaces.retain(|ns| ns["nsid"] == 1));
    }
    cluster.open(0).await;
    assert!(cluster.nodes[0].created().get("inherited").is_none(), "there was nothing to keep bits in");
    // The new data plane exports what the record says: the local replica with its meta area.
    cluster.nodes[0].restart_plane().await;
    cluster.nodes[0].wait_engine("epoch 2", |e| e.epoch == 2 && e.state() == pb::State::Running).await;
    let record = cluster.arbiter.get("v").unwrap();
    assert_eq!((record.in_sync.len(), record.rebuilding.len()), (1, 2));
    assert!(record.rebuilding.iter().any(|replica| replica.as_str() == "v-r-0"), "its area names no instance (rule 1)");
}

const HOST: &str = "nqn.2014-08.org.example:host-1";

/// Rule 1: a member whose machine lost power is no source while another one is unchanged. The death of a process alone
/// loses nothing.
#[tokio::test]
async fn rule_01_a_replica_whose_machine_lost_power_is_copied_from_one_that_did_not() {
    let mut cluster = cluster(2).await;
    cluster.open(0).await;
    assert_eq!(cluster.nodes[0].created()["legs"][1]["instance"], "b1");
    let arbiter = cluster.arbiter.clone();
    cluster.nodes[0].kill_plane();
    cluster.nodes[1].lose_power();
    cluster.nodes[1].boot("b2", &arbiter).await;
    cluster.nodes[0].restart_plane().await;
    cluster.nodes[0].wait_engine("epoch 2", |e| e.epoch == 2 && e.state() == pb::State::Running).await;
    let record = arbiter.get("v").unwrap();
    assert_eq!(in_sync(&arbiter), ["v-r-0"], "{record:?}");
    assert_eq!(record.rebuilding.len(), 1);
    let created = cluster.nodes[0].created();
    assert_eq!((&created["hosts_must_detach"], &created["flushed"]), (&json!(false), &json!(false)));
    assert_eq!(cluster.nodes[0].admitted(), [HOST]);
}

/// Rule 1: when every copy may lack acknowledged writes, hosts that were attached are refused until they have detached.
#[tokio::test]
async fn rule_01_when_all_machines_lost_power_hosts_are_refused_until_they_have_detached() {
    let mut cluster = cluster(2).await;
    cluster.open(0).await;
    let arbiter = cluster.arbiter.clone();
    cluster.nodes.iter().for_each(Node::lose_power);
    for node in &mut cluster.nodes {
        node.boot("b2", &arbiter).await;
    }
    let served = |e: &pb::Engine| e.epoch == 2 && e.state() == pb::State::Running;
    let engine = cluster.nodes[0].wait_engine("epoch 2", served).await;
    assert_eq!(cluster.nodes[0].created()["hosts_must_detach"], json!(true));
    assert!(engine.message.contains("refused") && engine.message.contains(HOST), "{}", engine.message);
    assert!(cluster.nodes[0].admitted().is_empty());
    // The next agent knows it too.
    cluster.nodes[0].restart_agent(&arbiter).await;
    cluster.nodes[0].wait_engine("adopted", |e| served(e) && e.message.contains(HOST)).await;
    // Being wanted goes on: that is no detaching. Another host was never attached.
    let other = "nqn.2014-08.org.example:host-2";
    let engines = cluster.nodes[0].services.engines.clone();
    engines.set_hosts("v", vec![HOST.to_owned(), other.to_owned()]).await.unwrap();
    assert_eq!(cluster.nodes[0].admitted(), [other]);
    let told = |state: &crate::fake_plane::FakeState| !state.called("hosts_detached").is_empty();
    assert!(!told(&cluster.nodes[0].plane.state.lock().unwrap()));
    engines.set_hosts("v", vec![other.to_owned()]).await.unwrap();
    assert!(told(&cluster.nodes[0].plane.state.lock().unwrap()));
    let engine = engines.set_hosts("v", vec![HOST.to_owned(), other.to_owned()]).await.unwrap();
    assert_eq!(cluster.nodes[0].admitted(), [HOST, other]);
    assert!(engine.message.is_empty(), "{}", engine.message);
}

/// Rule 1: a session that ends while a superblock is read costs nothing: the replica is promoted and read once more.
#[tokio::test]
async fn rule_01_a_superblock_that_could_not_be_read_at_first_is_read_over_a_new_promote() {
    let mut cluster = cluster(1).await;
    cluster.open(0).await;
    cluster.nodes[0].restart_plane_failing(&["addax_mirror_read_meta"]).await;
    cluster.nodes[0].wait_engine("epoch 2", |e| e.epoch == 2 && e.state() == pb::State::Running).await;
    assert_eq!(cluster.nodes[0].created()["hosts_must_detach"], json!(false), "it lost nothing");
    assert_eq!(cluster.nodes[0].admitted(), [HOST]);
    let state = cluster.nodes[0].plane.state.lock().unwrap();
    let calls = |wanted: &str| state.calls.iter().filter(|(method, _)| method == wanted).count();
    assert_eq!((calls("addax_mirror_read_meta"), calls("bdev_nvme_attach_controller")), (2, 2));
}

/// Rule 1: what a member that comes back may have lost is known to the mirror before it can come back.
#[tokio::test]
async fn rule_01_the_mirror_hears_of_lost_power_before_the_replica_is_promoted_again() {
    let mut cluster = cluster(2).await;
    cluster.open(0).await;
    let arbiter = cluster.arbiter.clone();
    cluster.nodes[1].lose_power();
    {
        let mut state = cluster.nodes[0].plane.state.lock().unwrap();
        let legs = &mut state.mirrors.get_mut("v.v").unwrap().legs;
        legs.iter_mut().find(|leg| leg["replica"] == "v-r-1").unwrap()["state"] = json!("lost");
        state.failing.insert("addax_mirror_set_instance".to_owned(), (-5, "not now".to_owned()));
        state.event(json!({"type": "leg", "name": "v.v", "replica": "v-r-1", "state": "lost"}));
    }
    cluster.nodes[0].plane.changed.notify_waiters();
    cluster.nodes[1].boot("b2", &arbiter).await;
    let asked = |state: &crate::fake_plane::FakeState| !state.called("set_instance").is_empty();
    cluster.nodes[0].plane.wait_until("told", asked).await;
    let promoted = || !cluster.nodes[1].plane.state.lock().unwrap().called("add_host").is_empty();
    assert!(!promoted(), "it may come back as one that lost nothing");
    cluster.nodes[0].plane.state.lock().unwrap().failing.clear();
    cluster.nodes[1].plane.wait_until("promoted", |state| !state.called("add_host").is_empty()).await;
    let state = cluster.nodes[0].plane.state.lock().unwrap();
    let told = state.calls.iter().rev().find(|(method, _)| method == "addax_mirror_set_instance").unwrap();
    assert_eq!(told.1, json!({"name": "v.v", "replica": "v-r-1", "instance": "b2"}));
}

/// Rule 15: an opener that died after its epoch was raised leaves an engine behind that can rebuild nothing any more.
#[tokio::test]
async fn rule_15_an_idle_engine_that_was_replaced_learns_it_from_the_replica_it_cannot_rebuild() {
    let cluster = cluster(2).await;
    cluster.open(0).await;
    let mut record = cluster.arbiter.get("v").unwrap();
    record.epoch = mirror_core::Epoch(2);
    record.engine_instance = mirror_core::EngineInstance::new("dead-opener").unwrap();
    cluster.arbiter.put("v", record);
    let promotion = crate::replica::Promotion {
        volume: "v".to_owned(),
        epoch: 2,
        instance: "dead-opener".to_owned(),
        lineage: "l".to_owned(),
        expected: None,
    };
    cluster.nodes[1].services.replicas.promote(NAMES[1], promotion).await.unwrap();
    {
        let mut state = cluster.nodes[0].plane.state.lock().unwrap();
        let mirror = state.mirrors.get_mut("v.v").unwrap();
        (mirror.config["in_sync"], mirror.config["rebuilding"]) = (json!([NAMES[0]]), json!([NAMES[1]]));
        mirror.legs.retain(|leg| leg["replica"] == NAMES[0]);
        state.event(json!({"type": "leg", "name": "v.v", "replica": NAMES[1], "state": "out"}));
    }
    cluster.nodes[0].plane.changed.notify_waiters();
    let lost = cluster.nodes[0].wait_engine("lost", |engine| engine.state() == pb::State::Error).await;
    assert!(lost.message.contains("another engine"), "{}", lost.message);
}

#[tokio::test]
async fn rule_01_a_promote_that_expects_another_instance_changes_nothing() {
    let cluster = cluster(1).await;
    let promotion = |expected: &str| crate::replica::Promotion {
        volume: "v".to_owned(),
        epoch: 1,
        instance: "e1".to_owned(),
        lineage: "l".to_owned(),
        expected: Some(expected.to_owned()),
    };
    let replicas = &cluster.nodes[0].services.replicas;
    let refused = replicas.promote(NAMES[0], promotion("b0")).await;
    assert!(matches!(refused, Err(AgentError::Unavailable(_))), "{refused:?}");
    assert!(replicas.list()[0].fresh);
    let promoted = replicas.promote(NAMES[0], promotion("b1")).await.unwrap();
    assert_eq!((promoted.promoted_epoch, promoted.volatile, promoted.instance.as_str()), (1, true, "b1"));
}

/// Whether an engine that opens says that it waits for an older engine's lease, or has begun to serve.
async fn waits_for_lease(node: &Node, epoch: u64) -> bool {
    let waits = |e: &pb::Engine| e.message.contains("older engine");
    let serves = |e: &pb::Engine| e.epoch == epoch && e.state() == pb::State::Running;
    waits(&node.wait_engine("waits or serves", |e| waits(e) || serves(e)).await)
}

/// Rule 16: a node knows that the engine which ran on it is dead, and need not wait for its lease when a member is away.
#[tokio::test]
async fn rule_16_a_node_does_not_wait_for_the_lease_of_its_own_dead_engine() {
    let mut cluster = cluster(2).await;
    cluster.open(0).await;
    cluster.nodes[1].kill_plane();
    cluster.nodes[0].restart_plane().await;
    assert!(!waits_for_lease(&cluster.nodes[0], 2).await);
    assert_eq!(in_sync(&cluster.arbiter), ["v-r-0"]);
}

#[tokio::test]
async fn rule_16_a_machine_that_was_started_again_runs_no_engine_of_before() {
    let mut cluster = cluster(2).await;
    cluster.open(0).await;
    let arbiter = cluster.arbiter.clone();
    cluster.nodes.iter().for_each(Node::lose_power);
    cluster.nodes[0].boot("b2", &arbiter).await;
    assert!(!waits_for_lease(&cluster.nodes[0], 2).await);
}

#[tokio::test]
async fn rule_16_another_nodes_engine_may_live_whatever_became_of_ones_own() {
    let mut cluster = cluster(3).await;
    cluster.open(0).await;
    // Node 1 takes over; nobody tells node 0, and node 2 is away when node 0 takes it back.
    cluster.open(1).await;
    cluster.nodes[2].kill_plane();
    cluster.nodes[0].restart_plane().await;
    cluster.nodes[0].wait_engine("lost", |e| e.state() == pb::State::Error).await;
    cluster.nodes[0].services.engines.start(cluster.request()).await.unwrap();
    assert!(waits_for_lease(&cluster.nodes[0], 3).await);
}

#[tokio::test]
async fn rule_16_an_attempt_that_failed_on_top_of_ones_own_dead_engine_changes_nothing_about_that() {
    let mut cluster = cluster(2).await;
    cluster.open(0).await;
    cluster.nodes[0].kill_plane();
    cluster.nodes[1].kill_plane();
    // Its epoch is raised in vain: the mirror cannot be made.
    cluster.nodes[0].plane = FakePlane::serve(cluster.nodes[0].dir.path(), false, cluster.nodes[0].fabric.clone());
    let node = &cluster.nodes[0];
    node.plane.listen_at(&node.data.ip().to_string(), node.data.port());
    let fails = (-5, "not now".to_owned());
    node.plane.state.lock().unwrap().failing.insert("bdev_nvme_attach_controller".to_owned(), fails);
    node.status.send_replace(up(&node.plane).await);
    let raised = |e: &pb::Engine| e.epoch == 2;
    node.wait_engine("raised", raised).await;
    node.kill_plane();
    node.wait_engine("failed", |e| e.epoch == 0).await;
    cluster.nodes[0].restart_plane().await;
    assert!(!waits_for_lease(&cluster.nodes[0], 3).await);
}

/// No session begins at a stock data plane before the old one was drained there.
#[tokio::test]
async fn a_lost_leg_of_a_stock_data_plane_gets_a_promote_and_then_a_session() {
    let cluster = cluster_with(2, |number| number == 1).await;
    cluster.open(0).await;
    let attached = cluster.nodes[0].plane.state.lock().unwrap().controllers["m.v.v-r-1.1"].clone();
    assert_eq!((&attached["ctrlr_loss_timeout_sec"], &attached["reconnect_delay_sec"]), (&json!(0), &json!(0)));
    let count = |node: usize, method: &str| cluster.nodes[node].plane.state.lock().unwrap().called(method).len();
    let promotes = count(1, "add_host");
    {
        let mut state = cluster.nodes[0].plane.state.lock().unwrap();
        let legs = &mut state.mirrors.get_mut("v.v").unwrap().legs;
        legs.iter_mut().find(|leg| leg["replica"] == "v-r-1").unwrap()["state"] = json!("lost");
        state.event(json!({"type": "leg", "name": "v.v", "replica": "v-r-1", "state": "lost"}));
    }
    cluster.nodes[0].plane.wait_until("connected again", |state| !state.called("reset_controller").is_empty()).await;
    assert!(count(1, "add_host") > promotes, "a session without a promote");
    let state = cluster.nodes[0].plane.state.lock().unwrap();
    let reset = state.calls.iter().find(|(method, _)| method == "bdev_nvme_reset_controller").unwrap();
    assert_eq!(reset.1["name"], "m.v.v-r-1.1");
}

#[tokio::test]
async fn a_new_agent_adopts_the_mirror_that_runs() {
    let mut cluster = cluster(2).await;
    let engine = cluster.open(0).await;
    let arbiter = cluster.arbiter.clone();
    cluster.nodes[0].restart_agent(&arbiter).await;
    let adopted = cluster.nodes[0].running().await;
    assert_eq!((adopted.epoch, adopted.engine_instance), (engine.epoch, engine.engine_instance));
    assert_eq!(cluster.nodes[0].plane.state.lock().unwrap().called("mirror_create").len(), 1);
    // And serves its swaps.
    cluster.nodes[0].plane.ask_swap("v.v", |next| {
        next["in_sync"] = json!(["v-r-0"]);
        next["config_number"] = json!(2);
    });
    cluster.nodes[0].plane.wait_until("settled", |state| state.mirrors["v.v"].pending.is_none()).await;
    assert_eq!(in_sync(&cluster.arbiter), ["v-r-0"]);
}

#[tokio::test]
async fn a_swap_that_was_pending_when_the_agent_died_is_served_by_the_next() {
    let mut cluster = cluster(2).await;
    cluster.open(0).await;
    cluster.nodes[0].shutdown.cancel();
    cluster.nodes[0].plane.ask_swap("v.v", |next| {
        next["in_sync"] = json!(["v-r-0"]);
        next["config_number"] = json!(2);
    });
    let arbiter = cluster.arbiter.clone();
    cluster.nodes[0].restart_agent(&arbiter).await;
    cluster.nodes[0].plane.wait_until("settled", |state| state.mirrors["v.v"].pending.is_none()).await;
    assert_eq!(in_sync(&cluster.arbiter), ["v-r-0"]);
}

#[tokio::test]
async fn a_volume_that_could_not_be_closed_is_served_again_or_opened_anew() {
    const NQN: &str = "nqn.2026-11.io.addax:volume:v";
    let cluster = cluster(2).await;
    cluster.open(0).await;
    let node = &cluster.nodes[0];
    {
        // Closing takes the export away and then fails.
        let mut state = node.plane.state.lock().unwrap();
        state.subsystems.remove(NQN);
        state.failing.insert("addax_mirror_close".to_owned(), (-110, "Connection timed out".to_owned()));
    }
    let error = node.services.engines.stop("v").await.unwrap_err();
    assert!(error.to_string().contains("timed out"), "{error}");
    let told = node.services.hub.engine("v").unwrap();
    assert!(told.state() == pb::State::Running || told.message.contains("could not be closed"), "{told:?}");
    node.plane.wait_until("exported again", |state| state.subsystems.contains_key(NQN)).await;
    node.running().await;
    // It goes on closing after the call has failed: it is not exported, whatever is there.
    let set = |mirror_state: &str| {
        let mut state = node.plane.state.lock().unwrap();
        state.mirrors.get_mut("v.v").unwrap().state = mirror_state.to_owned();
        state.event(json!({"type": "mirror_state", "name": "v.v", "state": mirror_state, "reason": "test"}));
    };
    set("closing");
    let told = node.wait_engine("closing", |engine| engine.state() == pb::State::Starting).await;
    assert!(told.message.contains("being closed"), "{}", told.message);
    set("closed");
    let again = node.wait_engine("open anew", |engine| engine.epoch == 2 && engine.state() == pb::State::Running).await;
    assert_eq!(in_sync(&cluster.arbiter).len(), 2, "{again:?}");
    // What is exported still is to be used again.
    node.services.engines.stop("v").await.unwrap_err();
    let last_state = |state: &crate::fake_plane::FakeState| {
        let set = |(method, _): &&(String, serde_json::Value)| method == "nvmf_subsystem_listener_set_ana_state";
        state.calls.iter().rfind(set).map(|(_, params)| params["ana_state"].clone())
    };
    node.plane.wait_until("usable again", |state| last_state(state) == Some(json!("optimized"))).await;
    node.running().await;
    node.plane.state.lock().unwrap().failing.clear();
    node.services.engines.stop("v").await.unwrap();
}

#[tokio::test]
async fn replicas_are_added_and_removed_and_let_go() {
    let cluster = cluster(3).await;
    cluster.arbiter.put("v", record(&NAMES[..2]));
    cluster.open(0).await;
    let engines = &cluster.nodes[0].services.engines;
    let member = Some(cluster.nodes[2].member(NAMES[2]));
    engines.add_replica("v", member.clone()).await.unwrap();
    engines.add_replica("v", member).await.unwrap();
    assert_eq!(cluster.nodes[0].plane.state.lock().unwrap().called("add_leg").len(), 1);
    assert_eq!(cluster.nodes[2].services.hub.replica(NAMES[2]).unwrap().promoted_epoch, 1);
    assert!(cluster.nodes[0].plane.state.lock().unwrap().controllers.contains_key("m.v.v-r-2.1"));
    let engine = engines.remove_replica("v", NAMES[2]).await.unwrap();
    assert!(!modes(&engine).iter().any(|(replica, _)| *replica == NAMES[2]));
    assert!(!cluster.nodes[0].plane.state.lock().unwrap().controllers.contains_key("m.v.v-r-2.1"));
    let engine = engines.remove_replica("v", NAMES[2]).await.unwrap();
    assert_eq!(engine.replicas.len(), 2);
}

#[tokio::test]
async fn hosts_are_replaced() {
    let cluster = cluster(1).await;
    cluster.open(0).await;
    let hosts = vec!["nqn.2014-08.org.example:host-2".to_owned()];
    let engine = cluster.nodes[0].services.engines.set_hosts("v", hosts.clone()).await.unwrap();
    assert_eq!(engine.allowed_hosts, hosts);
    let state = cluster.nodes[0].plane.state.lock().unwrap();
    let subsystem = &state.subsystems["nqn.2026-11.io.addax:volume:v"];
    assert_eq!(subsystem.hosts.iter().cloned().collect::<Vec<_>>(), hosts);
}

#[tokio::test]
async fn a_member_whose_disk_was_emptied_is_no_source() {
    let cluster = cluster(2).await;
    cluster.open(0).await;
    cluster.nodes[0].services.engines.stop("v").await.unwrap();
    // Node 0 loses its data and gets an empty replica of the same name; node 1 is away at first.
    cluster.nodes[0].services.replicas.delete(NAMES[0], "d").await.unwrap();
    cluster.nodes[0].add_replica(NAMES[0]).await;
    let engine = cluster.open(0).await;
    assert_eq!(in_sync(&cluster.arbiter), [NAMES[1]]);
    assert!(modes(&engine).contains(&(NAMES[0], pb::Mode::Out)));
}

#[tokio::test]
async fn no_arbiter_and_no_record_open_nothing() {
    let cluster = cluster(1).await;
    cluster.arbiter.set_away(true);
    let engines = &cluster.nodes[0].services.engines;
    engines.start(cluster.request()).await.unwrap();
    cluster.nodes[0].wait_engine("opening", |engine| engine.message == "opening").await;
    assert!(cluster.nodes[0].plane.state.lock().unwrap().mirrors.is_empty());
    cluster.arbiter.set_away(false);
    assert_eq!(cluster.nodes[0].running().await.epoch, 1);
    let mut other = cluster.request();
    other.volume = "w".to_owned();
    engines.start(other).await.unwrap();
    let mut version = cluster.nodes[0].services.hub.subscribe();
    while !cluster.nodes[0].services.engines.get("w").unwrap().message.contains("no record") {
        version.changed().await.unwrap();
    }
    engines.stop("w").await.unwrap();
    assert!(matches!(engines.get("w"), Err(AgentError::NotFound { .. })));
}

#[tokio::test]
async fn bad_requests_are_refused_and_change_nothing() {
    let cluster = cluster(1).await;
    let engines = &cluster.nodes[0].services.engines;
    let good = cluster.request();
    type Spoil = fn(&mut pb::StartEngineRequest);
    let spoil: [(&str, Spoil); 8] = [
        ("volume", |r| r.volume = "A/b".to_owned()),
        ("uuid", |r| r.uuid = "x".to_owned()),
        ("replicas", |r| r.replicas.clear()),
        ("replicas", |r| r.replicas.push(r.replicas[0].clone())),
        ("agent", |r| r.replicas[0].agent.clear()),
        ("address.traddr", |r| r.replicas[0].address.as_mut().unwrap().traddr = "host".to_owned()),
        ("address.trsvcid", |r| r.replicas[0].address.as_mut().unwrap().trsvcid = 70_000),
        ("allowed_hosts", |r| r.allowed_hosts.push("me".to_owned())),
    ];
    for (field, spoil) in spoil {
        let mut request = good.clone();
        spoil(&mut request);
        let error = engines.start(request).await.unwrap_err();
        assert!(matches!(&error, AgentError::Invalid { field: f, .. } if *f == field), "{field}: {error}");
    }
    assert!(engines.list().is_empty());
    assert_eq!(cluster.arbiter.get("v").unwrap().epoch.0, 0);
}
