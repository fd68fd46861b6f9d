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
//! The epoch of that fence says nothing about who knows more; what counts is the epoch in the superblocks. A record that
//! is kept is raised to it, though, as no replica lets an engine in whose epoch is not above.
//!
//! *Invariants.* A volume is never initialised here: replicas without data are no proof that there was none. A rebuilt
//! record has a new lineage, a `k` above all that were seen and an epoch that no replica is above, a raised one another
//! epoch and author, so whatever engine or request is left of the time before finds another record and stops.
//!
//! *When things fail.* Missing replicas are waited for ([`Recovery::Wait`]); what contradicts itself is left to an
//! operator ([`Recovery::Ask`]), with the reason.

use std::collections::{BTreeMap, BTreeSet};

use crate::config::{Config, ConfigNumber, EngineInstance, Epoch, Lineage, ReplicaId, Tree};
use crate::meta::Superblock;

/// What a replica knows of its volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReplicaKnows {
    /// The record in its superblock; `clean` when the engine closed in order and this replica was a member.
    pub record: Config,
    /// Epoch it was promoted to: at least that of the record.
    pub promoted: Epoch,
}

impl ReplicaKnows {
    /// By a superblock, and the epoch that the replica itself keeps as promoted.
    #[must_use]
    pub fn of(superblock: &Superblock, promoted: Epoch) -> Self {
        Self { record: superblock.record.clone(), promoted: superblock.record.epoch.max(promoted) }
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
    /// The same, but replicas were promoted to a higher epoch, by the fence mostly: this record, which differs from the
    /// arbiter's in epoch and author alone, and never says that the last engine closed in order: one that did not, and
    /// acknowledged nothing, may have been promoted since.
    Raise(Box<Config>),
    /// No record, or an old copy: this one.
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
        Ok((_, newest)) => judge(evidence, &known, &newest.record),
        Err(reason) => Recovery::Ask(reason),
    }
}

/// The replica that knows most; refuses what contradicts itself.
fn newest<'a>(known: &[(&'a ReplicaId, &'a ReplicaKnows)]) -> Result<(&'a ReplicaId, &'a ReplicaKnows), AskReason> {
    let lineages: BTreeSet<Lineage> = known.iter().map(|(_, k)| k.record.lineage.clone()).collect();
    if lineages.len() > 1 {
        return Err(AskReason::Lineages(lineages));
    }
    let Some(newest) = known.iter().max_by_key(|(_, k)| k.record.config_number).copied() else {
        return Err(AskReason::NoData);
    };
    let content = |k: &ReplicaKnows| (k.record.in_sync.clone(), k.record.rebuilding.clone(), k.record.size_blocks);
    let same_number = known.iter().filter(|(_, k)| k.record.config_number == newest.1.record.config_number);
    match same_number.clone().find(|(_, k)| content(k) != content(newest.1)) {
        Some((other, _)) => Err(AskReason::Contradiction(newest.0.clone(), (*other).clone())),
        None => Ok(newest),
    }
}

fn judge(evidence: &Evidence, known: &[(&ReplicaId, &ReplicaKnows)], newest: &Config) -> Recovery {
    let promoted = known.iter().map(|(_, k)| k.promoted).max().unwrap_or_default();
    let carried = known.iter().map(|(_, k)| k.record.epoch).max().unwrap_or_default();
    if let Some(record) = &evidence.record
        && record.lineage == newest.lineage
        && record.epoch >= carried
        && record.config_number >= newest.config_number
    {
        return keep(record, promoted, &evidence.author);
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
    let closed = |r: &ReplicaId| known.iter().any(|(replica, k)| *replica == r && k.record.clean);
    let recorded = evidence.record.as_ref();
    Recovery::Rebuild(Box::new(Config {
        lineage: evidence.new_lineage.clone(),
        epoch: recorded.map_or(promoted, |r| r.epoch.max(promoted)),
        engine_instance: evidence.author.clone(),
        config_number: recorded.map_or(newest.config_number, |r| r.config_number.max(newest.config_number)).next(),
        clean: in_sync.iter().all(closed),
        rebuilding: newest.rebuilding.iter().filter(has_data).cloned().collect(),
        in_sync,
        tree: newest_tree(recorded, newest),
        ..newest.clone()
    }))
}

/// Replicas know the version of the snapshot tree alone; an old copy of the record may know more of that version.
fn newest_tree(recorded: Option<&Config>, newest: &Config) -> Tree {
    match recorded {
        Some(record) if record.tree.version >= newest.tree.version => record.tree.clone(),
        _ => newest.tree.clone(),
    }
}

/// The arbiter's record is right. Replicas that the recovery has fenced let in only whoever is above its epoch.
fn keep(record: &Config, promoted: Epoch, author: &EngineInstance) -> Recovery {
    if record.epoch >= promoted {
        return Recovery::Keep;
    }
    let raised = Config { epoch: promoted, engine_instance: author.clone(), clean: false, ..record.clone() };
    Recovery::Raise(Box::new(raised))
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
        Report::Knows(knows) if knows.record.lineage != record.lineage => {
            Err(KeepReason::Lineage { found: knows.record.lineage.clone(), recorded: record.lineage.clone() })
        }
        Report::Knows(knows) if knows.record.config_number >= record.config_number || knows.promoted > record.epoch => {
            let (found, epoch) = (knows.record.config_number, knows.promoted);
            Err(KeepReason::AsNewAsRecord { found, epoch, recorded: record.config_number })
        }
        Report::Knows(_) => Ok(()),
    }
}
