//! The own node's sign of life: a Lease that this manager renews, and the right to act that comes with it.
//!
//! *States.* Waiting (somebody else holds the lease, or the API server cannot be reached) → held → lost → waiting.
//!
//! *Invariants.* Two managers of the same node name never act at once: a lease that another one holds is waited for
//! until it runs out. A renewal's time is taken before it is sent, and it counts once the watch shows it (see
//! `datastore::leases`), so this manager stops acting before others take over.
//!
//! *When things fail.* Renewals are tried again until they succeed. Meanwhile the lease runs out in the snapshot by
//! itself and every plan says that others own everything. When renewals succeed and the watch does not show them, the
//! watches are begun anew. At an orderly end the holder is taken out and the time left as
//! it is: the next manager of the node starts at once, and nobody takes the node for dead before it should be up.

use std::sync::Arc;
use std::time::Duration;

use addax_api::LABEL_NODE;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kube::api::{ObjectMeta, Patch, PatchParams, PostParams};
use kube::{Api, ResourceExt};
use serde_json::json;
use tokio_util::sync::CancellationToken;

use crate::clock;
use crate::datastore::{Datastore, renew_interval};

/// Deadline of a call, so that a renewal that hangs is tried again in time.
const DEADLINE: Duration = Duration::from_secs(3);
/// Delay after the first failure.
const FIRST_DELAY: Duration = Duration::from_millis(100);

/// Keeps the lease.
#[derive(Debug)]
pub(crate) struct LeaseKeeper {
    api: Api<Lease>,
    store: Arc<Datastore>,
    node: String,
    identity: String,
}

/// What the lease of another holder was seen to say, and when.
#[derive(Debug, Default)]
struct Seen(Option<(Timestamp, Timestamp)>);

#[derive(Debug)]
enum Attempt {
    Held { version: String },
    Wait { until: Timestamp, holder: String },
}

#[derive(Debug)]
enum End {
    Lost,
    Shutdown { version: String },
}

#[derive(Debug, thiserror::Error)]
enum LeaseError {
    #[error(transparent)]
    Api(#[from] kube::Error),
    #[error("no answer within {} s", DEADLINE.as_secs())]
    Deadline,
}

impl LeaseError {
    fn code(&self) -> Option<u16> {
        match self {
            Self::Api(kube::Error::Api(status)) => Some(status.code),
            _ => None,
        }
    }
}

impl LeaseKeeper {
    pub(crate) fn new(api: Api<Lease>, store: Arc<Datastore>, node: &str) -> Self {
        // New with every start: what an earlier process of this node holds is not ours.
        let identity = format!("{node}_{}", uuid::Uuid::new_v4());
        store.set_identity(&identity);
        Self { api, store, node: node.to_owned(), identity }
    }

    /// Takes and renews the lease until `shutdown`; cancels `held` when it is held for the first time.
    pub(crate) async fn run(self, held: CancellationToken, shutdown: CancellationToken) {
        loop {
            let Some(version) = shutdown.run_until_cancelled(self.acquire()).await else {
                return;
            };
            held.cancel();
            match self.keep(version, &shutdown).await {
                End::Lost => {
                    tracing::error!("another manager holds the lease of this node; this one stops acting");
                    self.store.own_lease_lost();
                }
                End::Shutdown { version } => return self.release(&version).await,
            }
        }
    }

    async fn acquire(&self) -> String {
        let mut seen = Seen::default();
        let mut failures = 0;
        loop {
            match self.attempt(&mut seen).await {
                Ok(Attempt::Held { version }) => {
                    tracing::info!(identity = self.identity, "the lease of this node is held");
                    return version;
                }
                Ok(Attempt::Wait { until, holder }) => {
                    tracing::info!(holder, %until, "waiting for the lease of this node");
                    failures = 0;
                    clock::sleep_until(Some(until)).await;
                }
                Err(error) => {
                    tracing::warn!(%error, "the lease of this node cannot be taken yet");
                    tokio::time::sleep(retry_delay(failures, self.interval())).await;
                    failures += 1;
                }
            }
        }
    }

    async fn attempt(&self, seen: &mut Seen) -> Result<Attempt, LeaseError> {
        let sent = Timestamp::now();
        let lease = match self.read().await? {
            None => ask(self.api.create(&PostParams::default(), &self.fresh(sent))).await?,
            Some(lease) => {
                let spec = lease.spec.clone().unwrap_or_default();
                let until = seen.until(&spec, sent);
                let holder = spec.holder_identity.clone().filter(|holder| !holder.is_empty());
                match holder.filter(|holder| *holder != self.identity) {
                    Some(holder) if until > sent => return Ok(Attempt::Wait { until, holder }),
                    _ => self.take(&lease, sent).await?,
                }
            }
        };
        let version = lease.resource_version().unwrap_or_default();
        Ok(Attempt::Held { version })
    }

    async fn take(&self, lease: &Lease, now: Timestamp) -> Result<Lease, LeaseError> {
        let transitions = lease.spec.as_ref().and_then(|spec| spec.lease_transitions).unwrap_or(0);
        let patch = json!({
            "metadata": {
                "resourceVersion": lease.resource_version(),
                "labels": { LABEL_NODE: self.node },
            },
            "spec": {
                "holderIdentity": self.identity,
                "leaseDurationSeconds": self.seconds(),
                "acquireTime": MicroTime(now),
                "renewTime": MicroTime(now),
                "leaseTransitions": transitions.saturating_add(1),
            },
        });
        ask(self.api.patch(&self.node, &PatchParams::default(), &Patch::Merge(&patch))).await
    }

    fn fresh(&self, now: Timestamp) -> Lease {
        Lease {
            metadata: ObjectMeta {
                name: Some(self.node.clone()),
                labels: Some([(LABEL_NODE.to_owned(), self.node.clone())].into()),
                ..ObjectMeta::default()
            },
            spec: Some(LeaseSpec {
                holder_identity: Some(self.identity.clone()),
                lease_duration_seconds: Some(self.seconds()),
                acquire_time: Some(MicroTime(now)),
                renew_time: Some(MicroTime(now)),
                lease_transitions: Some(0),
                ..LeaseSpec::default()
            }),
        }
    }

    /// Renews until it is lost or over.
    async fn keep(&self, mut version: String, shutdown: &CancellationToken) -> End {
        let mut failures: u32 = 0;
        let mut wait = self.interval();
        loop {
            if shutdown.run_until_cancelled(tokio::time::sleep(wait)).await.is_none() {
                return End::Shutdown { version };
            }
            // Not shown since the last renewals, although they succeeded.
            if failures == 0 && !self.store.is_alive(Timestamp::now()) {
                tracing::warn!("the watch does not show the lease's renewals; all watches begin anew");
                self.store.watches_stale.notify_waiters();
            }
            match self.renew(&version).await {
                Ok(Some(new)) => {
                    (version, failures, wait) = (new, 0, self.interval());
                }
                Ok(None) => return End::Lost,
                Err(error) => {
                    tracing::warn!(%error, "the lease of this node cannot be renewed yet");
                    wait = retry_delay(failures, self.interval());
                    failures = failures.saturating_add(1);
                }
            }
        }
    }

    /// One renewal; `None` if the lease is not ours any more.
    async fn renew(&self, version: &str) -> Result<Option<String>, LeaseError> {
        let sent = Timestamp::now();
        let patch = json!({
            "metadata": { "resourceVersion": version },
            "spec": { "renewTime": MicroTime(sent), "leaseDurationSeconds": self.seconds() },
        });
        match ask(self.api.patch(&self.node, &PatchParams::default(), &Patch::Merge(&patch))).await {
            Ok(lease) => Ok(Some(lease.resource_version().unwrap_or_default())),
            // A renewal whose answer was lost may have made the version, or somebody's label.
            Err(error) if error.code() == Some(409) => {
                let lease = self.read().await?;
                let ours = lease.filter(|lease| holder(lease) == Some(self.identity.as_str()));
                match ours {
                    Some(lease) => Ok(self.renew_at(&lease).await?.resource_version()),
                    None => Ok(None),
                }
            }
            Err(error) if error.code() == Some(404) => Ok(None),
            Err(error) => Err(error),
        }
    }

    async fn renew_at(&self, lease: &Lease) -> Result<Lease, LeaseError> {
        let sent = Timestamp::now();
        let patch = json!({
            "metadata": { "resourceVersion": lease.resource_version() },
            "spec": { "renewTime": MicroTime(sent), "leaseDurationSeconds": self.seconds() },
        });
        ask(self.api.patch(&self.node, &PatchParams::default(), &Patch::Merge(&patch))).await
    }

    async fn release(&self, version: &str) {
        let patch = json!({"metadata": { "resourceVersion": version }, "spec": { "holderIdentity": "" }});
        match ask(self.api.patch(&self.node, &PatchParams::default(), &Patch::Merge(&patch))).await {
            Ok(_) => tracing::info!("the lease of this node is left to the next manager"),
            Err(error) => tracing::warn!(%error, "the lease of this node stays until it runs out"),
        }
    }

    async fn read(&self) -> Result<Option<Lease>, LeaseError> {
        ask(self.api.get_opt(&self.node)).await
    }

    /// How long a renewal holds, in seconds.
    fn seconds(&self) -> i32 {
        let settings = self.store.read(addax_plan::observed::Observed::settings_in_force);
        i32::try_from(settings.node_lease_duration_seconds).unwrap_or(i32::MAX)
    }

    /// Time between renewals: as set, but never so long that one failure costs the lease.
    fn interval(&self) -> Duration {
        let settings = self.store.read(addax_plan::observed::Observed::settings_in_force);
        renew_interval(&settings).unsigned_abs()
    }
}

impl Seen {
    /// When the lease runs out: a renewal counts from when it is seen, the first one from its own time.
    fn until(&mut self, spec: &LeaseSpec, now: Timestamp) -> Timestamp {
        let Some(renewed) = spec.renew_time.as_ref().map(|time| time.0) else {
            return now;
        };
        let at = match self.0 {
            None => renewed.min(now),
            Some((before, at)) if before == renewed => at,
            Some(_) => now,
        };
        self.0 = Some((renewed, at));
        let duration = SignedDuration::from_secs(spec.lease_duration_seconds.unwrap_or(0).into());
        at.checked_add(duration).unwrap_or(Timestamp::MAX)
    }
}

fn holder(lease: &Lease) -> Option<&str> {
    lease.spec.as_ref()?.holder_identity.as_deref()
}

fn retry_delay(failures: u32, longest: Duration) -> Duration {
    FIRST_DELAY.saturating_mul(1_u32.checked_shl(failures).unwrap_or(u32::MAX)).min(longest)
}

async fn ask<T>(answer: impl Future<Output = Result<T, kube::Error>>) -> Result<T, LeaseError> {
    Ok(tokio::time::timeout(DEADLINE, answer).await.map_err(|_| LeaseError::Deadline)??)
}
