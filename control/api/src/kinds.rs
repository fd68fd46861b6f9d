//! The table of kinds, and their CustomResourceDefinitions.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
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
    KindInfo {
        kind: "Engine",
        plural: "engines",
        short_name: "axe",
    },
    KindInfo {
        kind: "InstanceManager",
        plural: "instancemanagers",
        short_name: "axim",
    },
    KindInfo {
        kind: "Node",
        plural: "nodes",
        short_name: "axn",
    },
    KindInfo {
        kind: "Replica",
        plural: "replicas",
        short_name: "axr",
    },
    KindInfo {
        kind: "Setting",
        plural: "settings",
        short_name: "axset",
    },
    KindInfo {
        kind: "Volume",
        plural: "volumes",
        short_name: "axv",
    },
    KindInfo {
        kind: "VolumeAttachment",
        plural: "volumeattachments",
        short_name: "axva",
    },
];

/// The definitions of every kind, in the order of [`KINDS`].
pub fn crds() -> Vec<CustomResourceDefinition> {
    vec![
        Engine::crd(),
        InstanceManager::crd(),
        Node::crd(),
        Replica::crd(),
        Setting::crd(),
        Volume::crd(),
        VolumeAttachment::crd(),
    ]
}
