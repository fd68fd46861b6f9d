//! Identify Namespace and the other answers about namespaces (NVM 1.0, 4.1.5.1; Base 2.0, 5.17.2.2 to 5.17.2.8).
//!
//! [`NamespaceData`] is the structure field by field. [`Namespace`] builds one from what a target knows, with the
//! values an SPDK target gives.

use uuid::Uuid;

use crate::identify::IDENTIFY_SIZE;
use crate::layout::Field;

layout! {
    /// LBA format.
    pub struct LbaFormat[4] {
        /// Metadata per block in bytes.
        0 ms: u16,
        /// log2 of the block size in bytes.
        2 lbads: u8,
        /// Relative performance, 0 best.
        3 rp: u8,
    }
}

layout! {
    /// Identify Namespace data structure, CNS 00h. All zero for an inactive namespace.
    pub struct NamespaceData[4096] {
        /// Size in blocks.
        0 nsze: u64,
        /// Capacity in blocks.
        8 ncap: u64,
        /// Blocks in use.
        16 nuse: u64,
        /// Features, see [`nsfeat`].
        24 nsfeat: u8,
        /// LBA formats, 0's based.
        25 nlbaf: u8,
        /// Format in use: bits 3:0 and 6:5; bit 4 metadata interleaved. See [`NamespaceData::format`].
        26 flbas: u8,
        /// Metadata capabilities: bit 0 interleaved, bit 1 separate.
        27 mc: u8,
        /// Protection capabilities.
        28 dpc: u8,
        /// Protection settings.
        29 dps: u8,
        /// Sharing: bit 0 attachable to several controllers.
        30 nmic: u8,
        /// Reservation capabilities, see [`rescap`].
        31 rescap: u8,
        /// Format progress.
        32 fpi: u8,
        /// Deallocation: what deallocated blocks read as in bits 2:0 (1 zeroes), bit 3 DEAC in Write Zeroes.
        33 dlfeat: u8,
        /// Atomic write unit normal in blocks, 0's based.
        34 nawun: u16,
        /// Atomic write unit power fail in blocks, 0's based.
        36 nawupf: u16,
        /// Atomic compare and write unit in blocks, 0's based.
        38 nacwu: u16,
        /// Atomic boundary size normal.
        40 nabsn: u16,
        /// Atomic boundary offset.
        42 nabo: u16,
        /// Atomic boundary size power fail.
        44 nabspf: u16,
        /// Optimal I/O boundary in blocks; 0 for none.
        46 noiob: u16,
        /// Capacity in bytes; 0 when not reported.
        48 nvmcap: u128,
        /// Preferred write granularity in blocks, 0's based.
        64 npwg: u16,
        /// Preferred write alignment in blocks, 0's based.
        66 npwa: u16,
        /// Preferred deallocate granularity in blocks, 0's based.
        68 npdg: u16,
        /// Preferred deallocate alignment in blocks, 0's based.
        70 npda: u16,
        /// Optimal write size in blocks, 0's based.
        72 nows: u16,
        /// Most blocks of one Copy source range.
        74 mssrl: u16,
        /// Most blocks of one Copy.
        76 mcl: u32,
        /// Most source ranges of one Copy, 0's based.
        80 msrc: u8,
        /// ANA group; 0 without ANA.
        92 anagrpid: u32,
        /// Attributes: bit 0 write protected.
        99 nsattr: u8,
        /// NVM set.
        100 nvmsetid: u16,
        /// Endurance group.
        102 endgid: u16,
        /// Globally unique identifier; all zero for none.
        104 nguid: [u8; 16],
        /// Extended unique identifier; all zero for none.
        120 eui64: [u8; 8],
        /// LBA formats.
        128 lbaf: [LbaFormat; 64],
    }
}

/// Bits of [`NamespaceData::nsfeat`].
pub mod nsfeat {
    /// Thin provisioned.
    pub const THIN: u8 = 1 << 0;
    /// The atomic fields of this structure hold, not the controller's.
    pub const ATOMIC: u8 = 1 << 1;
    /// The optimal performance fields hold.
    pub const OPTIMAL_PERFORMANCE: u8 = 1 << 4;
}

/// Bits of [`NamespaceData::rescap`].
pub mod rescap {
    /// Reservations can persist through power loss.
    pub const PERSIST: u8 = 1 << 0;
    /// All six types, and Ignore Existing Key as version 1.3 defines it.
    pub const ALL_TYPES: u8 = 0xFE;
}

/// Bit of [`NamespaceData::nmic`]: attachable to several controllers.
pub const NMIC_SHARED: u8 = 1;
/// FLBAS bit 4 and MC bit 0: metadata is interleaved with the data.
const FLBAS_INTERLEAVED: u8 = 1 << 4;
const MC_INTERLEAVED: u8 = 1;

impl NamespaceData {
    /// The LBA format in use.
    pub fn format(&self) -> &LbaFormat {
        &self.lbaf[usize::from(self.flbas & 0xF | self.flbas >> 1 & 0x30)]
    }

    /// Bytes of data per block; `None` when the format is not one of this specification (512 bytes and more, less
    /// than 4 GiB).
    pub fn block_size(&self) -> Option<u32> {
        match self.format().lbads {
            shift @ 9..=31 => Some(1 << shift),
            _ => None,
        }
    }

    /// Whether the namespace may be attached to several controllers.
    pub fn is_shared(&self) -> bool {
        self.nmic & NMIC_SHARED != 0
    }
}

/// What a namespace says of itself. `Default` is an empty shared namespace of 512-byte blocks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Namespace {
    /// Size in blocks.
    pub blocks: u64,
    /// Bytes per block, interleaved metadata included.
    pub block_size: u32,
    /// Interleaved metadata per block in bytes.
    pub metadata_size: u16,
    /// Bytes of a physical block, the smallest write without a read.
    pub physical_block_size: u32,
    /// Optimal I/O boundary in blocks; 0 for none.
    pub optimal_io_boundary: u32,
    /// Writes must be multiples of the boundary, which is then not reported as such.
    pub has_write_unit: bool,
    /// Optimal write size in blocks; 0 for the largest transfer.
    pub optimal_write_blocks: u32,
    /// Atomic compare and write unit in blocks, from 1.
    pub acwu: u32,
    /// Most data of one command in bytes.
    pub max_io_size: u32,
    /// Most blocks of one Copy; 0 for 65535.
    pub max_copy: u16,
    /// Globally unique identifier.
    pub nguid: [u8; 16],
    /// Extended unique identifier; all zero for none.
    pub eui64: [u8; 8],
    /// ANA group; 0 without ANA.
    pub anagrpid: u32,
    /// Reservations can persist through power loss.
    pub persistent_reservations: bool,
    /// Not reachable on this path (ANA inaccessible or persistent loss), so that use is not reported.
    pub inaccessible: bool,
}

impl Default for Namespace {
    fn default() -> Self {
        Self {
            blocks: 0,
            block_size: 512,
            metadata_size: 0,
            physical_block_size: 512,
            optimal_io_boundary: 0,
            has_write_unit: false,
            optimal_write_blocks: 0,
            acwu: 1,
            max_io_size: 128 * 1024,
            max_copy: 0,
            nguid: [0; 16],
            eui64: [0; 8],
            anagrpid: 0,
            persistent_reservations: false,
            inaccessible: false,
        }
    }
}

impl Namespace {
    /// The data structure.
    pub fn build(&self) -> NamespaceData {
        let lbads = self.block_size.checked_ilog2().unwrap_or(0) as u8;
        let max_blocks = self.max_io_size.checked_shr(u32::from(lbads)).unwrap_or(0);
        let granularity = zero_based(self.physical_block_size / self.block_size.max(1));
        let optimal_write = if self.optimal_write_blocks == 0 { max_blocks } else { self.optimal_write_blocks };
        let boundary = if self.has_write_unit { 0 } else { self.optimal_io_boundary.min(max_blocks) };
        let max_copy = if self.max_copy == 0 { u16::MAX } else { self.max_copy };
        let mut data = NamespaceData {
            nsze: self.blocks,
            ncap: self.blocks,
            nuse: if self.inaccessible { 0 } else { self.blocks },
            nsfeat: nsfeat::ATOMIC | nsfeat::OPTIMAL_PERFORMANCE,
            nmic: NMIC_SHARED,
            rescap: rescap::ALL_TYPES | if self.persistent_reservations { rescap::PERSIST } else { 0 },
            nawupf: granularity,
            nacwu: zero_based(self.acwu),
            noiob: boundary.min(u32::from(u16::MAX)) as u16,
            npwg: granularity,
            npwa: granularity,
            npdg: granularity,
            npda: granularity,
            nows: zero_based(optimal_write),
            mssrl: max_copy,
            mcl: u32::from(max_copy),
            anagrpid: self.anagrpid,
            nguid: self.nguid,
            eui64: self.eui64,
            ..NamespaceData::default()
        };
        data.lbaf[0] = LbaFormat { ms: self.metadata_size, lbads, rp: 0 };
        if self.metadata_size != 0 {
            data.flbas = FLBAS_INTERLEAVED;
            data.mc = MC_INTERLEAVED;
        }
        data
    }
}

fn zero_based(blocks: u32) -> u16 {
    blocks.saturating_sub(1).min(u32::from(u16::MAX)) as u16
}

layout! {
    /// I/O command set independent namespace data, CNS 08h (Base 2.0, 5.17.2.8).
    pub struct IndependentNamespaceData[4096] {
        /// Features, see [`nsfeat`].
        0 nsfeat: u8,
        /// Sharing, as in [`NamespaceData::nmic`].
        1 nmic: u8,
        /// Reservation capabilities, see [`rescap`].
        2 rescap: u8,
        /// Format progress.
        3 fpi: u8,
        /// ANA group.
        4 anagrpid: u32,
        /// Attributes: bit 0 write protected.
        8 nsattr: u8,
        /// NVM set.
        10 nvmsetid: u16,
        /// Endurance group.
        12 endgid: u16,
        /// Status: bit 0 ready.
        14 nstat: u8,
    }
}

/// [`IndependentNamespaceData::nstat`] of a namespace that is ready.
pub const NSTAT_READY: u8 = 1;

layout! {
    /// Namespace data of the NVM command set, CNS 05h with CSI 0 (NVM 1.0, 4.1.5.2).
    pub struct NvmNamespaceData[4096] {
        /// Storage tag mask.
        0 lbstm: u64,
        /// Protection information capabilities.
        8 pic: u8,
        /// Extended LBA formats: storage tag size in bits 6:0, protection format in bits 8:7.
        12 elbaf: [u32; 64],
    }
}

/// Identifiers of a namespace, CNS 03h (Base 2.0, 5.17.2.3). One that is all zero counts as absent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct NamespaceIds {
    /// Extended unique identifier.
    pub eui64: Option<[u8; 8]>,
    /// Globally unique identifier.
    pub nguid: Option<[u8; 16]>,
    /// UUID.
    pub uuid: Option<Uuid>,
    /// Command set, when it is not the NVM command set.
    pub csi: Option<u8>,
}

const NIDT_EUI64: u8 = 1;
const NIDT_NGUID: u8 = 2;
const NIDT_UUID: u8 = 3;
const NIDT_CSI: u8 = 4;

impl NamespaceIds {
    /// The list of descriptors, in the order of the fields.
    pub fn encode(&self) -> [u8; IDENTIFY_SIZE] {
        let mut out = [0; IDENTIFY_SIZE];
        let mut at = 0;
        let mut add = |kind: u8, id: &[u8]| {
            if id.iter().any(|b| *b != 0) {
                out[at] = kind;
                out[at + 1] = id.len() as u8;
                out[at + 4..at + 4 + id.len()].copy_from_slice(id);
                at += 4 + id.len();
            }
        };
        add(NIDT_EUI64, &self.eui64.unwrap_or_default());
        add(NIDT_NGUID, &self.nguid.unwrap_or_default());
        add(NIDT_UUID, self.uuid.unwrap_or_default().as_bytes());
        add(NIDT_CSI, &[self.csi.unwrap_or_default()]);
        out
    }

    /// Reads a list of descriptors up to its end or to the first that does not fit. Unknown kinds and known ones of
    /// the wrong length are skipped.
    pub fn parse(bytes: &[u8]) -> Self {
        let mut ids = Self::default();
        let mut rest = bytes;
        while let Some(([kind, len, _, _], tail)) = rest.split_first_chunk::<4>() {
            if *len == 0 {
                break;
            }
            let Some((id, tail)) = tail.split_at_checked(usize::from(*len)) else {
                break;
            };
            rest = tail;
            if id.iter().all(|b| *b == 0) {
                continue;
            }
            match *kind {
                NIDT_EUI64 => ids.eui64 = id.try_into().ok().or(ids.eui64),
                NIDT_NGUID => ids.nguid = id.try_into().ok().or(ids.nguid),
                NIDT_UUID => ids.uuid = Uuid::from_slice(id).ok().or(ids.uuid),
                NIDT_CSI => ids.csi = <[u8; 1]>::try_from(id).ok().map(|[csi]| csi).or(ids.csi),
                _ => {}
            }
        }
        ids
    }
}

/// Most namespaces in one list.
pub const MAX_LISTED_NAMESPACES: usize = IDENTIFY_SIZE / 4;

/// The namespace list of CNS 02h, CNS 07h and of the changed-namespaces log page (Base 2.0, 4.4): the first 1024 of
/// `nsids`, which must ascend, and zeroes after them.
pub fn encode_namespace_list(nsids: impl IntoIterator<Item = u32>) -> [u8; IDENTIFY_SIZE] {
    let mut out = [0; IDENTIFY_SIZE];
    for (nsid, slot) in nsids.into_iter().zip(out.chunks_exact_mut(4)) {
        nsid.put(slot);
    }
    out
}

/// The namespaces of a list, up to the first zero.
pub fn parse_namespace_list(bytes: &[u8]) -> impl Iterator<Item = u32> + '_ {
    bytes.chunks_exact(4).map(u32::get).take_while(|nsid| *nsid != 0)
}
