//! A local cluster: several nodes on one machine, each with its own manager, agent and engine process.
//!
//! *Flow of `up`.* Lay out (once) ─▶ certificates ─▶ API server ─▶ wait until it answers ─▶ agents and managers of every
//! node ─▶ wait until every node is ready. All of it may be repeated at any time: what runs is left alone, what is
//! missing is started. `down` ends everything and leaves the data; with `--delete` that goes too.
//!
//! *When things fail.* A process that does not come up is named, with the end of its log.

pub mod layout;
pub mod pki;
pub mod process;

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use addax_api::setting::STORAGE_MINIMAL_AVAILABLE_PERCENTAGE;
use addax_api::{Setting, SettingSpec};
use anyhow::{Context, Result, bail};
use indicatif::{ProgressBar, ProgressStyle};
use kube::api::PostParams;
use kube::{Api, Client};

use self::layout::{Cluster, DataPlaneChoice, Layout, NodeLayout};
use self::process::Daemon;
use crate::verbs::disk;

/// How long the API server, and then all nodes, may take to become ready.
const READY_DEADLINE: Duration = Duration::from_secs(60);
/// Patience with a process that was asked to end. A data plane closes its volumes in that time.
const STOP_PATIENCE: Duration = Duration::from_secs(20);

/// Percentage of the disk that new replicas leave free in a local cluster.
const MINIMAL_AVAILABLE_PERCENTAGE: &str = "1";
/// Nodes of a new cluster.
const NODES_DEFAULT: u32 = 3;

/// What `up` was asked for.
#[derive(Debug, Clone)]
pub struct UpOptions {
    /// Number of nodes; what the cluster has already, or [`NODES_DEFAULT`], unless given.
    pub nodes: Option<u32>,
    pub data_port: u16,
    /// Bytes of each node's disk in a new cluster.
    pub disk_size: Option<i64>,
    /// Other data planes than the bundled one.
    pub data_planes: Vec<DataPlaneChoice>,
    pub quiet: bool,
}

/// Starts what is missing of the cluster in `layout`, and waits until it is ready.
pub async fn up(layout: &Layout, options: &UpOptions) -> Result<Cluster> {
    let mut cluster = match layout.load()? {
        Some(cluster) => {
            let (dir, nodes) = (layout.dir().display(), cluster.nodes.len());
            if let Some(wanted) = options.nodes.filter(|wanted| *wanted as usize != nodes) {
                bail!("the cluster in {dir} has {nodes} nodes: --nodes {wanted} is not allowed for it");
            }
            let size = cluster.disk_size;
            if let Some(wanted) = options.disk_size.filter(|wanted| *wanted != size) {
                bail!(
                    "the disks of the cluster in {dir} have {size} bytes: --disk-size {wanted} is not allowed for it"
                );
            }
            cluster
        }
        None => {
            let size = options.disk_size.unwrap_or_else(|| layout.disk_size_default());
            Cluster::plan(options.nodes.unwrap_or(NODES_DEFAULT), options.data_port, size)?
        }
    };
    cluster.choose_data_planes(&options.data_planes)?;
    layout.save(&cluster)?;
    ensure_certificates(layout, &cluster)?;
    let progress = spinner(options.quiet);
    progress.set_message("API server");
    let api = daemon(layout, "apiserver");
    api.start(api_command(layout)?)?;
    let client = client(layout).await?;
    wait_for(&progress, &api, "the API server", || api_answers(client.clone())).await?;
    share_disk(&client).await?;
    for node in &cluster.nodes {
        progress.set_message(format!("node {}", node.name));
        daemon(layout, &format!("{}-agent", node.name)).start(node_command(layout, "agent", node)?)?;
        daemon(layout, &format!("{}-manager", node.name)).start(node_command(layout, "manager", node)?)?;
    }
    for node in &cluster.nodes {
        progress.set_message(format!("node {} becomes ready", node.name));
        let manager = daemon(layout, &format!("{}-manager", node.name));
        wait_for(&progress, &manager, &node.name, || node_ready(client.clone(), node.name.clone())).await?;
    }
    progress.finish_and_clear();
    Ok(cluster)
}

/// The nodes of a local cluster share a disk with everything else on the machine, which is often nearly full: a share of
/// it to stay free, good on a disk of a node's own, would refuse the smallest volume. Comes before the managers, who leave
/// a setting that is there alone; so does this.
async fn share_disk(client: &Client) -> Result<()> {
    let spec = SettingSpec { value: MINIMAL_AVAILABLE_PERCENTAGE.to_owned() };
    let setting = Setting::new(STORAGE_MINIMAL_AVAILABLE_PERCENTAGE, spec);
    let settings: Api<Setting> = Api::namespaced(client.clone(), addax_api::NAMESPACE);
    match settings.create(&PostParams::default(), &setting).await {
        Err(kube::Error::Api(status)) if status.code == 409 => Ok(()),
        made => made.map(drop).context("set what must stay free on disks"),
    }
}

/// Ends all processes of the cluster: managers, agents with their data planes, API server.
pub async fn down(layout: &Layout, delete: bool) -> Result<()> {
    if let Some(cluster) = layout.load()? {
        // All are asked at once, so that they end at the same time.
        for role in ["manager", "agent"] {
            cluster.nodes.iter().for_each(|n| daemon(layout, &format!("{}-{role}", n.name)).ask_to_end());
        }
        for node in &cluster.nodes {
            daemon(layout, &format!("{}-manager", node.name)).stop(STOP_PATIENCE)?;
        }
        for node in &cluster.nodes {
            daemon(layout, &format!("{}-agent", node.name)).stop(STOP_PATIENCE)?;
            stop_data_plane(layout, node).await?;
        }
        daemon(layout, "apiserver").stop(STOP_PATIENCE)?;
    }
    if delete {
        match std::fs::remove_dir_all(layout.dir()) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(error).with_context(|| format!("remove {}", layout.dir().display()));
            }
            _ => {}
        }
    }
    Ok(())
}

/// The data plane outlives its agent on purpose: `down` is who ends it.
async fn stop_data_plane(layout: &Layout, node: &NodeLayout) -> Result<()> {
    let ended = addax_agent::stop_data_plane(&layout.node_dir(&node.name).join("agent"), STOP_PATIENCE).await;
    let left = processes_with_argument(&layout.engine_socket(&node.name).to_string_lossy());
    if !ended || !left.is_empty() {
        bail!("the data plane of {} does not end: {left:?}", node.name);
    }
    Ok(())
}

/// Live processes that were started with `argument`.
pub fn processes_with_argument(argument: &str) -> Vec<nix::unistd::Pid> {
    processes(|arg| arg == argument.as_bytes())
}

/// Live processes that were started with an argument that names `folder` or something in it.
pub fn processes_of_folder(folder: &str) -> Vec<nix::unistd::Pid> {
    processes(|arg| arg.starts_with(folder.as_bytes()))
}

fn processes(matches: impl Fn(&[u8]) -> bool) -> Vec<nix::unistd::Pid> {
    let Ok(entries) = std::fs::read_dir("/proc") else { return Vec::new() };
    let pids = entries.flatten().filter_map(|e| e.file_name().to_str()?.parse::<i32>().ok());
    pids.filter(|pid| {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        line.split(|b| *b == 0).any(&matches)
    })
    .map(nix::unistd::Pid::from_raw)
    .collect()
}

fn ensure_certificates(layout: &Layout, cluster: &Cluster) -> Result<()> {
    let local = vec!["127.0.0.1".parse()?];
    let mut parties = vec![("admin".to_owned(), vec![]), ("apiserver".to_owned(), local)];
    parties.extend(cluster.nodes.iter().map(|n| (n.name.clone(), vec![n.address])));
    pki::ensure(&layout.pki(), &parties)?;
    let text = pki::kubeconfig(&layout.pki(), "admin", &cluster.api_url())?;
    layout::write_durable(&layout.kubeconfig(), text.as_bytes(), 0o600)
}

fn daemon(layout: &Layout, name: &str) -> Daemon {
    Daemon::new(&layout.run(), &layout.log(), name)
}

fn this_program() -> Result<PathBuf> {
    std::env::current_exe().context("where this program is")
}

fn api_command(layout: &Layout) -> Result<Command> {
    let mut command = Command::new(this_program()?);
    command.arg("apiserver").arg("--dir").arg(layout.dir());
    Ok(command)
}

fn node_command(layout: &Layout, role: &str, node: &NodeLayout) -> Result<Command> {
    let mut command = Command::new(this_program()?);
    command.arg(role).arg("--dir").arg(layout.dir()).arg("--node").arg(&node.name);
    Ok(command)
}

/// Refuses a cluster whose API server does not run, and says what to do.
pub fn require_running(layout: &Layout) -> Result<()> {
    let dir = layout.dir().display();
    match daemon(layout, "apiserver").pid() {
        Some(_) => Ok(()),
        None => bail!("the cluster in {dir} is not up: `addax up --dir {dir}` starts it"),
    }
}

/// A client of the cluster's API, as the administrator.
pub async fn client(layout: &Layout) -> Result<Client> {
    let path = layout.kubeconfig();
    let config = kube::config::Kubeconfig::read_from(&path).with_context(|| format!("read {}", path.display()))?;
    client_from(config).await
}

/// A client by a kubeconfig.
pub async fn client_from(config: kube::config::Kubeconfig) -> Result<Client> {
    let options = kube::config::KubeConfigOptions::default();
    let config = kube::Config::from_custom_kubeconfig(config, &options).await?;
    Ok(Client::try_from(config)?)
}

fn spinner(quiet: bool) -> ProgressBar {
    if quiet {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::new_spinner();
    if let Ok(style) = ProgressStyle::with_template("{spinner} {elapsed} starting {msg}") {
        bar.set_style(style);
    }
    bar.enable_steady_tick(Duration::from_millis(100));
    bar
}

async fn wait_for<F>(bar: &ProgressBar, daemon: &Daemon, what: &str, ready: impl Fn() -> F) -> Result<()>
where
    F: Future<Output = bool>,
{
    let until = tokio::time::Instant::now() + READY_DEADLINE;
    while !ready().await {
        process::reap();
        let dead = daemon.pid().is_none();
        if dead || tokio::time::Instant::now() > until {
            bar.finish_and_clear();
            let how = if dead { "has ended" } else { "did not become ready in time" };
            bail!("{what} {how}; the end of its log:\n{}", daemon.log_tail());
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    Ok(())
}

async fn api_answers(client: Client) -> bool {
    let answer = tokio::time::timeout(Duration::from_secs(2), client.apiserver_version()).await;
    matches!(answer, Ok(Ok(_)))
}

async fn node_ready(client: Client, name: String) -> bool {
    let nodes: Api<addax_api::Node> = Api::namespaced(client, addax_api::NAMESPACE);
    let Ok(node) = nodes.get(&name).await else { return false };
    let status = node.status.unwrap_or_default();
    let is_true = |type_: &str| addax_api::condition::is_true(&status.conditions, type_);
    // A disk that is refused has its reason, and waiting does not help.
    let decided = |disk: &String| {
        let conditions = status.disk_status.get(disk).map(|disk| disk.conditions.as_slice()).unwrap_or_default();
        addax_api::condition::get(conditions, "Ready").is_some_and(|ready| !disk::passes(ready))
    };
    is_true("Ready") && is_true("Schedulable") && node.spec.disks.keys().all(decided)
}
