//! What the tests share: seeds, the image check, running asynchronous code.

use std::future::Future;
use std::ops::Range;
use std::rc::Rc;

use blobstore_format::check::{Finding, Kind, Severity};
use lvol_core::testing::crash::{Setup, setup};
use lvol_core::testing::program::{self, shrink};
use lvol_core::testing::{Exec, Image, Op, PowerDisk};
use lvol_core::{LoadOptions, LocalFuture, NoHooks, Store};

/// Whether everything is to be run.
pub fn full() -> bool {
    std::env::var("LVOL_TESTS").is_ok_and(|value| value == "full")
}

/// The programs to run: those of the environment, or the first `few` or `all` of them.
pub fn seeds(few: u64, all: u64) -> Range<u64> {
    let Ok(text) = std::env::var("LVOL_SEEDS") else { return 0..if full() { all } else { few } };
    let number = |text: &str| text.trim().parse::<u64>().unwrap_or_else(|_| panic!("LVOL_SEEDS is {text:?}"));
    match text.split_once("..") {
        Some((first, end)) => number(first)..number(end),
        None => number(&text)..number(&text) + 1,
    }
}

/// What the checker says of an image after an orderly end: nothing may be wrong. Pages that nothing uses any more may
/// still look like metadata, when a power cut kept them from being wiped.
pub fn check_image(image: &Image) -> Result<(), String> {
    let report = blobstore_format::check::check(image).map_err(|error| error.to_string())?;
    let harmless = |finding: &&Finding| finding.severity == Severity::Note || finding.kind == Kind::PageOrphaned;
    let wrong: Vec<String> = report.findings.iter().filter(|f| !harmless(f)).map(ToString::to_string).collect();
    if wrong.is_empty() { Ok(()) } else { Err(wrong.join("; ")) }
}

/// The setup and the program of a seed.
pub fn drawn(seed: u64) -> (Setup, Vec<Op>) {
    let setup = setup(seed);
    let program = program::generate(seed, setup.layout.shape);
    (setup, program)
}

/// Fails the test with the smallest program that still fails.
pub fn fail(seed: u64, error: &str, program: &[Op], mut run: impl FnMut(&[Op]) -> Result<(), String>) -> ! {
    let mut last = error.to_owned();
    let smallest = shrink(program, 150, |candidate| match run(candidate) {
        Ok(()) => false,
        Err(error) => {
            last = error;
            true
        }
    });
    let ops: Vec<String> = smallest.iter().map(|op| format!("{op:?}")).collect();
    panic!("seed {seed} (LVOL_SEEDS={seed}): {error}\nwith {} operations: {last}\n{}", smallest.len(), ops.join("\n"));
}

/// Runs asynchronous code on a disk.
pub fn on<T>(disk: &PowerDisk, code: impl Future<Output = T>) -> T {
    on_all(&[disk], code)
}

/// Runs asynchronous code on several disks.
pub fn on_all<T>(disks: &[&PowerDisk], code: impl Future<Output = T>) -> T {
    Exec::new(1, disks).run(code).unwrap()
}

/// Opens the store on a disk.
pub async fn load(disk: &PowerDisk) -> Store {
    let find = |_: &str| -> LocalFuture<'_, _> { Box::pin(async { None }) };
    Store::load(Rc::new(disk.clone()), Rc::new(NoHooks), LoadOptions::default(), &find, &|_| {}).await.unwrap().0
}
