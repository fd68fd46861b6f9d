//! `metadata`: its own schema, names, and what the server alone writes in it.

use std::sync::LazyLock;

use serde_json::{Map, Value, json};

use crate::{
    error::{ApiError, Cause},
    registry::Kind,
    schema::{Schema, format::is_dns_label, prune::prune, validate::validate},
};

/// Most bytes of all annotations together.
const ANNOTATIONS_BYTES_MAX: usize = 256 << 10;
/// Fields that the server alone writes, and that an update takes from the stored object.
const SYSTEM_FIELDS: [&str; 8] = [
    "name",
    "namespace",
    "uid",
    "creationTimestamp",
    "generation",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
    "generateName",
];

/// The schema of `metadata`; it is a constant, so a mistake in it would fail every test.
static SCHEMA: LazyLock<Option<Schema>> = LazyLock::new(|| {
    let texts = json!({"type": "object", "nullable": true, "additionalProperties": {"type": "string"}});
    let text = json!({"type": "string"});
    let time = json!({"type": "string", "nullable": true, "format": "date-time"});
    let flag = json!({"type": "boolean", "nullable": true});
    let owner = json!({"type": "object", "required": ["apiVersion", "kind", "name", "uid"], "properties": {
        "apiVersion": {"type": "string", "minLength": 1}, "kind": {"type": "string", "minLength": 1},
        "name": {"type": "string", "minLength": 1}, "uid": {"type": "string", "minLength": 1},
        "controller": flag, "blockOwnerDeletion": flag,
    }});
    let schema = json!({"type": "object", "properties": {
        "name": text, "generateName": text, "namespace": text, "selfLink": text, "uid": text, "resourceVersion": text,
        "generation": {"type": "integer", "nullable": true}, "creationTimestamp": time, "deletionTimestamp": time,
        "deletionGracePeriodSeconds": {"type": "integer", "nullable": true},
        "labels": texts, "annotations": texts,
        "ownerReferences": {"type": "array", "nullable": true, "items": owner},
        "finalizers": {"type": "array", "nullable": true, "items": text},
        "managedFields": {"type": "array", "nullable": true, "items": {"type": "object", "x-kubernetes-preserve-unknown-fields": true}},
    }});
    crate::schema::ObjectSchema::compile(&schema).map(|schema| schema.root).ok()
});

/// Brings `metadata` into shape: unknown fields are dropped and returned, empty ones and managed fields removed.
///
/// # Errors
/// 400 when a field has a wrong type, as kube-apiserver fails to decode such objects.
pub fn normalize(object: &mut Value) -> Result<Vec<String>, ApiError> {
    let Some(object) = object.as_object_mut() else {
        return Err(ApiError::bad_request("the object is not a JSON object"));
    };
    let metadata = object.entry("metadata").or_insert_with(|| Value::Object(Map::new()));
    if metadata.is_null() {
        *metadata = Value::Object(Map::new());
    }
    if !metadata.is_object() {
        return Err(ApiError::bad_request("metadata is not an object"));
    }
    let Some(schema) = SCHEMA.as_ref() else {
        return Err(ApiError::internal("the schema of metadata does not compile"));
    };
    let dropped = prune(schema, metadata).into_iter().map(|field| format!("metadata.{field}")).collect();
    if let Some(cause) = validate(schema, metadata).into_iter().next() {
        return Err(ApiError::bad_request(format!("metadata.{}: {}", cause.field, cause.message)));
    }
    if let Some(fields) = metadata.as_object_mut() {
        fields.retain(|name, value| {
            let empty = match value {
                Value::Null => true,
                Value::String(text) => text.is_empty(),
                Value::Array(array) => array.is_empty(),
                Value::Object(map) => map.is_empty(),
                _ => false,
            };
            !empty && !matches!(name.as_str(), "managedFields" | "selfLink")
        });
    }
    Ok(dropped)
}

/// A text field of `metadata`, empty when it is not there.
pub fn text<'a>(object: &'a Value, field: &str) -> &'a str {
    object["metadata"][field].as_str().unwrap_or_default()
}

/// The finalizers.
pub fn finalizers(object: &Value) -> Vec<&str> {
    object["metadata"]["finalizers"].as_array().into_iter().flatten().filter_map(Value::as_str).collect()
}

/// Whether deletion was asked for and waits for finalizers.
pub fn is_deleting(object: &Value) -> bool {
    object["metadata"].get("deletionTimestamp").is_some()
}

/// Adds (`true`) or removes a finalizer.
pub fn set_finalizer(object: &mut Value, finalizer: &str, present: bool) {
    let mut list: Vec<Value> =
        finalizers(object).into_iter().filter(|name| *name != finalizer).map(Value::from).collect();
    if present {
        list.push(json!(finalizer));
    }
    set_or_remove(object, "finalizers", (!list.is_empty()).then_some(Value::Array(list)));
}

/// Sets a field of `metadata`, or removes it.
pub fn set_or_remove(object: &mut Value, field: &str, value: Option<Value>) {
    let Some(metadata) = object.get_mut("metadata").and_then(Value::as_object_mut) else { return };
    match value {
        Some(value) => {
            metadata.insert(field.to_owned(), value);
        }
        None => {
            metadata.shift_remove(field);
        }
    }
}

/// Takes from the stored object what an update cannot change.
pub fn keep_system_fields(object: &mut Value, old: &Value) {
    for field in SYSTEM_FIELDS {
        set_or_remove(object, field, old["metadata"].get(field).cloned());
    }
}

/// What is wrong with the metadata of an object about to be stored; `old` is the object before an update.
pub fn check(kind: &Kind, object: &Value, old: Option<&Value>) -> Vec<Cause> {
    let metadata = &object["metadata"];
    let mut causes = Vec::new();
    let name = text(object, "name");
    if old.is_none()
        && let Err(why) = check_name(kind, name)
    {
        causes.push(Cause::invalid("metadata.name", &json!(name), &why));
    }
    for (key, value) in metadata["labels"].as_object().into_iter().flatten() {
        if let Err(why) = check_qualified_name(key) {
            causes.push(Cause::invalid("metadata.labels", &json!(key), &why));
        }
        if !value.as_str().is_some_and(is_label_value) {
            let why = "a valid label must be an empty string or at most 63 of alphanumerics, '-', '_' or '.', \
                       starting and ending with an alphanumeric";
            causes.push(Cause::invalid("metadata.labels", value, why));
        }
    }
    check_annotations(&metadata["annotations"], &mut causes);
    for finalizer in finalizers(object) {
        if let Err(why) = check_qualified_name(finalizer) {
            causes.push(Cause::invalid("metadata.finalizers", &json!(finalizer), &why));
        }
    }
    check_owners(&metadata["ownerReferences"], &mut causes);
    if let Some(old) = old.filter(|old| is_deleting(old)) {
        let before = finalizers(old);
        let added: Vec<&str> = finalizers(object).into_iter().filter(|name| !before.contains(name)).collect();
        if !added.is_empty() {
            let why = format!(
                "no new finalizers can be added if the object is being deleted, found new finalizers {added:?}"
            );
            causes.push(Cause::forbidden("metadata.finalizers", &why));
        }
    }
    causes
}

fn check_annotations(annotations: &Value, causes: &mut Vec<Cause>) {
    let mut bytes = 0;
    for (key, value) in annotations.as_object().into_iter().flatten() {
        bytes += key.len() + value.as_str().map_or(0, str::len);
        if let Err(why) = check_qualified_name(&key.to_lowercase()) {
            causes.push(Cause::invalid("metadata.annotations", &json!(key), &why));
        }
    }
    if bytes > ANNOTATIONS_BYTES_MAX {
        let message = format!("Too long: may not be more than {ANNOTATIONS_BYTES_MAX} bytes, is {bytes}");
        causes.push(Cause::new("metadata.annotations", crate::error::CauseReason::TooLong, message));
    }
}

fn check_owners(owners: &Value, causes: &mut Vec<Cause>) {
    let owners = owners.as_array().into_iter().flatten();
    let controllers = owners.filter(|owner| owner["controller"] == true).count();
    if controllers > 1 {
        let why = "Only one reference can have Controller set to true";
        causes.push(Cause::invalid("metadata.ownerReferences", &json!(controllers), why));
    }
}

/// Whether the name may be given to an object of this kind.
pub fn check_name(kind: &Kind, name: &str) -> Result<(), String> {
    if kind.kind == "Namespace" && kind.group.is_empty() && !is_dns_label(name) {
        return Err(
            "a lowercase RFC 1123 label must consist of at most 63 lower case alphanumeric characters or '-', \
                    and must start and end with an alphanumeric character"
                .to_owned(),
        );
    }
    if is_dns_subdomain(name) {
        return Ok(());
    }
    Err("a lowercase RFC 1123 subdomain must consist of at most 253 lower case alphanumeric characters, '-' or '.', \
         and must start and end with an alphanumeric character"
        .to_owned())
}

fn is_dns_subdomain(name: &str) -> bool {
    let part = |part: &str| {
        !part.is_empty()
            && part.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-')
            && !part.starts_with('-')
            && !part.ends_with('-')
    };
    name.len() <= 253 && name.split('.').all(part)
}

fn is_label_value(value: &str) -> bool {
    value.is_empty() || is_name_part(value)
}

fn is_name_part(name: &str) -> bool {
    let ends = |byte: Option<&u8>| byte.is_some_and(u8::is_ascii_alphanumeric);
    let bytes = name.as_bytes();
    bytes.len() <= 63
        && ends(bytes.first())
        && ends(bytes.last())
        && bytes.iter().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(byte))
}

fn check_qualified_name(name: &str) -> Result<(), String> {
    let (prefix, rest) = name.split_once('/').map_or((None, name), |(prefix, rest)| (Some(prefix), rest));
    if prefix.is_none_or(is_dns_subdomain) && is_name_part(rest) {
        return Ok(());
    }
    Err("a qualified name is an optional DNS subdomain and '/', then at most 63 of alphanumerics, '-', '_' or '.', \
         starting and ending with an alphanumeric"
        .to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names() {
        for good in ["a", "a-b.c", "0", &"a".repeat(253)] {
            assert!(is_dns_subdomain(good), "{good}");
        }
        for bad in ["", "A", "a_b", "-a", "a-", "a..b", "a/b", &"a".repeat(254)] {
            assert!(!is_dns_subdomain(bad), "{bad}");
        }
        assert!(check_qualified_name("addax.io/owner").is_ok());
        assert!(check_qualified_name("addax.io/").is_err());
        assert!(check_qualified_name("a/b/c").is_err());
    }

    #[test]
    fn metadata_is_brought_into_shape() {
        let mut object = json!({"metadata": {
            "name": "a", "labels": {}, "annotations": null, "managedFields": [{"x": 1}], "strange": 1,
        }});
        assert_eq!(normalize(&mut object).unwrap(), ["metadata.strange"]);
        assert_eq!(object, json!({"metadata": {"name": "a"}}));
        assert_eq!(normalize(&mut json!({"metadata": {"labels": {"a": 1}}})).unwrap_err().code(), 400);
        assert_eq!(normalize(&mut json!({"metadata": []})).unwrap_err().code(), 400);
    }
}
