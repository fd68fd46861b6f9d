//! Disk operations as data, and the files they go to.
//!
//! *What it is.* A [`DiskOp`] owns all that the kernel may touch while it runs (the buffers and their vector), so that
//! an operation can never outlive its memory. The reactor keeps it in a slab until its event arrives.
//!
//! *Invariants.* `iov` describes the rest still to be transferred; short transfers are resubmitted by the reactor.
#![allow(unsafe_code)]

use std::fs::OpenOptions;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;

use addax_hugepages::BufSlice;
use smallvec::SmallVec;

/// Buffers of one I/O, in order.
pub type Bufs = SmallVec<[BufSlice; 2]>;

/// An open file or block device.
#[derive(Debug)]
pub struct DiskFile {
    handle: Handle,
    /// Bytes at the time of opening.
    pub size_bytes: u64,
    /// Smallest transfer the file takes, in bytes (1 without O_DIRECT).
    pub alignment_bytes: u32,
    /// Whether it is a block device.
    pub is_block_device: bool,
    /// Whether ranges can be freed so that they read as zeroes ([`DiskVerb::PunchHole`]).
    pub punches_holes: bool,
}

#[derive(Debug)]
enum Handle {
    Fd(OwnedFd),
    Simulated(u64),
}

impl DiskFile {
    /// Opens a file or block device with O_DIRECT where the file system has it.
    pub fn open(path: &Path, readonly: bool) -> io::Result<Arc<Self>> {
        let open = |flags| OpenOptions::new().read(true).write(!readonly).custom_flags(flags).open(path);
        let (file, direct) = match open(libc::O_DIRECT | libc::O_CLOEXEC) {
            Ok(file) => (file, true),
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => (open(libc::O_CLOEXEC)?, false),
            Err(error) => return Err(error),
        };
        let meta = file.metadata()?;
        let is_block_device = meta.file_type().is_block_device();
        if !is_block_device && !meta.file_type().is_file() {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        let size_bytes = if is_block_device { block_device_size(file.as_raw_fd())? } else { meta.len() };
        let punches_holes = readonly || punches_holes(&file, size_bytes);
        Ok(Arc::new(Self {
            handle: Handle::Fd(file.into()),
            size_bytes,
            alignment_bytes: if direct { 512 } else { 1 },
            is_block_device,
            punches_holes,
        }))
    }

    /// A file that exists only in a simulator's disk, which knows it by `id`.
    #[must_use]
    pub fn simulated(id: u64, size_bytes: u64) -> Arc<Self> {
        Arc::new(Self {
            handle: Handle::Simulated(id),
            size_bytes,
            alignment_bytes: 512,
            is_block_device: false,
            punches_holes: true,
        })
    }

    /// The descriptor; the simulator's id for a simulated file.
    #[must_use]
    pub fn raw(&self) -> RawFd {
        match &self.handle {
            Handle::Fd(fd) => fd.as_raw_fd(),
            Handle::Simulated(id) => RawFd::try_from(*id).unwrap_or(-1),
        }
    }
}

/// Asked beyond the end, where there is nothing to free: only whether it could be done comes back.
fn punches_holes(file: &std::fs::File, size_bytes: u64) -> bool {
    use nix::fcntl::{FallocateFlags, fallocate};
    let (Ok(end), flags) = (i64::try_from(size_bytes), FallocateFlags::FALLOC_FL_PUNCH_HOLE) else { return false };
    let answer = fallocate(file, flags | FallocateFlags::FALLOC_FL_KEEP_SIZE, end, 4096);
    answer != Err(nix::errno::Errno::EOPNOTSUPP)
}

fn block_device_size(fd: RawFd) -> io::Result<u64> {
    let mut bytes = 0u64;
    // BLKGETSIZE64: _IOR(0x12, 114, size_t).
    const BLKGETSIZE64: libc::c_ulong = 0x8008_1272;
    // SAFETY: the ioctl writes one u64 to the address given, which lives until the call returns.
    if unsafe { libc::ioctl(fd, BLKGETSIZE64, &raw mut bytes) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(bytes)
}

/// What to do with the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DiskVerb {
    /// Fill the buffers from `offset`.
    Read,
    /// Write the buffers at `offset`.
    Write,
    /// Make all earlier completed writes durable.
    Flush,
    /// Free `len` bytes at `offset`; they read as zeroes afterwards.
    PunchHole,
    /// Make `len` bytes at `offset` read as zeroes, keeping their space.
    ZeroRange,
}

/// One disk operation with everything the kernel touches while it runs.
#[derive(Debug)]
pub struct DiskOp {
    pub file: Arc<DiskFile>,
    pub verb: DiskVerb,
    pub offset: u64,
    /// Bytes for the verbs without buffers.
    pub len: u64,
    bufs: Bufs,
    pub(super) iov: SmallVec<[libc::iovec; 2]>,
}

// SAFETY: the raw pointers in `iov` point into `bufs`, which the operation owns and which may be used from any thread.
unsafe impl Send for DiskOp {}

impl DiskOp {
    /// A read or write of whole buffers.
    #[must_use]
    pub fn transfer(file: Arc<DiskFile>, verb: DiskVerb, offset: u64, bufs: Bufs) -> Self {
        let iov = bufs.iter().map(|b| libc::iovec { iov_base: b.as_mut_ptr().cast(), iov_len: b.len() }).collect();
        Self { file, verb, offset, len: 0, bufs, iov }
    }

    /// An operation without buffers.
    #[must_use]
    pub fn plain(file: Arc<DiskFile>, verb: DiskVerb, offset: u64, len: u64) -> Self {
        Self { file, verb, offset, len, bufs: Bufs::new(), iov: SmallVec::new() }
    }

    /// Bytes still to transfer.
    #[must_use]
    pub fn remaining(&self) -> usize {
        self.iov.iter().map(|v| v.iov_len).sum()
    }

    /// The buffers, for a simulator that moves the bytes itself.
    #[must_use]
    pub fn bufs(&self) -> &Bufs {
        &self.bufs
    }

    /// Takes `n` transferred bytes off the front of the vector; true when nothing remains.
    pub fn advance(&mut self, mut n: usize) -> bool {
        self.offset += n as u64;
        while n > 0 && !self.iov.is_empty() {
            let first = &mut self.iov[0];
            if n >= first.iov_len {
                n -= first.iov_len;
                self.iov.remove(0);
            } else {
                // SAFETY: n < iov_len, so the new base stays inside the buffer that `bufs` keeps alive.
                first.iov_base = unsafe { first.iov_base.cast::<u8>().add(n) }.cast();
                first.iov_len -= n;
                n = 0;
            }
        }
        self.iov.is_empty()
    }
}
