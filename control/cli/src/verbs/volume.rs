//! `addax volume create|ls|show|attach|detach|rm`: writes objects, and waits for what they cause. What is done to a record by
//! hand is in `recovery`.

use std::time::Duration;

use addax_api::recovery::{RecoveryAction, RecoveryOutcome};
use addax_api::volume::{CONDITION_RECOVERY_HOLD, Robustness, VolumeState};
use addax_api::volume_attachment::{TICKET_CLI, Ticket, TicketParameters, TicketType, VolumeAttachmentSpec};
use addax_api::{Engine, Replica, Volume, VolumeAttachment, VolumeSpec, name, nqn};
use anyhow::{Context, Result, bail};
use clap::Subcommand;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::{Api, Client, ResourceExt};
use serde_json::json;

use super::recovery::{self, Ask};
use super::{api, api_error, progress, room, wait_until};
use crate::output::{self, Format};

/// Bytes of the largest volume.
const SIZE_MAX: i64 = 64 << 40;

#[derive(Debug, Subcommand)]
pub enum VolumeVerb {
    /// Declare a volume and wait until its replicas are there.
    #[command(after_help = "Example: addax volume create data --size 10GiB --replicas 3")]
    Create {
        /// Name: lower-case letters, digits and '-', at most 52.
        name: String,
        /// Size, such as 10GiB: a multiple of 1 MiB, at most 64 TiB.
        #[arg(long, value_parser = parse_volume_size, allow_hyphen_values = true)]
        size: i64,
        /// Number of copies, 1 to 20.
        #[arg(long, default_value_t = 3, allow_hyphen_values = true, value_parser = copies())]
        replicas: u32,
        /// Fewest copies that must have a write before it is acknowledged.
        #[arg(long, default_value_t = 1, allow_hyphen_values = true, value_parser = copies())]
        min_in_sync: u32,
        /// Declare it even if there is no room yet, and do not wait for its copies.
        #[arg(long)]
        no_wait: bool,
    },
    /// List volumes.
    #[command(after_help = "Example: addax volume ls -o yaml")]
    Ls,
    /// Show one volume with its engine and replicas.
    #[command(after_help = "Example: addax volume show data")]
    Show {
        /// Name of the volume.
        name: String,
    },
    /// Attach a volume to a node, let hosts connect, and print what they have to type.
    #[command(after_help = "Example: addax volume attach data --node node-1 --host-nqn \"$(cat /etc/nvme/hostnqn)\"")]
    Attach {
        /// Name of the volume.
        name: String,
        /// Node that serves it.
        #[arg(long)]
        node: String,
        /// NQN of a host that may connect; may be repeated. Nobody else may.
        #[arg(long = "host-nqn", value_parser = parse_nqn)]
        host_nqn: Vec<String>,
        /// Seconds to wait.
        #[arg(long, default_value_t = 60)]
        timeout: u64,
    },
    /// Have another node serve an attached volume. Hosts that use multipath wait until they have connected there.
    #[command(after_help = "Example: addax volume move data --node node-2")]
    Move {
        /// Name of the volume.
        name: String,
        /// Node that is to serve it.
        #[arg(long)]
        node: String,
        /// Seconds to wait.
        #[arg(long, default_value_t = 60)]
        timeout: u64,
    },
    /// Detach a volume.
    #[command(after_help = "Example: addax volume detach data")]
    Detach {
        /// Name of the volume.
        name: String,
        /// Seconds to wait.
        #[arg(long, default_value_t = 60)]
        timeout: u64,
    },
    /// Make one copy the volume although none that has every acknowledged write can be reached. Writes are lost.
    ///
    /// The other copies are set aside: they are not used, and kept until `purge-discarded`. Refused while a copy in sync can
    /// be reached, and while the volume is attached.
    #[command(after_help = "Example: addax volume force-open data --replica data-r-1a2b3c4d")]
    ForceOpen {
        /// Name of the volume.
        name: String,
        /// The copy; `addax volume show` lists them.
        #[arg(long)]
        replica: String,
        /// The volume's name once more, in place of typing it.
        #[arg(long, value_name = "NAME")]
        yes_i_lose_writes: Option<String>,
        /// Seconds to wait.
        #[arg(long, default_value_t = 60)]
        timeout: u64,
    },
    /// Rebuild the record of a volume from what its copies know, when it is gone or an old one.
    ///
    /// Every known copy is read; nothing is lost. Copies that will not come back are named by --lost: writes that only they
    /// have are lost, and they are set aside if they come back after all.
    #[command(after_help = "Example: addax volume recover data")]
    Recover {
        /// Name of the volume.
        name: String,
        /// A copy that is done without; may be repeated.
        #[arg(long, value_name = "REPLICA")]
        lost: Vec<String>,
        /// The volume's name once more, in place of typing it; only asked for with --lost.
        #[arg(long, value_name = "NAME")]
        yes_i_lose_writes: Option<String>,
        /// Seconds to wait.
        #[arg(long, default_value_t = 60)]
        timeout: u64,
    },
    /// Remove a copy that was set aside, with its data.
    #[command(after_help = "Example: addax volume purge-discarded data --replica data-r-1a2b3c4d")]
    PurgeDiscarded {
        /// Name of the volume.
        name: String,
        /// The copy; `addax volume show` lists those that were set aside.
        #[arg(long)]
        replica: String,
        /// The volume's name once more, in place of typing it.
        #[arg(long, value_name = "NAME")]
        yes_i_lose_data: Option<String>,
        /// Seconds to wait.
        #[arg(long, default_value_t = 60)]
        timeout: u64,
    },
    /// Remove a volume and its data. It must be detached.
    #[command(after_help = "Example: addax volume rm data --yes")]
    Rm {
        /// Name of the volume.
        name: String,
        /// Do not ask.
        #[arg(long)]
        yes: bool,
        /// Seconds to wait.
        #[arg(long, default_value_t = 60)]
        timeout: u64,
    },
}

/// Sizes that a volume can have.
fn parse_volume_size(text: &str) -> Result<i64, String> {
    let size = output::parse_size(text)?;
    if (addax_api::MIB..=SIZE_MAX).contains(&size) && size % addax_api::MIB == 0 {
        Ok(size)
    } else {
        Err("a multiple of 1 MiB, from 1 MiB to 64 TiB, is allowed".to_owned())
    }
}

/// Numbers of copies that a volume can have.
fn copies() -> clap::builder::RangedI64ValueParser<u32> {
    clap::value_parser!(u32).range(1..=20)
}

fn parse_nqn(text: &str) -> Result<String, String> {
    let well_formed = text.starts_with("nqn.") && (11..=223).contains(&text.len()) && text.contains(':');
    if well_formed {
        Ok(text.to_owned())
    } else {
        Err(format!("{text:?} is not an NQN: nqn.yyyy-mm.domain:name, 11 to 223 bytes, is allowed"))
    }
}

pub async fn run(client: &Client, verb: VolumeVerb, format: Format, quiet: bool) -> Result<()> {
    match verb {
        VolumeVerb::Create { name, size, replicas, min_in_sync, no_wait } => {
            let spec = VolumeSpec { number_of_replicas: replicas, min_in_sync, ..VolumeSpec::with_size(size) };
            name::validate_volume_name(&name)?;
            if min_in_sync > replicas {
                bail!("--min-in-sync {min_in_sync}: at most --replicas, which is {replicas}, is allowed");
            }
            if !no_wait {
                require_absent(client, &name).await?;
                room::require(client, &name, &spec).await?;
            }
            create(client, &name, spec).await?;
            if !no_wait {
                let bar = progress(quiet, format!("{name}: its {replicas} replicas are being made"));
                wait_created(client, &name, Duration::from_secs(60)).await?;
                bar.finish_and_clear();
            }
            print_one(client, &name, format).await
        }
        VolumeVerb::Ls => {
            let list = api::<Volume>(client).list(&ListParams::default()).await.map_err(api_error)?;
            output::print(format, &HEADER, &list.items, row)
        }
        VolumeVerb::Show { name } => show(client, &name, format).await,
        VolumeVerb::Attach { name, node, host_nqn, timeout } => {
            let limit = Duration::from_secs(timeout);
            let bar = progress(quiet, format!("{name}: being attached to {node}"));
            let endpoint = attach(client, &name, &node, &host_nqn, limit).await?;
            bar.finish_and_clear();
            print_endpoint(format, endpoint, &host_nqn)
        }
        VolumeVerb::Move { name, node, timeout } => {
            let bar = progress(quiet, format!("{name}: being moved to {node}"));
            let (endpoint, hosts) = move_to(client, &name, &node, Duration::from_secs(timeout)).await?;
            bar.finish_and_clear();
            print_endpoint(format, endpoint, &hosts)
        }
        VolumeVerb::Detach { name, timeout } => {
            let bar = progress(quiet, format!("{name}: being detached"));
            detach(client, &name, Duration::from_secs(timeout)).await?;
            bar.finish_and_clear();
            Ok(())
        }
        VolumeVerb::ForceOpen { name, replica, yes_i_lose_writes, timeout } => {
            let ask = Ask { replica, ..ask(name, RecoveryAction::ForceOpen, timeout) };
            recovery::run(client, ask, yes_i_lose_writes, format, quiet).await
        }
        VolumeVerb::Recover { name, lost, yes_i_lose_writes, timeout } => {
            let ask = Ask { lost, ..ask(name, RecoveryAction::Recover, timeout) };
            recovery::run(client, ask, yes_i_lose_writes, format, quiet).await
        }
        VolumeVerb::PurgeDiscarded { name, replica, yes_i_lose_data, timeout } => {
            let ask = Ask { replica, ..ask(name, RecoveryAction::Purge, timeout) };
            recovery::run(client, ask, yes_i_lose_data, format, quiet).await
        }
        VolumeVerb::Rm { name, yes, timeout } => {
            if !yes && !confirm(&name)? {
                bail!("{name}: not removed");
            }
            let bar = progress(quiet, format!("{name}: being removed with its data"));
            remove(client, &name, Duration::from_secs(timeout)).await?;
            bar.finish_and_clear();
            Ok(())
        }
    }
}

fn ask(volume: String, action: RecoveryAction, timeout: u64) -> Ask {
    Ask { volume, action, replica: String::new(), lost: Vec::new(), limit: Duration::from_secs(timeout) }
}

/// Refuses the name of a volume that exists.
async fn require_absent(client: &Client, volume: &str) -> Result<()> {
    match api::<Volume>(client).get_opt(volume).await.map_err(api_error)? {
        None => Ok(()),
        Some(found) => bail!("volume {volume:?} already exists, with {}", output::bytes(found.spec.size)),
    }
}

/// Declares a volume.
pub async fn create(client: &Client, volume: &str, spec: VolumeSpec) -> Result<()> {
    let object = Volume::new(volume, spec);
    api::<Volume>(client).create(&PostParams::default(), &object).await.map_err(api_error)?;
    Ok(())
}

/// Waits until the volume can be attached; says why not when it cannot be placed.
pub async fn wait_created(client: &Client, volume: &str, limit: Duration) -> Result<()> {
    let mut reason = String::new();
    let volumes = api::<Volume>(client);
    let waited = wait_until(&volumes, volume, limit, "created", |found| {
        let status = found?.status.clone().unwrap_or_default();
        let scheduled = addax_api::condition::get(&status.conditions, addax_api::volume::CONDITION_SCHEDULED);
        reason = scheduled
            .filter(|c| c.status != addax_api::ConditionStatus::True)
            .map(|c| c.message.clone())
            .unwrap_or_default();
        (status.state != VolumeState::Creating && status.config.is_some()).then_some(())
    });
    let waited = waited.await;
    waited.map_err(|e| if reason.is_empty() { e } else { e.context(reason) })
}

/// Puts this program's ticket in and waits until the volume is attached to the node.
pub async fn attach(
    client: &Client,
    volume: &str,
    node: &str,
    hosts: &[String],
    limit: Duration,
) -> Result<addax_api::volume::Endpoint> {
    let volumes = api::<Volume>(client);
    let found = volumes.get_opt(volume).await.map_err(api_error)?;
    let found = found.with_context(|| format!("volume {volume:?} does not exist"))?;
    require_node(client, node).await?;
    if found.metadata.deletion_timestamp.is_some() {
        bail!("volume {volume} is being removed");
    }
    let at = found.spec.node_id.as_str();
    if !at.is_empty() && at != node {
        bail!("volume {volume} is attached to {at}: move it, or detach it first, or attach it there");
    }
    let ticket = Ticket {
        type_: TicketType::Api,
        node_id: node.to_owned(),
        parameters: TicketParameters { allowed_hosts: hosts.to_vec() },
    };
    put_ticket(&api(client), volume, &ticket).await?;
    wait_served(&volumes, volume, node, limit).await
}

async fn require_node(client: &Client, node: &str) -> Result<()> {
    match api::<addax_api::Node>(client).get_opt(node).await.map_err(api_error)? {
        Some(_) => Ok(()),
        None => bail!("node {node:?} does not exist"),
    }
}

/// Waits until a node serves the volume; where.
async fn wait_served(
    volumes: &Api<Volume>,
    volume: &str,
    node: &str,
    limit: Duration,
) -> Result<addax_api::volume::Endpoint> {
    let mut held = None;
    let waited = wait_until(volumes, volume, limit, "attached", |found| {
        let status = found?.status.as_ref()?;
        let hold = addax_api::condition::get(&status.conditions, CONDITION_RECOVERY_HOLD);
        held = hold.map(|hold| hold.message.clone());
        let there = status.state == VolumeState::Attached && status.current_node_id == node;
        let endpoint = status.endpoint.clone().filter(|_| there)?;
        Some(endpoint)
    });
    let waited = waited.await;
    waited.map_err(|error| match held {
        Some(why) => error.context(format!("the volume is held: {why}")),
        None => error,
    })
}

/// Moves this program's ticket to another node and waits until that serves the volume: the engine is closed in order, and
/// another one opens it. Gives where it is served then, and the hosts that may connect.
pub async fn move_to(
    client: &Client,
    volume: &str,
    node: &str,
    limit: Duration,
) -> Result<(addax_api::volume::Endpoint, Vec<String>)> {
    require_node(client, node).await?;
    let attachments = api::<VolumeAttachment>(client);
    let tickets = attachments.get_opt(volume).await.map_err(api_error)?.map(|found| found.spec.tickets);
    let tickets = tickets.unwrap_or_default();
    let Some(ticket) = tickets.get(TICKET_CLI) else {
        bail!("volume {volume} was not attached by 'addax volume attach': whoever attached it must move it");
    };
    let holds = |(id, other): &(&String, &Ticket)| *id != TICKET_CLI && other.node_id == ticket.node_id;
    if ticket.node_id != node
        && let Some((holder, _)) = tickets.iter().find(holds)
    {
        bail!("volume {volume}: ticket {holder} holds it on {} as well", ticket.node_id);
    }
    let patch = json!({ "spec": { "tickets": { TICKET_CLI: { "nodeID": node } } } });
    attachments.patch(volume, &PatchParams::default(), &Patch::Merge(patch)).await.map_err(api_error)?;
    let endpoint = wait_served(&api(client), volume, node, limit).await?;
    Ok((endpoint, ticket.parameters.allowed_hosts.clone()))
}

async fn put_ticket(attachments: &Api<VolumeAttachment>, volume: &str, ticket: &Ticket) -> Result<()> {
    let spec =
        VolumeAttachmentSpec { volume: volume.to_owned(), tickets: [(TICKET_CLI.to_owned(), ticket.clone())].into() };
    let object = VolumeAttachment::new(volume, spec);
    match attachments.create(&PostParams::default(), &object).await {
        Err(kube::Error::Api(status)) if status.code == 409 => {
            let patch = json!({ "spec": { "tickets": { TICKET_CLI: ticket } } });
            attachments.patch(volume, &PatchParams::default(), &Patch::Merge(patch)).await.map_err(api_error)?;
            Ok(())
        }
        other => other.map(drop).map_err(api_error),
    }
}

/// Takes this program's ticket away and waits until the volume is detached.
pub async fn detach(client: &Client, volume: &str, limit: Duration) -> Result<()> {
    let volumes = api::<Volume>(client);
    if volumes.get_opt(volume).await.map_err(api_error)?.is_none() {
        bail!("volume {volume:?} does not exist");
    }
    let patch = json!({ "spec": { "tickets": { TICKET_CLI: null } } });
    let attachments = api::<VolumeAttachment>(client);
    match attachments.patch(volume, &PatchParams::default(), &Patch::Merge(patch)).await {
        Err(kube::Error::Api(status)) if status.code == 404 => {}
        other => drop(other.map_err(api_error)?),
    }
    wait_until(&volumes, volume, limit, "detached", |found| {
        // One that was deleted while it was attached goes as soon as it is detached.
        let Some(found) = found else { return Some(()) };
        let state = found.status.as_ref()?.state;
        matches!(state, VolumeState::Detached | VolumeState::Creating | VolumeState::Deleting).then_some(())
    })
    .await
}

/// Deletes a detached volume and waits until it is gone.
pub async fn remove(client: &Client, volume: &str, limit: Duration) -> Result<()> {
    let volumes = api::<Volume>(client);
    let found = volumes.get_opt(volume).await.map_err(api_error)?;
    let found = found.with_context(|| format!("volume {volume:?} does not exist"))?;
    let state = found.status.as_ref().map(|s| s.state).unwrap_or_default();
    if !found.spec.node_id.is_empty() || matches!(state, VolumeState::Attached | VolumeState::Attaching) {
        bail!("volume {volume} is attached to {}: detach it first", found.spec.node_id);
    }
    volumes.delete(volume, &DeleteParams::default()).await.map_err(api_error)?;
    wait_until(&volumes, volume, limit, "gone", |found| found.is_none().then_some(())).await
}

fn confirm(volume: &str) -> Result<bool> {
    use std::io::Write;
    print!("Remove volume {volume} and all its data? Type its name: ");
    std::io::stdout().flush()?;
    let mut line = String::new();
    std::io::stdin().read_line(&mut line)?;
    Ok(line.trim() == volume)
}

const HEADER: [&str; 8] = ["name", "state", "robustness", "size", "in sync", "rebuilding", "node", "endpoint"];

fn row(volume: &Volume) -> Vec<String> {
    let status = volume.status.clone().unwrap_or_default();
    let (in_sync, rebuilding) = status.config.as_ref().map_or((0, 0), |c| (c.in_sync.len(), c.rebuilding.len()));
    let endpoint = status.endpoint.as_ref().map(|e| format!("{}:{}", e.traddr, e.trsvcid)).unwrap_or_default();
    vec![
        volume.name_any(),
        status.state.as_str().to_owned(),
        status.robustness.as_str().to_owned(),
        output::bytes(volume.spec.size),
        format!("{in_sync}/{}", volume.spec.number_of_replicas),
        rebuilding.to_string(),
        status.current_node_id.clone(),
        endpoint,
    ]
}

async fn print_one(client: &Client, volume: &str, format: Format) -> Result<()> {
    let found = api::<Volume>(client).get(volume).await.map_err(api_error)?;
    output::print(format, &HEADER, &[found], row)
}

async fn show(client: &Client, volume: &str, format: Format) -> Result<()> {
    let found = api::<Volume>(client).get_opt(volume).await.map_err(api_error)?;
    let found = found.with_context(|| format!("volume {volume:?} does not exist"))?;
    if format != Format::Table {
        return output::print(format, &HEADER, &[found], row);
    }
    output::print(format, &HEADER, std::slice::from_ref(&found), row)?;
    let status = found.status.clone().unwrap_or_default();
    if let Some(config) = &status.config {
        println!(
            "\nrecord: epoch {}, configuration {}, in sync {:?}, rebuilding {:?}, {}",
            config.epoch,
            config.config_number,
            config.in_sync,
            config.rebuilding,
            if config.clean { "closed cleanly" } else { "open" }
        );
    }
    if status.consistency == Some(addax_api::volume::Consistency::BestEffort) {
        println!("consistency: bestEffort, since a stock data plane serves it");
    }
    for account in &status.recoveries {
        let outcome = if account.outcome == RecoveryOutcome::Done { "done" } else { "refused" };
        let (action, by, at) = (account.action.as_str(), &account.requested_by, account.at.0);
        println!("{action} {outcome} at {at} for {by}: {}", account.message);
    }
    for aside in &status.discarded {
        let going = if aside.purging { ", being purged" } else { "" };
        println!("set aside at {} by {}: {}{going}", aside.at.0, aside.by, aside.replica);
    }
    let engine = api::<Engine>(client).get_opt(&name::engine_name(volume)).await.map_err(api_error)?;
    let modes = engine.and_then(|e| e.status).map(|s| s.replica_modes).unwrap_or_default();
    let of_volume = ListParams::default().labels(&format!("{}={volume}", addax_api::LABEL_VOLUME));
    let replicas = api::<Replica>(client).list(&of_volume).await.map_err(api_error)?;
    println!();
    output::print(
        format,
        &["replica", "node", "disk", "state", "mode", "progress", "nqn"],
        &replicas.items,
        |replica| {
            let mode = modes.get(&replica.name_any());
            vec![
                replica.name_any(),
                replica.spec.node_id.clone(),
                replica.spec.disk_id.clone(),
                replica.status.as_ref().map(|s| s.current_state.as_str()).unwrap_or_default().to_owned(),
                mode.map(|m| format!("{:?}", m.mode)).unwrap_or_default(),
                mode.and_then(|m| m.progress_percent).map(|p| format!("{p} %")).unwrap_or_default(),
                nqn::replica_nqn(&replica.name_any()),
            ]
        },
    )?;
    for condition in &status.conditions {
        println!("{}: {:?} ({}) {}", condition.type_, condition.status, condition.reason, condition.message);
    }
    Ok(())
}

fn print_endpoint(format: Format, endpoint: addax_api::volume::Endpoint, hosts: &[String]) -> Result<()> {
    match format {
        Format::Table => {
            print_connect(&endpoint, hosts);
            Ok(())
        }
        _ => output::print(format, &[], &[endpoint], |_| Vec::new()),
    }
}

fn print_connect(endpoint: &addax_api::volume::Endpoint, hosts: &[String]) {
    println!("attached; on a host that may connect:");
    let host = match hosts {
        [one] => format!(" -q {one}"),
        _ => String::new(),
    };
    println!("  modprobe nvme-tcp");
    println!("  nvme connect -t tcp -a {} -s {} -n {}{host}", endpoint.traddr, endpoint.trsvcid, endpoint.nqn);
    if hosts.is_empty() {
        println!("no host may connect yet: give its NQN with --host-nqn");
    }
}

/// Whether a volume has all its copies.
pub fn is_healthy(volume: &Volume) -> bool {
    volume.status.as_ref().is_some_and(|s| s.robustness == Robustness::Healthy)
}
