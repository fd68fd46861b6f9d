//! A cluster in one process: the embedded API server, fake agents, and a manager per node that can be killed.
#![allow(clippy::unwrap_used, dead_code)]

pub mod agent;
pub mod pki;

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use addax_api::node::DiskSpec;
use addax_api::volume_attachment::{Ticket, TicketParameters, TicketType};
use addax_api::{NAMESPACE, Setting, SettingSpec, Volume, VolumeAttachment, VolumeSpec, crds};
use addax_apiserver::fault::{Fault, FaultHook, RequestInfo};
use addax_apiserver::{Server, ServerConfig};
use addax_manager::{Manager, ManagerConfig, ManagerError, TlsFiles};
use k8s_openapi::NamespaceResourceScope;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::{Api, Client, Config, Resource};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::json;
use tokio::runtime::Runtime;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use agent::FakeAgent;

/// Longest wait for what must happen in the end.
const WAIT: Duration = Duration::from_secs(60);

/// What a test decides about each request.
pub type Hook = Arc<dyn Fn(&RequestInfo) -> Fault + Send + Sync>;

pub struct Cluster {
    pub server: Server,
    pub client: Client,
    pub agents: BTreeMap<String, FakeAgent>,
    managers: BTreeMap<String, RunningManager>,
    pub tls: Option<TlsFiles>,
    /// Every write so far but those of leases.
    writes: Arc<Mutex<Vec<String>>>,
}

struct RunningManager {
    runtime: Option<Runtime>,
    shutdown: CancellationToken,
    run: JoinHandle<Result<(), ManagerError>>,
}

impl Drop for RunningManager {
    fn drop(&mut self) {
        self.shutdown.cancel();
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

impl Cluster {
    /// A cluster of three nodes whose managers run.
    pub async fn start() -> Self {
        Self::with_hook(Arc::new(|_| Fault::default())).await
    }

    pub async fn with_hook(hook: Hook) -> Self {
        let mut cluster = Self::without_managers(hook).await;
        for node in ["n1", "n2", "n3"] {
            cluster.start_manager(node);
        }
        cluster
    }

    /// A cluster of three nodes whose managers and agents speak mutual TLS.
    pub async fn with_tls() -> Self {
        let mut cluster = Self::prepare(Arc::new(|_| Fault::default()), Some(pki::certificates())).await;
        for node in ["n1", "n2", "n3"] {
            cluster.start_manager(node);
        }
        cluster
    }

    pub async fn without_managers(hook: Hook) -> Self {
        Self::prepare(hook, None).await
    }

    async fn prepare(hook: Hook, tls: Option<TlsFiles>) -> Self {
        let _ = tracing_subscriber::fmt()
            .with_env_filter(tracing_subscriber::EnvFilter::from_default_env())
            .with_test_writer()
            .try_init();
        let writes = Arc::new(Mutex::new(Vec::new()));
        let noted = writes.clone();
        let faults = FaultHook::new(move |request| {
            let reads = ["get", "list", "watch"];
            if !reads.contains(&request.verb) && request.resource != "leases" {
                noted.lock().unwrap().push(format!("{} {}/{}", request.verb, request.resource, request.name));
            }
            hook(request)
        });
        let server = Server::start(ServerConfig { crds: crds(), faults, ..ServerConfig::default() }).await.unwrap();
        let client = client(&server);
        let mut cluster = Self { server, client, agents: BTreeMap::new(), managers: BTreeMap::new(), tls, writes };
        cluster.set("node-lease-duration-seconds", "3").await;
        cluster.set("node-lease-renew-seconds", "1").await;
        for node in ["n1", "n2", "n3"] {
            let agent = FakeAgent::start(node, cluster.client.clone(), cluster.tls.as_ref()).await;
            cluster.agents.insert(node.to_owned(), agent);
        }
        cluster
    }

    /// Starts the node's manager in a runtime of its own, so that it can be killed.
    pub fn start_manager(&mut self, node: &str) {
        let manager = self.manager(node);
        self.managers.insert(node.to_owned(), manager);
    }

    fn manager(&self, node: &str) -> RunningManager {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let shutdown = CancellationToken::new();
        // The client's tasks are to live in the manager's runtime.
        let config = {
            let _entered = runtime.enter();
            ManagerConfig {
                node: node.to_owned(),
                agent_address: self.agents[node].address.to_string(),
                default_disk: Some(("disk-1".to_owned(), DiskSpec::file("/disk-1", 100 << 30))),
                client: client(&self.server),
                tls: self.tls.clone(),
                namespace: NAMESPACE.to_owned(),
            }
        };
        let run = runtime.spawn(Manager::run(config, shutdown.clone()));
        RunningManager { runtime: Some(runtime), shutdown, run }
    }

    /// Another manager for a node that has one.
    pub fn start_second_manager(&mut self, node: &str) {
        let manager = self.manager(node);
        self.managers.insert(format!("{node} again"), manager);
    }

    /// Ends the manager as a power cut does.
    pub fn kill_manager(&mut self, node: &str) {
        let mut manager = self.managers.remove(node).unwrap();
        // Not in order: the runtime goes first.
        manager.runtime.take().unwrap().shutdown_background();
    }

    /// Ends the manager in order.
    pub async fn stop_manager(&mut self, node: &str) {
        let mut manager = self.managers.remove(node).unwrap();
        manager.shutdown.cancel();
        (&mut manager.run).await.unwrap().unwrap();
    }

    pub fn writes(&self) -> Vec<String> {
        self.writes.lock().unwrap().clone()
    }

    pub fn api<K>(&self) -> Api<K>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>,
    {
        Api::namespaced(self.client.clone(), NAMESPACE)
    }

    /// Waits until the objects are as wanted.
    pub async fn until<K>(&self, what: &str, wanted: impl Fn(&[K]) -> bool) -> Vec<K>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope> + Clone + DeserializeOwned + Debug,
    {
        let wait = async {
            loop {
                if let Ok(list) = self.api::<K>().list(&ListParams::default()).await
                    && wanted(&list.items)
                {
                    return list.items;
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        match tokio::time::timeout(WAIT, wait).await {
            Ok(objects) => objects,
            Err(_) => panic!("{what}: {:#?}", self.api::<K>().list(&ListParams::default()).await),
        }
    }

    async fn set(&mut self, name: &str, value: &str) {
        self.create(Setting::new(name, SettingSpec { value: value.to_owned() })).await;
    }

    pub async fn create<K>(&self, object: K) -> K
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope> + Clone + DeserializeOwned + Debug + Serialize,
    {
        loop {
            match self.api::<K>().create(&PostParams::default(), &object).await {
                Ok(object) => return object,
                // A fault; it may have been made all the same.
                Err(kube::Error::Api(status)) if status.code >= 429 => {}
                Err(kube::Error::Api(status)) if status.code == 409 => return object,
                Err(error) => panic!("{error}"),
            }
        }
    }

    /// A volume of 16 MiB with two copies.
    pub async fn create_volume(&self, name: &str) {
        let spec = VolumeSpec { number_of_replicas: 2, ..VolumeSpec::with_size(16 << 20) };
        self.create(Volume::new(name, spec)).await;
    }

    pub async fn volume(&self, what: &str, name: &str, wanted: impl Fn(&Volume) -> bool) -> Volume {
        let named = |volumes: &[Volume]| volumes.iter().find(|v| v.metadata.name.as_deref() == Some(name)).cloned();
        let volumes = self.until::<Volume>(what, |volumes| named(volumes).is_some_and(|volume| wanted(&volume))).await;
        named(&volumes).unwrap()
    }

    /// Asks for the volume on a node, and nowhere else; on no node if empty.
    pub async fn attach(&self, name: &str, node: &str) {
        let ticket = Ticket {
            type_: TicketType::Api,
            node_id: node.to_owned(),
            parameters: TicketParameters { allowed_hosts: vec!["nqn.2014-08.org.example:host".to_owned()] },
        };
        let api = self.api::<VolumeAttachment>();
        self.until::<VolumeAttachment>("the attachment is made", |all| {
            all.iter().any(|attachment| attachment.metadata.name.as_deref() == Some(name))
        })
        .await;
        let tickets = if node.is_empty() { json!(null) } else { json!({ "test": ticket }) };
        loop {
            let clear = json!({"spec": {"tickets": tickets}});
            match api.patch(name, &PatchParams::default(), &Patch::Merge(&clear)).await {
                Ok(_) => return,
                Err(kube::Error::Api(status)) if status.code >= 409 => {}
                Err(error) => panic!("{error}"),
            }
        }
    }

    pub async fn delete<K>(&self, name: &str)
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope> + Clone + DeserializeOwned + Debug,
    {
        self.api::<K>().delete(name, &DeleteParams::default()).await.unwrap();
    }

    /// Waits until nothing is written for as long as it takes for anything to show.
    pub async fn until_at_rest(&self) {
        let mut last = self.writes().len();
        for _ in 0..600 {
            tokio::time::sleep(Duration::from_millis(500)).await;
            let now = self.writes().len();
            if now == last {
                return;
            }
            last = now;
        }
        panic!("the managers never come to rest: {:?}", self.writes().split_off(last - 20));
    }
}

pub fn client(server: &Server) -> Client {
    let url = format!("http://{}", server.address()).parse().unwrap();
    Client::try_from(Config::new(url)).unwrap()
}
