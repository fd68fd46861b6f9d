//! The host of a cluster's volume: `addax-perf verify`, which knows what it wrote and judges what it reads.
//!
//! *When things fail.* A load that has ended early is told apart from one that found something wrong by its exit code, which
//! [`Done`] carries with all that was reported.

use std::path::{Path, PathBuf};
use std::process::{Child, Output, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use crate::cluster::{HOST, PATIENCE};
use crate::netns::command_in;
use crate::programs::program;

/// Where a volume is served.
#[derive(Debug, Clone)]
pub struct Target {
    pub address: String,
    pub nqn: String,
    pub volume: String,
    /// Network namespace of the host.
    pub namespace: Option<PathBuf>,
}

impl Target {
    /// Starts `addax-perf verify` with a write log and more arguments.
    ///
    /// # Errors
    /// When it is not built.
    pub fn verify(&self, log: &Path, more: &[&str]) -> Result<Load> {
        let child = command_in(self.namespace.as_deref(), &program("addax-perf")?)
            .args(["verify", "--target", &self.address, "--nqn", &self.nqn, "--host-nqn", HOST])
            .args(["--expect-volume", &self.volume, "--no-pin", "--quiet", "-o", "json", "--log"])
            .arg(log)
            .args(more)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .context("start addax-perf")?;
        Ok(Load { child: Some(child) })
    }

    /// Reads everything that the log knows of and judges it. While nobody serves the volume it is tried again.
    ///
    /// # Errors
    /// At the first mismatch; when the volume is not served in time.
    pub fn check(&self, log: &Path, more: &[&str]) -> Result<Value> {
        let until = Instant::now() + PATIENCE;
        let args = [&["--phase", "check", "--written-only", "--bs", "64k"], more].concat();
        loop {
            let done = self.verify(log, &args)?.finish()?;
            match done.code {
                Some(0) => return Ok(done.report),
                Some(3) if Instant::now() < until => std::thread::sleep(Duration::from_millis(100)),
                _ => bail!("the check fails: {done:#?}"),
            }
        }
    }
}

/// A running `addax-perf verify`; killed when dropped.
#[derive(Debug)]
pub struct Load {
    child: Option<Child>,
}

/// How a load has ended.
#[derive(Debug)]
pub struct Done {
    /// Exit code; none after a signal.
    pub code: Option<i32>,
    /// Its report; null when there is none.
    pub report: Value,
    /// What it printed as errors.
    pub errors: String,
}

impl Load {
    /// Whether it runs.
    pub fn is_running(&mut self) -> bool {
        self.child.as_mut().is_some_and(|child| matches!(child.try_wait(), Ok(None)))
    }

    /// Sends it a signal.
    ///
    /// # Errors
    /// When it has ended.
    pub fn signal(&mut self, signal: Signal) -> Result<()> {
        ensure!(self.is_running(), "the load has ended");
        let id = self.child.as_ref().context("the load has ended")?.id();
        kill(Pid::from_raw(i32::try_from(id)?), signal).context("signal the load")
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// When it cannot be waited for.
    pub fn finish(mut self) -> Result<Done> {
        let child = self.child.take().context("the load has ended")?;
        let Output { status, stdout, stderr } = child.wait_with_output()?;
        let report = serde_json::from_slice(&stdout).unwrap_or_default();
        Ok(Done { code: status.code(), report, errors: String::from_utf8_lossy(&stderr).into_owned() })
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
