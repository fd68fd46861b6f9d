//! Fabrics commands (Base 2.0, 6): Connect, Disconnect, Property Get and Set, authentication.
//!
//! All share opcode 7Fh; the command type is in the byte a namespace identifier starts with. [`FabricsCommand::parse`]
//! checks shape only. A Connect is answered by [`ConnectResponse`], or refused with
//! [`ConnectError`], which names the offending field by its offset in the command or in its data.

use crate::command::{Cqe, Sgl, Sqe, opcode};
use crate::{NulPadded, Status};

/// Fabrics command types.
pub mod fctype {
    #![allow(missing_docs)]
    pub const PROPERTY_SET: u8 = 0x00;
    pub const CONNECT: u8 = 0x01;
    pub const PROPERTY_GET: u8 = 0x04;
    pub const AUTH_SEND: u8 = 0x05;
    pub const AUTH_RECV: u8 = 0x06;
    pub const DISCONNECT: u8 = 0x08;
}

/// CNTLID by which a host asks for any controller (dynamic model).
pub const CNTLID_DYNAMIC: u16 = 0xFFFF;
/// Highest CNTLID of a controller.
pub const CNTLID_MAX: u16 = 0xFFEF;
/// SQHD returned by Connect when submission queue flow control is off.
pub const SQHD_NO_FLOW_CONTROL: u16 = 0xFFFF;
/// Security protocol of NVMe in-band authentication (SECP).
pub const SECP_NVME: u8 = 0xE9;

/// Connect (Base 2.0, 6.3); the data is a [`ConnectData`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Connect {
    /// Record format, only 0 exists.
    pub recfmt: u16,
    /// Queue: 0 for the admin queue.
    pub qid: u16,
    /// Queue size, 0's based.
    pub sqsize: u16,
    /// Attributes, see [`cattr`].
    pub cattr: u8,
    /// Keep Alive Timeout in milliseconds, 0 for none.
    pub kato_ms: u32,
}

/// Bits of [`Connect::cattr`].
pub mod cattr {
    /// Priority class of the queue, 2 bits.
    pub const PRIORITY: u8 = 3;
    /// The host asks for submission queue flow control to be off.
    pub const DISABLE_FLOW_CONTROL: u8 = 1 << 2;
    /// The host supports deleting I/O queues one by one.
    pub const QUEUE_DELETION: u8 = 1 << 3;
}

impl Connect {
    /// Whether the host asks for submission queue flow control to be off.
    pub const fn disables_flow_control(&self) -> bool {
        self.cattr & cattr::DISABLE_FLOW_CONTROL != 0
    }
}

layout! {
    /// Data of a Connect (Base 2.0, 6.3).
    pub struct ConnectData[1024] {
        /// Host identifier.
        0 hostid: [u8; 16],
        /// Controller, [`CNTLID_DYNAMIC`] for any on the admin queue.
        16 cntlid: u16,
        /// Subsystem; read it by [`crate::Nqn::from_field`].
        256 subnqn: NulPadded<256>,
        /// Host; read it by [`crate::Nqn::from_field`].
        512 hostnqn: NulPadded<256>,
    }
}

/// A parameter of a Connect that was not acceptable, by where it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("invalid Connect parameter at byte {offset} of the {}", if *.in_data { "data" } else { "command" })]
pub struct ConnectError {
    /// The offset counts in the data (IATTR 1), else in the command (IATTR 0).
    pub in_data: bool,
    /// Offset in bytes (IPO).
    pub offset: u16,
}

impl ConnectError {
    /// HOSTID in the data.
    pub const HOSTID: Self = Self::in_data(0);
    /// CNTLID in the data.
    pub const CNTLID: Self = Self::in_data(16);
    /// SUBNQN in the data.
    pub const SUBNQN: Self = Self::in_data(256);
    /// HOSTNQN in the data.
    pub const HOSTNQN: Self = Self::in_data(512);
    /// QID in the command.
    pub const QID: Self = Self::in_command(42);
    /// SQSIZE in the command.
    pub const SQSIZE: Self = Self::in_command(44);

    /// A field of the data.
    pub const fn in_data(offset: u16) -> Self {
        Self { in_data: true, offset }
    }

    /// A field of the command.
    pub const fn in_command(offset: u16) -> Self {
        Self { in_data: false, offset }
    }

    /// Dword 0 of the completion.
    pub const fn dw0(self) -> u32 {
        self.offset as u32 | (self.in_data as u32) << 16
    }

    /// From Dword 0 of a completion with [`Status::CONNECT_INVALID_PARAMETERS`].
    pub const fn from_dw0(dw0: u32) -> Self {
        Self { in_data: dw0 >> 16 & 1 != 0, offset: dw0 as u16 }
    }

    /// The completion that refuses the Connect `cid`.
    pub fn completion(self, cid: u16) -> Cqe {
        Cqe::new(cid, 0, Status::CONNECT_INVALID_PARAMETERS).with_dw0(self.dw0())
    }
}

/// Dword 0 of a successful Connect.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ConnectResponse {
    /// Controller.
    pub cntlid: u16,
    /// Authentication is required (AUTHREQ.ATR).
    pub auth_required: bool,
    /// Authentication is required and is to set up a secure channel (AUTHREQ.ASCR).
    pub secure_channel_required: bool,
}

// AUTHREQ is the upper half of the dword; its bit 0 is reserved.
const ATR: u32 = 1 << 17;
const ASCR: u32 = 1 << 18;

impl ConnectResponse {
    /// From Dword 0.
    pub const fn from_dw0(dw0: u32) -> Self {
        Self { cntlid: dw0 as u16, auth_required: dw0 & ATR != 0, secure_channel_required: dw0 & ASCR != 0 }
    }

    /// Dword 0.
    pub const fn dw0(self) -> u32 {
        self.cntlid as u32
            | if self.auth_required { ATR } else { 0 }
            | if self.secure_channel_required { ASCR } else { 0 }
    }
}

/// Size of a property.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PropertySize {
    /// 4 bytes.
    Four,
    /// 8 bytes.
    Eight,
}

impl PropertySize {
    const fn from_attrib(attrib: u8) -> Result<Self, Status> {
        match attrib & 7 {
            0 => Ok(Self::Four),
            1 => Ok(Self::Eight),
            _ => Err(Status::INVALID_FIELD),
        }
    }

    const fn attrib(self) -> u32 {
        match self {
            Self::Four => 0,
            Self::Eight => 1,
        }
    }
}

/// Header of an Authentication Send or Receive (Base 2.0, 6.1 and 6.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AuthTransfer {
    /// SPSP0, 1 for NVMe in-band authentication.
    pub spsp0: u8,
    /// SPSP1, 1 for NVMe in-band authentication.
    pub spsp1: u8,
    /// Security protocol, [`SECP_NVME`].
    pub secp: u8,
    /// Transfer length (TL) or allocation length (AL) in bytes.
    pub length: u32,
}

impl AuthTransfer {
    /// A transfer of `length` bytes of NVMe in-band authentication.
    pub const fn nvme(length: u32) -> Self {
        Self { spsp0: 1, spsp1: 1, secp: SECP_NVME, length }
    }

    fn parse(sqe: &Sqe) -> Self {
        let [_, spsp0, spsp1, secp] = sqe.cdw10.get().to_le_bytes();
        Self { spsp0, spsp1, secp, length: sqe.cdw11.get() }
    }

    fn put(&self, sqe: &mut Sqe) {
        sqe.cdw10 = u32::from_le_bytes([0, self.spsp0, self.spsp1, self.secp]).into();
        sqe.cdw11 = self.length.into();
    }
}

/// A Fabrics command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum FabricsCommand {
    /// Property Set (Base 2.0, 6.6).
    PropertySet {
        /// Size.
        size: PropertySize,
        /// Offset in bytes, see [`crate::property::offset`].
        offset: u32,
        /// Value; the upper half is ignored for 4 bytes.
        value: u64,
    },
    /// Connect.
    Connect(Connect),
    /// Property Get (Base 2.0, 6.5); the value comes in Dwords 0 and 1 of the completion.
    PropertyGet {
        /// Size.
        size: PropertySize,
        /// Offset in bytes, see [`crate::property::offset`].
        offset: u32,
    },
    /// Authentication Send.
    AuthSend(AuthTransfer),
    /// Authentication Receive.
    AuthRecv(AuthTransfer),
    /// Disconnect (Base 2.0, 6.4).
    Disconnect {
        /// Record format, only 0 exists.
        recfmt: u16,
    },
}

impl FabricsCommand {
    /// The typed view of a Fabrics submission.
    ///
    /// # Errors
    /// [`Status::INVALID_OPCODE`] for another opcode or an unknown command type, [`Status::INVALID_FIELD`] for a
    /// property size other than 4 or 8 bytes.
    pub fn parse(sqe: &Sqe) -> Result<Self, Status> {
        if sqe.opcode != opcode::FABRICS {
            return Err(Status::INVALID_OPCODE);
        }
        let cdw10 = sqe.cdw10.get();
        Ok(match sqe.fctype() {
            fctype::PROPERTY_SET => Self::PropertySet {
                size: PropertySize::from_attrib(cdw10 as u8)?,
                offset: sqe.cdw11.get(),
                value: u64::from(sqe.cdw12.get()) | u64::from(sqe.cdw13.get()) << 32,
            },
            fctype::CONNECT => Self::Connect(Connect {
                recfmt: cdw10 as u16,
                qid: (cdw10 >> 16) as u16,
                sqsize: sqe.cdw11.get() as u16,
                cattr: (sqe.cdw11.get() >> 16) as u8,
                kato_ms: sqe.cdw12.get(),
            }),
            fctype::PROPERTY_GET => {
                Self::PropertyGet { size: PropertySize::from_attrib(cdw10 as u8)?, offset: sqe.cdw11.get() }
            }
            fctype::AUTH_SEND => Self::AuthSend(AuthTransfer::parse(sqe)),
            fctype::AUTH_RECV => Self::AuthRecv(AuthTransfer::parse(sqe)),
            fctype::DISCONNECT => Self::Disconnect { recfmt: cdw10 as u16 },
            _ => return Err(Status::INVALID_OPCODE),
        })
    }

    /// The command type.
    pub const fn fctype(&self) -> u8 {
        match self {
            Self::PropertySet { .. } => fctype::PROPERTY_SET,
            Self::Connect(_) => fctype::CONNECT,
            Self::PropertyGet { .. } => fctype::PROPERTY_GET,
            Self::AuthSend(_) => fctype::AUTH_SEND,
            Self::AuthRecv(_) => fctype::AUTH_RECV,
            Self::Disconnect { .. } => fctype::DISCONNECT,
        }
    }

    /// The submission entry of this command.
    pub fn to_sqe(&self, cid: u16, sgl: Sgl) -> Sqe {
        let mut sqe = Sqe::new(opcode::FABRICS, cid, u32::from(self.fctype()), sgl);
        match self {
            Self::PropertySet { size, offset, value } => {
                sqe.cdw10 = size.attrib().into();
                sqe.cdw11 = (*offset).into();
                sqe.cdw12 = (*value as u32).into();
                sqe.cdw13 = ((value >> 32) as u32).into();
            }
            Self::Connect(connect) => {
                sqe.cdw10 = (u32::from(connect.recfmt) | u32::from(connect.qid) << 16).into();
                sqe.cdw11 = (u32::from(connect.sqsize) | u32::from(connect.cattr) << 16).into();
                sqe.cdw12 = connect.kato_ms.into();
            }
            Self::PropertyGet { size, offset } => {
                sqe.cdw10 = size.attrib().into();
                sqe.cdw11 = (*offset).into();
            }
            Self::AuthSend(transfer) | Self::AuthRecv(transfer) => transfer.put(&mut sqe),
            Self::Disconnect { recfmt } => sqe.cdw10 = u32::from(*recfmt).into(),
        }
        sqe
    }
}
