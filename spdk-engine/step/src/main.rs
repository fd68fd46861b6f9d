//! Runs a number of equal I/Os through a stepped engine, for an instruction counter, and prints what they called.
//!
//! ```text
//! valgrind --tool=callgrind --toggle-collect='*turn_engine*' step --device malloc --bytes 4096 --batches 100
//! ```

use std::process::ExitCode;

use clap::Parser;
use engine_step::host::Workload;
use engine_step::{Device, Failed, Step};

/// Runs I/Os through the engine without a machine around it.
#[derive(Debug, Parser)]
struct Args {
    /// What the I/O goes to.
    #[arg(long, value_enum, default_value = "malloc")]
    device: Device,
    /// Write instead of read.
    #[arg(long)]
    write: bool,
    /// Bytes of one I/O.
    #[arg(long, default_value_t = 4096)]
    bytes: u32,
    /// I/Os sent together.
    #[arg(long, default_value_t = 32)]
    depth: u16,
    /// Batches before anything is counted.
    #[arg(long, default_value_t = 10)]
    warm_up: u32,
    /// Batches.
    #[arg(long, default_value_t = 100)]
    batches: u32,
}

fn run(args: &Args) -> Result<(), Failed> {
    let mut step = Step::new(args.device)?;
    let mut host = step.attach()?;
    let io = Workload { write: args.write, bytes: args.bytes, depth: args.depth };
    step.run(&mut host, &io, args.warm_up)?;
    let before = step.calls();
    step.run(&mut host, &io, args.batches)?;
    let after = step.calls();
    println!(
        "ios {} receives {} empty_receives {} sends {} arms {}",
        u64::from(args.batches) * u64::from(args.depth),
        after.receives - before.receives,
        after.empty_receives - before.empty_receives,
        after.sends - before.sends,
        after.arms - before.arms,
    );
    Ok(())
}

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("step: {error}");
            ExitCode::FAILURE
        }
    }
}
