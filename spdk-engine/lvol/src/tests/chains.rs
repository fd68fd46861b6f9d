use super::*;

async fn content(lvol: &Lvol) -> Vec<u8> {
    lvol.read(0, lvol.size_bytes() as usize).await.unwrap()
}

/// A chain: base with 4 clusters written, two snapshots, something written between them.
async fn chain(store: &Store) -> (Lvol, Lvol, Lvol) {
    let a = create(store, "a", 8, true).await;
    a.write(0, &vec![1; 4 * CLUSTER as usize]).await.unwrap();
    let s1 = a.snapshot("s1", uuid(1)).await.unwrap();
    a.write(CLUSTER, &vec![2; 2 * CLUSTER as usize]).await.unwrap();
    let s2 = a.snapshot("s2", uuid(2)).await.unwrap();
    a.write(2 * CLUSTER, &vec![3; 512]).await.unwrap();
    (a, s1, s2)
}

#[test]
fn snapshots_keep_what_was_and_go_in_any_order() {
    for order in [["s1", "s2"], ["s2", "s1"]] {
        run(async {
            let device = Rc::new(MemoryDevice::new(SIZE));
            let store = format(&device).await;
            let (a, s1, s2) = chain(&store).await;
            assert_eq!(content(&s1).await[..CLUSTER as usize * 4], vec![1; 4 * CLUSTER as usize]);
            assert_eq!(s2.info().parent_name.as_deref(), Some("s1"));
            let mut before = content(&a).await;
            for name in order {
                store.lvol_by_name(name).unwrap().delete().await.unwrap();
                assert_eq!(content(&a).await, before);
                assert_no_leak(&device, &store).await;
                a.write(6 * CLUSTER, name.repeat(256).as_bytes()).await.unwrap();
                before[6 * CLUSTER as usize..][..512].copy_from_slice(name.repeat(256).as_bytes());
            }
            assert_eq!(a.info().parent, None);
            assert_eq!(a.info().allocated_clusters, 5);
            a.delete().await.unwrap();
            assert_eq!(store.info().free_clusters, store.info().total_data_clusters);
            assert_eq!(store.info().free_md_pages, store.info().total_md_pages - 1);
        });
    }
}

#[test]
fn inflate_and_decouple_keep_the_content() {
    run(async {
        let device = Rc::new(MemoryDevice::new(SIZE));
        let store = format(&device).await;
        let (a, s1, s2) = chain(&store).await;
        let before = content(&a).await;
        a.decouple_parent(&|_| ()).await.unwrap();
        assert_eq!(a.info().parent_name.as_deref(), Some("s1"));
        assert_eq!((content(&a).await, a.info().allocated_clusters), (before.clone(), 2));
        assert_no_leak(&device, &store).await;
        s2.delete().await.unwrap();
        let seen = std::cell::Cell::new(CopyProgress::default());
        a.inflate(&|p| seen.set(p)).await.unwrap();
        assert_eq!(seen.get(), CopyProgress { copied_clusters: 6, total_clusters: 6 });
        assert!(!a.info().thin);
        assert_eq!((content(&a).await, a.info().parent), (before, None));
        s1.delete().await.unwrap();
        assert_no_leak(&device, &store).await;
    });
}

#[test]
fn sizes_change_both_ways() {
    run(async {
        let device = Rc::new(MemoryDevice::new(SIZE));
        let store = format(&device).await;
        for thin in [true, false] {
            let a = create(&store, if thin { "thin" } else { "thick" }, 5, thin).await;
            a.write(4 * CLUSTER, &vec![1; CLUSTER as usize]).await.unwrap();
            for clusters in [9, 600, 513, 512, 100, 3, 0, 4] {
                a.resize(clusters * CLUSTER).await.unwrap();
                let info = a.info();
                assert_eq!(info.num_clusters, clusters);
                assert!(thin || info.allocated_clusters == clusters);
                if clusters > 5 {
                    let back = a.read(4 * CLUSTER, 2 * CLUSTER as usize).await.unwrap();
                    assert!(back[..CLUSTER as usize].iter().all(|b| *b == 1));
                    assert!(back[CLUSTER as usize..].iter().all(|b| *b == 0));
                }
                assert_no_leak(&device, &store).await;
            }
            a.resize(6 * CLUSTER).await.unwrap();
            assert_eq!(content(&a).await, vec![0; 6 * CLUSTER as usize], "what was cut off does not come back");
        }
    });
}

#[test]
fn a_grown_clone_inherits_pages_of_another_length() {
    run(async {
        let device = Rc::new(MemoryDevice::new(SIZE));
        let store = format(&device).await;
        let a = create(&store, "a", 10, true).await;
        a.write(0, &vec![1; 10 * CLUSTER as usize]).await.unwrap();
        let s = a.snapshot("s", uuid(1)).await.unwrap();
        a.resize(700 * CLUSTER).await.unwrap();
        a.write(650 * CLUSTER, &[2; 512]).await.unwrap();
        s.delete().await.unwrap();
        assert_eq!(a.info().allocated_clusters, 11);
        assert_no_leak(&device, &store).await;
        let s = a.snapshot("s", uuid(1)).await.unwrap();
        a.resize(2 * CLUSTER).await.unwrap();
        s.delete().await.unwrap();
        assert_eq!(content(&a).await, vec![1; 2 * CLUSTER as usize]);
        assert_no_leak(&device, &store).await;
    });
}

#[test]
fn parents_can_be_changed_but_not_into_a_ring() {
    run(async {
        let device = Rc::new(MemoryDevice::new(SIZE));
        let store = format(&device).await;
        let (a, s1, s2) = chain(&store).await;
        let b = create(&store, "b", 8, true).await;
        b.write(7 * CLUSTER, &[9; 512]).await.unwrap();
        b.set_parent(&s1).await.unwrap();
        assert_eq!(b.read(0, 512).await.unwrap(), [1; 512]);
        assert_eq!(b.read(7 * CLUSTER, 512).await.unwrap(), [9; 512]);
        assert_eq!(s1.delete().await.unwrap_err().errno(), 1);
        assert_eq!(s1.set_parent(&s2).await.unwrap_err().errno(), 22);
        b.set_parent(&s2).await.unwrap();
        assert_eq!(b.read(CLUSTER, 512).await.unwrap(), [2; 512]);
        assert_eq!(s2.info().clones, [a.id(), b.id()]);
        assert_no_leak(&device, &store).await;
    });
}

#[test]
fn external_devices_show_through_and_may_be_absent() {
    run(async {
        let device = Rc::new(MemoryDevice::new(SIZE));
        let external = Rc::new(MemoryDevice::new(4 * CLUSTER));
        external.fill(0, 4 * CLUSTER, 0xee);
        let store = format(&device).await;
        let id = uuid(55).to_string();
        assert_eq!(store.clone_external(&id, CLUSTER + 512, None, "x", uuid(5)).await.unwrap_err().errno(), 22);
        let a = store.clone_external(&id, 4 * CLUSTER, Some(external.clone()), "a", uuid(5)).await.unwrap();
        a.resize(6 * CLUSTER).await.unwrap();
        a.write(512, &[1; 512]).await.unwrap();
        let before = content(&a).await;
        assert_eq!((before[0], before[512], before[1024]), (0xee, 1, 0xee));
        assert_eq!(before[4 * CLUSTER as usize..], vec![0; 2 * CLUSTER as usize]);
        let s = a.snapshot("s", uuid(6)).await.unwrap();
        assert!(s.info().is_esnap_clone && !a.info().is_esnap_clone);
        a.write(5 * CLUSTER, &[2; 512]).await.unwrap();
        a.write(CLUSTER, &[3; 512]).await.unwrap();
        assert_no_leak(&device, &store).await;
        store.unload().await.unwrap();

        let store = load(&device).await;
        assert_eq!(store.missing_externals(), vec![id.clone()]);
        let (a, s) = (store.lvol_by_name("a").unwrap(), store.lvol_by_name("s").unwrap());
        assert!(a.info().is_degraded && s.info().is_degraded);
        assert_eq!(a.read(2 * CLUSTER, 512).await.unwrap_err().errno(), 19);
        assert_eq!(store.attach_external(&id, external.clone()).await.len(), 2);
        assert_eq!(a.read(2 * CLUSTER, 512).await.unwrap(), [0xee; 512]);
        assert_eq!(content(&s).await, before);
        s.delete().await.unwrap();
        assert_eq!(a.info().external.as_deref(), Some(id.as_str()));
        a.inflate(&|_| ()).await.unwrap();
        assert_eq!(store.detach_external(&id), []);
        assert_eq!(a.read(2 * CLUSTER, 512).await.unwrap(), [0xee; 512]);
        assert_no_leak(&device, &store).await;

        let b = create(&store, "b", 4, true).await;
        b.set_external_parent(&id, external.clone()).await.unwrap();
        assert_eq!(b.read(0, 512).await.unwrap(), [0xee; 512]);
        assert_eq!(b.set_external_parent(&id, external).await.unwrap_err().errno(), 17);
        b.decouple_parent(&|_| ()).await.unwrap();
        assert!(!b.info().thin);
    });
}

#[test]
fn a_shallow_copy_has_the_volumes_own_clusters_alone() {
    run(async {
        let device = Rc::new(MemoryDevice::new(SIZE));
        let store = format(&device).await;
        let (a, _, s2) = chain(&store).await;
        let target: Rc<dyn Device> = Rc::new(MemoryDevice::new(8 * CLUSTER));
        assert_eq!(a.shallow_copy(&target, &|_| ()).await.unwrap_err().errno(), 1);
        let seen = std::cell::Cell::new(CopyProgress::default());
        s2.shallow_copy(&target, &|p| seen.set(p)).await.unwrap();
        assert_eq!(seen.get(), CopyProgress { copied_clusters: 2, total_clusters: 2 });
        let mut expected = vec![0; 8 * CLUSTER as usize];
        expected[CLUSTER as usize..3 * CLUSTER as usize].fill(2);
        assert_eq!(target.read(0, expected.len()).await.unwrap(), expected);
        let small: Rc<dyn Device> = Rc::new(MemoryDevice::new(CLUSTER));
        assert_eq!(s2.shallow_copy(&small, &|_| ()).await.unwrap_err().errno(), 22);
    });
}
