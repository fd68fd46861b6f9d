//! A lock-free list of free slot numbers.
//!
//! Slots `0..count` start free. [`FreeList::pop`] hands out the slot freed last (its memory is still in the cache);
//! when none was freed it hands out the lowest slot never used, so memory that load never needed is never touched.
//!
//! The list is a stack linked by slot number. Its head carries a change count beside the slot, so that a head which
//! went away and came back between load and exchange is told apart from one that stayed. The count has 32 bits: for
//! a mix-up, one thread would have to stand still for exactly a multiple of 2^32 changes.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Marks the end of the list. Slot numbers are stored plus one, so that zero is free for this.
const END: u32 = 0;

#[derive(Debug)]
pub(crate) struct FreeList {
    /// Change count in the high half, top slot plus one in the low half.
    head: AtomicU64,
    /// For each slot in the list, the slot below plus one.
    below: Box<[AtomicU32]>,
    /// Slots from here up were never handed out.
    untouched: AtomicU32,
}

impl FreeList {
    /// `count` free slots; `count` is below `u32::MAX`.
    pub(crate) fn new(count: u32) -> Self {
        debug_assert!(count < u32::MAX, "slot numbers plus one must fit u32");
        Self {
            head: AtomicU64::new(pack(0, END)),
            below: (0..count).map(|_| AtomicU32::new(END)).collect(),
            untouched: AtomicU32::new(0),
        }
    }

    /// Takes a free slot, or none when all are out.
    pub(crate) fn pop(&self) -> Option<u32> {
        let mut head = self.head.load(Ordering::Acquire);
        loop {
            let (changes, top) = unpack(head);
            if top == END {
                return self.pop_untouched();
            }
            let slot = top - 1;
            let next = self.below[slot as usize].load(Ordering::Relaxed);
            let new = pack(changes.wrapping_add(1), next);
            match self.head.compare_exchange_weak(head, new, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return Some(slot),
                Err(seen) => head = seen,
            }
        }
    }

    /// Gives back a slot that [`pop`](Self::pop) handed out. Each hand-out is given back at most once.
    pub(crate) fn push(&self, slot: u32) {
        let mut head = self.head.load(Ordering::Relaxed);
        loop {
            let (changes, top) = unpack(head);
            self.below[slot as usize].store(top, Ordering::Relaxed);
            let new = pack(changes.wrapping_add(1), slot + 1);
            match self.head.compare_exchange_weak(head, new, Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => return,
                Err(seen) => head = seen,
            }
        }
    }

    fn pop_untouched(&self) -> Option<u32> {
        let count = self.below.len() as u32;
        let next = |slot| (slot < count).then_some(slot + 1);
        self.untouched.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next).ok()
    }
}

fn pack(changes: u32, top: u32) -> u64 {
    (u64::from(changes) << 32) | u64::from(top)
}

fn unpack(head: u64) -> (u32, u32) {
    ((head >> 32) as u32, head as u32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;

    #[test]
    fn the_slot_freed_last_comes_first_and_untouched_ones_last() {
        let list = FreeList::new(3);
        assert_eq!((list.pop(), list.pop()), (Some(0), Some(1)));
        list.push(0);
        list.push(1);
        assert_eq!((list.pop(), list.pop(), list.pop(), list.pop()), (Some(1), Some(0), Some(2), None));
    }

    #[test]
    fn an_empty_list_stays_empty() {
        assert_eq!(FreeList::new(0).pop(), None);
    }

    #[test]
    fn threads_never_hold_the_same_slot() {
        const SLOTS: u32 = 5;
        let list = FreeList::new(SLOTS);
        let held: Vec<AtomicBool> = (0..SLOTS).map(|_| AtomicBool::new(false)).collect();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..20_000 {
                        let Some(slot) = list.pop() else { continue };
                        assert!(!held[slot as usize].swap(true, Ordering::AcqRel), "slot {slot} is out twice");
                        held[slot as usize].store(false, Ordering::Release);
                        list.push(slot);
                    }
                });
            }
        });
        let mut slots: Vec<u32> = std::iter::from_fn(|| list.pop()).collect();
        slots.sort_unstable();
        assert_eq!(slots, (0..SLOTS).collect::<Vec<_>>());
    }
}
