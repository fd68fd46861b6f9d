//! What an image is read from: a file, a device, memory, a closure.
//!
//! Reading is synchronous and leaves the image as it is. An implementation that knows holes says so by
//! [`ReadAt::next_data`], so that a metadata region of which little was ever written is passed over quickly.

use std::io;

/// Something that can be read at any place.
pub trait ReadAt {
    /// Its length in bytes.
    fn size(&self) -> u64;

    /// Fills `buf` from byte `offset` on; an error when that reaches beyond the end.
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()>;

    /// The first byte at or after `offset` that may be other than zero; `None` when only zeroes follow. Where nothing is
    /// known of holes this is `offset` itself.
    fn next_data(&self, offset: u64) -> io::Result<Option<u64>> {
        Ok((offset < self.size()).then_some(offset))
    }
}

impl<T: ReadAt + ?Sized> ReadAt for &T {
    fn size(&self) -> u64 {
        (**self).size()
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        (**self).read_at(offset, buf)
    }

    fn next_data(&self, offset: u64) -> io::Result<Option<u64>> {
        (**self).next_data(offset)
    }
}

impl ReadAt for [u8] {
    fn size(&self) -> u64 {
        self.len() as u64
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        let start = usize::try_from(offset).map_err(|_| beyond(offset, buf.len(), self.size()))?;
        let end = start.checked_add(buf.len());
        let found = end.and_then(|end| self.get(start..end)).ok_or_else(|| beyond(offset, buf.len(), self.size()))?;
        buf.copy_from_slice(found);
        Ok(())
    }
}

/// The error of a read beyond the end.
pub fn beyond(offset: u64, len: usize, size: u64) -> io::Error {
    io::Error::new(io::ErrorKind::UnexpectedEof, format!("{len} bytes from byte {offset} on; there are {size}"))
}

/// A closure that reads, with the length of what it reads from.
pub struct ReadFn<F> {
    /// Length in bytes.
    pub size: u64,
    /// Fills the buffer from the given byte on.
    pub read: F,
}

impl<F: Fn(u64, &mut [u8]) -> io::Result<()>> ReadAt for ReadFn<F> {
    fn size(&self) -> u64 {
        self.size
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        (self.read)(offset, buf)
    }
}
