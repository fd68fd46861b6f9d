//! A replica node on real processes: the agent drives a stock `spdk_tgt`, and `addax-engine`, and SPDK's own initiator
//! sees who is let in. `SPDK_DIR` names a built SPDK tree, `ADDAX_ENGINE` the engine's program. Without them these tests
//! say so and do nothing.
#![allow(clippy::unwrap_used)]

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use addax_agent::arbiter::MemoryArbiter;
use addax_agent::{Agent, AgentConfig, DataPlaneConfig, stop_data_plane};
use addax_api::nqn::{engine_host_nqn, replica_nqn};
use addax_proto::engine_v1 as pb;
use tokio_util::sync::CancellationToken;
use tonic::Code;
use tonic::transport::Channel;

fn spdk_dir() -> Option<PathBuf> {
    let dir = std::env::var_os("SPDK_DIR").map(PathBuf::from).filter(|dir| dir.join("build/bin/spdk_tgt").exists());
    if dir.is_none() {
        // Past the capture of the test harness, so that it is seen.
        let _ = std::io::Write::write_fmt(
            &mut std::io::stderr(),
            format_args!("SKIPPED: SPDK_DIR does not name a built SPDK tree; no real replica node was tested\n"),
        );
    }
    dir
}

fn addax_engine() -> Option<PathBuf> {
    let program = std::env::var_os("ADDAX_ENGINE").map(PathBuf::from).filter(|program| program.exists());
    if program.is_none() {
        // Past the capture of the test harness, so that it is seen.
        let _ = std::io::Write::write_fmt(
            &mut std::io::stderr(),
            format_args!(
                "SKIPPED: ADDAX_ENGINE does not name a program; addax-engine was not tested as a replica node\n"
            ),
        );
    }
    program
}

fn free_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

struct Node {
    dir: tempfile::TempDir,
    spdk: PathBuf,
    program: PathBuf,
    address: SocketAddr,
    shutdown: CancellationToken,
    disks: pb::disks_client::DisksClient<Channel>,
    replicas: pb::replicas_client::ReplicasClient<Channel>,
    events: pb::events_client::EventsClient<Channel>,
}

impl Node {
    async fn start(spdk: PathBuf, program: PathBuf) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let address: SocketAddr = format!("127.0.0.1:{}", free_port()).parse().unwrap();
        let (shutdown, channel) = run_agent(dir.path(), &program, address).await;
        Self {
            dir,
            spdk,
            program,
            address,
            shutdown,
            disks: pb::disks_client::DisksClient::new(channel.clone()),
            replicas: pb::replicas_client::ReplicasClient::new(channel.clone()),
            events: pb::events_client::EventsClient::new(channel),
        }
    }

    fn disk(&self, create: bool) -> pb::PutDiskRequest {
        pb::PutDiskRequest {
            name: "d".to_owned(),
            kind: pb::DiskKind::File.into(),
            path: self.dir.path().join("disk").display().to_string(),
            size_bytes: 256 << 20,
            create,
            ..pb::PutDiskRequest::default()
        }
    }

    /// Declares the disk and waits until it is ready, or away for a reason.
    async fn put_disk(&mut self, create: bool, reason: &str) -> pb::Disk {
        let wish = self.disk(create);
        self.put(wish, reason).await
    }

    async fn put(&mut self, wish: pb::PutDiskRequest, reason: &str) -> pb::Disk {
        self.disks.put_disk(wish).await.unwrap();
        let wait = async {
            loop {
                let list = self.disks.list_disks(pb::ListDisksRequest {}).await.unwrap().into_inner();
                match list.disks.into_iter().find(|disk| disk.reason == reason) {
                    Some(disk) => return disk,
                    None => tokio::time::sleep(Duration::from_millis(50)).await,
                }
            }
        };
        tokio::time::timeout(Duration::from_secs(60), wait).await.unwrap_or_else(|_| panic!("never {reason:?}"))
    }

    async fn info(&mut self, what: &str, holds: impl Fn(&pb::Info) -> bool) -> pb::Info {
        let mut stream = self.events.watch(pb::WatchRequest {}).await.unwrap().into_inner();
        let wait = async {
            while let Some(event) = stream.message().await.unwrap() {
                match event.object {
                    Some(pb::event::Object::Info(info)) if holds(&info) => return info,
                    _ => {}
                }
            }
            panic!("the stream ended before: {what}");
        };
        tokio::time::timeout(Duration::from_secs(90), wait).await.unwrap_or_else(|_| panic!("never: {what}"))
    }

    async fn running(&mut self) -> pb::Replica {
        let wait = async {
            loop {
                let list = self.replicas.list_replicas(pb::ListReplicasRequest {}).await.unwrap().into_inner();
                match list.replicas.into_iter().find(|replica| replica.state() == pb::State::Running) {
                    Some(replica) => return replica,
                    None => tokio::time::sleep(Duration::from_millis(50)).await,
                }
            }
        };
        tokio::time::timeout(Duration::from_secs(60), wait).await.unwrap()
    }

    async fn promote(&mut self, epoch: u64, instance: &str) -> Result<pb::Replica, tonic::Status> {
        let request = pb::PromoteReplicaRequest {
            name: "v-r-1".to_owned(),
            volume: "v".to_owned(),
            epoch,
            engine_instance: instance.to_owned(),
            lineage: "l".to_owned(),
            expected_instance: None,
        };
        self.replicas.promote_replica(request).await.map(tonic::Response::into_inner)
    }

    /// Whether SPDK's own initiator is let in under a host name.
    async fn is_let_in(&self, epoch: u64, instance: &str) -> bool {
        let transport = format!(
            "trtype:TCP adrfam:IPv4 traddr:{} trsvcid:{} subnqn:{} hostnqn:{}",
            self.address.ip(),
            self.address.port(),
            replica_nqn("v-r-1"),
            engine_host_nqn("v", epoch, instance)
        );
        let mut command = tokio::process::Command::new(self.spdk.join("build/bin/spdk_nvme_perf"));
        command.args(["-r", &transport, "-q", "1", "-o", "4096", "-w", "write", "-t", "1", "-c", "0x1"]);
        command.args(["--no-huge", "-s", "256"]).kill_on_drop(true);
        let output = tokio::time::timeout(Duration::from_secs(60), command.output()).await.unwrap().unwrap();
        // Its exit status is 0 either way.
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(text.contains("Initializing NVMe Controllers"), "the initiator did not run: {text}");
        text.contains("Attached to") && text.contains("Total")
    }
}

impl Drop for Node {
    /// Also a test that fails leaves no process behind.
    fn drop(&mut self) {
        // The agent first, or it would start another one.
        self.shutdown.cancel();
        std::thread::sleep(Duration::from_millis(100));
        if let Some(pid) = pid(self.dir.path()) {
            let _ = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL);
        }
    }
}

fn pid(dir: &Path) -> Option<nix::unistd::Pid> {
    let text = std::fs::read(dir.join("run/data-plane.pid")).ok()?;
    let file: serde_json::Value = serde_json::from_slice(&text).ok()?;
    Some(nix::unistd::Pid::from_raw(i32::try_from(file["pid"].as_i64()?).ok()?))
}

async fn run_agent(dir: &Path, program: &Path, address: SocketAddr) -> (CancellationToken, Channel) {
    let is_stock = program.ends_with("spdk_tgt");
    let config = AgentConfig {
        node: "n1".to_owned(),
        listen: "127.0.0.1:0".parse().unwrap(),
        data_plane: DataPlaneConfig {
            program: Some(program.to_owned()),
            address,
            rpc_socket: dir.join("rpc.sock"),
            cores: "0x1".to_owned(),
            // Its iSCSI pools do not fit into less.
            memory_mib: 1024,
            hugepages: false,
            // Other tests run spdk_tgt on the same core; addax-engine takes no locks on cores.
            extra_args: if is_stock { vec!["--disable-cpumask-locks".to_owned()] } else { Vec::new() },
        },
        runtime_dir: dir.join("run"),
        tls: None,
    };
    let shutdown = CancellationToken::new();
    let agent = Agent::start(config, Arc::new(MemoryArbiter::default()), &shutdown).await.unwrap();
    let channel = Channel::from_shared(format!("http://{}", agent.address().unwrap())).unwrap().connect_lazy();
    tokio::spawn(agent.serve(shutdown.clone()));
    (shutdown, channel)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stock_spdk_tgt_is_a_full_replica_node() {
    let Some(spdk) = spdk_dir() else { return };
    let program = spdk.join("build/bin/spdk_tgt");
    let mut node = Node::start(spdk, program).await;
    let info = node.info("up", |info| !info.data_plane_instance.is_empty()).await;
    assert!(info.data_plane.starts_with("SPDK") && !info.has_mirror, "{info:?}");
    check_replica_rules(&mut node, &info).await;

    finish(node).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn addax_engine_is_a_replica_node_by_the_same_rules() {
    let (Some(spdk), Some(program)) = (spdk_dir(), addax_engine()) else { return };
    let mut node = Node::start(spdk, program).await;
    let info = node.info("up", |info| !info.data_plane_instance.is_empty()).await;
    assert!(info.data_plane.starts_with("addax-engine") && info.has_mirror, "{info:?}");
    check_replica_rules(&mut node, &info).await;
    finish(node).await;
}

async fn check_replica_rules(node: &mut Node, info: &pb::Info) {
    let disk = node.put_disk(true, "").await;
    assert!(disk.size_bytes > 200 << 20 && disk.cluster_bytes == 1 << 20, "{disk:?}");
    let request = pb::StartReplicaRequest {
        name: "v-r-1".to_owned(),
        volume: "v".to_owned(),
        disk: "d".to_owned(),
        size_bytes: 64 << 20,
        create: true,
    };
    let replica = node.replicas.start_replica(request).await.unwrap().into_inner();
    assert!(replica.state() == pb::State::Running && replica.fresh, "{replica:?}");
    assert!(!node.is_let_in(1, "e1").await, "let in without a promote");

    node.promote(1, "e1").await.unwrap();
    assert!(node.is_let_in(1, "e1").await, "not let in after its promote");
    node.promote(2, "e2").await.unwrap();
    assert!(!node.is_let_in(1, "e1").await, "an older engine is let in");
    assert!(node.is_let_in(2, "e2").await);
    assert_eq!(node.promote(1, "e1").await.unwrap_err().code(), Code::Aborted);
    assert_eq!(node.promote(2, "other").await.unwrap_err().code(), Code::Aborted);

    // kill -9: back by itself, with nobody on the allow-list.
    let pid = pid(node.dir.path()).unwrap();
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL).unwrap();
    let first = info.data_plane_instance.clone();
    let second = node.info("restarted", |i| !i.data_plane_instance.is_empty() && i.data_plane_instance != first).await;
    assert_eq!(second.data_plane_restarts, 1);
    node.running().await;
    assert!(!node.is_let_in(2, "e2").await, "let in after a restart without a promote");
    node.promote(2, "e2").await.unwrap();
    assert!(node.is_let_in(2, "e2").await);

    // A new agent adopts the process and keeps what it had promoted.
    node.shutdown.cancel();
    let (shutdown, channel) = run_agent(node.dir.path(), &node.program, node.address).await;
    node.shutdown = shutdown;
    node.disks = pb::disks_client::DisksClient::new(channel.clone());
    node.replicas = pb::replicas_client::ReplicasClient::new(channel.clone());
    node.events = pb::events_client::EventsClient::new(channel);
    let adopted = node.info("adopted", |info| !info.data_plane_instance.is_empty()).await;
    assert_eq!(adopted.data_plane_instance, second.data_plane_instance);
    assert_eq!(node.running().await.promoted_epoch, 2);
    assert!(node.is_let_in(2, "e2").await);
}

async fn finish(mut node: Node) {
    let remove = pb::RemoveDiskRequest { name: "d".to_owned() };
    let held = node.disks.remove_disk(remove.clone()).await.unwrap_err();
    assert!(held.code() == Code::FailedPrecondition && held.message().contains("v-r-1"), "{held}");
    let request = pb::DeleteReplicaRequest { name: "v-r-1".to_owned(), disk: "d".to_owned(), record: None };
    node.replicas.delete_replica(request).await.unwrap();
    assert_eq!(std::fs::read_dir(node.dir.path().join("run/replicas")).unwrap().count(), 0);
    let uuid = node.put_disk(true, "").await.uuid;
    node.disks.remove_disk(remove.clone()).await.unwrap();
    // Its lvstore stays: not formatted again, but imported.
    assert!(node.put_disk(true, "NotEmpty").await.message.contains(&uuid));
    assert_eq!(node.put_disk(false, "Found").await.uuid, uuid);
    let named = pb::PutDiskRequest { uuid: uuid.clone(), ..node.disk(false) };
    assert_eq!(node.put(named, "").await.uuid, uuid);
    node.disks.remove_disk(remove).await.unwrap();
    node.shutdown.cancel();
    assert!(stop_data_plane(&node.dir.path().join("run"), Duration::from_secs(20)).await);
    std::fs::remove_file(node.dir.path().join("run/data-plane.pid")).unwrap();
}
