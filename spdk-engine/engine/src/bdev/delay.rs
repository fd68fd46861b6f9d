//! `delay`: a device that answers late, for tests of everything above it.
//!
//! *Invariants.* Completions are delayed, not submissions. One in a hundred I/Os of a direction gets the p99 delay, by a
//! counter and not by chance, so that a run repeats.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use serde_json::{Value, json};
use uuid::Uuid;

use super::registry::Entry;
use super::{Bdev, BdevError, BdevInfo, Chan, Channel, Io, IoOp, IoSink, IoStatus};
use crate::reactor::Core;

/// Delays in microseconds; changed by RPC while I/O runs.
#[derive(Debug, Default)]
pub struct Latencies {
    pub avg_read: AtomicU64,
    pub p99_read: AtomicU64,
    pub avg_write: AtomicU64,
    pub p99_write: AtomicU64,
}

/// The device.
#[derive(Debug)]
pub struct Delay {
    name: String,
    uuid: Uuid,
    base: Arc<Entry>,
    latencies: Arc<Latencies>,
}

impl Delay {
    /// A device over `base`.
    #[must_use]
    pub fn new(name: String, uuid: Option<Uuid>, base: Arc<Entry>, latencies: Latencies) -> Self {
        let namespace = Uuid::from_u128(0x4009_b574_6430_4f1b_bc40_ace8_1109_1027);
        let uuid = uuid.unwrap_or_else(|| Uuid::new_v5(&namespace, base.bdev.info().uuid.as_bytes()));
        Self { name, uuid, base, latencies: Arc::new(latencies) }
    }

    /// The delays.
    #[must_use]
    pub fn latencies(&self) -> &Latencies {
        &self.latencies
    }

    fn params(&self) -> Value {
        let l = &self.latencies;
        let get = |v: &AtomicU64| v.load(Ordering::Relaxed);
        json!({ "name": self.name, "base_bdev_name": self.base.bdev.info().name, "uuid": self.uuid.to_string(),
            "avg_read_latency": get(&l.avg_read), "p99_read_latency": get(&l.p99_read),
            "avg_write_latency": get(&l.avg_write), "p99_write_latency": get(&l.p99_write) })
    }
}

impl Bdev for Delay {
    fn info(&self) -> BdevInfo {
        BdevInfo { name: self.name.clone(), uuid: self.uuid, product_name: "delay", ..self.base.bdev.info() }
    }
    fn num_blocks(&self) -> u64 {
        self.base.bdev.num_blocks()
    }
    fn open(&self, core: &Core) -> Result<Rc<dyn Channel>, BdevError> {
        let latencies = Arc::clone(&self.latencies);
        Ok(Rc::new(DelayChannel { base: self.base.open(core)?, latencies, count: Cell::new(0) }))
    }
    fn unmap_reads_zeroes(&self) -> bool {
        self.base.bdev.unmap_reads_zeroes()
    }
    fn holds_guest_data(&self) -> bool {
        self.base.bdev.holds_guest_data()
    }
    fn driver_specific(&self) -> Value {
        json!({ "delay": self.params() })
    }
    fn config(&self) -> Option<(&'static str, Value)> {
        Some(("bdev_delay_create", self.params()))
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

struct DelayChannel {
    base: Chan,
    latencies: Arc<Latencies>,
    count: Cell<u64>,
}

impl Channel for DelayChannel {
    fn submit(&self, core: &Core, io: Io) {
        self.count.set(self.count.get() + 1);
        let slow = self.count.get().is_multiple_of(100);
        let us = match (io.op, slow) {
            (IoOp::Read | IoOp::Compare, false) => &self.latencies.avg_read,
            (IoOp::Read | IoOp::Compare, true) => &self.latencies.p99_read,
            (_, false) => &self.latencies.avg_write,
            (_, true) => &self.latencies.p99_write,
        };
        let delay_ns = us.load(Ordering::Relaxed) * 1000;
        let (op, lba, blocks, bufs) = (io.op, io.lba, io.blocks, io.bufs.clone());
        let sink = Rc::new(Late { io: RefCell::new(Some(io)), delay_ns });
        self.base.submit(core, Io::new(op, lba, blocks, bufs, sink, 0));
    }

    fn close(&self, core: &Core) {
        self.base.close(core);
    }
}

struct Late {
    io: RefCell<Option<Io>>,
    delay_ns: u64,
}

impl IoSink for Late {
    fn io_done(self: Rc<Self>, core: &Core, _tag: u64, status: IoStatus) {
        let delay_ns = self.delay_ns;
        let end = move |core: &Core| {
            if let Some(io) = self.io.borrow_mut().take() {
                core.complete(io, status);
            }
        };
        if delay_ns == 0 {
            return end(core);
        }
        core.after(delay_ns, Rc::new(end));
    }
}
