//! Every process of a local cluster is killed at once, again and again, under writes: after `addax up` the volume comes
//! back by itself with every acknowledged write.
//!
//! In even rounds the host is killed as well. In odd rounds it stays: it must see a pause and no error.
#![allow(clippy::unwrap_used)]

use std::time::{Duration, Instant};

use e2e::cluster::{LocalCluster, Random};
use nix::sys::signal::Signal;

const VOLUME: &str = "power";
const ROUNDS: u64 = 10;
const WRITE: [&str; 10] = ["--phase", "write", "--rw", "randrw", "--mix", "30", "--bs", "16k", "--time", "10m"];

#[test]
fn a_volume_comes_back_with_every_acknowledged_write_after_each_power_cut() {
    let mut random = Random::seeded();
    let cluster = LocalCluster::up(3).unwrap();
    cluster.create(VOLUME, 96).unwrap();
    let target = cluster.attach(VOLUME, "node-1", 60).unwrap();
    let logs = tempfile::tempdir().unwrap();
    let log = logs.path().join("writes.wlog");
    for round in 0..ROUNDS {
        let started = Instant::now();
        let before = cluster.epoch(VOLUME).unwrap();
        let mut load = target.verify(&log, &WRITE).unwrap();
        let moment = Duration::from_millis(100 + random.below(1900));
        std::thread::sleep(moment);
        assert!(load.is_running(), "round {round}: {:#?}", load.finish());
        let host_dies = round % 2 == 0;
        if host_dies {
            load.signal(Signal::SIGKILL).unwrap();
        }
        cluster.kill_all(|found| random.shuffle(found)).unwrap();
        cluster.up_again().unwrap();
        let up = started.elapsed();
        cluster.wait(VOLUME, "open again", |found| found["status"]["config"]["epoch"].as_u64() > Some(before)).unwrap();
        let open = started.elapsed();
        if host_dies {
            drop(load);
        } else {
            std::thread::sleep(Duration::from_millis(1000 + random.below(500)));
            load.signal(Signal::SIGTERM).unwrap();
            let done = load.finish().unwrap();
            assert_eq!(done.code, Some(0), "round {round}: {done:#?}");
            assert_eq!(done.report["write"]["errors"], 0, "round {round}: {done:#?}");
        }
        // Else nearly every cut would find only one copy in sync.
        if round % 3 == 2 {
            cluster.wait_healthy(VOLUME, 3).unwrap();
        }
        let report = target.check(&log, &[]).unwrap();
        println!(
            "round {round}: killed after {moment:?} (the host {}), up at {up:?}, open at {open:?}, {} units checked, \
             {} uncertain, {:?} in all",
            if host_dies { "too" } else { "lives" },
            report["checked_units"],
            report["uncertain_units"],
            started.elapsed()
        );
    }
    cluster.wait_healthy(VOLUME, 3).unwrap();
    let everything = ["--phase", "check", "--unwritten", "zero", "--bs", "64k"];
    let done = target.verify(&log, &everything).unwrap().finish().unwrap();
    assert_eq!(done.code, Some(0), "{done:#?}");
    cluster.cli(&["volume", "detach", VOLUME]).unwrap();
    assert!(cluster.equal_images(3).unwrap(), "the copies differ");
}
