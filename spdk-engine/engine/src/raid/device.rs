//! A raid1 device: every write to all members, reads from the least busy one.
//!
//! *Invariants.* A member that failed a write gets no further I/O on any core, and is reported once; the write succeeds
//! when at least one member has it, as in SPDK. A read that fails is tried on the other members. There is no record of
//! membership outside the process: this device is for compatibility, volumes are [`crate::mirror`].

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use nvme_wire::Status;
use serde_json::Value;
use slab::Slab;

use crate::bdev::registry::Entry;
use crate::bdev::{Bdev, BdevError, BdevInfo, Chan, Channel, Io, IoOp, IoSink, IoStatus};
use crate::reactor::{CONTROL, Core};

/// Most members: one bit of a mask each.
pub const MEMBERS_MAX: usize = 64;

/// The device; shared by all cores.
#[derive(Debug)]
pub struct Raid1 {
    info: BdevInfo,
    members: Vec<Arc<Entry>>,
    /// Bit n: member n takes I/O.
    alive: Arc<AtomicU64>,
}

impl Raid1 {
    /// A device over `members`, all of one geometry.
    #[must_use]
    pub fn new(info: BdevInfo, members: Vec<Arc<Entry>>) -> Self {
        let mask = if members.len() >= MEMBERS_MAX { u64::MAX } else { (1 << members.len()) - 1 };
        Self { info, members, alive: Arc::new(AtomicU64::new(mask)) }
    }

    /// Whether member `index` takes I/O.
    #[must_use]
    pub fn is_alive(&self, index: usize) -> bool {
        self.alive.load(Ordering::Acquire) >> index & 1 == 1
    }

    /// Takes a member out unless it is the last one; true when it is out.
    pub fn retire(&self, index: usize) -> bool {
        retire(&self.alive, index)
    }
}

fn retire(alive: &AtomicU64, index: usize) -> bool {
    let bit = 1u64 << index;
    let without = |mask: u64| (mask & !bit != 0).then_some(mask & !bit);
    alive.fetch_update(Ordering::AcqRel, Ordering::Acquire, without).is_ok()
}

impl Bdev for Raid1 {
    fn info(&self) -> BdevInfo {
        self.info.clone()
    }
    fn num_blocks(&self) -> u64 {
        self.info.num_blocks
    }
    fn open(&self, core: &Core) -> Result<Rc<dyn Channel>, BdevError> {
        let mut members = Vec::new();
        for (index, entry) in self.members.iter().enumerate() {
            let chan = if self.is_alive(index) { Some(entry.open(core)?) } else { None };
            members.push(Member { chan, busy: Cell::new(0) });
        }
        let (name, alive) = (self.info.name.clone(), Arc::clone(&self.alive));
        Ok(Rc::new(RaidChannel(Rc::new(Inner { name, members, alive, running: RefCell::default() }))))
    }
    fn driver_specific(&self) -> Value {
        // Filled in by the module, which knows the members' names after they have gone.
        Value::Null
    }
    fn config(&self) -> Option<(&'static str, Value)> {
        None
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

struct Member {
    chan: Option<Chan>,
    busy: Cell<u32>,
}

struct Running {
    io: Io,
    /// Members asked and not yet heard of.
    left: u32,
    /// Members that were tried, for reads.
    tried: u64,
    succeeded: bool,
    error: IoStatus,
}

struct Inner {
    name: String,
    members: Vec<Member>,
    alive: Arc<AtomicU64>,
    running: RefCell<Slab<Running>>,
}

struct RaidChannel(Rc<Inner>);

impl Channel for RaidChannel {
    fn submit(&self, core: &Core, io: Io) {
        let read = matches!(io.op, IoOp::Read | IoOp::Compare);
        let running = Running { io, left: 0, tried: 0, succeeded: false, error: Status::INTERNAL_ERROR };
        let slot = self.0.running.borrow_mut().insert(running);
        if read { self.0.read(core, slot) } else { self.0.write(core, slot) }
    }

    fn close(&self, core: &Core) {
        self.0.members.iter().filter_map(|m| m.chan.as_ref()).for_each(|c| c.close(core));
    }
}

impl Inner {
    fn alive(&self, index: usize) -> bool {
        self.alive.load(Ordering::Acquire) >> index & 1 == 1 && self.members[index].chan.is_some()
    }

    fn read(self: &Rc<Self>, core: &Core, slot: usize) {
        let tried = self.running.borrow()[slot].tried;
        let candidates = (0..self.members.len()).filter(|i| self.alive(*i) && tried >> i & 1 == 0);
        let Some(index) = candidates.min_by_key(|i| self.members[*i].busy.get()) else { return self.end(core, slot) };
        let mut running = self.running.borrow_mut();
        running[slot].tried |= 1 << index;
        running[slot].left = 1;
        drop(running);
        self.send(core, slot, index);
    }

    fn write(self: &Rc<Self>, core: &Core, slot: usize) {
        let targets: Vec<usize> = (0..self.members.len()).filter(|i| self.alive(*i)).collect();
        self.running.borrow_mut()[slot].left = targets.len() as u32;
        for index in targets {
            self.send(core, slot, index);
        }
    }

    fn send(self: &Rc<Self>, core: &Core, slot: usize, index: usize) {
        let member = &self.members[index];
        let Some(chan) = &member.chan else { return };
        member.busy.set(member.busy.get() + 1);
        let (op, lba, blocks, bufs) = {
            let running = self.running.borrow();
            let io = &running[slot].io;
            (io.op, io.lba, io.blocks, io.bufs.clone())
        };
        let tag = (slot as u64) << 8 | index as u64;
        chan.submit(core, Io::new(op, lba, blocks, bufs, Rc::clone(self) as Rc<dyn IoSink>, tag));
    }

    fn end(&self, core: &Core, slot: usize) {
        let running = self.running.borrow_mut().remove(slot);
        let status = if running.succeeded { Status::SUCCESS } else { running.error };
        core.complete(running.io, status);
    }

    fn failed(&self, core: &Core, index: usize, op: IoOp) {
        let lost = !matches!(op, IoOp::Read | IoOp::Compare | IoOp::Reset);
        if lost && retire(&self.alive, index) {
            tracing::error!(raid = self.name, member = index, "a write failed: the member is taken out");
            let name = self.name.clone();
            core.post(CONTROL, move |core| super::member_failed(core, &name, index));
        }
    }
}

impl IoSink for Inner {
    fn io_done(self: Rc<Self>, core: &Core, tag: u64, status: IoStatus) {
        let (slot, index) = ((tag >> 8) as usize, (tag & 0xff) as usize);
        let member = &self.members[index];
        member.busy.set(member.busy.get() - 1);
        let (op, left, again) = {
            let mut all = self.running.borrow_mut();
            let running = &mut all[slot];
            running.left -= 1;
            running.succeeded |= status.is_success();
            if !status.is_success() {
                running.error = status;
            }
            // A comparison that fails is an answer, not a failure of the member.
            let again = running.io.op == IoOp::Read && !status.is_success();
            (running.io.op, running.left, again)
        };
        if !status.is_success() && !status.is(Status::COMPARE_FAILURE) {
            self.failed(core, index, op);
        }
        if again {
            self.read(core, slot);
        } else if left == 0 {
            self.end(core, slot);
        }
    }
}
