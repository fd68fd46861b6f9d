//! The door for faults: tests and drills decide, request by request, what goes wrong.

use std::{fmt, sync::Arc, time::Duration};

/// What a fault hook is told about a request.
#[derive(Debug, Clone)]
pub struct RequestInfo {
    /// `get`, `list`, `watch`, `create`, `update`, `patch`, `delete` or `deletecollection`.
    pub verb: &'static str,
    /// API group, empty for core.
    pub group: String,
    /// API version.
    pub version: String,
    /// The plural.
    pub resource: String,
    /// Empty for cluster-scoped objects and for all namespaces.
    pub namespace: String,
    /// Empty for collections.
    pub name: String,
    /// `status` or empty.
    pub subresource: String,
}

/// What happens to a request.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Outcome {
    /// It is served.
    #[default]
    Serve,
    /// 409 without doing anything.
    Conflict,
    /// 429 with `Retry-After`, without doing anything.
    TooManyRequests,
    /// 500 without doing anything.
    InternalError,
    /// It is served, but the answer is lost: the client sees 504.
    LoseAnswer,
    /// A watch is cut after so many events.
    CutWatch(usize),
}

/// A decision of the hook.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Fault {
    /// Wait before anything else.
    pub delay: Duration,
    /// What happens then.
    pub outcome: Outcome,
}

impl From<Outcome> for Fault {
    fn from(outcome: Outcome) -> Self {
        Self { delay: Duration::ZERO, outcome }
    }
}

/// Decides about each request to an object or a collection.
#[derive(Clone)]
pub struct FaultHook(Arc<dyn Fn(&RequestInfo) -> Fault + Send + Sync>);

impl FaultHook {
    /// A hook from a closure.
    pub fn new(decide: impl Fn(&RequestInfo) -> Fault + Send + Sync + 'static) -> Self {
        Self(Arc::new(decide))
    }

    /// No faults at all.
    pub fn none() -> Self {
        Self::new(|_| Fault::default())
    }

    pub(crate) fn decide(&self, request: &RequestInfo) -> Fault {
        (self.0)(request)
    }
}

impl fmt::Debug for FaultHook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("FaultHook")
    }
}
