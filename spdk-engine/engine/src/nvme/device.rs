//! The `nvme` block device: one namespace of an attached controller.
//!
//! *What it is.* [`NvmeBdev`] is the description; a channel is a user of the core's [`PathQueue`].
//!
//! *Invariants.* A namespace keeps its device as long as it is the same medium (identifier and format); its size may
//! change. Flush goes to the controller whenever there is a volatile write cache, whatever SPDK's `enable_flush` says:
//! a flush that does nothing would be a lie to whoever asked for it. Raw NVMe commands are not passed through, and so
//! not announced as SPDK does.

use std::any::Any;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use serde_json::{Map, Value, json};
use uuid::Uuid;

use super::host::{NamespaceInfo, NsLimits};
use super::queue::PathQueue;
use super::shared::Shared;
use crate::bdev::{Bdev, BdevError, BdevInfo, Channel, Io, IoTypes, PathWatcher};
use crate::reactor::Core;

/// A namespace as a block device.
#[derive(Debug)]
pub struct NvmeBdev {
    shared: Arc<Shared>,
    info: BdevInfo,
    namespace: NamespaceInfo,
    num_blocks: AtomicU64,
}

impl NvmeBdev {
    /// The device of a namespace, known here by `uuid`.
    #[must_use]
    pub fn new(shared: Arc<Shared>, namespace: NamespaceInfo, uuid: Uuid, write_cache: bool) -> Self {
        let info = BdevInfo {
            name: format!("{}n{}", shared.name, namespace.nsid),
            product_name: "NVMe disk",
            uuid,
            block_size: namespace.limits.block_size,
            num_blocks: namespace.blocks,
            physical_block_size: namespace.physical_block_size,
            optimal_io_boundary: namespace.optimal_io_boundary,
            io_types: IoTypes {
                write: !namespace.read_only,
                unmap: namespace.unmap && !namespace.read_only,
                write_zeroes: namespace.write_zeroes && !namespace.read_only,
                flush: write_cache,
                reset: true,
                compare: namespace.compare,
                ..IoTypes::READ_WRITE
            },
            write_cache,
        };
        let num_blocks = AtomicU64::new(namespace.blocks);
        Self { shared, info, namespace, num_blocks }
    }

    /// The device's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.info.name
    }

    /// The namespace as it was when the device was made.
    #[must_use]
    pub fn namespace(&self) -> &NamespaceInfo {
        &self.namespace
    }

    /// The controller.
    #[must_use]
    pub fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// Takes up another size; true when it is one.
    pub fn resize(&self, blocks: u64) -> bool {
        self.num_blocks.swap(blocks, Ordering::Relaxed) != blocks
    }
}

impl Bdev for NvmeBdev {
    fn info(&self) -> BdevInfo {
        BdevInfo { num_blocks: self.num_blocks(), ..self.info.clone() }
    }

    fn num_blocks(&self) -> u64 {
        self.num_blocks.load(Ordering::Relaxed)
    }

    fn open(&self, core: &Core) -> Result<Rc<dyn Channel>, BdevError> {
        let (queue, user) = PathQueue::acquire(core, &self.shared);
        let (nsid, limits) = (self.namespace.nsid, self.namespace.limits);
        Ok(Rc::new(NvmeChannel { queue, user, nsid, limits, core: core.clone() }))
    }

    /// A controller without replay is a member of a mirror: it holds what the mirror's guest wrote.
    fn holds_guest_data(&self) -> bool {
        self.shared.no_replay
    }

    fn driver_specific(&self) -> Value {
        let mut path: Map<String, Value> = self.shared.facts();
        let mut ns_data = json!({ "id": self.namespace.nsid });
        if let Some(state) = self.namespace.ana_state {
            ns_data["ana_state"] = json!(state);
        }
        ns_data["can_share"] = json!(self.namespace.shared);
        path.insert("ns_data".into(), ns_data);
        json!({ "nvme": [path], "mp_policy": "active_passive" })
    }

    /// None: the controller's entry makes it again.
    fn config(&self) -> Option<(&'static str, Value)> {
        None
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

struct NvmeChannel {
    queue: Rc<PathQueue>,
    user: u64,
    nsid: u32,
    limits: NsLimits,
    core: Core,
}

impl Channel for NvmeChannel {
    fn submit(&self, core: &Core, io: Io) {
        self.queue.submit(core, self.nsid, self.limits, io);
    }

    fn watch_path(&self, _core: &Core, watcher: PathWatcher) {
        self.queue.watch(self.user, watcher);
    }
}

impl Drop for NvmeChannel {
    fn drop(&mut self) {
        let (queue, user) = (Rc::clone(&self.queue), self.user);
        self.core.defer(move |core| queue.release(core, user));
    }
}
