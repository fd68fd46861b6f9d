//! What the load generators print, as figures. Pure functions.

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// What one run has measured.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Run {
    pub iops: f64,
    pub bytes_per_s: f64,
    /// Latencies in microseconds.
    pub mean_us: f64,
    pub p50_us: f64,
    pub p99_us: f64,
    #[serde(rename = "p99.9_us")]
    pub p99_9_us: f64,
}

/// Reads what `spdk_nvme_perf -L` prints: the line of totals and the summary of latencies.
///
/// # Errors
/// What is missing.
pub fn spdk_nvme_perf(text: &str) -> Result<Run, String> {
    let total = text
        .lines()
        .find_map(|line| line.trim_start().strip_prefix("Total")?.trim_start().strip_prefix(':'))
        .ok_or("no line of totals")?;
    let numbers: Vec<f64> = total.split_whitespace().map_while(|word| word.parse().ok()).collect();
    let &[iops, mib_per_s, mean_us, _, _] = numbers.as_slice() else {
        return Err(format!("the line of totals has {} numbers instead of 5: {total}", numbers.len()));
    };
    let mut summary = text.lines().skip_while(|line| !line.starts_with("Summary latency data"));
    if summary.next().is_none() {
        return Err("no summary of latencies".to_owned());
    }
    let percentiles: Vec<(f64, f64)> = summary.skip(1).map_while(percentile).collect();
    let at = |wanted: f64| {
        let found = percentiles.iter().find(|(percent, _)| (percent - wanted).abs() < 1e-6);
        found.map(|(_, us)| *us).ok_or_else(|| format!("no latency at {wanted} %"))
    };
    let bytes_per_s = mib_per_s * 1_048_576.0;
    Ok(Run { iops, bytes_per_s, mean_us, p50_us: at(50.0)?, p99_us: at(99.0)?, p99_9_us: at(99.9)? })
}

/// A line such as ` 99.90000% : 11713.225us`.
fn percentile(line: &str) -> Option<(f64, f64)> {
    let (percent, us) = line.split_once(':')?;
    let percent = percent.trim().strip_suffix('%')?.parse().ok()?;
    let us = us.trim().strip_suffix("us")?.parse().ok()?;
    Some((percent, us))
}

/// Reads what `addax-perf run -o json` prints.
///
/// # Errors
/// What is missing, or the I/O errors that the run had.
pub fn addax_perf(text: &str) -> Result<Run, String> {
    let report: Value = serde_json::from_str(text).map_err(|e| format!("not JSON: {e}"))?;
    if report["errors"] != 0 {
        return Err(format!("{} I/O errors: {}", report["errors"], report["error_samples"]));
    }
    if let Some(why) = report["aborted"].as_str() {
        return Err(format!("ended early: {why}"));
    }
    let number = |path: &str| report.pointer(path).and_then(Value::as_f64).ok_or_else(|| format!("no {path}"));
    Ok(Run {
        iops: number("/total/iops")?,
        bytes_per_s: number("/total/bytes_per_s")?,
        mean_us: number("/total/latency_us/mean")?,
        p50_us: number("/total/latency_us/p50")?,
        p99_us: number("/total/latency_us/p99")?,
        p99_9_us: number("/total/latency_us/p99.9")?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const PRINTED: &str = "\
Initializing NVMe Controllers
Attached to NVMeoF Controller at TCP (addr:127.0.0.1 subnqn:nqn.2016-06.io.spdk:cnode1)
Initialization complete. Launching workers.
========================================================
                                                                                Latency(us)
Device Information                       :       IOPS      MiB/s    Average        min        max
TCP (addr:127.0.0.1) NSID 1 from core  1:   41542.00     162.27     770.83      33.36   12411.24
========================================================
Total                                    :   41542.00     162.27     770.83      33.36   12411.24

Summary latency data for TCP (addr:127.0.0.1 subnqn:nqn.2016-06.io.s from core 1:
=================================================================================
  1.00000% :    53.644us
 50.00000% :   177.497us
 99.00000% :  8330.527us
 99.50000% :  8381.015us
 99.90000% : 11713.225us
 99.99000% : 12319.082us

Latency histogram for TCP (addr:127.0.0.1 subnqn:nqn.2016-06.io.s from core 1:
==============================================================================
       Range in us     Cumulative    IO count
   33.330 -    33.527:    0.0024%  (        1)
";

    #[test]
    fn the_totals_and_percentiles_of_the_stock_tool_are_read() {
        let run = spdk_nvme_perf(PRINTED).unwrap();
        assert_eq!((run.iops, run.mean_us), (41542.0, 770.83));
        assert_eq!((run.p50_us, run.p99_us, run.p99_9_us), (177.497, 8330.527, 11713.225));
        assert!((run.bytes_per_s - 162.27 * 1_048_576.0).abs() < 1.0);
    }

    #[test]
    fn what_is_missing_is_said() {
        assert!(spdk_nvme_perf("No valid NVMe controllers found").unwrap_err().contains("totals"));
        assert!(spdk_nvme_perf(&PRINTED.replace("Summary", "x")).unwrap_err().contains("summary"));
        assert!(spdk_nvme_perf(&PRINTED.replace("99.90000%", "x")).unwrap_err().contains("99.9"));
        assert!(spdk_nvme_perf(&PRINTED.replace("   41542.00     162.27", "nan inf x")).is_err());
    }

    #[test]
    fn our_own_report_is_read_and_its_errors_are_errors() {
        let report = |errors: u32| {
            format!(
                r#"{{"errors": {errors}, "error_samples": ["x"], "aborted": null, "total": {{"iops": 5.0,
                "bytes_per_s": 6.0, "latency_us": {{"mean": 1.0, "p50": 2.0, "p99": 3.0, "p99.9": 4.0}}}}}}"#
            )
        };
        let run = addax_perf(&report(0)).unwrap();
        assert_eq!((run.iops, run.p99_9_us), (5.0, 4.0));
        assert!(addax_perf(&report(2)).unwrap_err().contains("2 I/O errors"));
        assert!(addax_perf(r#"{"errors": 0, "aborted": null}"#).unwrap_err().contains("/total/iops"));
        assert!(addax_perf("").is_err());
    }
}
