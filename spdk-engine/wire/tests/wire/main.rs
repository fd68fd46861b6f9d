//! Tests of the wire structures: every field against raw bytes, round trips, the checks on received PDUs, and that no
//! input makes a parser panic.
#![allow(clippy::unwrap_used)]

mod command;
mod fabrics;
mod fields;
mod garbage;
mod identify;
mod link;
mod logs;
mod nqn;
mod reservation;
mod status;
