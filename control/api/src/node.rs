//! Node: a machine that holds copies of volumes and serves volumes.

use std::collections::BTreeMap;

use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::condition::Condition;
use crate::types::is_default;

/// Condition: whether the node's manager and agent are alive.
pub const CONDITION_READY: &str = "Ready";
/// Bytes of a block that a disk needs to hold copies.
pub const BLOCK_SIZE: u32 = 4096;
/// Condition: whether new copies may be placed (on a node, or on a disk).
pub const CONDITION_SCHEDULABLE: &str = "Schedulable";
/// Reason of a disk that is not ready: its agent is being told to forget it, or another device of its name.
pub const DISK_REMOVING: &str = "Removing";
/// Reason of a disk that is not ready: its lvstore was found, and is used once it stands in the status.
pub const DISK_FOUND: &str = "Found";
/// Reason of a disk that is not ready: another node has it, or another device of the same one has its lvstore.
pub const DISK_DUPLICATE: &str = "DuplicateDisk";

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
    validation = Rule::new("!has(oldSelf.spec.disks) || oldSelf.spec.disks.all(d, (has(self.spec.disks) && d in self.spec.disks) || (!oldSelf.spec.disks[d].allowScheduling && (!has(oldSelf.status) || !has(oldSelf.status.diskStatus) || !(d in oldSelf.status.diskStatus) || !has(oldSelf.status.diskStatus[d].scheduledReplicas) || size(oldSelf.status.diskStatus[d].scheduledReplicas) == 0)))").message("a disk can be removed only when its scheduling is disabled and no copies are on it: evict it first"),
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

/// What a disk is on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum DiskType {
    /// A file.
    #[default]
    File,
    /// A block device of the node.
    Block,
    /// A namespace reached by NVMe/TCP.
    Nvme,
}

impl DiskType {
    /// The word that the API uses.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::File => "file",
            Self::Block => "block",
            Self::Nvme => "nvme",
        }
    }
}

/// A disk of a node: an lvstore on a file, a block device or a remote namespace. What it is on cannot change.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[x_kube(
    validation = Rule::new("self.type == 'nvme' ? has(self.nvme) : has(self.path)").message("path is needed, or nvme for a disk of type nvme"),
    validation = Rule::new("self.type == 'nvme' ? !has(self.path) : !has(self.nvme)").message("a disk of type nvme has no path, and one of another type no nvme"),
    validation = Rule::new("self.type == 'file' || !has(self.size) || self.size == 0").message("only a file is made with a size"),
    validation = Rule::new("self.type == oldSelf.type && has(self.path) == has(oldSelf.path) && (!has(self.path) || self.path == oldSelf.path)").message("what a disk is on cannot change: remove it first, or use another name"),
    validation = Rule::new("has(self.nvme) == has(oldSelf.nvme) && (!has(self.nvme) || self.nvme == oldSelf.nvme)").message("what a disk is on cannot change: remove it first, or use another name"),
    validation = Rule::new("!has(self.evictionRequested) || !self.evictionRequested || !self.allowScheduling").message("evictionRequested needs allowScheduling: false")
)]
#[serde(rename_all = "camelCase")]
pub struct DiskSpec {
    /// What the disk is on.
    #[serde(default, rename = "type")]
    pub type_: DiskType,

    /// Absolute path of the file or the block device; for a block device best one that stays the same, as those under
    /// /dev/disk/by-id.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(min = 1, max = 4096))]
    pub path: String,

    /// Where the remote namespace is, for type nvme.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nvme: Option<RemoteNamespace>,

    /// Size of a file that is to be made, in bytes.
    #[serde(default, skip_serializing_if = "is_default")]
    #[schemars(range(min = 0))]
    pub size: i64,

    /// Whether an empty device may be formatted. Otherwise the lvstore that is there is imported. Never is a device
    /// formatted that holds anything, and never one in place of a disk that was known before.
    #[serde(default, skip_serializing_if = "is_default")]
    pub create: bool,

    /// Permission to destroy what the device holds, if it is just what had the fingerprint that the status shows.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 64))]
    pub erase: String,

    /// Identity that the device must have, if it is no longer the one that it had at first.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 256))]
    pub device: String,

    /// Whether new copies may be placed on this disk.
    #[serde(default = "default_true")]
    pub allow_scheduling: bool,

    /// Whether the copies on this disk are to be moved to others.
    #[serde(default, skip_serializing_if = "is_default")]
    pub eviction_requested: bool,

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
    /// A disk in a file of so many bytes, which is made if it is not there; open for copies.
    pub fn file(path: &str, size: i64) -> Self {
        Self { path: path.to_owned(), size, create: true, ..Self::of(DiskType::File) }
    }

    /// A disk of a type with nothing else said; open for copies.
    pub fn of(type_: DiskType) -> Self {
        Self {
            type_,
            path: String::new(),
            nvme: None,
            size: 0,
            create: false,
            erase: String::new(),
            device: String::new(),
            allow_scheduling: true,
            eviction_requested: false,
            storage_reserved: 0,
            tags: Vec::new(),
        }
    }

    /// What it is on, in one word or path.
    pub fn place(&self) -> String {
        match &self.nvme {
            Some(at) => format!("{}:{}/{}/{}", at.traddr, at.trsvcid, at.nqn, at.nsid),
            None => self.path.clone(),
        }
    }
}

/// A namespace of another machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RemoteNamespace {
    /// IP address of the target.
    #[schemars(length(min = 1, max = 64))]
    pub traddr: String,
    /// Its port.
    #[schemars(range(min = 1, max = 65535))]
    pub trsvcid: u16,
    /// NVMe qualified name of the subsystem.
    #[schemars(length(min = 4, max = 223))]
    pub nqn: String,
    /// Number of the namespace.
    #[serde(default = "default_nsid")]
    // As int64, since an API server takes no bound that its format does not hold.
    #[schemars(with = "i64", range(min = 1, max = 4294967294_i64))]
    pub nsid: u32,
}

fn default_nsid() -> u32 {
    1
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
    /// UUID of the disk's lvstore; another one means another disk.
    #[serde(default, rename = "diskUUID", skip_serializing_if = "String::is_empty")]
    pub disk_uuid: String,

    /// Name of its lvstore.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub lvstore: String,

    /// Identity of the device that is there; empty when it has none of its own.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub device: String,

    /// Fingerprint of what the device holds, when that keeps it from being formatted.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub fingerprint: String,

    /// Bytes of a cluster: copies take whole ones.
    #[serde(default, skip_serializing_if = "is_default")]
    pub cluster_size: i64,

    /// Bytes of a block of its lvols. Copies need 4096.
    #[serde(default, skip_serializing_if = "is_default")]
    pub block_size: u32,

    /// Whether no more may be promised than there is, because the node's data plane reports a full disk as a broken one.
    #[serde(default, skip_serializing_if = "is_default")]
    pub no_overcommit: bool,

    /// Capacity.
    #[serde(default)]
    pub storage_maximum: i64,

    /// Free now, rounded down so that it does not change with every write.
    #[serde(default)]
    pub storage_available: i64,

    /// What lvols that are no copies of ours may take.
    #[serde(default, skip_serializing_if = "is_default")]
    pub storage_unmanaged: i64,

    /// How many such lvols there are.
    #[serde(default, skip_serializing_if = "is_default")]
    pub unmanaged_count: u32,

    /// Such lvols by name, the first ones. They are counted and never touched.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = 64))]
    pub unmanaged: BTreeMap<String, UnmanagedLvol>,

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

/// An lvol on a disk that is no copy of ours.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct UnmanagedLvol {
    /// Its UUID.
    #[schemars(length(max = 36))]
    pub uuid: String,
    /// Its size, in bytes.
    pub size: i64,
}
