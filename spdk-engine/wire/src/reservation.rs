//! Reservations (Base 2.0, 7.2 to 7.5): the command dwords, the data of each command and the report.
//!
//! Keys and host identifiers are opaque. The rules of who may do what belong to the target.

use crate::Status;

/// Reservation type.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ReservationType {
    /// 1h.
    WriteExclusive,
    /// 2h.
    ExclusiveAccess,
    /// 3h.
    WriteExclusiveRegistrantsOnly,
    /// 4h.
    ExclusiveAccessRegistrantsOnly,
    /// 5h.
    WriteExclusiveAllRegistrants,
    /// 6h.
    ExclusiveAccessAllRegistrants,
}

impl ReservationType {
    /// From the value on the wire.
    ///
    /// # Errors
    /// [`Status::INVALID_FIELD`] for any other value.
    pub const fn from_raw(raw: u8) -> Result<Self, Status> {
        Ok(match raw {
            1 => Self::WriteExclusive,
            2 => Self::ExclusiveAccess,
            3 => Self::WriteExclusiveRegistrantsOnly,
            4 => Self::ExclusiveAccessRegistrantsOnly,
            5 => Self::WriteExclusiveAllRegistrants,
            6 => Self::ExclusiveAccessAllRegistrants,
            _ => return Err(Status::INVALID_FIELD),
        })
    }

    /// The value on the wire.
    pub const fn raw(self) -> u8 {
        match self {
            Self::WriteExclusive => 1,
            Self::ExclusiveAccess => 2,
            Self::WriteExclusiveRegistrantsOnly => 3,
            Self::ExclusiveAccessRegistrantsOnly => 4,
            Self::WriteExclusiveAllRegistrants => 5,
            Self::ExclusiveAccessAllRegistrants => 6,
        }
    }

    /// Whether every registrant holds the reservation.
    pub const fn is_all_registrants(self) -> bool {
        matches!(self, Self::WriteExclusiveAllRegistrants | Self::ExclusiveAccessAllRegistrants)
    }

    /// Whether registrants other than the holder keep access.
    pub const fn lets_registrants_in(self) -> bool {
        !matches!(self, Self::WriteExclusive | Self::ExclusiveAccess)
    }

    /// Whether those without access may still read.
    pub const fn lets_all_read(self) -> bool {
        matches!(self, Self::WriteExclusive | Self::WriteExclusiveRegistrantsOnly | Self::WriteExclusiveAllRegistrants)
    }
}

/// What a Reservation Register does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RegisterAction {
    /// 0h.
    Register,
    /// 1h.
    Unregister,
    /// 2h.
    Replace,
}

/// Change Persist Through Power Loss State.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PersistChange {
    /// 0h, no change.
    Keep,
    /// 1h, reserved.
    Reserved,
    /// 2h, reservations are released by a power loss.
    Clear,
    /// 3h, reservations persist.
    Set,
}

/// Dword 10 of a Reservation Register; the data is a [`RegisterData`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReservationRegister {
    /// Action.
    pub action: RegisterAction,
    /// Ignore Existing Key.
    pub ignore_existing_key: bool,
    /// Persistence change.
    pub persist: PersistChange,
}

const IEKEY: u32 = 1 << 3;

impl ReservationRegister {
    pub(crate) fn parse(cdw10: u32) -> Result<Self, Status> {
        Ok(Self {
            action: match cdw10 & 7 {
                0 => RegisterAction::Register,
                1 => RegisterAction::Unregister,
                2 => RegisterAction::Replace,
                _ => return Err(Status::INVALID_FIELD),
            },
            ignore_existing_key: cdw10 & IEKEY != 0,
            persist: match cdw10 >> 30 {
                0 => PersistChange::Keep,
                1 => PersistChange::Reserved,
                2 => PersistChange::Clear,
                _ => PersistChange::Set,
            },
        })
    }

    pub(crate) const fn cdw10(&self) -> u32 {
        let action = match self.action {
            RegisterAction::Register => 0,
            RegisterAction::Unregister => 1,
            RegisterAction::Replace => 2,
        };
        let persist = match self.persist {
            PersistChange::Keep => 0,
            PersistChange::Reserved => 1,
            PersistChange::Clear => 2,
            PersistChange::Set => 3u32,
        };
        action | crate::command::flag(self.ignore_existing_key, IEKEY) | persist << 30
    }
}

/// What a Reservation Acquire does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AcquireAction {
    /// 0h.
    Acquire,
    /// 1h.
    Preempt,
    /// 2h.
    PreemptAndAbort,
}

/// Dword 10 of a Reservation Acquire; the data is an [`AcquireData`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReservationAcquire {
    /// Action.
    pub action: AcquireAction,
    /// Ignore Existing Key.
    pub ignore_existing_key: bool,
    /// Reservation type as on the wire: some actions ignore it. See [`ReservationType::from_raw`].
    pub rtype: u8,
}

impl ReservationAcquire {
    pub(crate) fn parse(cdw10: u32) -> Result<Self, Status> {
        Ok(Self {
            action: match cdw10 & 7 {
                0 => AcquireAction::Acquire,
                1 => AcquireAction::Preempt,
                2 => AcquireAction::PreemptAndAbort,
                _ => return Err(Status::INVALID_FIELD),
            },
            ignore_existing_key: cdw10 & IEKEY != 0,
            rtype: (cdw10 >> 8) as u8,
        })
    }

    pub(crate) const fn cdw10(&self) -> u32 {
        let action = match self.action {
            AcquireAction::Acquire => 0,
            AcquireAction::Preempt => 1,
            AcquireAction::PreemptAndAbort => 2,
        };
        action | crate::command::flag(self.ignore_existing_key, IEKEY) | (self.rtype as u32) << 8
    }
}

/// What a Reservation Release does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReleaseAction {
    /// 0h.
    Release,
    /// 1h.
    Clear,
}

/// Dword 10 of a Reservation Release; the data is the 8-byte current key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReservationRelease {
    /// Action.
    pub action: ReleaseAction,
    /// Ignore Existing Key.
    pub ignore_existing_key: bool,
    /// Reservation type as on the wire; Clear ignores it.
    pub rtype: u8,
}

impl ReservationRelease {
    pub(crate) fn parse(cdw10: u32) -> Result<Self, Status> {
        Ok(Self {
            action: match cdw10 & 7 {
                0 => ReleaseAction::Release,
                1 => ReleaseAction::Clear,
                _ => return Err(Status::INVALID_FIELD),
            },
            ignore_existing_key: cdw10 & IEKEY != 0,
            rtype: (cdw10 >> 8) as u8,
        })
    }

    pub(crate) const fn cdw10(&self) -> u32 {
        let action = match self.action {
            ReleaseAction::Release => 0,
            ReleaseAction::Clear => 1,
        };
        action | crate::command::flag(self.ignore_existing_key, IEKEY) | (self.rtype as u32) << 8
    }
}

layout! {
    /// Data of a Reservation Register.
    pub struct RegisterData[16] {
        /// Current reservation key.
        0 crkey: u64,
        /// New reservation key.
        8 nrkey: u64,
    }
}

layout! {
    /// Data of a Reservation Acquire.
    pub struct AcquireData[16] {
        /// Current reservation key.
        0 crkey: u64,
        /// Key to preempt.
        8 prkey: u64,
    }
}

layout! {
    /// Data of a Reservation Release.
    pub struct ReleaseData[8] {
        /// Current reservation key.
        0 crkey: u64,
    }
}

layout! {
    /// Header of the extended reservation status (Base 2.0, 7.5), followed by one [`RegisteredController`] each.
    pub struct ReportHeader[64] {
        /// Generation, raised by every change of a registration or of a persistent reservation.
        0 generation: u32,
        /// Reservation type, 0 for none.
        4 rtype: u8,
        /// Registered controllers that follow.
        5 registered: u16,
        /// Persist Through Power Loss State.
        9 ptpls: u8,
    }
}

layout! {
    /// One registrant in the extended reservation status.
    pub struct RegisteredController[64] {
        /// Controller; `0xFFFF` for a dynamic controller or one restored from a file.
        0 cntlid: u16,
        /// Reservation status, bit 0 set for a holder.
        2 rcsts: u8,
        /// Reservation key.
        8 rkey: u64,
        /// Host identifier.
        16 hostid: [u8; 16],
    }
}

layout! {
    /// Reservation Notification log page, LID 80h (Base 2.0, 5.16.1.25).
    pub struct NotificationLog[64] {
        /// Count of notifications so far, 0 when the page is empty.
        0 count: u64,
        /// Notification kind, see [`notification`].
        8 kind: u8,
        /// Log pages available besides this one.
        9 available: u8,
        /// Namespace concerned.
        12 nsid: u32,
    }
}

/// Kinds of reservation notification.
pub mod notification {
    #![allow(missing_docs)]
    pub const EMPTY: u8 = 0;
    pub const REGISTRATION_PREEMPTED: u8 = 1;
    pub const RESERVATION_RELEASED: u8 = 2;
    pub const RESERVATION_PREEMPTED: u8 = 3;
}
