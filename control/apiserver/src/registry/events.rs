//! The two forms of events: core `v1`, in which they are stored, and `events.k8s.io/v1`, in which controllers write them.

use serde_json::{Map, Value, json};

/// Field names in core form and in `events.k8s.io` form; other fields have one name.
const RENAMED: [(&str, &str); 7] = [
    ("involvedObject", "regarding"),
    ("message", "note"),
    ("reportingComponent", "reportingController"),
    ("source", "deprecatedSource"),
    ("firstTimestamp", "deprecatedFirstTimestamp"),
    ("lastTimestamp", "deprecatedLastTimestamp"),
    ("count", "deprecatedCount"),
];

/// A stored event as `events.k8s.io/v1`.
pub fn to_events_v1(core: &Value) -> Value {
    convert(core, "events.k8s.io/v1", |name| RENAMED.iter().find(|(from, _)| *from == name).map(|(_, to)| *to))
}

/// An `events.k8s.io/v1` event as it is stored.
pub fn to_core_v1(event: &Value) -> Value {
    convert(event, "v1", |name| RENAMED.iter().find(|(_, from)| *from == name).map(|(to, _)| *to))
}

fn convert(event: &Value, api_version: &str, rename: impl Fn(&str) -> Option<&'static str>) -> Value {
    let fields = event.as_object().into_iter().flatten();
    let renamed: Map<String, Value> =
        fields.map(|(name, value)| (rename(name).unwrap_or(name).to_owned(), value.clone())).collect();
    let mut converted = Value::Object(renamed);
    converted["apiVersion"] = json!(api_version);
    converted
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_two_forms_convert_into_each_other() {
        let event = json!({
            "apiVersion": "events.k8s.io/v1", "kind": "Event", "metadata": {"name": "e"},
            "regarding": {"kind": "Volume", "name": "v"}, "note": "n", "reason": "r", "reportingController": "c",
            "deprecatedCount": 2, "series": {"count": 3},
        });
        let core = to_core_v1(&event);
        assert_eq!(core["involvedObject"]["name"], "v");
        assert_eq!(core["message"], "n");
        assert_eq!(core["reportingComponent"], "c");
        assert_eq!(core["apiVersion"], "v1");
        assert_eq!(to_events_v1(&core), event);
    }
}
