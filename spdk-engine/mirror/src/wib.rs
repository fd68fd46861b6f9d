//! Write-intent bits in memory: which regions are *live*, which are *inherited* (rules 9 and 18).
//!
//! *What it is.* Sets and counters without I/O. On disk there is one bit per region, and it says "members may differ
//! here". In memory two reasons are kept apart:
//! - *live*: writes are in flight, or were lately. An entry of a bounded table;
//! - *inherited*: found set when the volume was opened; the members have not been made equal there yet.
//!
//! ```text
//!            first write                bits durable on all
//! cold ───────────────────▶ pending ───────────────────────▶ ready ──┐ writes count up and down
//!   ▲                                                        │  ▲    │
//!   │  flushed on all, no write began since        idle: cooling └───┘ a write begins
//!   └────────────────────────────────────────────────────────┘
//! inherited ──(made equal on all)──▶ ready
//! ```
//! The content of a bitmap block has a version that rises with every change. A leg knows which version it has; a
//! region is ready when every leg that must have its bit has the version in which the bit was set.
//!
//! *Cost.* A write to a ready region looks up one number and stores three. Nothing is allocated once the table has
//! grown to its bound.
//!
//! *When things fail.* A command that touches more regions than the table may hold gets them all: the table grows for it,
//! but only while it has not grown already. So it never holds more than its bound and the regions of one command.

use crate::config::Epoch;
use crate::events::Nanos;
use crate::meta::{BITS_PER_BLOCK, Geometry, RegionBits, STAMPS_PER_BLOCK};
use crate::stamps::Stamps;

/// One live region.
#[derive(Debug, Clone, Copy)]
struct Live {
    region: u32,
    /// Writes that wait for its bit or are in flight.
    writes: u32,
    /// Version of the bitmap block in which the bit was set.
    needs: u64,
    /// Version of its block of stamps with its stamp.
    needs_stamps: u64,
    /// Bit and stamp are durable wherever they must be.
    ready: bool,
    /// Its bit clears when the flush under way is done.
    cooling: bool,
    last_write: Nanos,
}

/// The sets. See the module's documentation.
#[derive(Debug)]
pub(crate) struct Wib {
    pub(crate) geometry: Geometry,
    /// What the legs' disks are to hold: live and inherited regions.
    pub(crate) bits: RegionBits,
    /// Version of each bitmap block; the first is 1.
    versions: Vec<u64>,
    pub(crate) inherited: RegionBits,
    pub(crate) inherited_left: u32,
    /// When regions were changed last.
    pub(crate) stamps: Stamps,
    /// Place of a region in `live` plus one; 0 is cold.
    index: Vec<u32>,
    live: Vec<Live>,
    free: Vec<u32>,
    live_max: u32,
    /// Places of live regions that are not ready.
    pending: Vec<u32>,
    /// Places of cooling regions.
    cooling: Vec<u32>,
    /// Rule 18 broken on purpose: a write does not end the cooling of its region.
    pub(crate) keeps_cooling: bool,
    /// Rule 18 broken on purpose: data does not wait for bits.
    pub(crate) ready_at_once: bool,
}

impl Wib {
    pub(crate) fn new(geometry: Geometry, inherited: RegionBits, live_max: u32, epoch: Epoch) -> Self {
        Self {
            stamps: Stamps::new(&geometry, epoch),
            bits: inherited.clone(),
            versions: vec![1; geometry.bits_blocks() as usize],
            inherited_left: inherited.count(),
            inherited,
            index: vec![0; geometry.regions() as usize],
            live: Vec::new(),
            free: Vec::new(),
            live_max,
            pending: Vec::new(),
            cooling: Vec::new(),
            geometry,
            keeps_cooling: false,
            ready_at_once: false,
        }
    }

    /// Stamps what is inherited.
    pub(crate) fn stamp_inherited(&mut self) {
        self.inherited.iter().for_each(|region| self.stamps.stamp(region));
    }

    /// Who gets writes changes, or the record does (rule 9).
    pub(crate) fn advance_stamps(&mut self, number: u64) {
        self.stamps.advance(number, &self.bits);
    }

    pub(crate) fn live_len(&self) -> u32 {
        u32::try_from(self.live.len() - self.free.len()).unwrap_or(u32::MAX)
    }

    /// The version of a bitmap block.
    pub(crate) fn version(&self, block: u32) -> u64 {
        self.versions.get(block as usize).copied().unwrap_or(0)
    }

    fn place(&self, region: u32) -> Option<usize> {
        self.index.get(region as usize).copied().and_then(|i| i.checked_sub(1)).map(|i| i as usize)
    }

    fn live_mut(&mut self, region: u32) -> Option<&mut Live> {
        let place = self.place(region)?;
        self.live.get_mut(place)
    }

    /// A region of the range is inherited.
    pub(crate) fn touches_inherited(&self, (first, last): (u32, u32)) -> bool {
        // Looking for the next one may lead far beyond the range, when few are left.
        let in_range = |(first, last): (u32, u32)| match last - first {
            0..=63 => (first..=last).any(|r| self.inherited.contains(r)),
            _ => self.inherited.next(first).is_some_and(|r| r <= last),
        };
        self.inherited_left > 0 && in_range((first, last))
    }

    /// The inherited regions of a range.
    pub(crate) fn inherited_of(&self, (first, last): (u32, u32)) -> impl Iterator<Item = u32> + '_ {
        (first..=last).filter(|r| self.inherited.contains(*r))
    }

    /// A write begins. True when all its regions are ready; then it is counted there. Else nothing has changed.
    pub(crate) fn begin_write(&mut self, (first, last): (u32, u32), now: Nanos) -> bool {
        if !(first..=last).all(|r| self.place(r).is_some_and(|p| self.live[p].ready)) {
            return false;
        }
        self.count_write((first, last), now);
        true
    }

    fn count_write(&mut self, (first, last): (u32, u32), now: Nanos) {
        let keeps_cooling = self.keeps_cooling;
        for region in first..=last {
            if let Some(live) = self.live_mut(region) {
                live.writes += 1;
                live.last_write = now;
                live.cooling &= keeps_cooling;
            }
        }
    }

    /// How many regions of a range are cold.
    fn cold(&self, (first, last): (u32, u32)) -> u32 {
        let cold = (first..=last).filter(|r| self.place(*r).is_none()).count();
        u32::try_from(cold).unwrap_or(u32::MAX)
    }

    /// There is room for the cold regions of a range, or it is so large that there never will be, and the table has not
    /// grown for another one.
    pub(crate) fn has_room(&self, range: (u32, u32)) -> bool {
        let (cold, live) = (self.cold(range), self.live_len());
        live.saturating_add(cold) <= self.live_max || (cold > self.live_max && live <= self.live_max)
    }

    /// With so many on their way into it the table is in use.
    pub(crate) fn is_full(&self, coming: u32) -> bool {
        self.live_len().saturating_add(coming) >= self.live_max
    }

    /// More than the usual part of the table is in use.
    pub(crate) fn is_crowded(&self) -> bool {
        self.live_len() >= self.live_max - self.live_max / 8
    }

    /// Counts a write at all its regions and sets the bits of those that are cold. Only with room.
    pub(crate) fn mark(&mut self, range: (u32, u32), now: Nanos) {
        for region in range.0..=range.1 {
            if self.place(region).is_none() {
                let block = region / BITS_PER_BLOCK;
                self.bits.insert(region);
                self.versions[block as usize] += 1;
                self.stamps.stamp(region);
                let (needs, needs_stamps) = (self.versions[block as usize], self.stamps.version_of(region));
                let ready = self.ready_at_once;
                let fresh = Live { region, writes: 0, needs, needs_stamps, ready, cooling: false, last_write: now };
                let place = self.insert(fresh);
                if !ready {
                    self.pending.push(place);
                }
            }
        }
        self.count_write(range, now);
    }

    fn insert(&mut self, fresh: Live) -> u32 {
        let place = match self.free.pop() {
            Some(place) => {
                self.live[place as usize] = fresh;
                place
            }
            None => {
                self.live.push(fresh);
                u32::try_from(self.live.len() - 1).unwrap_or(u32::MAX)
            }
        };
        self.index[fresh.region as usize] = place + 1;
        place
    }

    /// All regions of a range are ready.
    pub(crate) fn is_ready(&self, (first, last): (u32, u32)) -> bool {
        (first..=last).all(|r| self.place(r).is_some_and(|p| self.live[p].ready))
    }

    /// Makes regions ready whose bits and stamps are durable; `durable` and `stamped` are the versions that every leg has of a
    /// bitmap block and of a block of stamps. True when at least one became ready.
    pub(crate) fn settle(&mut self, durable: impl Fn(u32) -> u64, stamped: impl Fn(u32) -> u64) -> bool {
        let before = self.pending.len();
        let live = &mut self.live;
        self.pending.retain(|place| {
            let entry = &mut live[*place as usize];
            entry.ready = durable(entry.region / BITS_PER_BLOCK) >= entry.needs
                && stamped(entry.region / STAMPS_PER_BLOCK) >= entry.needs_stamps;
            !entry.ready
        });
        self.pending.len() != before
    }

    pub(crate) fn has_pending(&self) -> bool {
        !self.pending.is_empty()
    }

    /// A write is answered: all members have it, or it left nothing unequal.
    pub(crate) fn end_write(&mut self, (first, last): (u32, u32)) {
        for region in first..=last {
            if let Some(live) = self.live_mut(region) {
                live.writes = live.writes.saturating_sub(1);
            }
        }
    }

    /// A region is equal on all members now: it goes on as a live one, whose bit is on every disk already.
    pub(crate) fn equalised(&mut self, region: u32, now: Nanos) {
        if self.inherited.contains(region) {
            self.inherited.remove(region);
            self.inherited_left -= 1;
            // Its stamp is on its way since the volume was opened; nothing clears before it is there.
            let (needs, needs_stamps) = (0, 0);
            self.insert(Live { region, writes: 0, needs, needs_stamps, ready: true, cooling: false, last_write: now });
        }
    }

    /// When the least recently written idle region will have been idle for `idle_ns`; `None` without live regions.
    pub(crate) fn oldest_idle(&self, idle_ns: Nanos) -> Option<Nanos> {
        self.entries().map(|live| live.last_write.saturating_add(idle_ns)).min()
    }

    fn entries(&self) -> impl Iterator<Item = &Live> {
        let in_use = |(place, live): &(usize, &Live)| self.index[live.region as usize] as usize == place + 1;
        self.live.iter().enumerate().filter(in_use).map(|(_, live)| live)
    }

    /// Marks ready regions without writes for clearing: those last written at or before `until`, and, to make room,
    /// the oldest ones until a quarter of the table would be free. Returns how many.
    pub(crate) fn cool(&mut self, until: Nanos, make_room: bool) -> usize {
        let mut quiet: Vec<(Nanos, u32)> = self
            .entries()
            .filter(|live| live.ready && live.writes == 0)
            .map(|live| (live.last_write, self.index[live.region as usize] - 1))
            .collect();
        quiet.sort_unstable();
        let target = if make_room { self.live_len().saturating_sub(self.live_max / 4 * 3).max(1) } else { 0 };
        for (at, (last_write, place)) in quiet.into_iter().enumerate() {
            if last_write > until && at >= target as usize {
                break;
            }
            self.live[place as usize].cooling = true;
            self.cooling.push(place);
        }
        self.cooling.len()
    }

    /// The flush is done on all: clears the bits of the regions that are still cooling. Returns how many.
    pub(crate) fn clear_cooled(&mut self) -> usize {
        let mut cleared = 0;
        for place in std::mem::take(&mut self.cooling) {
            let Live { region, cooling, .. } = self.live[place as usize];
            if !cooling {
                continue; // A write began since.
            }
            let block = region / BITS_PER_BLOCK;
            self.live[place as usize].cooling = false;
            self.bits.remove(region);
            self.versions[block as usize] += 1;
            self.index[region as usize] = 0;
            self.free.push(place);
            cleared += 1;
        }
        cleared
    }

    /// Everything is flushed and no write is in flight: clears all live bits.
    pub(crate) fn clear_all(&mut self) {
        self.cooling.clear();
        for place in 0..u32::try_from(self.live.len()).unwrap_or(u32::MAX) {
            let live = &mut self.live[place as usize];
            if self.index[live.region as usize] == place + 1 {
                live.cooling = true;
                self.cooling.push(place);
            }
        }
        self.pending.clear();
        self.clear_cooled();
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use proptest::prelude::*;

    use super::*;

    fn wib(inherited: &[u32], max: u32) -> Wib {
        let geometry = Geometry::new(64, 4).unwrap();
        let mut bits = RegionBits::empty(16);
        inherited.iter().for_each(|r| bits.insert(*r));
        Wib::new(geometry, bits, max, Epoch(1))
    }

    fn regions(wib: &Wib) -> Vec<u32> {
        wib.bits.iter().collect()
    }

    #[test]
    fn rule_18_a_cold_region_is_ready_when_its_bit_is_durable() {
        let mut w = wib(&[], 8);
        assert!(!w.begin_write((3, 3), 1));
        w.mark((3, 3), 1);
        assert_eq!((regions(&w), w.version(0)), (vec![3], 2));
        assert!(!w.settle(|_| 1, |_| u64::MAX) && !w.is_ready((3, 3)));
        assert!(w.settle(|_| 2, |_| u64::MAX) && w.is_ready((3, 3)));
        assert!(w.begin_write((3, 3), 2), "hot");
        assert!(!w.begin_write((3, 4), 2), "4 is cold");
    }

    #[test]
    fn rule_18_a_bit_clears_only_when_no_write_began_since_the_flush_did() {
        let mut w = wib(&[], 8);
        w.mark((1, 2), 1);
        w.settle(|_| 9, |_| u64::MAX);
        assert_eq!(w.cool(1, false), 0, "a write is in flight");
        w.end_write((1, 2));
        assert_eq!(w.cool(0, false), 0, "not idle for long enough");
        assert_eq!(w.cool(1, false), 2);
        assert!(w.begin_write((2, 2), 3));
        w.end_write((2, 2));
        assert_eq!((w.clear_cooled(), regions(&w)), (1, vec![2]));
    }

    #[test]
    fn rule_18_a_region_cleared_and_written_again_needs_a_newer_version() {
        let mut w = wib(&[], 8);
        w.mark((1, 1), 1);
        w.settle(|_| 2, |_| u64::MAX);
        w.end_write((1, 1));
        w.cool(1, false);
        assert_eq!((w.clear_cooled(), w.version(0)), (1, 3));
        w.mark((1, 1), 5);
        assert!(!w.settle(|_| 3, |_| u64::MAX) && w.settle(|_| 4, |_| u64::MAX));
    }

    #[test]
    fn rule_18_inherited_regions_go_on_as_live_ones() {
        let mut w = wib(&[0, 5], 8);
        assert!(w.touches_inherited((4, 6)) && !w.touches_inherited((1, 4)) && !w.touches_inherited((6, 15)));
        w.equalised(5, 7);
        w.equalised(5, 7);
        assert_eq!((w.inherited_left, w.live_len()), (1, 1));
        assert!(w.begin_write((5, 5), 8));
        w.end_write((5, 5));
        w.cool(8, false);
        w.clear_cooled();
        assert_eq!(regions(&w), [0]);
    }

    #[test]
    fn the_oldest_regions_make_room() {
        let mut w = wib(&[], 4);
        for region in 0..4 {
            w.mark((region, region), 10 + u64::from(region));
            w.settle(|_| 99, |_| u64::MAX);
            w.end_write((region, region));
        }
        assert!(
            !w.has_room((9, 9)) && w.has_room((2, 3)) && w.has_room((4, 15)),
            "the last one is larger than the table"
        );
        assert!(w.is_crowded());
        assert_eq!((w.cool(0, false), w.cool(0, true)), (0, 1));
        w.clear_cooled();
        assert_eq!(regions(&w), [1, 2, 3]);
        assert!(w.has_room((9, 9)));
    }

    #[test]
    fn the_table_holds_no_more_than_its_bound_and_one_large_command() {
        let mut w = wib(&[], 4);
        w.mark((15, 15), 1);
        assert!(w.has_room((0, 5)));
        w.mark((0, 5), 1);
        assert!(!w.has_room((6, 11)), "another large one waits until the table has shrunk");
        w.settle(|_| 99, |_| u64::MAX);
        w.end_write((0, 5));
        while w.cool(0, true) > 0 && w.live_len() > 4 {
            w.clear_cooled();
        }
        assert!(w.has_room((6, 11)) && w.live_len() <= 4, "{}", w.live_len());
    }

    #[test]
    fn regions_on_their_way_count_as_live() {
        let mut w = wib(&[1, 2], 2);
        w.mark((0, 0), 1);
        assert!(!w.is_full(0) && w.is_full(1));
    }

    #[derive(Debug, Clone)]
    enum Step {
        Write { first: u32, len: u32 },
        End(usize),
        Settle,
        Cool,
        Clear,
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            4 => (0u32..16, 1u32..4).prop_map(|(first, len)| Step::Write { first, len }),
            4 => any::<usize>().prop_map(Step::End),
            2 => Just(Step::Settle),
            1 => Just(Step::Cool),
            1 => Just(Step::Clear),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(64) })]
        /// Whatever the order: a region with a write in flight has its bit, and only regions written or inherited do.
        #[test]
        fn rule_18_bits_agree_with_a_naive_model(steps in proptest::collection::vec(step(), 1..120)) {
            let mut w = wib(&[], 6);
            let mut writes: Vec<(u32, u32)> = Vec::new();
            let mut ever = BTreeSet::new();
            let mut began: BTreeMap<u32, bool> = BTreeMap::new();
            for (now, step) in (1u64..).zip(steps) {
                match step {
                    Step::Write { first, len } => {
                        let range = (first, (first + len - 1).min(15));
                        let hot = w.is_ready(range);
                        prop_assert_eq!(w.begin_write(range, now), hot);
                        if !hot && !w.has_room(range) {
                            continue;
                        }
                        if !hot {
                            w.mark(range, now);
                        }
                        writes.push(range);
                        (range.0..=range.1).for_each(|r| { ever.insert(r); began.insert(r, true); });
                    }
                    Step::End(at) if !writes.is_empty() => {
                        let range = writes.swap_remove(at % writes.len());
                        w.end_write(range);
                    }
                    Step::End(_) => {}
                    Step::Settle => { let version = w.version(0); w.settle(|_| version, |_| u64::MAX); }
                    Step::Cool => { began.clear(); w.cool(now, false); }
                    Step::Clear => {
                        let before: BTreeSet<u32> = w.bits.iter().collect();
                        w.clear_cooled();
                        for region in before {
                            let kept = w.bits.contains(region);
                            prop_assert!(kept || !began.contains_key(&region), "{} cleared though written", region);
                        }
                    }
                }
                for (first, last) in &writes {
                    prop_assert!((*first..=*last).all(|r| w.bits.contains(r)));
                }
                prop_assert!(w.bits.iter().all(|r| ever.contains(&r)));
                prop_assert_eq!(w.live_len(), w.bits.count());
            }
        }
    }
}
