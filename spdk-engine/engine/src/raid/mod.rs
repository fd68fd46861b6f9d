//! `raid1` as SPDK's: its RPC methods, members that come later, members that fail.
//!
//! *States.* `configuring` until every member is there, then `online`; `offline` does not last (the device goes).
//!
//! *Invariants.* A member is claimed while it belongs to a raid. The last member never leaves by a failure.
//!
//! *When things fail.* A refused create leaves nothing behind. Superblocks and rebuilds are not part of this device yet:
//! asking for them is refused.

mod device;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;

use serde::Deserialize;
use serde_json::{Value, json};
use uuid::Uuid;

use crate::app::App;
use crate::bdev::BdevInfo;
use crate::bdev::registry::{Access, BdevEvent, Desc, Entry};
use crate::reactor::Core;
use crate::rpc::params::decode;
use crate::rpc::{Methods, RpcError, RpcResult, When};
use device::{MEMBERS_MAX, Raid1};

/// Longest name of a raid, in bytes.
const NAME_BYTES_MAX: usize = 63;

/// Adds this module's methods.
pub fn register(m: &mut Methods) {
    m.add("bdev_raid_create", When::Runtime, |app, p| async move { create(&app, p) });
    m.add("bdev_raid_delete", When::Runtime, |app, p| async move { delete(&app, p).await });
    m.add("bdev_raid_get_bdevs", When::Runtime, |app, p| async move { get(&app, p) });
    m.add("bdev_raid_remove_base_bdev", When::Runtime, |app, p| async move { remove_base(&app, p) });
    m.add("bdev_raid_set_options", When::Always, |app, p| async move { set_options(&app, p) });
    m.add_config("bdev", save);
}

#[derive(Debug)]
struct Slot {
    /// As given in the create call; what an absent member is known by.
    wanted: String,
    name: Option<String>,
    uuid: Uuid,
    desc: Option<Desc>,
}

struct Raid {
    name: String,
    uuid: Uuid,
    slots: RefCell<Vec<Slot>>,
    bdev: RefCell<Option<Arc<Raid1>>>,
    block_size: Cell<u32>,
    num_blocks: Cell<u64>,
}

#[derive(Default)]
struct Raids {
    by_name: RefCell<BTreeMap<String, Rc<Raid>>>,
    watching: Cell<bool>,
    options: RefCell<RaidOptions>,
}

/// Accepted and saved; they steer rebuilds.
#[derive(Debug, Clone, Deserialize, serde::Serialize)]
#[serde(deny_unknown_fields, default)]
struct RaidOptions {
    process_window_size_kb: u32,
    process_max_bandwidth_mb_sec: u32,
}

impl Default for RaidOptions {
    fn default() -> Self {
        Self { process_window_size_kb: 1024, process_max_bandwidth_mb_sec: 0 }
    }
}

fn set_options(app: &App, params: Option<Value>) -> RpcResult {
    let options: RaidOptions = decode(params, parse_error)?;
    if options.process_window_size_kb == 0 {
        return Err(RpcError::errno(libc::EINVAL));
    }
    *app.module(Raids::default).options.borrow_mut() = options;
    Ok(json!(true))
}

/// SPDK's answer to parameters it cannot decode in this family.
fn parse_error() -> RpcError {
    RpcError::new(RpcError::PARSE, "spdk_json_decode_object failed")
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Create {
    name: String,
    strip_size_kb: Option<u32>,
    raid_level: String,
    base_bdevs: Vec<String>,
    uuid: Option<Uuid>,
    #[serde(default)]
    superblock: bool,
}

fn create(app: &App, params: Option<Value>) -> RpcResult {
    let request: Create = decode(params, parse_error)?;
    let fail = |errno: i32| {
        let text = nix::errno::Errno::from_raw(errno).desc();
        RpcError::new(-i64::from(errno), format!("Failed to create RAID bdev {}: {text}", request.name))
    };
    if !["raid0", "0", "raid1", "1", "raid5f", "5f", "concat"].contains(&request.raid_level.as_str()) {
        return Err(parse_error());
    }
    let raids = app.module(Raids::default);
    if raids.by_name.borrow().contains_key(&request.name) || app.registry().find(&request.name).is_some() {
        return Err(fail(libc::EEXIST));
    }
    let is_raid1 = matches!(request.raid_level.as_str(), "raid1" | "1");
    let count = request.base_bdevs.len();
    let legal_name = !request.name.is_empty() && request.name.len() <= NAME_BYTES_MAX;
    if !is_raid1 || request.superblock || !legal_name || !(2..=MEMBERS_MAX).contains(&count) {
        tracing::warn!(
            raid = request.name,
            "raid refused: only raid1 without superblock, of 2 to 64 members, is there"
        );
        return Err(fail(libc::EINVAL));
    }
    if request.strip_size_kb.is_some_and(|s| s != 0) {
        return Err(fail(libc::EINVAL));
    }
    let slots = request
        .base_bdevs
        .iter()
        .map(|n| Slot { wanted: n.clone(), name: None, uuid: Uuid::nil(), desc: None })
        .collect();
    let raid = Rc::new(Raid {
        name: request.name.clone(),
        uuid: request.uuid.unwrap_or_else(Uuid::new_v4),
        slots: RefCell::new(slots),
        bdev: RefCell::new(None),
        block_size: Cell::new(0),
        num_blocks: Cell::new(0),
    });
    for (index, wanted) in request.base_bdevs.iter().enumerate() {
        if let Some(entry) = app.registry().find(wanted) {
            raid.take_member(app, index, &entry).map_err(&fail)?;
        }
    }
    raids.by_name.borrow_mut().insert(request.name.clone(), Rc::clone(&raid));
    if let Err(errno) = raid.go_online(app) {
        raids.by_name.borrow_mut().remove(&request.name);
        return Err(fail(errno));
    }
    watch_for_members(app, &raids);
    Ok(json!(true))
}

fn watch_for_members(app: &App, raids: &Rc<Raids>) {
    if raids.watching.replace(true) {
        return;
    }
    let (app_in_watch, raids) = (app.clone(), Rc::clone(raids));
    app.registry().watch(move |entry| {
        let all: Vec<_> = raids.by_name.borrow().values().cloned().collect();
        for raid in all.iter().filter(|r| r.bdev.borrow().is_none()) {
            let info = entry.bdev.info();
            let wants = |s: &Slot| s.desc.is_none() && entry.is_called(&s.wanted);
            let found = raid.slots.borrow().iter().position(wants);
            let Some(index) = found else { continue };
            let taken = raid.take_member(&app_in_watch, index, entry).and_then(|()| raid.go_online(&app_in_watch));
            if let Err(errno) = taken {
                tracing::error!(raid = raid.name, member = info.name, errno, "a member that appeared was refused");
            }
        }
    });
}

impl Raid {
    /// Claims a member that is there.
    fn take_member(self: &Rc<Self>, app: &App, index: usize, entry: &Arc<Entry>) -> Result<(), i32> {
        let info = entry.bdev.info();
        if self.block_size.get() != 0 && self.block_size.get() != info.block_size {
            return Err(libc::EINVAL);
        }
        let (on_app, raid) = (app.clone(), Rc::downgrade(self));
        let opened = app.registry().open(&info.name, Access::Exclusive("raid"), move |event| {
            if let (BdevEvent::Removing, Some(raid)) = (event, raid.upgrade()) {
                raid.member_goes(&on_app, index);
            }
        });
        let desc = opened.map_err(|e| e.errno())?;
        self.block_size.set(info.block_size);
        let blocks =
            if self.num_blocks.get() == 0 { info.num_blocks } else { self.num_blocks.get().min(info.num_blocks) };
        self.num_blocks.set(blocks);
        let mut slots = self.slots.borrow_mut();
        slots[index] =
            Slot { wanted: slots[index].wanted.clone(), name: Some(info.name), uuid: info.uuid, desc: Some(desc) };
        Ok(())
    }

    /// Registers the device once all members are there.
    fn go_online(&self, app: &App) -> Result<(), i32> {
        let members: Vec<Arc<Entry>> =
            self.slots.borrow().iter().filter_map(|s| s.desc.as_ref().map(|d| Arc::clone(d.entry()))).collect();
        if members.len() < self.slots.borrow().len() || self.bdev.borrow().is_some() {
            return Ok(());
        }
        let infos: Vec<BdevInfo> = members.iter().map(|m| m.bdev.info()).collect();
        let io_types = infos.iter().map(|i| i.io_types).reduce(crate::bdev::IoTypes::and).ok_or(libc::EINVAL)?;
        let info = BdevInfo {
            name: self.name.clone(),
            product_name: "Raid Volume",
            uuid: self.uuid,
            block_size: self.block_size.get(),
            num_blocks: self.num_blocks.get(),
            physical_block_size: infos.iter().map(|i| i.physical_block_size).max().unwrap_or(0),
            optimal_io_boundary: 0,
            // A comparison must not be answered by one member for all.
            io_types: crate::bdev::IoTypes { compare: false, copy: false, zcopy: false, ..io_types },
            write_cache: infos.iter().any(|i| i.write_cache),
        };
        let bdev = Arc::new(Raid1::new(info, members));
        *self.bdev.borrow_mut() = Some(Arc::clone(&bdev));
        let registered = app.registry().register(bdev, Vec::new(), "raid");
        registered.map(drop).map_err(|e| e.errno())
    }

    /// A member is removed, by its device or by a call: it leaves, or the raid goes with its last one.
    fn member_goes(self: &Rc<Self>, app: &App, index: usize) {
        let online = self.bdev.borrow().clone();
        let retired = online.as_ref().is_none_or(|bdev| !bdev.is_alive(index) || bdev.retire(index));
        if retired {
            return self.clear_slot(index);
        }
        let (app, raid) = (app.clone(), Rc::clone(self));
        app.core().clone().spawn(async move {
            let _ = app.registry().unregister(app.core(), &raid.name).await;
            app.module(Raids::default).by_name.borrow_mut().remove(&raid.name);
            raid.slots.borrow_mut().clear();
        });
    }

    fn clear_slot(&self, index: usize) {
        let mut slots = self.slots.borrow_mut();
        let online = self.bdev.borrow().is_some();
        if let Some(slot) = slots.get_mut(index) {
            slot.desc = None;
            if online {
                slot.name = None;
                slot.uuid = Uuid::nil();
            }
        }
    }

    fn describe(&self) -> Vec<(&'static str, Value)> {
        let slots = self.slots.borrow();
        let bdev = self.bdev.borrow();
        let configured = |s: &Slot| s.desc.is_some();
        let discovered = slots.iter().filter(|s| configured(s)).count();
        let operational = if bdev.is_some() { discovered } else { slots.len() };
        let bases: Vec<Value> = slots
            .iter()
            .map(|s| {
                let name = s.name.clone().or_else(|| bdev.is_none().then(|| s.wanted.clone()));
                json!({ "name": name, "uuid": s.uuid.to_string(), "is_configured": configured(s), "data_offset": 0,
                    "data_size": self.num_blocks.get() })
            })
            .collect();
        vec![
            ("uuid", json!(self.uuid.to_string())),
            ("strip_size_kb", json!(0)),
            ("state", json!(if bdev.is_some() { "online" } else { "configuring" })),
            ("raid_level", json!("raid1")),
            ("superblock", json!(false)),
            ("num_base_bdevs", json!(slots.len())),
            ("num_base_bdevs_discovered", json!(discovered)),
            ("num_base_bdevs_operational", json!(operational)),
            ("base_bdevs_list", Value::Array(bases)),
        ]
    }
}

/// `driver_specific` of a raid, for `bdev_get_bdevs`.
pub fn driver_specific(app: &App, name: &str) -> Option<Value> {
    let raid = app.module(Raids::default).by_name.borrow().get(name).cloned()?;
    let members: serde_json::Map<String, Value> =
        raid.describe().into_iter().map(|(key, value)| (key.to_owned(), value)).collect();
    Some(json!({ "raid": members }))
}

/// Called on the control core after a core has taken a failed member out.
fn member_failed(core: &Core, name: &str, index: usize) {
    let raid = core.local(Raids::default).by_name.borrow().get(name).cloned();
    if let Some(raid) = raid {
        raid.clear_slot(index);
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Get {
    category: String,
}

fn get(app: &App, params: Option<Value>) -> RpcResult {
    let request: Get = decode(params, parse_error)?;
    if !["online", "configuring", "offline", "all"].contains(&request.category.as_str()) {
        return Err(RpcError::errno(libc::EINVAL));
    }
    let raids = app.module(Raids::default);
    let by_name = raids.by_name.borrow();
    let mut list = Vec::new();
    for raid in by_name.values() {
        let members = raid.describe();
        let state = members.iter().find(|(key, _)| *key == "state").map(|(_, v)| v.clone());
        if request.category == "all" || state == Some(json!(request.category)) {
            let mut object = json!({ "name": raid.name });
            for (key, value) in members {
                object[key] = value;
            }
            list.push(object);
        }
    }
    Ok(Value::Array(list))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Delete {
    name: String,
    #[serde(default)]
    clear_sb: bool,
}

async fn delete(app: &App, params: Option<Value>) -> RpcResult {
    let request: Delete = decode(params, parse_error)?;
    let _ = request.clear_sb;
    let raids = app.module(Raids::default);
    let raid = raids.by_name.borrow_mut().remove(&request.name);
    let missing = || RpcError::new(-i64::from(libc::ENODEV), format!("raid bdev {} not found", request.name));
    let raid = raid.ok_or_else(missing)?;
    if raid.bdev.borrow().is_some() {
        app.registry().unregister(app.core(), &raid.name).await?;
    }
    raid.slots.borrow_mut().clear();
    Ok(json!(true))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Base {
    name: String,
}

fn remove_base(app: &App, params: Option<Value>) -> RpcResult {
    let request: Base = decode(params, parse_error)?;
    let raids = app.module(Raids::default);
    let by_name = raids.by_name.borrow();
    let at = |r: &Rc<Raid>| r.slots.borrow().iter().position(|s| s.name.as_ref() == Some(&request.name));
    let found = by_name.values().find_map(|r| at(r).map(|index| (Rc::clone(r), index)));
    drop(by_name);
    let Some((raid, index)) = found else { return Err(RpcError::errno(libc::ENODEV)) };
    raid.member_goes(app, index);
    Ok(json!(true))
}

fn save(app: &App) -> Vec<(String, Value)> {
    let raids = app.module(Raids::default);
    let options = serde_json::to_value(&*raids.options.borrow()).unwrap_or(Value::Null);
    let mut entries = vec![("bdev_raid_set_options".to_owned(), options)];
    for raid in raids.by_name.borrow().values() {
        let slots = raid.slots.borrow();
        let online = raid.bdev.borrow().is_some();
        let name = |(index, slot): (usize, &Slot)| match &slot.name {
            Some(name) => name.clone(),
            None if online => format!("removed_base_bdev_{index}"),
            None => slot.wanted.clone(),
        };
        let bases: Vec<String> = slots.iter().enumerate().map(name).collect();
        let params = json!({ "name": raid.name, "uuid": raid.uuid.to_string(), "raid_level": "raid1",
            "superblock": false, "base_bdevs": bases });
        entries.push(("bdev_raid_create".to_owned(), params));
    }
    entries
}
