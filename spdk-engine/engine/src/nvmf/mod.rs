//! NVMe over Fabrics target, TCP transport, as SPDK's: what its initiator and the Linux kernel's use.
//!
//! | Module | Job | Core |
//! |---|---|---|
//! | [`target`], [`subsystem`] | subsystems, listening sockets, hosts, namespaces | control |
//! | [`connect`] | connections up to their Connect | control |
//! | [`controller`], [`admin`], [`identify`], [`logs`], [`features`], [`events`], [`discovery`] | admin queues | control |
//! | [`poll_group`], [`io`] | I/O queues | data |
//! | [`session`] | the PDU state machine, without I/O | both |
//! | [`conn`] | a socket and its session | both |
//! | [`queues`], [`ana`], [`wait`], [`log_limit`] | what both sides share | both |
//! | [`rpc`] | `nvmf_*` methods, saved configuration | control |
//!
//! *Flow.* A connection is accepted on the control core and stays there up to its Connect. An admin queue stays; an I/O
//! queue moves, socket and session together, to the data core where the subsystem's devices are at home, or to the next
//! one in turn. From then on the two sides talk by messages only.
//!
//! *Invariants.* Hosts that are not on a subsystem's list are refused (deny by default). Taking a host, a listener, a
//! namespace or a subsystem away is answered only after all I/O under it has completed on every core: what a caller was
//! told is gone can write no more. Every wait has a deadline, every queue a bound.
//!
//! *When things fail.* Wrong PDUs end their connection, wrong commands are answered; neither reaches a device.

pub mod address;
pub mod admin;
pub mod ana;
pub mod conn;
pub mod connect;
pub mod controller;
pub mod discovery;
pub mod events;
pub mod features;
pub mod identify;
pub mod io;
pub mod log_limit;
pub mod logs;
pub mod options;
pub mod poll_group;
pub mod queues;
mod rpc;
pub mod session;
pub mod subsystem;
pub mod target;
#[cfg(test)]
mod tests;
pub mod wait;

use crate::rpc::Methods;

/// Adds this module's methods.
pub fn register(methods: &mut Methods) {
    rpc::register(methods);
}
