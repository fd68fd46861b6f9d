//! A made-up kind, and a server of it, for the tests of the API server.
#![allow(dead_code)]

use addax_apiserver::{Server, ServerConfig};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::{
    Api, Client, Config,
    api::{ApiResource, DynamicObject, GroupVersionKind},
};
use serde_json::{Value, json};

/// A kind with everything that the server has to deal with.
pub fn gadget_crd() -> CustomResourceDefinition {
    let schema = json!({"type": "object", "required": ["spec"], "properties": {
        "spec": {
            "type": "object", "required": ["size"],
            "x-kubernetes-validations": [
                {"rule": "!has(self.limit) || self.size <= self.limit", "message": "size cannot be above limit"},
            ],
            "properties": {
                "size": {
                    "type": "integer", "minimum": 1, "multipleOf": 2,
                    "x-kubernetes-validations": [{"rule": "self >= oldSelf", "message": "size cannot shrink"}],
                },
                "limit": {"type": "integer"},
                "mode": {"type": "string", "enum": ["fast", "safe"], "default": "safe"},
                "tags": {"type": "array", "x-kubernetes-list-type": "set", "maxItems": 3, "items": {"type": "string"}},
                "labels": {"type": "object", "additionalProperties": {"type": "string"}},
            },
        },
        "status": {"type": "object", "properties": {
            "state": {"type": "string"},
            "conditions": {"type": "array", "items": {"type": "object", "properties": {
                "type": {"type": "string"}, "status": {"type": "string"}}}},
        }},
    }});
    serde_json::from_value(json!({
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": "gadgets.test.example"},
        "spec": {
            "group": "test.example", "scope": "Namespaced",
            "names": {
                "kind": "Gadget", "plural": "gadgets", "singular": "gadget", "shortNames": ["gd"], "categories": ["all"],
            },
            "versions": [{
                "name": "v1", "served": true, "storage": true, "schema": {"openAPIV3Schema": schema},
                "subresources": {"status": {}},
                "selectableFields": [{"jsonPath": ".spec.mode"}],
                "additionalPrinterColumns": [
                    {"name": "Size", "type": "integer", "jsonPath": ".spec.size"},
                    {"name": "State", "type": "string", "jsonPath": ".status.state"},
                    {"name": "Ready", "type": "string", "jsonPath": ".status.conditions[?(@.type==\"Ready\")].status"},
                    {"name": "Mode", "type": "string", "jsonPath": ".spec.mode", "priority": 1},
                    {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"},
                ],
            }],
        },
    }))
    .expect("a CRD")
}

/// A configuration with the gadget kind, in memory.
pub fn config() -> ServerConfig {
    ServerConfig { crds: vec![gadget_crd()], ..ServerConfig::default() }
}

/// A running server and a client of it over HTTP.
pub async fn start(config: ServerConfig) -> (Server, Client) {
    let server = Server::start(config).await.expect("the server starts");
    let client = client(&server);
    (server, client)
}

/// A client over HTTP.
pub fn client(server: &Server) -> Client {
    let url = format!("http://{}", server.address()).parse().expect("a URL");
    // Tests want to see refusals, not have them tried again.
    let mut config = Config::new(url);
    config.default_retry = false;
    Client::try_from(config).expect("a client")
}

pub fn gadgets(client: &Client) -> Api<DynamicObject> {
    gadgets_in(client, "default")
}

pub fn gadgets_in(client: &Client, namespace: &str) -> Api<DynamicObject> {
    Api::namespaced_with(client.clone(), namespace, &resource())
}

pub fn resource() -> ApiResource {
    ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk("test.example", "v1", "Gadget"), "gadgets")
}

/// A gadget, to be created.
pub fn gadget(name: &str, spec: Value) -> DynamicObject {
    DynamicObject::new(name, &resource()).data(json!({"spec": spec}))
}
