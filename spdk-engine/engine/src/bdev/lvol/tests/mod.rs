//! Volumes in an engine of one control core and two data cores; here is what the tests share.
//!
//! [`data`] has reads and writes, [`calls`] the methods, [`storm`] and [`seeded`] I/O beside every operation, [`life`] stores that come
//! and go.

mod calls;
mod data;
mod life;
mod seeded;
mod storm;

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use addax_hugepages::{BufPool, ClassConfig, Hugepages, MapPolicy, PoolConfig};
use serde_json::{Value, json};

use crate::app::{App, Options, Phase};
use crate::bdev::registry::Entry;
use crate::bdev::{Bufs, Chan, IoOp, IoStatus, examine};
use crate::reactor::driver::NANOS_PER_S;
use crate::reactor::{Core, CoreId};
use crate::rpc::{Methods, RpcResult};
use crate::start::{StartConfig, run};
use crate::testing::io::{bufs, start};

/// Far beyond what anything here takes; only to end a test that hangs.
const PATIENCE_NS: u64 = 120 * NANOS_PER_S;
const DATA: [CoreId; 2] = [CoreId(1), CoreId(2)];
const BLOCK: usize = 512;
/// Bytes of a cluster in these tests.
const CLUSTER: usize = 64 << 10;
const CLUSTER_BLOCKS: u64 = (CLUSTER / BLOCK) as u64;
const MIB: usize = 1 << 20;
const WRITE: IoOp = IoOp::Write { fua: false };

/// An engine with RPC methods.
#[derive(Clone)]
struct Engine {
    app: App,
    methods: Rc<Methods>,
}

/// Runs `body` on the control core.
fn engine<F: Future<Output = ()> + 'static>(body: impl FnOnce(Engine) -> F + 'static) {
    let class = |bytes, count| ClassConfig { bytes, count };
    let policy = MapPolicy { hugepages: Hugepages::Never, ..MapPolicy::default() };
    let pool = BufPool::new(PoolConfig { small: class(8192, 256), large: class(135_168, 32), policy }).unwrap();
    let options = Options { rpc_socket: "/nonexistent".into(), cpus: vec![0, 1], interrupt_mode: true };
    let finished: Rc<RefCell<bool>> = Rc::default();
    let inside = Rc::clone(&finished);
    run(StartConfig { cpus: vec![0, 1], pool, options, pin: false }, move |app| {
        let mut methods = Methods::default();
        crate::rpc::bdev::register(&mut methods);
        examine::register(&mut methods);
        crate::bdev::rpc::register(&mut methods);
        super::register(&mut methods);
        examine::start(&app, methods.examiners.clone());
        app.set_phase(Phase::Runtime);
        let engine = Engine { app: app.clone(), methods: Rc::new(methods) };
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
        let params = if params.is_null() { None } else { Some(params) };
        handler(self.app.clone(), params).await
    }

    async fn ok(&self, method: &str, params: Value) -> Value {
        self.rpc(method, params.clone()).await.unwrap_or_else(|error| panic!("{method} {params}: {error:?}"))
    }

    async fn refused(&self, method: &str, params: Value, code: i64, text: &str) {
        match self.rpc(method, params.clone()).await {
            Ok(answer) => panic!("{method} {params} was not refused: {answer}"),
            Err(error) => {
                assert!(error.code == code && error.message.contains(text), "{method} {params}: {error:?}");
            }
        }
    }

    async fn malloc(&self, name: &str, mib: usize) {
        let params = json!({ "name": name, "block_size": BLOCK, "num_blocks": mib * MIB / BLOCK });
        self.ok("bdev_malloc_create", params).await;
        examine::settled(&self.app).await;
    }

    /// A store `lvs` on a malloc device `M0`.
    async fn store(&self, mib: usize) {
        self.malloc("M0", mib).await;
        let params = json!({ "bdev_name": "M0", "lvs_name": "lvs", "cluster_sz": CLUSTER });
        self.ok("bdev_lvol_create_lvstore", params).await;
    }

    async fn create(&self, name: &str, mib: usize, thin: bool) {
        let params = json!({ "lvs_name": "lvs", "lvol_name": name, "size_in_mib": mib, "thin_provision": thin });
        self.ok("bdev_lvol_create", params).await;
    }

    async fn snapshot(&self, lvol: &str, snapshot: &str) {
        let params = json!({ "lvol_name": format!("lvs/{lvol}"), "snapshot_name": snapshot });
        self.ok("bdev_lvol_snapshot", params).await;
    }

    async fn clone(&self, snapshot: &str, clone: &str) {
        let params = json!({ "snapshot_name": format!("lvs/{snapshot}"), "clone_name": clone });
        self.ok("bdev_lvol_clone", params).await;
    }

    async fn delete(&self, lvol: &str) {
        self.ok("bdev_lvol_delete", json!({ "name": format!("lvs/{lvol}") })).await;
    }

    async fn lvol(&self, name: &str) -> Value {
        let list = self.ok("bdev_lvol_get_lvols", Value::Null).await;
        let found = list.as_array().unwrap().iter().find(|l| l["name"] == name).cloned();
        found.unwrap_or_else(|| panic!("no {name} in {list}"))
    }

    async fn lvstore(&self) -> Value {
        self.ok("bdev_lvol_get_lvstores", json!({ "lvs_name": "lvs" })).await[0].clone()
    }

    fn entry(&self, name: &str) -> Arc<Entry> {
        self.app.registry().find(name).unwrap_or_else(|| panic!("no device {name}"))
    }

    /// Works with a channel to a volume of the store `lvs` on a data core.
    async fn on<T: Send + 'static, F: Future<Output = T> + 'static>(
        &self,
        core: CoreId,
        lvol: &str,
        work: impl FnOnce(Core, Chan) -> F + Send + 'static,
    ) -> T {
        let entry = self.entry(&format!("lvs/{lvol}"));
        self.app.core().call_async(core, move |core| work(core.clone(), entry.open(core).unwrap())).await.unwrap()
    }

    async fn write(&self, core: CoreId, lvol: &str, lba: u64, bytes: Vec<u8>) -> IoStatus {
        self.on(core, lvol, move |core, chan| async move { put(&core, &chan, WRITE, lba, &bytes).await }).await
    }

    async fn read(&self, core: CoreId, lvol: &str, lba: u64, len: usize) -> Vec<u8> {
        self.on(core, lvol, move |core, chan| async move { get(&core, &chan, lba, len).await }).await.unwrap()
    }

    async fn plain(&self, core: CoreId, lvol: &str, op: IoOp, lba: u64, blocks: u64) -> IoStatus {
        self.on(core, lvol, move |core, chan| async move {
            start(&core, &chan, op, lba, blocks, Bufs::new()).await.unwrap()
        })
        .await
    }
}

fn pattern(seed: u64, len: usize) -> Vec<u8> {
    (0..len).map(|i| (i as u64 * 7 + seed * 13 + i as u64 / 509) as u8 | 1).collect()
}

async fn put(core: &Core, chan: &Chan, op: IoOp, lba: u64, bytes: &[u8]) -> IoStatus {
    start(core, chan, op, lba, (bytes.len() / BLOCK) as u64, bufs(bytes)).await.unwrap()
}

async fn get(core: &Core, chan: &Chan, lba: u64, len: usize) -> Result<Vec<u8>, IoStatus> {
    let into = bufs(&vec![0xEE; len]);
    let status = start(core, chan, IoOp::Read, lba, (len / BLOCK) as u64, into.clone()).await.unwrap();
    if status.is_success() { Ok(into.iter().flat_map(|b| b.to_vec()).collect()) } else { Err(status) }
}
