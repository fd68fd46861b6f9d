//! `addax`: the control plane's programs and the command line, in one binary.

#![cfg_attr(test, allow(clippy::unwrap_used))]

mod cluster;
mod demo;
mod output;
mod serve;
mod verbs;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::{Args, CommandFactory, Parser, Subcommand};

use crate::cluster::UpOptions;
use crate::cluster::layout::{DataPlaneChoice, Layout};
use crate::output::Format;
use crate::serve::DataPlaneArgs;

/// Replicated block storage for Kubernetes and plain Linux hosts.
#[derive(Debug, Parser)]
#[command(name = "addax", version, after_help = "Example: addax up && addax volume create data --size 1GiB")]
struct Cli {
    /// Folder of the local cluster.
    #[arg(long, global = true, env = "ADDAX_DIR")]
    dir: Option<PathBuf>,
    /// A kubeconfig to use instead of the local cluster's.
    #[arg(long, global = true, env = "ADDAX_KUBECONFIG")]
    kubeconfig: Option<PathBuf>,
    /// Form of the output.
    #[arg(short = 'o', long = "output", global = true, value_enum, default_value_t)]
    output: Format,
    /// Show no progress.
    #[arg(short = 'q', long, global = true)]
    quiet: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Start a cluster of several nodes on this machine, or what is missing of it.
    #[command(after_help = "Example: addax up --nodes 3")]
    Up {
        /// Number of nodes: 3 for a new cluster unless given, what it has for one that is there. Node n has the address
        /// 127.0.0.n.
        #[arg(long)]
        nodes: Option<u32>,
        /// First NVMe/TCP port to try.
        #[arg(long, default_value_t = 4420)]
        port: u16,
        /// Size of each node's disk, a sparse file; what the file system has, unless given.
        #[arg(long, value_parser = output::parse_size)]
        disk_size: Option<i64>,
        /// A stock spdk_tgt as the data plane of a node, or of all; may be repeated. What is lost where it serves volumes
        /// stands in their status.
        #[arg(long, value_name = "[NODE=]PROGRAM")]
        data_plane: Vec<DataPlaneChoice>,
    },
    /// End the local cluster's processes; its data stays.
    #[command(after_help = "Example: addax down --delete")]
    Down {
        /// Remove the cluster's folder with all volumes.
        #[arg(long)]
        delete: bool,
    },
    /// Volumes.
    Volume {
        #[command(subcommand)]
        verb: verbs::volume::VolumeVerb,
    },
    /// Disks of nodes.
    Disk {
        #[command(subcommand)]
        verb: verbs::disk::DiskVerb,
    },
    /// Nodes.
    Node {
        #[command(subcommand)]
        verb: verbs::node::NodeVerb,
    },
    /// Hugepages for the data plane: status, reserve, release. Nothing needs them to run.
    Hugepages {
        #[command(subcommand)]
        verb: verbs::hugepages::HugepagesVerb,
    },
    /// Show on this machine that a volume survives the loss of its engines, then clean up.
    #[command(after_help = "Example: addax demo")]
    Demo(demo::DemoArgs),
    /// Print a completion script for a shell.
    #[command(after_help = "Example: addax completions bash > /etc/bash_completion.d/addax")]
    Completions {
        /// The shell.
        shell: clap_complete::Shell,
    },
    /// Run the embedded API server of a local cluster.
    #[command(after_help = "Example: addax apiserver --dir /var/lib/addax")]
    Apiserver,
    /// Run a node's agent.
    #[command(after_help = "Example: addax agent --node node-1")]
    Agent(AgentArgs),
    /// Run a node's manager.
    #[command(after_help = "Example: addax manager --node node-1")]
    Manager(NodeArgs),
}

#[derive(Debug, Args)]
struct NodeArgs {
    /// Name of the node.
    #[arg(long)]
    node: String,
}

#[derive(Debug, Args)]
struct AgentArgs {
    #[command(flatten)]
    node: NodeArgs,
    /// Data plane to run instead of the addax-engine beside this program: a stock spdk_tgt.
    #[arg(long, value_name = "PROGRAM")]
    data_plane: Option<PathBuf>,
    /// JSON-RPC socket of a data plane that somebody else runs: it is used, never started or ended.
    #[arg(long, value_name = "SOCKET", conflicts_with_all = ["data_plane", "data_plane_arg"])]
    data_plane_socket: Option<PathBuf>,
    /// One more argument for the data plane; may be repeated.
    #[arg(long, value_name = "ARGUMENT", allow_hyphen_values = true)]
    data_plane_arg: Vec<String>,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    serve::start_logging(matches!(cli.command, Command::Apiserver | Command::Agent(_) | Command::Manager(_)));
    // One provider for all of TLS; the error only says that it is set already.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let made = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let result = made.map_err(anyhow::Error::from).and_then(|runtime| runtime.block_on(run(cli)));
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("addax: {error:#}");
            ExitCode::FAILURE
        }
    }
}

async fn run(cli: Cli) -> Result<()> {
    let layout = Layout::new(cli.dir.clone());
    match cli.command {
        Command::Up { nodes, port, disk_size, data_plane } => {
            let layout = layout?;
            let options = UpOptions { nodes, data_port: port, disk_size, data_planes: data_plane, quiet: cli.quiet };
            let cluster = cluster::up(&layout, &options).await?;
            if !cli.quiet {
                println!("{} nodes are ready", cluster.nodes.len());
                println!("  export KUBECONFIG={}", layout.kubeconfig().display());
            }
            Ok(())
        }
        Command::Down { delete } => cluster::down(&layout?, delete).await,
        Command::Volume { verb } => {
            verbs::volume::run(&client(&layout?, cli.kubeconfig.as_deref()).await?, verb, cli.output, cli.quiet).await
        }
        Command::Disk { verb } => {
            verbs::disk::run(&client(&layout?, cli.kubeconfig.as_deref()).await?, verb, cli.output, cli.quiet).await
        }
        Command::Node { verb } => {
            verbs::node::run(&client(&layout?, cli.kubeconfig.as_deref()).await?, verb, cli.output).await
        }
        Command::Hugepages { verb } => verbs::hugepages::run(verb, cli.output),
        Command::Demo(args) => demo::run(args).await,
        Command::Completions { shell } => {
            clap_complete::generate(shell, &mut Cli::command(), "addax", &mut std::io::stdout());
            Ok(())
        }
        Command::Apiserver => serve::apiserver(&layout?).await,
        Command::Agent(args) => {
            let AgentArgs { node, data_plane, data_plane_socket, data_plane_arg } = args;
            let given = DataPlaneArgs { program: data_plane, args: data_plane_arg, socket: data_plane_socket };
            serve::agent(&layout?, &node.node, given).await
        }
        Command::Manager(args) => serve::manager(&layout?, &args.node).await,
    }
}

async fn client(layout: &Layout, kubeconfig: Option<&std::path::Path>) -> Result<kube::Client> {
    match kubeconfig {
        Some(path) => cluster::client_from(kube::config::Kubeconfig::read_from(path)?).await,
        None => {
            layout.require()?;
            cluster::require_running(layout)?;
            cluster::client(layout).await
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_verb_has_an_example() {
        fn check(command: &clap::Command, path: &str) {
            for sub in command.get_subcommands().filter(|s| s.get_name() != "help") {
                let path = format!("{path} {}", sub.get_name());
                if sub.has_subcommands() {
                    check(sub, &path);
                } else {
                    let help = sub.get_after_help().map(ToString::to_string).unwrap_or_default();
                    assert!(help.contains("Example: addax"), "{path} has no example");
                }
            }
        }
        check(&Cli::command(), "addax");
    }
}
