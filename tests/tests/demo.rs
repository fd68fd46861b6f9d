//! The demo, as a user runs it.
#![allow(clippy::unwrap_used)]

use std::process::Command;

use e2e::programs::program;

#[test]
fn the_demo_passes_and_says_so() {
    let output = Command::new(program("addax").unwrap()).arg("demo").output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}\n{}", String::from_utf8_lossy(&output.stderr));
    for line in ["degraded", "open again with a new epoch", "healthy", "equal, byte for byte", "the demo has passed"] {
        assert!(text.contains(line), "{line:?} is missing in\n{text}");
    }
    println!("{text}");
}
