//! Recovery in the small cluster: the agent's part as a model, an operator, and what must never happen.
//!
//! The model knows the rules of the agent: a forced open needs a copy that can be reached and no member that can; a record is
//! right, or rebuilt, only when every known copy can be reached but those that the operator gives up. What a lost record said
//! is remembered here, as the copies' superblocks would.

use addax_api::recovery::{
    DiscardedReplica, RecordSummary, RecoveryAccount, RecoveryAction, RecoveryOutcome, RecoveryRequest, append, find,
};
use addax_api::volume::CONDITION_RECOVERY_HOLD;
use addax_api::{Setting, Time, Volume, condition};

use super::*;
use crate::action::Recovery;

impl World {
    /// The agent's part.
    pub(super) fn recover(&mut self, recovery: &Recovery) -> Result<(), &'static str> {
        let volume = recovery.volume.as_str();
        assert!(self.truth.engine_of(volume).is_none(), "a record is replaced while there is an engine: {recovery:?}");
        let status = self.status(volume);
        if find(&status.recoveries, &recovery.id).is_some() {
            return Ok(());
        }
        let used = |name: &String| self.data.values().any(|data| data.get(name) == Some(&true));
        let reachable = |name: &String| self.is_reachable(name) && used(name);
        let known: Vec<String> = recovery.replicas.iter().map(|(name, _)| name.clone()).collect();
        let lineage = format!("l-{}", recovery.id);
        let (next, discarded) = match (recovery.action, &status.config) {
            (RecoveryAction::ForceOpen, Some(config)) => {
                if config.in_sync.iter().any(reachable) {
                    return Err("a member can be reached");
                }
                if !reachable(&recovery.replica) {
                    return Err("the replica cannot be reached");
                }
                let others = known.iter().filter(|name| **name != recovery.replica && used(name)).cloned().collect();
                let next = VolumeConfig {
                    lineage,
                    in_sync: vec![recovery.replica.clone()],
                    rebuilding: Vec::new(),
                    clean: false,
                    epoch: config.epoch + 1,
                    config_number: config.config_number + 1,
                    engine_instance: recovery.id.clone(),
                    ..config.clone()
                };
                (next, others)
            }
            (RecoveryAction::Recover, present) => {
                let counts = |name: &&String| !status.is_discarded(name) && !recovery.lost.contains(name);
                if known.iter().filter(counts).any(|name| !self.is_reachable(name)) {
                    return Err("not all copies can be read");
                }
                let Some(truth) = present.clone().or_else(|| self.lost_records.remove(volume)) else {
                    return Err("no copy has data");
                };
                let mut next = VolumeConfig { epoch: truth.epoch + 1, engine_instance: recovery.id.clone(), ..truth };
                if present.is_none() {
                    next.in_sync.retain(|name| !recovery.lost.contains(name) && used(name));
                    next.rebuilding.clear();
                    next.lineage = lineage;
                    next.config_number += 1;
                }
                if next.in_sync.is_empty() {
                    return Err("no member has its data");
                }
                let lost = recovery.lost.iter().filter(|name| !next.names(name)).cloned().collect();
                (next, lost)
            }
            _ => return Err("no record"),
        };
        self.conclude(recovery, status.config.as_ref(), next, discarded);
        Ok(())
    }

    fn conclude(&mut self, recovery: &Recovery, from: Option<&VolumeConfig>, next: VolumeConfig, aside: Vec<String>) {
        let now = self.now();
        self.change(&recovery.volume, |object| {
            let status = object.status.get_or_insert_default();
            status.discarded.retain(|old| !next.names(&old.replica));
            for replica in &aside {
                if status.is_discarded(replica) {
                    continue;
                }
                let (replica, by) = (replica.clone(), recovery.id.clone());
                status.discarded.push(DiscardedReplica { replica, at: Time(now), by, purging: false });
            }
            let account = RecoveryAccount {
                id: recovery.id.clone(),
                action: recovery.action,
                outcome: RecoveryOutcome::Done,
                message: "done".to_owned(),
                requested_by: recovery.requested_by.clone(),
                at: Time(now),
                from: from.map(RecordSummary::from),
                to: Some(RecordSummary::from(&next)),
                discarded: aside,
                told: false,
            };
            append(&mut status.recoveries, account);
            status.recovery_generation = status.recovery_generation.max(recovery.generation);
            status.record_in_doubt = false;
            status.config = Some(next);
        });
    }

    fn change(&mut self, volume: &str, change: impl FnOnce(&mut Volume)) {
        let mut object = self.truth.volumes.get(volume).unwrap().clone();
        change(&mut object);
        let version: u64 = object.resource_version().unwrap().parse().unwrap();
        object.metadata.resource_version = Some((version + 1).to_string());
        self.truth.volumes.put(Arc::new(object));
    }

    /// An operator asks.
    fn ask(&mut self, action: RecoveryAction, replica: &str, lost: &[String]) -> String {
        self.requests += 1;
        let id = format!("r{}", self.requests);
        let request = RecoveryRequest {
            id: id.clone(),
            action,
            replica: replica.to_owned(),
            lost: lost.to_vec(),
            confirm: "v".to_owned(),
            requested_by: "test".to_owned(),
            not_after: Time(at(self.second + 60)),
        };
        self.change("v", |object| object.spec.recovery = Some(request));
        id
    }

    /// Somebody removes the record.
    fn lose_record(&mut self) {
        let idle = self.truth.engine_of("v").is_none() && self.truth.agents.values().all(|a| a.engines.is_empty());
        let status = self.status("v");
        if let Some(config) = status.config.filter(|_| idle && status.discarded.is_empty()) {
            self.lost_records.insert("v".to_owned(), config);
            self.change("v", |object| object.status = None);
        }
    }

    fn raise_generation(&mut self) {
        let name = addax_api::setting::RECOVERY_GENERATION;
        let now = self.truth.settings_in_force().recovery_generation;
        let object: Option<Setting> = self.truth.settings.get(name).cloned();
        if let Some(mut object) = object {
            object.spec.value = (now + 1).to_string();
            self.truth.settings.put(Arc::new(object));
        }
    }

    fn is_held(&self) -> bool {
        condition::is_true(&self.status("v").conditions, CONDITION_RECOVERY_HOLD)
    }

    fn ticks(&mut self, count: u32) {
        for _ in 0..count {
            self.tick();
        }
    }

    fn names(&self) -> Vec<String> {
        self.truth.replicas.names().map(str::to_owned).collect()
    }

    fn node_of(&self, replica: &str) -> String {
        self.truth.replicas.get(replica).unwrap().spec.node_id.clone()
    }

    fn account(&self, id: &str) -> RecoveryAccount {
        find(&self.status("v").recoveries, id).cloned().unwrap_or_else(|| panic!("no account of {id}"))
    }
}

/// A volume with one copy that missed what the others have, and the nodes of the others down. The stale copy's name.
fn stale_alone() -> (World, String) {
    let mut world = world_with_volume();
    world.want("v", Some("n1"));
    world.settle();
    let copies = world.names();
    let stale = copies.iter().find(|name| world.node_of(name) != "n1").unwrap().clone();
    let node = world.node_of(&stale);
    world.power_off(&node);
    world.ticks(20);
    assert!(!world.status("v").config.unwrap().names(&stale));
    world.want("v", None);
    world.ticks(10);
    let others: BTreeSet<String> = copies.iter().map(|name| world.node_of(name)).collect();
    others.iter().filter(|other| **other != node).for_each(|other| world.power_off(other));
    world.power_on(&node);
    world.settle();
    (world, stale)
}

#[test]
fn a_stale_copy_is_forced_and_the_others_are_kept_until_they_are_purged() {
    let (mut world, stale) = stale_alone();
    let node = world.node_of(&stale);
    world.want("v", Some(&node));
    world.settle();
    assert_eq!(world.status("v").robustness, Robustness::Faulted);
    let before = world.status("v").config.unwrap();
    let id = world.ask(RecoveryAction::ForceOpen, &stale, &[]);
    world.settle();
    assert_eq!(world.account(&id).outcome, RecoveryOutcome::Done);
    let status = world.status("v");
    assert_eq!(status.state, VolumeState::Attached);
    let config = status.config.clone().unwrap();
    assert!(config.is_in_sync(&stale) && config.lineage != before.lineage);
    assert_eq!(status.discarded.len(), 2);
    for node in NODES {
        world.power_on(node);
    }
    world.settle();
    // Complete again with new copies; those that were set aside are there, and nobody uses them.
    let status = world.status("v");
    assert_eq!(status.config.as_ref().unwrap().in_sync.len(), 3);
    for aside in &status.discarded {
        assert!(world.data.values().any(|data| data.contains_key(&aside.replica)));
        assert!(!status.config.as_ref().unwrap().names(&aside.replica));
    }
    let (one, other) = (status.discarded[0].replica.clone(), status.discarded[1].replica.clone());
    world.delete(Kind::Replica, &other);
    world.settle();
    assert!(world.data.values().any(|data| data.contains_key(&other)), "deleting its object purges nothing");
    let wrong = world.ask(RecoveryAction::Purge, &stale, &[]);
    world.settle();
    let why = world.account(&wrong);
    assert_eq!(why.outcome, RecoveryOutcome::Refused);
    assert!(why.message.contains(&stale) && why.message.contains(&one), "{}", why.message);
    world.ask(RecoveryAction::Purge, &one, &[]);
    world.settle();
    assert!(!world.data.values().any(|data| data.contains_key(&one)));
    assert_eq!(world.status("v").discarded.len(), 1);
    assert_eq!(world.status("v").state, VolumeState::Attached);
}

#[test]
fn force_is_refused_while_it_is_not_needed_or_the_volume_is_attached_and_stays_refused() {
    let mut world = world_with_volume();
    let any = world.names()[0].clone();
    let stranger = world.ask(RecoveryAction::ForceOpen, "x", &[]);
    world.settle();
    assert!(world.account(&stranger).message.contains("replica is \"x\""));
    world.want("v", Some("n1"));
    world.settle();
    let attached = world.ask(RecoveryAction::ForceOpen, &any, &[]);
    world.settle();
    assert!(world.account(&attached).message.contains("node n1"), "{}", world.account(&attached).message);
    world.want("v", None);
    world.settle();
    let before = world.status("v").config;
    let needless = world.ask(RecoveryAction::ForceOpen, &any, &[]);
    world.settle();
    assert!(world.account(&needless).message.contains("can be reached"));
    // What was refused once does not happen when it becomes possible.
    let node = world.node_of(&any);
    NODES.iter().filter(|other| **other != node).for_each(|other| world.power_off(other));
    world.settle();
    assert_eq!(world.status("v").config, before);
    assert_eq!(world.account(&needless).outcome, RecoveryOutcome::Refused);
}

#[test]
fn an_old_request_is_not_carried_out() {
    let (mut world, stale) = stale_alone();
    let before = world.status("v").config;
    let id = world.ask(RecoveryAction::ForceOpen, &stale, &[]);
    world.second += 100;
    world.settle();
    assert_eq!(world.account(&id).outcome, RecoveryOutcome::Refused);
    assert!(world.account(&id).message.contains("notAfter"));
    assert_eq!(world.status("v").config, before);
}

#[test]
fn without_its_record_the_volume_is_held_until_an_operator_recovers_it() {
    let mut world = world_with_volume();
    world.want("v", Some("n1"));
    world.settle();
    world.want("v", None);
    world.settle();
    let before = world.status("v").config.unwrap();
    world.lose_record();
    world.want("v", Some("n1"));
    world.settle();
    assert!(world.is_held() && world.truth.engines.is_empty());
    let away = world.names().into_iter().find(|name| world.node_of(name) != "n1").unwrap();
    let node = world.node_of(&away);
    world.power_off(&node);
    let refused = world.ask(RecoveryAction::Recover, "", &[]);
    world.settle();
    assert_eq!(world.account(&refused).outcome, RecoveryOutcome::Refused);
    let lost = world.ask(RecoveryAction::Recover, "", std::slice::from_ref(&away));
    world.settle();
    assert_eq!(world.account(&lost).outcome, RecoveryOutcome::Done, "{:?}", world.account(&lost));
    let status = world.status("v");
    assert_eq!(status.state, VolumeState::Attached);
    assert!(!world.is_held() && status.is_discarded(&away));
    assert!(status.config.unwrap().in_sync.iter().any(|name| before.in_sync.contains(name)));
}

#[test]
fn a_restored_cluster_holds_every_volume_until_all_copies_were_read() {
    let mut world = world_with_volume();
    world.want("v", Some("n1"));
    world.settle();
    let away = world.names().into_iter().find(|name| world.node_of(name) != "n1").unwrap();
    let node = world.node_of(&away);
    world.want("v", None);
    world.settle();
    world.power_off(&node);
    world.raise_generation();
    world.want("v", Some("n1"));
    for _ in 0..60 {
        world.tick();
        assert!(world.truth.engines.is_empty(), "opened before all copies were read");
    }
    assert!(world.is_held());
    let conditions = world.status("v").conditions;
    let hold = condition::get(&conditions, CONDITION_RECOVERY_HOLD).unwrap();
    assert!(hold.message.contains("not all copies can be read"), "{}", hold.message);
    assert!(hold.message.contains("addax volume recover v --lost"), "{}", hold.message);
    world.power_on(&node);
    world.settle();
    assert!(!world.is_held());
    assert_eq!(world.status("v").state, VolumeState::Attached);
    // One that is made from now on was never in doubt.
    world.truth = world.truth.clone().with(volume("w"));
    world.settle();
    assert_eq!(world.status("w").state, VolumeState::Detached);
}

#[derive(Clone, Debug)]
enum Trouble {
    Usual(Happening),
    Force(usize),
    Recover(Option<usize>),
    Purge(usize),
    LoseRecord,
    Restore,
}

fn trouble() -> impl Strategy<Value = Trouble> {
    prop_oneof![
        6 => happening().prop_map(Trouble::Usual),
        2 => (0..8_usize).prop_map(Trouble::Force),
        1 => proptest::option::of(0..8_usize).prop_map(Trouble::Recover),
        1 => (0..8_usize).prop_map(Trouble::Purge),
        1 => Just(Trouble::LoseRecord),
        1 => Just(Trouble::Restore),
    ]
}

fn befall(world: &mut World, trouble: &Trouble) {
    let nth = |world: &World, index: usize| world.names().get(index).cloned();
    match trouble {
        Trouble::Usual(happening) => happen(world, happening),
        Trouble::Force(index) => {
            if let Some(name) = nth(world, *index) {
                world.ask(RecoveryAction::ForceOpen, &name, &[]);
            }
        }
        Trouble::Recover(lost) => {
            let lost: Vec<String> = lost.and_then(|index| nth(world, index)).into_iter().collect();
            world.ask(RecoveryAction::Recover, "", &lost);
        }
        Trouble::Purge(index) => {
            if let Some(name) = nth(world, *index) {
                world.ask(RecoveryAction::Purge, &name, &[]);
            }
        }
        Trouble::LoseRecord => world.lose_record(),
        Trouble::Restore => world.raise_generation(),
    }
    world.ticks(3);
}

proptest! {
    #![proptest_config(ProptestConfig { max_shrink_iters: 200, ..ProptestConfig::with_cases(24) })]

    /// Whatever befalls the cluster and whatever an operator asks for: no copy that was set aside is used or removed without
    /// being purged, no record is replaced under an engine, nothing is opened in doubt (checked at every step); and with all
    /// nodes up again an operator gets the volume back.
    #[test]
    fn an_operator_loses_nothing_that_was_not_given_up(troubles in proptest::collection::vec(trouble(), 1..20)) {
        let mut world = world_with_volume();
        for trouble in &troubles {
            befall(&mut world, trouble);
        }
        for node in NODES {
            world.power_on(node);
            world.evict(node, false);
        }
        world.want("v", None);
        world.settle();
        if world.status("v").config.is_none() && world.is_held() {
            world.ask(RecoveryAction::Recover, "", &[]);
            world.settle();
        }
        for aside in world.status("v").discarded {
            world.ask(RecoveryAction::Purge, &aside.replica, &[]);
            world.settle();
        }
        world.want("v", Some("n1"));
        world.settle();
        let status = world.status("v");
        prop_assert_eq!(status.state, VolumeState::Attached, "{:?}", status);
        prop_assert_eq!(status.robustness, Robustness::Healthy, "{:?}", status);
        prop_assert!(status.discarded.is_empty());
        let wanted = world.truth.volumes.get("v").unwrap().spec.number_of_replicas as usize;
        prop_assert_eq!(world.truth.replicas.len(), wanted);
        let kept: usize = world.data.values().map(BTreeMap::len).sum();
        prop_assert_eq!(kept, wanted);
    }
}
