//! Methods that tell of stores and volumes.

use std::rc::Rc;

use lvol_core::StoreInfo;
use serde::Deserialize;
use serde_json::{Value, json};

use super::find_store;
use crate::app::App;
use crate::bdev::lvol::stores::{LvolStore, Lvols};
use crate::rpc::params::{decode, decode_failed};
use crate::rpc::{Methods, RpcError, RpcResult, When};

/// Adds the methods.
pub fn register(m: &mut Methods) {
    m.add("bdev_lvol_get_lvstores", When::Runtime, |app, p| async move { get_stores(&app, p).await });
    m.add("bdev_lvol_get_lvols", When::Runtime, |app, p| async move { get_volumes(&app, p).await });
    m.add("addax_lvol_get_space", When::Runtime, |app, p| async move { get_space(&app, p).await });
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WhichStore {
    uuid: Option<String>,
    lvs_name: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WhoseVolumes {
    lvs_uuid: Option<String>,
    lvs_name: Option<String>,
}

/// All stores, or the one that is named; an empty object names none and is refused.
fn wanted(lvols: &Lvols, which: Option<(Option<String>, Option<String>)>) -> Result<Vec<Rc<LvolStore>>, RpcError> {
    match which {
        None => Ok(lvols.stores()),
        Some((uuid, name)) => Ok(vec![find_store(lvols, uuid.as_deref(), name.as_deref())?]),
    }
}

async fn get_stores(app: &App, params: Option<Value>) -> RpcResult {
    let which = match params {
        None => None,
        some => {
            let request: WhichStore = decode(some, decode_failed)?;
            Some((request.uuid, request.lvs_name))
        }
    };
    let lvols = Lvols::of(app);
    let mut list = Vec::new();
    for store in wanted(&lvols, which)? {
        if let Ok(info) = lvols.info(&store).await {
            list.push(store_object(&store, &info));
        }
    }
    Ok(Value::Array(list))
}

fn store_object(store: &LvolStore, info: &StoreInfo) -> Value {
    json!({ "uuid": store.shared.uuid.to_string(), "name": store.name(), "base_bdev": store.base_name(),
        "total_data_clusters": info.total_data_clusters, "free_clusters": info.free_clusters,
        "block_size": info.io_unit_size, "cluster_size": info.cluster_size,
        "max_growable_size": info.max_growable_size })
}

async fn get_volumes(app: &App, params: Option<Value>) -> RpcResult {
    let which = match params {
        None => None,
        some => {
            let request: WhoseVolumes = decode(some, decode_failed)?;
            Some((request.lvs_uuid, request.lvs_name))
        }
    };
    let lvols = Lvols::of(app);
    let mut list = Vec::new();
    for store in wanted(&lvols, which)? {
        if lvols.refresh(&store, None).await.is_err() {
            continue;
        }
        let (name, uuid) = (store.name(), store.shared.uuid.to_string());
        list.extend(store.volumes().iter().map(|volume| {
            let info = volume.report().info;
            json!({ "alias": format!("{name}/{}", info.name), "uuid": info.uuid.unwrap_or_default().to_string(),
                "name": info.name, "is_thin_provisioned": info.thin, "is_snapshot": info.is_snapshot,
                "is_clone": info.is_clone, "is_esnap_clone": info.is_esnap_clone, "is_degraded": info.is_degraded,
                "num_allocated_clusters": info.allocated_clusters, "lvs": { "name": name, "uuid": uuid } })
        }));
    }
    Ok(Value::Array(list))
}

/// The volume of a device's name, the volumes of a store by UUID or name, or, with nothing given, all.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Space {
    name: Option<String>,
    uuid: Option<String>,
    lvs_name: Option<String>,
}

/// Bytes that volumes take: `allocated` of their own, `shared` with a snapshot of their chain, `exclusive` what a
/// deletion would give back.
async fn get_space(app: &App, params: Option<Value>) -> RpcResult {
    let request: Space = decode(params, decode_failed)?;
    let lvols = Lvols::of(app);
    let (stores, only) = match (&request.name, &request.uuid, &request.lvs_name) {
        (Some(name), None, None) => {
            let (store, volume) = super::find_volume(&lvols, name)?;
            (vec![store], Some(volume.blob()))
        }
        (None, None, None) => (lvols.stores(), None),
        (None, uuid, name) => (vec![find_store(&lvols, uuid.as_deref(), name.as_deref())?], None),
        _ => return Err(RpcError::errno(libc::EINVAL)),
    };
    let mut list = Vec::new();
    for store in stores {
        let spaces = lvols.on_owner(&store, move |_, owned| async move {
            let all = owned.store.lvols();
            let wanted = all.iter().filter(|lvol| only.is_none_or(|blob| lvol.id() == blob));
            Ok(wanted.map(|lvol| (lvol.info(), lvol.space())).collect::<Vec<_>>())
        });
        let cluster = store.shared.cluster_blocks * u64::from(store.shared.block_size);
        let name = store.name();
        list.extend(spaces.await.unwrap_or_default().into_iter().map(|(info, space)| {
            json!({ "alias": format!("{name}/{}", info.name), "uuid": info.uuid.unwrap_or_default().to_string(),
                "size": info.num_clusters * cluster, "allocated": space.allocated * cluster,
                "shared": space.shared * cluster, "exclusive": space.exclusive * cluster })
        }));
    }
    Ok(Value::Array(list))
}
