//! A raid on one core: carries out its I/O on the members.
//!
//! *Flow.* I/O that a hold is about waits in a queue. A read goes to the member with the fewest blocks being read, and
//! to the others in turn when it fails. Everything else goes to all members; the one being rebuilt gets what lies below
//! the boundary.
//!
//! *Invariants.* One instance per core and raid, whatever the number of channels. No allocation per I/O with the usual
//! one or two buffers. A write that a member has failed is answered only after the control core has taken that member
//! out and recorded it: so nothing acknowledged is ever read from a member that does not have it, also after a crash.
//!
//! *When things fail.* A member that fails a write is reported, once, and read from only when there is no other. A read
//! that fails everywhere is answered with the last error. A read that another member could answer is answered at once,
//! and the control core is asked to write the data back where it could not be read.

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, VecDeque};
use std::rc::Rc;
use std::sync::Arc;

use futures::channel::oneshot;
use nvme_wire::Status;
use slab::Slab;
use smallvec::SmallVec;

use super::shared::{Held, Hold, Layout, Member, MemberId, Shared};
use crate::bdev::{BdevError, Bufs, Chan, Channel, Io, IoOp, IoSink, IoStatus};
use crate::reactor::{CONTROL, Core, CoreId};

/// What the control core has made of a reported member.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// It is out, and where the raid has superblocks they say so.
    Out,
    /// It stays, being the last one; or its leaving could not be recorded.
    Unrecorded,
}

/// A member's channel on this core.
struct Leg {
    id: MemberId,
    /// Broken when the leg is dropped from `raid.legs`; in-flight I/O keeps both alive.
    raid: Rc<CoreRaid>,
    chan: Chan,
    data_offset: u64,
    /// Whether the member frees blocks; zeroes are written to one that does not.
    unmaps: bool,
    /// Blocks being read through this leg.
    reading: Cell<u64>,
    /// Reported to the control core, which has not answered yet.
    reported: Cell<bool>,
}

/// Who waits for an I/O.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Origin {
    /// A channel; holds apply.
    Host,
    /// The raid itself, which holds what it works on; never reads from the slot being rebuilt or from `but`.
    Internal { but: Option<MemberId> },
}

struct Running {
    io: Io,
    origin: Origin,
    /// Answers still to come.
    left: u16,
    succeeded: bool,
    status: IoStatus,
    /// For reads: the member asked first, and where to look next.
    first: Option<MemberId>,
    next: u8,
    /// Members that failed it, for everything but reads.
    failed: SmallVec<[MemberId; 2]>,
}

/// A write that some members have and some failed.
struct Parked {
    io: Io,
    waits_for: SmallVec<[MemberId; 2]>,
    status: IoStatus,
    unrecorded: bool,
}

struct Waiter {
    hold: Held,
    done: oneshot::Sender<()>,
}

/// See the module.
pub struct CoreRaid {
    shared: Arc<Shared>,
    users: Cell<u32>,
    legs: RefCell<Vec<Option<Rc<Leg>>>>,
    target: Cell<Option<u8>>,
    boundary: Cell<u64>,
    holds: RefCell<SmallVec<[Hold; 2]>>,
    held: RefCell<VecDeque<Io>>,
    running: RefCell<Slab<Running>>,
    parked: RefCell<Vec<Parked>>,
    waiters: RefCell<Vec<Waiter>>,
}

/// The raids of this core, by their number.
#[derive(Default)]
struct CoreRaids(RefCell<HashMap<u64, Rc<CoreRaid>>>);

fn find(core: &Core, id: u64) -> Option<Rc<CoreRaid>> {
    core.local(CoreRaids::default).0.borrow().get(&id).cloned()
}

impl CoreRaid {
    /// This core's instance, made at its first use. Every call is paired with a [`Self::release`].
    ///
    /// # Errors
    /// When a member cannot be opened.
    pub fn acquire(core: &Core, shared: &Arc<Shared>) -> Result<Rc<Self>, BdevError> {
        if let Some(raid) = find(core, shared.id) {
            raid.users.set(raid.users.get() + 1);
            return Ok(raid);
        }
        let raid = Rc::new(Self {
            shared: Arc::clone(shared),
            users: Cell::new(1),
            legs: RefCell::default(),
            target: Cell::new(None),
            boundary: Cell::new(0),
            holds: RefCell::default(),
            held: RefCell::default(),
            running: RefCell::default(),
            parked: RefCell::default(),
            waiters: RefCell::default(),
        });
        if let Err(error) = raid.take_up(core, &shared.layout()) {
            raid.close_legs(core);
            return Err(error);
        }
        core.local(CoreRaids::default).0.borrow_mut().insert(shared.id, Rc::clone(&raid));
        Ok(raid)
    }

    /// Ends one use; the members are let go with the last one, once nothing is in flight.
    pub fn release(&self, core: &Core) {
        self.users.set(self.users.get() - 1);
        self.end_if_over(core);
    }

    fn end_if_over(&self, core: &Core) {
        let busy = !self.running.borrow().is_empty() || !self.parked.borrow().is_empty();
        if self.users.get() > 0 || busy || !self.held.borrow().is_empty() {
            return;
        }
        core.local(CoreRaids::default).0.borrow_mut().remove(&self.shared.id);
        self.close_legs(core);
    }

    fn close_legs(&self, core: &Core) {
        let legs = self.legs.take();
        legs.into_iter().flatten().for_each(|leg| leg.chan.close(core));
    }

    /// Takes up what is published, on this core; with a hold, resolves when no I/O in flight here touches what it is
    /// about.
    ///
    /// # Errors
    /// When a new member cannot be opened here; everything else has been taken up.
    pub async fn apply(core: Core, shared: Arc<Shared>, hold: Option<Held>) -> Result<(), BdevError> {
        let Some(raid) = find(&core, shared.id) else { return Ok(()) };
        let taken_up = raid.take_up(&core, &shared.layout());
        raid.let_go(&core);
        if let Some(hold) = hold
            && raid.touches(&hold)
        {
            let (done, wait) = oneshot::channel();
            raid.waiters.borrow_mut().push(Waiter { hold, done });
            let _ = wait.await;
        }
        taken_up
    }

    /// Tells this core what became of a member it has reported.
    pub fn judged(core: &Core, raid: u64, member: MemberId, verdict: Verdict) {
        let Some(raid) = find(core, raid) else { return };
        if let Some(leg) = raid.legs.borrow().get(usize::from(member.slot)).and_then(Option::as_ref)
            && leg.id == member
        {
            leg.reported.set(false);
        }
        for mut parked in raid.parked.take() {
            let waited = parked.waits_for.len();
            parked.waits_for.retain(|id| *id != member);
            parked.unrecorded |= parked.waits_for.len() < waited && verdict == Verdict::Unrecorded;
            if parked.waits_for.is_empty() {
                let status = if parked.unrecorded { parked.status } else { Status::SUCCESS };
                core.complete(parked.io, status);
            } else {
                raid.parked.borrow_mut().push(parked);
            }
        }
        raid.end_if_over(core);
    }

    /// Ends all that waits: the raid goes.
    pub fn give_up(core: &Core, raid: u64) {
        let Some(raid) = find(core, raid) else { return };
        let held = raid.held.take();
        let parked = raid.parked.take();
        for io in held.into_iter().chain(parked.into_iter().map(|p| p.io)) {
            core.complete(io, Status::INTERNAL_PATH_ERROR);
        }
        raid.end_if_over(core);
    }

    fn take_up(self: &Rc<Self>, core: &Core, layout: &Layout) -> Result<(), BdevError> {
        let mut outcome = Ok(());
        let mut legs = self.legs.take();
        legs.resize_with(layout.members.len(), || None);
        for (leg, member) in legs.iter_mut().zip(&layout.members) {
            if leg.as_ref().map(|l| l.id) == member.as_ref().map(|m| m.id) {
                continue;
            }
            if let Some(old) = leg.take() {
                old.chan.close(core);
            }
            let Some(member) = member else { continue };
            match self.open_leg(core, member) {
                Ok(opened) => *leg = Some(opened),
                Err(error) => outcome = Err(error),
            }
        }
        *self.legs.borrow_mut() = legs;
        self.target.set(layout.target);
        self.boundary.set(layout.boundary);
        *self.holds.borrow_mut() = layout.holds.clone();
        outcome
    }

    fn open_leg(self: &Rc<Self>, core: &Core, member: &Member) -> Result<Rc<Leg>, BdevError> {
        let unmaps = member.entry.bdev.info().io_types.unmap;
        Ok(Rc::new(Leg {
            id: member.id,
            raid: Rc::clone(self),
            chan: member.entry.open(core)?,
            data_offset: member.data_offset,
            unmaps,
            reading: Cell::new(0),
            reported: Cell::new(false),
        }))
    }

    /// Starts what no hold is about any more.
    fn let_go(self: &Rc<Self>, core: &Core) {
        for io in self.held.take() {
            self.submit(core, io);
        }
        self.end_if_over(core);
    }

    fn is_held(&self, io: &Io) -> bool {
        self.holds.borrow().iter().any(|hold| is_about(&hold.what, io))
    }

    fn touches(&self, hold: &Held) -> bool {
        self.running.borrow().iter().any(|(_, run)| run.origin == Origin::Host && is_about(hold, &run.io))
    }

    /// Takes an I/O of a channel.
    fn submit(self: &Rc<Self>, core: &Core, io: Io) {
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
            (io.lba + leg.data_offset, io.blocks, io.bufs.clone())
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
            let bufs = if part == blocks { run.io.bufs.clone() } else { self.first_blocks(&run.io.bufs, part) };
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

fn is_about(hold: &Held, io: &Io) -> bool {
    match hold {
        Held::Everything => true,
        Held::Range(range) => has_range(io.op) && io.lba < range.end && range.start < io.lba + io.blocks,
    }
}

/// A channel of the raid's device.
pub struct RaidChannel {
    raid: Rc<CoreRaid>,
    closed: Cell<bool>,
}

impl RaidChannel {
    /// A channel on this core.
    ///
    /// # Errors
    /// As [`CoreRaid::acquire`].
    pub fn open(core: &Core, shared: &Arc<Shared>) -> Result<Self, BdevError> {
        Ok(Self { raid: CoreRaid::acquire(core, shared)?, closed: Cell::new(false) })
    }
}

impl Channel for RaidChannel {
    fn submit(&self, core: &Core, io: Io) {
        self.raid.submit(core, io);
    }

    fn close(&self, core: &Core) {
        if !self.closed.replace(true) {
            self.raid.release(core);
        }
    }
}

/// Asks every core to take up what is published, and with a hold to finish what it is about.
///
/// # Errors
/// The first core's error.
pub async fn apply_everywhere(core: &Core, shared: &Arc<Shared>, hold: Option<Held>) -> Result<(), BdevError> {
    let everywhere = core.peers().iter().map(|peer| peer.id).collect::<Vec<CoreId>>();
    let answers = everywhere.into_iter().map(|id| {
        let (shared, hold) = (Arc::clone(shared), hold.clone());
        core.call_async(id, move |core| CoreRaid::apply(core.clone(), shared, hold))
    });
    // A core that has stopped has no I/O.
    futures::future::join_all(answers).await.into_iter().flatten().collect()
}
