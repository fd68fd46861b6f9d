//! Large stores: what a load reads grows with what is used, not with its square, nor with the size of the disk.
//!
//! Counted, not timed. `cargo test --release -p lvol-core --test store -- --ignored --nocapture scale` prints times and
//! memory of 10 000 lvols on 1 TiB.

use std::rc::Rc;
use std::time::Instant;

use lvol_core::testing::{Fill, Image, PowerDisk, PowerOptions, Tear, Unmapped};
use lvol_core::{ClearMethod, CreateOptions, FormatOptions, LoadOptions, NoHooks, Store};
use uuid::Uuid;

use crate::support::on;

const CLUSTER: u64 = 4 << 20;

fn options(size: u64) -> PowerOptions {
    PowerOptions {
        size,
        block_size: 4096,
        write_cache: true,
        unmapped: Unmapped::Zeroes,
        fill: Fill::Zeroes,
        tear: Tear { coarse: 4096, coarse_until: u64::MAX, fine: 4096 },
        seed: 1,
    }
}

/// A store of so many lvols, every eighth with a snapshot, each with some clusters written. Its image, dirty and clean.
fn made(size: u64, lvols: u64, written: u64) -> (Image, Image) {
    let disk = PowerDisk::new(options(size));
    on(&disk, async {
        let format = FormatOptions::new("store", Uuid::from_u128(1));
        let store = Store::format(Rc::new(disk.clone()), Rc::new(NoHooks), format).await.unwrap();
        for number in 0..lvols {
            let options = CreateOptions {
                name: format!("lvol-{number}"),
                uuid: Uuid::from_u128(u128::from(number + 2)),
                size_bytes: 64 << 30,
                thin: true,
                clear_method: ClearMethod::Default,
            };
            let lvol = store.create(options).await.unwrap();
            for cluster in 0..written {
                // Spread, so that there are several extent pages.
                lvol.write((cluster * 700 % 16_000) * CLUSTER, &[1; 4096]).await.unwrap();
            }
            if number % 8 == 0 {
                let uuid = Uuid::from_u128(u128::from(number + 1_000_000));
                lvol.snapshot(&format!("snapshot-{number}"), uuid).await.unwrap();
            }
        }
        let dirty = disk.current().clone();
        store.unload().await.unwrap();
        (dirty, disk.current().clone())
    })
}

struct Load {
    reads: u64,
    bytes: u64,
    lvols: usize,
    recovered: bool,
    seconds: f64,
    /// Bytes that the store holds.
    memory: u64,
    /// Bytes held at the most while it was loaded.
    peak: u64,
}

fn load(image: &Image) -> Load {
    let disk = PowerDisk::with_image(options(image.size()), image.clone());
    let mut loaded = None;
    let started = Instant::now();
    let allocated = allocation_counter::measure(|| {
        let find = |_: &str| -> lvol_core::LocalFuture<'_, _> { Box::pin(async { None }) };
        let device = Rc::new(disk.clone());
        loaded = Some(on(&disk, Store::load(device, Rc::new(NoHooks), LoadOptions::default(), &find, &|_| {})));
    });
    let seconds = started.elapsed().as_secs_f64();
    let (store, report) = loaded.unwrap().unwrap();
    let counts = disk.counts();
    Load {
        reads: counts.reads,
        bytes: counts.read_bytes,
        lvols: store.lvols().len(),
        recovered: report.recovered,
        seconds,
        memory: u64::try_from(allocated.bytes_current).unwrap(),
        peak: allocated.bytes_max,
    }
}

#[test]
fn what_a_load_reads_grows_with_what_is_used() {
    let size = 64 << 30;
    let (dirty, clean) = made(size, 100, 3);
    let (dirty_double, clean_double) = made(size, 200, 3);
    for (name, single, double) in [("clean", &clean, &clean_double), ("dirty", &dirty, &dirty_double)] {
        let (single, double) = (load(single), load(double));
        assert_eq!((single.lvols, double.lvols), (113, 225), "{name}");
        assert_eq!(single.recovered, name == "dirty");
        let bounded = double.bytes <= single.bytes * 22 / 10 && double.reads <= single.reads * 22 / 10;
        assert!(bounded, "{name}: {} and {} bytes, {} reads", single.bytes, double.bytes, double.reads);
    }
    // The same lvols on a disk sixteen times as large.
    let (dirty_large, clean_large) = made(size * 16, 100, 3);
    for (name, small, large) in [("clean", &clean, &clean_large), ("dirty", &dirty, &dirty_large)] {
        let (small, large) = (load(small), load(large));
        // The masks alone grow with the disk.
        let masks = 3 * (size * 16 / CLUSTER / 8 + 8192);
        assert!(large.bytes <= small.bytes * 11 / 10 + masks, "{name}: {} and {} bytes", small.bytes, large.bytes);
    }
}

#[test]
#[ignore = "prints figures; for a release build"]
fn scale() {
    for lvols in [1000, 2500, 5000, 10_000] {
        let (dirty, clean) = made(1 << 40, lvols, 4);
        for image in [&clean, &dirty] {
            let load = load(image);
            println!(
                "1 TiB, {} lvols, {}: {:.3} s, {} reads, {} MiB read, {} MiB of memory, {} MiB at most",
                load.lvols,
                if load.recovered { "dirty" } else { "clean" },
                load.seconds,
                load.reads,
                load.bytes >> 20,
                load.memory >> 20,
                load.peak >> 20,
            );
        }
    }
}
