//! Methods about block devices in general: list, statistics, and the options.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use serde::Deserialize;
use serde_json::{Value, json};

use super::framework::TICK_RATE;
use super::{Methods, RpcError, RpcResult, When, params};
use crate::app::App;
use crate::bdev::registry::Entry;
use crate::bdev::{IoTypes, OpStats};
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
        return Ok(Value::Array(app.registry().list().iter().map(|e| bdev_object(app, e)).collect()));
    };
    let deadline = app.core().now().saturating_add(request.timeout.saturating_mul(NANOS_PER_MS));
    loop {
        if let Some(entry) = app.registry().find(&name) {
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

#[derive(Deserialize, Default, Clone, Copy, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
enum ResetMode {
    #[default]
    None,
    All,
    Maxmin,
    Error,
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
    let stats: Vec<_> = entries.iter().map(|e| iostat(e, request.reset_mode)).collect();
    let ticks = app.core().now();
    if request.per_channel {
        let name = entries.first().map(|e| e.bdev.info().name);
        // Channels of one device share its counters here: one entry stands for all of them.
        return Ok(json!({ "tick_rate": TICK_RATE, "ticks": ticks, "name": name, "channels": stats }));
    }
    Ok(json!({ "tick_rate": TICK_RATE, "ticks": ticks, "bdevs": stats }))
}

fn iostat(entry: &Entry, reset: ResetMode) -> Value {
    let mut object = json!({ "name": entry.bdev.info().name });
    let copy = OpStats::default();
    let kinds =
        [("read", &entry.stats.read), ("write", &entry.stats.write), ("unmap", &entry.stats.unmap), ("copy", &copy)];
    let bytes_name = |kind: &str| match kind {
        "write" => "bytes_written".to_owned(),
        "unmap" => "bytes_unmapped".to_owned(),
        "copy" => "bytes_copied".to_owned(),
        other => format!("bytes_{other}"),
    };
    for (kind, s) in kinds {
        object[bytes_name(kind)] = json!(s.bytes.load(Ordering::Relaxed));
        object[format!("num_{kind}_ops")] = json!(s.ops.load(Ordering::Relaxed));
    }
    for (kind, s) in kinds {
        let min = s.min_ns.load(Ordering::Relaxed);
        object[format!("{kind}_latency_ticks")] = json!(s.latency_ns.load(Ordering::Relaxed));
        object[format!("max_{kind}_latency_ticks")] = json!(s.max_ns.load(Ordering::Relaxed));
        object[format!("min_{kind}_latency_ticks")] = json!(if min == u64::MAX { 0 } else { min });
        reset_counters(s, reset);
    }
    let errors = entry.stats.errors.load(Ordering::Relaxed);
    object["io_error"] = if errors == 0 { json!({}) } else { json!({ "error": errors }) };
    if matches!(reset, ResetMode::All | ResetMode::Error) {
        entry.stats.errors.store(0, Ordering::Relaxed);
    }
    object
}

fn reset_counters(s: &OpStats, reset: ResetMode) {
    if matches!(reset, ResetMode::All | ResetMode::Maxmin) {
        s.max_ns.store(0, Ordering::Relaxed);
        s.min_ns.store(u64::MAX, Ordering::Relaxed);
    }
    if reset == ResetMode::All {
        for counter in [&s.bytes, &s.ops, &s.latency_ns] {
            counter.store(0, Ordering::Relaxed);
        }
    }
}
