//! Power is cut after every write or flush of random programs.

use lvol_core::testing::Op;
use lvol_core::testing::crash::{Crash, Setup, Total};

use crate::support::{check_image, drawn, fail, full, seeds};

/// Cuts after one in so many operations by default; another share for each seed.
const SHARE: u64 = 37;

pub fn cut(seed: u64, setup: &Setup, program: &[Op], every: u64) -> Result<lvol_core::testing::crash::Cuts, String> {
    let crash = Crash { seed, setup: setup.clone(), every, first: seed, check: &check_image };
    crash.run(program)
}

#[test]
fn after_any_power_cut_every_lvol_is_as_before_or_after_and_nothing_leaks() {
    let every = if full() { 1 } else { SHARE };
    let total = Total::default();
    for seed in seeds(32, 40) {
        let (setup, program) = drawn(seed);
        match cut(seed, &setup, &program, every) {
            Ok(cuts) => total.add(cuts),
            Err(error) => fail(seed, &error, &program, |program| cut(seed, &setup, program, every).map(drop)),
        }
    }
    println!("{:?}", total.get());
}
