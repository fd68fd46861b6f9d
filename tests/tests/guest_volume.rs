//! A real Linux kernel on a replicated volume of a local cluster: a file system with some thousand files, and the death
//! of the engine that serves it, under writes. The agent starts the engine again, the volume opens with a new epoch, and
//! nobody sees an error.
#![allow(clippy::unwrap_used)]

use std::time::Duration;

use anyhow::Context;
use e2e::cluster::{HOST, LocalCluster, Target};
use e2e::guest::scenario::{self, scenario_ext4, scenario_reconnect};
use e2e::guest::{Guest, HOST_ADDRESS};
use nix::sys::signal::Signal;

const VOLUME: &str = "guest";
/// The node whose address, 127.0.0.1, the guest can reach.
const NODE: &str = "node-1";

#[test]
fn linux_uses_the_volume_and_outlives_the_death_of_its_engine() {
    let cluster = LocalCluster::up(3).unwrap();
    let guest = Guest::boot(scenario::config().unwrap()).unwrap();
    cluster.create(VOLUME, 256).unwrap();
    let target = attach(&cluster, &guest);
    let (address, port) = target.address.rsplit_once(':').unwrap();
    assert_eq!(address, "127.0.0.1");
    let port = port.parse().unwrap();

    scenario_ext4(&guest, HOST_ADDRESS, port, &target.nqn).unwrap();

    let before = cluster.epoch(VOLUME).unwrap();
    let pause = scenario_reconnect(&guest, HOST_ADDRESS, port, &target.nqn, || {
        LocalCluster::signal(&[cluster.engine(NODE)?], Signal::SIGKILL)?;
        let again = |found: &serde_json::Value| {
            let status = &found["status"];
            status["config"]["epoch"].as_u64() > Some(before) && status["state"] == "attached"
        };
        cluster.wait(VOLUME, "open again with a new epoch", again).map(drop).context("after the engine's death")
    })
    .unwrap();
    println!("engine killed: writes paused for at most {:.2} s", pause.as_secs_f64());
    cluster.wait_healthy(VOLUME, 3).unwrap();
    drop(guest);

    verify_raw(&cluster, &target);
}

/// Lets the guest's kernel and this test's own host connect.
fn attach(cluster: &LocalCluster, guest: &Guest) -> Target {
    let guest_nqn = guest.check("cat /etc/nvme/hostnqn", Duration::from_secs(60)).unwrap();
    let hosts = ["--host-nqn", guest_nqn.trim(), "--host-nqn", HOST];
    let found = cluster.json(&[&["volume", "attach", VOLUME, "--node", NODE], &hosts[..]].concat()).unwrap();
    let endpoint = &found[0];
    let text = |name: &str| endpoint[name].as_str().unwrap().to_owned();
    Target {
        address: format!("{}:{}", text("traddr"), endpoint["trsvcid"]),
        nqn: text("nqn"),
        volume: VOLUME.to_owned(),
        namespace: None,
    }
}

/// Writes to and reads from the raw volume under verification, then compares its copies.
fn verify_raw(cluster: &LocalCluster, target: &Target) {
    let log = cluster.dir().join("writes.log");
    let load = ["--rw", "randrw", "--mix", "30", "--bs", "16k", "--size", "64M"];
    let done = target.verify(&log, &load).unwrap().finish().unwrap();
    assert_eq!(done.code, Some(0), "{done:#?}");
    assert_eq!(done.report["mismatches_total"], 0, "{done:#?}");
    cluster.cli(&["volume", "detach", VOLUME]).unwrap();
    assert!(cluster.equal_images(3).unwrap(), "the copies differ");
}
