//! Listing, in pages that all show one revision.

use std::sync::Arc;

use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use serde_json::{Value, json};

use super::Api;
use crate::{
    error::ApiError,
    registry::Kind,
    selector::Selector,
    store::{Key, Scope},
};

/// How a list's `resourceVersion` is meant.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum VersionMatch {
    /// At this version or any later one.
    #[default]
    NotOlderThan,
    /// At exactly this version.
    Exact,
}

/// What to list.
#[derive(Debug, Clone, Default)]
pub struct ListOptions {
    /// Which objects.
    pub selector: Selector,
    /// Most objects in one page; 0 for all.
    pub limit: usize,
    /// Where the page before ended.
    pub continue_token: String,
    /// A version, see [`VersionMatch`]; empty for the newest.
    pub resource_version: String,
    /// How the version is meant.
    pub version_match: VersionMatch,
}

/// A page of a list.
#[derive(Debug)]
pub struct List {
    /// The version of the whole list, to watch from.
    pub revision: u64,
    /// The objects.
    pub items: Vec<Arc<Value>>,
    /// Where the next page starts; empty on the last one.
    pub continue_token: String,
    /// How many objects follow, if known.
    pub remaining: Option<usize>,
}

impl List {
    /// The list's `metadata`.
    pub fn metadata(&self) -> Value {
        let mut metadata = json!({"resourceVersion": self.revision.to_string()});
        if !self.continue_token.is_empty() {
            metadata["continue"] = json!(self.continue_token);
        }
        if let Some(remaining) = self.remaining {
            metadata["remainingItemCount"] = json!(remaining);
        }
        metadata
    }
}

impl Api {
    /// Lists the objects of a kind, in one namespace or in all.
    ///
    /// # Errors
    /// 400 for options that make no sense, 410 when the version asked for is no longer there.
    pub fn list(&self, kind: &Kind, namespace: Option<&str>, options: &ListOptions) -> Result<List, ApiError> {
        let scope = Scope::resource(kind.storage(), namespace.map(str::to_owned));
        let (after, at) = self.place(kind, options)?;
        let listing =
            self.store.list(&scope, after.as_ref(), at).map_err(|error| ApiError::from_store(error, kind.about("")))?;
        let selected = listing.entries.into_iter().map(|(key, entry)| (key, kind.served(&entry.value)));
        let mut selected = selected.filter(|(_, object)| options.selector.matches(object));
        let mut page =
            List { revision: listing.revision, items: Vec::new(), continue_token: String::new(), remaining: None };
        let mut last = None;
        for (key, object) in selected.by_ref() {
            page.items.push(object);
            last = Some(key);
            if page.items.len() == options.limit {
                break;
            }
        }
        let remaining = selected.count();
        if let Some(last) = last.filter(|_| remaining > 0) {
            page.continue_token = encode_continue(page.revision, &last);
            page.remaining = options.selector.is_everything().then_some(remaining);
        }
        Ok(page)
    }

    /// After which key, and at which revision.
    fn place(&self, kind: &Kind, options: &ListOptions) -> Result<(Option<Key>, Option<u64>), ApiError> {
        if !options.continue_token.is_empty() {
            let (revision, key) = decode_continue(kind, &options.continue_token)
                .ok_or_else(|| ApiError::bad_request("continue key is not valid"))?;
            return Ok((Some(key), Some(revision)));
        }
        let version = parse_version(&options.resource_version)?;
        match (options.version_match, version) {
            (VersionMatch::Exact, 0) => {
                Err(ApiError::bad_request("resourceVersionMatch \"Exact\" is forbidden for resourceVersion \"0\""))
            }
            (VersionMatch::Exact, version) => Ok((None, Some(version))),
            (VersionMatch::NotOlderThan, version) => {
                let newest = self.store.revision();
                if version > newest {
                    return Err(ApiError::timeout(format!("Too large resource version: {version}, current: {newest}")));
                }
                Ok((None, None))
            }
        }
    }
}

/// A resource version as a number; 0 when empty.
pub(crate) fn parse_version(text: &str) -> Result<u64, ApiError> {
    if text.is_empty() {
        return Ok(0);
    }
    text.parse()
        .map_err(|_| ApiError::bad_request(format!("resourceVersion: Invalid value: {text:?}: must be a number")))
}

fn encode_continue(revision: u64, last: &Key) -> String {
    URL_SAFE_NO_PAD.encode(format!("{revision}/{}/{}", last.namespace, last.name))
}

fn decode_continue(kind: &Kind, token: &str) -> Option<(u64, Key)> {
    let text = String::from_utf8(URL_SAFE_NO_PAD.decode(token).ok()?).ok()?;
    let mut parts = text.splitn(3, '/');
    Some((parts.next()?.parse().ok()?, kind.key(parts.next()?, parts.next()?)))
}
