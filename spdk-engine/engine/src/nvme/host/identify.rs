//! What a controller says of itself and of its namespaces, as far as an initiator needs it.

use nvme_wire::identify::{ControllerData, NvmControllerData, PAGE_SIZE, oncs};
use nvme_wire::namespace::{NamespaceData, NamespaceIds};
use uuid::Uuid;

/// Blocks of one command: its count has 16 bits.
const COMMAND_BLOCKS_MAX: u64 = 65536;
/// Bytes of one command when the controller sets no limit.
const UNLIMITED_BYTES: u64 = 1 << 20;

/// How large one command may be, in blocks; larger I/O is split.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NsLimits {
    pub block_size: u32,
    /// Reads, writes and compares.
    pub transfer: u64,
    pub write_zeroes: u64,
    pub unmap: u64,
}

/// A namespace that can be used as a block device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamespaceInfo {
    pub nsid: u32,
    pub blocks: u64,
    /// The globally unique identifier if there is one, else the UUID.
    pub uuid: Option<Uuid>,
    pub limits: NsLimits,
    /// Bytes that the medium writes at once.
    pub physical_block_size: u32,
    /// Blocks that one I/O should not cross; 0 for none.
    pub optimal_io_boundary: u32,
    /// Attachable to several controllers.
    pub shared: bool,
    pub compare: bool,
    pub unmap: bool,
    pub write_zeroes: bool,
    pub read_only: bool,
    /// ANA state as SPDK words it; none without ANA.
    pub ana_state: Option<&'static str>,
}

impl NsLimits {
    /// The limits that controller data set for blocks of `block_size` bytes.
    #[must_use]
    pub fn new(block_size: u32, controller: &ControllerData, nvm: &NvmControllerData) -> Self {
        let blocks = |bytes: u64| (bytes / u64::from(block_size)).clamp(1, COMMAND_BLOCKS_MAX);
        let zeroes = match nvm.wzsl {
            0 => COMMAND_BLOCKS_MAX,
            shift => blocks(u64::from(PAGE_SIZE).checked_shl(u32::from(shift)).unwrap_or(u64::MAX)),
        };
        // A range beyond the limit is cut without a word by some targets, so it must not be asked for.
        let unmap = if nvm.dmrsl == 0 { u64::from(u32::MAX) } else { u64::from(nvm.dmrsl) };
        Self {
            block_size,
            transfer: blocks(controller.max_transfer().unwrap_or(UNLIMITED_BYTES).min(UNLIMITED_BYTES)),
            write_zeroes: zeroes,
            unmap: if nvm.dmsl == 0 { unmap } else { unmap.min(nvm.dmsl) },
        }
    }
}

impl NamespaceInfo {
    /// Puts together what the answers say; `None` for a namespace that is inactive or formatted in a way that is not a
    /// plain block device (metadata, odd sizes).
    #[must_use]
    pub fn new(
        nsid: u32,
        data: &NamespaceData,
        ids: &NamespaceIds,
        controller: &ControllerData,
        nvm: &NvmControllerData,
    ) -> Option<Self> {
        let block_size = data.block_size().filter(|size| *size <= 65536)?;
        if data.nsze == 0 || data.format().ms != 0 {
            return None;
        }
        let nguid = if data.nguid == [0; 16] { ids.nguid } else { Some(data.nguid) };
        let supports = |bit: u16| controller.oncs & bit != 0;
        Some(Self {
            nsid,
            blocks: data.nsze,
            uuid: nguid.map(Uuid::from_bytes).or(ids.uuid),
            limits: NsLimits::new(block_size, controller, nvm),
            physical_block_size: block_size.saturating_mul(u32::from(data.npwg) + 1),
            optimal_io_boundary: u32::from(data.noiob),
            shared: data.is_shared(),
            compare: supports(oncs::COMPARE),
            unmap: supports(oncs::DATASET_MANAGEMENT),
            write_zeroes: supports(oncs::WRITE_ZEROES),
            read_only: data.nsattr & 1 != 0,
            ana_state: None,
        })
    }

    /// Whether `other` is the same medium with the same format, whatever its size.
    #[must_use]
    pub fn is_same_medium(&self, other: &Self) -> bool {
        self.nsid == other.nsid && self.uuid == other.uuid && self.limits == other.limits
    }
}
