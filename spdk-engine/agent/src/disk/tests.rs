#![allow(clippy::unwrap_used)]
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use super::*;
use crate::fake_plane::{Fabric, FakeLvol, FakePlane};
use crate::supervise;

struct Node {
    shutdown: CancellationToken,
    fabric: Fabric,
    status: watch::Sender<PlaneStatus>,
    disks: Disks,
    hub: Hub,
    dir: tempfile::TempDir,
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
    Node { shutdown, fabric, status, disks, hub, dir }
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
        self.status.send_replace(connect(&plane).await);
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
    state.wait_for(|state| matches!(state, DiskState::Ready(_))).await.unwrap();
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
    // What the fake planes know of disks is not shared: it is enough that it is looked at.
    other.until("d", "Damaged").await;
    assert!(!made.uuid.is_empty());
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
        let lvol = FakeLvol { uuid: Uuid::new_v4().to_string(), size: 10 << 20, clusters: 3 };
        store.lvols.insert("pvc-1".to_owned(), lvol);
    }
    node.disks.put(node.wish("d", true)).await.unwrap();
    let refused = node.until("d", "NotEmpty").await;
    assert!(refused.message.contains("lvstore 'theirs'"), "{refused:?}");
    node.disks.put(node.wish("d", false)).await.unwrap();
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
    let moved = |from: &str, to: &str| {
        let mut disks = node.fabric.disks.lock().unwrap();
        let key = |name: &str| node.file(name).display().to_string();
        let store = disks.remove(&key(from)).unwrap();
        disks.insert(key(to), store);
    };
    moved("d", "kept");
    std::fs::File::create(node.file("d")).unwrap().set_len(64 << 20).unwrap();
    let refused = node.until("d", "DiskChanged").await;
    assert!(refused.message.contains("no lvstore") && refused.uuid == mine, "{refused:?}");
    node.disks.remove("e").await.unwrap();
    moved("e", "d");
    let other = async {
        while !node.hub.disk("d").unwrap().message.contains("holds the lvstore") {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(30), other).await.unwrap();
    assert_eq!((node.until("d", "DiskChanged").await.uuid, node.stores()), (mine.clone(), 2));
    moved("d", "e");
    moved("kept", "d");
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
