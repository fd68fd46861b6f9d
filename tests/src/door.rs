//! The way from a node to the API server, under a test's control: requests can be kept back, answers too, and a single
//! write can be caught and let go later, after whoever sent it has given up.
//!
//! *What it is.* [`Door`] listens at the API server's address in a node's network namespace and passes bytes to and from
//! the API server, connection by connection, on threads of its own. What goes through is encrypted; a write is known by its
//! length, as it alone carries a whole object.
//!
//! *Invariants.* Nothing is lost: what is held goes on when it is released, also when the client has closed its connection
//! meanwhile, and the server then has a while to act on it.
//!
//! *When things fail.* A connection that breaks on one side ends on the other. Dropped, the door ends all of them.

use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::sched::{CloneFlags, setns};

/// What a request without an object has at most.
const SMALL_REQUEST: u64 = 1024;
/// How often a thread that waits looks whether it should end.
const LOOK: Duration = Duration::from_millis(100);
/// How long a server may act on a request whose client has gone.
const LINGER: Duration = Duration::from_secs(2);

/// What of a write is caught.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Catch {
    /// The request: the server does not know of it yet.
    Request,
    /// The answer: the server has done it, and nobody knows.
    Answer,
}

#[derive(Debug, Default)]
struct State {
    shut: bool,
    armed: Option<Catch>,
    caught: u64,
    releases: u64,
    ended: bool,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits while `holds`, or until the door ends.
    fn wait_while<'a>(&self, state: MutexGuard<'a, State>, holds: impl Fn(&State) -> bool) -> MutexGuard<'a, State> {
        let waited = self.changed.wait_while(state, |state| !state.ended && holds(state));
        waited.unwrap_or_else(PoisonError::into_inner)
    }
}

/// See the module.
#[derive(Debug)]
pub struct Door {
    shared: Arc<Shared>,
}

impl Door {
    /// Opens a door at `address` in the namespace of `inside`, to the same address in the one of `outside`.
    ///
    /// # Errors
    /// When the address cannot be listened at.
    pub fn open(address: SocketAddr, inside: &Path, outside: &Path) -> Result<Self> {
        let listener = within(inside, || TcpListener::bind(address))?.with_context(|| address.to_string())?;
        listener.set_nonblocking(true)?;
        let shared = Arc::new(Shared::default());
        let (ours, outside) = (shared.clone(), outside.to_owned());
        thread::spawn(move || accept(&listener, address, &outside, &ours));
        Ok(Self { shared })
    }

    /// Nothing passes until [`Self::unlock`].
    pub fn shut(&self) {
        self.shared.lock().shut = true;
    }

    /// All passes again.
    pub fn unlock(&self) {
        self.shared.lock().shut = false;
        self.shared.changed.notify_all();
    }

    /// Catches the next write; later ones pass.
    pub fn catch(&self, what: Catch) {
        let mut state = self.shared.lock();
        state.armed = Some(what);
        state.caught = 0;
    }

    /// Waits until the write is caught.
    ///
    /// # Errors
    /// When none comes in time.
    pub fn wait_caught(&self, patience: Duration) -> Result<()> {
        let until = Instant::now() + patience;
        while self.shared.lock().caught == 0 {
            ensure!(Instant::now() < until, "no write has come through the door in {patience:?}");
            thread::sleep(Duration::from_millis(2));
        }
        Ok(())
    }

    /// Lets go of what was caught, and catches no more.
    pub fn release(&self) {
        let mut state = self.shared.lock();
        state.armed = None;
        state.releases += 1;
        self.shared.changed.notify_all();
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        self.shared.lock().ended = true;
        self.shared.changed.notify_all();
    }
}

/// Runs something on a thread in a network namespace; sockets made there stay there.
///
/// # Errors
/// When the namespace cannot be entered.
pub fn within<T: Send>(namespace: &Path, run: impl FnOnce() -> T + Send) -> Result<T> {
    let entered = || {
        let file = File::open(namespace).with_context(|| namespace.display().to_string())?;
        setns(file, CloneFlags::CLONE_NEWNET).context("enter a network namespace")?;
        Ok(run())
    };
    thread::scope(|scope| scope.spawn(entered).join()).unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

fn accept(listener: &TcpListener, address: SocketAddr, outside: &Path, shared: &Arc<Shared>) {
    while !shared.lock().ended {
        let Ok((client, _)) = listener.accept() else {
            thread::sleep(Duration::from_millis(5));
            continue;
        };
        // When the server is not there, the client learns it by the end of its connection.
        if let Ok(Ok(server)) = within(outside, || TcpStream::connect(address)) {
            // A pair that cannot be made is dropped, and with it both connections.
            let _ = join(&client, &server, shared);
        }
    }
}

fn join(client: &TcpStream, server: &TcpStream, shared: &Arc<Shared>) -> std::io::Result<()> {
    for stream in [client, server] {
        stream.set_nonblocking(false)?;
        stream.set_read_timeout(Some(LOOK))?;
        stream.set_nodelay(true)?;
    }
    let pair = Arc::new(Pair::default());
    let (from, to) = (client.try_clone()?, server.try_clone()?);
    let (one, ours) = (pair.clone(), shared.clone());
    thread::spawn(move || pump_requests(&one, from, &to, &ours));
    let (from, to) = (server.try_clone()?, client.try_clone()?);
    let ours = shared.clone();
    thread::spawn(move || pump_answers(&pair, from, &to, &ours));
    Ok(())
}

/// What the two directions of a connection know of each other.
#[derive(Debug, Default)]
struct Pair {
    /// Bytes that the server has sent.
    answered: AtomicU64,
    hold_answer: AtomicBool,
    server_ended: AtomicBool,
}

/// What a read gave: bytes, nothing yet, or the end.
fn read(from: &mut TcpStream, buffer: &mut [u8], shared: &Shared) -> Option<usize> {
    loop {
        match from.read(buffer) {
            Ok(0) => return None,
            Ok(count) => return Some(count),
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
            Err(_) => return None,
        }
        if shared.lock().ended {
            return None;
        }
    }
}

fn pump_requests(pair: &Pair, mut client: TcpStream, mut server: &TcpStream, shared: &Shared) {
    let mut buffer = vec![0; 64 << 10];
    let (mut since_answer, mut answered, mut exchange) = (0, 0, 0);
    while let Some(count) = read(&mut client, &mut buffer, shared) {
        let now = pair.answered.load(Ordering::Acquire);
        if now != answered {
            (since_answer, answered, exchange) = (0, now, exchange + 1);
        }
        since_answer += count as u64;
        // The first two exchanges are the handshake, which carries certificates.
        let is_write = exchange >= 2 && since_answer > SMALL_REQUEST;
        let mut state = shared.wait_while(shared.lock(), |state| state.shut);
        if is_write && state.armed == Some(Catch::Request) {
            state.armed = None;
            state.caught += 1;
            let releases = state.releases;
            state = shared.wait_while(state, |state| state.releases == releases);
        } else if is_write && state.armed == Some(Catch::Answer) {
            state.armed = None;
            pair.hold_answer.store(true, Ordering::Release);
        }
        drop(state);
        if server.write_all(&buffer[..count]).is_err() {
            break;
        }
    }
    let until = Instant::now() + LINGER;
    while !pair.server_ended.load(Ordering::Acquire) && Instant::now() < until && !shared.lock().ended {
        thread::sleep(Duration::from_millis(10));
    }
    let _ = server.shutdown(Shutdown::Both);
}

fn pump_answers(pair: &Pair, mut server: TcpStream, mut client: &TcpStream, shared: &Shared) {
    let mut buffer = vec![0; 64 << 10];
    while let Some(count) = read(&mut server, &mut buffer, shared) {
        let mut state = shared.wait_while(shared.lock(), |state| state.shut);
        if pair.hold_answer.swap(false, Ordering::AcqRel) {
            state.caught += 1;
            let releases = state.releases;
            state = shared.wait_while(state, |state| state.releases == releases);
        }
        drop(state);
        pair.answered.fetch_add(count as u64, Ordering::AcqRel);
        // A client that has gone does not keep the server from ending what it began.
        let _ = client.write_all(&buffer[..count]);
    }
    pair.server_ended.store(true, Ordering::Release);
    let _ = client.shutdown(Shutdown::Both);
}
