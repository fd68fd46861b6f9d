//! The store's memory: published objects, staged changes, history. No I/O, no waiting; owned by the store's lock.
//!
//! A change goes through two steps: [`State::stage`] checks it against the newest staged or published object and gives
//! it a revision; [`State::publish`] makes it visible once it is durable. Between the two it can be taken back
//! ([`State::roll_back`]), and nobody has seen it.

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    ops::Bound,
    sync::Arc,
};

use serde_json::Value;
use tokio::sync::oneshot;

use super::{Durable, Entry, Event, Expect, Key, Listing, STAGED_MAX, Scope, StoreError, StoreOptions};

/// A change on its way to the disk.
#[derive(Debug)]
pub(super) struct Staged {
    pub(super) revision: u64,
    pub(super) key: Key,
    value: Option<Arc<Value>>,
    /// JSON text of the value.
    pub(super) encoded: Option<Vec<u8>>,
    answer: oneshot::Sender<Result<Entry, StoreError>>,
}

impl Staged {
    pub(super) fn new(key: Key, value: Option<Value>, encoded: Option<Vec<u8>>) -> (Self, Durable) {
        let (answer, durable) = oneshot::channel();
        (Self { revision: 0, key, value: value.map(Arc::new), encoded, answer }, durable)
    }
}

/// See the module's text.
#[derive(Debug)]
pub(super) struct State {
    options: StoreOptions,
    pub(super) has_file: bool,
    pub(super) closed: bool,
    /// Why writes are refused, once the file is in an unknown state.
    pub(super) failed: Option<String>,
    /// The last revision given out.
    assigned: u64,
    /// The last revision made visible.
    pub(super) published: u64,
    pub(super) objects: BTreeMap<Key, Entry>,
    /// The newest staged revision of each key that has one; `false` when it is a deletion.
    newest_staged: HashMap<Key, (u64, bool)>,
    staged: Vec<Staged>,
    history: VecDeque<Arc<Event>>,
    history_bytes: usize,
    /// Changes up to this revision are no longer in the history.
    forgotten: u64,
    /// Bytes of JSON of all published objects.
    pub(super) live_bytes: u64,
}

impl State {
    pub(super) fn new(options: StoreOptions, has_file: bool) -> Self {
        Self {
            options,
            has_file,
            closed: false,
            failed: None,
            assigned: 0,
            published: 0,
            objects: BTreeMap::new(),
            newest_staged: HashMap::new(),
            staged: Vec::new(),
            history: VecDeque::new(),
            history_bytes: 0,
            forgotten: 0,
            live_bytes: 0,
        }
    }

    pub(super) fn compact_bytes_min(&self) -> u64 {
        self.options.compact_bytes_min
    }

    /// Checks a change and gives it the next revision.
    pub(super) fn stage(&mut self, mut staged: Staged, expect: Expect) -> Result<(), StoreError> {
        if let Some(why) = &self.failed {
            return Err(StoreError::Failed(why.clone()));
        }
        if self.closed {
            return Err(StoreError::Closed);
        }
        if self.staged.len() >= STAGED_MAX {
            return Err(StoreError::Busy);
        }
        self.check(&staged.key, expect)?;
        self.assigned += 1;
        staged.revision = self.assigned;
        if let Some(value) = &mut staged.value {
            stamp(Arc::make_mut(value), staged.revision);
        }
        self.newest_staged.insert(staged.key.clone(), (staged.revision, staged.value.is_some()));
        self.staged.push(staged);
        Ok(())
    }

    fn check(&self, key: &Key, expect: Expect) -> Result<(), StoreError> {
        let (revision, exists) = match self.newest_staged.get(key) {
            Some(&newest) => newest,
            None => self.objects.get(key).map_or((0, false), |entry| (entry.revision, true)),
        };
        let holds = match expect {
            Expect::Absent => !exists,
            Expect::Revision(expected) => exists && revision == expected,
        };
        if holds { Ok(()) } else { Err(StoreError::Conflict { current: revision }) }
    }

    /// Everything staged so far, oldest first.
    pub(super) fn take_staged(&mut self) -> Vec<Staged> {
        std::mem::take(&mut self.staged)
    }

    pub(super) fn has_staged(&self) -> bool {
        !self.staged.is_empty()
    }

    /// Makes durable changes visible and answers their writers.
    pub(super) fn publish(&mut self, batch: Vec<Staged>) {
        for staged in batch {
            if self.newest_staged.get(&staged.key).is_some_and(|&(revision, _)| revision == staged.revision) {
                self.newest_staged.remove(&staged.key);
            }
            let bytes = staged.encoded.as_ref().map_or(0, Vec::len);
            let entry = self.apply(staged.revision, staged.key, staged.value, bytes, true);
            // The writer may have given up waiting; the change stands all the same.
            let _ = staged.answer.send(Ok(entry));
        }
    }

    /// Takes back changes that could not be made durable, and all that were staged behind them and may build on them.
    pub(super) fn roll_back(&mut self, batch: impl Iterator<Item = Staged>, error: &StoreError) {
        let behind = self.take_staged();
        self.newest_staged.clear();
        // Nobody saw these revisions, and the file does not hold them: give them out again.
        self.assigned = self.published;
        for staged in batch.chain(behind) {
            let _ = staged.answer.send(Err(error.clone()));
        }
    }

    /// Whether the revision was given out and is neither published nor taken back.
    pub(super) fn is_staged(&self, revision: u64) -> bool {
        revision > self.published && revision <= self.assigned
    }

    /// Applies one change to the objects and, if asked, to the history. Returns the entry as it is now, or as it was
    /// when it is deleted.
    pub(super) fn apply(
        &mut self,
        revision: u64,
        key: Key,
        value: Option<Arc<Value>>,
        bytes: usize,
        remember: bool,
    ) -> Entry {
        let previous = match &value {
            Some(value) => self.objects.insert(key.clone(), Entry { revision, value: value.clone(), bytes }),
            None => self.objects.remove(&key),
        };
        let previous_bytes = previous.as_ref().map_or(0, |entry| entry.bytes);
        self.live_bytes = (self.live_bytes + bytes as u64).saturating_sub(previous_bytes as u64);
        self.published = self.published.max(revision);
        self.assigned = self.assigned.max(revision);
        let now = Entry {
            revision,
            value: value.clone().or_else(|| previous.as_ref().map(|entry| entry.value.clone())).unwrap_or_default(),
            bytes,
        };
        if remember {
            self.remember(Event { revision, key, value, previous, bytes: bytes + previous_bytes });
        }
        now
    }

    /// Sets the counters after loading a compacted base.
    pub(super) fn start_history_at(&mut self, revision: u64) {
        self.assigned = self.assigned.max(revision);
        self.published = self.published.max(revision);
        self.forgotten = self.published;
    }

    fn remember(&mut self, event: Event) {
        self.history_bytes += event.bytes;
        self.history.push_back(Arc::new(event));
        while self.history.len() > self.options.history_events_max
            || self.history_bytes > self.options.history_bytes_max
        {
            if !self.forget_oldest() {
                break;
            }
        }
    }

    fn forget_oldest(&mut self) -> bool {
        let Some(oldest) = self.history.pop_front() else {
            return false;
        };
        self.history_bytes -= oldest.bytes;
        self.forgotten = oldest.revision;
        true
    }

    /// Forgets the history up to and including a revision.
    pub(super) fn forget_until(&mut self, revision: u64) {
        while self.history.front().is_some_and(|event| event.revision <= revision) {
            self.forget_oldest();
        }
        self.forgotten = self.forgotten.max(revision);
    }

    /// Fails when what happened after `revision` is not all known.
    pub(super) fn check_history(&self, revision: u64) -> Result<(), StoreError> {
        if revision < self.forgotten || revision > self.published {
            return Err(StoreError::Expired { asked: revision, oldest: self.forgotten, newest: self.published });
        }
        Ok(())
    }

    /// Events of a scope after a position, at most `max`, and the position they lead to.
    pub(super) fn events_after(&self, scope: &Scope, position: u64, max: usize) -> (Vec<Arc<Event>>, u64) {
        let first = self.history.partition_point(|event| event.revision <= position);
        let mut batch = Vec::new();
        for event in self.history.range(first..) {
            if batch.len() == max {
                return (batch, event.revision - 1);
            }
            if scope.contains(&event.key) {
                batch.push(event.clone());
            }
        }
        (batch, self.published)
    }

    pub(super) fn list(&self, scope: &Scope, after: Option<&Key>, at: Option<u64>) -> Result<Listing, StoreError> {
        let revision = at.unwrap_or(self.published);
        let entries = self
            .objects
            .range((scope.start(after), Bound::Unbounded))
            .take_while(|(key, _)| !scope.ends_before(key))
            .filter(|(key, _)| scope.contains(key))
            .map(|(key, entry)| (key.clone(), entry.clone()));
        if revision == self.published {
            return Ok(Listing { revision, entries: entries.collect() });
        }
        self.check_history(revision)?;
        let mut entries = entries.collect();
        self.undo_until(revision, scope, after, &mut entries);
        Ok(Listing { revision, entries: entries.into_iter().collect() })
    }

    /// Takes the objects of a scope back to a past revision, by undoing the history from its newest event.
    fn undo_until(&self, revision: u64, scope: &Scope, after: Option<&Key>, entries: &mut BTreeMap<Key, Entry>) {
        for event in self.history.iter().rev().take_while(|event| event.revision > revision) {
            if !scope.contains(&event.key) || after.is_some_and(|after| event.key <= *after) {
                continue;
            }
            match &event.previous {
                Some(previous) => entries.insert(event.key.clone(), previous.clone()),
                None => entries.remove(&event.key),
            };
        }
    }
}

/// Writes the revision into the object.
pub(super) fn stamp(value: &mut Value, revision: u64) {
    if let Some(metadata) = value.get_mut("metadata").and_then(Value::as_object_mut) {
        metadata.insert("resourceVersion".to_owned(), Value::String(revision.to_string()));
    }
}
