//! A data plane for tests: answers the methods that the agent uses, keeps what it was told, and can be made to fail.
//!
//! What disks hold is kept in the [`Fabric`], by the paths of their files, so that it outlives a fake data plane; the files
//! themselves get what names their lvstores, and nothing else.
//!
//! Sessions are put in by tests ([`FakePlane::connect`]) or by `bdev_nvme_attach_controller` of any fake data plane in
//! the same [`Fabric`], which obeys allow-lists as a real target does.
#![allow(clippy::unwrap_used)]

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use addax_proto::engine_v1 as pb;
use blobstore_format::geometry::{Geometry, Plan};
use blobstore_format::lvs::StoreNames;
use blobstore_format::superblock::BsType;
use blobstore_format::{BlobId, Metadata};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use mirror_core::meta::{META_BLOCK_BYTES, ReplicaState, Superblock};

use crate::arbiter::mirror_to_config;
use crate::disk::{DiskState, Disks};
use crate::rpc::{Framer, MirrorConfig};

type Answer = Result<Value, (i64, String)>;

/// A subsystem of a fake data plane.
#[derive(Clone, Debug, Default)]
pub(crate) struct FakeSubsystem {
    pub(crate) hosts: BTreeSet<String>,
    pub(crate) sessions: Vec<String>,
    pub(crate) listeners: Vec<Value>,
    pub(crate) namespaces: Vec<Value>,
}

/// A mirror of a fake data plane.
#[derive(Clone, Debug)]
pub(crate) struct FakeMirror {
    pub(crate) state: String,
    pub(crate) config: Value,
    pub(crate) legs: Vec<Value>,
    pub(crate) pending: Option<Value>,
    pub(crate) next_swap: u64,
    pub(crate) hosts_must_detach: bool,
}

/// An lvol on a fake disk.
#[derive(Clone, Debug)]
pub(crate) struct FakeLvol {
    pub(crate) uuid: String,
    pub(crate) size: u64,
    pub(crate) clusters: u64,
}

/// An lvstore on a fake disk.
#[derive(Clone, Debug)]
pub(crate) struct FakeStore {
    pub(crate) uuid: String,
    pub(crate) name: String,
    pub(crate) clusters: u64,
    pub(crate) lvols: BTreeMap<String, FakeLvol>,
}

impl FakeStore {
    /// How a store lies on a device of that size.
    pub(crate) fn geometry(device_size: u64) -> Geometry {
        let plan = Plan {
            device_size,
            block_size: 4096,
            physical_block_size: 4096,
            cluster_size: 1 << 20,
            md_page_size: 0,
            md_pages: 64,
        };
        Geometry::plan(&plan).unwrap()
    }

    /// Puts into a file what names the store.
    pub(crate) fn write_names(&self, path: &Path) {
        use std::os::unix::fs::FileExt;
        let file = std::fs::File::options().write(true).open(path).unwrap();
        let geometry = Self::geometry(file.metadata().unwrap().len());
        let names = StoreNames { name: self.name.clone(), uuid: self.uuid.parse().unwrap() };
        let mut blob = Metadata::new(BlobId::from_page(0), false);
        blob.xattrs = names.xattrs().unwrap();
        let mut super_block = geometry.super_block(BsType::LVOLSTORE);
        super_block.super_blob = blob.id;
        file.write_all_at(&blob.emit().unwrap()[0].emit(), geometry.page_offset(0)).unwrap();
        file.write_all_at(&super_block.emit(), 0).unwrap();
    }
}

/// Has a disk `d` made in a file, and waits until it can be used.
pub(crate) async fn ready_disk(disks: &Disks, path: &Path) {
    let put = pb::PutDiskRequest {
        name: "d".to_owned(),
        kind: pb::DiskKind::File.into(),
        path: path.display().to_string(),
        size_bytes: 64 << 20,
        create: true,
        ..pb::PutDiskRequest::default()
    };
    disks.put(put).await.unwrap();
    let mut state = disks.state("d");
    let ready = state.wait_for(|state| matches!(state, DiskState::Ready(_)));
    tokio::time::timeout(Duration::from_secs(30), ready).await.unwrap().unwrap();
}

/// What disks hold, by the paths of their files.
pub(crate) type FakeDisks = Arc<Mutex<BTreeMap<String, FakeStore>>>;

#[derive(Debug, Default)]
pub(crate) struct FakeState {
    pub(crate) instance: String,
    pub(crate) disks: FakeDisks,
    /// Paths of the open base devices, by device.
    pub(crate) bases: BTreeMap<String, String>,
    pub(crate) bdevs: BTreeMap<String, Value>,
    pub(crate) subsystems: BTreeMap<String, FakeSubsystem>,
    pub(crate) controllers: BTreeMap<String, Value>,
    pub(crate) mirrors: BTreeMap<String, FakeMirror>,
    pub(crate) events: Vec<Value>,
    /// Every call, in order: method and parameters.
    pub(crate) calls: Vec<(String, Value)>,
    /// Methods that fail, with code and words.
    pub(crate) failing: BTreeMap<String, (i64, String)>,
    /// Methods whose next call fails.
    pub(crate) failing_once: BTreeSet<String>,
    /// Whether removing a host answers at once and leaves its sessions to drain later, as some `spdk_tgt` do.
    pub(crate) lingering: bool,
    /// Whether its initiators have lost their targets.
    pub(crate) lost: bool,
    /// Whether it waits for its start.
    pub(crate) starting: bool,
    /// Whether it lacks the `addax_*` methods.
    pub(crate) stock: bool,
    /// What meta areas hold that are reached from here, by replica or by the lvol's UUID; zeroes otherwise.
    pub(crate) metas: BTreeMap<String, Vec<u8>>,
}

/// Which fake data plane listens at which port.
#[derive(Clone, Debug, Default)]
pub(crate) struct Fabric {
    pub(crate) disks: FakeDisks,
    /// What engines wrote into the meta areas of replicas.
    superblocks: Arc<Mutex<BTreeMap<String, Superblock>>>,
    targets: Arc<Mutex<BTreeMap<String, FakePlane>>>,
}

impl Fabric {
    /// As of replicas that only engines without meta areas have used.
    pub(crate) fn forget_superblocks(&self) {
        self.superblocks.lock().unwrap().clear();
    }
}

#[derive(Clone, Debug)]
pub(crate) struct FakePlane {
    pub(crate) state: Arc<Mutex<FakeState>>,
    pub(crate) changed: Arc<Notify>,
    pub(crate) socket: PathBuf,
    fabric: Fabric,
    life: CancellationToken,
}

impl FakePlane {
    /// Serves on a socket in `dir`.
    pub(crate) fn serve(dir: &Path, stock: bool, fabric: Fabric) -> Self {
        let socket = dir.join("rpc.sock");
        let _ = std::fs::remove_file(&socket);
        let listener = UnixListener::bind(&socket).unwrap();
        let instance = uuid::Uuid::new_v4().to_string();
        let state = FakeState { instance, stock, disks: fabric.disks.clone(), ..FakeState::default() };
        let plane = Self {
            state: Arc::new(Mutex::new(state)),
            changed: Arc::default(),
            socket,
            fabric,
            life: CancellationToken::new(),
        };
        tokio::spawn(plane.clone().accept(listener));
        plane
    }

    /// Ends all its connections, as a death of the process does.
    pub(crate) fn kill(&self) {
        self.life.cancel();
        let _ = std::fs::remove_file(&self.socket);
    }

    async fn accept(self, listener: UnixListener) {
        loop {
            tokio::select! {
                () = self.life.cancelled() => return,
                stream = listener.accept() => {
                    tokio::spawn(self.clone().connection(stream.unwrap().0));
                }
            }
        }
    }

    async fn connection(self, stream: UnixStream) {
        let (mut read, write) = stream.into_split();
        let write = Arc::new(tokio::sync::Mutex::new(write));
        let mut framer = Framer::new();
        let mut chunk = vec![0_u8; 4096];
        loop {
            let count = tokio::select! {
                () = self.life.cancelled() => return,
                count = read.read(&mut chunk) => count.unwrap_or(0),
            };
            if count == 0 {
                return;
            }
            framer.push(&chunk[..count]);
            while let Some(request) = framer.next_value().unwrap() {
                let (plane, write) = (self.clone(), write.clone());
                tokio::spawn(async move {
                    let answer = tokio::select! {
                        () = plane.life.cancelled() => return,
                        answer = plane.answer(&request) => answer,
                    };
                    let body = match answer {
                        Ok(result) => json!({"jsonrpc": "2.0", "id": request["id"], "result": result}),
                        Err((code, message)) => {
                            json!({"jsonrpc": "2.0", "id": request["id"], "error": {"code": code, "message": message}})
                        }
                    };
                    let _ = write.lock().await.write_all(format!("{body}\n").as_bytes()).await;
                });
            }
        }
    }

    async fn answer(&self, request: &Value) -> Answer {
        let method = request["method"].as_str().unwrap().to_owned();
        let params = request["params"].clone();
        {
            let mut state = self.state.lock().unwrap();
            state.calls.push((method.clone(), params.clone()));
            if let Some(failure) = state.failing.get(&method) {
                return Err(failure.clone());
            }
            if state.failing_once.remove(&method) {
                return Err((-5, "Input/output error".to_owned()));
            }
            if state.stock && method.starts_with("addax_") {
                return Err((-32601, "Method not found".to_owned()));
            }
        }
        let answer = match method.as_str() {
            "addax_wait_events" => self.wait_events(&params).await,
            "addax_mirror_close" => self.close_mirror(&params).await,
            "bdev_nvme_attach_controller" => self.attach(&params),
            "addax_mirror_read_meta" => self.read_meta(&method, &params),
            "addax_mirror_create" => {
                self.write_superblocks(&params);
                self.state.lock().unwrap().call(&method, &params)
            }
            _ => self.state.lock().unwrap().call(&method, &params),
        };
        self.changed.notify_waiters();
        answer
    }

    /// Superblocks as a mirror leaves them; bits are never written, so that every region counts as set.
    fn write_superblocks(&self, params: &Value) {
        let config: MirrorConfig = serde_json::from_value(params["config"].clone()).unwrap();
        let record = mirror_to_config(&config).unwrap();
        let geometry = mirror_core::meta::Geometry::for_volume(config.size / 4096, 4096).unwrap();
        for leg in params["legs"].as_array().unwrap().iter().filter(|leg| !leg["meta_bdev_name"].is_null()) {
            let certain = params["hosts_must_detach"] == json!(false) && leg["changed"] != json!(true);
            let instance = leg["instance"].as_str().filter(|_| certain).unwrap_or_default().to_owned();
            let replica = leg["replica"].as_str().unwrap();
            let superblock = Superblock {
                volume: mirror_core::VolumeId::new(params["volume"].as_str().unwrap()).unwrap(),
                replica: mirror_core::ReplicaId::new(replica).unwrap(),
                record: record.clone(),
                block_size: 4096,
                region_blocks: geometry.region_blocks(),
                state: ReplicaState::Member,
                instance,
                sequence: 1,
            };
            self.fabric.superblocks.lock().unwrap().insert(replica.to_owned(), superblock);
        }
    }

    /// What a test has put there, or else what engines wrote.
    fn read_meta(&self, method: &str, params: &Value) -> Answer {
        let mut state = self.state.lock().unwrap();
        // `m.<volume>.<replica>.<epoch>n2`; anything else is an lvol.
        let replica = params["bdev_name"].as_str().unwrap().split('.').nth(2);
        let superblock = replica.and_then(|replica| self.fabric.superblocks.lock().unwrap().get(replica).cloned());
        let Some(superblock) = superblock.filter(|_| state.metas.is_empty()) else { return state.call(method, params) };
        let mut area = vec![0; params["blocks"].as_u64().unwrap() as usize * META_BLOCK_BYTES];
        area[..META_BLOCK_BYTES].copy_from_slice(&superblock.encode().unwrap());
        Ok(json!({"data": base64::Engine::encode(&base64::engine::general_purpose::STANDARD, area)}))
    }

    fn attach(&self, params: &Value) -> Answer {
        let target = {
            let key = address_key(&params["traddr"], &params["trsvcid"]);
            self.fabric.targets.lock().unwrap().get(&key).cloned()
        };
        let target = target.ok_or((-5, "Input/output error".to_owned()))?;
        let host = params["hostnqn"].as_str().unwrap();
        if target.life.is_cancelled() || !target.connect(params["subnqn"].as_str().unwrap(), host) {
            return Err((-5, "Input/output error".to_owned()));
        }
        let name = params["name"].as_str().unwrap();
        let nsids: BTreeSet<u64> = {
            let target = target.state.lock().unwrap();
            let namespaces = &target.subsystems[params["subnqn"].as_str().unwrap()].namespaces;
            namespaces.iter().map(|namespace| namespace["nsid"].as_u64().unwrap()).collect()
        };
        let mut state = self.state.lock().unwrap();
        state.controllers.insert(name.to_owned(), params.clone());
        let devices: Vec<String> = nsids.iter().map(|nsid| format!("{name}n{nsid}")).collect();
        for device in &devices {
            let bdev = json!({"name": device, "product_name": "NVMe disk", "block_size": 4096, "num_blocks": 256});
            state.bdevs.insert(device.clone(), bdev);
        }
        Ok(json!(devices))
    }

    /// A host connects; false when it is not allowed.
    pub(crate) fn connect(&self, nqn: &str, host: &str) -> bool {
        let mut state = self.state.lock().unwrap();
        match state.subsystems.get_mut(nqn) {
            Some(subsystem) if subsystem.hosts.contains(host) => {
                subsystem.sessions.push(host.to_owned());
                true
            }
            _ => false,
        }
    }

    /// The last session of a subsystem ends by itself.
    pub(crate) fn drain(&self, nqn: &str) {
        self.state.lock().unwrap().subsystems.get_mut(nqn).unwrap().sessions.clear();
        self.changed.notify_waiters();
    }

    /// Registers where it listens, so that other fake data planes reach it.
    pub(crate) fn listen_at(&self, traddr: &str, trsvcid: u16) {
        let key = format!("{traddr}:{trsvcid}");
        self.fabric.targets.lock().unwrap().insert(key, self.clone());
    }

    /// Lets this one reach a target that is not of its fabric.
    pub(crate) fn reach(&self, target: &Self, traddr: &str, trsvcid: u16) {
        self.fabric.targets.lock().unwrap().insert(format!("{traddr}:{trsvcid}"), target.clone());
    }

    /// Waits until something holds.
    pub(crate) async fn wait_until(&self, what: &str, mut holds: impl FnMut(&FakeState) -> bool) {
        let wait = async {
            loop {
                let notified = self.changed.notified();
                if holds(&self.state.lock().unwrap()) {
                    return;
                }
                let _ = tokio::time::timeout(Duration::from_millis(20), notified).await;
            }
        };
        let late = tokio::time::timeout(Duration::from_secs(30), wait).await;
        assert!(late.is_ok(), "never: {what}; state {:#?}", self.state.lock().unwrap());
    }

    /// The mirror asks for a swap.
    pub(crate) fn ask_swap(&self, name: &str, change: impl FnOnce(&mut Value)) {
        {
            let mut state = self.state.lock().unwrap();
            let mirror = state.mirrors.get_mut(name).unwrap();
            let mut next = mirror.config.clone();
            change(&mut next);
            let swap = mirror.next_swap;
            mirror.next_swap += 1;
            let pending = json!({"swap": swap, "next": next, "reason": "test"});
            mirror.pending = Some(pending.clone());
            let mut event = pending;
            event["type"] = json!("swap");
            event["name"] = json!(name);
            state.event(event);
        }
        self.changed.notify_waiters();
    }

    async fn wait_events(&self, params: &Value) -> Answer {
        let after = usize::try_from(params["after"].as_u64().unwrap()).unwrap();
        let wait = Duration::from_millis(params["timeout_ms"].as_u64().unwrap());
        let poll = async {
            loop {
                let notified = self.changed.notified();
                {
                    let state = self.state.lock().unwrap();
                    if state.events.len() > after {
                        return json!({"events": &state.events[after..], "next": state.events.len()});
                    }
                }
                let _ = tokio::time::timeout(Duration::from_millis(20), notified).await;
            }
        };
        Ok(tokio::time::timeout(wait, poll).await.unwrap_or_else(|_| json!({"events": [], "next": after})))
    }

    async fn close_mirror(&self, params: &Value) -> Answer {
        let name = params["name"].as_str().unwrap();
        if !self.state.lock().unwrap().mirrors.contains_key(name) {
            return Err((-19, "No such device".to_owned()));
        }
        self.ask_swap(name, |next| next["clean"] = json!(true));
        loop {
            let notified = self.changed.notified();
            {
                let mut state = self.state.lock().unwrap();
                let mirror = state.mirrors.get_mut(name).unwrap();
                if mirror.pending.is_none() {
                    mirror.state = "closed".to_owned();
                    return Ok(json!(true));
                }
            }
            let _ = tokio::time::timeout(Duration::from_millis(20), notified).await;
        }
    }
}

fn address_key(traddr: &Value, trsvcid: &Value) -> String {
    format!("{}:{}", traddr.as_str().unwrap(), trsvcid.as_str().unwrap())
}

const METHODS: &[&str] = &[
    "rpc_get_methods",
    "spdk_get_version",
    "framework_wait_init",
    "nvmf_get_transports",
    "nvmf_create_transport",
    "bdev_get_bdevs",
    "bdev_aio_create",
    "bdev_aio_delete",
    "bdev_wait_for_examine",
    "bdev_lvol_get_lvstores",
    "bdev_lvol_create_lvstore",
    "bdev_lvol_get_lvols",
    "bdev_lvol_create",
    "bdev_lvol_delete",
    "nvmf_get_subsystems",
    "nvmf_create_subsystem",
    "nvmf_delete_subsystem",
    "nvmf_subsystem_add_ns",
    "nvmf_subsystem_add_listener",
    "nvmf_subsystem_listener_set_ana_state",
    "nvmf_subsystem_add_host",
    "nvmf_subsystem_remove_host",
    "nvmf_subsystem_get_controllers",
    "nvmf_subsystem_get_qpairs",
    "bdev_nvme_attach_controller",
    "bdev_nvme_detach_controller",
    "bdev_nvme_get_controllers",
    "bdev_nvme_reset_controller",
];
const STARTUP_METHODS: &[&str] = &[
    "rpc_get_methods",
    "spdk_get_version",
    "framework_start_init",
    "framework_wait_init",
    "bdev_set_options",
    "bdev_nvme_set_options",
];
const OWN_METHODS: &[&str] =
    &["bdev_uring_create", "bdev_uring_delete", "addax_get_info", "addax_mirror_create", "addax_wait_events"];

impl FakeState {
    pub(crate) fn event(&mut self, mut event: Value) {
        event["seq"] = json!(self.events.len() + 1);
        self.events.push(event);
    }

    /// Methods called so far that contain a part of a name.
    pub(crate) fn called(&self, part: &str) -> Vec<String> {
        self.calls.iter().map(|(method, _)| method.clone()).filter(|method| method.contains(part)).collect()
    }

    fn subsystem(&mut self, nqn: &Value) -> Result<&mut FakeSubsystem, (i64, String)> {
        let nqn = nqn.as_str().unwrap();
        let absent = || (-32602, format!("Subsystem with NQN '{nqn}' not found"));
        self.subsystems.get_mut(nqn).ok_or_else(absent)
    }

    fn call(&mut self, method: &str, params: &Value) -> Answer {
        let yes = Ok(json!(true));
        let name = params["name"].as_str().unwrap_or_default().to_owned();
        match method {
            "rpc_get_methods" if params["current"] == json!(true) && self.starting => Ok(json!(STARTUP_METHODS)),
            "rpc_get_methods" => {
                let own: &[&str] = if self.stock { &[] } else { OWN_METHODS };
                Ok(json!([METHODS, own].concat()))
            }
            "bdev_set_options" | "bdev_nvme_set_options" if self.starting => yes,
            "framework_start_init" if self.starting => {
                self.starting = false;
                yes
            }
            _ if self.starting => Err((-1, "Method may only be called after framework is initialized".to_owned())),
            "bdev_examine" => yes,
            "spdk_get_version" => Ok(json!({"version": "fake 1"})),
            "framework_wait_init" | "nvmf_create_transport" => yes,
            "addax_get_info" => Ok(json!({"engine_instance": self.instance, "version": "0", "features": ["mirror"]})),
            "nvmf_get_transports" => Ok(json!([])),
            "bdev_get_bdevs" if params.is_null() => Ok(self.all_bdevs().into_values().collect()),
            "bdev_get_bdevs" => match self.all_bdevs().remove(&name) {
                Some(bdev) => Ok(json!([bdev])),
                None => Err((-19, "No such device".to_owned())),
            },
            "bdev_uring_create" | "bdev_aio_create" => {
                let path = params["filename"].as_str().unwrap();
                let length = std::fs::metadata(path).unwrap().len();
                let bdev =
                    json!({"name": name, "product_name": "file", "block_size": 4096, "num_blocks": length / 4096});
                self.bdevs.insert(name.clone(), bdev);
                self.bases.insert(name.clone(), path.to_owned());
                Ok(json!(name))
            }
            "bdev_uring_delete" | "bdev_aio_delete" => match self.bdevs.remove(&name) {
                Some(_) => {
                    self.bases.remove(&name);
                    yes
                }
                None => Err((-19, "No such device".to_owned())),
            },
            "bdev_wait_for_examine" => yes,
            _ if method.starts_with("bdev_lvol_") => self.call_lvol(method, params),
            "bdev_nvme_detach_controller" => match self.controllers.remove(&name) {
                Some(_) => {
                    self.bdevs.retain(|device, _| !["n1", "n2"].iter().any(|ns| *device == format!("{name}{ns}")));
                    yes
                }
                None => Err((-19, "No such device".to_owned())),
            },
            "bdev_nvme_reset_controller" => match self.controllers.contains_key(&name) {
                true => yes,
                false => Err((-19, "No such device".to_owned())),
            },
            "bdev_nvme_get_controllers" => {
                let state = if self.lost { "reconnect_is_delayed" } else { "enabled" };
                Ok(self.controllers.keys().map(|name| json!({"name": name, "ctrlrs": [{"state": state}]})).collect())
            }
            _ if method.starts_with("nvmf_") => self.call_nvmf(method, params),
            _ => self.call_mirror(method, params, &name),
        }
    }

    /// Every device by each of its names, lvols included.
    fn all_bdevs(&self) -> BTreeMap<String, Value> {
        let mut all = self.bdevs.clone();
        let disks = self.disks.lock().unwrap();
        for store in self.bases.values().filter_map(|path| disks.get(path)) {
            for (name, lvol) in &store.lvols {
                let bdev = json!({"name": lvol.uuid, "uuid": lvol.uuid, "product_name": "Logical Volume",
                    "block_size": 4096, "num_blocks": lvol.size / 4096});
                all.insert(lvol.uuid.clone(), bdev.clone());
                all.insert(format!("{}/{name}", store.name), bdev);
            }
        }
        all
    }

    fn call_lvol(&mut self, method: &str, params: &Value) -> Answer {
        let absent = || (-19, "No such device".to_owned());
        let mut disks = self.disks.lock().unwrap();
        match method {
            "bdev_lvol_get_lvstores" => {
                let entry = |(base, path): (&String, &String)| {
                    let store = disks.get(path)?;
                    let taken: u64 = store.lvols.values().map(|lvol| lvol.clusters).sum();
                    Some(json!({"uuid": store.uuid, "name": store.name, "base_bdev": base, "block_size": 4096,
                        "total_data_clusters": store.clusters, "free_clusters": store.clusters - taken,
                        "cluster_size": 1 << 20}))
                };
                Ok(self.bases.iter().filter_map(entry).collect())
            }
            "bdev_lvol_create_lvstore" => {
                let path = self.bases.get(params["bdev_name"].as_str().unwrap()).ok_or_else(absent)?;
                if disks.contains_key(path) {
                    return Err((-1, "Operation not permitted".to_owned()));
                }
                let clusters = std::fs::metadata(path).unwrap().len() >> 20;
                let uuid = uuid::Uuid::new_v4().to_string();
                let name = params["lvs_name"].as_str().unwrap().to_owned();
                let store = FakeStore { uuid: uuid.clone(), name, clusters, lvols: BTreeMap::new() };
                store.write_names(Path::new(path));
                disks.insert(path.clone(), store);
                Ok(json!(uuid))
            }
            "bdev_lvol_get_lvols" => {
                let mut all = Vec::new();
                for store in self.bases.values().filter_map(|path| disks.get(path)) {
                    all.extend(store.lvols.iter().map(|(name, lvol)| {
                        json!({"name": name, "uuid": lvol.uuid, "num_allocated_clusters": lvol.clusters,
                            "lvs": {"uuid": store.uuid, "name": store.name}})
                    }));
                }
                Ok(json!(all))
            }
            "bdev_lvol_create" => {
                let store = disks.values_mut().find(|store| params["uuid"] == json!(store.uuid)).ok_or_else(absent)?;
                let uuid = uuid::Uuid::new_v4().to_string();
                let size = params["size_in_mib"].as_u64().unwrap() << 20;
                let lvol = FakeLvol { uuid: uuid.clone(), size, clusters: 0 };
                match store.lvols.insert(params["lvol_name"].as_str().unwrap().to_owned(), lvol) {
                    None => Ok(json!(uuid)),
                    Some(_) => Err((-17, "File exists".to_owned())),
                }
            }
            "bdev_lvol_delete" => {
                let name = params["name"].as_str().unwrap();
                for store in disks.values_mut() {
                    let before = store.lvols.len();
                    let alias = |lvol: &str| format!("{}/{lvol}", store.name);
                    store.lvols.retain(|lvol, entry| entry.uuid != name && alias(lvol) != name);
                    if store.lvols.len() < before {
                        return Ok(json!(true));
                    }
                }
                Err(absent())
            }
            _ => Err((-32601, "Method not found".to_owned())),
        }
    }

    fn call_nvmf(&mut self, method: &str, params: &Value) -> Answer {
        let yes = Ok(json!(true));
        let nqn = &params["nqn"];
        let host = params["host"].as_str().unwrap_or_default().to_owned();
        let lingering = self.lingering;
        match method {
            "nvmf_get_subsystems" => {
                let entry = |(nqn, subsystem): (&String, &FakeSubsystem)| {
                    let hosts: Vec<Value> = subsystem.hosts.iter().map(|host| json!({"nqn": host})).collect();
                    json!({"nqn": nqn, "allow_any_host": false, "hosts": hosts,
                        "listen_addresses": subsystem.listeners, "namespaces": subsystem.namespaces})
                };
                Ok(self.subsystems.iter().map(entry).collect())
            }
            "nvmf_create_subsystem" => {
                self.subsystems.insert(nqn.as_str().unwrap().to_owned(), FakeSubsystem::default());
                yes
            }
            "nvmf_delete_subsystem" => {
                self.subsystem(nqn)?;
                self.subsystems.remove(nqn.as_str().unwrap());
                yes
            }
            "nvmf_subsystem_add_ns" => {
                let namespace = params["namespace"].clone();
                let nsid = namespace["nsid"].clone();
                let namespaces = &mut self.subsystem(nqn)?.namespaces;
                if namespaces.iter().any(|known| known["nsid"] == nsid) {
                    return Err((-32602, "Invalid parameters".to_owned()));
                }
                namespaces.push(namespace);
                Ok(nsid)
            }
            "nvmf_subsystem_add_listener" => {
                self.subsystem(nqn)?.listeners.push(params["listen_address"].clone());
                yes
            }
            "nvmf_subsystem_listener_set_ana_state" => {
                let known = self.subsystem(nqn)?.listeners.contains(&params["listen_address"]);
                if known { yes } else { Err((-32603, "error setting ANA state: -22".to_owned())) }
            }
            "nvmf_subsystem_add_host" => match self.subsystem(nqn)?.hosts.insert(host) {
                true => yes,
                false => Err((-32603, "Internal error".to_owned())),
            },
            "nvmf_subsystem_remove_host" => {
                let subsystem = self.subsystem(nqn)?;
                if !subsystem.hosts.remove(&host) {
                    return Err((-32603, "Internal error".to_owned()));
                }
                if !lingering {
                    subsystem.sessions.retain(|session| *session != host);
                }
                yes
            }
            "nvmf_subsystem_get_controllers" | "nvmf_subsystem_get_qpairs" => {
                Ok(self.subsystem(nqn)?.sessions.iter().map(|host| json!({"cntlid": 1, "hostnqn": host})).collect())
            }
            _ => Err((-32601, "Method not found".to_owned())),
        }
    }

    fn call_mirror(&mut self, method: &str, params: &Value, name: &str) -> Answer {
        let yes = Ok(json!(true));
        let absent = || (-19, "No such device".to_owned());
        match method {
            "addax_mirror_create" => {
                let in_sync: Vec<String> = serde_json::from_value(params["config"]["in_sync"].clone()).unwrap();
                let leg = |leg: &Value| {
                    let member = in_sync.iter().any(|name| leg["replica"] == json!(name));
                    let state = if member { "in_sync" } else { "rebuilding" };
                    json!({"replica": leg["replica"], "bdev_name": leg["bdev_name"], "state": state,
                        "instance": leg["instance"].as_str().unwrap_or_default()})
                };
                let legs = params["legs"].as_array().unwrap().iter().map(leg).collect();
                let config = params["config"].clone();
                let hosts_must_detach = params["hosts_must_detach"].as_bool().unwrap();
                let state = "open".to_owned();
                let mirror = FakeMirror { state, config, legs, pending: None, next_swap: 1, hosts_must_detach };
                self.mirrors.insert(name.to_owned(), mirror);
                Ok(json!(name))
            }
            "addax_mirror_read_meta" => {
                let device = params["bdev_name"].as_str().unwrap();
                let bytes = params["blocks"].as_u64().unwrap() as usize * 4096;
                let is_of = |of: &String| device == of || device.contains(&format!(".{of}."));
                let held = self.metas.iter().find(|(of, _)| is_of(of));
                // As of a replica whose engine never wrote there.
                let mut held = held.map(|(_, held)| held.clone()).unwrap_or_default();
                held.resize(bytes, 0);
                Ok(json!({"data": base64::Engine::encode(&base64::engine::general_purpose::STANDARD, held)}))
            }
            "addax_mirror_set_instance" => {
                let mirror = self.mirrors.get_mut(name).ok_or_else(absent)?;
                let leg = mirror.legs.iter_mut().find(|leg| leg["replica"] == params["replica"]);
                leg.ok_or_else(absent)?["instance"] = params["instance"].clone();
                yes
            }
            "addax_mirror_hosts_detached" => {
                self.mirrors.get_mut(name).ok_or_else(absent)?.hosts_must_detach = false;
                yes
            }
            "addax_mirror_get" => {
                let entry = |(name, mirror): (&String, &FakeMirror)| {
                    json!({"name": name, "volume": name, "state": mirror.state, "config": mirror.config,
                        "legs": mirror.legs, "pending_swap": mirror.pending,
                        "hosts_must_detach": mirror.hosts_must_detach})
                };
                Ok(self.mirrors.iter().map(entry).collect())
            }
            "addax_mirror_add_leg" => {
                let mirror = self.mirrors.get_mut(name).ok_or_else(absent)?;
                mirror.legs.push(json!({"replica": params["replica"], "bdev_name": params["bdev_name"],
                    "state": "rebuilding"}));
                yes
            }
            "addax_mirror_remove_leg" => {
                let mirror = self.mirrors.get_mut(name).ok_or_else(absent)?;
                mirror.legs.retain(|leg| leg["replica"] != params["replica"]);
                yes
            }
            "addax_mirror_swap_answer" => {
                let mirror = self.mirrors.get_mut(name).ok_or_else(absent)?;
                let pending = mirror.pending.take().ok_or((-22, "no such swap".to_owned()))?;
                match params["outcome"].as_str().unwrap() {
                    "committed" => mirror.config = pending["next"].clone(),
                    "refused" => mirror.state = "stopped".to_owned(),
                    // Asked again under a new number, as the core does.
                    _ => {
                        let mut again = pending;
                        again["swap"] = json!(mirror.next_swap);
                        mirror.next_swap += 1;
                        mirror.pending = Some(again.clone());
                        again["type"] = json!("swap");
                        again["name"] = json!(name);
                        self.event(again);
                        return yes;
                    }
                }
                let state = mirror.state.clone();
                self.event(json!({"type": "mirror_state", "name": name, "state": state, "reason": "answer"}));
                yes
            }
            "addax_mirror_delete" => match self.mirrors.remove(name) {
                Some(_) => yes,
                None => Err(absent()),
            },
            _ => Err((-32601, "Method not found".to_owned())),
        }
    }
}
