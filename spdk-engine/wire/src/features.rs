//! Features (Base 2.0, 5.27.1) and asynchronous events (Base 2.0, 5.2).

use crate::Status;
use crate::log::lid;

/// Feature identifiers.
pub mod fid {
    #![allow(missing_docs)]
    pub const ARBITRATION: u8 = 0x01;
    pub const POWER_MANAGEMENT: u8 = 0x02;
    pub const TEMPERATURE_THRESHOLD: u8 = 0x04;
    pub const ERROR_RECOVERY: u8 = 0x05;
    pub const WRITE_CACHE: u8 = 0x06;
    pub const NUMBER_OF_QUEUES: u8 = 0x07;
    pub const INTERRUPT_COALESCING: u8 = 0x08;
    pub const INTERRUPT_VECTOR: u8 = 0x09;
    pub const WRITE_ATOMICITY: u8 = 0x0A;
    pub const ASYNC_EVENT_CONFIG: u8 = 0x0B;
    pub const KEEP_ALIVE_TIMER: u8 = 0x0F;
    pub const HOST_BEHAVIOR: u8 = 0x16;
    pub const HOST_ID: u8 = 0x81;
    pub const RESERVATION_MASK: u8 = 0x82;
    pub const RESERVATION_PERSISTENCE: u8 = 0x83;
}

/// Number of Queues, feature 07h (5.27.1.5): I/O queues asked for or allocated, 1 to 65535 of each kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NumberOfQueues {
    /// Submission queues.
    pub submission: u32,
    /// Completion queues.
    pub completion: u32,
}

impl NumberOfQueues {
    /// The same number of each kind.
    pub const fn both(queues: u32) -> Self {
        Self { submission: queues, completion: queues }
    }

    /// From Dword 11 of the command or Dword 0 of its completion, where both are 0's based.
    ///
    /// # Errors
    /// [`Status::INVALID_FIELD`] when either is 65535, which would be one too many.
    pub const fn from_raw(raw: u32) -> Result<Self, Status> {
        let (submission, completion) = ((raw & 0xFFFF) + 1, (raw >> 16) + 1);
        if submission > 0xFFFF || completion > 0xFFFF {
            return Err(Status::INVALID_FIELD);
        }
        Ok(Self { submission, completion })
    }

    /// The dword.
    pub const fn raw(self) -> u32 {
        self.submission.saturating_sub(1) & 0xFFFF | (self.completion.saturating_sub(1) & 0xFFFF) << 16
    }
}

/// Asynchronous Event Configuration, feature 0Bh (5.27.1.8), and OAES of Identify Controller: which events are
/// reported.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct AsyncEventConfig(pub u32);

impl AsyncEventConfig {
    /// Critical warnings of the health page, one bit each.
    pub const HEALTH: Self = Self(0xFF);
    /// A namespace was added, removed or changed.
    pub const NAMESPACE_ATTRIBUTE: Self = Self(1 << 8);
    /// Firmware activation starts.
    pub const FIRMWARE_ACTIVATION: Self = Self(1 << 9);
    /// An ANA state changed.
    pub const ANA_CHANGE: Self = Self(1 << 11);
    /// The discovery log page changed.
    pub const DISCOVERY_CHANGE: Self = Self(1 << 31);

    /// What an SPDK target enables at first.
    pub const fn target_default(ana: bool) -> Self {
        if ana { Self::NAMESPACE_ATTRIBUTE.with(Self::ANA_CHANGE) } else { Self::NAMESPACE_ATTRIBUTE }
    }

    /// Both together.
    #[must_use]
    pub const fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Whether all bits of `other` are set.
    pub const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }
}

/// An asynchronous event, as Dword 0 of the request's completion tells it (5.2.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AsyncEvent {
    /// Error status: what went wrong.
    Error(u8),
    /// Health status: what changed.
    Health(u8),
    /// Notice: a namespace was added, removed or changed.
    NamespaceAttribute,
    /// Notice: firmware activation starts.
    FirmwareActivation,
    /// Notice: an ANA state changed.
    AnaChange,
    /// Notice: the discovery log page changed.
    DiscoveryChange,
    /// I/O command set: a reservation notification is available.
    ReservationLog,
    /// Any other event.
    Other {
        /// Event type, 3 bits.
        kind: u8,
        /// Event information.
        info: u8,
        /// Log page that has more.
        log: u8,
    },
}

const TYPE_ERROR: u8 = 0;
const TYPE_HEALTH: u8 = 1;
const TYPE_NOTICE: u8 = 2;
const TYPE_IO_COMMAND_SET: u8 = 6;

impl AsyncEvent {
    /// From Dword 0.
    pub const fn from_dw0(dw0: u32) -> Self {
        let [low, info, log, _] = dw0.to_le_bytes();
        match (low & 7, info, log) {
            (TYPE_ERROR, info, lid::ERROR) => Self::Error(info),
            (TYPE_HEALTH, info, lid::HEALTH) => Self::Health(info),
            (TYPE_NOTICE, 0x00, lid::CHANGED_NAMESPACES) => Self::NamespaceAttribute,
            (TYPE_NOTICE, 0x01, lid::FIRMWARE_SLOT) => Self::FirmwareActivation,
            (TYPE_NOTICE, 0x03, lid::ANA) => Self::AnaChange,
            (TYPE_NOTICE, 0xF0, lid::DISCOVERY) => Self::DiscoveryChange,
            (TYPE_IO_COMMAND_SET, 0x00, lid::RESERVATION) => Self::ReservationLog,
            (kind, info, log) => Self::Other { kind, info, log },
        }
    }

    /// Dword 0.
    pub const fn dw0(self) -> u32 {
        let (kind, info, log) = match self {
            Self::Error(info) => (TYPE_ERROR, info, lid::ERROR),
            Self::Health(info) => (TYPE_HEALTH, info, lid::HEALTH),
            Self::NamespaceAttribute => (TYPE_NOTICE, 0x00, lid::CHANGED_NAMESPACES),
            Self::FirmwareActivation => (TYPE_NOTICE, 0x01, lid::FIRMWARE_SLOT),
            Self::AnaChange => (TYPE_NOTICE, 0x03, lid::ANA),
            Self::DiscoveryChange => (TYPE_NOTICE, 0xF0, lid::DISCOVERY),
            Self::ReservationLog => (TYPE_IO_COMMAND_SET, 0x00, lid::RESERVATION),
            Self::Other { kind, info, log } => (kind & 7, info, log),
        };
        u32::from_le_bytes([kind, info, log, 0])
    }

    /// The log page that has more, and whose reading makes the event reportable again.
    pub const fn log_page(self) -> u8 {
        self.dw0().to_le_bytes()[2]
    }

    /// The bit of [`AsyncEventConfig`] that must be set for the event to be reported; `None` for an event that is
    /// always reported.
    pub const fn config(self) -> Option<AsyncEventConfig> {
        match self {
            Self::NamespaceAttribute => Some(AsyncEventConfig::NAMESPACE_ATTRIBUTE),
            Self::FirmwareActivation => Some(AsyncEventConfig::FIRMWARE_ACTIVATION),
            Self::AnaChange => Some(AsyncEventConfig::ANA_CHANGE),
            Self::DiscoveryChange => Some(AsyncEventConfig::DISCOVERY_CHANGE),
            Self::Error(_) | Self::Health(_) | Self::ReservationLog | Self::Other { .. } => None,
        }
    }
}

/// Bit of Dword 11 of Get Features 81h (5.27.1.25): the host identifier has 128 bits (EXHID).
pub const HOST_ID_EXTENDED: u32 = 1;
/// Bytes of the data of [`HostBehavior`].
pub const HOST_BEHAVIOR_SIZE: usize = 512;

layout! {
    /// Data of Host Behavior Support, feature 16h (5.27.1.18).
    pub struct HostBehavior[512] {
        /// Advanced Command Retry Enable: 1 lets the controller use retry delays.
        0 acre: u8,
        /// Extended Telemetry Data Area 4 Supported.
        1 etdas: u8,
        /// LBA Format Extension Enable: 1 for more than 16 formats.
        2 lbafee: u8,
    }
}

/// Reservation Notification Mask, feature 82h (5.27.1.26): a set bit silences the kind of notification.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ReservationMask(pub u32);

impl ReservationMask {
    /// Registration preempted.
    pub const REGISTRATION_PREEMPTED: Self = Self(1 << 1);
    /// Reservation released.
    pub const RESERVATION_RELEASED: Self = Self(1 << 2);
    /// Reservation preempted.
    pub const RESERVATION_PREEMPTED: Self = Self(1 << 3);

    /// Whether notifications of `kind` (see [`crate::reservation::notification`]) are silenced.
    pub const fn silences(self, kind: u8) -> bool {
        kind < 32 && self.0 & (1 << kind) != 0
    }
}

/// Rounds a Keep Alive Timeout up to the granularity of an SPDK target: 0 stays 0, anything else becomes the next
/// multiple of `granularity_ms`, at least one.
pub const fn round_keep_alive(kato_ms: u32, granularity_ms: u32) -> u32 {
    if granularity_ms == 0 {
        return kato_ms;
    }
    match kato_ms.checked_next_multiple_of(granularity_ms) {
        Some(rounded) => rounded,
        // The next multiple does not fit: the largest one that does.
        None => kato_ms - kato_ms % granularity_ms,
    }
}
