//! What an idle cluster costs: three nodes and one attached volume that nobody uses, as the share of one processor that
//! all processes together take.
//!
//! The bound is generous, since other programs share the machine; the figure is what matters, and it is printed.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::io::Write as _;
use std::time::{Duration, Instant};

use e2e::cluster::{LocalCluster, cpu_ticks, program_name};
use nix::unistd::{SysconfVar, sysconf};

const PERIOD: Duration = Duration::from_secs(10);
const BOUND_PERCENT: f64 = 12.0;

#[test]
fn an_idle_cluster_with_an_attached_volume_hardly_uses_a_processor() {
    let cluster = LocalCluster::up(3).unwrap();
    cluster.create("idle", 64).unwrap();
    cluster.attach("idle", "node-1", 60).unwrap();
    cluster.wait_healthy("idle", 3).unwrap();
    // What the attachment has set going comes to rest.
    std::thread::sleep(Duration::from_secs(3));

    let ticks = || -> BTreeMap<_, _> { cluster.processes().into_iter().map(|pid| (pid, cpu_ticks(pid))).collect() };
    let (started, before) = (Instant::now(), ticks());
    std::thread::sleep(PERIOD);
    let (after, period) = (ticks(), started.elapsed().as_secs_f64());
    assert_eq!(before.len(), 10, "API server, and manager, agent and data plane of each node: {before:?}");
    assert!(before.keys().eq(after.keys()), "processes have come or gone: {before:?}, {after:?}");

    let per_second = f64::from(u32::try_from(sysconf(SysconfVar::CLK_TCK).unwrap().unwrap()).unwrap());
    let percent = |ticks: u64| ticks as f64 / per_second / period * 100.0;
    for (pid, ticks) in &after {
        println!("{:5.1} %  {}", percent(ticks - before[pid]), program_name(*pid));
    }
    let all = percent(after.values().sum::<u64>() - before.values().sum::<u64>());
    // Past the capture of the test harness: the figure is the point.
    let _ = writeln!(std::io::stderr(), "an idle cluster takes {all:.1} % of one processor");
    assert!(all < BOUND_PERCENT, "{all:.1} % of one processor, at most {BOUND_PERCENT} % are allowed");
}
