//! When a busy core offers its processor to other threads.
//!
//! *Why.* A core under load never sleeps. On a machine of few processors the control core, with an RPC, may have to
//! share one with it, and would wait for the end of a time slice of the kernel's choice. So a busy core offers its
//! processor each [`TURN_NS`]; when nobody wants it that costs a microsecond.
//!
//! *Invariant.* What takes the offer may be a job that computes for ever, which then keeps the processor for a slice
//! that is longer than the core's turn. After it the core keeps the processor for as long as it was away, at most
//! [`TURN_MAX_NS`], before it offers it again: the offers alone never cost it more than half.

use super::driver::Nanos;

/// How long a core works between two offers that nobody takes.
const TURN_NS: Nanos = 500_000;
/// How long it works at most between two offers: an RPC of the control core waits no longer.
const TURN_MAX_NS: Nanos = 5_000_000;

/// When the next offer is due.
#[derive(Debug)]
pub struct Courtesy {
    due: Nanos,
}

impl Courtesy {
    /// A core that begins to work.
    #[must_use]
    pub fn new(now: Nanos) -> Self {
        Self { due: now + TURN_NS }
    }

    /// Whether a core that has work offers its processor now.
    #[must_use]
    pub fn is_due(&self, now: Nanos) -> bool {
        now >= self.due
    }

    /// The offer was made at `before` and the core went on at `after`.
    pub fn offered(&mut self, before: Nanos, after: Nanos) {
        self.due = after + after.saturating_sub(before).clamp(TURN_NS, TURN_MAX_NS);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How much of 100 ms the core works, when each offer takes `away`.
    fn share(away: Nanos) -> f64 {
        let mut courtesy = Courtesy::new(0);
        let (mut now, mut worked) = (0, 0);
        while now < 100_000_000 {
            now += 1_000;
            worked += 1_000;
            if courtesy.is_due(now) {
                courtesy.offered(now, now + away);
                now += away;
            }
        }
        worked as f64 / now as f64
    }

    #[test]
    fn offers_that_nobody_takes_cost_next_to_nothing() {
        assert!(share(1_000) > 0.99);
    }

    #[test]
    fn a_job_that_takes_every_offer_gets_half() {
        for away in [500_000, 1_000_000, 3_000_000, 5_000_000] {
            let share = share(away);
            assert!((0.49..0.6).contains(&share), "{away} ns away: {share}");
        }
    }

    #[test]
    fn an_offer_comes_in_time_for_an_rpc_however_long_the_core_was_away() {
        let mut courtesy = Courtesy::new(0);
        courtesy.offered(10, 90_000_000_000);
        assert!(courtesy.is_due(90_000_000_000 + TURN_MAX_NS));
    }
}
