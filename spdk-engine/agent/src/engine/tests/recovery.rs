//! Recovery over fake data planes: what is asked of whom, in which order, and what is refused.
use addax_api::recovery::RecoveryOutcome;
use mirror_core::meta::{ReplicaState, Superblock};
use mirror_core::{Config, ConfigNumber, EngineInstance, Epoch, Lineage, ReplicaId, VolumeId};

use super::*;
use crate::arbiter::Arbiter;

fn ids(names: &[&str]) -> std::collections::BTreeSet<ReplicaId> {
    names.iter().map(|name| ReplicaId::new(name).unwrap()).collect()
}

/// What a replica remembers: it was promoted to epoch 1 by an engine of lineage `l`.
fn superblock(replica: &str, number: u64, in_sync: &[&str], state: ReplicaState) -> Superblock {
    Superblock {
        volume: VolumeId::new("v").unwrap(),
        replica: ReplicaId::new(replica).unwrap(),
        record: Config {
            lineage: Lineage::new("l").unwrap(),
            epoch: Epoch(1),
            engine_instance: EngineInstance::new("e").unwrap(),
            config_number: ConfigNumber(number),
            in_sync: ids(in_sync),
            rebuilding: std::collections::BTreeSet::new(),
            min_in_sync: 1,
            size_blocks: SIZE / 4096,
            clean: state == ReplicaState::ClosedClean,
            tree: Default::default(),
        },
        block_size: 4096,
        region_blocks: 256,
        state,
        instance: String::new(),
        sequence: 1,
    }
}

impl Cluster {
    /// Opened once and closed, so that every replica holds data.
    async fn used(nodes: u8) -> Self {
        let cluster = cluster(nodes).await;
        cluster.open(0).await;
        cluster.nodes[0].services.engines.stop("v").await.unwrap();
        cluster
    }

    fn remember(&self, superblock: &Superblock) {
        for node in &self.nodes {
            let mut state = node.plane.state.lock().unwrap();
            state.metas.insert(superblock.replica.as_str().to_owned(), superblock.encode().unwrap());
        }
    }

    fn recovery(&self, id: &str, action: pb::RecoverAction) -> pb::RecoverVolumeRequest {
        pb::RecoverVolumeRequest {
            volume: "v".to_owned(),
            id: id.to_owned(),
            action: action.into(),
            replicas: self.request().replicas,
            requested_by: "test".to_owned(),
            generation: 3,
            ..pb::RecoverVolumeRequest::default()
        }
    }

    fn force(&self, id: &str, replica: &str) -> pb::RecoverVolumeRequest {
        pb::RecoverVolumeRequest { replica: replica.to_owned(), ..self.recovery(id, pb::RecoverAction::ForceOpen) }
    }

    async fn ask(&self, node: usize, request: pb::RecoverVolumeRequest) -> Result<String, AgentError> {
        self.nodes[node].services.engines.recover(request).await.map(|answer| answer.message)
    }

    fn promoted(&self, node: usize) -> u64 {
        self.nodes[node].services.hub.replica(NAMES[node]).unwrap().promoted_epoch
    }
}

#[tokio::test]
async fn a_stale_replica_is_fenced_and_becomes_the_volume_and_the_lost_ones_are_set_aside() {
    let cluster = Cluster::used(3).await;
    let mut old = cluster.arbiter.get("v").unwrap();
    old.in_sync = ids(&["v-r-0", "v-r-1"]);
    old.config_number = ConfigNumber(4);
    cluster.arbiter.put("v", old.clone());
    cluster.remember(&superblock("v-r-2", 2, &NAMES, ReplicaState::Member));
    cluster.nodes[0].kill_plane();
    cluster.nodes[1].kill_plane();
    let message = cluster.ask(2, cluster.force("f1", "v-r-2")).await.unwrap();
    assert!(message.contains("v-r-2 is the volume now") && message.contains("configuration 2"), "{message}");
    let record = cluster.arbiter.get("v").unwrap();
    assert_eq!((record.in_sync.clone(), record.config_number), (ids(&["v-r-2"]), ConfigNumber(5)));
    assert!(record.lineage != old.lineage && record.epoch > old.epoch && !record.clean);
    assert_eq!(cluster.promoted(2), record.epoch.0, "fenced at the epoch of the record");
    let history = cluster.arbiter.read_history("v").await.unwrap();
    let account = &history.accounts[0];
    assert_eq!(
        (account.id.as_str(), account.outcome, account.requested_by.as_str()),
        ("f1", RecoveryOutcome::Done, "test")
    );
    assert_eq!(account.from.as_ref().unwrap().in_sync, ["v-r-0", "v-r-1"]);
    assert_eq!(account.to.as_ref().unwrap().in_sync, ["v-r-2"]);
    let aside: Vec<&str> = history.discarded.iter().map(|aside| aside.replica.as_str()).collect();
    assert_eq!(aside, ["v-r-0", "v-r-1"]);
    assert!(cluster.nodes[2].plane.state.lock().unwrap().controllers.is_empty(), "a connection is left");
    // Once is enough.
    assert_eq!(cluster.ask(2, cluster.force("f1", "v-r-2")).await.unwrap(), message);
    assert_eq!(cluster.arbiter.get("v").unwrap(), record);
    let only = pb::StartEngineRequest { replicas: vec![cluster.nodes[2].member("v-r-2")], ..cluster.request() };
    cluster.nodes[2].services.engines.start(only).await.unwrap();
    assert_eq!(modes(&cluster.nodes[2].running().await), [("v-r-2", pb::Mode::InSync)]);
}

/// Rule 16: strict mode, `v-r-0` is out of reach with an engine that did not close. That one still answers reads from it for
/// as long as `v-r-1` confirmed: until then the record that makes `v-r-1` the volume does not stand.
#[tokio::test]
async fn rule_16_a_forced_record_stands_only_when_the_lease_of_an_old_engine_is_over() {
    let cluster = Cluster::used(2).await;
    let old = Config { min_in_sync: 2, clean: false, ..cluster.arbiter.get("v").unwrap() };
    cluster.arbiter.put("v", old.clone());
    cluster.nodes[0].kill_plane();
    let began = std::time::Instant::now();
    let engines = cluster.nodes[1].services.engines.clone();
    let asked = {
        let request = cluster.force("f1", "v-r-1");
        tokio::spawn(async move { engines.recover(request).await })
    };
    while cluster.promoted(1) <= old.epoch.0 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    tokio::time::sleep(Duration::from_secs(1)).await;
    let during = cluster.arbiter.get("v").unwrap();
    assert_eq!((during.in_sync, during.lineage), (old.in_sync, old.lineage), "fenced, but not in place yet");
    asked.await.unwrap().unwrap();
    let lease = mirror_core::Options::default().lease_ns;
    assert!(began.elapsed() > Duration::from_nanos(lease), "after {:?}", began.elapsed());
    assert_eq!(cluster.arbiter.get("v").unwrap().in_sync, ids(&["v-r-1"]));
}

#[tokio::test]
async fn what_force_is_refused_for_changes_nothing() {
    let cluster = Cluster::used(3).await;
    let mut record = cluster.arbiter.get("v").unwrap();
    record.in_sync = ids(&["v-r-0"]);
    cluster.arbiter.put("v", record.clone());
    let mut refuse = Vec::new();
    // A member can be reached, from another node.
    refuse.push((cluster.force("a", "v-r-2"), "replica v-r-0 is in sync and can be reached: no force is needed"));
    let late = pb::RecoverVolumeRequest { not_after_unix_ms: 1000, ..cluster.force("b", "v-r-2") };
    refuse.push((late, "was meant until"));
    for (request, why) in refuse {
        let error = cluster.ask(2, request).await.unwrap_err();
        assert!(matches!(error, AgentError::Forbidden(_)) && error.to_string().contains(why), "{error}");
    }
    cluster.nodes[0].kill_plane();
    let mut stranger = cluster.force("c", "v-r-9");
    assert!(cluster.ask(2, stranger.clone()).await.unwrap_err().to_string().contains("v-r-0, v-r-1, v-r-2"));
    stranger.lost = vec!["v-r-9".to_owned()];
    assert!(matches!(cluster.ask(2, stranger).await, Err(AgentError::Invalid { field: "lost", .. })));
    assert_eq!(cluster.arbiter.get("v").unwrap(), record, "a refusal changed the record");
    // Of a copy that was under way it is known only when it was read.
    cluster.remember(&superblock("v-r-2", 1, &NAMES[..2], ReplicaState::Rebuilding));
    let mixed = cluster.ask(2, cluster.force("d", "v-r-2")).await.unwrap_err();
    assert!(mixed.to_string().contains("holds a mixture"), "{mixed}");
    assert_eq!(cluster.arbiter.get("v").unwrap().in_sync, record.in_sync);
    // An engine is on the node that is asked.
    cluster.nodes[1].services.engines.start(cluster.request()).await.unwrap();
    let busy = cluster.ask(1, cluster.force("e", "v-r-2")).await.unwrap_err();
    assert!(busy.to_string().contains("detach the volume first"), "{busy}");
}

#[tokio::test]
async fn a_record_that_is_gone_is_rebuilt_from_what_all_replicas_know() {
    let cluster = Cluster::used(3).await;
    cluster.arbiter.lose("v");
    cluster.remember(&superblock("v-r-0", 4, &NAMES[..2], ReplicaState::ClosedClean));
    cluster.remember(&superblock("v-r-1", 4, &NAMES[..2], ReplicaState::ClosedClean));
    // No superblock on the third: it was not read.
    let unread = cluster.ask(0, cluster.recovery("r1", pb::RecoverAction::Recover)).await.unwrap_err();
    assert!(unread.to_string().contains("v-r-2: it has no superblock"), "{unread}");
    assert_eq!(cluster.arbiter.get("v"), None);
    cluster.remember(&superblock("v-r-2", 2, &NAMES, ReplicaState::Member));
    let message = cluster.ask(0, cluster.recovery("r2", pb::RecoverAction::Recover)).await.unwrap();
    assert!(message.contains("in sync v-r-0, v-r-1, configuration 5"), "{message}");
    let record = cluster.arbiter.get("v").unwrap();
    assert_eq!((record.in_sync.clone(), record.config_number.0, record.clean), (ids(&NAMES[..2]), 5, true));
    for node in 0..3 {
        assert_eq!(cluster.promoted(node), record.epoch.0, "all were fenced before they were read");
    }
    let engine = cluster.open(1).await;
    assert_eq!(engine.epoch, record.epoch.0 + 1);
}

#[tokio::test]
async fn a_replica_that_is_away_is_waited_for_or_named_as_lost() {
    let cluster = Cluster::used(3).await;
    cluster.arbiter.lose("v");
    cluster.remember(&superblock("v-r-0", 4, &NAMES[..2], ReplicaState::Member));
    cluster.remember(&superblock("v-r-2", 2, &NAMES, ReplicaState::Member));
    cluster.nodes[1].kill_plane();
    let request = cluster.recovery("r1", pb::RecoverAction::Recover);
    let before = cluster.promoted(0);
    let unread = cluster.ask(0, request.clone()).await.unwrap_err();
    assert!(unread.to_string().contains("v-r-1: it cannot be reached"), "{unread}");
    assert_eq!(cluster.promoted(0), before, "nothing is fenced for nothing");
    let lost = pb::RecoverVolumeRequest { lost: vec!["v-r-1".to_owned()], id: "r2".to_owned(), ..request };
    cluster.ask(0, lost).await.unwrap();
    assert_eq!(in_sync(&cluster.arbiter), ["v-r-0"]);
    assert_eq!(cluster.arbiter.read_history("v").await.unwrap().discarded[0].replica, "v-r-1");
}

#[tokio::test]
async fn an_old_record_is_replaced_and_a_right_one_stays() {
    let cluster = Cluster::used(3).await;
    let right = cluster.arbiter.get("v").unwrap();
    for name in NAMES {
        cluster.remember(&superblock(name, 1, &NAMES, ReplicaState::ClosedClean));
    }
    let message = cluster.ask(0, cluster.recovery("r1", pb::RecoverAction::Recover)).await.unwrap();
    assert!(message.contains("the record is right"), "{message}");
    let kept = cluster.arbiter.get("v").unwrap();
    assert_eq!(
        (kept.lineage.clone(), kept.config_number, kept.in_sync.clone()),
        (right.lineage, right.config_number, right.in_sync)
    );
    assert!(kept.epoch > right.epoch && kept.clean, "{kept:?}");
    // Two of them carried a later one, which the arbiter has forgotten.
    for name in &NAMES[..2] {
        cluster.remember(&superblock(name, 7, &NAMES[..2], ReplicaState::Member));
    }
    cluster.ask(0, cluster.recovery("r2", pb::RecoverAction::Recover)).await.unwrap();
    let rebuilt = cluster.arbiter.get("v").unwrap();
    assert_eq!((rebuilt.in_sync.clone(), rebuilt.config_number.0), (ids(&NAMES[..2]), 8));
    assert!(rebuilt.lineage != kept.lineage && !rebuilt.clean);
    // Nothing has been written since: what all of them know is of before.
    let message = cluster.ask(0, cluster.recovery("r3", pb::RecoverAction::Recover)).await.unwrap();
    assert!(message.contains("no copy that was read contradicts it"), "{message}");
    assert_eq!(cluster.arbiter.get("v").unwrap().in_sync, rebuilt.in_sync);
}

/// As a stock engine leaves them, and replicas from before there were meta areas.
#[tokio::test]
async fn copies_without_superblocks_keep_their_record_when_an_operator_does_without_their_word() {
    let cluster = Cluster::used(2).await;
    cluster.nodes[0].fabric.forget_superblocks();
    let before = cluster.arbiter.get("v").unwrap();
    let request = cluster.recovery("r1", pb::RecoverAction::Recover);
    let unread = cluster.ask(0, request.clone()).await.unwrap_err();
    assert!(unread.to_string().contains("v-r-0: it has no superblock"), "{unread}");
    let lost = NAMES[..2].iter().map(|name| (*name).to_owned()).collect();
    cluster.ask(0, pb::RecoverVolumeRequest { id: "r2".to_owned(), lost, ..request }).await.unwrap();
    let kept = cluster.arbiter.get("v").unwrap();
    assert_eq!(
        (&kept.lineage, &kept.in_sync, kept.config_number),
        (&before.lineage, &before.in_sync, before.config_number)
    );
    assert!(!kept.clean, "nobody has said that they were closed in order");
    assert!(cluster.arbiter.read_history("v").await.unwrap().discarded.is_empty(), "members are not set aside");
}

#[tokio::test]
async fn a_volume_that_was_never_opened_has_nothing_to_contradict_its_record() {
    let cluster = cluster(2).await;
    let message = cluster.ask(0, cluster.recovery("r1", pb::RecoverAction::Recover)).await.unwrap();
    assert!(message.contains("no copy was ever used"), "{message}");
    assert_eq!(cluster.promoted(0), 0, "what is fresh stays fresh");
    assert_eq!(cluster.arbiter.get("v").unwrap(), record(&NAMES[..2]));
}

#[tokio::test]
async fn a_replica_that_has_outrun_the_record_shows_that_the_record_is_old() {
    let cluster = Cluster::used(2).await;
    let mut old = cluster.arbiter.get("v").unwrap();
    for node in &cluster.nodes {
        let (name, lineage) = (node.services.replicas.list()[0].name.clone(), "l".to_owned());
        let promotion = crate::replica::Promotion {
            volume: "v".to_owned(),
            epoch: 9,
            instance: "later".to_owned(),
            lineage,
            expected: None,
        };
        node.services.replicas.promote(&name, promotion).await.unwrap();
    }
    old.clean = false;
    cluster.arbiter.put("v", old);
    cluster.nodes[0].services.engines.start(cluster.request()).await.unwrap();
    let engine = cluster.nodes[0].wait_engine("refused", |engine| engine.state() == pb::State::Error).await;
    assert!(engine.record_old, "{engine:#?}");
}
