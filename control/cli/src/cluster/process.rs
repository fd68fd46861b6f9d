//! Processes of a local cluster: started in the background, found again by their pid files.
//!
//! *Invariants.* A pid file holds the pid and the process's start time, so that a pid that was given to another process
//! is not taken for ours. Starting what runs already does nothing.

use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::layout::write_durable;

/// A background process by its name in the run folder.
#[derive(Debug, Clone)]
pub struct Daemon {
    pub name: String,
    pid_file: PathBuf,
    log_file: PathBuf,
}

impl Daemon {
    pub fn new(run: &Path, log: &Path, name: &str) -> Self {
        Self {
            name: name.to_owned(),
            pid_file: run.join(format!("{name}.pid")),
            log_file: log.join(format!("{name}.log")),
        }
    }

    /// The pid if it runs.
    pub fn pid(&self) -> Option<Pid> {
        let text = fs::read_to_string(&self.pid_file).ok()?;
        let (pid, start) = text.trim().split_once(' ')?;
        let pid: i32 = pid.parse().ok()?;
        (start_time(pid)? == start).then_some(Pid::from_raw(pid))
    }

    /// Starts it unless it runs; true when it was started.
    pub fn start(&self, mut command: Command) -> Result<bool> {
        if self.pid().is_some() {
            return Ok(false);
        }
        let log = fs::OpenOptions::new().create(true).append(true).open(&self.log_file);
        let log = log.with_context(|| format!("open {}", self.log_file.display()))?;
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        // A group of its own: a signal to the shell's group must not end the data plane.
        command.process_group(0);
        let child = command.spawn().with_context(|| format!("start {}", self.name))?;
        let pid = i32::try_from(child.id()).context("pid")?;
        let start =
            start_time(pid).with_context(|| format!("{} ended at once, see {}", self.name, self.log_file.display()))?;
        write_durable(&self.pid_file, format!("{pid} {start}\n").as_bytes(), 0o644)?;
        Ok(true)
    }

    /// Asks it to end, then ends it.
    pub fn stop(&self, patience: Duration) -> Result<()> {
        let Some(pid) = self.pid() else {
            let _ = fs::remove_file(&self.pid_file);
            return Ok(());
        };
        let _ = kill(pid, Signal::SIGTERM);
        if !self.wait_gone(patience) {
            let _ = kill(pid, Signal::SIGKILL);
            if !self.wait_gone(Duration::from_secs(5)) {
                bail!("{} (pid {pid}) does not end", self.name);
            }
        }
        let _ = fs::remove_file(&self.pid_file);
        Ok(())
    }

    fn wait_gone(&self, patience: Duration) -> bool {
        let until = Instant::now() + patience;
        while self.pid().is_some() {
            if Instant::now() >= until {
                return false;
            }
            reap();
            std::thread::sleep(Duration::from_millis(20));
        }
        true
    }

    /// The end of its log, for error messages.
    pub fn log_tail(&self) -> String {
        let text = fs::read_to_string(&self.log_file).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(12)..].join("\n")
    }
}

/// Takes the exit status of children that have ended, so that they do not stay as zombies.
pub fn reap() {
    use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
    while let Ok(status) = waitpid(None::<Pid>, Some(WaitPidFlag::WNOHANG)) {
        if status == WaitStatus::StillAlive {
            return;
        }
    }
}

/// Start time of a live process in clock ticks since boot; none for zombies.
fn start_time(pid: i32) -> Option<String> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let rest = stat.rsplit_once(')')?.1;
    let fields: Vec<&str> = rest.split_whitespace().collect();
    (*fields.first()? != "Z").then(|| fields.get(19).map(|f| (*f).to_owned())).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_found_again_started_once_and_stopped() {
        let dir = tempfile::tempdir().unwrap();
        let daemon = Daemon::new(dir.path(), dir.path(), "sleeper");
        let sleeper = || {
            let mut command = Command::new("sleep");
            command.arg("60");
            command
        };
        assert!(daemon.start(sleeper()).unwrap());
        assert!(!daemon.start(sleeper()).unwrap());
        assert!(daemon.pid().is_some());
        daemon.stop(Duration::from_secs(5)).unwrap();
        assert!(daemon.pid().is_none());
    }

    #[test]
    fn a_pid_of_another_process_is_not_ours() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("x.pid"), format!("{} 1\n", std::process::id())).unwrap();
        assert!(Daemon::new(dir.path(), dir.path(), "x").pid().is_none());
    }
}
