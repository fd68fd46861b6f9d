//! Moving copies off a disk: which ones are to go, and how a detached volume gets the engine that the move needs.
//!
//! *Rules.* A copy on a disk whose eviction is asked for counts as one that the volume must do without: `replenish` makes
//! and rebuilds another one elsewhere first, and removes this one only when the volume is complete without it. A volume
//! that nobody wants attached is attached for the move by a ticket of this module's own, of the lowest priority, which
//! goes as soon as somebody else has one, and when nothing is left to move.
//!
//! *Invariant.* No copy goes before the volume has as many others in sync as it wants.

use std::collections::BTreeMap;

use addax_api::volume::{VolumeConfig, VolumeState};
use addax_api::volume_attachment::{Ticket, TicketParameters, TicketType};
use addax_api::{Replica, ResourceExt};

use crate::observed::{Observed, Tabled};
use crate::volume::Pass;
use crate::write;

/// The name of this module's ticket.
pub const TICKET: &str = "disk-eviction";

/// Whether the copy is on a disk that is to be emptied.
pub(crate) fn is_evicting(observed: &Observed, replica: &Replica) -> bool {
    let node = observed.nodes.get(&replica.spec.node_id);
    let disk = node.and_then(|node| node.spec.disks.get(&replica.spec.disk_id));
    disk.is_some_and(|disk| disk.eviction_requested)
}

/// The copies in sync that stay.
pub(crate) fn staying<'a>(pass: &Pass<'_>, config: &'a VolumeConfig) -> Vec<&'a String> {
    let leaves = |name: &String| pass.replicas.get(name).is_some_and(|copy| is_evicting(pass.observed, copy));
    config.in_sync.iter().filter(|name| !leaves(name)).collect()
}

/// Puts this module's ticket in or takes it away.
pub(crate) fn step(pass: &mut Pass<'_>, config: &VolumeConfig) {
    let Some(old) = pass.observed.attachments.get(pass.name).filter(|attachment| !attachment.is_deleting()) else {
        return;
    };
    let others = old.spec.tickets.keys().any(|ticket| ticket != TICKET);
    let wanted = !others && !pass.old.is_deleting() && pass.state() != VolumeState::Deleting;
    let present = old.spec.tickets.get(TICKET);
    let node = match wanted && has_something_to_move(pass) {
        true => {
            present.map(|ticket| ticket.node_id.clone()).filter(|node| pass.is_node_up(node)).or(place(pass, config))
        }
        false => None,
    };
    let ticket = node.map(|node_id| Ticket {
        type_: TicketType::OfflineRebuild,
        node_id,
        parameters: TicketParameters::default(),
    });
    if ticket.as_ref() == present {
        return;
    }
    let mut new = old.clone();
    let tickets: BTreeMap<String, Ticket> = ticket.map(|ticket| (TICKET.to_owned(), ticket)).into_iter().collect();
    new.spec.tickets.retain(|name, _| name != TICKET);
    new.spec.tickets.extend(tickets);
    pass.actions.extend(write::patches(old, &new));
}

fn has_something_to_move(pass: &Pass<'_>) -> bool {
    pass.replicas.values().any(|copy| !copy.is_deleting() && is_evicting(pass.observed, copy))
}

/// Where to attach for the move: beside a copy that stays, else beside any copy.
fn place(pass: &Pass<'_>, config: &VolumeConfig) -> Option<String> {
    let copies = pass.replicas.values().filter(|copy| config.is_in_sync(&copy.name_any()));
    let up = copies.filter(|copy| pass.is_node_up(&copy.spec.node_id));
    let best = up.min_by_key(|copy| (is_evicting(pass.observed, copy), copy.name_any()));
    best.map(|copy| copy.spec.node_id.clone())
}
