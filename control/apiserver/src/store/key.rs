//! Keys of stored objects, and scopes that select ranges of them.
//!
//! A key orders by resource, then namespace, then name, so that every list and watch is one range.

use std::ops::Bound;

/// Where one object is stored.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key {
    /// `<plural>.<group>`, or the plural alone for the core group.
    pub resource: String,
    /// Empty for cluster-scoped objects.
    pub namespace: String,
    /// The object's name.
    pub name: String,
}

impl Key {
    /// A key from its parts.
    pub fn new(resource: impl Into<String>, namespace: impl Into<String>, name: impl Into<String>) -> Self {
        Self { resource: resource.into(), namespace: namespace.into(), name: name.into() }
    }

    /// The key as one text; no part can contain `/`, since names are DNS labels or subdomains.
    pub fn encode(&self) -> String {
        format!("{}/{}/{}", self.resource, self.namespace, self.name)
    }

    /// The inverse of [`Key::encode`].
    pub fn decode(text: &str) -> Option<Self> {
        let mut parts = text.splitn(3, '/');
        Some(Self::new(parts.next()?, parts.next()?, parts.next()?))
    }
}

/// A set of keys: everything, one resource, one namespace of a resource, or one object.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Scope {
    /// `None` selects every resource.
    pub resource: Option<String>,
    /// `None` selects every namespace.
    pub namespace: Option<String>,
}

impl Scope {
    /// Everything in the store.
    pub fn all() -> Self {
        Self::default()
    }

    /// One resource, in one namespace or in all.
    pub fn resource(resource: impl Into<String>, namespace: Option<String>) -> Self {
        Self { resource: Some(resource.into()), namespace }
    }

    /// Whether the key is in the scope.
    pub fn contains(&self, key: &Key) -> bool {
        self.resource.as_ref().is_none_or(|resource| *resource == key.resource)
            && self.namespace.as_ref().is_none_or(|namespace| *namespace == key.namespace)
    }

    /// The place in key order where the scope starts, or the place after `after`.
    pub(super) fn start(&self, after: Option<&Key>) -> Bound<Key> {
        match after {
            Some(key) => Bound::Excluded(key.clone()),
            None => Bound::Included(Key::new(
                self.resource.clone().unwrap_or_default(),
                self.namespace.clone().unwrap_or_default(),
                "",
            )),
        }
    }

    /// Whether no key from this one on can be in the scope.
    pub(super) fn ends_before(&self, key: &Key) -> bool {
        let Some(resource) = &self.resource else {
            return false;
        };
        match key.resource.cmp(resource) {
            std::cmp::Ordering::Less => false,
            std::cmp::Ordering::Greater => true,
            std::cmp::Ordering::Equal => self.namespace.as_ref().is_some_and(|namespace| key.namespace > *namespace),
        }
    }
}
