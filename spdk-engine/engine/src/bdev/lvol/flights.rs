//! Counts of I/O in flight, with barriers: when has everything ended that had begun before now?
//!
//! *What it is.* A barrier starts a new period; I/O is booked on the period in which it began. At most two periods are
//! open at once, the present one and the one that a barrier waits for: a barrier asked for meanwhile starts its own
//! period when that one has drained. No I/O of its own, no clock.

use std::cell::{Cell, RefCell};

use futures::channel::oneshot;

/// The period in which an I/O began.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Period(u8);

/// I/O in flight of one store on one core.
#[derive(Debug, Default)]
pub struct Flights {
    present: Cell<u8>,
    counts: [Cell<u64>; 2],
    /// Barriers that wait for the former period.
    waiting: RefCell<Vec<oneshot::Sender<()>>>,
    /// Barriers that wait for the present one, once the former has drained.
    next: RefCell<Vec<oneshot::Sender<()>>>,
}

impl Flights {
    /// An I/O begins.
    pub fn begin(&self) -> Period {
        let present = self.present.get();
        let count = &self.counts[usize::from(present)];
        count.set(count.get() + 1);
        Period(present)
    }

    /// An I/O that began in `period` has ended.
    pub fn end(&self, period: Period) {
        let count = &self.counts[usize::from(period.0)];
        count.set(count.get() - 1);
        if count.get() == 0 && period.0 != self.present.get() {
            self.former_drained();
        }
    }

    /// I/O in flight.
    pub fn count(&self) -> u64 {
        self.counts.iter().map(Cell::get).sum()
    }

    /// Resolves once all I/O in flight now has ended; none when there is nothing to wait for.
    pub fn barrier(&self) -> Option<oneshot::Receiver<()>> {
        if self.count() == 0 {
            return None;
        }
        let (sender, receiver) = oneshot::channel();
        let draining = !self.waiting.borrow().is_empty();
        self.next.borrow_mut().push(sender);
        if !draining {
            self.start_period();
        }
        Some(receiver)
    }

    fn start_period(&self) {
        self.present.set(1 - self.present.get());
        *self.waiting.borrow_mut() = std::mem::take(&mut *self.next.borrow_mut());
        if self.counts[usize::from(1 - self.present.get())].get() == 0 {
            self.former_drained();
        }
    }

    fn former_drained(&self) {
        for sender in self.waiting.take() {
            let _ = sender.send(());
        }
        if !self.next.borrow().is_empty() {
            self.start_period();
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[derive(Debug, Clone)]
    enum Step {
        Begin,
        End(prop::sample::Index),
        Barrier,
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn a_barrier_resolves_exactly_when_what_began_before_it_has_ended(steps in proptest::collection::vec(
            prop_oneof![
                3 => Just(Step::Begin),
                3 => any::<prop::sample::Index>().prop_map(Step::End),
                1 => Just(Step::Barrier),
            ], 0..80)) {
            let flights = Flights::default();
            let (mut next, mut open, mut barriers) = (0u64, Vec::new(), Vec::new());
            for step in steps {
                match step {
                    Step::Begin => {
                        open.push((next, flights.begin()));
                        next += 1;
                    }
                    Step::End(index) if !open.is_empty() => {
                        let (_, period) = open.remove(index.index(open.len()));
                        flights.end(period);
                    }
                    Step::End(_) => {}
                    Step::Barrier => match flights.barrier() {
                        Some(receiver) => barriers.push((next, receiver)),
                        None => prop_assert!(open.is_empty()),
                    },
                }
                prop_assert_eq!(flights.count(), open.len() as u64);
                let oldest = open.iter().map(|(id, _)| *id).min();
                barriers.retain_mut(|(before, receiver)| {
                    let done = receiver.try_recv().is_ok_and(|v| v.is_some());
                    assert!(!done || oldest.is_none_or(|oldest| oldest >= *before), "resolved too early");
                    !done
                });
            }
            while let Some((_, period)) = open.pop() {
                flights.end(period);
            }
            for (_, mut receiver) in barriers {
                prop_assert!(receiver.try_recv().is_ok_and(|v| v.is_some()));
            }
        }
    }
}
