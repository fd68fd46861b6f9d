//! A data plane's process: start it, wait until it answers, freeze it, end it.
//!
//! *States.* Running or frozen (SIGSTOP) until it is ended; dropped, it is killed in either.
//!
//! *Invariants.* With a processor given, all threads of the process begin there, whatever they later ask for themselves.
//!
//! *When things fail.* A start that does not answer in time is undone, and its error carries the end of its log.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use nix::sched::{CpuSet, sched_setaffinity};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use super::rpc::{self, RpcError};

/// Bounds the start until the first answer, and an orderly end.
pub const PATIENCE: Duration = Duration::from_secs(90);
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// How much of a log an error carries, in bytes.
const LOG_TAIL: usize = 4096;

/// Why a data plane does not do what it should.
#[derive(Debug, thiserror::Error)]
pub enum ProcessError {
    /// The program cannot be started, or its files cannot be made.
    #[error("cannot start {program}: {source}")]
    Start {
        /// The program.
        program: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It has ended or stays silent.
    #[error("{program} does not answer at {socket}:\n{log}")]
    Silent {
        /// The program.
        program: PathBuf,
        /// Its socket.
        socket: PathBuf,
        /// The end of what it has printed.
        log: String,
    },
    /// It goes on after SIGTERM.
    #[error("{program} does not end by SIGTERM:\n{log}")]
    Endless {
        /// The program.
        program: PathBuf,
        /// The end of what it has printed.
        log: String,
    },
    /// A signal or a wait was refused.
    #[error("process {pid}: {source}")]
    Process {
        /// The process.
        pid: u32,
        /// Why.
        source: io::Error,
    },
}

/// What to start.
#[derive(Debug, Clone)]
pub struct Launch {
    /// The program.
    pub program: PathBuf,
    /// Its arguments, without the socket.
    pub args: Vec<String>,
    /// RPC socket, given to it by `-r`.
    pub socket: PathBuf,
    /// File for all that it prints; truncated.
    pub log: PathBuf,
    /// The processor on which all its threads begin.
    pub cpu: Option<u32>,
}

/// A running data plane; see the module.
#[derive(Debug)]
pub struct DataPlane {
    launch: Launch,
    child: Child,
}

/// Pins the calling thread to a processor.
///
/// # Errors
/// When there is no such processor or this process may not use it.
pub fn pin_thread(cpu: u32) -> io::Result<()> {
    let mut set = CpuSet::new();
    set.set(cpu as usize)?;
    Ok(sched_setaffinity(Pid::from_raw(0), &set)?)
}

/// Starts a command whose threads all begin on `cpu`.
///
/// # Errors
/// When the program or the processor is not there.
pub fn spawn_on(cpu: Option<u32>, mut command: Command) -> io::Result<Child> {
    let Some(cpu) = cpu else { return command.spawn() };
    // A new process has the processors of the thread that makes it.
    let spawner = thread::spawn(move || pin_thread(cpu).and_then(|()| command.spawn()));
    spawner.join().unwrap_or_else(|_| Err(io::Error::other("the thread that starts processes has died")))
}

impl DataPlane {
    /// Starts it and waits until it has finished its start.
    ///
    /// # Errors
    /// See [`ProcessError`].
    pub fn start(launch: Launch) -> Result<Self, ProcessError> {
        let failed = |source| ProcessError::Start { program: launch.program.clone(), source };
        let log = File::create(&launch.log).map_err(failed)?;
        let mut command = Command::new(&launch.program);
        command.arg("-r").arg(&launch.socket).args(&launch.args).stdin(Stdio::null());
        command.stdout(log.try_clone().map_err(failed)?).stderr(log);
        let child = spawn_on(launch.cpu, command).map_err(failed)?;
        let mut plane = Self { launch, child };
        plane.wait_until_ready()?;
        Ok(plane)
    }

    fn wait_until_ready(&mut self) -> Result<(), ProcessError> {
        let deadline = Instant::now() + PATIENCE;
        while self.call("framework_wait_init", &Value::Null).is_err() {
            if !self.is_running() || Instant::now() > deadline {
                let Launch { program, socket, .. } = &self.launch;
                return Err(ProcessError::Silent {
                    program: program.clone(),
                    socket: socket.clone(),
                    log: self.tail(),
                });
            }
            thread::sleep(POLL_INTERVAL);
        }
        Ok(())
    }

    /// Calls a method over a connection of its own.
    ///
    /// # Errors
    /// See [`RpcError`].
    pub fn call(&self, method: &str, params: &Value) -> Result<Value, RpcError> {
        rpc::call(&self.launch.socket, method, params)
    }

    /// Its RPC socket.
    #[must_use]
    pub fn socket(&self) -> &Path {
        &self.launch.socket
    }

    /// Its process.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// All that it has printed.
    #[must_use]
    pub fn log(&self) -> String {
        fs::read_to_string(&self.launch.log).unwrap_or_default()
    }

    fn tail(&self) -> String {
        let log = self.log();
        let start = log.len().saturating_sub(LOG_TAIL);
        let start = (start..log.len()).find(|at| log.is_char_boundary(*at)).unwrap_or(log.len());
        log[start..].to_owned()
    }

    /// Whether the process is still there.
    #[must_use]
    pub fn is_running(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    fn signal(&self, signal: Signal) -> Result<(), ProcessError> {
        let pid = self.pid();
        let sent = i32::try_from(pid).map_err(io::Error::other).and_then(|raw| Ok(kill(Pid::from_raw(raw), signal)?));
        sent.map_err(|source| ProcessError::Process { pid, source })
    }

    /// Takes the processor from it, so that another one can be measured there.
    ///
    /// # Errors
    /// When the process has gone.
    pub fn freeze(&self) -> Result<(), ProcessError> {
        self.signal(Signal::SIGSTOP)
    }

    /// Undoes [`Self::freeze`].
    ///
    /// # Errors
    /// When the process has gone.
    pub fn thaw(&self) -> Result<(), ProcessError> {
        self.signal(Signal::SIGCONT)
    }

    /// Kills it where it stands.
    ///
    /// # Errors
    /// When it cannot be waited for.
    pub fn kill(mut self) -> Result<(), ProcessError> {
        let pid = self.pid();
        let ended = self.child.kill().and_then(|()| self.child.wait());
        ended.map(drop).map_err(|source| ProcessError::Process { pid, source })
    }

    /// Ends it by SIGTERM; whether it ended well.
    ///
    /// # Errors
    /// When it goes on; it is then killed.
    pub fn terminate(mut self) -> Result<bool, ProcessError> {
        self.signal(Signal::SIGTERM)?;
        let deadline = Instant::now() + PATIENCE;
        loop {
            let ended = self.child.try_wait();
            if let Some(status) = ended.map_err(|source| ProcessError::Process { pid: self.pid(), source })? {
                return Ok(status.success());
            }
            if Instant::now() > deadline {
                return Err(ProcessError::Endless { program: self.launch.program.clone(), log: self.tail() });
            }
            thread::sleep(POLL_INTERVAL);
        }
    }
}

impl Drop for DataPlane {
    fn drop(&mut self) {
        // Fails only for a process that has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
