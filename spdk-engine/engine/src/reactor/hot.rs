//! The sockets that a core asks itself in each turn.
//!
//! *Invariants.* A socket of [`super::Core::watch_hot`] is either in this list or armed once in the driver, never both
//! for long: the driver's event puts it here, silence hands it back. Arming looks at the socket's present state, so
//! nothing that arrives in between is missed. A paused socket ([`Polled::Paused`]) is in neither.
//!
//! *Cost.* A socket costs one receive per turn while it is here. It leaves after [`SILENT_TURNS`] turns in which others
//! had work and it had none: about what arming it and the event of its next request cost. While nobody has work
//! nothing is lost by asking.

use std::cell::RefCell;
use std::os::fd::RawFd;
use std::rc::Rc;

use super::{Core, OnReady, Polled};

/// Turns of a busy core without traffic after which a socket is handed back.
const SILENT_TURNS: u32 = 32;

struct Hot {
    token: u64,
    fd: RawFd,
    silent: u32,
    /// `None` once the socket is not watched any more, or paused.
    handler: Option<Rc<dyn OnReady>>,
}

/// See the module.
#[derive(Default)]
pub(super) struct HotList(RefCell<Vec<Hot>>);

impl HotList {
    /// Adds a socket, unless it is here already.
    pub(super) fn add(&self, token: u64, fd: RawFd, handler: Rc<dyn OnReady>) {
        let mut list = self.0.borrow_mut();
        if !list.iter().any(|h| h.token == token && h.handler.is_some()) {
            list.push(Hot { token, fd, silent: 0, handler: Some(handler) });
        }
    }

    /// Forgets a socket. May be called from within [`Self::poll`].
    pub(super) fn remove(&self, token: u64) {
        let handler = {
            let mut list = self.0.borrow_mut();
            list.iter_mut().find(|h| h.token == token && h.handler.is_some()).and_then(|h| h.handler.take())
        };
        drop(handler);
    }

    /// Asks each socket once; true when one had something.
    pub(super) fn poll(&self, core: &Core) -> bool {
        let mut worked = false;
        let count = self.0.borrow().len();
        for index in 0..count {
            let handler = self.0.borrow().get(index).and_then(|h| h.handler.clone());
            let Some(handler) = handler else { continue };
            let polled = handler.poll(core);
            worked |= polled == Polled::Worked;
            let mut list = self.0.borrow_mut();
            let Some(hot) = list.get_mut(index) else { continue };
            match polled {
                Polled::Worked => hot.silent = 0,
                Polled::Nothing => hot.silent += 1,
                Polled::Paused => hot.handler = None,
            }
        }
        worked
    }

    /// Hands the silent ones back by `arm`; at the end of a turn that had work.
    pub(super) fn cool_silent(&self, mut arm: impl FnMut(RawFd, u64)) {
        self.0.borrow_mut().retain(|hot| {
            let stays = hot.handler.is_some() && hot.silent < SILENT_TURNS;
            if !stays && hot.handler.is_some() {
                arm(hot.fd, hot.token);
            }
            stays
        });
    }

    /// Hands all back by `arm`, before the core sleeps.
    pub(super) fn cool_all(&self, mut arm: impl FnMut(RawFd, u64)) {
        for hot in self.0.borrow_mut().drain(..) {
            if hot.handler.is_some() {
                arm(hot.fd, hot.token);
            }
        }
    }
}
