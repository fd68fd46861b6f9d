//! The agent as a whole: its configuration, and how the parts are put together.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use addax_proto::engine_v1 as pb;
use pb::event::Object;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic::transport::Server;
use tonic::transport::server::TcpIncoming;

use crate::arbiter::{Arbiter, KubeArbiter};
use crate::disk::{DiskContext, Disks};
use crate::engine::{EngineContext, Engines, Peers};
use crate::error::{AgentError, blocking};
use crate::hub::{Hub, Key};
use crate::machine::Machine;
use crate::replica::{ReplicaContext, Replicas};
use crate::server::Services;
use crate::state::slots::SlotsError;
use crate::state::{DiskStore, EngineStore};
use crate::supervise::{self, PlaneStatus, Supervision};
use crate::tls::{TlsError, TlsFiles};

/// How long calls under way may take when the agent ends.
const DRAIN_DEADLINE: Duration = Duration::from_secs(5);

/// The option to wait for [`crate::rpc::Client::framework_start_init`].
const WAIT_FOR_RPC: &str = "--wait-for-rpc";

/// How the data plane is run.
#[derive(Clone, Debug)]
pub struct DataPlaneConfig {
    /// The program: `addax-engine`, or a stock `spdk_tgt`. `None`: somebody else runs it at [`Self::rpc_socket`].
    pub program: Option<PathBuf>,
    /// Where it listens for NVMe/TCP: IP address and port of this node.
    pub address: SocketAddr,
    /// Its JSON-RPC socket.
    pub rpc_socket: PathBuf,
    /// Core mask (`-m`), `0x1` for example.
    pub cores: String,
    /// Memory in MiB (`-s`).
    pub memory_mib: u32,
    /// Whether hugepages are used; otherwise `--no-huge`.
    pub hugepages: bool,
    /// More arguments.
    pub extra_args: Vec<String>,
}

impl DataPlaneConfig {
    /// The program's arguments.
    pub fn args(&self) -> Vec<String> {
        let socket = self.rpc_socket.display().to_string();
        let mut args: Vec<String> =
            ["-r", &socket, "-m", &self.cores, "-s", &self.memory_mib.to_string()].map(str::to_owned).to_vec();
        if !self.hugepages {
            args.push("--no-huge".to_owned());
        }
        // A stock one must be told options before it starts.
        if !self.extra_args.iter().any(|arg| arg == WAIT_FOR_RPC) {
            args.push(WAIT_FOR_RPC.to_owned());
        }
        args.extend(self.extra_args.iter().cloned());
        args
    }
}

/// What an agent is run with.
#[derive(Clone, Debug)]
pub struct AgentConfig {
    /// Name of the node.
    pub node: String,
    /// Where the gRPC server listens. Port 0 takes a free one; see [`Agent::address`].
    pub listen: SocketAddr,
    /// The data plane.
    pub data_plane: DataPlaneConfig,
    /// Folder for pid file, log, and what is known of disks, replicas and engines. It must survive restarts of the machine.
    pub runtime_dir: PathBuf,
    /// Certificates. `None` speaks plain gRPC: for tests.
    pub tls: Option<TlsFiles>,
}

/// Why an agent cannot run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RunError {
    /// The runtime folder cannot be used.
    #[error("runtime folder {path}: {source}")]
    RuntimeDir {
        /// The folder.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// What is known of disks and engines cannot be read.
    #[error("the agent's state cannot be read: {0}")]
    State(#[from] SlotsError),
    /// The address is taken or not of this machine.
    #[error("cannot listen at {address}: {source}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// Why.
        source: std::io::Error,
    },
    /// Certificates.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// The server ended.
    #[error("the gRPC server: {0}")]
    Server(#[from] tonic::transport::Error),
    /// Something else.
    #[error(transparent)]
    Agent(#[from] AgentError),
}

/// A started agent.
#[derive(Debug)]
pub struct Agent {
    config: AgentConfig,
    listener: TcpListener,
    services: Services,
    plane: watch::Receiver<PlaneStatus>,
    /// Ends everything but the server and the supervisor.
    shutdown: CancellationToken,
}

impl Agent {
    /// Runs an agent against a Kubernetes API until `shutdown`.
    ///
    /// # Errors
    /// See [`RunError`].
    pub async fn run(config: AgentConfig, client: kube::Client, shutdown: CancellationToken) -> Result<(), RunError> {
        Self::start(config, Arc::new(KubeArbiter::new(client)), &shutdown).await?.serve(shutdown).await
    }

    /// Starts all parts: the data plane, replicas, engines; and opens the listener. Calls are answered once
    /// [`Self::serve`] runs.
    ///
    /// # Errors
    /// See [`RunError`].
    pub async fn start(
        config: AgentConfig,
        arbiter: Arc<dyn Arbiter>,
        shutdown: &CancellationToken,
    ) -> Result<Self, RunError> {
        Self::start_on(Machine::this(), config, arbiter, shutdown).await
    }

    /// The same on a machine that is told.
    ///
    /// # Errors
    /// See [`RunError`].
    pub async fn start_on(
        machine: Machine,
        config: AgentConfig,
        arbiter: Arc<dyn Arbiter>,
        shutdown: &CancellationToken,
    ) -> Result<Self, RunError> {
        let runtime_dir = config.runtime_dir.clone();
        let unusable = |source| RunError::RuntimeDir { path: config.runtime_dir.clone(), source };
        let made = runtime_dir.clone();
        blocking(move || std::fs::create_dir_all(made)).await?.map_err(unusable)?;
        let open = move || Ok::<_, SlotsError>((DiskStore::open(&runtime_dir)?, EngineStore::open(&runtime_dir)?));
        let (disk_store, store) = blocking(open).await??;
        let listen = |source| RunError::Listen { address: config.listen, source };
        let listener = TcpListener::bind(config.listen).await.map_err(listen)?;

        let shutdown = shutdown.child_token();
        let data = &config.data_plane;
        let supervision =
            Supervision::new(data.program.clone(), data.args(), data.rpc_socket.clone(), config.runtime_dir.clone());
        let plane = supervise::start(supervision, shutdown.clone());
        let hub = Hub::default();
        let context = DiskContext {
            node: config.node.clone(),
            plane: plane.clone(),
            hub: hub.clone(),
            shutdown: shutdown.clone(),
        };
        let disks = Disks::open(disk_store, context);
        let context = ReplicaContext {
            folder: config.runtime_dir.join("replicas"),
            plane: plane.clone(),
            hub: hub.clone(),
            data_address: data.address,
            machine: machine.clone(),
            shutdown: shutdown.clone(),
        };
        let replicas = Replicas::open(disks.clone(), context).await?;
        let context = EngineContext {
            plane: plane.clone(),
            hub: hub.clone(),
            data_address: data.address,
            arbiter,
            peers: Peers::new(replicas.clone(), config.tls.clone()),
            machine,
            shutdown: shutdown.clone(),
        };
        let engines = Engines::open(store, context);
        tokio::spawn(tell_info(config.node.clone(), hub.clone(), plane.clone(), shutdown.clone()));
        let services = Services { disks, replicas, engines, hub, shutdown: shutdown.clone() };
        Ok(Self { config, listener, services, plane, shutdown })
    }

    /// Where the gRPC server listens.
    ///
    /// # Errors
    /// The system's.
    pub fn address(&self) -> std::io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// The parts behind the server, for a caller in the same process.
    pub fn services(&self) -> &Services {
        &self.services
    }

    /// Answers calls until `shutdown`.
    ///
    /// # Errors
    /// See [`RunError`].
    pub async fn serve(self, shutdown: CancellationToken) -> Result<(), RunError> {
        let Self { config, listener, services, plane, shutdown: parts } = self;
        let (health, health_service) = tonic_health::server::health_reporter();
        health.set_serving::<pb::events_server::EventsServer<Services>>().await;
        tokio::spawn(tell_health(health, plane, parts.clone()));
        let mut server = Server::builder().http2_keepalive_interval(Some(Duration::from_secs(20)));
        if let Some(tls) = &config.tls {
            server = server.tls_config(tls.server()?)?;
        } else {
            tracing::warn!("the agent speaks plain gRPC: anybody who reaches it can do anything");
        }
        let router = server
            .add_service(health_service)
            .add_service(pb::disks_server::DisksServer::new(services.clone()))
            .add_service(pb::replicas_server::ReplicasServer::new(services.clone()))
            .add_service(pb::engines_server::EnginesServer::new(services.clone()))
            .add_service(pb::events_server::EventsServer::new(services));
        let address = listener.local_addr().unwrap_or(config.listen);
        tracing::info!(node = %config.node, %address, "the agent is up");
        let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
        // Streams end with `parts`, a child of this token; calls get a moment.
        let serving = router.serve_with_incoming_shutdown(incoming, shutdown.clone().cancelled_owned());
        tokio::pin!(serving);
        let result = tokio::select! {
            result = &mut serving => result,
            () = async { shutdown.cancelled().await; tokio::time::sleep(DRAIN_DEADLINE).await } => Ok(()),
        };
        parts.cancel();
        Ok(result?)
    }
}

/// Tells what the agent and its data plane are.
async fn tell_info(node: String, hub: Hub, mut plane: watch::Receiver<PlaneStatus>, shutdown: CancellationToken) {
    loop {
        let info = describe(&node, &plane.borrow_and_update());
        hub.set(Key::Info, Object::Info(info));
        tokio::select! {
            () = shutdown.cancelled() => return,
            changed = plane.changed() => if changed.is_err() { return },
        }
    }
}

fn describe(node: &str, status: &PlaneStatus) -> pb::Info {
    let plane = status.plane.as_ref();
    pb::Info {
        node: node.to_owned(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        data_plane: plane.map(|plane| plane.version.clone()).unwrap_or_default(),
        data_plane_instance: plane.map(|plane| plane.instance.clone()).unwrap_or_default(),
        data_plane_restarts: status.restarts,
        has_mirror: plane.is_some_and(|plane| plane.has_mirror()),
    }
}

/// Serving means that the data plane is up: the services answer either way, most of them with UNAVAILABLE.
async fn tell_health(
    health: tonic_health::server::HealthReporter,
    mut plane: watch::Receiver<PlaneStatus>,
    shutdown: CancellationToken,
) {
    loop {
        let up = plane.borrow_and_update().plane.is_some();
        let status = if up { tonic_health::ServingStatus::Serving } else { tonic_health::ServingStatus::NotServing };
        health.set_service_status("addax.engine.v1.Engines", status).await;
        health.set_service_status("addax.engine.v1.Replicas", status).await;
        tokio::select! {
            () = shutdown.cancelled() => return,
            changed = plane.changed() => if changed.is_err() { return },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_data_plane_gets_the_usual_options() {
        let config = DataPlaneConfig {
            program: Some("addax-engine".into()),
            address: "127.0.0.1:4420".parse().unwrap(),
            rpc_socket: "/run/addax/rpc.sock".into(),
            cores: "0x3".to_owned(),
            memory_mib: 512,
            hugepages: false,
            extra_args: vec!["-L".to_owned(), "nvmf".to_owned()],
        };
        assert_eq!(config.args().join(" "), "-r /run/addax/rpc.sock -m 0x3 -s 512 --no-huge --wait-for-rpc -L nvmf");
    }
}
