//! One NVMe/TCP connection of the target as a state machine without I/O: bytes in, commands out; completions in, bytes
//! out.
//!
//! *What it is.* The owner of a [`Session`] receives into [`Session::target`], reports with [`Session::received`], takes
//! commands from [`Session::next_command`] until there is none, answers each with [`Session::complete`], and sends what
//! [`Session::output`] holds. A session can move between cores at any time.
//!
//! *Flow of a command.* whole capsule → slot → (buffer → R2T → H2CData | data left where it is | buffer) → [`Session::next_command`] →
//! [`Session::complete`] → (C2HData) → response. One R2T per command covers all of its data.
//!
//! *Invariants.* At most as many commands are outstanding as the queue is deep. Commands that wait for a buffer get one
//! in the order of their arrival, as long as the session holds no more of them than are free. Nothing is parsed while
//! more than [`OUTPUT_BYTES_MAX`] wait for the socket.
//!
//! *When things fail.* A peer that breaks the protocol gets a termination request: [`Fault::Terminated`]; nothing more
//! is parsed, and the owner waits for the peer to close. A wrong data digest fails its command only. More commands
//! than the queue is deep, or a termination request from the host, end the connection at once: [`Fault::Broken`].

mod rx;
mod slots;
#[cfg(test)]
pub(super) mod tests;
mod tx;

use std::collections::VecDeque;

use addax_hugepages::{BufPool, BufSlice};
use nvme_wire::command::{Direction, opcode};
use nvme_wire::pdu::{C2hData, DIGEST_SIZE, DataDigest, Fes, H2cData, MAX_HEADER_SIZE, R2t};
use nvme_wire::{Cqe, Decoded, Layout, Link, Pdu, Role, Sgl, Sqe, Status, TermError};

pub use rx::Input;
use slots::{Slots, Stage};
pub use tx::{Output, Pieces};

/// Output beyond which no further command is taken from the input.
pub const OUTPUT_BYTES_MAX: usize = 4 << 20;
/// Rest of a payload from which on it is received straight into the command's buffer.
const DIRECT_BYTES_MIN: u32 = 4096;

/// Bytes of the longest capsule: header, padding to the largest alignment, data of an admin command, digests.
const CAPSULE_BYTES_MAX: usize = MAX_HEADER_SIZE + 4 + 128 + (8 << 10) + 4;
/// Bytes received at once while data that an R2T asked for is on its way.
const INPUT_BESIDE_DATA: usize = 1 << 10;

/// What the transport allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Commands outstanding before a Connect has said how deep the queue is.
    pub depth: u16,
    /// Bytes of one command's data.
    pub max_io: u32,
    /// Bytes of in-capsule data of I/O commands.
    pub in_capsule: u32,
    /// The same for admin and Fabrics commands.
    pub in_capsule_control: u32,
    /// Whether a successful read may do without a response capsule.
    pub c2h_success: bool,
}

/// What kind of queue the connection carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Queue {
    /// No Connect has succeeded yet.
    None,
    Admin,
    Io,
}

/// Where to receive to.
#[derive(Debug)]
pub enum Target<'a> {
    /// Plain memory.
    Scratch(&'a mut [u8]),
    /// Straight into a command's buffer, and what comes after it into plain memory.
    Payload(BufSlice, &'a mut [u8]),
    /// Nothing is to be received now: too much output is waiting.
    Paused,
}

/// Why a session takes no more commands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// A termination request was queued; the peer is to close.
    Terminated(TermError),
    /// The connection is to be closed at once.
    Broken(Reason),
}

/// Why a connection is closed without a termination request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Reason {
    #[error("the host sent a termination request: {0}")]
    PeerTerminated(TermError),
    #[error("the host sent more commands than the queue is deep")]
    Overrun,
    #[error("the target closes the queue")]
    Stopped,
}

/// The answer to a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Completion {
    pub status: Status,
    pub dw0: u32,
    pub dw1: u32,
}

impl Completion {
    /// A completion without a result.
    #[must_use]
    pub const fn status(status: Status) -> Self {
        Self { status, dw0: 0, dw1: 0 }
    }

    /// Success with a result in Dword 0.
    #[must_use]
    pub const fn dw0(dw0: u32) -> Self {
        Self { status: Status::SUCCESS, dw0, dw1: 0 }
    }
}

impl From<Status> for Completion {
    fn from(status: Status) -> Self {
        Self::status(status)
    }
}

/// Data of a PDU that is being received.
#[derive(Debug, Clone, Copy)]
struct Payload {
    slot: u16,
    /// Padding still to be skipped.
    skip: u32,
    /// Offset in the command's data of the PDU's data, and its length.
    start: u32,
    len: u32,
    /// Bytes received of it.
    got: u32,
    digest: bool,
}

/// One connection; see the module.
#[derive(Debug)]
pub struct Session {
    link: Link,
    limits: Limits,
    pool: BufPool,
    input: Input,
    output: Output,
    payload: Option<Payload>,
    slots: Slots,
    /// Bytes of the present target that lie in a command's buffer.
    direct: usize,
    /// Commands whose data was asked for by an R2T and has not come whole.
    receiving: u32,
    starved: VecDeque<u16>,
    ready: VecDeque<u16>,
    fault: Option<Fault>,
    /// Answers are dropped: nobody is to hear them.
    muted: bool,
    queue: Queue,
    flow_control: bool,
    sq_size: u16,
    sq_head: u16,
}

impl Session {
    /// A connection on which nothing was exchanged yet.
    #[must_use]
    pub fn new(limits: Limits, pool: BufPool) -> Self {
        Self {
            link: Link::new(Role::Controller),
            limits,
            pool,
            input: Input::with_room(),
            output: Output::default(),
            payload: None,
            slots: Slots::new(limits.depth),
            direct: 0,
            receiving: 0,
            starved: VecDeque::new(),
            ready: VecDeque::new(),
            fault: None,
            muted: false,
            queue: Queue::None,
            flow_control: true,
            sq_size: limits.depth,
            sq_head: 0,
        }
    }

    /// Moves the session out, to another core. What stays behind is stopped and empty.
    #[must_use]
    pub fn take(&mut self) -> Self {
        let husk = Self {
            link: self.link,
            limits: self.limits,
            pool: self.pool.clone(),
            input: Input::empty(),
            output: Output::default(),
            payload: None,
            slots: Slots::new(0),
            direct: 0,
            receiving: 0,
            starved: VecDeque::new(),
            ready: VecDeque::new(),
            fault: Some(Fault::Broken(Reason::Stopped)),
            muted: true,
            queue: Queue::None,
            flow_control: true,
            sq_size: self.sq_size,
            sq_head: self.sq_head,
        };
        std::mem::replace(self, husk)
    }

    /// Why no more commands are taken, if so.
    #[must_use]
    pub fn fault(&self) -> Option<Fault> {
        self.fault
    }

    /// Whether commands wait for buffers.
    #[must_use]
    pub fn is_starved(&self) -> bool {
        !self.starved.is_empty()
    }

    /// Whether so much output waits that no command is taken.
    #[must_use]
    pub fn is_clogged(&self) -> bool {
        self.output.bytes() > OUTPUT_BYTES_MAX
    }

    /// Commands given out by [`Self::next_command`] and not completed.
    #[must_use]
    pub fn executing(&self) -> usize {
        self.slots.used().filter(|(index, s)| s.stage == Stage::Executing && !self.ready.contains(index)).count()
    }

    /// What is to be sent.
    pub fn output(&mut self) -> &mut Output {
        &mut self.output
    }

    /// The command in a slot.
    #[must_use]
    pub fn sqe(&self, slot: u16) -> &Sqe {
        &self.slots.get(slot).sqe
    }

    /// Bytes that it moves.
    #[must_use]
    pub fn transfer_len(&self, slot: u16) -> u32 {
        self.slots.get(slot).len
    }

    /// Its data: what was received, or where to put what is to be sent. `None` when it has none.
    #[must_use]
    pub fn data(&self, slot: u16) -> Option<&BufSlice> {
        self.slots.get(slot).data.as_ref()
    }

    /// Puts other data in the place of what a read would have filled; false when it is not as long.
    pub fn lend(&mut self, slot: u16, data: &BufSlice) -> bool {
        let slot = self.slots.get_mut(slot);
        let fits = slot.len as usize == data.len() && slot.direction == Direction::ControllerToHost;
        if fits {
            slot.data = Some(data.clone());
        }
        fits
    }

    /// Where to receive to.
    pub fn target(&mut self) -> Target<'_> {
        if self.fault.is_some() {
            // Only the end of the stream is of interest now.
            self.input.clear();
            return Target::Scratch(self.input.space());
        }
        if self.is_clogged() {
            return Target::Paused;
        }
        if let Some(payload) = self.payload.filter(|p| p.skip == 0 && p.len - p.got >= DIRECT_BYTES_MIN)
            && self.input.unread().is_empty()
            && let Some(data) = &self.slots.get(payload.slot).data
        {
            let (from, to) = (payload.start + payload.got, payload.start + payload.len);
            let rest = data.slice(from as usize..to as usize);
            self.direct = rest.len();
            return Target::Payload(rest, self.input.space());
        }
        let space = self.input.space();
        // What an R2T asked for is not to pass through the input: only the header that announces it.
        let most = if self.receiving > 0 { space.len().min(INPUT_BESIDE_DATA) } else { space.len() };
        Target::Scratch(&mut space[..most])
    }

    /// So many bytes were put where [`Self::target`] said.
    pub fn received(&mut self, count: usize) {
        let direct = std::mem::take(&mut self.direct).min(count);
        if let Some(payload) = &mut self.payload {
            payload.got += direct as u32;
        }
        self.input.filled(count - direct);
    }

    /// The next command to execute, from what was received.
    pub fn next_command(&mut self) -> Option<u16> {
        loop {
            if let Some(slot) = self.ready.pop_front() {
                return Some(slot);
            }
            if self.fault.is_some() || self.is_clogged() {
                return None;
            }
            match self.advance() {
                Ok(true) => {}
                Ok(false) => return None,
                Err(error) => self.terminate(error),
            }
        }
    }

    /// Parses one step; false when more bytes are needed.
    fn advance(&mut self) -> Result<bool, TermError> {
        if let Some(payload) = self.payload {
            return Ok(self.advance_payload(payload));
        }
        if let Some((sqe, layout)) = self.link.decode_command(self.input.unread()) {
            return self.take_capsule(&sqe, &layout);
        }
        match self.link.decode(self.input.unread())? {
            Decoded::Need(_) => Ok(false),
            Decoded::Header(Pdu::CapsuleCmd(sqe), layout) => self.take_capsule(&sqe, &layout),
            Decoded::Header(pdu, layout) => {
                self.take_pdu(&pdu, &layout)?;
                self.input.consume(layout.header_end as usize);
                Ok(true)
            }
        }
    }

    /// Takes a command capsule once all of it is there; false when more bytes are needed.
    fn take_capsule(&mut self, sqe: &Sqe, layout: &Layout) -> Result<bool, TermError> {
        let whole = layout.plen as usize;
        // A longer one is refused for its length, below.
        if self.input.unread().len() < whole && whole <= CAPSULE_BYTES_MAX {
            return Ok(false);
        }
        self.take_command(sqe, layout)?;
        self.input.consume(whole);
        Ok(true)
    }

    fn take_pdu(&mut self, pdu: &Pdu, layout: &Layout) -> Result<(), TermError> {
        match pdu {
            Pdu::IcReq(request) => {
                let response = self.link.accept(request, self.limits.max_io);
                let header = self.link.encode(&Pdu::IcResp(response), 0);
                self.output.push_bytes(&header);
                Ok(())
            }
            Pdu::H2cData(data) => self.take_data(data, layout),
            Pdu::H2cTermReq(error) => {
                self.fault = Some(Fault::Broken(Reason::PeerTerminated(*error)));
                Ok(())
            }
            _ => Err(TermError::field(0)),
        }
    }

    fn take_command(&mut self, sqe: &Sqe, layout: &Layout) -> Result<(), TermError> {
        let Some(index) = self.slots.take(sqe) else {
            self.fault = Some(Fault::Broken(Reason::Overrun));
            return Ok(());
        };
        self.sq_head = if self.sq_head + 1 >= self.sq_size { 0 } else { self.sq_head + 1 };
        let direction = self.slots.get(index).direction;
        let moves_data = matches!(direction, Direction::HostToController | Direction::ControllerToHost);
        if !moves_data && layout.data_len == 0 {
            if direction == Direction::Bidirectional {
                self.slots.get_mut(index).verdict = Some(Status::INVALID_OPCODE);
            }
            self.make_ready(index);
            return Ok(());
        }
        let sgl = Sgl::parse(&sqe.dptr)?;
        let control = self.queue != Queue::Io || sqe.opcode == opcode::FABRICS;
        let in_capsule = if control { self.limits.in_capsule_control } else { self.limits.in_capsule };
        sgl.check(self.limits.max_io, in_capsule, layout.data_len)?;
        self.slots.get_mut(index).len = sgl.length();
        match sgl {
            // Data in the capsule that the command does not speak of.
            Sgl::Transport { .. } if layout.data_len > 0 => Err(TermError::field(4)),
            Sgl::InCapsule { length: 1.., .. } => {
                self.take_in_capsule(index, layout);
                Ok(())
            }
            Sgl::Transport { length: 1.. } if moves_data => {
                self.slots.get_mut(index).stage = Stage::Starved;
                self.starved.push_back(index);
                self.retry_buffers();
                Ok(())
            }
            _ => {
                self.make_ready(index);
                Ok(())
            }
        }
    }

    fn take_in_capsule(&mut self, index: u16, layout: &Layout) {
        let (from, to) = (layout.data_offset as usize, (layout.data_offset + layout.data_len) as usize);
        let data = self.input.part(from, to, &self.pool);
        let digest = self.input.unread().get(to..).and_then(|rest| rest.first_chunk::<DIGEST_SIZE>()).copied();
        let intact = !layout.data_digest || digest.is_some_and(|received| digest_of(&data).matches(received));
        let slot = self.slots.get_mut(index);
        slot.data = Some(data);
        slot.verdict = match slot.direction {
            Direction::ControllerToHost => Some(Status::INVALID_FIELD),
            Direction::Bidirectional => Some(Status::INVALID_OPCODE),
            Direction::HostToController | Direction::None if !intact => Some(Status::TRANSIENT_TRANSPORT_ERROR),
            Direction::HostToController | Direction::None => None,
        };
        self.make_ready(index);
    }

    fn begin_payload(&mut self, slot: u16, start: u32, layout: &Layout) {
        self.payload = Some(Payload {
            slot,
            skip: layout.data_offset - layout.header_end,
            start,
            len: layout.data_len,
            got: 0,
            digest: layout.data_digest,
        });
    }

    fn take_data(&mut self, data: &H2cData, layout: &Layout) -> Result<(), TermError> {
        let index = self.slots.by_tag(data.ttag).ok_or(TermError::sequence())?;
        let slot = self.slots.get(index);
        if slot.sqe.cid.get() != data.cid {
            return Err(TermError::sequence());
        }
        if slot.stage != Stage::Receiving {
            return Err(TermError::field(0));
        }
        if data.datao != slot.received || u64::from(data.datao) + u64::from(data.datal) > u64::from(slot.len) {
            return Err(TermError::new(Fes::DataOutOfRange, 0));
        }
        if data.datal > 0 {
            self.begin_payload(index, data.datao, layout);
        }
        Ok(())
    }

    /// Takes data of a PDU out of the input; false when more bytes are needed.
    fn advance_payload(&mut self, mut payload: Payload) -> bool {
        let skip = (payload.skip as usize).min(self.input.unread().len());
        self.input.consume(skip);
        payload.skip -= skip as u32;
        if payload.skip == 0 && payload.got < payload.len {
            let unread = self.input.unread();
            let count = unread.len().min((payload.len - payload.got) as usize);
            if let Some(data) = &self.slots.get(payload.slot).data {
                data.copy_from(&unread[..count], (payload.start + payload.got) as usize);
            }
            self.input.consume(count);
            payload.got += count as u32;
        }
        self.payload = Some(payload);
        if payload.got < payload.len {
            return false;
        }
        if payload.digest {
            let Some(digest) = self.input.unread().first_chunk::<DIGEST_SIZE>().copied() else { return false };
            self.input.consume(DIGEST_SIZE);
            self.check_digest(payload, digest);
        }
        self.payload = None;
        self.end_payload(payload);
        true
    }

    fn check_digest(&mut self, payload: Payload, received: [u8; DIGEST_SIZE]) {
        let slot = self.slots.get_mut(payload.slot);
        let Some(data) = &slot.data else { return };
        let range = payload.start as usize..(payload.start + payload.len) as usize;
        if !digest_of(&data.slice(range)).matches(received) {
            slot.verdict = Some(Status::TRANSIENT_TRANSPORT_ERROR);
        }
    }

    fn end_payload(&mut self, payload: Payload) {
        let slot = self.slots.get_mut(payload.slot);
        slot.received += payload.len;
        if slot.received >= slot.len {
            if slot.stage == Stage::Receiving {
                self.receiving -= 1;
            }
            slot.stage = Stage::Executing;
            self.make_ready(payload.slot);
        }
    }

    /// The command has all it needs: it is given out, or answered when the answer is certain.
    fn make_ready(&mut self, index: u16) {
        match self.slots.get(index).verdict {
            Some(status) => self.complete(index, status.into()),
            None => self.ready.push_back(index),
        }
    }

    /// Gives buffers to the commands that wait for them, in order. True when one got its buffer.
    pub fn retry_buffers(&mut self) -> bool {
        let mut any = false;
        while let Some(index) = self.starved.front().copied() {
            let len = self.slots.get(index).len as usize;
            // A queue has no more buffers than are left for others: a slow device cannot take them all.
            if self.slots.pooled() > self.pool.free(len) {
                break;
            }
            let Some(buf) = self.pool.take(len) else { break };
            self.starved.pop_front();
            any = true;
            self.slots.give(index, buf.into_slice());
            let len = len as u32;
            let slot = self.slots.get_mut(index);
            if slot.direction == Direction::ControllerToHost {
                slot.stage = Stage::Executing;
                self.make_ready(index);
                continue;
            }
            slot.stage = Stage::Receiving;
            self.receiving += 1;
            let r2t = R2t { cid: slot.sqe.cid.get(), ttag: index + 1, r2to: 0, r2tl: len };
            let header = self.link.encode(&Pdu::R2t(r2t), 0);
            self.output.push_bytes(&header);
        }
        any
    }

    fn terminate(&mut self, error: TermError) {
        let unread = self.input.unread();
        let hlen = unread.get(2).map_or(0, |len| usize::from(*len));
        let offending = &unread[..hlen.min(unread.len()).min(MAX_HEADER_SIZE)];
        let header = self.link.encode_term(error, offending);
        self.output.push_bytes(&header);
        self.fault = Some(Fault::Terminated(error));
        self.muted = true;
        self.drop_unstarted();
    }

    /// Takes no more commands and forgets those that were not given out. What executes is still to be completed, and
    /// is answered.
    pub fn drain(&mut self) {
        if self.fault.is_none() {
            self.fault = Some(Fault::Broken(Reason::Stopped));
        }
        self.drop_unstarted();
    }

    /// As [`Self::drain`], and sends nothing any more.
    pub fn stop(&mut self) {
        self.drain();
        self.muted = true;
        self.output.clear();
    }

    fn drop_unstarted(&mut self) {
        self.payload = None;
        self.direct = 0;
        self.receiving = 0;
        self.starved.clear();
        let ready = std::mem::take(&mut self.ready);
        let unstarted = |(index, slot): (u16, &slots::Slot)| {
            (slot.stage != Stage::Executing || ready.contains(&index)).then_some(index)
        };
        let drop: Vec<u16> = self.slots.used().filter_map(unstarted).collect();
        for index in drop {
            self.slots.release(index);
        }
    }

    /// Answers a command. Its slot is free afterwards.
    pub fn complete(&mut self, index: u16, completion: Completion) {
        let sqhd = if self.flow_control { self.sq_head } else { 0 };
        self.complete_with(index, completion, sqhd);
    }

    /// Answers a Connect: the connection becomes a queue of `sqsize` + 1 entries.
    pub fn complete_connect(&mut self, index: u16, admin: bool, sqsize: u16, flow_control: bool, dw0: u32) {
        self.queue = if admin { Queue::Admin } else { Queue::Io };
        self.flow_control = flow_control;
        self.sq_size = sqsize.saturating_add(1);
        self.sq_head %= self.sq_size;
        self.slots.set_depth(self.sq_size);
        let sqhd = if flow_control { self.sq_head } else { nvme_wire::fabrics::SQHD_NO_FLOW_CONTROL };
        self.complete_with(index, Completion::dw0(dw0), sqhd);
    }

    fn complete_with(&mut self, index: u16, completion: Completion, sqhd: u16) {
        let slot = self.slots.get_mut(index);
        let (cid, direction, data) = (slot.sqe.cid.get(), slot.direction, slot.data.take());
        self.slots.release(index);
        if self.muted {
            return;
        }
        let Completion { status, dw0, dw1 } = completion;
        if status.is_success()
            && direction == Direction::ControllerToHost
            && let Some(data) = data
        {
            let success = self.limits.c2h_success && !self.flow_control && dw0 == 0 && dw1 == 0;
            self.send_data(cid, data, success);
            if success {
                return;
            }
        }
        let mut cqe = Cqe::new(cid, sqhd, status).with_dw0(dw0);
        cqe.dw1 = dw1.into();
        match self.link.encode_response(&cqe) {
            Some(header) => self.output.push_bytes(&header),
            None => self.output.push_bytes(&self.link.encode(&Pdu::CapsuleResp(cqe), 0)),
        }
    }

    fn send_data(&mut self, cid: u16, data: BufSlice, success: bool) {
        let datal = data.len() as u32;
        let pdu = C2hData { cid, datao: 0, datal, last: true, success };
        match self.link.encode_c2h_data(&pdu) {
            Some(header) => self.output.push_bytes(&header),
            None => self.output.push_bytes(&self.link.encode(&Pdu::C2hData(pdu), datal)),
        }
        let digest = self.link.data_digest().then(|| digest_of(&data).to_bytes());
        self.output.push_payload(data);
        if let Some(digest) = digest {
            self.output.push_bytes(&digest);
        }
    }

    /// Aborts a command that has not begun to execute; false when there is none of that kind.
    pub fn abort(&mut self, cid: u16) -> bool {
        let found = self.slots.used().find(|(_, s)| s.sqe.cid.get() == cid && s.stage == Stage::Starved);
        let Some((index, _)) = found else { return false };
        self.starved.retain(|i| *i != index);
        self.complete(index, Status::ABORTED_BY_REQUEST.into());
        true
    }
}

fn digest_of(data: &BufSlice) -> DataDigest {
    let mut digest = DataDigest::new();
    data.for_each_chunk(|chunk| digest.update(chunk));
    digest
}
