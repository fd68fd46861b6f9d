//! Bringing a volume back to its wanted number of copies, and taking away what is too much.
//!
//! *Rules.* While the volume is attached and degraded: first a failed replica that runs again is used again, because
//! most of its data is good; only when none has come back within the wait is a new one made. One rebuild at a time per
//! volume, and a limited number at a time per receiving node. A failed replica is removed only when the volume is
//! complete without it, and of copies in sync only those beyond the wanted number. A copy on a disk that is to be emptied
//! (see [`evict`]) is treated as if the volume lacked it already, but is removed last.
//!
//! *Copies that were set aside* by an operator (`status.discarded`) are none of this: not used, not waited for, not removed.
//!
//! *When things fail.* A rebuild that fails is tried again after a growing wait, a few times; then the replica counts as
//! lost and is replaced.

use std::collections::{BTreeMap, BTreeSet};

use addax_api::volume::{CONDITION_REDUNDANT, VolumeConfig};
use addax_api::{DesiredState, InstanceState, LABEL_NODE, Replica, ReplicaAddress, ReplicaSpec, ResourceExt, name};
use jiff::Timestamp;

use crate::action::{Action, CallTarget, Object};
use crate::evict::{self, is_evicting};
use crate::hash;
use crate::observed::Tabled;
use crate::scheduler::{Request, Scheduler};
use crate::volume::{Pass, address_of, serving, state_of};
use crate::write;

/// How often a rebuild of one replica may fail before another replica is made.
const RETRIES_MAX: u32 = 5;
/// The wait after the first failed rebuild, in seconds; it doubles with each.
const BACKOFF_FIRST_SECONDS: i64 = 10;
/// The longest wait after a failed rebuild, in seconds.
const BACKOFF_MAX_SECONDS: i64 = 180;

/// Makes new copies, and removes surplus ones, of an attached volume.
pub(crate) fn step(pass: &mut Pass<'_>, config: &VolumeConfig) {
    if !serving(pass) {
        return;
    }
    let wanted = pass.new.spec.number_of_replicas as usize;
    if evict::staying(pass, config).len() >= wanted {
        pass.scheduled(Ok(()));
        return clean_up(pass, config, wanted);
    }
    drop_unused(pass, config);
    let in_use: Vec<&Replica> = pass.replicas.values().filter(|replica| is_in_use(pass, config, replica)).collect();
    if in_use.len() >= wanted {
        return pass.scheduled(Ok(()));
    }
    let used = in_use.iter().map(|replica| replica.spec.node_id.clone()).collect();
    // Nothing is waited for when only a disk is to be emptied: no copy is missing.
    let degraded = config.in_sync.len() < wanted;
    if let Some(due) = wait_for_return(pass).filter(|_| degraded) {
        pass.actions.push(Action::RequeueAt(due));
        return;
    }
    let outcome = create(pass, 1, used);
    pass.scheduled(outcome);
}

/// Whether the replica is a copy, or on its way to be one.
fn is_in_use(pass: &Pass<'_>, config: &VolumeConfig, replica: &Replica) -> bool {
    let name = replica.name_any();
    let was_used = config.names(&name) || replica.spec.last_healthy_at.is_some();
    let can_come = was_used || pass.is_node_up(&replica.spec.node_id);
    let stays = !is_evicting(pass.observed, replica) && !pass.is_discarded(&name);
    stays && can_come && replica.spec.failed_at.is_none() && !replica.is_deleting()
}

/// A new replica whose node went before it was ever used is only in the way.
fn drop_unused(pass: &mut Pass<'_>, config: &VolumeConfig) {
    let unused: Vec<String> = pass
        .replicas
        .iter()
        .filter(|(name, replica)| {
            let never_used = !config.names(name) && replica.spec.last_healthy_at.is_none();
            never_used && !pass.is_discarded(name) && !replica.is_deleting() && !pass.is_node_up(&replica.spec.node_id)
        })
        .map(|(name, _)| name.clone())
        .collect();
    unused.iter().for_each(|name| pass.delete_replica(name));
}

/// When to stop waiting for a failed replica to come back; `None` if there is none to wait for.
fn wait_for_return(pass: &Pass<'_>) -> Option<Timestamp> {
    let hope = pass.replicas.iter().any(|(name, replica)| {
        replica.spec.failed_at.is_some()
            && !pass.is_discarded(name)
            && !replica.is_deleting()
            && replica.spec.rebuild_retry_count < RETRIES_MAX
            && pass.observed.nodes.get(&replica.spec.node_id).is_some()
    });
    let due = write::after(pass.since(CONDITION_REDUNDANT), pass.settings.replica_replenishment_wait_seconds);
    (hope && due > pass.now).then_some(due)
}

/// Makes so many replicas, all or none.
///
/// # Errors
/// Why there is no place, in one sentence.
pub(crate) fn create(pass: &mut Pass<'_>, count: usize, mut used_nodes: BTreeSet<String>) -> Result<(), String> {
    let spec = &pass.new.spec;
    let size = pass.config().map_or(spec.size, |config| config.size);
    let mut scheduler = Scheduler::new(pass.observed, &pass.settings, pass.now);
    let mut places = Vec::new();
    for _ in 0..count {
        let request = Request {
            volume: pass.name,
            size,
            node_selector: &spec.node_selector,
            disk_selector: &spec.disk_selector,
            soft_anti_affinity: spec.replica_soft_anti_affinity || pass.settings.replica_soft_anti_affinity,
            used_nodes: used_nodes.clone(),
        };
        let place = scheduler.place(&request).map_err(|no_place| no_place.to_string())?;
        used_nodes.insert(place.node.clone());
        places.push(place);
    }
    let object = pass.old.reference();
    let mut index = 0u32;
    for place in places {
        // The same snapshot gives the same names, so a pass that is made twice makes nothing twice; another version of
        // the volume gives others, so a name is never used again. A pass that ended half way through has made some of
        // them: those are there already, and the rest take the names behind them.
        let replica_name = loop {
            let parts = [object.uid.as_str(), object.resource_version.as_str(), &index.to_string()];
            index += 1;
            let name = name::replica_name(pass.name, &hash::suffix(&parts, name::REPLICA_SUFFIX_LEN));
            if pass.observed.replicas.get(&name).is_none() {
                break name;
            }
        };
        let spec = ReplicaSpec {
            volume_name: pass.name.to_owned(),
            node_id: place.node.clone(),
            disk_id: place.disk,
            size,
            desire_state: DesiredState::Running,
            ..ReplicaSpec::default()
        };
        let mut replica = Replica::new(&replica_name, spec);
        replica.metadata = pass.meta(&replica_name, true);
        replica.labels_mut().insert(LABEL_NODE.to_owned(), place.node);
        pass.actions.push(Action::Create(Box::new(Object::Replica(replica))));
    }
    Ok(())
}

/// Gives the engine one more replica to rebuild, if the volume lacks one and nothing is being rebuilt.
pub(crate) fn choose_rebuild(
    pass: &mut Pass<'_>,
    config: &VolumeConfig,
    addresses: &mut BTreeMap<String, ReplicaAddress>,
) {
    let busy = addresses.keys().any(|name| !config.is_in_sync(name)) || !config.rebuilding.is_empty();
    if busy || evict::staying(pass, config).len() >= pass.new.spec.number_of_replicas as usize {
        return;
    }
    let mut candidates: Vec<(u32, bool, String)> = Vec::new();
    let mut due: Vec<Timestamp> = Vec::new();
    for (name, replica) in &pass.replicas {
        match readiness(pass, config, addresses, name, replica) {
            Readiness::Ready => {
                let fresh = replica.spec.failed_at.is_none();
                candidates.push((replica.spec.rebuild_retry_count, fresh, name.clone()));
            }
            Readiness::At(time) => due.push(time),
            Readiness::No => {}
        }
    }
    let Some((_, _, chosen)) = candidates.into_iter().min() else {
        pass.actions.extend(due.into_iter().min().map(Action::RequeueAt));
        return;
    };
    if let (Some(address), Some(replica)) = (address_of(pass, &chosen), pass.replicas.get_mut(&chosen)) {
        replica.spec.failed_at = None;
        addresses.insert(chosen, address);
    }
}

enum Readiness {
    Ready,
    At(Timestamp),
    No,
}

/// Whether the replica can be rebuilt now.
fn readiness(
    pass: &Pass<'_>,
    config: &VolumeConfig,
    addresses: &BTreeMap<String, ReplicaAddress>,
    name: &str,
    replica: &Replica,
) -> Readiness {
    let node = replica.spec.node_id.as_str();
    let held = pass.engine.and_then(|engine| {
        let listed = engine.spec.replica_addresses.contains_key(name);
        let known = engine.status.as_ref().is_some_and(|status| status.replica_modes.contains_key(name));
        (listed || known).then_some(())
    });
    let usable = !replica.is_deleting()
        && !pass.is_discarded(name)
        && !is_evicting(pass.observed, replica)
        && !config.names(name)
        && !addresses.contains_key(name)
        && held.is_none()
        && state_of(replica) == InstanceState::Running
        && pass.is_node_up(node)
        && replica.spec.rebuild_retry_count < RETRIES_MAX
        && address_of(pass, name).is_some()
        && rebuilds_on(pass, node) < pass.settings.concurrent_replica_rebuild_per_node_limit as usize;
    if !usable {
        return Readiness::No;
    }
    match not_before(pass, name, replica) {
        Some(time) if time > pass.now => Readiness::At(time),
        _ => Readiness::Ready,
    }
}

/// The time before which a replica that failed is not tried again.
fn not_before(pass: &Pass<'_>, name: &str, replica: &Replica) -> Option<Timestamp> {
    let engine_node = pass.engine.map(|engine| engine.spec.node_id.as_str())?;
    let target = CallTarget::Member(pass.name.to_owned(), name.to_owned());
    let refused = pass.observed.agent(engine_node).and_then(|agent| agent.failures.get(&target));
    let backoff = replica.spec.failed_at.as_ref().map(|failed_at| {
        let seconds = match replica.spec.rebuild_retry_count {
            0 => 0,
            retries => (BACKOFF_FIRST_SECONDS << (retries - 1).min(8)).min(BACKOFF_MAX_SECONDS),
        };
        write::after(failed_at.0, seconds)
    });
    refused.map(|failure| failure.retry_at).into_iter().chain(backoff).max()
}

/// How many replicas on the node are being rebuilt, of all volumes.
fn rebuilds_on(pass: &Pass<'_>, node: &str) -> usize {
    let is_rebuilding = |replica: &&Replica| {
        let volume = pass.observed.volumes.get(&replica.spec.volume_name);
        let config = volume.and_then(|volume| volume.status.as_ref()?.config.as_ref());
        config.is_some_and(|config| config.rebuilding.contains(&replica.name_any()))
    };
    pass.observed.replicas.on_node(node).filter(is_rebuilding).count()
}

/// Removes what a complete volume does not need: failed and unused replicas, then surplus copies one by one.
fn clean_up(pass: &mut Pass<'_>, config: &VolumeConfig, wanted: usize) {
    let unneeded: Vec<String> = pass
        .replicas
        .iter()
        .filter(|(name, replica)| !config.names(name) && !replica.is_deleting() && !pass.is_discarded(name))
        .map(|(name, _)| name.clone())
        .collect();
    unneeded.iter().for_each(|name| pass.delete_replica(name));
    let leaving = config.in_sync.iter().any(|name| pass.replicas.get(name).is_none_or(Tabled::is_deleting));
    if leaving || !config.rebuilding.is_empty() || config.in_sync.len() <= wanted {
        return;
    }
    // Those on disks to be emptied first, then the copies of one node, then the last by name; the one beside the engine
    // stays longest.
    let engine_node = pass.engine.map(|engine| engine.spec.node_id.clone()).unwrap_or_default();
    let node_of = |name: &str| pass.replicas.get(name).map_or("", |replica| replica.spec.node_id.as_str());
    let surplus = config.in_sync.iter().max_by_key(|name| {
        let node = node_of(name);
        let shared = config.in_sync.iter().filter(|other| node_of(other) == node).count() > 1;
        let leaves = pass.replicas.get(*name).is_some_and(|replica| is_evicting(pass.observed, replica));
        (leaves, shared, node != engine_node, (*name).clone())
    });
    if let Some(name) = surplus.cloned() {
        pass.delete_replica(&name);
    }
}
