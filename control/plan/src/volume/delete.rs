//! The end of a volume: refused while somebody wants it attached; then the state `deleting`, which is final; then the
//! copies with their data; then the object itself.
//!
//! *Invariant.* Data goes only after `deleting` has been written, under the version that showed the volume detached:
//! a ticket that came in between makes that write fail.

use addax_api::condition;
use addax_api::volume::{CONDITION_DELETION_BLOCKED, VolumeState};

use super::Pass;
use crate::action::Action;
use crate::observed::Tabled;
use crate::write;

/// Goes on with the deletion. False while the volume must go on living.
pub(super) fn step(pass: &mut Pass<'_>) -> bool {
    if pass.state() != VolumeState::Deleting {
        if let Some(message) = blocked(pass) {
            pass.set_condition(CONDITION_DELETION_BLOCKED, true, "Attached", &message);
            return false;
        }
        let status = pass.status();
        status.state = VolumeState::Deleting;
        status.current_node_id = String::new();
        status.endpoint = None;
        condition::remove(&mut status.conditions, CONDITION_DELETION_BLOCKED);
        return true;
    }
    let mut left = Vec::new();
    for replica in pass.observed.replicas.of_volume(pass.name) {
        left.push(replica.reference().name);
        if !replica.is_deleting() {
            pass.actions.push(Action::Delete { object: replica.reference() });
        }
    }
    if let Some(attachment) = pass.observed.attachments.get(pass.name).filter(|attachment| !attachment.is_deleting()) {
        pass.actions.push(Action::Delete { object: attachment.reference() });
    }
    if left.is_empty() {
        write::release(&mut pass.new.metadata);
    } else {
        let message = format!("waiting for the copies {} to be removed", left.join(", "));
        pass.set_condition(CONDITION_DELETION_BLOCKED, true, "RemovingCopies", &message);
    }
    true
}

/// Why the deletion has to wait.
fn blocked(pass: &Pass<'_>) -> Option<String> {
    let attachment = pass.observed.attachments.get(pass.name);
    let tickets: Vec<&str> = attachment.into_iter().flat_map(|a| a.spec.tickets.keys()).map(String::as_str).collect();
    let node = pass.old.spec.node_id.as_str();
    if !node.is_empty() && !tickets.is_empty() {
        let tickets = tickets.join(", ");
        return Some(format!("the volume is attached to node {node} for ticket {tickets}: detach it first"));
    }
    if !node.is_empty() || pass.engine.is_some() {
        return Some("the volume is being detached".to_owned());
    }
    None
}
