//! Why an operation was refused or failed, and which errno SPDK answers in the same case.

use crate::device::DeviceError;

/// An operation that was refused or failed.
///
/// A refusal changes nothing. After a device error the operation may or may not have reached the disk; the store in
/// memory holds the state before it, except where the text of the operation says otherwise.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// A parameter is out of range.
    #[error("{0}")]
    Invalid(String),
    /// The name is in use.
    #[error("the name {0:?} is in use")]
    Exists(String),
    /// No such volume or attribute.
    #[error("{0} does not exist")]
    NotFound(String),
    /// Not allowed on this volume, such as a resize of a read-only one.
    #[error("{0}")]
    NotPermitted(String),
    /// Another operation on the volume is running, or the volume is needed by others.
    #[error("{0}")]
    Busy(String),
    /// No free cluster or metadata page is left.
    #[error("no space left in the store: {0}")]
    NoSpace(&'static str),
    /// The device has no lvolstore.
    #[error("the device holds no lvolstore: {0}")]
    NotAStore(String),
    /// Metadata on disk is damaged.
    #[error("damaged metadata: {0}")]
    Damaged(String),
    /// The external device that the volume is a clone of is absent.
    #[error("the external device {0} is absent")]
    NoExternal(String),
    /// The store was unloaded, or an earlier failure left it unusable until it is loaded again.
    #[error("the store is not loaded")]
    Unloaded,
    /// The device failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

impl Error {
    /// The positive errno that SPDK answers in this case.
    pub fn errno(&self) -> i32 {
        match self {
            Self::Invalid(_) => 22,
            Self::Exists(_) => 17,
            Self::NotFound(_) => 2,
            Self::NotPermitted(_) => 1,
            Self::Busy(_) => 16,
            Self::NoSpace(_) | Self::Device(DeviceError::NoSpace) => 28,
            Self::NotAStore(_) => 6,
            Self::Damaged(_) => 84,
            Self::NoExternal(_) | Self::Unloaded | Self::Device(DeviceError::Gone) => 19,
            Self::Device(DeviceError::Io) => 5,
        }
    }
}
