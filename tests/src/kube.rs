//! A real kube-apiserver on a real etcd, to hold the embedded API server and the controllers against.
//!
//! The programs are built from their Go modules (`realapi/` beside this crate's sources) on first use and kept in the
//! cache folder under a name made from everything that the build reads. Both listen on loopback only, keep their
//! data in a folder that goes with the handle, and are killed when it is dropped. Whoever holds the token in the
//! kubeconfig may do everything.

use std::fs::{self, File};
use std::io::Write;
use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use kube::client::Body;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tempfile::TempDir;
use tokio::time::{Instant, sleep, timeout};

use crate::guest::image::cached;

/// The Go module that builds the two programs.
const MODULE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/realapi");
/// Its files, in the order in which they are hashed.
const MODULE_FILES: &[&str] = &["go.mod", "go.sum", "etcd/main.go", "kube-apiserver/main.go"];
/// Arguments of `go build`. They are hashed too.
const BUILD_ARGS: &[&str] = &["build", "-p", "2", "-mod=readonly", "-buildvcs=false", "-trimpath"];
/// The module whose version the API server is to tell.
const KUBERNETES: &str = "k8s.io/kubernetes";
/// Bounds the start, from the first process to the first `ok` of `/readyz`.
const START_TIMEOUT: Duration = Duration::from_secs(120);
/// Bounds one question for readiness.
const PROBE_TIMEOUT: Duration = Duration::from_secs(5);
/// How often ports are picked anew when another program takes one between the pick and the use.
const START_TRIES: u32 = 3;
/// Where the definitions are.
const DEFINITIONS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/crds");
const CRDS: &str = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions";
/// The namespace that they are used in.
const NAMESPACE: &str = "addax-system";
/// Bounds the wait for a new definition to be served.
const ESTABLISHED_TIMEOUT: Duration = Duration::from_secs(60);
/// The user of the kubeconfig; `system:masters` is let past every check.
const TOKEN: &str = "e2e";
/// Most that an error shows of each log, in bytes.
const LOG_TAIL: usize = 4000;

/// Whether a real API server can be had, which takes the Go toolchain. If not, says on stderr that a test is skipped,
/// also where the test harness captures what tests print.
pub fn is_available() -> bool {
    let found = Command::new("go").arg("version").output().is_ok_and(|o| o.status.success());
    if !found {
        let text = "SKIPPED: a test on a real kube-apiserver, because `go`, which builds it, is not installed";
        // Who has closed stderr wants to read nothing.
        let _ = writeln!(std::io::stderr(), "{text}");
    }
    found
}

/// The folder with `etcd` and `kube-apiserver`, built if they are not there. The first build takes minutes.
///
/// # Errors
/// When Go is not installed or the build fails; with what it printed.
pub fn programs() -> Result<PathBuf> {
    let mut hash = Sha256::new();
    for file in MODULE_FILES {
        let text = fs::read(Path::new(MODULE).join(file)).with_context(|| format!("cannot read realapi/{file}"))?;
        hash.update((text.len() as u64).to_le_bytes());
        hash.update(text);
    }
    let linker_args = linker_args()?;
    hash.update(BUILD_ARGS.join("\n"));
    hash.update(&linker_args);
    let digest = hash.finalize();
    let key: String = digest.iter().take(8).map(|byte| format!("{byte:02x}")).collect();
    cached(&format!("realapi-{key}"), |folder| {
        fs::create_dir_all(folder)?;
        // Nice, because the build keeps every core busy for minutes.
        let output = Command::new("nice")
            .arg("go")
            .args(BUILD_ARGS)
            .args(["-ldflags", &linker_args, "-o"])
            .arg(folder)
            .args(["./etcd", "./kube-apiserver"])
            .current_dir(MODULE)
            .env("CGO_ENABLED", "0")
            .env_remove("GOFLAGS")
            .stdin(Stdio::null())
            .output()
            .context("cannot start go")?;
        ensure!(output.status.success(), "go build failed:\n{}", String::from_utf8_lossy(&output.stderr));
        Ok(())
    })
}

/// Arguments of the linker: no symbols, and the version that `kubectl` wants to know, which a build from the module
/// does not set by itself.
fn linker_args() -> Result<String> {
    let module = fs::read_to_string(Path::new(MODULE).join("go.mod"))?;
    let words = module.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let version = words.filter(|words| words.first() == Some(&KUBERNETES)).find_map(|words| words.get(1).copied());
    let version = version.with_context(|| format!("realapi/go.mod does not require {KUBERNETES}"))?;
    let mut parts = version.trim_start_matches('v').split('.');
    let (Some(major), Some(minor)) = (parts.next(), parts.next()) else {
        bail!("realapi/go.mod requires {KUBERNETES} {version}, which is no version of it");
    };
    let set = "-X k8s.io/component-base/version.git";
    Ok(format!("-s -w {set}Version={version} {set}Major={major} {set}Minor={minor}"))
}

/// A running kube-apiserver with its etcd.
#[derive(Debug)]
pub struct RealApi {
    // Processes come first: they end before their folder goes.
    apiserver: Process,
    etcd: Process,
    folder: TempDir,
    server: String,
}

impl RealApi {
    /// Starts both programs and waits until the API server says that it is ready.
    ///
    /// # Errors
    /// When the programs cannot be built, or do not come up in time; with their logs.
    pub async fn start() -> Result<Self> {
        let programs = tokio::task::spawn_blocking(programs).await.context("the build was cut short")??;
        let mut tries = 1;
        loop {
            let mut api = Self::spawn(&programs)?;
            match api.wait_until_ready().await {
                Ok(()) => return Ok(api),
                // A program that ended may have lost its port to another one.
                Err(_) if tries < START_TRIES && !api.runs() => tries += 1,
                Err(error) => return Err(error),
            }
        }
    }

    fn spawn(programs: &Path) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let [client, peer, secure] = free_ports()?;
        let etcd = spawn_etcd(&programs.join("etcd"), folder.path(), client, peer)?;
        let apiserver = spawn_apiserver(&programs.join("kube-apiserver"), folder.path(), client, secure)?;
        let api = Self { apiserver, etcd, folder, server: format!("https://127.0.0.1:{secure}") };
        fs::write(api.kubeconfig(), api.kubeconfig_text())?;
        Ok(api)
    }

    async fn wait_until_ready(&mut self) -> Result<()> {
        let deadline = Instant::now() + START_TIMEOUT;
        loop {
            let answer = timeout(PROBE_TIMEOUT, self.probe()).await.unwrap_or_else(|_| bail!("no answer in time"));
            let Err(error) = answer else { return Ok(()) };
            if !self.runs() || Instant::now() > deadline {
                bail!("the API server is not ready: {error:#}\n{}", self.log());
            }
            sleep(Duration::from_millis(100)).await;
        }
    }

    async fn probe(&self) -> Result<()> {
        let request = http::Request::get("/readyz").body(Vec::new())?;
        let text = self.client().await?.request_text(request).await?;
        ensure!(text == "ok", "it says {text:?}");
        Ok(())
    }

    /// The kubeconfig file, for `$KUBECONFIG` and `--kubeconfig`.
    pub fn kubeconfig(&self) -> PathBuf {
        self.folder.path().join("kubeconfig")
    }

    /// The URL that it serves.
    pub fn url(&self) -> &str {
        &self.server
    }

    /// A client of it, which tells of every refusal instead of trying again.
    ///
    /// # Errors
    /// When the server has not yet made its certificate.
    pub async fn client(&self) -> Result<Client> {
        let kubeconfig = Kubeconfig::read_from(self.kubeconfig())?;
        let mut config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?;
        config.default_retry = false;
        Ok(Client::try_from(config)?)
    }

    /// The ends of what the programs have printed.
    pub fn log(&self) -> String {
        [&self.etcd, &self.apiserver].map(|p| format!("{}:\n{}", p.name, p.log_tail())).join("\n")
    }

    /// Whether both processes still run.
    pub fn runs(&mut self) -> bool {
        self.etcd.runs() && self.apiserver.runs()
    }

    /// JSON, which is YAML too.
    fn kubeconfig_text(&self) -> String {
        // The server makes this file at its start: its own certificate, then the authority that signed it.
        let authority = self.folder.path().join("certificates/apiserver.crt");
        json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "e2e",
            "clusters": [{"name": "e2e", "cluster": {"server": self.server, "certificate-authority": authority}}],
            "users": [{"name": "e2e", "user": {"token": TOKEN}}],
            "contexts": [{"name": "e2e", "context": {"cluster": "e2e", "user": "e2e"}}],
        })
        .to_string()
    }
}

/// Creates the namespace of Addax and every definition under `deploy/crds`, as the files have them, and waits until all
/// are served.
///
/// # Errors
/// When the server refuses or warns of a definition, or does not serve it in time.
pub async fn install_definitions(client: &Client) -> Result<()> {
    let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}});
    post(client, "/api/v1/namespaces", "application/json", namespace.to_string().into_bytes()).await?;
    let mut files: Vec<PathBuf> = fs::read_dir(DEFINITIONS)?.map(|entry| Ok(entry?.path())).collect::<Result<_>>()?;
    files.sort();
    let mut names = Vec::new();
    for file in files {
        let path = format!("{CRDS}?fieldValidation=Strict");
        let created = post(client, &path, "application/yaml", fs::read(&file)?).await;
        let created = created.with_context(|| file.display().to_string())?;
        names.push(created["metadata"]["name"].as_str().context("a definition without a name")?.to_owned());
    }
    for name in names {
        wait_until_served(client, &name).await?;
    }
    Ok(())
}

async fn post(client: &Client, path: &str, content_type: &str, body: Vec<u8>) -> Result<Value> {
    let request = http::Request::post(path).header("content-type", content_type).body(Body::from(body))?;
    let response = client.send(request).await?;
    let status = response.status();
    let warnings = format!("{:?}", response.headers().get_all("warning").iter().collect::<Vec<_>>());
    let body = response.into_body().collect_bytes().await?;
    ensure!(status.is_success() && warnings == "[]", "{status} {warnings} {}", String::from_utf8_lossy(&body));
    Ok(serde_json::from_slice(&body)?)
}

async fn wait_until_served(client: &Client, definition: &str) -> Result<()> {
    let deadline = Instant::now() + ESTABLISHED_TIMEOUT;
    let get = |path: String| async move {
        let text = client.request_text(http::Request::get(path).body(Vec::new())?).await?;
        anyhow::Ok(serde_json::from_str::<Value>(&text)?)
    };
    loop {
        let found = get(format!("{CRDS}/{definition}")).await?;
        let conditions = found["status"]["conditions"].as_array().cloned().unwrap_or_default();
        let holds = |kind: &str| conditions.iter().any(|c| c["type"] == kind && c["status"] == "True");
        ensure!(!holds("NonStructuralSchema"), "{definition}: {conditions:?}");
        let plural = definition.split('.').next().unwrap_or_default();
        // The server starts to serve a kind a moment after it says that it does.
        let established = holds("Established") && holds("NamesAccepted");
        if established && get(format!("/apis/addax.io/v1alpha1/namespaces/{NAMESPACE}/{plural}")).await.is_ok() {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "{definition} is not served: {conditions:?}");
        sleep(Duration::from_millis(50)).await;
    }
}

fn spawn_etcd(program: &Path, folder: &Path, client: u16, peer: u16) -> Result<Process> {
    let client = format!("http://127.0.0.1:{client}");
    let peer = format!("http://127.0.0.1:{peer}");
    let mut command = Command::new(program);
    command
        .arg("--data-dir")
        .arg(folder.join("etcd"))
        .args(["--name", "e2e", "--listen-client-urls", &client, "--advertise-client-urls", &client])
        .args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer])
        // Nothing here is to outlive the machine.
        .args(["--initial-cluster", &format!("e2e={peer}"), "--unsafe-no-fsync", "--log-level", "warn"]);
    Process::spawn("etcd", command, folder)
}

fn spawn_apiserver(program: &Path, folder: &Path, etcd: u16, port: u16) -> Result<Process> {
    let tokens = folder.join("tokens.csv");
    fs::write(&tokens, format!("{TOKEN},e2e,e2e,system:masters\n"))?;
    let key = folder.join("service-account.key");
    make_key(&key)?;
    let mut command = Command::new(program);
    command
        .arg("--cert-dir")
        .arg(folder.join("certificates"))
        .arg("--token-auth-file")
        .arg(&tokens)
        .arg("--service-account-key-file")
        .arg(&key)
        .arg("--service-account-signing-key-file")
        .arg(&key)
        .arg(format!("--etcd-servers=http://127.0.0.1:{etcd}"))
        .arg(format!("--secure-port={port}"))
        .args([
            "--service-account-issuer=https://kubernetes.default.svc",
            "--authorization-mode=AlwaysAllow",
            "--bind-address=127.0.0.1",
            "--advertise-address=127.0.0.1",
            "--endpoint-reconciler-type=none",
            "--service-cluster-ip-range=10.0.0.0/24",
            // No controller makes service accounts here, and the controllers of Addax come as they will.
            "--disable-admission-plugins=ServiceAccount",
            "--enable-priority-and-fairness=false",
        ]);
    Process::spawn("kube-apiserver", command, folder)
}

/// Makes the key that signs service account tokens. Nobody asks for one, but the server insists.
fn make_key(path: &Path) -> Result<()> {
    let output = Command::new("openssl")
        // `genpkey` would write PKCS #8, in which the server finds no public key.
        .args(["ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out"])
        .arg(path)
        .stdin(Stdio::null())
        .output()
        .context("openssl is not installed; run tests/setup.sh")?;
    ensure!(output.status.success(), "openssl: {}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}

/// Different TCP ports of loopback that nobody listens on now.
fn free_ports<const N: usize>() -> Result<[u16; N]> {
    let mut ports = [0; N];
    let mut held = Vec::with_capacity(N);
    for port in &mut ports {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        *port = listener.local_addr()?.port();
        held.push(listener);
    }
    Ok(ports)
}

/// A child process with its log; killed when dropped.
#[derive(Debug)]
struct Process {
    name: &'static str,
    child: Child,
    log: PathBuf,
}

impl Process {
    fn spawn(name: &'static str, mut command: Command, folder: &Path) -> Result<Self> {
        let log = folder.join(format!("{name}.log"));
        let file = File::create(&log)?;
        let child = command
            .current_dir(folder)
            .stdin(Stdio::null())
            .stdout(file.try_clone()?)
            .stderr(file)
            .spawn()
            .with_context(|| format!("cannot start {name}"))?;
        Ok(Self { name, child, log })
    }

    fn runs(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    fn log_tail(&self) -> String {
        let log = fs::read(&self.log).unwrap_or_default();
        String::from_utf8_lossy(&log[log.len().saturating_sub(LOG_TAIL)..]).into_owned()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Both fail only when it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
