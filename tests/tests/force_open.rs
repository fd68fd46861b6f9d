//! What an operator does by hand when copies or the record are lost: forces a stale copy, recovers a record that was removed,
//! and gets a cluster back whose objects were restored from a backup.
#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::time::{Duration, Instant};

use e2e::cluster::{LocalCluster, Target};
use e2e::disk_image;
use e2e::kubectl::Kubectl;
use serde_json::Value;

/// Says when what was reached.
struct Timeline(Instant);

impl Timeline {
    fn tell(&self, what: &str) {
        println!("{:6.2} s  {what}", self.0.elapsed().as_secs_f64());
    }
}

/// Writes a region and wants it to go well.
fn write(target: &Target, log: &Path, offset: &str) {
    let args = ["--phase", "write", "--rw", "randwrite", "--bs", "16k", "--size", "16M", "--offset", offset];
    let done = target.verify(log, &[&args[..], &["--range", "16M"]].concat()).unwrap().finish().unwrap();
    assert_eq!(done.code, Some(0), "{done:#?}");
}

fn check(target: &Target, log: &Path, offset: &str) {
    target.check(log, &["--offset", offset, "--range", "16M"]).unwrap();
}

/// What a verb says when it is refused.
fn refused(cluster: &LocalCluster, args: &[&str]) -> String {
    let output = cluster.command(args).unwrap().output().unwrap();
    assert!(!output.status.success(), "{args:?} was not refused: {}", String::from_utf8_lossy(&output.stdout));
    String::from_utf8(output.stderr).unwrap()
}

/// The replicas on a node's first disk.
fn replicas(cluster: &LocalCluster, node: &str) -> Vec<String> {
    let disk = cluster.json(&["disk", "show", node, "disk-1"]).unwrap()[0].take();
    let replicas = disk["status"]["scheduledReplicas"].as_object();
    replicas.map(|map| map.keys().cloned().collect()).unwrap_or_default()
}

fn record(volume: &Value) -> &Value {
    &volume["status"]["config"]
}

fn in_sync(volume: &Value) -> Vec<String> {
    let names = record(volume)["inSync"].as_array().cloned().unwrap_or_default();
    names.iter().map(|name| name.as_str().unwrap().to_owned()).collect()
}

fn discarded(volume: &Value) -> Vec<String> {
    let aside = volume["status"]["discarded"].as_array().cloned().unwrap_or_default();
    aside.iter().map(|aside| aside["replica"].as_str().unwrap().to_owned()).collect()
}

fn hold(volume: &Value) -> Option<Value> {
    let conditions = volume["status"]["conditions"].as_array().cloned().unwrap_or_default();
    conditions.into_iter().find(|condition| condition["type"] == "RecoveryHold" && condition["status"] == "True")
}

fn lvols(cluster: &LocalCluster, node: &str) -> Vec<String> {
    disk_image::lvols(&cluster.disk_file(node)).unwrap().into_keys().collect()
}

/// Waits until something holds.
fn wait(what: &str, mut holds: impl FnMut() -> bool) {
    let until = Instant::now() + Duration::from_secs(90);
    while !holds() {
        assert!(Instant::now() < until, "never: {what}");
        std::thread::sleep(Duration::from_millis(100));
    }
}

#[test]
fn a_stale_copy_serves_by_force_and_what_comes_back_is_kept_and_not_used() {
    let cluster = LocalCluster::up(3).unwrap();
    let timeline = Timeline(Instant::now());
    cluster.create("forced", 64).unwrap();
    let target = cluster.attach("forced", "node-1", 60).unwrap();
    cluster.wait_healthy("forced", 3).unwrap();
    let [first, second, stale] = ["node-1", "node-2", "node-3"].map(|node| replicas(&cluster, node).remove(0));
    let logs = tempfile::tempdir().unwrap();
    let [old, missed, new] = ["old", "missed", "new"].map(|name| logs.path().join(name));
    write(&target, &old, "0");
    cluster.kill_node("node-3").unwrap();
    write(&target, &missed, "16M");
    let before = cluster.wait("forced", "without node-3's copy", |found| in_sync(found).len() == 2).unwrap();
    timeline.tell("written without node-3");
    cluster.kill_node("node-1").unwrap();
    cluster.kill_node("node-2").unwrap();
    cluster.start("agent", Some("node-3")).unwrap();
    cluster.start("manager", Some("node-3")).unwrap();
    cluster.cli(&["volume", "detach", "forced", "--timeout", "60"]).unwrap();
    let why = cluster.attach("forced", "node-3", 15).unwrap_err().to_string();
    assert!(why.contains("not attached within"), "{why}");
    assert_eq!(cluster.volume("forced").unwrap()["status"]["robustness"], "faulted");
    timeline.tell("node-3 is alone, and refused");

    // Typed, or given by name: nothing else will do.
    let force = ["volume", "force-open", "forced", "--replica"];
    let unconfirmed = refused(&cluster, &[&force[..], &[&stale]].concat());
    assert!(unconfirmed.contains("nothing was done"), "{unconfirmed}");
    assert!(unconfirmed.contains(&first) && unconfirmed.contains(&second), "{unconfirmed}");
    let wrong = refused(&cluster, &[&force[..], &[&stale, "--yes-i-lose-writes", "yes"]].concat());
    assert!(wrong.contains("nothing was done"), "{wrong}");
    let stranger = refused(&cluster, &[&force[..], &["forced-r-x", "--yes-i-lose-writes", "forced"]].concat());
    assert!(stranger.contains("forced-r-x") && stranger.contains(&stale), "{stranger}");
    let gone = refused(&cluster, &[&force[..], &[&first, "--yes-i-lose-writes", "forced"]].concat());
    assert!(gone.contains("cannot be reached"), "{gone}");
    assert_eq!(in_sync(&cluster.volume("forced").unwrap()), in_sync(&before));

    let account = cluster.json(&[&force[..], &[&stale, "--yes-i-lose-writes", "forced"]].concat()).unwrap()[0].take();
    assert_eq!(account["outcome"], "done", "{account:#}");
    assert_eq!(account["from"]["lineage"], record(&before)["lineage"], "{account:#}");
    assert_eq!(account["to"]["inSync"], serde_json::json!([stale]), "{account:#}");
    assert!(!account["requestedBy"].as_str().unwrap().is_empty(), "{account:#}");
    timeline.tell("forced");
    let served = Target { address: target.address.replace("127.0.0.1", "127.0.0.3"), ..target };
    let forced = cluster.wait("forced", "attached", |found| found["status"]["state"] == "attached").unwrap();
    assert_ne!(record(&forced)["lineage"], record(&before)["lineage"]);
    let mut aside = discarded(&forced);
    aside.sort();
    let mut expected = vec![first.clone(), second.clone()];
    expected.sort();
    assert_eq!(aside, expected);
    check(&served, &old, "0");
    let lost =
        served.verify(&missed, &["--phase", "check", "--written-only", "--bs", "64k"]).unwrap().finish().unwrap();
    assert_ne!(lost.code, Some(0), "what the stale copy missed is there: {lost:#?}");
    write(&served, &new, "32M");
    timeline.tell("the older data is served, and written on");

    cluster.up_again().unwrap();
    let healthy = cluster.wait_healthy("forced", 3).unwrap();
    timeline.tell("node-1 and node-2 are back; healthy with new copies");
    for kept in [&first, &second] {
        assert!(!in_sync(&healthy).contains(kept), "{healthy:#}");
    }
    for (node, kept) in [("node-1", &first), ("node-2", &second)] {
        assert!(lvols(&cluster, node).contains(kept), "{kept} is not on {node} any more");
    }
    check(&served, &old, "0");
    check(&served, &new, "32M");
    if let Some(kubectl) = Kubectl::find(&cluster.dir().join("kubeconfig")).unwrap() {
        let events = kubectl.run(&["get", "events", "-n", "addax-system", "-o", "json"], "").unwrap();
        assert!(events.contains("ForcedOpen") && events.contains("RecoveryRefused"), "{events}");
        // Deleting the object purges nothing.
        kubectl.run(&["delete", "replicas.addax.io", &second, "-n", "addax-system", "--wait=false"], "").unwrap();
    }
    let purge = ["volume", "purge-discarded", "forced", "--replica"];
    let member = refused(&cluster, &[&purge[..], &[&stale, "--yes-i-lose-data", "forced"]].concat());
    assert!(member.contains("set aside") && member.contains(&first), "{member}");
    cluster.cli(&[&purge[..], &[&first, "--yes-i-lose-data", "forced"]].concat()).unwrap();
    wait("the purged copy's data is gone", || !lvols(&cluster, "node-1").contains(&first));
    cluster.wait("forced", "rid of it", |found| discarded(found) == [second.clone()]).unwrap();
    assert!(lvols(&cluster, "node-2").contains(&second), "the other one went too");
    timeline.tell("one was purged, the other one is kept");
    check(&served, &old, "0");
    cluster.cli(&["volume", "detach", "forced"]).unwrap();
}

#[test]
fn a_volume_without_its_record_is_held_and_recovered_from_its_copies() {
    let cluster = LocalCluster::up(3).unwrap();
    let timeline = Timeline(Instant::now());
    let Some(kubectl) = Kubectl::find(&cluster.dir().join("kubeconfig")).unwrap() else { return };
    cluster.create("bare", 64).unwrap();
    let target = cluster.attach("bare", "node-1", 60).unwrap();
    cluster.wait_healthy("bare", 3).unwrap();
    let logs = tempfile::tempdir().unwrap();
    let log = logs.path().join("log");
    write(&target, &log, "0");
    cluster.cli(&["volume", "detach", "bare"]).unwrap();
    let before = cluster.volume("bare").unwrap();
    timeline.tell("written and detached");

    // The Volume is deleted without what belongs to it, while no manager looks, and made again from its spec.
    let is_manager = |args: &[String]| args.iter().any(|arg| arg == "manager");
    let managers: Vec<_> = ["node-1", "node-2", "node-3"]
        .into_iter()
        .flat_map(|node| cluster.node_processes(node))
        .filter(|pid| is_manager(&e2e::cluster::arguments(*pid)))
        .collect();
    assert_eq!(managers.len(), 3);
    LocalCluster::signal(&managers, nix::sys::signal::Signal::SIGKILL).unwrap();
    let of = ["-n", "addax-system"];
    let run = |args: &[&str], input: &str| kubectl.run(&[args, &of[..]].concat(), input).unwrap();
    run(&["delete", "volumes.addax.io", "bare", "--cascade=orphan", "--wait=false"], "");
    let patch = r#"[{"op":"test","path":"/metadata/finalizers/0","value":"addax.io"},{"op":"remove","path":"/metadata/finalizers/0"}]"#;
    wait("the finalizer is gone", || {
        let found = kubectl.run(&[&["get", "volumes.addax.io", "bare", "-o", "name"][..], &of[..]].concat(), "");
        if found.is_err() {
            return true;
        }
        let _ = kubectl
            .run(&[&["patch", "volumes.addax.io", "bare", "--type=json", "-p", patch][..], &of[..]].concat(), "");
        false
    });
    let manifest = "apiVersion: addax.io/v1alpha1\nkind: Volume\nmetadata: {name: bare, namespace: addax-system}\n\
                    spec: {size: 67108864, numberOfReplicas: 3}\n";
    run(&["create", "-f", "-"], manifest);
    assert!(cluster.volume("bare").unwrap()["status"]["config"].is_null());
    cluster.up_again().unwrap();
    timeline.tell("made again without its record");

    let held = cluster.wait("bare", "held", |found| hold(found).is_some()).unwrap();
    let why = hold(&held).unwrap();
    assert_eq!(why["reason"], "RecordMissing", "{why:#}");
    assert!(why["message"].as_str().unwrap().contains("addax volume recover bare"), "{why:#}");
    let refusal = cluster.attach("bare", "node-2", 10).unwrap_err().to_string();
    assert!(refusal.contains("held") && refusal.contains("addax volume recover bare"), "{refusal}");
    assert!(record(&cluster.volume("bare").unwrap()).is_null(), "it was initialised");

    cluster.kill_node("node-3").unwrap();
    let unread = refused(&cluster, &["volume", "recover", "bare"]);
    assert!(unread.contains("cannot be reached") && unread.contains("named as lost"), "{unread}");
    timeline.tell("held; not recovered while node-3 is away");
    cluster.up_again().unwrap();
    wait("recovered", || cluster.cli(&["volume", "recover", "bare"]).is_ok());
    let recovered = cluster.volume("bare").unwrap();
    assert_ne!(record(&recovered)["lineage"], record(&before)["lineage"]);
    assert_eq!(in_sync(&recovered).len(), 3, "{recovered:#}");
    timeline.tell("recovered");
    let served = cluster.attach("bare", "node-2", 60).unwrap();
    check(&served, &log, "0");
    cluster.wait_healthy("bare", 3).unwrap();
    check(&served, &log, "0");
    cluster.cli(&["volume", "detach", "bare"]).unwrap();
    assert!(cluster.equal_images(3).unwrap(), "the copies differ");
    timeline.tell("read back, and all copies are equal");
}

#[test]
fn a_cluster_restored_from_a_backup_is_held_until_every_copy_was_read() {
    let cluster = LocalCluster::up(3).unwrap();
    let timeline = Timeline(Instant::now());
    cluster.create("restored", 64).unwrap();
    let target = cluster.attach("restored", "node-1", 60).unwrap();
    cluster.wait_healthy("restored", 3).unwrap();
    let logs = tempfile::tempdir().unwrap();
    let [old, new] = ["old", "new"].map(|name| logs.path().join(name));
    write(&target, &old, "0");
    cluster.cli(&["volume", "detach", "restored"]).unwrap();
    cluster.cli(&["down"]).unwrap();
    let (objects, backup) = (cluster.dir().join("api/objects.log"), logs.path().join("backup"));
    std::fs::copy(&objects, &backup).unwrap();
    cluster.up_again().unwrap();
    timeline.tell("backed up");

    let target = cluster.attach("restored", "node-1", 60).unwrap();
    cluster.wait_healthy("restored", 3).unwrap();
    cluster.kill_node("node-3").unwrap();
    write(&target, &new, "16M");
    let last = cluster.wait("restored", "without node-3's copy", |found| in_sync(found).len() == 2).unwrap();
    cluster.cli(&["volume", "detach", "restored"]).unwrap();
    cluster.cli(&["down"]).unwrap();
    std::fs::copy(&backup, &objects).unwrap();
    timeline.tell("written without node-3, and restored");

    // Only the copy that missed it is there.
    cluster.start("apiserver", None).unwrap();
    cluster.wait_api().unwrap();
    let Some(kubectl) = Kubectl::find(&cluster.dir().join("kubeconfig")).unwrap() else { return };
    let patch = r#"{"spec":{"value":"1"}}"#;
    let setting =
        ["patch", "settings.addax.io", "recovery-generation", "-n", "addax-system", "--type=merge", "-p", patch];
    kubectl.run(&setting, "").unwrap();
    cluster.start("agent", Some("node-3")).unwrap();
    cluster.start("manager", Some("node-3")).unwrap();
    let refusal = cluster.attach("restored", "node-3", 20).unwrap_err().to_string();
    assert!(refusal.contains("restored from a backup"), "{refusal}");
    let held = cluster.wait("restored", "held", |found| hold(found).is_some()).unwrap();
    assert_eq!(hold(&held).unwrap()["reason"], "ClusterRestored");
    assert_eq!(in_sync(&held).len(), 3, "the record that was restored: {held:#}");
    timeline.tell("held while only a stale copy is there");

    cluster.up_again().unwrap();
    let served = cluster.attach("restored", "node-3", 90).unwrap();
    let recovered = cluster.volume("restored").unwrap();
    assert!(hold(&recovered).is_none(), "{recovered:#}");
    assert!(record(&recovered)["configNumber"].as_u64() > record(&last)["configNumber"].as_u64(), "{recovered:#}");
    timeline.tell("all copies were read; attached");
    check(&served, &old, "0");
    check(&served, &new, "16M");
    cluster.wait_healthy("restored", 3).unwrap();
    check(&served, &new, "16M");
    cluster.cli(&["volume", "detach", "restored"]).unwrap();
    assert!(cluster.equal_images(3).unwrap(), "the copies differ");
    timeline.tell("read back, and all copies are equal");
}
