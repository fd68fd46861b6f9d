//! Checking of structure and values, with messages as kube-apiserver words them.

use std::cmp::Ordering;

use serde_json::{Number, Value};

use super::{Additional, ListType, Schema, Type, format, join};
use crate::error::{Cause, CauseReason};

/// Most causes in one answer; a broken list of thousands of entries needs no thousands of sentences.
const CAUSES_MAX: usize = 64;

/// Everything that is wrong with an object.
pub fn validate(schema: &Schema, object: &Value) -> Vec<Cause> {
    let mut causes = Vec::new();
    check(schema, object, "", &mut causes);
    causes.truncate(CAUSES_MAX);
    causes
}

fn check(schema: &Schema, value: &Value, path: &str, causes: &mut Vec<Cause>) {
    if causes.len() >= CAUSES_MAX || (value.is_null() && schema.nullable) {
        return;
    }
    if !type_holds(schema, value) {
        let wanted =
            if schema.int_or_string { "integer or string" } else { schema.value_type.map_or("any", Type::name) };
        let found = type_name(value);
        let message = format!("Invalid value: \"{found}\": {path} in body must be of type {wanted}: \"{found}\"");
        causes.push(Cause::new(path, CauseReason::TypeInvalid, message));
        return;
    }
    check_allowed(schema, value, path, causes);
    match value {
        Value::Object(_) => check_object(schema, value, path, causes),
        Value::Array(entries) => check_array(schema, entries, path, causes),
        Value::String(text) => check_string(schema, text, value, path, causes),
        Value::Number(number) => check_number(schema, number, value, path, causes),
        Value::Bool(_) | Value::Null => {}
    }
    check_branches(schema, value, path, causes);
}

fn type_holds(schema: &Schema, value: &Value) -> bool {
    if schema.int_or_string {
        return value.is_string() || is_integer(value);
    }
    match schema.value_type {
        None => true,
        Some(Type::Object) => value.is_object(),
        Some(Type::Array) => value.is_array(),
        Some(Type::String) => value.is_string(),
        Some(Type::Integer) => is_integer(value),
        Some(Type::Number) => value.is_number(),
        Some(Type::Boolean) => value.is_boolean(),
    }
}

fn is_integer(value: &Value) -> bool {
    value.is_i64() || value.is_u64() || value.as_f64().is_some_and(|number| number.fract() == 0.0)
}

fn type_name(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(_) if is_integer(value) => "integer",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}

fn check_allowed(schema: &Schema, value: &Value, path: &str, causes: &mut Vec<Cause>) {
    let Some(allowed) = &schema.allowed else { return };
    if !allowed.contains(value) {
        let list: Vec<String> = allowed.iter().map(Value::to_string).collect();
        let message = format!("Unsupported value: {value}: supported values: {}", list.join(", "));
        causes.push(Cause::new(path, CauseReason::NotSupported, message));
    }
}

fn check_object(schema: &Schema, value: &Value, path: &str, causes: &mut Vec<Cause>) {
    let Some(fields) = value.as_object() else { return };
    for name in schema.required.iter().filter(|name| !fields.contains_key(*name)) {
        causes.push(Cause::required(join(path, name), ""));
    }
    let count = fields.len() as u64;
    if let Some(min) = schema.properties_min.filter(|&min| count < min) {
        causes.push(Cause::invalid(
            path,
            &Value::from(count),
            &format!("{path} in body should have at least {min} properties"),
        ));
    }
    if let Some(max) = schema.properties_max.filter(|&max| count > max) {
        let message = format!("Too many: {count}: must have at most {max} items");
        causes.push(Cause::new(path, CauseReason::TooMany, message));
    }
    for (name, value) in fields {
        let field = join(path, name);
        match (schema.properties.get(name), &schema.additional) {
            (Some(known), _) => check(known, value, &field, causes),
            (None, Additional::Schema(additional)) => check(additional, value, &field, causes),
            (None, _) => {}
        }
    }
}

fn check_array(schema: &Schema, entries: &[Value], path: &str, causes: &mut Vec<Cause>) {
    let count = entries.len() as u64;
    if let Some(min) = schema.items_min.filter(|&min| count < min) {
        causes.push(Cause::invalid(
            path,
            &Value::from(count),
            &format!("{path} in body should have at least {min} items"),
        ));
    }
    if let Some(max) = schema.items_max.filter(|&max| count > max) {
        causes.push(Cause::new(
            path,
            CauseReason::TooMany,
            format!("Too many: {count}: must have at most {max} items"),
        ));
        return;
    }
    if let Some(items) = &schema.items {
        for (index, entry) in entries.iter().enumerate() {
            check(items, entry, &format!("{path}[{index}]"), causes);
        }
    }
    check_unique(schema, entries, path, causes);
}

fn check_unique(schema: &Schema, entries: &[Value], path: &str, causes: &mut Vec<Cause>) {
    let identity = |entry: &Value| match &schema.list_type {
        ListType::Map(keys) => Value::Array(keys.iter().map(|key| entry[key].clone()).collect()),
        _ => entry.clone(),
    };
    if schema.list_type == ListType::Atomic {
        return;
    }
    let mut seen = std::collections::HashSet::new();
    for (index, entry) in entries.iter().enumerate() {
        let identity = identity(entry).to_string();
        if !seen.insert(identity.clone()) {
            let message = format!("Duplicate value: {identity}");
            causes.push(Cause::new(format!("{path}[{index}]"), CauseReason::Duplicate, message));
        }
    }
}

fn check_string(schema: &Schema, text: &str, value: &Value, path: &str, causes: &mut Vec<Cause>) {
    let length = text.chars().count() as u64;
    if let Some(min) = schema.length_min.filter(|&min| length < min) {
        causes.push(Cause::invalid(path, value, &format!("{path} in body should be at least {min} chars long")));
    }
    if let Some(max) = schema.length_max.filter(|&max| length > max) {
        let message = format!("Too long: may not be more than {max} characters, is {length}");
        causes.push(Cause::new(path, CauseReason::TooLong, message));
    }
    if let Some(pattern) = schema.pattern.as_ref().filter(|pattern| !pattern.is_match(text)) {
        causes.push(Cause::invalid(path, value, &format!("{path} in body should match '{pattern}'")));
    }
    if let Some(format) = schema.format.as_deref().filter(|format| !format::holds(format, text)) {
        causes.push(Cause::invalid(path, value, &format!("{path} in body must be of type {format}: {value}")));
    }
}

fn check_number(schema: &Schema, number: &Number, value: &Value, path: &str, causes: &mut Vec<Cause>) {
    if let Some((min, exclusive)) = &schema.minimum {
        let order = compare(number, min);
        if order == Ordering::Less || (*exclusive && order == Ordering::Equal) {
            let or_equal = if *exclusive { "" } else { " or equal to" };
            causes.push(Cause::invalid(path, value, &format!("{path} in body should be greater than{or_equal} {min}")));
        }
    }
    if let Some((max, exclusive)) = &schema.maximum {
        let order = compare(number, max);
        if order == Ordering::Greater || (*exclusive && order == Ordering::Equal) {
            let or_equal = if *exclusive { "" } else { " or equal to" };
            causes.push(Cause::invalid(path, value, &format!("{path} in body should be less than{or_equal} {max}")));
        }
    }
    if let Some(divisor) = schema.multiple_of.as_ref().filter(|divisor| !is_multiple(number, divisor)) {
        causes.push(Cause::invalid(path, value, &format!("{path} in body should be a multiple of {divisor}")));
    }
    let fits = match schema.format.as_deref() {
        Some("int32") => number.as_i64().is_none_or(|number| i32::try_from(number).is_ok()) && !number.is_u64_only(),
        Some("int64") => !number.is_u64_only(),
        Some("uint32") => number.as_u64().is_some_and(|number| u32::try_from(number).is_ok()),
        Some("uint64") => number.as_u64().is_some(),
        _ => true,
    };
    if !fits {
        let format = schema.format.as_deref().unwrap_or_default();
        causes.push(Cause::invalid(path, value, &format!("{path} in body must be of type {format}")));
    }
}

trait U64Only {
    fn is_u64_only(&self) -> bool;
}

impl U64Only for Number {
    /// Whether the number is whole and larger than any `i64`.
    fn is_u64_only(&self) -> bool {
        self.as_u64().is_some() && self.as_i64().is_none()
    }
}

/// Compares whole numbers exactly and others as doubles.
fn compare(left: &Number, right: &Number) -> Ordering {
    match (left.as_i128(), right.as_i128()) {
        (Some(left), Some(right)) => left.cmp(&right),
        _ => left.as_f64().partial_cmp(&right.as_f64()).unwrap_or(Ordering::Equal),
    }
}

fn is_multiple(number: &Number, divisor: &Number) -> bool {
    // Schemas often write whole divisors as doubles (`512.0`): keep those exact too.
    match (number.as_i128(), whole(divisor)) {
        (_, Some(0)) => true,
        (Some(number), Some(divisor)) => number % divisor == 0,
        _ => match (number.as_f64(), divisor.as_f64()) {
            (Some(number), Some(divisor)) if divisor != 0.0 => (number / divisor).fract().abs() < f64::EPSILON,
            _ => true,
        },
    }
}

fn whole(number: &Number) -> Option<i128> {
    // Doubles below 2^53 that are whole convert exactly.
    let exact = |double: f64| (double.fract() == 0.0 && double.abs() < 9e15).then_some(double as i128);
    number.as_i128().or_else(|| number.as_f64().and_then(exact))
}

fn check_branches(schema: &Schema, value: &Value, path: &str, causes: &mut Vec<Cause>) {
    let holds = |branch: &Schema| {
        let mut causes = Vec::new();
        check(branch, value, path, &mut causes);
        causes.is_empty()
    };
    for branch in &schema.all_of {
        check(branch, value, path, causes);
    }
    let mut refuse = |what: &str| causes.push(Cause::invalid(path, value, &format!("{path:?} {what}")));
    if !schema.any_of.is_empty() && !schema.any_of.iter().any(holds) {
        refuse("must validate at least one schema (anyOf)");
    }
    if !schema.one_of.is_empty() && schema.one_of.iter().filter(|branch| holds(branch)).count() != 1 {
        refuse("must validate one and only one schema (oneOf)");
    }
    if schema.not.as_ref().is_some_and(|branch| holds(branch)) {
        refuse("must not validate the schema (not)");
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::schema::{ObjectSchema, default::apply_defaults, prune::prune};

    fn causes(schema: Value, value: Value) -> Vec<(String, CauseReason)> {
        let schema = ObjectSchema::compile(&schema).unwrap();
        validate(&schema.root, &value).into_iter().map(|cause| (cause.field, cause.reason)).collect()
    }

    #[test]
    fn each_rule_accepts_and_refuses() {
        use CauseReason::*;
        for (rule, good, bad, reason) in [
            (json!({"type": "integer"}), json!(1), json!("1"), TypeInvalid),
            (json!({"type": "integer"}), json!(1), json!(1.5), TypeInvalid),
            (json!({"type": "string"}), json!("a"), json!(null), TypeInvalid),
            (json!({"type": "string", "nullable": true}), json!(null), json!(3), TypeInvalid),
            (json!({"x-kubernetes-int-or-string": true}), json!("a"), json!(true), TypeInvalid),
            (json!({"type": "string", "enum": ["a", "b"]}), json!("b"), json!("c"), NotSupported),
            (json!({"type": "integer", "minimum": 1}), json!(1), json!(0), Invalid),
            (json!({"type": "integer", "minimum": 1.0, "exclusiveMinimum": true}), json!(2), json!(1), Invalid),
            (json!({"type": "integer", "maximum": 3}), json!(3), json!(4), Invalid),
            (json!({"type": "integer", "multipleOf": 512.0}), json!(1024), json!(1000), Invalid),
            (json!({"type": "number", "multipleOf": 0.5}), json!(1.5), json!(1.4), Invalid),
            (json!({"type": "integer", "format": "int32"}), json!(7), json!(1_i64 << 40), Invalid),
            (json!({"type": "string", "minLength": 2}), json!("ab"), json!("a"), Invalid),
            (json!({"type": "string", "maxLength": 2}), json!("äö"), json!("abc"), TooLong),
            (json!({"type": "string", "pattern": "^a+$"}), json!("aa"), json!("b"), Invalid),
            (
                json!({"type": "string", "format": "uuid"}),
                json!("67e55044-10b1-426f-9247-bb680e5fe0c8"),
                json!("x"),
                Invalid,
            ),
            (json!({"type": "array", "items": {"type": "integer"}, "maxItems": 1}), json!([1]), json!([1, 2]), TooMany),
            (json!({"type": "array", "minItems": 1}), json!([1]), json!([]), Invalid),
            (
                json!({"type": "object", "maxProperties": 1, "additionalProperties": true}),
                json!({"a": 1}),
                json!({"a": 1, "b": 2}),
                TooMany,
            ),
            (json!({"anyOf": [{"type": "string"}, {"type": "integer"}]}), json!("a"), json!(true), Invalid),
            (json!({"oneOf": [{"minimum": 5}, {"maximum": 3}]}), json!(6), json!(4), Invalid),
            (json!({"not": {"type": "string"}}), json!(1), json!("a"), Invalid),
            (json!({"allOf": [{"minimum": 5}]}), json!(6), json!(4), Invalid),
        ] {
            let schema = |rule: &Value| json!({"type": "object", "properties": {"field": rule}});
            assert_eq!(causes(schema(&rule), json!({"field": good})), [], "{rule}");
            assert_eq!(causes(schema(&rule), json!({"field": bad})), [("field".to_owned(), reason)], "{rule}");
        }
    }

    #[test]
    fn paths_lead_into_lists_and_maps() {
        let schema = json!({"type": "object", "required": ["name"], "properties": {
            "list": {"type": "array", "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["key"], "items": {
                "type": "object", "properties": {"key": {"type": "string"}, "n": {"type": "integer"}}}},
            "set": {"type": "array", "x-kubernetes-list-type": "set", "items": {"type": "string"}},
            "map": {"type": "object", "additionalProperties": {"type": "integer"}}}});
        let object = json!({
            "list": [{"key": "a", "n": "x"}, {"key": "a"}], "set": ["a", "b", "a"], "map": {"k": "v"},
        });
        let found = causes(schema, object);
        let fields: Vec<&str> = found.iter().map(|(field, _)| field.as_str()).collect();
        assert_eq!(fields, ["name", "list[0].n", "list[1]", "set[2]", "map.k"]);
    }

    #[test]
    fn pruning_then_defaulting() {
        let schema = ObjectSchema::compile(&json!({"type": "object", "properties": {"spec": {"type": "object", "properties": {
            "size": {"type": "integer", "default": 3},
            "inner": {"type": "object", "default": {}, "properties": {"on": {"type": "boolean", "default": true}}},
            "free": {"type": "object", "x-kubernetes-preserve-unknown-fields": true},
            "list": {"type": "array", "items": {"type": "object", "properties": {"a": {"type": "integer", "default": 1}}}},
        }}}}))
        .unwrap();
        let mut object = json!({
            "apiVersion": "a/v1", "kind": "A", "metadata": {"name": "x"}, "extra": 1,
            "spec": {"size": null, "unknown": 1, "free": {"kept": 1}, "list": [{"b": 1}]},
        });
        assert_eq!(prune(&schema.root, &mut object), ["extra", "spec.unknown", "spec.list[0].b"]);
        apply_defaults(&schema.root, &mut object);
        let spec = json!({"size": 3, "inner": {"on": true}, "free": {"kept": 1}, "list": [{"a": 1}]});
        assert_eq!(object["spec"], spec);
    }

    #[test]
    fn a_bad_schema_is_refused_with_its_place() {
        let bad = json!({"type": "object", "properties": {"spec": {"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}}}});
        assert_eq!(ObjectSchema::compile(&bad).unwrap_err().path, "spec.a");
        assert!(ObjectSchema::compile(&json!({"type": "thing"})).is_err());
    }
}
