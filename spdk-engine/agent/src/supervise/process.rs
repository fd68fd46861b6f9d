//! One data-plane process: its identity, its pid file, how it is started and ended.
//!
//! *What it is.* A process is named by pid *and* start time, so that a reused pid is never taken for it. The pid file
//! lets an agent that was restarted find a data plane that hangs or has not opened its socket yet.
//!
//! *Invariants.* The process gets a process group of its own, no terminal and a log file, so it outlives the agent and
//! whatever started the agent. A signal is sent only after the start time was compared.
//!
//! *When things fail.* A missing or broken pid file means "no known process"; the socket is the other way to find it.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};
use tokio::process::{Child, Command};
use tokio::time::{Instant, sleep};

/// Name of the pid file in the runtime folder.
pub const PID_FILE: &str = "data-plane.pid";
/// Name of the data plane's log in the runtime folder.
pub const LOG_FILE: &str = "data-plane.log";
/// A log longer than this is put aside as `data-plane.log.1` at the next start.
pub const LOG_BYTES_MAX: u64 = 16 * 1024 * 1024;

const POLL: Duration = Duration::from_millis(10);

/// A process that is or was a data plane.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessId {
    /// Process number.
    pub pid: i32,
    /// Start time in clock ticks since boot.
    pub start_time: u64,
}

impl ProcessId {
    /// The process that has that number now; `None` when there is none, or only its remains.
    pub fn of(pid: i32) -> Option<Self> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The name may hold anything, brackets and blanks too; what follows the last ')' is fixed.
        let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace();
        let state = fields.next()?;
        if matches!(state, "Z" | "X") {
            return None;
        }
        let start_time = fields.nth(18)?.parse().ok()?;
        Some(Self { pid, start_time })
    }

    /// Whether it still runs.
    pub fn is_alive(&self) -> bool {
        Self::of(self.pid) == Some(*self)
    }

    /// Sends a signal; a process that is gone is no error.
    pub fn signal(&self, signal: Signal) {
        if self.is_alive()
            && let Err(error) = kill(Pid::from_raw(self.pid), signal)
        {
            tracing::warn!(pid = self.pid, %signal, %error, "cannot signal the data plane");
        }
    }

    /// Waits until it is gone; false when `deadline` passed first.
    pub async fn wait_gone(&self, deadline: Duration) -> bool {
        let end = Instant::now() + deadline;
        while self.is_alive() {
            if Instant::now() >= end {
                return false;
            }
            sleep(POLL).await;
        }
        true
    }
}

/// The process in the pid file, if it runs.
pub fn read_pid_file(runtime_dir: &Path) -> Option<ProcessId> {
    let text = fs::read(runtime_dir.join(PID_FILE)).ok()?;
    let process: ProcessId = serde_json::from_slice(&text).ok()?;
    process.is_alive().then_some(process)
}

/// Writes the pid file.
///
/// # Errors
/// The file system's.
pub fn write_pid_file(runtime_dir: &Path, process: &ProcessId) -> io::Result<()> {
    let new = runtime_dir.join(format!("{PID_FILE}.new"));
    let mut file = fs::File::create(&new)?;
    file.write_all(&serde_json::to_vec(process)?)?;
    file.sync_all()?;
    fs::rename(new, runtime_dir.join(PID_FILE))
}

/// Starts the program and records it.
///
/// # Errors
/// The program cannot be executed, or the runtime folder cannot be written.
pub fn spawn(runtime_dir: &Path, program: &Path, args: &[String]) -> io::Result<(Child, ProcessId)> {
    let log = open_log(runtime_dir)?;
    let mut child = Command::new(program)
        .args(args)
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log)
        .process_group(0)
        .kill_on_drop(false)
        .spawn()?;
    let pid = child.id().and_then(|pid| i32::try_from(pid).ok()).and_then(ProcessId::of);
    let Some(process) = pid else {
        return Err(io::Error::other(match child.try_wait() {
            Ok(Some(status)) => format!("it ended at once: {status}"),
            _ => "it ended at once".to_owned(),
        }));
    };
    write_pid_file(runtime_dir, &process)?;
    Ok((child, process))
}

fn open_log(runtime_dir: &Path) -> io::Result<fs::File> {
    let path: PathBuf = runtime_dir.join(LOG_FILE);
    if fs::metadata(&path).is_ok_and(|meta| meta.len() > LOG_BYTES_MAX) {
        fs::rename(&path, runtime_dir.join(format!("{LOG_FILE}.1")))?;
    }
    fs::OpenOptions::new().create(true).append(true).open(path)
}

/// Ends a process: in order if it can within `grace`, otherwise by SIGKILL. False when it is there even then.
pub async fn end(process: &ProcessId, grace: Duration) -> bool {
    process.signal(Signal::SIGTERM);
    // A stopped process takes no notice of SIGTERM until it is continued.
    process.signal(Signal::SIGCONT);
    if process.wait_gone(grace).await {
        return true;
    }
    process.signal(Signal::SIGKILL);
    process.wait_gone(Duration::from_secs(5)).await
}

/// The last lines of the data plane's log, for messages.
pub fn log_tail(runtime_dir: &Path) -> String {
    let text = fs::read(runtime_dir.join(LOG_FILE)).unwrap_or_default();
    let tail = &text[text.len().saturating_sub(512)..];
    let text = String::from_utf8_lossy(tail);
    text.lines().rev().take(2).collect::<Vec<_>>().into_iter().rev().collect::<Vec<_>>().join(" | ")
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[tokio::test]
    async fn a_process_is_known_by_pid_and_start_time() {
        let dir = tempfile::tempdir().unwrap();
        let (mut child, process) = spawn(dir.path(), Path::new("/bin/sleep"), &["1000".to_owned()]).unwrap();
        assert!(process.is_alive());
        assert_eq!(read_pid_file(dir.path()), Some(process));
        let other = ProcessId { start_time: process.start_time + 1, ..process };
        assert!(!other.is_alive());
        other.signal(Signal::SIGKILL);
        assert!(process.is_alive(), "a signal for another process of that number was delivered");
        assert!(end(&process, Duration::from_secs(10)).await);
        assert_eq!(read_pid_file(dir.path()), None);
        child.wait().await.unwrap();
    }

    #[test]
    fn a_broken_pid_file_is_no_process() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(read_pid_file(dir.path()), None);
        fs::write(dir.path().join(PID_FILE), "{\"pid\": 1").unwrap();
        assert_eq!(read_pid_file(dir.path()), None);
    }

    #[tokio::test]
    async fn a_missing_program_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        assert!(spawn(dir.path(), Path::new("/no/such/program"), &[]).is_err());
    }
}
