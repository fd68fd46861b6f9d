//! A bench around one core: gives inputs, keeps what was asked for and not yet answered.
#![allow(dead_code, clippy::unwrap_used)]

pub mod opening;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use mirror_core::MetaInit;
use mirror_core::meta::{Geometry, META_BLOCK_BYTES, RegionBits, ReplicaState, Superblock, decode_bits};

use mirror_core::{
    Action, Config, ConfigNumber, ConfigVersion, Core, DropReason, EngineInstance, Epoch, Event, HostId, HostResult,
    Input, IoId, LegError, LegId, LegInit, Lineage, MetaOp, Nanos, Op, OpenParams, Options, Payload, ReplicaId,
    SnapshotError, SnapshotId, StopReason, SwapId, SwapOutcome, SwapReason, TreeVersion, VolumeId,
};

pub const MS: Nanos = 1_000_000;
pub const BLOCKS: u64 = 64;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Io {
    pub leg: LegId,
    pub io: IoId,
    pub op: Op,
    pub lba: u64,
    pub blocks: u32,
    pub payload: Payload,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Meta {
    pub leg: LegId,
    pub io: IoId,
    pub op: MetaOp,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SwapAsked {
    pub swap: SwapId,
    pub expect: ConfigVersion,
    pub next: Config,
    pub reason: SwapReason,
}

pub fn replica(name: &str) -> ReplicaId {
    ReplicaId::new(name).unwrap()
}

pub fn set(names: &[&str]) -> BTreeSet<ReplicaId> {
    names.iter().map(|n| replica(n)).collect()
}

pub fn config(in_sync: &[&str], rebuilding: &[&str], min: u32) -> Config {
    Config {
        lineage: Lineage::new("l").unwrap(),
        epoch: Epoch(5),
        engine_instance: EngineInstance::new("e5").unwrap(),
        config_number: ConfigNumber(10),
        in_sync: set(in_sync),
        rebuilding: set(rebuilding),
        min_in_sync: min,
        size_blocks: BLOCKS,
        clean: false,
        tree: Default::default(),
    }
}

pub fn params(in_sync: &[&str], rebuilding: &[&str], min: u32) -> OpenParams {
    let legs = (0u32..)
        .zip(in_sync.iter().chain(rebuilding))
        .map(|(i, name)| LegInit {
            leg: LegId(i),
            replica: replica(name),
            local: false,
            up: true,
            meta: false,
            instance: String::new(),
            changed: false,
        })
        .collect();
    OpenParams {
        volume: VolumeId::new("v").unwrap(),
        block_size: 512,
        num_blocks: BLOCKS,
        config: config(in_sync, rebuilding, min),
        legs,
        equalise_from: None,
        meta: None,
        flushed: true,
        hosts_must_detach: false,
        options: Options { copy_window_blocks: 16, copy_queue_depth: 2, max_inflight: 32, ..Options::default() },
    }
}

/// Blocks of a region in volumes with meta areas.
pub const REGION: u64 = 4;

pub fn geometry() -> Geometry {
    Geometry::new(BLOCKS, REGION).unwrap()
}

pub fn regions(set: &[u32]) -> RegionBits {
    let mut bits = RegionBits::empty(geometry().regions());
    set.iter().for_each(|r| bits.insert(*r));
    bits
}

/// All replicas have a meta area; these regions are inherited.
pub fn with_bits(in_sync: &[&str], rebuilding: &[&str], min: u32, inherited: &[u32]) -> OpenParams {
    let mut params = params(in_sync, rebuilding, min);
    params.meta = Some(MetaInit { inherited: regions(inherited), served: Some(Epoch(4)) });
    params.legs.iter_mut().for_each(|l| l.meta = true);
    params.options.region_blocks = REGION;
    params
}

impl Meta {
    /// The regions that a write of bits says.
    pub fn bits(&self) -> Option<Vec<u32>> {
        match &self.op {
            MetaOp::Write { block: 2, data } => Some(decode_bits(&geometry(), data).0.iter().collect()),
            _ => None,
        }
    }

    pub fn superblock(&self) -> Option<Superblock> {
        match &self.op {
            MetaOp::Write { block: 0 | 1, data } => Some(Superblock::decode(data).unwrap()),
            _ => None,
        }
    }
}

pub struct Bench {
    pub core: Core,
    pub now: Nanos,
    pub ios: Vec<Io>,
    pub metas: Vec<Meta>,
    pub done: Vec<(HostId, HostResult)>,
    pub swaps: Vec<SwapAsked>,
    pub drops: Vec<(LegId, DropReason)>,
    pub events: Vec<Event>,
    pub stopped: Option<StopReason>,
    pub closed: bool,
    /// Snapshots that members are to take.
    pub held: Vec<(SnapshotId, Vec<ReplicaId>)>,
    /// Snapshots that ended.
    pub snapshots: Vec<(SnapshotId, Result<TreeVersion, SnapshotError>)>,
    pub wake: Option<Nanos>,
    /// Probes of the lease; answered at once unless `hold_probes`.
    pub probes: Vec<Io>,
    pub hold_probes: bool,
    /// The meta area of each leg.
    pub disks: BTreeMap<LegId, Vec<u8>>,
    next_host: u64,
}

impl Bench {
    pub fn new(params: OpenParams) -> Self {
        Self::with_disks(params, BTreeMap::new())
    }

    /// With meta areas that hold something.
    pub fn with_disks(params: OpenParams, disks: BTreeMap<LegId, Vec<u8>>) -> Self {
        let mut bench = Self {
            core: Core::open(params).unwrap(),
            now: 1,
            ios: Vec::new(),
            metas: Vec::new(),
            done: Vec::new(),
            swaps: Vec::new(),
            drops: Vec::new(),
            events: Vec::new(),
            stopped: None,
            closed: false,
            held: Vec::new(),
            snapshots: Vec::new(),
            wake: None,
            probes: Vec::new(),
            hold_probes: false,
            disks,
            next_host: 0,
        };
        bench.input(Input::Tick);
        bench
    }

    /// Members only, available mode.
    pub fn of(members: &[&str]) -> Self {
        Self::new(params(members, &[], 1))
    }

    pub fn input(&mut self, input: Input) {
        let mut out = Vec::new();
        self.core.apply(self.now, input, &mut out);
        for action in out {
            match action {
                Action::LegIo { leg, io, op, lba, blocks, payload: Payload::Probe } => {
                    assert_eq!((op, lba, blocks), (Op::Read, 0, 1));
                    self.probes.push(Io { leg, io, op, lba, blocks, payload: Payload::Probe });
                }
                Action::LegIo { leg, io, op, lba, blocks, payload } => {
                    self.ios.push(Io { leg, io, op, lba, blocks, payload });
                }
                Action::MetaIo { leg, io, op } => self.metas.push(Meta { leg, io, op }),
                Action::HostDone { id, result } => self.done.push((id, result)),
                Action::Swap { swap, expect, next, reason } => {
                    self.swaps.push(SwapAsked { swap, expect, next: *next, reason });
                }
                Action::WakeAt { at } => self.wake = Some(at),
                Action::LegDrop { leg, reason } => self.drops.push((leg, reason)),
                Action::Progress { .. } => {}
                Action::Event(event) => self.events.push(event),
                Action::Stopped { reason } => self.stopped = Some(reason),
                Action::Closed => self.closed = true,
                Action::SnapshotHeld { id, members } => self.held.push((id, members)),
                Action::SnapshotDone { id, result } => self.snapshots.push((id, result)),
            }
        }
        while !self.hold_probes
            && let Some(io) = self.probes.pop()
        {
            self.input(Input::LegDone { leg: io.leg, io: io.io, result: Ok(()) });
        }
    }

    pub fn host(&mut self, op: Op, lba: u64, blocks: u32) -> HostId {
        self.next_host += 1;
        let id = HostId(self.next_host);
        self.input(Input::Host { id, op, lba, blocks });
        id
    }

    pub fn write(&mut self, lba: u64, blocks: u32) -> HostId {
        self.host(Op::Write { fua: false }, lba, blocks)
    }

    pub fn read(&mut self, lba: u64, blocks: u32) -> HostId {
        self.host(Op::Read, lba, blocks)
    }

    /// Ends one I/O on a meta area.
    pub fn finish_meta(&mut self, meta: &Meta, result: Result<(), LegError>) {
        self.metas.retain(|other| other.io != meta.io);
        let (leg, io) = (meta.leg, meta.io);
        let disk = self.disks.entry(leg).or_insert_with(|| vec![0; 64 * META_BLOCK_BYTES]);
        match (&meta.op, result) {
            (MetaOp::Read { block, blocks }, Ok(())) => {
                let at = *block as usize * META_BLOCK_BYTES;
                let data = Arc::from(&disk[at..at + *blocks as usize * META_BLOCK_BYTES]);
                self.input(Input::MetaRead { leg, io, data });
            }
            (MetaOp::Write { block, data }, Ok(())) => {
                let at = *block as usize * META_BLOCK_BYTES;
                disk[at..at + data.len()].copy_from_slice(data);
                self.input(Input::LegDone { leg, io, result });
            }
            (_, result) => self.input(Input::LegDone { leg, io, result }),
        }
    }

    /// Ends all I/O on meta areas until there is none.
    pub fn settle_meta(&mut self) {
        for _ in 0..1000 {
            match self.metas.first().cloned() {
                Some(meta) => self.finish_meta(&meta, Ok(())),
                None => return,
            }
        }
        panic!("the core never stops writing to meta areas");
    }

    /// The bits that are being written: leg and regions.
    pub fn bit_writes(&self) -> Vec<(u32, Vec<u32>)> {
        self.metas.iter().filter_map(|m| m.bits().map(|bits| (m.leg.0, bits))).collect()
    }

    /// I/O of a host command that is in flight.
    pub fn ios_of(&self, id: HostId) -> Vec<Io> {
        self.ios.iter().filter(|io| io.payload == Payload::Host(id)).copied().collect()
    }

    pub fn legs_of(&self, id: HostId) -> Vec<u32> {
        self.ios_of(id).iter().map(|io| io.leg.0).collect()
    }

    pub fn finish(&mut self, io: Io, result: Result<(), LegError>) {
        self.ios.retain(|other| other.io != io.io);
        self.input(Input::LegDone { leg: io.leg, io: io.io, result });
    }

    /// Ends a host command's I/O on one leg.
    pub fn reply(&mut self, id: HostId, leg: u32, result: Result<(), LegError>) {
        let io = self.ios_of(id).into_iter().find(|io| io.leg == LegId(leg));
        self.finish(io.unwrap_or_else(|| panic!("{id:?} has nothing in flight on leg {leg}")), result);
    }

    pub fn reply_all(&mut self, id: HostId) {
        for io in self.ios_of(id) {
            self.finish(io, Ok(()));
        }
    }

    /// Ends everything in flight with success until nothing is.
    pub fn settle_io(&mut self) {
        for _ in 0..10_000 {
            match self.ios.first().copied() {
                Some(io) => self.finish(io, Ok(())),
                None => return,
            }
        }
        panic!("the core never stops sending");
    }

    pub fn result_of(&self, id: HostId) -> Option<HostResult> {
        let mut results = self.done.iter().filter(|(done, _)| *done == id);
        let first = results.next().map(|(_, r)| *r);
        assert!(results.next().is_none(), "{id:?} was answered twice");
        first
    }

    pub fn lose(&mut self, leg: u32) {
        self.ios.retain(|io| io.leg != LegId(leg));
        self.probes.retain(|io| io.leg != LegId(leg));
        self.metas.retain(|meta| meta.leg != LegId(leg));
        self.input(Input::LegLost { leg: LegId(leg), announced: false });
    }

    pub fn back(&mut self, leg: u32) {
        self.input(Input::LegBack { leg: LegId(leg), cache_lost: false });
    }

    pub fn advance(&mut self, by: Nanos) {
        self.now += by;
        self.input(Input::Tick);
    }

    pub fn answer(&mut self, outcome: SwapOutcome) {
        let asked = self.swaps.remove(0);
        self.input(Input::SwapAnswer { swap: asked.swap, outcome });
    }

    pub fn commit(&mut self) {
        self.answer(SwapOutcome::Committed);
    }

    pub fn asked(&self) -> &SwapAsked {
        assert_eq!(self.swaps.len(), 1, "exactly one swap is expected: {:?}", self.swaps);
        &self.swaps[0]
    }

    pub fn copies(&self) -> Vec<Io> {
        self.ios.iter().filter(|io| matches!(io.payload, Payload::Copy(_))).copied().collect()
    }

    pub fn has_event(&self, wanted: impl Fn(&Event) -> bool) -> bool {
        self.events.iter().any(wanted)
    }
}

/// The superblock of a member, as an engine of that epoch left it.
pub fn superblock(name: &str, epoch: u64, instance: &str) -> Superblock {
    Superblock {
        volume: VolumeId::new("v").unwrap(),
        replica: replica(name),
        record: Config { epoch: Epoch(epoch), ..config(&["a"], &[], 1) },
        block_size: 512,
        region_blocks: REGION,
        state: ReplicaState::Member,
        instance: instance.to_owned(),
        sequence: 4,
    }
}

/// Open, with bits and superblocks everywhere.
pub fn opened(in_sync: &[&str], inherited: &[u32]) -> Bench {
    let mut b = Bench::new(with_bits(in_sync, &[], 1, inherited));
    b.settle_meta();
    b
}

/// Makes a region live, without a write in flight.
pub fn warm(b: &mut Bench, region: u32) {
    let w = b.write(u64::from(region) * REGION, 1);
    b.settle_meta();
    b.reply_all(w);
    assert_eq!(b.result_of(w), Some(Ok(())));
}
