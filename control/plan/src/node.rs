//! Node: made by its own manager; its conditions tell whether it is alive, its disk statuses what there is to place.
//!
//! *States.* Ready is True while the lease holds and the agent answers; ManagerDown when the lease has run out (then the
//! successor writes it), AgentDown when only the agent is silent.
//!
//! *Invariant.* At rest nothing is written: free space is rounded down to steps of a hundredth of the disk, because it
//! moves with every write of every volume.

use addax_api::condition;
use addax_api::node::{CONDITION_READY, CONDITION_SCHEDULABLE, DiskSpec, DiskStatus};
use addax_api::setting::Settings;
use addax_api::{LABEL_NODE, NAMESPACE, Node, NodeSpec};
use jiff::Timestamp;

use crate::action::{Action, Object};
use crate::observed::{AgentDisk, Observed};
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
    status.disk_status.retain(|disk, _| new.spec.disks.contains_key(disk));
    for (disk, spec) in &new.spec.disks {
        let disk_status = status.disk_status.entry(disk.clone()).or_default();
        disk_plan(observed, name, disk, spec, disk_status, now);
    }
    write::patches(old, &new)
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
        let Some(spec) = with_reserve(observed, disk, spec) else {
            return Vec::new();
        };
        node.spec.disks.insert(disk.clone(), spec);
    }
    vec![Action::Create(Box::new(Object::Node(node)))]
}

/// The default disk's reserve is a share of its size, so the agent must have told it first.
fn with_reserve(observed: &Observed, disk: &str, spec: &DiskSpec) -> Option<DiskSpec> {
    let mut spec = spec.clone();
    if spec.storage_reserved == 0 {
        let Settings { storage_reserved_percentage_for_default_disk: percent, .. } = observed.settings_in_force();
        let size = observed.agent(&observed.this_node.name)?.disks.get(disk)?.size_bytes;
        spec.storage_reserved = size / 100 * percent;
    }
    Some(spec)
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
    status.scheduled_replicas = scheduled_replicas(observed, node, disk).collect();
    status.storage_scheduled = status.scheduled_replicas.values().fold(0, |sum: i64, size| sum.saturating_add(*size));
    let seen = observed.agent(node).and_then(|agent| agent.disks.get(disk));
    let (schedulable, reason, message) = match seen {
        None => (false, "NoDiskInfo", "the agent does not report this disk".to_owned()),
        Some(seen) if !seen.error.is_empty() => (false, "DiskNotReady", seen.error.clone()),
        Some(seen) if !status.disk_uuid.is_empty() && status.disk_uuid != seen.uuid => (
            false,
            "DiskChanged",
            format!("another disk is mounted at {}: {} instead of {}", spec.path, seen.uuid, status.disk_uuid),
        ),
        Some(seen) => {
            measure(status, seen);
            (spec.allow_scheduling, if spec.allow_scheduling { "Schedulable" } else { "Disabled" }, String::new())
        }
    };
    condition::set(&mut status.conditions, CONDITION_SCHEDULABLE, schedulable, reason, &message, now);
}

fn measure(status: &mut DiskStatus, seen: &AgentDisk) {
    let step = (seen.size_bytes / 100).max(1);
    status.disk_uuid = seen.uuid.clone();
    status.storage_maximum = seen.size_bytes;
    status.storage_available = seen.available_bytes / step * step;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::build::{agent, at, node, observed, replica};
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
        let observed = observed().with(node("n1").disk("d", 100 * GIB)).with(agent("n1").disk("d", 100 * GIB));
        let first = plan(&observed, "n1", at(0));
        let observed = observed.apply(&first);
        assert_eq!(plan(&observed, "n1", at(5)), []);
    }

    #[test]
    fn a_manager_makes_its_own_node_once_the_disk_is_known() {
        let mut seen = observed().me("n9").with(agent("n1").disk("d", GIB));
        seen.this_node.default_disk = Some(("d".to_owned(), DiskSpec::at("/x")));
        assert_eq!(plan(&seen, "n9", at(0)), []);
        assert_eq!(plan(&seen, "n1", at(0)), []);
        let seen = seen.with(agent("n9").disk("d", 100 * GIB));
        let actions = plan(&seen, "n9", at(0));
        let [Action::Create(object)] = &actions[..] else { panic!("{actions:?}") };
        let Object::Node(made) = object.as_ref() else { panic!() };
        assert_eq!(made.spec.disks["d"].storage_reserved, 100 * GIB / 100 * 10);
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
            .with(agent("n1").disk("d", 100 * GIB))
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
