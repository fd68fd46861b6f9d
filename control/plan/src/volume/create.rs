//! From a wish to a record: places all copies at once or none, waits until they run, and writes the first record.
//!
//! *Invariant.* The record is written only when every wanted replica reports that it was never used. A replica that was
//! used, without a record, means that the record was lost: then `recovery` holds the volume before this step is reached
//! (consistency rule 21).

use std::collections::BTreeSet;

use addax_api::replica::CONDITION_INSTANCE_READY;
use addax_api::volume::{CONDITION_INITIALISED, Robustness, VolumeConfig, VolumeState};
use addax_api::{InstanceState, Replica, ResourceExt, condition};

use jiff::Timestamp;

use super::{Pass, state_of};
use crate::action::Action;
use crate::observed::Tabled;
use crate::replenish;
use crate::write;

/// How long a new replica may be broken before another place is looked for, in seconds.
const GIVE_UP_AFTER_SECONDS: i64 = 60;

pub(super) fn step(pass: &mut Pass<'_>) {
    let status = pass.status();
    status.state = VolumeState::Creating;
    status.robustness = Robustness::Unknown;
    let due = pass.replicas.values().filter_map(give_up_at).filter(|due| *due > pass.now).min();
    pass.actions.extend(due.map(Action::RequeueAt));
    let wanted = pass.new.spec.number_of_replicas as usize;
    let present: Vec<&Replica> = pass.replicas.values().filter(|replica| !replica.is_deleting()).collect();
    let (doomed, good): (Vec<&Replica>, Vec<&Replica>) =
        present.into_iter().partition(|replica| is_doomed(pass, replica));
    let doomed: Vec<String> = doomed.into_iter().map(ResourceExt::name_any).collect();
    let good: Vec<String> = good.into_iter().map(ResourceExt::name_any).collect();
    if good.len() < wanted {
        let used: BTreeSet<String> = pass.replicas.values().map(|replica| replica.spec.node_id.clone()).collect();
        let outcome = replenish::create(pass, wanted - good.len(), used);
        if outcome.is_ok() {
            doomed.iter().for_each(|name| pass.delete_replica(name));
        }
        pass.scheduled(outcome);
        pass.set_condition(CONDITION_INITIALISED, false, "Waiting", "the copies are being made");
        return;
    }
    pass.scheduled(Ok(()));
    for surplus in &good[wanted..] {
        pass.delete_replica(surplus);
    }
    initialise(pass, &good[..wanted]);
}

/// Writes the first record if all its replicas run and are fresh.
fn initialise(pass: &mut Pass<'_>, replicas: &[String]) {
    let waiting: Vec<&str> = replicas
        .iter()
        .filter(|name| {
            let replica = &pass.replicas[*name];
            state_of(replica) != InstanceState::Running || is_fresh(replica) != Some(true)
        })
        .map(String::as_str)
        .collect();
    if !waiting.is_empty() {
        let message = format!("waiting for the copies {}", waiting.join(", "));
        pass.set_condition(CONDITION_INITIALISED, false, "Waiting", &message);
        return;
    }
    let config = VolumeConfig {
        // A volume that is made again under the same name has another uid, so nothing old compares with it.
        lineage: pass.old.uid().filter(|uid| !uid.is_empty()).unwrap_or_else(|| pass.name.to_owned()),
        epoch: 0,
        engine_instance: String::new(),
        config_number: 1,
        in_sync: replicas.to_vec(),
        rebuilding: Vec::new(),
        min_in_sync: pass.new.spec.min_in_sync,
        size: pass.new.spec.size,
        clean: true,
        snapshots: Default::default(),
    };
    let generation = pass.settings.recovery_generation;
    let status = pass.status();
    status.config = Some(config);
    status.recovery_generation = generation;
    status.state = VolumeState::Detached;
    pass.set_condition(CONDITION_INITIALISED, true, "Recorded", "");
}

fn is_fresh(replica: &Replica) -> Option<bool> {
    replica.status.as_ref().and_then(|status| status.fresh)
}

/// Whether another place should be looked for; nothing is lost, the replica was never used.
fn is_doomed(pass: &Pass<'_>, replica: &Replica) -> bool {
    if !pass.is_node_up(&replica.spec.node_id) {
        // Of a replica that this volume has not made (the objects were re-created) nobody knows what it holds before its
        // node has been asked: then its return is waited for (rule 21).
        return is_fresh(replica) == Some(true) || is_made_by(pass, replica);
    }
    give_up_at(replica).is_some_and(|due| due <= pass.now)
}

/// Whether the replica was made for just this volume object, not for an earlier one of the same name.
fn is_made_by(pass: &Pass<'_>, replica: &Replica) -> bool {
    let uid = pass.old.uid().unwrap_or_default();
    replica.owner_references().iter().any(|owner| !uid.is_empty() && owner.uid == uid)
}

/// When a broken replica is given up.
fn give_up_at(replica: &Replica) -> Option<Timestamp> {
    let status = replica.status.as_ref().filter(|status| status.current_state == InstanceState::Error)?;
    let ready = condition::get(&status.conditions, CONDITION_INSTANCE_READY)?;
    Some(write::after(ready.last_transition_time.0, GIVE_UP_AFTER_SECONDS))
}
