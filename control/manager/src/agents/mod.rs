//! The agents of the nodes whose InstanceManager this manager owns: one connection and one event stream each.
//!
//! *Invariant.* A stream is held for an InstanceManager exactly while this manager owns it, and its own lease holds.
//! When the ownership goes, the stream is closed and the view taken out of the snapshot.
//!
//! *When things fail.* Calls have deadlines; a failed one is recorded in the view for the plan to see.

mod call;
mod stream;
mod view;

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use addax_plan::action::{AgentCall, Key, Kind};
use addax_plan::observed::{Observed, Tabled};
use addax_plan::ownership::{self, Verdict};
use jiff::Timestamp;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tonic::Status;
use tonic::transport::{Channel, ClientTlsConfig, Endpoint};

use crate::datastore::{AgentInstance, Datastore};

/// Longest time for a connection to be made.
const CONNECT_DEADLINE: Duration = Duration::from_secs(5);
/// How often a silent connection is probed, and how long a probe may take.
const PROBE_INTERVAL: Duration = Duration::from_secs(10);
const PROBE_DEADLINE: Duration = Duration::from_secs(5);

/// The connections.
#[derive(Debug)]
pub(crate) struct Agents {
    store: Arc<Datastore>,
    tls: Option<ClientTlsConfig>,
    open: Mutex<HashMap<String, Open>>,
}

#[derive(Debug)]
struct Open {
    address: String,
    channel: Channel,
    stream: JoinHandle<()>,
}

impl Drop for Open {
    fn drop(&mut self) {
        self.stream.abort();
    }
}

/// Why an agent was not asked, or did not do it.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CallError {
    /// There is no connection.
    #[error("node {node}: this manager has no stream of the node's agent")]
    NotConnected {
        /// The node.
        node: String,
    },
    /// The agent said no, or nothing.
    #[error("node {node}: the agent answers {:?}: {}", .status.code(), .status.message())]
    Refused {
        /// The node.
        node: String,
        /// What it said.
        status: Box<Status>,
    },
}

impl Agents {
    /// Checks the certificates; connects to nobody yet.
    pub(crate) fn new(store: Arc<Datastore>, tls: Option<ClientTlsConfig>) -> Result<Self, tonic::transport::Error> {
        let agents = Self { store, tls, open: Mutex::default() };
        agents.endpoint("127.0.0.1:1")?;
        Ok(agents)
    }

    /// Opens and closes streams as the ownership moves, until `shutdown`.
    pub(crate) async fn run(self: Arc<Self>, shutdown: CancellationToken) {
        loop {
            let wanted = self.store.read(|observed| wanted(observed, Timestamp::now()));
            self.make_so(&wanted).await;
            tokio::select! {
                () = shutdown.cancelled() => break,
                () = self.store.agents_changed.notified() => {}
            }
        }
        self.make_so(&BTreeMap::new()).await;
    }

    async fn make_so(&self, wanted: &BTreeMap<String, String>) {
        let gone: Vec<(String, Open)> =
            self.lock().extract_if(|node, open| wanted.get(node) != Some(&open.address)).collect();
        for (node, mut open) in gone {
            tracing::info!(node, "the agent's stream is closed");
            open.stream.abort();
            // It must have ended before the view goes, or it could bring it back.
            let _ = (&mut open.stream).await;
            self.store.agent_left(&node);
        }
        let mut open = self.lock();
        for (node, address) in wanted {
            if open.contains_key(node) {
                continue;
            }
            let channel = match self.endpoint(address) {
                Ok(endpoint) => endpoint.connect_lazy(),
                Err(error) => {
                    tracing::error!(node, address, %error, "the agent's address cannot be used");
                    continue;
                }
            };
            let follow = stream::follow(self.store.clone(), node.clone(), address.clone(), channel.clone());
            let stream = tokio::spawn(follow);
            open.insert(node.clone(), Open { address: address.clone(), channel, stream });
        }
    }

    /// Asks an agent. What it answers, or that it failed, is in the snapshot afterwards.
    pub(crate) async fn call(&self, node: &str, call: &AgentCall) -> Result<(), CallError> {
        let channel = self.lock().get(node).map(|open| open.channel.clone());
        let Some(channel) = channel else {
            return Err(CallError::NotConnected { node: node.to_owned() });
        };
        let target = call.target();
        let mark = self.store.agent_mark(node, &AgentInstance::of(&target));
        match call::call(&self.store, node, channel, call).await {
            Ok(change) => {
                self.store.agent_answered(node, &target, mark, change);
                Ok(())
            }
            Err(status) => {
                self.store.agent_refused(node, &target, status.message(), Timestamp::now());
                Err(CallError::Refused { node: node.to_owned(), status: Box::new(status) })
            }
        }
    }

    fn endpoint(&self, address: &str) -> Result<Endpoint, tonic::transport::Error> {
        let scheme = if self.tls.is_some() { "https" } else { "http" };
        let endpoint = Endpoint::from_shared(format!("{scheme}://{address}"))?
            .connect_timeout(CONNECT_DEADLINE)
            .http2_keep_alive_interval(PROBE_INTERVAL)
            .keep_alive_timeout(PROBE_DEADLINE)
            .tcp_nodelay(true);
        match &self.tls {
            Some(tls) => endpoint.tls_config(tls.clone()),
            None => Ok(endpoint),
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Open>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The nodes whose agents this manager speaks to, with their addresses.
fn wanted(observed: &Observed, now: Timestamp) -> BTreeMap<String, String> {
    let this = &observed.this_node;
    let mine = |node: &str| ownership::verdict(observed, &Key::new(Kind::InstanceManager, node), now) == Verdict::Mine;
    let mut wanted = BTreeMap::new();
    for object in observed.instance_managers.iter() {
        let name = object.reference().name;
        let address = if name == this.name {
            this.agent_address.clone()
        } else {
            object.status.as_ref().map(|status| status.address.clone()).unwrap_or_default()
        };
        if observed.is_alive(&this.name, now) && !address.is_empty() && mine(&name) {
            wanted.insert(name, address);
        }
    }
    wanted
}
