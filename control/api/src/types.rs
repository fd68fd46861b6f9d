//! Value types that several kinds share.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Where an NVMe/TCP subsystem is reached.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Address {
    /// IP address of the listener.
    pub traddr: String,
    /// TCP port of the listener.
    #[schemars(range(min = 1, max = 65535))]
    pub trsvcid: u16,
    /// NVMe qualified name of the subsystem.
    pub nqn: String,
}

/// Where an engine reaches a replica: its data by NVMe/TCP, and the agent that promotes it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ReplicaAddress {
    /// `ip:port` of the agent of the replica's node.
    pub agent: String,
    /// IP address of the replica's listener.
    pub traddr: String,
    /// TCP port of the replica's listener.
    #[schemars(range(min = 1, max = 65535))]
    pub trsvcid: u16,
    /// NVMe qualified name of the replica's subsystem.
    pub nqn: String,
}

impl ReplicaAddress {
    /// Joins a replica's data address and its agent's.
    pub fn new(agent: &str, data: &Address) -> Self {
        Self { agent: agent.to_owned(), traddr: data.traddr.clone(), trsvcid: data.trsvcid, nqn: data.nqn.clone() }
    }

    /// The data address alone.
    pub fn data(&self) -> Address {
        Address { traddr: self.traddr.clone(), trsvcid: self.trsvcid, nqn: self.nqn.clone() }
    }
}

/// Whether an instance should run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum DesiredState {
    /// The instance runs on its node.
    Running,
    /// The instance is stopped in order; its data stays.
    #[default]
    Stopped,
}

/// What is known of an instance (an engine, a replica, an agent).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum InstanceState {
    /// Not there.
    #[default]
    Stopped,
    /// On its way up.
    Starting,
    /// Serving.
    Running,
    /// On its way down.
    Stopping,
    /// It cannot go on by itself; the message says why.
    Error,
    /// Its node does not answer.
    Unknown,
}

impl InstanceState {
    /// The word that the API uses for the state.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Stopped => "stopped",
            Self::Starting => "starting",
            Self::Running => "running",
            Self::Stopping => "stopping",
            Self::Error => "error",
            Self::Unknown => "unknown",
        }
    }
}

/// Whether a value is its type's default: such a value is left out of JSON.
pub(crate) fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}
