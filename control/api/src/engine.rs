//! Engine: the single writer of an attached volume, its mirror and its frontend, on one node.

use std::collections::BTreeMap;

use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::condition::Condition;
use crate::types::{Address, DesiredState, InstanceState, ReplicaAddress, is_default};
use crate::volume::Consistency;

/// Condition: whether the engine could be started.
pub const CONDITION_INSTANCE_READY: &str = "InstanceReady";

/// What the engine should be.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[kube(
    group = "addax.io",
    version = "v1alpha1",
    kind = "Engine",
    plural = "engines",
    shortname = "axe",
    category = "addax",
    namespaced,
    status = "EngineStatus",
    derive = "PartialEq",
    doc = "The single writer of an attached volume: its mirror and its frontend, on one node.",
    printcolumn(name = "Volume", type_ = "string", json_path = ".spec.volumeName"),
    printcolumn(name = "State", type_ = "string", json_path = ".status.currentState"),
    printcolumn(name = "Node", type_ = "string", json_path = ".spec.nodeID"),
    printcolumn(name = "Epoch", type_ = "integer", json_path = ".status.epoch"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
pub struct EngineSpec {
    /// The volume it serves.
    #[schemars(length(min = 1, max = 52))]
    #[x_kube(validation = Rule::new("self == oldSelf").message("volumeName cannot change"))]
    pub volume_name: String,

    /// The node it runs on. An engine does not move: the volume is detached and another engine made.
    #[serde(rename = "nodeID")]
    #[schemars(length(min = 1, max = 253))]
    #[x_kube(validation = Rule::new("self == oldSelf").message("nodeID cannot change: detach the volume first"))]
    pub node_id: String,

    /// Size of the volume, in bytes.
    #[schemars(range(min = 1048576))]
    #[x_kube(validation = Rule::new("self >= oldSelf").message("size cannot shrink"))]
    pub size: i64,

    /// Whether it should run.
    #[serde(default)]
    pub desire_state: DesiredState,

    /// The replicas it should use, by name. A name that is taken away leaves the volume's record first.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = 20))]
    pub replica_addresses: BTreeMap<String, ReplicaAddress>,

    /// NQNs of the hosts that may connect; nobody else may.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 128), inner(length(min = 1, max = 223)))]
    pub allowed_hosts: Vec<String>,

    /// UUID of the volume's namespace.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub uuid: String,

    /// Image or version of the data plane that should serve it; empty for the node's own.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub image: String,
}

/// What the engine is.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct EngineStatus {
    /// The node whose manager acts on this object.
    #[serde(default, rename = "ownerID", skip_serializing_if = "String::is_empty")]
    pub owner_id: String,

    /// The instance manager that runs it.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub instance_manager_name: String,

    /// What is known of it.
    #[serde(default)]
    pub current_state: InstanceState,

    /// Where hosts connect.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub endpoint: Option<Address>,

    /// The epoch under which it serves.
    #[serde(default, skip_serializing_if = "is_default")]
    pub epoch: u64,

    /// What it promises about acknowledged writes; absent while it does not run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub consistency: Option<Consistency>,

    /// Its view of each replica.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = 40))]
    pub replica_modes: BTreeMap<String, ReplicaMode>,

    /// The hosts that may connect now.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub allowed_hosts: Vec<String>,

    /// It could not open the volume, since a copy knows more than the record.
    #[serde(default, skip_serializing_if = "is_default")]
    pub record_old: bool,

    /// One sentence on what it is doing or why it cannot.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub message: String,

    /// Facts about the engine.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["type".to_string()]))]
    pub conditions: Vec<Condition>,
}

/// An engine's view of one replica.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ReplicaMode {
    /// What the engine does with it.
    pub mode: Mode,
    /// How much of a rebuild is done, 0 to 100; only while it is rebuilt.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 100))]
    pub progress_percent: Option<u32>,
    /// Why it is as it is.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub message: String,
}

/// What an engine does with a replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Mode {
    /// In sync: it is read and written.
    RW,
    /// Being rebuilt: it is written, never read.
    WO,
    /// In sync by the record, but its connection is gone: acknowledgements wait until it is back or out.
    LOST,
    /// Out: neither read nor written.
    ERR,
}
