//! What a caller over gRPC is told: the only place where errors become codes.

use tonic::{Code, Status};

use crate::error::AgentError;

/// The gRPC status of an error, as the proto file's header describes them.
pub(super) fn to_status(error: &AgentError) -> Status {
    let code = match error {
        AgentError::Invalid { .. } => Code::InvalidArgument,
        AgentError::NotFound { .. } => Code::NotFound,
        AgentError::Exists(_) => Code::AlreadyExists,
        AgentError::Forbidden(_) => Code::FailedPrecondition,
        AgentError::Unavailable(_) => Code::Unavailable,
        AgentError::Superseded(_) => Code::Aborted,
        AgentError::Damaged(_) => Code::DataLoss,
        AgentError::Internal(_) => Code::Internal,
    };
    Status::new(code, error.to_string())
}
