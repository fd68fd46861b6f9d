//! The product's opener and core in a world small enough to try every order: one block, a few replicas, two engines.
//!
//! *What it is.* The duties of a runner, and around them what can be put in any order: writes that land, promotes,
//! swaps that are executed heard or unheard, connections that break, engines that die and start, time that passes.
//! What nobody can notice the order of (reads, flushes, probes, sessions) is answered at once.
//!
//! *Time.* All of the product's waits are shorter than one step of [`Choice::TimePasses`], and nothing is due before.
//!
//! *When something breaks,* [`World::violation`] says what; nothing is possible after it.

#[path = "happening.rs"]
mod happening;
#[path = "runner.rs"]
mod runner;

use std::collections::{BTreeMap, VecDeque};
use std::fmt::Write as _;
use std::sync::Arc;

use mirror_core::meta::{Geometry, META_BLOCK_BYTES, RegionBits, SUPERBLOCK_SLOTS, decode_bits, newest_superblock};
use mirror_core::{
    Config, ConfigNumber, ConfigVersion, Core, EngineInstance, Epoch, HostId, Input, IoId, LegId, LegInit, Lineage,
    MetaInit, Op, OpenInput, OpenParams, Opener, Options, PlantedBug, ReplicaId, SwapId, VolumeId,
};

/// One step of time: longer than the lease, its margin and every other wait.
const STEP: u64 = 100;

/// How far it goes.
#[derive(Debug, Clone, Copy)]
pub struct Bounds {
    pub replicas: usize,
    pub members: usize,
    pub strict: bool,
    pub instances: u64,
    pub writes: u64,
    pub reads: u64,
    pub breaks: u32,
    pub unheard: u32,
    pub joins: u32,
    /// Replicas keep write-intent bits.
    pub bits: bool,
    pub times: u64,
    pub bug: Option<PlantedBug>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Choice {
    Start(usize),
    Promote(usize, usize),
    Settle(usize),
    LateSwap(usize),
    Timeout(usize),
    Land(usize),
    LandBits(usize),
    Fence(usize, LegId),
    Break(usize, LegId),
    Reattach(usize, LegId),
    Rejoin(usize, usize),
    Write(usize),
    Read(usize),
    TimePasses,
    Die(usize),
}

#[derive(Debug)]
enum Job {
    Opening(Box<Opener>),
    Serving(Box<Core>),
    Finished,
}

#[derive(Debug)]
struct Leg {
    replica: usize,
    up: bool,
    /// Sent on a session that a newer engine has ended.
    stuck: Vec<IoId>,
}

#[derive(Debug)]
struct Process {
    instance: EngineInstance,
    epoch: Epoch,
    job: Job,
    legs: BTreeMap<LegId, Leg>,
    promotes: Vec<usize>,
    values: BTreeMap<HostId, u64>,
    /// For a read what it must at least return, for a write whether a newer engine served when it began.
    begun: BTreeMap<HostId, (Op, u64, bool)>,
    copies: Vec<u64>,
    wake: u64,
}

impl Process {
    fn new(instance: EngineInstance, epoch: Epoch, job: Job) -> Self {
        Self {
            instance,
            epoch,
            job,
            legs: BTreeMap::new(),
            promotes: Vec::new(),
            values: BTreeMap::new(),
            begun: BTreeMap::new(),
            copies: Vec::new(),
            wake: u64::MAX,
        }
    }
}

#[derive(Debug)]
struct DiskIo {
    value: u64,
    /// Who hears of it; nobody when the session has ended.
    owner: Option<(usize, LegId, IoId)>,
}

/// A meta area; as text it is what it says, not its bytes.
#[derive(Default)]
struct Area(Vec<u8>);

impl std::fmt::Debug for Area {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (superblocks, bits) = self.0.split_at(self.0.len().min(SUPERBLOCK_SLOTS as usize * META_BLOCK_BYTES));
        let known = newest_superblock(superblocks)
            .map(|s| (s.record.epoch, s.record.config_number, s.record.in_sync, s.record.rebuilding));
        write!(f, "{known:?} {}", set_bits(bits))
    }
}

/// Blocks of the bitmap; as text likewise.
struct Bits(Arc<[u8]>);

impl std::fmt::Debug for Bits {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", set_bits(&self.0))
    }
}

/// How many regions are set, of the one that there is.
fn set_bits(bytes: &[u8]) -> u32 {
    decode_bits(&Geometry::for_volume(1, 512).unwrap(), bytes).0.count()
}

#[derive(Debug)]
struct MetaWrite {
    at: usize,
    bytes: Bits,
    owner: Option<(usize, LegId, IoId)>,
}

#[derive(Debug, Default)]
struct Replica {
    data: u64,
    epoch: Epoch,
    instance: Option<EngineInstance>,
    session: Option<(usize, LegId)>,
    disk: Option<DiskIo>,
    /// Superblocks and bits; empty when it keeps none.
    meta: Area,
    /// Bits on their way to the disk, in order.
    keeping: Vec<MetaWrite>,
}

#[derive(Debug)]
struct Request {
    swap: SwapId,
    expect: ConfigVersion,
    next: Config,
    /// Who waits for the answer.
    waits: Option<usize>,
    executed: bool,
}

enum Feed {
    Core(usize, Input),
    Opener(usize, OpenInput),
}

/// What happened, to tell a check that did nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Happened {
    Acknowledged,
    AcknowledgedAfterTakeover,
    Read,
    Left,
    Joined,
    Opened,
    OpenedWithoutAll,
    Unheard,
    Stopped,
    Replayed,
}

#[derive(Debug)]
pub struct World {
    bounds: Bounds,
    now: u64,
    record: Config,
    requests: Vec<Request>,
    replicas: Vec<Replica>,
    engines: [Option<Process>; 2],
    instances: u64,
    written: u64,
    reads: u64,
    breaks: u32,
    unheard: u32,
    joins: u32,
    next_host: u64,
    acknowledged: u64,
    floor: u64,
    feed: VecDeque<Feed>,
    pub happened: Vec<Happened>,
    pub violation: Option<String>,
}

fn replica_id(index: usize) -> ReplicaId {
    ReplicaId::new(&format!("r{index}")).unwrap()
}

fn replica_index(id: &ReplicaId) -> usize {
    id.as_str()[1..].parse().unwrap()
}

impl std::fmt::Debug for Feed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("feed")
    }
}

impl World {
    /// An engine serves at epoch 1; members hold value 1, which was acknowledged, the others hold 0.
    pub fn new(bounds: Bounds) -> Self {
        let instance = EngineInstance::new("e1").unwrap();
        let members: Vec<usize> = (0..bounds.members).collect();
        let record = Config {
            lineage: Lineage::new("l1").unwrap(),
            epoch: Epoch(1),
            engine_instance: instance.clone(),
            config_number: ConfigNumber(1),
            in_sync: members.iter().map(|r| replica_id(*r)).collect(),
            rebuilding: [].into(),
            min_in_sync: if bounds.strict { 2 } else { 1 },
            size_blocks: 1,
            clean: false,
            tree: Default::default(),
        };
        let mut replicas: Vec<Replica> = (0..bounds.replicas).map(|_| Replica::default()).collect();
        for r in &members {
            replicas[*r] = Replica { data: 1, epoch: Epoch(1), instance: Some(instance.clone()), ..Replica::default() };
        }
        if bounds.bits {
            let blocks = usize::try_from(Geometry::for_volume(1, 512).unwrap().blocks()).unwrap();
            replicas.iter_mut().for_each(|r| r.meta = Area(vec![0; blocks * META_BLOCK_BYTES]));
        }
        let mut world = Self {
            bounds,
            now: 1,
            record: record.clone(),
            requests: Vec::new(),
            replicas,
            engines: [None, None],
            instances: 1,
            written: 1,
            reads: 0,
            breaks: 0,
            unheard: 0,
            joins: 0,
            next_host: 0,
            acknowledged: 1,
            floor: 1,
            feed: VecDeque::new(),
            happened: Vec::new(),
            violation: None,
        };
        let legs = members.iter().map(|r| LegInit {
            leg: LegId(u32::try_from(*r).unwrap()),
            replica: replica_id(*r),
            local: false,
            up: true,
            meta: bounds.bits,
            instance: String::new(),
            changed: false,
        });
        let params = OpenParams {
            volume: VolumeId::new("v1").unwrap(),
            block_size: 512,
            num_blocks: 1,
            config: record,
            legs: legs.collect(),
            equalise_from: None,
            flushed: true,
            hosts_must_detach: false,
            meta: bounds.bits.then(|| MetaInit { inherited: RegionBits::empty(1), served: None }),
            options: world.options(),
        };
        world.engines[0] = Some(Process::new(instance, Epoch(1), Job::Finished));
        for r in members {
            let leg = LegId(u32::try_from(r).unwrap());
            world.replicas[r].session = Some((0, leg));
            world.process(0).legs.insert(leg, Leg { replica: r, up: true, stuck: Vec::new() });
        }
        world.serve(0, params);
        world.settle_feed();
        world.land_all_bits();
        world
    }

    fn options(&self) -> Options {
        Options {
            grace_ns: 1,
            grace_long_ns: 1,
            swap_retry_ns: 0,
            max_inflight: 8,
            copy_window_blocks: 1,
            copy_queue_depth: 1,
            prefer_local: false,
            lease_ns: STEP / 2,
            lease_hold_ns: 100 * STEP,
            region_blocks: 0,
            live_regions_max: 1,
            clear_idle_ns: STEP / 2,
            snapshot_hold_max_ns: STEP,
            bug: self.bounds.bug,
        }
    }

    fn process(&mut self, e: usize) -> &mut Process {
        self.engines[e].as_mut().unwrap()
    }

    fn fail(&mut self, what: String) {
        self.violation.get_or_insert(what);
    }
}
