//! Opening a core: what its parameters may be.
//!
//! *What it is.* Checks of [`OpenParams`] and the first state of the legs.
//!
//! *When things fail.* [`CoreError`] names the parameter, its value and what is allowed; nothing was started.

use crate::LEGS_MAX;
use crate::config::{ConfigError, ReplicaId};
use crate::events::Nanos;
use crate::legmeta::LegMeta;
use crate::legs::{Leg, Legs, Link, Role};
use crate::meta::{Geometry, INSTANCE_BYTES_MAX, MetaError, RegionBits};
use crate::params::{LegInit, OpenParams};
use crate::wib::Wib;

/// Most bytes of a copy window, so that buffers stay modest: 16 MiB.
const COPY_WINDOW_BYTES_MAX: u64 = 16 << 20;
/// Window when none is given: 1 MiB.
const COPY_WINDOW_BYTES_DEFAULT: u64 = 1 << 20;
/// Most copies at a time.
const COPY_QUEUE_DEPTH_MAX: u32 = 64;
/// Most host commands in flight that may be configured.
const INFLIGHT_MAX: u32 = 65_536;

/// Parameters that contradict each other.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CoreError {
    /// The record breaks an invariant.
    #[error("config: {0}")]
    Config(#[from] ConfigError),
    /// Not a block size.
    #[error("block_size is {0}: a power of two from 512 to 65536 is allowed")]
    BlockSize(u32),
    /// Two sizes.
    #[error("num_blocks is {num_blocks}: the record says {recorded}")]
    Size {
        /// Given.
        num_blocks: u64,
        /// Recorded.
        recorded: u64,
    },
    /// A member without a leg.
    #[error("member {0} of in_sync has no leg: one is required for every member")]
    MemberWithoutLeg(ReplicaId),
    /// A leg whose replica is in neither set, twice there, or with a number too large or taken.
    #[error(
        "leg {leg} for replica {replica} is not allowed: the replica must be in in_sync or rebuilding, once, and the number free and below {LEGS_MAX}"
    )]
    Leg {
        /// Number.
        leg: u32,
        /// Replica.
        replica: ReplicaId,
    },
    /// The leg to copy from is not a member.
    #[error("equalise_from is leg {0}: it must be a member of in_sync")]
    EqualiseFrom(u32),
    /// The meta areas cannot have this layout.
    #[error("meta: {0}")]
    Meta(#[from] MetaError),
    /// Inherited regions of another layout.
    #[error("meta.inherited has {given} regions: the volume has {regions}")]
    Regions {
        /// Given.
        given: u32,
        /// By the layout.
        regions: u32,
    },
    /// Two ways to make members equal.
    #[error("equalise_from is leg {0} and meta is given: only one of them is allowed")]
    EqualiseWithBits(u32),
    /// A bound out of range.
    #[error("{name} is {value}: {min} to {max} are allowed")]
    Bound {
        /// Which option.
        name: &'static str,
        /// Given.
        value: u64,
        /// Least.
        min: u64,
        /// Most.
        max: u64,
    },
}

pub(crate) fn check_bounds(params: &mut OpenParams) -> Result<(), CoreError> {
    if !params.block_size.is_power_of_two() || !(512..=65_536).contains(&params.block_size) {
        return Err(CoreError::BlockSize(params.block_size));
    }
    let block = u64::from(params.block_size);
    let options = &mut params.options;
    if options.copy_window_blocks == 0 {
        options.copy_window_blocks = u32::try_from(COPY_WINDOW_BYTES_DEFAULT / block).unwrap_or(1);
    }
    let bound = |name, value: u32, max: u64| {
        let value = u64::from(value);
        if (1..=max).contains(&value) { Ok(()) } else { Err(CoreError::Bound { name, value, min: 1, max }) }
    };
    bound("copy_window_blocks", options.copy_window_blocks, COPY_WINDOW_BYTES_MAX / block)?;
    bound("copy_queue_depth", options.copy_queue_depth, u64::from(COPY_QUEUE_DEPTH_MAX))?;
    bound("live_regions_max", options.live_regions_max, crate::meta::REGIONS_MAX)?;
    bound("max_inflight", options.max_inflight, u64::from(INFLIGHT_MAX))
}

/// The bits to start with, when the volume has meta areas.
pub(crate) fn open_wib(params: &mut OpenParams) -> Result<Option<Wib>, CoreError> {
    let Some(meta) = params.meta.take() else { return Ok(None) };
    if let Some(leg) = params.equalise_from {
        return Err(CoreError::EqualiseWithBits(leg.0));
    }
    let options = &params.options;
    let geometry = geometry(params.num_blocks, params.block_size, options.region_blocks)?;
    if meta.inherited.len() != geometry.regions() {
        return Err(CoreError::Regions { given: meta.inherited.len(), regions: geometry.regions() });
    }
    // Nobody knows where a member that lost its cache lacks something.
    let changed = params.legs.iter().any(|leg| leg.changed);
    let inherited = if changed { RegionBits::full(geometry.regions()) } else { meta.inherited };
    #[allow(unused_mut)]
    let mut wib = Wib::new(geometry, inherited, options.live_regions_max, params.config.epoch);
    #[cfg(feature = "planted-bugs")]
    {
        wib.keeps_cooling = options.bug == Some(crate::PlantedBug::Rule18ClearThoughWritten);
        wib.ready_at_once = options.bug == Some(crate::PlantedBug::Rule18DataBeforeBits);
        wib.stamps.keeps_dirty = options.bug == Some(crate::PlantedBug::Rule09DirtyNotStamped);
        let number = u32::try_from(params.config.config_number.0).unwrap_or(u32::MAX);
        wib.stamps.by_number = (options.bug == Some(crate::PlantedBug::Rule08StampsByNumber)).then_some(number);
    }
    // What members may differ in is changed by this engine.
    wib.stamp_inherited();
    Ok(Some(wib))
}

/// The layout of a volume's meta areas; `region_blocks` 0 is the usual one of its size.
pub(crate) fn geometry(size_blocks: u64, block_size: u32, region_blocks: u64) -> Result<Geometry, MetaError> {
    match region_blocks {
        0 => Geometry::for_volume(size_blocks, block_size),
        given => Geometry::new(size_blocks, given),
    }
}

/// An instance that a superblock has room for; one that is longer tells nothing, like none.
pub(crate) fn known_instance(instance: &str) -> String {
    if instance.len() > INSTANCE_BYTES_MAX { String::new() } else { instance.to_owned() }
}

pub(crate) fn open_legs(params: &OpenParams, wib: Option<&Wib>) -> Result<Legs, CoreError> {
    let mut legs = Legs::new();
    for LegInit { leg, replica, local, up, meta, instance, changed } in &params.legs {
        let role = if params.config.in_sync.contains(replica) { Role::Member } else { Role::Announced };
        // The grace window of a leg that is not up begins with the first input, which brings the time.
        let link = if *up { Link::Up } else { Link::Lost { since: Nanos::MAX, announced: false } };
        let known = role == Role::Member || params.config.rebuilding.contains(replica);
        let mut fresh = Leg::new(*leg, replica.clone(), *local, role, link);
        fresh.instance = known_instance(instance);
        // Never read from until all regions are equal.
        (fresh.changed, fresh.unequal) = (*changed, *changed);
        // What an older engine wrote there may not be flushed yet.
        fresh.changes = u64::from(!params.flushed);
        fresh.meta = wib.filter(|_| *meta).map(|w| Box::new(LegMeta::new(&w.geometry)));
        if !known || !legs.insert(fresh) {
            return Err(CoreError::Leg { leg: leg.0, replica: replica.clone() });
        }
    }
    let without = params.config.in_sync.iter().find(|r| !legs.iter().any(|l| l.replica == **r));
    match without {
        // Rule 15 broken on purpose opens with members that have no leg.
        #[cfg(feature = "planted-bugs")]
        Some(_) if params.options.bug == Some(crate::PlantedBug::Rule15OpenKeepsUnpromoted) => Ok(legs),
        Some(replica) => Err(CoreError::MemberWithoutLeg(replica.clone())),
        None => Ok(legs),
    }
}
