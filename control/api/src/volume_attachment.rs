//! VolumeAttachment: who wants a volume attached, and where. One per volume, with the volume's name.
//!
//! Several requesters put tickets here; the controller chooses one place: the highest priority wins, of equals the
//! smallest ticket name. A volume that is attached stays where it is while a ticket wants it there.

use std::collections::BTreeMap;

use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::condition::Condition;

/// The ticket that `addax volume attach` writes.
pub const TICKET_CLI: &str = "cli";

/// Who wants the volume, and where.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[kube(
    group = "addax.io",
    version = "v1alpha1",
    kind = "VolumeAttachment",
    plural = "volumeattachments",
    shortname = "axva",
    category = "addax",
    namespaced,
    status = "VolumeAttachmentStatus",
    derive = "PartialEq",
    doc = "Who wants a volume attached, and where. It has the volume's name.",
    validation = Rule::new("self.metadata.name == self.spec.volume").message("metadata.name must be the volume's name"),
    printcolumn(name = "Volume", type_ = "string", json_path = ".spec.volume"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
pub struct VolumeAttachmentSpec {
    /// The volume.
    #[schemars(length(min = 1, max = 52))]
    #[x_kube(validation = Rule::new("self == oldSelf").message("volume cannot change"))]
    pub volume: String,

    /// The wishes, by a name that their requester chose.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = 64))]
    pub tickets: BTreeMap<String, Ticket>,
}

/// A wish to have the volume attached to a node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Ticket {
    /// Who asks; it decides the priority.
    #[serde(rename = "type")]
    pub type_: TicketType,

    /// The node wanted.
    #[serde(rename = "nodeID")]
    #[schemars(length(min = 1, max = 253))]
    pub node_id: String,

    /// More about the wish.
    #[serde(default, skip_serializing_if = "TicketParameters::is_empty")]
    pub parameters: TicketParameters,
}

/// More about a wish.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct TicketParameters {
    /// NQNs of the hosts that may connect while this ticket holds the volume.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), inner(length(min = 1, max = 223)))]
    pub allowed_hosts: Vec<String>,
}

impl TicketParameters {
    fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// Who asks for an attachment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum TicketType {
    /// A person, by the command line or the API.
    Api,
    /// The CSI driver, for a workload.
    CsiAttacher,
    /// A rebuild of a detached volume.
    OfflineRebuild,
}

impl TicketType {
    /// The priority of such tickets; higher wins.
    pub fn priority(self) -> u32 {
        match self {
            Self::Api => 1000,
            Self::CsiAttacher => 900,
            Self::OfflineRebuild => 800,
        }
    }
}

/// What became of the wishes.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct VolumeAttachmentStatus {
    /// The node whose manager acts on this object.
    #[serde(default, rename = "ownerID", skip_serializing_if = "String::is_empty")]
    pub owner_id: String,

    /// What became of each ticket.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = 64))]
    pub tickets: BTreeMap<String, TicketStatus>,

    /// Facts about the attachment.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["type".to_string()]))]
    pub conditions: Vec<Condition>,
}

/// What became of a ticket.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct TicketStatus {
    /// Whether the volume is attached as the ticket asks.
    #[serde(default)]
    pub satisfied: bool,
    /// Why not, or since when it waits for what.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub message: String,
}
