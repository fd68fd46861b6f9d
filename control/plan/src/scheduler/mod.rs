//! Placement: on which node and disk a copy goes, and why not on the others.
//!
//! *Flow.* Every disk of every node is a candidate. `filter` refuses candidates, each refusal with its reason;
//! `rank` chooses among the rest: a node without a copy of the volume before one with, then the emptier node, then
//! the emptier disk, and among equals a hash of the volume's name, so that volumes spread.
//!
//! *Invariants.* A copy is placed only where, after it, the disk keeps its share of free space and is not promised
//! beyond the limit. What is placed in one pass counts for the next placement of the same pass.
//!
//! *When things fail.* The answer to "no place" is [`NoPlace`]: one typed reason per disk, and one sentence of them all.

mod filter;
mod rank;
mod refusal;

use std::collections::BTreeSet;

use addax_api::setting::Settings;
use jiff::Timestamp;

use crate::observed::{Observed, Tabled};

pub use refusal::{NoPlace, Refusal, Refused};

/// What a copy needs.
#[derive(Clone, Debug)]
pub struct Request<'a> {
    /// The volume's name.
    pub volume: &'a str,
    /// Bytes.
    pub size: i64,
    /// Tags that the node must have.
    pub node_selector: &'a [String],
    /// Tags that the disk must have.
    pub disk_selector: &'a [String],
    /// Whether a node that holds a copy already will do when there is no other.
    pub soft_anti_affinity: bool,
    /// The nodes that hold a copy already.
    pub used_nodes: BTreeSet<String>,
}

/// A place for a copy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// The node.
    pub node: String,
    /// The disk's name on the node.
    pub disk: String,
}

/// A disk that is asked for room. Sizes are in bytes.
#[derive(Clone, Debug)]
pub(crate) struct Candidate<'a> {
    pub(crate) node: &'a str,
    pub(crate) disk: &'a str,
    pub(crate) maximum: i64,
    pub(crate) available: i64,
    /// What is not for copies: the administrator's reserve and lvols of others.
    pub(crate) reserved: i64,
    pub(crate) scheduled: i64,
    /// Whether no more may be promised than there is.
    pub(crate) no_overcommit: bool,
}

/// Placements of one pass: it knows what it has placed already.
#[derive(Debug)]
pub struct Scheduler<'a> {
    observed: &'a Observed,
    settings: &'a Settings,
    now: Timestamp,
    placed: Vec<(Place, i64)>,
}

impl<'a> Scheduler<'a> {
    /// Starts with nothing placed beyond what the snapshot holds.
    pub fn new(observed: &'a Observed, settings: &'a Settings, now: Timestamp) -> Self {
        Self { observed, settings, now, placed: Vec::new() }
    }

    /// Finds a place for one copy and counts it as taken.
    ///
    /// # Errors
    /// Why each disk was refused.
    pub fn place(&mut self, request: &Request<'_>) -> Result<Place, NoPlace> {
        let mut refusals = Vec::new();
        let mut fit = Vec::new();
        for (node, object) in self.observed.nodes.names().filter_map(|name| self.observed.nodes.get_key(name)) {
            if let Err(reason) = filter::node(self, request, node, object) {
                refusals.push(Refused::node(node, reason));
                continue;
            }
            for (disk, spec) in &object.spec.disks {
                let status = object.status.as_ref().and_then(|status| status.disk_status.get(disk));
                match filter::disk(self, request, node, disk, spec, status) {
                    Ok(candidate) => fit.push(candidate),
                    Err(reason) => refusals.push(Refused::disk(node, disk, reason)),
                }
            }
        }
        let Some(place) = rank::best(self, request, &fit) else {
            return Err(NoPlace { size: request.size, refusals });
        };
        self.placed.push((place.clone(), request.size));
        Ok(place)
    }

    /// Bytes of all copies placed on the disk: those of the snapshot, and those of this pass.
    fn scheduled(&self, node: &str, disk: &str) -> i64 {
        let status = self.observed.nodes.get(node).and_then(|node| node.status.as_ref()?.disk_status.get(disk));
        let cluster = status.map_or(0, |status| status.cluster_size);
        let present = scheduled_replicas(self.observed, node, disk, cluster).map(|(_, size)| size);
        let placed =
            self.placed.iter().filter(|(place, _)| place.node == node && place.disk == disk).map(|(_, size)| *size);
        present.chain(placed).fold(0_i64, i64::saturating_add)
    }
}

/// The copies placed on a disk, with the bytes that they may take: whole clusters. One that is being deleted counts until
/// its data is gone.
pub fn scheduled_replicas<'a>(
    observed: &'a Observed,
    node: &str,
    disk: &'a str,
    cluster: i64,
) -> impl Iterator<Item = (String, i64)> + use<'a> {
    observed
        .replicas
        .on_node(node)
        .filter(move |replica| replica.spec.disk_id == disk)
        .map(move |replica| (replica.reference().name, whole_clusters(replica.spec.size, cluster)))
}

/// A size in whole clusters; 0 for a disk whose clusters are not known.
fn whole_clusters(size: i64, cluster: i64) -> i64 {
    let cluster = cluster.max(1);
    size.saturating_add(cluster - 1) / cluster * cluster
}

#[cfg(test)]
mod tests;
