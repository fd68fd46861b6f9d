//! Copying a member to a joiner while hosts write (rule 10), and making members equal after an unclean stop.
//!
//! *What it is.* One job per leg that is copied to, with the set of regions it lacks (see [`crate::legstamps`]; all of them
//! without a meta area); *runs*, each through one region for all jobs that lack it; and a fixed number of copy windows:
//! ```text
//! Free ─▶ Locking ─▶ Read ─▶ Reading ─▶ Writing (to each target) ─▶ Free
//!             (range lock: Copy)   │ read failed: another member
//!                                  └ leg lost: waits and goes on when it is back
//! ```
//! So one read feeds all joiners. Sources are all members in turns, those with fewer reads in flight first.
//!
//! The joiner gets every host write from the start of its job. A window holds a *Copy* lock: no host write overlaps
//! it between its read and its write, so it cannot put old data over new. Zeroes stay zeroes: the runner may write them as such.
//! From time to time, and when a job has copied everything, the leg is flushed; with a meta area it then takes over the
//! stamps of what was copied, so that a rebuild that is interrupted goes on there. Then it may be admitted (or counts as
//! equal).
//!
//! *Invariants.* A slot's buffer is used for one window at a time, and not again before the I/O on it is answered.
//! Windows are read from members of `S` only. A job lives no longer than its leg; it does not survive the core.
//!
//! *When things fail.* Joiner lost: its windows wait until it is back or dropped. A read error on one member: the
//! next one. On all: the rebuild ends and the joiner is dropped, the volume stays up. A write error: likewise.

use crate::core::{Core, Life, LockOwner};
use crate::events::{Action, CopySlot, DropReason, Event, LegError, LegId, Op, Payload};
use crate::legs::{Leg, LegMask, Owner, Role};
use crate::meta::RegionBits;
use crate::overlap::{LockKey, LockKind};

/// Progress is told when another 1/64 is copied.
const PROGRESS_STEPS: u64 = 64;
/// A joiner takes over stamps when so many regions were copied: so much is copied again after an interruption at most.
const TAKE_OVER_REGIONS: usize = 128;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Free,
    Locking,
    Read,
    Reading,
    Writing,
    /// No target is left while I/O is in flight.
    Draining,
}

#[derive(Debug, Clone, Copy)]
struct Window {
    stage: Stage,
    run: usize,
    /// Targets that do not have it yet.
    need: LegMask,
    /// Writes in flight.
    sent: LegMask,
    lba: u64,
    blocks: u32,
    lock: Option<LockKey>,
    tried: LegMask,
}

const FREE: Window = Window {
    stage: Stage::Free,
    run: 0,
    need: LegMask::EMPTY,
    sent: LegMask::EMPTY,
    lba: 0,
    blocks: 0,
    lock: None,
    tried: LegMask::EMPTY,
};

/// One region on its way to its targets.
#[derive(Debug, Clone, Copy, Default)]
struct Run {
    unit: u32,
    next: u64,
    end: u64,
    targets: LegMask,
    /// Windows under way.
    windows: u32,
}

impl Run {
    fn is_free(&self) -> bool {
        self.next == self.end && self.windows == 0
    }
}

#[derive(Debug)]
struct Job {
    leg: LegId,
    /// Regions that no run was started for; `None` while that is being found out.
    todo: Option<RegionBits>,
    cursor: u32,
    /// Runs under way.
    active: u32,
    copied: u64,
    total: u64,
    /// Copied regions that no flush was sent for, and those that one is under way for.
    unflushed: Vec<u32>,
    flushing: Vec<u32>,
    flush_sent: bool,
    /// The flush under way is the last one.
    last: bool,
}

/// How far a rebuild is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct CopyProgress {
    pub(crate) copied: u64,
    pub(crate) total: u64,
    pub(crate) planned: bool,
}

/// The jobs and their windows.
#[derive(Debug)]
pub(crate) struct Copies {
    jobs: Vec<Job>,
    runs: Vec<Run>,
    windows: Vec<Window>,
    window_blocks: u32,
    num_blocks: u64,
    /// Blocks that are copied as one: a region.
    unit: u64,
    /// Which job goes first, in turns.
    turn: usize,
}

impl Copies {
    pub(crate) fn new(depth: u32, window_blocks: u32, num_blocks: u64, unit: u64) -> Self {
        let windows = vec![FREE; depth as usize];
        Self { jobs: Vec::new(), runs: Vec::new(), windows, window_blocks, num_blocks, unit, turn: 0 }
    }

    pub(crate) fn depth(&self) -> u32 {
        u32::try_from(self.windows.len()).unwrap_or(u32::MAX)
    }

    pub(crate) fn window(&self) -> u32 {
        self.window_blocks
    }

    fn units(&self) -> u32 {
        u32::try_from(self.num_blocks.div_ceil(self.unit)).unwrap_or(u32::MAX)
    }

    fn range_of(&self, unit: u32) -> (u64, u64) {
        let start = u64::from(unit) * self.unit;
        (start, (start + self.unit).min(self.num_blocks))
    }

    fn blocks_of(&self, units: impl Iterator<Item = u32>) -> u64 {
        units.map(|unit| self.range_of(unit)).map(|(start, end)| end - start).sum()
    }

    /// Starts a job: of everything, or of what [`Self::plan`] will say. One that exists starts again.
    pub(crate) fn begin(&mut self, leg: LegId, everything: bool) {
        self.jobs.retain(|j| j.leg != leg);
        let todo = everything.then(|| RegionBits::full(self.units()));
        let (unflushed, flushing) = (Vec::new(), Vec::new());
        let total = if everything { self.num_blocks } else { 0 };
        let (cursor, active, copied, flush_sent, last) = (0, 0, 0, false, false);
        self.jobs.push(Job { leg, todo, cursor, active, copied, total, unflushed, flushing, flush_sent, last });
    }

    /// What a job has to copy is known.
    pub(crate) fn plan(&mut self, leg: LegId, regions: RegionBits) {
        let total = self.blocks_of(regions.iter());
        if let Some(job) = self.job_mut(leg).filter(|j| j.todo.is_none()) {
            job.total = total;
            job.todo = Some(regions);
        }
    }

    pub(crate) fn progress(&self, leg: LegId) -> CopyProgress {
        let of = |j: &Job| CopyProgress { copied: j.copied, total: j.total, planned: j.todo.is_some() };
        self.jobs.iter().find(|j| j.leg == leg).map(of).unwrap_or_default()
    }

    /// Forgets that a leg that left could not read.
    pub(crate) fn forget_leg(&mut self, leg: LegId) {
        self.windows.iter_mut().for_each(|w| w.tried.remove(leg));
    }

    /// Nothing is copied, or waits to be.
    pub(crate) fn has_no_jobs(&self) -> bool {
        self.jobs.is_empty() && self.is_idle()
    }

    /// No window is in use.
    pub(crate) fn is_idle(&self) -> bool {
        self.windows.iter().all(|w| w.stage == Stage::Free)
    }

    fn job_mut(&mut self, leg: LegId) -> Option<&mut Job> {
        self.jobs.iter_mut().find(|j| j.leg == leg)
    }

    /// A run's last window is done.
    fn end_run(&mut self, run: usize) {
        let Run { unit, targets, .. } = std::mem::take(&mut self.runs[run]);
        let blocks = self.blocks_of(std::iter::once(unit));
        for job in self.jobs.iter_mut().filter(|j| targets.contains(j.leg)) {
            job.active -= 1;
            job.copied += blocks;
            job.unflushed.push(unit);
        }
    }
}

impl Core {
    /// Ends a leg's job and takes back its windows.
    pub(crate) fn end_copy(&mut self, leg: LegId) {
        self.copies.jobs.retain(|j| j.leg != leg);
        self.copies.runs.iter_mut().for_each(|r| r.targets.remove(leg));
        for slot in 0..self.copies.windows.len() {
            let window = &mut self.copies.windows[slot];
            if !window.need.contains(leg) {
                continue;
            }
            window.need.remove(leg);
            if window.need.is_empty() {
                self.let_window_go(slot);
            }
        }
        // Nobody wants what was not begun yet.
        for run in self.copies.runs.iter_mut().filter(|r| r.targets.is_empty()) {
            run.next = run.end;
        }
    }

    /// A window has no target any more, or all of them have it.
    fn let_window_go(&mut self, slot: usize) {
        let window = &mut self.copies.windows[slot];
        let in_flight = window.stage == Stage::Reading || !window.sent.is_empty();
        let (lock, run) = (window.lock.take(), window.run);
        window.stage = if in_flight { Stage::Draining } else { Stage::Free };
        let live = &mut self.copies.runs[run];
        live.windows -= 1;
        if live.is_free() {
            self.copies.end_run(run);
        }
        if let Some(key) = lock {
            self.release_lock(key);
        }
    }

    /// Starts windows, flushes what is copied, keeps the making-equal going.
    pub(crate) fn pump_copies(&mut self, out: &mut Vec<Action>) {
        self.pump_equalise(out);
        for slot in 0..self.copies.windows.len() {
            if self.copies.windows[slot].stage == Stage::Free && !self.start_window(slot) {
                break;
            }
        }
        for index in 0..self.copies.jobs.len() {
            self.flush_copied(index, out);
        }
    }

    /// Legs that are copied to now. While closing, only the making-equal goes on: without it the close would not be clean.
    fn copied_to(&self) -> LegMask {
        let running = self.life == Life::Running;
        self.legs.mask(|l| l.is_sendable() && (running || l.unequal))
    }

    /// The run that has something left for these legs; else a new one.
    fn choose_run(&mut self, wanted: LegMask) -> Option<usize> {
        let copies = &mut self.copies;
        if let Some(run) = copies.runs.iter().position(|r| r.next < r.end && !r.targets.and(wanted).is_empty()) {
            return Some(run);
        }
        let jobs = copies.jobs.len();
        let next = |job: &Job| {
            let todo = job.todo.as_ref().filter(|_| wanted.contains(job.leg))?;
            todo.next(job.cursor).or_else(|| todo.next(0))
        };
        let at = |step: usize| (copies.turn + step) % jobs;
        let (index, unit) = (0..jobs).map(at).find_map(|i| Some((i, next(&copies.jobs[i])?)))?;
        copies.turn = (index + 1) % jobs;
        copies.jobs[index].cursor = unit + 1;
        let mut targets = LegMask::EMPTY;
        for job in copies.jobs.iter_mut().filter(|j| wanted.contains(j.leg)) {
            if let Some(todo) = job.todo.as_mut().filter(|t| t.contains(unit)) {
                todo.remove(unit);
                job.active += 1;
                targets.insert(job.leg);
            }
        }
        let (next, end) = copies.range_of(unit);
        let fresh = Run { unit, next, end, targets, windows: 0 };
        let free = copies.runs.iter().position(Run::is_free);
        let run = free.unwrap_or(copies.runs.len());
        match copies.runs.get_mut(run) {
            Some(place) => *place = fresh,
            None => copies.runs.push(fresh),
        }
        Some(run)
    }

    /// Gives a free slot the next window of a run. False when no job wants one.
    fn start_window(&mut self, slot: usize) -> bool {
        if self.copies.jobs.is_empty() {
            return false;
        }
        let wanted = self.copied_to();
        let Some(run) = self.choose_run(wanted) else { return false };
        let window_blocks = u64::from(self.copies.window_blocks);
        let live = &mut self.copies.runs[run];
        let blocks = window_blocks.min(live.end - live.next);
        let (lba, need) = (live.next, live.targets);
        live.next += blocks;
        live.windows += 1;
        let owner = LockOwner::Copy(u32::try_from(slot).unwrap_or(u32::MAX));
        let (key, granted) = self.locks.acquire(lba, lba + blocks, LockKind::Copy, owner);
        let blocks = u32::try_from(blocks).unwrap_or(u32::MAX);
        self.copies.windows[slot] = Window { stage: Stage::Locking, run, need, lba, blocks, lock: Some(key), ..FREE };
        if granted {
            self.ready.push_back(owner);
        }
        true
    }

    /// The window's range is locked.
    pub(crate) fn start_copy(&mut self, slot: u32, out: &mut Vec<Action>) {
        let Some(window) = self.copies.windows.get_mut(slot as usize) else { return };
        // The job may have ended between the grant and now; the slot may even wait for another range.
        if window.stage == Stage::Locking && window.lock.is_some_and(|key| self.locks.is_granted(key)) {
            window.stage = Stage::Read;
            self.step_copy(slot, out);
        }
    }

    /// Sends the window's next I/O, to legs that can take it.
    fn step_copy(&mut self, slot: u32, out: &mut Vec<Action>) {
        let Some(window) = self.copies.windows.get(slot as usize).copied() else { return };
        let (range, payload, owner) =
            ((window.lba, window.blocks), Payload::Copy(CopySlot(slot)), Owner::Copy { slot: CopySlot(slot) });
        match window.stage {
            Stage::Read => {
                let behind = self.behind_settled(window.lba, window.blocks);
                // All members in turns: a local one alone would be read at its own speed.
                let Some(source) = self.legs.choose_source(false, window.tried.or(behind)) else {
                    return self.no_source(window);
                };
                self.copies.windows[slot as usize].stage = Stage::Reading;
                self.send(source, owner, Op::Read, range, payload, out);
            }
            Stage::Writing => {
                for leg in window.need.without(window.sent).iter() {
                    if self.legs.get(leg).is_some_and(Leg::is_sendable) {
                        self.copies.windows[slot as usize].sent.insert(leg);
                        self.send(leg, owner, Op::Write { fua: false }, range, payload, out);
                    }
                }
            }
            _ => {}
        }
    }

    /// No member is up that has not failed this window. Those that are lost may come back; else the jobs end.
    fn no_source(&mut self, window: Window) {
        if window.need.iter().any(|id| self.legs.get(id).is_some_and(|l| l.unequal)) {
            // The target has every acknowledged write too: it is the source that goes, and another one is chosen.
            for leg in window.tried.iter() {
                self.eject_or_drop(leg, DropReason::NoSource);
            }
            return;
        }
        let may_come = self.legs.mask(|l| l.role == Role::Member && l.eject.is_none() && !l.unequal);
        if may_come.without(window.tried).is_empty() {
            for target in window.need.iter() {
                self.eject_or_drop(target, DropReason::NoSource);
            }
        }
    }

    pub(crate) fn copy_io_done(
        &mut self,
        slot: CopySlot,
        leg: LegId,
        result: Result<(), LegError>,
        out: &mut Vec<Action>,
    ) {
        let Some(window) = self.copies.windows.get_mut(slot.0 as usize) else { return };
        let written = window.sent.contains(leg);
        window.sent.remove(leg);
        match (window.stage, result) {
            (Stage::Draining, _) if window.sent.is_empty() => window.stage = Stage::Free,
            (Stage::Reading, Ok(())) => window.stage = Stage::Writing,
            (Stage::Reading, Err(LegError::Gone)) => window.stage = Stage::Read,
            (Stage::Reading, Err(error)) => {
                window.stage = Stage::Read;
                window.tried.insert(leg);
                let (lba, blocks) = (window.lba, window.blocks);
                out.push(Action::Event(Event::ReadFailed { leg, lba, blocks, error }));
            }
            (Stage::Writing, Ok(())) if written => {
                window.need.remove(leg);
                if window.need.is_empty() {
                    return self.window_copied(slot, out);
                }
            }
            (Stage::Writing, Err(error)) if written && error != LegError::Gone => {
                self.eject_or_drop(leg, DropReason::CopyFailed(error));
            }
            _ => {}
        }
        self.step_copy(slot.0, out);
    }

    fn window_copied(&mut self, slot: CopySlot, out: &mut Vec<Action>) {
        let run = self.copies.windows[slot.0 as usize].run;
        let targets = self.copies.runs[run].targets;
        let step = |p: CopyProgress| u128::from(p.copied) * u128::from(PROGRESS_STEPS) / u128::from(p.total.max(1));
        for leg in targets.iter() {
            let before = self.copies.progress(leg);
            let windows = self.copies.runs[run].windows;
            let done = self.copies.runs[run].next == self.copies.runs[run].end && windows == 1;
            let after = CopyProgress { copied: before.copied + if done { self.run_blocks(run) } else { 0 }, ..before };
            if step(after) != step(before) {
                out.push(Action::Progress { leg, copied: after.copied, total: after.total });
            }
        }
        self.let_window_go(slot.0 as usize);
    }

    fn run_blocks(&self, run: usize) -> u64 {
        self.copies.blocks_of(std::iter::once(self.copies.runs[run].unit))
    }

    /// Ends jobs of legs that failed (one that may not leave yet must not keep the windows), and looks at every
    /// waiting window again.
    pub(crate) fn rescan_copies(&mut self, out: &mut Vec<Action>) {
        for leg in self.legs.mask(Leg::is_failed).iter() {
            if self.copies.job_mut(leg).is_some() {
                self.end_copy(leg);
            }
        }
        for slot in 0..self.copies.depth() {
            self.step_copy(slot, out);
        }
    }

    /// A job that has copied everything, or enough to note it: flush its leg.
    fn flush_copied(&mut self, index: usize, out: &mut Vec<Action>) {
        let Some(job) = self.copies.jobs.get_mut(index).filter(|j| !j.flush_sent) else { return };
        let last = job.active == 0 && job.todo.as_ref().is_some_and(RegionBits::is_empty);
        let Some(leg) = self.legs.get_mut(job.leg).filter(|l| l.is_sendable()) else { return };
        if !last && (leg.meta.is_none() || job.unflushed.len() < TAKE_OVER_REGIONS) {
            return;
        }
        if last && leg.role == Role::Copying {
            leg.role = Role::Flushing;
        }
        (job.flush_sent, job.last) = (true, last);
        std::mem::swap(&mut job.unflushed, &mut job.flushing);
        let target = job.leg;
        self.send(target, Owner::JoinFlush, Op::Flush, (0, 0), Payload::None, out);
    }

    pub(crate) fn join_flush_done(&mut self, id: LegId, result: Result<(), LegError>, _out: &mut Vec<Action>) {
        let Some(job) = self.copies.job_mut(id).filter(|j| j.flush_sent) else { return };
        job.flush_sent = false;
        match result {
            Ok(()) => {
                let last = job.last;
                let mut flushed = std::mem::take(&mut job.flushing);
                self.take_over_stamps(id, &flushed);
                flushed.clear();
                self.rescan = true;
                if !last {
                    if let Some(job) = self.copies.job_mut(id) {
                        job.flushing = flushed; // Its room is used again.
                    }
                    return;
                }
                self.copies.jobs.retain(|j| j.leg != id);
                if let Some(leg) = self.legs.get_mut(id) {
                    leg.unequal = false;
                    if leg.role == Role::Flushing {
                        leg.role = Role::Admitted;
                    }
                }
            }
            Err(LegError::Gone) => {
                let mut again = std::mem::take(&mut job.flushing);
                job.unflushed.append(&mut again);
            }
            Err(error) => {
                self.eject_or_drop(id, DropReason::CopyFailed(error));
            }
        }
    }

    /// Strict mode after an unclean stop: keeps one member as the source; serves hosts when all are equal.
    fn pump_equalise(&mut self, out: &mut Vec<Action>) {
        let Some(barrier) = self.barrier else { return };
        let staying = |l: &Leg| l.role == Role::Member && l.eject.is_none();
        if !self.legs.iter().any(|l| staying(l) && !l.unequal) {
            // The source leaves. Every member has all acknowledged writes (one that may not has a meta area, and is made
            // equal region by region) and nothing was served yet: any will do, but what was copied came from another one.
            let unequal = self.legs.mask(|l| l.unequal);
            unequal.iter().for_each(|id| self.end_copy(id));
            // A write to one that stays is still in flight: it must not land on what is read or written after it.
            let stays = self.legs.mask(staying);
            if self.copies.windows.iter().any(|w| w.stage == Stage::Draining && !stays.and(w.sent).is_empty()) {
                return;
            }
            let ready = |l: &&Leg| staying(l) && l.is_up();
            let Some(source) = self.legs.iter().find(ready).map(|l| l.id) else { return };
            for id in unequal.iter() {
                if id != source {
                    self.copies.begin(id, true);
                }
            }
            if let Some(leg) = self.legs.get_mut(source) {
                leg.unequal = false;
            }
        }
        if !self.legs.iter().any(|l| l.role == Role::Member && l.unequal) {
            self.barrier = None;
            self.release_lock(barrier);
            out.push(Action::Event(Event::Equalised));
        }
    }
}
