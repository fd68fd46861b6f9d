//! The server as plain `kubectl` sees it. Without `kubectl` these tests say so and pass.
#![allow(clippy::unwrap_used)]

mod common;

use std::{
    path::Path,
    process::{Output, Stdio},
    time::Duration,
};

use addax_apiserver::{Server, ServerConfig, TlsConfig, clock::ManualClock};
use common::{config, gadget, gadgets, start};
use kube::api::{Patch, PatchParams, PostParams};
use serde_json::json;
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader},
    process::Command,
};

const MANIFEST: &str = "apiVersion: test.example/v1\nkind: Gadget\nmetadata:\n  name: a\nspec:\n  size: 4\n";

struct Kubectl {
    home: tempfile::TempDir,
    arguments: Vec<String>,
}

impl Kubectl {
    /// `None`, loudly, when `kubectl` is not installed.
    async fn new(server: &Server) -> Option<Self> {
        let url = format!("http://{}", server.address());
        Self::with_arguments(vec![format!("--server={url}")]).await
    }

    async fn with_arguments(arguments: Vec<String>) -> Option<Self> {
        if Command::new("kubectl").args(["version", "--client"]).output().await.is_err() {
            // Past the capture of the test harness, so that it is seen.
            let _ =
                std::io::Write::write_fmt(&mut std::io::stderr(), format_args!("SKIPPED: kubectl is not installed\n"));
            return None;
        }
        Some(Self { home: tempfile::tempdir().unwrap(), arguments })
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new("kubectl");
        command.args(&self.arguments).arg("--request-timeout=20s").args(arguments);
        command.env("HOME", self.home.path()).env("KUBECONFIG", self.home.path().join("none")).kill_on_drop(true);
        command
    }

    async fn output(&self, arguments: &[&str], input: &str) -> Output {
        let mut command = self.command(arguments);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut stdin = child.stdin.take().unwrap();
        // A kubectl that fails early does not read its input.
        stdin.write_all(input.as_bytes()).await.ok();
        drop(stdin);
        child.wait_with_output().await.unwrap()
    }

    /// What a command that must succeed prints.
    async fn run(&self, arguments: &[&str], input: &str) -> String {
        let output = self.output(arguments, input).await;
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "kubectl {arguments:?}: {error}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// What a command that must fail says.
    async fn refused(&self, arguments: &[&str], input: &str) -> String {
        let output = self.output(arguments, input).await;
        assert!(!output.status.success(), "kubectl {arguments:?} succeeded");
        String::from_utf8(output.stderr).unwrap()
    }
}

/// The words of each line.
fn words(text: &str) -> Vec<Vec<&str>> {
    text.lines().map(|line| line.split_whitespace().collect()).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn discovery_and_explanations() {
    let (server, _client) = start(config()).await;
    let Some(kubectl) = Kubectl::new(&server).await else { return };
    let resources = kubectl.run(&["api-resources"], "").await;
    assert!(words(&resources).contains(&vec!["gadgets", "gd", "test.example/v1", "true", "Gadget"]), "{resources}");
    let versions = kubectl.run(&["api-versions"], "").await;
    assert!(versions.contains("coordination.k8s.io/v1"), "{versions}");
    assert!(kubectl.run(&["version"], "").await.contains("Server Version"));
    let explained = kubectl.run(&["explain", "gadget.spec.mode"], "").await;
    assert!(explained.contains("mode <string>"), "{explained}");
    assert!(kubectl.run(&["get", "crd"], "").await.contains("gadgets.test.example"));
    assert_eq!(kubectl.run(&["get", "--raw", "/readyz"], "").await, "ok");
    server.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn objects_are_created_shown_changed_and_deleted() {
    let clock = ManualClock::at_second(1_800_000_000);
    let (server, client) = start(ServerConfig { clock: clock.clock(), ..config() }).await;
    let Some(kubectl) = Kubectl::new(&server).await else { return };
    assert_eq!(kubectl.run(&["create", "-f", "-"], MANIFEST).await, "gadget.test.example/a created\n");
    assert!(kubectl.refused(&["create", "-f", "-"], MANIFEST).await.contains("AlreadyExists"));
    let status = json!({"status": {"state": "up", "conditions": [{"type": "Ready", "status": "True"}]}});
    gadgets(&client).patch_status("a", &PatchParams::default(), &Patch::Merge(status)).await.unwrap();
    clock.advance_seconds(125);
    let table = kubectl.run(&["get", "gadgets"], "").await;
    assert_eq!(words(&table), [vec!["NAME", "SIZE", "STATE", "READY", "AGE"], vec!["a", "4", "up", "True", "2m5s"]]);
    assert!(kubectl.run(&["get", "gd", "-o", "wide"], "").await.contains("safe"));
    assert_eq!(words(&kubectl.run(&["get", "all", "-A", "--no-headers"], "").await)[0][..2], ["default", "a"]);
    let yaml = kubectl.run(&["get", "gadget", "a", "-o", "yaml"], "").await;
    assert!(yaml.contains("mode: safe") && yaml.contains("generation: 1"), "{yaml}");

    kubectl.run(&["patch", "gadget", "a", "--type=merge", "-p", r#"{"spec": {"size": 6}}"#], "").await;
    let operations = r#"[{"op": "replace", "path": "/spec/size", "value": 8}]"#;
    kubectl.run(&["patch", "gadget", "a", "--type=json", "-p", operations], "").await;
    assert_eq!(kubectl.run(&["get", "gadget", "a", "-o", "jsonpath={.spec.size}"], "").await, "8");
    kubectl.run(&["label", "gadget", "a", "k=v"], "").await;
    assert!(kubectl.run(&["get", "gadgets", "-l", "k=v", "-o", "name"], "").await.contains("gadget.test.example/a"));
    let described = kubectl.run(&["describe", "gadget", "a"], "").await;
    assert!(described.contains("Mode:") && described.contains("Events:"), "{described}");

    let replaced = kubectl.run(&["replace", "-f", "-"], &MANIFEST.replace("4", "10")).await;
    assert_eq!(replaced, "gadget.test.example/a replaced\n");
    assert_eq!(kubectl.run(&["delete", "gadget", "a"], "").await, "gadget.test.example \"a\" deleted\n");
    assert!(kubectl.refused(&["get", "gadget", "a"], "").await.contains("NotFound"));
    server.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn manifests_are_applied_and_bad_ones_refused() {
    let (server, _client) = start(config()).await;
    let Some(kubectl) = Kubectl::new(&server).await else { return };
    assert_eq!(kubectl.run(&["apply", "-f", "-"], MANIFEST).await, "gadget.test.example/a created\n");
    assert_eq!(kubectl.run(&["apply", "-f", "-"], MANIFEST).await, "gadget.test.example/a unchanged\n");
    assert_eq!(
        kubectl.run(&["apply", "-f", "-"], &MANIFEST.replace("4", "6")).await,
        "gadget.test.example/a configured\n"
    );
    assert_eq!(kubectl.run(&["get", "gadget", "a", "-o", "jsonpath={.spec.size}"], "").await, "6");
    let typo = kubectl.refused(&["apply", "-f", "-"], &MANIFEST.replace("size", "sise")).await;
    assert!(typo.contains(r#"unknown field "spec.sise""#), "{typo}");
    let odd = kubectl.refused(&["apply", "-f", "-"], &MANIFEST.replace("4", "7")).await;
    assert!(odd.contains("multiple of 2"), "{odd}");
    let shrunk = kubectl.refused(&["apply", "-f", "-"], &MANIFEST.replace("4", "2")).await;
    assert!(shrunk.contains("size cannot shrink"), "{shrunk}");
    let warned = kubectl
        .output(&["apply", "--validate=warn", "-f", "-"], &MANIFEST.replace("size: 4", "size: 6\n  sise: 1"))
        .await;
    assert!(String::from_utf8_lossy(&warned.stderr).contains("Warning: unknown field"), "{warned:?}");
    let server_side = kubectl.refused(&["apply", "--server-side", "-f", "-"], MANIFEST).await;
    assert!(server_side.contains("server-side apply is not served"), "{server_side}");
    assert!(
        kubectl.run(&["apply", "--dry-run=server", "-f", "-"], &MANIFEST.replace("4", "8")).await.contains("dry run")
    );

    kubectl.run(&["create", "configmap", "c", "--from-literal=k=v"], "").await;
    assert_eq!(words(&kubectl.run(&["get", "configmaps"], "").await)[1][..2], ["c", "1"]);
    let map = "apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: m\ndata:\n  a: b\n";
    kubectl.run(&["apply", "-f", "-"], map).await;
    kubectl.run(&["apply", "-f", "-"], &map.replace("b\n", "c\n")).await;
    assert_eq!(kubectl.run(&["get", "configmap", "m", "-o", "jsonpath={.data.a}"], "").await, "c");
    kubectl.run(&["create", "secret", "generic", "s", "--from-literal=k=v"], "").await;
    assert_eq!(kubectl.run(&["get", "secret", "s", "-o", "jsonpath={.data.k}"], "").await, "dg==");
    kubectl.run(&["create", "namespace", "work"], "").await;
    kubectl.run(&["delete", "namespace", "work"], "").await;
    assert!(!kubectl.run(&["get", "namespaces"], "").await.contains("work"));
    server.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn changes_are_watched() {
    let (server, client) = start(config()).await;
    let Some(kubectl) = Kubectl::new(&server).await else { return };
    let api = gadgets(&client);
    api.create(&PostParams::default(), &gadget("a", json!({"size": 2}))).await.unwrap();
    let mut child = kubectl.command(&["get", "gadgets", "-w", "--no-headers"]).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let read = async {
        let first = lines.next_line().await.unwrap().unwrap();
        api.patch("a", &PatchParams::default(), &Patch::Merge(json!({"spec": {"size": 6}}))).await.unwrap();
        (first, lines.next_line().await.unwrap().unwrap())
    };
    let (first, second) = tokio::time::timeout(Duration::from_secs(20), read).await.unwrap();
    assert_eq!((words(&first)[0][..2].to_vec(), words(&second)[0][..2].to_vec()), (vec!["a", "2"], vec!["a", "6"]));
    child.kill().await.unwrap();
    server.shutdown().await;
}

/// A certificate authority, a server certificate and a client certificate, in files.
fn write_certificates(directory: &Path) -> TlsConfig {
    use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
    let key = || KeyPair::generate().unwrap();
    let mut authority = CertificateParams::new(Vec::new()).unwrap();
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority = CertifiedIssuer::self_signed(authority, key()).unwrap();
    let (server_key, client_key) = (key(), key());
    let server =
        CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap().signed_by(&server_key, &authority).unwrap();
    let client = CertificateParams::new(vec!["client".to_owned()]).unwrap().signed_by(&client_key, &authority).unwrap();
    for (name, pem) in [("ca", authority.pem()), ("cert", client.pem()), ("key", client_key.serialize_pem())] {
        std::fs::write(directory.join(name), pem).unwrap();
    }
    TlsConfig {
        ca_pem: authority.pem(),
        cert_pem: server.pem(),
        key_pem: server_key.serialize_pem(),
        require_client_certificate: true,
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tls_lets_in_only_clients_with_a_certificate() {
    let directory = tempfile::tempdir().unwrap();
    let tls = write_certificates(directory.path());
    let server = Server::start(ServerConfig { tls: Some(tls), ..config() }).await.unwrap();
    let file = |name: &str| directory.path().join(name).display().to_string();
    let anonymous =
        vec![format!("--server=https://{}", server.address()), format!("--certificate-authority={}", file("ca"))];
    let known = [format!("--client-certificate={}", file("cert")), format!("--client-key={}", file("key"))];
    let Some(kubectl) = Kubectl::with_arguments([anonymous.clone(), known.to_vec()].concat()).await else { return };
    assert!(kubectl.run(&["get", "namespaces"], "").await.contains("addax-system"));
    let Some(stranger) = Kubectl::with_arguments(anonymous).await else { return };
    stranger.refused(&["get", "namespaces"], "").await;
    server.shutdown().await;
}
