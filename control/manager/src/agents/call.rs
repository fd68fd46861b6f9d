//! One call of an agent: from the plan's words to gRPC, with a deadline, and its outcome into the snapshot.

use std::time::Duration;

use addax_api::recovery::RecoveryAction;
use addax_api::{InstanceState, ReplicaAddress};
use addax_plan::action::{AgentCall, DeleteBy, Recovery};
use addax_proto::engine_v1 as pb;
use jiff::Timestamp;
use pb::disks_client::DisksClient;
use pb::engines_client::EnginesClient;
use pb::replicas_client::ReplicasClient;
use tonic::transport::Channel;
use tonic::{Request, Status};

use super::view;
use crate::datastore::{AgentChange, Datastore};

/// Deadline of a call that is answered after a bounded amount of work.
const SHORT_DEADLINE: Duration = Duration::from_secs(15);
/// Deadline of a call that may wait for writes in flight, or remove data.
const LONG_DEADLINE: Duration = Duration::from_secs(60);

/// Calls, and tells what the agent answered about the object.
pub(super) async fn call(
    store: &Datastore,
    node: &str,
    channel: Channel,
    call: &AgentCall,
) -> Result<Option<AgentChange>, Status> {
    let deadline = deadline(call);
    let answer = tokio::time::timeout(deadline, send(store, node, channel, call, deadline)).await;
    answer.unwrap_or_else(|_| Err(Status::deadline_exceeded(format!("no answer within {} s", deadline.as_secs()))))
}

fn deadline(call: &AgentCall) -> Duration {
    match call {
        AgentCall::StopEngine { .. }
        | AgentCall::RemoveReplica { .. }
        | AgentCall::SetAllowedHosts { .. }
        | AgentCall::StopReplica { .. }
        | AgentCall::DeleteReplica { .. }
        | AgentCall::RemoveDisk { .. }
        | AgentCall::RecoverVolume(_) => LONG_DEADLINE,
        AgentCall::PutDisk { .. }
        | AgentCall::StartReplica { .. }
        | AgentCall::StartEngine { .. }
        | AgentCall::AddReplica { .. } => SHORT_DEADLINE,
    }
}

async fn send(
    store: &Datastore,
    node: &str,
    channel: Channel,
    call: &AgentCall,
    deadline: Duration,
) -> Result<Option<AgentChange>, Status> {
    // The agent learns the deadline too, and gives up what nobody waits for.
    fn request<T>(message: T, deadline: Duration) -> Request<T> {
        let mut request = Request::new(message);
        request.set_timeout(deadline);
        request
    }
    macro_rules! ask {
        ($client:ident . $method:ident, $message:expr) => {
            $client::new(channel).$method(request($message, deadline)).await?.into_inner()
        };
    }
    Ok(match call.clone() {
        AgentCall::PutDisk { disk, wish } => {
            Some(view::disk_change(ask!(DisksClient.put_disk, view::put_disk(disk, wish))))
        }
        AgentCall::RemoveDisk { disk } => {
            let message = pb::RemoveDiskRequest { name: disk.clone() };
            let _: pb::RemoveDiskResponse = ask!(DisksClient.remove_disk, message);
            Some(AgentChange::Disk(disk, None))
        }
        AgentCall::StartReplica { name, volume, disk, size_bytes, create } => {
            let size_bytes = bytes(size_bytes);
            let message = pb::StartReplicaRequest { name, volume, disk, size_bytes, create };
            Some(view::replica_change(ask!(ReplicasClient.start_replica, message), Timestamp::now()))
        }
        AgentCall::StopReplica { name } => {
            let _: pb::StopReplicaResponse =
                ask!(ReplicasClient.stop_replica, pb::StopReplicaRequest { name: name.clone() });
            stopped_replica(store, node, &name)
        }
        AgentCall::DeleteReplica { name, disk, record } => {
            let record = record.map(|by| delete_by(*by));
            let message = pb::DeleteReplicaRequest { name: name.clone(), disk, record };
            let _: pb::DeleteReplicaResponse = ask!(ReplicasClient.delete_replica, message);
            Some(AgentChange::Replica(name, None))
        }
        AgentCall::StartEngine { volume, size_bytes, replicas, allowed_hosts, uuid } => {
            let replicas = replicas.into_iter().map(|(name, address)| member(name, address)).collect();
            let size_bytes = bytes(size_bytes);
            let message = pb::StartEngineRequest { volume, size_bytes, replicas, allowed_hosts, uuid };
            engine(ask!(EnginesClient.start_engine, message))
        }
        AgentCall::StopEngine { volume } => engine(ask!(EnginesClient.stop_engine, pb::StopEngineRequest { volume })),
        AgentCall::AddReplica { volume, replica, address } => {
            let message = pb::AddReplicaRequest { volume, replica: Some(member(replica, address)) };
            engine(ask!(EnginesClient.add_replica, message))
        }
        AgentCall::RemoveReplica { volume, replica } => {
            engine(ask!(EnginesClient.remove_replica, pb::RemoveReplicaRequest { volume, replica }))
        }
        AgentCall::SetAllowedHosts { volume, allowed_hosts } => {
            let message = pb::SetAllowedHostsRequest { volume, allowed_hosts };
            engine(ask!(EnginesClient.set_allowed_hosts, message))
        }
        AgentCall::RecoverVolume(recovery) => {
            // What has come of it stands in the volume's status.
            let _: pb::RecoverVolumeResponse = ask!(EnginesClient.recover_volume, recover(recovery));
            None
        }
    })
}

fn engine(engine: pb::Engine) -> Option<AgentChange> {
    Some(view::engine_change(engine, Timestamp::now()))
}

/// The answer to a stop is empty; what was there is stopped.
fn stopped_replica(store: &Datastore, node: &str, name: &str) -> Option<AgentChange> {
    let mut replica = store.read(|observed| observed.agents.get(node)?.replicas.get(name).cloned())?;
    replica.state = InstanceState::Stopped;
    replica.address = None;
    replica.message = String::new();
    replica.changed_at = Timestamp::now();
    Some(AgentChange::Replica(name.to_owned(), Some(replica)))
}

fn recover(recovery: Recovery) -> pb::RecoverVolumeRequest {
    let action = match recovery.action {
        RecoveryAction::ForceOpen => pb::RecoverAction::ForceOpen,
        RecoveryAction::Recover => pb::RecoverAction::Recover,
        // The plan does this itself, and never asks for it.
        RecoveryAction::Purge => pb::RecoverAction::Unspecified,
    };
    let known = |(replica, place): (String, Option<ReplicaAddress>)| match place {
        Some(address) => member(replica, address),
        None => pb::Member { replica, ..pb::Member::default() },
    };
    pb::RecoverVolumeRequest {
        volume: recovery.volume,
        id: recovery.id,
        action: action.into(),
        replica: recovery.replica,
        replicas: recovery.replicas.into_iter().map(known).collect(),
        lost: recovery.lost,
        requested_by: recovery.requested_by,
        generation: recovery.generation,
        not_after_unix_ms: recovery.not_after.map_or(0, |time| time.as_millisecond()),
    }
}

fn delete_by(by: DeleteBy) -> pb::Record {
    let DeleteBy { record, over } = by;
    pb::Record {
        lineage: record.lineage,
        epoch: record.epoch,
        config_number: record.config_number,
        in_sync: record.in_sync,
        rebuilding: record.rebuilding,
        over,
    }
}

/// The schema refuses sizes below zero.
fn bytes(bytes: i64) -> u64 {
    u64::try_from(bytes).unwrap_or(0)
}

fn member(replica: String, address: ReplicaAddress) -> pb::Member {
    let ReplicaAddress { agent, traddr, trsvcid, nqn } = address;
    pb::Member { replica, agent, address: Some(pb::Address { traddr, trsvcid: trsvcid.into(), nqn }) }
}
