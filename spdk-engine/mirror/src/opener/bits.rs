//! The opener's part about write-intent bits (rules 15 and 18): reading them, whom to trust, what is inherited.
//!
//! *Whom to trust.* An engine writes a replica's bits first and then its superblock with its own epoch; after that it
//! keeps them as long as the replica is a member. So the bits are those of the last engine exactly when the
//! superblock's epoch is that of the last engine that served. Anything else (an engine that knew of no bits wrote
//! meanwhile, the area is new or damaged, sizes differ) means: nothing is known, every region counts as set.
//!
//! *What becomes of the promoted members* after an unclean stop:
//!
//! | bits readable on | mode | `S` | inherited |
//! |---|---|---|---|
//! | enough for `minInSync` | any | those | union of theirs; the others are copied in full |
//! | some, not enough | strict | all promoted | every region |
//! | none | available, or one is left | one | every region; copied in full to the others |
//! | none, but some have areas | strict | all promoted | every region |
//! | none has an area | strict | all promoted | the core copies one over the others first |
//! | too few unchanged (see [`power`]) | strict | all promoted | every region, from those that are |
//!
//! Wherever there is a meta area the core keeps superblocks in it, so that they carry what is decided here (rule 6).
//!
//! [`power`]: super::power
//!
//! A single member is equal to itself, but its bits also say what it may not have flushed yet: they are kept too.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::power::{Recorded, Sources, is_changed, sources};
use super::{MetaUnreadable, OpenAction, OpenError, OpenEvent, Opener, Phase, members_needed};
use crate::config::{Config, ReplicaId};
use crate::events::{LegId, Nanos};
use crate::meta::{
    Geometry, META_BLOCK_BYTES, RegionBits, ReplicaState, SUPERBLOCK_SLOTS, Superblock, decode_bits, newest_superblock,
};
use crate::params::{LegInit, MetaInit};

/// What a member's meta area said.
#[derive(Debug)]
pub(super) enum MemberBits {
    /// Asked for, for the `reads`th time.
    Reading { reads: u32 },
    /// The read failed: promoted again at that time; at `None` that is under way.
    Again { reads: u32, at: Option<Nanos> },
    /// Where it may differ.
    Known(RegionBits),
    /// It has none, or it cannot be read.
    Unreadable,
}

impl Opener {
    pub(super) fn geometry(&self) -> Option<Geometry> {
        let size = self.config.as_ref()?.size_blocks;
        crate::open::geometry(size, self.params.block_size, self.params.options.region_blocks).ok()
    }

    /// Asks every connected member for its bits, when they matter.
    pub(super) fn read_bits(&mut self, now: Nanos, out: &mut Vec<OpenAction>) {
        self.phase = Phase::ReadingBits { until: now.saturating_add(self.params.waits.bits_wait_ns) };
        let Some(config) = self.config.clone().filter(|_| self.geometry().is_some()) else { return };
        if self.was_clean {
            return; // Members are equal and flushed.
        }
        let members: Vec<(LegId, ReplicaId, bool)> = self
            .legs
            .iter()
            .filter(|l| config.in_sync.contains(&l.replica))
            .map(|l| (l.leg, l.replica.clone(), l.up && l.meta))
            .collect();
        for (leg, replica, readable) in members {
            if readable {
                self.ask_bits(leg, &replica, 1, out);
            } else {
                self.bits.insert(replica, MemberBits::Unreadable);
            }
        }
    }

    /// Asks for the superblocks and the bits of a replica.
    pub(super) fn ask_bits(&mut self, leg: LegId, replica: &ReplicaId, reads: u32, out: &mut Vec<OpenAction>) {
        let Some(geometry) = self.geometry() else { return };
        let blocks = u32::try_from(geometry.stamps_start()).unwrap_or(u32::MAX);
        self.bits.insert(replica.clone(), MemberBits::Reading { reads });
        out.push(OpenAction::ReadMeta { leg, block: 0, blocks });
    }

    pub(super) fn all_bits_are_read(&self) -> bool {
        !self.bits.values().any(|bits| matches!(bits, MemberBits::Reading { .. } | MemberBits::Again { .. }))
    }

    pub(super) fn apply_meta_read(
        &mut self,
        now: Nanos,
        leg: LegId,
        result: Result<Arc<[u8]>, MetaUnreadable>,
        out: &mut Vec<OpenAction>,
    ) {
        let Some(replica) = self.legs.iter().find(|l| l.leg == leg).map(|l| l.replica.clone()) else { return };
        let Some(MemberBits::Reading { reads }) = self.bits.get(&replica) else { return };
        let (reads, Phase::ReadingBits { .. }) = (*reads, &self.phase) else { return };
        match result {
            Ok(bytes) => {
                if let Some(error) = self.record_is_old(&replica, &bytes) {
                    return self.fail(error, out);
                }
                let bits = self.judge_bits(&replica, &bytes, out);
                self.bits.insert(replica, bits);
            }
            Err(MetaUnreadable) => self.read_failed(now, &replica, reads),
        }
    }

    /// Takes bits that are the last engine's; else every region may differ.
    fn judge_bits(&mut self, replica: &ReplicaId, bytes: &[u8], out: &mut Vec<OpenAction>) -> MemberBits {
        let Some(geometry) = self.geometry() else { return MemberBits::Unreadable };
        let slots = SUPERBLOCK_SLOTS as usize * META_BLOCK_BYTES;
        let superblock = newest_superblock(bytes.get(..slots).unwrap_or_default());
        let trusted = superblock.as_ref().is_some_and(|s| self.is_trusted(s, replica, &geometry));
        if let Some(superblock) = superblock.filter(|s| self.is_own(s, replica)) {
            let closed = superblock.state == ReplicaState::ClosedClean;
            self.recorded.insert(replica.clone(), Recorded { instance: superblock.instance, closed });
        }
        let bits = if trusted {
            decode_bits(&geometry, bytes.get(slots..).unwrap_or_default()).0
        } else {
            RegionBits::full(geometry.regions())
        };
        let event = OpenEvent::BitsRead { replica: replica.clone(), set: bits.count(), trusted };
        out.push(OpenAction::Event(event));
        MemberBits::Known(bits)
    }

    /// It is this replica's.
    fn is_own(&self, superblock: &Superblock, replica: &ReplicaId) -> bool {
        superblock.volume == self.params.volume && superblock.replica == *replica
    }

    /// Rule 21: a replica that carries a later record shows that the arbiter's is an old copy.
    fn record_is_old(&self, replica: &ReplicaId, bytes: &[u8]) -> Option<OpenError> {
        let config = self.config.as_ref()?;
        let slots = SUPERBLOCK_SLOTS as usize * META_BLOCK_BYTES;
        let superblock = newest_superblock(bytes.get(..slots)?)?;
        let newer = self.is_own(&superblock, replica)
            && superblock.record.lineage == config.lineage
            && superblock.record.config_number > config.config_number;
        let (found, recorded) = (superblock.record.config_number, config.config_number);
        newer.then(|| OpenError::RecordOld { replica: replica.clone(), found, recorded })
    }

    fn is_trusted(&self, superblock: &Superblock, replica: &ReplicaId, geometry: &Geometry) -> bool {
        let Some(config) = &self.config else { return false };
        self.is_own(superblock, replica)
            && superblock.record.lineage == config.lineage
            && Some(superblock.record.epoch) == self.served
            && superblock.record.size_blocks == config.size_blocks
            && superblock.block_size == self.params.block_size
            && superblock.region_blocks == geometry.region_blocks()
    }

    /// The members to go on with, by the module's table; sets what the core inherits or copies first.
    pub(super) fn choose_sources(
        &mut self,
        base: &Config,
        members: BTreeSet<ReplicaId>,
        out: &mut Vec<OpenAction>,
    ) -> BTreeSet<ReplicaId> {
        let usable = self.unchanged(&members, out);
        if usable.len() < members_needed(base) {
            // Too few to go on with alone: the others are made equal before they count as sources.
            for leg in self.legs.iter_mut().filter(|l| !usable.contains(&l.replica)) {
                leg.changed = members.contains(&leg.replica);
            }
            self.inherited = self.geometry().map(|g| RegionBits::full(g.regions()));
            return members;
        }
        let promoted = &usable;
        let known = |r: &&ReplicaId| matches!(self.bits.get(*r), Some(MemberBits::Known(_)));
        let readable: BTreeSet<ReplicaId> = promoted.iter().filter(known).cloned().collect();
        let regions = self.geometry().map_or(0, |g| g.regions());
        if !readable.is_empty() && readable.len() >= members_needed(base) {
            let mut union = RegionBits::empty(regions);
            for replica in &readable {
                if let Some(MemberBits::Known(bits)) = self.bits.get(replica) {
                    union.union_with(bits);
                }
            }
            self.inherited = Some(union);
            return readable;
        }
        if !readable.is_empty() {
            self.inherited = Some(RegionBits::full(regions));
            return promoted.clone();
        }
        let Some(source) = self.best_source(promoted) else { return promoted.clone() };
        let some_have_meta = self.legs.iter().any(|l| l.meta);
        if base.members_min() > 1 && promoted.len() > 1 && some_have_meta {
            // They could not be asked, but they will be told: superblocks have to carry what is decided here (rule 6).
            self.inherited = Some(RegionBits::full(regions));
            return promoted.clone();
        }
        if base.members_min() > 1 && promoted.len() > 1 {
            self.equalise_from = self.legs.iter().find(|l| l.replica == source).map(|l| l.leg);
            return promoted.clone();
        }
        self.inherited = Some(RegionBits::full(regions));
        BTreeSet::from([source])
    }

    /// A member that is connected, preferably one on this machine.
    fn best_source(&self, members: &BTreeSet<ReplicaId>) -> Option<ReplicaId> {
        let is_up = |r: &&ReplicaId| self.legs.iter().any(|l| l.up && l.replica == **r);
        let is_local = |r: &&ReplicaId| self.params.local.contains(*r);
        members.iter().max_by_key(|r| (is_up(r), is_local(r), std::cmp::Reverse(*r))).cloned()
    }

    /// Rule 1: those that hold every acknowledged write for certain; all of them when none does.
    fn unchanged(&mut self, promoted: &BTreeSet<ReplicaId>, out: &mut Vec<OpenAction>) -> BTreeSet<ReplicaId> {
        let changed = |replica: &ReplicaId| {
            let facts = self.candidates.get(replica).map(|c| &c.facts);
            let nothing = Recorded::default();
            let recorded = self.recorded.get(replica).unwrap_or(&nothing);
            facts.is_some_and(|f| is_changed(f, f.meta.then_some(recorded))) && !self.trusts_all()
        };
        let members = promoted.iter().map(|r| (r.clone(), changed(r))).collect();
        let Sources { usable, hosts_must_detach } = sources(&members);
        self.hosts_must_detach = hosts_must_detach;
        let replicas: BTreeSet<ReplicaId> = members.into_iter().filter(|(_, c)| *c).map(|(r, _)| r).collect();
        if !replicas.is_empty() {
            out.push(OpenAction::Event(OpenEvent::Changed { replicas, hosts_must_detach }));
        }
        usable
    }

    /// Members that were not connected, or did not answer: they may be unchanged.
    pub(super) fn unread(&self, members: &BTreeSet<ReplicaId>) -> BTreeSet<ReplicaId> {
        let is_up = |r: &ReplicaId| self.legs.iter().any(|l| l.up && l.replica == *r);
        let read = |r: &ReplicaId| {
            is_up(r) && !matches!(self.bits.get(r), None | Some(MemberBits::Reading { .. } | MemberBits::Again { .. }))
        };
        members.iter().filter(|r| !read(r)).cloned().collect()
    }

    /// Rule 1 broken on purpose.
    fn trusts_all(&self) -> bool {
        #[cfg(feature = "planted-bugs")]
        {
            self.params.options.bug == Some(crate::PlantedBug::Rule01AnySource)
        }
        #[cfg(not(feature = "planted-bugs"))]
        {
            false
        }
    }

    /// What the core is told of the regions: nothing when no replica has a meta area.
    pub(super) fn meta_init(&mut self, geometry: Option<Geometry>, legs: &[LegInit]) -> Option<MetaInit> {
        let regions = geometry?.regions();
        let used = self.equalise_from.is_none() && legs.iter().any(|l| l.meta);
        let inherited = self.inherited.take();
        let served = self.served;
        used.then(|| MetaInit { inherited: inherited.unwrap_or_else(|| RegionBits::empty(regions)), served })
    }
}
