//! What the tests share: the cluster, and a volume under a load that judges.
//!
//! *Invariants.* At the beginning of a scene everything runs and nothing is cut, held or stopped. The cluster is removed
//! when this process ends, however it ends.

use std::ops::Deref;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use e2e::cluster::{Load, LocalCluster, Target};
use e2e::door::{Catch, Door};
use e2e::netns::{Reaper, skipped};
use nix::sys::signal::Signal;
use nix::unistd::Pid;
use serde_json::{Value, json};

/// How long anything may take that a test waits for.
pub const PATIENCE: Duration = Duration::from_secs(90);

/// Reads and writes all over the volume, until the load is ended.
pub const MIXED: [&str; 8] = ["--rw", "randrw", "--mix", "30", "--bs", "16k", "--qd", "16"];
/// Reads and writes of the same few blocks: they overlap all the time.
pub const HOT: [&str; 10] = ["--rw", "randrw", "--mix", "50", "--bs", "8k", "--qd", "32", "--range", "256k"];

const NODES: u32 = 3;
/// Kills what has the cluster's folder among its arguments, and removes that. The variable keeps the shell itself, whose
/// arguments are this text, from being taken for one.
const CLEAN_UP: &str = r#"
for turn in 1 2 3 4 5 6 7 8 9 10; do
  for process in /proc/[0-9]*; do
    grep -qsF "$ADDAX_TEST_DIR" "$process/cmdline" && kill -9 "${process#/proc/}"
  done
  sleep 0.1
done
rm -rf "$ADDAX_TEST_DIR"
"#;

struct Shared {
    cluster: LocalCluster,
    _reaper: Reaper,
}

static SHARED: Mutex<Option<Shared>> = Mutex::new(None);

/// The cluster, for one test at a time.
pub struct Turn {
    guard: MutexGuard<'static, Option<Shared>>,
}

impl Deref for Turn {
    type Target = LocalCluster;

    fn deref(&self) -> &LocalCluster {
        &self.guard.as_ref().unwrap().cluster
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        if std::thread::panicking() {
            // Nobody knows in what state it is. Its end prints its logs.
            self.guard.take();
        }
    }
}

/// The cluster with everything running. None where there can be no network to cut, which is said loudly.
pub fn turn() -> Option<Turn> {
    let mut guard = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(shared) = &*guard {
        let cluster = &shared.cluster;
        cluster.net().unwrap().heal().unwrap();
        (1..=NODES).for_each(|number| cluster.door(&node(number)).unwrap().unlock());
        cluster.up_again().unwrap();
    } else {
        let Some(cluster) = LocalCluster::apart(NODES).unwrap() else {
            skipped("the crash table");
            return None;
        };
        let folder = cluster.dir().parent().unwrap().to_str().unwrap().to_owned();
        let reaper = Reaper::start(CLEAN_UP, &[("ADDAX_TEST_DIR", &folder)]).unwrap();
        *guard = Some(Shared { cluster, _reaper: reaper });
    }
    Some(Turn { guard })
}

pub fn node(number: u32) -> String {
    format!("node-{number}")
}

pub fn in_sync(volume: &Value) -> usize {
    volume["status"]["config"]["inSync"].as_array().map_or(0, Vec::len)
}

pub fn rebuilding(volume: &Value) -> usize {
    volume["status"]["config"]["rebuilding"].as_array().map_or(0, Vec::len)
}

pub fn number(volume: &Value, name: &str) -> u64 {
    volume["status"]["config"][name].as_u64().unwrap()
}

/// A volume with three copies, or with copies on some nodes only, attached to a node.
pub struct Scene {
    pub cluster: Turn,
    pub volume: String,
    pub target: Target,
    pub log: PathBuf,
    copies: usize,
    disabled: Vec<(String, String)>,
    /// More files on which copies are.
    pub more_disks: Vec<PathBuf>,
    began: Instant,
    _logs: tempfile::TempDir,
}

impl Scene {
    /// With a copy on every node, served by `node-1`.
    pub fn new(cluster: Turn, volume: &str) -> Self {
        Self::on(cluster, volume, &[], 3, &[])
    }

    /// With copies that are not on the given disks, made with more arguments, served by `node-1`.
    pub fn on(cluster: Turn, volume: &str, not: &[(&str, &str)], copies: usize, more: &[&str]) -> Self {
        let began = Instant::now();
        not.iter().for_each(|(node, disk)| drop(cluster.cli(&["disk", "disable", node, disk]).unwrap()));
        let count = copies.to_string();
        let create = ["volume", "create", volume, "--size", "64MiB", "--replicas", &count];
        // Nodes that have just come say only after a moment that they and their disks are ready.
        while let Err(error) = cluster.cli(&[&create[..], more].concat()) {
            assert!(error.to_string().contains("has no room") && began.elapsed() < PATIENCE, "{error:#}");
            std::thread::sleep(Duration::from_millis(100));
        }
        let target = cluster.attach(volume, "node-1", 60).unwrap();
        cluster.wait_healthy(volume, copies).unwrap();
        let logs = tempfile::tempdir().unwrap();
        let disabled = not.iter().map(|(node, disk)| ((*node).to_owned(), (*disk).to_owned())).collect();
        let (volume, log) = (volume.to_owned(), logs.path().join("writes.wlog"));
        let scene = Self { cluster, volume, target, log, copies, disabled, more_disks: Vec::new(), began, _logs: logs };
        scene.tell("healthy");
        scene
    }

    /// Says when what was reached.
    pub fn tell(&self, what: &str) {
        println!("{:6.2} s  {what}", self.began.elapsed().as_secs_f64());
    }

    /// Starts a load that runs until it is ended, and waits until it writes.
    pub fn load(&self, kind: &[&str]) -> Load {
        let load = self.target.verify(&self.log, &[&["--phase", "write", "--time", "10m"], kind].concat()).unwrap();
        self.wait_writes(200);
        load
    }

    /// Bytes of the write log, which grows with every acknowledgement.
    pub fn acknowledged(&self) -> u64 {
        std::fs::metadata(&self.log).map_or(0, |data| data.len())
    }

    /// Waits for so many acknowledgements more.
    pub fn wait_writes(&self, count: u64) {
        // The log is compacted beyond 64 MiB only, which no test here reaches.
        let wanted = self.acknowledged() + count * addax_perf::verify::record::RECORD_BYTES as u64;
        let until = Instant::now() + PATIENCE;
        while self.acknowledged() < wanted {
            assert!(Instant::now() < until, "nothing is acknowledged");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits until nothing has been acknowledged for so long.
    pub fn wait_silence(&self, length: Duration) {
        let until = Instant::now() + PATIENCE;
        let (mut seen, mut since) = (self.acknowledged(), Instant::now());
        while since.elapsed() < length {
            std::thread::sleep(Duration::from_millis(10));
            let now = self.acknowledged();
            if now != seen {
                (seen, since) = (now, Instant::now());
            }
            assert!(Instant::now() < until, "acknowledgements go on");
        }
    }

    /// Asserts that nothing is acknowledged for so long, from now on.
    pub fn assert_silence(&self, length: Duration) {
        let before = self.acknowledged();
        std::thread::sleep(length);
        assert_eq!(self.acknowledged(), before, "something was acknowledged");
    }

    /// Ends a load, which must have seen no error and nothing wrong.
    pub fn end_load(&self, mut load: Load) {
        assert!(load.is_running(), "the host has given up: {:#?}", load.finish());
        load.signal(Signal::SIGTERM).unwrap();
        let done = load.finish().unwrap();
        let write = &done.report["write"];
        assert_eq!(done.code, Some(0), "{done:#?}");
        assert_eq!((&write["errors"], &done.report["mismatches_total"]), (&json!(0), &json!(0)), "{done:#?}");
        self.tell(&format!("the load has ended: {} reconnects", write["reconnects"]));
    }

    /// The volume, once it is as wanted.
    pub fn wait(&self, what: &str, holds: impl Fn(&Value) -> bool) -> Value {
        let found = self.cluster.wait(&self.volume, what, holds).unwrap();
        self.tell(what);
        found
    }

    /// The record as it is.
    pub fn record(&self) -> Value {
        self.cluster.volume(&self.volume).unwrap()
    }

    /// The mirror as the engine on `node-1` has it; null while there is none.
    pub fn mirror(&self) -> Value {
        let name = json!({"name": format!("v.{}", self.volume)});
        self.cluster.rpc("node-1", "addax_mirror_get", name).map_or(Value::Null, |mut found| found[0].take())
    }

    /// Waits until the mirror is as wanted.
    pub fn wait_mirror(&self, what: &str, holds: impl Fn(&Value) -> bool) -> Value {
        let until = Instant::now() + PATIENCE;
        loop {
            let found = self.mirror();
            if holds(&found) {
                self.tell(what);
                return found;
            }
            assert!(Instant::now() < until, "the mirror is never {what}: {found:#}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits until a program has logged the words about this volume.
    pub fn wait_log(&self, program: &str, words: &str) {
        let log = self.cluster.dir().join("log").join(format!("{program}.log"));
        let until = Instant::now() + PATIENCE;
        let has = |line: &str| line.contains(&self.volume) && line.contains(words);
        while !std::fs::read_to_string(&log).unwrap().lines().any(has) {
            assert!(Instant::now() < until, "{program} never says {words:?}");
            std::thread::sleep(Duration::from_millis(50));
        }
        self.tell(words);
    }

    /// Kills the data plane of a node, which its agent starts again.
    pub fn kill_engine(&self, node: &str) {
        LocalCluster::signal(&[self.engine(node)], Signal::SIGKILL).unwrap();
        self.tell(&format!("killed the data plane of {node}"));
    }

    /// Kills the data plane of a node and the agent that would start it again, until none is left. The manager lives: the next
    /// one would have to wait for its lease to run out.
    pub fn kill_node(&self, node: &str) {
        let managers = self.cluster.processes_of_role(node, "manager");
        let until = Instant::now() + PATIENCE;
        loop {
            let found: Vec<Pid> =
                self.cluster.node_processes(node).into_iter().filter(|pid| !managers.contains(pid)).collect();
            if found.is_empty() {
                return self.tell(&format!("killed {node}"));
            }
            // Some may have ended meanwhile.
            found.iter().for_each(|pid| drop(LocalCluster::signal(&[*pid], Signal::SIGKILL)));
            assert!(Instant::now() < until, "{node} does not end");
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    pub fn engine(&self, node: &str) -> Pid {
        self.cluster.engine(node).unwrap()
    }

    /// Kills the manager of a node.
    pub fn kill_manager(&self, node: &str) {
        LocalCluster::signal(&self.manager(node), Signal::SIGKILL).unwrap();
        self.tell(&format!("killed the manager of {node}"));
    }

    /// Kills node-2 while the answer to node-1's record of that is kept from node-1, and waits until it is.
    pub fn lose_a_member_unheard(&self) -> &Door {
        self.stop_manager("node-1");
        let door = self.cluster.door("node-1").unwrap();
        door.catch(Catch::Answer);
        self.kill_node("node-2");
        door.wait_caught(PATIENCE).unwrap();
        door
    }

    /// Stops the manager of a node, so that its agent alone writes through the node's door. The scene's end lets it go on.
    pub fn stop_manager(&self, node: &str) {
        LocalCluster::signal(&self.manager(node), Signal::SIGSTOP).unwrap();
    }

    fn manager(&self, node: &str) -> Vec<Pid> {
        let found = self.cluster.processes_of_role(node, "manager");
        assert_eq!(found.len(), 1, "managers of {node}");
        found
    }

    /// Starts what does not run and waits until all copies are in sync.
    pub fn wait_whole(&self) {
        for number in 1..=NODES {
            LocalCluster::signal(&self.cluster.processes_of_role(&node(number), "manager"), Signal::SIGCONT).unwrap();
        }
        self.cluster.up_again().unwrap();
        self.cluster.wait_healthy(&self.volume, self.copies).unwrap();
        self.tell("healthy again");
    }

    /// Reads everything that was written, and judges it.
    pub fn check(&self) {
        self.target.check(&self.log, &[]).unwrap();
        self.tell("read back");
    }

    /// The end of every scene: all is read back, the copies come in sync, all is read again, the copies are equal on their
    /// disks. Then the volume is removed.
    pub fn finish(self, load: Load) {
        self.end_load(load);
        self.check();
        self.finish_idle();
    }

    /// As [`Self::finish`], for a load that has ended.
    pub fn finish_idle(self) {
        self.wait_whole();
        self.wait_mirror("equal", |mirror| mirror["inherited_regions"] == 0 || mirror.is_null());
        self.check();
        self.cluster.cli(&["volume", "detach", &self.volume]).unwrap();
        let images = self.cluster.images(&self.volume, &self.more_disks).unwrap();
        let names: Vec<&String> = images.iter().map(|(name, _)| name).collect();
        assert_eq!(images.len(), self.copies, "{names:?}");
        assert!(images[0].1.iter().any(|byte| *byte != 0), "nothing was written");
        assert!(images.windows(2).all(|pair| pair[0].1 == pair[1].1), "the copies differ");
        self.tell("the copies are equal");
        self.cluster.cli(&["volume", "rm", &self.volume, "--yes"]).unwrap();
        for (node, disk) in &self.disabled {
            self.cluster.cli(&["disk", "enable", node, disk]).unwrap();
        }
    }
}
