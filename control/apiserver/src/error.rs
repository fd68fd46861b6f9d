//! Refusals, as the `Status` objects that Kubernetes clients understand.
//!
//! Every refusal has an HTTP code, a machine-readable reason, a sentence, and for invalid objects one cause per field.
//! [`ApiError::from_store`] is the one place where a [`StoreError`] becomes an answer.

use serde_json::{Value, json};

use crate::store::StoreError;

/// One thing wrong with one field.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cause {
    /// Path of the field, such as `spec.size`.
    pub field: String,
    /// `FieldValueInvalid` and its kin.
    pub reason: CauseReason,
    /// Names the value and what is allowed.
    pub message: String,
}

/// The kinds of causes, as Kubernetes names them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CauseReason {
    /// The value breaks a rule.
    Invalid,
    /// The field must be there.
    Required,
    /// The value is not one of those listed.
    NotSupported,
    /// The value has the wrong type.
    TypeInvalid,
    /// The text is too long.
    TooLong,
    /// The list or map has too many entries.
    TooMany,
    /// The entry is there twice.
    Duplicate,
    /// The field cannot be set here.
    Forbidden,
}

impl CauseReason {
    /// The name on the wire.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Invalid => "FieldValueInvalid",
            Self::Required => "FieldValueRequired",
            Self::NotSupported => "FieldValueNotSupported",
            Self::TypeInvalid => "FieldValueTypeInvalid",
            Self::TooLong => "FieldValueTooLong",
            Self::TooMany => "FieldValueTooMany",
            Self::Duplicate => "FieldValueDuplicate",
            Self::Forbidden => "FieldValueForbidden",
        }
    }
}

impl Cause {
    /// The value breaks a rule; `detail` says which.
    pub fn invalid(field: impl Into<String>, value: &Value, detail: &str) -> Self {
        let message = format!("Invalid value: {value}: {detail}");
        Self { field: field.into(), reason: CauseReason::Invalid, message }
    }

    /// The field must be there.
    pub fn required(field: impl Into<String>, detail: &str) -> Self {
        let message = if detail.is_empty() { "Required value".to_owned() } else { format!("Required value: {detail}") };
        Self { field: field.into(), reason: CauseReason::Required, message }
    }

    /// The field cannot be set here.
    pub fn forbidden(field: impl Into<String>, detail: &str) -> Self {
        Self { field: field.into(), reason: CauseReason::Forbidden, message: format!("Forbidden: {detail}") }
    }

    /// A cause with a message of its own.
    pub fn new(field: impl Into<String>, reason: CauseReason, message: impl Into<String>) -> Self {
        Self { field: field.into(), reason, message: message.into() }
    }

    fn sentence(&self) -> String {
        if self.field.is_empty() { self.message.clone() } else { format!("{}: {}", self.field, self.message) }
    }
}

/// Which object a refusal is about.
#[derive(Debug, Clone, Default)]
pub struct About {
    /// API group, empty for core.
    pub group: String,
    /// The plural for most refusals, the kind for invalid objects.
    pub kind: String,
    /// The object's name, may be empty.
    pub name: String,
    /// The object's uid, may be empty.
    pub uid: String,
}

impl About {
    fn resource(&self) -> String {
        if self.group.is_empty() { self.kind.clone() } else { format!("{}.{}", self.kind, self.group) }
    }
}

/// A refusal.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{}", .0.message)]
pub struct ApiError(Box<Inner>);

#[derive(Debug, Clone, Default)]
struct Inner {
    code: u16,
    reason: &'static str,
    message: String,
    about: Option<About>,
    causes: Vec<Cause>,
    retry_after_seconds: Option<u32>,
}

impl ApiError {
    /// A refusal with code, reason and sentence.
    pub fn new(code: u16, reason: &'static str, message: impl Into<String>) -> Self {
        Self(Box::new(Inner { code, reason, message: message.into(), ..Inner::default() }))
    }

    fn about(mut self, about: About) -> Self {
        self.0.about = Some(about);
        self
    }

    fn retry_after(mut self, seconds: u32) -> Self {
        self.0.retry_after_seconds = Some(seconds);
        self
    }

    /// 400: the request makes no sense.
    pub fn bad_request(message: impl Into<String>) -> Self {
        Self::new(400, "BadRequest", message)
    }

    /// 403: the request makes sense and is never allowed.
    pub fn forbidden(about: About, why: &str) -> Self {
        let message = format!("{} \"{}\" is forbidden: {why}", about.resource(), about.name);
        Self::new(403, "Forbidden", message).about(about)
    }

    /// 404 for a path that no resource has.
    pub fn no_such_path() -> Self {
        Self::new(404, "NotFound", "the server could not find the requested resource")
    }

    /// 404: no such object.
    pub fn not_found(about: About) -> Self {
        let message = format!("{} \"{}\" not found", about.resource(), about.name);
        Self::new(404, "NotFound", message).about(about)
    }

    /// 405: the resource cannot do this.
    pub fn method_not_allowed(what: &str) -> Self {
        Self::new(405, "MethodNotAllowed", format!("{what} is not allowed on this resource"))
    }

    /// 406: none of the asked forms can be served.
    pub fn not_acceptable(accept: &str) -> Self {
        let message = format!("Accept is {accept:?}; allowed are application/json and its Table and metadata forms");
        Self::new(406, "NotAcceptable", message)
    }

    /// 409: there is an object of this name.
    pub fn already_exists(about: About) -> Self {
        let message = format!("{} \"{}\" already exists", about.resource(), about.name);
        Self::new(409, "AlreadyExists", message).about(about)
    }

    /// 409: the object is not what the writer thought it was.
    pub fn conflict(about: About, why: &str) -> Self {
        let message = format!("Operation cannot be fulfilled on {} \"{}\": {why}", about.resource(), about.name);
        Self::new(409, "Conflict", message).about(about)
    }

    /// 409 for a stale `resourceVersion`.
    pub fn stale(about: About) -> Self {
        Self::conflict(
            about,
            "the object has been modified; please apply your changes to the latest version and try again",
        )
    }

    /// 410: the asked resource version is no longer there.
    pub fn expired(message: impl Into<String>) -> Self {
        Self::new(410, "Expired", message)
    }

    /// 413: the body is too large.
    pub fn too_large(limit_bytes: usize) -> Self {
        Self::new(413, "RequestEntityTooLarge", format!("the request body is larger than {limit_bytes} bytes"))
    }

    /// 415: the body's media type is not understood.
    pub fn unsupported_media_type(message: impl Into<String>) -> Self {
        Self::new(415, "UnsupportedMediaType", message)
    }

    /// 422: the object breaks its schema or rules. `about.kind` is the kind here.
    pub fn invalid(about: About, causes: Vec<Cause>) -> Self {
        let sentences: Vec<String> = causes.iter().map(Cause::sentence).collect();
        let list = match sentences.as_slice() {
            [one] => one.clone(),
            many => format!("[{}]", many.join(", ")),
        };
        let message = format!("{} \"{}\" is invalid: {list}", about.resource(), about.name);
        let mut error = Self::new(422, "Invalid", message).about(about);
        error.0.causes = causes;
        error
    }

    /// 429: come back later.
    pub fn too_many_requests(message: impl Into<String>, retry_after_seconds: u32) -> Self {
        Self::new(429, "TooManyRequests", message).retry_after(retry_after_seconds)
    }

    /// 500: the server failed.
    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(500, "InternalError", message)
    }

    /// 504: the request took too long; a write may or may not have happened.
    pub fn timeout(message: impl Into<String>) -> Self {
        Self::new(504, "Timeout", message)
    }

    /// What the store refused.
    pub fn from_store(error: StoreError, about: About) -> Self {
        match error {
            StoreError::Conflict { .. } => Self::stale(about),
            StoreError::Expired { asked, oldest, .. } => {
                Self::expired(format!("too old resource version: {asked} ({oldest})"))
            }
            StoreError::TooLarge { .. } => Self::new(413, "RequestEntityTooLarge", error.to_string()),
            StoreError::Busy => Self::too_many_requests(error.to_string(), 1),
            other => Self::internal(other.to_string()),
        }
    }

    /// The HTTP code.
    pub fn code(&self) -> u16 {
        self.0.code
    }

    /// The machine-readable reason.
    pub fn reason(&self) -> &'static str {
        self.0.reason
    }

    /// What is wrong, field by field.
    pub fn causes(&self) -> &[Cause] {
        &self.0.causes
    }

    /// Seconds for the `Retry-After` header.
    pub fn retry_after_seconds(&self) -> Option<u32> {
        self.0.retry_after_seconds
    }

    /// The `Status` object.
    pub fn to_status(&self) -> Value {
        let mut status = json!({
            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
            "message": self.0.message, "reason": self.0.reason, "code": self.0.code,
        });
        if let Some(details) = self.details() {
            status["details"] = details;
        }
        status
    }

    fn details(&self) -> Option<Value> {
        let mut details = json!({});
        if let Some(about) = &self.0.about {
            for (key, value) in
                [("name", &about.name), ("group", &about.group), ("kind", &about.kind), ("uid", &about.uid)]
            {
                if !value.is_empty() {
                    details[key] = json!(value);
                }
            }
        }
        if !self.0.causes.is_empty() {
            let cause = |cause: &Cause| json!({"reason": cause.reason.as_str(), "message": cause.message, "field": cause.field});
            details["causes"] = self.0.causes.iter().map(cause).collect();
        }
        if let Some(seconds) = self.0.retry_after_seconds {
            details["retryAfterSeconds"] = json!(seconds);
        }
        details.as_object().is_some_and(|details| !details.is_empty()).then_some(details)
    }
}
