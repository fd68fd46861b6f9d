//! Methods about block devices in general: list, statistics, and the options.

use std::sync::Arc;

use serde::Deserialize;
use serde_json::{Value, json};

use super::framework::TICK_RATE;
use super::{Methods, RpcError, RpcResult, When, params};
use crate::app::App;
use crate::bdev::IoTypes;
use crate::bdev::registry::Entry;
use crate::bdev::stats::{Counts, OpCounts, Reset};
use crate::reactor::CoreId;
use crate::reactor::driver::NANOS_PER_MS;

/// Most names in one `bdev_get_iostat`.
const NAMES_MAX: usize = 1024;
/// How often a waiting `bdev_get_bdevs` looks again.
const POLL_NS: u64 = 100 * NANOS_PER_MS;

/// Adds this module's methods.
pub fn register(m: &mut Methods) {
    m.add("bdev_get_bdevs", When::Runtime, |app, params| async move { get_bdevs(&app, params).await });
    m.add("bdev_get_iostat", When::Runtime, |app, params| async move { get_iostat(&app, params) });
    m.add("bdev_set_options", When::Startup, |app, params| async move {
        let options: BdevOptions = params::decode(params, params::invalid_parameters)?;
        if options.bdev_io_pool_size < options.bdev_io_cache_size {
            let (pool, cache) = (options.bdev_io_pool_size, options.bdev_io_cache_size);
            return Err(RpcError::invalid_params(format!("Pool size {pool} too small for cache size {cache}")));
        }
        crate::bdev::examine::set_automatic(&app, options.bdev_auto_examine);
        *app.module(OptionsState::default).0.borrow_mut() = options;
        Ok(json!(true))
    });
    m.add_config("bdev", |app| {
        let options = app.module(OptionsState::default);
        let params = serde_json::to_value(&*options.0.borrow()).unwrap_or(Value::Null);
        vec![("bdev_set_options".into(), params)]
    });
}

/// The last entry of the `bdev` section; registered after all device modules.
pub fn register_examine_entry(m: &mut Methods) {
    m.add_config("bdev", |_| vec![("bdev_wait_for_examine".into(), Value::Null)]);
}

/// Accepted and saved for SPDK's sake; this engine sizes its memory by `-s`.
#[derive(Debug, Clone, Deserialize, serde::Serialize)]
#[serde(deny_unknown_fields, default)]
struct BdevOptions {
    bdev_io_pool_size: u32,
    bdev_io_cache_size: u32,
    bdev_auto_examine: bool,
    iobuf_small_cache_size: u32,
    iobuf_large_cache_size: u32,
}

impl Default for BdevOptions {
    fn default() -> Self {
        Self {
            bdev_io_pool_size: 65535,
            bdev_io_cache_size: 256,
            bdev_auto_examine: true,
            iobuf_small_cache_size: 128,
            iobuf_large_cache_size: 16,
        }
    }
}

#[derive(Default)]
struct OptionsState(std::cell::RefCell<BdevOptions>);

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct GetBdevs {
    name: Option<String>,
    #[serde(default)]
    timeout: u64,
}

async fn get_bdevs(app: &App, params: Option<Value>) -> RpcResult {
    let request: GetBdevs = params::decode(params, params::decode_failed)?;
    let Some(name) = request.name else {
        crate::bdev::lvol::refresh(app, None).await;
        return Ok(Value::Array(app.registry().list().iter().map(|e| bdev_object(app, e)).collect()));
    };
    let deadline = app.core().now().saturating_add(request.timeout.saturating_mul(NANOS_PER_MS));
    loop {
        if let Some(entry) = app.registry().find(&name) {
            crate::bdev::lvol::refresh(app, Some(&entry)).await;
            return Ok(json!([bdev_object(app, &entry)]));
        }
        if app.core().now() >= deadline {
            return Err(RpcError::errno(libc::ENODEV));
        }
        app.core().sleep(POLL_NS).await;
    }
}

/// One device as `bdev_get_bdevs` shows it, members in SPDK's order.
#[must_use]
pub fn bdev_object(app: &App, entry: &Entry) -> Value {
    let info = entry.bdev.info();
    let claim = app.registry().claim(&info.name);
    let granularity = u64::from(info.physical_block_size.max(info.block_size) / info.block_size);
    let mut object = json!({
        "name": info.name,
        "aliases": entry.aliases(),
        "product_name": info.product_name,
        "block_size": info.block_size,
        "num_blocks": info.num_blocks,
        "preferred_write_alignment": granularity,
        "preferred_write_granularity": granularity,
        "optimal_write_size": granularity,
        "preferred_unmap_alignment": granularity,
        "preferred_unmap_granularity": granularity,
        "uuid": info.uuid.to_string(),
        "assigned_rate_limits": { "rw_ios_per_sec": 0, "rw_mbytes_per_sec": 0, "r_mbytes_per_sec": 0,
            "w_mbytes_per_sec": 0 },
        "claimed": claim.is_some(),
    });
    if let Some((_, claim_type)) = claim {
        object["claim_type"] = json!(claim_type);
    }
    object["zoned"] = json!(false);
    object["supported_io_types"] = io_types(info.io_types);
    object["driver_specific"] =
        crate::raid::driver_specific(app, &info.name).unwrap_or_else(|| entry.bdev.driver_specific());
    object
}

fn io_types(t: IoTypes) -> Value {
    json!({ "read": t.read, "write": t.write, "unmap": t.unmap, "flush": t.flush, "reset": t.reset,
        "nvme_admin": t.nvme_admin, "nvme_io": t.nvme_io, "nvme_io_md": false,
        "write_zeroes": t.write, "zcopy": t.zcopy, "get_zone_info": false, "zone_management": false,
        "zone_append": false, "compare": t.compare, "compare_and_write": t.compare_and_write, "abort": t.abort,
        "seek_hole": t.seek_hole, "seek_data": t.seek_data, "copy": t.copy, "nvme_iov_md": false,
        "nvme_nssr": false, "write_uncorrectable": false })
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct GetIostat {
    names: Option<Vec<String>>,
    #[serde(default)]
    per_channel: bool,
    #[serde(default)]
    reset_mode: ResetMode,
}

#[derive(Deserialize, Default, Clone, Copy)]
#[serde(rename_all = "lowercase")]
enum ResetMode {
    #[default]
    None,
    All,
    Maxmin,
    Error,
}

impl ResetMode {
    fn of_counters(self) -> Option<Reset> {
        match self {
            Self::None => None,
            Self::All => Some(Reset::All),
            Self::Maxmin => Some(Reset::Extremes),
            Self::Error => Some(Reset::Errors),
        }
    }
}

fn get_iostat(app: &App, params: Option<Value>) -> RpcResult {
    let request: GetIostat = params::decode(params, params::decode_failed)?;
    let names = request.names.unwrap_or_default();
    if names.len() > NAMES_MAX {
        return Err(params::decode_failed());
    }
    if request.per_channel && names.len() != 1 {
        return Err(RpcError::errno(libc::EINVAL));
    }
    let registry = app.registry();
    let entries: Vec<Arc<Entry>> = if names.is_empty() {
        registry.list()
    } else {
        let find = |n: &String| registry.find(n).ok_or_else(|| RpcError::errno(libc::ENODEV));
        names.iter().map(find).collect::<Result<_, _>>()?
    };
    let ticks = app.core().now();
    let answer = match entries.first().filter(|_| request.per_channel) {
        Some(entry) => {
            let name = entry.bdev.info().name;
            let channels: Vec<_> = entry.stats.by_core().iter().map(|(core, c)| channel_iostat(*core, c)).collect();
            json!({ "tick_rate": TICK_RATE, "ticks": ticks, "name": name, "channels": channels })
        }
        None => {
            let bdevs: Vec<_> = entries.iter().map(|e| iostat(e)).collect();
            json!({ "tick_rate": TICK_RATE, "ticks": ticks, "bdevs": bdevs })
        }
    };
    if let Some(what) = request.reset_mode.of_counters() {
        entries.iter().for_each(|e| e.stats.reset(what));
    }
    Ok(answer)
}

fn iostat(entry: &Entry) -> Value {
    let mut object = json!({ "name": entry.bdev.info().name });
    put_counts(&mut object, &entry.stats.total());
    object
}

fn channel_iostat(core: CoreId, counts: &Counts) -> Value {
    let mut object = json!({ "thread_id": core.0 });
    put_counts(&mut object, counts);
    object
}

/// The members in SPDK's order.
fn put_counts(object: &mut Value, counts: &Counts) {
    let kinds = [
        ("read", "bytes_read", counts.read),
        ("write", "bytes_written", counts.write),
        ("unmap", "bytes_unmapped", counts.unmap),
        ("copy", "bytes_copied", OpCounts::default()),
    ];
    for (kind, bytes, c) in &kinds {
        object[*bytes] = json!(c.bytes);
        object[format!("num_{kind}_ops")] = json!(c.ops);
    }
    for (kind, _, c) in &kinds {
        object[format!("{kind}_latency_ticks")] = json!(c.latency_ns);
        object[format!("max_{kind}_latency_ticks")] = json!(c.max_ns);
        object[format!("min_{kind}_latency_ticks")] = json!(if c.min_ns == u64::MAX { 0 } else { c.min_ns });
    }
    object["io_error"] = if counts.errors == 0 { json!({}) } else { json!({ "error": counts.errors }) };
}
