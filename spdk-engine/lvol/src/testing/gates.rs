//! The engine's part in a test: I/O passes a gate per lvol that the store can close, and the store can wait until all
//! I/O that looked into a cluster map has ended.
//!
//! Also checks the store's side of the bargain: each pause is ended, and not more often than it began.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::future::poll_fn;
use std::rc::Rc;
use std::task::{Poll, Waker};

use crate::device::LocalFuture;
use crate::hooks::Hooks;
use crate::types::BlobId;

type Observer = Box<dyn Fn(BlobId)>;

/// See the module.
#[derive(Default)]
pub struct Gates(RefCell<State>);

#[derive(Default)]
struct State {
    closed: BTreeMap<BlobId, u32>,
    inside: BTreeMap<BlobId, u32>,
    lookups: BTreeSet<u64>,
    next: u64,
    wakers: Vec<Waker>,
    quiet: Option<Rc<Observer>>,
    pauses: u64,
}

impl Gates {
    /// `quiet` is called each time an lvol's I/O has come to rest.
    pub fn new(quiet: impl Fn(BlobId) + 'static) -> Rc<Self> {
        let gates = Self::default();
        gates.0.borrow_mut().quiet = Some(Rc::new(Box::new(quiet)));
        Rc::new(gates)
    }

    /// Lvols whose gate is closed at this moment.
    pub fn closed(&self) -> Vec<BlobId> {
        self.0.borrow().closed.keys().copied().collect()
    }

    /// How often the store paused an lvol.
    pub fn pauses(&self) -> u64 {
        self.0.borrow().pauses
    }

    /// Waits until the lvol's gate is open and goes through; the I/O has ended when the guard is dropped.
    pub async fn enter(self: &Rc<Self>, lvol: BlobId) -> Inside {
        self.wait(|state| !state.closed.contains_key(&lvol)).await;
        *self.0.borrow_mut().inside.entry(lvol).or_default() += 1;
        Inside { gates: Rc::clone(self), lvol }
    }

    /// I/O is about to look into a map and go to the disk by what it finds; until the guard is dropped.
    pub fn look_up(self: &Rc<Self>) -> LookUp {
        let mut state = self.0.borrow_mut();
        state.next += 1;
        let number = state.next;
        state.lookups.insert(number);
        LookUp { gates: Rc::clone(self), number }
    }

    async fn wait(&self, ready: impl Fn(&State) -> bool) {
        poll_fn(|context| {
            let mut state = self.0.borrow_mut();
            if ready(&state) {
                return Poll::Ready(());
            }
            state.wakers.push(context.waker().clone());
            Poll::Pending
        })
        .await;
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        let mut state = self.0.borrow_mut();
        change(&mut state);
        let wakers = std::mem::take(&mut state.wakers);
        drop(state);
        for waker in wakers {
            waker.wake();
        }
    }
}

impl std::fmt::Debug for Gates {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Gates").field("closed", &self.closed()).finish()
    }
}

impl Hooks for Gates {
    fn quiesce(&self, lvol: BlobId) -> LocalFuture<'_, ()> {
        Box::pin(async move {
            self.change(|state| {
                state.pauses += 1;
                *state.closed.entry(lvol).or_default() += 1;
            });
            self.wait(|state| !state.inside.contains_key(&lvol)).await;
            let quiet = self.0.borrow().quiet.clone();
            if let Some(quiet) = quiet {
                quiet(lvol);
            }
        })
    }

    fn resume(&self, lvol: BlobId) {
        self.change(|state| {
            let count = state.closed.get_mut(&lvol);
            let count = count.unwrap_or_else(|| panic!("{lvol:?} is resumed and was not paused"));
            *count -= 1;
            if *count == 0 {
                state.closed.remove(&lvol);
            }
        });
    }

    fn grace(&self) -> LocalFuture<'_, ()> {
        Box::pin(async move {
            let newest = self.0.borrow().next;
            self.wait(|state| state.lookups.first().is_none_or(|oldest| *oldest > newest)).await;
        })
    }
}

/// An I/O that went through the gate.
#[derive(Debug)]
pub struct Inside {
    gates: Rc<Gates>,
    lvol: BlobId,
}

impl Drop for Inside {
    fn drop(&mut self) {
        self.gates.change(|state| {
            if let Some(count) = state.inside.get_mut(&self.lvol) {
                *count -= 1;
                if *count == 0 {
                    state.inside.remove(&self.lvol);
                }
            }
        });
    }
}

/// An I/O that goes by a map.
#[derive(Debug)]
pub struct LookUp {
    gates: Rc<Gates>,
    number: u64,
}

impl Drop for LookUp {
    fn drop(&mut self) {
        self.gates.change(|state| {
            state.lookups.remove(&self.number);
        });
    }
}
