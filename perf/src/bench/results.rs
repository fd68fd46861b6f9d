//! The results of a race, as they are kept in JSON, and the judgements over them.
//!
//! *JSON.* Field names carry their unit. They do not change their meaning; new ones may be added; [`FORMAT`] rises when
//! an old reader would misread.

use serde::{Deserialize, Serialize};

use super::matrix::Device;
use super::parse::Run;
use super::stats::{Summary, paired_ratios};

/// Version of the JSON.
pub const FORMAT: u32 = 1;

/// A race over some cells.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Race {
    pub format: u32,
    /// When it began, as RFC 3339.
    pub began: String,
    pub machine: Machine,
    pub settings: Settings,
    /// What was raced.
    pub addax: String,
    /// Against what; none when alone.
    pub spdk: Option<String>,
    pub cells: Vec<CellResult>,
    pub extras: Vec<Extra>,
    /// What a reader must know: stand-ins, cells left out.
    pub notes: Vec<String>,
}

/// Where it was.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    pub processor: String,
    pub processors: usize,
    pub kernel: String,
}

/// How it was.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Settings {
    pub pairs: u32,
    pub seconds: u32,
    pub generator: String,
    pub target_cpu: u32,
    pub load_cpu: u32,
}

/// One cell.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CellResult {
    /// Its name.
    pub cell: String,
    /// Runs of Addax, in order.
    pub addax: Vec<Run>,
    /// Runs of the stock target; each the pair of the one in the same place.
    pub spdk: Vec<Run>,
    /// The floor, measured beside each pair.
    pub floor: Vec<Run>,
    /// The plainer device of the same engine, if the cell's has one, measured beside each pair.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub plain: Vec<Run>,
    /// What went wrong.
    pub failures: Vec<String>,
}

/// A figure that is no cell.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Extra {
    /// What was measured.
    pub name: String,
    pub unit: String,
    pub addax: Option<f64>,
    pub spdk: Option<f64>,
    /// What Addax promises: at most so much.
    pub limit: Option<f64>,
    /// How it was measured.
    pub how: String,
}

impl Extra {
    /// Whether the promise is kept; none without a promise or a figure.
    #[must_use]
    pub fn is_kept(&self) -> Option<bool> {
        Some(self.addax? <= self.limit?)
    }
}

/// A figure of a run.
pub type Figure = fn(&Run) -> f64;

/// I/Os in a second.
pub const IOPS: Figure = |run| run.iops;
/// Bytes in a second.
pub const BYTES_PER_S: Figure = |run| run.bytes_per_s;
/// Mean latency.
pub const MEAN: Figure = |run| run.mean_us;
/// Median latency.
pub const P50: Figure = |run| run.p50_us;
/// Latency that one in a hundred exceeds.
pub const P99: Figure = |run| run.p99_us;
/// Latency that one in a thousand exceeds.
pub const P99_9: Figure = |run| run.p99_9_us;

/// A figure over all runs.
#[must_use]
pub fn summary(runs: &[Run], figure: Figure) -> Option<Summary> {
    Summary::of(runs.iter().map(figure))
}

fn ratio(a: &[Run], b: &[Run], figure: Figure) -> Option<Summary> {
    let values = |runs: &[Run]| runs.iter().map(figure).collect::<Vec<_>>();
    paired_ratios(&values(a), &values(b))
}

/// How a promise stands in a cell.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Promise {
    /// In short.
    pub what: &'static str,
    /// The median of the ratios.
    pub found: f64,
    /// The least or most that is promised.
    pub bound: f64,
    pub kept: bool,
}

/// IOPS of Addax by those of the stock target, at least.
pub const IOPS_RATIO_MIN: f64 = 1.0;
/// 99.9th percentile of latency of Addax by that of the stock target, at most, at depths up to 32.
pub const TAIL_RATIO_MAX: f64 = 1.1;
/// Mean latency at depth 1 by that of the floor, at most.
pub const FLOOR_RATIO_MAX: f64 = 1.25;

impl CellResult {
    /// IOPS of Addax by those of the stock target, in pairs.
    #[must_use]
    pub fn iops_ratio(&self) -> Option<Summary> {
        ratio(&self.addax, &self.spdk, IOPS)
    }

    /// IOPS by those of the plainer device of the same engine.
    #[must_use]
    pub fn plain_iops_ratio(&self) -> Option<Summary> {
        ratio(&self.addax, &self.plain, IOPS)
    }

    /// Tail latency of Addax by that of the stock target, in pairs.
    #[must_use]
    pub fn tail_ratio(&self) -> Option<Summary> {
        ratio(&self.addax, &self.spdk, P99_9)
    }

    /// IOPS of Addax by those of the floor.
    #[must_use]
    pub fn floor_iops_ratio(&self) -> Option<Summary> {
        ratio(&self.addax, &self.floor, IOPS)
    }

    /// Mean latency of Addax by that of the floor.
    #[must_use]
    pub fn floor_latency_ratio(&self) -> Option<Summary> {
        ratio(&self.addax, &self.floor, MEAN)
    }

    /// How the project's promises stand here: those that this cell can show.
    #[must_use]
    pub fn promises(&self) -> Vec<Promise> {
        let mut all = Vec::new();
        let parts: Vec<&str> = self.cell.split('/').collect();
        let &[name, pattern, block, depth, "c1"] = parts.as_slice() else { return all };
        let Some(device) = Device::ALL.into_iter().find(|device| device.name() == name) else { return all };
        if let Some(((_, bound), found)) = device.plain().zip(self.plain_iops_ratio()) {
            let (found, kept) = (found.median, found.median >= bound);
            all.push(Promise { what: "IOPS / plain device", found, bound, kept });
        }
        let plain = matches!(device, Device::Null | Device::Malloc | Device::Raid1);
        if !(plain || device.is_lvol() && pattern == "write") || pattern == "mixed" || !["4k", "128k"].contains(&block)
        {
            return all;
        }
        if let Some(found) = self.iops_ratio().map(|r| r.median) {
            let kept = found >= IOPS_RATIO_MIN;
            all.push(Promise { what: "IOPS / SPDK", found, bound: IOPS_RATIO_MIN, kept });
        }
        if !plain {
            return all;
        }
        let tail = self.tail_ratio().filter(|_| ["qd1", "qd32"].contains(&depth));
        if let Some(found) = tail.map(|r| r.median) {
            let kept = found <= TAIL_RATIO_MAX;
            all.push(Promise { what: "p99.9 / SPDK", found, bound: TAIL_RATIO_MAX, kept });
        }
        let floor = self.floor_latency_ratio().filter(|_| depth == "qd1");
        if let Some(found) = floor.map(|r| r.median) {
            let kept = found <= FLOOR_RATIO_MAX;
            all.push(Promise { what: "latency / floor", found, bound: FLOOR_RATIO_MAX, kept });
        }
        all
    }
}

#[cfg(test)]
pub(super) mod samples {
    use super::*;

    pub(in super::super) fn run(iops: f64) -> Run {
        let us = 1e6 / iops;
        Run { iops, bytes_per_s: iops * 4096.0, mean_us: us, p50_us: us, p99_us: us * 2.0, p99_9_us: us * 3.0 }
    }

    pub(in super::super) fn race(cells: &[(&str, f64, Option<f64>)]) -> Race {
        let result = |(cell, addax, spdk): &(&str, f64, Option<f64>)| CellResult {
            cell: (*cell).to_owned(),
            addax: [0.9, 1.0, 1.1].map(|factor| run(addax * factor)).to_vec(),
            spdk: spdk.iter().flat_map(|s| [0.9, 1.0, 1.1].map(|factor| run(s * factor))).collect(),
            floor: [1.0, 1.0, 1.0].map(|factor| run(addax * 1.2 * factor)).to_vec(),
            plain: Vec::new(),
            failures: Vec::new(),
        };
        Race {
            format: FORMAT,
            began: "2026-01-02T03:04:05Z".to_owned(),
            machine: Machine { processor: "P".to_owned(), processors: 2, kernel: "6".to_owned() },
            settings: Settings { pairs: 3, seconds: 1, generator: "g".to_owned(), target_cpu: 0, load_cpu: 1 },
            addax: "addax-engine 1".to_owned(),
            spdk: cells.iter().any(|c| c.2.is_some()).then(|| "SPDK 1".to_owned()),
            cells: cells.iter().map(result).collect(),
            extras: vec![Extra {
                name: "idle".to_owned(),
                unit: "%".to_owned(),
                addax: Some(0.5),
                spdk: Some(100.0),
                limit: Some(1.0),
                how: "100 volumes <connected>".to_owned(),
            }],
            notes: vec!["raid1 stands in for the mirror".to_owned()],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_comes_back_as_it_was() {
        let race = samples::race(&[("malloc/read/4k/qd1/c1", 100.0, Some(90.0)), ("null/read/4k/qd1/c1", 5.0, None)]);
        let text = serde_json::to_string(&race).unwrap();
        assert!(text.contains("p99.9_us"));
        let back: Race = serde_json::from_str(&text).unwrap();
        assert_eq!((&back.settings, &back.extras, &back.notes), (&race.settings, &race.extras, &race.notes));
        for (new, old) in back.cells.iter().zip(&race.cells) {
            assert_eq!((&new.cell, new.spdk.len()), (&old.cell, old.spdk.len()));
            // The last bit of a number may differ.
            assert!((new.addax[0].p99_9_us / old.addax[0].p99_9_us - 1.0).abs() < 1e-12);
        }
    }

    #[test]
    fn promises_are_judged_by_paired_ratios() {
        let race = samples::race(&[("malloc/read/4k/qd1/c1", 100.0, Some(110.0))]);
        let promises = race.cells[0].promises();
        let short: Vec<_> = promises.iter().map(|p| (p.what, p.kept)).collect();
        assert_eq!(short, [("IOPS / SPDK", false), ("p99.9 / SPDK", true), ("latency / floor", true)]);
        assert!((promises[0].found - 100.0 / 110.0).abs() < 1e-9);
        assert_eq!(race.extras[0].is_kept(), Some(true));
    }

    #[test]
    fn lvols_are_judged_by_the_plain_device_too() {
        let mut race = samples::race(&[("lvol-thick/write/4k/qd32/c1", 100.0, Some(80.0))]);
        race.cells[0].plain = vec![samples::run(95.0), samples::run(110.0), samples::run(120.0)];
        let found: Vec<_> = race.cells[0].promises().iter().map(|p| (p.what, p.kept)).collect();
        assert_eq!(found, [("IOPS / plain device", false), ("IOPS / SPDK", true)]);
    }

    #[test]
    fn what_is_not_promised_is_not_judged() {
        for cell in ["uring/read/4k/qd1/c1", "malloc/mixed/4k/qd1/c1", "malloc/read/4k/qd32/c4", "x"] {
            assert!(samples::race(&[(cell, 1.0, Some(2.0))]).cells[0].promises().is_empty(), "{cell}");
        }
        let deep = samples::race(&[("null/write/4k/qd128/c1", 2.0, Some(1.0))]);
        assert_eq!(deep.cells[0].promises().len(), 1);
        assert_eq!(deep.cells[0].iops_ratio().unwrap().median, 2.0);
    }
}
