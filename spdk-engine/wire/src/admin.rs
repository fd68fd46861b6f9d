//! Admin commands (Base 2.0, 5), typed.
//!
//! The dwords are taken apart here and put together again by [`AdminCommand::to_sqe`]; whether a feature, a log page
//! or an Identify CNS exists is the controller's to answer.

use crate::Status;
use crate::command::{Sgl, Sqe, flag, opcode::admin};

/// The namespace identifier that stands for all namespaces.
pub const NSID_ALL: u32 = 0xFFFF_FFFF;

/// Identify (Base 2.0, 5.17). Answers are 4096 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Identify {
    /// Controller or Namespace Structure, see [`cns`].
    pub cns: u8,
    /// Controller identifier, for those CNS that use it.
    pub cntid: u16,
    /// CNS specific identifier.
    pub cnssid: u16,
    /// Command set identifier.
    pub csi: u8,
}

/// Values of CNS.
pub mod cns {
    #![allow(missing_docs)]
    pub const NAMESPACE: u8 = 0x00;
    pub const CONTROLLER: u8 = 0x01;
    pub const ACTIVE_NAMESPACES: u8 = 0x02;
    pub const NAMESPACE_DESCRIPTORS: u8 = 0x03;
    pub const COMMAND_SET_NAMESPACE: u8 = 0x05;
    pub const COMMAND_SET_CONTROLLER: u8 = 0x06;
    pub const COMMAND_SET_ACTIVE_NAMESPACES: u8 = 0x07;
    pub const INDEPENDENT_NAMESPACE: u8 = 0x08;
    pub const COMMAND_SETS: u8 = 0x1C;
}

/// Command set identifiers.
pub mod csi {
    #![allow(missing_docs)]
    pub const NVM: u8 = 0x00;
    pub const KEY_VALUE: u8 = 0x01;
    pub const ZONED: u8 = 0x02;
}

/// Get Log Page (Base 2.0, 5.16).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct GetLogPage {
    /// Log page, see [`crate::log::lid`].
    pub lid: u8,
    /// Log specific field, 7 bits.
    pub lsp: u8,
    /// Retain Asynchronous Event.
    pub retain_event: bool,
    /// Bytes asked for, a multiple of 4 from 4 to 16 GiB.
    pub bytes: u64,
    /// Log specific identifier.
    pub lsi: u16,
    /// First byte asked for, or an index when `index_offset`.
    pub offset: u64,
    /// Offset Type: `offset` is an index.
    pub index_offset: bool,
    /// Command set identifier.
    pub csi: u8,
}

/// Set Features (Base 2.0, 5.27).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SetFeatures {
    /// Feature, see [`crate::features::fid`].
    pub fid: u8,
    /// Save (SV).
    pub save: bool,
    /// Dword 11, specific to the feature.
    pub cdw11: u32,
    /// Dword 12, specific to the feature.
    pub cdw12: u32,
}

/// Get Features (Base 2.0, 5.15).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct GetFeatures {
    /// Feature, see [`crate::features::fid`].
    pub fid: u8,
    /// Select: 0 current, 1 default, 2 saved, 3 capabilities.
    pub select: u8,
    /// Dword 11, specific to the feature.
    pub cdw11: u32,
}

/// An admin command other than a Fabrics command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum AdminCommand {
    /// Get Log Page.
    GetLogPage(GetLogPage),
    /// Identify.
    Identify(Identify),
    /// Abort (Base 2.0, 5.1).
    Abort {
        /// Submission queue of the command to abort.
        sqid: u16,
        /// Command to abort.
        cid: u16,
    },
    /// Set Features.
    SetFeatures(SetFeatures),
    /// Get Features.
    GetFeatures(GetFeatures),
    /// Asynchronous Event Request (Base 2.0, 5.2).
    AsyncEventRequest,
    /// Keep Alive (Base 2.0, 5.18).
    KeepAlive,
}

impl AdminCommand {
    /// The typed view of an admin submission.
    ///
    /// # Errors
    /// [`Status::INVALID_OPCODE`] for any other opcode, Fabrics commands among them (see [`crate::fabrics`]).
    pub fn parse(sqe: &Sqe) -> Result<Self, Status> {
        let cdw10 = sqe.cdw10.get();
        let cdw11 = sqe.cdw11.get();
        let cdw14 = sqe.cdw14.get();
        Ok(match sqe.opcode {
            admin::GET_LOG_PAGE => Self::GetLogPage(GetLogPage {
                lid: cdw10 as u8,
                lsp: (cdw10 >> 8) as u8 & 0x7F,
                retain_event: cdw10 & RAE != 0,
                bytes: (u64::from(cdw10 >> 16 | cdw11 << 16) + 1) * 4,
                lsi: (cdw11 >> 16) as u16,
                offset: u64::from(sqe.cdw12.get()) | u64::from(sqe.cdw13.get()) << 32,
                index_offset: cdw14 & OFFSET_TYPE != 0,
                csi: (cdw14 >> 24) as u8,
            }),
            admin::IDENTIFY => Self::Identify(Identify {
                cns: cdw10 as u8,
                cntid: (cdw10 >> 16) as u16,
                cnssid: cdw11 as u16,
                csi: (cdw11 >> 24) as u8,
            }),
            admin::ABORT => Self::Abort { sqid: cdw10 as u16, cid: (cdw10 >> 16) as u16 },
            admin::SET_FEATURES => Self::SetFeatures(SetFeatures {
                fid: cdw10 as u8,
                save: cdw10 & SAVE != 0,
                cdw11,
                cdw12: sqe.cdw12.get(),
            }),
            admin::GET_FEATURES => {
                Self::GetFeatures(GetFeatures { fid: cdw10 as u8, select: (cdw10 >> 8) as u8 & 7, cdw11 })
            }
            admin::ASYNC_EVENT_REQUEST => Self::AsyncEventRequest,
            admin::KEEP_ALIVE => Self::KeepAlive,
            _ => return Err(Status::INVALID_OPCODE),
        })
    }

    /// The opcode.
    pub const fn opcode(&self) -> u8 {
        match self {
            Self::GetLogPage(_) => admin::GET_LOG_PAGE,
            Self::Identify(_) => admin::IDENTIFY,
            Self::Abort { .. } => admin::ABORT,
            Self::SetFeatures(_) => admin::SET_FEATURES,
            Self::GetFeatures(_) => admin::GET_FEATURES,
            Self::AsyncEventRequest => admin::ASYNC_EVENT_REQUEST,
            Self::KeepAlive => admin::KEEP_ALIVE,
        }
    }

    /// The submission entry of this command.
    pub fn to_sqe(&self, cid: u16, nsid: u32, sgl: Sgl) -> Sqe {
        let mut sqe = Sqe::new(self.opcode(), cid, nsid, sgl);
        match self {
            Self::GetLogPage(page) => page.put(&mut sqe),
            Self::Identify(identify) => {
                sqe.cdw10 = (u32::from(identify.cns) | u32::from(identify.cntid) << 16).into();
                sqe.cdw11 = (u32::from(identify.cnssid) | u32::from(identify.csi) << 24).into();
            }
            Self::Abort { sqid, cid } => sqe.cdw10 = (u32::from(*sqid) | u32::from(*cid) << 16).into(),
            Self::SetFeatures(set) => {
                sqe.cdw10 = (u32::from(set.fid) | flag(set.save, SAVE)).into();
                sqe.cdw11 = set.cdw11.into();
                sqe.cdw12 = set.cdw12.into();
            }
            Self::GetFeatures(get) => {
                sqe.cdw10 = (u32::from(get.fid) | u32::from(get.select & 7) << 8).into();
                sqe.cdw11 = get.cdw11.into();
            }
            Self::AsyncEventRequest | Self::KeepAlive => {}
        }
        sqe
    }
}

const RAE: u32 = 1 << 15;
const OFFSET_TYPE: u32 = 1 << 23;
const SAVE: u32 = 1 << 31;

impl GetLogPage {
    fn put(&self, sqe: &mut Sqe) {
        let numd = (self.bytes / 4).saturating_sub(1) as u32;
        sqe.cdw10 =
            (u32::from(self.lid) | u32::from(self.lsp & 0x7F) << 8 | flag(self.retain_event, RAE) | numd << 16).into();
        sqe.cdw11 = (numd >> 16 | u32::from(self.lsi) << 16).into();
        sqe.cdw12 = (self.offset as u32).into();
        sqe.cdw13 = ((self.offset >> 32) as u32).into();
        sqe.cdw14 = (flag(self.index_offset, OFFSET_TYPE) | u32::from(self.csi) << 24).into();
    }
}
