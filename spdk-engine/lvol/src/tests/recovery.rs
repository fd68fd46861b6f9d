use super::*;
use crate::device::{DeviceError, DeviceFuture};
use std::cell::Cell;

/// A device that stops taking writes after so many.
struct Stops {
    device: MemoryDevice,
    left: Cell<u64>,
}

impl Stops {
    fn step(&self) -> Result<(), DeviceError> {
        match self.left.get() {
            0 => Err(DeviceError::Gone),
            n => {
                self.left.set(n - 1);
                Ok(())
            }
        }
    }
}

impl Device for Stops {
    fn block_size(&self) -> u32 {
        self.device.block_size()
    }
    fn size_bytes(&self) -> u64 {
        self.device.size_bytes()
    }
    fn write_cache(&self) -> bool {
        true
    }
    fn can_unmap(&self) -> bool {
        true
    }
    fn unmap_reads_zeroes(&self) -> bool {
        true
    }
    fn read(&self, offset: u64, len: usize) -> DeviceFuture<'_, Vec<u8>> {
        self.device.read(offset, len)
    }
    fn write<'a>(&'a self, offset: u64, data: &'a [u8]) -> DeviceFuture<'a, ()> {
        Box::pin(async move {
            self.step()?;
            self.device.write(offset, data).await
        })
    }
    fn write_zeroes(&self, offset: u64, len: u64) -> DeviceFuture<'_, ()> {
        Box::pin(async move {
            self.step()?;
            self.device.write_zeroes(offset, len).await
        })
    }
    fn unmap(&self, offset: u64, len: u64) -> DeviceFuture<'_, ()> {
        Box::pin(async move {
            self.step()?;
            self.device.unmap(offset, len).await
        })
    }
    fn flush(&self) -> DeviceFuture<'_, ()> {
        Box::pin(async move { if self.left.get() == 0 { Err(DeviceError::Gone) } else { Ok(()) } })
    }
    fn as_any(&self) -> &dyn std::any::Any {
        self
    }
}

/// What one sees of all volumes: name, parent, content.
async fn picture(store: &Store) -> Vec<(String, Option<String>, Vec<u8>)> {
    let mut all = Vec::new();
    for lvol in store.lvols() {
        let info = lvol.info();
        all.push((info.name, info.parent_name, lvol.read(0, lvol.size_bytes() as usize).await.unwrap()));
    }
    all.sort();
    all
}

type Op = fn(Store) -> crate::LocalFuture<'static, Result<(), Error>>;

fn lvol(store: &Store, name: &str) -> Lvol {
    store.lvol_by_name(name).unwrap()
}

/// Runs `op` on a prepared store and cuts it off after each of its writes: the store then is as before or after, without
/// leak, and can be used.
fn cut_everywhere(op: Op) {
    run(async {
        let device = Rc::new(MemoryDevice::new(SIZE));
        let store = format(&device).await;
        let a = create(&store, "a", 600, true).await;
        a.write(0, &vec![1; 4 * CLUSTER as usize]).await.unwrap();
        a.write(599 * CLUSTER, &[4; 512]).await.unwrap();
        let s1 = a.snapshot("s1", uuid(1)).await.unwrap();
        a.write(CLUSTER, &vec![2; 2 * CLUSTER as usize]).await.unwrap();
        a.snapshot("s2", uuid(2)).await.unwrap();
        a.write(2 * CLUSTER, &vec![3; 512]).await.unwrap();
        s1.clone_to("c", uuid(3)).await.unwrap();
        create(&store, "t", 9, false).await;
        let before = picture(&store).await;
        let whole = Rc::new(device.fork());
        let store = load(&whole).await;
        op(store.clone()).await.unwrap();
        let after = picture(&store).await;
        let mut states = [0, 0];
        for writes in 0.. {
            let stops = Rc::new(Stops { device: device.fork(), left: Cell::new(writes) });
            let loaded = Store::load(stops.clone(), Rc::new(NoHooks), LoadOptions::default(), no_external(), &|_| ())
                .await
                .unwrap();
            let done = op(loaded.0).await.is_ok();
            let left = stops.left.get();
            let survivor = Rc::new(stops.device.fork());
            let store = load(&survivor).await;
            let now = picture(&store).await;
            assert!(now == before || now == after, "after {writes} writes");
            states[usize::from(now == after)] += 1;
            assert!(!done || now == after);
            assert_no_leak(&survivor, &store).await;
            store.unload().await.unwrap();
            let store = load(&survivor).await;
            assert_eq!(picture(&store).await, now);
            if left > 0 {
                break;
            }
        }
        assert!(states[1] > 0, "{states:?}");
    });
}

#[test]
fn create_cut_off() {
    cut_everywhere(|store| Box::pin(async move { create_try(&store, "new", 700).await }));
}

async fn create_try(store: &Store, name: &str, clusters: u64) -> Result<(), Error> {
    let options = CreateOptions {
        name: name.into(),
        uuid: name_uuid(name),
        size_bytes: clusters * CLUSTER,
        thin: false,
        clear_method: ClearMethod::Default,
    };
    store.create(options).await.map(|_| ())
}

#[test]
fn snapshot_cut_off() {
    cut_everywhere(|store| Box::pin(async move { lvol(&store, "a").snapshot("n", uuid(9)).await.map(|_| ()) }));
    cut_everywhere(|store| Box::pin(async move { lvol(&store, "t").snapshot("n", uuid(9)).await.map(|_| ()) }));
}

#[test]
fn delete_cut_off() {
    cut_everywhere(|store| Box::pin(async move { lvol(&store, "s2").delete().await }));
    cut_everywhere(|store| Box::pin(async move { lvol(&store, "a").delete().await }));
    cut_everywhere(|store| Box::pin(async move { lvol(&store, "t").delete().await }));
}

#[test]
fn resize_cut_off() {
    cut_everywhere(|store| Box::pin(async move { lvol(&store, "a").resize(3 * CLUSTER).await }));
    cut_everywhere(|store| Box::pin(async move { lvol(&store, "a").resize(1200 * CLUSTER).await }));
    cut_everywhere(|store| Box::pin(async move { lvol(&store, "t").resize(2 * CLUSTER).await }));
    cut_everywhere(|store| Box::pin(async move { lvol(&store, "t").resize(30 * CLUSTER).await }));
}

#[test]
fn rename_and_relink_cut_off() {
    cut_everywhere(|store| Box::pin(async move { lvol(&store, "a").rename("b").await }));
    cut_everywhere(|store| Box::pin(async move { lvol(&store, "c").set_parent(&lvol(&store, "s2")).await }));
    cut_everywhere(|store| Box::pin(async move { lvol(&store, "t").set_read_only().await }));
}

#[test]
fn inflate_cut_off() {
    cut_everywhere(|store| Box::pin(async move { lvol(&store, "a").decouple_parent(&|_| ()).await }));
    cut_everywhere(|store| Box::pin(async move { lvol(&store, "c").decouple_parent(&|_| ()).await }));
}

#[test]
fn unmap_cut_off() {
    cut_everywhere(|store| {
        Box::pin(async move {
            let a = lvol(&store, "c");
            a.unmap(0, CLUSTER).await
        })
    });
}
