//! The NVMe/TCP initiator proper, apart from devices and RPC.
//!
//! It needs only a [`Core`](crate::reactor::Core), a [`Net`](crate::reactor::net::Net) and parameters, so that a load
//! generator uses the very code that a volume uses.
//!
//! | Module | Job |
//! |---|---|
//! | [`qpair`] | one connection as a state machine without I/O: commands in, bytes out; bytes in, completions out |
//! | [`slots`], [`data`] | command identifiers; the data of a command as a range over buffers |
//! | [`connection`] | socket and queue pair on a core: sends, receives, deadlines, awaitable commands |
//! | [`controller`] | an association: admin queue, bring-up, keep-alive, events, I/O queues |
//! | `admin` | admin commands one by one |
//! | [`identify`] | what a controller says of itself and of its namespaces |
//!
//! *Invariants.* Every command has a deadline, but for event requests. A session never outlives its connection: what is
//! to be done again is done on a new one, after the old socket was closed.
//!
//! *When things fail.* [`HostError`] says what was tried and what came of it.

mod admin;
pub mod connection;
pub mod controller;
pub mod data;
pub mod identify;
pub mod qpair;
pub mod slots;
#[cfg(test)]
mod tests;

use nvme_wire::Status;
use nvme_wire::fabrics::ConnectError;

pub use connection::{Conn, Owner};
pub use controller::{Controller, ControllerEvents, ControllerParams, QueueSpec, open_queue};
pub use data::Data;
pub use identify::{NamespaceInfo, NsLimits};
pub use qpair::{Command, Fault, Params, Qpair};

/// Why a connection has ended.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Loss {
    /// The protocol was broken, by the peer or, if it says so, by us.
    #[error(transparent)]
    Protocol(#[from] Fault),
    #[error("the peer has closed the connection")]
    PeerClosed,
    #[error("socket: {0}")]
    Socket(String),
    #[error("a command was not answered in time")]
    Deadline,
    #[error("this end has closed the connection")]
    Closed,
}

/// Why something asked of a controller did not come about.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HostError {
    #[error("connect to {address}: {source_text}")]
    Socket { address: String, source_text: String },
    #[error("{what}: the connection was lost: {loss}")]
    Lost { what: &'static str, loss: Loss },
    #[error("{what}: no answer within the deadline")]
    Deadline { what: &'static str },
    #[error("the controller refuses the host or its parameters: {status}{}", refused_field(*.status, *.dw0))]
    Refused { status: Status, dw0: u32 },
    #[error("{what}: {status}")]
    Command { what: &'static str, status: Status },
    #[error("{what}: more commands than the queue takes")]
    QueueFull { what: &'static str },
    #[error("{field} {value}: {allowed}")]
    Invalid { field: &'static str, value: String, allowed: &'static str },
}

fn refused_field(status: Status, dw0: u32) -> String {
    if status.is(Status::CONNECT_INVALID_PARAMETERS) {
        return format!(" ({})", ConnectError::from_dw0(dw0));
    }
    String::new()
}

impl HostError {
    /// Whether the other side does not want this host (it was fenced, or never allowed).
    #[must_use]
    pub fn is_refused_host(&self) -> bool {
        matches!(self, Self::Refused { status, .. } if status.is(Status::CONNECT_INVALID_HOST))
    }
}
