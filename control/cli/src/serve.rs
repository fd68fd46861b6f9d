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
pub async fn agent(
    layout: &Layout,
    name: &str,
    data_plane: Option<std::path::PathBuf>,
    data_plane_args: Vec<String>,
) -> Result<()> {
    let cluster = layout.require()?;
    let node = cluster.node(name)?;
    let identity = Identity::of(&layout.pki(), name);
    let program = match data_plane {
        Some(program) => program,
        None => std::env::current_exe()?.with_file_name("addax-engine"),
    };
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let index = cluster.nodes.iter().position(|n| n.name == name).unwrap_or(0);
    let config = addax_agent::AgentConfig {
        node: name.to_owned(),
        listen: cluster.agent_address(node),
        disks: [("disk-1".to_owned(), layout.node_dir(name).join("disks").join("disk-1"))].into(),
        data_plane: addax_agent::DataPlaneConfig {
            program,
            address: std::net::SocketAddr::new(node.address, cluster.data_port),
            rpc_socket: layout.engine_socket(name),
            cores: format!("[{}]", index % processors),
            memory_mib: ENGINE_MEMORY_MIB,
            hugepages: false,
            extra_args: data_plane_args,
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
    let disk = layout.node_dir(name).join("disks").join("disk-1");
    let config = addax_manager::ManagerConfig {
        node: name.to_owned(),
        agent_address: cluster.agent_address(node).to_string(),
        default_disk: Some(("disk-1".to_owned(), addax_api::node::DiskSpec::at(&disk.to_string_lossy()))),
        client: node_client(layout, name).await?,
        tls: Some(addax_manager::TlsFiles { ca_pem, cert_pem, key_pem }),
        namespace: addax_api::NAMESPACE.to_owned(),
    };
    let shutdown = on_signals()?;
    addax_manager::Manager::run(config, shutdown).await.context("manager")
}
