//! `lvol`: logical volumes as devices, in SPDK's lvolstore on any device.
//!
//! *What it is.* The volumes of [`lvol_core`] as devices of the engine, their `bdev_lvol_*` methods, and the search for
//! stores on new devices.
//!
//! | Module | Runs on | Job |
//! |---|---|---|
//! | `stores` | control core | stores, claims, registered volumes, external devices |
//! | `rpc` | control core | methods |
//! | `examine` | control core | finds stores on new devices |
//! | `owner` | owner core | the store itself, requests of channels |
//! | `device`, `hooks` | owner core | the store's disk, its pauses across cores |
//! | `channel`, `pieces`, `asks` | every data core | I/O of a volume |
//! | `percore`, `flights` | every data core | what a core has of a store |
//! | `shared`, `durability` | all | what cores share, the device |
//!
//! *Flow of an I/O.* lookup in the shared map → the base device's channel on the same core. Only what changes the map
//! goes to the owner core and back.
//!
//! *Flow of a control call.* method → owner core (`call_async`) → lvol-core, which stops a volume on all cores for the
//! moments it must → back: devices are registered, resized, renamed.
//!
//! *The end.* [`stop_all`] stops all I/O and unloads the stores, so that the disks are clean; I/O under way above is never
//! answered then, as after a crash.

mod asks;
mod channel;
mod device;
mod durability;
mod examine;
mod flights;
mod hooks;
mod owner;
mod percore;
mod pieces;
mod rpc;
mod shared;
mod stores;
#[cfg(test)]
mod tests;

use crate::app::App;
use crate::bdev::registry::Entry;
use crate::rpc::Methods;
use stores::Lvols;

/// Adds this module's methods and its look at new devices.
pub fn register(m: &mut Methods) {
    rpc::register(m);
    m.add_examiner(stores::MODULE, examine::examine);
}

/// Brings reports of volumes up to date, before devices are described: of `entry`, or of all.
pub async fn refresh(app: &App, entry: Option<&Entry>) {
    if entry.is_some_and(|e| e.module != stores::MODULE) {
        return;
    }
    let lvols = Lvols::of(app);
    let volume = entry.and_then(|e| e.bdev.as_any().downcast_ref::<shared::LvolBdev>()).map(|b| b.volume.key());
    for store in lvols.stores() {
        let is_wanted = volume.is_none_or(|key| key.store == store.shared.id);
        if is_wanted && let Err(error) = lvols.refresh(&store, volume.map(|key| key.blob)).await {
            tracing::debug!(%error, "reports of a store are not fresh");
        }
    }
}

/// Stops all I/O of all stores and unloads them: for the end of the process.
pub async fn stop_all(app: &App) {
    Lvols::of(app).stop_all().await;
}
