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

use super::core_io::is_about;
use super::shared::{Held, Hold, Layout, Member, MemberId, Shared};
use crate::bdev::{BdevError, Chan, Channel, Io, IoStatus};
use crate::reactor::{Core, CoreId};

/// What the control core has made of a reported member.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// It is out, and where the raid has superblocks they say so.
    Out,
    /// It stays, being the last one; or its leaving could not be recorded.
    Unrecorded,
}

/// A member's channel on this core.
pub(super) struct Leg {
    pub(super) id: MemberId,
    /// Broken when the leg is dropped from `raid.legs`; in-flight I/O keeps both alive.
    pub(super) raid: Rc<CoreRaid>,
    pub(super) chan: Chan,
    pub(super) data_offset: u64,
    /// Whether the member frees blocks; zeroes are written to one that does not.
    pub(super) unmaps: bool,
    /// Blocks being read through this leg.
    pub(super) reading: Cell<u64>,
    /// Reported to the control core, which has not answered yet.
    pub(super) reported: Cell<bool>,
}

/// Who waits for an I/O.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Origin {
    /// A channel; holds apply.
    Host,
    /// The raid itself, which holds what it works on; never reads from the slot being rebuilt or from `but`.
    Internal { but: Option<MemberId> },
}

pub(super) struct Running {
    pub(super) io: Io,
    pub(super) origin: Origin,
    /// Answers still to come.
    pub(super) left: u16,
    pub(super) succeeded: bool,
    pub(super) status: IoStatus,
    /// For reads: the member asked first, and where to look next.
    pub(super) first: Option<MemberId>,
    pub(super) next: u8,
    /// Members that failed it, for everything but reads.
    pub(super) failed: SmallVec<[MemberId; 2]>,
}

/// A write that some members have and some failed.
pub(super) struct Parked {
    pub(super) io: Io,
    pub(super) waits_for: SmallVec<[MemberId; 2]>,
    pub(super) status: IoStatus,
    pub(super) unrecorded: bool,
}

pub(super) struct Waiter {
    pub(super) hold: Held,
    pub(super) done: oneshot::Sender<()>,
}

/// See the module.
pub struct CoreRaid {
    pub(super) shared: Arc<Shared>,
    pub(super) users: Cell<u32>,
    pub(super) legs: RefCell<Vec<Option<Rc<Leg>>>>,
    pub(super) target: Cell<Option<u8>>,
    pub(super) boundary: Cell<u64>,
    pub(super) holds: RefCell<SmallVec<[Hold; 2]>>,
    pub(super) held: RefCell<VecDeque<Io>>,
    pub(super) running: RefCell<Slab<Running>>,
    pub(super) parked: RefCell<Vec<Parked>>,
    pub(super) waiters: RefCell<Vec<Waiter>>,
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

    pub(super) fn end_if_over(&self, core: &Core) {
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
        let count = legs.len().max(layout.members.len());
        legs.resize_with(count, || None);
        for (slot, leg) in legs.iter_mut().enumerate() {
            let member = layout.members.get(slot).and_then(Option::as_ref);
            if leg.as_ref().map(|l| l.id) == member.map(|m| m.id) {
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

    pub(super) fn is_held(&self, io: &Io) -> bool {
        self.holds.borrow().iter().any(|hold| is_about(&hold.what, io))
    }

    pub(super) fn touches(&self, hold: &Held) -> bool {
        self.running.borrow().iter().any(|(_, run)| run.origin == Origin::Host && is_about(hold, &run.io))
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
