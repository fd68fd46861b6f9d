//! Disk images written by SPDK, with what SPDK finds in them (see the README beside this crate). For tests only: what is
//! missing or unreadable panics.
#![warn(missing_docs)]
#![allow(clippy::unwrap_used)]

mod manifest;
mod sparse;

pub use manifest::{Case, Class, External, Finished, Lvol, SpdkLoad, Store};
pub use sparse::Sparse;

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

fn folder() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Every image, in the order of the manifest.
pub fn cases() -> &'static [Case] {
    static CASES: OnceLock<Vec<Case>> = OnceLock::new();
    CASES.get_or_init(|| {
        let text = std::fs::read(folder().join("manifest.json")).expect("manifest.json is beside the crate");
        manifest::parse(&text)
    })
}

/// The image of that name.
pub fn case(name: &str) -> &'static Case {
    cases().iter().find(|case| case.name == name).unwrap_or_else(|| panic!("no golden image is named {name}"))
}

/// The path of a packed image.
fn packed(file: &str) -> PathBuf {
    folder().join("images").join(file)
}
