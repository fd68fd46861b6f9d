//! One request to two API servers, and what each made of it.

use std::collections::BTreeSet;
use std::fmt;

use anyhow::Result;
use http::Request;
use kube::Client;
use kube::client::Body;
use serde_json::{Value, json};

pub const JSON: &str = "application/json";
pub const MERGE: &str = "application/merge-patch+json";
pub const JSON_PATCH: &str = "application/json-patch+json";
/// How `kubectl get` asks for lists.
pub const TABLE: &str = "application/json;as=Table;v=v1;g=meta.k8s.io";

/// What a server made of a request.
#[derive(Clone, Default)]
struct Answer {
    code: u16,
    reason: String,
    message: String,
    /// The fields that are refused.
    fields: BTreeSet<String>,
    warnings: BTreeSet<String>,
    /// The object, without what differs from server to server.
    object: Value,
}

impl Answer {
    fn accepted(&self) -> bool {
        self.code < 300
    }

    /// Whether the answer gives what controllers and people go by as the real server's does; the wording of refusals
    /// is not part of it.
    fn is_like(&self, real: &Self) -> bool {
        (self.code, &self.reason, &self.warnings, &self.object)
            == (real.code, &real.reason, &real.warnings, &real.object)
            && self.fields.is_subset(&real.fields)
            && self.fields.is_empty() == real.fields.is_empty()
    }
}

impl fmt::Display for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { code, reason, message, fields, warnings, object } = self;
        write!(f, "{code} {reason} {message:?} fields {fields:?} warnings {warnings:?} {object}")
    }
}

#[derive(Clone)]
pub struct Call {
    pub method: &'static str,
    pub path: String,
    pub content_type: &'static str,
    pub accept: &'static str,
    pub body: Vec<u8>,
}

impl Call {
    pub fn new(method: &'static str, path: impl Into<String>, content_type: &'static str, body: &Value) -> Self {
        Self { method, path: path.into(), content_type, accept: JSON, body: body.to_string().into_bytes() }
    }

    pub fn get(path: impl Into<String>) -> Self {
        Self { body: Vec::new(), ..Self::new("GET", path, JSON, &json!({})) }
    }

    async fn send(&self, client: &Client) -> Result<Answer> {
        let request = Request::builder()
            .method(self.method)
            .uri(&self.path)
            .header("content-type", self.content_type)
            .header("accept", self.accept)
            .body(Body::from(self.body.clone()))?;
        let response = client.send(request).await?;
        let code = response.status().as_u16();
        let warnings = response.headers().get_all("warning").iter().map(|w| Ok(w.to_str()?.to_owned()));
        let warnings = warnings.collect::<Result<_>>()?;
        let body = response.into_body().collect_bytes().await?;
        match serde_json::from_slice(&body) {
            Ok(body) => Ok(answer(code, warnings, body)),
            // Plain text, as the real server answers for paths that it does not know.
            Err(_) => Ok(Answer { code, warnings, message: String::from_utf8(body.to_vec())?, ..Answer::default() }),
        }
    }
}

fn answer(code: u16, warnings: BTreeSet<String>, body: Value) -> Answer {
    let text = |key: &str| body[key].as_str().unwrap_or_default().to_owned();
    if body["kind"] == "Status" {
        let fields = refused_fields(&body["details"]["causes"]);
        return Answer {
            code,
            warnings,
            fields,
            reason: text("reason"),
            message: text("message"),
            object: Value::Null,
        };
    }
    let mut object = body;
    strip(&mut object);
    if let Some(items) = object.get_mut("items").and_then(Value::as_array_mut) {
        items.iter_mut().for_each(strip);
    }
    if object["kind"] == "Table" {
        strip_table(&mut object);
    }
    Answer { code, warnings, object, ..Answer::default() }
}

fn refused_fields(causes: &Value) -> BTreeSet<String> {
    let causes = causes.as_array().cloned().unwrap_or_default();
    let text = |cause: &Value, key: &str| cause[key].as_str().unwrap_or_default().to_owned();
    causes
        .iter()
        // The real server says so beside every refusal by a rule that came first.
        .filter(|cause| !text(cause, "message").contains("some validation rules were not checked"))
        .map(|cause| text(cause, "field"))
        // What it calls the whole object.
        .map(|field| if field == "<nil>" { String::new() } else { field })
        .collect()
}

/// Takes away the wording of the columns, and the ages.
fn strip_table(table: &mut Value) {
    let mut ages = Vec::new();
    for (i, column) in table["columnDefinitions"].as_array_mut().into_iter().flatten().enumerate() {
        column["description"] = Value::Null;
        // The embedded server says `string` of dates, which is what the cells are.
        if column["type"] == "date" {
            column["type"] = json!("string");
        }
        if column["name"] == "Age" {
            ages.push(i);
        }
    }
    for row in table["rows"].as_array_mut().into_iter().flatten() {
        strip(&mut row["object"]);
        for &age in &ages {
            row["cells"][age] = json!(row["cells"][age].is_string());
        }
    }
}

/// Takes away what differs from server to server.
fn strip(object: &mut Value) {
    if let Some(metadata) = object.get_mut("metadata").and_then(Value::as_object_mut) {
        metadata.retain(|key, _| {
            !matches!(key.as_str(), "uid" | "resourceVersion" | "creationTimestamp" | "managedFields" | "continue")
        });
    }
}

/// A request, and whether it must be let through.
pub struct Step {
    what: String,
    call: Call,
    accepted: bool,
    /// In what the embedded server is known to differ.
    differs: Option<&'static str>,
}

impl Step {
    pub fn good(what: impl Into<String>, call: Call) -> Self {
        Self { what: what.into(), call, accepted: true, differs: None }
    }

    pub fn bad(what: impl Into<String>, call: Call) -> Self {
        Self { what: what.into(), call, accepted: false, differs: None }
    }

    pub fn differs(self, how: &'static str) -> Self {
        Self { differs: Some(how), ..self }
    }
}

pub async fn compare(steps: Vec<Step>, real: &Client, embedded: &Client, problems: &mut Vec<String>) {
    for step in steps {
        let ours = step.call.send(embedded).await.unwrap();
        let theirs = step.call.send(real).await.unwrap();
        if theirs.accepted() != step.accepted {
            problems.push(format!("{}: the real server should have said {}: {theirs}", step.what, step.accepted));
        }
        match step.differs {
            Some(how) if ours.is_like(&theirs) => eprintln!("{}: differs no longer ({how})", step.what),
            Some(_) => {}
            None if ours.is_like(&theirs) => {}
            None => problems.push(format!("{}:\n  real {theirs}\n  embedded {ours}", step.what)),
        }
    }
}
