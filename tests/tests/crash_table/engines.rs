//! Engines that die in the worst moment, or are replaced while they live.

use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use e2e::cluster::{HOST, LocalCluster};
use e2e::door::Catch;
use e2e::netns::{HOST_PLACE, command_in};
use e2e::programs::program;
use nix::sys::signal::Signal;

use crate::scene::{HOT, MIXED, PATIENCE, Scene, in_sync, number, turn};

/// Disks that keep copies off the node of the engine.
const NOT_THERE: [(&str, &str); 1] = [("node-1", "disk-1")];

/// Row 3: the engine dies with writes in flight, again and again.
#[test]
fn row_03_the_engine_dies_with_writes_in_flight() {
    let Some(cluster) = turn() else { return };
    let scene = Scene::new(cluster, "row03");
    let load = scene.load(&MIXED);
    for _ in 0..3 {
        let before = number(&scene.record(), "epoch");
        scene.kill_engine("node-1");
        scene.wait("open again", |found| number(found, "epoch") > before);
        scene.wait_writes(500);
    }
    scene.finish(load);
}

/// Row 4: the engine dies between the failure of B and the swap. B is still in sync by the record, and rightly: nothing was
/// acknowledged without it.
#[test]
fn row_04_the_engine_dies_between_a_failure_and_its_record() {
    let Some(cluster) = turn() else { return };
    let scene = Scene::new(cluster, "row04");
    let load = scene.load(&MIXED);
    let door = scene.cluster.door("node-1").unwrap();
    door.shut();
    scene.kill_node("node-2");
    scene.wait_mirror("asking for a swap", |mirror| mirror["pending_swap"].is_object());
    scene.wait_silence(Duration::from_millis(300));
    scene.cluster.start_node("node-2").unwrap();
    scene.kill_engine("node-1");
    let found = scene.record();
    assert_eq!(in_sync(&found), 3, "{found:#}");
    door.unlock();
    scene.wait_writes(500);
    scene.tell("writes go on");
    scene.finish(load);
}

/// Row 5: the engine and its agent die after the swap, before anybody who survives has heard of it.
#[test]
fn row_05_the_engine_dies_between_the_record_and_the_survivors_superblocks() {
    let Some(cluster) = turn() else { return };
    let scene = Scene::new(cluster, "row05");
    let load = scene.load(&MIXED);
    let door = scene.lose_a_member_unheard();
    let recorded = scene.record();
    assert_eq!(in_sync(&recorded), 2, "{recorded:#}");
    scene.wait_silence(Duration::from_millis(300));
    scene.assert_silence(Duration::from_secs(1));
    scene.kill_node("node-1");
    door.release();
    scene.cluster.start_node("node-1").unwrap();
    scene.wait_writes(500);
    scene.tell("writes go on");
    let after = scene.record();
    assert!(number(&after, "configNumber") >= number(&recorded, "configNumber"), "{after:#}");
    scene.wait_whole();
    scene.finish(load);
}

/// Whether a host may read from the old engine now.
fn reads(scene: &Scene, log: &Path) -> bool {
    let quick = ["--io-timeout", "300ms", "--ctrl-loss-timeout", "100ms", "--keep-alive", "0", "--max-errors", "1"];
    let some = ["--phase", "check", "--written-only", "--bs", "16k", "--range", "16k"];
    let done = scene.target.verify(log, &[&some[..], &quick].concat()).unwrap().finish().unwrap();
    assert_eq!(done.report["mismatches_total"].as_u64().unwrap_or(0), 0, "{done:#?}");
    done.code == Some(0)
}

/// Row 6, and rule 16, else: an engine that is cut off and replaced goes on to serve old data from the member that nobody
/// has fenced, its own. It acknowledges nothing, and reads nothing when the new engine acknowledges its first write.
#[test]
fn row_06_and_else_rule_16_an_engine_that_is_cut_off_and_replaced_reads_nothing_old() {
    let Some(cluster) = turn() else { return };
    let scene = Scene::new(cluster, "row06");
    let fill = ["--phase", "write", "--rw", "randwrite", "--bs", "16k", "--size", "8M", "--range", "1M"];
    assert_eq!(scene.target.verify(&scene.log, &fill).unwrap().finish().unwrap().code, Some(0));
    let before = scene.record();
    assert!(reads(&scene, &scene.log));
    let net = scene.cluster.net().unwrap();
    ["node-2", "node-3"].iter().for_each(|other| net.part("node-1", other).unwrap());
    scene.cluster.door("node-1").unwrap().shut();
    scene.tell("node-1 is cut off, but from its hosts");
    let cut = Instant::now();
    assert!(reads(&scene, &scene.log), "the lease is over at once: this test shows nothing");
    scene.tell("the old engine still reads");

    std::thread::scope(|scope| {
        let (scene, begin) = (&scene, Instant::now());
        let old = scope.spawn(move || {
            // Copies of the log: what the new engine's host will add is not to be known here.
            let log = scene.log.with_extension("old");
            std::fs::copy(&scene.log, &log).unwrap();
            let mut last = begin;
            while cut.elapsed() < Duration::from_secs(40) && last.elapsed() < Duration::from_secs(15) {
                if reads(scene, &log) {
                    last = Instant::now();
                }
                std::thread::sleep(Duration::from_millis(100));
            }
            last
        });
        scene.cluster.cli(&["volume", "detach", &scene.volume, "--timeout", "60"]).unwrap();
        scene.tell("detached from node-1");
        let new = scene.cluster.attach(&scene.volume, "node-2", 60).unwrap();
        scene.tell("attached to node-2");
        let write = ["--phase", "write", "--rw", "randwrite", "--bs", "16k", "--size", "16k", "--range", "1M"];
        let done = new.verify(&scene.log, &write).unwrap().finish().unwrap();
        assert_eq!(done.code, Some(0), "{done:#?}");
        let acknowledged = Instant::now();
        scene.tell("the new engine has acknowledged a write");
        let last = old.join().unwrap();
        println!("the old engine read until {:?} after it was cut off", last - cut);
        assert!(last < acknowledged, "the old engine has read {:?} after that", last - acknowledged);
        let more = ["--phase", "write", "--rw", "randwrite", "--bs", "16k", "--size", "16M"];
        assert_eq!(new.verify(&scene.log, &more).unwrap().finish().unwrap().code, Some(0));
        net.heal().unwrap();
        scene.cluster.door("node-1").unwrap().unlock();
        scene.tell("node-1 is back");
        scene.cluster.wait_healthy(&scene.volume, 3).unwrap();
        assert!(!reads(scene, &scene.log), "the old engine serves again");
        let after = scene.record();
        assert!(number(&after, "epoch") > number(&before, "epoch"), "{after:#}");
        new.check(&scene.log, &[]).unwrap();
        scene.cluster.cli(&["volume", "detach", &scene.volume]).unwrap();
    });
    let attached = scene.cluster.attach(&scene.volume, "node-1", 60).unwrap();
    assert_eq!(attached.address, scene.target.address);
    scene.finish_idle();
}

/// Rule 2, else: A applies W1, W2 and B applies W2, W1, both acknowledged; A ≠ B for ever. Two hosts' worth of connections
/// write the same few blocks at once.
#[test]
fn else_rule_02_overlapping_writes_leave_equal_copies() {
    let Some(cluster) = turn() else { return };
    let scene = Scene::new(cluster, "rule02");
    let (net, target) = (scene.cluster.net().unwrap(), &scene.target);
    let mut run = command_in(Some(&net.file(HOST_PLACE)), &program("addax-perf").unwrap());
    run.args(["run", "--target", &target.address, "--nqn", &target.nqn, "--host-nqn", HOST, "--no-pin", "--quiet"]);
    run.args(["-o", "json", "--rw", "randwrite", "--bs", "8k", "--range", "64k", "--connections", "4", "--time", "3s"]);
    let done = run.stdin(Stdio::null()).output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    let report: serde_json::Value = serde_json::from_slice(&done.stdout).unwrap();
    assert!(report["total"]["ios"].as_u64() > Some(100), "{report:#}");
    // The judge knows nothing of what was written so far, and of all that it writes now.
    let load = scene.load(&["--rw", "randrw", "--bs", "4k", "--offset", "1M", "--range", "64k", "--qd", "32"]);
    scene.end_load(load);
    scene.finish_idle();
}

/// Rule 3, else: read new from A, A dies, read old from B. The same blocks are read and written all the time while members
/// answer late and die, and then the engine does.
#[test]
fn else_rule_03_no_read_returns_what_is_taken_back() {
    let Some(cluster) = turn() else { return };
    let scene = Scene::new(cluster, "rule03");
    let load = scene.load(&HOT);
    for (late, die) in [("node-2", "node-3"), ("node-3", "node-2")] {
        let asleep = scene.engine(late);
        LocalCluster::signal(&[asleep], Signal::SIGSTOP).unwrap();
        // Shorter than what makes it leave: writes wait, and reads of what they write.
        std::thread::sleep(Duration::from_millis(400));
        LocalCluster::signal(&[scene.engine(die)], Signal::SIGKILL).unwrap();
        LocalCluster::signal(&[asleep], Signal::SIGCONT).unwrap();
        scene.wait_writes(200);
        scene.kill_engine("node-1");
        scene.wait_writes(200);
        scene.wait_whole();
    }
    scene.finish(load);
}

/// Rule 10, else: a joiner that does not have everything is opened alone. The engine never hears that its joiner was added,
/// the other member dies with the engine, and the joiner is all there is.
#[test]
fn else_rule_10_a_joiner_that_was_added_unheard_has_everything() {
    let Some(cluster) = turn() else { return };
    let scene = Scene::on(cluster, "rule10", &NOT_THERE, 2, &[]);
    let load = scene.load(&MIXED);
    scene.kill_node("node-3");
    scene.wait("without node-3's copy", |found| in_sync(found) == 1);
    scene.cluster.start_node("node-3").unwrap();
    let door = scene.cluster.door("node-1").unwrap();
    scene.wait_mirror("rebuilding", |mirror| mirror["config"]["rebuilding"][0].is_string());
    scene.stop_manager("node-1");
    door.catch(Catch::Answer);
    door.wait_caught(PATIENCE).unwrap();
    let added = scene.wait("added unheard", |found| in_sync(found) == 2);
    let unheard = scene.mirror();
    assert_eq!(unheard["config"]["in_sync"].as_array().map(Vec::len), Some(1), "{unheard:#}");
    scene.wait_writes(100);
    scene.tell("written meanwhile");
    scene.kill_engine("node-1");
    scene.kill_node("node-2");
    door.release();
    scene.wait_writes(200);
    let alone = scene.record();
    assert_eq!(in_sync(&alone), 1, "{alone:#}");
    assert!(number(&alone, "configNumber") > number(&added, "configNumber"), "{alone:#}");
    scene.tell("open with the joiner alone");
    scene.wait_whole();
    scene.finish(load);
}

/// Rule 15, else: a member that was not promoted is still in the record when a write is acknowledged without it.
#[test]
fn else_rule_15_who_is_not_promoted_leaves_before_anything_is_answered() {
    let Some(cluster) = turn() else { return };
    let scene = Scene::on(cluster, "rule15", &NOT_THERE, 2, &[]);
    let load = scene.load(&MIXED);
    let before = scene.record();
    let net = scene.cluster.net().unwrap();
    // The agent cannot reach its peer's agent either.
    net.part("node-1", "node-3").unwrap();
    scene.kill_engine("node-1");
    scene.wait_silence(Duration::from_millis(200));
    scene.wait_writes(1);
    let first = scene.record();
    assert_eq!(in_sync(&first), 1, "answered with a member that was not asked: {first:#}");
    assert!(number(&first, "epoch") > number(&before, "epoch"), "{first:#}");
    scene.wait_writes(300);
    net.heal().unwrap();
    scene.wait_whole();
    scene.finish(load);
}

/// Rule 18, else: members differ after a crash, a read returns one of the values, and the other one after the death of the
/// member that gave it. Writes reach one member only, then the engine dies; all is read; then each member in turn is away.
#[test]
fn else_rule_18_what_was_read_after_a_crash_stays() {
    let Some(cluster) = turn() else { return };
    let scene = Scene::on(cluster, "rule18", &NOT_THERE, 2, &[]);
    let mut load = scene.load(&MIXED);
    let net = scene.cluster.net().unwrap();
    net.cut("node-1", "node-3").unwrap();
    scene.wait_silence(Duration::from_millis(300));
    load.signal(Signal::SIGKILL).unwrap();
    drop(load);
    scene.kill_engine("node-1");
    net.heal().unwrap();
    scene.check();
    for away in ["node-2", "node-3"] {
        scene.kill_node(away);
        scene.check();
        scene.wait_whole();
    }
    scene.finish_idle();
}
