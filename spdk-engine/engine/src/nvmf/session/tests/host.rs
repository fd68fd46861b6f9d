//! The host's end of a session, for tests: writes PDUs, reads what comes back.

use addax_hugepages::{BufPool, ClassConfig, MapPolicy, PoolConfig};
use nvme_wire::pdu::{C2hData, H2cData, IcReq, R2t};
use nvme_wire::{Cqe, DataDigest, Decoded, Link, Pdu, Role, Sgl, Sqe, TermError};

use super::super::{Limits, Session, Target};
use crate::reactor::net::Piece;

pub const LIMITS: Limits =
    Limits { depth: 8, max_io: 131_072, in_capsule: 4096, in_capsule_control: 8192, c2h_success: true };

/// A pool of so many small (8 KiB) and large (132 KiB) buffers on plain pages.
pub fn pool(small: u32, large: u32) -> BufPool {
    let config = PoolConfig {
        small: ClassConfig { bytes: 8192, count: small },
        large: ClassConfig { bytes: 135_168, count: large },
        policy: MapPolicy::plain(),
    };
    BufPool::new(config).unwrap()
}

/// What the target sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Got {
    IcResp {
        cpda: u8,
        maxh2cdata: u32,
    },
    R2t(R2t),
    Data(C2hData, Vec<u8>),
    Response(Cqe),
    /// The request and how many bytes of the offending header it quotes.
    Term(TermError, usize),
}

/// The host's end.
pub struct Host {
    pub link: Link,
    request: IcReq,
    inbox: Vec<u8>,
}

impl Host {
    pub fn new(hpda: u8, header_digest: bool, data_digest: bool) -> Self {
        let request = IcReq { pfv: 0, hpda, header_digest, data_digest, maxr2t: 0 };
        Self { link: Link::new(Role::Host), request, inbox: Vec::new() }
    }

    /// A connected host and session.
    pub fn connected(hpda: u8, header_digest: bool, data_digest: bool) -> (Self, Session) {
        let mut host = Self::new(hpda, header_digest, data_digest);
        let mut session = Session::new(LIMITS, pool(16, 16));
        feed(&mut session, &host.ic_req());
        assert_eq!(session.next_command(), None);
        host.collect(&mut session);
        assert!(host.link.is_ready());
        (host, session)
    }

    pub fn ic_req(&self) -> Vec<u8> {
        self.link.encode(&Pdu::IcReq(self.request), 0).to_vec()
    }

    /// A command with data in its capsule.
    pub fn capsule(&self, sqe: &Sqe, data: &[u8]) -> Vec<u8> {
        self.with_data(&Pdu::CapsuleCmd(*sqe), data)
    }

    /// A part of a command's data.
    pub fn h2c(&self, cid: u16, ttag: u16, datao: u32, data: &[u8], last: bool) -> Vec<u8> {
        self.with_data(&Pdu::H2cData(H2cData { cid, ttag, datao, datal: data.len() as u32, last }), data)
    }

    fn with_data(&self, pdu: &Pdu, data: &[u8]) -> Vec<u8> {
        let mut out = self.link.encode(pdu, data.len() as u32).to_vec();
        out.extend_from_slice(data);
        if !data.is_empty() && self.link.data_digest() {
            let mut digest = DataDigest::new();
            digest.update(data);
            out.extend_from_slice(&digest.to_bytes());
        }
        out
    }

    /// Takes all output of the session and gives the PDUs that are complete.
    pub fn collect(&mut self, session: &mut Session) -> Vec<Got> {
        while !session.output().is_empty() {
            let mut taken = 0;
            for piece in session.output().pieces() {
                match piece {
                    Piece::Bytes(b) => self.inbox.extend_from_slice(b),
                    Piece::Memory(m) => self.inbox.extend_from_slice(&m.to_vec()),
                }
                taken += piece.len();
            }
            session.output().sent(taken);
        }
        let mut all = Vec::new();
        while let Some((got, used)) = self.decode() {
            self.inbox.drain(..used);
            all.push(got);
        }
        all
    }

    fn decode(&mut self) -> Option<(Got, usize)> {
        let Decoded::Header(pdu, layout) = self.link.decode(&self.inbox).unwrap() else { return None };
        let data = self.inbox.get(layout.data_offset as usize..layout.plen as usize)?;
        let (data, digest) = data.split_at(layout.data_len as usize);
        if layout.data_digest {
            let mut expected = DataDigest::new();
            expected.update(data);
            assert!(expected.matches(*digest.first_chunk().unwrap()), "data digest of the target");
        }
        let got = match pdu {
            Pdu::IcResp(response) => {
                self.link.established(&self.request, &response).unwrap();
                Got::IcResp { cpda: response.cpda, maxh2cdata: response.maxh2cdata }
            }
            Pdu::R2t(r2t) => Got::R2t(r2t),
            Pdu::C2hData(c2h) => Got::Data(c2h, data.to_vec()),
            Pdu::CapsuleResp(cqe) => Got::Response(cqe),
            Pdu::C2hTermReq(error) => Got::Term(error, data.len()),
            other => panic!("the target sent {other:?}"),
        };
        Some((got, layout.plen as usize))
    }
}

/// Receives of `bytes` what the session takes at once; how much that is.
pub fn receive(session: &mut Session, bytes: &[u8]) -> usize {
    let count = match session.target() {
        Target::Scratch(space) => {
            let count = space.len().min(bytes.len());
            space[..count].copy_from_slice(&bytes[..count]);
            count
        }
        Target::Payload(part, space) => {
            let direct = part.len().min(bytes.len());
            part.copy_from(&bytes[..direct], 0);
            let beyond = space.len().min(bytes.len() - direct);
            space[..beyond].copy_from_slice(&bytes[direct..direct + beyond]);
            direct + beyond
        }
        Target::Paused => return 0,
    };
    session.received(count);
    count
}

/// Gives bytes to the session as a socket would; commands stay inside until [`Session::next_command`].
pub fn feed(session: &mut Session, mut bytes: &[u8]) {
    while !bytes.is_empty() {
        let count = receive(session, bytes);
        assert!(count > 0, "no room for input with {} bytes to come", bytes.len());
        bytes = &bytes[count..];
    }
}

/// An I/O command whose data, if any, moves by data PDUs.
pub fn command(opcode: u8, cid: u16, len: u32) -> Sqe {
    Sqe::new(opcode, cid, 1, Sgl::transport(len))
}
