//! Messages between cores: the only way one core asks something of another.
//!
//! *Bounds.* A mailbox has no limit of its own: a reactor must never block in a send. What is in it is bounded by what
//! senders may have outstanding: the queue slots of their connections (one message each way per I/O), the requests that
//! the RPC server lets run, and one wake per task.
//!
//! *Invariants.* Messages from one sender arrive in order. A message is never lost; a core that has stopped drops its
//! mail, and a waiting [`super::Core::call`] then resolves to `None`.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;

use super::{Core, driver::Waker};

/// Work carried to another core.
pub type Message = Box<dyn FnOnce(&Core) + Send>;

/// The sending end of a core's mailbox.
#[derive(Clone)]
pub struct Mailbox {
    sender: mpsc::Sender<Message>,
    parked: Arc<AtomicBool>,
    waker: Arc<dyn Waker>,
}

impl std::fmt::Debug for Mailbox {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Mailbox").field("parked", &self.parked).finish()
    }
}

/// The receiving end.
pub(super) struct MailSlot {
    receiver: mpsc::Receiver<Message>,
    parked: Arc<AtomicBool>,
}

pub(super) fn mailbox(waker: Arc<dyn Waker>) -> (Mailbox, MailSlot) {
    let (sender, receiver) = mpsc::channel();
    let parked = Arc::new(AtomicBool::new(false));
    (Mailbox { sender, parked: Arc::clone(&parked), waker }, MailSlot { receiver, parked })
}

impl Mailbox {
    /// Sends work to the core; it is run there soon, in order. A stopped core drops it.
    pub fn post(&self, message: impl FnOnce(&Core) + Send + 'static) {
        if self.sender.send(Box::new(message)).is_ok() && self.parked.swap(false, Ordering::SeqCst) {
            self.waker.wake();
        }
    }
}

impl MailSlot {
    pub(super) fn take(&self) -> Option<Message> {
        self.receiver.try_recv().ok()
    }

    /// Announces sleep; the caller must look for mail once more afterwards, before it sleeps.
    pub(super) fn announce_park(&self, parked: bool) {
        self.parked.store(parked, Ordering::SeqCst);
    }
}
