//! A disk in memory whose answers can be made late, wrong or none.

use std::any::Any;
use std::cell::RefCell;
use std::ops::Range;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use nvme_wire::Status;
use serde_json::Value;
use uuid::Uuid;

use crate::bdev::{Bdev, BdevError, BdevInfo, Channel, Io, IoOp, IoStatus, IoTypes};
use crate::reactor::Core;

/// What a disk holds and how it behaves; outlives the engine that uses it.
#[derive(Debug)]
pub struct Medium {
    pub uuid: Uuid,
    pub block_size: u32,
    num_blocks: AtomicU64,
    bytes: Mutex<Vec<u8>>,
    faults: Mutex<Vec<Fault>>,
    /// Answers come at random times up to this many nanoseconds.
    pub late_ns: AtomicU64,
    random: AtomicU64,
    /// Nothing is carried out any more: the power is off.
    pub dead: AtomicBool,
    /// I/O taken so far.
    pub count: AtomicU64,
}

/// I/O that fails.
#[derive(Debug, Clone)]
pub struct Fault {
    pub reads: bool,
    pub writes: bool,
    pub blocks: Range<u64>,
    pub status: Status,
}

impl Medium {
    /// An empty medium.
    pub fn new(uuid: Uuid, block_size: u32, num_blocks: u64) -> Arc<Self> {
        Arc::new(Self {
            uuid,
            block_size,
            num_blocks: AtomicU64::new(num_blocks),
            bytes: Mutex::new(vec![0; num_blocks as usize * block_size as usize]),
            faults: Mutex::default(),
            late_ns: AtomicU64::new(0),
            random: AtomicU64::new(uuid.as_u128() as u64 | 1),
            dead: AtomicBool::new(false),
            count: AtomicU64::new(0),
        })
    }

    /// Another medium with the same contents and identity.
    pub fn copy(&self) -> Arc<Self> {
        let copy = Self::new(self.uuid, self.block_size, self.num_blocks());
        copy.bytes.lock().unwrap().copy_from_slice(&self.bytes.lock().unwrap());
        copy
    }

    /// The bytes of some blocks.
    pub fn blocks(&self, blocks: Range<u64>) -> Vec<u8> {
        let size = self.block_size as usize;
        self.bytes.lock().unwrap()[blocks.start as usize * size..blocks.end as usize * size].to_vec()
    }

    /// Replaces bytes.
    pub fn put(&self, lba: u64, bytes: &[u8]) {
        let at = lba as usize * self.block_size as usize;
        self.bytes.lock().unwrap()[at..at + bytes.len()].copy_from_slice(bytes);
    }

    /// Makes the medium larger.
    pub fn grow(&self, num_blocks: u64) {
        self.bytes.lock().unwrap().resize(num_blocks as usize * self.block_size as usize, 0);
        self.num_blocks.store(num_blocks, Ordering::Relaxed);
    }

    /// Makes I/O fail from now on.
    pub fn fail(&self, fault: Fault) {
        self.faults.lock().unwrap().push(fault);
    }

    /// Ends all failing.
    pub fn heal(&self) {
        self.faults.lock().unwrap().clear();
    }

    /// Makes all writes fail.
    pub fn fail_writes(&self) {
        let status = Status::WRITE_FAULT;
        self.fail(Fault { reads: false, writes: true, blocks: 0..u64::MAX, status });
    }

    /// Makes reads of some blocks fail.
    pub fn fail_reads(&self, blocks: Range<u64>) {
        self.fail(Fault { reads: true, writes: false, blocks, status: Status::UNRECOVERED_READ_ERROR });
    }

    fn num_blocks(&self) -> u64 {
        self.num_blocks.load(Ordering::Relaxed)
    }

    fn next_random(&self) -> u64 {
        let mut x = self.random.load(Ordering::Relaxed);
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        self.random.store(x, Ordering::Relaxed);
        x
    }

    fn run(&self, io: &Io) -> IoStatus {
        let is_read = matches!(io.op, IoOp::Read | IoOp::Compare);
        let range = io.lba..io.lba + io.blocks;
        let hit = |fault: &&Fault| {
            (if is_read { fault.reads } else { fault.writes })
                && fault.blocks.start < range.end
                && range.start < fault.blocks.end
        };
        if let Some(fault) = self.faults.lock().unwrap().iter().find(hit).filter(|_| io.op != IoOp::Flush) {
            return fault.status;
        }
        let size = self.block_size as usize;
        let mut at = io.lba as usize * size;
        let mut bytes = self.bytes.lock().unwrap();
        match io.op {
            IoOp::Read => {
                for buf in &io.bufs {
                    buf.copy_from(&bytes[at..at + buf.len()], 0);
                    at += buf.len();
                }
            }
            IoOp::Write { .. } => {
                for buf in &io.bufs {
                    bytes[at..at + buf.len()].copy_from_slice(&buf.to_vec());
                    at += buf.len();
                }
            }
            IoOp::Unmap | IoOp::WriteZeroes => bytes[at..at + io.blocks as usize * size].fill(0),
            IoOp::Compare | IoOp::Flush | IoOp::Reset => {}
        }
        Status::SUCCESS
    }
}

/// The description of a disk that does everything.
pub fn info(name: &str, uuid: Uuid, block_size: u32, num_blocks: u64) -> BdevInfo {
    BdevInfo {
        name: name.to_owned(),
        product_name: "Test disk",
        uuid,
        block_size,
        num_blocks,
        physical_block_size: block_size,
        optimal_io_boundary: 0,
        io_types: IoTypes { unmap: true, flush: true, reset: true, write_zeroes: true, ..IoTypes::READ_WRITE },
        write_cache: true,
    }
}

/// The device.
#[derive(Debug)]
pub struct TestDisk {
    name: String,
    medium: Arc<Medium>,
    pub optimal_io_boundary: u32,
    pub unmap: bool,
}

impl TestDisk {
    /// A device over a medium.
    pub fn new(name: &str, medium: &Arc<Medium>) -> Self {
        Self { name: name.to_owned(), medium: Arc::clone(medium), optimal_io_boundary: 0, unmap: true }
    }
}

impl Bdev for TestDisk {
    fn info(&self) -> BdevInfo {
        let medium = &self.medium;
        let mut info = info(&self.name, medium.uuid, medium.block_size, medium.num_blocks());
        info.optimal_io_boundary = self.optimal_io_boundary;
        info.io_types.unmap = self.unmap;
        info
    }
    fn num_blocks(&self) -> u64 {
        self.medium.num_blocks()
    }
    fn open(&self, _core: &Core) -> Result<Rc<dyn Channel>, BdevError> {
        Ok(Rc::new(TestChannel(Arc::clone(&self.medium))))
    }
    fn config(&self) -> Option<(&'static str, Value)> {
        None
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

struct TestChannel(Arc<Medium>);

impl Channel for TestChannel {
    fn submit(&self, core: &Core, io: Io) {
        self.0.count.fetch_add(1, Ordering::Relaxed);
        if self.0.dead.load(Ordering::Relaxed) {
            return core.complete(io, Status::INTERNAL_PATH_ERROR);
        }
        let late = self.0.late_ns.load(Ordering::Relaxed);
        if late == 0 {
            let status = self.0.run(&io);
            return core.complete(io, status);
        }
        // Carried out when it is submitted, when it is answered, or in between: a disk may do any of them.
        let (medium, delay) = (Arc::clone(&self.0), self.0.next_random() % late);
        let early = medium.next_random().is_multiple_of(2).then(|| medium.run(&io));
        let io = RefCell::new(Some(io));
        core.after(
            delay,
            Rc::new(move |core| {
                if let Some(io) = io.borrow_mut().take() {
                    let status = early.unwrap_or_else(|| medium.run(&io));
                    core.complete(io, status);
                }
            }),
        );
    }
}
