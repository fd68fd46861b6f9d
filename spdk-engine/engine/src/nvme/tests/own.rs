//! The device against the engine's own target.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::{Arc, Mutex};

use futures::channel::oneshot;
use nvme_wire::Status;
use serde_json::json;

use super::{DATA, HOST, NQN, WRITE, bufs, engine, exercise, get, pattern, put, start};
use crate::bdev::registry::BdevEvent;
use crate::bdev::{IoOp, PathState};
use crate::reactor::driver::NANOS_PER_MS;
use crate::rpc::{RpcError, RpcResult};

#[test]
fn every_kind_of_io_reaches_the_target() {
    engine(|engine| async move {
        engine.serve(512).await;
        let variants = [
            json!({}),
            json!({ "hdgst": true, "ddgst": true }),
            json!({ "disable_sq_flow_control": true }),
            json!({ "disable_sq_flow_control": true, "hdgst": true, "ddgst": true, "num_io_queues": 1 }),
        ];
        for more in variants {
            assert_eq!(engine.attach(more).await, json!(["Nn1"]));
            engine.on_channel("Nn1", |core, chan| exercise(core, chan, 512)).await;
            engine.ok("bdev_nvme_detach_controller", json!({ "name": "N" })).await;
            assert!(engine.app.registry().find("Nn1").is_none());
        }
        let controllers = engine.ok("bdev_nvme_get_controllers", json!({})).await;
        assert_eq!(controllers, json!([]));
    });
}

#[test]
fn objects_and_errors_are_spdks() {
    engine(|engine| async move {
        engine.serve(4096).await;
        engine.attach(json!({})).await;
        let list = engine.ok("bdev_get_bdevs", json!({ "name": "Nn1" })).await;
        let bdev = &list[0];
        assert_eq!(bdev["product_name"], "NVMe disk");
        assert_eq!((bdev["block_size"].as_u64(), bdev["num_blocks"].as_u64()), (Some(4096), Some(4096)));
        let path = &bdev["driver_specific"]["nvme"][0];
        assert_eq!(path["trid"]["subnqn"], NQN);
        assert_eq!(path["trid"]["trsvcid"], engine.port.to_string());
        assert_eq!(path["ctrlr_data"]["serial_number"], "S1");
        assert_eq!(path["ns_data"]["id"], 1);
        let controllers = engine.ok("bdev_nvme_get_controllers", json!({ "name": "N" })).await;
        assert_eq!(controllers[0]["ctrlrs"][0]["state"], "enabled");
        assert_eq!(controllers[0]["ctrlrs"][0]["host"]["nqn"], HOST);
        let code = |result: RpcResult| result.unwrap_err().code;
        let attach = |more| engine.rpc("bdev_nvme_attach_controller", engine.attach_params(more));
        assert_eq!(code(attach(json!({})).await), -114);
        assert_eq!(code(attach(json!({ "multipath": "disable" })).await), -114);
        assert_eq!(code(attach(json!({ "subnqn": "nqn.2016-06.io.spdk:other" })).await), -22);
        assert_eq!(code(attach(json!({ "name": "O", "trtype": "nonsense" })).await), -22);
        assert_eq!(code(attach(json!({ "name": "O", "trtype": "RDMA" })).await), -19);
        assert_eq!(code(attach(json!({ "name": "O", "reconnect_delay_sec": 1 })).await), -22);
        assert_eq!(code(attach(json!({ "name": "O", "no_such": 1 })).await), RpcError::INTERNAL);
        assert_eq!(code(attach(json!({ "name": "O", "hostnqn": "nqn.2016-06.io.spdk:stranger" })).await), -5);
        assert_eq!(code(attach(json!({ "name": "O", "trsvcid": "1" })).await), -5);
        assert_eq!(code(engine.rpc("bdev_nvme_set_options", json!({ "timeout_us": 1 })).await), -1);
        assert_eq!(code(engine.rpc("bdev_nvme_get_controllers", json!({ "name": "O" })).await), -22);
        assert_eq!(code(engine.rpc("bdev_nvme_detach_controller", json!({ "name": "O" })).await), -19);
        let wrong = json!({ "name": "N", "trsvcid": "1" });
        assert_eq!(code(engine.rpc("bdev_nvme_detach_controller", wrong).await), -6);
        assert_eq!(engine.ok("bdev_nvme_reset_controller", json!({ "name": "N" })).await, json!(true));
        assert_eq!(engine.state().await, "enabled");
        let saved: Vec<_> = engine.methods.save.iter().flat_map(|(_, save)| save(&engine.app)).collect();
        let attach = saved.iter().find(|(method, _)| method == "bdev_nvme_attach_controller").unwrap();
        engine.ok("bdev_nvme_detach_controller", json!({ "name": "N" })).await;
        assert_eq!(engine.ok(&attach.0, attach.1.clone()).await, json!(["Nn1"]));
    });
}

/// The session is lost with a write in flight; it and what comes meanwhile is done on the next session, in order.
#[test]
fn held_io_is_replayed_on_the_next_session() {
    engine(|engine| async move {
        engine.serve_slow().await;
        engine.attach(json!({ "ctrlr_loss_timeout_sec": -1, "reconnect_delay_sec": 1 })).await;
        let (sender, begun) = oneshot::channel();
        let entry = engine.entry("Nn1");
        let writing = engine.app.core().call_async(DATA, move |core| {
            let (core, chan) = (core.clone(), entry.open(core).unwrap());
            async move {
                put(&core, &chan, 0, &pattern(1, 4096), 512).await;
                let first = start(&core, &chan, WRITE, 0, 8, bufs(&pattern(2, 4096)));
                sender.send(()).unwrap();
                let second = start(&core, &chan, WRITE, 8, 8, bufs(&pattern(3, 4096)));
                let statuses = (first.await.unwrap(), second.await.unwrap());
                (statuses, get(&core, &chan, 0, 8192, 512).await.unwrap())
            }
        });
        begun.await.unwrap();
        engine.listener(false).await;
        engine.until_state(|state| state != "enabled").await;
        engine.listener(true).await;
        let (statuses, bytes) = writing.await.unwrap();
        assert_eq!(statuses, (Status::SUCCESS, Status::SUCCESS));
        assert_eq!(bytes, [pattern(2, 4096), pattern(3, 4096)].concat());
        engine.until_state(|state| state == "enabled").await;
    });
}

/// A caller that replays by itself and gave no timeouts has to ask for every session.
#[test]
fn without_replay_and_timeouts_a_session_begins_only_by_a_reset() {
    engine(|engine| async move {
        engine.serve(512).await;
        engine.attach(json!({ "addax_no_replay": true })).await;
        engine.listener(false).await;
        engine.until_state(|state| state == "failed").await;
        engine.listener(true).await;
        engine.app.core().sleep(100 * NANOS_PER_MS).await;
        assert_eq!(engine.state().await, "failed");
        engine.ok("bdev_nvme_reset_controller", json!({ "name": "N" })).await;
        assert_eq!(engine.state().await, "enabled");
    });
}

/// Without replay a caller hears of every loss at once, and after all of its I/O has ended.
#[test]
fn without_replay_io_fails_at_once_and_watchers_hear_why() {
    engine(|engine| async move {
        engine.serve_slow().await;
        let more = json!({ "ctrlr_loss_timeout_sec": -1, "reconnect_delay_sec": 1, "addax_no_replay": true });
        engine.attach(more).await;
        let heard: Arc<Mutex<Vec<String>>> = Arc::default();
        let (hears, entry) = (Arc::clone(&heard), engine.entry("Nn1"));
        let (sender, begun) = oneshot::channel();
        let (down_sender, down) = oneshot::channel();
        let (up_sender, up) = oneshot::channel::<()>();
        let working = engine.app.core().call_async(DATA, move |core| {
            let (core, chan) = (core.clone(), entry.open(core).unwrap());
            let note = move |text: String| hears.lock().unwrap().push(text);
            let on_path = note.clone();
            chan.watch_path(&core, Rc::new(move |_, state: PathState| on_path(format!("{state:?}"))));
            async move {
                assert_eq!(put(&core, &chan, 0, &pattern(1, 4096), 512).await, Status::SUCCESS);
                let slow: Vec<_> = (0..300).map(|i| start(&core, &chan, WRITE, i, 1, bufs(&pattern(2, 512)))).collect();
                sender.send(()).unwrap();
                for write in slow {
                    let status = write.await.unwrap();
                    assert!(status.is_success() || status.is(Status::HOST_PATHING_ERROR), "{status}");
                    note(if status.is_success() { "done".into() } else { "path error".into() });
                }
                let now = start(&core, &chan, IoOp::Read, 0, 1, bufs(&[0; 512])).await.unwrap();
                assert!(now.is(Status::HOST_PATHING_ERROR), "{now}");
                down_sender.send(()).unwrap();
                up.await.unwrap();
                assert_eq!(put(&core, &chan, 0, &pattern(4, 512), 512).await, Status::SUCCESS);
                assert_eq!(get(&core, &chan, 0, 512, 512).await.unwrap(), pattern(4, 512));
            }
        });
        let has = |word: &'static str| {
            let heard = Arc::clone(&heard);
            move || heard.lock().unwrap().iter().any(|h| h == word)
        };
        begun.await.unwrap();
        engine.listener(false).await;
        down.await.unwrap();
        engine.until(has("Down")).await;
        {
            let mut heard = heard.lock().unwrap();
            let at = heard.iter().position(|h| h == "Down").unwrap();
            assert!(heard.iter().any(|h| h == "path error"));
            assert!(!heard[..at].iter().any(|h| h == "Refused" || h == "Up"), "the first session is no news");
            heard.clear();
        }
        // The host is put out while it is away: it is refused, and not taken back before it is allowed again.
        engine.ok("nvmf_subsystem_remove_host", json!({ "nqn": NQN, "host": HOST })).await;
        engine.listener(true).await;
        engine.until(has("Refused")).await;
        assert!(!has("Up")());
        engine.ok("nvmf_subsystem_add_host", json!({ "nqn": NQN, "host": HOST })).await;
        engine.until(has("Up")).await;
        up_sender.send(()).unwrap();
        working.await.unwrap();
    });
}

/// The SPDK default: one attempt, then I/O fails until a reset is asked for.
#[test]
fn without_timeouts_there_is_one_attempt() {
    engine(|engine| async move {
        engine.serve(512).await;
        engine.attach(json!({})).await;
        engine.on_channel("Nn1", |core, chan| async move { put(&core, &chan, 0, &pattern(1, 4096), 512).await }).await;
        engine.listener(false).await;
        engine.until_state(|state| state == "failed").await;
        let read = engine.on_channel("Nn1", |core, chan| async move { get(&core, &chan, 0, 512, 512).await }).await;
        assert!(read.unwrap_err().is_path_error());
        let again = engine.rpc("bdev_nvme_reset_controller", json!({ "name": "N" })).await;
        assert_eq!(again.unwrap_err().code, -5);
        engine.listener(true).await;
        engine.ok("bdev_nvme_reset_controller", json!({ "name": "N" })).await;
        let read = engine.on_channel("Nn1", |core, chan| async move { get(&core, &chan, 0, 4096, 512).await }).await;
        assert_eq!(read.unwrap(), pattern(1, 4096));
    });
}

#[test]
fn io_fails_past_its_timeout_and_the_controller_goes_past_its_own() {
    engine(|engine| async move {
        engine.serve(512).await;
        let times = json!({ "ctrlr_loss_timeout_sec": 3, "reconnect_delay_sec": 1, "fast_io_fail_timeout_sec": 1 });
        engine.attach(times).await;
        engine.listener(false).await;
        engine.until_state(|state| state != "enabled").await;
        let read = engine.on_channel("Nn1", |core, chan| async move { get(&core, &chan, 0, 512, 512).await }).await;
        assert!(read.unwrap_err().is_path_error());
        let registry = Rc::clone(engine.app.registry());
        engine.until(move || registry.find("Nn1").is_none()).await;
        let list = engine.ok("bdev_nvme_get_controllers", json!({})).await;
        assert!(list == json!([]) || list[0]["ctrlrs"][0]["state"] == "deleting");
    });
}

#[test]
fn devices_follow_the_namespaces() {
    engine(|engine| async move {
        engine.serve(512).await;
        engine.ok("bdev_null_create", json!({ "name": "Z0", "num_blocks": 2048, "block_size": 512 })).await;
        engine.attach(json!({})).await;
        let registry = Rc::clone(engine.app.registry());
        let nsid = engine.add_namespace("Z0").await;
        assert_eq!(nsid, json!(2));
        let there = Rc::clone(&registry);
        engine.until(move || there.find("Nn2").is_some()).await;
        let heard: Rc<RefCell<Vec<BdevEvent>>> = Rc::default();
        let hears = Rc::clone(&heard);
        let access = crate::bdev::registry::Access::Shared;
        let desc = registry.open("Nn2", access, move |event| hears.borrow_mut().push(event)).unwrap();
        engine.ok("bdev_null_resize", json!({ "name": "Z0", "new_size": 2 })).await;
        let resized = Rc::clone(&heard);
        engine.until(move || resized.borrow().contains(&BdevEvent::Resized)).await;
        assert_eq!(desc.entry().bdev.num_blocks(), 4096);
        engine.ok("nvmf_subsystem_remove_ns", json!({ "nqn": NQN, "nsid": 2 })).await;
        let removing = Rc::clone(&heard);
        engine.until(move || removing.borrow().contains(&BdevEvent::Removing)).await;
        drop(desc);
        engine.until(move || registry.find("Nn2").is_none()).await;
        assert!(engine.app.registry().find("Nn1").is_some());
    });
}

/// A device that this very process exports has its identifier already; with our own flag it is found all the same.
#[test]
fn a_namespace_of_this_process_needs_an_identifier_of_its_own() {
    engine(|engine| async move {
        engine.serve(512).await;
        engine.ok("nvmf_subsystem_remove_ns", json!({ "nqn": NQN, "nsid": 1 })).await;
        engine.ok("nvmf_subsystem_add_ns", json!({ "nqn": NQN, "namespace": { "bdev_name": "M0" } })).await;
        assert_eq!(engine.attach(json!({})).await, json!([]));
        engine.ok("bdev_nvme_detach_controller", json!({ "name": "N" })).await;
        let more = json!({ "ctrlr_loss_timeout_sec": -1, "reconnect_delay_sec": 1, "addax_no_replay": true });
        assert_eq!(engine.attach(more).await, json!(["Nn1"]));
        assert_ne!(engine.entry("Nn1").bdev.info().uuid, engine.entry("M0").bdev.info().uuid);
    });
}
