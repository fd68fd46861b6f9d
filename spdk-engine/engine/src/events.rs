//! The ring of events behind `addax_wait_events`: what an agent must learn without polling objects.
//!
//! *Invariants.* Sequence numbers start at 1 and have no gaps. The ring keeps the newest [`EVENTS_MAX`]; a reader that
//! asks for older ones is told that it has lost some and reads the objects instead.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;

use futures::channel::oneshot;
use serde_json::{Value, json};

use crate::reactor::Core;
use crate::reactor::driver::{NANOS_PER_MS, Nanos};

/// Events kept for readers that are behind.
pub const EVENTS_MAX: usize = 4096;
/// Longest wait of one call, in milliseconds.
pub const WAIT_MS_MAX: u64 = 60_000;

/// The ring; lives on the control core.
pub struct EventRing {
    core: Core,
    ring: RefCell<VecDeque<(u64, Value)>>,
    next: Cell<u64>,
    waiting: RefCell<Vec<oneshot::Sender<()>>>,
}

impl std::fmt::Debug for EventRing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EventRing").field("next", &self.next.get()).finish()
    }
}

impl EventRing {
    pub(crate) fn new(core: Core) -> Self {
        Self { core, ring: RefCell::default(), next: Cell::new(1), waiting: RefCell::default() }
    }

    /// Adds an event; `fields` is an object, `seq`, `type` and `name` are put in front.
    pub fn push(&self, kind: &str, name: &str, fields: Value) {
        let seq = self.next.get();
        self.next.set(seq + 1);
        let mut event = json!({ "seq": seq, "type": kind, "name": name });
        if let (Value::Object(into), Value::Object(from)) = (&mut event, fields) {
            into.extend(from);
        }
        let mut ring = self.ring.borrow_mut();
        if ring.len() == EVENTS_MAX {
            ring.pop_front();
        }
        ring.push_back((seq, event));
        for waiter in self.waiting.borrow_mut().drain(..) {
            let _ = waiter.send(());
        }
    }

    /// The events after `after`, waiting up to `timeout_ms` for the first: `{events, next, lost?}`.
    pub async fn wait(&self, after: u64, timeout_ms: u64) -> Value {
        if after + 1 >= self.next.get() && after < self.next.get() {
            let (sender, receiver) = oneshot::channel();
            self.waiting.borrow_mut().push(sender);
            let limit: Nanos = timeout_ms.min(WAIT_MS_MAX) * NANOS_PER_MS;
            let _ = self.core.timeout(limit, receiver).await;
            self.waiting.borrow_mut().retain(|w| !w.is_canceled());
        }
        let ring = self.ring.borrow();
        let events: Vec<&Value> = ring.iter().filter(|(seq, _)| *seq > after).map(|(_, e)| e).collect();
        let oldest = ring.front().map_or(self.next.get(), |(seq, _)| *seq);
        // A reader from an earlier process asks for numbers that do not exist yet.
        let lost = after + 1 < oldest || after >= self.next.get();
        let mut answer = json!({ "events": events, "next": self.next.get() - 1 });
        if lost {
            answer["lost"] = json!(true);
        }
        answer
    }
}
