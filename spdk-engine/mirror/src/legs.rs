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
//! *Invariants.* At most [`LEGS_MAX`] legs, at most one per replica; an [`IoId`] is never given out twice.

use crate::LEGS_MAX;
use crate::config::ReplicaId;
use crate::events::{CopySlot, DropReason, IoId, LegId, Nanos};
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
        (0..u32::BITS).filter(move |bit| self.0 & (1 << bit) != 0).map(LegId)
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
    slots: Vec<Option<Leg>>,
    /// Where the round robin goes on.
    turn: u32,
}

impl Legs {
    pub(crate) fn new() -> Self {
        let mut slots = Vec::with_capacity(LEGS_MAX);
        slots.resize_with(LEGS_MAX, || None);
        Self { slots, turn: 0 }
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
        match self.slots.get_mut(leg.id.0 as usize) {
            Some(slot) if slot.is_none() && !duplicate => {
                *slot = Some(leg);
                true
            }
            _ => false,
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
        let turn = self.turn;
        let distance = |leg: &Leg| (leg.id.0 + u32::BITS - turn) % u32::BITS;
        let chosen = self
            .iter()
            .filter(|l| l.is_source() && !not.contains(l.id))
            .min_by_key(|l| (!(prefer_local && l.local), l.reading, distance(l)))
            .map(|l| l.id)?;
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
    /// Reads the superblock slots.
    Read,
    /// Writes a superblock.
    Superblock,
    /// Writes bitmap blocks.
    Bits { first: u32, count: u32 },
}

/// One I/O in flight.
#[derive(Debug, Clone, Copy)]
pub(crate) struct IoEntry {
    pub(crate) leg: LegId,
    pub(crate) owner: Owner,
    pub(crate) reads: bool,
    pub(crate) changes: bool,
    /// For a flush: how many changes it covers when it succeeds.
    pub(crate) covers: Option<u64>,
    /// When it was sent.
    pub(crate) sent: Nanos,
}

#[derive(Debug, Clone, Copy)]
struct IoSlot {
    generation: u32,
    entry: Option<IoEntry>,
}

/// All leg I/O in flight. A slab with generations; grows to its bound and stays.
#[derive(Debug, Default)]
pub(crate) struct IoTable {
    slots: Vec<IoSlot>,
    free: Vec<u32>,
}

impl IoTable {
    pub(crate) fn insert(&mut self, entry: IoEntry) -> IoId {
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(IoSlot { generation: 0, entry: None });
            u32::try_from(self.slots.len() - 1).unwrap_or(u32::MAX)
        });
        let slot = &mut self.slots[index as usize];
        slot.generation = slot.generation.wrapping_add(1);
        slot.entry = Some(entry);
        IoId(u64::from(slot.generation) << 32 | u64::from(index))
    }

    /// Takes an I/O out; `None` when it is not in flight (any more) or on another leg.
    pub(crate) fn take(&mut self, io: IoId, leg: LegId) -> Option<IoEntry> {
        let index = (io.0 & u64::from(u32::MAX)) as u32;
        let generation = (io.0 >> 32) as u32;
        let slot = self.slots.get_mut(index as usize)?;
        if slot.generation != generation || slot.entry.is_none_or(|e| e.leg != leg) {
            return None;
        }
        self.free.push(index);
        slot.entry.take()
    }

    /// Numbers of all I/O in flight on a leg, into `found`.
    pub(crate) fn list(&self, leg: LegId, found: &mut Vec<IoId>) {
        found.clear();
        for (index, slot) in self.slots.iter().enumerate() {
            if slot.entry.is_some_and(|e| e.leg == leg) {
                found.push(IoId(u64::from(slot.generation) << 32 | index as u64));
            }
        }
    }
}
