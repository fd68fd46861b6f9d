//! Hosts whose connections break while what they sent is still on its way.

use std::time::Duration;

use e2e::cluster::LocalCluster;
use e2e::netns::HOST_PLACE;
use nix::sys::signal::Signal;

use crate::scene::{HOT, Scene, turn};

/// Rule 17, else: a write of a lost connection lands on top of its retry, or of what came after. Writes wait in the engine
/// for a member that is asleep; the host gives their connection up and sends them again; then the member wakes.
#[test]
fn else_rule_17_writes_of_a_lost_connection_land_before_their_retry_or_never() {
    let Some(cluster) = turn() else { return };
    let scene = Scene::new(cluster, "rule17");
    let load = scene.load(&[&HOT[..], &["--io-timeout", "300ms"]].concat());
    let net = scene.cluster.net().unwrap();
    for _ in 0..4 {
        let asleep = scene.engine("node-2");
        LocalCluster::signal(&[asleep], Signal::SIGSTOP).unwrap();
        std::thread::sleep(Duration::from_millis(700));
        LocalCluster::signal(&[asleep], Signal::SIGCONT).unwrap();
        scene.wait_writes(200);
    }
    scene.tell("slow four times");
    // The engine learns nothing of the end of these connections: it still has them when the host is back.
    for _ in 0..2 {
        net.cut(HOST_PLACE, "node-1").unwrap();
        std::thread::sleep(Duration::from_millis(900));
        net.heal().unwrap();
        scene.wait_writes(200);
        net.cut("node-1", HOST_PLACE).unwrap();
        std::thread::sleep(Duration::from_millis(900));
        net.heal().unwrap();
        scene.wait_writes(200);
    }
    scene.tell("cut four times");
    scene.finish(load);
}
