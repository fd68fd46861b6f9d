//! Engine: keeps the single writer of a volume running on its node, and closes it in order.
//!
//! *States.* unknown while the node is dead or its agent silent; otherwise what the agent says; stopped when the agent
//! does not know it.
//!
//! *Flow.* Running is wanted: start it, then keep its replicas and hosts as the spec has them. A replica that left the
//! spec is taken out of the volume's record by the engine; one that is new there is rebuilt. Stopped is wanted, or the
//! object is being deleted: close it, and let the object go only when the agent knows of no engine.
//!
//! *Invariants.* On a living node an engine's object outlives the engine. On a dead node the object goes at once: the
//! next engine's epoch fences the old one, which can acknowledge nothing more. A replica that the record may name is
//! taken out only if its own object says so: it has failed, or is being deleted, or is gone.
//!
//! *When things fail.* A failed call is asked again when its delay is over; what the agent said stands in the status.

use std::collections::BTreeMap;

use addax_api::condition;
use addax_api::engine::{CONDITION_INSTANCE_READY, Mode, ReplicaMode};
use addax_api::volume::Consistency;
use addax_api::{DesiredState, Engine, InstanceState, ReplicaAddress};
use jiff::Timestamp;

use crate::action::{Action, AgentCall, CallTarget};
use crate::observed::{AgentEngine, AgentMember, AgentView, CallFailure, MemberMode, Observed, Tabled};
use crate::write;

/// How long an engine that its agent calls broken is left before it is started again, in seconds.
const RESTART_AFTER_SECONDS: i64 = 5;

/// How long an engine may take from being given a replica to its name in the record, in seconds.
const JOIN_WITHIN_SECONDS: i64 = 5;

/// What is to be done for an engine now.
pub fn plan(observed: &Observed, name: &str, now: Timestamp) -> Vec<Action> {
    let Some(old) = observed.engines.get(name) else {
        return Vec::new();
    };
    let pass =
        Pass { observed, engine: old, volume: old.spec.volume_name.as_str(), node: old.spec.node_id.as_str(), now };
    let mut new = old.clone();
    pass.mirror(&mut new);
    if old.is_deleting() && pass.is_over() {
        write::release(&mut new.metadata);
    }
    let mut actions = write::patches(old, &new);
    actions.extend(pass.ask());
    actions
}

struct Pass<'a> {
    observed: &'a Observed,
    engine: &'a Engine,
    volume: &'a str,
    node: &'a str,
    now: Timestamp,
}

impl<'a> Pass<'a> {
    /// The agent of the engine's node, while both live.
    fn agent(&self) -> Option<&'a AgentView> {
        self.observed.agent(self.node).filter(|_| self.observed.is_alive(self.node, self.now))
    }

    /// The engine as the agent has it, unless it is stopped.
    fn seen(&self) -> Option<&'a AgentEngine> {
        let engine = self.agent()?.engines.get(self.volume)?;
        Some(engine).filter(|engine| engine.state != InstanceState::Stopped)
    }

    fn failure(&self, target: &CallTarget) -> Option<&'a CallFailure> {
        self.agent()?.failures.get(target)
    }

    fn call(&self, call: AgentCall) -> Action {
        Action::Agent { node: self.node.to_owned(), call }
    }

    /// Whether no engine can be running for this object any more.
    fn is_over(&self) -> bool {
        !self.observed.is_alive(self.node, self.now) || (self.agent().is_some() && self.seen().is_none())
    }

    fn is_wanted(&self) -> bool {
        self.engine.spec.desire_state == DesiredState::Running && !self.engine.is_deleting()
    }

    /// Writes what the agent says into the status.
    fn mirror(&self, new: &mut Engine) {
        let now = self.now;
        let status = new.status.get_or_insert_default();
        if self.agent().is_none() {
            status.current_state = InstanceState::Unknown;
            status.message = "the node is down, or its agent does not answer".to_owned();
            let message = status.message.as_str();
            condition::set(&mut status.conditions, CONDITION_INSTANCE_READY, false, "Unknown", message, now);
            return;
        }
        status.instance_manager_name = self.node.to_owned();
        let failure = self.failure(&CallTarget::Engine(self.volume.to_owned()));
        match self.seen() {
            Some(seen) => {
                status.current_state = seen.state;
                status.endpoint = seen.address.clone();
                status.epoch = seen.epoch;
                status.allowed_hosts = seen.allowed_hosts.clone();
                status.message = seen.message.clone();
                status.record_old = seen.record_old;
                status.consistency =
                    Some(if seen.best_effort { Consistency::BestEffort } else { Consistency::Guaranteed });
            }
            None => {
                // A start that failed is no news any more once nobody wants the engine.
                let broken = failure.is_some() && self.is_wanted();
                status.current_state = if broken { InstanceState::Error } else { InstanceState::Stopped };
                status.endpoint = None;
                status.allowed_hosts = Vec::new();
                status.consistency = None;
                status.record_old = false;
                status.message = String::new();
            }
        }
        if let Some(failure) = failure {
            status.message = failure.message.clone();
        }
        status.replica_modes = self.replica_modes();
        let running = status.current_state == InstanceState::Running;
        let reason = if running { "Running" } else { "NotRunning" };
        condition::set(&mut status.conditions, CONDITION_INSTANCE_READY, running, reason, &status.message, now);
    }

    /// The engine's view of each replica; one whose addition was refused is out, with the reason.
    fn replica_modes(&self) -> BTreeMap<String, ReplicaMode> {
        let Some(seen) = self.seen() else {
            return BTreeMap::new();
        };
        let shown = |(name, member): (&String, &AgentMember)| {
            let shown = if self.joins_until(name, member).is_some() { joining(member) } else { mode(member) };
            (name.clone(), shown)
        };
        let mut modes: BTreeMap<String, ReplicaMode> = seen.replicas.iter().map(shown).collect();
        for name in self.engine.spec.replica_addresses.keys() {
            let failure = self.failure(&self.member(name)).filter(|failure| self.now < failure.retry_at);
            if let (Some(failure), false) = (failure, modes.contains_key(name)) {
                let refused = ReplicaMode { mode: Mode::ERR, progress_percent: None, message: failure.message.clone() };
                modes.insert(name.clone(), refused);
            }
        }
        modes
    }

    /// An engine that has just been given a replica calls it out until the record names it. Until when to wait for that;
    /// `None` for a replica that is in a set, or that the engine had and lost.
    fn joins_until(&self, name: &str, member: &AgentMember) -> Option<Timestamp> {
        let before = self.engine.status.as_ref().and_then(|status| status.replica_modes.get(name));
        let is_new = before.is_none_or(|before| before.mode == Mode::WO && before.progress_percent.is_none());
        let due = write::after(member.changed_at, JOIN_WITHIN_SECONDS);
        (member.mode == MemberMode::Out && is_new && self.now < due).then_some(due)
    }

    fn member(&self, replica: &str) -> CallTarget {
        CallTarget::Member(self.volume.to_owned(), replica.to_owned())
    }

    /// The calls that bring the agent's engine to what is wanted.
    fn ask(&self) -> Vec<Action> {
        let Some(agent) = self.agent() else {
            return Vec::new();
        };
        let retry_at = agent.failures.get(&CallTarget::Engine(self.volume.to_owned())).map(|failure| failure.retry_at);
        if let Some(retry_at) = retry_at.filter(|at| self.now < *at) {
            return vec![Action::RequeueAt(retry_at)];
        }
        match (self.is_wanted(), self.seen()) {
            (false, None) => Vec::new(),
            (false, Some(seen)) if seen.state == InstanceState::Stopping => Vec::new(),
            (false, Some(_)) => vec![self.call(AgentCall::StopEngine { volume: self.volume.to_owned() })],
            (true, None) if self.engine.spec.replica_addresses.is_empty() => Vec::new(),
            (true, None) => vec![self.start()],
            (true, Some(seen)) => self.ask_running(seen),
        }
    }

    fn ask_running(&self, seen: &AgentEngine) -> Vec<Action> {
        match seen.state {
            InstanceState::Error => {
                let due = write::after(seen.changed_at, RESTART_AFTER_SECONDS);
                vec![if self.now < due { Action::RequeueAt(due) } else { self.start() }]
            }
            InstanceState::Running => {
                let mut actions = self.ask_hosts(seen);
                actions.extend(self.ask_members(seen));
                actions
            }
            _ => Vec::new(),
        }
    }

    fn start(&self) -> Action {
        let spec = &self.engine.spec;
        let replicas: Vec<(String, ReplicaAddress)> =
            spec.replica_addresses.iter().map(|(name, address)| (name.clone(), address.clone())).collect();
        self.call(AgentCall::StartEngine {
            volume: self.volume.to_owned(),
            size_bytes: spec.size,
            replicas,
            allowed_hosts: spec.allowed_hosts.clone(),
            uuid: spec.uuid.clone(),
        })
    }

    fn ask_hosts(&self, seen: &AgentEngine) -> Vec<Action> {
        let (mut wanted, mut present) = (self.engine.spec.allowed_hosts.clone(), seen.allowed_hosts.clone());
        wanted.sort();
        present.sort();
        if wanted == present {
            return Vec::new();
        }
        vec![self.call(AgentCall::SetAllowedHosts {
            volume: self.volume.to_owned(),
            allowed_hosts: self.engine.spec.allowed_hosts.clone(),
        })]
    }

    fn ask_members(&self, seen: &AgentEngine) -> Vec<Action> {
        let wanted = &self.engine.spec.replica_addresses;
        let gone = seen.replicas.iter().filter(|(name, member)| {
            !wanted.contains_key(*name) && (member.mode == MemberMode::Out || self.is_given_up(name))
        });
        let removals = gone.map(|(name, _)| {
            let call = AgentCall::RemoveReplica { volume: self.volume.to_owned(), replica: name.clone() };
            (name, call)
        });
        let new = wanted.iter().filter(|(name, _)| !seen.replicas.contains_key(*name));
        let additions = new.map(|(name, address)| {
            let call = AgentCall::AddReplica {
                volume: self.volume.to_owned(),
                replica: name.clone(),
                address: address.clone(),
            };
            (name, call)
        });
        let joins = seen.replicas.iter().filter_map(|(name, member)| self.joins_until(name, member));
        let calls = removals.chain(additions).map(|(name, call)| self.unless_failed(name, call));
        calls.chain(joins.map(Action::RequeueAt)).collect()
    }

    fn unless_failed(&self, replica: &str, call: AgentCall) -> Action {
        match self.failure(&self.member(replica)) {
            Some(failure) if self.now < failure.retry_at => Action::RequeueAt(failure.retry_at),
            _ => self.call(call),
        }
    }

    /// Whether the replica's own object says that the volume does without it.
    fn is_given_up(&self, replica: &str) -> bool {
        let object = self.observed.replicas.get(replica);
        object.is_none_or(|object| object.spec.failed_at.is_some() || object.is_deleting())
    }
}

/// A replica that the engine was given a moment ago.
fn joining(member: &AgentMember) -> ReplicaMode {
    ReplicaMode {
        mode: Mode::WO,
        progress_percent: None,
        message: if member.message.is_empty() { "being connected".to_owned() } else { member.message.clone() },
    }
}

fn mode(member: &AgentMember) -> ReplicaMode {
    let percent = member.copied_bytes.saturating_mul(100) / member.total_bytes.max(1);
    let (mode, progress_percent) = match member.mode {
        MemberMode::InSync => (Mode::RW, None),
        MemberMode::Lost => (Mode::LOST, None),
        MemberMode::Out => (Mode::ERR, None),
        MemberMode::Rebuilding => (Mode::WO, Some(u32::try_from(percent.min(100)).unwrap_or(100))),
    };
    ReplicaMode { mode, progress_percent, message: member.message.clone() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::build::{address, agent, at, calls, engine, failure, node, observed, replica};

    fn seen() -> Observed {
        observed()
            .with(node("n1"))
            .with(replica("a", "v").on("n2", "d").running())
            .with(replica("b", "v").on("n3", "d").running())
    }

    fn running(members: &[(&str, MemberMode)]) -> Observed {
        seen().with(agent("n1").running_engine("v", 3, members)).with(engine("v").on("n1").replicas(&["a", "b"]))
    }

    const BOTH: [(&str, MemberMode); 2] = [("a", MemberMode::InSync), ("b", MemberMode::InSync)];

    #[test]
    fn it_is_started_with_its_replicas_and_left_alone_when_it_runs() {
        let seen = seen().with(agent("n1")).with(engine("v").on("n1").replicas(&["a", "b"]).host("nqn.h"));
        let started = calls(&plan(&seen, "v-e", at(0)));
        assert!(matches!(&started[..], [AgentCall::StartEngine { replicas, allowed_hosts, .. }]
            if replicas.len() == 2 && allowed_hosts == &["nqn.h"]));
        let seen = running(&BOTH);
        let seen = seen.apply(&plan(&seen, "v-e", at(0)));
        let status = seen.engines.get("v-e").unwrap().status.clone().unwrap();
        assert_eq!((status.current_state, status.epoch), (InstanceState::Running, 3));
        assert_eq!(status.replica_modes["a"].mode, Mode::RW);
        assert_eq!(plan(&seen, "v-e", at(1)), []);
    }

    #[test]
    fn without_replicas_it_is_not_started() {
        let seen = seen().with(agent("n1")).with(engine("v").on("n1"));
        assert!(calls(&plan(&seen, "v-e", at(0))).is_empty());
    }

    #[test]
    fn hosts_and_members_follow_the_spec() {
        let seen = running(&[("a", MemberMode::InSync)]).with(engine("v").on("n1").replicas(&["a", "b"]).host("nqn.h"));
        assert_eq!(
            calls(&plan(&seen, "v-e", at(0))),
            [
                AgentCall::SetAllowedHosts { volume: "v".to_owned(), allowed_hosts: vec!["nqn.h".to_owned()] },
                AgentCall::AddReplica { volume: "v".to_owned(), replica: "b".to_owned(), address: address("b") },
            ]
        );
    }

    #[test]
    fn a_member_leaves_the_record_only_if_its_object_says_so() {
        let remove = AgentCall::RemoveReplica { volume: "v".to_owned(), replica: "b".to_owned() };
        let without_b = |seen: Observed| seen.with(engine("v").on("n1").replicas(&["a"]));
        // In sync, and its object is in order: an address that is missing is no reason.
        assert!(calls(&plan(&without_b(running(&BOTH)), "v-e", at(0))).is_empty());
        let leaving = without_b(running(&BOTH)).with(replica("b", "v").on("n3", "d").deleting());
        assert_eq!(calls(&plan(&leaving, "v-e", at(0))), std::slice::from_ref(&remove));
        let out = without_b(running(&[("a", MemberMode::InSync), ("b", MemberMode::Out)]));
        assert_eq!(calls(&plan(&out, "v-e", at(0))), [remove]);
    }

    #[test]
    fn a_refused_addition_shows_as_out_until_it_may_be_tried_again() {
        let target = CallTarget::Member("v".to_owned(), "b".to_owned());
        let seen = running(&[("a", MemberMode::InSync)]).with(failure("n1", target, "too small", 10));
        let actions = plan(&seen, "v-e", at(0));
        assert!(calls(&actions).is_empty() && actions.contains(&Action::RequeueAt(at(10))));
        let after = seen.apply(&actions);
        let modes = &after.engines.get("v-e").unwrap().status.as_ref().unwrap().replica_modes;
        assert_eq!((modes["b"].mode, modes["b"].message.as_str()), (Mode::ERR, "too small"));
        assert_eq!(calls(&plan(&after, "v-e", at(10))).len(), 1);
    }

    #[test]
    fn a_replica_that_was_just_given_is_not_out_before_it_could_join() {
        let seen = running(&[("a", MemberMode::InSync), ("b", MemberMode::Out)]);
        let shown = |seen: &Observed| seen.engines.get("v-e").unwrap().status.clone().unwrap().replica_modes["b"].mode;
        let actions = plan(&seen, "v-e", at(1));
        assert!(actions.contains(&Action::RequeueAt(at(5))));
        let after = seen.apply(&actions);
        assert_eq!(shown(&after), Mode::WO);
        assert_eq!(shown(&after.apply(&plan(&after, "v-e", at(4)))), Mode::WO);
        assert_eq!(shown(&after.apply(&plan(&after, "v-e", at(5)))), Mode::ERR);
        // One that was in a set before is out at once.
        let lost = seen.with(engine("v").on("n1").replicas(&["a", "b"]).modes(&[("b", Mode::RW)]));
        assert_eq!(shown(&lost.apply(&plan(&lost, "v-e", at(1)))), Mode::ERR);
    }

    #[test]
    fn a_broken_engine_is_started_again_after_a_while() {
        let mut seen = running(&BOTH);
        let broken = seen.agents.get_mut("n1").unwrap().engines.get_mut("v").unwrap();
        broken.state = InstanceState::Error;
        broken.changed_at = at(100);
        assert!(plan(&seen, "v-e", at(101)).contains(&Action::RequeueAt(at(105))));
        assert!(matches!(&calls(&plan(&seen, "v-e", at(105)))[..], [AgentCall::StartEngine { .. }]));
    }

    #[test]
    fn a_start_that_failed_does_not_keep_an_unwanted_engine_from_being_stopped() {
        let target = CallTarget::Engine("v".to_owned());
        let failed = |wish| seen().with(agent("n1")).with(wish).with(failure("n1", target.clone(), "no member", 10));
        let state = |seen: &Observed| {
            let after = seen.apply(&plan(seen, "v-e", at(0)));
            after.engines.get("v-e").unwrap().status.as_ref().unwrap().current_state
        };
        let wanted = failed(engine("v").on("n1").replicas(&["a"]));
        assert_eq!(state(&wanted), InstanceState::Error);
        let unwanted = failed(engine("v").on("n1").replicas(&["a"]).stop_wanted());
        assert_eq!(state(&unwanted), InstanceState::Stopped);
    }

    #[test]
    fn the_object_outlives_the_engine_on_a_living_node_only() {
        let releases =
            |seen: &Observed| plan(seen, "v-e", at(0)).iter().any(|action| matches!(action, Action::PatchSpec { .. }));
        let leaving = || engine("v").on("n1").replicas(&["a"]).deleting();
        let up = running(&BOTH).with(leaving());
        assert_eq!(calls(&plan(&up, "v-e", at(0))), [AgentCall::StopEngine { volume: "v".to_owned() }]);
        assert!(!releases(&up));
        let stopped = seen().with(agent("n1")).with(leaving());
        assert!(releases(&stopped) && calls(&plan(&stopped, "v-e", at(0))).is_empty());
        let silent = seen().with(leaving());
        assert!(!releases(&silent));
        let dead = running(&BOTH).with(leaving()).with(node("n1").dead());
        assert!(releases(&dead) && calls(&plan(&dead, "v-e", at(0))).is_empty());
    }

    #[test]
    fn progress_is_told_in_whole_percents() {
        let member = AgentMember {
            mode: MemberMode::Rebuilding,
            copied_bytes: 999,
            total_bytes: 1000,
            message: String::new(),
            changed_at: at(0),
        };
        assert_eq!(mode(&member).progress_percent, Some(99));
        let empty = AgentMember { copied_bytes: 0, total_bytes: 0, ..member };
        assert_eq!(mode(&empty).progress_percent, Some(0));
    }
}
