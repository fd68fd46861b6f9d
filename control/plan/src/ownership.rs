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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::build::{at, node, observed, replica, setting, volume};

    const NODES: [&str; 3] = ["n1", "n2", "n3"];

    fn seen() -> Observed {
        NODES.iter().fold(observed(), |seen, name| seen.with(node(name)))
    }

    /// Whether each node acts on the object.
    fn verdicts(seen: &Observed, key: &Key) -> Vec<Verdict> {
        NODES.iter().map(|name| verdict(&seen.clone().me(name), key, at(0))).collect()
    }

    fn owned(seen: &Observed, key: &Key, node: &str) -> Observed {
        seen.apply(&claim(&seen.clone().me(node), key))
    }

    #[test]
    fn the_attach_node_takes_over_and_keeps_control_after_the_detachment() {
        let key = Key::new(Kind::Volume, "v");
        let mut seen = owned(&seen().with(volume("v")), &key, "n1");
        assert_eq!(verdicts(&seen, &key), [Verdict::Mine, Verdict::NotMine, Verdict::NotMine]);
        let mut object = seen.volumes.get("v").unwrap().clone();
        object.spec.node_id = "n2".to_owned();
        seen.volumes.put(std::sync::Arc::new(object.clone()));
        assert_eq!(verdicts(&seen, &key), [Verdict::NotMine, Verdict::Claim, Verdict::NotMine]);
        let mut seen = owned(&seen, &key, "n2");
        object = seen.volumes.get("v").unwrap().clone();
        object.spec.node_id = String::new();
        seen.volumes.put(std::sync::Arc::new(object));
        assert_eq!(verdicts(&seen, &key), [Verdict::NotMine, Verdict::Mine, Verdict::NotMine]);
    }

    #[test]
    fn of_a_dead_owner_exactly_one_successor_claims() {
        for name in ["a", "b", "c", "d", "e"] {
            let key = Key::new(Kind::Replica, name);
            let seen = seen().with(replica(name, "v").on("n3", "d"));
            let seen = owned(&seen, &key, "n3").with(node("n3").dead());
            let claims = verdicts(&seen, &key).into_iter().filter(|verdict| *verdict == Verdict::Claim);
            assert_eq!(claims.count(), 1);
            let back = seen.with(node("n3"));
            assert_eq!(verdicts(&back, &key), [Verdict::NotMine, Verdict::NotMine, Verdict::Mine]);
        }
    }

    #[test]
    fn what_does_not_exist_is_made_by_one() {
        let own = Key::new(Kind::Node, "n2");
        let none = observed().with(node("n1"));
        assert_eq!(verdict(&none.clone().me("n2"), &own, at(0)), Verdict::Mine);
        assert_eq!(verdict(&none, &own, at(0)), Verdict::NotMine);
        let key = Key::new(Kind::Setting, "default-replica-count");
        let makers = verdicts(&seen(), &key).into_iter().filter(|verdict| *verdict == Verdict::Mine);
        assert_eq!(makers.count(), 1);
        assert_eq!(verdict(&seen().with(volume("v")), &Key::new(Kind::Volume, "w"), at(0)), Verdict::NotMine);
        let kept = owned(&seen().with(setting("default-replica-count", "2")), &key, "n2");
        assert_eq!(verdicts(&kept, &key)[1], Verdict::Mine);
    }

    #[test]
    fn the_next_expiry_is_the_earliest_to_come() {
        let seen = seen().with(node("n3").dead());
        let expiry = next_expiry(&seen, at(0)).unwrap();
        assert_eq!(Some(expiry), seen.leases.get("n1").map(|lease| lease.expires_at()));
        assert_eq!(next_expiry(&seen, expiry), None);
    }
}
