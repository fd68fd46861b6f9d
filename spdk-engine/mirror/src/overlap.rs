//! Range locks: who may touch which blocks at the same time (rules 2 and 3).
//!
//! *What it is.* A table of ranges, each a reader, a writer or a copy. A range waits for every *earlier* range that
//! it conflicts with; so waiting is first come first served, without starvation and without deadlock (a range waits
//! only for older ones).
//!
//! | | Read | Copy | Write | Settled |
//! |---|---|---|---|---|
//! | **Read** | – | – | waits | waits |
//! | **Copy** | – | – | waits | – |
//! | **Write** | waits | waits | waits | waits |
//!
//! *Settled* is a write that is the same on all healthy members and waits only for its acknowledgement: hosts must
//! not see it yet, but copying it is right. Without it a frozen volume could not be healed by a new replica, as its
//! copy would wait for the frozen write.
//!
//! *Cost.* Acquire and release look at all live ranges (at most `max_inflight` plus copies): a linear scan over a
//! dense array. No allocation once the array has grown to its bound.
//!
//! *When things fail.* A key that is not live is ignored by `release` and `settle` (they return nothing granted).

/// What a range is held for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LockKind {
    /// Host read.
    Read,
    /// Host write, unmap, zeroes.
    Write,
    /// A window that is being copied to a joiner.
    Copy,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Held {
    Read,
    Write,
    Copy,
    Settled,
}

/// Names a live range.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct LockKey(u64);

#[derive(Debug, Clone, Copy)]
struct Range<T> {
    seq: u64,
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
        (Held::Read | Held::Copy | Held::Write | Held::Settled, _) => true,
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
    next_seq: u64,
    /// Ranges granted by one release, to be put in order of arrival.
    fresh: Vec<(u64, T)>,
    ignore: Ignore,
}

impl<T: Copy> RangeLocks<T> {
    /// An empty table with room for `capacity` ranges.
    #[must_use]
    pub fn with_capacity(capacity: usize) -> Self {
        Self { ranges: Vec::with_capacity(capacity), next_seq: 0, fresh: Vec::new(), ignore: Ignore::default() }
    }

    #[cfg(feature = "planted-bugs")]
    pub(crate) fn ignore(&mut self, ignore: Ignore) {
        self.ignore = ignore;
    }

    /// Asks for `[start, end)`. Returns the key and whether it is granted at once; otherwise a later `release` or
    /// `settle` reports its owner.
    pub fn acquire(&mut self, start: u64, end: u64, kind: LockKind, owner: T) -> (LockKey, bool) {
        let held = match kind {
            LockKind::Read => Held::Read,
            LockKind::Write => Held::Write,
            LockKind::Copy => Held::Copy,
        };
        let earlier =
            self.ranges.iter().filter(|r| r.overlaps(start, end) && self.ignore.must_wait(r.held, held)).count();
        let blockers = u32::try_from(earlier).unwrap_or(u32::MAX);
        let seq = self.next_seq;
        self.next_seq += 1;
        self.ranges.push(Range { seq, start, end, held, blockers, owner });
        (LockKey(seq), blockers == 0)
    }

    /// Gives a range back, granted or not. Owners of ranges that are granted by it are appended to `granted` in
    /// order of arrival.
    pub fn release(&mut self, key: LockKey, granted: &mut Vec<T>) {
        let Some(position) = self.position(key) else { return };
        let gone = self.ranges.swap_remove(position);
        self.unblock(gone, None, granted);
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

    /// Later ranges no longer wait for `before`, or only as far as they would for `after`.
    fn unblock(&mut self, before: Range<T>, after: Option<Held>, granted: &mut Vec<T>) {
        let ignore = self.ignore;
        for range in &mut self.ranges {
            if range.seq <= before.seq || !range.overlaps(before.start, before.end) {
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
        self.fresh.sort_unstable_by_key(|(seq, _)| *seq);
        granted.extend(self.fresh.drain(..).map(|(_, owner)| owner));
    }

    /// Whether a live range is granted.
    #[must_use]
    pub fn is_granted(&self, key: LockKey) -> bool {
        self.position(key).is_some_and(|at| self.ranges[at].blockers == 0)
    }

    fn position(&self, key: LockKey) -> Option<usize> {
        self.ranges.iter().position(|r| r.seq == key.0)
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
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[derive(Debug, Clone)]
    enum Step {
        Acquire { start: u64, len: u64, kind: LockKind },
        Release(usize),
        Settle(usize),
    }

    fn step() -> impl Strategy<Value = Step> {
        let kind = prop_oneof![Just(LockKind::Read), Just(LockKind::Write), Just(LockKind::Copy)];
        prop_oneof![
            4 => (0u64..16, 1u64..6, kind).prop_map(|(start, len, kind)| Step::Acquire { start, len, kind }),
            3 => any::<usize>().prop_map(Step::Release),
            1 => any::<usize>().prop_map(Step::Settle),
        ]
    }

    /// The naive model: a list in order of arrival; a range is granted when nothing before it conflicts.
    #[derive(Debug, Clone, Copy)]
    struct Naive {
        owner: u32,
        start: u64,
        end: u64,
        held: Held,
    }

    fn naive_granted(list: &[Naive]) -> Vec<u32> {
        let free = |i: usize| {
            list[..i].iter().all(|e| {
                let apart = e.end <= list[i].start || list[i].end <= e.start;
                apart || !conflicts(e.held, list[i].held)
            })
        };
        (0..list.len()).filter(|i| free(*i)).map(|i| list[i].owner).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn rule_02_locks_agree_with_a_naive_list(steps in proptest::collection::vec(step(), 1..80)) {
            let mut locks = RangeLocks::with_capacity(8);
            let mut model: Vec<(LockKey, Naive)> = Vec::new();
            let mut granted: Vec<u32> = Vec::new();
            for (owner, step) in (0u32..).zip(steps) {
                let mut fresh = Vec::new();
                match step {
                    Step::Acquire { start, len, kind } => {
                        let end = start + len;
                        let (key, now) = locks.acquire(start, end, kind, owner);
                        let held = match kind {
                            LockKind::Read => Held::Read,
                            LockKind::Write => Held::Write,
                            LockKind::Copy => Held::Copy,
                        };
                        model.push((key, Naive { owner, start, end, held }));
                        if now {
                            fresh.push(owner);
                        }
                    }
                    Step::Release(at) if !model.is_empty() => {
                        let (key, gone) = model.remove(at % model.len());
                        granted.retain(|o| *o != gone.owner);
                        locks.release(key, &mut fresh);
                    }
                    Step::Settle(at) if !model.is_empty() => {
                        let at = at % model.len();
                        let (key, range) = model[at];
                        if range.held == Held::Write && granted.contains(&range.owner) {
                            model[at].1.held = Held::Settled;
                        }
                        locks.settle(key, &mut fresh);
                    }
                    Step::Release(_) | Step::Settle(_) => {}
                }
                let in_order = fresh.windows(2).all(|w| w[0] < w[1]);
                prop_assert!(in_order, "granted out of order: {fresh:?}");
                granted.extend(fresh);
                granted.sort_unstable();
                let list: Vec<Naive> = model.iter().map(|(_, n)| *n).collect();
                prop_assert_eq!(&granted, &naive_granted(&list));
                prop_assert_eq!(locks.len(), model.len());
            }
        }
    }

    #[test]
    fn rule_02_a_waiting_writer_is_not_overtaken_by_readers() {
        let mut locks = RangeLocks::with_capacity(4);
        let (reader, now) = locks.acquire(0, 8, LockKind::Read, 1);
        assert!(now);
        let (writer, now) = locks.acquire(4, 12, LockKind::Write, 2);
        assert!(!now);
        let (_, now) = locks.acquire(4, 5, LockKind::Read, 3);
        assert!(!now, "a later reader must queue behind the writer");
        let mut granted = Vec::new();
        locks.release(reader, &mut granted);
        assert_eq!(granted, [2]);
        granted.clear();
        locks.release(writer, &mut granted);
        assert_eq!(granted, [3]);
    }

    #[test]
    fn rule_06_a_settled_write_lets_copies_in_and_keeps_hosts_out() {
        let mut locks = RangeLocks::with_capacity(4);
        let (writer, _) = locks.acquire(0, 8, LockKind::Write, 1);
        let (_, now) = locks.acquire(0, 8, LockKind::Copy, 2);
        assert!(!now);
        let (_, now) = locks.acquire(0, 1, LockKind::Read, 3);
        assert!(!now);
        let mut granted = Vec::new();
        locks.settle(writer, &mut granted);
        assert_eq!(granted, [2]);
        granted.clear();
        locks.release(writer, &mut granted);
        assert_eq!(granted, [3]);
    }
}
