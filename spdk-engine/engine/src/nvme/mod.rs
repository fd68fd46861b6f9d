//! NVMe/TCP initiator.

pub mod host;

use crate::rpc::Methods;

/// Adds this module's methods.
pub fn register(_methods: &mut Methods) {}
