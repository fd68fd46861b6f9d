//! The store's disk: lvol-core's [`Device`] over a channel of the engine, on the store's owner core.
//!
//! *Invariants.* Metadata goes through small buffers, one per request. Copies of clusters go in pieces of
//! [`PIECE_BYTES`], at most [`COPIES_MAX`] of a device at once, so that memory stays bounded however many clusters are
//! copied.
//!
//! *When things fail.* All pieces of a request have ended when it fails: nothing of it can land later. NVMe statuses become the store's errors: Capacity Exceeded is *no space*, what comes after
//! [`BaseDevice::set_gone`] is *gone*, all else an I/O error. An unmap that the medium refuses is written as zeroes.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;

use addax_hugepages::{Buf, BufSlice};
use futures::channel::oneshot;
use futures::future::join_all;
use lvol_core::DeviceError;
use lvol_core::device::{Device, DeviceFuture};
use nvme_wire::Status;

use crate::bdev::registry::Entry;
use crate::bdev::{BdevError, Bufs, Chan, Io, IoOp, IoSink, IoStatus};
use crate::reactor::Core;

/// Bytes of one request: what every device takes, and a buffer of the pool holds.
const PIECE_BYTES: u64 = 128 << 10;
/// Bytes moved at once within memory: a few tens of microseconds.
const MEMORY_PIECE_BYTES: u64 = 512 << 10;
/// Pieces of copies in flight on one device.
const COPIES_MAX: usize = 16;
/// Requests in flight of one long read or write.
const PIECES_MAX: usize = 8;
/// Blocks of one request without data (unmap, zeroes), in bytes: bounds how long a device works at one.
const RANGE_BYTES: u64 = 1 << 30;

/// A device of the engine as a store on this core sees it.
pub struct BaseDevice {
    core: Core,
    chan: Chan,
    block_size: u32,
    physical_block_size: u32,
    write_cache: bool,
    can_unmap: bool,
    unmap_reads_zeroes: bool,
    gone: Cell<bool>,
    copies: Permits,
}

impl BaseDevice {
    /// Opens a device on this core.
    ///
    /// # Errors
    /// As the device's own opening.
    pub fn open(core: &Core, entry: &Arc<Entry>) -> Result<Rc<Self>, BdevError> {
        let info = entry.bdev.info();
        Ok(Rc::new(Self {
            core: core.clone(),
            chan: entry.open(core)?,
            block_size: info.block_size,
            physical_block_size: info.physical_block_size,
            write_cache: info.write_cache,
            can_unmap: info.io_types.unmap,
            unmap_reads_zeroes: entry.bdev.unmap_reads_zeroes(),
            gone: Cell::new(false),
            copies: Permits::new(COPIES_MAX),
        }))
    }

    /// From now on everything fails at once: the device was removed.
    pub fn set_gone(&self) {
        self.gone.set(true);
    }

    async fn io(&self, op: IoOp, offset: u64, len: u64, bufs: Bufs) -> Result<(), DeviceError> {
        if self.gone.get() {
            return Err(DeviceError::Gone);
        }
        let block_size = u64::from(self.block_size);
        let (sender, receiver) = oneshot::channel();
        let sink = Rc::new(Ended(RefCell::new(Some(sender))));
        self.chan.submit(&self.core, Io::new(op, offset / block_size, len / block_size, bufs, sink, 0));
        match receiver.await {
            Ok(status) => to_result(status, self.gone.get()),
            Err(_) => Err(DeviceError::Gone),
        }
    }

    fn buffer(&self, len: usize) -> Buf {
        self.core.pool().take(len).unwrap_or_else(|| Buf::alloc_unpooled(len))
    }

    async fn read_piece(&self, offset: u64, len: u64) -> Result<BufSlice, DeviceError> {
        let buf = self.buffer(len as usize).into_slice();
        self.io(IoOp::Read, offset, len, smallvec::smallvec![buf.clone()]).await?;
        Ok(buf)
    }

    async fn write_piece(&self, offset: u64, data: &[u8]) -> Result<(), DeviceError> {
        let buf = self.buffer(data.len());
        buf.copy_from(data, 0);
        let op = IoOp::Write { fua: false };
        self.io(op, offset, data.len() as u64, smallvec::smallvec![buf.into_slice()]).await
    }

    /// Requests without data, one after another.
    async fn ranges(&self, op: IoOp, offset: u64, len: u64) -> Result<(), DeviceError> {
        let mut done = 0;
        while done < len {
            let now = (len - done).min(RANGE_BYTES);
            self.io(op, offset + done, now, Bufs::new()).await?;
            done += now;
        }
        Ok(())
    }

    /// Copies within memory, pieces with the rest of the core's work in between; none where the medium is another.
    async fn copy_in_memory(&self, from: u64, to: u64, len: u64) -> Option<Result<(), DeviceError>> {
        let block_size = u64::from(self.block_size);
        let mut done = 0;
        while done < len {
            if self.gone.get() {
                return Some(Err(DeviceError::Gone));
            }
            let now = (len - done).min(MEMORY_PIECE_BYTES);
            let blocks = now / block_size;
            let status = self.chan.copy_now((from + done) / block_size, (to + done) / block_size, blocks)?;
            if let Err(error) = to_result(status, self.gone.get()) {
                return Some(Err(error));
            }
            done += now;
            if done < len {
                self.pause().await;
            }
        }
        Some(Ok(()))
    }

    /// Lets everything else of this turn of the core's loop go first.
    async fn pause(&self) {
        let (sender, receiver) = oneshot::channel();
        self.core.defer(move |_| drop(sender));
        let _: Result<(), _> = receiver.await;
    }

    /// Copies from `source` (this device or another) in pieces, several at once.
    async fn copy_pieces(&self, source: &Self, from: u64, to: u64, len: u64) -> Result<(), DeviceError> {
        let pieces = (0..len.div_ceil(PIECE_BYTES)).map(|n| async move {
            let _permit = self.copies.take().await;
            let at = n * PIECE_BYTES;
            let now = PIECE_BYTES.min(len - at);
            let data = source.read_piece(from + at, now).await?;
            self.io(IoOp::Write { fua: false }, to + at, now, smallvec::smallvec![data]).await
        });
        join_all(pieces).await.into_iter().collect()
    }
}

impl Drop for BaseDevice {
    fn drop(&mut self) {
        self.chan.close(&self.core);
    }
}

impl Device for BaseDevice {
    fn block_size(&self) -> u32 {
        self.block_size
    }

    fn physical_block_size(&self) -> u32 {
        self.physical_block_size.max(self.block_size)
    }

    fn size_bytes(&self) -> u64 {
        self.chan.bdev().num_blocks() * u64::from(self.block_size)
    }

    fn write_cache(&self) -> bool {
        self.write_cache
    }

    fn can_unmap(&self) -> bool {
        self.can_unmap
    }

    fn unmap_reads_zeroes(&self) -> bool {
        self.unmap_reads_zeroes
    }

    fn read(&self, offset: u64, len: usize) -> DeviceFuture<'_, Vec<u8>> {
        Box::pin(async move {
            let mut data = Vec::with_capacity(len);
            while data.len() < len {
                let at = data.len() as u64;
                let batch = (len as u64 - at).min(PIECE_BYTES * PIECES_MAX as u64);
                let pieces = (0..batch.div_ceil(PIECE_BYTES))
                    .map(|n| self.read_piece(offset + at + n * PIECE_BYTES, PIECE_BYTES.min(batch - n * PIECE_BYTES)));
                for piece in join_all(pieces).await {
                    piece?.for_each_chunk(|chunk| data.extend_from_slice(chunk));
                }
            }
            Ok(data)
        })
    }

    fn write<'a>(&'a self, offset: u64, data: &'a [u8]) -> DeviceFuture<'a, ()> {
        Box::pin(async move {
            for (n, batch) in data.chunks(PIECE_BYTES as usize * PIECES_MAX).enumerate() {
                let at = offset + n as u64 * PIECE_BYTES * PIECES_MAX as u64;
                let pieces = batch.chunks(PIECE_BYTES as usize).enumerate();
                let writes = pieces.map(|(i, piece)| self.write_piece(at + i as u64 * PIECE_BYTES, piece));
                join_all(writes).await.into_iter().collect::<Result<(), _>>()?;
            }
            Ok(())
        })
    }

    fn write_zeroes(&self, offset: u64, len: u64) -> DeviceFuture<'_, ()> {
        Box::pin(self.ranges(IoOp::WriteZeroes, offset, len))
    }

    fn unmap(&self, offset: u64, len: u64) -> DeviceFuture<'_, ()> {
        Box::pin(async move {
            match self.ranges(IoOp::Unmap, offset, len).await {
                // Some media say that they can and then refuse.
                Err(DeviceError::Io) => self.ranges(IoOp::WriteZeroes, offset, len).await,
                other => other,
            }
        })
    }

    fn flush(&self) -> DeviceFuture<'_, ()> {
        Box::pin(self.io(IoOp::Flush, 0, self.size_bytes(), Bufs::new()))
    }

    fn copy(&self, from: u64, to: u64, len: u64) -> DeviceFuture<'_, ()> {
        Box::pin(async move {
            match self.copy_in_memory(from, to, len).await {
                Some(copied) => copied,
                None => self.copy_pieces(self, from, to, len).await,
            }
        })
    }

    fn copy_from<'a>(&'a self, source: &'a dyn Device, from: u64, to: u64, len: u64) -> DeviceFuture<'a, ()> {
        Box::pin(async move {
            if let Some(source) = source.as_any().downcast_ref::<Self>() {
                return self.copy_pieces(source, from, to, len).await;
            }
            let mut done = 0;
            while done < len {
                let now = (len - done).min(PIECE_BYTES);
                let data = source.read(from + done, now as usize).await?;
                self.write(to + done, &data).await?;
                done += now;
            }
            Ok(())
        })
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

fn to_result(status: IoStatus, gone: bool) -> Result<(), DeviceError> {
    match status {
        s if s.is_success() => Ok(()),
        s if s.is(Status::CAPACITY_EXCEEDED) => Err(DeviceError::NoSpace),
        _ if gone => Err(DeviceError::Gone),
        _ => Err(DeviceError::Io),
    }
}

/// Ends the wait for one I/O.
struct Ended(RefCell<Option<oneshot::Sender<IoStatus>>>);

impl IoSink for Ended {
    fn io_done(self: Rc<Self>, _core: &Core, _tag: u64, status: IoStatus) {
        if let Some(sender) = self.0.borrow_mut().take() {
            let _ = sender.send(status);
        }
    }
}

/// A bounded number of permits, given in the order of asking.
struct Permits {
    free: Cell<usize>,
    waiting: RefCell<VecDeque<oneshot::Sender<()>>>,
}

/// Given back when dropped.
struct Permit<'a>(&'a Permits);

impl Permits {
    fn new(free: usize) -> Self {
        Self { free: Cell::new(free), waiting: RefCell::default() }
    }

    async fn take(&self) -> Permit<'_> {
        while self.free.get() == 0 {
            let (sender, receiver) = oneshot::channel();
            self.waiting.borrow_mut().push_back(sender);
            let _ = receiver.await;
        }
        self.free.set(self.free.get() - 1);
        Permit(self)
    }
}

impl Drop for Permit<'_> {
    fn drop(&mut self) {
        self.0.free.set(self.0.free.get() + 1);
        while let Some(next) = self.0.waiting.borrow_mut().pop_front() {
            if next.send(()).is_ok() {
                break;
            }
        }
    }
}
