//! Identify Controller (Base 2.0, 5.17.2.1) and the other answers about a controller.
//!
//! [`ControllerData`] is the structure field by field, for the initiator to read and for anyone to adjust.
//! [`IoController`] and [`DiscoveryController`] build one from what a target knows, with the values an SPDK target
//! gives. Namespaces are in [`crate::namespace`].

use crate::{Nqn, NulPadded, SpacePadded, TextTooLong, property};

/// Bytes of every Identify answer.
pub const IDENTIFY_SIZE: usize = 4096;
/// Bytes the power-of-two limits of this structure count in: the smallest page, CAP.MPSMIN, of 4096 bytes.
pub const PAGE_SIZE: u32 = 4096;

layout! {
    /// Identify Controller data structure, CNS 01h.
    pub struct ControllerData[4096] {
        /// PCI vendor.
        0 vid: u16,
        /// PCI subsystem vendor.
        2 ssvid: u16,
        /// Serial number.
        4 sn: SpacePadded<20>,
        /// Model number.
        24 mn: SpacePadded<40>,
        /// Firmware revision.
        64 fr: SpacePadded<8>,
        /// Recommended arbitration burst, log2 of commands.
        72 rab: u8,
        /// IEEE OUI, least significant byte first.
        73 ieee: [u8; 3],
        /// Multi-path capabilities, see [`cmic`].
        76 cmic: u8,
        /// Most data per command, as log2 of pages; 0 for no limit. See [`ControllerData::max_transfer`].
        77 mdts: u8,
        /// Controller.
        78 cntlid: u16,
        /// Version, as property VS.
        80 ver: u32,
        /// Events the controller can report, see [`crate::features::AsyncEventConfig`].
        92 oaes: u32,
        /// Controller attributes, see [`ctratt`].
        96 ctratt: u32,
        /// Controller type: 1 I/O, 2 discovery, 3 administrative.
        111 cntrltype: u8,
        /// FRU globally unique identifier.
        112 fguid: [u8; 16],
        /// Command retry delays 1 to 3, in units of 100 ms.
        128 crdt: [u16; 3],
        /// Optional admin commands.
        256 oacs: u16,
        /// Abort command limit, 0's based.
        258 acl: u8,
        /// Asynchronous event request limit, 0's based.
        259 aerl: u8,
        /// Firmware updates.
        260 frmw: u8,
        /// Log page attributes, see [`lpa`].
        261 lpa: u8,
        /// Error log entries, 0's based.
        262 elpe: u8,
        /// Power states, 0's based.
        263 npss: u8,
        /// Warning composite temperature in kelvin.
        266 wctemp: u16,
        /// Critical composite temperature in kelvin.
        268 cctemp: u16,
        /// Total NVM capacity in bytes.
        280 tnvmcap: u128,
        /// Unallocated NVM capacity in bytes.
        296 unvmcap: u128,
        /// Keep alive granularity in units of 100 ms; 0 when not supported.
        320 kas: u16,
        /// Longest ANA transition in seconds.
        342 anatt: u8,
        /// ANA capabilities, see [`anacap`].
        343 anacap: u8,
        /// Highest ANA group identifier.
        344 anagrpmax: u32,
        /// Number of ANA group identifiers.
        348 nanagrpid: u32,
        /// Submission entry sizes: log2 of the required size in bits 3:0, of the largest in bits 7:4.
        512 sqes: u8,
        /// Completion entry sizes, likewise.
        513 cqes: u8,
        /// Most outstanding commands of a queue.
        514 maxcmd: u16,
        /// Highest namespace identifier.
        516 nn: u32,
        /// Optional NVM commands, see [`oncs`].
        520 oncs: u16,
        /// Fused operations: bit 0 compare and write.
        522 fuses: u16,
        /// Format attributes.
        524 fna: u8,
        /// Volatile write cache, see [`vwc`].
        525 vwc: u8,
        /// Atomic write unit normal in blocks, 0's based.
        526 awun: u16,
        /// Atomic write unit power fail in blocks, 0's based.
        528 awupf: u16,
        /// Atomic compare and write unit in blocks, 0's based.
        532 acwu: u16,
        /// Copy descriptor formats: bit n for format n.
        534 ocfs: u16,
        /// SGL support, see [`sgls`].
        536 sgls: u32,
        /// Most allowed namespaces; 0 when it is NN.
        540 mnan: u32,
        /// Subsystem; read it by [`Nqn::from_field`].
        768 subnqn: NulPadded<256>,
        /// Command capsule size of I/O queues in units of 16 bytes. See [`ControllerData::in_capsule_data`].
        1792 ioccsz: u32,
        /// Response capsule size of I/O queues in units of 16 bytes.
        1796 iorcsz: u32,
        /// In-capsule data offset in units of 16 bytes.
        1800 icdoff: u16,
        /// Fabrics controller attributes: bit 0 static controller model.
        1802 fcatt: u8,
        /// Most SGL data blocks per descriptor; 0 for no limit.
        1803 msdbd: u8,
        /// Optional Fabrics commands: bit 0 Disconnect.
        1804 ofcs: u16,
    }
}

/// Bits of [`ControllerData::cmic`].
pub mod cmic {
    /// The subsystem may have several ports.
    pub const MULTI_PORT: u8 = 1 << 0;
    /// The subsystem may have several controllers.
    pub const MULTI_CONTROLLER: u8 = 1 << 1;
    /// Asymmetric Namespace Access reporting.
    pub const ANA: u8 = 1 << 3;
}

/// Bits of [`ControllerData::ctratt`].
pub mod ctratt {
    /// 128-bit host identifiers.
    pub const HOST_ID_128: u32 = 1 << 0;
    /// Traffic based keep alive.
    pub const TRAFFIC_KEEP_ALIVE: u32 = 1 << 6;
}

/// Bits of [`ControllerData::lpa`].
pub mod lpa {
    /// Commands supported and effects log page.
    pub const EFFECTS: u8 = 1 << 1;
    /// Extended data: 32-bit lengths and offsets.
    pub const EXTENDED: u8 = 1 << 2;
    /// Supported log pages and feature effects.
    pub const MISCELLANEOUS: u8 = 1 << 5;
}

/// Bits of [`ControllerData::anacap`].
pub mod anacap {
    /// Reports the optimized state.
    pub const OPTIMIZED: u8 = 1 << 0;
    /// Reports the non-optimized state.
    pub const NON_OPTIMIZED: u8 = 1 << 1;
    /// Reports the inaccessible state.
    pub const INACCESSIBLE: u8 = 1 << 2;
    /// Reports the persistent loss state.
    pub const PERSISTENT_LOSS: u8 = 1 << 3;
    /// Reports the change state.
    pub const CHANGE: u8 = 1 << 4;
    /// A namespace's group does not change while it is attached.
    pub const FIXED_GROUP: u8 = 1 << 6;
}

/// Bits of [`ControllerData::oncs`].
pub mod oncs {
    #![allow(missing_docs)]
    pub const COMPARE: u16 = 1 << 0;
    pub const WRITE_UNCORRECTABLE: u16 = 1 << 1;
    pub const DATASET_MANAGEMENT: u16 = 1 << 2;
    pub const WRITE_ZEROES: u16 = 1 << 3;
    pub const SAVE_FEATURES: u16 = 1 << 4;
    pub const RESERVATIONS: u16 = 1 << 5;
    pub const TIMESTAMP: u16 = 1 << 6;
    pub const VERIFY: u16 = 1 << 7;
    pub const COPY: u16 = 1 << 8;
    /// What an SPDK target offers when all its namespaces can: 12Dh.
    pub const TARGET_DEFAULT: u16 = COMPARE | DATASET_MANAGEMENT | WRITE_ZEROES | RESERVATIONS | COPY;
}

/// Bits of [`ControllerData::vwc`].
pub mod vwc {
    /// A volatile write cache is present.
    pub const PRESENT: u8 = 1 << 0;
    /// Flush to all namespaces at once is not supported.
    pub const NO_FLUSH_BROADCAST: u8 = 2 << 1;
    /// Flush to all namespaces at once is supported.
    pub const FLUSH_BROADCAST: u8 = 3 << 1;
}

/// Bits of [`ControllerData::sgls`].
pub mod sgls {
    /// SGLs are supported.
    pub const SUPPORTED: u32 = 1 << 0;
    /// Keyed SGL data blocks are supported.
    pub const KEYED: u32 = 1 << 2;
    /// The address of a data block may be an offset.
    pub const OFFSET: u32 = 1 << 20;
}

/// Values of [`ControllerData::cntrltype`].
pub mod cntrltype {
    #![allow(missing_docs)]
    pub const IO: u8 = 1;
    pub const DISCOVERY: u8 = 2;
    pub const ADMINISTRATIVE: u8 = 3;
}

impl ControllerData {
    /// Most data of one command in bytes; `None` for no limit. Pages are of 4096 bytes.
    pub fn max_transfer(&self) -> Option<u64> {
        match self.mdts {
            0 => None,
            shift => u64::from(PAGE_SIZE).checked_shl(u32::from(shift)).filter(|bytes| *bytes >= u64::from(PAGE_SIZE)),
        }
    }

    /// Most in-capsule data of a command on an I/O queue in bytes: what IOCCSZ leaves beside the entry.
    pub fn in_capsule_data(&self) -> u32 {
        self.ioccsz.saturating_mul(16).saturating_sub(64)
    }

    /// Whether ANA is reported.
    pub fn has_ana(&self) -> bool {
        self.cmic & cmic::ANA != 0
    }

    /// Whether a volatile write cache is present.
    pub fn has_write_cache(&self) -> bool {
        self.vwc & vwc::PRESENT != 0
    }
}

/// What an I/O controller says of itself. `Default` has the limits and the identity of an SPDK target with its default
/// options; serial number, subsystem and controller are for the caller to fill in.
#[derive(Debug, Clone)]
pub struct IoController<'a> {
    /// Serial number, at most 20 bytes.
    pub serial: &'a str,
    /// Model number, at most 40 bytes.
    pub model: &'a str,
    /// Firmware revision, at most 8 bytes.
    pub firmware: &'a str,
    /// Subsystem.
    pub subnqn: &'a str,
    /// PCI vendor of controller and subsystem.
    pub vendor: u16,
    /// IEEE OUI, least significant byte first.
    pub ieee: [u8; 3],
    /// Controller.
    pub cntlid: u16,
    /// Most data of one command in bytes, a power of two of at least 4096.
    pub max_io_size: u32,
    /// In-capsule data of an I/O command in bytes.
    pub in_capsule_data: u32,
    /// Most outstanding commands of a queue.
    pub queue_depth: u16,
    /// Namespaces, and so ANA groups.
    pub max_namespaces: u32,
    /// ANA is reported.
    pub ana: bool,
    /// Optional commands, see [`oncs`].
    pub oncs: u16,
    /// Some namespace has a volatile write cache.
    pub write_cache: bool,
    /// Command retry delays 1 to 3, in units of 100 ms.
    pub crdt: [u16; 3],
}

impl Default for IoController<'_> {
    fn default() -> Self {
        Self {
            serial: "00000000000000000000",
            model: "SPDK bdev Controller",
            firmware: "26.09",
            subnqn: "",
            vendor: 0x8086,
            ieee: [0xE4, 0xD2, 0x5C],
            cntlid: 1,
            max_io_size: 128 * 1024,
            in_capsule_data: 4096,
            queue_depth: 128,
            max_namespaces: 32,
            ana: false,
            oncs: oncs::TARGET_DEFAULT,
            write_cache: true,
            crdt: [0; 3],
        }
    }
}

/// SGLs as an SPDK target reports them; the keyed bit is set on TCP, too.
const TARGET_SGLS: u32 = sgls::SUPPORTED | sgls::KEYED | sgls::OFFSET;

impl IoController<'_> {
    /// The data structure.
    ///
    /// # Errors
    /// [`TextTooLong`] for a serial, model, firmware or subsystem text that does not fit.
    pub fn build(&self) -> Result<ControllerData, TextTooLong> {
        let mut data = ControllerData {
            vid: self.vendor,
            ssvid: self.vendor,
            sn: SpacePadded::new(self.serial)?,
            mn: SpacePadded::new(self.model)?,
            fr: SpacePadded::new(self.firmware)?,
            rab: 6,
            ieee: self.ieee,
            cmic: cmic::MULTI_PORT | cmic::MULTI_CONTROLLER,
            mdts: mdts(self.max_io_size),
            cntlid: self.cntlid,
            ver: property::VERSION_2_0,
            oaes: 0x100,
            ctratt: ctratt::HOST_ID_128,
            cntrltype: cntrltype::IO,
            crdt: self.crdt,
            acl: 3,
            aerl: 3,
            frmw: 0x03,
            lpa: lpa::EFFECTS | lpa::EXTENDED | lpa::MISCELLANEOUS,
            elpe: 127,
            wctemp: 0x157,
            cctemp: 0x175,
            kas: 100,
            sqes: 0x66,
            cqes: 0x44,
            maxcmd: self.queue_depth,
            nn: self.max_namespaces,
            oncs: self.oncs,
            fuses: 1,
            vwc: vwc::NO_FLUSH_BROADCAST | if self.write_cache { vwc::PRESENT } else { 0 },
            ocfs: 1,
            sgls: TARGET_SGLS,
            subnqn: NulPadded::new(self.subnqn)?,
            ioccsz: 64u32.saturating_add(self.in_capsule_data) / 16,
            iorcsz: 1,
            msdbd: 1,
            ..ControllerData::default()
        };
        if self.ana {
            data.cmic |= cmic::ANA;
            data.oaes |= 0x800;
            data.anatt = 10;
            data.anacap = anacap::OPTIMIZED | anacap::NON_OPTIMIZED | anacap::INACCESSIBLE | anacap::FIXED_GROUP;
            data.anagrpmax = self.max_namespaces;
            data.nanagrpid = self.max_namespaces;
            data.mnan = self.max_namespaces;
        }
        Ok(data)
    }
}

/// What a discovery controller says of itself.
#[derive(Debug, Clone)]
pub struct DiscoveryController<'a> {
    /// Firmware revision, at most 8 bytes.
    pub firmware: &'a str,
    /// Controller.
    pub cntlid: u16,
    /// Most data of one command in bytes, a power of two of at least 4096.
    pub max_io_size: u32,
    /// Most outstanding commands of the queue.
    pub queue_depth: u16,
}

impl Default for DiscoveryController<'_> {
    fn default() -> Self {
        let io = IoController::default();
        Self { firmware: io.firmware, cntlid: io.cntlid, max_io_size: io.max_io_size, queue_depth: io.queue_depth }
    }
}

impl DiscoveryController<'_> {
    /// The data structure.
    ///
    /// # Errors
    /// [`TextTooLong`] for a firmware text that does not fit.
    pub fn build(&self) -> Result<ControllerData, TextTooLong> {
        Ok(ControllerData {
            fr: SpacePadded::new(self.firmware)?,
            mdts: mdts(self.max_io_size),
            cntlid: self.cntlid,
            ver: property::VERSION_2_0,
            oaes: 1 << 31,
            cntrltype: cntrltype::DISCOVERY,
            aerl: 3,
            lpa: lpa::EXTENDED,
            elpe: 127,
            maxcmd: self.queue_depth,
            sgls: TARGET_SGLS,
            subnqn: Nqn::discovery().to_field(),
            ..ControllerData::default()
        })
    }
}

fn mdts(max_io_size: u32) -> u8 {
    (max_io_size / PAGE_SIZE).checked_ilog2().unwrap_or(0) as u8
}

layout! {
    /// Identify Controller for the NVM command set, CNS 06h with CSI 0 (NVM 1.0, 4.1.5.3).
    pub struct NvmControllerData[4096] {
        /// Verify size limit, as log2 of pages; 0 for none.
        0 vsl: u8,
        /// Write Zeroes size limit, as log2 of pages; 0 for none.
        1 wzsl: u8,
        /// Write Uncorrectable size limit, as log2 of pages; 0 for none.
        2 wusl: u8,
        /// Dataset Management ranges limit; 0 for none.
        3 dmrl: u8,
        /// Dataset Management range size limit in blocks; 0 for none.
        4 dmrsl: u32,
        /// Dataset Management size limit in blocks; 0 for none.
        8 dmsl: u64,
    }
}

layout! {
    /// Identify I/O Command Set data structure, CNS 1Ch: combinations of command sets, bit n for CSI n.
    pub struct CommandSetData[4096] {
        /// Combinations; unused ones are 0.
        0 vectors: [u64; 512],
    }
}
