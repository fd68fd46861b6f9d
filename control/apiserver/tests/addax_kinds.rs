//! The kinds of Addax themselves: that the server can serve them as they are defined.
#![allow(clippy::unwrap_used)]

mod common;

use addax_apiserver::ServerConfig;
use common::start;
use kube::{
    Api,
    api::{ApiResource, DynamicObject, GroupVersionKind, ListParams, Patch, PatchParams, PostParams},
};
use serde_json::json;

#[tokio::test]
async fn every_kind_is_served() {
    let crds = addax_api::crds();
    let (server, client) = start(ServerConfig { crds: crds.clone(), ..ServerConfig::default() }).await;
    for crd in crds {
        let version = &crd.spec.versions[0].name;
        let kind = GroupVersionKind::gvk(&crd.spec.group, version, &crd.spec.names.kind);
        let resource = ApiResource::from_gvk_with_plural(&kind, &crd.spec.names.plural);
        let api: Api<DynamicObject> = Api::all_with(client.clone(), &resource);
        assert!(api.list(&ListParams::default()).await.unwrap().items.is_empty());
    }
    server.shutdown().await;
}

#[tokio::test]
async fn a_volume_is_defaulted_checked_and_grows() {
    let (server, client) = start(ServerConfig { crds: addax_api::crds(), ..ServerConfig::default() }).await;
    let resource =
        ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk("addax.io", "v1alpha1", "Volume"), "volumes");
    let api: Api<DynamicObject> = Api::namespaced_with(client.clone(), "addax-system", &resource);
    let volume = |name: &str, size: i64| DynamicObject::new(name, &resource).data(json!({"spec": {"size": size}}));
    let created = api.create(&PostParams::default(), &volume("v", 1 << 30)).await.unwrap();
    assert_eq!(created.data["spec"]["numberOfReplicas"], 3);
    for (name, size) in [("odd", (1 << 30) + 1), ("small", 512), (&*"long".repeat(20), 1 << 30)] {
        match api.create(&PostParams::default(), &volume(name, size)).await {
            Err(kube::Error::Api(status)) => assert_eq!(status.code, 422, "{name}"),
            other => panic!("{name}: {other:?}"),
        }
    }
    let resize = |size: i64| {
        let api = api.clone();
        async move { api.patch("v", &PatchParams::default(), &Patch::Merge(json!({"spec": {"size": size}}))).await }
    };
    resize(2 << 30).await.unwrap();
    assert!(resize(1 << 30).await.unwrap_err().to_string().contains("cannot shrink"));
    server.shutdown().await;
}
