//! `addax node ls|show`.

use addax_api::Node;
use anyhow::{Context, Result};
use clap::Subcommand;
use kube::{Client, ResourceExt, api::ListParams};

use super::{api, api_error};
use crate::output::{self, Format};

#[derive(Debug, Subcommand)]
pub enum NodeVerb {
    /// List nodes with their state and storage.
    #[command(after_help = "Example: addax node ls -o json")]
    Ls,
    /// Show one node with its disks.
    #[command(after_help = "Example: addax node show node-1")]
    Show {
        /// Name of the node.
        name: String,
    },
}

pub async fn run(client: &Client, verb: NodeVerb, format: Format) -> Result<()> {
    let nodes = api::<Node>(client);
    match verb {
        NodeVerb::Ls => {
            let list = nodes.list(&ListParams::default()).await.map_err(api_error)?;
            output::print(
                format,
                &["name", "ready", "schedulable", "agent", "storage", "free", "scheduled"],
                &list.items,
                row,
            )
        }
        NodeVerb::Show { name } => {
            let node = nodes.get_opt(&name).await.map_err(api_error)?;
            let node = node.with_context(|| format!("node {name:?} does not exist"))?;
            show(&node, format)
        }
    }
}

fn condition(node: &Node, type_: &str) -> String {
    let conditions = node.status.as_ref().map(|s| s.conditions.as_slice()).unwrap_or_default();
    addax_api::condition::get(conditions, type_).map_or_else(|| "Unknown".into(), |c| format!("{:?}", c.status))
}

fn row(node: &Node) -> Vec<String> {
    let status = node.status.clone().unwrap_or_default();
    let sum = |f: fn(&addax_api::node::DiskStatus) -> i64| output::bytes(status.disk_status.values().map(f).sum());
    vec![
        node.name_any(),
        condition(node, addax_api::node::CONDITION_READY),
        condition(node, addax_api::node::CONDITION_SCHEDULABLE),
        status.agent_address.clone(),
        sum(|d| d.storage_maximum),
        sum(|d| d.storage_available),
        sum(|d| d.storage_scheduled),
    ]
}

fn show(node: &Node, format: Format) -> Result<()> {
    if format != Format::Table {
        return output::print(format, &[], std::slice::from_ref(node), |_| Vec::new());
    }
    output::print(
        format,
        &["name", "ready", "schedulable", "agent", "storage", "free", "scheduled"],
        std::slice::from_ref(node),
        row,
    )?;
    let disks: Vec<_> = node.spec.disks.iter().collect();
    let status = node.status.clone().unwrap_or_default();
    println!();
    output::print(
        format,
        &["disk", "type", "place", "ready", "schedulable", "size", "free", "scheduled", "replicas"],
        &disks,
        |(name, disk)| {
            let seen = status.disk_status.get(*name).cloned().unwrap_or_default();
            vec![
                (*name).clone(),
                disk.type_.as_str().to_owned(),
                disk.place(),
                super::disk::reason(&seen, addax_api::node::CONDITION_READY),
                super::disk::reason(&seen, addax_api::node::CONDITION_SCHEDULABLE),
                output::bytes(seen.storage_maximum),
                output::bytes(seen.storage_available),
                output::bytes(seen.storage_scheduled),
                seen.scheduled_replicas.keys().cloned().collect::<Vec<_>>().join(","),
            ]
        },
    )?;
    Ok(())
}
