//! The engine of a volume: made when the volume is to be attached, kept with the right replicas and hosts, stopped and
//! removed when it is to be detached.
//!
//! *Rules.* An engine is started when the replicas that the record calls in sync are running; those on dead nodes are
//! not waited for, and after a grace one is enough, so that a node that is slow to come back costs a moment and not a
//! rebuild. It never moves: for another node it is stopped, removed, and made again there. An engine on a dead node is
//! removed only when its volume is wanted elsewhere or nowhere.
//!
//! *Invariant.* A replica that the record names stays in the engine's list unless its own object is being deleted and
//! others in sync remain.

use std::collections::BTreeMap;

use addax_api::engine::Mode;
use addax_api::volume::{CONDITION_REPLICAS_READY, Endpoint, Frontend, VolumeConfig, VolumeState};
use addax_api::{DesiredState, Engine, EngineSpec, InstanceState, ReplicaAddress, ResourceExt, condition, name};

use super::{Pass, members, state_of};
use crate::action::{Action, Object};
use crate::observed::Tabled;
use crate::{replenish, write};

/// How long an engine's start waits for replicas that may still come, in seconds.
const REPLICAS_GRACE_SECONDS: i64 = 10;

pub(super) fn step(pass: &mut Pass<'_>, config: &VolumeConfig) {
    let wanted = pass.new.spec.node_id.clone();
    match pass.engine {
        None if wanted.is_empty() => detached(pass),
        None => start(pass, config, &wanted),
        Some(engine) if engine.is_deleting() || engine.spec.node_id != wanted => detach(pass, engine),
        Some(engine) => keep(pass, config, engine),
    }
}

fn detached(pass: &mut Pass<'_>) {
    let status = pass.status();
    status.state = VolumeState::Detached;
    status.current_node_id = String::new();
    status.endpoint = None;
    status.consistency = None;
    condition::remove(&mut status.conditions, CONDITION_REPLICAS_READY);
}

/// Stops the engine in order, then removes its object; the state changes only when the object is gone.
pub(super) fn detach(pass: &mut Pass<'_>, engine: &Engine) {
    let status = pass.status();
    status.state = VolumeState::Detaching;
    status.current_node_id = engine.spec.node_id.clone();
    status.endpoint = None;
    if engine.is_deleting() {
        return;
    }
    let told = engine.spec.desire_state == DesiredState::Stopped;
    if let Some(draft) = &mut pass.engine_new {
        draft.spec.desire_state = DesiredState::Stopped;
    }
    let state = engine.status.as_ref().map_or(InstanceState::Stopped, |status| status.current_state);
    let over = told && state == InstanceState::Stopped;
    if over || !pass.is_node_up(&engine.spec.node_id) {
        pass.engine_new = None;
        pass.actions.push(Action::Delete { object: engine.reference() });
    }
}

/// Makes the engine when its replicas are ready.
fn start(pass: &mut Pass<'_>, config: &VolumeConfig, node: &str) {
    let status = pass.status();
    status.state = VolumeState::Attaching;
    status.current_node_id = String::new();
    status.endpoint = None;
    if !pass.is_node_up(node) {
        let message = format!("node {node}, where the volume is to be attached, gives no sign of life");
        pass.set_condition(CONDITION_REPLICAS_READY, false, "NodeDown", &message);
        return;
    }
    if !replicas_ready(pass, config) {
        return;
    }
    let spec = EngineSpec {
        volume_name: pass.name.to_owned(),
        node_id: node.to_owned(),
        size: config.size,
        desire_state: DesiredState::Running,
        replica_addresses: recorded_addresses(pass, config),
        allowed_hosts: allowed_hosts(pass, node),
        uuid: pass.old.uid().unwrap_or_default(),
        image: String::new(),
    };
    let engine_name = name::engine_name(pass.name);
    let mut engine = Engine::new(&engine_name, spec);
    engine.metadata = pass.meta(&engine_name, true);
    pass.actions.push(Action::Create(Box::new(Object::Engine(engine))));
}

/// Whether to go: all replicas in sync run, or those that do not are not worth waiting for.
fn replicas_ready(pass: &mut Pass<'_>, config: &VolumeConfig) -> bool {
    let (mut running, mut awaited) = (0, Vec::new());
    for replica in &config.in_sync {
        let object = pass.replicas.get(replica);
        match object.map(|object| (state_of(object), pass.is_node_up(&object.spec.node_id))) {
            Some((InstanceState::Running, true)) => running += 1,
            Some((InstanceState::Error, _) | (_, false)) | None => {}
            Some(_) => awaited.push(replica.clone()),
        }
    }
    if running > 0 && awaited.is_empty() {
        pass.set_condition(CONDITION_REPLICAS_READY, true, "Ready", "");
        return true;
    }
    let message = match (running, awaited.is_empty()) {
        (0, true) => "no copy that has every acknowledged write can be reached".to_owned(),
        _ => format!("waiting for the copies {}", awaited.join(", ")),
    };
    pass.set_condition(CONDITION_REPLICAS_READY, false, "Waiting", &message);
    let due = write::after(pass.since(CONDITION_REPLICAS_READY), REPLICAS_GRACE_SECONDS);
    if running > 0 && due > pass.now {
        pass.actions.push(Action::RequeueAt(due));
    }
    running > 0 && due <= pass.now
}

/// Keeps the engine's spec as it should be, and copies its state.
fn keep(pass: &mut Pass<'_>, config: &VolumeConfig, engine: &Engine) {
    let mut addresses = kept_addresses(pass, config, engine);
    if members::serving(pass) && !pass.old.is_deleting() {
        replenish::choose_rebuild(pass, config, &mut addresses);
    }
    let hosts = kept_hosts(pass, engine);
    if let Some(draft) = &mut pass.engine_new {
        draft.spec.desire_state = DesiredState::Running;
        draft.spec.replica_addresses = addresses;
        draft.spec.allowed_hosts = hosts;
        draft.spec.size = draft.spec.size.max(config.size);
    }
    let state = engine.status.as_ref().map_or(InstanceState::Stopped, |status| status.current_state);
    let endpoint = engine.status.as_ref().and_then(|status| status.endpoint.as_ref());
    let endpoint = endpoint.map(|address| Endpoint::new(address, &engine.spec.uuid));
    let consistency = engine.status.as_ref().and_then(|status| status.consistency);
    let was_attached = pass.state() == VolumeState::Attached;
    let ready = condition::is_true(&pass.status().conditions, CONDITION_REPLICAS_READY);
    let status = pass.status();
    status.current_node_id = engine.spec.node_id.clone();
    status.consistency = consistency.or(status.consistency);
    match state {
        InstanceState::Running => {
            status.state = VolumeState::Attached;
            status.endpoint = endpoint;
        }
        // The data plane is started again, or its node is silent: hosts wait and connect again to the same place.
        InstanceState::Starting | InstanceState::Unknown if was_attached => {}
        _ => {
            status.state = VolumeState::Attaching;
            status.endpoint = None;
        }
    }
    if !ready && state == InstanceState::Running {
        pass.set_condition(CONDITION_REPLICAS_READY, true, "Ready", "");
    }
}

/// What the engine has already and keeps: everything that the record names, and what it was given to rebuild.
fn kept_addresses(pass: &Pass<'_>, config: &VolumeConfig, engine: &Engine) -> BTreeMap<String, ReplicaAddress> {
    let mut addresses = recorded_addresses(pass, config);
    for (name, known) in &engine.spec.replica_addresses {
        let usable = pass.replicas.get(name).is_some_and(|replica| replica.spec.failed_at.is_none());
        if usable || config.names(name) {
            let address = address_of(pass, name).unwrap_or_else(|| known.clone());
            addresses.insert(name.clone(), address);
        }
    }
    addresses.retain(|name, _| !may_leave(pass, config, engine, name));
    addresses
}

/// Whether a replica whose object is being deleted may be taken out: others that are in sync, reachable and not being
/// deleted themselves must remain, as many as acknowledgements need.
fn may_leave(pass: &Pass<'_>, config: &VolumeConfig, engine: &Engine, name: &str) -> bool {
    let Some(replica) = pass.replicas.get(name) else {
        return !config.names(name);
    };
    if !replica.is_deleting() {
        return false;
    }
    let modes = engine.status.as_ref().map(|status| &status.replica_modes);
    let remaining = config.in_sync.iter().filter(|other| {
        let stays = pass.replicas.get(*other).is_some_and(|replica| !replica.is_deleting());
        let reachable = modes.and_then(|modes| modes.get(*other)).is_some_and(|mode| mode.mode == Mode::RW);
        *other != name && stays && reachable
    });
    !config.is_in_sync(name) || remaining.count() >= config.min_in_sync.max(1) as usize
}

fn recorded_addresses(pass: &Pass<'_>, config: &VolumeConfig) -> BTreeMap<String, ReplicaAddress> {
    let named = config.in_sync.iter().chain(&config.rebuilding);
    named.filter_map(|name| Some((name.clone(), address_of(pass, name)?))).collect()
}

/// Where a replica is reached, if both its own address and its agent's are known.
pub(crate) fn address_of(pass: &Pass<'_>, replica: &str) -> Option<ReplicaAddress> {
    let object = pass.replicas.get(replica)?;
    let data = object.status.as_ref()?.address.as_ref()?;
    let agent = pass.observed.agent_address(&object.spec.node_id)?;
    Some(ReplicaAddress::new(agent, data))
}

/// The hosts of an engine that goes on. One that no ticket holds any more is closed next, in order; who would be refused
/// before that could lose commands that are to wait for the next engine.
fn kept_hosts(pass: &Pass<'_>, engine: &Engine) -> Vec<String> {
    let node = engine.spec.node_id.as_str();
    let attachment = pass.observed.attachments.get(pass.name);
    let is_held = attachment.is_none_or(|found| found.spec.tickets.values().any(|ticket| ticket.node_id == node));
    if is_held { allowed_hosts(pass, node) } else { engine.spec.allowed_hosts.clone() }
}

/// The hosts of the volume itself and those of the tickets that hold it on this node.
fn allowed_hosts(pass: &Pass<'_>, node: &str) -> Vec<String> {
    if pass.new.spec.frontend == Frontend::None {
        return Vec::new();
    }
    let mut hosts = pass.new.spec.allowed_hosts.clone();
    if let Some(attachment) = pass.observed.attachments.get(pass.name) {
        for ticket in attachment.spec.tickets.values().filter(|ticket| ticket.node_id == node) {
            hosts.extend(ticket.parameters.allowed_hosts.iter().cloned());
        }
    }
    hosts.sort();
    hosts.dedup();
    hosts
}
