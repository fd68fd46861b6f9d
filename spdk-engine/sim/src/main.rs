//! `engine-sim`: runs the simulator over a range of seeds.
//!
//! Exits with 0 when all pass, else with 1 after printing the first failing seed and a smaller run that fails too.

use std::process::ExitCode;

use clap::Parser;
use engine_sim::{ModelBug, Outcome, Scenario, run, shrink};

/// Runs the mirror core on simulated disks, networks, clocks and an arbiter.
#[derive(Debug, Parser)]
#[command(name = "engine-sim", version)]
struct Args {
    /// Seeds: a range `A..B` (without B) or one number.
    #[arg(long, default_value = "0..2000", value_parser = parse_seeds)]
    seeds: std::ops::Range<u64>,
    /// Print one line per event: time in milliseconds, who, what.
    #[arg(long)]
    trace: bool,
    /// Most host commands of a run.
    #[arg(long, default_value_t = 600)]
    ops: u32,
    /// Do not look at the write-intent bits on the disks, only at what hosts see.
    #[arg(long)]
    no_check_bits: bool,
    /// Do not look for a smaller failing run.
    #[arg(long)]
    no_shrink: bool,
    /// Go on after a seed that fails; only say which ones do, and how.
    #[arg(long)]
    keep_going: bool,
    /// Break one rule in the surroundings of the core on purpose, by the name of the switch.
    #[arg(long, value_parser = parse_model_bug)]
    model_bug: Option<ModelBug>,
    /// Break one rule in the core on purpose, by the name of the switch.
    #[cfg(feature = "planted-bugs")]
    #[arg(long, value_parser = parse_bug)]
    bug: Option<mirror_core::PlantedBug>,
}

fn parse_model_bug(text: &str) -> Result<ModelBug, String> {
    find_switch(ModelBug::ALL, text)
}

#[cfg(feature = "planted-bugs")]
fn parse_bug(text: &str) -> Result<mirror_core::PlantedBug, String> {
    find_switch(mirror_core::PlantedBug::ALL, text)
}

fn find_switch<T: Copy + std::fmt::Debug>(all: &[T], text: &str) -> Result<T, String> {
    let found = all.iter().find(|bug| format!("{bug:?}") == text);
    found.copied().ok_or_else(|| format!("{text:?} is not a switch: {all:?} are allowed"))
}

fn parse_seeds(text: &str) -> Result<std::ops::Range<u64>, String> {
    let number = |t: &str| t.parse::<u64>().map_err(|e| format!("{t:?} is not a seed: {e}"));
    let range = match text.split_once("..") {
        Some((from, to)) => number(from)?..number(to)?,
        None => number(text)?..number(text)?.checked_add(1).ok_or("the seed is too large")?,
    };
    if range.is_empty() { Err(format!("{text:?} is empty: A..B with A < B is allowed")) } else { Ok(range) }
}

fn main() -> ExitCode {
    let args = Args::parse();
    let (mut total, mut failed) = (Outcome::default(), 0u64);
    let began = std::time::Instant::now();
    for seed in args.seeds.clone() {
        let scenario = Scenario {
            ops: args.ops,
            trace: args.trace,
            model_bug: args.model_bug,
            check_bits: !args.no_check_bits,
            #[cfg(feature = "planted-bugs")]
            bug: args.bug,
            ..Scenario::new(seed)
        };
        let outcome = run(&scenario);
        if let Some(violation) = outcome.violation.as_ref().filter(|_| args.keep_going) {
            println!("seed {seed} FAILED: {}", violation.chars().take(200).collect::<String>());
            failed += 1;
        } else if let Some(violation) = &outcome.violation {
            report(seed, violation, &scenario, &outcome, args.no_shrink);
            return ExitCode::FAILURE;
        }
        add(&mut total, &outcome);
    }
    let rate = (args.seeds.end - args.seeds.start) as f64 / began.elapsed().as_secs_f64();
    println!(
        "seeds {}..{}: {failed} failed; {rate:.0} seeds/s; {} commands ({} acknowledged), {} opens, {} lost connections, {} joins, {} swaps of \
         unknown outcome, {} ended with hosts that must detach, {} records recovered, {} snapshots, {} replicas deleted, {} faults, {} events; {} blocks copied, {} meta writes, {} bits cleared, {} of {} regions inherited",
        args.seeds.start,
        args.seeds.end,
        total.ops,
        total.acked,
        total.opens,
        total.leaves,
        total.joins,
        total.unknown_swaps,
        total.refusals,
        total.recoveries,
        total.snapshots,
        total.deletions,
        total.faults.len(),
        total.events,
        total.copied,
        total.meta_writes,
        total.cleared,
        total.inherited,
        total.inherited_of
    );
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn add(total: &mut Outcome, one: &Outcome) {
    total.ops += one.ops;
    total.acked += one.acked;
    total.opens += one.opens;
    total.leaves += one.leaves;
    total.joins += one.joins;
    total.unknown_swaps += one.unknown_swaps;
    total.refusals += one.refusals;
    total.recoveries += one.recoveries;
    total.snapshots += one.snapshots;
    total.deletions += one.deletions;
    total.events += one.events;
    total.copied += one.copied;
    total.meta_writes += one.meta_writes;
    total.cleared += one.cleared;
    total.inherited += one.inherited;
    total.inherited_of += one.inherited_of;
    total.faults.extend(one.faults.iter().copied());
}

fn report(seed: u64, violation: &str, scenario: &Scenario, outcome: &Outcome, no_shrink: bool) {
    println!("seed {seed} FAILED: {violation}");
    println!("again, with every event: engine-sim --seeds {seed} --trace");
    if no_shrink {
        return;
    }
    let small = shrink(scenario, outcome);
    println!("smallest failing run found in {} tries, {} commands, faults:", small.tries, small.scenario.ops);
    for fault in small.scenario.faults.iter().flatten() {
        println!("  at {:>5} ms for {:>4} ms: {:?}", fault.at / 1_000_000, fault.for_ns / 1_000_000, fault.kind);
    }
    if let Some(violation) = small.outcome.violation {
        println!("it fails with: {violation}");
    }
}
