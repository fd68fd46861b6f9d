//! An engine process: the opener and then the core, with the duties of a runner (sessions, reconnects, swaps).
//!
//! *What it is.* What the agent and the device do in the product, in the smallest form: carries out actions, feeds
//! back outcomes, reconnects lost legs, offers replicas without a leg for rebuilding. A paused process handles
//! nothing; what arrives meanwhile waits in order, as bytes in socket buffers do.
//!
//! *When things fail.* A process that stopped or failed to open stays as it is until the manager starts a new one.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use mirror_core::meta::RegionBits;
use mirror_core::{
    Action, ConfigNumber, Core, EngineInstance, Epoch, Event as CoreEvent, HostId, Input, IoId, LegError, LegId,
    MetaOp, MetaUnreadable, OpenAction, OpenInput, OpenWaits, Opener, OpenerParams, Options, Payload, PromoteError,
    ReplicaFacts, SwapOutcome, SwapReason, VolumeId,
};

use crate::faults::MS;
use crate::model_bug::ModelBug;
use crate::snapshot::Taking;
use crate::suspicion::Losses;
use crate::world::{
    ConnId, ENGINES, EngineRef, Event, HostConn, REGION_BLOCKS, REPLICAS, ToArbiter, ToEngine, ToReplica, World, name,
    replica_id, replica_index,
};

/// The lease of reads in a run: longer than the grace window, as in the product.
const LEASE_NS: u64 = 300 * MS;

/// How long members are waited for when most look bad at once (rule 12).
pub(crate) const GRACE_LONG_NS: u64 = 400 * MS;

/// Copies at a time; buffers behind those, and behind the one for repairs, are for making regions equal.
pub(crate) const COPY_QUEUE_DEPTH: u32 = 2;

#[derive(Debug, Default)]
pub(crate) struct Node {
    pub(crate) process: Option<Process>,
    pub(crate) paused_until: u64,
    /// How long its clock has stood still: never, unless a rule is broken (rule 16).
    pub(crate) clock_stood: u64,
    pub(crate) inbox: VecDeque<ToEngine>,
    /// Engines of this node that have ended when the next one starts here, with all before them (rule 16).
    dead: BTreeSet<EngineInstance>,
    /// All engines that were started here.
    instances: BTreeSet<EngineInstance>,
}

#[derive(Debug)]
pub(crate) enum Job {
    Opening(Box<Opener>),
    Serving(Box<Core>),
    Finished,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct LegState {
    pub(crate) replica: usize,
    pub(crate) conn: Option<ConnId>,
    pub(crate) dropped: bool,
    /// The replica has a meta area.
    pub(crate) meta: bool,
}

/// I/O on a leg that is not answered.
#[derive(Debug, Clone, Copy)]
struct Flight {
    leg: LegId,
    payload: Payload,
    sent: u64,
}

/// What a guest writes into the buffers of its commands that are under way, added to their numbers.
const SCRIBBLE: u64 = 1 << 50;

/// How long a replica may take to answer before its connection is ended.
const IO_TIMEOUT_NS: u64 = 150 * MS;

#[derive(Debug, Clone, Copy)]
enum Purpose {
    Promote,
    Connect(LegId),
    Reattach(LegId),
    Rejoin,
}

#[derive(Debug, Clone, Copy)]
struct Rpc {
    replica: usize,
    purpose: Purpose,
    conn: Option<ConnId>,
}

#[derive(Debug)]
pub(crate) struct Process {
    me: EngineRef,
    pub(crate) job: Job,
    instance: EngineInstance,
    pub(crate) epoch: Epoch,
    pub(crate) legs: BTreeMap<LegId, LegState>,
    /// Instances of replicas as of their last promote or session.
    instances: BTreeMap<usize, String>,
    rpcs: BTreeMap<u64, Rpc>,
    io: BTreeMap<IoId, Flight>,
    /// The newest connection of each host; what comes on an older one is not heard (rule 17).
    hosts: BTreeMap<usize, u64>,
    host_data: BTreeMap<HostId, Vec<u64>>,
    host_values: BTreeMap<HostId, u64>,
    copy_data: Vec<Vec<u64>>,
    /// Swaps that wait for an answer, with the moment the runner gives up on them.
    swaps: BTreeMap<mirror_core::SwapId, u64>,
    /// It serves and reaches nobody, and no swap was under way when that began: it must not eject anybody (rule 12).
    alone: bool,
    pub(crate) losses: Losses,
    reading: bool,
    /// The members' superblocks were seen to carry the record of this number (rule 6).
    pub(crate) carried: Option<ConfigNumber>,
    /// It keeps bits; apart from these, whose meta area failed.
    pub(crate) keeps_bits: bool,
    /// Regions that it found set when it opened.
    pub(crate) inherited: RegionBits,
    pub(crate) meta_failed: Vec<usize>,
    /// The snapshot that its agent is taking.
    pub(crate) snapshot: Option<Taking>,
}

impl Process {
    pub(crate) fn is_serving(&self) -> bool {
        matches!(self.job, Job::Serving(_))
    }

    pub(crate) fn instance(&self) -> &EngineInstance {
        &self.instance
    }

    fn leg_of(&self, replica: usize) -> Option<LegId> {
        self.legs.iter().find(|(_, l)| l.replica == replica).map(|(id, _)| *id)
    }

    fn free_leg(&self) -> LegId {
        let free = (0..).map(LegId).find(|id| !self.legs.contains_key(id));
        free.unwrap_or(LegId(0))
    }
}

impl World {
    /// Starts a new process on a node; one that is there dies.
    pub(crate) fn start_engine(&mut self, node: usize) -> EngineRef {
        let inc = self.fresh_id();
        let me = EngineRef { node, inc };
        let instance = name(EngineInstance::new(&format!("e{node}-{inc}")));
        self.nodes[node].instances.insert(instance.clone());
        self.trace(|| format!("engine {instance} starts"));
        let options = Options {
            grace_ns: 100 * MS,
            grace_long_ns: GRACE_LONG_NS,
            swap_retry_ns: 20 * MS,
            max_inflight: 32,
            copy_window_blocks: 3,
            copy_queue_depth: COPY_QUEUE_DEPTH,
            prefer_local: self.rng.permille(500),
            lease_ns: LEASE_NS,
            lease_hold_ns: 500 * MS,
            region_blocks: REGION_BLOCKS,
            live_regions_max: 4,
            clear_idle_ns: 30 * MS,
            snapshot_hold_max_ns: 250 * MS,
            #[cfg(feature = "planted-bugs")]
            bug: self.scenario.bug,
        };
        let waits = OpenWaits {
            promote_wait_ns: self.rng.range(20 * MS, 200 * MS),
            retry_ns: 20 * MS,
            connect_wait_ns: 100 * MS,
            bits_wait_ns: 100 * MS,
            give_up_ns: 1500 * MS,
            lease_margin_ns: 20 * MS,
        };
        let opener = Opener::new(OpenerParams {
            volume: name(VolumeId::new("v1")),
            block_size: 512,
            engine_instance: instance.clone(),
            lineage: None,
            local: [replica_id(node)].into(),
            dead_engines: self.dead_engines(node),
            in_vain: self.in_vain[node].take(),
            options,
            waits,
        });
        let process = Process {
            me,
            job: Job::Opening(Box::new(opener)),
            instance,
            epoch: Epoch(0),
            legs: BTreeMap::new(),
            instances: BTreeMap::new(),
            rpcs: BTreeMap::new(),
            io: BTreeMap::new(),
            hosts: BTreeMap::new(),
            host_data: BTreeMap::new(),
            host_values: BTreeMap::new(),
            copy_data: Vec::new(),
            swaps: BTreeMap::new(),
            alone: false,
            losses: Losses::default(),
            reading: false,
            carried: None,
            keeps_bits: false,
            inherited: RegionBits::default(),
            meta_failed: Vec::new(),
            snapshot: None,
        };
        self.nodes[node].process = Some(process);
        self.nodes[node].inbox.clear();
        self.feed_opener(me, OpenInput::Start);
        self.post(50 * MS, Event::Engine { to: me, body: ToEngine::AgentStep });
        me
    }

    /// What the agent of a node knows when it starts another engine there, whose predecessor is dead then.
    fn dead_engines(&self, node: usize) -> BTreeSet<EngineInstance> {
        let node = &self.nodes[node];
        if self.breaks(ModelBug::Rule16LastOwnerDead) { node.instances.clone() } else { node.dead.clone() }
    }

    pub(crate) fn process(&mut self, me: EngineRef) -> Option<&mut Process> {
        self.nodes[me.node].process.as_mut().filter(|p| p.me == me)
    }

    pub(crate) fn process_ref(&self, me: EngineRef) -> Option<&Process> {
        self.nodes[me.node].process.as_ref().filter(|p| p.me == me)
    }

    pub(crate) fn kill_engine(&mut self, me: EngineRef) {
        if self.process(me).is_some() {
            self.trace(|| format!("engine {me:?} dies"));
            self.nodes[me.node].process = None;
            self.nodes[me.node].inbox.clear();
        }
    }

    pub(crate) fn is_paused(&self, node: usize) -> bool {
        self.now < self.nodes[node].paused_until
    }

    pub(crate) fn resume(&mut self, node: usize) {
        if self.is_paused(node) {
            return;
        }
        let waiting = std::mem::take(&mut self.nodes[node].inbox);
        let Some(me) = self.nodes[node].process.as_ref().map(|p| p.me) else { return };
        self.trace(|| format!("engine {me:?} goes on with {} events", waiting.len()));
        for body in waiting {
            self.engine_event(me, body);
        }
    }

    pub(crate) fn engine_event(&mut self, to: EngineRef, body: ToEngine) {
        if self.process(to).is_none() || self.outcome.violation.is_some() {
            if let ToEngine::Host { id, .. } = body {
                self.host_done(to, id, Err(mirror_core::HostError::PathGone), None);
            }
            return;
        }
        if self.is_paused(to.node) {
            self.nodes[to.node].inbox.push_back(body);
            return;
        }
        match body {
            ToEngine::Attached { rpc, admitted } => self.attached(to, rpc, Some(admitted)),
            ToEngine::RpcTimeout { rpc } => self.attached(to, rpc, None),
            ToEngine::MetaReply { conn, leg, io, reads, result } => self.meta_reply(to, conn, leg, (io, reads), result),
            ToEngine::IoReply { conn, leg, io, result } => self.io_reply(to, conn, leg, io, result),
            ToEngine::ConnLost { conn } => self.conn_lost(to, conn),
            ToEngine::Record { config } => self.record_read(to, Ok(config)),
            ToEngine::RecordTimeout => self.record_read(to, Err(mirror_core::RecordError::Unavailable)),
            ToEngine::Swapped { swap, outcome } => self.swapped(to, swap, outcome),
            ToEngine::Reattach { leg } => self.reattach(to, leg),
            ToEngine::DropDone { leg } => {
                if let Some(process) = self.process(to) {
                    process.legs.remove(&leg);
                    process.io.retain(|_, flight| flight.leg != leg);
                }
                self.feed_core(to, Input::LegLost { leg, announced: false });
            }
            ToEngine::Tick => match self.process(to).map(|p| &p.job) {
                Some(Job::Opening(_)) => self.feed_opener(to, OpenInput::Tick),
                Some(Job::Serving(_)) => self.feed_core(to, Input::Tick),
                _ => {}
            },
            ToEngine::AgentStep => self.agent_step(to),
            ToEngine::Host { conn, id, op, lba, blocks, value } => {
                if !self.admit_host(to, conn) {
                    return; // Its connection has ended.
                }
                if let Some(process) = self.process(to) {
                    process.host_values.insert(id, value); // Captured once (rule 4).
                }
                if matches!(self.process(to).map(|p| &p.job), Some(Job::Serving(_))) {
                    if op.changes_blocks() {
                        self.note_change(lba, blocks);
                    }
                    self.feed_core(to, Input::Host { id, op, lba, blocks });
                } else {
                    self.host_done(to, id, Err(mirror_core::HostError::PathGone), None);
                }
            }
            ToEngine::Remove { replica } => {
                if let Some(leg) = self.process(to).and_then(|p| p.leg_of(replica)) {
                    self.removal_asked(to, replica);
                    self.feed_core(to, Input::RemoveLeg { leg });
                }
            }
            ToEngine::HostsDetached => self.feed_core(to, Input::HostsDetached),
            ToEngine::Snapshot => self.begin_snapshot(to),
            ToEngine::SnapshotTaken { replica, id, taken } => self.snapshot_taken(to, replica, &id, taken),
            ToEngine::SnapshotTimeout { id } => self.snapshot_timeout(to, &id),
            ToEngine::Close => self.feed_core(to, Input::Close),
        }
    }

    /// Rule 17: a host that comes on a new connection has left the old one. What still arrives there is dead.
    fn admit_host(&mut self, me: EngineRef, conn: HostConn) -> bool {
        let late = self.breaks(ModelBug::Rule17LateCommands);
        let Some(process) = self.process(me) else { return false };
        let newest = process.hosts.entry(conn.client).or_default();
        let admitted = conn.number >= *newest;
        *newest = conn.number.max(*newest);
        if !admitted {
            self.trace(|| format!("{me:?} hears a command of host {} on a connection that has ended", conn.client));
        }
        admitted || late
    }

    fn record_read(&mut self, me: EngineRef, result: Result<mirror_core::Config, mirror_core::RecordError>) {
        let Some(process) = self.process(me) else { return };
        if !std::mem::take(&mut process.reading) {
            return;
        }
        if let Job::Serving(core) = &process.job {
            let ours = core.config();
            if result.is_ok_and(|found| found.lineage != ours.lineage || found.epoch > ours.epoch) {
                process.job = Job::Finished;
                self.trace(|| format!("{me:?} ends: the arbiter knows a newer epoch"));
            }
            return;
        }
        self.feed_opener(me, OpenInput::RecordRead { result });
    }

    /// A replica that would be rebuilt knows a newer epoch: the arbiter is asked, since the core may never notice when none
    /// of its members was fenced.
    fn ask_whether_replaced(&mut self, me: EngineRef) {
        let Some(process) = self.process(me).filter(|p| !p.reading) else { return };
        process.reading = true;
        self.send_arbiter(me, ToArbiter::Read);
        self.post(100 * MS, Event::Engine { to: me, body: ToEngine::RecordTimeout });
    }

    fn swapped(&mut self, me: EngineRef, swap: mirror_core::SwapId, outcome: SwapOutcome) {
        let now = self.now;
        let Some(process) = self.process(me) else { return };
        let Some(deadline) = process.swaps.get(&swap).copied() else { return };
        // The runner's own deadline arrives as `Unknown`; a paused process may find it behind a real answer.
        if outcome == SwapOutcome::Unknown && now < deadline {
            return;
        }
        process.swaps.remove(&swap);
        if outcome == SwapOutcome::Unknown {
            self.outcome.unknown_swaps += 1;
            self.trace(|| format!("swap {swap:?} of {me:?}: unknown"));
        }
        match self.process(me).map(|p| &p.job) {
            Some(Job::Opening(_)) => self.feed_opener(me, OpenInput::CasAnswer { cas: swap, outcome }),
            Some(Job::Serving(_)) => self.feed_core(me, Input::SwapAnswer { swap, outcome }),
            _ => {}
        }
    }

    fn ask_swap(&mut self, me: EngineRef, swap: mirror_core::SwapId, body: ToArbiter) {
        let deadline = self.now + 60 * MS;
        if let Some(process) = self.process(me) {
            process.swaps.insert(swap, deadline);
        }
        self.send_arbiter(me, body);
        let body = ToEngine::Swapped { swap, outcome: SwapOutcome::Unknown };
        self.post_at(deadline, Event::Engine { to: me, body });
    }

    /// What the clock of a node shows.
    fn clock(&self, node: usize) -> u64 {
        self.now.saturating_sub(self.nodes[node].clock_stood)
    }

    pub(crate) fn feed_opener(&mut self, me: EngineRef, input: OpenInput) {
        let now = self.clock(me.node);
        let Some(process) = self.process(me) else { return };
        let Job::Opening(opener) = &mut process.job else { return };
        let mut actions = Vec::new();
        opener.apply(now, input, &mut actions);
        for action in actions {
            self.open_action(me, action);
        }
    }

    fn open_action(&mut self, me: EngineRef, action: OpenAction) {
        match action {
            OpenAction::ReadRecord => {
                if let Some(process) = self.process(me) {
                    process.reading = true;
                }
                self.send_arbiter(me, ToArbiter::Read);
                self.post(100 * MS, Event::Engine { to: me, body: ToEngine::RecordTimeout });
            }
            OpenAction::DoCas { cas, expect, next } => {
                self.ask_swap(me, cas, ToArbiter::Swap { swap: cas, expect, next: Box::new(next) });
            }
            OpenAction::Promote { replica, epoch, .. } => {
                if let Some(process) = self.process(me) {
                    process.epoch = epoch;
                }
                self.ask_attach(me, replica_index(&replica), Purpose::Promote);
            }
            OpenAction::Connect { leg, replica } => {
                let replica = replica_index(&replica);
                if let Some(process) = self.process(me) {
                    process.legs.insert(leg, LegState { replica, conn: None, dropped: false, meta: false });
                }
                self.ask_attach(me, replica, Purpose::Connect(leg));
            }
            OpenAction::ReadMeta { leg, block, blocks } => self.meta_io(me, leg, None, MetaOp::Read { block, blocks }),
            OpenAction::WakeAt { at } => {
                if at < u64::MAX {
                    let at = at + self.nodes[me.node].clock_stood;
                    self.post_at(at, Event::Engine { to: me, body: ToEngine::Tick });
                }
            }
            OpenAction::Event(event) => self.trace(|| format!("{me:?} {event:?}")),
            OpenAction::Ready(params) => self.open_core(me, *params),
            OpenAction::Failed { reason } => {
                self.trace(|| format!("{me:?} did not open: {reason}"));
                if let Some(process) = self.process(me) {
                    let job = std::mem::replace(&mut process.job, Job::Finished);
                    let instance = process.instance.clone();
                    if let Job::Opening(opener) = job {
                        self.in_vain[me.node] = opener.raised_in_vain();
                        if opener.follows_dead() {
                            self.nodes[me.node].dead.insert(instance);
                        }
                    }
                }
                self.manager.failed(me);
            }
        }
    }

    fn open_core(&mut self, me: EngineRef, mut params: mirror_core::OpenParams) {
        // A connection may have come or gone since the opener heard of it.
        for leg in &mut params.legs {
            leg.up = self.process(me).and_then(|p| p.legs.get(&leg.leg)).is_some_and(|l| l.conn.is_some());
        }
        if params.hosts_must_detach {
            let members: Vec<usize> = params.config.in_sync.iter().map(replica_index).collect();
            if !self.hosts_refused(&members) {
                return;
            }
            let after = self.rng.range(MS, 300 * MS);
            self.post(after, Event::Engine { to: me, body: ToEngine::HostsDetached });
        }
        let window = params.options.copy_window_blocks as usize;
        let keeps_bits = params.meta.is_some();
        let inherited = params.meta.as_ref().map_or_else(RegionBits::default, |meta| meta.inherited.clone());
        if let Some(meta) = &params.meta {
            self.outcome.inherited += u64::from(meta.inherited.count());
            self.outcome.inherited_of += u64::from(meta.inherited.len());
            self.note_dirty(&meta.inherited.clone());
        }
        // What such a member lacks nobody knows; without a member's meta area nobody knows when anything changed.
        let tells = |l: &mirror_core::LegInit| l.meta && params.config.in_sync.contains(&l.replica);
        if params.legs.iter().any(|l| l.changed) || !params.legs.iter().any(tells) {
            self.note_unknown(None);
        }
        let legs = params.legs.clone();
        let core = match Core::open(params) {
            Ok(core) => core,
            Err(error) => return self.fail(format!("the core refuses what the opener gave it: {error}")),
        };
        let Some(process) = self.process(me) else { return };
        let instance = process.instance.clone();
        process.keeps_bits = keeps_bits;
        process.inherited = inherited;
        process.copy_data = vec![vec![0; window]; core.copy_slots() as usize];
        process.job = Job::Serving(Box::new(core));
        process.legs.retain(|id, _| legs.iter().any(|l| l.leg == *id));
        for leg in &legs {
            process.instances.insert(replica_index(&leg.replica), leg.instance.clone());
        }
        self.nodes[me.node].dead = [instance].into();
        self.outcome.opens += 1;
        self.trace(|| format!("{me:?} is ready"));
        self.became_ready(me);
        self.snapshot_after_open();
        self.feed_core(me, Input::Tick);
        let now = self.now;
        for leg in legs {
            if !leg.up {
                if let Some(process) = self.process(me) {
                    process.losses.lost(replica_index(&leg.replica), now);
                }
                self.reattach(me, leg.leg);
            }
        }
    }

    /// Asks a replica for a promote or a session. Both name epoch and instance; both end older sessions.
    fn ask_attach(&mut self, me: EngineRef, replica: usize, purpose: Purpose) {
        let rpc = self.fresh_id();
        let conn = match purpose {
            Purpose::Promote => None,
            _ => Some(ConnId(self.fresh_id())),
        };
        let Some(process) = self.process(me) else { return };
        process.rpcs.insert(rpc, Rpc { replica, purpose, conn });
        let (epoch, instance) = (process.epoch, process.instance.clone());
        self.send_replica(me, replica, ToReplica::Attach { rpc, conn, epoch, instance });
        self.post(50 * MS, Event::Engine { to: me, body: ToEngine::RpcTimeout { rpc } });
    }

    /// A replica's answer; `None` when none came in time, `Some(None)` when it refuses.
    fn attached(&mut self, me: EngineRef, rpc: u64, admitted: Option<Option<ReplicaFacts>>) {
        let Some(process) = self.process(me) else { return };
        let Some(Rpc { replica, purpose, conn }) = process.rpcs.remove(&rpc) else { return };
        let serving = matches!(process.job, Job::Serving(_));
        if conn.is_some() && matches!(admitted, Some(Some(_))) {
            self.reached(me, replica);
        }
        let Some(process) = self.process(me) else { return };
        match purpose {
            Purpose::Promote => {
                let result = match admitted {
                    Some(Some(facts)) if !serving => {
                        process.instances.insert(replica, facts.instance.clone());
                        Ok(facts)
                    }
                    Some(Some(_)) => return, // What the core was told by the opener counts.
                    Some(None) => Err(PromoteError::Newer),
                    None => Err(PromoteError::Unreachable),
                };
                self.feed_opener(me, OpenInput::Promoted { replica: replica_id(replica), result });
            }
            Purpose::Connect(leg) | Purpose::Reattach(leg) => {
                let Some(state) = process.legs.get_mut(&leg).filter(|l| l.replica == replica && !l.dropped) else {
                    return;
                };
                let connect = matches!(purpose, Purpose::Connect(_)) && !serving;
                match admitted {
                    Some(Some(facts)) => {
                        let before = process.instances.get(&replica);
                        let changed = facts.volatile && before.is_some_and(|i| *i != facts.instance);
                        state.meta = facts.meta;
                        process.alone = false;
                        if connect {
                            // With another instance than when it was promoted the core has to hear of it (rule 1).
                            state.conn = conn.filter(|_| !changed);
                            self.feed_opener(me, OpenInput::Connected { leg, up: !changed });
                        } else {
                            state.conn = conn;
                            process.instances.insert(replica, facts.instance.clone());
                            self.feed_core(me, Input::LegInstance { leg, instance: facts.instance });
                            self.feed_core(me, Input::LegBack { leg, cache_lost: changed });
                        }
                    }
                    Some(None) if !connect => self.feed_core(me, Input::LegFenced { leg }),
                    _ if connect => self.feed_opener(me, OpenInput::Connected { leg, up: false }),
                    _ => {
                        let body = ToEngine::Reattach { leg };
                        self.post(10 * MS, Event::Engine { to: me, body });
                    }
                }
            }
            Purpose::Rejoin if matches!(admitted, Some(None)) && serving => self.ask_whether_replaced(me),
            // Its agent asks the arbiter: an engine that is not written to may never notice.
            Purpose::Rejoin if admitted == Some(None) => {
                let epoch = process.epoch;
                if self.arbiter.read().is_some_and(|record| record.epoch > epoch) {
                    self.trace(|| format!("{me:?} is ended: a newer epoch exists"));
                    if let Some(process) = self.process(me) {
                        process.job = Job::Finished;
                    }
                }
            }
            Purpose::Rejoin => {
                if let Some(Some(ReplicaFacts { meta, instance, .. })) = admitted
                    && serving
                    && process.leg_of(replica).is_none()
                {
                    let leg = process.free_leg();
                    process.alone = false;
                    process.instances.insert(replica, instance.clone());
                    process.legs.insert(leg, LegState { replica, conn, dropped: false, meta });
                    let local = replica == me.node;
                    self.feed_core(me, Input::AddLeg { leg, replica: replica_id(replica), local, meta });
                    self.feed_core(me, Input::LegInstance { leg, instance });
                }
            }
        }
    }

    fn reached(&mut self, me: EngineRef, replica: usize) {
        let (now, alone) = (self.now, self.reaches_no_member(me));
        if let Some(process) = self.process(me) {
            process.losses.back(replica, now, alone);
        }
    }

    fn reattach(&mut self, me: EngineRef, leg: LegId) {
        let Some(process) = self.process(me) else { return };
        let Some(state) = process.legs.get(&leg).copied() else { return };
        let trying =
            process.rpcs.values().any(|r| matches!(r.purpose, Purpose::Reattach(l) | Purpose::Connect(l) if l == leg));
        if state.conn.is_none() && !state.dropped && !trying && matches!(process.job, Job::Serving(_)) {
            self.ask_attach(me, state.replica, Purpose::Reattach(leg));
        }
    }

    pub(crate) fn conn_lost(&mut self, me: EngineRef, conn: ConnId) {
        let now = self.now;
        let Some(process) = self.process(me) else { return };
        let Some((leg, state)) = process.legs.iter_mut().find(|(_, l)| l.conn == Some(conn)) else { return };
        let leg = *leg;
        state.conn = None;
        let replica = state.replica;
        let swapping = matches!(&process.job, Job::Serving(core) if core.status().swapping);
        process.alone = !swapping && process.legs.values().all(|l| l.conn.is_none());
        process.io.retain(|_, flight| flight.leg != leg);
        process.losses.lost(replica, now);
        match process.job {
            Job::Serving(_) => {
                self.feed_core(me, Input::LegLost { leg, announced: false });
                self.post(10 * MS, Event::Engine { to: me, body: ToEngine::Reattach { leg } });
            }
            // What it was asked for on this connection is not answered any more.
            Job::Opening(_) => self.feed_opener(me, OpenInput::MetaRead { leg, result: Err(MetaUnreadable) }),
            Job::Finished => {}
        }
    }

    fn io_reply(&mut self, me: EngineRef, conn: ConnId, leg: LegId, io: IoId, result: Result<Vec<u64>, LegError>) {
        let Some(process) = self.process(me) else { return };
        if process.legs.get(&leg).is_none_or(|l| l.conn != Some(conn)) {
            return;
        }
        if result == Err(LegError::Gone) {
            return self.conn_lost(me, conn);
        }
        let Some(Flight { payload, .. }) = process.io.remove(&io) else { return };
        let result = result.map(|data| match payload {
            _ if data.is_empty() => {}
            Payload::Host(id) => {
                process.host_data.insert(id, data);
            }
            Payload::Copy(slot) => process.copy_data[slot.0 as usize][..data.len()].copy_from_slice(&data),
            Payload::None | Payload::Probe => {}
        });
        self.feed_core(me, Input::LegDone { leg, io, result });
    }

    /// Replicas without a leg are offered for rebuilding.
    fn agent_step(&mut self, me: EngineRef) {
        self.post(40 * MS, Event::Engine { to: me, body: ToEngine::AgentStep });
        self.end_hung_legs(me);
        let Some(process) = self.process(me) else { return };
        if !matches!(process.job, Job::Serving(_)) {
            return;
        }
        let asked = |p: &Process, r: usize| {
            p.leg_of(r).is_some()
                || p.rpcs.values().any(|rpc| rpc.replica == r && matches!(rpc.purpose, Purpose::Rejoin))
        };
        let missing: Vec<usize> = (0..REPLICAS).filter(|r| !asked(process, *r)).collect();
        for replica in missing {
            if self.faults_over || self.rng.permille(500) {
                self.ask_attach(me, replica, Purpose::Rejoin);
            }
        }
    }

    /// Ends connections on which something was not answered in time.
    fn end_hung_legs(&mut self, me: EngineRef) {
        let now = self.now;
        let Some(process) = self.process(me) else { return };
        let hung = process.io.values().filter(|flight| flight.sent + IO_TIMEOUT_NS <= now);
        let legs: BTreeSet<LegId> = hung.map(|flight| flight.leg).collect();
        let conns = legs.iter().filter_map(|leg| process.legs.get(leg)).filter_map(|l| Some((l.conn?, l.replica)));
        for (conn, replica) in conns.collect::<Vec<_>>() {
            self.trace(|| format!("{me:?} ends {conn:?} to r{replica}: no answer"));
            self.send_replica(me, replica, ToReplica::Close { conn });
            self.conn_lost(me, conn);
        }
    }

    pub(crate) fn feed_core(&mut self, me: EngineRef, input: Input) {
        let now = self.clock(me.node);
        let Some(process) = self.process(me) else { return };
        let Job::Serving(core) = &mut process.job else { return };
        let mut actions = Vec::new();
        core.apply(now, input, &mut actions);
        for action in actions {
            self.core_action(me, action);
        }
    }

    fn core_action(&mut self, me: EngineRef, action: Action) {
        match action {
            Action::LegIo { leg, io, op, lba, blocks, payload } => self.leg_io(me, leg, io, op, (lba, blocks), payload),
            Action::MetaIo { leg, io, op } => self.meta_io(me, leg, Some(io), op),
            Action::HostDone { id, result } => {
                let data = self.process(me).and_then(|p| p.host_data.remove(&id));
                if result.is_ok() && data.is_none() {
                    self.check_carried(me); // A change or a flush.
                }
                self.host_done(me, id, result, data);
            }
            Action::Swap { swap, expect, next, reason } => {
                self.trace(|| format!("{me:?} asks to swap: {reason:?}"));
                if reason == SwapReason::Leave && self.process(me).is_some_and(|p| p.alone) {
                    return self.fail(format!("{me:?} ejects members although it reaches none itself"));
                }
                if reason == SwapReason::Leave {
                    self.asks_to_leave(me, &next);
                }
                self.ask_swap(me, swap, ToArbiter::Swap { swap, expect, next });
            }
            Action::WakeAt { at } => {
                let at = at.saturating_add(self.nodes[me.node].clock_stood).max(self.now);
                self.post_at(at, Event::Engine { to: me, body: ToEngine::Tick });
            }
            Action::LegDrop { leg, reason } => {
                self.trace(|| format!("{me:?} drops {leg:?}: {reason:?}"));
                if let Some(replica) = self.process(me).and_then(|p| p.legs.get(&leg)).map(|l| l.replica) {
                    self.leg_left(me, replica, reason);
                }
                self.drop_leg(me, leg);
            }
            Action::SnapshotHeld { id, members } => self.snapshot_held(me, id, &members),
            Action::SnapshotDone { id, result } => self.snapshot_done(me, &id, &result),
            Action::Progress { .. } => {}
            Action::Event(event) => {
                match event {
                    CoreEvent::Joined { .. } => self.outcome.joins += 1,
                    CoreEvent::LegLost { .. } => self.outcome.leaves += 1,
                    CoreEvent::MetaFailed { leg, .. } => {
                        if let Some(process) = self.process(me)
                            && let Some(state) = process.legs.get(&leg)
                        {
                            process.meta_failed.push(state.replica);
                        }
                    }
                    _ => {}
                }
                self.trace(|| format!("{me:?} {event:?}"));
            }
            Action::Stopped { reason } => {
                self.trace(|| format!("{me:?} stopped: {reason:?}"));
                if let Some(process) = self.process(me) {
                    process.job = Job::Finished;
                }
            }
            Action::Closed => {
                self.trace(|| format!("{me:?} closed"));
                if let Some(process) = self.process(me) {
                    process.job = Job::Finished;
                }
                self.closed(me);
            }
        }
    }

    fn drop_leg(&mut self, me: EngineRef, leg: LegId) {
        let Some(process) = self.process(me) else { return };
        let Some(state) = process.legs.get_mut(&leg) else { return };
        state.dropped = true;
        let (conn, replica) = (state.conn.take(), state.replica);
        if let Some(conn) = conn {
            self.send_replica(me, replica, ToReplica::Close { conn });
        }
        let after = self.rng.range(MS, 10 * MS);
        self.post(after, Event::Engine { to: me, body: ToEngine::DropDone { leg } });
    }

    fn leg_io(
        &mut self,
        me: EngineRef,
        leg: LegId,
        io: IoId,
        op: mirror_core::Op,
        range: (u64, u32),
        payload: Payload,
    ) {
        let (lba, blocks) = (range.0, range.1 as usize);
        let (owner, now) = (self.arbiter.record.epoch, self.now);
        let in_sync = |r: usize, w: &Self| w.arbiter.record.in_sync.contains(&replica_id(r));
        // A guest writes to its buffer while the command is under way; what was captured does not change (rule 4).
        let scribble = self.breaks(ModelBug::Rule04CaptureAgain) && self.rng.permille(20);
        let Some(process) = self.process(me) else { return };
        let value = match payload {
            Payload::Host(id) if scribble => process.host_values.get(&id).map_or(0, |_| SCRIBBLE + id.0),
            Payload::Host(id) => process.host_values.get(&id).copied().unwrap_or(0),
            Payload::Copy(_) | Payload::None | Payload::Probe => 0,
        };
        let data = match payload {
            Payload::Copy(slot) => process.copy_data[slot.0 as usize][..blocks].to_vec(),
            _ if op == mirror_core::Op::Flush => Vec::new(),
            _ => vec![value; blocks],
        };
        let epoch = process.epoch;
        let Some(state) = process.legs.get(&leg).copied() else { return };
        let Some(conn) = state.conn else {
            return self.fail(format!("the core sends to {leg:?}, which it was told is lost"));
        };
        process.io.insert(io, Flight { leg, payload, sent: now });
        let reads = op == mirror_core::Op::Read && payload != Payload::Probe;
        if reads && epoch == owner && !self.arbiter.hold && !in_sync(state.replica, self) {
            return self
                .fail(format!("replica r{} is read from but is not in the recorded in-sync set", state.replica));
        }
        if self.scenario.check_bits && op.changes_blocks() && matches!(payload, Payload::Host(_)) {
            self.check_bits(me, range);
        }
        if let (true, Payload::Copy(slot)) = (self.scenario.check_bits, payload) {
            self.check_copy(me, slot, range);
        }
        if let (true, Payload::Copy(slot)) = (op.changes_blocks(), payload) {
            self.check_delta(me, leg, slot, range);
        }
        self.send_replica(me, state.replica, ToReplica::Io { conn, epoch, io, leg, op, lba, data });
    }

    /// Engines other than the active one that still believe they serve.
    pub(crate) fn old_engines(&self) -> Vec<EngineRef> {
        let old = |n: usize| {
            let process = self.nodes[n].process.as_ref()?;
            let serving = matches!(process.job, Job::Serving(_));
            (serving && self.manager.active != Some(process.me)).then_some(process.me)
        };
        (0..ENGINES).filter_map(old).collect()
    }
}
