//! The host of a stepped engine.

use nvme_wire::command::BlockRange;
use nvme_wire::fabrics::{CNTLID_DYNAMIC, Connect, ConnectData, FabricsCommand, PropertySize};
use nvme_wire::pdu::{H2cData, IcReq};
use nvme_wire::property::{Configuration, offset};
use nvme_wire::{Decoded, IoCommand, Link, NulPadded, Pdu, Role, Sgl, Sqe};

use crate::wire::{Dialled, World};
use crate::{Failed, SUBSYSTEM};

/// Entries of the I/O queue.
const QUEUE_ENTRIES: u16 = 128;
/// Largest write whose data goes in the capsule, as the target offers.
const IN_CAPSULE: u32 = 4096;
const BLOCK: u32 = 512;

/// Equal I/Os that are sent together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Workload {
    pub write: bool,
    /// Bytes of one I/O, a multiple of 512, at most 128 KiB.
    pub bytes: u32,
    /// I/Os per batch, at most 128.
    pub depth: u16,
}

struct Queue {
    wire: Dialled,
    link: Link,
    inbox: Vec<u8>,
}

impl Queue {
    fn open(world: &World, turn: &mut dyn FnMut()) -> Result<Self, Failed> {
        let wire = world.dial().ok_or_else(|| Failed("nobody listens".into()))?;
        let request = IcReq { pfv: 0, hpda: 0, header_digest: false, data_digest: false, maxr2t: 0 };
        let mut queue = Self { wire, link: Link::new(Role::Host), inbox: Vec::new() };
        queue.wire.send(&queue.link.encode(&Pdu::IcReq(request), 0));
        match queue.wait(turn)? {
            Pdu::IcResp(response) => {
                queue.link.established(&request, &response).map_err(|e| Failed(e.to_string()))?;
                Ok(queue)
            }
            other => Err(Failed(format!("instead of an ICResp: {other:?}"))),
        }
    }

    fn next(&mut self) -> Result<Option<Pdu>, Failed> {
        match self.link.decode(&self.inbox).map_err(|e| Failed(e.to_string()))? {
            Decoded::Header(pdu, layout) if self.inbox.len() >= layout.plen as usize => {
                self.inbox.drain(..layout.plen as usize);
                Ok(Some(pdu))
            }
            _ => Ok(None),
        }
    }

    fn wait(&mut self, turn: &mut dyn FnMut()) -> Result<Pdu, Failed> {
        for _ in 0..crate::PATIENCE {
            turn();
            self.wire.receive(&mut self.inbox);
            if let Some(pdu) = self.next()? {
                return Ok(pdu);
            }
        }
        Err(Failed("the target does not answer".into()))
    }

    /// Runs a command to its end; Dword 0 of the answer.
    fn run(&mut self, turn: &mut dyn FnMut(), sqe: Sqe, data: &[u8]) -> Result<u32, Failed> {
        let mut bytes = self.link.encode(&Pdu::CapsuleCmd(sqe), data.len() as u32).to_vec();
        bytes.extend_from_slice(data);
        self.wire.send(&bytes);
        match self.wait(turn)? {
            Pdu::CapsuleResp(cqe) if cqe.status().is_success() => Ok(cqe.dw0.get()),
            other => Err(Failed(format!("refused: {other:?}"))),
        }
    }

    fn connect(&mut self, turn: &mut dyn FnMut(), qid: u16, cntlid: u16) -> Result<u16, Failed> {
        let command = Connect { recfmt: 0, qid, sqsize: QUEUE_ENTRIES - 1, cattr: 0, kato_ms: 0 };
        let name = |text| NulPadded::new(text).map_err(|_| Failed(format!("{text} is too long")));
        let hostnqn = name("nqn.2026-11.io.addax:step:host")?;
        let data = ConnectData { hostid: [7; 16], cntlid, subnqn: name(SUBSYSTEM)?, hostnqn };
        let sgl = Sgl::in_capsule(ConnectData::SIZE as u32);
        Ok(self.run(turn, FabricsCommand::Connect(command).to_sqe(0, sgl), &data.encode())? as u16)
    }
}

/// The host: an admin queue that only keeps the controller, and an I/O queue.
pub struct Host {
    _admin: Queue,
    io: Queue,
    /// The last batch, as bytes.
    batch: Vec<u8>,
    built: Option<Workload>,
    payload: Vec<u8>,
    outstanding: usize,
}

impl std::fmt::Debug for Host {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Host").field("outstanding", &self.outstanding).finish_non_exhaustive()
    }
}

impl Host {
    pub(crate) fn attach(world: &World, turn: &mut dyn FnMut()) -> Result<Self, Failed> {
        let mut admin = Queue::open(world, turn)?;
        let cntlid = admin.connect(turn, 0, CNTLID_DYNAMIC)?;
        let enable = u64::from(Configuration::enabled().raw());
        let set = FabricsCommand::PropertySet { size: PropertySize::Four, offset: offset::CC, value: enable };
        admin.run(turn, set.to_sqe(1, Sgl::NONE), &[])?;
        let mut io = Queue::open(world, turn)?;
        io.connect(turn, 1, cntlid)?;
        Ok(Self { _admin: admin, io, batch: Vec::new(), built: None, payload: vec![0xa5; 128 << 10], outstanding: 0 })
    }

    /// Commands sent and not answered.
    #[must_use]
    pub fn outstanding(&self) -> usize {
        self.outstanding
    }

    /// Sends one batch.
    pub fn send(&mut self, io: &Workload) {
        if self.built != Some(*io) {
            self.build(io);
        }
        self.outstanding = usize::from(io.depth);
        self.io.wire.send(&self.batch);
    }

    fn build(&mut self, io: &Workload) {
        self.built = Some(*io);
        self.batch.clear();
        let in_capsule = io.write && io.bytes <= IN_CAPSULE;
        let sgl = if in_capsule { Sgl::in_capsule(io.bytes) } else { Sgl::transport(io.bytes) };
        for cid in 0..io.depth {
            let blocks = io.bytes / BLOCK;
            let range = BlockRange { slba: u64::from(u32::from(cid) * blocks), blocks, ..BlockRange::default() };
            let command = if io.write { IoCommand::Write(range) } else { IoCommand::Read(range) };
            let sqe = command.to_sqe(cid, 1, sgl);
            let data = if in_capsule { io.bytes } else { 0 };
            self.batch.extend_from_slice(&self.io.link.encode(&Pdu::CapsuleCmd(sqe), data));
            self.batch.extend_from_slice(&self.payload[..data as usize]);
        }
    }

    /// Takes what the target has sent, and sends the data it asks for.
    ///
    /// # Errors
    /// When a command has failed.
    pub fn receive(&mut self) -> Result<(), Failed> {
        self.io.wire.receive(&mut self.io.inbox);
        while let Some(pdu) = self.io.next()? {
            match pdu {
                Pdu::C2hData(data) if data.success => self.outstanding -= 1,
                Pdu::C2hData(_) => {}
                Pdu::CapsuleResp(cqe) if cqe.status().is_success() => self.outstanding -= 1,
                Pdu::R2t(r2t) => {
                    let data = H2cData { cid: r2t.cid, ttag: r2t.ttag, datao: r2t.r2to, datal: r2t.r2tl, last: true };
                    self.io.wire.send(&self.io.link.encode(&Pdu::H2cData(data), r2t.r2tl));
                    self.io.wire.send(&self.payload[..r2t.r2tl as usize]);
                }
                other => return Err(Failed(format!("a command failed: {other:?}"))),
            }
        }
        Ok(())
    }
}
