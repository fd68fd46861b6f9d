//! Where each kind is kept in the snapshot, and the step from a [`Kind`] that is a value to one that is a type.

use std::fmt::Debug;

use addax_api::{Engine, InstanceManager, Node, Replica, Setting, Volume, VolumeAttachment};
use addax_plan::observed::{Observed, Table, Tabled};
use k8s_openapi::NamespaceResourceScope;
use serde::de::DeserializeOwned;

/// A kind that the snapshot holds.
pub trait Stored:
    Tabled
    + kube::Resource<DynamicType = (), Scope = NamespaceResourceScope>
    + Clone
    + Debug
    + DeserializeOwned
    + Send
    + Sync
    + 'static
{
    /// Its objects.
    fn table(observed: &Observed) -> &Table<Self>;

    /// Its objects, to be changed.
    fn table_mut(observed: &mut Observed) -> &mut Table<Self>;
}

macro_rules! stored {
    ($($kind:ident in $table:ident),*) => {
        $(impl Stored for $kind {
            fn table(observed: &Observed) -> &Table<Self> {
                &observed.$table
            }

            fn table_mut(observed: &mut Observed) -> &mut Table<Self> {
                &mut observed.$table
            }
        })*
    };
}

stored!(
    Volume in volumes,
    VolumeAttachment in attachments,
    Engine in engines,
    Replica in replicas,
    Node in nodes,
    InstanceManager in instance_managers,
    Setting in settings
);

/// Evaluates an expression with the type name `K` standing for the kind's type.
macro_rules! with_kind {
    ($kind:expr, $K:ident => $body:expr) => {
        match $kind {
            ::addax_plan::action::Kind::Volume => {
                type $K = ::addax_api::Volume;
                $body
            }
            ::addax_plan::action::Kind::VolumeAttachment => {
                type $K = ::addax_api::VolumeAttachment;
                $body
            }
            ::addax_plan::action::Kind::Engine => {
                type $K = ::addax_api::Engine;
                $body
            }
            ::addax_plan::action::Kind::Replica => {
                type $K = ::addax_api::Replica;
                $body
            }
            ::addax_plan::action::Kind::Node => {
                type $K = ::addax_api::Node;
                $body
            }
            ::addax_plan::action::Kind::InstanceManager => {
                type $K = ::addax_api::InstanceManager;
                $body
            }
            ::addax_plan::action::Kind::Setting => {
                type $K = ::addax_api::Setting;
                $body
            }
        }
    };
}
pub(crate) use with_kind;
