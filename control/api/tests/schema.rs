//! The definitions as an API server sees them: committed, structural, closed, and refusing what they should.

#![allow(clippy::unwrap_used)]

use std::path::Path;

use addax_api::node::DiskSpec;
use addax_api::{KINDS, Volume, VolumeConfig, VolumeSpec, VolumeStatus, crds};
use kube::core::cel::validate_cel_schema;
use serde_json::{Value, json};

#[test]
fn the_committed_definitions_are_up_to_date() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/crds");
    for crd in crds() {
        let file = folder.join(format!("{}.yaml", crd.spec.names.plural));
        let committed = std::fs::read_to_string(&file).unwrap_or_default();
        assert_eq!(
            committed,
            serde_saphyr::to_string(&crd).unwrap(),
            "{} is stale: cargo run -p addax-api --example crdgen",
            file.display()
        );
    }
}

#[test]
fn the_table_of_kinds_agrees_with_the_definitions() {
    let crds = crds();
    assert_eq!(crds.len(), KINDS.len());
    for (info, crd) in KINDS.iter().zip(&crds) {
        let names = &crd.spec.names;
        assert_eq!(info.kind, names.kind);
        assert_eq!(info.plural, names.plural);
        assert_eq!(names.short_names.as_deref(), Some(&[info.short_name.to_owned()][..]));
        assert_eq!(names.categories.as_deref(), Some(&["addax".to_owned()][..]));
        assert_eq!(crd.spec.group, addax_api::GROUP);
        assert_eq!(crd.spec.scope, "Namespaced");
        assert_eq!(crd.spec.versions[0].name, addax_api::VERSION);
        assert!(crd.spec.versions[0].subresources.as_ref().unwrap().status.is_some());
    }
}

/// Walks a schema and collects what would let unknown fields in or is not structural.
fn walk(path: &str, schema: &Value, problems: &mut Vec<String>) {
    let Some(object) = schema.as_object() else {
        problems.push(format!("{path}: a schema that is no object"));
        return;
    };
    for open in ["x-kubernetes-preserve-unknown-fields", "anyOf", "oneOf", "allOf", "$ref", "uniqueItems"] {
        if object.contains_key(open) {
            problems.push(format!("{path}: {open}"));
        }
    }
    if object.get("format").is_some_and(|format| format.as_str().unwrap().starts_with('u')) {
        problems.push(format!("{path}: a number format that OpenAPI does not know"));
    }
    let beyond = |bound: &str| object.get(bound).and_then(Value::as_f64).is_some_and(|b| b.abs() > f64::from(i32::MAX));
    if object.get("format") == Some(&json!("int32")) && (beyond("minimum") || beyond("maximum")) {
        problems.push(format!("{path}: a bound that its format does not hold: an API server then refuses every value"));
    }
    if !object.contains_key("type") {
        problems.push(format!("{path}: no type"));
    }
    if object.get("description").is_none() && path.matches('.').count() > 1 && !path.ends_with("[]") {
        problems.push(format!("{path}: no description"));
    }
    if let Some(properties) = object.get("properties").and_then(Value::as_object) {
        if object.contains_key("additionalProperties") {
            problems.push(format!("{path}: properties beside additionalProperties"));
        }
        for (name, property) in properties {
            walk(&format!("{path}.{name}"), property, problems);
        }
    }
    match object.get("additionalProperties") {
        Some(Value::Bool(true)) => problems.push(format!("{path}: open map")),
        Some(values @ Value::Object(_)) => walk(&format!("{path}[]"), values, problems),
        _ => {}
    }
    if let Some(items) = object.get("items") {
        walk(&format!("{path}[]"), items, problems);
    }
}

#[test]
fn every_schema_is_structural_closed_and_described() {
    for crd in crds() {
        let schema = crd.spec.versions[0].schema.as_ref().unwrap().open_api_v3_schema.as_ref().unwrap();
        let schema = serde_json::to_value(schema).unwrap();
        let mut problems = Vec::new();
        for part in ["spec", "status"] {
            walk(&format!("{}.{part}", crd.spec.names.kind), &schema["properties"][part], &mut problems);
        }
        assert!(problems.is_empty(), "{problems:#?}");
        let status = &schema["properties"]["status"]["properties"];
        assert_eq!(status["ownerID"]["type"], "string", "{}", crd.spec.names.kind);
    }
}

fn spec(change: Value) -> Value {
    let mut spec = json!({"size": 1048576, "numberOfReplicas": 3, "minInSync": 1});
    json_merge(&mut spec, &change);
    spec
}

fn config(change: Value) -> Value {
    let mut config = json!({
        "lineage": "l", "epoch": 2, "engineInstance": "e2", "configNumber": 5,
        "inSync": ["a", "b"], "rebuilding": ["c"], "minInSync": 1, "size": 1048576,
    });
    json_merge(&mut config, &change);
    config
}

fn json_merge(target: &mut Value, patch: &Value) {
    for (key, value) in patch.as_object().unwrap() {
        target[key] = value.clone();
    }
}

#[test]
fn rules_of_a_volumes_spec() {
    let old = spec(json!({"size": 4194304}));
    validate_cel_schema::<VolumeSpec>(&old, None).unwrap();
    validate_cel_schema::<VolumeSpec>(&spec(json!({"size": 5242880})), Some(&old)).unwrap();
    for (change, said) in
        [(json!({"size": 1048577}), "multiple of 1048576"), (json!({"minInSync": 4}), "minInSync must not be above")]
    {
        let error = validate_cel_schema::<VolumeSpec>(&spec(change), None).unwrap_err();
        assert!(error.to_string().contains(said), "{error}");
    }
    let error = validate_cel_schema::<VolumeSpec>(&spec(json!({})), Some(&old)).unwrap_err();
    assert!(error.to_string().contains("cannot shrink"), "{error}");
}

#[test]
fn a_request_about_the_record_names_its_copy_and_is_confirmed_by_the_volumes_name() {
    let volume = |request: Value| json!({"metadata": {"name": "v"}, "spec": spec(json!({"recovery": request}))});
    let request = |change: Value| {
        let mut request = json!({"id": "r", "action": "recover", "confirm": "v", "requestedBy": "me",
            "notAfter": "2026-01-01T00:00:00Z"});
        json_merge(&mut request, &change);
        request
    };
    let forced = json!({"action": "forceOpen", "replica": "a"});
    for good in [json!({}), json!({"lost": ["a"]}), forced, json!({"action": "purge", "replica": "a"})] {
        validate_cel_schema::<Volume>(&volume(request(good.clone())), None).unwrap_or_else(|e| panic!("{good}: {e}"));
    }
    for (bad, said) in [
        (json!({"action": "forceOpen"}), "must name the copy"),
        (json!({"action": "purge", "replica": ""}), "must name the copy"),
        (json!({"confirm": "yes"}), "must be the volume's name"),
    ] {
        let error = validate_cel_schema::<Volume>(&volume(request(bad.clone())), None).unwrap_err();
        assert!(error.to_string().contains(said), "{bad}: {error}");
    }
}

#[test]
fn a_disk_has_what_belongs_to_its_type() {
    let disk = |change: Value| {
        let mut disk = json!({"type": "block", "path": "/dev/x", "allowScheduling": true});
        json_merge(&mut disk, &change);
        disk
    };
    let at = json!({"traddr": "10.0.0.1", "trsvcid": 4420, "nqn": "nqn.x", "nsid": 1});
    let far = |change: Value| {
        let mut disk = json!({"type": "nvme", "nvme": at, "allowScheduling": true});
        json_merge(&mut disk, &change);
        disk
    };
    for good in [disk(json!({})), disk(json!({"type": "file", "size": 4096})), far(json!({}))] {
        validate_cel_schema::<DiskSpec>(&good, None).unwrap_or_else(|e| panic!("{good}: {e}"));
    }
    for (bad, said) in [
        (disk(json!({"size": 4096})), "only a file is made with a size"),
        (far(json!({"size": 4096})), "only a file is made with a size"),
        (far(json!({"path": "/x"})), "has no path"),
        (disk(json!({"type": "file", "nvme": at})), "no nvme"),
        (disk(json!({"nvme": at})), "no nvme"),
    ] {
        let error = validate_cel_schema::<DiskSpec>(&bad, None).unwrap_err();
        assert!(error.to_string().contains(said), "{bad}: {error}");
    }
}

#[test]
fn rules_of_the_arbiter_record() {
    let old = config(json!({}));
    let good = [
        json!({"clean": true}),
        json!({"epoch": 3, "engineInstance": "e3"}),
        json!({"inSync": ["a"], "configNumber": 6}),
        json!({"inSync": ["a", "b", "c"], "rebuilding": [], "configNumber": 6}),
        json!({"lineage": "m", "inSync": ["x"], "rebuilding": [], "configNumber": 6}),
    ];
    for change in good {
        validate_cel_schema::<VolumeConfig>(&config(change.clone()), Some(&old))
            .unwrap_or_else(|e| panic!("{change}: {e}"));
    }
    let bad = [
        (json!({"epoch": 1}), "epoch never falls"),
        (json!({"configNumber": 4}), "configNumber never falls"),
        (json!({"size": 1}), "size never falls"),
        (json!({"engineInstance": "e3"}), "only with a higher epoch"),
        (json!({"inSync": ["a"]}), "must raise configNumber"),
        (json!({"rebuilding": []}), "must raise configNumber"),
        (json!({"inSync": ["a", "x"], "configNumber": 6}), "can be in sync next"),
        (json!({"rebuilding": ["a"], "configNumber": 6}), "either in sync or being rebuilt"),
    ];
    for (change, said) in bad {
        let error = validate_cel_schema::<VolumeConfig>(&config(change.clone()), Some(&old)).unwrap_err();
        assert!(error.to_string().contains(said), "{change}: {error}");
    }
}

#[test]
fn the_record_and_the_deletion_of_a_volume_cannot_be_taken_back() {
    let old = json!({"state": "attached", "robustness": "healthy", "config": config(json!({}))});
    let error = validate_cel_schema::<VolumeStatus>(&json!({"state": "attached", "robustness": "healthy"}), Some(&old))
        .unwrap_err();
    assert!(error.to_string().contains("cannot be taken away"), "{error}");
    let volume = |status: Value| json!({"metadata": {"name": "v"}, "spec": spec(json!({})), "status": status});
    let without = json!({"metadata": {"name": "v"}, "spec": spec(json!({}))});
    let error = validate_cel_schema::<Volume>(&without, Some(&volume(old))).unwrap_err();
    assert!(error.to_string().contains("cannot be taken away"), "{error}");
    let deleting = json!({"state": "deleting", "robustness": "unknown"});
    let error =
        validate_cel_schema::<VolumeStatus>(&json!({"state": "detached", "robustness": "unknown"}), Some(&deleting))
            .unwrap_err();
    assert!(error.to_string().contains("stays so"), "{error}");
}

#[test]
fn the_in_sync_set_cannot_be_empty() {
    let crd = crds().into_iter().find(|crd| crd.spec.names.kind == "Volume").unwrap();
    let schema = serde_json::to_value(crd.spec.versions[0].schema.as_ref().unwrap()).unwrap();
    let config = &schema["openAPIV3Schema"]["properties"]["status"]["properties"]["config"]["properties"];
    assert_eq!(config["inSync"]["minItems"], 1);
    assert_eq!(config["inSync"]["maxItems"], 20);
}
