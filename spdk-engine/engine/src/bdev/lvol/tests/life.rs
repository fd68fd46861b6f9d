//! Stores that come and go with their devices.

use nvme_wire::Status;
use serde_json::json;

use super::*;

/// A file as device `F`.
async fn attach(e: &Engine, path: &std::path::Path) {
    e.ok("bdev_uring_create", json!({ "name": "F", "filename": path, "block_size": BLOCK })).await;
}

fn disk(folder: &tempfile::TempDir, mib: u64) -> std::path::PathBuf {
    let path = folder.path().join("disk");
    std::fs::File::create(&path).unwrap().set_len(mib << 20).unwrap();
    path
}

#[test]
fn a_store_is_found_again_with_all_it_had() {
    engine(|e| async move {
        let folder = tempfile::tempdir().unwrap();
        let path = disk(&folder, 32);
        attach(&e, &path).await;
        let params = json!({ "bdev_name": "F", "lvs_name": "lvs", "cluster_sz": CLUSTER });
        let uuid = e.ok("bdev_lvol_create_lvstore", params).await;
        e.create("v", 4, true).await;
        e.create("thick", 2, false).await;
        let bytes = pattern(1, MIB);
        assert_eq!(e.write(DATA[0], "v", 0, bytes.clone()).await, Status::SUCCESS);
        e.snapshot("v", "s").await;
        assert_eq!(e.write(DATA[1], "v", 0, pattern(2, 4096)).await, Status::SUCCESS);
        let before = e.ok("bdev_lvol_get_lvols", Value::Null).await;
        let (claimed, claim_type) = {
            let device = e.ok("bdev_get_bdevs", json!({ "name": "F" })).await[0].clone();
            (device["claimed"].clone(), device["claim_type"].clone())
        };
        assert_eq!((claimed, claim_type), (json!(true), json!("read_many_write_one")));
        for _ in 0..2 {
            e.ok("bdev_uring_delete", json!({ "name": "F" })).await;
            assert_eq!(e.ok("bdev_lvol_get_lvstores", Value::Null).await, json!([]));
            assert_eq!(e.ok("bdev_get_bdevs", Value::Null).await, json!([]));
            attach(&e, &path).await;
            assert_eq!(e.lvstore().await["uuid"], uuid);
            let mut after = e.ok("bdev_lvol_get_lvols", Value::Null).await;
            let mut expected = before.clone();
            let key = |v: &Value| v["name"].as_str().unwrap().to_owned();
            after.as_array_mut().unwrap().sort_by_key(key);
            expected.as_array_mut().unwrap().sort_by_key(key);
            assert_eq!(after, expected);
            assert_eq!(e.read(DATA[1], "s", 0, MIB).await, bytes);
            assert_eq!(e.read(DATA[0], "v", 0, 4096).await, pattern(2, 4096));
            assert_eq!(e.read(DATA[0], "v", 8, MIB - 4096).await, bytes[4096..]);
        }
    });
}

#[test]
fn a_device_without_a_store_or_with_a_damaged_one_is_left_alone() {
    engine(|e| async move {
        let folder = tempfile::tempdir().unwrap();
        let path = disk(&folder, 16);
        let mut page = vec![0u8; 4096];
        page[..8].copy_from_slice(b"SPDKBLOB");
        for content in [vec![0x5a; 4096], page] {
            std::fs::write(&path, &content).unwrap();
            std::fs::File::options().write(true).open(&path).unwrap().set_len(16 << 20).unwrap();
            attach(&e, &path).await;
            assert_eq!(e.ok("bdev_lvol_get_lvstores", Value::Null).await, json!([]));
            assert_eq!(e.ok("bdev_get_bdevs", json!({ "name": "F" })).await[0]["claimed"], json!(false));
            e.ok("bdev_uring_delete", json!({ "name": "F" })).await;
            assert_eq!(std::fs::read(&path).unwrap()[..4096], content[..]);
        }
    });
}

#[test]
fn guests_devices_are_examined_only_when_named() {
    engine(|e| async move {
        e.store(32).await;
        e.create("v", 16, true).await;
        let params = json!({ "bdev_name": "lvs/v", "lvs_name": "inner", "cluster_sz": CLUSTER });
        e.ok("bdev_lvol_create_lvstore", params).await;
        e.ok("bdev_lvol_create", json!({ "lvs_name": "inner", "lvol_name": "w", "size_in_mib": 1 })).await;
        e.refused("bdev_examine", json!({ "name": "M0" }), -22, "Invalid argument").await;
        assert!(e.app.registry().find("inner/w").is_some());
    });
}

#[test]
fn clones_of_an_external_device_come_and_go_with_it() {
    engine(|e| async move {
        e.store(16).await;
        let uuid = "2f7c1b7e-7c67-4c0e-9d7a-0e1f3a5b6c7d";
        let external = || json!({ "name": "E", "block_size": BLOCK, "num_blocks": 2 * MIB / BLOCK, "uuid": uuid });
        e.ok("bdev_malloc_create", external()).await;
        let bytes = pattern(8, 2 * MIB);
        let entry = e.entry("E");
        let sent = bytes.clone();
        let wrote = e.app.core().call_async(DATA[0], move |core| {
            let (core, chan) = (core.clone(), entry.open(core).unwrap());
            async move { put(&core, &chan, WRITE, 0, &sent).await }
        });
        assert_eq!(wrote.await.unwrap(), Status::SUCCESS);
        e.ok("bdev_lvol_clone_bdev", json!({ "bdev": "E", "lvs_name": "lvs", "clone_name": "c" })).await;
        assert_eq!(e.ok("bdev_get_bdevs", json!({ "name": "E" })).await[0]["claim_type"], "read_many_write_none");
        let own = pattern(9, 4096);
        assert_eq!(e.write(DATA[1], "c", CLUSTER_BLOCKS + 4, own.clone()).await, Status::SUCCESS);
        let mut expected = bytes.clone();
        let at = CLUSTER + 4 * BLOCK;
        expected[at..at + 4096].copy_from_slice(&own);
        assert_eq!(e.read(DATA[0], "c", 0, 2 * MIB).await, expected);
        e.snapshot("c", "s").await;

        e.ok("bdev_malloc_delete", json!({ "name": "E" })).await;
        for name in ["c", "s"] {
            assert_eq!(e.lvol(name).await["is_degraded"], true, "{name}");
            assert!(e.app.registry().find(&format!("lvs/{name}")).is_none(), "{name}");
        }
        e.ok("bdev_malloc_create", external()).await;
        e.ok("bdev_wait_for_examine", Value::Null).await;
        // Another medium with the same identity: that is what a name is worth.
        assert_eq!(e.read(DATA[0], "c", 0, CLUSTER).await, vec![0; CLUSTER]);
        assert_eq!(e.read(DATA[0], "c", CLUSTER_BLOCKS + 4, 4096).await, own);
        e.ok("bdev_lvol_inflate", json!({ "name": "lvs/c" })).await;
        e.delete("s").await;
        assert_eq!(e.ok("bdev_get_bdevs", json!({ "name": "E" })).await[0]["claimed"], json!(false));
    });
}

#[test]
fn the_end_of_the_process_leaves_a_clean_store() {
    engine(|e| async move {
        let folder = tempfile::tempdir().unwrap();
        let path = disk(&folder, 16);
        attach(&e, &path).await;
        let params = json!({ "bdev_name": "F", "lvs_name": "lvs", "cluster_sz": CLUSTER });
        e.ok("bdev_lvol_create_lvstore", params).await;
        e.create("v", 4, true).await;
        let clean = || std::fs::read(&path).unwrap()[16..20].to_vec();
        assert_eq!(clean(), [0, 0, 0, 0]);
        crate::bdev::lvol::stop_all(&e.app).await;
        assert_eq!(clean(), [1, 0, 0, 0]);
    });
}

#[test]
fn a_store_grows_with_its_device() {
    engine(|e| async move {
        let folder = tempfile::tempdir().unwrap();
        let path = disk(&folder, 16);
        attach(&e, &path).await;
        let params = json!({ "bdev_name": "F", "lvs_name": "lvs", "cluster_sz": CLUSTER });
        e.ok("bdev_lvol_create_lvstore", params).await;
        let before = e.lvstore().await["total_data_clusters"].as_u64().unwrap();
        std::fs::File::options().write(true).open(&path).unwrap().set_len(32 << 20).unwrap();
        e.ok("bdev_uring_rescan", json!({ "name": "F" })).await;
        e.ok("bdev_lvol_grow_lvstore", json!({ "lvs_name": "lvs" })).await;
        assert_eq!(e.lvstore().await["total_data_clusters"].as_u64().unwrap(), before + 256);
        e.create("v", 24, false).await;
        assert_eq!(e.write(DATA[0], "v", 23 * MIB as u64 / 512, pattern(1, 4096)).await, Status::SUCCESS);
    });
}
