//! Controller properties (Base 2.0, 3.1.3), reached over Fabrics by Property Get and Property Set.

/// Property offsets in bytes.
pub mod offset {
    #![allow(missing_docs)]
    pub const CAP: u32 = 0x00;
    pub const VS: u32 = 0x08;
    pub const CC: u32 = 0x14;
    pub const CSTS: u32 = 0x1C;
    pub const NSSR: u32 = 0x20;
    pub const AQA: u32 = 0x24;
    pub const ASQ: u32 = 0x28;
    pub const ACQ: u32 = 0x30;
    pub const CRTO: u32 = 0x68;
}

/// Value of VS for version 2.0.
pub const VERSION_2_0: u32 = 0x0002_0000;
/// What a host writes to NSSR to reset the subsystem: "NVMe".
pub const NSSR_RESET: u32 = 0x4E56_4D65;

/// Controller Capabilities (3.1.3.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capabilities {
    /// Most entries of a queue, 1 to 65536. The wire holds one less.
    pub max_queue_entries: u32,
    /// Queues must be contiguous (CQR), always so over Fabrics.
    pub contiguous_queues: bool,
    /// Longest wait for CSTS.RDY in units of 500 ms (TO).
    pub timeout: u8,
    /// NVM Subsystem Reset supported (NSSRS).
    pub subsystem_reset: bool,
    /// Command Sets Supported: bit 0 NVM, bit 6 those of Identify, bit 7 none.
    pub command_sets: u8,
    /// Smallest host page, as log2 of bytes, 12 to 27 (MPSMIN).
    pub min_page_shift: u8,
    /// Largest host page, as log2 of bytes, 12 to 27 (MPSMAX).
    pub max_page_shift: u8,
    /// Controller Ready With Media supported (CRWMS).
    pub ready_with_media: bool,
    /// Controller Ready Independent of Media supported (CRIMS).
    pub ready_without_media: bool,
}

impl Default for Capabilities {
    /// 128 entries, 15 seconds, NVM command set, 4096-byte pages.
    fn default() -> Self {
        Self {
            max_queue_entries: 128,
            contiguous_queues: true,
            timeout: 30,
            subsystem_reset: false,
            command_sets: 1,
            min_page_shift: 12,
            max_page_shift: 12,
            ready_with_media: true,
            ready_without_media: false,
        }
    }
}

impl Capabilities {
    /// From the property.
    pub const fn from_raw(raw: u64) -> Self {
        Self {
            max_queue_entries: (raw & 0xFFFF) as u32 + 1,
            contiguous_queues: raw >> 16 & 1 != 0,
            timeout: (raw >> 24) as u8,
            subsystem_reset: raw >> 36 & 1 != 0,
            command_sets: (raw >> 37) as u8,
            min_page_shift: (raw >> 48 & 0xF) as u8 + 12,
            max_page_shift: (raw >> 52 & 0xF) as u8 + 12,
            ready_with_media: raw >> 59 & 1 != 0,
            ready_without_media: raw >> 60 & 1 != 0,
        }
    }

    /// The property.
    pub const fn raw(&self) -> u64 {
        (self.max_queue_entries.saturating_sub(1) as u64 & 0xFFFF)
            | (self.contiguous_queues as u64) << 16
            | (self.timeout as u64) << 24
            | (self.subsystem_reset as u64) << 36
            | (self.command_sets as u64) << 37
            | (self.min_page_shift.saturating_sub(12) as u64 & 0xF) << 48
            | (self.max_page_shift.saturating_sub(12) as u64 & 0xF) << 52
            | (self.ready_with_media as u64) << 59
            | (self.ready_without_media as u64) << 60
    }
}

/// Controller Configuration (3.1.3.5). `Default` is a disabled controller.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Configuration {
    /// Enable (EN).
    pub enable: bool,
    /// Command set selected (CSS), 3 bits: 0 NVM, 6 all supported, 7 admin only.
    pub command_set: u8,
    /// Host page size, as log2 of bytes minus 12 (MPS), 4 bits.
    pub page_size: u8,
    /// Arbitration (AMS), 3 bits.
    pub arbitration: u8,
    /// Shutdown notification (SHN): 0 none, 1 normal, 2 abrupt.
    pub shutdown: u8,
    /// log2 of the submission entry size (IOSQES), 6 for the NVM command set.
    pub iosqes: u8,
    /// log2 of the completion entry size (IOCQES), 4 for the NVM command set.
    pub iocqes: u8,
    /// Controller Ready Independent of Media enabled (CRIME).
    pub ready_without_media: bool,
}

impl Configuration {
    /// What a host of the NVM command set writes to enable the controller.
    pub const fn enabled() -> Self {
        Self {
            enable: true,
            command_set: 0,
            page_size: 0,
            arbitration: 0,
            shutdown: 0,
            iosqes: 6,
            iocqes: 4,
            ready_without_media: false,
        }
    }

    /// From the property.
    pub const fn from_raw(raw: u32) -> Self {
        Self {
            enable: raw & 1 != 0,
            command_set: (raw >> 4 & 7) as u8,
            page_size: (raw >> 7 & 0xF) as u8,
            arbitration: (raw >> 11 & 7) as u8,
            shutdown: (raw >> 14 & 3) as u8,
            iosqes: (raw >> 16 & 0xF) as u8,
            iocqes: (raw >> 20 & 0xF) as u8,
            ready_without_media: raw >> 24 & 1 != 0,
        }
    }

    /// The property.
    pub const fn raw(&self) -> u32 {
        self.enable as u32
            | (self.command_set as u32 & 7) << 4
            | (self.page_size as u32 & 0xF) << 7
            | (self.arbitration as u32 & 7) << 11
            | (self.shutdown as u32 & 3) << 14
            | (self.iosqes as u32 & 0xF) << 16
            | (self.iocqes as u32 & 0xF) << 20
            | (self.ready_without_media as u32) << 24
    }
}

/// Progress of a shutdown (CSTS.SHST).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Shutdown {
    /// 0h, none.
    #[default]
    Normal,
    /// 1h, in progress.
    InProgress,
    /// 2h, complete.
    Complete,
    /// 3h.
    Reserved,
}

/// Controller Status (3.1.3.6). `Default` is not ready.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ControllerStatus {
    /// Ready (RDY).
    pub ready: bool,
    /// Controller Fatal Status (CFS).
    pub fatal: bool,
    /// Shutdown status (SHST).
    pub shutdown: Shutdown,
    /// A subsystem reset happened (NSSRO).
    pub subsystem_reset: bool,
    /// Processing paused (PP).
    pub paused: bool,
}

impl ControllerStatus {
    /// From the property.
    pub const fn from_raw(raw: u32) -> Self {
        Self {
            ready: raw & 1 != 0,
            fatal: raw >> 1 & 1 != 0,
            shutdown: match raw >> 2 & 3 {
                0 => Shutdown::Normal,
                1 => Shutdown::InProgress,
                2 => Shutdown::Complete,
                _ => Shutdown::Reserved,
            },
            subsystem_reset: raw >> 4 & 1 != 0,
            paused: raw >> 5 & 1 != 0,
        }
    }

    /// The property.
    pub const fn raw(&self) -> u32 {
        let shutdown = match self.shutdown {
            Shutdown::Normal => 0u32,
            Shutdown::InProgress => 1,
            Shutdown::Complete => 2,
            Shutdown::Reserved => 3,
        };
        self.ready as u32
            | (self.fatal as u32) << 1
            | shutdown << 2
            | (self.subsystem_reset as u32) << 4
            | (self.paused as u32) << 5
    }
}

/// Admin Queue Attributes (3.1.3.8): entries of both admin queues, 1 to 4096.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AdminQueueAttributes {
    /// Submission queue entries. The wire holds one less.
    pub submission: u32,
    /// Completion queue entries. The wire holds one less.
    pub completion: u32,
}

impl AdminQueueAttributes {
    /// From the property.
    pub const fn from_raw(raw: u32) -> Self {
        Self { submission: (raw & 0xFFF) + 1, completion: (raw >> 16 & 0xFFF) + 1 }
    }

    /// The property.
    pub const fn raw(&self) -> u32 {
        (self.submission.saturating_sub(1) & 0xFFF) | (self.completion.saturating_sub(1) & 0xFFF) << 16
    }
}
