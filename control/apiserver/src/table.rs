//! Objects as tables and as metadata alone, for clients that ask for these forms.

use std::sync::Arc;

use jiff::Timestamp;
use serde_json::{Value, json};

use crate::registry::{CellSource, Column, Kind};

/// How much of each object goes into its row.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum IncludeObject {
    /// Nothing.
    Nothing,
    /// Its metadata.
    #[default]
    Metadata,
    /// All of it.
    Object,
}

/// A `Table` of objects; `metadata` is the list's.
pub fn table(kind: &Kind, objects: &[Arc<Value>], metadata: Value, include: IncludeObject, now: Timestamp) -> Value {
    let rows: Vec<Value> = objects.iter().map(|object| row(kind, object, include, now)).collect();
    json!({
        "kind": "Table", "apiVersion": "meta.k8s.io/v1", "metadata": metadata,
        "columnDefinitions": column_definitions(kind), "rows": rows,
    })
}

fn column_definitions(kind: &Kind) -> Vec<Value> {
    let name = json!({
        "name": "Name", "type": "string", "format": "name", "description": "Name of the object.", "priority": 0,
    });
    let others = kind.columns.iter().map(|column| {
        // Dates are written as ages, which are texts to the client.
        let value_type = if column.value_type == "date" { "string" } else { &column.value_type };
        json!({
            "name": column.name, "type": value_type, "format": column.format,
            "description": column.description, "priority": column.priority,
        })
    });
    std::iter::once(name).chain(others).collect()
}

fn row(kind: &Kind, object: &Arc<Value>, include: IncludeObject, now: Timestamp) -> Value {
    let name = object["metadata"]["name"].clone();
    let cells: Vec<Value> =
        std::iter::once(name).chain(kind.columns.iter().map(|column| cell(column, object, now))).collect();
    let mut row = json!({"cells": cells});
    match include {
        IncludeObject::Nothing => {}
        IncludeObject::Metadata => row["object"] = partial(object),
        IncludeObject::Object => row["object"] = object.as_ref().clone(),
    }
    row
}

/// The object's metadata as a `PartialObjectMetadata`.
pub fn partial(object: &Value) -> Value {
    json!({"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": object["metadata"]})
}

fn cell(column: &Column, object: &Value, now: Timestamp) -> Value {
    match &column.source {
        CellSource::FirstOf(paths) => {
            let found = paths.iter().find_map(|path| path.first(object).filter(|value| !value.is_null()));
            found.map_or(Value::Null, |value| typed(column, value, now))
        }
        CellSource::CountOf(paths) => {
            let count = |value: &Value| {
                value.as_object().map_or(0, serde_json::Map::len) + value.as_array().map_or(0, Vec::len)
            };
            json!(paths.iter().filter_map(|path| path.first(object)).map(count).sum::<usize>())
        }
        CellSource::Joined(paths) => {
            let texts = paths.iter().filter_map(|path| path.first(object)?.as_str());
            let mut texts: Vec<String> = texts.map(str::to_owned).collect();
            if let Some(first) = texts.first_mut() {
                *first = first.to_lowercase();
            }
            json!(texts.join("/"))
        }
    }
}

fn typed(column: &Column, value: &Value, now: Timestamp) -> Value {
    match (column.value_type.as_str(), value) {
        ("date", Value::String(date)) => match date.parse::<Timestamp>() {
            Ok(date) => json!(age(now.as_second() - date.as_second())),
            Err(_) => json!("<unknown>"),
        },
        ("integer" | "number" | "boolean", value) => value.clone(),
        (_, Value::String(_)) => value.clone(),
        (_, other) => json!(other.to_string()),
    }
}

/// A duration in seconds in two or three digits, as kubectl writes ages.
pub fn age(seconds: i64) -> String {
    const MINUTE: i64 = 60;
    const HOUR: i64 = 60 * MINUTE;
    const DAY: i64 = 24 * HOUR;
    const YEAR: i64 = 365 * DAY;
    let two = |big: i64, unit: &str, small: i64, small_unit: &str| {
        if small == 0 { format!("{big}{unit}") } else { format!("{big}{unit}{small}{small_unit}") }
    };
    match seconds {
        ..=-2 => "<invalid>".to_owned(),
        -1..0 => "0s".to_owned(),
        s if s < 2 * MINUTE => format!("{s}s"),
        s if s < 10 * MINUTE => two(s / MINUTE, "m", s % MINUTE, "s"),
        s if s < 3 * HOUR => format!("{}m", s / MINUTE),
        s if s < 8 * HOUR => two(s / HOUR, "h", s % HOUR / MINUTE, "m"),
        s if s < 2 * DAY => format!("{}h", s / HOUR),
        s if s < 8 * DAY => two(s / DAY, "d", s % DAY / HOUR, "h"),
        s if s < 2 * YEAR => format!("{}d", s / DAY),
        s if s < 8 * YEAR => two(s / YEAR, "y", s % YEAR / DAY, "d"),
        s => format!("{}y", s / YEAR),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ages_are_written_as_kubectl_writes_them() {
        for (seconds, text) in [
            (-5, "<invalid>"),
            (-1, "0s"),
            (0, "0s"),
            (119, "119s"),
            (120, "2m"),
            (125, "2m5s"),
            (600, "10m"),
            (3 * 3600, "3h"),
            (3 * 3600 + 60, "3h1m"),
            (8 * 3600, "8h"),
            (47 * 3600, "47h"),
            (48 * 3600, "2d"),
            (51 * 3600, "2d3h"),
            (8 * 86_400, "8d"),
            (2 * 365 * 86_400, "2y"),
            (9 * 365 * 86_400, "9y"),
        ] {
            assert_eq!(age(seconds), text, "{seconds}");
        }
    }
}
