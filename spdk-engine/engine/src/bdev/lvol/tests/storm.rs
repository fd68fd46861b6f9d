//! Every operation with I/O running on both data cores: nothing fails, nothing is lost, nothing shows through.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use nvme_wire::Status;
use serde_json::json;

use super::*;

/// Blocks written at once.
const UNIT_BLOCKS: u64 = 8;
const UNIT: usize = UNIT_BLOCKS as usize * BLOCK;
/// I/O in flight per core.
const DEPTH: usize = 8;

/// A generator that repeats for a seed.
struct Random(u64);

impl Random {
    fn next(&mut self, below: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % below
    }
}

/// Writes, clears and reads random units of every second cluster (the first or the second, by `lane`), and checks each
/// read against what the unit must hold.
async fn work(core: Core, chan: Chan, clusters: u64, lane: u64, seed: u64, stop: Arc<AtomicBool>) -> u64 {
    let units = clusters / 2 * (CLUSTER_BLOCKS / UNIT_BLOCKS);
    let lba_of = |unit: u64| {
        let (cluster, within) = (unit / (CLUSTER_BLOCKS / UNIT_BLOCKS), unit % (CLUSTER_BLOCKS / UNIT_BLOCKS));
        (cluster * 2 + lane) * CLUSTER_BLOCKS + within * UNIT_BLOCKS
    };
    let mut model: Vec<Option<u64>> = vec![None; units as usize];
    let mut random = Random(seed);
    let mut round = 0;
    while !stop.load(Ordering::Relaxed) {
        round += 1;
        // Units of one round differ, so that they may be in flight together.
        let first = random.next(units);
        let chosen: Vec<u64> = (0..DEPTH as u64).map(|i| (first + i * 7) % units).collect();
        let mut waits = Vec::new();
        for unit in &chosen {
            let value = match random.next(6) {
                0 => None,
                _ => Some(round * 1000 + unit),
            };
            model[*unit as usize] = value;
            waits.push(match value {
                None => start(&core, &chan, IoOp::Unmap, lba_of(*unit), UNIT_BLOCKS, Bufs::new()),
                Some(value) => start(&core, &chan, WRITE, lba_of(*unit), UNIT_BLOCKS, bufs(&pattern(value, UNIT))),
            });
        }
        for wait in waits {
            assert_eq!(wait.await.unwrap(), Status::SUCCESS, "seed {seed} round {round}");
        }
        for _ in 0..4 {
            let unit = random.next(units);
            let got = get(&core, &chan, lba_of(unit), UNIT).await.unwrap();
            let expected = model[unit as usize].map_or_else(|| vec![0; UNIT], |value| pattern(value, UNIT));
            assert!(got == expected, "seed {seed} round {round}: unit {unit} is not as written");
        }
    }
    for (unit, value) in model.iter().enumerate() {
        let got = get(&core, &chan, lba_of(unit as u64), UNIT).await.unwrap();
        let expected = value.map_or_else(|| vec![0; UNIT], |value| pattern(value, UNIT));
        assert!(got == expected, "seed {seed} at the end: unit {unit} is not as written");
    }
    round
}

/// Operations on the volume `v` while it is written.
async fn operate(e: &Engine, rounds: u32) {
    for round in 0..rounds {
        let name = |kind: &str| format!("{kind}{round}");
        e.snapshot("v", &name("s")).await;
        e.snapshot("v", &name("t")).await;
        e.clone(&name("t"), &name("c")).await;
        e.ok("bdev_lvol_rename", json!({ "old_name": format!("lvs/{}", name("c")), "new_name": name("d") })).await;
        e.delete(&name("d")).await;
        match round % 4 {
            // Deletions merge into the volume, oldest and youngest first.
            0 => {
                e.delete(&name("s")).await;
                e.delete(&name("t")).await;
            }
            1 => {
                e.delete(&name("t")).await;
                e.delete(&name("s")).await;
            }
            2 => {
                e.ok("bdev_lvol_decouple_parent", json!({ "name": "lvs/v" })).await;
                e.delete(&name("t")).await;
                e.ok("bdev_lvol_inflate", json!({ "name": "lvs/v" })).await;
                e.delete(&name("s")).await;
            }
            _ => {
                e.ok("bdev_lvol_inflate", json!({ "name": "lvs/v" })).await;
                e.delete(&name("t")).await;
                e.delete(&name("s")).await;
            }
        }
        let grown = 4 + u64::from(round % 3);
        e.ok("bdev_lvol_resize", json!({ "name": "lvs/v", "size_in_mib": grown.max(4) + u64::from(round) })).await;
    }
}

#[test]
fn operations_beside_io_lose_nothing() {
    engine(|e| async move {
        e.store(96).await;
        e.create("v", 4, true).await;
        let clusters = 4 * MIB as u64 / CLUSTER as u64;
        let stop = Arc::new(AtomicBool::new(false));
        let mut workers = Vec::new();
        for (lane, core) in DATA.into_iter().enumerate() {
            let (entry, stop) = (e.entry("lvs/v"), Arc::clone(&stop));
            workers.push(e.app.core().call_async(core, move |core| {
                let chan = entry.open(core).unwrap();
                work(core.clone(), chan, clusters, lane as u64, 0x5eed + lane as u64, stop)
            }));
        }
        operate(&e, 8).await;
        stop.store(true, Ordering::Relaxed);
        for worker in workers {
            assert!(worker.await.expect("a worker failed") > 0);
        }
        let store = e.lvstore().await;
        let (total, free) = (store["total_data_clusters"].as_u64().unwrap(), store["free_clusters"].as_u64().unwrap());
        let used = e.lvol("v").await["num_allocated_clusters"].as_u64().unwrap();
        assert_eq!(total - free, used, "clusters are lost");
    });
}
