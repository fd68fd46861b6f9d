//! Requests about every other kind, Addax's and the built-in ones that the embedded API server has, and reads.

use addax_api::{MIB, NAMESPACE};
use serde_json::{Value, json};

use crate::exchange::{Call, JSON, MERGE, Step, TABLE};
use crate::volumes::path;

const LEASES: &str = "/apis/coordination.k8s.io/v1/namespaces/addax-system/leases";
const CORE: &str = "/api/v1/namespaces/addax-system";

fn create(kind: &str, plural: &str, name: &str, spec: Value) -> Call {
    let body = json!({
        "apiVersion": "addax.io/v1alpha1", "kind": kind,
        "metadata": {"name": name, "namespace": NAMESPACE, "labels": {"addax.io/volume": "v1"}}, "spec": spec,
    });
    Call::new("POST", path(plural) + "?fieldValidation=Strict", JSON, &body)
}

/// The status of a node whose disk holds copies.
fn holds(copies: Value) -> Call {
    let path = path("nodes") + "/n1/status?fieldValidation=Strict";
    let disk = json!({"scheduledReplicas": copies});
    Call::new("PATCH", path, MERGE, &json!({"status": {"diskStatus": {"d1": disk}}}))
}

fn change(plural: &str, name: &str, spec: Value) -> Call {
    Call::new("PATCH", path(plural) + "/" + name + "?fieldValidation=Strict", MERGE, &json!({"spec": spec}))
}

/// The kinds of Addax beside volumes.
pub fn ours() -> Vec<Step> {
    let replica = |name: &str, spec: Value| create("Replica", "replicas", name, spec);
    let engine = |name: &str, spec: Value| create("Engine", "engines", name, spec);
    let node = |name: &str, spec: Value| create("Node", "nodes", name, spec);
    let attachment = |name: &str, spec: Value| create("VolumeAttachment", "volumeattachments", name, spec);
    let manager = |name: &str, spec: Value| create("InstanceManager", "instancemanagers", name, spec);
    let setting = |name: &str, spec: Value| create("Setting", "settings", name, spec);
    vec![
        Step::good("replica", replica("r1", json!({"volumeName": "v1", "size": MIB}))),
        Step::good("replica placed", change("replicas", "r1", json!({"nodeID": "n1", "diskID": "d1"}))),
        Step::bad("replica placed anew", change("replicas", "r1", json!({"nodeID": "n2"}))),
        Step::bad("replica of another volume", change("replicas", "r1", json!({"volumeName": "v2"}))),
        Step::bad("replica shrunk", change("replicas", "r1", json!({"size": 1}))),
        Step::good("replica failed", change("replicas", "r1", json!({"failedAt": "2026-01-01T00:00:00Z"}))),
        Step::bad("replica failed sometime", change("replicas", "r1", json!({"failedAt": "sometime"}))),
        Step::good("replica failed no more", change("replicas", "r1", json!({"failedAt": null}))),
        Step::bad("replica of nothing", replica("r2", json!({"size": MIB}))),
        Step::bad(
            "replica in an unknown state",
            replica("r2", json!({"volumeName": "v", "size": MIB, "desireState": "x"})),
        ),
        Step::good("engine", engine("e1", json!({"volumeName": "v1", "nodeID": "n1", "size": MIB}))),
        Step::bad("engine moved", change("engines", "e1", json!({"nodeID": "n2"}))),
        Step::bad("engine nowhere", engine("e2", json!({"volumeName": "v1", "nodeID": "", "size": MIB}))),
        Step::bad(
            "engine with half an address",
            change("engines", "e1", json!({"replicaAddresses": {"r1": {"nqn": "n"}}})),
        ),
        Step::good("node", node("n1", json!({"disks": {"d1": {"path": "/dev/x"}}}))),
        Step::bad("node with a disk without a path", node("n2", json!({"disks": {"d1": {}}}))),
        Step::bad(
            "node with a disk that reserves less than nothing",
            change(
                "nodes",
                "n1",
                json!({"disks": {
                    "d1": {"storageReserved": -1},
                }}),
            ),
        ),
        Step::bad("node with a disk that is none", node("n2", json!({"disks": {"d1": "/dev/x"}}))),
        Step::good("node without anything", node("n3", json!({}))),
        Step::bad("disk moved", change("nodes", "n1", json!({"disks": {"d1": {"path": "/dev/y"}}}))),
        Step::bad("disk of another type", change("nodes", "n1", json!({"disks": {"d1": {"type": "block"}}}))),
        Step::bad("disk of no type", change("nodes", "n1", json!({"disks": {"d1": {"type": "tape"}}}))),
        Step::bad("remote disk that is nowhere", change("nodes", "n1", json!({"disks": {"d2": {"type": "nvme"}}}))),
        Step::good(
            "remote disk",
            change(
                "nodes",
                "n1",
                json!({"disks": {"d2": {"type": "nvme", "nvme": {"traddr": "::1", "trsvcid": 4420, "nqn": "nqn.x:y"}}}}),
            ),
        ),
        Step::bad(
            "disk evicted while it is scheduled to",
            change("nodes", "n1", json!({"disks": {"d1": {"evictionRequested": true}}})),
        ),
        Step::bad("disk taken away while it is scheduled to", change("nodes", "n1", json!({"disks": {"d1": null}}))),
        Step::good(
            "disk evicted",
            change("nodes", "n1", json!({"disks": {"d1": {"evictionRequested": true, "allowScheduling": false}}})),
        ),
        Step::good("copies on the disk", holds(json!({"a": 1048576}))),
        Step::bad("disk with copies taken away", change("nodes", "n1", json!({"disks": {"d1": null}}))),
        Step::good("no copies on the disk", holds(json!({"a": null}))),
        Step::good("disk taken away", change("nodes", "n1", json!({"disks": {"d1": null}}))),
        Step::good("attachment", attachment("v1", json!({"volume": "v1"}))),
        Step::bad("attachment of another volume", change("volumeattachments", "v1", json!({"volume": "v2"}))),
        Step::bad(
            "attachment with a ticket that is none",
            change("volumeattachments", "v1", json!({"tickets": {"t": 1}})),
        ),
        Step::good("manager", manager("m1", json!({"nodeID": "n1"}))),
        Step::bad("manager moved", change("instancemanagers", "m1", json!({"nodeID": "n2"}))),
        Step::good("setting", setting("s1", json!({"value": "1"}))),
        Step::bad("setting that is a number", setting("s2", json!({"value": 1}))),
        Step::bad("setting that is too long", setting("s2", json!({"value": "x".repeat(4097)}))),
    ]
}

/// Built-in kinds.
pub fn built_in() -> Vec<Step> {
    let named = |name: &str, rest: Value| {
        let mut object = json!({"metadata": {"name": name, "namespace": NAMESPACE}});
        for (key, value) in rest.as_object().unwrap() {
            object[key] = value.clone();
        }
        object
    };
    let lease =
        |spec: Value| named("l", json!({"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "spec": spec}));
    let stale = |mut object: Value| {
        object["metadata"]["resourceVersion"] = json!("1");
        object
    };
    let map = |rest: Value| {
        let mut object = named("c", json!({"apiVersion": "v1", "kind": "ConfigMap"}));
        for (key, value) in rest.as_object().unwrap() {
            object[key] = value.clone();
        }
        object
    };
    let secret = |rest: Value| {
        let mut object = map(rest);
        object["kind"] = json!("Secret");
        object
    };
    let held = json!({
        "holderIdentity": "n1", "leaseDurationSeconds": 10, "leaseTransitions": 0,
        "acquireTime": "2026-01-01T00:00:00.000000Z", "renewTime": "2026-01-01T00:00:00.000000Z",
    });
    let maps = format!("{CORE}/configmaps");
    let secrets = format!("{CORE}/secrets");
    vec![
        Step::bad("lease of no duration", Call::new("POST", LEASES, JSON, &lease(json!({"leaseDurationSeconds": 0})))),
        Step::good("lease", Call::new("POST", LEASES, JSON, &lease(held.clone()))),
        Step::bad("lease again", Call::new("POST", LEASES, JSON, &lease(held.clone()))),
        Step::bad("lease from an old view", Call::new("PUT", format!("{LEASES}/l"), JSON, &stale(lease(held.clone())))),
        Step::bad("lease from no view", Call::new("PUT", format!("{LEASES}/l"), JSON, &lease(held)))
            .differs("accepted: it replaces whatever is there"),
        Step::good(
            "lease renewed",
            Call::new(
                "PATCH",
                format!("{LEASES}/l"),
                MERGE,
                &json!({"spec": {"renewTime": "2026-01-01T00:00:05.000000Z"}}),
            ),
        ),
        Step::bad("lease renewed sometime", {
            Call::new("PATCH", format!("{LEASES}/l"), MERGE, &json!({"spec": {"renewTime": "sometime"}}))
        })
        .differs("names the field"),
        Step::good("lease released", {
            Call::new("PATCH", format!("{LEASES}/l"), MERGE, &json!({"spec": {"holderIdentity": null}}))
        }),
        Step::good("map", Call::new("POST", &maps, JSON, &map(json!({"data": {"a": "b"}})))),
        Step::good(
            "map replaced from no view",
            Call::new("PUT", format!("{maps}/c"), JSON, &map(json!({"data": {"a": "c"}}))),
        ),
        Step::bad(
            "map with a key that is none",
            Call::new("POST", &maps, JSON, &map(json!({"metadata": {"name": "d"}, "data": {"a b": "c"}}))),
        )
        .differs("accepted"),
        Step::good("map made immutable", Call::new("PATCH", format!("{maps}/c"), MERGE, &json!({"immutable": true}))),
        Step::bad(
            "map changed nevertheless",
            Call::new("PATCH", format!("{maps}/c"), MERGE, &json!({"data": {"a": "d"}})),
        ),
        Step::good(
            "secret",
            Call::new(
                "POST",
                &secrets,
                JSON,
                &secret(json!({
                    "data": {"a": "YQ=="}, "stringData": {"b": "b"},
                })),
            ),
        ),
        Step::bad("secret of another type", Call::new("PATCH", format!("{secrets}/c"), MERGE, &json!({"type": "x/y"})))
            .differs("accepted"),
        Step::bad(
            "secret that is no base64",
            Call::new("PATCH", format!("{secrets}/c"), MERGE, &json!({"data": {"a": "?"}})),
        )
        .differs("names the field"),
        Step::good("secret deleted", Call::new("DELETE", format!("{secrets}/c"), JSON, &json!({}))),
        Step::bad("secret gone", Call::get(format!("{secrets}/c"))),
        Step::good(
            "namespace",
            Call::new(
                "POST",
                "/api/v1/namespaces",
                JSON,
                &json!({
                    "apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "other"},
                }),
            ),
        ),
        Step::bad(
            "namespace with a dot",
            Call::new(
                "POST",
                "/api/v1/namespaces",
                JSON,
                &json!({
                    "apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "o.ther"},
                }),
            ),
        ),
        Step::bad("namespace that must stay", Call::new("DELETE", "/api/v1/namespaces/default", JSON, &json!({}))),
    ]
}

/// Reads of what the steps before have left.
pub fn reads() -> Vec<Step> {
    let list = |query: &str| Call::get(path("replicas") + query);
    let table = |plural: &str| Call { accept: TABLE, ..Call::get(path(plural)) };
    vec![
        Step::good("one", Call::get(path("replicas") + "/r1")),
        Step::bad("one that is not there", Call::get(path("replicas") + "/r9")),
        Step::bad("a kind that is not there", Call::get(path("nothings"))).differs("a Status instead of text"),
        Step::bad("a version that is not there", Call::get("/apis/addax.io/v9/replicas"))
            .differs("a Status instead of text"),
        Step::good("all", list("")),
        Step::good("all of every namespace", Call::get("/apis/addax.io/v1alpha1/replicas")),
        Step::good("by label", list("?labelSelector=addax.io/volume=v1")),
        Step::good("by labels that nothing has", list("?labelSelector=addax.io/volume+in+(v2,v3),x!=y")),
        Step::bad("by a label selector that is none", list("?labelSelector=a+b+c")),
        Step::good("by name", list("?fieldSelector=metadata.name=r1")),
        Step::good("by a name that nothing has", list("?fieldSelector=metadata.name=r9")),
        Step::bad("by a field that cannot be selected", list("?fieldSelector=spec.size=1")),
        Step::good("some", list("?limit=1")),
        Step::bad("from a place that is none", list("?limit=1&continue=x")),
        Step::bad("as of a version that is none", list("?resourceVersion=x")),
        Step::bad("as of a version that is to come", list("?resourceVersion=999999999"))
            .differs("no cause ResourceVersionTooLarge"),
        Step::bad("as of a version by a rule that is none", list("?resourceVersion=1&resourceVersionMatch=x"))
            .differs("400, not 422"),
        Step::good("a table of volumes", table("volumes")),
        Step::good("a table of replicas", table("replicas")),
        Step::good("a table of engines", table("engines")),
        Step::good("a table of nodes", table("nodes")),
        Step::good("a table of attachments", table("volumeattachments")),
        Step::good("a table of managers", table("instancemanagers")),
        Step::good("a table of settings", table("settings")),
        Step::good("all deleted", Call::new("DELETE", path("replicas"), JSON, &json!({}))),
        Step::good("none left", list("")),
    ]
}
