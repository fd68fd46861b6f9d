//! Who may connect, and that what was taken away can do nothing more.

use std::sync::mpsc::TryRecvError;

use nvme_wire::command::BlockRange;
use nvme_wire::fabrics::{CNTLID_DYNAMIC, ConnectError};
use nvme_wire::property::{Configuration, ControllerStatus, offset};
use nvme_wire::{DISCOVERY_NQN, IoCommand, Sgl, Sqe, Status};
use serde_json::{Value, json};

use super::engine::{Engine, HOST, PATIENCE, SUBSYSTEM};
use super::host::{Controller, Queue};

fn read() -> Sqe {
    IoCommand::Read(BlockRange::new(0, 1)).to_sqe(0, 1, Sgl::transport(512))
}

/// A queue with one read that hangs in the device.
fn hanging(controller: &Controller, qid: u16) -> Queue {
    let mut queue = controller.io_queue(qid);
    queue.send(read(), &[]);
    // Its answer shows that the read before it has reached the device.
    let flush = IoCommand::Flush.to_sqe(0, 9, Sgl::NONE);
    queue.send(flush, &[]);
    assert!(queue.wait().unwrap().0.status().is(Status::INVALID_NAMESPACE));
    queue
}

fn connect(engine: &Engine, host: &str, nqn: &str) -> Status {
    Queue::open(engine.addr, false).connect_as(host, nqn, 0, CNTLID_DYNAMIC, 0).status()
}

fn connect_status(addr: std::net::SocketAddr, host: &str) -> Status {
    Queue::open(addr, false).connect_as(host, SUBSYSTEM, 0, CNTLID_DYNAMIC, 0).status()
}

fn controllers(engine: &Engine) -> Value {
    engine.ok("nvmf_subsystem_get_controllers", json!({ "nqn": SUBSYSTEM }))
}

#[test]
fn nobody_is_admitted_unless_listed() {
    let engine = Engine::start();
    assert_eq!(connect(&engine, HOST, SUBSYSTEM), Status::CONNECT_INVALID_HOST);
    assert_eq!(connect(&engine, "", SUBSYSTEM), Status::CONNECT_INVALID_HOST);
    engine.ok("nvmf_subsystem_add_host", json!({ "nqn": SUBSYSTEM, "host": HOST }));
    assert_eq!(connect(&engine, HOST, SUBSYSTEM), Status::SUCCESS);
    let other = "nqn.2026-11.io.addax:engine:test:1:2";
    assert_eq!(connect(&engine, other, SUBSYSTEM), Status::CONNECT_INVALID_HOST);
    assert_eq!(connect(&engine, other, DISCOVERY_NQN), Status::SUCCESS);
    engine.ok("nvmf_subsystem_allow_any_host", json!({ "nqn": SUBSYSTEM, "allow_any_host": true }));
    assert_eq!(connect(&engine, other, SUBSYSTEM), Status::SUCCESS);
    assert_eq!(connect(&engine, other, "nqn.2026-11.io.addax:none"), Status::CONNECT_INVALID_PARAMETERS);
    let again = engine.call("nvmf_subsystem_add_host", json!({ "nqn": SUBSYSTEM, "host": HOST })).unwrap_err();
    assert_eq!((again.code, again.message.as_str()), (-32603, "Internal error"));
}

#[test]
fn a_removed_host_is_gone_only_when_its_io_is() {
    let (engine, gate) = Engine::with_gate();
    let mut controller = Controller::connect(engine.addr);
    let mut queue = hanging(&controller, 1);
    let params = json!({ "nqn": SUBSYSTEM, "host": HOST });
    let removal = engine.begin("nvmf_subsystem_remove_host", params.clone());
    queue.wait_closed();
    controller.admin.wait_closed();
    assert_eq!(controllers(&engine).as_array().unwrap().len(), 1, "still draining");
    assert_eq!(removal.try_recv(), Err(TryRecvError::Empty));
    assert_eq!(connect(&engine, HOST, SUBSYSTEM), Status::CONNECT_INVALID_HOST);
    gate.open();
    assert_eq!(removal.recv_timeout(PATIENCE).unwrap(), Ok(json!(true)));
    assert_eq!(controllers(&engine), json!([]));
    let unknown = engine.call("nvmf_subsystem_remove_host", params).unwrap_err();
    assert_eq!((unknown.code, unknown.message.as_str()), (-32603, "Internal error"));
}

#[test]
fn a_removal_that_cannot_drain_says_so() {
    let (engine, gate) = Engine::with_gate();
    let controller = Controller::connect(engine.addr);
    let _queue = hanging(&controller, 1);
    let params = json!({ "nqn": SUBSYSTEM, "host": HOST, "timeout_ms": 1 });
    let late = engine.call("nvmf_subsystem_remove_host", params).unwrap_err();
    assert_eq!(late.message, "Timeout reached during host removal");
    gate.open();
}

#[test]
fn a_removed_namespace_is_gone_only_when_its_io_is() {
    let (engine, gate) = Engine::with_gate();
    let controller = Controller::connect(engine.addr);
    let mut queue = hanging(&controller, 1);
    let removal = engine.begin("nvmf_subsystem_remove_ns", json!({ "nqn": SUBSYSTEM, "nsid": 1 }));
    engine.ok("nvmf_get_stats", json!({}));
    let refused = queue.run(read(), &[]).0.status();
    assert!(refused.is(Status::INVALID_NAMESPACE));
    assert_eq!(removal.try_recv(), Err(TryRecvError::Empty));
    gate.open();
    assert_eq!(queue.wait().unwrap().0.status(), Status::SUCCESS, "what was started ends well");
    assert_eq!(removal.recv_timeout(PATIENCE).unwrap(), Ok(json!(true)));
}

#[test]
fn a_device_that_goes_away_takes_its_namespace_along() {
    let (engine, gate) = Engine::with_gate();
    let controller = Controller::connect(engine.addr);
    let mut queue = hanging(&controller, 1);
    let gone = engine.begin_unregister("G0");
    engine.ok("nvmf_get_stats", json!({}));
    assert_eq!(gone.try_recv(), Err(TryRecvError::Empty));
    gate.open();
    assert_eq!(queue.wait().unwrap().0.status(), Status::SUCCESS);
    gone.recv_timeout(PATIENCE).unwrap();
    let subsystems = engine.ok("nvmf_get_subsystems", json!({ "nqn": SUBSYSTEM }));
    assert_eq!(subsystems[0]["namespaces"], json!([]));
}

#[test]
fn a_device_with_other_paths_takes_its_hosts_along_and_shows_nobody_a_missing_namespace() {
    let (engine, gate) = Engine::with_shared_gate();
    let mut controller = Controller::connect(engine.addr);
    let mut queue = hanging(&controller, 1);
    let event = nvme_wire::admin::AdminCommand::AsyncEventRequest.to_sqe(0, 0, Sgl::NONE);
    controller.admin.send(event, &[]);
    let gone = engine.begin_unregister("G0");
    assert!(controller.admin.wait().is_none(), "closed without a word about namespaces");
    queue.wait_closed();
    assert_eq!(connect(&engine, HOST, SUBSYSTEM), Status::CONNECT_CONTROLLER_BUSY, "while the device goes");
    gate.open();
    gone.recv_timeout(PATIENCE).unwrap();
    assert_eq!(connect(&engine, HOST, SUBSYSTEM), Status::CONNECT_CONTROLLER_BUSY, "and as long as there is none");
    engine.add_malloc("M0");
    engine.ok("nvmf_subsystem_add_ns", json!({ "nqn": SUBSYSTEM, "namespace": { "bdev_name": "M0" } }));
    assert_eq!(connect(&engine, HOST, SUBSYSTEM), Status::SUCCESS);
}

#[test]
fn listeners_and_subsystems_drain_too() {
    for method in ["nvmf_subsystem_remove_listener", "nvmf_delete_subsystem"] {
        let (engine, gate) = Engine::with_gate();
        let controller = Controller::connect(engine.addr);
        let mut queue = hanging(&controller, 1);
        let mut params = json!({ "nqn": SUBSYSTEM });
        if method == "nvmf_subsystem_remove_listener" {
            params["listen_address"] = engine.address();
        }
        let removal = engine.begin(method, params);
        queue.wait_closed();
        engine.ok("nvmf_get_stats", json!({}));
        assert_eq!(removal.try_recv(), Err(TryRecvError::Empty), "{method}");
        gate.open();
        assert_eq!(removal.recv_timeout(PATIENCE).unwrap(), Ok(json!(true)), "{method}");
        assert!(std::net::TcpStream::connect(engine.addr).is_err(), "{method}: the socket is closed");
    }
}

#[test]
fn a_new_connection_waits_for_what_the_old_one_brought_in() {
    let (engine, gate) = Engine::with_gate();
    let old = Controller::connect(engine.addr);
    let mut queue = hanging(&old, 1);
    let addr = engine.addr;
    let connecting = std::thread::spawn(move || Controller::connect(addr).cntlid);
    for _ in 0..8 {
        engine.ok("nvmf_get_stats", json!({}));
        assert_eq!(controllers(&engine).as_array().unwrap().len(), 1);
    }
    gate.open();
    assert_ne!(connecting.join().unwrap(), old.cntlid);
    // The old connection is closed meanwhile, unless its answer comes soon.
    assert!(queue.wait().is_none_or(|(cqe, _)| cqe.status() == Status::SUCCESS));
}

#[test]
fn a_host_comes_back_while_io_of_its_lost_connections_is_under_way() {
    const HOST: &str = "nqn.2014-08.org.nvmexpress:uuid:0c4bb6a4-0000-4000-8000-000000000001";
    let (engine, gate) = Engine::with_gate();
    engine.ok("nvmf_subsystem_add_host", json!({ "nqn": SUBSYSTEM, "host": HOST }));
    let addr = engine.addr;
    let old = Controller::connect_as(HOST, addr, false, 0);
    let queue = hanging(&old, 1);
    // The host is killed. What it had sent is executed, and waited for, by a core that goes on to serve others.
    drop((old, queue));
    let (send, connected) = std::sync::mpsc::channel();
    let connecting = std::thread::spawn(move || send.send(connect_status(addr, HOST)));
    for _ in 0..8 {
        engine.ok("nvmf_get_stats", json!({}));
        assert_eq!(connected.try_recv(), Err(TryRecvError::Empty), "not before the old I/O has ended");
    }
    gate.open();
    assert_eq!(connected.recv_timeout(PATIENCE).unwrap(), Status::SUCCESS);
    connecting.join().unwrap().unwrap();
}

#[test]
fn a_reset_closes_io_queues_and_drains_them() {
    let (engine, gate) = Engine::with_gate();
    let mut controller = Controller::connect(engine.addr);
    let mut queue = hanging(&controller, 1);
    let disabled = Configuration { enable: false, ..Configuration::enabled() };
    controller.admin.set_property(offset::CC, disabled.raw().into());
    queue.wait_closed();
    let status = |controller: &mut Controller| {
        let cqe = controller.admin.get_property(nvme_wire::fabrics::PropertySize::Four, offset::CSTS);
        ControllerStatus::from_raw(cqe.dw0.get())
    };
    assert!(status(&mut controller).ready, "not before its I/O has ended");
    gate.open();
    while status(&mut controller).ready {}
    let refused = Queue::open(engine.addr, false).connect_as(HOST, SUBSYSTEM, 1, controller.cntlid, 0);
    assert_eq!(refused.dw0.get(), ConnectError::QID.dw0());
    controller.admin.set_property(offset::CC, Configuration::enabled().raw().into());
    assert!(status(&mut controller).ready);
    controller.io_queue(1).run(read(), &[]);
}

#[test]
fn a_host_cannot_take_anothers_controller() {
    let engine = Engine::with_namespace();
    engine.ok("nvmf_subsystem_allow_any_host", json!({ "nqn": SUBSYSTEM, "allow_any_host": true }));
    let controller = Controller::connect(engine.addr);
    let mut queue = Queue::open(engine.addr, false);
    let stranger = "nqn.2026-11.io.addax:engine:test:1:2";
    let cqe = queue.connect_as(stranger, SUBSYSTEM, 1, controller.cntlid, 0);
    assert_eq!((cqe.status(), cqe.dw0.get()), (Status::CONNECT_INVALID_PARAMETERS, ConnectError::HOSTNQN.dw0()));
    let cqe = queue.connect_as(HOST, SUBSYSTEM, 1, controller.cntlid + 1, 0);
    assert_eq!(cqe.dw0.get(), ConnectError::CNTLID.dw0());
    assert_eq!(queue.run(read(), &[]).0.status(), Status::COMMAND_SEQUENCE_ERROR, "not connected yet");
    assert_eq!(queue.connect_as(HOST, SUBSYSTEM, 1, controller.cntlid, 0).status(), Status::SUCCESS);
    let mut second = Queue::open(engine.addr, false);
    assert_eq!(second.connect_as(HOST, SUBSYSTEM, 1, controller.cntlid, 0).status(), Status::INVALID_QUEUE_ID);
    assert_eq!(second.connect_as(HOST, SUBSYSTEM, 128, controller.cntlid, 0).status(), Status::INVALID_QUEUE_ID);
}
