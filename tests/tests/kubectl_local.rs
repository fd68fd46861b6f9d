//! Plain `kubectl` with the kubeconfig that `addax up` writes: looks at everything, declares a volume, waits for it and
//! removes it. Without `kubectl` it says so and passes.
#![allow(clippy::unwrap_used)]

use e2e::cluster::LocalCluster;
use e2e::kubectl::Kubectl;

const MANIFEST: &str = "\
apiVersion: addax.io/v1alpha1
kind: Volume
metadata:
  name: declared
spec:
  size: 67108864
  numberOfReplicas: 2
";

/// The words of the table's line that begins with `name`.
fn line<'a>(table: &'a str, name: &str) -> Vec<&'a str> {
    let found =
        table.lines().map(|l| l.split_whitespace().collect::<Vec<_>>()).find(|words| words.first() == Some(&name));
    found.unwrap_or_else(|| panic!("{name} is not in\n{table}"))
}

#[test]
fn kubectl_declares_waits_looks_and_removes() {
    let cluster = LocalCluster::up(3).unwrap();
    let Some(kubectl) = Kubectl::find(&cluster.dir().join("kubeconfig")).unwrap() else { return };
    cluster.create("served", 64).unwrap();
    cluster.attach("served", "node-2", 60).unwrap();

    let all = kubectl.run(&["get", "volumes,engines,replicas,nodes.addax.io"], "").unwrap();
    assert_eq!(line(&all, "volume.addax.io/served")[1..6], ["attached", "healthy", "67108864", "3", "node-2"]);
    assert_eq!(line(&all, "engine.addax.io/served-e")[1..4], ["served", "running", "node-2"]);
    assert_eq!(all.lines().filter(|l| l.starts_with("replica.addax.io/served-r-")).count(), 3, "{all}");
    for node in ["node-1", "node-2", "node-3"] {
        assert_eq!(line(&all, &format!("node.addax.io/{node}"))[1..3], ["True", "True"]);
    }
    // The category and the short names are known too.
    let category = kubectl.run(&["get", "addax", "-o", "name"], "").unwrap();
    assert!(
        category.contains("volume.addax.io/served") && category.contains("instancemanager.addax.io/"),
        "{category}"
    );
    assert!(
        kubectl
            .run(&["get", "axv", "served", "-o", "jsonpath={.status.config.epoch}"], "")
            .unwrap()
            .parse::<u64>()
            .unwrap()
            > 0
    );

    let explained = kubectl.run(&["explain", "volume.spec"], "").unwrap();
    for word in ["numberOfReplicas", "minInSync", "Size in bytes", "-required-"] {
        assert!(explained.contains(word), "{word} is missing in\n{explained}");
    }
    let explained = kubectl.run(&["explain", "volume.status.config.inSync"], "").unwrap();
    assert!(explained.contains("every acknowledged write"), "{explained}");

    declare(&kubectl);
    remove(&kubectl, &cluster);

    let described = kubectl.run(&["describe", "volume", "served"], "").unwrap();
    assert!(described.contains("Robustness:") && described.contains("healthy"), "{described}");
}

fn declare(kubectl: &Kubectl) {
    let applied = kubectl.run(&["apply", "-f", "-"], MANIFEST).unwrap();
    assert_eq!(applied, "volume.addax.io/declared created\n");
    for what in ["condition=Scheduled", "condition=Initialised", "jsonpath={.status.state}=detached"] {
        kubectl.run(&["wait", "volume/declared", &format!("--for={what}"), "--timeout=60s"], "").unwrap();
    }
    let nodes = kubectl
        .run(&["get", "replicas", "-l", "addax.io/volume=declared", "-o", "jsonpath={.items[*].spec.nodeID}"], "");
    let nodes = nodes.unwrap();
    let mut nodes: Vec<&str> = nodes.split_whitespace().collect();
    nodes.sort_unstable();
    nodes.dedup();
    assert_eq!(nodes.len(), 2, "two copies on two nodes");

    assert_eq!(kubectl.run(&["apply", "-f", "-"], MANIFEST).unwrap(), "volume.addax.io/declared unchanged\n");
    let changed = MANIFEST.replace("numberOfReplicas: 2", "numberOfReplicas: 2\n  minInSync: 2");
    assert_eq!(kubectl.run(&["apply", "-f", "-"], &changed).unwrap(), "volume.addax.io/declared configured\n");
    let shown = kubectl.run(&["get", "volume", "declared", "-o", "jsonpath={.spec.minInSync}"], "").unwrap();
    assert_eq!(shown, "2");
    let shrunk = MANIFEST.replace("67108864", "33554432");
    let message = kubectl.refused(&["apply", "-f", "-"], &shrunk).unwrap();
    assert!(message.contains("size cannot shrink"), "{message}");
}

/// `delete` returns when the volume is gone, and its copies with their data are gone with it.
fn remove(kubectl: &Kubectl, cluster: &LocalCluster) {
    let deleted = kubectl.run(&["delete", "volume", "declared", "--timeout=60s"], "").unwrap();
    assert!(deleted.contains("\"declared\" deleted"), "{deleted}");
    let left = kubectl.run(&["get", "replicas", "-l", "addax.io/volume=declared", "-o", "name"], "").unwrap();
    assert_eq!(left, "");
    for node in 1..=3 {
        let lvols = e2e::disk_image::lvols(&cluster.disk_file(&format!("node-{node}"))).unwrap();
        let names: Vec<String> = lvols.into_keys().filter(|name| name.starts_with("declared-")).collect();
        assert!(names.is_empty(), "data is left: {names:?}");
    }
}
