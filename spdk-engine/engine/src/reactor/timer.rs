//! Timers of one core: a heap of deadlines, with cancelled entries skipped when they come up.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::rc::Rc;

use super::{Core, driver::Nanos};

/// Called once when its time has come.
pub type TimerFn = Rc<dyn Fn(&Core)>;

/// Names a pending timer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TimerId(u64);

/// The pending timers of one core.
#[derive(Default)]
pub(super) struct Timers {
    heap: BinaryHeap<Reverse<(Nanos, TimerId)>>,
    pending: HashMap<TimerId, TimerFn>,
    next: u64,
}

impl Timers {
    pub(super) fn add(&mut self, at: Nanos, call: TimerFn) -> TimerId {
        self.next += 1;
        let id = TimerId(self.next);
        self.heap.push(Reverse((at, id)));
        self.pending.insert(id, call);
        id
    }

    pub(super) fn cancel(&mut self, id: TimerId) {
        self.pending.remove(&id);
        // Long-lived timers that are set and cancelled per request must not pile up in the heap.
        if self.heap.len() > 64 && self.heap.len() > 4 * self.pending.len() {
            let pending = &self.pending;
            self.heap.retain(|Reverse((_, id))| pending.contains_key(id));
        }
    }

    pub(super) fn pop_due(&mut self, now: Nanos) -> Option<TimerFn> {
        while let Some(Reverse((at, id))) = self.heap.peek().copied() {
            if !self.pending.contains_key(&id) {
                self.heap.pop();
                continue;
            }
            if at > now {
                return None;
            }
            self.heap.pop();
            return self.pending.remove(&id);
        }
        None
    }

    pub(super) fn next_due(&mut self) -> Option<Nanos> {
        while let Some(Reverse((at, id))) = self.heap.peek().copied() {
            if self.pending.contains_key(&id) {
                return Some(at);
            }
            self.heap.pop();
        }
        None
    }
}
