//! The real driver: one io_uring per core for disks, socket readiness, wake-ups and sleep.
//!
//! *What it is.* Everything that can end a core's sleep is a completion of this one ring: disk operations, socket
//! polls (for reading multishot, or one-shot where the reactor asks the socket itself while it carries traffic; for
//! writing one-shot), and an eventfd that other threads write. A parked core costs
//! nothing; a busy one looks at the completion queue without a system call.
//!
//! *Invariants.* User data carries the caller's token with the kind in the top byte. A multishot poll that the kernel
//! ended is armed again. The submission queue is flushed when full and before each sleep.
//!
//! *When things fail.* A ring that cannot be made is an error at start. A failed enter other than EINTR/EAGAIN/EBUSY/ENOMEM (asked again)
//! is a broken invariant and ends the process.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;

use addax_hugepages::BufPool;
use io_uring::types::{Fd, SubmitArgs, Timespec};
use io_uring::{IoUring, cqueue, opcode, squeue};
use nix::sys::eventfd::{EfdFlags, EventFd};

use super::disk::{DiskOp, DiskVerb};
use super::driver::{Driver, Event, Nanos, Waker};

/// The kernel takes at most this much as one registered buffer.
const REGISTERED_BYTES_MAX: usize = 1 << 30;
/// Entries of the submission queue; more operations than that are pushed in several submits.
const RING_ENTRIES: u32 = 1024;

const KIND_SHIFT: u32 = 56;
const KIND_DISK: u64 = 1;
const KIND_READ: u64 = 2;
const KIND_WRITE: u64 = 3;
const KIND_WAKE: u64 = 4;
const KIND_CANCEL: u64 = 5;
const TOKEN_MASK: u64 = (1 << KIND_SHIFT) - 1;

/// One core's io_uring.
pub struct UringDriver {
    ring: IoUring,
    wake: Arc<EventWaker>,
    watched: HashMap<u64, RawFd>,
    /// The pool's region is registered as buffer 0, so that transfers of its buffers skip the mapping of pages.
    fixed: bool,
    /// Events taken off the completion queue to make room for a submission, for the next poll.
    early: Vec<Event>,
}

impl std::fmt::Debug for UringDriver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("UringDriver").field("watched", &self.watched.len()).finish()
    }
}

struct EventWaker(EventFd);

impl Waker for EventWaker {
    fn wake(&self) {
        // A full counter means that a wake is already pending, which is all that is wanted.
        let _ = self.0.write(1);
    }
}

impl UringDriver {
    /// Makes the ring; must be called on the thread that will drive it.
    pub fn new() -> io::Result<Self> {
        let ring = IoUring::builder()
            .setup_single_issuer()
            .setup_coop_taskrun()
            .setup_taskrun_flag()
            .setup_cqsize(RING_ENTRIES * 4)
            .build(RING_ENTRIES)
            .or_else(|_| IoUring::builder().setup_cqsize(RING_ENTRIES * 4).build(RING_ENTRIES))?;
        let event = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK).map_err(io::Error::from)?;
        let mut driver =
            Self { ring, wake: Arc::new(EventWaker(event)), watched: HashMap::new(), fixed: false, early: Vec::new() };
        driver.arm_wake();
        Ok(driver)
    }

    /// Registers the pool's memory with the ring. Without it (a limit on locked memory, an old kernel) transfers work as
    /// well, a little slower; that is said once.
    pub fn register(&mut self, pool: &BufPool) {
        let region = pool.region_iovec();
        if region.iov_len > REGISTERED_BYTES_MAX {
            tracing::info!(
                bytes = region.iov_len,
                limit = REGISTERED_BYTES_MAX,
                "buffers are not registered: too large"
            );
            return;
        }
        // SAFETY: the region lives as long as its pool, and every reactor holds a handle to the pool longer than to its
        // driver.
        match unsafe { self.ring.submitter().register_buffers(&[region]) } {
            Ok(()) => self.fixed = true,
            Err(error) => {
                tracing::warn!(%error, "buffers are not registered with io_uring; disk I/O costs a little more")
            }
        }
    }

    /// Address and length of a transfer that lies in the registered region whole.
    fn fixed_part(&self, op: &DiskOp) -> Option<(*mut u8, u32)> {
        let [part] = op.iov.as_slice() else { return None };
        let registered = self.fixed && op.bufs().iter().all(|b| b.registered_offset().is_some());
        registered.then_some((part.iov_base.cast(), u32::try_from(part.iov_len).ok()?))
    }

    fn arm_wake(&mut self) {
        let fd = self.wake.0.as_raw_fd();
        let entry = opcode::PollAdd::new(Fd(fd), libc::POLLIN as u32).multi(true).build();
        self.push(entry.user_data(KIND_WAKE << KIND_SHIFT));
    }

    fn arm_read(&mut self, fd: RawFd, token: u64, multi: bool) {
        let mask = (libc::POLLIN | libc::POLLRDHUP) as u32;
        let entry = opcode::PollAdd::new(Fd(fd), mask).multi(multi).build();
        self.push(entry.user_data(KIND_READ << KIND_SHIFT | token));
    }

    fn push(&mut self, entry: squeue::Entry) {
        loop {
            // SAFETY: every address in the entry belongs to a DiskOp (or to nothing at all), which its owner keeps in
            // place until the completion was delivered, as the contract of `Driver::submit_disk` asks.
            if unsafe { self.ring.submission().push(&entry) }.is_ok() {
                return;
            }
            self.enter(0, None);
            // A kernel whose completion queue has run over takes no submissions until that was emptied.
            let mut early = std::mem::take(&mut self.early);
            self.drain(&mut early);
            early.append(&mut self.early);
            self.early = early;
        }
    }

    fn enter(&mut self, want: usize, until: Option<Timespec>) {
        let result = match until {
            Some(ts) => {
                let args = SubmitArgs::new().timespec(&ts);
                self.ring.submitter().submit_with_args(want, &args)
            }
            None => self.ring.submitter().submit_and_wait(want),
        };
        if let Err(error) = result {
            match error.raw_os_error() {
                Some(libc::EINTR | libc::EAGAIN | libc::EBUSY | libc::ENOMEM | libc::ETIME) => {}
                _ => panic!("io_uring_enter failed: {error}"),
            }
        }
    }

    fn drain(&mut self, events: &mut Vec<Event>) {
        let mut rearm_wake = false;
        let mut rearm = Vec::new();
        for cqe in self.ring.completion() {
            let (kind, token) = (cqe.user_data() >> KIND_SHIFT, cqe.user_data() & TOKEN_MASK);
            let ended = !cqueue::more(cqe.flags());
            match kind {
                KIND_DISK => events.push(Event::Disk { token, result: cqe.result() }),
                KIND_READ if cqe.result() != -libc::ECANCELED => {
                    events.push(Event::Readable { token });
                    if ended {
                        rearm.push(token);
                    }
                }
                KIND_WRITE if cqe.result() != -libc::ECANCELED => events.push(Event::Writable { token }),
                KIND_WAKE => {
                    let _ = self.wake.0.read();
                    rearm_wake |= ended;
                }
                _ => {}
            }
        }
        if rearm_wake {
            self.arm_wake();
        }
        for token in rearm {
            if let Some(fd) = self.watched.get(&token).copied() {
                self.arm_read(fd, token, true);
            }
        }
    }
}

impl Driver for UringDriver {
    fn now(&self) -> Nanos {
        let mut ts = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: the call writes one timespec to the address given.
        unsafe { libc::clock_gettime(libc::CLOCK_BOOTTIME, &raw mut ts) };
        ts.tv_sec as u64 * 1_000_000_000 + ts.tv_nsec as u64
    }

    fn submit_disk(&mut self, op: &mut DiskOp, token: u64) {
        let fd = Fd(op.file.raw());
        let count = op.iov.len() as u32;
        let fixed = self.fixed_part(op);
        let entry = match (op.verb, fixed) {
            (DiskVerb::Read, Some((at, len))) => opcode::ReadFixed::new(fd, at, len, 0).offset(op.offset).build(),
            (DiskVerb::Write, Some((at, len))) => opcode::WriteFixed::new(fd, at, len, 0).offset(op.offset).build(),
            (DiskVerb::Read, None) => opcode::Readv::new(fd, op.iov.as_ptr(), count).offset(op.offset).build(),
            (DiskVerb::Write, None) => opcode::Writev::new(fd, op.iov.as_ptr(), count).offset(op.offset).build(),
            (DiskVerb::Flush, _) => opcode::Fsync::new(fd).flags(io_uring::types::FsyncFlags::DATASYNC).build(),
            (DiskVerb::PunchHole, _) => opcode::Fallocate::new(fd, op.len)
                .offset(op.offset)
                .mode(libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE)
                .build(),
            (DiskVerb::ZeroRange, _) => opcode::Fallocate::new(fd, op.len)
                .offset(op.offset)
                .mode(libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE)
                .build(),
        };
        self.push(entry.user_data(KIND_DISK << KIND_SHIFT | token));
    }

    fn watch(&mut self, fd: RawFd, token: u64) {
        self.watched.insert(token, fd);
        self.arm_read(fd, token, true);
    }

    fn watch_once(&mut self, fd: RawFd, token: u64) {
        self.arm_read(fd, token, false);
    }

    fn want_write(&mut self, fd: RawFd, token: u64) {
        let entry = opcode::PollAdd::new(Fd(fd), libc::POLLOUT as u32).build();
        self.push(entry.user_data(KIND_WRITE << KIND_SHIFT | token));
    }

    fn unwatch(&mut self, _fd: RawFd, token: u64) {
        self.watched.remove(&token);
        for kind in [KIND_READ, KIND_WRITE] {
            let entry = opcode::PollRemove::new(kind << KIND_SHIFT | token).build();
            self.push(entry.user_data(KIND_CANCEL << KIND_SHIFT));
        }
        // The descriptor is closed right after this call: the removal must reach the kernel before that.
        self.enter(0, None);
    }

    fn poll(&mut self, events: &mut Vec<Event>) {
        let (pending, taskrun) = {
            let sq = self.ring.submission();
            (!sq.is_empty(), sq.taskrun() || sq.cq_overflow())
        };
        if pending || taskrun {
            self.enter(0, None);
        }
        events.append(&mut self.early);
        self.drain(events);
    }

    fn park(&mut self, until: Option<Nanos>, events: &mut Vec<Event>) {
        if !self.early.is_empty() {
            return self.poll(events);
        }
        let wait = match until {
            None => None,
            Some(at) => {
                let ns = at.saturating_sub(self.now());
                if ns == 0 {
                    return self.poll(events);
                }
                Some(Timespec::new().sec(ns / 1_000_000_000).nsec((ns % 1_000_000_000) as u32))
            }
        };
        self.enter(1, wait);
        self.drain(events);
    }

    fn waker(&self) -> Arc<dyn Waker> {
        Arc::clone(&self.wake) as Arc<dyn Waker>
    }
}
