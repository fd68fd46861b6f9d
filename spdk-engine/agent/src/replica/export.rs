//! A replica's export: its subsystem, its listener, its allow-list.
//!
//! *What it is.* Steps on a data plane that make the wanted objects out of whatever is there, and the drain that comes
//! before every new session. Namespace 1 is the data, namespace 2 the meta area of a replica that has one.
//!
//! *Invariants.* A subsystem is made without hosts. [`drain`] returns only when no session and no queue pair of the
//! subsystem is left, so nothing of an older engine can reach the disk any more (rule 13). It asks the data plane
//! for that itself as well as trusting `nvmf_subsystem_remove_host`, since not every `spdk_tgt` waits there.
//!
//! *When things fail.* Every step can be repeated from any intermediate state.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::time::Duration;

use addax_api::nqn::replica_nqn;
use tokio::time::{Instant, sleep};
use uuid::Uuid;

use super::DRAIN_DEADLINE;
use crate::error::AgentError;
use crate::rpc::{Client, Listener, NewSubsystem, RpcError};
use crate::state::ReplicaRecord;
use crate::supervise::Plane;

const DRAIN_POLL: Duration = Duration::from_millis(20);

const DATA_NSID: u32 = 1;
const META_NSID: u32 = 2;

/// The lvols of a replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Lvols {
    pub(super) data: Uuid,
    pub(super) meta: Option<Uuid>,
}

/// Makes the export of a replica, with nobody but `keep` on its allow-list.
pub(super) async fn make(
    plane: &Plane,
    record: &ReplicaRecord,
    lvols: Lvols,
    address: SocketAddr,
    keep: Option<&str>,
) -> Result<(), AgentError> {
    let client = &plane.client;
    let nqn = replica_nqn(&record.replica);
    if client.find_subsystem(&nqn).await?.is_none() {
        let serial = serial(&record.uuid);
        let (model, max_namespaces) = ("Addax Replica", META_NSID);
        let new = NewSubsystem { nqn: &nqn, serial: &serial, model, max_namespaces, path: None };
        client.nvmf_create_subsystem(&new).await?;
    }
    let found = client.find_subsystem(&nqn).await?;
    let found =
        found.ok_or_else(|| AgentError::Internal(format!("subsystem {nqn} is not there after its creation")))?;
    // Sessions from before its device went: the engine behind them has to promote again.
    let has = |nsid| found.namespaces.iter().any(|namespace| namespace.nsid == nsid);
    let keep = keep.filter(|_| has(DATA_NSID));
    drain(client, &nqn, found.hosts(), keep).await?;
    // UUIDs that differ from the devices': the data plane of this node may attach the namespaces itself.
    // The meta area first: who finds the data finds it too.
    if let Some(meta) = lvols.meta
        && !has(META_NSID)
    {
        let uuid = Uuid::new_v5(&record.uuid, b"meta");
        client.nvmf_subsystem_add_ns(&nqn, META_NSID, &meta.to_string(), uuid).await?;
    }
    if !has(DATA_NSID) {
        let uuid = Uuid::new_v5(&record.uuid, b"namespace");
        client.nvmf_subsystem_add_ns(&nqn, DATA_NSID, &lvols.data.to_string(), uuid).await?;
    }
    let listener = Listener::tcp(address);
    if !found.listens(&listener) {
        client.nvmf_subsystem_add_listener(&nqn, &listener).await?;
    }
    Ok(())
}

/// Takes the export away: nobody is left.
pub(super) async fn unmake(plane: &Plane, replica: &str) -> Result<(), AgentError> {
    Ok(plane.client.nvmf_delete_subsystem(&replica_nqn(replica)).await?)
}

/// Ends and drains every session of a replica and lets nobody in.
pub(super) async fn drain_all(plane: &Plane, replica: &str) -> Result<(), AgentError> {
    let nqn = replica_nqn(replica);
    let found = plane.client.find_subsystem(&nqn).await?;
    let found = found.ok_or_else(|| AgentError::Unavailable(format!("replica '{replica}' is not exported")))?;
    drain(&plane.client, &nqn, found.hosts(), None).await
}

/// Lets one host in.
pub(super) async fn allow(plane: &Plane, replica: &str, host: &str) -> Result<(), AgentError> {
    Ok(plane.client.nvmf_subsystem_add_host(&replica_nqn(replica), host).await?)
}

/// Ends all sessions but those of `keep`. Sessions of hosts that were removed before count too: an agent that was killed
/// between removing a host and the end of its sessions must not forget them.
async fn drain(client: &Client, nqn: &str, hosts: BTreeSet<String>, keep: Option<&str>) -> Result<(), AgentError> {
    let end = Instant::now() + DRAIN_DEADLINE;
    for host in hosts.iter().filter(|host| Some(host.as_str()) != keep) {
        client.nvmf_subsystem_remove_host(nqn, host, DRAIN_DEADLINE).await?;
    }
    while !is_drained(client, nqn, keep).await? {
        if Instant::now() >= end {
            return Err(AgentError::Unavailable(format!(
                "old sessions of {nqn} were not drained within {DRAIN_DEADLINE:?}; their I/O may still reach the disk"
            )));
        }
        sleep(DRAIN_POLL).await;
    }
    Ok(())
}

async fn is_drained(client: &Client, nqn: &str, keep: Option<&str>) -> Result<bool, RpcError> {
    let kept = |host: &String| Some(host.as_str()) == keep;
    let controllers = client.nvmf_subsystem_get_controllers(nqn).await?;
    if !controllers.iter().all(|controller| kept(&controller.hostnqn)) {
        return Ok(false);
    }
    Ok(client.nvmf_subsystem_qpair_hosts(nqn).await?.iter().all(kept))
}

/// A serial number: NVMe has room for 20 characters.
pub(crate) fn serial(uuid: &Uuid) -> String {
    uuid.simple().to_string().chars().take(20).collect()
}
