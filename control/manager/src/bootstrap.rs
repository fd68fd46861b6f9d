//! The start and the end of a manager.
//!
//! *Order.* Watches first, and all of them listed: no plan is made on half a snapshot. Then the lease: nothing is done
//! before it is held. Then agents and controllers; the first passes make the own Node and InstanceManager and the
//! settings that are missing. At the end the other way round: controllers stop and their passes end, streams are
//! closed, and the lease goes last.

use std::sync::Arc;

use addax_api::node::DiskSpec;
use addax_plan::observed::ThisNode;
use kube::{Api, Client};
use tokio::sync::mpsc;
use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::TaskTracker;

use crate::act::Actor;
use crate::agents::Agents;
use crate::controllers::Controllers;
use crate::datastore::{Datastore, watch};
use crate::lease::LeaseKeeper;
use crate::tls::TlsFiles;

/// What a manager is run with.
#[derive(Clone)]
pub struct ManagerConfig {
    /// Name of the node.
    pub node: String,
    /// `ip:port` of the node's agent.
    pub agent_address: String,
    /// The disk that the Node object gets when it is made: its name and spec.
    pub default_disk: Option<(String, DiskSpec)>,
    /// The API server.
    pub client: Client,
    /// Certificates for the agents; `None` speaks plain gRPC, for tests.
    pub tls: Option<TlsFiles>,
    /// The namespace of all objects.
    pub namespace: String,
}

impl std::fmt::Debug for ManagerConfig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ManagerConfig")
            .field("node", &self.node)
            .field("agent_address", &self.agent_address)
            .field("default_disk", &self.default_disk)
            .field("namespace", &self.namespace)
            .finish_non_exhaustive()
    }
}

/// Why a manager cannot run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ManagerError {
    /// The node's name.
    #[error(transparent)]
    Name(#[from] addax_api::name::NameError),
    /// The agent's address.
    #[error("agent_address: '{value}' must be ip:port")]
    AgentAddress {
        /// The value given.
        value: String,
    },
    /// The namespace: objects are made in one only.
    #[error("namespace: '{value}' must be '{}'", addax_api::NAMESPACE)]
    Namespace {
        /// The value given.
        value: String,
    },
    /// The certificates.
    #[error("the certificates for agents cannot be used: {0}")]
    Tls(#[source] tonic::transport::Error),
}

/// The manager of one node.
#[derive(Debug)]
pub struct Manager {
    store: Arc<Datastore>,
    agents: Arc<Agents>,
    config: ManagerConfig,
    /// Ends what controllers stand on; also when the run is dropped half-way.
    end: DropGuard,
    tasks: TaskTracker,
}

impl Manager {
    /// Runs until `shutdown`. An API server that cannot be reached is waited for.
    ///
    /// # Errors
    /// See [`ManagerError`]: only the configuration can be wrong.
    pub async fn run(config: ManagerConfig, shutdown: CancellationToken) -> Result<(), ManagerError> {
        let manager = Self::new(config)?;
        manager.serve(&shutdown).await;
        // Passes have ended, or are left; what remains ends now.
        manager.end.disarm().cancel();
        manager.tasks.close();
        manager.tasks.wait().await;
        Ok(())
    }

    fn new(config: ManagerConfig) -> Result<Self, ManagerError> {
        addax_api::name::validate_node_name(&config.node)?;
        if config.agent_address.parse::<std::net::SocketAddr>().is_err() {
            return Err(ManagerError::AgentAddress { value: config.agent_address });
        }
        if config.namespace != addax_api::NAMESPACE {
            return Err(ManagerError::Namespace { value: config.namespace });
        }
        let this_node = ThisNode {
            name: config.node.clone(),
            agent_address: config.agent_address.clone(),
            default_disk: config.default_disk.clone(),
        };
        let store = Arc::new(Datastore::new(this_node));
        let tls = config.tls.as_ref().map(TlsFiles::client);
        let agents = Arc::new(Agents::new(store.clone(), tls).map_err(ManagerError::Tls)?);
        Ok(Self { store, agents, config, end: CancellationToken::new().drop_guard(), tasks: TaskTracker::new() })
    }

    async fn serve(&self, shutdown: &CancellationToken) {
        let ManagerConfig { client, namespace, node, .. } = &self.config;
        let end = self.end.token().clone();
        let synced = watch::start(&self.store, client, namespace, &self.tasks, &end);
        if shutdown.run_until_cancelled(all_listed(synced)).await.is_none() {
            return;
        }
        tracing::info!(node, "the snapshot is complete");
        let held = CancellationToken::new();
        let lease = LeaseKeeper::new(Api::namespaced(client.clone(), namespace), self.store.clone(), node);
        self.tasks.spawn(lease.run(held.clone(), end.clone()));
        if shutdown.run_until_cancelled(held.cancelled()).await.is_none() {
            return;
        }
        self.tasks.spawn(self.agents.clone().run(end.clone()));
        let store = self.store.clone();
        self.tasks.spawn(async move { store.watch_expiry(end).await });
        let actor = Actor::new(self.store.clone(), self.agents.clone(), client.clone(), namespace.clone());
        self.store.wake_everything();
        Arc::new(Controllers::new(self.store.clone(), actor)).run(shutdown.clone()).await;
    }
}

async fn all_listed(mut synced: mpsc::Receiver<()>) {
    for _ in 0..watch::WATCHES {
        if synced.recv().await.is_none() {
            // Cannot be: every watch keeps its end until it has told.
            std::future::pending::<()>().await;
        }
    }
}
