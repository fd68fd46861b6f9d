//! The raid as a block device.

use std::any::Any;
use std::rc::Rc;
use std::sync::Arc;

use serde_json::Value;

use super::array::Array;
use super::core_raid::RaidChannel;
use super::shared::Shared;
use crate::bdev::{Bdev, BdevError, BdevInfo, Channel, IoTypes};
use crate::reactor::Core;

/// The device; made when the raid goes online.
#[derive(Debug)]
pub struct RaidBdev {
    info: BdevInfo,
    guest: bool,
    shared: Arc<Shared>,
}

impl RaidBdev {
    /// The device of `array`, over members of these descriptions.
    #[must_use]
    pub fn new(array: &Array, members: &[BdevInfo], guest: bool, shared: Arc<Shared>) -> Self {
        let all = members.iter().map(|i| i.io_types).reduce(IoTypes::and).unwrap_or(IoTypes::READ_WRITE);
        let info = BdevInfo {
            name: array.name.clone(),
            product_name: "Raid Volume",
            uuid: array.uuid,
            block_size: array.block_size,
            num_blocks: array.num_blocks,
            physical_block_size: members.iter().map(|i| i.physical_block_size).max().unwrap_or(0),
            optimal_io_boundary: 0,
            io_types: IoTypes {
                unmap: all.unmap,
                // One member with a cache is enough to need flushes; the others answer them at once.
                flush: members.iter().any(|i| i.io_types.flush),
                reset: all.reset,
                // Handed on; a member without it writes zeroes.
                write_zeroes: true,
                ..IoTypes::READ_WRITE
            },
            write_cache: members.iter().any(|i| i.write_cache),
        };
        Self { info, guest, shared }
    }

    /// What all cores share.
    #[must_use]
    pub fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }
}

impl Bdev for RaidBdev {
    fn info(&self) -> BdevInfo {
        BdevInfo { num_blocks: self.num_blocks(), ..self.info.clone() }
    }
    fn num_blocks(&self) -> u64 {
        self.shared.num_blocks()
    }
    fn open(&self, core: &Core) -> Result<Rc<dyn Channel>, BdevError> {
        Ok(Rc::new(RaidChannel::open(core, &self.shared)?))
    }
    fn holds_guest_data(&self) -> bool {
        self.guest
    }
    fn driver_specific(&self) -> Value {
        // Told by the module, which knows the members.
        Value::Null
    }
    fn config(&self) -> Option<(&'static str, Value)> {
        None
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}
