//! Does what a script says to a local cluster, and undoes it.
//!
//! *Invariants.* What has begun is undone by [`Faults::end`] of the same kind; [`Faults::end_all`] undoes what is left and
//! starts what does not run. A process that ended meanwhile is no error: others may have killed it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};

use super::script::Kind;
use crate::cluster::{LocalCluster, PATIENCE, arguments};

/// A data plane that is slow: it is stopped for the first and runs for the second time, in turns.
const SLOW: (Duration, Duration) = (Duration::from_millis(40), Duration::from_millis(10));
/// What a slow network carries, in Mbit/s.
const NARROW_MBIT: u32 = 40;
/// Name of what fills a disk.
const FILLER: &str = "filler";

/// What is wrong with a cluster; see the module.
#[derive(Debug)]
pub struct Faults<'a> {
    cluster: &'a LocalCluster,
    stopped: BTreeMap<Kind, Vec<Pid>>,
    slow: BTreeMap<Kind, Slow>,
    now: Vec<Kind>,
}

impl<'a> Faults<'a> {
    /// For a cluster with a network of its own.
    #[must_use]
    pub const fn new(cluster: &'a LocalCluster) -> Self {
        Self { cluster, stopped: BTreeMap::new(), slow: BTreeMap::new(), now: Vec::new() }
    }

    /// Lets something go wrong.
    ///
    /// # Errors
    /// When it cannot be done.
    pub fn begin(&mut self, kind: Kind) -> Result<()> {
        self.now.push(kind);
        let cluster = self.cluster;
        match kind {
            Kind::KillEngine(number) => send(&engine(cluster, number), Signal::SIGKILL),
            Kind::KillAgent(number) => send(&cluster.processes_of_role(&node(number), "agent"), Signal::SIGKILL),
            Kind::KillManager(number) => send(&cluster.processes_of_role(&node(number), "manager"), Signal::SIGKILL),
            Kind::KillNode(number) => cluster.kill_node(&node(number))?,
            Kind::StopEngine(number) => self.stop(kind, engine(cluster, number)),
            Kind::StopNode(number) => self.stop(kind, cluster.node_processes(&node(number))),
            Kind::KillApi => send(&api_server(cluster), Signal::SIGKILL),
            Kind::HoldApi(number) => cluster.door(&node(number))?.shut(),
            Kind::Part(one, other) => cluster.net()?.part(&node(one), &node(other))?,
            Kind::Cut(from, to) => cluster.net()?.cut(&node(from), &node(to))?,
            Kind::Slow(number) => drop(self.slow.insert(kind, Slow::start(engine(cluster, number)))),
            Kind::Narrow(number) => cluster.net()?.narrow(&node(number), NARROW_MBIT)?,
            Kind::Fill(number) => match fill(cluster, &node(number)) {
                Ok(mib) => println!("            {mib} MiB are taken"),
                // A data plane that is just being started has no room to take.
                Err(error) => println!("            no room is taken: {error:#}"),
            },
            Kind::PowerCut => cluster.kill_all(|_| {})?,
        }
        Ok(())
    }

    /// Undoes it.
    ///
    /// # Errors
    /// When it cannot be undone.
    pub fn end(&mut self, kind: Kind) -> Result<()> {
        self.now.retain(|other| *other != kind);
        let cluster = self.cluster;
        match kind {
            Kind::KillEngine(_) => {}
            Kind::KillAgent(number) | Kind::KillManager(number) | Kind::KillNode(number) => {
                cluster.start_node(&node(number))?;
            }
            Kind::StopEngine(_) | Kind::StopNode(_) => {
                send(&self.stopped.remove(&kind).unwrap_or_default(), Signal::SIGCONT);
            }
            Kind::KillApi => start_api(cluster)?,
            Kind::HoldApi(number) => cluster.door(&node(number))?.unlock(),
            Kind::Part(one, other) => {
                cluster.net()?.lift(&node(one), &node(other))?;
                cluster.net()?.lift(&node(other), &node(one))?;
            }
            Kind::Cut(from, to) => cluster.net()?.lift(&node(from), &node(to))?,
            Kind::Slow(_) => drop(self.slow.remove(&kind)),
            Kind::Narrow(number) => cluster.net()?.widen(&node(number))?,
            Kind::Fill(number) => empty(cluster, &node(number))?,
            Kind::PowerCut => {
                start_api(cluster)?;
                cluster.up_again()?;
            }
        }
        Ok(())
    }

    /// Undoes all, and starts what does not run.
    ///
    /// # Errors
    /// As [`Self::end`].
    pub fn end_all(&mut self) -> Result<()> {
        while let Some(kind) = self.now.last().copied() {
            self.end(kind)?;
        }
        start_api(self.cluster)?;
        self.cluster.up_again()
    }

    fn stop(&mut self, kind: Kind, pids: Vec<Pid>) {
        send(&pids, Signal::SIGSTOP);
        self.stopped.insert(kind, pids);
    }
}

impl Drop for Faults<'_> {
    fn drop(&mut self) {
        self.stopped.values().for_each(|pids| send(pids, Signal::SIGCONT));
    }
}

/// The name of a node.
#[must_use]
pub fn node(number: u32) -> String {
    format!("node-{number}")
}

/// None while it is being started again.
fn engine(cluster: &LocalCluster, number: u32) -> Vec<Pid> {
    cluster.engine(&node(number)).into_iter().collect()
}

fn send(pids: &[Pid], signal: Signal) {
    for pid in pids {
        // It may have ended.
        let _ = kill(*pid, signal);
    }
}

fn api_server(cluster: &LocalCluster) -> Vec<Pid> {
    let is_api = |pid: &Pid| arguments(*pid).iter().any(|arg| arg == "apiserver");
    cluster.processes().into_iter().filter(is_api).collect()
}

fn start_api(cluster: &LocalCluster) -> Result<()> {
    if api_server(cluster).is_empty() {
        cluster.start("apiserver", None)?;
    }
    cluster.wait_api()
}

/// The store of a node's first disk, as its data plane shows it.
fn store(cluster: &LocalCluster, node: &str) -> Result<Value> {
    let mut all = cluster.rpc(node, "bdev_lvol_get_lvstores", Value::Null)?;
    let first = all.get_mut(0).map(Value::take);
    first.with_context(|| format!("{node} has no disk"))
}

/// Takes all room of a disk; how much, in MiB.
fn fill(cluster: &LocalCluster, node: &str) -> Result<u64> {
    let store = store(cluster, node)?;
    let number = |name: &str| store[name].as_u64().with_context(|| format!("no {name} in {store}"));
    let mib = (number("free_clusters")? * number("cluster_size")?) >> 20;
    ensure!(mib > 0, "the disk is full");
    let lvol = json!({"lvs_name": store["name"], "lvol_name": FILLER, "size_in_mib": mib, "thin_provision": false});
    cluster.rpc(node, "bdev_lvol_create", lvol)?;
    Ok(mib)
}

/// Gives it back, if it was taken.
fn empty(cluster: &LocalCluster, node: &str) -> Result<()> {
    let until = Instant::now() + PATIENCE;
    loop {
        // Its data plane may be on its way back.
        let done = store(cluster, node).and_then(|store| {
            let name = format!("{}/{FILLER}", store["name"].as_str().context("a store without a name")?);
            let found = cluster.rpc(node, "bdev_get_bdevs", Value::Null)?;
            let is_filler = |bdev: &Value| bdev["aliases"].as_array().is_some_and(|all| all.contains(&json!(name)));
            if found.as_array().is_some_and(|all| all.iter().any(is_filler)) {
                cluster.rpc(node, "bdev_lvol_delete", json!({"name": name}))?;
            }
            Ok(())
        });
        match done {
            Err(error) if Instant::now() > until => return Err(error.context(format!("make room on {node}"))),
            Err(_) => std::thread::sleep(Duration::from_millis(100)),
            Ok(()) => return Ok(()),
        }
    }
}

/// Processes that run a part of the time only, until this is dropped.
#[derive(Debug)]
struct Slow {
    over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Slow {
    fn start(pids: Vec<Pid>) -> Self {
        let over = Arc::new(AtomicBool::new(false));
        let ends = Arc::clone(&over);
        let thread = std::thread::spawn(move || {
            while !ends.load(Ordering::Relaxed) {
                send(&pids, Signal::SIGSTOP);
                std::thread::sleep(SLOW.0);
                send(&pids, Signal::SIGCONT);
                std::thread::sleep(SLOW.1);
            }
        });
        Self { over, thread: Some(thread) }
    }
}

impl Drop for Slow {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
