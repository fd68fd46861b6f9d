//! The data-plane objects of an engine: controllers to the replicas, the mirror or array, the subsystem for hosts.
//!
//! *What it is.* Names, and the steps that make and take away these objects.
//!
//! *Invariants.* A controller's name holds the epoch, so a new engine never uses a connection of an older one. A
//! mirror's controller reconnects by itself only to a data plane that drains the old session first; to a stock `spdk_tgt`
//! every new session goes through a promote (rules 13 and 14). An array's controller reconnects by itself for a moment; what
//! that costs is in `raid`.
//!
//! *Paths.* An engine is one path of its volume's hosts, which know it for the same volume as its predecessors on whatever
//! node: one NQN, serial number and namespace. Successive engines number their controllers apart, since a host that still
//! keeps a path to one refuses the next one's controllers otherwise. A path that is about to be closed is inaccessible first:
//! then hosts keep their commands, where an answer or a namespace that goes could fail them.
//!
//! *When things fail.* All steps can be repeated. [`sweep`] removes whatever an earlier life left behind.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::time::Duration;

use addax_api::nqn::{engine_host_nqn, volume_nqn};
use uuid::Uuid;

use super::device;
use crate::error::AgentError;
use crate::replica::{DRAIN_DEADLINE, Promotion};
use crate::rpc::{AttachParams, Client, Listener, NewSubsystem, PathUse, RpcError};
use crate::state::{EngineWish, MemberWish};
use crate::supervise::Plane;

/// Deadline of attaching to a replica.
pub(super) const ATTACH_DEADLINE: Duration = Duration::from_secs(5);

/// Who an engine is: the volume, the epoch and the instance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Identity {
    pub(super) volume: String,
    pub(super) epoch: u64,
    pub(super) instance: String,
    pub(super) lineage: String,
}

impl Identity {
    pub(super) fn host_nqn(&self) -> String {
        engine_host_nqn(&self.volume, self.epoch, &self.instance)
    }

    /// What a replica is asked to be promoted to, whatever its instance is.
    pub(super) fn promotion(&self) -> Promotion {
        Promotion {
            volume: self.volume.clone(),
            epoch: self.epoch,
            instance: self.instance.clone(),
            lineage: self.lineage.clone(),
            expected: None,
        }
    }
}

/// Name of a volume's mirror.
pub(super) fn mirror_name(volume: &str) -> String {
    format!("v.{volume}")
}

/// The volume of a mirror.
pub(super) fn volume_of(mirror: &str) -> Option<&str> {
    mirror.strip_prefix("v.")
}

/// Name of the controller to a replica in an epoch. Names of volumes and replicas have no '.'.
pub(super) fn controller_name(identity: &Identity, replica: &str) -> String {
    format!("m.{}.{replica}.{}", identity.volume, identity.epoch)
}

/// Name of the device behind a controller.
pub(super) fn leg_bdev(identity: &Identity, replica: &str) -> String {
    format!("{}n1", controller_name(identity, replica))
}

/// Name of the device that is the meta area behind a controller.
pub(super) fn meta_bdev(identity: &Identity, replica: &str) -> String {
    format!("{}n2", controller_name(identity, replica))
}

/// The volume, the replica and the epoch of a controller.
fn parse_controller(name: &str) -> Option<(&str, &str, u64)> {
    let (volume, rest) = name.strip_prefix("m.")?.split_once('.')?;
    let (replica, epoch) = rest.split_once('.')?;
    Some((volume, replica, epoch.parse().ok()?))
}

/// The volume, the replica and the epoch of the device behind a controller.
pub(super) fn parse_leg(bdev: &str) -> Option<(&str, &str, u64)> {
    parse_controller(bdev.strip_suffix("n1")?)
}

/// Whether a replica's data plane is a stock one, where no new session may begin without a promote; the supervisor makes
/// the instances of such ones up.
pub(super) fn is_stock(plane_instance: &str) -> bool {
    plane_instance.starts_with("pid-")
}

/// Connects to a replica that was promoted, and whose data plane is `plane_instance`. What is left of an earlier
/// connection of this epoch is ended first. The answer says whether the replica has a meta area, its second namespace.
pub(super) async fn attach(
    plane: &Plane,
    identity: &Identity,
    member: &MemberWish,
    plane_instance: &str,
) -> Result<bool, RpcError> {
    let client = &plane.client;
    let name = controller_name(identity, &member.replica);
    client.bdev_nvme_detach_controller(&name).await?;
    let (loss, delay) = match (plane.has_mirror(), is_stock(plane_instance)) {
        (true, false) => (-1, 1),
        (true, true) => (0, 0),
        // An array knows of no grace: what does not come back soon is taken from it.
        (false, _) => (2, 1),
    };
    let is_ipv6 = member.traddr.contains(':');
    let params = AttachParams {
        name,
        trtype: "tcp".to_owned(),
        adrfam: if is_ipv6 { "ipv6" } else { "ipv4" }.to_owned(),
        traddr: member.traddr.clone(),
        trsvcid: member.trsvcid.to_string(),
        subnqn: member.nqn.clone(),
        hostnqn: identity.host_nqn(),
        ctrlr_loss_timeout_sec: loss,
        reconnect_delay_sec: delay,
        fast_io_fail_timeout_sec: 0,
        // The mirror itself sends again what is still wanted; done twice it would be a ghost write.
        addax_no_replay: plane.has_mirror(),
    };
    let devices = client.bdev_nvme_attach_controller(&params, ATTACH_DEADLINE).await?;
    let expected = leg_bdev(identity, &member.replica);
    if devices.contains(&expected) {
        return Ok(devices.contains(&meta_bdev(identity, &member.replica)));
    }
    client.bdev_nvme_detach_controller(&params.name).await?;
    let reason = format!("controller {} has devices {devices:?}, not {expected}", params.name);
    Err(RpcError::Answer { method: "bdev_nvme_attach_controller".to_owned(), reason })
}

/// Ends the connection to a replica.
pub(super) async fn detach(client: &Client, identity: &Identity, replica: &str) -> Result<(), RpcError> {
    client.bdev_nvme_detach_controller(&controller_name(identity, replica)).await
}

/// Ends the connections to a volume's replicas that are not wanted any more.
pub(super) async fn detach_others(
    client: &Client,
    volume: &str,
    wanted: impl Fn(&str, u64) -> bool,
) -> Result<(), RpcError> {
    for name in client.nvme_controller_names().await? {
        if let Some((of, replica, epoch)) = parse_controller(&name)
            && of == volume
            && !wanted(replica, epoch)
        {
            tracing::info!(controller = %name, "detaching");
            client.bdev_nvme_detach_controller(&name).await?;
        }
    }
    Ok(())
}

/// Removes all objects of a volume's engine, whatever state they are in.
pub(super) async fn sweep(plane: &Plane, volume: &str) -> Result<(), RpcError> {
    let client = &plane.client;
    // The device first: I/O of hosts that hangs in it would keep their sessions from ending.
    device::sweep(plane, volume).await?;
    client.nvmf_delete_subsystem(&volume_nqn(volume)).await?;
    detach_others(client, volume, |_, _| false).await
}

/// Controllers that one engine's subsystem may have.
const CONTROLLERS_MAX: u16 = 1024;
/// Engines in a row whose controllers have different numbers.
const ENGINES_APART: u64 = 63;

/// Numbers of the controllers of a volume's engine in that epoch.
fn controller_numbers(epoch: u64) -> RangeInclusive<u16> {
    // Less than ENGINES_APART, which fits.
    let turn = u16::try_from(epoch % ENGINES_APART).unwrap_or(0);
    let first = 1 + turn * CONTROLLERS_MAX;
    first..=first + CONTROLLERS_MAX - 1
}

/// Exports the mirror to the allowed hosts, who are to use it.
pub(super) async fn export(
    client: &Client,
    wish: &EngineWish,
    epoch: u64,
    address: SocketAddr,
) -> Result<(), AgentError> {
    let nqn = volume_nqn(&wish.volume);
    if client.find_subsystem(&nqn).await?.is_none() {
        let serial = crate::replica::serial(&wish.uuid);
        let path = Some(controller_numbers(epoch));
        let new = NewSubsystem { nqn: &nqn, serial: &serial, model: "Addax Volume", max_namespaces: 1, path };
        client.nvmf_create_subsystem(&new).await?;
    }
    let found = client.find_subsystem(&nqn).await?;
    let found =
        found.ok_or_else(|| AgentError::Internal(format!("subsystem {nqn} is not there after its creation")))?;
    if found.namespaces.is_empty() {
        client.nvmf_subsystem_add_ns(&nqn, 1, &mirror_name(&wish.volume), wish.uuid).await?;
    }
    set_hosts(client, &nqn, &found.hosts(), &wish.admitted_hosts()).await?;
    let listener = Listener::tcp(address);
    if found.listens(&listener) {
        // What a closing that failed has left.
        client.nvmf_subsystem_listener_set_ana_state(&nqn, &listener, PathUse::Optimized).await?;
    } else {
        client.nvmf_subsystem_add_listener(&nqn, &listener).await?;
    }
    Ok(())
}

/// Tells hosts to use this path no more, and to keep their commands. That they do not hear it costs them nothing but an
/// error by which they find it out.
pub(super) async fn leave_path(client: &Client, volume: &str, address: SocketAddr) {
    let (nqn, listener) = (volume_nqn(volume), Listener::tcp(address));
    if let Err(error) = client.nvmf_subsystem_listener_set_ana_state(&nqn, &listener, PathUse::Inaccessible).await {
        tracing::warn!(volume, %error, "hosts are not told that this path is closed");
    }
}

/// Makes the allow-list of the volume what is wanted. Sessions of hosts that go are ended and drained.
pub(super) async fn allow_only(client: &Client, volume: &str, hosts: &[String]) -> Result<(), AgentError> {
    let nqn = volume_nqn(volume);
    let found = client.find_subsystem(&nqn).await?;
    let found = found.ok_or_else(|| AgentError::Unavailable(format!("volume '{volume}' is not exported now")))?;
    Ok(set_hosts(client, &nqn, &found.hosts(), hosts).await?)
}

async fn set_hosts(client: &Client, nqn: &str, has: &BTreeSet<String>, wanted: &[String]) -> Result<(), RpcError> {
    for host in has.iter().filter(|host| !wanted.contains(host)) {
        client.nvmf_subsystem_remove_host(nqn, host, DRAIN_DEADLINE).await?;
    }
    for host in wanted.iter().collect::<BTreeSet<_>>().into_iter().filter(|host| !has.contains(*host)) {
        client.nvmf_subsystem_add_host(nqn, host).await?;
    }
    Ok(())
}

/// UUID of a volume's mirror device; not the namespace's, so that a loop-back connection could show both.
pub(super) fn mirror_uuid(volume_uuid: &Uuid) -> Uuid {
    Uuid::new_v5(volume_uuid, b"mirror")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn engines_in_a_row_number_their_controllers_apart() {
        let all: Vec<_> = (7..7 + ENGINES_APART).map(controller_numbers).collect();
        for (index, one) in all.iter().enumerate() {
            assert!(*one.start() >= 1 && *one.end() <= 0xFFEF, "{one:?}");
            assert!(all[..index].iter().all(|other| other.end() < one.start() || one.end() < other.start()), "{one:?}");
        }
        assert_eq!(controller_numbers(0), controller_numbers(ENGINES_APART));
        assert_eq!(controller_numbers(u64::MAX).count(), usize::from(CONTROLLERS_MAX));
    }

    #[test]
    fn controllers_are_told_apart_by_volume_replica_and_epoch() {
        let identity =
            Identity { volume: "v".to_owned(), epoch: 12, instance: "e".to_owned(), lineage: "l".to_owned() };
        let name = controller_name(&identity, "v-r-1");
        assert_eq!(parse_controller(&name), Some(("v", "v-r-1", 12)));
        for other in ["m.v-r-1", "m.v.r", "m.v.r.x", "other"] {
            assert_eq!(parse_controller(other), None, "{other}");
        }
        assert_eq!(volume_of(&mirror_name("v")), Some("v"));
        assert_eq!(leg_bdev(&identity, "a"), "m.v.a.12n1");
        assert_eq!(parse_leg("m.v.a.12n1"), Some(("v", "a", 12)));
        assert_eq!(parse_leg("pad.v.3"), None);
    }
}
