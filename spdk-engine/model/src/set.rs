//! A set of replicas as bits, and the permutations by which states are brought into their normal form.
//!
//! *Invariant.* Only the lowest [`REPLICAS`] bits are ever set, so that equal sets are equal numbers.

use std::fmt;

/// Replicas of the modelled volume.
pub const REPLICAS: usize = 3;

/// A set of replicas.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Set(u8);

impl Set {
    /// No replica.
    pub const EMPTY: Self = Self(0);

    /// The set with the given bits; bits of no replica are dropped.
    #[must_use]
    pub const fn from_bits(bits: u8) -> Self {
        Self(bits & ((1 << REPLICAS) - 1))
    }

    /// The set as bits.
    #[must_use]
    pub fn bits(self) -> u8 {
        self.0
    }

    /// Whether a replica is in it.
    #[must_use]
    pub fn has(self, replica: usize) -> bool {
        self.0 & (1 << replica) != 0
    }

    /// This set and a replica.
    #[must_use]
    pub fn with(self, replica: usize) -> Self {
        Self(self.0 | 1 << replica)
    }

    /// This set without a replica.
    #[must_use]
    pub fn without(self, replica: usize) -> Self {
        Self(self.0 & !(1 << replica))
    }

    /// In either.
    #[must_use]
    pub fn or(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// In both.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// In this one alone.
    #[must_use]
    pub fn minus(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// Whether all of it is in another.
    #[must_use]
    pub fn is_in(self, other: Self) -> bool {
        self.0 & !other.0 == 0
    }

    /// How many.
    #[must_use]
    pub fn len(self) -> u32 {
        self.0.count_ones()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Its replicas in order.
    pub fn iter(self) -> impl Iterator<Item = usize> {
        (0..REPLICAS).filter(move |r| self.has(*r))
    }

    /// The set after every replica `order[i]` was renamed to `i`.
    #[must_use]
    pub(crate) fn renamed(self, order: [usize; REPLICAS]) -> Self {
        let mut bits = 0;
        for (new, old) in order.into_iter().enumerate() {
            bits |= u8::from(self.has(old)) << new;
        }
        Self(bits)
    }
}

impl fmt::Debug for Set {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("{")?;
        for (index, replica) in self.iter().enumerate() {
            let name = char::from(b'A' + u8::try_from(replica).unwrap_or(25));
            write!(f, "{}{name}", if index == 0 { "" } else { "," })?;
        }
        f.write_str("}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn renaming_keeps_size_and_follows_the_order() {
        let set = Set::EMPTY.with(0).with(2);
        assert_eq!(set.renamed([2, 0, 1]), Set::EMPTY.with(0).with(1));
        assert_eq!(format!("{set:?}"), "{A,C}");
        assert_eq!(Set::from_bits(0xff).len(), 3);
    }
}
