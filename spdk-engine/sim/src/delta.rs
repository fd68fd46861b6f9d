//! How much is copied to a replica that returns: only regions that may have changed since it left (rules 9 and 11).
//!
//! *What it is.* The world's own notes, apart from what the core keeps: for each replica, the regions that may differ there.
//! When it leaves the in-sync set of the record these are the regions whose bit is set on any disk then, and those that a
//! host is changing or changed a moment ago; later, every region that a host changes or whose bit is set on any disk. A copy to it of any
//! other region is a violation: the rebuild was not a delta. That it copies *enough* is seen by what hosts read and by disks
//! that must be equal in the end.
//!
//! Everything may differ when stamps cannot tell: the data was deleted, the record has a new lineage, a meta area could not
//! be read, or a member may have lost its cache.

use mirror_core::meta::RegionBits;
use mirror_core::{Config, CopySlot, LegId};

use crate::engine::COPY_QUEUE_DEPTH;
use crate::faults::MS;
use crate::world::{EngineRef, REPLICAS, World, layout, replica_id};

/// A host's command may wait for so long before any disk shows it.
const RECENT_NS: u64 = 200 * MS;

/// The notes.
#[derive(Debug)]
pub(crate) struct Changes {
    /// By replica.
    may_differ: Vec<RegionBits>,
    /// By region: when a host changed it last.
    changed_at: Vec<u64>,
}

impl Changes {
    pub(crate) fn new() -> Self {
        let regions = layout().regions();
        Self { may_differ: vec![RegionBits::full(regions); REPLICAS], changed_at: vec![0; regions as usize] }
    }
}

impl World {
    /// A host's change arrives at an engine.
    pub(crate) fn note_change(&mut self, lba: u64, blocks: u32) {
        let (first, last) = layout().regions_of(lba, blocks);
        for region in first..=last.min(layout().regions() - 1) {
            self.changes.changed_at[region as usize] = self.now;
            self.changes.may_differ.iter_mut().for_each(|bits| bits.insert(region));
        }
    }

    /// Members may differ in these regions.
    pub(crate) fn note_dirty(&mut self, regions: &RegionBits) {
        self.changes.may_differ.iter_mut().for_each(|bits| bits.union_with(regions));
    }

    /// Nothing is known of some replica, or of all.
    pub(crate) fn note_unknown(&mut self, replica: Option<usize>) {
        for r in (0..REPLICAS).filter(|r| replica.is_none_or(|only| only == *r)) {
            self.changes.may_differ[r] = RegionBits::full(layout().regions());
        }
    }

    /// The record changed.
    pub(crate) fn note_record(&mut self, before: &Config, after: &Config) {
        if before.lineage != after.lineage {
            return self.note_unknown(None);
        }
        for r in 0..REPLICAS {
            let is_in = |config: &Config| config.in_sync.contains(&replica_id(r));
            if is_in(before) && !is_in(after) {
                // One that never carried a superblock may not have got its first stamps either.
                let stamped = self.replicas[r].superblock().is_some();
                let all = || RegionBits::full(layout().regions());
                self.changes.may_differ[r] = if stamped { self.unsettled() } else { all() };
            }
        }
    }

    /// Regions in which members may differ now.
    fn unsettled(&self) -> RegionBits {
        let geometry = layout();
        let mut set = RegionBits::empty(geometry.regions());
        self.replicas.iter().filter(|r| r.has_meta()).for_each(|r| set.union_with(&r.bits(&geometry)));
        let recent = |region: &u32| self.changes.changed_at[*region as usize] + RECENT_NS >= self.now;
        (0..geometry.regions()).filter(recent).for_each(|region| set.insert(region));
        // What is not answered may wait anywhere.
        for op in self.ops.values().filter(|o| o.op.changes_blocks()) {
            let (first, last) = geometry.regions_of(op.lba, op.blocks);
            (first..=last).for_each(|region| set.insert(region));
        }
        set
    }

    /// A rebuild writes to a replica.
    pub(crate) fn check_delta(&mut self, me: EngineRef, leg: LegId, slot: CopySlot, (lba, blocks): (u64, u32)) {
        let Some(process) = self.process_ref(me) else { return };
        let Some(state) = process.legs.get(&leg).copied() else { return };
        if slot.0 >= COPY_QUEUE_DEPTH || !state.meta || !process.keeps_bits {
            return;
        }
        let epoch = process.epoch;
        self.outcome.copied += u64::from(blocks);
        if self.arbiter.hold || epoch != self.arbiter.record.epoch || !self.scenario.check_bits {
            return;
        }
        let (first, last) = layout().regions_of(lba, blocks);
        let same = (first..=last).find(|region| !self.changes.may_differ[state.replica].contains(*region));
        if let Some(region) = same {
            self.fail(format!("region {region} is copied to r{} although nothing changed there", state.replica));
        }
    }
}
