//! Which calls make a device and export it, for either data plane. Pure: the calls are made elsewhere.
//!
//! The same devices are made on both. Where a data plane lacks one, its nearest stands in and a note says so: raid1 for
//! the mirror, libaio for io_uring.

use std::path::Path;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde_json::{Value, json};

use super::matrix::Device;

/// The subsystem that hosts connect to.
pub const NQN: &str = "nqn.2026-11.io.addax:volume:bench";
/// Bytes of a cluster of logical volumes.
pub const CLUSTER: u32 = 64 << 10;
/// Bytes of every device but logical volumes.
pub const DEVICE_BYTES: u64 = 128 << 20;
/// Bytes of [`Device::MirrorCold`].
const COLD_BYTES: u64 = 1 << 40;
/// Bytes of a meta area: room for the bits and stamps of [`COLD_BYTES`].
const META_BYTES: u64 = 16 << 20;
/// Bytes for which there is a write-intent bit, in volumes of up to [`COLD_BYTES`].
const REGION_BYTES: u64 = 1 << 20;
/// Bytes of a logical volume.
pub const LVOL_BYTES: u64 = 512 << 20;
/// Bytes of the device that logical volumes are on: two copies of a volume, and metadata.
const STORE_BYTES: u64 = 2 * LVOL_BYTES + (256 << 20);
/// I/Os of a run of first writes: few enough clusters of the volume that seven in eight I/Os are the first to theirs.
pub const FIRST_WRITES: u64 = LVOL_BYTES / CLUSTER as u64 / 4;
/// The exported device.
const TOP: &str = "bench";
const STORE: &str = "benchstore";
const MIRROR_UUID: &str = "5c0a2f8e-8d6e-4b8e-9a52-3e1f6a7b9c10";

/// A call of a data plane.
#[derive(Debug, Clone, PartialEq)]
pub struct Call {
    pub method: &'static str,
    pub params: Value,
}

fn call(method: &'static str, params: Value) -> Call {
    Call { method, params }
}

/// What a data plane can do, by the methods it has.
#[derive(Debug, Clone, Default)]
pub struct Abilities {
    methods: Vec<String>,
}

impl Abilities {
    /// From the answer of `rpc_get_methods`.
    #[must_use]
    pub fn new(methods: &Value) -> Self {
        let names = methods.as_array().into_iter().flatten().filter_map(Value::as_str);
        Self { methods: names.map(str::to_owned).collect() }
    }

    fn has(&self, method: &str) -> bool {
        self.methods.iter().any(|m| m == method)
    }

    /// Whether it can serve a device, or something that stands in for it.
    #[must_use]
    pub fn can(&self, device: Device) -> bool {
        match device {
            Device::Null => self.has("bdev_null_create"),
            Device::Malloc => self.has("bdev_malloc_create"),
            Device::Uring => self.has("bdev_uring_create") || self.has("bdev_aio_create"),
            Device::Raid1 => self.has("bdev_raid_create"),
            Device::Mirror | Device::MirrorTcp => self.has("addax_mirror_create") || self.has("bdev_raid_create"),
            Device::MirrorHot | Device::MirrorCold => self.has("addax_mirror_create"),
            Device::LvolThick | Device::LvolThin | Device::LvolCow => {
                self.has("bdev_lvol_create_lvstore") && self.has("bdev_lvol_create") && self.has("bdev_lvol_snapshot")
            }
        }
    }

    /// What stands in for the device, if something does.
    #[must_use]
    pub fn stand_in(&self, device: Device) -> Option<&'static str> {
        match device {
            Device::Uring if !self.has("bdev_uring_create") => Some("bdev_aio"),
            Device::Mirror | Device::MirrorTcp if !self.has("addax_mirror_create") => Some("raid1"),
            _ => None,
        }
    }
}

/// Where a setup is.
#[derive(Debug, Clone, Copy)]
pub struct Place<'a> {
    /// Port of 127.0.0.1.
    pub port: u16,
    /// File of [`Device::Uring`].
    pub file: &'a Path,
}

/// Bytes of the exported device.
#[must_use]
pub const fn bytes(device: Device) -> u64 {
    match device {
        Device::LvolThick | Device::LvolThin | Device::LvolCow => LVOL_BYTES,
        Device::MirrorCold => COLD_BYTES,
        _ => DEVICE_BYTES,
    }
}

/// Memory that a device takes in the data plane, in MiB.
#[must_use]
pub const fn memory_mib(device: Device) -> u64 {
    let bytes = match device {
        Device::Null | Device::Uring => 0,
        Device::Malloc => DEVICE_BYTES,
        Device::Raid1 | Device::Mirror | Device::MirrorTcp => 3 * DEVICE_BYTES,
        Device::MirrorHot | Device::MirrorCold => 3 * META_BYTES,
        Device::LvolThick | Device::LvolThin | Device::LvolCow => STORE_BYTES,
    };
    bytes >> 20
}

/// The calls that make a device in blocks of `lba` bytes and export it.
#[must_use]
pub fn build(device: Device, lba: u32, abilities: &Abilities, place: Place<'_>) -> Vec<Call> {
    let mut calls = vec![call("nvmf_create_transport", json!({"trtype": "TCP"}))];
    match device {
        Device::Null => calls.push(call("bdev_null_create", geometry(TOP, DEVICE_BYTES, lba))),
        Device::Malloc => calls.push(call("bdev_malloc_create", geometry(TOP, DEVICE_BYTES, lba))),
        Device::Uring => {
            let method = if abilities.has("bdev_uring_create") { "bdev_uring_create" } else { "bdev_aio_create" };
            calls.push(call(method, json!({"name": TOP, "filename": place.file, "block_size": lba})));
        }
        Device::Raid1 => {
            let names = bases(&mut calls, lba);
            calls.push(raid(&names));
        }
        Device::Mirror => {
            let names = bases(&mut calls, lba);
            calls.push(mirror(&names, (true, false, DEVICE_BYTES), lba, abilities));
        }
        Device::MirrorTcp => {
            let names: Vec<String> =
                bases(&mut calls, lba).iter().map(|base| remote(&mut calls, base, place.port)).collect();
            calls.push(mirror(&names, (false, false, DEVICE_BYTES), lba, abilities));
        }
        Device::MirrorHot | Device::MirrorCold => {
            let names: Vec<String> = (1..=3).map(|number| format!("base{number}")).collect();
            for name in &names {
                calls.push(call("bdev_null_create", geometry(name, bytes(device), lba)));
                calls.push(call("bdev_malloc_create", geometry(&meta_of(name), META_BYTES, lba)));
            }
            calls.push(mirror(&names, (true, true, bytes(device)), lba, abilities));
        }
        Device::LvolThick | Device::LvolThin | Device::LvolCow => {
            calls.push(call("bdev_malloc_create", geometry("base0", STORE_BYTES, lba)));
            let store = json!({"bdev_name": "base0", "lvs_name": STORE, "cluster_sz": CLUSTER, "clear_method": "none"});
            calls.push(call("bdev_lvol_create_lvstore", store));
            calls.push(volume(device));
        }
    }
    export(&mut calls, NQN, &exported(device), place.port);
    calls
}

fn geometry(name: &str, bytes: u64, lba: u32) -> Value {
    json!({"name": name, "num_blocks": bytes / u64::from(lba), "block_size": lba})
}

/// Three devices in memory.
fn bases(calls: &mut Vec<Call>, lba: u32) -> Vec<String> {
    let names: Vec<String> = (1..=3).map(|number| format!("base{number}")).collect();
    calls.extend(names.iter().map(|name| call("bdev_malloc_create", geometry(name, DEVICE_BYTES, lba))));
    names
}

fn raid(names: &[String]) -> Call {
    call("bdev_raid_create", json!({"name": TOP, "raid_level": "raid1", "base_bdevs": names, "superblock": false}))
}

fn meta_of(name: &str) -> String {
    format!("{name}-meta")
}

/// A mirror of so many bytes, with local legs or not, with meta areas or not.
fn mirror(names: &[String], (local, meta, size): (bool, bool, u64), lba: u32, abilities: &Abilities) -> Call {
    if !abilities.has("addax_mirror_create") {
        return raid(names);
    }
    let replicas: Vec<String> = (1..=names.len()).map(|number| format!("replica{number}")).collect();
    let leg = |(replica, name): (&String, &String)| {
        let mut leg = json!({"replica": replica, "bdev_name": name, "local": local});
        if meta {
            leg["meta_bdev_name"] = meta_of(name).into();
        }
        leg
    };
    let legs: Vec<Value> = replicas.iter().zip(names).map(leg).collect();
    let config = json!({"lineage": "bench", "epoch": 1, "engine_instance": "bench", "config_number": 1,
        "in_sync": replicas, "rebuilding": [], "min_in_sync": 1, "size": size, "clean": true});
    let mut params = json!({"name": TOP, "uuid": MIRROR_UUID, "volume": "bench", "block_size": lba,
        "size_bytes": size, "config": config, "legs": legs});
    if meta {
        // One bit for each region; nothing is inherited.
        let bytes = usize::try_from(size.div_ceil(REGION_BYTES).div_ceil(8)).unwrap_or_default();
        params["inherited"] = BASE64.encode(vec![0; bytes]).into();
    }
    call("addax_mirror_create", params)
}

/// Exports a base and attaches it again over TCP; the name of what comes of it.
fn remote(calls: &mut Vec<Call>, base: &str, port: u16) -> String {
    let nqn = format!("nqn.2026-11.io.addax:replica:{base}");
    let before = calls.len();
    export(calls, &nqn, base, port);
    // The device that comes of it is beside its base in one process, so it cannot have the same identifiers.
    let uuid = uuid::Uuid::new_v5(&uuid::Uuid::NAMESPACE_OID, nqn.as_bytes());
    for call in calls[before..].iter_mut().filter(|call| call.method == "nvmf_subsystem_add_ns") {
        call.params["namespace"]["uuid"] = json!(uuid);
        call.params["namespace"]["nguid"] = json!(uuid.simple().to_string().to_uppercase());
    }
    let name = format!("remote-{base}");
    let attach = json!({"name": name, "trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.1",
        "trsvcid": port.to_string(), "subnqn": nqn});
    calls.push(call("bdev_nvme_attach_controller", attach));
    format!("{name}n1")
}

fn export(calls: &mut Vec<Call>, nqn: &str, bdev: &str, port: u16) {
    let serial = format!("{:020}", calls.len());
    calls.push(call("nvmf_create_subsystem", json!({"nqn": nqn, "allow_any_host": true, "serial_number": serial})));
    calls.push(add_namespace(nqn, bdev));
    let address = json!({"trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.1", "trsvcid": port.to_string()});
    calls.push(call("nvmf_subsystem_add_listener", json!({"nqn": nqn, "listen_address": address})));
}

fn add_namespace(nqn: &str, bdev: &str) -> Call {
    call("nvmf_subsystem_add_ns", json!({"nqn": nqn, "namespace": {"bdev_name": bdev, "nsid": 1}}))
}

/// The name by which a device is exported.
fn exported(device: Device) -> String {
    if device.is_lvol() { format!("{STORE}/{TOP}") } else { TOP.to_owned() }
}

fn volume(device: Device) -> Call {
    let thin = device == Device::LvolThin;
    let params = json!({"lvs_name": STORE, "lvol_name": TOP, "size_in_mib": LVOL_BYTES >> 20, "thin_provision": thin,
        "clear_method": "none"});
    call("bdev_lvol_create", params)
}

/// The calls that make a device of first writes anew before a run: before it is filled with data, and after that.
#[must_use]
pub fn renew(device: Device, has_snapshot: bool) -> (Vec<Call>, Vec<Call>) {
    if !device.first_writes() {
        return (Vec::new(), Vec::new());
    }
    let mut before = vec![
        call("nvmf_subsystem_remove_ns", json!({"nqn": NQN, "nsid": 1})),
        call("bdev_lvol_delete", json!({"name": exported(device)})),
    ];
    if has_snapshot {
        before.push(call("bdev_lvol_delete", json!({"name": format!("{STORE}/snapshot")})));
    }
    before.push(volume(device));
    before.push(add_namespace(NQN, &exported(device)));
    let after = match device {
        Device::LvolCow => {
            vec![call("bdev_lvol_snapshot", json!({"lvol_name": exported(device), "snapshot_name": "snapshot"}))]
        }
        _ => Vec::new(),
    };
    (before, after)
}

/// Whether a device is filled with data before it is measured: memory that was never written is not memory yet.
#[must_use]
pub const fn is_filled(device: Device) -> bool {
    !matches!(device, Device::Null | Device::LvolThin | Device::MirrorHot | Device::MirrorCold)
}

/// The calls that make and export so many null devices of 64 MiB, for the cells at rest: one subsystem each.
#[must_use]
pub fn many_volumes(count: usize, port: u16) -> Vec<Call> {
    let mut calls = vec![call("nvmf_create_transport", json!({"trtype": "TCP"}))];
    for index in 0..count {
        let name = format!("volume{index}");
        calls.push(call("bdev_null_create", geometry(&name, 64 << 20, 4096)));
        export(&mut calls, &many_nqn(index), &name, port);
    }
    calls
}

/// The subsystem of one of [`many_volumes`].
#[must_use]
pub fn many_nqn(index: usize) -> String {
    format!("nqn.2026-11.io.addax:volume:idle-{index}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn abilities(methods: &[&str]) -> Abilities {
        Abilities::new(&json!(methods))
    }

    fn methods(calls: &[Call]) -> Vec<&'static str> {
        calls.iter().map(|call| call.method).collect()
    }

    const FILE: &str = "/somewhere/file";

    fn place() -> Place<'static> {
        Place { port: 4420, file: Path::new(FILE) }
    }

    #[test]
    fn every_device_is_made_and_then_exported() {
        let able = abilities(&["addax_mirror_create", "bdev_uring_create"]);
        for device in Device::ALL {
            let calls = build(device, 4096, &able, place());
            let last: Vec<_> = methods(&calls).into_iter().rev().take(3).collect();
            assert_eq!(last, ["nvmf_subsystem_add_listener", "nvmf_subsystem_add_ns", "nvmf_create_subsystem"]);
            assert_eq!(calls[0].method, "nvmf_create_transport");
            let namespace = &calls[calls.len() - 2].params["namespace"];
            assert_eq!(namespace["bdev_name"], exported(device));
        }
    }

    #[test]
    fn what_a_data_plane_lacks_is_stood_in_for() {
        let stock = abilities(&["bdev_raid_create", "bdev_aio_create"]);
        assert_eq!(stock.stand_in(Device::Mirror), Some("raid1"));
        assert_eq!(stock.stand_in(Device::Uring), Some("bdev_aio"));
        assert!(stock.can(Device::MirrorTcp) && !stock.can(Device::LvolThin) && !stock.can(Device::Null));
        assert!(methods(&build(Device::Mirror, 512, &stock, place())).contains(&"bdev_raid_create"));
        assert!(methods(&build(Device::Uring, 512, &stock, place())).contains(&"bdev_aio_create"));
        let ours = abilities(&["addax_mirror_create", "bdev_raid_create", "bdev_uring_create"]);
        assert_eq!(ours.stand_in(Device::Mirror), None);
        assert!(methods(&build(Device::MirrorTcp, 512, &ours, place())).contains(&"addax_mirror_create"));
    }

    #[test]
    fn the_mirror_over_tcp_attaches_what_it_exports() {
        let calls = build(Device::MirrorTcp, 4096, &abilities(&["addax_mirror_create"]), place());
        let of = |method: &str| calls.iter().filter(|call| call.method == method).collect::<Vec<_>>();
        let (exports, attaches) = (of("nvmf_create_subsystem"), of("bdev_nvme_attach_controller"));
        assert_eq!((exports.len(), attaches.len()), (4, 3));
        for (export, attach) in exports.iter().zip(attaches) {
            assert_eq!(export.params["nqn"], attach.params["subnqn"]);
        }
        let serials: std::collections::BTreeSet<_> =
            exports.iter().map(|e| e.params["serial_number"].as_str()).collect();
        assert_eq!(serials.len(), 4);
        let legs = &of("addax_mirror_create")[0].params["legs"];
        assert_eq!(legs[0]["bdev_name"], "remote-base1n1");
    }

    #[test]
    fn only_first_writes_are_renewed() {
        assert_eq!(renew(Device::Malloc, false), (Vec::new(), Vec::new()));
        let (before, after) = renew(Device::LvolCow, true);
        assert_eq!(before.iter().filter(|call| call.method == "bdev_lvol_delete").count(), 2);
        assert_eq!(methods(&after), ["bdev_lvol_snapshot"]);
        let (before, after) = renew(Device::LvolThin, false);
        assert_eq!(before.iter().filter(|call| call.method == "bdev_lvol_delete").count(), 1);
        assert!(after.is_empty() && !is_filled(Device::LvolThin));
    }

    #[test]
    fn a_cow_volume_fits_twice() {
        const { assert!(STORE_BYTES > 2 * LVOL_BYTES) };
        assert_eq!(FIRST_WRITES, 2048);
        assert_eq!(methods(&many_volumes(2, 1)).iter().filter(|m| **m == "nvmf_create_subsystem").count(), 2);
    }
}
