//! Patches: JSON merge patch, JSON patch, and the strategic merge patch of built-in kinds read as a merge.

use serde_json::Value;

use crate::{error::ApiError, store::OBJECT_BYTES_MAX};

/// A parsed patch.
#[derive(Debug, Clone)]
pub enum Patch {
    /// `application/merge-patch+json`.
    Merge(Value),
    /// `application/json-patch+json`.
    Json(json_patch::Patch),
}

/// Most operations of one JSON patch.
const OPERATIONS_MAX: usize = 10_000;

impl Patch {
    /// Parses the body of a patch request by its media type.
    ///
    /// # Errors
    /// 415 for media types that are not understood, 400 for a body that is not such a patch.
    pub fn parse(media_type: &str, body: &[u8], is_builtin: bool) -> Result<Self, ApiError> {
        match media_type {
            "application/merge-patch+json" => Ok(Self::Merge(merge_body(body)?)),
            "application/json-patch+json" => parse_json_patch(body),
            "application/strategic-merge-patch+json" if is_builtin => {
                let mut patch = merge_body(body)?;
                drop_directives(&mut patch);
                Ok(Self::Merge(patch))
            }
            "application/apply-patch+yaml" | "application/apply-patch+cbor" => Err(ApiError::unsupported_media_type(
                "server-side apply is not served here; use a merge patch or a JSON patch (kubectl apply without --server-side)",
            )),
            other => Err(ApiError::unsupported_media_type(format!(
                "the body of the request was in an unknown format - accepted media types include: \
                 application/json-patch+json, application/merge-patch+json; is {other:?}"
            ))),
        }
    }

    /// The object with the patch applied.
    ///
    /// # Errors
    /// 422 when a JSON patch does not fit the object.
    pub fn apply(&self, object: &Value) -> Result<Value, ApiError> {
        let mut patched = object.clone();
        match self {
            Self::Merge(patch) => json_patch::merge(&mut patched, patch),
            Self::Json(patch) => apply_json(&mut patched, patch)?,
        }
        Ok(patched)
    }
}

/// Applies operation by operation, so that copies, which can double the object each time, are bounded together.
fn apply_json(object: &mut Value, patch: &json_patch::Patch) -> Result<(), ApiError> {
    let mut copied_bytes = 0;
    for operation in &patch.0 {
        if let json_patch::PatchOperation::Copy(copy) = operation {
            copied_bytes += object.pointer(copy.from.as_str()).map_or(0, |value| value.to_string().len());
            if copied_bytes > OBJECT_BYTES_MAX {
                let message = format!("the JSON patch copies {copied_bytes} bytes; allowed are {OBJECT_BYTES_MAX}");
                return Err(ApiError::new(413, "RequestEntityTooLarge", message));
            }
        }
        json_patch::patch(object, std::slice::from_ref(operation)).map_err(|error| {
            ApiError::new(422, "Invalid", format!("the JSON patch does not fit the object: {error}"))
        })?;
    }
    Ok(())
}

fn merge_body(body: &[u8]) -> Result<Value, ApiError> {
    let patch: Value = serde_json::from_slice(body)
        .map_err(|error| ApiError::bad_request(format!("error decoding patch: {error}")))?;
    if patch.is_object() {
        Ok(patch)
    } else {
        Err(ApiError::bad_request("error decoding patch: a merge patch is an object"))
    }
}

fn parse_json_patch(body: &[u8]) -> Result<Patch, ApiError> {
    let patch: json_patch::Patch = serde_json::from_slice(body)
        .map_err(|error| ApiError::bad_request(format!("error decoding patch: {error}")))?;
    if patch.0.len() > OPERATIONS_MAX {
        let message = format!("the JSON patch has {} operations; allowed are {OPERATIONS_MAX}", patch.0.len());
        return Err(ApiError::new(413, "RequestEntityTooLarge", message));
    }
    Ok(Patch::Json(patch))
}

/// Drops what only a strategic merge understands; the built-in kinds served here have no lists that need it.
fn drop_directives(patch: &mut Value) {
    if let Value::Object(fields) = patch {
        fields.retain(|name, _| !name.starts_with('$'));
        fields.values_mut().for_each(drop_directives);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn each_media_type() {
        let object = json!({"spec": {"a": 1, "b": 2}});
        let merge = Patch::parse("application/merge-patch+json", br#"{"spec": {"a": null, "c": 3}}"#, false).unwrap();
        assert_eq!(merge.apply(&object).unwrap(), json!({"spec": {"b": 2, "c": 3}}));
        let body =
            br#"[{"op": "test", "path": "/spec/a", "value": 1}, {"op": "replace", "path": "/spec/a", "value": 5}]"#;
        let patch = Patch::parse("application/json-patch+json", body, false).unwrap();
        assert_eq!(patch.apply(&object).unwrap()["spec"]["a"], 5);
        assert_eq!(patch.apply(&json!({"spec": {"a": 2}})).unwrap_err().code(), 422);
        let strategic = br#"{"data": {"$retainKeys": ["k"], "k": "v"}}"#;
        let patch = Patch::parse("application/strategic-merge-patch+json", strategic, true).unwrap();
        assert_eq!(patch.apply(&json!({})).unwrap(), json!({"data": {"k": "v"}}));
    }

    #[test]
    fn copies_cannot_blow_an_object_up() {
        let double = json!({"op": "copy", "from": "/a", "path": "/a/-"});
        let body = json!(vec![double; 64]).to_string();
        let patch = Patch::parse("application/json-patch+json", body.as_bytes(), false).unwrap();
        assert_eq!(patch.apply(&json!({"a": ["0123456789abcdef"]})).unwrap_err().code(), 413);
    }

    #[test]
    fn what_is_not_understood_is_refused() {
        assert_eq!(Patch::parse("application/apply-patch+yaml", b"{}", false).unwrap_err().code(), 415);
        assert_eq!(Patch::parse("application/strategic-merge-patch+json", b"{}", false).unwrap_err().code(), 415);
        assert_eq!(Patch::parse("application/merge-patch+json", b"[]", false).unwrap_err().code(), 400);
        assert_eq!(Patch::parse("application/json-patch+json", b"{}", false).unwrap_err().code(), 400);
    }
}
