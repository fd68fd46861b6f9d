//! The core: takes one input, appends the actions that follow.
//!
//! *What it is.* The owner of all state. [`Core::apply`] hands the input to the part that knows it (`host`,
//! `membership`, `rebuild`, `repair`) and then runs what became possible until nothing more does ([`Core::run`]).
//!
//! *Invariants.* See the crate's documentation. Every loop is bounded by the number of live commands and legs.
//!
//! *When things fail.* [`Core::open`] refuses parameters that contradict each other. `apply` has no error: an input
//! that makes no sense (an unknown number) is ignored.

use std::collections::VecDeque;

use crate::config::{Epoch, ReplicaId, VolumeId};
use crate::events::{
    Action, DropReason, Event, HostError, Input, IoId, LegError, LegId, Nanos, Op, Payload, SnapshotError, StopReason,
};
use crate::gate::Gate;
use crate::host::HostOps;
use crate::lease::Lease;
use crate::legmeta::MetaState;
use crate::legs::{IoEntry, IoIds, IoTable, LegMask, Legs, Owner, Role};
use crate::marks::Marks;
use crate::open::{CoreError, check_bounds, open_legs, open_wib};
use crate::overlap::{LockKey, LockKind, RangeLocks};
use crate::params::{OpenParams, Options};
use crate::rebuild::Copies;
use crate::regions::Regions;
use crate::repair::Repairs;
use crate::snapshot::Snapshot;
use crate::suspicion::Gone;
use crate::wib::Wib;

/// Most I/O is of this size and aligned to it; see [`crate::crowd`].
const GRANULE_BYTES: u32 = 4096;

/// Whose range it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LockOwner {
    Host(u32),
    Copy(u32),
    Region(u32),
    /// Keeps hosts out while members are made equal.
    Barrier,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Life {
    Running,
    /// Waits until no command, copy or repair is in flight.
    Draining,
    /// Waits for the flush of every member: sent, done.
    ClosingFlush {
        sent: LegMask,
        done: LegMask,
    },
    /// All flushed; meta areas are told.
    ClosingMeta,
    /// All flushed; the swap says so.
    ClosingSwap,
    Closed,
    Stopped,
}

/// The mirror core of one volume. See the crate's documentation.
#[derive(Debug)]
pub struct Core {
    pub(crate) volume: VolumeId,
    pub(crate) block_size: u32,
    pub(crate) num_blocks: u64,
    pub(crate) options: Options,
    pub(crate) gate: Gate,
    pub(crate) legs: Legs,
    pub(crate) io: IoTable,
    pub(crate) locks: RangeLocks<LockOwner>,
    pub(crate) host: HostOps,
    pub(crate) copies: Copies,
    pub(crate) repairs: Repairs,
    pub(crate) lease: Lease,
    /// Write-intent bits; `None` when the volume has no meta areas.
    pub(crate) wib: Option<Wib>,
    pub(crate) meta: MetaState,
    /// Epoch of the last engine before this one that may have served.
    pub(crate) served: Option<Epoch>,
    pub(crate) marks: Marks,
    pub(crate) regions: Regions,
    pub(crate) snapshot: Option<Snapshot>,
    /// `S` had one member at opening: whatever it is, every copy came from it.
    pub(crate) opened_single: bool,
    pub(crate) life: Life,
    /// No member is certain to hold every acknowledged write, and hosts that may know better are attached.
    pub(crate) hosts_must_detach: bool,
    /// Time of the input being taken.
    pub(crate) now: Nanos,
    /// Legs whose answer an acknowledgement needs now: required ones and mirrored joiners.
    pub(crate) expected: LegMask,
    /// Ranges granted and not yet started.
    pub(crate) ready: VecDeque<LockOwner>,
    pub(crate) granted: Vec<LockOwner>,
    pub(crate) found: Vec<IoId>,
    /// Something changed that any command may wait for.
    pub(crate) rescan: bool,
    /// Holds hosts back while members are made equal.
    pub(crate) barrier: Option<LockKey>,
    /// Replicas whose rebuild ended and that are still in `R`.
    pub(crate) abandoned: Vec<ReplicaId>,
    pub(crate) frozen: bool,
    pub(crate) suspect: bool,
    /// Members that left a short time ago (rule 12).
    pub(crate) gone: Gone,
    /// No member is connected: nobody is ejected.
    pub(crate) all_lost: bool,
    /// Until this time only host I/O happens; 0 when that is not known.
    pub(crate) quiet_until: Nanos,
    pub(crate) full_passes: u64,
    armed: Option<Nanos>,
    /// Every input goes the general way.
    #[cfg(test)]
    pub(crate) without_quick: bool,
}

impl Core {
    /// A core that serves. The record was swapped in by the caller at its own epoch, and the members were promoted.
    ///
    /// # Errors
    /// [`CoreError`] when the parameters contradict each other.
    pub fn open(mut params: OpenParams) -> Result<Self, CoreError> {
        check_bounds(&mut params)?;
        params.config.check()?;
        if params.num_blocks != params.config.size_blocks {
            return Err(CoreError::Size { num_blocks: params.num_blocks, recorded: params.config.size_blocks });
        }
        let served = params.meta.as_ref().and_then(|m| m.served);
        let wib = open_wib(&mut params)?;
        let legs = open_legs(&params, wib.as_ref())?;
        let options = params.options;
        let opened_single = params.config.in_sync.len() == 1;
        let region_slots = if wib.is_some() { options.copy_queue_depth } else { 0 };
        let regions = wib.as_ref().map_or(0, |w| w.geometry.regions());
        let unit = wib.as_ref().map_or(u64::from(options.copy_window_blocks), |w| w.geometry.region_blocks());
        let capacity = options.max_inflight as usize + options.copy_queue_depth as usize * 2 + 1;
        let mut core = Self {
            volume: params.volume,
            block_size: params.block_size,
            num_blocks: params.num_blocks,
            options,
            gate: Gate::new(params.config),
            legs,
            io: IoTable::default(),
            locks: RangeLocks::new(
                capacity,
                GRANULE_BYTES.trailing_zeros().saturating_sub(params.block_size.trailing_zeros()),
            ),
            host: HostOps::new(options.max_inflight),
            copies: Copies::new(options.copy_queue_depth, options.copy_window_blocks, params.num_blocks, unit),
            repairs: Repairs::default(),
            lease: Lease::default(),
            wib,
            meta: MetaState::new(),
            served,
            marks: Marks::default(),
            regions: Regions::new(region_slots, regions),
            snapshot: None,
            opened_single,
            life: Life::Running,
            hosts_must_detach: params.hosts_must_detach,
            now: 0,
            expected: LegMask::EMPTY,
            ready: VecDeque::new(),
            granted: Vec::new(),
            found: Vec::new(),
            rescan: true,
            barrier: None,
            abandoned: Vec::new(),
            frozen: false,
            suspect: false,
            gone: Gone::default(),
            all_lost: false,
            quiet_until: 0,
            full_passes: 0,
            armed: None,
            #[cfg(test)]
            without_quick: false,
        };
        #[cfg(feature = "planted-bugs")]
        core.locks.ignore(crate::overlap::Ignore {
            writes_vs_writes: options.bug == Some(crate::PlantedBug::Rule02NoOverlapOrder),
            reads_vs_writes: options.bug == Some(crate::PlantedBug::Rule03ReadsDoNotWait),
        });
        core.open_equalise(params.equalise_from)?;
        core.update_expected();
        Ok(core)
    }

    /// Strict mode after an unclean stop: all members but one are copied over before hosts are served.
    fn open_equalise(&mut self, from: Option<LegId>) -> Result<(), CoreError> {
        let Some(source) = from else { return Ok(()) };
        if self.legs.get(source).is_none_or(|l| l.role != Role::Member) {
            return Err(CoreError::EqualiseFrom(source.0));
        }
        for leg in self.legs.iter_mut().filter(|l| l.role == Role::Member && l.id != source) {
            leg.unequal = true;
            self.copies.begin(leg.id, true);
        }
        let (key, _) = self.locks.acquire(0, self.num_blocks, LockKind::Write, LockOwner::Barrier);
        self.locks.settle(key, &mut self.granted);
        self.barrier = Some(key);
        Ok(())
    }

    /// Takes one input and appends the actions that follow from it, in the order to be carried out.
    pub fn apply(&mut self, now: Nanos, input: Input, out: &mut Vec<Action>) {
        self.now = now;
        if matches!(self.life, Life::Stopped | Life::Closed) {
            self.apply_finished(input, out);
            return;
        }
        let Some(input) = self.apply_quiet(input, out) else { return };
        self.start_grace(now);
        match input {
            Input::Host { id, op, lba, blocks } => self.apply_host(id, op, lba, blocks, out),
            Input::LegDone { leg, io, result } => self.apply_leg_done(now, leg, io, result, out),
            Input::MetaRead { leg, io, data } => self.apply_meta_read(leg, io, data, out),
            Input::LegLost { leg, announced } => self.apply_leg_lost(now, leg, announced, out),
            Input::LegBack { leg, cache_lost } => self.apply_leg_back(now, leg, cache_lost, out),
            Input::LegInstance { leg, instance } => self.apply_leg_instance(leg, &instance),
            Input::HostsDetached => self.apply_hosts_detached(),
            Input::LegFenced { leg } => self.apply_leg_fenced(leg, out),
            Input::SwapAnswer { swap, outcome } => self.apply_swap_answer(now, swap, outcome, out),
            Input::AddLeg { leg, replica, local, meta } => self.apply_add_leg(leg, replica, (local, meta), out),
            Input::RemoveLeg { leg } => self.apply_remove_leg(leg, out),
            Input::SnapshotBegin { id, hold_ns } => self.apply_snapshot_begin(id, hold_ns, out),
            Input::SnapshotTaken { id, replicas } => self.apply_snapshot_taken(&id, replicas, out),
            Input::SnapshotAbort { id } => self.apply_snapshot_abort(&id, out),
            Input::Close => {
                if self.life == Life::Running {
                    self.close_snapshot(out);
                    self.life = Life::Draining;
                }
            }
            Input::Tick => self.armed = None,
        }
        self.run(now, out);
        self.arm(now, out);
    }

    fn apply_finished(&mut self, input: Input, out: &mut Vec<Action>) {
        match input {
            Input::Host { id, .. } => out.push(Action::HostDone { id, result: Err(HostError::PathGone) }),
            Input::AddLeg { leg, .. } => out.push(Action::LegDrop { leg, reason: DropReason::Stopped }),
            Input::SnapshotTaken { id, .. } => {
                out.push(Action::SnapshotDone { id, result: Err(SnapshotError::NotHeld) });
            }
            Input::SnapshotBegin { id, .. } => {
                let error = if self.life == Life::Closed { SnapshotError::Closing } else { SnapshotError::Stopped };
                out.push(Action::SnapshotDone { id, result: Err(error) });
            }
            _ => {}
        }
    }

    /// Runs what became possible until nothing more does.
    pub(crate) fn run(&mut self, now: Nanos, out: &mut Vec<Action>) {
        self.full_passes += 1;
        loop {
            if self.life == Life::Stopped {
                return;
            }
            while let Some(owner) = self.ready.pop_front() {
                match owner {
                    LockOwner::Host(slot) => self.start_host(slot, out),
                    LockOwner::Copy(slot) => self.start_copy(slot, out),
                    LockOwner::Region(slot) => self.start_region(slot, out),
                    LockOwner::Barrier => {}
                }
            }
            self.expire(now, out);
            if std::mem::take(&mut self.rescan) {
                self.rescan_hosts(out);
                self.rescan_copies(out);
            }
            self.pump_lease(out);
            self.pump_repair(out);
            self.pump_copies(out);
            self.pump_bits(out);
            self.pump_snapshot(out);
            self.pump_close(out);
            self.pump_swap(now, out);
            if self.ready.is_empty() && !self.rescan {
                return;
            }
        }
    }

    /// Everything about bits and meta areas; nothing without them.
    fn pump_bits(&mut self, out: &mut Vec<Action>) {
        if self.wib.is_some() {
            self.retry_meta();
            self.pump_regions(out);
            self.pump_marks();
            self.pump_clear(out);
            self.pump_marks(); // Room that was made is used by the same meta write.
        }
        self.pump_meta(out);
    }

    /// Asks to be woken for the next deadline, when it is another one than last time.
    pub(crate) fn arm(&mut self, now: Nanos, out: &mut Vec<Action>) {
        let next = self.next_deadline(now);
        self.become_quiet(next);
        if let Some(at) = next
            && self.armed != Some(at)
            && self.life != Life::Stopped
        {
            out.push(Action::WakeAt { at });
            self.armed = Some(at);
        }
    }

    /// Sends an I/O to a leg.
    pub(crate) fn send(
        &mut self,
        target: LegId,
        owner: Owner,
        op: Op,
        range: (u64, u32),
        payload: Payload,
        out: &mut Vec<Action>,
    ) {
        let Some(leg) = self.legs.get(target) else { return };
        let covers = (op == Op::Flush && leg.changing == 0).then_some(leg.changes);
        let ids = self.book_sent(LegMask::of(target), owner, op, covers);
        let (lba, blocks) = range;
        out.push(Action::LegIo { leg: target, io: ids.on(target), op, lba, blocks, payload });
    }

    /// Books an I/O that goes to all of `legs`, which exist.
    #[inline(always)]
    pub(crate) fn book_sent(&mut self, legs: LegMask, owner: Owner, op: Op, covers: Option<u64>) -> IoIds {
        self.legs.book_sent(legs, op);
        let (reads, changes) = (op == Op::Read, op.changes_blocks());
        self.io.insert(IoEntry { legs, owner, reads, changes, covers, sent: self.now })
    }

    pub(crate) fn apply_leg_done(
        &mut self,
        now: Nanos,
        leg: LegId,
        io: IoId,
        result: Result<(), LegError>,
        out: &mut Vec<Action>,
    ) {
        let Some(entry) = self.io.take(io, leg) else { return };
        let result = self.bend_fenced(result, entry.reads);
        if result == Err(LegError::Fenced) && self.legs.get(leg).is_some_and(|l| l.role != Role::Dropped) {
            self.stop(StopReason::Fenced { leg }, out);
            return;
        }
        if result == Err(LegError::Gone) {
            self.mark_lost(now, leg, false, out);
        }
        self.finish_io(leg, entry, result, out);
    }

    fn apply_leg_fenced(&mut self, leg: LegId, out: &mut Vec<Action>) {
        let live = self.legs.get(leg).is_some_and(|l| l.role != Role::Dropped);
        if live && self.bend_fenced(Err(LegError::Fenced), false).is_err() {
            self.stop(StopReason::Fenced { leg }, out);
        }
    }

    /// Rule 13 broken on purpose.
    fn bend_fenced(&self, result: Result<(), LegError>, reads: bool) -> Result<(), LegError> {
        #[cfg(feature = "planted-bugs")]
        if result == Err(LegError::Fenced) && self.options.bug == Some(crate::PlantedBug::Rule13FencedCountsAsDone) {
            return if reads { Err(LegError::Gone) } else { Ok(()) };
        }
        let _ = reads;
        result
    }

    /// Books an I/O out of its leg and tells its owner.
    pub(crate) fn finish_io(&mut self, id: LegId, entry: IoEntry, result: Result<(), LegError>, out: &mut Vec<Action>) {
        self.legs.book_answered(id, &entry, result);
        // What a leg that left did counts for nothing.
        let dropped = self.legs.get(id).is_none_or(|l| l.role == Role::Dropped);
        let result = if dropped { Err(LegError::Gone) } else { result };
        match entry.owner {
            Owner::Host { slot, generation } => self.host_io_done(slot, generation, id, result, out),
            Owner::Copy { slot } => self.copy_io_done(slot, id, result, out),
            Owner::Repair => self.repair_io_done(id, entry.reads, result, out),
            Owner::JoinFlush => self.join_flush_done(id, result, out),
            Owner::CloseFlush => self.close_flush_done(id, result, out),
            Owner::Probe => self.probe_done(id, result),
            Owner::SnapshotFlush => self.snapshot_flush_done(id, result, out),
            Owner::ClearFlush => self.clear_flush_done(id, result),
            Owner::Region { slot } => self.region_io_done(slot, id, result, out),
            Owner::Meta(part) => self.meta_io_done(id, part, result, out),
        }
        self.legs.reap(id);
    }

    /// Stops for good: every host command fails with a retryable error and nothing is acknowledged any more.
    pub(crate) fn stop(&mut self, reason: StopReason, out: &mut Vec<Action>) {
        self.life = Life::Stopped;
        for leg in self.legs.iter_mut().filter(|l| l.role != Role::Dropped) {
            leg.role = Role::Dropped;
            out.push(Action::LegDrop { leg: leg.id, reason: DropReason::Stopped });
        }
        self.host.fail_all(HostError::PathGone, out);
        if let Some(snapshot) = self.snapshot.take() {
            out.push(snapshot.stopped());
        }
        self.lease.held = 0;
        self.ready.clear();
        out.push(Action::Stopped { reason });
    }

    /// Recomputes which legs acknowledgements wait for; call after every change of a record, a role or an ejection.
    pub(crate) fn update_expected(&mut self) {
        let gate = &self.gate;
        let joiners_count = !self.bends_join();
        let early = self.bends_ack();
        self.expected = self.legs.mask(|l| {
            if l.role == Role::Dropped || (early && l.eject.is_some()) {
                return false;
            }
            gate.requires(&l.replica) || (joiners_count && l.is_mirrored_joiner())
        });
        self.lease.required = self.legs.mask(|l| l.role != Role::Dropped && gate.requires(&l.replica));
        self.lease.valid_until = 0;
        self.rescan = true;
        self.meta.pump = true;
    }

    /// Rule 10 broken on purpose.
    fn bends_join(&self) -> bool {
        #[cfg(feature = "planted-bugs")]
        {
            self.options.bug == Some(crate::PlantedBug::Rule10JoinWithoutMirroring)
        }
        #[cfg(not(feature = "planted-bugs"))]
        {
            false
        }
    }

    /// Rule 6 broken on purpose.
    fn bends_ack(&self) -> bool {
        #[cfg(feature = "planted-bugs")]
        {
            self.options.bug == Some(crate::PlantedBug::Rule06AckBeforeSwap)
        }
        #[cfg(not(feature = "planted-bugs"))]
        {
            false
        }
    }

    /// Moves ranges that were granted to the work list.
    pub(crate) fn take_granted(&mut self) {
        self.ready.extend(self.granted.drain(..));
    }

    pub(crate) fn release_lock(&mut self, key: LockKey) {
        self.locks.release(key, &mut self.granted);
        self.take_granted();
    }

    /// Whether an event is worth telling once: sets the flag and says whether it changed.
    pub(crate) fn tell(flag: &mut bool, value: bool, on: Event, off: Option<Event>, out: &mut Vec<Action>) {
        if *flag != value {
            *flag = value;
            let event = if value { Some(on) } else { off };
            out.extend(event.map(Action::Event));
        }
    }
}
