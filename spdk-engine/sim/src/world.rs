//! The world of a run: time, the queue of events, the network, and who is where.
//!
//! *Flow.* [`run`] builds a world from a [`Scenario`], hands out events in order of time until the run is finished
//! or a rule is broken, then checks the history. Every part (`engine`, `replica`, `arbiter`, `client`, `manager`)
//! only posts events; nothing happens at once across the network.
//!
//! *Invariants.* Two events never have the same place in the order; nothing depends on addresses or hash order.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::sync::Arc;

use mirror_core::{
    Config, ConfigNumber, ConfigVersion, EngineInstance, Epoch, HostId, HostResult, IoId, LegError, LegId, Lineage,
    MetaOp, Op, RaisedInVain, ReplicaFacts, ReplicaId, SnapshotId, SwapId, SwapOutcome,
};

use mirror_core::meta::Geometry;

use crate::arbiter::Arbiter;
use crate::client::{Client, ClientOp, DEPTH_MAX};
use crate::delta::Changes;
use crate::engine::Node;
use crate::faults::{Fault, FaultKind, MS, draw};
use crate::history::{FIRST_STAMP, History, Stamp};
use crate::manager::Manager;
use crate::model_bug::ModelBug;
use crate::replica::{Admission, Attach, DiskIo, Replica};
use crate::rng::Rng;
use crate::snapshot::Snapshots;

/// Replicas of a volume.
pub(crate) const REPLICAS: usize = 3;
/// Nodes that can run an engine.
pub(crate) const ENGINES: usize = 2;
/// Blocks of the volume: few, so that commands meet.
pub(crate) const BLOCKS: u64 = 24;
/// Hosts. The last one clings to an old engine as long as that answers.
pub(crate) const CLIENTS: usize = 4;
/// Blocks of a region of write-intent bits.
pub(crate) const REGION_BLOCKS: u64 = 4;
/// How long after the last fault everything must be well again.
const SETTLE_NS: u64 = 20_000 * MS;

/// What is run.
#[derive(Debug, Clone)]
pub struct Scenario {
    /// Everything random comes from it.
    pub seed: u64,
    /// Most commands of all hosts together.
    pub ops: u32,
    /// Faults; `None` draws them from the seed.
    pub faults: Option<Vec<Fault>>,
    /// When faults and new commands end, in nanoseconds.
    pub until_ns: u64,
    /// Print one line per event.
    pub trace: bool,
    /// Rule that the surroundings of the core break on purpose.
    pub model_bug: Option<ModelBug>,
    /// Also look at the write-intent bits on the disks whenever data is sent or a bit is cleared. Without it a broken
    /// rule is noticed only when a host reads wrong data.
    pub check_bits: bool,
    /// Rule to break on purpose.
    #[cfg(feature = "planted-bugs")]
    pub bug: Option<mirror_core::PlantedBug>,
}

impl Scenario {
    /// The usual run of a seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self {
            seed,
            ops: 600,
            faults: None,
            until_ns: 2_500 * MS,
            trace: false,
            model_bug: None,
            check_bits: true,
            #[cfg(feature = "planted-bugs")]
            bug: None,
        }
    }
}

/// How a run ended.
#[derive(Debug, Clone, Default)]
pub struct Outcome {
    /// The broken rule.
    pub violation: Option<String>,
    /// Faults that were in the run.
    pub faults: Vec<Fault>,
    /// Commands that hosts began.
    pub ops: u32,
    /// Commands acknowledged with success.
    pub acked: u32,
    /// Times that an engine became ready.
    pub opens: u32,
    /// Replicas that joined.
    pub joins: u32,
    /// Members that left.
    pub leaves: u32,
    /// Runs that ended with hosts that had to detach, as all members had lost acknowledged writes.
    pub refusals: u32,
    /// Replicas whose data was deleted.
    pub deletions: u32,
    /// Records that were recovered.
    pub recoveries: u32,
    /// Swaps of unknown outcome.
    pub unknown_swaps: u32,
    /// Blocks that rebuilds copied to replicas with meta areas.
    pub copied: u64,
    /// Writes to meta areas.
    pub meta_writes: u64,
    /// Regions that engines found set in the bits when they opened after an unclean stop.
    pub inherited: u64,
    /// Regions of those openings in all.
    pub inherited_of: u64,
    /// Snapshots that were recorded.
    pub snapshots: u32,
    /// Live bits that were cleared.
    pub cleared: u64,
    /// Events handled.
    pub events: u64,
}

/// One life of an engine process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct EngineRef {
    pub(crate) node: usize,
    pub(crate) inc: u64,
}

/// A connection of an engine to a replica; never used twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ConnId(pub(crate) u64);

/// A connection of a host to an engine. A higher number replaces a lower one of the same host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct HostConn {
    pub(crate) client: usize,
    pub(crate) number: u64,
}

#[derive(Debug, Clone)]
pub(crate) enum ToReplica {
    Attach {
        rpc: u64,
        conn: Option<ConnId>,
        epoch: Epoch,
        instance: EngineInstance,
    },
    Io {
        conn: ConnId,
        epoch: Epoch,
        io: IoId,
        leg: LegId,
        op: Op,
        lba: u64,
        data: Vec<u64>,
    },
    /// I/O on the meta area; `io` is `None` for the opener.
    Meta {
        conn: ConnId,
        epoch: Epoch,
        io: Option<IoId>,
        leg: LegId,
        op: MetaOp,
    },
    Close {
        conn: ConnId,
    },
    Snapshot {
        id: SnapshotId,
        epoch: Epoch,
        instance: EngineInstance,
    },
}

#[derive(Debug, Clone)]
pub(crate) enum ToArbiter {
    Read,
    Swap { swap: SwapId, expect: ConfigVersion, next: Box<Config> },
}

#[derive(Debug, Clone)]
pub(crate) enum ToEngine {
    Attached { rpc: u64, admitted: Option<ReplicaFacts> },
    MetaReply { conn: ConnId, leg: LegId, io: Option<IoId>, reads: bool, result: Result<Arc<[u8]>, LegError> },
    IoReply { conn: ConnId, leg: LegId, io: IoId, result: Result<Vec<u64>, LegError> },
    ConnLost { conn: ConnId },
    Record { config: Config },
    RecordTimeout,
    Swapped { swap: SwapId, outcome: SwapOutcome },
    RpcTimeout { rpc: u64 },
    Reattach { leg: LegId },
    DropDone { leg: LegId },
    Tick,
    AgentStep,
    Host { conn: HostConn, id: HostId, op: Op, lba: u64, blocks: u32, value: u64 },
    Remove { replica: usize },
    HostsDetached,
    Snapshot,
    SnapshotTaken { replica: usize, id: SnapshotId, taken: bool },
    SnapshotTimeout { id: SnapshotId },
    Close,
}

#[derive(Debug, Clone)]
pub(crate) enum Event {
    Replica {
        replica: usize,
        from: EngineRef,
        body: ToReplica,
    },
    Engine {
        to: EngineRef,
        body: ToEngine,
    },
    FromReplica {
        to: EngineRef,
        replica: usize,
        body: ToEngine,
    },
    Arbiter {
        from: EngineRef,
        body: ToArbiter,
        /// The network brings it by then.
        due: u64,
    },
    DiskDone {
        replica: usize,
        key: u64,
    },
    ReplicaUp {
        replica: usize,
    },
    Client {
        client: usize,
    },
    Resubmit {
        id: HostId,
    },
    /// A host that clings to an old engine follows the others.
    LetGo {
        client: usize,
    },
    Fault(Fault),
    Manager,
    /// An operator wants a snapshot.
    Snapshot,
    /// The engine that is opening the volume dies.
    KillOpening,
    Resume {
        node: usize,
    },
    /// An attempt to recover the arbiter's record.
    Recover,
    /// An agent looks whether it may delete a replica's data.
    Delete {
        replica: usize,
        until: u64,
    },
    EndOfFaults,
    Phase,
}

#[derive(Debug)]
struct Queued {
    at: u64,
    order: u64,
    /// Elsewhere: the queue moves its entries about all the time.
    event: Box<Event>,
}

impl PartialEq for Queued {
    fn eq(&self, other: &Self) -> bool {
        (self.at, self.order) == (other.at, other.order)
    }
}
impl Eq for Queued {}
impl PartialOrd for Queued {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Queued {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.order).cmp(&(other.at, other.order))
    }
}

#[derive(Debug)]
pub(crate) struct World {
    pub(crate) now: u64,
    pub(crate) rng: Rng,
    pub(crate) scenario: Scenario,
    queue: BinaryHeap<Reverse<Queued>>,
    next_order: u64,
    next_id: u64,
    next_stamp: Stamp,
    pub(crate) arbiter: Arbiter,
    pub(crate) replicas: Vec<Replica>,
    pub(crate) nodes: Vec<Node>,
    pub(crate) clients: Vec<Client>,
    /// Commands that a host keeps in flight.
    pub(crate) depth: usize,
    pub(crate) ops: BTreeMap<HostId, ClientOp>,
    /// The command that each attempt belongs to.
    pub(crate) attempts: BTreeMap<HostId, HostId>,
    pub(crate) manager: Manager,
    pub(crate) history: History,
    pub(crate) snapshots: Snapshots,
    pub(crate) outcome: Outcome,
    pub(crate) faults_over: bool,
    cut_until: [[u64; REPLICAS]; ENGINES],
    arbiter_cut_until: [u64; ENGINES],
    arbiter_slow_until: u64,
    /// What the last attempt of each node to open the volume left behind, when it failed.
    pub(crate) in_vain: [Option<RaisedInVain>; ENGINES],
    pub(crate) changes: Changes,
    /// What hosts change at a time lies near together; so regions rest in between.
    pub(crate) wanders: bool,
}

/// Runs one scenario.
#[must_use]
pub fn run(scenario: &Scenario) -> Outcome {
    let mut world = World::new(scenario.clone());
    world.go();
    world.outcome
}

/// The replica's place in the world.
pub(crate) fn replica_index(replica: &ReplicaId) -> usize {
    replica.as_str().trim_start_matches('r').parse().unwrap_or(0)
}

/// The replica's name.
pub(crate) fn replica_id(index: usize) -> ReplicaId {
    name(ReplicaId::new(&format!("r{index}")))
}

/// The number of meta reads of an opener, which has no numbers.
pub(crate) const OPENER_IO: IoId = IoId(u64::MAX);

/// The layout of every meta area.
pub(crate) fn layout() -> Geometry {
    name(Geometry::new(BLOCKS, REGION_BLOCKS))
}

/// Names made here are lawful.
pub(crate) fn name<T, E: std::fmt::Display>(made: Result<T, E>) -> T {
    match made {
        Ok(name) => name,
        Err(error) => unreachable!("a name made by the simulator is refused: {error}"),
    }
}

impl World {
    fn new(scenario: Scenario) -> Self {
        let mut rng = Rng::new(scenario.seed);
        let strict = rng.permille(250);
        let wanders = rng.permille(500);
        // Mostly all replicas have a meta area, sometimes some, sometimes none.
        let (all, none) = (rng.permille(800), rng.permille(500));
        let geometry = layout();
        // Without meta areas nobody can tell what a volatile cache has lost.
        let volatile = all && rng.permille(500);
        let meta: Vec<u64> =
            (0..REPLICAS).map(|_| if all || (!none && rng.permille(600)) { geometry.blocks() } else { 0 }).collect();
        let record = Config {
            lineage: name(Lineage::new("l1")),
            epoch: Epoch(0),
            engine_instance: name(EngineInstance::new("none")),
            config_number: ConfigNumber(1),
            in_sync: (0..REPLICAS).map(replica_id).collect(),
            rebuilding: BTreeSet::new(),
            min_in_sync: if strict { 2 } else { 1 },
            size_blocks: BLOCKS,
            clean: true,
            tree: Default::default(),
        };
        let depth = usize::try_from(rng.range(1, DEPTH_MAX + 1)).unwrap_or(1);
        // Faults have a source of their own, so that a run with some of them left out differs in nothing else.
        let mut fault_rng = Rng::new(scenario.seed.rotate_left(32) ^ 0x5eed);
        let count = fault_rng.index(14);
        let faults = scenario
            .faults
            .clone()
            .unwrap_or_else(|| draw(&mut fault_rng, count, scenario.until_ns, (ENGINES, REPLICAS, CLIENTS)));
        let clients = (0..CLIENTS).map(|_| Client::default()).collect();
        let mut world = Self {
            now: 0,
            rng,
            queue: BinaryHeap::new(),
            next_order: 0,
            next_id: 1,
            next_stamp: FIRST_STAMP,
            arbiter: Arbiter::new(record),
            replicas: meta.into_iter().map(|blocks| Replica::new(BLOCKS as usize, blocks, volatile)).collect(),
            nodes: (0..ENGINES).map(|_| Node::default()).collect(),
            clients,
            depth,
            ops: BTreeMap::new(),
            attempts: BTreeMap::new(),
            manager: Manager::default(),
            history: History::default(),
            snapshots: Snapshots::new(scenario.seed),
            outcome: Outcome { faults: faults.clone(), ..Outcome::default() },
            faults_over: false,
            cut_until: [[0; REPLICAS]; ENGINES],
            arbiter_cut_until: [0; ENGINES],
            arbiter_slow_until: 0,
            in_vain: [None; ENGINES],
            changes: Changes::new(),
            wanders,
            scenario,
        };
        for fault in faults {
            world.post_at(fault.at, Event::Fault(fault));
        }
        world.plan_snapshots(world.scenario.until_ns);
        world.post_at(world.scenario.until_ns, Event::EndOfFaults);
        world.post_at(0, Event::Manager);
        for client in 0..world.clients.len() {
            world.post_at(MS, Event::Client { client });
        }
        world
    }

    fn go(&mut self) {
        let end = self.scenario.until_ns + SETTLE_NS;
        while self.outcome.violation.is_none() && !self.manager.is_done() {
            let Some(Reverse(next)) = self.queue.pop() else {
                self.fail("nothing is left to happen".to_owned());
                return;
            };
            self.now = next.at;
            if self.now > end {
                let state = self.describe();
                self.fail(format!("not everything went on after the last fault: {state}"));
                return;
            }
            self.outcome.events += 1;
            self.handle(*next.event);
        }
        if self.outcome.violation.is_none()
            && let Err(contradiction) = self.history.check()
        {
            self.fail(contradiction.to_string());
        }
    }

    pub(crate) fn fail(&mut self, what: String) {
        self.trace(|| format!("VIOLATION {what}"));
        self.outcome.violation.get_or_insert(what);
    }

    pub(crate) fn trace(&self, line: impl FnOnce() -> String) {
        if self.scenario.trace {
            let (ms, us) = (self.now / MS, self.now % MS / 1000);
            println!("{ms:>6}.{us:03} {}", line());
        }
    }

    pub(crate) fn stamp(&mut self) -> Stamp {
        self.next_stamp += 1;
        self.next_stamp
    }

    pub(crate) fn fresh_id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    pub(crate) fn post_at(&mut self, at: u64, event: Event) {
        self.next_order += 1;
        self.queue.push(Reverse(Queued { at, order: self.next_order, event: Box::new(event) }));
    }

    pub(crate) fn post(&mut self, after: u64, event: Event) {
        self.post_at(self.now + after, event);
    }

    /// One way over the network: mostly short, sometimes long.
    fn net_delay(&mut self) -> u64 {
        if self.rng.permille(10) { self.rng.range(MS, 120 * MS) } else { self.rng.range(MS / 50, MS) }
    }

    fn is_cut(&self, node: usize, replica: usize) -> bool {
        self.now < self.cut_until[node][replica]
    }

    /// The engine's end of a connection notices that it is dead.
    fn lose_conn(&mut self, to: EngineRef, conn: ConnId) {
        let after = self.rng.range(MS, 30 * MS);
        self.post(after, Event::Engine { to, body: ToEngine::ConnLost { conn } });
    }

    pub(crate) fn send_replica(&mut self, from: EngineRef, replica: usize, body: ToReplica) {
        let delay = self.net_delay();
        self.post(delay, Event::Replica { replica, from, body });
    }

    pub(crate) fn send_engine(&mut self, to: EngineRef, replica: usize, body: ToEngine) {
        let delay = self.net_delay();
        self.post(delay, Event::FromReplica { to, replica, body });
    }

    pub(crate) fn send_arbiter(&mut self, from: EngineRef, body: ToArbiter) {
        let slow = self.now < self.arbiter_slow_until && self.rng.permille(600);
        let mut delay = if slow { self.rng.range(20 * MS, 900 * MS) } else { self.rng.range(MS / 5, 4 * MS) };
        if self.breaks(ModelBug::Rule23ManagerSwaps) {
            delay += self.manager.away_until.saturating_sub(self.now);
        }
        let due = self.now + if slow { 900 * MS } else { 4 * MS };
        self.post(delay, Event::Arbiter { from, body, due });
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Engine { to, body } => self.engine_event(to, body),
            Event::FromReplica { to, replica, body } => {
                if self.is_cut(to.node, replica) {
                    if let ToEngine::IoReply { conn, .. } | ToEngine::MetaReply { conn, .. } = body {
                        self.lose_conn(to, conn);
                    }
                } else {
                    self.engine_event(to, body);
                }
            }
            Event::Replica { replica, from, body } => self.replica_event(replica, from, body),
            Event::Arbiter { from, body, due } => self.arbiter_event(from, body, due),
            Event::DiskDone { replica, key } => self.disk_done(replica, key),
            Event::ReplicaUp { replica } => {
                self.trace(|| format!("replica r{replica} is up"));
                self.replicas[replica].up = true;
            }
            Event::Client { client } => self.client_step(client),
            Event::Resubmit { id } => self.submit(id),
            Event::LetGo { client } => self.let_go(client),
            Event::Fault(fault) => self.fault(fault),
            Event::Manager => self.manager_step(),
            Event::Snapshot => self.ask_snapshot(),
            Event::KillOpening => self.crash_opening(),
            Event::Resume { node } => self.resume(node),
            Event::Recover => self.recover_step(),
            Event::Delete { replica, until } => self.delete_step(replica, until),
            Event::EndOfFaults => self.end_of_faults(),
            Event::Phase => self.phase_step(),
        }
    }

    fn replica_event(&mut self, r: usize, from: EngineRef, body: ToReplica) {
        if self.is_cut(from.node, r) || !self.replicas[r].up {
            if let ToReplica::Io { conn, .. } | ToReplica::Meta { conn, .. } = body {
                self.lose_conn(from, conn);
            }
            return;
        }
        match body {
            ToReplica::Attach { rpc, conn, epoch, instance } => {
                let old = self.replicas[r].session;
                match self.replicas[r].admit(epoch, &instance) {
                    Admission::Fenced => {
                        self.trace(|| format!("r{r} refuses {instance} of epoch {epoch}"));
                        self.send_engine(from, r, ToEngine::Attached { rpc, admitted: None });
                    }
                    Admission::Draining => {
                        let newest = self.replicas[r].admitted_max.max(epoch);
                        self.replicas[r].admitted_max = newest;
                        if epoch < newest {
                            return self.fail(format!("r{r} admits epoch {epoch} after it was promoted to {newest}"));
                        }
                        self.trace(|| format!("r{r} admits {instance} of epoch {epoch}, conn {conn:?}"));
                        if let Some((old_conn, owner)) = old {
                            self.lose_conn(owner, old_conn);
                        }
                        self.replicas[r].attaching.push(Attach { from, rpc, conn });
                        self.finish_attach(r);
                    }
                }
            }
            ToReplica::Io { conn, epoch, io, leg, op, lba, data } => {
                if self.replicas[r].session.map(|s| s.0) != Some(conn) {
                    let error = if epoch < self.replicas[r].epoch { LegError::Fenced } else { LegError::Gone };
                    self.send_engine(from, r, ToEngine::IoReply { conn, leg, io, result: Err(error) });
                    return;
                }
                self.start_disk(r, DiskIo { key: 0, conn, from, io, leg, op, lba, data, meta: None });
            }
            ToReplica::Meta { conn, epoch, io, leg, op } => {
                let reads = matches!(op, MetaOp::Read { .. });
                if self.replicas[r].session.map(|s| s.0) != Some(conn) {
                    let error = if epoch < self.replicas[r].epoch { LegError::Fenced } else { LegError::Gone };
                    self.send_engine(from, r, ToEngine::MetaReply { conn, leg, io, reads, result: Err(error) });
                    return;
                }
                let io = io.unwrap_or(OPENER_IO);
                let data = Vec::new();
                self.start_disk(r, DiskIo { key: 0, conn, from, io, leg, op: Op::Read, lba: 0, data, meta: Some(op) });
            }
            ToReplica::Snapshot { id, epoch, instance } => self.take_snapshot(r, from, id, (epoch, instance)),
            ToReplica::Close { conn } => {
                if self.replicas[r].session.map(|s| s.0) == Some(conn) {
                    self.replicas[r].session = None;
                }
            }
        }
    }

    /// Deletes the data of a replica.
    pub(crate) fn wipe(&mut self, r: usize) {
        if let Some((conn, owner)) = self.replicas[r].session {
            self.lose_conn(owner, conn);
        }
        self.replicas[r].wipe();
        self.note_unknown(Some(r));
    }

    /// Promotes a replica for the recovery: older sessions end.
    pub(crate) fn fence(&mut self, r: usize, epoch: Epoch, author: &EngineInstance) {
        let old = self.replicas[r].session;
        if self.replicas[r].admit(epoch, author) == Admission::Draining {
            self.replicas[r].admitted_max = self.replicas[r].admitted_max.max(epoch);
            self.replicas[r].attaching.clear();
            if let Some((conn, owner)) = old {
                self.lose_conn(owner, conn);
            }
        }
    }

    pub(crate) fn breaks(&self, bug: ModelBug) -> bool {
        self.scenario.model_bug == Some(bug)
    }

    fn start_disk(&mut self, r: usize, io: DiskIo) {
        let key = self.fresh_id();
        self.replicas[r].disk.push(DiskIo { key, ..io });
        let delay = if self.rng.permille(10) { self.rng.range(MS, 60 * MS) } else { self.rng.range(MS / 20, MS) };
        let at = (self.now + delay).max(self.replicas[r].hang_until);
        self.post_at(at, Event::DiskDone { replica: r, key });
    }

    /// Grants requests for a session when the disk has finished what older ones gave it. The last one wins.
    fn finish_attach(&mut self, r: usize) {
        if !self.replicas[r].disk.is_empty() && !self.breaks(ModelBug::Rule13NoDrain) {
            return;
        }
        for attach in std::mem::take(&mut self.replicas[r].attaching) {
            if let Some(conn) = attach.conn {
                self.replicas[r].session = Some((conn, attach.from));
            }
            let admitted = Some(self.replicas[r].facts());
            self.send_engine(attach.from, r, ToEngine::Attached { rpc: attach.rpc, admitted });
        }
    }

    fn disk_done(&mut self, r: usize, key: u64) {
        let Some(at) = self.replicas[r].disk.iter().position(|d| d.key == key) else { return };
        if self.now < self.replicas[r].hang_until {
            self.post_at(self.replicas[r].hang_until, Event::DiskDone { replica: r, key });
            return;
        }
        let io = self.replicas[r].disk.swap_remove(at);
        if let Some(op) = &io.meta {
            self.meta_done(r, &io, op);
            self.finish_attach(r);
            return;
        }
        if io.op.changes_blocks() && !matches!(io.op, Op::Write { fua: true }) {
            let (first, last) = layout().regions_of(io.lba, u32::try_from(io.data.len()).unwrap_or(1));
            self.replicas[r].unflushed.extend(first..=last);
        }
        let result = self.replicas[r].execute(&io, self.now, self.scenario.model_bug, &mut self.rng);
        self.trace(|| {
            format!("r{r} {:?} {}+{} of {:?}: {result:?} {:?}", io.op, io.lba, io.data.len(), io.from, io.data)
        });
        // An ended session gets no answers: its connection is gone.
        if self.replicas[r].session.map(|s| s.0) == Some(io.conn) {
            let body = ToEngine::IoReply { conn: io.conn, leg: io.leg, io: io.io, result };
            self.send_engine(io.from, r, body);
        }
        self.finish_attach(r);
    }

    fn arbiter_event(&mut self, from: EngineRef, body: ToArbiter, due: u64) {
        if self.now > due {
            return self.fail(format!("what {from:?} asks of the arbiter waited for somebody else"));
        }
        // A cut loses requests or answers; which of them is the point of rule 7.
        let cut = self.now < self.arbiter_cut_until[from.node];
        if cut && self.rng.permille(500) {
            return;
        }
        let answer = match body {
            ToArbiter::Read => match self.arbiter.read() {
                Some(config) => ToEngine::Record { config },
                None => return,
            },
            ToArbiter::Swap { swap, expect, next } => match self.swap(&expect, Config::clone(&next)) {
                Ok(None) => return,
                Ok(Some(outcome)) => {
                    let done = outcome == SwapOutcome::Committed;
                    if done {
                        self.snapshot_recorded(&next);
                    }
                    self.trace(|| format!("arbiter: {from:?} swaps to {next:?}: {}", if done { "yes" } else { "no" }));
                    ToEngine::Swapped { swap, outcome }
                }
                Err(violation) => return self.fail(violation),
            },
        };
        if !cut && !self.rng.permille(5) {
            let delay = self.rng.range(MS / 5, 4 * MS);
            self.post(delay, Event::Engine { to: from, body: answer });
        }
    }

    fn fault(&mut self, fault: Fault) {
        let until = self.now + fault.for_ns;
        self.trace(|| format!("fault {:?} for {} ms", fault.kind, fault.for_ns / MS));
        match fault.kind {
            FaultKind::ReplicaCrash(r) => self.crash_replica(r, fault.for_ns, false),
            FaultKind::InTurns(r) => self.crash_in_turns(r),
            FaultKind::PowerLoss(r) => self.crash_replica(r, fault.for_ns, true),
            FaultKind::Blackout => {
                (0..REPLICAS).for_each(|r| self.crash_replica(r, fault.for_ns, true));
                self.crash_active();
            }
            FaultKind::Cut(e, r) => self.cut_until[e][r] = until,
            FaultKind::CutAll(e) => self.cut_until[e] = [until; REPLICAS],
            FaultKind::HostBreak(client) => self.break_host(client),
            FaultKind::Partition(r) => self.part_active(r, until),
            FaultKind::PartedOpenerDies(r) => {
                self.part_active(r, until.max(self.now + 500 * MS));
                let after = self.rng.range(20 * MS, 250 * MS);
                self.post(after, Event::KillOpening);
            }
            FaultKind::SuspendParted(r) => {
                self.part_active(r, until);
                self.pause_active(self.now + fault.for_ns / 2);
            }
            FaultKind::Break(r) => {
                if let Some((conn, owner)) = self.replicas[r].session.take() {
                    self.lose_conn(owner, conn);
                }
            }
            FaultKind::CutArbiter(e) => self.arbiter_cut_until[e] = until,
            FaultKind::ArbiterRestore => self.restore_arbiter(),
            FaultKind::SlowArbiter => self.arbiter_slow_until = until,
            FaultKind::ManagerAway => self.manager.away_until = until,
            FaultKind::EngineCrash => self.crash_active(),
            FaultKind::EnginePause => self.pause_active(until),
            FaultKind::Takeover => self.manager.doubt(),
            FaultKind::CleanSwitch => self.close_active(),
            FaultKind::DiskHang(r) => self.replicas[r].hang_until = until,
            FaultKind::WriteErrors(r) => self.replicas[r].write_errors_until = until,
            FaultKind::ReadErrors(r) => self.replicas[r].read_errors_until = until,
            FaultKind::Full(r) => self.replicas[r].full_until = until,
            FaultKind::Delete(r) => {
                if let Some(active) = self.manager.active {
                    self.post(0, Event::Engine { to: active, body: ToEngine::Remove { replica: r } });
                }
                self.post(0, Event::Delete { replica: r, until });
            }
            FaultKind::Remove(r) => {
                if let Some(active) = self.manager.active {
                    self.post(0, Event::Engine { to: active, body: ToEngine::Remove { replica: r } });
                }
            }
        }
    }

    /// The active engine keeps one replica and loses everything else; nobody else reaches that replica.
    fn part_active(&mut self, kept: usize, until: u64) {
        let Some(active) = self.manager.active else { return };
        for engine in 0..ENGINES {
            for replica in 0..REPLICAS {
                if (engine == active.node) != (replica == kept) {
                    self.cut_until[engine][replica] = until;
                }
            }
        }
        self.arbiter_cut_until[active.node] = until;
        self.manager.doubt();
    }

    fn crash_in_turns(&mut self, first: usize) {
        let (second, third) = ((first + 1) % REPLICAS, (first + 2) % REPLICAS);
        self.crash_replica(first, 900 * MS, false);
        let mut later = |from, to, for_ns, kind| {
            let at = self.now + self.rng.range(from * MS, to * MS);
            self.post_at(at, Event::Fault(Fault { at, for_ns, kind }));
        };
        later(110, 250, 130 * MS, FaultKind::ReplicaCrash(second));
        later(600, 750, 500 * MS, FaultKind::ReplicaCrash(third));
        later(700, 800, 0, FaultKind::EngineCrash);
    }

    fn crash_replica(&mut self, r: usize, for_ns: u64, power: bool) {
        if !self.replicas[r].up {
            // Its process is down; the machine may lose power all the same.
            if power {
                self.replicas[r].lose_power(&mut self.rng);
            }
            return;
        }
        if let Some((conn, owner)) = self.replicas[r].session {
            self.lose_conn(owner, conn);
        }
        let rng = &mut self.rng;
        if power {
            self.replicas[r].lose_power(rng);
        } else {
            self.replicas[r].crash(rng);
        }
        if self.breaks(ModelBug::Rule14EpochForgotten) {
            self.replicas[r].epoch = Epoch(0);
            self.replicas[r].instance = None;
        }
        self.post(for_ns, Event::ReplicaUp { replica: r });
    }

    fn end_of_faults(&mut self) {
        self.trace(|| "faults end".to_owned());
        self.faults_over = true;
        self.cut_until = [[0; REPLICAS]; ENGINES];
        self.arbiter_cut_until = [0; ENGINES];
        self.arbiter_slow_until = 0;
        for replica in &mut self.replicas {
            replica.up = true;
            replica.hang_until = replica.hang_until.min(self.now);
            replica.write_errors_until = 0;
            replica.read_errors_until = 0;
            replica.full_until = 0;
        }
        // What hung on a disk is executed now.
        let hung: Vec<(usize, u64)> =
            (0..REPLICAS).flat_map(|r| self.replicas[r].disk.iter().map(move |io| (r, io.key))).collect();
        for (replica, key) in hung {
            self.post(0, Event::DiskDone { replica, key });
        }
        self.post(0, Event::Phase);
    }

    pub(crate) fn host_done(&mut self, from: EngineRef, id: HostId, result: HostResult, data: Option<Vec<u64>>) {
        self.client_done(from, id, result, data);
    }
}
