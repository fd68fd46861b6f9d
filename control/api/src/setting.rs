//! Setting: one value that holds for the whole cluster. [`SETTINGS`] lists those that exist.
//!
//! A Setting object whose value does not parse is not applied (`status.applied` is false and says why); the last value
//! that did parse is not remembered, the default holds meanwhile. So a typing error can never stop the controllers.

use kube::{CustomResource, KubeSchema};
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// A value that holds for the whole cluster.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[kube(
    group = "addax.io",
    version = "v1alpha1",
    kind = "Setting",
    plural = "settings",
    shortname = "axset",
    category = "addax",
    namespaced,
    status = "SettingStatus",
    derive = "PartialEq",
    doc = "A value that holds for the whole cluster. The object's name is the setting's name.",
    printcolumn(name = "Value", type_ = "string", json_path = ".spec.value"),
    printcolumn(name = "Applied", type_ = "boolean", json_path = ".status.applied"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
pub struct SettingSpec {
    /// The value, as text.
    #[schemars(length(max = 4096))]
    pub value: String,
}

/// What became of the value.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct SettingStatus {
    /// The node whose manager acts on this object.
    #[serde(default, rename = "ownerID", skip_serializing_if = "String::is_empty")]
    pub owner_id: String,

    /// Whether the value is in force; if not, the default is.
    #[serde(default)]
    pub applied: bool,

    /// Why it is not in force.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub message: String,
}

/// What a setting's value may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SettingType {
    /// `true` or `false`.
    Bool,
    /// A whole number from `min` to `max`.
    Integer {
        /// The least value.
        min: i64,
        /// The greatest value.
        max: i64,
    },
}

/// A setting that exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SettingInfo {
    /// Its name, which is also the object's.
    pub name: &'static str,
    /// What its value may be.
    pub type_: SettingType,
    /// The value when nobody has set it.
    pub default: &'static str,
    /// What it does.
    pub doc: &'static str,
}

/// How many copies a volume gets when it does not say.
pub const DEFAULT_REPLICA_COUNT: &str = "default-replica-count";
/// Whether copies of a volume may share a node by default.
pub const REPLICA_SOFT_ANTI_AFFINITY: &str = "replica-soft-anti-affinity";
/// How much may be promised of a disk.
pub const STORAGE_OVER_PROVISIONING_PERCENTAGE: &str = "storage-over-provisioning-percentage";
/// How much of a disk must stay free.
pub const STORAGE_MINIMAL_AVAILABLE_PERCENTAGE: &str = "storage-minimal-available-percentage";
/// How much of the default disk is left to others.
pub const STORAGE_RESERVED_PERCENTAGE_FOR_DEFAULT_DISK: &str = "storage-reserved-percentage-for-default-disk";
/// How long a lost copy is waited for.
pub const REPLICA_REPLENISHMENT_WAIT_INTERVAL: &str = "replica-replenishment-wait-interval";
/// Raised after the cluster's objects were restored from a backup.
pub const RECOVERY_GENERATION: &str = "recovery-generation";
/// How many rebuilds a node takes at once.
pub const CONCURRENT_REPLICA_REBUILD_PER_NODE_LIMIT: &str = "concurrent-replica-rebuild-per-node-limit";
/// How long a node counts as alive after its last sign of life.
pub const NODE_LEASE_DURATION_SECONDS: &str = "node-lease-duration-seconds";
/// How often a node gives a sign of life.
pub const NODE_LEASE_RENEW_SECONDS: &str = "node-lease-renew-seconds";

/// Every setting that exists, by name.
pub const SETTINGS: &[SettingInfo] = &[
    SettingInfo {
        name: CONCURRENT_REPLICA_REBUILD_PER_NODE_LIMIT,
        type_: SettingType::Integer { min: 0, max: 100 },
        default: "5",
        doc: "How many rebuilds one node receives at once; 0 stops all rebuilds.",
    },
    SettingInfo {
        name: DEFAULT_REPLICA_COUNT,
        type_: SettingType::Integer { min: 1, max: 20 },
        default: "3",
        doc: "How many copies a volume gets when its maker does not say.",
    },
    SettingInfo {
        name: NODE_LEASE_DURATION_SECONDS,
        type_: SettingType::Integer { min: 2, max: 600 },
        default: "12",
        doc: "Seconds after its last sign of life when a node counts as dead and its objects get another owner.",
    },
    SettingInfo {
        name: NODE_LEASE_RENEW_SECONDS,
        type_: SettingType::Integer { min: 1, max: 300 },
        default: "4",
        doc: "Seconds between two signs of life of a node; keep it below a third of the lease's duration.",
    },
    SettingInfo {
        name: RECOVERY_GENERATION,
        type_: SettingType::Integer { min: 0, max: 1_000_000 },
        default: "0",
        doc: "Raise it by one after the objects of the cluster were restored from a backup: every volume is held until its \
              record was compared with all its copies.",
    },
    SettingInfo {
        name: REPLICA_REPLENISHMENT_WAIT_INTERVAL,
        type_: SettingType::Integer { min: 0, max: 86400 },
        default: "600",
        doc: "Seconds that a degraded volume waits for a lost copy to come back before it makes a new one.",
    },
    SettingInfo {
        name: REPLICA_SOFT_ANTI_AFFINITY,
        type_: SettingType::Bool,
        default: "false",
        doc: "Whether copies of any volume may share a node when there is no other place.",
    },
    SettingInfo {
        name: STORAGE_MINIMAL_AVAILABLE_PERCENTAGE,
        type_: SettingType::Integer { min: 0, max: 100 },
        default: "10",
        doc: "Percentage of a disk that must stay free when a copy is placed on it.",
    },
    SettingInfo {
        name: STORAGE_OVER_PROVISIONING_PERCENTAGE,
        type_: SettingType::Integer { min: 0, max: 10000 },
        default: "100",
        doc: "How much may be promised of a disk's capacity (without what is reserved), in percent of it.",
    },
    SettingInfo {
        name: STORAGE_RESERVED_PERCENTAGE_FOR_DEFAULT_DISK,
        type_: SettingType::Integer { min: 0, max: 100 },
        default: "10",
        doc: "Percentage of the disk made with a new node that is left to others.",
    },
];

/// Why a setting is refused.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum SettingError {
    /// No such setting.
    #[error("there is no setting '{name}'; known are: {known}")]
    UnknownName {
        /// The name given.
        name: String,
        /// The names that exist.
        known: String,
    },
    /// Not true or false.
    #[error("{name}: '{value}' must be true or false")]
    NotBool {
        /// The setting.
        name: &'static str,
        /// The value given.
        value: String,
    },
    /// Not a whole number in the range.
    #[error("{name}: '{value}' must be a whole number from {min} to {max}")]
    NotInRange {
        /// The setting.
        name: &'static str,
        /// The value given.
        value: String,
        /// The least value.
        min: i64,
        /// The greatest value.
        max: i64,
    },
}

impl SettingInfo {
    /// Checks a value.
    ///
    /// # Errors
    /// Says the setting, the value and what is allowed.
    pub fn validate(&self, value: &str) -> Result<(), SettingError> {
        match self.type_ {
            SettingType::Bool => value
                .parse::<bool>()
                .map(drop)
                .map_err(|_| SettingError::NotBool { name: self.name, value: value.to_owned() }),
            SettingType::Integer { min, max } => match value.parse::<i64>() {
                Ok(number) if (min..=max).contains(&number) => Ok(()),
                _ => Err(SettingError::NotInRange { name: self.name, value: value.to_owned(), min, max }),
            },
        }
    }
}

/// Finds a setting by name.
pub fn find(name: &str) -> Option<&'static SettingInfo> {
    SETTINGS.iter().find(|info| info.name == name)
}

/// Checks a setting's name and value.
///
/// # Errors
/// Says the setting, the value and what is allowed.
pub fn validate(name: &str, value: &str) -> Result<(), SettingError> {
    match find(name) {
        Some(info) => info.validate(value),
        None => Err(SettingError::UnknownName {
            name: name.to_owned(),
            known: SETTINGS.iter().map(|info| info.name).collect::<Vec<_>>().join(", "),
        }),
    }
}

/// The values in force, typed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// See [`CONCURRENT_REPLICA_REBUILD_PER_NODE_LIMIT`].
    pub concurrent_replica_rebuild_per_node_limit: u32,
    /// See [`DEFAULT_REPLICA_COUNT`].
    pub default_replica_count: u32,
    /// See [`NODE_LEASE_DURATION_SECONDS`].
    pub node_lease_duration_seconds: i64,
    /// See [`NODE_LEASE_RENEW_SECONDS`].
    pub node_lease_renew_seconds: i64,
    /// See [`RECOVERY_GENERATION`].
    pub recovery_generation: u32,
    /// See [`REPLICA_REPLENISHMENT_WAIT_INTERVAL`]; in seconds.
    pub replica_replenishment_wait_seconds: i64,
    /// See [`REPLICA_SOFT_ANTI_AFFINITY`].
    pub replica_soft_anti_affinity: bool,
    /// See [`STORAGE_MINIMAL_AVAILABLE_PERCENTAGE`].
    pub storage_minimal_available_percentage: i64,
    /// See [`STORAGE_OVER_PROVISIONING_PERCENTAGE`].
    pub storage_over_provisioning_percentage: i64,
    /// See [`STORAGE_RESERVED_PERCENTAGE_FOR_DEFAULT_DISK`].
    pub storage_reserved_percentage_for_default_disk: i64,
}

impl Default for Settings {
    fn default() -> Self {
        Self::from_values([])
    }
}

impl Settings {
    /// Takes the valid values among those given; the defaults stand for the rest.
    pub fn from_values<'a>(values: impl IntoIterator<Item = (&'a str, &'a str)>) -> Self {
        let given: Vec<(&str, &str)> =
            values.into_iter().filter(|(name, value)| validate(name, value).is_ok()).collect();
        let text = |name: &str| -> &str {
            let set = given.iter().rev().find(|(known, _)| *known == name).map(|(_, value)| *value);
            set.or_else(|| find(name).map(|info| info.default)).unwrap_or_default()
        };
        // Both the given values and the table's defaults passed `validate`, so these fall-backs are never taken.
        let number = |name: &str| -> i64 { text(name).parse().unwrap_or_default() };
        let count = |name: &str| -> u32 { text(name).parse().unwrap_or_default() };
        Self {
            concurrent_replica_rebuild_per_node_limit: count(CONCURRENT_REPLICA_REBUILD_PER_NODE_LIMIT),
            default_replica_count: count(DEFAULT_REPLICA_COUNT),
            node_lease_duration_seconds: number(NODE_LEASE_DURATION_SECONDS),
            node_lease_renew_seconds: number(NODE_LEASE_RENEW_SECONDS),
            recovery_generation: count(RECOVERY_GENERATION),
            replica_replenishment_wait_seconds: number(REPLICA_REPLENISHMENT_WAIT_INTERVAL),
            replica_soft_anti_affinity: text(REPLICA_SOFT_ANTI_AFFINITY) == "true",
            storage_minimal_available_percentage: number(STORAGE_MINIMAL_AVAILABLE_PERCENTAGE),
            storage_over_provisioning_percentage: number(STORAGE_OVER_PROVISIONING_PERCENTAGE),
            storage_reserved_percentage_for_default_disk: number(STORAGE_RESERVED_PERCENTAGE_FOR_DEFAULT_DISK),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_default_is_valid_and_every_name_is_a_label() {
        for info in SETTINGS {
            info.validate(info.default).unwrap();
            crate::name::validate_label("setting", info.name, crate::name::MAX_LABEL).unwrap();
            assert_eq!(find(info.name), Some(info));
        }
        assert!(SETTINGS.is_sorted_by_key(|info| info.name));
    }

    #[test]
    fn a_bad_value_leaves_the_default_in_force() {
        let settings = Settings::from_values([
            (DEFAULT_REPLICA_COUNT, "2"),
            (REPLICA_REPLENISHMENT_WAIT_INTERVAL, "soon"),
            (REPLICA_SOFT_ANTI_AFFINITY, "true"),
            ("no-such-setting", "1"),
        ]);
        assert_eq!(settings.default_replica_count, 2);
        assert_eq!(settings.replica_replenishment_wait_seconds, 600);
        assert!(settings.replica_soft_anti_affinity);
    }

    #[test]
    fn refusals_say_what_is_allowed() {
        let error = validate(DEFAULT_REPLICA_COUNT, "21").unwrap_err().to_string();
        assert_eq!(error, "default-replica-count: '21' must be a whole number from 1 to 20");
        let error = validate(REPLICA_SOFT_ANTI_AFFINITY, "yes").unwrap_err().to_string();
        assert!(error.contains("true or false"), "{error}");
        let error = validate("nope", "1").unwrap_err().to_string();
        assert!(error.contains("default-replica-count"), "{error}");
    }
}
