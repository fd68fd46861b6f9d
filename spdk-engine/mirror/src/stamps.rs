//! Region stamps in memory: what every member's disk is to say about when each region was changed (rule 9).
//!
//! *What it is.* A number for each region. A replica that was away holds the numbers of the time when it left; where they
//! differ from the members', the region was changed without it. The numbers rise:
//! - with every engine: the epoch is part of them;
//! - whenever a set of the record changes, or a replica that got all writes stops to get them: all regions in which
//!   members may differ are stamped anew then, before acknowledgements go on.
//!
//! A region is stamped with the current number when its bit is set, in the same durable step; so a number is written once
//! for each region and engine, and hot regions cost nothing.
//!
//! *Why not `k` itself.* It tells too little of when a replica was there. A replica in `R` that is not connected when an
//! engine opens misses writes although no set has changed; a joiner that failed misses them until its swap is committed,
//! which may take as long as the arbiter is away; and an arbiter that was restored from an old copy gives numbers twice.
//!
//! *After an unclean stop* members may hold different numbers for a region whose stamping was under way. No data went out
//! for it then (it waits for bit and stamp on all), or its bit is set and it is stamped anew by the next engine. Whatever
//! number is taken is right; the highest is.
//!
//! *Invariants.* The content of a block of stamps has a version, which rises with every change. Numbers never fall.
//!
//! *When things fail.* A region of which no member's stamp can be read gets the current number: as if it had changed.

use crate::config::Epoch;
use crate::meta::{Geometry, RegionBits, STAMPS_PER_BLOCK, Stamp};

/// The stamps that members share. See the module's documentation.
#[derive(Debug)]
pub(crate) struct Stamps {
    values: Vec<Stamp>,
    /// Regions whose stamp was read or given; of no use once they are known.
    seen: RegionBits,
    /// All members that could be asked were read.
    known: bool,
    epoch: Epoch,
    change: u32,
    /// Version of each block; the first is 1.
    versions: Vec<u64>,
    clock: u64,
    /// Blocks that changed since legs were told.
    changed: RegionBits,
    /// What is to be durable before acknowledgements go on.
    floor: u64,
    /// Rule 8 broken on purpose: stamps are configuration numbers.
    pub(crate) by_number: Option<u32>,
    /// Rule 9 broken on purpose: regions that may differ keep their stamps when the record changes.
    pub(crate) keeps_dirty: bool,
}

impl Stamps {
    /// Inherited regions count as changed by this engine.
    pub(crate) fn new(geometry: &Geometry, epoch: Epoch) -> Self {
        let (regions, blocks) = (geometry.regions(), geometry.stamps_blocks());
        Self {
            values: vec![Stamp::default(); regions as usize],
            seen: RegionBits::empty(regions),
            known: false,
            epoch,
            change: 0,
            versions: vec![1; blocks as usize],
            clock: 1,
            changed: RegionBits::empty(blocks),
            floor: 1,
            by_number: None,
            keeps_dirty: false,
        }
    }

    /// The current number.
    fn now(&self) -> Stamp {
        match self.by_number {
            Some(number) => Stamp::new(Epoch(0), number),
            None => Stamp::new(self.epoch, self.change),
        }
    }

    pub(crate) fn get(&self, region: u32) -> Stamp {
        self.values.get(region as usize).copied().unwrap_or(Stamp::UNKNOWN)
    }

    pub(crate) fn is_known(&self) -> bool {
        self.known
    }

    pub(crate) fn blocks(&self) -> u32 {
        u32::try_from(self.versions.len()).unwrap_or(u32::MAX)
    }

    /// The version of a block.
    pub(crate) fn version(&self, block: u32) -> u64 {
        self.versions.get(block as usize).copied().unwrap_or(0)
    }

    /// The version of the block of a region.
    pub(crate) fn version_of(&self, region: u32) -> u64 {
        self.version(region / STAMPS_PER_BLOCK)
    }

    /// What a leg must have of a block before acknowledgements go on.
    pub(crate) fn floor_of(&self, block: u32) -> u64 {
        self.version(block).min(self.floor)
    }

    /// The version that everything has now.
    pub(crate) fn clock(&self) -> u64 {
        self.clock
    }

    fn touch(&mut self, region: u32) {
        let block = region / STAMPS_PER_BLOCK;
        self.clock += 1;
        if let Some(version) = self.versions.get_mut(block as usize) {
            *version = self.clock;
            self.changed.insert(block);
        }
    }

    /// A region is changed from now on.
    pub(crate) fn stamp(&mut self, region: u32) {
        let now = self.now();
        let Some(value) = self.values.get_mut(region as usize).filter(|v| **v != now) else {
            return self.seen.insert(region);
        };
        *value = now;
        self.seen.insert(region);
        self.touch(region);
    }

    /// Who gets writes changes, or the record does: regions in which members may differ count as changed by what follows.
    pub(crate) fn advance(&mut self, number: u64, dirty: &RegionBits) {
        self.change = self.change.saturating_add(1);
        if let Some(by_number) = &mut self.by_number {
            *by_number = u32::try_from(number).unwrap_or(u32::MAX);
        }
        if !self.keeps_dirty {
            dirty.iter().for_each(|region| self.stamp(region));
        }
        self.floor = self.clock;
    }

    /// What a member holds: the highest counts.
    pub(crate) fn merge(&mut self, held: &[Stamp]) {
        for (region, stamp) in (0u32..).zip(held).filter(|(_, s)| **s != Stamp::UNKNOWN) {
            self.seen.insert(region);
            let Some(value) = self.values.get_mut(region as usize).filter(|v| **v < *stamp) else { continue };
            *value = *stamp;
            self.touch(region);
        }
    }

    /// All members that could be asked were read. What none of them knows counts as changed.
    pub(crate) fn become_known(&mut self) {
        for region in 0..self.seen.len() {
            if !self.seen.contains(region) {
                self.stamp(region);
            }
        }
        self.known = true;
    }

    /// A block that changed since legs were told, once.
    pub(crate) fn next_changed(&mut self) -> Option<u32> {
        let block = self.changed.next(0)?;
        self.changed.remove(block);
        Some(block)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stamps(epoch: u64) -> Stamps {
        Stamps::new(&Geometry::new(64, 4).unwrap(), Epoch(epoch))
    }

    fn of(region: u32) -> RegionBits {
        let mut bits = RegionBits::empty(16);
        bits.insert(region);
        bits
    }

    #[test]
    fn rule_09_a_region_is_stamped_once_for_each_engine_and_change() {
        let mut s = stamps(3);
        s.stamp(5);
        let (first, version) = (s.get(5), s.version_of(5));
        s.stamp(5);
        assert_eq!((s.get(5), s.version_of(5)), (first, version), "hot regions cost nothing");
        s.advance(8, &of(5));
        assert!(s.get(5) > first && s.version_of(5) > version);
        assert_eq!(s.floor_of(0), s.version(0), "acknowledgements wait for it");
        let floor = s.floor_of(0);
        s.stamp(6);
        assert_eq!((s.get(6), s.floor_of(0)), (s.get(5), floor), "but not for what comes later");
    }

    #[test]
    fn rule_09_the_highest_stamp_counts_and_what_nobody_knows_counts_as_changed() {
        let mut s = stamps(3);
        s.stamp(0);
        let now = s.get(0);
        let (old, older) = (Stamp::new(Epoch(2), 7), Stamp::new(Epoch(2), 1));
        s.merge(&[old, old, older, Stamp::UNKNOWN]);
        s.merge(&[old, older, old, Stamp::UNKNOWN]);
        assert!(!s.is_known());
        s.become_known();
        assert_eq!([0, 1, 2, 3, 15].map(|r| s.get(r)), [now, old, old, now, now]);
        assert_eq!((s.next_changed(), s.next_changed()), (Some(0), None));
    }

    #[test]
    fn rule_08_no_engine_gives_a_stamp_that_another_one_gave() {
        let mut old = stamps(3);
        old.advance(9, &of(1));
        old.advance(10, &of(1));
        let mut new = stamps(4);
        new.stamp(1);
        assert!(new.get(1) > old.get(1), "whatever the configuration number is");
    }
}
