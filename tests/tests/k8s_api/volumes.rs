//! Requests about volumes: what a manifest, a change and an arbiter record may say.

use addax_api::{MIB, NAMESPACE};
use serde_json::{Value, json};

use crate::exchange::{Call, JSON, JSON_PATCH, MERGE, Step};

pub fn path(plural: &str) -> String {
    format!("/apis/{}/{}/namespaces/{NAMESPACE}/{plural}", addax_api::GROUP, addax_api::VERSION)
}

fn volume(name: &str, spec: Value) -> Value {
    json!({
        "apiVersion": "addax.io/v1alpha1", "kind": "Volume",
        "metadata": {"name": name, "namespace": NAMESPACE}, "spec": spec,
    })
}

fn post(body: &Value) -> Call {
    Call::new("POST", path("volumes") + "?fieldValidation=Strict", JSON, body)
}

fn create(name: &str, spec: Value) -> Call {
    post(&volume(name, spec))
}

fn patch(name: &str, body: &Value) -> Call {
    Call::new("PATCH", path("volumes") + "/" + name + "?fieldValidation=Strict", MERGE, body)
}

fn patch_status(name: &str, body: &Value) -> Call {
    let path = path("volumes") + "/" + name + "/status?fieldValidation=Strict";
    Call::new("PATCH", path, MERGE, &json!({"status": body}))
}

pub fn creations() -> Vec<Step> {
    let good = [
        ("smallest size", json!({"size": MIB})),
        ("largest size", json!({"size": 64_i64 << 40})),
        ("most replicas", json!({"size": MIB, "numberOfReplicas": 20, "minInSync": 20})),
        (
            "every field",
            json!({
                "size": MIB, "numberOfReplicas": 2, "minInSync": 2, "frontend": "none", "nodeID": "n1",
                "allowedHosts": ["nqn.2014-08.org.nvmexpress:uuid:1"], "replicaSoftAntiAffinity": true,
                "nodeSelector": ["a"], "diskSelector": ["b", "b"],
            }),
        ),
        ("null where a default is", json!({"size": MIB, "frontend": null, "numberOfReplicas": null})),
    ];
    let bad = [
        ("no size", json!({})),
        ("size null", json!({"size": null})),
        ("size 0", json!({"size": 0})),
        ("size below the least", json!({"size": MIB - 1})),
        ("size odd", json!({"size": MIB + 1})),
        ("size negative", json!({"size": -MIB})),
        ("size above the most", json!({"size": (64_i64 << 40) + MIB})),
        ("size beyond 64 bits", json!({"size": 1e20})),
        ("size a whole number written as a float", json!({"size": 2097152.0})),
        ("size a fraction", json!({"size": 1048576.5})),
        ("size text", json!({"size": "1Mi"})),
        ("replicas 0", json!({"size": MIB, "numberOfReplicas": 0})),
        ("replicas 21", json!({"size": MIB, "numberOfReplicas": 21})),
        ("replicas negative", json!({"size": MIB, "numberOfReplicas": -1})),
        ("replicas text", json!({"size": MIB, "numberOfReplicas": "3"})),
        ("minInSync 0", json!({"size": MIB, "minInSync": 0})),
        ("minInSync above replicas", json!({"size": MIB, "numberOfReplicas": 2, "minInSync": 3})),
        ("minInSync above the default of replicas", json!({"size": MIB, "minInSync": 4})),
        ("frontend unknown", json!({"size": MIB, "frontend": "iscsi"})),
        ("frontend a number", json!({"size": MIB, "frontend": 1})),
        ("host twice", json!({"size": MIB, "allowedHosts": ["nqn.a", "nqn.a"]})),
        ("host empty", json!({"size": MIB, "allowedHosts": [""]})),
        ("host too long", json!({"size": MIB, "allowedHosts": ["n".repeat(224)]})),
        ("hosts too many", json!({"size": MIB, "allowedHosts": (0..65).map(|i| format!("n{i}")).collect::<Vec<_>>()})),
        ("hosts no list", json!({"size": MIB, "allowedHosts": "nqn.a"})),
        ("node name too long", json!({"size": MIB, "nodeID": "n".repeat(254)})),
        ("anti-affinity text", json!({"size": MIB, "replicaSoftAntiAffinity": "yes"})),
        ("an unknown field", json!({"size": MIB, "colour": "red"})),
        ("two unknown fields", json!({"size": MIB, "colour": "red", "numberOfReplica": 1})),
        ("several mistakes", json!({"size": 0, "numberOfReplicas": 0, "frontend": "x"})),
        ("spec a list", json!([])),
        ("spec null", Value::Null),
    ];
    let good =
        good.into_iter().enumerate().map(|(i, (what, spec))| Step::good(what, create(&format!("good-{i}"), spec)));
    let bad = bad.into_iter().enumerate().map(|(i, (what, spec))| Step::bad(what, create(&format!("bad-{i}"), spec)));
    good.chain(bad).collect()
}

pub fn names() -> Vec<Step> {
    let spec = || json!({"size": MIB});
    let longest = "n".repeat(52);
    let too_long = "n".repeat(53);
    let mut steps: Vec<Step> = ["a", "0", "a-b", &longest]
        .into_iter()
        .map(|name| Step::good(format!("name {name:?}"), create(name, spec())))
        .collect();
    let bad = ["", "A", "a_b", "-a", "a-", "a.b", "a/b", "a b", "ä", &too_long, &"n".repeat(254)];
    steps.extend(bad.into_iter().map(|name| Step::bad(format!("name {name:?}"), create(name, spec()))));
    steps.push(Step::bad("the same name again", create("a", spec())));
    let mut other = volume("other", spec());
    other["metadata"]["namespace"] = json!("default");
    steps.push(Step::bad("another namespace in the object", post(&other)));
    let path = "/apis/addax.io/v1alpha1/namespaces/nowhere/volumes";
    let mut nowhere = volume("b", spec());
    nowhere["metadata"]["namespace"] = json!("nowhere");
    steps.push(Step::bad("a namespace that is not there", Call::new("POST", path, JSON, &nowhere)));
    steps
}

pub fn manifests() -> Vec<Step> {
    let changed = |change: Value| {
        let mut manifest = volume("manifest", json!({"size": MIB}));
        json_merge(&mut manifest, &change);
        post(&manifest)
    };
    let loose = |query: &str, name: &str| {
        let manifest = volume(name, json!({"size": MIB, "colour": "red", "deep": {"er": 1}}));
        Call::new("POST", path("volumes") + query, JSON, &manifest)
    };
    let raw = |body: &str| Call { body: body.as_bytes().to_vec(), ..post(&Value::Null) };
    let twice = r#"{"apiVersion": "addax.io/v1alpha1", "kind": "Volume", "metadata": {"name": "twice"},
        "spec": {"size": 1048576, "size": 2097152}}"#;
    vec![
        Step::bad("another kind", changed(json!({"kind": "Replica"}))).differs("400, not 422"),
        Step::bad("another version", changed(json!({"apiVersion": "addax.io/v1"}))),
        Step::bad("another group", changed(json!({"apiVersion": "v1"}))),
        Step::bad("no kind", changed(json!({"kind": null}))),
        Step::bad("no apiVersion", changed(json!({"apiVersion": null}))),
        Step::bad("no spec", changed(json!({"spec": null}))),
        Step::bad("unknown field at the top", changed(json!({"extra": 1}))),
        Step::bad("unknown field in metadata", changed(json!({"metadata": {"extra": 1}}))),
        Step::bad("label key illegal", changed(json!({"metadata": {"labels": {"a b": "c"}}}))),
        Step::bad("label value illegal", changed(json!({"metadata": {"labels": {"a": "c d"}}}))),
        Step::bad("label value a number", changed(json!({"metadata": {"labels": {"a": 1}}}))),
        Step::bad("annotation key illegal", changed(json!({"metadata": {"annotations": {"a b": "c"}}}))),
        Step::bad("finalizer illegal", changed(json!({"metadata": {"finalizers": ["a b"]}}))),
        Step::bad(
            "owner without a uid",
            changed(json!({"metadata": {"ownerReferences": [
                {"apiVersion": "addax.io/v1alpha1", "kind": "Volume", "name": "a"},
            ]}})),
        )
        .differs("400, not 422"),
        Step::bad("a resourceVersion at creation", changed(json!({"metadata": {"resourceVersion": "5"}})))
            .differs("400, not 500"),
        Step::bad("no JSON", raw("{")),
        Step::bad("no object", raw("[]")),
        Step::bad("an empty body", raw("")),
        Step::bad(
            "a key twice, strictly",
            Call { path: path("volumes") + "?dryRun=All&fieldValidation=Strict", ..raw(twice) },
        )
        .differs("accepted: the last one counts"),
        Step::good("unknown fields, warned of", loose("?fieldValidation=Warn", "loose-warn")),
        Step::good("unknown fields, ignored", loose("?fieldValidation=Ignore", "loose-ignore")),
        Step::good("unknown fields, by default", loose("", "loose-default")),
        Step::bad("an unknown way of validation", loose("?fieldValidation=Perhaps", "loose-perhaps"))
            .differs("400, not 422"),
        Step::good("a dry run", loose("?dryRun=All", "dry")),
        Step::good("after the dry run", create("dry", json!({"size": MIB}))),
        Step::good(
            "a status at creation, which is dropped",
            changed(json!({"metadata": {"name": "early"}, "status": {"state": "attached"}})),
        ),
        Step::good(
            "labels, annotations, finalizers",
            changed(json!({"metadata": {
                "name": "dressed", "labels": {"a/b": "c", "d": ""}, "annotations": {"e": "f g"},
                "finalizers": ["addax.io/volume"],
            }})),
        ),
        Step::bad("a body of another type", Call { content_type: "text/plain", ..changed(json!({})) }),
    ]
}

/// Changes of one volume, in order.
pub fn changes() -> Vec<Step> {
    let name = "changing";
    let spec = |change: Value| patch(name, &json!({"spec": change}));
    let json_patch = |operations: Value| Call {
        content_type: JSON_PATCH,
        body: operations.to_string().into_bytes(),
        ..patch(name, &Value::Null)
    };
    let put = |version: Option<&str>, spec: Value| {
        let mut body = volume(name, spec);
        if let Some(version) = version {
            body["metadata"]["resourceVersion"] = json!(version);
        }
        Call::new("PUT", path("volumes") + "/" + name + "?fieldValidation=Strict", JSON, &body)
    };
    vec![
        Step::bad("a change of what is not there", spec(json!({"size": MIB}))),
        Step::good("creation", create(name, json!({"size": 4 * MIB}))),
        Step::good("growth", spec(json!({"size": 8 * MIB}))),
        Step::bad("shrinking", spec(json!({"size": 4 * MIB}))),
        Step::bad("growth to an odd size", spec(json!({"size": 8 * MIB + 512}))),
        Step::bad("size taken away", spec(json!({"size": null}))),
        Step::good("no change", spec(json!({"size": 8 * MIB}))),
        Step::good("fewer replicas", spec(json!({"numberOfReplicas": 2, "minInSync": 2}))),
        Step::bad("replicas below minInSync", spec(json!({"numberOfReplicas": 1}))),
        Step::good("back to the default", spec(json!({"minInSync": null}))),
        Step::bad("an unknown field in a change", spec(json!({"colour": "red"}))).differs("400, not 422"),
        Step::bad("the name", patch(name, &json!({"metadata": {"name": "other"}}))),
        Step::bad("the uid", patch(name, &json!({"metadata": {"uid": "other"}}))).differs("409, not 422"),
        Step::good("labels", patch(name, &json!({"metadata": {"labels": {"a": "b"}}}))),
        Step::good(
            "a status by the main path, which is dropped",
            patch(name, &json!({"status": {"state": "attached"}})),
        ),
        Step::good(
            "a JSON patch",
            json_patch(json!([
                {"op": "test", "path": "/spec/size", "value": 8 * MIB},
                {"op": "add", "path": "/spec/nodeID", "value": "n1"},
                {"op": "replace", "path": "/spec/nodeID", "value": "n2"},
            ])),
        ),
        Step::good(
            "a JSON patch that replaces what is not there",
            json_patch(json!([{"op": "replace", "path": "/spec/nodeSelector", "value": ["a"]}])),
        )
        .differs("refused, as RFC 6902 has it"),
        Step::bad(
            "a JSON patch whose test fails",
            json_patch(json!([{"op": "test", "path": "/spec/size", "value": 1}])),
        ),
        Step::bad("a JSON patch of a path that is not there", json_patch(json!([{"op": "remove", "path": "/spec/x"}]))),
        Step::bad("a JSON patch that is none", json_patch(json!({"op": "remove"}))),
        Step::bad("a stale replacement", put(Some("1"), json!({"size": 16 * MIB}))),
        Step::bad("a replacement with no number for its version", put(Some("x"), json!({"size": 16 * MIB})))
            .differs("409, not 500"),
        Step::bad("a replacement without a version", put(None, json!({"size": 16 * MIB})))
            .differs("accepted: it replaces whatever is there"),
        Step::good("deletion", Call::new("DELETE", path("volumes") + "/" + name, JSON, &json!({}))),
        Step::bad("deletion again", Call::new("DELETE", path("volumes") + "/" + name, JSON, &json!({}))),
    ]
}

fn record(change: Value) -> Value {
    let mut record = json!({
        "lineage": "l", "epoch": 2, "engineInstance": "e2", "configNumber": 5,
        "inSync": ["a", "b"], "rebuilding": ["c"], "minInSync": 1, "size": 4 * MIB,
    });
    for (key, value) in change.as_object().unwrap() {
        record[key] = value.clone();
    }
    record
}

/// Writes of the arbiter record of one volume, in order.
pub fn records() -> Vec<Step> {
    let name = "recorded";
    let config = |change: Value| patch_status(name, &json!({"config": record(change)}));
    vec![
        Step::good("creation", create(name, json!({"size": 4 * MIB}))),
        Step::bad("first record without a set", config(json!({"inSync": []}))),
        Step::bad("first record with a replica in both sets", config(json!({"rebuilding": ["a"]}))),
        Step::good("first record", config(json!({}))),
        Step::good("the same again", config(json!({}))),
        Step::bad("epoch falls", config(json!({"epoch": 1}))),
        Step::bad("epoch negative", config(json!({"epoch": -1}))),
        Step::bad("epoch above what JSON numbers hold", config(json!({"epoch": 9_007_199_254_740_992_i64}))),
        Step::bad("configNumber falls", config(json!({"configNumber": 4}))),
        Step::bad("size falls", config(json!({"size": 3 * MIB}))),
        Step::bad("another engine with the same epoch", config(json!({"engineInstance": "e3"}))),
        Step::bad("inSync emptied", config(json!({"inSync": [], "configNumber": 6}))),
        Step::bad("inSync taken away", config(json!({"inSync": null, "configNumber": 6}))),
        Step::bad("inSync changed without a new number", config(json!({"inSync": ["a"]}))),
        Step::bad("rebuilding changed without a new number", config(json!({"rebuilding": []}))),
        Step::bad("a stranger in sync", config(json!({"inSync": ["a", "x"], "configNumber": 6}))),
        Step::bad("in both sets", config(json!({"inSync": ["a", "c"], "rebuilding": ["c"], "configNumber": 6}))),
        Step::bad("a replica without a name", config(json!({"inSync": ["a", ""], "configNumber": 6}))),
        Step::bad("lineage empty", config(json!({"lineage": ""}))),
        Step::bad("an unknown field in a status", config(json!({"colour": "red"}))).differs("400, not 422"),
        Step::bad("record taken away", patch_status(name, &json!({"config": null}))),
        Step::bad("status taken away", patch_status(name, &Value::Null)),
        Step::bad("an unknown state", patch_status(name, &json!({"state": "lost"}))),
        Step::bad(
            "a condition without a status",
            patch_status(
                name,
                &json!({"conditions": [
                    {"type": "Scheduled", "lastTransitionTime": "2026-01-01T00:00:00Z"},
                ]}),
            ),
        ),
        Step::bad(
            "a condition twice",
            patch_status(
                name,
                &json!({"conditions": [
                    {"type": "Scheduled", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"},
                    {"type": "Scheduled", "status": "False", "lastTransitionTime": "2026-01-01T00:00:00Z"},
                ]}),
            ),
        ),
        Step::bad(
            "a condition with a made-up time",
            patch_status(
                name,
                &json!({"conditions": [
                    {"type": "Scheduled", "status": "True", "lastTransitionTime": "yesterday"},
                ]}),
            ),
        ),
        Step::bad(
            "a port that is none",
            patch_status(
                name,
                &json!({"endpoint": {
                    "nqn": "n", "traddr": "127.0.0.1", "trsvcid": 65536, "uuid": "u",
                }}),
            ),
        ),
        Step::good("a member leaves", config(json!({"inSync": ["a"], "configNumber": 6}))),
        Step::good("a copy is done", config(json!({"inSync": ["a", "c"], "rebuilding": [], "configNumber": 7}))),
        Step::good(
            "the record without its set of copies",
            config(json!({"rebuilding": null, "inSync": ["a", "c"], "configNumber": 8})),
        ),
        Step::good(
            "a new engine",
            config(json!({
                "epoch": 3, "engineInstance": "e3", "inSync": ["a", "c"], "rebuilding": [], "configNumber": 8,
            })),
        ),
        Step::good(
            "a new lineage",
            config(json!({
                "epoch": 3, "engineInstance": "e3", "lineage": "m", "inSync": ["x"], "rebuilding": [], "configNumber": 9,
            })),
        ),
        Step::good("a condition, and the spec by the status path, which is dropped", {
            let mut call = patch_status(name, &Value::Null);
            call.body = json!({"spec": {"size": MIB}, "metadata": {"labels": {"a": "b"}}, "status": {"conditions": [
                {"type": "Scheduled", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"},
            ]}})
            .to_string()
            .into_bytes();
            call
        }),
        Step::good("deletion begins", patch_status(name, &json!({"state": "deleting"}))),
        Step::bad("deletion taken back", patch_status(name, &json!({"state": "detached"}))),
        Step::good("all of it", Call::new("GET", path("volumes") + "/" + name, JSON, &json!({}))),
    ]
}

/// RFC 7386.
fn json_merge(target: &mut Value, patch: &Value) {
    let Some(patch) = patch.as_object() else {
        *target = patch.clone();
        return;
    };
    if !target.is_object() {
        *target = json!({});
    }
    let target = target.as_object_mut().unwrap();
    for (key, value) in patch {
        if value.is_null() {
            target.remove(key);
        } else {
            json_merge(target.entry(key).or_insert(Value::Null), value);
        }
    }
}
