//! Waiting within one thread: lists of wakers, a mutex, gates and epochs for I/O.
//!
//! Nothing here crosses threads. A future that is dropped while it waits leaves nothing behind.

use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
    future::poll_fn,
    task::{Poll, Waker},
};

/// Futures that wait for a condition; whoever may have changed it calls [`WaitList::wake_all`].
#[derive(Debug, Default)]
pub(crate) struct WaitList(RefCell<Vec<Waker>>);

impl WaitList {
    pub(crate) fn wake_all(&self) {
        let wakers = std::mem::take(&mut *self.0.borrow_mut());
        wakers.into_iter().for_each(Waker::wake);
    }

    /// Waits until `ready` answers something; it is asked at once and after each wake.
    pub(crate) async fn until<T>(&self, mut ready: impl FnMut() -> Option<T>) -> T {
        poll_fn(|context| match ready() {
            Some(value) => Poll::Ready(value),
            None => {
                let mut wakers = self.0.borrow_mut();
                if !wakers.iter().any(|w| w.will_wake(context.waker())) {
                    wakers.push(context.waker().clone());
                }
                Poll::Pending
            }
        })
        .await
    }
}

/// A mutex that may be held across waits.
#[derive(Debug, Default)]
pub(crate) struct LocalMutex {
    locked: Cell<bool>,
    waiting: WaitList,
}

/// Holds a [`LocalMutex`].
#[derive(Debug)]
pub(crate) struct LocalGuard<'a>(&'a LocalMutex);

impl LocalMutex {
    pub(crate) async fn lock(&self) -> LocalGuard<'_> {
        self.waiting.until(|| (!self.locked.replace(true)).then(|| LocalGuard(self))).await
    }
}

impl Drop for LocalGuard<'_> {
    fn drop(&mut self) {
        self.0.locked.set(false);
        self.0.waiting.wake_all();
    }
}

/// Counts what is in flight, can hold newcomers back and wait until nothing is left.
#[derive(Debug, Default)]
pub(crate) struct Gate {
    inside: Cell<usize>,
    closed: Cell<usize>,
    waiting: WaitList,
}

/// Something in flight.
#[derive(Debug)]
pub(crate) struct Inside<'a>(&'a Gate);

/// Keeps a [`Gate`] closed.
#[derive(Debug)]
pub(crate) struct Closed<'a>(&'a Gate);

impl Gate {
    /// Goes in, once the gate is open.
    pub(crate) async fn enter(&self) -> Inside<'_> {
        self.waiting.until(|| (self.closed.get() == 0).then(|| self.enter_now())).await
    }

    /// Goes in although the gate may be closed; for what the one who closed it waits for.
    pub(crate) fn enter_now(&self) -> Inside<'_> {
        self.inside.set(self.inside.get() + 1);
        Inside(self)
    }

    /// Closes the gate and waits until nobody is inside.
    pub(crate) async fn close(&self) -> Closed<'_> {
        self.closed.set(self.closed.get() + 1);
        let closed = Closed(self);
        self.waiting.until(|| (self.inside.get() == 0).then_some(())).await;
        closed
    }
}

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        self.0.inside.set(self.0.inside.get() - 1);
        if self.0.inside.get() == 0 {
            self.0.waiting.wake_all();
        }
    }
}

impl Drop for Closed<'_> {
    fn drop(&mut self) {
        self.0.closed.set(self.0.closed.get() - 1);
        self.0.waiting.wake_all();
    }
}

/// Tells when everything that began before a moment has ended, without holding newcomers back.
#[derive(Debug, Default)]
pub(crate) struct Epochs {
    now: Cell<u64>,
    running: RefCell<BTreeMap<u64, usize>>,
    waiting: WaitList,
}

/// Something that began in an epoch.
#[derive(Debug)]
pub(crate) struct InEpoch<'a>(&'a Epochs, u64);

impl Epochs {
    pub(crate) fn enter(&self) -> InEpoch<'_> {
        *self.running.borrow_mut().entry(self.now.get()).or_default() += 1;
        InEpoch(self, self.now.get())
    }

    /// Waits until all have ended that entered before this call.
    pub(crate) async fn drain(&self) {
        let last = self.now.get();
        self.now.set(last + 1);
        self.waiting.until(|| self.running.borrow().range(..=last).next().is_none().then_some(())).await;
    }
}

impl Drop for InEpoch<'_> {
    fn drop(&mut self) {
        let mut running = self.0.running.borrow_mut();
        if let Some(count) = running.get_mut(&self.1) {
            *count -= 1;
            if *count == 0 {
                running.remove(&self.1);
                drop(running);
                self.0.waiting.wake_all();
            }
        }
    }
}

/// Runs futures with at most `limit` in flight. All run to their end, also after one failed; the first error is
/// returned.
pub(crate) async fn all<E>(
    limit: usize,
    futures: impl IntoIterator<Item = impl Future<Output = Result<(), E>>>,
) -> Result<(), E> {
    use futures::StreamExt;
    let mut running = futures::stream::iter(futures).buffer_unordered(limit);
    let mut result = Ok(());
    while let Some(one) = running.next().await {
        if result.is_ok() {
            result = one;
        }
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::{FutureExt, executor::block_on, join};

    #[test]
    fn the_mutex_admits_one_at_a_time() {
        let mutex = LocalMutex::default();
        block_on(async {
            let first = mutex.lock().await;
            let mut second = Box::pin(mutex.lock());
            assert!(second.as_mut().now_or_never().is_none());
            assert!(mutex.lock().now_or_never().is_none(), "a vain attempt unlocks nothing");
            drop(first);
            assert!(second.now_or_never().is_some());
            drop(mutex.lock().await);
        });
    }

    #[test]
    fn a_closed_gate_waits_for_those_inside_and_holds_others_back() {
        let gate = Gate::default();
        block_on(async {
            let inside = gate.enter().await;
            let mut closing = Box::pin(gate.close());
            assert!(closing.as_mut().now_or_never().is_none());
            assert!(gate.enter().now_or_never().is_none());
            let forced = gate.enter_now();
            drop(inside);
            assert!(closing.as_mut().now_or_never().is_none());
            drop(forced);
            let closed = closing.await;
            let (_, _) = join!(gate.enter(), async { drop(closed) });
        });
    }

    #[test]
    fn draining_waits_for_the_old_and_not_for_the_new() {
        let epochs = Epochs::default();
        let old = epochs.enter();
        let mut draining = Box::pin(epochs.drain());
        assert!(draining.as_mut().now_or_never().is_none());
        let _new = epochs.enter();
        drop(old);
        assert!(draining.now_or_never().is_some());
    }

    #[test]
    fn all_run_to_their_end_after_an_error() {
        let ran = Cell::new(0);
        let jobs = (0..10).map(|n| {
            let ran = &ran;
            async move {
                ran.set(ran.get() + 1);
                if n % 3 == 1 { Err(n) } else { Ok(()) }
            }
        });
        assert_eq!(block_on(all(4, jobs)), Err(1));
        assert_eq!(ran.get(), 10);
    }
}
