//! An agent that a test can look into: replicas and engines as plain state, the record changed as an arbiter would.

use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard};

use addax_api::{NAMESPACE, Volume, VolumeConfig, nqn};
use addax_manager::TlsFiles;
use addax_proto::engine_v1 as pb;
use futures::{Stream, StreamExt};
use kube::api::{Patch, PatchParams};
use kube::{Api, Client};
use pb::disks_server::{Disks, DisksServer};
use pb::engines_server::{Engines, EnginesServer};
use pb::events_server::{Events, EventsServer};
use pb::replicas_server::{Replicas, ReplicasServer};
use serde_json::json;
use tokio::net::TcpListener;
use tokio::sync::broadcast;
use tokio_stream::wrappers::{BroadcastStream, TcpListenerStream};
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

const GIB: u64 = 1 << 30;

/// A node's agent.
#[derive(Clone)]
pub struct FakeAgent {
    shared: Arc<Shared>,
    pub address: SocketAddr,
    stop: CancellationToken,
}

struct Shared {
    node: String,
    volumes: Api<Volume>,
    state: Mutex<State>,
    events: broadcast::Sender<pb::Event>,
}

#[derive(Default)]
struct State {
    disks: BTreeMap<String, pb::Disk>,
    replicas: BTreeMap<String, pb::Replica>,
    engines: BTreeMap<String, pb::Engine>,
    /// Data on the disk: name of the replica and whether it is fresh.
    data: BTreeMap<String, bool>,
    calls: Vec<String>,
    refusals: VecDeque<Status>,
}

impl FakeAgent {
    /// An agent of the node on a free port.
    pub async fn start(node: &str, client: Client, tls: Option<&TlsFiles>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (events, _) = broadcast::channel(1024);
        let shared = Shared {
            node: node.to_owned(),
            volumes: Api::namespaced(client, NAMESPACE),
            state: Mutex::default(),
            events,
        };
        let agent = Self { shared: Arc::new(shared), address, stop: CancellationToken::new() };
        let mut server = tonic::transport::Server::builder();
        if let Some(tls) = tls {
            server = server.tls_config(super::pki::server(tls)).unwrap();
        }
        let server = server
            .add_service(DisksServer::new(agent.clone()))
            .add_service(ReplicasServer::new(agent.clone()))
            .add_service(EnginesServer::new(agent.clone()))
            .add_service(EventsServer::new(agent.clone()))
            .serve_with_incoming_shutdown(TcpListenerStream::new(listener), agent.stop.clone().cancelled_owned());
        tokio::spawn(server);
        agent
    }

    /// The names of the calls so far, with what they were about.
    pub fn calls(&self) -> Vec<String> {
        self.state().calls.clone()
    }

    /// Replicas with data on the disk.
    pub fn data(&self) -> Vec<String> {
        self.state().data.keys().cloned().collect()
    }

    /// Volumes whose engines run here.
    pub fn engines(&self) -> Vec<String> {
        self.state().engines.keys().cloned().collect()
    }

    /// The next calls are refused.
    pub fn refuse(&self, refusals: impl IntoIterator<Item = Status>) {
        self.state().refusals.extend(refusals);
    }

    /// Refusals that nobody has met are taken back.
    pub fn refuse_nothing(&self) {
        self.state().refusals.clear();
    }

    /// The machine is switched off and on: nothing runs any more, the data stays.
    pub fn reset(&self) {
        let mut state = self.state();
        let (replicas, engines) = (std::mem::take(&mut state.replicas), std::mem::take(&mut state.engines));
        drop(state);
        replicas.into_keys().for_each(|name| self.tell(pb::event::Object::ReplicaGone(name)));
        engines.into_keys().for_each(|volume| self.tell(pb::event::Object::EngineGone(volume)));
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.shared.state.lock().unwrap()
    }

    fn tell(&self, object: pb::event::Object) {
        // Nobody may be listening.
        let _ = self.shared.events.send(pb::Event { object: Some(object) });
    }

    fn begin(&self, call: String) -> Result<(), Status> {
        let mut state = self.state();
        state.calls.push(call);
        state.refusals.pop_front().map_or(Ok(()), Err)
    }

    fn address_of(&self, nqn: String) -> Option<pb::Address> {
        Some(pb::Address { traddr: "127.0.0.1".to_owned(), trsvcid: 4420, nqn })
    }

    fn put_engine(&self, engine: pb::Engine) -> Response<pb::Engine> {
        self.state().engines.insert(engine.volume.clone(), engine.clone());
        self.tell(pb::event::Object::Engine(engine.clone()));
        Response::new(engine)
    }

    /// Changes the record as an arbiter does: by its version.
    async fn swap(&self, volume: &str, change: impl Fn(&mut VolumeConfig)) -> Result<VolumeConfig, Status> {
        loop {
            let object = self.shared.volumes.get(volume).await.map_err(|error| Status::internal(error.to_string()))?;
            let mut config = object.status.unwrap().config.ok_or_else(|| Status::failed_precondition("no record"))?;
            change(&mut config);
            let patch = json!({
                "metadata": {"resourceVersion": object.metadata.resource_version},
                "status": {"config": config},
            });
            let params = PatchParams::default();
            match self.shared.volumes.patch_status(volume, &params, &Patch::Merge(&patch)).await {
                Ok(_) => return Ok(config),
                Err(kube::Error::Api(status)) if status.code == 409 || status.code >= 500 => {}
                Err(error) => return Err(Status::internal(error.to_string())),
            }
        }
    }

    fn disk(&self, wish: pb::PutDiskRequest) -> pb::Disk {
        pb::Disk {
            name: wish.name.clone(),
            wish: Some(wish),
            uuid: format!("disk-of-{}", self.shared.node),
            size_bytes: 100 * GIB,
            available_bytes: 90 * GIB,
            cluster_bytes: 1 << 20,
            block_bytes: 4096,
            ..pb::Disk::default()
        }
    }
}

#[tonic::async_trait]
impl Disks for FakeAgent {
    async fn list_disks(&self, _: Request<pb::ListDisksRequest>) -> Result<Response<pb::ListDisksResponse>, Status> {
        Err(Status::unimplemented("not asked for here"))
    }

    async fn put_disk(&self, request: Request<pb::PutDiskRequest>) -> Result<Response<pb::Disk>, Status> {
        let disk = self.disk(request.into_inner());
        self.state().disks.insert(disk.name.clone(), disk.clone());
        self.tell(pb::event::Object::Disk(disk.clone()));
        Ok(Response::new(disk))
    }

    async fn remove_disk(
        &self,
        request: Request<pb::RemoveDiskRequest>,
    ) -> Result<Response<pb::RemoveDiskResponse>, Status> {
        let name = request.into_inner().name;
        self.state().disks.remove(&name);
        self.tell(pb::event::Object::DiskGone(name));
        Ok(Response::new(pb::RemoveDiskResponse {}))
    }
}

#[tonic::async_trait]
impl Events for FakeAgent {
    type WatchStream = Pin<Box<dyn Stream<Item = Result<pb::Event, Status>> + Send>>;

    async fn watch(&self, _: Request<pb::WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        use pb::event::Object;
        let state = self.state();
        let changes = BroadcastStream::new(self.shared.events.subscribe());
        let info = pb::Info {
            node: self.shared.node.clone(),
            data_plane: "fake 1.0".to_owned(),
            data_plane_instance: "plane-1".to_owned(),
            has_mirror: true,
            ..pb::Info::default()
        };
        let mut first = vec![Object::Info(info)];
        first.extend(state.disks.values().cloned().map(Object::Disk));
        first.extend(state.replicas.values().cloned().map(Object::Replica));
        first.extend(state.engines.values().cloned().map(Object::Engine));
        first.push(Object::Synced(true));
        drop(state);
        let first = futures::stream::iter(first.into_iter().map(|object| Ok(pb::Event { object: Some(object) })));
        let changes = changes.map(|event| event.map_err(|_| Status::data_loss("a reader that is too slow")));
        let changes = changes.take_until(self.stop.clone().cancelled_owned());
        Ok(Response::new(Box::pin(first.chain(changes))))
    }

    async fn get_info(&self, _: Request<pb::GetInfoRequest>) -> Result<Response<pb::Info>, Status> {
        Err(Status::unimplemented("not asked for here"))
    }
}

#[tonic::async_trait]
impl Replicas for FakeAgent {
    async fn start_replica(&self, request: Request<pb::StartReplicaRequest>) -> Result<Response<pb::Replica>, Status> {
        let request = request.into_inner();
        self.begin(format!("StartReplica {}", request.name))?;
        let mut state = self.state();
        if !request.create && !state.data.contains_key(&request.name) {
            return Err(Status::not_found("the replica has no data here"));
        }
        let fresh = *state.data.entry(request.name.clone()).or_insert(true);
        let replica = pb::Replica {
            address: self.address_of(nqn::replica_nqn(&request.name)),
            name: request.name,
            volume: request.volume,
            disk: request.disk,
            size_bytes: request.size_bytes,
            state: pb::State::Running.into(),
            fresh,
            data_plane_instance: "plane-1".to_owned(),
            ..pb::Replica::default()
        };
        state.replicas.insert(replica.name.clone(), replica.clone());
        drop(state);
        self.tell(pb::event::Object::Replica(replica.clone()));
        Ok(Response::new(replica))
    }

    async fn stop_replica(
        &self,
        request: Request<pb::StopReplicaRequest>,
    ) -> Result<Response<pb::StopReplicaResponse>, Status> {
        let name = request.into_inner().name;
        self.begin(format!("StopReplica {name}"))?;
        self.state().replicas.remove(&name);
        self.tell(pb::event::Object::ReplicaGone(name));
        Ok(Response::new(pb::StopReplicaResponse {}))
    }

    async fn delete_replica(
        &self,
        request: Request<pb::DeleteReplicaRequest>,
    ) -> Result<Response<pb::DeleteReplicaResponse>, Status> {
        let name = request.into_inner().name;
        self.begin(format!("DeleteReplica {name}"))?;
        let mut state = self.state();
        state.replicas.remove(&name);
        state.data.remove(&name);
        drop(state);
        self.tell(pb::event::Object::ReplicaGone(name));
        Ok(Response::new(pb::DeleteReplicaResponse {}))
    }

    async fn list_replicas(
        &self,
        _: Request<pb::ListReplicasRequest>,
    ) -> Result<Response<pb::ListReplicasResponse>, Status> {
        Err(Status::unimplemented("not asked for here"))
    }

    async fn promote_replica(&self, _: Request<pb::PromoteReplicaRequest>) -> Result<Response<pb::Replica>, Status> {
        Err(Status::unimplemented("not asked for here"))
    }
}

#[tonic::async_trait]
impl Engines for FakeAgent {
    async fn start_engine(&self, request: Request<pb::StartEngineRequest>) -> Result<Response<pb::Engine>, Status> {
        let request = request.into_inner();
        self.begin(format!("StartEngine {}", request.volume))?;
        if let Some(engine) = self.state().engines.get(&request.volume) {
            return Ok(Response::new(engine.clone()));
        }
        let node = self.shared.node.clone();
        let config = self
            .swap(&request.volume, |config| {
                config.epoch += 1;
                config.engine_instance = format!("{node}-{}", config.epoch);
                config.clean = false;
            })
            .await?;
        let replicas = config.in_sync.iter().map(|replica| pb::ReplicaMode {
            replica: replica.clone(),
            mode: pb::Mode::InSync.into(),
            ..pb::ReplicaMode::default()
        });
        let engine = pb::Engine {
            address: self.address_of(nqn::volume_nqn(&request.volume)),
            volume: request.volume,
            state: pb::State::Running.into(),
            epoch: config.epoch,
            engine_instance: config.engine_instance.clone(),
            replicas: replicas.collect(),
            allowed_hosts: request.allowed_hosts,
            ..pb::Engine::default()
        };
        Ok(self.put_engine(engine))
    }

    async fn stop_engine(&self, request: Request<pb::StopEngineRequest>) -> Result<Response<pb::Engine>, Status> {
        let volume = request.into_inner().volume;
        self.begin(format!("StopEngine {volume}"))?;
        let Some(mut engine) = self.state().engines.get(&volume).cloned() else {
            return Ok(Response::new(pb::Engine { volume, state: pb::State::Stopped.into(), ..pb::Engine::default() }));
        };
        let epoch = engine.epoch;
        self.swap(&volume, |config| config.clean |= config.epoch == epoch).await?;
        self.state().engines.remove(&volume);
        self.tell(pb::event::Object::EngineGone(volume));
        engine.state = pb::State::Stopped.into();
        Ok(Response::new(engine))
    }

    async fn set_allowed_hosts(
        &self,
        request: Request<pb::SetAllowedHostsRequest>,
    ) -> Result<Response<pb::Engine>, Status> {
        let request = request.into_inner();
        self.begin(format!("SetAllowedHosts {}", request.volume))?;
        let engine = self.state().engines.get(&request.volume).cloned();
        let mut engine = engine.ok_or_else(|| Status::not_found("no such engine"))?;
        engine.allowed_hosts = request.allowed_hosts;
        Ok(self.put_engine(engine))
    }

    /// By force alone: whoever is named becomes the only one in sync, under a lineage named by the request.
    async fn recover_volume(
        &self,
        request: Request<pb::RecoverVolumeRequest>,
    ) -> Result<Response<pb::RecoverVolumeResponse>, Status> {
        let request = request.into_inner();
        self.begin(format!("RecoverVolume {} {}", request.volume, request.replica))?;
        let object = self.shared.volumes.get(&request.volume).await;
        let object = object.map_err(|error| Status::internal(error.to_string()))?;
        let mut config = object.status.unwrap().config.ok_or_else(|| Status::failed_precondition("no record"))?;
        let names = request.replicas.iter().map(|member| member.replica.clone());
        let others: Vec<String> = names.filter(|name| *name != request.replica).collect();
        config.lineage = request.id.clone();
        config.config_number += 1;
        config.in_sync = vec![request.replica.clone()];
        let now = jiff::Timestamp::now();
        let account = json!({"id": request.id, "action": "forceOpen", "outcome": "done", "message": "forced",
            "requestedBy": request.requested_by, "at": now, "discarded": others});
        let aside: Vec<_> = others.iter().map(|name| json!({"replica": name, "at": now, "by": request.id})).collect();
        let patch = json!({
            "metadata": {"resourceVersion": object.metadata.resource_version},
            "status": {"config": config, "recoveries": [account], "discarded": aside},
        });
        let params = PatchParams::default();
        let patched = self.shared.volumes.patch_status(&request.volume, &params, &Patch::Merge(&patch)).await;
        patched.map_err(|error| Status::aborted(error.to_string()))?;
        Ok(Response::new(pb::RecoverVolumeResponse { message: "forced".to_owned() }))
    }

    async fn add_replica(&self, _: Request<pb::AddReplicaRequest>) -> Result<Response<pb::Engine>, Status> {
        Err(Status::unimplemented("not asked for here"))
    }

    async fn remove_replica(&self, _: Request<pb::RemoveReplicaRequest>) -> Result<Response<pb::Engine>, Status> {
        Err(Status::unimplemented("not asked for here"))
    }

    async fn get_engine(&self, _: Request<pb::GetEngineRequest>) -> Result<Response<pb::Engine>, Status> {
        Err(Status::unimplemented("not asked for here"))
    }

    async fn list_engines(
        &self,
        _: Request<pb::ListEnginesRequest>,
    ) -> Result<Response<pb::ListEnginesResponse>, Status> {
        Err(Status::unimplemented("not asked for here"))
    }
}
