//! A serving engine: membership, writes, reads, copies (rules 1, 3, 6, 8, 9, 10, 16, 18).

use crate::bug::Bug;
use crate::model::{Mirror, Seen};
use crate::set::Set;
use crate::state::{Engine, Job, Reason, State, Violation};
use crate::steps::end_session;

impl Mirror {
    /// Whose answer an acknowledgement needs (rules 6 and 10).
    fn expected(&self, engine: &Engine) -> Set {
        let mut expected = engine.required();
        if self.broken(Bug::Rule06AckBeforeSwap) {
            expected = expected.minus(engine.leaving());
        }
        if self.broken(Bug::Rule10AnswerNotRequired) {
            return engine.config.in_sync;
        }
        // A member without a leg exists only when rule 15 is broken: nobody waits for it then.
        if self.broken(Bug::Rule15OpenKeepsUnpromoted) {
            expected = expected.and(engine.legs);
        }
        if self.broken(Bug::Rule10JoinWithoutMirroring) { expected } else { expected.or(engine.mirrored()) }
    }

    /// Who gets the data of a write that begins now.
    fn receivers(&self, engine: &Engine) -> Set {
        if self.broken(Bug::Rule10AnswerNotRequired) {
            return engine.required().or(engine.mirrored());
        }
        self.expected(engine)
    }

    /// A new session of this engine: the older one is drained, what is still needed is sent again (rule 13). A
    /// replica that was promoted to a newer epoch refuses; then the engine can only stop, see [`crate::Step::Die`].
    pub(crate) fn connect(&self, state: &State, e: usize, r: usize) -> Option<State> {
        let (engine, replica) = (&state.engines[e], &state.replicas[r]);
        let again = self.broken(Bug::Rule13NoDrain) && replica.disk != 0;
        let useful = !replica.serves(e) || again;
        let refused = replica.promoted > engine.config.version.epoch || engine.leaving().has(r);
        if !engine.is_serving() || !useful || refused || (again && replica.ghost != 0) {
            return None;
        }
        let mut next = *state;
        self.open_session(&mut next, e, r);
        let engine = &mut next.engines[e];
        if !engine.legs.has(r) {
            engine.legs = engine.legs.with(r);
        } else if engine.need.has(r) && !engine.done.has(r) {
            self.saw(Seen::Replayed);
            next.replicas[r].disk = sent_value(engine.job).unwrap_or(0);
        }
        Some(next)
    }

    /// Rule 6: a member leaves by a swap, and never the last one, nor one that `minInSync` needs. Which member, and
    /// when, is anybody's guess here: lost, slow and broken ones are all alike.
    pub(crate) fn eject(&self, state: &State, e: usize, r: usize) -> Option<State> {
        let engine = &state.engines[e];
        let members = engine.config.in_sync;
        let least = if self.broken(Bug::Rule06StrictShrinks) { 1 } else { self.bounds.members_min.max(1) };
        if !self.may_swap(engine) || !members.has(r) || members.len() <= u32::from(least) {
            return None;
        }
        let mut next = *state;
        if state.replicas[r].serves(e) {
            end_session(&mut next, r);
        }
        let mut record = engine.config;
        record.in_sync = members.without(r);
        record.version.number = self.next_number(record.version.number);
        self.ask(&mut next, e, Reason::Leave, record).then_some(next)
    }

    /// One swap at a time, and as many as the bounds allow.
    fn may_swap(&self, engine: &Engine) -> bool {
        engine.is_serving() && engine.pending.is_none() && engine.config.version.number < self.bounds.number
    }

    /// Rule 8: a replica is recorded in `R` before it is copied to.
    pub(crate) fn start_rebuild(&self, state: &State, e: usize, r: usize) -> Option<State> {
        let engine = &state.engines[e];
        let outside = !engine.config.in_sync.or(engine.config.rebuilding).has(r);
        if !self.may_swap(engine) || !outside || !engine.legs.has(r) || !state.replicas[r].serves(e) {
            return None;
        }
        let mut next = *state;
        let mut record = engine.config;
        record.rebuilding = record.rebuilding.with(r);
        record.version.number = self.next_number(record.version.number);
        self.ask(&mut next, e, Reason::Start, record).then_some(next)
    }

    /// A copy holds the range lock, so no write overlaps it (rules 2 and 10), and comes from a member.
    pub(crate) fn copy(&self, state: &State, e: usize, r: usize, source: usize) -> Option<State> {
        let engine = &state.engines[e];
        let wanted = engine.mirrored().has(r) && !engine.copied.has(r) && state.replicas[r].serves(e);
        if !engine.is_serving() || engine.job != Job::None || engine.inherited || !wanted {
            return None;
        }
        let value = self.take_from(state, e, source)?;
        let mut next = *state;
        next.violation = self.outside(state, e, source);
        let engine = &mut next.engines[e];
        engine.job = Job::Copy { value };
        engine.need = Set::EMPTY.with(r);
        next.replicas[r].disk = value;
        Some(next)
    }

    /// What a member has, if it may be a source.
    fn take_from(&self, state: &State, e: usize, source: usize) -> Option<u8> {
        let engine = &state.engines[e];
        let lawful = engine.config.in_sync.minus(engine.leaving()).has(source);
        (lawful && state.replicas[source].serves(e)).then_some(state.replicas[source].data)
    }

    /// Rule 15: a replica outside `S` is never a source, by the record of whoever owns it.
    fn outside(&self, state: &State, e: usize, source: usize) -> Option<Violation> {
        let owns = state.record.version.owner == state.engines[e].instance;
        (owns && !state.record.in_sync.has(source)).then_some(Violation::SourceOutsideInSync)
    }

    /// Rule 10: copied, connected, its answers required from now on, and only then asked for. Rule 9: it has the bits.
    pub(crate) fn join(&self, state: &State, e: usize, r: usize) -> Option<State> {
        let engine = &state.engines[e];
        let has_bits = !self.bounds.bits || hot(state, e).is_empty() || state.replicas[r].bit;
        let ready = engine.copied.has(r) && state.replicas[r].serves(e);
        if !self.may_swap(engine) || !ready || !(has_bits || self.broken(Bug::Rule09JoinWithoutBits)) {
            return None;
        }
        let mut next = *state;
        let mut record = engine.config;
        record.rebuilding = record.rebuilding.without(r);
        record.in_sync = record.in_sync.with(r);
        record.version.number = self.next_number(record.version.number);
        self.ask(&mut next, e, Reason::Join, record).then_some(next)
    }

    /// A joiner that may be counted in by nobody is let go at once; it stays in `R` and is copied anew.
    pub(crate) fn drop_joiner(&self, state: &State, e: usize, r: usize) -> Option<State> {
        let engine = &state.engines[e];
        if !engine.is_serving() || !engine.legs.has(r) || engine.required().has(r) {
            return None;
        }
        let mut next = *state;
        self.forget_leg(&mut next, e, r);
        self.finish_job(&mut next, e);
        Some(next)
    }

    /// Lets a leg go: its connection is ended; what its disk has of it may still land.
    pub(crate) fn forget_leg(&self, state: &mut State, e: usize, r: usize) {
        if state.replicas[r].serves(e) {
            end_session(state, r);
        }
        let engine = &mut state.engines[e];
        for set in [&mut engine.legs, &mut engine.copied, &mut engine.fresh, &mut engine.need, &mut engine.done] {
            *set = set.without(r);
        }
    }

    /// Rule 2: it holds the range lock until it is acknowledged.
    pub(crate) fn write(&self, state: &State, e: usize) -> Option<State> {
        let engine = &state.engines[e];
        let room = state.written < self.bounds.written;
        if !engine.is_serving() || engine.job != Job::None || engine.inherited || !room {
            return None;
        }
        let newer = |o: &Engine| o.is_serving() && o.waited && o.config.version.epoch > engine.config.version.epoch;
        let replaced = state.engines.iter().any(newer);
        let mut next = *state;
        next.written += 1;
        next.engines[e].job = Job::Write { value: next.written, sent: false, replaced };
        next.engines[e].need = self.receivers(engine);
        self.send(&mut next, e);
        Some(next)
    }

    /// Rule 18: live bits are durable on all of `S`, and on joiners, before data goes to any. Rule 9: a joiner takes
    /// over its source's bits.
    pub(crate) fn set_bit(&self, state: &State, e: usize, r: usize) -> Option<State> {
        let engine = &state.engines[e];
        let writing = engine.need.has(r) && matches!(engine.job, Job::Write { .. });
        let joining = engine.copied.has(r) && !hot(state, e).is_empty();
        let possible = state.replicas[r].serves(e) && !state.replicas[r].bit && self.bounds.bits;
        (possible && engine.is_serving() && (writing || joining)).then(|| {
            let mut next = *state;
            next.replicas[r].bit = true;
            self.send(&mut next, e);
            next
        })
    }

    /// Data goes out as soon as it may, to all that are connected; to the others when they are back.
    pub(crate) fn send(&self, state: &mut State, e: usize) {
        let engine = &state.engines[e];
        let Job::Write { value, sent: false, replaced } = engine.job else { return };
        let mut needs_bit = engine.need.and(self.expected(engine));
        if self.broken(Bug::Rule09JoinWithoutBits) && !hot(state, e).is_empty() {
            needs_bit = Set::EMPTY; // Once hot, always hot, whoever joined since.
        }
        let durable = needs_bit.iter().all(|r| state.replicas[r].bit);
        if self.bounds.bits && !durable && !self.broken(Bug::Rule18DataBeforeBits) {
            return;
        }
        let need = engine.need;
        state.engines[e].job = Job::Write { value, sent: true, replaced };
        for r in need.iter() {
            if state.replicas[r].serves(e) {
                state.replicas[r].disk = value;
            }
        }
    }

    /// Copies and making equal end by themselves when everybody has the data; a write ends when it is acknowledged.
    pub(crate) fn finish_job(&self, state: &mut State, e: usize) {
        let expected = self.expected(&state.engines[e]);
        let engine = &mut state.engines[e];
        let finished = match engine.job {
            Job::None | Job::Write { .. } => false,
            Job::Copy { .. } => engine.need.is_in(engine.done),
            Job::Equalise { .. } => engine.need.and(expected).is_in(engine.done),
        };
        if finished {
            match engine.job {
                // Nobody is left in `need` when the joiner was dropped meanwhile.
                Job::Copy { .. } => engine.copied = engine.copied.or(engine.need),
                _ => engine.inherited = false,
            }
            end_job(engine);
        }
    }

    /// Rules 1 and 6: every required replica has it, whatever failed or is under way.
    pub(crate) fn acknowledge(&self, state: &State, e: usize) -> Option<State> {
        let engine = &state.engines[e];
        let Job::Write { value, sent: true, replaced } = engine.job else { return None };
        let mut has = engine.done;
        if self.broken(Bug::Rule13FencedCountsAsDone) {
            let fenced = |r: &usize| state.replicas[*r].promoted > engine.config.version.epoch;
            has = engine.need.iter().filter(fenced).fold(has, Set::with);
        }
        let wanted = engine.need.and(self.expected(engine));
        let enough = wanted.is_in(has) || (self.broken(Bug::Rule01AckFirst) && !has.is_empty());
        if !enough || !engine.waited {
            return None;
        }
        self.saw_acknowledged(state, e);
        let mut next = *state;
        end_job(&mut next.engines[e]);
        next.acknowledged = next.acknowledged.max(value);
        next.floor = next.floor.max(value);
        next.violation = replaced.then_some(Violation::ReplacedEngineAcknowledged);
        Some(next)
    }

    fn saw_acknowledged(&self, state: &State, e: usize) {
        let engine = &state.engines[e];
        let other = &state.engines[1 - e];
        self.saw(Seen::Acknowledged);
        if engine.config.version.epoch > 1 {
            self.saw(Seen::AcknowledgedAfterTakeover);
        }
        if other.is_serving() && other.config.version.epoch > engine.config.version.epoch {
            self.saw(Seen::AcknowledgedLate);
        }
        if engine.pending.is_some() {
            self.saw(Seen::AcknowledgedDuringSwap);
        }
        if engine.config.in_sync.len() == 1 {
            self.saw(Seen::AcknowledgedByOne);
        }
    }

    /// Rule 18: a bit is cleared only while no write is under way and nothing is inherited.
    pub(crate) fn clear_bit(&self, state: &State, e: usize, r: usize) -> Option<State> {
        let engine = &state.engines[e];
        let idle = engine.job == Job::None || self.broken(Bug::Rule18ClearThoughWritten);
        let possible = state.replicas[r].bit && state.replicas[r].serves(e) && engine.legs.has(r);
        (self.bounds.bits && engine.is_serving() && idle && !engine.inherited && possible).then(|| {
            self.saw(Seen::BitCleared);
            let mut next = *state;
            next.replicas[r].bit = false;
            next
        })
    }

    /// Rule 16: every member that may be one by any record is connected, and so could confirm at once, or confirmed
    /// less than T ago.
    fn has_lease(&self, state: &State, e: usize) -> bool {
        let engine = &state.engines[e];
        let members =
            if self.broken(Bug::Rule16LeaseOnCommittedSet) { engine.config.in_sync } else { engine.required() };
        let confirmed = |r: usize| state.replicas[r].serves(e) || engine.fresh.has(r);
        members.iter().all(confirmed) || self.broken(Bug::Rule16NoReadGate)
    }

    /// A read is one step here: begun, executed and answered. One that is begun earlier may only return less, and one
    /// answered later passes the same checks later.
    pub(crate) fn read(&self, state: &State, e: usize, r: usize) -> Option<State> {
        let engine = &state.engines[e];
        let locked = matches!(engine.job, Job::Write { .. }) && !self.broken(Bug::Rule03ReadsDoNotWait);
        if !engine.is_serving() || !engine.waited || locked || engine.inherited || !self.has_lease(state, e) {
            return None;
        }
        let value = self.take_from(state, e, r)?;
        self.saw(Seen::Read);
        if !engine.fresh.is_empty() {
            self.saw(Seen::ReadOnLease);
        }
        let stale = (value < state.floor).then_some(Violation::StaleRead);
        let mut next = *state;
        next.floor = next.floor.max(value);
        next.violation = stale.or(self.outside(state, e, r));
        (next != *state).then_some(next)
    }

    /// Rule 18: one member's content goes to all others before anything in the region is read or written.
    pub(crate) fn equalise(&self, state: &State, e: usize, source: usize) -> Option<State> {
        let engine = &state.engines[e];
        if !engine.is_serving() || engine.job != Job::None || !engine.inherited {
            return None;
        }
        let value = self.take_from(state, e, source)?;
        let need = engine.required().or(engine.mirrored());
        if need.iter().any(|r| state.replicas[r].data != value) {
            self.saw(Seen::EqualisedDifferent);
        }
        let mut next = *state;
        next.violation = self.outside(state, e, source);
        let engine = &mut next.engines[e];
        engine.job = Job::Equalise { value };
        engine.need = need;
        engine.done = Set::EMPTY.with(source);
        for r in need.without(source).iter().filter(|r| state.replicas[*r].serves(e)) {
            next.replicas[r].disk = value;
        }
        self.finish_job(&mut next, e);
        Some(next)
    }
}

/// Replicas of an engine whose bit is durable. It read the bits when it promoted them and set the others itself.
fn hot(state: &State, e: usize) -> Set {
    let with_bit = |set: Set, r: usize| if state.replicas[r].bit { set.with(r) } else { set };
    state.engines[e].legs.iter().fold(Set::EMPTY, with_bit)
}

/// The value a leg that is back must get.
fn sent_value(job: Job) -> Option<u8> {
    match job {
        Job::Write { value, sent: true, .. } | Job::Copy { value } | Job::Equalise { value } => Some(value),
        Job::None | Job::Write { sent: false, .. } => None,
    }
}

fn end_job(engine: &mut Engine) {
    engine.job = Job::None;
    engine.need = Set::EMPTY;
    engine.done = Set::EMPTY;
}
