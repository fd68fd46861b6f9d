//! Asynchronous events of one controller: requests that wait, events that wait, and which kinds are reported.
//!
//! *Invariants.* At most [`REQUESTS_MAX`] requests wait. A kind of event that was reported is not reported again until
//! its log page was read (without Retain). Events that find no request wait for the next one, one per kind.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeSet, VecDeque};

use nvme_wire::features::{AsyncEvent, AsyncEventConfig};
use nvme_wire::{Sqe, Status};

use super::session::Completion;

/// Requests that may wait (AERL is one less).
pub const REQUESTS_MAX: usize = 4;

/// The events; see the module.
#[derive(Debug)]
pub struct Events {
    /// `(slot, cid)` of the requests, oldest first.
    requests: RefCell<Vec<(u16, u16)>>,
    waiting: RefCell<VecDeque<AsyncEvent>>,
    masked: RefCell<Vec<AsyncEvent>>,
    config: Cell<AsyncEventConfig>,
    changed_namespaces: RefCell<BTreeSet<u32>>,
}

impl Events {
    fn new(config: AsyncEventConfig) -> Self {
        Self {
            requests: RefCell::default(),
            waiting: RefCell::default(),
            masked: RefCell::default(),
            config: Cell::new(config),
            changed_namespaces: RefCell::default(),
        }
    }

    /// Events of an I/O controller.
    pub fn for_io(ana: bool) -> Self {
        Self::new(AsyncEventConfig::target_default(ana))
    }

    /// Events of a discovery controller, which only a persistent connection gets.
    pub fn for_discovery(persistent: bool) -> Self {
        Self::new(if persistent { AsyncEventConfig::DISCOVERY_CHANGE } else { AsyncEventConfig::default() })
    }

    pub fn config(&self) -> AsyncEventConfig {
        self.config.get()
    }

    pub fn set_config(&self, config: AsyncEventConfig) {
        self.config.set(config);
    }

    /// Takes an event; gives the request to complete with it, if one waits.
    pub fn raise(&self, event: AsyncEvent) -> Option<(u16, Completion)> {
        let enabled = event.config().is_none_or(|bit| self.config.get().contains(bit));
        if !enabled || self.masked.borrow().contains(&event) || self.waiting.borrow().contains(&event) {
            return None;
        }
        // The newest request is used first.
        let Some((slot, _)) = self.requests.borrow_mut().pop() else {
            self.waiting.borrow_mut().push_back(event);
            return None;
        };
        self.masked.borrow_mut().push(event);
        Some((slot, Completion::dw0(event.dw0())))
    }

    /// Takes a request; gives its completion when an event waits or too many requests do.
    pub fn request(&self, slot: u16, sqe: &Sqe) -> Option<Completion> {
        if self.requests.borrow().len() >= REQUESTS_MAX {
            return Some(Status::AER_LIMIT_EXCEEDED.into());
        }
        let waiting = self.waiting.borrow_mut().pop_front();
        if let Some(event) = waiting {
            self.masked.borrow_mut().push(event);
            return Some(Completion::dw0(event.dw0()));
        }
        self.requests.borrow_mut().push((slot, sqe.cid.get()));
        None
    }

    /// Aborts a request; gives its slot.
    pub fn abort(&self, cid: u16) -> Option<u16> {
        let mut requests = self.requests.borrow_mut();
        let index = requests.iter().position(|(_, c)| *c == cid)?;
        Some(requests.remove(index).0)
    }

    /// The log page of these events was read: they may be reported again.
    pub fn page_read(&self, log_page: u8) {
        self.masked.borrow_mut().retain(|e| e.log_page() != log_page);
    }

    /// Adds to the changed-namespaces page.
    pub fn note_changed(&self, nsid: u32) {
        self.changed_namespaces.borrow_mut().insert(nsid);
    }

    /// The changed namespaces, which are forgotten by this.
    pub fn take_changed(&self) -> Vec<u32> {
        std::mem::take(&mut *self.changed_namespaces.borrow_mut()).into_iter().collect()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use nvme_wire::Sgl;
    use nvme_wire::command::opcode::admin;
    use nvme_wire::log::lid;

    use super::*;

    fn aer(cid: u16) -> Sqe {
        Sqe::new(admin::ASYNC_EVENT_REQUEST, cid, 0, Sgl::NONE)
    }

    #[test]
    fn four_requests_wait_and_the_fifth_is_refused() {
        let events = Events::for_io(false);
        for slot in 0..4 {
            assert_eq!(events.request(slot, &aer(slot)), None);
        }
        assert_eq!(events.request(4, &aer(4)).unwrap().status, Status::AER_LIMIT_EXCEEDED);
        assert_eq!(events.raise(AsyncEvent::NamespaceAttribute).unwrap().0, 3, "newest first");
        assert_eq!(events.abort(1), Some(1));
        assert_eq!(events.abort(1), None);
    }

    #[test]
    fn a_kind_is_masked_until_its_page_is_read() {
        let events = Events::for_io(true);
        assert!(events.raise(AsyncEvent::NamespaceAttribute).is_none());
        assert!(events.raise(AsyncEvent::NamespaceAttribute).is_none());
        assert_eq!(events.request(0, &aer(0)).unwrap().dw0, 0x0004_0002);
        assert_eq!(events.request(1, &aer(1)), None, "the same kind waits only once");
        assert!(events.raise(AsyncEvent::NamespaceAttribute).is_none());
        assert_eq!(events.raise(AsyncEvent::AnaChange).unwrap().1.dw0, 0x000C_0302);
        events.page_read(lid::CHANGED_NAMESPACES);
        assert_eq!(events.request(2, &aer(2)), None);
        assert_eq!(events.raise(AsyncEvent::NamespaceAttribute).unwrap().0, 2);
    }

    #[test]
    fn kinds_that_are_off_are_dropped() {
        let events = Events::for_io(false);
        assert!(events.raise(AsyncEvent::AnaChange).is_none());
        assert_eq!(events.request(0, &aer(0)), None);
        events.note_changed(2);
        events.note_changed(1);
        assert_eq!(events.take_changed(), [1, 2]);
        assert!(events.take_changed().is_empty());
    }
}
