//! `addax disk ls|show|create|import|disable|enable|evict|remove`: verbs on the disks of nodes.
//!
//! Each changes `spec.disks` of a Node, as `kubectl` can as well, and waits for what the node says to it.
//!
//! *When things fail.* A disk that is refused is told with the node's reason; what was written stays, so that the node
//! uses it as soon as the reason is gone. `remove` takes it away. A refusal that was there before counts only when it is
//! still there after [`LOOKED_AGAIN`].

use std::collections::BTreeSet;
use std::io::Write;
use std::time::Duration;

use addax_api::node::{
    CONDITION_READY, CONDITION_SCHEDULABLE, DISK_FOUND, DISK_REMOVING, DiskSpec, DiskStatus, DiskType, RemoteNamespace,
};
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
    /// None of a disk that is being removed.
    spec: Option<DiskSpec>,
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
            let before = add(client, &disk, &spec).await?;
            let limit = Duration::from_secs(more.timeout);
            let bar = progress(quiet, format!("{}/{}: being formatted", disk.node, disk.name));
            // A fingerprint that is no longer that of the device permits nothing, so an old refusal will do for it.
            let before = before.filter(|_| confirm.is_none());
            let mut ready = wait_ready(client, &disk, before.as_ref(), limit).await;
            if let (Err(refused), true) = (&ready, force)
                && !refused.fingerprint.is_empty()
            {
                let refused = refused.clone();
                bar.suspend(|| permit(&disk, &refused, confirm))?;
                patch(client, &disk, json!({ "erase": refused.fingerprint })).await?;
                ready = wait_ready(client, &disk, Some(&refused), limit).await;
            }
            bar.finish_and_clear();
            ready?;
            print_one(client, &disk, format).await
        }
        DiskVerb::Import { disk, place, more } => {
            let spec = DiskSpec { tags: more.tags, ..place.spec()? };
            let before = add(client, &disk, &spec).await?;
            let bar = progress(quiet, format!("{}/{}: being imported", disk.node, disk.name));
            wait_ready(client, &disk, before.as_ref(), Duration::from_secs(more.timeout)).await?;
            bar.finish_and_clear();
            print_one(client, &disk, format).await
        }
        DiskVerb::Disable { disk } => change(client, &disk, json!({ "allowScheduling": false }), format).await,
        DiskVerb::Enable { disk } => {
            change(client, &disk, json!({ "allowScheduling": true, "evictionRequested": null }), format).await
        }
        DiskVerb::Evict { disk, no_wait, timeout } => {
            find_declared(client, &disk).await?;
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

/// As [`find`], refusing one that is being removed.
async fn find_declared(client: &Client, disk: &DiskName) -> Result<Disk> {
    let found = find(client, disk).await?;
    ensure!(found.spec.is_some(), "disk {:?} of node {} is being removed", disk.name, disk.node);
    Ok(found)
}

/// A disk of the spec, or one that the node has not forgotten yet.
fn disk_of(node: &Node, name: &str) -> Option<Disk> {
    let spec = node.spec.disks.get(name).cloned();
    let status = node.status.as_ref().and_then(|status| status.disk_status.get(name)).cloned();
    if spec.is_none() && status.is_none() {
        return None;
    }
    Some(Disk { node: node.name_any(), name: name.to_owned(), spec, status: status.unwrap_or_default() })
}

fn disks_of(node: &Node) -> Vec<Disk> {
    let known = node.status.iter().flat_map(|status| status.disk_status.keys());
    let names: BTreeSet<&String> = node.spec.disks.keys().chain(known).collect();
    names.into_iter().filter_map(|name| disk_of(node, name)).collect()
}

async fn list(client: &Client, node: Option<String>, format: Format) -> Result<()> {
    let nodes = match node {
        Some(name) => {
            let found = api::<Node>(client).get_opt(&name).await.map_err(api_error)?;
            vec![found.with_context(|| format!("node {name:?} does not exist"))?]
        }
        None => api::<Node>(client).list(&ListParams::default()).await.map_err(api_error)?.items,
    };
    let disks: Vec<Disk> = nodes.iter().flat_map(disks_of).collect();
    output::print(format, &HEADER, &disks, row)
}

const HEADER: [&str; 11] =
    ["node", "disk", "type", "place", "ready", "schedulable", "size", "free", "scheduled", "others", "replicas"];

fn row(disk: &Disk) -> Vec<String> {
    let status = &disk.status;
    vec![
        disk.node.clone(),
        disk.name.clone(),
        disk.spec.as_ref().map_or("-", |spec| spec.type_.as_str()).to_owned(),
        disk.spec.as_ref().map_or("-".to_owned(), DiskSpec::place),
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
    find_declared(client, disk).await?;
    patch(client, disk, spec).await?;
    print_one(client, disk, format).await
}

/// Declares a disk, or goes on where it was left; the refusal that stood there.
async fn add(client: &Client, disk: &DiskName, spec: &DiskSpec) -> Result<Option<Refused>> {
    name::validate_label("disk name", &disk.name, name::MAX_LABEL)?;
    let node = api::<Node>(client).get_opt(&disk.node).await.map_err(api_error)?;
    let node = node.with_context(|| format!("node {:?} does not exist", disk.node))?;
    let there = disk_of(&node, &disk.name);
    patch(client, disk, addition(there.as_ref(), disk, spec)?).await?;
    Ok(there.and_then(|there| refusal(&there.status)))
}

/// What is to be written to declare a disk of which this is there already.
fn addition(there: Option<&Disk>, disk: &DiskName, spec: &DiskSpec) -> Result<Value> {
    let mut value = serde_json::to_value(spec)?;
    let Some((old, status)) = there.and_then(|there| Some((there.spec.as_ref()?, &there.status))) else {
        return Ok(value);
    };
    let (node, name) = (&disk.node, &disk.name);
    let is_same = (old.type_, old.place()) == (spec.type_, spec.place());
    ensure!(is_same, "node {node} has a disk {name:?} already, on {}", old.place());
    // Nothing is lost by another mind as long as it holds nothing that is known.
    ensure!(
        old.create == spec.create || status.disk_uuid.is_empty(),
        "disk {name:?} of node {node} was added by `{}` and is known by its lvstore {}: `addax disk remove {node} {name}` first",
        if old.create { "disk create" } else { "disk import" },
        status.disk_uuid
    );
    if old.create && !spec.create {
        (value["create"], value["erase"], value["size"]) = (Value::Bool(false), Value::Null, Value::Null);
    }
    Ok(value)
}

/// Asks a person for the fingerprint, or takes the one given.
fn permit(disk: &DiskName, refused: &Refused, given: Option<String>) -> Result<()> {
    let fingerprint = &refused.fingerprint;
    let typed = match given {
        Some(given) => given,
        None => {
            // Not where the result goes, which a program may be reading.
            eprintln!("{}/{}: {}", disk.node, disk.name, refused.message);
            eprint!("Everything on it will be destroyed. Type {fingerprint} to go on: ");
            std::io::stderr().flush()?;
            let mut line = String::new();
            std::io::stdin().read_line(&mut line)?;
            line.trim().to_owned()
        }
    };
    ensure!(
        typed == *fingerprint,
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
const PASSING: [&str; 7] =
    ["NoDiskInfo", "Starting", "Formatting", "DataPlaneDown", "DataPlaneFailed", DISK_FOUND, DISK_REMOVING];
/// By then a node has looked again at a disk that it refused.
const LOOKED_AGAIN: Duration = Duration::from_secs(15);

/// Whether a disk is on its way to be ready.
pub fn passes(ready: &Condition) -> bool {
    ready.status != ConditionStatus::True && PASSING.contains(&ready.reason.as_str())
}

/// Why a disk is not ready, unless that passes by itself.
fn refusal(status: &DiskStatus) -> Option<Refused> {
    let ready = condition::get(&status.conditions, CONDITION_READY)?;
    let is_refused = ready.status != ConditionStatus::True && !passes(ready);
    is_refused.then(|| Refused {
        reason: ready.reason.clone(),
        message: ready.message.clone(),
        fingerprint: status.fingerprint.clone(),
    })
}

/// What waiting for a disk has come to; `is_fresh`: what stands there may still be of before.
fn outcome(status: &DiskStatus, before: Option<&Refused>, is_fresh: bool) -> Option<Result<(), Refused>> {
    if condition::is_true(&status.conditions, CONDITION_READY) {
        return Some(Ok(()));
    }
    let refused = refusal(status)?;
    (!is_fresh || before != Some(&refused)).then_some(Err(refused))
}

async fn wait_ready(
    client: &Client,
    disk: &DiskName,
    before: Option<&Refused>,
    limit: Duration,
) -> Result<(), Refused> {
    let nodes = api::<Node>(client);
    let since = tokio::time::Instant::now();
    let waited = wait_until(&nodes, &disk.node, limit, "ready", |node| {
        outcome(&disk_of(node?, &disk.name)?.status, before, since.elapsed() < LOOKED_AGAIN)
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
    // One that is being removed already is only waited for.
    if found.spec.is_some() {
        // Nothing may be placed on it between the look and the removal.
        patch(client, disk, json!({ "allowScheduling": false })).await?;
        patch(client, disk, Value::Null).await?;
    }
    wait_until(&api::<Node>(client), &disk.node, limit, "forgotten", |node| {
        let status = node?.status.as_ref()?;
        (!status.disk_status.contains_key(&disk.name)).then_some(())
    })
    .await
}

#[cfg(test)]
mod tests {
    use super::*;
    use jiff::Timestamp;

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

    fn refused(reason: &str, fingerprint: &str) -> DiskStatus {
        let mut status = DiskStatus { fingerprint: fingerprint.to_owned(), ..DiskStatus::default() };
        condition::set(
            &mut status.conditions,
            CONDITION_READY,
            false,
            reason,
            "it holds a swap area",
            Timestamp::UNIX_EPOCH,
        );
        status
    }

    #[test]
    fn an_old_refusal_is_no_answer() {
        let (old, new) = (refused("NotEmpty", "abc"), refused("NotEmpty", "abd"));
        let before = refusal(&old);
        assert_eq!(before.as_ref().map(|refused| refused.fingerprint.as_str()), Some("abc"));
        assert_eq!(outcome(&old, before.as_ref(), true), None);
        assert!(matches!(outcome(&old, before.as_ref(), false), Some(Err(_))));
        assert!(matches!(outcome(&new, before.as_ref(), true), Some(Err(refused)) if refused.fingerprint == "abd"));
        assert!(matches!(outcome(&old, None, true), Some(Err(_))));
        for passing in ["Formatting", DISK_FOUND, DISK_REMOVING] {
            assert_eq!(outcome(&refused(passing, ""), None, false), None);
        }
    }

    #[test]
    fn what_is_not_known_yet_can_be_imported_instead_of_made() {
        let name = DiskName { node: "n".to_owned(), name: "d".to_owned() };
        let made = DiskSpec { erase: "abc".to_owned(), ..DiskSpec::file("/x", 4096) };
        let import = DiskSpec { path: "/x".to_owned(), ..DiskSpec::of(DiskType::File) };
        let there = |status| Disk { node: "n".to_owned(), name: "d".to_owned(), spec: Some(made.clone()), status };
        let value = addition(Some(&there(DiskStatus::default())), &name, &import).unwrap();
        assert_eq!((&value["create"], &value["erase"], &value["size"]), (&json!(false), &Value::Null, &Value::Null));
        let known = DiskStatus { disk_uuid: "u".to_owned(), ..DiskStatus::default() };
        let error = addition(Some(&there(known.clone())), &name, &import).unwrap_err().to_string();
        assert!(error.contains("`disk create`") && error.contains("disk remove n d"), "{error}");
        addition(Some(&there(known)), &name, &made).unwrap();
        let elsewhere = DiskSpec { path: "/y".to_owned(), ..import };
        let error = addition(Some(&there(DiskStatus::default())), &name, &elsewhere).unwrap_err().to_string();
        assert!(error.contains("on /x"), "{error}");
    }

    #[test]
    fn a_disk_that_is_being_removed_is_listed() {
        let mut node = Node::new("n", addax_api::NodeSpec::default());
        node.spec.disks.insert("a".to_owned(), DiskSpec::file("/a", 0));
        let status = node.status.get_or_insert_default();
        status.disk_status.insert("b".to_owned(), refused(DISK_REMOVING, ""));
        let rows: Vec<Vec<String>> = disks_of(&node).iter().map(row).collect();
        assert_eq!(rows.iter().map(|row| row[1].as_str()).collect::<Vec<_>>(), ["a", "b"]);
        assert_eq!((rows[0][3].as_str(), rows[1][3].as_str(), rows[1][4].as_str()), ("/a", "-", DISK_REMOVING));
    }
}
