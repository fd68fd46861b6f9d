//! Whole images, with metadata changed at will and CRCs made valid again.
#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../bodies/mod.rs"]
mod bodies;

fuzz_target!(|bytes: &[u8]| {
    bodies::image(bytes);
});
