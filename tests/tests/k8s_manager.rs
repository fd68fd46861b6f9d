//! Whole managers on a real kube-apiserver, with fake agents: a volume's life, and the death of a node.
#![allow(clippy::unwrap_used)]

// The same agent that the managers' own tests use with the embedded API server.
#[allow(dead_code)]
#[path = "../../control/manager/tests/common/agent.rs"]
mod agent;
#[path = "../../control/manager/tests/common/pki.rs"]
mod pki;

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::time::Duration;

use addax_api::node::{CONDITION_READY, DiskSpec};
use addax_api::volume::VolumeState;
use addax_api::volume_attachment::{Ticket, TicketParameters, TicketType};
use addax_api::{
    Engine, InstanceManager, NAMESPACE, Node, Replica, ResourceExt, Setting, SettingSpec, Volume, VolumeAttachment,
    VolumeSpec, condition,
};
use addax_manager::{Manager, ManagerConfig, TlsFiles};
use agent::FakeAgent;
use e2e::kube::{RealApi, install_definitions, is_available};
use k8s_openapi::NamespaceResourceScope;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::{Api, Client, Resource};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::json;
use tokio::runtime::Runtime;
use tokio_util::sync::CancellationToken;

const NODES: [&str; 3] = ["n1", "n2", "n3"];
/// Longest wait for what must happen in the end.
const WAIT: Duration = Duration::from_secs(120);

/// Three nodes on a real API server. A manager runs in a runtime of its own, so that it can be killed.
struct Cluster {
    managers: BTreeMap<&'static str, Runtime>,
    agents: BTreeMap<&'static str, FakeAgent>,
    tls: TlsFiles,
    client: Client,
    api: RealApi,
}

impl Drop for Cluster {
    fn drop(&mut self) {
        for (_, runtime) in std::mem::take(&mut self.managers) {
            runtime.shutdown_background();
        }
    }
}

impl Cluster {
    async fn start() -> Self {
        let api = RealApi::start().await.unwrap();
        let client = api.client().await.unwrap();
        install_definitions(&client).await.unwrap();
        let tls = pki::certificates();
        let mut cluster = Self { managers: BTreeMap::new(), agents: BTreeMap::new(), tls, client, api };
        for (name, value) in [("node-lease-duration-seconds", "6"), ("node-lease-renew-seconds", "1")] {
            cluster.create(Setting::new(name, SettingSpec { value: value.to_owned() })).await;
        }
        for node in NODES {
            let agent = FakeAgent::start(node, cluster.client.clone(), Some(&cluster.tls)).await;
            cluster.agents.insert(node, agent);
            cluster.start_manager(node).await;
        }
        cluster.until::<Node>("all nodes are ready", |nodes| nodes.len() == 3 && nodes.iter().all(is_ready)).await;
        cluster
    }

    async fn start_manager(&mut self, node: &'static str) {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let client = {
            // The client's tasks are to live in the manager's runtime.
            let _entered = runtime.enter();
            self.api.client().await.unwrap()
        };
        let config = ManagerConfig {
            node: node.to_owned(),
            agent_address: self.agents[node].address.to_string(),
            default_disk: Some(("disk-1".to_owned(), DiskSpec::file("/disk-1", 100 << 30))),
            client,
            tls: Some(self.tls.clone()),
            namespace: NAMESPACE.to_owned(),
        };
        runtime.spawn(async { Manager::run(config, CancellationToken::new()).await.unwrap() });
        self.managers.insert(node, runtime);
    }

    /// Ends the manager and the agent's engines and replicas as a power cut does.
    fn kill_node(&mut self, node: &str) {
        self.managers.remove(node).unwrap().shutdown_background();
        self.agents[node].reset();
    }

    fn of<K>(&self) -> Api<K>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>,
    {
        Api::namespaced(self.client.clone(), NAMESPACE)
    }

    async fn create<K>(&self, object: K)
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope> + Clone + DeserializeOwned + Debug + Serialize,
    {
        self.of::<K>().create(&PostParams::default(), &object).await.unwrap();
    }

    /// Waits until the objects are as wanted.
    async fn until<K>(&self, what: &str, wanted: impl Fn(&[K]) -> bool) -> Vec<K>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope> + Clone + DeserializeOwned + Debug,
    {
        let wait = async {
            loop {
                let list = self.of::<K>().list(&ListParams::default()).await.unwrap();
                if wanted(&list.items) {
                    return list.items;
                }
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        match tokio::time::timeout(WAIT, wait).await {
            Ok(objects) => objects,
            Err(_) => panic!("never: {what}: {:#?}", self.of::<K>().list(&ListParams::default()).await),
        }
    }

    async fn volume(&self, what: &str, wanted: impl Fn(&Volume) -> bool) -> Volume {
        self.until::<Volume>(what, |volumes| volumes.len() == 1 && wanted(&volumes[0])).await.remove(0)
    }

    /// Asks for the volume on a node, and nowhere else; on no node if `None`.
    async fn attach(&self, volume: &str, node: Option<&str>) {
        self.until::<VolumeAttachment>("the attachment is made", |all| all.iter().any(|a| a.name_any() == volume))
            .await;
        let ticket = node.map(|node| Ticket {
            type_: TicketType::Api,
            node_id: node.to_owned(),
            parameters: TicketParameters { allowed_hosts: vec!["nqn.2014-08.org.example:host".to_owned()] },
        });
        let patch = Patch::Merge(json!({"spec": {"tickets": {"test": ticket}}}));
        self.of::<VolumeAttachment>().patch(volume, &PatchParams::default(), &patch).await.unwrap();
    }
}

fn is_ready(node: &Node) -> bool {
    node.status.as_ref().is_some_and(|status| condition::is_true(&status.conditions, CONDITION_READY))
}

fn is_detached(volume: &Volume) -> bool {
    volume.status.as_ref().is_some_and(|status| status.state == VolumeState::Detached)
}

fn is_attached(volume: &Volume, node: &str) -> bool {
    let status = volume.status.clone().unwrap_or_default();
    status.state == VolumeState::Attached && status.current_node_id == node && status.endpoint.is_some()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_volume_lives_and_outlives_a_node_on_a_real_api_server() {
    if !is_available() {
        return;
    }
    let mut cluster = Cluster::start().await;
    cluster.until::<InstanceManager>("one for each node", |all| all.len() == 3).await;
    let known = addax_api::setting::SETTINGS.len();
    cluster.until::<Setting>("all settings", |all| all.len() == known).await;

    // Not on the node that dies.
    let no_scheduling = Patch::Merge(json!({"spec": {"allowScheduling": false}}));
    cluster.of::<Node>().patch("n1", &PatchParams::default(), &no_scheduling).await.unwrap();
    let spec = VolumeSpec { number_of_replicas: 2, ..VolumeSpec::with_size(16 << 20) };
    cluster.create(Volume::new("v", spec)).await;
    let made = cluster.volume("it is made", is_detached).await;
    let record = made.status.unwrap().config.unwrap();
    assert_eq!((record.epoch, record.in_sync.len()), (0, 2));
    let replicas = cluster.until::<Replica>("two replicas", |replicas| replicas.len() == 2).await;
    assert!(replicas.iter().all(|replica| !replica.spec.disk_id.is_empty() && replica.spec.node_id != "n1"));

    cluster.attach("v", Some("n1")).await;
    let attached = cluster.volume("it is attached", |volume| is_attached(volume, "n1")).await;
    assert_eq!(attached.status.unwrap().config.unwrap().epoch, 1);
    assert_eq!(cluster.agents["n1"].engines(), ["v"]);

    cluster.kill_node("n1");
    cluster
        .until::<Node>("n1 is down", |nodes| nodes.iter().any(|node| node.name_any() == "n1" && !is_ready(node)))
        .await;
    cluster.attach("v", Some("n2")).await;
    let moved = cluster.volume("it moves", |volume| is_attached(volume, "n2")).await;
    let status = moved.status.unwrap();
    assert_eq!(status.owner_id, "n2");
    assert!(status.config.unwrap().epoch >= 2);
    assert_eq!(cluster.agents["n2"].engines(), ["v"]);

    cluster.attach("v", None).await;
    let detached = cluster.volume("it is detached", is_detached).await;
    assert!(detached.status.unwrap().config.unwrap().clean);
    cluster.start_manager("n1").await;
    cluster.until::<Node>("n1 is back", |nodes| nodes.iter().all(is_ready)).await;
    cluster.of::<Volume>().delete("v", &DeleteParams::default()).await.unwrap();
    cluster.until::<Volume>("no volume", <[Volume]>::is_empty).await;
    cluster.until::<Replica>("no replica", <[Replica]>::is_empty).await;
    cluster.until::<Engine>("no engine", <[Engine]>::is_empty).await;
    assert!(cluster.agents.values().all(|agent| agent.data().is_empty()));
}
