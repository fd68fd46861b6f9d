//! Admin commands, properties, events, discovery, and the RPC views of it all.

use nvme_wire::admin::{AdminCommand, GetFeatures, GetLogPage, SetFeatures, cns};
use nvme_wire::ana::{AnaLog, AnaState};
use nvme_wire::discovery::{DiscoveryLog, subtype};
use nvme_wire::fabrics::{CNTLID_DYNAMIC, ConnectError, FabricsCommand, PropertySize};
use nvme_wire::features::{AsyncEvent, fid};
use nvme_wire::identify::ControllerData;
use nvme_wire::log::lid;
use nvme_wire::namespace::{NamespaceData, parse_namespace_list};
use nvme_wire::property::{Configuration, offset};
use nvme_wire::{DISCOVERY_NQN, Sgl, Sqe, Status};
use serde_json::json;

use super::engine::{BLOCKS, Engine, HOST, SUBSYSTEM};
use super::host::{Controller, Queue};

#[test]
fn identify_tells_what_is_there() {
    let engine = Engine::with_namespace();
    let mut controller = Controller::connect(engine.addr);
    let (_, page) = controller.admin.identify(cns::CONTROLLER, 0);
    let data = ControllerData::parse(&page).unwrap();
    assert_eq!((data.sn.as_str(), data.mn.as_str(), data.cntlid), ("S1", "SPDK bdev Controller", controller.cntlid));
    assert_eq!((data.max_transfer(), data.in_capsule_data(), data.nn), (Some(131_072), 4096, 32));
    assert_eq!((data.oncs, data.fuses, data.has_ana(), data.has_write_cache()), (0x0D, 0, true, true));
    let (_, page) = controller.admin.identify(cns::NAMESPACE, 1);
    let namespace = NamespaceData::parse(&page).unwrap();
    assert_eq!((namespace.nsze, namespace.block_size(), namespace.anagrpid), (BLOCKS, Some(512), 1));
    let (_, page) = controller.admin.identify(cns::NAMESPACE, 2);
    assert!(page.iter().all(|b| *b == 0), "inactive");
    let (_, page) = controller.admin.identify(cns::ACTIVE_NAMESPACES, 0);
    assert_eq!(parse_namespace_list(&page).collect::<Vec<_>>(), [1]);
    for (nsid, status) in [(0, Status::INVALID_NAMESPACE), (33, Status::INVALID_NAMESPACE)] {
        assert_eq!(controller.admin.identify(cns::NAMESPACE, nsid).0.status(), status);
    }
    assert_eq!(controller.admin.identify(0x20, 0).0.status(), Status::INVALID_FIELD);
    let short = AdminCommand::Identify(nvme_wire::admin::Identify { cns: cns::CONTROLLER, ..Default::default() });
    assert_eq!(controller.admin.admin(short, 0, 512).0.status(), Status::INVALID_FIELD);
}

#[test]
fn properties() {
    let engine = Engine::with_namespace();
    let mut admin = Queue::open(engine.addr, false);
    let before = FabricsCommand::PropertyGet { size: PropertySize::Eight, offset: offset::CAP };
    assert_eq!(admin.run(before.to_sqe(0, Sgl::NONE), &[]).0.status(), Status::COMMAND_SEQUENCE_ERROR);
    assert_eq!(admin.connect_as(HOST, SUBSYSTEM, 0, CNTLID_DYNAMIC, 0).status(), Status::SUCCESS);
    assert_eq!(admin.get_property(PropertySize::Eight, offset::CAP).result(), 0x0800_0020_1E01_007F);
    assert_eq!(admin.get_property(PropertySize::Four, 4).dw0.get(), 0x0800_0020);
    assert_eq!(admin.get_property(PropertySize::Four, offset::VS).dw0.get(), 0x0002_0000);
    assert_eq!(admin.get_property(PropertySize::Four, offset::CSTS).dw0.get(), 0);
    for (size, at) in [(PropertySize::Eight, offset::VS), (PropertySize::Four, 0x100), (PropertySize::Eight, 4)] {
        assert_eq!(admin.get_property(size, at).status(), Status::CONNECT_INVALID_PARAMETERS);
    }
    assert_eq!(admin.identify(cns::CONTROLLER, 0).0.status(), Status::COMMAND_SEQUENCE_ERROR, "not enabled");
    let paged = Configuration { page_size: 1, ..Configuration::enabled() };
    assert_eq!(admin.set_property(offset::CC, paged.raw().into()).status(), Status::CONNECT_INVALID_PARAMETERS);
    let disconnect = FabricsCommand::Disconnect { recfmt: 0 };
    assert_eq!(admin.run(disconnect.to_sqe(0, Sgl::NONE), &[]).0.status(), Status::INVALID_OPCODE);
    let mut wrong = Queue::open(engine.addr, false);
    let cqe = wrong.connect_as(HOST, SUBSYSTEM, 0, 5, 0);
    assert_eq!((cqe.status(), cqe.dw0.get()), (Status::CONNECT_INVALID_PARAMETERS, ConnectError::CNTLID.dw0()));
}

#[test]
fn features_and_keep_alive() {
    let engine = Engine::with_namespace();
    let mut controller = Controller::connect_with(engine.addr, false, 12_345);
    let mut get = |fid: u8, cdw11: u32| {
        controller.admin.admin(AdminCommand::GetFeatures(GetFeatures { fid, select: 0, cdw11 }), 0, 4096)
    };
    assert_eq!(get(fid::KEEP_ALIVE_TIMER, 0).0.dw0.get(), 20_000);
    assert_eq!(get(fid::NUMBER_OF_QUEUES, 0).0.dw0.get(), 0x007E_007E);
    assert_eq!(get(fid::WRITE_CACHE, 0).0.dw0.get(), 1);
    assert_eq!(get(fid::ASYNC_EVENT_CONFIG, 0).0.dw0.get(), 0x900);
    assert_eq!(get(fid::HOST_ID, 1).1[..16], [7; 16]);
    assert_eq!(get(fid::HOST_ID, 0).0.status(), Status::INVALID_FIELD);
    assert_eq!(get(0x55, 0).0.status(), Status::INVALID_FIELD);
    let mut set = |fid: u8, cdw11: u32, save: bool| {
        let command = AdminCommand::SetFeatures(SetFeatures { fid, save, cdw11, cdw12: 0 });
        controller.admin.run(command.to_sqe(0, 0, Sgl::NONE), &[]).0.status()
    };
    assert_eq!(set(fid::KEEP_ALIVE_TIMER, 0, false), Status::KEEP_ALIVE_INVALID);
    assert_eq!(set(fid::WRITE_CACHE, 0, false), Status::FEATURE_NOT_CHANGEABLE);
    assert_eq!(set(fid::WRITE_CACHE, 1, true), Status::FEATURE_NOT_SAVEABLE);
    assert_eq!(set(fid::NUMBER_OF_QUEUES, 0xFFFF, false), Status::INVALID_FIELD);
    assert_eq!(set(fid::NUMBER_OF_QUEUES, 3, false), Status::SUCCESS);
    assert_eq!(controller.admin.admin(AdminCommand::KeepAlive, 0, 0).0.status(), Status::SUCCESS);
    let unknown = Sqe::new(0x7D, 0, 0, Sgl::NONE);
    assert_eq!(controller.admin.run(unknown, &[]).0.status(), Status::INVALID_OPCODE);
}

#[test]
fn changed_namespaces_are_announced() {
    let engine = Engine::with_namespace();
    let mut controller = Controller::connect(engine.addr);
    let request = AdminCommand::AsyncEventRequest.to_sqe(0, 0, Sgl::NONE);
    let cid = controller.admin.send(request, &[]);
    engine.ok("nvmf_subsystem_remove_ns", json!({ "nqn": SUBSYSTEM, "nsid": 1 }));
    let (cqe, _) = controller.admin.wait().unwrap();
    assert_eq!((cqe.cid.get(), cqe.dw0.get()), (cid, AsyncEvent::NamespaceAttribute.dw0()));
    let page = AdminCommand::GetLogPage(GetLogPage { lid: lid::CHANGED_NAMESPACES, bytes: 4096, ..Default::default() });
    let (_, changed) = controller.admin.admin(page, 0xFFFF_FFFF, 4096);
    assert_eq!(parse_namespace_list(&changed).collect::<Vec<_>>(), [1]);
    let victim = controller.admin.send(request, &[]);
    let abort = controller.admin.send(AdminCommand::Abort { sqid: 0, cid: victim }.to_sqe(0, 0, Sgl::NONE), &[]);
    let (first, second) = (controller.admin.wait().unwrap().0, controller.admin.wait().unwrap().0);
    assert_eq!((first.cid.get(), first.status()), (victim, Status::ABORTED_BY_REQUEST));
    assert_eq!((second.cid.get(), second.dw0.get()), (abort, 0));
    let nothing = controller.admin.admin(AdminCommand::Abort { sqid: 3, cid: 9 }, 0, 0).0;
    assert_eq!(nothing.dw0.get(), 1);
}

#[test]
fn ana_states_are_reported_and_enforced() {
    let engine = Engine::with_namespace();
    let mut controller = Controller::connect(engine.addr);
    let mut queue = controller.io_queue(1);
    let page = AdminCommand::GetLogPage(GetLogPage { lid: lid::ANA, bytes: 4096, ..Default::default() });
    let (_, bytes) = controller.admin.admin(page, 0, 4096);
    assert_eq!(AnaLog::parse(&bytes).unwrap().state_of(1), Some(AnaState::Optimized));
    let params = json!({ "nqn": SUBSYSTEM, "listen_address": engine.address(), "ana_state": "inaccessible" });
    engine.ok("nvmf_subsystem_listener_set_ana_state", params);
    let (_, bytes) = controller.admin.admin(page, 0, 4096);
    assert_eq!(AnaLog::parse(&bytes).unwrap().state_of(1), Some(AnaState::Inaccessible));
    let read = nvme_wire::IoCommand::Read(nvme_wire::command::BlockRange::new(0, 1));
    assert_eq!(queue.io(read, 512, &[]).0.status(), Status::ANA_INACCESSIBLE);
    // Each change is told, once the page was read.
    let request = AdminCommand::AsyncEventRequest.to_sqe(0, 0, Sgl::NONE);
    let told = |controller: &mut Controller| {
        controller.admin.send(request, &[]);
        controller.admin.wait().unwrap().0.dw0.get()
    };
    let groups = |controller: &mut Controller| {
        let (_, bytes) = controller.admin.admin(page, 0, 4096);
        let log = AnaLog::parse(&bytes).unwrap();
        log.groups.into_iter().map(|group| (group.id, group.state, group.nsids)).collect::<Vec<_>>()
    };
    engine.ok(
        "nvmf_subsystem_listener_set_ana_state",
        json!({ "nqn": SUBSYSTEM, "listen_address": engine.address(), "ana_state": "non_optimized", "anagrpid": 7 }),
    );
    assert_eq!(told(&mut controller), AsyncEvent::AnaChange.dw0());
    assert_eq!(groups(&mut controller), [(1, AnaState::Inaccessible, vec![1])]);
    // A namespace that changes its group changes its state.
    engine.ok("nvmf_subsystem_set_ns_ana_group", json!({ "nqn": SUBSYSTEM, "nsid": 1, "anagrpid": 7 }));
    assert_eq!(told(&mut controller), AsyncEvent::AnaChange.dw0());
    assert_eq!(groups(&mut controller), [(7, AnaState::NonOptimized, vec![1])]);
    assert_eq!(queue.io(read, 512, &[]).0.status(), Status::SUCCESS);
    for (nsid, group) in [(1, 0), (1, 33), (2, 1)] {
        let params = json!({ "nqn": SUBSYSTEM, "nsid": nsid, "anagrpid": group });
        assert!(engine.call("nvmf_subsystem_set_ns_ana_group", params).is_err(), "{nsid} {group}");
    }
    let listeners = engine.ok("nvmf_subsystem_get_listeners", json!({ "nqn": SUBSYSTEM }));
    assert_eq!(listeners[0]["ana_states"][31], json!({ "ana_group": 32, "ana_state": "inaccessible" }));
}

#[test]
fn discovery_shows_what_the_host_may_have() {
    let engine = Engine::start();
    let log = |host: &str| {
        let mut admin = Queue::open(engine.addr, false);
        assert_eq!(admin.connect_as(host, DISCOVERY_NQN, 0, CNTLID_DYNAMIC, 0).status(), Status::SUCCESS);
        admin.set_property(offset::CC, Configuration::enabled().raw().into());
        let page = GetLogPage { lid: lid::DISCOVERY, bytes: 8192, ..Default::default() };
        let (cqe, bytes) = admin.admin(AdminCommand::GetLogPage(page), 0, 8192);
        assert_eq!(cqe.status(), Status::SUCCESS);
        DiscoveryLog::parse(&bytes).unwrap()
    };
    let before = log(HOST);
    assert!(before.entries.is_empty());
    engine.ok("nvmf_subsystem_add_host", json!({ "nqn": SUBSYSTEM, "host": HOST }));
    let address = json!({ "trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.9", "trsvcid": "8009" });
    engine.ok("nvmf_discovery_add_referral", json!({ "address": address }));
    let after = log(HOST);
    assert!(after.genctr > before.genctr);
    let kinds: Vec<_> = after.entries.iter().map(|e| (e.subtype, e.address().unwrap())).collect();
    assert_eq!(kinds, [(subtype::NVM, engine.addr), (subtype::REFERRAL, "127.0.0.9:8009".parse().unwrap())]);
    assert_eq!(log("nqn.2026-11.io.addax:engine:other:1:1").entries.len(), 1);
    engine.ok("nvmf_discovery_remove_referral", json!({ "address": address }));
    assert_eq!(engine.ok("nvmf_discovery_get_referrals", json!({})), json!([]));
}

#[test]
fn the_rpc_tells_what_is_connected() {
    let engine = Engine::with_namespace();
    let controller = Controller::connect(engine.addr);
    let _queue = controller.io_queue(3);
    let controllers = engine.ok("nvmf_subsystem_get_controllers", json!({ "nqn": SUBSYSTEM }));
    assert_eq!(
        controllers,
        json!([{ "cntlid": controller.cntlid, "cntrltype": "io", "hostnqn": HOST,
            "hostid": "07070707-0707-0707-0707-070707070707", "num_io_qpairs": 2 }])
    );
    let queues = engine.ok("nvmf_subsystem_get_qpairs", json!({ "nqn": SUBSYSTEM }));
    assert_eq!((&queues[0]["qid"], &queues[1]["qid"]), (&json!(0), &json!(3)));
    let stats = engine.ok("nvmf_get_stats", json!({}));
    let groups = stats["poll_groups"].as_array().unwrap();
    let io: u64 = groups.iter().map(|g| g["current_io_qpairs"].as_u64().unwrap()).sum();
    assert_eq!((groups.len(), io, &groups[0]["current_admin_qpairs"]), (2, 1, &json!(1)));
}

#[test]
fn refused_calls_have_spdks_texts() {
    let engine = Engine::with_namespace();
    let text = |method, params| engine.call(method, params).unwrap_err().message;
    assert_eq!(text("nvmf_create_transport", json!({ "trtype": "tcp" })), "Transport type 'TCP' already exists");
    assert_eq!(text("nvmf_create_transport", json!({ "trtype": "X" })), "Invalid transport type 'X'");
    let create = |more: serde_json::Value| {
        let mut params = json!({ "nqn": "nqn.2026-11.io.addax:x" });
        params.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        text("nvmf_create_subsystem", params)
    };
    assert_eq!(create(json!({ "serial_number": "123456789012345678901" })), "Invalid parameters");
    assert_eq!(create(json!({ "min_cntlid": 5, "max_cntlid": 4 })), "Invalid cntlid range [5-4]");
    assert_eq!(create(json!({ "admin_label": "abc" })), "Invalid admin_label");
    assert_eq!(create(json!({ "unknown": 1 })), "Invalid parameters");
    assert_eq!(create(json!({ "nqn": SUBSYSTEM })), format!("Unable to create subsystem {SUBSYSTEM}"));
    assert_eq!(create(json!({ "tgt_name": "t" })), "NVMf target 't' not found");
    let missing = json!({ "nqn": "nqn.2026-11.io.addax:y" });
    assert_eq!(text("nvmf_delete_subsystem", missing), "Subsystem with NQN 'nqn.2026-11.io.addax:y' not found");
    for namespace in [
        json!({ "bdev_name": "none" }),
        json!({ "bdev_name": "M0" }),
        json!({ "bdev_name": "M0", "nsid": 1 }),
        json!({ "bdev_name": "M0", "nsid": 33 }),
        json!({ "bdev_name": "M0", "anagrpid": 33 }),
    ] {
        assert_eq!(
            text("nvmf_subsystem_add_ns", json!({ "nqn": SUBSYSTEM, "namespace": namespace })),
            "Invalid parameters"
        );
    }
    let nguid = json!({ "nqn": SUBSYSTEM, "namespace": { "bdev_name": "M0", "nguid": "zz" } });
    assert_eq!(text("nvmf_subsystem_add_ns", nguid), "Invalid nguid");
    let again = json!({ "nqn": SUBSYSTEM, "listen_address": engine.address() });
    assert_eq!(text("nvmf_subsystem_add_listener", again), "Invalid parameters");
}
