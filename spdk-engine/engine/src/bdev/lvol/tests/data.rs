//! What is read is what was written, through maps, chains and pieces.

use nvme_wire::Status;
use serde_json::json;

use super::*;

#[test]
fn a_thin_volume_takes_clusters_as_it_is_written() {
    engine(|e| async move {
        e.store(16).await;
        e.create("v", 4, true).await;
        assert_eq!(e.read(DATA[0], "v", 0, 3 * CLUSTER).await, vec![0; 3 * CLUSTER]);
        assert_eq!(e.lvol("v").await["num_allocated_clusters"], 0);
        let bytes = pattern(1, 4096);
        for core in DATA {
            let lba = CLUSTER_BLOCKS * u64::from(core.0) + 8;
            assert_eq!(e.write(core, "v", lba, bytes.clone()).await, Status::SUCCESS);
            assert_eq!(e.read(core, "v", lba, 4096).await, bytes);
            assert_eq!(e.read(core, "v", lba - 8, 4096).await, vec![0; 4096], "the rest of a new cluster");
        }
        assert_eq!(e.lvol("v").await["num_allocated_clusters"], 2);
        // Across clusters, some there and some not, in buffers that end elsewhere.
        let long = pattern(2, 4 * CLUSTER);
        assert_eq!(e.write(DATA[1], "v", CLUSTER_BLOCKS / 2, long.clone()).await, Status::SUCCESS);
        assert_eq!(e.read(DATA[0], "v", CLUSTER_BLOCKS / 2, long.len()).await, long);
        assert_eq!(e.lvol("v").await["num_allocated_clusters"], 5);
        assert_eq!(e.read(DATA[0], "v", 0, CLUSTER / 2).await, vec![0; CLUSTER / 2]);
    });
}

#[test]
fn a_thick_volume_has_its_clusters_and_reads_as_zeroes() {
    engine(|e| async move {
        e.store(16).await;
        e.create("v", 4, false).await;
        assert_eq!(e.lvol("v").await["num_allocated_clusters"], 64);
        assert_eq!(e.read(DATA[0], "v", 0, 4 * MIB).await, vec![0; 4 * MIB]);
        let bytes = pattern(3, MIB);
        assert_eq!(e.write(DATA[1], "v", 100, bytes.clone()).await, Status::SUCCESS);
        assert_eq!(e.read(DATA[0], "v", 100, MIB).await, bytes);
        let (end, after) = (4 * MIB as u64 / 512 - 1, pattern(4, 1024));
        assert!(e.write(DATA[0], "v", end, after).await.is(Status::LBA_OUT_OF_RANGE));
    });
}

#[test]
fn snapshots_and_clones_keep_what_they_show() {
    engine(|e| async move {
        e.store(32).await;
        e.create("v", 4, true).await;
        let (one, two, three) = (pattern(1, MIB), pattern(2, CLUSTER), pattern(3, 4096));
        assert_eq!(e.write(DATA[0], "v", 0, one.clone()).await, Status::SUCCESS);
        e.snapshot("v", "s1").await;
        assert_eq!(e.lvol("v").await["num_allocated_clusters"], 0);
        assert_eq!(e.read(DATA[1], "v", 0, MIB).await, one);
        assert_eq!(e.write(DATA[1], "v", CLUSTER_BLOCKS, two.clone()).await, Status::SUCCESS);
        e.snapshot("v", "s2").await;
        // A part of a cluster: the rest is copied from the chain.
        assert_eq!(e.write(DATA[0], "v", 2 * CLUSTER_BLOCKS + 3, three.clone()).await, Status::SUCCESS);
        let mut second = one.clone();
        second[CLUSTER..2 * CLUSTER].copy_from_slice(&two);
        let mut now = second.clone();
        let at = 2 * CLUSTER + 3 * BLOCK;
        now[at..at + 4096].copy_from_slice(&three);
        e.clone("s1", "c").await;
        for core in DATA {
            assert_eq!(e.read(core, "s1", 0, MIB).await, one);
            assert_eq!(e.read(core, "s2", 0, MIB).await, second);
            assert_eq!(e.read(core, "v", 0, MIB).await, now);
            assert_eq!(e.read(core, "c", 0, MIB).await, one);
        }
        let refused = e.write(DATA[0], "s1", 0, three.clone()).await;
        assert!(!refused.is_success(), "a snapshot was written");
        assert_eq!(e.write(DATA[0], "c", 0, three.clone()).await, Status::SUCCESS);
        assert_eq!(e.read(DATA[1], "s1", 0, MIB).await, one);
        // The clone of s2 inherits; what is seen stays.
        e.delete("s2").await;
        assert_eq!(e.read(DATA[0], "v", 0, MIB).await, now);
        e.ok("bdev_lvol_inflate", json!({ "name": "lvs/v" })).await;
        e.ok("bdev_lvol_decouple_parent", json!({ "name": "lvs/c" })).await;
        e.delete("s1").await;
        assert_eq!(e.read(DATA[1], "v", 0, MIB).await, now);
        assert_eq!(e.read(DATA[1], "c", 4096 / 512, MIB - 4096).await, one[4096..]);
    });
}

#[test]
fn unmapped_and_zeroed_ranges_read_as_zeroes_and_give_clusters_back() {
    engine(|e| async move {
        e.store(16).await;
        e.create("v", 2, true).await;
        for op in [IoOp::Unmap, IoOp::WriteZeroes] {
            let bytes = pattern(5, 2 * MIB);
            assert_eq!(e.write(DATA[0], "v", 0, bytes.clone()).await, Status::SUCCESS);
            assert_eq!(e.lvol("v").await["num_allocated_clusters"], 32);
            // From the middle of a cluster to the middle of another.
            let (lba, blocks) = (CLUSTER_BLOCKS / 2, 3 * CLUSTER_BLOCKS);
            assert_eq!(e.plain(DATA[1], "v", op, lba, blocks).await, Status::SUCCESS);
            let mut expected = bytes;
            expected[CLUSTER / 2..CLUSTER / 2 + 3 * CLUSTER].fill(0);
            assert_eq!(e.read(DATA[0], "v", 0, 2 * MIB).await, expected, "{op:?}");
            // A part of one cluster.
            assert_eq!(e.plain(DATA[0], "v", op, 10 * CLUSTER_BLOCKS + 1, 2).await, Status::SUCCESS);
            expected[10 * CLUSTER + 512..10 * CLUSTER + 1536].fill(0);
            assert_eq!(e.read(DATA[1], "v", 0, 2 * MIB).await, expected, "{op:?}");
            assert_eq!(e.plain(DATA[1], "v", IoOp::Unmap, 0, 2 * MIB as u64 / 512).await, Status::SUCCESS);
            assert_eq!(e.lvol("v").await["num_allocated_clusters"], 0);
            assert_eq!(e.read(DATA[0], "v", 0, 2 * MIB).await, vec![0; 2 * MIB]);
        }
    });
}

#[test]
fn unmapping_a_clone_hides_its_parent() {
    engine(|e| async move {
        e.store(16).await;
        e.create("v", 1, true).await;
        let bytes = pattern(6, MIB);
        assert_eq!(e.write(DATA[0], "v", 0, bytes.clone()).await, Status::SUCCESS);
        e.snapshot("v", "s").await;
        assert_eq!(e.plain(DATA[0], "v", IoOp::Unmap, 0, 2 * CLUSTER_BLOCKS + 5).await, Status::SUCCESS);
        let mut expected = bytes.clone();
        expected[..2 * CLUSTER + 5 * 512].fill(0);
        assert_eq!(e.read(DATA[1], "v", 0, MIB).await, expected);
        assert_eq!(e.read(DATA[1], "s", 0, MIB).await, bytes);
    });
}

#[test]
fn a_full_store_says_so_and_goes_on_once_there_is_room() {
    engine(|e| async move {
        e.store(8).await;
        e.create("full", 64, true).await;
        e.create("other", 1, true).await;
        assert_eq!(e.write(DATA[0], "other", 0, pattern(1, 4096)).await, Status::SUCCESS);
        let free = e.lvstore().await["free_clusters"].as_u64().unwrap();
        for cluster in 0..free {
            let status = e.write(DATA[0], "full", cluster * CLUSTER_BLOCKS, pattern(cluster, 4096)).await;
            assert_eq!(status, Status::SUCCESS, "cluster {cluster} of {free}");
        }
        for core in DATA {
            let status = e.write(core, "full", free * CLUSTER_BLOCKS, pattern(9, 4096)).await;
            assert!(status.is(Status::CAPACITY_EXCEEDED), "{status}");
        }
        // What has its clusters goes on.
        assert_eq!(e.write(DATA[1], "full", 8, pattern(7, 4096)).await, Status::SUCCESS);
        assert_eq!(e.write(DATA[1], "other", 8, pattern(7, 4096)).await, Status::SUCCESS);
        assert_eq!(e.plain(DATA[0], "full", IoOp::Unmap, 0, CLUSTER_BLOCKS).await, Status::SUCCESS);
        let again = e.write(DATA[1], "full", free * CLUSTER_BLOCKS, pattern(9, 4096)).await;
        assert_eq!(again, Status::SUCCESS);
        assert_eq!(e.read(DATA[0], "full", free * CLUSTER_BLOCKS, 4096).await, pattern(9, 4096));
    });
}

#[test]
fn forced_unit_access_and_flush_are_served() {
    engine(|e| async move {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk");
        std::fs::File::create(&path).unwrap().set_len(16 << 20).unwrap();
        e.ok("bdev_uring_create", json!({ "name": "F", "filename": path, "block_size": BLOCK })).await;
        let params = json!({ "bdev_name": "F", "lvs_name": "lvs", "cluster_sz": CLUSTER });
        e.ok("bdev_lvol_create_lvstore", params).await;
        e.create("v", 4, true).await;
        let status = e.on(DATA[0], "v", |core, chan| async move {
            let fua = IoOp::Write { fua: true };
            let mut all = vec![put(&core, &chan, fua, 0, &pattern(1, 4096)).await];
            all.push(put(&core, &chan, fua, 8, &pattern(2, 4096)).await);
            all.push(put(&core, &chan, fua, CLUSTER_BLOCKS - 8, &pattern(3, 8192)).await);
            all.push(start(&core, &chan, IoOp::Flush, 0, 0, Bufs::new()).await.unwrap());
            all
        });
        assert_eq!(status.await, vec![Status::SUCCESS; 4]);
        assert_eq!(e.read(DATA[1], "v", CLUSTER_BLOCKS - 8, 8192).await, pattern(3, 8192));
    });
}
