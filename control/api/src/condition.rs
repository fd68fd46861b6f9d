//! Conditions: named facts about an object, each with the time since which it has been so.
//!
//! *Invariant.* `lastTransitionTime` moves only when `status` does; writing the same fact again changes nothing, so a
//! controller may set its conditions in every pass without causing a write.

use jiff::Timestamp;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::Time;

/// A fact about the object, with its reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Condition {
    /// Name of the fact, in CamelCase.
    #[serde(rename = "type")]
    #[schemars(length(min = 1, max = 64))]
    pub type_: String,
    /// Whether the fact holds.
    pub status: ConditionStatus,
    /// One CamelCase word for the cause, meant for programs.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reason: String,
    /// One sentence for people.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub message: String,
    /// When the status last changed.
    pub last_transition_time: Time,
}

/// Whether a condition holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum ConditionStatus {
    /// It holds.
    True,
    /// It does not hold.
    False,
    /// It cannot be told.
    Unknown,
}

impl From<bool> for ConditionStatus {
    fn from(holds: bool) -> Self {
        if holds { Self::True } else { Self::False }
    }
}

/// Finds a condition by its type.
pub fn get<'a>(conditions: &'a [Condition], type_: &str) -> Option<&'a Condition> {
    conditions.iter().find(|condition| condition.type_ == type_)
}

/// Whether a condition is there and holds.
pub fn is_true(conditions: &[Condition], type_: &str) -> bool {
    get(conditions, type_).is_some_and(|condition| condition.status == ConditionStatus::True)
}

/// Sets a condition; keeps `lastTransitionTime` when the status stays. Returns whether anything changed.
pub fn set(
    conditions: &mut Vec<Condition>,
    type_: &str,
    status: impl Into<ConditionStatus>,
    reason: &str,
    message: &str,
    now: Timestamp,
) -> bool {
    let mut fresh = Condition {
        type_: type_.to_owned(),
        status: status.into(),
        reason: reason.to_owned(),
        message: message.to_owned(),
        last_transition_time: Time(now),
    };
    match conditions.iter_mut().find(|condition| condition.type_ == type_) {
        None => {
            conditions.push(fresh);
            true
        }
        Some(present) => {
            if present.status == fresh.status {
                fresh.last_transition_time = present.last_transition_time.clone();
            }
            let changed = *present != fresh;
            *present = fresh;
            changed
        }
    }
}

/// Takes a condition away. Returns whether it was there.
pub fn remove(conditions: &mut Vec<Condition>, type_: &str) -> bool {
    let before = conditions.len();
    conditions.retain(|condition| condition.type_ != type_);
    conditions.len() != before
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    #[test]
    fn the_transition_time_moves_only_with_the_status() {
        let mut conditions = Vec::new();
        assert!(set(&mut conditions, "Ready", true, "Up", "all is well", at(1)));
        assert!(!set(&mut conditions, "Ready", true, "Up", "all is well", at(2)));
        assert!(set(&mut conditions, "Ready", true, "Up", "still well", at(3)));
        assert_eq!(get(&conditions, "Ready").unwrap().last_transition_time, Time(at(1)));
        assert!(set(&mut conditions, "Ready", false, "Down", "no answer", at(4)));
        assert_eq!(get(&conditions, "Ready").unwrap().last_transition_time, Time(at(4)));
        assert!(!is_true(&conditions, "Ready"));
        assert!(remove(&mut conditions, "Ready"));
        assert!(!remove(&mut conditions, "Ready"));
    }
}
