//! The arbiter at the Kubernetes API (or the embedded one): `status.config` of the Volume object.
//!
//! *What it is.* Read, compare, and `PUT` of the status with the `resourceVersion` that was read, so that the write
//! happens only if nothing at all changed in between. A conflict because somebody wrote another part of the object is
//! no answer yet: read and compare again.
//!
//! *Invariants.* The object is written back as it was read, unknown fields included, but for `status.config`. Once a
//! `PUT` was sent whose outcome is not known, the answer is `Unknown`: that request may still be queued somewhere.
//!
//! *When things fail.* Answers of the server that refuse the request (4xx) prove that it was not carried out. Timeouts,
//! broken connections and 5xx prove nothing.

use futures::future::BoxFuture;
use kube::api::{Api, ApiResource, DynamicObject, PostParams};
use mirror_core::{Config, ConfigVersion, RecordError, SwapOutcome};
use tokio::time::timeout;

use addax_api::recovery::{self, RecoveryAccount, RecoveryOutcome};
use addax_api::{NAMESPACE, Volume, VolumeConfig, VolumeStatus};
use serde_json::json;

use super::{
    Arbiter, Concluded, Conclusion, History, Judgement, READ_DEADLINE, SWAP_DEADLINE, config_to_record, judge,
    record_to_config,
};

/// See the module.
#[derive(Clone)]
pub struct KubeArbiter {
    volumes: Api<DynamicObject>,
}

impl std::fmt::Debug for KubeArbiter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("KubeArbiter").finish_non_exhaustive()
    }
}

/// What came of one attempt to write.
enum Attempt {
    Settled(SwapOutcome),
    Conflict,
}

impl KubeArbiter {
    /// The arbiter behind a client.
    pub fn new(client: kube::Client) -> Self {
        let resource = ApiResource::erase::<Volume>(&());
        Self { volumes: Api::namespaced_with(client, NAMESPACE, &resource) }
    }

    async fn object(&self, volume: &str) -> Result<DynamicObject, RecordError> {
        match timeout(READ_DEADLINE, self.volumes.get(volume)).await {
            Ok(Ok(object)) => Ok(object),
            Ok(Err(kube::Error::Api(status))) if status.code == 404 => Err(RecordError::NotFound),
            Ok(Err(error)) => {
                tracing::warn!(volume, %error, "cannot read the volume's record");
                Err(RecordError::Unavailable)
            }
            Err(_) => {
                tracing::warn!(volume, "no answer from the API within {READ_DEADLINE:?}");
                Err(RecordError::Unavailable)
            }
        }
    }

    async fn get(&self, volume: &str) -> Result<(DynamicObject, Config), RecordError> {
        let object = self.object(volume).await?;
        let record = &object.data["status"]["config"];
        if record.is_null() {
            return Err(RecordError::NotFound);
        }
        match parse(record) {
            Ok(config) => Ok((object, config)),
            Err(reason) => {
                // Not "no record": there is one, and somebody has to look at it.
                tracing::error!(volume, %reason, "the volume's record cannot be understood");
                Err(RecordError::Unavailable)
            }
        }
    }

    async fn attempt(&self, volume: &str, expect: &ConfigVersion, next: &Config) -> Attempt {
        let Ok((mut object, current)) = self.get(volume).await else {
            return Attempt::Settled(SwapOutcome::Unknown);
        };
        match judge(&current, expect, next) {
            Judgement::Done => return Attempt::Settled(SwapOutcome::Committed),
            Judgement::Refuse => return Attempt::Settled(SwapOutcome::Refused { current }),
            Judgement::Write => {}
        }
        let Ok(record) = serde_json::to_value(keep_order(&object, config_to_record(next))) else {
            return Attempt::Settled(SwapOutcome::Unknown);
        };
        object.data["status"]["config"] = record;
        match self.volumes.replace_status(volume, &PostParams::default(), &object).await {
            Ok(_) => Attempt::Settled(SwapOutcome::Committed),
            Err(kube::Error::Api(status)) if status.code == 409 => Attempt::Conflict,
            Err(kube::Error::Api(status)) if (400..500).contains(&status.code) && status.code != 429 => {
                tracing::error!(volume, code = status.code, message = %status.message, "the API refuses the record");
                Attempt::Settled(SwapOutcome::Refused { current })
            }
            Err(error) => {
                tracing::warn!(volume, %error, "the outcome of a swap is unknown");
                Attempt::Settled(SwapOutcome::Unknown)
            }
        }
    }
}

impl KubeArbiter {
    /// One attempt to conclude; `None` after a conflict with another writer of the object.
    async fn conclude_once(
        &self,
        volume: &str,
        expect: Option<&ConfigVersion>,
        conclusion: &Conclusion,
    ) -> Option<Concluded> {
        let Ok(mut object) = self.object(volume).await else { return Some(Concluded::Unknown) };
        let Ok(history) = history_of(volume, &object) else { return Some(Concluded::Unknown) };
        if let Some(account) = recovery::find(&history.accounts, &conclusion.account.id) {
            let done = account.outcome == RecoveryOutcome::Done;
            return Some(if done { Concluded::Done } else { Concluded::Refused });
        }
        if history.record.as_ref().map(Config::version).as_ref() != expect {
            return Some(Concluded::Refused);
        }
        if let Err(error) = put_conclusion(&mut object, &history, conclusion) {
            tracing::error!(volume, %error, "a recovery cannot be written");
            return Some(Concluded::Refused);
        }
        match self.volumes.replace_status(volume, &PostParams::default(), &object).await {
            Ok(_) => Some(Concluded::Done),
            Err(kube::Error::Api(status)) if status.code == 409 => None,
            Err(kube::Error::Api(status)) if (400..500).contains(&status.code) && status.code != 429 => {
                tracing::error!(volume, code = status.code, message = %status.message, "the API refuses the record");
                Some(Concluded::Refused)
            }
            Err(error) => {
                tracing::warn!(volume, %error, "the outcome of a recovery is unknown");
                Some(Concluded::Unknown)
            }
        }
    }
}

/// Writes a conclusion into the object's status; the rest of it stays.
fn put_conclusion(
    object: &mut DynamicObject,
    history: &History,
    conclusion: &Conclusion,
) -> Result<(), serde_json::Error> {
    let mut accounts: Vec<RecoveryAccount> = history.accounts.clone();
    recovery::append(&mut accounts, conclusion.account.clone());
    let config = serde_json::to_value(keep_order(object, config_to_record(&conclusion.config)))?;
    if !object.data["status"].is_object() {
        object.data["status"] = json!({});
    }
    let status = &mut object.data["status"];
    status["config"] = config;
    status["recoveries"] = serde_json::to_value(accounts)?;
    status["discarded"] = serde_json::to_value(conclusion.set_aside(&history.discarded))?;
    if let Some(status) = status.as_object_mut() {
        status.remove("recordInDoubt");
    }
    if status["recoveryGeneration"].as_u64().unwrap_or(0) < u64::from(conclusion.generation) {
        status["recoveryGeneration"] = json!(conclusion.generation);
    }
    Ok(())
}

/// What the object says.
fn history_of(volume: &str, object: &DynamicObject) -> Result<History, RecordError> {
    let unreadable = |reason: String| {
        tracing::error!(volume, %reason, "the volume's status cannot be understood");
        RecordError::Unavailable
    };
    let status = &object.data["status"];
    let status: VolumeStatus = match status.is_null() {
        true => VolumeStatus::default(),
        false => serde_json::from_value(status.clone()).map_err(|error| unreadable(error.to_string()))?,
    };
    let record = status.config.as_ref().map(record_to_config).transpose();
    let record = record.map_err(|error| unreadable(error.to_string()))?;
    Ok(History { record, accounts: status.recoveries, discarded: status.discarded })
}

/// The API compares the sets as lists: a set that does not change keeps the order that it has there.
fn keep_order(object: &DynamicObject, mut next: VolumeConfig) -> VolumeConfig {
    let now: Result<VolumeConfig, _> = serde_json::from_value(object.data["status"]["config"].clone());
    let Ok(now) = now else { return next };
    let is_same = |a: &[String], b: &[String]| a.len() == b.len() && a.iter().all(|name| b.contains(name));
    if is_same(&now.in_sync, &next.in_sync) {
        next.in_sync = now.in_sync;
    }
    if is_same(&now.rebuilding, &next.rebuilding) {
        next.rebuilding = now.rebuilding;
    }
    next
}

fn parse(record: &serde_json::Value) -> Result<Config, String> {
    let record: VolumeConfig = serde_json::from_value(record.clone()).map_err(|error| error.to_string())?;
    record_to_config(&record).map_err(|error| error.to_string())
}

impl Arbiter for KubeArbiter {
    fn read<'a>(&'a self, volume: &'a str) -> BoxFuture<'a, Result<Config, RecordError>> {
        Box::pin(async move { self.get(volume).await.map(|(_, config)| config) })
    }

    fn swap<'a>(&'a self, volume: &'a str, expect: &'a ConfigVersion, next: &'a Config) -> BoxFuture<'a, SwapOutcome> {
        let attempts = async move {
            loop {
                if let Attempt::Settled(outcome) = self.attempt(volume, expect, next).await {
                    return outcome;
                }
            }
        };
        Box::pin(async move { timeout(SWAP_DEADLINE, attempts).await.unwrap_or(SwapOutcome::Unknown) })
    }

    fn read_history<'a>(&'a self, volume: &'a str) -> BoxFuture<'a, Result<History, RecordError>> {
        Box::pin(async move { history_of(volume, &self.object(volume).await?) })
    }

    fn conclude<'a>(
        &'a self,
        volume: &'a str,
        expect: Option<&'a ConfigVersion>,
        conclusion: &'a Conclusion,
    ) -> BoxFuture<'a, Concluded> {
        let attempts = async move {
            loop {
                if let Some(concluded) = self.conclude_once(volume, expect, conclusion).await {
                    return concluded;
                }
            }
        };
        Box::pin(async move { timeout(SWAP_DEADLINE, attempts).await.unwrap_or(Concluded::Unknown) })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use std::collections::VecDeque;
    use std::sync::{Arc, Mutex};

    use addax_api::volume::{VolumeSpec, VolumeState, VolumeStatus};
    use addax_apiserver::fault::{FaultHook, Outcome};
    use addax_apiserver::{Embedded, ServerConfig};
    use kube::api::{Patch, PatchParams};
    use serde_json::json;

    struct World {
        api: Embedded,
        arbiter: KubeArbiter,
        volumes: Api<Volume>,
        faults: Arc<Mutex<VecDeque<Outcome>>>,
    }

    /// An API with a volume `v` whose record is at epoch 1; faults hit writes of the status in turn.
    async fn world() -> World {
        let faults: Arc<Mutex<VecDeque<Outcome>>> = Arc::default();
        let queue = faults.clone();
        let hook = FaultHook::new(move |request| {
            let is_write = request.verb == "update" && request.subresource == "status";
            let fault = is_write.then(|| queue.lock().unwrap().pop_front()).flatten();
            fault.unwrap_or_default().into()
        });
        let config = ServerConfig { crds: addax_api::crds(), faults: hook, ..ServerConfig::default() };
        let api = Embedded::start(&config).await.unwrap();
        let client = kube::Client::new(api.service(), NAMESPACE);
        let volumes: Api<Volume> = Api::namespaced(client.clone(), NAMESPACE);
        let volume = Volume::new("v", VolumeSpec::with_size(1 << 20));
        let mut volume = volumes.create(&PostParams::default(), &volume).await.unwrap();
        let record = VolumeConfig {
            lineage: "l".to_owned(),
            epoch: 1,
            engine_instance: "e".to_owned(),
            config_number: 1,
            in_sync: vec!["b".to_owned(), "a".to_owned()],
            rebuilding: Vec::new(),
            min_in_sync: 1,
            size: 1 << 20,
            clean: false,
            snapshots: Default::default(),
        };
        volume.status = Some(VolumeStatus { config: Some(record), ..VolumeStatus::default() });
        volumes.replace_status("v", &PostParams::default(), &volume).await.unwrap();
        World { api, arbiter: KubeArbiter::new(client), volumes, faults }
    }

    fn next(base: &Config) -> Config {
        let mut next = base.clone();
        next.in_sync.pop_last();
        next.config_number = base.config_number.next();
        next
    }

    impl World {
        async fn config(&self) -> VolumeConfig {
            self.volumes.get("v").await.unwrap().status.unwrap().config.unwrap()
        }
    }

    #[tokio::test]
    async fn a_swap_changes_the_record_alone_and_only_from_what_was_expected() {
        let world = world().await;
        let patch = json!({"status": {"state": "attached", "ownerID": "n1"}});
        world.volumes.patch_status("v", &PatchParams::default(), &Patch::Merge(&patch)).await.unwrap();
        let base = world.arbiter.read("v").await.unwrap();
        // An epoch alone: the sets stay as they are, order included, or the API would refuse it.
        let mut raised = base.clone();
        raised.epoch = base.epoch.next();
        raised.engine_instance = mirror_core::EngineInstance::new("e2").unwrap();
        assert_eq!(world.arbiter.swap("v", &base.version(), &raised).await, SwapOutcome::Committed);
        assert_eq!(world.config().await.in_sync, ["b", "a"]);
        let next = next(&raised);
        assert_eq!(world.arbiter.swap("v", &raised.version(), &next).await, SwapOutcome::Committed);
        assert_eq!(world.arbiter.read("v").await.unwrap(), next);
        let status = world.volumes.get("v").await.unwrap().status.unwrap();
        assert_eq!((status.state, status.owner_id.as_str()), (VolumeState::Attached, "n1"));
        let refused = world.arbiter.swap("v", &base.version(), &raised).await;
        assert_eq!(refused, SwapOutcome::Refused { current: next });
        world.api.shutdown().await;
    }

    #[tokio::test]
    async fn another_writer_of_the_object_is_no_refusal() {
        let world = world().await;
        world.faults.lock().unwrap().extend([Outcome::Conflict, Outcome::Conflict]);
        let base = world.arbiter.read("v").await.unwrap();
        assert_eq!(world.arbiter.swap("v", &base.version(), &next(&base)).await, SwapOutcome::Committed);
        assert!(world.faults.lock().unwrap().is_empty());
        world.api.shutdown().await;
    }

    #[tokio::test]
    async fn a_lost_answer_is_unknown_and_settled_by_sending_again() {
        for (fault, committed) in [(Outcome::LoseAnswer, true), (Outcome::InternalError, false)] {
            let world = world().await;
            world.faults.lock().unwrap().push_back(fault);
            let base = world.arbiter.read("v").await.unwrap();
            let next = next(&base);
            assert_eq!(world.arbiter.swap("v", &base.version(), &next).await, SwapOutcome::Unknown);
            assert_eq!(world.config().await.config_number == 2, committed);
            assert_eq!(world.arbiter.swap("v", &base.version(), &next).await, SwapOutcome::Committed);
            assert_eq!(world.config().await.config_number, 2);
            world.api.shutdown().await;
        }
    }

    #[tokio::test]
    async fn what_the_api_refuses_is_a_refusal_with_the_present_record() {
        let world = world().await;
        let base = world.arbiter.read("v").await.unwrap();
        let mut bad = base.clone();
        bad.in_sync.insert(mirror_core::ReplicaId::new("stranger").unwrap());
        bad.config_number = base.config_number.next();
        let refused = world.arbiter.swap("v", &base.version(), &bad).await;
        assert_eq!(refused, SwapOutcome::Refused { current: base });
        world.api.shutdown().await;
    }

    fn conclusion(config: Config, id: &str) -> Conclusion {
        let account = RecoveryAccount {
            id: id.to_owned(),
            action: recovery::RecoveryAction::ForceOpen,
            outcome: RecoveryOutcome::Done,
            message: "done".to_owned(),
            requested_by: "test".to_owned(),
            at: addax_api::Time(jiff::Timestamp::now()),
            from: None,
            to: None,
            discarded: vec!["a".to_owned(), "b".to_owned()],
            told: false,
        };
        Conclusion { config, account, generation: 2 }
    }

    #[tokio::test]
    async fn a_conclusion_changes_record_account_and_what_is_set_aside_at_once_and_only_once() {
        let world = world().await;
        let base = world.arbiter.read("v").await.unwrap();
        let doubt = json!({"status": {"recordInDoubt": true, "state": "detached"}});
        world.volumes.patch_status("v", &PatchParams::default(), &Patch::Merge(&doubt)).await.unwrap();
        let mut forced = base.clone();
        forced.lineage = mirror_core::Lineage::new("l2").unwrap();
        forced.in_sync = ["c"].iter().map(|name| mirror_core::ReplicaId::new(name).unwrap()).collect();
        forced.config_number = base.config_number.next();
        let conclusion = conclusion(forced.clone(), "r1");
        // The server takes the write and its answer is lost: the same one again finds itself.
        world.faults.lock().unwrap().push_back(Outcome::LoseAnswer);
        let expect = base.version();
        assert_eq!(world.arbiter.conclude("v", Some(&expect), &conclusion).await, Concluded::Unknown);
        assert_eq!(world.arbiter.conclude("v", Some(&expect), &conclusion).await, Concluded::Done);
        let status = world.volumes.get("v").await.unwrap().status.unwrap();
        assert_eq!(record_to_config(status.config.as_ref().unwrap()).unwrap(), forced);
        assert_eq!((status.recoveries.len(), status.recovery_generation, status.record_in_doubt), (1, 2, false));
        let aside: Vec<&str> = status.discarded.iter().map(|aside| aside.replica.as_str()).collect();
        assert_eq!((aside, status.state), (vec!["a", "b"], VolumeState::Detached));
        // Another one on the old record, and one that a manager has refused meanwhile.
        let late =
            Conclusion { account: RecoveryAccount { id: "r2".to_owned(), ..conclusion.account.clone() }, ..conclusion };
        assert_eq!(world.arbiter.conclude("v", Some(&expect), &late).await, Concluded::Refused);
        let mut account = late.account.clone();
        account.outcome = RecoveryOutcome::Refused;
        let refused = json!({"status": {"recoveries": [account]}});
        world.volumes.patch_status("v", &PatchParams::default(), &Patch::Merge(&refused)).await.unwrap();
        assert_eq!(world.arbiter.conclude("v", Some(&forced.version()), &late).await, Concluded::Refused);
        world.api.shutdown().await;
    }

    #[tokio::test]
    async fn a_record_is_put_where_there_is_none_but_not_over_another() {
        let world = world().await;
        let fresh = Volume::new("w", VolumeSpec::with_size(1 << 20));
        world.volumes.create(&PostParams::default(), &fresh).await.unwrap();
        let config = world.arbiter.read("v").await.unwrap();
        let conclusion = conclusion(config.clone(), "r1");
        assert_eq!(world.arbiter.read_history("w").await.unwrap(), History::default());
        assert_eq!(world.arbiter.conclude("w", Some(&config.version()), &conclusion).await, Concluded::Refused);
        assert_eq!(world.arbiter.conclude("w", None, &conclusion).await, Concluded::Done);
        let history = world.arbiter.read_history("w").await.unwrap();
        assert_eq!((history.record, history.accounts.len()), (Some(config), 1));
        // Members are not set aside.
        assert!(history.discarded.is_empty());
        assert_eq!(world.arbiter.conclude("v", None, &conclusion).await, Concluded::Refused);
        assert_eq!(world.arbiter.read_history("x").await, Err(RecordError::NotFound));
        world.api.shutdown().await;
    }

    #[tokio::test]
    async fn no_object_and_no_record_are_not_found() {
        let world = world().await;
        assert_eq!(world.arbiter.read("w").await, Err(RecordError::NotFound));
        let fresh = Volume::new("w", VolumeSpec::with_size(1 << 20));
        world.volumes.create(&PostParams::default(), &fresh).await.unwrap();
        assert_eq!(world.arbiter.read("w").await, Err(RecordError::NotFound));
        let base = world.arbiter.read("v").await.unwrap();
        assert_eq!(world.arbiter.swap("w", &base.version(), &next(&base)).await, SwapOutcome::Unknown);
        world.api.shutdown().await;
    }
}
