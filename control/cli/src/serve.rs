//! The programs of a node and of a local cluster: API server, agent, manager, by the cluster's layout.
//!
//! *When things fail.* Each ends with an error that says what it could not start. SIGTERM and SIGINT end them in order.

use anyhow::{Context, Result};
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use crate::cluster;
use crate::cluster::layout::Layout;
use crate::cluster::pki::{self, Identity};

/// Memory for I/O buffers of a local cluster's data planes, in MiB.
const ENGINE_MEMORY_MIB: u32 = 64;
/// Memory of another data plane, in MiB: the pools of a stock `spdk_tgt` do not fit into less.
const STOCK_MEMORY_MIB: u32 = 1024;
/// The bundled data plane.
const ENGINE: &str = "addax-engine";

/// Which data plane an agent is given.
#[derive(Debug, Clone, Default)]
pub struct DataPlaneArgs {
    /// The program to run.
    pub program: Option<std::path::PathBuf>,
    /// More arguments for it.
    pub args: Vec<String>,
    /// The socket of one that somebody else runs.
    pub socket: Option<std::path::PathBuf>,
}

/// Starts logging to standard error: quiet for verbs, `info` for programs that run on; `ADDAX_LOG` overrides.
pub fn start_logging(resident: bool) {
    use tracing_subscriber::EnvFilter;
    // A verb's own error tells what the client met, in one sentence.
    let default = if resident { "info" } else { "warn,kube_client=off" };
    let filter = EnvFilter::try_from_env("ADDAX_LOG").unwrap_or_else(|_| EnvFilter::new(default));
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_ansi(false).init();
}

/// Cancelled by SIGTERM or SIGINT.
fn on_signals() -> Result<CancellationToken> {
    let token = CancellationToken::new();
    let (mut term, mut int) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let cancelled = token.clone();
    tokio::spawn(async move {
        tokio::select! {
            _ = term.recv() => {}
            _ = int.recv() => {}
        }
        cancelled.cancel();
    });
    Ok(token)
}

/// Runs the embedded API server.
pub async fn apiserver(layout: &Layout) -> Result<()> {
    let cluster = layout.require()?;
    let (ca_pem, cert_pem, key_pem) = Identity::of(&layout.pki(), "apiserver").read()?;
    let config = addax_apiserver::ServerConfig {
        listen: ([127, 0, 0, 1], cluster.api_port).into(),
        data_file: Some(layout.api_file()),
        tls: Some(addax_apiserver::TlsConfig { ca_pem, cert_pem, key_pem, require_client_certificate: true }),
        crds: addax_api::crds(),
        ..addax_apiserver::ServerConfig::default()
    };
    let shutdown = on_signals()?;
    let server = addax_apiserver::Server::start(config).await.context("API server")?;
    shutdown.cancelled().await;
    server.shutdown().await;
    Ok(())
}

/// A client as the node itself.
async fn node_client(layout: &Layout, node: &str) -> Result<kube::Client> {
    let cluster = layout.require()?;
    let text = pki::kubeconfig(&layout.pki(), node, &cluster.api_url())?;
    cluster::client_from(kube::config::Kubeconfig::from_yaml(&text)?).await
}

/// Runs a node's agent.
pub async fn agent(layout: &Layout, name: &str, given: DataPlaneArgs) -> Result<()> {
    let cluster = layout.require()?;
    let node = cluster.node(name)?;
    let identity = Identity::of(&layout.pki(), name);
    let bundled = std::env::current_exe()?.with_file_name(ENGINE);
    let chosen = given.program.or_else(|| node.data_plane.clone()).unwrap_or(bundled);
    let is_bundled = chosen.file_name().is_some_and(|name| name == ENGINE);
    let mut extra_args = given.args;
    if !is_bundled {
        // Nodes of a local cluster may have to share cores.
        extra_args.push("--disable-cpumask-locks".to_owned());
    }
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let index = cluster.nodes.iter().position(|n| n.name == name).unwrap_or(0);
    let config = addax_agent::AgentConfig {
        node: name.to_owned(),
        listen: cluster.agent_address(node),
        data_plane: addax_agent::DataPlaneConfig {
            program: given.socket.is_none().then_some(chosen),
            address: std::net::SocketAddr::new(node.address, cluster.data_port),
            rpc_socket: given.socket.unwrap_or_else(|| layout.engine_socket(name)),
            cores: format!("[{}]", index % processors),
            memory_mib: if is_bundled { ENGINE_MEMORY_MIB } else { STOCK_MEMORY_MIB },
            hugepages: false,
            extra_args,
        },
        runtime_dir: layout.node_dir(name).join("agent"),
        tls: Some(addax_agent::tls::TlsFiles {
            ca: identity.ca,
            cert: identity.cert,
            key: identity.key,
            server_name: None,
        }),
    };
    let shutdown = on_signals()?;
    let client = node_client(layout, name).await?;
    addax_agent::Agent::run(config, client, shutdown).await.context("agent")
}

/// Runs a node's manager.
pub async fn manager(layout: &Layout, name: &str) -> Result<()> {
    let cluster = layout.require()?;
    let node = cluster.node(name)?;
    let (ca_pem, cert_pem, key_pem) = Identity::of(&layout.pki(), name).read()?;
    let disk = layout.disk_file(name);
    let config = addax_manager::ManagerConfig {
        node: name.to_owned(),
        agent_address: cluster.agent_address(node).to_string(),
        default_disk: Some((
            "disk-1".to_owned(),
            addax_api::node::DiskSpec::file(&disk.to_string_lossy(), cluster.disk_size),
        )),
        client: node_client(layout, name).await?,
        tls: Some(addax_manager::TlsFiles { ca_pem, cert_pem, key_pem }),
        namespace: addax_api::NAMESPACE.to_owned(),
    };
    let shutdown = on_signals()?;
    addax_manager::Manager::run(config, shutdown).await.context("manager")
}
