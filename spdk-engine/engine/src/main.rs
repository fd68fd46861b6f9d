//! `addax-engine`: the data plane's process, with the options of `spdk_tgt` that people use.

mod blob_tool;

use std::cell::{Cell, OnceCell, RefCell};
use std::io::IsTerminal;
use std::path::PathBuf;
use std::process::ExitCode;
use std::rc::Rc;

use addax_engine::app::{App, Options, Phase};
use addax_engine::cpus::{Cpus, parse_cpus};
use addax_engine::rpc::config::Config;
use addax_engine::rpc::framework::{InitGate, LOG_LEVELS, Logging};
use addax_engine::rpc::server::Server;
use addax_engine::rpc::{self, Methods};
use addax_engine::start::{StartConfig, run};
use addax_engine::{bdev, keyring, mirror, nvme, nvmf, raid};
use addax_hugepages::{BufPool, ClassConfig, Hugepages, MapPolicy, PoolConfig};
use blob_tool::BlobTool;
use clap::{Parser, Subcommand};
use tracing_subscriber::reload;

/// Addax's data plane: serves disks and replicated volumes over NVMe/TCP, driven by JSON-RPC.
#[derive(Parser, Debug)]
#[command(version, after_help = "Example: addax-engine -m 0x1 -r /run/addax/engine.sock --no-huge -s 128")]
#[command(args_conflicts_with_subcommands = true)]
struct Args {
    /// Instead of serving: a tool.
    #[command(subcommand)]
    tool: Option<Tool>,
    /// Processors for data cores: a hexadecimal mask (0x3) or a list in brackets ([0,2-3]).
    #[arg(short = 'm', long = "cpumask", default_value = "0x1", value_parser = parse_cpus)]
    cpumask: Cpus,
    /// Memory for I/O buffers in MiB. All of it is resident, since the kernel keeps it for disk I/O.
    #[arg(short = 's', long = "mem-size", default_value_t = 48, value_parser = clap::value_parser!(u32).range(8..=65536))]
    mem_size: u32,
    /// Path of the RPC socket.
    #[arg(short = 'r', long = "rpc-socket", default_value = "/var/tmp/spdk.sock")]
    rpc_socket: PathBuf,
    /// JSON configuration to replay at the start.
    #[arg(short = 'c', long = "config", visible_alias = "json")]
    config: Option<PathBuf>,
    /// Stay in the start-up phase until framework_start_init.
    #[arg(long)]
    wait_for_rpc: bool,
    /// Use no hugepages.
    #[arg(long)]
    no_huge: bool,
    /// Never poll: sleep whenever there is nothing to do at once.
    #[arg(long)]
    interrupt_mode: bool,
    /// Log components in debug detail (a module of the engine, such as nvmf; may be repeated).
    #[arg(short = 'L', long = "logflag")]
    logflag: Vec<String>,
    /// Log level: ERROR, WARNING, NOTICE, INFO or DEBUG.
    #[arg(long, default_value = "NOTICE", value_parser = parse_level)]
    log_level: String,
    /// Log as JSON lines.
    #[arg(long)]
    log_json: bool,
    /// Shared-memory id of SPDK's command line; without effect.
    #[arg(short = 'i', long = "shm-id", hide = true, allow_negative_numbers = true)]
    _shm_id: Option<i64>,
    /// Trace group mask of SPDK's command line; without effect.
    #[arg(short = 'e', long = "tpoint-group", hide = true)]
    _tpoint_group: Option<String>,
}

/// What the program does besides serving.
#[derive(Subcommand, Debug)]
enum Tool {
    /// Look into a blobstore on a device or in a file, without changing it.
    #[command(subcommand)]
    Blob(BlobTool),
}

fn parse_level(text: &str) -> Result<String, String> {
    let upper = text.to_uppercase();
    if LOG_LEVELS.contains(&upper.as_str()) {
        return Ok(upper);
    }
    Err(format!("{text:?} is not allowed: {}", LOG_LEVELS.join(", ")))
}

fn filter(level: &str, flags: &[String]) -> String {
    let level = match level {
        "ERROR" => "error",
        "WARNING" | "NOTICE" => "warn",
        "INFO" => "info",
        _ => "debug",
    };
    let mut text = level.to_owned();
    for flag in flags {
        text.push_str(&format!(",addax_engine::{flag}=debug"));
    }
    text
}

type Reload = reload::Handle<tracing_subscriber::EnvFilter, tracing_subscriber::Registry>;

fn start_logging(args: &Args) -> Reload {
    use tracing_subscriber::layer::SubscriberExt;
    use tracing_subscriber::util::SubscriberInitExt;
    let first = tracing_subscriber::EnvFilter::new(filter(&args.log_level, &args.logflag));
    let (layer, handle) = reload::Layer::new(first);
    let colours = std::io::stderr().is_terminal();
    let text =
        (!args.log_json).then(|| tracing_subscriber::fmt::layer().with_ansi(colours).with_writer(std::io::stderr));
    let json = args.log_json.then(|| tracing_subscriber::fmt::layer().json().with_writer(std::io::stderr));
    tracing_subscriber::registry().with(layer).with(text).with(json).init();
    handle
}

fn pool(args: &Args) -> Result<BufPool, String> {
    let bytes = u64::from(args.mem_size) << 20;
    // One part in four for small transfers: 4 KiB I/O is the most frequent, 128 KiB the most hungry.
    let small = ClassConfig { bytes: 8 << 10, count: (bytes / 4 / (8 << 10)) as u32 };
    let large_bytes = 132 << 10;
    let large = ClassConfig { bytes: large_bytes, count: (bytes * 3 / 4 / large_bytes as u64) as u32 };
    let hugepages = if args.no_huge { Hugepages::Never } else { Hugepages::Auto };
    let policy = MapPolicy { hugepages, ..MapPolicy::default() };
    BufPool::new(PoolConfig { small, large, policy }).map_err(|e| format!("buffers: {e}"))
}

fn all_methods() -> Rc<Methods> {
    let cell: Rc<OnceCell<Rc<Methods>>> = Rc::default();
    let mut methods = Methods::default();
    rpc::framework::register(&mut methods, Rc::clone(&cell));
    rpc::config::register(&mut methods, Rc::clone(&cell));
    rpc::bdev::register(&mut methods);
    bdev::examine::register(&mut methods);
    bdev::rpc::register(&mut methods);
    bdev::passthru::register(&mut methods);
    keyring::register(&mut methods);
    bdev::crypto::register(&mut methods);
    nvme::register(&mut methods);
    bdev::lvol::register(&mut methods);
    raid::register(&mut methods);
    mirror::register(&mut methods);
    rpc::bdev::register_examine_entry(&mut methods);
    nvmf::register(&mut methods);
    let methods = Rc::new(methods);
    let _ = cell.set(Rc::clone(&methods));
    methods
}

fn main() -> ExitCode {
    let args = Args::parse();
    if let Some(Tool::Blob(tool)) = &args.tool {
        return blob_tool::run(tool);
    }
    let reload = start_logging(&args);
    match start(args, reload) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("addax-engine: {error}");
            ExitCode::FAILURE
        }
    }
}

/// What outlives the reactors.
#[derive(Default)]
struct Process {
    /// The RPC socket.
    server: RefCell<Option<Server>>,
    /// Whether the start failed.
    failed: Cell<bool>,
}

fn start(args: Args, reload: Reload) -> Result<ExitCode, String> {
    let config = args.config.as_deref().map(Config::read).transpose()?;
    let pool = pool(&args)?;
    let options = Options {
        rpc_socket: args.rpc_socket.clone(),
        cpus: args.cpumask.0.clone(),
        interrupt_mode: args.interrupt_mode,
    };
    block_signals()?;
    let start = StartConfig { cpus: args.cpumask.0.clone(), pool, options, pin: true };
    let process = Rc::new(Process::default());
    let inside = Rc::clone(&process);
    run(start, move |app| init(&app, args, config, reload, inside)).map_err(|e| format!("start: {e}"))?;
    // Nobody is to find a socket that nobody serves.
    drop(process.server.take());
    Ok(if process.failed.get() { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// SIGTERM and SIGINT are taken by a thread of their own and become a message to the control core.
fn block_signals() -> Result<(), String> {
    let mut set = nix::sys::signal::SigSet::empty();
    set.add(nix::sys::signal::Signal::SIGTERM);
    set.add(nix::sys::signal::Signal::SIGINT);
    set.thread_block().map_err(|e| format!("signals: {e}"))
}

fn init(app: &App, args: Args, config: Option<Config>, reload: Reload, process: Rc<Process>) {
    let control = app.core().peers()[0].mail.clone();
    *app.module(OnSignal::default).0.borrow_mut() = Some(app.clone());
    let waiter = std::thread::Builder::new().name("signals".into()).spawn(move || {
        let mut set = nix::sys::signal::SigSet::empty();
        set.add(nix::sys::signal::Signal::SIGTERM);
        set.add(nix::sys::signal::Signal::SIGINT);
        while set.wait().is_ok() {
            control.post(stop_by_signal);
        }
    });
    if let Err(error) = waiter {
        tracing::error!(%error, "signals are not handled");
    }
    let logging = app.module(Logging::default);
    *logging.level.borrow_mut() = args.log_level.clone();
    let flags = args.logflag.clone();
    *logging.apply.borrow_mut() = Some(Rc::new(move |level| {
        let _ = reload.reload(tracing_subscriber::EnvFilter::new(filter(level, &flags)));
    }));
    let app_in_task = app.clone();
    app.core().spawn(async move {
        if let Err(error) = bring_up(&app_in_task, &args, config, &process).await {
            eprintln!("addax-engine: {error}");
            process.failed.set(true);
            app_in_task.core().stop();
        }
    });
}

/// The application, until the first signal takes it to end it in order.
#[derive(Default)]
struct OnSignal(RefCell<Option<App>>);

/// The first signal ends the process in order: disks are left clean. A second one ends it at once.
fn stop_by_signal(core: &addax_engine::reactor::Core) {
    let Some(app) = core.local(OnSignal::default).0.borrow_mut().take() else { return core.stop() };
    core.spawn(async move {
        bdev::lvol::stop_all(&app).await;
        app.core().stop();
    });
}

async fn bring_up(app: &App, args: &Args, config: Option<Config>, process: &Process) -> Result<(), String> {
    let methods = all_methods();
    bdev::examine::start(app, methods.examiners.clone());
    let server = Server::start(app.clone(), Rc::clone(&methods), &args.rpc_socket)
        .map_err(|e| format!("RPC socket {}: {e}", args.rpc_socket.display()))?;
    *process.server.borrow_mut() = Some(server);
    let gate = app.module(InitGate::default);
    if let Some(config) = &config {
        config.replay(app, &methods).await?;
    }
    if args.wait_for_rpc {
        let _ = gate.wait_for_start().await;
    }
    app.set_phase(Phase::Runtime);
    if let Some(config) = &config {
        config.replay(app, &methods).await?;
    }
    gate.finished();
    tracing::info!(instance = %app.instance(), "ready");
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_sound() {
        use clap::CommandFactory;
        Args::command().debug_assert();
    }
}
