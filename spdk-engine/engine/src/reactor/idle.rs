//! When a core without work goes on looking for some, and when it sleeps.
//!
//! *Policy.* To sleep and be woken costs some microseconds of latency and of processor time; to look costs processor
//! time only. A core looks for a few times the gap that has lately passed between two pieces of work, as long as that is
//! short ([`Policy::spin_max_ns`]): under load the next work then comes before the core has slept. Where gaps are long
//! it would come after the sleep anyway, and the core looks for [`Policy::spin_min_ns`] only. An idle core costs
//! nothing; one with a request now and then costs about its requests.
//!
//! The figures behind the default are in `docs/performance.md`.

use super::driver::Nanos;

/// When to spin and when to sleep.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Policy {
    /// How long to look for work when none is expected soon, in nanoseconds.
    pub spin_min_ns: Nanos,
    /// How long to look for work at most, in nanoseconds; and the gap from which on none is expected.
    pub spin_max_ns: Nanos,
}

impl Policy {
    /// A data core.
    pub const POLL: Self = Self { spin_min_ns: 10_000, spin_max_ns: 200_000 };
    /// Sleeps at once: the control core, which shares a processor with others, and all cores in interrupt mode.
    pub const SLEEP: Self = Self { spin_min_ns: 0, spin_max_ns: 0 };
}

/// Gaps are averaged over about this many.
const AVERAGE_OVER: u64 = 8;
/// Spin for so many average gaps.
const GAPS: u64 = 4;
/// Longer gaps count as this many times [`Policy::spin_max_ns`], so that a busy core is recognised again soon after a
/// pause.
const GAP_MAX: u64 = 8;

/// What a core knows of its gaps.
#[derive(Debug)]
pub struct Idle {
    policy: Policy,
    /// Average gap between two pieces of work.
    gap_ns: Nanos,
    last_work: Nanos,
    idle: bool,
}

impl Idle {
    /// A core that has just begun to work.
    #[must_use]
    pub fn new(policy: Policy, now: Nanos) -> Self {
        Self { policy, gap_ns: 0, last_work: now, idle: false }
    }

    /// There was work in the turn that ended `now`.
    pub fn worked(&mut self, now: Nanos) {
        if std::mem::take(&mut self.idle) {
            self.learn(now);
        }
        self.last_work = now;
    }

    /// The core has slept and is about to look again.
    pub fn woke(&mut self, now: Nanos) {
        self.learn(now);
        self.idle = false;
        self.last_work = now;
    }

    fn learn(&mut self, now: Nanos) {
        let gap = now.saturating_sub(self.last_work).min(self.policy.spin_max_ns * GAP_MAX);
        self.gap_ns = (self.gap_ns * (AVERAGE_OVER - 1) + gap) / AVERAGE_OVER;
    }

    /// There was no work in the turn that ended `now`: whether to sleep.
    pub fn is_over(&mut self, now: Nanos) -> bool {
        self.idle = true;
        now.saturating_sub(self.last_work) >= self.limit()
    }

    fn limit(&self) -> Nanos {
        if self.gap_ns > self.policy.spin_max_ns {
            return self.policy.spin_min_ns;
        }
        (self.gap_ns * GAPS).clamp(self.policy.spin_min_ns, self.policy.spin_max_ns)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const US: Nanos = 1_000;

    /// Work every `gap`; how long the core spins before it would sleep, after many of them.
    fn settled(gap: Nanos, times: u32) -> Nanos {
        let mut idle = Idle::new(Policy::POLL, 0);
        let mut now = 0;
        for _ in 0..times {
            idle.is_over(now);
            now += gap;
            idle.worked(now);
        }
        idle.limit()
    }

    #[test]
    fn a_busy_core_does_not_sleep_between_requests() {
        for gap in [US, 20 * US, 60 * US, 150 * US] {
            assert!(settled(gap, 100) > gap, "{gap}");
        }
    }

    #[test]
    fn a_core_with_rare_requests_sleeps_soon() {
        for gap in [300 * US, 5_000 * US, 1_000_000 * US] {
            assert_eq!(settled(gap, 100), Policy::POLL.spin_min_ns, "{gap}");
        }
    }

    #[test]
    fn one_long_pause_is_forgotten_soon() {
        let mut idle = Idle::new(Policy::POLL, 0);
        let mut now = 0;
        let mut work = |gap: Nanos| {
            idle.is_over(now);
            now += gap;
            idle.worked(now);
            idle.limit()
        };
        for _ in 0..100 {
            work(30 * US);
        }
        work(1_000_000 * US);
        let needed = (0..).find(|_| work(30 * US) > 30 * US).unwrap_or(u32::MAX);
        assert!(needed <= 16, "{needed} requests until the core spins again");
    }

    #[test]
    fn a_core_that_must_not_spin_sleeps_at_once() {
        let mut idle = Idle::new(Policy::SLEEP, 7);
        assert!(idle.is_over(7));
    }
}
