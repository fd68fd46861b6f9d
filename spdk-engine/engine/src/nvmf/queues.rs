//! Names of I/O queues across cores, and the way their end is told to the control core.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::{Rc, Weak};

use super::controller::Controller;
use crate::reactor::{CONTROL, Core, CoreId};

/// Names an I/O queue; never used twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct QueueKey(pub u64);

/// An I/O queue as its controller knows it.
#[derive(Debug, Clone, Copy)]
pub struct QueueRef {
    pub key: QueueKey,
    pub core: CoreId,
    pub listen: std::net::SocketAddr,
    pub peer: Option<std::net::SocketAddr>,
}

/// On the control core: which controller a queue belongs to.
#[derive(Default)]
struct Owners(RefCell<HashMap<QueueKey, (Weak<Controller>, u16)>>);

/// Control core: a queue of `controller` was sent to a data core.
pub fn sent(core: &Core, key: QueueKey, controller: &Rc<Controller>, qid: u16) {
    core.local(Owners::default).0.borrow_mut().insert(key, (Rc::downgrade(controller), qid));
}

/// Data core: a queue has ended and drained.
pub fn gone(core: &Core, key: QueueKey) {
    core.post(CONTROL, move |core| {
        let owner = core.local(Owners::default).0.borrow_mut().remove(&key);
        if let Some((controller, qid)) = owner
            && let Some(controller) = controller.upgrade()
        {
            controller.queue_gone(qid, key);
        }
    });
}
