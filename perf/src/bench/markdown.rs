//! The report as Markdown. A pure function of the results.

use std::fmt::Write;

use super::results::{BYTES_PER_S, CellResult, Extra, Figure, IOPS, P50, P99, P99_9, Race, summary};
use super::stats::Summary;
use crate::units::Bytes;

/// The page.
#[must_use]
pub fn page(race: &Race) -> String {
    let mut out = String::from("# Data-plane benchmark\n\n");
    head(&mut out, race);
    promises(&mut out, race);
    cells(&mut out, race);
    extras(&mut out, &race.extras);
    failures(&mut out, race);
    if !race.notes.is_empty() {
        out.push_str("\n## Notes\n\n");
        race.notes.iter().for_each(|note| {
            let _ = writeln!(out, "- {}", note.lines().collect::<Vec<_>>().join(" "));
        });
    }
    out
}

/// What was raced, where and how, as lines of text and value.
#[must_use]
pub fn facts(race: &Race) -> Vec<(&'static str, String)> {
    let Race { machine, settings, .. } = race;
    vec![
        ("Began", race.began.clone()),
        ("Engine", race.addax.clone()),
        ("Against", race.spdk.clone().unwrap_or_else(|| "the floor alone".to_owned())),
        ("Machine", format!("{}, {} processors, Linux {}", machine.processor, machine.processors, machine.kernel)),
        (
            "Runs",
            format!(
                "{} pairs of {} s in each cell, in turns; {} on processor {}, targets on processor {}",
                settings.pairs, settings.seconds, settings.generator, settings.load_cpu, settings.target_cpu
            ),
        ),
    ]
}

/// How to read it.
pub const LEGEND: &str = "Figures are medians of the runs with their quartiles (q1–q3); ratios are medians over pairs of \
    runs, with quartiles. The floor is a busy-polled exchange of the same bytes over TCP loopback between the same two \
    processors. Depth counts I/Os in flight over all connections.";

fn head(out: &mut String, race: &Race) {
    for (what, text) in facts(race) {
        let _ = writeln!(out, "- {what}: {text}");
    }
    let _ = writeln!(out, "\n{LEGEND}");
}

/// How many promises were looked at and the ones not kept, with their cells.
#[must_use]
pub fn broken(race: &Race) -> (usize, Vec<String>) {
    let (mut count, mut broken) = (0, Vec::new());
    for cell in &race.cells {
        for promise in cell.promises() {
            count += 1;
            if !promise.kept {
                broken.push(format!("{}: {} {:.3}, bound {}", cell.cell, promise.what, promise.found, promise.bound));
            }
        }
    }
    for extra in &race.extras {
        if let (Some(kept), Some(found), Some(limit)) = (extra.is_kept(), extra.addax, extra.limit) {
            count += 1;
            if !kept {
                broken.push(format!("{}: {found:.2} {}, at most {limit}", extra.name, extra.unit));
            }
        }
    }
    (count, broken)
}

fn promises(out: &mut String, race: &Race) {
    let (count, broken) = broken(race);
    if count == 0 {
        return;
    }
    let _ = writeln!(out, "\n## Promises\n\n{} of {count} kept.", count - broken.len());
    if !broken.is_empty() {
        out.push_str("\nNot kept:\n\n");
        broken.iter().for_each(|line| {
            let _ = writeln!(out, "- {line}");
        });
    }
}

/// A median with its quartiles, in thousands where that is shorter.
#[must_use]
pub fn figure(value: Option<Summary>) -> String {
    use super::svg::short;
    match value {
        Some(s) => format!("{} ({}–{})", short(s.median), short(s.q1), short(s.q3)),
        None => "–".to_owned(),
    }
}

/// A ratio with its quartiles.
#[must_use]
pub fn ratio(value: Option<Summary>) -> String {
    match value {
        Some(s) => format!("{:.3} ({:.3}–{:.3})", s.median, s.q1, s.q3),
        None => "–".to_owned(),
    }
}

/// Latencies of one side: medians of p50, p99 and p99.9.
#[must_use]
pub fn latencies(runs: &[super::parse::Run]) -> String {
    let of = |figure: Figure| summary(runs, figure).map_or_else(|| "–".to_owned(), |s| super::svg::short(s.median));
    format!("{} / {} / {}", of(P50), of(P99), of(P99_9))
}

fn cells(out: &mut String, race: &Race) {
    if race.cells.is_empty() {
        return;
    }
    out.push_str(
        "\n## Throughput\n\n| cell | Addax IOPS | | SPDK IOPS | floor IOPS | Addax / SPDK | Addax / floor | Addax / plain device |\n",
    );
    out.push_str("|---|---|---|---|---|---|---|---|\n");
    for result in &race.cells {
        let CellResult { cell, addax, spdk, floor, .. } = result;
        let bandwidth = summary(addax, BYTES_PER_S).map_or_else(String::new, |s| format!("{}/s", Bytes(s.median)));
        let (ours, stock, bound) = (summary(addax, IOPS), summary(spdk, IOPS), summary(floor, IOPS));
        let _ = writeln!(
            out,
            "| {cell} | {} | {bandwidth} | {} | {} | {} | {} | {} |",
            figure(ours),
            figure(stock),
            figure(bound),
            ratio(result.iops_ratio()),
            ratio(result.floor_iops_ratio()),
            ratio(result.plain_iops_ratio())
        );
    }
    out.push_str("\n## Latency\n\nMicroseconds, p50 / p99 / p99.9.\n\n");
    out.push_str(
        "| cell | Addax | SPDK | floor | p99.9 Addax / SPDK | mean Addax / floor |\n|---|---|---|---|---|---|\n",
    );
    for result in &race.cells {
        let CellResult { cell, addax, spdk, floor, .. } = result;
        let _ = writeln!(
            out,
            "| {cell} | {} | {} | {} | {} | {} |",
            latencies(addax),
            latencies(spdk),
            latencies(floor),
            ratio(result.tail_ratio()),
            ratio(result.floor_latency_ratio())
        );
    }
}

/// A figure that is no cell, for people.
#[must_use]
pub fn plain(value: Option<f64>) -> String {
    value.map_or_else(|| "–".to_owned(), |v| format!("{v:.2}"))
}

fn extras(out: &mut String, extras: &[Extra]) {
    if extras.is_empty() {
        return;
    }
    out.push_str(
        "\n## At rest, and RPC under load\n\n| what | Addax | SPDK | at most | how |\n|---|---|---|---|---|\n",
    );
    for Extra { name, unit, addax, spdk, limit, how } in extras {
        let limit = limit.map_or_else(|| "–".to_owned(), |l| l.to_string());
        let _ = writeln!(out, "| {name}, {unit} | {} | {} | {limit} | {how} |", plain(*addax), plain(*spdk));
    }
}

fn failures(out: &mut String, race: &Race) {
    let mut failed = race.cells.iter().filter(|cell| !cell.failures.is_empty()).peekable();
    if failed.peek().is_none() {
        return;
    }
    out.push_str("\n## Failures\n\n");
    for cell in failed {
        for why in &cell.failures {
            let _ = writeln!(out, "- {}:\n\n  ```text", cell.cell);
            why.lines().for_each(|line| {
                let _ = writeln!(out, "  {line}");
            });
            out.push_str("  ```\n");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::results::samples;
    use super::*;

    #[test]
    fn every_cell_and_every_promise_is_on_the_page() {
        let mut race = samples::race(&[
            ("malloc/read/4k/qd1/c1", 100_000.0, Some(110_000.0)),
            ("uring/read/4k/qd1/c1", 5.0, None),
        ]);
        race.cells[1].failures.push("it ended\nwith 1".to_owned());
        let page = page(&race);
        for part in [
            "| malloc/read/4k/qd1/c1 | 100k (95.0k–105k) | 390.6 MiB/s | 110k",
            "3 of 4 kept",
            "- malloc/read/4k/qd1/c1: IOPS / SPDK 0.909, bound 1",
            "## Failures",
            "raid1 stands in",
            "| idle, % | 0.50 | 100.00 | 1 |",
        ] {
            assert!(page.contains(part), "{part:?} is missing in\n{page}");
        }
    }

    #[test]
    fn an_empty_race_has_a_page() {
        let mut race = samples::race(&[]);
        race.extras.clear();
        assert!(!page(&race).contains("## Throughput"));
    }
}
