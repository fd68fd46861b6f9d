//! `malloc`: a device in memory.
//!
//! *Invariants.* The medium starts as zeroes, and unmapped blocks read as zeroes. Channels on several cores share it;
//! the order of overlapping I/O that is in flight at once is not defined, as on any drive.

use std::any::Any;
use std::rc::Rc;
use std::sync::Arc;

use addax_hugepages::Buf;
use nvme_wire::Status;
use serde_json::{Value, json};

use super::{Bdev, BdevError, BdevInfo, Channel, Io, IoOp, IoTypes};
use crate::reactor::Core;

/// A device in memory.
#[derive(Debug)]
pub struct Malloc {
    info: BdevInfo,
    medium: Arc<Buf>,
}

/// Refuses block sizes and counts that no device has.
pub fn check_geometry(block_size: u32, num_blocks: u64) -> Result<(), BdevError> {
    if !block_size.is_multiple_of(512) || !block_size.is_power_of_two() || block_size > 65536 {
        let allowed = "a power of two from 512 to 65536";
        return Err(BdevError::Invalid { field: "block_size", value: block_size.to_string(), allowed });
    }
    let bytes = num_blocks.checked_mul(u64::from(block_size)).filter(|b| *b <= i64::MAX as u64);
    if num_blocks == 0 || bytes.is_none() {
        let allowed = "at least 1, and below 8 EiB in all";
        return Err(BdevError::Invalid { field: "num_blocks", value: num_blocks.to_string(), allowed });
    }
    Ok(())
}

impl Malloc {
    /// A zeroed device of that description.
    pub fn new(mut info: BdevInfo) -> Result<Self, BdevError> {
        check_geometry(info.block_size, info.num_blocks)?;
        info.product_name = "Malloc disk";
        info.io_types = IoTypes {
            unmap: true,
            flush: true,
            reset: true,
            write_zeroes: true,
            compare: true,
            abort: true,
            copy: true,
            zcopy: true,
            ..IoTypes::READ_WRITE
        };
        let bytes = info.num_blocks * u64::from(info.block_size);
        let available = available_memory_bytes();
        if available.is_some_and(|a| bytes > a) {
            return Err(BdevError::NoMemory("a malloc device"));
        }
        let bytes = usize::try_from(bytes).map_err(|_| BdevError::NoMemory("a malloc device"))?;
        let medium = Arc::new(Buf::alloc_unpooled(bytes));
        Ok(Self { info, medium })
    }
}

/// `MemAvailable` of the host; none where it cannot be read.
fn available_memory_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|l| l.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix(" kB")?.parse::<u64>().ok().map(|kib| kib * 1024)
}

impl Bdev for Malloc {
    fn info(&self) -> BdevInfo {
        self.info.clone()
    }
    fn num_blocks(&self) -> u64 {
        self.info.num_blocks
    }
    fn open(&self, _core: &Core) -> Result<Rc<dyn Channel>, BdevError> {
        Ok(Rc::new(MallocChannel { medium: Arc::clone(&self.medium), block_size: self.info.block_size as usize }))
    }
    fn unmap_reads_zeroes(&self) -> bool {
        true
    }
    fn config(&self) -> Option<(&'static str, Value)> {
        let params = json!({ "name": self.info.name, "num_blocks": self.info.num_blocks,
            "block_size": self.info.block_size, "uuid": self.info.uuid.to_string(),
            "optimal_io_boundary": self.info.optimal_io_boundary });
        Some(("bdev_malloc_create", params))
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

struct MallocChannel {
    medium: Arc<Buf>,
    block_size: usize,
}

impl MallocChannel {
    fn run(&self, io: &Io) -> Status {
        let mut at = io.lba as usize * self.block_size;
        let end = at + io.blocks as usize * self.block_size;
        match io.op {
            IoOp::Read => {
                for buf in &io.bufs {
                    buf.copy_from_memory(&self.medium.slice(at..at + buf.len()), 0);
                    at += buf.len();
                }
            }
            IoOp::Write { .. } => {
                for buf in &io.bufs {
                    self.medium.copy_from_memory(buf, at);
                    at += buf.len();
                }
            }
            IoOp::Unmap | IoOp::WriteZeroes => self.medium.slice(at..end).fill(0),
            IoOp::Compare => {
                for buf in &io.bufs {
                    if self.medium.slice(at..at + buf.len()).to_vec() != buf.to_vec() {
                        return Status::COMPARE_FAILURE.with_dnr();
                    }
                    at += buf.len();
                }
            }
            IoOp::Flush | IoOp::Reset => {}
        }
        Status::SUCCESS
    }
}

impl Channel for MallocChannel {
    fn copy_now(&self, from: u64, to: u64, blocks: u64) -> Option<Status> {
        let bytes = |blocks: u64| blocks as usize * self.block_size;
        self.medium.copy_from_memory(&self.medium.slice(bytes(from)..bytes(from + blocks)), bytes(to));
        Some(Status::SUCCESS)
    }

    fn submit(&self, core: &Core, io: Io) {
        let status = self.run(&io);
        core.complete(io, status);
    }
}
