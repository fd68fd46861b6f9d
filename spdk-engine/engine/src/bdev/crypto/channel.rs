//! I/O of a `crypto` device on one core.
//!
//! *Flow.* A write is encrypted into buffers of the pool, which then go to the base: the submitter's bytes stay as they
//! are. A read fills the submitter's buffers and is decrypted in them before it is answered. All else goes through.
//!
//! *Invariants.* No allocation per I/O beyond buffers of the pool. Writes are encrypted in the order they came.
//!
//! *When things fail.* Without buffers writes wait, first come first served, and are tried again when one has ended or a
//! moment later.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;

use nvme_wire::Status;
use slab::Slab;

use super::keys::Key;
use crate::bdev::{Bufs, Chan, Channel, Io, IoOp, IoSink, IoStatus};
use crate::reactor::Core;
use crate::reactor::driver::Nanos;

/// When writes that wait for buffers are tried again, with nothing of ours in flight.
const RETRY_NS: Nanos = 100_000;

/// A channel.
pub struct CryptoChannel(Rc<Inner>);

struct Inner {
    base: Chan,
    key: Arc<Key>,
    block_size: usize,
    running: RefCell<Slab<Io>>,
    /// Writes that wait for buffers.
    waiting: RefCell<VecDeque<Io>>,
    retrying: Cell<bool>,
    closing: Cell<bool>,
    /// One disk block, worked on where no one else sees it.
    scratch: RefCell<Vec<u8>>,
}

impl CryptoChannel {
    /// Over an open base.
    #[must_use]
    pub fn new(base: Chan, key: Arc<Key>, block_size: usize) -> Self {
        Self(Rc::new(Inner {
            base,
            key,
            block_size,
            running: RefCell::default(),
            waiting: RefCell::default(),
            retrying: Cell::new(false),
            closing: Cell::new(false),
            scratch: RefCell::new(vec![0; block_size]),
        }))
    }
}

impl Channel for CryptoChannel {
    fn submit(&self, core: &Core, io: Io) {
        match io.op {
            IoOp::Write { .. } => self.0.write(core, io),
            IoOp::WriteZeroes | IoOp::Compare => core.complete(io, Status::INVALID_OPCODE.with_dnr()),
            _ => {
                let bufs = io.bufs.clone();
                self.0.hand_on(core, io, bufs);
            }
        }
    }

    fn close(&self, core: &Core) {
        self.0.closing.set(true);
        self.0.close_if_over(core);
    }
}

impl Inner {
    fn write(self: &Rc<Self>, core: &Core, io: Io) {
        if !self.waiting.borrow().is_empty() {
            return self.waiting.borrow_mut().push_back(io);
        }
        match self.encrypted(core, &io) {
            Some(bufs) => self.hand_on(core, io, bufs),
            None => {
                self.waiting.borrow_mut().push_back(io);
                self.retry_later(core);
            }
        }
    }

    fn hand_on(self: &Rc<Self>, core: &Core, io: Io, bufs: Bufs) {
        let (op, lba, blocks) = (io.op, io.lba, io.blocks);
        let tag = self.running.borrow_mut().insert(io) as u64;
        self.base.submit(core, Io::new(op, lba, blocks, bufs, Rc::clone(self) as Rc<dyn IoSink>, tag));
    }

    /// The data of a write, encrypted; `None` when the pool has no buffers now.
    fn encrypted(&self, core: &Core, io: &Io) -> Option<Bufs> {
        let most = core.pool().max_len() / self.block_size * self.block_size;
        let (mut left, mut lba) = (io.bytes(), io.lba);
        let mut sources = io.bufs.iter();
        let (mut source, mut at) = (sources.next(), 0);
        let mut out = Bufs::new();
        while left > 0 {
            let mut buf = core.pool().take(left.min(most))?;
            let mut filled = 0;
            while filled < buf.len() {
                let from = source?;
                let now = (from.len() - at).min(buf.len() - filled);
                buf.copy_from_memory(&from.slice(at..at + now), filled);
                (filled, at) = (filled + now, at + now);
                if at == from.len() {
                    (source, at) = (sources.next(), 0);
                }
            }
            left -= buf.len();
            for block in buf.get_mut()?.chunks_mut(self.block_size) {
                self.key.xts.encrypt(lba, block);
                lba += 1;
            }
            out.push(buf.into_slice());
        }
        Some(out)
    }

    fn decrypt(&self, io: &Io) {
        let mut scratch = self.scratch.borrow_mut();
        let (mut lba, mut filled) = (io.lba, 0);
        // Where the block in the scratch space began: it may lie in several buffers.
        let mut begin = (0, 0);
        for (index, buf) in io.bufs.iter().enumerate() {
            let mut at = 0;
            while at < buf.len() {
                if filled == 0 {
                    begin = (index, at);
                }
                let now = (buf.len() - at).min(self.block_size - filled);
                buf.copy_to(at, &mut scratch[filled..filled + now]);
                (at, filled) = (at + now, filled + now);
                if filled == self.block_size {
                    self.key.xts.decrypt(lba, &mut scratch);
                    scatter(&io.bufs, begin, &scratch);
                    (lba, filled) = (lba + 1, 0);
                }
            }
        }
    }

    fn retry_later(self: &Rc<Self>, core: &Core) {
        if self.retrying.replace(true) {
            return;
        }
        let inner = Rc::clone(self);
        core.after(
            RETRY_NS,
            Rc::new(move |core| {
                inner.retrying.set(false);
                inner.retry(core);
            }),
        );
    }

    fn retry(self: &Rc<Self>, core: &Core) {
        loop {
            let next = self.waiting.borrow_mut().pop_front();
            let Some(io) = next else { return self.close_if_over(core) };
            let Some(bufs) = self.encrypted(core, &io) else {
                self.waiting.borrow_mut().push_front(io);
                return self.retry_later(core);
            };
            self.hand_on(core, io, bufs);
        }
    }

    fn close_if_over(&self, core: &Core) {
        if self.closing.get() && self.waiting.borrow().is_empty() {
            self.closing.set(false);
            self.base.close(core);
        }
    }
}

/// Puts a block back to where it came from.
fn scatter(bufs: &Bufs, (index, at): (usize, usize), block: &[u8]) {
    let (mut at, mut done) = (at, 0);
    for buf in &bufs[index..] {
        let now = (buf.len() - at).min(block.len() - done);
        buf.copy_from(&block[done..done + now], at);
        (at, done) = (0, done + now);
        if done == block.len() {
            return;
        }
    }
}

impl IoSink for Inner {
    fn io_done(self: Rc<Self>, core: &Core, tag: u64, status: IoStatus) {
        let io = self.running.borrow_mut().try_remove(tag as usize);
        let Some(io) = io else { return };
        if io.op == IoOp::Read && status.is_success() {
            self.decrypt(&io);
        }
        core.complete(io, status);
        if !self.waiting.borrow().is_empty() {
            self.retry(core);
        }
    }
}
