//! The report as one HTML file with its plots inside: nothing is fetched. A pure function of the results.

use std::fmt::Write;

use super::markdown::{LEGEND, broken, facts, figure, latencies, plain, ratio};
use super::matrix::Device;
use super::results::{CellResult, Figure, IOPS, P50, P99, P99_9, Race, summary};
use super::svg::{self, Group, Latencies, Row, escape};

const STYLE: &str = "
:root { color-scheme: light dark; --ink: #1c2024; --soft: #60656c; --line: #d9dce1; --ground: #fff; --addax: #0b66c3;
  --spdk: #c2571a; --floor: #8b8d98; --bad: #c62a2f; }
@media (prefers-color-scheme: dark) { :root { --ink: #edeef0; --soft: #a4a9b3; --line: #363a3f; --ground: #111113;
  --addax: #70b8ff; --spdk: #ffa057; --floor: #797b86; --bad: #ff9592; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--ground); max-width: 62rem;
  margin: 2rem auto; padding: 0 1rem; }
h1, h2, h3 { line-height: 1.2; } h2 { margin-top: 2.5rem; border-bottom: 1px solid var(--line); padding-bottom: .3rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; } dt { color: var(--soft); } dd { margin: 0; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13px; }
th, td { text-align: right; padding: .25rem .6rem; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child, td.text { text-align: left; } td.text { white-space: normal; }
.bad { color: var(--bad); font-weight: 600; } .key span { margin-right: 1.2rem; } .key i { display: inline-block;
  width: .8em; height: .8em; border-radius: 2px; margin-right: .35em; }
.plot { width: 100%; height: auto; font: 12px system-ui, sans-serif; } .plot text { fill: var(--ink); }
.plot .label { text-anchor: end; } .plot .tick { text-anchor: middle; fill: var(--soft); font-size: 11px; }
.plot .figure { font-size: 11px; fill: var(--soft); } .plot .small { font-size: 9.5px; }
.plot .grid { stroke: var(--line); } .plot .reference { stroke: var(--ink); stroke-dasharray: 4 3; }
.addax { fill: var(--addax); stroke: var(--addax); } .spdk { fill: var(--spdk); stroke: var(--spdk); }
.floor { fill: var(--floor); stroke: var(--floor); } .below { fill: var(--bad); stroke: var(--bad); }
.plot rect { stroke: none; } .plot .whisker { stroke-width: 2; } .plot .range { stroke: var(--ink); stroke-width: 1; }
pre { overflow-x: auto; padding: .6rem; border: 1px solid var(--line); font-size: 12px; }
";

/// The page.
#[must_use]
pub fn page(race: &Race) -> String {
    let mut out = format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<meta name=\"viewport\" \
         content=\"width=device-width, initial-scale=1\">\n<title>Data-plane benchmark</title>\n<style>{STYLE}</style>\n\
         </head>\n<body>\n<h1>Data-plane benchmark</h1>\n<dl>\n"
    );
    for (what, text) in facts(race) {
        let _ = writeln!(out, "<dt>{what}</dt><dd>{}</dd>", escape(&text));
    }
    let _ = writeln!(out, "</dl>\n<p>{LEGEND}</p>");
    promises(&mut out, race);
    for device in Device::ALL {
        let of = |cell: &&CellResult| cell.cell.split('/').next() == Some(device.name());
        let cells: Vec<&CellResult> = race.cells.iter().filter(of).collect();
        if !cells.is_empty() {
            device_section(&mut out, device, &cells, race.spdk.is_some());
        }
    }
    extras(&mut out, race);
    remarks(&mut out, race);
    out.push_str("</body>\n</html>\n");
    out
}

fn promises(out: &mut String, race: &Race) {
    let (count, broken) = broken(race);
    if count == 0 {
        return;
    }
    let _ = writeln!(out, "<h2>Promises</h2>\n<p>{} of {count} kept.</p>", count - broken.len());
    if !broken.is_empty() {
        out.push_str("<ul>\n");
        broken.iter().for_each(|line| {
            let _ = writeln!(out, "<li class=\"bad\">{}</li>", escape(line));
        });
        out.push_str("</ul>\n");
    }
}

/// The name of a cell without its device.
fn rest(cell: &str) -> &str {
    cell.split_once('/').map_or(cell, |(_, rest)| rest)
}

fn device_section(out: &mut String, device: Device, cells: &[&CellResult], raced: bool) {
    let _ = writeln!(out, "<h2>{}</h2>", escape(device.title()));
    let measured: Vec<&CellResult> = cells.iter().copied().filter(|cell| !cell.addax.is_empty()).collect();
    if !measured.is_empty() {
        plots(out, &measured, raced);
    }
    table(out, cells);
}

fn plots(out: &mut String, cells: &[&CellResult], raced: bool) {
    let row = |cell: &&CellResult| {
        let (summary, good) = match raced {
            true => cell.iops_ratio().map(|r| (r, r.median >= 1.0))?,
            false => cell.floor_iops_ratio().map(|r| (r, true))?,
        };
        let class = if good { "addax" } else { "below" };
        Some(Row { label: rest(&cell.cell).to_owned(), summary, class })
    };
    let rows: Vec<Row> = cells.iter().filter_map(row).collect();
    let title = if raced { "IOPS, Addax / SPDK" } else { "IOPS, Addax / floor" };
    if !rows.is_empty() {
        let _ = write!(out, "<h3>{title}</h3>\n{}", svg::whiskers(title, &rows, 1.0));
    }
    let sides =
        |cell: &CellResult| [("addax", cell.addax.clone()), ("spdk", cell.spdk.clone()), ("floor", cell.floor.clone())];
    let bars: Vec<_> = cells
        .iter()
        .map(|cell| Group {
            label: rest(&cell.cell).to_owned(),
            series: sides(cell).iter().filter_map(|(class, runs)| Some((*class, summary(runs, IOPS)?))).collect(),
        })
        .collect();
    let _ = write!(out, "<h3>IOPS</h3>\n{}{}", key(raced), svg::bars("IOPS", &bars));
    let latencies = |runs: &[super::parse::Run]| {
        let of = |figure: Figure| summary(runs, figure).map(|s| s.median);
        Some(Latencies { p50: of(P50)?, p99: of(P99)?, p99_9: of(P99_9)? })
    };
    let spans: Vec<_> = cells
        .iter()
        .map(|cell| Group {
            label: rest(&cell.cell).to_owned(),
            series: sides(cell).iter().filter_map(|(class, runs)| Some((*class, latencies(runs)?))).collect(),
        })
        .collect();
    let title = "Latency: p50 (dot), p99 and p99.9 (marks)";
    let _ = write!(out, "<h3>{title}</h3>\n{}{}", key(raced), svg::spans(title, &spans));
}

fn key(raced: bool) -> String {
    let mut names = vec![("addax", "Addax"), ("spdk", "SPDK"), ("floor", "floor")];
    names.retain(|(class, _)| raced || *class != "spdk");
    let spans =
        names.iter().map(|(class, name)| format!("<span><i style=\"background: var(--{class})\"></i>{name}</span>"));
    format!("<p class=\"key\">{}</p>\n", spans.collect::<String>())
}

fn table(out: &mut String, cells: &[&CellResult]) {
    out.push_str(
        "<div class=\"scroll\"><table>\n<tr><th>cell</th><th>Addax IOPS</th><th>SPDK IOPS</th><th>floor IOPS</th>\
         <th>Addax / SPDK</th><th>latency Addax, µs</th><th>latency SPDK, µs</th><th>p99.9 Addax / SPDK</th>\
         <th>mean Addax / floor</th></tr>\n",
    );
    for result in cells {
        let CellResult { cell, addax, spdk, floor, .. } = result;
        let bad = |what: &str| {
            let promises = result.promises();
            let broken = promises.iter().any(|p| p.what == what && !p.kept);
            if broken { " class=\"bad\"" } else { "" }
        };
        let _ = writeln!(
            out,
            "<tr><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td{}>{}</td><td>{}</td><td>{}</td><td{}>{}</td>\
             <td{}>{}</td></tr>",
            escape(rest(cell)),
            figure(summary(addax, IOPS)),
            figure(summary(spdk, IOPS)),
            figure(summary(floor, IOPS)),
            bad("IOPS / SPDK"),
            ratio(result.iops_ratio()),
            latencies(addax),
            latencies(spdk),
            bad("p99.9 / SPDK"),
            ratio(result.tail_ratio()),
            bad("latency / floor"),
            ratio(result.floor_latency_ratio())
        );
    }
    out.push_str("</table></div>\n");
}

fn extras(out: &mut String, race: &Race) {
    if race.extras.is_empty() {
        return;
    }
    out.push_str(
        "<h2>At rest, and RPC under load</h2>\n<div class=\"scroll\"><table>\n<tr><th>what</th><th>Addax</th>\
         <th>SPDK</th><th>at most</th><th>how</th></tr>\n",
    );
    for extra in &race.extras {
        let bad = if extra.is_kept() == Some(false) { " class=\"bad\"" } else { "" };
        let limit = extra.limit.map_or_else(|| "–".to_owned(), |l| l.to_string());
        let _ = writeln!(
            out,
            "<tr><td>{}, {}</td><td{bad}>{}</td><td>{}</td><td>{limit}</td><td class=\"text\">{}</td></tr>",
            escape(&extra.name),
            escape(&extra.unit),
            plain(extra.addax),
            plain(extra.spdk),
            escape(&extra.how)
        );
    }
    out.push_str("</table></div>\n");
}

fn remarks(out: &mut String, race: &Race) {
    let failures = race.cells.iter().flat_map(|cell| cell.failures.iter().map(move |why| (&cell.cell, why)));
    for (index, (cell, why)) in failures.enumerate() {
        if index == 0 {
            out.push_str("<h2>Failures</h2>\n");
        }
        let _ = writeln!(out, "<p>{}</p><pre>{}</pre>", escape(cell), escape(why));
    }
    if !race.notes.is_empty() {
        out.push_str("<h2>Notes</h2>\n<ul>\n");
        race.notes.iter().for_each(|note| {
            let _ = writeln!(out, "<li>{}</li>", escape(note));
        });
        out.push_str("</ul>\n");
    }
}

#[cfg(test)]
mod tests {
    use super::super::results::samples;
    use super::*;

    #[test]
    fn the_page_needs_nothing_from_elsewhere_and_is_escaped() {
        let mut race =
            samples::race(&[("malloc/read/4k/qd1/c1", 100.0, Some(110.0)), ("null/read/4k/qd1/c1", 9.0, None)]);
        race.cells[1].failures.push("<it> & ended".to_owned());
        let page = page(&race);
        assert!(!page.contains("http") && !page.contains("<script") && !page.contains("src="));
        assert!(page.contains("&lt;it&gt; &amp; ended") && page.contains("100 volumes &lt;connected&gt;"));
        assert_eq!(page.matches("<svg").count(), 5, "three plots of a race, two where there was no stock target");
        assert!(page.contains("class=\"bad\">0.909"));
        for tag in ["table", "ul", "div", "svg", "p", "td"] {
            let opened = page.matches(&format!("<{tag}>")).count() + page.matches(&format!("<{tag} ")).count();
            assert_eq!(opened, page.matches(&format!("</{tag}>")).count(), "{tag}");
        }
    }

    #[test]
    fn without_a_stock_target_the_floor_is_the_reference() {
        let page = page(&samples::race(&[("null/read/4k/qd1/c1", 9.0, None)]));
        assert!(page.contains("IOPS, Addax / floor") && !page.contains("var(--spdk)\"></i>"));
    }
}
