//! RPC methods `nvmf_*`.
//!
//! *Invariants.* Names, parameters, results and error texts are SPDK's. A refused call has changed nothing; what SPDK's
//! fixed text does not tell goes to the log.

mod config;
mod hosts;
mod listeners;
mod namespaces;
mod state;
mod subsystems;
mod transport;

use std::rc::Rc;

use super::subsystem::{Subsystem, SubsystemError};
use super::target::{Target, target};
use crate::app::App;
use crate::rpc::params::invalid_parameters;
use crate::rpc::{Methods, RpcError};

/// The only target's name.
const TARGET_NAME: &str = "nvmf_tgt";

/// Adds the methods and the saved configuration.
pub fn register(methods: &mut Methods) {
    transport::register(methods);
    subsystems::register(methods);
    listeners::register(methods);
    namespaces::register(methods);
    hosts::register(methods);
    state::register(methods);
    config::register(methods);
}

/// The target that a call names.
fn named_target(app: &App, name: Option<&str>) -> Result<Rc<Target>, RpcError> {
    match name {
        None | Some(TARGET_NAME) => Ok(target(app)),
        Some(other) => Err(RpcError::invalid_params(format!("NVMf target '{other}' not found"))),
    }
}

/// The subsystem that a call names.
fn named_subsystem(target: &Target, nqn: &str) -> Result<Rc<Subsystem>, RpcError> {
    let missing = || RpcError::invalid_params(format!("Subsystem with NQN '{nqn}' not found"));
    target.subsystem(nqn).ok_or_else(missing)
}

/// SPDK's answer to most refusals; the reason goes to the log.
fn refused(error: &SubsystemError) -> RpcError {
    tracing::warn!(%error, "call refused");
    invalid_parameters()
}
