//! Verification: what was written is there, whole, in its place, and never older than what was seen before.
//!
//! | Module | Job | I/O |
//! |---|---|---|
//! | [`stamp`] | self-describing blocks | none |
//! | [`state`] | what is known of one unit, in eight bytes | none |
//! | [`judge`] | what a read may return, and the class of what it may not | none |
//! | [`model`] | all units; issue, acknowledge, fail, read | none |
//! | [`record`] | changes of the model as bytes | none |
//! | [`writelog`] | the file of records | the file |
//! | [`workload`] | phases: write and read under load, full read-back | none: asked by the worker |

pub mod judge;
pub mod model;
pub mod record;
pub mod stamp;
pub mod state;
#[cfg(test)]
mod tests;
pub mod workload;
#[cfg(test)]
mod workload_tests;
pub mod writelog;
