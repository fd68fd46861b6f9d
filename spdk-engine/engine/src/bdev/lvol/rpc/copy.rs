//! Shallow copies: the clusters of a read-only volume's own, to another device, in the background.
//!
//! *Invariants.* The target is claimed while it is written. An outcome is kept until it was read once, and at most
//! [`KEPT_MAX`] of them are.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use lvol_core::{BlobId, CopyProgress};
use serde::Deserialize;
use serde_json::{Value, json};

use super::{find_volume, late};
use crate::app::App;
use crate::bdev::lvol::stores::{LvolStore, Lvols, MODULE};
use crate::bdev::registry::{Access, Desc};
use crate::rpc::params::{decode, decode_failed};
use crate::rpc::{Methods, RpcError, RpcResult, When};

/// Outcomes kept that nobody has read.
const KEPT_MAX: usize = 1024;

/// Adds the methods.
pub fn register(m: &mut Methods) {
    m.add("bdev_lvol_start_shallow_copy", When::Runtime, |app, p| async move { start(&app, p).await });
    m.add("bdev_lvol_check_shallow_copy", When::Runtime, |app, p| async move { check(&app, p) });
}

#[derive(Default)]
struct Copies {
    last: Cell<u32>,
    by_id: RefCell<BTreeMap<u32, Rc<Copy>>>,
}

struct Copy {
    progress: Arc<Progress>,
    /// The errno it ended with, 0 for success; none while it runs.
    ended: Cell<Option<i32>>,
}

#[derive(Default)]
struct Progress {
    copied: AtomicU64,
    total: AtomicU64,
}

impl Copies {
    /// The number of the next copy; one that does not begin has one, too, as in SPDK.
    fn next_id(&self) -> u32 {
        self.last.set(self.last.get().wrapping_add(1).max(1));
        self.last.get()
    }

    fn add(&self, id: u32, total: u64) -> Rc<Copy> {
        let progress = Arc::new(Progress { copied: AtomicU64::new(0), total: AtomicU64::new(total) });
        let copy = Rc::new(Copy { progress, ended: Cell::new(None) });
        let mut by_id = self.by_id.borrow_mut();
        if by_id.len() >= KEPT_MAX {
            let oldest = by_id.iter().find(|(_, copy)| copy.ended.get().is_some()).map(|(id, _)| *id);
            oldest.map(|id| by_id.remove(&id));
        }
        by_id.insert(id, Rc::clone(&copy));
        copy
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Start {
    src_lvol_name: String,
    dst_bdev_name: String,
}

async fn start(app: &App, params: Option<Value>) -> RpcResult {
    let request: Start = decode(params, decode_failed)?;
    let lvols = Lvols::of(app);
    let (store, volume) = find_volume(&lvols, &request.src_lvol_name)?;
    let id = app.module(Copies::default).next_id();
    let desc = app.registry().open(&request.dst_bdev_name, Access::WriteOne(MODULE), |_| {});
    let desc = desc.map_err(|e| late(e.errno()))?;
    let blob = volume.blob();
    let total = lvols.on_owner(&store, move |_, owned| async move { Ok(owned.lvol(blob)?.info().allocated_clusters) });
    let total = total.await.map_err(|e| late(e.errno()))?;
    let copy = app.module(Copies::default).add(id, total);
    app.core().spawn(run(lvols, store, blob, desc, copy));
    Ok(json!({ "operation_id": id }))
}

async fn run(lvols: Rc<Lvols>, store: Rc<LvolStore>, blob: BlobId, desc: Desc, copy: Rc<Copy>) {
    let (entry, progress) = (Arc::clone(desc.entry()), Arc::clone(&copy.progress));
    let copied = lvols.on_owner(&store, move |core, owned| async move {
        let target = owned.open_device(&core, &entry)?;
        let tell = move |p: CopyProgress| {
            progress.total.store(p.total_clusters, Ordering::Relaxed);
            progress.copied.store(p.copied_clusters, Ordering::Relaxed);
        };
        owned.lvol(blob)?.shallow_copy(&target, &tell).await
    });
    let errno = match copied.await {
        Ok(()) => 0,
        Err(error) => {
            tracing::warn!(%error, "a shallow copy failed");
            error.errno()
        }
    };
    drop(desc);
    copy.ended.set(Some(errno));
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Check {
    #[serde(deserialize_with = "crate::rpc::params::whole")]
    operation_id: u32,
}

fn check(app: &App, params: Option<Value>) -> RpcResult {
    let request: Check = decode(params, decode_failed)?;
    let copies = app.module(Copies::default);
    let copy = copies.by_id.borrow().get(&request.operation_id).cloned();
    let copy = copy.ok_or_else(|| RpcError::errno(libc::ENODEV))?;
    let mut answer = json!({ "copied_clusters": copy.progress.copied.load(Ordering::Relaxed),
        "total_clusters": copy.progress.total.load(Ordering::Relaxed) });
    match copy.ended.get() {
        None => answer["state"] = json!("in progress"),
        Some(0) => answer["state"] = json!("complete"),
        Some(errno) => {
            answer["state"] = json!("error");
            answer["error"] = json!(nix::errno::Errno::from_raw(errno).desc());
        }
    }
    if copy.ended.get().is_some() {
        copies.by_id.borrow_mut().remove(&request.operation_id);
    }
    Ok(answer)
}
