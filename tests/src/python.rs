//! SPDK's own Python client (`spdk` on PyPI), unmodified, in a folder that is filled once and kept.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::guest::image::cached;

/// The release of the client that the tests are written for.
const CLIENT: &str = "spdk==26.9";

/// The folder that has the client.
///
/// # Errors
/// When it cannot be installed.
pub fn client_folder() -> Result<PathBuf> {
    cached(&format!("python-{CLIENT}"), |folder| {
        let run = |command: &mut Command| -> Result<()> {
            let output = command.output().with_context(|| format!("cannot run {command:?}"))?;
            if !output.status.success() {
                bail!("{command:?} failed:\n{}", String::from_utf8_lossy(&output.stderr));
            }
            Ok(())
        };
        run(Command::new("python3").args(["-m", "pip", "install", "--quiet", "--target"]).arg(folder).arg(CLIENT))
    })
}

/// Runs a script with the client importable.
///
/// # Errors
/// When the script fails; with what it printed.
pub fn run(script: &str, args: &[&str]) -> Result<String> {
    let output = Command::new("python3")
        .env("PYTHONPATH", client_folder()?)
        .arg("-c")
        .arg(script)
        .args(args)
        .output()
        .context("cannot run python3")?;
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    if !output.status.success() {
        bail!("the script failed:\n{stdout}\n{}", String::from_utf8_lossy(&output.stderr));
    }
    Ok(stdout)
}
