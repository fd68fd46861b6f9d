//! `passthru`: a device that hands everything to its base; for tests of what sits on virtual devices.
//!
//! *Invariants.* Same size, same blocks, same abilities as the base; it follows the base's size.

use std::any::Any;
use std::rc::Rc;
use std::sync::Arc;

use serde::Deserialize;
use serde_json::{Value, json};
use uuid::Uuid;

use super::over::{self, Over};
use super::registry::Entry;
use super::{Bdev, BdevError, BdevInfo, Chan, Channel, Io, IoSink, IoStatus};
use crate::app::App;
use crate::reactor::Core;
use crate::rpc::params::{decode, decode_failed};
use crate::rpc::{Methods, RpcResult, When};

const MODULE: &str = "passthru";
/// What a device's UUID is derived in, from its base's.
const NAMESPACE: Uuid = Uuid::from_u128(0x7e25_812e_c8c0_4d3f_8599_16d7_9055_5b85);

/// Adds this module's methods.
pub fn register(m: &mut Methods) {
    m.add("bdev_passthru_create", When::Runtime, |app, p| async move { create(&app, p) });
    m.add("bdev_passthru_delete", When::Runtime, |app, p| async move {
        let request: Delete = decode(p, decode_failed)?;
        over::delete(&app, MODULE, &request.name).await?;
        Ok(json!(true))
    });
    m.add_config("bdev", |app| over::saved(app, MODULE));
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Create {
    name: String,
    base_bdev_name: String,
    uuid: Option<Uuid>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Delete {
    name: String,
}

fn create(app: &App, params: Option<Value>) -> RpcResult {
    let request: Create = decode(params, decode_failed)?;
    let (name, uuid) = (request.name.clone(), request.uuid.filter(|uuid| !uuid.is_nil()));
    let make = move |base: &Arc<Entry>| {
        let derived = || Uuid::new_v5(&NAMESPACE, base.bdev.info().uuid.as_bytes());
        let device = Passthru { name: name.clone(), uuid: uuid.unwrap_or_else(derived), base: Arc::clone(base) };
        Ok(Arc::new(device) as Arc<dyn Bdev>)
    };
    let mut params = json!({ "base_bdev_name": request.base_bdev_name, "name": request.name });
    if let Some(uuid) = uuid {
        params["uuid"] = json!(uuid.to_string());
    }
    over::create(
        app,
        Over {
            name: request.name.clone(),
            base: request.base_bdev_name,
            module: MODULE,
            make: Rc::new(make),
            config: ("bdev_passthru_create", params),
        },
    )?;
    Ok(json!(request.name))
}

#[derive(Debug)]
struct Passthru {
    name: String,
    uuid: Uuid,
    base: Arc<Entry>,
}

impl Bdev for Passthru {
    fn info(&self) -> BdevInfo {
        BdevInfo { name: self.name.clone(), uuid: self.uuid, product_name: MODULE, ..self.base.bdev.info() }
    }
    fn num_blocks(&self) -> u64 {
        self.base.bdev.num_blocks()
    }
    fn open(&self, core: &Core) -> Result<Rc<dyn Channel>, BdevError> {
        let inner = Inner { base: self.base.open(core)?, running: std::cell::RefCell::default() };
        Ok(Rc::new(PassthruChannel(Rc::new(inner))))
    }
    fn holds_guest_data(&self) -> bool {
        self.base.bdev.holds_guest_data()
    }
    fn driver_specific(&self) -> Value {
        json!({ "passthru": { "name": self.name, "base_bdev_name": self.base.bdev.info().name } })
    }
    fn config(&self) -> Option<(&'static str, Value)> {
        // Saved by the module, which also knows devices whose base is away.
        None
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

struct PassthruChannel(Rc<Inner>);

struct Inner {
    base: Chan,
    running: std::cell::RefCell<slab::Slab<Io>>,
}

impl Channel for PassthruChannel {
    fn submit(&self, core: &Core, io: Io) {
        let (op, lba, blocks, bufs) = (io.op, io.lba, io.blocks, io.bufs.clone());
        let tag = self.0.running.borrow_mut().insert(io) as u64;
        self.0.base.submit(core, Io::new(op, lba, blocks, bufs, Rc::clone(&self.0) as Rc<dyn IoSink>, tag));
    }

    fn close(&self, core: &Core) {
        self.0.base.close(core);
    }
}

impl IoSink for Inner {
    fn io_done(self: Rc<Self>, core: &Core, tag: u64, status: IoStatus) {
        let io = self.running.borrow_mut().try_remove(tag as usize);
        if let Some(io) = io {
            core.complete(io, status);
        }
    }
}
