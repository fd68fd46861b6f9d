//! The mirror's record as JSON, and the statuses of its results.

use std::collections::BTreeSet;

use mirror_core::{
    Config, ConfigError, ConfigNumber, EngineInstance, Epoch, HostError, LastSnapshot, LegError, Lineage, ReplicaId,
    SnapshotId, Tree, TreeVersion,
};
use nvme_wire::Status;
use nvme_wire::status::StatusCodeType;
use serde::{Deserialize, Serialize};

/// The configuration record in RPC calls and events; sizes in bytes.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ConfigJson {
    pub lineage: String,
    pub epoch: u64,
    pub engine_instance: String,
    pub config_number: u64,
    pub in_sync: Vec<String>,
    pub rebuilding: Vec<String>,
    pub min_in_sync: u32,
    pub size: u64,
    #[serde(default)]
    pub clean: bool,
    #[serde(default)]
    pub snapshots: TreeJson,
}

/// What the record says of snapshots.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TreeJson {
    #[serde(default)]
    pub version: u64,
    /// The latest one; empty when there is none.
    #[serde(default)]
    pub last: String,
    /// The replicas that have it.
    #[serde(default)]
    pub replicas: Vec<String>,
}

impl TreeJson {
    fn of(tree: &Tree) -> Self {
        let last = tree.last.as_ref();
        Self {
            version: tree.version.0,
            last: last.map(|l| l.id.to_string()).unwrap_or_default(),
            replicas: last.map(|l| l.replicas.iter().map(ToString::to_string).collect()).unwrap_or_default(),
        }
    }

    fn parse(&self) -> Result<Tree, ConfigError> {
        let replicas = self.replicas.iter().map(|n| ReplicaId::new(n)).collect::<Result<BTreeSet<_>, _>>()?;
        let last = match self.last.as_str() {
            "" => None,
            id => Some(LastSnapshot { id: SnapshotId::new(id)?, replicas }),
        };
        Ok(Tree { version: TreeVersion(self.version), last })
    }
}

impl ConfigJson {
    /// The JSON form of a record.
    #[must_use]
    pub fn of(config: &Config, block_size: u32) -> Self {
        let names = |set: &BTreeSet<ReplicaId>| set.iter().map(ToString::to_string).collect();
        Self {
            lineage: config.lineage.to_string(),
            epoch: config.epoch.0,
            engine_instance: config.engine_instance.to_string(),
            config_number: config.config_number.0,
            in_sync: names(&config.in_sync),
            rebuilding: names(&config.rebuilding),
            min_in_sync: config.min_in_sync,
            size: config.size_blocks * u64::from(block_size),
            clean: config.clean,
            snapshots: TreeJson::of(&config.tree),
        }
    }

    /// The record.
    ///
    /// # Errors
    /// A name that is none.
    pub fn parse(&self, block_size: u32) -> Result<Config, ConfigError> {
        let names = |list: &[String]| list.iter().map(|n| ReplicaId::new(n)).collect::<Result<BTreeSet<_>, _>>();
        Ok(Config {
            lineage: Lineage::new(&self.lineage)?,
            epoch: Epoch(self.epoch),
            engine_instance: EngineInstance::new(&self.engine_instance)?,
            config_number: ConfigNumber(self.config_number),
            in_sync: names(&self.in_sync)?,
            rebuilding: names(&self.rebuilding)?,
            min_in_sync: self.min_in_sync,
            size_blocks: self.size / u64::from(block_size),
            clean: self.clean,
            tree: self.snapshots.parse()?,
        })
    }
}

/// What a leg's completion says to the core.
pub fn leg_result(status: Status) -> Result<(), LegError> {
    if status.is_success() {
        return Ok(());
    }
    let gone = [Status::ABORTED_SQ_DELETION, Status::TRANSIENT_TRANSPORT_ERROR, Status::ABORTED_BY_REQUEST];
    Err(match status.code_type() {
        StatusCodeType::Path => LegError::Gone,
        _ if gone.iter().any(|g| status.is(*g)) => LegError::Gone,
        _ if status.is(Status::CAPACITY_EXCEEDED) => LegError::NoSpace,
        StatusCodeType::Media => LegError::Media,
        _ => LegError::Other,
    })
}

/// What a host is told. [`Status::INTERNAL_PATH_ERROR`] makes the target end the connection instead of answering, so
/// that the host looks for the volume elsewhere and does not use up its retries here.
pub fn host_status(error: HostError) -> Status {
    match error {
        HostError::PathGone | HostError::Closing => Status::INTERNAL_PATH_ERROR,
        HostError::Media => Status::UNRECOVERED_READ_ERROR,
        HostError::NoSpace => Status::CAPACITY_EXCEEDED,
        HostError::OutOfRange => Status::LBA_OUT_OF_RANGE.with_dnr(),
        HostError::Busy => Status::COMMAND_INTERRUPTED,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statuses_say_what_the_core_must_know() {
        assert_eq!(leg_result(Status::SUCCESS), Ok(()));
        assert_eq!(leg_result(Status::HOST_PATHING_ERROR), Err(LegError::Gone));
        assert_eq!(leg_result(Status::CAPACITY_EXCEEDED.with_dnr()), Err(LegError::NoSpace));
        assert_eq!(leg_result(Status::WRITE_FAULT), Err(LegError::Media));
        assert_eq!(leg_result(Status::INVALID_FIELD), Err(LegError::Other));
    }

    #[test]
    fn a_record_survives_the_way_through_json() {
        let json = ConfigJson {
            lineage: "l".into(),
            epoch: 3,
            engine_instance: "e".into(),
            config_number: 7,
            in_sync: vec!["a".into()],
            rebuilding: vec!["b".into()],
            min_in_sync: 1,
            size: 8192,
            clean: true,
            snapshots: TreeJson { version: 2, last: "s".into(), replicas: vec!["a".into()] },
        };
        let config = json.parse(4096).unwrap();
        assert_eq!(config.size_blocks, 2);
        let back = ConfigJson::of(&config, 4096);
        assert_eq!(serde_json::to_value(back).unwrap(), serde_json::to_value(json).unwrap());
    }
}
