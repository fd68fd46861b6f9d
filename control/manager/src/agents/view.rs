//! From the words of agents to the words of plans.

use addax_api::{Address, InstanceState};
use addax_plan::observed::{AgentDisk, AgentEngine, AgentMember, AgentReplica, MemberMode};
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
        Object::Disk(disk) => AgentChange::Disk(disk.name.clone(), self::disk(disk)),
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
        replicas: engine.replicas.into_iter().map(|replica| member(replica, now)).collect(),
        allowed_hosts: engine.allowed_hosts,
        changed_at: now,
    };
    AgentChange::Engine(engine.volume, Some(seen))
}

fn disk(disk: pb::Disk) -> AgentDisk {
    let bytes = |bytes| i64::try_from(bytes).unwrap_or(i64::MAX);
    AgentDisk {
        uuid: disk.uuid,
        size_bytes: bytes(disk.size_bytes),
        available_bytes: bytes(disk.available_bytes),
        error: disk.error,
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
