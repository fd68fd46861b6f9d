//! Which nodes and disks can take a copy at all.

use addax_api::Node;
use addax_api::condition;
use addax_api::node::{CONDITION_READY, CONDITION_SCHEDULABLE, DiskSpec, DiskStatus};

use super::{Candidate, Refusal, Request, Scheduler, whole_clusters};
use crate::observed::Tabled;

/// Whether any disk of the node comes into question.
pub(super) fn node(scheduler: &Scheduler<'_>, request: &Request<'_>, name: &str, node: &Node) -> Result<(), Refusal> {
    let conditions = node.status.as_ref().map_or(&[][..], |status| &status.conditions);
    let ready = condition::is_true(conditions, CONDITION_READY);
    if node.is_deleting() {
        return Err(Refusal::NodeDeleting);
    }
    if !ready || !scheduler.observed.is_alive(name, scheduler.now) {
        return Err(Refusal::NodeNotReady);
    }
    if !node.spec.allow_scheduling {
        return Err(Refusal::NodeSchedulingDisabled);
    }
    let missing = missing_tags(request.node_selector, &node.spec.tags);
    if !missing.is_empty() {
        return Err(Refusal::NodeTagsMissing(missing));
    }
    if request.used_nodes.contains(name) && !request.soft_anti_affinity {
        return Err(Refusal::NodeHoldsCopy);
    }
    if node.spec.disks.is_empty() {
        return Err(Refusal::NoDisk);
    }
    Ok(())
}

/// Whether the disk has room.
pub(super) fn disk<'a>(
    scheduler: &Scheduler<'_>,
    request: &Request<'_>,
    node: &'a str,
    name: &'a str,
    spec: &DiskSpec,
    status: Option<&DiskStatus>,
) -> Result<Candidate<'a>, Refusal> {
    if !spec.allow_scheduling {
        return Err(Refusal::DiskSchedulingDisabled);
    }
    let Some(status) = status else {
        return Err(Refusal::DiskNotReady("the node has not reported it".to_owned()));
    };
    if !condition::is_true(&status.conditions, CONDITION_SCHEDULABLE) {
        let why = condition::get(&status.conditions, CONDITION_SCHEDULABLE);
        let why = why.map_or("the node has not checked it", |condition| condition.message.as_str());
        return Err(Refusal::DiskNotReady(why.to_owned()));
    }
    let missing = missing_tags(request.disk_selector, &spec.tags);
    if !missing.is_empty() {
        return Err(Refusal::DiskTagsMissing(missing));
    }
    let candidate = Candidate {
        node,
        disk: name,
        maximum: status.storage_maximum,
        available: status.storage_available,
        reserved: spec.storage_reserved.saturating_add(status.storage_unmanaged),
        scheduled: scheduler.scheduled(node, name),
        no_overcommit: status.no_overcommit,
    };
    capacity(scheduler, whole_clusters(request.size, status.cluster_size), &candidate)?;
    Ok(candidate)
}

/// `available − need > maximum × minimal %`, and `need + scheduled ≤ (maximum − reserved) × over-provisioning %`.
fn capacity(scheduler: &Scheduler<'_>, need: i64, disk: &Candidate<'_>) -> Result<(), Refusal> {
    let settings = scheduler.settings;
    let keep_free = percent(disk.maximum, settings.storage_minimal_available_percentage);
    if disk.available.saturating_sub(need) <= keep_free {
        return Err(Refusal::DiskFull { available: disk.available, keep_free });
    }
    let usable = disk.maximum.saturating_sub(disk.reserved).max(0);
    let most = if disk.no_overcommit { 100 } else { i64::MAX };
    let limit = percent(usable, settings.storage_over_provisioning_percentage.min(most));
    if need.saturating_add(disk.scheduled) > limit {
        return Err(Refusal::DiskOverCommitted { scheduled: disk.scheduled, limit });
    }
    Ok(())
}

fn percent(of: i64, percent: i64) -> i64 {
    i64::try_from(i128::from(of) * i128::from(percent) / 100).unwrap_or(i64::MAX)
}

fn missing_tags(wanted: &[String], present: &[String]) -> Vec<String> {
    wanted.iter().filter(|tag| !present.contains(tag)).cloned().collect()
}
