//! Requests that no good client sends, and their refusals.
#![allow(clippy::unwrap_used)]

mod common;

use std::time::Duration;

use addax_apiserver::{
    Embedded, ServerConfig,
    fault::{Fault, FaultHook, Outcome},
    http::Limits,
};
use axum::{
    body::Body,
    http::{Request, Response, header::CONTENT_TYPE},
};
use common::config;
use serde_json::{Value, json};
use tower::ServiceExt;

const GADGETS: &str = "/apis/test.example/v1/namespaces/default/gadgets";

async fn send(embedded: &Embedded, method: &str, path: &str, body: impl Into<Body>) -> Response<Body> {
    let request = Request::builder().method(method).uri(path).header(CONTENT_TYPE, "application/json");
    embedded.service().oneshot(request.body(body.into()).unwrap()).await.unwrap()
}

/// The code, reason and message of a refusal, checked to be a `Status`.
async fn refusal(answer: Response<Body>) -> (u16, String, String) {
    let code = answer.status().as_u16();
    let body = axum::body::to_bytes(answer.into_body(), 1 << 20).await.unwrap();
    let status: Value = serde_json::from_slice(&body).unwrap();
    assert_eq!((status["kind"].as_str(), status["code"].as_u64()), (Some("Status"), Some(u64::from(code))));
    let text = |field: &str| status[field].as_str().unwrap().to_owned();
    (code, text("reason"), text("message"))
}

#[tokio::test]
async fn every_bad_request_gets_a_status() {
    let embedded = Embedded::start(&config()).await.unwrap();
    let gadget = |extra: Value| {
        let mut object =
            json!({"apiVersion": "test.example/v1", "kind": "Gadget", "metadata": {"name": "a"}, "spec": {"size": 2}});
        json_patch::merge(&mut object, &extra);
        object.to_string()
    };
    let version = gadget(json!({"metadata": {"resourceVersion": "7"}}));
    let (other_kind, other_namespace) =
        (gadget(json!({"kind": "Other"})), gadget(json!({"metadata": {"namespace": "x"}})));
    let one = &format!("{GADGETS}/a");
    let (bad_limit, bad_match) = (&format!("{GADGETS}?limit=x"), &format!("{GADGETS}?resourceVersionMatch=Never"));
    let (bad_label, bad_version) = (&format!("{GADGETS}?labelSelector=a%20b"), &format!("{GADGETS}?resourceVersion=x"));
    let (future, bad_continue) = (&format!("{GADGETS}?resourceVersion=99999"), &format!("{GADGETS}?continue=zz"));
    let (bad_dry_run, bad_scale) = (&format!("{GADGETS}?dryRun=Some"), &format!("{GADGETS}/a/scale"));
    for (method, path, body, code) in [
        ("GET", "/nothing", String::new(), 404),
        ("GET", "/apis/none.example/v1", String::new(), 404),
        ("GET", "/apis/test.example/v1/namespaces/default/widgets", String::new(), 404),
        ("GET", "/apis/test.example/v1/gadgets/a", String::new(), 404),
        ("GET", bad_scale, String::new(), 404),
        ("POST", "/version", String::new(), 405),
        ("POST", one, String::new(), 405),
        ("PUT", GADGETS, String::new(), 405),
        ("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", String::new(), 405),
        ("POST", GADGETS, "{".to_owned(), 400),
        ("POST", GADGETS, "[]".to_owned(), 400),
        ("POST", GADGETS, "{}".to_owned(), 400),
        ("POST", GADGETS, version, 400),
        ("POST", GADGETS, other_kind, 400),
        ("POST", GADGETS, other_namespace, 400),
        ("POST", bad_dry_run, gadget(json!({})), 400),
        ("POST", GADGETS, gadget(json!({"metadata": {"name": null}})), 422),
        ("POST", GADGETS, gadget(json!({"metadata": {"labels": {"-bad": "v"}}})), 422),
        ("POST", GADGETS, "x".repeat(4 << 20), 413),
        ("GET", bad_limit, String::new(), 400),
        ("GET", bad_match, String::new(), 400),
        ("GET", bad_label, String::new(), 400),
        ("GET", bad_version, String::new(), 400),
        ("GET", bad_continue, String::new(), 400),
        ("GET", future, String::new(), 504),
        ("PATCH", one, "{}".to_owned(), 415),
    ] {
        let (found, _, message) = refusal(send(&embedded, method, path, body).await).await;
        assert_eq!(found, code, "{method} {path}: {message}");
    }
    let large = json!({"spec": {"labels": {"k": "x".repeat(2 << 20)}}});
    assert_eq!(refusal(send(&embedded, "POST", GADGETS, gadget(large)).await).await.0, 413);
    embedded.shutdown().await;
}

#[tokio::test]
async fn requests_have_a_deadline_and_their_number_is_bounded() {
    let limits = Limits { request_timeout: Duration::from_millis(200), requests_max: 1, ..Limits::default() };
    let faults = FaultHook::new(|request| match request.name.as_str() {
        "slow" => Fault { delay: Duration::from_secs(3600), outcome: Outcome::Serve },
        _ => Fault::default(),
    });
    let embedded = Embedded::start(&ServerConfig { limits, faults, ..config() }).await.unwrap();
    let path = format!("{GADGETS}/slow");
    let slow = send(&embedded, "GET", &path, Body::empty());
    let other = async {
        // The slow request was polled first, so it holds the only place.
        refusal(send(&embedded, "GET", GADGETS, Body::empty()).await).await
    };
    let (slow, other) = tokio::join!(biased; slow, other);
    assert_eq!(other.0, 429);
    assert_eq!(refusal(slow).await.0, 504);
    assert_eq!(send(&embedded, "GET", GADGETS, Body::empty()).await.status().as_u16(), 200);
    embedded.shutdown().await;
}

#[tokio::test]
async fn unknown_fields_come_back_as_warnings() {
    let embedded = Embedded::start(&config()).await.unwrap();
    let object = json!({
        "apiVersion": "test.example/v1", "kind": "Gadget", "metadata": {"name": "a"}, "spec": {"size": 2, "sise": 1},
    });
    let answer = send(&embedded, "POST", GADGETS, object.to_string()).await;
    assert_eq!(answer.status().as_u16(), 201);
    assert_eq!(answer.headers()["warning"], r#"299 - "unknown field \"spec.sise\"""#);
    embedded.shutdown().await;
}
