//! Rules written in CEL (`x-kubernetes-validations`), with `oldSelf` on updates.

use std::sync::Arc;

use kube::core::cel::{CompiledSchema, ErrorKind, ValidationError, Validator, compile_schema};
use serde_json::Value;

use super::SchemaError;
use crate::error::{Cause, CauseReason};

thread_local! {
    /// The validator registers some hundred functions and cannot be shared between threads: one for each.
    static VALIDATOR: Validator = Validator::new();
}

/// The compiled rules of a kind.
#[derive(Debug, Clone)]
pub struct CelRules(Arc<CompiledSchema>);

impl CelRules {
    /// Compiles the rules of a schema; `None` when it has none.
    ///
    /// # Errors
    /// When a rule cannot be compiled.
    pub fn compile(schema: &Value) -> Result<Option<Self>, SchemaError> {
        if !has_rules(schema) {
            return Ok(None);
        }
        let compiled = compile_schema(schema);
        match first_error(&compiled, "") {
            Some(error) => Err(error),
            None => Ok(Some(Self(Arc::new(compiled)))),
        }
    }

    /// Everything the rules say against an object; `old` is the object before an update.
    pub fn check(&self, object: &Value, old: Option<&Value>) -> Vec<Cause> {
        let result = VALIDATOR.with(|validator| validator.validate_compiled(&self.0, object, old));
        result
            .err()
            .map(|errors| errors.into_iter().map(|error| cause(&self.0, &error, object)).collect())
            .unwrap_or_default()
    }
}

fn cause(schema: &CompiledSchema, error: &ValidationError, object: &Value) -> Cause {
    let reason = match error.reason.as_deref() {
        Some("FieldValueForbidden") => CauseReason::Forbidden,
        Some("FieldValueRequired") => CauseReason::Required,
        Some("FieldValueDuplicate") => CauseReason::Duplicate,
        _ => CauseReason::Invalid,
    };
    let detail = match error.kind {
        ErrorKind::ValidationFailure => error.message.clone(),
        _ => format!("rule {:?} could not be evaluated: {}", error.rule, error.message),
    };
    let (field, value) = place(schema, object, &error.field_path);
    let value = match value {
        Some(Value::Object(_) | Value::Array(_)) => String::new(),
        Some(value) => format!("{value}: "),
        None => "null: ".to_owned(),
    };
    let message = match reason {
        CauseReason::Forbidden => format!("Forbidden: {detail}"),
        CauseReason::Required => format!("Required value: {detail}"),
        CauseReason::Duplicate => format!("Duplicate value: {value}{detail}"),
        _ => format!("Invalid value: {value}{detail}"),
    };
    Cause::new(field, reason, message)
}

/// A path as rules tell it, with entries of maps in brackets as those of lists are, and what is there.
fn place<'a>(schema: &CompiledSchema, object: &'a Value, path: &str) -> (String, Option<&'a Value>) {
    let (mut schema, mut value, mut rest, mut told) = (Some(schema), Some(object), path, String::new());
    while !rest.is_empty() {
        let map = schema.and_then(|s| s.additional_properties.as_deref());
        let key = map.and(value).and_then(|value| longest_key(value, rest));
        let (name, tail);
        if let Some(key) = key {
            (name, tail) = rest.split_at(key);
            told.push_str(&format!("[{name}]"));
            (schema, value) = (map, value.and_then(|value| value.get(name)));
        } else if let Some((index, after)) = rest.strip_prefix('[').and_then(|list| list.split_once(']')) {
            tail = after;
            told.push_str(&format!("[{index}]"));
            value = index.parse::<usize>().ok().and_then(|index| value?.get(index));
            schema = schema.and_then(|s| s.items.as_deref());
        } else {
            (name, tail) = rest.split_at(rest.find(['.', '[']).unwrap_or(rest.len()));
            told.push_str(if told.is_empty() { "" } else { "." });
            told.push_str(name);
            (schema, value) = (schema.and_then(|s| s.properties.get(name)), value.and_then(|value| value.get(name)));
        }
        rest = tail.strip_prefix('.').unwrap_or(tail);
    }
    (told, value)
}

/// Length of the longest key of a map that a path begins with: keys may have dots in them.
fn longest_key(map: &Value, path: &str) -> Option<usize> {
    let begins = |key: &&String| {
        path.strip_prefix(key.as_str()).is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[']))
    };
    map.as_object()?.keys().filter(begins).map(String::len).max()
}

fn has_rules(schema: &Value) -> bool {
    match schema {
        Value::Object(map) => map.contains_key("x-kubernetes-validations") || map.values().any(has_rules),
        Value::Array(array) => array.iter().any(has_rules),
        _ => false,
    }
}

fn first_error(schema: &CompiledSchema, path: &str) -> Option<SchemaError> {
    if let Some(error) = schema.compilation_errors().first() {
        return Some(SchemaError { path: path.to_owned(), what: format!("x-kubernetes-validations: {error}") });
    }
    let children = schema.properties.iter().map(|(name, child)| (super::join(path, name), child));
    let items = schema.items.iter().map(|items| (format!("{path}[]"), items.as_ref()));
    let additional = schema.additional_properties.iter().map(|map| (super::join(path, "*"), map.as_ref()));
    children.chain(items).chain(additional).find_map(|(path, child)| first_error(child, &path))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn entries_of_maps_are_told_by_their_key() {
        let entry = json!({"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer",
            "x-kubernetes-validations": [{"rule": "self > 0", "message": "too few"}]}}},
            "x-kubernetes-validations": [{"rule": "has(self.a)", "message": "a is needed"}]});
        let map = json!({"type": "object", "additionalProperties": entry});
        let schema = json!({"type": "object", "properties": {"map": map}});
        let rules = CelRules::compile(&schema).unwrap().unwrap();
        let causes = |object: &Value| {
            let causes = rules.check(object, None);
            causes.into_iter().map(|cause| (cause.field, cause.message)).collect::<Vec<_>>()
        };
        let told = |field: &str, message: &str| vec![(field.to_owned(), message.to_owned())];
        assert_eq!(causes(&json!({"map": {"k.x": {}}})), told("map[k.x]", "Invalid value: a is needed"));
        let deep = causes(&json!({"map": {"k": {"a": [1, 0]}}}));
        assert_eq!(deep, told("map[k].a[1]", "Invalid value: 0: too few"));
    }

    fn schema() -> Value {
        json!({"type": "object", "properties": {"spec": {
            "type": "object",
            "x-kubernetes-validations": [{"rule": "self.size >= self.used", "message": "size must cover what is used"}],
            "properties": {
                "used": {"type": "integer"},
                "size": {"type": "integer", "x-kubernetes-validations": [
                    {"rule": "self >= oldSelf", "message": "size cannot shrink", "reason": "FieldValueForbidden"}]},
            },
        }}})
    }

    #[test]
    fn rules_hold_on_create_and_transitions_on_update() {
        let rules = CelRules::compile(&schema()).unwrap().unwrap();
        let object = |size: i64| json!({"spec": {"size": size, "used": 2}});
        assert!(rules.check(&object(3), None).is_empty());
        let broken = rules.check(&object(1), None);
        assert_eq!(broken[0].field, "spec");
        assert!(broken[0].message.contains("size must cover"), "{broken:?}");
        let shrunk = rules.check(&object(3), Some(&object(4)));
        assert_eq!((shrunk[0].field.as_str(), shrunk[0].reason), ("spec.size", CauseReason::Forbidden));
        assert!(rules.check(&object(5), Some(&object(4))).is_empty());
    }

    #[test]
    fn a_rule_that_does_not_parse_is_refused_at_start() {
        let bad = json!({"type": "object", "properties": {"a": {"type": "integer", "x-kubernetes-validations": [{"rule": "self >="}]}}});
        assert_eq!(CelRules::compile(&bad).unwrap_err().path, "a");
        assert!(CelRules::compile(&json!({"type": "object"})).unwrap().is_none());
    }
}
