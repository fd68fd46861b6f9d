//! The I/O of a raid on one core: on its way to the members, and back.
//!
//! *Flow.* See [`super::core_raid`]. A request is in `running` from its first member to its last answer; then it is
//! answered, or parked until the control core has judged the members that failed it.

use std::rc::Rc;

use nvme_wire::Status;
use smallvec::SmallVec;

use super::core_raid::{CoreRaid, Leg, Origin, Parked, Running};
use super::shared::{Held, MemberId};
use crate::bdev::{Bufs, Io, IoOp, IoSink, IoStatus, share};
use crate::reactor::{CONTROL, Core};

impl CoreRaid {
    /// Takes an I/O of a channel.
    pub(super) fn submit(self: &Rc<Self>, core: &Core, io: Io) {
        if self.is_held(&io) {
            return self.held.borrow_mut().push_back(io);
        }
        match io.op {
            IoOp::Read => self.read(core, io, Origin::Host),
            _ => self.send_to_all(core, io),
        }
    }

    /// Reads for the raid itself, whatever is held, from members that are whole; `but` is left out.
    pub fn read_internally(self: &Rc<Self>, core: &Core, io: Io, but: Option<MemberId>) {
        self.read(core, io, Origin::Internal { but });
    }

    /// Writes for the raid itself to one member, whatever is held; `None` when it is not here.
    pub fn write_internally(&self, core: &Core, member: MemberId, mut io: Io) -> Option<()> {
        let legs = self.legs.borrow();
        let leg = legs.get(usize::from(member.slot))?.as_ref().filter(|leg| leg.id == member)?;
        io.lba += leg.data_offset;
        leg.chan.submit(core, io);
        Some(())
    }

    fn read(self: &Rc<Self>, core: &Core, io: Io, origin: Origin) {
        let end = io.lba + io.blocks;
        let chosen = {
            let legs = self.legs.borrow();
            let whole = legs.iter().flatten().filter(|leg| self.may_read(leg, end, origin));
            whole.min_by_key(|leg| (leg.reported.get(), leg.reading.get())).cloned()
        };
        let Some(leg) = chosen else { return core.complete(io, Status::INTERNAL_PATH_ERROR) };
        let first = Some(leg.id);
        let key = self.running.borrow_mut().insert(Running {
            io,
            origin,
            left: 1,
            succeeded: false,
            status: Status::INTERNAL_ERROR,
            first,
            next: 0,
            failed: SmallVec::new(),
        });
        self.read_from(core, key, &leg);
    }

    fn may_read(&self, leg: &Leg, end: u64, origin: Origin) -> bool {
        let is_target = self.target.get() == Some(leg.id.slot);
        match origin {
            Origin::Host => !is_target || end <= self.boundary.get(),
            Origin::Internal { but } => !is_target && but != Some(leg.id),
        }
    }

    fn read_from(&self, core: &Core, key: usize, leg: &Rc<Leg>) {
        let (lba, blocks, bufs) = {
            let running = self.running.borrow();
            let io = &running[key].io;
            (io.lba + leg.data_offset, io.blocks, share(&io.bufs))
        };
        leg.reading.set(leg.reading.get() + blocks);
        let sink = Rc::clone(leg) as Rc<dyn IoSink>;
        leg.chan.submit(core, Io::new(IoOp::Read, lba, blocks, bufs, sink, key as u64));
    }

    fn send_to_all(self: &Rc<Self>, core: &Core, io: Io) {
        let (op, lba, blocks) = (io.op, io.lba, io.blocks);
        let mut running = self.running.borrow_mut();
        let key = running.insert(Running {
            io,
            origin: Origin::Host,
            left: 0,
            succeeded: false,
            status: Status::INTERNAL_PATH_ERROR,
            first: None,
            next: 0,
            failed: SmallVec::new(),
        });
        let run = &mut running[key];
        let legs = self.legs.borrow();
        for leg in legs.iter().flatten() {
            let part = self.part_for(leg, op, lba, blocks);
            if part == 0 && has_range(op) {
                continue;
            }
            let bufs = if part == blocks { share(&run.io.bufs) } else { self.first_blocks(&run.io.bufs, part) };
            let op = if op == IoOp::Unmap && !leg.unmaps { IoOp::WriteZeroes } else { op };
            let lba = if has_range(op) { lba + leg.data_offset } else { lba };
            run.left += 1;
            let sink = Rc::clone(leg) as Rc<dyn IoSink>;
            leg.chan.submit(core, Io::new(op, lba, part, bufs, sink, key as u64));
        }
        if run.left == 0 {
            let run = running.remove(key);
            core.complete(run.io, run.status);
        }
    }

    /// How many blocks of a request a member gets: the one being rebuilt only those below the boundary, the rest will
    /// be copied.
    fn part_for(&self, leg: &Leg, op: IoOp, lba: u64, blocks: u64) -> u64 {
        if self.target.get() != Some(leg.id.slot) || !has_range(op) {
            return blocks;
        }
        self.boundary.get().saturating_sub(lba).min(blocks)
    }

    fn first_blocks(&self, bufs: &Bufs, blocks: u64) -> Bufs {
        let mut left = (blocks * u64::from(self.shared.block_size)) as usize;
        let mut part = Bufs::new();
        for buf in bufs {
            let now = left.min(buf.len());
            if now > 0 {
                part.push(buf.slice(..now));
            }
            left -= now;
        }
        part
    }

    fn read_done(self: &Rc<Self>, core: &Core, leg: &Rc<Leg>, key: usize, status: IoStatus) {
        let again = {
            let mut running = self.running.borrow_mut();
            let run = &mut running[key];
            leg.reading.set(leg.reading.get().saturating_sub(run.io.blocks));
            if status.is_success() { None } else { self.next_to_ask(run, status) }
        };
        if let Some(other) = again {
            return self.read_from(core, key, &other);
        }
        let run = self.running.borrow_mut().remove(key);
        let (lba, blocks) = (run.io.lba, run.io.blocks);
        if let Some(first) = run.first {
            let id = self.shared.id;
            if !status.is_success() {
                self.report(core, first);
            } else if first != leg.id {
                core.post(CONTROL, move |core| super::control::could_not_read(core, id, first, lba, blocks));
            }
        }
        self.complete(core, run.io, status);
    }

    /// The next member to ask for what one could not read, in order of slots.
    fn next_to_ask(&self, run: &mut Running, status: IoStatus) -> Option<Rc<Leg>> {
        run.status = status;
        let legs = self.legs.borrow();
        let end = run.io.lba + run.io.blocks;
        while let Some(leg) = legs.get(usize::from(run.next)) {
            run.next += 1;
            if let Some(leg) = leg
                && Some(leg.id) != run.first
                && self.may_read(leg, end, run.origin)
            {
                return Some(Rc::clone(leg));
            }
        }
        None
    }

    fn other_done(self: &Rc<Self>, core: &Core, leg: &Leg, key: usize, status: IoStatus) {
        let mut running = self.running.borrow_mut();
        let run = &mut running[key];
        run.left -= 1;
        if status.is_success() {
            run.succeeded = true;
        } else {
            run.status = status;
            run.failed.push(leg.id);
        }
        if run.left > 0 {
            return;
        }
        let run = running.remove(key);
        drop(running);
        if run.io.op == IoOp::Reset {
            // A reset that fails says nothing about the member's data.
            let status = if run.failed.is_empty() { Status::SUCCESS } else { run.status };
            return self.complete(core, run.io, status);
        }
        for id in &run.failed {
            self.report(core, *id);
        }
        match (run.succeeded, run.failed.is_empty()) {
            (true, true) => self.complete(core, run.io, Status::SUCCESS),
            (true, false) => self.park(core, run),
            (false, _) => self.complete(core, run.io, run.status),
        }
    }

    fn park(self: &Rc<Self>, core: &Core, run: Running) {
        let parked = Parked { io: run.io, waits_for: run.failed, status: run.status, unrecorded: false };
        self.parked.borrow_mut().push(parked);
        self.wake_waiters(core);
    }

    fn complete(self: &Rc<Self>, core: &Core, io: Io, status: IoStatus) {
        core.complete(io, status);
        self.wake_waiters(core);
    }

    fn wake_waiters(&self, core: &Core) {
        if !self.waiters.borrow().is_empty() {
            for waiter in self.waiters.take() {
                if self.touches(&waiter.hold) {
                    self.waiters.borrow_mut().push(waiter);
                } else {
                    let _ = waiter.done.send(());
                }
            }
        }
        if self.users.get() == 0 {
            self.end_if_over(core);
        }
    }

    /// Tells the control core of a member that failed, once.
    fn report(&self, core: &Core, member: MemberId) {
        let legs = self.legs.borrow();
        let leg = legs.get(usize::from(member.slot)).and_then(Option::as_ref).filter(|leg| leg.id == member);
        if leg.is_some_and(|leg| leg.reported.replace(true)) {
            return;
        }
        let (id, from) = (self.shared.id, core.id());
        core.post(CONTROL, move |core| super::control::member_failed(core, id, member, from));
    }
}

impl IoSink for Leg {
    fn io_done(self: Rc<Self>, core: &Core, tag: u64, status: IoStatus) {
        let (raid, key) = (Rc::clone(&self.raid), tag as usize);
        let is_read = raid.running.borrow().get(key).is_some_and(|run| run.io.op == IoOp::Read);
        if is_read { raid.read_done(core, &self, key, status) } else { raid.other_done(core, &self, key, status) }
    }
}

fn has_range(op: IoOp) -> bool {
    !matches!(op, IoOp::Flush | IoOp::Reset)
}

pub(super) fn is_about(hold: &Held, io: &Io) -> bool {
    match hold {
        Held::Everything => true,
        Held::Range(range) => has_range(io.op) && io.lba < range.end && range.start < io.lba + io.blocks,
    }
}
