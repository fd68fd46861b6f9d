//! Whatever the network makes of the bytes, every command is executed and answered once, with the right data.

use std::collections::HashMap;

use nvme_wire::command::opcode::io;
use nvme_wire::{Sgl, Sqe};
use proptest::prelude::*;

use super::super::{Completion, Session};
use super::host::{Got, Host, command, receive};

/// One command of the script.
#[derive(Debug, Clone)]
enum Op {
    Flush,
    /// Data in the capsule.
    WriteInCapsule(usize),
    /// Data by H2CData PDUs of at most so many bytes.
    WriteByR2t(usize, usize),
    Read(usize),
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        Just(Op::Flush),
        (1usize..9).prop_map(|n| Op::WriteInCapsule(n * 512)),
        (1usize..65, 1usize..40).prop_map(|(n, part)| Op::WriteByR2t(n * 512, part * 500)),
        (1usize..65).prop_map(|n| Op::Read(n * 512)),
    ]
}

fn pattern(cid: u16, len: usize) -> Vec<u8> {
    (0..len).map(|i| (i as u32 * 31 + u32::from(cid) * 7 + 1) as u8).collect()
}

struct Run {
    host: Host,
    session: Session,
    /// Bytes on their way, and how many of them were delivered.
    wire: Vec<u8>,
    delivered: usize,
    script: HashMap<u16, Op>,
    executed: HashMap<u16, u32>,
    answered: HashMap<u16, u32>,
}

impl Run {
    fn send(&mut self, cid: u16, op: Op) {
        let bytes = match &op {
            Op::Flush => self.host.capsule(&command(io::FLUSH, cid, 0), &[]),
            Op::WriteInCapsule(len) => {
                let sqe = Sqe::new(io::WRITE, cid, 1, Sgl::in_capsule(*len as u32));
                self.host.capsule(&sqe, &pattern(cid, *len))
            }
            Op::WriteByR2t(len, _) => self.host.capsule(&command(io::WRITE, cid, *len as u32), &[]),
            Op::Read(len) => self.host.capsule(&command(io::READ, cid, *len as u32), &[]),
        };
        self.wire.extend(bytes);
        self.script.insert(cid, op);
    }

    /// Delivers at most `chunk` bytes and handles all that follows from them.
    fn deliver(&mut self, chunk: usize) {
        let wire = &self.wire[self.delivered..];
        let offered = chunk.min(wire.len());
        self.delivered += receive(&mut self.session, &wire[..offered]);
        while let Some(slot) = self.session.next_command() {
            self.execute(slot);
        }
        assert_eq!(self.session.fault(), None);
        for got in self.host.collect(&mut self.session) {
            self.hear(got);
        }
    }

    fn execute(&mut self, slot: u16) {
        let cid = self.session.sqe(slot).cid.get();
        *self.executed.entry(cid).or_default() += 1;
        match &self.script[&cid] {
            Op::Flush => {}
            Op::WriteInCapsule(len) | Op::WriteByR2t(len, _) => {
                assert_eq!(self.session.data(slot).unwrap().to_vec(), pattern(cid, *len));
            }
            Op::Read(len) => self.session.data(slot).unwrap().copy_from(&pattern(cid, *len), 0),
        }
        self.session.complete(slot, Completion::dw0(0));
    }

    fn hear(&mut self, got: Got) {
        match got {
            Got::R2t(r2t) => {
                let Op::WriteByR2t(len, part) = self.script[&r2t.cid] else { panic!("{r2t:?}") };
                assert_eq!((r2t.r2to, r2t.r2tl as usize), (0, len));
                let data = pattern(r2t.cid, len);
                for (index, piece) in data.chunks(part).enumerate() {
                    let at = index * part;
                    let last = at + piece.len() == len;
                    self.wire.extend(self.host.h2c(r2t.cid, r2t.ttag, at as u32, piece, last));
                }
            }
            Got::Data(c2h, data) => assert_eq!(data, pattern(c2h.cid, data.len())),
            Got::Response(cqe) => {
                assert!(cqe.status().is_success());
                *self.answered.entry(cqe.cid.get()).or_default() += 1;
            }
            other => panic!("{other:?}"),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn any_chunking(hpda in prop_oneof![Just(0u8), 0u8..32], header_digest: bool, data_digest: bool,
                    ops in prop::collection::vec(op(), 1..20),
                    chunks in prop::collection::vec(prop_oneof![1usize..20, 1usize..5000, 1usize..70_000], 1..20)) {
        let (host, session) = Host::connected(hpda, header_digest, data_digest);
        let mut run = Run {
            host, session, wire: Vec::new(), delivered: 0, script: HashMap::new(), executed: HashMap::new(),
            answered: HashMap::new(),
        };
        let total = ops.len();
        let mut ops = ops.into_iter().enumerate();
        let mut chunks = chunks.into_iter().cycle();
        // A host keeps at most as many commands outstanding as the queue takes.
        let mut sent = 0;
        while run.answered.len() < total {
            while sent - run.answered.len() < 8 && let Some((index, op)) = ops.next() {
                run.send(index as u16 + 1, op);
                sent += 1;
            }
            prop_assert!(run.delivered < run.wire.len(), "stuck with {} of {total} answered", run.answered.len());
            run.deliver(chunks.next().unwrap());
        }
        prop_assert!(run.executed.values().chain(run.answered.values()).all(|n| *n == 1));
        prop_assert_eq!(run.executed.len(), total);
        prop_assert_eq!(run.delivered, run.wire.len());
    }
}
