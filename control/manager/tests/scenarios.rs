//! Whole managers against the embedded API server and fake agents.
#![allow(clippy::unwrap_used)]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use addax_api::node::CONDITION_READY;
use addax_api::recovery::{RecoveryAccount, RecoveryOutcome};
use addax_api::volume::VolumeState;
use addax_api::{Engine, InstanceManager, Node, Replica, ResourceExt, Setting, Volume, VolumeAttachment, condition};
use addax_apiserver::fault::{Fault, Outcome};
use common::Cluster;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Event;
use kube::api::{Patch, PatchParams};
use tonic::Status;

fn state(volume: &Volume) -> VolumeState {
    volume.status.as_ref().map_or(VolumeState::Creating, |status| status.state)
}

fn is_attached(volume: &Volume, node: &str) -> bool {
    let status = volume.status.clone().unwrap_or_default();
    status.state == VolumeState::Attached && status.current_node_id == node && status.endpoint.is_some()
}

fn is_ready(node: &Node) -> bool {
    node.status.as_ref().is_some_and(|status| condition::is_true(&status.conditions, CONDITION_READY))
}

async fn until_ready(cluster: &Cluster) {
    cluster.until::<Node>("all nodes are ready", |nodes| nodes.len() == 3 && nodes.iter().all(is_ready)).await;
}

async fn until_attached(cluster: &Cluster, name: &str, node: &str) -> Volume {
    cluster.volume("the volume is attached", name, |volume| is_attached(volume, node)).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_volume_is_made_attached_detached_and_removed() {
    let cluster = Cluster::with_tls().await;
    until_ready(&cluster).await;
    cluster.create_volume("v").await;
    let made = cluster.volume("the volume is made", "v", |volume| state(volume) == VolumeState::Detached).await;
    let record = made.status.unwrap().config.unwrap();
    assert_eq!((record.epoch, record.in_sync.len()), (0, 2));
    let data: usize = cluster.agents.values().map(|agent| agent.data().len()).sum();
    assert_eq!(data, 2);

    cluster.attach("v", "n1").await;
    let attached = until_attached(&cluster, "v", "n1").await;
    assert_eq!(attached.status.as_ref().unwrap().config.as_ref().unwrap().epoch, 1);
    assert_eq!(attached.status.unwrap().owner_id, "n1");
    cluster
        .until::<VolumeAttachment>("the ticket is satisfied", |all| {
            all.iter().any(|a| a.status.as_ref().is_some_and(|status| status.tickets.values().any(|t| t.satisfied)))
        })
        .await;
    let engines = cluster.until::<Engine>("one engine", |engines| engines.len() == 1).await;
    assert_eq!(engines[0].spec.allowed_hosts, ["nqn.2014-08.org.example:host"]);
    assert_eq!(cluster.agents["n1"].engines(), ["v"]);

    cluster.attach("v", "").await;
    let detached = cluster.volume("detached", "v", |volume| state(volume) == VolumeState::Detached).await;
    assert!(detached.status.unwrap().config.unwrap().clean);
    cluster.until::<Engine>("no engine", <[Engine]>::is_empty).await;

    cluster.delete::<Volume>("v").await;
    cluster.until::<Volume>("no volume", <[Volume]>::is_empty).await;
    cluster.until::<Replica>("no replica", <[Replica]>::is_empty).await;
    assert!(cluster.agents.values().all(|agent| agent.data().is_empty()));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn at_rest_nothing_is_written_but_leases() {
    let cluster = Cluster::start().await;
    until_ready(&cluster).await;
    let managers = cluster.until::<InstanceManager>("one each", |all| all.len() == 3).await;
    assert!(managers.iter().all(|object| !object.status.clone().unwrap_or_default().address.is_empty()));
    let known = addax_api::setting::SETTINGS.len();
    cluster.until::<Setting>("all settings", |all| all.len() == known).await;
    cluster.create_volume("v").await;
    cluster.attach("v", "n2").await;
    until_attached(&cluster, "v", "n2").await;
    cluster.until_at_rest().await;
    let renewed = |leases: &[Lease]| leases.iter().map(|lease| lease.resource_version()).collect::<Vec<_>>();
    let writes = cluster.writes();
    let before = renewed(&cluster.until::<Lease>("leases", |leases| leases.len() == 3).await);
    // Two renewals of everybody later.
    cluster.until::<Lease>("all are renewed", |now| renewed(now).iter().zip(&before).all(|(a, b)| a != b)).await;
    let before = renewed(&cluster.until::<Lease>("leases", |leases| leases.len() == 3).await);
    cluster.until::<Lease>("all are renewed", |now| renewed(now).iter().zip(&before).all(|(a, b)| a != b)).await;
    assert_eq!(cluster.writes()[writes.len()..], Vec::<String>::new());
}

fn request(id: &str, replica: &str) -> serde_json::Value {
    let not_after = jiff::Timestamp::now() + jiff::SignedDuration::from_secs(60);
    serde_json::json!({"spec": {"recovery": {"id": id, "action": "forceOpen", "replica": replica, "confirm": "v",
        "requestedBy": "test", "notAfter": not_after}}})
}

/// Puts an operator's request in, and waits for its account.
async fn ask(cluster: &Cluster, id: &str, replica: &str) -> RecoveryAccount {
    let patch = Patch::Merge(request(id, replica));
    cluster.api::<Volume>().patch("v", &PatchParams::default(), &patch).await.unwrap();
    let found = |volume: &Volume| {
        let accounts = volume.status.as_ref().map_or(&[][..], |status| &status.recoveries);
        accounts.iter().find(|account| account.id == id && account.told).cloned()
    };
    found(&cluster.volume("answered", "v", |volume| found(volume).is_some()).await).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_operators_request_is_carried_out_by_an_agent_once_and_told() {
    let cluster = Cluster::start().await;
    until_ready(&cluster).await;
    cluster.create_volume("v").await;
    let made = cluster.volume("made", "v", |volume| state(volume) == VolumeState::Detached).await;
    let copies = made.status.unwrap().config.unwrap().in_sync;
    // The API itself wants the volume's name.
    let mut unconfirmed = request("r0", &copies[0]);
    unconfirmed["spec"]["recovery"]["confirm"] = "yes".into();
    let patch = Patch::Merge(unconfirmed);
    let refusal = cluster.api::<Volume>().patch("v", &PatchParams::default(), &patch).await.unwrap_err().to_string();
    assert!(refusal.contains("must be the volume's name"), "{refusal}");

    let stranger = ask(&cluster, "r1", "x").await;
    assert_eq!(stranger.outcome, RecoveryOutcome::Refused);
    assert!(stranger.message.contains(&copies[0]), "{}", stranger.message);
    cluster.agents.values().for_each(|agent| agent.refuse([Status::failed_precondition("a member can be reached")]));
    let refused = ask(&cluster, "r2", &copies[0]).await;
    assert_eq!((refused.outcome, refused.message.as_str()), (RecoveryOutcome::Refused, "a member can be reached"));
    let calls = || cluster.agents.values().flat_map(|agent| agent.calls()).filter(|call| call.starts_with("Recover"));
    assert_eq!(calls().count(), 1, "what was refused is not asked again");
    cluster.agents.values().for_each(common::agent::FakeAgent::refuse_nothing);

    let done = ask(&cluster, "r3", &copies[0]).await;
    assert_eq!((done.outcome, done.requested_by.as_str()), (RecoveryOutcome::Done, "test"));
    let forced = cluster.volume("forced", "v", |volume| state(volume) == VolumeState::Detached).await.status.unwrap();
    assert_eq!((forced.config.unwrap().in_sync, forced.discarded.len()), (vec![copies[0].clone()], 1));
    cluster
        .until::<Event>("told", |events| {
            let reasons: Vec<&str> = events.iter().filter_map(|event| event.reason.as_deref()).collect();
            reasons.contains(&"ForcedOpen")
                && reasons.iter().filter(|reason| **reason == "RecoveryRefused").count() == 2
        })
        .await;
    // The other copy stays although somebody deletes its object.
    cluster.delete::<Replica>(&copies[1]).await;
    cluster
        .until::<Replica>("blocked", |replicas| {
            let blocked = |replica: &Replica| {
                let conditions = replica.status.as_ref().map_or(&[][..], |status| &status.conditions);
                condition::get(conditions, "DeletionBlocked").is_some_and(|blocked| blocked.reason == "Discarded")
            };
            replicas.iter().any(blocked)
        })
        .await;
    let data: usize = cluster.agents.values().map(|agent| agent.data().len()).sum();
    assert_eq!(data, 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_a_node_that_dies_another_takes_over_and_gives_back() {
    let mut cluster = Cluster::start().await;
    until_ready(&cluster).await;
    cluster.create_volume("v").await;
    cluster.attach("v", "n1").await;
    until_attached(&cluster, "v", "n1").await;

    cluster.kill_manager("n1");
    cluster.agents["n1"].reset();
    let nodes = cluster
        .until::<Node>("n1 is down", |nodes| nodes.iter().any(|node| node.name_any() == "n1" && !is_ready(node)))
        .await;
    let dead = nodes.iter().find(|node| node.name_any() == "n1").unwrap().status.clone().unwrap();
    assert!(["n2", "n3"].contains(&dead.owner_id.as_str()));
    let ready = condition::get(&dead.conditions, CONDITION_READY).unwrap();
    assert_eq!(ready.reason, "ManagerDown");

    cluster.attach("v", "n2").await;
    let moved = until_attached(&cluster, "v", "n2").await;
    assert_eq!(moved.status.as_ref().unwrap().owner_id, "n2");
    assert!(moved.status.unwrap().config.unwrap().epoch >= 2);
    assert_eq!(cluster.agents["n2"].engines(), ["v"]);

    cluster.start_manager("n1");
    until_ready(&cluster).await;
    cluster
        .until::<Node>("n1 owns itself", |nodes| {
            nodes.iter().all(|node| node.status.as_ref().is_some_and(|status| status.owner_id == node.name_any()))
        })
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn faults_of_the_api_server_cost_time_and_nothing_else() {
    let count = Arc::new(AtomicUsize::new(0));
    let hook = {
        let count = count.clone();
        Arc::new(move |request: &addax_apiserver::fault::RequestInfo| {
            if request.resource == "leases" {
                return Fault::default();
            }
            let nth = count.fetch_add(1, Ordering::Relaxed);
            Fault::from(match (request.verb, nth % 7) {
                ("watch", _) => Outcome::CutWatch(3),
                ("patch" | "delete", 0) => Outcome::Conflict,
                ("patch" | "create", 2) => Outcome::LoseAnswer,
                ("patch" | "create" | "get", 4) => Outcome::InternalError,
                _ => Outcome::Serve,
            })
        })
    };
    let cluster = Cluster::with_hook(hook).await;
    until_ready(&cluster).await;
    cluster.create_volume("v").await;
    cluster.attach("v", "n3").await;
    until_attached(&cluster, "v", "n3").await;
    let replicas = cluster.until::<Replica>("two replicas", |replicas| replicas.len() == 2).await;
    let data: usize = cluster.agents.values().map(|agent| agent.data().len()).sum();
    assert_eq!(data, replicas.len());
    assert!(count.load(Ordering::Relaxed) > 100);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_that_refuses_is_asked_again() {
    let cluster = Cluster::start().await;
    until_ready(&cluster).await;
    for agent in cluster.agents.values() {
        agent.refuse([Status::unavailable("the data plane is starting"), Status::internal("no")]);
    }
    cluster.create_volume("v").await;
    cluster.volume("the volume is made", "v", |volume| state(volume) == VolumeState::Detached).await;
    let starts: usize = cluster.agents.values().map(|agent| agent.calls().len()).sum();
    assert_eq!(starts, 6);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_manager_of_a_node_waits_for_the_first() {
    let mut cluster = Cluster::start().await;
    until_ready(&cluster).await;
    let holder = |leases: &[Lease]| {
        let own = leases.iter().find(|lease| lease.name_any() == "n1").and_then(|lease| lease.spec.clone());
        own.and_then(|spec| spec.holder_identity).unwrap_or_default()
    };
    let first = holder(&cluster.until::<Lease>("three leases", |leases| leases.len() == 3).await);
    cluster.start_second_manager("n1");
    // Longer than the lease holds without renewals.
    tokio::time::sleep(Duration::from_secs(4)).await;
    assert_eq!(holder(&cluster.until::<Lease>("three leases", |leases| leases.len() == 3).await), first);
    cluster.stop_manager("n1").await;
    cluster
        .until::<Lease>("the second has it", |leases| !["", first.as_str()].contains(&holder(leases).as_str()))
        .await;
    until_ready(&cluster).await;
}
