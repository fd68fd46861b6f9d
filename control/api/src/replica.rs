//! Replica: one copy of a volume on one disk of one node.

use kube::{CustomResource, KubeSchema};
use serde::{Deserialize, Serialize};

use crate::Time;
use crate::condition::Condition;
use crate::types::{Address, DesiredState, InstanceState, is_default};

/// Condition: whether the copy could be started.
pub const CONDITION_INSTANCE_READY: &str = "InstanceReady";
/// Condition: why a deletion waits.
pub const CONDITION_DELETION_BLOCKED: &str = "DeletionBlocked";

/// What the replica should be.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[kube(
    group = "addax.io",
    version = "v1alpha1",
    kind = "Replica",
    plural = "replicas",
    shortname = "axr",
    category = "addax",
    namespaced,
    status = "ReplicaStatus",
    derive = "PartialEq",
    doc = "One copy of a volume, on one disk of one node.",
    printcolumn(name = "Volume", type_ = "string", json_path = ".spec.volumeName"),
    printcolumn(name = "State", type_ = "string", json_path = ".status.currentState"),
    printcolumn(name = "Node", type_ = "string", json_path = ".spec.nodeID"),
    printcolumn(name = "Disk", type_ = "string", json_path = ".spec.diskID"),
    printcolumn(name = "Failed", type_ = "date", json_path = ".spec.failedAt"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
pub struct ReplicaSpec {
    /// The volume it is a copy of.
    #[schemars(length(min = 1, max = 52))]
    #[x_kube(validation = Rule::new("self == oldSelf").message("volumeName cannot change"))]
    pub volume_name: String,

    /// The node that holds it; empty until it has been scheduled. A copy does not move.
    #[serde(default, rename = "nodeID", skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 253))]
    #[x_kube(validation = Rule::new("oldSelf == '' || self == oldSelf").message("nodeID cannot change once it is set"))]
    pub node_id: String,

    /// The disk that holds it, by its name on the node; empty until it has been scheduled.
    #[serde(default, rename = "diskID", skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 253))]
    #[x_kube(validation = Rule::new("oldSelf == '' || self == oldSelf").message("diskID cannot change once it is set"))]
    pub disk_id: String,

    /// Size of the volume, in bytes.
    #[schemars(range(min = 1048576))]
    #[x_kube(validation = Rule::new("self >= oldSelf").message("size cannot shrink"))]
    pub size: i64,

    /// Whether it should run.
    #[serde(default)]
    pub desire_state: DesiredState,

    /// When the engine put it out of use; empty while it is in use.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failed_at: Option<Time>,

    /// When it last became in sync.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_healthy_at: Option<Time>,

    /// When it last failed; kept when it is used again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_failed_at: Option<Time>,

    /// How often a rebuild of it has failed since it was last in sync.
    #[serde(default, skip_serializing_if = "is_default")]
    pub rebuild_retry_count: u32,
}

/// What the replica is.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct ReplicaStatus {
    /// The node whose manager acts on this object.
    #[serde(default, rename = "ownerID", skip_serializing_if = "String::is_empty")]
    pub owner_id: String,

    /// The instance manager that runs it.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub instance_manager_name: String,

    /// What is known of it.
    #[serde(default)]
    pub current_state: InstanceState,

    /// Where an engine connects.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<Address>,

    /// Whether no engine has ever used it, so that it holds no data of any volume; absent until its agent has said so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fresh: Option<bool>,

    /// Facts about the replica.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["type".to_string()]))]
    pub conditions: Vec<Condition>,
}
