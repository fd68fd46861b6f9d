#![allow(clippy::unwrap_used)]
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use super::*;
use crate::fake_plane::{Fabric, FakeLvol, FakePlane};
use crate::supervise;
use serde_json::json;

struct Node {
    shutdown: CancellationToken,
    fabric: Fabric,
    status: watch::Sender<PlaneStatus>,
    disks: Disks,
    hub: Hub,
    dir: tempfile::TempDir,
    plane: Mutex<FakePlane>,
}

async fn connect(plane: &FakePlane) -> PlaneStatus {
    let plane: Plane = supervise::tests::greet(&plane.socket).await;
    PlaneStatus { plane: Some(Arc::new(plane)), ..PlaneStatus::default() }
}

fn open(dir: &Path, plane: watch::Receiver<PlaneStatus>, hub: &Hub, shutdown: &CancellationToken) -> Disks {
    let context = DiskContext { node: "n".to_owned(), plane, hub: hub.clone(), shutdown: shutdown.clone() };
    Disks::open(DiskStore::open(dir).unwrap(), context)
}

async fn node() -> Node {
    let (dir, fabric, hub) = (tempfile::tempdir().unwrap(), Fabric::default(), Hub::default());
    let plane = FakePlane::serve(dir.path(), false, fabric.clone());
    let (status, receiver) = watch::channel(connect(&plane).await);
    let shutdown = CancellationToken::new();
    let disks = open(dir.path(), receiver, &hub, &shutdown);
    Node { shutdown, fabric, status, disks, hub, dir, plane: Mutex::new(plane) }
}

impl Node {
    fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn wish(&self, name: &str, create: bool) -> pb::PutDiskRequest {
        pb::PutDiskRequest {
            name: name.to_owned(),
            kind: pb::DiskKind::File.into(),
            path: self.file(name).display().to_string(),
            size_bytes: if create { 64 << 20 } else { 0 },
            create,
            ..pb::PutDiskRequest::default()
        }
    }

    /// Waits until a disk is ready (no reason), or away for a reason.
    async fn until(&self, name: &str, reason: &str) -> pb::Disk {
        let wait = async {
            loop {
                match self.hub.disk(name).filter(|disk| disk.reason == reason) {
                    Some(disk) => return disk,
                    None => tokio::time::sleep(Duration::from_millis(5)).await,
                }
            }
        };
        let waited = tokio::time::timeout(Duration::from_secs(30), wait).await;
        waited.unwrap_or_else(|_| panic!("{name} is never {reason:?}: {:?}", self.hub.disk(name)))
    }

    /// Another data plane, which has nothing open.
    async fn restart(&self) {
        let plane = FakePlane::serve(self.dir.path(), false, self.fabric.clone());
        let status = connect(&plane).await;
        *self.plane.lock().unwrap() = plane;
        self.status.send_replace(status);
    }

    /// The same data plane over another connection, which makes the owners look.
    async fn reconnect(&self) {
        let plane = self.plane.lock().unwrap().clone();
        self.status.send_replace(connect(&plane).await);
    }

    /// The lvstore of one file is now that of another.
    fn move_store(&self, from: &str, to: &str) {
        let mut disks = self.fabric.disks.lock().unwrap();
        let key = |name: &str| self.file(name).display().to_string();
        let store = disks.remove(&key(from)).unwrap();
        store.write_names(&self.file(to));
        disks.insert(key(to), store);
    }

    fn calls(&self, part: &str) -> usize {
        self.plane.lock().unwrap().state.lock().unwrap().called(part).len()
    }

    fn with_plane<T>(&self, work: impl FnOnce(&mut crate::fake_plane::FakeState) -> T) -> T {
        work(&mut self.plane.lock().unwrap().state.lock().unwrap())
    }

    /// Ends when the owner has done what it was doing.
    async fn settled(&self) {
        self.settled_disk("d").await;
    }

    async fn settled_disk(&self, name: &str) {
        // A command waits its turn behind the look that was begun; another one for what it asked for to be done.
        let wish = self.hub.disk(name).unwrap().wish.unwrap();
        for _ in 0..3 {
            tokio::time::sleep(Duration::from_millis(50)).await;
            self.disks.put(wish.clone()).await.unwrap();
        }
    }

    fn stores(&self) -> usize {
        self.fabric.disks.lock().unwrap().len()
    }
}

#[tokio::test]
async fn a_new_file_is_made_formatted_once_and_opened_again() {
    let node = node().await;
    node.disks.put(node.wish("d", true)).await.unwrap();
    let disk = node.until("d", "").await;
    assert!(!disk.uuid.is_empty() && disk.size_bytes == 64 << 20 && disk.cluster_bytes == CLUSTER_BYTES, "{disk:?}");
    assert!(disk.lvstore.starts_with("addax-"), "{disk:?}");
    node.disks.put(node.wish("d", true)).await.unwrap();
    node.restart().await;
    assert_eq!(node.until("d", "").await.uuid, disk.uuid);
    // A new agent knows it too.
    node.shutdown.cancel();
    let hub = Hub::default();
    let again = open(node.dir.path(), node.status.subscribe(), &hub, &CancellationToken::new());
    let mut state = again.state("d");
    let ready = state.wait_for(|state| matches!(state, DiskState::Ready(_)));
    tokio::time::timeout(Duration::from_secs(30), ready).await.unwrap().unwrap();
    assert_eq!((hub.disk("d").unwrap().uuid, node.stores()), (disk.uuid, 1));
}

#[tokio::test]
async fn a_disk_of_one_agent_is_not_anothers() {
    let (one, other) = (node().await, node().await);
    one.disks.put(one.wish("d", true)).await.unwrap();
    let made = one.until("d", "").await;
    let theirs = pb::PutDiskRequest { create: false, ..one.wish("d", true) };
    other.disks.put(theirs).await.unwrap();
    other.until("d", "DeviceInUse").await;
    one.disks.remove("d").await.unwrap();
    assert_eq!(other.until("d", "Found").await.uuid, made.uuid);
}

#[tokio::test]
async fn what_holds_anything_is_formatted_only_with_its_own_fingerprint() {
    let node = node().await;
    let file = std::fs::File::create(node.file("d")).unwrap();
    file.set_len(32 << 20).unwrap();
    file.write_all_at(b"precious", (32 << 20) - 8).unwrap();
    node.disks.put(node.wish("d", true)).await.unwrap();
    let refused = node.until("d", "NotEmpty").await;
    assert!(refused.message.contains("data of an unknown kind") && !refused.fingerprint.is_empty(), "{refused:?}");
    let erase = |print: &str| pb::PutDiskRequest { erase: print.to_owned(), ..node.wish("d", true) };
    node.disks.put(erase("0123456789ab")).await.unwrap();
    node.until("d", "NotEmpty").await;
    // What has changed since is not what was permitted.
    file.write_all_at(b"more", 0).unwrap();
    node.disks.put(erase(&refused.fingerprint)).await.unwrap();
    let now = async {
        loop {
            let disk = node.until("d", "NotEmpty").await;
            if disk.fingerprint != refused.fingerprint {
                return disk.fingerprint;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let now = tokio::time::timeout(Duration::from_secs(30), now).await.unwrap();
    assert_eq!(node.stores(), 0);
    node.disks.put(erase(&now)).await.unwrap();
    node.until("d", "").await;
    assert_eq!(node.stores(), 1);
}

#[tokio::test]
async fn an_lvstore_that_is_there_is_imported_and_its_lvols_are_counted() {
    let node = node().await;
    node.disks.put(node.wish("d", true)).await.unwrap();
    let made = node.until("d", "").await;
    node.disks.remove("d").await.unwrap();
    assert!(node.hub.disk("d").is_none());
    {
        let mut disks = node.fabric.disks.lock().unwrap();
        let store = disks.values_mut().next().unwrap();
        store.name = "theirs".to_owned();
        store.write_names(&node.file("d"));
        let lvol = FakeLvol { uuid: Uuid::new_v4().to_string(), size: 10 << 20, clusters: 3 };
        store.lvols.insert("pvc-1".to_owned(), lvol);
    }
    node.disks.put(node.wish("d", true)).await.unwrap();
    let refused = node.until("d", "NotEmpty").await;
    assert!(refused.message.contains("lvstore 'theirs'"), "{refused:?}");
    assert!(!refused.fingerprint.is_empty());
    node.disks.put(node.wish("d", false)).await.unwrap();
    // Found, and used only once it is named.
    let found = node.until("d", "Found").await;
    assert_eq!((&found.uuid, node.calls("bdev_uring_create")), (&made.uuid, 1));
    node.disks.put(pb::PutDiskRequest { uuid: found.uuid, ..node.wish("d", false) }).await.unwrap();
    let disk = node.until("d", "").await;
    assert_eq!((disk.uuid, disk.lvstore.as_str()), (made.uuid, "theirs"));
    assert_eq!((disk.unmanaged_count, disk.unmanaged_bytes, disk.unmanaged[0].allocated_bytes), (1, 10 << 20, 3 << 20));
    let empty = std::fs::File::create(node.file("e")).unwrap();
    empty.set_len(32 << 20).unwrap();
    node.disks.put(node.wish("e", false)).await.unwrap();
    node.until("e", "NoLvstore").await;
    assert_eq!(node.stores(), 1);
}

#[tokio::test]
async fn another_disk_in_its_place_is_neither_used_nor_formatted() {
    let node = node().await;
    for name in ["d", "e"] {
        node.disks.put(node.wish(name, true)).await.unwrap();
        node.until(name, "").await;
    }
    let mine = node.hub.disk("d").unwrap().uuid;
    // Pulled, and then each other lying in its place: an empty one, and one with an lvstore.
    std::fs::rename(node.file("d"), node.file("kept")).unwrap();
    node.restart().await;
    node.until("d", "DeviceMissing").await;
    node.move_store("d", "kept");
    std::fs::File::create(node.file("d")).unwrap().set_len(64 << 20).unwrap();
    let refused = node.until("d", "DiskChanged").await;
    assert!(refused.message.contains("no lvstore") && refused.uuid == mine, "{refused:?}");
    node.disks.remove("e").await.unwrap();
    node.move_store("e", "d");
    let other = async {
        while !node.hub.disk("d").unwrap().message.contains("holds the lvstore") {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(30), other).await.unwrap();
    assert_eq!((node.until("d", "DiskChanged").await.uuid, node.stores()), (mine.clone(), 2));
    node.move_store("d", "e");
    node.move_store("kept", "d");
    assert_eq!(node.until("d", "").await.uuid, mine);
}

#[tokio::test]
async fn a_manager_that_knows_another_disk_is_told() {
    let node = node().await;
    node.disks.put(node.wish("d", true)).await.unwrap();
    let disk = node.until("d", "").await;
    let expect = |uuid: &str| pb::PutDiskRequest { uuid: uuid.to_owned(), ..node.wish("d", true) };
    node.disks.put(expect(&disk.uuid)).await.unwrap();
    node.restart().await;
    node.until("d", "").await;
    node.disks.put(expect(&Uuid::nil().to_string())).await.unwrap();
    node.restart().await;
    node.until("d", "DiskChanged").await;
}

#[tokio::test]
async fn bad_requests_name_field_value_and_rule() {
    let node = node().await;
    let refused = |request: pb::PutDiskRequest| async { node.disks.put(request).await.unwrap_err().to_string() };
    assert!(refused(pb::PutDiskRequest { name: "A".to_owned(), ..node.wish("d", true) }).await.contains("name"));
    let relative = pb::PutDiskRequest { path: "disk".to_owned(), ..node.wish("d", true) };
    assert!(refused(relative).await.contains("an absolute path"));
    let no_kind = pb::PutDiskRequest { kind: 0, ..node.wish("d", true) };
    assert!(refused(no_kind).await.contains("file, block or nvme"));
    let remote = pb::PutDiskRequest { kind: pb::DiskKind::Nvme.into(), ..node.wish("d", true) };
    assert!(refused(remote).await.contains("namespace_at.traddr"));
    node.disks.put(node.wish("d", true)).await.unwrap();
    let twice = pb::PutDiskRequest { name: "e".to_owned(), ..node.wish("d", true) };
    assert!(refused(twice).await.contains("the same device as disk 'd'"));
    let moved = pb::PutDiskRequest { path: node.file("x").display().to_string(), ..node.wish("d", true) };
    assert!(refused(moved).await.contains("another device"));
    node.disks.remove("absent").await.unwrap();
    assert!(matches!(node.disks.register("absent", "r"), Err(AgentError::NotFound { .. })));
}

#[tokio::test]
async fn a_formatting_that_was_cut_short_is_not_gone_on_with_on_what_cannot_be_read() {
    let node = node().await;
    let failure = (-32602, "No space".to_owned());
    node.with_plane(|plane| plane.failing.insert("bdev_lvol_create_lvstore".to_owned(), failure));
    node.disks.put(node.wish("d", true)).await.unwrap();
    node.until("d", "FormatFailed").await;
    // Now another device lies there: it begins as a blobstore does.
    let file = std::fs::File::options().write(true).open(node.file("d")).unwrap();
    file.write_all_at(b"SPDKBLOB precious", 0).unwrap();
    node.with_plane(|plane| plane.failing.clear());
    node.reconnect().await;
    let refused = node.until("d", "Damaged").await;
    assert!(!refused.fingerprint.is_empty(), "{refused:?}");
    node.restart().await;
    node.until("d", "Damaged").await;
    // Nor is anything formatted that is to be imported by now.
    node.disks.put(node.wish("d", false)).await.unwrap();
    file.write_all_at(&[0; 17], 0).unwrap();
    node.reconnect().await;
    node.until("d", "NoLvstore").await;
    assert_eq!((node.stores(), node.calls("bdev_uring_create")), (0, 0));
    node.disks.put(node.wish("d", true)).await.unwrap();
    node.until("d", "").await;
}

#[tokio::test]
async fn what_is_refused_is_not_opened() {
    let node = node().await;
    node.disks.put(node.wish("d", true)).await.unwrap();
    let known = node.until("d", "").await;
    node.disks.remove("d").await.unwrap();
    let opened = node.calls("bdev_uring_create");
    let wrong = Uuid::from_u128(1).to_string();
    let named = |uuid: &str| pb::PutDiskRequest { uuid: uuid.to_owned(), ..node.wish("d", false) };
    for (wish, reason) in [(node.wish("d", true), "NotEmpty"), (named(&wrong), "DiskChanged")] {
        node.disks.put(wish).await.unwrap();
        node.until("d", reason).await;
        node.reconnect().await;
        node.disks.put(node.wish("d", false)).await.unwrap();
        node.until("d", "Found").await;
    }
    assert_eq!(node.calls("bdev_uring_create"), opened);
    node.disks.put(named(&known.uuid)).await.unwrap();
    node.until("d", "").await;
    // A copy of it is not opened beside it.
    std::fs::copy(node.file("d"), node.file("e")).unwrap();
    let opened = node.calls("bdev_uring_create");
    node.disks.put(pb::PutDiskRequest { uuid: known.uuid, ..node.wish("e", false) }).await.unwrap();
    node.until("e", "DuplicateDisk").await;
    assert_eq!(node.calls("bdev_uring_create"), opened);
}

#[tokio::test]
async fn another_store_under_the_same_device_is_noticed() {
    let node = node().await;
    node.disks.put(node.wish("d", true)).await.unwrap();
    let known = node.until("d", "").await;
    let set = |uuid: &str| {
        let mut disks = node.fabric.disks.lock().unwrap();
        let store = disks.values_mut().next().unwrap();
        store.uuid = uuid.to_owned();
        store.write_names(&node.file("d"));
    };
    set(&Uuid::from_u128(2).to_string());
    node.reconnect().await;
    assert_eq!(node.until("d", "DiskChanged").await.uuid, known.uuid);
    set(&known.uuid);
    node.reconnect().await;
    node.until("d", "").await;
}

fn opening(state: &watch::Receiver<DiskState>) -> Uuid {
    match &*state.borrow() {
        DiskState::Ready(ready) => ready.opening,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_device_that_was_gone_for_a_moment_counts_as_opened_anew() {
    use crate::fake_plane::FakeSubsystem;
    let node = node().await;
    node.disks.put(node.wish("d", true)).await.unwrap();
    node.until("d", "").await;
    node.disks.register("d", "r").unwrap();
    let mut state = node.disks.state("d");
    let first = opening(&state);
    let export = |namespaces| {
        let nqn = addax_api::nqn::replica_nqn("r");
        let subsystem = FakeSubsystem { namespaces, ..FakeSubsystem::default() };
        node.with_plane(|plane| plane.subsystems.insert(nqn, subsystem));
    };
    export(vec![serde_json::json!({"nsid": 1, "bdev_name": "lvol"})]);
    node.disks.look("d");
    node.reconnect().await;
    node.settled().await;
    assert_eq!(opening(&state), first);
    export(Vec::new());
    node.reconnect().await;
    let anew = |state: &DiskState| matches!(state, DiskState::Ready(ready) if ready.opening != first);
    tokio::time::timeout(Duration::from_secs(30), state.wait_for(anew)).await.unwrap().unwrap();
}

#[tokio::test]
async fn the_connection_of_a_disk_is_that_of_its_data_plane() {
    let node = node().await;
    node.disks.put(node.wish("d", true)).await.unwrap();
    node.until("d", "").await;
    // The same process, as far as its instance tells, and the old connection gone.
    let old = node.plane.lock().unwrap().clone();
    let instance = old.state.lock().unwrap().instance.clone();
    old.kill();
    let plane = FakePlane::serve(node.dir.path(), false, node.fabric.clone());
    plane.state.lock().unwrap().instance = instance;
    node.status.send_replace(connect(&plane).await);
    let mut state = node.disks.state("d");
    let usable = |state: &DiskState| matches!(state, DiskState::Ready(ready) if !ready.plane.client.is_closed());
    tokio::time::timeout(Duration::from_secs(30), state.wait_for(usable)).await.unwrap().unwrap();
}

#[tokio::test]
async fn a_removal_that_fails_or_is_given_up_leaves_the_disk_as_it_was() {
    let node = node().await;
    node.disks.put(node.wish("d", true)).await.unwrap();
    node.until("d", "").await;
    // Whether a data plane that is silent has the disk open is not known.
    let up = node.status.send_replace(PlaneStatus { reason: "silent".to_owned(), ..PlaneStatus::default() });
    let refused = node.disks.remove("d").await.unwrap_err();
    assert!(matches!(&refused, AgentError::Unavailable(text) if text.contains("silent")), "{refused}");
    node.status.send_replace(up);
    node.until("d", "").await;
    node.with_plane(|plane| plane.failing.insert("bdev_uring_delete".to_owned(), (-16, "busy".to_owned())));
    node.disks.remove("d").await.unwrap_err();
    node.disks.register("d", "r").unwrap();
    assert!(matches!(node.disks.remove("d").await, Err(AgentError::Forbidden(_))));
    node.disks.unregister("d", "r");
    node.with_plane(|plane| plane.failing.clear());
    // Asked for, and given up before the owner saw it.
    let (disks, other) = (node.disks.clone(), node.disks.clone());
    assert!(futures::FutureExt::now_or_never(disks.remove("d")).is_none());
    node.disks.register("d", "r").unwrap();
    node.settled().await;
    assert!(matches!(node.disks.remove("d").await, Err(AgentError::Forbidden(_))));
    node.disks.unregister("d", "r");
    let (one, two) = tokio::join!(disks.remove("d"), other.remove("d"));
    assert_eq!((one, two), (Ok(()), Ok(())));
    assert!(node.hub.disk("d").is_none() && node.disks.register("d", "r").is_err());
    node.disks.put(node.wish("d", true)).await.unwrap();
    node.until("d", "NotEmpty").await;
    // One that has ended has nothing open.
    node.status.send_replace(PlaneStatus { ended: true, ..PlaneStatus::default() });
    node.disks.remove("d").await.unwrap();
}

#[tokio::test]
async fn a_remote_disk_is_away_while_its_target_is() {
    let node = node().await;
    node.disks.put(node.wish("d", true)).await.unwrap();
    node.until("d", "").await;
    node.disks.remove("d").await.unwrap();
    let dir = tempfile::tempdir().unwrap();
    let target = FakePlane::serve(dir.path(), true, Fabric::default());
    node.plane.lock().unwrap().reach(&target, "127.0.0.1", 4420);
    let mut subsystem = crate::fake_plane::FakeSubsystem::default();
    subsystem.hosts.insert(addax_api::nqn::disk_host_nqn("n", "far"));
    subsystem.namespaces.push(json!({"nsid": 1, "bdev_name": "far"}));
    target.state.lock().unwrap().subsystems.insert("nqn.far".to_owned(), subsystem);
    let path = node.file("d").display().to_string();
    node.with_plane(|plane| plane.bases.insert("dn.farn1".to_owned(), path));
    let at = pb::Address { traddr: "127.0.0.1".to_owned(), trsvcid: 4420, nqn: "nqn.far".to_owned() };
    let mut wish =
        pb::PutDiskRequest { name: "far".to_owned(), namespace_at: Some(at), ..pb::PutDiskRequest::default() };
    wish.set_kind(pb::DiskKind::Nvme);
    node.disks.put(wish).await.unwrap();
    let known = node.until("far", "").await;
    node.with_plane(|plane| plane.lost = true);
    // The first look may have met a connection that is being made anew.
    let plane = node.plane.lock().unwrap().clone();
    let looks = node.calls("bdev_nvme_get_controllers");
    node.reconnect().await;
    let looked = |plane: &crate::fake_plane::FakeState| plane.called("bdev_nvme_get_controllers").len() > looks;
    plane.wait_until("looked at", looked).await;
    assert_eq!(node.hub.disk("far").unwrap().reason, "");
    node.reconnect().await;
    node.until("far", "Unreachable").await;
    assert_eq!(node.calls("detach"), 1, "only before it was attached");
    node.with_plane(|plane| plane.lost = false);
    node.reconnect().await;
    assert_eq!(node.until("far", "").await.uuid, known.uuid);
}
