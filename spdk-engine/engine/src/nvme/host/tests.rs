//! Tests of the queue pair against a small controller that moves data in odd pieces, and against one that lies.

#![allow(clippy::unwrap_used)]

use addax_hugepages::{Buf, BufSlice};
use nvme_wire::command::{BlockRange, opcode};
use nvme_wire::pdu::{C2hData, DataDigest, Fes, R2t};
use nvme_wire::{Cqe, Decoded, IoCommand, Link, Pdu, Role, Sgl, Sqe, Status};
use proptest::prelude::*;

use super::data::Data;
use super::qpair::{Command, Completion, Fault, Params, Qpair, Target};
use super::slots::{Busy, Slots};
use crate::reactor::disk::Bufs;
use crate::reactor::driver::Nanos;
use crate::reactor::net::Piece;

fn params(digest: bool) -> Params {
    Params { depth: 8, in_capsule: 1024, header_digest: digest, data_digest: digest }
}

fn pattern(seed: usize, len: usize) -> Vec<u8> {
    (0..len).map(|i| (i.wrapping_mul(31) + seed * 17 + i / 251) as u8).collect()
}

/// Two buffers, so that parts cross the seam.
fn bufs(bytes: &[u8]) -> Bufs {
    let (a, b) = bytes.split_at(bytes.len() / 3);
    [a, b].into_iter().filter(|p| !p.is_empty()).map(|p| Buf::copy_of(p).into_slice()).collect()
}

fn bytes_of(bufs: &[BufSlice]) -> Vec<u8> {
    bufs.iter().flat_map(|b| b.to_vec()).collect()
}

/// Takes at most `most` bytes of output.
fn take(qpair: &mut Qpair, most: usize) -> Vec<u8> {
    let mut all = Vec::new();
    for piece in qpair.output().pieces() {
        match piece {
            Piece::Bytes(b) => all.extend_from_slice(b),
            Piece::Memory(m) => all.extend_from_slice(&m.to_vec()),
        }
    }
    all.truncate(most);
    qpair.output().sent(all.len());
    all
}

fn take_all(qpair: &mut Qpair) -> Vec<u8> {
    let mut all = Vec::new();
    while !qpair.output().is_empty() {
        all.extend(take(qpair, usize::MAX));
    }
    all
}

/// Gives `bytes` to the queue pair, at most `chunk` per receive.
fn give(qpair: &mut Qpair, mut bytes: &[u8], chunk: usize) -> Vec<Completion> {
    let mut ended = Vec::new();
    while !bytes.is_empty() {
        let offered = &bytes[..chunk.min(bytes.len())];
        let count = match qpair.target() {
            Target::Scratch(space) => {
                let count = offered.len().min(space.len());
                space[..count].copy_from_slice(&offered[..count]);
                count
            }
            Target::Payload(part, space) => {
                let direct = offered.len().min(part.len());
                part.copy_from(&offered[..direct], 0);
                let beyond = (offered.len() - direct).min(space.len());
                space[..beyond].copy_from_slice(&offered[direct..direct + beyond]);
                direct + beyond
            }
        };
        qpair.received(count);
        bytes = &bytes[count..];
        while let Some(completion) = qpair.next() {
            ended.push(completion);
        }
    }
    ended
}

/// A controller that keeps what is written in one array and moves data in pieces of `piece` bytes.
struct Peer {
    link: Link,
    max_h2c: u32,
    success: bool,
    piece: u32,
    disk: Vec<u8>,
    /// Write in progress per transfer tag: command, place, length, bytes received.
    writes: Vec<(u16, usize, u32, u32)>,
    input: Vec<u8>,
    output: Vec<u8>,
}

impl Peer {
    fn new(success: bool, piece: u32) -> Self {
        Self {
            link: Link::new(Role::Controller),
            max_h2c: 4096,
            success,
            piece,
            disk: vec![0; 1 << 20],
            writes: Vec::new(),
            input: Vec::new(),
            output: Vec::new(),
        }
    }

    fn send(&mut self, pdu: Pdu, data: &[u8]) {
        let header = self.link.encode(&pdu, data.len() as u32);
        self.output.extend_from_slice(header.as_bytes());
        self.output.extend_from_slice(data);
        if self.link.data_digest() && !data.is_empty() {
            let mut digest = DataDigest::new();
            digest.update(data);
            self.output.extend_from_slice(&digest.to_bytes());
        }
    }

    fn take_in(&mut self, bytes: &[u8]) {
        self.input.extend_from_slice(bytes);
        while let Decoded::Header(pdu, layout) = self.link.decode(&self.input).unwrap() {
            if self.input.len() < layout.plen as usize {
                return;
            }
            let (from, to) = (layout.data_offset as usize, (layout.data_offset + layout.data_len) as usize);
            let data = self.input[from..to].to_vec();
            if layout.data_digest {
                let mut digest = DataDigest::new();
                digest.update(&data);
                assert!(digest.matches(self.input[to..to + 4].try_into().unwrap()));
            }
            self.input.drain(..layout.plen as usize);
            self.handle(pdu, &data);
        }
    }

    fn handle(&mut self, pdu: Pdu, data: &[u8]) {
        match pdu {
            Pdu::IcReq(request) => {
                let response = self.link.accept(&request, self.max_h2c);
                self.link.encode(&Pdu::IcResp(response), 0).iter().for_each(|b| self.output.push(*b));
            }
            Pdu::CapsuleCmd(sqe) => self.command(&sqe, data),
            Pdu::H2cData(part) => {
                assert!(part.datal <= self.max_h2c);
                let write = &mut self.writes[usize::from(part.ttag)];
                assert_eq!((write.0, write.3), (part.cid, part.datao));
                write.3 += part.datal;
                let (cid, place, len, got) = *write;
                let at = place + part.datao as usize;
                self.disk[at..at + data.len()].copy_from_slice(data);
                if got == len {
                    assert!(part.last);
                    self.respond(cid, Status::SUCCESS);
                } else if part.last {
                    self.ask(usize::from(part.ttag));
                }
            }
            other => panic!("{other:?}"),
        }
    }

    fn respond(&mut self, cid: u16, status: Status) {
        self.send(Pdu::CapsuleResp(Cqe::new(cid, 0, status)), &[]);
    }

    /// Asks for the next piece of a write.
    fn ask(&mut self, tag: usize) {
        let (cid, _, len, got) = self.writes[tag];
        let r2tl = (len - got).min(self.piece * 3);
        self.send(Pdu::R2t(R2t { cid, ttag: tag as u16, r2to: got, r2tl }), &[]);
    }

    fn command(&mut self, sqe: &Sqe, data: &[u8]) {
        let cid = sqe.cid.get();
        let len = Sgl::parse(&sqe.dptr).unwrap().length();
        match IoCommand::parse(sqe).unwrap() {
            IoCommand::Write(range) => {
                let place = range.slba as usize * 512;
                if !data.is_empty() {
                    assert_eq!(data.len(), len as usize);
                    self.disk[place..place + data.len()].copy_from_slice(data);
                    return self.respond(cid, Status::SUCCESS);
                }
                self.writes.push((cid, place, len, 0));
                self.ask(self.writes.len() - 1);
            }
            IoCommand::Read(range) => {
                let place = range.slba as usize * 512;
                let mut datao = 0;
                while datao < len {
                    let datal = self.piece.min(len - datao);
                    let last = datao + datal == len;
                    let part = self.disk[place + datao as usize..place + (datao + datal) as usize].to_vec();
                    let success = last && self.success;
                    self.send(Pdu::C2hData(C2hData { cid, datao, datal, last, success }), &part);
                    datao += datal;
                }
                if !self.success {
                    self.respond(cid, Status::SUCCESS);
                }
            }
            _ => self.respond(cid, Status::SUCCESS),
        }
    }
}

fn range(slba: u64, bytes: usize) -> BlockRange {
    BlockRange::new(slba, (bytes / 512).max(1) as u32)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    /// What is written comes back, whatever the digests, sizes of pieces and cuts of the stream are.
    #[test]
    fn data_survives_every_framing(
        digest in any::<bool>(),
        success in any::<bool>(),
        piece in 1u32..40,
        chunk in 1usize..9000,
        sizes in prop::collection::vec(1usize..60, 1..6),
    ) {
        let mut qpair = Qpair::new(params(digest));
        let mut peer = Peer::new(success, piece * 512);
        let mut exchange = |qpair: &mut Qpair| {
            let mut ended = Vec::new();
            loop {
                let out = take(qpair, chunk);
                let answer = std::mem::take(&mut peer.output);
                if out.is_empty() && answer.is_empty() && qpair.output().is_empty() {
                    return ended;
                }
                peer.take_in(&out);
                ended.extend(give(qpair, &answer, chunk));
            }
        };
        exchange(&mut qpair);
        prop_assert!(qpair.is_ready());
        for (tag, blocks) in sizes.iter().enumerate() {
            let written = pattern(tag, blocks * 512);
            let sqe = IoCommand::Write(range(tag as u64 * 64, written.len())).to_sqe(0, 1, Sgl::NONE);
            qpair.submit(Command { sqe, data: Data::Send(bufs(&written)) }, tag as u64, Nanos::MAX).unwrap();
        }
        let mut ended: Vec<u64> = exchange(&mut qpair).iter().map(|c| {
            assert!(c.cqe.status().is_success());
            c.tag
        }).collect();
        ended.sort_unstable();
        prop_assert_eq!(ended, (0..sizes.len() as u64).collect::<Vec<_>>());
        let read: Vec<Bufs> = sizes.iter().map(|blocks| bufs(&vec![0; blocks * 512])).collect();
        for (tag, into) in read.iter().enumerate() {
            let sqe = IoCommand::Read(range(tag as u64 * 64, sizes[tag] * 512)).to_sqe(0, 1, Sgl::NONE);
            qpair.submit(Command { sqe, data: Data::Receive(into.clone()) }, tag as u64, 7).unwrap();
        }
        prop_assert!(qpair.slots().has_deadlines() && qpair.slots().expired(7) && !qpair.slots().expired(6));
        let ended = exchange(&mut qpair);
        prop_assert!(ended.iter().all(|c| c.cqe.status().is_success()) && ended.len() == sizes.len());
        for (tag, into) in read.iter().enumerate() {
            prop_assert_eq!(bytes_of(into), pattern(tag, sizes[tag] * 512));
        }
        prop_assert!(qpair.slots().used() == 0 && !qpair.slots().has_deadlines() && qpair.fault().is_none());
    }

    /// Identifiers of outstanding commands are unique, and those of ended ones name nothing.
    #[test]
    fn identifiers_are_never_stale(depth in 1u16..70, steps in prop::collection::vec((any::<bool>(), any::<u16>()), 1..400)) {
        let mut slots = Slots::new(depth);
        let mut open: Vec<(u16, u64)> = Vec::new();
        let mut closed: Vec<u16> = Vec::new();
        for (tag, (submit, pick)) in steps.into_iter().enumerate() {
            if submit {
                let busy = Busy { tag: tag as u64, deadline: 1, data: Data::None, len: 0, moved: 0, corrupt: false };
                match slots.take(busy) {
                    Ok(cid) => {
                        prop_assert!(open.iter().all(|(other, _)| *other != cid));
                        closed.retain(|old| *old != cid);
                        open.push((cid, tag as u64));
                    }
                    Err(_) => prop_assert_eq!(open.len(), usize::from(depth)),
                }
            } else if !open.is_empty() {
                let (cid, tag) = open.remove(usize::from(pick) % open.len());
                prop_assert_eq!(slots.end(cid).unwrap().tag, tag);
                closed.push(cid);
            }
            prop_assert!(closed.iter().rev().take(5).all(|old| slots.get(*old).is_none()));
            prop_assert_eq!(slots.used(), open.len());
        }
    }

    /// Bytes of any kind end in a fault or in waiting for more, never in a panic.
    #[test]
    fn garbage_does_no_harm(bytes in prop::collection::vec(any::<u8>(), 0..400), ready in any::<bool>(), kind in 0u8..10) {
        let (mut qpair, _) = if ready { opened(false) } else { (Qpair::new(params(false)), Vec::new()) };
        if ready {
            let _ = read(&mut qpair, 512, 1);
        }
        let mut bytes = bytes;
        if let Some(first) = bytes.first_mut() {
            *first = kind;
        }
        let _ = give(&mut qpair, &bytes, 97);
    }
}

/// A queue pair that is ready, and a controller's end of the link.
fn opened(digest: bool) -> (Qpair, Vec<Link>) {
    let mut qpair = Qpair::new(params(digest));
    let mut peer = Peer::new(false, 512);
    peer.take_in(&take_all(&mut qpair));
    let answer = std::mem::take(&mut peer.output);
    assert!(give(&mut qpair, &answer, 5).is_empty());
    assert!(qpair.is_ready());
    (qpair, vec![peer.link])
}

fn sent_cid(qpair: &mut Qpair, link: &Link) -> u16 {
    let out = take_all(qpair);
    let mut decoder = Link::new(Role::Controller);
    let request = nvme_wire::pdu::IcReq {
        header_digest: link.header_digest(),
        data_digest: link.data_digest(),
        ..Default::default()
    };
    decoder.accept(&request, 4096);
    match decoder.decode(&out).unwrap() {
        Decoded::Header(Pdu::CapsuleCmd(sqe), _) => sqe.cid.get(),
        other => panic!("{other:?}"),
    }
}

fn read(qpair: &mut Qpair, len: usize, tag: u64) -> Bufs {
    let into = bufs(&vec![0; len]);
    let sqe = IoCommand::Read(range(0, len)).to_sqe(0, 1, Sgl::NONE);
    qpair.submit(Command { sqe, data: Data::Receive(into.clone()) }, tag, Nanos::MAX).unwrap();
    into
}

fn write(qpair: &mut Qpair, len: usize) {
    let sqe = IoCommand::Write(range(0, len)).to_sqe(0, 1, Sgl::NONE);
    qpair.submit(Command { sqe, data: Data::Send(bufs(&pattern(1, len))) }, 1, Nanos::MAX).unwrap();
}

fn pdu(link: &Link, pdu: Pdu, data: &[u8]) -> Vec<u8> {
    let mut out = link.encode(&pdu, data.len() as u32).to_vec();
    out.extend_from_slice(data);
    out
}

fn expect_fault(qpair: &mut Qpair, bytes: &[u8], fes: Fes) {
    assert!(give(qpair, bytes, 1000).is_empty());
    assert!(matches!(qpair.fault(), Some(Fault::Terminated(error)) if error.fes == fes), "{:?}", qpair.fault());
    assert_eq!(take_all(qpair)[0], 2, "a termination request is sent");
    let sqe = Sqe::new(opcode::io::FLUSH, 0, 1, Sgl::NONE);
    assert!(qpair.submit(Command::plain(sqe), 1, 1).is_err());
}

#[test]
fn a_stale_or_repeated_answer_is_a_protocol_error() {
    let (mut qpair, link) = opened(false);
    read(&mut qpair, 512, 5);
    let cid = sent_cid(&mut qpair, &link[0]);
    let answer = pdu(&link[0], Pdu::CapsuleResp(Cqe::new(cid, 0, Status::INTERNAL_ERROR)), &[]);
    let ended = give(&mut qpair, &answer, 3);
    assert_eq!((ended.len(), ended[0].tag, ended[0].cqe.status()), (1, 5, Status::INTERNAL_ERROR));
    // The slot is used again; the old identifier must not end the new command.
    read(&mut qpair, 512, 6);
    assert_ne!(sent_cid(&mut qpair, &link[0]), cid);
    expect_fault(&mut qpair, &answer, Fes::InvalidHeaderField);
}

#[test]
fn data_out_of_place_is_a_protocol_error() {
    let data = |cid, datao, datal| Pdu::C2hData(C2hData { cid, datao, datal, last: false, success: false });
    for (datao, datal) in [(512, 512), (0, 1536), (4, 4)] {
        let (mut qpair, link) = opened(false);
        read(&mut qpair, 1024, 1);
        let cid = sent_cid(&mut qpair, &link[0]);
        let bytes = pdu(&link[0], data(cid, datao, datal), &vec![1; datal as usize]);
        expect_fault(&mut qpair, &bytes, Fes::DataOutOfRange);
    }
    // Data for a command that sends.
    let (mut qpair, link) = opened(false);
    write(&mut qpair, 4096);
    let cid = sent_cid(&mut qpair, &link[0]);
    expect_fault(&mut qpair, &pdu(&link[0], data(cid, 0, 512), &[1; 512]), Fes::InvalidHeaderField);
}

#[test]
fn a_request_for_data_that_is_not_there_is_a_protocol_error() {
    for (r2to, r2tl) in [(0, 8192), (512, 512), (0, 0), (4096, 4)] {
        let (mut qpair, link) = opened(false);
        write(&mut qpair, 4096);
        let cid = sent_cid(&mut qpair, &link[0]);
        let bytes = pdu(&link[0], Pdu::R2t(R2t { cid, ttag: 1, r2to, r2tl }), &[]);
        expect_fault(&mut qpair, &bytes, Fes::DataOutOfRange);
    }
    let (mut qpair, link) = opened(false);
    write(&mut qpair, 512);
    let cid = sent_cid(&mut qpair, &link[0]);
    // It was in the capsule.
    let bytes = pdu(&link[0], Pdu::R2t(R2t { cid, ttag: 1, r2to: 0, r2tl: 512 }), &[]);
    expect_fault(&mut qpair, &bytes, Fes::DataOutOfRange);
}

#[test]
fn success_without_all_of_the_data_is_no_success() {
    let (mut qpair, link) = opened(false);
    read(&mut qpair, 1024, 1);
    let cid = sent_cid(&mut qpair, &link[0]);
    let half = Pdu::C2hData(C2hData { cid, datao: 0, datal: 512, last: true, success: true });
    let ended = give(&mut qpair, &pdu(&link[0], half, &[1; 512]), 100);
    assert_eq!(ended[0].cqe.status(), Status::DATA_TRANSFER_ERROR);
    write(&mut qpair, 4096);
    let cid = sent_cid(&mut qpair, &link[0]);
    let ended = give(&mut qpair, &pdu(&link[0], Pdu::CapsuleResp(Cqe::new(cid, 0, Status::SUCCESS)), &[]), 100);
    assert_eq!(ended[0].cqe.status(), Status::DATA_TRANSFER_ERROR);
    assert!(qpair.fault().is_none());
}

#[test]
fn a_wrong_data_digest_fails_its_command_only() {
    let (mut qpair, link) = opened(true);
    read(&mut qpair, 512, 9);
    let cid = sent_cid(&mut qpair, &link[0]);
    let data = Pdu::C2hData(C2hData { cid, datao: 0, datal: 512, last: true, success: true });
    let mut bytes = pdu(&link[0], data, &[1; 512]);
    bytes.extend_from_slice(&[0; 4]);
    let ended = give(&mut qpair, &bytes, 77);
    assert_eq!((ended[0].tag, ended[0].cqe.status()), (9, Status::TRANSIENT_TRANSPORT_ERROR));
    assert!(qpair.is_ready());
}

#[test]
fn the_controllers_termination_is_reported() {
    let (mut qpair, link) = opened(false);
    let request = link[0].encode_term(nvme_wire::TermError::sequence(), &[0; 24]);
    assert!(give(&mut qpair, &request, 7).is_empty());
    assert!(matches!(qpair.fault(), Some(Fault::PeerTerminated(error)) if error.fes == Fes::SequenceError));
}

#[test]
fn digests_that_are_not_done_are_refused() {
    let mut qpair = Qpair::new(params(true));
    take_all(&mut qpair);
    let mut link = Link::new(Role::Controller);
    let response = link.accept(&nvme_wire::pdu::IcReq::default(), 4096);
    let bytes = link.encode(&Pdu::IcResp(response), 0).to_vec();
    give(&mut qpair, &bytes, 128);
    assert_eq!(qpair.fault(), Some(Fault::NoDigest));
}

#[test]
fn the_controllers_alignment_is_kept() {
    let mut qpair = Qpair::new(params(false));
    take_all(&mut qpair);
    let link = Link::new(Role::Controller);
    let response = nvme_wire::pdu::IcResp { cpda: 31, maxh2cdata: 4096, ..Default::default() };
    give(&mut qpair, &link.encode(&Pdu::IcResp(response), 0), 9);
    write(&mut qpair, 512);
    let out = take_all(&mut qpair);
    assert_eq!((out[3], out.len()), (128, 128 + 512));
    assert_eq!(out[128..], pattern(1, 512));
}

#[test]
fn no_more_commands_than_slots() {
    let (mut qpair, _) = opened(false);
    for tag in 0..8 {
        read(&mut qpair, 512, tag);
    }
    let sqe = Sqe::new(opcode::io::FLUSH, 0, 1, Sgl::NONE);
    assert!(qpair.submit(Command::plain(sqe), 1, 1).is_err());
}
