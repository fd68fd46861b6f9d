//! The machine of a stepped engine: sockets in memory, a clock that stands still, no sleep.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::SocketAddr;
use std::os::fd::RawFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use addax_engine::reactor::disk::DiskOp;
use addax_engine::reactor::driver::{self, Event, Nanos, Waker};
use addax_engine::reactor::net::{self, Piece};
use addax_hugepages::Memory;

/// Calls that would have been system calls.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Calls {
    /// Receives that got something.
    pub receives: u64,
    /// Receives that got nothing.
    pub empty_receives: u64,
    pub sends: u64,
    /// Sockets armed in the driver.
    pub arms: u64,
}

#[derive(Debug, Default)]
struct Pipe {
    to_target: Vec<u8>,
    taken: usize,
    to_host: Vec<u8>,
}

#[derive(Debug, Default)]
struct Inner {
    next_fd: RawFd,
    listeners: HashMap<RawFd, VecDeque<RawFd>>,
    pipes: HashMap<RawFd, Pipe>,
    calls: Calls,
}

/// All sockets there are.
#[derive(Debug, Clone, Default)]
pub struct World(Arc<Mutex<Inner>>);

fn lock(world: &World) -> MutexGuard<'_, Inner> {
    world.0.lock().unwrap_or_else(PoisonError::into_inner)
}

impl World {
    /// The network seam for an engine.
    #[must_use]
    pub fn net(&self) -> Net {
        Net(self.clone())
    }

    /// Counts so far.
    #[must_use]
    pub fn calls(&self) -> Calls {
        lock(self).calls
    }

    /// Connects to the one listener; `None` when nobody listens.
    #[must_use]
    pub fn dial(&self) -> Option<Dialled> {
        let mut inner = lock(self);
        inner.next_fd += 1;
        let fd = inner.next_fd;
        inner.listeners.values_mut().next()?.push_back(fd);
        inner.pipes.insert(fd, Pipe::default());
        Some(Dialled { world: self.clone(), fd })
    }

    fn readable(&self, fd: RawFd) -> bool {
        let inner = lock(self);
        let data = inner.pipes.get(&fd).is_some_and(|p| p.taken < p.to_target.len());
        data || inner.listeners.get(&fd).is_some_and(|l| !l.is_empty())
    }
}

/// The host's end of a connection.
#[derive(Debug)]
pub struct Dialled {
    world: World,
    fd: RawFd,
}

impl Dialled {
    /// Sends everything at once.
    pub fn send(&self, bytes: &[u8]) {
        if let Some(pipe) = lock(&self.world).pipes.get_mut(&self.fd) {
            pipe.to_target.extend_from_slice(bytes);
        }
    }

    /// Appends what the target has sent.
    pub fn receive(&self, into: &mut Vec<u8>) {
        if let Some(pipe) = lock(&self.world).pipes.get_mut(&self.fd) {
            into.append(&mut pipe.to_host);
        }
    }
}

/// The network seam.
#[derive(Debug)]
pub struct Net(World);

impl net::Net for Net {
    fn listen(&self, addr: SocketAddr) -> io::Result<Box<dyn net::Listener>> {
        let mut inner = lock(&self.0);
        inner.next_fd += 1;
        let fd = inner.next_fd;
        inner.listeners.insert(fd, VecDeque::new());
        Ok(Box::new(Listener { world: self.0.clone(), fd, addr }))
    }
    fn connect(&self, _to: SocketAddr, _from: Option<SocketAddr>) -> io::Result<Box<dyn net::Stream>> {
        Err(io::ErrorKind::ConnectionRefused.into())
    }
}

#[derive(Debug)]
struct Listener {
    world: World,
    fd: RawFd,
    addr: SocketAddr,
}

impl net::Listener for Listener {
    fn accept(&mut self) -> io::Result<Box<dyn net::Stream>> {
        let fd = lock(&self.world).listeners.get_mut(&self.fd).and_then(VecDeque::pop_front);
        let fd = fd.ok_or(io::ErrorKind::WouldBlock)?;
        Ok(Box::new(Stream { world: self.world.clone(), fd, addr: self.addr }))
    }
    fn raw(&self) -> RawFd {
        self.fd
    }
    fn local_addr(&self) -> io::Result<SocketAddr> {
        Ok(self.addr)
    }
}

#[derive(Debug)]
struct Stream {
    world: World,
    fd: RawFd,
    addr: SocketAddr,
}

impl Stream {
    fn take(&self, mut put: impl FnMut(&[u8]) -> usize) -> io::Result<usize> {
        let mut inner = lock(&self.world);
        let Inner { pipes, calls, .. } = &mut *inner;
        let pipe = pipes.get_mut(&self.fd).ok_or(io::ErrorKind::ConnectionReset)?;
        if pipe.taken == pipe.to_target.len() {
            calls.empty_receives += 1;
            return Err(io::ErrorKind::WouldBlock.into());
        }
        calls.receives += 1;
        let count = put(&pipe.to_target[pipe.taken..]);
        pipe.taken += count;
        if pipe.taken == pipe.to_target.len() {
            pipe.to_target.clear();
            pipe.taken = 0;
        }
        Ok(count)
    }
}

impl net::Stream for Stream {
    fn recv(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.take(|from| {
            let count = from.len().min(into.len());
            into[..count].copy_from_slice(&from[..count]);
            count
        })
    }
    fn recv_split(&mut self, into: &Memory, then: &mut [u8]) -> io::Result<usize> {
        self.take(|from| {
            let direct = from.len().min(into.len());
            into.copy_from(&from[..direct], 0);
            let beyond = (from.len() - direct).min(then.len());
            then[..beyond].copy_from_slice(&from[direct..direct + beyond]);
            direct + beyond
        })
    }
    fn send(&mut self, pieces: &[Piece<'_>]) -> io::Result<usize> {
        let mut inner = lock(&self.world);
        inner.calls.sends += 1;
        let pipe = inner.pipes.get_mut(&self.fd).ok_or(io::ErrorKind::ConnectionReset)?;
        let before = pipe.to_host.len();
        for piece in pieces {
            match piece {
                Piece::Bytes(bytes) => pipe.to_host.extend_from_slice(bytes),
                Piece::Memory(memory) => memory.for_each_chunk(|chunk| pipe.to_host.extend_from_slice(chunk)),
            }
        }
        Ok(pipe.to_host.len() - before)
    }
    fn connect_result(&mut self) -> io::Result<()> {
        Ok(())
    }
    fn raw(&self) -> RawFd {
        self.fd
    }
    fn local_addr(&self) -> io::Result<SocketAddr> {
        Ok(self.addr)
    }
    fn peer_addr(&self) -> io::Result<SocketAddr> {
        Ok(self.addr)
    }
}

/// The driver seam.
#[derive(Debug)]
pub struct Driver {
    world: World,
    watched: Vec<(RawFd, u64)>,
    once: Vec<(RawFd, u64)>,
}

impl Driver {
    /// A driver over the sockets of `world`.
    #[must_use]
    pub fn new(world: &World) -> Self {
        Self { world: world.clone(), watched: Vec::new(), once: Vec::new() }
    }
}

struct Awake;

impl Waker for Awake {
    fn wake(&self) {}
}

impl driver::Driver for Driver {
    fn now(&self) -> Nanos {
        driver::NANOS_PER_S
    }
    fn submit_disk(&mut self, _op: &mut DiskOp, _token: u64) {
        panic!("a stepped engine has no disks");
    }
    fn watch(&mut self, fd: RawFd, token: u64) {
        lock(&self.world).calls.arms += 1;
        self.watched.push((fd, token));
    }
    fn watch_once(&mut self, fd: RawFd, token: u64) {
        lock(&self.world).calls.arms += 1;
        self.once.push((fd, token));
    }
    fn want_write(&mut self, _fd: RawFd, _token: u64) {}
    fn unwatch(&mut self, _fd: RawFd, token: u64) {
        self.watched.retain(|(_, t)| *t != token);
        self.once.retain(|(_, t)| *t != token);
    }
    fn poll(&mut self, events: &mut Vec<Event>) {
        let Self { world, watched, once } = self;
        events.extend(watched.iter().filter(|w| world.readable(w.0)).map(|w| Event::Readable { token: w.1 }));
        once.retain(|(fd, token)| {
            let ready = world.readable(*fd);
            if ready {
                events.push(Event::Readable { token: *token });
            }
            !ready
        });
    }
    fn park(&mut self, _until: Option<Nanos>, events: &mut Vec<Event>) {
        self.poll(events);
    }
    fn waker(&self) -> Arc<dyn Waker> {
        Arc::new(Awake)
    }
}
