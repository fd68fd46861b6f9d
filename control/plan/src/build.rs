//! Builders for tests: snapshots in the words of the tests, and the effect of actions on a snapshot.

use std::sync::Arc;

use addax_api::instance_manager::InstanceManagerSpec;
use addax_api::node::{CONDITION_READY, CONDITION_SCHEDULABLE, DiskSpec, DiskStatus};
use addax_api::volume::VolumeState;
use addax_api::volume_attachment::{Ticket, TicketParameters, TicketType};
use addax_api::{
    Address, DesiredState, Engine, EngineSpec, InstanceManager, InstanceState, Node, NodeSpec, ObjectMeta, Replica,
    ReplicaAddress, ReplicaSpec, ResourceExt, Setting, SettingSpec, Time, Volume, VolumeAttachment,
    VolumeAttachmentSpec, VolumeConfig, VolumeSpec, condition, name, nqn,
};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::action::{Action, AgentCall, CallTarget, Key, Kind, Object};
use crate::observed::{
    AgentDisk, AgentEngine, AgentMember, AgentReplica, AgentView, CallFailure, DiskWish, MemberMode, NodeLease,
    Observed, Table, Tabled,
};
use crate::write;

/// A second of the tests' clock.
pub(crate) fn at(second: i64) -> Timestamp {
    Timestamp::from_second(1_000_000 + second).unwrap()
}

/// An empty snapshot of the manager of node n1.
pub(crate) fn observed() -> Observed {
    Observed::default().me("n1")
}

/// The agent calls among the actions.
pub(crate) fn calls(actions: &[Action]) -> Vec<AgentCall> {
    let calls = actions.iter().filter_map(|action| match action {
        Action::Agent { call, .. } => Some(call.clone()),
        _ => None,
    });
    calls.collect()
}

/// Where a replica is in tests.
pub(crate) fn address(replica: &str) -> ReplicaAddress {
    ReplicaAddress {
        agent: "agent".to_owned(),
        traddr: "127.0.0.1".to_owned(),
        trsvcid: 4420,
        nqn: nqn::replica_nqn(replica),
    }
}

/// Something that can be put into a snapshot.
pub(crate) trait Part {
    fn put(self, observed: &mut Observed);
}

impl Observed {
    pub(crate) fn me(mut self, node: &str) -> Self {
        self.this_node.name = node.to_owned();
        self.this_node.agent_address = format!("{node}:9500");
        self
    }

    pub(crate) fn with(mut self, part: impl Part) -> Self {
        part.put(&mut self);
        self
    }

    /// The snapshot after the actions on the API; calls of agents do nothing here.
    pub(crate) fn apply(&self, actions: &[Action]) -> Self {
        let mut after = self.clone();
        actions.iter().for_each(|action| apply(&mut after, action, at(0)));
        after
    }
}

fn meta(name: &str) -> ObjectMeta {
    ObjectMeta {
        name: Some(name.to_owned()),
        uid: Some(format!("uid-{name}")),
        resource_version: Some("1".to_owned()),
        ..ObjectMeta::default()
    }
}

fn mark_deleting(meta: &mut ObjectMeta) {
    write::hold(meta);
    meta.deletion_timestamp = Some(Time(at(0)));
}

// Nodes.

pub(crate) struct NodeBuilder {
    node: Node,
    alive: bool,
}

pub(crate) fn node(name: &str) -> NodeBuilder {
    let mut node = Node::new(name, NodeSpec::default());
    node.metadata = meta(name);
    let status = node.status.get_or_insert_default();
    status.agent_address = "agent".to_owned();
    condition::set(&mut status.conditions, CONDITION_READY, true, "Ready", "", at(0));
    NodeBuilder { node, alive: true }
}

impl NodeBuilder {
    pub(crate) fn disk(mut self, name: &str, size: i64) -> Self {
        self.node.spec.disks.insert(name.to_owned(), DiskSpec::file(&format!("/disks/{name}"), 0));
        let mut status = DiskStatus { storage_maximum: size, storage_available: size, ..DiskStatus::default() };
        condition::set(&mut status.conditions, CONDITION_SCHEDULABLE, true, "Schedulable", "", at(0));
        self.node.status.get_or_insert_default().disk_status.insert(name.to_owned(), status);
        self
    }

    pub(crate) fn available(mut self, disk: &str, size: i64) -> Self {
        let disks = &mut self.node.status.get_or_insert_default().disk_status;
        disks.get_mut(disk).unwrap().storage_available = size;
        self
    }

    pub(crate) fn disk_off(mut self, name: &str) -> Self {
        let mut spec = DiskSpec::file(name, 0);
        spec.allow_scheduling = false;
        self.node.spec.disks.insert(name.to_owned(), spec);
        self
    }

    pub(crate) fn spec(mut self, disk: &str, spec: DiskSpec) -> Self {
        self.node.spec.disks.insert(disk.to_owned(), spec);
        self
    }

    pub(crate) fn disk_status(mut self, name: &str, change: fn(&mut DiskStatus)) -> Self {
        change(self.node.status.get_or_insert_default().disk_status.get_mut(name).unwrap());
        self
    }

    pub(crate) fn tags(mut self, tags: &[&str]) -> Self {
        self.node.spec.tags = tags.iter().map(|tag| (*tag).to_owned()).collect();
        self
    }

    pub(crate) fn no_scheduling(mut self) -> Self {
        self.node.spec.allow_scheduling = false;
        self
    }

    pub(crate) fn not_ready(mut self) -> Self {
        let conditions = &mut self.node.status.get_or_insert_default().conditions;
        condition::set(conditions, CONDITION_READY, false, "AgentDown", "", at(0));
        self
    }

    pub(crate) fn dead(mut self) -> Self {
        self.alive = false;
        self
    }
}

impl Part for NodeBuilder {
    fn put(self, observed: &mut Observed) {
        let name = self.node.name_any();
        let hours = if self.alive { 1_000 } else { 0 };
        let lease = NodeLease { renewed_at: at(-1), duration: SignedDuration::from_hours(hours) };
        observed.leases.insert(name, lease);
        observed.nodes.put(Arc::new(self.node));
    }
}

// Agents.

pub(crate) struct AgentBuilder {
    node: String,
    view: AgentView,
}

pub(crate) fn agent(node: &str) -> AgentBuilder {
    let view = AgentView {
        connected: true,
        address: format!("{node}:9500"),
        data_plane: "addax-engine 0.1.0".to_owned(),
        data_plane_instance: "p1".to_owned(),
        api_version: 1,
        ..AgentView::default()
    };
    AgentBuilder { node: node.to_owned(), view }
}

impl AgentBuilder {
    pub(crate) fn disk(mut self, name: &str, size: i64) -> Self {
        let disk = AgentDisk {
            uuid: format!("disk-{name}"),
            size_bytes: size,
            available_bytes: size,
            block_bytes: 4096,
            wish: DiskWish { path: format!("/disks/{name}"), ..DiskWish::default() },
            ..AgentDisk::default()
        };
        self.view.disks.insert(name.to_owned(), disk);
        self
    }

    /// As the agent was told of it by the node's builder, and again after it was first seen.
    pub(crate) fn known_disk(self, name: &str, size: i64) -> Self {
        let mut known = self.disk(name, size);
        if let Some(disk) = known.view.disks.get_mut(name) {
            disk.wish.create = true;
            disk.wish.uuid = disk.uuid.clone();
        }
        known
    }

    pub(crate) fn running_replica(mut self, name: &str, fresh: bool) -> Self {
        let replica = AgentReplica {
            state: InstanceState::Running,
            message: String::new(),
            address: Some(address(name).data()),
            fresh,
            data_plane_instance: "p1".to_owned(),
            changed_at: at(0),
        };
        self.view.replicas.insert(name.to_owned(), replica);
        self
    }

    pub(crate) fn running_engine(mut self, volume: &str, epoch: u64, members: &[(&str, MemberMode)]) -> Self {
        let engine = AgentEngine {
            state: InstanceState::Running,
            message: String::new(),
            address: Some(Address { traddr: "127.0.0.1".to_owned(), trsvcid: 4420, nqn: nqn::volume_nqn(volume) }),
            epoch,
            engine_instance: format!("e{epoch}"),
            best_effort: false,
            record_old: false,
            replicas: members.iter().map(|(name, mode)| ((*name).to_owned(), member(*mode))).collect(),
            allowed_hosts: Vec::new(),
            changed_at: at(0),
        };
        self.view.engines.insert(volume.to_owned(), engine);
        self
    }
}

pub(crate) fn member(mode: MemberMode) -> AgentMember {
    AgentMember { mode, copied_bytes: 0, total_bytes: 0, message: String::new(), changed_at: at(0) }
}

impl Part for AgentBuilder {
    fn put(self, observed: &mut Observed) {
        observed.agents.insert(self.node, self.view);
    }
}

pub(crate) struct FailurePart(String, CallTarget, CallFailure);

pub(crate) fn failure(node: &str, target: CallTarget, message: &str, retry_at: i64) -> FailurePart {
    let failure = CallFailure { message: message.to_owned(), retry_at: at(retry_at) };
    FailurePart(node.to_owned(), target, failure)
}

impl Part for FailurePart {
    fn put(self, observed: &mut Observed) {
        observed.agents.get_mut(&self.0).unwrap().failures.insert(self.1, self.2);
    }
}

// Objects.

macro_rules! object_builder {
    ($builder:ident, $kind:ident, $table:ident) => {
        pub(crate) struct $builder($kind);

        impl $builder {
            #[allow(dead_code)]
            pub(crate) fn deleting(mut self) -> Self {
                mark_deleting(&mut self.0.metadata);
                self
            }
        }

        impl Part for $builder {
            fn put(self, observed: &mut Observed) {
                observed.$table.put(Arc::new(self.0));
            }
        }
    };
}

object_builder!(VolumeBuilder, Volume, volumes);
object_builder!(ReplicaBuilder, Replica, replicas);
object_builder!(EngineBuilder, Engine, engines);
object_builder!(AttachmentBuilder, VolumeAttachment, attachments);
object_builder!(InstanceManagerBuilder, InstanceManager, instance_managers);
object_builder!(SettingBuilder, Setting, settings);

pub(crate) fn volume(name: &str) -> VolumeBuilder {
    let mut volume = Volume::new(name, VolumeSpec::with_size(1 << 20));
    volume.metadata = meta(name);
    write::hold(&mut volume.metadata);
    VolumeBuilder(volume)
}

impl VolumeBuilder {
    pub(crate) fn replicas(mut self, count: u32) -> Self {
        self.0.spec.number_of_replicas = count;
        self
    }

    pub(crate) fn in_sync(mut self, replicas: &[&str]) -> Self {
        let config = VolumeConfig {
            lineage: "l".to_owned(),
            epoch: 1,
            engine_instance: "e1".to_owned(),
            config_number: 1,
            in_sync: replicas.iter().map(|name| (*name).to_owned()).collect(),
            rebuilding: Vec::new(),
            min_in_sync: 1,
            size: 1 << 20,
            clean: true,
            snapshots: Default::default(),
        };
        self.0.status.get_or_insert_default().config = Some(config);
        self
    }

    pub(crate) fn rebuilding(mut self, replicas: &[&str]) -> Self {
        let config = self.0.status.as_mut().unwrap().config.as_mut().unwrap();
        config.rebuilding = replicas.iter().map(|name| (*name).to_owned()).collect();
        self
    }

    pub(crate) fn state(mut self, state: VolumeState) -> Self {
        self.0.status.get_or_insert_default().state = state;
        self
    }

    pub(crate) fn wanted_on(mut self, node: &str) -> Self {
        self.0.spec.node_id = node.to_owned();
        self
    }

    pub(crate) fn attached_to(mut self, node: &str) -> Self {
        self.0.status.get_or_insert_default().current_node_id = node.to_owned();
        self.wanted_on(node).state(VolumeState::Attached)
    }
}

pub(crate) fn replica(name: &str, volume: &str) -> ReplicaBuilder {
    let spec = ReplicaSpec {
        volume_name: volume.to_owned(),
        size: 1 << 20,
        desire_state: DesiredState::Running,
        ..ReplicaSpec::default()
    };
    let mut replica = Replica::new(name, spec);
    replica.metadata = meta(name);
    replica.metadata.owner_references = Some(vec![OwnerReference {
        uid: format!("uid-{volume}"),
        name: volume.to_owned(),
        ..OwnerReference::default()
    }]);
    write::hold(&mut replica.metadata);
    ReplicaBuilder(replica)
}

impl ReplicaBuilder {
    pub(crate) fn on(mut self, node: &str, disk: &str) -> Self {
        self.0.spec.node_id = node.to_owned();
        self.0.spec.disk_id = disk.to_owned();
        self
    }

    pub(crate) fn size(mut self, size: i64) -> Self {
        self.0.spec.size = size;
        self
    }

    /// Made for another object of the volume's name.
    pub(crate) fn of_an_earlier_volume(mut self) -> Self {
        self.0.metadata.owner_references = None;
        self
    }

    pub(crate) fn fresh(mut self, fresh: bool) -> Self {
        self.0.status.get_or_insert_default().fresh = Some(fresh);
        self
    }

    pub(crate) fn state(mut self, state: InstanceState) -> Self {
        let address = address(&self.0.name_any()).data();
        let status = self.0.status.get_or_insert_default();
        status.current_state = state;
        status.address = Some(address);
        self
    }

    pub(crate) fn running(self) -> Self {
        self.state(InstanceState::Running)
    }

    pub(crate) fn was_healthy(mut self, second: i64) -> Self {
        self.0.spec.last_healthy_at = Some(Time(at(second)));
        self
    }

    pub(crate) fn failed(mut self, second: i64) -> Self {
        self.0.spec.failed_at = Some(Time(at(second)));
        self.0.spec.last_failed_at = Some(Time(at(second)));
        self
    }

    /// It has failed before, and is used again.
    pub(crate) fn in_use(&mut self) {
        self.0.spec.failed_at = None;
    }

    pub(crate) fn retries(mut self, count: u32) -> Self {
        self.0.spec.rebuild_retry_count = count;
        self
    }
}

/// A wanted engine of the volume, named as the volume's engine is.
pub(crate) fn engine(volume: &str) -> EngineBuilder {
    let name = name::engine_name(volume);
    let spec = EngineSpec {
        volume_name: volume.to_owned(),
        size: 1 << 20,
        desire_state: DesiredState::Running,
        ..EngineSpec::default()
    };
    let mut engine = Engine::new(&name, spec);
    engine.metadata = meta(&name);
    write::hold(&mut engine.metadata);
    EngineBuilder(engine)
}

impl EngineBuilder {
    pub(crate) fn on(mut self, node: &str) -> Self {
        self.0.spec.node_id = node.to_owned();
        self
    }

    pub(crate) fn replicas(mut self, names: &[&str]) -> Self {
        self.0.spec.replica_addresses = names.iter().map(|name| ((*name).to_owned(), address(name))).collect();
        self
    }

    pub(crate) fn host(mut self, nqn: &str) -> Self {
        self.0.spec.allowed_hosts.push(nqn.to_owned());
        self
    }

    pub(crate) fn state(mut self, state: InstanceState) -> Self {
        self.0.status.get_or_insert_default().current_state = state;
        self
    }

    pub(crate) fn stop_wanted(mut self) -> Self {
        self.0.spec.desire_state = DesiredState::Stopped;
        self
    }

    pub(crate) fn modes(mut self, modes: &[(&str, addax_api::engine::Mode)]) -> Self {
        let mode = |mode: addax_api::engine::Mode| addax_api::engine::ReplicaMode {
            mode,
            progress_percent: None,
            message: String::new(),
        };
        let status = self.0.status.get_or_insert_default();
        status.current_state = InstanceState::Running;
        status.endpoint = Some(Address {
            traddr: "127.0.0.1".to_owned(),
            trsvcid: 4420,
            nqn: nqn::volume_nqn(&self.0.spec.volume_name),
        });
        status.replica_modes = modes.iter().map(|(name, value)| ((*name).to_owned(), mode(*value))).collect();
        self
    }
}

pub(crate) fn attachment(volume: &str) -> AttachmentBuilder {
    let spec = VolumeAttachmentSpec { volume: volume.to_owned(), ..VolumeAttachmentSpec::default() };
    let mut attachment = VolumeAttachment::new(volume, spec);
    attachment.metadata = meta(volume);
    AttachmentBuilder(attachment)
}

impl AttachmentBuilder {
    pub(crate) fn ticket(self, id: &str, type_: TicketType, node: &str) -> Self {
        self.ticket_for(id, type_, node, &[])
    }

    pub(crate) fn ticket_for(mut self, id: &str, type_: TicketType, node: &str, hosts: &[&str]) -> Self {
        let ticket = Ticket {
            type_,
            node_id: node.to_owned(),
            parameters: TicketParameters { allowed_hosts: hosts.iter().map(|host| (*host).to_owned()).collect() },
        };
        self.0.spec.tickets.insert(id.to_owned(), ticket);
        self
    }
}

pub(crate) fn instance_manager(node: &str) -> InstanceManagerBuilder {
    let spec = InstanceManagerSpec { node_id: node.to_owned(), ..InstanceManagerSpec::default() };
    let mut object = InstanceManager::new(node, spec);
    object.metadata = meta(node);
    InstanceManagerBuilder(object)
}

pub(crate) fn setting(name: &str, value: &str) -> SettingBuilder {
    let mut object = Setting::new(name, SettingSpec { value: value.to_owned() });
    object.metadata = meta(name);
    SettingBuilder(object)
}

// The effect of actions on the API's objects.

/// Does what an API server would: versions rise, a deletion waits for finalizers, a stale write is refused.
pub(crate) fn apply(observed: &mut Observed, action: &Action, now: Timestamp) {
    match action {
        Action::Create(object) => create(observed, object),
        Action::PatchSpec { object, patch } | Action::PatchStatus { object, patch } => {
            let key = Key::new(object.kind, &object.name);
            on_table(observed, &key, Change::Patch(patch));
        }
        Action::Delete { object } => {
            let key = Key::new(object.kind, &object.name);
            on_table(observed, &key, Change::Delete(now));
        }
        Action::Confirm { .. } | Action::Agent { .. } | Action::Event { .. } | Action::RequeueAt(_) => {}
    }
}

fn create(observed: &mut Observed, object: &Object) {
    macro_rules! put {
        ($table:ident, $object:expr) => {{
            if observed.$table.get(&$object.name_any()).is_none() {
                let mut object = $object.clone();
                let name = object.name_any();
                object.metadata.uid = Some(format!("uid-{name}"));
                object.metadata.resource_version = Some("1".to_owned());
                observed.$table.put(Arc::new(object));
            }
        }};
    }
    match object {
        Object::VolumeAttachment(o) => put!(attachments, o),
        Object::Engine(o) => put!(engines, o),
        Object::Replica(o) => put!(replicas, o),
        Object::Node(o) => put!(nodes, o),
        Object::InstanceManager(o) => put!(instance_managers, o),
        Object::Setting(o) => put!(settings, o),
    }
}

enum Change<'a> {
    Patch(&'a Value),
    Delete(Timestamp),
}

fn on_table(observed: &mut Observed, key: &Key, change: Change<'_>) {
    match key.kind {
        Kind::Volume => change_in(&mut observed.volumes, &key.name, change),
        Kind::VolumeAttachment => change_in(&mut observed.attachments, &key.name, change),
        Kind::Engine => change_in(&mut observed.engines, &key.name, change),
        Kind::Replica => change_in(&mut observed.replicas, &key.name, change),
        Kind::Node => change_in(&mut observed.nodes, &key.name, change),
        Kind::InstanceManager => change_in(&mut observed.instance_managers, &key.name, change),
        Kind::Setting => change_in(&mut observed.settings, &key.name, change),
    }
}

fn change_in<T: Tabled + Serialize + DeserializeOwned>(table: &mut Table<T>, name: &str, change: Change<'_>) {
    let Some(object) = table.get(name) else {
        return;
    };
    let mut value = serde_json::to_value(object).unwrap();
    match change {
        Change::Patch(patch) => merge(&mut value, patch),
        Change::Delete(now) => value["metadata"]["deletionTimestamp"] = serde_json::to_value(Time(now)).unwrap(),
    }
    let version: u64 = object.resource_version().unwrap().parse().unwrap();
    value["metadata"]["resourceVersion"] = Value::String((version + 1).to_string());
    let object: T = serde_json::from_value(value).unwrap();
    let held = object.meta().finalizers.as_ref().is_some_and(|finalizers| !finalizers.is_empty());
    if object.is_deleting() && !held {
        table.remove(name);
    } else {
        table.put(Arc::new(object));
    }
}

fn merge(target: &mut Value, patch: &Value) {
    let Value::Object(patch) = patch else {
        *target = patch.clone();
        return;
    };
    if !target.is_object() {
        *target = Value::Object(serde_json::Map::new());
    }
    let target = target.as_object_mut().unwrap();
    for (key, value) in patch {
        if value.is_null() {
            target.remove(key);
        } else {
            merge(target.entry(key.clone()).or_insert(Value::Null), value);
        }
    }
}
