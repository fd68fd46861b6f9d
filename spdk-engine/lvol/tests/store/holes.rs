//! Holes read as zeroes on every kind of disk, also where other data was before.

use lvol_core::Lvol;
use lvol_core::testing::{Fill, Unmapped};
use uuid::Uuid;

use crate::space::{CLUSTER, disk, format, options};
use crate::support::{load, on};

const DISKS: [(Unmapped, Fill); 5] = [
    (Unmapped::Zeroes, Fill::Zeroes),
    (Unmapped::Zeroes, Fill::Junk(3)),
    (Unmapped::Old, Fill::Junk(3)),
    (Unmapped::Junk, Fill::Junk(3)),
    (Unmapped::Unsupported, Fill::Junk(3)),
];

async fn all(lvol: &Lvol) -> Vec<u8> {
    lvol.read(0, usize::try_from(lvol.size_bytes()).unwrap()).await.unwrap()
}

/// Everything is zero but for the given runs (offset, length, byte).
async fn only(lvol: &Lvol, runs: &[(u64, u64, u8)], when: &str) {
    let mut expected = vec![0; usize::try_from(lvol.size_bytes()).unwrap()];
    for (offset, len, byte) in runs {
        expected[usize::try_from(*offset).unwrap()..usize::try_from(offset + len).unwrap()].fill(*byte);
    }
    let found = all(lvol).await;
    if let Some(at) = (0..found.len()).find(|at| found[*at] != expected[*at]) {
        panic!("{when}: byte {at} of {} is {} in place of {}", lvol.info().name, found[at], expected[at]);
    }
}

#[test]
fn fresh_lvols_read_as_zeroes_around_what_was_written() {
    for (unmapped, fill) in DISKS {
        let when = format!("{unmapped:?}, {fill:?}");
        let disk = disk(60, unmapped, fill);
        on(&disk, async {
            let store = format(&disk).await;
            let thin = store.create(options("thin", 8, true)).await.unwrap();
            let thick = store.create(options("thick", 8, false)).await.unwrap();
            for lvol in [&thin, &thick] {
                only(lvol, &[], &when).await;
                lvol.write(CLUSTER + 1024, &[7; 512]).await.unwrap();
                lvol.write(3 * CLUSTER - 512, &[8; 1024]).await.unwrap();
                only(lvol, &[(CLUSTER + 1024, 512, 7), (3 * CLUSTER - 512, 1024, 8)], &when).await;
            }
            thick.resize(12 * CLUSTER).await.unwrap();
            only(&thick, &[(CLUSTER + 1024, 512, 7), (3 * CLUSTER - 512, 1024, 8)], &when).await;
            drop((thin, thick, store));
            let store = load(&disk).await;
            for name in ["thin", "thick"] {
                let lvol = store.lvol_by_name(name).unwrap();
                only(&lvol, &[(CLUSTER + 1024, 512, 7), (3 * CLUSTER - 512, 1024, 8)], &when).await;
            }
            store.unload().await.unwrap();
        });
    }
}

#[test]
fn clusters_that_are_used_again_show_nothing_of_their_former_content() {
    for (unmapped, fill) in DISKS {
        for way in ["delete", "unmap", "zeroes", "shrink", "stop after unmap"] {
            let when = format!("{way}, {unmapped:?}, {fill:?}");
            let disk = disk(24, unmapped, fill);
            on(&disk, async {
                let store = format(&disk).await;
                let room = store.info().free_clusters;
                let first = store.create(options("first", room, true)).await.unwrap();
                let whole = usize::try_from(CLUSTER).unwrap();
                for cluster in 0..room {
                    first.write(cluster * CLUSTER, &vec![0xEE; whole]).await.unwrap();
                }
                match way {
                    "delete" => first.delete().await.unwrap(),
                    "zeroes" => first.write_zeroes(0, room * CLUSTER).await.unwrap(),
                    "shrink" => {
                        first.resize(CLUSTER).await.unwrap();
                        first.resize(room * CLUSTER).await.unwrap();
                        only(&first, &[(0, CLUSTER, 0xEE)], &when).await;
                        first.unmap(0, CLUSTER).await.unwrap();
                    }
                    _ => first.unmap(0, room * CLUSTER).await.unwrap(),
                }
                if way != "delete" {
                    only(&first, &[], &when).await;
                }
                drop(first);
                let store = if way.starts_with("stop") {
                    store.unload().await.unwrap();
                    load(&disk).await
                } else {
                    store
                };
                assert_eq!(store.info().free_clusters, room, "{when}");
                let second = store.create(options("second", room / 2, true)).await.unwrap();
                for cluster in 0..room / 2 {
                    second.write(cluster * CLUSTER + 4096, &[1; 512]).await.unwrap();
                }
                let runs: Vec<(u64, u64, u8)> = (0..room / 2).map(|c| (c * CLUSTER + 4096, 512, 1)).collect();
                only(&second, &runs, &when).await;
                let third = store.create(options("third", store.info().free_clusters, false)).await.unwrap();
                only(&third, &[], &when).await;
                store.unload().await.unwrap();
            });
        }
    }
}

#[test]
fn what_a_clone_gave_up_reads_as_zeroes_and_not_as_its_parent() {
    for (unmapped, fill) in DISKS {
        let when = format!("{unmapped:?}, {fill:?}");
        let disk = disk(60, unmapped, fill);
        on(&disk, async {
            let store = format(&disk).await;
            let lvol = store.create(options("a", 6, true)).await.unwrap();
            lvol.write(0, &vec![5; usize::try_from(6 * CLUSTER).unwrap()]).await.unwrap();
            let snapshot = lvol.snapshot("s", Uuid::from_u128(2)).await.unwrap();
            let clone = snapshot.clone_to("c", Uuid::from_u128(3)).await.unwrap();
            clone.write(CLUSTER, &[6; 512]).await.unwrap();
            clone.unmap(0, CLUSTER).await.unwrap();
            clone.unmap(CLUSTER, 512).await.unwrap();
            clone.unmap(2 * CLUSTER + 512, CLUSTER).await.unwrap();
            clone.write_zeroes(5 * CLUSTER, CLUSTER).await.unwrap();
            let runs = [(CLUSTER + 512, CLUSTER, 5), (3 * CLUSTER + 512, 2 * CLUSTER - 512, 5)];
            only(&clone, &runs, &when).await;
            only(&snapshot, &[(0, 6 * CLUSTER, 5)], &when).await;
            clone.inflate(&|_| {}).await.unwrap();
            only(&clone, &runs, &when).await;
            store.unload().await.unwrap();
            let store = load(&disk).await;
            only(&store.lvol_by_name("c").unwrap(), &runs, &when).await;
            store.unload().await.unwrap();
        });
    }
}
