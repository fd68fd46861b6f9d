//! The server's only source of dates, so that tests can choose them. Deadlines use the runtime's clock instead.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering},
    },
};

use jiff::Timestamp;

/// Tells the date that goes into objects.
#[derive(Clone)]
pub struct Clock(Arc<dyn Fn() -> Timestamp + Send + Sync>);

impl Clock {
    /// The system's clock.
    pub fn system() -> Self {
        Self::new(Timestamp::now)
    }

    /// A clock of the caller's own.
    pub fn new(now: impl Fn() -> Timestamp + Send + Sync + 'static) -> Self {
        Self(Arc::new(now))
    }

    /// The date now.
    pub fn now(&self) -> Timestamp {
        (self.0)()
    }

    /// The date now as in `metadata.creationTimestamp`: RFC 3339 in UTC, whole seconds.
    pub fn now_text(&self) -> String {
        self.now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
    }
}

impl fmt::Debug for Clock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Clock")
    }
}

/// A clock that moves only when told to.
#[derive(Debug, Clone, Default)]
pub struct ManualClock(Arc<AtomicI64>);

impl ManualClock {
    /// A clock that stands at a date given in seconds since 1970.
    pub fn at_second(second: i64) -> Self {
        Self(Arc::new(AtomicI64::new(second)))
    }

    /// Moves the clock forward.
    pub fn advance_seconds(&self, seconds: i64) {
        self.0.fetch_add(seconds, Ordering::Relaxed);
    }

    /// The clock to give to a server.
    pub fn clock(&self) -> Clock {
        let seconds = self.0.clone();
        Clock::new(move || Timestamp::from_second(seconds.load(Ordering::Relaxed)).unwrap_or(Timestamp::UNIX_EPOCH))
    }
}
