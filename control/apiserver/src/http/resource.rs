//! Requests to objects and collections.

use std::{sync::Arc, time::Duration};

use axum::{
    body::{Body, Bytes},
    http::{HeaderMap, HeaderValue, Method, Response, StatusCode, header::CONTENT_TYPE, request::Parts},
};
use futures::StreamExt;
use serde_json::{Value, json};
use tokio::{sync::mpsc, time::timeout};
use tokio_stream::wrappers::ReceiverStream;

use super::{
    ApiService, Client, json_answer,
    negotiate::Form,
    protobuf,
    route::{Query, ResourcePath},
};
use crate::{
    clock::Clock,
    error::ApiError,
    fault::{Outcome, RequestInfo},
    patch::Patch,
    registry::{Access, Kind},
    rest::{DeleteOptions, FieldValidation, ListOptions, Propagation, Subresource, VersionMatch, WriteOptions},
    selector::Selector,
    table::{IncludeObject, partial, table},
    watch::{QUEUE_EVENTS_MAX, Watch, WatchEvent, WatchEventType, WatchOptions},
};

/// Longest duration of a watch that a client can ask for.
const WATCH_TIMEOUT_MAX: Duration = Duration::from_secs(24 * 3600);

/// A request to an object or a collection, taken apart.
struct Call {
    kind: Arc<Kind>,
    path: ResourcePath,
    query: Query,
    form: Form,
    verb: &'static str,
    part: Subresource,
    media_type: String,
}

impl Call {
    fn namespace(&self) -> &str {
        self.path.namespace.as_deref().unwrap_or_default()
    }

    fn name(&self) -> &str {
        self.path.name.as_deref().unwrap_or_default()
    }

    fn info(&self) -> RequestInfo {
        RequestInfo {
            verb: self.verb,
            group: self.path.group.clone(),
            version: self.path.version.clone(),
            resource: self.path.resource.clone(),
            namespace: self.namespace().to_owned(),
            name: self.name().to_owned(),
            subresource: self.path.subresource.clone().unwrap_or_default(),
        }
    }
}

impl ApiService {
    pub(super) async fn resource(
        &self,
        path: ResourcePath,
        form: Form,
        parts: Parts,
        body: Body,
    ) -> Result<Response<Body>, ApiError> {
        let client = parts.extensions.get::<Client>().cloned().unwrap_or_default();
        let call = self.call(path, form, &parts)?;
        let fault = self.inner.faults.decide(&call.info());
        match fault.outcome {
            Outcome::Conflict => return Err(ApiError::stale(call.kind.about(call.name()))),
            Outcome::TooManyRequests => return Err(ApiError::too_many_requests("injected fault", 1)),
            Outcome::InternalError => return Err(ApiError::internal("injected fault")),
            Outcome::Serve | Outcome::LoseAnswer | Outcome::CutWatch(_) => {}
        }
        if call.verb == "watch" {
            tokio::time::sleep(fault.delay).await;
            let cut_after = match fault.outcome {
                Outcome::CutWatch(events) => Some(events),
                _ => None,
            };
            return self.watch(call, client, cut_after);
        }
        let _permit = self
            .inner
            .requests
            .try_acquire()
            .map_err(|_| ApiError::too_many_requests("too many requests, please try again later", 1))?;
        let deadline = self.inner.limits.request_timeout;
        let serve = async {
            tokio::time::sleep(fault.delay).await;
            self.serve(&call, body).await
        };
        let answer = timeout(deadline, serve)
            .await
            .map_err(|_| ApiError::timeout(format!("the request took longer than {} s", deadline.as_secs())))??;
        match fault.outcome {
            Outcome::LoseAnswer => Err(ApiError::timeout("injected fault: the answer was lost")),
            _ => Ok(answer),
        }
    }

    fn call(&self, path: ResourcePath, form: Form, parts: &Parts) -> Result<Call, ApiError> {
        let registry = &self.inner.api.registry;
        let kind = registry.get(&path.group, &path.version, &path.resource).ok_or_else(ApiError::no_such_path)?.clone();
        let query = Query::parse(&parts.uri).ok_or_else(|| ApiError::bad_request("the query cannot be parsed"))?;
        if path.namespace.is_some() != kind.namespaced && (path.namespace.is_some() || path.name.is_some()) {
            return Err(ApiError::no_such_path());
        }
        let part = match path.subresource.as_deref() {
            None => Subresource::Main,
            Some("status") if kind.status_subresource => Subresource::Status,
            Some(_) => return Err(ApiError::no_such_path()),
        };
        let verb = verb(&parts.method, path.name.is_some(), &query)
            .ok_or_else(|| ApiError::method_not_allowed(parts.method.as_str()))?;
        if kind.access == Access::ReadOnly && !matches!(verb, "get" | "list" | "watch") {
            return Err(ApiError::method_not_allowed(verb));
        }
        if part == Subresource::Status && verb == "delete" {
            return Err(ApiError::method_not_allowed(verb));
        }
        Ok(Call { kind, path, query, form, verb, part, media_type: media_type(&parts.headers) })
    }

    async fn serve(&self, call: &Call, body: Body) -> Result<Response<Body>, ApiError> {
        match call.verb {
            "get" => self.get(call),
            "list" => self.list(call),
            "create" => self.create(call, self.read(body).await?).await,
            "update" => self.update(call, self.read(body).await?).await,
            "patch" => self.patch(call, self.read(body).await?).await,
            "delete" => self.delete(call, self.read(body).await?).await,
            _ => self.delete_collection(call, self.read(body).await?).await,
        }
    }

    async fn read(&self, body: Body) -> Result<Bytes, ApiError> {
        let limit = self.inner.limits.body_bytes_max;
        axum::body::to_bytes(body, limit).await.map_err(|error| {
            // The limit is reported as a source of the error; everything else is a broken connection.
            match std::error::Error::source(&error) {
                Some(source) if source.to_string().contains("limit") => ApiError::too_large(limit),
                _ => ApiError::bad_request(format!("reading the body failed: {error}")),
            }
        })
    }

    fn get(&self, call: &Call) -> Result<Response<Body>, ApiError> {
        let object = self.inner.api.get(&call.kind, call.namespace(), call.name())?;
        let value = match call.form {
            Form::Table => self.table(call, std::slice::from_ref(&object), list_metadata(&object)),
            Form::Partial => partial(&object),
            _ => object.as_ref().clone(),
        };
        Ok(json_answer(StatusCode::OK, &value, &[]))
    }

    fn list(&self, call: &Call) -> Result<Response<Body>, ApiError> {
        let list = self.inner.api.list(&call.kind, call.path.namespace.as_deref(), &list_options(call)?)?;
        let metadata = list.metadata();
        let value = match call.form {
            Form::Table => self.table(call, &list.items, metadata),
            Form::Partial => {
                let items: Vec<Value> = list.items.iter().map(|object| partial(object)).collect();
                json!({"kind": "PartialObjectMetadataList", "apiVersion": "meta.k8s.io/v1", "metadata": metadata, "items": items})
            }
            _ => list_object(&call.kind, metadata, &list.items),
        };
        Ok(json_answer(StatusCode::OK, &value, &[]))
    }

    fn table(&self, call: &Call, objects: &[Arc<Value>], metadata: Value) -> Value {
        table(&call.kind, objects, metadata, include_object(&call.query), self.inner.api.clock.now())
    }

    async fn create(&self, call: &Call, body: Bytes) -> Result<Response<Body>, ApiError> {
        let object = parse_object(&call.media_type, &body)?;
        let written = self.inner.api.create(&call.kind, call.namespace(), object, write_options(call)?).await?;
        Ok(json_answer(StatusCode::CREATED, &written.object, &written.warnings))
    }

    async fn update(&self, call: &Call, body: Bytes) -> Result<Response<Body>, ApiError> {
        let object = parse_object(&call.media_type, &body)?;
        let options = write_options(call)?;
        let written =
            self.inner.api.update(&call.kind, call.namespace(), call.name(), call.part, object, options).await?;
        Ok(json_answer(StatusCode::OK, &written.object, &written.warnings))
    }

    async fn patch(&self, call: &Call, body: Bytes) -> Result<Response<Body>, ApiError> {
        let is_builtin = !call.kind.has_generation;
        let patch = Patch::parse(&call.media_type, &body, is_builtin)?;
        let options = write_options(call)?;
        let written =
            self.inner.api.patch(&call.kind, call.namespace(), call.name(), call.part, &patch, options).await?;
        Ok(json_answer(StatusCode::OK, &written.object, &written.warnings))
    }

    async fn delete(&self, call: &Call, body: Bytes) -> Result<Response<Body>, ApiError> {
        let options = delete_options(call, &body)?;
        let deleted = self.inner.api.delete(&call.kind, call.namespace(), call.name(), &options).await?;
        if !deleted.gone {
            return Ok(json_answer(StatusCode::OK, &deleted.object, &[]));
        }
        let status = json!({
            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success",
            "details": {
                "name": call.name(), "group": call.kind.group, "kind": call.kind.plural,
                "uid": deleted.object["metadata"]["uid"],
            },
        });
        Ok(json_answer(StatusCode::OK, &status, &[]))
    }

    async fn delete_collection(&self, call: &Call, body: Bytes) -> Result<Response<Body>, ApiError> {
        let (list, options) = (list_options(call)?, delete_options(call, &body)?);
        let namespace = call.path.namespace.as_deref();
        let deleted = self.inner.api.delete_collection(&call.kind, namespace, &list, &options).await?;
        let metadata = json!({"resourceVersion": self.inner.api.store.revision().to_string()});
        Ok(json_answer(StatusCode::OK, &list_object(&call.kind, metadata, &deleted), &[]))
    }

    fn watch(&self, mut call: Call, client: Client, cut_after: Option<usize>) -> Result<Response<Body>, ApiError> {
        let guard = self.count_watch(client)?;
        let limits = &self.inner.limits;
        let watch_timeout = match parse_number(&call.query, "timeoutSeconds")? {
            0 => limits.watch_timeout,
            seconds => Duration::from_secs(seconds as u64).min(WATCH_TIMEOUT_MAX),
        };
        let initial_events = call.query.flag("sendInitialEvents");
        if initial_events && call.query.text("resourceVersionMatch") != "NotOlderThan" {
            return Err(ApiError::bad_request("sendInitialEvents needs resourceVersionMatch=NotOlderThan"));
        }
        let options = WatchOptions {
            selector: selector(&call)?,
            resource_version: call.query.text("resourceVersion").to_owned(),
            bookmarks: call.query.flag("allowWatchBookmarks"),
            initial_events,
            bookmark_interval: limits.bookmark_interval,
            timeout: watch_timeout,
            cut_after,
        };
        let watch = Watch::start(&self.inner.api, call.kind.clone(), call.path.namespace.as_deref(), options)?;
        let (sink, events) = mpsc::channel(QUEUE_EVENTS_MAX);
        let shutdown = self.inner.shutdown.clone();
        tokio::spawn(async move {
            watch.run(sink, shutdown).await;
            drop(guard);
        });
        let clock = self.inner.api.clock.clone();
        let include = include_object(&call.query);
        call.path.name = None;
        let lines =
            ReceiverStream::new(events).map(move |event| Ok::<_, std::io::Error>(line(&call, &event, include, &clock)));
        let mut answer = Response::new(Body::from_stream(lines));
        answer.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        Ok(answer)
    }
}

/// A watch event as a line of JSON.
fn line(call: &Call, event: &WatchEvent, include: IncludeObject, clock: &Clock) -> Bytes {
    let formed = match (&call.form, event.event_type) {
        (_, WatchEventType::Error) | (Form::Plain | Form::Discovery(_), _) => None,
        (Form::Table, _) => {
            let objects = std::slice::from_ref(&event.object);
            Some(table(&call.kind, objects, list_metadata(&event.object), include, clock.now()))
        }
        (Form::Partial, _) => Some(partial(&event.object)),
    };
    let object = formed.as_ref().unwrap_or(&event.object);
    Bytes::from(format!("{{\"type\":\"{}\",\"object\":{object}}}\n", event.event_type.as_str()))
}

fn list_metadata(object: &Value) -> Value {
    json!({"resourceVersion": object["metadata"]["resourceVersion"]})
}

fn list_object(kind: &Kind, metadata: Value, items: &[Arc<Value>]) -> Value {
    let items: Vec<Value> = items.iter().map(|object| object.as_ref().clone()).collect();
    json!({"kind": kind.list_kind, "apiVersion": kind.api_version(), "metadata": metadata, "items": items})
}

fn verb(method: &Method, has_name: bool, query: &Query) -> Option<&'static str> {
    Some(match (method, has_name) {
        (&Method::GET, _) if query.flag("watch") => "watch",
        (&Method::GET | &Method::HEAD, true) => "get",
        (&Method::GET | &Method::HEAD, false) => "list",
        (&Method::POST, false) => "create",
        (&Method::PUT, true) => "update",
        (&Method::PATCH, true) => "patch",
        (&Method::DELETE, true) => "delete",
        (&Method::DELETE, false) => "deletecollection",
        _ => return None,
    })
}

fn media_type(headers: &HeaderMap) -> String {
    let value = headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or("application/json");
    value.split(';').next().unwrap_or_default().trim().to_owned()
}

fn parse_object(media_type: &str, body: &[u8]) -> Result<Value, ApiError> {
    let unsupported = |what: &str| {
        ApiError::unsupported_media_type(format!(
            "the body of the request was in an unknown format - accepted media types include: application/json; is {what}"
        ))
    };
    let object: Value = match media_type {
        "application/json" => serde_json::from_slice(body)
            .map_err(|error| ApiError::bad_request(format!("error decoding the object: {error}")))?,
        "application/vnd.kubernetes.protobuf" => {
            protobuf::decode(body).ok_or_else(|| unsupported("protobuf of a kind that is not read here"))?
        }
        other => return Err(unsupported(other)),
    };
    if object.is_object() { Ok(object) } else { Err(ApiError::bad_request("the object is not a JSON object")) }
}

fn parse_number(query: &Query, name: &str) -> Result<usize, ApiError> {
    match query.text(name) {
        "" => Ok(0),
        text => text
            .parse()
            .map_err(|_| ApiError::bad_request(format!("{name}: Invalid value: {text:?}: must be a number from 0 on"))),
    }
}

/// The selector of the query; a name in the path of a watch selects too.
fn selector(call: &Call) -> Result<Selector, ApiError> {
    let mut fields = call.query.text("fieldSelector").to_owned();
    if let Some(name) = &call.path.name {
        fields = format!("{fields},metadata.name={name}");
    }
    Selector::parse(&call.kind, call.query.text("labelSelector"), &fields)
}

fn list_options(call: &Call) -> Result<ListOptions, ApiError> {
    let version_match = match call.query.text("resourceVersionMatch") {
        "" | "NotOlderThan" => VersionMatch::NotOlderThan,
        "Exact" => VersionMatch::Exact,
        other => {
            return Err(ApiError::bad_request(format!(
                "resourceVersionMatch: Unsupported value: {other:?}: supported values: \"Exact\", \"NotOlderThan\""
            )));
        }
    };
    Ok(ListOptions {
        selector: selector(call)?,
        limit: parse_number(&call.query, "limit")?,
        continue_token: call.query.text("continue").to_owned(),
        resource_version: call.query.text("resourceVersion").to_owned(),
        version_match,
    })
}

fn include_object(query: &Query) -> IncludeObject {
    match query.text("includeObject") {
        "None" => IncludeObject::Nothing,
        "Object" => IncludeObject::Object,
        _ => IncludeObject::Metadata,
    }
}

fn parse_dry_run(values: &[&str]) -> Result<bool, ApiError> {
    match values {
        [] | [""] => Ok(false),
        ["All"] => Ok(true),
        other => Err(ApiError::bad_request(format!("dryRun: Unsupported value: {other:?}: supported values: \"All\""))),
    }
}

fn write_options(call: &Call) -> Result<WriteOptions, ApiError> {
    let field_validation = match call.query.text("fieldValidation") {
        "" | "Warn" => FieldValidation::Warn,
        "Ignore" => FieldValidation::Ignore,
        "Strict" => FieldValidation::Strict,
        other => {
            return Err(ApiError::bad_request(format!(
                "fieldValidation: Unsupported value: {other:?}: supported values: \"Ignore\", \"Strict\", \"Warn\""
            )));
        }
    };
    Ok(WriteOptions { dry_run: parse_dry_run(&[call.query.text("dryRun")])?, field_validation })
}

/// The options of a deletion: in the body, or else in the query.
fn delete_options(call: &Call, body: &[u8]) -> Result<DeleteOptions, ApiError> {
    let options = if body.is_empty() { json!({}) } else { parse_object(&call.media_type, body)? };
    let text = |value: &Value| value.as_str().filter(|text| !text.is_empty()).map(str::to_owned);
    let dry_run =
        options["dryRun"].as_array().map(|values| values.iter().filter_map(Value::as_str).collect::<Vec<_>>());
    let policy = text(&options["propagationPolicy"]).unwrap_or_else(|| call.query.text("propagationPolicy").to_owned());
    let propagation = match policy.as_str() {
        "" => match options["orphanDependents"].as_bool() {
            None => None,
            Some(true) => Some(Propagation::Orphan),
            Some(false) => Some(Propagation::Background),
        },
        "Background" => Some(Propagation::Background),
        "Foreground" => Some(Propagation::Foreground),
        "Orphan" => Some(Propagation::Orphan),
        other => {
            return Err(ApiError::bad_request(format!(
                "propagationPolicy: Unsupported value: {other:?}: supported values: \"Background\", \"Foreground\", \"Orphan\""
            )));
        }
    };
    Ok(DeleteOptions {
        uid: text(&options["preconditions"]["uid"]),
        resource_version: text(&options["preconditions"]["resourceVersion"]),
        propagation,
        dry_run: parse_dry_run(&dry_run.unwrap_or_else(|| vec![call.query.text("dryRun")]))?,
    })
}
