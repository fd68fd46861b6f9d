//! Copying a member to a joiner while hosts write (rule 10), and making members equal after an unclean stop.
//!
//! *What it is.* One job per leg that is copied to, and a fixed number of copy windows shared by all jobs:
//! ```text
//! Free ─▶ Locking ─▶ Read ─▶ Reading ─▶ Write ─▶ Writing ─▶ Free
//!             (range lock: Copy)   │ read failed: another member
//!                                  └ leg lost: waits and goes on when it is back
//! ```
//! The joiner gets every host write from the start of its job. A window holds a *Copy* lock: no host write overlaps
//! it between its read and its write, so it cannot put old data over new. Zeroes stay zeroes: the runner may write them as such.
//! When a job has copied everything, the leg is flushed; then it may be admitted (or counts as equal).
//!
//! *Invariants.* A slot's buffer is used for one window at a time, and not again before the I/O on it is answered.
//! Windows are read from members of `S` only. A job lives no longer than its leg; it does not survive the core.
//!
//! *When things fail.* Joiner lost: its window waits until it is back or dropped. A read error on one member: the
//! next one. On all: the rebuild ends and the joiner is dropped, the volume stays up. A write error: likewise.
//!
//! *Later.* Delta: a job asks the region stamps for its next window instead of counting up.

use crate::core::{Core, Life, LockOwner};
use crate::events::{Action, CopySlot, DropReason, Event, LegError, LegId, Op, Payload};
use crate::legs::{Leg, LegMask, Owner, Role};
use crate::overlap::{LockKey, LockKind};

/// Progress is told when another 1/64 is copied.
const PROGRESS_STEPS: u64 = 64;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Free,
    Locking,
    Read,
    Reading,
    Write,
    Writing,
    /// The job ended while I/O was in flight.
    Draining,
}

#[derive(Debug, Clone, Copy)]
struct Window {
    stage: Stage,
    target: LegId,
    lba: u64,
    blocks: u32,
    lock: Option<LockKey>,
    tried: LegMask,
}

#[derive(Debug, Clone, Copy)]
struct Job {
    leg: LegId,
    next: u64,
    copied: u64,
    active: u32,
    flush_sent: bool,
}

/// The jobs and their windows.
#[derive(Debug)]
pub(crate) struct Copies {
    jobs: Vec<Job>,
    windows: Vec<Window>,
    window_blocks: u32,
    /// Which job goes first, in turns.
    turn: usize,
}

impl Copies {
    pub(crate) fn new(depth: u32, window_blocks: u32) -> Self {
        let free =
            Window { stage: Stage::Free, target: LegId(0), lba: 0, blocks: 0, lock: None, tried: LegMask::EMPTY };
        Self { jobs: Vec::new(), windows: vec![free; depth as usize], window_blocks, turn: 0 }
    }

    pub(crate) fn depth(&self) -> u32 {
        u32::try_from(self.windows.len()).unwrap_or(u32::MAX)
    }

    pub(crate) fn window(&self) -> u32 {
        self.window_blocks
    }

    /// Starts a job from the first block; one that exists starts again.
    pub(crate) fn begin(&mut self, leg: LegId) {
        self.jobs.retain(|j| j.leg != leg);
        self.jobs.push(Job { leg, next: 0, copied: 0, active: 0, flush_sent: false });
    }

    pub(crate) fn copied(&self, leg: LegId) -> u64 {
        self.jobs.iter().find(|j| j.leg == leg).map_or(0, |j| j.copied)
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
}

impl Core {
    /// Ends a leg's job and takes back its windows.
    pub(crate) fn end_copy(&mut self, leg: LegId) {
        self.copies.jobs.retain(|j| j.leg != leg);
        for slot in 0..self.copies.windows.len() {
            let window = &mut self.copies.windows[slot];
            if window.target != leg {
                continue;
            }
            let lock = window.lock.take();
            window.stage = match window.stage {
                Stage::Reading | Stage::Writing | Stage::Draining => Stage::Draining,
                Stage::Free | Stage::Locking | Stage::Read | Stage::Write => Stage::Free,
            };
            if let Some(key) = lock {
                self.release_lock(key);
            }
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

    /// Gives a free slot the next window of a job. False when no job wants one.
    fn start_window(&mut self, slot: usize) -> bool {
        let total = self.num_blocks;
        let jobs = self.copies.jobs.len();
        let running = self.life == Life::Running;
        for step in 0..jobs {
            let index = (self.copies.turn + step) % jobs;
            let job = &mut self.copies.jobs[index];
            // While closing, only the making-equal goes on: without it the close would not be clean.
            let wanted = self.legs.get(job.leg).is_some_and(|l| l.is_sendable() && (running || l.unequal));
            if !wanted || job.next >= total {
                continue;
            }
            let blocks = u64::from(self.copies.window_blocks).min(total - job.next);
            let (lba, target) = (job.next, job.leg);
            job.next += blocks;
            job.active += 1;
            self.copies.turn = (index + 1) % jobs;
            let owner = LockOwner::Copy(u32::try_from(slot).unwrap_or(u32::MAX));
            let (key, granted) = self.locks.acquire(lba, lba + blocks, LockKind::Copy, owner);
            let blocks = u32::try_from(blocks).unwrap_or(u32::MAX);
            self.copies.windows[slot] =
                Window { stage: Stage::Locking, target, lba, blocks, lock: Some(key), tried: LegMask::EMPTY };
            if granted {
                self.ready.push_back(owner);
            }
            return true;
        }
        false
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

    /// Sends the window's next I/O, if its leg can take it.
    fn step_copy(&mut self, slot: u32, out: &mut Vec<Action>) {
        let Some(window) = self.copies.windows.get(slot as usize).copied() else { return };
        let (leg, op, stage) = match window.stage {
            Stage::Read => {
                let behind = self.behind_settled(window.lba, window.blocks);
                match self.legs.choose_source(self.options.prefer_local, window.tried.or(behind)) {
                    Some(source) => (source, Op::Read, Stage::Reading),
                    None => return self.no_source(window),
                }
            }
            Stage::Write if self.legs.get(window.target).is_some_and(Leg::is_sendable) => {
                (window.target, Op::Write { fua: false }, Stage::Writing)
            }
            _ => return,
        };
        self.copies.windows[slot as usize].stage = stage;
        let slot = CopySlot(slot);
        self.send(leg, Owner::Copy { slot }, op, (window.lba, window.blocks), Payload::Copy(slot), out);
    }

    /// No member is up that has not failed this window. Those that are lost may come back; else the job ends.
    fn no_source(&mut self, window: Window) {
        if self.legs.get(window.target).is_some_and(|l| l.unequal) {
            // The target has every acknowledged write too: it is the source that goes, and another one is chosen.
            for leg in window.tried.iter() {
                self.eject_or_drop(leg, DropReason::NoSource);
            }
            return;
        }
        let may_come = self.legs.mask(|l| l.role == Role::Member && l.eject.is_none() && !l.unequal);
        if may_come.without(window.tried).is_empty() {
            self.eject_or_drop(window.target, DropReason::NoSource);
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
        match (window.stage, result) {
            (Stage::Draining, _) => window.stage = Stage::Free,
            (Stage::Reading, Ok(())) => window.stage = Stage::Write,
            (Stage::Reading, Err(LegError::Gone)) => window.stage = Stage::Read,
            (Stage::Reading, Err(error)) => {
                window.stage = Stage::Read;
                window.tried.insert(leg);
                let (lba, blocks) = (window.lba, window.blocks);
                out.push(Action::Event(Event::ReadFailed { leg, lba, blocks, error }));
            }
            (Stage::Writing, Ok(())) => return self.window_copied(slot, out),
            (Stage::Writing, Err(LegError::Gone)) => window.stage = Stage::Write,
            (Stage::Writing, Err(error)) => {
                window.stage = Stage::Write;
                let target = window.target;
                self.eject_or_drop(target, DropReason::CopyFailed(error));
            }
            _ => {}
        }
        self.step_copy(slot.0, out);
    }

    fn window_copied(&mut self, slot: CopySlot, out: &mut Vec<Action>) {
        let total = self.num_blocks;
        let window = &mut self.copies.windows[slot.0 as usize];
        window.stage = Stage::Free;
        let (target, blocks, lock) = (window.target, u64::from(window.blocks), window.lock.take());
        if let Some(key) = lock {
            self.release_lock(key);
        }
        if let Some(job) = self.copies.job_mut(target) {
            let step = |copied: u64| u128::from(copied) * u128::from(PROGRESS_STEPS) / u128::from(total);
            let before = step(job.copied);
            job.copied += blocks;
            job.active -= 1;
            if step(job.copied) != before {
                out.push(Action::Progress { leg: target, copied: job.copied, total });
            }
        }
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

    /// A job that has copied everything: flush its leg.
    fn flush_copied(&mut self, index: usize, out: &mut Vec<Action>) {
        let Some(job) = self.copies.jobs.get_mut(index) else { return };
        if job.next < self.num_blocks || job.active > 0 || job.flush_sent {
            return;
        }
        let Some(leg) = self.legs.get_mut(job.leg).filter(|l| l.is_sendable()) else { return };
        if leg.role == Role::Copying {
            leg.role = Role::Flushing;
        }
        job.flush_sent = true;
        let target = job.leg;
        self.send(target, Owner::JoinFlush, Op::Flush, (0, 0), Payload::None, out);
    }

    pub(crate) fn join_flush_done(&mut self, id: LegId, result: Result<(), LegError>, _out: &mut Vec<Action>) {
        let Some(job) = self.copies.job_mut(id).filter(|j| j.flush_sent) else { return };
        match result {
            Ok(()) => {
                self.copies.jobs.retain(|j| j.leg != id);
                if let Some(leg) = self.legs.get_mut(id) {
                    leg.unequal = false;
                    if leg.role == Role::Flushing {
                        leg.role = Role::Admitted;
                    }
                }
                self.rescan = true;
            }
            Err(LegError::Gone) => job.flush_sent = false,
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
            if self.copies.windows.iter().any(|w| w.stage == Stage::Draining && stays.contains(w.target)) {
                return;
            }
            let ready = |l: &&Leg| staying(l) && l.is_up();
            let Some(source) = self.legs.iter().find(ready).map(|l| l.id) else { return };
            for id in unequal.iter() {
                if id != source {
                    self.copies.begin(id);
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
