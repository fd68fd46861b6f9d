//! A replica: a disk of block values, a durable `(epoch, instance)`, and the gate for sessions (rules 13 and 14).
//!
//! *Invariants.* I/O is executed only for the current session. A new session, also of the same engine, first ends
//! the old one and waits until its I/O on the disk is finished. After a restart nobody is allowed until a promote.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use mirror_core::meta::{
    Geometry, META_BLOCK_BYTES, RegionBits, SUPERBLOCK_SLOTS, Superblock, decode_bits, newest_superblock,
};
use mirror_core::{EngineInstance, Epoch, LegError, MetaOp, Op, ReplicaFacts, SnapshotId};

use crate::disk::Disk;
use crate::model_bug::ModelBug;
use crate::rng::Rng;
use crate::world::{ConnId, EngineRef};

/// I/O that the disk is working on.
#[derive(Debug, Clone)]
pub(crate) struct DiskIo {
    pub(crate) key: u64,
    pub(crate) conn: ConnId,
    pub(crate) from: EngineRef,
    pub(crate) io: mirror_core::IoId,
    pub(crate) leg: mirror_core::LegId,
    pub(crate) op: Op,
    pub(crate) lba: u64,
    pub(crate) data: Vec<u64>,
    /// It is for the meta area; `op`, `lba` and `data` mean nothing then.
    pub(crate) meta: Option<MetaOp>,
}

/// What is on a disk after its data was deleted: nothing that any host wrote.
const WIPED: u64 = (1 << 51) + 1;

/// Bytes that the disk writes at once, whatever happens.
const SECTOR: usize = 512;

/// A request for a session that waits for the old one's I/O.
#[derive(Debug, Clone)]
pub(crate) struct Attach {
    pub(crate) from: EngineRef,
    pub(crate) rpc: u64,
    /// `Some` for a session, `None` for a promote alone.
    pub(crate) conn: Option<ConnId>,
}

#[derive(Debug)]
pub(crate) struct Replica {
    pub(crate) up: bool,
    pub(crate) media: Disk,
    /// What it has taken, by name.
    pub(crate) snapshots: BTreeMap<SnapshotId, Disk>,
    /// Starts of its machine; part of the name of its instance (rule 1).
    pub(crate) starts: u32,
    /// The meta area; empty when the replica has none.
    pub(crate) meta: Vec<u8>,
    /// Its meta area could not be read once.
    pub(crate) meta_unread: bool,
    /// Regions written since the last flush.
    pub(crate) unflushed: BTreeSet<u32>,
    pub(crate) epoch: Epoch,
    pub(crate) instance: Option<EngineInstance>,
    /// The highest epoch it ever admitted, whatever it remembers; for the check alone.
    pub(crate) admitted_max: Epoch,
    /// Promoted since the last start.
    pub(crate) allowed: bool,
    pub(crate) session: Option<(ConnId, EngineRef)>,
    pub(crate) disk: Vec<DiskIo>,
    pub(crate) attaching: Vec<Attach>,
    pub(crate) hang_until: u64,
    pub(crate) write_errors_until: u64,
    pub(crate) read_errors_until: u64,
    pub(crate) full_until: u64,
}

/// Answer to a request for a session or a promote.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Admission {
    /// Wait for the disk, then yes.
    Draining,
    /// A newer epoch exists.
    Fenced,
}

impl Replica {
    pub(crate) fn new(blocks: usize, meta_blocks: u64, volatile: bool) -> Self {
        Self {
            up: true,
            media: Disk::new(blocks, volatile),
            snapshots: BTreeMap::new(),
            starts: 1,
            meta: vec![0; usize::try_from(meta_blocks).unwrap_or(0) * META_BLOCK_BYTES],
            meta_unread: false,
            unflushed: BTreeSet::new(),
            epoch: Epoch(0),
            instance: None,
            admitted_max: Epoch(0),
            allowed: false,
            session: None,
            disk: Vec::new(),
            attaching: Vec::new(),
            hang_until: 0,
            write_errors_until: 0,
            read_errors_until: 0,
            full_until: 0,
        }
    }

    /// Raises the epoch, or accepts the same engine again; ends the session that there is.
    pub(crate) fn admit(&mut self, epoch: Epoch, instance: &EngineInstance) -> Admission {
        let same = epoch == self.epoch && self.instance.as_ref() == Some(instance);
        if epoch < self.epoch || (epoch == self.epoch && !same) {
            return Admission::Fenced;
        }
        self.epoch = epoch;
        self.instance = Some(instance.clone());
        self.allowed = true;
        self.session = None;
        Admission::Draining
    }

    /// Executes an I/O whose time on the disk is over.
    pub(crate) fn execute(
        &mut self,
        io: &DiskIo,
        now: u64,
        bug: Option<ModelBug>,
        rng: &mut Rng,
    ) -> Result<Vec<u64>, LegError> {
        let hints = bug == Some(ModelBug::Rule05UnmapIsAHint);
        let (from, to) = (usize::try_from(io.lba).unwrap_or(0), usize::try_from(io.lba).unwrap_or(0) + io.data.len());
        match io.op {
            Op::Read if now < self.read_errors_until => Err(LegError::Media),
            Op::Read => Ok(self.media.read(from, to - from)),
            Op::Flush => {
                self.unflushed.clear();
                self.media.flush();
                self.snapshots.values_mut().for_each(Disk::flush);
                Ok(Vec::new())
            }
            Op::Write { .. } | Op::Unmap | Op::WriteZeroes => {
                let error = if now < self.write_errors_until {
                    Some(LegError::Media)
                } else if now < self.full_until {
                    Some(LegError::NoSpace)
                } else {
                    None
                };
                // A write that fails may have been done in part.
                let durable = io.op == Op::Write { fua: true };
                self.store(from, &io.data, error.is_some() || (hints && io.op == Op::Unmap), durable, rng);
                error.map_or(Ok(Vec::new()), Err)
            }
        }
    }

    /// Its newest superblock.
    pub(crate) fn superblock(&self) -> Option<Superblock> {
        newest_superblock(self.meta.get(..SUPERBLOCK_SLOTS as usize * META_BLOCK_BYTES)?)
    }

    /// Its data is deleted; what comes back under the name is an empty disk.
    pub(crate) fn wipe(&mut self) {
        self.session = None;
        self.attaching.clear();
        self.disk.clear();
        self.meta.fill(0);
        self.snapshots.clear();
        for at in 0..self.media.blocks().len() {
            self.media.write(at, WIPED, true);
        }
    }

    /// What it tells of itself to whoever promotes or attaches.
    pub(crate) fn facts(&self) -> ReplicaFacts {
        let instance = format!("start-{}", self.starts);
        ReplicaFacts { meta: self.has_meta(), volatile: self.media.volatile, instance }
    }

    /// The machine loses power: the process dies, and what was cached is gone.
    pub(crate) fn lose_power(&mut self, rng: &mut Rng) {
        self.crash(rng);
        self.starts += 1;
        self.media.lose_power(rng);
        for snapshot in self.snapshots.values_mut() {
            snapshot.lose_power(rng);
        }
    }

    pub(crate) fn has_meta(&self) -> bool {
        !self.meta.is_empty()
    }

    /// What its bits say to whoever reads them now.
    pub(crate) fn bits(&self, geometry: &Geometry) -> RegionBits {
        let start = usize::try_from(geometry.bits_start()).unwrap_or(0) * META_BLOCK_BYTES;
        decode_bits(geometry, self.meta.get(start..).unwrap_or_default()).0
    }

    /// Executes an I/O on the meta area whose time is over. Reads return bytes.
    pub(crate) fn execute_meta(&mut self, op: &MetaOp, now: u64, rng: &mut Rng) -> Result<Arc<[u8]>, LegError> {
        match op {
            MetaOp::Read { .. } if now < self.read_errors_until => {
                self.meta_unread = true;
                Err(LegError::Media)
            }
            MetaOp::Read { block, blocks } => {
                let from = usize::try_from(*block).unwrap_or(usize::MAX).saturating_mul(META_BLOCK_BYTES);
                let bytes = self.meta.get(from..from + *blocks as usize * META_BLOCK_BYTES);
                bytes.map(Arc::from).ok_or(LegError::Other)
            }
            MetaOp::Write { block, data } => {
                let fails = now < self.write_errors_until;
                self.store_meta(*block, data, fails, rng);
                if fails { Err(LegError::Media) } else { Ok(Arc::from([])) }
            }
        }
    }

    /// A write that is cut off mixes whole sectors.
    fn store_meta(&mut self, block: u64, data: &[u8], partly: bool, rng: &mut Rng) {
        let from = usize::try_from(block).unwrap_or(usize::MAX).saturating_mul(META_BLOCK_BYTES);
        for (i, sector) in data.chunks(SECTOR).enumerate() {
            let at = from + i * SECTOR;
            if (!partly || rng.permille(500))
                && let Some(place) = self.meta.get_mut(at..at + sector.len())
            {
                place.copy_from_slice(sector);
            }
        }
    }

    fn store(&mut self, from: usize, data: &[u64], partly: bool, durable: bool, rng: &mut Rng) {
        for (i, value) in data.iter().enumerate() {
            if !partly || rng.permille(500) {
                self.media.write(from + i, *value, durable);
            }
        }
    }

    /// The process dies: I/O on the disk may be done, not done, or done in part.
    pub(crate) fn crash(&mut self, rng: &mut Rng) {
        self.up = false;
        self.allowed = false;
        self.session = None;
        self.attaching.clear();
        for io in std::mem::take(&mut self.disk) {
            if let Some(MetaOp::Write { block, data }) = &io.meta {
                self.store_meta(*block, data, true, rng);
            } else if io.meta.is_none() && io.op.changes_blocks() {
                self.store(usize::try_from(io.lba).unwrap_or(0), &io.data, true, false, rng);
            }
        }
    }
}
