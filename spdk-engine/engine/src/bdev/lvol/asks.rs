//! What a channel asks of the store's owner core: clusters for writes, and to give clusters back.
//!
//! *Flow.* Asks of one turn of the loop go in one message; the store puts those that wait at the same time into common
//! metadata writes. Each is answered by itself. Writes that want the same clusters share one ask.
//!
//! *Invariants.* An I/O that waits for an answer is not at a disk. After the answer a write starts again from its lookup,
//! so that it does not matter what else happened meanwhile.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;

use nvme_wire::Status;
use slab::Slab;

use super::channel::Inner;
use super::owner;
use super::percore::Cores;
use crate::bdev::{Io, IoOp, IoStatus};
use crate::reactor::{Core, CoreId};

/// What is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Want {
    /// Clusters of the volume's own, from the first to the last.
    Clusters { first: u64, last: u64 },
    /// Bytes that read as zeroes.
    Zeroes { offset: u64, len: u64 },
    /// Bytes that read as zeroes and need no space.
    Unmapped { offset: u64, len: u64 },
}

/// One request on its way to the owner.
#[derive(Debug, Clone, Copy)]
pub struct Ask {
    /// The core and channel to answer.
    pub core: CoreId,
    pub channel: u64,
    /// The channel's name for it.
    pub slot: usize,
    pub want: Want,
}

/// What waits for an answer.
enum Asked {
    Clusters { first: u64, last: u64 },
    Clear(Io),
}

/// The asks of one channel.
#[derive(Default)]
pub struct Asks {
    asked: RefCell<Slab<Asked>>,
    /// Writes by the clusters that they wait for.
    writes: RefCell<HashMap<(u64, u64), Vec<Io>>>,
    unsent: RefCell<Vec<Ask>>,
    will_send: Cell<bool>,
}

impl Asks {
    /// Whether nothing waits.
    pub fn is_empty(&self) -> bool {
        self.asked.borrow().is_empty()
    }
}

impl Inner {
    /// Asks for clusters; `io` starts again when they are there.
    pub(super) fn ask_for_clusters(self: &Rc<Self>, core: &Core, first: u64, last: u64, io: Io) {
        let mut writes = self.asks.writes.borrow_mut();
        let waiting = writes.entry((first, last)).or_default();
        waiting.push(io);
        if waiting.len() == 1 {
            drop(writes);
            self.ask(core, Asked::Clusters { first, last }, Want::Clusters { first, last });
        }
    }

    /// Asks to clear the range of an unmap or write-zeroes.
    pub(super) fn ask_to_clear(self: &Rc<Self>, core: &Core, io: Io) {
        let block_size = u64::from(self.volume.store.block_size);
        let (offset, len) = (io.lba * block_size, io.blocks * block_size);
        let unmap = io.op == IoOp::Unmap;
        let want = if unmap { Want::Unmapped { offset, len } } else { Want::Zeroes { offset, len } };
        self.ask(core, Asked::Clear(io), want);
    }

    fn ask(self: &Rc<Self>, core: &Core, asked: Asked, want: Want) {
        let slot = self.asks.asked.borrow_mut().insert(asked);
        let ask = Ask { core: core.id(), channel: self.id, slot, want };
        self.asks.unsent.borrow_mut().push(ask);
        if !self.asks.will_send.replace(true) {
            let inner = Rc::clone(self);
            core.defer(move |core| inner.send_asks(core));
        }
    }

    /// Sends what was asked for in this turn.
    pub(super) fn send_asks(&self, core: &Core) {
        self.asks.will_send.set(false);
        let asks = self.asks.unsent.take();
        if asks.is_empty() {
            return;
        }
        let (owner, key) = (self.volume.store.owner, self.volume.key());
        if owner == core.id() {
            return owner::serve(core, key, asks);
        }
        core.post(owner, move |core| owner::serve(core, key, asks));
    }

    fn answered(self: &Rc<Self>, core: &Core, slot: usize, status: IoStatus) {
        let asked = self.asks.asked.borrow_mut().try_remove(slot);
        match asked {
            Some(Asked::Clusters { first, last }) => {
                let ios = self.asks.writes.borrow_mut().remove(&(first, last)).unwrap_or_default();
                for io in ios {
                    self.write_again(core, first, last, io, status);
                }
            }
            Some(Asked::Clear(io)) => core.complete(io, status),
            None => {}
        }
        self.leave_if_idle(core);
    }

    fn write_again(self: &Rc<Self>, core: &Core, first: u64, last: u64, io: Io, status: IoStatus) {
        // Of a range for which there was no room, some clusters may have come nevertheless.
        if status.is_success() || self.is_stopped() || self.owns(first, last) {
            return self.submit(core, io);
        }
        core.complete(io, status);
    }
}

/// Gives the owner's answer to the channel that asked; called on the owner core.
pub fn answer(core: &Core, ask: Ask, status: IoStatus) {
    if ask.core == core.id() {
        return deliver(core, ask, status);
    }
    core.post(ask.core, move |core| deliver(core, ask, status));
}

fn deliver(core: &Core, ask: Ask, status: IoStatus) {
    if let Some(channel) = Cores::of(core).channel(ask.channel) {
        channel.answered(core, ask.slot, status);
    }
}

/// The status by which an I/O fails that the store refused.
#[must_use]
pub fn status_of(error: &lvol_core::Error) -> IoStatus {
    use lvol_core::{DeviceError, Error};
    match error {
        Error::NoSpace(_) | Error::Device(DeviceError::NoSpace) => Status::CAPACITY_EXCEEDED,
        Error::NotPermitted(_) => Status::NAMESPACE_WRITE_PROTECTED.with_dnr(),
        Error::Invalid(_) => Status::LBA_OUT_OF_RANGE,
        Error::NoExternal(_) => Status::NAMESPACE_NOT_READY,
        Error::Device(DeviceError::Io) => Status::WRITE_FAULT,
        _ => Status::INTERNAL_ERROR,
    }
}
