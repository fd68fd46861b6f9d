//! RPC methods of raids, and their saved configuration.

use std::rc::Rc;
use std::sync::Arc;

use blobstore_format::raid::RaidSuperblock;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use uuid::Uuid;

use super::array::{Array, State};
use super::control::{Options, Raid, Raids, Why};
use super::{examine, io};
use crate::app::App;
use crate::bdev::registry::Entry;
use crate::rpc::params::{decode, decode_failed};
use crate::rpc::{Methods, RpcError, RpcResult, When};

/// Adds this module's methods.
pub fn register(m: &mut Methods) {
    m.add("bdev_raid_create", When::Runtime, |app, p| async move { create(&app, p).await });
    m.add("bdev_raid_delete", When::Runtime, |app, p| async move { delete(&app, p).await });
    m.add("bdev_raid_get_bdevs", When::Runtime, |app, p| async move { get(&app, p) });
    m.add("bdev_raid_add_base_bdev", When::Runtime, |app, p| async move { add_base(&app, p).await });
    m.add("bdev_raid_remove_base_bdev", When::Runtime, |app, p| async move { remove_base(&app, p).await });
    m.add("bdev_raid_set_options", When::Always, |app, p| async move { set_options(&app, p) });
    m.add_config("bdev", save);
    m.add_examiner("raid", examine::examine);
}

/// From now on looks at devices that a raid awaits by name, though devices of their kind may not be examined.
fn watch(app: &App) {
    if app.module(Raids::default).watching.replace(true) {
        return;
    }
    let app_in_watch = app.clone();
    app.registry().watch(move |entry: &Arc<Entry>| {
        if examine::is_awaited(&app_in_watch, entry) {
            app_in_watch.core().spawn(examine::examine(app_in_watch.clone(), Arc::clone(entry)));
        }
    });
}

fn text(errno: i32) -> &'static str {
    nix::errno::Errno::from_raw(errno).desc()
}

/// SPDK's answer to parameters it cannot decode in this family.
fn parse_error() -> RpcError {
    RpcError::new(RpcError::PARSE, "spdk_json_decode_object failed")
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SetOptions {
    process_window_size_kb: Option<u32>,
    process_max_bandwidth_mb_sec: Option<u32>,
}

fn set_options(app: &App, params: Option<Value>) -> RpcResult {
    let request: SetOptions = decode(params, parse_error)?;
    let raids = app.module(Raids::default);
    let now = raids.options.get();
    let options = Options {
        process_window_size_kb: request.process_window_size_kb.unwrap_or(now.process_window_size_kb),
        process_max_bandwidth_mb_sec: request.process_max_bandwidth_mb_sec.unwrap_or(now.process_max_bandwidth_mb_sec),
    };
    if options.process_window_size_kb == 0 {
        return Err(RpcError::errno(libc::EINVAL));
    }
    raids.options.set(options);
    Ok(json!(true))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Create {
    name: String,
    #[serde(default)]
    strip_size_kb: u32,
    raid_level: Level,
    base_bdevs: Vec<String>,
    uuid: Option<Uuid>,
    #[serde(default)]
    superblock: bool,
}

#[derive(Deserialize, Clone, Copy, PartialEq, Eq)]
enum Level {
    #[serde(rename = "raid0", alias = "0")]
    Raid0,
    #[serde(rename = "raid1", alias = "1")]
    Raid1,
    #[serde(rename = "raid5f", alias = "5f")]
    Raid5f,
    #[serde(rename = "concat")]
    Concat,
}

async fn create(app: &App, params: Option<Value>) -> RpcResult {
    let request: Create = decode(params, parse_error)?;
    if request.base_bdevs.len() > super::array::MEMBERS_MAX {
        return Err(parse_error());
    }
    if request.base_bdevs.iter().any(String::is_empty) {
        let text = format!("The base bdev name cannot be empty: {}", text(libc::EINVAL));
        return Err(RpcError::new(-i64::from(libc::EINVAL), text));
    }
    let fail = |errno: i32| {
        RpcError::new(-i64::from(errno), format!("Failed to create RAID bdev {}: {}", request.name, text(errno)))
    };
    let raid = enter(app, &request).map_err(fail)?;
    let members = request.base_bdevs.clone();
    let made = raid.job(async move |raid| {
        let made = claim_all(&raid, &members).await;
        if made.is_err() {
            raid.go_away(true).await;
        }
        made
    });
    made.await.map_err(fail)?;
    Ok(json!(true))
}

fn enter(app: &App, request: &Create) -> Result<Rc<Raid>, i32> {
    let taken = app.registry().find(&request.name).is_some();
    if taken || find(app, &request.name).is_some() {
        return Err(libc::EEXIST);
    }
    if request.raid_level != Level::Raid1 || request.strip_size_kb != 0 {
        tracing::warn!(raid = request.name, "refused: only raid1, which has no strips, is there");
        return Err(libc::EINVAL);
    }
    let array = Array::create(&request.name, request.uuid, &request.base_bdevs, request.superblock)?;
    watch(app);
    Raid::enter(app, array)
}

/// Claims the members that are there; devices that belong to another raid are refused.
async fn claim_all(raid: &Rc<Raid>, members: &[String]) -> Result<(), i32> {
    let mut claimed = Vec::new();
    for (slot, name) in members.iter().enumerate() {
        match raid.claim(slot, name) {
            Ok(entry) => claimed.push((slot, entry)),
            Err(libc::ENODEV) => {}
            Err(errno) => return Err(errno),
        }
    }
    for (slot, entry) in claimed {
        if io::load(raid.app.core(), &entry).await?.is_some() {
            tracing::error!(raid = raid.name(), bdev = entry.bdev.info().name, "the device belongs to another raid");
            return Err(libc::EEXIST);
        }
        raid.came(slot).await?;
    }
    Ok(())
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Delete {
    name: String,
    #[serde(default)]
    clear_sb: bool,
}

fn find(app: &App, name: &str) -> Option<Rc<Raid>> {
    app.module(Raids::default).by_name(name)
}

async fn delete(app: &App, params: Option<Value>) -> RpcResult {
    let request: Delete = decode(params, parse_error)?;
    let missing = || RpcError::new(-i64::from(libc::ENODEV), format!("raid bdev {} not found", request.name));
    let raid = find(app, &request.name).ok_or_else(missing)?;
    if raid.deleting.replace(true) {
        return Err(RpcError::internal(text(libc::EALREADY)));
    }
    let clear = request.clear_sb;
    let gone = raid.job(async move |raid| {
        raid.go_away(clear).await;
        Ok(())
    });
    gone.await.map_err(|errno| RpcError::internal(text(errno)))?;
    Ok(json!(true))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct AddBase {
    base_bdev: String,
    raid_bdev: String,
}

async fn add_base(app: &App, params: Option<Value>) -> RpcResult {
    let request: AddBase = decode(params, decode_failed)?;
    let missing = format!("raid bdev {} is not found in config", request.raid_bdev);
    let raid = find(app, &request.raid_bdev).ok_or_else(|| RpcError::new(-i64::from(libc::ENODEV), missing))?;
    let refused = |errno: i32| {
        let (base, name) = (&request.base_bdev, &request.raid_bdev);
        let text = format!("Failed to add base bdev {base} to RAID bdev {name}: {}", text(errno));
        RpcError::new(-i64::from(errno), text)
    };
    let failed =
        |errno: i32| RpcError::new(-i64::from(errno), format!("Failed to add base bdev to RAID bdev: {}", text(errno)));
    let name = request.base_bdev.clone();
    let taken = raid.job(async move |raid| Ok(take_new(&raid, &name).await)).await.map_err(failed)?;
    match taken.map_err(|refusal| if refusal.at_once { refused(refusal.errno) } else { failed(refusal.errno) })? {
        None => {}
        Some((superblock, entry)) => examine::found(app.clone(), superblock, entry).await.map_err(failed)?,
    }
    Ok(json!(true))
}

/// Why a device was not added; SPDK's text tells whether it was found out at once.
struct Refusal {
    errno: i32,
    at_once: bool,
}

/// Claims a device that a call adds and takes it up; part of a job. A superblock of this very raid comes back: the
/// device is to join by it.
async fn take_new(raid: &Rc<Raid>, name: &str) -> Result<Option<(RaidSuperblock, Arc<Entry>)>, Refusal> {
    let at_once = |errno| Refusal { errno, at_once: true };
    let later = |errno| Refusal { errno, at_once: false };
    if raid.process.borrow().is_some() {
        return Err(at_once(libc::EPERM));
    }
    let uuid = raid.app.registry().find(name).map(|entry| entry.bdev.info().uuid);
    let slot = raid.array.borrow().slot_for_new(uuid).map_err(at_once)?;
    raid.array.borrow_mut().slots[slot].name = Some(name.to_owned());
    let entry = raid.claim(slot, name).map_err(|errno| {
        let awaited = errno == libc::ENODEV && raid.array.borrow().state == State::Configuring;
        if !awaited {
            raid.array.borrow_mut().slots[slot].name = None;
        }
        at_once(errno)
    })?;
    match io::load(raid.app.core(), &entry).await {
        Ok(None) => raid.came(slot).await.map(|()| None).map_err(later),
        Ok(Some(superblock)) => {
            raid.unclaim(slot);
            if superblock.uuid == raid.array.borrow().uuid {
                return Ok(Some((superblock, entry)));
            }
            tracing::error!(raid = raid.name(), bdev = name, "the device belongs to another raid");
            Err(later(libc::EEXIST))
        }
        Err(errno) => {
            raid.unclaim(slot);
            Err(later(errno))
        }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RemoveBase {
    name: String,
}

async fn remove_base(app: &App, params: Option<Value>) -> RpcResult {
    let request: RemoveBase = decode(params, parse_error)?;
    let refused = |errno: i32| RpcError::new(-i64::from(errno), "Failed to remove base bdev from raid bdev");
    let entry = app.registry().find(&request.name).ok_or_else(|| refused(libc::ENODEV))?;
    let (raid, member) = app.module(Raids::default).of_member(&entry).ok_or_else(|| refused(libc::ENODEV))?;
    let removed = raid.job(async move |raid| raid.remove(member, Why::Asked).await);
    removed.await.map_err(refused)?;
    Ok(json!(true))
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum Category {
    Online,
    Configuring,
    Offline,
    All,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Get {
    category: Category,
}

fn get(app: &App, params: Option<Value>) -> RpcResult {
    let request: Get = decode(params, parse_error)?;
    let wanted = |state: State| match request.category {
        Category::All => true,
        Category::Online => state == State::Online,
        Category::Configuring => state == State::Configuring,
        Category::Offline => state == State::Offline,
    };
    let raids = app.module(Raids::default);
    let all = raids.list.borrow();
    let list = all.iter().filter(|raid| wanted(raid.array.borrow().state)).map(|raid| {
        let mut object = Map::new();
        object.insert("name".into(), json!(raid.name()));
        object.append(&mut describe(raid));
        Value::Object(object)
    });
    Ok(list.collect())
}

/// The members that `bdev_raid_get_bdevs` and `bdev_get_bdevs` show, in SPDK's order.
fn describe(raid: &Raid) -> Map<String, Value> {
    let array = raid.array.borrow();
    let mut object = Map::new();
    let mut put = |key: &str, value: Value| object.insert(key.into(), value);
    put("uuid", json!(array.uuid.to_string()));
    put("strip_size_kb", json!(0));
    put("state", json!(array.state.word()));
    put("raid_level", json!("raid1"));
    put("superblock", json!(array.with_superblock));
    put("num_base_bdevs", json!(array.slots.len()));
    put("num_base_bdevs_discovered", json!(array.discovered()));
    put("num_base_bdevs_operational", json!(array.operational));
    if let Some(process) = raid.process.borrow().as_ref() {
        let blocks = process.offset.get();
        let percent = blocks as f64 * 100.0 / array.num_blocks.max(1) as f64;
        let progress = json!({ "blocks": blocks, "percent": percent as u32 });
        put("process", json!({ "type": "rebuild", "target": array.slots[process.slot].name, "progress": progress }));
    }
    let members = array.slots.iter().map(|slot| {
        json!({ "name": slot.name, "uuid": slot.uuid.to_string(), "is_configured": slot.configured,
            "data_offset": slot.data_offset, "data_size": slot.data_size })
    });
    put("base_bdevs_list", members.collect());
    object
}

/// `driver_specific` of a raid, for `bdev_get_bdevs`.
pub fn driver_specific(app: &App, name: &str) -> Option<Value> {
    let raid = find(app, name)?;
    Some(json!({ "raid": describe(&raid) }))
}

/// Raids with superblocks are found by them; the others are made anew.
fn save(app: &App) -> Vec<(String, Value)> {
    let raids = app.module(Raids::default);
    let options = serde_json::to_value(raids.options.get()).unwrap_or(Value::Null);
    let mut entries = vec![("bdev_raid_set_options".to_owned(), options)];
    for raid in raids.list.borrow().iter() {
        let array = raid.array.borrow();
        if array.with_superblock {
            continue;
        }
        let name = |(index, slot): (usize, &super::array::Slot)| {
            slot.name.clone().unwrap_or_else(|| format!("removed_base_bdev_{index}"))
        };
        let members: Vec<String> = array.slots.iter().enumerate().map(name).collect();
        let mut params = json!({ "name": array.name });
        if !array.uuid.is_nil() {
            params["uuid"] = json!(array.uuid.to_string());
        }
        params["raid_level"] = json!("raid1");
        params["base_bdevs"] = json!(members);
        entries.push(("bdev_raid_create".to_owned(), params));
    }
    entries
}
