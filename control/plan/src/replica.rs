//! Replica: keeps one copy running on its node, and removes its data when nothing needs it any more.
//!
//! *States.* unknown while the node is dead or its agent silent; otherwise what the agent says; stopped when the agent
//! does not know it.
//!
//! *Invariants.* Data is made only for a replica that has never reported any and that no record names: a copy that has
//! vanished is an error, not an empty copy. One that an operator has set aside stays until it is purged. Data is removed only after the volume's record names the replica no more,
//! or when the volume itself is being deleted for good (consistency rule 22); without the Volume object it stays where
//! it is, as an orphan.
//!
//! *When things fail.* A failed call is asked again when its delay is over; the condition tells what the agent said.

use std::collections::BTreeSet;

use addax_api::condition;
use addax_api::replica::{CONDITION_DELETION_BLOCKED, CONDITION_INSTANCE_READY};
use addax_api::volume::VolumeState;
use addax_api::{DesiredState, InstanceState, Replica, Volume};
use jiff::Timestamp;

use crate::action::{Action, AgentCall, CallTarget, DeleteBy};
use crate::observed::{AgentReplica, AgentView, Observed, Tabled};
use crate::volume::is_purging;
use crate::write;

/// How long a replica that its agent calls broken is left before it is started again, in seconds.
const RESTART_AFTER_SECONDS: i64 = 5;

/// What is to be done for a replica now.
pub fn plan(observed: &Observed, name: &str, now: Timestamp) -> Vec<Action> {
    let Some(old) = observed.replicas.get(name) else {
        return Vec::new();
    };
    let mut new = old.clone();
    let pass = Pass { observed, replica: old, name, now };
    let mut actions = pass.mirror(&mut new);
    if old.is_deleting() {
        match pass.delete(&mut new) {
            Some(last) => actions = last,
            // A copy that the record names is kept running: it may hold what no other has.
            None if write::is_held(&old.metadata) => {}
            None => actions.clear(),
        }
    }
    let mut all = write::patches(old, &new);
    all.append(&mut actions);
    all
}

struct Pass<'a> {
    observed: &'a Observed,
    replica: &'a Replica,
    name: &'a str,
    now: Timestamp,
}

impl Pass<'_> {
    fn volume(&self) -> Option<&Volume> {
        self.observed.volumes.get(&self.replica.spec.volume_name)
    }

    /// The agent of the replica's node, while both live.
    fn agent(&self) -> Option<&AgentView> {
        let node = self.replica.spec.node_id.as_str();
        self.observed.agent(node).filter(|_| self.observed.is_alive(node, self.now))
    }

    fn call(&self, call: AgentCall) -> Action {
        Action::Agent { node: self.replica.spec.node_id.clone(), call }
    }

    /// Writes what the agent says into the status, and asks for what is missing.
    fn mirror(&self, new: &mut Replica) -> Vec<Action> {
        let status = new.status.get_or_insert_default();
        let Some(agent) = self.agent() else {
            status.current_state = InstanceState::Unknown;
            let message = "the node is down, or its agent does not answer";
            condition::set(&mut status.conditions, CONDITION_INSTANCE_READY, false, "Unknown", message, self.now);
            return Vec::new();
        };
        status.instance_manager_name = self.replica.spec.node_id.clone();
        let seen = agent.replicas.get(self.name);
        let failure = agent.failures.get(&CallTarget::Replica(self.name.to_owned()));
        status.current_state = match (seen, failure) {
            (Some(seen), _) => seen.state,
            (None, Some(_)) => InstanceState::Error,
            (None, None) => InstanceState::Stopped,
        };
        if let Some(seen) = seen.filter(|seen| seen.state == InstanceState::Running) {
            status.address = seen.address.clone();
            status.fresh = Some(seen.fresh);
        }
        let message = match (seen, failure) {
            (_, Some(failure)) => failure.message.as_str(),
            (Some(seen), None) => seen.message.as_str(),
            (None, None) => "",
        };
        let running = status.current_state == InstanceState::Running;
        let reason = if running { "Running" } else { "NotRunning" };
        condition::set(&mut status.conditions, CONDITION_INSTANCE_READY, running, reason, message, self.now);
        match failure {
            Some(failure) if self.now < failure.retry_at => vec![Action::RequeueAt(failure.retry_at)],
            _ => self.ask(seen),
        }
    }

    fn ask(&self, seen: Option<&AgentReplica>) -> Vec<Action> {
        let state = seen.map_or(InstanceState::Stopped, |seen| seen.state);
        match (self.replica.spec.desire_state, state) {
            (DesiredState::Running, InstanceState::Stopped) => vec![self.start()],
            (DesiredState::Running, InstanceState::Error) => {
                let changed_at = seen.map_or(self.now, |seen| seen.changed_at);
                let due = write::after(changed_at, RESTART_AFTER_SECONDS);
                vec![if self.now < due { Action::RequeueAt(due) } else { self.start() }]
            }
            (DesiredState::Stopped, InstanceState::Running | InstanceState::Error) => {
                let name = self.name.to_owned();
                vec![self.call(AgentCall::StopReplica { name })]
            }
            _ => Vec::new(),
        }
    }

    fn start(&self) -> Action {
        let spec = &self.replica.spec;
        let reported = self.replica.status.as_ref().and_then(|status| status.fresh).is_some();
        // Without the Volume object nobody can say that no record names this replica.
        let unnamed =
            self.volume().is_some_and(|volume| !record_names(volume, self.name) && !is_discarded(volume, self.name));
        self.call(AgentCall::StartReplica {
            name: self.name.to_owned(),
            volume: spec.volume_name.clone(),
            disk: spec.disk_id.clone(),
            size_bytes: spec.size,
            create: !reported && unnamed,
        })
    }

    /// Removes the data if nothing needs it, then lets the object go; `None` while the data has to stay.
    fn delete(&self, new: &mut Replica) -> Option<Vec<Action>> {
        if !write::is_held(&self.replica.metadata) {
            return None;
        }
        let mut released = new.clone();
        write::release(&mut released.metadata);
        let let_go = |new: &Replica| write::patches(new, &released);
        let conditions = &mut new.status.get_or_insert_default().conditions;
        match self.verdict() {
            Removal::Keep => Some(let_go(new)),
            Removal::Blocked(reason, message) => {
                condition::set(conditions, CONDITION_DELETION_BLOCKED, true, reason, &message, self.now);
                None
            }
            Removal::Remove(volume) => {
                let failure =
                    self.agent().and_then(|agent| agent.failures.get(&CallTarget::Replica(self.name.to_owned())));
                if let Some(failure) = failure.filter(|failure| self.now < failure.retry_at) {
                    let message = failure.message.clone();
                    condition::set(conditions, CONDITION_DELETION_BLOCKED, true, "AgentFailed", &message, self.now);
                    return Some(vec![Action::RequeueAt(failure.retry_at)]);
                }
                condition::remove(conditions, CONDITION_DELETION_BLOCKED);
                let record = judged_by(volume, self.name).map(Box::new);
                let (name, disk) = (self.name.to_owned(), self.replica.spec.disk_id.clone());
                let call = AgentCall::DeleteReplica { name, disk, record };
                let mut actions = vec![Action::Confirm { object: volume.reference() }, self.call(call)];
                actions.extend(let_go(new));
                Some(actions)
            }
        }
    }

    fn verdict(&self) -> Removal<'_> {
        let node = self.replica.spec.node_id.as_str();
        let Some(volume) = self.volume() else {
            return Removal::Keep;
        };
        if record_names(volume, self.name) && !is_being_deleted_for_good(volume) {
            let message = format!("the record of volume {} names this replica", self.replica.spec.volume_name);
            return Removal::Blocked("InUse", message);
        }
        if is_discarded(volume, self.name) && !is_purged(volume, self.name) && !is_being_deleted_for_good(volume) {
            let name = &self.replica.spec.volume_name;
            let message =
                format!("it was set aside: `addax volume purge-discarded {name} --replica {}` removes it", self.name);
            return Removal::Blocked("Discarded", message);
        }
        if self.observed.nodes.get(node).is_none() {
            return Removal::Keep;
        }
        if self.agent().is_none() {
            let message = format!("its data can be removed only when node {node} answers again");
            return Removal::Blocked("NodeDown", message);
        }
        let seen = self.agent().and_then(|agent| agent.replicas.get(self.name));
        let unrecorded = volume.status.as_ref().is_none_or(|status| status.config.is_none());
        if unrecorded && !is_being_deleted_for_good(volume) && seen.is_some_and(|replica| !replica.fresh) {
            // Data without a record: only an operator knows what it is worth (rule 22).
            return Removal::Keep;
        }
        Removal::Remove(volume)
    }
}

/// What becomes of the data of a replica whose object is being deleted.
enum Removal<'a> {
    /// It stays: there is no record to judge by, or no node to ask.
    Keep,
    /// Not yet.
    Blocked(&'static str, String),
    /// It goes, if the volume is still as it was seen.
    Remove(&'a Volume),
}

fn record_names(volume: &Volume, replica: &str) -> bool {
    let config = volume.status.as_ref().and_then(|status| status.config.as_ref());
    config.is_some_and(|config| config.names(replica))
}

/// The record by which the replica's own agent judges once more whether the data may go; none when it goes whatever it is.
fn judged_by(volume: &Volume, replica: &str) -> Option<DeleteBy> {
    if is_being_deleted_for_good(volume) || is_purged(volume, replica) {
        return None;
    }
    let status = volume.status.as_ref()?;
    let record = status.config.clone()?;
    let before = status.recoveries.iter().filter_map(|account| account.from.as_ref());
    let over: BTreeSet<String> =
        before.map(|from| from.lineage.clone()).filter(|lineage| *lineage != record.lineage).collect();
    Some(DeleteBy { record, over: over.into_iter().collect() })
}

/// Whether an operator has set the copy aside.
fn is_discarded(volume: &Volume, replica: &str) -> bool {
    volume.status.as_ref().is_some_and(|status| status.is_discarded(replica))
}

/// Whether an operator wants one that was set aside gone.
fn is_purged(volume: &Volume, replica: &str) -> bool {
    volume.status.as_ref().is_some_and(|status| is_purging(status, replica))
}

fn is_being_deleted_for_good(volume: &Volume) -> bool {
    volume.status.as_ref().is_some_and(|status| status.state == VolumeState::Deleting)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::build::{agent, at, calls, failure, node, observed, replica, volume};
    use addax_api::Time;
    use addax_api::recovery::{DiscardedReplica, RecordSummary, RecoveryAccount, RecoveryAction, RecoveryOutcome};

    fn start(create: bool) -> AgentCall {
        AgentCall::StartReplica {
            name: "a".to_owned(),
            volume: "v".to_owned(),
            disk: "d".to_owned(),
            size_bytes: 1 << 20,
            create,
        }
    }

    fn delete() -> AgentCall {
        AgentCall::DeleteReplica { name: "a".to_owned(), disk: "d".to_owned(), record: None }
    }

    /// By the record of the volume `v`.
    fn delete_by(seen: &Observed, over: &[&str]) -> AgentCall {
        let record = seen.volumes.get("v").unwrap().status.as_ref().unwrap().config.clone().unwrap();
        let over = over.iter().map(|lineage| (*lineage).to_owned()).collect();
        let record = Some(Box::new(DeleteBy { record, over }));
        AgentCall::DeleteReplica { name: "a".to_owned(), disk: "d".to_owned(), record }
    }

    fn seen() -> Observed {
        observed().with(node("n1").disk("d", 1 << 30)).with(agent("n1"))
    }

    fn condition_reason(actions: &[Action]) -> String {
        let reason = actions.iter().find_map(|action| match action {
            Action::PatchStatus { patch, .. } => {
                let conditions = patch["status"]["conditions"].as_array()?;
                conditions.last()?["reason"].as_str().map(str::to_owned)
            }
            _ => None,
        });
        reason.unwrap_or_default()
    }

    #[test]
    fn data_is_made_only_for_a_replica_that_never_had_any() {
        let unnamed = seen().with(volume("v"));
        let named = seen().with(volume("v").in_sync(&["a"]));
        for (seen, replica, create) in [
            (unnamed.clone(), replica("a", "v").on("n1", "d"), true),
            (unnamed, replica("a", "v").on("n1", "d").fresh(true), false),
            (named, replica("a", "v").on("n1", "d"), false),
            (seen(), replica("a", "v").on("n1", "d"), false),
        ] {
            let seen = seen.with(replica);
            assert_eq!(calls(&plan(&seen, "a", at(0))), [start(create)]);
        }
    }

    #[test]
    fn a_running_replica_is_left_alone_once_its_status_is_written() {
        let seen =
            seen().with(volume("v")).with(replica("a", "v").on("n1", "d")).with(agent("n1").running_replica("a", true));
        let seen = seen.apply(&plan(&seen, "a", at(0)));
        let status = seen.replicas.get("a").unwrap().status.clone().unwrap();
        assert_eq!(status.current_state, InstanceState::Running);
        assert_eq!(status.fresh, Some(true));
        assert!(status.address.is_some());
        assert_eq!(plan(&seen, "a", at(1)), []);
    }

    #[test]
    fn a_failed_call_waits_for_its_time() {
        let target = CallTarget::Replica("a".to_owned());
        let seen =
            seen().with(volume("v")).with(replica("a", "v").on("n1", "d")).with(failure("n1", target, "disk full", 10));
        let actions = plan(&seen, "a", at(0));
        assert!(actions.contains(&Action::RequeueAt(at(10))));
        assert!(calls(&actions).is_empty());
        assert_eq!(calls(&plan(&seen, "a", at(10))), [start(true)]);
        let seen = seen.apply(&actions);
        assert_eq!(seen.replicas.get("a").unwrap().status.as_ref().unwrap().current_state, InstanceState::Error);
    }

    #[test]
    fn a_replica_on_a_dead_node_is_unknown_and_keeps_its_address() {
        let seen = seen().with(volume("v")).with(replica("a", "v").on("n1", "d").running()).with(node("n1").dead());
        let seen = seen.apply(&plan(&seen, "a", at(0)));
        let status = seen.replicas.get("a").unwrap().status.clone().unwrap();
        assert_eq!(status.current_state, InstanceState::Unknown);
        assert!(status.address.is_some());
    }

    #[test]
    fn data_goes_only_when_no_record_names_it_and_before_the_finalizer() {
        let leaving = || replica("a", "v").on("n1", "d").deleting();
        let named = seen().with(volume("v").in_sync(&["a"])).with(leaving());
        let actions = plan(&named, "a", at(0));
        // It may hold what no other copy has: it is even started.
        assert_eq!(calls(&actions), [start(false)]);
        assert_eq!(condition_reason(&actions), "InUse");
        assert!(!actions.iter().any(|action| matches!(action, Action::PatchSpec { .. })));

        let rebuilding = seen().with(volume("v").in_sync(&["b"]).rebuilding(&["a"])).with(leaving());
        assert_eq!(calls(&plan(&rebuilding, "a", at(0))), [start(false)]);

        let unnamed = seen().with(volume("v").in_sync(&["b"])).with(leaving());
        let actions = plan(&unnamed, "a", at(0));
        let order: Vec<bool> = actions
            .iter()
            .filter(|action| matches!(action, Action::Agent { .. } | Action::PatchSpec { .. }))
            .map(|action| matches!(action, Action::Agent { .. }))
            .collect();
        assert_eq!(order, [true, false]);
        assert_eq!(calls(&actions), [delete_by(&unnamed, &[])]);
        let confirmed =
            actions.iter().position(|action| matches!(action, Action::Confirm { object } if object.name == "v"));
        let removed = actions.iter().position(|action| matches!(action, Action::Agent { .. }));
        assert!(confirmed.is_some() && confirmed < removed);
    }

    #[test]
    fn a_copy_that_was_set_aside_stays_until_it_is_purged_and_the_rest_is_judged_by_the_record_and_its_past() {
        let account = |lineage: &str| RecoveryAccount {
            id: lineage.to_owned(),
            action: RecoveryAction::Recover,
            outcome: RecoveryOutcome::Done,
            message: String::new(),
            requested_by: "me".to_owned(),
            at: Time(at(0)),
            from: Some(RecordSummary { lineage: lineage.to_owned(), ..RecordSummary::default() }),
            to: None,
            discarded: Vec::new(),
            told: true,
        };
        let seen = |purging: Option<bool>| {
            let seen = seen().with(volume("v").in_sync(&["b"])).with(replica("a", "v").on("n1", "d").deleting());
            let mut object = seen.volumes.get("v").unwrap().clone();
            let status = object.status.get_or_insert_default();
            // `l` is the lineage that the record has: a comparison that left it as it was.
            status.recoveries = vec![account("old"), account("older"), account("old"), account("l")];
            let aside =
                |purging| DiscardedReplica { replica: "a".to_owned(), at: Time(at(0)), by: "r".to_owned(), purging };
            status.discarded = purging.map(aside).into_iter().collect();
            seen.with(Raw(object))
        };
        let kept = plan(&seen(Some(false)), "a", at(0));
        assert_eq!(condition_reason(&kept), "Discarded");
        assert_eq!(calls(&kept), [start(false)], "it is kept, and never made anew");
        assert_eq!(calls(&plan(&seen(Some(true)), "a", at(0))), [delete()]);
        let usual = seen(None);
        assert_eq!(calls(&plan(&usual, "a", at(0))), [delete_by(&usual, &["old", "older"])]);
    }

    struct Raw(Volume);

    impl crate::build::Part for Raw {
        fn put(self, observed: &mut Observed) {
            observed.volumes.put(std::sync::Arc::new(self.0));
        }
    }

    #[test]
    fn a_volume_deleted_for_good_gives_up_its_data() {
        let seen = seen()
            .with(volume("v").in_sync(&["a"]).state(VolumeState::Deleting))
            .with(replica("a", "v").on("n1", "d").deleting());
        assert_eq!(calls(&plan(&seen, "a", at(0))), [delete()]);
    }

    #[test]
    fn without_a_record_or_a_node_the_data_stays_and_the_object_goes() {
        let orphan = seen().with(replica("a", "v").on("n1", "d").deleting());
        let actions = plan(&orphan, "a", at(0));
        assert!(calls(&actions).is_empty());
        assert!(actions.iter().any(|action| matches!(action, Action::PatchSpec { .. })));
        let gone = observed().with(volume("v").in_sync(&["b"])).with(replica("a", "v").on("n1", "d").deleting());
        assert!(plan(&gone, "a", at(0)).iter().any(|action| matches!(action, Action::PatchSpec { .. })));
        let down = seen()
            .with(node("n1").dead())
            .with(volume("v").in_sync(&["b"]))
            .with(replica("a", "v").on("n1", "d").deleting());
        let actions = plan(&down, "a", at(0));
        assert_eq!(condition_reason(&actions), "NodeDown");
        assert!(!actions.iter().any(|action| matches!(action, Action::PatchSpec { .. })));
    }
}
