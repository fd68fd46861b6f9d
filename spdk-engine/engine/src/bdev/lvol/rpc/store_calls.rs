//! Methods about stores: create, delete, rename, grow.

use serde::Deserialize;
use serde_json::{Value, json};
use uuid::Uuid;

use super::{Rename, StoreClear, check_name, failed, find_store, late};
use crate::app::App;
use crate::bdev::lvol::owner::{End, Open};
use crate::bdev::lvol::stores::{Lvols, OpenError};
use crate::rpc::params::{decode, decode_failed};
use crate::rpc::{Methods, RpcError, RpcResult, When};

/// Bytes of a cluster when none is given.
const CLUSTER_BYTES: u32 = 4 << 20;
/// Metadata pages per cluster in percent when none is given.
const MD_RATIO: u32 = 100;

/// Adds the methods.
pub fn register(m: &mut Methods) {
    m.add("bdev_lvol_create_lvstore", When::Runtime, |app, p| async move { create(&app, p).await });
    m.add("bdev_lvol_rename_lvstore", When::Runtime, |app, p| async move { rename(&app, p).await });
    m.add("bdev_lvol_delete_lvstore", When::Runtime, |app, p| async move { delete(&app, p).await });
    m.add("bdev_lvol_grow_lvstore", When::Runtime, |app, p| async move { grow(&app, p).await });
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Create {
    bdev_name: String,
    lvs_name: String,
    #[serde(default, deserialize_with = "crate::rpc::params::whole")]
    cluster_sz: u32,
    #[serde(default)]
    clear_method: StoreClear,
    #[serde(default, deserialize_with = "crate::rpc::params::whole")]
    num_md_pages_per_cluster_ratio: u32,
    #[serde(default, deserialize_with = "crate::rpc::params::whole")]
    md_page_size: u32,
}

fn or_default(value: u32, default: u32) -> u32 {
    if value == 0 { default } else { value }
}

async fn create(app: &App, params: Option<Value>) -> RpcResult {
    let request: Create = decode(params, decode_failed)?;
    let page = request.md_page_size;
    check_name(&request.lvs_name).map_err(RpcError::errno)?;
    if page != 0 && !(page.is_power_of_two() && (4096..=65536).contains(&page)) {
        return Err(RpcError::errno(libc::EINVAL));
    }
    let entry = app.registry().find(&request.bdev_name).ok_or_else(|| RpcError::errno(libc::ENODEV))?;
    let info = entry.bdev.info();
    if app.registry().claim(&info.name).is_some() {
        return Err(RpcError::errno(libc::EPERM));
    }
    let cluster_size = or_default(request.cluster_sz, CLUSTER_BYTES);
    if cluster_size < info.block_size || !cluster_size.is_multiple_of(info.block_size) {
        return Err(RpcError::errno(libc::EINVAL));
    }
    let lvols = Lvols::of(app);
    let _reserved = lvols.reserve(&request.lvs_name).map_err(|e| RpcError::errno(e.errno()))?;
    let options = lvol_core::FormatOptions {
        name: request.lvs_name,
        uuid: Uuid::new_v4(),
        cluster_size,
        clear_method: request.clear_method.into(),
        md_pages_per_cluster_ratio: or_default(request.num_md_pages_per_cluster_ratio, MD_RATIO),
        md_page_size: page,
    };
    match lvols.open(&entry, Open::Format(options)).await {
        Ok(store) => Ok(json!(store.shared.uuid.to_string())),
        Err(OpenError::Device(error)) => Err(error.into()),
        Err(error) => {
            tracing::warn!(%error, "an lvolstore could not be made");
            Err(late(error.errno()))
        }
    }
}

async fn rename(app: &App, params: Option<Value>) -> RpcResult {
    let request: Rename = decode(params, decode_failed)?;
    let lvols = Lvols::of(app);
    let store = lvols
        .store_named(&request.old_name)
        .filter(|s| !s.is_closing())
        .ok_or_else(|| RpcError::new(-i64::from(libc::ENOENT), format!("Lvol store {} not found", request.old_name)))?;
    if request.old_name == request.new_name {
        return Ok(json!(true));
    }
    check_name(&request.new_name).map_err(late)?;
    let _reserved = lvols.reserve(&request.new_name).map_err(|e| late(e.errno()))?;
    let name = request.new_name.clone();
    let renamed = lvols.on_owner(&store, |_, owned| async move { owned.store.rename(&name).await }).await;
    renamed.map_err(|e| failed(&e))?;
    lvols.renamed(&store, &request.new_name);
    Ok(json!(true))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Which {
    uuid: Option<String>,
    lvs_name: Option<String>,
}

async fn delete(app: &App, params: Option<Value>) -> RpcResult {
    let request: Which = decode(params, decode_failed)?;
    let lvols = Lvols::of(app);
    let store = find_store(&lvols, request.uuid.as_deref(), request.lvs_name.as_deref())?;
    lvols.close(&store, End::Destroy).await.map_err(|e| failed(&e))?;
    Ok(json!(true))
}

async fn grow(app: &App, params: Option<Value>) -> RpcResult {
    let request: Which = decode(params, decode_failed)?;
    let lvols = Lvols::of(app);
    let store = find_store(&lvols, request.uuid.as_deref(), request.lvs_name.as_deref())?;
    let grown = lvols.on_owner(&store, |_, owned| async move { owned.store.grow().await }).await;
    grown.map_err(|e| failed(&e))?;
    Ok(json!(true))
}
