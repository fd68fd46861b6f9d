//! Disks as an administrator lives with them: added, refused, filled with volumes, emptied, exchanged, removed; by verbs
//! and by the Node object.
#![allow(clippy::unwrap_used)]

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use blobstore_format::ReadAt;
use blobstore_golden::{Case, Class};
use e2e::cluster::LocalCluster;
use e2e::disk_image;
use e2e::engine::Engine;
use e2e::kubectl::Kubectl;
use nix::sys::signal::Signal;
use serde_json::{Value, json};

/// A disk's object, as `addax disk show` has it.
fn show(cluster: &LocalCluster, node: &str, disk: &str) -> Value {
    cluster.json(&["disk", "show", node, disk]).unwrap()[0].take()
}

fn condition<'a>(disk: &'a Value, type_: &str) -> &'a Value {
    let conditions = disk["status"]["conditions"].as_array().unwrap();
    conditions.iter().find(|condition| condition["type"] == type_).unwrap()
}

/// Waits until the disk is ready with the word as the reason.
fn until(cluster: &LocalCluster, node: &str, disk: &str, reason: &str) -> Value {
    let end = Instant::now() + Duration::from_secs(60);
    loop {
        let found = show(cluster, node, disk);
        if found["status"]["conditions"].is_array() && condition(&found, "Ready")["reason"] == reason {
            return found;
        }
        assert!(Instant::now() < end, "{node}/{disk} is never {reason}: {found:#}");
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// What a verb says when it is refused.
fn refused(cluster: &LocalCluster, args: &[&str]) -> String {
    let output = cluster.command(args).unwrap().output().unwrap();
    assert!(!output.status.success(), "{args:?} was not refused");
    String::from_utf8(output.stderr).unwrap()
}

/// A sparse file with something written into it.
fn file(path: &Path, mib: u64, writes: &[(u64, &[u8])]) -> String {
    let file = File::create(path).unwrap();
    file.set_len(mib << 20).unwrap();
    writes.iter().for_each(|(at, bytes)| file.write_all_at(bytes, *at).unwrap());
    path.to_str().unwrap().to_owned()
}

fn replicas(disk: &Value) -> usize {
    disk["status"]["scheduledReplicas"].as_object().map_or(0, serde_json::Map::len)
}

#[test]
fn a_disk_from_its_creation_to_its_removal() {
    let cluster = LocalCluster::up(2).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let spare = path("spare").to_str().unwrap().to_owned();

    // Made, formatted, listed.
    cluster.cli(&["disk", "create", "node-1", "spare", "--file", &spare, "--size", "1GiB", "--tag", "slow"]).unwrap();
    let made = show(&cluster, "node-1", "spare");
    let uuid = made["status"]["diskUUID"].as_str().unwrap().to_owned();
    assert_eq!(disk_image::store(Path::new(&spare)).unwrap().1, uuid);
    let table = cluster.cli(&["disk", "list"]).unwrap();
    assert_eq!(table.lines().count(), 4, "{table}");
    assert!(table.contains(&spare), "{table}");
    let twice = refused(&cluster, &["disk", "create", "node-1", "again", "--file", &spare, "--size", "1GiB"]);
    assert!(twice.contains("the same device as disk 'spare'"), "{twice}");
    cluster.cli(&["disk", "remove", "node-1", "again"]).unwrap();

    never_formatted(&cluster, &path("full"));

    // A volume on it moves to the node's other disk, under writes of which none is lost.
    cluster.cli(&["disk", "disable", "node-1", "disk-1"]).unwrap();
    assert_eq!(condition(&until(&cluster, "node-1", "disk-1", "Ready"), "Schedulable")["reason"], "Disabled");
    cluster.cli(&["volume", "create", "moved", "--size", "64MiB", "--replicas", "2"]).unwrap();
    assert_eq!(replicas(&until(&cluster, "node-1", "spare", "Ready")), 1);
    let target = cluster.attach("moved", "node-2", 60).unwrap();
    let logs = tempfile::tempdir().unwrap();
    let log = logs.path().join("writes.wlog");
    let mut load =
        target.verify(&log, &["--phase", "write", "--rw", "randwrite", "--bs", "16k", "--time", "10m"]).unwrap();
    let held = refused(&cluster, &["disk", "remove", "node-1", "spare"]);
    assert!(held.contains("1 replicas are on node-1/spare"), "{held}");
    let stuck = refused(&cluster, &["disk", "evict", "node-1", "spare", "--timeout", "3"]);
    assert!(stuck.contains("no place for a copy"), "{stuck}");
    cluster.cli(&["disk", "enable", "node-1", "disk-1"]).unwrap();
    cluster.cli(&["disk", "evict", "node-1", "spare"]).unwrap();
    assert_eq!(replicas(&show(&cluster, "node-1", "disk-1")), 1);
    load.signal(Signal::SIGTERM).unwrap();
    let done = load.finish().unwrap();
    assert_eq!((done.code, &done.report["write"]["errors"]), (Some(0), &Value::from(0)), "{done:#?}");
    target.check(&log, &[]).unwrap();
    cluster.wait_healthy("moved", 2).unwrap();
    cluster.cli(&["volume", "detach", "moved"]).unwrap();
    assert!(cluster.equal_images(2).unwrap(), "the copies differ");
    assert!(disk_image::lvols(Path::new(&spare)).unwrap().is_empty(), "data is left on the disk");

    // Back again, without anybody who has it attached.
    cluster.cli(&["disk", "enable", "node-1", "spare"]).unwrap();
    cluster.cli(&["disk", "evict", "node-1", "disk-1"]).unwrap();
    assert_eq!(replicas(&show(&cluster, "node-1", "spare")), 1);
    cluster.wait("moved", "detached again", |found| found["status"]["state"] == "detached").unwrap();
    cluster.cli(&["volume", "rm", "moved", "--yes"]).unwrap();

    // Forgotten, and what it holds stays.
    cluster.cli(&["disk", "remove", "node-1", "spare"]).unwrap();
    assert!(refused(&cluster, &["disk", "show", "node-1", "spare"]).contains("has no disk"));
    let again = refused(&cluster, &["disk", "create", "node-1", "spare", "--file", &spare]);
    assert!(again.contains("NotEmpty") && again.contains(&uuid), "{again}");
    cluster.cli(&["disk", "remove", "node-1", "spare"]).unwrap();
    cluster.cli(&["disk", "import", "node-1", "spare", "--file", &spare]).unwrap();
    assert_eq!(show(&cluster, "node-1", "spare")["status"]["diskUUID"], uuid.as_str());
}

/// A file that holds anything is refused; erased only by the fingerprint of just that.
fn never_formatted(cluster: &LocalCluster, path: &Path) {
    let full = file(path, 128, &[((128 << 20) - 8, b"precious")]);
    let create = ["disk", "create", "node-2", "full", "--file", &full];
    assert!(refused(cluster, &create).contains("NotEmpty: it holds data of an unknown kind"));
    let fingerprint = show(cluster, "node-2", "full")["status"]["fingerprint"].as_str().unwrap().to_owned();
    let force = [&create[..], &["--force"]].concat();
    let wrong = refused(cluster, &[&force[..], &["--confirm", "0123456789ab"]].concat());
    assert!(wrong.contains("nothing was destroyed"), "{wrong}");
    let mut typed = cluster.command(&force).unwrap();
    typed.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut typed = typed.spawn().unwrap();
    typed.stdin.take().unwrap().write_all(b"yes\n").unwrap();
    assert!(!typed.wait_with_output().unwrap().status.success());
    let mut tail = [0; 8];
    File::open(path).unwrap().read_exact_at(&mut tail, (128 << 20) - 8).unwrap();
    assert_eq!(&tail, b"precious");
    // Changed since: the fingerprint that was seen permits nothing any more.
    let table = file(path, 128, &[(510, b"\x55\xaa")]);
    cluster.cli(&["disk", "show", "node-2", "full"]).unwrap();
    let changed = refused(cluster, &[&force[..], &["--confirm", &fingerprint]].concat());
    assert!(changed.contains("nothing was destroyed") || changed.contains("MBR"), "{changed}");
    let end = Instant::now() + Duration::from_secs(60);
    let seen = loop {
        assert!(Instant::now() < end, "the fingerprint is still {fingerprint}");
        let found = show(cluster, "node-2", "full")["status"]["fingerprint"].as_str().unwrap().to_owned();
        if found != fingerprint {
            break found;
        }
        std::thread::sleep(Duration::from_millis(100));
    };
    cluster.cli(&[&force[..], &["--confirm", &seen]].concat()).unwrap();
    assert!(disk_image::store(Path::new(&table)).is_ok());
    cluster.cli(&["disk", "remove", "node-2", "full"]).unwrap();
}

#[test]
fn another_disk_in_its_place_is_told_and_not_touched() {
    let cluster = LocalCluster::up(1).unwrap();
    cluster.cli(&["volume", "create", "kept", "--size", "64MiB", "--replicas", "1"]).unwrap();
    let (disk, kept) = (cluster.disk_file("node-1"), cluster.dir().join("kept"));
    let uuid = show(&cluster, "node-1", "disk-1")["status"]["diskUUID"].as_str().unwrap().to_owned();
    fs::rename(&disk, &kept).unwrap();
    LocalCluster::signal(&[cluster.engine("node-1").unwrap()], Signal::SIGKILL).unwrap();
    let gone = until(&cluster, "node-1", "disk-1", "DeviceMissing");
    assert_eq!((&gone["status"]["diskUUID"], replicas(&gone)), (&Value::from(uuid.as_str()), 1));

    file(&disk, 256, &[]);
    until(&cluster, "node-1", "disk-1", "DiskChanged");
    let mut bytes = Vec::new();
    File::open(&disk).unwrap().read_to_end(&mut bytes).unwrap();
    assert!(bytes.iter().all(|byte| *byte == 0), "the other disk was written to");

    fs::rename(&kept, &disk).unwrap();
    assert_eq!(until(&cluster, "node-1", "disk-1", "Ready")["status"]["diskUUID"], uuid.as_str());
    cluster.attach("kept", "node-1", 60).unwrap();
}

/// Images that SPDK wrote, as files.
fn golden(folder: &Path, block_size: u32) -> (&'static Case, PathBuf) {
    let fits = |case: &&Case| {
        let lvols = case.lvols.as_ref().map_or(0, Vec::len);
        case.class == Class::Clean && case.block_size == block_size && case.external.is_none() && lvols >= 2
    };
    let case = blobstore_golden::cases().iter().find(fits).unwrap();
    let (image, path) = (case.image(), folder.join(&case.name));
    let file = File::create(&path).unwrap();
    file.set_len(image.size()).unwrap();
    let (mut at, mut piece) = (0, vec![0; 1 << 20]);
    while let Some(data) = image.next_data(at).unwrap() {
        let count = piece.len().min(usize::try_from(image.size() - data).unwrap());
        image.read_at(data, &mut piece[..count]).unwrap();
        file.write_all_at(&piece[..count], data).unwrap();
        at = data + count as u64;
    }
    (case, path)
}

#[test]
fn an_lvstore_of_others_is_imported_counted_and_left_alone() {
    let cluster = LocalCluster::up(1).unwrap();
    for (disk, block_size) in [("pages", 4096), ("sectors", 512)] {
        let (case, path) = golden(&cluster.dir(), block_size);
        let before = disk_image::lvols(&path).unwrap();
        cluster.cli(&["disk", "import", "node-1", disk, "--file", path.to_str().unwrap()]).unwrap();
        let found = show(&cluster, "node-1", disk);
        let (store, status) = (case.store.as_ref().unwrap(), &found["status"]);
        assert_eq!(
            (&status["diskUUID"], &status["lvstore"]),
            (&store.uuid.as_str().into(), &store.name.as_str().into())
        );
        assert_eq!(status["storageMaximum"], store.total_data_clusters * store.cluster_size);
        assert_eq!(status["unmanagedCount"], before.len());
        for lvol in case.lvols.as_ref().unwrap() {
            assert_eq!(status["unmanaged"][&lvol.name]["uuid"], lvol.uuid.as_str(), "{found:#}");
        }
        assert!(status["storageUnmanaged"].as_i64().unwrap() > 0, "{found:#}");
        // Replicas have blocks of 4096 bytes.
        let usable = condition(&found, "Schedulable");
        assert_eq!(usable["reason"], if block_size == 4096 { "Schedulable" } else { "BlockSize" }, "{found:#}");
        cluster.cli(&["disk", "remove", "node-1", disk]).unwrap();
        let after = disk_image::lvols(&path).unwrap();
        assert!(before == after, "{disk}: an lvol of others was changed");
    }
}

#[test]
fn a_remote_namespace_is_a_disk() {
    const NQN: &str = "nqn.2026-11.io.example:far";
    let far = Engine::start(&["-s", "256"]).unwrap();
    far.rpc("bdev_malloc_create", json!({"name": "M0", "num_blocks": 65536, "block_size": 4096})).unwrap();
    let address = far.export("M0", NQN, e2e::spdk::free_port().unwrap()).unwrap();
    let cluster = LocalCluster::up(1).unwrap();
    let place = format!("{address}/{NQN}");
    let create = ["disk", "create", "node-1", "far", "--nvme", &place];
    // Nobody here can see that it is empty.
    assert!(refused(&cluster, &create).contains("ContentUnknown"));
    let seen = show(&cluster, "node-1", "far");
    let fingerprint = seen["status"]["fingerprint"].as_str().unwrap();
    cluster.cli(&[&create[..], &["--force", "--confirm", fingerprint]].concat()).unwrap();
    let made = until(&cluster, "node-1", "far", "Ready");
    assert_eq!(made["status"]["device"], seen["status"]["device"], "{made:#}");
    assert!(made["status"]["device"].as_str().unwrap().len() == 36, "{made:#}");
    cluster.cli(&["disk", "disable", "node-1", "disk-1"]).unwrap();
    cluster.cli(&["volume", "create", "there", "--size", "64MiB", "--replicas", "1"]).unwrap();
    assert_eq!(replicas(&until(&cluster, "node-1", "far", "Ready")), 1);
    let target = cluster.attach("there", "node-1", 60).unwrap();
    let logs = tempfile::tempdir().unwrap();
    let log = logs.path().join("writes.wlog");
    let write = ["--phase", "write", "--rw", "randwrite", "--bs", "16k", "--size", "32M"];
    assert_eq!(target.verify(&log, &write).unwrap().finish().unwrap().code, Some(0));
    // The node's data plane finds it again. What a far cache held may be gone, so hosts that were attached are refused
    // (rule 1).
    let before = cluster.epoch("there").unwrap();
    LocalCluster::signal(&[cluster.engine("node-1").unwrap()], Signal::SIGKILL).unwrap();
    cluster.wait("there", "open again", |found| found["status"]["config"]["epoch"].as_u64() > Some(before)).unwrap();
}

#[test]
fn the_node_object_does_what_the_verbs_do() {
    let cluster = LocalCluster::up(1).unwrap();
    let Some(kubectl) = Kubectl::find(&cluster.dir().join("kubeconfig")).unwrap() else { return };
    let path = cluster.dir().join("more");
    let patch = |spec: String| format!(r#"{{"spec":{{"disks":{{"more":{spec}}}}}}}"#);
    let args = |text: &str| -> Vec<String> {
        ["patch", "node.addax.io", "node-1", "--type=merge", "-p", text].map(str::to_owned).to_vec()
    };
    let run = |text: String| {
        let args = args(&text);
        kubectl.run(&args.iter().map(String::as_str).collect::<Vec<_>>(), "").unwrap()
    };
    let deny = |text: String| {
        let args = args(&text);
        kubectl.refused(&args.iter().map(String::as_str).collect::<Vec<_>>(), "").unwrap()
    };
    run(patch(format!(r#"{{"path":"{}","size":536870912,"create":true}}"#, path.display())));
    until(&cluster, "node-1", "more", "Ready");
    cluster.cli(&["disk", "disable", "node-1", "disk-1"]).unwrap();
    cluster.cli(&["volume", "create", "here", "--size", "64MiB", "--replicas", "1"]).unwrap();
    assert_eq!(replicas(&until(&cluster, "node-1", "more", "Ready")), 1);
    for (spec, said) in [
        ("null", "evict it first"),
        (r#"{"path":"/dev/other"}"#, "what a disk is on cannot change"),
        (r#"{"type":"nvme"}"#, "what a disk is on cannot change"),
        (r#"{"evictionRequested":true}"#, "evictionRequested needs allowScheduling: false"),
    ] {
        let refused = deny(patch(spec.to_owned()));
        assert!(refused.contains(said), "{spec}: {refused}");
    }
    cluster.cli(&["disk", "enable", "node-1", "disk-1"]).unwrap();
    run(patch(r#"{"allowScheduling":false,"evictionRequested":true}"#.to_owned()));
    let end = Instant::now() + Duration::from_secs(60);
    while replicas(&show(&cluster, "node-1", "more")) > 0 {
        assert!(Instant::now() < end, "never empty");
        std::thread::sleep(Duration::from_millis(100));
    }
    run(patch("null".to_owned()));
}

/// A full disk is an error of the writer, not of the replica, and of nobody else.
#[test]
fn a_full_disk_fails_writes_and_no_replica() {
    let cluster = LocalCluster::up_with(2, &["--disk-size", "192MiB"]).unwrap();
    let Some(kubectl) = Kubectl::find(&cluster.dir().join("kubeconfig")).unwrap() else { return };
    for (setting, value) in
        [("storage-over-provisioning-percentage", "400"), ("storage-minimal-available-percentage", "0")]
    {
        let value = format!(r#"{{"spec":{{"value":"{value}"}}}}"#);
        kubectl.run(&["patch", "setting.addax.io", setting, "--type=merge", "-p", &value], "").unwrap();
    }
    for name in ["big", "small"] {
        cluster.cli(&["volume", "create", name, "--size", "128MiB", "--replicas", "2"]).unwrap();
    }
    let logs = tempfile::tempdir().unwrap();
    let [big_log, small_log] = ["big", "small"].map(|name| logs.path().join(name));
    let (big, small) = (cluster.attach("big", "node-1", 60).unwrap(), cluster.attach("small", "node-2", 60).unwrap());
    let fill = |size: &str| ["--phase", "write", "--rw", "write", "--bs", "64k", "--size", size].map(str::to_owned);
    let write = |target: &e2e::cluster::Target, log: &Path, args: &[String]| {
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        target.verify(log, &args).unwrap().finish().unwrap()
    };
    let small_done = write(&small, &small_log, &fill("64M"));
    assert_eq!(small_done.code, Some(0), "{small_done:#?}");
    let full = write(&big, &big_log, &[&fill("128M")[..], &["--max-errors".to_owned(), "64".to_owned()]].concat());
    assert!(full.report["write"]["errors"].as_u64() > Some(0), "{full:#?}");
    for name in ["big", "small"] {
        let found = cluster.wait_healthy(name, 2).unwrap();
        assert_eq!(found["status"]["config"]["configNumber"], 1, "a copy was taken for failed: {found:#}");
    }
    // What has its clusters goes on, and the rest does once there is room.
    small.check(&small_log, &[]).unwrap();
    let small_again = write(&small, &small_log, &fill("64M"));
    assert_eq!(small_again.code, Some(0), "{small_again:#?}");
    cluster.cli(&["volume", "detach", "small"]).unwrap();
    cluster.cli(&["volume", "rm", "small", "--yes"]).unwrap();
    let room = write(&big, &logs.path().join("after"), &fill("128M"));
    assert_eq!((room.code, &room.report["write"]["errors"]), (Some(0), &Value::from(0)), "{room:#?}");
}
