//! What ends a connection, case by case as SPDK does it.

use nvme_wire::command::opcode::{admin, io};
use nvme_wire::pdu::{Fes, TermError};
use nvme_wire::{Pdu, Sgl, Sqe, Status};

use super::super::{Fault, Reason, Session};
use super::host::{Got, Host, LIMITS, command, feed, pool};

/// Feeds bytes and gives the termination request that must follow.
fn term_of(host: &mut Host, session: &mut Session, bytes: &[u8]) -> (TermError, usize) {
    feed(session, bytes);
    while session.next_command().is_some() {}
    assert!(matches!(session.fault(), Some(Fault::Terminated(_))), "no termination: {:?}", session.fault());
    match host.collect(session).pop() {
        Some(Got::Term(error, quoted)) => (error, quoted),
        other => panic!("{other:?}"),
    }
}

fn fresh() -> (Host, Session) {
    Host::connected(0, false, false)
}

fn field(offset: u32) -> TermError {
    TermError::field(offset)
}

#[test]
fn initialisation() {
    for (name, at, value, expected) in [
        ("PFV", 8, 1, field(8)),
        ("HPDA", 10, 32, field(10)),
        ("PLEN", 4, 127, field(4)),
        ("HLEN", 2, 127, field(2)),
        ("type", 0, 0x04, TermError::sequence()),
    ] {
        let mut host = Host::new(0, false, false);
        let mut session = Session::new(LIMITS, pool(1, 1));
        let mut bytes = host.ic_req();
        bytes[at] = value;
        assert_eq!(term_of(&mut host, &mut session, &bytes).0, expected, "{name}");
    }
    let mut host = Host::new(3, true, true);
    let mut session = Session::new(LIMITS, pool(1, 1));
    feed(&mut session, &host.ic_req());
    session.next_command();
    assert_eq!(host.collect(&mut session), [Got::IcResp { cpda: 3, maxh2cdata: 131_072 }]);
    let again = Host::new(3, true, true).ic_req();
    assert_eq!(term_of(&mut host, &mut session, &again).0, TermError::sequence(), "second ICReq");
}

#[test]
fn common_header() {
    for (name, at, value, expected) in [
        ("unknown type", 0, 0x0A, field(0)),
        ("a type that only targets send", 0, 0x07, field(0)),
        ("HLEN", 2, 71, field(2)),
        ("PLEN below the header", 4, 71, field(4)),
    ] {
        let (mut host, mut session) = fresh();
        let mut bytes = host.capsule(&command(io::FLUSH, 1, 0), &[]);
        bytes[at] = value;
        let (error, quoted) = term_of(&mut host, &mut session, &bytes);
        assert_eq!((error, quoted), (expected, usize::from(bytes[2])), "{name}");
    }
}

#[test]
fn data_alignment() {
    let (mut host, mut session) = Host::connected(3, false, false);
    let mut bytes = host.capsule(&Sqe::new(io::WRITE, 1, 1, Sgl::in_capsule(512)), &[7; 512]);
    assert_eq!(bytes[3] % 16, 0);
    bytes[3] -= 4;
    assert_eq!(term_of(&mut host, &mut session, &bytes).0, field(3));
}

#[test]
fn header_digest() {
    let (mut host, mut session) = Host::connected(0, true, false);
    let mut bytes = host.capsule(&command(io::FLUSH, 1, 0), &[]);
    bytes[72] ^= 1;
    assert_eq!(term_of(&mut host, &mut session, &bytes).0.fes, Fes::HeaderDigest);
}

#[test]
fn transfers_and_their_limits() {
    let in_capsule = |len: u32, offset: u64| {
        let mut sqe = Sqe::new(io::WRITE, 1, 1, Sgl::NONE);
        sqe.dptr = Sgl::InCapsule { offset, length: len }.encode();
        sqe
    };
    let mut keyed = command(io::READ, 1, 512);
    keyed.dptr[15] = 0x40;
    let rows: Vec<(&str, Sqe, usize, Fes, Option<u32>)> = vec![
        ("read beyond the limit", command(io::READ, 1, 131_584), 0, Fes::LimitExceeded, None),
        ("write beyond the limit", command(io::WRITE, 1, 131_584), 0, Fes::LimitExceeded, None),
        ("in-capsule data beyond the limit", in_capsule(8192, 0), 8192, Fes::LimitExceeded, None),
        ("in-capsule offset", in_capsule(512, 16), 512, Fes::UnsupportedParameter, None),
        ("SGL type", keyed, 0, Fes::UnsupportedParameter, Some(40)),
        ("less in-capsule data than described", in_capsule(1024, 0), 512, Fes::InvalidHeaderField, Some(4)),
        ("data beside a transport descriptor", command(io::WRITE, 1, 512), 512, Fes::InvalidHeaderField, Some(4)),
    ];
    for (name, sqe, data, fes, fei) in rows {
        let (mut host, mut session) = fresh();
        io_queue(&mut host, &mut session);
        let bytes = host.capsule(&sqe, &vec![1; data]);
        let (error, quoted) = term_of(&mut host, &mut session, &bytes);
        assert_eq!((error.fes, quoted), (fes, 72), "{name}");
        assert!(fei.is_none_or(|fei| fei == error.fei), "{name}: {error}");
    }
}

/// Makes the connection an I/O queue.
fn io_queue(host: &mut Host, session: &mut Session) {
    feed(session, &host.capsule(&command(io::FLUSH, 99, 0), &[]));
    let slot = session.next_command().unwrap();
    session.complete_connect(slot, false, 7, true, 0);
    host.collect(session);
}

#[test]
fn admin_commands_may_carry_more_in_the_capsule() {
    let (host, mut session) = fresh();
    feed(&mut session, &host.capsule(&Sqe::new(admin::SET_FEATURES, 1, 0, Sgl::in_capsule(8192)), &[3; 8192]));
    let slot = session.next_command().unwrap();
    assert_eq!(session.data(slot).unwrap().to_vec(), vec![3; 8192]);
}

#[test]
fn data_for_commands() {
    // (name, cid, tag delta, offset, length, error)
    for (name, cid, tag, offset, len, fes) in [
        ("unknown transfer tag", 5, 40, 0, 512, Fes::SequenceError),
        ("transfer tag 0", 5, -1, 0, 512, Fes::SequenceError),
        ("another command", 6, 0, 0, 512, Fes::SequenceError),
        ("a hole", 5, 0, 512, 512, Fes::DataOutOfRange),
        ("too long", 5, 0, 0, 8704, Fes::DataOutOfRange),
    ] {
        let (mut host, mut session) = fresh();
        feed(&mut session, &host.capsule(&command(io::WRITE, 5, 8192), &[]));
        assert_eq!(session.next_command(), None);
        let Some(Got::R2t(r2t)) = host.collect(&mut session).pop() else { panic!("no R2T") };
        assert_eq!((r2t.cid, r2t.r2to, r2t.r2tl), (5, 0, 8192));
        let ttag = r2t.ttag.wrapping_add_signed(tag);
        let bytes = host.h2c(cid, ttag, offset, &vec![0; len], true);
        assert_eq!(term_of(&mut host, &mut session, &bytes).0.fes, fes, "{name}");
    }
}

#[test]
fn data_for_a_command_that_wants_none() {
    let (mut host, mut session) = fresh();
    feed(&mut session, &host.capsule(&command(io::READ, 5, 512), &[]));
    let slot = session.next_command().unwrap();
    let bytes = host.h2c(5, slot + 1, 0, &[0; 512], true);
    assert_eq!(term_of(&mut host, &mut session, &bytes).0.fes, Fes::InvalidHeaderField);
}

#[test]
fn a_wrong_data_digest_fails_its_command_only() {
    let (mut host, mut session) = Host::connected(0, false, true);
    let sqe = Sqe::new(io::WRITE, 1, 1, Sgl::in_capsule(512));
    let mut bytes = host.capsule(&sqe, &[9; 512]);
    let last = bytes.len() - 1;
    bytes[last] ^= 0xFF;
    feed(&mut session, &bytes);
    assert_eq!(session.next_command(), None);
    let Some(Got::Response(cqe)) = host.collect(&mut session).pop() else { panic!("no response") };
    assert_eq!(cqe.status(), Status::TRANSIENT_TRANSPORT_ERROR);
    feed(&mut session, &host.capsule(&sqe, &[9; 512]));
    assert!(session.next_command().is_some(), "the connection lives on");
}

#[test]
fn both_directions_at_once_is_no_opcode() {
    let (mut host, mut session) = fresh();
    feed(&mut session, &host.capsule(&command(0x83, 1, 0), &[]));
    assert_eq!(session.next_command(), None);
    let Some(Got::Response(cqe)) = host.collect(&mut session).pop() else { panic!("no response") };
    assert_eq!(cqe.status(), Status::INVALID_OPCODE);
}

#[test]
fn more_commands_than_the_queue_is_deep() {
    let (host, mut session) = fresh();
    for cid in 0..=LIMITS.depth {
        feed(&mut session, &host.capsule(&command(io::FLUSH, cid, 0), &[]));
        while session.next_command().is_some() {}
    }
    assert_eq!(session.fault(), Some(Fault::Broken(Reason::Overrun)));
}

#[test]
fn a_termination_request_of_the_host() {
    let (host, mut session) = fresh();
    let error = TermError::sequence();
    let mut bytes = host.link.encode(&Pdu::H2cTermReq(error), 8).to_vec();
    bytes.extend_from_slice(&[0; 8]);
    feed(&mut session, &bytes);
    assert_eq!(session.next_command(), None);
    assert_eq!(session.fault(), Some(Fault::Broken(Reason::PeerTerminated(error))));
}

#[test]
fn nothing_is_taken_after_a_fault() {
    let (mut host, mut session) = fresh();
    let mut bytes = host.capsule(&command(io::FLUSH, 1, 0), &[]);
    bytes[0] = 0x0A;
    bytes.extend(host.capsule(&command(io::FLUSH, 2, 0), &[]));
    term_of(&mut host, &mut session, &bytes);
    feed(&mut session, &host.capsule(&command(io::FLUSH, 3, 0), &[]));
    assert_eq!(session.next_command(), None);
    assert!(host.collect(&mut session).is_empty());
}
