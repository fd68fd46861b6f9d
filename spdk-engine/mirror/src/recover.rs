//! When the arbiter's record is gone or old, and when data may be deleted (rules 11, 21 and 22): pure decisions.
//!
//! *What it is.* [`recover`] looks at the record that the arbiter holds, if any, and at what every known replica says of
//! itself, and tells which record is right. [`may_delete`] tells whether the data of a replica may go. Neither
//! changes anything; the caller reads the replicas and swaps the record in.
//!
//! *Why the newest superblock is right.* A record `(k, S, R)` is carried by every member of `S` before a write is
//! acknowledged by it (rule 6). So when every known replica was read, the highest `k` found is the last one under which
//! anything was acknowledged, or a later one that was committed and not yet used; in both cases each member of its `S`
//! has every acknowledged write. As long as one replica was not read, it may be the one that knows more.
//!
//! *Fence first.* Every replica is promoted to an epoch of the recovery's own, and drained, *before* its superblock is
//! read, as when a volume is opened. Else an engine that still runs could carry a swap that was committed before the
//! record was lost to replicas that were read already, and acknowledge writes by it.
//!
//! *Invariants.* A volume is never initialised here: replicas without data are no proof that there was none. A rebuilt
//! record has a new lineage, a `k` above all that were seen and an epoch that no replica is above, so whatever engine
//! or request is left of the time before finds another record and stops.
//!
//! *When things fail.* Missing replicas are waited for ([`Recovery::Wait`]); what contradicts itself is left to an
//! operator ([`Recovery::Ask`]), with the reason.

use std::collections::{BTreeMap, BTreeSet};

use crate::config::{Config, ConfigNumber, EngineInstance, Epoch, Lineage, ReplicaId};
use crate::meta::{ReplicaState, Superblock};

/// What a replica knows of its volume: its superblock, and the epoch it was promoted to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReplicaKnows {
    /// History it belongs to.
    pub lineage: Lineage,
    /// Epoch it was promoted to; at least that of its superblock.
    pub promoted: Epoch,
    /// Last known configuration number.
    pub config_number: ConfigNumber,
    /// Last known in-sync set.
    pub in_sync: BTreeSet<ReplicaId>,
    /// Last known rebuilding set.
    pub rebuilding: BTreeSet<ReplicaId>,
    /// Fewest members of `S`.
    pub min_in_sync: u32,
    /// Size of the volume in blocks.
    pub size_blocks: u64,
    /// The engine closed in order and this replica was a member.
    pub closed_clean: bool,
}

impl ReplicaKnows {
    /// By a superblock, and the epoch that the replica itself keeps as promoted.
    #[must_use]
    pub fn of(superblock: &Superblock, promoted: Epoch) -> Self {
        Self {
            lineage: superblock.lineage.clone(),
            promoted: superblock.epoch.max(promoted),
            config_number: superblock.config_number,
            in_sync: superblock.in_sync.clone(),
            rebuilding: superblock.rebuilding.clone(),
            min_in_sync: superblock.min_in_sync,
            size_blocks: superblock.size_blocks,
            closed_clean: superblock.state == ReplicaState::ClosedClean,
        }
    }
}

/// What became of asking a replica.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Report {
    /// It did not answer, or could not read its superblock.
    Unread,
    /// It is there and never belonged to this volume: a fresh or emptied disk.
    Empty,
    /// What it knows.
    Knows(Box<ReplicaKnows>),
}

/// What is known when the record is in doubt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Evidence {
    /// The record as the arbiter holds it; `None` when it is gone.
    pub record: Option<Config>,
    /// Every known replica of the volume, also those that neither set names.
    pub replicas: BTreeMap<ReplicaId, Report>,
    /// The lineage that a rebuilt record gets; never used before.
    pub new_lineage: Lineage,
    /// Who rebuilds it; never used by an engine.
    pub author: EngineInstance,
}

/// Why an operator has to decide.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AskReason {
    /// No replica is known, or none has data of the volume.
    #[error("no replica has data of the volume")]
    NoData,
    /// Replicas belong to different histories.
    #[error("replicas belong to the lineages {0:?}: one is required")]
    Lineages(BTreeSet<Lineage>),
    /// Two replicas remember different sets or sizes under the same number.
    #[error("replicas {0} and {1} remember different records under the same config_number")]
    Contradiction(ReplicaId, ReplicaId),
    /// None of the members of the newest record has its data.
    #[error("no member of the newest in-sync set {0:?} has its data")]
    MembersGone(BTreeSet<ReplicaId>),
    /// The record names replicas that are not among the known ones.
    #[error("replica {0} is recorded or remembered but not among the known replicas")]
    Unknown(ReplicaId),
}

/// Which record is right.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Recovery {
    /// The record the arbiter holds: no replica knows more. The hold may end.
    Keep,
    /// This one.
    Rebuild(Box<Config>),
    /// These known replicas have to be read first.
    Wait(BTreeSet<ReplicaId>),
    /// An operator has to decide.
    Ask(AskReason),
}

/// Decides which record is right (rule 21).
#[must_use]
pub fn recover(evidence: &Evidence) -> Recovery {
    let unread = evidence.replicas.iter().filter(|(_, report)| **report == Report::Unread);
    let unread: BTreeSet<ReplicaId> = unread.map(|(replica, _)| replica.clone()).collect();
    if !unread.is_empty() {
        return Recovery::Wait(unread);
    }
    let known: Vec<(&ReplicaId, &ReplicaKnows)> = evidence
        .replicas
        .iter()
        .filter_map(|(replica, report)| match report {
            Report::Knows(knows) => Some((replica, &**knows)),
            Report::Unread | Report::Empty => None,
        })
        .collect();
    match newest(&known) {
        Ok((_, newest)) => judge(evidence, &known, newest),
        Err(reason) => Recovery::Ask(reason),
    }
}

/// The replica that knows most; refuses what contradicts itself.
fn newest<'a>(known: &[(&'a ReplicaId, &'a ReplicaKnows)]) -> Result<(&'a ReplicaId, &'a ReplicaKnows), AskReason> {
    let lineages: BTreeSet<Lineage> = known.iter().map(|(_, k)| k.lineage.clone()).collect();
    if lineages.len() > 1 {
        return Err(AskReason::Lineages(lineages));
    }
    let Some(newest) = known.iter().max_by_key(|(_, k)| k.config_number).copied() else {
        return Err(AskReason::NoData);
    };
    let content = |k: &ReplicaKnows| (k.in_sync.clone(), k.rebuilding.clone(), k.size_blocks);
    let same_number = known.iter().filter(|(_, k)| k.config_number == newest.1.config_number);
    match same_number.clone().find(|(_, k)| content(k) != content(newest.1)) {
        Some((other, _)) => Err(AskReason::Contradiction(newest.0.clone(), (*other).clone())),
        None => Ok(newest),
    }
}

fn judge(evidence: &Evidence, known: &[(&ReplicaId, &ReplicaKnows)], newest: &ReplicaKnows) -> Recovery {
    let promoted = known.iter().map(|(_, k)| k.promoted).max().unwrap_or_default();
    if let Some(record) = &evidence.record
        && record.lineage == newest.lineage
        && record.epoch >= promoted
        && record.config_number >= newest.config_number
    {
        return Recovery::Keep;
    }
    let named = newest.in_sync.iter().chain(&newest.rebuilding);
    if let Some(stranger) = named.clone().find(|r| !evidence.replicas.contains_key(*r)) {
        return Recovery::Ask(AskReason::Unknown(stranger.clone()));
    }
    // A member that lost its data is no member; the others have every acknowledged write.
    let has_data = |r: &&ReplicaId| known.iter().any(|(replica, _)| replica == r);
    let in_sync: BTreeSet<ReplicaId> = newest.in_sync.iter().filter(has_data).cloned().collect();
    if in_sync.is_empty() {
        return Recovery::Ask(AskReason::MembersGone(newest.in_sync.clone()));
    }
    let closed = |r: &ReplicaId| known.iter().any(|(replica, k)| *replica == r && k.closed_clean);
    let recorded = evidence.record.as_ref();
    Recovery::Rebuild(Box::new(Config {
        lineage: evidence.new_lineage.clone(),
        epoch: recorded.map_or(promoted, |r| r.epoch.max(promoted)),
        engine_instance: evidence.author.clone(),
        config_number: recorded.map_or(newest.config_number, |r| r.config_number.max(newest.config_number)).next(),
        clean: in_sync.iter().all(closed),
        rebuilding: newest.rebuilding.iter().filter(has_data).cloned().collect(),
        in_sync,
        min_in_sync: newest.min_in_sync,
        size_blocks: newest.size_blocks,
    }))
}

/// Why the data of a replica has to stay.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum KeepReason {
    /// The record names it.
    #[error("the record names it in {0}: a swap has to take it out first")]
    Recorded(&'static str),
    /// Nobody knows the record.
    #[error("there is no record: its data may be the last copy")]
    NoRecord,
    /// It could not be read.
    #[error("its superblock could not be read")]
    Unread,
    /// It belongs to another history.
    #[error("its lineage is {found}, that of the record {recorded}")]
    Lineage {
        /// Its own.
        found: Lineage,
        /// That of the record.
        recorded: Lineage,
    },
    /// It knows as much as the record: the record may be an old copy.
    #[error("it knows config_number {found} and epoch {epoch}, as new as the record's {recorded}")]
    AsNewAsRecord {
        /// What it knows.
        found: ConfigNumber,
        /// What it was promoted to.
        epoch: Epoch,
        /// The record's number.
        recorded: ConfigNumber,
    },
}

/// Decides whether the data of a replica may be deleted without an operator (rule 22).
///
/// # Errors
/// Why it has to stay.
pub fn may_delete(record: Option<&Config>, replica: &ReplicaId, report: &Report) -> Result<(), KeepReason> {
    let record = record.ok_or(KeepReason::NoRecord)?;
    if record.in_sync.contains(replica) {
        return Err(KeepReason::Recorded("in_sync"));
    }
    if record.rebuilding.contains(replica) {
        return Err(KeepReason::Recorded("rebuilding"));
    }
    match report {
        Report::Unread => Err(KeepReason::Unread),
        Report::Empty => Ok(()),
        Report::Knows(knows) if knows.lineage != record.lineage => {
            Err(KeepReason::Lineage { found: knows.lineage.clone(), recorded: record.lineage.clone() })
        }
        Report::Knows(knows) if knows.config_number >= record.config_number || knows.promoted > record.epoch => {
            let (found, epoch) = (knows.config_number, knows.promoted);
            Err(KeepReason::AsNewAsRecord { found, epoch, recorded: record.config_number })
        }
        Report::Knows(_) => Ok(()),
    }
}
