//! What an engine is, told to managers.
//!
//! *What it is.* The owner's phase, mirror and wishes in the words of the protocol.
//!
//! *Invariants.* Telling changes nothing and asks nobody. The record decides what a replica is; its leg says how it is.
//!
//! *When things fail.* Nothing here can; an engine that is not well carries the reason in its message.

use std::collections::BTreeSet;

use addax_api::nqn::volume_nqn;
use addax_proto::engine_v1 as pb;
use pb::event::Object;

use super::{Open, Owner, Phase};
use crate::hub::Key;
use crate::rpc::MirrorConfig;
use crate::state::{BLOCK_SIZE, EngineWish};

const FROZEN: &str = "writes wait: the in-sync set may not shrink further";
const LEASE_WAIT: &str =
    "a replica cannot be reached: waits until an older engine can answer no reads from it any more";
const EQUALISING: &str = "the members are made equal after an unclean stop; hosts are served after that";

impl Owner {
    pub(super) fn epoch(&self) -> u64 {
        match &self.phase {
            Phase::Open(open) => open.identity.epoch,
            Phase::Opening(opening) => opening.progress.borrow().raised,
            _ => 0,
        }
    }

    pub(super) fn tell(&self) {
        self.context.hub.set(Key::Engine(self.wish.volume.clone()), Object::Engine(self.describe()));
    }

    pub(super) fn describe(&self) -> pb::Engine {
        let (state, message) = match &self.phase {
            _ if self.stopping => (pb::State::Stopping, String::new()),
            Phase::Waiting { reason, .. } => (pb::State::Starting, reason.clone()),
            Phase::Opening(opening) if opening.progress.borrow().waits_for_lease => {
                (pb::State::Starting, LEASE_WAIT.to_owned())
            }
            Phase::Opening(_) => (pb::State::Starting, "opening".to_owned()),
            Phase::Open(open) => match &open.unexported {
                None if open.frozen => (pb::State::Running, FROZEN.to_owned()),
                None if !self.wish.must_detach.is_empty() => (pb::State::Running, must_detach(&self.wish)),
                None if open.equalising => (pb::State::Running, EQUALISING.to_owned()),
                None => (pb::State::Running, String::new()),
                Some(reason) => (pb::State::Starting, reason.clone()),
            },
            Phase::Lost(reason) => (pb::State::Error, reason.clone()),
        };
        let address = pb::Address {
            traddr: self.context.data_address.ip().to_string(),
            trsvcid: u32::from(self.context.data_address.port()),
            nqn: volume_nqn(&self.wish.volume),
        };
        let open = match &self.phase {
            Phase::Open(open) => Some(open),
            _ => None,
        };
        pb::Engine {
            volume: self.wish.volume.clone(),
            state: state.into(),
            message,
            address: Some(address),
            epoch: self.epoch(),
            engine_instance: open.map(|open| open.identity.instance.clone()).unwrap_or_default(),
            replicas: open.map(|open| self.describe_replicas(open)).unwrap_or_default(),
            allowed_hosts: self.wish.allowed_hosts.clone(),
            config_number: open.map_or(0, |open| open.config.config_number),
            best_effort: open.is_some_and(|open| open.device.is_best_effort()),
            record_old: self.record_old,
        }
    }

    fn describe_replicas(&self, open: &Open) -> Vec<pb::ReplicaMode> {
        let named = open.config.in_sync.iter().chain(&open.config.rebuilding);
        let names: BTreeSet<&String> = named.chain(self.wish.members.keys()).collect();
        names.into_iter().map(|replica| describe_replica(open, replica)).collect()
    }
}

/// For people: who is refused, and why (rule 1).
fn must_detach(wish: &EngineWish) -> String {
    let hosts: Vec<&str> = wish.must_detach.iter().map(String::as_str).collect();
    format!(
        "all copies lost power with writes that were acknowledged and not flushed; hosts that were attached then may \
         remember them, and are refused until they have been detached: {}",
        hosts.join(", ")
    )
}

pub(super) fn is_named(config: &MirrorConfig, replica: &str) -> bool {
    config.in_sync.iter().chain(&config.rebuilding).any(|name| name == replica)
}

fn describe_replica(open: &Open, replica: &str) -> pb::ReplicaMode {
    let leg = open.legs.iter().find(|leg| leg.replica == replica);
    let member = open.config.in_sync.iter().any(|name| name == replica);
    let rebuilding = open.config.rebuilding.iter().any(|name| name == replica);
    let lost = leg.is_some_and(|leg| leg.state == "lost");
    // The record decides what a replica is; the leg says how it is.
    let mode = match (member, rebuilding) {
        (true, _) if lost => pb::Mode::Lost,
        (true, _) => pb::Mode::InSync,
        (_, true) => pb::Mode::Rebuilding,
        _ => pb::Mode::Out,
    };
    let block = u64::from(BLOCK_SIZE);
    let (copied, total) = leg.map_or((0, 0), |leg| (leg.copied_blocks, leg.total_blocks));
    pb::ReplicaMode {
        replica: replica.to_owned(),
        mode: mode.into(),
        copied_bytes: copied.saturating_mul(block),
        total_bytes: total.saturating_mul(block),
        message: if rebuilding && leg.is_none() { "waits to be connected".to_owned() } else { String::new() },
    }
}
