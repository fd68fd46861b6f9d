//! Handles to I/O buffers, and the aliasing contract.
//!
//! A [`Buf`] is a counted handle to one buffer; a [`BufSlice`] is a handle to a part of one. Clones are cheap (one
//! atomic add) and share the bytes. The buffer goes back to its pool when its last handle is dropped, on any thread.
//!
//! # Who may write when
//! A buffer is plain memory that is shared with the kernel.
//! 1. **Write phase.** Whoever took the buffer is its only writer. It may fill the bytes itself, or lend the buffer to
//!    one kernel read (receive, disk read), and then must not touch it until that read has completed.
//! 2. **Read phase.** Handing a clone or slice down (to a mirror member, to a send) ends the write phase. From then on
//!    all holders, and the kernel on their behalf, only read.
//! 3. The write phase begins again when one handle is left: [`Buf::get_mut`] checks that.
//!
//! Whoever submits to the kernel keeps a handle until the completion has been seen, also when the operation is
//! cancelled. The handle is what keeps the memory from being reused.
//!
//! The safe methods (of [`Memory`]) copy through raw pointers and never form references to shared bytes. Code that
//! breaks rules 1–3 by them reads mixed bytes; it does not corrupt anything else.
#![allow(unsafe_code)]

use std::alloc::{self, Layout};
use std::fmt;
use std::ops::{Bound, Deref, RangeBounds};
use std::process;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering, fence};

use crate::BUFFER_ALIGN;
use crate::memory::Memory;
use crate::pool::PoolInner;

/// Far beyond any real number of handles; reaching it means handles are leaked in a loop.
const MAX_REFERENCES: u32 = 1 << 30;

/// A counted handle to a buffer. Derefs to [`Memory`] for access to its bytes.
pub struct Buf {
    memory: Memory,
    home: Home,
}

/// A counted handle to a part of a buffer. Derefs to [`Memory`] for access to its bytes.
pub struct BufSlice {
    memory: Memory,
    buf: Buf,
}

enum Home {
    /// All handles to one slot together own one strong count of the pool's `Arc`, taken when the slot is taken and
    /// given up with the last handle. So a clone costs one atomic operation, not two.
    Pool {
        pool: NonNull<PoolInner>,
        slot: u32,
    },
    Heap(Arc<HeapBlock>),
    /// A part of a block whose rest belongs to others: this handle covers its memory and nothing else.
    Part(Arc<HeapBlock>),
}

// SAFETY: the pool pointer comes from an `Arc` and `PoolInner` is `Sync`; the counts are atomic; the bytes are
// reached through `Memory`, which is `Send`.
unsafe impl Send for Buf {}
// SAFETY: as for `Send`; the shared methods read fields and atomics only.
unsafe impl Sync for Buf {}

impl Buf {
    /// Takes over a slot that has no handle yet. `len` is at most the slot's capacity.
    pub(crate) fn from_pool(pool: Arc<PoolInner>, slot: u32, len: usize) -> Self {
        debug_assert!(len <= pool.capacity(slot), "the length must fit the slot");
        let was = pool.references(slot).swap(1, Ordering::Relaxed);
        debug_assert_eq!(was, 0, "a free slot has no handles");
        // SAFETY: the slot's range is inside the region, which the `Arc` kept by this handle keeps mapped; mapped
        // anonymous memory is initialised.
        let memory = unsafe { Memory::new(pool.base().add(pool.offset(slot)), len) };
        // SAFETY: the pointer of an `Arc` is not null.
        let pool = unsafe { NonNull::new_unchecked(Arc::into_raw(pool).cast_mut()) };
        Self { memory, home: Home::Pool { pool, slot } }
    }

    /// Allocates a zeroed, 4096-aligned buffer outside any pool, for control paths and tests.
    ///
    /// # Panics
    /// When `len` is more than an address space holds. Running out of memory ends the process, as for any allocation.
    #[must_use]
    pub fn alloc_unpooled(len: usize) -> Self {
        let block = HeapBlock::new(len);
        // SAFETY: the block has at least `len` zeroed bytes and is kept alive by this handle.
        let memory = unsafe { Memory::new(block.ptr, len) };
        Self { memory, home: Home::Heap(Arc::new(block)) }
    }

    /// An unpooled buffer with a copy of `bytes`.
    #[must_use]
    pub fn copy_of(bytes: &[u8]) -> Self {
        let buf = Self::alloc_unpooled(bytes.len());
        buf.copy_from(bytes, 0);
        buf
    }

    /// A handle to a part of a block, see [`crate::Intake`].
    pub(crate) fn part_of(block: Arc<HeapBlock>, memory: Memory) -> Self {
        Self { memory, home: Home::Part(block) }
    }

    /// Length that [`set_len`](Self::set_len) can reach, in bytes; a multiple of 4096.
    #[must_use]
    pub fn capacity(&self) -> usize {
        match &self.home {
            // SAFETY: this handle's share of the strong count keeps the pool alive.
            Home::Pool { pool, slot } => unsafe { pool.as_ref() }.capacity(*slot),
            Home::Heap(block) => block.layout.size(),
            Home::Part(_) => self.memory.len(),
        }
    }

    /// Changes the length that this handle sees; other handles keep theirs.
    ///
    /// # Panics
    /// When `len` is above [`capacity`](Self::capacity).
    pub fn set_len(&mut self, len: usize) {
        let capacity = self.capacity();
        assert!(len <= capacity, "length {len} does not fit a buffer of {capacity} bytes");
        let start = NonNull::new(self.memory.as_mut_ptr());
        if let Some(start) = start {
            // SAFETY: a `Buf` starts at the start of what it may reach, which has `capacity` bytes.
            self.memory = unsafe { Memory::new(start, len) };
        }
    }

    /// A handle to the bytes in `range`.
    ///
    /// # Panics
    /// When the range is not inside the buffer's length. [`try_slice`](Self::try_slice) does not.
    #[must_use]
    pub fn slice(&self, range: impl RangeBounds<usize>) -> BufSlice {
        slice_or_panic(&self.memory, self, range)
    }

    /// A handle to the bytes in `range`, or `None` when the range is not inside the buffer's length.
    #[must_use]
    pub fn try_slice(&self, range: impl RangeBounds<usize>) -> Option<BufSlice> {
        try_slice(&self.memory, self, range)
    }

    /// The whole length as a [`BufSlice`], without counting up.
    #[must_use]
    pub fn into_slice(self) -> BufSlice {
        BufSlice { memory: self.memory.alias(), buf: self }
    }

    /// Whether this is the only handle to the buffer.
    #[must_use]
    pub fn is_unique(&self) -> bool {
        match &self.home {
            // Acquire pairs with the release of the handles that were dropped, so their accesses are over.
            Home::Pool { .. } => self.references().is_some_and(|count| count.load(Ordering::Acquire) == 1),
            Home::Heap(block) | Home::Part(block) => {
                Arc::strong_count(block) == 1 && {
                    fence(Ordering::Acquire);
                    true
                }
            }
        }
    }

    /// The bytes in place, when this is the only handle and therefore no one else reads or writes them.
    ///
    /// The kernel counts as a holder: whoever submitted the buffer keeps a handle until completion (see the module).
    pub fn get_mut(&mut self) -> Option<&mut [u8]> {
        if !self.is_unique() {
            return None;
        }
        // SAFETY: this is the only handle and it is borrowed mutably, so no clone can appear while the slice lives.
        Some(unsafe { self.memory.as_mut_slice() })
    }

    /// Offset in bytes from the base of [`BufPool::region_iovec`](crate::BufPool::region_iovec); `None` for an
    /// unpooled buffer, which is not part of any registration.
    #[must_use]
    pub fn registered_offset(&self) -> Option<usize> {
        match &self.home {
            // SAFETY: this handle's share of the strong count keeps the pool alive.
            Home::Pool { pool, slot } => Some(unsafe { pool.as_ref() }.offset(*slot)),
            Home::Heap(_) | Home::Part(_) => None,
        }
    }

    pub(crate) fn pool_ptr(&self) -> Option<NonNull<PoolInner>> {
        match &self.home {
            Home::Pool { pool, .. } => Some(*pool),
            Home::Heap(_) | Home::Part(_) => None,
        }
    }

    fn references(&self) -> Option<&AtomicU32> {
        match &self.home {
            // SAFETY: this handle's share of the strong count keeps the pool alive.
            Home::Pool { pool, slot } => Some(unsafe { pool.as_ref() }.references(*slot)),
            Home::Heap(_) | Home::Part(_) => None,
        }
    }
}

impl Clone for Buf {
    fn clone(&self) -> Self {
        let home = match &self.home {
            Home::Pool { pool, slot } => {
                // Relaxed, because the new handle comes from one that keeps the slot taken anyway.
                let was = self.references().map_or(0, |count| count.fetch_add(1, Ordering::Relaxed));
                if was >= MAX_REFERENCES {
                    // A wrapped count would free a buffer in use, and there is no way to go on from here.
                    process::abort();
                }
                Home::Pool { pool: *pool, slot: *slot }
            }
            Home::Heap(block) => Home::Heap(Arc::clone(block)),
            Home::Part(block) => Home::Part(Arc::clone(block)),
        };
        Self { memory: self.memory.alias(), home }
    }
}

impl Drop for Buf {
    fn drop(&mut self) {
        let Home::Pool { pool, slot } = self.home else {
            return;
        };
        let last = self.references().is_some_and(|count| count.fetch_sub(1, Ordering::Release) == 1);
        if last {
            // Pairs with the release of every other handle: their accesses come before the next user's.
            fence(Ordering::Acquire);
            // SAFETY: the pointer came from `Arc::into_raw` when the slot was taken, and only the last handle, this
            // one, takes that strong count back.
            let pool = unsafe { Arc::from_raw(pool.as_ptr().cast_const()) };
            pool.give_back(slot);
        }
    }
}

impl Deref for Buf {
    type Target = Memory;

    fn deref(&self) -> &Memory {
        &self.memory
    }
}

impl fmt::Debug for Buf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buf")
            .field("len", &self.len())
            .field("capacity", &self.capacity())
            .field("registered_offset", &self.registered_offset())
            .finish()
    }
}

impl BufSlice {
    /// A handle to the bytes in `range` of this slice.
    ///
    /// # Panics
    /// When the range is not inside the slice. [`try_slice`](Self::try_slice) does not.
    #[must_use]
    pub fn slice(&self, range: impl RangeBounds<usize>) -> BufSlice {
        slice_or_panic(&self.memory, &self.buf, range)
    }

    /// A handle to the bytes in `range` of this slice, or `None` when the range is not inside it.
    #[must_use]
    pub fn try_slice(&self, range: impl RangeBounds<usize>) -> Option<BufSlice> {
        try_slice(&self.memory, &self.buf, range)
    }

    /// Cuts the first `count` bytes off this slice and returns them.
    ///
    /// # Panics
    /// When the slice is shorter than `count`.
    #[must_use]
    pub fn split_to(&mut self, count: usize) -> BufSlice {
        let head = self.slice(..count);
        if let Some(rest) = self.memory.part(count, self.memory.len() - count) {
            self.memory = rest;
        }
        head
    }

    /// The buffer this is a part of.
    #[must_use]
    pub fn buf(&self) -> &Buf {
        &self.buf
    }

    /// The bytes in place, when this is the only handle to the buffer; see [`Buf::get_mut`].
    pub fn get_mut(&mut self) -> Option<&mut [u8]> {
        if !self.buf.is_unique() {
            return None;
        }
        // SAFETY: this is the only handle and it is borrowed mutably, so no clone can appear while the slice lives.
        Some(unsafe { self.memory.as_mut_slice() })
    }

    /// Offset in bytes of the first byte from the base of the pool's registration; see [`Buf::registered_offset`].
    #[must_use]
    pub fn registered_offset(&self) -> Option<usize> {
        let inside = self.memory.as_ptr() as usize - self.buf.as_ptr() as usize;
        self.buf.registered_offset().map(|offset| offset + inside)
    }
}

impl Clone for BufSlice {
    fn clone(&self) -> Self {
        Self { memory: self.memory.alias(), buf: self.buf.clone() }
    }
}

impl Deref for BufSlice {
    type Target = Memory;

    fn deref(&self) -> &Memory {
        &self.memory
    }
}

impl From<Buf> for BufSlice {
    fn from(buf: Buf) -> Self {
        buf.into_slice()
    }
}

impl fmt::Debug for BufSlice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BufSlice").field("len", &self.len()).field("buf", &self.buf).finish()
    }
}

fn try_slice(memory: &Memory, buf: &Buf, range: impl RangeBounds<usize>) -> Option<BufSlice> {
    let (start, end) = limits(&range, memory.len())?;
    let memory = memory.part(start, end.checked_sub(start)?)?;
    Some(BufSlice { memory, buf: buf.clone() })
}

fn slice_or_panic(memory: &Memory, buf: &Buf, range: impl RangeBounds<usize>) -> BufSlice {
    let bounds = (range.start_bound().cloned(), range.end_bound().cloned());
    match try_slice(memory, buf, bounds) {
        Some(slice) => slice,
        None => panic!("range {bounds:?} is outside a buffer of {} bytes", memory.len()),
    }
}

fn limits(range: &impl RangeBounds<usize>, len: usize) -> Option<(usize, usize)> {
    let start = match range.start_bound() {
        Bound::Included(&start) => start,
        Bound::Excluded(&before) => before.checked_add(1)?,
        Bound::Unbounded => 0,
    };
    let end = match range.end_bound() {
        Bound::Included(&last) => last.checked_add(1)?,
        Bound::Excluded(&end) => end,
        Bound::Unbounded => len,
    };
    Some((start, end))
}

/// Memory of an unpooled buffer.
pub(crate) struct HeapBlock {
    ptr: NonNull<u8>,
    layout: Layout,
}

// SAFETY: the block only owns its memory; it hands out no references.
unsafe impl Send for HeapBlock {}
// SAFETY: as for `Send`.
unsafe impl Sync for HeapBlock {}

impl HeapBlock {
    pub(crate) fn ptr(&self) -> NonNull<u8> {
        self.ptr
    }

    pub(crate) fn new(len: usize) -> Self {
        let layout = len
            .max(1)
            .checked_next_multiple_of(BUFFER_ALIGN)
            .and_then(|size| Layout::from_size_align(size, BUFFER_ALIGN).ok())
            .unwrap_or_else(|| panic!("length {len} is more than the address space holds"));
        // SAFETY: the layout has a size above zero.
        let ptr = unsafe { alloc::alloc_zeroed(layout) };
        match NonNull::new(ptr) {
            Some(ptr) => Self { ptr, layout },
            None => alloc::handle_alloc_error(layout),
        }
    }
}

impl Drop for HeapBlock {
    fn drop(&mut self) {
        // SAFETY: `new` allocated this with the same layout, and the last handle is gone.
        unsafe { alloc::dealloc(self.ptr.as_ptr(), self.layout) }
    }
}
