//! The seam to the disk: what the store needs of a block device, and how it fails.
//!
//! Offsets and lengths are bytes and multiples of [`Device::block_size`]. Several requests may be in flight at once, in
//! any order; the device orders nothing by itself. What a completed write leaves behind after a power loss depends on
//! [`Device::write_cache`]: with a volatile cache only a later completed [`Device::flush`] makes it durable, and any
//! subset of unflushed writes may be lost. A metadata page (4096 bytes or more) is assumed to be written whole or not at
//! all (see [`crate::crash`]).

use std::{any::Any, future::Future, pin::Pin};

/// A boxed future of this thread.
pub type LocalFuture<'a, T> = Pin<Box<dyn Future<Output = T> + 'a>>;

/// What a device call answers.
pub type DeviceFuture<'a, T> = LocalFuture<'a, Result<T, DeviceError>>;

/// Why a device refused or failed a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// The device itself is thin and has no room for this write.
    #[error("the device has no space left")]
    NoSpace,
    /// The device was removed.
    #[error("the device is gone")]
    Gone,
    /// The medium or the path failed.
    #[error("I/O error")]
    Io,
}

/// A block device as the store sees it.
pub trait Device {
    /// Bytes of a logical block: the unit of every request.
    fn block_size(&self) -> u32;

    /// Bytes of a physical block; metadata pages are at least so large.
    fn physical_block_size(&self) -> u32 {
        self.block_size()
    }

    /// Size in bytes at this moment; it may grow.
    fn size_bytes(&self) -> u64;

    /// Whether completed writes may be lost with power until a flush.
    fn write_cache(&self) -> bool;

    /// Whether [`Device::unmap`] works.
    fn can_unmap(&self) -> bool;

    /// Whether an unmapped range is known to read as zeroes, also after a crash that follows a flush.
    fn unmap_reads_zeroes(&self) -> bool;

    /// Reads `len` bytes.
    fn read(&self, offset: u64, len: usize) -> DeviceFuture<'_, Vec<u8>>;

    /// Writes `data`.
    fn write<'a>(&'a self, offset: u64, data: &'a [u8]) -> DeviceFuture<'a, ()>;

    /// Makes a range read as zeroes, for certain.
    fn write_zeroes(&self, offset: u64, len: u64) -> DeviceFuture<'_, ()>;

    /// Gives the space of a range back. Called only when [`Device::can_unmap`].
    fn unmap(&self, offset: u64, len: u64) -> DeviceFuture<'_, ()>;

    /// Makes everything that completed before durable.
    fn flush(&self) -> DeviceFuture<'_, ()>;

    /// Copies `len` bytes within the device; the ranges never overlap. By default in pieces of at most 1 MiB through
    /// memory.
    fn copy(&self, from: u64, to: u64, len: u64) -> DeviceFuture<'_, ()> {
        Box::pin(async move {
            let mut done = 0;
            while done < len {
                let piece = (len - done).min(COPY_PIECE);
                let data = self.read(from + done, piece as usize).await?;
                self.write(to + done, &data).await?;
                done += piece;
            }
            Ok(())
        })
    }

    /// Copies `len` bytes from another device to this one. By default in pieces of at most 1 MiB through memory.
    fn copy_from<'a>(&'a self, source: &'a dyn Device, from: u64, to: u64, len: u64) -> DeviceFuture<'a, ()> {
        Box::pin(async move {
            let mut done = 0;
            while done < len {
                let piece = (len - done).min(COPY_PIECE);
                let data = source.read(from + done, piece as usize).await?;
                self.write(to + done, &data).await?;
                done += piece;
            }
            Ok(())
        })
    }

    /// Where data may begin at or after `offset`: everything between reads as zeroes. The answer may be `offset` itself
    /// (the default) and must not lie beyond `end`. Lets a recovery skip the holes of a sparse file.
    fn next_data(&self, offset: u64, end: u64) -> DeviceFuture<'_, u64> {
        debug_assert!(offset <= end);
        Box::pin(async move { Ok(offset) })
    }

    /// For an implementation that wants to know its own kind again in [`Device::copy_from`].
    fn as_any(&self) -> &dyn Any;
}

/// Bytes that a default copy moves at once.
const COPY_PIECE: u64 = 1 << 20;
