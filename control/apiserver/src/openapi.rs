//! OpenAPI v3 documents, as far as clients need them: `kubectl explain` reads the schemas, and `kubectl create` and
//! `apply` look for the `fieldValidation` and `dryRun` parameters to leave validation to the server.

use serde_json::{Map, Value, json};

use crate::registry::{Kind, Registry, group_version};

/// `/openapi/v3`: the documents there are.
pub fn index(registry: &Registry) -> Value {
    let mut paths = Map::new();
    for (group, versions) in registry.groups() {
        for version in versions {
            let path = document_path(group, version);
            paths.insert(path.clone(), json!({"serverRelativeURL": format!("/openapi/v3/{path}")}));
        }
    }
    json!({"paths": paths})
}

fn document_path(group: &str, version: &str) -> String {
    if group.is_empty() { format!("api/{version}") } else { format!("apis/{group}/{version}") }
}

/// `/openapi/v3/api/v1` and `/openapi/v3/apis/<group>/<version>`.
pub fn document(registry: &Registry, group: &str, version: &str) -> Option<Value> {
    let mut schemas = Map::new();
    let mut paths = Map::new();
    for kind in registry.kinds_in(group, version) {
        let name = schema_name(kind);
        schemas.insert(name.clone(), schema(kind));
        add_paths(kind, &name, &mut paths);
    }
    if schemas.is_empty() {
        return None;
    }
    schemas.insert(
        "io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta".to_owned(),
        json!({"type": "object", "properties": {
            "name": {"type": "string"}, "namespace": {"type": "string"},
            "labels": {"type": "object", "additionalProperties": {"type": "string"}},
            "annotations": {"type": "object", "additionalProperties": {"type": "string"}},
        }}),
    );
    Some(json!({
        "openapi": "3.0.0", "info": {"title": "Addax", "version": group_version(group, version)},
        "paths": paths, "components": {"schemas": schemas},
    }))
}

fn schema_name(kind: &Kind) -> String {
    let group = if kind.group.is_empty() { "core" } else { &kind.group };
    let reversed: Vec<&str> = group.split('.').rev().collect();
    format!("{}.{}.{}", reversed.join("."), kind.version, kind.kind)
}

fn group_version_kind(kind: &Kind) -> Value {
    json!({"group": kind.group, "version": kind.version, "kind": kind.kind})
}

fn schema(kind: &Kind) -> Value {
    let mut schema = kind.open_api.clone();
    schema["properties"]["apiVersion"] = json!({"type": "string"});
    schema["properties"]["kind"] = json!({"type": "string"});
    schema["properties"]["metadata"] =
        json!({"allOf": [{"$ref": "#/components/schemas/io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"}]});
    schema["x-kubernetes-group-version-kind"] = json!([group_version_kind(kind)]);
    schema
}

fn add_paths(kind: &Kind, schema_name: &str, paths: &mut Map<String, Value>) {
    let prefix = document_path(&kind.group, &kind.version);
    let collection = if kind.namespaced {
        format!("/{prefix}/namespaces/{{namespace}}/{}", kind.plural)
    } else {
        format!("/{prefix}/{}", kind.plural)
    };
    paths.insert(
        format!("{collection}/{{name}}"),
        json!({
            "get": operation(kind, schema_name, "get", &[]),
            "put": operation(kind, schema_name, "put", &["dryRun", "fieldManager", "fieldValidation"]),
            "patch": operation(kind, schema_name, "patch", &["dryRun", "fieldManager", "fieldValidation", "force"]),
            "delete": operation(kind, schema_name, "delete", &["dryRun", "propagationPolicy"]),
        }),
    );
    paths.insert(
        collection,
        json!({
            "get": operation(kind, schema_name, "list", &["labelSelector", "fieldSelector", "limit", "continue"]),
            "post": operation(kind, schema_name, "post", &["dryRun", "fieldManager", "fieldValidation"]),
        }),
    );
}

fn operation(kind: &Kind, schema_name: &str, action: &str, parameters: &[&str]) -> Value {
    let parameter =
        |name: &&str| json!({"name": name, "in": "query", "schema": {"type": "string", "uniqueItems": true}});
    let content = json!({"application/json": {"schema": {"$ref": format!("#/components/schemas/{schema_name}")}}});
    json!({
        "operationId": format!("{action}{}", kind.kind),
        "parameters": parameters.iter().map(parameter).collect::<Vec<_>>(),
        "responses": {"200": {"description": "OK", "content": content}},
        "x-kubernetes-action": action,
        "x-kubernetes-group-version-kind": group_version_kind(kind),
    })
}
