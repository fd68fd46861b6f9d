//! Metadata pages and descriptors: what is accepted is emitted and parsed to the same.
#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../bodies/mod.rs"]
mod bodies;

fuzz_target!(|bytes: &[u8]| {
    bodies::page(bytes);
});
