//! Looks at every state of the model, scenario by scenario, and counts them.

use std::io::{self, Write};
use std::process::ExitCode;

use clap::Parser;
use mirror_model::{Mirror, SCENARIOS, check};

/// Exhaustive check of the mirror's configuration protocol.
#[derive(Debug, Parser)]
#[command(name = "mirror-model")]
struct Arguments {
    /// Only scenarios whose name contains this.
    #[arg(long, default_value = "")]
    only: String,
    /// Only those that `cargo test` looks at.
    #[arg(long)]
    quick: bool,
}

fn main() -> io::Result<ExitCode> {
    let arguments = Arguments::parse();
    let mut out = io::stdout().lock();
    let mut failed = false;
    for scenario in SCENARIOS.iter().filter(|s| s.name.contains(&arguments.only) && (s.quick || !arguments.quick)) {
        let report = check(Mirror::new(scenario.bounds, None));
        writeln!(out, "{}: {} states, {} steps, depth {}", scenario.name, report.states, report.steps, report.depth)?;
        for (property, story) in &report.violations {
            writeln!(out, "VIOLATED: {property}\n{story}")?;
        }
        if report.unseen != scenario.unseen {
            writeln!(out, "NOT AS EXPECTED: {:?} did not happen, expected {:?}", report.unseen, scenario.unseen)?;
        }
        out.flush()?;
        failed |= !report.violations.is_empty() || report.unseen != scenario.unseen;
    }
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}
