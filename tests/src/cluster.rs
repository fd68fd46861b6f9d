//! A local cluster as a user runs it: `addax up` in a folder of its own, verbs by the command line, `addax-perf` as the
//! host, and signals to everything or to one node.
//!
//! Started by [`LocalCluster::apart`], its nodes have network namespaces of their own ([`crate::netns`]) and reach the API
//! server through doors ([`crate::door`]), so that tests can cut the network and hold what goes to the arbiter.
//!
//! *Invariants.* One cluster at a time on a machine, by a lock in the folder for temporary files: all of them use the same
//! loopback addresses, and while one is down another must not take its ports. Dropped, it leaves no process and no file
//! behind, also when the test has failed.
//!
//! *When things fail.* Errors carry the output of the command, and [`LocalCluster::logs`] the end of every log.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use addax_perf::plane::procfs;
use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::disk_image;
use crate::door::Door;
use crate::engine::rpc_at;
use crate::netns::{self, HOST_PLACE, HUB, Net, command_in};
use crate::programs::program;
pub use crate::verify::{Done, Load, Target};

/// NQN of the host that the tests are.
pub const HOST: &str = "nqn.2026-11.io.addax:host:e2e";

/// How long anything may take that a test waits for.
pub(crate) const PATIENCE: Duration = Duration::from_secs(90);

/// Port of the API server of a cluster with a network of its own.
const API_PORT: u16 = 7443;

/// Bytes of the disks of a cluster with a network of its own.
const DISK_BYTES: u64 = 1 << 30;

/// A local cluster in a temporary folder.
#[derive(Debug)]
pub struct LocalCluster {
    folder: TempDir,
    nodes: u32,
    port: u16,
    /// More arguments of `addax up`.
    up: Vec<String>,
    /// By node, the way to the API server; none without a network of its own.
    doors: BTreeMap<String, Door>,
    net: Option<Net>,
    /// Locked; the lock goes with the file.
    _turn: File,
}

/// Waits for the turn of this caller among all that start nodes on this machine; it lasts until the file is dropped.
///
/// # Errors
/// When the lock cannot be made.
pub fn turn() -> Result<File> {
    let turn = File::create(std::env::temp_dir().join("addax-e2e.lock"))?;
    turn.lock()?;
    Ok(turn)
}

impl LocalCluster {
    /// Starts a cluster of so many nodes and waits until they are ready.
    ///
    /// # Errors
    /// When a program is not built or `addax up` fails.
    pub fn up(nodes: u32) -> Result<Self> {
        Self::up_with(nodes, &[])
    }

    /// As [`Self::up`], with more arguments of `addax up`.
    ///
    /// # Errors
    /// As [`Self::up`].
    pub fn up_with(nodes: u32, more: &[&str]) -> Result<Self> {
        let cluster = Self::plan(nodes, more)?;
        cluster.up_again()?;
        Ok(cluster)
    }

    fn plan(nodes: u32, more: &[&str]) -> Result<Self> {
        let turn = turn()?;
        // Below the range from which the kernel takes ports of its own, and another one for every test program.
        let port = 12_000 + u16::try_from(std::process::id() % 10_000)?;
        let folder = tempfile::Builder::new().prefix("addax-e2e-").tempdir()?;
        let up = more.iter().map(|arg| (*arg).to_owned()).collect();
        Ok(Self { folder, nodes, port, up, doors: BTreeMap::new(), net: None, _turn: turn })
    }

    /// As [`Self::up`], with a network of its own; none, said loudly, where the machine does not allow that.
    ///
    /// # Errors
    /// As [`Self::up`], or when the network cannot be made.
    pub fn apart(nodes: u32) -> Result<Option<Self>> {
        let Some(net) = Net::new(nodes)? else { return Ok(None) };
        let mut cluster = Self::plan(nodes, &[])?;
        cluster.lay_out()?;
        let hub = net.namespace(HUB);
        // Everything is first started in one place, which makes certificates and objects, and then each node in its own.
        let places: Vec<String> = (1..=nodes).map(|number| format!("node-{number}")).collect();
        let with_all = |verb: &str| -> Result<()> {
            places.iter().try_for_each(|place| {
                let address = format!("{}/32", netns::address(place)?);
                netns::ip(&["-n", &hub, "address", verb, &address, "dev", "lo"])
            })
        };
        with_all("add")?;
        cluster.net = Some(net);
        cluster.up_again()?;
        // In good order: a manager that was killed is waited for by the next one of its node.
        cluster.cli(&["down"])?;
        with_all("delete")?;
        cluster.start("apiserver", None)?;
        cluster.wait_api()?;
        for node in &places {
            let net = cluster.net()?;
            let api = SocketAddr::from(([127, 0, 0, 1], API_PORT));
            let door = Door::open(api, &net.file(node), &net.file(HUB))?;
            cluster.doors.insert(node.clone(), door);
        }
        places.iter().try_for_each(|node| cluster.start_node(node))?;
        cluster.up_again()?;
        Ok(Some(cluster))
    }

    /// Plans a cluster by addresses that are not those of this machine.
    fn lay_out(&self) -> Result<()> {
        let node = |number: u32| -> Result<Value> {
            let name = format!("node-{number}");
            Ok(json!({"address": netns::address(&name)?, "name": name}))
        };
        let nodes = (1..=self.nodes).map(node).collect::<Result<Vec<_>>>()?;
        let plan =
            json!({"apiPort": API_PORT, "agentPort": 7450, "dataPort": 4420, "diskSize": DISK_BYTES, "nodes": nodes});
        fs::create_dir_all(self.dir())?;
        Ok(fs::write(self.dir().join("cluster.json"), plan.to_string())?)
    }

    /// The cluster's own network.
    ///
    /// # Errors
    /// When it has none.
    pub fn net(&self) -> Result<&Net> {
        self.net.as_ref().context("the cluster has no network of its own")
    }

    /// A node's way to the API server.
    ///
    /// # Errors
    /// When the cluster has no network of its own.
    pub fn door(&self, node: &str) -> Result<&Door> {
        self.doors.get(node).with_context(|| format!("no door for {node}"))
    }

    /// `addax up` once more: starts what is missing.
    ///
    /// # Errors
    /// With what it printed.
    pub fn up_again(&self) -> Result<()> {
        // What is missing is started where it belongs.
        for number in (1..=self.nodes).filter(|_| !self.doors.is_empty()) {
            self.start_node(&format!("node-{number}"))?;
        }
        let (nodes, port) = (self.nodes.to_string(), self.port.to_string());
        let mut args = vec!["-q", "up", "--nodes", &nodes, "--port", &port];
        args.extend(self.up.iter().map(String::as_str));
        self.cli(&args).map(drop)
    }

    /// The cluster's folder.
    pub fn dir(&self) -> PathBuf {
        self.folder.path().join("c")
    }

    /// The `addax` program, for this cluster.
    ///
    /// # Errors
    /// When it is not built.
    pub fn command(&self, args: &[&str]) -> Result<Command> {
        self.command_at(HUB, args)
    }

    fn command_at(&self, place: &str, args: &[&str]) -> Result<Command> {
        let file = self.net.as_ref().map(|net| net.file(place));
        let mut command = command_in(file.as_deref(), &program("addax")?);
        command.arg("--dir").arg(self.dir()).args(args).stdin(Stdio::null());
        Ok(command)
    }

    /// Runs a verb and gives back what it printed.
    ///
    /// # Errors
    /// When it exits with another code than 0; with what it printed.
    pub fn cli(&self, args: &[&str]) -> Result<String> {
        let Output { status, stdout, stderr } = self.command(args)?.output()?;
        let (out, err) = (String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr));
        ensure!(status.success(), "addax {}: {status}\n{out}{err}", args.join(" "));
        Ok(out.into_owned())
    }

    /// Runs a verb with `-o json`.
    ///
    /// # Errors
    /// As [`Self::cli`], or when the output is not JSON.
    pub fn json(&self, args: &[&str]) -> Result<Value> {
        let text = self.cli(&[args, &["-o", "json"]].concat())?;
        serde_json::from_str(&text).with_context(|| format!("addax {}: not JSON:\n{text}", args.join(" ")))
    }

    /// Declares a volume of so many MiB with three copies.
    ///
    /// # Errors
    /// As [`Self::cli`].
    pub fn create(&self, volume: &str, mib: u32) -> Result<()> {
        self.cli(&["volume", "create", volume, "--size", &format!("{mib}MiB")]).map(drop)
    }

    /// Attaches a volume for [`HOST`]; where it is served.
    ///
    /// # Errors
    /// As [`Self::cli`].
    pub fn attach(&self, volume: &str, node: &str, seconds: u64) -> Result<Target> {
        let timeout = seconds.to_string();
        let args = ["volume", "attach", volume, "--node", node, "--host-nqn", HOST, "--timeout", &timeout];
        let found = self.json(&args)?;
        let endpoint = &found[0];
        let text = |name: &str| endpoint[name].as_str().with_context(|| format!("no {name} in {endpoint}"));
        let port = endpoint["trsvcid"].as_u64().context("no trsvcid")?;
        Ok(Target {
            address: format!("{}:{port}", text("traddr")?),
            nqn: text("nqn")?.to_owned(),
            volume: volume.to_owned(),
            namespace: self.net.as_ref().map(|net| net.file(HOST_PLACE)),
        })
    }

    /// The volume's object.
    ///
    /// # Errors
    /// As [`Self::json`].
    pub fn volume(&self, name: &str) -> Result<Value> {
        Ok(self.json(&["volume", "show", name])?[0].take())
    }

    /// The epoch of the volume's record.
    ///
    /// # Errors
    /// As [`Self::json`].
    pub fn epoch(&self, volume: &str) -> Result<u64> {
        self.volume(volume)?["status"]["config"]["epoch"].as_u64().context("the volume has no record")
    }

    /// Waits until the volume is as wanted, and gives it back.
    ///
    /// # Errors
    /// When that takes too long; with the volume as it is.
    pub fn wait(&self, volume: &str, what: &str, holds: impl Fn(&Value) -> bool) -> Result<Value> {
        let until = Instant::now() + PATIENCE;
        loop {
            let found = self.volume(volume)?;
            if holds(&found) {
                return Ok(found);
            }
            ensure!(Instant::now() < until, "{volume} is never {what}:\n{found:#}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Waits until the record counts so many copies in sync and the volume is attached and healthy.
    ///
    /// # Errors
    /// As [`Self::wait`].
    pub fn wait_healthy(&self, volume: &str, copies: usize) -> Result<Value> {
        self.wait(volume, "healthy", |found| {
            let status = &found["status"];
            let in_sync = status["config"]["inSync"].as_array().map_or(0, Vec::len);
            status["state"] == "attached" && status["robustness"] == "healthy" && in_sync == copies
        })
    }

    /// All processes of the cluster: whose arguments or whose working directory name its folder.
    pub fn processes(&self) -> Vec<Pid> {
        processes_of(&self.dir())
    }

    /// The processes of a node: manager, agent and data plane.
    pub fn node_processes(&self, node: &str) -> Vec<Pid> {
        let socket = format!("{node}.sock");
        let of_node = |pid: &Pid| {
            let args = arguments(*pid);
            let named = args.windows(2).any(|pair| pair[0] == "--node" && pair[1] == node);
            named || args.iter().any(|arg| arg.ends_with(&socket))
        };
        self.processes().into_iter().filter(of_node).collect()
    }

    /// A node's data plane.
    ///
    /// # Errors
    /// When there is not exactly one.
    pub fn engine(&self, node: &str) -> Result<Pid> {
        let is_engine = |pid: &Pid| arguments(*pid).first().is_some_and(|program| program.ends_with("addax-engine"));
        let found: Vec<Pid> = self.node_processes(node).into_iter().filter(is_engine).collect();
        match found[..] {
            [pid] => Ok(pid),
            _ => bail!("{} data planes run on {node}, not one", found.len()),
        }
    }

    /// SIGKILL to every process of the cluster, in the order given by `shuffle`; returns when none is left.
    ///
    /// # Errors
    /// When processes do not end.
    pub fn kill_all(&self, mut shuffle: impl FnMut(&mut Vec<Pid>)) -> Result<()> {
        end_all(|| {
            let mut found = self.processes();
            shuffle(&mut found);
            found
        })
    }

    /// SIGKILL to every process of a node; returns when none is left.
    ///
    /// # Errors
    /// When processes do not end.
    pub fn kill_node(&self, node: &str) -> Result<()> {
        end_all(|| self.node_processes(node))
    }

    /// Sends a signal to processes, in their order.
    ///
    /// # Errors
    /// When one has ended.
    pub fn signal(pids: &[Pid], signal: Signal) -> Result<()> {
        pids.iter().try_for_each(|pid| kill(*pid, signal).with_context(|| format!("{signal} to {pid}")))
    }

    /// Waits until the API server answers.
    ///
    /// # Errors
    /// With what the last try printed.
    pub fn wait_api(&self) -> Result<()> {
        let until = Instant::now() + PATIENCE;
        loop {
            match self.cli(&["volume", "ls"]) {
                Err(error) if Instant::now() > until => return Err(error),
                Err(_) => std::thread::sleep(Duration::from_millis(50)),
                Ok(_) => return Ok(()),
            }
        }
    }

    /// Calls a method of a node's data plane.
    ///
    /// # Errors
    /// As [`rpc_at`].
    pub fn rpc(&self, node: &str, method: &str, params: Value) -> Result<Value> {
        rpc_at(&self.dir().join("run").join(format!("{node}.sock")), method, params)
    }

    /// Whether all copies are equal; the volume must be detached, and the only one.
    ///
    /// # Errors
    /// When they cannot be read, or are not as many as asked for.
    pub fn equal_images(&self, copies: usize) -> Result<bool> {
        let all = self.images("", &[])?;
        ensure!(all.len() == copies, "{} copies instead of {copies}", all.len());
        Ok(all.windows(2).all(|pair| pair[0].1 == pair[1].1))
    }

    /// The copies of a volume, by name, on the first disks of all nodes and on more files. An empty name is any volume.
    ///
    /// # Errors
    /// When a disk cannot be read.
    pub fn images(&self, volume: &str, more: &[PathBuf]) -> Result<Vec<(String, Vec<u8>)>> {
        let disks = (1..=self.nodes).map(|node| self.disk_file(&format!("node-{node}")));
        let prefix = if volume.is_empty() { String::new() } else { format!("{volume}-r-") };
        let mut all = Vec::new();
        for disk in disks.chain(more.iter().cloned()) {
            // Beside each copy there is what its engine keeps about it, which differs.
            let is_copy = |name: &String| name.starts_with(&prefix) && !name.ends_with("-meta");
            all.extend(disk_image::lvols(&disk)?.into_iter().filter(|(name, _)| is_copy(name)));
        }
        Ok(all)
    }

    /// The file that is the first disk of a node.
    pub fn disk_file(&self, node: &str) -> PathBuf {
        self.dir().join("nodes").join(node).join("disks/disk-1")
    }

    /// Starts a single program of the cluster: `apiserver`, or `agent` or `manager` of a node.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn start(&self, role: &str, node: Option<&str>) -> Result<()> {
        let name = node.map_or_else(|| role.to_owned(), |node| format!("{node}-{role}"));
        let log = self.dir().join("log").join(format!("{name}.log"));
        let log = fs::OpenOptions::new().create(true).append(true).open(log)?;
        let mut args = vec![role];
        args.extend(node.iter().flat_map(|node| ["--node", node]));
        let child = self.command_at(node.unwrap_or(HUB), &args)?.stdout(log.try_clone()?).stderr(log).spawn()?;
        // As `addax up` leaves it, so that the next `up` finds it running and `down` ends it.
        let start = start_time(child.id()).with_context(|| format!("{name} has ended at once"))?;
        fs::write(self.dir().join("run").join(format!("{name}.pid")), format!("{} {start}\n", child.id()))?;
        std::thread::spawn(move || child.wait_with_output());
        Ok(())
    }

    /// Starts the agent and the manager of a node, if they do not run.
    ///
    /// # Errors
    /// As [`Self::start`].
    pub fn start_node(&self, node: &str) -> Result<()> {
        let mut missing = ["agent", "manager"].into_iter().filter(|role| self.processes_of_role(node, role).is_empty());
        missing.try_for_each(|role| self.start(role, Some(node)))
    }

    /// The processes of a node that are its `agent` or its `manager`.
    pub fn processes_of_role(&self, node: &str, role: &str) -> Vec<Pid> {
        let has_role = |pid: &Pid| arguments(*pid).iter().any(|arg| arg == role);
        self.node_processes(node).into_iter().filter(has_role).collect()
    }

    /// The end of every log.
    pub fn logs(&self) -> String {
        let Ok(entries) = fs::read_dir(self.dir().join("log")) else { return String::new() };
        let mut text = String::new();
        for entry in entries.flatten() {
            let log = fs::read_to_string(entry.path()).unwrap_or_default();
            let lines: Vec<&str> = log.lines().collect();
            text += &format!("--- {}\n", entry.file_name().to_string_lossy());
            text += &lines[lines.len().saturating_sub(15)..].join("\n");
            text += "\n";
        }
        text
    }
}

impl Drop for LocalCluster {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}", self.logs());
        }
        // What is stopped cannot end.
        for pid in self.processes() {
            let _ = kill(pid, Signal::SIGCONT);
        }
        if let Ok(mut down) = self.command(&["down", "--delete"]) {
            let _ = down.output();
        }
        let _ = self.kill_all(|_| {});
    }
}

/// A small generator of numbers for tests: the same seed gives the same test.
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    /// Seeded by `$ADDAX_TEST_SEED`, else by the time; says the seed.
    pub fn seeded() -> Self {
        let given = std::env::var("ADDAX_TEST_SEED").ok().and_then(|text| text.parse().ok());
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        let seed = given.unwrap_or_else(|| u64::from(now.subsec_nanos()) ^ now.as_secs());
        println!("ADDAX_TEST_SEED={seed}");
        Self::new(seed)
    }

    /// Of a seed.
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The seed that gives what comes next.
    pub const fn seed(&self) -> u64 {
        self.0
    }

    /// A number below `end`.
    pub fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % end.max(1)
    }

    /// Any order.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, usize::try_from(self.below(last as u64 + 1)).unwrap_or(0));
        }
    }
}

/// Time that a process has had on processors, in clock ticks.
pub fn cpu_ticks(pid: Pid) -> u64 {
    u32::try_from(pid.as_raw()).ok().and_then(procfs::cpu_ticks).unwrap_or(0)
}

/// What a process of a cluster is, in short: program, role, node.
pub fn program_name(pid: Pid) -> String {
    let args = arguments(pid);
    let short = |arg: &String| arg.rsplit('/').next().unwrap_or_default().to_owned();
    let paths =
        args.iter().skip(1).filter(|arg| arg.ends_with(".sock") || (!arg.contains('/') && !arg.starts_with('-')));
    args.first().into_iter().chain(paths).map(short).collect::<Vec<_>>().join(" ")
}

/// Kills what `find` finds, until it finds nothing.
fn end_all(mut find: impl FnMut() -> Vec<Pid>) -> Result<()> {
    let until = Instant::now() + PATIENCE;
    loop {
        let found = find();
        if found.is_empty() {
            return Ok(());
        }
        for pid in &found {
            let _ = kill(*pid, Signal::SIGKILL);
        }
        ensure!(Instant::now() < until, "processes do not end: {found:?}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn processes_of(dir: &Path) -> Vec<Pid> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    let text = dir.to_string_lossy().into_owned();
    let pids = entries.flatten().filter_map(|e| e.file_name().to_str()?.parse::<i32>().ok()).map(Pid::from_raw);
    pids.filter(|pid| {
        let at = fs::read_link(format!("/proc/{pid}/cwd")).unwrap_or_default();
        at.starts_with(dir) || arguments(*pid).iter().any(|arg| arg.contains(&text))
    })
    .collect()
}

/// A process's arguments; none of one that has ended and was not waited for.
pub fn arguments(pid: Pid) -> Vec<String> {
    let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    line.split(|b| *b == 0).filter(|arg| !arg.is_empty()).map(|arg| String::from_utf8_lossy(arg).into_owned()).collect()
}

fn start_time(pid: u32) -> Option<String> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    procfs::parse_stat(&stat)?.get(19).map(|time| (*time).to_owned())
}
