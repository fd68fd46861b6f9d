//! From the words of agents to the words of plans.

use addax_api::node::{DiskType, RemoteNamespace, UnmanagedLvol};
use addax_api::{Address, InstanceState};
use addax_plan::observed::{AgentDisk, AgentEngine, AgentMember, AgentReplica, DiskWish, MemberMode};
use addax_proto::engine_v1 as pb;
use jiff::Timestamp;

use crate::datastore::AgentChange;

/// The version of the interface that this manager speaks: the package is `addax.engine.v1`.
const API_VERSION: u32 = 1;

/// What an event says; `None` for `synced` and for what a newer agent may add.
pub(crate) fn change(event: pb::event::Object, now: Timestamp) -> Option<AgentChange> {
    use pb::event::Object;
    Some(match event {
        Object::Replica(replica) => replica_change(replica, now),
        Object::Engine(engine) => engine_change(engine, now),
        Object::Disk(disk) => disk_change(disk),
        Object::DiskGone(name) => AgentChange::Disk(name, None),
        Object::ReplicaGone(name) => AgentChange::Replica(name, None),
        Object::EngineGone(volume) => AgentChange::Engine(volume, None),
        Object::Info(info) => AgentChange::Info {
            data_plane: info.data_plane,
            data_plane_instance: info.data_plane_instance,
            api_version: API_VERSION,
        },
        Object::Synced(_) => return None,
    })
}

/// A replica as it is now.
pub(crate) fn replica_change(replica: pb::Replica, now: Timestamp) -> AgentChange {
    let seen = AgentReplica {
        state: state(replica.state()),
        address: replica.address.and_then(address),
        message: replica.message,
        fresh: replica.fresh,
        data_plane_instance: replica.data_plane_instance,
        changed_at: now,
    };
    AgentChange::Replica(replica.name, Some(seen))
}

/// An engine as it is now.
pub(crate) fn engine_change(engine: pb::Engine, now: Timestamp) -> AgentChange {
    let seen = AgentEngine {
        state: state(engine.state()),
        address: engine.address.and_then(address),
        message: engine.message,
        epoch: engine.epoch,
        engine_instance: engine.engine_instance,
        best_effort: engine.best_effort,
        record_old: engine.record_old,
        replicas: engine.replicas.into_iter().map(|replica| member(replica, now)).collect(),
        allowed_hosts: engine.allowed_hosts,
        changed_at: now,
    };
    AgentChange::Engine(engine.volume, Some(seen))
}

/// A disk as it is now.
pub(crate) fn disk_change(disk: pb::Disk) -> AgentChange {
    let lvol = |lvol: pb::Lvol| (lvol.name, UnmanagedLvol { uuid: lvol.uuid, size: bytes(lvol.size_bytes) });
    let seen = AgentDisk {
        wish: disk.wish.map(wish).unwrap_or_default(),
        uuid: disk.uuid,
        lvstore: disk.lvstore,
        device: disk.device,
        fingerprint: disk.fingerprint,
        cluster_bytes: bytes(disk.cluster_bytes),
        block_bytes: disk.block_bytes,
        no_overcommit: disk.no_overcommit,
        size_bytes: bytes(disk.size_bytes),
        available_bytes: bytes(disk.available_bytes),
        unmanaged_bytes: bytes(disk.unmanaged_bytes),
        unmanaged_count: disk.unmanaged_count,
        unmanaged: disk.unmanaged.into_iter().map(lvol).collect(),
        reason: disk.reason,
        message: disk.message,
    };
    AgentChange::Disk(disk.name, Some(seen))
}

fn bytes(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}

/// The inverse of what a call is made of, so that the two compare.
fn wish(request: pb::PutDiskRequest) -> DiskWish {
    let type_ = match request.kind() {
        pb::DiskKind::Block => DiskType::Block,
        pb::DiskKind::Nvme => DiskType::Nvme,
        pb::DiskKind::File | pb::DiskKind::Unspecified => DiskType::File,
    };
    let nvme = request.namespace_at.and_then(address).map(|at| RemoteNamespace {
        traddr: at.traddr,
        trsvcid: at.trsvcid,
        nqn: at.nqn,
        nsid: request.nsid,
    });
    DiskWish {
        type_,
        path: request.path,
        nvme,
        size: bytes(request.size_bytes),
        create: request.create,
        erase: request.erase,
        uuid: request.uuid,
        device: request.device,
    }
}

/// What is asked of an agent about a disk.
pub(super) fn put_disk(name: String, wish: DiskWish) -> pb::PutDiskRequest {
    let kind = match wish.type_ {
        DiskType::File => pb::DiskKind::File,
        DiskType::Block => pb::DiskKind::Block,
        DiskType::Nvme => pb::DiskKind::Nvme,
    };
    let nsid = wish.nvme.as_ref().map_or(0, |at| at.nsid);
    let namespace_at =
        wish.nvme.map(|at| pb::Address { traddr: at.traddr, trsvcid: u32::from(at.trsvcid), nqn: at.nqn });
    pb::PutDiskRequest {
        name,
        kind: kind.into(),
        path: wish.path,
        namespace_at,
        nsid,
        // The schema refuses sizes below zero.
        size_bytes: u64::try_from(wish.size).unwrap_or(0),
        create: wish.create,
        erase: wish.erase,
        uuid: wish.uuid,
        device: wish.device,
    }
}

fn state(state: pb::State) -> InstanceState {
    match state {
        pb::State::Unspecified => InstanceState::Unknown,
        pb::State::Starting => InstanceState::Starting,
        pb::State::Running => InstanceState::Running,
        pb::State::Stopping => InstanceState::Stopping,
        pb::State::Stopped => InstanceState::Stopped,
        pb::State::Error => InstanceState::Error,
    }
}

/// An address that cannot be one is none.
fn address(address: pb::Address) -> Option<Address> {
    let trsvcid = u16::try_from(address.trsvcid).ok().filter(|port| *port != 0)?;
    Some(Address { traddr: address.traddr, trsvcid, nqn: address.nqn })
}

fn member(member: pb::ReplicaMode, now: Timestamp) -> (String, AgentMember) {
    let mode = match member.mode() {
        pb::Mode::InSync => MemberMode::InSync,
        pb::Mode::Rebuilding => MemberMode::Rebuilding,
        pb::Mode::Lost => MemberMode::Lost,
        pb::Mode::Out | pb::Mode::Unspecified => MemberMode::Out,
    };
    let seen = AgentMember {
        mode,
        copied_bytes: member.copied_bytes,
        total_bytes: member.total_bytes,
        message: member.message,
        changed_at: now,
    };
    (member.replica, seen)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_asked_about_a_disk_compares_with_what_the_agent_tells() {
        let file = DiskWish { path: "/d".to_owned(), size: 1 << 30, create: true, ..DiskWish::default() };
        let block = DiskWish { type_: DiskType::Block, erase: "abc".to_owned(), size: 0, ..file.clone() };
        let at = RemoteNamespace { traddr: "::1".to_owned(), trsvcid: 4420, nqn: "nqn.x".to_owned(), nsid: 3 };
        let remote = DiskWish { type_: DiskType::Nvme, nvme: Some(at), uuid: "u".to_owned(), ..DiskWish::default() };
        for asked in [file, block, remote] {
            assert_eq!(wish(put_disk("d".to_owned(), asked.clone())), asked);
        }
    }
}
