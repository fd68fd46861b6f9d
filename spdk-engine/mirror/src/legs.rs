//! The legs of a mirror and the I/O in flight on them.
//!
//! *What it is.* One [`Leg`] per connection to a replica: its role, its link, whether it is to leave; and one table
//! of all leg I/O, so that every completion finds its owner and a completion of an older life is recognised.
//!
//! *States of a leg.*
//! ```text
//! Member ───────────────────────────────▶ Dropped ─▶ (free when its I/O is answered)
//! Joiner: Announced ▶ Copying ▶ Flushing ▶ Admitted ─▶ Member
//! link:   Up ◀──▶ Lost{since}
//! ```
//! `eject` marks a member whose removal is decided; it never goes back. A member with `eject` is not a source. It
//! gets no writes either, unless the removal is an orderly one.
//!
//! *Numbers of I/O.* What is sent to several legs at once is one entry; each of them has a number of its own, made of the
//! entry's and the leg's.
//!
//! *Invariants.* At most [`LEGS_MAX`] legs, at most one per replica; an [`IoId`] is never given out twice.

use crate::LEGS_MAX;
use crate::config::ReplicaId;
use crate::events::{CopySlot, DropReason, IoId, LegError, LegId, Nanos, Op};
use crate::legmeta::LegMeta;

/// A set of legs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct LegMask(u32);

impl LegMask {
    pub(crate) const EMPTY: Self = Self(0);
    pub(crate) const ALL: Self = Self(u32::MAX);

    pub(crate) fn of(leg: LegId) -> Self {
        Self(1 << leg.0)
    }

    pub(crate) fn contains(self, leg: LegId) -> bool {
        self.0 & Self::of(leg).0 != 0
    }

    pub(crate) fn insert(&mut self, leg: LegId) {
        self.0 |= Self::of(leg).0;
    }

    pub(crate) fn remove(&mut self, leg: LegId) {
        self.0 &= !Self::of(leg).0;
    }

    pub(crate) fn is_empty(self) -> bool {
        self.0 == 0
    }

    pub(crate) fn len(self) -> usize {
        self.0.count_ones() as usize
    }

    pub(crate) fn and(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    pub(crate) fn or(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    pub(crate) fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    pub(crate) fn iter(self) -> impl Iterator<Item = LegId> {
        let mut rest = self.0;
        std::iter::from_fn(move || {
            let bit = rest.trailing_zeros();
            rest &= rest.wrapping_sub(1); // Takes its lowest bit away.
            (bit < u32::BITS).then_some(LegId(bit))
        })
    }
}

const _: () = assert!(LEGS_MAX <= u32::BITS as usize, "a leg mask has one bit per leg");

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    /// Its replica is in `S`.
    Member,
    /// Waits for the swap that puts its replica into `R`.
    Announced,
    /// Gets writes, is copied to.
    Copying,
    /// Copied; its flush is under way.
    Flushing,
    /// Flushed; the swap that adds it may be sent.
    Admitted,
    /// Left; stays only until its I/O is answered.
    Dropped,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Link {
    Up,
    Lost { since: Nanos, announced: bool },
}

#[derive(Debug)]
pub(crate) struct Leg {
    pub(crate) id: LegId,
    pub(crate) replica: ReplicaId,
    pub(crate) local: bool,
    pub(crate) role: Role,
    pub(crate) link: Link,
    pub(crate) eject: Option<DropReason>,
    /// Its instance, for its superblock; empty when it has none.
    pub(crate) instance: String,
    /// May lack acknowledged writes (rule 1) until it was made equal.
    pub(crate) changed: bool,
    /// May differ from the other members: is being made equal (strict mode); never a source.
    pub(crate) unequal: bool,
    /// Reads in flight, to spread them.
    pub(crate) reading: u32,
    /// Changes in flight: a flush sent meanwhile does not cover them.
    pub(crate) changing: u32,
    /// Changes sent so far that are not durable by themselves, and how many of them a flush has covered.
    pub(crate) changes: u64,
    pub(crate) changes_flushed: u64,
    /// I/O in flight of any kind.
    pub(crate) inflight: u32,
    /// When the latest I/O was sent that it has answered: until then no newer engine had been promoted there.
    pub(crate) confirmed: Option<Nanos>,
    /// A probe is in flight.
    pub(crate) probing: bool,
    /// Probes in a row that were answered, but by nothing that confirms.
    pub(crate) vain_probes: u32,
    /// No probe before that.
    pub(crate) probe_after: Nanos,
    /// Its meta area, when it has one and the volume uses them.
    pub(crate) meta: Option<Box<LegMeta>>,
}

impl Leg {
    pub(crate) fn new(id: LegId, replica: ReplicaId, local: bool, role: Role, link: Link) -> Self {
        Self {
            id,
            replica,
            local,
            role,
            link,
            eject: None,
            instance: String::new(),
            changed: false,
            unequal: false,
            reading: 0,
            changing: 0,
            changes: 0,
            changes_flushed: 0,
            inflight: 0,
            confirmed: None,
            probing: false,
            vain_probes: 0,
            probe_after: 0,
            meta: None,
        }
    }

    pub(crate) fn is_up(&self) -> bool {
        self.link == Link::Up
    }

    /// Its writes count for a rebuild: it gets every write and its answer is waited for (rule 10).
    pub(crate) fn is_mirrored_joiner(&self) -> bool {
        matches!(self.role, Role::Copying | Role::Flushing | Role::Admitted)
    }

    /// Has failed and is to leave: gets nothing any more.
    pub(crate) fn is_failed(&self) -> bool {
        self.role == Role::Dropped || self.eject.is_some_and(|reason| reason != DropReason::Removed)
    }

    /// I/O can be sent now.
    pub(crate) fn is_sendable(&self) -> bool {
        self.is_up() && !self.is_failed()
    }

    /// A member that is connected and stays.
    pub(crate) fn is_healthy_member(&self) -> bool {
        self.role == Role::Member && self.is_up() && self.eject.is_none()
    }

    /// May be read from: rule 10 and rule 15, a replica outside `S` never is.
    pub(crate) fn is_source(&self) -> bool {
        self.is_healthy_member() && !self.unequal
    }

    pub(crate) fn has_unflushed(&self) -> bool {
        self.changes != self.changes_flushed
    }
}

/// The legs by number.
#[derive(Debug)]
pub(crate) struct Legs {
    /// As many as the highest number so far asks for.
    slots: Vec<Option<Leg>>,
    /// Where the round robin goes on.
    turn: u32,
}

impl Legs {
    pub(crate) fn new() -> Self {
        Self { slots: Vec::with_capacity(LEGS_MAX), turn: 0 }
    }

    pub(crate) fn get(&self, leg: LegId) -> Option<&Leg> {
        self.slots.get(leg.0 as usize).and_then(Option::as_ref)
    }

    pub(crate) fn get_mut(&mut self, leg: LegId) -> Option<&mut Leg> {
        self.slots.get_mut(leg.0 as usize).and_then(Option::as_mut)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Leg> {
        self.slots.iter().flatten()
    }

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Leg> {
        self.slots.iter_mut().flatten()
    }

    /// Puts a leg in. False when the number is too large or taken, or the replica has a live leg already.
    pub(crate) fn insert(&mut self, leg: Leg) -> bool {
        let duplicate = self.iter().any(|l| l.replica == leg.replica && l.role != Role::Dropped);
        let at = leg.id.0 as usize;
        if at >= LEGS_MAX || duplicate {
            return false;
        }
        if self.slots.len() <= at {
            self.slots.resize_with(at + 1, || None);
        }
        let slot = &mut self.slots[at];
        let free = slot.is_none();
        if free {
            *slot = Some(leg);
        }
        free
    }

    /// Books an I/O that goes to all of `targets`.
    #[inline(always)]
    pub(crate) fn book_sent(&mut self, targets: LegMask, op: Op) {
        let (reads, changes) = (u32::from(op == Op::Read), u32::from(op.changes_blocks()));
        let volatile = u64::from(op.changes_blocks() && op != Op::Write { fua: true });
        for target in targets.iter() {
            let Some(leg) = self.get_mut(target) else { continue };
            leg.inflight += 1;
            leg.reading += reads;
            leg.changing += changes;
            leg.changes += volatile;
        }
    }

    /// Books what an answer says of its leg.
    #[inline(always)]
    pub(crate) fn book_answered(&mut self, id: LegId, entry: &IoEntry, result: Result<(), LegError>) {
        let Some(leg) = self.get_mut(id) else { return };
        leg.inflight = leg.inflight.saturating_sub(1);
        leg.reading = leg.reading.saturating_sub(u32::from(entry.reads));
        leg.changing = leg.changing.saturating_sub(u32::from(entry.changes));
        if let (Ok(()), Some(covers)) = (result, entry.covers) {
            leg.changes_flushed = leg.changes_flushed.max(covers);
        }
        if matches!(result, Ok(()) | Err(LegError::Media | LegError::NoSpace)) {
            leg.confirmed = leg.confirmed.max(Some(entry.sent));
        }
    }

    /// Frees the number of a dropped leg whose I/O is answered.
    pub(crate) fn reap(&mut self, leg: LegId) {
        if let Some(slot) = self.slots.get_mut(leg.0 as usize)
            && slot.as_ref().is_some_and(|l| l.role == Role::Dropped && l.inflight == 0)
        {
            *slot = None;
        }
    }

    pub(crate) fn mask(&self, wanted: impl Fn(&Leg) -> bool) -> LegMask {
        let mut mask = LegMask::EMPTY;
        for leg in self.iter().filter(|l| wanted(l)) {
            mask.insert(leg.id);
        }
        mask
    }

    /// The member to read from: a local one if preferred, else the one with the fewest reads in flight, in turns.
    pub(crate) fn choose_source(&mut self, prefer_local: bool, not: LegMask) -> Option<LegId> {
        let mut best = (u64::MAX, None);
        for leg in self.iter().filter(|l| l.is_source() && !not.contains(l.id)) {
            // In this order: where it is, how busy it is, how far its turn is.
            let distance = leg.id.0.wrapping_sub(self.turn) % u32::BITS;
            let far = u64::from(!(prefer_local && leg.local)) << 40;
            let rank = far | u64::from(leg.reading) << 5 | u64::from(distance);
            if rank < best.0 {
                best = (rank, Some(leg.id));
            }
        }
        let chosen = best.1?;
        self.turn = (chosen.0 + 1) % u32::BITS;
        Some(chosen)
    }
}

/// Whose I/O it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Owner {
    /// A host command.
    Host { slot: u32, generation: u32 },
    /// A copy window.
    Copy { slot: CopySlot },
    /// The range repair under way.
    Repair,
    /// The flush of a rebuilt leg.
    JoinFlush,
    /// The flush of an orderly close.
    CloseFlush,
    /// A question whether the session still holds.
    Probe,
    /// The flush before a snapshot.
    SnapshotFlush,
    /// The flush before live bits clear.
    ClearFlush,
    /// An inherited region that is being made equal.
    Region { slot: u32 },
    /// The meta area.
    Meta(MetaPart),
}

/// Which part of a meta area.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MetaPart {
    /// Reads superblock slots and bits.
    Read,
    /// Reads blocks of stamps.
    ReadStamps { first: u32, count: u32 },
    /// Writes blocks of stamps.
    Stamps { first: u32, count: u32 },
    /// Writes a superblock.
    Superblock,
    /// Writes bitmap blocks.
    Bits { first: u32, count: u32 },
}

/// One I/O in flight, on one leg or on several.
#[derive(Debug, Clone, Copy)]
pub(crate) struct IoEntry {
    /// Legs that have not answered.
    pub(crate) legs: LegMask,
    pub(crate) owner: Owner,
    pub(crate) reads: bool,
    pub(crate) changes: bool,
    /// For a flush, which is sent to one leg: how many changes it covers when it succeeds.
    pub(crate) covers: Option<u64>,
    /// When it was sent.
    pub(crate) sent: Nanos,
}

/// A place is free when no leg is left to answer.
#[derive(Debug, Clone, Copy)]
struct IoSlot {
    generation: u64,
    entry: IoEntry,
}

/// Where the parts of an [`IoId`] lie: the place in the lowest bits, then the leg, then the generation.
const PLACE_BITS: u32 = 24;
const LEG_BITS: u32 = 4;
const _: () = assert!(LEGS_MAX <= 1 << LEG_BITS, "a number of an I/O has room for each leg's");

/// All leg I/O in flight. A slab with generations; grows to its bound and stays.
#[derive(Debug, Default)]
pub(crate) struct IoTable {
    slots: Vec<IoSlot>,
    free: Vec<u32>,
}

/// An entry's numbers, one for each leg.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct IoIds(u64);

impl IoIds {
    pub(crate) fn on(self, leg: LegId) -> IoId {
        IoId(self.0 | u64::from(leg.0) << PLACE_BITS)
    }
}

impl IoTable {
    #[inline]
    pub(crate) fn insert(&mut self, entry: IoEntry) -> IoIds {
        let place = match self.free.pop() {
            Some(place) => {
                let slot = &mut self.slots[place as usize];
                slot.generation += 1;
                slot.entry = entry;
                place
            }
            None => {
                self.slots.push(IoSlot { generation: 1, entry });
                u32::try_from(self.slots.len() - 1).unwrap_or(u32::MAX)
            }
        };
        debug_assert!(place < 1 << PLACE_BITS, "host commands and copies are bounded far below that");
        IoIds(self.slots[place as usize].generation << (PLACE_BITS + LEG_BITS) | u64::from(place))
    }

    /// The place of an I/O; `None` when it is not in flight (any more) or on another leg.
    #[inline]
    fn place(&self, io: IoId, leg: LegId) -> Option<usize> {
        let place = (io.0 & ((1 << PLACE_BITS) - 1)) as usize;
        let number = (io.0 >> PLACE_BITS) & ((1 << LEG_BITS) - 1);
        let slot = self.slots.get(place)?;
        let known = slot.generation == io.0 >> (PLACE_BITS + LEG_BITS) && number == u64::from(leg.0);
        (known && slot.entry.legs.contains(leg)).then_some(place)
    }

    /// An I/O in flight on a leg, with its place; `None` when it is not (any more) or on another leg.
    pub(crate) fn get(&self, io: IoId, leg: LegId) -> Option<(usize, &IoEntry)> {
        self.place(io, leg).map(|place| (place, &self.slots[place].entry))
    }

    /// Notes that a leg has answered the I/O at this place, and gives it.
    #[inline(always)]
    pub(crate) fn answered(&mut self, place: usize, leg: LegId) -> &IoEntry {
        let entry = &mut self.slots[place].entry;
        entry.legs.remove(leg);
        if entry.legs.is_empty() {
            self.free.push(place as u32);
        }
        entry
    }

    /// [`Self::get`] and [`Self::answered`].
    pub(crate) fn take(&mut self, io: IoId, leg: LegId) -> Option<IoEntry> {
        let place = self.place(io, leg)?;
        Some(*self.answered(place, leg))
    }

    /// Numbers of all I/O in flight on a leg, into `found`.
    pub(crate) fn list(&self, leg: LegId, found: &mut Vec<IoId>) {
        found.clear();
        for (place, slot) in self.slots.iter().enumerate().filter(|(_, slot)| slot.entry.legs.contains(leg)) {
            found.push(IoIds(slot.generation << (PLACE_BITS + LEG_BITS) | place as u64).on(leg));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(legs: LegMask) -> IoEntry {
        IoEntry { legs, owner: Owner::Repair, reads: false, changes: true, covers: None, sent: 7 }
    }

    #[test]
    fn a_mask_lists_its_legs_in_order() {
        let mut mask = LegMask::EMPTY;
        for leg in [9, 0, 3] {
            mask.insert(LegId(leg));
        }
        assert_eq!(mask.iter().collect::<Vec<_>>(), [LegId(0), LegId(3), LegId(9)]);
        assert_eq!(LegMask::EMPTY.iter().count(), 0);
        assert_eq!(LegMask::ALL.iter().count(), 32);
    }

    #[test]
    fn each_leg_answers_once_and_by_its_own_number() {
        let mut table = IoTable::default();
        let both = LegMask::of(LegId(1)).or(LegMask::of(LegId(15)));
        let ids = table.insert(entry(both));
        let (first, second) = (ids.on(LegId(1)), ids.on(LegId(15)));
        assert!(
            first != second
                && table.take(first, LegId(15)).is_none()
                && table.take(ids.on(LegId(0)), LegId(0)).is_none()
        );
        assert!(table.take(first, LegId(1)).is_some() && table.take(first, LegId(1)).is_none());
        let mut found = Vec::new();
        table.list(LegId(1), &mut found);
        assert!(found.is_empty());
        table.list(LegId(15), &mut found);
        assert_eq!(found, [second]);
        assert!(table.take(second, LegId(15)).is_some());
        let again = table.insert(entry(LegMask::of(LegId(15))));
        assert!(again != ids && table.take(second, LegId(15)).is_none(), "an old number is not found in a used place");
    }
}
