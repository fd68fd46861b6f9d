//! What plans look at: a snapshot of the API's objects, of the nodes' leases, and of what agents have told.
//!
//! *Who keeps it.* The manager holds one [`Observed`], puts every watch event and every answer of its own writes in,
//! and lends it to plans. Nothing here does I/O, and nothing is derived from a clock: times are handed in.
//!
//! *Invariants.* The indexes of a [`Table`] agree with its objects (they are kept by [`Table::put`] and
//! [`Table::remove`] alone). A node's agent is here only while this manager holds a stream to it: it does so for every
//! InstanceManager object that it owns.
//!
//! *When things fail.* What is not known is absent, never guessed: without a connected agent a replica is `unknown`,
//! not `stopped`; without a lease a node is dead.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use addax_api::ResourceExt;
use addax_api::node::{DiskSpec, DiskType, RemoteNamespace, UnmanagedLvol};
use addax_api::setting::Settings;
use addax_api::{
    Address, Engine, InstanceManager, InstanceState, Node, Replica, Setting, Volume, VolumeAttachment, name,
};
use jiff::{SignedDuration, Timestamp};

use crate::action::{CallTarget, Kind, ObjectRef};

/// Everything that plans look at.
#[derive(Clone, Debug, Default)]
pub struct Observed {
    /// The node whose manager this is, and what it knows of itself.
    pub this_node: ThisNode,
    /// Volumes.
    pub volumes: Table<Volume>,
    /// Attachments, by the volumes' names.
    pub attachments: Table<VolumeAttachment>,
    /// Engines.
    pub engines: Table<Engine>,
    /// Replicas.
    pub replicas: Table<Replica>,
    /// Nodes.
    pub nodes: Table<Node>,
    /// Instance managers, by the nodes' names.
    pub instance_managers: Table<InstanceManager>,
    /// Settings.
    pub settings: Table<Setting>,
    /// The nodes' leases, by the nodes' names.
    pub leases: BTreeMap<String, NodeLease>,
    /// What agents have told, by the nodes' names.
    pub agents: BTreeMap<String, AgentView>,
}

/// What a manager knows of its own node without asking.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ThisNode {
    /// The node's name.
    pub name: String,
    /// `ip:port` of the node's agent.
    pub agent_address: String,
    /// The disk that the Node object gets when it is made; none if the administrator adds disks.
    pub default_disk: Option<(String, DiskSpec)>,
}

/// A node's sign of life.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeLease {
    /// When this manager saw the last renewal, by its own clock; for a lease seen for the first time the time in the
    /// lease. So clocks that differ cannot make a node look dead that renews, and an old lease does not look fresh.
    pub renewed_at: Timestamp,
    /// How long a renewal holds.
    pub duration: SignedDuration,
}

impl NodeLease {
    /// When the node counts as dead unless it renews.
    pub fn expires_at(&self) -> Timestamp {
        self.renewed_at.checked_add(self.duration).unwrap_or(Timestamp::MAX)
    }
}

/// What an agent has told by its event stream.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AgentView {
    /// Whether the stream is open and has told everything that was there at its opening (`synced`). The rest of the
    /// view is worth nothing without it.
    pub connected: bool,
    /// `ip:port` of the agent.
    pub address: String,
    /// Name and version of the data plane.
    pub data_plane: String,
    /// Identity of the running data-plane process; empty while it is down.
    pub data_plane_instance: String,
    /// Version of the agent's interface.
    pub api_version: u32,
    /// Disks, by name.
    pub disks: BTreeMap<String, AgentDisk>,
    /// Replicas, by name.
    pub replicas: BTreeMap<String, AgentReplica>,
    /// Engines, by the volumes' names.
    pub engines: BTreeMap<String, AgentEngine>,
    /// Calls that failed, by what they were about.
    pub failures: BTreeMap<CallTarget, CallFailure>,
}

/// A call that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallFailure {
    /// What the agent said.
    pub message: String,
    /// When to ask again; the manager lets the delay grow with every failure.
    pub retry_at: Timestamp,
}

/// What is asked of an agent about a disk. Sizes are in bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DiskWish {
    /// What it is on.
    pub type_: DiskType,
    /// Path of the file or the block device.
    pub path: String,
    /// Where the remote namespace is.
    pub nvme: Option<RemoteNamespace>,
    /// Size of a file that is to be made.
    pub size: i64,
    /// Whether an empty device may be formatted.
    pub create: bool,
    /// Fingerprint of what may be destroyed.
    pub erase: String,
    /// The lvstore that must be there; empty when none was ever seen.
    pub uuid: String,
    /// Identity that the device must have.
    pub device: String,
}

/// A disk as its agent sees it. Sizes are in bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AgentDisk {
    /// What was last asked for.
    pub wish: DiskWish,
    /// UUID of its lvstore; empty when none was ever seen.
    pub uuid: String,
    /// Name of its lvstore.
    pub lvstore: String,
    /// Identity of the device that is there.
    pub device: String,
    /// Fingerprint of what the device holds, when that keeps it from being formatted.
    pub fingerprint: String,
    /// Bytes of a cluster.
    pub cluster_bytes: i64,
    /// Bytes of a block of its lvols.
    pub block_bytes: u32,
    /// Whether a full disk would look like a broken one.
    pub no_overcommit: bool,
    /// Capacity.
    pub size_bytes: i64,
    /// Free.
    pub available_bytes: i64,
    /// What lvols that are no replicas may take.
    pub unmanaged_bytes: i64,
    /// How many such lvols there are.
    pub unmanaged_count: u32,
    /// Such lvols by name, the first ones.
    pub unmanaged: BTreeMap<String, UnmanagedLvol>,
    /// Why it cannot be used, in one word; empty when it can.
    pub reason: String,
    /// Why it cannot be used, in one sentence.
    pub message: String,
}

/// A replica as its agent sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AgentReplica {
    /// What is known of it.
    pub state: InstanceState,
    /// Why it is as it is.
    pub message: String,
    /// Where an engine connects.
    pub address: Option<Address>,
    /// Whether it was never promoted, so that it holds no data of any volume.
    pub fresh: bool,
    /// The data-plane process that exports it.
    pub data_plane_instance: String,
    /// When this manager saw it change last.
    pub changed_at: Timestamp,
}

/// An engine as its agent sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AgentEngine {
    /// What is known of it.
    pub state: InstanceState,
    /// Why it is as it is.
    pub message: String,
    /// Where hosts connect.
    pub address: Option<Address>,
    /// Its epoch.
    pub epoch: u64,
    /// Identity of this start of it.
    pub engine_instance: String,
    /// Whether its acknowledgements do not wait for the record.
    pub best_effort: bool,
    /// It cannot open the volume, since a replica knows more than the record.
    pub record_old: bool,
    /// The replicas it uses or has put out of use.
    pub replicas: BTreeMap<String, AgentMember>,
    /// The hosts that may connect.
    pub allowed_hosts: Vec<String>,
    /// When this manager saw its state change last (progress of a rebuild does not count).
    pub changed_at: Timestamp,
}

/// A replica as an engine sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AgentMember {
    /// What the engine does with it.
    pub mode: MemberMode,
    /// Bytes copied so far in a rebuild.
    pub copied_bytes: u64,
    /// Bytes to copy in all.
    pub total_bytes: u64,
    /// Why it is as it is.
    pub message: String,
    /// When this manager saw its mode change last, or first saw it.
    pub changed_at: Timestamp,
}

/// What an engine does with a replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemberMode {
    /// In sync.
    InSync,
    /// Being rebuilt.
    Rebuilding,
    /// In sync by the record; its connection is gone.
    Lost,
    /// In neither set.
    Out,
}

impl Observed {
    /// Whether the node's lease holds.
    pub fn is_alive(&self, node: &str, now: Timestamp) -> bool {
        self.leases.get(node).is_some_and(|lease| now < lease.expires_at())
    }

    /// The nodes whose leases hold, by name.
    pub fn live_nodes(&self, now: Timestamp) -> impl Iterator<Item = &str> {
        self.leases.keys().map(String::as_str).filter(move |node| self.is_alive(node, now))
    }

    /// The node's agent, if this manager has a stream to it that is in step.
    pub fn agent(&self, node: &str) -> Option<&AgentView> {
        self.agents.get(node).filter(|agent| agent.connected)
    }

    /// `ip:port` of the node's agent, as the node's object has it.
    pub fn agent_address(&self, node: &str) -> Option<&str> {
        let status = self.nodes.get(node)?.status.as_ref()?;
        Some(status.agent_address.as_str()).filter(|address| !address.is_empty())
    }

    /// The settings in force.
    pub fn settings_in_force(&self) -> Settings {
        let values: Vec<(String, &str)> =
            self.settings.iter().map(|setting| (setting.name_any(), setting.spec.value.as_str())).collect();
        Settings::from_values(values.iter().map(|(name, value)| (name.as_str(), *value)))
    }

    /// The volume's engine.
    pub fn engine_of(&self, volume: &str) -> Option<&Engine> {
        self.engines.get(&name::engine_name(volume))
    }
}

/// An object that a [`Table`] can hold.
pub trait Tabled: ResourceExt {
    /// The kind.
    const KIND: Kind;

    /// The volume that the object belongs to.
    fn volume(&self) -> Option<&str> {
        None
    }

    /// The node that the object stands on.
    fn node(&self) -> Option<&str> {
        None
    }

    /// The owner that the object's status names; empty for none.
    fn owner(&self) -> &str;

    /// The object as it stands, for a write that holds only for this version.
    fn reference(&self) -> ObjectRef {
        ObjectRef {
            kind: Self::KIND,
            name: self.name_any(),
            uid: self.uid().unwrap_or_default(),
            resource_version: self.resource_version().unwrap_or_default(),
        }
    }

    /// Whether somebody has asked for its deletion.
    fn is_deleting(&self) -> bool {
        self.meta().deletion_timestamp.is_some()
    }
}

macro_rules! tabled {
    ($kind:ident $(, volume = $volume:expr)? $(, node = $node:expr)?) => {
        impl Tabled for $kind {
            const KIND: Kind = Kind::$kind;

            fn owner(&self) -> &str {
                self.status.as_ref().map_or("", |status| status.owner_id.as_str())
            }
            $(fn volume(&self) -> Option<&str> {
                let read: fn(&Self) -> &str = $volume;
                Some(read(self))
            })?
            $(fn node(&self) -> Option<&str> {
                let read: fn(&Self) -> &str = $node;
                Some(read(self)).filter(|node| !node.is_empty())
            })?
        }
    };
}

tabled!(Volume, node = |o| &o.spec.node_id);
tabled!(VolumeAttachment, volume = |o| &o.spec.volume);
tabled!(Engine, volume = |o| &o.spec.volume_name, node = |o| &o.spec.node_id);
tabled!(Replica, volume = |o| &o.spec.volume_name, node = |o| &o.spec.node_id);
tabled!(Node);
tabled!(InstanceManager, node = |o| &o.spec.node_id);
tabled!(Setting);

/// The objects of one kind, by name, with indexes by volume and by node.
#[derive(Clone, Debug)]
pub struct Table<T> {
    objects: BTreeMap<String, Arc<T>>,
    by_volume: BTreeMap<String, BTreeSet<String>>,
    by_node: BTreeMap<String, BTreeSet<String>>,
}

impl<T> Default for Table<T> {
    fn default() -> Self {
        Self { objects: BTreeMap::new(), by_volume: BTreeMap::new(), by_node: BTreeMap::new() }
    }
}

impl<T: Tabled> Table<T> {
    /// Puts an object in, in place of the one of the same name.
    pub fn put(&mut self, object: Arc<T>) {
        let name = object.name_any();
        self.remove(&name);
        if let Some(volume) = object.volume() {
            self.by_volume.entry(volume.to_owned()).or_default().insert(name.clone());
        }
        if let Some(node) = object.node() {
            self.by_node.entry(node.to_owned()).or_default().insert(name.clone());
        }
        self.objects.insert(name, object);
    }

    /// Takes an object out.
    pub fn remove(&mut self, name: &str) -> Option<Arc<T>> {
        let object = self.objects.remove(name)?;
        if let Some(volume) = object.volume() {
            forget(&mut self.by_volume, volume, name);
        }
        if let Some(node) = object.node() {
            forget(&mut self.by_node, node, name);
        }
        Some(object)
    }

    /// The object of that name.
    pub fn get(&self, name: &str) -> Option<&T> {
        self.objects.get(name).map(Arc::as_ref)
    }

    /// The object of that name, with the name as it is kept here.
    pub fn get_key(&self, name: &str) -> Option<(&str, &T)> {
        self.objects.get_key_value(name).map(|(key, object)| (key.as_str(), object.as_ref()))
    }

    /// Every object, by name.
    pub fn iter(&self) -> impl Iterator<Item = &T> {
        self.objects.values().map(Arc::as_ref)
    }

    /// Every name.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.objects.keys().map(String::as_str)
    }

    /// How many objects there are.
    pub fn len(&self) -> usize {
        self.objects.len()
    }

    /// Whether there is no object.
    pub fn is_empty(&self) -> bool {
        self.objects.is_empty()
    }

    /// The objects that belong to the volume, by name.
    pub fn of_volume<'a>(&'a self, volume: &str) -> impl Iterator<Item = &'a T> + use<'a, T> {
        self.pick(&self.by_volume, volume)
    }

    /// The objects that stand on the node, by name.
    pub fn on_node<'a>(&'a self, node: &str) -> impl Iterator<Item = &'a T> + use<'a, T> {
        self.pick(&self.by_node, node)
    }

    fn pick<'a>(
        &'a self,
        index: &'a BTreeMap<String, BTreeSet<String>>,
        key: &str,
    ) -> impl Iterator<Item = &'a T> + use<'a, T> {
        index.get(key).into_iter().flatten().filter_map(|name| self.get(name))
    }
}

fn forget(index: &mut BTreeMap<String, BTreeSet<String>>, key: &str, name: &str) {
    if let Some(names) = index.get_mut(key) {
        names.remove(name);
        if names.is_empty() {
            index.remove(key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use addax_api::ReplicaSpec;

    fn replica(name: &str, volume: &str, node: &str) -> Arc<Replica> {
        let spec = ReplicaSpec { volume_name: volume.to_owned(), node_id: node.to_owned(), ..ReplicaSpec::default() };
        Arc::new(Replica::new(name, spec))
    }

    #[test]
    fn the_indexes_follow_the_objects() {
        let mut table = Table::default();
        table.put(replica("a", "v", ""));
        table.put(replica("b", "v", "n1"));
        table.put(replica("c", "w", "n1"));
        assert_eq!(table.of_volume("v").count(), 2);
        assert_eq!(table.on_node("n1").count(), 2);
        table.put(replica("a", "v", "n1"));
        assert_eq!(table.of_volume("v").count(), 2);
        assert_eq!(table.on_node("n1").count(), 3);
        table.remove("b");
        assert_eq!(table.of_volume("v").map(ResourceExt::name_any).collect::<Vec<_>>(), ["a"]);
        table.remove("a");
        table.remove("c");
        assert!(table.by_volume.is_empty() && table.by_node.is_empty() && table.is_empty());
    }

    #[test]
    fn a_lease_holds_until_its_duration_has_passed() {
        let at = |second| Timestamp::from_second(second).unwrap();
        let mut observed = Observed::default();
        let lease = NodeLease { renewed_at: at(100), duration: SignedDuration::from_secs(12) };
        observed.leases.insert("n1".to_owned(), lease);
        assert!(observed.is_alive("n1", at(111)));
        assert!(!observed.is_alive("n1", at(112)));
        assert!(!observed.is_alive("n2", at(100)));
    }
}
