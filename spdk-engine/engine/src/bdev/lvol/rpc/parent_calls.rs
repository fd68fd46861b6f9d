//! Methods that change what a volume rests on: read-only, inflate, decouple, another parent.

use std::rc::Rc;

use lvol_core::CopyProgress;
use serde::Deserialize;
use serde_json::{Value, json};

use super::volume_calls::{Name, applied, describe};
use super::{failed, find_volume, late};
use crate::app::App;
use crate::bdev::lvol::stores::Lvols;
use crate::rpc::params::{decode, decode_failed};
use crate::rpc::{Methods, RpcResult, When};

/// Adds the methods.
pub fn register(m: &mut Methods) {
    m.add("bdev_lvol_set_read_only", When::Runtime, |app, p| async move { change(&app, p, Change::ReadOnly).await });
    m.add("bdev_lvol_inflate", When::Runtime, |app, p| async move { change(&app, p, Change::Inflate).await });
    m.add("bdev_lvol_decouple_parent", When::Runtime, |app, p| async move { change(&app, p, Change::Decouple).await });
    m.add("bdev_lvol_set_parent", When::Runtime, |app, p| async move { set_parent(&app, p).await });
    m.add("bdev_lvol_set_parent_bdev", When::Runtime, |app, p| async move { set_parent_bdev(&app, p).await });
}

/// What a call without further parameters does.
enum Change {
    ReadOnly,
    Inflate,
    Decouple,
}

async fn change(app: &App, params: Option<Value>, change: Change) -> RpcResult {
    let request: Name = decode(params, decode_failed)?;
    let lvols = Lvols::of(app);
    let (store, volume) = find_volume(&lvols, &request.name)?;
    let blob = volume.blob();
    let done = lvols.on_owner(&store, move |_, owned| async move {
        let lvol = owned.lvol(blob)?;
        let before = lvol.info();
        let progress = |p: CopyProgress| {
            tracing::debug!(
                lvol = before.name,
                copied = p.copied_clusters,
                total = p.total_clusters,
                "copying clusters"
            );
        };
        match change {
            Change::ReadOnly => lvol.set_read_only().await?,
            Change::Inflate => lvol.inflate(&progress).await?,
            Change::Decouple => lvol.decouple_parent(&progress).await?,
        }
        Ok(describe(&owned, &[Some(blob), before.parent, lvol.info().parent]))
    });
    applied(&lvols, &store, done.await.map_err(|e| failed(&e))?);
    lvols.release_unused(&store);
    Ok(json!(true))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SetParent {
    lvol_name: String,
    parent_name: String,
}

async fn set_parent(app: &App, params: Option<Value>) -> RpcResult {
    let request: SetParent = decode(params, decode_failed)?;
    let lvols = Lvols::of(app);
    let (store, volume) = find_volume(&lvols, &request.lvol_name)?;
    let (parent_store, parent) = find_volume(&lvols, &request.parent_name)?;
    if !Rc::ptr_eq(&store, &parent_store) {
        return Err(late(libc::EINVAL));
    }
    let (blob, parent) = (volume.blob(), parent.blob());
    let done = lvols.on_owner(&store, move |_, owned| async move {
        let lvol = owned.lvol(blob)?;
        let former = lvol.info().parent;
        lvol.set_parent(&owned.lvol(parent)?).await?;
        Ok(describe(&owned, &[Some(blob), Some(parent), former]))
    });
    applied(&lvols, &store, done.await.map_err(|e| failed(&e))?);
    lvols.release_unused(&store);
    Ok(json!(true))
}

async fn set_parent_bdev(app: &App, params: Option<Value>) -> RpcResult {
    let request: SetParent = decode(params, decode_failed)?;
    let lvols = Lvols::of(app);
    let (store, volume) = find_volume(&lvols, &request.lvol_name)?;
    let entry = app.registry().find(&request.parent_name).ok_or_else(|| late(libc::ENODEV))?;
    if volume.report().info.uuid == Some(entry.bdev.info().uuid) {
        return Err(late(libc::EINVAL));
    }
    let held = lvols.hold(&store, &entry).map_err(|e| late(e.errno()))?;
    let id = held.id.clone();
    let blob = volume.blob();
    let done = lvols.on_owner(&store, move |core, owned| async move {
        let lvol = owned.lvol(blob)?;
        let former = lvol.info().parent;
        let device = owned.open_device(&core, &entry)?;
        lvol.set_external_parent(&id, device).await?;
        Ok(describe(&owned, &[Some(blob), former]))
    });
    applied(&lvols, &store, done.await.map_err(|e| failed(&e))?);
    Ok(json!(true))
}
