//! The mirror device as its agent sees it: swaps asked for by events, rebuilds that join, an orderly close.
#![allow(clippy::unwrap_used)]

use e2e::engine::Engine;
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
