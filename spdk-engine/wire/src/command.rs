//! Submission and completion entries and the commands of the NVM command set.
//!
//! [`Sqe`] and [`Cqe`] are the raw entries, readable in place from a byte slice. [`IoCommand`] is the typed view of an
//! I/O submission: `IoCommand::parse` at the target, [`IoCommand::to_sqe`] at the initiator. Only the shape of a
//! command is checked here; whether a range lies in the namespace is known to the target alone.

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::Status;
pub use crate::reservation::{ReservationAcquire, ReservationRegister, ReservationRelease};
pub use crate::sgl::Sgl;

/// Opcodes. Bits 1:0 give the direction of the data, see [`Direction`].
pub mod opcode {
    /// Admin commands (Base 2.0, 5).
    pub mod admin {
        #![allow(missing_docs)]
        pub const GET_LOG_PAGE: u8 = 0x02;
        pub const IDENTIFY: u8 = 0x06;
        pub const ABORT: u8 = 0x08;
        pub const SET_FEATURES: u8 = 0x09;
        pub const GET_FEATURES: u8 = 0x0A;
        pub const ASYNC_EVENT_REQUEST: u8 = 0x0C;
        pub const KEEP_ALIVE: u8 = 0x18;
    }
    /// I/O commands (Base 2.0, 7; NVM 1.0, 3.2).
    pub mod io {
        #![allow(missing_docs)]
        pub const FLUSH: u8 = 0x00;
        pub const WRITE: u8 = 0x01;
        pub const READ: u8 = 0x02;
        pub const COMPARE: u8 = 0x05;
        pub const WRITE_ZEROES: u8 = 0x08;
        pub const DATASET_MANAGEMENT: u8 = 0x09;
        pub const VERIFY: u8 = 0x0C;
        pub const RESERVATION_REGISTER: u8 = 0x0D;
        pub const RESERVATION_REPORT: u8 = 0x0E;
        pub const RESERVATION_ACQUIRE: u8 = 0x11;
        pub const RESERVATION_RELEASE: u8 = 0x15;
        pub const COPY: u8 = 0x19;
    }
    /// Any Fabrics command, on either kind of queue (Base 2.0, 6).
    pub const FABRICS: u8 = 0x7F;
}

/// Which way data moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// No data.
    None,
    /// Host to controller.
    HostToController,
    /// Controller to host.
    ControllerToHost,
    /// Both, which no command over TCP may ask for.
    Bidirectional,
}

impl Direction {
    /// From bits 1:0 of an opcode or of a Fabrics command type.
    pub const fn of(code: u8) -> Self {
        match code & 3 {
            0 => Self::None,
            1 => Self::HostToController,
            2 => Self::ControllerToHost,
            _ => Self::Bidirectional,
        }
    }
}

/// Fused operation, flags bits 1:0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fuse {
    /// A command of its own.
    Normal,
    /// First of a pair.
    First,
    /// Second of a pair.
    Second,
    /// The reserved value.
    Reserved,
}

/// Submission queue entry (Base 2.0, 3.3.3.1).
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
pub struct Sqe {
    /// Opcode.
    pub opcode: u8,
    /// Fused operation in bits 1:0, PSDT in bits 7:6.
    pub flags: u8,
    /// Command identifier.
    pub cid: U16,
    /// Namespace; Fabrics commands keep their type in its first byte, see [`Sqe::fctype`].
    pub nsid: U32,
    /// Command Dword 2.
    pub cdw2: U32,
    /// Command Dword 3.
    pub cdw3: U32,
    /// Metadata pointer.
    pub mptr: U64,
    /// Data pointer: one SGL descriptor, see [`Sgl`].
    pub dptr: [u8; 16],
    /// Command Dword 10.
    pub cdw10: U32,
    /// Command Dword 11.
    pub cdw11: U32,
    /// Command Dword 12.
    pub cdw12: U32,
    /// Command Dword 13.
    pub cdw13: U32,
    /// Command Dword 14.
    pub cdw14: U32,
    /// Command Dword 15.
    pub cdw15: U32,
}
const _: () = assert!(size_of::<Sqe>() == 64);

/// PSDT 01b: the data pointer is an SGL, the only form allowed over Fabrics.
const PSDT_SGL: u8 = 0x40;

impl Sqe {
    /// Bytes on the wire.
    pub const SIZE: usize = 64;

    /// An entry for `opcode` with its data pointer set to `sgl`, all else zero.
    pub fn new(opcode: u8, cid: u16, nsid: u32, sgl: Sgl) -> Self {
        Self { opcode, flags: PSDT_SGL, cid: cid.into(), nsid: nsid.into(), dptr: sgl.encode(), ..Self::default() }
    }

    /// Copies the entry out of the first 64 bytes of `bytes`; `None` when there are fewer.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        Self::read_from_prefix(bytes).ok().map(|(sqe, _)| sqe)
    }

    /// Fused operation.
    pub const fn fuse(&self) -> Fuse {
        match self.flags & 3 {
            0 => Fuse::Normal,
            1 => Fuse::First,
            2 => Fuse::Second,
            _ => Fuse::Reserved,
        }
    }

    /// The same entry as part of a fused pair.
    #[must_use]
    pub const fn with_fuse(mut self, fuse: Fuse) -> Self {
        self.flags = self.flags & !3
            | match fuse {
                Fuse::Normal => 0,
                Fuse::First => 1,
                Fuse::Second => 2,
                Fuse::Reserved => 3,
            };
        self
    }

    /// Fabrics command type, when the opcode is [`opcode::FABRICS`].
    pub fn fctype(&self) -> u8 {
        self.nsid.get() as u8
    }

    /// Which way this command moves data: by its Fabrics command type or by its opcode.
    pub fn direction(&self) -> Direction {
        if self.opcode == opcode::FABRICS { Direction::of(self.fctype()) } else { Direction::of(self.opcode) }
    }

    /// The 64 bits of Dwords 10 and 11.
    pub fn cdw10_11(&self) -> u64 {
        u64::from(self.cdw10.get()) | u64::from(self.cdw11.get()) << 32
    }

    pub(crate) fn set_cdw10_11(&mut self, value: u64) {
        self.cdw10 = (value as u32).into();
        self.cdw11 = ((value >> 32) as u32).into();
    }
}

/// Completion queue entry (Base 2.0, 3.3.3.2).
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
pub struct Cqe {
    /// Dword 0, command specific.
    pub dw0: U32,
    /// Dword 1, command specific.
    pub dw1: U32,
    /// Submission queue head; 0 when flow control is off.
    pub sqhd: U16,
    /// Submission queue identifier; zero over Fabrics.
    pub sqid: U16,
    /// Command identifier.
    pub cid: U16,
    /// Status with the phase tag in bit 0; see [`Cqe::status`].
    pub status_field: U16,
}
const _: () = assert!(size_of::<Cqe>() == 16);

impl Cqe {
    /// Bytes on the wire.
    pub const SIZE: usize = 16;

    /// A completion of `cid` with `status`.
    pub fn new(cid: u16, sqhd: u16, status: Status) -> Self {
        Self { cid: cid.into(), sqhd: sqhd.into(), status_field: status.cqe_field().into(), ..Self::default() }
    }

    /// The same completion with Dword 0 set.
    #[must_use]
    pub fn with_dw0(mut self, dw0: u32) -> Self {
        self.dw0 = dw0.into();
        self
    }

    /// Copies the entry out of the first 16 bytes of `bytes`; `None` when there are fewer.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        Self::read_from_prefix(bytes).ok().map(|(cqe, _)| cqe)
    }

    /// Status without the phase tag.
    pub fn status(&self) -> Status {
        Status::from_cqe_field(self.status_field.get())
    }

    /// Dwords 0 and 1 as one 64-bit value, as Property Get returns it.
    pub fn result(&self) -> u64 {
        u64::from(self.dw0.get()) | u64::from(self.dw1.get()) << 32
    }
}

/// The range and options of a Read, Write, Compare or Verify (NVM 1.0, 3.2.1, 3.2.4 to 3.2.6).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct BlockRange {
    /// First logical block.
    pub slba: u64,
    /// Logical blocks, 1 to 65536.
    pub blocks: u32,
    /// Force Unit Access.
    pub fua: bool,
    /// Limited Retry.
    pub limited_retry: bool,
    /// Protection information field, 4 bits.
    pub prinfo: u8,
}

impl BlockRange {
    /// A range without options. `blocks` is 1 to 65536.
    pub const fn new(slba: u64, blocks: u32) -> Self {
        Self { slba, blocks, fua: false, limited_retry: false, prinfo: 0 }
    }

    /// One past the last block, or `None` when that overflows.
    pub const fn end(&self) -> Option<u64> {
        self.slba.checked_add(self.blocks as u64)
    }

    fn parse(sqe: &Sqe) -> Self {
        let cdw12 = sqe.cdw12.get();
        Self {
            slba: sqe.cdw10_11(),
            blocks: (cdw12 & 0xFFFF) + 1,
            fua: cdw12 & FUA != 0,
            limited_retry: cdw12 & LIMITED_RETRY != 0,
            prinfo: (cdw12 >> 26) as u8 & 0xF,
        }
    }

    fn put(&self, sqe: &mut Sqe, extra: u32) {
        sqe.set_cdw10_11(self.slba);
        sqe.cdw12 = (self.blocks.wrapping_sub(1) & 0xFFFF
            | u32::from(self.prinfo & 0xF) << 26
            | flag(self.fua, FUA)
            | flag(self.limited_retry, LIMITED_RETRY)
            | extra)
            .into();
    }
}

const FUA: u32 = 1 << 30;
const LIMITED_RETRY: u32 = 1 << 31;
const DEALLOCATE: u32 = 1 << 25;

pub(crate) const fn flag(set: bool, bit: u32) -> u32 {
    if set { bit } else { 0 }
}

/// A command of an I/O queue. Data, where there is any, is described by the entry's [`Sgl`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum IoCommand {
    /// Commit data and metadata (Base 2.0, 7.1).
    Flush,
    /// Read (NVM 1.0, 3.2.4).
    Read(BlockRange),
    /// Write (NVM 1.0, 3.2.6).
    Write(BlockRange),
    /// Compare (NVM 1.0, 3.2.1).
    Compare(BlockRange),
    /// Verify (NVM 1.0, 3.2.5).
    Verify(BlockRange),
    /// Write Zeroes (NVM 1.0, 3.2.8).
    WriteZeroes {
        /// Blocks to zero.
        range: BlockRange,
        /// Deallocate (DEAC).
        deallocate: bool,
    },
    /// Dataset Management (NVM 1.0, 3.2.3); the data is a list of [`DsmRange`].
    DatasetManagement {
        /// Ranges, 1 to 256.
        ranges: u16,
        /// Attribute Deallocate (AD). Without it the command is a hint.
        deallocate: bool,
    },
    /// Copy (NVM 1.0, 3.2.2); the data is a list of [`CopyRange`].
    Copy {
        /// First destination block.
        sdlba: u64,
        /// Source ranges, 1 to 256.
        ranges: u16,
        /// Descriptor format; this crate knows format 0.
        format: u8,
        /// Force Unit Access for the destination.
        fua: bool,
    },
    /// Reservation Register.
    ReservationRegister(ReservationRegister),
    /// Reservation Report.
    ReservationReport {
        /// Bytes the host asks for.
        bytes: u64,
        /// Extended data structure (128-bit host identifiers).
        extended: bool,
    },
    /// Reservation Acquire.
    ReservationAcquire(ReservationAcquire),
    /// Reservation Release.
    ReservationRelease(ReservationRelease),
}

impl IoCommand {
    /// The typed view of an I/O submission.
    ///
    /// # Errors
    /// [`Status::INVALID_OPCODE`] for any opcode not listed in [`opcode::io`]; [`Status::INVALID_FIELD`] for a
    /// reservation action that does not exist.
    pub fn parse(sqe: &Sqe) -> Result<Self, Status> {
        let cdw10 = sqe.cdw10.get();
        let cdw11 = sqe.cdw11.get();
        let cdw12 = sqe.cdw12.get();
        Ok(match sqe.opcode {
            opcode::io::FLUSH => Self::Flush,
            opcode::io::READ => Self::Read(BlockRange::parse(sqe)),
            opcode::io::WRITE => Self::Write(BlockRange::parse(sqe)),
            opcode::io::COMPARE => Self::Compare(BlockRange::parse(sqe)),
            opcode::io::VERIFY => Self::Verify(BlockRange::parse(sqe)),
            opcode::io::WRITE_ZEROES => {
                Self::WriteZeroes { range: BlockRange::parse(sqe), deallocate: cdw12 & DEALLOCATE != 0 }
            }
            opcode::io::DATASET_MANAGEMENT => {
                Self::DatasetManagement { ranges: (cdw10 as u16 & 0xFF) + 1, deallocate: cdw11 & 4 != 0 }
            }
            opcode::io::COPY => Self::Copy {
                sdlba: sqe.cdw10_11(),
                ranges: (cdw12 as u16 & 0xFF) + 1,
                format: (cdw12 >> 8) as u8 & 0xF,
                fua: cdw12 & FUA != 0,
            },
            opcode::io::RESERVATION_REGISTER => Self::ReservationRegister(ReservationRegister::parse(cdw10)?),
            opcode::io::RESERVATION_REPORT => {
                Self::ReservationReport { bytes: (u64::from(cdw10) + 1) * 4, extended: cdw11 & 1 != 0 }
            }
            opcode::io::RESERVATION_ACQUIRE => Self::ReservationAcquire(ReservationAcquire::parse(cdw10)?),
            opcode::io::RESERVATION_RELEASE => Self::ReservationRelease(ReservationRelease::parse(cdw10)?),
            _ => return Err(Status::INVALID_OPCODE),
        })
    }

    /// The opcode.
    pub const fn opcode(&self) -> u8 {
        match self {
            Self::Flush => opcode::io::FLUSH,
            Self::Read(_) => opcode::io::READ,
            Self::Write(_) => opcode::io::WRITE,
            Self::Compare(_) => opcode::io::COMPARE,
            Self::Verify(_) => opcode::io::VERIFY,
            Self::WriteZeroes { .. } => opcode::io::WRITE_ZEROES,
            Self::DatasetManagement { .. } => opcode::io::DATASET_MANAGEMENT,
            Self::Copy { .. } => opcode::io::COPY,
            Self::ReservationRegister(_) => opcode::io::RESERVATION_REGISTER,
            Self::ReservationReport { .. } => opcode::io::RESERVATION_REPORT,
            Self::ReservationAcquire(_) => opcode::io::RESERVATION_ACQUIRE,
            Self::ReservationRelease(_) => opcode::io::RESERVATION_RELEASE,
        }
    }

    /// The submission entry of this command.
    pub fn to_sqe(&self, cid: u16, nsid: u32, sgl: Sgl) -> Sqe {
        let mut sqe = Sqe::new(self.opcode(), cid, nsid, sgl);
        match self {
            Self::Flush => {}
            Self::Read(range) | Self::Write(range) | Self::Compare(range) | Self::Verify(range) => {
                range.put(&mut sqe, 0);
            }
            Self::WriteZeroes { range, deallocate } => range.put(&mut sqe, flag(*deallocate, DEALLOCATE)),
            Self::DatasetManagement { ranges, deallocate } => {
                sqe.cdw10 = u32::from(ranges.wrapping_sub(1) & 0xFF).into();
                sqe.cdw11 = flag(*deallocate, 4).into();
            }
            Self::Copy { sdlba, ranges, format, fua } => {
                sqe.set_cdw10_11(*sdlba);
                sqe.cdw12 =
                    (u32::from(ranges.wrapping_sub(1) & 0xFF) | u32::from(format & 0xF) << 8 | flag(*fua, FUA)).into();
            }
            Self::ReservationRegister(command) => sqe.cdw10 = command.cdw10().into(),
            Self::ReservationReport { bytes, extended } => {
                sqe.cdw10 = ((bytes / 4).saturating_sub(1) as u32).into();
                sqe.cdw11 = flag(*extended, 1).into();
            }
            Self::ReservationAcquire(command) => sqe.cdw10 = command.cdw10().into(),
            Self::ReservationRelease(command) => sqe.cdw10 = command.cdw10().into(),
        }
        sqe
    }
}

layout! {
    /// One range of a Dataset Management command (NVM 1.0, 3.2.3).
    pub struct DsmRange[16] {
        /// Context attributes, a hint.
        0 attributes: u32,
        /// Logical blocks.
        4 blocks: u32,
        /// First logical block.
        8 slba: u64,
    }
}

layout! {
    /// One source range of a Copy command, descriptor format 0 (NVM 1.0, 3.2.2). Protection fields are not named.
    pub struct CopyRange[32] {
        /// First logical block.
        8 slba: u64,
        /// Logical blocks, 0's based as on the wire; see [`CopyRange::blocks`].
        16 nlb: u16,
    }
}

impl CopyRange {
    /// Logical blocks, 1 to 65536.
    pub fn blocks(&self) -> u32 {
        u32::from(self.nlb) + 1
    }
}

/// The whole ranges in the data of a Dataset Management command, at most `count` of them.
pub fn dsm_ranges(data: &[u8], count: u16) -> impl Iterator<Item = DsmRange> + '_ {
    (0..usize::from(count)).map_while(|i| crate::layout::entry(data, i))
}

/// The whole source ranges in the data of a Copy command, at most `count` of them.
pub fn copy_ranges(data: &[u8], count: u16) -> impl Iterator<Item = CopyRange> + '_ {
    (0..usize::from(count)).map_while(|i| crate::layout::entry(data, i))
}
