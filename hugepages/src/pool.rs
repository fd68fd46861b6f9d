//! The I/O buffer pool of the data path.
//!
//! A [`BufPool`] is one [`Region`] cut into two size classes: small buffers for metadata and small I/O, large ones for
//! a full data transfer plus a block for headers. Invariants:
//! - Every buffer is 4096-aligned, and no two outstanding buffers overlap.
//! - The pool is bounded. When the fitting class is empty, taking fails and the caller queues; small requests never
//!   eat the large class, so a flood of small I/O cannot starve large I/O.
//! - Taking and freeing allocate nothing and take no lock; any thread may free.
//! - Outstanding buffers keep the region mapped, even after the last `BufPool` is gone.
//! - Memory of plain pages becomes resident only when a buffer is used (or when the pool is registered with io_uring,
//!   which pins the whole region). Buffers are handed out last-freed first, so a quiet pool stays small.
//! - A buffer is not cleared on its way through the pool: it holds what its last user left there. Take it with
//!   [`BufPool::take_zeroed`], or overwrite it, before its bytes can reach a guest or a peer.

use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use serde::{Deserialize, Serialize};

use crate::BUFFER_ALIGN;
use crate::buf::Buf;
use crate::free_list::FreeList;
use crate::map::{MapError, MapPolicy, Region, RegionKind};

/// Slot numbers and list links are 32-bit, and the top values are taken by the list itself.
const MAX_COUNT: u32 = 1 << 30;

/// One size class.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClassConfig {
    /// Size of each buffer in bytes; a multiple of 4096.
    pub bytes: usize,
    /// Number of buffers; zero leaves the class out.
    pub count: u32,
}

/// Sizes and counts of a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PoolConfig {
    /// For requests up to its `bytes`.
    pub small: ClassConfig,
    /// For all longer requests.
    pub large: ClassConfig,
    /// How to map the memory.
    pub policy: MapPolicy,
}

impl Default for PoolConfig {
    /// 1024 buffers of 8 KiB and 256 of 132 KiB: 41 MiB, on hugepages if there are any.
    fn default() -> Self {
        Self {
            small: ClassConfig { bytes: 8 << 10, count: 1024 },
            large: ClassConfig { bytes: (128 << 10) + BUFFER_ALIGN, count: 256 },
            policy: MapPolicy::default(),
        }
    }
}

/// Why a pool could not be made.
#[derive(Debug, thiserror::Error)]
pub enum PoolError {
    /// A buffer size is not allowed.
    #[error("{class}.bytes {bytes} is not allowed: a multiple of 4096 above {above} is needed")]
    Bytes {
        /// `small` or `large`.
        class: &'static str,
        /// The size given.
        bytes: usize,
        /// The size it must exceed.
        above: usize,
    },
    /// A buffer count is not allowed.
    #[error("{class}.count {count} is not allowed: 0 to {MAX_COUNT} are, and at least one buffer in all")]
    Count {
        /// `small` or `large`.
        class: &'static str,
        /// The count given.
        count: u32,
    },
    /// Sizes times counts are more than an address space holds.
    #[error("a pool of {small} small and {large} large buffers is larger than the address space")]
    Total {
        /// Count of small buffers.
        small: u32,
        /// Count of large buffers.
        large: u32,
    },
    /// The memory could not be mapped.
    #[error("cannot map the buffer pool: {0}")]
    Map(#[from] MapError),
}

/// Why no buffer could be taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum TakeError {
    /// All buffers of the fitting class are out; one will come back.
    #[error("all buffers of {class_bytes} bytes are in use")]
    Exhausted {
        /// Buffer size of the class that is empty.
        class_bytes: usize,
    },
    /// No class has buffers this long; waiting does not help.
    #[error("length {len} is not allowed: the longest pooled buffer has {max} bytes")]
    TooLong {
        /// The length asked for.
        len: usize,
        /// The longest length allowed.
        max: usize,
    },
}

/// Usage of one class.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClassStats {
    /// Size of each buffer in bytes.
    pub bytes: usize,
    /// Buffers in the class.
    pub count: u32,
    /// Buffers that are out.
    pub taken: u32,
    /// Buffers that can be taken.
    pub free: u32,
    /// Most buffers that were ever out at once.
    pub high_water: u32,
    /// How often a request found the class empty.
    pub exhausted: u64,
}

/// Usage of a pool. Counters are read one by one, so under load they may be off by what is in flight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolStats {
    /// The small class.
    pub small: ClassStats,
    /// The large class.
    pub large: ClassStats,
    /// Length of the region in bytes.
    pub region_bytes: usize,
    /// What backs the region.
    pub region_kind: RegionKind,
}

/// A pool of I/O buffers. Cloning gives another handle to the same pool.
#[derive(Clone)]
pub struct BufPool {
    inner: Arc<PoolInner>,
}

impl BufPool {
    /// Maps the memory and makes the pool.
    ///
    /// # Errors
    /// When a size or count is not allowed, or the memory cannot be mapped (see [`Region::map`]).
    pub fn new(config: PoolConfig) -> Result<Self, PoolError> {
        let bytes = config.region_bytes()?;
        let region = Region::map(bytes, config.policy)?;
        let small = Class::new(config.small, 0, 0);
        let large = Class::new(config.large, small.end(), config.small.count);
        debug_assert!(large.end() <= region.len(), "the classes must fit the region");
        let slots = config.small.count + config.large.count;
        let references = (0..slots).map(|_| AtomicU32::new(0)).collect();
        Ok(Self { inner: Arc::new(PoolInner { region, small, large, references }) })
    }

    /// Takes a buffer of length `len` with the content its last user left; `None` when the class is exhausted or no
    /// class is that long. See [`try_take`](Self::try_take) to tell the two apart.
    #[must_use]
    pub fn take(&self, len: usize) -> Option<Buf> {
        self.try_take(len).ok()
    }

    /// As [`take`](Self::take), with every byte up to `len` set to zero.
    #[must_use]
    pub fn take_zeroed(&self, len: usize) -> Option<Buf> {
        let buf = self.take(len)?;
        buf.fill(0);
        Some(buf)
    }

    /// As [`take`](Self::take), with the reason when there is none.
    ///
    /// # Errors
    /// [`TakeError::Exhausted`] when a later try can succeed, [`TakeError::TooLong`] when none can.
    pub fn try_take(&self, len: usize) -> Result<Buf, TakeError> {
        let inner = &self.inner;
        let Some(class) = inner.class_for(len) else {
            return Err(TakeError::TooLong { len, max: self.max_len() });
        };
        let slot = class.take().ok_or(TakeError::Exhausted { class_bytes: class.bytes })?;
        Ok(Buf::from_pool(Arc::clone(inner), slot, len))
    }

    /// Buffers of the class for `len` that nobody has, as far as one look tells; 0 when no class is that long.
    #[must_use]
    pub fn free(&self, len: usize) -> u32 {
        let free = |class: &Class| class.count - class.taken.load(Ordering::Relaxed).min(class.count);
        self.inner.class_for(len).map_or(0, free)
    }

    /// The longest length that can be taken, in bytes.
    #[must_use]
    pub fn max_len(&self) -> usize {
        if self.inner.large.count > 0 { self.inner.large.bytes } else { self.inner.small.bytes }
    }

    /// Base and length of the pool's memory, for io_uring buffer registration as one buffer.
    ///
    /// The range is valid while the pool or any of its buffers lives: keep a `BufPool` beside the ring. Registration
    /// pins the range, which makes all of it resident and counts against `RLIMIT_MEMLOCK` on old kernels. io_uring
    /// takes at most 1 GiB per registered buffer.
    #[must_use]
    pub fn region_iovec(&self) -> libc::iovec {
        let region = &self.inner.region;
        libc::iovec { iov_base: region.base().as_ptr().cast(), iov_len: region.len() }
    }

    /// The memory behind the pool.
    #[must_use]
    pub fn region(&self) -> &Region {
        &self.inner.region
    }

    /// Whether `buf` is from this pool, so that this pool's registration covers it.
    #[must_use]
    pub fn owns(&self, buf: &Buf) -> bool {
        buf.pool_ptr() == Some(NonNull::from(&*self.inner))
    }

    /// Usage now.
    #[must_use]
    pub fn stats(&self) -> PoolStats {
        PoolStats {
            small: self.inner.small.stats(),
            large: self.inner.large.stats(),
            region_bytes: self.inner.region.len(),
            region_kind: self.inner.region.kind(),
        }
    }
}

impl fmt::Debug for BufPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BufPool").field("stats", &self.stats()).finish_non_exhaustive()
    }
}

impl PoolConfig {
    fn region_bytes(&self) -> Result<usize, PoolError> {
        check_bytes("small", self.small.bytes, 0)?;
        check_bytes("large", self.large.bytes, self.small.bytes)?;
        let (small, large) = (self.small.count, self.large.count);
        if small > MAX_COUNT || small == 0 && large == 0 {
            return Err(PoolError::Count { class: "small", count: small });
        }
        if large > MAX_COUNT {
            return Err(PoolError::Count { class: "large", count: large });
        }
        let bytes_of = |class: ClassConfig| class.bytes.checked_mul(class.count as usize);
        bytes_of(self.small)
            .zip(bytes_of(self.large))
            .and_then(|(small, large)| small.checked_add(large))
            .ok_or(PoolError::Total { small, large })
    }
}

fn check_bytes(class: &'static str, bytes: usize, above: usize) -> Result<(), PoolError> {
    if bytes > above && bytes.is_multiple_of(BUFFER_ALIGN) {
        Ok(())
    } else {
        Err(PoolError::Bytes { class, bytes, above })
    }
}

/// The shared part: one per pool, kept alive by every `BufPool` and every outstanding buffer.
pub(crate) struct PoolInner {
    region: Region,
    small: Class,
    large: Class,
    /// Number of handles to each slot: small slots first, then large ones. Zero while the slot is free.
    references: Box<[AtomicU32]>,
}

impl PoolInner {
    pub(crate) fn references(&self, slot: u32) -> &AtomicU32 {
        &self.references[slot as usize]
    }

    pub(crate) fn base(&self) -> NonNull<u8> {
        self.region.base()
    }

    /// Offset of a slot from the region's base, in bytes.
    pub(crate) fn offset(&self, slot: u32) -> usize {
        let class = self.class_of(slot);
        class.offset + (slot - class.first_slot) as usize * class.bytes
    }

    pub(crate) fn capacity(&self, slot: u32) -> usize {
        self.class_of(slot).bytes
    }

    /// Puts a slot back whose last handle is gone.
    pub(crate) fn give_back(&self, slot: u32) {
        self.class_of(slot).give_back(slot);
    }

    fn class_of(&self, slot: u32) -> &Class {
        if slot < self.small.count { &self.small } else { &self.large }
    }

    fn class_for(&self, len: usize) -> Option<&Class> {
        [&self.small, &self.large].into_iter().find(|class| len <= class.bytes && class.count > 0)
    }
}

struct Class {
    bytes: usize,
    count: u32,
    /// Where the class starts in the region, in bytes.
    offset: usize,
    /// Number of its first slot.
    first_slot: u32,
    free: FreeList,
    taken: AtomicU32,
    high_water: AtomicU32,
    exhausted: AtomicU64,
}

impl Class {
    fn new(config: ClassConfig, offset: usize, first_slot: u32) -> Self {
        Self {
            bytes: config.bytes,
            count: config.count,
            offset,
            first_slot,
            free: FreeList::new(config.count),
            taken: AtomicU32::new(0),
            high_water: AtomicU32::new(0),
            exhausted: AtomicU64::new(0),
        }
    }

    fn end(&self) -> usize {
        self.offset + self.bytes * self.count as usize
    }

    fn take(&self) -> Option<u32> {
        let Some(slot) = self.free.pop() else {
            self.exhausted.fetch_add(1, Ordering::Relaxed);
            return None;
        };
        let taken = self.taken.fetch_add(1, Ordering::Relaxed) + 1;
        // The mark moves rarely, so most takes need only the load.
        if taken > self.high_water.load(Ordering::Relaxed) {
            self.high_water.fetch_max(taken, Ordering::Relaxed);
        }
        Some(self.first_slot + slot)
    }

    fn give_back(&self, slot: u32) {
        // Counted down before the slot can be taken again, so `taken` never exceeds `count`.
        self.taken.fetch_sub(1, Ordering::Relaxed);
        self.free.push(slot - self.first_slot);
    }

    fn stats(&self) -> ClassStats {
        let taken = self.taken.load(Ordering::Relaxed).min(self.count);
        ClassStats {
            bytes: self.bytes,
            count: self.count,
            taken,
            free: self.count - taken,
            high_water: self.high_water.load(Ordering::Relaxed),
            exhausted: self.exhausted.load(Ordering::Relaxed),
        }
    }
}
