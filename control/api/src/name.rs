//! Names: which are allowed, and how the names of derived objects are made.
//!
//! A volume's name is a DNS label (RFC 1123) of at most 52 characters, because the names of its replicas are made by
//! adding a suffix of 11 and must be labels as well.

use thiserror::Error;

/// The longest DNS label.
pub const MAX_LABEL: usize = 63;
/// The longest name of a volume.
pub const MAX_VOLUME_NAME: usize = MAX_LABEL - REPLICA_INFIX.len() - REPLICA_SUFFIX_LEN;
/// Length of the part of a replica's name that tells it from the volume's other replicas.
pub const REPLICA_SUFFIX_LEN: usize = 8;

const REPLICA_INFIX: &str = "-r-";
const ENGINE_SUFFIX: &str = "-e";

/// Why a name is refused.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum NameError {
    /// Nothing was given.
    #[error("{field}: a name must not be empty")]
    Empty {
        /// The field that holds the name.
        field: String,
    },
    /// Too many characters.
    #[error("{field}: '{value}' has {length} characters; at most {max} are allowed")]
    TooLong {
        /// The field that holds the name.
        field: String,
        /// The name.
        value: String,
        /// Its length.
        length: usize,
        /// The longest allowed.
        max: usize,
    },
    /// A character that is not allowed, or not allowed there.
    #[error(
        "{field}: '{value}' may hold only lower-case letters, digits and '-', and must begin and end with a letter or digit"
    )]
    BadCharacter {
        /// The field that holds the name.
        field: String,
        /// The name.
        value: String,
    },
}

/// Checks a DNS label of at most `max` characters.
///
/// # Errors
/// Says the field, the value and what is allowed.
pub fn validate_label(field: &str, value: &str, max: usize) -> Result<(), NameError> {
    if value.is_empty() {
        return Err(NameError::Empty { field: field.to_owned() });
    }
    let length = value.chars().count();
    if length > max {
        return Err(NameError::TooLong { field: field.to_owned(), value: value.to_owned(), length, max });
    }
    let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
    let inside = value.chars().all(|c| plain(c) || c == '-');
    let ends = value.starts_with(plain) && value.ends_with(plain);
    if inside && ends {
        return Ok(());
    }
    Err(NameError::BadCharacter { field: field.to_owned(), value: value.to_owned() })
}

/// Checks the name of a volume.
///
/// # Errors
/// Says the value and what is allowed.
pub fn validate_volume_name(value: &str) -> Result<(), NameError> {
    validate_label("volume name", value, MAX_VOLUME_NAME)
}

/// Checks the name of a node.
///
/// # Errors
/// Says the value and what is allowed.
pub fn validate_node_name(value: &str) -> Result<(), NameError> {
    validate_label("node name", value, MAX_LABEL)
}

/// The name of the volume's engine object.
pub fn engine_name(volume: &str) -> String {
    format!("{volume}{ENGINE_SUFFIX}")
}

/// The name of a replica of the volume. The suffix must never have been used for this volume before: names of replicas
/// stand in the volume's record and on disks.
pub fn replica_name(volume: &str, suffix: &str) -> String {
    format!("{volume}{REPLICA_INFIX}{suffix}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_replicas_are_labels_for_the_longest_volume_name() {
        assert_eq!(MAX_VOLUME_NAME, 52);
        let volume = "a".repeat(MAX_VOLUME_NAME);
        validate_volume_name(&volume).unwrap();
        let replica = replica_name(&volume, &"0".repeat(REPLICA_SUFFIX_LEN));
        validate_label("name", &replica, MAX_LABEL).unwrap();
        validate_label("name", &engine_name(&volume), MAX_LABEL).unwrap();
    }

    #[test]
    fn refusals_name_the_value_and_the_rule() {
        for bad in ["A", "-a", "a-", "a.b", "a_b", "ä", "a b", "a/b"] {
            let error = validate_volume_name(bad).unwrap_err();
            assert!(matches!(error, NameError::BadCharacter { .. }), "{bad}");
            assert!(error.to_string().contains(bad));
        }
        assert!(matches!(validate_volume_name(""), Err(NameError::Empty { .. })));
        let error = validate_volume_name(&"a".repeat(53)).unwrap_err();
        assert!(error.to_string().contains("at most 52"), "{error}");
        for good in ["a", "0", "a-b", "db-0", "0a"] {
            validate_volume_name(good).unwrap();
        }
    }
}
