//! The workload that only measures: random or sequential reads and writes of random bytes, for a time or an amount.
//!
//! *Data.* Every buffer is filled once with random bytes, which no device can compress; what is read back is not looked
//! at.

use addax_engine::reactor::driver::Nanos;

use crate::access::{Access, Rng};
use crate::session::IoError;
use crate::worker::{Next, Request, Workload};

/// When to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Limit {
    /// After this many nanoseconds.
    Time(Nanos),
    /// After this many bytes were issued.
    Bytes(u64),
}

impl Limit {
    /// Whether it is reached.
    #[must_use]
    pub fn reached(self, elapsed: Nanos, bytes: u64) -> bool {
        match self {
            Self::Time(limit) => elapsed >= limit,
            Self::Bytes(limit) => bytes >= limit,
        }
    }

    /// The part that is done, from 0 to 1.
    #[must_use]
    pub fn part(self, elapsed: Nanos, bytes: u64) -> f64 {
        let (done, all) = match self {
            Self::Time(limit) => (elapsed, limit),
            Self::Bytes(limit) => (bytes, limit),
        };
        (done as f64 / all.max(1) as f64).min(1.0)
    }
}

/// The load of one worker; see the module.
#[derive(Debug)]
pub struct Load {
    access: Access,
    io_bytes: u32,
    limit: Limit,
    issued: u64,
    data: Rng,
}

impl Load {
    /// I/Os of `io_bytes`, numbered as extents by `access`.
    #[must_use]
    pub fn new(access: Access, io_bytes: u32, limit: Limit, seed: u64) -> Self {
        Self { access, io_bytes, limit, issued: 0, data: Rng::new(seed ^ 0xdada) }
    }
}

impl Workload for Load {
    fn prepare(&mut self, buffer: &mut [u8]) {
        self.data.fill(buffer);
    }

    fn next(&mut self, _slot: usize, _buffer: &mut [u8], elapsed: Nanos) -> Next {
        if self.limit.reached(elapsed, self.issued) {
            return Next::Done;
        }
        self.issued += u64::from(self.io_bytes);
        let choice = self.access.next();
        let offset = choice.extent * u64::from(self.io_bytes);
        Next::Io(Request { write: choice.write, offset, bytes: self.io_bytes })
    }

    fn flush(&mut self) -> Result<(), String> {
        Ok(())
    }

    fn done(&mut self, _slot: usize, _request: &Request, _buffer: &[u8], _result: Result<(), &IoError>) {}

    fn progress(&self, elapsed: Nanos) -> f64 {
        self.limit.part(elapsed, self.issued)
    }

    fn wants_data(&self) -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::access::Pattern;

    #[test]
    fn an_amount_is_issued_to_the_byte() {
        let mut load = Load::new(Access::new(Pattern::Write, 0, 0, 100, 1), 4096, Limit::Bytes(5 * 4096), 1);
        let mut count = 0;
        while let Next::Io(request) = load.next(0, &mut [], u64::MAX) {
            assert_eq!(request, Request { write: true, offset: count * 4096, bytes: 4096 });
            count += 1;
        }
        assert_eq!(count, 5);
        assert_eq!(load.progress(0), 1.0);
    }

    #[test]
    fn time_ends_it() {
        let mut load = Load::new(Access::new(Pattern::Randread, 0, 0, 100, 1), 512, Limit::Time(1000), 1);
        assert!(matches!(load.next(0, &mut [], 999), Next::Io(_)));
        assert_eq!(load.next(0, &mut [], 1000), Next::Done);
    }
}
