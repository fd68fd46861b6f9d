//! The one snapshot that every plan looks at, and who is woken when it changes.
//!
//! ```text
//! watches ──▶ objects ─┐                    ┌─▶ queues, one per kind
//! answers ──▶ objects ─┼─▶ Observed ─ wakes ┤
//! leases  ──▶ leases  ─┤   (one mutex)      ├─▶ agents (which streams to hold)
//! streams ──▶ agents  ─┘                    └─▶ the lease timer
//! ```
//!
//! *Invariants.* 1. The mutex is never held across an await, and nothing under it does I/O. 2. Read your writes: what
//! the API server answers is put in, and nothing older replaces it (versions are compared). What a watch has already
//! told the end of never comes back by a late answer: an answer that is not newer than the watch's position is dropped
//! when its object is not here. 3. Every change wakes the keys that `addax_plan::related` names, with the snapshot
//! before and the one after.
//!
//! *When things fail.* A lost watch is listed again and the snapshot made equal to the list; until then it is old, which
//! costs conflicts and nothing else. A plan that panics leaves the snapshot as it was: the mutex is not poisoned for
//! others.

mod agents;
mod kinds;
mod leases;
mod objects;
pub(crate) mod watch;

use std::collections::{BTreeMap, HashMap};
use std::sync::{Mutex, MutexGuard, PoisonError};

use addax_plan::action::{CallTarget, Key, Kind};
use addax_plan::observed::{Observed, ThisNode};
use addax_plan::related;
use jiff::Timestamp;
use tokio::sync::Notify;

pub(crate) use agents::{AgentChange, AgentInstance};
pub use kinds::Stored;
pub(crate) use kinds::with_kind;
pub(crate) use leases::renew_interval;

use crate::queue::Queue;

/// The snapshot and those who wait for its changes.
#[derive(Debug)]
pub struct Datastore {
    state: Mutex<State>,
    queues: BTreeMap<Kind, Queue<Key>>,
    /// An InstanceManager, or who is alive, has changed.
    pub(crate) agents_changed: Notify,
    /// A lease has come to life.
    pub(crate) leases_changed: Notify,
    /// Watches have told nothing for too long: they begin anew.
    pub(crate) watches_stale: Notify,
}

#[derive(Debug, Default)]
struct State {
    observed: Observed,
    /// How far each kind's watch has told: the highest version.
    positions: BTreeMap<Kind, u64>,
    /// Objects whose end an answer has told before the watch, by uid.
    ended: HashMap<Key, String>,
    /// By what holder the own lease is known.
    identity: String,
    /// The renewal that each lease told last.
    renewals: HashMap<String, Timestamp>,
    /// How often each object of each agent has been told of.
    marks: HashMap<String, agents::Marks>,
    /// How often a call has failed in a row.
    failures: HashMap<(String, CallTarget), u32>,
}

impl Datastore {
    /// An empty snapshot for the manager of a node.
    pub fn new(this_node: ThisNode) -> Self {
        let state = State { observed: Observed { this_node, ..Observed::default() }, ..State::default() };
        Self {
            state: Mutex::new(state),
            queues: Kind::ALL.into_iter().map(|kind| (kind, Queue::default())).collect(),
            agents_changed: Notify::new(),
            leases_changed: Notify::new(),
            watches_stale: Notify::new(),
        }
    }

    /// Looks at the snapshot. Others wait meanwhile, so `look` is to be short.
    pub fn read<R>(&self, look: impl FnOnce(&Observed) -> R) -> R {
        look(&self.lock().observed)
    }

    /// The kind's queue.
    pub fn queue(&self, kind: Kind) -> &Queue<Key> {
        // Made for every kind in `new`.
        &self.queues[&kind]
    }

    /// Asks for passes.
    pub fn wake(&self, keys: impl IntoIterator<Item = Key>) {
        keys.into_iter().for_each(|key| self.queue(key.kind).add(key));
    }

    /// Asks for a pass over everything.
    pub fn wake_everything(&self) {
        let keys = self.read(related::everything);
        self.wake(keys);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Changes are single calls that do not panic half-way; a panicking plan only reads.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
