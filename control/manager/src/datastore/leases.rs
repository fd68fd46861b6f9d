//! Who is alive: the nodes' leases as this manager has seen them renewed.
//!
//! The own lease counts from the last renewal that the watch has shown, and ends earlier than for others by one interval
//! of renewals. So a manager whose watch has died without a word stops acting before the leases of the others, which it
//! sees renewed no more, run out in its snapshot: it never takes a living node for dead and acts on that.
//!
//! A renewal that changes nothing wakes nobody: one timer waits for the earliest end, and looks then who is left.

use std::collections::BTreeSet;

use addax_api::setting::Settings;
use addax_plan::observed::NodeLease;
use addax_plan::{ownership, related};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use kube::ResourceExt;
use tokio_util::sync::CancellationToken;

use super::Datastore;
use crate::clock;

impl Datastore {
    /// The watch tells a lease.
    pub fn lease_watched(&self, lease: &Lease, now: Timestamp) {
        let name = lease.name_any();
        let mut state = self.lock();
        let spec = lease.spec.clone().unwrap_or_default();
        if name == state.observed.this_node.name {
            let own = own_lease(&state.identity, &spec, &state.observed.settings_in_force());
            let was_alive = state.observed.is_alive(&name, now);
            match own {
                Some(own) => state.observed.leases.insert(name.clone(), own),
                None => state.observed.leases.remove(&name),
            };
            if was_alive != state.observed.is_alive(&name, now) {
                self.leases_changed.notify_one();
            }
            return;
        }
        let (Some(renewed), Some(seconds)) = (spec.renew_time, spec.lease_duration_seconds) else {
            state.observed.leases.remove(&name);
            return;
        };
        let renewed_at = match state.renewals.insert(name.clone(), renewed.0) {
            // Seen for the first time: it may be old.
            None => renewed.0.min(now),
            Some(before) if before == renewed.0 => {
                state.observed.leases.get(&name).map_or(renewed.0.min(now), |lease| lease.renewed_at)
            }
            Some(_) => now,
        };
        let was_alive = state.observed.is_alive(&name, now);
        let lease = NodeLease { renewed_at, duration: SignedDuration::from_secs(seconds.into()) };
        state.observed.leases.insert(name.clone(), lease);
        let is_alive = state.observed.is_alive(&name, now);
        drop(state);
        if was_alive != is_alive {
            self.leases_changed.notify_one();
        }
    }

    /// The watch tells that a lease is gone: its node counts as dead at once.
    pub fn lease_ended(&self, name: &str) {
        let mut state = self.lock();
        state.renewals.remove(name);
        let removed = state.observed.leases.remove(name);
        drop(state);
        if removed.is_some() {
            self.leases_changed.notify_one();
        }
    }

    /// A list tells every lease there is.
    pub fn leases_listed(&self, leases: &[Lease], now: Timestamp) {
        let names: BTreeSet<String> = leases.iter().map(ResourceExt::name_any).collect();
        let here: Vec<String> = self.read(|observed| observed.leases.keys().cloned().collect());
        leases.iter().for_each(|lease| self.lease_watched(lease, now));
        here.iter().filter(|name| !names.contains(*name)).for_each(|name| self.lease_ended(name));
    }

    /// By what holder the own lease is known.
    pub fn set_identity(&self, identity: &str) {
        self.lock().identity = identity.to_owned();
    }

    /// The own lease is somebody else's.
    pub fn own_lease_lost(&self) {
        let mut state = self.lock();
        let me = state.observed.this_node.name.clone();
        state.observed.leases.remove(&me);
        drop(state);
        self.leases_changed.notify_one();
    }

    /// Whether this manager may act.
    pub fn is_alive(&self, now: Timestamp) -> bool {
        self.read(|observed| observed.is_alive(&observed.this_node.name, now))
    }

    /// Wakes everything whenever another set of nodes is alive; until `shutdown`.
    pub async fn watch_expiry(&self, shutdown: CancellationToken) {
        let mut known = BTreeSet::new();
        loop {
            let now = Timestamp::now();
            let (alive, next, keys) = self.read(|observed| {
                let alive: BTreeSet<String> = observed.live_nodes(now).map(str::to_owned).collect();
                let keys = if alive == known { BTreeSet::new() } else { related::everything(observed) };
                (alive, ownership::next_expiry(observed, now), keys)
            });
            if alive != known {
                let (gone, come): (Vec<_>, Vec<_>) =
                    (known.difference(&alive).collect(), alive.difference(&known).collect());
                tracing::info!(?come, ?gone, "other nodes are alive than before");
                self.wake(keys);
                self.agents_changed.notify_one();
                known = alive;
            }
            tokio::select! {
                () = shutdown.cancelled() => return,
                () = self.leases_changed.notified() => {}
                () = clock::sleep_until(next) => {}
            }
        }
    }
}

/// The own lease as it counts here, if it is held by this very process. Its time was written before it was sent.
fn own_lease(identity: &str, spec: &LeaseSpec, settings: &Settings) -> Option<NodeLease> {
    spec.holder_identity.as_deref().filter(|holder| *holder == identity && !holder.is_empty())?;
    let renewed_at = spec.renew_time.as_ref()?.0;
    let whole = SignedDuration::from_secs(spec.lease_duration_seconds?.into());
    let duration = whole.saturating_sub(renew_interval(settings));
    Some(NodeLease { renewed_at, duration })
}

/// Time between renewals: as set, but never more than a third of the lease's duration.
pub(crate) fn renew_interval(settings: &Settings) -> SignedDuration {
    let third = SignedDuration::from_secs(settings.node_lease_duration_seconds) / 3;
    SignedDuration::from_secs(settings.node_lease_renew_seconds).min(third)
}

#[cfg(test)]
mod tests {
    use super::*;
    use addax_plan::observed::ThisNode;
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
    use kube::api::ObjectMeta;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(1000 + second).unwrap()
    }

    fn lease(name: &str, renewed: i64) -> Lease {
        let spec = LeaseSpec {
            renew_time: Some(MicroTime(at(renewed))),
            lease_duration_seconds: Some(12),
            ..LeaseSpec::default()
        };
        Lease { metadata: ObjectMeta { name: Some(name.to_owned()), ..ObjectMeta::default() }, spec: Some(spec) }
    }

    fn store() -> Datastore {
        Datastore::new(ThisNode { name: "n1".to_owned(), ..ThisNode::default() })
    }

    fn alive(store: &Datastore, name: &str, now: i64) -> bool {
        store.read(|observed| observed.is_alive(name, at(now)))
    }

    #[test]
    fn an_old_lease_does_not_look_fresh_and_one_from_the_future_lasts_no_longer() {
        let store = store();
        store.lease_watched(&lease("n2", 0), at(100));
        assert!(!alive(&store, "n2", 100));
        store.lease_watched(&lease("n3", 500), at(100));
        assert!(alive(&store, "n3", 111) && !alive(&store, "n3", 112));
    }

    #[test]
    fn a_renewal_counts_from_when_it_is_seen_whatever_the_other_clock_says() {
        let store = store();
        store.lease_watched(&lease("n2", -500), at(100));
        store.lease_watched(&lease("n2", -496), at(104));
        assert!(alive(&store, "n2", 115));
        // The same renewal told again, by a list for example, is no sign of life.
        store.lease_watched(&lease("n2", -496), at(115));
        assert!(!alive(&store, "n2", 116));
    }

    fn held_by(holder: &str, renewed: i64) -> Lease {
        let mut lease = lease("n1", renewed);
        lease.spec.as_mut().unwrap().holder_identity = Some(holder.to_owned());
        lease
    }

    #[test]
    fn the_own_lease_counts_from_its_own_time_and_ends_before_others_may_think_so() {
        let store = store();
        store.set_identity("me");
        store.lease_watched(&held_by("me", 100), at(103));
        assert!(alive(&store, "n1", 107) && !alive(&store, "n1", 108));
        store.lease_watched(&held_by("other", 104), at(104));
        assert!(!alive(&store, "n1", 104));
        store.lease_watched(&held_by("me", 108), at(108));
        store.own_lease_lost();
        assert!(!alive(&store, "n1", 108));
    }

    #[test]
    fn with_a_watch_that_has_died_no_other_node_dies_before_this_one_stops_acting() {
        let store = store();
        store.set_identity("me");
        // All renew every four seconds; the watch tells nothing after second 100.
        for (own, other) in [(100, 96), (96, 100), (98, 97)] {
            store.lease_watched(&lease("n2", other - 4), at(other - 4));
            store.lease_watched(&lease("n2", other), at(other));
            store.lease_watched(&held_by("me", own), at(own));
            for second in 100..120 {
                assert!(alive(&store, "n2", second) || !alive(&store, "n1", second), "{own} {other} {second}");
            }
        }
    }
}
