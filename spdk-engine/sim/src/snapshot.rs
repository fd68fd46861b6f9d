//! Snapshots: operators ask for them, agents have replicas take them, and what they hold is checked (rule 19).
//!
//! *What it is.* The agent's part in its smallest form: when the core holds hosts, every member is asked over the network;
//! those that answered in time have the snapshot. When some did not, the agent goes on without them or gives up, by chance.
//!
//! *What is checked.* At the moment a record names a snapshot, every member of its in-sync set has it, all copies are equal,
//! and each block holds what a read between the asking and the recording could have returned. At the end the copies still
//! hold that, whatever power was lost since.
//!
//! *Invariants.* A snapshot that a replica took late, under a name that was given up or without being asked for in time,
//! counts for nothing.

use std::collections::{BTreeMap, BTreeSet};

use mirror_core::{Config, EngineInstance, Epoch, Input, ReplicaId, SnapshotError, SnapshotId, TreeVersion};

use crate::engine::Job;
use crate::faults::MS;
use crate::history::Stamp;
use crate::rng::Rng;
use crate::world::{BLOCKS, EngineRef, Event, ToEngine, ToReplica, World, name, replica_id, replica_index};

/// Longest hold that an agent asks for.
const HOLD_NS: u64 = 200 * MS;
/// How long it waits for replicas.
const TAKE_NS: u64 = 80 * MS;

/// An attempt of an agent.
#[derive(Debug)]
pub(crate) struct Taking {
    id: SnapshotId,
    /// Who was asked and has not answered.
    waiting: BTreeSet<usize>,
    taken: BTreeSet<ReplicaId>,
    failed: bool,
}

/// A snapshot that the record has named.
#[derive(Debug)]
struct Recorded {
    id: SnapshotId,
    holders: BTreeSet<usize>,
    blocks: Vec<u64>,
}

/// What the world knows of snapshots.
#[derive(Debug)]
pub(crate) struct Snapshots {
    rng: Rng,
    /// This run has any.
    wanted: bool,
    /// When each was asked for.
    asked: BTreeMap<SnapshotId, Stamp>,
    recorded: Vec<Recorded>,
}

impl Snapshots {
    /// What happens has a source of chance of its own, so that runs without snapshots stay as they are.
    pub(crate) fn new(seed: u64) -> Self {
        let mut rng = Rng::new(seed.rotate_left(17) ^ 0x0005_4a97);
        let wanted = rng.permille(400);
        Self { rng, wanted, asked: BTreeMap::new(), recorded: Vec::new() }
    }
}

impl World {
    /// Operators ask now and then.
    pub(crate) fn plan_snapshots(&mut self, until: u64) {
        if self.snapshots.wanted {
            for _ in 0..self.snapshots.rng.range(1, 6) {
                let at = self.snapshots.rng.range(20 * MS, until);
                self.post_at(at, Event::Snapshot);
            }
        }
    }

    /// A recurring job that waited for the volume asks as soon as it is there.
    pub(crate) fn snapshot_after_open(&mut self) {
        if self.snapshots.wanted && self.snapshots.rng.permille(500) {
            let after = self.snapshots.rng.range(0, 30 * MS);
            self.post(after, Event::Snapshot);
        }
    }

    pub(crate) fn ask_snapshot(&mut self) {
        if let Some(active) = self.manager.active {
            self.post(0, Event::Engine { to: active, body: ToEngine::Snapshot });
        }
    }

    /// Hosts forget what was before; so does the check.
    pub(crate) fn forget_snapshots(&mut self) {
        self.snapshots.asked.clear();
    }

    pub(crate) fn begin_snapshot(&mut self, me: EngineRef) {
        let id = name(SnapshotId::new(&format!("s{}", self.fresh_id())));
        let at = self.stamp();
        let serving = |w: &mut Self| w.process(me).is_some_and(|p| p.is_serving() && p.snapshot.is_none());
        if serving(self) {
            self.trace(|| format!("{me:?} begins snapshot {id}"));
            self.snapshots.asked.insert(id.clone(), at);
            if let Some(process) = self.process(me) {
                let taking = Taking { id: id.clone(), waiting: BTreeSet::new(), taken: BTreeSet::new(), failed: false };
                process.snapshot = Some(taking);
            }
            self.feed_core(me, Input::SnapshotBegin { id, hold_ns: HOLD_NS });
        }
    }

    /// The members are equal and still: all of them are asked at once.
    pub(crate) fn snapshot_held(&mut self, me: EngineRef, id: SnapshotId, members: &[ReplicaId]) {
        self.trace(|| format!("{me:?} holds hosts for {id}"));
        let Some(process) = self.process(me) else { return };
        let (epoch, instance) = (process.epoch, process.instance().clone());
        let Some(taking) = process.snapshot.as_mut().filter(|t| t.id == id) else { return };
        taking.waiting = members.iter().map(replica_index).collect();
        for replica in taking.waiting.clone() {
            let body = ToReplica::Snapshot { id: id.clone(), epoch, instance: instance.clone() };
            self.send_replica(me, replica, body);
        }
        self.post(TAKE_NS, Event::Engine { to: me, body: ToEngine::SnapshotTimeout { id } });
    }

    /// A replica is asked for a snapshot by whoever it was promoted to, or by somebody else.
    pub(crate) fn take_snapshot(
        &mut self,
        r: usize,
        from: EngineRef,
        id: SnapshotId,
        (epoch, instance): (Epoch, EngineInstance),
    ) {
        let now = self.now;
        let replica = &mut self.replicas[r];
        let owned = replica.allowed && replica.epoch == epoch && replica.instance.as_ref() == Some(&instance);
        let taken = owned && now >= replica.full_until;
        if taken {
            let disk = replica.media.clone();
            replica.snapshots.entry(id.clone()).or_insert(disk);
        }
        self.trace(|| format!("r{r} takes {id}: {taken}"));
        self.send_engine(from, r, ToEngine::SnapshotTaken { replica: r, id, taken });
    }

    pub(crate) fn snapshot_taken(&mut self, me: EngineRef, replica: usize, id: &SnapshotId, taken: bool) {
        let Some(taking) = self.process(me).and_then(|p| p.snapshot.as_mut()).filter(|t| t.id == *id) else { return };
        if !taking.waiting.remove(&replica) {
            return;
        }
        if taken {
            taking.taken.insert(replica_id(replica));
        } else {
            taking.failed = true;
        }
        if taking.waiting.is_empty() {
            self.finish_snapshot(me);
        }
    }

    pub(crate) fn snapshot_timeout(&mut self, me: EngineRef, id: &SnapshotId) {
        let taking = self.process(me).and_then(|p| p.snapshot.as_mut());
        if let Some(taking) = taking.filter(|t| t.id == *id && !t.waiting.is_empty()) {
            taking.waiting.clear();
            taking.failed = true;
            self.finish_snapshot(me);
        }
    }

    fn finish_snapshot(&mut self, me: EngineRef) {
        let go_on = self.snapshots.rng.permille(600);
        let Some(taking) = self.process(me).and_then(|p| p.snapshot.as_ref()) else { return };
        let id = taking.id.clone();
        let input = if taking.failed && !go_on {
            Input::SnapshotAbort { id }
        } else {
            Input::SnapshotTaken { id, replicas: taking.taken.clone() }
        };
        self.feed_core(me, input);
    }

    pub(crate) fn snapshot_done(
        &mut self,
        me: EngineRef,
        id: &SnapshotId,
        result: &Result<TreeVersion, SnapshotError>,
    ) {
        self.trace(|| format!("{me:?} snapshot {id}: {result:?}"));
        let Some(process) = self.process(me) else { return };
        process.snapshot.take_if(|t| t.id == *id);
        let Job::Serving(core) = &process.job else { return };
        if result.is_ok() && core.config().tree.last.as_ref().is_none_or(|last| last.id != *id) {
            self.fail(format!("{me:?} says that {id} is recorded, but its record names another snapshot"));
        }
    }

    /// A record that names a new snapshot is committed.
    pub(crate) fn snapshot_recorded(&mut self, record: &Config) {
        let Some(last) = &record.tree.last else { return };
        let Some(asked) = self.snapshots.asked.remove(&last.id) else { return };
        self.outcome.snapshots += 1;
        let holders: BTreeSet<usize> = record.in_sync.iter().map(replica_index).collect();
        if let Some(r) = holders.iter().find(|r| !self.replicas[**r].snapshots.contains_key(&last.id)) {
            return self.fail(format!("snapshot {} is recorded, but member r{r} has not taken it", last.id));
        }
        let copies: Vec<Vec<u64>> =
            holders.iter().map(|r| self.replicas[*r].snapshots[&last.id].blocks().to_vec()).collect();
        if copies.windows(2).any(|pair| pair[0] != pair[1]) {
            return self.fail(format!("copies of snapshot {} differ: {copies:?}", last.id));
        }
        let end = self.stamp();
        let blocks = copies.into_iter().next().unwrap_or_default();
        for (block, value) in (0..BLOCKS).zip(&blocks) {
            if let Err(contradiction) = self.history.read(block, *value, asked, end) {
                return self.fail(format!("snapshot {}: {contradiction}", last.id));
            }
        }
        self.snapshots.recorded.push(Recorded { id: last.id.clone(), holders, blocks });
    }

    /// What was in a snapshot is still there, on every disk that was not wiped since.
    pub(crate) fn check_snapshots(&mut self) {
        for Recorded { id, holders, blocks } in &self.snapshots.recorded {
            let copies = holders.iter().filter_map(|r| Some((r, self.replicas[*r].snapshots.get(id)?)));
            for (r, copy) in copies {
                if copy.blocks() != blocks {
                    let what = format!("snapshot {id} on r{r} has lost what it held: {:?} {blocks:?}", copy.blocks());
                    self.trace(|| format!("VIOLATION {what}"));
                    self.outcome.violation.get_or_insert(what);
                    return;
                }
            }
        }
    }
}
