//! Random programs: after every operation the store is what the simple model says.

use lvol_core::testing::crash::run_whole;

use crate::support::{check_image, drawn, fail, seeds};

#[test]
fn a_store_is_what_the_model_says_after_every_operation() {
    for seed in seeds(60, 1000) {
        let (setup, program) = drawn(seed);
        if let Err(error) = run_whole(seed, &setup, &program, &check_image) {
            fail(seed, &error, &program, |program| run_whole(seed, &setup, program, &check_image));
        }
    }
}
