//! `mirror`: the replicated volume as a block device, and its RPC methods (`addax_mirror_*`).
//!
//! *What it is.* The control core's side: which mirrors exist, over which devices. Each mirror lives on one data core,
//! its home ([`device::Device`]); hosts on other cores reach it by messages.
//!
//! *Invariants.* A leg's base device is claimed as long as the leg exists. Names of mirrors, and of replicas within one,
//! are unique. The agent carries out swaps: an event asks, `addax_mirror_swap_answer` answers. It also decides what is
//! inherited when a volume is opened, from what `addax_mirror_read_meta` gives it of the legs before there is a mirror.
//!
//! *When things fail.* A create that is refused leaves nothing behind. A base that is removed under a mirror is a lost
//! leg, which the core's rules then handle.

pub mod convert;
pub mod device;
mod legs;
mod snapshot;

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use mirror_core::meta::{Geometry, RegionBits};
use mirror_core::{Epoch, LegId, LegInit, MetaInit, OpenParams, ReplicaId, SwapOutcome, VolumeId};
use serde::Deserialize;
use serde_json::{Value, json};
use uuid::Uuid;

use crate::app::App;
use crate::bdev::{Bdev, BdevError, BdevInfo, Channel, Io, IoTypes};
use crate::reactor::driver::{NANOS_PER_MS, Nanos};
use crate::reactor::{Core, CoreId};
use crate::rpc::params::{decode, invalid_parameters};
use crate::rpc::{Methods, RpcError, RpcResult, When};
use convert::ConfigJson;
use device::{Device, Table};
use legs::{Claims, LegParams, claim};

/// How long a lost connection is waited for unless the caller says (rule 12). Less than the second for which I/O may stand
/// still, since the swap that takes the member out is within that second, too.
const GRACE_NS: Nanos = 800 * NANOS_PER_MS;

/// Adds this module's methods.
pub fn register(m: &mut Methods) {
    m.add("addax_mirror_create", When::Runtime, |app, p| async move { create(&app, p).await });
    m.add("addax_mirror_get", When::Runtime, |app, p| async move { get(&app, p).await });
    m.add("addax_mirror_add_leg", When::Runtime, |app, p| async move { add_leg(&app, p).await });
    m.add("addax_mirror_remove_leg", When::Runtime, |app, p| async move { remove_leg(&app, p).await });
    m.add("addax_mirror_set_instance", When::Runtime, |app, p| async move { set_instance(&app, p).await });
    m.add("addax_mirror_hosts_detached", When::Runtime, |app, p| async move { hosts_detached(&app, p).await });
    m.add("addax_mirror_swap_answer", When::Runtime, |app, p| async move { swap_answer(&app, p).await });
    m.add("addax_mirror_read_meta", When::Runtime, |app, p| async move { legs::read_meta(&app, p).await });
    m.add("addax_mirror_snapshot_begin", When::Runtime, |app, p| async move { snapshot::begin(&app, p).await });
    m.add("addax_mirror_snapshot_commit", When::Runtime, |app, p| async move { snapshot::commit(&app, p).await });
    m.add("addax_mirror_snapshot_abort", When::Runtime, |app, p| async move { snapshot::abort(&app, p).await });
    m.add("addax_mirror_close", When::Runtime, |app, p| async move { close(&app, p).await });
    m.add("addax_mirror_delete", When::Runtime, |app, p| async move { delete(&app, p).await });
}

/// A mirror as a device.
#[derive(Debug)]
pub struct MirrorBdev {
    info: BdevInfo,
    num_blocks: AtomicU64,
    home: CoreId,
    volume: String,
}

impl Bdev for MirrorBdev {
    fn info(&self) -> BdevInfo {
        BdevInfo { num_blocks: self.num_blocks(), ..self.info.clone() }
    }
    fn num_blocks(&self) -> u64 {
        self.num_blocks.load(Ordering::Relaxed)
    }
    fn open(&self, core: &Core) -> Result<Rc<dyn Channel>, BdevError> {
        let device = Table::find(core, &self.info.name).ok_or_else(|| BdevError::NotFound(self.info.name.clone()))?;
        Ok(Rc::new(MirrorChannel(device)))
    }
    fn home(&self) -> Option<CoreId> {
        Some(self.home)
    }
    fn driver_specific(&self) -> Value {
        json!({ "mirror": { "volume": self.volume, "home": self.home.0 } })
    }
    fn holds_guest_data(&self) -> bool {
        true
    }
    fn has_other_paths(&self) -> bool {
        true
    }
    fn config(&self) -> Option<(&'static str, Value)> {
        // A mirror is opened by its agent with a new epoch, never from a saved file.
        None
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

struct MirrorChannel(Rc<Device>);

impl Channel for MirrorChannel {
    fn submit(&self, core: &Core, io: Io) {
        self.0.submit(core, io);
    }
}

struct Mirror {
    home: CoreId,
    volume: String,
    block_size: u32,
    next_leg: Cell<u32>,
    /// Claims by replica.
    claims: RefCell<BTreeMap<String, Claims>>,
}

#[derive(Default)]
struct Mirrors {
    by_name: RefCell<BTreeMap<String, Rc<Mirror>>>,
    next_home: Cell<usize>,
}

impl Mirrors {
    fn find(app: &App, name: &str) -> Result<Rc<Mirror>, RpcError> {
        let found = app.module(Self::default).by_name.borrow().get(name).cloned();
        found.ok_or_else(|| RpcError::new(-i64::from(libc::ENODEV), format!("mirror {name:?} does not exist")))
    }
}

/// Called on the control core when a mirror has let a leg go.
fn leg_dropped(core: &Core, name: &str, replica: &str) {
    let mirror = core.local(Mirrors::default).by_name.borrow().get(name).cloned();
    if let Some(mirror) = mirror {
        mirror.claims.borrow_mut().remove(replica);
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct CreateOptions {
    grace_ms: Option<u64>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Create {
    name: String,
    uuid: Uuid,
    volume: String,
    block_size: u32,
    size_bytes: u64,
    config: ConfigJson,
    legs: Vec<LegParams>,
    equalise_from: Option<String>,
    /// With legs that have meta areas: the regions in which members may differ, one bit each from the lowest bit of the
    /// first byte on, as base64.
    inherited: Option<String>,
    /// Epoch of the last engine that may have served: region stamps are trusted on members whose superblock has it.
    served_epoch: Option<u64>,
    /// The volume was closed in order before: nothing that replicas hold waits for a flush.
    #[serde(default)]
    flushed: bool,
    /// No member is certain to hold every acknowledged write; the caller refuses hosts until they have detached.
    #[serde(default)]
    hosts_must_detach: bool,
    options: Option<CreateOptions>,
}

fn refuse(text: impl Into<String>) -> RpcError {
    RpcError::invalid_params(text)
}

async fn create(app: &App, params: Option<Value>) -> RpcResult {
    let request: Create = decode(params, invalid_parameters)?;
    let mirrors = app.module(Mirrors::default);
    if mirrors.by_name.borrow().contains_key(&request.name) || app.registry().find(&request.name).is_some() {
        return Err(RpcError::errno(libc::EEXIST));
    }
    let params = open_params(&request)?;
    let cores = app.core().data_cores();
    let home = cores[mirrors.next_home.get() % cores.len()];
    mirrors.next_home.set(mirrors.next_home.get() + 1);
    let mirror = Rc::new(Mirror {
        home,
        volume: request.volume.clone(),
        block_size: request.block_size,
        next_leg: Cell::new(request.legs.len() as u32),
        claims: RefCell::default(),
    });
    let mut entries = Vec::new();
    for (index, leg) in request.legs.iter().enumerate() {
        let claims = claim(app, leg, &request.name, request.block_size, request.size_bytes)?;
        entries.push((LegId(index as u32), leg.replica.clone(), claims.entries()));
        mirror.claims.borrow_mut().insert(leg.replica.clone(), claims);
    }
    let name = request.name.clone();
    let opened = app.core().call(home, move |core| -> Result<(), String> {
        let mut chans = Vec::new();
        for (leg, replica, entries) in entries {
            chans.push((leg, replica, entries.open(core).map_err(|e| e.to_string())?));
        }
        let device = Device::open(core, name, params, chans).map_err(|e| e.to_string())?;
        Table::insert(core, &device);
        Ok(())
    });
    opened.await.ok_or_else(|| RpcError::internal("the core has stopped"))?.map_err(refuse)?;
    let info = BdevInfo {
        name: request.name.clone(),
        product_name: "Addax Mirror",
        uuid: request.uuid,
        block_size: request.block_size,
        num_blocks: request.size_bytes / u64::from(request.block_size),
        physical_block_size: 4096,
        optimal_io_boundary: 0,
        io_types: IoTypes { unmap: true, flush: true, reset: true, write_zeroes: true, ..IoTypes::READ_WRITE },
        write_cache: true,
    };
    let num_blocks = AtomicU64::new(info.num_blocks);
    let bdev = Arc::new(MirrorBdev { info, num_blocks, home, volume: request.volume });
    mirrors.by_name.borrow_mut().insert(request.name.clone(), mirror);
    if let Err(error) = app.registry().register(bdev, Vec::new(), "mirror") {
        destroy(app, &request.name).await;
        return Err(error.into());
    }
    Ok(json!(request.name))
}

fn open_params(request: &Create) -> Result<OpenParams, RpcError> {
    crate::bdev::malloc::check_geometry(request.block_size, request.size_bytes / u64::from(request.block_size.max(1)))?;
    if !request.size_bytes.is_multiple_of(u64::from(request.block_size)) || request.size_bytes != request.config.size {
        return Err(refuse(format!(
            "size_bytes {}: the record's size {} and a multiple of block_size {} is allowed",
            request.size_bytes, request.config.size, request.block_size
        )));
    }
    let mut options = mirror_core::Options { grace_ns: GRACE_NS, ..mirror_core::Options::default() };
    if let Some(grace_ms) = request.options.as_ref().and_then(|o| o.grace_ms) {
        options.grace_ns = grace_ms.saturating_mul(NANOS_PER_MS);
    }
    let mut legs = Vec::new();
    for (index, leg) in request.legs.iter().enumerate() {
        let replica = ReplicaId::new(&leg.replica).map_err(|e| refuse(e.to_string()))?;
        let legs::LegParams { local, ref instance, changed, .. } = *leg;
        let (meta, instance) = (leg.meta_bdev_name.is_some(), instance.clone());
        legs.push(LegInit { leg: LegId(index as u32), replica, local, up: true, meta, instance, changed });
    }
    let equalise_from = match &request.equalise_from {
        None => None,
        Some(name) => {
            let found = legs.iter().find(|l| l.replica.as_str() == name).map(|l| l.leg);
            Some(found.ok_or_else(|| refuse(format!("equalise_from {name:?}: the replica of a leg is allowed")))?)
        }
    };
    Ok(OpenParams {
        volume: VolumeId::new(&request.volume).map_err(|e| refuse(e.to_string()))?,
        block_size: request.block_size,
        num_blocks: request.size_bytes / u64::from(request.block_size),
        config: request.config.parse(request.block_size).map_err(|e| refuse(e.to_string()))?,
        legs,
        equalise_from,
        meta: meta_init(request)?,
        flushed: request.flushed,
        hosts_must_detach: request.hosts_must_detach,
        options,
    })
}

/// What is inherited, in the layout of the volume's size.
fn meta_init(request: &Create) -> Result<Option<MetaInit>, RpcError> {
    let Some(text) = &request.inherited else { return Ok(None) };
    let geometry = Geometry::for_volume(request.size_bytes / u64::from(request.block_size), request.block_size);
    let regions = geometry.map_err(|e| refuse(e.to_string()))?.regions();
    let bytes = BASE64.decode(text).map_err(|error| refuse(format!("inherited is no base64: {error}")))?;
    let inherited = RegionBits::from_bytes(regions, &bytes);
    let allowed = || refuse(format!("inherited has {} bytes: one bit for each of {regions} regions", bytes.len()));
    Ok(Some(MetaInit { inherited: inherited.ok_or_else(allowed)?, served: request.served_epoch.map(Epoch) }))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Get {
    name: Option<String>,
}

async fn get(app: &App, params: Option<Value>) -> RpcResult {
    let request: Get = decode(params, invalid_parameters)?;
    if let Some(name) = &request.name {
        Mirrors::find(app, name)?;
    }
    let list: Vec<(String, Rc<Mirror>)> = {
        let mirrors = app.module(Mirrors::default);
        let by_name = mirrors.by_name.borrow();
        let wanted = |(n, _): &(&String, &Rc<Mirror>)| request.name.as_ref().is_none_or(|name| name == *n);
        by_name.iter().filter(wanted).map(|(n, m)| (n.clone(), Rc::clone(m))).collect()
    };
    let mut answer = Vec::new();
    for (name, mirror) in list {
        let described = app.core().call(mirror.home, move |core| Table::find(core, &name).map(|d| d.describe())).await;
        if let Some(Some(mut value)) = described {
            value["volume"] = json!(mirror.volume);
            answer.push(value);
        }
    }
    Ok(Value::Array(answer))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct AddLeg {
    name: String,
    replica: String,
    bdev_name: String,
    meta_bdev_name: Option<String>,
    #[serde(default)]
    local: bool,
    #[serde(default)]
    instance: String,
}

async fn add_leg(app: &App, params: Option<Value>) -> RpcResult {
    let request: AddLeg = decode(params, invalid_parameters)?;
    let mirror = Mirrors::find(app, &request.name)?;
    let replica = ReplicaId::new(&request.replica).map_err(|e| refuse(e.to_string()))?;
    if mirror.claims.borrow().contains_key(&request.replica) {
        return Err(RpcError::errno(libc::EEXIST));
    }
    let entry = app.registry().find(&request.name).ok_or_else(|| RpcError::errno(libc::ENODEV))?;
    let size_bytes = entry.bdev.num_blocks() * u64::from(mirror.block_size);
    let leg = LegParams {
        replica: request.replica.clone(),
        bdev_name: request.bdev_name,
        meta_bdev_name: request.meta_bdev_name,
        local: request.local,
        instance: request.instance,
        changed: false,
    };
    let claims = claim(app, &leg, &request.name, mirror.block_size, size_bytes)?;
    let entries = claims.entries();
    mirror.claims.borrow_mut().insert(request.replica.clone(), claims);
    let first = mirror.next_leg.get();
    mirror.next_leg.set((first + 1) % mirror_core::LEGS_MAX as u32);
    let name = request.name.clone();
    let added = app.core().call(mirror.home, move |core| -> Result<(), String> {
        let device = Table::find(core, &name).ok_or("the mirror is gone")?;
        let chans = entries.open(core).map_err(|e| e.to_string())?;
        let added = device.add_leg(core, first, replica, (leg.local, leg.instance), chans);
        added.then_some(()).ok_or_else(|| format!("the mirror has {} legs already", mirror_core::LEGS_MAX))
    });
    match added.await {
        Some(Ok(())) => Ok(json!(true)),
        other => {
            mirror.claims.borrow_mut().remove(&request.replica);
            Err(RpcError::internal(other.and_then(Result::err).unwrap_or_else(|| "the core has stopped".into())))
        }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RemoveLeg {
    name: String,
    replica: String,
}

async fn remove_leg(app: &App, params: Option<Value>) -> RpcResult {
    let request: RemoveLeg = decode(params, invalid_parameters)?;
    drop_leg(app, &request.name, &request.replica).await?;
    Ok(json!(true))
}

async fn drop_leg(app: &App, name: &str, replica: &str) -> Result<(), RpcError> {
    let mirror = Mirrors::find(app, name)?;
    let (name, replica) = (name.to_owned(), replica.to_owned());
    let removed = app.core().call(mirror.home, move |core| {
        Table::find(core, &name).is_some_and(|device| device.remove_leg(core, &replica))
    });
    if removed.await == Some(true) { Ok(()) } else { Err(RpcError::errno(libc::ENOENT)) }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SetInstance {
    name: String,
    replica: String,
    instance: String,
}

/// `addax_mirror_set_instance`: what the next session of a lost leg will find. Called before the promote that lets it in, so
/// that the leg never comes back as one that lost nothing.
async fn set_instance(app: &App, params: Option<Value>) -> RpcResult {
    let request: SetInstance = decode(params, invalid_parameters)?;
    let mirror = Mirrors::find(app, &request.name)?;
    let SetInstance { name, replica, instance } = request;
    let told = app.core().call(mirror.home, move |core| {
        Table::find(core, &name).is_some_and(|device| device.set_instance(core, &replica, &instance))
    });
    if told.await == Some(true) { Ok(json!(true)) } else { Err(RpcError::errno(libc::ENOENT)) }
}

/// `addax_mirror_hosts_detached`: no host is left that was attached before the mirror was made.
async fn hosts_detached(app: &App, params: Option<Value>) -> RpcResult {
    let request: Name = decode(params, invalid_parameters)?;
    let mirror = Mirrors::find(app, &request.name)?;
    let name = request.name;
    let told = app.core().call(mirror.home, move |core| Table::find(core, &name).map(|d| d.hosts_detached(core)));
    match told.await.flatten() {
        Some(()) => Ok(json!(true)),
        None => Err(RpcError::errno(libc::ENODEV)),
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum Outcome {
    Committed,
    Refused,
    Unknown,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SwapAnswer {
    name: String,
    swap: u64,
    outcome: Outcome,
    config: Option<ConfigJson>,
}

async fn swap_answer(app: &App, params: Option<Value>) -> RpcResult {
    let request: SwapAnswer = decode(params, invalid_parameters)?;
    let mirror = Mirrors::find(app, &request.name)?;
    let outcome = match (request.outcome, request.config) {
        (Outcome::Committed, _) => SwapOutcome::Committed,
        (Outcome::Unknown, _) => SwapOutcome::Unknown,
        (Outcome::Refused, Some(config)) => {
            let current = config.parse(mirror.block_size).map_err(|e| refuse(e.to_string()))?;
            SwapOutcome::Refused { current }
        }
        (Outcome::Refused, None) => return Err(refuse("config is missing: a refusal shows the present record")),
    };
    let name = request.name;
    let taken = app.core().call(mirror.home, move |core| {
        Table::find(core, &name).is_some_and(|device| device.swap_answer(core, request.swap, outcome))
    });
    if taken.await == Some(true) {
        Ok(json!(true))
    } else {
        Err(RpcError::new(-i64::from(libc::ENOENT), format!("swap {} is not waiting for an answer", request.swap)))
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Name {
    name: String,
}

async fn close(app: &App, params: Option<Value>) -> RpcResult {
    let request: Name = decode(params, invalid_parameters)?;
    let mirror = Mirrors::find(app, &request.name)?;
    let name = request.name;
    let closing = app.core().call_async(mirror.home, move |core| {
        let waiting = Table::find(core, &name).map(|device| device.close(core));
        async move {
            match waiting {
                Some(receiver) => receiver.await.is_ok(),
                None => false,
            }
        }
    });
    match closing.await {
        Some(true) => Ok(json!(true)),
        _ => Err(RpcError::errno(libc::ENODEV)),
    }
}

async fn delete(app: &App, params: Option<Value>) -> RpcResult {
    let request: Name = decode(params, invalid_parameters)?;
    let mirror = Mirrors::find(app, &request.name)?;
    // Hosts first: their I/O must be answered before the target's namespace can let go.
    let name = request.name.clone();
    app.core()
        .call(mirror.home, move |core| {
            if let Some(device) = Table::find(core, &name) {
                device.destroy(core);
            }
        })
        .await;
    app.registry().unregister(app.core(), &request.name).await?;
    destroy(app, &request.name).await;
    Ok(json!(true))
}

async fn destroy(app: &App, name: &str) {
    let mirror = app.module(Mirrors::default).by_name.borrow_mut().remove(name);
    let Some(mirror) = mirror else { return };
    let name = name.to_owned();
    app.core()
        .call(mirror.home, move |core| {
            if let Some(device) = Table::remove(core, &name) {
                device.destroy(core);
            }
        })
        .await;
    mirror.claims.borrow_mut().clear();
}
