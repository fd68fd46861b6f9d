//! RAID superblocks: what is accepted is emitted to the same bytes.
#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../bodies/mod.rs"]
mod bodies;

fuzz_target!(|bytes: &[u8]| {
    bodies::raid(bytes);
});
