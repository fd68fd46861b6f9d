//! Processes of a local cluster: started in the background, found again by their pid files.
//!
//! *Invariants.* A pid file holds the pid and the process's start time, so that a pid that was given to another process
//! is not taken for ours. Starting what runs already does nothing; what has been killed and is still on its way out does
//! not run, and is waited for, since it holds its ports.

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
        self.find().filter(|(_, life)| *life == Life::Running).map(|(pid, _)| pid)
    }

    /// The process of the pid file, unless it is over.
    fn find(&self) -> Option<(Pid, Life)> {
        let text = fs::read_to_string(&self.pid_file).ok()?;
        let (pid, start) = text.trim().split_once(' ')?;
        let pid: i32 = pid.parse().ok()?;
        let (found, life) = look(pid)?;
        (found == start).then_some((Pid::from_raw(pid), life))
    }

    /// Starts it unless it runs; true when it was started.
    pub fn start(&self, mut command: Command) -> Result<bool> {
        if self.pid().is_some() {
            return Ok(false);
        }
        self.wait_over(Duration::from_secs(5))?;
        let log = fs::OpenOptions::new().create(true).append(true).open(&self.log_file);
        let log = log.with_context(|| format!("open {}", self.log_file.display()))?;
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        // A group of its own: a signal to the shell's group must not end the data plane.
        command.process_group(0);
        let child = command.spawn().with_context(|| format!("start {}", self.name))?;
        let pid = i32::try_from(child.id()).context("pid")?;
        let (start, _) =
            look(pid).with_context(|| format!("{} ended at once, see {}", self.name, self.log_file.display()))?;
        write_durable(&self.pid_file, format!("{pid} {start}\n").as_bytes(), 0o644)?;
        Ok(true)
    }

    /// Waits for one that is on its way out.
    fn wait_over(&self, patience: Duration) -> Result<()> {
        let until = Instant::now() + patience;
        while let Some((pid, Life::Ending)) = self.find() {
            if Instant::now() >= until {
                bail!("{} (pid {pid}) has been killed and does not end", self.name);
            }
            reap();
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    /// Asks it to end, and does not wait.
    pub fn ask_to_end(&self) {
        if let Some(pid) = self.pid() {
            let _ = kill(pid, Signal::SIGTERM);
        }
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
        while self.find().is_some() {
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

/// Where a process is in its life; one that waits only to be reaped is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Life {
    Running,
    /// Its memory is gone, its files and sockets not yet.
    Ending,
}

/// Start time of a process in clock ticks since boot, and its life; none of what is over.
fn look(pid: i32) -> Option<(String, Life)> {
    parse_stat(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

fn parse_stat(stat: &str) -> Option<(String, Life)> {
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    let (state, start, memory) = (*fields.first()?, fields.get(19)?, *fields.get(20)?);
    let life = if memory == "0" { Life::Ending } else { Life::Running };
    (!matches!(state, "Z" | "X" | "x")).then(|| ((*start).to_owned(), life))
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
    fn what_is_ending_does_not_run_and_what_waits_to_be_reaped_is_over() {
        let stat = |state: &str, memory: &str| {
            parse_stat(&format!("7 (a) b) {state} 1 7 7 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 4711 {memory} 5 0\n"))
        };
        assert_eq!(stat("S", "8192"), Some(("4711".to_owned(), Life::Running)));
        assert_eq!(stat("R", "0"), Some(("4711".to_owned(), Life::Ending)));
        assert_eq!(stat("Z", "0"), None);
    }

    #[test]
    fn what_was_killed_is_started_again_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let daemon = Daemon::new(dir.path(), dir.path(), "sleeper");
        for _ in 0..20 {
            let mut command = Command::new("sleep");
            command.arg("60");
            assert!(daemon.start(command).unwrap());
            kill(daemon.pid().unwrap(), Signal::SIGKILL).unwrap();
            // Else the next start finds it running, as one may in the moment before the signal is taken.
            while daemon.pid().is_some() {
                std::thread::yield_now();
            }
        }
    }

    #[test]
    fn a_pid_of_another_process_is_not_ours() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("x.pid"), format!("{} 1\n", std::process::id())).unwrap();
        assert!(Daemon::new(dir.path(), dir.path(), "x").pid().is_none());
    }
}
