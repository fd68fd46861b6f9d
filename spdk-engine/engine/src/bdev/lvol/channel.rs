//! A volume as one core uses it.
//!
//! *Flow.* [`Inner::submit`] looks the clusters up in the shared map. What lies in one run on the disk goes there as the
//! very I/O it is, with another block address: no allocation, no message. What does not is cut into pieces
//! (`pieces.rs`). Writes to clusters that the volume does not own yet, and what gives clusters back, are asked of the
//! store's owner core (`asks.rs`); a write then starts again from the lookup.
//!
//! *Invariants.* Everything at a disk is booked on the store's [`Flights`](super::flights::Flights) and on this channel,
//! so that the store can wait for it. A stopped channel keeps what arrives and sends nothing. An I/O that waits for the
//! owner is not at the disk: it holds up no stop, and is looked up anew when the answer comes.
//!
//! *When things fail.* The statuses of the disk pass unchanged. No space for a first write is Capacity Exceeded, a write
//! to a read-only volume is Namespace is Write Protected, a missing external device Namespace Not Ready.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;

use futures::channel::oneshot;
use lvol_core::{MapView, Place};
use nvme_wire::Status;
use slab::Slab;

use super::asks::Asks;
use super::durability::Mark;
use super::percore::{Cores, StoreCore};
use super::pieces::Split;
use super::shared::Volume;
use crate::bdev::lvol::flights::Period;
use crate::bdev::{BdevError, Channel, Io, IoOp, IoSink, IoStatus, Origin};
use crate::reactor::Core;

/// A channel as its opener holds it.
pub struct LvolChannel {
    inner: Rc<Inner>,
    core: Core,
}

impl LvolChannel {
    /// Opens the volume on this core.
    ///
    /// # Errors
    /// When the base device cannot be opened.
    pub fn open(core: &Core, volume: &Arc<Volume>) -> Result<Self, BdevError> {
        let cores = Cores::of(core);
        let store = cores.store(core, &volume.store)?;
        let inner = Rc::new(Inner {
            id: cores.next_channel(),
            volume: Arc::clone(volume),
            clusters: Clusters::new(volume.store.cluster_blocks),
            view: RefCell::new(volume.map.view()),
            running: RefCell::default(),
            splits: RefCell::default(),
            asks: Asks::default(),
            kept: RefCell::default(),
            stopped: Cell::new(cores.is_stopped(volume.key())),
            stops: RefCell::default(),
            closed: Cell::new(false),
            store,
        });
        cores.add(Rc::clone(&inner));
        Ok(Self { inner, core: core.clone() })
    }
}

impl Channel for LvolChannel {
    fn submit(&self, core: &Core, io: Io) {
        self.inner.submit(core, io);
    }
}

impl Drop for LvolChannel {
    fn drop(&mut self) {
        let inner = Rc::clone(&self.inner);
        inner.closed.set(true);
        self.core.defer(move |core| inner.leave_if_idle(core));
    }
}

/// Division of blocks into clusters.
#[derive(Debug, Clone, Copy)]
pub struct Clusters {
    pub blocks: u64,
    shift: Option<u32>,
}

impl Clusters {
    fn new(blocks: u64) -> Self {
        Self { blocks, shift: blocks.is_power_of_two().then(|| blocks.trailing_zeros()) }
    }

    /// The cluster of a block, and where in it the block is.
    #[inline]
    pub fn locate(self, lba: u64) -> (u64, u64) {
        match self.shift {
            Some(shift) => (lba >> shift, lba & (self.blocks - 1)),
            None => (lba / self.blocks, lba % self.blocks),
        }
    }
}

/// One I/O at a disk.
pub enum Running {
    /// All of an I/O.
    Whole { origin: Origin, period: Period, then: Then },
    /// One piece of the I/O in this place of the channel's splits.
    Piece { split: usize, period: Period },
}

/// What the success of an I/O still needs or brings.
#[derive(Clone, Copy)]
pub enum Then {
    /// Nothing.
    Done,
    /// A flush, since the I/O must be durable and rests on metadata that is not yet.
    Flush,
    /// It was a flush: metadata up to the mark is durable.
    Durable(Mark),
}

/// The channel proper; it lives until it was closed and has answered everything.
pub struct Inner {
    /// Names the channel on its core.
    pub id: u64,
    pub volume: Arc<Volume>,
    pub(super) store: Rc<StoreCore>,
    pub(super) clusters: Clusters,
    pub(super) view: RefCell<MapView>,
    pub(super) running: RefCell<Slab<Running>>,
    pub(super) splits: RefCell<Slab<Split>>,
    pub(super) asks: Asks,
    kept: RefCell<VecDeque<Io>>,
    stopped: Cell<bool>,
    stops: RefCell<Vec<oneshot::Sender<()>>>,
    closed: Cell<bool>,
}

impl Inner {
    /// Takes an I/O.
    pub(super) fn submit(self: &Rc<Self>, core: &Core, io: Io) {
        if self.stopped.get() {
            return self.kept.borrow_mut().push_back(io);
        }
        match io.op {
            IoOp::Read => self.read(core, io),
            IoOp::Write { .. } | IoOp::Unmap | IoOp::WriteZeroes if self.volume.is_read_only() => {
                core.complete(io, Status::NAMESPACE_WRITE_PROTECTED.with_dnr());
            }
            IoOp::Write { .. } => self.write(core, io),
            IoOp::Unmap | IoOp::WriteZeroes => self.clear(core, io),
            IoOp::Flush => self.flush(core, io),
            IoOp::Compare => core.complete(io, Status::INVALID_OPCODE.with_dnr()),
            IoOp::Reset => core.complete(io, Status::SUCCESS),
        }
    }

    fn read(self: &Rc<Self>, core: &Core, io: Io) {
        let (cluster, within) = self.clusters.locate(io.lba);
        if within + io.blocks > self.clusters.blocks {
            return self.read_pieces(core, io);
        }
        let place = self.view.borrow_mut().place(cluster);
        match place {
            Place::Own(at) | Place::Ancestor(at) => self.pass(core, io, self.block_of(at) + within),
            Place::Zeroes => {
                io.bufs.iter().for_each(|b| b.fill(0));
                core.complete(io, Status::SUCCESS);
            }
            Place::External => self.read_pieces(core, io),
        }
    }

    fn write(self: &Rc<Self>, core: &Core, io: Io) {
        let (first, within) = self.clusters.locate(io.lba);
        if within + io.blocks <= self.clusters.blocks {
            let own = self.view.borrow_mut().own(first);
            if let Some(at) = own {
                return self.pass(core, io, self.block_of(at) + within);
            }
        }
        let (last, _) = self.clusters.locate(io.lba + io.blocks.max(1) - 1);
        let Err(io) = self.write_pieces(core, io) else { return };
        if last >= self.view.borrow_mut().clusters() {
            return core.complete(io, Status::LBA_OUT_OF_RANGE);
        }
        self.ask_for_clusters(core, first, last, io);
    }

    /// Whether the volume owns all clusters from `first` to `last`.
    pub(super) fn owns(&self, first: u64, last: u64) -> bool {
        let mut view = self.view.borrow_mut();
        (first..=last).all(|cluster| view.own(cluster).is_some())
    }

    /// A part of one cluster of the volume's own is zeroed on the disk; all else may change the map.
    fn clear(self: &Rc<Self>, core: &Core, mut io: Io) {
        let (cluster, within) = self.clusters.locate(io.lba);
        let is_part = io.blocks < self.clusters.blocks && within + io.blocks <= self.clusters.blocks;
        let own = if is_part { self.view.borrow_mut().own(cluster) } else { None };
        match own {
            Some(at) => {
                io.op = IoOp::WriteZeroes;
                self.pass(core, io, self.block_of(at) + within);
            }
            None => self.ask_to_clear(core, io),
        }
    }

    fn flush(self: &Rc<Self>, core: &Core, io: Io) {
        let mark = self.volume.store.durability.mark();
        let blocks = self.store.base.bdev().num_blocks();
        self.pass_then(core, io, 0, blocks, Then::Durable(mark));
    }

    /// First block of a cluster on the disk.
    pub(super) fn block_of(&self, cluster: u32) -> u64 {
        u64::from(cluster) * self.clusters.blocks
    }

    /// Sends the whole I/O to the base device at another address.
    #[inline]
    pub(super) fn pass(self: &Rc<Self>, core: &Core, mut io: Io, lba: u64) {
        let mut then = Then::Done;
        if io.op == (IoOp::Write { fua: true }) && self.volume.store.has_volatile_metadata() {
            io.op = IoOp::Write { fua: false };
            then = Then::Flush;
        }
        let blocks = io.blocks;
        self.pass_then(core, io, lba, blocks, then);
    }

    fn pass_then(self: &Rc<Self>, core: &Core, mut io: Io, lba: u64, blocks: u64, then: Then) {
        let period = self.store.flights.begin();
        let mut running = self.running.borrow_mut();
        let entry = running.vacant_entry();
        let origin = io.divert(Rc::clone(self) as Rc<dyn IoSink>, entry.key() as u64);
        entry.insert(Running::Whole { origin, period, then });
        drop(running);
        (io.lba, io.blocks) = (lba, blocks);
        self.store.base.submit(core, io);
    }

    /// Stops the channel; none when nothing of it is at a disk.
    pub(super) fn stop(self: &Rc<Self>, core: &Core) -> Option<oneshot::Receiver<()>> {
        self.stopped.set(true);
        // What was asked for before the stop has to be with the owner before the owner learns of it.
        self.send_asks(core);
        if self.running.borrow().is_empty() {
            return None;
        }
        let (sender, receiver) = oneshot::channel();
        self.stops.borrow_mut().push(sender);
        Some(receiver)
    }

    /// Lets what was kept go on.
    pub(super) fn go_on(self: &Rc<Self>, core: &Core) {
        self.stopped.set(false);
        let kept = self.kept.take();
        for io in kept {
            self.submit(core, io);
        }
        self.leave_if_idle(core);
    }

    /// Whether the channel is stopped.
    pub(super) fn is_stopped(&self) -> bool {
        self.stopped.get()
    }

    /// Called when something was answered.
    pub(super) fn leave_if_idle(self: &Rc<Self>, core: &Core) {
        let idle = self.running.borrow().is_empty() && self.kept.borrow().is_empty() && self.asks.is_empty();
        if self.closed.get() && idle {
            Cores::of(core).remove(core, self);
        }
    }

    fn landed(self: &Rc<Self>, core: &Core, period: Period) {
        self.store.flights.end(period);
        if self.running.borrow().is_empty() {
            if !self.stops.borrow().is_empty() {
                for sender in self.stops.take() {
                    let _ = sender.send(());
                }
            }
            if self.closed.get() {
                self.leave_if_idle(core);
            }
        }
    }

    fn whole_done(self: &Rc<Self>, core: &Core, origin: Origin, period: Period, then: Then, status: IoStatus) {
        match then {
            Then::Flush if status.is_success() => {
                let mark = self.volume.store.durability.mark();
                let running = Running::Whole { origin, period, then: Then::Durable(mark) };
                let tag = self.running.borrow_mut().insert(running) as u64;
                let blocks = self.store.base.bdev().num_blocks();
                let sink = Rc::clone(self) as Rc<dyn IoSink>;
                let flush = Io::new(IoOp::Flush, 0, blocks, crate::bdev::Bufs::new(), sink, tag);
                return self.store.base.submit(core, flush);
            }
            Then::Durable(mark) if status.is_success() => self.volume.store.durability.flushed(mark),
            _ => {}
        }
        self.landed(core, period);
        origin.finish(core, status);
    }
}

impl IoSink for Inner {
    fn io_done(self: Rc<Self>, core: &Core, tag: u64, status: IoStatus) {
        let running = self.running.borrow_mut().remove(tag as usize);
        match running {
            Running::Whole { origin, period, then } => self.whole_done(core, origin, period, then, status),
            Running::Piece { split, period } => {
                self.landed(core, period);
                self.piece_done(core, split, status);
            }
        }
    }
}
