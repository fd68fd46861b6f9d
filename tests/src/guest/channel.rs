//! The host's end of the two sockets to the guest's first process (`rootfs/init` has the protocol).
//!
//! One thread reads the control socket and files what it says; callers wait on a condition variable with a
//! deadline. Commands may run at the same time. Bulk output passes one transfer at a time, guarded by a lock
//! that is held for that transfer only and bounded by its deadline. When either socket ends or answers nonsense
//! the channel is broken for good: every waiting and later call says so. Dropping the channel hangs up, and the
//! guest then powers itself off, even if the test process was killed.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use base64::prelude::{BASE64_STANDARD, Engine};

/// Most bytes taken of one command's output, and as many of its errors.
pub const OUTPUT_BYTES_MAX: u64 = 16 << 20;

/// Bounds every transfer of finished output.
const TRANSFER_TIMEOUT: Duration = Duration::from_secs(60);

/// How one command ended, as the guest reported it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ended {
    /// Exit code; 128 plus the signal's number for a killed command.
    pub code: i32,
    /// Bytes on standard output.
    pub out_bytes: u64,
    /// Bytes on standard error.
    pub err_bytes: u64,
}

#[derive(Debug, Default)]
struct State {
    ready: bool,
    broken: Option<String>,
    ended: HashMap<u64, Ended>,
    next_id: u64,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Every update is a single store, so a panicking holder leaves the state whole.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn break_off(&self, why: &str) {
        self.lock().broken.get_or_insert_with(|| why.to_owned());
        self.changed.notify_all();
    }
}

/// An open channel to one guest.
#[derive(Debug)]
pub struct Channel {
    control: Mutex<UnixStream>,
    data: Mutex<UnixStream>,
    shared: Arc<Shared>,
}

impl Channel {
    /// Takes over the connected sockets and starts the reading thread.
    pub fn new(control: UnixStream, data: UnixStream) -> Result<Self> {
        let shared = Arc::new(Shared::default());
        let reader = BufReader::new(control.try_clone()?);
        let filing = Arc::clone(&shared);
        std::thread::Builder::new().name("guest-control".into()).spawn(move || {
            let why = read_control(reader, &filing);
            filing.break_off(&why);
        })?;
        Ok(Self { control: Mutex::new(control), data: Mutex::new(data), shared })
    }

    /// Waits until the guest takes commands.
    pub fn wait_ready(&self, deadline: Instant) -> Result<()> {
        self.wait_until(deadline, |state| state.ready.then_some(()))?.context("the guest did not get ready in time")
    }

    /// Starts a shell script in the guest and returns its id.
    pub fn start(&self, script: &str) -> Result<u64> {
        let id = {
            let mut state = self.shared.lock();
            state.next_id += 1;
            state.next_id
        };
        // One word of one line, whatever the script holds.
        self.send(&format!("run {id} {}\n", BASE64_STANDARD.encode(script)))?;
        Ok(id)
    }

    /// Waits for the end of `id`; none if it still runs at the deadline.
    pub fn wait(&self, id: u64, deadline: Instant) -> Result<Option<Ended>> {
        self.wait_until(deadline, |state| state.ended.get(&id).copied())
    }

    /// Brings over the output and errors of `id` (each cut at [`OUTPUT_BYTES_MAX`]) and forgets it.
    pub fn take_output(&self, id: u64, ended: Ended) -> Result<(Vec<u8>, Vec<u8>)> {
        let out_bytes = ended.out_bytes.min(OUTPUT_BYTES_MAX);
        let err_bytes = ended.err_bytes.min(OUTPUT_BYTES_MAX);
        let received = {
            let data = self.data.lock().unwrap_or_else(PoisonError::into_inner);
            self.send(&format!("cat {id} {out_bytes} {err_bytes}\n"))?;
            receive(&data, out_bytes + err_bytes)
        };
        match received {
            Ok(mut out) => {
                self.forget(id)?;
                let err = out.split_off(out_bytes as usize);
                Ok((out, err))
            }
            Err(error) => {
                self.shared.break_off("a transfer of output was cut short");
                Err(error)
            }
        }
    }

    /// Ends every process of `id` and forgets it.
    pub fn kill(&self, id: u64) -> Result<()> {
        self.send(&format!("kill {id}\n"))?;
        self.forget(id)
    }

    fn forget(&self, id: u64) -> Result<()> {
        self.shared.lock().ended.remove(&id);
        self.send(&format!("drop {id}\n"))
    }

    fn send(&self, line: &str) -> Result<()> {
        let mut control = self.control.lock().unwrap_or_else(PoisonError::into_inner);
        control.write_all(line.as_bytes()).context("the guest hung up")
    }

    fn wait_until<T>(&self, deadline: Instant, mut look: impl FnMut(&State) -> Option<T>) -> Result<Option<T>> {
        let mut state = self.shared.lock();
        loop {
            if let Some(found) = look(&state) {
                return Ok(Some(found));
            }
            if let Some(why) = &state.broken {
                bail!("the guest is gone: {why}");
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            state = self.shared.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        for socket in [&self.control, &self.data] {
            let socket = socket.lock().unwrap_or_else(PoisonError::into_inner);
            // Already closed is as good.
            let _ = socket.shutdown(Shutdown::Both);
        }
    }
}

/// Files every line until the socket ends; returns why it did.
fn read_control(reader: impl BufRead, shared: &Shared) -> String {
    for line in reader.lines() {
        let line = match line {
            Ok(line) => line,
            Err(error) => return format!("reading its control port failed: {error}"),
        };
        if line == "ready" {
            shared.lock().ready = true;
        } else if let Some((id, ended)) = parse_done(&line) {
            shared.lock().ended.insert(id, ended);
        } else {
            return format!("it sent an unknown line: {line:?}");
        }
        shared.changed.notify_all();
    }
    "it closed its control port".to_owned()
}

fn parse_done(line: &str) -> Option<(u64, Ended)> {
    let mut words = line.strip_prefix("done ")?.split(' ');
    let id = words.next()?.parse().ok()?;
    let ended = Ended {
        code: words.next()?.parse().ok()?,
        out_bytes: words.next()?.parse().ok()?,
        err_bytes: words.next()?.parse().ok()?,
    };
    words.next().is_none().then_some((id, ended))
}

fn receive(data: &UnixStream, bytes: u64) -> Result<Vec<u8>> {
    data.set_read_timeout(Some(TRANSFER_TIMEOUT))?;
    let mut received = Vec::new();
    data.take(bytes).read_to_end(&mut received).context("the guest's output did not arrive")?;
    ensure!(received.len() as u64 == bytes, "the guest's output ended after {} of {bytes} bytes", received.len());
    Ok(received)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn done_lines_are_read_whole_or_not_at_all() {
        let ended = Ended { code: 3, out_bytes: 10, err_bytes: 0 };
        assert_eq!(parse_done("done 7 3 10 0"), Some((7, ended)));
        for line in ["done 7 3 10", "done 7 3 10 0 0", "done x 3 10 0", "gone 7 3 10 0"] {
            assert_eq!(parse_done(line), None, "{line}");
        }
    }

    #[test]
    fn output_is_split_and_a_hang_up_ends_every_wait() {
        let (host_control, mut guest_control) = UnixStream::pair().unwrap();
        let (host_data, mut guest_data) = UnixStream::pair().unwrap();
        let channel = Channel::new(host_control, host_data).unwrap();
        let far = Instant::now() + Duration::from_secs(60);
        guest_control.write_all(b"ready\n").unwrap();
        channel.wait_ready(far).unwrap();
        let id = channel.start("true").unwrap();
        guest_control.write_all(format!("done {id} 0 3 2\n").as_bytes()).unwrap();
        guest_data.write_all(b"outer").unwrap();
        let ended = channel.wait(id, far).unwrap().unwrap();
        assert_eq!(channel.take_output(id, ended).unwrap(), (b"out".to_vec(), b"er".to_vec()));
        drop(guest_control);
        let error = channel.wait(99, far).unwrap_err();
        assert!(error.to_string().contains("gone"), "{error}");
    }
}
