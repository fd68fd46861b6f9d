//! The agents that hold a volume's replicas, as an engine's agent sees them.
//!
//! *What it is.* Promote a replica, and ask for a replica's state: at this node directly, at other nodes by gRPC.
//!
//! *Invariants.* Connecting and calls have short deadlines ([`CONNECT_DEADLINE`], [`CALL_DEADLINE`]); channels are kept
//! per address, so a promote needs no handshake. Nothing is retried here.
//!
//! *When things fail.* [`PromoteError::Unreachable`] for everything that may pass, `Newer` when the replica knows a newer
//! epoch, `Unusable` when it will never hold this volume's data by itself.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use addax_proto::engine_v1 as pb;
use mirror_core::PromoteError;
use pb::replicas_client::ReplicasClient;
use tonic::Code;
use tonic::transport::{Channel, Endpoint};

use crate::error::AgentError;
use crate::replica::{Promotion, Replicas};
use crate::state::MemberWish;
use crate::tls::TlsFiles;

/// Deadline of connecting to another agent.
pub const CONNECT_DEADLINE: Duration = Duration::from_secs(1);
/// Deadline of a call to another agent. A drain that takes longer goes on there; the next promote finds it done.
pub const CALL_DEADLINE: Duration = Duration::from_secs(5);

/// The agents of the replicas; cheap to clone.
#[derive(Clone, Debug)]
pub struct Peers {
    local: Replicas,
    tls: Option<TlsFiles>,
    channels: Arc<Mutex<HashMap<String, Channel>>>,
}

impl Peers {
    /// With the replicas of this node, and the certificates for other agents.
    pub fn new(local: Replicas, tls: Option<TlsFiles>) -> Self {
        Self { local, tls, channels: Arc::default() }
    }

    /// Whether a replica is on this node.
    pub fn is_local(&self, replica: &str) -> bool {
        self.local.has(replica)
    }

    /// Promotes a replica.
    ///
    /// # Errors
    /// See [`PromoteError`].
    pub async fn promote(&self, member: &MemberWish, promotion: Promotion) -> Result<pb::Replica, PromoteError> {
        if self.is_local(&member.replica) {
            return self.local.promote(&member.replica, promotion).await.map_err(|error| local_error(&error));
        }
        let request = pb::PromoteReplicaRequest {
            name: member.replica.clone(),
            volume: promotion.volume,
            epoch: promotion.epoch,
            engine_instance: promotion.instance,
            lineage: promotion.lineage,
            expected_instance: promotion.expected,
        };
        let mut client = self.client(&member.agent)?;
        let call = tokio::time::timeout(CALL_DEADLINE, client.promote_replica(request));
        match call.await {
            Ok(Ok(reply)) => Ok(reply.into_inner()),
            Ok(Err(status)) => Err(remote_error(member, &status)),
            Err(_) => Err(PromoteError::Unreachable),
        }
    }

    /// The state of a replica at its agent; `None` when the agent does not have it.
    ///
    /// # Errors
    /// [`PromoteError::Unreachable`].
    pub async fn replica(&self, member: &MemberWish) -> Result<Option<pb::Replica>, PromoteError> {
        if self.is_local(&member.replica) {
            return Ok(self.local.list().into_iter().find(|replica| replica.name == member.replica));
        }
        let mut client = self.client(&member.agent)?;
        let call = tokio::time::timeout(CALL_DEADLINE, client.list_replicas(pb::ListReplicasRequest {}));
        match call.await {
            Ok(Ok(reply)) => Ok(reply.into_inner().replicas.into_iter().find(|found| found.name == member.replica)),
            Ok(Err(status)) => Err(remote_error(member, &status)),
            Err(_) => Err(PromoteError::Unreachable),
        }
    }

    fn client(&self, agent: &str) -> Result<ReplicasClient<Channel>, PromoteError> {
        let known = self.lock().get(agent).cloned();
        let channel = match known {
            Some(channel) => channel,
            None => {
                let channel = self.connect(agent).inspect_err(|error| {
                    tracing::error!(agent, %error, "cannot speak to the agent");
                });
                let channel = channel.map_err(|_| PromoteError::Unreachable)?;
                self.lock().insert(agent.to_owned(), channel.clone());
                channel
            }
        };
        Ok(ReplicasClient::new(channel))
    }

    fn connect(&self, agent: &str) -> Result<Channel, Box<dyn std::error::Error + Send + Sync>> {
        let scheme = if self.tls.is_some() { "https" } else { "http" };
        let endpoint = Endpoint::from_shared(format!("{scheme}://{agent}"))?.connect_timeout(CONNECT_DEADLINE);
        let endpoint = match &self.tls {
            Some(tls) => endpoint.tls_config(tls.client()?)?,
            None => endpoint,
        };
        // Lazy: the channel reconnects by itself, and every call has its own deadline.
        Ok(endpoint.connect_lazy())
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<String, Channel>> {
        self.channels.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn local_error(error: &AgentError) -> PromoteError {
    match error {
        AgentError::Superseded(_) => PromoteError::Newer,
        AgentError::Unavailable(_) | AgentError::Internal(_) => PromoteError::Unreachable,
        _ => PromoteError::Unusable,
    }
}

fn remote_error(member: &MemberWish, status: &tonic::Status) -> PromoteError {
    tracing::warn!(replica = %member.replica, agent = %member.agent, code = ?status.code(), message = status.message(),
        "the replica's agent refuses");
    match status.code() {
        Code::Aborted => PromoteError::Newer,
        Code::NotFound | Code::FailedPrecondition | Code::DataLoss | Code::InvalidArgument => PromoteError::Unusable,
        _ => PromoteError::Unreachable,
    }
}
