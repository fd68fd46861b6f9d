//! I/O commands from end to end.

use std::collections::BTreeSet;

use nvme_wire::command::{BlockRange, DsmRange, Fuse};
use nvme_wire::{IoCommand, Sgl, Status};

use super::engine::{BLOCKS, Engine};
use super::host::{Controller, Queue};

fn pattern(seed: u8, blocks: u32) -> Vec<u8> {
    (0..blocks as usize * 512).map(|i| (i / 7) as u8 ^ seed).collect()
}

fn range(lba: u64, blocks: u32) -> BlockRange {
    BlockRange::new(lba, blocks)
}

fn read(queue: &mut Queue, lba: u64, blocks: u32) -> Vec<u8> {
    let (cqe, data) = queue.io(IoCommand::Read(range(lba, blocks)), blocks * 512, &[]);
    assert_eq!(cqe.status(), Status::SUCCESS);
    data
}

#[test]
fn what_was_written_is_read_on_every_queue() {
    for digests in [false, true] {
        let engine = Engine::with_namespace();
        let controller = Controller::connect_with(engine.addr, digests, 0);
        let mut queues: Vec<Queue> = (1..=4).map(|qid| controller.io_queue(qid)).collect();
        for (index, queue) in (0u8..).zip(&mut queues) {
            let lba = u64::from(index) * 300;
            let (cqe, _) = queue.io(IoCommand::Write(range(lba, 256)), 131_072, &pattern(index, 256));
            assert_eq!(cqe.status(), Status::SUCCESS);
            let small = IoCommand::Write(range(lba + 8, 8)).to_sqe(0, 1, Sgl::in_capsule(4096));
            assert_eq!(queue.run(small, &pattern(index + 100, 8)).0.status(), Status::SUCCESS);
        }
        queues.rotate_left(1);
        for (index, queue) in (0u8..).zip(&mut queues) {
            let mut expected = pattern(index, 256);
            expected[8 * 512..16 * 512].copy_from_slice(&pattern(index + 100, 8));
            assert!(read(queue, u64::from(index) * 300, 256) == expected);
        }
        assert_eq!(queues[0].io(IoCommand::Flush, 0, &[]).0.status(), Status::SUCCESS);
    }
}

#[test]
fn zeroes_deallocation_and_compare() {
    let engine = Engine::with_namespace();
    let controller = Controller::connect(engine.addr);
    let mut queue = controller.io_queue(1);
    let data = pattern(1, 64);
    queue.io(IoCommand::Write(range(0, 64)), 32_768, &data);
    assert_eq!(queue.io(IoCommand::Compare(range(0, 64)), 32_768, &data).0.status(), Status::SUCCESS);
    let (cqe, _) = queue.io(IoCommand::Compare(range(1, 64)), 32_768, &data);
    assert!(cqe.status().is(Status::COMPARE_FAILURE));
    let zeroes = |deallocate| IoCommand::WriteZeroes { range: range(8, 8), deallocate };
    assert_eq!(queue.io(zeroes(true), 0, &[]).0.status(), Status::INVALID_FIELD);
    assert_eq!(queue.io(zeroes(false), 0, &[]).0.status(), Status::SUCCESS);
    let ranges: Vec<u8> = [(0u64, 4u32), (20, 0), (32, 8)]
        .into_iter()
        .flat_map(|(slba, blocks)| DsmRange { attributes: 0, blocks, slba }.encode())
        .collect();
    let deallocate = IoCommand::DatasetManagement { ranges: 3, deallocate: true };
    assert_eq!(queue.io(deallocate, 48, &ranges).0.status(), Status::SUCCESS);
    assert_eq!(queue.io(deallocate, 32, &ranges[..32]).0.status(), Status::DATA_SGL_LENGTH_INVALID);
    let hint = IoCommand::DatasetManagement { ranges: 1, deallocate: false };
    assert_eq!(queue.io(hint, 16, &ranges[..16]).0.status(), Status::SUCCESS);
    let mut expected = data;
    for blocks in [0..4, 8..16, 32..40] {
        expected[blocks.start * 512..blocks.end * 512].fill(0);
    }
    assert!(read(&mut queue, 0, 64) == expected);
}

#[test]
fn refusals() {
    let engine = Engine::with_namespace();
    let controller = Controller::connect(engine.addr);
    let mut queue = controller.io_queue(1);
    let mut status = |command: IoCommand, nsid: u32, len: u32| {
        queue.run(command.to_sqe(0, nsid, Sgl::transport(len)), &vec![0; len as usize]).0.status()
    };
    let past_end = range(BLOCKS - 1, 2);
    assert_eq!(status(IoCommand::Read(past_end), 1, 1024), Status::LBA_OUT_OF_RANGE);
    assert_eq!(status(IoCommand::Write(range(u64::MAX, 1)), 1, 512), Status::LBA_OUT_OF_RANGE);
    assert_eq!(status(IoCommand::Read(range(0, 2)), 1, 512), Status::DATA_SGL_LENGTH_INVALID);
    assert_eq!(status(IoCommand::Read(range(0, 1)), 2, 512), Status::INVALID_NAMESPACE.with_dnr());
    assert_eq!(status(IoCommand::Read(range(0, 1)), 0, 512), Status::INVALID_NAMESPACE.with_dnr());
    assert_eq!(status(IoCommand::Flush, u32::MAX, 0), Status::INVALID_NAMESPACE.with_dnr());
    assert_eq!(status(IoCommand::Verify(range(0, 1)), 1, 0), Status::INVALID_OPCODE.with_dnr());
    let fused = IoCommand::Compare(range(0, 1)).to_sqe(0, 1, Sgl::transport(512)).with_fuse(Fuse::First);
    assert_eq!(queue.run(fused, &[0; 512]).0.status(), Status::INVALID_FIELD);
    let (_, data) = queue.io(IoCommand::Read(range(0, 1)), 4096, &[]);
    assert_eq!(data, vec![0; 4096], "the rest of a longer transfer is zeroes");
}

#[test]
fn more_at_once_than_there_are_buffers() {
    let engine = Engine::with_namespace();
    let controller = Controller::connect(engine.addr);
    let mut queues: Vec<Queue> = (1..=4).map(|qid| controller.io_queue(qid)).collect();
    for queue in &mut queues {
        for _ in 0..32 {
            queue.send(IoCommand::Read(range(0, 256)).to_sqe(0, 1, Sgl::transport(131_072)), &[]);
        }
    }
    for queue in &mut queues {
        for _ in 0..32 {
            let (cqe, data) = queue.wait().unwrap();
            assert_eq!((cqe.status(), data.len()), (Status::SUCCESS, 131_072));
        }
    }
}

#[test]
fn what_waited_for_buffers_is_executed_without_another_word_from_the_host() {
    const BYTES: u32 = 128 << 10;
    let (engine, gate) = Engine::with_gate();
    let controller = Controller::connect(engine.addr);
    let mut queue = controller.io_queue(1);
    // More than there are large buffers for, and more than one turn moves.
    let read = IoCommand::Read(BlockRange::new(0, BYTES / 512)).to_sqe(0, 1, Sgl::transport(BYTES));
    let cids: BTreeSet<u16> = (0..30).map(|_| queue.send(read, &[])).collect();
    // Its answer shows that the reads before it were taken.
    queue.send(IoCommand::Flush.to_sqe(0, 9, Sgl::NONE), &[]);
    assert!(queue.wait().unwrap().0.status().is(Status::INVALID_NAMESPACE));
    gate.open();
    let ended: BTreeSet<u16> = cids.iter().map(|_| queue.wait().unwrap().0.cid.get()).collect();
    assert_eq!(ended, cids);
}
