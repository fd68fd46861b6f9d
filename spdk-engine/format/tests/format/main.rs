//! The format's parsers and emitters from outside.
#![allow(clippy::unwrap_used)]

mod checked;
mod exact;
mod fuzzed;
mod golden;
mod identity;
