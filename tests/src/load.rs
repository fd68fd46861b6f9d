//! Load on a volume, as `addax-perf run` makes it.

use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use crate::programs::program;

/// A load that runs until it is ended; killed when dropped.
#[derive(Debug)]
pub struct Load {
    child: Option<Child>,
}

/// What a load has done.
#[derive(Debug, Clone)]
pub struct Done {
    /// I/Os that have succeeded.
    pub ios: u64,
    /// I/Os that have failed for good.
    pub errors: u64,
    /// Lost connections that came back.
    pub reconnects: u64,
    /// All that it has reported.
    pub report: Value,
}

impl Load {
    /// Starts a load, with further arguments of `addax-perf run`.
    ///
    /// # Errors
    /// When the program is not built.
    pub fn start(target: SocketAddr, nqn: &str, args: &[&str]) -> Result<Self> {
        let mut command = Command::new(program("addax-perf")?);
        command.args(["run", "--quiet", "--no-pin", "--output", "json", "--nqn", nqn, "--target", &target.to_string()]);
        let child = command.args(args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
        Ok(Self { child: Some(child) })
    }

    /// Whether it still runs.
    pub fn is_running(&mut self) -> bool {
        self.child.as_mut().is_some_and(|child| matches!(child.try_wait(), Ok(None)))
    }

    /// Ends it early, in good order.
    ///
    /// # Errors
    /// As [`Self::finish`].
    pub fn stop(self) -> Result<Done> {
        if let Some(child) = &self.child {
            kill(Pid::from_raw(i32::try_from(child.id())?), Signal::SIGINT)?;
        }
        self.finish()
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// When it has measured nothing; with what it printed.
    pub fn finish(mut self) -> Result<Done> {
        let output = self.child.take().context("the load has ended before")?.wait_with_output()?;
        let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        let report: Value = serde_json::from_str(&out).with_context(|| format!("{}: {out}{err}", output.status))?;
        let number = |path: &str| report.pointer(path).and_then(Value::as_u64).with_context(|| format!("no {path}"));
        let done = Done {
            ios: number("/total/ios")?,
            errors: number("/errors")?,
            reconnects: number("/reconnects")?,
            report: report.clone(),
        };
        ensure!(output.status.success() || done.errors > 0, "{}: {out}{err}", output.status);
        Ok(done)
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            // Fails only for a process that has ended already.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
