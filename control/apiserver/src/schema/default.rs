//! Filling in of defaults.

use serde_json::Value;

use super::{Additional, Schema};

/// Gives every missing field that has a default its default. A `null` that is not a value counts as missing.
pub fn apply_defaults(schema: &Schema, value: &mut Value) {
    match value {
        Value::Array(entries) => {
            if let Some(items) = &schema.items {
                entries.iter_mut().for_each(|entry| apply_defaults(items, entry));
            }
        }
        Value::Object(fields) => {
            for (name, field) in &schema.properties {
                let Some(default) = &field.default else { continue };
                let missing = fields.get(name).is_none_or(|value| value.is_null() && !field.nullable);
                if missing {
                    fields.insert(name.clone(), default.clone());
                }
            }
            for (name, value) in fields.iter_mut() {
                match (schema.properties.get(name), &schema.additional) {
                    (Some(field), _) => apply_defaults(field, value),
                    (None, Additional::Schema(additional)) => apply_defaults(additional, value),
                    (None, _) => {}
                }
            }
        }
        _ => {}
    }
}
