use super::*;

#[test]
fn a_new_store_opens_again_clean_and_dirty() {
    run(async {
        let device = Rc::new(MemoryDevice::new(SIZE));
        let store = format(&device).await;
        let info = store.info();
        assert_eq!((info.name.as_str(), u64::from(info.cluster_size), info.io_unit_size), ("lvs", CLUSTER, 512));
        assert_eq!(info.free_clusters, info.total_data_clusters);
        create(&store, "a", 10, true).await;
        let dirty = Rc::new(device.fork());
        let (recovered, report) = try_load(&dirty).await.unwrap();
        assert!(report.recovered);
        assert_eq!(recovered.lvols().len(), 1);
        store.unload().await.unwrap();
        assert_eq!(store.unload().await, Err(Error::Unloaded));
        let (store, report) = try_load(&device).await.unwrap();
        assert!(!report.recovered);
        assert_eq!(store.lvol_by_name("a").unwrap().info().num_clusters, 10);
        let writes = device.counts().writes;
        store.unload().await.unwrap();
        assert_eq!(device.counts().writes, writes, "nothing changed, nothing is written");
        assert_eq!(
            Store::probe(&(device.clone() as Rc<dyn Device>)).await.unwrap().unwrap().cluster_size,
            CLUSTER as u32
        );
    });
}

#[test]
fn data_names_and_sizes_survive() {
    run(async {
        let device = Rc::new(MemoryDevice::new(SIZE));
        let store = format(&device).await;
        let thin = create(&store, "thin", 600, true).await;
        let thick = create(&store, "thick", 20, false).await;
        assert_eq!(thick.info().allocated_clusters, 20);
        thin.write(511 * CLUSTER + CLUSTER - 512, &[7; 1024]).await.unwrap();
        assert_eq!(thin.info().allocated_clusters, 2);
        thick.write(0, &[9; 512]).await.unwrap();
        thin.rename("other").await.unwrap();
        thin.set_xattr("key", b"value").await.unwrap();
        assert_eq!(thin.rename("thick").await, Err(Error::Exists("thick".into())));
        assert_eq!(thin.read(0, 100).await.unwrap_err().errno(), 22);
        assert_eq!(thin.write(600 * CLUSTER, &[0; 512]).await.unwrap_err().errno(), 22);
        store.rename("new").await.unwrap();
        assert_no_leak(&device, &store).await;
        store.unload().await.unwrap();
        let store = load(&device).await;
        assert_eq!(store.info().name, "new");
        let thin = store.lvol_by_name("other").unwrap();
        let back = thin.read(511 * CLUSTER, 2 * CLUSTER as usize).await.unwrap();
        for (at, byte) in back.iter().enumerate() {
            let written = (CLUSTER as usize - 512..CLUSTER as usize + 512).contains(&at);
            assert_eq!(*byte, if written { 7 } else { 0 });
        }
        assert_eq!(thin.xattr("key").unwrap(), b"value");
        assert_eq!(store.lvol_by_uuid(name_uuid("thick")).unwrap().read(0, 512).await.unwrap(), [9; 512]);
    });
}

#[test]
fn refusals_change_nothing() {
    run(async {
        let device = Rc::new(MemoryDevice::new(SIZE));
        let store = format(&device).await;
        let a = create(&store, "a", 10, true).await;
        let options = |name: &str, clusters: u64, thin| CreateOptions {
            name: name.into(),
            uuid: uuid(77),
            size_bytes: clusters * CLUSTER,
            thin,
            clear_method: ClearMethod::Default,
        };
        let before = store.info();
        let errno = |r: Result<Lvol, Error>| r.unwrap_err().errno();
        assert_eq!(errno(store.create(options("a", 1, true)).await), 17);
        assert_eq!(errno(store.create(options("", 1, true)).await), 22);
        assert_eq!(errno(store.create(options(&"x".repeat(64), 1, true)).await), 22);
        assert_eq!(errno(store.create(options("b", 100_000, false)).await), 28);
        assert_eq!(errno(a.clone_to("b", uuid(77)).await), 22);
        assert_eq!(a.decouple_parent(&|_| ()).await.unwrap_err().errno(), 22);
        let snapshot = a.snapshot("s", uuid(78)).await.unwrap();
        assert_eq!(errno(snapshot.snapshot("b", uuid(77)).await), 22);
        assert_eq!(snapshot.resize(CLUSTER).await.unwrap_err().errno(), 1);
        assert_eq!(snapshot.rename("t").await.unwrap_err().errno(), 1);
        assert_eq!(snapshot.write(0, &[0; 512]).await.unwrap_err().errno(), 1);
        let clone = snapshot.clone_to("c", uuid(79)).await.unwrap();
        assert_eq!(snapshot.delete().await.unwrap_err().errno(), 1);
        assert_eq!(a.set_parent(&snapshot).await.unwrap_err().errno(), 17);
        clone.delete().await.unwrap();
        assert_eq!(clone.delete().await.unwrap_err().errno(), 2);
        snapshot.delete().await.unwrap();
        let after = store.info();
        assert_eq!((before.free_clusters, before.free_md_pages), (after.free_clusters, after.free_md_pages));
        assert_no_leak(&device, &store).await;
    });
}

#[test]
fn a_store_grows_with_its_device() {
    run(async {
        let device = Rc::new(MemoryDevice::new(SIZE));
        let store = format(&device).await;
        let before = store.info();
        store.grow().await.unwrap();
        device.set_size(2 * SIZE);
        store.grow().await.unwrap();
        assert_eq!(store.info().total_data_clusters, before.total_data_clusters + SIZE / CLUSTER);
        assert_eq!(store.info().free_clusters, store.info().total_data_clusters);
        create(&store, "big", 6000, false).await;
        assert_no_leak(&device, &store).await;
        store.unload().await.unwrap();
        let store = load(&device).await;
        assert_eq!(store.info().free_clusters, store.info().total_data_clusters - 6000);
        device.set_size(1 << 40);
        assert_eq!(store.grow().await.unwrap_err().errno(), 28);
        device.set_size(SIZE);
        assert_eq!(store.grow().await.unwrap_err().errno(), 28);
        store.destroy().await.unwrap();
        assert_eq!(Store::probe(&(device.clone() as Rc<dyn Device>)).await, Ok(None));
        assert!(matches!(try_load(&device).await.map(|_| ()), Err(Error::NotAStore(_))));
    });
}

#[test]
fn a_lost_device_fails_everything_and_frees_nothing() {
    run(async {
        let device = Rc::new(MemoryDevice::new(SIZE));
        let store = format(&device).await;
        let a = create(&store, "a", 10, true).await;
        device.remove();
        assert_eq!(a.write(0, &[1; 512]).await.unwrap_err().errno(), 19);
        assert_eq!(a.snapshot("s", uuid(1)).await.unwrap_err().errno(), 19);
        assert_eq!(a.delete().await.unwrap_err().errno(), 19);
        store.unload().await.unwrap();
        assert_eq!(a.read(0, 512).await, Err(Error::Unloaded));
    });
}
