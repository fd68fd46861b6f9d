//! Objects that the API refuses, sent raw with strict field validation and by `kubectl`.

use std::path::Path;

use e2e::kubectl::Kubectl;
use kube::client::Body;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use serde_json::{Value, json};

/// Where all objects are.
pub const ROOT: &str = "/apis/addax.io/v1alpha1/namespaces/addax-system";

/// The API by plain requests.
pub struct Api {
    runtime: tokio::runtime::Runtime,
    client: Client,
}

impl Api {
    pub fn new(kubeconfig: &Path) -> anyhow::Result<Self> {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
        let kubeconfig = Kubeconfig::read_from(kubeconfig)?;
        let client = runtime.block_on(async {
            let options = KubeConfigOptions::default();
            let mut config = Config::from_custom_kubeconfig(kubeconfig, &options).await?;
            config.default_retry = false;
            anyhow::Ok(Client::try_from(config)?)
        })?;
        Ok(Self { runtime, client })
    }

    /// Sends a request; status and body of the answer.
    pub fn send(&self, method: &str, path: &str, content_type: &str, body: &str) -> (u16, String) {
        let request = http::Request::builder().method(method).uri(path).header("content-type", content_type);
        let request = request.body(Body::from(body.as_bytes().to_vec())).unwrap();
        self.runtime.block_on(async {
            let response = self.client.send(request).await.unwrap();
            let status = response.status().as_u16();
            let body = response.into_body().collect_bytes().await.unwrap();
            (status, String::from_utf8_lossy(&body).into_owned())
        })
    }

    pub fn get(&self, path: &str) -> Value {
        self.accepted("GET", path, "application/json", "")
    }

    pub fn create(&self, path: &str, object: &Value) {
        self.accepted("POST", path, "application/json", &object.to_string());
    }

    pub fn patch(&self, path: &str, patch: &Value) {
        self.accepted("PATCH", path, "application/merge-patch+json", &patch.to_string());
    }

    pub fn delete(&self, path: &str) {
        self.accepted("DELETE", path, "application/json", "");
    }

    fn accepted(&self, method: &str, path: &str, content_type: &str, body: &str) -> Value {
        let (status, text) = self.send(method, path, content_type, body);
        assert!((200..300).contains(&status), "{method} {path}: {status} {text}");
        serde_json::from_str(&text).unwrap()
    }

    /// The message with which a request is refused.
    fn refused(&self, method: &str, path: &str, content_type: &str, body: &str) -> String {
        let (status, text) = self.send(method, path, content_type, body);
        assert!((400..500).contains(&status), "{method} {path} {body}: {status} {text}");
        let answer: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(answer["kind"], "Status", "{text}");
        answer["message"].as_str().unwrap().to_owned()
    }
}

/// A Volume's manifest.
pub fn volume(name: &str, spec: &Value) -> Value {
    object("Volume", name, spec)
}

fn object(kind: &str, name: &str, spec: &Value) -> Value {
    json!({ "apiVersion": "addax.io/v1alpha1", "kind": kind, "metadata": { "name": name }, "spec": spec })
}

/// Manifests, each with words of the message that refuses it.
fn manifests() -> Vec<(Value, &'static str)> {
    const MIB: i64 = 1 << 20;
    let with = |name: &str, value: Value| {
        let mut spec = json!({ "size": MIB });
        spec[name] = value;
        volume("x", &spec)
    };
    let mut unknown = volume("x", &json!({ "size": MIB }));
    unknown["speck"] = json!({});
    let ticket = |ticket: Value| object("VolumeAttachment", "x", &json!({ "volume": "x", "tickets": { "t": ticket } }));
    vec![
        (with("size", json!(0)), "spec.size in body should be greater than or equal to 1048576"),
        (with("size", json!(MIB + 1)), "size must be a multiple of 1048576 bytes (1 MiB)"),
        (with("size", json!(-MIB)), "spec.size in body should be greater than or equal to 1048576"),
        (with("size", json!(65_i64 << 40)), "spec.size in body should be less than or equal to"),
        (with("size", json!("1GiB")), "spec.size in body must be of type integer"),
        (with("size", json!(1_048_576.5)), "spec.size in body must be of type integer"),
        (volume("x", &json!({})), "spec.size: Required value"),
        (with("numberOfReplicas", json!(0)), "numberOfReplicas in body should be greater than or equal to 1"),
        (with("numberOfReplicas", json!(21)), "numberOfReplicas in body should be less than or equal to 20"),
        (with("minInSync", json!(4)), "minInSync must not be above numberOfReplicas"),
        (with("frontend", json!("nbd")), "supported values: \"nvmf\", \"none\""),
        (with("colour", json!("red")), "unknown field \"spec.colour\""),
        (unknown, "unknown field \"speck\""),
        (volume("data", &json!({ "size": MIB })), "volumes.addax.io \"data\" already exists"),
        (volume("UPPER", &json!({ "size": MIB })), "lowercase RFC 1123"),
        (volume("a.b", &json!({ "size": MIB })), "at most 52 lower-case letters, digits and '-'"),
        (volume(&"a".repeat(53), &json!({ "size": MIB })), "at most 52 lower-case letters, digits and '-'"),
        (object("VolumeAttachment", "x", &json!({ "volume": "y" })), "metadata.name must be the volume's name"),
        (ticket(json!({ "type": "api" })), "spec.tickets.t.nodeID: Required value"),
        (ticket(json!({ "type": "wish", "nodeID": "node-1" })), "spec.tickets.t.type: Unsupported value: \"wish\""),
    ]
}

/// Changes of what is there, each with words of the message that refuses it.
fn changes() -> Vec<(&'static str, Value, &'static str)> {
    vec![
        ("volumes/data", json!({ "spec": { "size": 1 << 20 } }), "size cannot shrink"),
        ("volumes/data", json!({ "spec": { "size": (1 << 26) + 1 } }), "size must be a multiple of 1048576"),
        (
            "volumes/data",
            json!({ "metadata": { "resourceVersion": "1" }, "spec": { "minInSync": 2 } }),
            "has been modified",
        ),
        ("volumes/data/status", json!({ "status": { "config": { "epoch": 0 } } }), "epoch never falls"),
        ("volumes/data/status", json!({ "status": { "config": { "inSync": [] } } }), "should have at least 1 items"),
        ("volumes/data/status", json!({ "status": { "config": null } }), "once there, cannot be taken away"),
        ("volumeattachments/data", json!({ "spec": { "volume": "other" } }), "volume cannot change"),
        ("volumes/none", json!({ "spec": { "minInSync": 2 } }), "volumes.addax.io \"none\" not found"),
    ]
}

/// Sends all of them.
pub fn refuse_all(api: &Api, kubectl: Option<&Kubectl>) {
    for (manifest, words) in manifests() {
        let plural = format!("{}s", manifest["kind"].as_str().unwrap().to_lowercase());
        let path = format!("{ROOT}/{plural}?fieldValidation=Strict");
        let message = api.refused("POST", &path, "application/json", &manifest.to_string());
        assert!(message.contains(words), "{manifest}: {message:?} has not the words {words:?}");
        let message = kubectl.map(|k| k.refused(&["create", "-f", "-"], &manifest.to_string()).unwrap());
        assert!(message.is_none_or(|text| text.contains(words)), "kubectl: {manifest} without the words {words:?}");
    }
    for (path, patch, words) in changes() {
        let path = format!("{ROOT}/{path}");
        let message = api.refused("PATCH", &path, "application/merge-patch+json", &patch.to_string());
        assert!(message.contains(words), "{path} {patch}: {message:?} has not the words {words:?}");
    }
    let volumes = format!("{ROOT}/volumes");
    for (content_type, body, words) in [
        ("application/json", "{\"apiVersion\": \"addax.io/v1alpha1\", \"kind\": \"Vol", "error decoding the object"),
        ("application/json", "", "error decoding the object"),
        ("application/json", "[]", "the object is not a JSON object"),
        ("application/yaml", "a: b: c", "in an unknown format - accepted media types include: application/json"),
        ("application/json", "{\"apiVersion\": \"addax.io/v9\", \"kind\": \"Volume\"}", "addax.io/v1alpha1"),
        ("text/plain", "a volume, please", "in an unknown format - accepted media types include: application/json"),
    ] {
        let message = api.refused("POST", &volumes, content_type, body);
        assert!(message.contains(words), "{body:?}: {message:?} has not the words {words:?}");
    }
}
