//! In the steady state an I/O allocates nothing.
#![allow(clippy::unwrap_used)]

use engine_step::host::Workload;
use engine_step::{Device, Step};

/// Batches until every table, queue and buffer has the room it needs.
const WARM_UP: u32 = 50;
const BATCHES: u32 = 100;

fn allocations(device: Device, io: Workload) -> u64 {
    let mut step = Step::new(device).unwrap();
    let mut host = step.attach().unwrap();
    step.run(&mut host, &io, WARM_UP).unwrap();
    allocation_counter::measure(|| step.run(&mut host, &io, BATCHES).unwrap()).count_total
}

#[test]
fn an_io_allocates_nothing() {
    for device in [Device::Null, Device::Malloc, Device::Raid1, Device::Mirror] {
        for write in [false, true] {
            for (bytes, depth) in [(4096, 1), (4096, 32), (4096, 128), (16_384, 8), (131_072, 8)] {
                let io = Workload { write, bytes, depth };
                assert_eq!(allocations(device, io), 0, "{device:?} {io:?}");
            }
        }
    }
}

#[test]
fn the_counter_counts() {
    let boxed = allocation_counter::measure(|| drop(std::hint::black_box(Box::new(5))));
    assert_eq!(boxed.count_total, 1);
}
