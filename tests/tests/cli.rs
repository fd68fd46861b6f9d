//! The command line as people and programs use it: a cluster that comes and goes, tables, JSON, YAML, completions.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::process::{Command, Stdio};

use e2e::cluster::LocalCluster;
use e2e::programs::program;
use nix::sys::signal::Signal;
use serde_json::Value;

/// The same objects, from YAML.
fn yaml(cluster: &LocalCluster, args: &[&str]) -> Value {
    let text = cluster.cli(&[args, &["-o", "yaml"]].concat()).unwrap();
    serde_saphyr::from_str(&text).unwrap_or_else(|e| panic!("{args:?}: {e}\n{text}"))
}

/// A table's cells by its header.
fn cell(table: &str, row: &str, column: &str) -> String {
    let mut lines = table.lines();
    let at = lines.next().unwrap().find(column).unwrap_or_else(|| panic!("no {column} in\n{table}"));
    let line =
        lines.find(|l| l.split_whitespace().next() == Some(row)).unwrap_or_else(|| panic!("no {row} in\n{table}"));
    line.get(at..).unwrap_or_default().split("  ").next().unwrap_or_default().trim().to_owned()
}

#[test]
fn verbs_print_tables_json_and_yaml() {
    let cluster = LocalCluster::up(2).unwrap();
    cluster.cli(&["volume", "create", "one", "--size", "64MiB", "--replicas", "2", "--min-in-sync", "2"]).unwrap();
    cluster.cli(&["volume", "create", "two", "--size", "1GiB", "--replicas", "1"]).unwrap();

    let nodes = cluster.cli(&["node", "ls"]).unwrap();
    for node in ["node-1", "node-2"] {
        assert_eq!(cell(&nodes, node, "READY"), "True");
        assert_eq!(cell(&nodes, node, "SCHEDULABLE"), "True");
    }
    let node = cluster.cli(&["node", "show", "node-2"]).unwrap();
    assert_eq!(cell(&node, "node-2", "AGENT").split(':').next(), Some("127.0.0.2"));
    let disks = node.split_once("\n\n").unwrap().1;
    assert_eq!(cell(disks, "disk-1", "SCHEDULABLE"), "true");
    assert!(cell(disks, "disk-1", "REPLICAS").contains("one-r-"), "{node}");

    let volumes = cluster.cli(&["volume", "ls"]).unwrap();
    assert_eq!(cell(&volumes, "one", "SIZE"), "64 MiB");
    assert_eq!(cell(&volumes, "two", "SIZE"), "1 GiB");
    assert_eq!((cell(&volumes, "one", "STATE"), cell(&volumes, "one", "IN SYNC")), ("detached".into(), "2/2".into()));
    let shown = cluster.cli(&["volume", "show", "one"]).unwrap();
    for words in ["record: epoch 0", "closed cleanly", "nqn.2026-11.io.addax:replica:one-r-", "Scheduled: True"] {
        assert!(shown.contains(words), "{words:?} is missing in\n{shown}");
    }

    for args in [&["volume", "ls"][..], &["volume", "show", "one"], &["node", "show", "node-1"]] {
        let (json, yaml) = (cluster.json(args).unwrap(), yaml(&cluster, args));
        let names = |list: &Value| -> Vec<String> {
            list.as_array().unwrap().iter().map(|o| o["metadata"]["name"].as_str().unwrap().to_owned()).collect()
        };
        assert_eq!(names(&json), names(&yaml), "{args:?}");
        assert_eq!(json[0]["spec"], yaml[0]["spec"], "{args:?}");
    }
    let attached = yaml(&cluster, &["volume", "attach", "two", "--node", "node-1"]);
    assert_eq!(attached[0]["nqn"], "nqn.2026-11.io.addax:volume:two");
    // Once more is no error.
    let told = cluster.cli(&["volume", "attach", "two", "--node", "node-1", "--host-nqn", "nqn.2026-11.io.example:me"]);
    let told = told.unwrap();
    assert!(
        told.contains("nvme connect -t tcp -a 127.0.0.1 -s ") && told.contains(" -q nqn.2026-11.io.example:me"),
        "{told}"
    );
    cluster.cli(&["volume", "detach", "two"]).unwrap();
    cluster.cli(&["volume", "detach", "two"]).unwrap();
    cluster.cli(&["volume", "rm", "two", "--yes"]).unwrap();
    assert_eq!(cluster.json(&["volume", "ls"]).unwrap().as_array().unwrap().len(), 1);
}

#[test]
fn a_cluster_comes_again_as_it_was() {
    let cluster = LocalCluster::up(1).unwrap();
    cluster.cli(&["volume", "create", "kept", "--size", "64MiB", "--replicas", "1"]).unwrap();
    let running = |cluster: &LocalCluster| cluster.processes().into_iter().collect::<BTreeSet<_>>();
    let before = running(&cluster);
    assert_eq!(before.len(), 4, "API server, manager, agent, data plane");

    // What runs is left alone, and the number of nodes need not be said again.
    cluster.cli(&["-q", "up"]).unwrap();
    assert_eq!(running(&cluster), before);

    // What is missing is started.
    let is_manager = |pid: &nix::unistd::Pid| e2e::cluster::program_name(*pid).contains(" manager ");
    let manager = before.iter().copied().find(is_manager).unwrap();
    LocalCluster::signal(&[manager], Signal::SIGKILL).unwrap();
    cluster.cli(&["-q", "up"]).unwrap();
    let after = running(&cluster);
    assert_eq!((after.len(), after.difference(&before).count()), (4, 1), "{before:?} {after:?}");

    cluster.cli(&["down"]).unwrap();
    assert_eq!(running(&cluster), BTreeSet::new());
    let gone = cluster.command(&["volume", "ls"]).unwrap().output().unwrap();
    let message = String::from_utf8_lossy(&gone.stderr).into_owned();
    assert!(!gone.status.success() && message.contains("is not up: `addax up --dir "), "{message}");
    cluster.cli(&["down"]).unwrap();

    cluster.cli(&["-q", "up"]).unwrap();
    let kept = cluster.volume("kept").unwrap();
    assert_eq!(kept["status"]["state"], "detached");
    cluster.cli(&["volume", "attach", "kept", "--node", "node-1"]).unwrap();
    cluster.cli(&["down", "--delete"]).unwrap();
    assert_eq!(running(&cluster), BTreeSet::new());
    assert!(!cluster.dir().exists());
}

#[test]
fn completions_are_scripts_of_their_shells() {
    for shell in ["bash", "zsh", "fish"] {
        let output = Command::new(program("addax").unwrap()).args(["completions", shell]).output().unwrap();
        assert!(output.status.success(), "{shell}");
        let script = String::from_utf8(output.stdout).unwrap();
        for word in ["volume", "attach", "host-nqn", "min-in-sync", "completions"] {
            assert!(script.contains(word), "{shell}: {word} is missing");
        }
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), &script).unwrap();
        // Shells that are not installed cannot judge it.
        if let Ok(judged) = Command::new(shell).arg("-n").arg(file.path()).stdin(Stdio::null()).output() {
            assert!(judged.status.success(), "{shell}: {}", String::from_utf8_lossy(&judged.stderr));
        }
    }
    let none = Command::new(program("addax").unwrap()).args(["completions", "dos"]).output().unwrap();
    assert!(String::from_utf8_lossy(&none.stderr).contains("possible values: bash"));
}
