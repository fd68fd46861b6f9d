//! Whether a new volume has room, before it is declared: so a command that cannot succeed changes nothing.
//!
//! The question is answered by the scheduler itself, on the objects as they are now, so that command and controllers
//! never disagree about the rules. Between the answer and the placement the room may be taken; then the volume waits for
//! room like any that was declared without asking.

use std::collections::BTreeSet;
use std::sync::Arc;

use addax_api::setting::Settings;
use addax_api::{Node, Replica, Setting, VolumeSpec};
use addax_plan::observed::{NodeLease, Observed, Table, Tabled};
use addax_plan::scheduler::{Request, Scheduler};
use anyhow::{Result, bail};
use jiff::{SignedDuration, Timestamp};
use kube::Client;
use kube::api::ListParams;

use super::{api, api_error};

/// Refuses a volume whose copies would find no place.
///
/// # Errors
/// Why each disk was refused, or that the objects cannot be read.
pub async fn require(client: &Client, volume: &str, spec: &VolumeSpec) -> Result<()> {
    let everything = ListParams::default();
    let nodes = api::<Node>(client).list(&everything).await.map_err(api_error)?.items;
    let replicas = api::<Replica>(client).list(&everything).await.map_err(api_error)?.items;
    let settings = api::<Setting>(client).list(&everything).await.map_err(api_error)?.items;
    let now = Timestamp::now();
    let mut observed = Observed { nodes: table(nodes), replicas: table(replicas), ..Observed::default() };
    observed.settings = table(settings);
    // Whether a node lives its Ready condition tells well enough for an answer in advance.
    let lease = NodeLease { renewed_at: now, duration: SignedDuration::from_mins(1) };
    observed.leases = observed.nodes.names().map(|name| (name.to_owned(), lease.clone())).collect();
    check(&observed, &observed.settings_in_force(), volume, spec, now)
}

fn table<T: Tabled>(objects: Vec<T>) -> Table<T> {
    let mut table = Table::default();
    for object in objects {
        table.put(Arc::new(object));
    }
    table
}

/// Places all copies in thought.
fn check(observed: &Observed, settings: &Settings, volume: &str, spec: &VolumeSpec, now: Timestamp) -> Result<()> {
    let copies = spec.number_of_replicas;
    let nodes = observed.nodes.len();
    if copies as usize > nodes && !spec.replica_soft_anti_affinity {
        bail!("--replicas {copies}: at most one for each of the {nodes} nodes is allowed");
    }
    let mut scheduler = Scheduler::new(observed, settings, now);
    let mut used_nodes = BTreeSet::new();
    for copy in 1..=copies {
        let request = Request {
            volume,
            size: spec.size,
            node_selector: &spec.node_selector,
            disk_selector: &spec.disk_selector,
            soft_anti_affinity: spec.replica_soft_anti_affinity,
            used_nodes: used_nodes.clone(),
        };
        match scheduler.place(&request) {
            Ok(place) => drop(used_nodes.insert(place.node)),
            Err(why) => bail!("{volume}: copy {copy} of {copies} has no room, so nothing was declared: {why}"),
        }
    }
    Ok(())
}
