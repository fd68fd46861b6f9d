//! Copies that die, return, are cut off, and are rebuilt.

use std::time::Duration;

use nix::sys::signal::Signal;

use crate::scene::{HOT, MIXED, Scene, in_sync, node, number, rebuilding, turn};
use e2e::cluster::LocalCluster;

/// Row 1: B dies, writes go on at the others once B is out of the record, B returns and is rebuilt.
#[test]
fn row_01_a_member_dies_and_returns() {
    let Some(cluster) = turn() else { return };
    let scene = Scene::new(cluster, "row01");
    let load = scene.load(&MIXED);
    let before = scene.record();
    scene.kill_node("node-2");
    let without = scene.wait("without node-2's copy", |found| in_sync(found) == 2);
    assert!(number(&without, "configNumber") > number(&before, "configNumber"), "{without:#}");
    assert_eq!(number(&without, "epoch"), number(&before, "epoch"));
    scene.wait_writes(500);
    scene.wait_whole();
    scene.finish(load);
}

/// Row 9: a copy that is being rebuilt dies in the middle; it is in sync at no time before it is whole.
#[test]
fn row_09_a_rebuild_target_dies_in_the_middle() {
    let Some(cluster) = turn() else { return };
    let scene = Scene::new(cluster, "row09");
    let load = scene.load(&MIXED);
    scene.wait_writes(2000);
    scene.kill_node("node-2");
    scene.wait("without node-2's copy", |found| in_sync(found) == 2);
    scene.cluster.start_node("node-2").unwrap();
    scene.wait_mirror("rebuilding", |mirror| mirror["config"]["rebuilding"][0].is_string());
    scene.kill_node("node-2");
    let dead = scene.record();
    assert_eq!((in_sync(&dead), rebuilding(&dead)), (2, 1), "{dead:#}");
    scene.wait_writes(500);
    let out = scene.record();
    assert_eq!(in_sync(&out), 2, "a copy that is not whole counts: {out:#}");
    scene.wait_whole();
    scene.finish(load);
}

/// Row 12: the only copy is cut off and returns, then its data plane dies and returns: the same set, the same epoch, and no
/// record of it is needed.
#[test]
fn row_12_the_last_member_is_unreachable_and_returns() {
    let Some(cluster) = turn() else { return };
    let scene = Scene::on(cluster, "row12", &[("node-1", "disk-1"), ("node-3", "disk-1")], 1, &[]);
    let load = scene.load(&MIXED);
    let before = scene.record();
    let net = scene.cluster.net().unwrap();
    net.part("node-1", "node-2").unwrap();
    scene.wait_silence(Duration::from_secs(3));
    scene.tell("cut off");
    net.heal().unwrap();
    scene.wait_writes(500);
    scene.tell("back");
    scene.kill_engine("node-2");
    scene.wait_writes(500);
    let after = scene.record();
    assert_eq!(before["status"]["config"], after["status"]["config"]);
    scene.finish(load);
}

/// Rule 6, else: acknowledged writes are lost with the members that alone have them. While the arbiter cannot record that a
/// member is gone, nothing at all is acknowledged, although two members are well.
#[test]
fn else_rule_06_nothing_is_acknowledged_before_the_loss_is_recorded() {
    let Some(cluster) = turn() else { return };
    let scene = Scene::new(cluster, "rule06");
    let load = scene.load(&MIXED);
    let door = scene.cluster.door("node-1").unwrap();
    door.shut();
    scene.kill_node("node-2");
    scene.wait_mirror("asking for a swap", |mirror| mirror["pending_swap"].is_object());
    scene.wait_silence(Duration::from_millis(500));
    scene.assert_silence(Duration::from_secs(2));
    let unrecorded = scene.record();
    assert_eq!(in_sync(&unrecorded), 3, "{unrecorded:#}");
    door.unlock();
    scene.wait_writes(500);
    let recorded = scene.record();
    assert_eq!(in_sync(&recorded), 2, "acknowledged before it was recorded: {recorded:#}");
    scene.wait_whole();
    scene.finish(load);
}

/// Rule 6 (strict), else: `S` = {A} frozen, A dies, B holds everything and is refused. Here `S` stays {A, B} while nothing
/// is acknowledged; after the death of both and of the engine it opens with whoever returns.
#[test]
fn else_rule_06_strict_freezes_and_refuses_nobody_who_has_everything() {
    let Some(cluster) = turn() else { return };
    let scene = Scene::on(cluster, "rule06s", &[], 3, &["--min-in-sync", "2"]);
    let load = scene.load(&MIXED);
    scene.kill_node("node-2");
    let two = scene.wait("without node-2's copy", |found| in_sync(found) == 2);
    scene.wait_writes(200);
    scene.kill_node("node-3");
    scene.wait_mirror("frozen", |mirror| mirror["frozen"] == true);
    scene.wait_silence(Duration::from_millis(500));
    scene.assert_silence(Duration::from_secs(2));
    let frozen = scene.record();
    assert_eq!(frozen["status"]["config"]["inSync"], two["status"]["config"]["inSync"], "{frozen:#}");
    scene.kill_engine("node-1");
    scene.cluster.start_node("node-3").unwrap();
    scene.wait_writes(500);
    scene.tell("node-3 is back and writes go on");
    scene.wait_whole();
    scene.finish(load);
}

/// Rule 12: when most members look bad at once, the engine is the suspect. It waits and ejects nobody. The engine sleeps while
/// it is cut off, as a machine that was suspended and wakes without a network: it finds all of them out at once. One that
/// is awake finds them out one after the other, and may eject the first before it knows of the second.
#[test]
fn rule_12_an_engine_that_is_cut_off_from_most_members_ejects_nobody() {
    let Some(cluster) = turn() else { return };
    let scene = Scene::new(cluster, "rule12");
    let load = scene.load(&MIXED);
    let before = scene.record();
    let net = scene.cluster.net().unwrap();
    let asleep = [scene.engine("node-1")];
    LocalCluster::signal(&asleep, Signal::SIGSTOP).unwrap();
    for number in [2, 3] {
        net.part("node-1", &node(number)).unwrap();
    }
    std::thread::sleep(Duration::from_secs(2));
    LocalCluster::signal(&asleep, Signal::SIGCONT).unwrap();
    scene.wait_mirror("cut off from both others", |mirror| {
        let legs = mirror["legs"].as_array().map_or(&[][..], Vec::as_slice);
        legs.iter().filter(|leg| leg["state"] == "lost").count() == 2
    });
    // Longer than one that is lost alone is waited for.
    scene.assert_silence(Duration::from_secs(4));
    let during = scene.record();
    assert_eq!(during["status"]["config"], before["status"]["config"], "somebody was ejected");
    net.heal().unwrap();
    scene.wait_writes(500);
    scene.tell("back");
    scene.finish(load);
}

/// The same in one direction only: what the engine sends arrives, the answers do not.
#[test]
fn a_member_whose_answers_vanish_leaves_and_returns() {
    let Some(cluster) = turn() else { return };
    let scene = Scene::new(cluster, "oneway");
    let load = scene.load(&HOT);
    let net = scene.cluster.net().unwrap();
    net.cut("node-2", "node-1").unwrap();
    scene.wait("without node-2's copy", |found| in_sync(found) == 2);
    scene.wait_writes(500);
    net.heal().unwrap();
    scene.wait_whole();
    scene.finish(load);
}

/// A data plane that is stopped and goes on: it leaves, its late writes do no harm, and it is rebuilt.
#[test]
fn a_member_that_is_stopped_leaves_and_returns() {
    let Some(cluster) = turn() else { return };
    let scene = Scene::new(cluster, "stopped");
    let load = scene.load(&HOT);
    let asleep = scene.engine("node-2");
    LocalCluster::signal(&[asleep], Signal::SIGSTOP).unwrap();
    scene.wait("without node-2's copy", |found| in_sync(found) == 2);
    scene.wait_writes(500);
    LocalCluster::signal(&[asleep], Signal::SIGCONT).unwrap();
    scene.wait_whole();
    scene.finish(load);
}

/// Rule 23: managers may be away. A member is lost while none runs; the engine's agent swaps by itself.
#[test]
fn else_rule_23_a_member_fails_while_no_manager_runs() {
    let Some(cluster) = turn() else { return };
    let scene = Scene::new(cluster, "rule23");
    let load = scene.load(&MIXED);
    (1..=3).for_each(|number| scene.kill_manager(&node(number)));
    scene.kill_node("node-3");
    scene.wait_writes(500);
    let found = scene.record();
    assert_eq!(in_sync(&found), 2, "{found:#}");
    scene.wait_whole();
    scene.finish(load);
}
