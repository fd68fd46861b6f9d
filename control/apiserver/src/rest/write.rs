//! Creating, updating and patching.

use std::sync::Arc;

use serde_json::{Value, json};

use super::{ATTEMPTS_MAX, Api, meta};
use crate::{
    error::{ApiError, Cause},
    patch::Patch,
    registry::{Kind, builtin},
    schema::{default::apply_defaults, prune::prune, validate::validate},
    store::{Expect, StoreError},
};

/// How often a generated name that is taken is generated again.
const GENERATED_NAMES_MAX: usize = 8;
/// Longest prefix that is kept of `generateName`, so that the whole fits a DNS label.
const GENERATED_PREFIX_MAX: usize = 58;

/// What happens to fields that the schema does not know.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum FieldValidation {
    /// They are dropped in silence.
    Ignore,
    /// They are dropped with a warning.
    #[default]
    Warn,
    /// The write is refused.
    Strict,
}

/// Which part of an object is written.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Subresource {
    /// Everything but `status`, if the kind has the status subresource.
    #[default]
    Main,
    /// Only `status`.
    Status,
}

/// How to write.
#[derive(Debug, Clone, Copy, Default)]
pub struct WriteOptions {
    /// Do everything but commit.
    pub dry_run: bool,
    /// See [`FieldValidation`].
    pub field_validation: FieldValidation,
}

/// The answer to a write.
#[derive(Debug)]
pub struct Written {
    /// The object after the write.
    pub object: Arc<Value>,
    /// Sentences for `Warning` headers.
    pub warnings: Vec<String>,
}

impl Api {
    /// Creates an object.
    ///
    /// # Errors
    /// 400, 403, 404 (no such namespace), 409 (name taken) or 422.
    pub async fn create(
        &self,
        kind: &Kind,
        namespace: &str,
        object: Value,
        options: WriteOptions,
    ) -> Result<Written, ApiError> {
        let mut object = self.take_envelope(kind, object)?;
        let mut unknown = meta::normalize(&mut object)?;
        check_namespace_field(kind, &object, namespace)?;
        if !meta::text(&object, "resourceVersion").is_empty() {
            return Err(ApiError::bad_request("resourceVersion should not be set on objects to be created"));
        }
        let generate_name = meta::text(&object, "generateName").to_owned();
        let is_generated = meta::text(&object, "name").is_empty() && !generate_name.is_empty();
        for field in ["deletionTimestamp", "deletionGracePeriodSeconds", "generation"] {
            meta::set_or_remove(&mut object, field, None);
        }
        if kind.namespaced {
            object["metadata"]["namespace"] = json!(namespace);
        }
        if kind.status_subresource {
            remove_status(&mut object);
        }
        unknown.extend(prune(&kind.schema.root, &mut object));
        let warnings = field_warnings(kind, &unknown, options.field_validation)?;
        self.give_identity(&mut object);
        if kind.has_generation {
            object["metadata"]["generation"] = json!(1);
        }
        for _ in 0..GENERATED_NAMES_MAX {
            if is_generated {
                object["metadata"]["name"] = json!(generated_name(&generate_name));
            }
            let name = meta::text(&object, "name").to_owned();
            if name.is_empty() {
                let cause = Cause::required("metadata.name", "name or generateName is required");
                return Err(ApiError::invalid(kind.about_kind(""), vec![cause]));
            }
            if kind.namespaced {
                self.check_namespace(kind, namespace, &name)?;
            }
            let mut new = object.clone();
            check_object(kind, &mut new, None)?;
            match self.commit_new(kind, namespace, &name, new, options).await {
                Err(error) if is_generated && error.reason() == "AlreadyExists" => {}
                result => return result.map(|object| Written { object, warnings }),
            }
        }
        Err(ApiError::already_exists(kind.about(&generate_name)))
    }

    async fn commit_new(
        &self,
        kind: &Kind,
        namespace: &str,
        name: &str,
        object: Value,
        options: WriteOptions,
    ) -> Result<Arc<Value>, ApiError> {
        let key = kind.key(namespace, name);
        let stored = kind.stored(object);
        if options.dry_run {
            return match self.store.get(&key) {
                Some(_) => Err(ApiError::already_exists(kind.about(name))),
                None => Ok(kind.served(&Arc::new(stored))),
            };
        }
        match self.store.commit(key, Expect::Absent, Some(stored)).await {
            Ok(entry) => Ok(kind.served(&entry.value)),
            Err(StoreError::Conflict { .. }) => Err(ApiError::already_exists(kind.about(name))),
            Err(error) => Err(ApiError::from_store(error, kind.about(name))),
        }
    }

    /// Replaces an object, or its status.
    ///
    /// # Errors
    /// 400, 404, 409 (stale `resourceVersion` or other uid) or 422.
    pub async fn update(
        &self,
        kind: &Kind,
        namespace: &str,
        name: &str,
        part: Subresource,
        object: Value,
        options: WriteOptions,
    ) -> Result<Written, ApiError> {
        let object = self.take_envelope(kind, object)?;
        let body_name = meta::text(&object, "name");
        if body_name != name {
            let message = format!("the name of the object ({body_name}) does not match the name on the URL ({name})");
            return Err(ApiError::bad_request(message));
        }
        check_namespace_field(kind, &object, namespace)?;
        self.modify(kind, namespace, name, part, options, |_| Ok(object.clone())).await
    }

    /// Patches an object, or its status.
    ///
    /// # Errors
    /// As [`Api::update`].
    pub async fn patch(
        &self,
        kind: &Kind,
        namespace: &str,
        name: &str,
        part: Subresource,
        patch: &Patch,
        options: WriteOptions,
    ) -> Result<Written, ApiError> {
        let apply = |current: &Value| {
            let object = self.take_envelope(kind, patch.apply(current)?)?;
            if meta::text(&object, "name") != name {
                return Err(ApiError::bad_request("metadata.name cannot be changed"));
            }
            check_namespace_field(kind, &object, namespace)?;
            Ok(object)
        };
        self.modify(kind, namespace, name, part, options, apply).await
    }

    /// Makes a new object from the stored one and commits it, starting over when another write comes first.
    async fn modify(
        &self,
        kind: &Kind,
        namespace: &str,
        name: &str,
        part: Subresource,
        options: WriteOptions,
        make: impl Fn(&Value) -> Result<Value, ApiError>,
    ) -> Result<Written, ApiError> {
        for _ in 0..ATTEMPTS_MAX {
            let entry = self.entry(kind, namespace, name)?;
            let old = kind.served(&entry.value);
            let mut new = make(&old)?;
            let unknown = meta::normalize(&mut new)?;
            check_preconditions(kind, name, &new, &old)?;
            let (new, warnings) = prepare_update(kind, new, &old, part, unknown, options.field_validation)?;
            if same_content(&new, &old) {
                return Ok(Written { object: old, warnings });
            }
            let gone = meta::is_deleting(&new) && meta::finalizers(&new).is_empty() && !is_namespace(kind);
            let stored = kind.stored(new);
            if options.dry_run {
                return Ok(Written { object: kind.served(&Arc::new(stored)), warnings });
            }
            let key = kind.key(namespace, name);
            let value = (!gone).then(|| stored.clone());
            match self.store.commit(key, Expect::Revision(entry.revision), value).await {
                Ok(_) if gone => return Ok(Written { object: kind.served(&Arc::new(stored)), warnings }),
                Ok(entry) => return Ok(Written { object: kind.served(&entry.value), warnings }),
                Err(StoreError::Conflict { current }) => self.store.published(current).await,
                Err(error) => return Err(ApiError::from_store(error, kind.about(name))),
            }
        }
        Err(ApiError::stale(kind.about(name)))
    }

    /// Checks that the object is of the kind that the path says.
    fn take_envelope(&self, kind: &Kind, object: Value) -> Result<Value, ApiError> {
        let field = |name: &str| object.get(name).and_then(Value::as_str).unwrap_or_default();
        let (api_version, found) = (field("apiVersion"), field("kind"));
        if found.is_empty() {
            return Err(ApiError::bad_request("Object 'Kind' is missing"));
        }
        if found != kind.kind || api_version != kind.api_version() {
            return Err(ApiError::bad_request(format!(
                "the object is a {found} of {api_version:?}; allowed here is {} of {:?}",
                kind.kind,
                kind.api_version()
            )));
        }
        Ok(object)
    }
}

fn is_namespace(kind: &Kind) -> bool {
    kind.group.is_empty() && kind.plural == builtin::NAMESPACES
}

fn check_namespace_field(kind: &Kind, object: &Value, namespace: &str) -> Result<(), ApiError> {
    let found = meta::text(object, "namespace");
    if found.is_empty() || (kind.namespaced && found == namespace) {
        return Ok(());
    }
    Err(ApiError::bad_request(format!(
        "the namespace of the provided object does not match the namespace sent on the request ({found:?}, {namespace:?})"
    )))
}

fn check_preconditions(kind: &Kind, name: &str, new: &Value, old: &Value) -> Result<(), ApiError> {
    let version = meta::text(new, "resourceVersion");
    if !version.is_empty() && version != meta::text(old, "resourceVersion") {
        return Err(ApiError::stale(kind.about(name)));
    }
    let (wanted, found) = (meta::text(new, "uid"), meta::text(old, "uid"));
    if !wanted.is_empty() && wanted != found {
        let why = format!("Precondition failed: UID in precondition: {wanted}, UID in object meta: {found}");
        return Err(ApiError::conflict(kind.about(name), &why));
    }
    Ok(())
}

/// The object to store for an update, checked, and the warnings.
fn prepare_update(
    kind: &Kind,
    mut new: Value,
    old: &Value,
    part: Subresource,
    mut unknown: Vec<String>,
    field_validation: FieldValidation,
) -> Result<(Value, Vec<String>), ApiError> {
    match part {
        Subresource::Main => {
            if kind.status_subresource {
                copy_status(&mut new, old);
            }
        }
        Subresource::Status => {
            let mut object = old.clone();
            copy_status(&mut object, &new);
            new = object;
        }
    }
    unknown.extend(prune(&kind.schema.root, &mut new));
    let warnings = field_warnings(kind, &unknown, field_validation)?;
    meta::keep_system_fields(&mut new, old);
    check_object(kind, &mut new, Some(old))?;
    meta::set_or_remove(&mut new, "resourceVersion", old["metadata"].get("resourceVersion").cloned());
    if kind.has_generation && part == Subresource::Main && spec_changed(kind, &new, old) {
        let generation = old["metadata"]["generation"].as_i64().unwrap_or(0);
        new["metadata"]["generation"] = json!(generation + 1);
    }
    Ok((new, warnings))
}

/// Fills in defaults and checks everything there is to check.
fn check_object(kind: &Kind, object: &mut Value, old: Option<&Value>) -> Result<(), ApiError> {
    apply_defaults(&kind.schema.root, object);
    let mut causes = meta::check(kind, object, old);
    causes.extend(validate(&kind.schema.root, object));
    causes.extend(builtin::admit(kind, object, old));
    // Rules rely on the structure; on a broken one their errors would only repeat it.
    if causes.is_empty()
        && let Some(rules) = &kind.schema.rules
    {
        causes = rules.check(object, old);
    }
    if causes.is_empty() {
        return Ok(());
    }
    Err(ApiError::invalid(kind.about_kind(meta::text(object, "name")), causes))
}

fn field_warnings(kind: &Kind, unknown: &[String], validation: FieldValidation) -> Result<Vec<String>, ApiError> {
    let sentences: Vec<String> = unknown.iter().map(|field| format!("unknown field {field:?}")).collect();
    match validation {
        FieldValidation::Ignore => Ok(Vec::new()),
        FieldValidation::Warn => Ok(sentences),
        FieldValidation::Strict if sentences.is_empty() => Ok(Vec::new()),
        FieldValidation::Strict => Err(ApiError::bad_request(format!(
            "{0} in version {1:?} cannot be handled as a {0}: strict decoding error: {2}",
            kind.kind,
            kind.version,
            sentences.join(", ")
        ))),
    }
}

fn remove_status(object: &mut Value) {
    if let Some(fields) = object.as_object_mut() {
        fields.shift_remove("status");
    }
}

fn copy_status(to: &mut Value, from: &Value) {
    match from.get("status") {
        Some(status) => to["status"] = status.clone(),
        None => remove_status(to),
    }
}

/// Whether anything but metadata, and status where it is a subresource, differs.
fn spec_changed(kind: &Kind, new: &Value, old: &Value) -> bool {
    let relevant = |object: &Value| {
        let mut object = object.clone();
        if let Some(fields) = object.as_object_mut() {
            fields.shift_remove("metadata");
            if kind.status_subresource {
                fields.shift_remove("status");
            }
        }
        object
    };
    relevant(new) != relevant(old)
}

fn same_content(new: &Value, old: &Value) -> bool {
    new == old
}

/// A name that nobody else is likely to have: the prefix and five letters.
fn generated_name(prefix: &str) -> String {
    // As in Kubernetes: no vowels, so that no words come out.
    const LETTERS: &[u8] = b"bcdfghjklmnpqrstvwxz2456789";
    let prefix: String = prefix.chars().take(GENERATED_PREFIX_MAX).collect();
    let random = uuid::Uuid::new_v4().into_bytes();
    let suffix = random.iter().take(5).map(|byte| char::from(LETTERS[usize::from(*byte) % LETTERS.len()]));
    prefix.chars().chain(suffix).collect()
}
