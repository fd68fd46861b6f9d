//! What hosts did and saw, and whether one order of it explains every read.
//!
//! *What it is.* Each block is a register. Every write has a value of its own, so it is known which write each read
//! saw. By the theorem of Gibbons and Korach such a history is linearisable exactly when the *zones* of its values
//! fit: for a value, take the write and its reads; `f` is their earliest end, `s` their latest start. If `f < s` the
//! register must have held the value during the whole of `[f, s]` (a forward zone); else there must be a moment in
//! `[s, f]` at which it did (a backward zone). So: forward zones must not overlap one another, and no backward zone
//! may lie wholly inside a forward one. That needs a sort and one pass, however many operations overlap.
//!
//! A write that was answered with an error has no end: it may take effect at any time after its start, or never. A
//! write whose path was given up is *abandoned*: it took effect before that or never will (rule 17). Value 0 is what
//! the blocks held before everything.

use std::collections::BTreeMap;

/// A moment: a counter over all starts and ends, never the same twice.
pub type Stamp = u64;

/// The first moment any operation may have.
pub const FIRST_STAMP: Stamp = 2;

const NEVER: Stamp = Stamp::MAX;

#[derive(Debug, Clone, Copy)]
struct Value {
    write_start: Stamp,
    write_end: Stamp,
    /// Earliest end of write and reads.
    first_end: Stamp,
    /// Latest start of write and reads.
    last_start: Stamp,
    reads: u32,
    /// When the host gave the write's path up.
    abandoned: Stamp,
}

/// The history of all blocks.
#[derive(Debug, Default)]
pub struct History {
    blocks: BTreeMap<u64, BTreeMap<u64, Value>>,
    /// What blocks held at first is not known: the first read tells.
    restarted: bool,
}

/// Why a block's history has no order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Contradiction {
    /// The block.
    pub block: u64,
    /// What is wrong.
    pub what: String,
}

impl std::fmt::Display for Contradiction {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "block {}: {}", self.block, self.what)
    }
}

/// A value that stood before everything.
const INITIAL: Value = Value { write_start: 0, write_end: 1, first_end: 1, last_start: 0, reads: 0, abandoned: NEVER };

impl History {
    /// Begins anew: whatever blocks hold is what they held before everything, but one value each.
    pub fn restart(&mut self) {
        self.blocks.clear();
        self.restarted = true;
    }

    fn value(&mut self, block: u64, value: u64) -> Option<&mut Value> {
        let values = self.blocks.entry(block).or_insert_with(|| BTreeMap::from([(0, INITIAL)]));
        values.get_mut(&value)
    }

    /// A write of a new value begins.
    pub fn write_begins(&mut self, block: u64, value: u64, at: Stamp) {
        self.value(block, 0);
        if let Some(values) = self.blocks.get_mut(&block) {
            let fresh = Value {
                write_start: at,
                write_end: NEVER,
                first_end: NEVER,
                last_start: at,
                reads: 0,
                abandoned: NEVER,
            };
            values.entry(value).or_insert(fresh);
        }
    }

    /// The write of a value was acknowledged.
    pub fn write_ends(&mut self, block: u64, value: u64, at: Stamp) {
        if let Some(v) = self.value(block, value) {
            v.write_end = at;
            v.first_end = v.first_end.min(at);
        }
    }

    /// The write's path was given up: it has taken effect by now or never will.
    pub fn write_abandoned(&mut self, block: u64, value: u64, at: Stamp) {
        if let Some(v) = self.value(block, value) {
            v.abandoned = v.abandoned.min(at);
        }
    }

    /// A read returned a value.
    ///
    /// # Errors
    /// A value that nobody has begun to write by then.
    pub fn read(&mut self, block: u64, value: u64, start: Stamp, end: Stamp) -> Result<(), Contradiction> {
        self.value(block, 0);
        if let Some(values) = self.blocks.get_mut(&block).filter(|_| self.restarted) {
            values.entry(value).or_insert(INITIAL);
        }
        match self.value(block, value) {
            Some(v) if v.write_start < end => {
                v.first_end = v.first_end.min(end);
                v.last_start = v.last_start.max(start);
                v.reads += 1;
                Ok(())
            }
            _ => Err(Contradiction { block, what: format!("a read returned {value}, which nobody wrote there") }),
        }
    }

    /// Checks every block.
    ///
    /// # Errors
    /// The first block without an order that explains its reads.
    pub fn check(&self) -> Result<(), Contradiction> {
        self.blocks.iter().try_for_each(|(block, values)| check_block(*block, values))
    }
}

fn check_block(block: u64, values: &BTreeMap<u64, Value>) -> Result<(), Contradiction> {
    let seen = values.iter().filter(|(_, v)| v.write_end != NEVER || v.reads > 0);
    let (mut forward, mut backward) = (Vec::new(), Vec::new());
    for (value, v) in seen {
        let first_end = v.first_end.min(v.abandoned);
        if first_end < v.last_start {
            forward.push((first_end, v.last_start, *value));
        } else {
            backward.push((v.last_start, first_end, *value));
        }
    }
    forward.sort_unstable();
    let wrong = |what: String| Err(Contradiction { block, what });
    for pair in forward.windows(2) {
        let ((start_a, end_a, a), (start_b, _, b)) = (pair[0], pair[1]);
        if start_b < end_a {
            return wrong(format!(
                "value {a} must have stood from {start_a} to {end_a}, but value {b} was there at {start_b}: \
                 a write was lost, a read was stale or flipped back"
            ));
        }
    }
    for (start, end, value) in backward {
        let before = forward.partition_point(|zone| zone.0 < start);
        if before > 0 && forward[before - 1].1 > end {
            let (from, to, stood) = forward[before - 1];
            return wrong(format!(
                "value {value} was there between {start} and {end}, but value {stood} stood from {from} to {to}: \
                 a write was lost, a read was stale or flipped back"
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn acked(history: &mut History, value: u64, start: Stamp, end: Stamp) {
        history.write_begins(0, value, start);
        history.write_ends(0, value, end);
    }

    #[test]
    fn a_lost_write_is_seen() {
        let mut history = History::default();
        acked(&mut history, 7, 2, 3);
        history.read(0, 0, 4, 5).unwrap();
        assert!(history.check().is_err());
    }

    #[test]
    fn a_read_that_flips_back_is_seen_even_for_a_write_never_acknowledged() {
        let mut history = History::default();
        history.write_begins(0, 7, 2);
        history.read(0, 7, 3, 4).unwrap();
        history.read(0, 0, 5, 6).unwrap();
        assert!(history.check().is_err());
    }

    #[test]
    fn overlapping_operations_may_take_either_order() {
        let mut history = History::default();
        history.write_begins(0, 7, 2);
        history.write_begins(0, 8, 3);
        history.write_ends(0, 7, 6);
        history.write_ends(0, 8, 7);
        history.read(0, 0, 4, 5).unwrap();
        history.read(0, 7, 8, 9).unwrap();
        assert_eq!(history.check(), Ok(()));
        history.read(0, 8, 10, 11).unwrap();
        assert!(history.check().is_err(), "7 was read after both ended, so 8 was overwritten");
    }

    #[test]
    fn an_abandoned_write_may_not_take_effect_later() {
        let mut history = History::default();
        history.write_begins(0, 7, 2);
        history.write_abandoned(0, 7, 3);
        history.read(0, 0, 4, 5).unwrap();
        assert_eq!(history.check(), Ok(()), "it never took effect");
        history.read(0, 7, 6, 7).unwrap();
        assert!(history.check().is_err(), "a ghost");
    }

    #[test]
    fn a_value_from_nowhere_is_refused() {
        assert!(History::default().read(0, 9, 2, 3).is_err());
    }

    #[test]
    fn after_a_restart_a_block_holds_one_unknown_value_until_it_is_written() {
        let restarted = || {
            let mut history = History::default();
            acked(&mut history, 7, 2, 3);
            history.restart();
            history.read(0, 9, 4, 5).unwrap();
            history
        };
        let mut history = restarted();
        history.read(0, 9, 6, 7).unwrap();
        acked(&mut history, 8, 8, 9);
        history.read(0, 8, 10, 11).unwrap();
        assert_eq!(history.check(), Ok(()));
        history.read(0, 9, 12, 13).unwrap();
        assert!(history.check().is_err(), "it was overwritten");
        let mut history = restarted();
        history.read(0, 7, 6, 7).unwrap();
        assert!(history.check().is_err(), "two values at the beginning");
    }

    /// Brute force: is there an order of operations that respects real time and explains all reads?
    fn has_order(ops: &[(bool, u64, Stamp, Stamp)], done: u32, held: u64) -> bool {
        if done == (1 << ops.len()) - 1 {
            return true;
        }
        let left = |i: usize| done & (1 << i) == 0;
        (0..ops.len()).filter(|i| left(*i)).any(|i| {
            let (is_write, value, start, _) = ops[i];
            let first = (0..ops.len()).filter(|j| left(*j) && *j != i).all(|j| ops[j].3 > start);
            let fits = is_write || value == held;
            first && fits && has_order(ops, done | 1 << i, if is_write { value } else { held })
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn zones_agree_with_brute_force(
            shape in proptest::collection::vec((any::<bool>(), 0usize..3, 0u64..1000, 1u64..400), 1..7),
        ) {
            // Distinct moments: scale by the count and add the index.
            let n = shape.len() as u64 * 2;
            let mut ops = Vec::new();
            let mut written = vec![0u64];
            for (i, (is_write, pick, start, len)) in shape.iter().enumerate() {
                let value = if *is_write { i as u64 + 1 } else { written[pick % written.len()] };
                if *is_write {
                    written.push(value);
                }
                let i = i as u64 * 2;
                ops.push((*is_write, value, FIRST_STAMP + start * n + i, FIRST_STAMP + (start + len) * n + i + 1));
            }
            let mut history = History::default();
            for (_, value, start, end) in ops.iter().filter(|o| o.0) {
                acked(&mut history, *value, *start, *end);
            }
            let mut ok = true;
            for (_, value, start, end) in ops.iter().filter(|o| !o.0) {
                ok &= history.read(0, *value, *start, *end).is_ok();
            }
            prop_assert_eq!(ok && history.check().is_ok(), has_order(&ops, 0, 0));
        }
    }
}
