//! NVM commands of I/O queues, turned into device I/O.
//!
//! *Invariants.* A command is answered exactly once. Ranges and lengths are checked before the device sees them; a read
//! shorter than its transfer is filled up with zeroes, so that no other command's data can leak.

use std::cell::Cell;
use std::rc::Rc;

use nvme_wire::command::{BlockRange, DsmRange, Fuse, dsm_ranges, opcode};
use nvme_wire::{IoCommand, Sqe, Status};

use super::poll_group::{IoQueue, OpenNamespace};
use crate::bdev::{Bufs, Io, IoOp, IoSink, IoStatus};
use crate::reactor::Core;

/// Starts the command in `slot`.
pub fn execute(queue: &Rc<IoQueue>, core: &Core, slot: u16) {
    let sqe = *queue.conn.session().sqe(slot);
    let namespace = match check(queue, &sqe) {
        Ok(namespace) => namespace,
        Err(status) => return queue.refuse(core, slot, status),
    };
    let planned = match sqe.opcode {
        opcode::io::READ | opcode::io::WRITE => transfer(queue, core, slot, &sqe, &namespace),
        _ => other(queue, core, slot, &sqe, &namespace),
    };
    if let Err(status) = planned {
        queue.refuse(core, slot, status);
    }
}

/// Starts a read or write.
fn transfer(
    queue: &Rc<IoQueue>,
    core: &Core,
    slot: u16,
    sqe: &Sqe,
    namespace: &Rc<OpenNamespace>,
) -> Result<(), Status> {
    let (op, range) = match IoCommand::parse(sqe).map_err(Status::with_dnr)? {
        IoCommand::Read(range) => (IoOp::Read, range),
        IoCommand::Write(range) => (IoOp::Write { fua: range.fua }, range),
        _ => return Err(Status::INVALID_OPCODE.with_dnr()),
    };
    let num_blocks = namespace.chan.num_blocks();
    let bufs = transfer_bufs(queue, slot, &range, num_blocks, namespace.block_shift, op == IoOp::Read)?;
    queue.begin(slot, namespace);
    let sink = Rc::clone(queue) as Rc<dyn IoSink>;
    namespace.chan.submit(core, Io::new(op, range.slba, u64::from(range.blocks), bufs, sink, u64::from(slot)));
    Ok(())
}

/// Starts any other command.
fn other(queue: &Rc<IoQueue>, core: &Core, slot: u16, sqe: &Sqe, namespace: &Rc<OpenNamespace>) -> Result<(), Status> {
    match plan(queue, slot, sqe, namespace)? {
        Plan::Io { op, lba, blocks, bufs } => {
            queue.begin(slot, namespace);
            let sink = Rc::clone(queue) as Rc<dyn IoSink>;
            namespace.chan.submit(core, Io::new(op, lba, blocks, bufs, sink, u64::from(slot)));
        }
        Plan::Unmap(ranges) => {
            queue.begin(slot, namespace);
            unmap(queue, core, slot, namespace, &ranges);
        }
        Plan::Nothing => queue.refuse(core, slot, Status::SUCCESS),
    }
    Ok(())
}

enum Plan {
    Io { op: IoOp, lba: u64, blocks: u64, bufs: Bufs },
    Unmap(Vec<DsmRange>),
    Nothing,
}

fn check(queue: &IoQueue, sqe: &Sqe) -> Result<Rc<OpenNamespace>, Status> {
    if sqe.opcode == opcode::FABRICS {
        return Err(Status::INVALID_OPCODE);
    }
    let namespace = queue.table.get(sqe.nsid.get()).ok_or(Status::INVALID_NAMESPACE.with_dnr())?;
    let refusal = queue.ana.as_ref().and_then(|ana| ana.get(namespace.ana_group.get()).refusal());
    if let Some(status) = refusal {
        return Err(status);
    }
    // Compare-and-write is not offered (FUSES 0): without a lock on the range it would not be atomic.
    if sqe.fuse() != Fuse::Normal { Err(Status::INVALID_FIELD) } else { Ok(namespace) }
}

fn plan(queue: &IoQueue, slot: u16, sqe: &Sqe, namespace: &OpenNamespace) -> Result<Plan, Status> {
    let num_blocks = namespace.chan.num_blocks();
    match IoCommand::parse(sqe).map_err(Status::with_dnr)? {
        IoCommand::Compare(range) => {
            let bufs = transfer_bufs(queue, slot, &range, num_blocks, namespace.block_shift, false)?;
            Ok(Plan::Io { op: IoOp::Compare, lba: range.slba, blocks: u64::from(range.blocks), bufs })
        }
        IoCommand::Flush => Ok(Plan::Io { op: IoOp::Flush, lba: 0, blocks: num_blocks, bufs: Bufs::new() }),
        IoCommand::WriteZeroes { deallocate: true, .. } => Err(Status::INVALID_FIELD),
        IoCommand::WriteZeroes { range, .. } => {
            check_range(&range, num_blocks)?;
            let (lba, blocks) = (range.slba, u64::from(range.blocks));
            Ok(Plan::Io { op: IoOp::WriteZeroes, lba, blocks, bufs: Bufs::new() })
        }
        IoCommand::DatasetManagement { deallocate: false, .. } => Ok(Plan::Nothing),
        IoCommand::DatasetManagement { ranges, .. } => plan_unmap(queue, slot, ranges, num_blocks),
        _ => Err(Status::INVALID_OPCODE.with_dnr()),
    }
}

fn check_range(range: &BlockRange, num_blocks: u64) -> Result<(), Status> {
    if range.end().is_none_or(|end| end > num_blocks) { Err(Status::LBA_OUT_OF_RANGE) } else { Ok(()) }
}

fn transfer_bufs(
    queue: &IoQueue,
    slot: u16,
    range: &BlockRange,
    num_blocks: u64,
    block_shift: u32,
    is_read: bool,
) -> Result<Bufs, Status> {
    check_range(range, num_blocks)?;
    let bytes = u64::from(range.blocks) << block_shift;
    let session = queue.conn.session();
    let data = session.data(slot).filter(|d| d.len() as u64 >= bytes).ok_or(Status::DATA_SGL_LENGTH_INVALID)?;
    let bytes = bytes as usize;
    if is_read && bytes < data.len() {
        data.slice(bytes..).fill(0);
    }
    Ok(smallvec::smallvec![data.slice(..bytes)])
}

fn plan_unmap(queue: &IoQueue, slot: u16, ranges: u16, num_blocks: u64) -> Result<Plan, Status> {
    let session = queue.conn.session();
    let needed = usize::from(ranges) * DsmRange::SIZE;
    let data = session.data(slot).filter(|d| d.len() >= needed).ok_or(Status::DATA_SGL_LENGTH_INVALID)?;
    let list: Vec<DsmRange> = dsm_ranges(&data.to_vec(), ranges).filter(|r| r.blocks > 0).collect();
    let inside = |r: &DsmRange| r.slba.checked_add(u64::from(r.blocks)).is_some_and(|end| end <= num_blocks);
    if !list.iter().all(inside) {
        return Err(Status::LBA_OUT_OF_RANGE);
    }
    Ok(if list.is_empty() { Plan::Nothing } else { Plan::Unmap(list) })
}

/// One Dataset Management command: its ranges run at once, the first error is its answer.
struct UnmapRun {
    queue: Rc<IoQueue>,
    slot: u16,
    left: Cell<usize>,
    status: Cell<IoStatus>,
}

fn unmap(queue: &Rc<IoQueue>, core: &Core, slot: u16, namespace: &OpenNamespace, ranges: &[DsmRange]) {
    let run = Rc::new(UnmapRun {
        queue: Rc::clone(queue),
        slot,
        left: Cell::new(ranges.len()),
        status: Cell::new(Status::SUCCESS),
    });
    for range in ranges {
        let sink = Rc::clone(&run) as Rc<dyn IoSink>;
        let (lba, blocks) = (range.slba, u64::from(range.blocks));
        namespace.chan.submit(core, Io::new(IoOp::Unmap, lba, blocks, Bufs::new(), sink, 0));
    }
}

impl IoSink for UnmapRun {
    fn io_done(self: Rc<Self>, core: &Core, _tag: u64, status: IoStatus) {
        if !status.is_success() && self.status.get().is_success() {
            self.status.set(status);
        }
        self.left.set(self.left.get() - 1);
        if self.left.get() == 0 {
            self.queue.finish(core, self.slot, self.status.get());
        }
    }
}
