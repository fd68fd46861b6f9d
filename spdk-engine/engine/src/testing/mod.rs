//! An engine of several cores on the test's one thread, with a clock of its own and disks in memory that fail on request.
//!
//! *What it is.* [`World`] turns its reactors one after another; time passes only when none of them has anything to do.
//! So a run depends on its seed alone. [`disk::TestDisk`] is a device over a [`disk::Medium`], which outlives worlds: a
//! new world over the same media is the machine after a crash.

pub mod disk;
pub mod io;

use std::cell::Cell;
use std::os::fd::RawFd;
use std::rc::Rc;
use std::sync::Arc;

use addax_hugepages::{Buf, BufPool, ClassConfig, MapPolicy, PoolConfig};
use serde_json::Value;
use uuid::Uuid;

use crate::app::{App, Options, Phase};
use crate::bdev::registry::Entry;
use crate::bdev::{Bufs, Chan, Io, IoOp, IoSink, IoStatus, examine};
use crate::reactor::disk::DiskOp;
use crate::reactor::driver::{Driver, Event, NANOS_PER_MS, Nanos, Waker};
use crate::reactor::idle::Policy;
use crate::reactor::net::KernelNet;
use crate::reactor::{Core, CoreId, Reactor};
use crate::rpc::{Methods, RpcError};
use disk::{Medium, TestDisk};

/// Rounds without an end after which a test has failed.
const ROUNDS_MAX: u64 = 5_000_000;

struct TestDriver(Rc<Cell<Nanos>>);

struct NoWaker;

impl Waker for NoWaker {
    fn wake(&self) {}
}

impl Driver for TestDriver {
    fn now(&self) -> Nanos {
        self.0.get()
    }
    fn submit_disk(&mut self, _op: &mut DiskOp, _token: u64) {
        panic!("devices of tests do no disk operations");
    }
    fn watch(&mut self, _fd: RawFd, _token: u64) {}
    fn watch_once(&mut self, _fd: RawFd, _token: u64) {}
    fn want_write(&mut self, _fd: RawFd, _token: u64) {}
    fn unwatch(&mut self, _fd: RawFd, _token: u64) {}
    fn poll(&mut self, _events: &mut Vec<Event>) {}
    fn park(&mut self, _until: Option<Nanos>, _events: &mut Vec<Event>) {}
    fn waker(&self) -> Arc<dyn Waker> {
        Arc::new(NoWaker)
    }
}

/// The engine; core 0 is the control core.
pub struct World {
    clock: Rc<Cell<Nanos>>,
    reactors: Vec<Reactor>,
    pub app: App,
    methods: Rc<Methods>,
    rounds: u64,
}

impl World {
    /// An engine of one control core and `data_cores` others, with the methods that `register` adds.
    pub fn new(data_cores: u32, register: impl FnOnce(&mut Methods)) -> Self {
        let clock = Rc::new(Cell::new(1));
        let class = |bytes, count| ClassConfig { bytes, count };
        let policy = MapPolicy { hugepages: addax_hugepages::Hugepages::Never, ..MapPolicy::default() };
        let pool = BufPool::new(PoolConfig { small: class(8192, 8), large: class(132 << 10, 8), policy }).unwrap();
        let make = |id| {
            let driver = Box::new(TestDriver(Rc::clone(&clock)));
            Reactor::new(CoreId(id), driver, pool.clone(), Policy::SLEEP)
        };
        let (reactors, peers): (Vec<_>, Vec<_>) = (0..=data_cores).map(make).unzip();
        let peers = Arc::new(peers);
        reactors.iter().for_each(|reactor| reactor.set_peers(Arc::clone(&peers)));
        let options =
            Options { rpc_socket: "/nonexistent".into(), cpus: (0..data_cores).collect(), interrupt_mode: false };
        let app = App::new(reactors[0].core().clone(), Rc::new(KernelNet), options);
        app.set_phase(Phase::Runtime);
        let mut methods = Methods::default();
        register(&mut methods);
        examine::start(&app, methods.examiners.clone());
        Self { clock, reactors, app, methods: Rc::new(methods), rounds: 0 }
    }

    /// The handle of a core.
    pub fn core(&self, id: u32) -> Core {
        self.reactors[id as usize].core().clone()
    }

    /// One turn of every core; time passes when nobody had anything to do.
    pub fn round(&mut self) {
        self.rounds += 1;
        assert!(self.rounds < ROUNDS_MAX, "the engine does not come to an end");
        let mut worked = false;
        for reactor in &mut self.reactors {
            worked |= reactor.turn();
        }
        if !worked {
            self.clock.set(self.clock.get() + NANOS_PER_MS / 4);
        }
    }

    /// Turns until `done` holds.
    pub fn until(&mut self, mut done: impl FnMut() -> bool) {
        while !done() {
            self.round();
        }
    }

    /// Turns `rounds` times.
    pub fn rounds(&mut self, rounds: u64) {
        (0..rounds).for_each(|_| self.round());
    }

    /// Starts a future on the control core; its output appears in the cell.
    pub fn start<T: 'static>(&self, future: impl Future<Output = T> + 'static) -> Rc<Cell<Option<T>>> {
        let output = Rc::new(Cell::new(None));
        let there = Rc::clone(&output);
        self.app.core().spawn(async move { there.set(Some(future.await)) });
        output
    }

    /// Runs a future on the control core to its end.
    pub fn run<T: 'static>(&mut self, future: impl Future<Output = T> + 'static) -> T {
        let output = self.start(future);
        loop {
            if let Some(value) = output.take() {
                return value;
            }
            self.round();
        }
    }

    /// Starts a call.
    pub fn begin(&self, method: &str, params: Value) -> Rc<Cell<Option<Result<Value, RpcError>>>> {
        let handler = Rc::clone(&self.methods.table[method].handler);
        self.start(handler(self.app.clone(), Some(params).filter(|p| !p.is_null())))
    }

    /// A call to its end.
    pub fn call(&mut self, method: &str, params: Value) -> Result<Value, RpcError> {
        let answer = self.begin(method, params);
        loop {
            if let Some(value) = answer.take() {
                return value;
            }
            self.round();
        }
    }

    /// A call that succeeds.
    pub fn ok(&mut self, method: &str, params: Value) -> Value {
        self.call(method, params).unwrap_or_else(|error| panic!("{method}: {error:?}"))
    }

    /// What `save_config` has of a subsystem.
    pub fn saved(&self, subsystem: &str) -> Vec<(String, Value)> {
        self.methods.save.iter().filter(|(name, _)| *name == subsystem).flat_map(|(_, save)| save(&self.app)).collect()
    }

    /// Adds a disk and lets it be examined.
    pub fn add_disk(&mut self, name: &str, medium: &Arc<Medium>) -> Arc<Entry> {
        let disk = Arc::new(TestDisk::new(name, medium));
        let entry = self.app.registry().register(disk, Vec::new(), "test").unwrap();
        let app = self.app.clone();
        self.run(async move { examine::settled(&app).await });
        entry
    }

    /// Takes a disk away, as if it were pulled.
    pub fn pull_disk(&mut self, name: &str) {
        let (app, name) = (self.app.clone(), name.to_owned());
        self.run(async move { app.registry().unregister(app.core(), &name).await }).unwrap();
    }

    /// Opens a device on a core.
    pub fn open(&self, name: &str, core: u32) -> Handle {
        let entry = self.app.registry().find(name).unwrap();
        let core = self.core(core);
        Handle { chan: entry.open(&core).unwrap(), core, block_size: entry.bdev.info().block_size as usize }
    }
}

/// A UUID that is told by a number.
pub fn uuid(number: u128) -> Uuid {
    Uuid::from_u128(0x1000_0000_0000_4000_8000_0000_0000_0000 + number)
}

/// A device opened on a core.
#[derive(Clone)]
pub struct Handle {
    pub chan: Chan,
    pub core: Core,
    block_size: usize,
}

/// An I/O on its way.
pub struct Pending {
    status: Cell<Option<IoStatus>>,
    bufs: Bufs,
}

impl Pending {
    /// How it ended, once it has.
    pub fn status(&self) -> Option<IoStatus> {
        self.status.get()
    }

    /// Its bytes.
    pub fn bytes(&self) -> Vec<u8> {
        self.bufs.iter().flat_map(|buf| buf.to_vec()).collect()
    }
}

impl IoSink for Pending {
    fn io_done(self: Rc<Self>, _core: &Core, _tag: u64, status: IoStatus) {
        assert!(self.status.replace(Some(status)).is_none(), "completed twice");
    }
}

impl Handle {
    /// Starts an I/O.
    pub fn begin(&self, op: IoOp, lba: u64, blocks: u64, bufs: Bufs) -> Rc<Pending> {
        let pending = Rc::new(Pending { status: Cell::new(None), bufs: bufs.clone() });
        self.chan.submit(&self.core, Io::new(op, lba, blocks, bufs, Rc::clone(&pending) as Rc<dyn IoSink>, 0));
        pending
    }

    /// Starts a write of blocks that are filled with one byte.
    pub fn write(&self, lba: u64, blocks: u64, byte: u8) -> Rc<Pending> {
        // In two buffers, so that whoever cuts them has something to do.
        let bytes = blocks as usize * self.block_size;
        let first = bytes / self.block_size / 2 * self.block_size;
        let part = |len: usize| Buf::copy_of(&vec![byte; len]).into_slice();
        let bufs = [first, bytes - first].into_iter().filter(|len| *len > 0).map(part).collect();
        self.begin(IoOp::Write { fua: false }, lba, blocks, bufs)
    }

    /// Starts a read.
    pub fn read(&self, lba: u64, blocks: u64) -> Rc<Pending> {
        let buf = Buf::copy_of(&vec![0xee; blocks as usize * self.block_size]).into_slice();
        self.begin(IoOp::Read, lba, blocks, smallvec::smallvec![buf])
    }

    /// Ends the use.
    pub fn close(&self) {
        self.chan.close(&self.core);
    }
}
