use addax_api::Time;
use addax_api::engine::Mode;
use addax_api::volume::CONDITION_DELETION_BLOCKED;
use addax_api::volume_attachment::TicketType;

use super::*;
use crate::build::{agent, at, attachment, engine, node, observed, replica, setting, volume};

const GIB: i64 = 1 << 30;

/// Three nodes with a disk each.
fn nodes() -> Observed {
    ["n1", "n2", "n3"].iter().fold(observed(), |seen, name| seen.with(node(name).disk("d", 100 * GIB)))
}

/// A volume with replicas a, b, c in sync and running on n1, n2, n3.
fn detached() -> Observed {
    nodes()
        .with(attachment("v"))
        .with(volume("v").in_sync(&["a", "b", "c"]).state(VolumeState::Detached))
        .with(replica("a", "v").on("n1", "d").running().was_healthy(0))
        .with(replica("b", "v").on("n2", "d").running().was_healthy(0))
        .with(replica("c", "v").on("n3", "d").running().was_healthy(0))
}

/// The same, attached to n1.
fn attached() -> Observed {
    detached().with(volume("v").in_sync(&["a", "b", "c"]).attached_to("n1")).with(agent("n1")).with(
        engine("v").on("n1").replicas(&["a", "b", "c"]).modes(&[("a", Mode::RW), ("b", Mode::RW), ("c", Mode::RW)]),
    )
}

/// Attached, c is out of the record and the engine says so.
fn degraded() -> Observed {
    attached().with(volume("v").in_sync(&["a", "b"]).attached_to("n1")).with(
        engine("v").on("n1").replicas(&["a", "b", "c"]).modes(&[("a", Mode::RW), ("b", Mode::RW), ("c", Mode::ERR)]),
    )
}

/// Attached, c has failed and the engine has let it go.
fn without_c() -> Observed {
    degraded().with(engine("v").on("n1").replicas(&["a", "b"]).modes(&[("a", Mode::RW), ("b", Mode::RW)]))
}

fn step(seen: Observed, now: i64) -> (Vec<Action>, Observed) {
    let actions = plan(&seen, "v", at(now));
    let after = seen.apply(&actions);
    (actions, after)
}

fn status(seen: &Observed) -> VolumeStatus {
    seen.volumes.get("v").unwrap().status.clone().unwrap_or_default()
}

fn created(actions: &[Action]) -> Vec<Replica> {
    let replicas = actions.iter().filter_map(|action| match action {
        Action::Create(object) => match object.as_ref() {
            Object::Replica(replica) => Some(replica.clone()),
            _ => None,
        },
        _ => None,
    });
    replicas.collect()
}

fn deleted(actions: &[Action]) -> Vec<String> {
    let names = actions.iter().filter_map(|action| match action {
        Action::Delete { object } => Some(object.name.clone()),
        _ => None,
    });
    names.collect()
}

fn message(seen: &Observed, type_: &str) -> String {
    condition::get(&status(seen).conditions, type_).map(|condition| condition.message.clone()).unwrap_or_default()
}

#[test]
fn a_new_volume_gets_its_attachment_and_all_its_replicas_at_once() {
    let (actions, after) = step(nodes().with(volume("v")), 0);
    let replicas = created(&actions);
    let mut places: Vec<&str> = replicas.iter().map(|replica| replica.spec.node_id.as_str()).collect();
    places.sort_unstable();
    assert_eq!(places, ["n1", "n2", "n3"]);
    assert!(replicas.iter().all(|replica| write::is_held(&replica.metadata)));
    assert!(after.attachments.get("v").is_some());
    assert_eq!(status(&after).state, VolumeState::Creating);
    let (actions, after) = step(after, 1);
    assert_eq!(created(&actions), []);
    assert_eq!(step(after, 2).0, []);
}

#[test]
fn a_pass_made_twice_on_one_snapshot_makes_nothing_twice() {
    let seen = nodes().with(volume("v"));
    let names = |seen: &Observed| -> Vec<String> {
        created(&plan(seen, "v", at(0))).iter().map(ResourceExt::name_any).collect()
    };
    assert_eq!(names(&seen), names(&seen));
    let later = seen.clone().with({
        let mut other = seen.volumes.get("v").unwrap().clone();
        other.metadata.resource_version = Some("2".to_owned());
        Raw(other)
    });
    assert!(names(&later).iter().all(|name| !names(&seen).contains(name)));
}

#[test]
fn a_pass_that_ended_half_way_makes_only_what_is_missing_under_other_names() {
    let seen = nodes().with(volume("v"));
    let actions = plan(&seen, "v", at(0));
    let first_create = actions.iter().position(|a| matches!(a, Action::Create(o) if matches!(**o, Object::Replica(_))));
    let half = seen.apply(&actions[..=first_create.unwrap()]);
    let made: Vec<String> = half.replicas.names().map(str::to_owned).collect();
    assert_eq!(made.len(), 1);
    let rest: Vec<String> = created(&plan(&half, "v", at(0))).iter().map(ResourceExt::name_any).collect();
    assert_eq!(rest.len(), 2);
    assert!(rest.iter().all(|name| !made.contains(name)));
}

struct Raw(Volume);

impl crate::build::Part for Raw {
    fn put(self, observed: &mut Observed) {
        observed.volumes.put(std::sync::Arc::new(self.0));
    }
}

#[test]
fn without_room_for_all_replicas_none_is_made_and_the_reason_is_told() {
    let (actions, after) = step(nodes().with(volume("v").replicas(4)), 0);
    assert_eq!(created(&actions), []);
    assert!(
        message(&after, CONDITION_SCHEDULED).contains("already holding a copy"),
        "{}",
        message(&after, CONDITION_SCHEDULED)
    );
    assert_eq!(step(after, 1).0, []);
}

#[test]
fn the_record_is_made_when_every_replica_runs_and_is_fresh() {
    let seen = nodes()
        .with(volume("v"))
        .with(attachment("v"))
        .with(replica("a", "v").on("n1", "d").running().fresh(true))
        .with(replica("b", "v").on("n2", "d").running().fresh(true));
    let waiting = seen.clone().with(replica("c", "v").on("n3", "d"));
    let (_, after) = step(waiting, 0);
    assert_eq!(status(&after).config, None);
    let (_, after) = step(seen.with(replica("c", "v").on("n3", "d").running().fresh(true)), 0);
    let config = status(&after).config.unwrap();
    assert_eq!(config.in_sync, ["a", "b", "c"]);
    assert_eq!((config.epoch, config.config_number, config.lineage.as_str()), (0, 1, "uid-v"));
    assert_eq!(status(&after).state, VolumeState::Detached);
}

#[test]
fn a_lost_record_is_never_made_anew_while_a_replica_holds_data() {
    let seen = nodes()
        .with(volume("v"))
        .with(attachment("v"))
        .with(replica("a", "v").on("n1", "d").running().fresh(true))
        .with(replica("b", "v").on("n2", "d").running().fresh(false))
        .with(replica("c", "v").on("n3", "d").running().fresh(true));
    let (actions, after) = step(seen, 0);
    assert_eq!(status(&after).config, None);
    assert!(message(&after, CONDITION_INITIALISED).contains("the copy b was in use before"));
    assert!(deleted(&actions).is_empty() && created(&actions).is_empty());
}

#[test]
fn a_new_replica_on_a_dead_node_is_replaced_when_there_is_another_place() {
    let seen = nodes()
        .with(volume("v").replicas(2))
        .with(attachment("v"))
        .with(replica("a", "v").on("n1", "d").running().fresh(true))
        .with(replica("b", "v").on("n2", "d"))
        .with(node("n2").disk("d", 100 * GIB).dead());
    let (actions, _) = step(seen, 0);
    assert_eq!(created(&actions)[0].spec.node_id, "n3");
    assert_eq!(deleted(&actions), ["b"]);
}

#[test]
fn a_replica_of_unknown_content_on_a_dead_node_is_waited_for() {
    let seen = nodes()
        .with(volume("v").replicas(2))
        .with(attachment("v"))
        .with(replica("a", "v").on("n1", "d").running().fresh(true))
        .with(replica("b", "v").on("n2", "d").of_an_earlier_volume())
        .with(node("n2").disk("d", 100 * GIB).dead());
    let (actions, after) = step(seen, 0);
    assert_eq!(created(&actions), []);
    assert_eq!(deleted(&actions), [] as [&str; 0]);
    assert_eq!(status(&after).config, None);
}

#[test]
fn attaching_makes_an_engine_with_the_recorded_replicas_and_the_granted_hosts() {
    let tickets = attachment("v").ticket_for("cli", TicketType::Api, "n2", &["nqn.host"]).ticket_for(
        "other",
        TicketType::Api,
        "n3",
        &["nqn.other"],
    );
    let seen = detached()
        .with(tickets)
        .with(volume("v").in_sync(&["a", "b", "c"]).state(VolumeState::Detached).wanted_on("n2"));
    let (_, after) = step(seen, 0);
    let engine = after.engine_of("v").unwrap();
    assert_eq!(engine.spec.node_id, "n2");
    assert_eq!(engine.spec.replica_addresses.keys().collect::<Vec<_>>(), ["a", "b", "c"]);
    assert_eq!(engine.spec.allowed_hosts, ["nqn.host"]);
    assert_eq!(engine.spec.uuid, "uid-v");
    assert_eq!(status(&after).state, VolumeState::Attaching);
}

#[test]
fn hosts_follow_the_tickets_until_the_last_one_goes() {
    let hosts = |tickets| {
        let (_, after) = step(attached().with(engine("v").on("n1").replicas(&["a"]).host("nqn.old")).with(tickets), 0);
        after.engine_of("v").unwrap().spec.allowed_hosts.clone()
    };
    let ticket = |node, hosts: &[&str]| attachment("v").ticket_for("cli", TicketType::Api, node, hosts);
    assert_eq!(hosts(ticket("n1", &["nqn.new"])), ["nqn.new"]);
    assert_eq!(hosts(ticket("n1", &[])), [] as [&str; 0]);
    // It is closed next: hosts are to keep their commands, and not to be refused before.
    assert_eq!(hosts(ticket("n2", &["nqn.new"])), ["nqn.old"]);
    assert_eq!(hosts(attachment("v")), ["nqn.old"]);
}

#[test]
fn an_engine_waits_for_a_replica_that_may_still_come_but_not_for_a_dead_one() {
    let wanted = || detached().with(volume("v").in_sync(&["a", "b", "c"]).wanted_on("n1"));
    let slow = wanted().with(replica("c", "v").on("n3", "d"));
    let (actions, after) = step(slow, 0);
    assert!(after.engine_of("v").is_none());
    assert!(actions.contains(&Action::RequeueAt(at(10))));
    let (_, after) = step(after, 10);
    assert!(after.engine_of("v").is_some());
    let dead = wanted().with(replica("c", "v").on("n3", "d")).with(node("n3").disk("d", GIB).dead());
    assert!(step(dead, 0).1.engine_of("v").is_some());
}

#[test]
fn without_any_good_copy_the_volume_is_faulted_and_no_engine_is_made() {
    let dead = ["n2", "n3"].iter().fold(detached(), |seen, name| seen.with(node(name).disk("d", GIB).dead()));
    let seen = dead
        .with(volume("v").in_sync(&["b", "c"]).wanted_on("n1"))
        .with(replica("b", "v").on("n2", "d").state(InstanceState::Unknown))
        .with(replica("c", "v").on("n3", "d").state(InstanceState::Unknown));
    let (_, after) = step(seen, 0);
    let (_, after) = step(after, 1000);
    assert!(after.engine_of("v").is_none());
    assert_eq!(status(&after).robustness, Robustness::Faulted);
}

#[test]
fn a_running_engine_makes_the_volume_attached_and_then_nothing_is_asked() {
    let (_, after) = step(attached(), 0);
    let now = status(&after);
    assert_eq!((now.state, now.robustness), (VolumeState::Attached, Robustness::Healthy));
    assert_eq!(now.endpoint.unwrap().nqn, "nqn.2026-11.io.addax:volume:v");
    assert_eq!(step(after, 5).0, []);
}

#[test]
fn a_data_plane_that_starts_again_leaves_the_volume_attached() {
    let (_, after) = step(attached(), 0);
    for state in [InstanceState::Starting, InstanceState::Unknown] {
        let seen = after.clone().with(engine("v").on("n1").replicas(&["a", "b", "c"]).state(state));
        let (_, after) = step(seen, 1);
        assert_eq!(status(&after).state, VolumeState::Attached);
        assert!(status(&after).endpoint.is_some());
    }
}

#[test]
fn detaching_stops_the_engine_then_removes_it_then_is_detached() {
    let (_, seen) = step(attached(), 0);
    let unwanted = {
        let mut other = seen.volumes.get("v").unwrap().clone();
        other.spec.node_id = String::new();
        Raw(other)
    };
    let (actions, after) = step(seen.with(unwanted), 1);
    assert_eq!(deleted(&actions), Vec::<String>::new());
    assert_eq!(after.engine_of("v").unwrap().spec.desire_state, addax_api::DesiredState::Stopped);
    assert_eq!(status(&after).state, VolumeState::Detaching);
    let stopped = after.with(engine("v").on("n1").stop_wanted().state(InstanceState::Stopped));
    let (actions, after) = step(stopped, 2);
    assert_eq!(deleted(&actions), ["v-e"]);
    assert_eq!(status(&after).state, VolumeState::Detaching);
    let mut gone = after;
    gone.engines.remove("v-e");
    let (_, after) = step(gone, 3);
    assert_eq!(status(&after).state, VolumeState::Detached);
    assert_eq!(step(after, 4).0, []);
}

#[test]
fn an_engine_on_a_dead_node_goes_only_when_the_volume_is_wanted_elsewhere() {
    let dead = attached()
        .with(node("n1").disk("d", GIB).dead())
        .with(engine("v").on("n1").replicas(&["a", "b"]).state(InstanceState::Unknown));
    let (actions, after) = step(dead.clone(), 0);
    assert_eq!(deleted(&actions), Vec::<String>::new());
    assert_eq!(status(&after).robustness, Robustness::Unknown);
    let moved = dead.with(volume("v").in_sync(&["a", "b", "c"]).attached_to("n1").wanted_on("n2"));
    let (actions, _) = step(moved, 0);
    assert_eq!(deleted(&actions), ["v-e"]);
}

#[test]
fn a_replica_that_is_out_fails_once_and_leaves_the_engine() {
    let (_, after) = step(degraded(), 5);
    let spec = after.replicas.get("c").unwrap().spec.clone();
    assert_eq!((spec.failed_at, spec.rebuild_retry_count), (Some(Time(at(5))), 0));
    assert!(!after.engine_of("v").unwrap().spec.replica_addresses.contains_key("c"));
    assert_eq!(status(&after).robustness, Robustness::Degraded);
    // The engine's status still calls it out: it is not used again before the engine has let it go.
    let (_, again) = step(after, 6);
    assert_eq!(again.replicas.get("c").unwrap().spec.failed_at, Some(Time(at(5))));
    assert_eq!(again.replicas.get("c").unwrap().spec.rebuild_retry_count, 0);
}

#[test]
fn a_failed_replica_that_runs_again_is_used_before_a_new_one_is_made() {
    let seen = without_c()
        .with(node("n4").disk("d", 100 * GIB))
        .with(replica("c", "v").on("n3", "d").running().was_healthy(0).failed(5));
    let (actions, after) = step(seen, 6);
    assert_eq!(created(&actions), []);
    assert_eq!(after.replicas.get("c").unwrap().spec.failed_at, None);
    assert!(after.engine_of("v").unwrap().spec.replica_addresses.contains_key("c"));
    assert_eq!(step(after, 7).0, []);
}

#[test]
fn a_new_replica_is_made_only_after_the_wait_and_the_failed_one_stays_until_the_volume_is_complete() {
    let seen = without_c()
        .with(setting("replica-replenishment-wait-interval", "60"))
        .with(node("n4").disk("d", 100 * GIB))
        .with(node("n3").disk("d", 100 * GIB).dead())
        .with(replica("c", "v").on("n3", "d").state(InstanceState::Unknown).was_healthy(0).failed(5));
    let (actions, after) = step(seen, 6);
    assert_eq!(created(&actions), []);
    assert!(actions.contains(&Action::RequeueAt(at(66))));
    let (actions, _) = step(after.clone(), 65);
    assert_eq!(created(&actions), []);
    let (actions, after) = step(after, 66);
    assert_eq!(created(&actions)[0].spec.node_id, "n4");
    assert_eq!(deleted(&actions), Vec::<String>::new());
    assert_eq!(step(after, 67).0, []);
}

#[test]
fn a_complete_volume_removes_what_it_does_not_need() {
    let seen = attached().with(replica("old", "v").on("n2", "d").running().failed(1));
    assert_eq!(deleted(&step(seen, 2).0), ["old"]);
}

#[test]
fn of_surplus_copies_one_goes_at_a_time_and_not_the_engines_own() {
    let seen = attached().with(volume("v").replicas(1).in_sync(&["a", "b", "c"]).attached_to("n1"));
    let (actions, after) = step(seen, 0);
    assert_eq!(deleted(&actions), ["c"]);
    let (actions, after) = step(after, 1);
    assert_eq!(deleted(&actions), Vec::<String>::new());
    assert!(!after.engine_of("v").unwrap().spec.replica_addresses.contains_key("c"));
}

#[test]
fn the_last_copies_in_sync_never_leave_the_engine() {
    let leaving = |name: &str, node: &str| replica(name, "v").on(node, "d").running().was_healthy(0).deleting();
    let all = attached().with(leaving("a", "n1")).with(leaving("b", "n2")).with(leaving("c", "n3"));
    let (_, after) = step(all.clone(), 0);
    assert_eq!(after.engine_of("v").unwrap().spec.replica_addresses.len(), 3);
    let one_stays = all.with(replica("a", "v").on("n1", "d").running().was_healthy(0));
    let (_, after) = step(one_stays, 0);
    assert_eq!(after.engine_of("v").unwrap().spec.replica_addresses.keys().collect::<Vec<_>>(), ["a"]);
}

#[test]
fn a_rebuild_that_fails_counts_and_waits_longer_each_time() {
    // c was given back to the engine, and is out again.
    let mut again = replica("c", "v").on("n3", "d").running().was_healthy(0).failed(5).retries(1);
    again.in_use();
    let (_, after) = step(degraded().with(again), 100);
    let spec = after.replicas.get("c").unwrap().spec.clone();
    assert_eq!((spec.failed_at, spec.rebuild_retry_count), (Some(Time(at(100))), 2));
    let failed_again =
        without_c().with(replica("c", "v").on("n3", "d").running().was_healthy(0).failed(100).retries(2));
    let (actions, after) = step(failed_again, 101);
    assert!(actions.contains(&Action::RequeueAt(at(120))), "{actions:?}");
    let (_, after) = step(after, 120);
    assert_eq!(after.replicas.get("c").unwrap().spec.failed_at, None);
}

#[test]
fn one_rebuild_at_a_time_and_no_more_than_a_node_takes() {
    let two_lost = || {
        without_c()
            .with(volume("v").in_sync(&["a"]).attached_to("n1"))
            .with(engine("v").on("n1").replicas(&["a"]).modes(&[("a", Mode::RW)]))
            .with(replica("b", "v").on("n2", "d").running().was_healthy(0).failed(5))
            .with(replica("c", "v").on("n3", "d").running().was_healthy(0).failed(5))
    };
    let (_, after) = step(two_lost(), 6);
    assert_eq!(after.engine_of("v").unwrap().spec.replica_addresses.keys().collect::<Vec<_>>(), ["a", "b"]);
    let (_, after) = step(after, 7);
    assert_eq!(after.engine_of("v").unwrap().spec.replica_addresses.len(), 2);
    let (_, after) = step(two_lost().with(setting("concurrent-replica-rebuild-per-node-limit", "0")), 6);
    assert_eq!(after.engine_of("v").unwrap().spec.replica_addresses.len(), 1);
}

#[test]
fn a_deletion_waits_while_the_volume_is_attached() {
    let tickets = attachment("v").ticket("cli", TicketType::Api, "n1");
    let seen = attached().with(tickets).with(volume("v").in_sync(&["a", "b", "c"]).attached_to("n1").deleting());
    let (actions, after) = step(seen, 0);
    assert_eq!(deleted(&actions), Vec::<String>::new());
    assert_eq!(status(&after).state, VolumeState::Attached);
    assert_eq!(
        message(&after, CONDITION_DELETION_BLOCKED),
        "the volume is attached to node n1 for ticket cli: detach it first"
    );
    assert_eq!(step(after, 1).0, []);
}

#[test]
fn a_deletion_writes_its_point_of_no_return_before_anything_goes() {
    let seen = detached().with(volume("v").in_sync(&["a", "b", "c"]).state(VolumeState::Detached).deleting());
    let (actions, after) = step(seen, 0);
    assert_eq!(deleted(&actions), Vec::<String>::new());
    assert_eq!(status(&after).state, VolumeState::Deleting);
    let (actions, mut after) = step(after, 1);
    assert_eq!(deleted(&actions), ["a", "b", "c", "v"]);
    assert!(after.volumes.get("v").is_some());
    for name in ["a", "b", "c"] {
        after.replicas.remove(name);
    }
    let (_, after) = step(after, 2);
    assert!(after.volumes.get("v").is_none());
}
