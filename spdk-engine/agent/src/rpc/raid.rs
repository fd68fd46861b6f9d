//! SPDK's own mirror, `raid1`, and the null devices that hold its free places, typed.
//!
//! *What it is.* The calls of `bdev_raid_*` that an engine on a stock `spdk_tgt` is made of.
//!
//! *Invariants.* A base device that was lost is listed without a name: the array has forgotten it.
//!
//! *When things fail.* [`RpcError`]; nothing is retried here.

use serde::Deserialize;
use serde_json::{Value, json};

use super::lvol::absent_is_fine;
use super::{CALL_DEADLINE, Client, RpcError};

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
struct IoStat {
    name: String,
    bytes_written: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
struct IoStats {
    bdevs: Vec<IoStat>,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
struct Base {
    name: Option<String>,
    is_configured: bool,
}

/// How far a rebuild is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct RaidProgress {
    /// Blocks done.
    pub blocks: u64,
}

/// What runs on an array.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct RaidProcess {
    /// The base device that is rebuilt.
    pub target: String,
    /// How far.
    pub progress: RaidProgress,
}

/// An array.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct RaidBdev {
    /// Its name.
    pub name: String,
    /// `online`, `configuring` or `offline`.
    pub state: String,
    base_bdevs_list: Vec<Base>,
    /// The rebuild that runs.
    #[serde(default)]
    pub process: Option<RaidProcess>,
}

impl RaidBdev {
    /// The base devices that are part of it now.
    pub fn bases(&self) -> impl Iterator<Item = &str> {
        self.base_bdevs_list.iter().filter(|base| base.is_configured).filter_map(|base| base.name.as_deref())
    }
}

impl Client {
    /// All arrays.
    ///
    /// # Errors
    /// See [`RpcError`].
    pub async fn bdev_raid_get_bdevs(&self) -> Result<Vec<RaidBdev>, RpcError> {
        let all: Vec<Value> = self.call_as("bdev_raid_get_bdevs", json!({"category": "all"}), CALL_DEADLINE).await?;
        let read = |entry: Value| {
            serde_json::from_value(entry).map_err(|error| RpcError::Answer {
                method: "bdev_raid_get_bdevs".to_owned(),
                reason: error.to_string(),
            })
        };
        all.into_iter().map(read).collect()
    }

    /// The array of that name, if it is there.
    ///
    /// # Errors
    /// See [`RpcError`].
    pub async fn find_raid(&self, name: &str) -> Result<Option<RaidBdev>, RpcError> {
        Ok(self.bdev_raid_get_bdevs().await?.into_iter().find(|raid| raid.name == name))
    }

    /// Makes a `raid1` without a superblock.
    ///
    /// # Errors
    /// See [`RpcError`].
    pub async fn create_raid1(&self, name: &str, bases: &[String], uuid: &str) -> Result<(), RpcError> {
        let params =
            json!({"name": name, "raid_level": "raid1", "base_bdevs": bases, "uuid": uuid, "superblock": false});
        self.call("bdev_raid_create", params, CALL_DEADLINE).await.map(drop)
    }

    /// Deletes an array; absent is fine.
    ///
    /// # Errors
    /// See [`RpcError`].
    pub async fn bdev_raid_delete(&self, name: &str) -> Result<(), RpcError> {
        absent_is_fine(self.call("bdev_raid_delete", json!({"name": name}), CALL_DEADLINE).await)
    }

    /// Adds a base device in a free place; its rebuild begins.
    ///
    /// # Errors
    /// See [`RpcError`].
    pub async fn bdev_raid_add_base_bdev(&self, raid: &str, base: &str) -> Result<(), RpcError> {
        let params = json!({"raid_bdev": raid, "base_bdev": base});
        self.call("bdev_raid_add_base_bdev", params, CALL_DEADLINE).await.map(drop)
    }

    /// Takes a base device out.
    ///
    /// # Errors
    /// See [`RpcError`].
    pub async fn bdev_raid_remove_base_bdev(&self, base: &str) -> Result<(), RpcError> {
        absent_is_fine(self.call("bdev_raid_remove_base_bdev", json!({"name": base}), CALL_DEADLINE).await)
    }

    /// Bytes that were written to a device, with success, since it is there.
    ///
    /// # Errors
    /// See [`RpcError`].
    pub async fn bdev_bytes_written(&self, name: &str) -> Result<u64, RpcError> {
        let method = "bdev_get_iostat";
        // Of all devices: how one is named differs from version to version.
        let stats: IoStats = self.call_as(method, Value::Null, CALL_DEADLINE).await?;
        let found = stats.bdevs.into_iter().find(|stat| stat.name == name);
        let missing = || RpcError::Answer { method: method.to_owned(), reason: format!("nothing about {name}") };
        found.map(|stat| stat.bytes_written).ok_or_else(missing)
    }

    /// Makes a device that holds nothing.
    ///
    /// # Errors
    /// See [`RpcError`].
    pub async fn bdev_null_create(&self, name: &str, num_blocks: u64, block_size: u32) -> Result<(), RpcError> {
        let params = json!({"name": name, "num_blocks": num_blocks, "block_size": block_size});
        self.call("bdev_null_create", params, CALL_DEADLINE).await.map(drop)
    }

    /// Deletes a device that holds nothing; absent is fine.
    ///
    /// # Errors
    /// See [`RpcError`].
    pub async fn bdev_null_delete(&self, name: &str) -> Result<(), RpcError> {
        absent_is_fine(self.call("bdev_null_delete", json!({"name": name}), CALL_DEADLINE).await)
    }

    /// Ends the session of a controller, if there is one, and begins another.
    ///
    /// # Errors
    /// See [`RpcError`].
    pub async fn bdev_nvme_reset_controller(&self, name: &str) -> Result<(), RpcError> {
        self.call("bdev_nvme_reset_controller", json!({"name": name}), CALL_DEADLINE).await.map(drop)
    }
}
