//! Making inherited regions equal on all members: what a command waits for, and the rest in the background (rule 18).
//!
//! *What it is.* A fixed number of slots, each with a copy buffer, each working on one region, window by window:
//! ```text
//! Free ─▶ Locking ─▶ Reading ─▶ Writing ─▶ next window … ─▶ region equal: it goes on as a live one
//!          (range lock: Equalise)    └ a leg is lost or leaves: everything back to Free, later again
//! ```
//! One member is read, all other legs that count are written. Every member has all acknowledged writes, so any of them
//! will do as the source; what they differ in was never acknowledged. The bit stays until the region is flushed and
//! cleared like any live one.
//!
//! A member that may lack acknowledged writes (rule 1) is never the source, and nothing is read from it until all regions
//! are equal. Every region is inherited then, and its superblock names no instance as long.
//!
//! When the volume was opened with one member there is nothing to copy: all others are copies of it. Its inherited
//! regions only go through the flush, as it may not have flushed them yet.
//!
//! *Invariants.* It begins only when the inherited bits are durable on every leg that counts, and all of those are
//! connected. A host command never runs in a region that is not equal, so the lock waits for copies only. A slot never
//! keeps its lock while it waits for a leg, so a copy that would heal the volume is not held up.
//!
//! *When things fail.* Source unreadable: another one; none: those that failed leave, and the last one alone is equal
//! to itself. A member that has no room becomes the source: what it holds fits it. One that cannot be written leaves.
//! When all that stay may lack acknowledged writes the core stops before the swap: none of them is a source.

use std::collections::VecDeque;

use crate::core::{Core, Life, LockOwner};
use crate::events::{Action, CopySlot, DropReason, Event, LegError, LegId, Op, Payload, StopReason};
use crate::legs::{Leg, LegMask, Owner, Role};
use crate::meta::RegionBits;
use crate::overlap::{LockKey, LockKind};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Free,
    Locking,
    Reading,
    Writing,
}

#[derive(Debug, Clone, Copy)]
struct Slot {
    stage: Stage,
    region: u32,
    lba: u64,
    blocks: u32,
    lock: Option<LockKey>,
    source: LegId,
    /// A member without room: it is the source next.
    next_source: Option<LegId>,
    /// Members that were the source because they had no room.
    full: LegMask,
    /// Members that could not be read.
    tried: LegMask,
    need: LegMask,
    sent: LegMask,
    done: LegMask,
}

const FREE: Slot = Slot {
    stage: Stage::Free,
    region: 0,
    lba: 0,
    blocks: 0,
    lock: None,
    source: LegId(0),
    next_source: None,
    full: LegMask::EMPTY,
    tried: LegMask::EMPTY,
    need: LegMask::EMPTY,
    sent: LegMask::EMPTY,
    done: LegMask::EMPTY,
};

/// The slots and what is wanted first.
#[derive(Debug)]
pub(crate) struct Regions {
    slots: Vec<Slot>,
    urgent: VecDeque<u32>,
    /// What is in `urgent`.
    queued: RegionBits,
    /// Where the background goes on.
    cursor: u32,
    /// The background waits for room in the table of live regions.
    stalled: bool,
}

impl Regions {
    pub(crate) fn new(depth: u32, regions: u32) -> Self {
        let (urgent, queued) = (VecDeque::new(), RegionBits::empty(regions));
        Self { slots: vec![FREE; depth as usize], urgent, queued, cursor: 0, stalled: false }
    }

    pub(crate) fn depth(&self) -> u32 {
        u32::try_from(self.slots.len()).unwrap_or(u32::MAX)
    }

    /// A command waits for these.
    pub(crate) fn want(&mut self, regions: impl Iterator<Item = u32>) {
        for region in regions {
            if !self.queued.contains(region) {
                self.queued.insert(region);
                self.urgent.push_back(region);
            }
        }
    }

    fn next_urgent(&mut self) -> Option<u32> {
        let region = self.urgent.pop_front()?;
        self.queued.remove(region);
        Some(region)
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.slots.iter().all(|s| s.stage == Stage::Free)
    }

    pub(crate) fn is_stalled(&self) -> bool {
        self.stalled
    }

    /// Regions that are being made equal.
    fn active(&self) -> u32 {
        u32::try_from(self.slots.iter().filter(|s| s.stage != Stage::Free).count()).unwrap_or(u32::MAX)
    }

    fn is_active(&self, region: u32) -> bool {
        self.slots.iter().any(|s| s.stage != Stage::Free && s.region == region)
    }

    /// Forgets what a leg that left did. What is in flight on it stays noted until it is answered.
    pub(crate) fn forget_leg(&mut self, leg: LegId) {
        for slot in &mut self.slots {
            slot.tried.remove(leg);
            slot.full.remove(leg);
            slot.need.remove(leg);
            slot.done.remove(leg);
            slot.next_source = slot.next_source.filter(|l| *l != leg);
        }
    }
}

impl Core {
    /// Gives free slots the next regions.
    pub(crate) fn pump_regions(&mut self, out: &mut Vec<Action>) {
        if self.wib.as_ref().is_none_or(|w| w.inherited_left == 0) {
            self.regions.stalled = false;
            return;
        }
        self.check_sources(out);
        if !self.may_equalise() {
            return;
        }
        for slot in 0..self.regions.slots.len() {
            if self.regions.slots[slot].stage == Stage::Free {
                let Some(region) = self.next_region() else { return };
                self.regions.slots[slot] = Slot { region, ..FREE };
                let start = self.wib.as_ref().map_or(0, |w| w.geometry.range_of(region).0);
                self.lock_window(slot, start);
            }
        }
    }

    /// Rule 1: members of which none is certain to hold every acknowledged write serve nothing.
    fn check_sources(&mut self, out: &mut Vec<Action>) {
        let staying = |l: &&Leg| l.role == Role::Member && l.eject.is_none();
        let changed = self.legs.iter().filter(staying).find(|l| l.changed).map(|l| l.id);
        if let Some(leg) = changed
            && self.legs.iter().filter(staying).all(|l| l.changed)
        {
            self.stop(StopReason::CacheLost { leg }, out);
        }
    }

    /// All legs that count are connected and hold the inherited bits.
    fn may_equalise(&self) -> bool {
        let up = self.expected.iter().all(|id| self.legs.get(id).is_some_and(Leg::is_sendable));
        up && self.bits_are_everywhere()
    }

    fn next_region(&mut self) -> Option<u32> {
        let (regions, wib) = (&mut self.regions, self.wib.as_ref()?);
        regions.stalled = wib.is_full(regions.active());
        if regions.stalled {
            return None;
        }
        while let Some(region) = regions.next_urgent() {
            if wib.inherited.contains(region) && !regions.is_active(region) {
                return Some(region);
            }
        }
        regions.stalled = wib.is_crowded();
        if regions.stalled || self.life != Life::Running {
            return None;
        }
        // At most one lap: those passed over are being worked on.
        (0..=regions.slots.len()).find_map(|_| {
            let region = wib.inherited.next(regions.cursor).or_else(|| wib.inherited.next(0))?;
            regions.cursor = region + 1;
            (!regions.is_active(region)).then_some(region)
        })
    }

    fn lock_window(&mut self, slot: usize, lba: u64) {
        let Some(wib) = self.wib.as_ref() else { return };
        let end = wib.geometry.range_of(self.regions.slots[slot].region).1;
        let blocks = u64::from(self.copies.window()).min(end.saturating_sub(lba));
        let owner = LockOwner::Region(u32::try_from(slot).unwrap_or(u32::MAX));
        let (key, granted) = self.locks.acquire(lba, lba + blocks, LockKind::Equalise, owner);
        let window = &mut self.regions.slots[slot];
        *window = Slot { stage: Stage::Locking, lba, lock: Some(key), region: window.region, ..FREE };
        window.blocks = u32::try_from(blocks).unwrap_or(u32::MAX);
        if granted {
            self.ready.push_back(owner);
        }
    }

    /// The window's range is locked.
    pub(crate) fn start_region(&mut self, slot: u32, out: &mut Vec<Action>) {
        let Some(window) = self.regions.slots.get(slot as usize) else { return };
        if window.stage == Stage::Locking && window.lock.is_some_and(|key| self.locks.is_granted(key)) {
            self.read_region(slot, None, out);
        }
    }

    fn region_buffer(&self, slot: u32) -> Payload {
        Payload::Copy(CopySlot(self.copies.depth() + 1 + slot))
    }

    fn read_region(&mut self, slot: u32, source: Option<LegId>, out: &mut Vec<Action>) {
        let window = self.regions.slots[slot as usize];
        if self.expected.len() <= 1 || self.opened_single {
            return self.window_equal(slot, out);
        }
        if !self.may_equalise() {
            return self.give_up_region(slot);
        }
        let chosen = source.or_else(|| self.legs.choose_source(self.options.prefer_local, window.tried));
        let Some(source) = chosen else {
            self.no_region_source(window.tried);
            return self.give_up_region(slot);
        };
        let live = &mut self.regions.slots[slot as usize];
        live.stage = Stage::Reading;
        live.source = source;
        live.next_source = None;
        live.sent = LegMask::of(source);
        let payload = self.region_buffer(slot);
        self.send(source, Owner::Region { slot }, Op::Read, (window.lba, window.blocks), payload, out);
    }

    /// No member can deliver: those that failed leave. One that cannot leave keeps the region to itself.
    fn no_region_source(&mut self, tried: LegMask) {
        let stuck = tried.iter().filter(|leg| !self.eject_or_drop(*leg, DropReason::NoSource)).count() > 0;
        if stuck {
            for joiner in self.legs.mask(Leg::is_mirrored_joiner).iter() {
                self.eject_or_drop(joiner, DropReason::NoSource);
            }
        }
    }

    fn write_region(&mut self, slot: u32, out: &mut Vec<Action>) {
        if !self.may_equalise() {
            return self.give_up_region(slot);
        }
        let window = &mut self.regions.slots[slot as usize];
        window.stage = Stage::Writing;
        window.need = self.expected.without(LegMask::of(window.source));
        window.sent = window.need;
        window.done = LegMask::EMPTY;
        let Slot { need, lba, blocks, .. } = *window;
        let payload = self.region_buffer(slot);
        for leg in need.iter() {
            self.send(leg, Owner::Region { slot }, Op::Write { fua: false }, (lba, blocks), payload, out);
        }
        if need.is_empty() {
            self.window_equal(slot, out);
        }
    }

    pub(crate) fn region_io_done(
        &mut self,
        slot: u32,
        leg: LegId,
        result: Result<(), LegError>,
        out: &mut Vec<Action>,
    ) {
        let Some(window) = self.regions.slots.get_mut(slot as usize).filter(|w| w.sent.contains(leg)) else { return };
        window.sent.remove(leg);
        match (window.stage, result) {
            (Stage::Reading, Ok(())) => self.write_region(slot, out),
            (Stage::Reading, Err(LegError::Gone)) => self.give_up_region(slot),
            (Stage::Reading, Err(error)) => {
                window.tried.insert(leg);
                let (lba, blocks) = (window.lba, window.blocks);
                out.push(Action::Event(Event::ReadFailed { leg, lba, blocks, error }));
                self.read_region(slot, None, out);
            }
            (Stage::Writing, result) => self.region_written(slot, leg, result, out),
            (Stage::Free | Stage::Locking, _) => {}
        }
    }

    fn region_written(&mut self, slot: u32, leg: LegId, result: Result<(), LegError>, out: &mut Vec<Action>) {
        let member = self.legs.get(leg).is_some_and(Leg::is_source);
        let window = &mut self.regions.slots[slot as usize];
        match result {
            Ok(()) => window.done.insert(leg),
            Err(LegError::Gone) => {}
            Err(LegError::NoSpace) if member && !window.full.contains(leg) => window.next_source = Some(leg),
            Err(error) => {
                self.eject_or_drop(leg, DropReason::WriteFailed(error));
            }
        }
        // Not before everything that was sent is answered: it would be in flight beside what comes next.
        let window = &mut self.regions.slots[slot as usize];
        if !window.sent.is_empty() {
            return;
        }
        if window.need.and(self.expected).without(window.done).is_empty() {
            self.window_equal(slot, out);
        } else if let Some(source) = window.next_source.filter(|l| self.expected.contains(*l)) {
            window.full.insert(source);
            self.read_region(slot, Some(source), out);
        } else {
            self.give_up_region(slot);
        }
    }

    /// Lets the range go; the region stays inherited and has its turn again.
    fn give_up_region(&mut self, slot: u32) {
        let Slot { region, lock, .. } = std::mem::replace(&mut self.regions.slots[slot as usize], FREE);
        if let Some(key) = lock {
            self.release_lock(key);
        }
        self.regions.want(std::iter::once(region));
    }

    fn window_equal(&mut self, slot: u32, out: &mut Vec<Action>) {
        let Slot { region, lba, blocks, lock, .. } = std::mem::replace(&mut self.regions.slots[slot as usize], FREE);
        if let Some(key) = lock {
            self.release_lock(key);
        }
        let (Some(wib), now) = (self.wib.as_mut(), self.now) else { return };
        let next = lba + u64::from(blocks);
        if next < wib.geometry.range_of(region).1 {
            self.regions.slots[slot as usize].region = region;
            return self.lock_window(slot as usize, next);
        }
        wib.equalised(region, now);
        let all = wib.inherited_left == 0;
        let idle = self.options.clear_idle_ns;
        self.marks.look_at.get_or_insert(now.saturating_add(idle));
        if all {
            out.push(Action::Event(Event::Equalised));
            self.trust_changed();
        }
        self.resume_parked();
        self.rescan = true;
    }
    /// Members that lacked acknowledged writes have them all.
    fn trust_changed(&mut self) {
        for leg in self.legs.iter_mut().filter(|l| l.changed) {
            (leg.changed, leg.unequal) = (false, false);
            self.meta.outdate();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_region_is_wanted_once_however_many_commands_wait_for_it() {
        let count = 1 << 20;
        let mut regions = Regions::new(1, count);
        for _ in 0..3 {
            regions.want(0..count);
        }
        assert_eq!(regions.urgent.len(), count as usize);
        assert_eq!(regions.next_urgent(), Some(0));
        regions.want([0, 1].into_iter());
        assert_eq!((regions.urgent.len(), regions.urgent.back()), (count as usize, Some(&0)));
    }
}
