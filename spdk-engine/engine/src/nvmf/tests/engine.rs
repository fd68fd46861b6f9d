//! An engine in this process: a control core and two data cores, called through its RPC methods.

use std::any::Any;
use std::cell::RefCell;
use std::net::{SocketAddr, TcpListener};
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use nvme_wire::Status;
use serde_json::{Value, json};
use uuid::Uuid;

use crate::app::{App, Options};
use crate::bdev::malloc::Malloc;
use crate::bdev::{Bdev, BdevError, BdevInfo, Channel, Io, IoTypes};
use crate::nvmf;
use crate::reactor::Core;
use crate::reactor::driver::NANOS_PER_MS;
use crate::reactor::mail::Mailbox;
use crate::rpc::{Methods, RpcError};
use crate::start::{StartConfig, run};

/// Longest wait for anything; only a broken engine reaches it.
pub const PATIENCE: Duration = Duration::from_secs(60);
pub const SUBSYSTEM: &str = "nqn.2026-11.io.addax:replica:test";
pub const HOST: &str = "nqn.2026-11.io.addax:engine:test:1:1";
pub const BLOCKS: u64 = 2048;

/// What the control core keeps for the tests.
struct Kept {
    app: App,
    methods: Methods,
}

/// The engine.
pub struct Engine {
    mail: Mailbox,
    thread: Option<JoinHandle<()>>,
    pub addr: SocketAddr,
}

impl Engine {
    /// An engine with a transport and the subsystem [`SUBSYSTEM`], which listens and admits nobody.
    pub fn start() -> Self {
        let (send, receive) = mpsc::channel();
        let thread = std::thread::spawn(move || {
            let options = Options { rpc_socket: "/nonexistent".into(), cpus: vec![0, 1], interrupt_mode: false };
            let pool = nvmf::session::tests::host::pool(64, 32);
            let config = StartConfig { cpus: vec![0, 1], pool, options, pin: false };
            run(config, move |app| {
                let mut methods = Methods::default();
                nvmf::register(&mut methods);
                let core = app.core().clone();
                core.local(|| Kept { app, methods });
                send.send(core.peers()[0].mail.clone()).unwrap();
            })
            .unwrap();
        });
        let mail = receive.recv_timeout(PATIENCE).unwrap();
        let addr = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let engine = Self { mail, thread: Some(thread), addr };
        engine.ok("nvmf_create_transport", json!({ "trtype": "TCP" }));
        engine.ok("nvmf_create_subsystem", json!({ "nqn": SUBSYSTEM, "serial_number": "S1", "ana_reporting": true }));
        engine.ok("nvmf_subsystem_add_listener", json!({ "nqn": SUBSYSTEM, "listen_address": engine.address() }));
        engine
    }

    /// The same with a malloc device as namespace 1 and [`HOST`] admitted.
    pub fn with_namespace() -> Self {
        let engine = Self::start();
        engine.add_malloc("M0");
        engine.ok("nvmf_subsystem_add_ns", json!({ "nqn": SUBSYSTEM, "namespace": { "bdev_name": "M0" } }));
        engine.ok("nvmf_subsystem_add_host", json!({ "nqn": SUBSYSTEM, "host": HOST }));
        engine
    }

    /// As [`Self::with_namespace`], over a device whose I/O ends only while the gate is open.
    pub fn with_gate() -> (Self, Gate) {
        Self::with_gate_over(false)
    }

    /// The same over a device that other processes may serve as well.
    pub fn with_shared_gate() -> (Self, Gate) {
        Self::with_gate_over(true)
    }

    fn with_gate_over(shared: bool) -> (Self, Gate) {
        let engine = Self::start();
        let gate = engine.add_gated("G0", shared);
        engine.ok("nvmf_subsystem_add_ns", json!({ "nqn": SUBSYSTEM, "namespace": { "bdev_name": "G0" } }));
        engine.ok("nvmf_subsystem_add_host", json!({ "nqn": SUBSYSTEM, "host": HOST }));
        (engine, gate)
    }

    pub fn address(&self) -> Value {
        json!({ "trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.1", "trsvcid": self.addr.port().to_string() })
    }

    /// Runs `work` on the control core.
    pub fn on_control<T: Send + 'static>(&self, work: impl FnOnce(&App) -> T + Send + 'static) -> T {
        let (send, receive) = mpsc::channel();
        self.mail.post(move |core| {
            let _ = send.send(work(&kept(core).app));
        });
        receive.recv_timeout(PATIENCE).unwrap()
    }

    /// Starts a call; its answer comes by the channel.
    pub fn begin(&self, method: &'static str, params: Value) -> mpsc::Receiver<Result<Value, RpcError>> {
        let (send, receive) = mpsc::channel();
        self.mail.post(move |core| {
            let kept = kept(core);
            let handler = Rc::clone(&kept.methods.table[method].handler);
            let call = handler(kept.app.clone(), Some(params));
            core.spawn(async move {
                let _ = send.send(call.await);
            });
        });
        receive
    }

    pub fn call(&self, method: &'static str, params: Value) -> Result<Value, RpcError> {
        self.begin(method, params).recv_timeout(PATIENCE).unwrap()
    }

    /// A call that must succeed.
    pub fn ok(&self, method: &'static str, params: Value) -> Value {
        self.call(method, params).unwrap()
    }

    pub fn add_malloc(&self, name: &'static str) {
        self.on_control(move |app| {
            app.registry().register(Arc::new(Malloc::new(info(name)).unwrap()), Vec::new(), "malloc").unwrap();
        });
    }

    /// Adds a device whose I/O ends only while the gate is open.
    fn add_gated(&self, name: &'static str, shared: bool) -> Gate {
        let gate = Gate(Arc::new(AtomicBool::new(false)));
        let device = Gated { info: info(name), gate: gate.clone(), shared };
        self.on_control(move |app| {
            app.registry().register(Arc::new(device), Vec::new(), "gated").unwrap();
        });
        gate
    }

    /// Starts the removal of a device.
    pub fn begin_unregister(&self, name: &'static str) -> mpsc::Receiver<()> {
        let (send, receive) = mpsc::channel();
        self.on_control(move |app| {
            let (core, registry) = (app.core().clone(), Rc::clone(app.registry()));
            app.core().spawn(async move {
                registry.unregister(&core, name).await.unwrap();
                let _ = send.send(());
            });
        });
        receive
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.mail.post(Core::stop);
        // One that a failed test has found hanging is not waited for.
        if let Some(thread) = self.thread.take().filter(|_| !std::thread::panicking()) {
            assert!(thread.join().is_ok(), "the engine panicked");
        }
    }
}

fn kept(core: &Core) -> Rc<Kept> {
    core.local(|| panic!("the engine has not started"))
}

fn info(name: &str) -> BdevInfo {
    BdevInfo {
        name: name.into(),
        product_name: "test",
        uuid: Uuid::from_u128(0x1234),
        block_size: 512,
        num_blocks: BLOCKS,
        physical_block_size: 4096,
        optimal_io_boundary: 0,
        io_types: IoTypes { flush: true, unmap: true, compare: true, ..IoTypes::READ_WRITE },
        write_cache: true,
    }
}

/// Lets the I/O of a [`Gated`] device end, or holds it.
#[derive(Debug, Clone)]
pub struct Gate(Arc<AtomicBool>);

impl Gate {
    pub fn open(&self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

#[derive(Debug)]
struct Gated {
    info: BdevInfo,
    gate: Gate,
    shared: bool,
}

impl Bdev for Gated {
    fn info(&self) -> BdevInfo {
        self.info.clone()
    }
    fn num_blocks(&self) -> u64 {
        self.info.num_blocks
    }
    fn open(&self, _core: &Core) -> Result<Rc<dyn Channel>, BdevError> {
        Ok(Rc::new(GatedChannel { gate: self.gate.clone() }))
    }
    fn has_other_paths(&self) -> bool {
        self.shared
    }
    fn config(&self) -> Option<(&'static str, Value)> {
        None
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

struct GatedChannel {
    gate: Gate,
}

impl Channel for GatedChannel {
    fn submit(&self, core: &Core, io: Io) {
        hold(core, self.gate.clone(), RefCell::new(Some(io)));
    }
}

fn hold(core: &Core, gate: Gate, io: RefCell<Option<Io>>) {
    core.after(
        NANOS_PER_MS,
        Rc::new(move |core| {
            let Some(held) = io.borrow_mut().take() else { return };
            if gate.0.load(Ordering::SeqCst) {
                core.complete(held, Status::SUCCESS);
            } else {
                hold(core, gate.clone(), RefCell::new(Some(held)));
            }
        }),
    );
}
