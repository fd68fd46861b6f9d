//! An exhaustive model of the mirror's configuration protocol: every order of every step, within bounds.
//!
//! *What it is.* Two engines (each dies and starts anew), three replicas, one arbiter, one block of data; writes are
//! increasing numbers. The simulator (`engine-sim`) runs the product's code in many histories; this model writes the
//! rules down once more, by hand and small, and looks at *all* histories. `cargo test` does so for the quick
//! [`SCENARIOS`] and shows for each planted [`Bug`] that it is found; `make model` does all.
//!
//! *Which step stands for which rule.*
//!
//! | Rule | Steps |
//! |---|---|
//! | 1 acknowledgement | [`Step::Acknowledge`]: every required replica has it |
//! | 2 overlap | one [`state::Job`] per engine: a write, a copy or making equal holds the block's lock |
//! | 3 reads wait | [`Step::Read`] is impossible while a write holds the lock |
//! | 6 loss | [`Step::Eject`]; the member stays required until the swap is settled; never below `minInSync` |
//! | 7 unknown outcome | the request stays in the queue: [`Step::LateSwap`] commits it at any time, also after its sender died; the engine goes on only by [`Step::Settle`], its own swap executed and answered |
//! | 8 `k` rises | every change of the sets; looked at by the arbiter |
//! | 9 bits of a joiner | [`Step::Join`] only with the bit durable on the joiner when the region is hot |
//! | 10 join | [`Step::StartRebuild`], [`Step::Copy`] under the lock from a member, mirrored writes, required before [`Step::Join`] |
//! | 13 one session | [`Step::Promote`], [`Step::Connect`]: end and drain the older one; lower epochs are refused; the disk's write of an ended session may land until then ([`Step::Land`]) |
//! | 15 open | [`Step::Open`] swaps the epoch first; [`Step::Decide`] needs a promoted member, reads bits of promoted members only, takes the others out by a swap before serving |
//! | 16 lease | [`Step::Read`] needs every required member connected or confirmed since the last [`Step::TimePasses`]; [`Step::Decide`] with members missing needs that time or [`Step::KnowDead`] |
//! | 18 bits | [`Step::SetBit`] on all before data; [`Step::Equalise`] before reads and writes of what is inherited; [`Step::ClearBit`] only when idle |
//!
//! `tests/product` does the same with the product's own opener and core, within smaller bounds: what the model says of
//! the rules, and what that says of the code, are two things.
//!
//! *What looks simpler than it is.* A partition, a paused process and a hanging disk are steps that do not come. A
//! replica's crash is [`Step::Break`]: nothing is allowed in before the next promote or session, and its disk may have
//! done its last write or not. A fenced engine has no step of its own: it can do nothing more but [`Step::Die`]. A read
//! is one step, since one begun earlier may return less and one answered later passes the same checks later. Time is
//! one step of T plus margin, since within T nothing depends on how much of it has passed.
//!
//! *Not here.* Rules 4, 5, 17 and 19 to 23; region stamps (every rebuild is a full copy); lost caches; rule 12, which
//! is about when to eject, while here any member may be ejected at any time; one lineage, and an arbiter that
//! forgets nothing; orderly closes.
//!
//! *When something is found.* The test fails with the shortest way to the violation that was met, step by step.

#![cfg_attr(test, allow(clippy::unwrap_used))]
#![forbid(unsafe_code)]

mod bug;
mod check;
mod model;
mod opening;
mod scenarios;
mod serving;
mod set;
pub mod state;
mod steps;

pub use bug::Bug;
pub use check::{Report, check, story};
pub use model::{Bounds, Coverage, Mirror, Seen};
pub use scenarios::{SCENARIOS, Scenario};
pub use set::{REPLICAS, Set};
pub use steps::Step;
