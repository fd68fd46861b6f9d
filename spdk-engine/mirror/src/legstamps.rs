//! Carrying stamps to the legs, and finding out what a returning replica lacks (rules 9, 10 and 11).
//!
//! *What it is.* For each leg with a meta area: what is known of its stamps, and what is on its way.
//! ```text
//! Unread ─▶ Reading, piece by piece ─▶ Read ──all members that can be asked are──▶ settled: what differs is written
//!   ▲            └ connection lost: anew                                              then whatever changes
//!   └─ error: it leaves, or its whole meta area is tried again later (`legmeta`)
//! ```
//! Members whose superblock is of the last engine that served tell what the stamps are (see [`crate::stamps`]).
//!
//! *A joiner* holds the stamps of the time when it left. It *lacks* a region when its stamp is another one, or its own bit
//! is set there, or the region is live or inherited here; all regions when its superblock is not of this volume, lineage and
//! layout. Only those are copied. As long as it lacks a region its stamp there equals nobody's, on its disk, and that is so
//! *before* its bits are overwritten. When copied regions are flushed it takes over their stamps. So a rebuild that is
//! interrupted, also by the death of the engine, goes on by comparing again.
//!
//! *Invariants.* At most one write is in flight per block and leg. A superblock of this engine's epoch is written only
//! after all stamps were; a joiner is not swapped in before it has all of them durably.
//!
//! *When things fail.* As for bits: a leg that cannot keep its stamps leaves. On the last member, which cannot leave,
//! writes to regions whose stamps are not durable wait: without them a replica outside `S` could be taken for equal. It is
//! tried again, and heals when another member has joined.

use std::sync::Arc;

use crate::core::Core;
use crate::events::{Action, LegError, LegId, MetaOp};
use crate::legmeta::{BlockCopy, LegMeta};
use crate::legs::{MetaPart, Role};
use crate::meta::{Geometry, RegionBits, STAMPS_PER_BLOCK, Stamp, Superblock, decode_stamps, encode_stamps};

/// Most blocks of one read or write: 256 KiB.
const RUN_MAX: u32 = 64;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Area {
    Unread,
    /// Up to that block it is read; the next piece is asked for or not.
    Reading {
        next: u32,
        asked: bool,
    },
    Read,
}

/// The write in flight says nothing about what the block is to hold by now.
const STALE: u64 = u64::MAX;

/// Whose meta area it was when it was read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Origin {
    /// Of something else, or nobody can tell: stamps say nothing.
    Foreign,
    /// Of this volume, replica, lineage and layout.
    Own,
    /// And of the last engine that served.
    Current,
}

/// The stamps of a leg, as far as they are known.
#[derive(Debug)]
pub(crate) struct LegStamps {
    area: Area,
    origin: Origin,
    /// As read; given up when settled.
    held: Vec<Stamp>,
    /// Its bits when it was read.
    bits: RegionBits,
    settled: bool,
    /// All blocks were durable once in this engine's time.
    complete: bool,
    blocks: Vec<BlockCopy>,
    /// Blocks that it is to be sent.
    todo: RegionBits,
    /// Regions that a joiner has not got, or not flushed; empty on members.
    lacking: RegionBits,
    /// Version of the stamps that a joiner must have, once it lacks nothing.
    floor: u64,
    /// Rule 9 broken on purpose: what it is to be sent counts as durable.
    pretends: bool,
}

impl LegStamps {
    pub(crate) fn new(geometry: &Geometry) -> Self {
        let blocks = geometry.stamps_blocks();
        Self {
            area: Area::Unread,
            origin: Origin::Foreign,
            held: Vec::new(),
            bits: RegionBits::default(),
            settled: false,
            complete: false,
            blocks: vec![BlockCopy::default(); blocks as usize],
            todo: RegionBits::empty(blocks),
            lacking: RegionBits::default(),
            floor: 0,
            pretends: false,
        }
    }

    /// Nothing is known of what it holds.
    pub(crate) fn forget(&mut self) {
        (self.area, self.settled, self.complete) = (Area::Unread, false, false);
        self.held = Vec::new();
        self.blocks.fill(BlockCopy::default());
        while let Some(block) = self.todo.next(0) {
            self.todo.remove(block);
        }
    }

    pub(crate) fn is_quiet(&self) -> bool {
        !matches!(self.area, Area::Reading { asked: true, .. }) && self.blocks.iter().all(|b| b.sent == 0)
    }

    /// All stamps were durable once.
    pub(crate) fn is_complete(&self) -> bool {
        self.complete
    }

    /// The version that it holds of a block.
    pub(crate) fn durable(&self, block: u32) -> u64 {
        self.blocks.get(block as usize).map_or(0, |b| b.durable)
    }

    fn is_read(&self) -> bool {
        self.area == Area::Read
    }
}

impl Core {
    /// Who gets writes changes, or the record does: what members may differ in is stamped anew, and acknowledgements wait
    /// for it (rule 9).
    pub(crate) fn advance_stamps(&mut self) {
        let number = self.gate.config.config_number.0;
        if let Some(wib) = self.wib.as_mut() {
            wib.advance_stamps(number);
            self.meta.carried = false;
            self.meta.pump = true;
        }
    }

    /// A leg has every stamp that acknowledgements wait for.
    pub(crate) fn carries_stamps(&self, meta: &LegMeta) -> bool {
        let Some(wib) = &self.wib else { return true };
        (0..wib.stamps.blocks()).all(|block| meta.stamps.durable(block) >= wib.stamps.floor_of(block))
    }

    /// A leg holds exactly the stamps in memory.
    pub(crate) fn has_all_stamps(&self, meta: &LegMeta) -> bool {
        let Some(wib) = &self.wib else { return true };
        (0..wib.stamps.blocks()).all(|block| meta.stamps.durable(block) >= wib.stamps.version(block))
    }

    /// Rule 9: a joiner lacks nothing, and its stamps say so.
    pub(crate) fn has_taken_over(&self, meta: &LegMeta) -> bool {
        let Some(wib) = &self.wib else { return true };
        let (stamps, floor) = (&wib.stamps, meta.stamps.floor);
        let has = |block: u32| meta.stamps.durable(block) >= stamps.version(block).min(floor).max(1);
        meta.stamps.complete && meta.stamps.lacking.is_empty() && (0..stamps.blocks()).all(has)
    }

    /// Tells legs what changed, and settles those of which all is known.
    pub(crate) fn pump_stamps(&mut self) {
        if self.wib.as_ref().is_some_and(|w| !w.stamps.is_known()) {
            self.find_stamps();
        }
        let Some(wib) = self.wib.as_mut() else { return };
        while let Some(block) = wib.stamps.next_changed() {
            for leg in self.legs.iter_mut() {
                if let Some(meta) = leg.meta.as_deref_mut() {
                    meta.stamps.todo.insert(block);
                }
            }
        }
        if self.wib.as_ref().is_some_and(|w| w.stamps.is_known()) {
            let ready = |m: &LegMeta| m.stamps.is_read() && !m.stamps.settled;
            for leg in self.legs.mask(|l| !l.is_failed() && l.meta.as_deref().is_some_and(ready)).iter() {
                self.settle_stamps(leg);
            }
        }
    }

    /// Stamps are known when every member that is connected was read, and at least one that can be.
    fn find_stamps(&mut self) {
        let members = || self.legs.iter().filter(|l| l.role == Role::Member && !l.is_failed());
        let areas = || members().filter_map(|l| Some((l.is_up(), l.meta.as_deref()?)));
        let may_tell = |m: &LegMeta| m.broken_until().is_none();
        let waits = areas().any(|(up, m)| up && may_tell(m) && !m.stamps.is_read());
        let nobody = areas().all(|(_, m)| !m.stamps.is_read()) && areas().any(|(_, m)| may_tell(m));
        if waits || nobody {
            return;
        }
        if let Some(wib) = self.wib.as_mut() {
            wib.stamps.become_known();
        }
    }

    /// What the superblock says of the stamps beside it.
    pub(crate) fn judge_stamps(&mut self, id: LegId, found: Option<&Superblock>, bits: RegionBits) {
        let (Some(leg), Some(wib)) = (self.legs.get(id), self.wib.as_ref()) else { return };
        let own = |s: &&Superblock| {
            s.volume == self.volume
                && s.replica == leg.replica
                && s.record.lineage == self.gate.config.lineage
                && s.record.size_blocks == self.num_blocks
                && s.block_size == self.block_size
                && s.region_blocks == wib.geometry.region_blocks()
        };
        let origin = match found.filter(own) {
            Some(s) if Some(s.record.epoch) == self.served => Origin::Current,
            Some(_) => Origin::Own,
            None => Origin::Foreign,
        };
        if let Some(meta) = self.meta_of(id) {
            (meta.stamps.origin, meta.stamps.bits) = (origin, bits);
        }
    }

    /// Sends the next read or write of stamps. False while a joiner's bits have to wait.
    pub(crate) fn pump_leg_stamps(&mut self, id: LegId, out: &mut Vec<Action>) -> bool {
        let Some(wib) = &self.wib else { return true };
        let (start, blocks) = (wib.geometry.stamps_start(), wib.stamps.blocks());
        let member = self.legs.get(id).is_some_and(|l| l.role == Role::Member);
        let Some(meta) = self.meta_of(id) else { return true };
        if meta.stamps.area == Area::Unread {
            meta.stamps.area = Area::Reading { next: 0, asked: false };
            meta.stamps.held.clear();
        }
        if let Area::Reading { next, asked: asked @ false } = &mut meta.stamps.area {
            *asked = true;
            let (first, count) = (*next, (blocks - *next).min(RUN_MAX));
            let op = MetaOp::Read { block: start + u64::from(first), blocks: count };
            self.send_meta(id, MetaPart::ReadStamps { first, count }, op, out);
        } else if meta.stamps.settled {
            while let Some((first, count)) = self.next_stamps(id) {
                let data = self.image(id, first, count);
                let block = start + u64::from(first);
                self.send_meta(id, MetaPart::Stamps { first, count }, MetaOp::Write { block, data }, out);
            }
        }
        member || self.meta_of(id).is_some_and(|m| m.stamps.complete)
    }

    /// The next run of blocks that a leg lacks; notes it as sent.
    fn next_stamps(&mut self, id: LegId) -> Option<(u32, u32)> {
        let stamps = &self.wib.as_ref()?.stamps;
        let mine = &mut self.legs.get_mut(id)?.meta.as_deref_mut()?.stamps;
        if mine.pretends {
            while let Some(block) = mine.todo.next(0) {
                mine.todo.remove(block);
                mine.blocks[block as usize].durable = stamps.version(block);
            }
            return None;
        }
        let mut first = mine.todo.next(0)?;
        while mine.blocks[first as usize].sent != 0 {
            first = mine.todo.next(first + 1)?;
        }
        let mut count = 0;
        for block in first..stamps.blocks().min(first + RUN_MAX) {
            let copy = &mut mine.blocks[block as usize];
            if copy.sent != 0 || !mine.todo.contains(block) {
                break;
            }
            copy.sent = stamps.version(block);
            mine.todo.remove(block);
            count += 1;
        }
        Some((first, count))
    }

    /// What a leg is to hold of some blocks.
    fn image(&self, id: LegId, first: u32, count: u32) -> Arc<[u8]> {
        let mut bytes = Vec::new();
        let lacking = self.legs.get(id).and_then(|l| l.meta.as_deref()).map(|m| &m.stamps.lacking);
        if let Some(wib) = &self.wib {
            let value = |r: u32| match lacking.is_some_and(|l| l.contains(r)) {
                true => Stamp::UNKNOWN,
                false => wib.stamps.get(r),
            };
            for block in first..first + count {
                let from = block * STAMPS_PER_BLOCK;
                let to = from.saturating_add(STAMPS_PER_BLOCK).min(wib.geometry.regions());
                encode_stamps((from..to).map(value), block, &mut bytes);
            }
        }
        bytes.into()
    }

    /// A read of stamps is done.
    pub(crate) fn stamps_read(&mut self, id: LegId, (first, count): (u32, u32), read: Result<Arc<[u8]>, LegError>) {
        let Some((blocks, regions)) = self.wib.as_ref().map(|w| (w.stamps.blocks(), w.geometry.regions())) else {
            return;
        };
        let Some(meta) = self.meta_of(id) else { return };
        let Ok(data) = read else {
            meta.stamps.area = Area::Unread;
            return;
        };
        for (block, bytes) in (first..first + count).zip(data.chunks(crate::meta::META_BLOCK_BYTES)) {
            let decoded = decode_stamps(block, bytes);
            meta.stamps.held.extend(decoded.into_iter().map(|s| s.unwrap_or(Stamp::UNKNOWN)));
        }
        let next = first + count;
        if next < blocks {
            meta.stamps.area = Area::Reading { next, asked: false };
            return;
        }
        meta.stamps.held.resize(regions as usize, Stamp::UNKNOWN);
        meta.stamps.area = Area::Read;
        let held = std::mem::take(&mut meta.stamps.held);
        let counts = meta.stamps.origin == Origin::Current;
        if counts
            && self.legs.get(id).is_some_and(|l| l.role == Role::Member)
            && let Some(wib) = self.wib.as_mut()
        {
            wib.stamps.merge(&held);
        }
        if let Some(meta) = self.meta_of(id) {
            meta.stamps.held = held;
        }
    }

    /// A write of stamps is done.
    pub(crate) fn stamps_written(&mut self, id: LegId, (first, count): (u32, u32), done: bool) {
        let Some(meta) = self.meta_of(id) else { return };
        let mine = &mut meta.stamps;
        for block in first..first + count {
            let Some(copy) = mine.blocks.get_mut(block as usize) else { return };
            let sent = std::mem::take(&mut copy.sent);
            if done && sent != STALE {
                copy.durable = copy.durable.max(sent);
            } else if !done {
                mine.todo.insert(block);
            }
        }
        mine.complete |= mine.settled && mine.blocks.iter().all(|b| b.durable > 0);
    }

    /// Finds out what a leg is to be sent, and for a joiner what it lacks.
    fn settle_stamps(&mut self, id: LegId) {
        let joins = self.legs.get(id).is_some_and(|l| l.role != Role::Member);
        let lacking = if joins { self.what_it_lacks(id) } else { RegionBits::default() };
        let pretends = joins && self.bends_takeover();
        let (Some(leg), Some(wib)) = (self.legs.get_mut(id), self.wib.as_ref()) else { return };
        let Some(meta) = leg.meta.as_deref_mut() else { return };
        let mine = &mut meta.stamps;
        let stamps = &wib.stamps;
        for block in 0..stamps.blocks() {
            let from = block * STAMPS_PER_BLOCK;
            let to = from.saturating_add(STAMPS_PER_BLOCK).min(wib.geometry.regions());
            let is_right = |r: u32| {
                let held = mine.held.get(r as usize).copied().unwrap_or(Stamp::UNKNOWN);
                if !lacking.contains(r) {
                    return held == stamps.get(r);
                }
                // A stamp of this lineage that differs now will never be a member's again.
                held == Stamp::UNKNOWN || (mine.origin != Origin::Foreign && held != stamps.get(r))
            };
            let right = (from..to).all(is_right);
            let copy = &mut mine.blocks[block as usize];
            copy.durable = if right { stamps.version(block) } else { 0 };
            if right { mine.todo.remove(block) } else { mine.todo.insert(block) }
        }
        mine.held = Vec::new();
        mine.settled = true;
        mine.pretends = pretends;
        mine.complete = pretends || mine.blocks.iter().all(|b| b.durable > 0);
        mine.lacking = lacking.clone();
        mine.floor = stamps.clock();
        if joins {
            self.copies.plan(id, lacking);
        }
    }

    /// The regions that have to be copied to a joiner.
    fn what_it_lacks(&self, id: LegId) -> RegionBits {
        let (Some(wib), Some(meta)) = (&self.wib, self.legs.get(id).and_then(|l| l.meta.as_deref())) else {
            return RegionBits::default();
        };
        let (regions, mine) = (wib.geometry.regions(), &meta.stamps);
        if mine.origin == Origin::Foreign {
            return RegionBits::full(regions);
        }
        let mut lacking = wib.bits.clone();
        lacking.union_with(&mine.bits);
        let differs = |r: u32| {
            let held = mine.held.get(r as usize).copied().unwrap_or(Stamp::UNKNOWN);
            held == Stamp::UNKNOWN || held != wib.stamps.get(r)
        };
        (0..regions).filter(|r| differs(*r)).for_each(|r| lacking.insert(r));
        lacking
    }

    /// Regions were copied to a joiner and flushed: it takes over their stamps.
    pub(crate) fn take_over_stamps(&mut self, id: LegId, regions: &[u32]) {
        let (Some(leg), Some(wib)) = (self.legs.get_mut(id), self.wib.as_ref()) else { return };
        let Some(meta) = leg.meta.as_deref_mut() else { return };
        let mine = &mut meta.stamps;
        for region in regions {
            let block = region / STAMPS_PER_BLOCK;
            mine.lacking.remove(*region);
            mine.todo.insert(block);
            if let Some(copy) = mine.blocks.get_mut(block as usize) {
                copy.durable = 0;
                copy.sent = if copy.sent == 0 { 0 } else { STALE };
            }
        }
        mine.floor = wib.stamps.clock();
        self.meta.pump = true;
    }

    /// Rule 9 broken on purpose: a joiner is taken to hold the stamps already.
    fn bends_takeover(&self) -> bool {
        #[cfg(feature = "planted-bugs")]
        {
            self.options.bug == Some(crate::PlantedBug::Rule09JoinWithoutStamps)
        }
        #[cfg(not(feature = "planted-bugs"))]
        {
            false
        }
    }
}
