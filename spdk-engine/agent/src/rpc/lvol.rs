//! Disks of a data plane: base devices, lvstores and lvols, typed.
//!
//! *What it is.* SPDK's `bdev_lvol_*` family and what carries it, as far as the agent uses it; a stock `spdk_tgt` and
//! `addax-engine` are driven alike.
//!
//! *Invariants.* Lists are read whole and searched here. Nothing here decides what may be made or removed.
//!
//! *When things fail.* [`RpcError`]; nothing is retried here.

use std::time::Duration;

use serde::Deserialize;
use serde_json::{Value, json};
use uuid::Uuid;

use super::{CALL_DEADLINE, Client, RpcError, code};

/// Deadline of making an lvstore: a large device is cleared first.
const FORMAT_DEADLINE: Duration = Duration::from_secs(180);
/// Deadline of what reads or frees many clusters: examining a device, deleting an lvol, closing a device.
const SLOW_DEADLINE: Duration = Duration::from_secs(60);

/// An lvstore.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Lvstore {
    /// Its UUID: the identity of the disk.
    pub uuid: Uuid,
    /// Its name.
    pub name: String,
    /// The device that it is on.
    pub base_bdev: String,
    /// Clusters that lvols can take.
    pub total_data_clusters: u64,
    /// Clusters that no lvol has.
    pub free_clusters: u64,
    /// Bytes of a cluster.
    pub cluster_size: u64,
}

/// The lvstore of an lvol.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
struct LvolStore {
    uuid: Uuid,
}

/// An lvol.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Lvol {
    /// Its UUID, which is the name of its device too.
    pub uuid: Uuid,
    /// Its name within its lvstore.
    pub name: String,
    /// Whether it is a snapshot.
    #[serde(default)]
    pub is_snapshot: bool,
    /// Clusters that are its own.
    #[serde(default)]
    pub num_allocated_clusters: u64,
    lvs: LvolStore,
}

/// An lvstore to make.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewLvstore<'a> {
    /// The device, which holds nothing.
    pub base_bdev: &'a str,
    /// Its name.
    pub name: &'a str,
    /// Bytes of a cluster.
    pub cluster_bytes: u64,
    /// Pages of metadata for every hundred clusters.
    pub md_pages_per_100_clusters: u32,
}

impl Client {
    /// Opens a file or block device as the base of a disk. Holes of the file are made when clusters are freed.
    ///
    /// # Errors
    /// See [`RpcError`].
    pub async fn create_base_bdev(&self, uring: bool, name: &str, path: &str, block_size: u32) -> Result<(), RpcError> {
        let mut params = json!({"name": name, "filename": path, "block_size": block_size});
        let method = if uring { "bdev_uring_create" } else { "bdev_aio_create" };
        if !uring {
            // Otherwise it can neither free nor zero, and clusters that are used again show what they held.
            params["fallocate"] = json!(true);
        }
        self.call(method, params, CALL_DEADLINE).await.map(drop)
    }

    /// Closes the base of a disk, and with it the lvstore on it; absent is fine.
    ///
    /// # Errors
    /// See [`RpcError`].
    pub async fn delete_base_bdev(&self, uring: bool, name: &str) -> Result<(), RpcError> {
        let method = if uring { "bdev_uring_delete" } else { "bdev_aio_delete" };
        absent_is_fine(self.call(method, json!({"name": name}), SLOW_DEADLINE).await)
    }

    /// Looks for lvstores on a device, and from now on whenever it is there. Nothing is to do where every device is looked at.
    ///
    /// # Errors
    /// See [`RpcError`].
    pub async fn bdev_examine(&self, name: &str) -> Result<(), RpcError> {
        match self.call("bdev_examine", json!({"name": name}), CALL_DEADLINE).await {
            Err(error) if !matches!(error.code(), Some(code::INVALID | code::EXISTS | code::METHOD_NOT_FOUND)) => {
                Err(error)
            }
            _ => Ok(()),
        }
    }

    /// Ends when all devices that are there have been examined, so that their lvstores are open.
    ///
    /// # Errors
    /// See [`RpcError`].
    pub async fn bdev_wait_for_examine(&self) -> Result<(), RpcError> {
        self.call("bdev_wait_for_examine", Value::Null, SLOW_DEADLINE).await.map(drop)
    }

    /// The lvstore on a device, if there is one.
    ///
    /// # Errors
    /// See [`RpcError`].
    pub async fn lvstore_on(&self, base_bdev: &str) -> Result<Option<Lvstore>, RpcError> {
        Ok(self.bdev_lvol_get_lvstores().await?.into_iter().find(|store| store.base_bdev == base_bdev))
    }

    /// All lvstores.
    ///
    /// # Errors
    /// See [`RpcError`].
    pub async fn bdev_lvol_get_lvstores(&self) -> Result<Vec<Lvstore>, RpcError> {
        self.call_as("bdev_lvol_get_lvstores", Value::Null, CALL_DEADLINE).await
    }

    /// Makes an lvstore; its UUID.
    ///
    /// # Errors
    /// See [`RpcError`].
    pub async fn bdev_lvol_create_lvstore(&self, new: &NewLvstore<'_>) -> Result<Uuid, RpcError> {
        let params = json!({
            "bdev_name": new.base_bdev,
            "lvs_name": new.name,
            "cluster_sz": new.cluster_bytes,
            "clear_method": "unmap",
            "num_md_pages_per_cluster_ratio": new.md_pages_per_100_clusters,
        });
        self.call_as("bdev_lvol_create_lvstore", params, FORMAT_DEADLINE).await
    }

    /// The lvols of an lvstore.
    ///
    /// # Errors
    /// See [`RpcError`].
    pub async fn lvols_of(&self, store: &Uuid) -> Result<Vec<Lvol>, RpcError> {
        let all: Vec<Lvol> = self.call_as("bdev_lvol_get_lvols", Value::Null, CALL_DEADLINE).await?;
        Ok(all.into_iter().filter(|lvol| lvol.lvs.uuid == *store).collect())
    }

    /// Makes an lvol that takes clusters when they are written; its UUID.
    ///
    /// # Errors
    /// See [`RpcError`].
    pub async fn create_thin_lvol(&self, store: &Uuid, name: &str, size_mib: u64) -> Result<Uuid, RpcError> {
        let params = json!({"uuid": store, "lvol_name": name, "size_in_mib": size_mib, "thin_provision": true});
        self.call_as("bdev_lvol_create", params, CALL_DEADLINE).await
    }

    /// Deletes an lvol with its data; absent is fine.
    ///
    /// # Errors
    /// See [`RpcError`].
    pub async fn bdev_lvol_delete(&self, name: &str) -> Result<(), RpcError> {
        absent_is_fine(self.call("bdev_lvol_delete", json!({"name": name}), SLOW_DEADLINE).await)
    }
}

pub(super) fn absent_is_fine(result: Result<Value, RpcError>) -> Result<(), RpcError> {
    match result {
        Err(error) if !error.is_not_found() => Err(error),
        _ => Ok(()),
    }
}
