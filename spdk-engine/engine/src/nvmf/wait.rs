//! Waiting on one core for a condition that others make true.

use std::cell::RefCell;

use futures::channel::oneshot;

/// Tasks that wait for a change.
#[derive(Debug, Default)]
pub struct Waiters(RefCell<Vec<oneshot::Sender<()>>>);

impl Waiters {
    /// Wakes all who wait.
    pub fn wake(&self) {
        for waiter in self.0.borrow_mut().drain(..) {
            let _ = waiter.send(());
        }
    }

    /// Waits until `condition` holds; it is looked at now and after each [`Self::wake`].
    pub async fn until(&self, condition: impl Fn() -> bool) {
        while !condition() {
            let (sender, receiver) = oneshot::channel();
            {
                let mut waiting = self.0.borrow_mut();
                waiting.retain(|w| !w.is_canceled());
                waiting.push(sender);
            }
            let _ = receiver.await;
        }
    }
}
