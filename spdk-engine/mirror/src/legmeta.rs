//! Carrying bits and superblocks to the legs (rules 6, 9 and 18).
//!
//! *What it is.* For each leg with a meta area: what it is known to hold durably, and what is on its way. The content
//! that it is to hold has versions: one per bitmap block ([`crate::wib`]) and one for the superblock, which rises when
//! the record changes. [`Core::pump_meta`] sends what is missing:
//! ```text
//! Unread ─▶ Reading (superblock, bits) ─▶ Ready: bits and stamps first, then superblock, then whatever changes
//!      ▲                                              └─ error: it leaves; the last member cannot (Broken)
//!      └─────────────────── after a pause ────────────────────────────────────────────────┘
//! ```
//! At most one write is in flight per bitmap block and leg, and one of the superblock; changes that come meanwhile
//! share the next one. A superblock with this engine's epoch is written only after the whole bitmap was: so the next
//! engine trusts the bits of a replica exactly when the epoch of its superblock is that of the last engine.
//!
//! *Acknowledgements* wait until every member that stays carries the record (`carried`): the step between the
//! arbiter's answer and the host's (rule 6). A joiner must have bits and superblock before the swap that adds it
//! (rule 9); while it is copied to, new bits wait for it as for a member.
//!
//! *When things fail.* A leg that cannot keep its meta area leaves as one that fails a write does. The last member
//! cannot leave. Its bits say nothing then, which is right while there is nobody it could differ from, and whoever
//! joins it gets the bits from memory. But a record that it does not carry could be taken back by an old copy of the
//! record (rule 21): until it does, the volume is frozen. It is tried again after each grace window, and as soon as there
//! is another member; if it fails then, it leaves.

use std::sync::Arc;

use crate::LEGS_MAX;
use crate::config::Config;
use crate::core::Core;
use crate::events::{Action, DropReason, Event, IoId, LegError, LegId, MetaOp, Nanos};
use crate::legs::{IoEntry, Leg, LegMask, MetaPart, Owner, Role};
use crate::legstamps::LegStamps;
use crate::meta::{
    Geometry, META_BLOCK_BYTES, MetaError, RegionBits, ReplicaState, SUPERBLOCK_SLOTS, Superblock, decode_bits,
    encode_bits, newest_superblock,
};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Unread,
    Reading,
    Ready,
    /// Failed on a member that cannot leave; tried again at that time.
    Broken(Nanos),
}

/// What a leg holds of one bitmap block, by version; 0 is nothing known.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct BlockCopy {
    pub(crate) durable: u64,
    /// In flight; 0 is nothing.
    pub(crate) sent: u64,
}

/// The meta area of a leg, as far as it is known.
#[derive(Debug)]
pub(crate) struct LegMeta {
    stage: Stage,
    /// Sequence of the newest superblock that is durable there.
    sequence: u64,
    blocks: Vec<BlockCopy>,
    superblock: BlockCopy,
    pub(crate) stamps: LegStamps,
    /// The instance that its superblock named when it was read.
    instance: String,
}

impl LegMeta {
    pub(crate) fn new(geometry: &Geometry) -> Self {
        Self {
            stage: Stage::Unread,
            sequence: 0,
            blocks: vec![BlockCopy::default(); geometry.bits_blocks() as usize],
            superblock: BlockCopy::default(),
            stamps: LegStamps::new(geometry),
            instance: String::new(),
        }
    }

    /// It holds bits and superblock that were made in this engine's time.
    fn is_synced(&self) -> bool {
        self.stage == Stage::Ready && self.superblock.durable > 0 && self.has_bits()
    }

    fn has_bits(&self) -> bool {
        self.blocks.iter().all(|b| b.durable > 0)
    }

    pub(crate) fn broken_until(&self) -> Option<Nanos> {
        if let Stage::Broken(until) = self.stage { Some(until) } else { None }
    }

    /// No write is in flight: a late answer would be taken for that of a later one.
    fn is_quiet(&self) -> bool {
        self.superblock.sent == 0 && self.blocks.iter().all(|b| b.sent == 0) && self.stamps.is_quiet()
    }

    /// Nothing is known of what it holds.
    fn forget(&mut self) {
        self.stage = Stage::Unread;
        self.superblock = BlockCopy::default();
        self.blocks.fill(BlockCopy::default());
        self.stamps.forget();
    }
}

/// What all legs share.
#[derive(Debug)]
pub(crate) struct MetaState {
    /// Version of what superblocks are to say.
    pub(crate) version: u64,
    /// Every member that stays carries that version: acknowledgements may go.
    pub(crate) carried: bool,
    /// Something may have to be sent, or may have become ready.
    pub(crate) pump: bool,
    /// The engine closes and all members are equal.
    pub(crate) closing: bool,
    /// Meta writes sent.
    pub(crate) writes: u64,
    /// What the read under way returned.
    read: Option<Arc<[u8]>>,
}

impl MetaState {
    pub(crate) fn new() -> Self {
        Self { version: 1, carried: false, pump: true, closing: false, writes: 0, read: None }
    }

    /// Superblocks have to say something new.
    pub(crate) fn outdate(&mut self) {
        self.version += 1;
        self.carried = false;
        self.pump = true;
    }
}

/// A leg whose meta area is used.
fn usable(leg: &Leg) -> Option<&LegMeta> {
    leg.meta.as_deref().filter(|m| m.broken_until().is_none())
}

/// A member that stays.
fn is_staying(leg: &&Leg) -> bool {
    leg.role == Role::Member && !leg.is_failed()
}

impl Core {
    /// Sends what legs lack, and finds out what became durable.
    pub(crate) fn pump_meta(&mut self, out: &mut Vec<Action>) {
        if !std::mem::take(&mut self.meta.pump) {
            return;
        }
        self.pump_stamps();
        let wants = |l: &Leg| usable(l).is_some() && (l.role == Role::Member || l.is_mirrored_joiner());
        let mut encoded = None;
        for leg in self.legs.mask(|l| l.is_sendable() && wants(l)).iter() {
            self.pump_leg_meta(leg, &mut encoded, out);
        }
        self.settle_bits();
        if !self.meta.carried && self.is_carried() {
            self.meta.carried = true;
            self.rescan = true;
        }
    }

    /// Also a member whose meta area failed has to carry it: what is acknowledged without could be undone by an old copy
    /// of the record (rules 6 and 21).
    fn is_carried(&self) -> bool {
        let version = self.meta.version;
        let areas = self.legs.iter().filter(is_staying).filter_map(|l| l.meta.as_deref());
        areas.filter(|m| !self.skips_broken(m)).all(|m| m.superblock.durable >= version && self.carries_stamps(m))
    }

    /// Rule 21 broken on purpose: a member that cannot carry the record need not.
    fn skips_broken(&self, meta: &LegMeta) -> bool {
        #[cfg(feature = "planted-bugs")]
        if self.options.bug == Some(crate::PlantedBug::Rule06BrokenNeedNotCarry) {
            return meta.broken_until().is_some();
        }
        let _ = meta;
        false
    }

    /// Acknowledgements wait for a meta area that failed.
    pub(crate) fn is_stuck_on_meta(&self) -> bool {
        !self.meta.carried && self.broken().next().is_some()
    }

    /// Ends of the pauses of meta areas that failed.
    pub(crate) fn broken(&self) -> impl Iterator<Item = Nanos> {
        self.legs.iter().filter(is_staying).filter_map(|l| l.meta.as_deref()).filter_map(LegMeta::broken_until)
    }

    /// Tries meta areas again whose pause is over, or whose member may leave by now.
    pub(crate) fn retry_meta(&mut self) {
        if self.broken().next().is_none() {
            return; // The usual case.
        }
        let others = self.legs.iter().filter(is_staying).any(|l| usable(l).is_some());
        let now = self.now;
        for leg in self.legs.iter_mut() {
            let due = |m: &LegMeta| m.broken_until().is_some_and(|at| at <= now || others) && m.is_quiet();
            if let Some(meta) = leg.meta.as_deref_mut().filter(|m| due(m)) {
                meta.forget();
                self.meta.pump = true;
            }
        }
    }

    /// Every leg that counts holds exactly what is in memory.
    pub(crate) fn meta_is_settled(&self) -> bool {
        let Some(wib) = &self.wib else { return true };
        let version = self.meta.version;
        self.expected.iter().filter_map(|id| self.legs.get(id)).filter_map(usable).all(|m| {
            let blocks = (0u32..).zip(&m.blocks);
            m.superblock.durable >= version
                && blocks.into_iter().all(|(b, copy)| copy.durable >= wib.version(b))
                && self.has_all_stamps(m)
        })
    }

    /// Every leg that counts has had the bits once since it is here.
    pub(crate) fn bits_are_everywhere(&self) -> bool {
        self.expected.iter().filter_map(|id| self.legs.get(id)).filter_map(usable).all(LegMeta::has_bits)
    }

    /// Rule 9: a joiner has bits, stamps and superblock; later ones wait for it, as its answer is expected.
    pub(crate) fn may_join(&self, leg: &Leg) -> bool {
        leg.meta.as_deref().is_none_or(|m| m.is_synced() && self.has_taken_over(m))
    }

    /// The regions in which members may differ now, live and inherited; `None` without meta areas. When the record
    /// changes these are stamped anew (rule 9).
    #[must_use]
    pub fn dirty_regions(&self) -> Option<&RegionBits> {
        self.wib.as_ref().map(|w| &w.bits)
    }

    /// Regions whose bit is durable on all legs that count become ready.
    fn settle_bits(&mut self) {
        let Some(wib) = self.wib.as_mut().filter(|w| w.has_pending()) else { return };
        let (legs, expected) = (&self.legs, self.expected);
        let durable = |block: u32| {
            let held = expected.iter().filter_map(|id| legs.get(id)).filter_map(usable);
            held.map(|m| m.blocks.get(block as usize).map_or(0, |b| b.durable)).min().unwrap_or(u64::MAX)
        };
        // Also a last member whose meta area failed: without its stamps a replica that is away could be taken for equal.
        let stamped = |block: u32| {
            let held = expected.iter().filter_map(|id| legs.get(id)).filter_map(|l| l.meta.as_deref());
            held.map(|m| m.stamps.durable(block)).min().unwrap_or(u64::MAX)
        };
        if wib.settle(durable, stamped) {
            self.resume_marked();
        }
    }

    fn pump_leg_meta(&mut self, id: LegId, encoded: &mut Option<(u32, u32, Arc<[u8]>)>, out: &mut Vec<Action>) {
        let Some(meta) = self.meta_of(id) else { return };
        match meta.stage {
            Stage::Unread => {
                meta.stage = Stage::Reading;
                let blocks = SUPERBLOCK_SLOTS as u32 + u32::try_from(meta.blocks.len()).unwrap_or(u32::MAX);
                let op = MetaOp::Read { block: 0, blocks };
                self.send_meta(id, MetaPart::Read, op, out);
            }
            Stage::Ready => {
                let may_have_bits = self.pump_leg_stamps(id, out);
                while may_have_bits && let Some((first, count)) = self.next_bits(id) {
                    self.send_bits(id, first, count, encoded, out);
                }
                self.send_superblock(id, out);
            }
            Stage::Reading | Stage::Broken(_) => {}
        }
    }

    /// The next run of bitmap blocks that a leg lacks; notes it as sent.
    fn next_bits(&mut self, id: LegId) -> Option<(u32, u32)> {
        let wib = self.wib.as_ref()?;
        let meta = self.legs.get_mut(id)?.meta.as_deref_mut()?;
        let lacks = |(b, copy): (u32, &BlockCopy)| copy.sent == 0 && copy.durable < wib.version(b);
        let first = (0u32..).zip(&meta.blocks).find(|(b, copy)| lacks((*b, copy)))?.0;
        let mut count = 0;
        for (block, copy) in (first..).zip(&mut meta.blocks[first as usize..]) {
            if !lacks((block, copy)) {
                break;
            }
            copy.sent = wib.version(block);
            count += 1;
        }
        Some((first, count))
    }

    fn send_bits(
        &mut self,
        id: LegId,
        first: u32,
        count: u32,
        encoded: &mut Option<(u32, u32, Arc<[u8]>)>,
        out: &mut Vec<Action>,
    ) {
        let Some(wib) = &self.wib else { return };
        let data = match encoded {
            Some((f, c, data)) if (*f, *c) == (first, count) => Arc::clone(data),
            _ => {
                let mut bytes = Vec::new();
                (first..first + count).for_each(|block| encode_bits(&wib.bits, block, &mut bytes));
                let data: Arc<[u8]> = bytes.into();
                *encoded = Some((first, count, Arc::clone(&data)));
                data
            }
        };
        let block = wib.geometry.bits_start() + u64::from(first);
        self.send_meta(id, MetaPart::Bits { first, count }, MetaOp::Write { block, data }, out);
    }

    fn send_superblock(&mut self, id: LegId, out: &mut Vec<Action>) {
        let version = self.meta.version;
        let Some(meta) = self.meta_of(id) else { return };
        if !meta.has_bits()
            || !meta.stamps.is_complete()
            || meta.superblock.sent != 0
            || meta.superblock.durable >= version
        {
            return;
        }
        let sequence = meta.sequence + 1;
        let block = match self.superblock(id, sequence).map(|s| s.encode()) {
            None => return,
            Some(Ok(block)) => block,
            // It cannot say what it has to: as bad as one that cannot be written.
            Some(Err(error)) => return self.meta_failed(id, LegError::Other, Some(error), out),
        };
        if let Some(meta) = self.meta_of(id) {
            meta.superblock.sent = version;
        }
        let op = MetaOp::Write { block: sequence % SUPERBLOCK_SLOTS, data: block.into() };
        self.send_meta(id, MetaPart::Superblock, op, out);
    }

    /// What a leg's superblock is to say now.
    fn superblock(&self, id: LegId, sequence: u64) -> Option<Superblock> {
        let (leg, config, wib) = (self.legs.get(id)?, &self.gate.config, self.wib.as_ref()?);
        let state = match config.in_sync.contains(&leg.replica) {
            true if self.meta.closing => ReplicaState::ClosedClean,
            true => ReplicaState::Member,
            false => ReplicaState::Rebuilding,
        };
        let named = leg.meta.as_deref().map(|m| m.instance.clone()).unwrap_or_default();
        let mut record = Config { clean: state == ReplicaState::ClosedClean, ..config.clone() };
        // More replicas may wait to be rebuilt than there is room for; they are the least of it.
        while record.in_sync.len() + record.rebuilding.len() > LEGS_MAX && record.rebuilding.pop_last().is_some() {}
        Some(Superblock {
            volume: self.volume.clone(),
            replica: leg.replica.clone(),
            record,
            block_size: self.block_size,
            region_blocks: wib.geometry.region_blocks(),
            state,
            // It names the instance only when it is certain to hold everything acknowledged (rule 1). Else what it named
            // before stays: a member that merely could not be asked when the volume was opened may yet prove unchanged.
            instance: if self.hosts_must_detach || leg.changed { named } else { leg.instance.clone() },
            sequence,
        })
    }

    pub(crate) fn meta_of(&mut self, id: LegId) -> Option<&mut LegMeta> {
        self.legs.get_mut(id)?.meta.as_deref_mut()
    }

    pub(crate) fn send_meta(&mut self, id: LegId, part: MetaPart, op: MetaOp, out: &mut Vec<Action>) {
        let Some(leg) = self.legs.get_mut(id) else { return };
        leg.inflight += 1;
        self.meta.writes += u64::from(matches!(op, MetaOp::Write { .. }));
        let (legs, owner) = (LegMask::of(id), Owner::Meta(part));
        let ids = self.io.insert(IoEntry { legs, owner, reads: false, changes: false, covers: None, sent: self.now });
        out.push(Action::MetaIo { leg: id, io: ids.on(id), op });
    }

    /// A read of a meta area is done.
    pub(crate) fn apply_meta_read(&mut self, leg: LegId, io: IoId, data: Arc<[u8]>, out: &mut Vec<Action>) {
        let Some(entry) = self.io.take(io, leg) else { return };
        self.meta.read = Some(data);
        self.finish_io(leg, entry, Ok(()), out);
        self.meta.read = None;
    }

    pub(crate) fn meta_io_done(
        &mut self,
        id: LegId,
        part: MetaPart,
        result: Result<(), LegError>,
        out: &mut Vec<Action>,
    ) {
        self.meta.pump = true;
        let read = self.meta.read.take();
        let joins = self.legs.get(id).is_some_and(|l| l.role != Role::Member);
        let versions = self.pretended_bits(joins);
        if let (MetaPart::Read, Some(data)) = (part, &read) {
            self.judge_meta(id, data);
        }
        let Some(meta) = self.meta_of(id) else { return };
        let result = match (part, result) {
            (MetaPart::Read | MetaPart::ReadStamps { .. }, Ok(())) => read.ok_or(LegError::Other),
            (_, result) => result.map(|()| Arc::from([])),
        };
        match (part, &result) {
            (MetaPart::Read, Ok(_)) => {
                meta.stage = Stage::Ready;
                for (copy, version) in meta.blocks.iter_mut().zip(versions) {
                    copy.durable = version;
                }
            }
            (MetaPart::Read, Err(_)) => meta.stage = Stage::Unread,
            (MetaPart::Superblock, _) => {
                let sent = std::mem::take(&mut meta.superblock.sent);
                if result.is_ok() {
                    meta.superblock.durable = sent;
                    meta.sequence += 1;
                }
            }
            (MetaPart::ReadStamps { first, count }, _) => self.stamps_read(id, (first, count), result.clone()),
            (MetaPart::Stamps { first, count }, _) => self.stamps_written(id, (first, count), result.is_ok()),
            (MetaPart::Bits { first, count }, _) => {
                let (from, to) = (first as usize, (first + count) as usize);
                for copy in meta.blocks.get_mut(from..to).into_iter().flatten() {
                    let sent = std::mem::take(&mut copy.sent);
                    if result.is_ok() {
                        copy.durable = sent;
                    }
                }
            }
        }
        if let Err(error) = result
            && error != LegError::Gone
        {
            self.meta_failed(id, error, None, out);
        }
    }

    /// What a leg's superblock and bits say.
    fn judge_meta(&mut self, id: LegId, data: &[u8]) {
        let Some(geometry) = self.wib.as_ref().map(|w| w.geometry) else { return };
        let found = newest_superblock(data);
        let slots = SUPERBLOCK_SLOTS as usize * META_BLOCK_BYTES;
        let bits = decode_bits(&geometry, data.get(slots..).unwrap_or_default()).0;
        self.judge_stamps(id, found.as_ref(), bits);
        if let Some(meta) = self.meta_of(id) {
            (meta.sequence, meta.instance) = found.map_or((0, String::new()), |s| (s.sequence, s.instance));
        }
    }

    /// Rule 9 broken on purpose: a joiner's disk is taken to hold the bits already.
    fn pretended_bits(&self, joins: bool) -> Vec<u64> {
        #[cfg(feature = "planted-bugs")]
        if let Some(wib) = self.wib.as_ref()
            && joins
            && self.options.bug == Some(crate::PlantedBug::Rule09JoinWithoutBits)
        {
            return (0..wib.geometry.bits_blocks()).map(|b| wib.version(b)).collect();
        }
        let _ = joins;
        Vec::new()
    }

    fn meta_failed(&mut self, id: LegId, error: LegError, why: Option<MetaError>, out: &mut Vec<Action>) {
        if why.is_some() || !self.eject_or_drop(id, DropReason::MetaFailed(error)) {
            let until = self.now.saturating_add(self.options.grace_ns);
            if let Some(meta) = self.meta_of(id) {
                meta.stage = Stage::Broken(until);
            }
            out.push(Action::Event(Event::MetaFailed { leg: id, error, why }));
        }
        self.rescan = true;
    }
}
