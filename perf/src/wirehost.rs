//! A small NVMe/TCP host on plain blocking sockets: no reactor, no thread, one connection per queue.
//!
//! *What it is for.* What the load generator cannot do: hold hundreds of idle associations, leave answers unread, come
//! and go thousands of times, and time a single I/O without sleeping in between.
//!
//! *Invariants.* One command at a time per call of [`Queue::run`]; [`Queue::send`] alone may have more in flight. No
//! digests. Every wait has a deadline.
//!
//! *When things fail.* After any error the queue is of no use any more; dropping closes its socket.

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use nvme_wire::admin::AdminCommand;
use nvme_wire::command::BlockRange;
use nvme_wire::fabrics::{CNTLID_DYNAMIC, Connect, ConnectData, FabricsCommand, PropertySize};
use nvme_wire::pdu::{H2cData, IcReq};
use nvme_wire::property::{Configuration, offset};
use nvme_wire::{Cqe, Decoded, IoCommand, Link, NulPadded, Pdu, Role, Sgl, Sqe, Status, TermError};

/// Longest wait for anything that a target must do.
pub const DEADLINE: Duration = Duration::from_secs(60);
/// The namespace of every command.
const NSID: u32 = 1;
/// In-capsule data that every target here takes on I/O queues, in bytes.
const IN_CAPSULE_BYTES: usize = 4096;

/// Why a queue cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum WireError {
    /// The socket failed, or nothing came until the deadline.
    #[error("socket: {0}")]
    Io(#[from] io::Error),
    /// The target has closed the connection.
    #[error("the target has closed the connection")]
    Closed,
    /// The target broke the protocol.
    #[error("the target broke the protocol: {0}")]
    Protocol(String),
    /// A name does not fit into its field.
    #[error("name {0:?} is too long: at most 223 bytes are allowed")]
    Name(String),
    /// A command ended with an error.
    #[error("{what}: {status}")]
    Refused {
        /// What was asked for.
        what: &'static str,
        /// How it ended.
        status: Status,
    },
}

impl From<TermError> for WireError {
    fn from(error: TermError) -> Self {
        Self::Protocol(format!("{error:?}"))
    }
}

/// How to wait for bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wait {
    /// In the kernel.
    Block,
    /// Asking again and again: the waiting adds no wake-up of this host to a latency.
    Spin,
}

/// A queue pair: one connection.
#[derive(Debug)]
pub struct Queue {
    stream: TcpStream,
    link: Link,
    inbox: Vec<u8>,
    taken: usize,
    next_cid: u16,
    writes: HashMap<u16, Vec<u8>>,
    wait: Wait,
}

impl Queue {
    /// A connection after its initialisation.
    ///
    /// # Errors
    /// See [`WireError`].
    pub fn open(addr: SocketAddr) -> Result<Self, WireError> {
        let stream = TcpStream::connect_timeout(&addr, DEADLINE)?;
        stream.set_read_timeout(Some(DEADLINE))?;
        stream.set_write_timeout(Some(DEADLINE))?;
        stream.set_nodelay(true)?;
        let link = Link::new(Role::Host);
        let (inbox, writes) = (Vec::new(), HashMap::new());
        let mut queue = Self { stream, link, inbox, taken: 0, next_cid: 0, writes, wait: Wait::Block };
        let request = IcReq { pfv: 0, hpda: 0, header_digest: false, data_digest: false, maxr2t: 0 };
        queue.send_pdu(&Pdu::IcReq(request), &[])?;
        let (Pdu::IcResp(response), _) = queue.pdu()? else {
            return Err(WireError::Protocol("no ICResp".to_owned()));
        };
        queue.link.established(&request, &response)?;
        Ok(queue)
    }

    /// How the answers are waited for from now on.
    ///
    /// # Errors
    /// When the socket refuses.
    pub fn set_wait(&mut self, wait: Wait) -> Result<(), WireError> {
        self.stream.set_nonblocking(wait == Wait::Spin)?;
        self.wait = wait;
        Ok(())
    }

    /// The socket, for a host that behaves badly.
    #[must_use]
    pub fn stream(&self) -> &TcpStream {
        &self.stream
    }

    fn fill(&mut self) -> Result<(), WireError> {
        if self.taken > 0 {
            self.inbox.drain(..self.taken);
            self.taken = 0;
        }
        let start = self.inbox.len();
        self.inbox.resize(start + (64 << 10), 0);
        let began = Instant::now();
        let count = loop {
            match self.stream.read(&mut self.inbox[start..]) {
                Ok(count) => break Ok(count),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if self.wait == Wait::Spin && error.kind() == io::ErrorKind::WouldBlock => {
                    if began.elapsed() > DEADLINE {
                        break Err(io::ErrorKind::TimedOut.into());
                    }
                    std::hint::spin_loop();
                }
                Err(error) => break Err(error),
            }
        };
        self.inbox.truncate(start + *count.as_ref().unwrap_or(&0));
        match count {
            Ok(0) => Err(WireError::Closed),
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => Err(WireError::Closed),
            Ok(_) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    fn pdu(&mut self) -> Result<(Pdu, Vec<u8>), WireError> {
        loop {
            let bytes = &self.inbox[self.taken..];
            if let Decoded::Header(pdu, layout) = self.link.decode(bytes)?
                && bytes.len() >= layout.plen as usize
            {
                let start = layout.data_offset as usize;
                let data = bytes.get(start..start + layout.data_len as usize).unwrap_or_default().to_vec();
                self.taken += layout.plen as usize;
                return Ok((pdu, data));
            }
            self.fill()?;
        }
    }

    fn send_pdu(&mut self, pdu: &Pdu, data: &[u8]) -> Result<(), WireError> {
        let mut bytes = self.link.encode(pdu, data.len() as u32).to_vec();
        bytes.extend_from_slice(data);
        let (began, mut sent) = (Instant::now(), 0);
        while sent < bytes.len() {
            match self.stream.write(&bytes[sent..]) {
                Ok(0) => return Err(WireError::Closed),
                Ok(count) => sent += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if self.wait == Wait::Spin && error.kind() == io::ErrorKind::WouldBlock => {
                    if began.elapsed() > DEADLINE {
                        return Err(io::Error::from(io::ErrorKind::TimedOut).into());
                    }
                    std::hint::spin_loop();
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Sends a command without waiting for its end; `data` goes by R2T, or in the capsule when the command says so.
    /// Gives its identifier.
    ///
    /// # Errors
    /// See [`WireError`].
    pub fn send(&mut self, mut sqe: Sqe, data: &[u8]) -> Result<u16, WireError> {
        self.next_cid = self.next_cid.wrapping_add(1);
        let cid = self.next_cid;
        sqe.cid = cid.into();
        if matches!(Sgl::parse(&sqe.dptr), Ok(Sgl::InCapsule { .. })) {
            self.send_pdu(&Pdu::CapsuleCmd(sqe), data)?;
        } else {
            if !data.is_empty() {
                self.writes.insert(cid, data.to_vec());
            }
            self.send_pdu(&Pdu::CapsuleCmd(sqe), &[])?;
        }
        Ok(cid)
    }

    /// The next completion; data that was asked for is sent on the way, data that was read is dropped.
    ///
    /// # Errors
    /// See [`WireError`].
    pub fn wait(&mut self) -> Result<Cqe, WireError> {
        loop {
            let (pdu, _) = self.pdu()?;
            match pdu {
                Pdu::R2t(r2t) => {
                    let (from, to) = (r2t.r2to as usize, r2t.r2to as usize + r2t.r2tl as usize);
                    let whole = self.writes.get(&r2t.cid).and_then(|data| data.get(from..to)).map(<[u8]>::to_vec);
                    let part = whole.ok_or_else(|| WireError::Protocol(format!("R2T for nothing: {r2t:?}")))?;
                    let h2c = H2cData { cid: r2t.cid, ttag: r2t.ttag, datao: r2t.r2to, datal: r2t.r2tl, last: true };
                    self.send_pdu(&Pdu::H2cData(h2c), &part)?;
                }
                Pdu::C2hData(c2h) if c2h.success => return Ok(Cqe::new(c2h.cid, 0, Status::SUCCESS)),
                Pdu::C2hData(_) => {}
                Pdu::CapsuleResp(cqe) => {
                    self.writes.remove(&cqe.cid.get());
                    return Ok(cqe);
                }
                other => return Err(WireError::Protocol(format!("unexpected {other:?}"))),
            }
        }
    }

    /// Sends a command and waits for its success.
    ///
    /// # Errors
    /// See [`WireError`]; a status other than success is [`WireError::Refused`].
    pub fn run(&mut self, what: &'static str, sqe: Sqe, data: &[u8]) -> Result<Cqe, WireError> {
        let cid = self.send(sqe, data)?;
        let cqe = self.wait()?;
        if cqe.cid.get() != cid {
            return Err(WireError::Protocol(format!("{what}: answer to {} instead of {cid}", cqe.cid.get())));
        }
        match cqe.status() {
            status if status.is_success() => Ok(cqe),
            status => Err(WireError::Refused { what, status }),
        }
    }

    fn connect_as(&mut self, names: &Names, connect: Connect, cntlid: u16) -> Result<Cqe, WireError> {
        let field = |name: &str| NulPadded::new(name).map_err(|_| WireError::Name(name.to_owned()));
        let (subnqn, hostnqn) = (field(&names.subsystem)?, field(&names.host)?);
        let data = ConnectData { hostid: names.host_id, cntlid, subnqn, hostnqn };
        let sgl = Sgl::in_capsule(ConnectData::SIZE as u32);
        self.run("Connect", FabricsCommand::Connect(connect).to_sqe(0, sgl), &data.encode())
    }

    /// A read of `blocks` blocks of `block_size` bytes, not yet sent.
    #[must_use]
    pub fn read_command(lba: u64, blocks: u32, block_size: u32) -> Sqe {
        IoCommand::Read(BlockRange::new(lba, blocks)).to_sqe(0, NSID, Sgl::transport(blocks * block_size))
    }

    /// A write of `blocks` blocks of `block_size` bytes whose data is sent when it is asked for, not yet sent.
    #[must_use]
    pub fn write_command(lba: u64, blocks: u32, block_size: u32) -> Sqe {
        IoCommand::Write(BlockRange::new(lba, blocks)).to_sqe(0, NSID, Sgl::transport(blocks * block_size))
    }

    /// Reads and drops the data.
    ///
    /// # Errors
    /// As [`Self::run`].
    pub fn read(&mut self, lba: u64, blocks: u32, block_size: u32) -> Result<(), WireError> {
        self.run("Read", Self::read_command(lba, blocks, block_size), &[]).map(drop)
    }

    /// Writes whole blocks.
    ///
    /// # Errors
    /// As [`Self::run`].
    pub fn write(&mut self, lba: u64, blocks: u32, data: &[u8]) -> Result<(), WireError> {
        let length = data.len() as u32;
        let sgl = if data.len() <= IN_CAPSULE_BYTES { Sgl::in_capsule(length) } else { Sgl::transport(length) };
        let sqe = IoCommand::Write(BlockRange::new(lba, blocks)).to_sqe(0, NSID, sgl);
        self.run("Write", sqe, data).map(drop)
    }
}

/// Who connects to what.
#[derive(Debug, Clone)]
pub struct Names {
    /// NQN of the subsystem.
    pub subsystem: String,
    /// NQN of this host.
    pub host: String,
    /// Identifier of this host.
    pub host_id: [u8; 16],
}

impl Names {
    /// A host of this name, with an identifier made from it.
    #[must_use]
    pub fn new(subsystem: &str, host: &str) -> Self {
        let host_id = uuid::Uuid::new_v5(&uuid::Uuid::NAMESPACE_OID, host.as_bytes()).into_bytes();
        Self { subsystem: subsystem.to_owned(), host: host.to_owned(), host_id }
    }
}

/// An association: an admin queue whose controller is enabled.
#[derive(Debug)]
pub struct Host {
    admin: Queue,
    cntlid: u16,
    addr: SocketAddr,
    names: Names,
}

impl Host {
    /// Connects; `keep_alive_ms` 0 asks for no keep-alive timeout.
    ///
    /// # Errors
    /// See [`WireError`].
    pub fn connect(addr: SocketAddr, names: Names, keep_alive_ms: u32) -> Result<Self, WireError> {
        let mut admin = Queue::open(addr)?;
        let connect = Connect { recfmt: 0, qid: 0, sqsize: 31, cattr: 0, kato_ms: keep_alive_ms };
        let cntlid = admin.connect_as(&names, connect, CNTLID_DYNAMIC)?.dw0.get() as u16;
        let enable = FabricsCommand::PropertySet {
            size: PropertySize::Four,
            offset: offset::CC,
            value: Configuration::enabled().raw().into(),
        };
        admin.run("Property Set", enable.to_sqe(0, Sgl::NONE), &[])?;
        Ok(Self { admin, cntlid, addr, names })
    }

    /// Connects an I/O queue of `entries` entries.
    ///
    /// # Errors
    /// See [`WireError`].
    pub fn io_queue(&self, qid: u16, entries: u16) -> Result<Queue, WireError> {
        let mut queue = Queue::open(self.addr)?;
        let connect = Connect { recfmt: 0, qid, sqsize: entries.saturating_sub(1), cattr: 0, kato_ms: 0 };
        queue.connect_as(&self.names, connect, self.cntlid)?;
        Ok(queue)
    }

    /// Tells the target that this host lives.
    ///
    /// # Errors
    /// See [`WireError`].
    pub fn keep_alive(&mut self) -> Result<(), WireError> {
        self.admin.run("Keep Alive", AdminCommand::KeepAlive.to_sqe(0, 0, Sgl::NONE), &[]).map(drop)
    }
}
