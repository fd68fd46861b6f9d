//! The data-plane process of this node: started, watched, restarted, adopted.
//!
//! *What it is.* One task owns the process. Everybody else sees a [`PlaneStatus`] through a watch channel and talks to
//! the data plane through the [`Client`] in it.
//!
//! *Flow.*
//! ```text
//!        ┌──────────▶ look: socket answers? pid file names a live process?
//!        │                 │ yes: adopt           │ no: start the program
//!        │                 ▼                      ▼
//!        │            greet: methods, instance, transport ──▶ Up ──▶ pings
//!        └── pause (back-off, never gives up) ◀── Down ◀──── exit, closed socket, missed pings (then SIGKILL)
//! ```
//! *Invariants.* The data plane outlives the agent: it is never ended because the agent ends (unless asked to). A data
//! plane that still runs is adopted, not replaced. `instance` is new exactly when the process is: the engine's own
//! instance id, or pid and start time for a stock `spdk_tgt`. A data plane that somebody else runs is never started and
//! never sent a signal; one that hangs only counts as down. One that waits for its start (`--wait-for-rpc`, as all do that
//! the agent starts) is started, a stock one with the options of [`Client::set_stock_options`].
//!
//! *When things fail.* A process that does not answer [`Supervision::ping_misses`] pings, each within
//! [`Supervision::ping_deadline`], is ended by SIGKILL and started anew. A program that cannot start is tried again with
//! growing pauses up to [`Supervision::pause_max`], for ever; the reason is in the status.

pub mod process;

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use nix::sys::signal::Signal;
use tokio::net::UnixStream;
use tokio::process::Child;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;

use crate::rpc::{Client, RpcError};
use process::ProcessId;

const POLL: Duration = Duration::from_millis(20);

/// How the data plane is run and watched.
#[derive(Clone, Debug)]
pub struct Supervision {
    /// The program: `addax-engine` or `spdk_tgt`. `None`: somebody else runs it, and it is only used through its socket.
    pub program: Option<PathBuf>,
    /// Its arguments.
    pub args: Vec<String>,
    /// Its JSON-RPC socket.
    pub socket: PathBuf,
    /// Folder for pid file and log.
    pub runtime_dir: PathBuf,
    /// How long a started process may take until it answers.
    pub start_deadline: Duration,
    /// Time between two pings.
    pub ping_interval: Duration,
    /// How long one ping may take.
    pub ping_deadline: Duration,
    /// Pings missed in a row after which the process counts as hung.
    pub ping_misses: u32,
    /// First pause before a restart. It doubles up to [`Self::pause_max`], and begins anew after a life longer than that.
    pub pause_min: Duration,
    /// Longest pause before a restart.
    pub pause_max: Duration,
}

impl Supervision {
    /// The usual times for a program.
    pub fn new(program: Option<PathBuf>, args: Vec<String>, socket: PathBuf, runtime_dir: PathBuf) -> Self {
        Self {
            program,
            args,
            socket,
            runtime_dir,
            start_deadline: Duration::from_secs(30),
            // Two wake-ups a second at both ends would already show in the idle budget; one every two seconds does not.
            ping_interval: Duration::from_secs(2),
            ping_deadline: Duration::from_secs(5),
            ping_misses: 3,
            pause_min: Duration::from_millis(50),
            pause_max: Duration::from_secs(10),
        }
    }
}

/// A data plane that answers.
#[derive(Clone, Debug)]
pub struct Plane {
    /// The connection for calls.
    pub client: Client,
    /// Its socket, for connections of one's own.
    pub socket: PathBuf,
    /// Which run of the process this is.
    pub instance: String,
    /// Its name and version.
    pub version: String,
    /// The process.
    pub process: ProcessId,
    methods: BTreeSet<String>,
}

impl Plane {
    /// Whether it has a method.
    pub fn has(&self, method: &str) -> bool {
        self.methods.contains(method)
    }

    /// Whether its engines have the mirror's guarantees.
    pub fn has_mirror(&self) -> bool {
        self.has("addax_mirror_create") && self.has("addax_wait_events")
    }

    /// Whether engines can run here at all: by the mirror, or as best effort by a `raid1`.
    pub fn can_serve(&self) -> bool {
        self.has_mirror() || self.has("bdev_raid_create")
    }

    /// Whether it is the bundled one.
    pub fn is_own(&self) -> bool {
        self.has("addax_get_info")
    }

    /// Whether files are opened by io_uring, otherwise by Linux AIO. SPDK's io_uring device cannot free what a file holds.
    pub fn has_uring(&self) -> bool {
        self.is_own() && self.has("bdev_uring_create")
    }

    /// Whether a write that finds no free cluster is answered as such; SPDK calls that an error of the device.
    pub fn tells_full(&self) -> bool {
        self.is_own()
    }
}

/// What is known of the data plane.
#[derive(Clone, Debug, Default)]
pub struct PlaneStatus {
    /// The data plane; `None` while it is down.
    pub plane: Option<Arc<Plane>>,
    /// Why it is down.
    pub reason: String,
    /// Down, and its process is known to have ended: nothing of what it had open or exported is left. False while a process
    /// may be there that cannot be reached.
    pub ended: bool,
    /// Processes started after the first.
    pub restarts: u32,
}

/// Why a data plane did not come up.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SuperviseError {
    /// The program could not be executed.
    #[error("cannot start {program}: {source}")]
    Spawn {
        /// The program.
        program: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// Somebody else is to run it, and does not.
    #[error("nothing answers at {socket}, where somebody else is to run the data plane")]
    NotRunning {
        /// The socket.
        socket: PathBuf,
    },
    /// It ended before it answered.
    #[error("the data plane (pid {pid}) ended while starting; its log ends with: {log}")]
    Ended {
        /// Its pid.
        pid: i32,
        /// The last words.
        log: String,
    },
    /// It did not answer in time.
    #[error("the data plane did not answer on {socket} within {after:?}")]
    Silent {
        /// The socket.
        socket: PathBuf,
        /// The deadline.
        after: Duration,
    },
    /// One that was killed is still there.
    #[error("the data plane (pid {pid}) was killed and does not die: is its disk stuck? None is started beside it")]
    Undead {
        /// Its pid.
        pid: i32,
    },
    /// It answered something unusable.
    #[error(transparent)]
    Rpc(#[from] RpcError),
}

/// Starts the supervisor. It runs until `shutdown` and then leaves the process alone.
pub fn start(config: Supervision, shutdown: CancellationToken) -> watch::Receiver<PlaneStatus> {
    let (status, receiver) = watch::channel(PlaneStatus { reason: "starting".to_owned(), ..PlaneStatus::default() });
    let supervisor = Supervisor { config, status, child: None, last: None, starts: 0 };
    tokio::spawn(supervisor.run(shutdown));
    receiver
}

/// Ends the data plane of a runtime folder, in order if it can within `grace`. True when none runs any more.
pub async fn stop_data_plane(runtime_dir: &std::path::Path, grace: Duration) -> bool {
    match process::read_pid_file(runtime_dir) {
        Some(found) => process::end(&found, grace).await,
        None => true,
    }
}

struct Supervisor {
    config: Supervision,
    status: watch::Sender<PlaneStatus>,
    /// Set when this agent started the process; kept so that it is reaped.
    child: Option<Child>,
    /// The process that was used last.
    last: Option<ProcessId>,
    starts: u32,
}

impl Supervisor {
    async fn run(mut self, shutdown: CancellationToken) {
        let mut pause = self.config.pause_min;
        loop {
            let began = Instant::now();
            let reason = tokio::select! {
                () = shutdown.cancelled() => return,
                reason = self.one_life() => reason,
            };
            tracing::warn!(%reason, "the data plane is down");
            self.publish(None, reason);
            if began.elapsed() > self.config.pause_max {
                pause = self.config.pause_min;
            }
            tokio::select! {
                () = shutdown.cancelled() => return,
                () = sleep(pause) => {}
            }
            pause = (pause * 2).min(self.config.pause_max);
        }
    }

    fn publish(&self, plane: Option<Arc<Plane>>, reason: String) {
        let restarts = self.starts.saturating_sub(1);
        let ended = plane.is_none() && self.has_ended();
        self.status.send_replace(PlaneStatus { plane, reason, ended, restarts });
    }

    /// Whether no process of the data plane is left. One that somebody else runs must have been seen, to know that it ended.
    fn has_ended(&self) -> bool {
        let last_ended = self.last.map(|process| !process.is_alive());
        match self.config.program {
            Some(_) => last_ended.unwrap_or(true) && process::read_pid_file(&self.config.runtime_dir).is_none(),
            None => last_ended.unwrap_or(false),
        }
    }

    /// From bringing it up to its end; why it ended.
    async fn one_life(&mut self) -> String {
        let plane = match self.bring_up().await {
            Ok(plane) => Arc::new(plane),
            Err(error) => return error.to_string(),
        };
        tracing::info!(instance = %plane.instance, version = %plane.version, pid = plane.process.pid, "the data plane is up");
        self.publish(Some(plane.clone()), String::new());
        self.watch(&plane).await
    }

    async fn bring_up(&mut self) -> Result<Plane, SuperviseError> {
        let (client, process) = match self.find().await {
            Some(found) => found,
            None => {
                self.check_none_lives()?;
                self.start_process().await?
            }
        };
        self.last = Some(process);
        // Counts as the first start when the process was adopted, so that later ones are restarts.
        self.starts = self.starts.max(1);
        self.greet(client, process).await
    }

    /// A data plane that runs already. One that runs but does not answer is ended.
    async fn find(&self) -> Option<(Client, ProcessId)> {
        if let Some(found) = connect(&self.config.socket).await {
            if self.config.program.is_none() {
                return Some(found);
            }
            if let Err(error) = process::write_pid_file(&self.config.runtime_dir, &found.1) {
                tracing::warn!(%error, "cannot write the pid file");
            }
            return Some(found);
        }
        let process = process::read_pid_file(&self.config.runtime_dir).filter(|_| self.config.program.is_some())?;
        if let Ok(found) = self.wait_for_socket(&process).await {
            return Some(found);
        }
        self.kill(&process).await;
        None
    }

    /// One that is stuck in its disk does not die at once, and what it was writing may still land: no other beside it.
    fn check_none_lives(&self) -> Result<(), SuperviseError> {
        let known = self.last.into_iter().chain(process::read_pid_file(&self.config.runtime_dir));
        match known.into_iter().find(ProcessId::is_alive) {
            Some(process) if self.config.program.is_some() => Err(SuperviseError::Undead { pid: process.pid }),
            _ => Ok(()),
        }
    }

    async fn start_process(&mut self) -> Result<(Client, ProcessId), SuperviseError> {
        let Supervision { program, args, runtime_dir, socket, .. } = &self.config;
        let not_running = || SuperviseError::NotRunning { socket: socket.clone() };
        let program = program.as_ref().ok_or_else(not_running)?;
        let (child, process) = process::spawn(runtime_dir, program, args)
            .map_err(|source| SuperviseError::Spawn { program: program.clone(), source })?;
        self.child = Some(child);
        self.starts += 1;
        let found = self.wait_for_socket(&process).await;
        if found.is_err() {
            self.kill(&process).await;
        }
        found
    }

    async fn wait_for_socket(&self, process: &ProcessId) -> Result<(Client, ProcessId), SuperviseError> {
        let end = Instant::now() + self.config.start_deadline;
        loop {
            if let Some((client, peer)) = connect(&self.config.socket).await
                && peer == *process
            {
                return Ok((client, peer));
            }
            if !process.is_alive() {
                let log = process::log_tail(&self.config.runtime_dir);
                return Err(SuperviseError::Ended { pid: process.pid, log });
            }
            if Instant::now() >= end {
                let after = self.config.start_deadline;
                return Err(SuperviseError::Silent { socket: self.config.socket.clone(), after });
            }
            sleep(POLL).await;
        }
    }

    /// Learns what this data plane is and gives it its transport.
    async fn greet(&self, client: Client, process: ProcessId) -> Result<Plane, SuperviseError> {
        let greeting = async {
            let methods = client.rpc_get_methods().await?;
            let is_stock = !methods.contains("addax_get_info");
            if client.rpc_get_current_methods().await?.contains("framework_start_init") {
                if is_stock {
                    client.set_stock_options().await?;
                }
                client.framework_start_init().await?;
            }
            if methods.contains("framework_wait_init") {
                client.framework_wait_init().await?;
            }
            client.ensure_tcp_transport().await?;
            let mut version = client.spdk_get_version(self.config.ping_deadline).await?;
            let mut instance = format!("pid-{}-{}", process.pid, process.start_time);
            if !is_stock {
                let info = client.addax_get_info().await?;
                instance = info.engine_instance;
                version = format!("addax-engine {}", info.version);
            } else {
                tracing::warn!(%version, "this data plane has no mirror: engines here are its raid1, as best effort");
                // Older ones than the agent, and those that somebody else started.
                if !client.has_stock_options().await.unwrap_or(false) {
                    tracing::warn!(
                        "this data plane was started without bdev_auto_examine=false and bdev_retry_count=0: what a guest \
                         writes may be taken for an lvstore or an array, and writes may be sent twice"
                    );
                }
            }
            let socket = self.config.socket.clone();
            Ok(Plane { client, socket, instance, version, process, methods })
        };
        match timeout(self.config.start_deadline, greeting).await {
            Ok(Ok(plane)) => Ok(plane),
            Ok(Err(RpcError::Disconnected { .. })) if process.wait_gone(Duration::from_secs(1)).await => {
                let log = process::log_tail(&self.config.runtime_dir);
                Err(SuperviseError::Ended { pid: process.pid, log })
            }
            Ok(Err(error)) => {
                self.kill_if_hung(&process, &error).await;
                Err(SuperviseError::Rpc(error))
            }
            Err(_) => {
                self.kill(&process).await;
                let after = self.config.start_deadline;
                Err(SuperviseError::Silent { socket: self.config.socket.clone(), after })
            }
        }
    }

    async fn kill_if_hung(&self, process: &ProcessId, error: &RpcError) {
        if matches!(error, RpcError::Timeout { .. }) {
            self.kill(process).await;
        }
    }

    async fn kill(&self, process: &ProcessId) {
        if self.config.program.is_none() {
            return;
        }
        process.signal(Signal::SIGKILL);
        if !process.wait_gone(self.config.ping_deadline).await {
            tracing::error!(pid = process.pid, "the data plane does not die; is its disk stuck?");
        }
    }

    /// Ends when the data plane does, or when it has to be ended.
    async fn watch(&mut self, plane: &Plane) -> String {
        let mut misses = 0;
        loop {
            tokio::select! {
                () = plane.client.closed() => return self.ended(plane).await,
                () = sleep(self.config.ping_interval) => {}
            }
            match plane.client.spdk_get_version(self.config.ping_deadline).await {
                Ok(_) => misses = 0,
                Err(RpcError::Disconnected { .. }) => return self.ended(plane).await,
                Err(error) => {
                    misses += 1;
                    tracing::warn!(%error, misses, "the data plane missed a ping");
                }
            }
            if misses >= self.config.ping_misses {
                self.kill(&plane.process).await;
                return format!("pid {} did not answer {misses} pings", plane.process.pid);
            }
        }
    }

    async fn ended(&mut self, plane: &Plane) -> String {
        // The socket closes a moment before the process is gone.
        plane.process.wait_gone(Duration::from_secs(1)).await;
        let pid = plane.process.pid;
        match self.child.as_mut().and_then(|child| child.try_wait().ok().flatten()) {
            Some(status) => format!("pid {pid} ended: {status}"),
            None if plane.process.is_alive() => format!("pid {pid} closed its socket"),
            None => format!("pid {pid} ended"),
        }
    }
}

/// Connects to the socket and learns whose it is.
async fn connect(socket: &std::path::Path) -> Option<(Client, ProcessId)> {
    let stream = timeout(crate::rpc::CONNECT_DEADLINE, UnixStream::connect(socket)).await.ok()?.ok()?;
    let pid = stream.peer_cred().ok()?.pid()?;
    Some((Client::over(stream), ProcessId::of(pid)?))
}

#[cfg(test)]
pub(crate) mod tests;
