//! Completion status (Base 2.0, 3.3.3.2.1 "Status Field Definition").
//!
//! A [`Status`] is the 15-bit status field of a completion without the phase tag, which message-based transports keep
//! at zero: SC in bits 7:0, SCT 10:8, CRD 12:11, More 13, Do Not Retry 14. The constants carry no DNR; add it with
//! [`Status::with_dnr`]. Comparing with `==` compares all bits; use [`Status::is`] to compare the code alone.

use std::fmt;

/// Status Code Type: which table a status code is from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StatusCodeType {
    /// 0h, Generic Command Status.
    Generic,
    /// 1h, Command Specific Status.
    CommandSpecific,
    /// 2h, Media and Data Integrity Errors.
    Media,
    /// 3h, Path Related Status.
    Path,
    /// 4h to 6h, reserved.
    Reserved(u8),
    /// 7h, Vendor Specific.
    VendorSpecific,
}

/// Status of a completed command. `Default` is success.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Status(u16);

const CODE_MASK: u16 = 0x7FF;
const MORE: u16 = 1 << 13;
const DNR: u16 = 1 << 14;

impl Status {
    /// The status with code type `sct` (0 to 7, higher bits dropped) and code `sc`.
    pub const fn new(sct: u8, sc: u8) -> Self {
        Self((((sct & 7) as u16) << 8) | sc as u16)
    }

    /// From bits 31:17 of completion Dword 3, shifted down; bit 15 is dropped.
    pub const fn from_raw(raw: u16) -> Self {
        Self(raw & 0x7FFF)
    }

    /// Bits 31:17 of completion Dword 3, shifted down.
    pub const fn raw(self) -> u16 {
        self.0
    }

    /// From the last two bytes of a completion entry, phase tag in bit 0 ignored.
    pub const fn from_cqe_field(field: u16) -> Self {
        Self(field >> 1)
    }

    /// The last two bytes of a completion entry, phase tag zero.
    pub const fn cqe_field(self) -> u16 {
        self.0 << 1
    }

    /// Status Code.
    pub const fn sc(self) -> u8 {
        self.0 as u8
    }

    /// Status Code Type as a number.
    pub const fn sct(self) -> u8 {
        (self.0 >> 8) as u8 & 7
    }

    /// Status Code Type.
    pub const fn code_type(self) -> StatusCodeType {
        match self.sct() {
            0 => StatusCodeType::Generic,
            1 => StatusCodeType::CommandSpecific,
            2 => StatusCodeType::Media,
            3 => StatusCodeType::Path,
            7 => StatusCodeType::VendorSpecific,
            other => StatusCodeType::Reserved(other),
        }
    }

    /// Command Retry Delay: 0 for none, 1 to 3 for the controller's CRDT1 to CRDT3.
    pub const fn crd(self) -> u8 {
        (self.0 >> 11) as u8 & 3
    }

    /// More: the error information log has more about this.
    pub const fn more(self) -> bool {
        self.0 & MORE != 0
    }

    /// Do Not Retry: the same command would fail again.
    pub const fn dnr(self) -> bool {
        self.0 & DNR != 0
    }

    /// The same status with Do Not Retry set.
    #[must_use]
    pub const fn with_dnr(self) -> Self {
        Self(self.0 | DNR)
    }

    /// The same status with More set.
    #[must_use]
    pub const fn with_more(self) -> Self {
        Self(self.0 | MORE)
    }

    /// The same status with Command Retry Delay `crd` (0 to 3, higher bits dropped).
    #[must_use]
    pub const fn with_crd(self, crd: u8) -> Self {
        Self(self.0 & !(3 << 11) | ((crd & 3) as u16) << 11)
    }

    /// Whether code type and code are those of `other`, whatever the retry bits.
    pub const fn is(self, other: Self) -> bool {
        self.0 & CODE_MASK == other.0 & CODE_MASK
    }

    /// Whether the command succeeded.
    pub const fn is_success(self) -> bool {
        self.is(Self::SUCCESS)
    }

    /// Whether the error is of the path, so that another path may serve the command.
    pub const fn is_path_error(self) -> bool {
        self.sct() == 3
    }

    /// The specification's name of the code, if it is one of the constants.
    pub fn name(self) -> Option<&'static str> {
        NAMES.iter().find(|(status, _)| self.is(*status)).map(|(_, name)| *name)
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.name().unwrap_or("Unknown Status");
        write!(f, "{name} (SCT {:X}h, SC {:02X}h", self.sct(), self.sc())?;
        if self.crd() != 0 {
            write!(f, ", CRD {}", self.crd())?;
        }
        f.write_str(if self.dnr() { ", DNR)" } else { ")" })
    }
}

impl fmt::Debug for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::error::Error for Status {}

macro_rules! statuses {
    ($( $sct:literal $sc:literal $name:ident $text:literal; )*) => {
        impl Status {
            $( #[doc = concat!($text, " (SCT ", stringify!($sct), ", SC ", stringify!($sc), ").")]
               pub const $name: Self = Self::new($sct, $sc); )*
        }
        const NAMES: &[(Status, &str)] = &[$( (Status::$name, $text) ),*];
    };
}

// Command-specific codes mean different things to different commands. Those with two meanings have one constant each;
// the name shown is that of the first, so it says both.
statuses! {
    0 0x00 SUCCESS "Successful Completion";
    0 0x01 INVALID_OPCODE "Invalid Command Opcode";
    0 0x02 INVALID_FIELD "Invalid Field in Command";
    0 0x03 COMMAND_ID_CONFLICT "Command ID Conflict";
    0 0x04 DATA_TRANSFER_ERROR "Data Transfer Error";
    0 0x05 ABORTED_POWER_LOSS "Commands Aborted due to Power Loss Notification";
    0 0x06 INTERNAL_ERROR "Internal Error";
    0 0x07 ABORTED_BY_REQUEST "Command Abort Requested";
    0 0x08 ABORTED_SQ_DELETION "Command Aborted due to SQ Deletion";
    0 0x09 ABORTED_FAILED_FUSED "Command Aborted due to Failed Fused Command";
    0 0x0A ABORTED_MISSING_FUSED "Command Aborted due to Missing Fused Command";
    0 0x0B INVALID_NAMESPACE "Invalid Namespace or Format";
    0 0x0C COMMAND_SEQUENCE_ERROR "Command Sequence Error";
    0 0x0D INVALID_SGL_SEGMENT "Invalid SGL Segment Descriptor";
    0 0x0E INVALID_SGL_COUNT "Invalid Number of SGL Descriptors";
    0 0x0F DATA_SGL_LENGTH_INVALID "Data SGL Length Invalid";
    0 0x10 METADATA_SGL_LENGTH_INVALID "Metadata SGL Length Invalid";
    0 0x11 SGL_TYPE_INVALID "SGL Descriptor Type Invalid";
    0 0x14 ATOMIC_WRITE_UNIT_EXCEEDED "Atomic Write Unit Exceeded";
    0 0x15 OPERATION_DENIED "Operation Denied";
    0 0x16 SGL_OFFSET_INVALID "SGL Offset Invalid";
    0 0x18 HOST_ID_FORMAT "Host Identifier Inconsistent Format";
    0 0x19 KEEP_ALIVE_EXPIRED "Keep Alive Timer Expired";
    0 0x1A KEEP_ALIVE_INVALID "Keep Alive Timeout Invalid";
    0 0x1B ABORTED_PREEMPT "Command Aborted due to Preempt and Abort";
    0 0x1C SANITIZE_FAILED "Sanitize Failed";
    0 0x1D SANITIZE_IN_PROGRESS "Sanitize In Progress";
    0 0x1E SGL_GRANULARITY_INVALID "SGL Data Block Granularity Invalid";
    0 0x20 NAMESPACE_WRITE_PROTECTED "Namespace is Write Protected";
    0 0x21 COMMAND_INTERRUPTED "Command Interrupted";
    0 0x22 TRANSIENT_TRANSPORT_ERROR "Transient Transport Error";
    0 0x24 MEDIA_NOT_READY "Admin Command Media Not Ready";
    0 0x80 LBA_OUT_OF_RANGE "LBA Out of Range";
    0 0x81 CAPACITY_EXCEEDED "Capacity Exceeded";
    0 0x82 NAMESPACE_NOT_READY "Namespace Not Ready";
    0 0x83 RESERVATION_CONFLICT "Reservation Conflict";
    0 0x84 FORMAT_IN_PROGRESS "Format In Progress";

    1 0x00 COMPLETION_QUEUE_INVALID "Completion Queue Invalid";
    1 0x01 INVALID_QUEUE_ID "Invalid Queue Identifier";
    1 0x02 INVALID_QUEUE_SIZE "Invalid Queue Size";
    1 0x03 ABORT_LIMIT_EXCEEDED "Abort Command Limit Exceeded";
    1 0x05 AER_LIMIT_EXCEEDED "Asynchronous Event Request Limit Exceeded";
    1 0x06 INVALID_FIRMWARE_SLOT "Invalid Firmware Slot";
    1 0x07 INVALID_FIRMWARE_IMAGE "Invalid Firmware Image";
    1 0x09 INVALID_LOG_PAGE "Invalid Log Page";
    1 0x0A INVALID_FORMAT "Invalid Format";
    1 0x0D FEATURE_NOT_SAVEABLE "Feature Identifier Not Saveable";
    1 0x0E FEATURE_NOT_CHANGEABLE "Feature Not Changeable";
    1 0x0F FEATURE_NOT_NAMESPACE_SPECIFIC "Feature Not Namespace Specific";
    1 0x15 NAMESPACE_INSUFFICIENT_CAPACITY "Namespace Insufficient Capacity";
    1 0x18 NAMESPACE_ALREADY_ATTACHED "Namespace Already Attached";
    1 0x1A NAMESPACE_NOT_ATTACHED "Namespace Not Attached";
    1 0x24 ANA_GROUP_INVALID "ANA Group Identifier Invalid";
    1 0x29 COMMAND_SET_NOT_SUPPORTED "I/O Command Set Not Supported";
    1 0x80 CONNECT_INCOMPATIBLE_FORMAT "Connect Incompatible Format or Conflicting Attributes";
    1 0x80 CONFLICTING_ATTRIBUTES "Conflicting Attributes";
    1 0x81 CONNECT_CONTROLLER_BUSY "Connect Controller Busy or Invalid Protection Information";
    1 0x81 INVALID_PROTECTION_INFORMATION "Invalid Protection Information";
    1 0x82 CONNECT_INVALID_PARAMETERS "Connect Invalid Parameters or Write to Read Only Range";
    1 0x82 WRITE_TO_READ_ONLY_RANGE "Attempted Write to Read Only Range";
    1 0x83 CONNECT_RESTART_DISCOVERY "Connect Restart Discovery or Command Size Limit Exceeded";
    1 0x83 COMMAND_SIZE_LIMIT_EXCEEDED "Command Size Limit Exceeded";
    1 0x84 CONNECT_INVALID_HOST "Connect Invalid Host";
    1 0x85 INVALID_QUEUE_TYPE "Invalid Queue Type";
    1 0x90 DISCOVER_RESTART "Discover Restart";
    1 0x91 AUTHENTICATION_REQUIRED "Authentication Required";

    2 0x80 WRITE_FAULT "Write Fault";
    2 0x81 UNRECOVERED_READ_ERROR "Unrecovered Read Error";
    2 0x82 GUARD_CHECK_ERROR "End-to-end Guard Check Error";
    2 0x83 APPLICATION_TAG_CHECK_ERROR "End-to-end Application Tag Check Error";
    2 0x84 REFERENCE_TAG_CHECK_ERROR "End-to-end Reference Tag Check Error";
    2 0x85 COMPARE_FAILURE "Compare Failure";
    2 0x86 ACCESS_DENIED "Access Denied";
    2 0x87 DEALLOCATED_OR_UNWRITTEN "Deallocated or Unwritten Logical Block";

    3 0x00 INTERNAL_PATH_ERROR "Internal Path Error";
    3 0x01 ANA_PERSISTENT_LOSS "Asymmetric Access Persistent Loss";
    3 0x02 ANA_INACCESSIBLE "Asymmetric Access Inaccessible";
    3 0x03 ANA_TRANSITION "Asymmetric Access Transition";
    3 0x60 CONTROLLER_PATHING_ERROR "Controller Pathing Error";
    3 0x70 HOST_PATHING_ERROR "Host Pathing Error";
    3 0x71 ABORTED_BY_HOST "Command Aborted By Host";
}
