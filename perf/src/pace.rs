//! How fast a worker may issue, when it is not to be as fast as it can.
//!
//! *What it is.* Turns at a fixed distance. Who comes late may make up for at most [`LATE_NS`]: a pause of the target is not
//! followed by a flood.

use addax_engine::reactor::driver::{NANOS_PER_MS, Nanos};

/// Time whose missed turns are made up for.
const LATE_NS: Nanos = 50 * NANOS_PER_MS;

/// The turns of a worker; see the module.
#[derive(Debug, Clone, Copy)]
pub struct Pace {
    /// Between two turns; 0 for no limit.
    interval_ns: Nanos,
    next: Nanos,
}

impl Pace {
    /// Of one of `workers` that together issue at most `rate` I/Os per second; as fast as it goes without a rate.
    #[must_use]
    pub fn new(rate: Option<u32>, workers: usize) -> Self {
        let interval_ns = rate.map_or(0, |rate| 1_000_000_000 * workers as u64 / u64::from(rate.max(1)));
        Self { interval_ns, next: 0 }
    }

    /// Takes a turn, if one has come by `elapsed`.
    ///
    /// # Errors
    /// The time until the next one.
    pub fn take(&mut self, elapsed: Nanos) -> Result<(), Nanos> {
        if self.interval_ns == 0 {
            return Ok(());
        }
        if elapsed < self.next {
            return Err(self.next - elapsed);
        }
        self.next = self.next.max(elapsed.saturating_sub(LATE_NS)) + self.interval_ns;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Nanos = 1_000_000_000;

    fn taken(pace: &mut Pace, from: Nanos, to: Nanos) -> u64 {
        let mut count = 0;
        for at in (from..to).step_by(100_000) {
            while pace.take(at).is_ok() {
                count += 1;
            }
        }
        count
    }

    #[test]
    fn the_rate_is_kept_by_all_workers_together() {
        assert_eq!(taken(&mut Pace::new(Some(1000), 1), 0, SECOND), 1000);
        assert_eq!(taken(&mut Pace::new(Some(1000), 4), 0, SECOND), 250);
        let mut free = Pace::new(None, 1);
        assert!((0..100_000).all(|_| free.take(0).is_ok()));
    }

    #[test]
    fn a_pause_is_followed_by_no_flood() {
        let mut pace = Pace::new(Some(1000), 1);
        assert_eq!(taken(&mut pace, 0, SECOND), 1000);
        // Ten seconds of silence: of their turns fifty are left, and the one that is due.
        let burst = (0..).take_while(|_| pace.take(11 * SECOND).is_ok()).count();
        assert_eq!(burst, 51);
        assert_eq!(pace.take(11 * SECOND), Err(1_000_000));
    }
}
