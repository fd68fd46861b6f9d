//! `make soak`: chaos for a while (see `e2e::chaos`). `SOAK_MINUTES` (30), `SOAK_VOLUMES` (10) and `SOAK_SEED` (by the
//! clock) say how much of which.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail};
use e2e::chaos::{Config, run};

fn number(name: &str, default: u64) -> Result<u64> {
    match std::env::var(name) {
        Ok(text) => text.parse().with_context(|| format!("{name}={text}: a number is allowed")),
        Err(_) => Ok(default),
    }
}

fn main() -> Result<()> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs();
    let config = Config {
        seed: number("SOAK_SEED", now)?,
        volumes: u32::try_from(number("SOAK_VOLUMES", 10)?)?,
        mib: 64,
        rate: 100,
        round: Duration::from_secs(60),
        time: Duration::from_secs(60 * number("SOAK_MINUTES", 30)?),
    };
    match run(&config) {
        Ok(outcome) => {
            if let Some(outcome) = outcome {
                println!("{}", outcome.report());
            }
            Ok(())
        }
        // The logs of the cluster are printed; a backtrace of this program says nothing.
        Err(error) => bail!("{error:#}"),
    }
}
