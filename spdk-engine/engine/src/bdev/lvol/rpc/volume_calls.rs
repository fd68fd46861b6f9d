//! Methods that make and delete volumes, and change their names and sizes.

use std::rc::Rc;

use lvol_core::{BlobId, Error};
use serde::Deserialize;
use serde_json::{Value, json};
use uuid::Uuid;

use super::{Rename, VolumeClear, check_name, failed, find_store, find_volume, late};
use crate::app::App;
use crate::bdev::lvol::owner::{NewVolume, Owned};
use crate::bdev::lvol::shared::unique_id;
use crate::bdev::lvol::stores::{LvolStore, Lvols, Volume};
use crate::rpc::params::{decode, decode_failed};
use crate::rpc::{Methods, RpcError, RpcResult, When};

const MIB: u64 = 1 << 20;

/// Adds the methods.
pub fn register(m: &mut Methods) {
    m.add("bdev_lvol_create", When::Runtime, |app, p| async move { create(&app, p).await });
    m.add("bdev_lvol_snapshot", When::Runtime, |app, p| async move { snapshot(&app, p).await });
    m.add("bdev_lvol_clone", When::Runtime, |app, p| async move { clone(&app, p).await });
    m.add("bdev_lvol_clone_bdev", When::Runtime, |app, p| async move { clone_bdev(&app, p).await });
    m.add("bdev_lvol_rename", When::Runtime, |app, p| async move { rename(&app, p).await });
    m.add("bdev_lvol_resize", When::Runtime, |app, p| async move { resize(&app, p).await });
    m.add("bdev_lvol_delete", When::Runtime, |app, p| async move { delete(&app, p).await });
}

/// Bytes of a size in MiB.
fn bytes_of(mib: u64) -> Result<u64, i32> {
    mib.checked_mul(MIB).ok_or(libc::ENOSPC)
}

/// Takes up the volumes that an operation has made or changed; the first one's device name is the answer.
pub(super) fn applied(lvols: &Lvols, store: &Rc<LvolStore>, volumes: Vec<NewVolume>) -> Value {
    let mut names = Vec::new();
    for new in volumes {
        names.push(unique_id(&store.shared, &new.report.info));
        lvols.apply(store, new);
    }
    json!(names.first())
}

/// Describes the volumes that are (still) there.
pub(super) fn describe(owned: &Owned, blobs: &[Option<BlobId>]) -> Vec<NewVolume> {
    let lvols = blobs.iter().flatten().filter_map(|blob| owned.store.lvol(*blob));
    lvols.map(|lvol| owned.describe(&lvol)).collect()
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Create {
    lvol_name: String,
    #[serde(deserialize_with = "crate::rpc::params::whole")]
    size_in_mib: u64,
    #[serde(default)]
    thin_provision: bool,
    uuid: Option<String>,
    lvs_name: Option<String>,
    #[serde(default)]
    clear_method: VolumeClear,
}

async fn create(app: &App, params: Option<Value>) -> RpcResult {
    let request: Create = decode(params, decode_failed)?;
    let lvols = Lvols::of(app);
    let store = find_store(&lvols, request.uuid.as_deref(), request.lvs_name.as_deref())?;
    check_name(&request.lvol_name).map_err(RpcError::errno)?;
    let options = lvol_core::CreateOptions {
        name: request.lvol_name,
        uuid: Uuid::new_v4(),
        size_bytes: bytes_of(request.size_in_mib).map_err(late)?,
        thin: request.thin_provision,
        clear_method: request.clear_method.into(),
    };
    let made = lvols.on_owner(&store, |_, owned| async move {
        let lvol = owned.store.create(options).await?;
        Ok(vec![owned.describe(&lvol)])
    });
    match made.await {
        Ok(volumes) => Ok(applied(&lvols, &store, volumes)),
        Err(Error::Exists(_)) => Err(RpcError::errno(libc::EEXIST)),
        Err(error) => Err(failed(&error)),
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Snapshot {
    lvol_name: String,
    snapshot_name: String,
}

async fn snapshot(app: &App, params: Option<Value>) -> RpcResult {
    let request: Snapshot = decode(params, decode_failed)?;
    let lvols = Lvols::of(app);
    let (store, volume) = find_volume(&lvols, &request.lvol_name)?;
    check_name(&request.snapshot_name).map_err(late)?;
    let blob = volume.blob();
    let made = lvols.on_owner(&store, move |_, owned| async move {
        let lvol = owned.lvol(blob)?;
        let snapshot = lvol.snapshot(&request.snapshot_name, Uuid::new_v4()).await?;
        Ok(describe(&owned, &[Some(snapshot.id()), Some(blob)]))
    });
    Ok(applied(&lvols, &store, made.await.map_err(|e| failed(&e))?))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Clone {
    snapshot_name: String,
    clone_name: String,
}

async fn clone(app: &App, params: Option<Value>) -> RpcResult {
    let request: Clone = decode(params, decode_failed)?;
    let lvols = Lvols::of(app);
    let (store, volume) = find_volume(&lvols, &request.snapshot_name)?;
    check_name(&request.clone_name).map_err(late)?;
    let blob = volume.blob();
    let made = lvols.on_owner(&store, move |_, owned| async move {
        let clone = owned.lvol(blob)?.clone_to(&request.clone_name, Uuid::new_v4()).await?;
        Ok(describe(&owned, &[Some(clone.id()), Some(blob)]))
    });
    Ok(applied(&lvols, &store, made.await.map_err(|e| failed(&e))?))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct CloneBdev {
    bdev: String,
    lvs_name: String,
    clone_name: String,
}

async fn clone_bdev(app: &App, params: Option<Value>) -> RpcResult {
    let request: CloneBdev = decode(params, decode_failed)?;
    let lvols = Lvols::of(app);
    let store = lvols.store_named(&request.lvs_name).filter(|s| !s.is_closing());
    let store = store.ok_or_else(|| RpcError::invalid_params("lvs does not exist"))?;
    let entry = app.registry().find(&request.bdev);
    let entry = entry.ok_or_else(|| RpcError::invalid_params("bdev does not exist"))?;
    if lvols.volume_named(&request.bdev).is_some_and(|(of, _)| Rc::ptr_eq(&of, &store)) {
        let text = "bdev is an lvol in same lvs as clone; use bdev_lvol_clone instead";
        return Err(RpcError::invalid_params(text));
    }
    check_name(&request.clone_name).map_err(late)?;
    let info = entry.bdev.info();
    let size_bytes = info.num_blocks * u64::from(info.block_size);
    let held = lvols.hold(&store, &entry).map_err(|e| late(e.errno()))?;
    let id = held.id.clone();
    let made = lvols.on_owner(&store, move |core, owned| async move {
        let device = owned.open_device(&core, &entry)?;
        let name = &request.clone_name;
        let clone = owned.store.clone_external(&id, size_bytes, Some(device), name, Uuid::new_v4()).await?;
        Ok(describe(&owned, &[Some(clone.id())]))
    });
    made.await.map_err(|e| failed(&e)).map(|made| applied(&lvols, &store, made))
}

async fn rename(app: &App, params: Option<Value>) -> RpcResult {
    let request: Rename = decode(params, decode_failed)?;
    let lvols = Lvols::of(app);
    let (store, volume) = find_volume(&lvols, &request.old_name)?;
    check_name(&request.new_name).map_err(late)?;
    let alias = |lvol: &str| format!("{}/{lvol}", store.name());
    let (from, to) = (alias(&volume.report().info.name), alias(&request.new_name));
    if app.registry().find(&to).is_some() {
        return Err(late(libc::EEXIST));
    }
    let blob = volume.blob();
    let renamed = lvols.on_owner(&store, move |_, owned| async move {
        owned.lvol(blob)?.rename(&request.new_name).await?;
        Ok(describe(&owned, &[Some(blob)]))
    });
    let volumes = renamed.await.map_err(|e| failed(&e))?;
    app.registry().rename_alias(&from, &to)?;
    applied(&lvols, &store, volumes);
    Ok(json!(true))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Resize {
    name: String,
    #[serde(deserialize_with = "crate::rpc::params::whole")]
    size_in_mib: u64,
}

async fn resize(app: &App, params: Option<Value>) -> RpcResult {
    let request: Resize = decode(params, decode_failed)?;
    let lvols = Lvols::of(app);
    let (store, volume) = find_volume(&lvols, &request.name)?;
    let size_bytes = bytes_of(request.size_in_mib).map_err(late)?;
    let bdev = volume.bdev().ok_or_else(|| RpcError::errno(libc::ENODEV))?;
    let clusters = size_bytes.div_ceil(store.shared.cluster_blocks * u64::from(store.shared.block_size));
    let shrinks = clusters < volume.report().info.num_clusters;
    if shrinks && app.registry().is_open(&bdev.name) {
        // SPDK answers the same, but has cut the volume down by then.
        return Err(late(libc::EBUSY));
    }
    let blob = volume.blob();
    let resized = lvols.on_owner(&store, move |_, owned| async move {
        owned.lvol(blob)?.resize(size_bytes).await?;
        Ok(describe(&owned, &[Some(blob)]))
    });
    applied(&lvols, &store, resized.await.map_err(|e| failed(&e))?);
    Ok(json!(true))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Name {
    pub(super) name: String,
}

/// A volume by its device's name, or, when it is degraded, by its UUID or its alias.
fn find_any(lvols: &Lvols, name: &str) -> Option<(Rc<LvolStore>, Rc<Volume>)> {
    if let Some(found) = lvols.volume_named(name) {
        return Some(found);
    }
    let uuid = name.parse::<Uuid>().ok();
    let (of_store, of_lvol) = name.split_once('/').unwrap_or_default();
    lvols.stores().into_iter().find_map(|store| {
        let in_store = *of_store == *store.name();
        let wanted = |v: &Rc<Volume>| {
            let info = v.report().info;
            (uuid.is_some() && info.uuid == uuid) || (in_store && info.name == of_lvol)
        };
        store.volumes().into_iter().find(wanted).map(|volume| (store, volume))
    })
}

async fn delete(app: &App, params: Option<Value>) -> RpcResult {
    let request: Name = decode(params, decode_failed)?;
    let lvols = Lvols::of(app);
    let (store, volume) = find_any(&lvols, &request.name).ok_or_else(|| RpcError::errno(libc::ENODEV))?;
    let refused = |errno: i32| RpcError::internal(nix::errno::Errno::from_raw(errno).desc());
    if store.is_closing() {
        return Err(refused(libc::ENODEV));
    }
    let blob = volume.blob();
    let clones = lvols.on_owner(&store, move |_, owned| async move { Ok(owned.lvol(blob)?.info().clones.len()) });
    if clones.await.map_err(|e| refused(e.errno()))? > 1 {
        return Err(refused(libc::EPERM));
    }
    lvols.unregister(&volume).await;
    let deleted = lvols.on_owner(&store, move |_, owned| async move {
        let lvol = owned.lvol(blob)?;
        let info = lvol.info();
        lvol.delete().await?;
        let mut near: Vec<Option<BlobId>> = info.clones.iter().map(|id| Some(*id)).collect();
        near.push(info.parent);
        Ok(describe(&owned, &near))
    });
    match deleted.await {
        Ok(near) => {
            lvols.forget(&store, blob);
            applied(&lvols, &store, near);
            lvols.release_unused(&store);
            Ok(json!(true))
        }
        Err(error) => {
            tracing::warn!(%error, "a volume could not be deleted; it gets its device back");
            lvols.register(&store, &volume);
            Err(refused(error.errno()))
        }
    }
}
