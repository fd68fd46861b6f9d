//! A small cluster for property tests: an API, agents with a model of the mirror, and one manager per node, all driven
//! by nothing but plans.
//!
//! The model of the mirror knows the record's rules and no more: an engine opens with a raised epoch and the members it
//! reaches, puts those it loses out of the record, rebuilds what it is given, and records a clean stop. Every change of
//! a record goes through [`World::swap`], which refuses what an arbiter refuses.
//!
//! What is checked at every step: no data is removed that a record names; no plan writes a record that is there
//! already; every member of a record has its data. What is checked at the end: with all nodes up, plans come to rest.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use addax_api::node::DiskSpec;
use addax_api::volume::{Robustness, VolumeState};
use addax_api::volume_attachment::{Ticket, TicketParameters, TicketType};
use addax_api::{InstanceState, ReplicaAddress, ResourceExt, VolumeConfig, VolumeStatus};
use jiff::{SignedDuration, Timestamp};
use proptest::prelude::*;

use crate::action::{Action, AgentCall, Kind};
use crate::build::{agent, apply, at, member, observed, setting, volume};
use crate::observed::{AgentView, CallFailure, MemberMode, NodeLease, Observed, Tabled};
use crate::related;

mod recovery;

const GIB: i64 = 1 << 30;
const NODES: [&str; 4] = ["n1", "n2", "n3", "n4"];
const LEASE_SECONDS: i64 = 12;
/// Ticks that a rebuild takes.
const REBUILD_TICKS: u64 = 3;

struct World {
    /// The API's objects, the leases, and every agent's truth.
    truth: Observed,
    up: BTreeSet<String>,
    /// Replicas with data, by node; the value tells whether it was ever promoted.
    data: BTreeMap<String, BTreeMap<String, bool>>,
    second: i64,
    /// What records that are gone said.
    lost_records: BTreeMap<String, VolumeConfig>,
    /// How many requests operators have made.
    requests: u32,
}

impl World {
    fn new() -> Self {
        let mut truth = observed().with(setting("replica-replenishment-wait-interval", "60"));
        for node in NODES {
            truth = truth.with(agent(node).disk("d", 100 * GIB));
            truth.agents.get_mut(node).unwrap().disks.get_mut("d").unwrap().uuid = format!("disk-{node}");
        }
        let mut world = Self {
            truth,
            up: NODES.iter().map(|node| (*node).to_owned()).collect(),
            data: NODES.iter().map(|node| ((*node).to_owned(), BTreeMap::new())).collect(),
            second: 0,
            lost_records: BTreeMap::new(),
            requests: 0,
        };
        world.tick();
        world
    }

    fn now(&self) -> Timestamp {
        at(self.second)
    }

    /// What the manager of the node sees: everything in the API, and the agents of the objects that it owns.
    fn seen_by(&self, node: &str) -> Observed {
        let mut seen = self.truth.clone().me(node);
        seen.this_node.default_disk = Some(("d".to_owned(), DiskSpec::file("/disks/d", 100 * GIB)));
        seen.agents.retain(|name, _| {
            let owned = self.truth.instance_managers.get(name).is_some_and(|object| object.owner() == node);
            self.up.contains(name) && owned
        });
        seen
    }

    /// One second: leases are renewed, mirrors move on, every living manager plans everything. Returns whether
    /// anything was asked or has changed.
    fn tick(&mut self) -> bool {
        self.second += 1;
        for node in &self.up {
            let lease = NodeLease { renewed_at: self.now(), duration: SignedDuration::from_secs(LEASE_SECONDS) };
            self.truth.leases.insert(node.clone(), lease);
        }
        let mut busy = self.move_mirrors();
        for node in self.up.clone() {
            busy |= self.manage(&node);
        }
        self.check();
        busy
    }

    /// One manager plans everything and carries it out; it reads its own writes.
    fn manage(&mut self, node: &str) -> bool {
        let mut busy = false;
        let mut seen = self.seen_by(node);
        for key in related::everything(&seen) {
            let actions = crate::plan(&seen, &key, self.now());
            actions.iter().for_each(|action| self.carry_out(action));
            if !actions.is_empty() {
                seen = self.seen_by(node);
            }
            busy |= actions.iter().any(|action| !matches!(action, Action::RequeueAt(_)));
        }
        busy
    }

    fn carry_out(&mut self, action: &Action) {
        if let Action::Agent { node, call } = action {
            return self.call(node, call);
        }
        if let Action::PatchStatus { object, patch } = action {
            let recorded = object.kind == Kind::Volume && self.config(&object.name).is_some();
            assert!(!recorded || patch["status"].get("config").is_none(), "a plan overwrote a record: {patch}");
        }
        let now = self.now();
        apply(&mut self.truth, action, now);
    }

    fn config(&self, volume: &str) -> Option<VolumeConfig> {
        self.truth.volumes.get(volume)?.status.as_ref()?.config.clone()
    }

    /// The arbiter: a change of the record under the rules that the CRD states.
    fn swap(&mut self, volume: &str, change: impl FnOnce(&mut VolumeConfig)) {
        let mut object = self.truth.volumes.get(volume).unwrap().clone();
        let old = self.config(volume).unwrap();
        let mut new = old.clone();
        change(&mut new);
        assert!(new.epoch >= old.epoch && !new.in_sync.is_empty());
        assert!(new.in_sync.iter().all(|name| old.names(name)));
        if (&new.in_sync, &new.rebuilding) != (&old.in_sync, &old.rebuilding) {
            new.config_number += 1;
        }
        object.status.as_mut().unwrap().config = Some(new);
        let version: u64 = object.resource_version().unwrap().parse().unwrap();
        object.metadata.resource_version = Some((version + 1).to_string());
        self.truth.volumes.put(Arc::new(object));
    }

    fn agent(&mut self, node: &str) -> &mut AgentView {
        self.truth.agents.get_mut(node).unwrap()
    }

    /// Whether an engine could connect to the replica.
    fn is_reachable(&self, replica: &str) -> bool {
        self.up.iter().any(|node| self.truth.agents[node].replicas.contains_key(replica))
    }

    fn promote(&mut self, replica: &str) {
        for node in NODES {
            if let Some(promoted) = self.data.get_mut(node).unwrap().get_mut(replica) {
                *promoted = true;
                self.agent(node).replicas.get_mut(replica).unwrap().fresh = false;
            }
        }
    }

    fn call(&mut self, node: &str, call: &AgentCall) {
        assert!(self.up.contains(node), "a call to {node}, which is down: {call:?}");
        let outcome = self.call_agent(node, call);
        let retry_at = at(self.second + 5);
        let failures = &mut self.agent(node).failures;
        match outcome {
            Ok(()) => failures.remove(&call.target()),
            Err(message) => failures.insert(call.target(), CallFailure { message: message.to_owned(), retry_at }),
        };
    }

    fn call_agent(&mut self, node: &str, call: &AgentCall) -> Result<(), &'static str> {
        match call {
            AgentCall::PutDisk { disk, wish } => {
                self.agent(node).disks.entry(disk.clone()).or_default().wish = wish.clone();
                Ok(())
            }
            AgentCall::RemoveDisk { disk } => self.remove_disk(node, disk),
            AgentCall::StartReplica { name, create, .. } => self.start_replica(node, name, *create),
            AgentCall::StopReplica { name } => {
                self.agent(node).replicas.remove(name);
                Ok(())
            }
            AgentCall::DeleteReplica { name, .. } => {
                self.check_removal(name);
                self.agent(node).replicas.remove(name);
                self.data.get_mut(node).unwrap().remove(name);
                Ok(())
            }
            AgentCall::StartEngine { volume, replicas, allowed_hosts, .. } => {
                self.open(node, volume, replicas, allowed_hosts)
            }
            AgentCall::StopEngine { volume } => {
                self.close(node, volume);
                Ok(())
            }
            AgentCall::AddReplica { volume, replica, .. } => self.add(node, volume, replica),
            AgentCall::RemoveReplica { volume, replica } => self.remove(node, volume, replica),
            AgentCall::SetAllowedHosts { volume, allowed_hosts } => {
                self.agent(node).engines.get_mut(volume).unwrap().allowed_hosts = allowed_hosts.clone();
                Ok(())
            }
            AgentCall::RecoverVolume(recovery) => self.recover(recovery),
        }
    }

    fn start_replica(&mut self, node: &str, name: &str, create: bool) -> Result<(), &'static str> {
        let data = self.data.get_mut(node).unwrap();
        if !data.contains_key(name) {
            if !create {
                return Err("no such replica");
            }
            data.insert(name.to_owned(), false);
        }
        let fresh = !data[name];
        let replica = agent(node).running_replica(name, fresh);
        let mut scratch = Observed::default().with(replica);
        let view = scratch.agents.remove(node).unwrap();
        self.agent(node).replicas.extend(view.replicas);
        Ok(())
    }

    /// Consistency rule 22.
    fn check_removal(&self, replica: &str) {
        let object = self.truth.replicas.get(replica).expect("data of an unknown replica was removed");
        let volume = self.truth.volumes.get(&object.spec.volume_name).expect("data without a record was removed");
        let status = volume.status.clone().unwrap_or_default();
        let named = status.config.as_ref().is_some_and(|config| config.names(replica));
        let aside = status.is_discarded(replica) && !crate::volume::is_purging(&status, replica);
        assert!(!aside || status.state == VolumeState::Deleting, "data of {replica} was removed, which was set aside");
        assert!(
            !named || status.state == VolumeState::Deleting,
            "data of {replica} was removed, which the record names"
        );
    }

    fn open(
        &mut self,
        node: &str,
        volume: &str,
        given: &[(String, ReplicaAddress)],
        hosts: &[String],
    ) -> Result<(), &'static str> {
        if self.agent(node).engines.contains_key(volume) {
            return Ok(());
        }
        let config = self.config(volume).expect("an engine was started without a record");
        let status = self.status(volume);
        let state = status.state;
        let aside = given.iter().find(|(name, _)| status.is_discarded(name));
        assert!(aside.is_none(), "an engine was given a copy that was set aside: {aside:?}");
        assert_ne!(state, VolumeState::Deleting, "an engine was started for a volume that is being deleted");
        let known: BTreeSet<&str> = given.iter().map(|(name, _)| name.as_str()).collect();
        let mut reached = config.in_sync.clone();
        reached.retain(|name| known.contains(name.as_str()) && self.is_reachable(name));
        if !config.clean {
            // Without write-intent bits one member is the source and the others are rebuilt.
            reached.truncate(1);
        }
        if reached.is_empty() {
            return Err("no member of the in-sync set can be reached");
        }
        let epoch = config.epoch + 1;
        let kept = reached.clone();
        self.swap(volume, |config| {
            config.epoch = epoch;
            config.engine_instance = format!("e{epoch}");
            config.in_sync = kept;
            config.rebuilding = Vec::new();
            config.clean = false;
        });
        reached.iter().for_each(|name| self.promote(name));
        let modes: Vec<(&str, MemberMode)> = known
            .into_iter()
            .map(|name| {
                (name, if reached.iter().any(|other| other == name) { MemberMode::InSync } else { MemberMode::Out })
            })
            .collect();
        let mut scratch = Observed::default().with(agent(node).running_engine(volume, epoch, &modes));
        let mut engine = scratch.agents.remove(node).unwrap().engines.remove(volume).unwrap();
        engine.allowed_hosts = hosts.to_vec();
        self.agent(node).engines.insert(volume.to_owned(), engine);
        Ok(())
    }

    fn close(&mut self, node: &str, volume: &str) {
        let Some(engine) = self.agent(node).engines.remove(volume) else {
            return;
        };
        if self.config(volume).is_some_and(|config| config.epoch == engine.epoch) {
            self.swap(volume, |config| config.clean = true);
        }
    }

    fn is_current(&self, node: &str, volume: &str) -> bool {
        let epoch = self.truth.agents[node].engines.get(volume).map(|engine| engine.epoch);
        epoch.is_some() && epoch == self.config(volume).map(|config| config.epoch)
    }

    fn add(&mut self, node: &str, volume: &str, replica: &str) -> Result<(), &'static str> {
        if !self.is_current(node, volume) {
            return Err("a newer epoch exists");
        }
        if !self.is_reachable(replica) {
            return Err("the replica cannot be reached");
        }
        assert!(!self.status(volume).is_discarded(replica), "{replica} was set aside, and is rebuilt");
        self.promote(replica);
        // A rebuilding replica is no way into the in-sync set for one that the record does not know: it goes in here.
        let mut object = self.truth.volumes.get(volume).unwrap().clone();
        let config = object.status.as_mut().unwrap().config.as_mut().unwrap();
        config.rebuilding.push(replica.to_owned());
        config.config_number += 1;
        let version: u64 = object.resource_version().unwrap().parse().unwrap();
        object.metadata.resource_version = Some((version + 1).to_string());
        self.truth.volumes.put(Arc::new(object));
        let mut entry = member(MemberMode::Rebuilding);
        entry.total_bytes = REBUILD_TICKS;
        self.agent(node).engines.get_mut(volume).unwrap().replicas.insert(replica.to_owned(), entry);
        Ok(())
    }

    fn remove(&mut self, node: &str, volume: &str, replica: &str) -> Result<(), &'static str> {
        let config = self.config(volume).unwrap();
        if self.is_current(node, volume) && config.names(replica) {
            assert!(config.in_sync != [replica], "a plan took the last copy out of the record");
            self.swap(volume, |config| put_out(config, replica));
        }
        self.agent(node).engines.get_mut(volume).unwrap().replicas.remove(replica);
        Ok(())
    }

    /// One step of every engine: losses, rebuilds, joins. Returns whether anything moved.
    fn move_mirrors(&mut self) -> bool {
        let mut moved = false;
        for node in self.up.clone() {
            let volumes: Vec<String> = self.truth.agents[&node].engines.keys().cloned().collect();
            for volume in volumes.iter().filter(|volume| self.is_current(&node, volume)).cloned().collect::<Vec<_>>() {
                let members: Vec<String> = self.truth.agents[&node].engines[&volume].replicas.keys().cloned().collect();
                for replica in members {
                    moved |= self.move_member(&node, &volume, &replica);
                }
            }
        }
        moved
    }

    fn move_member(&mut self, node: &str, volume: &str, replica: &str) -> bool {
        let reachable = self.is_reachable(replica);
        let config = self.config(volume).unwrap();
        let mut entry = self.truth.agents[node].engines[volume].replicas[replica].clone();
        let before = entry.clone();
        match entry.mode {
            // The last one cannot leave: the volume waits for it.
            MemberMode::InSync if !reachable && config.in_sync.len() > 1 => {
                self.swap(volume, |config| put_out(config, replica));
                entry.mode = MemberMode::Out;
            }
            MemberMode::Rebuilding if !reachable => {
                self.swap(volume, |config| put_out(config, replica));
                entry.mode = MemberMode::Out;
            }
            MemberMode::Rebuilding if entry.copied_bytes < entry.total_bytes => entry.copied_bytes += 1,
            MemberMode::Rebuilding => {
                self.swap(volume, |config| {
                    config.rebuilding.retain(|name| name != replica);
                    config.in_sync.push(replica.to_owned());
                });
                entry.mode = MemberMode::InSync;
            }
            _ => {}
        }
        if entry.mode != before.mode {
            entry.changed_at = self.now();
        }
        let moved = entry != before;
        self.agent(node).engines.get_mut(volume).unwrap().replicas.insert(replica.to_owned(), entry);
        moved
    }

    /// Every member of a record has its data, as long as its volume is not being deleted.
    fn check(&self) {
        for volume in self.truth.volumes.iter() {
            let status = volume.status.clone().unwrap_or_default();
            let Some(config) = status.config.filter(|_| status.state != VolumeState::Deleting) else {
                continue;
            };
            for name in &config.in_sync {
                assert!(self.data.values().any(|data| data.contains_key(name)), "{name} is in sync without data");
            }
        }
    }

    fn remove_disk(&mut self, node: &str, disk: &str) -> Result<(), &'static str> {
        if !self.data[node].is_empty() {
            return Err("replicas are on it");
        }
        self.agent(node).disks.remove(disk);
        Ok(())
    }

    // What happens to the cluster.

    fn evict(&mut self, node: &str, evict: bool) {
        let mut object = self.truth.nodes.get(node).unwrap().clone();
        let disk = object.spec.disks.get_mut("d").unwrap();
        (disk.allow_scheduling, disk.eviction_requested) = (!evict, evict);
        self.truth.nodes.put(Arc::new(object));
    }

    fn power_off(&mut self, node: &str) {
        self.up.remove(node);
        let agent = self.agent(node);
        agent.replicas.clear();
        agent.engines.clear();
        agent.failures.clear();
    }

    fn power_on(&mut self, node: &str) {
        self.up.insert(node.to_owned());
    }

    fn want(&mut self, name: &str, node: Option<&str>) {
        let Some(object) = self.truth.attachments.get(name) else {
            return;
        };
        let mut object = object.clone();
        object.spec.tickets.clear();
        if let Some(node) = node {
            let ticket =
                Ticket { type_: TicketType::Api, node_id: node.to_owned(), parameters: TicketParameters::default() };
            object.spec.tickets.insert("cli".to_owned(), ticket);
        }
        self.truth.attachments.put(Arc::new(object));
    }

    fn delete(&mut self, kind: Kind, name: &str) {
        let object = match kind {
            Kind::Volume => self.truth.volumes.get(name).map(Tabled::reference),
            Kind::Replica => self.truth.replicas.get(name).map(Tabled::reference),
            Kind::Engine => self.truth.engines.get(name).map(Tabled::reference),
            _ => None,
        };
        if let Some(object) = object {
            apply(&mut self.truth, &Action::Delete { object }, at(self.second));
        }
    }

    fn resize_set(&mut self, name: &str, count: u32) {
        if let Some(object) = self.truth.volumes.get(name) {
            let mut object = object.clone();
            object.spec.number_of_replicas = count;
            self.truth.volumes.put(Arc::new(object));
        }
    }

    /// Ticks until nothing moves for a while, with jumps over the waits. Fails if that does not come.
    fn settle(&mut self) {
        let mut quiet = 0;
        for _ in 0..400 {
            quiet = if self.tick() { 0 } else { quiet + 1 };
            if quiet == 5 {
                return;
            }
            if quiet > 0 {
                self.second += 60;
                for lease in self.up.clone() {
                    self.truth.leases.get_mut(&lease).unwrap().renewed_at = at(self.second);
                }
            }
        }
        let seen = self.seen_by("n1");
        let asked: Vec<_> = NODES
            .iter()
            .flat_map(|node| related::everything(&seen).into_iter().map(move |key| (node, key)))
            .map(|(node, key)| (node, crate::plan(&self.seen_by(node), &key, self.now())))
            .filter(|(_, actions)| !actions.is_empty())
            .collect();
        panic!("the plans do not come to rest: {asked:#?}");
    }

    fn status(&self, name: &str) -> VolumeStatus {
        self.truth.volumes.get(name).unwrap().status.clone().unwrap_or_default()
    }
}

fn put_out(config: &mut VolumeConfig, replica: &str) {
    config.in_sync.retain(|name| name != replica);
    config.rebuilding.retain(|name| name != replica);
}

fn world_with_volume() -> World {
    let mut world = World::new();
    world.settle();
    world.truth = world.truth.clone().with(volume("v"));
    world.settle();
    world
}

#[test]
fn a_volume_lives_its_life() {
    let mut world = world_with_volume();
    assert_eq!(world.status("v").state, VolumeState::Detached);
    assert_eq!(world.truth.replicas.len(), 3);
    world.want("v", Some("n2"));
    world.settle();
    let status = world.status("v");
    assert_eq!((status.state, status.robustness), (VolumeState::Attached, Robustness::Healthy));
    assert_eq!((status.current_node_id.as_str(), status.owner_id.as_str()), ("n2", "n2"));
    world.want("v", Some("n4"));
    world.settle();
    assert_eq!(world.status("v").current_node_id, "n4");
    assert_eq!(world.status("v").config.unwrap().epoch, 2);
    world.want("v", None);
    world.settle();
    assert_eq!(world.status("v").state, VolumeState::Detached);
    assert!(world.status("v").config.unwrap().clean);
    world.delete(Kind::Volume, "v");
    world.settle();
    assert!(world.truth.volumes.is_empty() && world.truth.replicas.is_empty() && world.truth.engines.is_empty());
    assert!(world.data.values().all(BTreeMap::is_empty));
}

#[test]
fn a_lost_node_is_taken_over_and_its_copy_replaced() {
    let mut world = world_with_volume();
    world.want("v", Some("n1"));
    world.settle();
    let config = world.status("v").config.unwrap();
    let other = config.in_sync.iter().find(|name| world.truth.replicas.get(name).unwrap().spec.node_id != "n1");
    let lost = other.unwrap().clone();
    let node = world.truth.replicas.get(&lost).unwrap().spec.node_id.clone();
    world.power_off(&node);
    world.settle();
    let status = world.status("v");
    assert_eq!((status.state, status.robustness), (VolumeState::Attached, Robustness::Healthy));
    assert!(!status.config.unwrap().names(&lost));
    // Its object waits for the node; its data goes when the node is back.
    assert!(world.truth.replicas.get(&lost).unwrap().is_deleting());
    assert_ne!(world.truth.nodes.get(&node).unwrap().owner(), node);
    world.power_on(&node);
    world.settle();
    assert_eq!(world.truth.replicas.len(), 3);
    assert!(world.data[&node].is_empty());
    assert_eq!(world.truth.nodes.get(&node).unwrap().owner(), node);
}

#[test]
fn a_short_absence_costs_no_new_replica() {
    let mut world = world_with_volume();
    world.want("v", Some("n1"));
    world.settle();
    let before: BTreeSet<String> = world.truth.replicas.names().map(str::to_owned).collect();
    let lost = world.status("v").config.unwrap().in_sync.into_iter();
    let node = lost
        .map(|name| world.truth.replicas.get(&name).unwrap().spec.node_id.clone())
        .find(|node| node != "n1")
        .unwrap();
    world.power_off(&node);
    for _ in 0..20 {
        world.tick();
    }
    assert_eq!(world.status("v").robustness, Robustness::Degraded);
    world.power_on(&node);
    world.settle();
    assert_eq!(world.status("v").robustness, Robustness::Healthy);
    assert_eq!(world.truth.replicas.names().map(str::to_owned).collect::<BTreeSet<_>>(), before);
}

#[test]
fn after_all_power_was_lost_the_volume_comes_back_where_it_was() {
    let mut world = world_with_volume();
    world.want("v", Some("n1"));
    world.settle();
    NODES.iter().for_each(|node| world.power_off(node));
    world.second += 600;
    NODES.iter().for_each(|node| world.power_on(node));
    world.settle();
    let status = world.status("v");
    assert_eq!((status.state, status.robustness), (VolumeState::Attached, Robustness::Healthy));
    assert_eq!(status.current_node_id, "n1");
    assert_eq!(status.config.unwrap().epoch, 2);
}

#[test]
fn a_disk_is_emptied_while_the_volume_is_attached_and_while_it_is_not() {
    for attached in [true, false] {
        let mut world = world_with_volume();
        world.want("v", attached.then_some("n1"));
        world.settle();
        let full = |world: &World| NODES.into_iter().find(|node| *node != "n1" && !world.data[*node].is_empty());
        let node = full(&world).unwrap();
        let empty = NODES.into_iter().find(|node| world.data[*node].is_empty()).unwrap();
        world.evict(node, true);
        // Never fewer copies in sync than wanted.
        for _ in 0..40 {
            world.tick();
            assert!(world.status("v").config.unwrap().in_sync.len() >= 3);
        }
        world.settle();
        assert!(world.data[node].is_empty() && !world.data[empty].is_empty(), "attached {attached}");
        let status = world.status("v");
        assert_eq!(status.config.unwrap().in_sync.len(), 3);
        assert_eq!(status.state, if attached { VolumeState::Attached } else { VolumeState::Detached });
        assert!(!world.truth.attachments.get("v").unwrap().spec.tickets.contains_key(crate::evict::TICKET));
    }
}

#[test]
fn nobody_waits_for_an_eviction_of_a_detached_volume() {
    let mut world = world_with_volume();
    let node = NODES.into_iter().find(|node| !world.data[*node].is_empty()).unwrap();
    world.evict(node, true);
    while world.status("v").state != VolumeState::Attached {
        world.tick();
    }
    let elsewhere = NODES.into_iter().find(|node| *node != world.status("v").current_node_id).unwrap();
    let mut object = world.truth.attachments.get("v").unwrap().clone();
    let ticket =
        Ticket { type_: TicketType::Api, node_id: elsewhere.to_owned(), parameters: TicketParameters::default() };
    object.spec.tickets.insert("cli".to_owned(), ticket);
    world.truth.attachments.put(Arc::new(object));
    world.settle();
    assert_eq!(world.status("v").current_node_id, elsewhere);
    assert!(world.data[node].is_empty());
}

#[derive(Clone, Debug)]
enum Happening {
    PowerOff(usize),
    PowerOn(usize),
    Want(Option<usize>),
    DeleteReplica(usize),
    DeleteEngine,
    Replicas(u32),
    Evict(usize, bool),
    Ticks(u32),
    Wait(i64),
}

fn happening() -> impl Strategy<Value = Happening> {
    prop_oneof![
        2 => (0..NODES.len()).prop_map(Happening::PowerOff),
        3 => (0..NODES.len()).prop_map(Happening::PowerOn),
        3 => proptest::option::of(0..NODES.len()).prop_map(Happening::Want),
        1 => (0..8_usize).prop_map(Happening::DeleteReplica),
        1 => Just(Happening::DeleteEngine),
        1 => (1..4_u32).prop_map(Happening::Replicas),
        2 => (0..NODES.len(), any::<bool>()).prop_map(|(node, evict)| Happening::Evict(node, evict)),
        5 => (1..12_u32).prop_map(Happening::Ticks),
        1 => (10..90_i64).prop_map(Happening::Wait),
    ]
}

fn happen(world: &mut World, happening: &Happening) {
    match happening {
        Happening::PowerOff(node) => world.power_off(NODES[*node]),
        Happening::PowerOn(node) => world.power_on(NODES[*node]),
        Happening::Want(node) => world.want("v", node.map(|node| NODES[node])),
        Happening::DeleteReplica(index) => {
            let name = world.truth.replicas.names().nth(*index).map(str::to_owned);
            name.iter().for_each(|name| world.delete(Kind::Replica, name));
        }
        Happening::DeleteEngine => world.delete(Kind::Engine, "v-e"),
        Happening::Replicas(count) => world.resize_set("v", *count),
        Happening::Evict(node, evict) => world.evict(NODES[*node], *evict),
        Happening::Ticks(count) => (0..*count).for_each(|_| {
            world.tick();
        }),
        Happening::Wait(seconds) => world.second += seconds,
    }
}

proptest! {
    #![proptest_config(ProptestConfig { max_shrink_iters: 200, ..ProptestConfig::with_cases(24) })]

    /// Whatever happens, no copy is lost that the record names (checked at every step), and once all nodes are up the
    /// plans come to rest with the volume as it is wanted.
    #[test]
    fn plans_come_to_rest_and_lose_nothing(happenings in proptest::collection::vec(happening(), 1..25)) {
        let mut world = world_with_volume();
        for happening in &happenings {
            happen(&mut world, happening);
        }
        for node in NODES {
            world.power_on(node);
            world.evict(node, false);
        }
        world.settle();
        world.want("v", Some("n1"));
        world.settle();
        let status = world.status("v");
        prop_assert_eq!(status.state, VolumeState::Attached, "{:?}", status);
        prop_assert_eq!(status.robustness, Robustness::Healthy, "{:?}", status);
        let wanted = world.truth.volumes.get("v").unwrap().spec.number_of_replicas as usize;
        prop_assert_eq!(status.config.unwrap().in_sync.len(), wanted);
        prop_assert_eq!(world.truth.replicas.len(), wanted);
        let kept: usize = world.data.values().map(BTreeMap::len).sum();
        prop_assert_eq!(kept, wanted);
        let running = world.truth.replicas.iter().all(|replica| {
            replica.status.as_ref().is_some_and(|status| status.current_state == InstanceState::Running)
        });
        prop_assert!(running);
    }
}
