//! Whether the metadata under running I/O is durable: a forced-unit-access write must not rest on metadata that is not.
//!
//! *Invariants.* A flush covers the changes that had ended when it was sent. While a change is under way nothing is known
//! to be durable, since its clusters may show in the map already.

use std::sync::atomic::{AtomicU64, Ordering};

/// Metadata of one store, as all cores see it.
#[derive(Debug, Default)]
pub struct Durability {
    /// Changes that have ended.
    written: AtomicU64,
    under_way: AtomicU64,
    /// Changes that had ended before a flush was sent that has succeeded.
    durable: AtomicU64,
}

/// Metadata is being written while this lives.
#[derive(Debug)]
pub struct Change<'a>(&'a Durability);

/// What a flush covers.
#[derive(Debug, Clone, Copy)]
pub struct Mark(u64);

impl Durability {
    /// Metadata is going to be written.
    #[must_use]
    pub fn change(&self) -> Change<'_> {
        self.under_way.fetch_add(1, Ordering::AcqRel);
        Change(self)
    }

    /// Whether metadata may be lost with power now.
    #[must_use]
    pub fn is_volatile(&self) -> bool {
        self.under_way.load(Ordering::Acquire) > 0
            || self.durable.load(Ordering::Acquire) < self.written.load(Ordering::Acquire)
    }

    /// Taken before a flush is sent.
    #[must_use]
    pub fn mark(&self) -> Mark {
        Mark(self.written.load(Ordering::Acquire))
    }

    /// The flush sent after `mark` was taken has succeeded.
    pub fn flushed(&self, mark: Mark) {
        self.durable.fetch_max(mark.0, Ordering::AcqRel);
    }
}

impl Drop for Change<'_> {
    fn drop(&mut self) {
        // In this order: who sees no change under way sees that this one was written.
        self.0.written.fetch_add(1, Ordering::AcqRel);
        self.0.under_way.fetch_sub(1, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_flush_sent_after_a_change_covers_it() {
        let durability = Durability::default();
        assert!(!durability.is_volatile());
        let early = durability.mark();
        let change = durability.change();
        assert!(durability.is_volatile());
        let during = durability.mark();
        drop(change);
        durability.flushed(early);
        durability.flushed(during);
        assert!(durability.is_volatile());
        let after = durability.mark();
        drop(durability.change());
        durability.flushed(after);
        assert!(durability.is_volatile(), "another change came after the flush was sent");
        durability.flushed(durability.mark());
        assert!(!durability.is_volatile());
    }
}
