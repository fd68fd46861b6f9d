//! Plain bytes at a fixed address, read and written by copying.
//!
//! [`Memory`] is what a [`Buf`](crate::Buf) and a [`BufSlice`](crate::BufSlice) deref to. It has the whole safe
//! interface to buffer bytes, and it never forms a Rust reference to them, because the kernel (through io_uring) and
//! other holders may touch the same bytes at the same time. All its methods go through raw pointers and block copies:
//! a caller that breaks the write-phase rule of [`crate::buf`] gets mixed bytes, never an access out of bounds or
//! after free.
//!
//! Arguments are always in the order source, then destination. A range outside the memory is a programming error and
//! panics, as slice indexing does; lengths that come from a peer are checked where they enter.
#![allow(unsafe_code)]

use std::ptr::{self, NonNull};

use crate::BUFFER_ALIGN;

/// A range of buffer bytes. It exists only inside a handle that keeps the bytes alive, so it is not `Clone`.
#[derive(Debug)]
pub struct Memory {
    ptr: NonNull<u8>,
    len: usize,
}

// SAFETY: `Memory` forms no references to its bytes; what concurrent use may do to their content is the contract of
// the `buf` module.
unsafe impl Send for Memory {}
// SAFETY: as for `Send`.
unsafe impl Sync for Memory {}

impl Memory {
    /// # Safety
    /// The range is allocated and initialised for as long as the new value lives.
    pub(crate) unsafe fn new(ptr: NonNull<u8>, len: usize) -> Self {
        Self { ptr, len }
    }

    /// Same address and length, for a second handle to the same bytes.
    pub(crate) fn alias(&self) -> Self {
        Self { ptr: self.ptr, len: self.len }
    }

    /// The part from `start` of `len` bytes, if it lies inside.
    pub(crate) fn part(&self, start: usize, len: usize) -> Option<Self> {
        if start > self.len || len > self.len - start {
            return None;
        }
        // SAFETY: `start` is at most `self.len`, so the address is inside the range or at its end.
        let ptr = unsafe { self.ptr.add(start) };
        Some(Self { ptr, len })
    }

    /// Address of the first byte, to hand to the kernel. Valid while the handle lives.
    #[must_use]
    pub fn as_ptr(&self) -> *const u8 {
        self.ptr.as_ptr()
    }

    /// As [`as_ptr`](Self::as_ptr), for the kernel to write to. Writing is for the holder of the write phase only.
    #[must_use]
    pub fn as_mut_ptr(&self) -> *mut u8 {
        self.ptr.as_ptr()
    }

    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether address and length both fit direct I/O in blocks of `block_bytes` (a power of two up to 4096).
    #[must_use]
    pub fn is_direct_io(&self, block_bytes: usize) -> bool {
        debug_assert!(block_bytes.is_power_of_two() && block_bytes <= BUFFER_ALIGN, "block_bytes is {block_bytes}");
        (self.ptr.as_ptr() as usize | self.len) & (block_bytes - 1) == 0
    }

    /// Copies from the start into `dst` as much as both hold, and returns how many bytes that was.
    pub fn read_into(&self, dst: &mut [u8]) -> usize {
        let count = self.len.min(dst.len());
        self.copy_to(0, &mut dst[..count]);
        count
    }

    /// Copies all of `src` to `offset`.
    ///
    /// # Panics
    /// When `src` does not fit between `offset` and the end.
    pub fn copy_from(&self, src: &[u8], offset: usize) {
        let at = self.at(offset, src.len());
        // SAFETY: `at` has room for `src.len()` bytes; `ptr::copy` allows the two to overlap.
        unsafe { ptr::copy(src.as_ptr(), at, src.len()) }
    }

    /// Fills all of `dst` with the bytes from `offset`.
    ///
    /// # Panics
    /// When fewer than `dst.len()` bytes follow `offset`.
    pub fn copy_to(&self, offset: usize, dst: &mut [u8]) {
        let at = self.at(offset, dst.len());
        // SAFETY: `dst.len()` initialised bytes start at `at`; `ptr::copy` allows the two to overlap.
        unsafe { ptr::copy(at, dst.as_mut_ptr(), dst.len()) }
    }

    /// Copies all of `src`, which may be part of the same buffer, to `offset`.
    ///
    /// # Panics
    /// When `src` does not fit between `offset` and the end.
    pub fn copy_from_memory(&self, src: &Memory, offset: usize) {
        let at = self.at(offset, src.len);
        // SAFETY: both ranges hold `src.len` bytes; `ptr::copy` allows them to overlap.
        unsafe { ptr::copy(src.as_ptr(), at, src.len) }
    }

    /// Sets every byte to `byte`.
    pub fn fill(&self, byte: u8) {
        // SAFETY: the range is `self.len` bytes long.
        unsafe { ptr::write_bytes(self.as_mut_ptr(), byte, self.len) }
    }

    /// A copy of the bytes.
    #[must_use]
    pub fn to_vec(&self) -> Vec<u8> {
        let mut copy = vec![0; self.len];
        self.copy_to(0, &mut copy);
        copy
    }

    /// Feeds the bytes in order to `visit`, at most 4096 at a time, from a copy: each byte is read exactly once, so a
    /// checksum made here is that of bytes that were there, whatever others write meanwhile.
    pub fn for_each_chunk(&self, mut visit: impl FnMut(&[u8])) {
        let mut chunk = [0; 4096];
        let mut offset = 0;
        while offset < self.len {
            let count = chunk.len().min(self.len - offset);
            self.copy_to(offset, &mut chunk[..count]);
            visit(&chunk[..count]);
            offset += count;
        }
    }

    /// The bytes in place.
    ///
    /// # Safety
    /// Nobody, neither another holder nor the kernel, writes to this range while the slice lives.
    #[must_use]
    pub unsafe fn as_slice(&self) -> &[u8] {
        // SAFETY: the range is allocated and initialised while `self` lives, and not written to by the caller's promise.
        unsafe { std::slice::from_raw_parts(self.as_ptr(), self.len) }
    }

    /// The bytes in place, for a handle that is known to be the only one.
    ///
    /// # Safety
    /// Nobody else, neither another holder nor the kernel, touches this range while the slice lives.
    pub(crate) unsafe fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: the range is allocated and initialised while `self` lives, and touched by no one else, by the
        // caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.as_mut_ptr(), self.len) }
    }

    fn at(&self, offset: usize, count: usize) -> *mut u8 {
        assert!(
            offset <= self.len && count <= self.len - offset,
            "{count} bytes at offset {offset} do not fit a buffer of {} bytes",
            self.len
        );
        // SAFETY: `offset` is at most `self.len`, so the address is inside the range or at its end.
        unsafe { self.as_mut_ptr().add(offset) }
    }
}
