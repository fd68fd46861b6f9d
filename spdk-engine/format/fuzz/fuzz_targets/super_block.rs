//! Super blocks: what is accepted is emitted to the same bytes, and its geometry stays on the device.
#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../bodies/mod.rs"]
mod bodies;

fuzz_target!(|bytes: &[u8]| {
    bodies::super_block(bytes);
});
