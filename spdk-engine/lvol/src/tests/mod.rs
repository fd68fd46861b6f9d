//! Tests of whole stores in memory.

#![allow(clippy::unwrap_used)]

mod alloc_io;
mod basics;
mod chains;
mod program;
mod recovery;

use crate::{
    device::Device,
    error::Error,
    hooks::NoHooks,
    lvol::Lvol,
    memory::MemoryDevice,
    store::{Store, no_external},
    types::*,
};
use futures::executor::block_on;
use std::rc::Rc;
use uuid::Uuid;

pub(super) const CLUSTER: u64 = 8 << 10;
pub(super) const SIZE: u64 = 32 << 20;

pub(super) fn uuid(n: u128) -> Uuid {
    Uuid::from_u128(n + 1)
}

pub(super) fn format_options() -> FormatOptions {
    FormatOptions {
        cluster_size: CLUSTER as u32,
        md_pages_per_cluster_ratio: 10,
        ..FormatOptions::new("lvs", uuid(999_999))
    }
}

pub(super) async fn format(device: &Rc<MemoryDevice>) -> Store {
    Store::format(device.clone(), Rc::new(NoHooks), format_options()).await.unwrap()
}

pub(super) async fn try_load(device: &Rc<MemoryDevice>) -> Result<(Store, LoadReport), Error> {
    Store::load(device.clone(), Rc::new(NoHooks), LoadOptions::default(), no_external(), &|_| ()).await
}

pub(super) async fn load(device: &Rc<MemoryDevice>) -> Store {
    let (store, report) = try_load(device).await.unwrap();
    assert_eq!(report.damaged, []);
    store
}

pub(super) async fn create(store: &Store, name: &str, clusters: u64, thin: bool) -> Lvol {
    let options = CreateOptions {
        name: name.into(),
        uuid: Uuid::new_v5(&Uuid::nil(), name.as_bytes()),
        size_bytes: clusters * CLUSTER,
        thin,
        clear_method: ClearMethod::Default,
    };
    store.create(options).await.unwrap()
}

pub(super) fn name_uuid(name: &str) -> Uuid {
    Uuid::new_v5(&Uuid::nil(), name.as_bytes())
}

pub(super) fn run(test: impl Future<Output = ()>) {
    block_on(test);
}

/// A store with a store's free clusters after a crash now is a store without leaks: what is free in memory is what a
/// recovery finds free.
pub(super) async fn assert_no_leak(device: &Rc<MemoryDevice>, store: &Store) {
    let copy = Rc::new(device.fork());
    let recovered = load(&copy).await;
    let (a, b) = (store.info(), recovered.info());
    assert_eq!((a.free_clusters, a.free_md_pages), (b.free_clusters, b.free_md_pages));
    let infos = |store: &Store| store.lvols().iter().map(Lvol::info).collect::<Vec<_>>();
    let strip = |mut infos: Vec<LvolInfo>| {
        infos.iter_mut().for_each(|info| {
            info.is_snapshot = !info.clones.is_empty();
            info.clones.sort_unstable();
            info.is_degraded = false;
        });
        infos
    };
    assert_eq!(strip(infos(store)), strip(infos(&recovered)));
}
