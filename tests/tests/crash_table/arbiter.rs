//! An arbiter that is away, late, or old.

use std::fs;
use std::path::Path;
use std::time::Duration;

use e2e::cluster::LocalCluster;
use e2e::door::Catch;
use nix::sys::signal::Signal;

use crate::scene::{MIXED, PATIENCE, Scene, in_sync, node, number, turn};

/// Row 11: nobody reaches the arbiter. I/O goes on beyond the time of a lease, which comes from the members; a member that
/// fails then stops it, until the arbiter is back.
#[test]
fn row_11_the_arbiter_is_unreachable() {
    let Some(cluster) = turn() else { return };
    let scene = Scene::new(cluster, "row11");
    let load = scene.load(&MIXED);
    let doors: Vec<_> = (1..=3).map(|number| scene.cluster.door(&node(number)).unwrap()).collect();
    doors.iter().for_each(|door| door.shut());
    for _ in 0..11 {
        scene.wait_writes(10);
        std::thread::sleep(Duration::from_secs(1));
    }
    scene.tell("written for eleven seconds");
    scene.kill_node("node-3");
    scene.wait_silence(Duration::from_secs(2));
    doors.iter().for_each(|door| door.unlock());
    scene.wait_writes(500);
    let found = scene.record();
    assert_eq!(in_sync(&found), 2, "{found:#}");
    scene.wait_whole();
    scene.finish(load);
}

/// Rule 7, else: add(C) times out, a re-read shows no C, writes are acknowledged without it, the queued request commits
/// {A, C}, A dies, C opens. The request that adds C is kept on its way until the engine has settled it, and then let go.
#[test]
fn else_rule_07_a_request_that_arrives_late_changes_nothing() {
    let Some(cluster) = turn() else { return };
    let scene = Scene::new(cluster, "rule07");
    let load = scene.load(&MIXED);
    scene.kill_node("node-2");
    scene.wait("without node-2's copy", |found| in_sync(found) == 2);
    let door = scene.cluster.door("node-1").unwrap();
    scene.cluster.start_node("node-2").unwrap();
    scene.wait_mirror("rebuilding", |mirror| mirror["config"]["rebuilding"][0].is_string());
    scene.stop_manager("node-1");
    door.catch(Catch::Request);
    door.wait_caught(PATIENCE).unwrap();
    let unsettled = scene.record();
    assert_eq!(in_sync(&unsettled), 2, "{unsettled:#}");
    scene.tell("the request that adds node-2's copy is on its way");
    // Whether the copy is added by another request or given up, the record is what the engine has.
    let settled = scene.wait_mirror("settled", |mirror| {
        mirror["pending_swap"].is_null()
            && mirror["config"]["config_number"].as_u64() > Some(number(&unsettled, "configNumber"))
    });
    scene.wait_writes(200);
    let before = scene.record();
    assert_eq!(number(&before, "configNumber"), settled["config"]["config_number"].as_u64().unwrap(), "{before:#}");
    scene.kill_node("node-2");
    scene.wait("without node-2's copy again", |found| in_sync(found) == 2);
    scene.wait_writes(200);
    let without = scene.record();
    door.release();
    scene.tell("it arrives");
    std::thread::sleep(Duration::from_secs(1));
    let late = scene.record();
    assert_eq!(late["status"]["config"], without["status"]["config"], "a late request was carried out");
    scene.kill_engine("node-1");
    scene.wait_writes(200);
    scene.wait_whole();
    scene.finish(load);
}

/// The same with the answer instead of the request: the loss of a member is recorded, and the engine hears nothing of it. It
/// acknowledges nothing until it has settled that.
#[test]
fn else_rule_07_an_answer_that_is_lost_is_settled() {
    let Some(cluster) = turn() else { return };
    let scene = Scene::new(cluster, "rule07a");
    let load = scene.load(&MIXED);
    let door = scene.lose_a_member_unheard();
    scene.wait_silence(Duration::from_millis(300));
    scene.assert_silence(Duration::from_secs(2));
    scene.wait_writes(500);
    scene.tell("settled");
    door.release();
    scene.wait_whole();
    scene.finish(load);
}

/// The API server's file.
fn objects(cluster: &LocalCluster) -> std::path::PathBuf {
    cluster.dir().join("api/objects.log")
}

/// Kills everything, and starts it with another state of the API server.
fn restore(cluster: &LocalCluster, from: &Path) {
    cluster.kill_all(|_| {}).unwrap();
    fs::copy(from, objects(cluster)).unwrap();
    cluster.start("apiserver", None).unwrap();
    cluster.wait_api().unwrap();
    cluster.up_again().unwrap();
}

/// Kills the API server, copies its file, and starts it again.
fn back_up(cluster: &LocalCluster, to: &Path) {
    let all = cluster.processes();
    let is_server = |pid: &nix::unistd::Pid| e2e::cluster::program_name(*pid).contains("apiserver");
    let found: Vec<_> = all.into_iter().filter(is_server).collect();
    LocalCluster::signal(&found, Signal::SIGKILL).unwrap();
    while cluster.processes().iter().any(is_server) {
        std::thread::sleep(Duration::from_millis(5));
    }
    fs::copy(objects(cluster), to).unwrap();
    cluster.start("apiserver", None).unwrap();
    cluster.wait_api().unwrap();
}

/// Row 8, and rule 21, else: the arbiter is restored from an old copy, by which a copy that missed acknowledged writes is in
/// sync. The members know better, so nobody opens the volume; with the true record all is there.
#[test]
fn row_08_and_else_rule_21_a_record_that_is_old_opens_nothing() {
    let Some(cluster) = turn() else { return };
    let scene = Scene::new(cluster, "row08");
    let load = scene.load(&MIXED);
    let (old, new) = (scene.log.with_extension("old"), scene.log.with_extension("new"));
    back_up(&scene.cluster, &old);
    scene.tell("backed up");
    scene.kill_node("node-2");
    scene.wait_writes(500);
    let last = scene.wait("without node-2's copy", |found| in_sync(found) == 2);
    scene.end_load(load);
    back_up(&scene.cluster, &new);
    restore(&scene.cluster, &old);
    let restored = scene.record();
    assert_eq!(in_sync(&restored), 3, "{restored:#}");
    assert!(number(&restored, "configNumber") < number(&last, "configNumber"));
    scene.tell("restored");
    let quick = ["--phase", "check", "--written-only", "--bs", "64k", "--ctrl-loss-timeout", "8s"];
    let done = scene.target.verify(&scene.log, &quick).unwrap().finish().unwrap();
    assert_eq!(done.code, Some(3), "it is served by an old record: {done:#?}");
    scene.wait_log("node-1-agent", "the record is an old copy");
    // The managers, all killed, first wait for their leases.
    scene.wait("not attached any more", |found| found["status"]["robustness"] != "healthy");
    scene.tell("refused");
    restore(&scene.cluster, &new);
    scene.check();
    scene.finish_idle();
}

/// Rule 22: a copy without a record is never deleted by itself. The arbiter forgets a volume, everything is started again,
/// and its copies are still there when the arbiter remembers.
#[test]
fn else_rule_22_copies_without_a_record_are_kept() {
    let Some(cluster) = turn() else { return };
    let folder = tempfile::tempdir().unwrap();
    let (old, new) = (folder.path().join("old"), folder.path().join("new"));
    back_up(&cluster, &old);
    let scene = Scene::new(cluster, "rule22");
    let load = scene.load(&MIXED);
    scene.wait_writes(500);
    scene.end_load(load);
    back_up(&scene.cluster, &new);
    restore(&scene.cluster, &old);
    let found = scene.cluster.cli(&["volume", "ls"]).unwrap();
    assert!(!found.contains("rule22"), "{found}");
    scene.tell("forgotten");
    // Longer than managers and agents take to look at everything once more.
    std::thread::sleep(Duration::from_secs(5));
    let images = scene.cluster.images("rule22", &[]).unwrap();
    assert_eq!(images.len(), 3, "a copy is gone");
    restore(&scene.cluster, &new);
    scene.tell("remembered");
    scene.check();
    scene.finish_idle();
}
