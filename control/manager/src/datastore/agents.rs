//! What agents have told, in the snapshot.
//!
//! An agent's answer to a call and its event stream tell the same objects by two ways. The stream tells every change, so
//! it has the last word: an answer is put in only if the stream has not told of that object since the call began.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::Duration;

use addax_plan::action::{CallTarget, Key, Kind};
use addax_plan::observed::{AgentDisk, AgentEngine, AgentReplica, AgentView, CallFailure, Observed};
use addax_plan::related;
use jiff::{SignedDuration, Timestamp};

use super::{Datastore, State};

/// Delay after the first failure of a call.
const FIRST_RETRY: Duration = Duration::from_millis(500);
/// Longest delay between failures of a call.
const LONGEST_RETRY: Duration = Duration::from_secs(60);

/// Something that an agent has.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum AgentInstance {
    /// A disk, by name.
    Disk(String),
    /// A replica, by name.
    Replica(String),
    /// An engine, by its volume.
    Engine(String),
    /// The record of a volume, which is in no view of an agent.
    Record(String),
}

impl AgentInstance {
    /// What a call changes.
    pub(crate) fn of(target: &CallTarget) -> Self {
        match target {
            CallTarget::Disk(name) => Self::Disk(name.clone()),
            CallTarget::Replica(name) => Self::Replica(name.clone()),
            CallTarget::Engine(volume) | CallTarget::Member(volume, _) => Self::Engine(volume.clone()),
            CallTarget::Recovery(volume, _) => Self::Record(volume.clone()),
        }
    }

    fn keys(&self, node: &str) -> BTreeSet<Key> {
        match self {
            Self::Disk(_) => BTreeSet::from([Key::new(Kind::Node, node)]),
            Self::Replica(name) => related::of_agent_instance(node, Some(name), None),
            Self::Engine(volume) => related::of_agent_instance(node, None, Some(volume)),
            Self::Record(volume) => BTreeSet::from([Key::new(Kind::Volume, volume)]),
        }
    }
}

/// How far an agent had told of something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AgentMark {
    stream: u64,
    told: u64,
}

#[derive(Debug, Default)]
pub(super) struct Marks {
    stream: u64,
    told: HashMap<AgentInstance, u64>,
}

impl Marks {
    fn mark(&self, instance: &AgentInstance) -> AgentMark {
        AgentMark { stream: self.stream, told: self.told.get(instance).copied().unwrap_or(0) }
    }

    fn tell(&mut self, instance: &AgentInstance) {
        *self.told.entry(instance.clone()).or_default() += 1;
    }
}

/// Something new about an agent.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum AgentChange {
    /// A replica as it is now; `None` when it is gone.
    Replica(String, Option<AgentReplica>),
    /// An engine as it is now, by its volume; `None` when it is gone.
    Engine(String, Option<AgentEngine>),
    /// A disk as it is now; `None` when it is forgotten.
    Disk(String, Option<AgentDisk>),
    /// The agent itself.
    Info {
        /// Name and version of the data plane.
        data_plane: String,
        /// The data-plane process; empty while it is down.
        data_plane_instance: String,
        /// Version of the agent's interface.
        api_version: u32,
    },
}

impl AgentChange {
    fn instance(&self) -> Option<AgentInstance> {
        match self {
            Self::Replica(name, _) => Some(AgentInstance::Replica(name.clone())),
            Self::Engine(volume, _) => Some(AgentInstance::Engine(volume.clone())),
            Self::Disk(name, _) => Some(AgentInstance::Disk(name.clone())),
            Self::Info { .. } => None,
        }
    }

    /// Puts it into a view; says whether the view differs then.
    pub(crate) fn apply(self, view: &mut AgentView) -> bool {
        match self {
            Self::Replica(name, replica) => put(&mut view.replicas, name, replica, keep_replica_time),
            Self::Engine(volume, engine) => put(&mut view.engines, volume, engine, keep_engine_time),
            Self::Disk(name, disk) => put(&mut view.disks, name, disk, |_, _| {}),
            Self::Info { data_plane, data_plane_instance, api_version } => {
                let old = (view.data_plane.clone(), view.data_plane_instance.clone(), view.api_version);
                let new = (data_plane, data_plane_instance, api_version);
                let differs = old != new;
                (view.data_plane, view.data_plane_instance, view.api_version) = new;
                differs
            }
        }
    }
}

fn put<T: PartialEq>(
    all: &mut BTreeMap<String, T>,
    name: String,
    new: Option<T>,
    keep_time: impl FnOnce(&T, &mut T),
) -> bool {
    let Some(mut new) = new else {
        return all.remove(&name).is_some();
    };
    let old = all.get(&name);
    if let Some(old) = old {
        keep_time(old, &mut new);
    }
    let differs = old != Some(&new);
    all.insert(name, new);
    differs
}

fn keep_replica_time(old: &AgentReplica, new: &mut AgentReplica) {
    let now = std::mem::replace(&mut new.changed_at, old.changed_at);
    if old != new {
        new.changed_at = now;
    }
}

fn keep_engine_time(old: &AgentEngine, new: &mut AgentEngine) {
    if old.state == new.state && old.engine_instance == new.engine_instance {
        new.changed_at = old.changed_at;
    }
    for (name, member) in &mut new.replicas {
        if let Some(old) = old.replicas.get(name).filter(|old| old.mode == member.mode) {
            member.changed_at = old.changed_at;
        }
    }
}

impl Datastore {
    /// A stream has told everything there is; from now on its view counts.
    pub(crate) fn agent_synced(&self, node: &str, mut view: AgentView) {
        let mut state = self.lock();
        let marks = state.marks.entry(node.to_owned()).or_default();
        marks.stream += 1;
        marks.told.clear();
        if let Some(old) = state.observed.agents.remove(node) {
            keep_times(&old, &mut view);
            view.failures = old.failures;
        }
        view.connected = true;
        let keys = agent_keys(&state.observed, node, &view);
        state.observed.agents.insert(node.to_owned(), view);
        drop(state);
        self.wake(keys);
    }

    /// A stream tells a change.
    pub(crate) fn agent_told(&self, node: &str, change: AgentChange) {
        let instance = change.instance();
        let mut state = self.lock();
        if let Some(instance) = &instance {
            state.marks.entry(node.to_owned()).or_default().tell(instance);
        }
        let Some(view) = state.observed.agents.get_mut(node) else {
            return;
        };
        if !change.apply(view) {
            return;
        }
        let keys = match &instance {
            Some(instance) => instance.keys(node),
            None => related::of_agent(&state.observed, node),
        };
        drop(state);
        self.wake(keys);
    }

    /// The stream is closed: what it told is worth nothing any more. What is known of failures stays.
    pub(crate) fn agent_lost(&self, node: &str) {
        let mut state = self.lock();
        let Some(view) = state.observed.agents.get_mut(node).filter(|view| view.connected) else {
            return;
        };
        view.connected = false;
        let keys = related::of_agent(&state.observed, node);
        drop(state);
        self.wake(keys);
    }

    /// The agent is another manager's.
    pub(crate) fn agent_left(&self, node: &str) {
        let mut state = self.lock();
        state.marks.remove(node);
        state.failures.retain(|(of, _), _| of != node);
        let left = state.observed.agents.remove(node);
        let keys = related::of_agent(&state.observed, node);
        drop(state);
        if left.is_some() {
            self.wake(keys);
        }
    }

    /// How far the agent has told of something; taken before a call.
    pub(crate) fn agent_mark(&self, node: &str, instance: &AgentInstance) -> AgentMark {
        let empty = AgentMark { stream: 0, told: 0 };
        self.lock().marks.get(node).map_or(empty, |marks| marks.mark(instance))
    }

    /// A call has succeeded; `change` is what it answered.
    pub(crate) fn agent_answered(&self, node: &str, target: &CallTarget, mark: AgentMark, change: Option<AgentChange>) {
        let instance = AgentInstance::of(target);
        let mut state = self.lock();
        let current = state.marks.get(node).map(|marks| marks.mark(&instance)) == Some(mark);
        state.failures.remove(&(node.to_owned(), target.clone()));
        let Some(view) = state.observed.agents.get_mut(node) else {
            return;
        };
        let was_failing = view.failures.remove(target).is_some();
        let differs = current && change.is_some_and(|change| change.apply(view));
        drop(state);
        if was_failing || differs {
            self.wake(instance.keys(node));
        }
    }

    /// A call has failed: the plan sees why, and when to try again.
    pub(crate) fn agent_refused(&self, node: &str, target: &CallTarget, message: &str, now: Timestamp) {
        let mut state = self.lock();
        let State { observed, failures, .. } = &mut *state;
        let Some(view) = observed.agents.get_mut(node) else {
            return;
        };
        let count = failures.entry((node.to_owned(), target.clone())).or_default();
        let delay = SignedDuration::try_from(retry_delay(*count)).unwrap_or(SignedDuration::MAX);
        *count = count.saturating_add(1);
        let retry_at = now.checked_add(delay).unwrap_or(Timestamp::MAX);
        // Requests come and go; of each volume only the last one that failed is of interest.
        let is_older = |other: &CallTarget| match (target, other) {
            (CallTarget::Recovery(volume, id), CallTarget::Recovery(of, other)) => volume == of && id != other,
            _ => false,
        };
        view.failures.retain(|other, _| !is_older(other));
        failures.retain(|(_, other), _| !is_older(other));
        view.failures.insert(target.clone(), CallFailure { message: message.to_owned(), retry_at });
        drop(state);
        self.wake(AgentInstance::of(target).keys(node));
    }
}

fn retry_delay(failures: u32) -> Duration {
    FIRST_RETRY.saturating_mul(1_u32.checked_shl(failures).unwrap_or(u32::MAX)).min(LONGEST_RETRY)
}

/// Those that the agent tells of, even without an object here, and those that stand on its node.
fn agent_keys(observed: &Observed, node: &str, view: &AgentView) -> BTreeSet<Key> {
    let mut keys = related::of_agent(observed, node);
    for name in view.replicas.keys() {
        keys.extend(related::of_agent_instance(node, Some(name), None));
    }
    for volume in view.engines.keys() {
        keys.extend(related::of_agent_instance(node, None, Some(volume)));
    }
    keys
}

/// A stream that is opened again tells everything anew, which is no change of it.
fn keep_times(old: &AgentView, view: &mut AgentView) {
    for (name, replica) in &mut view.replicas {
        if let Some(old) = old.replicas.get(name) {
            keep_replica_time(old, replica);
        }
    }
    for (volume, engine) in &mut view.engines {
        if let Some(old) = old.engines.get(volume) {
            keep_engine_time(old, engine);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use addax_api::InstanceState;
    use addax_plan::observed::ThisNode;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(1000 + second).unwrap()
    }

    fn store() -> Datastore {
        let store = Datastore::new(ThisNode { name: "n1".to_owned(), ..ThisNode::default() });
        store.agent_synced("n1", AgentView::default());
        store
    }

    fn replica(state: InstanceState, second: i64) -> AgentReplica {
        AgentReplica {
            state,
            message: String::new(),
            address: None,
            fresh: true,
            data_plane_instance: String::new(),
            changed_at: at(second),
        }
    }

    fn change(state: InstanceState, second: i64) -> AgentChange {
        AgentChange::Replica("a".to_owned(), Some(replica(state, second)))
    }

    fn seen(store: &Datastore) -> Option<AgentReplica> {
        store.read(|observed| observed.agents.get("n1").and_then(|agent| agent.replicas.get("a")).cloned())
    }

    fn target() -> CallTarget {
        CallTarget::Replica("a".to_owned())
    }

    #[test]
    fn an_answer_counts_only_if_the_stream_has_told_nothing_since_the_call() {
        let store = store();
        let mark = store.agent_mark("n1", &AgentInstance::of(&target()));
        store.agent_answered("n1", &target(), mark, Some(change(InstanceState::Starting, 0)));
        assert_eq!(seen(&store).unwrap().state, InstanceState::Starting);
        let mark = store.agent_mark("n1", &AgentInstance::of(&target()));
        store.agent_told("n1", change(InstanceState::Running, 1));
        store.agent_answered("n1", &target(), mark, Some(change(InstanceState::Starting, 2)));
        assert_eq!(seen(&store).unwrap().state, InstanceState::Running);
    }

    #[test]
    fn an_answer_from_before_the_stream_was_opened_again_does_not_count() {
        let store = store();
        let mark = store.agent_mark("n1", &AgentInstance::of(&target()));
        store.agent_lost("n1");
        store.agent_synced("n1", AgentView::default());
        store.agent_answered("n1", &target(), mark, Some(change(InstanceState::Running, 0)));
        assert_eq!(seen(&store), None);
    }

    #[test]
    fn the_time_of_a_change_stays_while_nothing_changes() {
        let store = store();
        store.agent_told("n1", change(InstanceState::Running, 1));
        store.agent_told("n1", change(InstanceState::Running, 5));
        assert_eq!(seen(&store).unwrap().changed_at, at(1));
        store.agent_lost("n1");
        let mut view = AgentView::default();
        change(InstanceState::Running, 9).apply(&mut view);
        store.agent_synced("n1", view);
        assert_eq!(seen(&store).unwrap().changed_at, at(1));
        store.agent_told("n1", change(InstanceState::Error, 12));
        assert_eq!(seen(&store).unwrap().changed_at, at(12));
    }

    #[test]
    fn the_delay_of_failures_grows_until_a_call_succeeds() {
        let store = store();
        let retry_at = |store: &Datastore| store.read(|observed| observed.agents["n1"].failures[&target()].retry_at);
        let mut delays = Vec::new();
        for _ in 0..10 {
            store.agent_refused("n1", &target(), "no", at(0));
            delays.push(retry_at(&store).duration_since(at(0)).as_millis());
        }
        assert_eq!(delays[..3], [500, 1000, 2000]);
        assert_eq!(delays[9], 60_000);
        let mark = store.agent_mark("n1", &AgentInstance::of(&target()));
        store.agent_answered("n1", &target(), mark, None);
        assert!(store.read(|observed| observed.agents["n1"].failures.is_empty()));
        store.agent_refused("n1", &target(), "no", at(0));
        assert_eq!(retry_at(&store).duration_since(at(0)).as_millis(), 500);
    }

    #[test]
    fn a_lost_stream_is_not_connected_and_one_that_left_is_not_there() {
        let store = store();
        store.agent_lost("n1");
        assert!(store.read(|observed| observed.agent("n1").is_none() && observed.agents.contains_key("n1")));
        store.agent_left("n1");
        assert!(store.read(|observed| observed.agents.is_empty()));
    }
}
