//! Deleting.

use std::sync::Arc;

use serde_json::{Value, json};

use super::{ATTEMPTS_MAX, Api, ListOptions, meta};
use crate::{
    error::{About, ApiError},
    registry::{Kind, builtin},
    store::{Entry, Expect, Key, StoreError},
};

/// Finalizer of a deletion that waits for the object's dependents.
pub const FOREGROUND: &str = "foregroundDeletion";
/// Finalizer of a deletion that leaves the object's dependents behind.
pub const ORPHAN: &str = "orphan";

/// What becomes of the dependents of a deleted object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Propagation {
    /// They are deleted afterwards.
    Background,
    /// They are deleted first.
    Foreground,
    /// They stay.
    Orphan,
}

/// How to delete.
#[derive(Debug, Clone, Default)]
pub struct DeleteOptions {
    /// Delete only the object with this uid.
    pub uid: Option<String>,
    /// Delete only the object at this version.
    pub resource_version: Option<String>,
    /// What becomes of dependents; background when not given.
    pub propagation: Option<Propagation>,
    /// Do everything but commit.
    pub dry_run: bool,
}

/// The answer to a deletion.
#[derive(Debug)]
pub struct Deleted {
    /// The object: as it was, or marked and waiting for its finalizers.
    pub object: Arc<Value>,
    /// Whether it is gone.
    pub gone: bool,
}

impl Api {
    /// Deletes an object, or marks it for deletion when it has finalizers.
    ///
    /// # Errors
    /// 403 for the lasting namespaces, 404, or 409 when a precondition fails.
    pub async fn delete(
        &self,
        kind: &Kind,
        namespace: &str,
        name: &str,
        options: &DeleteOptions,
    ) -> Result<Deleted, ApiError> {
        let is_namespace = kind.group.is_empty() && kind.plural == builtin::NAMESPACES;
        if is_namespace && builtin::LASTING_NAMESPACES.contains(&name) {
            return Err(ApiError::forbidden(kind.about(name), "this namespace may not be deleted"));
        }
        for _ in 0..ATTEMPTS_MAX {
            let entry = self.entry(kind, namespace, name)?;
            check_preconditions(kind, name, &entry.value, options)?;
            let marked = self.marked(kind, &entry, options, is_namespace);
            let gone = meta::finalizers(&marked).is_empty() && !is_namespace;
            if options.dry_run || (!gone && marked == *entry.value) {
                let object = if gone { entry.value } else { Arc::new(marked) };
                return Ok(Deleted { object: kind.served(&object), gone });
            }
            let key = kind.key(namespace, name);
            let value = (!gone).then_some(marked);
            match self.store.commit(key, Expect::Revision(entry.revision), value).await {
                Ok(entry) => return Ok(Deleted { object: kind.served(&entry.value), gone }),
                Err(StoreError::Conflict { current }) => self.store.published(current).await,
                Err(error) => return Err(ApiError::from_store(error, kind.about(name))),
            }
        }
        Err(ApiError::stale(kind.about(name)))
    }

    /// The object with the marks of its deletion.
    fn marked(&self, kind: &Kind, entry: &Entry, options: &DeleteOptions, is_namespace: bool) -> Value {
        let mut object = entry.value.as_ref().clone();
        if let Some(propagation) = options.propagation {
            meta::set_finalizer(&mut object, FOREGROUND, propagation == Propagation::Foreground);
            meta::set_finalizer(&mut object, ORPHAN, propagation == Propagation::Orphan);
        }
        if !meta::is_deleting(&object) {
            object["metadata"]["deletionTimestamp"] = json!(self.clock.now_text());
            object["metadata"]["deletionGracePeriodSeconds"] = json!(0);
            if kind.has_generation {
                let generation = object["metadata"]["generation"].as_i64().unwrap_or(0);
                object["metadata"]["generation"] = json!(generation + 1);
            }
        }
        if is_namespace {
            object["status"]["phase"] = json!("Terminating");
        }
        object
    }

    /// Deletes every object of a kind that is selected. Returns them.
    ///
    /// # Errors
    /// The first refusal; objects before it are deleted.
    pub async fn delete_collection(
        &self,
        kind: &Kind,
        namespace: Option<&str>,
        list: &ListOptions,
        options: &DeleteOptions,
    ) -> Result<Vec<Arc<Value>>, ApiError> {
        let mut deleted = Vec::new();
        for object in self.list(kind, namespace, list)?.items {
            let result =
                self.delete(kind, meta::text(&object, "namespace"), meta::text(&object, "name"), options).await;
            match result {
                Ok(done) => deleted.push(done.object),
                // Someone else was quicker.
                Err(error) if error.code() == 404 => {}
                Err(error) => return Err(error),
            }
        }
        Ok(deleted)
    }
}

fn check_preconditions(kind: &Kind, name: &str, object: &Value, options: &DeleteOptions) -> Result<(), ApiError> {
    let version = options.resource_version.as_deref().unwrap_or_default();
    let checks =
        [("UID", "uid", options.uid.as_deref().unwrap_or_default()), ("ResourceVersion", "resourceVersion", version)];
    for (label, field, wanted) in checks {
        let found = meta::text(object, field);
        if !wanted.is_empty() && wanted != found {
            let why =
                format!("Precondition failed: {label} in precondition: {wanted}, {label} in object meta: {found}");
            return Err(ApiError::conflict(
                About { uid: meta::text(object, "uid").to_owned(), ..kind.about(name) },
                &why,
            ));
        }
    }
    Ok(())
}

/// Changes that the garbage collector makes, past the checks for changes from outside.
impl Api {
    /// Changes an object as it was read; one that waited only for the finalizer just removed goes.
    pub(crate) async fn edit(&self, key: &Key, entry: &Entry, change: impl FnOnce(&mut Value)) -> Result<(), ApiError> {
        let mut object = entry.value.as_ref().clone();
        change(&mut object);
        if object == *entry.value {
            return Ok(());
        }
        let is_namespace = key.resource == builtin::NAMESPACES;
        if meta::is_deleting(&object) && meta::finalizers(&object).is_empty() && !is_namespace {
            return self.remove(key, entry).await;
        }
        self.commit_exact(key, entry, Some(object)).await
    }

    /// Removes an object as it was read.
    pub(crate) async fn remove(&self, key: &Key, entry: &Entry) -> Result<(), ApiError> {
        self.commit_exact(key, entry, None).await
    }

    async fn commit_exact(&self, key: &Key, entry: &Entry, value: Option<Value>) -> Result<(), ApiError> {
        let about = About { kind: key.resource.clone(), name: key.name.clone(), ..About::default() };
        let committed = self.store.commit(key.clone(), Expect::Revision(entry.revision), value).await;
        committed.map(|_| ()).map_err(|error| ApiError::from_store(error, about))
    }
}
