//! The schema of Addax's API, `addax.io/v1alpha1`: one file per kind, and nothing that acts.
//!
//! *What it is.* Each kind is a spec (what is wanted, written by people and by the controllers above) and a status
//! (what is seen, written by the object's owner). The doc comments of the fields are the descriptions that
//! `kubectl explain` shows, so they speak to the user.
//!
//! *Invariants.* What the schema can say it says: ranges, patterns and CEL rules stand in the CRDs, so that a real API
//! server and the embedded one refuse the same things with the same words. The schemas are closed: no field is kept
//! that is not named here. The Rust types however read objects with unknown fields, because during an upgrade an older
//! manager must keep seeing objects which a newer one has written; refusing is the API server's part.
//!
//! *When things fail.* Names and settings that people give are parsed by [`name`] and [`setting`], whose errors say the
//! field, the value and what is allowed.

// Every `printcolumn` of kube's derive repeats `type_`, which the lint takes for a duplicate.
#![allow(clippy::duplicated_attributes)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

pub mod condition;
pub mod engine;
pub mod instance_manager;
pub mod kinds;
pub mod name;
pub mod node;
pub mod nqn;
pub mod recovery;
pub mod replica;
pub mod setting;
pub mod types;
pub mod volume;
pub mod volume_attachment;

pub use condition::{Condition, ConditionStatus};
pub use engine::{Engine, EngineSpec, EngineStatus};
pub use instance_manager::{InstanceManager, InstanceManagerSpec, InstanceManagerStatus};
pub use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
pub use kinds::{KINDS, KindInfo, crds};
pub use kube::{Resource, ResourceExt, core::ObjectMeta};
pub use node::{Node, NodeSpec, NodeStatus};
pub use replica::{Replica, ReplicaSpec, ReplicaStatus};
pub use setting::{Setting, SettingSpec, SettingStatus};
pub use types::{Address, DesiredState, InstanceState, ReplicaAddress};
pub use volume::{Volume, VolumeConfig, VolumeSpec, VolumeStatus};
pub use volume_attachment::{VolumeAttachment, VolumeAttachmentSpec, VolumeAttachmentStatus};

/// The API group of every kind.
pub const GROUP: &str = "addax.io";
/// The version of every kind.
pub const VERSION: &str = "v1alpha1";
/// The namespace that holds every object.
pub const NAMESPACE: &str = "addax-system";
/// The finalizer that holds an object until its owner has cleaned up behind it.
pub const FINALIZER: &str = "addax.io";
/// The label that names the volume an object belongs to.
pub const LABEL_VOLUME: &str = "addax.io/volume";
/// The label that names the node an object belongs to.
pub const LABEL_NODE: &str = "addax.io/node";
/// One mebibyte, in bytes: volume sizes are multiples of it.
pub const MIB: i64 = 1024 * 1024;
