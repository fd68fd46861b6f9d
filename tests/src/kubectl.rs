//! Plain `kubectl`, as a user of a cluster has it.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

/// `kubectl` with a kubeconfig.
#[derive(Debug)]
pub struct Kubectl {
    kubeconfig: PathBuf,
    home: tempfile::TempDir,
}

impl Kubectl {
    /// None when `kubectl` is not installed; says so on stderr, also where the test harness captures what tests print.
    ///
    /// # Errors
    /// When there is no place for its cache.
    pub fn find(kubeconfig: &Path) -> Result<Option<Self>> {
        if !Command::new("kubectl").args(["version", "--client"]).output().is_ok_and(|o| o.status.success()) {
            // Who has closed stderr wants to read nothing.
            let _ = writeln!(std::io::stderr(), "SKIPPED: what `kubectl` has to do, because it is not installed");
            return Ok(None);
        }
        Ok(Some(Self { kubeconfig: kubeconfig.to_owned(), home: tempfile::tempdir()? }))
    }

    /// Runs it with a manifest as its input and gives back what it printed.
    ///
    /// # Errors
    /// When it exits with another code than 0; with what it printed.
    pub fn run(&self, args: &[&str], input: &str) -> Result<String> {
        match self.output(args, input)? {
            (true, out, _) => Ok(out),
            (false, out, err) => bail!("kubectl {}:\n{out}{err}", args.join(" ")),
        }
    }

    /// Runs it, and gives back the message with which it was refused.
    ///
    /// # Errors
    /// When it was not refused.
    pub fn refused(&self, args: &[&str], input: &str) -> Result<String> {
        match self.output(args, input)? {
            (false, _, err) => Ok(err),
            (true, out, _) => bail!("kubectl {} was not refused:\n{input}\n{out}", args.join(" ")),
        }
    }

    fn output(&self, args: &[&str], input: &str) -> Result<(bool, String, String)> {
        let mut child = Command::new("kubectl")
            .arg("--kubeconfig")
            .arg(&self.kubeconfig)
            .arg("--cache-dir")
            .arg(self.home.path())
            .args(args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .context("start kubectl")?;
        // One that fails early does not read its input.
        let _ = child.stdin.take().context("no input")?.write_all(input.as_bytes());
        let output = child.wait_with_output()?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Ok((output.status.success(), text(&output.stdout), text(&output.stderr)))
    }
}
