//! Results, for people and for programs.
//!
//! *JSON.* Field names carry their unit (`_s` seconds, `_us` microseconds, `bytes`). They do not change their meaning;
//! new ones may be added.

use std::collections::BTreeMap;
use std::fmt::Write;

use serde::Serialize;

use crate::units::{Bytes, Time};
use crate::verify::judge::Class;
use crate::verify::workload::{Finding, Findings};
use crate::worker::{Measures, WorkerReport};

/// Latencies in microseconds.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Latency {
    pub mean: f64,
    pub p50: f64,
    pub p90: f64,
    pub p99: f64,
    #[serde(rename = "p99.9")]
    pub p99_9: f64,
    #[serde(rename = "p99.99")]
    pub p99_99: f64,
    pub max: f64,
}

/// Reads, writes or both.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Direction {
    pub ios: u64,
    pub bytes: u64,
    pub iops: f64,
    pub bytes_per_s: f64,
    /// None when there was no I/O.
    pub latency_us: Option<Latency>,
}

/// A time, in seconds since the start.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Span {
    pub start_s: f64,
    pub length_s: f64,
    /// Which worker saw it.
    pub worker: usize,
}

/// What one phase of load has measured, over all cores.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LoadReport {
    pub elapsed_s: f64,
    pub read: Direction,
    pub write: Direction,
    pub total: Direction,
    pub errors: u64,
    pub error_samples: Vec<String>,
    /// I/Os that were sent again.
    pub retries: u64,
    pub reconnects: u64,
    /// Times without connection.
    pub outages: Vec<Span>,
    /// Times of at least 0.1 s with I/O outstanding and none completed.
    pub pauses: Vec<Span>,
    /// Why connections were lost or could not be made.
    pub messages: Vec<String>,
    /// Why the phase ended early, if it did.
    pub aborted: Option<String>,
}

/// What was asked for.
#[derive(Debug, Clone, Serialize)]
pub struct Setup {
    pub target: String,
    pub nqn: String,
    pub pattern: crate::access::Pattern,
    pub read_percent: u32,
    pub io_bytes: u64,
    pub queue_depth: u16,
    pub connections: usize,
    pub cores: usize,
}

/// `addax-perf run`.
#[derive(Debug, Clone, Serialize)]
pub struct RunReport {
    #[serde(flatten)]
    pub setup: Setup,
    #[serde(flatten)]
    pub load: LoadReport,
}

/// `addax-perf verify`.
#[derive(Debug, Clone, Serialize)]
pub struct VerifyReport {
    pub ok: bool,
    #[serde(flatten)]
    pub setup: Setup,
    pub volume: String,
    pub log: String,
    pub log_id: String,
    /// Number of this run in the log.
    pub run: u32,
    /// Bytes of log that a crash had left incomplete.
    pub log_dropped_bytes: u64,
    /// Units whose last write was of unknown fate when the run began.
    pub uncertain_units: u64,
    pub written_units: u64,
    pub written_bytes: u64,
    pub checked_units: u64,
    /// Whether the final read has covered all it was to cover.
    pub check_complete: bool,
    pub mismatches: BTreeMap<Class, u64>,
    pub mismatches_total: u64,
    pub mismatches_repeated: u64,
    pub mismatch_samples: Vec<Finding>,
    pub write: Option<LoadReport>,
    pub check: Option<LoadReport>,
    /// Why a phase could not begin, if so.
    pub failure: Option<String>,
}

fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

impl Direction {
    fn new(measures: &Measures, elapsed_s: f64) -> Self {
        let histogram = &measures.latency;
        let us = |ns: u64| ns as f64 / 1e3;
        let at = |quantile| us(histogram.value_at_quantile(quantile));
        let per_s = |count: u64| if elapsed_s > 0.0 { count as f64 / elapsed_s } else { 0.0 };
        let latency_us = (!histogram.is_empty()).then(|| Latency {
            mean: histogram.mean() / 1e3,
            p50: at(0.5),
            p90: at(0.9),
            p99: at(0.99),
            p99_9: at(0.999),
            p99_99: at(0.9999),
            max: us(histogram.max()),
        });
        Self {
            ios: histogram.len(),
            bytes: measures.bytes,
            iops: per_s(histogram.len()),
            bytes_per_s: per_s(measures.bytes),
            latency_us,
        }
    }
}

fn merge(into: &mut Measures, from: &Measures) {
    into.bytes += from.bytes;
    // All histograms have the same bounds, so that every value fits.
    if let Err(error) = into.latency.add(&from.latency) {
        tracing::error!(%error, "latencies of a core are left out");
    }
}

impl LoadReport {
    /// The sum of all workers.
    #[must_use]
    pub fn new(workers: &[WorkerReport]) -> Self {
        let (mut read, mut write, mut total) = (Measures::default(), Measures::default(), Measures::default());
        for worker in workers {
            merge(&mut read, &worker.read);
            merge(&mut write, &worker.write);
        }
        merge(&mut total, &read);
        merge(&mut total, &write);
        let elapsed_s = seconds(workers.iter().map(|w| w.elapsed_ns).max().unwrap_or(0));
        let numbered = || workers.iter().enumerate();
        let span =
            |worker, start_ns, length_ns| Span { start_s: seconds(start_ns), length_s: seconds(length_ns), worker };
        Self {
            elapsed_s,
            read: Direction::new(&read, elapsed_s),
            write: Direction::new(&write, elapsed_s),
            total: Direction::new(&total, elapsed_s),
            errors: workers.iter().map(|w| w.errors).sum(),
            error_samples: workers.iter().flat_map(|w| w.error_samples.clone()).collect(),
            retries: workers.iter().map(|w| w.session.retries).sum(),
            reconnects: workers.iter().map(|w| w.session.reconnects).sum(),
            outages: numbered()
                .flat_map(|(i, w)| w.session.outages.iter().map(move |o| span(i, o.start_ns, o.length_ns)))
                .collect(),
            pauses: numbered()
                .flat_map(|(i, w)| w.pauses.iter().map(move |p| span(i, p.start_ns, p.length_ns)))
                .collect(),
            messages: workers.iter().flat_map(|w| w.session.messages.clone()).collect(),
            aborted: workers.iter().find_map(|w| w.aborted.clone()),
        }
    }

    fn table(&self, out: &mut String) {
        let _ = writeln!(
            out,
            "{:<6} {:>10} {:>10} {:>12}  {:>9} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9}",
            "", "IOs", "IOPS", "bandwidth", "mean", "p50", "p90", "p99", "p99.9", "p99.99", "max"
        );
        for (name, direction) in [("read", &self.read), ("write", &self.write), ("total", &self.total)] {
            let Some(latency) = &direction.latency_us else { continue };
            let bandwidth = format!("{}/s", Bytes(direction.bytes_per_s));
            let _ = write!(out, "{name:<6} {:>10} {:>10.0} {bandwidth:>12} ", direction.ios, direction.iops);
            let all = [latency.mean, latency.p50, latency.p90, latency.p99, latency.p99_9, latency.p99_99, latency.max];
            for us in all {
                let _ = write!(out, " {:>9}", Time(us * 1e3).to_string());
            }
            out.push('\n');
        }
        let _ = writeln!(
            out,
            "time {:.2} s, errors {}, retries {}, reconnects {}",
            self.elapsed_s, self.errors, self.retries, self.reconnects
        );
        for (what, spans) in [("without connection", &self.outages), ("pause", &self.pauses)] {
            for span in spans {
                let _ = writeln!(out, "  {what}: {:.3} s, from {:.3} s", span.length_s, span.start_s);
            }
        }
        for message in self.messages.iter().chain(&self.error_samples) {
            let _ = writeln!(out, "  {message}");
        }
        if let Some(why) = &self.aborted {
            let _ = writeln!(out, "ended early: {why}");
        }
    }
}

impl Setup {
    fn table(&self, out: &mut String) {
        let _ = writeln!(
            out,
            "{} at {}: {:?} ({} % reads), {} per I/O, queue depth {}, {} connection(s), {} core(s)",
            self.nqn,
            self.target,
            self.pattern,
            self.read_percent,
            Bytes(self.io_bytes as f64),
            self.queue_depth,
            self.connections,
            self.cores
        );
    }
}

impl RunReport {
    /// For people.
    #[must_use]
    pub fn table(&self) -> String {
        let mut out = String::new();
        self.setup.table(&mut out);
        self.load.table(&mut out);
        out
    }
}

impl VerifyReport {
    /// Takes over what was wrong.
    pub fn set_findings(&mut self, findings: &Findings) {
        self.mismatches = Class::ALL.iter().map(|c| (*c, findings.counts.get(c).copied().unwrap_or(0))).collect();
        self.mismatches_total = findings.total();
        self.mismatches_repeated = findings.repeated;
        self.mismatch_samples.clone_from(&findings.samples);
    }

    /// For people.
    #[must_use]
    pub fn table(&self) -> String {
        let mut out = String::new();
        self.setup.table(&mut out);
        let _ = writeln!(
            out,
            "volume {}, log {} (run {}), {} units written, {} of unknown fate at the start",
            self.volume, self.log, self.run, self.written_units, self.uncertain_units
        );
        for (name, phase) in [("write phase", &self.write), ("check phase", &self.check)] {
            if let Some(phase) = phase {
                let _ = writeln!(out, "\n{name}");
                phase.table(&mut out);
            }
        }
        if self.check.is_some() {
            let complete = if self.check_complete { "" } else { " (incomplete)" };
            let _ = writeln!(out, "\nread back {} units of 4 KiB{complete}", self.checked_units);
        }
        if let Some(failure) = &self.failure {
            let _ = writeln!(out, "\n{failure}");
        }
        for (class, count) in self.mismatches.iter().filter(|(_, count)| **count > 0) {
            let _ = writeln!(out, "{class}: {count} unit(s)");
        }
        for finding in &self.mismatch_samples {
            let Finding { class, unit, offset, expected, found, transient } = finding;
            let transient = if *transient { ", right at a later read" } else { "" };
            let _ =
                writeln!(out, "  {class}: unit {unit} at byte {offset}: expected {expected}; found {found}{transient}");
        }
        let verdict = match (self.mismatches_total, self.ok) {
            (0, true) => "verified: no mismatch".to_owned(),
            (0, false) => "not verified: see the errors above".to_owned(),
            (count, _) => format!("MISMATCH: {count} unit(s)"),
        };
        let _ = writeln!(out, "{verdict}");
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn worker(latencies: &[u64]) -> WorkerReport {
        let mut report = WorkerReport { elapsed_ns: 2_000_000_000, ..WorkerReport::default() };
        for latency in latencies {
            report.read.latency.saturating_record(*latency);
            report.read.bytes += 4096;
        }
        report
    }

    #[test]
    fn the_histograms_of_all_cores_are_one() {
        let report = LoadReport::new(&[worker(&[1000, 2000]), worker(&[3000, 1_000_000])]);
        assert_eq!(report.read.ios, 4);
        assert_eq!(report.read.iops, 2.0);
        assert_eq!(report.total.bytes, 4 * 4096);
        let latency = report.read.latency_us.unwrap();
        assert!((1.9..2.1).contains(&latency.p50), "{latency:?}");
        assert!((990.0..1010.0).contains(&latency.max), "{latency:?}");
        assert_eq!(report.write.latency_us, None);
    }

    #[test]
    fn an_empty_run_has_a_table() {
        let mut out = String::new();
        LoadReport::new(&[WorkerReport::default()]).table(&mut out);
        assert!(out.contains("errors 0"));
    }
}
