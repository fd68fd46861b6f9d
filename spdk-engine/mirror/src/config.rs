//! The configuration record of a volume: what the arbiter keeps and every swap changes.
//!
//! *What it is.* Plain values: lineage, epoch, engine instance, configuration number `k`, in-sync set `S`,
//! rebuilding set `R`, `minInSync`, size, the version of the snapshot tree, and whether the last engine closed cleanly. No
//! behaviour beyond checks.
//!
//! *Invariants.* `S` is never empty; `S` and `R` are disjoint; `k` rises with every change of `S` or `R` (rule 8);
//! the epoch never falls, nor does the tree's version; a record is replaced only by compare-and-swap on its [`ConfigVersion`].
//!
//! *When things fail.* A record that breaks an invariant is refused by [`Config::check`] or
//! [`Config::check_successor`] with an error naming the field, the value and what is allowed.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;

/// Longest accepted name in bytes: a DNS label, so that names fit object names and NQNs.
pub const NAME_BYTES_MAX: usize = 63;

/// A record or a name that breaks an invariant.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// A name is empty, too long, or has other characters than letters, digits, `-`, `.` and `_`.
    #[error("{kind} {value:?} is not a name: 1 to 63 letters, digits, '-', '.' or '_' are allowed")]
    Name {
        /// Which name.
        kind: &'static str,
        /// The value given.
        value: String,
    },
    /// The in-sync set is empty.
    #[error("in_sync is empty: at least one member is required")]
    EmptyInSync,
    /// A replica is in both sets.
    #[error("replica {0} is in in_sync and in rebuilding: only one of them is allowed")]
    InBothSets(ReplicaId),
    /// A size of nothing.
    #[error("size_blocks is 0: at least 1 is required")]
    ZeroSize,
    /// The in-sync set would shrink below `minInSync`.
    #[error("in_sync would have {members} members: min_in_sync allows no fewer than {min}")]
    BelowMinimum {
        /// Members of the proposed set.
        members: usize,
        /// Fewest allowed.
        min: u32,
    },
    /// The epoch would fall.
    #[error("epoch would go from {from} to {to}: it never falls")]
    EpochFalls {
        /// Recorded epoch.
        from: Epoch,
        /// Proposed epoch.
        to: Epoch,
    },
    /// A set changed and `k` did not rise, or `k` fell.
    #[error("config_number would go from {from} to {to}: it rises with every change of a set and never falls")]
    ConfigNumber {
        /// Recorded number.
        from: ConfigNumber,
        /// Proposed number.
        to: ConfigNumber,
    },
    /// The version of the snapshot tree would fall.
    #[error("tree.version would go from {from} to {to}: it never falls")]
    TreeVersion {
        /// Recorded version.
        from: TreeVersion,
        /// Proposed version.
        to: TreeVersion,
    },
    /// The lineage would change.
    #[error("lineage would go from {from} to {to}: only a forced open may change it")]
    Lineage {
        /// Recorded lineage.
        from: Lineage,
        /// Proposed lineage.
        to: Lineage,
    },
}

macro_rules! name_type {
    ($(#[$doc:meta])* $name:ident, $kind:literal) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(Arc<str>);

        impl $name {
            /// Parses a name.
            ///
            /// # Errors
            /// [`ConfigError::Name`] unless it is 1 to 63 letters, digits, `-`, `.` or `_`.
            pub fn new(value: &str) -> Result<Self, ConfigError> {
                let legal = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'.' | b'_');
                if value.is_empty() || value.len() > NAME_BYTES_MAX || !value.bytes().all(legal) {
                    return Err(ConfigError::Name { kind: $kind, value: value.to_owned() });
                }
                Ok(Self(Arc::from(value)))
            }

            /// The name as text.
            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl std::str::FromStr for $name {
            type Err = ConfigError;
            fn from_str(value: &str) -> Result<Self, ConfigError> {
                Self::new(value)
            }
        }
    };
}

name_type!(
    /// Name of a volume.
    VolumeId,
    "volume"
);
name_type!(
    /// Name of a replica: one copy of the volume.
    ReplicaId,
    "replica"
);
name_type!(
    /// Name of one run of an engine; new at every start.
    EngineInstance,
    "engine instance"
);
name_type!(
    /// Name of a history of the volume; new at a forced open (rule 11).
    Lineage,
    "lineage"
);
name_type!(
    /// Name of an attempt to take a snapshot: a UUID, the same on every replica. A failed attempt is never tried again
    /// under its name.
    SnapshotId,
    "snapshot"
);

macro_rules! number_type {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
        pub struct $name(pub u64);

        impl $name {
            /// The next number. Saturates: 2^64 changes do not happen.
            #[must_use]
            pub fn next(self) -> Self {
                Self(self.0.saturating_add(1))
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}", self.0)
            }
        }
    };
}

number_type!(
    /// Epoch `g`: rises with every engine that opens the volume.
    Epoch
);
number_type!(
    /// Configuration number `k`: rises with every change of `S` or `R`.
    ConfigNumber
);
number_type!(
    /// Version of the snapshot tree: rises with every snapshot.
    TreeVersion
);

/// What the record says of the volume's snapshots.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Tree {
    /// How many snapshots were taken so far.
    pub version: TreeVersion,
    /// The latest of them.
    pub last: Option<LastSnapshot>,
}

/// The latest snapshot: whoever asked for it and did not hear the answer finds it here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LastSnapshot {
    /// Its name.
    pub id: SnapshotId,
    /// The replicas that have it: the in-sync set of that moment. What another replica has under the name is not it
    /// (rule 19).
    pub replicas: BTreeSet<ReplicaId>,
}

/// What a compare-and-swap compares: two records with the same version are the same record.
///
/// An arbiter that compares by `resourceVersion` reads the object, checks that its record has the expected
/// version, and writes with that object's `resourceVersion`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ConfigVersion {
    /// Lineage of the record.
    pub lineage: Lineage,
    /// Epoch of the record.
    pub epoch: Epoch,
    /// Engine that owns the epoch.
    pub engine_instance: EngineInstance,
    /// Configuration number.
    pub config_number: ConfigNumber,
    /// Whether the record says "closed cleanly".
    pub clean: bool,
}

/// The configuration record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// History this record belongs to.
    pub lineage: Lineage,
    /// Epoch `g`.
    pub epoch: Epoch,
    /// Engine instance `e` that raised the record to this epoch.
    pub engine_instance: EngineInstance,
    /// Configuration number `k`.
    pub config_number: ConfigNumber,
    /// In-sync set `S`: its members have every acknowledged write.
    pub in_sync: BTreeSet<ReplicaId>,
    /// Rebuilding set `R`: being copied to, never a source.
    pub rebuilding: BTreeSet<ReplicaId>,
    /// Fewest members `S` may shrink to. 1 (or 0) is the available mode, more is the strict mode.
    pub min_in_sync: u32,
    /// Size of the volume in blocks.
    pub size_blocks: u64,
    /// The last engine closed in order: all members are equal and flushed.
    pub clean: bool,
    /// The volume's snapshots.
    pub tree: Tree,
}

impl Config {
    /// The value a compare-and-swap compares.
    #[must_use]
    pub fn version(&self) -> ConfigVersion {
        ConfigVersion {
            lineage: self.lineage.clone(),
            epoch: self.epoch,
            engine_instance: self.engine_instance.clone(),
            config_number: self.config_number,
            clean: self.clean,
        }
    }

    /// Fewest members `S` may have: `min_in_sync`, but never 0.
    #[must_use]
    pub fn members_min(&self) -> usize {
        usize::try_from(self.min_in_sync.max(1)).unwrap_or(usize::MAX)
    }

    /// Checks the record by itself.
    ///
    /// # Errors
    /// The first broken invariant.
    pub fn check(&self) -> Result<(), ConfigError> {
        if self.in_sync.is_empty() {
            return Err(ConfigError::EmptyInSync);
        }
        if let Some(both) = self.in_sync.intersection(&self.rebuilding).next() {
            return Err(ConfigError::InBothSets(both.clone()));
        }
        if self.size_blocks == 0 {
            return Err(ConfigError::ZeroSize);
        }
        Ok(())
    }

    /// Checks that `next` may follow this record by a swap of an engine.
    ///
    /// # Errors
    /// The first broken invariant.
    pub fn check_successor(&self, next: &Config) -> Result<(), ConfigError> {
        next.check()?;
        if next.lineage != self.lineage {
            return Err(ConfigError::Lineage { from: self.lineage.clone(), to: next.lineage.clone() });
        }
        if next.epoch < self.epoch {
            return Err(ConfigError::EpochFalls { from: self.epoch, to: next.epoch });
        }
        let sets_changed = next.in_sync != self.in_sync || next.rebuilding != self.rebuilding;
        if next.config_number < self.config_number || (sets_changed && next.config_number == self.config_number) {
            return Err(ConfigError::ConfigNumber { from: self.config_number, to: next.config_number });
        }
        if next.tree.version < self.tree.version {
            return Err(ConfigError::TreeVersion { from: self.tree.version, to: next.tree.version });
        }
        let shrinks = next.in_sync.len() < self.in_sync.len();
        if shrinks && next.in_sync.len() < next.members_min() {
            return Err(ConfigError::BelowMinimum { members: next.in_sync.len(), min: next.min_in_sync });
        }
        Ok(())
    }
}
