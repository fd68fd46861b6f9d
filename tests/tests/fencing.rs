//! Who must not serve: a copy that missed acknowledged writes, and an engine that slept through its replacement.
#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::time::{Duration, Instant};

use addax_perf::verify::record::RECORD_BYTES;
use e2e::cluster::{Load, LocalCluster, Target};
use nix::sys::signal::Signal;
use serde_json::Value;

/// The condition of a volume.
fn condition<'a>(volume: &'a Value, type_: &str) -> &'a Value {
    let conditions = volume["status"]["conditions"].as_array().unwrap();
    conditions.iter().find(|condition| condition["type"] == type_).unwrap()
}

fn record(volume: &Value) -> &Value {
    &volume["status"]["config"]
}

fn in_sync(volume: &Value) -> usize {
    record(volume)["inSync"].as_array().map_or(0, Vec::len)
}

/// Says when what was reached.
struct Timeline(Instant);

impl Timeline {
    fn tell(&self, what: &str) {
        println!("{:6.2} s  {what}", self.0.elapsed().as_secs_f64());
    }
}

/// Writes so much and wants it to go well.
fn write(target: &Target, log: &Path, size: &str, more: &[&str]) {
    let args = [&["--phase", "write", "--rw", "randwrite", "--bs", "16k", "--size", size], more].concat();
    let done = target.verify(log, &args).unwrap().finish().unwrap();
    assert_eq!(done.code, Some(0), "{done:#?}");
}

#[test]
fn a_copy_that_missed_acknowledged_writes_serves_nobody_even_when_it_is_alone() {
    let cluster = LocalCluster::up(3).unwrap();
    let timeline = Timeline(Instant::now());
    cluster.create("away", 64).unwrap();
    let target = cluster.attach("away", "node-1", 60).unwrap();
    cluster.wait_healthy("away", 3).unwrap();
    let logs = tempfile::tempdir().unwrap();
    let log = logs.path().join("writes.wlog");
    write(&target, &log, "32M", &[]);
    cluster.kill_node("node-2").unwrap();
    write(&target, &log, "32M", &[]);
    let before = cluster.wait("away", "without node-2's copy", |found| in_sync(found) == 2).unwrap();
    timeline.tell("written without node-2");
    cluster.kill_all(|_| {}).unwrap();

    cluster.start("apiserver", None).unwrap();
    cluster.start("agent", Some("node-2")).unwrap();
    cluster.start("manager", Some("node-2")).unwrap();
    cluster.wait_api().unwrap();
    cluster.cli(&["volume", "detach", "away", "--timeout", "60"]).unwrap();
    timeline.tell("node-2 is alone; detached from the dead node");
    let refused = cluster.attach("away", "node-2", 15).unwrap_err().to_string();
    assert!(refused.contains("not attached within"), "{refused}");
    let alone = cluster.volume("away").unwrap();
    assert_eq!(alone["status"]["state"], "attaching", "{alone:#}");
    assert_eq!(alone["status"]["robustness"], "faulted", "{alone:#}");
    let why = condition(&alone, "ReplicasReady");
    assert_eq!(why["status"], "False", "{alone:#}");
    assert!(why["message"].as_str().unwrap().contains("no copy that has every acknowledged write"), "{why:#}");
    assert_eq!(record(&alone)["inSync"], record(&before)["inSync"], "{alone:#}");
    let there = Target { address: target.address.replace("127.0.0.1", "127.0.0.2"), ..target };
    let done = there.verify(&log, &["--phase", "check", "--written-only", "--bs", "64k"]).unwrap().finish().unwrap();
    assert_eq!(done.code, Some(3), "the volume is served: {done:#?}");
    timeline.tell("refused");

    cluster.up_again().unwrap();
    let served = cluster.attach("away", "node-2", 60).unwrap();
    assert_eq!(served.address, there.address);
    served.check(&log, &[]).unwrap();
    timeline.tell("all are up; attached to node-2 and read back");
    cluster.wait_healthy("away", 3).unwrap();
    timeline.tell("healthy");
    served.check(&log, &[]).unwrap();
    cluster.cli(&["volume", "detach", "away"]).unwrap();
    assert!(cluster.equal_images(3).unwrap(), "the copies differ");
    timeline.tell("read back, detached, and all copies are equal");
}

/// Queue depth of the host that stays with the old engine.
const DEPTH: u64 = 16;

/// Starts writes that nothing but a lost connection ends.
fn write_on(target: &Target, log: &Path, region: [&str; 2]) -> Load {
    let depth = DEPTH.to_string();
    let load = ["--phase", "write", "--rw", "randwrite", "--bs", "4k", "--time", "10m", "--qd", &depth];
    let patience = ["--io-timeout", "10m", "--keep-alive", "0", "--ctrl-loss-timeout", "5s"];
    let region = ["--offset", region[0], "--range", region[1]];
    target.verify(log, &[&load[..], &patience, &region].concat()).unwrap()
}

/// Three hosts: A writes through the old engine all the time, B through the new one, C to the old one after it has woken.
/// A has the first 32 MiB, B everything from 16 MiB on, C the last 16 MiB. So A alone accounts for the first 16 MiB, and
/// anything of A or C that came through late would show in what B wrote.
#[test]
fn an_engine_that_slept_through_its_replacement_acknowledges_nothing() {
    let cluster = LocalCluster::up(3).unwrap();
    let timeline = Timeline(Instant::now());
    cluster.create("asleep", 64).unwrap();
    let old = cluster.attach("asleep", "node-1", 60).unwrap();
    let before = cluster.wait_healthy("asleep", 3).unwrap();
    let logs = tempfile::tempdir().unwrap();
    let [log_a, log_b, log_c] = ["a", "b", "c"].map(|name| logs.path().join(name));
    let length = || std::fs::metadata(&log_a).unwrap().len();

    let mut a = write_on(&old, &log_a, ["0", "32M"]);
    std::thread::sleep(Duration::from_secs(1));
    let engine = cluster.engine("node-1").unwrap();
    let others: Vec<_> = cluster.node_processes("node-1").into_iter().filter(|pid| *pid != engine).collect();
    LocalCluster::signal(&[engine], Signal::SIGSTOP).unwrap();
    LocalCluster::signal(&others, Signal::SIGSTOP).unwrap();
    cluster.cli(&["volume", "detach", "asleep", "--timeout", "60"]).unwrap();
    timeline.tell("node-1 is asleep; detached from it");
    let written = length();
    assert!(written > 4096, "nothing was written before");
    let new = cluster.attach("asleep", "node-2", 60).unwrap();
    assert_ne!(new.address, old.address);
    let taken = cluster.volume("asleep").unwrap();
    assert!(record(&taken)["epoch"].as_u64() > record(&before)["epoch"].as_u64(), "{taken:#}");
    timeline.tell("attached to node-2");
    write(&new, &log_b, "48M", &["--offset", "16M", "--range", "48M"]);
    assert!(a.is_running(), "the host of the old engine has ended too early: {:#?}", a.finish());
    assert_eq!(length(), written, "a stopped engine has answered");

    LocalCluster::signal(&[engine], Signal::SIGCONT).unwrap();
    timeline.tell("written through node-2; the old engine wakes");
    let short = ["--io-timeout", "2s", "--ctrl-loss-timeout", "3s", "--max-errors", "1"];
    let writes = ["--phase", "write", "--rw", "randwrite", "--time", "5s", "--offset", "48M", "--range", "16M"];
    let c = old.verify(&log_c, &[&writes[..], &short].concat()).unwrap().finish().unwrap();
    println!("a host that comes to the old engine: {:?} {}{}", c.code, c.errors, c.report["write"]);
    assert_eq!(c.code, Some(3), "the old engine serves: {c:#?}");
    assert_eq!(c.report["write"]["write"]["bytes"].as_u64().unwrap_or(0), 0, "the old engine acknowledges: {c:#?}");
    // Every acknowledgement is a record, and lets one more write be issued, which is another one. If the engine was stopped
    // between taking its members' answers and passing them on, it passes them on now: these writes are on every copy since
    // before the takeover (and are read back below), and there is at most one for each that was in flight.
    let woken = length();
    assert!(
        woken <= written + 2 * DEPTH * RECORD_BYTES as u64,
        "the old engine serves its host again: {written} to {woken}"
    );
    std::thread::sleep(Duration::from_secs(2));
    assert_eq!(length(), woken, "the old engine has acknowledged something after it woke");
    LocalCluster::signal(&others, Signal::SIGCONT).unwrap();
    timeline.tell("its agent and manager wake");
    let a = a.finish().unwrap();
    timeline.tell("its host has ended");
    println!("the host of the old engine: {:?} {}{}", a.code, a.errors, a.report["write"]["write"]);
    assert_eq!(a.code, Some(3), "{a:#?}");
    assert_eq!(a.report["mismatches_total"], 0, "{a:#?}");

    let check = || {
        new.check(&log_a, &["--offset", "0", "--range", "16M"]).unwrap();
        new.check(&log_b, &["--offset", "16M", "--range", "48M"]).unwrap();
    };
    check();
    timeline.tell("read back");
    cluster.wait_healthy("asleep", 3).unwrap();
    timeline.tell("healthy");
    check();
    let end = cluster.volume("asleep").unwrap();
    assert_eq!(end["status"]["currentNodeID"], "node-2", "{end:#}");
    assert_eq!(record(&end)["engineInstance"], record(&taken)["engineInstance"], "{end:#}");
    cluster.cli(&["volume", "detach", "asleep"]).unwrap();
    assert!(cluster.equal_images(3).unwrap(), "the copies differ");
    timeline.tell("read back, detached, and all copies are equal");
}
