//! One controller per kind, all alike and thin: take a key, look at the snapshot, plan, carry out.
//!
//! *Invariants.* At most one pass per key at a time, at most [`PASSES_AT_ONCE`] per kind. Every pass ends in the queue
//! with an outcome, even one that panics.
//!
//! *When things fail.* A conflict is repeated at once, everything else after a growing delay, for ever.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use addax_plan::action::{Key, Kind};
use futures::FutureExt;
use jiff::Timestamp;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tracing::Instrument;

use crate::act::{ActError, Actor};
use crate::clock;
use crate::datastore::Datastore;
use crate::queue::Outcome;

/// How many objects of a kind are worked on at once. A pass mostly waits, for an agent at the longest.
const PASSES_AT_ONCE: usize = 32;
/// How long passes in flight may take at the shutdown.
const DRAIN: Duration = Duration::from_secs(5);

/// The controllers of all kinds.
#[derive(Debug)]
pub(crate) struct Controllers {
    store: Arc<Datastore>,
    actor: Actor,
    passes: AtomicU64,
}

impl Controllers {
    pub(crate) fn new(store: Arc<Datastore>, actor: Actor) -> Self {
        Self { store, actor, passes: AtomicU64::new(0) }
    }

    /// Runs the controllers of all kinds until `shutdown`, and lets passes in flight end.
    pub(crate) async fn run(self: Arc<Self>, shutdown: CancellationToken) {
        let mut controllers = JoinSet::new();
        for kind in Kind::ALL {
            controllers.spawn(self.clone().run_kind(kind, shutdown.clone()));
        }
        controllers.join_all().await;
    }

    async fn run_kind(self: Arc<Self>, kind: Kind, shutdown: CancellationToken) {
        let mut passes = JoinSet::new();
        loop {
            tokio::select! {
                biased;
                () = shutdown.cancelled() => break,
                Some(_) = passes.join_next() => {}
                key = self.store.queue(kind).next(), if passes.len() < PASSES_AT_ONCE => {
                    passes.spawn(self.clone().pass(key));
                }
            }
        }
        let drained = async { while passes.join_next().await.is_some() {} };
        if tokio::time::timeout(DRAIN, drained).await.is_err() {
            tracing::warn!(kind = kind.as_str(), "leaving passes that do not end");
        }
    }

    /// One pass over one object.
    async fn pass(self: Arc<Self>, key: Key) {
        let id = self.passes.fetch_add(1, Ordering::Relaxed);
        let span = tracing::info_span!("reconcile", id, kind = key.kind.as_str(), name = key.name);
        let result = AssertUnwindSafe(self.reconcile(&key)).catch_unwind().instrument(span.clone()).await;
        let _entered = span.enter();
        let outcome = match result {
            Ok(Ok(requeue_at)) => Outcome::Done(requeue_at.map(clock::instant)),
            Ok(Err(error @ ActError::Conflict { .. })) => {
                tracing::debug!(%error, "repeated at once");
                Outcome::Conflict
            }
            Ok(Err(error)) => {
                tracing::warn!(%error, "repeated later");
                Outcome::Failed
            }
            Err(_) => {
                tracing::error!("the pass has panicked; repeated later");
                Outcome::Failed
            }
        };
        self.store.queue(key.kind).done(&key, outcome);
    }

    async fn reconcile(&self, key: &Key) -> Result<Option<Timestamp>, ActError> {
        self.actor.settle(key).await?;
        let actions = self.store.read(|observed| addax_plan::plan(observed, key, Timestamp::now()));
        if actions.is_empty() {
            return Ok(None);
        }
        tracing::debug!(?actions, "planned");
        self.actor.carry_out(key, actions).await
    }
}
