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

use addax_api::{NAMESPACE, Volume, VolumeConfig};

use super::{Arbiter, Judgement, READ_DEADLINE, SWAP_DEADLINE, config_to_record, judge, record_to_config};

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

    async fn get(&self, volume: &str) -> Result<(DynamicObject, Config), RecordError> {
        let object = match timeout(READ_DEADLINE, self.volumes.get(volume)).await {
            Ok(Ok(object)) => object,
            Ok(Err(kube::Error::Api(status))) if status.code == 404 => return Err(RecordError::NotFound),
            Ok(Err(error)) => {
                tracing::warn!(volume, %error, "cannot read the volume's record");
                return Err(RecordError::Unavailable);
            }
            Err(_) => {
                tracing::warn!(volume, "no answer from the API within {READ_DEADLINE:?}");
                return Err(RecordError::Unavailable);
            }
        };
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
        let Ok(record) = serde_json::to_value(config_to_record(next)) else {
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
}
