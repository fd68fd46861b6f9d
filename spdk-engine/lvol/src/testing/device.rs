//! [`PowerDisk`] as the store's device.

use std::any::Any;

use super::power::{DiskFailure, DiskOp, PowerDisk, Unmapped};
use crate::device::{Device, DeviceError, DeviceFuture};

impl From<DiskFailure> for DeviceError {
    fn from(failure: DiskFailure) -> Self {
        match failure {
            DiskFailure::Range | DiskFailure::Io => Self::Io,
            DiskFailure::NoSpace => Self::NoSpace,
            DiskFailure::Gone => Self::Gone,
        }
    }
}

impl PowerDisk {
    fn change(&self, op: DiskOp) -> DeviceFuture<'_, ()> {
        Box::pin(async move {
            self.submit(op).await?;
            Ok(())
        })
    }
}

impl Device for PowerDisk {
    fn block_size(&self) -> u32 {
        self.options().block_size
    }

    fn size_bytes(&self) -> u64 {
        self.options().size
    }

    fn write_cache(&self) -> bool {
        self.options().write_cache
    }

    fn can_unmap(&self) -> bool {
        self.options().unmapped != Unmapped::Unsupported
    }

    fn unmap_reads_zeroes(&self) -> bool {
        self.options().unmapped == Unmapped::Zeroes
    }

    fn read(&self, offset: u64, len: usize) -> DeviceFuture<'_, Vec<u8>> {
        Box::pin(async move { Ok(self.submit(DiskOp::Read { offset, len: len as u64 }).await?) })
    }

    fn write<'a>(&'a self, offset: u64, data: &'a [u8]) -> DeviceFuture<'a, ()> {
        self.change(DiskOp::Write { offset, bytes: data.into() })
    }

    fn write_zeroes(&self, offset: u64, len: u64) -> DeviceFuture<'_, ()> {
        self.change(DiskOp::Zero { offset, len })
    }

    fn unmap(&self, offset: u64, len: u64) -> DeviceFuture<'_, ()> {
        self.change(DiskOp::Unmap { offset, len })
    }

    fn flush(&self) -> DeviceFuture<'_, ()> {
        self.change(DiskOp::Flush)
    }

    fn copy(&self, from: u64, to: u64, len: u64) -> DeviceFuture<'_, ()> {
        self.change(DiskOp::Copy { from, to, len })
    }

    fn next_data(&self, offset: u64, end: u64) -> DeviceFuture<'_, u64> {
        let data = self.current().next_data(offset).min(end);
        Box::pin(std::future::ready(Ok(data)))
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
