//! Opening a volume, and the swaps of an engine until they are settled (rules 7, 13, 15, 16).

use crate::bug::Bug;
use crate::model::{Mirror, Seen};
use crate::set::Set;
use crate::state::{Engine, Job, Pending, Phase, QUEUE_MAX, Reason, Record, Request, State};
use crate::steps::{end_session, stop};

impl Mirror {
    /// Reads the record and asks for the next epoch on top of it.
    pub(crate) fn open(&self, state: &State, e: usize) -> Option<State> {
        if state.engines[e].phase != Phase::Off || state.instances >= self.bounds.instances {
            return None;
        }
        let mut next = *state;
        next.instances += 1;
        next.engines[e] = Engine { instance: next.instances, ..Engine::default() };
        self.raise(&mut next, e, state.record).then_some(next)
    }

    /// Rule 15: the swap to `g+1` comes before any promote.
    fn raise(&self, state: &mut State, e: usize, base: Record) -> bool {
        let engine = &mut state.engines[e];
        engine.phase = Phase::Raising;
        engine.config = base;
        engine.previous_owner = base.version.owner;
        engine.bits_read = Set::EMPTY;
        let mut next = base;
        next.version.epoch += 1;
        next.version.owner = engine.instance;
        if self.broken(Bug::Rule15BitsBeforePromote) {
            for r in base.in_sync.iter().filter(|r| state.replicas[*r].bit) {
                state.engines[e].bits_read = state.engines[e].bits_read.with(r);
            }
        }
        self.ask(state, e, Reason::Raise, next)
    }

    /// Sends a swap. False when as many as are modelled are under way already.
    pub(crate) fn ask(&self, state: &mut State, e: usize, reason: Reason, next: Record) -> bool {
        let request = Request { expect: state.engines[e].config.version, next };
        state.engines[e].pending = Some(Pending { reason, next });
        if state.queue.contains(&Some(request)) {
            return true;
        }
        let alive = |slot: &Option<Request>| slot.is_some_and(|r| r.expect >= state.record.version);
        match (0..QUEUE_MAX).find(|slot| !alive(&state.queue[*slot])) {
            Some(slot) => {
                state.queue[slot] = Some(request);
                true
            }
            None => false,
        }
    }

    /// The swap is executed, or was before, and the engine hears of it. A refusal with somebody else's record stops
    /// the engine; before its epoch stands, the old engine's last change is built upon (rule 15).
    pub(crate) fn settle(&self, state: &State, e: usize) -> Option<State> {
        let engine = &state.engines[e];
        let pending = engine.pending?;
        let request = Request { expect: engine.config.version, next: pending.next };
        let mut next = *state;
        if self.compare_and_swap(&mut next, request) {
            self.committed(&mut next, e);
            return Some(next);
        }
        let current = state.record;
        let same_owner = current.version.owner == engine.config.version.owner;
        if pending.reason == Reason::Raise && same_owner {
            self.saw(Seen::RaisedAgain);
            return self.raise(&mut next, e, current).then_some(next);
        }
        self.saw(Seen::Superseded);
        stop(&mut next, e);
        Some(next)
    }

    /// What a committed swap changes at the engine: nothing of it counts before.
    fn committed(&self, state: &mut State, e: usize) {
        let engine = &mut state.engines[e];
        let Some(pending) = engine.pending.take() else { return };
        let gone = engine.config.in_sync.minus(pending.next.in_sync);
        engine.config = pending.next;
        match pending.reason {
            Reason::Raise => engine.phase = Phase::Promoting,
            Reason::Decide => {
                self.saw(Seen::OpenedWithoutAll);
                self.serve(state, e);
            }
            Reason::Leave => {
                self.saw(Seen::Left);
                for r in gone.iter() {
                    self.forget_leg(state, e, r);
                }
            }
            Reason::Start => {}
            Reason::Join => {
                self.saw(Seen::Joined);
                engine.copied = engine.copied.minus(engine.config.in_sync);
            }
        }
        self.send(state, e);
        self.finish_job(state, e);
    }

    /// Rule 13: the older session is ended and drained before the new one is answered, and the epoch is durable.
    pub(crate) fn open_session(&self, state: &mut State, e: usize, r: usize) {
        end_session(state, r);
        let replica = &mut state.replicas[r];
        if self.broken(Bug::Rule13NoDrain) && replica.disk != 0 {
            replica.ghost = replica.disk;
        }
        replica.disk = 0;
        replica.promoted = state.engines[e].config.version.epoch;
        replica.session = u8::try_from(e + 1).unwrap_or(0);
        state.engines[e].fresh = state.engines[e].fresh.without(r);
    }

    pub(crate) fn promote(&self, state: &State, e: usize, r: usize) -> Option<State> {
        let engine = &state.engines[e];
        let wanted = engine.config.in_sync.or(engine.config.rebuilding).minus(engine.promoted);
        let admitted = state.replicas[r].promoted < engine.config.version.epoch;
        if engine.phase != Phase::Promoting || !wanted.has(r) || !admitted {
            return None;
        }
        let mut next = *state;
        self.open_session(&mut next, e, r);
        let engine = &mut next.engines[e];
        engine.promoted = engine.promoted.with(r);
        // Rule 15: the bit is read after the promote, when the old engine can no longer set it.
        if next.replicas[r].bit && !self.broken(Bug::Rule15BitsBeforePromote) {
            engine.bits_read = engine.bits_read.with(r);
        }
        Some(next)
    }

    /// Rule 16: nobody else is alive, so nobody else can hold a lease.
    pub(crate) fn know_dead(&self, state: &State, e: usize) -> Option<State> {
        let engine = &state.engines[e];
        if !matches!(engine.phase, Phase::Promoting | Phase::Deciding | Phase::Serving) || engine.waited {
            return None;
        }
        let dead = if self.broken(Bug::Rule16LastOwnerDead) {
            state.engines.iter().all(|other| other.instance != engine.previous_owner)
        } else {
            state.engines.iter().all(|other| other.instance == engine.instance || other.phase == Phase::Off)
        };
        dead.then(|| {
            let mut next = *state;
            next.engines[e].waited = true;
            next
        })
    }

    /// Rule 15: members that were not promoted leave `S` by a swap. Rule 16: this swap is sent only when no older
    /// engine can hold a lease any more; after it the next opener may find all of a smaller `S` and start at once.
    pub(crate) fn decide(&self, state: &State, e: usize) -> Option<State> {
        let engine = &state.engines[e];
        if engine.phase != Phase::Promoting {
            return None;
        }
        let members = engine.config.in_sync;
        let counted =
            if self.broken(Bug::Rule15OpenTakesRebuilding) { engine.promoted } else { engine.promoted.and(members) };
        let needed = u32::from(self.bounds.members_min.max(1)).min(members.len());
        if counted.len() < needed {
            return None;
        }
        let all = counted == members || self.broken(Bug::Rule15OpenKeepsUnpromoted);
        let waits_here = ![Bug::Rule16WaitAfterSwap, Bug::Rule16NoWait].into_iter().any(|b| self.broken(b));
        if !all && waits_here && !engine.waited {
            return None;
        }
        let mut next = *state;
        next.engines[e].waited |= all || !self.broken(Bug::Rule16WaitAfterSwap);
        if all {
            self.saw(Seen::OpenedWithAll);
            self.serve(&mut next, e);
            return Some(next);
        }
        if engine.config.version.number >= self.bounds.number {
            return None;
        }
        let mut record = engine.config;
        record.in_sync = counted;
        record.rebuilding = record.rebuilding.minus(counted);
        record.version.number = self.next_number(record.version.number);
        next.engines[e].phase = Phase::Deciding;
        self.ask(&mut next, e, Reason::Decide, record).then_some(next)
    }

    /// Hosts are served from now on.
    fn serve(&self, state: &mut State, e: usize) {
        let bits = self.bounds.bits;
        let engine = &mut state.engines[e];
        let members = engine.config.in_sync.and(engine.promoted);
        // Rule 18: a region may differ where a member says so; without bits every region may.
        let differ = !bits || !engine.bits_read.and(members).is_empty();
        engine.inherited = members.len() > 1 && differ && self.bug != Some(Bug::Rule18ReadInherited);
        engine.phase = Phase::Serving;
        engine.legs = members.or(engine.config.rebuilding.and(engine.promoted));
        engine.promoted = Set::EMPTY;
        engine.bits_read = Set::EMPTY;
        engine.previous_owner = 0;
        engine.job = Job::None;
    }

    /// Rule 8.
    pub(crate) fn next_number(&self, number: u8) -> u8 {
        if self.broken(Bug::Rule08SameNumber) { number } else { number + 1 }
    }

    pub(crate) fn assume_committed(&self, state: &State, e: usize) -> Option<State> {
        let serving = state.engines[e].phase == Phase::Serving && state.engines[e].pending.is_some();
        (serving && self.broken(Bug::Rule07AssumeCommitted)).then(|| {
            let mut next = *state;
            self.committed(&mut next, e);
            next
        })
    }

    pub(crate) fn reread(&self, state: &State, e: usize) -> Option<State> {
        let engine = &state.engines[e];
        let unchanged = state.record == engine.config;
        let open = engine.phase == Phase::Serving && engine.pending.is_some();
        (open && unchanged && self.broken(Bug::Rule07RereadProves)).then(|| {
            let mut next = *state;
            next.engines[e].pending = None;
            self.finish_job(&mut next, e);
            next
        })
    }
}
