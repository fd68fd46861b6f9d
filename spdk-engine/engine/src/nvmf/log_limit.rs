//! A bound on log lines that a host can cause.
//!
//! *Invariants.* At most [`LINES`] lines per [`WINDOW_NS`]; the first line after that says how many were left out.

use std::cell::Cell;

use crate::reactor::driver::{NANOS_PER_MS, Nanos};

/// Lines per window.
pub const LINES: u32 = 20;
/// Length of a window.
pub const WINDOW_NS: Nanos = 10_000 * NANOS_PER_MS;

/// The bound; see the module.
#[derive(Debug, Default)]
pub struct LogLimit {
    window_end: Cell<Nanos>,
    lines: Cell<u32>,
    left_out: Cell<u64>,
}

impl LogLimit {
    /// Whether a line may be written now, and if so how many were left out before it.
    pub fn allow(&self, now: Nanos) -> Option<u64> {
        if now >= self.window_end.get() {
            self.window_end.set(now + WINDOW_NS);
            self.lines.set(0);
        }
        if self.lines.get() >= LINES {
            self.left_out.set(self.left_out.get() + 1);
            return None;
        }
        self.lines.set(self.lines.get() + 1);
        Some(self.left_out.take())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounded_per_window() {
        let limit = LogLimit::default();
        let allowed = (0..100).filter(|_| limit.allow(5).is_some()).count();
        assert_eq!(allowed, LINES as usize);
        assert_eq!(limit.allow(5 + WINDOW_NS), Some(100 - u64::from(LINES)));
        assert_eq!(limit.allow(5 + WINDOW_NS), Some(0));
    }
}
