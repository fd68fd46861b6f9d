//! Bad input of every kind to a living cluster: each is refused with a message that says what is wrong, and nothing has
//! changed afterwards, neither any object nor any byte, while a load with verification goes on all the time.
#![allow(clippy::unwrap_used)]

mod bytes;
mod manifests;

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use e2e::cluster::LocalCluster;
use e2e::kubectl::Kubectl;
use e2e::programs::program;
use manifests::Api;
use nix::sys::signal::Signal;
use serde_json::{Value, json};

const VOLUME: &str = "data";
/// Objects of every kind whose state counts.
const KINDS: [&str; 7] =
    ["volumes", "engines", "replicas", "nodes", "volumeattachments", "instancemanagers", "settings"];
/// The background load; it ends by a signal.
const LOAD: [&str; 10] = ["--phase", "write", "--rw", "randrw", "--bs", "16k", "--qd", "8", "--time", "1h"];

/// Command lines, and the words of their refusal.
const COMMANDS: &[(&[&str], &str)] = &[
    (&["volume", "create", "x", "--size", "0"], "multiple of 1 MiB, from 1 MiB to 64 TiB, is allowed"),
    (&["volume", "create", "x", "--size", "1048577"], "multiple of 1 MiB, from 1 MiB to 64 TiB, is allowed"),
    (&["volume", "create", "x", "--size", "1000"], "multiple of 1 MiB, from 1 MiB to 64 TiB, is allowed"),
    (&["volume", "create", "x", "--size", "65TiB"], "multiple of 1 MiB, from 1 MiB to 64 TiB, is allowed"),
    (&["volume", "create", "x", "--size", "-1048576"], "\"-1048576\" is not a size: a whole number"),
    (&["volume", "create", "x", "--size", "-5GiB"], "\"-5GiB\" is not a size: a whole number"),
    (&["volume", "create", "x", "--size", "1.5GiB"], "\"1.5GiB\" is not a size: a whole number"),
    (&["volume", "create", "x", "--size", "much"], "\"much\" is not a size: a whole number"),
    (&["volume", "create", "x", "--size", ""], "\"\" is not a size: a whole number"),
    (&["volume", "create", "x", "--size", "99999999999999TiB"], "larger than any volume can be"),
    (&["volume", "create", "x"], "--size"),
    (&["volume", "create", "x", "--size", "63TiB"], "x: copy 1 of 3 has no room, so nothing was declared"),
    (&["volume", "create", "x", "--size", "63TiB"], "must stay free"),
    (&["volume", "create", "x", "--size", "8MiB", "--replicas", "4"], "at most one for each of the 3 nodes is allowed"),
    (&["volume", "create", "x", "--size", "8MiB", "--replicas", "0"], "0 is not in 1..=20"),
    (&["volume", "create", "x", "--size", "8MiB", "--replicas", "-1"], "-1 is not in 1..=20"),
    (&["volume", "create", "x", "--size", "8MiB", "--replicas", "21"], "21 is not in 1..=20"),
    (
        &["volume", "create", "x", "--size", "8MiB", "--replicas", "2", "--min-in-sync", "3"],
        "at most --replicas, which is 2",
    ),
    (&["volume", "create", "x", "--size", "8MiB", "--min-in-sync", "0"], "0 is not in 1..=20"),
    (&["volume", "create", "x", "--size", "8MiB", "--colour", "red"], "unexpected argument '--colour'"),
    (&["volume", "create", VOLUME, "--size", "8MiB"], "volume \"data\" already exists"),
    (&["volume", "create", VOLUME, "--size", "8MiB", "--no-wait"], "\"data\" already exists"),
    (&["volume", "create", "UPPER", "--size", "8MiB"], "'UPPER' may hold only lower-case letters, digits and '-'"),
    (&["volume", "create", "--size", "8MiB", "--", "-a"], "'-a' may hold only lower-case letters"),
    (&["volume", "create", "a-", "--size", "8MiB"], "must begin and end with a letter or digit"),
    (&["volume", "create", "a_b", "--size", "8MiB"], "'a_b' may hold only lower-case letters"),
    (&["volume", "create", "a.b", "--size", "8MiB"], "'a.b' may hold only lower-case letters"),
    (&["volume", "create", "../x", "--size", "8MiB"], "'../x' may hold only lower-case letters"),
    (&["volume", "create", "", "--size", "8MiB"], "a name must not be empty"),
    (
        &["volume", "create", "a-name-that-is-longer-than-fifty-two-letters-are-together", "--size", "8MiB"],
        "at most 52 are allowed",
    ),
    (
        &["volume", "attach", VOLUME, "--node", "node-2"],
        "volume data is attached to node-1: move it, or detach it first",
    ),
    (&["volume", "attach", VOLUME, "--node", "node-9"], "node \"node-9\" does not exist"),
    (&["volume", "attach", "none", "--node", "node-1"], "volume \"none\" does not exist"),
    (
        &["volume", "attach", VOLUME, "--node", "node-1", "--host-nqn", "me"],
        "\"me\" is not an NQN: nqn.yyyy-mm.domain:name",
    ),
    (&["volume", "rm", VOLUME, "--yes"], "volume data is attached to node-1: detach it first"),
    // Without a terminal nobody confirms.
    (&["volume", "rm", VOLUME], "data: not removed"),
    (&["volume", "rm", "none", "--yes"], "volume \"none\" does not exist"),
    (&["volume", "detach", "none"], "volume \"none\" does not exist"),
    (&["volume", "show", "none"], "volume \"none\" does not exist"),
    (&["node", "show", "none"], "node \"none\" does not exist"),
    (&["volume", "ls", "-o", "xml"], "[possible values: table, json, yaml]"),
    (&["up", "--nodes", "5"], "has 3 nodes: --nodes 5 is not allowed for it"),
    (&["agent", "--node", "node-9"], "node \"node-9\" is not in this cluster"),
];

/// Config files of the engine, and the words of their refusal.
const CONFIG_FILES: &[(&str, &str)] = &[
    ("", "EOF while parsing"),
    ("{\"subsystems\": [", "EOF while parsing"),
    ("\u{1}\u{2}garbage", "expected value"),
    ("{\"subsystems\": 3}", "expected a sequence"),
    (r#"{"subsystems": [{"subsystem": "bdev", "config": [{"method": "no_such"}]}]}"#, "there is no method \"no_such\""),
    (
        r#"{"subsystems": [{"subsystem": "bdev", "config": [{"method": "bdev_malloc_create",
            "params": {"name": "m", "num_blocks": "many", "block_size": 512}}]}]}"#,
        "method \"bdev_malloc_create\"",
    ),
    (
        r#"{"subsystems": [{"subsystem": "bdev", "config": [{"method": "bdev_malloc_create",
            "params": {"name": "m", "num_blocks": 8, "block_size": 7}}]}]}"#,
        "block_size 7: a power of two from 512 to 65536",
    ),
];

/// Everything that must not change: what the command line shows, and all objects. What a disk has free is left out, since
/// others on the machine use it too; and with it the versions of the objects that tell it.
fn state(cluster: &LocalCluster, api: &Api) -> Value {
    let mut state = json!({ "cli": cluster.json(&["volume", "ls"]).unwrap() });
    for kind in KINDS {
        let mut items = api.get(&format!("{}/{kind}", manifests::ROOT))["items"].take();
        for item in items.as_array_mut().unwrap() {
            let Some(disks) = item["status"]["diskStatus"].as_object_mut() else { continue };
            disks.values_mut().for_each(|disk| disk["storageAvailable"] = Value::Null);
            item["metadata"]["resourceVersion"] = Value::Null;
        }
        state[kind] = items;
    }
    state
}

fn assert_refused(cluster: &LocalCluster, args: &[&str], words: &str) {
    let output = cluster.command(args).unwrap().output().unwrap();
    let message = String::from_utf8_lossy(&output.stderr);
    let text = format!("addax {}: {}\n{message}", args.join(" "), output.status);
    assert!(matches!(output.status.code(), Some(1 | 2)), "{text}");
    assert!(message.contains(words), "{text}\nhas not the words {words:?}");
    assert!(!message.contains("panicked"), "{text}");
}

#[test]
fn bad_input_is_refused_with_a_reason_and_changes_nothing() {
    let cluster = LocalCluster::up(3).unwrap();
    cluster.create(VOLUME, 64).unwrap();
    let target = cluster.attach(VOLUME, "node-1", 60).unwrap();
    cluster.wait_healthy(VOLUME, 3).unwrap();
    let api = Api::new(&cluster.dir().join("kubeconfig")).unwrap();
    let log = cluster.dir().join("writes.log");
    let mut load = target.verify(&log, &LOAD).unwrap();
    let before = state(&cluster, &api);

    for (args, words) in COMMANDS {
        assert_refused(&cluster, args, words);
    }
    let kubectl = Kubectl::find(&cluster.dir().join("kubeconfig")).unwrap();
    manifests::refuse_all(&api, kubectl.as_ref());
    let nodes = ["node-1", "node-2", "node-3"];
    for node in nodes {
        bytes::refuse_rpc(&cluster.dir().join(format!("run/{node}.sock")));
    }
    let (_, port) = target.address.rsplit_once(':').unwrap();
    let port = port.parse().unwrap();
    let held: Vec<_> = nodes.iter().flat_map(|node| bytes::half_open(&address(node, port))).collect();
    for node in nodes {
        bytes::refuse_pdus(&address(node, port));
    }
    let mut stranger = target.clone();
    stranger.nqn = "nqn.2026-11.io.addax:volume:none".to_owned();
    let done = stranger.verify(&cluster.dir().join("other.log"), &["--phase", "check"]).unwrap().finish().unwrap();
    assert_eq!(done.code, Some(3), "{done:#?}");

    let after = state(&cluster, &api);
    assert!(before == after, "something has changed:\n{before:#}\nis now\n{after:#}");
    assert!(load.is_running(), "the load has ended");
    load.signal(Signal::SIGTERM).unwrap();
    let done = load.finish().unwrap();
    assert_eq!(done.code, Some(0), "{done:#?}");
    for name in ["errors", "reconnects", "retries"] {
        assert_eq!(done.report["write"][name], 0, "{name}: {done:#?}");
    }
    assert!(done.report["written_bytes"].as_u64() > Some(0), "{done:#?}");
    target.check(&log, &[]).unwrap();
    drop(held);
    cluster.cli(&["volume", "detach", VOLUME]).unwrap();
    assert!(cluster.equal_images(3).unwrap(), "the copies differ");
}

fn address(node: &str, port: u16) -> std::net::SocketAddr {
    let last: u8 = node.strip_prefix("node-").unwrap().parse().unwrap();
    ([127, 0, 0, last], port).into()
}

/// What is declared cannot be refused for the sake of the moment: it waits and says why, and harms nothing meanwhile.
#[test]
fn what_cannot_be_now_waits_with_a_reason() {
    let cluster = LocalCluster::up(3).unwrap();
    let api = Api::new(&cluster.dir().join("kubeconfig")).unwrap();
    let volumes = format!("{}/volumes", manifests::ROOT);

    // More copies than nodes.
    api.create(&volumes, &manifests::volume("wide", &json!({ "size": 8 << 20, "numberOfReplicas": 4 })));
    let wide = cluster.wait("wide", "refused a place", |v| condition(v, "Scheduled")["status"] == "False").unwrap();
    let message = condition(&wide, "Scheduled")["message"].to_string();
    assert!(
        message.contains("no place for a copy of 8 MiB") && message.contains("already holding a copy"),
        "{message}"
    );
    let replicas = api.get(&format!("{}/replicas", manifests::ROOT));
    assert_eq!(replicas["items"], json!([]), "all copies at once or none");
    cluster.cli(&["volume", "rm", "wide", "--yes"]).unwrap();

    // A second ticket for another node.
    cluster.create(VOLUME, 64).unwrap();
    let target = cluster.attach(VOLUME, "node-1", 60).unwrap();
    let log = cluster.dir().join("writes.log");
    let mut load = target.verify(&log, &LOAD).unwrap();
    let attachment = format!("{}/volumeattachments/{VOLUME}", manifests::ROOT);
    api.patch(&attachment, &json!({ "spec": { "tickets": { "other": { "type": "api", "nodeID": "node-2" } } } }));
    let told = wait_for(|| {
        let ticket = api.get(&attachment)["status"]["tickets"]["other"].take();
        ticket["message"].as_str().map(str::to_owned)
    });
    assert_eq!(told, "the volume is attached to node node-1 for ticket cli: that one must go first");
    api.patch(&attachment, &json!({ "spec": { "tickets": { "other": null } } }));

    // Deleted while attached: it goes on serving until it is detached.
    api.delete(&format!("{volumes}/{VOLUME}"));
    let blocked = cluster.wait(VOLUME, "told of", |v| condition(v, "DeletionBlocked")["status"] == "True").unwrap();
    let message = condition(&blocked, "DeletionBlocked")["message"].to_string();
    assert!(message.contains("attached to node node-1 for ticket cli: detach it first"), "{message}");
    assert_eq!(blocked["status"]["state"], "attached");
    assert_refused(&cluster, &["volume", "attach", VOLUME, "--node", "node-1"], "volume data is being removed");
    assert!(load.is_running(), "the load has ended");
    load.signal(Signal::SIGTERM).unwrap();
    let done = load.finish().unwrap();
    assert_eq!((done.code, &done.report["write"]["errors"]), (Some(0), &json!(0)), "{done:#?}");
    target.check(&log, &[]).unwrap();
    cluster.cli(&["volume", "detach", VOLUME]).unwrap();
    wait_for(|| (cluster.json(&["volume", "ls"]).unwrap() == json!([])).then_some(()));
}

fn condition(volume: &Value, kind: &str) -> Value {
    let all = volume["status"]["conditions"].as_array().cloned().unwrap_or_default();
    all.into_iter().find(|c| c["type"] == kind).unwrap_or_default()
}

fn wait_for<T>(mut found: impl FnMut() -> Option<T>) -> T {
    let until = Instant::now() + Duration::from_secs(60);
    loop {
        if let Some(value) = found() {
            return value;
        }
        assert!(Instant::now() < until, "it never comes");
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn an_engine_refuses_a_malformed_config_file_and_ends() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("config.json");
    for (text, words) in CONFIG_FILES {
        std::fs::write(&file, text).unwrap();
        let message = engine_ends(folder.path(), &file);
        assert!(message.contains(words), "{text}\n{message}\nhas not the words {words:?}");
        assert_eq!(std::fs::read_to_string(&file).unwrap(), *text);
    }
    let message = engine_ends(folder.path(), &folder.path().join("none.json"));
    assert!(message.contains("none.json: No such file"), "{message}");
    assert!(!folder.path().join("rpc.sock").exists(), "the socket is left");
}

/// Runs an engine that has to end by itself with an error; what it says.
fn engine_ends(folder: &Path, config: &Path) -> String {
    let log = folder.join("log");
    let mut child = Command::new(program("addax-engine").unwrap())
        .args(["--no-huge", "-s", "64", "-r"])
        .arg(folder.join("rpc.sock"))
        .arg("-c")
        .arg(config)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(std::fs::File::create(&log).unwrap())
        .spawn()
        .unwrap();
    let until = Instant::now() + Duration::from_secs(60);
    let status = loop {
        match child.try_wait().unwrap() {
            Some(status) => break Some(status),
            None if Instant::now() > until => break None,
            None => std::thread::sleep(Duration::from_millis(20)),
        }
    };
    let _ = child.kill();
    let _ = child.wait();
    let message = std::fs::read_to_string(&log).unwrap();
    assert_eq!(status.and_then(|s| s.code()), Some(1), "{message}");
    assert!(!message.contains("panicked"), "{message}");
    message
}

#[test]
fn commands_without_a_cluster_say_what_to_do() {
    let folder = tempfile::tempdir().unwrap();
    let run = |args: &[&str]| {
        let mut command = Command::new(program("addax").unwrap());
        let output = command.arg("--dir").arg(folder.path()).args(args).stdin(Stdio::null()).output().unwrap();
        assert!(matches!(output.status.code(), Some(1 | 2)), "{args:?}");
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    assert!(run(&["volume", "ls"]).contains("there is no cluster in"));
    assert!(run(&["up", "--nodes", "0"]).contains("--nodes 0: 1 to 32 are allowed"));
    assert!(run(&["up", "--nodes", "33"]).contains("--nodes 33: 1 to 32 are allowed"));
    assert!(run(&["--kubeconfig", "/none", "volume", "ls"]).contains("/none"));
    std::fs::write(folder.path().join("cluster.json"), "{ half").unwrap();
    for args in [&["volume", "ls"][..], &["up"], &["down"]] {
        assert!(run(args).contains("cluster.json is damaged"), "{args:?}");
    }
    assert_eq!(std::fs::read_to_string(folder.path().join("cluster.json")).unwrap(), "{ half");
}
