//! A device in memory, for tests: sparse, with the properties one asks for.

use crate::device::{Device, DeviceError, DeviceFuture};
use std::{
    any::Any,
    cell::{Cell, RefCell},
    collections::BTreeMap,
    future::poll_fn,
    task::Poll,
};

/// Bytes of one piece that is kept or not.
const PIECE: u64 = 4096;

/// A sparse device in memory.
#[derive(Debug)]
pub struct MemoryDevice {
    pieces: RefCell<BTreeMap<u64, Box<[u8]>>>,
    block_size: u32,
    size: Cell<u64>,
    write_cache: bool,
    unmap: bool,
    unmap_zeroes: bool,
    waits: bool,
    gone: Cell<bool>,
    counts: Cell<Counts>,
}

/// Requests served so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Reads.
    pub reads: u64,
    /// Writes, zeroing included.
    pub writes: u64,
    /// Unmaps.
    pub unmaps: u64,
    /// Flushes.
    pub flushes: u64,
}

impl MemoryDevice {
    /// A device of zeroes with blocks of 512 bytes, without a volatile cache, whose unmap reads as zeroes.
    pub fn new(size: u64) -> Self {
        Self {
            pieces: RefCell::default(),
            block_size: 512,
            size: Cell::new(size),
            write_cache: false,
            unmap: true,
            unmap_zeroes: true,
            waits: false,
            gone: Cell::new(false),
            counts: Cell::default(),
        }
    }

    /// With another block size, in bytes.
    pub fn with_block_size(mut self, block_size: u32) -> Self {
        self.block_size = block_size;
        self
    }

    /// With a volatile cache, at least by name: the store then flushes.
    pub fn with_write_cache(mut self) -> Self {
        self.write_cache = true;
        self
    }

    /// That cannot unmap.
    pub fn without_unmap(mut self) -> Self {
        self.unmap = false;
        self.unmap_zeroes = false;
        self
    }

    /// Whose unmap promises nothing: it leaves rubbish.
    pub fn with_unmap_rubbish(mut self) -> Self {
        self.unmap_zeroes = false;
        self
    }

    /// That lets others run before it carries a request out, as a real one does.
    pub fn with_waits(mut self) -> Self {
        self.waits = true;
        self
    }

    /// Makes it larger (or smaller).
    pub fn set_size(&self, size: u64) {
        self.size.set(size);
    }

    /// Takes it away: every request fails from now on.
    pub fn remove(&self) {
        self.gone.set(true);
    }

    /// Requests served so far.
    pub fn counts(&self) -> Counts {
        self.counts.get()
    }

    /// Fills a range with a byte, as an earlier owner of the disk may have.
    pub fn fill(&self, offset: u64, len: u64, byte: u8) {
        let data = vec![byte; PIECE as usize];
        let mut at = offset;
        while at < offset + len {
            let n = (PIECE - at % PIECE).min(offset + len - at);
            self.put(at, &data[..n as usize]);
            at += n;
        }
    }

    /// A copy of what it holds now, with the same properties.
    pub fn fork(&self) -> Self {
        Self {
            pieces: self.pieces.clone(),
            block_size: self.block_size,
            size: self.size.clone(),
            write_cache: self.write_cache,
            unmap: self.unmap,
            unmap_zeroes: self.unmap_zeroes,
            waits: self.waits,
            gone: Cell::new(false),
            counts: Cell::default(),
        }
    }

    async fn check(&self, offset: u64, len: u64) -> Result<(), DeviceError> {
        let mut waited = !self.waits;
        poll_fn(|context| {
            if std::mem::replace(&mut waited, true) {
                return Poll::Ready(());
            }
            context.waker().wake_by_ref();
            Poll::Pending
        })
        .await;
        if self.gone.get() {
            return Err(DeviceError::Gone);
        }
        let block = u64::from(self.block_size);
        let fits = offset.checked_add(len).is_some_and(|end| end <= self.size.get());
        if fits && offset.is_multiple_of(block) && len.is_multiple_of(block) { Ok(()) } else { Err(DeviceError::Io) }
    }

    fn count(&self, change: impl FnOnce(&mut Counts)) {
        let mut counts = self.counts.get();
        change(&mut counts);
        self.counts.set(counts);
    }

    fn put(&self, offset: u64, data: &[u8]) {
        let mut pieces = self.pieces.borrow_mut();
        let mut done = 0;
        while done < data.len() {
            let at = offset + done as u64;
            let start = (at % PIECE) as usize;
            let n = (PIECE as usize - start).min(data.len() - done);
            let piece = pieces.entry(at / PIECE).or_insert_with(|| vec![0; PIECE as usize].into());
            piece[start..start + n].copy_from_slice(&data[done..done + n]);
            done += n;
        }
    }

    fn zero(&self, offset: u64, len: u64) {
        let end = offset + len;
        let (first, last) = (offset.div_ceil(PIECE), end / PIECE);
        if first < last {
            let mut pieces = self.pieces.borrow_mut();
            let gone: Vec<u64> = pieces.range(first..last).map(|(n, _)| *n).collect();
            for n in gone {
                pieces.remove(&n);
            }
            drop(pieces);
            self.zero_partial(offset, first * PIECE);
            self.zero_partial(last * PIECE, end);
        } else {
            self.zero_partial(offset, end);
        }
    }

    fn zero_partial(&self, from: u64, to: u64) {
        if from < to {
            self.put(from, &vec![0; (to - from) as usize]);
        }
    }
}

impl Device for MemoryDevice {
    fn block_size(&self) -> u32 {
        self.block_size
    }

    fn size_bytes(&self) -> u64 {
        self.size.get()
    }

    fn write_cache(&self) -> bool {
        self.write_cache
    }

    fn can_unmap(&self) -> bool {
        self.unmap
    }

    fn unmap_reads_zeroes(&self) -> bool {
        self.unmap_zeroes
    }

    fn read(&self, offset: u64, len: usize) -> DeviceFuture<'_, Vec<u8>> {
        Box::pin(async move {
            self.check(offset, len as u64).await?;
            self.count(|c| c.reads += 1);
            let pieces = self.pieces.borrow();
            let mut out = vec![0; len];
            let mut done = 0;
            while done < len {
                let at = offset + done as u64;
                let start = (at % PIECE) as usize;
                let n = (PIECE as usize - start).min(len - done);
                if let Some(piece) = pieces.get(&(at / PIECE)) {
                    out[done..done + n].copy_from_slice(&piece[start..start + n]);
                }
                done += n;
            }
            Ok(out)
        })
    }

    fn write<'a>(&'a self, offset: u64, data: &'a [u8]) -> DeviceFuture<'a, ()> {
        Box::pin(async move {
            self.check(offset, data.len() as u64).await?;
            self.count(|c| c.writes += 1);
            self.put(offset, data);
            Ok(())
        })
    }

    fn write_zeroes(&self, offset: u64, len: u64) -> DeviceFuture<'_, ()> {
        Box::pin(async move {
            self.check(offset, len).await?;
            self.count(|c| c.writes += 1);
            self.zero(offset, len);
            Ok(())
        })
    }

    fn unmap(&self, offset: u64, len: u64) -> DeviceFuture<'_, ()> {
        Box::pin(async move {
            self.check(offset, len).await?;
            if !self.unmap {
                return Err(DeviceError::Io);
            }
            self.count(|c| c.unmaps += 1);
            if self.unmap_zeroes {
                self.zero(offset, len)
            } else {
                self.fill(offset, len, 0xdb)
            }
            Ok(())
        })
    }

    fn flush(&self) -> DeviceFuture<'_, ()> {
        Box::pin(async move {
            self.check(0, 0).await?;
            self.count(|c| c.flushes += 1);
            Ok(())
        })
    }

    fn next_data(&self, offset: u64, end: u64) -> DeviceFuture<'_, u64> {
        Box::pin(async move {
            self.check(0, 0).await?;
            let next = self.pieces.borrow().range(offset / PIECE..).next().map_or(end, |(n, _)| n * PIECE);
            Ok(next.clamp(offset, end.max(offset)))
        })
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::executor::block_on;

    #[test]
    fn keeps_what_was_written_and_forgets_what_was_zeroed() {
        let device = MemoryDevice::new(1 << 30);
        block_on(async {
            device.write(512, &[7; 8192]).await.unwrap();
            device.write_zeroes(1024, 4096).await.unwrap();
            let back = device.read(0, 12288).await.unwrap();
            for (at, byte) in back.iter().enumerate() {
                let written = (512..8704).contains(&at) && !(1024..5120).contains(&at);
                assert_eq!(*byte, if written { 7 } else { 0 }, "{at}");
            }
            device.unmap(0, 1 << 20).await.unwrap();
            assert_eq!(device.next_data(0, 1 << 30).await.unwrap(), 1 << 30);
            assert_eq!(device.read(100, 512).await, Err(DeviceError::Io));
            device.remove();
            assert_eq!(device.flush().await, Err(DeviceError::Gone));
        });
    }
}
