//! The seam between a reactor and its machine: clock, disks, sockets, sleep.
//!
//! *What it is.* One [`Driver`] per core. The reactor submits disk operations and watches sockets through it, and
//! learns everything that happened from one list of [`Event`]s. The real driver is `uring.rs`; a simulator puts its
//! own in its place and so runs the very same reactor, devices and sessions.
//!
//! *Invariants.* Every submitted disk operation yields exactly one [`Event::Disk`]. A watched socket yields
//! [`Event::Ready`] at least once after each change from "nothing to read" to "something to read"; it may yield more.
//! [`Driver::park`] returns early when [`Waker::wake`] was called from any thread.
//!
//! *When things fail.* A disk error is a negative errno in the event; there is no other error path.

use std::os::fd::RawFd;
use std::sync::Arc;

use super::disk::DiskOp;

/// Nanoseconds on the driver's monotonic clock, which runs through suspend.
pub type Nanos = u64;

/// One nanosecond count per millisecond.
pub const NANOS_PER_MS: Nanos = 1_000_000;
/// One nanosecond count per second.
pub const NANOS_PER_S: Nanos = 1_000_000_000;

/// What happened since the last poll.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// A disk operation ended; `result` is a byte count or a negative errno.
    Disk { token: u64, result: i32 },
    /// A socket may be read (or has ended).
    Readable { token: u64 },
    /// A socket asked about by [`Driver::want_write`] may be written (or has ended).
    Writable { token: u64 },
}

/// Wakes a parked reactor from another thread.
pub trait Waker: Send + Sync {
    /// Makes the present or the next [`Driver::park`] return at once.
    fn wake(&self);
}

/// One core's machine.
pub trait Driver {
    /// The time now.
    fn now(&self) -> Nanos;
    /// Starts a disk operation. `op` stays where it is until its event was delivered.
    fn submit_disk(&mut self, op: &mut DiskOp, token: u64);
    /// Watches a socket for something to read, until [`Driver::unwatch`].
    fn watch(&mut self, fd: RawFd, token: u64);
    /// Asks for one [`Event::Readable`], at once when there is something already.
    fn watch_once(&mut self, fd: RawFd, token: u64);
    /// Asks for one [`Event::Writable`].
    fn want_write(&mut self, fd: RawFd, token: u64);
    /// Ends a watch. Events already queued for the token may still arrive; the reactor ignores them.
    fn unwatch(&mut self, fd: RawFd, token: u64);
    /// Collects what has happened, without sleeping.
    fn poll(&mut self, events: &mut Vec<Event>);
    /// Sleeps until something happens, a wake, or `until`.
    fn park(&mut self, until: Option<Nanos>, events: &mut Vec<Event>);
    /// A handle by which other threads end a [`Driver::park`].
    fn waker(&self) -> Arc<dyn Waker>;
}
