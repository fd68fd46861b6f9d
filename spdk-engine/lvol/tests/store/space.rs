//! A store that runs full: the writer is told, others go on, and space that is freed can be used again.

use std::rc::Rc;

use futures::future::join_all;
use lvol_core::testing::{DiskFailure, Fill, PowerDisk, PowerOptions, Tear, Unmapped};
use lvol_core::{ClearMethod, CreateOptions, DeviceError, Error, FormatOptions, Lvol, NoHooks, Store};
use uuid::Uuid;

use crate::support::{load, on};

pub const CLUSTER: u64 = 32 << 10;

pub fn disk(clusters: u64, unmapped: Unmapped, fill: Fill) -> PowerDisk {
    PowerDisk::new(PowerOptions {
        size: clusters * CLUSTER,
        block_size: 512,
        write_cache: true,
        unmapped,
        fill,
        tear: Tear { coarse: 4096, coarse_until: u64::MAX, fine: 512 },
        seed: 11,
    })
}

pub async fn format(disk: &PowerDisk) -> Store {
    let mut options = FormatOptions::new("store", Uuid::from_u128(1));
    options.cluster_size = u32::try_from(CLUSTER).unwrap();
    Store::format(Rc::new(disk.clone()), Rc::new(NoHooks), options).await.unwrap()
}

pub fn options(name: &str, clusters: u64, thin: bool) -> CreateOptions {
    let uuid = Uuid::new_v5(&Uuid::NAMESPACE_OID, name.as_bytes());
    CreateOptions {
        name: name.to_owned(),
        uuid,
        size_bytes: clusters * CLUSTER,
        thin,
        clear_method: ClearMethod::Default,
    }
}

async fn write(lvol: &Lvol, cluster: u64, byte: u8) -> Result<(), Error> {
    lvol.write(cluster * CLUSTER + 512, &[byte; 512]).await
}

async fn read(lvol: &Lvol, cluster: u64) -> u8 {
    lvol.read(cluster * CLUSTER + 512, 512).await.unwrap()[0]
}

#[test]
fn the_writer_is_told_others_go_on_and_freed_space_is_used_again() {
    let disk = disk(40, Unmapped::Zeroes, Fill::Zeroes);
    on(&disk, async {
        let store = format(&disk).await;
        let a = store.create(options("a", 100, true)).await.unwrap();
        let b = store.create(options("b", 100, true)).await.unwrap();
        for cluster in 0..4 {
            write(&b, cluster, 2).await.unwrap();
        }
        let room = store.info().free_clusters;
        for cluster in 0..room {
            write(&a, cluster, 1).await.unwrap();
        }
        assert_eq!(store.info().free_clusters, 0);
        let full = write(&a, room, 1).await.unwrap_err();
        assert!(matches!(full, Error::NoSpace(_)), "{full}");
        assert_eq!(full.errno(), 28);
        assert_eq!(read(&a, room).await, 0, "what was not written is zero");
        assert!(matches!(write(&b, 50, 2).await, Err(Error::NoSpace(_))));

        // What has its clusters goes on, and what needs none.
        write(&a, 0, 3).await.unwrap();
        write(&b, 3, 4).await.unwrap();
        a.flush().await.unwrap();
        b.rename("renamed").await.unwrap();
        let Err(thick) = store.create(options("thick", 1, false)).await else { panic!("there is no cluster for it") };
        assert!(matches!(thick, Error::NoSpace(_)), "{thick}");
        assert!(store.lvol_by_name("thick").is_none(), "a refused creation leaves nothing");

        b.unmap(0, CLUSTER).await.unwrap();
        assert_eq!(store.info().free_clusters, 1);
        write(&a, room, 5).await.unwrap();
        assert_eq!((read(&a, room).await, read(&b, 0).await, read(&b, 3).await), (5, 0, 4));
        b.delete().await.unwrap();
        assert_eq!(store.info().free_clusters, 3);
        store.unload().await.unwrap();
    });
}

#[test]
fn of_writers_at_the_same_time_as_many_succeed_as_there_are_clusters() {
    let disk = disk(30, Unmapped::Zeroes, Fill::Zeroes);
    on(&disk, async {
        let store = format(&disk).await;
        let lvol = store.create(options("a", 200, true)).await.unwrap();
        let room = store.info().free_clusters;
        let results = join_all((0..60).map(|cluster| write(&lvol, cluster, 9))).await;
        let succeeded = results.iter().filter(|result| result.is_ok()).count() as u64;
        assert!(results.iter().all(|result| matches!(result, Ok(()) | Err(Error::NoSpace(_)))), "{results:?}");
        assert_eq!((succeeded, store.info().free_clusters), (room, 0));
        for (cluster, result) in results.iter().enumerate() {
            assert_eq!(read(&lvol, cluster as u64).await, if result.is_ok() { 9 } else { 0 });
        }
        store.unload().await.unwrap();
    });
}

#[test]
fn copies_that_find_no_space_leave_the_lvol_as_it_was() {
    let disk = disk(40, Unmapped::Zeroes, Fill::Zeroes);
    on(&disk, async {
        let store = format(&disk).await;
        let lvol = store.create(options("a", 20, true)).await.unwrap();
        for cluster in 0..20 {
            write(&lvol, cluster, 1).await.unwrap();
        }
        let snapshot = lvol.snapshot("s", Uuid::from_u128(2)).await.unwrap();
        let room = store.info().free_clusters;
        assert!(room < 20, "{room}");
        assert!(matches!(lvol.inflate(&|_| {}).await, Err(Error::NoSpace(_))));
        assert!(matches!(lvol.decouple_parent(&|_| {}).await, Err(Error::NoSpace(_))));
        assert_eq!(lvol.info().parent, Some(snapshot.id()));
        for cluster in 0..store.info().free_clusters {
            write(&lvol, cluster, 2).await.unwrap();
        }
        assert!(matches!(write(&lvol, 19, 2).await, Err(Error::NoSpace(_))));
        assert_eq!((read(&lvol, 19).await, read(&snapshot, 19).await), (1, 1));
        assert_eq!((read(&lvol, 0).await, read(&snapshot, 0).await), (2, 1));
        lvol.delete().await.unwrap();
        assert_eq!(store.info().free_clusters, room);
        store.unload().await.unwrap();
    });
}

#[test]
fn metadata_pages_run_out_and_come_back() {
    let disk = disk(40, Unmapped::Zeroes, Fill::Zeroes);
    on(&disk, async {
        let store = format(&disk).await;
        let mut lvols = Vec::new();
        let error = loop {
            match store.create(options(&format!("lvol-{}", lvols.len()), 1, true)).await {
                Ok(lvol) => lvols.push(lvol),
                Err(error) => break error,
            }
            assert!(lvols.len() <= 40, "more lvols than metadata pages");
        };
        assert!(matches!(error, Error::NoSpace(_)), "{error}");
        assert_eq!(store.info().free_md_pages, 0);
        // No page is left for an extent page either.
        assert!(matches!(write(&lvols[1], 0, 1).await, Err(Error::NoSpace(_))));
        lvols.pop().unwrap().delete().await.unwrap();
        write(&lvols[1], 0, 1).await.unwrap();
        assert_eq!(read(&lvols[1], 0).await, 1);
        store.unload().await.unwrap();
    });
}

/// The disk itself is thin and has run full, or fails: only the request that met it fails.
#[test]
fn failures_of_the_disk_reach_the_request_that_met_them_and_no_other() {
    for failure in [DiskFailure::NoSpace, DiskFailure::Io] {
        let expected = DeviceError::from(failure);
        let disk = disk(60, Unmapped::Zeroes, Fill::Zeroes);
        on(&disk, async {
            let store = format(&disk).await;
            let lvol = store.create(options("a", 20, true)).await.unwrap();
            write(&lvol, 0, 1).await.unwrap();
            disk.fail_next(failure);
            assert_eq!(write(&lvol, 0, 2).await, Err(Error::Device(expected)));
            write(&lvol, 0, 3).await.unwrap();
            for cluster in 1..6 {
                disk.fail_next(failure);
                assert_eq!(write(&lvol, cluster, 2).await, Err(Error::Device(expected)), "cluster {cluster}");
                write(&lvol, cluster, 4).await.unwrap();
            }
            assert_eq!(lvol.info().allocated_clusters, 6);
            // What a failed write of metadata may have named stays reserved, but only until the next load.
            drop(lvol);
            store.unload().await.unwrap();
            let store = load(&disk).await;
            let info = store.info();
            assert_eq!(info.total_data_clusters - info.free_clusters, 6, "a failed write keeps no cluster");
            assert_eq!(read(&store.lvol_by_name("a").unwrap(), 5).await, 4);
            store.unload().await.unwrap();
        });
    }
}
