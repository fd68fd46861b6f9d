//! A replica that was away gets what changed, and only that: by the engine that it left, and by the next one (rules 8, 9).
//! What was copied is counted by the mirror itself.
//!
//! `ADDAX_DELTA_MIB` is the size of the volume; the default is small.
#![allow(clippy::unwrap_used)]

use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use e2e::engine::Engine;
use e2e::nvme_tcp::Namespace;
use e2e::spdk::free_port;
use serde_json::{Value, json};

const BLOCK: u64 = 4096;
/// Blocks of a region of these sizes: 1 MiB.
const REGION: u64 = (1 << 20) / BLOCK;
const PATIENCE: Duration = Duration::from_secs(90);

fn size() -> u64 {
    let mib = std::env::var("ADDAX_DELTA_MIB").ok().and_then(|text| text.parse::<u64>().ok());
    mib.unwrap_or(96) << 20
}

fn config(epoch: u64, number: u64, in_sync: &[&str]) -> Value {
    json!({"lineage": "l", "epoch": epoch, "engine_instance": format!("e{epoch}"), "config_number": number,
        "in_sync": in_sync, "rebuilding": [], "min_in_sync": 1, "size": size()})
}

/// A mirror on devices in memory, each with a meta area beside it, and what its agent has to do.
struct Bench {
    engine: Engine,
    seen: u64,
    exports: u32,
}

impl Bench {
    fn new() -> Self {
        let engine = Engine::start(&["-m", "0x1"]).unwrap();
        for name in ["a", "b"] {
            for (device, blocks) in [(format!("M{name}"), size() / BLOCK), (format!("T{name}"), 4096)] {
                let device = json!({"name": device, "num_blocks": blocks, "block_size": BLOCK});
                engine.rpc("bdev_malloc_create", device).unwrap();
            }
        }
        Self { engine, seen: 0, exports: 0 }
    }

    /// Opens the volume with these members; the first `dirty` regions may differ.
    fn open(&self, config: &Value, served: u64, dirty: u64) {
        let leg = |name: &Value| {
            let name = name.as_str().unwrap();
            json!({"replica": name, "bdev_name": format!("M{name}"), "meta_bdev_name": format!("T{name}")})
        };
        let legs: Vec<Value> = config["in_sync"].as_array().unwrap().iter().map(leg).collect();
        let mut inherited = vec![0u8; usize::try_from(size().div_ceil(1 << 20).div_ceil(8)).unwrap()];
        (0..dirty).for_each(|region| inherited[usize::try_from(region / 8).unwrap()] |= 1 << (region % 8));
        let request = json!({"name": "V", "uuid": "5c0a2f8e-8d6e-4b8e-9a52-3e1f6a7b9c07", "volume": "v",
            "block_size": BLOCK, "size_bytes": size(), "config": config, "legs": legs,
            "inherited": BASE64.encode(&inherited), "served_epoch": served});
        self.engine.rpc("addax_mirror_create", request).unwrap();
    }

    fn mirror(&self) -> Value {
        self.engine.rpc("addax_mirror_get", json!({"name": "V"})).unwrap()[0].take()
    }

    fn wait(&self, what: &str, holds: impl Fn(&Value) -> bool) {
        let until = Instant::now() + PATIENCE;
        while !holds(&self.mirror()) {
            assert!(Instant::now() < until, "the mirror is never {what}: {:#}", self.mirror());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Commits the next swap, which is to lead to these members.
    fn commit(&mut self, in_sync: &[&str]) {
        for _ in 0..50 {
            let wait = json!({"after": self.seen, "timeout_ms": 2000});
            let answer = self.engine.rpc("addax_wait_events", wait).unwrap();
            for event in answer["events"].as_array().unwrap() {
                self.seen = event["seq"].as_u64().unwrap();
                if event["type"] == "swap" {
                    assert_eq!(event["next"]["in_sync"], json!(in_sync), "{event:#}");
                    let answer = json!({"name": "V", "swap": event["swap"], "outcome": "committed"});
                    self.engine.rpc("addax_mirror_swap_answer", answer).unwrap();
                    return;
                }
            }
        }
        panic!("no swap: {}", self.engine.log());
    }

    fn namespace(&mut self, device: &str) -> Namespace {
        self.exports += 1;
        let (port, nqn) = (free_port().unwrap(), format!("nqn.2026-11.io.addax:volume:delta{}", self.exports));
        self.engine.export(device, &nqn, port).unwrap();
        Namespace::connect(port, &nqn, 1).unwrap()
    }

    /// Takes b out of the volume.
    fn remove_b(&mut self) {
        self.engine.rpc("addax_mirror_remove_leg", json!({"name": "V", "replica": "b"})).unwrap();
        self.commit(&["a"]);
        self.wait("without b", |mirror| mirror["legs"].as_array().unwrap().len() == 1);
    }

    /// Rebuilds b; gives the bytes that were copied.
    fn rebuild_b(&mut self) -> u64 {
        let before = self.mirror()["copied_blocks"].as_u64().unwrap();
        let leg = json!({"name": "V", "replica": "b", "bdev_name": "Mb", "meta_bdev_name": "Tb"});
        self.engine.rpc("addax_mirror_add_leg", leg).unwrap();
        self.commit(&["a"]);
        self.commit(&["a", "b"]);
        self.wait("whole", |mirror| mirror["config"]["in_sync"].as_array().unwrap().len() == 2);
        (self.mirror()["copied_blocks"].as_u64().unwrap() - before) * BLOCK
    }
}

/// Writes whole regions with bytes of their own.
fn write(namespace: &mut Namespace, first: u64, regions: u64, byte: u8) {
    for region in first..first + regions {
        let mut data = vec![byte; 1 << 20];
        data[..8].copy_from_slice(&region.to_le_bytes());
        namespace.write(region * REGION, &data).unwrap();
    }
}

#[test]
fn a_replica_that_was_away_gets_what_changed_from_its_engine_and_from_the_next_one() {
    let mut bench = Bench::new();
    bench.open(&config(1, 1, &["a", "b"]), 0, 0);
    let mut volume = bench.namespace("V");
    write(&mut volume, 0, 32, 1);
    bench.wait("idle", |mirror| mirror["live_regions"] == 0);

    bench.remove_b();
    write(&mut volume, 4, 6, 2);
    let copied = bench.rebuild_b();
    println!("6 MiB changed, {copied} bytes were copied");
    assert!((6 << 20..=12 << 20).contains(&copied), "{copied}");
    bench.wait("idle", |mirror| mirror["live_regions"] == 0);

    bench.remove_b();
    write(&mut volume, 0, 3, 3);
    bench.wait("idle", |mirror| mirror["live_regions"] == 0);
    write(&mut volume, 20, 2, 4);
    drop(volume);
    // The engine goes without a close; the next one finds the bits of what was written last, or of more.
    let number = bench.mirror()["config"]["config_number"].as_u64().unwrap();
    bench.engine.rpc("addax_mirror_delete", json!({"name": "V"})).unwrap();
    bench.open(&config(2, number, &["a"]), 1, 0);
    let mut volume = bench.namespace("V");
    write(&mut volume, 10, 1, 5);
    // Regions 20 and 21 were stamped when they were written, whatever their bits say.
    let copied = bench.rebuild_b();
    println!("6 MiB changed under two engines, {copied} bytes were copied");
    assert!((6 << 20..=12 << 20).contains(&copied), "{copied}");

    drop(volume);
    bench.engine.rpc("addax_mirror_delete", json!({"name": "V"})).unwrap();
    let (mut a, mut b) = (bench.namespace("Ma"), bench.namespace("Mb"));
    for at in (0..size() / BLOCK).step_by(32) {
        assert!(a.read(at, 32).unwrap() == b.read(at, 32).unwrap(), "the copies differ from block {at} on");
    }
    assert_eq!(a.read(20 * REGION, 1).unwrap()[8], 4);
}
