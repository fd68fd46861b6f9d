//! The three spellings of the record: the Volume's status, the mirror core's, the engine's RPC.
//!
//! *Invariants.* Conversions lose nothing. The API counts bytes, the core counts blocks of [`block_size`]. The API says
//! `""` for "no engine yet"; the core's names are never empty, so that is spelt [`NO_ENGINE`] there.
//!
//! *When things fail.* [`RecordParseError`] names the field and its value.

use mirror_core::{
    Config, ConfigNumber, EngineInstance, Epoch, LastSnapshot, Lineage, ReplicaId, SnapshotId, Tree, TreeVersion,
};

use addax_api::VolumeConfig;
use addax_api::volume::SnapshotTree;

use crate::rpc::MirrorConfig;
use crate::state::BLOCK_SIZE;

/// The core's name for the instance of a record that no engine has opened yet.
const NO_ENGINE: &str = "none";

/// A record that cannot be understood.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RecordParseError {
    /// A name or a set.
    #[error("status.config: {0}")]
    Config(#[from] mirror_core::ConfigError),
    /// The size.
    #[error("status.config.size is {0}: a positive multiple of {BLOCK_SIZE} is allowed")]
    Size(i64),
}

/// Bytes of a block of every volume.
pub const fn block_size() -> u32 {
    BLOCK_SIZE
}

fn replicas(names: &[String]) -> Result<std::collections::BTreeSet<ReplicaId>, RecordParseError> {
    Ok(names.iter().map(|name| ReplicaId::new(name)).collect::<Result<_, _>>()?)
}

fn names(replicas: &std::collections::BTreeSet<ReplicaId>) -> Vec<String> {
    replicas.iter().map(|replica| replica.as_str().to_owned()).collect()
}

fn tree(snapshots: &SnapshotTree) -> Result<Tree, RecordParseError> {
    let last = match snapshots.last.as_str() {
        "" => None,
        id => Some(LastSnapshot { id: SnapshotId::new(id)?, replicas: replicas(&snapshots.replicas)? }),
    };
    Ok(Tree { version: TreeVersion(snapshots.version), last })
}

fn snapshots(tree: &Tree) -> SnapshotTree {
    let last = tree.last.as_ref();
    SnapshotTree {
        version: tree.version.0,
        last: last.map(|last| last.id.to_string()).unwrap_or_default(),
        replicas: last.map(|last| names(&last.replicas)).unwrap_or_default(),
    }
}

/// Reads the API's record.
///
/// # Errors
/// See [`RecordParseError`].
pub fn record_to_config(record: &VolumeConfig) -> Result<Config, RecordParseError> {
    let size = u64::try_from(record.size).ok().filter(|size| *size > 0 && size.is_multiple_of(u64::from(BLOCK_SIZE)));
    let size = size.ok_or(RecordParseError::Size(record.size))?;
    let instance = if record.engine_instance.is_empty() { NO_ENGINE } else { &record.engine_instance };
    let config = Config {
        lineage: Lineage::new(&record.lineage)?,
        epoch: Epoch(record.epoch),
        engine_instance: EngineInstance::new(instance)?,
        config_number: ConfigNumber(record.config_number),
        in_sync: replicas(&record.in_sync)?,
        rebuilding: replicas(&record.rebuilding)?,
        min_in_sync: record.min_in_sync,
        size_blocks: size / u64::from(BLOCK_SIZE),
        clean: record.clean,
        tree: tree(&record.snapshots)?,
    };
    config.check()?;
    Ok(config)
}

/// Writes the API's record.
pub fn config_to_record(config: &Config) -> VolumeConfig {
    let instance = config.engine_instance.as_str();
    VolumeConfig {
        lineage: config.lineage.as_str().to_owned(),
        epoch: config.epoch.0,
        engine_instance: if instance == NO_ENGINE { String::new() } else { instance.to_owned() },
        config_number: config.config_number.0,
        in_sync: names(&config.in_sync),
        rebuilding: names(&config.rebuilding),
        min_in_sync: config.min_in_sync,
        size: i64::try_from(config.size_blocks.saturating_mul(u64::from(BLOCK_SIZE))).unwrap_or(i64::MAX),
        clean: config.clean,
        snapshots: snapshots(&config.tree),
    }
}

/// Writes the engine's record.
pub fn config_to_mirror(config: &Config) -> MirrorConfig {
    MirrorConfig {
        lineage: config.lineage.as_str().to_owned(),
        epoch: config.epoch.0,
        engine_instance: config.engine_instance.as_str().to_owned(),
        config_number: config.config_number.0,
        in_sync: names(&config.in_sync),
        rebuilding: names(&config.rebuilding),
        min_in_sync: config.min_in_sync,
        size: config.size_blocks.saturating_mul(u64::from(BLOCK_SIZE)),
        clean: config.clean,
        snapshots: snapshots(&config.tree),
    }
}

/// Reads the engine's record.
///
/// # Errors
/// See [`RecordParseError`].
pub fn mirror_to_config(mirror: &MirrorConfig) -> Result<Config, RecordParseError> {
    record_to_config(&VolumeConfig {
        lineage: mirror.lineage.clone(),
        epoch: mirror.epoch,
        engine_instance: mirror.engine_instance.clone(),
        config_number: mirror.config_number,
        in_sync: mirror.in_sync.clone(),
        rebuilding: mirror.rebuilding.clone(),
        min_in_sync: mirror.min_in_sync,
        size: i64::try_from(mirror.size).unwrap_or(-1),
        clean: mirror.clean,
        snapshots: mirror.snapshots.clone(),
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn record() -> VolumeConfig {
        VolumeConfig {
            lineage: "l".to_owned(),
            epoch: 3,
            engine_instance: String::new(),
            config_number: 9,
            in_sync: vec!["a".to_owned(), "b".to_owned()],
            rebuilding: vec!["c".to_owned()],
            min_in_sync: 2,
            size: 1 << 20,
            clean: true,
            snapshots: SnapshotTree { version: 4, last: "s".to_owned(), replicas: vec!["a".to_owned()] },
        }
    }

    #[test]
    fn all_spellings_read_back() {
        for instance in ["", "e-1"] {
            let record = VolumeConfig { engine_instance: instance.to_owned(), ..record() };
            let config = record_to_config(&record).unwrap();
            assert_eq!(config.size_blocks, 256);
            assert_eq!(config_to_record(&config), record);
            assert_eq!(mirror_to_config(&config_to_mirror(&config)).unwrap(), config);
        }
    }

    #[test]
    fn a_record_that_breaks_a_rule_is_refused_with_its_field() {
        for size in [0, -4096, 4095] {
            let error = record_to_config(&VolumeConfig { size, ..record() }).unwrap_err();
            assert!(error.to_string().contains("size"), "{error}");
        }
        assert!(record_to_config(&VolumeConfig { in_sync: Vec::new(), ..record() }).is_err());
        assert!(record_to_config(&VolumeConfig { rebuilding: vec!["a".to_owned()], ..record() }).is_err());
        assert!(record_to_config(&VolumeConfig { lineage: String::new(), ..record() }).is_err());
    }
}
