//! `null`: reads give whatever the buffer holds zeroed, writes vanish. For measuring everything else.

use std::any::Any;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};

use nvme_wire::Status;
use serde_json::{Value, json};

use super::{Bdev, BdevError, BdevInfo, Channel, Io, IoOp, IoTypes};
use crate::reactor::Core;

/// A device without a medium.
#[derive(Debug)]
pub struct Null {
    info: BdevInfo,
    num_blocks: AtomicU64,
}

impl Null {
    /// A device of that description; `num_blocks` may change by [`Null::resize`].
    pub fn new(mut info: BdevInfo) -> Result<Self, BdevError> {
        super::malloc::check_geometry(info.block_size, info.num_blocks)?;
        info.product_name = "Null disk";
        info.io_types = IoTypes { reset: true, abort: true, ..IoTypes::READ_WRITE };
        let num_blocks = AtomicU64::new(info.num_blocks);
        Ok(Self { info, num_blocks })
    }

    /// Changes the size; the caller tells the registry.
    pub fn resize(&self, num_blocks: u64) {
        self.num_blocks.store(num_blocks, Ordering::Relaxed);
    }
}

impl Bdev for Null {
    fn info(&self) -> BdevInfo {
        BdevInfo { num_blocks: self.num_blocks(), ..self.info.clone() }
    }
    fn num_blocks(&self) -> u64 {
        self.num_blocks.load(Ordering::Relaxed)
    }
    fn open(&self, _core: &Core) -> Result<Rc<dyn Channel>, BdevError> {
        Ok(Rc::new(NullChannel))
    }
    fn config(&self) -> Option<(&'static str, Value)> {
        let info = self.info();
        let params = json!({ "name": info.name, "num_blocks": info.num_blocks, "block_size": info.block_size,
            "uuid": info.uuid.to_string() });
        Some(("bdev_null_create", params))
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

struct NullChannel;

impl Channel for NullChannel {
    fn submit(&self, core: &Core, io: Io) {
        if io.op == IoOp::Read {
            // Old bytes of somebody else's I/O must not leave through a device that has none of its own.
            io.zero(core);
        }
        core.complete(io, Status::SUCCESS);
    }
}
