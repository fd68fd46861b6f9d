//! `make bench-pause`: measures pauses of I/O (see `e2e::pauses`), prints them, and keeps them in `target/bench/pauses.md`.
//! `PAUSE_RUNS` says how often each is measured, 3 times unless given.

use std::path::PathBuf;

use anyhow::{Context, Result};

fn main() -> Result<()> {
    let runs = match std::env::var("PAUSE_RUNS") {
        Ok(text) => text.parse().with_context(|| format!("PAUSE_RUNS={text}: a number is allowed"))?,
        Err(_) => 3,
    };
    let text = e2e::pauses::report(&e2e::pauses::measure(runs)?);
    println!("{text}");
    let folder = PathBuf::from(std::env::var_os("CARGO_TARGET_DIR").unwrap_or_else(|| "target".into())).join("bench");
    std::fs::create_dir_all(&folder)?;
    std::fs::write(folder.join("pauses.md"), text)?;
    Ok(())
}
