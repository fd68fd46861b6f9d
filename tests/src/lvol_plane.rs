//! One lvolstore in an image file, served by one data plane after the other: Addax's engine or a stock SPDK.
//!
//! Both are driven by the same RPCs and read and written over NVMe/TCP, so that a program can begin on one, be ended in
//! order or killed at any point, and go on on the other.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use lvol_core::testing::model::{Call, CloneUnmap, Model, Parent, Rules, VolId};
use lvol_core::testing::pattern::{self, Found};
use serde_json::{Value, json};

use crate::engine::{Engine, rpc_at};
use crate::nvme_tcp::Namespace;
use crate::spdk::{BareTarget, free_port};

/// The lvolstore's name.
pub const STORE: &str = "store";
/// The base device's name.
const BASE: &str = "base";
/// The external device's name and UUID.
const EXTERNAL: &str = "external";
const EXTERNAL_UUID: &str = "3c1d7f6a-92a4-4f65-8e3e-5b8f0a6d2e11";
const NQN: &str = "nqn.2014-08.io.addax:test:lvol";
const MIB: u64 = 1 << 20;

/// Which data plane.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Addax's engine.
    Addax,
    /// A stock SPDK.
    Spdk,
}

impl Kind {
    /// Where the two differ.
    pub fn rules(self) -> Rules {
        let clone_unmap = match self {
            Self::Addax => CloneUnmap::Zeroes,
            Self::Spdk => CloneUnmap::KeepsParent,
        };
        Rules { clone_unmap }
    }
}

/// The files of a store, and what it is made of.
#[derive(Debug)]
pub struct Disk {
    folder: tempfile::TempDir,
    /// Bytes of a block.
    pub block_size: usize,
    tree: PathBuf,
}

/// The UUIDs of the lvols, which the planes draw.
pub type Uuids = BTreeMap<VolId, String>;

impl Disk {
    /// An empty image of `size_mib`, beside an external device of `external_mib` full of `external_tag`.
    ///
    /// # Errors
    /// When the files cannot be made.
    pub fn new(tree: &Path, block_size: usize, size_mib: u64, external_mib: u64, external_tag: u32) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        fs::File::create(folder.path().join("image"))?.set_len(size_mib * MIB)?;
        let blocks = external_mib * MIB / block_size as u64;
        fs::write(folder.path().join("external"), pattern::blocks(block_size, 0, blocks, external_tag))?;
        Ok(Self { folder, block_size, tree: tree.to_owned() })
    }

    /// The image file.
    pub fn image(&self) -> PathBuf {
        self.folder.path().join("image")
    }

    /// Keeps the files beside the failed test's output; gives the folder.
    pub fn keep(self) -> PathBuf {
        self.folder.keep()
    }
}

#[derive(Debug)]
enum Process {
    Addax(Engine),
    Spdk(BareTarget),
}

/// A running data plane with the store opened.
#[derive(Debug)]
pub struct Plane {
    process: Process,
    socket: PathBuf,
    port: u16,
    block_size: usize,
    kind: Kind,
}

impl Plane {
    /// Starts a data plane on the disk; the store, if there is one, is opened by its examination.
    ///
    /// # Errors
    /// When it does not start, or refuses a device.
    pub fn open(kind: Kind, disk: &Disk) -> Result<Self> {
        let process = match kind {
            Kind::Addax => Process::Addax(Engine::start(&["-m", "0x1"])?),
            Kind::Spdk => Process::Spdk(BareTarget::start(&disk.tree)?),
        };
        let socket = match &process {
            Process::Addax(engine) => engine.socket(),
            Process::Spdk(target) => target.socket(),
        };
        let plane = Self { process, socket, port: free_port()?, block_size: disk.block_size, kind };
        let device = |name: &str, file: &str, uuid: Option<&str>| {
            let path = disk.folder.path().join(file);
            // With unmap: without it SPDK shows old data in clusters that are used again.
            let mut params = json!({"name": name, "filename": path, "block_size": disk.block_size, "fallocate": true});
            if let Some(uuid) = uuid {
                params["uuid"] = json!(uuid);
            }
            params
        };
        plane.rpc("bdev_aio_create", device(EXTERNAL, "external", Some(EXTERNAL_UUID)))?;
        plane.rpc("bdev_wait_for_examine", Value::Null)?;
        plane.rpc("bdev_aio_create", device(BASE, "image", None))?;
        plane.rpc("bdev_wait_for_examine", Value::Null)?;
        plane.rpc("nvmf_create_transport", json!({"trtype": "TCP"}))?;
        let subsystem = json!({"nqn": NQN, "allow_any_host": true, "serial_number": "ADDAX-TEST", "max_namespaces": 4});
        plane.rpc("nvmf_create_subsystem", subsystem)?;
        let address =
            json!({"trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.1", "trsvcid": plane.port.to_string()});
        plane.rpc("nvmf_subsystem_add_listener", json!({"nqn": NQN, "listen_address": address}))?;
        Ok(plane)
    }

    /// Makes the store.
    ///
    /// # Errors
    /// When it is refused.
    pub fn format(&self) -> Result<()> {
        self.rpc("bdev_lvol_create_lvstore", json!({"bdev_name": BASE, "lvs_name": STORE, "cluster_sz": MIB}))?;
        Ok(())
    }

    /// Ends the data plane in order.
    ///
    /// # Errors
    /// When it does not end well.
    pub fn close(self) -> Result<()> {
        match self.process {
            Process::Addax(mut engine) => ensure!(engine.terminate()?, "the engine failed:\n{}", engine.log()),
            Process::Spdk(target) => target.terminate()?,
        }
        Ok(())
    }

    /// Kills the data plane where it stands.
    pub fn kill(self) {
        drop(self.process);
    }

    /// What the data plane has printed.
    pub fn log(&self) -> String {
        match &self.process {
            Process::Addax(engine) => engine.log(),
            Process::Spdk(target) => target.log(),
        }
    }

    /// Calls a method.
    ///
    /// # Errors
    /// The data plane's.
    pub fn rpc(&self, method: &str, params: Value) -> Result<Value> {
        rpc_at(&self.socket, method, params).with_context(|| format!("{:?}: {method}", self.kind))
    }

    /// Does what a call says; the UUID of a new lvol is entered in `uuids`.
    ///
    /// # Errors
    /// When the data plane refuses it.
    pub fn call(&self, call: &Call, uuids: &mut Uuids) -> Result<()> {
        if let Some((vol, first, count, tag)) = call.blocks() {
            let uuid = uuid(uuids, vol)?;
            return self.with_namespace(uuid, |namespace| match call {
                Call::Write { .. } => namespace.write(first, &pattern::blocks(self.block_size, first, count, tag)),
                Call::Zero { .. } => namespace.write_zeroes(first, count),
                _ => namespace.deallocate(first, count),
            });
        }
        let of = |vol: &VolId| uuid(uuids, *vol).map(|uuid| json!(uuid));
        let made = match call {
            Call::Create { id, name, clusters, thin } => {
                let params =
                    json!({"lvol_name": name, "size_in_mib": clusters, "thin_provision": thin, "lvs_name": STORE});
                Some((*id, self.rpc("bdev_lvol_create", params)?))
            }
            Call::Snapshot { vol, id, name } => {
                let params = json!({"lvol_name": of(vol)?, "snapshot_name": name});
                Some((*id, self.rpc("bdev_lvol_snapshot", params)?))
            }
            Call::Clone { vol, id, name } => {
                let params = json!({"snapshot_name": of(vol)?, "clone_name": name});
                Some((*id, self.rpc("bdev_lvol_clone", params)?))
            }
            Call::CloneExternal { id, name } => {
                let params = json!({"bdev": EXTERNAL, "lvs_name": STORE, "clone_name": name});
                Some((*id, self.rpc("bdev_lvol_clone_bdev", params)?))
            }
            _ => {
                self.change(call, &of)?;
                None
            }
        };
        if let Some((id, made)) = made {
            uuids.insert(id, made.as_str().context("the answer is no UUID")?.to_owned());
        }
        Ok(())
    }

    fn change(&self, call: &Call, of: &dyn Fn(&VolId) -> Result<Value>) -> Result<()> {
        match call {
            Call::Flush { vol } => {
                let uuid = of(vol)?;
                self.with_namespace(uuid.as_str().unwrap_or_default(), Namespace::flush)?;
            }
            Call::Delete { vol } => drop(self.rpc("bdev_lvol_delete", json!({"name": of(vol)?}))?),
            Call::Resize { vol, clusters } => {
                self.rpc("bdev_lvol_resize", json!({"name": of(vol)?, "size_in_mib": clusters}))?;
            }
            Call::Inflate { vol } => drop(self.rpc("bdev_lvol_inflate", json!({"name": of(vol)?}))?),
            Call::Decouple { vol } => drop(self.rpc("bdev_lvol_decouple_parent", json!({"name": of(vol)?}))?),
            Call::Rename { vol, name } => {
                self.rpc("bdev_lvol_rename", json!({"old_name": of(vol)?, "new_name": name}))?;
            }
            Call::ReadOnly { vol } => drop(self.rpc("bdev_lvol_set_read_only", json!({"name": of(vol)?}))?),
            Call::SetParent { vol, parent } => {
                let params = json!({"lvol_name": of(vol)?, "parent_name": of(parent)?});
                self.rpc("bdev_lvol_set_parent", params)?;
            }
            other => bail!("{other:?} is no call by RPC"),
        }
        Ok(())
    }

    /// Exports an lvol for as long as `code` runs.
    fn with_namespace<T>(&self, uuid: &str, code: impl FnOnce(&mut Namespace) -> Result<T>) -> Result<T> {
        let added = self.rpc("nvmf_subsystem_add_ns", json!({"nqn": NQN, "namespace": {"bdev_name": uuid}}))?;
        let nsid = u32::try_from(added.as_u64().context("the answer is no namespace")?)?;
        let result = Namespace::connect(self.port, NQN, nsid).and_then(|mut namespace| {
            let result = code(&mut namespace);
            namespace.close()?;
            result
        });
        self.rpc("nvmf_subsystem_remove_ns", json!({"nqn": NQN, "nsid": nsid}))?;
        result
    }

    /// Compares names, sizes, parents and flags; gives the clusters that each lvol has of its own and the free ones.
    ///
    /// # Errors
    /// The first difference.
    pub fn check_tree(&self, model: &Model, uuids: &Uuids) -> Result<(BTreeMap<VolId, u64>, u64)> {
        let listed = self.rpc("bdev_lvol_get_lvols", json!({"lvs_name": STORE}))?;
        let listed = listed.as_array().context("no list of lvols")?;
        ensure!(listed.len() == model.volumes.len(), "{} lvols in place of {}", listed.len(), model.volumes.len());
        let bdevs = self.rpc("bdev_get_bdevs", Value::Null)?;
        let bdevs = bdevs.as_array().context("no list of devices")?;
        let mut allocated = BTreeMap::new();
        for (vol, volume) in &model.volumes {
            let uuid = uuid(uuids, *vol)?;
            let lvol = listed.iter().find(|lvol| lvol["uuid"] == uuid).with_context(|| format!("no lvol {vol}"))?;
            let bdev = bdevs.iter().find(|bdev| bdev["name"] == uuid).with_context(|| format!("no device of {vol}"))?;
            let driver = &bdev["driver_specific"]["lvol"];
            let size = bdev["num_blocks"].as_u64().unwrap_or(0) * bdev["block_size"].as_u64().unwrap_or(0);
            let parent = match volume.parent {
                Parent::Vol(parent) => model.volumes.get(&parent).map(|parent| json!(parent.name)).unwrap_or_default(),
                _ => Value::Null,
            };
            let seen =
                json!([lvol["name"], size, driver["thin_provision"], driver["base_snapshot"], driver["esnap_clone"]]);
            let external = volume.parent == Parent::External;
            let expected = json!([volume.name, volume.clusters * MIB, volume.thin, parent, external]);
            ensure!(seen == expected, "lvol {vol} is {seen} in place of {expected}");
            allocated.insert(*vol, lvol["num_allocated_clusters"].as_u64().unwrap_or(0));
        }
        let stores = self.rpc("bdev_lvol_get_lvstores", json!({"lvs_name": STORE}))?;
        let free = stores[0]["free_clusters"].as_u64().context("no free clusters")?;
        let total = stores[0]["total_data_clusters"].as_u64().context("no clusters")?;
        let used: u64 = allocated.values().sum();
        ensure!(used + free == total, "{used} clusters are in lvols and {free} are free of {total}");
        Ok((allocated, free))
    }

    /// Reads every lvol in full and compares.
    ///
    /// # Errors
    /// The first difference.
    pub fn check_contents(&self, model: &Model, uuids: &Uuids) -> Result<()> {
        for (vol, volume) in &model.volumes {
            let blocks = volume.clusters * model.blocks_per_cluster;
            let bytes = self.with_namespace(uuid(uuids, *vol)?, |namespace| {
                ensure!(namespace.blocks() == blocks, "lvol {vol} has {} blocks", namespace.blocks());
                namespace.read(0, blocks)
            })?;
            for (block, bytes) in (0..).zip(bytes.chunks(self.block_size)) {
                let (found, expected) = (pattern::read(bytes, block), model.cell(*vol, block).latest());
                ensure!(found == Found::Tag(expected), "lvol {vol} block {block}: {found:?} in place of {expected}");
            }
        }
        Ok(())
    }
}

fn uuid(uuids: &Uuids, vol: VolId) -> Result<&str> {
    uuids.get(&vol).map(String::as_str).with_context(|| format!("lvol {vol} has no UUID"))
}
