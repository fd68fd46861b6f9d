//! Slots, flow control, buffers, aborts, draining.

use nvme_wire::Status;
use nvme_wire::command::opcode::io;

use super::super::{Completion, OUTPUT_BYTES_MAX, Session, Target};
use super::host::{Got, Host, LIMITS, command, feed, pool};

fn connect(host: &mut Host, session: &mut Session, flow_control: bool) -> Got {
    feed(session, &host.capsule(&command(io::FLUSH, 0, 0), &[]));
    let slot = session.next_command().unwrap();
    session.complete_connect(slot, false, 3, flow_control, 0x1234);
    host.collect(session).pop().unwrap()
}

fn sqhd(got: &Got) -> u16 {
    match got {
        Got::Response(cqe) => cqe.sqhd.get(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn queue_head_goes_round_with_flow_control() {
    let (mut host, mut session) = Host::connected(0, false, false);
    assert_eq!(sqhd(&connect(&mut host, &mut session, true)), 1);
    let mut heads = Vec::new();
    for cid in 1..6 {
        feed(&mut session, &host.capsule(&command(io::FLUSH, cid, 0), &[]));
        let slot = session.next_command().unwrap();
        session.complete(slot, Status::SUCCESS.into());
        heads.push(sqhd(&host.collect(&mut session)[0]));
    }
    assert_eq!(heads, [2, 3, 0, 1, 2]);
}

#[test]
fn success_without_response_only_when_flow_control_is_off() {
    for flow_control in [true, false] {
        let (mut host, mut session) = Host::connected(0, false, false);
        let connected = connect(&mut host, &mut session, flow_control);
        assert_eq!(sqhd(&connected), if flow_control { 1 } else { 0xFFFF });
        let mut read = |completion: Completion| {
            feed(&mut session, &host.capsule(&command(io::READ, 9, 512), &[]));
            let slot = session.next_command().unwrap();
            session.data(slot).unwrap().fill(7);
            session.complete(slot, completion);
            host.collect(&mut session)
        };
        let plain = read(Completion::dw0(0));
        let Got::Data(data, bytes) = &plain[0] else { panic!("{plain:?}") };
        assert_eq!((data.success, data.last, plain.len()), (!flow_control, true, 1 + usize::from(flow_control)));
        assert_eq!(bytes, &vec![7; 512]);
        let with_result = read(Completion::dw0(5));
        let Got::Data(data, _) = &with_result[0] else { panic!("{with_result:?}") };
        assert!(!data.success && with_result.len() == 2);
        let failed = read(Status::LBA_OUT_OF_RANGE.into());
        assert!(matches!(&failed[..], [Got::Response(cqe)] if cqe.status() == Status::LBA_OUT_OF_RANGE));
    }
}

#[test]
fn commands_get_buffers_in_order_of_arrival() {
    let mut host = Host::new(0, false, false);
    let mut session = Session::new(LIMITS, pool(1, 1));
    feed(&mut session, &host.ic_req());
    session.next_command();
    host.collect(&mut session);
    for cid in 1..=4 {
        feed(&mut session, &host.capsule(&command(io::READ, cid, 8192), &[]));
    }
    let mut order = Vec::new();
    while let Some(slot) = session.next_command() {
        order.push(session.sqe(slot).cid.get());
        assert_eq!(session.next_command(), None, "one buffer, one command");
        assert_eq!(session.is_starved(), order.len() < 4);
        session.complete(slot, Completion::dw0(0));
        host.collect(&mut session);
        session.retry_buffers();
    }
    assert_eq!(order, [1, 2, 3, 4]);
}

#[test]
fn a_starved_command_can_be_aborted_and_an_executing_one_not() {
    let mut host = Host::new(0, false, false);
    let mut session = Session::new(LIMITS, pool(1, 1));
    feed(&mut session, &host.ic_req());
    session.next_command();
    host.collect(&mut session);
    for cid in [1, 2, 3] {
        feed(&mut session, &host.capsule(&command(io::WRITE, cid, 8192), &[]));
    }
    assert_eq!(session.next_command(), None);
    assert!(!session.abort(1), "its data is on the way");
    assert!(session.abort(2));
    assert!(!session.abort(2));
    let got = host.collect(&mut session);
    assert!(matches!(&got[..], [Got::R2t(r2t), Got::Response(cqe)]
        if r2t.cid == 1 && cqe.cid.get() == 2 && cqe.status() == Status::ABORTED_BY_REQUEST));
}

#[test]
fn in_capsule_data_needs_no_pool() {
    let mut host = Host::new(0, false, false);
    let mut session = Session::new(LIMITS, pool(1, 1));
    feed(&mut session, &host.ic_req());
    session.next_command();
    host.collect(&mut session);
    for cid in 1..=4 {
        let sqe = nvme_wire::Sqe::new(io::WRITE, cid, 1, nvme_wire::Sgl::in_capsule(4096));
        feed(&mut session, &host.capsule(&sqe, &[cid as u8; 4096]));
        let slot = session.next_command().unwrap();
        assert_eq!(session.data(slot).unwrap().to_vec(), vec![cid as u8; 4096]);
    }
}

#[test]
fn stopping_keeps_what_executes() {
    let (mut host, mut session) = Host::connected(0, false, false);
    for cid in [1, 2] {
        feed(&mut session, &host.capsule(&command(io::READ, cid, 512), &[]));
    }
    feed(&mut session, &host.capsule(&command(io::WRITE, 3, 512), &[]));
    let slot = session.next_command().unwrap();
    session.stop();
    assert_eq!(session.next_command(), None);
    assert_eq!(session.executing(), 1);
    assert_eq!(session.sqe(slot).cid.get(), 1);
    session.complete(slot, Status::SUCCESS.into());
    assert_eq!(session.executing(), 0);
    assert!(host.collect(&mut session).is_empty());
}

#[test]
fn clogged_output_stops_the_input() {
    let mut host = Host::new(0, false, false);
    let mut session = Session::new(super::super::Limits { depth: 128, ..LIMITS }, pool(1, 64));
    feed(&mut session, &host.ic_req());
    session.next_command();
    host.collect(&mut session);
    let mut sent = 0;
    while !session.is_clogged() {
        sent += 1;
        feed(&mut session, &host.capsule(&command(io::READ, sent, 131_072), &[]));
        let slot = session.next_command().unwrap();
        session.complete(slot, Completion::dw0(0));
    }
    assert!(usize::from(sent) * 131_072 > OUTPUT_BYTES_MAX - 131_072);
    assert!(matches!(session.target(), Target::Paused));
    assert_eq!(session.next_command(), None);
    host.collect(&mut session);
    assert!(!session.is_clogged() && matches!(session.target(), Target::Scratch(_)));
}
