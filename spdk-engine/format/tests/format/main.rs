//! The format's parsers and emitters from outside.
#![allow(clippy::unwrap_used)]

mod golden;
mod identity;
