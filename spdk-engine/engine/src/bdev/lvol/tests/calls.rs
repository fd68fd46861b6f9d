//! The methods' parameters, answers and refusals.

use nvme_wire::Status;
use serde_json::json;

use super::*;

#[test]
fn stores_are_made_renamed_and_deleted() {
    engine(|e| async move {
        e.malloc("M0", 16).await;
        e.malloc("M1", 16).await;
        let create = |bdev: &str, name: &str, more: Value| {
            let mut params = json!({ "bdev_name": bdev, "lvs_name": name, "cluster_sz": CLUSTER });
            for (key, value) in more.as_object().unwrap() {
                params[key.as_str()] = value.clone();
            }
            params
        };
        let method = "bdev_lvol_create_lvstore";
        e.refused(method, create("nothing", "a", json!({})), -19, "No such device").await;
        e.refused(method, create("M0", "", json!({})), -22, "Invalid argument").await;
        e.refused(method, create("M0", &"n".repeat(64), json!({})), -22, "Invalid argument").await;
        e.refused(method, create("M0", "a", json!({ "cluster_sz": 100 })), -22, "Invalid argument").await;
        e.refused(method, create("M0", "a", json!({ "md_page_size": 5000 })), -22, "Invalid argument").await;
        e.refused(method, create("M0", "a", json!({ "colour": 1 })), -32603, "spdk_json_decode_object failed").await;
        e.refused(method, create("M0", "a", json!({ "clear_method": "burn" })), -32603, "spdk_json_decode").await;
        let uuid = e.ok(method, create("M0", "a", json!({ "clear_method": "none" }))).await;
        e.refused(method, create("M0", "b", json!({})), -1, "Operation not permitted").await;
        e.refused(method, create("M1", "a", json!({})), -17, "File exists").await;
        e.ok(method, create("M1", "b", json!({ "md_page_size": 8192 }))).await;

        let rename = "bdev_lvol_rename_lvstore";
        e.refused(rename, json!({ "old_name": "x", "new_name": "y" }), -2, "Lvol store x not found").await;
        e.refused(rename, json!({ "old_name": "a", "new_name": "b" }), -32602, "File exists").await;
        e.ok("bdev_lvol_create", json!({ "lvs_name": "a", "lvol_name": "v", "size_in_mib": 1 })).await;
        assert_eq!(e.ok(rename, json!({ "old_name": "a", "new_name": "c" })).await, json!(true));
        assert!(e.app.registry().find("c/v").is_some() && e.app.registry().find("a/v").is_none());

        let list = "bdev_lvol_get_lvstores";
        e.refused(list, json!({}), -22, "Invalid argument").await;
        e.refused(list, json!({ "uuid": uuid, "lvs_name": "c" }), -22, "Invalid argument").await;
        e.refused(list, json!({ "lvs_name": "a" }), -19, "No such device").await;
        let stores = e.ok(list, json!({ "uuid": uuid })).await;
        let members: Vec<_> = stores[0].as_object().unwrap().keys().map(String::as_str).collect();
        assert_eq!(
            members,
            [
                "uuid",
                "name",
                "base_bdev",
                "total_data_clusters",
                "free_clusters",
                "block_size",
                "cluster_size",
                "max_growable_size"
            ]
        );
        assert_eq!((&stores[0]["name"], &stores[0]["base_bdev"]), (&json!("c"), &json!("M0")));
        assert_eq!(e.ok(list, Value::Null).await.as_array().unwrap().len(), 2);

        let delete = "bdev_lvol_delete_lvstore";
        e.refused(delete, json!({}), -22, "Invalid argument").await;
        e.refused(delete, json!({ "lvs_name": "a" }), -19, "No such device").await;
        assert_eq!(e.ok(delete, json!({ "lvs_name": "c" })).await, json!(true));
        assert!(e.app.registry().find("c/v").is_none());
        assert_eq!(e.ok("bdev_get_bdevs", json!({ "name": "M0" })).await[0]["claimed"], json!(false));
        e.ok(method, create("M0", "a", json!({}))).await;
    });
}

#[test]
fn volumes_are_made_described_and_refused() {
    engine(|e| async move {
        e.store(16).await;
        let create = |more: Value| {
            let mut params = json!({ "lvol_name": "v", "size_in_mib": 1, "lvs_name": "lvs" });
            for (key, value) in more.as_object().unwrap() {
                params[key.as_str()] = value.clone();
            }
            params
        };
        let method = "bdev_lvol_create";
        e.refused(method, create(json!({ "lvs_name": "x" })), -19, "No such device").await;
        e.refused(method, json!({ "lvol_name": "v", "size_in_mib": 1 }), -22, "Invalid argument").await;
        e.refused(method, create(json!({ "lvol_name": "" })), -22, "Invalid argument").await;
        e.refused(method, create(json!({ "size_in_mib": 100 })), -32602, "No space left on device").await;
        e.refused(method, create(json!({ "size_in_mib": "1" })), -32603, "spdk_json_decode_object failed").await;
        let uuid = e.ok(method, create(json!({ "thin_provision": true, "clear_method": "unmap" }))).await;
        e.refused(method, create(json!({})), -17, "File exists").await;

        let device = e.ok("bdev_get_bdevs", json!({ "name": "lvs/v" })).await[0].clone();
        assert_eq!(device["name"], uuid);
        assert_eq!(device["uuid"], uuid);
        assert_eq!(device["aliases"], json!(["lvs/v"]));
        assert_eq!(device["product_name"], "Logical Volume");
        assert_eq!(device["num_blocks"], MIB / BLOCK);
        let lvol = &device["driver_specific"]["lvol"];
        assert_eq!(lvol["lvol_store_uuid"], e.lvstore().await["uuid"]);
        assert_eq!((&lvol["base_bdev"], &lvol["thin_provision"]), (&json!("M0"), &json!(true)));
        assert_eq!(e.write(DATA[0], "v", 0, pattern(1, 4096)).await, Status::SUCCESS);

        let snapshot = "bdev_lvol_snapshot";
        e.refused(snapshot, json!({ "lvol_name": "M0", "snapshot_name": "s" }), -19, "No such device").await;
        e.refused(snapshot, json!({ "lvol_name": "lvs/v", "snapshot_name": "v" }), -32602, "File exists").await;
        e.snapshot("v", "s").await;
        e.refused(snapshot, json!({ "lvol_name": "lvs/s", "snapshot_name": "t" }), -32602, "Invalid argument").await;
        let clone = "bdev_lvol_clone";
        e.refused(clone, json!({ "snapshot_name": "lvs/v", "clone_name": "c" }), -32602, "Invalid argument").await;
        e.refused(clone, json!({ "snapshot_name": "lvs/x", "clone_name": "c" }), -19, "No such device").await;
        e.clone("s", "c").await;
        let s = e.ok("bdev_get_bdevs", json!({ "name": "lvs/s" })).await[0].clone();
        assert_eq!(s["driver_specific"]["lvol"]["clones"], json!(["v", "c"]));
        assert_eq!(s["supported_io_types"]["write"], false);
        let c = e.ok("bdev_get_bdevs", json!({ "name": "lvs/c" })).await[0].clone();
        assert_eq!(c["driver_specific"]["lvol"]["base_snapshot"], "s");

        e.refused("bdev_lvol_delete", json!({ "name": "lvs/s" }), -32603, "Operation not permitted").await;
        assert!(e.app.registry().find("lvs/s").is_some());
        e.refused("bdev_lvol_delete", json!({ "name": "lvs/x" }), -19, "No such device").await;
        e.refused("bdev_lvol_rename", json!({ "old_name": "lvs/c", "new_name": "v" }), -32602, "File exists").await;
        e.refused("bdev_lvol_rename", json!({ "old_name": "lvs/x", "new_name": "v" }), -19, "No such device").await;
        e.refused("bdev_lvol_resize", json!({ "name": "lvs/s", "size_in_mib": 2 }), -32602, "not permitted").await;
        e.refused("bdev_lvol_inflate", json!({ "name": "lvs/x" }), -19, "No such device").await;
        e.ok("bdev_lvol_set_read_only", json!({ "name": "lvs/c" })).await;
        let status = e.write(DATA[1], "c", 0, pattern(2, 512)).await;
        assert!(!status.is_success());
        e.ok("bdev_lvol_resize", json!({ "name": "lvs/v", "size_in_mib": 3 })).await;
        assert_eq!(e.entry("lvs/v").bdev.num_blocks(), 3 * MIB as u64 / 512);
        e.ok("bdev_lvol_resize", json!({ "name": "lvs/v", "size_in_mib": 1 })).await;
        assert_eq!(e.entry("lvs/v").bdev.num_blocks(), MIB as u64 / 512);

        let space = e.ok("addax_lvol_get_space", json!({ "name": "lvs/c" })).await;
        assert_eq!(space[0]["shared"], CLUSTER);
        assert_eq!(space[0]["allocated"], 0);
    });
}

#[test]
fn shallow_copies_run_in_the_background_and_are_forgotten_once_told() {
    engine(|e| async move {
        e.store(32).await;
        e.malloc("T", 4).await;
        e.malloc("small", 1).await;
        e.create("v", 4, true).await;
        let bytes = pattern(3, 2 * CLUSTER);
        assert_eq!(e.write(DATA[0], "v", 5 * CLUSTER_BLOCKS, bytes.clone()).await, Status::SUCCESS);
        e.snapshot("v", "s").await;
        let begin = |source: &str, target: &str| json!({ "src_lvol_name": source, "dst_bdev_name": target });
        let method = "bdev_lvol_start_shallow_copy";
        e.refused(method, begin("lvs/x", "T"), -19, "No such device").await;
        e.refused(method, begin("lvs/s", "x"), -32602, "No such device").await;
        e.refused(method, begin("lvs/s", "M0"), -32602, "Operation not permitted").await;
        for (source, target, outcome) in
            [("lvs/s", "T", "complete"), ("lvs/v", "T", "error"), ("lvs/s", "small", "error")]
        {
            let id = e.ok(method, begin(source, target)).await["operation_id"].clone();
            let mut state = json!(null);
            while state.is_null() || state["state"] == "in progress" {
                e.app.core().sleep(crate::reactor::driver::NANOS_PER_MS).await;
                state = e.ok("bdev_lvol_check_shallow_copy", json!({ "operation_id": id })).await;
            }
            assert_eq!(state["state"], outcome, "{source} to {target}: {state}");
            let again = json!({ "operation_id": id });
            e.refused("bdev_lvol_check_shallow_copy", again, -19, "No such device").await;
        }
        let entry = e.entry("T");
        let read = e.app.core().call_async(DATA[0], move |core| {
            let (core, chan) = (core.clone(), entry.open(core).unwrap());
            async move { get(&core, &chan, 5 * CLUSTER_BLOCKS, 2 * CLUSTER).await }
        });
        assert_eq!(read.await.unwrap().unwrap(), bytes);
    });
}

#[test]
fn parents_can_be_changed() {
    engine(|e| async move {
        e.store(32).await;
        e.create("v", 1, true).await;
        assert_eq!(e.write(DATA[0], "v", 0, pattern(1, CLUSTER)).await, Status::SUCCESS);
        e.snapshot("v", "s1").await;
        assert_eq!(e.write(DATA[0], "v", 0, pattern(2, CLUSTER)).await, Status::SUCCESS);
        e.snapshot("v", "s2").await;
        e.clone("s2", "c").await;
        assert_eq!(e.read(DATA[1], "c", 0, CLUSTER).await, pattern(2, CLUSTER));
        e.ok("bdev_lvol_set_parent", json!({ "lvol_name": "lvs/c", "parent_name": "lvs/s1" })).await;
        assert_eq!(e.read(DATA[1], "c", 0, CLUSTER).await, pattern(1, CLUSTER));
        assert_eq!(
            e.ok("bdev_get_bdevs", json!({ "name": "lvs/c" })).await[0]["driver_specific"]["lvol"]["base_snapshot"],
            "s1"
        );
        e.malloc("E", 1).await;
        e.ok("bdev_lvol_set_parent_bdev", json!({ "lvol_name": "lvs/c", "parent_name": "E" })).await;
        assert_eq!(e.read(DATA[1], "c", 0, CLUSTER).await, vec![0; CLUSTER]);
        assert_eq!(e.lvol("c").await["is_esnap_clone"], true);
        let method = "bdev_lvol_set_parent_bdev";
        e.refused(method, json!({ "lvol_name": "lvs/c", "parent_name": "x" }), -32602, "No such device").await;
        e.refused("bdev_lvol_set_parent", json!({ "lvol_name": "lvs/c", "parent_name": "M0" }), -19, "No such device")
            .await;
    });
}
