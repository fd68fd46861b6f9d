//! Everything that can happen, one step at a time.
//!
//! *What it is.* [`Step`] names what happens; [`Mirror::step`] says what follows, or `None` when it cannot happen
//! now. Any step may happen at any time it is possible: there is no fairness, so a lost message, a partition, a
//! paused process or a disk that hangs is a step that does not come.
//!
//! *Rules.* Every step names the rule it stands for. The conditions that [`crate::Bug`] can take away are asked
//! through [`Mirror::broken`].

use crate::bug::Bug;
use crate::model::{Mirror, Seen};
use crate::set::{REPLICAS, Set};
use crate::state::{ENGINES, Phase, QUEUE_MAX, State, Violation};

/// What can happen. Engines and replicas are given by index.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Step {
    /// An engine starts and reads the record (rule 15: the epoch comes first).
    Open(usize),
    /// An engine's swap is executed and answered, at the first attempt or a later one (rule 7).
    Settle(usize),
    /// A request is executed and nobody hears of it: the answer is lost, or the sender is dead or has given up.
    LateSwap(usize),
    /// An opening engine promotes a replica and reads its bit (rules 13 and 15).
    Promote(usize, usize),
    /// An opening engine chooses the sets (rule 15).
    Decide(usize),
    /// An opening engine learns that no older engine is alive (rule 16).
    KnowDead(usize),
    /// More than T plus margin passes (rule 16).
    TimePasses,
    /// A serving engine opens a session, anew or for the first time (rule 13).
    Connect(usize, usize),
    /// A connection is lost, by a cut network or because the replica restarts.
    Break(usize),
    /// A serving engine wants a member out (rule 6).
    Eject(usize, usize),
    /// A serving engine wants a connected replica in `R` (rule 8).
    StartRebuild(usize, usize),
    /// A joiner is copied to: from whom (rule 10).
    Copy(usize, usize, usize),
    /// A copied joiner is to become a member (rule 10).
    Join(usize, usize),
    /// A joiner that no record counts in is given up.
    Drop(usize, usize),
    /// A host's write begins (rule 2); its data goes out when the bits are durable (rule 18).
    Write(usize),
    /// The write-intent bit becomes durable on a replica (rules 9 and 18).
    SetBit(usize, usize),
    /// A replica's disk does what it has; the engine hears of it if the session is still there.
    Land(usize),
    /// A write of a session that was not drained is done (only when rule 13 is broken).
    GhostLands(usize),
    /// A replica forgets its epoch in a restart (only when rule 13 is broken).
    ForgetEpoch(usize),
    /// The host hears that its write is done (rules 1 and 6).
    Acknowledge(usize),
    /// The write-intent bit of a replica is cleared (rule 18).
    ClearBit(usize, usize),
    /// A host reads (rules 3, 10, 15, 16 and 18).
    Read(usize, usize),
    /// Members are made equal with one of them (rule 18).
    Equalise(usize, usize),
    /// An engine dies, or stops because it was fenced or superseded.
    Die(usize),
    /// An engine takes an unknown outcome for committed (only when rule 7 is broken).
    AssumeCommitted(usize),
    /// An engine reads the record and takes that for the outcome (only when rule 7 is broken).
    Reread(usize),
}

impl Step {
    /// Calls `f` with everything that may be possible in a state; [`Mirror::step`] has the last word.
    pub(crate) fn each(state: &State, f: &mut impl FnMut(Step)) {
        f(Step::TimePasses);
        (0..QUEUE_MAX).filter(|slot| state.queue[*slot].is_some()).for_each(|slot| f(Step::LateSwap(slot)));
        for replica in 0..REPLICAS {
            [Step::Break, Step::Land, Step::GhostLands, Step::ForgetEpoch]
                .into_iter()
                .for_each(|step| f(step(replica)));
        }
        for (engine, process) in state.engines.iter().enumerate() {
            match process.phase {
                Phase::Off => f(Step::Open(engine)),
                Phase::Raising | Phase::Deciding => {
                    [Step::Die, Step::Settle, Step::KnowDead].into_iter().for_each(|step| f(step(engine)));
                }
                Phase::Promoting => {
                    [Step::Die, Step::Decide, Step::KnowDead].into_iter().for_each(|step| f(step(engine)));
                    (0..REPLICAS).for_each(|replica| f(Step::Promote(engine, replica)));
                }
                Phase::Serving => Self::each_of_serving(engine, f),
            }
        }
    }

    fn each_of_serving(engine: usize, f: &mut impl FnMut(Step)) {
        let alone = [
            Step::Die,
            Step::Settle,
            Step::KnowDead,
            Step::Write,
            Step::Acknowledge,
            Step::AssumeCommitted,
            Step::Reread,
        ];
        let with_replica = [
            Step::Connect,
            Step::Eject,
            Step::StartRebuild,
            Step::Join,
            Step::Drop,
            Step::SetBit,
            Step::ClearBit,
            Step::Read,
            Step::Equalise,
        ];
        alone.into_iter().for_each(|step| f(step(engine)));
        for replica in 0..REPLICAS {
            with_replica.into_iter().for_each(|step| f(step(engine, replica)));
            (0..REPLICAS).filter(|source| *source != replica).for_each(|source| f(Step::Copy(engine, replica, source)));
        }
    }
}

impl Mirror {
    /// What follows from a step, in names as they are; `None` when it cannot happen.
    #[must_use]
    pub fn step(&self, state: &State, step: Step) -> Option<State> {
        if state.violation.is_some() {
            return None;
        }
        match step {
            Step::Open(e) => self.open(state, e),
            Step::Settle(e) => self.settle(state, e),
            Step::LateSwap(slot) => self.late_swap(state, slot),
            Step::Promote(e, r) => self.promote(state, e, r),
            Step::Decide(e) => self.decide(state, e),
            Step::KnowDead(e) => self.know_dead(state, e),
            Step::TimePasses => self.time_passes(state),
            Step::Connect(e, r) => self.connect(state, e, r),
            Step::Break(r) => self.break_connection(state, r),
            Step::Eject(e, r) => self.eject(state, e, r),
            Step::StartRebuild(e, r) => self.start_rebuild(state, e, r),
            Step::Copy(e, r, source) => self.copy(state, e, r, source),
            Step::Join(e, r) => self.join(state, e, r),
            Step::Drop(e, r) => self.drop_joiner(state, e, r),
            Step::Write(e) => self.write(state, e),
            Step::SetBit(e, r) => self.set_bit(state, e, r),
            Step::Land(r) => self.land(state, r),
            Step::GhostLands(r) => self.ghost_lands(state, r),
            Step::ForgetEpoch(r) => self.forget_epoch(state, r),
            Step::Acknowledge(e) => self.acknowledge(state, e),
            Step::ClearBit(e, r) => self.clear_bit(state, e, r),
            Step::Read(e, r) => self.read(state, e, r),
            Step::Equalise(e, r) => self.equalise(state, e, r),
            Step::Die(e) => self.die(state, e),
            Step::AssumeCommitted(e) => self.assume_committed(state, e),
            Step::Reread(e) => self.reread(state, e),
        }
    }

    /// The disk of a replica does its write. It is the engine's own session or nobody's: a session of another engine
    /// began with a drain (rule 13).
    fn land(&self, state: &State, r: usize) -> Option<State> {
        let value = state.replicas[r].disk;
        if value == 0 {
            return None;
        }
        let mut next = *state;
        next.replicas[r].data = value;
        next.replicas[r].disk = 0;
        if let Some(e) = (0..ENGINES).find(|e| state.replicas[r].serves(*e)) {
            next.engines[e].done = next.engines[e].done.with(r);
            self.finish_job(&mut next, e);
        } else {
            self.saw(Seen::OrphanLanded);
        }
        Some(next)
    }

    fn ghost_lands(&self, state: &State, r: usize) -> Option<State> {
        let value = state.replicas[r].ghost;
        (value != 0).then(|| {
            let mut next = *state;
            next.replicas[r].data = value;
            next.replicas[r].ghost = 0;
            next
        })
    }

    fn forget_epoch(&self, state: &State, r: usize) -> Option<State> {
        let possible = self.broken(Bug::Rule14EpochForgotten) && state.replicas[r].promoted != 0;
        possible.then(|| {
            let mut next = *state;
            end_session(&mut next, r);
            next.replicas[r].promoted = 0;
            next
        })
    }

    /// What the disk has stays there and may land until the next session has drained it.
    fn break_connection(&self, state: &State, r: usize) -> Option<State> {
        (self.bounds.breaks && state.replicas[r].session != 0).then(|| {
            let mut next = *state;
            end_session(&mut next, r);
            next
        })
    }

    /// Rule 16 with time in units of T: whatever was confirmed before is too old now, and whoever waited for that
    /// may go on. One member of the recorded `S` that was promoted before is enough: the old engine needs all of it.
    fn time_passes(&self, state: &State) -> Option<State> {
        let mut next = *state;
        for engine in &mut next.engines {
            engine.fresh = Set::EMPTY;
            let waits = match engine.phase {
                Phase::Promoting => !engine.promoted.and(engine.config.in_sync).is_empty(),
                Phase::Deciding | Phase::Serving => true,
                Phase::Off | Phase::Raising => false,
            };
            engine.waited |= waits;
        }
        (next != *state).then_some(next)
    }

    fn die(&self, state: &State, e: usize) -> Option<State> {
        (state.engines[e].phase != Phase::Off).then(|| {
            let mut next = *state;
            stop(&mut next, e);
            next
        })
    }

    /// Executes a compare-and-swap. True when the record is what was asked for, by this or an earlier attempt.
    pub(crate) fn compare_and_swap(&self, state: &mut State, request: crate::state::Request) -> bool {
        if state.record == request.next {
            return true;
        }
        if state.record.version != request.expect {
            return false;
        }
        let (old, new) = (state.record, request.next);
        let sets_changed = (old.in_sync, old.rebuilding) != (new.in_sync, new.rebuilding);
        let shrinks = new.in_sync.len() < old.in_sync.len();
        let below = new.in_sync.len() < self.bounds.members_min.into();
        let violation = if new.in_sync.is_empty() {
            Some(Violation::EmptyInSync)
        } else if shrinks && below {
            Some(Violation::BelowMinimum)
        } else if sets_changed && new.version.number <= old.version.number {
            Some(Violation::NumberStays)
        } else {
            None
        };
        state.record = new;
        state.violation = state.violation.or(violation);
        true
    }

    /// A request reaches the arbiter and its sender does not hear of it.
    fn late_swap(&self, state: &State, slot: usize) -> Option<State> {
        let request = state.queue[slot].filter(|r| r.expect == state.record.version)?;
        let mut next = *state;
        next.queue[slot] = None;
        self.compare_and_swap(&mut next, request);
        let owner = request.next.version.owner;
        let alive =
            state.engines.iter().any(|e| e.instance == owner && e.pending.is_some_and(|p| p.next == request.next));
        self.saw(if alive { Seen::CommittedUnheard } else { Seen::CommittedAfterSenderWasGone });
        Some(next)
    }
}

/// Ends a replica's session. Its engine may have been confirmed up to now (rule 16).
pub(crate) fn end_session(state: &mut State, r: usize) {
    if let Some(e) = (0..ENGINES).find(|e| state.replicas[r].serves(*e)) {
        state.engines[e].fresh = state.engines[e].fresh.with(r);
    }
    state.replicas[r].session = 0;
}

/// An engine's process ends. What its replicas' disks and the arbiter's queue have of it stays there.
pub(crate) fn stop(state: &mut State, e: usize) {
    state.engines[e] = crate::state::Engine::default();
    for replica in &mut state.replicas {
        if replica.serves(e) {
            replica.session = 0;
        }
    }
}
