//! The fuzz targets without a fuzzer: on their kept seeds, and on changes of these drawn from a fixed sequence.

use std::path::Path;

use proptest::prelude::*;

#[path = "../../fuzz/bodies/mod.rs"]
mod bodies;

/// A target, which tells whether its input was accepted.
type Body = fn(&[u8]) -> bool;

/// The seeds of a target.
fn seeds(target: &str) -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/seeds").join(target);
    let mut paths: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    paths.iter().map(|path| std::fs::read(path).unwrap()).collect()
}

/// Runs a target on all seeds, and on each with bytes changed, cut and added.
fn run(target: &str, body: Body) {
    let seeds = seeds(target);
    // Seeds that are all refused would test the first check alone.
    let accepted = seeds.iter().filter(|seed| body(seed)).count();
    assert!(accepted >= 2, "{target}: {accepted} of {} seeds are accepted", seeds.len());
    let change = (any::<prop::sample::Index>(), any::<u8>());
    let strategy = (
        prop::sample::select(seeds),
        prop::collection::vec(change, 0..8),
        any::<prop::sample::Index>(),
        prop::collection::vec(any::<u8>(), 0..40),
    );
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig::with_cases(256));
    let done = runner.run(&strategy, |(mut bytes, changes, cut, tail)| {
        for (at, value) in changes {
            if let Some(last) = bytes.len().checked_sub(1) {
                bytes[at.index(last + 1)] = value;
            }
        }
        if !tail.is_empty() {
            bytes.truncate(cut.index(bytes.len() + 1));
            bytes.extend_from_slice(&tail);
        }
        body(&bytes);
        Ok(())
    });
    done.unwrap_or_else(|error| panic!("{target}: {error}"));
}

#[test]
fn super_blocks() {
    run("super_block", bodies::super_block);
}

#[test]
fn pages() {
    run("page", bodies::page);
}

#[test]
fn images() {
    run("image", bodies::image);
}

#[test]
fn raid_superblocks() {
    run("raid", bodies::raid);
}
