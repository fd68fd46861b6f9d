//! From dates, which objects and plans use, to the runtime's timers.

use jiff::Timestamp;
use tokio::time::Instant;

/// The longest time that is slept in one go: the date may be set while we sleep.
const LONGEST_SLEEP_MS: u64 = 60_000;

/// The instant of a date. One that has passed is now; one far ahead is looked at again before.
pub(crate) fn instant(at: Timestamp) -> Instant {
    let left = u64::try_from(at.duration_since(Timestamp::now()).as_millis()).unwrap_or(0);
    // One more: a timer that ends a little early would find nothing due.
    let wait = if left == 0 { 0 } else { (left + 1).min(LONGEST_SLEEP_MS) };
    Instant::now() + std::time::Duration::from_millis(wait)
}

/// Sleeps until a date; for ever without one.
pub(crate) async fn sleep_until(at: Option<Timestamp>) {
    match at {
        Some(at) => tokio::time::sleep_until(instant(at)).await,
        None => std::future::pending().await,
    }
}
