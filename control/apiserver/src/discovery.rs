//! Discovery: which groups, versions and resources there are, in the old form and in the aggregated one.

use serde_json::{Value, json};

use crate::registry::{Kind, Registry, group_version};

/// `/api`.
pub fn core_versions() -> Value {
    json!({"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []})
}

/// `/apis`.
pub fn group_list(registry: &Registry) -> Value {
    let groups: Vec<Value> = named_groups(registry).map(|(group, versions)| group_entry(group, versions)).collect();
    json!({"kind": "APIGroupList", "apiVersion": "v1", "groups": groups})
}

/// `/apis/<group>`.
pub fn group(registry: &Registry, name: &str) -> Option<Value> {
    let (group, versions) = named_groups(registry).find(|(group, _)| *group == name)?;
    let mut entry = group_entry(group, versions);
    entry["kind"] = json!("APIGroup");
    entry["apiVersion"] = json!("v1");
    Some(entry)
}

fn named_groups(registry: &Registry) -> impl Iterator<Item = (&str, &[String])> {
    registry.groups().filter(|(group, _)| !group.is_empty())
}

fn group_entry(group: &str, versions: &[String]) -> Value {
    let entry = |version: &String| json!({"groupVersion": group_version(group, version), "version": version});
    let entries: Vec<Value> = versions.iter().map(entry).collect();
    json!({"name": group, "versions": entries, "preferredVersion": entries.first()})
}

/// `/api/v1` and `/apis/<group>/<version>`.
pub fn resource_list(registry: &Registry, group: &str, version: &str) -> Option<Value> {
    let resources: Vec<Value> = registry.kinds_in(group, version).flat_map(|kind| resources_of(kind)).collect();
    if resources.is_empty() {
        return None;
    }
    let group_version = group_version(group, version);
    Some(json!({"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": group_version, "resources": resources}))
}

fn resources_of(kind: &Kind) -> Vec<Value> {
    let mut main = json!({
        "name": kind.plural, "singularName": kind.singular, "namespaced": kind.namespaced, "kind": kind.kind,
        "verbs": kind.verbs(), "storageVersionHash": "",
    });
    if !kind.short_names.is_empty() {
        main["shortNames"] = json!(kind.short_names);
    }
    if !kind.categories.is_empty() {
        main["categories"] = json!(kind.categories);
    }
    let mut resources = vec![main];
    if kind.status_subresource {
        resources.push(json!({
            "name": format!("{}/status", kind.plural), "singularName": "", "namespaced": kind.namespaced,
            "kind": kind.kind, "verbs": ["get", "patch", "update"],
        }));
    }
    resources
}

/// `/api` (`is_core`) and `/apis` as an `APIGroupDiscoveryList` of `apidiscovery.k8s.io`.
pub fn aggregated(registry: &Registry, is_core: bool, api_version: &str) -> Value {
    let groups = registry.groups().filter(|(group, _)| group.is_empty() == is_core);
    let items: Vec<Value> = groups
        .map(|(group, versions)| {
            let versions: Vec<Value> = versions
                .iter()
                .map(|version| {
                    let resources: Vec<Value> =
                        registry.kinds_in(group, version).map(|kind| aggregated_resource(kind)).collect();
                    json!({"version": version, "freshness": "Current", "resources": resources})
                })
                .collect();
            let metadata = if group.is_empty() { json!({}) } else { json!({"name": group}) };
            json!({"metadata": metadata, "versions": versions})
        })
        .collect();
    json!({"kind": "APIGroupDiscoveryList", "apiVersion": api_version, "metadata": {}, "items": items})
}

fn aggregated_resource(kind: &Kind) -> Value {
    let response_kind = json!({"group": kind.group, "version": kind.version, "kind": kind.kind});
    let mut resource = json!({
        "resource": kind.plural, "responseKind": response_kind, "singularResource": kind.singular, "verbs": kind.verbs(),
        "scope": if kind.namespaced { "Namespaced" } else { "Cluster" },
    });
    if !kind.short_names.is_empty() {
        resource["shortNames"] = json!(kind.short_names);
    }
    if !kind.categories.is_empty() {
        resource["categories"] = json!(kind.categories);
    }
    if kind.status_subresource {
        resource["subresources"] =
            json!([{"subresource": "status", "responseKind": response_kind, "verbs": ["get", "patch", "update"]}]);
    }
    resource
}

/// `/version`.
pub fn version() -> Value {
    // The version of the API conventions that are followed, which is what clients compare theirs with.
    json!({
        "major": "1", "minor": "33", "gitVersion": concat!("v1.33.0-addax.", env!("CARGO_PKG_VERSION")),
        "gitCommit": "", "gitTreeState": "", "buildDate": "", "goVersion": "", "compiler": "rustc",
        "platform": format!("{}/{}", std::env::consts::OS, std::env::consts::ARCH),
    })
}
