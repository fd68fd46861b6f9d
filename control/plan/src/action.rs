//! What a plan asks for, as plain data. The manager carries it out.
//!
//! *Contract with whoever carries it out.*
//! - The actions of one plan are a sequence: they are done in order, and the first that fails ends the pass. Some rely
//!   on it: data is deleted before the finalizer goes, a status is patched before the event that tells of it.
//! - A pass that ended early is repeated: at once after a conflict (409), which only says that the snapshot was old;
//!   with a growing delay after anything else. Nothing is ever dropped: plans look at levels, not at edges, and ask
//!   again for what is still missing.
//! - Several actions of one pass may write the same object: each after the first goes by the version that the one before
//!   it returned, not by the one in its reference.
//! - The next plan for an object must not run on a snapshot older than the last pass's own writes (read your writes):
//!   the manager puts the objects that the API server and the agents return into the snapshot itself.
//! - At rest a plan is empty, or holds nothing but a [`Action::RequeueAt`].

use addax_api::ResourceExt;
use addax_api::recovery::RecoveryAction;
use addax_api::{Engine, InstanceManager, Node, Replica, ReplicaAddress, Setting, VolumeAttachment, VolumeConfig};
use jiff::Timestamp;
use serde_json::Value;

use crate::observed::DiskWish;

/// The kinds that plans are made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// See [`addax_api::Volume`].
    Volume,
    /// See [`VolumeAttachment`].
    VolumeAttachment,
    /// See [`Engine`].
    Engine,
    /// See [`Replica`].
    Replica,
    /// See [`Node`].
    Node,
    /// See [`InstanceManager`].
    InstanceManager,
    /// See [`Setting`].
    Setting,
}

impl Kind {
    /// Every kind.
    pub const ALL: [Kind; 7] = [
        Kind::Volume,
        Kind::VolumeAttachment,
        Kind::Engine,
        Kind::Replica,
        Kind::Node,
        Kind::InstanceManager,
        Kind::Setting,
    ];

    /// The kind's name, as in manifests.
    pub fn as_str(self) -> &'static str {
        match self {
            Kind::Volume => "Volume",
            Kind::VolumeAttachment => "VolumeAttachment",
            Kind::Engine => "Engine",
            Kind::Replica => "Replica",
            Kind::Node => "Node",
            Kind::InstanceManager => "InstanceManager",
            Kind::Setting => "Setting",
        }
    }
}

/// Names an object that a plan is made for. It need not exist (yet).
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key {
    /// The kind.
    pub kind: Kind,
    /// The name; the namespace is always `addax-system`.
    pub name: String,
}

impl Key {
    /// Names an object.
    pub fn new(kind: Kind, name: &str) -> Self {
        Self { kind, name: name.to_owned() }
    }
}

/// An object exactly as the plan saw it: a write to it holds only for that version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectRef {
    /// The kind.
    pub kind: Kind,
    /// The name.
    pub name: String,
    /// `metadata.uid`: a precondition of a deletion.
    pub uid: String,
    /// `metadata.resourceVersion`: a precondition of every patch and deletion.
    pub resource_version: String,
}

/// An object to create. `metadata` holds name, namespace, labels, finalizers and owner references.
#[derive(Clone, Debug, PartialEq)]
pub enum Object {
    /// A Volume's attachment.
    VolumeAttachment(VolumeAttachment),
    /// An engine.
    Engine(Engine),
    /// A replica.
    Replica(Replica),
    /// A node.
    Node(Node),
    /// A node's agent.
    InstanceManager(InstanceManager),
    /// A setting.
    Setting(Setting),
}

impl Object {
    /// Names the object.
    pub fn key(&self) -> Key {
        match self {
            Object::VolumeAttachment(o) => Key::new(Kind::VolumeAttachment, &o.name_any()),
            Object::Engine(o) => Key::new(Kind::Engine, &o.name_any()),
            Object::Replica(o) => Key::new(Kind::Replica, &o.name_any()),
            Object::Node(o) => Key::new(Kind::Node, &o.name_any()),
            Object::InstanceManager(o) => Key::new(Kind::InstanceManager, &o.name_any()),
            Object::Setting(o) => Key::new(Kind::Setting, &o.name_any()),
        }
    }
}

/// One thing to do.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Create an object. That it exists already is no error: the snapshot was old, and the pass is repeated.
    Create(Box<Object>),
    /// Send a JSON merge patch for `metadata` and `spec`. The doer adds `metadata.resourceVersion` from the reference,
    /// so that a concurrent change makes it fail with a conflict.
    PatchSpec {
        /// What to patch.
        object: ObjectRef,
        /// `{"metadata": {...}, "spec": {...}}`, either may be missing.
        patch: Value,
    },
    /// Send a JSON merge patch to the status subresource, under the same precondition.
    PatchStatus {
        /// What to patch.
        object: ObjectRef,
        /// `{"status": {...}}`.
        patch: Value,
    },
    /// Delete an object, with its uid and resourceVersion as preconditions. That it is gone already is no error.
    Delete {
        /// What to delete.
        object: ObjectRef,
    },
    /// Read the object from the API server itself, not from a cache, and end the pass as after a conflict if its
    /// version is not the one of the reference. It stands before what cannot be taken back.
    Confirm {
        /// What must not have changed.
        object: ObjectRef,
    },
    /// Call a node's agent.
    Agent {
        /// The node.
        node: String,
        /// What to ask.
        call: AgentCall,
    },
    /// Tell people what happened. Failing to do so is no error.
    Event {
        /// What it is about.
        object: ObjectRef,
        /// Whether somebody should worry.
        severity: Severity,
        /// One CamelCase word for the cause.
        reason: String,
        /// One sentence.
        message: String,
    },
    /// Make this plan again at that time, if nothing causes it earlier. The earliest of several counts.
    RequeueAt(Timestamp),
}

/// How much an event matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Severity {
    /// Things go their way.
    Normal,
    /// Somebody may want to look.
    Warning,
}

/// A call of a node's agent. All are idempotent. Sizes are in bytes.
///
/// The doer records a failed call in [`AgentView::failures`](crate::observed::AgentView::failures) under
/// [`AgentCall::target`] and takes the record away when a later call for the same target succeeds; the plan asks again
/// only when the record's `retry_at` has come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AgentCall {
    /// Declare a disk, or change what is wanted of it.
    PutDisk {
        /// The disk's name on the node.
        disk: String,
        /// What is wanted.
        wish: DiskWish,
    },
    /// Forget a disk; what it holds stays. The agent refuses while replicas are on it.
    RemoveDisk {
        /// The disk's name on the node.
        disk: String,
    },
    /// Start a replica.
    StartReplica {
        /// The replica.
        name: String,
        /// Its volume.
        volume: String,
        /// The disk's name on the node.
        disk: String,
        /// Size of the volume.
        size_bytes: i64,
        /// Whether to make the data if there is none. False once the replica may hold data: a copy that has vanished
        /// must not come back as an empty one.
        create: bool,
    },
    /// Stop a replica; its data stays.
    StopReplica {
        /// The replica.
        name: String,
    },
    /// Remove a replica's data. The plan has made sure that no record names it (consistency rule 22).
    DeleteReplica {
        /// The replica.
        name: String,
        /// The disk's name on the node.
        disk: String,
        /// The record that the replica must not know as much as; none when the volume itself goes, or an operator wants it.
        record: Option<Box<DeleteBy>>,
    },
    /// Open a volume: epoch, promotes, mirror, frontend.
    StartEngine {
        /// The volume.
        volume: String,
        /// Its recorded size.
        size_bytes: i64,
        /// The replicas to use, by name.
        replicas: Vec<(String, ReplicaAddress)>,
        /// The hosts that may connect.
        allowed_hosts: Vec<String>,
        /// UUID of the namespace.
        uuid: String,
    },
    /// Close a volume in order.
    StopEngine {
        /// The volume.
        volume: String,
    },
    /// Rebuild a replica into the volume.
    AddReplica {
        /// The volume.
        volume: String,
        /// The replica.
        replica: String,
        /// Where it is.
        address: ReplicaAddress,
    },
    /// Take a replica out of the volume's record and let it go. Afterwards the engine lists it no more.
    RemoveReplica {
        /// The volume.
        volume: String,
        /// The replica.
        replica: String,
    },
    /// Replace the hosts that may connect.
    SetAllowedHosts {
        /// The volume.
        volume: String,
        /// The hosts that may connect; nobody else may.
        allowed_hosts: Vec<String>,
    },
    /// Put another record in the place of one that is gone, old, or names only copies that are lost.
    RecoverVolume(Recovery),
}

/// By which record a replica is removed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeleteBy {
    /// The record.
    pub record: VolumeConfig,
    /// Lineages that are known to be before it.
    pub over: Vec<String>,
}

/// What is asked of an agent about a volume's record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recovery {
    /// The volume.
    pub volume: String,
    /// Of the request; carried out once.
    pub id: String,
    /// Force or rebuild.
    pub action: RecoveryAction,
    /// The copy that becomes the volume, with force.
    pub replica: String,
    /// All copies that are known, with where they are reached.
    pub replicas: Vec<(String, Option<ReplicaAddress>)>,
    /// Of these, those that are done without.
    pub lost: Vec<String>,
    /// Who asks.
    pub requested_by: String,
    /// Of the hold that ends by it.
    pub generation: u32,
    /// It is not begun later.
    pub not_after: Option<Timestamp>,
}

/// What a call is about: failures are kept by it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CallTarget {
    /// A disk, by its name on the node.
    Disk(String),
    /// A replica, by its name.
    Replica(String),
    /// The engine of a volume, by the volume's name.
    Engine(String),
    /// A replica of a volume's engine: the volume's and the replica's name.
    Member(String, String),
    /// A request about a volume's record: the volume's name and the request's.
    Recovery(String, String),
}

impl AgentCall {
    /// What the call is about.
    pub fn target(&self) -> CallTarget {
        match self {
            AgentCall::PutDisk { disk, .. } | AgentCall::RemoveDisk { disk } => CallTarget::Disk(disk.clone()),
            AgentCall::StartReplica { name, .. }
            | AgentCall::StopReplica { name }
            | AgentCall::DeleteReplica { name, .. } => CallTarget::Replica(name.clone()),
            AgentCall::StartEngine { volume, .. }
            | AgentCall::StopEngine { volume }
            | AgentCall::SetAllowedHosts { volume, .. } => CallTarget::Engine(volume.clone()),
            AgentCall::AddReplica { volume, replica, .. } | AgentCall::RemoveReplica { volume, replica } => {
                CallTarget::Member(volume.clone(), replica.clone())
            }
            AgentCall::RecoverVolume(recovery) => CallTarget::Recovery(recovery.volume.clone(), recovery.id.clone()),
        }
    }
}
