//! What a call to the agent can end with.
//!
//! *What it is.* One enum for all services; each variant is one thing that a caller can do about it. The gRPC codes are
//! given in [`crate::server`] and nowhere else.
//!
//! *Invariants.* Messages name the field or object, the value and what is allowed.

use crate::rpc::RpcError;
use crate::state::{StateError, slots::SlotsError};

/// Why a call failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AgentError {
    /// The request is wrong and will stay so.
    #[error("{field} is '{value}': {allowed}")]
    Invalid {
        /// The field.
        field: &'static str,
        /// Its value.
        value: String,
        /// What is allowed.
        allowed: String,
    },
    /// The object is not on this node.
    #[error("{kind} '{name}' is not on this node")]
    NotFound {
        /// What it is.
        kind: &'static str,
        /// Its name.
        name: String,
    },
    /// An object of that name is there, but another one than asked for.
    #[error("{0}")]
    Exists(String),
    /// A rule forbids it now.
    #[error("{0}")]
    Forbidden(String),
    /// It cannot be done now; the same call may succeed later.
    #[error("{0}")]
    Unavailable(String),
    /// The caller is old: a newer epoch exists.
    #[error("{0}")]
    Superseded(String),
    /// Data or state is damaged.
    #[error("{0}")]
    Damaged(String),
    /// The data plane or the system failed in a way that is nobody's fault.
    #[error("{0}")]
    Internal(String),
}

impl From<RpcError> for AgentError {
    fn from(error: RpcError) -> Self {
        match error {
            RpcError::Connect { .. } | RpcError::Disconnected { .. } | RpcError::Timeout { .. } => {
                Self::Unavailable(error.to_string())
            }
            _ => Self::Internal(error.to_string()),
        }
    }
}

impl From<StateError> for AgentError {
    fn from(error: StateError) -> Self {
        match error {
            StateError::Slots(error) => error.into(),
            StateError::Io { .. } => Self::Internal(error.to_string()),
            _ => Self::Damaged(error.to_string()),
        }
    }
}

impl From<SlotsError> for AgentError {
    fn from(error: SlotsError) -> Self {
        match error {
            SlotsError::Corrupt { .. } => Self::Damaged(error.to_string()),
            SlotsError::Io { .. } => Self::Internal(error.to_string()),
        }
    }
}

/// Runs blocking file work away from the reactor threads.
pub(crate) async fn blocking<T, F>(work: F) -> Result<T, AgentError>
where
    T: Send + 'static,
    F: FnOnce() -> T + Send + 'static,
{
    tokio::task::spawn_blocking(work).await.map_err(|error| AgentError::Internal(format!("file work failed: {error}")))
}
