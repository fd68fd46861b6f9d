//! The kinds of Kubernetes itself that Addax needs on a single machine: namespaces, events, secrets, config maps, leases
//! and, to be read only, the CRDs.
//!
//! They are written as definitions too, so that one code serves all kinds; what a definition cannot say (no generation,
//! counted columns) is adjusted afterwards. [`admit`] holds the few rules of these kinds beyond their schemas.

use base64::{Engine, engine::general_purpose::STANDARD};
use serde_json::{Map, Value, json};

use super::{Access, CellSource, Column, Conversion, Kind, RegistryError, age_column, kind_of};
use crate::{error::Cause, jsonpath::JsonPath};

/// Where namespaces are stored.
pub const NAMESPACES: &str = "namespaces";
/// Where events are stored, in core form.
pub const EVENTS: &str = "events";
/// Where the CRDs are stored.
pub const CRDS: &str = "customresourcedefinitions.apiextensions.k8s.io";
/// Namespaces that are made at start and cannot be deleted.
pub const LASTING_NAMESPACES: [&str; 3] = ["default", "kube-system", "addax-system"];

/// All built-in kinds.
///
/// # Errors
/// When a definition in this file is wrong.
pub fn kinds() -> Result<Vec<Kind>, RegistryError> {
    Ok(vec![namespaces()?, events("")?, events("events.k8s.io")?, secrets()?, config_maps()?, leases()?, crds()?])
}

/// Names and scope of a built-in kind.
struct Names {
    group: &'static str,
    kind: &'static str,
    plural: &'static str,
    short: &'static [&'static str],
    namespaced: bool,
}

fn kind(names: &Names, properties: Value, columns: Vec<Column>) -> Result<Kind, RegistryError> {
    let spec = json!({
        "group": names.group,
        "names": {"kind": names.kind, "plural": names.plural, "shortNames": names.short},
        "scope": if names.namespaced { "Namespaced" } else { "Cluster" },
    });
    let version = json!({
        "name": "v1",
        "schema": {"openAPIV3Schema": {"type": "object", "properties": properties}},
    });
    let mut kind = kind_of(names.plural, &spec, &version, "v1")?;
    kind.has_generation = false;
    kind.columns = columns;
    Ok(kind)
}

fn column(name: &str, value_type: &str, source: CellSource) -> Column {
    Column { name: name.to_owned(), value_type: value_type.to_owned(), source, ..age_column() }
}

fn paths(paths: &[&str]) -> Vec<JsonPath> {
    paths.iter().filter_map(|path| JsonPath::parse(path).ok()).collect()
}

fn first_of(of: &[&str]) -> CellSource {
    CellSource::FirstOf(paths(of))
}

fn anything() -> Value {
    json!({"type": "object", "x-kubernetes-preserve-unknown-fields": true})
}

fn namespaces() -> Result<Kind, RegistryError> {
    let names = Names { group: "", kind: "Namespace", plural: NAMESPACES, short: &["ns"], namespaced: false };
    let properties = json!({
        "spec": {"type": "object", "properties": {"finalizers": {"type": "array", "items": {"type": "string"}}}},
        "status": {"type": "object", "properties": {
            "phase": {"type": "string"},
            "conditions": {"type": "array", "items": anything()},
        }},
    });
    let mut kind =
        kind(&names, properties, vec![column("Status", "string", first_of(&[".status.phase"])), age_column()])?;
    kind.status_subresource = true;
    kind.selectable_fields.push("status.phase".to_owned());
    Ok(kind)
}

fn events(group: &'static str) -> Result<Kind, RegistryError> {
    let names = Names { group, kind: "Event", plural: EVENTS, short: &["ev"], namespaced: true };
    let text = json!({"type": "string"});
    let time = json!({"type": "string", "nullable": true, "format": "date-time"});
    let count = json!({"type": "integer", "format": "int32"});
    let properties = json!({
        "involvedObject": anything(), "regarding": anything(), "related": anything(),
        "reason": text, "message": text, "note": text, "type": text, "action": text,
        "source": anything(), "deprecatedSource": anything(), "series": anything(),
        "firstTimestamp": time, "lastTimestamp": time, "eventTime": time,
        "deprecatedFirstTimestamp": time, "deprecatedLastTimestamp": time,
        "count": count, "deprecatedCount": count,
        "reportingComponent": text, "reportingController": text, "reportingInstance": text,
    });
    let last_seen = first_of(&[
        ".series.lastObservedTime",
        ".lastTimestamp",
        ".deprecatedLastTimestamp",
        ".eventTime",
        ".metadata.creationTimestamp",
    ]);
    let columns = vec![
        column("Last Seen", "date", last_seen),
        column("Type", "string", first_of(&[".type"])),
        column("Reason", "string", first_of(&[".reason"])),
        column(
            "Object",
            "string",
            CellSource::Joined(paths(if group.is_empty() {
                &[".involvedObject.kind", ".involvedObject.name"]
            } else {
                &[".regarding.kind", ".regarding.name"]
            })),
        ),
        column("Message", "string", first_of(&[".message", ".note"])),
    ];
    let mut kind = kind(&names, properties, columns)?;
    let reference = if group.is_empty() { "involvedObject" } else { "regarding" };
    let fields = ["kind", "namespace", "name", "uid", "apiVersion", "resourceVersion", "fieldPath"];
    kind.selectable_fields.extend(fields.map(|field| format!("{reference}.{field}")));
    kind.selectable_fields
        .extend(["reason", "type", "reportingComponent", "reportingController", "source.component"].map(str::to_owned));
    if !group.is_empty() {
        kind.conversion = Conversion::Events;
        kind.stored_api_version = "v1".to_owned();
    }
    Ok(kind)
}

fn secrets() -> Result<Kind, RegistryError> {
    let names = Names { group: "", kind: "Secret", plural: "secrets", short: &[], namespaced: true };
    let properties = json!({
        "data": {"type": "object", "nullable": true, "additionalProperties": {"type": "string", "format": "byte"}},
        "stringData": {"type": "object", "nullable": true, "additionalProperties": {"type": "string"}},
        "type": {"type": "string", "default": "Opaque"},
        "immutable": {"type": "boolean", "nullable": true},
    });
    let columns = vec![
        column("Type", "string", first_of(&[".type"])),
        column("Data", "integer", CellSource::CountOf(paths(&[".data"]))),
        age_column(),
    ];
    let mut kind = kind(&names, properties, columns)?;
    kind.selectable_fields.push("type".to_owned());
    Ok(kind)
}

fn config_maps() -> Result<Kind, RegistryError> {
    let names = Names { group: "", kind: "ConfigMap", plural: "configmaps", short: &["cm"], namespaced: true };
    let properties = json!({
        "data": {"type": "object", "nullable": true, "additionalProperties": {"type": "string"}},
        "binaryData": {"type": "object", "nullable": true, "additionalProperties": {"type": "string", "format": "byte"}},
        "immutable": {"type": "boolean", "nullable": true},
    });
    let columns = vec![column("Data", "integer", CellSource::CountOf(paths(&[".data", ".binaryData"]))), age_column()];
    kind(&names, properties, columns)
}

fn leases() -> Result<Kind, RegistryError> {
    let names = Names { group: "coordination.k8s.io", kind: "Lease", plural: "leases", short: &[], namespaced: true };
    let text = json!({"type": "string", "nullable": true});
    let time = json!({"type": "string", "nullable": true, "format": "date-time"});
    let properties = json!({"spec": {"type": "object", "nullable": true, "properties": {
        "holderIdentity": text, "preferredHolder": text, "strategy": text,
        "leaseDurationSeconds": {"type": "integer", "nullable": true, "format": "int32", "minimum": 1},
        "leaseTransitions": {"type": "integer", "nullable": true, "format": "int32", "minimum": 0},
        "acquireTime": time, "renewTime": time,
    }}});
    kind(&names, properties, vec![column("Holder", "string", first_of(&[".spec.holderIdentity"])), age_column()])
}

fn crds() -> Result<Kind, RegistryError> {
    let names = Names {
        group: "apiextensions.k8s.io",
        kind: "CustomResourceDefinition",
        plural: "customresourcedefinitions",
        short: &["crd", "crds"],
        namespaced: false,
    };
    let created = column("Created At", "string", first_of(&[".metadata.creationTimestamp"]));
    let mut kind = kind(&names, json!({"spec": anything(), "status": anything()}), vec![created])?;
    kind.access = Access::ReadOnly;
    kind.categories = vec!["api-extensions".to_owned()];
    Ok(kind)
}

/// A CRD as it is stored: with the status of one that is served.
pub fn established(definition: &Value, now: &str) -> Value {
    let condition = |kind: &str, reason: &str, message: &str| json!({"type": kind, "status": "True", "lastTransitionTime": now, "reason": reason, "message": message});
    let mut crd = definition.clone();
    crd["apiVersion"] = json!("apiextensions.k8s.io/v1");
    crd["kind"] = json!("CustomResourceDefinition");
    let stored =
        definition["spec"]["versions"].as_array().into_iter().flatten().filter(|version| version["storage"] == true);
    let stored: Vec<&Value> = stored.map(|version| &version["name"]).collect();
    crd["status"] = json!({
        "conditions": [
            condition("NamesAccepted", "NoConflicts", "no conflicts found"),
            condition("Established", "InitialNamesAccepted", "the initial names have been accepted"),
        ],
        "acceptedNames": definition["spec"]["names"],
        "storedVersions": stored,
    });
    crd
}

/// Rules of built-in kinds beyond their schemas. May complete the object.
pub fn admit(kind: &Kind, object: &mut Value, old: Option<&Value>) -> Vec<Cause> {
    match kind.kind.as_str() {
        "Namespace" if kind.group.is_empty() => admit_namespace(object),
        "Secret" if kind.group.is_empty() => {
            encode_string_data(object);
            check_immutable(object, old, &["data"])
        }
        "ConfigMap" if kind.group.is_empty() => check_immutable(object, old, &["data", "binaryData"]),
        _ => Vec::new(),
    }
}

fn admit_namespace(object: &mut Value) -> Vec<Cause> {
    let name = object["metadata"]["name"].clone();
    object["metadata"]["labels"]["kubernetes.io/metadata.name"] = name;
    if object["spec"].get("finalizers").is_none() {
        object["spec"]["finalizers"] = json!(["kubernetes"]);
    }
    if object["status"].get("phase").is_none() {
        object["status"]["phase"] = json!("Active");
    }
    Vec::new()
}

fn encode_string_data(secret: &mut Value) {
    let Some(Value::Object(texts)) = secret.as_object_mut().and_then(|secret| secret.shift_remove("stringData")) else {
        return;
    };
    if !secret["data"].is_object() {
        secret["data"] = Value::Object(Map::new());
    }
    for (name, text) in texts {
        secret["data"][name] = json!(STANDARD.encode(text.as_str().unwrap_or_default()));
    }
}

fn check_immutable(object: &Value, old: Option<&Value>, fields: &[&str]) -> Vec<Cause> {
    let Some(old) = old.filter(|old| old["immutable"] == true) else { return Vec::new() };
    let mut causes = Vec::new();
    if object["immutable"] != true {
        causes.push(Cause::forbidden("immutable", "field is immutable when `immutable` is set"));
    }
    for field in fields.iter().filter(|&&field| object.get(field) != old.get(field)) {
        causes.push(Cause::forbidden(*field, "field is immutable when `immutable` is set"));
    }
    causes
}
