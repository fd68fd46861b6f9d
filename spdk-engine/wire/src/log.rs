//! Log pages other than ANA ([`crate::ana`]), discovery ([`crate::discovery`]) and reservation notifications
//! ([`crate::reservation`]); Base 2.0, 5.16.
//!
//! A page is built whole; [`window`] cuts out what a Get Log Page asked for.

use crate::layout::Field;
use crate::{SpacePadded, Status};

/// Log page identifiers.
pub mod lid {
    #![allow(missing_docs)]
    pub const SUPPORTED: u8 = 0x00;
    pub const ERROR: u8 = 0x01;
    pub const HEALTH: u8 = 0x02;
    pub const FIRMWARE_SLOT: u8 = 0x03;
    pub const CHANGED_NAMESPACES: u8 = 0x04;
    pub const EFFECTS: u8 = 0x05;
    pub const ANA: u8 = 0x0C;
    pub const FEATURE_EFFECTS: u8 = 0x12;
    pub const MI_EFFECTS: u8 = 0x13;
    pub const DISCOVERY: u8 = 0x70;
    pub const RESERVATION: u8 = 0x80;
}

/// Copies the part of `page` from `offset` on into `out` and fills the rest of `out` with zeroes; says how many bytes
/// were copied.
///
/// # Errors
/// [`Status::INVALID_FIELD`] for an offset that is not a multiple of 4 or lies past the end of the page.
pub fn window(page: &[u8], offset: u64, out: &mut [u8]) -> Result<usize, Status> {
    if !offset.is_multiple_of(4) {
        return Err(Status::INVALID_FIELD);
    }
    let start = usize::try_from(offset).map_err(|_| Status::INVALID_FIELD)?;
    let part = page.get(start..).ok_or(Status::INVALID_FIELD)?;
    let count = part.len().min(out.len());
    let (head, tail) = out.split_at_mut(count);
    head.copy_from_slice(&part[..count]);
    tail.fill(0);
    Ok(count)
}

/// Bytes of a page with one 32-bit entry per identifier.
pub const ID_TABLE_SIZE: usize = 1024;

/// A page with one 32-bit entry per identifier: supported log pages (LID 00h), feature effects (LID 12h).
pub fn encode_id_table(entries: impl IntoIterator<Item = (u8, u32)>) -> [u8; ID_TABLE_SIZE] {
    let mut out = [0; ID_TABLE_SIZE];
    for (id, value) in entries {
        let at = usize::from(id) * 4;
        value.put(&mut out[at..at + 4]);
    }
    out
}

/// The entry of identifier `id`; 0 when the page is too short to hold it.
pub fn id_table_entry(page: &[u8], id: u8) -> u32 {
    crate::layout::entry(page, usize::from(id)).unwrap_or(0)
}

/// Supported log pages, LID 00h: bit 0 set for each of `ids`.
pub fn supported_log_pages(ids: impl IntoIterator<Item = u8>) -> [u8; ID_TABLE_SIZE] {
    encode_id_table(ids.into_iter().map(|id| (id, 1)))
}

layout! {
    /// One entry of the error information page, LID 01h. An unused entry is all zero.
    pub struct ErrorEntry[64] {
        /// Errors so far, counted over the life of the controller.
        0 error_count: u64,
        /// Submission queue.
        8 sqid: u16,
        /// Command.
        10 cid: u16,
        /// Status with the phase tag in bit 0, see [`Status::from_cqe_field`].
        12 status_field: u16,
        /// Where the parameter at fault is: byte in bits 7:0, bit in bits 10:8.
        14 parameter: u16,
        /// First block at fault.
        16 lba: u64,
        /// Namespace.
        24 nsid: u32,
        /// Log page with vendor specific information.
        28 vendor: u8,
        /// Transport type.
        29 trtype: u8,
        /// Command specific information.
        32 command_specific: u64,
        /// Transport specific information.
        40 transport_specific: u16,
    }
}

layout! {
    /// SMART / health page, LID 02h.
    pub struct HealthLog[512] {
        /// Critical warnings.
        0 critical_warning: u8,
        /// Composite temperature in kelvin.
        1 temperature: u16,
        /// Available spare in percent.
        3 available_spare: u8,
        /// Spare threshold in percent.
        4 spare_threshold: u8,
        /// Life used in percent, 255 for more.
        5 percentage_used: u8,
        /// Data read in units of 1000 * 512 bytes.
        32 data_units_read: u128,
        /// Data written in units of 1000 * 512 bytes.
        48 data_units_written: u128,
        /// Read commands.
        64 host_reads: u128,
        /// Write commands.
        80 host_writes: u128,
        /// Busy time in minutes.
        96 busy_minutes: u128,
        /// Power cycles.
        112 power_cycles: u128,
        /// Hours of power.
        128 power_on_hours: u128,
        /// Unsafe shutdowns.
        144 unsafe_shutdowns: u128,
        /// Media and data integrity errors.
        160 media_errors: u128,
        /// Error log entries over the life of the controller.
        176 error_entries: u128,
        /// Minutes above the warning temperature.
        192 warning_minutes: u32,
        /// Minutes above the critical temperature.
        196 critical_minutes: u32,
    }
}

layout! {
    /// Firmware slot page, LID 03h.
    pub struct FirmwareSlotLog[512] {
        /// Active slot in bits 2:0, slot of the next reset in bits 6:4.
        0 afi: u8,
        /// Revisions of slots 1 to 7.
        8 revisions: [SpacePadded<8>; 7],
    }
}

/// Namespace that heads a changed-namespaces page when more than 1024 changed.
pub const TOO_MANY_CHANGED: u32 = 0xFFFF_FFFF;

/// Changed namespaces, LID 04h: a namespace list of `nsids`, which must ascend; more than 1024 give the list with only
/// [`TOO_MANY_CHANGED`].
pub fn changed_namespaces(nsids: &[u32]) -> [u8; crate::identify::IDENTIFY_SIZE] {
    if nsids.len() > crate::namespace::MAX_LISTED_NAMESPACES {
        return crate::namespace::encode_namespace_list([TOO_MANY_CHANGED]);
    }
    crate::namespace::encode_namespace_list(nsids.iter().copied())
}

/// Bits of an entry of [`EffectsLog`].
pub mod effect {
    /// Supported.
    pub const SUPPORTED: u32 = 1 << 0;
    /// Changes the content of logical blocks.
    pub const CONTENT_CHANGE: u32 = 1 << 1;
    /// Changes capabilities of a namespace.
    pub const NAMESPACE_CHANGE: u32 = 1 << 2;
    /// Changes the inventory of namespaces.
    pub const INVENTORY_CHANGE: u32 = 1 << 3;
    /// Changes capabilities of the controller.
    pub const CONTROLLER_CHANGE: u32 = 1 << 4;
}

layout! {
    /// Commands supported and effects, LID 05h: one entry per opcode, see [`effect`].
    pub struct EffectsLog[4096] {
        /// Admin commands.
        0 admin: [u32; 256],
        /// I/O commands.
        1024 io: [u32; 256],
    }
}

impl EffectsLog {
    /// The page of an SPDK target whose controller reports `oncs`.
    pub fn target(oncs: u16) -> Self {
        use crate::command::opcode::{admin, io};
        use crate::identify::oncs as bit;
        const WRITES: u32 = effect::SUPPORTED | effect::CONTENT_CHANGE;
        let mut log = Self::default();
        for opcode in [
            admin::GET_LOG_PAGE,
            admin::IDENTIFY,
            admin::ABORT,
            admin::SET_FEATURES,
            admin::GET_FEATURES,
            admin::ASYNC_EVENT_REQUEST,
            admin::KEEP_ALIVE,
        ] {
            log.admin[usize::from(opcode)] = effect::SUPPORTED;
        }
        for (opcode, needs, effects) in [
            (io::FLUSH, 0, effect::SUPPORTED),
            (io::WRITE, 0, WRITES),
            (io::READ, 0, effect::SUPPORTED),
            (io::COMPARE, bit::COMPARE, effect::SUPPORTED),
            (io::WRITE_ZEROES, bit::WRITE_ZEROES, WRITES),
            (io::DATASET_MANAGEMENT, bit::DATASET_MANAGEMENT, WRITES),
            (io::RESERVATION_REGISTER, bit::RESERVATIONS, effect::SUPPORTED),
            (io::RESERVATION_REPORT, bit::RESERVATIONS, effect::SUPPORTED),
            (io::RESERVATION_ACQUIRE, bit::RESERVATIONS, effect::SUPPORTED),
            (io::RESERVATION_RELEASE, bit::RESERVATIONS, effect::SUPPORTED),
            (io::COPY, bit::COPY, WRITES),
        ] {
            if oncs & needs == needs {
                log.io[usize::from(opcode)] = effects;
            }
        }
        log
    }
}
