//! The mirror device as its agent sees it: swaps asked for by events, rebuilds that join, an orderly close.
#![allow(clippy::unwrap_used)]

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use e2e::engine::Engine;
use e2e::load::Load;
use e2e::spdk::free_port;
use serde_json::{Value, json};

const SIZE: u64 = 8 << 20;

fn config(in_sync: &[&str], rebuilding: &[&str]) -> Value {
    json!({"lineage": "l", "epoch": 1, "engine_instance": "e", "config_number": 1, "in_sync": in_sync,
        "rebuilding": rebuilding, "min_in_sync": 1, "size": SIZE})
}

fn open(engine: &Engine, in_sync: &[&str], rebuilding: &[&str]) {
    for name in ["a", "b", "c"] {
        let device = json!({"name": format!("M{name}"), "num_blocks": SIZE / 4096, "block_size": 4096});
        engine.rpc("bdev_malloc_create", device).unwrap();
    }
    let leg = |name: &&str| json!({"replica": name, "bdev_name": format!("M{name}"), "local": true});
    let legs: Vec<Value> = in_sync.iter().chain(rebuilding).map(leg).collect();
    let request = json!({"name": "V", "uuid": "5c0a2f8e-8d6e-4b8e-9a52-3e1f6a7b9c02", "volume": "v", "block_size": 4096,
        "size_bytes": SIZE, "config": config(in_sync, rebuilding), "legs": legs});
    assert_eq!(engine.rpc("addax_mirror_create", request).unwrap(), json!("V"));
}

/// Waits for the next event of a type after `after`; gives it and its number.
fn next(engine: &Engine, after: &mut u64, kind: &str) -> Value {
    for _ in 0..50 {
        let answer = engine.rpc("addax_wait_events", json!({"after": *after, "timeout_ms": 2000})).unwrap();
        for event in answer["events"].as_array().unwrap() {
            *after = event["seq"].as_u64().unwrap();
            if event["type"] == kind {
                return event.clone();
            }
        }
    }
    panic!("no {kind} event: {}", engine.log());
}

fn commit(engine: &Engine, swap: &Value) {
    let answer = json!({"name": "V", "swap": swap["swap"], "outcome": "committed"});
    engine.rpc("addax_mirror_swap_answer", answer).unwrap();
}

#[test]
fn a_rebuilt_replica_joins_by_a_swap_and_a_close_is_recorded() {
    let engine = Engine::start(&["-m", "0x1"]).unwrap();
    open(&engine, &["a"], &["b"]);
    let mut seen = 0;
    let join = next(&engine, &mut seen, "swap");
    assert_eq!(join["next"]["in_sync"], json!(["a", "b"]));
    assert_eq!(join["next"]["config_number"], json!(2));
    let waiting = &engine.rpc("addax_mirror_get", json!({"name": "V"})).unwrap()[0];
    assert_eq!(waiting["config"]["in_sync"], json!(["a"]), "nothing joins before the arbiter says so");
    commit(&engine, &join);

    let add = json!({"name": "V", "replica": "c", "bdev_name": "Mc", "local": true});
    engine.rpc("addax_mirror_add_leg", add).unwrap();
    let start = next(&engine, &mut seen, "swap");
    assert_eq!(start["next"]["rebuilding"], json!(["c"]));
    commit(&engine, &start);
    let join = next(&engine, &mut seen, "swap");
    assert_eq!(join["next"]["in_sync"], json!(["a", "b", "c"]));
    commit(&engine, &join);

    std::thread::scope(|scope| {
        let closing = scope.spawn(|| engine.rpc("addax_mirror_close", json!({"name": "V"})));
        let clean = next(&engine, &mut seen, "swap");
        assert_eq!(clean["next"]["clean"], json!(true));
        commit(&engine, &clean);
        assert_eq!(closing.join().unwrap().unwrap(), json!(true));
    });
    engine.rpc("addax_mirror_delete", json!({"name": "V"})).unwrap();
    assert_eq!(engine.rpc("addax_mirror_get", Value::Null).unwrap(), json!([]));
    let bases = engine.rpc("bdev_get_bdevs", Value::Null).unwrap();
    assert!(bases.as_array().unwrap().iter().all(|b| b["claimed"] == json!(false)), "claims are left");
}

/// More than a mirror keeps in flight: 12 queues of 127.
#[test]
fn commands_for_which_a_mirror_has_no_room_wait_until_it_has() {
    const NQN: &str = "nqn.2026-11.io.addax:volume:full";
    let engine = Engine::start(&["-m", "0x1"]).unwrap();
    engine.rpc("bdev_malloc_create", json!({"name": "Mx", "num_blocks": SIZE / 4096, "block_size": 4096})).unwrap();
    // Longer than a host goes on to repeat what it is told to repeat.
    let slow = json!({"name": "Ma", "base_bdev_name": "Mx", "avg_read_latency": 0, "p99_read_latency": 0,
        "avg_write_latency": 3_000_000, "p99_write_latency": 3_000_000});
    engine.rpc("bdev_delay_create", slow).unwrap();
    let request = json!({"name": "V", "uuid": "5c0a2f8e-8d6e-4b8e-9a52-3e1f6a7b9c02", "volume": "v", "block_size": 4096,
        "size_bytes": SIZE, "config": config(&["a"], &[]), "legs": [{"replica": "a", "bdev_name": "Ma"}]});
    engine.rpc("addax_mirror_create", request).unwrap();
    let port = free_port().unwrap();
    engine.export("V", NQN, port).unwrap();
    let load = ["--rw", "write", "--bs", "4k", "--connections", "12", "--qd", "127", "--size", "8M"];
    let done = Load::start(([127, 0, 0, 1], port).into(), NQN, &load).unwrap().finish().unwrap();
    assert_eq!((done.errors, done.ios), (0, SIZE / 4096), "{:#}", done.report);
}

#[test]
fn bad_parameters_are_refused_and_leave_nothing() {
    let engine = Engine::start(&["-m", "0x1"]).unwrap();
    engine.rpc("bdev_malloc_create", json!({"name": "Ma", "num_blocks": SIZE / 4096, "block_size": 4096})).unwrap();
    engine.rpc("bdev_malloc_create", json!({"name": "M5", "num_blocks": SIZE / 512, "block_size": 512})).unwrap();
    let good = json!({"name": "V", "uuid": "5c0a2f8e-8d6e-4b8e-9a52-3e1f6a7b9c02", "volume": "v", "block_size": 4096,
        "size_bytes": SIZE, "config": config(&["a"], &[]), "legs": [{"replica": "a", "bdev_name": "Ma"}]});
    let cases = [
        ("block_size", json!(0), "-22"),
        ("block_size", json!(1000), "-22"),
        ("size_bytes", json!(SIZE + 4096), "size_bytes"),
        ("legs", json!([]), "leg"),
        ("legs", json!([{"replica": "a", "bdev_name": "nothing"}]), "-19"),
        ("legs", json!([{"replica": "a", "bdev_name": "M5"}]), "512"),
        ("legs", json!([{"replica": "b c", "bdev_name": "Ma"}]), "b c"),
        ("volume", json!(""), "volume"),
        ("equalise_from", json!("z"), "equalise_from"),
        ("colour", json!(1), "Invalid parameters"),
    ];
    for (field, value, expected) in cases {
        let mut request = good.clone();
        request[field] = value.clone();
        let error = engine.rpc("addax_mirror_create", request).unwrap_err().to_string();
        assert!(error.contains(expected), "{field} {value}: {error}");
        assert_eq!(engine.rpc("addax_mirror_get", Value::Null).unwrap(), json!([]));
    }
    assert_eq!(engine.rpc("addax_mirror_create", good).unwrap(), json!("V"));
}

#[test]
fn legs_with_meta_areas_keep_bits_and_superblocks_that_can_be_read() {
    let engine = Engine::start(&["-m", "0x1"]).unwrap();
    for name in ["a", "b"] {
        for (device, blocks) in [(format!("M{name}"), SIZE / 4096), (format!("T{name}"), 64)] {
            let device = json!({"name": device, "num_blocks": blocks, "block_size": 4096});
            engine.rpc("bdev_malloc_create", device).unwrap();
        }
    }
    engine.rpc("bdev_malloc_create", json!({"name": "small", "num_blocks": 1, "block_size": 4096})).unwrap();
    let leg =
        |name: &str| json!({"replica": name, "bdev_name": format!("M{name}"), "meta_bdev_name": format!("T{name}")});
    let regions = SIZE.div_ceil(1 << 20);
    let mut inherited = vec![0; usize::try_from(regions.div_ceil(8)).unwrap()];
    inherited[0] = 1;
    let good = json!({"name": "V", "uuid": "5c0a2f8e-8d6e-4b8e-9a52-3e1f6a7b9c02", "volume": "v", "block_size": 4096,
        "size_bytes": SIZE, "config": config(&["a", "b"], &[]), "legs": [leg("a"), leg("b")],
        "inherited": BASE64.encode(&inherited)});
    let small = json!({"replica": "a", "bdev_name": "Ma", "meta_bdev_name": "small"});
    let bad = [
        ("legs", json!([small, leg("b")]), "small"),
        ("inherited", json!(""), "inherited"),
        ("inherited", json!("%"), "base64"),
        ("equalise_from", json!("a"), "equalise_from"),
    ];
    for (field, value, expected) in bad {
        let mut request = good.clone();
        request[field] = value;
        let error = engine.rpc("addax_mirror_create", request).unwrap_err().to_string();
        assert!(error.contains(expected), "{field}: {error}");
    }
    let read = |name: &str, block: u64, blocks: u64| {
        engine.rpc("addax_mirror_read_meta", json!({"bdev_name": name, "block": block, "blocks": blocks}))
    };
    let is_new = |data: Vec<u8>| data.len() == 2 * 4096 && data.iter().all(|byte| *byte == 0);
    let bytes = |answer: Value| BASE64.decode(answer["data"].as_str().unwrap()).unwrap();
    assert!(is_new(bytes(read("Ta", 0, 2).unwrap())), "what was refused has written");
    for (block, blocks) in [(0, 0), (63, 2), (0, 257), (u64::MAX, 1)] {
        read("Ta", block, blocks).unwrap_err();
    }

    engine.rpc("addax_mirror_create", good).unwrap();
    let mirror = || engine.rpc("addax_mirror_get", json!({"name": "V"})).unwrap()[0].clone();
    let end = std::time::Instant::now() + std::time::Duration::from_secs(60);
    while mirror()["inherited_regions"] != json!(0) {
        assert!(std::time::Instant::now() < end, "never equal: {}", mirror());
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    // The one region that was inherited, to the one other member.
    assert_eq!(mirror()["copied_blocks"], json!((1 << 20) / 4096));
    let metas: Vec<Value> =
        mirror()["legs"].as_array().unwrap().iter().map(|leg| leg["meta_bdev_name"].clone()).collect();
    assert!(metas.contains(&json!("Ta")) && metas.contains(&json!("Tb")), "{metas:?}");
    assert!(read("Ta", 0, 2).is_ok(), "reading needs no claim");
    let mut seen = 0;
    std::thread::scope(|scope| {
        let closing = scope.spawn(|| engine.rpc("addax_mirror_close", json!({"name": "V"})));
        commit(&engine, &next(&engine, &mut seen, "swap"));
        closing.join().unwrap().unwrap();
    });
    engine.rpc("addax_mirror_delete", json!({"name": "V"})).unwrap();
    for name in ["Ta", "Tb"] {
        let data = bytes(read(name, 0, 2).unwrap());
        assert!(data.chunks(4096).any(|slot| slot.starts_with(b"ADDAXSB1")), "no superblock on {name}");
    }
    let bases = engine.rpc("bdev_get_bdevs", Value::Null).unwrap();
    assert!(bases.as_array().unwrap().iter().all(|b| b["claimed"] == json!(false)), "claims are left");
}
