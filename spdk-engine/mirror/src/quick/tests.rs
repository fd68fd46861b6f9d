//! The quick way and the general one give the same actions, whatever comes in.

use std::sync::Arc;

use proptest::prelude::*;

use super::*;
use crate::events::{Action, Input, LegError, MetaOp, Payload, SwapId, SwapOutcome};
use crate::meta::{Geometry, META_BLOCK_BYTES, RegionBits};
use crate::{
    Config, ConfigNumber, EngineInstance, Epoch, LegInit, Lineage, MetaInit, OpenParams, Options, ReplicaId,
    SnapshotId, VolumeId,
};

const BLOCKS: u64 = 4096;
const REGION: u64 = 512;
const MS: Nanos = 1_000_000;

#[derive(Debug, Clone)]
enum Step {
    Host { op: u8, lba: u64, blocks: u32 },
    Finish { pick: usize, result: u8 },
    FinishAll,
    Lost(u32),
    Back(u32),
    Swap { pick: u8 },
    Add(u8),
    Remove(u32),
    Pass(u64),
    Snapshot(u8),
    Close,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        200 => (0u8..12, 0u64..511, prop_oneof![4 => Just(8u32), 1 => 1u32..700])
            .prop_map(|(op, at, blocks)| Step::Host { op, lba: at * 8, blocks }),
        300 => (any::<usize>(), 0u8..200).prop_map(|(pick, result)| Step::Finish { pick, result }),
        30 => Just(Step::FinishAll),
        2 => (0u32..4).prop_map(Step::Lost),
        4 => (0u32..4).prop_map(Step::Back),
        4 => (0u8..6).prop_map(|pick| Step::Swap { pick }),
        1 => (3u8..6).prop_map(Step::Add),
        1 => (0u32..6).prop_map(Step::Remove),
        20 => prop_oneof![9 => 0u64..20, 1 => 0u64..6000].prop_map(Step::Pass),
        6 => (0u8..6).prop_map(Step::Snapshot),
        1 => Just(Step::Close),
    ]
}

fn replica(number: u32) -> ReplicaId {
    ReplicaId::new(&format!("r{number}")).unwrap()
}

fn params(bits: bool) -> OpenParams {
    let leg = |number| LegInit {
        leg: LegId(number),
        replica: replica(number),
        local: number == 1,
        up: true,
        meta: bits,
        instance: String::new(),
        changed: false,
    };
    let regions = Geometry::new(BLOCKS, REGION).unwrap().regions();
    OpenParams {
        volume: VolumeId::new("v").unwrap(),
        block_size: 512,
        num_blocks: BLOCKS,
        config: Config {
            lineage: Lineage::new("l").unwrap(),
            epoch: Epoch(5),
            engine_instance: EngineInstance::new("e").unwrap(),
            config_number: ConfigNumber(10),
            in_sync: (0..3).map(replica).collect(),
            rebuilding: std::collections::BTreeSet::new(),
            min_in_sync: 1,
            size_blocks: BLOCKS,
            clean: false,
            tree: crate::Tree::default(),
        },
        legs: (0..3).map(leg).collect(),
        equalise_from: None,
        meta: bits.then(|| MetaInit { inherited: RegionBits::empty(regions), served: None }),
        flushed: true,
        hosts_must_detach: false,
        options: Options {
            copy_window_blocks: 256,
            max_inflight: 32,
            region_blocks: REGION,
            live_regions_max: 6,
            clear_idle_ns: 300 * MS,
            ..Options::default()
        },
    }
}

/// What waits for an answer.
#[derive(Debug, Clone)]
enum Asked {
    Io(LegId, IoId),
    Read(LegId, IoId, u32),
}

impl Asked {
    fn leg(&self) -> LegId {
        match self {
            Asked::Io(leg, _) | Asked::Read(leg, ..) => *leg,
        }
    }

    fn done(self, result: Result<(), LegError>) -> Input {
        match self {
            Asked::Read(leg, io, blocks) if result.is_ok() => {
                Input::MetaRead { leg, io, data: Arc::from(vec![0; blocks as usize * META_BLOCK_BYTES]) }
            }
            Asked::Io(leg, io) | Asked::Read(leg, io, _) => Input::LegDone { leg, io, result },
        }
    }
}

/// One core that goes the quick way, one that goes the general way in the quiet state, and one that always takes the full
/// pass.
struct Three {
    cores: [Core; 3],
    now: Nanos,
    asked: Vec<Asked>,
    swaps: Vec<(SwapId, Config)>,
    record: Config,
    commands: u64,
}

impl Three {
    fn new(bits: bool) -> Self {
        let open = || Core::open(params(bits)).unwrap();
        let mut cores = [open(), open(), open()];
        cores[1].without_quick = true;
        cores[2].without_quick = true;
        let record = params(bits).config;
        let (asked, swaps) = (Vec::new(), Vec::new());
        let mut three = Self { cores, now: 1, asked, swaps, record, commands: 0 };
        three.input(&Input::Tick);
        three
    }

    fn input(&mut self, input: &Input) {
        let mut all: [Vec<Action>; 3] = Default::default();
        self.cores[2].quiet_until = 0;
        for (core, out) in self.cores.iter_mut().zip(&mut all) {
            core.apply(self.now, input.clone(), out);
        }
        let [quick, general, full] = all;
        assert_eq!(quick, general, "{input:?}");
        // In the quiet state nobody asks to be woken; the deadline stands.
        let but_wakes = |list: &[Action]| -> Vec<Action> {
            list.iter().filter(|a| !matches!(a, Action::WakeAt { .. })).cloned().collect()
        };
        assert_eq!(but_wakes(&quick), but_wakes(&full), "{input:?}");
        let mut status = self.cores.each_ref().map(Core::status);
        status.iter_mut().for_each(|s| s.full_passes = 0);
        assert!(status[0] == status[1] && status[0] == status[2], "{input:?}");
        for action in quick {
            self.act(action);
        }
    }

    fn act(&mut self, action: Action) {
        match action {
            Action::LegIo { leg, io, payload, .. } => {
                assert!(payload != Payload::Host(HostId(0)));
                self.asked.push(Asked::Io(leg, io));
            }
            Action::MetaIo { leg, io, op: MetaOp::Read { blocks, .. } } => {
                self.asked.push(Asked::Read(leg, io, blocks))
            }
            Action::MetaIo { leg, io, .. } => self.asked.push(Asked::Io(leg, io)),
            Action::Swap { swap, next, .. } => self.swaps.push((swap, *next)),
            Action::LegDrop { leg, .. } => self.lose(leg),
            _ => {}
        }
    }

    fn lose(&mut self, leg: LegId) {
        self.asked.retain(|asked| asked.leg() != leg);
        self.input(&Input::LegLost { leg, announced: false });
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Host { op, lba, blocks } => {
                self.commands += 1;
                let id = HostId(self.commands);
                let op = match op {
                    0..=4 => Op::Write { fua: op == 0 },
                    5..=9 => Op::Read,
                    10 => Op::Unmap,
                    _ => Op::Flush,
                };
                self.input(&Input::Host { id, op, lba, blocks });
            }
            Step::Finish { pick, result } if !self.asked.is_empty() => {
                let asked = self.asked.swap_remove(pick % self.asked.len());
                let result = match result {
                    0 => Err(LegError::Media),
                    1 => Err(LegError::NoSpace),
                    2 => Err(LegError::Other),
                    _ => Ok(()),
                };
                self.input(&asked.done(result));
            }
            Step::FinishAll => {
                for _ in 0..64 {
                    for asked in std::mem::take(&mut self.asked) {
                        self.input(&asked.done(Ok(())));
                    }
                }
            }
            Step::Lost(leg) => self.lose(LegId(leg)),
            Step::Back(leg) => {
                let lost = self.cores[0].status().lost.contains(&LegId(leg));
                if lost {
                    self.input(&Input::LegBack { leg: LegId(leg), cache_lost: false });
                }
            }
            Step::Swap { pick } => {
                if let Some((swap, next)) = self.swaps.pop() {
                    let outcome = match pick {
                        0 => SwapOutcome::Unknown,
                        1 => SwapOutcome::Refused { current: self.record.clone() },
                        _ => {
                            self.record = next;
                            SwapOutcome::Committed
                        }
                    };
                    self.input(&Input::SwapAnswer { swap, outcome });
                }
            }
            Step::Add(number) => {
                let (leg, replica) = (LegId(u32::from(number)), replica(u32::from(number)));
                self.input(&Input::AddLeg { leg, replica, local: false, meta: true });
            }
            Step::Remove(leg) => self.input(&Input::RemoveLeg { leg: LegId(leg) }),
            Step::Pass(ms) => {
                self.now += ms * MS;
                self.input(&Input::Tick);
            }
            Step::Snapshot(what) => {
                let id = SnapshotId::new("s").unwrap();
                self.input(&match what {
                    0..=2 => Input::SnapshotBegin { id, hold_ns: 500 * MS },
                    3..=4 => Input::SnapshotTaken { id, replicas: (0..3).map(replica).collect() },
                    _ => Input::SnapshotAbort { id },
                });
            }
            Step::Close => self.input(&Input::Close),
            Step::Finish { .. } => {}
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]
    #[test]
    fn the_quick_way_is_the_general_one(bits: bool, steps in proptest::collection::vec(step(), 1..300)) {
        let mut three = Three::new(bits);
        for step in steps {
            three.step(step);
        }
    }
}

#[test]
fn usual_io_goes_the_quick_way() {
    for bits in [false, true] {
        let mut three = Three::new(bits);
        let host = |op, lba| Step::Host { op, lba, blocks: 8 };
        three.step(host(1, 0));
        three.step(Step::FinishAll);
        three.step(host(6, 0));
        three.step(Step::FinishAll);
        let core = &mut three.cores[0];
        let passes = core.full_passes;
        let write = core.quick_host(2, HostId(100), Op::Write { fua: false }, 0, 8).unwrap();
        let read = core.quick_host(2, HostId(101), Op::Read, 8, 8).unwrap();
        assert_eq!((write.ios().count(), read.ios().count()), (3, 1));
        assert_eq!(core.quick_host(2, HostId(102), Op::Read, 4, 8), None, "it overlaps");
        assert_eq!(core.quick_host(2, HostId(102), Op::Flush, 0, 0), None);
        assert_eq!(core.quick_host(2, HostId(102), Op::Read, BLOCKS - 4, 8), None, "it ends beyond the volume");
        assert_eq!(core.quick_host(2, HostId(102), Op::Read, 16, 0), None);
        let cold = core.quick_host(2, HostId(102), Op::Write { fua: false }, REGION * 3, 8);
        assert_eq!(cold.is_none(), bits, "bits first");
        let answers: Vec<_> = write.ios().map(|(leg, io)| core.quick_done(3, leg, io, Nanos::MAX)).collect();
        assert_eq!(answers, [Some(Answered::Waits), Some(Answered::Waits), Some(Answered::Host(HostId(100)))]);
        let (leg, io) = read.ios().next().unwrap();
        assert_eq!(core.quick_done(300, leg, io, 200), None, "late");
        assert_eq!(core.quick_done(300, LegId(leg.0 + 1), io, 500), None, "another leg's");
        assert_eq!(core.quick_done(300, leg, io, 500), Some(Answered::Host(HostId(101))));
        assert_eq!(core.quick_done(300, leg, io, 500), None, "once");
        assert_eq!(core.full_passes, passes);
    }
}
