//! What is known of one unit, in eight bytes.
//!
//! *Fields.* `acked`: the last write that was acknowledged (0 for none). `seen`: the newest write that a read has
//! returned, never below `acked`. `last`: the newest write that was issued. The latter two are kept as distances from
//! `acked`, which an acknowledgement brings back to zero; a unit with [`DISTANCE_MAX`] writes issued and none
//! acknowledged takes no more of them. Flags: a write is in flight; a write of which the fate is unknown may be there
//! (`uncertain`); a mismatch was reported already.
//!
//! *Invariants.* `acked ≤ seen ≤ last`. At most one write of a unit is in flight.

/// Most writes of a unit that may be issued beyond the last acknowledged one.
pub const DISTANCE_MAX: u32 = 255;

const SEEN_SHIFT: u32 = 32;
const LAST_SHIFT: u32 = 40;
const IN_FLIGHT: u64 = 1 << 48;
const UNCERTAIN: u64 = 1 << 49;
const REPORTED: u64 = 1 << 50;

/// The state of one unit; all-zero for one that was never written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct UnitState(u64);

impl UnitState {
    /// From [`Self::bits`]; `None` when the bits describe no state.
    #[must_use]
    pub fn from_bits(bits: u64) -> Option<Self> {
        let state = Self(bits);
        let known = bits & !(IN_FLIGHT | UNCERTAIN | REPORTED) < 1 << 48;
        (known && state.seen() <= state.last()).then_some(state)
    }

    /// The state as a number, for the log.
    #[must_use]
    pub fn bits(self) -> u64 {
        self.0
    }

    /// Last acknowledged write.
    #[must_use]
    pub fn acked(self) -> u32 {
        self.0 as u32
    }

    /// Newest write that was acknowledged or read.
    #[must_use]
    pub fn seen(self) -> u32 {
        self.acked() + (self.0 >> SEEN_SHIFT & 0xff) as u32
    }

    /// Newest write that was issued.
    #[must_use]
    pub fn last(self) -> u32 {
        self.acked() + (self.0 >> LAST_SHIFT & 0xff) as u32
    }

    /// Whether a write is in flight.
    #[must_use]
    pub fn in_flight(self) -> bool {
        self.0 & IN_FLIGHT != 0
    }

    /// Whether a write newer than `seen` may be there or not.
    #[must_use]
    pub fn uncertain(self) -> bool {
        self.0 & UNCERTAIN != 0
    }

    /// Whether a mismatch was reported since the last acknowledged write.
    #[must_use]
    pub fn reported(self) -> bool {
        self.0 & REPORTED != 0
    }

    /// Whether another write can be issued.
    #[must_use]
    pub fn can_write(self) -> bool {
        !self.in_flight() && self.last() - self.acked() < DISTANCE_MAX && self.last() < u32::MAX - 1
    }

    /// A write was issued. Only when [`Self::can_write`].
    #[must_use]
    pub fn issue(self) -> Self {
        Self((self.0 + (1 << LAST_SHIFT)) | IN_FLIGHT)
    }

    /// The write in flight was acknowledged.
    #[must_use]
    pub fn acknowledge(self) -> Self {
        Self(u64::from(self.last()))
    }

    /// The write in flight has failed, or its fate will never be known.
    #[must_use]
    pub fn abandon(self) -> Self {
        if self.in_flight() { Self((self.0 & !IN_FLIGHT) | UNCERTAIN) } else { self }
    }

    /// A read has returned write `seq`, between `seen` and `last`; `settled` when nothing else can be there now.
    #[must_use]
    pub fn observe(self, seq: u32, settled: bool) -> Self {
        let distance = u64::from(seq.clamp(self.seen(), self.last()) - self.acked());
        let bits = (self.0 & !(0xff << SEEN_SHIFT)) | distance << SEEN_SHIFT;
        Self(if settled { bits & !UNCERTAIN } else { bits })
    }

    /// A mismatch was reported.
    #[must_use]
    pub fn report(self) -> Self {
        Self(self.0 | REPORTED)
    }

    /// Whether it was ever written.
    #[must_use]
    pub fn written(self) -> bool {
        self.last() > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_write_is_issued_acknowledged_and_forgotten_as_a_distance() {
        let state = UnitState::default().issue();
        assert_eq!((state.acked(), state.last(), state.in_flight()), (0, 1, true));
        let state = state.acknowledge();
        assert_eq!((state.acked(), state.seen(), state.last(), state.in_flight()), (1, 1, 1, false));
        assert_eq!(UnitState::from_bits(state.bits()), Some(state));
    }

    #[test]
    fn failed_writes_leave_doubt_until_one_is_read() {
        let state = UnitState::default().issue().acknowledge().issue().abandon().issue().abandon();
        assert!(state.uncertain());
        assert_eq!((state.acked(), state.seen(), state.last()), (1, 1, 3));
        let state = state.observe(2, true);
        assert_eq!((state.acked(), state.seen(), state.last(), state.uncertain()), (1, 2, 3, false));
    }

    #[test]
    fn distances_are_bounded() {
        let mut state = UnitState::default();
        for _ in 0..DISTANCE_MAX {
            assert!(state.can_write());
            state = state.issue().abandon();
        }
        assert!(!state.can_write());
        assert_eq!(state.last(), DISTANCE_MAX);
    }

    #[test]
    fn bits_that_describe_no_state_are_refused() {
        assert!(UnitState::from_bits(1 << 60).is_none());
        assert!(UnitState::from_bits(2 << SEEN_SHIFT | 1 << LAST_SHIFT).is_none());
    }
}
