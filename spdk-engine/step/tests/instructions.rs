//! What one I/O costs, held against the record in `instructions.json`.
//!
//! Counted under valgrind on the release build of `step`, which `make instructions` builds first and names in
//! `ADDAX_STEP`; without that variable or without valgrind the test says so and passes. Block copies and fills are left
//! out, for how they are counted depends on the processor. A change of more than [`TOLERANCE_PERCENT`] either way asks
//! for a new record: `ADDAX_RECORD=1 make instructions`.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde::{Deserialize, Serialize};

const TOLERANCE_PERCENT: f64 = 5.0;
const DEPTH: u64 = 32;

/// What one I/O costs.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
struct Cost {
    /// Instructions of the engine and of the wire in memory that it is turned on, without block copies.
    instructions: u64,
    /// Receives and sends per 1000 I/Os.
    calls_per_1000: u64,
}

fn record_path() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/instructions.json")
}

const CASES: [(&str, &[&str]); 8] = [
    ("null read 4096", &["--device", "null"]),
    ("null write 4096", &["--device", "null", "--write"]),
    ("malloc read 4096", &["--device", "malloc"]),
    ("malloc write 4096", &["--device", "malloc", "--write"]),
    ("raid1 read 4096", &["--device", "raid1"]),
    ("raid1 write 4096", &["--device", "raid1", "--write"]),
    ("mirror read 4096", &["--device", "mirror"]),
    ("mirror write 4096", &["--device", "mirror", "--write"]),
];

/// Instructions under `turn_engine`, without those in block copies, and the calls.
fn count(step: &str, args: &[&str], batches: u64, out: &Path) -> (u64, u64) {
    let batches = batches.to_string();
    let run = Command::new("valgrind")
        .args(["--tool=callgrind", "--toggle-collect=*turn_engine*"])
        .arg(format!("--callgrind-out-file={}", out.display()))
        .arg(step)
        .args(args)
        .args(["--batches", &batches])
        .output()
        .unwrap();
    let printed = String::from_utf8_lossy(&run.stdout).into_owned();
    assert!(run.status.success(), "{printed}{}", String::from_utf8_lossy(&run.stderr));
    let words: Vec<&str> = printed.split_whitespace().collect();
    let number = |name: &str| -> u64 {
        let at = words.iter().position(|w| *w == name).unwrap();
        words[at + 1].parse().unwrap()
    };
    (own_instructions(&std::fs::read_to_string(out).unwrap()), number("receives") + number("sends"))
}

/// Sums the self costs of a callgrind file over all functions that are not block copies.
fn own_instructions(profile: &str) -> u64 {
    let mut names: BTreeMap<&str, &str> = BTreeMap::new();
    let (mut total, mut is_copy, mut skip_call) = (0, false, false);
    for line in profile.lines() {
        if let Some(name) = line.strip_prefix("fn=") {
            let (id, text) = name.split_once(' ').unwrap_or((name, ""));
            if !text.is_empty() {
                names.insert(id, text);
            }
            let text = names.get(id).copied().unwrap_or("");
            is_copy = ["memcpy", "memmove", "memset"].iter().any(|part| text.contains(part));
        } else if let Some(name) = line.strip_prefix("cfn=") {
            if let Some((id, text)) = name.split_once(' ') {
                names.insert(id, text);
            }
        } else if line.starts_with("calls=") {
            // The next line has the callee's inclusive cost.
            skip_call = true;
        } else if line.starts_with(|c: char| c.is_ascii_digit() || c == '+' || c == '-' || c == '*') {
            if std::mem::take(&mut skip_call) || is_copy {
                continue;
            }
            let cost = line.split_whitespace().nth(1).and_then(|n| n.parse::<u64>().ok());
            total += cost.unwrap_or(0);
        }
    }
    total
}

fn measure(step: &str, args: &[&str], dir: &Path) -> Cost {
    let out = dir.join("profile");
    let (few, many) = (10, 60);
    let (base, base_calls) = count(step, args, few, &out);
    let (all, all_calls) = count(step, args, many, &out);
    let ios = (many - few) * DEPTH;
    Cost { instructions: (all - base) / ios, calls_per_1000: (all_calls - base_calls) * 1000 / ios }
}

fn has_valgrind() -> bool {
    Command::new("valgrind").arg("--version").output().is_ok_and(|o| o.status.success())
}

#[test]
fn an_io_costs_what_is_recorded() {
    let Ok(step) = std::env::var("ADDAX_STEP") else {
        eprintln!("SKIPPED: ADDAX_STEP names no release build of `step` (run `make instructions`)");
        return;
    };
    if !has_valgrind() {
        eprintln!("SKIPPED: valgrind is not installed");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let measured: BTreeMap<String, Cost> =
        CASES.iter().map(|(name, args)| ((*name).to_owned(), measure(&step, args, dir.path()))).collect();
    for (name, cost) in &measured {
        println!("{name}: {} instructions, {} calls per 1000", cost.instructions, cost.calls_per_1000);
    }
    if std::env::var_os("ADDAX_RECORD").is_some() {
        let text = serde_json::to_string_pretty(&measured).unwrap() + "\n";
        return std::fs::write(record_path(), text).unwrap();
    }
    let record = std::fs::read_to_string(record_path()).unwrap();
    let recorded: BTreeMap<String, Cost> = serde_json::from_str(&record).unwrap();
    assert_eq!(recorded.keys().collect::<Vec<_>>(), measured.keys().collect::<Vec<_>>());
    for (name, now) in &measured {
        let then = recorded[name];
        let off = |a: u64, b: u64| (a as f64 - b as f64).abs() / b as f64 * 100.0;
        assert!(
            off(now.instructions, then.instructions) <= TOLERANCE_PERCENT,
            "{name}: {} instructions, {} are recorded (ADDAX_RECORD=1 make instructions records anew)",
            now.instructions,
            then.instructions
        );
        assert!(now.calls_per_1000 <= then.calls_per_1000, "{name}: {now:?}, recorded {then:?}");
    }
}

#[test]
fn a_profile_is_summed_without_copies_and_calls() {
    let profile = "fn=(1) run\n16 5\n+1 7\ncfn=(2) memcpy_fast\ncalls=1 20\n18 100\nfn=(2)\n20 100\nfn=(1)\n* 3\n";
    assert_eq!(own_instructions(profile), 15);
}
