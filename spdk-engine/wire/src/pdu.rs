//! NVMe/TCP Protocol Data Units (TCP Transport 1.0, 3.6).
//!
//! [`Pdu`] is the typed header of any PDU; the data that may follow is never part of it. Headers are decoded and
//! checked by a [`Link`](crate::link::Link), which knows what the two ends agreed on, and written by
//! [`Link::encode`](crate::link::Link::encode). Nothing here allocates.
//!
//! When a peer breaks the protocol, the answer is a [`TermError`]: the fatal error status and information that go
//! into a termination request, after which the connection is given up.

use std::fmt;

use zerocopy::IntoBytes;

use crate::command::{Cqe, Sqe};
pub use crate::digest::{DIGEST_SIZE, DataDigest, crc32c};

/// Bytes of the common header.
pub const COMMON_HEADER_SIZE: usize = 8;
/// Longest header of any PDU, digest not counted.
pub const MAX_HEADER_SIZE: usize = 128;
/// Longest termination request: its header and the longest offending header.
pub const MAX_TERM_SIZE: usize = TERM_SIZE as usize + MAX_HEADER_SIZE;
/// Lowest MAXH2CDATA a controller may offer, in bytes (3.6.2.3).
pub const MIN_MAX_H2C_DATA: u32 = 4096;
/// Highest value of HPDA and CPDA: data offsets at multiples of 128 bytes.
pub const MAX_DATA_ALIGNMENT: u8 = 31;

pub(crate) const IC_SIZE: u8 = 128;
pub(crate) const CAPSULE_CMD_SIZE: u8 = 72;
pub(crate) const TERM_SIZE: u8 = 24;

/// Flags of the common header.
pub mod flags {
    /// A header digest follows the header.
    pub const HEADER_DIGEST: u8 = 1 << 0;
    /// A data digest follows the data.
    pub const DATA_DIGEST: u8 = 1 << 1;
    /// The last data PDU of its transfer.
    pub const LAST: u8 = 1 << 2;
    /// The command succeeded and no response capsule follows (C2HData only).
    pub const SUCCESS: u8 = 1 << 3;
}

/// PDU type.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum PduType {
    /// Initialize Connection Request, host to controller.
    IcReq = 0x00,
    /// Initialize Connection Response, controller to host.
    IcResp = 0x01,
    /// Host to Controller Terminate Connection Request.
    H2cTermReq = 0x02,
    /// Controller to Host Terminate Connection Request.
    C2hTermReq = 0x03,
    /// Command Capsule, host to controller.
    CapsuleCmd = 0x04,
    /// Response Capsule, controller to host.
    CapsuleResp = 0x05,
    /// Host to Controller Data.
    H2cData = 0x06,
    /// Controller to Host Data.
    C2hData = 0x07,
    /// Ready to Transfer, controller to host.
    R2t = 0x09,
}

impl PduType {
    /// From the value on the wire.
    pub const fn from_raw(raw: u8) -> Option<Self> {
        Some(match raw {
            0x00 => Self::IcReq,
            0x01 => Self::IcResp,
            0x02 => Self::H2cTermReq,
            0x03 => Self::C2hTermReq,
            0x04 => Self::CapsuleCmd,
            0x05 => Self::CapsuleResp,
            0x06 => Self::H2cData,
            0x07 => Self::C2hData,
            0x09 => Self::R2t,
            _ => return None,
        })
    }

    /// Length of its header, digest not counted (HLEN).
    pub const fn header_size(self) -> u8 {
        match self {
            Self::IcReq | Self::IcResp => IC_SIZE,
            Self::CapsuleCmd => CAPSULE_CMD_SIZE,
            Self::H2cTermReq | Self::C2hTermReq | Self::CapsuleResp | Self::H2cData | Self::C2hData | Self::R2t => 24,
        }
    }

    /// Whether it starts or ends a connection, and so never carries digests.
    pub const fn is_connection_control(self) -> bool {
        matches!(self, Self::IcReq | Self::IcResp | Self::H2cTermReq | Self::C2hTermReq)
    }

    /// Whether data may follow its header.
    pub const fn carries_data(self) -> bool {
        matches!(self, Self::H2cTermReq | Self::C2hTermReq | Self::CapsuleCmd | Self::H2cData | Self::C2hData)
    }
}

/// Common header of every PDU (3.6.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CommonHeader {
    /// Type as on the wire, see [`PduType::from_raw`].
    pub pdu_type: u8,
    /// Flags, see [`flags`].
    pub flags: u8,
    /// Header length in bytes, digest not counted.
    pub hlen: u8,
    /// Offset of the data from the start of the PDU in bytes.
    pub pdo: u8,
    /// Length of the whole PDU in bytes.
    pub plen: u32,
}

impl CommonHeader {
    /// Reads the header.
    pub const fn parse(bytes: &[u8; COMMON_HEADER_SIZE]) -> Self {
        let [pdu_type, flags, hlen, pdo, p0, p1, p2, p3] = *bytes;
        Self { pdu_type, flags, hlen, pdo, plen: u32::from_le_bytes([p0, p1, p2, p3]) }
    }

    /// The header as bytes.
    pub const fn encode(&self) -> [u8; COMMON_HEADER_SIZE] {
        let [p0, p1, p2, p3] = self.plen.to_le_bytes();
        [self.pdu_type, self.flags, self.hlen, self.pdo, p0, p1, p2, p3]
    }
}

/// Fatal Error Status of a termination request (3.6.2.4, 3.6.2.5).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Fes {
    /// 1h, Invalid PDU Header Field; the information is the field's byte offset.
    InvalidHeaderField,
    /// 2h, PDU Sequence Error.
    SequenceError,
    /// 3h, Header Digest Error; the information is the digest received.
    HeaderDigest,
    /// 4h, Data Transfer Out of Range.
    DataOutOfRange,
    /// 5h, R2T Limit Exceeded to a host, Data Transfer Limit Exceeded to a controller.
    LimitExceeded,
    /// 6h, Unsupported Parameter; the information is the field's byte offset.
    UnsupportedParameter,
    /// Any other value.
    Other(u16),
}

impl Fes {
    /// From the value on the wire.
    pub const fn from_raw(raw: u16) -> Self {
        match raw {
            1 => Self::InvalidHeaderField,
            2 => Self::SequenceError,
            3 => Self::HeaderDigest,
            4 => Self::DataOutOfRange,
            5 => Self::LimitExceeded,
            6 => Self::UnsupportedParameter,
            other => Self::Other(other),
        }
    }

    /// The value on the wire.
    pub const fn raw(self) -> u16 {
        match self {
            Self::InvalidHeaderField => 1,
            Self::SequenceError => 2,
            Self::HeaderDigest => 3,
            Self::DataOutOfRange => 4,
            Self::LimitExceeded => 5,
            Self::UnsupportedParameter => 6,
            Self::Other(other) => other,
        }
    }
}

impl fmt::Display for Fes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::InvalidHeaderField => f.write_str("invalid PDU header field"),
            Self::SequenceError => f.write_str("PDU sequence error"),
            Self::HeaderDigest => f.write_str("header digest error"),
            Self::DataOutOfRange => f.write_str("data transfer out of range"),
            Self::LimitExceeded => f.write_str("data transfer or R2T limit exceeded"),
            Self::UnsupportedParameter => f.write_str("unsupported parameter"),
            Self::Other(raw) => write!(f, "fatal error status {raw:#x}"),
        }
    }
}

/// Why a connection must end; the contents of a termination request. The information is meaningful for
/// [`Fes::InvalidHeaderField`], [`Fes::HeaderDigest`] and [`Fes::UnsupportedParameter`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{fes}, information {fei:#x}")]
pub struct TermError {
    /// Fatal Error Status.
    pub fes: Fes,
    /// Fatal Error Information.
    pub fei: u32,
}

impl TermError {
    /// The error with status `fes` and information `fei`.
    pub const fn new(fes: Fes, fei: u32) -> Self {
        Self { fes, fei }
    }

    /// A header field at byte `offset` has a value it must not have.
    pub const fn field(offset: u32) -> Self {
        Self::new(Fes::InvalidHeaderField, offset)
    }

    /// A PDU came when it must not.
    pub const fn sequence() -> Self {
        Self::new(Fes::SequenceError, 0)
    }

    /// Reads FES and FEI of a termination request's header.
    fn parse(header: &[u8; MAX_HEADER_SIZE]) -> Self {
        Self { fes: Fes::from_raw(u16_at(header, 8)), fei: u32_at(header, 10) }
    }
}

/// Initialize Connection Request (3.6.2.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct IcReq {
    /// PDU Format Version; only 0 exists.
    pub pfv: u16,
    /// Host PDU Data Alignment: C2HData starts at multiples of (HPDA + 1) * 4 bytes. 0 to 31.
    pub hpda: u8,
    /// The host asks for header digests.
    pub header_digest: bool,
    /// The host asks for data digests.
    pub data_digest: bool,
    /// R2T PDUs the host accepts per command, 0's based.
    pub maxr2t: u32,
}

/// Initialize Connection Response (3.6.2.3).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct IcResp {
    /// PDU Format Version; only 0 exists.
    pub pfv: u16,
    /// Controller PDU Data Alignment: the host's data starts at multiples of (CPDA + 1) * 4 bytes. 0 to 31.
    pub cpda: u8,
    /// Header digests are in use.
    pub header_digest: bool,
    /// Data digests are in use.
    pub data_digest: bool,
    /// Most data in one H2CData PDU, in bytes; at least [`MIN_MAX_H2C_DATA`].
    pub maxh2cdata: u32,
}

/// Host to Controller Data (3.6.2.8).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct H2cData {
    /// Command identifier (CCCID).
    pub cid: u16,
    /// Transfer tag of the R2T this answers.
    pub ttag: u16,
    /// Offset of this data in the command's data, in bytes.
    pub datao: u32,
    /// Bytes of data in this PDU.
    pub datal: u32,
    /// The last PDU for this R2T.
    pub last: bool,
}

/// Controller to Host Data (3.6.2.9).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct C2hData {
    /// Command identifier (CCCID).
    pub cid: u16,
    /// Offset of this data in the command's data, in bytes.
    pub datao: u32,
    /// Bytes of data in this PDU.
    pub datal: u32,
    /// The last data PDU of the command.
    pub last: bool,
    /// The command succeeded; no response capsule follows. Only together with `last`.
    pub success: bool,
}

/// Ready to Transfer (3.6.2.10).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct R2t {
    /// Command identifier (CCCID).
    pub cid: u16,
    /// Transfer tag, returned in the H2CData that answers.
    pub ttag: u16,
    /// Offset of the data asked for in the command's data, in bytes.
    pub r2to: u32,
    /// Bytes asked for.
    pub r2tl: u32,
}

/// The header of any PDU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pdu {
    /// Initialize Connection Request.
    IcReq(IcReq),
    /// Initialize Connection Response.
    IcResp(IcResp),
    /// Termination request from the host; its data is the beginning of the offending header.
    H2cTermReq(TermError),
    /// Termination request from the controller; its data is the beginning of the offending header.
    C2hTermReq(TermError),
    /// Command Capsule; its data is the in-capsule data.
    CapsuleCmd(Sqe),
    /// Response Capsule.
    CapsuleResp(Cqe),
    /// Host to Controller Data.
    H2cData(H2cData),
    /// Controller to Host Data.
    C2hData(C2hData),
    /// Ready to Transfer.
    R2t(R2t),
}

impl Pdu {
    /// The type.
    pub const fn pdu_type(&self) -> PduType {
        match self {
            Self::IcReq(_) => PduType::IcReq,
            Self::IcResp(_) => PduType::IcResp,
            Self::H2cTermReq(_) => PduType::H2cTermReq,
            Self::C2hTermReq(_) => PduType::C2hTermReq,
            Self::CapsuleCmd(_) => PduType::CapsuleCmd,
            Self::CapsuleResp(_) => PduType::CapsuleResp,
            Self::H2cData(_) => PduType::H2cData,
            Self::C2hData(_) => PduType::C2hData,
            Self::R2t(_) => PduType::R2t,
        }
    }

    /// Reads a header of type `kind`, of which [`PduType::header_size`] bytes of `header` are used.
    ///
    /// # Errors
    /// FES 1 with the field's offset for a PFV, alignment or MAXH2CDATA that is not allowed.
    pub(crate) fn parse_fields(kind: PduType, header: &[u8; MAX_HEADER_SIZE]) -> Result<Self, TermError> {
        let flags = header[1];
        Ok(match kind {
            PduType::IcReq | PduType::IcResp => return Self::parse_ic(kind, header),
            PduType::H2cTermReq => Self::H2cTermReq(TermError::parse(header)),
            PduType::C2hTermReq => Self::C2hTermReq(TermError::parse(header)),
            PduType::CapsuleCmd => Self::CapsuleCmd(Sqe::parse(&header[8..]).unwrap_or_default()),
            PduType::CapsuleResp => Self::CapsuleResp(Cqe::parse(&header[8..]).unwrap_or_default()),
            PduType::H2cData => Self::H2cData(H2cData {
                cid: u16_at(header, 8),
                ttag: u16_at(header, 10),
                datao: u32_at(header, 12),
                datal: u32_at(header, 16),
                last: flags & flags::LAST != 0,
            }),
            PduType::C2hData => Self::C2hData(C2hData {
                cid: u16_at(header, 8),
                datao: u32_at(header, 12),
                datal: u32_at(header, 16),
                last: flags & flags::LAST != 0,
                success: flags & flags::SUCCESS != 0,
            }),
            PduType::R2t => Self::R2t(R2t {
                cid: u16_at(header, 8),
                ttag: u16_at(header, 10),
                r2to: u32_at(header, 12),
                r2tl: u32_at(header, 16),
            }),
        })
    }

    fn parse_ic(kind: PduType, header: &[u8; MAX_HEADER_SIZE]) -> Result<Self, TermError> {
        let (pfv, alignment, digests, limit) = (u16_at(header, 8), header[10], header[11], u32_at(header, 12));
        let (header_digest, data_digest) = (digests & 1 != 0, digests & 2 != 0);
        if pfv != 0 {
            return Err(TermError::field(8));
        }
        if alignment > MAX_DATA_ALIGNMENT {
            return Err(TermError::field(10));
        }
        if kind == PduType::IcReq {
            return Ok(Self::IcReq(IcReq { pfv, hpda: alignment, header_digest, data_digest, maxr2t: limit }));
        }
        if limit < MIN_MAX_H2C_DATA {
            return Err(TermError::field(12));
        }
        Ok(Self::IcResp(IcResp { pfv, cpda: alignment, header_digest, data_digest, maxh2cdata: limit }))
    }

    /// Flags that are part of the typed header, digest flags not among them.
    pub(crate) const fn own_flags(&self) -> u8 {
        match self {
            Self::H2cData(H2cData { last: true, .. }) => flags::LAST,
            Self::C2hData(data) => {
                let last = if data.last { flags::LAST } else { 0 };
                last | if data.success { flags::SUCCESS } else { 0 }
            }
            _ => 0,
        }
    }

    /// Writes the fields after the common header; the rest of `header` is left as it is.
    pub(crate) fn put_fields(&self, header: &mut [u8; MAX_HEADER_SIZE]) {
        match self {
            Self::IcReq(ic) => {
                put_ic(header, ic.pfv, ic.hpda, ic.header_digest, ic.data_digest, ic.maxr2t);
            }
            Self::IcResp(ic) => {
                put_ic(header, ic.pfv, ic.cpda, ic.header_digest, ic.data_digest, ic.maxh2cdata);
            }
            Self::H2cTermReq(error) | Self::C2hTermReq(error) => {
                put(header, 8, &error.fes.raw().to_le_bytes());
                put(header, 10, &error.fei.to_le_bytes());
            }
            Self::CapsuleCmd(sqe) => put(header, 8, sqe.as_bytes()),
            Self::CapsuleResp(cqe) => put(header, 8, cqe.as_bytes()),
            Self::H2cData(data) => put_transfer(header, data.cid, data.ttag, data.datao, data.datal),
            Self::C2hData(data) => put_transfer(header, data.cid, 0, data.datao, data.datal),
            Self::R2t(r2t) => put_transfer(header, r2t.cid, r2t.ttag, r2t.r2to, r2t.r2tl),
        }
    }
}

fn put_ic(
    header: &mut [u8; MAX_HEADER_SIZE],
    pfv: u16,
    alignment: u8,
    header_digest: bool,
    data_digest: bool,
    limit: u32,
) {
    put(header, 8, &pfv.to_le_bytes());
    header[10] = alignment;
    header[11] = u8::from(header_digest) | u8::from(data_digest) << 1;
    put(header, 12, &limit.to_le_bytes());
}

fn put_transfer(header: &mut [u8; MAX_HEADER_SIZE], cid: u16, ttag: u16, offset: u32, length: u32) {
    put(header, 8, &cid.to_le_bytes());
    put(header, 10, &ttag.to_le_bytes());
    put(header, 12, &offset.to_le_bytes());
    put(header, 16, &length.to_le_bytes());
}

fn put(header: &mut [u8; MAX_HEADER_SIZE], at: usize, bytes: &[u8]) {
    header[at..at + bytes.len()].copy_from_slice(bytes);
}

fn u16_at(header: &[u8; MAX_HEADER_SIZE], at: usize) -> u16 {
    u16::from_le_bytes([header[at], header[at + 1]])
}

fn u32_at(header: &[u8; MAX_HEADER_SIZE], at: usize) -> u32 {
    u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]])
}
