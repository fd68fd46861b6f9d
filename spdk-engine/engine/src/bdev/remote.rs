//! A channel to a device whose home is another core: each I/O travels there as a message and back.
//!
//! *Invariants.* The home core opens the device once per remote channel. Completions arrive in any order, matched by a
//! slot number. When the home core cannot open the device, every I/O fails with an internal error.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;

use nvme_wire::Status;
use slab::Slab;

use super::{Bdev, Channel, Io, IoSink, IoStatus};
use crate::reactor::{Core, CoreId};

/// Opens `bdev` for `core` through `home`.
pub fn open(core: &Core, bdev: Arc<dyn Bdev>, home: CoreId) -> Rc<dyn Channel> {
    let id = core.local(Table::default).next_id(core.id());
    let channel = Rc::new(RemoteChannel { id, home, pending: RefCell::default(), closed: Cell::new(false) });
    core.local(Table::default).local.borrow_mut().insert(id, Rc::clone(&channel));
    core.post(home, move |core| match bdev.open(core) {
        Ok(opened) => {
            core.local(Table::default).remote.borrow_mut().insert(id, opened);
        }
        Err(error) => tracing::error!(%error, "cannot open a device for another core"),
    });
    channel
}

/// Both ends of remote channels on one core: those this core asked for, and those it serves.
#[derive(Default)]
struct Table {
    next: std::cell::Cell<u32>,
    local: RefCell<std::collections::HashMap<u64, Rc<RemoteChannel>>>,
    remote: RefCell<std::collections::HashMap<u64, Rc<dyn Channel>>>,
}

impl Table {
    fn next_id(&self, core: CoreId) -> u64 {
        self.next.set(self.next.get() + 1);
        u64::from(core.0) << 32 | u64::from(self.next.get())
    }
}

struct RemoteChannel {
    id: u64,
    home: CoreId,
    pending: RefCell<Slab<Io>>,
    closed: Cell<bool>,
}

impl RemoteChannel {
    /// Closed and with nothing on its way: nobody will ask for it any more.
    fn forget_if_over(&self, core: &Core) {
        if self.closed.get() && self.pending.borrow().is_empty() {
            core.local(Table::default).local.borrow_mut().remove(&self.id);
        }
    }
}

impl Channel for RemoteChannel {
    fn submit(&self, core: &Core, io: Io) {
        let (op, lba, blocks, bufs) = (io.op, io.lba, io.blocks, io.bufs.clone());
        let slot = self.pending.borrow_mut().insert(io) as u64;
        let (id, back) = (self.id, core.id());
        core.post(self.home, move |core| {
            let opened = core.local(Table::default).remote.borrow().get(&id).cloned();
            let reply = Rc::new(Reply { id, back });
            match opened {
                Some(channel) => channel.submit(core, Io::new(op, lba, blocks, bufs, reply, slot)),
                None => reply.io_done(core, slot, Status::INTERNAL_ERROR),
            }
        });
    }

    fn close(&self, core: &Core) {
        self.closed.set(true);
        self.forget_if_over(core);
        let id = self.id;
        core.post(self.home, move |core| {
            if let Some(channel) = core.local(Table::default).remote.borrow_mut().remove(&id) {
                channel.close(core);
            }
        });
    }
}

/// Sends one completion home.
struct Reply {
    id: u64,
    back: CoreId,
}

impl IoSink for Reply {
    fn io_done(self: Rc<Self>, core: &Core, tag: u64, status: IoStatus) {
        let id = self.id;
        core.post(self.back, move |core| {
            let channel = core.local(Table::default).local.borrow().get(&id).cloned();
            let Some(channel) = channel else { return };
            let io = channel.pending.borrow_mut().try_remove(tag as usize);
            if let Some(io) = io {
                core.complete(io, status);
            }
            channel.forget_if_over(core);
        });
    }
}
