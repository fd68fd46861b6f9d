//! HTTP: requests in, answers out. [`ApiService`] is a `tower` service, so it serves sockets and in-process clients alike.
//!
//! *Invariants.* Every request but a watch ends within its deadline; a watch ends with its timeout, its reader or the
//! server. The number of requests in flight, of watches per client, and the size of bodies are bounded: over the bound
//! the answer is 429 or 413. Every refusal is a `Status` object.

mod negotiate;
mod protobuf;
mod resource;
mod route;

use std::{
    collections::HashMap,
    convert::Infallible,
    future::Future,
    pin::Pin,
    sync::{Arc, Mutex, PoisonError},
    task::{Context, Poll},
    time::Duration,
};

use axum::{
    body::{Body, Bytes},
    http::{
        HeaderValue, Method, Request, Response, StatusCode,
        header::{CONTENT_TYPE, RETRY_AFTER, WARNING},
        request::Parts,
    },
};
use negotiate::Form;
use route::Route;
use serde_json::Value;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tower::Service;

use crate::{discovery, error::ApiError, fault::FaultHook, openapi, rest::Api};

/// Bounds and intervals of the service.
#[derive(Debug, Clone)]
pub struct Limits {
    /// Longest time for a request that is not a watch.
    pub request_timeout: Duration,
    /// Duration of a watch that does not ask for one.
    pub watch_timeout: Duration,
    /// Time between bookmarks.
    pub bookmark_interval: Duration,
    /// Most requests at once, watches apart.
    pub requests_max: usize,
    /// Most watches of one client at once.
    pub watches_per_client_max: usize,
    /// Largest body.
    pub body_bytes_max: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            request_timeout: Duration::from_secs(60),
            watch_timeout: Duration::from_secs(45 * 60),
            bookmark_interval: Duration::from_secs(30),
            requests_max: 400,
            watches_per_client_max: 1024,
            body_bytes_max: 3 << 20,
        }
    }
}

/// Who sends a request; put into its extensions by whoever accepts connections.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct Client(pub String);

/// The service. Cloning is cheap.
#[derive(Debug, Clone)]
pub struct ApiService {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    api: Api,
    limits: Limits,
    faults: FaultHook,
    requests: Semaphore,
    watches: Mutex<HashMap<Client, usize>>,
    shutdown: CancellationToken,
}

impl ApiService {
    /// A service on an API.
    pub fn new(api: Api, limits: Limits, faults: FaultHook, shutdown: CancellationToken) -> Self {
        let requests = Semaphore::new(limits.requests_max);
        Self { inner: Arc::new(Inner { api, limits, faults, requests, watches: Mutex::default(), shutdown }) }
    }

    /// Serves one request.
    pub async fn handle(&self, request: Request<Body>) -> Response<Body> {
        let (parts, body) = request.into_parts();
        let result = self.route(parts, body).await;
        result.unwrap_or_else(|error| refusal(&error))
    }

    async fn route(&self, parts: Parts, body: Body) -> Result<Response<Body>, ApiError> {
        let route = Route::parse(parts.uri.path());
        let form = negotiate::form(&parts.headers);
        if let Route::Resource(path) = route {
            return self.resource(path, form?, parts, body).await;
        }
        if route != Route::Unknown && !matches!(parts.method, Method::GET | Method::HEAD) {
            return Err(ApiError::method_not_allowed(parts.method.as_str()));
        }
        let registry = &self.inner.api.registry;
        let found = match (route, form) {
            (Route::Health, _) => return Ok(plain("ok")),
            (Route::CoreVersions, Ok(Form::Discovery(version))) => return Ok(self.discovery(true, &version)),
            (Route::Groups, Ok(Form::Discovery(version))) => return Ok(self.discovery(false, &version)),
            (Route::CoreVersions, _) => Some(discovery::core_versions()),
            (Route::Groups, _) => Some(discovery::group_list(registry)),
            (Route::Group(group), _) => discovery::group(registry, &group),
            (Route::Resources(group, version), _) => discovery::resource_list(registry, &group, &version),
            (Route::Version, _) => Some(discovery::version()),
            (Route::OpenApiIndex, _) => Some(openapi::index(registry)),
            (Route::OpenApi(group, version), _) => openapi::document(registry, &group, &version),
            (Route::Resource(_) | Route::Unknown, _) => None,
        };
        found.map(|value| json_answer(StatusCode::OK, &value, &[])).ok_or_else(ApiError::no_such_path)
    }

    fn discovery(&self, is_core: bool, api_version: &str) -> Response<Body> {
        let list = discovery::aggregated(&self.inner.api.registry, is_core, api_version);
        let mut answer = json_answer(StatusCode::OK, &list, &[]);
        let version = api_version.rsplit('/').next().unwrap_or("v2");
        let media_type = format!("application/json;g=apidiscovery.k8s.io;v={version};as=APIGroupDiscoveryList");
        if let Ok(media_type) = HeaderValue::from_str(&media_type) {
            answer.headers_mut().insert(CONTENT_TYPE, media_type);
        }
        answer
    }

    /// Counts a watch of a client until the guard is dropped.
    fn count_watch(&self, client: Client) -> Result<WatchGuard, ApiError> {
        let mut watches = self.inner.watches.lock().unwrap_or_else(PoisonError::into_inner);
        let count = watches.entry(client.clone()).or_default();
        let max = self.inner.limits.watches_per_client_max;
        if *count >= max {
            return Err(ApiError::too_many_requests(format!("{max} watches of this client are open already"), 1));
        }
        *count += 1;
        Ok(WatchGuard { inner: self.inner.clone(), client })
    }
}

/// See [`ApiService::count_watch`].
struct WatchGuard {
    inner: Arc<Inner>,
    client: Client,
}

impl Drop for WatchGuard {
    fn drop(&mut self) {
        let mut watches = self.inner.watches.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = watches.get_mut(&self.client) {
            *count -= 1;
            if *count == 0 {
                watches.remove(&self.client);
            }
        }
    }
}

impl<B> Service<Request<B>> for ApiService
where
    B: axum::body::HttpBody<Data = Bytes> + Send + 'static,
    B::Error: Into<axum::BoxError>,
{
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let service = self.clone();
        Box::pin(async move { Ok(service.handle(request.map(Body::new)).await) })
    }
}

fn plain(text: &'static str) -> Response<Body> {
    let mut answer = Response::new(Body::from(text));
    answer.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"));
    answer
}

fn json_answer(code: StatusCode, value: &Value, warnings: &[String]) -> Response<Body> {
    let mut answer = Response::new(Body::from(value.to_string()));
    *answer.status_mut() = code;
    let headers = answer.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    for warning in warnings {
        let text = format!("299 - \"{}\"", warning.replace('\\', "\\\\").replace('"', "\\\""));
        if let Ok(value) = HeaderValue::from_str(&text) {
            headers.append(WARNING, value);
        }
    }
    answer
}

fn refusal(error: &ApiError) -> Response<Body> {
    let code = StatusCode::from_u16(error.code()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let mut answer = json_answer(code, &error.to_status(), &[]);
    if let Some(seconds) = error.retry_after_seconds() {
        answer.headers_mut().insert(RETRY_AFTER, HeaderValue::from(seconds));
    }
    answer
}
