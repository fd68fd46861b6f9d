//! The model as the checker sees it: where it starts, what is bounded, what must always and what must sometimes hold.
//!
//! *Always.* [`Mirror::properties`] lists the properties; each is looked at in every state that can be reached.
//!
//! *Sometimes.* A model in which nothing happens keeps every promise. So the steps that matter are counted
//! ([`Seen`]) and a check is worth something only if all of them were seen ([`Coverage::unseen`]).

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use stateright::{Model, Property};

use crate::bug::Bug;
use crate::set::{REPLICAS, Set};
use crate::state::{Engine, Job, Phase, Record, Replica, State, Version, Violation};
use crate::steps::Step;

/// How far the model goes. Everything else is unbounded: any number of lost connections, restarts, retries, reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bounds {
    /// The first `S`. Replicas of neither set hold older data.
    pub in_sync: Set,
    /// The first `R`, connected but not copied.
    pub rebuilding: Set,
    /// `minInSync`: 1 is the available mode, 2 the strict one.
    pub members_min: u8,
    /// The highest `k`; it begins at 1.
    pub number: u8,
    /// The highest engine instance; the first one, which serves already, is 1.
    pub instances: u8,
    /// The highest number written; 1 is there already.
    pub written: u8,
    /// Write-intent bits; without them everything may differ after an unclean stop.
    pub bits: bool,
    /// Connections break while their engine lives, not only when it dies or another one takes over.
    pub breaks: bool,
}

impl Bounds {
    /// All three replicas are members, one takeover, one write, no swap but those of the opening.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            in_sync: Set::from_bits(0b111),
            rebuilding: Set::EMPTY,
            members_min: 1,
            number: 2,
            instances: 2,
            written: 2,
            bits: false,
            breaks: false,
        }
    }
}

impl Default for Bounds {
    fn default() -> Self {
        Self::new()
    }
}

/// Things that must happen in a check that is worth something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Seen {
    /// A write was acknowledged.
    Acknowledged,
    /// By an engine that had taken over.
    AcknowledgedAfterTakeover,
    /// By an engine that had been taken over from: every member had the write before.
    AcknowledgedLate,
    /// While the outcome of a swap was unknown.
    AcknowledgedDuringSwap,
    /// With a single member left.
    AcknowledgedByOne,
    /// A read was answered.
    Read,
    /// Although a member was taken by another engine, within T of its last confirmation.
    ReadOnLease,
    /// A member left by a swap.
    Left,
    /// A rebuilt replica joined.
    Joined,
    /// An engine opened with all members.
    OpenedWithAll,
    /// An engine opened without some of them.
    OpenedWithoutAll,
    /// An opener built on a record that the old engine had changed meanwhile.
    RaisedAgain,
    /// An engine found another owner in the record.
    Superseded,
    /// A swap took effect and its sender, which is alive, did not hear of it.
    CommittedUnheard,
    /// A swap took effect after its sender was gone.
    CommittedAfterSenderWasGone,
    /// A write of an ended session landed.
    OrphanLanded,
    /// A write was sent again on a new session.
    Replayed,
    /// Members that differed were made equal.
    EqualisedDifferent,
    /// A write-intent bit was cleared.
    BitCleared,
}

/// The things of [`Seen`], to be named.
pub(crate) const SEEN: [Seen; 19] = [
    Seen::Acknowledged,
    Seen::AcknowledgedAfterTakeover,
    Seen::AcknowledgedLate,
    Seen::AcknowledgedDuringSwap,
    Seen::AcknowledgedByOne,
    Seen::Read,
    Seen::ReadOnLease,
    Seen::Left,
    Seen::Joined,
    Seen::OpenedWithAll,
    Seen::OpenedWithoutAll,
    Seen::RaisedAgain,
    Seen::Superseded,
    Seen::CommittedUnheard,
    Seen::CommittedAfterSenderWasGone,
    Seen::OrphanLanded,
    Seen::Replayed,
    Seen::EqualisedDifferent,
    Seen::BitCleared,
];

/// How often each thing of [`Seen`] happened.
#[derive(Debug, Default)]
pub struct Coverage([AtomicU64; SEEN.len()]);

impl Coverage {
    /// What never happened.
    #[must_use]
    pub fn unseen(&self) -> Vec<Seen> {
        SEEN.into_iter().filter(|seen| self.0[*seen as usize].load(Ordering::Relaxed) == 0).collect()
    }
}

/// The model.
#[derive(Debug, Clone)]
pub struct Mirror {
    /// How far it goes.
    pub bounds: Bounds,
    /// The rule that is broken on purpose.
    pub bug: Option<Bug>,
    /// What happened.
    pub coverage: Arc<Coverage>,
}

impl Mirror {
    /// A model within bounds.
    #[must_use]
    pub fn new(bounds: Bounds, bug: Option<Bug>) -> Self {
        Self { bounds, bug, coverage: Arc::default() }
    }

    pub(crate) fn broken(&self, bug: Bug) -> bool {
        self.bug == Some(bug)
    }

    pub(crate) fn saw(&self, seen: Seen) {
        self.coverage.0[seen as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// An engine serves at epoch 1; all members hold value 1, which was acknowledged; the others hold older data.
    #[must_use]
    pub fn first(&self) -> State {
        let Bounds { in_sync, rebuilding, .. } = self.bounds;
        let version = Version { epoch: 1, number: 1, owner: 1 };
        let record = Record { version, in_sync, rebuilding };
        let legs = in_sync.or(rebuilding);
        let serving = Engine {
            instance: 1,
            phase: Phase::Serving,
            config: record,
            waited: true,
            legs,
            job: Job::None,
            ..Engine::default()
        };
        let replica = |r: usize| Replica {
            data: u8::from(in_sync.has(r)),
            promoted: u8::from(legs.has(r)),
            session: u8::from(legs.has(r)),
            ..Replica::default()
        };
        State {
            record,
            queue: [None; crate::state::QUEUE_MAX],
            engines: [serving, Engine::default()],
            replicas: std::array::from_fn::<_, REPLICAS, _>(replica),
            acknowledged: 1,
            floor: 1,
            written: 1,
            instances: 1,
            violation: None,
        }
    }
}

impl Model for Mirror {
    type State = State;
    type Action = Step;

    fn init_states(&self) -> Vec<State> {
        vec![self.first().normal()]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Step>) {
        Step::each(state, &mut |step| actions.push(step));
    }

    fn next_state(&self, state: &State, step: Step) -> Option<State> {
        self.step(state, step).map(State::normal)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        fn never(violation: Violation) -> impl Fn(&State) -> bool {
            move |state| state.violation != Some(violation)
        }
        vec![
            Property::always("no acknowledged write is lost", |_, s| acknowledged_is_kept(s)),
            Property::always("no read is stale", |_, s| never(Violation::StaleRead)(s)),
            Property::always("an engine that was replaced acknowledges nothing new", |_, s| {
                never(Violation::ReplacedEngineAcknowledged)(s)
            }),
            Property::always("an epoch has one engine", |_, s| epoch_has_one_engine(s)),
            Property::always("sources are members", |_, s| never(Violation::SourceOutsideInSync)(s)),
            Property::always("S is never empty", |_, s| never(Violation::EmptyInSync)(s)),
            Property::always("S keeps its minimum", |_, s| never(Violation::BelowMinimum)(s)),
            Property::always("k rises", |_, s| never(Violation::NumberStays)(s)),
        ]
    }
}

/// Every replica of the recorded `S` has every acknowledged write, at any time: each of them may be the one that is
/// left.
fn acknowledged_is_kept(state: &State) -> bool {
    state.record.in_sync.iter().all(|r| state.replicas[r].data >= state.acknowledged)
}

fn epoch_has_one_engine(state: &State) -> bool {
    let owns = |e: &Engine| !matches!(e.phase, Phase::Off | Phase::Raising);
    let [a, b] = &state.engines;
    !(owns(a) && owns(b) && a.config.version.epoch == b.config.version.epoch)
}
