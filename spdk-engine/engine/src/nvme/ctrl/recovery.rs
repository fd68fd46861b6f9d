//! What happens when a session is lost: when to try again, when I/O fails, when to give up.

use std::rc::Rc;

use futures::channel::oneshot;

use super::{Ctrl, State};
use crate::nvme::queue::Down;
use crate::reactor::driver::{NANOS_PER_MS, NANOS_PER_S, Nanos};

/// First wait between attempts for a caller that replays by itself and so has to know soon; doubles up to the
/// reconnect delay.
const QUICK_RETRY_NS: Nanos = 50 * NANOS_PER_MS;

impl Ctrl {
    /// Part of the session is lost.
    pub(super) fn session_lost(self: &Rc<Self>, session: u64, loss: &str) {
        if session != self.session.get() {
            return;
        }
        match self.state.get() {
            State::Enabled => {
                tracing::warn!(controller = self.shared.name, loss, "session lost");
                self.start_recovery();
            }
            // Whoever holds the devices is to let them go, so nothing may wait for a next session.
            State::Deleting => self.post_all(Down::Failed),
            _ => self.broken.set(session),
        }
    }

    pub(super) fn start_recovery(self: &Rc<Self>) {
        self.state.set(State::Resetting);
        let ctrl = Rc::clone(self);
        self.core().spawn(async move { ctrl.recover().await });
    }

    /// Ends the session and tries for a new one as long as the timeouts allow.
    async fn recover(self: Rc<Self>) {
        let core = self.core().clone();
        let lost_at = core.now();
        self.failing.set(false);
        self.end_session(Down::Reconnecting).await;
        self.arm_fast_fail();
        if self.shared.no_replay && self.timeouts.ctrlr_loss_sec == 0 && self.waiters.borrow().is_empty() {
            // Its caller has something to do at the target before a next session may begin, and asks for it then.
            return self.give_up().await;
        }
        let mut quick = QUICK_RETRY_NS;
        while !self.is_deleting() {
            self.state.set(State::Resetting);
            let outcome = self.bring_up().await;
            if self.is_deleting() {
                break;
            }
            self.answer_waiters(outcome.is_ok());
            let Err(error) = outcome else {
                tracing::info!(controller = self.shared.name, "session restored");
                return;
            };
            tracing::warn!(controller = self.shared.name, %error, "no new session");
            if error.is_refused_host() {
                self.post_all(Down::Refused);
            }
            let Some(delay) = self.next_attempt(lost_at, error.is_refused_host(), &mut quick) else {
                return self.give_up().await;
            };
            self.state.set(State::ReconnectDelayed);
            let (sender, woken) = oneshot::channel();
            *self.wake.borrow_mut() = Some(sender);
            let _ = core.timeout(delay, woken).await;
        }
        self.answer_waiters(false);
    }

    /// How long to wait before another attempt; `None` when there is to be none.
    fn next_attempt(&self, lost_at: Nanos, refused: bool, quick: &mut Nanos) -> Option<Nanos> {
        let full = Nanos::from(self.timeouts.reconnect_delay_sec) * NANOS_PER_S;
        if full == 0 {
            return None;
        }
        let delay = if self.shared.no_replay && !refused { (*quick).min(full) } else { full };
        *quick = quick.saturating_mul(2);
        match u64::try_from(self.timeouts.ctrlr_loss_sec) {
            Ok(loss) if self.core().now() >= lost_at + loss * NANOS_PER_S => None,
            _ => Some(delay),
        }
    }

    /// No more attempts: SPDK keeps a controller without timeouts, and removes one that was waited for in vain.
    async fn give_up(self: &Rc<Self>) {
        if self.timeouts.ctrlr_loss_sec == 0 {
            self.state.set(State::Failed);
            self.post_all(Down::Failed);
            return;
        }
        tracing::error!(controller = self.shared.name, "lost for too long; the controller is removed");
        self.state.set(State::Deleting);
        self.remove().await;
    }

    fn arm_fast_fail(self: &Rc<Self>) {
        let limit = Nanos::from(self.timeouts.fast_io_fail_sec) * NANOS_PER_S;
        if limit == 0 {
            return;
        }
        let (ctrl, lost) = (Rc::downgrade(self), self.session.get());
        let fail = move |ctrl: &Rc<Self>| {
            let never_back = !matches!(ctrl.state.get(), State::Enabled | State::Deleting) && ctrl.recovering(lost);
            if never_back {
                ctrl.post_all(Down::Failed);
            }
        };
        self.core().after(limit, Rc::new(move |_| ctrl.upgrade().iter().for_each(&fail)));
    }

    /// Whether no session since `lost` was ever in use.
    fn recovering(&self, lost: u64) -> bool {
        self.restored.get() <= lost
    }

    pub(super) fn answer_waiters(&self, done: bool) {
        for waiter in std::mem::take(&mut *self.waiters.borrow_mut()) {
            let _ = waiter.send(done);
        }
    }

    pub(super) fn wake_up(&self) {
        let wake = self.wake.borrow_mut().take();
        if let Some(wake) = wake {
            let _ = wake.send(());
        }
    }
}
