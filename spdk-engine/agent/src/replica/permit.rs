//! By which record the data of a replica may go (rule 22).
//!
//! *What it is.* A caller that removes a replica because a volume does without it says by which record it judges. What the
//! replica itself knows, its superblock and what it was promoted to, is then held against that record: one that knows as much
//! stays, since the record may be an old copy. The decision is [`mirror_core::recover::may_delete`].
//!
//! *When things fail.* A superblock that cannot be read keeps the data. Where there is none, because only a stock engine has used
//! the replica or its data plane cannot read it, what the replica was promoted to is all there is to go by.

use std::collections::BTreeSet;

use addax_api::VolumeConfig;
use addax_proto::engine_v1 as pb;
use mirror_core::meta::{SUPERBLOCK_SLOTS, Superblock, newest_superblock};
use mirror_core::recover::{ReplicaKnows, Report, may_delete};
use mirror_core::{Config, ConfigNumber, Epoch, Lineage, ReplicaId};

use super::invalid;
use crate::arbiter::record_to_config;
use crate::disk::ReadyDisk;
use crate::error::AgentError;
use crate::state::{BLOCK_SIZE, ReplicaRecord, meta_lvol_name};

/// A record, and the lineages that it is known to have left behind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Permit {
    record: Config,
    over: BTreeSet<String>,
}

impl Permit {
    /// By the caller's words.
    ///
    /// # Errors
    /// [`AgentError::Invalid`] with what is wrong in the record.
    pub fn parse(record: pb::Record) -> Result<Self, AgentError> {
        let over = record.over.into_iter().collect();
        let parsed = record_to_config(&VolumeConfig {
            lineage: record.lineage.clone(),
            epoch: record.epoch,
            engine_instance: String::new(),
            config_number: record.config_number,
            in_sync: record.in_sync,
            rebuilding: record.rebuilding,
            min_in_sync: 1,
            // Not compared; a record has one.
            size: i64::from(BLOCK_SIZE),
            clean: false,
            snapshots: Default::default(),
        });
        let record = parsed.map_err(|error| invalid("record", &record.lineage, error))?;
        Ok(Self { record, over })
    }

    /// Whether the data of the replica may go, by what it knows.
    ///
    /// # Errors
    /// [`AgentError::Forbidden`] with the reason why it stays.
    pub(super) fn check(&self, replica: &ReplicaRecord, superblock: Option<&Superblock>) -> Result<(), AgentError> {
        let name = replica.replica.as_str();
        let id = ReplicaId::new(name).map_err(|error| invalid("name", name, error))?;
        let report = match replica.is_fresh() {
            true => Report::Empty,
            false => Report::Knows(Box::new(self.knows(replica, superblock)?)),
        };
        may_delete(Some(&self.record), &id, &report)
            .map_err(|reason| AgentError::Forbidden(format!("the data of replica '{name}' stays: {reason}")))
    }

    fn knows(&self, replica: &ReplicaRecord, superblock: Option<&Superblock>) -> Result<ReplicaKnows, AgentError> {
        let promoted = Epoch(replica.promoted_epoch);
        let damaged = |error: mirror_core::ConfigError| AgentError::Damaged(error.to_string());
        let mut knows = match superblock {
            Some(superblock) => ReplicaKnows::of(superblock, promoted),
            None => {
                let record = Config {
                    lineage: Lineage::new(&replica.lineage).map_err(damaged)?,
                    config_number: ConfigNumber(0),
                    in_sync: BTreeSet::new(),
                    rebuilding: BTreeSet::new(),
                    clean: false,
                    ..self.record.clone()
                };
                ReplicaKnows { record, promoted }
            }
        };
        // Of a history that is over nothing is as new as the record, which came after it.
        let known = &mut knows.record;
        if self.over.contains(known.lineage.as_str()) {
            (known.lineage, known.config_number) = (self.record.lineage.clone(), ConfigNumber(0));
        }
        Ok(knows)
    }
}

/// The superblock in a replica's meta area, read by the data plane that has its disk; `None` when there is none that it could
/// read.
pub(super) async fn read_superblock(
    disk: &ReadyDisk,
    replica: &ReplicaRecord,
) -> Result<Option<Superblock>, AgentError> {
    let plane = &disk.plane;
    let lvol = replica.meta.as_ref().and_then(|meta| meta.lvol).filter(|_| plane.has_mirror());
    let Some(lvol) = lvol else { return Ok(None) };
    let found = plane.client.find_bdev(&disk.lvol_alias(&meta_lvol_name(&replica.replica))).await?;
    if found.is_none_or(|bdev| bdev.uuid != lvol.to_string()) {
        return Ok(None);
    }
    let slots = u32::try_from(SUPERBLOCK_SLOTS).unwrap_or(u32::MAX);
    let bytes = plane.client.addax_mirror_read_meta(&lvol.to_string(), 0, slots).await?;
    let own = |s: &Superblock| s.replica.as_str() == replica.replica && s.volume.as_str() == replica.volume;
    Ok(newest_superblock(&bytes).filter(own))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use uuid::Uuid;

    fn permit(over: &[&str]) -> Permit {
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        let record = pb::Record {
            lineage: "l".to_owned(),
            epoch: 5,
            config_number: 7,
            in_sync: names(&["a"]),
            rebuilding: names(&["b"]),
            over: names(over),
        };
        Permit::parse(record).unwrap()
    }

    fn replica(name: &str, promoted_epoch: u64, lineage: &str) -> ReplicaRecord {
        ReplicaRecord {
            replica: name.to_owned(),
            volume: "v".to_owned(),
            size: 1 << 20,
            disk: "d".to_owned(),
            lvstore: Uuid::nil(),
            lvol: None,
            meta: None,
            uuid: Uuid::nil(),
            lineage: lineage.to_owned(),
            promoted_epoch,
            promoted_instance: String::new(),
            created: 0,
            running: false,
            deleted: false,
        }
    }

    fn superblock(number: u64, lineage: &str) -> Superblock {
        super::super::tests::superblock("c", number, lineage)
    }

    #[test]
    fn rule_22_what_is_as_new_as_the_record_or_named_by_it_stays() {
        let refuse = |permit: &Permit, replica: &ReplicaRecord, superblock: Option<Superblock>| {
            permit.check(replica, superblock.as_ref()).unwrap_err().to_string()
        };
        let (now, used) = (permit(&[]), replica("c", 3, "l"));
        assert!(refuse(&now, &replica("a", 3, "l"), None).contains("in_sync"));
        assert!(refuse(&now, &replica("b", 0, ""), None).contains("rebuilding"));
        assert!(refuse(&now, &used, Some(superblock(7, "l"))).contains("config_number 7"));
        assert!(refuse(&now, &replica("c", 6, "l"), None).contains("epoch 6"));
        assert!(refuse(&now, &used, Some(superblock(2, "other"))).contains("lineage"));
        now.check(&used, Some(&superblock(6, "l"))).unwrap();
        now.check(&used, None).unwrap();
        now.check(&replica("c", 0, ""), None).unwrap();
        // Of a history that is known to be over, whatever its numbers were.
        permit(&["other"]).check(&used, Some(&superblock(9, "other"))).unwrap();
    }

    #[test]
    fn a_record_that_is_none_is_refused() {
        let error = Permit::parse(pb::Record { lineage: "l".to_owned(), ..pb::Record::default() }).unwrap_err();
        assert!(matches!(error, AgentError::Invalid { field: "record", .. }), "{error}");
    }
}
