//! Whether engines suspect themselves when members are lost one after the other (rule 12), as seen from outside.
//!
//! *What is checked.* A member that is lost while most of those that there were a short time ago are gone too gets the long
//! window before it is ejected: only so may a set of three fall to one within two losses. What the engine itself was told
//! of its connections is noted here, without a look into its core.

use std::collections::{BTreeMap, BTreeSet};

use mirror_core::{Config, DropReason};

use crate::engine::{GRACE_LONG_NS, Job};
use crate::world::{EngineRef, World, replica_index};

/// What an engine was told of losses; times by replica.
#[derive(Debug, Default)]
pub(crate) struct Losses {
    lost: BTreeMap<usize, u64>,
    /// When the swap was asked for that takes it out.
    asked: BTreeMap<usize, u64>,
    /// Left as lost, and not back.
    gone: BTreeMap<usize, u64>,
}

impl Losses {
    pub(crate) fn lost(&mut self, replica: usize, now: u64) {
        self.lost.insert(replica, now);
    }

    /// A connection to `replica` is there; `alone` when no member had one.
    pub(crate) fn back(&mut self, replica: usize, now: u64, alone: bool) {
        self.lost.remove(&replica);
        self.gone.remove(&replica);
        if alone {
            self.lost.values_mut().for_each(|since| *since = now);
        }
    }

    /// A swap is asked for that leaves these out.
    fn asks(&mut self, leaving: impl Iterator<Item = usize>, now: u64) {
        for replica in leaving {
            self.asked.entry(replica).or_insert(now);
        }
    }

    /// A member left as lost, and these stay. Whether it and those before it are too many for so short a time.
    fn left(&mut self, replica: usize, stay: &BTreeSet<usize>, now: u64) -> bool {
        let (Some(asked), Some(since)) = (self.asked.remove(&replica), self.lost.get(&replica).copied()) else {
            return false;
        };
        self.gone.insert(replica, now);
        let bad = self.gone.values().filter(|at| **at + GRACE_LONG_NS > since).count();
        asked < since + GRACE_LONG_NS && bad > 1 && bad * 2 > stay.len() + bad
    }
}

impl World {
    /// No member of the engine's record has a connection.
    pub(crate) fn reaches_no_member(&self, me: EngineRef) -> bool {
        let Some(process) = self.process_ref(me) else { return false };
        let Job::Serving(core) = &process.job else { return false };
        let members: Vec<usize> = core.config().in_sync.iter().map(replica_index).collect();
        !process.legs.values().any(|l| l.conn.is_some() && members.contains(&l.replica))
    }

    pub(crate) fn asks_to_leave(&mut self, me: EngineRef, next: &Config) {
        let now = self.now;
        let Some(process) = self.process(me) else { return };
        let Job::Serving(core) = &process.job else { return };
        let leaving: Vec<usize> = core.config().in_sync.difference(&next.in_sync).map(replica_index).collect();
        process.losses.asks(leaving.into_iter(), now);
    }

    /// An operator wants it gone, lost or not: that is no suspicion.
    pub(crate) fn removal_asked(&mut self, me: EngineRef, replica: usize) {
        if let Some(process) = self.process(me) {
            process.losses.lost.remove(&replica);
        }
    }

    /// The core lets a leg go.
    pub(crate) fn leg_left(&mut self, me: EngineRef, replica: usize, reason: DropReason) {
        let now = self.now;
        let Some(process) = self.process(me) else { return };
        let Job::Serving(core) = &process.job else { return };
        let stay = core.config().in_sync.iter().map(replica_index).collect();
        if reason != DropReason::Lost {
            process.losses.asked.remove(&replica);
        } else if process.losses.left(replica, &stay, now) {
            self.fail(format!("{me:?} ejects r{replica} shortly after others, although most are gone by now"));
        }
    }
}
