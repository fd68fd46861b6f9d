//! The engine in one thread, turned by hand: feed bytes, turn the reactor, take bytes.
//!
//! *What it is.* [`Step`] is a whole target (reactor, devices, NVMe/TCP sessions) whose machine is replaced: the
//! [`wire`] is memory, the clock stands still, nothing sleeps. Everything it does is therefore the same in every run: the
//! instructions of one I/O can be counted, and so can its system calls (receives and sends of the wire) and its
//! allocations.
//!
//! *Use.* The program `step` runs a number of I/Os for an instruction counter; `tests/` hold the counts.

pub mod host;
pub mod wire;

use std::rc::Rc;
use std::sync::Arc;

use addax_engine::app::{App, Options, Phase};
use addax_engine::reactor::idle::Policy;
use addax_engine::reactor::{CONTROL, Reactor};
use addax_engine::rpc::Methods;
use addax_engine::{bdev, mirror, nvmf, raid};
use addax_hugepages::{BufPool, ClassConfig, MapPolicy, PoolConfig};
use serde_json::{Value, json};

use host::Host;
use wire::{Driver, World};

/// The subsystem that the host attaches to.
pub const SUBSYSTEM: &str = "nqn.2026-11.io.addax:step";

/// What a device of several consists of.
const MEMBERS: [&str; 3] = ["m0", "m1", "m2"];

/// What the I/O goes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Device {
    /// Gives zeroes, forgets writes.
    Null,
    /// Memory.
    Malloc,
    /// Three of them, written together.
    Raid1,
    /// The same as a volume.
    Mirror,
}

/// Why the engine could not be set up.
#[derive(Debug)]
pub struct Failed(pub String);

impl std::fmt::Display for Failed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Failed {}

/// The engine, with one host attached to one device.
pub struct Step {
    reactor: Reactor,
    world: World,
    app: App,
    methods: Methods,
}

impl std::fmt::Debug for Step {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Step").finish_non_exhaustive()
    }
}

/// Turns without an answer after which the engine counts as stuck.
const PATIENCE: u32 = 100_000;

impl Step {
    /// An engine with `device` as namespace 1 of [`SUBSYSTEM`].
    ///
    /// # Errors
    /// When a method of the engine refuses its part.
    pub fn new(device: Device) -> Result<Self, Failed> {
        let config = PoolConfig {
            small: ClassConfig { bytes: 8 << 10, count: 512 },
            large: ClassConfig { bytes: 132 << 10, count: 128 },
            policy: MapPolicy::plain(),
        };
        let pool = BufPool::new(config).map_err(|e| Failed(e.to_string()))?;
        let world = World::default();
        let (reactor, peer) = Reactor::new(CONTROL, Box::new(Driver::new(&world)), pool, Policy::SLEEP);
        reactor.set_peers(Arc::new(vec![peer]));
        let options = Options { rpc_socket: "/nonexistent".into(), cpus: vec![0], interrupt_mode: false };
        let app = App::new(reactor.core().clone(), Rc::new(world.net()), options);
        app.set_phase(Phase::Runtime);
        let mut methods = Methods::default();
        bdev::rpc::register(&mut methods);
        raid::register(&mut methods);
        mirror::register(&mut methods);
        nvmf::register(&mut methods);
        let mut step = Self { reactor, world, app, methods };
        step.set_up(device)?;
        Ok(step)
    }

    fn set_up(&mut self, device: Device) -> Result<(), Failed> {
        match device {
            Device::Null => {
                self.rpc("bdev_null_create", json!({ "name": "d", "num_blocks": 65536, "block_size": 512 }))?
            }
            Device::Malloc => self.malloc("d")?,
            Device::Raid1 => {
                for name in MEMBERS {
                    self.malloc(name)?;
                }
                self.rpc("bdev_raid_create", json!({ "name": "d", "raid_level": "raid1", "base_bdevs": MEMBERS }))?
            }
            Device::Mirror => self.mirror()?,
        };
        let address = json!({ "trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.1", "trsvcid": "4420" });
        self.rpc("nvmf_create_transport", json!({ "trtype": "TCP" }))?;
        let subsystem = json!({ "nqn": SUBSYSTEM, "serial_number": "STEP", "allow_any_host": true });
        self.rpc("nvmf_create_subsystem", subsystem)?;
        self.rpc("nvmf_subsystem_add_ns", json!({ "nqn": SUBSYSTEM, "namespace": { "bdev_name": "d" } }))?;
        self.rpc("nvmf_subsystem_add_listener", json!({ "nqn": SUBSYSTEM, "listen_address": address }))?;
        Ok(())
    }

    fn mirror(&mut self) -> Result<Value, Failed> {
        for name in MEMBERS {
            self.malloc(name)?;
        }
        let legs = MEMBERS.map(|name| json!({ "replica": name, "bdev_name": name, "local": true }));
        let config = json!({ "lineage": "step", "epoch": 1, "engine_instance": "step", "config_number": 1,
            "in_sync": MEMBERS, "rebuilding": [], "min_in_sync": 1, "size": 65536 * 512, "clean": true });
        let params = json!({ "name": "d", "uuid": "0b4f5c3e-5a0e-4a43-9c5d-2f6a3f0e7d11", "volume": "step",
            "block_size": 512, "size_bytes": 65536 * 512, "config": config, "legs": legs });
        self.rpc("addax_mirror_create", params)
    }

    fn malloc(&mut self, name: &str) -> Result<Value, Failed> {
        self.rpc("bdev_malloc_create", json!({ "name": name, "num_blocks": 65536, "block_size": 512 }))
    }

    /// Calls a method and turns the reactor until it answers.
    ///
    /// # Errors
    /// What the method answers, or that it does not.
    pub fn rpc(&mut self, method: &'static str, params: Value) -> Result<Value, Failed> {
        let found = self.methods.table.get(method).ok_or_else(|| Failed(format!("no method {method}")))?;
        let call = (found.handler)(self.app.clone(), Some(params));
        let (send, mut answer) = futures::channel::oneshot::channel();
        self.reactor.core().spawn(async move {
            let _ = send.send(call.await);
        });
        for _ in 0..PATIENCE {
            self.reactor.turn();
            if let Ok(Some(result)) = answer.try_recv() {
                return result.map_err(|e| Failed(format!("{method}: {}", e.message)));
            }
        }
        Err(Failed(format!("{method} does not answer")))
    }

    /// Attaches a host: an admin queue and one I/O queue of 128 entries.
    ///
    /// # Errors
    /// When the target refuses it.
    pub fn attach(&mut self) -> Result<Host, Failed> {
        let mut turn = || {
            self.reactor.turn();
        };
        Host::attach(&self.world, &mut turn)
    }

    /// One turn of the reactor.
    // A function of its own for an instruction counter that is to count nothing else.
    #[inline(never)]
    pub fn turn_engine(&mut self) -> bool {
        self.reactor.turn()
    }

    /// Runs `batches` batches of `depth` equal I/Os, each batch sent whole and turned until all of it is answered.
    ///
    /// # Errors
    /// When an I/O fails or is not answered.
    pub fn run(&mut self, host: &mut Host, io: &host::Workload, batches: u32) -> Result<(), Failed> {
        for _ in 0..batches {
            host.send(io);
            let mut turns = 0;
            while host.outstanding() > 0 {
                self.turn_engine();
                host.receive()?;
                turns += 1;
                if turns > PATIENCE {
                    return Err(Failed(format!("{} commands are not answered", host.outstanding())));
                }
            }
        }
        Ok(())
    }

    /// Receives and sends of the wire so far.
    #[must_use]
    pub fn calls(&self) -> wire::Calls {
        self.world.calls()
    }
}
