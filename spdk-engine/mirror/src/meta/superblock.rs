//! The superblock: who a replica is and what it last knew.
//!
//! | bytes | field |
//! |---|---|
//! | 0..8 | magic `ADDAXSB1` |
//! | 8..12 | CRC of the block with this field as zero |
//! | 12..16 | version, 1 |
//! | 16..24 | sequence |
//! | 24..32 | promoted epoch `g` |
//! | 32..40 | configuration number `k` |
//! | 40..48 | size of the volume in blocks |
//! | 48..56 | blocks of a region |
//! | 56..60 | bytes of a block |
//! | 60..64 | `minInSync` |
//! | 64 | state: 1 member, 2 rebuilding, 3 closed cleanly |
//! | 65, 66 | number of members in `S`, of replicas in `R` |
//! | 72..136, 136..200, 200..264, 264..328 | volume, replica, lineage, engine instance `e`: length byte, then text |
//! | 328..456 | instance of the replica (process and power): length byte, then text |
//! | 456..464 | version of the snapshot tree |
//! | 512..1536 | names of `S`, then of `R`: length byte, then text, 64 bytes each |

use std::collections::BTreeSet;

use super::{META_BLOCK_BYTES, MetaError, array, put, u32_at, u64_at};
use crate::LEGS_MAX;
use crate::config::{
    Config, ConfigNumber, EngineInstance, Epoch, Lineage, NAME_BYTES_MAX, ReplicaId, Tree, TreeVersion, VolumeId,
};

const MAGIC: u64 = u64::from_le_bytes(*b"ADDAXSB1");
const VERSION: u32 = 1;
const AT_CRC: usize = 8;
const AT_VERSION: usize = 12;
const AT_SEQUENCE: usize = 16;
const AT_EPOCH: usize = 24;
const AT_CONFIG_NUMBER: usize = 32;
const AT_SIZE: usize = 40;
const AT_REGION: usize = 48;
const AT_BLOCK_SIZE: usize = 56;
const AT_MIN_IN_SYNC: usize = 60;
const AT_STATE: usize = 64;
const AT_TREE_VERSION: usize = 456;
const AT_IN_SYNC_COUNT: usize = 65;
const AT_REBUILDING_COUNT: usize = 66;
const AT_VOLUME: usize = 72;
const AT_REPLICA: usize = 136;
const AT_LINEAGE: usize = 200;
const AT_ENGINE_INSTANCE: usize = 264;
const AT_INSTANCE: usize = 328;
const AT_NAMES: usize = 512;
/// A name in the block: its length and the text.
const NAME_FIELD: usize = NAME_BYTES_MAX + 1;

/// Longest instance of a replica, in bytes.
pub const INSTANCE_BYTES_MAX: usize = 127;

/// What a replica is, by its own superblock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ReplicaState {
    /// In `S`.
    Member,
    /// In `R`: being copied to.
    Rebuilding,
    /// In `S`, and the engine closed in order.
    ClosedClean,
}

impl ReplicaState {
    fn number(self) -> u8 {
        match self {
            Self::Member => 1,
            Self::Rebuilding => 2,
            Self::ClosedClean => 3,
        }
    }

    fn of(number: u8) -> Result<Self, MetaError> {
        match number {
            1 => Ok(Self::Member),
            2 => Ok(Self::Rebuilding),
            3 => Ok(Self::ClosedClean),
            other => Err(MetaError::Field { field: "state", value: other.into(), allowed: "1 to 3 are allowed" }),
        }
    }
}

/// A superblock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Superblock {
    /// The volume.
    pub volume: VolumeId,
    /// The replica.
    pub replica: ReplicaId,
    /// The last known record, at the epoch and instance of the engine that wrote this. `clean` is not kept by itself: it
    /// says that the state is [`ReplicaState::ClosedClean`].
    pub record: Config,
    /// Bytes of a block.
    pub block_size: u32,
    /// Blocks of a region.
    pub region_blocks: u64,
    /// What the replica is.
    pub state: ReplicaState,
    /// Process and power instance of the replica, as the engine knew it; empty when it did not.
    pub instance: String,
    /// Rises with every write; the higher valid slot counts.
    pub sequence: u64,
}

impl Superblock {
    /// The block.
    ///
    /// # Errors
    /// [`MetaError::Field`] when the sets hold more names, or the instance more bytes, than there is room for.
    pub fn encode(&self) -> Result<Vec<u8>, MetaError> {
        let record = &self.record;
        let names = record.in_sync.len() + record.rebuilding.len();
        if names > LEGS_MAX {
            let allowed = "in_sync and rebuilding may have 16 names together";
            return Err(MetaError::Field { field: "in_sync", value: names as u64, allowed });
        }
        if self.instance.len() > INSTANCE_BYTES_MAX {
            let (value, allowed) = (self.instance.len() as u64, "127 bytes are allowed");
            return Err(MetaError::Field { field: "instance", value, allowed });
        }
        let mut block = vec![0; META_BLOCK_BYTES];
        put(&mut block, 0, &MAGIC.to_le_bytes());
        put(&mut block, AT_VERSION, &VERSION.to_le_bytes());
        put(&mut block, AT_SEQUENCE, &self.sequence.to_le_bytes());
        put(&mut block, AT_EPOCH, &record.epoch.0.to_le_bytes());
        put(&mut block, AT_CONFIG_NUMBER, &record.config_number.0.to_le_bytes());
        put(&mut block, AT_TREE_VERSION, &record.tree.version.0.to_le_bytes());
        put(&mut block, AT_SIZE, &record.size_blocks.to_le_bytes());
        put(&mut block, AT_REGION, &self.region_blocks.to_le_bytes());
        put(&mut block, AT_BLOCK_SIZE, &self.block_size.to_le_bytes());
        put(&mut block, AT_MIN_IN_SYNC, &record.min_in_sync.to_le_bytes());
        block[AT_STATE] = self.state.number();
        block[AT_IN_SYNC_COUNT] = record.in_sync.len() as u8;
        block[AT_REBUILDING_COUNT] = record.rebuilding.len() as u8;
        put_text(&mut block, AT_VOLUME, self.volume.as_str());
        put_text(&mut block, AT_REPLICA, self.replica.as_str());
        put_text(&mut block, AT_LINEAGE, record.lineage.as_str());
        put_text(&mut block, AT_ENGINE_INSTANCE, record.engine_instance.as_str());
        put_text(&mut block, AT_INSTANCE, &self.instance);
        for (i, name) in record.in_sync.iter().chain(&record.rebuilding).enumerate() {
            put_text(&mut block, AT_NAMES + i * NAME_FIELD, name.as_str());
        }
        let crc = crc_fast::crc32_iscsi(&block);
        put(&mut block, AT_CRC, &crc.to_le_bytes());
        Ok(block)
    }

    /// Reads a block.
    ///
    /// # Errors
    /// What is wrong with it first.
    pub fn decode(block: &[u8]) -> Result<Self, MetaError> {
        let Some(block) = block.get(..META_BLOCK_BYTES) else { return Err(MetaError::Short(block.len())) };
        if u64_at(block, 0) != MAGIC {
            return Err(MetaError::Magic(u64_at(block, 0)));
        }
        check_crc(block)?;
        if u32_at(block, AT_VERSION) != VERSION {
            return Err(MetaError::Version(u32_at(block, AT_VERSION)));
        }
        let (in_sync, rebuilding) = sets(block)?;
        let region_blocks = u64_at(block, AT_REGION);
        if !region_blocks.is_power_of_two() {
            return Err(MetaError::RegionBlocks(region_blocks));
        }
        let no_name = |field| move |_| MetaError::Name { field };
        let state = ReplicaState::of(block[AT_STATE])?;
        let record = Config {
            lineage: Lineage::new(text(block, AT_LINEAGE, "lineage")?).map_err(no_name("lineage"))?,
            epoch: Epoch(u64_at(block, AT_EPOCH)),
            engine_instance: EngineInstance::new(text(block, AT_ENGINE_INSTANCE, "engine_instance")?)
                .map_err(no_name("engine_instance"))?,
            config_number: ConfigNumber(u64_at(block, AT_CONFIG_NUMBER)),
            in_sync,
            rebuilding,
            min_in_sync: u32_at(block, AT_MIN_IN_SYNC),
            size_blocks: u64_at(block, AT_SIZE),
            clean: state == ReplicaState::ClosedClean,
            tree: Tree { version: TreeVersion(u64_at(block, AT_TREE_VERSION)), last: None },
        };
        Ok(Self {
            volume: VolumeId::new(text(block, AT_VOLUME, "volume")?).map_err(no_name("volume"))?,
            replica: ReplicaId::new(text(block, AT_REPLICA, "replica")?).map_err(no_name("replica"))?,
            record,
            block_size: u32_at(block, AT_BLOCK_SIZE),
            region_blocks,
            state,
            instance: text(block, AT_INSTANCE, "instance")?.to_owned(),
            sequence: u64_at(block, AT_SEQUENCE),
        })
    }
}

/// The superblock that counts: the valid slot with the higher sequence number.
#[must_use]
pub fn newest_superblock(slots: &[u8]) -> Option<Superblock> {
    slots.chunks(META_BLOCK_BYTES).take(2).filter_map(|slot| Superblock::decode(slot).ok()).max_by_key(|s| s.sequence)
}

fn check_crc(block: &[u8]) -> Result<(), MetaError> {
    let found = u32_at(block, AT_CRC);
    let mut copy = block.to_vec();
    put(&mut copy, AT_CRC, &[0; 4]);
    let computed = crc_fast::crc32_iscsi(&copy);
    if found == computed { Ok(()) } else { Err(MetaError::Crc { found, computed }) }
}

fn sets(block: &[u8]) -> Result<(BTreeSet<ReplicaId>, BTreeSet<ReplicaId>), MetaError> {
    let in_sync = usize::from(block[AT_IN_SYNC_COUNT]);
    let all = in_sync + usize::from(block[AT_REBUILDING_COUNT]);
    if all > LEGS_MAX || in_sync == 0 {
        let allowed = "1 to 16 names, together with rebuilding, are allowed";
        return Err(MetaError::Field { field: "in_sync", value: in_sync as u64, allowed });
    }
    let name = |i: usize| {
        let value = text(block, AT_NAMES + i * NAME_FIELD, "in_sync")?;
        ReplicaId::new(value).map_err(|_| MetaError::Name { field: "in_sync" })
    };
    let first = (0..in_sync).map(name).collect::<Result<BTreeSet<_>, _>>()?;
    let second = (in_sync..all).map(name).collect::<Result<BTreeSet<_>, _>>()?;
    if first.len() + second.len() != all || !first.is_disjoint(&second) {
        return Err(MetaError::Name { field: "rebuilding" });
    }
    Ok((first, second))
}

fn put_text(block: &mut [u8], at: usize, value: &str) {
    put(block, at, &[value.len() as u8]);
    put(block, at + 1, value.as_bytes());
}

fn text<'a>(block: &'a [u8], at: usize, field: &'static str) -> Result<&'a str, MetaError> {
    let max = if field == "instance" { INSTANCE_BYTES_MAX } else { NAME_BYTES_MAX };
    let len = usize::from(array::<1>(block, at)[0]);
    if len > max {
        return Err(MetaError::Name { field });
    }
    let bytes = block.get(at + 1..at + 1 + len).unwrap_or_default();
    std::str::from_utf8(bytes).map_err(|_| MetaError::Name { field })
}
