//! One I/O on its way to a namespace: cut into commands that the controller takes.
//!
//! *Invariants.* The I/O ends when all commands that were sent for it have ended; after the first failure no more are
//! sent. To replay it means to begin again from its first block: what was done of it before was not acknowledged.

use addax_hugepages::Buf;
use nvme_wire::command::{BlockRange, DsmRange};
use nvme_wire::{IoCommand, Sgl, Status};

use super::host::data::each_part;
use super::host::{Command, Data, NsLimits};
use crate::bdev::{Bufs, Io, IoOp};

/// An I/O in progress.
#[derive(Debug)]
pub struct Task {
    pub io: Io,
    nsid: u32,
    limits: NsLimits,
    /// Blocks for which commands were made.
    next: u64,
    /// All commands were made, or no more are to be.
    issued: bool,
    /// Commands in flight.
    running: u32,
    error: Option<Status>,
    /// How often it may be tried again after a passing failure; below 0 for always.
    pub retries: i32,
    /// Order of arrival.
    pub sequence: u64,
    /// Waits for a moment before it is tried again.
    pub parked: bool,
}

impl Task {
    /// An I/O that has not begun.
    #[must_use]
    pub fn new(io: Io, nsid: u32, limits: NsLimits, retries: i32, sequence: u64) -> Self {
        Self { io, nsid, limits, next: 0, issued: false, running: 0, error: None, retries, sequence, parked: false }
    }

    /// Back to its beginning; commands in flight are forgotten.
    pub fn rewind(&mut self) {
        self.next = 0;
        self.issued = false;
        self.running = 0;
        self.error = None;
        self.parked = false;
    }

    /// Whether there are no more commands to make.
    #[must_use]
    pub fn is_issued(&self) -> bool {
        self.issued
    }

    /// The next command; `None` when there is none.
    pub fn next_command(&mut self) -> Option<Command> {
        if self.issued {
            return None;
        }
        let blocks = self.limit().min(self.io.blocks - self.next.min(self.io.blocks));
        let first = self.next;
        self.next += blocks;
        self.issued = self.next >= self.io.blocks || self.io.op == IoOp::Flush;
        self.running += 1;
        Some(self.command(first, blocks))
    }

    fn limit(&self) -> u64 {
        match self.io.op {
            IoOp::WriteZeroes => self.limits.write_zeroes,
            IoOp::Unmap => self.limits.unmap,
            _ => self.limits.transfer,
        }
    }

    fn command(&self, first: u64, blocks: u64) -> Command {
        let slba = self.io.lba + first;
        let range = BlockRange::new(slba, blocks as u32);
        let part = || self.part(first, blocks);
        let (command, data) = match self.io.op {
            IoOp::Read => (IoCommand::Read(range), Data::Receive(part())),
            IoOp::Write { fua } => (IoCommand::Write(BlockRange { fua, ..range }), Data::Send(part())),
            IoOp::Compare => (IoCommand::Compare(range), Data::Send(part())),
            IoOp::WriteZeroes => (IoCommand::WriteZeroes { range, deallocate: false }, Data::None),
            IoOp::Unmap => {
                let range = DsmRange { attributes: 0, blocks: blocks as u32, slba };
                let list = Buf::copy_of(&range.encode()).into_slice();
                let command = IoCommand::DatasetManagement { ranges: 1, deallocate: true };
                (command, Data::Send([list].into_iter().collect()))
            }
            IoOp::Flush | IoOp::Reset => (IoCommand::Flush, Data::None),
        };
        Command { sqe: command.to_sqe(0, self.nsid, Sgl::NONE), data }
    }

    fn part(&self, first: u64, blocks: u64) -> Bufs {
        let block_size = u64::from(self.limits.block_size);
        let (offset, len) = ((first * block_size) as usize, (blocks * block_size) as usize);
        if offset == 0 && len == self.io.bytes() {
            return self.io.bufs.clone();
        }
        let mut bufs = Bufs::new();
        each_part(&self.io.bufs, offset, len, |part| bufs.push(part));
        bufs
    }

    /// A command has ended; the I/O's status once it was the last.
    pub fn ended(&mut self, status: Status) -> Option<Status> {
        self.running = self.running.saturating_sub(1);
        if !status.is_success() {
            self.error.get_or_insert(status);
            self.issued = true;
        }
        (self.issued && self.running == 0).then_some(self.error.unwrap_or(Status::SUCCESS))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::rc::Rc;

    use proptest::prelude::*;

    use super::*;
    use crate::bdev::{IoSink, IoStatus};
    use crate::reactor::Core;

    struct Nobody;
    impl IoSink for Nobody {
        fn io_done(self: Rc<Self>, _core: &Core, _tag: u64, _status: IoStatus) {}
    }

    fn task(op: IoOp, lba: u64, blocks: u64, bufs: Bufs, limits: NsLimits) -> Task {
        Task::new(Io::new(op, lba, blocks, bufs, Rc::new(Nobody), 0), 1, limits, 0, 0)
    }

    const LIMITS: NsLimits = NsLimits { block_size: 512, transfer: 3, write_zeroes: 5, unmap: 7 };

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        /// The commands of an I/O cover its blocks once, in order, each within the limit, with its part of the data.
        #[test]
        fn commands_cover_the_range(lba in 0u64..1 << 40, blocks in 1u64..40, cut in 1usize..20) {
            let bytes: Vec<u8> = (0..blocks as usize * 512).map(|i| (i / 256) as u8).collect();
            let cut = (cut * 512).min(bytes.len());
            let bufs = || [&bytes[..cut], &bytes[cut..]].into_iter().filter(|b| !b.is_empty())
                .map(|b| Buf::copy_of(b).into_slice()).collect::<Bufs>();
            for (op, limit) in [(IoOp::Write { fua: true }, 3), (IoOp::WriteZeroes, 5), (IoOp::Unmap, 7), (IoOp::Read, 3)] {
                let mut task = task(op, lba, blocks, bufs(), LIMITS);
                let (mut at, mut moved) = (lba, Vec::new());
                while let Some(command) = task.next_command() {
                    let parsed = IoCommand::parse(&command.sqe).unwrap();
                    let (slba, count) = match parsed {
                        IoCommand::Write(r) => { prop_assert!(r.fua); (r.slba, r.blocks) }
                        IoCommand::Read(r) => (r.slba, r.blocks),
                        IoCommand::WriteZeroes { range, deallocate } => { prop_assert!(!deallocate); (range.slba, range.blocks) }
                        IoCommand::DatasetManagement { ranges: 1, deallocate: true } => {
                            let range = DsmRange::parse(&command.data.bufs()[0].to_vec()).unwrap();
                            (range.slba, range.blocks)
                        }
                        other => panic!("{other:?}"),
                    };
                    prop_assert_eq!(slba, at);
                    prop_assert!(u64::from(count) <= limit && count > 0);
                    at += u64::from(count);
                    if op != IoOp::Unmap {
                        command.data.bufs().iter().for_each(|b| moved.extend(b.to_vec()));
                    }
                }
                prop_assert_eq!(at, lba + blocks);
                if matches!(op, IoOp::Write { .. } | IoOp::Read) {
                    prop_assert_eq!(&moved, &bytes);
                }
            }
        }
    }

    #[test]
    fn it_ends_with_the_first_error_when_nothing_runs() {
        let mut task = task(IoOp::WriteZeroes, 0, 20, Bufs::new(), LIMITS);
        for _ in 0..3 {
            task.next_command().unwrap();
        }
        assert_eq!(task.ended(Status::SUCCESS), None);
        assert_eq!(task.ended(Status::WRITE_FAULT), None);
        assert!(task.next_command().is_none());
        assert_eq!(task.ended(Status::INTERNAL_ERROR), Some(Status::WRITE_FAULT));
        task.rewind();
        assert!((0..4).all(|_| task.next_command().is_some()) && task.next_command().is_none());
    }

    #[test]
    fn a_flush_is_one_command() {
        let mut task = task(IoOp::Flush, 0, 0, Bufs::new(), LIMITS);
        assert_eq!(IoCommand::parse(&task.next_command().unwrap().sqe), Ok(IoCommand::Flush));
        assert!(task.is_issued());
        assert_eq!(task.ended(Status::SUCCESS), Some(Status::SUCCESS));
    }
}
