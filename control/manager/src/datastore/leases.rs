//! Who is alive: the nodes' leases as this manager has seen them renewed.
//!
//! A renewal that changes nothing wakes nobody: one timer waits for the earliest end, and looks then who is left.

use std::collections::BTreeSet;

use addax_plan::observed::NodeLease;
use addax_plan::{ownership, related};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::coordination::v1::Lease;
use kube::ResourceExt;
use tokio_util::sync::CancellationToken;

use super::Datastore;
use crate::clock;

impl Datastore {
    /// The watch tells a lease. The own one is left out: its holder knows better when it was renewed.
    pub fn lease_watched(&self, lease: &Lease, now: Timestamp) {
        let name = lease.name_any();
        let mut state = self.lock();
        if name == state.observed.this_node.name {
            return;
        }
        let spec = lease.spec.clone().unwrap_or_default();
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
        if name == state.observed.this_node.name {
            return;
        }
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

    /// The own lease holds from `renewed_at` on, which is before its renewal was sent: so this manager never takes
    /// itself for alive when others may take it for dead.
    pub fn own_lease_renewed(&self, renewed_at: Timestamp, duration: SignedDuration, now: Timestamp) {
        let mut state = self.lock();
        let me = state.observed.this_node.name.clone();
        let was_alive = state.observed.is_alive(&me, now);
        state.observed.leases.insert(me, NodeLease { renewed_at, duration });
        drop(state);
        if !was_alive {
            self.leases_changed.notify_one();
        }
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

#[cfg(test)]
mod tests {
    use super::*;
    use addax_plan::observed::ThisNode;
    use k8s_openapi::api::coordination::v1::LeaseSpec;
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

    #[test]
    fn the_own_lease_is_not_taken_from_the_watch() {
        let store = store();
        store.lease_watched(&lease("n1", 100), at(100));
        assert!(!alive(&store, "n1", 100));
        store.own_lease_renewed(at(100), SignedDuration::from_secs(12), at(100));
        store.lease_watched(&lease("n1", 110), at(110));
        store.leases_listed(&[], at(110));
        assert!(alive(&store, "n1", 111) && !alive(&store, "n1", 112));
        store.own_lease_lost();
        assert!(!alive(&store, "n1", 101));
    }
}
