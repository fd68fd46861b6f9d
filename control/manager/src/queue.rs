//! A level-triggered work queue: says which key to look at next, and forgets why.
//!
//! *What it is.* A key is in one of these states: idle (not here), waiting for a time, ready, or running. Adding a key
//! that is ready changes nothing; adding one that runs makes it ready again when its pass is over. So there is at most
//! one pass per key at a time, and no change is lost.
//!
//! *Invariants.* The size is bounded by the number of keys. One consumer waits in [`Queue::next`]; any number add. A
//! key leaves only when a pass has succeeded: failures wait longer and longer ([`FIRST_DELAY`] to [`LONGEST_DELAY`]),
//! but are tried for ever. A new reason to look at a key does not wait for the delay.
//!
//! *At rest* nothing wakes: there is a timer only while some key waits for one.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::hash::Hash;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;

/// Delay after the first failure.
pub const FIRST_DELAY: Duration = Duration::from_millis(5);
/// Longest delay between failures.
pub const LONGEST_DELAY: Duration = Duration::from_secs(60);
/// After so many conflicts in a row a key waits like one that failed: its snapshot does not get newer by itself.
const CONFLICTS_AT_ONCE: u32 = 5;

/// How a pass ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// All is done; look again at that time, if any.
    Done(Option<Instant>),
    /// The snapshot was old: repeat at once.
    Conflict,
    /// It failed: repeat after a growing delay.
    Failed,
}

/// The queue.
#[derive(Debug)]
pub struct Queue<K> {
    state: Mutex<State<K>>,
    wake: Notify,
}

#[derive(Debug)]
struct State<K> {
    ready: VecDeque<K>,
    timers: BTreeSet<(Instant, K)>,
    entries: HashMap<K, Entry>,
}

#[derive(Debug, Default)]
struct Entry {
    phase: Phase,
    due: Option<Instant>,
    failures: u32,
    conflicts: u32,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Phase {
    #[default]
    Idle,
    Ready,
    Running,
    /// Running, and to be looked at again.
    Dirty,
}

impl<K> Default for Queue<K> {
    fn default() -> Self {
        let state = State { ready: VecDeque::new(), timers: BTreeSet::new(), entries: HashMap::new() };
        Self { state: Mutex::new(state), wake: Notify::new() }
    }
}

impl<K: Clone + Ord + Hash> Queue<K> {
    /// Asks for a pass over the key.
    pub fn add(&self, key: K) {
        if self.lock().make_ready(key) {
            self.wake.notify_one();
        }
    }

    /// The next key to look at; it runs until [`Self::done`] is called for it. Dropping the future loses nothing.
    pub async fn next(&self) -> K {
        loop {
            let timer = {
                let mut state = self.lock();
                state.promote(Instant::now());
                if let Some(key) = state.take() {
                    return key;
                }
                state.timers.first().map(|(due, _)| *due)
            };
            match timer {
                None => self.wake.notified().await,
                Some(due) => tokio::select! {
                    () = self.wake.notified() => {}
                    () = tokio::time::sleep_until(due) => {}
                },
            }
        }
    }

    /// Ends the pass over a key.
    pub fn done(&self, key: &K, outcome: Outcome) {
        self.lock().finish(key, outcome, Instant::now());
        self.wake.notify_one();
    }

    /// Whether there is nothing to do and nothing to wait for.
    #[cfg(test)]
    pub fn is_empty(&self) -> bool {
        self.lock().entries.is_empty()
    }

    fn lock(&self) -> MutexGuard<'_, State<K>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<K: Clone + Ord + Hash> State<K> {
    /// Returns whether the consumer has something new.
    fn make_ready(&mut self, key: K) -> bool {
        let entry = self.entries.entry(key.clone()).or_default();
        match entry.phase {
            Phase::Idle => {
                if let Some(due) = entry.due.take() {
                    self.timers.remove(&(due, key.clone()));
                }
                entry.phase = Phase::Ready;
                self.ready.push_back(key);
                true
            }
            Phase::Running => {
                entry.phase = Phase::Dirty;
                false
            }
            Phase::Ready | Phase::Dirty => false,
        }
    }

    fn promote(&mut self, now: Instant) {
        while let Some((due, key)) = self.timers.pop_first() {
            if due > now {
                self.timers.insert((due, key));
                return;
            }
            if let Some(entry) = self.entries.get_mut(&key) {
                entry.due = None;
            }
            self.make_ready(key);
        }
    }

    fn take(&mut self) -> Option<K> {
        let key = self.ready.pop_front()?;
        if let Some(entry) = self.entries.get_mut(&key) {
            entry.phase = Phase::Running;
        }
        Some(key)
    }

    fn finish(&mut self, key: &K, outcome: Outcome, now: Instant) {
        let Some(entry) = self.entries.get_mut(key) else {
            return;
        };
        let dirty = entry.phase == Phase::Dirty;
        entry.phase = Phase::Idle;
        let due = match outcome {
            Outcome::Done(due) => {
                (entry.failures, entry.conflicts) = (0, 0);
                due
            }
            Outcome::Conflict if entry.conflicts < CONFLICTS_AT_ONCE => {
                entry.conflicts += 1;
                Some(now)
            }
            Outcome::Conflict | Outcome::Failed => {
                let delay = delay(entry.failures);
                entry.failures = entry.failures.saturating_add(1);
                Some(now + delay)
            }
        };
        if dirty || due.is_some_and(|due| due <= now) {
            self.make_ready(key.clone());
        } else if let Some(due) = due {
            entry.due = Some(due);
            self.timers.insert((due, key.clone()));
        } else {
            self.entries.remove(key);
        }
    }
}

/// The delay after so many earlier failures.
pub fn delay(failures: u32) -> Duration {
    let factor = 1_u32.checked_shl(failures).unwrap_or(u32::MAX);
    FIRST_DELAY.saturating_mul(factor).min(LONGEST_DELAY)
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::FutureExt;
    use proptest::prelude::*;

    /// The next key if there is one now.
    fn poll(queue: &Queue<u32>) -> Option<u32> {
        queue.next().now_or_never()
    }

    #[tokio::test(start_paused = true)]
    async fn a_key_that_is_added_twice_is_looked_at_once() {
        let queue = Queue::default();
        [1, 2, 1].into_iter().for_each(|key| queue.add(key));
        assert_eq!([poll(&queue), poll(&queue), poll(&queue)], [Some(1), Some(2), None]);
        queue.done(&1, Outcome::Done(None));
        queue.done(&2, Outcome::Done(None));
        assert!(queue.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn a_key_that_changes_while_it_runs_is_looked_at_again_but_not_meanwhile() {
        let queue = Queue::default();
        queue.add(1);
        assert_eq!(poll(&queue), Some(1));
        queue.add(1);
        assert_eq!(poll(&queue), None);
        queue.done(&1, Outcome::Done(None));
        assert_eq!(poll(&queue), Some(1));
        queue.done(&1, Outcome::Done(None));
        assert_eq!(poll(&queue), None);
    }

    #[tokio::test(start_paused = true)]
    async fn failures_wait_longer_and_longer_and_are_never_given_up() {
        let queue = Queue::default();
        queue.add(1);
        assert_eq!(queue.next().await, 1);
        for failures in 0..40 {
            let start = Instant::now();
            queue.done(&1, Outcome::Failed);
            assert_eq!(queue.next().await, 1);
            let waited = start.elapsed();
            assert!(waited >= delay(failures) && waited < delay(failures) + Duration::from_millis(2), "{waited:?}");
        }
        assert_eq!(delay(40), LONGEST_DELAY);
        queue.done(&1, Outcome::Done(None));
        queue.add(1);
        assert_eq!(queue.next().await, 1);
        let start = Instant::now();
        queue.done(&1, Outcome::Failed);
        assert_eq!(queue.next().await, 1);
        assert!(start.elapsed() < Duration::from_millis(10), "a success forgets the failures");
    }

    #[tokio::test(start_paused = true)]
    async fn a_change_does_not_wait_for_the_delay() {
        let queue = Queue::default();
        queue.add(1);
        assert_eq!(poll(&queue), Some(1));
        queue.done(&1, Outcome::Done(Some(Instant::now() + Duration::from_secs(30))));
        assert_eq!(poll(&queue), None);
        queue.add(1);
        assert_eq!(poll(&queue), Some(1));
        queue.done(&1, Outcome::Done(None));
        assert!(queue.is_empty(), "the old timer went with the new reason");
    }

    #[tokio::test(start_paused = true)]
    async fn conflicts_are_repeated_at_once_but_not_for_ever() {
        let queue = Queue::default();
        queue.add(1);
        assert_eq!(poll(&queue), Some(1));
        for _ in 0..CONFLICTS_AT_ONCE {
            queue.done(&1, Outcome::Conflict);
            assert_eq!(poll(&queue), Some(1));
        }
        queue.done(&1, Outcome::Conflict);
        assert_eq!(poll(&queue), None);
        assert_eq!(queue.next().await, 1);
    }

    #[tokio::test(start_paused = true)]
    async fn the_earliest_timer_comes_first() {
        let queue = Queue::default();
        for (key, seconds) in [(1, 20), (2, 10)] {
            queue.add(key);
            assert_eq!(poll(&queue), Some(key));
            queue.done(&key, Outcome::Done(Some(Instant::now() + Duration::from_secs(seconds))));
        }
        assert_eq!((queue.next().await, queue.next().await), (2, 1));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// Whatever happens in whatever order, no two passes of a key overlap and no change is lost.
        #[test]
        fn every_change_is_followed_by_a_pass(steps in proptest::collection::vec((0..4_u8, 0..3_u32), 1..60)) {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
            runtime.block_on(async {
                let queue = Queue::default();
                let (mut owed, mut running) = (BTreeSet::new(), BTreeSet::new());
                for (step, key) in steps {
                    match step {
                        0 => { queue.add(key); owed.insert(key); }
                        1 => if let Some(key) = poll(&queue) {
                            assert!(running.insert(key));
                            owed.remove(&key);
                        },
                        2 => if running.remove(&key) { queue.done(&key, Outcome::Done(None)); },
                        _ => if running.remove(&key) { queue.done(&key, Outcome::Failed); owed.insert(key); },
                    }
                }
                running.iter().for_each(|key| queue.done(key, Outcome::Done(None)));
                while !owed.is_empty() {
                    let key = queue.next().await;
                    owed.remove(&key);
                    queue.done(&key, Outcome::Done(None));
                }
                while let Some(key) = poll(&queue) {
                    queue.done(&key, Outcome::Done(None));
                }
                assert!(queue.is_empty());
            });
        }
    }
}
