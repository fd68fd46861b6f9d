//! Two results of the same benchmark, cell by cell: what a change has done. A pure function.
//!
//! *What is compared.* Where both were raced against a stock target, the ratio to it: the machine's drift is in both of
//! its terms and falls out. Else the IOPS themselves. *What counts as a change:* the quartiles do not overlap.

use std::fmt::Write;

use super::markdown::{figure, plain, ratio};
use super::results::{CellResult, IOPS, P99_9, Race, summary};
use super::stats::Summary;

/// What became of a cell.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Change {
    Better,
    Worse,
    Same,
}

/// Compares two summaries of something of which more is better.
fn change(before: &Summary, after: &Summary) -> Change {
    match before.overlaps(after) {
        true => Change::Same,
        false if after.median > before.median => Change::Better,
        false => Change::Worse,
    }
}

/// The comparison, as Markdown.
#[must_use]
pub fn page(before: &Race, after: &Race) -> String {
    let mut out = String::from("# Comparison\n\n");
    for (name, race) in [("before", before), ("after", after)] {
        let _ = writeln!(out, "- {name}: {} of {}, {}", race.addax, race.began, against(race));
    }
    if before.machine != after.machine {
        out.push_str("\nThe machines differ: only ratios to SPDK mean anything.\n");
    }
    if before.settings != after.settings {
        out.push_str("\nThe settings differ.\n");
    }
    out.push_str("\n| cell | before | after | after / before | p99.9 after / before | |\n|---|---|---|---|---|---|\n");
    let mut counts = [0_usize; 3];
    let mut missing = 0;
    for old in &before.cells {
        let Some(new) = after.cells.iter().find(|cell| cell.cell == old.cell) else {
            missing += 1;
            continue;
        };
        counts[row(&mut out, old, new) as usize] += 1;
    }
    let added = after.cells.iter().filter(|new| before.cells.iter().all(|old| old.cell != new.cell)).count();
    let [better, worse, same] = counts;
    let _ =
        writeln!(out, "\n{better} better, {worse} worse, {same} within their quartiles; {missing} gone, {added} new.");
    extras(&mut out, before, after);
    out
}

fn against(race: &Race) -> String {
    race.spdk.as_ref().map_or_else(|| "alone".to_owned(), |spdk| format!("against {spdk}"))
}

fn row(out: &mut String, old: &CellResult, new: &CellResult) -> Change {
    let raced = (old.iops_ratio(), new.iops_ratio());
    let (before, after, text): (_, _, fn(Option<Summary>) -> String) = match raced {
        (Some(before), Some(after)) => (Some(before), Some(after), ratio),
        _ => (summary(&old.addax, IOPS), summary(&new.addax, IOPS), figure),
    };
    let change = before.zip(after).map_or(Change::Same, |(before, after)| change(&before, &after));
    let quotient = |a: Option<Summary>, b: Option<Summary>| {
        let value = a.zip(b).filter(|(a, _)| a.median > 0.0).map(|(a, b)| b.median / a.median);
        value.map_or_else(|| "–".to_owned(), |v| format!("{v:.3}"))
    };
    let tails = match (old.tail_ratio(), new.tail_ratio()) {
        (Some(before), Some(after)) => (Some(before), Some(after)),
        _ => (summary(&old.addax, P99_9), summary(&new.addax, P99_9)),
    };
    let word = match change {
        Change::Better => "better",
        Change::Worse => "**worse**",
        Change::Same => "",
    };
    let _ = writeln!(
        out,
        "| {} | {} | {} | {} | {} | {word} |",
        old.cell,
        text(before),
        text(after),
        quotient(before, after),
        quotient(tails.0, tails.1)
    );
    change
}

fn extras(out: &mut String, before: &Race, after: &Race) {
    let both: Vec<_> = before
        .extras
        .iter()
        .filter_map(|old| Some((old, after.extras.iter().find(|new| new.name == old.name)?)))
        .collect();
    if both.is_empty() {
        return;
    }
    out.push_str("\n| what | before | after | at most |\n|---|---|---|---|\n");
    for (old, new) in both {
        let limit = new.limit.map_or_else(|| "–".to_owned(), |l| l.to_string());
        let _ = writeln!(out, "| {}, {} | {} | {} | {limit} |", new.name, new.unit, plain(old.addax), plain(new.addax));
    }
}

#[cfg(test)]
mod tests {
    use super::super::results::samples;
    use super::*;

    #[test]
    fn the_ratio_to_the_stock_target_counts_where_there_is_one() {
        // Twice the IOPS, but on a machine on which the stock target is also twice as fast.
        let before = samples::race(&[("malloc/read/4k/qd1/c1", 100.0, Some(100.0))]);
        let after = samples::race(&[("malloc/read/4k/qd1/c1", 200.0, Some(200.0))]);
        let page = page(&before, &after);
        assert!(page.contains("| 1.000 (1.000–1.000) | 1.000 (1.000–1.000) | 1.000 |"), "{page}");
        assert!(page.contains("0 better, 0 worse, 1 within"));
    }

    #[test]
    fn a_change_is_one_beyond_the_quartiles() {
        let before = samples::race(&[("a", 100.0, None), ("b", 100.0, None), ("c", 100.0, None), ("gone", 1.0, None)]);
        let after = samples::race(&[("a", 150.0, None), ("b", 50.0, None), ("c", 101.0, None), ("new", 1.0, None)]);
        let page = page(&before, &after);
        assert!(page.contains("1 better, 1 worse, 1 within their quartiles; 1 gone, 1 new."), "{page}");
        assert!(page.contains("| idle, % | 0.50 | 0.50 | 1 |"));
    }

    #[test]
    fn other_machines_are_told_apart() {
        let before = samples::race(&[]);
        let mut after = before.clone();
        after.machine.processors = 64;
        after.settings.pairs = 9;
        let page = page(&before, &after);
        assert!(page.contains("machines differ") && page.contains("settings differ"));
    }
}
