//! Sessions that break while there is I/O, and controllers that do not answer.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use nvme_wire::Status;
use serde_json::json;

use super::{DATA, WRITE, bufs, engine, get, pattern, put, start};
use crate::bdev::IoOp;
use crate::nvme::options::DEFAULT_DEADLINE_NS;
use crate::reactor::driver::NANOS_PER_MS;
use crate::reactor::{Core, CoreId};

/// What was given for a block last; every write of a block is of another seed.
async fn hammer(core: Core, chan: crate::bdev::Chan, first: u64, rounds: u64) {
    const BLOCKS: u64 = 48;
    for round in 0..rounds {
        let writes: Vec<_> = (0..BLOCKS)
            .map(|i| {
                let bytes = pattern(round * 100 + i, 16 << 10);
                start(&core, &chan, WRITE, first + i * 32, 32, bufs(&bytes))
            })
            .collect();
        for write in writes {
            assert_eq!(write.await.unwrap(), Status::SUCCESS);
        }
        for i in (0..BLOCKS).step_by(5) {
            let got = get(&core, &chan, first + i * 32, 16 << 10, 512).await.unwrap();
            assert!(got == pattern(round * 100 + i, 16 << 10), "round {round}, block {i}");
        }
    }
}

/// Both cores write and read while sessions end again and again: nothing fails, and nothing is lost or goes back.
#[test]
fn io_survives_resets_under_load() {
    engine(|engine| async move {
        engine.serve(512).await;
        engine.attach(json!({ "ctrlr_loss_timeout_sec": -1, "reconnect_delay_sec": 1, "ddgst": true })).await;
        let work: Vec<_> = [(DATA, 0u64), (CoreId(2), 8192)]
            .into_iter()
            .map(|(id, first)| {
                let entry = engine.entry("Nn1");
                engine.app.core().call_async(id, move |core| {
                    let (core, chan) = (core.clone(), entry.open(core).unwrap());
                    hammer(core, chan, first, 40)
                })
            })
            .collect();
        let done: Rc<std::cell::Cell<bool>> = Rc::default();
        let finished = Rc::clone(&done);
        engine.app.core().spawn(async move {
            for outcome in futures::future::join_all(work).await {
                outcome.unwrap();
            }
            finished.set(true);
        });
        let mut resets = 0;
        while !done.get() {
            engine.app.core().sleep(5 * NANOS_PER_MS).await;
            engine.ok("bdev_nvme_reset_controller", json!({ "name": "N" })).await;
            resets += 1;
        }
        assert!(resets > 0);
        let paths = engine.ok("bdev_nvme_get_io_paths", json!({})).await;
        assert_eq!(paths, json!({ "poll_groups": [] }), "no core has a channel any more");
    });
}

/// Channels come and go, each time with a queue of its own.
#[test]
fn queues_follow_the_channels() {
    engine(|engine| async move {
        engine.serve(512).await;
        engine.attach(json!({ "num_io_queues": 2 })).await;
        for round in 0..20 {
            let wrote = engine
                .on_channel("Nn1", move |core, chan| async move {
                    let wrote = put(&core, &chan, 0, &pattern(round, 4096), 512).await;
                    (wrote, get(&core, &chan, 0, 4096, 512).await)
                })
                .await;
            assert_eq!(wrote, (Status::SUCCESS, Ok(pattern(round, 4096))));
        }
        assert_eq!(engine.state().await, "enabled");
    });
}

/// A third core finds no queue left: its I/O fails with a path error, and the others go on.
#[test]
fn io_without_a_queue_fails() {
    engine(|engine| async move {
        engine.serve(512).await;
        engine.attach(json!({ "num_io_queues": 1 })).await;
        let entry = engine.entry("Nn1");
        let core = engine.app.core().clone();
        let on_second = move |core: &Core| {
            let (core, chan) = (core.clone(), entry.open(core).unwrap());
            async move { get(&core, &chan, 0, 512, 512).await }
        };
        let outcome = engine
            .on_channel("Nn1", move |own, chan| async move {
                put(&own, &chan, 0, &pattern(1, 512), 512).await;
                let second = own.call_async(CoreId(2), on_second).await.unwrap();
                (second, get(&own, &chan, 0, 512, 512).await)
            })
            .await;
        drop(core);
        assert!(outcome.0.unwrap_err().is_path_error());
        assert_eq!(outcome.1, Ok(pattern(1, 512)));
    });
}

/// A command that is not answered in time costs the session; without replay its I/O fails.
#[test]
fn a_missed_deadline_loses_the_session() {
    engine(|engine| async move {
        engine.ok("bdev_nvme_set_options", json!({ "timeout_us": 150_000 })).await;
        engine.serve_slow().await;
        let slow = json!({ "delay_bdev_name": "D0", "latency_type": "avg_write", "latency_us": 2_000_000 });
        engine.ok("bdev_delay_update_latency", slow).await;
        let more = json!({ "ctrlr_loss_timeout_sec": -1, "reconnect_delay_sec": 1, "addax_no_replay": true });
        engine.attach(more).await;
        let status = engine
            .on_channel("Nn1", |core, chan| async move {
                start(&core, &chan, WRITE, 0, 1, bufs(&pattern(1, 512))).await.unwrap()
            })
            .await;
        assert!(status.is(Status::HOST_PATHING_ERROR), "{status}");
        engine.until_state(|state| state == "enabled").await;
    });
}

/// Passes on what comes between a host and the target, until it is told to stand still: then connections stay open and
/// nothing comes through any more, as with a process that was stopped.
struct Relay {
    port: u16,
    still: Arc<AtomicBool>,
}

impl Relay {
    fn start(target: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (port, still) = (listener.local_addr().unwrap().port(), Arc::new(AtomicBool::new(false)));
        let stop = Arc::clone(&still);
        std::thread::spawn(move || {
            for host in listener.incoming() {
                let Ok(target) = TcpStream::connect(("127.0.0.1", target)) else { continue };
                let host = host.unwrap();
                let ways = [(host.try_clone().unwrap(), target.try_clone().unwrap()), (target, host)];
                for (from, to) in ways {
                    let stop = Arc::clone(&stop);
                    std::thread::spawn(move || pass_on(from, to, &stop));
                }
            }
        });
        Self { port, still }
    }
}

fn pass_on(mut from: TcpStream, mut to: TcpStream, still: &AtomicBool) {
    let mut bytes = [0; 65536];
    while let Ok(count @ 1..) = from.read(&mut bytes) {
        while still.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(5));
        }
        if to.write_all(&bytes[..count]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(std::net::Shutdown::Both);
}

/// A target that hangs is found out long before its commands miss their deadline.
#[test]
fn io_that_makes_no_progress_asks_for_a_sign_of_life() {
    engine(|engine| async move {
        engine.serve(512).await;
        let relay = Relay::start(engine.port);
        let more = json!({ "ctrlr_loss_timeout_sec": -1, "reconnect_delay_sec": 1, "addax_no_replay": true,
            "trsvcid": relay.port.to_string() });
        engine.attach(more).await;
        let (still, begun) = (Arc::clone(&relay.still), engine.app.core().now());
        let status = engine
            .on_channel("Nn1", move |core, chan| async move {
                assert_eq!(put(&core, &chan, 0, &pattern(1, 512), 512).await, Status::SUCCESS);
                still.store(true, Ordering::SeqCst);
                put(&core, &chan, 0, &pattern(2, 512), 512).await
            })
            .await;
        assert!(status.is(Status::HOST_PATHING_ERROR), "{status}");
        assert!(engine.app.core().now() - begun < DEFAULT_DEADLINE_NS, "the deadline of the command has found it out");
        relay.still.store(false, Ordering::SeqCst);
        engine.until_state(|state| state == "enabled").await;
    });
}

/// A target that is only slow answers when it is asked, and keeps its session.
#[test]
fn io_that_is_slow_keeps_its_session() {
    engine(|engine| async move {
        engine.serve_slow().await;
        let slow = json!({ "delay_bdev_name": "D0", "latency_type": "avg_write", "latency_us": 2_500_000 });
        engine.ok("bdev_delay_update_latency", slow).await;
        engine.attach(json!({ "ctrlr_loss_timeout_sec": -1, "reconnect_delay_sec": 1, "addax_no_replay": true })).await;
        let slow_write =
            |core: Core, chan: crate::bdev::Chan| async move { put(&core, &chan, 0, &pattern(1, 512), 512).await };
        assert_eq!(engine.on_channel("Nn1", slow_write).await, Status::SUCCESS);
    });
}

/// A target that takes the connection and says nothing.
#[test]
fn a_silent_target_is_given_up() {
    engine(|engine| async move {
        let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        engine.ok("bdev_nvme_set_options", json!({ "tcp_connect_timeout_ms": 100 })).await;
        let port = silent.local_addr().unwrap().port().to_string();
        let params = engine.attach_params(json!({ "trsvcid": port }));
        assert_eq!(engine.rpc("bdev_nvme_attach_controller", params).await.unwrap_err().code, -5);
        assert_eq!(engine.ok("bdev_nvme_get_controllers", json!({})).await, json!([]));
    });
}

/// A reset as an I/O ends the session and makes another.
#[test]
fn a_reset_comes_as_io_too() {
    engine(|engine| async move {
        engine.serve(512).await;
        engine.attach(json!({})).await;
        let outcome = engine
            .on_channel("Nn1", |core, chan| async move {
                put(&core, &chan, 0, &pattern(1, 512), 512).await;
                let reset = start(&core, &chan, IoOp::Reset, 0, 0, bufs(&[])).await.unwrap();
                (reset, get(&core, &chan, 0, 512, 512).await)
            })
            .await;
        assert_eq!(outcome, (Status::SUCCESS, Ok(pattern(1, 512))));
    });
}
