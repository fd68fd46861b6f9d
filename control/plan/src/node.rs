//! Node: made by its own manager; its conditions tell whether it is alive, its disk statuses what there is to place.
//!
//! *States.* Ready is True while the lease holds and the agent answers; ManagerDown when the lease has run out (then the
//! successor writes it), AgentDown when only the agent is silent.
//!
//! *Flow.* The agent is told every disk of the spec, with the lvstore that was first seen under its name, and to forget
//! those that the spec has no more; what it finds goes into the status.
//!
//! *Invariants.* At rest nothing is written: free space is rounded down to steps of a hundredth of the disk, because it
//! moves with every write of every volume. Once an lvstore stands in the status, another one never takes its place.

use addax_api::condition;
use addax_api::node::{BLOCK_SIZE, CONDITION_READY, CONDITION_SCHEDULABLE, DiskSpec, DiskStatus};
use addax_api::setting::Settings;
use addax_api::{LABEL_NODE, NAMESPACE, Node, NodeSpec};
use jiff::Timestamp;

use crate::action::{Action, AgentCall, CallTarget, Object};
use crate::observed::{AgentDisk, AgentView, DiskWish, Observed};
use crate::scheduler::scheduled_replicas;
use crate::write;

/// What is to be done for a node now.
pub fn plan(observed: &Observed, name: &str, now: Timestamp) -> Vec<Action> {
    let Some(old) = observed.nodes.get(name) else {
        return create(observed, name);
    };
    let mut new = old.clone();
    let (ready, reason, message) = readiness(observed, name, now);
    let schedulable = ready && new.spec.allow_scheduling;
    let status = new.status.get_or_insert_default();
    if name == observed.this_node.name {
        status.agent_address = observed.this_node.agent_address.clone();
    }
    condition::set(&mut status.conditions, CONDITION_READY, ready, reason, message, now);
    let (reason, message) = match (ready, new.spec.allow_scheduling) {
        (false, _) => ("NotReady", "the node is not ready"),
        (true, false) => ("Disabled", "scheduling is disabled for the node"),
        (true, true) => ("Schedulable", ""),
    };
    condition::set(&mut status.conditions, CONDITION_SCHEDULABLE, schedulable, reason, message, now);
    let agent = observed.agent(name);
    let is_held = |disk: &str| agent.is_some_and(|agent| agent.disks.contains_key(disk));
    status.disk_status.retain(|disk, _| new.spec.disks.contains_key(disk) || is_held(disk));
    for (disk, leaving) in status.disk_status.iter_mut().filter(|(disk, _)| !new.spec.disks.contains_key(*disk)) {
        let failure = agent.and_then(|agent| agent.failures.get(&CallTarget::Disk(disk.clone())));
        let message = failure.map_or("the agent is told to forget it", |failure| failure.message.as_str());
        for type_ in [CONDITION_READY, CONDITION_SCHEDULABLE] {
            condition::set(&mut leaving.conditions, type_, false, "Removing", message, now);
        }
    }
    for (disk, spec) in &new.spec.disks {
        let disk_status = status.disk_status.entry(disk.clone()).or_default();
        disk_plan(observed, name, disk, spec, disk_status, now);
    }
    let mut actions = write::patches(old, &new);
    if let Some(agent) = observed.agent(name).filter(|_| ready) {
        actions.extend(ask(agent, name, &new, now));
    }
    actions
}

/// The calls that bring the agent's disks to what is wanted.
fn ask(agent: &AgentView, name: &str, node: &Node, now: Timestamp) -> Vec<Action> {
    let status = node.status.as_ref();
    let known = |disk: &str| status.and_then(|status| status.disk_status.get(disk)).map(|disk| disk.disk_uuid.clone());
    let put = node.spec.disks.iter().filter_map(|(disk, spec)| {
        let wish = wish(spec, known(disk).unwrap_or_default());
        let differs = agent.disks.get(disk).is_none_or(|seen| seen.wish != wish);
        differs.then(|| AgentCall::PutDisk { disk: disk.clone(), wish })
    });
    let unwanted = agent.disks.keys().filter(|disk| !node.spec.disks.contains_key(*disk));
    let remove = unwanted.map(|disk| AgentCall::RemoveDisk { disk: disk.clone() });
    let unless_failed = |call: AgentCall| match agent.failures.get(&call.target()) {
        Some(failure) if now < failure.retry_at => Action::RequeueAt(failure.retry_at),
        _ => Action::Agent { node: name.to_owned(), call },
    };
    put.chain(remove).map(unless_failed).collect()
}

fn wish(spec: &DiskSpec, uuid: String) -> DiskWish {
    DiskWish {
        type_: spec.type_,
        path: spec.path.clone(),
        nvme: spec.nvme.clone(),
        size: spec.size,
        create: spec.create,
        erase: spec.erase.clone(),
        uuid,
        device: spec.device.clone(),
    }
}

/// A manager makes its own node's object, with the disk it was started with.
fn create(observed: &Observed, name: &str) -> Vec<Action> {
    let this = &observed.this_node;
    if name != this.name {
        return Vec::new();
    }
    let mut node = Node::new(name, NodeSpec::default());
    node.metadata.namespace = Some(NAMESPACE.to_owned());
    node.metadata.labels = Some([(LABEL_NODE.to_owned(), name.to_owned())].into());
    if let Some((disk, spec)) = &this.default_disk {
        node.spec.disks.insert(disk.clone(), with_reserve(observed, spec));
    }
    vec![Action::Create(Box::new(Object::Node(node)))]
}

/// The default disk is a file in a file system that others write to as well.
fn with_reserve(observed: &Observed, spec: &DiskSpec) -> DiskSpec {
    let mut spec = spec.clone();
    if spec.storage_reserved == 0 {
        let Settings { storage_reserved_percentage_for_default_disk: percent, .. } = observed.settings_in_force();
        spec.storage_reserved = spec.size / 100 * percent;
    }
    spec
}

fn readiness(observed: &Observed, name: &str, now: Timestamp) -> (bool, &'static str, &'static str) {
    if !observed.is_alive(name, now) {
        (false, "ManagerDown", "the node's manager gives no sign of life")
    } else if observed.agent(name).is_none() {
        (false, "AgentDown", "the node's agent does not answer")
    } else {
        (true, "Ready", "")
    }
}

fn disk_plan(observed: &Observed, node: &str, disk: &str, spec: &DiskSpec, status: &mut DiskStatus, now: Timestamp) {
    let agent = observed.agent(node);
    let seen = agent.and_then(|agent| agent.disks.get(disk));
    let failure = agent.and_then(|agent| agent.failures.get(&CallTarget::Disk(disk.to_owned())));
    let refused = match (seen, failure) {
        (None, None) => Some(("NoDiskInfo", "the agent has not told of this disk".to_owned())),
        (None, Some(failure)) => Some(("Refused", failure.message.clone())),
        (Some(seen), _) if !seen.reason.is_empty() => Some((seen.reason.as_str(), seen.message.clone())),
        (Some(seen), _) if !status.disk_uuid.is_empty() && status.disk_uuid != seen.uuid => {
            let (place, known) = (spec.place(), &status.disk_uuid);
            Some(("DiskChanged", format!("another disk is at {place}: {} instead of {known}", seen.uuid)))
        }
        (Some(_), _) => None,
    };
    if let Some(seen) = seen {
        status.device = seen.device.clone();
        status.fingerprint = seen.fingerprint.clone();
        if refused.is_none() {
            measure(status, seen);
        }
    }
    status.scheduled_replicas = scheduled_replicas(observed, node, disk, status.cluster_size).collect();
    status.storage_scheduled = status.scheduled_replicas.values().fold(0, |sum: i64, size| sum.saturating_add(*size));
    let (ready, reason, message) = match refused {
        Some((reason, message)) => (false, reason, message),
        None => (true, "Ready", String::new()),
    };
    let conditions = &mut status.conditions;
    condition::set(conditions, CONDITION_READY, ready, reason, &message, now);
    // An imported lvstore of another kind is there to be counted, not to be used.
    let fits = status.block_size == BLOCK_SIZE;
    let schedulable = ready && spec.allow_scheduling && fits;
    let message = match ready && !fits {
        true => format!("its lvols have blocks of {} bytes; copies need {BLOCK_SIZE}", status.block_size),
        false => message,
    };
    let reason = match (ready, spec.allow_scheduling, spec.eviction_requested) {
        (true, ..) if !fits => "BlockSize",
        (false, ..) => reason,
        (_, false, true) => "Evicting",
        (_, false, false) => "Disabled",
        (_, true, _) => "Schedulable",
    };
    condition::set(conditions, CONDITION_SCHEDULABLE, schedulable, reason, &message, now);
}

fn measure(status: &mut DiskStatus, seen: &AgentDisk) {
    let step = (seen.size_bytes / 100).max(1);
    status.disk_uuid = seen.uuid.clone();
    status.lvstore = seen.lvstore.clone();
    status.cluster_size = seen.cluster_bytes;
    status.block_size = seen.block_bytes;
    status.no_overcommit = seen.no_overcommit;
    status.storage_maximum = seen.size_bytes;
    status.storage_available = seen.available_bytes / step * step;
    status.storage_unmanaged = seen.unmanaged_bytes;
    status.unmanaged_count = seen.unmanaged_count;
    status.unmanaged = seen.unmanaged.clone();
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::build::{agent, at, calls, failure, node, observed, replica};
    use serde_json::json;

    const GIB: i64 = 1 << 30;

    fn status_patch(actions: &[Action]) -> &serde_json::Value {
        let patch = actions.iter().find_map(|action| match action {
            Action::PatchStatus { patch, .. } => Some(&patch["status"]),
            _ => None,
        });
        patch.unwrap()
    }

    #[test]
    fn a_node_at_rest_is_left_alone() {
        let observed = observed().with(node("n1").disk("d", 100 * GIB)).with(agent("n1").known_disk("d", 100 * GIB));
        let first = plan(&observed, "n1", at(0));
        let observed = observed.apply(&first);
        assert_eq!(plan(&observed, "n1", at(5)), []);
    }

    #[test]
    fn a_manager_makes_its_own_node_with_the_disk_it_was_started_with() {
        let mut seen = observed().me("n9");
        seen.this_node.default_disk = Some(("d".to_owned(), DiskSpec::file("/x", 100 * GIB)));
        assert_eq!(plan(&seen, "n1", at(0)), []);
        let actions = plan(&seen, "n9", at(0));
        let [Action::Create(object)] = &actions[..] else { panic!("{actions:?}") };
        let Object::Node(made) = object.as_ref() else { panic!() };
        assert_eq!(made.spec.disks["d"].storage_reserved, 100 * GIB / 100 * 10);
    }

    #[test]
    fn the_agent_is_told_of_disks_and_of_those_that_went() {
        let observed = observed().with(node("n1").disk("d", GIB)).with(agent("n1").disk("old", GIB));
        let asked = calls(&plan(&observed, "n1", at(0)));
        let wish = DiskWish { path: "/disks/d".to_owned(), create: true, ..DiskWish::default() };
        let put = AgentCall::PutDisk { disk: "d".to_owned(), wish: wish.clone() };
        assert_eq!(asked, [put, AgentCall::RemoveDisk { disk: "old".to_owned() }]);
        // What was seen first is asked for from then on.
        let observed = observed.with(agent("n1").disk("d", GIB));
        let after = observed.apply(&plan(&observed, "n1", at(0)));
        let wish = DiskWish { uuid: "disk-d".to_owned(), ..wish };
        assert_eq!(calls(&plan(&after, "n1", at(1))), [AgentCall::PutDisk { disk: "d".to_owned(), wish }]);
        // A refusal waits for its time and is told.
        let target = CallTarget::Disk("d".to_owned());
        let refused = observed.with(agent("n1")).with(failure("n1", target, "the same device as disk 'e'", 10));
        let actions = plan(&refused, "n1", at(0));
        assert!(calls(&actions).is_empty() && actions.contains(&Action::RequeueAt(at(10))));
        let patch = status_patch(&actions);
        assert_eq!(patch["diskStatus"]["d"]["conditions"][0]["reason"], "Refused");
    }

    #[test]
    fn what_a_disk_is_refused_for_stands_in_its_conditions() {
        let observed = observed().with(node("n1").disk("d", GIB)).with(agent("n1").disk("d", GIB));
        let mut observed = observed.apply(&plan(&observed, "n1", at(0)));
        let seen = observed.agents.get_mut("n1").unwrap().disks.get_mut("d").unwrap();
        (seen.reason, seen.message) = ("NotEmpty".to_owned(), "it holds a swap area".to_owned());
        seen.fingerprint = "abc".to_owned();
        let after = observed.apply(&plan(&observed, "n1", at(1)));
        let status = after.nodes.get("n1").unwrap().status.clone().unwrap().disk_status["d"].clone();
        assert_eq!((status.fingerprint.as_str(), status.storage_maximum), ("abc", GIB));
        for type_ in [CONDITION_READY, CONDITION_SCHEDULABLE] {
            let condition = condition::get(&status.conditions, type_).unwrap();
            assert_eq!((condition.reason.as_str(), condition.message.as_str()), ("NotEmpty", "it holds a swap area"));
        }
    }

    #[test]
    fn a_silent_agent_and_a_dead_manager_are_told_apart() {
        let observed = observed().with(node("n1").disk("d", GIB));
        let patch = status_patch(&plan(&observed, "n1", at(0))).clone();
        assert_eq!(patch["conditions"][0]["reason"], "AgentDown");
        let observed = observed.with(node("n1").disk("d", GIB).dead());
        let patch = status_patch(&plan(&observed, "n1", at(0))).clone();
        assert_eq!(patch["conditions"][0]["reason"], "ManagerDown");
    }

    #[test]
    fn another_disk_under_the_same_path_takes_nothing() {
        let observed = observed().with(node("n1").disk("d", GIB)).with(agent("n1").disk("d", GIB));
        let mut observed = observed.apply(&plan(&observed, "n1", at(0)));
        observed.agents.get_mut("n1").unwrap().disks.get_mut("d").unwrap().uuid = "other".to_owned();
        let patch = status_patch(&plan(&observed, "n1", at(1))).clone();
        assert_eq!(patch["diskStatus"]["d"]["conditions"][0]["reason"], "DiskChanged");
    }

    #[test]
    fn copies_are_summed_per_disk_and_free_space_moves_in_steps() {
        let observed = observed()
            .with(node("n1").disk("d", 100 * GIB))
            .with(agent("n1").known_disk("d", 100 * GIB))
            .with(replica("a", "v").on("n1", "d").size(3 * GIB))
            .with(replica("b", "v").on("n1", "other").size(GIB));
        let patch = status_patch(&plan(&observed, "n1", at(0))).clone();
        assert_eq!(patch["diskStatus"]["d"]["storageScheduled"], json!(3 * GIB));
        let mut observed = observed.apply(&plan(&observed, "n1", at(0)));
        observed.agents.get_mut("n1").unwrap().disks.get_mut("d").unwrap().available_bytes = 50 * GIB + 5;
        let observed = observed.apply(&plan(&observed, "n1", at(0)));
        let mut observed = observed;
        observed.agents.get_mut("n1").unwrap().disks.get_mut("d").unwrap().available_bytes = 50 * GIB + 9;
        assert_eq!(plan(&observed, "n1", at(1)), []);
    }
}
