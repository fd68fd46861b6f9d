//! How long I/O stands still when something dies or hangs under a volume: measured, and reported beside the goal.
//!
//! *How.* A local cluster with three copies. Where a replica dies, the host is `addax-perf` with one write at a time: the
//! longest latency is the pause. Where the engine dies, the host is a Linux kernel with a mounted ext4, and the pause the
//! longest time between two writes whose `fsync` returned (of 256 KiB, under emulation: tenths of a second in themselves).
//!
//! *When things fail.* An I/O error of the host is an error here; a pause longer than its goal is not.

use std::fmt::Write as _;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;

use crate::cluster::{HOST, LocalCluster, Target};
use crate::guest::scenario::{self, Outage, scenario_outages};
use crate::guest::{Guest, HOST_ADDRESS, nvme};
use crate::load::Load;

const COPIES: usize = 3;
/// The node of the engine, whose address the guest can reach, and that of the replica that suffers.
const ENGINE_NODE: &str = "node-1";
const REPLICA_NODE: &str = "node-3";
/// Load before something happens.
const BEFORE: Duration = Duration::from_secs(2);
/// Load after it: longer than any pause that is worth a figure.
const AFTER: Duration = Duration::from_secs(12);
const COMMAND_TIMEOUT: Duration = Duration::from_secs(60);

/// What was measured of one kind of accident.
#[derive(Debug, Clone, PartialEq)]
pub struct Figure {
    /// What happened.
    pub accident: &'static str,
    /// The longest pause that is meant to be.
    pub goal: Duration,
    /// The pause of each run.
    pub pauses: Vec<Duration>,
}

impl Figure {
    fn median(&self) -> Duration {
        let mut sorted = self.pauses.clone();
        sorted.sort();
        sorted.get(sorted.len() / 2).copied().unwrap_or_default()
    }

    fn longest(&self) -> Duration {
        self.pauses.iter().copied().max().unwrap_or_default()
    }
}

/// Measures everything, so many times each.
///
/// # Errors
/// When a host meets an I/O error, or something cannot be measured.
pub fn measure(runs: usize) -> Result<Vec<Figure>> {
    let cluster = LocalCluster::up(3)?;
    cluster.create("pauses", 256)?;
    let target = cluster.attach("pauses", ENGINE_NODE, 60)?;
    let kill = |cluster: &LocalCluster| LocalCluster::signal(&[cluster.engine(REPLICA_NODE)?], Signal::SIGKILL);
    let stop = |cluster: &LocalCluster| LocalCluster::signal(&[cluster.engine(REPLICA_NODE)?], Signal::SIGSTOP);
    let dies = replica_suffers(&cluster, &target, runs, kill).context("a replica's process dies")?;
    let hangs = replica_suffers(&cluster, &target, runs, stop).context("a replica's process hangs")?;
    cluster.cli(&["volume", "detach", "pauses"])?;
    let engine = engine_dies(&cluster, runs).context("the engine dies")?;
    let figure = |accident, goal_s, pauses| Figure { accident, goal: Duration::from_secs(goal_s), pauses };
    Ok(vec![
        figure("the process of a replica is killed (SIGKILL)", 1, dies),
        figure("the process of a replica hangs (SIGSTOP)", 3, hangs),
        figure("the process of the engine is killed under a mounted ext4", 3, engine),
    ])
}

fn replica_suffers(
    cluster: &LocalCluster,
    target: &Target,
    runs: usize,
    happen: impl Fn(&LocalCluster) -> Result<()>,
) -> Result<Vec<Duration>> {
    let address = target.address.parse()?;
    let load = ["--host-nqn", HOST, "--rw", "randwrite", "--bs", "4k", "--qd", "1", "--time", "5m"];
    (0..runs)
        .map(|_| {
            cluster.wait_healthy(&target.volume, COPIES)?;
            let mut load = Load::start(address, &target.nqn, &load)?;
            std::thread::sleep(BEFORE);
            happen(cluster)?;
            std::thread::sleep(AFTER);
            ensure!(load.is_running(), "the load has ended: {:#?}", load.finish());
            let done = load.stop()?;
            ensure!(done.errors == 0, "the host met errors: {:#}", done.report);
            // A process that was stopped is killed by its agent, or goes on; either way the volume has to be whole again.
            if let Ok(pid) = cluster.engine(REPLICA_NODE) {
                LocalCluster::signal(&[pid], Signal::SIGCONT)?;
            }
            let longest = done.report["total"]["latency_us"]["max"].as_f64();
            let longest = longest.with_context(|| format!("no latency in {:#}", done.report))?;
            Ok(Duration::from_secs_f64(longest / 1e6))
        })
        .collect()
}

fn engine_dies(cluster: &LocalCluster, runs: usize) -> Result<Vec<Duration>> {
    let guest = Guest::boot(scenario::config()?)?;
    let host = guest.check("cat /etc/nvme/hostnqn", COMMAND_TIMEOUT)?;
    let attach = ["volume", "attach", "pauses", "--node", ENGINE_NODE, "--host-nqn", host.trim()];
    let endpoint = cluster.json(&attach)?[0].take();
    let port = endpoint["trsvcid"].as_u64().context("no trsvcid")?;
    let nqn = endpoint["nqn"].as_str().context("no nqn")?.to_owned();
    let path = nvme::Target { traddr: HOST_ADDRESS.to_owned(), port: u16::try_from(port)?, nqn };
    let die = || {
        cluster.wait_healthy("pauses", COPIES)?;
        let before = cluster.epoch("pauses")?;
        LocalCluster::signal(&[cluster.engine(ENGINE_NODE)?], Signal::SIGKILL)?;
        let again = |found: &serde_json::Value| {
            let status = &found["status"];
            status["config"]["epoch"].as_u64() > Some(before) && status["state"] == "attached"
        };
        cluster.wait("pauses", "open again with a new epoch", again).map(drop)
    };
    let mut outages: Vec<Outage<'_>> = (0..runs).map(|_| Outage::new("engine killed", die)).collect();
    scenario_outages(&guest, &path, &mut outages)
}

/// The figures as a Markdown table.
#[must_use]
pub fn report(figures: &[Figure]) -> String {
    let mut out = String::from("| What happens | Goal | Median | Longest | Runs |\n|---|---|---|---|---|\n");
    for figure in figures {
        let (goal, median, longest) = (figure.goal, figure.median(), figure.longest());
        let mark = if longest > goal { "**" } else { "" };
        // Writing to a string does not fail.
        let _ = writeln!(
            out,
            "| {} | ≤ {} s | {:.2} s | {mark}{:.2} s{mark} | {} |",
            figure.accident,
            goal.as_secs(),
            median.as_secs_f64(),
            longest.as_secs_f64(),
            figure.pauses.len()
        );
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pause_beyond_its_goal_is_marked() {
        let pauses = |ms: &[u64]| ms.iter().map(|ms| Duration::from_millis(*ms)).collect();
        let goal = Duration::from_secs(1);
        let figures = [
            Figure { accident: "a", goal, pauses: pauses(&[300, 900, 100]) },
            Figure { accident: "b", goal, pauses: pauses(&[300, 1100, 200]) },
        ];
        let text = report(&figures);
        assert!(text.contains("| a | ≤ 1 s | 0.30 s | 0.90 s | 3 |"), "{text}");
        assert!(text.contains("| b | ≤ 1 s | 0.30 s | **1.10 s** | 3 |"), "{text}");
    }
}
