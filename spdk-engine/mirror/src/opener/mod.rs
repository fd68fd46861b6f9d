//! Opening a volume: from the arbiter's record to a core that may serve (rules 8, 11, 15, 21).
//!
//! *Flow.*
//! ```text
//! Start ─▶ read record ─▶ CAS epoch g+1, clean=false ─▶ promote S (and R) ─▶ connect ─▶ bits ─▶ CAS the sets ─▶ Ready
//!              ▲  refused: the record moved │                  │ retry until enough or given up
//!              └────────────────────────────┘                  ▼
//!                                                            Failed
//! ```
//! The epoch is raised *before* any replica is promoted, so that an older opener that is still under way loses at
//! the arbiter. A member is used only after its promote: the replica has then ended and drained the sessions of
//! older engines, so no late write can land on it. Members that were not promoted leave `S` by a swap before
//! `Ready`, hence before any completion. A replica outside `S` is never a source, whatever it says.
//!
//! After an unclean stop members may differ where writes were in flight. Their write-intent bits say where (rule 18);
//! they are read only now, after the promotes (see [`bits`]; read again over a new promote when that fails, see [`reread`]). The union over all promoted members is what the core
//! inherits; a region of which nothing is known counts as set. Those whose bits cannot be read go to `R` for a full
//! copy, if `S` may shrink so far. Without any bits, available mode keeps one promoted member as `S` and puts the
//! others into `R`; strict mode keeps them in `S` and asks the core to copy one over the others before it serves
//! anything ([`OpenParams::equalise_from`]). All of them have every acknowledged write, so each stays a lawful source
//! if the engine dies meanwhile. After a clean close members are equal and bits are not read.
//!
//! *The old engine's lease* (rule 16). An engine that was not fenced on some member may still answer reads from it, but
//! only while every member of `S` confirms. Each member of `S` that was promoted confirms nothing to it any more. So
//! when all of `S` are promoted there is nothing to wait for, nor after a clean close or when all older engines are
//! known to be dead. Else the sets are decided only when the lease and a margin have passed since the first promote
//! of a member. The wait comes *before* the swap of the sets: were a smaller `S` recorded during it and this engine
//! replaced, the next one could promote all of that `S` and would not wait for the oldest engine. Members that are
//! promoted meanwhile end the wait.
//!
//! *Invariants.* One swap in flight at a time; a swap of unknown outcome is sent again unchanged until the arbiter
//! has answered (rule 7); `Ready` or `Failed` comes once and is the last action.
//!
//! *When things fail.* No record: `Failed(NoRecord)` (rule 21: that is not a new volume). A newer epoch anywhere:
//! `Failed(Superseded)`. Too few members within `give_up_ns`: `Failed(NoMember)`; the epoch stays raised, which is
//! harmless: the next opener raises it again. The runner retries with a new engine instance or reports.
//!
//! *Duties of the runner.* Each action that asks something gets one answer within the runner's own deadline. A leg
//! given `up: false` in `Ready` is reconnected by the runner and announced to the core by `LegBack`.

mod bits;
mod decide;
mod power;
mod reread;
mod types;

use std::collections::BTreeMap;

pub use types::*;

use self::bits::MemberBits;
use self::power::Recorded;
use crate::LEGS_MAX;
use crate::config::{Config, Epoch, ReplicaId};
use crate::events::{LegId, Nanos, SwapId, SwapOutcome};
use crate::meta::RegionBits;
use crate::params::{LegInit, OpenParams};

#[derive(Debug)]
enum Phase {
    New,
    Reading { retry_at: Option<Nanos> },
    Raising(Cas),
    Promoting,
    Connecting { until: Nanos },
    ReadingBits { until: Nanos },
    Deciding(Cas),
    Finished,
}

/// A swap being tried until it is settled.
#[derive(Debug)]
struct Cas {
    id: SwapId,
    base: Config,
    next: Config,
    /// Set while no request is in flight.
    retry_at: Option<Nanos>,
}

#[derive(Debug, Default)]
struct Candidate {
    promoted: bool,
    facts: ReplicaFacts,
    unusable: bool,
    retry_at: Option<Nanos>,
}

/// The state machine. See the module's documentation.
#[derive(Debug)]
pub struct Opener {
    params: OpenerParams,
    phase: Phase,
    /// The record as last committed by this opener.
    config: Option<Config>,
    was_clean: bool,
    /// The record that this one was raised on top of is of an engine that has ended, with all before it.
    follows_dead: bool,
    candidates: BTreeMap<ReplicaId, Candidate>,
    first_promoted_at: Option<Nanos>,
    /// The wait for the old engine's lease was told.
    lease_told: bool,
    equalise_from: Option<LegId>,
    legs: Vec<LegInit>,
    connected: u32,
    /// Of the last engine that may have served.
    served: Option<Epoch>,
    bits: BTreeMap<ReplicaId, MemberBits>,
    /// What the members' superblocks say of their caches.
    recorded: BTreeMap<ReplicaId, Recorded>,
    hosts_must_detach: bool,
    inherited: Option<RegionBits>,
    give_up_at: Nanos,
    next_cas: u64,
}

impl Opener {
    /// A new opener; the first input is [`OpenInput::Start`].
    #[must_use]
    pub fn new(params: OpenerParams) -> Self {
        Self {
            params,
            phase: Phase::New,
            config: None,
            was_clean: false,
            follows_dead: false,
            candidates: BTreeMap::new(),
            first_promoted_at: None,
            lease_told: false,
            equalise_from: None,
            legs: Vec::new(),
            connected: 0,
            served: None,
            bits: BTreeMap::new(),
            recorded: BTreeMap::new(),
            hosts_must_detach: false,
            inherited: None,
            give_up_at: Nanos::MAX,
            next_cas: 0,
        }
    }

    /// Whether `Ready` or `Failed` was given.
    #[must_use]
    pub fn is_finished(&self) -> bool {
        matches!(self.phase, Phase::Finished)
    }

    /// What to tell the next attempt when this one has failed.
    #[must_use]
    pub fn raised_in_vain(&self) -> Option<RaisedInVain> {
        let raised = self.config.as_ref()?.epoch;
        self.served.map(|served| RaisedInVain { served, raised })
    }

    /// Whether no engine before this one can answer anything, so that it belongs to `dead_engines` of the next attempt if
    /// this one fails. Meaningful once the epoch was raised.
    #[must_use]
    pub fn follows_dead(&self) -> bool {
        self.follows_dead
    }

    /// Takes one input and appends the actions that follow from it.
    pub fn apply(&mut self, now: Nanos, input: OpenInput, out: &mut Vec<OpenAction>) {
        if self.is_finished() {
            return;
        }
        match input {
            OpenInput::Start => self.apply_start(now, out),
            OpenInput::RecordRead { result } => self.apply_record(now, result, out),
            OpenInput::CasAnswer { cas, outcome } => self.apply_cas(now, cas, outcome, out),
            OpenInput::Promoted { replica, result } => self.apply_promoted(now, &replica, result, out),
            OpenInput::Connected { leg, up } => self.apply_connected(now, leg, up, out),
            OpenInput::MetaRead { leg, result } => self.apply_meta_read(now, leg, result, out),
            OpenInput::Tick => {}
        }
        self.advance(now, out);
        if !self.is_finished() {
            out.push(OpenAction::WakeAt { at: self.next_deadline().max(now) });
        }
    }

    fn apply_start(&mut self, now: Nanos, out: &mut Vec<OpenAction>) {
        if matches!(self.phase, Phase::New) {
            self.give_up_at = now.saturating_add(self.params.waits.give_up_ns);
            self.phase = Phase::Reading { retry_at: None };
            out.push(OpenAction::ReadRecord);
        }
    }

    fn apply_record(&mut self, now: Nanos, result: Result<Config, RecordError>, out: &mut Vec<OpenAction>) {
        if !matches!(self.phase, Phase::Reading { .. }) {
            return;
        }
        match result {
            Ok(record) => self.raise(record, out),
            Err(RecordError::NotFound) => self.fail(OpenError::NoRecord, out),
            Err(RecordError::Unavailable) => {
                self.phase = Phase::Reading { retry_at: Some(now.saturating_add(self.params.waits.retry_ns)) };
            }
        }
    }

    /// Asks for epoch g+1 on top of `record` (rule 15: first of all).
    fn raise(&mut self, record: Config, out: &mut Vec<OpenAction>) {
        if let Err(error) = self.check_record(&record) {
            self.fail(error, out);
            return;
        }
        let mut next = record.clone();
        next.epoch = record.epoch.next();
        next.engine_instance = self.params.engine_instance.clone();
        next.clean = false;
        self.was_clean = record.clean;
        self.follows_dead = self.params.dead_engines.contains(&record.engine_instance);
        let in_vain = self.params.in_vain.filter(|v| v.raised == record.epoch);
        self.served = Some(in_vain.map_or(record.epoch, |v| v.served));
        let cas = self.send_cas(record, next, out);
        self.phase = Phase::Raising(cas);
    }

    fn check_record(&self, record: &Config) -> Result<(), OpenError> {
        record.check()?;
        if let Some(expected) = &self.params.lineage
            && *expected != record.lineage
        {
            return Err(OpenError::Lineage { expected: expected.clone(), found: record.lineage.clone() });
        }
        let replicas = record.in_sync.len() + record.rebuilding.len();
        if replicas > LEGS_MAX {
            return Err(OpenError::TooManyReplicas(replicas));
        }
        Ok(())
    }

    fn send_cas(&mut self, base: Config, next: Config, out: &mut Vec<OpenAction>) -> Cas {
        let id = SwapId(self.next_cas);
        self.next_cas += 1;
        out.push(OpenAction::DoCas { cas: id, expect: base.version(), next: next.clone() });
        Cas { id, base, next, retry_at: None }
    }

    fn apply_cas(&mut self, now: Nanos, id: SwapId, outcome: SwapOutcome, out: &mut Vec<OpenAction>) {
        let (Phase::Raising(cas) | Phase::Deciding(cas)) = &mut self.phase else { return };
        if cas.id != id || cas.retry_at.is_some() {
            return;
        }
        let next_version = cas.next.version();
        match outcome {
            SwapOutcome::Committed => self.cas_committed(out),
            SwapOutcome::Refused { current } if current.version() == next_version => self.cas_committed(out),
            SwapOutcome::Refused { current } if current.version() != cas.base.version() => {
                self.cas_lost(current, out);
            }
            // Unknown, or refused although nothing changed that we compare: settle it by trying again (rule 7).
            SwapOutcome::Refused { .. } | SwapOutcome::Unknown => {
                cas.retry_at = Some(now.saturating_add(self.params.waits.retry_ns));
            }
        }
    }

    /// The record moved under us. Before our epoch stands that is the old engine's last change, and we build on it.
    fn cas_lost(&mut self, current: Config, out: &mut Vec<OpenAction>) {
        let Phase::Raising(cas) = &self.phase else {
            self.fail(OpenError::Superseded, out);
            return;
        };
        let same_engine = current.epoch == cas.base.epoch && current.engine_instance == cas.base.engine_instance;
        // A number that fell is an old copy of the record (rule 21).
        if same_engine && current.config_number >= cas.base.config_number {
            self.raise(current, out);
        } else {
            self.fail(OpenError::Superseded, out);
        }
    }

    fn cas_committed(&mut self, out: &mut Vec<OpenAction>) {
        match std::mem::replace(&mut self.phase, Phase::Promoting) {
            Phase::Deciding(cas) => {
                self.config = Some(cas.next);
                self.ready(out);
            }
            Phase::Raising(cas) => {
                let event = OpenEvent::EpochRaised { epoch: cas.next.epoch, was_clean: self.was_clean };
                out.push(OpenAction::Event(event));
                self.promote_all(&cas.next, out);
                self.config = Some(cas.next);
            }
            other => self.phase = other,
        }
    }

    fn promote_all(&mut self, config: &Config, out: &mut Vec<OpenAction>) {
        for replica in config.in_sync.iter().chain(&config.rebuilding) {
            self.candidates.insert(replica.clone(), Candidate::default());
            out.push(promote(config, replica));
        }
    }

    fn apply_promoted(
        &mut self,
        now: Nanos,
        replica: &ReplicaId,
        result: Result<ReplicaFacts, PromoteError>,
        out: &mut Vec<OpenAction>,
    ) {
        if !matches!(self.phase, Phase::Promoting) {
            return self.apply_promoted_again(now, replica, result, out);
        }
        let member = self.config.as_ref().is_some_and(|c| c.in_sync.contains(replica));
        let Some(candidate) = self.candidates.get_mut(replica) else { return };
        match result {
            Ok(facts) => {
                candidate.promoted = true;
                candidate.facts = facts;
                if member {
                    self.first_promoted_at.get_or_insert(now);
                }
                out.push(OpenAction::Event(OpenEvent::Promoted { replica: replica.clone() }));
            }
            Err(PromoteError::Newer) => self.fail(OpenError::Superseded, out),
            Err(error) => {
                candidate.unusable = error == PromoteError::Unusable;
                if error == PromoteError::Unreachable {
                    candidate.retry_at = Some(now.saturating_add(self.params.waits.retry_ns));
                }
                out.push(OpenAction::Event(OpenEvent::NotPromoted { replica: replica.clone(), error }));
            }
        }
    }

    fn apply_connected(&mut self, now: Nanos, leg: LegId, up: bool, out: &mut Vec<OpenAction>) {
        if !matches!(self.phase, Phase::Connecting { .. }) {
            return self.apply_connected_again(now, leg, up, out);
        }
        let bit = 1u32 << leg.0.min(31);
        if let Some(init) = self.legs.iter_mut().find(|l| l.leg == leg)
            && self.connected & bit == 0
        {
            self.connected |= bit;
            init.up = up;
        }
    }

    /// Does what time or the last answer made possible.
    fn advance(&mut self, now: Nanos, out: &mut Vec<OpenAction>) {
        match &mut self.phase {
            Phase::Reading { retry_at } if retry_at.is_some_and(|at| at <= now) => {
                *retry_at = None;
                out.push(OpenAction::ReadRecord);
            }
            Phase::Raising(cas) | Phase::Deciding(cas) if cas.retry_at.is_some_and(|at| at <= now) => {
                cas.retry_at = None;
                cas.id = SwapId(self.next_cas);
                self.next_cas += 1;
                out.push(OpenAction::DoCas { cas: cas.id, expect: cas.base.version(), next: cas.next.clone() });
            }
            Phase::Promoting => self.advance_promoting(now, out),
            _ => {}
        }
        if let Phase::Connecting { until } = self.phase
            && (until <= now || self.connected.count_ones() as usize == self.legs.len())
        {
            self.read_bits(now, out);
        }
        if let Phase::ReadingBits { until } = self.phase {
            if until <= now || self.all_bits_are_read() {
                self.decide(out);
            } else {
                self.promote_again(now, out);
            }
        }
        if !self.is_finished() && self.give_up_at <= now {
            let reason = self.give_up_reason();
            self.fail(reason, out);
        }
    }

    fn advance_promoting(&mut self, now: Nanos, out: &mut Vec<OpenAction>) {
        let Some(config) = &self.config else { return };
        let (promoted, undecided) = self.count_members(config);
        let waited =
            self.first_promoted_at.is_some_and(|at| at.saturating_add(self.params.waits.promote_wait_ns) <= now);
        if promoted >= members_needed(config) && (undecided == 0 || waited) {
            match self.lease_end(promoted).filter(|end| *end > now) {
                None => return self.connect_all(now, out),
                Some(until) if !std::mem::replace(&mut self.lease_told, true) => {
                    out.push(OpenAction::Event(OpenEvent::LeaseWait { until }));
                }
                Some(_) => {}
            }
        }
        for (replica, candidate) in &mut self.candidates {
            if candidate.retry_at.is_some_and(|at| at <= now) {
                candidate.retry_at = None;
                out.push(promote(config, replica));
            }
        }
    }

    /// Members promoted, and members that may still be.
    fn count_members(&self, config: &Config) -> (usize, usize) {
        let mut counts = (0, 0);
        for replica in &config.in_sync {
            match self.candidates.get(replica) {
                Some(c) if c.promoted => counts.0 += 1,
                Some(c) if !c.unusable => counts.1 += 1,
                _ => {}
            }
        }
        counts
    }

    fn list_legs(&mut self, config: &Config) {
        self.legs.clear();
        for replica in config.in_sync.iter().chain(&config.rebuilding) {
            if let Some(candidate) = self.candidates.get(replica).filter(|c| c.promoted) {
                let leg = LegId(u32::try_from(self.legs.len()).unwrap_or(u32::MAX));
                let local = self.params.local.contains(replica);
                let ReplicaFacts { meta, instance, .. } = candidate.facts.clone();
                let replica = replica.clone();
                self.legs.push(LegInit { leg, replica, local, up: false, meta, instance, changed: false });
            }
        }
    }

    fn connect_all(&mut self, now: Nanos, out: &mut Vec<OpenAction>) {
        let Some(config) = self.config.clone() else { return };
        self.list_legs(&config);
        self.phase = Phase::Connecting { until: now.saturating_add(self.params.waits.connect_wait_ns) };
        for leg in &self.legs {
            out.push(OpenAction::Connect { leg: leg.leg, replica: leg.replica.clone() });
        }
    }

    fn ready(&mut self, out: &mut Vec<OpenAction>) {
        let geometry = self.geometry();
        let Some(config) = self.config.take() else { return };
        self.phase = Phase::Finished;
        // A replica of R that did not connect is added later by the runner; a member must be present.
        let legs = std::mem::take(&mut self.legs);
        let meta = self.meta_init(geometry, &legs);
        let legs = legs.into_iter().filter(|l| l.up || config.in_sync.contains(&l.replica)).collect();
        out.push(OpenAction::Ready(Box::new(OpenParams {
            volume: self.params.volume.clone(),
            block_size: self.params.block_size,
            num_blocks: config.size_blocks,
            config,
            legs,
            equalise_from: self.equalise_from,
            meta,
            flushed: self.was_clean,
            hosts_must_detach: self.hosts_must_detach,
            options: self.params.options,
        })));
    }

    fn fail(&mut self, reason: OpenError, out: &mut Vec<OpenAction>) {
        self.phase = Phase::Finished;
        out.push(OpenAction::Failed { reason });
    }

    fn give_up_reason(&self) -> OpenError {
        match (&self.phase, &self.config) {
            (Phase::Promoting, Some(config)) => {
                let (promoted, _) = self.count_members(config);
                OpenError::NoMember { promoted, needed: members_needed(config) }
            }
            _ => OpenError::ArbiterTimeout,
        }
    }

    fn next_deadline(&self) -> Nanos {
        let phase = match &self.phase {
            Phase::Reading { retry_at } => *retry_at,
            Phase::Raising(cas) | Phase::Deciding(cas) => cas.retry_at,
            Phase::Promoting => self.next_promote_deadline(),
            Phase::Connecting { until } => Some(*until),
            Phase::ReadingBits { until } => self.next_read().into_iter().chain([*until]).min(),
            Phase::New | Phase::Finished => None,
        };
        phase.unwrap_or(Nanos::MAX).min(self.give_up_at)
    }

    fn next_promote_deadline(&self) -> Option<Nanos> {
        let retry = self.candidates.values().filter_map(|c| c.retry_at).min();
        // With too few members the end of the wait changes nothing; only retries do.
        let config = self.config.as_ref()?;
        let (promoted, undecided) = self.count_members(config);
        if promoted < members_needed(config) {
            return retry;
        }
        let wait = self.first_promoted_at.map(|at| at.saturating_add(self.params.waits.promote_wait_ns));
        let wait = if undecided == 0 { None } else { wait };
        retry.into_iter().chain(wait.max(self.lease_end(promoted))).min()
    }
}

/// Fewest members to open with: `minInSync` in strict mode, but no more than there are.
fn members_needed(config: &Config) -> usize {
    config.members_min().min(config.in_sync.len())
}

fn promote(config: &Config, replica: &ReplicaId) -> OpenAction {
    OpenAction::Promote {
        replica: replica.clone(),
        epoch: config.epoch,
        engine_instance: config.engine_instance.clone(),
    }
}
