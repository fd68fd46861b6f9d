//! A TCP relay on 127.0.0.1, for targets that listen elsewhere on the loopback network, and for cutting them off.
//!
//! Each accepted connection is relayed by two threads until either side closes. [`Forwarder::cut`] closes every
//! connection and refuses new ones, as a broken network would look to the guest; [`Forwarder::mend`] accepts
//! again. Dropping the forwarder closes everything.

use std::io;
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result};

/// Bounds the connection to the target, which is on this machine.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

#[derive(Debug, Default)]
struct State {
    cut: bool,
    closed: bool,
    /// Both ends of every relayed connection that may still be open.
    open: Vec<[TcpStream; 2]>,
}

/// A running relay.
#[derive(Debug)]
pub struct Forwarder {
    address: SocketAddr,
    state: Arc<Mutex<State>>,
}

impl Forwarder {
    /// Listens on a free port of 127.0.0.1 and relays to `target`.
    ///
    /// # Errors
    /// When no port or thread can be had.
    pub fn start(target: SocketAddr) -> Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("cannot listen on 127.0.0.1")?;
        let address = listener.local_addr()?;
        let state = Arc::new(Mutex::new(State::default()));
        let serving = Arc::clone(&state);
        std::thread::Builder::new().name("forward-accept".into()).spawn(move || serve(&listener, target, &serving))?;
        Ok(Self { address, state })
    }

    /// The port on 127.0.0.1, which the guest reaches at [`super::HOST_ADDRESS`].
    pub fn port(&self) -> u16 {
        self.address.port()
    }

    /// Closes every connection and closes new ones at once, until [`Forwarder::mend`].
    pub fn cut(&self) {
        let mut state = lock(&self.state);
        state.cut = true;
        close_all(&mut state);
    }

    /// Relays new connections again.
    pub fn mend(&self) {
        lock(&self.state).cut = false;
    }
}

impl Drop for Forwarder {
    fn drop(&mut self) {
        let mut state = lock(&self.state);
        state.closed = true;
        close_all(&mut state);
        drop(state);
        // Wakes the accepting thread, which then sees that it is over.
        let _ = TcpStream::connect_timeout(&self.address, CONNECT_TIMEOUT);
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

fn close_all(state: &mut State) {
    for end in state.open.drain(..).flatten() {
        let _ = end.shutdown(Shutdown::Both);
    }
}

fn serve(listener: &TcpListener, target: SocketAddr, state: &Arc<Mutex<State>>) {
    while let Ok((client, _)) = listener.accept() {
        if lock(state).closed {
            return;
        }
        // A target that is down looks to the guest like one that closes at once.
        if let Ok(server) = TcpStream::connect_timeout(&target, CONNECT_TIMEOUT) {
            let _ = relay(client, server, state);
        }
    }
}

fn relay(client: TcpStream, server: TcpStream, state: &Mutex<State>) -> io::Result<()> {
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    let mut state = lock(state);
    if state.cut || state.closed {
        return Ok(());
    }
    state.open.retain(|[end, _]| end.peer_addr().is_ok());
    state.open.push([client.try_clone()?, server.try_clone()?]);
    drop(state);
    pump(client.try_clone()?, server.try_clone()?)?;
    pump(server, client)
}

/// Copies one direction on a thread of its own, and passes the end on.
fn pump(mut from: TcpStream, mut to: TcpStream) -> io::Result<()> {
    std::thread::Builder::new().name("forward-pump".into()).spawn(move || {
        // Either way the connection is over; the shutdowns end the other direction too.
        let _ = io::copy(&mut from, &mut to);
        let _ = to.shutdown(Shutdown::Both);
        let _ = from.shutdown(Shutdown::Both);
    })?;
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use std::io::{Read, Write};

    fn echo_server() -> SocketAddr {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        std::thread::spawn(move || {
            for client in listener.incoming().take(2) {
                let mut client = client.unwrap();
                std::thread::spawn(move || {
                    let mut reader = client.try_clone().unwrap();
                    let _ = io::copy(&mut reader, &mut client);
                });
            }
        });
        address
    }

    fn echoes(connection: &mut TcpStream) -> bool {
        let mut answer = [0; 4];
        connection.write_all(b"ping").is_ok() && connection.read_exact(&mut answer).is_ok() && &answer == b"ping"
    }

    #[test]
    fn a_cut_closes_connections_until_mended() {
        let forwarder = Forwarder::start(echo_server()).unwrap();
        let connect = || TcpStream::connect((Ipv4Addr::LOCALHOST, forwarder.port())).unwrap();
        let mut first = connect();
        assert!(echoes(&mut first));
        forwarder.cut();
        assert!(!echoes(&mut first));
        forwarder.mend();
        assert!(echoes(&mut connect()));
    }
}
