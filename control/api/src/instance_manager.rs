//! InstanceManager: the agent of one node and what it runs.

use std::collections::BTreeMap;

use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::condition::Condition;
use crate::types::{InstanceState, is_default};

/// What the instance manager should be.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[kube(
    group = "addax.io",
    version = "v1alpha1",
    kind = "InstanceManager",
    plural = "instancemanagers",
    shortname = "axim",
    category = "addax",
    namespaced,
    status = "InstanceManagerStatus",
    derive = "PartialEq",
    doc = "The agent of one node, which owns the node's data plane, and what it runs.",
    printcolumn(name = "Node", type_ = "string", json_path = ".spec.nodeID"),
    printcolumn(name = "State", type_ = "string", json_path = ".status.currentState"),
    printcolumn(name = "Address", type_ = "string", json_path = ".status.address"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
pub struct InstanceManagerSpec {
    /// The node it serves.
    #[serde(rename = "nodeID")]
    #[schemars(length(min = 1, max = 253))]
    #[x_kube(validation = Rule::new("self == oldSelf").message("nodeID cannot change"))]
    pub node_id: String,

    /// Image or version of the agent and its data plane; empty for what is installed.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub image: String,
}

/// What the instance manager is.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct InstanceManagerStatus {
    /// The node whose manager acts on this object.
    #[serde(default, rename = "ownerID", skip_serializing_if = "String::is_empty")]
    pub owner_id: String,

    /// What is known of the agent.
    #[serde(default)]
    pub current_state: InstanceState,

    /// `ip:port` of the agent's gRPC service.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub address: String,

    /// The engines and replicas that the agent runs, by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub instances: BTreeMap<String, Instance>,

    /// Identity of the running data-plane process; another one means that it was started again.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub engine_instance: String,

    /// Name and version of the data plane.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub data_plane: String,

    /// Version of the agent's interface.
    #[serde(default, skip_serializing_if = "is_default")]
    pub api_version: u32,

    /// Facts about the instance manager.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["type".to_string()]))]
    pub conditions: Vec<Condition>,
}

/// Something that an agent runs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Instance {
    /// Whether it is an engine or a replica.
    pub kind: InstanceKind,
    /// What is known of it.
    pub state: InstanceState,
    /// Why it is as it is.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub message: String,
    /// Identity of this start of it.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub id: String,
}

/// What an agent can run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum InstanceKind {
    /// A copy of a volume.
    Replica,
    /// The writer of a volume.
    Engine,
}
