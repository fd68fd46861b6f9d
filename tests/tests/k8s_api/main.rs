//! The definitions under `deploy/crds` on a real kube-apiserver, which also shows that the embedded API server
//! answers as the real one does: the same requests go to both, and status code, reason, warnings and stored objects
//! must be the same. Of a refused object the embedded one may name fewer fields, because the real one goes on with
//! rules on objects that it has already refused. Where they differ otherwise the tables say so.
#![allow(clippy::unwrap_used)]

mod exchange;
mod kinds;
mod volumes;

use addax_api::NAMESPACE;
use addax_apiserver::{Embedded, ServerConfig};
use e2e::kube::{RealApi, install_definitions, is_available};
use exchange::compare;
use kube::Client;

#[tokio::test(flavor = "multi_thread")]
async fn the_embedded_api_server_answers_as_the_real_one_does() {
    if !is_available() {
        return;
    }
    let real_api = RealApi::start().await.unwrap();
    let real = real_api.client().await.unwrap();
    install_definitions(&real).await.unwrap();
    let config = ServerConfig { crds: addax_api::crds(), ..ServerConfig::default() };
    let embedded_api = Embedded::start(&config).await.unwrap();
    let embedded = Client::new(embedded_api.service(), NAMESPACE);

    let mut problems = Vec::new();
    for steps in [
        volumes::creations(),
        volumes::names(),
        volumes::manifests(),
        volumes::changes(),
        volumes::records(),
        kinds::ours(),
        kinds::built_in(),
        kinds::reads(),
    ] {
        compare(steps, &real, &embedded, &mut problems).await;
    }
    embedded_api.shutdown().await;
    assert!(problems.is_empty(), "{} differences:\n{}", problems.len(), problems.join("\n"));
}
