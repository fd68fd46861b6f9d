//! Where the built programs are.

use std::path::PathBuf;

use anyhow::{Result, bail};

/// Path of a program of this project: `$ADDAX_ENGINE_BIN` for the engine, in `$ADDAX_BIN_DIR`, else in `target/release` or `target/debug` of the workspace,
/// whichever was built last.
///
/// # Errors
/// When it was not built.
pub fn program(name: &str) -> Result<PathBuf> {
    if let Some(path) = std::env::var_os("ADDAX_ENGINE_BIN").filter(|_| name == "addax-engine") {
        return Ok(path.into());
    }
    if let Some(dir) = std::env::var_os("ADDAX_BIN_DIR") {
        return Ok(PathBuf::from(dir).join(name));
    }
    let workspace = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..");
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| workspace.join("target"), PathBuf::from);
    let built = ["release", "debug"].map(|profile| target.join(profile).join(name));
    let time = |path: &PathBuf| path.metadata().and_then(|m| m.modified()).ok();
    match built.iter().filter(|p| p.exists()).max_by_key(|p| time(p)) {
        Some(path) => Ok(path.clone()),
        None => bail!("{name} is not built: run `make build` first"),
    }
}
