//! The crash tests can fail: each planted bug is found by some cut of some program.

use lvol_core::planted::{Bug, plant};

use crate::crash::cut;
use crate::support::drawn;

/// Programs that a bug is given to be found in.
const PROGRAMS: u64 = 120;

struct Planted;

impl Planted {
    fn new(bug: Bug) -> Self {
        plant(Some(bug));
        Self
    }
}

impl Drop for Planted {
    fn drop(&mut self) {
        plant(None);
    }
}

/// The first program that shows the bug, and how.
fn found(bug: Bug) -> Option<(u64, String)> {
    let _planted = Planted::new(bug);
    (0..PROGRAMS).find_map(|seed| {
        let (setup, program) = drawn(seed);
        let quick = std::panic::catch_unwind(|| cut(seed, &setup, &program, 5));
        match quick {
            Ok(Ok(_)) => None,
            Ok(Err(error)) => Some((seed, error)),
            Err(_) => Some((seed, "a panic".to_owned())),
        }
    })
}

#[test]
fn every_planted_bug_is_found() {
    let mut missed = Vec::new();
    for bug in Bug::ALL {
        match found(bug) {
            Some((seed, error)) => println!("{bug:?}: program {seed}: {error}"),
            None => missed.push(bug),
        }
    }
    assert!(missed.is_empty(), "not found: {missed:?}");
}
