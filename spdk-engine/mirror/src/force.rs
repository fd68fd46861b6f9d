//! Opening by force: an operator names one replica although members of the in-sync set are out of reach (rule 11). A pure
//! decision.
//!
//! *What it is.* [`force_open`] looks at the record and at what was found of every known replica and gives the record that
//! makes the named replica the volume, or the reason why not. The caller has raised the record's epoch before and fences the
//! replica before it swaps the result in.
//!
//! *Invariants.* The new record has a new lineage and a higher number, so that nothing of before (an engine, a request, a
//! stamp) takes it for its own. The named replica is its only member. Every other replica with data is set aside: it may
//! hold acknowledged writes that the volume has lost, and is kept.
//!
//! *When force is needed.* As long as enough members can be reached the volume opens by itself, and force would only lose
//! what they hold. When some can be reached, but fewer than `min_in_sync` asks for, one of these has to be the named one: it
//! has every acknowledged write, and nothing is lost.
//!
//! *When things fail.* [`ForceRefusal`] names the replica, what was found of it, and what is allowed.

use std::collections::{BTreeMap, BTreeSet};

use crate::config::{Config, EngineInstance, Epoch, Lineage, ReplicaId};

/// What was found of a replica.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Found {
    /// It can be reached, and holds data.
    Used {
        /// The epoch that it was promoted to.
        promoted: Epoch,
        /// Its superblock says that a copy to it was under way: what it holds is a mixture.
        incomplete: bool,
    },
    /// It can be reached, and was never used.
    Fresh,
    /// Its agent answers and does not have it.
    Gone,
    /// Nobody answers for it, or its disk is away.
    Unreachable,
}

/// What an operator asks for, and what is known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ForceEvidence {
    /// The record as it is.
    pub record: Config,
    /// What was found of every known replica of the volume.
    pub replicas: BTreeMap<ReplicaId, Found>,
    /// The replica that is to be the volume.
    pub chosen: ReplicaId,
    /// The lineage that the record gets; never used before.
    pub new_lineage: Lineage,
    /// Who does it; never used by an engine.
    pub author: EngineInstance,
}

/// The record that goes on, and what becomes of the others.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Forced {
    /// The record.
    pub config: Config,
    /// Replicas that may hold data of the volume and are out of it now.
    pub discarded: BTreeSet<ReplicaId>,
    /// The named replica was in sync: nothing that was acknowledged is lost.
    pub lossless: bool,
}

/// Why not.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ForceRefusal {
    /// Enough members can be reached.
    #[error("replica {0} is in sync and can be reached: no force is needed, attach the volume")]
    NotNeeded(ReplicaId),
    /// A member can be reached, but another replica was named.
    #[error("replica is {chosen}: replica {member} is in sync and can be reached, only such a one is allowed")]
    MemberReachable {
        /// The named one.
        chosen: ReplicaId,
        /// The member.
        member: ReplicaId,
    },
    /// Not of this volume.
    #[error("replica is {chosen}: one of the volume's replicas is allowed: {}", names(.known))]
    Unknown {
        /// The named one.
        chosen: ReplicaId,
        /// Those that are known.
        known: BTreeSet<ReplicaId>,
    },
    /// It holds nothing.
    #[error("replica is {0}, which was never used: one that holds data is allowed")]
    NeverUsed(ReplicaId),
    /// It was being rebuilt.
    #[error(
        "replica is {0}, which was being rebuilt: it holds a mixture of old and new, one that was in sync is allowed"
    )]
    Incomplete(ReplicaId),
    /// It has no data any more.
    #[error("replica is {0}, whose node does not have it any more: one that can be reached is allowed")]
    Gone(ReplicaId),
    /// It cannot be reached.
    #[error("replica is {0}, which cannot be reached: one that can be reached is allowed")]
    Unreachable(ReplicaId),
}

fn names(replicas: &BTreeSet<ReplicaId>) -> String {
    replicas.iter().map(ReplicaId::as_str).collect::<Vec<_>>().join(", ")
}

/// Decides on a forced open.
///
/// # Errors
/// Why it is refused.
pub fn force_open(evidence: &ForceEvidence) -> Result<Forced, ForceRefusal> {
    let ForceEvidence { record, replicas, chosen, .. } = evidence;
    let promoted = match replicas.get(chosen) {
        None => {
            let known = replicas.keys().cloned().collect();
            return Err(ForceRefusal::Unknown { chosen: chosen.clone(), known });
        }
        Some(Found::Fresh) => return Err(ForceRefusal::NeverUsed(chosen.clone())),
        Some(Found::Gone) => return Err(ForceRefusal::Gone(chosen.clone())),
        Some(Found::Unreachable) => return Err(ForceRefusal::Unreachable(chosen.clone())),
        Some(Found::Used { incomplete, .. }) if *incomplete || record.rebuilding.contains(chosen) => {
            return Err(ForceRefusal::Incomplete(chosen.clone()));
        }
        Some(Found::Used { promoted, .. }) => *promoted,
    };
    let is_reachable = |member: &&ReplicaId| matches!(replicas.get(*member), Some(Found::Used { .. }));
    let reachable: BTreeSet<&ReplicaId> = record.in_sync.iter().filter(is_reachable).collect();
    let needed = record.members_min().min(record.in_sync.len());
    if let Some(member) = reachable.first().copied() {
        if reachable.len() >= needed {
            return Err(ForceRefusal::NotNeeded(member.clone()));
        }
        if !reachable.contains(chosen) {
            return Err(ForceRefusal::MemberReachable { chosen: chosen.clone(), member: member.clone() });
        }
    }
    let may_hold = |replica: &&ReplicaId| {
        let empty = matches!(replicas.get(*replica), Some(Found::Fresh | Found::Gone));
        *replica != chosen && !empty
    };
    let named = record.in_sync.iter().chain(&record.rebuilding);
    let discarded = replicas.keys().chain(named).filter(may_hold).cloned().collect();
    let config = Config {
        lineage: evidence.new_lineage.clone(),
        epoch: record.epoch.max(promoted),
        engine_instance: evidence.author.clone(),
        config_number: record.config_number.next(),
        in_sync: BTreeSet::from([chosen.clone()]),
        rebuilding: BTreeSet::new(),
        min_in_sync: record.min_in_sync,
        size_blocks: record.size_blocks,
        clean: false,
        tree: record.tree.clone(),
    };
    Ok(Forced { config, discarded, lossless: reachable.contains(chosen) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::ConfigNumber;
    use proptest::prelude::*;

    fn id(name: &str) -> ReplicaId {
        ReplicaId::new(name).unwrap()
    }

    fn ids(names: &[&str]) -> BTreeSet<ReplicaId> {
        names.iter().map(|name| id(name)).collect()
    }

    const USED: Found = Found::Used { promoted: Epoch(7), incomplete: false };

    fn evidence(members: &[&str], min: u32, found: &[(&str, Found)], chosen: &str) -> ForceEvidence {
        let record = Config {
            lineage: Lineage::new("l").unwrap(),
            epoch: Epoch(9),
            engine_instance: EngineInstance::new("e").unwrap(),
            config_number: ConfigNumber(5),
            in_sync: ids(members),
            rebuilding: BTreeSet::new(),
            min_in_sync: min,
            size_blocks: 256,
            clean: true,
            tree: Default::default(),
        };
        ForceEvidence {
            record,
            replicas: found.iter().map(|(name, found)| (id(name), *found)).collect(),
            chosen: id(chosen),
            new_lineage: Lineage::new("new").unwrap(),
            author: EngineInstance::new("author").unwrap(),
        }
    }

    #[test]
    fn rule_11_a_stale_replica_becomes_the_volume_under_a_new_lineage_and_the_members_are_kept() {
        let lost = Found::Unreachable;
        let forced =
            force_open(&evidence(&["a", "b"], 1, &[("a", lost), ("b", Found::Gone), ("c", USED)], "c")).unwrap();
        assert_eq!((forced.config.in_sync, forced.config.lineage.as_str()), (ids(&["c"]), "new"));
        assert_eq!((forced.config.config_number, forced.config.epoch), (ConfigNumber(6), Epoch(9)));
        assert!(!forced.config.clean && !forced.lossless);
        assert_eq!(forced.discarded, ids(&["a"]), "b has no data to keep");
    }

    #[test]
    fn what_is_not_needed_or_not_possible_is_refused_with_its_reason() {
        let lost = Found::Unreachable;
        let refuse = |members: &[&str], min, found: &[(&str, Found)], chosen| {
            force_open(&evidence(members, min, found, chosen)).unwrap_err()
        };
        assert_eq!(
            refuse(&["a", "b"], 1, &[("a", lost), ("b", USED), ("c", USED)], "c"),
            ForceRefusal::NotNeeded(id("b"))
        );
        assert_eq!(refuse(&["a"], 1, &[("a", USED)], "a"), ForceRefusal::NotNeeded(id("a")));
        assert_eq!(refuse(&["a"], 1, &[("a", lost), ("c", Found::Fresh)], "c"), ForceRefusal::NeverUsed(id("c")));
        assert_eq!(refuse(&["a"], 1, &[("a", lost), ("c", lost)], "c"), ForceRefusal::Unreachable(id("c")));
        assert_eq!(refuse(&["a"], 1, &[("a", lost), ("c", Found::Gone)], "c"), ForceRefusal::Gone(id("c")));
        let mixed = Found::Used { promoted: Epoch(7), incomplete: true };
        assert_eq!(refuse(&["a"], 1, &[("a", lost), ("c", mixed)], "c"), ForceRefusal::Incomplete(id("c")));
        let unknown = refuse(&["a"], 1, &[("a", lost), ("c", USED)], "x").to_string();
        assert!(unknown.contains("replica is x") && unknown.contains("a, c"), "{unknown}");
        let other = refuse(&["a", "b"], 2, &[("a", USED), ("b", lost), ("c", USED)], "c").to_string();
        assert!(other.contains("replica is c") && other.contains("replica a is in sync"), "{other}");
    }

    #[test]
    fn in_strict_mode_the_member_that_is_left_goes_on_alone_and_nothing_is_lost() {
        let forced = force_open(&evidence(&["a", "b"], 2, &[("a", USED), ("b", Found::Unreachable)], "a")).unwrap();
        assert!(forced.lossless);
        assert_eq!((forced.config.in_sync, forced.discarded), (ids(&["a"]), ids(&["b"])));
    }

    fn found() -> impl Strategy<Value = Found> {
        let used = (0..20_u64, 0..4_u8)
            .prop_map(|(promoted, odd)| Found::Used { promoted: Epoch(promoted), incomplete: odd == 0 });
        prop_oneof![3 => used, 1 => Just(Found::Fresh), 1 => Just(Found::Gone), 2 => Just(Found::Unreachable)]
    }

    proptest! {
        /// Whatever is found: the result is a lawful record above everything, nothing with data is forgotten, and nobody is
        /// forced past members that could serve.
        #[test]
        fn a_forced_record_stands_above_what_was_and_keeps_all_data(
            found in proptest::collection::vec(found(), 4),
            members in 1..16_u8, min in 1..4_u32, chosen in 0..4_usize,
        ) {
            const NAMES: [&str; 4] = ["a", "b", "c", "d"];
            let in_sync: Vec<&str> = (0..4).filter(|i| members & (1 << i) != 0).map(|i| NAMES[i]).collect();
            let all: Vec<(&str, Found)> = NAMES.into_iter().zip(found).collect();
            let evidence = evidence(&in_sync, min, &all, NAMES[chosen]);
            let used = |name: &ReplicaId| matches!(evidence.replicas[name], Found::Used { .. });
            let reachable = evidence.record.in_sync.iter().filter(|m| used(m)).count();
            let needed = evidence.record.members_min().min(in_sync.len());
            match force_open(&evidence) {
                Ok(forced) => {
                    forced.config.check().unwrap();
                    prop_assert!(reachable < needed);
                    prop_assert!(reachable == 0 || evidence.record.in_sync.contains(&evidence.chosen));
                    prop_assert_eq!(forced.lossless, reachable > 0);
                    prop_assert!(forced.config.config_number > evidence.record.config_number);
                    prop_assert!(forced.config.lineage != evidence.record.lineage);
                    for (name, found) in &evidence.replicas {
                        if let Found::Used { promoted, .. } = found {
                            let kept = *name == evidence.chosen || forced.discarded.contains(name);
                            prop_assert!(kept && (*name != evidence.chosen || forced.config.epoch >= *promoted));
                        }
                    }
                    prop_assert!(!forced.discarded.contains(&evidence.chosen));
                }
                Err(ForceRefusal::Incomplete(_)) => {
                    let incomplete = matches!(evidence.replicas[&evidence.chosen], Found::Used { incomplete: true, .. });
                    prop_assert!(incomplete);
                }
                Err(_) => prop_assert!(reachable >= needed || !used(&evidence.chosen)
                    || (reachable > 0 && !evidence.record.in_sync.contains(&evidence.chosen))),
            }
        }
    }
}
