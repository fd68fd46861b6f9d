//! The memory system calls, each as a function with an `io::Result`.
//!
//! The functions are `unsafe` where a wrong argument could pull memory from under a live reference; the one caller
//! is [`crate::map`], which owns every range it passes.
#![allow(unsafe_code)]

use std::io;
use std::ptr::{self, NonNull};

use crate::page_size::PageSize;

/// Nodes the node mask can name; the kernel's own limit is 1024.
const MASK_NODES: usize = 1024;
const WORD_BITS: usize = libc::c_ulong::BITS as usize;

/// Size in bytes of a base page.
pub(crate) fn base_page_bytes() -> usize {
    // SAFETY: `sysconf` has no memory arguments.
    let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(bytes).unwrap_or(crate::BUFFER_ALIGN)
}

/// Maps zeroed private memory; with `huge` from the hugepage pool, where the kernel sets the pages aside at once.
///
/// Plain memory is mapped without reserving swap for it, because pools are sized for the worst case and mostly
/// stay untouched.
pub(crate) fn map_anonymous(bytes: usize, huge: Option<PageSize>) -> io::Result<NonNull<u8>> {
    let extra = match huge {
        Some(size) => libc::MAP_HUGETLB | ((size.log2() as libc::c_int) << libc::MAP_HUGE_SHIFT),
        None => libc::MAP_NORESERVE,
    };
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | extra;
    // SAFETY: a new anonymous mapping at an address of the kernel's choice touches no existing memory.
    let base = unsafe { libc::mmap(ptr::null_mut(), bytes, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) };
    if base == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    NonNull::new(base.cast()).ok_or_else(|| io::Error::other("mmap returned address zero"))
}

/// Unmaps a range.
///
/// # Safety
/// The range is page aligned, was mapped by [`map_anonymous`], and nothing points into it any more.
pub(crate) unsafe fn unmap(base: NonNull<u8>, bytes: usize) -> io::Result<()> {
    // SAFETY: the caller owns the range and no reference into it is left.
    check(unsafe { libc::munmap(base.as_ptr().cast(), bytes) }.into())
}

/// Gives the kernel advice that does not change the content of a range.
///
/// # Safety
/// The range is mapped, owned by the caller, and `advice` keeps its content.
pub(crate) unsafe fn advise(base: NonNull<u8>, bytes: usize, advice: libc::c_int) -> io::Result<()> {
    // SAFETY: the range is mapped and the advice keeps the content, by the caller's promise.
    check(unsafe { libc::madvise(base.as_ptr().cast(), bytes, advice) }.into())
}

/// Prefers a NUMA node for pages of the range that are not there yet.
///
/// # Safety
/// The range is mapped and owned by the caller.
pub(crate) unsafe fn prefer_node(base: NonNull<u8>, bytes: usize, node: u32) -> io::Result<()> {
    let mut mask = [0 as libc::c_ulong; MASK_NODES / WORD_BITS];
    let node = node as usize;
    let word = mask.get_mut(node / WORD_BITS).ok_or_else(|| io::Error::from_raw_os_error(libc::EINVAL))?;
    *word = 1 << (node % WORD_BITS);
    // SAFETY: the mask lives through the call and holds `MASK_NODES` bits (the kernel takes one off the count it is
    // given); the range is mapped, by the caller's promise, and placement does not change its content.
    check(unsafe {
        libc::syscall(libc::SYS_mbind, base.as_ptr(), bytes, libc::MPOL_PREFERRED, mask.as_ptr(), MASK_NODES + 1, 0)
    })
}

fn check(code: libc::c_long) -> io::Result<()> {
    if code == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
