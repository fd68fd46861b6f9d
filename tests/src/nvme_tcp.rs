//! A small blocking NVMe/TCP host: one I/O queue, one command at a time.
//!
//! For tests that compare what data planes hold; the product's initiator is in the engine. Every command has a deadline
//! of [`TIMEOUT`]; an error of the connection loses it.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use nvme_wire::admin::{AdminCommand, Identify, cns};
use nvme_wire::command::{BlockRange, DsmRange};
use nvme_wire::fabrics::{CNTLID_DYNAMIC, Connect, ConnectData, FabricsCommand, PropertySize};
use nvme_wire::namespace::NamespaceData;
use nvme_wire::pdu::{H2cData, IcReq};
use nvme_wire::property::{Configuration, offset};
use nvme_wire::{Cqe, Decoded, IoCommand, Layout, Link, NulPadded, Pdu, Role, Sgl, Sqe, Status};

const TIMEOUT: Duration = Duration::from_secs(60);
const HOST_NQN: &str = "nqn.2014-08.org.nvmexpress:uuid:7d3a2b5c-6c1f-4a44-9c3c-0a3f0f1f6f01";
/// Bytes of one command at most.
const MOST: usize = 128 << 10;

/// A namespace of a target.
#[derive(Debug)]
pub struct Namespace {
    admin: Queue,
    io: Queue,
    nsid: u32,
    block_size: usize,
    blocks: u64,
}

/// Why a command failed: the status the controller gave.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("NVMe status type {}, code {:#x}", .0.sct(), .0.sc())]
pub struct Refused(pub Status);

impl Namespace {
    /// Connects to namespace `nsid` of the subsystem at a port of 127.0.0.1.
    ///
    /// # Errors
    /// When the target refuses or has no such namespace.
    pub fn connect(port: u16, nqn: &str, nsid: u32) -> Result<Self> {
        let mut admin = Queue::open(port).context("admin queue")?;
        let cntlid = admin.connect(nqn, 0, CNTLID_DYNAMIC)?;
        let enabled = u64::from(Configuration::enabled().raw());
        admin.fabrics(&FabricsCommand::PropertySet { size: PropertySize::Four, offset: offset::CC, value: enabled })?;
        admin.wait_ready()?;
        let mut io = Queue::open(port).context("I/O queue")?;
        io.connect(nqn, 1, cntlid)?;
        let identify = AdminCommand::Identify(Identify { cns: cns::NAMESPACE, ..Identify::default() });
        let mut data = vec![0; 4096];
        admin.exchange(identify.to_sqe(1, nsid, Sgl::transport(4096)), &[], &mut data)?;
        let found = NamespaceData::parse(&data)?;
        let block_size = found.block_size().context("the namespace has no block size")?;
        ensure!(found.nsze > 0, "namespace {nsid} is not active");
        Ok(Self { admin, io, nsid, block_size: usize::try_from(block_size)?, blocks: found.nsze })
    }

    /// Bytes of a block.
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// Number of blocks.
    pub fn blocks(&self) -> u64 {
        self.blocks
    }

    /// Reads.
    ///
    /// # Errors
    /// [`Refused`], or what broke the connection.
    pub fn read(&mut self, first: u64, count: u64) -> Result<Vec<u8>> {
        let mut bytes = vec![0; usize::try_from(count)? * self.block_size];
        let mut at = first;
        for part in bytes.chunks_mut(MOST) {
            let blocks = u32::try_from(part.len() / self.block_size)?;
            let command = IoCommand::Read(BlockRange::new(at, blocks));
            let sqe = command.to_sqe(1, self.nsid, Sgl::transport(u32::try_from(part.len())?));
            self.io.exchange(sqe, &[], part)?;
            at += u64::from(blocks);
        }
        Ok(bytes)
    }

    /// Writes whole blocks.
    ///
    /// # Errors
    /// As [`Namespace::read`].
    pub fn write(&mut self, first: u64, bytes: &[u8]) -> Result<()> {
        let mut at = first;
        for part in bytes.chunks(MOST) {
            let blocks = u32::try_from(part.len() / self.block_size)?;
            let command = IoCommand::Write(BlockRange::new(at, blocks));
            let sqe = command.to_sqe(1, self.nsid, Sgl::transport(u32::try_from(part.len())?));
            self.io.exchange(sqe, part, &mut [])?;
            at += u64::from(blocks);
        }
        Ok(())
    }

    /// Writes zeroes.
    ///
    /// # Errors
    /// As [`Namespace::read`].
    pub fn write_zeroes(&mut self, first: u64, count: u64) -> Result<()> {
        for (at, blocks) in pieces(first, count) {
            let command = IoCommand::WriteZeroes { range: BlockRange::new(at, blocks), deallocate: false };
            self.io.exchange(command.to_sqe(1, self.nsid, Sgl::NONE), &[], &mut [])?;
        }
        Ok(())
    }

    /// Deallocates.
    ///
    /// # Errors
    /// As [`Namespace::read`].
    pub fn deallocate(&mut self, first: u64, count: u64) -> Result<()> {
        let range = DsmRange { attributes: 0, blocks: u32::try_from(count)?, slba: first }.encode();
        let command = IoCommand::DatasetManagement { ranges: 1, deallocate: true };
        self.io.exchange(command.to_sqe(1, self.nsid, Sgl::transport(16)), &range, &mut [])?;
        Ok(())
    }

    /// Flushes.
    ///
    /// # Errors
    /// As [`Namespace::read`].
    pub fn flush(&mut self) -> Result<()> {
        self.io.exchange(IoCommand::Flush.to_sqe(1, self.nsid, Sgl::NONE), &[], &mut [])?;
        Ok(())
    }

    /// Shuts the controller down and ends the connections.
    ///
    /// # Errors
    /// When the target refuses.
    pub fn close(mut self) -> Result<()> {
        let value = u64::from(Configuration { shutdown: 1, ..Configuration::enabled() }.raw());
        let set = FabricsCommand::PropertySet { size: PropertySize::Four, offset: offset::CC, value };
        self.admin.fabrics(&set)?;
        Ok(())
    }
}

fn pieces(first: u64, count: u64) -> impl Iterator<Item = (u64, u32)> {
    (0..count.div_ceil(128)).map(move |piece| {
        let at = piece * 128;
        (first + at, u32::try_from((count - at).min(128)).unwrap_or(0))
    })
}

#[derive(Debug)]
struct Queue {
    stream: TcpStream,
    link: Link,
}

impl Queue {
    fn open(port: u16) -> Result<Self> {
        let stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port))?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(TIMEOUT))?;
        stream.set_write_timeout(Some(TIMEOUT))?;
        let mut queue = Self { stream, link: Link::new(Role::Host) };
        let request = IcReq::default();
        queue.send(&Pdu::IcReq(request), &[])?;
        match queue.receive()? {
            (Pdu::IcResp(response), _) => {
                queue.link.established(&request, &response).map_err(|error| anyhow::anyhow!("{error:?}"))?;
                Ok(queue)
            }
            (other, _) => bail!("the answer to ICReq is {other:?}"),
        }
    }

    /// Connects the queue; gives the controller's id.
    fn connect(&mut self, nqn: &str, qid: u16, cntlid: u16) -> Result<u16> {
        let text = |text: &str| NulPadded::new(text).map_err(|_| anyhow::anyhow!("{text} is too long"));
        let data = ConnectData { hostid: [7; 16], cntlid, subnqn: text(nqn)?, hostnqn: text(HOST_NQN)? };
        let command = FabricsCommand::Connect(Connect { qid, sqsize: 31, ..Connect::default() });
        let sqe = command.to_sqe(1, Sgl::in_capsule(1024));
        self.send(&Pdu::CapsuleCmd(sqe), &data.encode())?;
        let cqe = self.completion(&[], &mut [])?;
        Ok(u16::try_from(cqe.result() & 0xFFFF)?)
    }

    fn fabrics(&mut self, command: &FabricsCommand) -> Result<Cqe> {
        self.exchange(command.to_sqe(1, Sgl::NONE), &[], &mut [])
    }

    fn wait_ready(&mut self) -> Result<()> {
        let get = FabricsCommand::PropertyGet { size: PropertySize::Four, offset: offset::CSTS };
        for _ in 0..1000 {
            if self.fabrics(&get)?.result() & 1 == 1 {
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        bail!("the controller does not become ready")
    }

    /// Sends a command and its data, takes what comes back, and waits for its end.
    fn exchange(&mut self, sqe: Sqe, data: &[u8], answer: &mut [u8]) -> Result<Cqe> {
        self.send(&Pdu::CapsuleCmd(sqe), &[])?;
        self.completion(data, answer)
    }

    fn completion(&mut self, data: &[u8], answer: &mut [u8]) -> Result<Cqe> {
        loop {
            let (pdu, bytes) = self.receive()?;
            match pdu {
                Pdu::CapsuleResp(cqe) if cqe.status().is_success() => return Ok(cqe),
                Pdu::CapsuleResp(cqe) => return Err(Refused(cqe.status()).into()),
                Pdu::R2t(r2t) => {
                    let (from, len) = (usize::try_from(r2t.r2to)?, usize::try_from(r2t.r2tl)?);
                    let part = data.get(from..from + len).context("R2T beyond the data")?;
                    self.send_data(r2t.cid, r2t.ttag, from, part)?;
                }
                Pdu::C2hData(data) => {
                    let at = usize::try_from(data.datao)?;
                    let place = answer.get_mut(at..at + bytes.len()).context("more data than asked for")?;
                    place.copy_from_slice(&bytes);
                    if data.success {
                        return Ok(Cqe::new(data.cid, 0, Status::SUCCESS));
                    }
                }
                other => bail!("unexpected {other:?}"),
            }
        }
    }

    fn send_data(&mut self, cid: u16, ttag: u16, offset: usize, data: &[u8]) -> Result<()> {
        let most = usize::try_from(self.link.max_h2c_data())?;
        let mut sent = 0;
        while sent < data.len() {
            let part = &data[sent..data.len().min(sent + most)];
            sent += part.len();
            let header = H2cData {
                cid,
                ttag,
                datao: u32::try_from(offset + sent - part.len())?,
                datal: u32::try_from(part.len())?,
                last: sent == data.len(),
            };
            self.send(&Pdu::H2cData(header), part)?;
        }
        Ok(())
    }

    fn send(&mut self, pdu: &Pdu, data: &[u8]) -> Result<()> {
        let mut bytes = self.link.encode(pdu, u32::try_from(data.len())?).to_vec();
        bytes.extend_from_slice(data);
        self.stream.write_all(&bytes)?;
        Ok(())
    }

    fn receive(&mut self) -> Result<(Pdu, Vec<u8>)> {
        let mut bytes = Vec::new();
        let (pdu, layout): (Pdu, Layout) = loop {
            match self.link.decode(&bytes).map_err(|error| anyhow::anyhow!("{error:?}"))? {
                Decoded::Header(pdu, layout) => break (pdu, layout),
                Decoded::Need(count) => self.fill(&mut bytes, count)?,
            }
        };
        self.fill(&mut bytes, usize::try_from(layout.plen)?)?;
        let from = usize::try_from(layout.data_offset)?;
        let to = from + usize::try_from(layout.data_len)?;
        Ok((pdu, bytes.get(from..to).unwrap_or_default().to_vec()))
    }

    fn fill(&mut self, bytes: &mut Vec<u8>, count: usize) -> Result<()> {
        let had = bytes.len();
        bytes.resize(count.max(had), 0);
        self.stream.read_exact(&mut bytes[had..])?;
        Ok(())
    }
}
