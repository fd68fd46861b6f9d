//! The agent's gRPC as callers see it: mutual TLS, codes, the watch stream, health. There is no data plane here: its
//! program does not exist, so a disk that is asked for stays wanted.
#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use addax_agent::arbiter::MemoryArbiter;
use addax_agent::tls::TlsFiles;
use addax_agent::{Agent, AgentConfig, DataPlaneConfig};
use addax_proto::engine_v1 as pb;
use pb::event::Object;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use tokio_util::sync::CancellationToken;
use tonic::Code;
use tonic::transport::{Channel, ClientTlsConfig, Endpoint};
use tonic_health::pb::health_client::HealthClient;

/// An authority and a node's certificate, as files.
fn certificates(dir: &Path) -> TlsFiles {
    std::fs::create_dir_all(dir).unwrap();
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
    let key = KeyPair::generate().unwrap();
    let params = CertificateParams::new(vec!["addax-agent".to_owned(), "127.0.0.1".to_owned()]).unwrap();
    let cert = params.signed_by(&key, &authority).unwrap();
    let write = |name: &str, text: String| -> PathBuf {
        let path = dir.join(name);
        std::fs::write(&path, text).unwrap();
        path
    };
    TlsFiles {
        ca: write("ca.pem", authority.pem()),
        cert: write("cert.pem", cert.pem()),
        key: write("key.pem", key.serialize_pem()),
        server_name: None,
    }
}

struct Running {
    _dir: tempfile::TempDir,
    address: String,
    tls: TlsFiles,
    shutdown: CancellationToken,
    served: tokio::task::JoinHandle<Result<(), addax_agent::RunError>>,
}

async fn run() -> Running {
    let dir = tempfile::tempdir().unwrap();
    let tls = certificates(&dir.path().join("tls"));
    let config = AgentConfig {
        node: "n1".to_owned(),
        listen: "127.0.0.1:0".parse().unwrap(),
        data_plane: DataPlaneConfig {
            program: Some("/no/such/engine".into()),
            address: "127.0.0.1:4420".parse().unwrap(),
            rpc_socket: dir.path().join("rpc.sock"),
            cores: "0x1".to_owned(),
            memory_mib: 64,
            hugepages: false,
            extra_args: Vec::new(),
        },
        runtime_dir: dir.path().join("run"),
        tls: Some(tls.clone()),
    };
    let shutdown = CancellationToken::new();
    let agent = Agent::start(config, Arc::new(MemoryArbiter::default()), &shutdown).await.unwrap();
    let address = agent.address().unwrap().to_string();
    let served = tokio::spawn(agent.serve(shutdown.clone()));
    Running { _dir: dir, address, tls, shutdown, served }
}

impl Running {
    async fn connect(&self, tls: ClientTlsConfig) -> Result<Channel, tonic::transport::Error> {
        Endpoint::from_shared(format!("https://{}", self.address))?.tls_config(tls)?.connect().await
    }

    async fn channel(&self) -> Channel {
        self.connect(self.tls.client().unwrap()).await.unwrap()
    }
}

fn disk() -> pb::PutDiskRequest {
    pb::PutDiskRequest {
        name: "d".to_owned(),
        kind: pb::DiskKind::File.into(),
        path: "/no/such/folder/disk".to_owned(),
        size_bytes: 1 << 30,
        create: true,
        ..pb::PutDiskRequest::default()
    }
}

fn replica(create: bool) -> pb::StartReplicaRequest {
    pb::StartReplicaRequest {
        name: "v-r-1".to_owned(),
        volume: "v".to_owned(),
        disk: "d".to_owned(),
        size_bytes: 1 << 20,
        create,
    }
}

async fn is_refused(channel: Result<Channel, tonic::transport::Error>) -> bool {
    // The server refuses a client's certificate after the client has finished its part of the handshake.
    match channel {
        Err(_) => true,
        Ok(channel) => pb::disks_client::DisksClient::new(channel).list_disks(pb::ListDisksRequest {}).await.is_err(),
    }
}

#[tokio::test]
async fn only_holders_of_a_certificate_of_the_authority_get_in() {
    let running = run().await;
    let mut disks = pb::disks_client::DisksClient::new(running.channel().await);
    disks.put_disk(disk()).await.unwrap();
    let listed = disks.list_disks(pb::ListDisksRequest {}).await.unwrap().into_inner().disks;
    assert!(listed.len() == 1 && listed[0].wish == Some(disk()) && listed[0].uuid.is_empty(), "{listed:?}");

    let ca = tonic::transport::Certificate::from_pem(std::fs::read(&running.tls.ca).unwrap());
    let anonymous = ClientTlsConfig::new().ca_certificate(ca.clone());
    assert!(is_refused(running.connect(anonymous).await).await, "let in without a certificate");

    let dir = tempfile::tempdir().unwrap();
    let stranger = certificates(dir.path());
    let mixed = TlsFiles { ca: running.tls.ca.clone(), ..stranger.clone() };
    assert!(is_refused(running.connect(mixed.client().unwrap()).await).await, "let in by another authority");
    assert!(is_refused(running.connect(stranger.client().unwrap()).await).await, "trusted a strange server");
    let plain = Endpoint::from_shared(format!("http://{}", running.address)).unwrap().connect().await;
    assert!(is_refused(plain).await, "let in without TLS");
    let named = TlsFiles { server_name: Some("somebody".to_owned()), ..running.tls.clone() };
    assert!(is_refused(running.connect(named.client().unwrap()).await).await, "took a server of another name");

    running.shutdown.cancel();
    running.served.await.unwrap().unwrap();
}

#[tokio::test]
async fn watchers_see_what_is_there_and_then_what_changes() {
    let running = run().await;
    let channel = running.channel().await;
    let mut disks = pb::disks_client::DisksClient::new(channel.clone());
    let mut events = pb::events_client::EventsClient::new(channel);
    disks.put_disk(disk()).await.unwrap();

    let mut stream = events.watch(pb::WatchRequest {}).await.unwrap().into_inner();
    let mut first = Vec::new();
    loop {
        match stream.message().await.unwrap().unwrap().object.unwrap() {
            Object::Synced(true) => break,
            object => first.push(object),
        }
    }
    assert!(first.iter().any(|object| matches!(object, Object::Info(info) if info.node == "n1")));
    assert!(first.iter().any(|object| matches!(object, Object::Disk(disk) if disk.name == "d")));

    disks.remove_disk(pb::RemoveDiskRequest { name: "d".to_owned() }).await.unwrap();
    let gone = async {
        while let Some(event) = stream.message().await.unwrap() {
            if event.object == Some(Object::DiskGone("d".to_owned())) {
                return;
            }
        }
        panic!("the stream ended");
    };
    tokio::time::timeout(Duration::from_secs(30), gone).await.unwrap();
    let info = events.get_info(pb::GetInfoRequest {}).await.unwrap().into_inner();
    assert!(info.data_plane_instance.is_empty() && !info.has_mirror);
    // The agent's end ends the stream.
    running.shutdown.cancel();
    running.served.await.unwrap().unwrap();
    while let Ok(Some(_)) = stream.message().await {}
}

#[tokio::test]
async fn errors_have_the_codes_of_the_interface() {
    let running = run().await;
    let channel = running.channel().await;
    let mut replicas = pb::replicas_client::ReplicasClient::new(channel.clone());
    let mut engines = pb::engines_client::EnginesClient::new(channel.clone());
    let mut disks = pb::disks_client::DisksClient::new(channel.clone());
    let code = |status: tonic::Status| status.code();
    assert_eq!(code(replicas.start_replica(replica(false)).await.unwrap_err()), Code::NotFound);
    let odd = pb::StartReplicaRequest { size_bytes: 4095, ..replica(true) };
    let status = replicas.start_replica(odd).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument);
    assert!(status.message().contains("size_bytes") && status.message().contains("4095"), "{status}");
    assert_eq!(code(replicas.start_replica(replica(true)).await.unwrap_err()), Code::NotFound);
    disks.put_disk(disk()).await.unwrap();
    let twice = pb::PutDiskRequest { name: "e".to_owned(), ..disk() };
    assert_eq!(code(disks.put_disk(twice).await.unwrap_err()), Code::AlreadyExists);
    // Its disk is not there without a data plane.
    let status = replicas.start_replica(replica(true)).await.unwrap_err();
    assert!(status.code() == Code::Unavailable && status.message().contains("data plane"), "{status}");
    let promote = pb::PromoteReplicaRequest {
        name: "v-r-1".to_owned(),
        volume: "v".to_owned(),
        epoch: 1,
        engine_instance: "e".to_owned(),
        lineage: "l".to_owned(),
        expected_instance: None,
    };
    assert_eq!(code(replicas.promote_replica(promote).await.unwrap_err()), Code::NotFound);
    let absent = pb::GetEngineRequest { volume: "v".to_owned() };
    assert_eq!(code(engines.get_engine(absent).await.unwrap_err()), Code::NotFound);
    let absent = pb::StopEngineRequest { volume: "v".to_owned() };
    assert_eq!(engines.stop_engine(absent).await.unwrap().into_inner().state(), pb::State::Stopped);

    let mut health = HealthClient::new(channel);
    let request = tonic_health::pb::HealthCheckRequest { service: "addax.engine.v1.Engines".to_owned() };
    let status = health.check(request).await.unwrap().into_inner().status();
    assert_eq!(status, tonic_health::pb::health_check_response::ServingStatus::NotServing);
    running.shutdown.cancel();
    running.served.await.unwrap().unwrap();
}
