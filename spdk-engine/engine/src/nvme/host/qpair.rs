//! One NVMe/TCP connection of the initiator as a state machine without I/O.
//!
//! *What it is.* The owner of a [`Qpair`] submits commands ([`Qpair::submit`]), sends what [`Qpair::output`] holds,
//! receives into [`Qpair::target`], reports with [`Qpair::received`], and takes completions from [`Qpair::next`] until
//! there is none.
//!
//! *Flow of a command.* slot → capsule (with the data inside, where it fits) → (R2T → H2CData | C2HData) → response, or
//! the last C2HData with the success flag.
//!
//! *Invariants.* At most as many commands are outstanding as there are slots. Data from the controller goes straight
//! into the command's buffers and never beyond them. Data of one transfer moves in ascending order without gaps. A
//! command counts as a success only if all of its data has moved.
//!
//! *When things fail.* A peer that breaks the protocol gets a termination request, and no more commands end:
//! [`Qpair::fault`]. A wrong data digest ends its command with Transient Transport Error.

use nvme_wire::command::opcode;
use nvme_wire::pdu::{C2hData, DIGEST_SIZE, Fes, H2cData, IcReq, R2t};
use nvme_wire::{Cqe, Decoded, Layout, Link, Pdu, Role, Sgl, Sqe, Status, TermError};

use super::data::Data;
use super::slots::{Busy, Slots};
use crate::nvmf::session::{Input, Output};
use crate::reactor::driver::Nanos;

/// Rest of a payload from which on it is received straight into the command's buffers.
const DIRECT_BYTES_MIN: u32 = 4096;
/// In-capsule data that every queue takes before it says more, and the most of an admin queue (TCP Transport, 3.3.2.2).
pub const ADMIN_IN_CAPSULE_BYTES: u32 = 8192;

/// How a queue pair is to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Params {
    /// Most commands in flight.
    pub depth: u16,
    /// Most in-capsule data of a command, in bytes; Fabrics commands always have theirs in the capsule.
    pub in_capsule: u32,
    pub header_digest: bool,
    pub data_digest: bool,
}

/// A command to be sent. Identifier and data pointer of the entry are filled in by the queue pair.
#[derive(Debug)]
pub struct Command {
    pub sqe: Sqe,
    pub data: Data,
}

impl Command {
    /// A command without data.
    #[must_use]
    pub fn plain(sqe: Sqe) -> Self {
        Self { sqe, data: Data::None }
    }
}

/// Why no more commands end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    #[error("the controller broke the protocol: {0}")]
    Terminated(TermError),
    #[error("the controller sent a termination request: {0}")]
    PeerTerminated(TermError),
    #[error("the controller does not do the digests that were asked for")]
    NoDigest,
}

/// A command that has ended.
#[derive(Debug)]
pub struct Completion {
    pub tag: u64,
    pub cqe: Cqe,
}

/// Where to receive to.
#[derive(Debug)]
pub enum Target<'a> {
    /// Plain memory.
    Scratch(&'a mut [u8]),
    /// Straight into a command's buffer, and what comes after it into plain memory.
    Payload(addax_hugepages::BufSlice, &'a mut [u8]),
}

/// Data of a C2HData PDU that is being received.
#[derive(Debug, Clone, Copy)]
struct Payload {
    cid: u16,
    /// Padding still to be skipped.
    skip: u32,
    /// Offset in the command's data.
    start: u32,
    len: u32,
    got: u32,
    digest: bool,
    success: bool,
}

/// One connection; see the module.
#[derive(Debug)]
pub struct Qpair {
    link: Link,
    request: IcReq,
    params: Params,
    input: Input,
    output: Output,
    payload: Option<Payload>,
    /// Bytes of the present target that lie in a command's buffer.
    direct: usize,
    slots: Slots,
    fault: Option<Fault>,
}

enum Step {
    Ended(Completion),
    Again,
    NeedBytes,
}

impl Qpair {
    /// A new connection; its output begins with the request to initialise it.
    #[must_use]
    pub fn new(params: Params) -> Self {
        let request =
            IcReq { header_digest: params.header_digest, data_digest: params.data_digest, ..IcReq::default() };
        let link = Link::new(Role::Host);
        let mut output = Output::default();
        output.push_bytes(&link.encode(&Pdu::IcReq(request), 0));
        Self {
            link,
            request,
            params,
            input: Input::with_room(),
            output,
            payload: None,
            direct: 0,
            slots: Slots::new(params.depth),
            fault: None,
        }
    }

    /// Whether commands can be sent.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.link.is_ready() && self.fault.is_none()
    }

    /// Why no more commands end, if so.
    #[must_use]
    pub fn fault(&self) -> Option<Fault> {
        self.fault
    }

    /// The command slots.
    #[must_use]
    pub fn slots(&self) -> &Slots {
        &self.slots
    }

    /// What is to be sent.
    pub fn output(&mut self) -> &mut Output {
        &mut self.output
    }

    /// Takes a command that is to end by `deadline`; back when every slot is taken or the queue is not ready.
    pub fn submit(&mut self, command: Command, tag: u64, deadline: Nanos) -> Result<(), Command> {
        if !self.is_ready() || self.slots.free() == 0 {
            return Err(command);
        }
        let Command { mut sqe, data } = command;
        let len = data.len() as u32;
        let in_capsule = matches!(data, Data::Send(_))
            && len > 0
            && (len <= self.params.in_capsule || sqe.opcode == opcode::FABRICS);
        let sgl = if in_capsule { Sgl::in_capsule(len) } else { Sgl::transport(len) };
        sqe.dptr = sgl.encode();
        let moved = if in_capsule { len } else { 0 };
        let taken = self.slots.take(Busy { tag, deadline, data, len, moved, corrupt: false });
        let cid = match taken {
            Ok(cid) => cid,
            Err(busy) => return Err(Command { sqe, data: busy.data }),
        };
        sqe.cid = cid.into();
        let header = self.link.encode(&Pdu::CapsuleCmd(sqe), if in_capsule { len } else { 0 });
        self.output.push_bytes(&header);
        if in_capsule {
            self.push_data(cid, 0, len);
        }
        Ok(())
    }

    /// Puts data of a command, and its digest, behind a header.
    fn push_data(&mut self, cid: u16, offset: u32, len: u32) {
        let Some(busy) = self.slots.get(cid) else { return };
        let (offset, len) = (offset as usize, len as usize);
        busy.data.each_part(offset, len, |part| self.output.push_payload(part));
        if self.link.data_digest() {
            self.output.push_bytes(&busy.data.digest(offset, len).to_bytes());
        }
    }

    /// Where to receive to.
    pub fn target(&mut self) -> Target<'_> {
        if self.fault.is_some() {
            // Only the end of the stream is of interest now.
            self.input.clear();
            return Target::Scratch(self.input.space());
        }
        if let Some(payload) = self.payload.filter(|p| p.skip == 0 && p.len - p.got >= DIRECT_BYTES_MIN)
            && self.input.unread().is_empty()
            && let Some(busy) = self.slots.get(payload.cid)
            && let at = (payload.start + payload.got) as usize
            && let Some(part) = busy.data.part_at(at, (payload.len - payload.got) as usize)
        {
            self.direct = part.len();
            return Target::Payload(part, self.input.space());
        }
        Target::Scratch(self.input.space())
    }

    /// So many bytes were received into [`Self::target`].
    pub fn received(&mut self, count: usize) {
        let direct = std::mem::take(&mut self.direct).min(count);
        if let Some(payload) = &mut self.payload {
            payload.got += direct as u32;
        }
        self.input.filled(count - direct);
    }

    /// The next command that has ended; `None` when more bytes are needed or [`Self::fault`] says why there is none.
    #[allow(clippy::should_implement_trait)]
    pub fn next(&mut self) -> Option<Completion> {
        while self.fault.is_none() {
            match self.step() {
                Ok(Step::Ended(completion)) => return Some(completion),
                Ok(Step::Again) => {}
                Ok(Step::NeedBytes) => return None,
                Err(error) => self.terminate(error),
            }
        }
        None
    }

    fn terminate(&mut self, error: TermError) {
        let quoted = self.input.unread();
        let request = self.link.encode_term(error, quoted);
        self.output.push_bytes(&request);
        self.fault = Some(Fault::Terminated(error));
    }

    fn step(&mut self) -> Result<Step, TermError> {
        if let Some(payload) = self.payload {
            return Ok(self.advance_payload(payload));
        }
        let (pdu, layout) = match self.link.decode(self.input.unread())? {
            Decoded::Need(_) => return Ok(Step::NeedBytes),
            Decoded::Header(pdu, layout) => (pdu, layout),
        };
        let step = match pdu {
            Pdu::IcResp(response) => {
                self.link.established(&self.request, &response)?;
                if self.link.header_digest() != self.request.header_digest
                    || self.link.data_digest() != self.request.data_digest
                {
                    self.fault = Some(Fault::NoDigest);
                }
                Step::Again
            }
            Pdu::CapsuleResp(cqe) => Step::Ended(self.end(cqe.cid.get(), cqe).ok_or(TermError::field(CQE_CID))?),
            Pdu::C2hData(data) => self.begin_data(&data, &layout)?,
            Pdu::R2t(r2t) => {
                self.answer_r2t(&r2t)?;
                Step::Again
            }
            Pdu::C2hTermReq(error) => {
                self.fault = Some(Fault::PeerTerminated(error));
                Step::Again
            }
            Pdu::IcReq(_) | Pdu::H2cTermReq(_) | Pdu::CapsuleCmd(_) | Pdu::H2cData(_) => {
                return Err(TermError::field(0));
            }
        };
        self.input.consume(layout.header_end as usize);
        Ok(step)
    }

    /// Ends a command, after what its data says about the status.
    fn end(&mut self, cid: u16, mut cqe: Cqe) -> Option<Completion> {
        let busy = self.slots.end(cid)?;
        if cqe.status().is_success() {
            let replace = |status: Status| Cqe { status_field: status.cqe_field().into(), ..cqe };
            if busy.corrupt {
                cqe = replace(Status::TRANSIENT_TRANSPORT_ERROR);
            } else if busy.moved < busy.len {
                cqe = replace(Status::DATA_TRANSFER_ERROR);
            }
        }
        Some(Completion { tag: busy.tag, cqe })
    }

    fn begin_data(&mut self, data: &C2hData, layout: &Layout) -> Result<Step, TermError> {
        let busy = self.slots.get(data.cid).ok_or(TermError::field(CCCID))?;
        if !matches!(busy.data, Data::Receive(_)) {
            return Err(TermError::field(CCCID));
        }
        if data.datao != busy.moved || data.datal > busy.len - busy.moved {
            return Err(TermError::new(Fes::DataOutOfRange, 0));
        }
        if data.success && !data.last {
            return Err(TermError::field(FLAGS));
        }
        self.payload = Some(Payload {
            cid: data.cid,
            skip: layout.data_offset - layout.header_end,
            start: data.datao,
            len: layout.data_len,
            got: 0,
            digest: layout.data_digest,
            success: data.success,
        });
        Ok(Step::Again)
    }

    /// Takes data of a PDU out of the input.
    fn advance_payload(&mut self, mut payload: Payload) -> Step {
        let skip = (payload.skip as usize).min(self.input.unread().len());
        self.input.consume(skip);
        payload.skip -= skip as u32;
        if payload.skip == 0 && payload.got < payload.len {
            let unread = self.input.unread();
            let count = unread.len().min((payload.len - payload.got) as usize);
            if let Some(busy) = self.slots.get(payload.cid) {
                busy.data.fill((payload.start + payload.got) as usize, &unread[..count]);
            }
            self.input.consume(count);
            payload.got += count as u32;
        }
        self.payload = Some(payload);
        if payload.skip > 0 || payload.got < payload.len {
            return Step::NeedBytes;
        }
        let mut digest = None;
        if payload.digest {
            let Some(bytes) = self.input.unread().first_chunk::<DIGEST_SIZE>().copied() else {
                return Step::NeedBytes;
            };
            self.input.consume(DIGEST_SIZE);
            digest = Some(bytes);
        }
        self.payload = None;
        self.end_payload(payload, digest)
    }

    fn end_payload(&mut self, payload: Payload, digest: Option<[u8; DIGEST_SIZE]>) -> Step {
        let Some(busy) = self.slots.get_mut(payload.cid) else { return Step::Again };
        busy.moved += payload.len;
        if let Some(digest) = digest {
            let right = busy.data.digest(payload.start as usize, payload.len as usize).matches(digest);
            busy.corrupt |= !right;
        }
        if !payload.success {
            return Step::Again;
        }
        let cqe = Cqe::new(payload.cid, 0, Status::SUCCESS);
        self.end(payload.cid, cqe).map_or(Step::Again, Step::Ended)
    }

    fn answer_r2t(&mut self, r2t: &R2t) -> Result<(), TermError> {
        let busy = self.slots.get_mut(r2t.cid).ok_or(TermError::field(CCCID))?;
        if !matches!(busy.data, Data::Send(_)) {
            return Err(TermError::field(CCCID));
        }
        if r2t.r2to != busy.moved || r2t.r2tl == 0 || r2t.r2tl > busy.len - busy.moved {
            return Err(TermError::new(Fes::DataOutOfRange, 0));
        }
        busy.moved += r2t.r2tl;
        let mut sent = 0;
        while sent < r2t.r2tl {
            let datal = (r2t.r2tl - sent).min(self.link.max_h2c_data());
            let datao = r2t.r2to + sent;
            let last = sent + datal == r2t.r2tl;
            let pdu = Pdu::H2cData(H2cData { cid: r2t.cid, ttag: r2t.ttag, datao, datal, last });
            self.output.push_bytes(&self.link.encode(&pdu, datal));
            self.push_data(r2t.cid, datao, datal);
            sent += datal;
        }
        Ok(())
    }
}

/// Offsets in a PDU of what an answer may have wrong.
const FLAGS: u32 = 1;
const CCCID: u32 = 8;
const CQE_CID: u32 = 20;
