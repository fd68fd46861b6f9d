//! The table of kinds, and their CustomResourceDefinitions.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    CustomResourceDefinition, JSONSchemaProps, JSONSchemaPropsOrArray, JSONSchemaPropsOrBool,
};
use kube::CustomResourceExt;

use crate::{Engine, InstanceManager, Node, Replica, Setting, Volume, VolumeAttachment};

/// The names of a kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KindInfo {
    /// The kind, as in manifests.
    pub kind: &'static str,
    /// The plural, as in URLs.
    pub plural: &'static str,
    /// The short name for the command line.
    pub short_name: &'static str,
}

/// Every kind of the API.
pub const KINDS: &[KindInfo] = &[
    KindInfo { kind: "Engine", plural: "engines", short_name: "axe" },
    KindInfo { kind: "InstanceManager", plural: "instancemanagers", short_name: "axim" },
    KindInfo { kind: "Node", plural: "nodes", short_name: "axn" },
    KindInfo { kind: "Replica", plural: "replicas", short_name: "axr" },
    KindInfo { kind: "Setting", plural: "settings", short_name: "axset" },
    KindInfo { kind: "Volume", plural: "volumes", short_name: "axv" },
    KindInfo { kind: "VolumeAttachment", plural: "volumeattachments", short_name: "axva" },
];

/// The definitions of every kind, in the order of [`KINDS`]. Install these, not the derived ones: an API server warns
/// about the number formats of the derived ones.
pub fn crds() -> Vec<CustomResourceDefinition> {
    let mut crds = vec![
        Engine::crd(),
        InstanceManager::crd(),
        Node::crd(),
        Replica::crd(),
        Setting::crd(),
        Volume::crd(),
        VolumeAttachment::crd(),
    ];
    for version in crds.iter_mut().flat_map(|crd| &mut crd.spec.versions) {
        let schema = version.schema.as_mut().and_then(|schema| schema.open_api_v3_schema.as_mut());
        if let Some(schema) = schema {
            use_known_formats(schema);
        }
    }
    crds
}

/// OpenAPI knows `int32` and `int64` only; the ranges in the schema say that the numbers are not negative.
fn use_known_formats(schema: &mut JSONSchemaProps) {
    schema.format = schema.format.take().map(|format| match format.as_str() {
        "uint8" | "uint16" | "uint32" => "int32".to_owned(),
        "uint64" => "int64".to_owned(),
        _ => format,
    });
    for property in schema.properties.iter_mut().flat_map(|properties| properties.values_mut()) {
        use_known_formats(property);
    }
    if let Some(JSONSchemaPropsOrArray::Schema(items)) = &mut schema.items {
        use_known_formats(items);
    }
    if let Some(JSONSchemaPropsOrBool::Schema(values)) = &mut schema.additional_properties {
        use_known_formats(values);
    }
}
