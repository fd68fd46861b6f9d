//! The floor: the bytes of an I/O over TCP loopback between two threads that poll, with nothing behind them.
//!
//! *What it is.* Two threads, pinned to the two processors of the race, exchange what the host and the target of an
//! NVMe/TCP I/O exchange: the same messages of the same lengths in the same order, at the same depth over the same
//! connections. They do no more than to count bytes: no device, no queue, no protocol. No engine on the same sockets can
//! be faster by much.
//!
//! *Messages.* They begin with a kind and a number, within their length. Data of at most [`IN_CAPSULE`] bytes goes with
//! the command, more is asked for first. [`Walker`] finds messages in a stream; both sides share it.
//!
//! *When things fail.* Any error of a socket ends both sides: whoever stops closes its ends.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, IoSlice, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;

use super::matrix::Cell;
use super::parse::Run;
use crate::access::Rng;
use crate::plane::process::pin_thread;

/// Most bytes of data that go with a command, as both data planes have it by default.
pub const IN_CAPSULE: usize = 4096;
/// A command capsule: header and submission entry.
const COMMAND: usize = 8 + 64;
/// A response capsule: header and completion entry.
const RESPONSE: usize = 8 + 16;
/// The header of data, and a whole request for data.
const DATA_HEADER: usize = 24;
/// Kind and number at the begin of every message.
const HEAD: usize = 4;
/// What is received at once, at most.
const RECEIVE: usize = 256 << 10;

/// Bounds the wait for the first exchange.
const LONGEST: Duration = Duration::from_secs(10);
/// Bounds how long a thread waits that is to be idle.
const LONGEST_IDLE: Duration = Duration::from_secs(60);

/// Kinds of messages, as their first byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Host: a read.
    Read,
    /// Host: a write whose data comes along or will be asked for.
    Write,
    /// Target: data of a read, and with it the success.
    Data,
    /// Target: asks for the data of a write.
    Ask,
    /// Host: data of a write.
    Answer,
    /// Target: a write is done.
    Done,
}

impl Kind {
    const ALL: [Self; 6] = [Self::Read, Self::Write, Self::Data, Self::Ask, Self::Answer, Self::Done];

    /// Bytes of a message, for I/Os of `block` bytes.
    #[must_use]
    pub const fn bytes(self, block: usize) -> usize {
        match self {
            Self::Read => COMMAND,
            Self::Write if block <= IN_CAPSULE => COMMAND + block,
            Self::Write => COMMAND,
            Self::Data | Self::Answer => DATA_HEADER + block,
            Self::Ask => DATA_HEADER,
            Self::Done => RESPONSE,
        }
    }
}

/// What a target says to a message of a host; nothing to what no host says.
#[must_use]
pub const fn reply(kind: Kind, block: usize) -> Option<Kind> {
    match kind {
        Kind::Read => Some(Kind::Data),
        Kind::Write if block <= IN_CAPSULE => Some(Kind::Done),
        Kind::Write => Some(Kind::Ask),
        Kind::Answer => Some(Kind::Done),
        Kind::Data | Kind::Ask | Kind::Done => None,
    }
}

/// Finds messages in the bytes of a stream, whatever the pieces they come in.
#[derive(Debug)]
pub struct Walker {
    block: usize,
    /// Bytes of the present message that are still to come, after its head.
    skip: usize,
    head: [u8; HEAD],
    have: usize,
}

impl Walker {
    /// For I/Os of `block` bytes.
    #[must_use]
    pub const fn new(block: usize) -> Self {
        Self { block, skip: 0, head: [0; HEAD], have: 0 }
    }

    /// Takes bytes; tells of every message that ends in them, with its number.
    ///
    /// # Errors
    /// When a message is of no kind.
    pub fn walk(&mut self, mut bytes: &[u8], mut message: impl FnMut(Kind, u16)) -> io::Result<()> {
        while !bytes.is_empty() {
            if self.have < self.head.len() {
                let count = bytes.len().min(self.head.len() - self.have);
                self.head[self.have..self.have + count].copy_from_slice(&bytes[..count]);
                (self.have, bytes) = (self.have + count, &bytes[count..]);
                if self.have < self.head.len() {
                    return Ok(());
                }
                self.skip = self.kind()?.bytes(self.block) - self.head.len();
            }
            let count = bytes.len().min(self.skip);
            (self.skip, bytes) = (self.skip - count, &bytes[count..]);
            if self.skip == 0 {
                message(self.kind()?, u16::from_le_bytes([self.head[2], self.head[3]]));
                self.have = 0;
            }
        }
        Ok(())
    }

    fn kind(&self) -> io::Result<Kind> {
        let kind = Kind::ALL.get(usize::from(self.head[0])).copied();
        kind.ok_or_else(|| io::Error::new(ErrorKind::InvalidData, "a message of no kind"))
    }
}

/// Messages sent by one call, at most.
const BATCH: usize = 32;

/// One end of a connection.
struct End {
    stream: TcpStream,
    walker: Walker,
    /// Messages to send, in order.
    out: VecDeque<(Kind, u16)>,
    /// Bytes of the first of them that are sent.
    sent: usize,
    /// What follows the head of any message.
    body: Arc<[u8]>,
}

impl End {
    fn new(stream: TcpStream, block: usize, body: &Arc<[u8]>) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        stream.set_nonblocking(true)?;
        Ok(Self { stream, walker: Walker::new(block), out: VecDeque::new(), sent: 0, body: Arc::clone(body) })
    }

    fn push(&mut self, kind: Kind, number: u16) {
        self.out.push_back((kind, number));
    }

    /// Sends what the socket takes.
    fn flush(&mut self) -> io::Result<()> {
        while !self.out.is_empty() {
            match self.send() {
                Ok(count) => self.advance(count),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn send(&mut self) -> io::Result<usize> {
        let mut heads = [[0; HEAD]; BATCH];
        for (head, (kind, number)) in heads.iter_mut().zip(&self.out) {
            head[0] = *kind as u8;
            head[2..].copy_from_slice(&number.to_le_bytes());
        }
        let mut pieces = [IoSlice::new(&[]); 2 * BATCH];
        let mut skip = self.sent;
        for ((pair, head), (kind, _)) in pieces.chunks_mut(2).zip(&heads).zip(&self.out) {
            let body = &self.body[..kind.bytes(self.walker.block) - HEAD];
            pair[0] = IoSlice::new(&head[skip.min(HEAD)..]);
            pair[1] = IoSlice::new(&body[skip.saturating_sub(HEAD)..]);
            skip = 0;
        }
        let count = 2 * self.out.len().min(BATCH);
        self.stream.write_vectored(&pieces[..count])
    }

    /// Forgets what is sent.
    fn advance(&mut self, count: usize) {
        self.sent += count;
        while let Some((kind, _)) = self.out.front() {
            let bytes = kind.bytes(self.walker.block);
            if self.sent < bytes {
                return;
            }
            self.sent -= bytes;
            self.out.pop_front();
        }
    }

    /// Receives once; the number of bytes.
    fn receive(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self.stream.read(buffer) {
            Ok(0) => Err(ErrorKind::UnexpectedEof.into()),
            Ok(count) => Ok(count),
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(0),
            Err(error) => Err(error),
        }
    }
}

/// Answers until `stop`.
fn serve(mut ends: Vec<End>, block: usize, stop: &AtomicBool) -> io::Result<()> {
    let mut buffer = vec![0; RECEIVE];
    let mut replies = Vec::new();
    while !stop.load(Ordering::Acquire) {
        for end in &mut ends {
            match answer(end, block, &mut buffer, &mut replies) {
                // The host has set `stop` before it has closed.
                Err(_) if stop.load(Ordering::Acquire) => return Ok(()),
                other => other?,
            }
        }
    }
    Ok(())
}

/// One look at a connection of the target.
fn answer(end: &mut End, block: usize, buffer: &mut [u8], replies: &mut Vec<(Kind, u16)>) -> io::Result<()> {
    let count = end.receive(buffer)?;
    end.walker.walk(&buffer[..count], |kind, number| replies.extend(reply(kind, block).map(|r| (r, number))))?;
    replies.drain(..).for_each(|(kind, number)| end.push(kind, number));
    end.flush()
}

/// The host's side: what is in flight and how long it took.
struct Asker {
    ends: Vec<End>,
    block: usize,
    read_percent: u32,
    began: Vec<Instant>,
    mix: Rng,
    /// What one look has found.
    found: Vec<(Kind, u16)>,
    latency: Histogram<u64>,
}

impl Asker {
    fn new(cell: &Cell, ends: Vec<End>) -> io::Result<Self> {
        let latency = Histogram::new_with_bounds(1, 60_000_000_000, 3).map_err(io::Error::other)?;
        let began = vec![Instant::now(); usize::from(cell.depth)];
        let (block, read_percent) = (cell.block as usize, cell.pattern.read_percent());
        Ok(Self { ends, block, read_percent, began, mix: Rng::new(1), found: Vec::new(), latency })
    }

    /// Keeps the depth full for a time; what it has seen.
    fn run(&mut self, time: Duration) -> io::Result<Run> {
        let mut buffer = vec![0; RECEIVE];
        let start = Instant::now();
        for number in 0..self.began.len() {
            self.issue(number % self.ends.len(), number as u16, start);
        }
        // A tenth of the time is for the sockets to find their windows.
        while start.elapsed() < time / 10 {
            self.turn(&mut buffer, false)?;
        }
        let start = Instant::now();
        // On a machine so busy that nothing has ended yet, a little longer.
        while start.elapsed() < time || (self.latency.is_empty() && start.elapsed() < LONGEST) {
            self.turn(&mut buffer, true)?;
        }
        let us = |quantile: f64| self.latency.value_at_quantile(quantile) as f64 / 1e3;
        let iops = self.latency.len() as f64 / start.elapsed().as_secs_f64();
        Ok(Run {
            iops,
            bytes_per_s: iops * self.block as f64,
            mean_us: self.latency.mean() / 1e3,
            p50_us: us(0.5),
            p99_us: us(0.99),
            p99_9_us: us(0.999),
        })
    }

    fn issue(&mut self, end: usize, number: u16, now: Instant) {
        self.began[usize::from(number)] = now;
        let read = self.mix.below(100) < u64::from(self.read_percent);
        self.ends[end].push(if read { Kind::Read } else { Kind::Write }, number);
    }

    /// One look at every connection; whether to count what ends.
    fn turn(&mut self, buffer: &mut [u8], counts: bool) -> io::Result<()> {
        let mut messages = std::mem::take(&mut self.found);
        for end in 0..self.ends.len() {
            let count = self.ends[end].receive(buffer)?;
            self.ends[end].walker.walk(&buffer[..count], |kind, number| messages.push((kind, number)))?;
            if !messages.is_empty() {
                let now = Instant::now();
                for (kind, number) in messages.drain(..) {
                    if kind == Kind::Ask {
                        self.ends[end].push(Kind::Answer, number);
                        continue;
                    }
                    let began = self.began.get(usize::from(number)).copied().unwrap_or(now);
                    if counts {
                        self.latency.saturating_record(now.duration_since(began).as_nanos() as u64);
                    }
                    self.issue(end, number, now);
                }
            }
            self.ends[end].flush()?;
        }
        self.found = messages;
        Ok(())
    }
}

/// How long the exchange of a read takes after an `idle` time without any, against a thread on `target_cpu` that waits in
/// the kernel, in microseconds: what it costs on this machine to wake somebody at all. One figure for each of `count`
/// times.
///
/// # Errors
/// When sockets or processors cannot be had.
pub fn after_idle(idle: impl Fn(), count: usize, block: usize, target_cpu: u32) -> io::Result<Vec<f64>> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let mut host = TcpStream::connect(listener.local_addr()?)?;
    let (mut target, _) = listener.accept()?;
    target.set_nodelay(true)?;
    target.set_read_timeout(Some(LONGEST_IDLE))?;
    host.set_nodelay(true)?;
    host.set_nonblocking(true)?;
    let (mut data, mut found) = (vec![0; Kind::Data.bytes(block)], Vec::with_capacity(count));
    thread::scope(|scope| {
        let answers = scope.spawn(move || -> io::Result<()> {
            pin_thread(target_cpu)?;
            let (mut command, data) = ([0; COMMAND], vec![0x5a; Kind::Data.bytes(block)]);
            for _ in 0..count {
                target.read_exact(&mut command)?;
                target.write_all(&data)?;
            }
            Ok(())
        });
        for _ in 0..count {
            idle();
            let (began, mut have) = (Instant::now(), 0);
            host.write_all(&[0x5a; COMMAND])?;
            while have < data.len() {
                match host.read(&mut data[have..]) {
                    Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                    Ok(more) => have += more,
                    Err(error) if error.kind() == ErrorKind::WouldBlock && began.elapsed() < LONGEST => {}
                    Err(error) => return Err(error),
                }
            }
            found.push(began.elapsed().as_secs_f64() * 1e6);
        }
        answers.join().map_err(|_| io::Error::other("the answering thread has panicked"))?
    })?;
    Ok(found)
}

/// Measures the floor of a cell for a time, between a thread on `target_cpu` and one on `load_cpu`.
///
/// # Errors
/// When sockets or processors cannot be had.
pub fn measure(cell: &Cell, time: Duration, target_cpu: u32, load_cpu: u32) -> io::Result<Run> {
    let block = cell.block as usize;
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let body: Arc<[u8]> = vec![0x5a; COMMAND + DATA_HEADER + block].into();
    let (mut asking, mut serving) = (Vec::new(), Vec::new());
    for _ in 0..cell.connections {
        asking.push(End::new(TcpStream::connect(listener.local_addr()?)?, block, &body)?);
        serving.push(End::new(listener.accept()?.0, block, &body)?);
    }
    let mut asker = Asker::new(cell, asking)?;
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let server = scope.spawn(|| pin_thread(target_cpu).and_then(|()| serve(serving, block, &stop)));
        let stopped = &stop;
        let host = scope.spawn(move || {
            let result = pin_thread(load_cpu).and_then(|()| asker.run(time));
            stopped.store(true, Ordering::Release);
            drop(asker);
            result
        });
        let gone = || io::Error::other("a thread of the floor has died");
        let run = host.join().map_err(|_| gone())?;
        let served = server.join().map_err(|_| gone())?;
        // The server's error is the cause when both fail: the asker then only sees a closed connection.
        served.and(run)
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn an_io_is_as_long_as_on_the_wire() {
        assert_eq!(Kind::Read.bytes(4096) + Kind::Data.bytes(4096), 72 + 24 + 4096);
        assert_eq!(Kind::Write.bytes(4096) + Kind::Done.bytes(4096), 72 + 4096 + 24);
        let large = [Kind::Write, Kind::Ask, Kind::Answer, Kind::Done];
        assert_eq!(large.iter().map(|k| k.bytes(131_072)).sum::<usize>(), 72 + 24 + 24 + 131_072 + 24);
    }

    #[test]
    fn waking_a_bare_thread_is_timed_as_often_as_asked() {
        let found = after_idle(|| thread::sleep(Duration::from_millis(1)), 3, 4096, 0).unwrap();
        assert!(found.len() == 3 && found.iter().all(|us| *us > 0.0), "{found:?}");
    }

    #[test]
    fn a_target_answers_a_host_until_the_io_is_done() {
        for (block, first, exchanges) in [(4096, Kind::Read, 1), (4096, Kind::Write, 1), (8192, Kind::Write, 2)] {
            let (mut kind, mut count) = (first, 0);
            while let Some(answer) = reply(kind, block) {
                count += 1;
                match answer {
                    Kind::Ask => kind = Kind::Answer,
                    other => kind = other,
                }
            }
            assert_eq!(count, exchanges, "{first:?} of {block}");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn messages_are_found_however_they_are_cut(
            kinds in proptest::collection::vec(0_usize..6, 1..12),
            block in prop_oneof![Just(512_usize), Just(4096), Just(5000)],
            cut in 1_usize..3000,
        ) {
            let mut bytes = Vec::new();
            let mut expected = Vec::new();
            for (number, kind) in kinds.iter().enumerate() {
                let (kind, number, start) = (Kind::ALL[*kind], number as u16, bytes.len());
                bytes.resize(start + kind.bytes(block), 0xEE);
                bytes[start] = kind as u8;
                bytes[start + 2..start + 4].copy_from_slice(&number.to_le_bytes());
                expected.push((kind, number));
            }
            let (mut walker, mut found) = (Walker::new(block), Vec::new());
            for piece in bytes.chunks(cut) {
                walker.walk(piece, |kind, number| found.push((kind, number))).unwrap();
            }
            prop_assert_eq!(found, expected);
        }
    }

    #[test]
    fn garbage_is_refused() {
        assert!(Walker::new(512).walk(&[9; 100], |_, _| {}).is_err());
    }

    #[test]
    fn every_pattern_has_a_floor() {
        for name in ["null/read/4k/qd8/c1", "null/write/16k/qd8/c4", "null/mixed/1m/qd8/c4"] {
            let cell: Cell = name.parse().unwrap();
            let run = measure(&cell, Duration::from_millis(50), 0, 0).unwrap();
            assert!(run.iops > 0.0 && run.p50_us <= run.p99_9_us, "{name}: {run:?}");
        }
    }
}
