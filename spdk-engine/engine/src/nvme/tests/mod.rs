//! Tests of the device over TCP on loopback; here is what they share: an engine, and I/O on its data core.
//!
//! [`own`] and [`faults`] have the engine's own target in the same process, [`spdk`] a stock `spdk_tgt` beside it.

#![allow(clippy::unwrap_used)]

mod faults;
mod own;
mod spdk;

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use addax_hugepages::{BufPool, ClassConfig, Hugepages, MapPolicy, PoolConfig};
use nvme_wire::Status;
use serde_json::{Value, json};

use crate::app::{App, Options, Phase};
use crate::bdev::registry::Entry;
use crate::bdev::{Bufs, Chan, IoOp, IoStatus};
use crate::reactor::driver::{NANOS_PER_MS, NANOS_PER_S};
use crate::reactor::{Core, CoreId};
use crate::rpc::{Methods, RpcResult};
use crate::start::{StartConfig, run};
use crate::testing::io::{bufs, start};

const NQN: &str = "nqn.2016-06.io.spdk:cnode1";
const HOST: &str = "nqn.2026-11.io.addax:engine:v1:1:e1";
const DATA: CoreId = CoreId(1);
/// Far beyond what anything here takes; only to end a test that hangs.
const PATIENCE_NS: u64 = 60 * NANOS_PER_S;

/// An engine with RPC methods.
#[derive(Clone)]
struct Engine {
    app: App,
    methods: Rc<Methods>,
    port: u16,
}

/// Runs `body` on the control core of an engine with two data cores.
fn engine<F: Future<Output = ()> + 'static>(body: impl FnOnce(Engine) -> F + 'static) {
    let class = |bytes, count| ClassConfig { bytes, count };
    let policy = MapPolicy { hugepages: Hugepages::Never, ..MapPolicy::default() };
    let pool = BufPool::new(PoolConfig { small: class(8192, 512), large: class(135_168, 64), policy }).unwrap();
    let options = Options { rpc_socket: "/nonexistent".into(), cpus: vec![0, 1], interrupt_mode: true };
    let finished: Rc<RefCell<bool>> = Rc::default();
    let inside = Rc::clone(&finished);
    run(StartConfig { cpus: vec![0, 1], pool, options, pin: false }, move |app| {
        let mut methods = Methods::default();
        crate::rpc::bdev::register(&mut methods);
        crate::bdev::rpc::register(&mut methods);
        super::register(&mut methods);
        crate::nvmf::register(&mut methods);
        app.set_phase(Phase::Runtime);
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let engine = Engine { app: app.clone(), methods: Rc::new(methods), port };
        app.core().clone().spawn(async move {
            let core = app.core().clone();
            *inside.borrow_mut() = core.timeout(PATIENCE_NS, body(engine)).await.is_some();
            core.stop();
        });
    })
    .unwrap();
    assert!(*finished.borrow(), "the test did not end in time");
}

impl Engine {
    async fn rpc(&self, method: &str, params: Value) -> RpcResult {
        let handler = Rc::clone(&self.methods.table.get(method).unwrap_or_else(|| panic!("{method}")).handler);
        handler(self.app.clone(), Some(params)).await
    }

    async fn ok(&self, method: &str, params: Value) -> Value {
        self.rpc(method, params.clone()).await.unwrap_or_else(|error| panic!("{method} {params}: {error:?}"))
    }

    fn listen_address(&self) -> Value {
        json!({ "trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.1", "trsvcid": self.port.to_string() })
    }

    async fn listener(&self, on: bool) {
        let method = if on { "nvmf_subsystem_add_listener" } else { "nvmf_subsystem_remove_listener" };
        self.ok(method, json!({ "nqn": NQN, "listen_address": self.listen_address() })).await;
    }

    /// A subsystem with one namespace of 16 MiB, that the host of the tests may use.
    async fn serve(&self, block_size: u32) {
        self.ok("nvmf_create_transport", json!({ "trtype": "TCP" })).await;
        let blocks = (16 << 20) / block_size;
        self.ok("bdev_malloc_create", json!({ "name": "M0", "num_blocks": blocks, "block_size": block_size })).await;
        self.ok("nvmf_create_subsystem", json!({ "nqn": NQN, "serial_number": "S1" })).await;
        self.ok("nvmf_subsystem_add_host", json!({ "nqn": NQN, "host": HOST })).await;
        self.add_namespace("M0").await;
        self.listener(true).await;
    }

    /// Under an identifier of its own: that of the device is taken in this process.
    async fn add_namespace(&self, bdev: &str) -> Value {
        let uuid = uuid::Uuid::new_v4();
        let nguid = uuid.simple().to_string().to_uppercase();
        let namespace = json!({ "bdev_name": bdev, "uuid": uuid.to_string(), "nguid": nguid });
        self.ok("nvmf_subsystem_add_ns", json!({ "nqn": NQN, "namespace": namespace })).await
    }

    fn attach_params(&self, more: Value) -> Value {
        let mut params = json!({ "name": "N", "trtype": "TCP", "adrfam": "ipv4", "traddr": "127.0.0.1",
            "trsvcid": self.port.to_string(), "subnqn": NQN, "hostnqn": HOST });
        for (name, value) in more.as_object().unwrap() {
            params[name.as_str()] = value.clone();
        }
        params
    }

    async fn attach(&self, more: Value) -> Value {
        self.ok("bdev_nvme_attach_controller", self.attach_params(more)).await
    }

    fn entry(&self, name: &str) -> Arc<Entry> {
        self.app.registry().find(name).unwrap()
    }

    /// Waits until `done`, which something else brings about.
    async fn until(&self, done: impl Fn() -> bool) {
        while !done() {
            self.app.core().sleep(NANOS_PER_MS).await;
        }
    }

    /// As [`Self::serve`], with a namespace that takes its time to write.
    async fn serve_slow(&self) {
        self.serve(512).await;
        self.ok("nvmf_subsystem_remove_ns", json!({ "nqn": NQN, "nsid": 1 })).await;
        let slow = json!({ "name": "D0", "base_bdev_name": "M0", "avg_read_latency": 0, "p99_read_latency": 0,
            "avg_write_latency": 20_000, "p99_write_latency": 20_000 });
        self.ok("bdev_delay_create", slow).await;
        assert_eq!(self.add_namespace("D0").await, json!(1));
    }

    async fn until_state(&self, wanted: impl Fn(&str) -> bool) {
        while !wanted(self.state().await.as_str().unwrap()) {
            self.app.core().sleep(NANOS_PER_MS).await;
        }
    }

    async fn state(&self) -> Value {
        let list = self.ok("bdev_nvme_get_controllers", json!({})).await;
        list[0]["ctrlrs"][0]["state"].clone()
    }

    /// Works with a channel to `name` on a data core.
    async fn on_channel<T: Send + 'static, F: Future<Output = T> + 'static>(
        &self,
        name: &str,
        work: impl FnOnce(Core, Chan) -> F + Send + 'static,
    ) -> T {
        let entry = self.entry(name);
        let done = self.app.core().call_async(DATA, move |core| {
            let chan = entry.open(core).unwrap();
            work(core.clone(), chan)
        });
        done.await.unwrap()
    }
}

fn pattern(seed: u64, len: usize) -> Vec<u8> {
    (0..len).map(|i| (i as u64 * 7 + seed * 13 + i as u64 / 509) as u8).collect()
}

const WRITE: IoOp = IoOp::Write { fua: false };

async fn put(core: &Core, chan: &Chan, lba: u64, bytes: &[u8], block: usize) -> IoStatus {
    start(core, chan, WRITE, lba, (bytes.len() / block) as u64, bufs(bytes)).await.unwrap()
}

async fn get(core: &Core, chan: &Chan, lba: u64, len: usize, block: usize) -> Result<Vec<u8>, IoStatus> {
    let into = bufs(&vec![0xEE; len]);
    let status = start(core, chan, IoOp::Read, lba, (len / block) as u64, into.clone()).await.unwrap();
    if status.is_success() { Ok(into.iter().flat_map(|b| b.to_vec()).collect()) } else { Err(status) }
}

/// Reads and writes of every size and kind.
async fn exercise(core: Core, chan: Chan, block: usize) {
    for (seed, len) in [(1, block), (2, 4096), (3, 8192), (4, 128 << 10), (5, 1 << 20), (6, (128 << 10) + block)] {
        let bytes = pattern(seed, len);
        assert_eq!(put(&core, &chan, 3, &bytes, block).await, Status::SUCCESS, "write of {len}");
        assert_eq!(get(&core, &chan, 3, len, block).await.unwrap(), bytes, "read of {len}");
        let blocks = (len / block) as u64;
        let same = start(&core, &chan, IoOp::Compare, 3, blocks, bufs(&bytes)).await.unwrap();
        assert_eq!(same, Status::SUCCESS);
        let other = start(&core, &chan, IoOp::Compare, 3, blocks, bufs(&pattern(99, len))).await.unwrap();
        assert!(other.is(Status::COMPARE_FAILURE), "{other}");
    }
    let blocks = (1 << 20) / block as u64;
    for op in [IoOp::WriteZeroes, IoOp::Unmap] {
        put(&core, &chan, 0, &pattern(8, 1 << 20), block).await;
        assert_eq!(start(&core, &chan, op, 0, blocks, Bufs::new()).await.unwrap(), Status::SUCCESS, "{op:?}");
        assert_eq!(get(&core, &chan, 0, 1 << 20, block).await.unwrap(), vec![0; 1 << 20], "{op:?}");
    }
    let flush = start(&core, &chan, IoOp::Flush, 0, 0, Bufs::new()).await.unwrap();
    assert_eq!(flush, Status::SUCCESS);
    // Far more at once than the queue takes.
    let writes: Vec<_> = (0..600)
        .map(|i| {
            start(
                &core,
                &chan,
                WRITE,
                i % 64 * (4096 / block as u64),
                (4096 / block) as u64,
                bufs(&pattern(i % 64, 4096)),
            )
        })
        .collect();
    for write in writes {
        assert_eq!(write.await.unwrap(), Status::SUCCESS);
    }
    for i in [0, 17, 63] {
        let got = get(&core, &chan, i * (4096 / block as u64), 4096, block).await.unwrap();
        assert_eq!(got, pattern(i, 4096));
    }
}
