//! I/O that does not lie in one run on one disk: cut into pieces, answered when all have ended.
//!
//! *Invariants.* Pieces that follow each other on a disk are one. The first error is the answer; all pieces have ended
//! by then. A forced-unit-access write in pieces is durable by a flush after them when it rests on volatile metadata.

use std::rc::Rc;

use lvol_core::Place;
use lvol_core::map::External;
use nvme_wire::Status;
use smallvec::SmallVec;

use super::channel::{Inner, Running};
use super::durability::Mark;
use crate::bdev::{Bufs, Chan, Io, IoOp, IoSink, IoStatus};
use crate::reactor::Core;

/// An I/O whose pieces are under way.
pub struct Split {
    io: Io,
    left: usize,
    status: IoStatus,
    /// Metadata that is durable once the last piece, a flush, has succeeded.
    flush: Option<Option<Mark>>,
}

/// Where a piece goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Target {
    /// The base device, at this block.
    Base(u64),
    /// The external device, at this block of the volume.
    External(u64),
    Zeroes,
}

/// Blocks `start..start + blocks` of an I/O.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Piece {
    target: Target,
    start: u64,
    blocks: u64,
}

type Pieces = SmallVec<[Piece; 4]>;

/// Adds a piece, to the last one where it only goes on.
fn push(pieces: &mut Pieces, piece: Piece) {
    if let Some(last) = pieces.last_mut() {
        let goes_on = match (last.target, piece.target) {
            (Target::Base(at), Target::Base(next)) | (Target::External(at), Target::External(next)) => {
                at + last.blocks == next
            }
            (Target::Zeroes, Target::Zeroes) => true,
            _ => false,
        };
        if goes_on {
            last.blocks += piece.blocks;
            return;
        }
    }
    pieces.push(piece);
}

/// `len` bytes of `bufs` from `start` on.
fn slice(bufs: &Bufs, mut start: usize, mut len: usize) -> Bufs {
    let mut out = Bufs::new();
    for buf in bufs {
        if start >= buf.len() {
            start -= buf.len();
            continue;
        }
        let now = len.min(buf.len() - start);
        if now == 0 {
            break;
        }
        out.push(buf.slice(start..start + now));
        (start, len) = (0, len - now);
    }
    out
}

impl Inner {
    /// Reads what does not lie in one cluster of the disk.
    pub(super) fn read_pieces(self: &Rc<Self>, core: &Core, io: Io) {
        let pieces = self.cut(&io, |place| match place {
            Place::Own(at) | Place::Ancestor(at) => Some(at),
            Place::External | Place::Zeroes => None,
        });
        self.run(core, io, &pieces);
    }

    /// Writes to clusters of the volume's own. Gives the I/O back, untouched, when the volume does not own them all.
    pub(super) fn write_pieces(self: &Rc<Self>, core: &Core, io: Io) -> Result<(), Io> {
        let pieces = self.cut(&io, |place| match place {
            Place::Own(at) => Some(at),
            _ => None,
        });
        if !pieces.iter().all(|p| matches!(p.target, Target::Base(_))) {
            return Err(io);
        }
        self.run(core, io, &pieces);
        Ok(())
    }

    fn cut(&self, io: &Io, on_disk: impl Fn(Place) -> Option<u32>) -> Pieces {
        let mut view = self.view.borrow_mut();
        let mut pieces = Pieces::new();
        let mut start = 0;
        while start < io.blocks {
            let (cluster, within) = self.clusters.locate(io.lba + start);
            let blocks = (self.clusters.blocks - within).min(io.blocks - start);
            let place = view.place(cluster);
            let target = match (on_disk(place), place) {
                (Some(at), _) => Target::Base(self.block_of(at) + within),
                (None, Place::External) => Target::External(io.lba + start),
                (None, _) => Target::Zeroes,
            };
            push(&mut pieces, Piece { target, start, blocks });
            start += blocks;
        }
        pieces
    }

    fn run(self: &Rc<Self>, core: &Core, io: Io, pieces: &Pieces) {
        if let [Piece { target: Target::Base(lba), .. }] = pieces[..] {
            return self.pass(core, io, lba);
        }
        let is_fua = io.op == IoOp::Write { fua: true };
        let flush = (is_fua && self.volume.store.has_volatile_metadata()).then_some(None);
        let op = if flush.is_some() { IoOp::Write { fua: false } } else { io.op };
        let (lba, bufs) = (io.lba, io.bufs.clone());
        // One more than there are pieces, so that nothing ends before all have begun.
        let split = Split { io, left: 1, status: Status::SUCCESS, flush };
        let key = self.splits.borrow_mut().insert(split);
        for piece in pieces {
            self.start_piece(core, key, op, lba, &bufs, *piece);
        }
        self.piece_done(core, key, Status::SUCCESS);
    }

    fn start_piece(self: &Rc<Self>, core: &Core, split: usize, op: IoOp, lba: u64, bufs: &Bufs, piece: Piece) {
        let block_size = u64::from(self.volume.store.block_size);
        let part = slice(bufs, (piece.start * block_size) as usize, (piece.blocks * block_size) as usize);
        match piece.target {
            Target::Base(at) => self.send(core, &self.store.base.clone(), split, op, at, piece.blocks, part),
            Target::Zeroes => part.iter().for_each(|b| b.fill(0)),
            Target::External(_) => self.read_external(core, split, lba + piece.start, part),
        }
    }

    #[allow(clippy::too_many_arguments, reason = "the parts of one request")]
    fn send(self: &Rc<Self>, core: &Core, to: &Chan, split: usize, op: IoOp, lba: u64, blocks: u64, bufs: Bufs) {
        if let Some(split) = self.splits.borrow_mut().get_mut(split) {
            split.left += 1;
        }
        let period = self.store.flights.begin();
        let tag = self.running.borrow_mut().insert(Running::Piece { split, period }) as u64;
        to.submit(core, Io::new(op, lba, blocks, bufs, Rc::clone(self) as Rc<dyn IoSink>, tag));
    }

    /// Reads from the external device; beyond its end there are zeroes.
    fn read_external(self: &Rc<Self>, core: &Core, split: usize, lba: u64, bufs: Bufs) {
        let Some(external) = self.volume.map.external() else { return self.fail(split, Status::NAMESPACE_NOT_READY) };
        let Some(chan) = self.store.external(core, external.id()) else {
            return self.fail(split, Status::NAMESPACE_NOT_READY);
        };
        let offset = lba * u64::from(self.volume.store.block_size);
        let len: u64 = bufs.iter().map(|b| b.len() as u64).sum();
        let Some(there) = external_bytes(&external, offset, len) else {
            return self.fail(split, Status::NAMESPACE_NOT_READY);
        };
        if there < len {
            slice(&bufs, there as usize, (len - there) as usize).iter().for_each(|b| b.fill(0));
        }
        if there == 0 {
            return;
        }
        let block_size = u64::from(chan.bdev().info().block_size);
        if !offset.is_multiple_of(block_size) || !there.is_multiple_of(block_size) {
            return self.fail(split, Status::INTERNAL_ERROR);
        }
        let (lba, blocks) = (offset / block_size, there / block_size);
        self.send(core, &chan, split, IoOp::Read, lba, blocks, slice(&bufs, 0, there as usize));
    }

    fn fail(&self, split: usize, status: IoStatus) {
        if let Some(split) = self.splits.borrow_mut().get_mut(split) {
            split.status = status;
        }
    }

    /// A piece has ended; the last one answers.
    pub(super) fn piece_done(self: &Rc<Self>, core: &Core, key: usize, status: IoStatus) {
        let mut splits = self.splits.borrow_mut();
        let Some(split) = splits.get_mut(key) else { return };
        if split.status.is_success() {
            split.status = status;
        }
        split.left -= 1;
        if split.left > 0 {
            return;
        }
        if let (Some(None), true) = (split.flush, split.status.is_success()) {
            split.flush = Some(Some(self.volume.store.durability.mark()));
            drop(splits);
            let base = self.store.base.clone();
            let blocks = base.bdev().num_blocks();
            return self.send(core, &base, key, IoOp::Flush, 0, blocks, Bufs::new());
        }
        let split = splits.remove(key);
        drop(splits);
        if let (Some(Some(mark)), true) = (split.flush, split.status.is_success()) {
            self.volume.store.durability.flushed(mark);
        }
        core.complete(split.io, split.status);
    }
}

/// How many of `len` bytes at `offset` the device has; none while it is absent.
fn external_bytes(external: &External, offset: u64, len: u64) -> Option<u64> {
    match external.size() {
        0 => None,
        size => Some(size.saturating_sub(offset).min(len)),
    }
}

#[cfg(test)]
mod tests {
    use addax_hugepages::Buf;

    use super::*;

    #[test]
    fn pieces_that_follow_each_other_become_one() {
        let mut pieces = Pieces::new();
        for (target, start) in [
            (Target::Base(100), 0),
            (Target::Base(108), 8),
            (Target::Zeroes, 16),
            (Target::Zeroes, 24),
            (Target::Base(50), 32),
            (Target::External(40), 40),
            (Target::External(48), 48),
        ] {
            push(&mut pieces, Piece { target, start, blocks: 8 });
        }
        let got: Vec<_> = pieces.iter().map(|p| (p.target, p.start, p.blocks)).collect();
        let expected = [
            (Target::Base(100), 0, 16),
            (Target::Zeroes, 16, 16),
            (Target::Base(50), 32, 8),
            (Target::External(40), 40, 16),
        ];
        assert_eq!(got, expected);
    }

    #[test]
    fn slices_cross_buffers() {
        let bufs: Bufs = [1u8, 2, 3].iter().map(|n| Buf::copy_of(&[*n; 4]).into_slice()).collect();
        let bytes = |start, len| slice(&bufs, start, len).iter().flat_map(|b| b.to_vec()).collect::<Vec<u8>>();
        assert_eq!(bytes(2, 8), [1, 1, 2, 2, 2, 2, 3, 3]);
        assert_eq!(bytes(4, 4), [2, 2, 2, 2]);
        assert_eq!(bytes(0, 0), [0u8; 0]);
        assert_eq!(bytes(11, 9), [3]);
    }
}
