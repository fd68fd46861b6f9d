//! `addax disk ls|show|create|import|disable|enable|evict|remove`: verbs on the disks of nodes.
//!
//! Each changes `spec.disks` of a Node, as `kubectl` can as well, and waits for what the node says to it.
//!
//! *When things fail.* A disk that is refused is told with the node's reason; what was written stays, so that the node
//! uses it as soon as the reason is gone. `remove` takes it away.

use std::io::Write;
use std::time::Duration;

use addax_api::node::{CONDITION_READY, CONDITION_SCHEDULABLE, DiskSpec, DiskStatus, DiskType, RemoteNamespace};
use addax_api::{Condition, ConditionStatus, Node, Replica, condition, name};
use anyhow::{Context, Result, bail, ensure};
use clap::{Args, Subcommand};
use kube::api::{ListParams, Patch, PatchParams};
use kube::{Client, ResourceExt};
use serde::Serialize;
use serde_json::{Value, json};

use super::{api, api_error, progress, wait_until};
use crate::output::{self, Format};

#[derive(Debug, Subcommand)]
pub enum DiskVerb {
    /// List the disks of all nodes, or of one.
    #[command(alias = "list", after_help = "Example: addax disk ls --node node-1")]
    Ls {
        /// Only the disks of this node.
        #[arg(long)]
        node: Option<String>,
    },
    /// Show one disk: its conditions with their reasons, its replicas, and lvols of others.
    #[command(after_help = "Example: addax disk show node-1 disk-1")]
    Show {
        #[command(flatten)]
        disk: DiskName,
    },
    /// Add a disk and format it. A device that holds anything is refused; --force asks for its fingerprint first.
    #[command(
        alias = "add",
        after_help = "Example: addax disk create node-1 ssd --block /dev/disk/by-id/nvme-SSD_S1\n         addax disk create node-1 spare --file /var/lib/addax/spare --size 100GiB"
    )]
    Create {
        #[command(flatten)]
        disk: DiskName,
        #[command(flatten)]
        place: Place,
        /// Size of a file that is made.
        #[arg(long, value_parser = output::parse_size)]
        size: Option<i64>,
        /// Destroy what the device holds, after asking for its fingerprint.
        #[arg(long)]
        force: bool,
        /// The fingerprint, instead of being asked for it.
        #[arg(long, requires = "force", value_name = "FINGERPRINT")]
        confirm: Option<String>,
        #[command(flatten)]
        more: More,
    },
    /// Add a disk that has an lvstore already, of Addax, of SPDK, of Longhorn v2 or of Mayastor. What is in it stays.
    #[command(after_help = "Example: addax disk import node-1 old --block /dev/disk/by-id/nvme-SSD_S2")]
    Import {
        #[command(flatten)]
        disk: DiskName,
        #[command(flatten)]
        place: Place,
        #[command(flatten)]
        more: More,
    },
    /// Place no new replicas on a disk; those that are there stay.
    #[command(after_help = "Example: addax disk disable node-1 ssd")]
    Disable {
        #[command(flatten)]
        disk: DiskName,
    },
    /// Let replicas be placed on a disk again, and end its eviction.
    #[command(after_help = "Example: addax disk enable node-1 ssd")]
    Enable {
        #[command(flatten)]
        disk: DiskName,
    },
    /// Move all replicas of a disk to other disks, and place no new ones on it.
    #[command(after_help = "Example: addax disk evict node-1 ssd --timeout 3600")]
    Evict {
        #[command(flatten)]
        disk: DiskName,
        /// Do not wait until the disk is empty.
        #[arg(long)]
        no_wait: bool,
        /// Seconds to wait.
        #[arg(long, default_value_t = 600)]
        timeout: u64,
    },
    /// Forget a disk. Refused while replicas are on it; what else it holds stays.
    #[command(alias = "rm", after_help = "Example: addax disk remove node-1 ssd")]
    Remove {
        #[command(flatten)]
        disk: DiskName,
        /// Seconds to wait.
        #[arg(long, default_value_t = 60)]
        timeout: u64,
    },
}

#[derive(Debug, Args)]
pub struct DiskName {
    /// Name of the node.
    node: String,
    /// Name of the disk on that node.
    name: String,
}

#[derive(Debug, Args)]
#[group(id = "place", required = true, multiple = false)]
pub struct Place {
    /// Absolute path of a file on the node.
    #[arg(long, value_name = "PATH", group = "place")]
    file: Option<String>,
    /// Absolute path of a block device of the node, best one under /dev/disk/by-id.
    #[arg(long, value_name = "PATH", group = "place")]
    block: Option<String>,
    /// A namespace of another machine: IP:PORT/NQN, or IP:PORT/NQN/NSID.
    #[arg(long, value_name = "IP:PORT/NQN[/NSID]", group = "place", value_parser = parse_remote)]
    nvme: Option<RemoteNamespace>,
}

#[derive(Debug, Args)]
pub struct More {
    /// Tag that volumes can ask for; may be repeated.
    #[arg(long = "tag", value_name = "TAG")]
    tags: Vec<String>,
    /// Seconds to wait until the disk is ready.
    #[arg(long, default_value_t = 120)]
    timeout: u64,
}

fn parse_remote(text: &str) -> Result<RemoteNamespace, String> {
    let refuse = || format!("{text:?} is not IP:PORT/NQN or IP:PORT/NQN/NSID");
    let (address, rest) = text.split_once('/').ok_or_else(refuse)?;
    let address: std::net::SocketAddr = address.parse().map_err(|_| refuse())?;
    let (nqn, nsid) = match rest.rsplit_once('/') {
        Some((nqn, nsid)) => (nqn, nsid.parse().map_err(|_| refuse())?),
        None => (rest, 1),
    };
    if !nqn.starts_with("nqn.") || nsid == 0 || address.port() == 0 {
        return Err(refuse());
    }
    Ok(RemoteNamespace { traddr: address.ip().to_string(), trsvcid: address.port(), nqn: nqn.to_owned(), nsid })
}

impl Place {
    fn spec(self) -> Result<DiskSpec> {
        let local = |type_: DiskType, option: &str, path: String| {
            ensure!(path.starts_with('/'), "--{option} {path}: an absolute path is needed");
            Ok(DiskSpec { path, ..DiskSpec::of(type_) })
        };
        match (self.file, self.block, self.nvme) {
            (Some(path), ..) => local(DiskType::File, "file", path),
            (_, Some(path), _) => local(DiskType::Block, "block", path),
            (.., nvme) => Ok(DiskSpec { nvme, ..DiskSpec::of(DiskType::Nvme) }),
        }
    }
}

/// A disk as programs get it.
#[derive(Debug, Clone, Serialize)]
struct Disk {
    node: String,
    name: String,
    spec: DiskSpec,
    status: DiskStatus,
}

pub async fn run(client: &Client, verb: DiskVerb, format: Format, quiet: bool) -> Result<()> {
    match verb {
        DiskVerb::Ls { node } => list(client, node, format).await,
        DiskVerb::Show { disk } => show(&find(client, &disk).await?, format),
        DiskVerb::Create { disk, place, size, force, confirm, more } => {
            let mut spec = place.spec()?;
            ensure!(size.is_none() || spec.type_ == DiskType::File, "--size: only a file is made with a size");
            (spec.create, spec.size, spec.tags) = (true, size.unwrap_or(0), more.tags);
            add(client, &disk, &spec).await?;
            let limit = Duration::from_secs(more.timeout);
            let bar = progress(quiet, format!("{}/{}: being formatted", disk.node, disk.name));
            let mut ready = wait_ready(client, &disk, limit).await;
            if let (Err(Refused { fingerprint, .. }), true) = (&ready, force)
                && !fingerprint.is_empty()
            {
                let print = fingerprint.clone();
                bar.suspend(|| permit(&disk, &ready, &print, confirm))?;
                patch(client, &disk, json!({ "erase": print })).await?;
                ready = wait_ready_after(client, &disk, &print, limit).await;
            }
            bar.finish_and_clear();
            ready?;
            print_one(client, &disk, format).await
        }
        DiskVerb::Import { disk, place, more } => {
            let spec = DiskSpec { tags: more.tags, ..place.spec()? };
            add(client, &disk, &spec).await?;
            let bar = progress(quiet, format!("{}/{}: being imported", disk.node, disk.name));
            wait_ready(client, &disk, Duration::from_secs(more.timeout)).await?;
            bar.finish_and_clear();
            print_one(client, &disk, format).await
        }
        DiskVerb::Disable { disk } => change(client, &disk, json!({ "allowScheduling": false }), format).await,
        DiskVerb::Enable { disk } => {
            change(client, &disk, json!({ "allowScheduling": true, "evictionRequested": null }), format).await
        }
        DiskVerb::Evict { disk, no_wait, timeout } => {
            find(client, &disk).await?;
            patch(client, &disk, json!({ "allowScheduling": false, "evictionRequested": true })).await?;
            if !no_wait {
                let bar = progress(quiet, format!("{}/{}: its replicas are being moved", disk.node, disk.name));
                wait_empty(client, &disk, Duration::from_secs(timeout)).await?;
                bar.finish_and_clear();
            }
            print_one(client, &disk, format).await
        }
        DiskVerb::Remove { disk, timeout } => remove(client, &disk, Duration::from_secs(timeout)).await,
    }
}

// --- reading ---

async fn find(client: &Client, disk: &DiskName) -> Result<Disk> {
    let node = api::<Node>(client).get_opt(&disk.node).await.map_err(api_error)?;
    let node = node.with_context(|| format!("node {:?} does not exist", disk.node))?;
    disk_of(&node, &disk.name).with_context(|| format!("node {} has no disk {:?}", disk.node, disk.name))
}

fn disk_of(node: &Node, name: &str) -> Option<Disk> {
    let spec = node.spec.disks.get(name)?.clone();
    let status = node.status.as_ref().and_then(|status| status.disk_status.get(name)).cloned().unwrap_or_default();
    Some(Disk { node: node.name_any(), name: name.to_owned(), spec, status })
}

async fn list(client: &Client, node: Option<String>, format: Format) -> Result<()> {
    let nodes = match node {
        Some(name) => {
            let found = api::<Node>(client).get_opt(&name).await.map_err(api_error)?;
            vec![found.with_context(|| format!("node {name:?} does not exist"))?]
        }
        None => api::<Node>(client).list(&ListParams::default()).await.map_err(api_error)?.items,
    };
    let disks: Vec<Disk> =
        nodes.iter().flat_map(|node| node.spec.disks.keys().filter_map(|name| disk_of(node, name))).collect();
    output::print(format, &HEADER, &disks, row)
}

const HEADER: [&str; 11] =
    ["node", "disk", "type", "place", "ready", "schedulable", "size", "free", "scheduled", "others", "replicas"];

fn row(disk: &Disk) -> Vec<String> {
    let status = &disk.status;
    vec![
        disk.node.clone(),
        disk.name.clone(),
        disk.spec.type_.as_str().to_owned(),
        disk.spec.place(),
        reason(status, CONDITION_READY),
        reason(status, CONDITION_SCHEDULABLE),
        output::bytes(status.storage_maximum),
        output::bytes(status.storage_available),
        output::bytes(status.storage_scheduled),
        output::bytes(status.storage_unmanaged),
        status.scheduled_replicas.len().to_string(),
    ]
}

/// `true`, or the reason why not.
pub fn reason(status: &DiskStatus, type_: &str) -> String {
    match condition::get(&status.conditions, type_) {
        None => "unknown".to_owned(),
        Some(_) if condition::is_true(&status.conditions, type_) => "true".to_owned(),
        Some(condition) => condition.reason.clone(),
    }
}

fn show(disk: &Disk, format: Format) -> Result<()> {
    output::print(format, &HEADER, std::slice::from_ref(disk), row)?;
    if format != Format::Table {
        return Ok(());
    }
    let status = &disk.status;
    if !status.disk_uuid.is_empty() {
        println!(
            "\nlvstore: {} ({}), clusters of {}",
            status.lvstore,
            status.disk_uuid,
            output::bytes(status.cluster_size)
        );
    }
    if !status.device.is_empty() {
        println!("device: {}", status.device);
    }
    if !status.fingerprint.is_empty() {
        println!("fingerprint of what it holds: {}", status.fingerprint);
    }
    for condition in &status.conditions {
        println!("{}: {:?} ({}) {}", condition.type_, condition.status, condition.reason, condition.message);
    }
    if status.no_overcommit {
        println!("its data plane reports a full disk as a broken one: no more is promised than there is");
    }
    for (replica, size) in &status.scheduled_replicas {
        println!("replica {replica}: {}", output::bytes(*size));
    }
    for (lvol, seen) in &status.unmanaged {
        println!("not ours, and not touched: {lvol} ({}): {}", seen.uuid, output::bytes(seen.size));
    }
    Ok(())
}

async fn print_one(client: &Client, disk: &DiskName, format: Format) -> Result<()> {
    output::print(format, &HEADER, &[find(client, disk).await?], row)
}

// --- changing ---

async fn patch(client: &Client, disk: &DiskName, spec: Value) -> Result<()> {
    let patch = json!({ "spec": { "disks": { disk.name.as_str(): spec } } });
    let nodes = api::<Node>(client);
    nodes.patch(&disk.node, &PatchParams::default(), &Patch::Merge(patch)).await.map_err(api_error)?;
    Ok(())
}

async fn change(client: &Client, disk: &DiskName, spec: Value, format: Format) -> Result<()> {
    find(client, disk).await?;
    patch(client, disk, spec).await?;
    print_one(client, disk, format).await
}

async fn add(client: &Client, disk: &DiskName, spec: &DiskSpec) -> Result<()> {
    name::validate_label("disk name", &disk.name, name::MAX_LABEL)?;
    let node = api::<Node>(client).get_opt(&disk.node).await.map_err(api_error)?;
    let node = node.with_context(|| format!("node {:?} does not exist", disk.node))?;
    if let Some(there) = node.spec.disks.get(&disk.name) {
        // Asking again for the same goes on where it was left, as after a refusal.
        let same = (there.type_, there.place(), there.create) == (spec.type_, spec.place(), spec.create);
        ensure!(same, "node {} has a disk {:?} already, on {}", disk.node, disk.name, there.place());
    }
    patch(client, disk, serde_json::to_value(spec)?).await
}

/// Asks a person for the fingerprint, or takes the one given.
fn permit(disk: &DiskName, refused: &Result<(), Refused>, fingerprint: &str, given: Option<String>) -> Result<()> {
    let typed = match given {
        Some(given) => given,
        None => {
            if let Err(refused) = refused {
                println!("{}/{}: {}", disk.node, disk.name, refused.message);
            }
            print!("Everything on it will be destroyed. Type {fingerprint} to go on: ");
            std::io::stdout().flush()?;
            let mut line = String::new();
            std::io::stdin().read_line(&mut line)?;
            line.trim().to_owned()
        }
    };
    ensure!(
        typed == fingerprint,
        "{typed:?} is not {fingerprint}, the fingerprint of what the disk holds: nothing was destroyed"
    );
    Ok(())
}

/// Why a disk cannot be used.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Refused {
    reason: String,
    message: String,
    fingerprint: String,
}

impl std::fmt::Display for Refused {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.reason, self.message)
    }
}

impl std::error::Error for Refused {}

/// Reasons that pass by themselves.
const PASSING: [&str; 5] = ["NoDiskInfo", "Starting", "Formatting", "DataPlaneDown", "DataPlaneFailed"];

/// Whether a disk is on its way to be ready.
pub fn passes(ready: &Condition) -> bool {
    ready.status != ConditionStatus::True && PASSING.contains(&ready.reason.as_str())
}

async fn wait_ready(client: &Client, disk: &DiskName, limit: Duration) -> Result<(), Refused> {
    wait_ready_after(client, disk, "", limit).await
}

/// As [`wait_ready`], passing over the refusal that had this fingerprint.
async fn wait_ready_after(client: &Client, disk: &DiskName, before: &str, limit: Duration) -> Result<(), Refused> {
    let nodes = api::<Node>(client);
    let waited = wait_until(&nodes, &disk.node, limit, "ready", |node| {
        let status = disk_of(node?, &disk.name)?.status;
        let ready = condition::get(&status.conditions, CONDITION_READY)?;
        if condition::is_true(&status.conditions, CONDITION_READY) {
            return Some(Ok(()));
        }
        let old = !before.is_empty() && status.fingerprint == before;
        let refused = Refused {
            reason: ready.reason.clone(),
            message: ready.message.clone(),
            fingerprint: status.fingerprint.clone(),
        };
        (!passes(ready) && !old).then_some(Err(refused))
    });
    let late = |error: anyhow::Error| Refused {
        reason: "Late".to_owned(),
        message: format!("{error:#}"),
        fingerprint: String::new(),
    };
    waited.await.map_err(late)?
}

async fn wait_empty(client: &Client, disk: &DiskName, limit: Duration) -> Result<()> {
    let nodes = api::<Node>(client);
    let waited = wait_until(&nodes, &disk.node, limit, "empty", |node| {
        disk_of(node?, &disk.name)?.status.scheduled_replicas.is_empty().then_some(())
    });
    let Err(error) = waited.await else { return Ok(()) };
    let left = find(client, disk).await?.status.scheduled_replicas;
    let mut why = Vec::new();
    for replica in left.keys() {
        why.push(format!("{replica}: {}", why_not_moved(client, replica).await));
    }
    bail!("{error:#}; left are {}", why.join("; "))
}

/// What the volume of a replica says to its placement.
async fn why_not_moved(client: &Client, replica: &str) -> String {
    let found = api::<Replica>(client).get_opt(replica).await.ok().flatten();
    let Some(found) = found else { return "being removed".to_owned() };
    let volume = api::<addax_api::Volume>(client).get_opt(&found.spec.volume_name).await.ok().flatten();
    let conditions = volume.and_then(|volume| volume.status).map(|status| status.conditions).unwrap_or_default();
    let scheduled = condition::get(&conditions, addax_api::volume::CONDITION_SCHEDULED);
    let message = scheduled.map(|scheduled| scheduled.message.clone()).filter(|message| !message.is_empty());
    message.unwrap_or_else(|| "being moved".to_owned())
}

async fn remove(client: &Client, disk: &DiskName, limit: Duration) -> Result<()> {
    let found = find(client, disk).await?;
    if !found.status.scheduled_replicas.is_empty() {
        let count = found.status.scheduled_replicas.len();
        let (node, name) = (&disk.node, &disk.name);
        bail!("{count} replicas are on {node}/{name}: `addax disk evict {node} {name}` moves them elsewhere");
    }
    // Nothing may be placed on it between the look and the removal.
    patch(client, disk, json!({ "allowScheduling": false })).await?;
    patch(client, disk, Value::Null).await?;
    wait_until(&api::<Node>(client), &disk.node, limit, "forgotten", |node| {
        let status = node?.status.as_ref()?;
        (!status.disk_status.contains_key(&disk.name)).then_some(())
    })
    .await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn remote_namespaces_are_read() {
        let at = parse_remote("10.0.0.1:4420/nqn.2016-06.io.spdk:disk").unwrap();
        assert_eq!((at.traddr.as_str(), at.trsvcid, at.nsid), ("10.0.0.1", 4420, 1));
        let at = parse_remote("[fd00::1]:4420/nqn.2016-06.io.spdk:disk/7").unwrap();
        assert_eq!((at.traddr.as_str(), at.nqn.as_str(), at.nsid), ("fd00::1", "nqn.2016-06.io.spdk:disk", 7));
        for bad in ["10.0.0.1/nqn.x", "host:1/nqn.x", "10.0.0.1:0/nqn.x", "10.0.0.1:1/x", "10.0.0.1:1/nqn.x/0"] {
            assert!(parse_remote(bad).unwrap_err().contains("IP:PORT"), "{bad}");
        }
    }
}
