//! Where a local cluster keeps everything: one folder, written by `addax up`.
//!
//! ```text
//! <dir>/cluster.json        nodes, addresses, ports
//! <dir>/kubeconfig          for kubectl and for this program
//! <dir>/pki/                certificate authority, one certificate per party
//! <dir>/api/objects.log     the embedded API server's file
//! <dir>/nodes/<n>/disks/    its disks: files with an lvstore each
//! <dir>/nodes/<n>/agent/    the agent's own state
//! <dir>/run/*.pid, *.sock   running processes
//! <dir>/log/*.log           their output
//! ```
//! *When things fail.* A `cluster.json` that cannot be read is an error that names it; nothing is guessed over it.

use std::fs;
use std::io::Write;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

/// Most nodes of a local cluster: each has an address 127.0.0.n of its own.
pub const NODES_MAX: u32 = 32;

/// Limits of the size of a disk that nobody gave a size, in bytes.
const DISK_SIZE_MIN: i64 = 1 << 30;
const DISK_SIZE_MAX: i64 = 256 << 30;

/// A local cluster as it was laid out.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Cluster {
    /// Port of the API server on 127.0.0.1.
    pub api_port: u16,
    /// Port of every agent on its node's address.
    pub agent_port: u16,
    /// Port of NVMe/TCP on every node's address.
    pub data_port: u16,
    /// Bytes of each node's disk, a sparse file.
    pub disk_size: i64,
    /// The nodes.
    pub nodes: Vec<NodeLayout>,
}

/// One node of a local cluster.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct NodeLayout {
    /// Its name.
    pub name: String,
    /// Its loopback address.
    pub address: IpAddr,
    /// The program of its data plane, if that is not the bundled one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data_plane: Option<PathBuf>,
}

/// A program for the data plane of one node, or of all.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DataPlaneChoice {
    node: Option<String>,
    program: PathBuf,
}

impl std::str::FromStr for DataPlaneChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (node, program) = match text.split_once('=') {
            Some((node, program)) => (Some(node.to_owned()), program),
            None => (None, text),
        };
        let path = Path::new(program);
        match path.canonicalize() {
            Ok(program) if program.is_file() => Ok(Self { node, program }),
            Ok(_) => Err(format!("{program} is not a program")),
            Err(error) => Err(format!("{program}: {error}; [NODE=]PROGRAM is allowed")),
        }
    }
}

impl Cluster {
    /// A cluster of `count` nodes, on ports that are free now.
    pub fn plan(count: u32, data_port: u16, disk_size: i64) -> Result<Self> {
        if !(1..=NODES_MAX).contains(&count) {
            bail!("--nodes {count}: 1 to {NODES_MAX} are allowed");
        }
        let nodes: Vec<NodeLayout> = (1..=count)
            .map(|n| NodeLayout {
                name: format!("node-{n}"),
                address: IpAddr::V4(Ipv4Addr::new(127, 0, 0, u8::try_from(n).unwrap_or(1))),
                data_plane: None,
            })
            .collect();
        let api_port = free_port(&nodes[..1], 7443)?;
        let agent_port = free_port(&nodes, 7450)?;
        let data_port = free_port(&nodes, data_port)?;
        Ok(Self { api_port, agent_port, data_port, disk_size, nodes })
    }

    /// Gives nodes other data planes.
    pub fn choose_data_planes(&mut self, choices: &[DataPlaneChoice]) -> Result<()> {
        for DataPlaneChoice { node, program } in choices {
            if let Some(name) = node {
                self.node(name)?;
            }
            let chosen = self.nodes.iter_mut().filter(|n| node.as_ref().is_none_or(|name| *name == n.name));
            chosen.for_each(|n| n.data_plane = Some(program.clone()));
        }
        Ok(())
    }

    /// URL of the API server.
    pub fn api_url(&self) -> String {
        format!("https://127.0.0.1:{}", self.api_port)
    }

    /// The agent's address of a node.
    pub fn agent_address(&self, node: &NodeLayout) -> SocketAddr {
        SocketAddr::new(node.address, self.agent_port)
    }

    /// The node of that name.
    pub fn node(&self, name: &str) -> Result<&NodeLayout> {
        self.nodes.iter().find(|n| n.name == name).with_context(|| format!("node {name:?} is not in this cluster"))
    }
}

/// The first port from `wanted` on that can be bound on every node's address.
fn free_port(nodes: &[NodeLayout], wanted: u16) -> Result<u16> {
    let free = |port: &u16| nodes.iter().all(|n| std::net::TcpListener::bind((n.address, *port)).is_ok());
    let last = wanted.saturating_add(1000);
    (wanted..=last).find(free).with_context(|| format!("no free port between {wanted} and {last}"))
}

/// The folder of a local cluster.
#[derive(Debug, Clone)]
pub struct Layout {
    dir: PathBuf,
}

impl Layout {
    /// The folder given, or the user's default.
    pub fn new(dir: Option<PathBuf>) -> Result<Self> {
        let dir = match dir {
            Some(dir) => dir,
            None => default_dir().context("--dir is needed: neither XDG_STATE_HOME nor HOME is set")?,
        };
        let dir = if dir.is_absolute() { dir } else { std::env::current_dir()?.join(dir) };
        Ok(Self { dir })
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }
    pub fn kubeconfig(&self) -> PathBuf {
        self.dir.join("kubeconfig")
    }
    pub fn pki(&self) -> PathBuf {
        self.dir.join("pki")
    }
    pub fn run(&self) -> PathBuf {
        self.dir.join("run")
    }
    pub fn log(&self) -> PathBuf {
        self.dir.join("log")
    }
    pub fn api_file(&self) -> PathBuf {
        self.dir.join("api").join("objects.log")
    }
    pub fn node_dir(&self, node: &str) -> PathBuf {
        self.dir.join("nodes").join(node)
    }
    /// The file that is a node's disk.
    pub fn disk_file(&self, node: &str) -> PathBuf {
        self.node_dir(node).join("disks").join("disk-1")
    }
    /// Bytes for a disk of a new cluster: what the file system has now, within limits. The file takes only what is
    /// written.
    pub fn disk_size_default(&self) -> i64 {
        let there = self.dir.ancestors().find_map(|dir| nix::sys::statvfs::statvfs(dir).ok());
        let free = there.map_or(0, |stat| stat.blocks_available().saturating_mul(stat.fragment_size()));
        let free = i64::try_from(free).unwrap_or(i64::MAX).clamp(DISK_SIZE_MIN, DISK_SIZE_MAX);
        free / addax_api::MIB * addax_api::MIB
    }
    /// Path of a Unix socket; kept short, since such paths end at 107 bytes.
    pub fn engine_socket(&self, node: &str) -> PathBuf {
        self.run().join(format!("{node}.sock"))
    }

    fn cluster_file(&self) -> PathBuf {
        self.dir.join("cluster.json")
    }

    /// The cluster laid out here, if there is one.
    pub fn load(&self) -> Result<Option<Cluster>> {
        let path = self.cluster_file();
        let text = match fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error).with_context(|| format!("read {}", path.display())),
        };
        serde_json::from_str(&text).map(Some).with_context(|| format!("{} is damaged", path.display()))
    }

    /// The cluster laid out here.
    pub fn require(&self) -> Result<Cluster> {
        let dir = self.dir.display();
        self.load()?.with_context(|| format!("there is no cluster in {dir}: `addax up --dir {dir}` makes one"))
    }

    /// Makes the folders and writes the plan, durably.
    pub fn save(&self, cluster: &Cluster) -> Result<()> {
        for dir in [self.dir.clone(), self.pki(), self.run(), self.log(), self.dir.join("api")] {
            fs::create_dir_all(&dir).with_context(|| format!("make folder {}", dir.display()))?;
        }
        let longest = cluster.nodes.iter().map(|n| self.engine_socket(&n.name).as_os_str().len()).max().unwrap_or(0);
        if longest > 100 {
            bail!("--dir {}: the path is too long for a Unix socket by {} bytes", self.dir.display(), longest - 100);
        }
        for node in &cluster.nodes {
            fs::create_dir_all(self.node_dir(&node.name).join("disks"))?;
            fs::create_dir_all(self.node_dir(&node.name).join("agent"))?;
        }
        write_durable(&self.cluster_file(), serde_json::to_string_pretty(cluster)?.as_bytes(), 0o644)
    }
}

/// Writes a file so that after a crash it is there whole or not at all.
pub fn write_durable(path: &Path, bytes: &[u8], mode: u32) -> Result<()> {
    use std::os::unix::fs::OpenOptionsExt;
    let part = path.with_extension("part");
    let write = || -> std::io::Result<()> {
        let mut file = fs::OpenOptions::new().create(true).truncate(true).write(true).mode(mode).open(&part)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        fs::rename(&part, path)?;
        fs::File::open(path.parent().unwrap_or(Path::new("/")))?.sync_all()
    };
    write().with_context(|| format!("write {}", path.display()))
}

fn default_dir() -> Option<PathBuf> {
    let base = std::env::var_os("XDG_STATE_HOME").map(PathBuf::from);
    let base = base.or_else(|| std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".local/state")));
    base.map(|base| base.join("addax"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_survives_its_file() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::new(Some(dir.path().join("c"))).unwrap();
        assert_eq!(layout.load().unwrap(), None);
        let mut cluster = Cluster::plan(3, 14420, 1 << 30).unwrap();
        let program = std::env::current_exe().unwrap();
        let choice = |text: &str| text.parse::<DataPlaneChoice>();
        cluster.choose_data_planes(&[choice(&format!("node-2={}", program.display())).unwrap()]).unwrap();
        let chosen: Vec<bool> = cluster.nodes.iter().map(|n| n.data_plane.is_some()).collect();
        assert_eq!(chosen, [false, true, false]);
        let absent = choice(&format!("node-9={}", program.display())).unwrap();
        assert!(cluster.choose_data_planes(&[absent]).unwrap_err().to_string().contains("node-9"));
        assert!(choice("node-1=/no/such/program").unwrap_err().contains("[NODE=]PROGRAM"));
        layout.save(&cluster).unwrap();
        assert_eq!(layout.load().unwrap(), Some(cluster));
    }

    #[test]
    fn bad_counts_and_damaged_files_are_refused_with_a_reason() {
        for count in [0, 33] {
            assert!(Cluster::plan(count, 14420, 1 << 30).unwrap_err().to_string().contains("1 to 32"));
        }
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("cluster.json"), "{").unwrap();
        let layout = Layout::new(Some(dir.path().to_owned())).unwrap();
        assert!(layout.load().unwrap_err().to_string().contains("damaged"));
    }
}
