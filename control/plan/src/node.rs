//! Node: made by its own manager; its conditions tell whether it is alive, its disk statuses what there is to place.
//!
//! *States.* Ready is True while the lease holds and the agent answers; ManagerDown when the lease has run out (then the
//! successor writes it), AgentDown when only the agent is silent.
//!
//! *Flow.* The agent is told every disk of the spec, with the lvstore that was first seen under its name, and to forget
//! those that the spec has no more; what it finds goes into the status. A name that has got another device since is first
//! forgotten with the old one.
//!
//! *Invariants.* At rest nothing is written: free space is rounded down to steps of a hundredth of the disk, because it
//! moves with every write of every volume. Once an lvstore stands in the status, another one never takes its place, as long
//! as the disk is in the spec. An lvstore that stands in the status of another node is not used: an lvstore that the agent
//! has found is opened only after it stands in this one's. A remote namespace that another node declares is not even looked
//! at, unless the claim of this one comes first (see [`twin`]).

use addax_api::condition;
use addax_api::node::{
    BLOCK_SIZE, CONDITION_READY, CONDITION_SCHEDULABLE, DISK_DUPLICATE, DISK_FOUND, DISK_REMOVING, DiskSpec,
    DiskStatus, DiskType,
};
use addax_api::setting::Settings;
use addax_api::{LABEL_NODE, NAMESPACE, Node, NodeSpec, ResourceExt};
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
            condition::set(&mut leaving.conditions, type_, false, DISK_REMOVING, message, now);
        }
    }
    for (disk, spec) in &new.spec.disks {
        let disk_status = status.disk_status.entry(disk.clone()).or_default();
        disk_plan(observed, name, disk, spec, disk_status, now);
    }
    let mut actions = write::patches(old, &new);
    if let Some(agent) = observed.agent(name).filter(|_| ready) {
        actions.extend(ask(observed, agent, old, &new, now));
    }
    actions
}

/// The calls that bring the agent's disks to what is wanted.
fn ask(observed: &Observed, agent: &AgentView, old: &Node, new: &Node, now: Timestamp) -> Vec<Action> {
    let name = new.name_any();
    let known = |node: &Node, disk: &str| {
        let status = node.status.as_ref().and_then(|status| status.disk_status.get(disk));
        status.map(|disk| disk.disk_uuid.clone()).unwrap_or_default()
    };
    let put = new.spec.disks.iter().filter_map(|(disk, spec)| {
        let seen = agent.disks.get(disk);
        let forget = || Some(AgentCall::RemoveDisk { disk: disk.clone() });
        let uuid = known(new, disk);
        if twin(observed, &name, disk, spec, &uuid).is_some() {
            return seen.and_then(|_| forget());
        }
        if seen.is_some_and(|seen| !is_same_place(spec, &seen.wish)) {
            return forget();
        }
        // What is only about to be written may not come to stand: another node may have it by then.
        let wish = wish(spec, if known(old, disk) == uuid { uuid } else { String::new() });
        seen.is_none_or(|seen| seen.wish != wish).then(|| AgentCall::PutDisk { disk: disk.clone(), wish })
    });
    let unwanted = agent.disks.keys().filter(|disk| !new.spec.disks.contains_key(*disk));
    let remove = unwanted.map(|disk| AgentCall::RemoveDisk { disk: disk.clone() });
    let unless_failed = |call: AgentCall| match agent.failures.get(&call.target()) {
        Some(failure) if now < failure.retry_at => Action::RequeueAt(failure.retry_at),
        _ => Action::Agent { node: name.clone(), call },
    };
    put.chain(remove).map(unless_failed).collect()
}

/// The node that has the lvstore `uuid` too, or has the same remote namespace, so that this one may not use the disk.
///
/// Of several that declare a namespace the one whose lvstore is known may use it, else the first by name.
fn twin(observed: &Observed, node: &str, disk: &str, spec: &DiskSpec, uuid: &str) -> Option<String> {
    let is_known = |node: &Node, disk: &str| {
        let status = node.status.as_ref().and_then(|status| status.disk_status.get(disk));
        status.is_some_and(|status| !status.disk_uuid.is_empty())
    };
    let me_known = observed.nodes.get(node).is_some_and(|me| is_known(me, disk));
    let mut others = observed.nodes.iter().filter(|other| other.name_any() != node);
    let found = others.find(|other| {
        let stores = other.status.iter().flat_map(|status| status.disk_status.values());
        let comes_first =
            |known: bool| (known, me_known) == (true, false) || (known == me_known && other.name_any().as_str() < node);
        let has_store = stores.into_iter().any(|status| !uuid.is_empty() && status.disk_uuid == uuid);
        let is_far = |theirs: &DiskSpec| match (&theirs.nvme, &spec.nvme) {
            (Some(theirs), Some(ours)) => (&theirs.nqn, theirs.nsid) == (&ours.nqn, ours.nsid),
            _ => false,
        };
        let mut far = other.spec.disks.iter().filter(|(_, theirs)| is_far(theirs));
        (has_store && comes_first(true)) || far.any(|(theirs, _)| comes_first(is_known(other, theirs)))
    });
    found.map(ResourceExt::name_any)
}

fn wish(spec: &DiskSpec, uuid: String) -> DiskWish {
    let is_far = spec.type_ == DiskType::Nvme;
    DiskWish {
        type_: spec.type_,
        // Only what belongs to the type: an agent remembers nothing else.
        path: if is_far { String::new() } else { spec.path.clone() },
        nvme: spec.nvme.clone().filter(|_| is_far),
        size: if spec.type_ == DiskType::File { spec.size } else { 0 },
        create: spec.create,
        erase: spec.erase.clone(),
        uuid,
        device: spec.device.clone(),
    }
}

fn is_same_place(spec: &DiskSpec, seen: &DiskWish) -> bool {
    let wanted = wish(spec, String::new());
    (wanted.type_, &wanted.path, &wanted.nvme) == (seen.type_, &seen.path, &seen.nvme)
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
    let held = agent.and_then(|agent| agent.disks.get(disk));
    let failure = agent.and_then(|agent| agent.failures.get(&CallTarget::Disk(disk.to_owned())));
    let seen = held.filter(|held| is_same_place(spec, &held.wish));
    let is_replaced = held.is_some() && seen.is_none();
    let was_leaving = condition::get(&status.conditions, CONDITION_READY).is_some_and(|c| c.reason == DISK_REMOVING);
    if is_replaced || (was_leaving && agent.is_some() && held.is_none()) {
        // What is known is of a device that this name had before: it was taken out of the spec and forgotten.
        *status = DiskStatus { conditions: std::mem::take(&mut status.conditions), ..DiskStatus::default() };
    }
    let uuid = match seen {
        Some(seen) if status.disk_uuid.is_empty() => seen.uuid.clone(),
        _ => status.disk_uuid.clone(),
    };
    let refused = match (seen, failure) {
        _ if is_replaced => {
            let why =
                failure.map_or("the agent is told to forget another device under this name", |f| f.message.as_str());
            Some((DISK_REMOVING, why.to_owned()))
        }
        _ if let Some(other) = twin(observed, node, disk, spec, &uuid) => {
            let text =
                format!("node '{other}' has this disk: remove it there first, with the node itself if that is gone");
            Some((DISK_DUPLICATE, text))
        }
        (None, None) => Some(("NoDiskInfo", "the agent has not told of this disk".to_owned())),
        (None, Some(failure)) => Some(("Refused", failure.message.clone())),
        (Some(seen), _) if !seen.reason.is_empty() => {
            if seen.reason == DISK_FOUND {
                status.disk_uuid.clone_from(&uuid);
            }
            Some((seen.reason.as_str(), seen.message.clone()))
        }
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
        None => {
            (true, "Ready", failure.map(|f| format!("the last change was refused: {}", f.message)).unwrap_or_default())
        }
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
    use crate::action::{Key, Kind};
    use crate::build::{NodeBuilder, agent, at, calls, failure, node, observed, replica};
    use crate::related;
    use addax_api::node::RemoteNamespace;
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

    fn ready(observed: &Observed, node: &str, disk: &str) -> (String, String, String) {
        let status = observed.nodes.get(node).unwrap().status.as_ref().unwrap().disk_status[disk].clone();
        let ready = condition::get(&status.conditions, CONDITION_READY).unwrap().clone();
        (ready.reason, ready.message, status.disk_uuid)
    }

    fn far(nqn: &str) -> DiskSpec {
        let at = RemoteNamespace { traddr: "10.0.0.1".to_owned(), trsvcid: 4420, nqn: nqn.to_owned(), nsid: 1 };
        DiskSpec { nvme: Some(at), ..DiskSpec::of(DiskType::Nvme) }
    }

    #[test]
    fn an_lvstore_is_used_by_one_node() {
        let one = observed().with(node("n1").disk("d", GIB)).with(agent("n1").known_disk("d", GIB));
        let one = one.apply(&plan(&one, "n1", at(0)));
        // Found on another node, which waits for it to be named.
        let mut both = one.with(node("n2").disk("d", GIB)).with(agent("n2").known_disk("d", GIB));
        let seen = both.agents.get_mut("n2").unwrap().disks.get_mut("d").unwrap();
        (seen.reason, seen.wish.uuid) = (DISK_FOUND.to_owned(), String::new());
        let actions = plan(&both, "n2", at(0));
        assert!(calls(&actions).is_empty());
        let after = both.apply(&actions);
        let (reason, message, uuid) = ready(&after, "n2", "d");
        assert!(reason == DISK_DUPLICATE && message.contains("'n1'") && uuid.is_empty(), "{reason} {message} {uuid}");
        assert!(related::of_object(&after, &Key::new(Kind::Node, "n1")).contains(&Key::new(Kind::Node, "n2")));
        // The first one stays as it was.
        assert_eq!(ready(&after.apply(&plan(&after, "n1", at(1))), "n1", "d").0, "Ready");
        // Taken out there, it is claimed here, and only then asked for.
        let mut freed = after.clone();
        freed.nodes.remove("n1");
        let actions = plan(&freed, "n2", at(1));
        assert!(calls(&actions).is_empty());
        let claimed = freed.apply(&actions);
        let (reason, _, uuid) = ready(&claimed, "n2", "d");
        assert_eq!((reason.as_str(), uuid.as_str()), (DISK_FOUND, "disk-d"));
        let [AgentCall::PutDisk { wish, .. }] = &calls(&plan(&claimed, "n2", at(2)))[..] else { panic!() };
        assert_eq!(wish.uuid, "disk-d");
    }

    #[test]
    fn of_two_nodes_that_claimed_an_lvstore_at_once_one_lets_go() {
        let with = |node: NodeBuilder| node.disk("d", GIB).disk_status("d", |d| d.disk_uuid = "u".to_owned());
        let both = observed().with(with(node("n1"))).with(with(node("n2")));
        let both = both.with(agent("n1").known_disk("d", GIB)).with(agent("n2").known_disk("d", GIB));
        assert_eq!(calls(&plan(&both, "n2", at(0))), [AgentCall::RemoveDisk { disk: "d".to_owned() }]);
        assert!(!calls(&plan(&both, "n1", at(0))).iter().any(|call| matches!(call, AgentCall::RemoveDisk { .. })));
    }

    #[test]
    fn a_remote_namespace_is_looked_at_by_one_node() {
        let with = |node: NodeBuilder, nqn: &str| node.disk("d", GIB).spec("d", far(nqn));
        let both = |nqn: &str| {
            let both = observed().with(with(node("n1"), "nqn.a")).with(with(node("n2"), nqn));
            both.with(agent("n1")).with(agent("n2"))
        };
        assert_eq!(calls(&plan(&both("nqn.b"), "n2", at(0))).len(), 1);
        let same = both("nqn.a");
        assert_eq!(calls(&plan(&same, "n1", at(0))).len(), 1);
        assert!(calls(&plan(&same, "n2", at(0))).is_empty());
        assert_eq!(ready(&same.apply(&plan(&same, "n2", at(0))), "n2", "d").0, DISK_DUPLICATE);
        // One that has it already keeps it.
        let known = same.with(with(node("n2"), "nqn.a").disk_status("d", |d| d.disk_uuid = "u".to_owned()));
        assert!(calls(&plan(&known, "n1", at(0))).is_empty());
        assert_eq!(calls(&plan(&known, "n2", at(0))).len(), 1);
        // And one that was told before is told to let go.
        let told = known.with(agent("n1").disk("d", GIB));
        assert_eq!(calls(&plan(&told, "n1", at(0))), [AgentCall::RemoveDisk { disk: "d".to_owned() }]);
    }

    #[test]
    fn a_name_with_another_device_is_first_forgotten_with_the_old_one() {
        let old = observed().with(node("n1").disk("d", GIB)).with(agent("n1").known_disk("d", GIB));
        let old = old.apply(&plan(&old, "n1", at(0)));
        let mut new = old.clone();
        let mut changed = new.nodes.get("n1").unwrap().clone();
        changed.spec.disks.get_mut("d").unwrap().path = "/disks/other".to_owned();
        new.nodes.put(std::sync::Arc::new(changed));
        let actions = plan(&new, "n1", at(1));
        assert_eq!(calls(&actions), [AgentCall::RemoveDisk { disk: "d".to_owned() }]);
        let after = new.apply(&actions);
        let (reason, message, uuid) = ready(&after, "n1", "d");
        assert!(reason == DISK_REMOVING && message.contains("another device") && uuid.is_empty(), "{reason} {message}");
        assert_eq!(write_count(&plan(&after, "n1", at(2))), 0);
        let failed = after.clone().with(failure("n1", CallTarget::Disk("d".to_owned()), "it holds replicas", 10));
        assert_eq!(ready(&failed.apply(&plan(&failed, "n1", at(2))), "n1", "d").1, "it holds replicas");
        let forgotten = after.with(agent("n1"));
        let [AgentCall::PutDisk { wish, .. }] = &calls(&plan(&forgotten, "n1", at(3)))[..] else { panic!() };
        assert_eq!((wish.path.as_str(), wish.uuid.as_str()), ("/disks/other", ""));
    }

    #[test]
    fn what_an_agent_forgot_on_request_is_not_expected_when_it_is_declared_again() {
        let old = observed().with(node("n1").disk("d", GIB)).with(agent("n1").known_disk("d", GIB));
        let old = old.apply(&plan(&old, "n1", at(0)));
        let respec = |observed: &Observed, disk: Option<DiskSpec>| {
            let (mut after, mut node) = (observed.clone(), observed.nodes.get("n1").unwrap().clone());
            match disk {
                Some(spec) => node.spec.disks.insert("d".to_owned(), spec),
                None => node.spec.disks.remove("d"),
            };
            after.nodes.put(std::sync::Arc::new(node));
            after
        };
        let leaving = respec(&old, None);
        let leaving = leaving.apply(&plan(&leaving, "n1", at(1)));
        assert_eq!(ready(&leaving, "n1", "d").0, DISK_REMOVING);
        let again = respec(&leaving.with(agent("n1")), Some(DiskSpec::file("/disks/d", 0)));
        assert_eq!(ready(&again.apply(&plan(&again, "n1", at(2))), "n1", "d").2, "");
        // But an agent that has lost what it knew is told what is expected.
        let lost = old.with(agent("n1"));
        assert_eq!(ready(&lost.apply(&plan(&lost, "n1", at(2))), "n1", "d").2, "disk-d");
    }

    #[test]
    fn a_refused_change_of_a_disk_that_is_ready_is_told() {
        let seen = observed().with(node("n1").disk("d", GIB)).with(agent("n1").known_disk("d", GIB));
        let seen = seen.with(failure("n1", CallTarget::Disk("d".to_owned()), "no such fingerprint", 10));
        let (reason, message, _) = ready(&seen.apply(&plan(&seen, "n1", at(0))), "n1", "d");
        assert_eq!((reason.as_str(), message.as_str()), ("Ready", "the last change was refused: no such fingerprint"));
    }

    #[test]
    fn only_what_belongs_to_its_type_is_asked_of_a_disk() {
        let mut spec = far("nqn.a");
        (spec.path, spec.size) = ("/x".to_owned(), 5);
        let asked = wish(&spec, String::new());
        assert_eq!((asked.path.as_str(), asked.size, asked.nvme.is_some()), ("", 0, true));
        spec.type_ = DiskType::Block;
        let asked = wish(&spec, String::new());
        assert_eq!((asked.path.as_str(), asked.size, asked.nvme.is_some()), ("/x", 0, false));
    }

    fn write_count(actions: &[Action]) -> usize {
        actions.iter().filter(|action| matches!(action, Action::PatchStatus { .. })).count()
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
