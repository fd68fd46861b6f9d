//! What the API does, without HTTP: create, read, update, patch and delete objects of a [`Kind`] on a [`Store`].
//!
//! *Flow* of a write: read the stored object → make the new one → bring it into shape → check it → compare → commit with
//! the revision that was read. A commit that loses against another one starts over, unless the writer named a
//! `resourceVersion`: then it is the writer's to start over (409).
//!
//! *Invariants.* A write that changes nothing commits nothing. The status subresource changes only `status`, the object
//! itself everything else. An object with finalizers is never removed, only marked.

mod delete;
mod list;
pub mod meta;
mod write;

use std::sync::Arc;

pub use delete::{DeleteOptions, Deleted, FOREGROUND, ORPHAN, Propagation};
pub(crate) use list::parse_version;
pub use list::{List, ListOptions, VersionMatch};
use serde_json::{Value, json};
pub use write::{FieldValidation, Subresource, WriteOptions, Written};

use crate::{
    clock::Clock,
    error::ApiError,
    registry::{Kind, Registry, builtin},
    store::{Entry, Expect, Store, StoreError},
};

/// How often a write that loses against others starts over before it gives up.
const ATTEMPTS_MAX: usize = 64;

/// The API on a store. Cloning is cheap.
#[derive(Debug, Clone)]
pub struct Api {
    /// The kinds.
    pub registry: Arc<Registry>,
    /// The objects.
    pub store: Arc<Store>,
    /// The date.
    pub clock: Clock,
}

impl Api {
    /// Makes the lasting namespaces and brings the stored CRDs in line with the registry.
    ///
    /// # Errors
    /// When the store cannot be written.
    pub async fn seed(&self) -> Result<(), StoreError> {
        for name in builtin::LASTING_NAMESPACES {
            let key = crate::store::Key::new(builtin::NAMESPACES, "", name);
            if self.store.get(&key).is_none() {
                let mut namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}});
                self.give_identity(&mut namespace);
                if let Some(kind) = self.registry.get("", "v1", builtin::NAMESPACES) {
                    builtin::admit(kind, &mut namespace, None);
                }
                self.store.commit(key, Expect::Absent, Some(namespace)).await?;
            }
        }
        self.seed_definitions().await
    }

    async fn seed_definitions(&self) -> Result<(), StoreError> {
        let scope = crate::store::Scope::resource(builtin::CRDS, None);
        let stored = self.store.list(&scope, None, None)?.entries;
        for (key, entry) in &stored {
            if !self.registry.definitions().iter().any(|crd| crd["metadata"]["name"] == key.name.as_str()) {
                self.store.commit(key.clone(), Expect::Revision(entry.revision), None).await?;
            }
        }
        for definition in self.registry.definitions() {
            let key = crate::store::Key::new(builtin::CRDS, "", meta::text(definition, "name"));
            let mut crd = builtin::established(definition, &self.clock.now_text());
            let expect = match self.store.get(&key) {
                Some(entry) if entry.value["spec"] == crd["spec"] => continue,
                Some(entry) => {
                    crd["metadata"]["uid"] = entry.value["metadata"]["uid"].clone();
                    crd["metadata"]["creationTimestamp"] = entry.value["metadata"]["creationTimestamp"].clone();
                    let generation = entry.value["metadata"]["generation"].as_i64().unwrap_or(1);
                    crd["metadata"]["generation"] = json!(generation + 1);
                    Expect::Revision(entry.revision)
                }
                None => {
                    self.give_identity(&mut crd);
                    crd["metadata"]["generation"] = json!(1);
                    Expect::Absent
                }
            };
            self.store.commit(key, expect, Some(crd)).await?;
        }
        Ok(())
    }

    /// Gives a new object its uid and date.
    fn give_identity(&self, object: &mut Value) {
        object["metadata"]["uid"] = json!(uuid::Uuid::new_v4().to_string());
        object["metadata"]["creationTimestamp"] = json!(self.clock.now_text());
    }

    /// One object.
    ///
    /// # Errors
    /// 404 when there is none.
    pub fn get(&self, kind: &Kind, namespace: &str, name: &str) -> Result<Arc<Value>, ApiError> {
        self.entry(kind, namespace, name).map(|entry| kind.served(&entry.value))
    }

    fn entry(&self, kind: &Kind, namespace: &str, name: &str) -> Result<Entry, ApiError> {
        self.store.get(&kind.key(namespace, name)).ok_or_else(|| ApiError::not_found(kind.about(name)))
    }

    /// Refuses new content in a namespace that is not there or is going away.
    fn check_namespace(&self, kind: &Kind, namespace: &str, name: &str) -> Result<(), ApiError> {
        let about = crate::error::About {
            kind: builtin::NAMESPACES.to_owned(),
            name: namespace.to_owned(),
            ..Default::default()
        };
        let key = crate::store::Key::new(builtin::NAMESPACES, "", namespace);
        let Some(entry) = self.store.get(&key) else { return Err(ApiError::not_found(about)) };
        if meta::is_deleting(&entry.value) {
            let why = format!("unable to create new content in namespace {namespace} because it is being terminated");
            return Err(ApiError::forbidden(kind.about(name), &why));
        }
        Ok(())
    }
}
