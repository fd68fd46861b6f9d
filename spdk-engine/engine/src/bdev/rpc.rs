//! RPC methods that make and remove the simple devices: malloc, null, aio, uring, error, delay.

use std::cell::RefCell;
use std::collections::HashMap;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use nvme_wire::Status;
use serde::Deserialize;
use serde_json::{Value, json};
use uuid::Uuid;

use super::delay::{Delay, Latencies};
use super::error::{ErrorBdev, Fault, Injection, Kind};
use super::examine;
use super::malloc::Malloc;
use super::null::Null;
use super::registry::{Access, BdevEvent, Desc, Entry};
use super::uring::{FileBdev, FileParams, Flavour};
use super::{Bdev, BdevInfo, IoTypes};
use crate::app::App;
use crate::rpc::params::{decode, decode_failed, invalid_parameters};
use crate::rpc::{Methods, RpcError, RpcResult, When};

/// Adds this module's methods.
pub fn register(m: &mut Methods) {
    m.add("bdev_malloc_create", When::Runtime, |app, p| async move { malloc_create(&app, p) });
    m.add("bdev_malloc_delete", When::Runtime, |app, p| async move { delete(&app, p, "malloc").await });
    m.add("bdev_null_create", When::Runtime, |app, p| async move { null_create(&app, p) });
    m.add("bdev_null_delete", When::Runtime, |app, p| async move { delete(&app, p, "null").await });
    m.add("bdev_null_resize", When::Runtime, |app, p| async move { null_resize(&app, p) });
    m.add("bdev_aio_create", When::Runtime, |app, p| async move {
        let made = aio_create(&app, p)?;
        examine::settled(&app).await;
        Ok(made)
    });
    m.add("bdev_aio_delete", When::Runtime, |app, p| async move { delete(&app, p, "aio").await });
    m.add("bdev_aio_rescan", When::Runtime, |app, p| async move { rescan(&app, p, "aio") });
    m.add("bdev_uring_create", When::Runtime, |app, p| async move {
        let made = uring_create(&app, p)?;
        examine::settled(&app).await;
        Ok(made)
    });
    m.add("bdev_uring_delete", When::Runtime, |app, p| async move { delete(&app, p, "uring").await });
    m.add("bdev_uring_rescan", When::Runtime, |app, p| async move { rescan(&app, p, "uring") });
    m.add("bdev_error_create", When::Runtime, |app, p| async move { error_create(&app, p) });
    m.add("bdev_error_delete", When::Runtime, |app, p| async move { delete(&app, p, "error").await });
    m.add("bdev_error_inject_error", When::Runtime, |app, p| async move { error_inject(&app, p) });
    m.add("bdev_error_resume_pending", When::Runtime, |app, p| async move {
        let request: Name = decode(p, decode_failed)?;
        with::<ErrorBdev, _>(&app, &request.name, |bdev| bdev.resume_pending(app.core()))?;
        Ok(json!(true))
    });
    m.add("bdev_delay_create", When::Runtime, |app, p| async move { delay_create(&app, p) });
    m.add("bdev_delay_delete", When::Runtime, |app, p| async move { delete(&app, p, "delay").await });
    m.add("bdev_delay_update_latency", When::Runtime, |app, p| async move { delay_update(&app, p) });
    m.add_config("bdev", |app| {
        let simple = ["malloc", "null", "aio", "uring", "error", "delay"];
        let list = app.registry().list();
        let ours = list.iter().filter(|e| simple.contains(&e.module));
        let mut entries: Vec<_> = ours.filter_map(|e| e.bdev.config()).map(|(n, p)| (n.to_owned(), p)).collect();
        entries.extend(app.module(Delays::default).waiting.borrow().values().map(DelayCreate::entry));
        entries
    });
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Name {
    name: String,
}

async fn delete(app: &App, params: Option<Value>, module: &'static str) -> RpcResult {
    let request: Name = decode(params, decode_failed)?;
    if module == "delay" && app.module(Delays::default).waiting.borrow_mut().remove(&request.name).is_some() {
        return Ok(json!(true));
    }
    let entry = app.registry().find(&request.name).filter(|e| e.module == module);
    let Some(entry) = entry else { return Err(RpcError::errno(libc::ENODEV)) };
    remove(app, &entry.bdev.info().name).await?;
    Ok(json!(true))
}

/// Unregisters a device and lets its base go.
async fn remove(app: &App, name: &str) -> Result<(), RpcError> {
    app.registry().unregister(app.core(), name).await?;
    app.module(Bases::default).0.borrow_mut().remove(name);
    Ok(())
}

/// Claims of virtual devices on their bases, by the virtual device's name.
#[derive(Default)]
struct Bases(RefCell<HashMap<String, Desc>>);

fn claim_base(app: &App, base: &str, name: &str, module: &'static str) -> Result<(), RpcError> {
    let (on_app, on_name) = (app.clone(), name.to_owned());
    let desc = app.registry().open(base, Access::Exclusive(module), move |event| match event {
        BdevEvent::Removing => {
            let (app, name) = (on_app.clone(), on_name.clone());
            on_app.core().spawn(async move {
                if let Err(error) = remove(&app, &name).await {
                    tracing::warn!(bdev = name, ?error, "a device over a removed base did not go");
                }
            });
        }
        BdevEvent::Resized => on_app.registry().resized(&on_name),
    })?;
    app.module(Bases::default).0.borrow_mut().insert(name.to_owned(), desc);
    Ok(())
}

fn with<T: 'static, R>(app: &App, name: &str, f: impl FnOnce(&T) -> R) -> Result<R, RpcError> {
    let entry = app.registry().find(name);
    let bdev = entry.as_ref().and_then(|e| e.bdev.as_any().downcast_ref::<T>());
    bdev.map(f).ok_or_else(|| RpcError::errno(libc::ENODEV))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(dead_code, reason = "members without effect are decoded so that they are accepted and checked")]
struct MallocCreate {
    name: Option<String>,
    #[serde(deserialize_with = "crate::rpc::params::whole")]
    block_size: u32,
    #[serde(deserialize_with = "crate::rpc::params::whole")]
    num_blocks: u64,
    uuid: Option<Uuid>,
    #[serde(default)]
    optimal_io_boundary: u32,
    #[serde(default)]
    md_size: u32,
    #[serde(default)]
    md_interleave: bool,
    #[serde(default)]
    dif_type: u32,
    #[serde(default)]
    dif_is_head_of_md: bool,
    #[serde(default)]
    physical_block_size: u32,
    #[serde(default)]
    dif_pi_format: u32,
    numa_id: Option<i32>,
}

fn without_metadata(md_size: u32, dif_type: u32) -> Result<(), RpcError> {
    if md_size != 0 || dif_type != 0 {
        tracing::warn!(md_size, dif_type, "devices with metadata are not supported: both must be 0");
        return Err(RpcError::errno(libc::EINVAL));
    }
    Ok(())
}

fn new_info(name: String, uuid: Option<Uuid>, block_size: u32, num_blocks: u64) -> BdevInfo {
    BdevInfo {
        name,
        product_name: "",
        uuid: uuid.unwrap_or_else(Uuid::new_v4),
        block_size,
        num_blocks,
        physical_block_size: block_size,
        optimal_io_boundary: 0,
        io_types: IoTypes::READ_WRITE,
        write_cache: false,
    }
}

fn malloc_create(app: &App, params: Option<Value>) -> RpcResult {
    let request: MallocCreate = decode(params, decode_failed)?;
    without_metadata(request.md_size, request.dif_type)?;
    let name = request.name.unwrap_or_else(|| first_free(app, "Malloc"));
    let mut info = new_info(name.clone(), request.uuid, request.block_size, request.num_blocks);
    info.optimal_io_boundary = request.optimal_io_boundary;
    if request.physical_block_size != 0 {
        info.physical_block_size = request.physical_block_size;
    }
    refuse_taken(app, &name)?;
    app.registry().register(Arc::new(Malloc::new(info)?), Vec::new(), "malloc")?;
    Ok(json!(name))
}

/// Checked before a large medium is made, so that a refused call costs nothing.
fn refuse_taken(app: &App, name: &str) -> Result<(), RpcError> {
    if app.registry().find(name).is_some() { Err(RpcError::errno(libc::EEXIST)) } else { Ok(()) }
}

fn first_free(app: &App, prefix: &str) -> String {
    let mut number = 0u32;
    loop {
        let name = format!("{prefix}{number}");
        if app.registry().find(&name).is_none() {
            return name;
        }
        number += 1;
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(dead_code, reason = "members without effect are decoded so that they are accepted and checked")]
struct NullCreate {
    name: String,
    #[serde(deserialize_with = "crate::rpc::params::whole")]
    block_size: u32,
    #[serde(deserialize_with = "crate::rpc::params::whole")]
    num_blocks: u64,
    uuid: Option<Uuid>,
    #[serde(default)]
    physical_block_size: u32,
    #[serde(default)]
    md_size: u32,
    #[serde(default)]
    dif_type: u32,
    #[serde(default)]
    dif_pi_format: u32,
    #[serde(default)]
    dif_is_head_of_md: bool,
    #[serde(default)]
    preferred_write_granularity: u32,
    #[serde(default)]
    preferred_write_alignment: u32,
    #[serde(default)]
    optimal_write_size: u32,
    #[serde(default)]
    preferred_unmap_granularity: u32,
    #[serde(default)]
    preferred_unmap_alignment: u32,
}

fn null_create(app: &App, params: Option<Value>) -> RpcResult {
    let request: NullCreate = decode(params, decode_failed)?;
    without_metadata(request.md_size, request.dif_type)?;
    let mut info = new_info(request.name.clone(), request.uuid, request.block_size, request.num_blocks);
    if request.physical_block_size != 0 {
        info.physical_block_size = request.physical_block_size;
    }
    app.registry().register(Arc::new(Null::new(info)?), Vec::new(), "null")?;
    Ok(json!(request.name))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct NullResize {
    name: String,
    #[serde(deserialize_with = "crate::rpc::params::whole")]
    new_size: u64,
}

fn null_resize(app: &App, params: Option<Value>) -> RpcResult {
    let request: NullResize = decode(params, decode_failed)?;
    with::<Null, _>(app, &request.name, |null| {
        let blocks = request.new_size.checked_mul(1 << 20).map(|b| b / u64::from(null.info().block_size));
        match blocks {
            Some(blocks) if blocks > 0 => {
                null.resize(blocks);
                Ok(())
            }
            _ => Err(RpcError::errno(libc::EINVAL)),
        }
    })??;
    app.registry().resized(&request.name);
    Ok(json!(true))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct AioCreate {
    name: String,
    filename: PathBuf,
    block_size: Option<u32>,
    #[serde(default)]
    readonly: bool,
    #[serde(default)]
    fallocate: bool,
    uuid: Option<Uuid>,
    #[serde(default)]
    nowait: bool,
}

fn aio_create(app: &App, params: Option<Value>) -> RpcResult {
    let request: AioCreate = decode(params, decode_failed)?;
    // Every disk operation here may sleep in the kernel's workers; `nowait` would only turn that into errors.
    let _ = request.nowait;
    let flavour = Flavour::Aio { readonly: request.readonly, fallocate: request.fallocate };
    let name = request.name.clone();
    let block_size = request.block_size.filter(|b| *b != 0);
    let file = FileParams { name: request.name, path: request.filename, block_size, uuid: request.uuid };
    app.registry().register(Arc::new(FileBdev::open_file(file, flavour)?), Vec::new(), "aio")?;
    Ok(json!(name))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct UringCreate {
    name: String,
    filename: PathBuf,
    block_size: Option<u32>,
    uuid: Option<Uuid>,
}

fn uring_create(app: &App, params: Option<Value>) -> RpcResult {
    let request: UringCreate = decode(params, decode_failed)?;
    let name = request.name.clone();
    let block_size = request.block_size.filter(|b| *b != 0);
    let file = FileParams { name: request.name, path: request.filename, block_size, uuid: request.uuid };
    let made = FileBdev::open_file(file, Flavour::Uring)
        .and_then(|bdev| app.registry().register(Arc::new(bdev), Vec::new(), "uring"));
    made.map_err(|error| {
        tracing::error!(bdev = name, %error, "cannot create a uring device");
        RpcError::internal("Unable to create URING bdev.")
    })?;
    Ok(json!(name))
}

fn rescan(app: &App, params: Option<Value>, module: &'static str) -> RpcResult {
    let request: Name = decode(params, decode_failed)?;
    if app.registry().find(&request.name).is_none_or(|e| e.module != module) {
        return Err(RpcError::errno(libc::ENODEV));
    }
    if with::<FileBdev, _>(app, &request.name, FileBdev::rescan)?? {
        app.registry().resized(&request.name);
    }
    Ok(json!(true))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ErrorCreate {
    base_name: String,
    uuid: Option<Uuid>,
}

fn error_create(app: &App, params: Option<Value>) -> RpcResult {
    let request: ErrorCreate = decode(params, decode_failed)?;
    let base = app.registry().find(&request.base_name).ok_or_else(|| RpcError::errno(libc::ENODEV))?;
    let base_name = base.bdev.info().name;
    let bdev = Arc::new(ErrorBdev::new(base, request.uuid));
    register_over(app, &base_name, bdev, "error")?;
    Ok(json!(true))
}

fn register_over(app: &App, base: &str, bdev: Arc<dyn Bdev>, module: &'static str) -> Result<(), RpcError> {
    let name = bdev.info().name;
    refuse_taken(app, &name)?;
    claim_base(app, base, &name, module)?;
    if let Err(error) = app.registry().register(bdev, Vec::new(), module) {
        app.module(Bases::default).0.borrow_mut().remove(&name);
        return Err(error.into());
    }
    Ok(())
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum ErrorType {
    Failure,
    Pending,
    CorruptData,
    Nomem,
    NvmeFailure,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(dead_code, reason = "the queue depth of SPDK's method has no effect on this device")]
struct Inject {
    name: String,
    io_type: Kind,
    error_type: ErrorType,
    nvme_sct: Option<u8>,
    nvme_sc: Option<u8>,
    #[serde(default = "one")]
    num: u32,
    queue_depth: Option<u64>,
    #[serde(default)]
    corrupt_offset: u64,
    #[serde(default)]
    corrupt_value: u8,
}

fn one() -> u32 {
    1
}

fn error_inject(app: &App, params: Option<Value>) -> RpcResult {
    let request: Inject = decode(params, decode_failed)?;
    let invalid = || RpcError::errno(libc::EINVAL);
    let fault = match request.error_type {
        ErrorType::Failure => Fault::Status(Status::INTERNAL_ERROR),
        ErrorType::Pending => Fault::Pending,
        ErrorType::Nomem => Fault::Status(Status::COMMAND_INTERRUPTED),
        ErrorType::CorruptData if request.corrupt_value == 0 => return Err(invalid()),
        ErrorType::CorruptData => Fault::Corrupt { offset: request.corrupt_offset, value: request.corrupt_value },
        ErrorType::NvmeFailure => match (request.nvme_sct, request.nvme_sc) {
            (Some(sct), Some(sc)) => Fault::Status(Status::new(sct, sc)),
            _ => {
                let text = "nvme_sct or nvme_sc should be specified for NVMe error injection";
                return Err(RpcError::new(-22, text));
            }
        },
    };
    if request.num == 0 && request.io_type != Kind::Clear {
        return Err(invalid());
    }
    let injection = Injection { fault, left: request.num };
    with::<ErrorBdev, _>(app, &request.name, |bdev| bdev.inject(request.io_type, injection))?;
    Ok(json!(true))
}

/// Delay devices whose base is not there yet: they appear with it.
#[derive(Default)]
struct Delays {
    waiting: RefCell<HashMap<String, DelayCreate>>,
    watching: std::cell::Cell<bool>,
}

#[derive(Deserialize, Clone)]
#[serde(deny_unknown_fields)]
struct DelayCreate {
    name: String,
    base_bdev_name: String,
    avg_read_latency: u64,
    p99_read_latency: u64,
    avg_write_latency: u64,
    p99_write_latency: u64,
    uuid: Option<Uuid>,
}

impl DelayCreate {
    fn entry(&self) -> (String, Value) {
        let mut params = json!({ "name": self.name, "base_bdev_name": self.base_bdev_name,
            "avg_read_latency": self.avg_read_latency, "p99_read_latency": self.p99_read_latency,
            "avg_write_latency": self.avg_write_latency, "p99_write_latency": self.p99_write_latency });
        if let Some(uuid) = self.uuid {
            params["uuid"] = json!(uuid.to_string());
        }
        ("bdev_delay_create".to_owned(), params)
    }
}

fn delay_create(app: &App, params: Option<Value>) -> RpcResult {
    let request: DelayCreate = decode(params, decode_failed)?;
    let delays = app.module(Delays::default);
    refuse_taken(app, &request.name)?;
    if delays.waiting.borrow().contains_key(&request.name) {
        return Err(RpcError::errno(libc::EEXIST));
    }
    let name = request.name.clone();
    match app.registry().find(&request.base_bdev_name) {
        Some(base) => make_delay(app, &request, base)?,
        None => {
            delays.waiting.borrow_mut().insert(name.clone(), request);
            watch_for_bases(app, &delays);
        }
    }
    Ok(json!(name))
}

fn make_delay(app: &App, request: &DelayCreate, base: Arc<Entry>) -> Result<(), RpcError> {
    let latencies = Latencies {
        avg_read: AtomicU64::new(request.avg_read_latency),
        p99_read: AtomicU64::new(request.p99_read_latency),
        avg_write: AtomicU64::new(request.avg_write_latency),
        p99_write: AtomicU64::new(request.p99_write_latency),
    };
    let base_name = base.bdev.info().name;
    let bdev = Arc::new(Delay::new(request.name.clone(), request.uuid, base, latencies));
    register_over(app, &base_name, bdev, "delay")
}

fn watch_for_bases(app: &App, delays: &Rc<Delays>) {
    if delays.watching.replace(true) {
        return;
    }
    let (app_in_watch, delays) = (app.clone(), Rc::clone(delays));
    app.registry().watch(move |entry| {
        let is_base = |d: &&DelayCreate| entry.is_called(&d.base_bdev_name);
        let found = delays.waiting.borrow().values().find(is_base).cloned();
        let Some(request) = found else { return };
        delays.waiting.borrow_mut().remove(&request.name);
        if let Err(error) = make_delay(&app_in_watch, &request, Arc::clone(entry)) {
            tracing::error!(bdev = request.name, ?error, "a delay device could not be made over its base");
        }
    });
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum LatencyType {
    AvgRead,
    P99Read,
    AvgWrite,
    P99Write,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct DelayUpdate {
    delay_bdev_name: String,
    latency_type: LatencyType,
    latency_us: u64,
}

fn delay_update(app: &App, params: Option<Value>) -> RpcResult {
    let request: DelayUpdate = decode(params, invalid_parameters)?;
    let entry = app.registry().find(&request.delay_bdev_name);
    let entry = entry.ok_or_else(|| RpcError::invalid_params("The requested bdev does not exist."))?;
    let not_delay = || RpcError::new(RpcError::INVALID_REQUEST, "The requested bdev is not a delay bdev.");
    let delay = entry.bdev.as_any().downcast_ref::<Delay>().ok_or_else(not_delay)?;
    let latencies = delay.latencies();
    let field = match request.latency_type {
        LatencyType::AvgRead => &latencies.avg_read,
        LatencyType::P99Read => &latencies.p99_read,
        LatencyType::AvgWrite => &latencies.avg_write,
        LatencyType::P99Write => &latencies.p99_write,
    };
    field.store(request.latency_us, Ordering::Relaxed);
    Ok(json!(true))
}
