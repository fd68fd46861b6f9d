//! The manager: decides where the volume is open, and walks a run through its phases.
//!
//! *What it is.* The control plane in its smallest form: opens the volume somewhere, notices that an engine is dead,
//! stopped or silent, opens it elsewhere. It may be wrong about the old engine; safety must not depend on it.
//!
//! *Phases.* Faults ─▶ Settle (all commands answered, all replicas in sync) ─▶ Verify (every block is read) ─▶ Close
//! (clean, replicas byte-equal) ─▶ Reopen (read again) ─▶ Done.

use mirror_core::Op;

use crate::engine::{Job, Process};
use crate::faults::MS;
use crate::model_bug::ModelBug;
use crate::replica::Replica;
use crate::world::{BLOCKS, ENGINES, EngineRef, Event, REPLICAS, ToEngine, World};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Phase {
    #[default]
    Faults,
    Settle,
    Verify,
    Closing,
    Reopen,
    Reverify,
    Done,
}

#[derive(Debug, Default)]
pub(crate) struct Manager {
    /// The engine that hosts use.
    pub(crate) active: Option<EngineRef>,
    opening: Option<EngineRef>,
    doubts: bool,
    /// The engine that was asked to close, and when that is given up and it is ended.
    closing: Option<(EngineRef, u64)>,
    phase: Phase,
    /// It does nothing until then (rule 23).
    pub(crate) away_until: u64,
}

/// How long an orderly close may take. A frozen volume cannot close by itself.
const CLOSE_NS: u64 = 1500 * MS;

impl Manager {
    /// The manager thinks that the active engine is dead.
    pub(crate) fn doubt(&mut self) {
        self.doubts = true;
    }

    pub(crate) fn failed(&mut self, engine: EngineRef) {
        if self.opening == Some(engine) {
            self.opening = None;
        }
    }

    pub(crate) fn is_done(&self) -> bool {
        self.phase == Phase::Done
    }
}

impl World {
    pub(crate) fn manager_step(&mut self) {
        self.post(10 * MS, Event::Manager);
        if self.now < self.manager.away_until {
            return;
        }
        if let Some((engine, _)) = self.manager.closing.take_if(|(_, until)| *until <= self.now) {
            self.kill_engine(engine);
        }
        if let Some(opening) = self.manager.opening {
            // One that is paused for long, or dead, is given up.
            if self.process(opening).is_none() || self.is_paused(opening.node) {
                self.manager.opening = None;
            } else {
                return;
            }
        }
        if self.needs_open() {
            let free: Vec<usize> = (0..ENGINES).filter(|n| !self.is_paused(*n)).collect();
            if free.is_empty() {
                return;
            }
            let other = self.manager.active.map(|a| ENGINES - 1 - a.node).filter(|n| free.contains(n));
            let node = match other {
                Some(node) if self.manager.doubts || self.rng.permille(600) => node,
                _ => free[self.rng.index(free.len())],
            };
            self.manager.doubts = false;
            let opening = self.start_engine(node);
            self.manager.opening = Some(opening);
        }
    }

    fn needs_open(&mut self) -> bool {
        if matches!(self.manager.phase, Phase::Closing | Phase::Done) {
            return false;
        }
        let Some(active) = self.manager.active else { return true };
        if self.manager.doubts {
            return true;
        }
        if self.is_paused(active.node) {
            return self.rng.permille(150);
        }
        self.process(active).is_none_or(|p| matches!(p.job, Job::Finished))
    }

    pub(crate) fn became_ready(&mut self, engine: EngineRef) {
        if self.manager.opening == Some(engine) {
            self.manager.opening = None;
        }
        // Hosts follow the newest engine. One that the manager gave up while it opened may become ready late; when a
        // newer one is there already, it is an old engine from the start.
        let epoch = |w: &Self, e: EngineRef| w.process_ref(e).map(|p| p.epoch);
        let newest = self.manager.active.and_then(|a| epoch(self, a)).is_none_or(|a| Some(a) < epoch(self, engine));
        if newest {
            let old = self.manager.active.replace(engine);
            self.cling(old);
        }
        self.switch_path();
        self.tempt_old_engines();
    }

    pub(crate) fn crash_active(&mut self) {
        if let Some(active) = self.manager.active {
            self.kill_engine(active);
        }
    }

    pub(crate) fn crash_opening(&mut self) {
        if let Some(opening) = self.manager.opening {
            self.kill_engine(opening);
        }
    }

    pub(crate) fn pause_active(&mut self, until: u64) {
        if let Some(active) = self.manager.active {
            let stands = until.saturating_sub(self.nodes[active.node].paused_until.max(self.now));
            self.nodes[active.node].paused_until = until;
            if self.breaks(ModelBug::Rule16ClockStops) {
                self.nodes[active.node].clock_stood += stands;
            }
            self.post_at(until, Event::Resume { node: active.node });
        }
    }

    pub(crate) fn close_active(&mut self) {
        if let Some(active) = self.manager.active {
            self.manager.closing = Some((active, self.now + CLOSE_NS));
            self.post(0, Event::Engine { to: active, body: ToEngine::Close });
        }
    }

    /// The engine says that hosts must detach: acknowledged writes may be lost with the power of all members (rule 1).
    /// Hosts start anew and remember nothing. False when that is a violation.
    pub(crate) fn hosts_refused(&mut self, members: &[usize]) -> bool {
        // Without an instance in its superblock, as before the first engine has written any, nothing proves that it lost
        // nothing.
        let names_none = |r: &Replica| r.superblock().is_none_or(|s| s.instance.is_empty());
        let excused = |r: &Replica| r.media.volatile && (r.starts > 1 || r.meta_unread || names_none(r));
        let spared = members.iter().find(|r| !excused(&self.replicas[**r]));
        if let Some(r) = spared {
            self.fail(format!("hosts must detach although r{r} never lost anything"));
            return false;
        }
        self.outcome.refusals += 1;
        if !self.breaks(ModelBug::Rule01HostsStay) {
            self.restart_hosts();
        }
        true
    }

    /// An operator has to say which history goes on; the run ends here.
    pub(crate) fn operator_asked(&mut self) {
        self.trace(|| "an operator is asked".to_owned());
        self.manager.phase = Phase::Done;
    }

    pub(crate) fn closed(&mut self, engine: EngineRef) {
        self.manager.closing = None;
        if self.manager.phase == Phase::Closing && self.manager.active == Some(engine) {
            // A late answer to what was sent before the faults ended may have cost a member: once more.
            let complete = self.arbiter.record.in_sync.len() == REPLICAS;
            if complete {
                self.check_closed();
            }
            self.manager.phase = if complete { Phase::Reopen } else { Phase::Settle };
        }
    }

    /// After an orderly close all members are equal.
    fn check_closed(&mut self) {
        self.check_snapshots();
        let record = &self.arbiter.record;
        if !record.clean {
            let what = format!("closed, but the record is {record:?}");
            self.fail(what);
        }
        for r in 1..REPLICAS {
            let (a, b) = (self.replicas[0].media.blocks(), self.replicas[r].media.blocks());
            if a != b {
                let what = format!("r0 and r{r} differ after a clean close: {a:?} {b:?}");
                self.fail(what);
            }
        }
    }

    pub(crate) fn phase_step(&mut self) {
        self.post(10 * MS, Event::Phase);
        let idle = self.ops.is_empty();
        let next = match self.manager.phase {
            Phase::Faults => Phase::Settle,
            Phase::Settle if idle && self.is_settled() => {
                self.read_all();
                Phase::Verify
            }
            Phase::Verify if idle && self.is_settled() => {
                self.close_active();
                Phase::Closing
            }
            // It stopped instead of closing, or another one took over: once more.
            Phase::Closing if !self.is_serving() || self.manager.closing.map(|c| c.0) != self.manager.active => {
                Phase::Settle
            }
            Phase::Reopen if self.is_settled() => {
                self.read_all();
                Phase::Reverify
            }
            Phase::Reverify if idle => Phase::Done,
            same => same,
        };
        if next != self.manager.phase {
            self.trace(|| format!("phase {next:?}"));
            self.manager.phase = next;
        }
    }

    fn is_serving(&self) -> bool {
        let active = self.manager.active;
        active.and_then(|a| self.process_ref(a)).is_some_and(Process::is_serving)
    }

    fn is_settled(&self) -> bool {
        if self.manager.opening.is_some() || self.manager.doubts {
            return false;
        }
        let Some(active) = self.manager.active else { return false };
        let Some(process) = self.process_ref(active) else { return false };
        let Job::Serving(core) = &process.job else { return false };
        let status = core.status();
        let equal = status.inherited_regions == 0 && !status.hosts_must_detach && !status.frozen;
        status.config.in_sync.len() == REPLICAS && !status.swapping && status.lost.is_empty() && equal
    }

    fn read_all(&mut self) {
        for lba in (0..BLOCKS).step_by(4) {
            self.begin(0, Op::Read, lba, 4);
        }
    }

    /// For a run that got stuck.
    pub(crate) fn describe(&mut self) -> String {
        let phase = self.manager.phase;
        let ops: Vec<String> = self.ops.iter().map(|(id, o)| format!("{}:{:?}@{:?}", id.0, o.op, o.sent_to)).collect();
        let active = self.manager.active;
        let status = active.and_then(|a| self.process(a)).map(|p| match &p.job {
            Job::Serving(core) => format!("{:?}", core.status()),
            Job::Opening(opener) => format!("{opener:?}"),
            Job::Finished => "finished".to_owned(),
        });
        format!("phase {phase:?}, waiting {ops:?}, record {:?}, engine {status:?}", self.arbiter.record)
    }
}
