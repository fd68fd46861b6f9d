//! Random programs on a disk that answers late and in any order, on cores that take turns on one thread: each run is told
//! by its seed. What is read is what was written; a snapshot holds what was there when it was taken.

use std::cell::Cell;
use std::rc::Rc;

use nvme_wire::Status;
use serde_json::{Value, json};

use crate::bdev::{Bufs, IoOp, examine};
use crate::rpc::RpcError;
use crate::testing::disk::Medium;
use crate::testing::{Handle, Pending, World, uuid};

const BLOCK: u32 = 4096;
/// Bytes of a cluster: four blocks.
const CLUSTER: u64 = 4 * BLOCK as u64;
const DISK_BLOCKS: u64 = 8192;
/// Blocks of the volume that the program writes.
const BLOCKS: u64 = 128;
const CORES: u32 = 2;

struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }
}

fn world() -> World {
    World::new(CORES, |m| {
        crate::rpc::bdev::register(m);
        examine::register(m);
        crate::bdev::lvol::register(m);
    })
}

/// A write, clear or read under way.
struct Flight {
    lba: u64,
    blocks: u64,
    /// What the blocks hold afterwards; none for a read.
    byte: Option<u8>,
    pending: Rc<Pending>,
}

impl Flight {
    fn covers(&self, block: u64) -> bool {
        (self.lba..self.lba + self.blocks).contains(&block)
    }
}

/// A snapshot: what each block may hold, until it was read once; then what it does hold.
struct Taken {
    name: String,
    may: Vec<Vec<u8>>,
    held: Option<Vec<u8>>,
}

type Call = Rc<Cell<Option<Result<Value, RpcError>>>>;

struct Program {
    seed: u64,
    random: Random,
    world: World,
    handles: Vec<Handle>,
    model: Vec<u8>,
    flights: Vec<Flight>,
    snapshots: Vec<Taken>,
    call: Option<Call>,
    /// The snapshot that the running call takes or deletes.
    taking: Option<Taken>,
    count: u64,
    calls: u64,
    size_mib: u64,
}

impl Program {
    fn new(seed: u64, medium: &std::sync::Arc<Medium>, thin: bool) -> Self {
        let mut world = world();
        world.add_disk("D", medium);
        let store = json!({ "bdev_name": "D", "lvs_name": "s", "cluster_sz": CLUSTER });
        world.ok("bdev_lvol_create_lvstore", store);
        let params = json!({ "lvs_name": "s", "lvol_name": "v", "size_in_mib": 1, "thin_provision": thin });
        world.ok("bdev_lvol_create", params);
        let handles = (1..=CORES).map(|core| world.open("s/v", core)).collect();
        medium.late_ns.store(3_000_000, std::sync::atomic::Ordering::Relaxed);
        let model = vec![0; BLOCKS as usize];
        Self {
            seed,
            random: Random(seed),
            world,
            handles,
            model,
            flights: Vec::new(),
            snapshots: Vec::new(),
            call: None,
            taking: None,
            count: 0,
            calls: 0,
            size_mib: 1,
        }
    }

    fn begin_io(&mut self) {
        let (lba, blocks) = (self.random.below(BLOCKS), 1 + self.random.below(9));
        let blocks = blocks.min(BLOCKS - lba);
        let is_read = self.random.below(3) == 0;
        let meets = |f: &Flight| f.lba < lba + blocks && lba < f.lba + f.blocks && (!is_read || f.byte.is_some());
        if self.flights.iter().any(meets) {
            return;
        }
        let handle = self.handles[self.random.below(u64::from(CORES)) as usize].clone();
        self.count += 1;
        let (byte, pending) = match self.random.below(8) {
            _ if is_read => (None, handle.read(lba, blocks)),
            0 => (Some(0), handle.begin(IoOp::Unmap, lba, blocks, Bufs::new())),
            1 => (Some(0), handle.begin(IoOp::WriteZeroes, lba, blocks, Bufs::new())),
            _ => {
                let byte = (self.count % 251 + 1) as u8;
                (Some(byte), handle.write(lba, blocks, byte))
            }
        };
        if let (Some(byte), Some(taking)) = (byte, &mut self.taking) {
            (lba..lba + blocks).for_each(|b| taking.may[b as usize].push(byte));
        }
        self.flights.push(Flight { lba, blocks, byte, pending });
    }

    fn reap(&mut self) {
        let seed = self.seed;
        let (done, open): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.flights).into_iter().partition(|f| f.pending.status().is_some());
        self.flights = open;
        for flight in done {
            assert_eq!(flight.pending.status(), Some(Status::SUCCESS), "seed {seed}: I/O {}", self.count);
            let range = flight.lba as usize..(flight.lba + flight.blocks) as usize;
            match flight.byte {
                Some(byte) => self.model[range].fill(byte),
                None => {
                    let got = flight.pending.bytes();
                    for (block, bytes) in range.zip(got.chunks(BLOCK as usize)) {
                        let expected = self.model[block];
                        assert!(
                            bytes.iter().all(|b| *b == expected),
                            "seed {seed}: block {block} read as {}",
                            bytes[0]
                        );
                    }
                }
            }
        }
    }

    fn begin_call(&mut self) {
        if self.call.is_some() {
            return;
        }
        let kind = self.random.below(7);
        let (method, params) = match kind {
            0..3 if self.snapshots.len() < 4 => {
                let name = format!("t{}", self.count);
                let mut may: Vec<Vec<u8>> = self.model.iter().map(|byte| vec![*byte]).collect();
                for (block, may) in may.iter_mut().enumerate() {
                    let flights = self.flights.iter().filter(|f| f.covers(block as u64));
                    may.extend(flights.filter_map(|f| f.byte));
                }
                self.taking = Some(Taken { name: name.clone(), may, held: None });
                ("bdev_lvol_snapshot", json!({ "lvol_name": "s/v", "snapshot_name": name }))
            }
            3 | 4 if !self.snapshots.is_empty() => {
                let at = self.random.below(self.snapshots.len() as u64) as usize;
                let name = self.snapshots.remove(at).name;
                ("bdev_lvol_delete", json!({ "name": format!("s/{name}") }))
            }
            5 if !self.snapshots.is_empty() => ("bdev_lvol_decouple_parent", json!({ "name": "s/v" })),
            6 => {
                self.size_mib = 1 + self.random.below(3);
                ("bdev_lvol_resize", json!({ "name": "s/v", "size_in_mib": self.size_mib }))
            }
            _ => ("bdev_lvol_inflate", json!({ "name": "s/v" })),
        };
        self.call = Some(self.world.begin(method, params));
    }

    fn end_call(&mut self) {
        let Some(answer) = self.call.as_ref().and_then(|call| call.take()) else { return };
        self.call = None;
        self.calls += u64::from(answer.is_ok());
        // A decouple of a volume that has no parent any more is refused; nothing else is.
        if let Err(error) = &answer {
            assert!(self.taking.is_none() && error.code == -32602, "seed {}: {error:?}", self.seed);
        }
        if let Some(taken) = self.taking.take() {
            self.snapshots.push(taken);
        }
    }

    /// Reads all snapshots: a new one holds what it may, an old one what it held.
    fn check_snapshots(&mut self) {
        for index in 0..self.snapshots.len() {
            let name = format!("s/{}", self.snapshots[index].name);
            let handle = self.world.open(&name, 1 + index as u32 % CORES);
            let read = handle.read(0, BLOCKS);
            let watched = Rc::clone(&read);
            self.world.until(|| watched.status().is_some());
            assert_eq!(read.status(), Some(Status::SUCCESS), "seed {}: {name}", self.seed);
            handle.close();
            let bytes = read.bytes();
            let blocks: Vec<u8> = bytes.chunks(BLOCK as usize).map(|block| block[0]).collect();
            let taken = &mut self.snapshots[index];
            for (block, byte) in blocks.iter().enumerate() {
                assert!(taken.may[block].contains(byte), "seed {}: {name} block {block} is {byte}", self.seed);
            }
            let held = taken.held.get_or_insert_with(|| blocks.clone());
            assert_eq!(*held, blocks, "seed {}: {name} has changed", self.seed);
        }
    }

    fn settle(&mut self) {
        while !self.flights.is_empty() || self.call.is_some() {
            self.world.round();
            self.reap();
            self.end_call();
        }
    }

    fn run(&mut self, steps: u64) {
        for _ in 0..steps {
            match self.random.below(16) {
                0..10 => self.begin_io(),
                10 => self.begin_call(),
                _ => {
                    let rounds = 1 + self.random.below(16);
                    self.world.rounds(rounds);
                    self.reap();
                    self.end_call();
                }
            }
        }
        self.settle();
        self.check_snapshots();
    }
}

fn everything_is_as_written(program: &mut Program) {
    for core in 0..CORES as usize {
        let read = program.handles[core].read(0, BLOCKS);
        program.flights.push(Flight { lba: 0, blocks: BLOCKS, byte: None, pending: read });
        program.settle();
    }
}

#[test]
fn what_is_read_is_what_was_written_whatever_happens_beside_it() {
    let mut calls = 0;
    for seed in 1..=20 {
        let medium = Medium::new(uuid(seed.into()), BLOCK, DISK_BLOCKS);
        let mut program = Program::new(seed, &medium, seed % 3 != 0);
        for _ in 0..4 {
            program.run(120);
        }
        everything_is_as_written(&mut program);
        let snapshots: Vec<Taken> = std::mem::take(&mut program.snapshots);
        let model = program.model.clone();
        calls += program.calls;
        drop(program);

        // The machine stops without notice; a new one finds all of it.
        medium.late_ns.store(0, std::sync::atomic::Ordering::Relaxed);
        let mut again = world();
        again.add_disk("D", &medium);
        let held = snapshots.iter().map(|s| (s.name.as_str(), s.held.as_deref().unwrap()));
        for (name, expected) in held.chain([("v", model.as_slice())]) {
            let handle = again.open(&format!("s/{name}"), 1);
            let read = handle.read(0, BLOCKS);
            let watched = Rc::clone(&read);
            again.until(|| watched.status().is_some());
            let got: Vec<u8> = read.bytes().chunks(BLOCK as usize).map(|block| block[0]).collect();
            assert_eq!(got, expected, "seed {seed}: {name} after the restart");
            handle.close();
        }
        let list = again.ok("bdev_lvol_get_lvols", Value::Null);
        let used: u64 = list.as_array().unwrap().iter().map(|l| l["num_allocated_clusters"].as_u64().unwrap()).sum();
        let store = again.ok("bdev_lvol_get_lvstores", Value::Null)[0].clone();
        let taken = store["total_data_clusters"].as_u64().unwrap() - store["free_clusters"].as_u64().unwrap();
        assert_eq!(used, taken, "seed {seed}: clusters are lost");
    }
    assert!(calls > 100, "{calls} calls in all runs: too few to meet I/O");
}

#[test]
fn a_disk_that_fails_fails_io_and_nothing_hangs() {
    let medium = Medium::new(uuid(7), BLOCK, DISK_BLOCKS);
    let mut program = Program::new(7, &medium, true);
    program.run(60);
    medium.fail_writes();
    let write = program.handles[0].write(0, 64, 9);
    let watched = Rc::clone(&write);
    program.world.until(|| watched.status().is_some());
    assert!(!write.status().unwrap().is_success());
    medium.heal();
    medium.dead.store(true, std::sync::atomic::Ordering::Relaxed);
    let writes: Vec<_> = (0..8).map(|n| program.handles[n % 2].write(n as u64 * 16, 8, 1)).collect();
    program.world.until(|| writes.iter().all(|w| w.status().is_some()));
    program.handles.clear();
    program.world.rounds(10);
    program.world.pull_disk("D");
    assert_eq!(program.world.ok("bdev_lvol_get_lvstores", Value::Null), json!([]));
    assert!(program.world.app.registry().list().is_empty());
}
