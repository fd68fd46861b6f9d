//! Volumes on real processes: three agents, each with an `addax-engine` of its own (`ADDAX_ENGINE`), one arbiter in
//! memory, and SPDK's initiator (`SPDK_DIR`) as the host. Data planes are killed; the volume must open again, rebuild,
//! and end with byte-equal replicas. Without the variables the tests say so and do nothing. What a crash of the engine
//! costs is tested with `addax-perf`, which lies beside the engine, as the host that knows what it wrote.
#![allow(clippy::unwrap_used)]

use std::net::SocketAddr;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use addax_agent::arbiter::{Arbiter, MemoryArbiter, record_to_config};
use addax_agent::{Agent, AgentConfig, DataPlaneConfig, Machine, stop_data_plane};
use addax_api::VolumeConfig;
use addax_api::nqn::{replica_nqn, volume_nqn};
use addax_proto::engine_v1 as pb;
use blobstore_format::image::{Image, Mode};
use blobstore_format::read::ReadFn;
use mirror_core::meta::{Geometry, META_BLOCK_BYTES, RegionBits, Superblock, decode_bits, newest_superblock};
use pb::event::Object;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;

const SIZE: u64 = 64 << 20;
const HOST: &str = "nqn.2014-08.org.nvmexpress:uuid:0c4bb6a4-0000-4000-8000-000000000001";
const UUID: &str = "6d1c0c5e-6b6a-4d57-8f0a-2f6f2cbb7a10";
const NODES: usize = 3;

fn programs() -> Option<(PathBuf, PathBuf)> {
    let engine = std::env::var_os("ADDAX_ENGINE").map(PathBuf::from).filter(|program| program.exists());
    let spdk = std::env::var_os("SPDK_DIR").map(PathBuf::from).filter(|dir| dir.join("build/bin").exists());
    if engine.is_none() || spdk.is_none() {
        // Past the capture of the test harness, so that it is seen.
        let _ = std::io::Write::write_fmt(
            &mut std::io::stderr(),
            format_args!(
                "SKIPPED: ADDAX_ENGINE and SPDK_DIR must name the engine and a built SPDK tree; no volume was tested\n"
            ),
        );
    }
    Some((engine?, spdk?))
}

/// The same cluster, but every data plane a stock one.
fn stock() -> Option<(PathBuf, PathBuf)> {
    let spdk = std::env::var_os("SPDK_DIR").map(PathBuf::from).filter(|dir| dir.join("build/bin").exists());
    if spdk.is_none() {
        let _ = std::io::Write::write_fmt(
            &mut std::io::stderr(),
            format_args!("SKIPPED: SPDK_DIR does not name a built SPDK tree; no stock engine was tested\n"),
        );
    }
    Some((spdk.clone()?.join("build/bin/spdk_tgt"), spdk?))
}

/// The engine, and the load generator that was built with it.
fn engine_and_load() -> Option<(PathBuf, PathBuf)> {
    let engine = std::env::var_os("ADDAX_ENGINE").map(PathBuf::from).filter(|program| program.exists());
    let load = engine.as_ref().map(|engine| engine.with_file_name("addax-perf")).filter(|program| program.exists());
    if load.is_none() {
        let _ = std::io::Write::write_fmt(
            &mut std::io::stderr(),
            format_args!(
                "SKIPPED: ADDAX_ENGINE must name the engine, with addax-perf beside it; no crash was tested\n"
            ),
        );
    }
    Some((engine?, load?))
}

fn is_stock(program: &std::path::Path) -> bool {
    program.ends_with("spdk_tgt")
}

fn replica(node: usize) -> String {
    format!("v-r-{node}")
}

struct Node {
    dir: tempfile::TempDir,
    data: SocketAddr,
    number: usize,
    program: PathBuf,
    agent: String,
    shutdown: CancellationToken,
    channel: Channel,
}

impl Drop for Node {
    /// Also a test that fails leaves no process behind.
    fn drop(&mut self) {
        // The agent first, or it would start another one.
        self.shutdown.cancel();
        std::thread::sleep(Duration::from_millis(100));
        if let Some(pid) = self.pid() {
            let _ = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL);
        }
    }
}

impl Node {
    async fn start(number: usize, engine: PathBuf, arbiter: Arc<dyn Arbiter>) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let ip = format!("127.0.21.{}", number + 1);
        let port = std::net::TcpListener::bind((ip.as_str(), 0)).unwrap().local_addr().unwrap().port();
        let data: SocketAddr = format!("{ip}:{port}").parse().unwrap();
        let channel = Channel::from_static("http://127.0.0.1:1").connect_lazy();
        let agent = "127.0.0.1:0".to_owned();
        let mut node = Self { dir, data, number, program: engine, agent, shutdown: CancellationToken::new(), channel };
        node.run_agent("boot-1", arbiter).await;
        node
    }

    /// Runs an agent in that boot of the machine, at the address of the one before.
    async fn run_agent(&mut self, boot: &str, arbiter: Arc<dyn Arbiter>) {
        let stock = is_stock(&self.program);
        let config = AgentConfig {
            node: format!("n{}", self.number),
            listen: self.agent.parse().unwrap(),
            data_plane: DataPlaneConfig {
                memory_mib: if stock { 1024 } else { 256 },
                // Other tests run spdk_tgt on the same core; addax-engine takes no locks on cores.
                extra_args: if stock { vec!["--disable-cpumask-locks".to_owned()] } else { Vec::new() },
                program: Some(self.program.clone()),
                address: self.data,
                rpc_socket: self.dir.path().join("rpc.sock"),
                // Two cores have to do; stock data planes poll all the time.
                cores: if self.number == 0 { "0x1" } else { "0x2" }.to_owned(),
                hugepages: false,
            },
            runtime_dir: self.dir.path().join("run"),
            tls: None,
        };
        self.shutdown = CancellationToken::new();
        let machine = Machine::named(&format!("machine-{}", self.number), boot);
        let agent = Agent::start_on(machine, config, arbiter, &self.shutdown).await.unwrap();
        self.agent = agent.address().unwrap().to_string();
        self.channel = Channel::from_shared(format!("http://{}", self.agent)).unwrap().connect_lazy();
        tokio::spawn(agent.serve(self.shutdown.clone()));
    }

    /// The machine loses power: its agent and its data plane end.
    async fn lose_power(&self) {
        self.shutdown.cancel();
        self.kill_data_plane();
        let pid = self.pid().unwrap();
        let end = tokio::time::Instant::now() + Duration::from_secs(30);
        // Its parent is this process, which has to reap it.
        while nix::sys::signal::kill(pid, None).is_ok() && !is_zombie(pid) {
            assert!(tokio::time::Instant::now() < end, "it does not die");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        // The listener of the agent goes with it.
        let address: SocketAddr = self.agent.parse().unwrap();
        while std::net::TcpListener::bind(address).is_err() {
            assert!(tokio::time::Instant::now() < end, "the agent does not end");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    fn pid(&self) -> Option<nix::unistd::Pid> {
        let text = std::fs::read(self.dir.path().join("run/data-plane.pid")).ok()?;
        let file: Value = serde_json::from_slice(&text).ok()?;
        Some(nix::unistd::Pid::from_raw(i32::try_from(file["pid"].as_i64()?).ok()?))
    }

    fn kill_data_plane(&self) {
        nix::sys::signal::kill(self.pid().unwrap(), nix::sys::signal::Signal::SIGKILL).unwrap();
    }

    /// A replica's contents, read from its disk without any engine.
    fn image(&self, number: usize) -> Vec<u8> {
        self.lvol(&replica(number))
    }

    fn lvol(&self, name: &str) -> Vec<u8> {
        let file = std::fs::File::open(self.dir.path().join("disk")).unwrap();
        let size = file.metadata().unwrap().len();
        let image =
            Image::open(ReadFn { size, read: |at, buf: &mut [u8]| file.read_exact_at(buf, at) }, Mode::AsMarked);
        let image = image.unwrap();
        let lvol = image.find(name).unwrap();
        let mut bytes = vec![0; usize::try_from(image.size(lvol)).unwrap()];
        image.read(lvol.id, 0, &mut bytes, &()).unwrap();
        bytes
    }

    /// What a replica's meta area says: its superblock, and the regions in which members may differ.
    fn meta(&self, number: usize) -> (Superblock, RegionBits) {
        let bytes = self.lvol(&format!("{}-meta", replica(number)));
        let geometry = Geometry::for_volume(SIZE / 4096, 4096).unwrap();
        let bits = &bytes[usize::try_from(geometry.bits_start()).unwrap() * META_BLOCK_BYTES..];
        let (set, bad) = decode_bits(&geometry, bits);
        assert_eq!(bad, 0, "sectors of bits are damaged");
        (newest_superblock(&bytes).unwrap(), set)
    }

    async fn rpc(&self, method: &str, params: Value) -> Value {
        let client = addax_agent::rpc::Client::connect(&self.dir.path().join("rpc.sock")).await.unwrap();
        client.call(method, params, Duration::from_secs(10)).await.unwrap()
    }

    /// Writes that an lvol of this node has taken.
    async fn writes_to(&self, lvol: &str) -> u64 {
        let lvols = self.rpc("bdev_lvol_get_lvols", Value::Null).await;
        let found = lvols.as_array().unwrap().iter().find(|entry| entry["name"] == lvol).unwrap();
        let stats = self.rpc("bdev_get_iostat", json!({"names": [found["uuid"]]})).await;
        stats["bdevs"][0]["num_write_ops"].as_u64().unwrap()
    }

    /// The figures of the mirror that runs here, once they are as wanted.
    async fn wait_mirror(&self, what: &str, holds: impl Fn(&Value) -> bool) -> Value {
        let end = tokio::time::Instant::now() + Duration::from_secs(90);
        loop {
            let mirror = self.rpc("addax_mirror_get", json!({"name": "v.v"})).await[0].take();
            if holds(&mirror) {
                return mirror;
            }
            assert!(tokio::time::Instant::now() < end, "never: {what}; {mirror:#}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    async fn put_disk(&self) {
        let wish = pb::PutDiskRequest {
            name: "d".to_owned(),
            kind: pb::DiskKind::File.into(),
            path: self.dir.path().join("disk").display().to_string(),
            size_bytes: 4 * SIZE,
            create: true,
            ..pb::PutDiskRequest::default()
        };
        pb::disks_client::DisksClient::new(self.channel.clone()).put_disk(wish).await.unwrap();
        self.watch("disk", |object| match object {
            Object::Disk(disk) => disk.reason.is_empty().then_some(()),
            _ => None,
        })
        .await;
    }

    fn replicas(&self) -> pb::replicas_client::ReplicasClient<Channel> {
        pb::replicas_client::ReplicasClient::new(self.channel.clone())
    }

    fn engines(&self) -> pb::engines_client::EnginesClient<Channel> {
        pb::engines_client::EnginesClient::new(self.channel.clone())
    }

    async fn watch<T>(&self, what: &str, mut pick: impl FnMut(Object) -> Option<T>) -> T {
        let mut events = pb::events_client::EventsClient::new(self.channel.clone());
        let mut last = String::new();
        let wait = async {
            let mut stream = events.watch(pb::WatchRequest {}).await.unwrap().into_inner();
            while let Some(event) = stream.message().await.unwrap() {
                let object = event.object.unwrap();
                last = format!("{object:#?}");
                if let Some(found) = pick(object) {
                    return found;
                }
            }
            panic!("the stream ended before: {what}");
        };
        let found = tokio::time::timeout(Duration::from_secs(90), wait).await;
        found.unwrap_or_else(|_| panic!("never: {what}; last {last}"))
    }

    async fn wait_up(&self) {
        self.watch("data plane", |object| match object {
            Object::Info(info) => (!info.data_plane_instance.is_empty()).then_some(()),
            _ => None,
        })
        .await;
    }

    async fn wait_engine(&self, what: &str, holds: impl Fn(&pb::Engine) -> bool) -> pb::Engine {
        self.watch(what, |object| match object {
            Object::Engine(engine) => holds(&engine).then_some(engine),
            _ => None,
        })
        .await
    }

    async fn wait_replica(&self, what: &str, holds: impl Fn(&pb::Replica) -> bool) -> pb::Replica {
        self.watch(what, |object| match object {
            Object::Replica(replica) => holds(&replica).then_some(replica),
            _ => None,
        })
        .await
    }
}

fn is_zombie(pid: nix::unistd::Pid) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(')').next().is_none_or(|rest| rest.trim_start().starts_with('Z'))
}

fn mode(engine: &pb::Engine, number: usize) -> pb::Mode {
    let found = engine.replicas.iter().find(|found| found.replica == replica(number));
    found.map_or(pb::Mode::Unspecified, pb::ReplicaMode::mode)
}

fn is_healthy(engine: &pb::Engine) -> bool {
    engine.state() == pb::State::Running && (0..NODES).all(|number| mode(engine, number) == pb::Mode::InSync)
}

struct Cluster {
    nodes: Vec<Node>,
    arbiter: MemoryArbiter,
    spdk: PathBuf,
    /// Writes at a time. Overlapping ones reach the members of a raid1 in any order, and leave them unequal for good.
    depth: &'static str,
}

impl Cluster {
    async fn start(engine: PathBuf, spdk: PathBuf) -> Self {
        Self::start_mixed(vec![engine; NODES], spdk).await
    }

    /// With a data plane of its own kind for each node.
    async fn start_mixed(programs: Vec<PathBuf>, spdk: PathBuf) -> Self {
        let arbiter = MemoryArbiter::default();
        let depth = if is_stock(&programs[0]) { "1" } else { "8" };
        let mut nodes = Vec::new();
        for (number, program) in programs.into_iter().enumerate() {
            let node = Node::start(number, program, Arc::new(arbiter.clone())).await;
            node.wait_up().await;
            node.put_disk().await;
            let request = pb::StartReplicaRequest {
                name: replica(number),
                volume: "v".to_owned(),
                disk: "d".to_owned(),
                size_bytes: SIZE,
                create: true,
            };
            let made = node.replicas().start_replica(request).await.unwrap().into_inner();
            assert_eq!(made.state(), pb::State::Running, "{made:?}");
            nodes.push(node);
        }
        let record = VolumeConfig {
            lineage: "l".to_owned(),
            epoch: 0,
            engine_instance: String::new(),
            config_number: 1,
            in_sync: (0..NODES).map(replica).collect(),
            rebuilding: Vec::new(),
            min_in_sync: 1,
            size: i64::try_from(SIZE).unwrap(),
            clean: true,
            snapshots: Default::default(),
        };
        arbiter.put("v", record_to_config(&record).unwrap());
        Self { nodes, arbiter, spdk, depth }
    }

    fn member(&self, number: usize) -> pb::Member {
        let node = &self.nodes[number];
        let address = pb::Address {
            traddr: node.data.ip().to_string(),
            trsvcid: u32::from(node.data.port()),
            nqn: replica_nqn(&replica(number)),
        };
        pb::Member { replica: replica(number), agent: node.agent.clone(), address: Some(address) }
    }

    async fn open(&self, node: usize) -> pb::Engine {
        let request = pb::StartEngineRequest {
            volume: "v".to_owned(),
            size_bytes: SIZE,
            replicas: (0..NODES).map(|number| self.member(number)).collect(),
            allowed_hosts: vec![HOST.to_owned()],
            uuid: UUID.to_owned(),
        };
        self.nodes[node].engines().start_engine(request).await.unwrap();
        self.nodes[node].wait_engine("open", |engine| engine.state() == pb::State::Running).await
    }

    /// SPDK's initiator writes through a node for a second; whether it could.
    async fn write(&self, node: usize) -> bool {
        let address = self.nodes[node].data;
        let transport = format!(
            "trtype:TCP adrfam:IPv4 traddr:{} trsvcid:{} subnqn:{} hostnqn:{HOST}",
            address.ip(),
            address.port(),
            volume_nqn("v")
        );
        let mut command = tokio::process::Command::new(self.spdk.join("build/bin/spdk_nvme_perf"));
        command.args(["-r", &transport, "-q", self.depth, "-o", "65536", "-w", "randwrite", "-t", "1", "-c", "0x2"]);
        command.args(["--no-huge", "-s", "256"]).kill_on_drop(true);
        let output = tokio::time::timeout(Duration::from_secs(60), command.output()).await.unwrap().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        text.contains("Attached to") && text.contains("Total")
    }

    /// A run of the load generator through node 0; `log` names what it knows.
    fn load(&self, program: &std::path::Path, log: &str, words: &[&str]) -> tokio::process::Command {
        let mut command = tokio::process::Command::new(program);
        command.args(["verify", "--target", &self.nodes[0].data.to_string(), "--nqn", &volume_nqn("v")]);
        command.args(["--host-nqn", HOST, "--cores", "0x2", "--no-pin", "--qd", "8", "--bs", "16k"]);
        command.arg("--log").arg(self.nodes[0].dir.path().join(log)).args(words).kill_on_drop(true);
        command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
        command
    }

    async fn run_load(&self, program: &std::path::Path, log: &str, words: &[&str]) {
        let mut command = self.load(program, log, words);
        let output = tokio::time::timeout(Duration::from_secs(120), command.output()).await.unwrap().unwrap();
        let text = [output.stdout, output.stderr].concat();
        assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&text));
    }

    async fn close(&self, node: usize) {
        let request = pb::StopEngineRequest { volume: "v".to_owned() };
        let closed = self.nodes[node].engines().stop_engine(request).await.unwrap().into_inner();
        assert_eq!(closed.state(), pb::State::Stopped);
    }

    fn assert_equal_images(&self) {
        let first = self.nodes[0].image(0);
        assert_eq!(first.len(), usize::try_from(SIZE).unwrap());
        assert!(first.iter().any(|byte| *byte != 0), "nothing was written");
        for number in 1..NODES {
            let other = self.nodes[number].image(number);
            let pairs = first.chunks(4096).zip(other.chunks(4096)).enumerate();
            let differ: Vec<_> =
                pairs.filter(|(_, (a, b))| a != b).map(|(block, (a, b))| (block, a[0], b[0])).collect();
            assert!(differ.is_empty(), "replica {number} differs in {} blocks: {differ:?}", differ.len());
        }
    }

    async fn finish(self) {
        for node in &self.nodes {
            node.shutdown.cancel();
            assert!(stop_data_plane(&node.dir.path().join("run"), Duration::from_secs(20)).await);
            std::fs::remove_file(node.dir.path().join("run/data-plane.pid")).unwrap();
        }
    }
}

/// One cluster at a time: data planes that poll on the same cores starve each other.
static TURN: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());

fn start_log() {
    let filter = tracing_subscriber::EnvFilter::from_default_env();
    let _ = tracing_subscriber::fmt().with_env_filter(filter).with_test_writer().try_init();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_volume_lives_through_the_death_of_a_replica_and_of_its_engine() {
    let Some((engine, spdk)) = programs() else { return };
    let _turn = TURN.lock().await;
    live_through_deaths(Cluster::start(engine, spdk).await, false).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stock_data_planes_serve_a_volume_as_best_effort() {
    let Some((target, spdk)) = stock() else { return };
    let _turn = TURN.lock().await;
    live_through_deaths(Cluster::start(target, spdk).await, true).await;
}

async fn live_through_deaths(cluster: Cluster, best_effort: bool) {
    start_log();
    let opened = cluster.open(0).await;
    assert_eq!((opened.epoch, opened.best_effort), (1, best_effort));
    assert!(is_healthy(&opened), "{opened:#?}");
    assert!(cluster.write(0).await, "the host cannot write");

    // A replica's data plane dies: it leaves, comes back, and is rebuilt when a manager asks for it.
    let before = cluster.nodes[1].wait_replica("replica", |r| r.state() == pb::State::Running).await;
    cluster.nodes[1].kill_data_plane();
    cluster.nodes[1]
        .wait_replica("exported again", |r| {
            r.state() == pb::State::Running && r.data_plane_instance != before.data_plane_instance
        })
        .await;
    assert!(cluster.write(0).await, "the host cannot write with a replica away");
    let away = cluster.nodes[0]
        .wait_engine("left or back", |engine| mode(engine, 1) != pb::Mode::Lost && engine.state() == pb::State::Running)
        .await;
    if mode(&away, 1) == pb::Mode::Out {
        let request = pb::AddReplicaRequest { volume: "v".to_owned(), replica: Some(cluster.member(1)) };
        cluster.nodes[0].engines().add_replica(request).await.unwrap();
    }
    cluster.nodes[0].wait_engine("rebuilt", is_healthy).await;

    // The engine's data plane dies: the volume opens by itself at the next epoch and makes its replicas equal.
    cluster.nodes[0].kill_data_plane();
    let again = cluster.nodes[0].wait_engine("open again", |e| e.epoch == 2 && e.state() == pb::State::Running).await;
    assert_ne!(again.engine_instance, opened.engine_instance);
    cluster.nodes[0].wait_engine("rebuilt", is_healthy).await;
    assert!(cluster.write(0).await, "the host cannot write after the engine's death");
    if !best_effort {
        // Closed before that, the record would stay unclean, and the next engine would go on.
        cluster.nodes[0].wait_mirror("equal", |mirror| mirror["inherited_regions"] == 0).await;
    }

    // Another node takes it over after an ordered close.
    cluster.close(0).await;
    assert!(cluster.arbiter.get("v").unwrap().clean);
    cluster.assert_equal_images();
    let moved = cluster.open(2).await;
    assert_eq!(moved.epoch, 3);
    assert!(is_healthy(&moved), "{moved:#?}");
    assert!(!cluster.write(0).await, "the old node still serves the volume");
    assert!(cluster.write(2).await);
    cluster.close(2).await;
    cluster.assert_equal_images();
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_volume_taken_over_while_its_old_engine_sleeps_is_not_served_by_that_any_more() {
    let Some((engine, spdk)) = programs() else { return };
    let _turn = TURN.lock().await;
    take_over(Cluster::start(engine, spdk).await).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stock_engine_that_slept_through_its_replacement_is_stopped() {
    let Some((target, spdk)) = stock() else { return };
    let _turn = TURN.lock().await;
    take_over(Cluster::start(target, spdk).await).await;
}

async fn take_over(cluster: Cluster) {
    start_log();
    cluster.open(0).await;
    assert!(cluster.write(0).await);
    let asleep = cluster.nodes[0].pid().unwrap();
    nix::sys::signal::kill(asleep, nix::sys::signal::Signal::SIGSTOP).unwrap();
    // Its own replica is asleep as well and leaves.
    let taken = cluster.open(1).await;
    assert_eq!(taken.epoch, 2);
    assert!(cluster.write(1).await);
    nix::sys::signal::kill(asleep, nix::sys::signal::Signal::SIGCONT).unwrap();
    let lost = cluster.nodes[0].wait_engine("lost", |engine| engine.state() == pb::State::Error).await;
    assert!(lost.message.contains("another engine"), "{}", lost.message);
    assert!(!cluster.write(0).await, "the old engine still acknowledges");
    assert!(cluster.write(1).await);
    assert_eq!(cluster.arbiter.get("v").unwrap().epoch.0, 2);
    cluster.finish().await;
}

/// Rule 1: disks in files have a volatile cache. With all machines, power took acknowledged writes from every copy, so hosts
/// that may remember them are refused; with some, the others have them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rule_01_power_lost_at_all_replicas_keeps_hosts_out_and_at_some_makes_those_no_source() {
    let Some((engine, spdk)) = programs() else { return };
    let _turn = TURN.lock().await;
    start_log();
    let mut cluster = Cluster::start(engine, spdk).await;
    assert!(is_healthy(&cluster.open(0).await));
    assert!(cluster.write(0).await);
    let told = |number: usize, cluster: &Cluster| cluster.nodes[number].meta(number).0.instance;
    assert!((0..NODES).all(|number| told(number, &cluster) == "boot-1"));

    // Two of three, and the engine's process with them: the one that lost nothing is the source.
    cluster.nodes[0].kill_data_plane();
    for number in 1..NODES {
        cluster.nodes[number].lose_power().await;
        let arbiter = Arc::new(cluster.arbiter.clone());
        cluster.nodes[number].run_agent("boot-2", arbiter).await;
        cluster.nodes[number].wait_replica("exported", |r| r.state() == pb::State::Running).await;
    }
    cluster.nodes[0].wait_engine("open again", |e| e.epoch == 2 && e.state() == pb::State::Running).await;
    for number in 1..NODES {
        let request = pb::AddReplicaRequest { volume: "v".to_owned(), replica: Some(cluster.member(number)) };
        cluster.nodes[0].engines().add_replica(request).await.unwrap();
    }
    cluster.nodes[0].wait_engine("rebuilt", is_healthy).await;
    assert!(cluster.write(0).await, "nobody was refused");

    // All of them. The engine's node comes last, so that it finds all others.
    for number in 0..NODES {
        cluster.nodes[number].lose_power().await;
    }
    for number in (0..NODES).rev() {
        let arbiter = Arc::new(cluster.arbiter.clone());
        cluster.nodes[number].run_agent("boot-3", arbiter).await;
        cluster.nodes[number].wait_replica("exported", |r| r.state() == pb::State::Running).await;
    }
    let refusing = |e: &pb::Engine| e.epoch >= 3 && e.state() == pb::State::Running && e.message.contains(HOST);
    cluster.nodes[0].wait_engine("refusing", refusing).await;
    assert!(!cluster.write(0).await, "a host is served that may remember what no copy has");
    assert!((0..NODES).all(|number| told(number, &cluster) != "boot-3"), "the next engine has to refuse it too");
    for hosts in [Vec::new(), vec![HOST.to_owned()]] {
        let request = pb::SetAllowedHostsRequest { volume: "v".to_owned(), allowed_hosts: hosts };
        cluster.nodes[0].engines().set_allowed_hosts(request).await.unwrap();
    }
    cluster.nodes[0].wait_engine("serving", |e| e.state() == pb::State::Running && e.message.is_empty()).await;
    assert!(cluster.write(0).await, "it has detached, and comes anew");
    cluster.nodes[0].wait_engine("healthy", is_healthy).await;
    cluster.nodes[0].wait_mirror("equal", |mirror| mirror["inherited_regions"] == 0).await;
    assert!((0..NODES).all(|number| told(number, &cluster) == "boot-3"));
    cluster.close(0).await;
    cluster.assert_equal_images();
    cluster.finish().await;
}

const REGION: u64 = 1 << 20;
const COLD: [&str; 4] = ["--offset", "0", "--range", "16M"];
const HOT: [&str; 4] = ["--offset", "32M", "--range", "8M"];
const HOT_REGIONS: u64 = 8;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_engine_costs_a_copy_of_the_dirty_regions_and_hot_ones_cost_no_meta_writes() {
    let Some((engine, load)) = engine_and_load() else { return };
    let _turn = TURN.lock().await;
    cost_the_dirty_regions(Cluster::start(engine, PathBuf::new()).await, load).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn meta_areas_on_stock_data_planes_serve_a_killed_engine_as_well() {
    let (Some((engine, load)), Some((target, spdk))) = (engine_and_load(), stock()) else { return };
    let _turn = TURN.lock().await;
    cost_the_dirty_regions(Cluster::start_mixed(vec![engine, target.clone(), target], spdk).await, load).await;
}

async fn cost_the_dirty_regions(cluster: Cluster, load: PathBuf) {
    start_log();
    let opened = cluster.open(0).await;
    assert!(is_healthy(&opened), "{opened:#?}");
    let write = |area: [&'static str; 4], amount: [&'static str; 2]| {
        [&["--rw", "randwrite", "--phase", "write"][..], &area, &amount].concat()
    };
    // What is idle gets clean again.
    cluster.run_load(&load, "cold", &write(COLD, ["--size", "16M"])).await;
    cluster.nodes[0].wait_mirror("clean", |mirror| mirror["live_regions"] == 0).await;
    for number in 0..NODES {
        let (superblock, bits) = cluster.nodes[number].meta(number);
        assert_eq!((superblock.volume.as_str(), superblock.replica.as_str()), ("v", replica(number).as_str()));
        assert!(superblock.record.epoch.0 == 1 && superblock.record.in_sync.len() == NODES, "{superblock:?}");
        assert!(bits.is_empty(), "replica {number}: {} regions are set", bits.count());
    }

    let mut running = cluster.load(&load, "hot", &write(HOT, ["--time", "1h"])).spawn().unwrap();
    cluster.nodes[0].wait_mirror("hot", |mirror| mirror["live_regions"] == HOT_REGIONS).await;
    cost_no_meta_writes_while_hot(&cluster).await;

    // The engine dies under load, and with it the process of one of the replicas.
    cluster.nodes[0].kill_data_plane();
    let mut dirty = RegionBits::empty(u32::try_from(SIZE / REGION).unwrap());
    (0..NODES).for_each(|number| dirty.union_with(&cluster.nodes[number].meta(number).1));
    assert!((1..=HOT_REGIONS).contains(&u64::from(dirty.count())), "{} regions are set", dirty.count());
    let again = cluster.nodes[0].wait_engine("open again", |e| e.epoch == 2 && e.state() == pb::State::Running).await;
    assert!(is_healthy(&again), "nobody may leave: {again:#?}");
    assert_eq!(again.config_number, opened.config_number);
    let equal = cluster.nodes[0].wait_mirror("equal", |mirror| mirror["inherited_regions"] == 0).await;
    let copied = equal["copied_blocks"].as_u64().unwrap() * 4096;
    let most = u64::from(dirty.count()) * REGION * (NODES as u64 - 1);
    assert!((1..=most).contains(&copied), "{copied} bytes were copied for {} dirty regions", dirty.count());
    // The host goes on by itself.
    wait_for_writes(&cluster, 100).await;
    running.kill().await.unwrap();

    // The next host has the name of the one that was killed, whose writes may still be on their way.
    let check = |area: [&'static str; 4]| [&["--phase", "check", "--written-only"][..], &area].concat();
    cluster.run_load(&load, "cold", &check(COLD)).await;
    cluster.run_load(&load, "hot", &check(HOT)).await;
    cluster.close(0).await;
    cluster.assert_equal_images();
    cluster.finish().await;
}

/// Many writes to regions that are live already: no bit is written for them.
async fn cost_no_meta_writes_while_hot(cluster: &Cluster) {
    let before = meta_writes(cluster).await;
    wait_for_writes(cluster, 500).await;
    assert_eq!(meta_writes(cluster).await, before);
    assert!(before.iter().all(|count| *count > 0), "{before:?}");
}

/// Waits until a replica has taken so many writes more.
async fn wait_for_writes(cluster: &Cluster, count: u64) {
    let (node, lvol) = (&cluster.nodes[1], replica(1));
    let begin = node.writes_to(&lvol).await;
    let end = tokio::time::Instant::now() + Duration::from_secs(60);
    while node.writes_to(&lvol).await < begin + count {
        assert!(tokio::time::Instant::now() < end, "the load does not write");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Meta writes so far, by the mirror and by what each replica's meta lvol has taken.
async fn meta_writes(cluster: &Cluster) -> Vec<u64> {
    let mirror = cluster.nodes[0].wait_mirror("open", |mirror| mirror["state"] == "open").await;
    let mut counts = vec![mirror["meta_writes"].as_u64().unwrap()];
    for number in 0..NODES {
        counts.push(cluster.nodes[number].writes_to(&format!("{}-meta", replica(number))).await);
    }
    counts
}
