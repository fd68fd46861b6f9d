//! An arbiter in memory, for tests: correct, but as unreliable as asked.
//!
//! *What it is.* Records in a map. Faults are queued and each takes the next swap: its request may be dropped, delayed
//! beyond the answer (the *queued request* of rule 7), committed without an answer, or lose against another writer.
//!
//! *Invariants.* A delayed request is a compare-and-swap like any other when it is let go: it fails if the record
//! changed in between, even if it changed back.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};

use futures::future::BoxFuture;
use mirror_core::{Config, ConfigVersion, RecordError, SwapOutcome};

use super::{Arbiter, Concluded, Conclusion, History, Judgement, judge};

/// How the next swap goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The request is lost; the caller does not know.
    Lost,
    /// The request is committed; the caller does not know.
    CommittedSilently,
    /// The request is held back until [`MemoryArbiter::release`]; the caller does not know.
    Held,
}

#[derive(Debug, Default)]
struct Store {
    records: BTreeMap<String, (u64, Config)>,
    faults: VecDeque<Fault>,
    held: Vec<(String, u64, Config)>,
    away: bool,
    history: Vec<(String, Config)>,
    told: BTreeMap<String, History>,
}

/// See the module.
#[derive(Clone, Debug, Default)]
pub struct MemoryArbiter {
    store: Arc<Mutex<Store>>,
}

impl MemoryArbiter {
    /// Puts a record in, as its maker or a foreign engine does.
    pub fn put(&self, volume: &str, config: Config) {
        self.lock().write(volume, config);
    }

    /// The record as it is.
    pub fn get(&self, volume: &str) -> Option<Config> {
        self.lock().records.get(volume).map(|(_, config)| config.clone())
    }

    /// All records that were ever committed, in order.
    pub fn history(&self, volume: &str) -> Vec<Config> {
        let store = self.lock();
        store.history.iter().filter(|(name, _)| name == volume).map(|(_, config)| config.clone()).collect()
    }

    /// Takes a record away, as somebody who removes the status.
    pub fn lose(&self, volume: &str) {
        self.lock().records.remove(volume);
    }

    /// Makes the next swap go wrong; several are used in turn.
    pub fn fault(&self, fault: Fault) {
        self.lock().faults.push_back(fault);
    }

    /// Makes it unreachable, or reachable again.
    pub fn set_away(&self, away: bool) {
        self.lock().away = away;
    }

    /// Lets the held requests reach the store now; how many of them were committed.
    pub fn release(&self) -> usize {
        let mut store = self.lock();
        let held = std::mem::take(&mut store.held);
        let mut committed = 0;
        for (volume, version, next) in held {
            if store.records.get(&volume).is_some_and(|(now, _)| *now == version) {
                store.write(&volume, next);
                committed += 1;
            }
        }
        committed
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Store> {
        self.store.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Store {
    fn write(&mut self, volume: &str, config: Config) {
        let version = self.records.get(volume).map_or(0, |(version, _)| *version) + 1;
        self.history.push((volume.to_owned(), config.clone()));
        self.records.insert(volume.to_owned(), (version, config));
    }

    fn swap(&mut self, volume: &str, expect: &ConfigVersion, next: &Config) -> SwapOutcome {
        if self.away {
            return SwapOutcome::Unknown;
        }
        let Some((version, current)) = self.records.get(volume).cloned() else {
            return SwapOutcome::Unknown;
        };
        match judge(&current, expect, next) {
            Judgement::Done => return SwapOutcome::Committed,
            Judgement::Refuse => return SwapOutcome::Refused { current },
            Judgement::Write => {}
        }
        match self.faults.pop_front() {
            None => {
                self.write(volume, next.clone());
                SwapOutcome::Committed
            }
            Some(Fault::Lost) => SwapOutcome::Unknown,
            Some(Fault::CommittedSilently) => {
                self.write(volume, next.clone());
                SwapOutcome::Unknown
            }
            Some(Fault::Held) => {
                self.held.push((volume.to_owned(), version, next.clone()));
                SwapOutcome::Unknown
            }
        }
    }
}

impl Arbiter for MemoryArbiter {
    fn read<'a>(&'a self, volume: &'a str) -> BoxFuture<'a, Result<Config, RecordError>> {
        Box::pin(async move {
            let store = self.lock();
            if store.away {
                return Err(RecordError::Unavailable);
            }
            store.records.get(volume).map(|(_, config)| config.clone()).ok_or(RecordError::NotFound)
        })
    }

    fn swap<'a>(&'a self, volume: &'a str, expect: &'a ConfigVersion, next: &'a Config) -> BoxFuture<'a, SwapOutcome> {
        Box::pin(async move { self.lock().swap(volume, expect, next) })
    }

    fn read_history<'a>(&'a self, volume: &'a str) -> BoxFuture<'a, Result<History, RecordError>> {
        Box::pin(async move {
            let store = self.lock();
            if store.away {
                return Err(RecordError::Unavailable);
            }
            let record = store.records.get(volume).map(|(_, config)| config.clone());
            Ok(History { record, ..store.told.get(volume).cloned().unwrap_or_default() })
        })
    }

    fn conclude<'a>(
        &'a self,
        volume: &'a str,
        expect: Option<&'a ConfigVersion>,
        conclusion: &'a Conclusion,
    ) -> BoxFuture<'a, Concluded> {
        Box::pin(async move {
            let mut store = self.lock();
            if store.away {
                return Concluded::Unknown;
            }
            if store.records.get(volume).map(|(_, config)| config.version()).as_ref() != expect {
                return Concluded::Refused;
            }
            store.write(volume, conclusion.config.clone());
            let told = store.told.entry(volume.to_owned()).or_default();
            told.discarded = conclusion.set_aside(&told.discarded);
            addax_api::recovery::append(&mut told.accounts, conclusion.account.clone());
            Concluded::Done
        })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::arbiter::record_to_config;
    use addax_api::VolumeConfig;

    pub(crate) fn config(number: u64, in_sync: &[&str]) -> Config {
        let record = VolumeConfig {
            lineage: "l".to_owned(),
            epoch: 1,
            engine_instance: "e".to_owned(),
            config_number: number,
            in_sync: in_sync.iter().map(|name| (*name).to_owned()).collect(),
            rebuilding: Vec::new(),
            min_in_sync: 1,
            size: 1 << 20,
            clean: false,
            snapshots: Default::default(),
        };
        record_to_config(&record).unwrap()
    }

    /// Rule 7: a request still queued must not be committed after a later one settled the matter.
    #[tokio::test]
    async fn a_queued_request_fails_after_the_matter_was_settled() {
        let arbiter = MemoryArbiter::default();
        let (base, add, leave) = (config(1, &["a"]), config(2, &["a", "c"]), config(2, &["a"]));
        arbiter.put("v", base.clone());
        arbiter.fault(Fault::Held);
        assert_eq!(arbiter.swap("v", &base.version(), &add).await, SwapOutcome::Unknown);
        assert_eq!(arbiter.read("v").await.unwrap(), base, "a re-read proves nothing");
        assert_eq!(arbiter.swap("v", &base.version(), &leave).await, SwapOutcome::Committed);
        assert_eq!(arbiter.release(), 0);
        assert_eq!(arbiter.get("v").unwrap(), leave);
    }

    #[tokio::test]
    async fn sending_again_tells_what_became_of_it() {
        let arbiter = MemoryArbiter::default();
        let (base, next) = (config(1, &["a", "b"]), config(2, &["a"]));
        for (fault, commits) in [(Fault::Lost, 2), (Fault::CommittedSilently, 2), (Fault::Held, 2)] {
            let arbiter = MemoryArbiter::default();
            arbiter.put("v", base.clone());
            arbiter.fault(fault);
            assert_eq!(arbiter.swap("v", &base.version(), &next).await, SwapOutcome::Unknown);
            assert_eq!(arbiter.swap("v", &base.version(), &next).await, SwapOutcome::Committed, "{fault:?}");
            assert_eq!(arbiter.release(), 0, "{fault:?}");
            assert_eq!(arbiter.history("v").len(), commits, "{fault:?}");
        }
        arbiter.put("v", config(5, &["b"]));
        let outcome = arbiter.swap("v", &base.version(), &next).await;
        assert_eq!(outcome, SwapOutcome::Refused { current: config(5, &["b"]) });
    }
}
