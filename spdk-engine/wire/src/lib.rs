//! NVMe, NVMe over Fabrics and NVMe/TCP structures, typed at the edge.
//!
//! Bytes come in, typed values go out, and the reverse. Nothing here does I/O, keeps a clock or holds state longer
//! than one PDU header; both the target and the initiator are built on it.
//!
//! | Module | Holds | Specification |
//! |---|---|---|
//! | [`status`] | completion status codes | Base 2.0, 3.3.3.2.1 |
//! | [`pdu`], [`link`], [`digest`] | NVMe/TCP PDUs, header checks, incremental decoding | TCP Transport 1.0, 3.6 |
//! | [`command`], [`sgl`] | submission and completion entries, SGLs, NVM I/O commands | Base 2.0, 3.3.3 and 4.1.2; NVM 1.0, 3.2 |
//! | [`admin`] | admin commands | Base 2.0, 5 |
//! | [`fabrics`], [`property`] | Connect, Property Get and Set, authentication; controller properties | Base 2.0, 6 and 3.1.3 |
//! | [`identify`], [`namespace`] | Identify data structures | Base 2.0, 5.17; NVM 1.0, 4.1.5 |
//! | [`log`], [`ana`], [`discovery`] | log pages | Base 2.0, 5.16 |
//! | [`features`] | features and asynchronous events | Base 2.0, 5.27 and 5.2 |
//! | [`reservation`] | reservation commands and report | Base 2.0, 7.2 to 7.5 |
//! | [`nqn`] | NVMe Qualified Names | Base 2.0, 4.5 |
//!
//! # Invariants
//! * No parser panics or allocates more than its input justifies, whatever the bytes are.
//! * A parser that can fail says which field was wrong, in the form the peer expects to hear it: a
//!   [`pdu::TermError`] for a PDU, a [`status::Status`] for a command.
//! * All-zero is the default of every data structure, as in the specification for reserved fields.
//! * Values are in the units their documentation gives; "0's based" fields are converted at the edge.
#![warn(missing_docs)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

#[macro_use]
mod layout;

pub mod admin;
pub mod ana;
pub mod command;
pub mod digest;
pub mod discovery;
pub mod fabrics;
pub mod features;
pub mod identify;
pub mod link;
pub mod log;
pub mod namespace;
pub mod nqn;
pub mod pdu;
pub mod property;
pub mod reservation;
pub mod sgl;
pub mod status;

pub use command::{Cqe, IoCommand, Sgl, Sqe};
pub use digest::{DataDigest, crc32c};
pub use layout::{NulPadded, ShortBuffer, SpacePadded, Text, TextTooLong};
pub use link::{Decoded, HeaderDecoder, Layout, Link, Role};
pub use nqn::{DISCOVERY_NQN, Nqn};
pub use pdu::{Fes, Pdu, TermError};
pub use status::Status;
