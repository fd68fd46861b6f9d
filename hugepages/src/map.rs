//! One anonymous, zeroed mapping that is unmapped when dropped.
//!
//! Contract:
//! - [`Hugepages::Auto`] tries hugepages and falls back to plain pages; the fallback never fails the call. The first
//!   fallback of a process writes one warning that says why and what is lost; later ones are silent.
//! - [`Hugepages::Require`] fails where `Auto` would fall back. [`Hugepages::Never`] asks for no hugepages.
//! - Hugepages are faulted in before `map` returns. A hugepage that the kernel refuses at first use (the hugetlb
//!   cgroup of a container does that) would otherwise kill the process with `SIGBUS` in the middle of I/O.
//! - Plain pages are faulted in by use, so an idle region costs address space only. Plain regions of 2 MiB and more
//!   start on a 2 MiB boundary and are advised as transparent-hugepage candidates.
//! - A NUMA node is a preference: when the node is full the kernel takes pages from the next one instead of killing
//!   the process. A host that refuses the placement call costs locality and one warning, not the mapping.
#![allow(unsafe_code)]

use std::io;
use std::ptr::NonNull;
use std::sync::Once;

use serde::{Deserialize, Serialize};

use crate::page_size::PageSize;
use crate::sys;

/// Boundary from which the kernel can back plain memory with transparent hugepages.
const TRANSPARENT_BYTES: usize = 2 << 20;

static PLAIN_WARNING: Once = Once::new();
static NUMA_WARNING: Once = Once::new();

/// Whether a mapping should use hugepages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Hugepages {
    /// Use them when the kernel has enough free ones, else plain pages.
    #[default]
    Auto,
    /// Fail when the kernel has too few.
    Require,
    /// Use plain pages.
    Never,
}

/// How to map a region. The default is `Auto`, 2 MiB, no NUMA node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct MapPolicy {
    /// Whether to use hugepages.
    pub hugepages: Hugepages,
    /// NUMA node to take the pages from; `None` leaves it to the kernel (the node of the thread that touches first).
    pub numa_node: Option<u32>,
    /// Hugepage size to ask for. `Auto` also tries 2 MiB when a larger size is not to be had.
    pub page_size: PageSize,
}

impl MapPolicy {
    /// Plain pages, no NUMA node.
    #[must_use]
    pub fn plain() -> Self {
        Self { hugepages: Hugepages::Never, ..Self::default() }
    }
}

/// What backs a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RegionKind {
    /// Hugepages of this size, all faulted in.
    Huge(PageSize),
    /// Base pages, faulted in by use.
    Plain,
}

/// Why a region could not be mapped.
#[derive(Debug, thiserror::Error)]
pub enum MapError {
    /// The length is zero or, rounded up to whole pages, more than an address space holds.
    #[error("region length {bytes} bytes is not allowed: 1 to {max} bytes are", max = isize::MAX)]
    Length {
        /// The length asked for.
        bytes: usize,
    },
    /// Hugepages were required and are not to be had.
    #[error("{pages} hugepages of {size} are required for {bytes} bytes but not available: {reason}")]
    HugepagesUnavailable {
        /// The length asked for, in bytes.
        bytes: usize,
        /// The page size asked for.
        size: PageSize,
        /// How many pages that length takes.
        pages: u64,
        /// What the kernel said, in words.
        reason: String,
    },
    /// The kernel has no plain memory or no address space left.
    #[error("cannot map {bytes} bytes of plain memory: {source}")]
    Plain {
        /// The length asked for.
        bytes: usize,
        /// The kernel's error.
        source: io::Error,
    },
}

/// One anonymous mapping, owned; unmapped at drop.
#[derive(Debug)]
pub struct Region {
    base: NonNull<u8>,
    bytes: usize,
    kind: RegionKind,
    numa_node: Option<u32>,
}

// SAFETY: a region owns its mapping and hands out no references, only its address; any thread may unmap it.
unsafe impl Send for Region {}
// SAFETY: all methods on a shared region read plain fields.
unsafe impl Sync for Region {}

impl Region {
    /// Maps at least `bytes` of zeroed memory, rounded up to whole pages of the kind that was got.
    ///
    /// # Errors
    /// [`MapError::Length`] for zero or absurd lengths, [`MapError::HugepagesUnavailable`] only under
    /// [`Hugepages::Require`], [`MapError::Plain`] when the kernel refuses even plain memory.
    pub fn map(bytes: usize, policy: MapPolicy) -> Result<Self, MapError> {
        if bytes == 0 {
            return Err(MapError::Length { bytes });
        }
        if policy.hugepages == Hugepages::Never {
            return Self::map_plain(bytes, policy.numa_node);
        }
        let reason = match Self::map_huge(bytes, policy.page_size, policy.numa_node) {
            Ok(region) => return Ok(region),
            Err(reason) => reason,
        };
        if policy.hugepages == Hugepages::Require {
            let size = policy.page_size;
            let pages = (bytes as u64).div_ceil(size.bytes());
            return Err(MapError::HugepagesUnavailable { bytes, size, pages, reason });
        }
        if policy.page_size > PageSize::MIB_2
            && let Ok(region) = Self::map_huge(bytes, PageSize::MIB_2, policy.numa_node)
        {
            return Ok(region);
        }
        warn_plain(bytes, policy.page_size, &reason);
        Self::map_plain(bytes, policy.numa_node)
    }

    /// Lowest address of the region; aligned to at least a base page.
    #[must_use]
    pub fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Length in bytes, after rounding up.
    #[must_use]
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Always false: an empty region cannot be mapped.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// What backs the region.
    #[must_use]
    pub fn kind(&self) -> RegionKind {
        self.kind
    }

    /// The NUMA node the pages are preferred from, when one was asked for and the kernel took the wish.
    #[must_use]
    pub fn numa_node(&self) -> Option<u32> {
        self.numa_node
    }

    fn map_huge(bytes: usize, size: PageSize, node: Option<u32>) -> Result<Self, String> {
        let bytes = usize::try_from(size.bytes())
            .ok()
            .and_then(|page| round_up(bytes, page))
            .ok_or_else(|| "the length does not fit the address space".to_owned())?;
        let base = sys::map_anonymous(bytes, Some(size)).map_err(|error| explain_map(&error, size))?;
        let mut region = Self { base, bytes, kind: RegionKind::Huge(size), numa_node: None };
        region.prefer(node);
        // SAFETY: the region owns this range, and faulting pages in keeps their content.
        unsafe { sys::advise(base, bytes, libc::MADV_POPULATE_WRITE) }.map_err(|error| explain_fault(&error))?;
        Ok(region)
    }

    fn map_plain(asked: usize, node: Option<u32>) -> Result<Self, MapError> {
        let too_long = || MapError::Length { bytes: asked };
        let failed = |source| MapError::Plain { bytes: asked, source };
        let bytes = round_up(asked, sys::base_page_bytes()).ok_or_else(too_long)?;
        let transparent = bytes >= TRANSPARENT_BYTES;
        let slack = if transparent { TRANSPARENT_BYTES } else { 0 };
        let mapped = bytes.checked_add(slack).filter(|&n| isize::try_from(n).is_ok()).ok_or_else(too_long)?;
        let base = sys::map_anonymous(mapped, None).map_err(failed)?;
        let whole = Self { base, bytes: mapped, kind: RegionKind::Plain, numa_node: None };
        let mut region = if transparent { whole.trim_to(bytes, TRANSPARENT_BYTES) } else { whole };
        region.prefer(node);
        if transparent {
            // SAFETY: the region owns this range, and this advice keeps its content.
            let advised = unsafe { sys::advise(region.base, region.bytes, libc::MADV_HUGEPAGE) };
            if let Err(error) = advised {
                tracing::debug!(%error, "transparent hugepages are not available");
            }
        }
        Ok(region)
    }

    /// Cuts the mapping down to `bytes` that start on an `align` boundary. The mapping is longer by `align`.
    fn trim_to(self, bytes: usize, align: usize) -> Self {
        debug_assert!(self.bytes == bytes + align, "the slack must be one alignment unit");
        let whole = std::mem::ManuallyDrop::new(self);
        let head = whole.base.as_ptr().align_offset(align);
        let tail = align - head;
        // SAFETY: `head` is at most `align`, so the address stays inside the mapping of `bytes + align`.
        let base = unsafe { whole.base.add(head) };
        if head > 0 {
            // SAFETY: the first `head` bytes are whole pages of this mapping, and no one has their address yet.
            log_unmap(unsafe { sys::unmap(whole.base, head) });
        }
        if tail > 0 {
            // SAFETY: `head + bytes + tail` is the mapping's length, so the end of the kept part is inside it or at
            // its end; those last `tail` bytes are whole pages that no one has the address of yet.
            log_unmap(unsafe { sys::unmap(base.add(bytes), tail) });
        }
        Self { base, bytes, kind: whole.kind, numa_node: whole.numa_node }
    }

    fn prefer(&mut self, node: Option<u32>) {
        let Some(node) = node else { return };
        // SAFETY: the region owns this range.
        match unsafe { sys::prefer_node(self.base, self.bytes, node) } {
            Ok(()) => self.numa_node = Some(node),
            Err(error) => NUMA_WARNING.call_once(|| {
                tracing::warn!(node, %error, "memory cannot be placed on the NUMA node asked for; I/O may cross nodes");
            }),
        }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: the region owns the whole range, and whoever hands out pointers into it keeps the region alive.
        log_unmap(unsafe { sys::unmap(self.base, self.bytes) });
    }
}

/// A failed unmap leaves the range mapped, which wastes memory but breaks nothing; there is no one to tell but the log.
fn log_unmap(result: io::Result<()>) {
    if let Err(error) = result {
        tracing::error!(%error, "cannot unmap memory; it stays mapped until the process ends");
    }
}

fn round_up(bytes: usize, page: usize) -> Option<usize> {
    bytes.checked_next_multiple_of(page).filter(|&rounded| isize::try_from(rounded).is_ok())
}

fn warn_plain(bytes: usize, size: PageSize, reason: &str) {
    PLAIN_WARNING.call_once(|| {
        tracing::warn!(
            bytes,
            reason,
            "running on plain pages instead of {size} hugepages ({reason}): everything works, at the cost of more TLB \
             misses and slower buffer registration under load; logged once"
        );
    });
}

fn explain_map(error: &io::Error, size: PageSize) -> String {
    match error.raw_os_error() {
        Some(libc::ENOMEM) => format!("the kernel has too few free hugepages of {size}"),
        Some(libc::EINVAL | libc::ENOSYS | libc::ENODEV) => {
            format!("the kernel has no hugepages of {size}")
        }
        _ => format!("the kernel refused the mapping: {error}"),
    }
}

fn explain_fault(error: &io::Error) -> String {
    match error.raw_os_error() {
        Some(libc::EINVAL) => "the kernel cannot check hugepages before use (Linux 5.14 and later can)".to_owned(),
        _ => {
            format!("free hugepages exist but may not be used here, as when a container has no hugepage limit: {error}")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Copies the region out; the tests own their regions, so nothing else writes meanwhile.
    fn bytes_at(region: &Region, offset: usize, len: usize) -> Vec<u8> {
        assert!(offset + len <= region.len());
        // SAFETY: the range is inside the mapping and no one writes to it now.
        unsafe { std::slice::from_raw_parts(region.base().as_ptr().add(offset), len) }.to_vec()
    }

    #[test]
    fn every_policy_that_does_not_require_gives_zeroed_aligned_memory() {
        for hugepages in [Hugepages::Auto, Hugepages::Never] {
            for numa_node in [None, Some(0), Some(1023), Some(5000)] {
                for asked in [1, 4096, 4097, (2 << 20) - 1, 2 << 20, (5 << 20) + 1] {
                    let region =
                        Region::map(asked, MapPolicy { hugepages, numa_node, ..MapPolicy::default() }).unwrap();
                    assert!(region.len() >= asked);
                    assert_eq!(region.len() % 4096, 0);
                    assert_eq!(region.base().as_ptr() as usize % 4096, 0);
                    assert!(bytes_at(&region, 0, region.len()).iter().all(|&byte| byte == 0));
                    // SAFETY: the last byte is inside the mapping, which this test owns.
                    unsafe { region.base().as_ptr().add(region.len() - 1).write(7) };
                    assert_eq!(bytes_at(&region, region.len() - 1, 1), [7]);
                }
            }
        }
    }

    #[test]
    fn never_gives_plain_pages_and_large_ones_start_on_a_transparent_boundary() {
        let region = Region::map(7 << 20, MapPolicy::plain()).unwrap();
        assert_eq!(region.kind(), RegionKind::Plain);
        assert_eq!(region.len(), 7 << 20);
        assert_eq!(region.base().as_ptr() as usize % TRANSPARENT_BYTES, 0);
    }

    #[test]
    fn require_gives_hugepages_or_says_how_many_are_missing() {
        let policy = MapPolicy { hugepages: Hugepages::Require, ..MapPolicy::default() };
        match Region::map((2 << 20) + 1, policy) {
            Ok(region) => {
                assert_eq!(region.kind(), RegionKind::Huge(PageSize::MIB_2));
                assert_eq!(region.len(), 4 << 20);
            }
            Err(MapError::HugepagesUnavailable { pages, size, .. }) => {
                assert_eq!((pages, size), (2, PageSize::MIB_2));
            }
            Err(other) => panic!("unexpected error: {other}"),
        }
    }

    #[test]
    fn gigabyte_pages_that_are_missing_do_not_fail_auto() {
        let policy = MapPolicy { page_size: PageSize::GIB_1, ..MapPolicy::default() };
        assert!(Region::map(8192, policy).unwrap().len() >= 8192);
    }

    #[test]
    fn impossible_lengths_are_refused_by_value() {
        for bytes in [0, usize::MAX, isize::MAX as usize] {
            for hugepages in [Hugepages::Auto, Hugepages::Never] {
                let error = Region::map(bytes, MapPolicy { hugepages, ..MapPolicy::default() }).unwrap_err();
                assert!(error.to_string().contains(&bytes.to_string()), "{error}");
            }
        }
    }

    #[test]
    fn a_large_region_can_be_mapped_without_its_memory() {
        let region = Region::map(64 << 30, MapPolicy::plain()).unwrap();
        assert_eq!(bytes_at(&region, 63 << 30, 1), [0]);
    }
}
