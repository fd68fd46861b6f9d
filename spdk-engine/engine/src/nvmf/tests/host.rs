//! A blocking NVMe/TCP host.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};

use nvme_wire::admin::{AdminCommand, Identify};
use nvme_wire::fabrics::{CNTLID_DYNAMIC, Connect, ConnectData, FabricsCommand, PropertySize};
use nvme_wire::identify::IDENTIFY_SIZE;
use nvme_wire::pdu::{H2cData, IcReq};
use nvme_wire::property::{Configuration, offset};
use nvme_wire::{Cqe, Decoded, IoCommand, Link, NulPadded, Pdu, Role, Sgl, Sqe, Status};

use super::engine::{HOST, PATIENCE, SUBSYSTEM};

/// A queue pair.
pub struct Queue {
    stream: TcpStream,
    link: Link,
    inbox: Vec<u8>,
    next_cid: u16,
    writes: HashMap<u16, Vec<u8>>,
    reads: HashMap<u16, Vec<u8>>,
}

impl Queue {
    /// A connection after its initialisation.
    pub fn open(addr: SocketAddr, digests: bool) -> Self {
        let stream = TcpStream::connect(addr).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_nodelay(true).unwrap();
        let request = IcReq { pfv: 0, hpda: 0, header_digest: digests, data_digest: digests, maxr2t: 0 };
        let link = Link::new(Role::Host);
        let mut queue =
            Self { stream, link, inbox: Vec::new(), next_cid: 0, writes: HashMap::new(), reads: HashMap::new() };
        let bytes = queue.link.encode(&Pdu::IcReq(request), 0);
        queue.stream.write_all(&bytes).unwrap();
        let Pdu::IcResp(response) = queue.pdu().unwrap().0 else { panic!("no ICResp") };
        queue.link.established(&request, &response).unwrap();
        queue
    }

    /// The next PDU and its data; `None` when the target has closed.
    fn pdu(&mut self) -> Option<(Pdu, Vec<u8>)> {
        loop {
            if let Decoded::Header(pdu, layout) = self.link.decode(&self.inbox).unwrap()
                && self.inbox.len() >= layout.plen as usize
            {
                let end = (layout.data_offset + layout.data_len) as usize;
                let data = self.inbox[layout.data_offset as usize..end].to_vec();
                self.inbox.drain(..layout.plen as usize);
                return Some((pdu, data));
            }
            let mut bytes = [0; 65536];
            match self.stream.read(&mut bytes) {
                Ok(0) => return None,
                Ok(count) => self.inbox.extend_from_slice(&bytes[..count]),
                Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => return None,
                Err(error) => panic!("{error}"),
            }
        }
    }

    fn send_pdu(&mut self, pdu: &Pdu, data: &[u8]) {
        let mut bytes = self.link.encode(pdu, data.len() as u32).to_vec();
        bytes.extend_from_slice(data);
        if !data.is_empty() && self.link.data_digest() {
            bytes.extend_from_slice(&nvme_wire::crc32c(data).to_le_bytes());
        }
        // The target may have closed; the next receive tells.
        let _ = self.stream.write_all(&bytes);
    }

    /// Sends a command; `data` goes by R2T, or in the capsule when the command says so. Gives its identifier.
    pub fn send(&mut self, mut sqe: Sqe, data: &[u8]) -> u16 {
        self.next_cid += 1;
        let cid = self.next_cid;
        sqe.cid = cid.into();
        if matches!(Sgl::parse(&sqe.dptr), Ok(Sgl::InCapsule { .. })) {
            self.send_pdu(&Pdu::CapsuleCmd(sqe), data);
        } else {
            self.writes.insert(cid, data.to_vec());
            self.send_pdu(&Pdu::CapsuleCmd(sqe), &[]);
        }
        cid
    }

    /// The next completion and the data that was read; `None` when the target has closed.
    pub fn wait(&mut self) -> Option<(Cqe, Vec<u8>)> {
        loop {
            let (pdu, data) = self.pdu()?;
            match pdu {
                Pdu::R2t(r2t) => {
                    let whole = self.writes[&r2t.cid].clone();
                    let part = &whole[r2t.r2to as usize..(r2t.r2to + r2t.r2tl) as usize];
                    let h2c = H2cData { cid: r2t.cid, ttag: r2t.ttag, datao: r2t.r2to, datal: r2t.r2tl, last: true };
                    self.send_pdu(&Pdu::H2cData(h2c), part);
                }
                Pdu::C2hData(c2h) if c2h.success => return Some((Cqe::new(c2h.cid, 0, Status::SUCCESS), data)),
                Pdu::C2hData(c2h) => {
                    self.reads.insert(c2h.cid, data);
                }
                Pdu::CapsuleResp(cqe) => {
                    let data = self.reads.remove(&cqe.cid.get()).unwrap_or_default();
                    return Some((cqe, data));
                }
                other => panic!("{other:?}"),
            }
        }
    }

    /// Waits until the target closes; completions before that are forgotten.
    pub fn wait_closed(&mut self) {
        while self.wait().is_some() {}
    }

    /// Sends a command and waits for it.
    pub fn run(&mut self, sqe: Sqe, data: &[u8]) -> (Cqe, Vec<u8>) {
        let cid = self.send(sqe, data);
        let (cqe, read) = self.wait().expect("closed by the target");
        assert_eq!(cqe.cid.get(), cid);
        (cqe, read)
    }

    pub fn connect_as(&mut self, host: &str, nqn: &str, qid: u16, cntlid: u16, kato_ms: u32) -> Cqe {
        let command = Connect { recfmt: 0, qid, sqsize: 31, cattr: 0, kato_ms };
        let data = ConnectData {
            hostid: [7; 16],
            cntlid,
            subnqn: NulPadded::new(nqn).unwrap(),
            hostnqn: NulPadded::new(host).unwrap(),
        };
        let sgl = Sgl::in_capsule(ConnectData::SIZE as u32);
        self.run(FabricsCommand::Connect(command).to_sqe(0, sgl), &data.encode()).0
    }

    pub fn get_property(&mut self, size: PropertySize, offset: u32) -> Cqe {
        self.run(FabricsCommand::PropertyGet { size, offset }.to_sqe(0, Sgl::NONE), &[]).0
    }

    pub fn set_property(&mut self, offset: u32, value: u64) -> Cqe {
        let command = FabricsCommand::PropertySet { size: PropertySize::Four, offset, value };
        self.run(command.to_sqe(0, Sgl::NONE), &[]).0
    }

    pub fn admin(&mut self, command: AdminCommand, nsid: u32, room: u32) -> (Cqe, Vec<u8>) {
        self.run(command.to_sqe(0, nsid, Sgl::transport(room)), &[])
    }

    pub fn identify(&mut self, cns: u8, nsid: u32) -> (Cqe, Vec<u8>) {
        let command = AdminCommand::Identify(Identify { cns, ..Default::default() });
        self.admin(command, nsid, IDENTIFY_SIZE as u32)
    }

    pub fn io(&mut self, command: IoCommand, len: u32, data: &[u8]) -> (Cqe, Vec<u8>) {
        self.run(command.to_sqe(0, 1, Sgl::transport(len)), data)
    }
}

/// A controller: an admin queue that is enabled.
pub struct Controller {
    pub admin: Queue,
    pub cntlid: u16,
    host: &'static str,
    addr: SocketAddr,
    digests: bool,
}

impl Controller {
    pub fn connect(addr: SocketAddr) -> Self {
        Self::connect_with(addr, false, 0)
    }

    pub fn connect_with(addr: SocketAddr, digests: bool, kato_ms: u32) -> Self {
        Self::connect_as(HOST, addr, digests, kato_ms)
    }

    pub fn connect_as(host: &'static str, addr: SocketAddr, digests: bool, kato_ms: u32) -> Self {
        let mut admin = Queue::open(addr, digests);
        let cqe = admin.connect_as(host, SUBSYSTEM, 0, CNTLID_DYNAMIC, kato_ms);
        assert_eq!(cqe.status(), Status::SUCCESS);
        let cntlid = cqe.dw0.get() as u16;
        assert_eq!(admin.set_property(offset::CC, Configuration::enabled().raw().into()).status(), Status::SUCCESS);
        Self { admin, cntlid, host, addr, digests }
    }

    pub fn io_queue(&self, qid: u16) -> Queue {
        let mut queue = Queue::open(self.addr, self.digests);
        let cqe = queue.connect_as(self.host, SUBSYSTEM, qid, self.cntlid, 0);
        assert_eq!(cqe.status(), Status::SUCCESS);
        queue
    }
}
