//! Which plans a change concerns: from what has changed to the objects to look at again.
//!
//! The manager asks here after every watch event and every word of an agent, so that nothing has to be polled.

use std::collections::BTreeSet;

use addax_api::name::engine_name;
use addax_api::node::{CONDITION_READY, DISK_DUPLICATE};
use addax_api::setting::SETTINGS;
use addax_api::{Node, condition};

use crate::action::{Key, Kind};
use crate::observed::{Observed, Tabled};

/// The objects that this manager has to make if they are missing; plan these once at the start.
pub fn bootstrap(observed: &Observed) -> Vec<Key> {
    let me = observed.this_node.name.as_str();
    let own = [Key::new(Kind::Node, me), Key::new(Kind::InstanceManager, me)];
    own.into_iter().chain(SETTINGS.iter().map(|info| Key::new(Kind::Setting, info.name))).collect()
}

/// Every object there is, and those to be made: what to plan at the start, when a lease has run out or come back, and
/// when a setting has changed.
pub fn everything(observed: &Observed) -> BTreeSet<Key> {
    let mut keys: BTreeSet<Key> = bootstrap(observed).into_iter().collect();
    let mut add = |kind: Kind, names: &mut dyn Iterator<Item = &str>| {
        keys.extend(names.map(|name| Key::new(kind, name)));
    };
    add(Kind::Volume, &mut observed.volumes.names());
    add(Kind::VolumeAttachment, &mut observed.attachments.names());
    add(Kind::Engine, &mut observed.engines.names());
    add(Kind::Replica, &mut observed.replicas.names());
    add(Kind::Node, &mut observed.nodes.names());
    add(Kind::InstanceManager, &mut observed.instance_managers.names());
    add(Kind::Setting, &mut observed.settings.names());
    keys
}

/// The plans that a change of this object concerns. Ask with the snapshot before and the one after the change: an
/// object that is gone no longer says what it belonged to.
pub fn of_object(observed: &Observed, key: &Key) -> BTreeSet<Key> {
    let name = key.name.as_str();
    let mut keys = BTreeSet::from([key.clone()]);
    match key.kind {
        Kind::Volume => keys.extend(of_volume(observed, name)),
        Kind::VolumeAttachment => {
            keys.insert(Key::new(Kind::Volume, name));
        }
        Kind::Engine => {
            if let Some(engine) = observed.engines.get(name) {
                keys.insert(Key::new(Kind::Volume, &engine.spec.volume_name));
                keys.insert(Key::new(Kind::VolumeAttachment, &engine.spec.volume_name));
                keys.insert(Key::new(Kind::InstanceManager, &engine.spec.node_id));
            }
        }
        Kind::Replica => {
            if let Some(replica) = observed.replicas.get(name) {
                keys.insert(Key::new(Kind::Volume, &replica.spec.volume_name));
                keys.insert(Key::new(Kind::Engine, &engine_name(&replica.spec.volume_name)));
                keys.extend(replica.node().map(|node| Key::new(Kind::Node, node)));
            }
        }
        // A node's readiness, tags and disks decide placements, its agent's address goes into engines.
        Kind::Node => {
            keys.extend(observed.volumes.names().map(|volume| Key::new(Kind::Volume, volume)));
            keys.extend(observed.attachments.names().map(|volume| Key::new(Kind::VolumeAttachment, volume)));
            keys.extend(waiting_for_disks(observed));
        }
        Kind::InstanceManager => {}
        Kind::Setting => keys.extend(everything(observed)),
    }
    keys
}

/// The nodes that may not use a disk because another node has it.
fn waiting_for_disks(observed: &Observed) -> impl Iterator<Item = Key> {
    let waits = |node: &&Node| {
        let mut disks = node.status.iter().flat_map(|status| status.disk_status.values());
        disks.any(|disk| condition::get(&disk.conditions, CONDITION_READY).is_some_and(|c| c.reason == DISK_DUPLICATE))
    };
    observed.nodes.iter().filter(waits).map(|node| Key::new(Kind::Node, &node.reference().name))
}

fn of_volume(observed: &Observed, volume: &str) -> BTreeSet<Key> {
    let replicas =
        observed.replicas.of_volume(volume).map(|replica| Key::new(Kind::Replica, &replica.reference().name));
    let own = [Key::new(Kind::VolumeAttachment, volume), Key::new(Kind::Engine, &engine_name(volume))];
    own.into_iter().chain(replicas).collect()
}

/// The plans that anything an agent has told concerns, beside those of [`of_agent_instance`]: its stream opened or
/// closed, its data plane was started again, a disk changed.
pub fn of_agent(observed: &Observed, node: &str) -> BTreeSet<Key> {
    let replicas = observed.replicas.on_node(node).map(|replica| Key::new(Kind::Replica, &replica.reference().name));
    let engines = observed.engines.on_node(node).map(|engine| Key::new(Kind::Engine, &engine.reference().name));
    let own = [Key::new(Kind::Node, node), Key::new(Kind::InstanceManager, node)];
    own.into_iter().chain(replicas).chain(engines).collect()
}

/// The plans that a change of one replica or of one volume's engine on an agent concerns.
pub fn of_agent_instance(node: &str, replica: Option<&str>, volume: Option<&str>) -> BTreeSet<Key> {
    let replica = replica.map(|name| Key::new(Kind::Replica, name));
    let engine = volume.map(|name| Key::new(Kind::Engine, &engine_name(name)));
    let own = Key::new(Kind::InstanceManager, node);
    replica.into_iter().chain(engine).chain([own]).collect()
}
