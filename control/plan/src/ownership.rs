//! Who acts on an object: every object has one owner, the node in `status.ownerID`, and only that node's manager acts.
//!
//! *Rules.* 1. The node that the object stands on (the attach node, the node of a replica or engine) owns it while that
//! node is alive, so that control is next to the data. 2. Otherwise the present owner keeps it while alive. 3. Otherwise
//! one successor takes it, which all managers choose alike among the living (rendezvous hash).
//!
//! *Invariant.* A claim is a write of the owner under the object's resourceVersion: of two managers that disagree about
//! who is alive one fails. An old owner's writes in flight fail on the same version.
//!
//! *When things fail.* A manager that could not renew its own lease in time must stop acting; the one who takes over
//! starts from the objects alone.

use jiff::Timestamp;

use crate::action::{Action, Key, Kind};
use crate::hash::rendezvous;
use crate::observed::{Observed, Tabled};
use crate::write;

/// What a manager is to do with an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It owns the object: act.
    Mine,
    /// It should own the object: write its name first.
    Claim,
    /// Somebody else does.
    NotMine,
}

/// What this manager is to do with the object, or with the place of one that does not exist yet.
pub fn verdict(observed: &Observed, key: &Key, now: Timestamp) -> Verdict {
    let me = observed.this_node.name.as_str();
    let Some((owner, preferred)) = owner_and_preferred(observed, key) else {
        return verdict_missing(observed, key, now);
    };
    if desired_owner(observed, key, owner, preferred, now) != Some(me) {
        Verdict::NotMine
    } else if owner == me {
        Verdict::Mine
    } else {
        Verdict::Claim
    }
}

/// Objects that somebody has to make: each node its own, settings the one who would own them.
fn verdict_missing(observed: &Observed, key: &Key, now: Timestamp) -> Verdict {
    let me = observed.this_node.name.as_str();
    let mine = match key.kind {
        Kind::Node | Kind::InstanceManager => key.name == me,
        Kind::Setting => desired_owner(observed, key, "", None, now) == Some(me),
        _ => false,
    };
    if mine { Verdict::Mine } else { Verdict::NotMine }
}

/// The rules, in their order.
fn desired_owner<'a>(
    observed: &'a Observed,
    key: &Key,
    owner: &'a str,
    preferred: Option<&'a str>,
    now: Timestamp,
) -> Option<&'a str> {
    if let Some(node) = preferred.filter(|node| observed.is_alive(node, now)) {
        return Some(node);
    }
    if observed.is_alive(owner, now) {
        return Some(owner);
    }
    rendezvous(observed.live_nodes(now), &[key.kind.as_str(), &key.name])
}

fn owner_and_preferred<'a>(observed: &'a Observed, key: &Key) -> Option<(&'a str, Option<&'a str>)> {
    let name = key.name.as_str();
    match key.kind {
        Kind::Volume => observed.volumes.get(name).map(|o| (o.owner(), o.node())),
        Kind::VolumeAttachment => {
            let attach_node = observed.volumes.get(name).and_then(Tabled::node);
            observed.attachments.get(name).map(|o| (o.owner(), attach_node))
        }
        Kind::Engine => observed.engines.get(name).map(|o| (o.owner(), o.node())),
        Kind::Replica => observed.replicas.get(name).map(|o| (o.owner(), o.node())),
        Kind::Node => observed.nodes.get_key(name).map(|(own, o)| (o.owner(), Some(own))),
        Kind::InstanceManager => observed.instance_managers.get(name).map(|o| (o.owner(), o.node())),
        Kind::Setting => observed.settings.get(name).map(|o| (o.owner(), None)),
    }
}

/// The write that makes this manager the owner.
pub(crate) fn claim(observed: &Observed, key: &Key) -> Vec<Action> {
    let me = observed.this_node.name.as_str();
    macro_rules! claim_in {
        ($table:ident) => {
            observed.$table.get(&key.name).map(|old| {
                let mut new = old.clone();
                new.status.get_or_insert_default().owner_id = me.to_owned();
                write::patches(old, &new)
            })
        };
    }
    let actions = match key.kind {
        Kind::Volume => claim_in!(volumes),
        Kind::VolumeAttachment => claim_in!(attachments),
        Kind::Engine => claim_in!(engines),
        Kind::Replica => claim_in!(replicas),
        Kind::Node => claim_in!(nodes),
        Kind::InstanceManager => claim_in!(instance_managers),
        Kind::Setting => claim_in!(settings),
    };
    actions.unwrap_or_default()
}

/// When the next lease runs out, if none is renewed: the time at which every plan may change.
pub fn next_expiry(observed: &Observed, now: Timestamp) -> Option<Timestamp> {
    observed.leases.values().map(|lease| lease.expires_at()).filter(|at| *at > now).min()
}
