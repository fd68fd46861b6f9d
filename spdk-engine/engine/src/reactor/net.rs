//! Sockets: non-blocking byte streams behind a seam, so that a simulator can delay, cut and partition them.
//!
//! *What it is.* [`Net`] makes [`Listener`]s and [`Stream`]s. A stream moves between cores (it is `Send`); readiness is
//! watched on the core that has it, by [`super::Core::watch`] with [`Stream::raw`].
//!
//! *When things fail.* `WouldBlock` means "ask again when ready"; 0 bytes received means that the peer has ended the
//! stream; every other error ends the connection.
#![allow(unsafe_code)]

use std::fmt::Debug;
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::{UnixListener, UnixStream};

use addax_hugepages::{BufSlice, Memory};

/// One piece of a vectored send.
#[derive(Debug, Clone, Copy)]
pub enum Piece<'a> {
    /// Bytes of a header.
    Bytes(&'a [u8]),
    /// A part of an I/O buffer.
    Memory(&'a BufSlice),
}

impl Piece<'_> {
    /// Bytes in the piece.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::Bytes(b) => b.len(),
            Self::Memory(m) => m.len(),
        }
    }

    /// Whether there is nothing in it.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Most pieces that one [`Stream::send`] takes.
pub const MAX_PIECES: usize = 64;

/// A connected byte stream.
pub trait Stream: Send + Debug {
    /// Receives into plain memory.
    fn recv(&mut self, into: &mut [u8]) -> io::Result<usize>;
    /// Receives straight into an I/O buffer (write phase: the caller is its only user), and what comes after it into
    /// plain memory.
    fn recv_split(&mut self, into: &Memory, then: &mut [u8]) -> io::Result<usize>;
    /// Sends at most [`MAX_PIECES`] pieces in order; the count may end within a piece.
    fn send(&mut self, pieces: &[Piece<'_>]) -> io::Result<usize>;
    /// The outcome of a connect, once writable.
    fn connect_result(&mut self) -> io::Result<()>;
    /// The descriptor to watch.
    fn raw(&self) -> RawFd;
    /// This end; unspecified for Unix sockets.
    fn local_addr(&self) -> io::Result<SocketAddr>;
    /// The other end; unspecified for Unix sockets.
    fn peer_addr(&self) -> io::Result<SocketAddr>;
}

/// A listening socket.
pub trait Listener: Debug {
    /// The next connection, or `WouldBlock`.
    fn accept(&mut self) -> io::Result<Box<dyn Stream>>;
    /// The descriptor to watch.
    fn raw(&self) -> RawFd;
    /// The bound address (with the port chosen when 0 was asked for).
    fn local_addr(&self) -> io::Result<SocketAddr>;
}

/// Makes sockets.
pub trait Net: Debug {
    /// Listens on a TCP address.
    fn listen(&self, addr: SocketAddr) -> io::Result<Box<dyn Listener>>;
    /// Begins to connect; the stream becomes writable when that has ended, see [`Stream::connect_result`].
    fn connect(&self, to: SocketAddr, from: Option<SocketAddr>) -> io::Result<Box<dyn Stream>>;
}

/// The kernel's TCP.
#[derive(Debug, Default, Clone, Copy)]
pub struct KernelNet;

/// Socket buffer in each direction, in bytes: holds several full transfers, as SPDK's 2 MiB does.
const SOCKET_BUFFER_BYTES: libc::c_int = 2 << 20;
/// Connections that may wait to be accepted.
const BACKLOG: i32 = 512;

impl Net for KernelNet {
    fn listen(&self, addr: SocketAddr) -> io::Result<Box<dyn Listener>> {
        use nix::sys::socket as s;
        let fd = tcp_socket(&addr)?;
        s::setsockopt(&fd, s::sockopt::ReuseAddr, &true)?;
        s::bind(fd.as_raw_fd(), &s::SockaddrStorage::from(addr))?;
        s::listen(&fd, s::Backlog::new(BACKLOG)?)?;
        Ok(Box::new(TcpListener::from(fd)))
    }

    fn connect(&self, to: SocketAddr, from: Option<SocketAddr>) -> io::Result<Box<dyn Stream>> {
        use nix::sys::socket as s;
        let fd = tcp_socket(&to)?;
        if let Some(from) = from {
            s::setsockopt(&fd, s::sockopt::ReuseAddr, &true)?;
            s::bind(fd.as_raw_fd(), &s::SockaddrStorage::from(from))?;
        }
        match s::connect(fd.as_raw_fd(), &s::SockaddrStorage::from(to)) {
            Ok(()) | Err(nix::errno::Errno::EINPROGRESS) => {}
            Err(error) => return Err(error.into()),
        }
        let stream = TcpStream::from(fd);
        tune(&stream);
        // A session that is closed must be over: no write of it may still leave the kernel's buffer afterwards.
        let _ = s::setsockopt(&stream, s::sockopt::Linger, &libc::linger { l_onoff: 1, l_linger: 0 });
        Ok(Box::new(stream))
    }
}

fn tcp_socket(addr: &SocketAddr) -> io::Result<OwnedFd> {
    use nix::sys::socket as s;
    let family = if addr.is_ipv4() { s::AddressFamily::Inet } else { s::AddressFamily::Inet6 };
    let flags = s::SockFlag::SOCK_NONBLOCK | s::SockFlag::SOCK_CLOEXEC;
    Ok(s::socket(family, s::SockType::Stream, flags, None)?)
}

fn tune(stream: &TcpStream) {
    use nix::sys::socket::{setsockopt, sockopt};
    // Best effort: a socket without these works, only slower.
    let _ = stream.set_nodelay(true);
    let _ = setsockopt(stream, sockopt::SndBuf, &(SOCKET_BUFFER_BYTES as usize));
    let _ = setsockopt(stream, sockopt::RcvBuf, &(SOCKET_BUFFER_BYTES as usize));
}

fn check(result: isize) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}

fn recv_split(fd: RawFd, into: &Memory, then: &mut [u8]) -> io::Result<usize> {
    let mut iov = [
        libc::iovec { iov_base: into.as_mut_ptr().cast(), iov_len: into.len() },
        libc::iovec { iov_base: then.as_mut_ptr().cast(), iov_len: then.len() },
    ];
    // SAFETY: an all-zero msghdr is valid: no name, no control data.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = iov.as_mut_ptr();
    message.msg_iovlen = iov.len() as _;
    // SAFETY: both parts outlive the call, and the kernel writes inside their lengths.
    check(unsafe { libc::recvmsg(fd, &raw mut message, libc::MSG_DONTWAIT) })
}

fn send(fd: RawFd, pieces: &[Piece<'_>]) -> io::Result<usize> {
    let mut iov = [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; MAX_PIECES];
    let count = pieces.len().min(MAX_PIECES);
    for (slot, piece) in iov.iter_mut().zip(pieces) {
        let base: *const u8 = match piece {
            Piece::Bytes(b) => b.as_ptr(),
            Piece::Memory(m) => m.as_ptr(),
        };
        *slot = libc::iovec { iov_base: base.cast_mut().cast(), iov_len: piece.len() };
    }
    // SAFETY: an all-zero msghdr is valid: no name, no control data.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = iov.as_mut_ptr();
    message.msg_iovlen = count as _;
    // SAFETY: the vector describes `count` pieces that are borrowed for the whole call and only read by it.
    check(unsafe { libc::sendmsg(fd, &raw const message, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) })
}

fn no_address() -> SocketAddr {
    SocketAddr::from(([0, 0, 0, 0], 0))
}

macro_rules! kernel_stream {
    ($stream:ty, $local:expr, $peer:expr) => {
        impl Stream for $stream {
            fn recv(&mut self, into: &mut [u8]) -> io::Result<usize> {
                io::Read::read(self, into)
            }
            fn recv_split(&mut self, into: &Memory, then: &mut [u8]) -> io::Result<usize> {
                recv_split(self.as_raw_fd(), into, then)
            }
            fn send(&mut self, pieces: &[Piece<'_>]) -> io::Result<usize> {
                send(self.as_raw_fd(), pieces)
            }
            fn connect_result(&mut self) -> io::Result<()> {
                self.take_error()?.map_or(Ok(()), Err)
            }
            fn raw(&self) -> RawFd {
                self.as_raw_fd()
            }
            fn local_addr(&self) -> io::Result<SocketAddr> {
                $local(self)
            }
            fn peer_addr(&self) -> io::Result<SocketAddr> {
                $peer(self)
            }
        }
    };
}

kernel_stream!(TcpStream, TcpStream::local_addr, TcpStream::peer_addr);
kernel_stream!(UnixStream, |_: &UnixStream| Ok(no_address()), |_: &UnixStream| Ok(no_address()));

impl Listener for TcpListener {
    fn accept(&mut self) -> io::Result<Box<dyn Stream>> {
        let (stream, _) = TcpListener::accept(self)?;
        stream.set_nonblocking(true)?;
        tune(&stream);
        Ok(Box::new(stream))
    }
    fn raw(&self) -> RawFd {
        self.as_raw_fd()
    }
    fn local_addr(&self) -> io::Result<SocketAddr> {
        TcpListener::local_addr(self)
    }
}

impl Listener for UnixListener {
    fn accept(&mut self) -> io::Result<Box<dyn Stream>> {
        let (stream, _) = UnixListener::accept(self)?;
        stream.set_nonblocking(true)?;
        Ok(Box::new(stream))
    }
    fn raw(&self) -> RawFd {
        self.as_raw_fd()
    }
    fn local_addr(&self) -> io::Result<SocketAddr> {
        Ok(no_address())
    }
}

/// A pair of connected streams, for tests.
pub fn pair() -> io::Result<(Box<dyn Stream>, Box<dyn Stream>)> {
    let (a, b) = UnixStream::pair()?;
    a.set_nonblocking(true)?;
    b.set_nonblocking(true)?;
    Ok((Box::new(a), Box::new(b)))
}
