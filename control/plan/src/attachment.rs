//! VolumeAttachment: of several tickets for one volume, which decides where it is attached.
//!
//! *Rules.* A volume that is to be attached stays where it is as long as any ticket wants it there. Only when it is
//! detached is a place chosen: the ticket with the highest priority, of equals the smallest name. So a volume never
//! moves under a workload: the old ticket goes first, the volume is detached in full, then the next ticket wins.
//!
//! *Invariant.* The choice is written to `Volume.spec.nodeID` under the volume's resourceVersion.
//!
//! *When things fail.* Every ticket that is not satisfied says why in its status.

use std::collections::BTreeMap;

use addax_api::volume::VolumeState;
use addax_api::volume_attachment::{Ticket, TicketStatus};
use addax_api::{Volume, VolumeAttachment};
use jiff::Timestamp;

use crate::action::Action;
use crate::observed::{Observed, Tabled};
use crate::volume::held;
use crate::write;

/// What is to be done for an attachment now.
pub fn plan(observed: &Observed, name: &str, now: Timestamp) -> Vec<Action> {
    let (Some(old), Some(volume)) = (observed.attachments.get(name), observed.volumes.get(name)) else {
        return Vec::new();
    };
    let node = desired_node(observed, volume, old, now);
    let mut attached = volume.clone();
    attached.spec.node_id = node.to_owned();
    let mut new = old.clone();
    let tickets: BTreeMap<String, TicketStatus> = old
        .spec
        .tickets
        .iter()
        .map(|(id, ticket)| (id.clone(), judge(observed, volume, old, node, ticket, now)))
        .collect();
    new.status.get_or_insert_default().tickets = tickets;
    let mut actions = write::patches(volume, &attached);
    actions.extend(write::patches(old, &new));
    actions
}

/// Where the volume is to be attached; empty for nowhere.
fn desired_node<'a>(
    observed: &Observed,
    volume: &'a Volume,
    attachment: &'a VolumeAttachment,
    now: Timestamp,
) -> &'a str {
    let current = volume.spec.node_id.as_str();
    if !current.is_empty() {
        let wanted = attachment.spec.tickets.values().any(|ticket| ticket.node_id == current);
        return if wanted { current } else { "" };
    }
    if !can_attach(observed, volume) {
        return "";
    }
    let able = |node: &str| observed.nodes.get(node).is_some() && observed.is_alive(node, now);
    let known = attachment.spec.tickets.iter().filter(|(_, ticket)| able(&ticket.node_id));
    // Of equal priorities the smallest name: the maximum keeps the last of equals, so names are compared in reverse.
    let winner = known.max_by(|(a_id, a), (b_id, b)| {
        let by_priority = a.type_.priority().cmp(&b.type_.priority());
        by_priority.then_with(|| b_id.cmp(a_id))
    });
    winner.map_or("", |(_, ticket)| ticket.node_id.as_str())
}

/// Only what is detached in full can be attached.
fn can_attach(observed: &Observed, volume: &Volume) -> bool {
    let detached = state(volume) == VolumeState::Detached && held(volume).is_none();
    detached && !volume.is_deleting() && observed.engine_of(&volume.reference().name).is_none()
}

fn state(volume: &Volume) -> VolumeState {
    volume.status.as_ref().map_or(VolumeState::Creating, |status| status.state)
}

fn judge(
    observed: &Observed,
    volume: &Volume,
    attachment: &VolumeAttachment,
    node: &str,
    ticket: &Ticket,
    now: Timestamp,
) -> TicketStatus {
    let refused = |message: String| TicketStatus { satisfied: false, message };
    let wanted = ticket.node_id.as_str();
    if observed.nodes.get(wanted).is_none() {
        return refused(format!("there is no node {wanted}"));
    }
    if !node.is_empty() && node != wanted {
        let holders: Vec<&str> = attachment
            .spec
            .tickets
            .iter()
            .filter(|(_, other)| other.node_id == node)
            .map(|(id, _)| id.as_str())
            .collect();
        return refused(format!(
            "the volume is attached to node {node} for ticket {}: that one must go first",
            holders.join(", ")
        ));
    }
    if node.is_empty() && !observed.is_alive(wanted, now) {
        return refused(format!("node {wanted} gives no sign of life"));
    }
    if let Some(why) = held(volume) {
        return refused(format!("the volume is held: {why}"));
    }
    let current = volume.status.as_ref().map_or("", |status| status.current_node_id.as_str());
    match state(volume) {
        VolumeState::Attached if node == wanted && current == wanted => {
            TicketStatus { satisfied: true, message: String::new() }
        }
        VolumeState::Creating => refused("the volume is still being created".to_owned()),
        VolumeState::Deleting => refused("the volume is being deleted".to_owned()),
        _ if volume.is_deleting() && node.is_empty() => refused("the volume is being deleted".to_owned()),
        VolumeState::Detaching => refused("the volume is still being detached".to_owned()),
        _ => refused("the volume is being attached".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::build::{at, attachment, engine, node, observed, volume};
    use addax_api::volume_attachment::TicketType;
    use proptest::prelude::*;

    fn seen() -> Observed {
        observed().with(node("n1")).with(node("n2"))
    }

    fn chosen(observed: &Observed) -> String {
        let after = observed.clone().apply(&plan(observed, "v", at(0)));
        after.volumes.get("v").unwrap().spec.node_id.clone()
    }

    fn message(observed: &Observed, ticket: &str) -> String {
        let after = observed.clone().apply(&plan(observed, "v", at(0)));
        after.attachments.get("v").unwrap().status.as_ref().unwrap().tickets[ticket].message.clone()
    }

    fn detached() -> crate::build::VolumeBuilder {
        volume("v").in_sync(&["a"]).state(VolumeState::Detached)
    }

    #[test]
    fn the_highest_priority_wins_then_the_smallest_name() {
        let tickets = attachment("v")
            .ticket("b", TicketType::CsiAttacher, "n1")
            .ticket("c", TicketType::Api, "n2")
            .ticket("d", TicketType::Api, "n1");
        let seen = seen().with(detached()).with(tickets);
        assert_eq!(chosen(&seen), "n2");
        assert_eq!(
            chosen(&observed().with(node("n2")).with(detached()).with(attachment("v").ticket(
                "x",
                TicketType::Api,
                "n9"
            ))),
            ""
        );
    }

    #[test]
    fn a_dead_node_wins_nothing() {
        let seen =
            seen().with(detached()).with(node("n2").dead()).with(attachment("v").ticket("a", TicketType::Api, "n2"));
        assert_eq!(chosen(&seen), "");
        assert_eq!(message(&seen, "a"), "node n2 gives no sign of life");
        let other =
            seen.with(attachment("v").ticket("a", TicketType::Api, "n2").ticket("b", TicketType::CsiAttacher, "n1"));
        assert_eq!(chosen(&other), "n1");
    }

    #[test]
    fn an_attached_volume_stays_while_a_ticket_wants_it_there() {
        let both = attachment("v").ticket("a", TicketType::Api, "n2").ticket("z", TicketType::CsiAttacher, "n1");
        let seen = seen().with(volume("v").in_sync(&["a"]).attached_to("n1")).with(both);
        assert_eq!(chosen(&seen), "n1");
        assert!(message(&seen, "a").contains("attached to node n1 for ticket z"), "{}", message(&seen, "a"));
        assert_eq!(message(&seen, "z"), "");
        let moved = seen.with(attachment("v").ticket("a", TicketType::Api, "n2"));
        assert_eq!(chosen(&moved), "");
    }

    #[test]
    fn nothing_is_attached_before_the_volume_is_detached_in_full() {
        let wish = || attachment("v").ticket("a", TicketType::Api, "n2");
        let creating = seen().with(volume("v")).with(wish());
        assert_eq!(chosen(&creating), "");
        assert!(message(&creating, "a").contains("being created"));
        let engine_left = seen().with(detached()).with(wish()).with(engine("v").on("n1"));
        assert_eq!(chosen(&engine_left), "");
        let deleting = seen().with(detached().deleting()).with(wish());
        assert_eq!(chosen(&deleting), "");
        assert!(message(&deleting, "a").contains("being deleted"));
    }

    #[test]
    fn at_rest_nothing_is_asked() {
        let seen = seen().with(detached()).with(attachment("v").ticket("a", TicketType::Api, "n2"));
        let seen = seen.clone().apply(&plan(&seen, "v", at(0)));
        assert_eq!(plan(&seen, "v", at(1)), []);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// Whatever the tickets, the winner is theirs, and none outranks it.
        #[test]
        fn no_ticket_outranks_the_winner(tickets in proptest::collection::btree_map("[a-d]{1,2}", (0..3_usize, 1..3_usize), 1..6)) {
            let types = [TicketType::Api, TicketType::CsiAttacher, TicketType::OfflineRebuild];
            let mut wishes = attachment("v");
            for (id, (type_, node)) in &tickets {
                wishes = wishes.ticket(id, types[*type_], &format!("n{node}"));
            }
            let best = tickets.iter().map(|(id, (type_, node))| (std::cmp::Reverse(types[*type_].priority()), id, node)).min().unwrap();
            prop_assert_eq!(chosen(&seen().with(detached()).with(wishes)), format!("n{}", best.2));
        }
    }
}
