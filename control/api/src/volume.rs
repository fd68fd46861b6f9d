//! Volume: a block device that is kept as several copies. Its status holds the arbiter record of the mirror.
//!
//! *Invariants of the record* (`status.config`), as CEL transition rules, so that no writer, however old its view, can
//! break them: the epoch and the configuration number never fall; a change of either set raises the number; the
//! in-sync set is never empty; only a replica that was in sync or was being rebuilt can be in sync next, unless the
//! lineage is new; the engine instance changes only with a rising epoch; the size never falls; a record, once there,
//! stays.

use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::condition::Condition;
use crate::recovery::{DiscardedReplica, RecoveryAccount, RecoveryRequest};
use crate::types::{Address, is_default};

/// The largest volume, in bytes (64 TiB).
pub const MAX_SIZE_BYTES: i64 = 64 * 1024 * 1024 * 1024 * 1024;

/// Condition: whether every wanted replica has a place.
pub const CONDITION_SCHEDULED: &str = "Scheduled";
/// Condition: whether the replicas that an engine needs are running.
pub const CONDITION_REPLICAS_READY: &str = "ReplicasReady";
/// Condition: whether the volume has all its copies. Its transition time starts the wait for a new replica.
pub const CONDITION_REDUNDANT: &str = "Redundant";
/// Condition: whether the arbiter record is there.
pub const CONDITION_INITIALISED: &str = "Initialised";
/// Condition: whether the copies have the size that is wanted; absent when they have.
pub const CONDITION_EXPANDED: &str = "Expanded";
/// Condition: why a deletion waits.
pub const CONDITION_DELETION_BLOCKED: &str = "DeletionBlocked";
/// Condition: the record is in doubt, so nothing is opened; it says what to do. Absent otherwise.
pub const CONDITION_RECOVERY_HOLD: &str = "RecoveryHold";

/// What the volume should be.
#[derive(CustomResource, Clone, Debug, PartialEq, Serialize, Deserialize, KubeSchema)]
#[kube(
    group = "addax.io",
    version = "v1alpha1",
    kind = "Volume",
    plural = "volumes",
    shortname = "axv",
    category = "addax",
    namespaced,
    status = "VolumeStatus",
    derive = "PartialEq",
    doc = "A block device that is kept as several copies on several nodes.",
    validation = Rule::new("self.metadata.name.size() <= 52 && self.metadata.name.matches('^[a-z0-9]([-a-z0-9]*[a-z0-9])?$')").message("metadata.name must be at most 52 lower-case letters, digits and '-', beginning and ending with a letter or digit"),
    validation = Rule::new("!has(oldSelf.status) || !has(oldSelf.status.config) || (has(self.status) && has(self.status.config))").message("status.config, once there, cannot be taken away"),
    validation = Rule::new("!has(self.spec.recovery) || self.spec.recovery.confirm == self.metadata.name").message("spec.recovery.confirm must be the volume's name"),
    printcolumn(name = "State", type_ = "string", json_path = ".status.state"),
    printcolumn(name = "Robustness", type_ = "string", json_path = ".status.robustness"),
    printcolumn(name = "Size", type_ = "integer", json_path = ".spec.size", description = "in bytes"),
    printcolumn(name = "Replicas", type_ = "integer", json_path = ".spec.numberOfReplicas"),
    printcolumn(name = "Node", type_ = "string", json_path = ".status.currentNodeID", description = "where the engine runs"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[x_kube(validation = Rule::new("self.minInSync <= self.numberOfReplicas").message("minInSync must not be above numberOfReplicas"))]
#[serde(rename_all = "camelCase")]
pub struct VolumeSpec {
    /// Size in bytes: a multiple of 1 MiB (1048576), from 1 MiB to 64 TiB. It can grow, never shrink.
    #[schemars(range(min = 1048576, max = 70368744177664_i64))]
    #[x_kube(
        validation = Rule::new("self % 1048576 == 0").message("size must be a multiple of 1048576 bytes (1 MiB)"),
        validation = Rule::new("self >= oldSelf").message("size cannot shrink")
    )]
    pub size: i64,

    /// How many copies to keep, 1 to 20.
    #[serde(default = "default_number_of_replicas")]
    #[schemars(range(min = 1, max = 20))]
    pub number_of_replicas: u32,

    /// How hosts reach the volume.
    #[serde(default)]
    pub frontend: Frontend,

    /// The node that the volume is to be attached to. The attachment controller writes it from the tickets of the
    /// VolumeAttachment of the same name; empty means detached.
    #[serde(default, rename = "nodeID", skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 253))]
    pub node_id: String,

    /// NQNs of the hosts that may connect, beside those that the winning attachment ticket names. Nobody else may.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), inner(length(min = 1, max = 223)))]
    #[x_kube(merge_strategy = ListMerge::Set)]
    pub allowed_hosts: Vec<String>,

    /// The fewest copies that must have a write before it is acknowledged. With fewer left the volume waits.
    #[serde(default = "default_min_in_sync")]
    #[schemars(range(min = 1, max = 20))]
    pub min_in_sync: u32,

    /// Whether two copies may share a node when there is no other place.
    #[serde(default)]
    pub replica_soft_anti_affinity: bool,

    /// Tags that a node must all have to hold a copy.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), inner(length(min = 1, max = 63)))]
    pub node_selector: Vec<String>,

    /// Tags that a disk must all have to hold a copy.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), inner(length(min = 1, max = 63)))]
    pub disk_selector: Vec<String>,

    /// What an operator asks to be done to the record, once. The answer is in `status.recoveries` under its id.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recovery: Option<RecoveryRequest>,
}

impl VolumeSpec {
    /// A volume of so many bytes with the defaults for everything else.
    pub fn with_size(size: i64) -> Self {
        Self {
            size,
            number_of_replicas: default_number_of_replicas(),
            frontend: Frontend::default(),
            node_id: String::new(),
            allowed_hosts: Vec::new(),
            min_in_sync: default_min_in_sync(),
            replica_soft_anti_affinity: false,
            node_selector: Vec::new(),
            disk_selector: Vec::new(),
            recovery: None,
        }
    }
}

fn default_number_of_replicas() -> u32 {
    3
}

fn default_min_in_sync() -> u32 {
    1
}

/// How hosts reach a volume.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Frontend {
    /// By NVMe/TCP.
    #[default]
    Nvmf,
    /// Not at all: the engine runs without a frontend.
    None,
}

/// What the volume is.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[x_kube(
    validation = Rule::new("!has(oldSelf.config) || has(self.config)").message("config, once there, cannot be taken away"),
    validation = Rule::new("oldSelf.state != 'deleting' || self.state == 'deleting'").message("a volume that is being deleted stays so")
)]
#[serde(rename_all = "camelCase")]
pub struct VolumeStatus {
    /// The node whose manager acts on this object.
    #[serde(default, rename = "ownerID", skip_serializing_if = "String::is_empty")]
    pub owner_id: String,

    /// Where the volume is in its life.
    #[serde(default)]
    pub state: VolumeState,

    /// How many of the wanted copies are good.
    #[serde(default)]
    pub robustness: Robustness,

    /// The node where the engine runs, or ran last while the volume is not yet detached.
    #[serde(default, rename = "currentNodeID", skip_serializing_if = "String::is_empty")]
    pub current_node_id: String,

    /// What holds for acknowledged writes; absent while no engine runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub consistency: Option<Consistency>,

    /// Where hosts connect, while attached.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub endpoint: Option<Endpoint>,

    /// The arbiter record: which copies have every acknowledged write. Only the agent of the engine's node changes it, and
    /// while there is no engine the agent that carries out `spec.recovery`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub config: Option<VolumeConfig>,

    /// What operators did to the record, the newest last.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32))]
    pub recoveries: Vec<RecoveryAccount>,

    /// Copies that were set aside: they are neither used nor removed until an operator purges them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 40))]
    pub discarded: Vec<DiscardedReplica>,

    /// The value of the setting `recovery-generation` for which the record was last compared with all copies.
    #[serde(default, skip_serializing_if = "is_default")]
    #[schemars(range(min = 0, max = 1000000))]
    pub recovery_generation: u32,

    /// An engine has found that a copy knows more than the record: that is an old one. A recovery ends the doubt.
    #[serde(default, skip_serializing_if = "is_default")]
    pub record_in_doubt: bool,

    /// Facts about the volume.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["type".to_string()]))]
    pub conditions: Vec<Condition>,
}

impl VolumeStatus {
    /// Whether the copy was set aside.
    pub fn is_discarded(&self, replica: &str) -> bool {
        self.discarded.iter().any(|discarded| discarded.replica == replica)
    }
}

/// What an engine promises about acknowledged writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum Consistency {
    /// An acknowledged write is never lost and never read back stale: the record is changed before an acknowledgement
    /// that rests on the change.
    Guaranteed,
    /// The engine is a stock data plane's raid1: it acknowledges writes before the loss of a copy is recorded. When the
    /// engine and the copies that are left fail within that moment, a copy without these writes may be taken for good.
    BestEffort,
}

/// Where a volume is in its life.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum VolumeState {
    /// Its copies are being made.
    #[default]
    Creating,
    /// No engine runs.
    Detached,
    /// The engine is on its way up.
    Attaching,
    /// Hosts can connect.
    Attached,
    /// The engine is on its way down.
    Detaching,
    /// The volume and its data are being removed. There is no way back.
    Deleting,
}

impl VolumeState {
    /// The word that the API uses for the state.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Creating => "creating",
            Self::Detached => "detached",
            Self::Attaching => "attaching",
            Self::Attached => "attached",
            Self::Detaching => "detaching",
            Self::Deleting => "deleting",
        }
    }
}

/// How many of the wanted copies are good.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Robustness {
    /// All wanted copies have every acknowledged write.
    Healthy,
    /// Fewer than wanted, but enough to go on.
    Degraded,
    /// No copy can be reached that has every acknowledged write.
    Faulted,
    /// It cannot be told now.
    #[default]
    Unknown,
}

impl Robustness {
    /// The word that the API uses.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Healthy => "healthy",
            Self::Degraded => "degraded",
            Self::Faulted => "faulted",
            Self::Unknown => "unknown",
        }
    }
}

/// Where hosts connect to a volume.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Endpoint {
    /// NVMe qualified name of the volume's subsystem.
    pub nqn: String,
    /// IP address of the listener.
    pub traddr: String,
    /// TCP port of the listener.
    #[schemars(range(min = 1, max = 65535))]
    pub trsvcid: u16,
    /// UUID of the volume's namespace; it is the same after every attachment.
    pub uuid: String,
}

impl Endpoint {
    /// The address part with the volume's UUID.
    pub fn new(address: &Address, uuid: &str) -> Self {
        Self {
            nqn: address.nqn.clone(),
            traddr: address.traddr.clone(),
            trsvcid: address.trsvcid,
            uuid: uuid.to_owned(),
        }
    }
}

/// The arbiter record of a volume.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[x_kube(
    validation = Rule::new("self.epoch >= oldSelf.epoch").message("epoch never falls"),
    validation = Rule::new("self.configNumber >= oldSelf.configNumber").message("configNumber never falls"),
    validation = Rule::new("self.size >= oldSelf.size").message("the recorded size never falls"),
    validation = Rule::new("self.engineInstance == oldSelf.engineInstance || self.epoch > oldSelf.epoch").message("engineInstance changes only with a higher epoch"),
    validation = Rule::new("(self.inSync == oldSelf.inSync && self.rebuilding == oldSelf.rebuilding) || self.configNumber > oldSelf.configNumber").message("a change of inSync or rebuilding must raise configNumber"),
    validation = Rule::new("self.lineage != oldSelf.lineage || self.inSync.all(r, r in oldSelf.inSync || r in oldSelf.rebuilding)").message("only a replica that was in sync or was being rebuilt can be in sync next, unless lineage changes"),
    validation = Rule::new("self.inSync.all(r, !(r in self.rebuilding))").message("a replica is either in sync or being rebuilt")
)]
#[serde(rename_all = "camelCase")]
pub struct VolumeConfig {
    /// The lineage: new when an operator forces the volume open or the record is rebuilt.
    #[schemars(length(min = 1, max = 64))]
    pub lineage: String,

    /// The epoch, raised by every engine that opens the volume; 0 before the first.
    #[schemars(range(min = 0, max = 9007199254740991_i64))]
    pub epoch: u64,

    /// The engine instance that raised the epoch; empty before the first.
    #[serde(default)]
    #[schemars(length(max = 64))]
    pub engine_instance: String,

    /// Number of this configuration; every change of the sets raises it.
    #[schemars(range(min = 1, max = 9007199254740991_i64))]
    pub config_number: u64,

    /// The replicas that have every acknowledged write; never empty.
    #[schemars(length(min = 1, max = 20), inner(length(min = 1, max = 63)))]
    pub in_sync: Vec<String>,

    /// The replicas that are being rebuilt.
    #[serde(default)]
    #[schemars(length(max = 20), inner(length(min = 1, max = 63)))]
    pub rebuilding: Vec<String>,

    /// The fewest replicas in sync with which writes are acknowledged.
    #[schemars(range(min = 1, max = 20))]
    pub min_in_sync: u32,

    /// The size that every replica in sync has, in bytes.
    #[schemars(range(min = 1048576))]
    pub size: i64,

    /// Whether the last engine closed the volume in order, so that all replicas in sync are equal.
    #[serde(default, skip_serializing_if = "is_default")]
    pub clean: bool,

    /// What was recorded of the volume's snapshots.
    #[serde(default, skip_serializing_if = "is_default")]
    pub snapshots: SnapshotTree,
}

/// What the record says of a volume's snapshots. The snapshots themselves are objects of kind Snapshot.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct SnapshotTree {
    /// How many snapshots were taken so far.
    #[serde(default)]
    #[schemars(range(min = 0, max = 9007199254740991_i64))]
    pub version: u64,

    /// UUID of the latest one.
    #[serde(default)]
    #[schemars(length(max = 63))]
    pub last: String,

    /// The replicas that have the latest one.
    #[serde(default)]
    #[schemars(length(max = 20), inner(length(min = 1, max = 63)))]
    pub replicas: Vec<String>,
}

impl VolumeConfig {
    /// Whether the record names the replica, in sync or being rebuilt.
    pub fn names(&self, replica: &str) -> bool {
        self.is_in_sync(replica) || self.rebuilding.iter().any(|name| name == replica)
    }

    /// Whether the replica has every acknowledged write.
    pub fn is_in_sync(&self, replica: &str) -> bool {
        self.in_sync.iter().any(|name| name == replica)
    }
}
