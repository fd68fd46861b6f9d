//! `addax hugepages status|reserve|release`: the host's hugepages, and which of them are ours.

use std::path::PathBuf;

use addax_hugepages::{PageSize, PoolId, Reserver, Status};
use anyhow::{Context, Result};
use clap::Subcommand;

use crate::output::{self, Format};

/// Where it is noted which pages were reserved by us; forgotten by a reboot, as the pages are.
const LEDGER: &str = "/run/addax/hugepages.json";

#[derive(Debug, Subcommand)]
pub enum HugepagesVerb {
    /// Show the pages of every NUMA node and size.
    #[command(after_help = "Example: addax hugepages status -o json")]
    Status,
    /// Reserve pages: afterwards COUNT pages of the node are ours.
    #[command(after_help = "Example: addax hugepages reserve --numa-node 0 --count 64")]
    Reserve {
        /// NUMA node.
        #[arg(long, default_value_t = 0)]
        numa_node: u32,
        /// Size of a page in bytes, such as 2MiB or 1GiB.
        #[arg(long, default_value = "2MiB", value_parser = parse_page_size)]
        page_size: PageSize,
        /// Pages to hold in all.
        #[arg(long)]
        count: u64,
    },
    /// Give back what was reserved by `reserve`, and nothing else.
    #[command(after_help = "Example: addax hugepages release")]
    Release,
}

fn parse_page_size(text: &str) -> Result<PageSize, String> {
    let bytes = output::parse_size(text)?;
    PageSize::from_bytes(u64::try_from(bytes).unwrap_or(0)).map_err(|e| e.to_string())
}

pub fn run(verb: HugepagesVerb, format: Format) -> Result<()> {
    let ledger = PathBuf::from(LEDGER);
    if let (Some(folder), false) = (ledger.parent(), matches!(verb, HugepagesVerb::Status)) {
        std::fs::create_dir_all(folder).with_context(|| format!("make folder {}", folder.display()))?;
    }
    let reserver = Reserver::host(ledger)?;
    match verb {
        HugepagesVerb::Status => {
            let status = Status::read(&reserver)?;
            match format {
                Format::Table => println!("{status}"),
                _ => output::print(format, &[], &status.pools, |_| Vec::new())?,
            }
        }
        HugepagesVerb::Reserve { numa_node, page_size, count } => {
            let held = reserver.reserve(PoolId { node: numa_node, page_size }, count)?;
            println!("{held} pages of NUMA node {numa_node} are reserved for Addax");
        }
        HugepagesVerb::Release => println!("{} pages given back", reserver.release_all()?),
    }
    Ok(())
}
