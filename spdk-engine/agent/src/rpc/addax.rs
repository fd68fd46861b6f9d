//! The methods that only `addax-engine` has: information, mirrors, events.
//!
//! *What it is.* Types and calls of the `addax_*` methods. A stock `spdk_tgt` lacks them; the supervisor finds out by
//! `rpc_get_methods`, and [`super::RpcError::Method`] with `METHOD_NOT_FOUND` is the answer of a data plane without.
//!
//! *Invariants.* Unknown fields and unknown event types are ignored, so that an older agent drives a newer engine.
//!
//! *When things fail.* A reader of events whose position is older than the engine's ring gets [`EventBatch::lost`] and
//! takes the whole state by [`Client::addax_mirror_get`].

use std::time::Duration;

use addax_api::volume::SnapshotTree;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use mirror_core::meta::{META_BLOCK_BYTES, RegionBits};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::{CALL_DEADLINE, Client, RpcError};

/// What a data plane says about itself.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct PlaneInfo {
    /// New at every start of the process.
    pub engine_instance: String,
    /// Its version.
    #[serde(default)]
    pub version: String,
    /// What it can do, `mirror` for example.
    #[serde(default)]
    pub features: Vec<String>,
}

/// The configuration record, in the engine's spelling. Sizes are in bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MirrorConfig {
    /// Lineage.
    pub lineage: String,
    /// Epoch `g`.
    pub epoch: u64,
    /// Engine instance `e`.
    pub engine_instance: String,
    /// Configuration number `k`.
    pub config_number: u64,
    /// In-sync set `S`.
    pub in_sync: Vec<String>,
    /// Rebuilding set `R`.
    #[serde(default)]
    pub rebuilding: Vec<String>,
    /// Fewest members.
    pub min_in_sync: u32,
    /// Size of the volume.
    pub size: u64,
    /// Closed in order.
    #[serde(default)]
    pub clean: bool,
    /// What is recorded of snapshots; spelled as in the API.
    #[serde(default)]
    pub snapshots: SnapshotTree,
}

/// A leg at creation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LegParams {
    /// The replica behind it.
    pub replica: String,
    /// The device that reaches it.
    pub bdev_name: String,
    /// The device that is its meta area, if it has one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub meta_bdev_name: Option<String>,
    /// Whether it is on this machine.
    pub local: bool,
    /// The replica's instance, when its disk has a volatile cache (consistency rule 1).
    #[serde(skip_serializing_if = "String::is_empty")]
    pub instance: String,
    /// It may lack acknowledged writes. Only of a mirror that is made.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub changed: bool,
}

/// What a mirror is made of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct MirrorParams {
    /// Name of the device.
    pub name: String,
    /// Its UUID.
    pub uuid: String,
    /// Bytes of a block.
    pub block_size: u32,
    /// Size in bytes.
    pub size_bytes: u64,
    /// The volume.
    pub volume: String,
    /// The record, at this engine's own epoch.
    pub config: MirrorConfig,
    /// Its legs.
    pub legs: Vec<LegParams>,
    /// The member that is copied over the others before any host is served; absent when members are equal.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub equalise_from: Option<String>,
    /// The regions in which members may differ, for legs with meta areas.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "as_base64")]
    pub inherited: Option<RegionBits>,
    /// Epoch of the last engine that may have served, by which region stamps are trusted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub served_epoch: Option<u64>,
    /// The volume was closed in order before.
    pub flushed: bool,
    /// No member is certain to hold every acknowledged write, and hosts that were attached are refused.
    pub hosts_must_detach: bool,
}

#[expect(clippy::ref_option, reason = "the form that serde calls")]
fn as_base64<S: serde::Serializer>(bits: &Option<RegionBits>, serializer: S) -> Result<S::Ok, S::Error> {
    bits.as_ref().map(|bits| BASE64.encode(bits.to_bytes())).serialize(serializer)
}

#[derive(Deserialize)]
struct MetaBlocks {
    data: String,
}

/// A swap that waits for its answer.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct PendingSwap {
    /// Its number.
    pub swap: u64,
    /// The record that it wants.
    pub next: MirrorConfig,
    /// The configuration number that the record must have now.
    #[serde(default)]
    pub expect_config_number: Option<u64>,
    /// Why.
    #[serde(default)]
    pub reason: String,
}

/// A leg as it is.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct MirrorLeg {
    /// The replica behind it.
    pub replica: String,
    /// The device that reaches it.
    #[serde(default)]
    pub bdev_name: String,
    /// `in_sync`, `rebuilding`, `lost` or `out`.
    pub state: String,
    /// Blocks copied by the rebuild.
    #[serde(default)]
    pub copied_blocks: u64,
    /// Blocks to copy.
    #[serde(default)]
    pub total_blocks: u64,
    /// The replica's instance, as the mirror knows it.
    #[serde(default)]
    pub instance: String,
}

/// A mirror as it is.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct MirrorState {
    /// Name of the device.
    pub name: String,
    /// The volume.
    #[serde(default)]
    pub volume: String,
    /// `open`, `stopped`, `closing` or `closed`.
    pub state: String,
    /// Its record.
    pub config: MirrorConfig,
    /// Its legs.
    #[serde(default)]
    pub legs: Vec<MirrorLeg>,
    /// The swap that waits.
    #[serde(default)]
    pub pending_swap: Option<PendingSwap>,
    /// Acknowledgements wait because the in-sync set may not shrink further.
    #[serde(default)]
    pub frozen: bool,
    /// Members are made equal before hosts are served.
    #[serde(default)]
    pub equalising: bool,
    /// Hosts that were attached before it was made have to detach (consistency rule 1).
    #[serde(default)]
    pub hosts_must_detach: bool,
}

/// One thing that happened to a mirror.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Event {
    /// The mirror asks for a swap.
    Swap {
        /// The mirror.
        name: String,
        /// The swap.
        #[serde(flatten)]
        swap: PendingSwap,
    },
    /// The mirror's state changed.
    MirrorState {
        /// The mirror.
        name: String,
        /// `open`, `stopped`, `closing` or `closed`.
        state: String,
        /// Why.
        #[serde(default)]
        reason: String,
    },
    /// A leg's state changed.
    Leg {
        /// The mirror.
        name: String,
        /// The replica.
        replica: String,
        /// `in_sync`, `rebuilding`, `lost` or `out`.
        state: String,
        /// Why.
        #[serde(default)]
        reason: String,
    },
    /// A rebuild went on.
    Progress {
        /// The mirror.
        name: String,
        /// The replica.
        replica: String,
        /// Blocks copied.
        copied_blocks: u64,
        /// Blocks to copy.
        total_blocks: u64,
    },
    /// A type that this agent does not know.
    #[serde(other)]
    Unknown,
}

impl Event {
    /// The mirror that the event is about.
    pub fn mirror(&self) -> Option<&str> {
        match self {
            Self::Swap { name, .. }
            | Self::MirrorState { name, .. }
            | Self::Leg { name, .. }
            | Self::Progress { name, .. } => Some(name),
            Self::Unknown => None,
        }
    }
}

/// Events since a position.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct EventBatch {
    /// What happened, oldest first.
    #[serde(default)]
    pub events: Vec<Event>,
    /// The position to ask from next.
    pub next: u64,
    /// Events between were lost: read the whole state.
    #[serde(default)]
    pub lost: bool,
}

impl Client {
    /// What the data plane says about itself.
    ///
    /// # Errors
    /// See [`RpcError`].
    pub async fn addax_get_info(&self) -> Result<PlaneInfo, RpcError> {
        self.call_as("addax_get_info", Value::Null, CALL_DEADLINE).await
    }

    /// Makes a mirror.
    ///
    /// # Errors
    /// See [`RpcError`].
    pub async fn addax_mirror_create(&self, params: &MirrorParams) -> Result<(), RpcError> {
        let method = "addax_mirror_create";
        let value = serde_json::to_value(params)
            .map_err(|error| RpcError::Answer { method: method.to_owned(), reason: error.to_string() })?;
        self.call(method, value, CALL_DEADLINE).await.map(drop)
    }

    /// All mirrors.
    ///
    /// # Errors
    /// See [`RpcError`].
    pub async fn addax_mirror_list(&self) -> Result<Vec<MirrorState>, RpcError> {
        self.call_as("addax_mirror_get", json!({}), CALL_DEADLINE).await
    }

    /// One mirror, if it is there.
    ///
    /// # Errors
    /// See [`RpcError`].
    pub async fn addax_mirror_get(&self, name: &str) -> Result<Option<MirrorState>, RpcError> {
        Ok(self.addax_mirror_list().await?.into_iter().find(|mirror| mirror.name == name))
    }

    /// Adds a leg, to be rebuilt.
    ///
    /// # Errors
    /// See [`RpcError`].
    pub async fn addax_mirror_add_leg(&self, name: &str, leg: &LegParams) -> Result<(), RpcError> {
        let method = "addax_mirror_add_leg";
        let mut params = serde_json::to_value(leg)
            .map_err(|error| RpcError::Answer { method: method.to_owned(), reason: error.to_string() })?;
        params["name"] = json!(name);
        self.call(method, params, CALL_DEADLINE).await.map(drop)
    }

    /// Reads blocks of a meta area that no mirror uses yet.
    ///
    /// # Errors
    /// See [`RpcError`].
    pub async fn addax_mirror_read_meta(&self, bdev: &str, block: u64, blocks: u32) -> Result<Vec<u8>, RpcError> {
        let method = "addax_mirror_read_meta";
        let params = json!({"bdev_name": bdev, "block": block, "blocks": blocks});
        let read: MetaBlocks = self.call_as(method, params, CALL_DEADLINE).await?;
        let unfit = |reason: String| RpcError::Answer { method: method.to_owned(), reason };
        let data = BASE64.decode(&read.data).map_err(|error| unfit(error.to_string()))?;
        match data.len() == blocks as usize * META_BLOCK_BYTES {
            true => Ok(data),
            false => Err(unfit(format!("{} bytes instead of {blocks} blocks", data.len()))),
        }
    }

    /// Tells which instance of a replica the next session of its leg will find.
    ///
    /// # Errors
    /// See [`RpcError`].
    pub async fn addax_mirror_set_instance(&self, name: &str, replica: &str, instance: &str) -> Result<(), RpcError> {
        let params = json!({"name": name, "replica": replica, "instance": instance});
        self.call("addax_mirror_set_instance", params, CALL_DEADLINE).await.map(drop)
    }

    /// Tells that all hosts which were attached before the mirror was made have detached.
    ///
    /// # Errors
    /// See [`RpcError`].
    pub async fn addax_mirror_hosts_detached(&self, name: &str) -> Result<(), RpcError> {
        self.call("addax_mirror_hosts_detached", json!({"name": name}), CALL_DEADLINE).await.map(drop)
    }

    /// Takes a leg out.
    ///
    /// # Errors
    /// See [`RpcError`].
    pub async fn addax_mirror_remove_leg(&self, name: &str, replica: &str, deadline: Duration) -> Result<(), RpcError> {
        let params = json!({"name": name, "replica": replica});
        self.call("addax_mirror_remove_leg", params, deadline).await.map(drop)
    }

    /// Answers a swap. `outcome` is `committed`, `refused` or `unknown`; `config` is the record as it stands.
    ///
    /// # Errors
    /// See [`RpcError`].
    pub async fn addax_mirror_swap_answer(
        &self,
        name: &str,
        swap: u64,
        outcome: &str,
        config: Option<&MirrorConfig>,
    ) -> Result<(), RpcError> {
        let mut params = json!({"name": name, "swap": swap, "outcome": outcome});
        if let Some(config) = config {
            params["config"] = json!(config);
        }
        self.call("addax_mirror_swap_answer", params, CALL_DEADLINE).await.map(drop)
    }

    /// Closes a mirror in order; answered once the closing swap was answered.
    ///
    /// # Errors
    /// See [`RpcError`].
    pub async fn addax_mirror_close(&self, name: &str, deadline: Duration) -> Result<(), RpcError> {
        self.call("addax_mirror_close", json!({"name": name}), deadline).await.map(drop)
    }

    /// Deletes a mirror; absent is fine.
    ///
    /// # Errors
    /// See [`RpcError`].
    pub async fn addax_mirror_delete(&self, name: &str) -> Result<(), RpcError> {
        match self.call("addax_mirror_delete", json!({"name": name}), CALL_DEADLINE).await {
            Err(error) if !error.is_not_found() => Err(error),
            _ => Ok(()),
        }
    }

    /// Waits for events after a position, at most `wait`. Blocks this connection's answers: use one of its own.
    ///
    /// # Errors
    /// See [`RpcError`].
    pub async fn addax_wait_events(&self, after: u64, wait: Duration) -> Result<EventBatch, RpcError> {
        let timeout_ms = u64::try_from(wait.as_millis()).unwrap_or(u64::MAX);
        self.call_as("addax_wait_events", json!({"after": after, "timeout_ms": timeout_ms}), wait + CALL_DEADLINE).await
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn events_are_read_and_unknown_ones_are_kept_apart() {
        let batch: EventBatch = serde_json::from_value(json!({"next": 4, "events": [
            {"seq": 1, "type": "swap", "name": "m", "swap": 7, "reason": "leave", "next": {"lineage": "l", "epoch": 2,
                "engine_instance": "e", "config_number": 5, "in_sync": ["a"], "min_in_sync": 1, "size": 4096, "clean": false}},
            {"seq": 2, "type": "progress", "name": "m", "replica": "a", "copied_blocks": 1, "total_blocks": 2},
            {"seq": 3, "type": "later_invention", "name": "m"}]}))
        .unwrap();
        assert!(!batch.lost);
        let Event::Swap { name, swap } = &batch.events[0] else { panic!("{batch:?}") };
        assert_eq!((name.as_str(), swap.swap, swap.next.config_number), ("m", 7, 5));
        assert_eq!(batch.events[1].mirror(), Some("m"));
        assert_eq!(batch.events[2], Event::Unknown);
    }
}
