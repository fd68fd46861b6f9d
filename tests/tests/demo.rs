//! The demo, as a user runs it.
#![allow(clippy::unwrap_used)]

use std::process::Command;

use e2e::cluster;
use e2e::programs::program;
use e2e::spdk;

const LINES: [&str; 5] =
    ["degraded", "open again with a new epoch", "healthy", "equal, byte for byte", "the demo has passed"];
const BEST_EFFORT: &str = "consistency: bestEffort";

/// Runs it with more arguments; what it told. Its ports are fixed: one at a time.
fn demo(args: &[&str]) -> String {
    let _turn = cluster::turn().unwrap();
    let output = Command::new(program("addax").unwrap()).arg("demo").args(args).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{text}\n{}", String::from_utf8_lossy(&output.stderr));
    for line in LINES {
        assert!(text.contains(line), "{line:?} is missing in\n{text}");
    }
    println!("{text}");
    text
}

#[test]
fn the_demo_passes_and_says_so() {
    let text = demo(&[]);
    assert!(!text.contains(BEST_EFFORT), "{text}");
}

/// The same life of a volume with a stock data plane under one replica: nothing is lost.
#[test]
fn the_demo_passes_with_a_stock_node_for_a_replica() {
    let Some(tree) = spdk::tree() else { return };
    let choice = format!("node-3={}", tree.join("build/bin/spdk_tgt").display());
    let text = demo(&["--size", "256MiB", "--write", "256MiB", "--data-plane", &choice]);
    assert!(text.contains("node-3 runs a stock data plane") && !text.contains(BEST_EFFORT), "{text}");
}

/// And with stock data planes everywhere: the volume's status says what is lost.
#[test]
fn the_demo_passes_with_stock_data_planes_on_all_nodes() {
    let Some(tree) = spdk::tree() else { return };
    let choice = tree.join("build/bin/spdk_tgt").display().to_string();
    let text = demo(&["--size", "128MiB", "--write", "128MiB", "--data-plane", &choice]);
    for node in ["node-1", "node-2", "node-3"] {
        assert!(text.contains(&format!("{node} runs a stock data plane")), "{text}");
    }
    assert!(text.contains(BEST_EFFORT), "{text}");
}
