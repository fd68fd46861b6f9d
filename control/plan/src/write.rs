//! From an object as it is and as it should be to the patches between the two.
//!
//! Plans edit a copy of the object and hand both over. Nothing that is equal is written, so a plan may set every field
//! in every pass. Only `spec`, `status` and the finalizers are compared; what the Rust types do not know stays as it is.

use addax_api::{FINALIZER, ObjectMeta};
use jiff::Timestamp;
use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::action::{Action, Severity};
use crate::observed::Tabled;

/// The patches that make `old` into `new`: at most one for the spec and one for the status, in this order.
pub(crate) fn patches<T: Tabled + Serialize>(old: &T, new: &T) -> Vec<Action> {
    let object = old.reference();
    let (before, after) = (parts(old), parts(new));
    let mut actions = Vec::new();
    let main = merge_patch(&before.main, &after.main);
    if !main.is_empty() {
        actions.push(Action::PatchSpec { object: object.clone(), patch: Value::Object(main) });
    }
    let status = merge_patch(&before.status, &after.status);
    if !status.is_empty() {
        actions.push(Action::PatchStatus { object, patch: Value::Object(status) });
    }
    actions
}

struct Parts {
    main: Map<String, Value>,
    status: Map<String, Value>,
}

fn parts<T: Tabled + Serialize>(object: &T) -> Parts {
    // The API types are plain structs with string keys: they always serialise.
    let mut value = serde_json::to_value(object).unwrap_or_default();
    let mut take = |field: &str| value.get_mut(field).map(Value::take).unwrap_or_else(|| json!({}));
    let spec = take("spec");
    let status = match take("status") {
        Value::Null => json!({}),
        status => status,
    };
    let mut main = Map::new();
    main.insert("spec".to_owned(), spec);
    let finalizers = object.meta().finalizers.clone().unwrap_or_default();
    main.insert("metadata".to_owned(), json!({ "finalizers": finalizers }));
    let mut wrapped = Map::new();
    wrapped.insert("status".to_owned(), status);
    Parts { main, status: wrapped }
}

/// The JSON merge patch (RFC 7386) that makes `old` into `new`; empty when they are equal.
fn merge_patch(old: &Map<String, Value>, new: &Map<String, Value>) -> Map<String, Value> {
    let mut patch = Map::new();
    for key in old.keys().filter(|key| !new.contains_key(*key)) {
        patch.insert(key.clone(), Value::Null);
    }
    for (key, after) in new {
        match (old.get(key), after) {
            (Some(before), after) if before == after => {}
            (Some(Value::Object(before)), Value::Object(after)) => {
                let inner = merge_patch(before, after);
                if !inner.is_empty() {
                    patch.insert(key.clone(), Value::Object(inner));
                }
            }
            (_, after) => {
                patch.insert(key.clone(), after.clone());
            }
        }
    }
    patch
}

/// Adds our finalizer.
pub(crate) fn hold(meta: &mut ObjectMeta) {
    let finalizers = meta.finalizers.get_or_insert_default();
    if !finalizers.iter().any(|finalizer| finalizer == FINALIZER) {
        finalizers.push(FINALIZER.to_owned());
    }
}

/// Whether our finalizer is there.
pub(crate) fn is_held(meta: &ObjectMeta) -> bool {
    meta.finalizers.iter().flatten().any(|finalizer| finalizer == FINALIZER)
}

/// Takes our finalizer away.
pub(crate) fn release(meta: &mut ObjectMeta) {
    if let Some(finalizers) = &mut meta.finalizers {
        finalizers.retain(|finalizer| finalizer != FINALIZER);
    }
}

/// An event about an object.
pub(crate) fn event<T: Tabled>(object: &T, severity: Severity, reason: &str, message: String) -> Action {
    Action::Event { object: object.reference(), severity, reason: reason.to_owned(), message }
}

/// So many seconds later.
pub(crate) fn after(time: Timestamp, seconds: i64) -> Timestamp {
    time.checked_add(jiff::SignedDuration::from_secs(seconds)).unwrap_or(Timestamp::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use addax_api::{Volume, VolumeSpec, VolumeStatus};

    fn object(value: Value) -> Map<String, Value> {
        value.as_object().unwrap().clone()
    }

    #[test]
    fn a_patch_holds_only_what_differs() {
        let old = object(json!({"a": 1, "b": {"c": 1, "d": 2}, "e": [1], "g": {"h": 1}}));
        let new = object(json!({"a": 1, "b": {"c": 3}, "e": [1, 2], "f": {}, "g": {"h": 1}}));
        assert_eq!(Value::Object(merge_patch(&old, &new)), json!({"b": {"d": null, "c": 3}, "e": [1, 2], "f": {}}));
        assert!(merge_patch(&new, &new).is_empty());
    }

    #[test]
    fn spec_and_status_are_patched_apart_and_equal_ones_not_at_all() {
        let old = Volume::new("v", VolumeSpec::with_size(1 << 20));
        assert!(patches(&old, &old).is_empty());
        let mut new = old.clone();
        new.spec.node_id = "n1".to_owned();
        hold(&mut new.metadata);
        new.status = Some(VolumeStatus { owner_id: "n1".to_owned(), ..VolumeStatus::default() });
        let actions = patches(&old, &new);
        assert!(matches!(&actions[0], Action::PatchSpec { patch, .. }
            if *patch == json!({"spec": {"nodeID": "n1"}, "metadata": {"finalizers": ["addax.io"]}})));
        assert!(matches!(&actions[1], Action::PatchStatus { patch, .. }
            if patch["status"]["ownerID"] == "n1"));
        release(&mut new.metadata);
        assert!(!is_held(&new.metadata));
    }
}
