//! The arbiter: one record, changed by compare-and-swap only. Every accepted record is checked.
//!
//! It may be restored from an old copy, or lose the record. Then it is in *recovery hold* (rule 21): nothing is read or
//! swapped until the recovery has fenced and read every replica and put the right record in place.

use std::collections::{BTreeMap, BTreeSet};

use mirror_core::recover::{AskReason, Evidence, Recovery, ReplicaKnows, Report, may_delete, recover};
use mirror_core::{Config, ConfigVersion, EngineInstance, Epoch, Lineage, SwapOutcome};

use crate::faults::MS;
use crate::model_bug::ModelBug;
use crate::world::{Event, REPLICAS, World, name, replica_id};

#[derive(Debug)]
pub(crate) struct Arbiter {
    pub(crate) record: Config,
    /// Records that were.
    past: Vec<Config>,
    /// Lineages that were ever used (rule 11).
    lineages: BTreeSet<Lineage>,
    /// The record is in doubt.
    pub(crate) hold: bool,
    /// And it is gone altogether.
    gone: bool,
    recoveries: u32,
}

impl Arbiter {
    pub(crate) fn new(record: Config) -> Self {
        let lineages = [record.lineage.clone()].into();
        Self { record, past: Vec::new(), lineages, hold: false, gone: false, recoveries: 0 }
    }

    /// What a reader is told; `None` is no answer.
    pub(crate) fn read(&self) -> Option<Config> {
        (!self.hold).then(|| self.record.clone())
    }

    /// Executes a request; the error is a violation of the rules, not a refusal. `None` is no answer.
    pub(crate) fn swap(&mut self, expect: &ConfigVersion, next: Config) -> Result<Option<SwapOutcome>, String> {
        if self.gone {
            return Ok(None);
        }
        if self.record.version() != *expect {
            return Ok(Some(SwapOutcome::Refused { current: self.record.clone() }));
        }
        if self.hold {
            return Ok(None);
        }
        self.record.check_successor(&next).map_err(|e| format!("the arbiter was given an unlawful record: {e}"))?;
        self.past.push(std::mem::replace(&mut self.record, next));
        Ok(Some(SwapOutcome::Committed))
    }
}

impl World {
    /// An engine's swap.
    pub(crate) fn swap(&mut self, expect: &ConfigVersion, next: Config) -> Result<Option<SwapOutcome>, String> {
        let before = self.arbiter.record.clone();
        let outcome = self.arbiter.swap(expect, next);
        let after = self.arbiter.record.clone();
        self.note_record(&before, &after);
        outcome
    }

    /// The arbiter is restored from an old copy, or loses the record.
    pub(crate) fn restore_arbiter(&mut self) {
        // What never carried a superblock is beyond the simulated recovery: an operator would be asked.
        let carried = (0..REPLICAS).all(|r| self.replicas[r].superblock().is_some());
        if self.arbiter.hold || !carried || self.arbiter.past.is_empty() {
            return;
        }
        let gone = self.rng.permille(300);
        let copy = self.rng.index(self.arbiter.past.len());
        self.arbiter.record = self.arbiter.past[copy].clone();
        self.arbiter.past.truncate(copy);
        self.trace(|| if gone { "the record is gone".to_owned() } else { "the record is an old copy".to_owned() });
        if self.breaks(ModelBug::Rule21NoHold) {
            return self.manager.doubt();
        }
        (self.arbiter.hold, self.arbiter.gone) = (true, gone);
        self.post(20 * MS, Event::Recover);
    }

    /// One attempt: fences every replica, reads it when it is drained, and decides.
    pub(crate) fn recover_step(&mut self) {
        if !self.arbiter.hold {
            return;
        }
        let author: EngineInstance = name(EngineInstance::new(&format!("recovery-{}", self.arbiter.recoveries)));
        let highest = self.replicas.iter().map(|r| r.epoch).max().unwrap_or_default();
        let epoch = Epoch(highest.0.max(self.arbiter.record.epoch.0) + 1);
        let mut replicas = BTreeMap::new();
        for r in 0..REPLICAS {
            let report = self.fence_and_read(r, epoch, &author);
            replicas.insert(replica_id(r), report);
        }
        let new_lineage: Lineage = name(Lineage::new(&format!("l1-{}", self.arbiter.recoveries + 1)));
        let record = (!self.arbiter.gone).then(|| self.arbiter.record.clone());
        match recover(&Evidence { record, replicas, new_lineage, author }) {
            Recovery::Wait(missing) => {
                self.trace(|| format!("recovery waits for {missing:?}"));
                self.post(20 * MS, Event::Recover);
            }
            // After a recovery some replica may not have been seen since: an operator knows which history goes on.
            Recovery::Ask(AskReason::Lineages(_)) if self.arbiter.recoveries > 0 => self.operator_asked(),
            Recovery::Ask(reason) => self.fail(format!("the recovery must ask: {reason}")),
            Recovery::Keep => self.recovered(None),
            Recovery::Raise(config) => self.recovered(Some(*config)),
            Recovery::Rebuild(mut config) => {
                if self.breaks(ModelBug::Rule11SameLineage) {
                    config.lineage = self.arbiter.record.lineage.clone();
                }
                self.recovered(Some(*config));
            }
        }
    }

    /// An operator wants a replica gone: its agent deletes the data as soon as that is allowed (rule 22).
    pub(crate) fn delete_step(&mut self, r: usize, until: u64) {
        let record = self.arbiter.read();
        let report = self.report(r);
        let hasty = self.breaks(ModelBug::Rule22DeleteAtOnce);
        if hasty || may_delete(record.as_ref(), &replica_id(r), &report).is_ok() {
            self.trace(|| format!("the data of r{r} is deleted"));
            self.outcome.deletions += 1;
            self.wipe(r);
        } else if self.now < until {
            self.post(20 * MS, Event::Delete { replica: r, until });
        }
    }

    fn report(&self, r: usize) -> Report {
        let replica = &self.replicas[r];
        match replica.superblock() {
            _ if !replica.up => Report::Unread,
            Some(superblock) => Report::Knows(Box::new(ReplicaKnows::of(&superblock, replica.epoch))),
            None => Report::Unread,
        }
    }

    fn fence_and_read(&mut self, r: usize, epoch: Epoch, author: &EngineInstance) -> Report {
        if !self.replicas[r].up {
            return Report::Unread;
        }
        if !self.breaks(ModelBug::Rule21ReadUnfenced) {
            self.fence(r, epoch, author);
            if !self.replicas[r].disk.is_empty() {
                return Report::Unread; // Not drained yet.
            }
        }
        if self.replicas[r].superblock().is_none() { Report::Empty } else { self.report(r) }
    }

    fn recovered(&mut self, record: Option<Config>) {
        self.trace(|| format!("recovered: {record:?}"));
        if let Some(record) = record {
            let old = &self.arbiter.record;
            let changed = record.in_sync != old.in_sync || record.config_number != old.config_number;
            if changed && self.arbiter.lineages.contains(&record.lineage) {
                return self.fail(format!("a record was rebuilt under the lineage {} of another one", record.lineage));
            }
            self.arbiter.lineages.insert(record.lineage.clone());
            self.arbiter.record = record;
            self.note_unknown(None);
        }
        self.arbiter.recoveries += 1;
        self.outcome.recoveries += 1;
        (self.arbiter.hold, self.arbiter.gone) = (false, false);
        self.manager.doubt();
    }
}
