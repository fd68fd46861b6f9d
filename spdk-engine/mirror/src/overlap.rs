//! Range locks: who may touch which blocks at the same time (rules 2 and 3).
//!
//! *What it is.* A table of ranges, each a reader, a writer or a copy. A range waits for every *earlier* range that
//! it conflicts with, so waiting is first come first served and cannot deadlock. One exception: copies do not queue
//! behind commands of hosts that are themselves waiting; those wait for the copy instead. Such a command may be waiting
//! for something that needs the copy (a new replica while the volume is frozen, members being made equal), and a copy
//! passes each block once, so it starves nobody. A copy waits only for commands that run, and those wait for no range.
//!
//! | | Read | Copy | Equalise | Write | Settled |
//! |---|---|---|---|---|---|
//! | **Read** | – | – | waits | waits | waits |
//! | **Copy** | – | – | waits | waits | – |
//! | **Equalise** | waits | waits | waits | waits | waits |
//! | **Write** | waits | waits | waits | waits | waits |
//!
//! A command of a host that was granted can be put on *hold*: it keeps its place before those behind it, but counts as
//! waiting, so copies pass it. That is how it waits for the bits of its regions (see `marks`).
//!
//! *Settled* is a write that is the same on all healthy members and waits only for its acknowledgement: hosts must
//! not see it yet, but copying it is right. Without it a frozen volume could not be healed by a new replica, as its
//! copy would wait for the frozen write.
//!
//! *Cost.* A range that overlaps no other one is granted and given back without a look at the others (see
//! [`crate::crowd`]). Else they are all looked at (at most `max_inflight` plus copies): a linear scan over a dense array.
//! No allocation once the arrays have grown to their bound.
//!
//! *When things fail.* A key that is not live is ignored by `release` and `settle` (they return nothing granted).

use crate::crowd::Crowd;

/// What a range is held for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LockKind {
    /// Host read.
    Read,
    /// Host write, unmap, zeroes.
    Write,
    /// A window that is being copied to a joiner.
    Copy,
    /// A window that is being made equal on all members.
    Equalise,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Held {
    Read,
    Write,
    Copy,
    Equalise,
    Settled,
}

impl Held {
    fn is_host(self) -> bool {
        matches!(self, Held::Read | Held::Write | Held::Settled)
    }
}

impl From<LockKind> for Held {
    fn from(kind: LockKind) -> Self {
        match kind {
            LockKind::Read => Held::Read,
            LockKind::Write => Held::Write,
            LockKind::Copy => Held::Copy,
            LockKind::Equalise => Held::Equalise,
        }
    }
}

/// Names a live range.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct LockKey {
    seq: u64,
    /// Where its position is kept.
    slot: u32,
}

#[derive(Debug, Clone, Copy)]
struct Range<T> {
    seq: u64,
    slot: u32,
    start: u64,
    end: u64,
    held: Held,
    blockers: u32,
    owner: T,
}

impl<T> Range<T> {
    fn overlaps(&self, start: u64, end: u64) -> bool {
        self.start < end && start < self.end
    }
}

/// Whether `later` must wait for `earlier` by the rules.
fn conflicts(earlier: Held, later: Held) -> bool {
    match (earlier, later) {
        (Held::Read | Held::Copy, Held::Read | Held::Copy) | (Held::Settled, Held::Copy) => false,
        (Held::Read | Held::Copy | Held::Equalise | Held::Write | Held::Settled, _) => true,
    }
}

/// Which rules a table ignores; only for planted bugs.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Ignore {
    pub(crate) writes_vs_writes: bool,
    pub(crate) reads_vs_writes: bool,
}

impl Ignore {
    /// Whether `later` must wait for `earlier`.
    fn must_wait(self, earlier: Held, later: Held) -> bool {
        let reads = matches!(earlier, Held::Read) || matches!(later, Held::Read);
        let writes = matches!((earlier, later), (Held::Write | Held::Settled, Held::Write));
        if (self.reads_vs_writes && reads) || (self.writes_vs_writes && writes) {
            return false;
        }
        conflicts(earlier, later)
    }
}

/// The table. `T` names the owner of a range and is given back when the range is granted.
#[derive(Debug)]
pub struct RangeLocks<T> {
    ranges: Vec<Range<T>>,
    /// Positions in `ranges` by slot, and slots that are free.
    positions: Vec<u32>,
    free: Vec<u32>,
    crowd: Crowd,
    next_seq: u64,
    /// Ranges granted by one release, to be put in order of arrival.
    fresh: Vec<(u64, T)>,
    ignore: Ignore,
}

impl<T: Copy> RangeLocks<T> {
    /// An empty table with room for `capacity` ranges, most of which touch few pieces of `1 << granule_shift` blocks.
    #[must_use]
    pub fn new(capacity: usize, granule_shift: u32) -> Self {
        Self {
            ranges: Vec::with_capacity(capacity),
            positions: Vec::with_capacity(capacity),
            free: Vec::with_capacity(capacity),
            crowd: Crowd::new(granule_shift),
            next_seq: 0,
            fresh: Vec::new(),
            ignore: Ignore::default(),
        }
    }

    #[cfg(feature = "planted-bugs")]
    pub(crate) fn ignore(&mut self, ignore: Ignore) {
        self.ignore = ignore;
    }

    /// Asks for `[start, end)`. Returns the key and whether it is granted at once; otherwise a later `release` or
    /// `settle` reports its owner.
    pub fn acquire(&mut self, start: u64, end: u64, kind: LockKind, owner: T) -> (LockKey, bool) {
        let held = Held::from(kind);
        let blockers = if self.crowd.is_free(start, end) { 0 } else { self.count_blockers(start, end, held) };
        let key = self.insert(start, end, held, blockers, owner);
        (key, blockers == 0)
    }

    /// Takes `[start, end)`, which is free.
    #[inline]
    pub(crate) fn acquire_free(&mut self, start: u64, end: u64, kind: LockKind, owner: T) -> LockKey {
        debug_assert!(self.is_free(start, end), "it may have to wait");
        self.insert(start, end, kind.into(), 0, owner)
    }

    /// Whether `[start, end)` is certain to be granted at once.
    #[must_use]
    #[inline]
    pub fn is_free(&self, start: u64, end: u64) -> bool {
        self.crowd.is_free(start, end)
    }

    /// Whether it is certain that nothing waits for this live range, nor it for anything.
    #[must_use]
    #[inline]
    pub fn is_alone(&self, key: LockKey) -> bool {
        self.position(key).is_some_and(|at| self.crowd.is_alone(self.ranges[at].start, self.ranges[at].end))
    }

    #[inline(always)]
    fn insert(&mut self, start: u64, end: u64, held: Held, blockers: u32, owner: T) -> LockKey {
        let position = u32::try_from(self.ranges.len()).unwrap_or(u32::MAX);
        let slot = match self.free.pop() {
            Some(slot) => {
                self.positions[slot as usize] = position;
                slot
            }
            None => {
                self.positions.push(position);
                u32::try_from(self.positions.len() - 1).unwrap_or(u32::MAX)
            }
        };
        let seq = self.next_seq;
        self.next_seq += 1;
        self.crowd.add(start, end);
        self.ranges.push(Range { seq, slot, start, end, held, blockers, owner });
        LockKey { seq, slot }
    }

    #[inline(always)]
    fn remove(&mut self, position: usize) -> Range<T> {
        let gone = self.ranges.swap_remove(position);
        if let Some(moved) = self.ranges.get(position) {
            self.positions[moved.slot as usize] = position as u32;
        }
        self.free.push(gone.slot);
        self.crowd.remove(gone.start, gone.end);
        gone
    }

    /// How many live ranges a new one must wait for. Commands that wait and let it pass wait for it from now on.
    fn count_blockers(&mut self, start: u64, end: u64, held: Held) -> u32 {
        let mut blockers = 0u32;
        for range in self.ranges.iter_mut().filter(|r| r.overlaps(start, end)) {
            if !self.ignore.must_wait(range.held, held) {
                continue;
            }
            if !held.is_host() && range.held.is_host() && range.blockers > 0 {
                range.blockers += 1; // A waiting command lets the copy pass.
            } else {
                blockers += 1;
            }
        }
        blockers
    }

    /// Gives a range back, granted or not. Owners of ranges that are granted by it are appended to `granted` in
    /// order of arrival.
    pub fn release(&mut self, key: LockKey, granted: &mut Vec<T>) {
        let Some(position) = self.position(key) else { return };
        let alone = self.is_alone(key);
        let gone = self.remove(position);
        if !alone {
            self.unblock(gone, None, granted);
        }
    }

    /// Gives back a range that is alone: nobody is granted by it.
    #[inline]
    pub(crate) fn release_alone(&mut self, key: LockKey) {
        debug_assert!(self.is_alone(key), "somebody may wait for it");
        if let Some(position) = self.position(key) {
            self.remove(position);
        }
    }

    /// Turns a granted write into *settled*. Copies that wait for it may be granted.
    pub fn settle(&mut self, key: LockKey, granted: &mut Vec<T>) {
        let Some(position) = self.position(key) else { return };
        if self.ranges[position].held != Held::Write || self.ranges[position].blockers != 0 {
            return;
        }
        let before = self.ranges[position];
        self.ranges[position].held = Held::Settled;
        self.unblock(before, Some(Held::Settled), granted);
    }

    /// Puts a granted command of a host on hold. Copies that wait for it may be granted, and it waits for them then.
    pub fn hold(&mut self, key: LockKey, granted: &mut Vec<T>) {
        let Some(position) = self.position(key) else { return };
        let Range { start, end, held, blockers, .. } = self.ranges[position];
        if blockers != 0 || !matches!(held, Held::Read | Held::Write) {
            return;
        }
        let mut passed = 0;
        // Copies before it were released when it was granted, so those that are here came later and wait for it.
        for range in self.ranges.iter_mut().filter(|r| !r.held.is_host() && r.overlaps(start, end)) {
            if self.ignore.must_wait(held, range.held) {
                passed += 1;
                range.blockers = range.blockers.saturating_sub(1);
                if range.blockers == 0 {
                    self.fresh.push((range.seq, range.owner));
                }
            }
        }
        self.ranges[position].blockers = 1 + passed;
        self.grant_fresh(granted);
    }

    /// Ends a hold; the command is granted when no copy is passing it.
    pub fn unhold(&mut self, key: LockKey, granted: &mut Vec<T>) {
        let Some(position) = self.position(key) else { return };
        let range = &mut self.ranges[position];
        if range.blockers > 0 {
            range.blockers -= 1;
            if range.blockers == 0 {
                granted.push(range.owner);
            }
        }
    }

    fn grant_fresh(&mut self, granted: &mut Vec<T>) {
        self.fresh.sort_unstable_by_key(|(seq, _)| *seq);
        granted.extend(self.fresh.drain(..).map(|(_, owner)| owner));
    }

    /// Later ranges no longer wait for `before`, or only as far as they would for `after`.
    fn unblock(&mut self, before: Range<T>, after: Option<Held>, granted: &mut Vec<T>) {
        let ignore = self.ignore;
        for range in self.ranges.iter_mut().filter(|r| r.overlaps(before.start, before.end)) {
            // Between a copy and a host: whichever ran first is waited for, whatever the order of arrival. A command
            // that does not run has let all copies pass; one that runs has none left before it.
            let waits_for_it = match (before.held.is_host(), range.held.is_host()) {
                (false, true) => range.blockers > 0,
                (true, false) => before.blockers == 0,
                _ => range.seq > before.seq,
            };
            if !waits_for_it {
                continue;
            }
            let waited = ignore.must_wait(before.held, range.held);
            let waits = after.is_some_and(|held| ignore.must_wait(held, range.held));
            if waited && !waits {
                range.blockers = range.blockers.saturating_sub(1);
                if range.blockers == 0 {
                    self.fresh.push((range.seq, range.owner));
                }
            }
        }
        self.grant_fresh(granted);
    }

    /// Whether a live range is granted.
    #[must_use]
    pub fn is_granted(&self, key: LockKey) -> bool {
        self.position(key).is_some_and(|at| self.ranges[at].blockers == 0)
    }

    #[inline]
    fn position(&self, key: LockKey) -> Option<usize> {
        let position = *self.positions.get(key.slot as usize)? as usize;
        self.ranges.get(position).is_some_and(|r| r.seq == key.seq).then_some(position)
    }

    /// Live ranges, granted or waiting.
    #[must_use]
    pub fn len(&self) -> usize {
        self.ranges.len()
    }

    /// Whether no range is live.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }
}

#[cfg(test)]
mod tests;
