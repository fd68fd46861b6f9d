//! `addax-perf`: see the library.

use std::process::ExitCode;

use addax_perf::bench;
use addax_perf::cli::{Cli, CommandLine, Output};
use addax_perf::run::{self, Failure};
use clap::Parser;
use serde::Serialize;
use tracing_subscriber::EnvFilter;

const MISMATCH: u8 = 1;
const USAGE: u8 = 2;
const IO: u8 = 3;

fn main() -> ExitCode {
    let filter = EnvFilter::try_from_env("ADDAX_LOG").unwrap_or_else(|_| EnvFilter::new("error"));
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
    let outcome = match Cli::parse().command {
        CommandLine::Run(args) => {
            let output = args.load.output;
            run::run(args).map(|report| {
                print(output, &report, &report.table());
                let failed = report.load.errors > 0 || report.load.aborted.is_some();
                if failed { ExitCode::from(IO) } else { ExitCode::SUCCESS }
            })
        }
        CommandLine::Verify(args) => {
            let output = args.load.output;
            run::verify(args).map(|report| {
                print(output, &report, &report.table());
                match (report.mismatches_total, report.ok) {
                    (0, true) => ExitCode::SUCCESS,
                    (0, false) => ExitCode::from(IO),
                    _ => ExitCode::from(MISMATCH),
                }
            })
        }
        CommandLine::Bench(args) => bench::bench(&args).map(|(text, clean)| {
            write(&text);
            if clean { ExitCode::SUCCESS } else { ExitCode::from(IO) }
        }),
        CommandLine::BenchCompare(args) => bench::bench_compare(&args).map(|text| {
            write(&text);
            ExitCode::SUCCESS
        }),
    };
    outcome.unwrap_or_else(|failure| {
        eprintln!("addax-perf: {failure}");
        ExitCode::from(match failure {
            Failure::Usage(_) => USAGE,
            Failure::Io(_) => IO,
        })
    })
}

fn print(output: Output, report: &impl Serialize, table: &str) {
    let text = match output {
        Output::Table => table.to_owned(),
        Output::Json => match serde_json::to_string_pretty(report) {
            Ok(json) => json + "\n",
            Err(error) => format!("report: {error}\n"),
        },
    };
    write(&text);
}

fn write(text: &str) {
    use std::io::Write;
    // A reader that has gone does not change the outcome.
    let _ = std::io::stdout().write_all(text.as_bytes());
}
