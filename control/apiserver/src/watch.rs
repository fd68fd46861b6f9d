//! Watches: the changes of a list, as events.
//!
//! *Flow.* [`Watch::start`] checks the options and takes a position in the store's history; [`Watch::run`] then sends
//! events into a short queue until the deadline, the server's end, or a reader that does not read.
//!
//! *Invariants.* Events come in the order of their revisions. An object that starts or stops being selected comes as
//! added or deleted. A bookmark says that everything up to its version was sent.
//!
//! *When things fail.* A watcher that the history has left behind gets one `ERROR` event with code 410 and must list
//! again. A reader that takes nothing for [`STALL_MAX`] is cut without one, since it would not read it.

use std::{sync::Arc, time::Duration};

use serde_json::{Value, json};
use tokio::{
    sync::mpsc,
    time::{Instant, sleep_until, timeout},
};
use tokio_util::sync::CancellationToken;

use crate::{
    error::ApiError,
    registry::Kind,
    rest::{Api, ListOptions, meta},
    selector::Selector,
    store::{Event, Scope, StoreError, Watcher},
};

/// Longest wait for a reader to take an event.
pub const STALL_MAX: Duration = Duration::from_secs(30);
/// Events that may wait for the reader beside the history itself.
pub const QUEUE_EVENTS_MAX: usize = 16;
/// Annotation of the bookmark that ends the initial events.
const INITIAL_EVENTS_END: &str = "k8s.io/initial-events-end";

/// Kinds of watch events.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WatchEventType {
    /// The object is new in the list.
    Added,
    /// The object changed.
    Modified,
    /// The object left the list.
    Deleted,
    /// Everything up to this version was sent.
    Bookmark,
    /// The watch ends with a `Status`.
    Error,
}

impl WatchEventType {
    /// The name on the wire.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Added => "ADDED",
            Self::Modified => "MODIFIED",
            Self::Deleted => "DELETED",
            Self::Bookmark => "BOOKMARK",
            Self::Error => "ERROR",
        }
    }
}

/// A watch event.
#[derive(Debug, Clone)]
pub struct WatchEvent {
    /// What happened.
    pub event_type: WatchEventType,
    /// The object after it, or a `Status`.
    pub object: Arc<Value>,
}

/// What to watch, and for how long.
#[derive(Debug, Clone)]
pub struct WatchOptions {
    /// Which objects.
    pub selector: Selector,
    /// From which version on; empty or 0 for the objects as they are now and then their changes.
    pub resource_version: String,
    /// Whether the reader wants bookmarks.
    pub bookmarks: bool,
    /// Whether the watch starts with the objects as they are now, and a bookmark that says so.
    pub initial_events: bool,
    /// Time between bookmarks.
    pub bookmark_interval: Duration,
    /// Longest duration of the watch.
    pub timeout: Duration,
    /// Fault injection: end the watch after so many events.
    pub cut_after: Option<usize>,
}

/// A watch about to run.
#[derive(Debug)]
pub struct Watch {
    kind: Arc<Kind>,
    options: WatchOptions,
    initial: Vec<WatchEvent>,
    changes: Result<Watcher, ApiError>,
    sent: usize,
}

/// Why a watch ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Reader,
    Cut,
}

impl Watch {
    /// Checks the options and takes a position.
    ///
    /// # Errors
    /// 400 for options that make no sense.
    pub fn start(api: &Api, kind: Arc<Kind>, namespace: Option<&str>, options: WatchOptions) -> Result<Self, ApiError> {
        let version = crate::rest::parse_version(&options.resource_version)?;
        let mut initial = Vec::new();
        let mut since = version;
        if version == 0 || options.initial_events {
            let list = ListOptions { selector: options.selector.clone(), ..ListOptions::default() };
            let list = api.list(&kind, namespace, &list)?;
            since = list.revision;
            initial
                .extend(list.items.into_iter().map(|object| WatchEvent { event_type: WatchEventType::Added, object }));
            if options.initial_events && options.bookmarks {
                let mut end = bookmark(&kind, since);
                end["metadata"]["annotations"] = json!({INITIAL_EVENTS_END: "true"});
                initial.push(WatchEvent { event_type: WatchEventType::Bookmark, object: Arc::new(end) });
            }
        }
        let scope = Scope::resource(kind.storage(), namespace.map(str::to_owned));
        let changes = api.store.watch(scope, since).map_err(|error| ApiError::from_store(error, kind.about("")));
        Ok(Self { kind, options, initial, changes, sent: 0 })
    }

    /// Sends events until the watch ends.
    pub async fn run(mut self, sink: mpsc::Sender<WatchEvent>, shutdown: CancellationToken) {
        let deadline = Instant::now() + self.options.timeout;
        for event in std::mem::take(&mut self.initial) {
            if self.send(&sink, event).await.is_err() {
                return;
            }
        }
        let mut changes = match std::mem::replace(&mut self.changes, Err(ApiError::no_such_path())) {
            Ok(changes) => changes,
            Err(error) => {
                let _ = self.send(&sink, error_event(&error)).await;
                return;
            }
        };
        let mut next_bookmark = Instant::now() + self.options.bookmark_interval;
        loop {
            let batch = tokio::select! {
                biased;
                () = shutdown.cancelled() => return,
                () = sink.closed() => return,
                batch = changes.next() => batch,
                () = sleep_until(deadline) => break,
                () = sleep_until(next_bookmark), if self.options.bookmarks => Ok(Vec::new()),
            };
            match batch {
                Ok(batch) if batch.is_empty() => {
                    if self.send_bookmark(&sink, changes.position()).await.is_err() {
                        return;
                    }
                    next_bookmark = Instant::now() + self.options.bookmark_interval;
                }
                Ok(batch) => {
                    if self.send_batch(&sink, &batch).await.is_err() {
                        return;
                    }
                }
                Err(StoreError::Closed) => return,
                Err(error) => {
                    let error = ApiError::from_store(error, self.kind.about(""));
                    let _ = self.send(&sink, error_event(&error)).await;
                    return;
                }
            }
        }
        if self.options.bookmarks {
            let _ = self.send_bookmark(&sink, changes.position()).await;
        }
    }

    async fn send_batch(&mut self, sink: &mpsc::Sender<WatchEvent>, batch: &[Arc<Event>]) -> Result<(), End> {
        for event in batch {
            if let Some(event) = self.event(event) {
                self.send(sink, event).await?;
            }
        }
        Ok(())
    }

    async fn send_bookmark(&mut self, sink: &mpsc::Sender<WatchEvent>, position: u64) -> Result<(), End> {
        let object = Arc::new(bookmark(&self.kind, position));
        self.send(sink, WatchEvent { event_type: WatchEventType::Bookmark, object }).await
    }

    async fn send(&mut self, sink: &mpsc::Sender<WatchEvent>, event: WatchEvent) -> Result<(), End> {
        if self.options.cut_after.is_some_and(|cut| self.sent >= cut) {
            return Err(End::Cut);
        }
        self.sent += 1;
        match timeout(STALL_MAX, sink.send(event)).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(_)) => Err(End::Reader),
            Err(_) => {
                tracing::warn!(kind = self.kind.kind, "cutting a watch whose reader does not read");
                Err(End::Reader)
            }
        }
    }

    /// What a change means to this watch, if anything.
    fn event(&self, event: &Event) -> Option<WatchEvent> {
        let selected = |object: &Arc<Value>| {
            let object = self.kind.served(object);
            self.options.selector.matches(&object).then_some(object)
        };
        let before = event.previous.as_ref().and_then(|entry| selected(&entry.value));
        let after = event.value.as_ref().and_then(selected);
        let (event_type, object) = match (before, after) {
            (None, None) => return None,
            (None, Some(after)) => (WatchEventType::Added, after),
            (Some(_), Some(after)) => (WatchEventType::Modified, after),
            (Some(before), None) => (WatchEventType::Deleted, at_revision(&before, event.revision)),
        };
        Some(WatchEvent { event_type, object })
    }
}

/// The last state of an object that left the list, at the version at which it left.
fn at_revision(object: &Value, revision: u64) -> Arc<Value> {
    let mut object = object.clone();
    meta::set_or_remove(&mut object, "resourceVersion", Some(json!(revision.to_string())));
    Arc::new(object)
}

fn bookmark(kind: &Kind, revision: u64) -> Value {
    json!({
        "kind": kind.kind, "apiVersion": kind.api_version(),
        "metadata": {"resourceVersion": revision.to_string(), "creationTimestamp": null},
    })
}

fn error_event(error: &ApiError) -> WatchEvent {
    WatchEvent { event_type: WatchEventType::Error, object: Arc::new(error.to_status()) }
}
