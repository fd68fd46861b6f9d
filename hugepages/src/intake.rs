//! A buffer that is filled from its front while what was filled before is already shared.
//!
//! *What it is.* A connection receives into [`Intake::room`], reads what came in ([`Intake::filled_from`]), and hands
//! parts of it on as counted [`BufSlice`]s ([`Intake::share`]) without copying them.
//!
//! *Invariants.* Bytes below `shared` may have other holders and are never written again until all of them are gone
//! ([`Intake::restart`] checks that); bytes above belong to the intake alone. A slice handed out covers its own bytes only:
//! no way leads from it to the rest of the buffer.
#![allow(unsafe_code)]

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use crate::buf::{Buf, BufSlice, HeapBlock};
use crate::memory::Memory;

/// See the module.
pub struct Intake {
    block: Arc<HeapBlock>,
    len: usize,
    /// Bytes from the front that others may hold.
    shared: usize,
}

impl std::fmt::Debug for Intake {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Intake").field("len", &self.len).field("shared", &self.shared).finish_non_exhaustive()
    }
}

impl Intake {
    /// A zeroed buffer of `len` bytes.
    #[must_use]
    pub fn new(len: usize) -> Self {
        Self { block: Arc::new(HeapBlock::new(len)), len, shared: 0 }
    }

    /// Bytes of the buffer.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no room at all.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    fn base(&self) -> NonNull<u8> {
        self.block.ptr()
    }

    /// The bytes from `start` on, to be written; `start` is at least as far as what was shared.
    ///
    /// # Panics
    /// When `start` lies in the shared part or beyond the end.
    pub fn room(&mut self, start: usize) -> &mut [u8] {
        assert!(start >= self.shared && start <= self.len, "byte {start} of {} ({} shared)", self.len, self.shared);
        // SAFETY: the range lies in the block, which this handle keeps alive, and is initialised (the block began as
        // zeroes). No other handle reaches beyond `shared`, so this is its only user while the borrow lasts.
        unsafe { std::slice::from_raw_parts_mut(self.base().as_ptr().add(start), self.len - start) }
    }

    /// The bytes of a range that was written.
    ///
    /// # Panics
    /// When the range lies beyond the end.
    #[must_use]
    pub fn bytes(&self, from: usize, to: usize) -> &[u8] {
        assert!(from <= to && to <= self.len, "bytes {from} to {to} of {}", self.len);
        // SAFETY: the range lies in the block and is initialised. Nobody writes to it while the borrow lasts: what is
        // shared is only read, and the rest is reached through this handle alone.
        unsafe { std::slice::from_raw_parts(self.base().as_ptr().add(from), to - from) }
    }

    /// Hands on a range; from now on nothing up to its end is written.
    ///
    /// # Panics
    /// When the range lies beyond the end.
    #[must_use]
    pub fn share(&mut self, from: usize, to: usize) -> BufSlice {
        assert!(from <= to && to <= self.len, "bytes {from} to {to} of {}", self.len);
        self.shared = self.shared.max(to);
        // SAFETY: the range lies in the block, which the new handle keeps alive, and is initialised.
        let memory = unsafe { Memory::new(self.base().add(from), to - from) };
        Buf::part_of(Arc::clone(&self.block), memory).into_slice()
    }

    /// Whether others still hold parts.
    #[must_use]
    pub fn is_held(&self) -> bool {
        let held = Arc::strong_count(&self.block) > 1;
        if !held {
            // Pairs with the release of the handles that were dropped: their accesses are over.
            fence(Ordering::Acquire);
        }
        held
    }

    /// Begins anew at the front; false, and nothing changed, while others hold parts.
    pub fn restart(&mut self) -> bool {
        if self.shared > 0 && self.is_held() {
            return false;
        }
        self.shared = 0;
        true
    }

    /// Moves a range that nobody else holds to the front and begins anew there; for the start of something whose rest
    /// does not fit behind it. False, and nothing changed, while others hold parts.
    ///
    /// # Panics
    /// When the range lies beyond the end.
    pub fn restart_with(&mut self, from: usize, to: usize) -> bool {
        if !self.restart() {
            return false;
        }
        self.room(0).copy_within(from..to, 0);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_keep_their_bytes_while_the_rest_is_filled() {
        let mut intake = Intake::new(64);
        intake.room(0)[..8].copy_from_slice(b"capsule1");
        let first = intake.share(4, 8);
        intake.room(8)[..4].copy_from_slice(b"next");
        let second = intake.share(8, 12);
        assert_eq!((first.to_vec(), second.to_vec()), (b"ule1".to_vec(), b"next".to_vec()));
        assert_eq!(intake.bytes(0, 12), b"capsule1next");
        assert!(!intake.restart() && intake.is_held());
        drop(first);
        assert!(!intake.restart_with(8, 12));
        drop(second);
        assert!(intake.restart_with(8, 12));
        assert_eq!(intake.bytes(0, 4), b"next");
    }

    #[test]
    fn a_part_leads_to_nothing_beyond_it() {
        let mut intake = Intake::new(4096);
        let part = intake.share(100, 200);
        assert_eq!((part.len(), part.buf().len(), part.buf().capacity()), (100, 100, 100));
        assert_eq!(part.registered_offset(), None);
        let mut own = part.buf().clone();
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| own.set_len(101))).is_err());
        let mut part = part;
        assert!(part.get_mut().is_none(), "the intake and the clone hold the block too");
    }

    #[test]
    #[should_panic(expected = "byte 10 of 64 (20 shared)")]
    fn what_is_shared_is_not_written() {
        let mut intake = Intake::new(64);
        let _part = intake.share(0, 20);
        let _ = intake.room(10);
    }
}
