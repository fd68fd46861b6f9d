//! Disks that hang, answer late, or fail.
//!
//! *What it is.* A node's disk is a remote namespace, whose target is a data plane of the test's own ([`Shelf`]): a file under
//! a `delay` and an `error` device.

use std::path::PathBuf;
use std::time::Duration;

use e2e::cluster::LocalCluster;
use e2e::engine::Engine;
use e2e::netns::{SHELF, address};
use nix::sys::signal::Signal;
use nix::unistd::Pid;
use serde_json::json;

use crate::scene::{HOT, Scene, Turn, in_sync, turn};

const SHELF_BYTES: u64 = 512 << 20;

/// A disk of a node that the test can hurt.
struct Shelf {
    engine: Engine,
    file: PathBuf,
    node: &'static str,
    disk: String,
}

impl Shelf {
    /// Makes it, under a name of its own, and gives it to a node.
    fn give(cluster: &Turn, node: &'static str, disk: &str) -> Self {
        let net = cluster.net().unwrap();
        let engine = Engine::start_in(&net.file(SHELF), &["-s", "128"]).unwrap();
        let file = engine.folder().join("disk");
        std::fs::File::create(&file).unwrap().set_len(SHELF_BYTES).unwrap();
        engine.rpc("bdev_aio_create", json!({"name": "A", "filename": file, "block_size": 4096})).unwrap();
        let none = json!({"base_bdev_name": "A", "name": "D", "avg_read_latency": 0, "p99_read_latency": 0,
            "avg_write_latency": 0, "p99_write_latency": 0});
        engine.rpc("bdev_delay_create", none).unwrap();
        engine.rpc("bdev_error_create", json!({"base_name": "D"})).unwrap();
        let nqn = format!("nqn.2026-11.io.example:{disk}");
        let at = engine.export_at("EE_D", &nqn, (address(SHELF).unwrap(), 4420).into()).unwrap();
        let place = format!("{at}/{nqn}");
        let create = ["disk", "create", node, disk, "--nvme", &place];
        // Nobody can see that it is empty.
        let refused = cluster.command(&create).unwrap().output().unwrap();
        assert!(!refused.status.success());
        let seen = cluster.json(&["disk", "show", node, disk]).unwrap();
        let fingerprint = seen[0]["status"]["fingerprint"].as_str().unwrap();
        cluster.cli(&[&create[..], &["--force", "--confirm", fingerprint]].concat()).unwrap();
        Self { engine, file, node, disk: disk.to_owned() }
    }

    fn pid(&self) -> Pid {
        Pid::from_raw(i32::try_from(self.engine.pid().unwrap()).unwrap())
    }

    /// What is written takes so long.
    fn delay_writes(&self, delay: Duration) {
        for kind in ["avg_write", "p99_write"] {
            let latency = json!({"delay_bdev_name": "D", "latency_type": kind, "latency_us": delay.as_micros() as u64});
            self.engine.rpc("bdev_delay_update_latency", latency).unwrap();
        }
    }

    fn fail_reads(&self, count: u32) {
        let errors = json!({"name": "EE_D", "io_type": "read", "error_type": "failure", "num": count});
        self.engine.rpc("bdev_error_inject_error", errors).unwrap();
    }

    /// Reads that the shelf has answered, with an error or not.
    fn reads(&self) -> u64 {
        let stats = self.engine.rpc("bdev_get_iostat", json!({"names": ["EE_D"]})).unwrap();
        stats["bdevs"][0]["num_read_ops"].as_u64().unwrap()
    }

    fn heal(&self) {
        let clear = json!({"name": "EE_D", "io_type": "clear", "error_type": "failure"});
        self.engine.rpc("bdev_error_inject_error", clear).unwrap();
    }

    /// A volume with a copy on it and on the other nodes.
    fn scene(&self, cluster: Turn, volume: &str) -> Scene {
        let mut scene = Scene::on(cluster, volume, &[(self.node, "disk-1")], 3, &[]);
        scene.more_disks.push(self.file.clone());
        scene
    }

    /// Takes it away; the volume is gone.
    fn take_away(self) {
        let Some(cluster) = turn() else { return };
        cluster.cli(&["disk", "remove", self.node, &self.disk]).unwrap();
    }
}

/// Row 10: the source of a rebuild cannot be read. Another member can.
#[test]
fn row_10_the_source_of_a_rebuild_has_read_errors() {
    let Some(cluster) = turn() else { return };
    let shelf = Shelf::give(&cluster, "node-1", "errors");
    let scene = shelf.scene(cluster, "row10");
    let load = scene.load(&["--rw", "randwrite", "--bs", "16k", "--qd", "8"]);
    scene.wait_writes(1000);
    scene.kill_node("node-2");
    scene.wait("without node-2's copy", |found| in_sync(found) == 2);
    scene.wait_writes(200);
    let before = shelf.reads();
    shelf.fail_reads(8);
    scene.wait_whole();
    assert!(shelf.reads() > before, "nobody has read from the disk that fails");
    shelf.heal();
    scene.finish(load);
    shelf.take_away();
}

/// Rule 13, else (ghost write): a disk hangs with W1 in flight, its copy is ejected, the same engine connects again and
/// rebuilds W2, then W1 lands on top. Here the disk hangs by a `delay` device, and the copy loses its session with writes in
/// the disk by the death of its data plane.
#[test]
fn else_rule_13_a_disk_that_hangs_brings_nothing_old() {
    let Some(cluster) = turn() else { return };
    let shelf = Shelf::give(&cluster, "node-2", "late");
    let scene = shelf.scene(cluster, "rule13");
    let load = scene.load(&HOT);
    shelf.delay_writes(Duration::from_secs(8));
    scene.wait_silence(Duration::from_millis(500));
    scene.tell("the disk hangs");
    scene.kill_node("node-2");
    scene.wait("without node-2's copy", |found| in_sync(found) == 2);
    scene.wait_writes(300);
    scene.cluster.start_node("node-2").unwrap();
    // Attempts to open the disk, to promote and to rebuild meet one that hangs.
    std::thread::sleep(Duration::from_secs(2));
    shelf.delay_writes(Duration::ZERO);
    scene.wait_whole();
    scene.finish(load);
    shelf.take_away();
}

/// The same by a target that is stopped with writes on their way, which lands them when it goes on.
#[test]
fn else_rule_13_writes_that_a_hung_disk_lands_late_are_overwritten() {
    let Some(cluster) = turn() else { return };
    let shelf = Shelf::give(&cluster, "node-2", "hung");
    let scene = shelf.scene(cluster, "rule13h");
    let load = scene.load(&HOT);
    LocalCluster::signal(&[shelf.pid()], Signal::SIGSTOP).unwrap();
    scene.wait("without node-2's copy", |found| in_sync(found) == 2);
    scene.wait_writes(500);
    // Attempts to connect and rebuild meet the hung disk.
    std::thread::sleep(Duration::from_secs(4));
    LocalCluster::signal(&[shelf.pid()], Signal::SIGCONT).unwrap();
    scene.wait_whole();
    scene.finish(load);
    shelf.take_away();
}
