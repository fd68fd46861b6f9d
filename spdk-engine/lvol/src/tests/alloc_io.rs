use super::*;
use futures::future::join_all;
use std::{future::poll_fn, task::Poll};

/// Lets others run once.
async fn pause() {
    let mut waited = false;
    poll_fn(|context| {
        if std::mem::replace(&mut waited, true) {
            return Poll::Ready(());
        }
        context.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

#[test]
fn many_first_writes_at_once_share_their_metadata_write() {
    run(async {
        let device = Rc::new(MemoryDevice::new(SIZE).with_waits());
        let store = format(&device).await;
        let a = create(&store, "a", 100, true).await;
        a.write(0, &[1; 512]).await.unwrap();
        let before = device.counts();
        let data = [2; 512];
        let writes = (1..41).map(|n| a.write(n * CLUSTER, &data));
        join_all(writes).await.into_iter().for_each(|r| r.unwrap());
        let after = device.counts();
        let metadata = after.writes - before.writes - 40;
        assert!(metadata <= 2, "{metadata} metadata writes for 40 clusters");
        assert_eq!(a.info().allocated_clusters, 41);
        let same = (0..16).map(|n| a.write(50 * CLUSTER + n * 512, &data));
        join_all(same).await.into_iter().for_each(|r| r.unwrap());
        assert_eq!(a.info().allocated_clusters, 42);
        assert_no_leak(&device, &store).await;
    });
}

#[test]
fn holes_read_as_zeroes_whatever_the_device_held() {
    for device in [
        MemoryDevice::new(SIZE).without_unmap(),
        MemoryDevice::new(SIZE).with_unmap_rubbish(),
        MemoryDevice::new(SIZE).with_unmap_rubbish().with_write_cache(),
    ] {
        run(async {
            device.fill(0, SIZE, 0xaa);
            let device = Rc::new(device);
            let store = format(&device).await;
            let a = create(&store, "a", 10, true).await;
            a.write(512, &[1; 512]).await.unwrap();
            let mut expected = vec![0; CLUSTER as usize];
            expected[512..1024].fill(1);
            assert_eq!(a.read(0, CLUSTER as usize).await.unwrap(), expected);
            a.unmap(0, CLUSTER).await.unwrap();
            assert_eq!(a.info().allocated_clusters, 0);
            a.write(512, &[1; 512]).await.unwrap();
            assert_eq!(a.read(0, CLUSTER as usize).await.unwrap(), expected);
            let thick = create(&store, "thick", 5, false).await;
            assert_eq!(thick.read(0, 5 * CLUSTER as usize).await.unwrap(), vec![0; 5 * CLUSTER as usize]);
            thick.write(0, &vec![3; CLUSTER as usize]).await.unwrap();
            thick.unmap(0, CLUSTER).await.unwrap();
            assert_eq!(thick.info().allocated_clusters, 5);
            assert_eq!(thick.read(0, CLUSTER as usize).await.unwrap(), vec![0; CLUSTER as usize]);
        });
    }
}

#[test]
fn unmap_on_a_clone_hides_its_parent() {
    run(async {
        let device = Rc::new(MemoryDevice::new(SIZE));
        let store = format(&device).await;
        let a = create(&store, "a", 10, true).await;
        a.write(0, &vec![5; 3 * CLUSTER as usize]).await.unwrap();
        let snapshot = a.snapshot("s", uuid(1)).await.unwrap();
        a.unmap(0, CLUSTER).await.unwrap();
        a.write_zeroes(CLUSTER + 512, 512).await.unwrap();
        a.unmap(5 * CLUSTER, CLUSTER).await.unwrap();
        assert_eq!(a.info().allocated_clusters, 2);
        let mut expected = vec![5; 3 * CLUSTER as usize];
        expected[..CLUSTER as usize].fill(0);
        expected[CLUSTER as usize + 512..CLUSTER as usize + 1024].fill(0);
        assert_eq!(a.read(0, expected.len()).await.unwrap(), expected);
        assert_eq!(snapshot.read(0, expected.len()).await.unwrap(), vec![5; expected.len()]);
        assert_eq!(a.space(), SpaceUse { allocated: 2, shared: 1, exclusive: 2 });
        assert_eq!(snapshot.space(), SpaceUse { allocated: 3, shared: 0, exclusive: 2 });
    });
}

#[test]
fn a_full_store_refuses_and_recovers() {
    run(async {
        let device = Rc::new(MemoryDevice::new(SIZE));
        let store = format(&device).await;
        let free = store.info().free_clusters;
        let big = create(&store, "big", free - 2, false).await;
        let a = create(&store, "a", 10, true).await;
        let error = a.write(0, &vec![1; 3 * CLUSTER as usize]).await.unwrap_err();
        assert_eq!(error.errno(), 28);
        assert_eq!(store.info().free_clusters, 0);
        a.write(0, &[1; 512]).await.unwrap();
        assert_eq!(a.write(5 * CLUSTER, &[1; 512]).await.unwrap_err().errno(), 28);
        big.write(0, &[2; 512]).await.unwrap();
        big.delete().await.unwrap();
        a.write(5 * CLUSTER, &[1; 512]).await.unwrap();
        assert_no_leak(&device, &store).await;
    });
}

#[test]
fn unmap_and_write_of_one_cluster_at_once_end_as_either() {
    run(async {
        let device = Rc::new(MemoryDevice::new(SIZE).with_waits().with_write_cache());
        let store = format(&device).await;
        let a = create(&store, "a", 4, true).await;
        for _ in 0..20 {
            let data = vec![1; CLUSTER as usize];
            let (w, u, v) = futures::join!(a.write(0, &data), a.unmap(0, CLUSTER), a.write(CLUSTER, &data[..512]));
            w.and(u).and(v).unwrap();
            let back = a.read(0, CLUSTER as usize).await.unwrap();
            assert!(back == data || back.iter().all(|b| *b == 0));
        }
        assert_no_leak(&device, &store).await;
    });
}

#[test]
fn an_unmap_beside_a_growth_stays_an_unmap() {
    run(async {
        let device = Rc::new(MemoryDevice::new(SIZE).with_waits().with_write_cache());
        let store = format(&device).await;
        let a = create(&store, "a", 10, true).await;
        for round in 1..20 {
            a.write(0, &vec![1; 4 * CLUSTER as usize]).await.unwrap();
            let late = async {
                // The unmap begins somewhere within the growth.
                for _ in 0..round {
                    pause().await;
                }
                a.unmap(CLUSTER, CLUSTER).await
            };
            let (grown, unmapped) = futures::join!(a.resize((10 + round) * CLUSTER), late);
            grown.and(unmapped).unwrap();
            assert_eq!(a.info().allocated_clusters, 3);
            assert_eq!(a.read(CLUSTER, CLUSTER as usize).await.unwrap(), vec![0; CLUSTER as usize]);
            assert_no_leak(&device, &store).await;
        }
    });
}
