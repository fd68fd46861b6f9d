//! Node: a machine that holds copies of volumes and serves volumes.

use std::collections::BTreeMap;

use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::condition::Condition;
use crate::types::is_default;

/// Condition: whether the node's manager and agent are alive.
pub const CONDITION_READY: &str = "Ready";
/// Condition: whether new copies may be placed (on a node, or on a disk).
pub const CONDITION_SCHEDULABLE: &str = "Schedulable";

/// What the node should be.
#[derive(CustomResource, Clone, Debug, PartialEq, Serialize, Deserialize, KubeSchema)]
#[kube(
    group = "addax.io",
    version = "v1alpha1",
    kind = "Node",
    plural = "nodes",
    shortname = "axn",
    category = "addax",
    namespaced,
    status = "NodeStatus",
    derive = "PartialEq",
    doc = "A machine that holds copies of volumes and serves volumes.",
    printcolumn(name = "Ready", type_ = "string", json_path = ".status.conditions[?(@.type=='Ready')].status"),
    printcolumn(
        name = "Schedulable",
        type_ = "string",
        json_path = ".status.conditions[?(@.type=='Schedulable')].status"
    ),
    printcolumn(name = "Agent", type_ = "string", json_path = ".status.agentAddress"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
pub struct NodeSpec {
    /// The disks to use, by a name of your choice.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = 128))]
    pub disks: BTreeMap<String, DiskSpec>,

    /// Whether new copies may be placed on this node.
    #[serde(default = "default_true")]
    pub allow_scheduling: bool,

    /// Tags that volumes can ask for with `nodeSelector`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), inner(length(min = 1, max = 63)))]
    pub tags: Vec<String>,
}

impl Default for NodeSpec {
    fn default() -> Self {
        Self { disks: BTreeMap::new(), allow_scheduling: true, tags: Vec::new() }
    }
}

/// A disk of a node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct DiskSpec {
    /// The folder that holds the disk's copies.
    #[schemars(length(min = 1, max = 4096))]
    pub path: String,

    /// Whether new copies may be placed on this disk.
    #[serde(default = "default_true")]
    pub allow_scheduling: bool,

    /// Bytes that are left to others.
    #[serde(default, skip_serializing_if = "is_default")]
    #[schemars(range(min = 0))]
    pub storage_reserved: i64,

    /// Tags that volumes can ask for with `diskSelector`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), inner(length(min = 1, max = 63)))]
    pub tags: Vec<String>,
}

impl DiskSpec {
    /// A disk in a folder, open for copies.
    pub fn at(path: &str) -> Self {
        Self { path: path.to_owned(), allow_scheduling: true, storage_reserved: 0, tags: Vec::new() }
    }
}

fn default_true() -> bool {
    true
}

/// What the node is.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodeStatus {
    /// The node whose manager acts on this object.
    #[serde(default, rename = "ownerID", skip_serializing_if = "String::is_empty")]
    pub owner_id: String,

    /// `ip:port` of the node's agent.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub agent_address: String,

    /// Facts about the node.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["type".to_string()]))]
    pub conditions: Vec<Condition>,

    /// What is known of each disk.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = 128))]
    pub disk_status: BTreeMap<String, DiskStatus>,
}

/// What is known of a disk. All sizes are in bytes.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct DiskStatus {
    /// UUID in the disk's marker; another one means that another disk is mounted there.
    #[serde(default, rename = "diskUUID", skip_serializing_if = "String::is_empty")]
    pub disk_uuid: String,

    /// Capacity.
    #[serde(default)]
    pub storage_maximum: i64,

    /// Free now, rounded down so that it does not change with every write.
    #[serde(default)]
    pub storage_available: i64,

    /// Sum of the sizes of the copies placed here.
    #[serde(default)]
    pub storage_scheduled: i64,

    /// The copies placed here, with their sizes.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub scheduled_replicas: BTreeMap<String, i64>,

    /// Facts about the disk.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["type".to_string()]))]
    pub conditions: Vec<Condition>,
}
