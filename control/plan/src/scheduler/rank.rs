//! Which of the disks that can take a copy gets it.

use super::{Candidate, Place, Request, Scheduler};
use crate::hash::hash;

/// The best place, or none if there is no candidate.
pub(super) fn best(scheduler: &Scheduler<'_>, request: &Request<'_>, fit: &[Candidate<'_>]) -> Option<Place> {
    let best = fit.iter().min_by_key(|disk| {
        let shared = request.used_nodes.contains(disk.node);
        let node = utilisation(request.size, &of_node(scheduler, disk.node));
        let own = utilisation(request.size, &[(disk.scheduled, disk.maximum)]);
        (shared, node, own, hash(&[request.volume, disk.node, disk.disk]))
    })?;
    Some(Place { node: best.node.to_owned(), disk: best.disk.to_owned() })
}

/// The scheduled and the whole size of every disk of a node.
fn of_node(scheduler: &Scheduler<'_>, node: &str) -> Vec<(i64, i64)> {
    let status = scheduler.observed.nodes.get(node).and_then(|node| node.status.as_ref());
    let disks = status.into_iter().flat_map(|status| &status.disk_status);
    disks.map(|(name, disk)| (scheduler.scheduled(node, name), disk.storage_maximum)).collect()
}

/// How much would be promised with one copy more, in thousandths of the capacity.
fn utilisation(need: i64, disks: &[(i64, i64)]) -> i128 {
    let scheduled: i128 = disks.iter().map(|(scheduled, _)| i128::from(*scheduled)).sum();
    let maximum: i128 = disks.iter().map(|(_, maximum)| i128::from(*maximum)).sum();
    (scheduled + i128::from(need)) * 1000 / maximum.max(1)
}
