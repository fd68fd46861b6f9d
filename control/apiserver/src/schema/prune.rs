//! Dropping of fields that the schema does not know.

use serde_json::Value;

use super::{Additional, Schema, join};

/// Fields of every object that no schema needs to name.
const IMPLIED: [&str; 3] = ["apiVersion", "kind", "metadata"];

/// Drops unknown fields from an object and returns their paths.
pub fn prune(schema: &Schema, object: &mut Value) -> Vec<String> {
    let mut dropped = Vec::new();
    prune_node(schema, object, "", true, &mut dropped);
    dropped
}

fn prune_node(schema: &Schema, value: &mut Value, path: &str, is_object: bool, dropped: &mut Vec<String>) {
    match value {
        Value::Array(entries) => {
            let Some(items) = &schema.items else { return };
            for (index, entry) in entries.iter_mut().enumerate() {
                prune_node(items, entry, &format!("{path}[{index}]"), false, dropped);
            }
        }
        Value::Object(fields) => {
            let implied = is_object || schema.embedded;
            fields.retain(|name, value| {
                if implied && IMPLIED.contains(&name.as_str()) {
                    return true;
                }
                let field = join(path, name);
                if let Some(known) = schema.properties.get(name) {
                    prune_node(known, value, &field, false, dropped);
                    return true;
                }
                match &schema.additional {
                    Additional::Anything => true,
                    Additional::Schema(additional) => {
                        prune_node(additional, value, &field, false, dropped);
                        true
                    }
                    Additional::Nothing if schema.preserve_unknown => true,
                    Additional::Nothing => {
                        dropped.push(field);
                        false
                    }
                }
            });
        }
        _ => {}
    }
}
