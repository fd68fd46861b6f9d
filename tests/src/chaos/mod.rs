//! A soak: a cluster with volumes under a load that judges, to which a seeded script does everything that can happen to
//! processes, networks and disks.
//!
//! *Course.* Rounds. In each the script of the seed and the round's number ([`script`]) is done ([`faults`]); then all is
//! undone, the volumes must become healthy, and memory is looked at. At the end the hosts must have seen no error and
//! nothing wrong, all that was written is read back, and the copies of each volume are equal on their disks.
//!
//! *Disks are filled* only after every block of the volumes was written once, so that a full disk takes nothing from a host
//! that it was promised.
//!
//! *When things fail.* The error says the seed, the round and what was the matter; what was done is on standard output, one
//! line each, with the time.

pub mod faults;
pub mod script;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use addax_perf::plane::procfs;
use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

use self::faults::{Faults, node};
use self::script::{Fault, script};
use crate::cluster::{Load, LocalCluster, PATIENCE, Random, Target, program_name};

const NODES: u32 = 3;
const COPIES: usize = 3;
/// What copies are compared by.
const BLOCK: usize = 4096;
/// How long the volumes may take to become healthy after a round.
const HEALING: Duration = Duration::from_secs(240);
/// Memory that all processes together may have gained at the end, beyond a quarter of what they had after the first round.
const MEMORY_SLACK: u64 = 64 << 20;

/// How much chaos.
#[derive(Debug, Clone)]
pub struct Config {
    /// Of the scripts.
    pub seed: u64,
    /// Volumes with three copies each, spread over the nodes.
    pub volumes: u32,
    /// Size of each.
    pub mib: u32,
    /// I/Os per second on each.
    pub rate: u32,
    /// How long a round's script is.
    pub round: Duration,
    /// How long to begin new rounds.
    pub time: Duration,
}

/// What was done and seen.
#[derive(Debug, Clone, Default)]
pub struct Outcome {
    /// Rounds that were done.
    pub rounds: u32,
    /// Faults by name.
    pub faults: BTreeMap<&'static str, u32>,
    /// I/Os of all hosts that have succeeded.
    pub ios: u64,
    /// Connections of hosts that were lost and came back.
    pub reconnects: u64,
    /// The longest time in which a host with I/O outstanding got no answer, in seconds.
    pub longest_pause_s: f64,
    /// The longest time from the end of a script until all volumes were healthy.
    pub longest_healing: Duration,
    /// Memory of all processes after each round, in bytes.
    pub memory: Vec<u64>,
}

impl Outcome {
    /// As a few lines of text.
    #[must_use]
    pub fn report(&self) -> String {
        let mib = |bytes: Option<&u64>| bytes.copied().unwrap_or(0) >> 20;
        let mut out = format!(
            "{} rounds, {} I/Os, {} reconnects, longest pause {:.1} s, longest healing {:.1} s, memory {} MiB after the \
             first and {} MiB after the last round\n",
            self.rounds,
            self.ios,
            self.reconnects,
            self.longest_pause_s,
            self.longest_healing.as_secs_f64(),
            mib(self.memory.first()),
            mib(self.memory.last()),
        );
        for (name, count) in &self.faults {
            // Writing to a string does not fail.
            let _ = writeln!(out, "{count:5}  {name}");
        }
        out
    }
}

/// Runs a soak. None, said loudly, where networks cannot be made.
///
/// # Errors
/// Whatever is not as it must be, with the seed.
pub fn run(config: &Config) -> Result<Option<Outcome>> {
    println!("seed {}: {} volumes of {} MiB, rounds of {:?}", config.seed, config.volumes, config.mib, config.round);
    let Some(cluster) = LocalCluster::apart(NODES)? else { return Ok(None) };
    let mut soak = Soak::begin(config, &cluster)?;
    let done = soak.rounds().and_then(|()| soak.finish());
    if done.is_err() {
        eprintln!("{}", cluster.logs());
    }
    done.with_context(|| format!("seed {}, round {}", config.seed, soak.outcome.rounds))?;
    Ok(Some(soak.outcome))
}

/// A volume with its host.
struct Volume {
    /// The node that serves it.
    node: String,
    target: Target,
    log: PathBuf,
    load: Option<Load>,
}

struct Soak<'a> {
    config: &'a Config,
    cluster: &'a LocalCluster,
    faults: Faults<'a>,
    volumes: Vec<Volume>,
    outcome: Outcome,
    began: Instant,
    _logs: tempfile::TempDir,
}

impl<'a> Soak<'a> {
    /// Volumes that were written once, each with a load.
    fn begin(config: &'a Config, cluster: &'a LocalCluster) -> Result<Self> {
        let (began, logs) = (Instant::now(), tempfile::tempdir()?);
        let mut volumes = Vec::new();
        for number in 0..config.volumes {
            let name = format!("chaos-{number}");
            // Nodes that have just come say only after a moment that they and their disks are ready.
            while let Err(error) = cluster.create(&name, config.mib) {
                ensure!(error.to_string().contains("has no room") && began.elapsed() < PATIENCE, "{error:#}");
                std::thread::sleep(Duration::from_millis(100));
            }
            let node = node(1 + number % NODES);
            let target = cluster.attach(&name, &node, 60)?;
            let log = logs.path().join(&name);
            let size = format!("{}M", config.mib);
            let fill = ["--phase", "write", "--rw", "write", "--bs", "64k", "--size", &size];
            let done = target.verify(&log, &fill)?.finish()?;
            ensure!(done.code == Some(0), "{name} is not written: {done:#?}");
            volumes.push(Volume { node, target, log, load: None });
        }
        let (faults, outcome) = (Faults::new(cluster), Outcome::default());
        let mut soak = Self { config, cluster, faults, volumes, outcome, began, _logs: logs };
        soak.healthy()?;
        let (rate, time) = (config.rate.to_string(), config.time.as_secs() + 7200);
        let time = format!("{time}s");
        let load = ["--phase", "write", "--rw", "randrw", "--mix", "50", "--bs", "16k", "--qd", "4", "--time", &time];
        let more = ["--rate", &rate, "--ctrl-loss-timeout", &time];
        for volume in &mut soak.volumes {
            volume.load = Some(volume.target.verify(&volume.log, &[&load[..], &more].concat())?);
        }
        soak.tell("all volumes are written once and healthy");
        Ok(soak)
    }

    fn tell(&self, what: &str) {
        println!("{:8.1} s  {what}", self.began.elapsed().as_secs_f64());
    }

    fn rounds(&mut self) -> Result<()> {
        let began = Instant::now();
        while self.outcome.rounds == 0 || began.elapsed() < self.config.time {
            let round = self.outcome.rounds;
            let mut random = Random::new(self.config.seed.wrapping_add(u64::from(round) << 32));
            self.tell(&format!("round {round}"));
            self.act(&script(&mut random, NODES, self.config.round))?;
            self.outcome.rounds += 1;
        }
        Ok(())
    }

    fn act(&mut self, script: &[Fault]) -> Result<()> {
        let began = Instant::now();
        // Ends come before begins of the same moment, which may be of the same node.
        let mut steps: Vec<(Duration, bool, Fault)> = Vec::new();
        for fault in script {
            steps.extend([(fault.begin, true, *fault), (fault.end, false, *fault)]);
        }
        steps.sort_by_key(|(at, begins, _)| (*at, *begins));
        for (at, begins, fault) in steps {
            while began.elapsed() < at {
                std::thread::sleep((at - began.elapsed()).min(Duration::from_millis(100)));
            }
            self.tell(&format!("{}: {}", if begins { "begin" } else { "end" }, fault.kind));
            if begins {
                *self.outcome.faults.entry(fault.kind.name()).or_default() += 1;
                self.faults.begin(fault.kind).with_context(|| fault.kind.to_string())?;
            } else {
                self.faults.end(fault.kind).with_context(|| format!("end of: {}", fault.kind))?;
            }
            self.hosts_run()?;
        }
        self.faults.end_all()?;
        let ended = Instant::now();
        self.healthy()?;
        self.outcome.longest_healing = self.outcome.longest_healing.max(ended.elapsed());
        self.remember_memory();
        Ok(())
    }

    /// A host ends only when something is wrong.
    fn hosts_run(&mut self) -> Result<()> {
        for volume in &mut self.volumes {
            let Some(load) = &mut volume.load else { continue };
            if !load.is_running() {
                let done = volume.load.take().map(Load::finish).transpose()?;
                bail!("the host of {} has ended: {done:#?}", volume.target.volume);
            }
        }
        Ok(())
    }

    fn healthy(&mut self) -> Result<()> {
        let until = Instant::now() + HEALING;
        let is_healthy = |volume: &Value| {
            let status = &volume["status"];
            let in_sync = status["config"]["inSync"].as_array().map_or(0, Vec::len);
            status["state"] == "attached" && status["robustness"] == "healthy" && in_sync == COPIES
        };
        loop {
            self.hosts_run()?;
            let all = self.cluster.json(&["volume", "ls"])?;
            let sick: Vec<&Value> = all.as_array().into_iter().flatten().filter(|volume| !is_healthy(volume)).collect();
            if sick.is_empty() {
                self.tell("all volumes are healthy");
                return Ok(());
            }
            ensure!(Instant::now() < until, "{} volumes do not become healthy: {:#}", sick.len(), sick[0]);
            std::thread::sleep(Duration::from_millis(250));
        }
    }

    /// Waits until no region is left in which members may differ.
    fn equal(&self, volume: &Volume) -> Result<()> {
        let (until, name) = (Instant::now() + HEALING, json!({"name": format!("v.{}", volume.target.volume)}));
        loop {
            let mirror = self.cluster.rpc(&volume.node, "addax_mirror_get", name.clone())?[0].take();
            if mirror["inherited_regions"] == 0 {
                return Ok(());
            }
            ensure!(Instant::now() < until, "members are not made equal: {mirror:#}");
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    fn remember_memory(&mut self) {
        let of = |pid: nix::unistd::Pid| u32::try_from(pid.as_raw()).ok().and_then(procfs::rss_bytes).unwrap_or(0);
        let mut all: Vec<(u64, String)> =
            self.cluster.processes().into_iter().map(|pid| (of(pid), program_name(pid))).collect();
        all.sort();
        let total: u64 = all.iter().map(|(bytes, _)| bytes).sum();
        let largest = all.iter().rev().take(4).map(|(bytes, name)| format!("{name} {} MiB", bytes >> 20));
        let largest = largest.collect::<Vec<_>>().join(", ");
        self.tell(&format!("memory: {} MiB in {} processes; {largest}", total >> 20, all.len()));
        self.outcome.memory.push(total);
    }

    /// What the hosts have seen, what is on the volumes, what is on the disks.
    fn finish(&mut self) -> Result<()> {
        for volume in &mut self.volumes {
            let name = &volume.target.volume;
            let mut load = volume.load.take().with_context(|| format!("{name} has no load"))?;
            load.signal(Signal::SIGTERM)?;
            let done = load.finish()?;
            let (write, mismatches) = (&done.report["write"], &done.report["mismatches_total"]);
            ensure!(done.code == Some(0) && write["errors"] == 0 && *mismatches == 0, "host of {name}: {done:#?}");
            self.outcome.ios += write["total"]["ios"].as_u64().unwrap_or(0);
            self.outcome.reconnects += write["reconnects"].as_u64().unwrap_or(0);
            for pause in write["pauses"].as_array().into_iter().flatten() {
                let length = pause["length_s"].as_f64().unwrap_or(0.0);
                self.outcome.longest_pause_s = self.outcome.longest_pause_s.max(length);
            }
        }
        self.tell("the hosts have ended, without an error");
        for volume in &self.volumes {
            let Volume { target, log, .. } = volume;
            target.check(log, &[])?;
            self.equal(volume)?;
            self.cluster.cli(&["volume", "detach", &target.volume])?;
        }
        self.tell("all is read back");
        for Volume { target, .. } in &self.volumes {
            let images = self.cluster.images(&target.volume, &[])?;
            ensure!(images.len() == COPIES, "{}: {} copies", target.volume, images.len());
            let first = &images[0].1;
            for (name, image) in &images[1..] {
                let differ = |(number, pair): (usize, (&[u8], &[u8]))| (pair.0 != pair.1).then_some(number);
                let blocks: Vec<usize> =
                    first.chunks(BLOCK).zip(image.chunks(BLOCK)).enumerate().filter_map(differ).collect();
                let some = &blocks[..blocks.len().min(20)];
                ensure!(blocks.is_empty(), "{} blocks of {name} and {} differ: {some:?} …", blocks.len(), images[0].0);
            }
        }
        self.tell("the copies are equal");
        let (first, last) = (self.outcome.memory.first(), self.outcome.memory.last());
        let (first, last) = (first.copied().unwrap_or(0), last.copied().unwrap_or(0));
        ensure!(last <= first + first / 4 + MEMORY_SLACK, "memory grows: {:?} bytes", self.outcome.memory);
        Ok(())
    }
}
