//! Counters of a device: one set per core, so that counting costs a core no more than a few plain additions.
//!
//! *Invariants.* A [`CoreIoStats`] is written by the thread of its core only; everything else reads. A reset never
//! writes the counters: it remembers where they stood, and asks the core to start its extremes anew.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::{IoOp, IoStatus};
use crate::reactor::CoreId;
use crate::reactor::driver::Nanos;

/// Counters of one device on one core.
#[derive(Debug, Default)]
pub struct CoreIoStats {
    read: OpStats,
    write: OpStats,
    unmap: OpStats,
    errors: AtomicU64,
}

/// Counters of one kind of I/O.
#[derive(Debug)]
struct OpStats {
    bytes: AtomicU64,
    ops: AtomicU64,
    latency_ns: AtomicU64,
    max_ns: AtomicU64,
    min_ns: AtomicU64,
    /// The extremes are to be started anew.
    renew: AtomicBool,
}

impl Default for OpStats {
    fn default() -> Self {
        Self {
            bytes: AtomicU64::new(0),
            ops: AtomicU64::new(0),
            latency_ns: AtomicU64::new(0),
            max_ns: AtomicU64::new(0),
            min_ns: AtomicU64::new(u64::MAX),
            renew: AtomicBool::new(false),
        }
    }
}

fn add(counter: &AtomicU64, value: u64) {
    counter.store(counter.load(Ordering::Relaxed).wrapping_add(value), Ordering::Relaxed);
}

impl OpStats {
    fn book(&self, bytes: u64, ns: Nanos) {
        if self.renew.load(Ordering::Relaxed) {
            self.max_ns.store(0, Ordering::Relaxed);
            self.min_ns.store(u64::MAX, Ordering::Relaxed);
            self.renew.store(false, Ordering::Release);
        }
        add(&self.bytes, bytes);
        add(&self.ops, 1);
        add(&self.latency_ns, ns);
        if ns > self.max_ns.load(Ordering::Relaxed) {
            self.max_ns.store(ns, Ordering::Relaxed);
        }
        if ns < self.min_ns.load(Ordering::Relaxed) {
            self.min_ns.store(ns, Ordering::Relaxed);
        }
    }

    fn counts(&self) -> OpCounts {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let renew = self.renew.load(Ordering::Acquire);
        OpCounts {
            bytes: get(&self.bytes),
            ops: get(&self.ops),
            latency_ns: get(&self.latency_ns),
            max_ns: if renew { 0 } else { get(&self.max_ns) },
            min_ns: if renew { u64::MAX } else { get(&self.min_ns) },
        }
    }
}

impl CoreIoStats {
    /// Books an I/O that took `ns`; on the core's own thread.
    pub fn book(&self, op: IoOp, bytes: u64, ns: Nanos, status: IoStatus) {
        if !status.is_success() {
            return add(&self.errors, 1);
        }
        match op {
            IoOp::Read => self.read.book(bytes, ns),
            IoOp::Write { .. } => self.write.book(bytes, ns),
            IoOp::Unmap | IoOp::WriteZeroes => self.unmap.book(bytes, ns),
            IoOp::Flush | IoOp::Compare | IoOp::Reset => {}
        }
    }

    fn counts(&self) -> Counts {
        Counts {
            read: self.read.counts(),
            write: self.write.counts(),
            unmap: self.unmap.counts(),
            errors: self.errors.load(Ordering::Relaxed),
        }
    }
}

/// What was counted of one kind of I/O.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OpCounts {
    pub bytes: u64,
    pub ops: u64,
    /// Sum over all, in nanoseconds.
    pub latency_ns: u64,
    pub max_ns: u64,
    /// `u64::MAX` when there was none.
    pub min_ns: u64,
}

impl Default for OpCounts {
    fn default() -> Self {
        Self { bytes: 0, ops: 0, latency_ns: 0, max_ns: 0, min_ns: u64::MAX }
    }
}

impl OpCounts {
    fn plus(self, other: Self) -> Self {
        Self {
            bytes: self.bytes + other.bytes,
            ops: self.ops + other.ops,
            latency_ns: self.latency_ns + other.latency_ns,
            max_ns: self.max_ns.max(other.max_ns),
            min_ns: self.min_ns.min(other.min_ns),
        }
    }

    fn since(self, base: Self) -> Self {
        Self {
            bytes: self.bytes - base.bytes,
            ops: self.ops - base.ops,
            latency_ns: self.latency_ns - base.latency_ns,
            ..self
        }
    }
}

/// What was counted of a device, or of a device on one core.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    pub read: OpCounts,
    pub write: OpCounts,
    pub unmap: OpCounts,
    /// I/O that failed.
    pub errors: u64,
}

impl Counts {
    fn plus(self, other: Self) -> Self {
        Self {
            read: self.read.plus(other.read),
            write: self.write.plus(other.write),
            unmap: self.unmap.plus(other.unmap),
            errors: self.errors + other.errors,
        }
    }

    fn since(self, base: Self) -> Self {
        Self {
            read: self.read.since(base.read),
            write: self.write.since(base.write),
            unmap: self.unmap.since(base.unmap),
            errors: self.errors - base.errors,
        }
    }
}

/// What [`IoStats::reset`] forgets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reset {
    /// Everything.
    All,
    /// The longest and the shortest times.
    Extremes,
    /// The number of errors.
    Errors,
}

#[derive(Debug)]
struct Shard {
    core: CoreId,
    counters: Arc<CoreIoStats>,
    /// Where they stood at the last reset.
    base: Counts,
}

/// Counters of a device, over all cores.
#[derive(Debug, Default)]
pub struct IoStats(Mutex<Vec<Shard>>);

impl IoStats {
    fn shards(&self) -> std::sync::MutexGuard<'_, Vec<Shard>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The counters of `core`, for its channels.
    #[must_use]
    pub fn of_core(&self, core: CoreId) -> Arc<CoreIoStats> {
        let mut shards = self.shards();
        if let Some(shard) = shards.iter().find(|s| s.core == core) {
            return Arc::clone(&shard.counters);
        }
        let counters = Arc::<CoreIoStats>::default();
        shards.push(Shard { core, counters: Arc::clone(&counters), base: Counts::default() });
        counters
    }

    /// What was counted since the last reset, over all cores.
    #[must_use]
    pub fn total(&self) -> Counts {
        self.by_core().into_iter().fold(Counts::default(), |sum, (_, counts)| sum.plus(counts))
    }

    /// The same for each core that has used the device.
    #[must_use]
    pub fn by_core(&self) -> Vec<(CoreId, Counts)> {
        self.shards().iter().map(|s| (s.core, s.counters.counts().since(s.base))).collect()
    }

    /// Starts to count anew.
    pub fn reset(&self, what: Reset) {
        for shard in self.shards().iter_mut() {
            let now = shard.counters.counts();
            match what {
                Reset::All => shard.base = now,
                Reset::Errors => shard.base.errors = now.errors,
                Reset::Extremes => {}
            }
            if what != Reset::Errors {
                let counters = &shard.counters;
                for op in [&counters.read, &counters.write, &counters.unmap] {
                    op.renew.store(true, Ordering::Release);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use nvme_wire::Status;

    use super::*;

    #[test]
    fn cores_add_up_and_a_reset_starts_anew() {
        let stats = IoStats::default();
        let (one, two) = (stats.of_core(CoreId(1)), stats.of_core(CoreId(2)));
        one.book(IoOp::Read, 4096, 10, Status::SUCCESS);
        two.book(IoOp::Read, 512, 30, Status::SUCCESS);
        two.book(IoOp::Write { fua: false }, 512, 5, Status::WRITE_FAULT);
        let read = OpCounts { bytes: 4608, ops: 2, latency_ns: 40, max_ns: 30, min_ns: 10 };
        assert_eq!(stats.total(), Counts { read, errors: 1, ..Counts::default() });
        assert_eq!(stats.by_core().len(), 2);
        stats.reset(Reset::Extremes);
        assert_eq!(stats.total().read, OpCounts { max_ns: 0, min_ns: u64::MAX, ..read });
        stats.reset(Reset::All);
        assert_eq!(stats.total(), Counts::default());
        one.book(IoOp::Read, 1, 7, Status::SUCCESS);
        assert_eq!(stats.total().read, OpCounts { bytes: 1, ops: 1, latency_ns: 7, max_ns: 7, min_ns: 7 });
        assert!(Arc::ptr_eq(&one, &stats.of_core(CoreId(1))));
    }
}
