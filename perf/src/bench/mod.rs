//! `addax-perf bench`: races Addax's engine against a stock SPDK target, and always against the floor.
//!
//! *How.* For every cell of a matrix, runs of Addax and of the stock target take turns on the same processor, under the
//! same load generator on another one, with the floor measured beside each pair; the one that is not measured is frozen.
//! What counts is the median of the ratios within pairs, see [`stats`].
//!
//! | Module | Job |
//! |---|---|
//! | [`matrix`] | the cells, their names, the choice of them |
//! | [`setup`] | which calls make and export a device |
//! | [`generator`], [`parse`] | the load generators and what they print |
//! | [`floor`] | the ping-pong that no engine can beat by much |
//! | [`contest`], [`race`] | a data plane ready to be measured; pairs of runs |
//! | [`rest`] | what an idle engine costs, RPC under load |
//! | [`stats`], [`results`] | medians, ratios, promises; what is kept as JSON |
//! | [`markdown`], [`html`], [`svg`] | the report |
//! | [`compare`] | two results, cell by cell |
//!
//! *When things fail.* A run that fails is in the report with its reason; the race goes on, and the exit code says so. A
//! signal ends the race; no process is left.

pub mod compare;
pub mod contest;
pub mod floor;
pub mod generator;
pub mod html;
pub mod markdown;
pub mod matrix;
pub mod parse;
pub mod race;
pub mod rest;
pub mod results;
pub mod setup;
pub mod stats;
pub mod svg;

use std::fs;
use std::path::{Path, PathBuf};

use clap::Args;

use crate::run::Failure;
use matrix::{Cell, Filter};
use results::Race;

/// `addax-perf bench`.
#[derive(Debug, Clone, Args)]
pub struct BenchArgs {
    /// The engine to measure.
    #[arg(long, env = "ADDAX_ENGINE_BIN", value_name = "FILE", default_value = "target/release/addax-engine")]
    pub engine: PathBuf,
    /// A built SPDK tree to race against; alone against the floor without it.
    #[arg(long, env = "SPDK_DIR", value_name = "FOLDER")]
    pub spdk: Option<PathBuf>,
    /// Cells to measure, such as malloc/read/4k/qd32/c1; * and lists with commas are allowed, parts at the end may be
    /// left out. May be repeated. A quick subset unless given.
    #[arg(long, value_name = "CELLS", conflicts_with = "full")]
    pub cells: Vec<Filter>,
    /// The full matrix: takes hours.
    #[arg(long)]
    pub full: bool,
    /// Runs of each side in a cell, one of each at a time.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub pairs: u32,
    /// Seconds of a run.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=3600))]
    pub seconds: u32,
    /// Processor of the data planes.
    #[arg(long, default_value_t = 0)]
    pub target_cpu: u32,
    /// Processor of the load generator.
    #[arg(long, default_value_t = 1)]
    pub load_cpu: u32,
    /// Measure also what costs without load, or only that.
    #[arg(long, value_enum, default_value = "also")]
    pub rest: RestChoice,
    /// Connected volumes without I/O.
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u16).range(2..=1000))]
    pub idle_volumes: u16,
    /// Folder for the report and for the file behind the uring device.
    #[arg(long, value_name = "FOLDER", default_value = "target/bench")]
    pub out: PathBuf,
    /// List the cells and end.
    #[arg(long)]
    pub list: bool,
    /// No progress on standard error.
    #[arg(short, long)]
    pub quiet: bool,
}

/// Whether to measure an engine at rest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum RestChoice {
    /// After the cells.
    Also,
    /// Nothing else.
    Only,
    /// Not at all.
    No,
}

/// `addax-perf bench-compare`.
#[derive(Debug, Clone, Args)]
pub struct CompareArgs {
    /// Results of the old state: bench.json.
    pub before: PathBuf,
    /// Results of the new state.
    pub after: PathBuf,
}

impl BenchArgs {
    /// The cells asked for.
    #[must_use]
    pub fn chosen(&self) -> Vec<Cell> {
        match self {
            Self { rest: RestChoice::Only, .. } => Vec::new(),
            Self { full: true, .. } => matrix::full(),
            Self { cells, .. } if !cells.is_empty() => matrix::select(cells),
            _ => matrix::quick(),
        }
    }
}

/// Runs the race, writes the report, and gives the text for the terminal and whether every run went well.
///
/// # Errors
/// When nothing can be measured or the report cannot be written.
pub fn bench(args: &BenchArgs) -> Result<(String, bool), Failure> {
    let cells = args.chosen();
    if args.list {
        return Ok((cells.iter().map(|cell| format!("{cell}\n")).collect(), true));
    }
    fs::create_dir_all(&args.out).map_err(|e| Failure::Io(format!("--out {}: {e}", args.out.display())))?;
    let race = race::run(args, &cells)?;
    let written = write_report(&args.out, &race)?;
    let clean = race.cells.iter().all(|cell| cell.failures.is_empty());
    Ok((format!("{}\n{written}", markdown::page(&race)), clean))
}

fn write_report(out: &Path, race: &Race) -> Result<String, Failure> {
    let json = serde_json::to_string_pretty(race).map_err(|e| Failure::Io(format!("report: {e}")))?;
    let mut names = Vec::new();
    for (name, text) in
        [("bench.json", json + "\n"), ("bench.md", markdown::page(race)), ("bench.html", html::page(race))]
    {
        let path = out.join(name);
        fs::write(&path, text).map_err(|e| Failure::Io(format!("report {}: {e}", path.display())))?;
        names.push(path.display().to_string());
    }
    Ok(format!("report: {}\n", names.join(", ")))
}

/// Compares two results.
///
/// # Errors
/// When one cannot be read.
pub fn bench_compare(args: &CompareArgs) -> Result<String, Failure> {
    let read = |path: &Path| -> Result<Race, Failure> {
        let refuse = |why: String| Failure::Usage(format!("{}: {why}", path.display()));
        let text = fs::read_to_string(path).map_err(|e| refuse(e.to_string()))?;
        let race: Race = serde_json::from_str(&text).map_err(|e| refuse(format!("not a bench.json: {e}")))?;
        if race.format != results::FORMAT {
            return Err(refuse(format!("format {}: {} is read here", race.format, results::FORMAT)));
        }
        Ok(race)
    };
    Ok(compare::page(&read(&args.before)?, &read(&args.after)?))
}
