//! Objects in the snapshot: what watches and answers tell, in the right order.

use std::collections::BTreeSet;
use std::sync::Arc;

use addax_api::{ObjectMeta, ResourceExt};
use addax_plan::action::{CallTarget, Key, Kind};
use addax_plan::observed::Observed;
use addax_plan::related;

use super::{Datastore, State, Stored};

/// Who tells of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Source {
    /// The kind's watch, in the order of versions.
    Watch,
    /// The answer of a call of our own, at any time.
    Answer,
}

/// The version as a number: versions of one kind are compared so (the API promises it since Kubernetes 1.35, and every
/// server before that kept it). One that is no number counts as older than none and newer than none.
fn version(meta: &ObjectMeta) -> u64 {
    meta.resource_version.as_deref().and_then(|version| version.parse().ok()).unwrap_or(0)
}

impl Datastore {
    /// The watch tells a new or changed object.
    pub fn watched<K: Stored>(&self, object: K) {
        self.change::<K>(&object.name_any(), |state| {
            state.advance::<K>(version(object.meta()));
            state.put(object, Source::Watch)
        });
    }

    /// The watch tells that an object is gone.
    pub fn watched_end(&self, kind: Kind, meta: &ObjectMeta) {
        super::with_kind!(kind, K => self.watched_end_of::<K>(meta));
    }

    fn watched_end_of<K: Stored>(&self, meta: &ObjectMeta) {
        let name = meta.name.clone().unwrap_or_default();
        self.change::<K>(&name, |state| {
            state.advance::<K>(version(meta));
            let key = Key::new(K::KIND, &name);
            if state.ended.get(&key) == meta.uid.as_ref() {
                state.ended.remove(&key);
            }
            state.remove::<K>(&name, meta.uid.as_deref())
        });
    }

    /// A list tells everything there is, but for what it leaves out: `unreadable` are the names of objects that exist
    /// and cannot be read. Returns the names of objects that are here and not in the list, and may be newer than it:
    /// ask for them one by one.
    pub fn listed<K: Stored>(&self, objects: Vec<K>, unreadable: &BTreeSet<String>) -> Vec<String> {
        let told = objects.iter().map(|object| version(object.meta())).max().unwrap_or(0);
        let names: BTreeSet<String> = objects.iter().map(ResourceExt::name_any).collect();
        let (missing, position) = {
            let mut state = self.lock();
            let position = state.position::<K>().max(told);
            state.ended.retain(|key, _| key.kind != K::KIND || names.contains(&key.name));
            let here = K::table(&state.observed).names().map(str::to_owned);
            let missing: Vec<String> =
                here.filter(|name| !names.contains(name) && !unreadable.contains(name)).collect();
            (missing, position)
        };
        for object in objects {
            let name = object.name_any();
            self.change::<K>(&name, |state| state.put(object, Source::Watch));
        }
        let mut doubtful = Vec::new();
        for name in missing {
            // An object of our own making may be newer than the list, everything else was removed meanwhile.
            self.change::<K>(&name, |state| {
                let newer = state.known::<K>(&name).is_some_and(|meta| version(meta) > position);
                if newer {
                    doubtful.push(name.clone());
                    return false;
                }
                state.remove::<K>(&name, None)
            });
        }
        self.lock().advance::<K>(told);
        doubtful
    }

    /// The API server answered a call with this object.
    pub fn answered<K: Stored>(&self, object: K) {
        let over = object.is_deleting() && object.finalizers().is_empty();
        let name = object.name_any();
        if over {
            return self.answered_end::<K>(&name, &object.uid().unwrap_or_default());
        }
        self.change::<K>(&name, |state| state.put(object, Source::Answer));
    }

    /// The API server answered that the object with this uid is gone.
    pub fn answered_end<K: Stored>(&self, name: &str, uid: &str) {
        self.change::<K>(name, |state| {
            let removed = state.remove::<K>(name, Some(uid));
            if removed {
                state.ended.insert(Key::new(K::KIND, name), uid.to_owned());
            }
            removed
        });
    }

    /// The uid of the object here.
    pub fn uid<K: Stored>(&self, name: &str) -> Option<String> {
        self.lock().known::<K>(name).and_then(|meta| meta.uid.clone())
    }

    /// Makes a change and wakes whom it concerns.
    fn change<K: Stored>(&self, name: &str, change: impl FnOnce(&mut State) -> bool) {
        let key = Key::new(K::KIND, name);
        let keys = {
            let mut state = self.lock();
            let mut keys = related::of_object(&state.observed, &key);
            if !change(&mut state) {
                return;
            }
            keys.extend(related::of_object(&state.observed, &key));
            keys
        };
        self.wake(keys);
        if K::KIND == Kind::InstanceManager {
            self.agents_changed.notify_one();
        }
    }
}

impl State {
    fn position<K: Stored>(&self) -> u64 {
        self.positions.get(&K::KIND).copied().unwrap_or(0)
    }

    fn advance<K: Stored>(&mut self, told: u64) {
        let position = self.positions.entry(K::KIND).or_default();
        *position = told.max(*position);
    }

    fn known<K: Stored>(&self, name: &str) -> Option<&ObjectMeta> {
        K::table(&self.observed).get(name).map(|object| object.meta())
    }

    fn put<K: Stored>(&mut self, object: K, source: Source) -> bool {
        let (name, new) = (object.name_any(), version(object.meta()));
        let old = self.known::<K>(&name).map(version);
        let late = source == Source::Answer && old.is_none() && new != 0 && new <= self.position::<K>();
        let ended =
            self.ended.get(&Key::new(K::KIND, &name)).is_some_and(|uid| Some(uid) == object.meta().uid.as_ref());
        let old_news = old.is_some_and(|old| new != 0 && new <= old);
        if late || ended || old_news {
            return false;
        }
        K::table_mut(&mut self.observed).put(Arc::new(object));
        true
    }

    /// Removes the object if it has that uid.
    fn remove<K: Stored>(&mut self, name: &str, uid: Option<&str>) -> bool {
        let here = self.known::<K>(name).map(|meta| meta.uid.clone().unwrap_or_default());
        let same = here.is_some_and(|here| uid.is_none_or(|uid| uid == here));
        if same {
            let object = K::table_mut(&mut self.observed).remove(name);
            let volume = object.as_ref().and_then(|object| object.volume()).unwrap_or_default();
            self.forget_failures(K::KIND, name, volume);
        }
        same
    }

    /// Calls that failed for an object that is gone tell nobody anything any more.
    fn forget_failures(&mut self, kind: Kind, name: &str, volume: &str) {
        let about = |target: &CallTarget| match (kind, target) {
            (Kind::Replica, CallTarget::Replica(replica) | CallTarget::Member(_, replica)) => replica == name,
            (Kind::Engine, CallTarget::Member(of, _)) => of == volume,
            (Kind::Volume, CallTarget::Recovery(of, _)) => of == name,
            _ => false,
        };
        let State { observed: Observed { agents, .. }, failures, .. } = self;
        agents.values_mut().for_each(|agent| agent.failures.retain(|target, _| !about(target)));
        failures.retain(|(_, target), _| !about(target));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use addax_api::{Volume, VolumeSpec};
    use addax_plan::observed::ThisNode;

    fn store() -> Datastore {
        Datastore::new(ThisNode { name: "n1".to_owned(), ..ThisNode::default() })
    }

    fn volume(name: &str, version: u64) -> Volume {
        let mut volume = Volume::new(name, VolumeSpec::with_size(1 << 20));
        volume.metadata.uid = Some(format!("uid-{name}"));
        volume.metadata.resource_version = Some(version.to_string());
        volume
    }

    fn version_here(store: &Datastore, name: &str) -> Option<u64> {
        store.read(|observed| observed.volumes.get(name).map(|object| version(&object.metadata)))
    }

    #[test]
    fn nothing_older_replaces_an_answer() {
        let store = store();
        store.watched(volume("v", 1));
        store.answered(volume("v", 5));
        store.watched(volume("v", 3));
        assert_eq!(version_here(&store, "v"), Some(5));
        store.watched(volume("v", 6));
        store.answered(volume("v", 4));
        assert_eq!(version_here(&store, "v"), Some(6));
    }

    #[test]
    fn a_late_answer_does_not_bring_back_what_the_watch_has_seen_end() {
        let store = store();
        store.watched(volume("v", 1));
        store.watched_end(Kind::Volume, &volume("v", 3).metadata);
        store.answered(volume("v", 2));
        assert_eq!(version_here(&store, "v"), None);
        store.answered(volume("w", 4));
        assert_eq!(version_here(&store, "w"), Some(4));
    }

    #[test]
    fn what_an_answer_has_ended_is_not_brought_back_by_the_watch() {
        let store = store();
        store.watched(volume("v", 1));
        store.answered_end::<Volume>("v", "uid-v");
        store.watched(volume("v", 2));
        assert_eq!(version_here(&store, "v"), None);
        store.watched_end(Kind::Volume, &volume("v", 3).metadata);
        let mut again = volume("v", 4);
        again.metadata.uid = Some("other".to_owned());
        store.watched(again);
        assert_eq!(version_here(&store, "v"), Some(4));
    }

    #[test]
    fn an_end_of_another_uid_ends_nothing() {
        let store = store();
        store.watched(volume("v", 4));
        store.answered_end::<Volume>("v", "other");
        assert_eq!(version_here(&store, "v"), Some(4));
    }

    #[test]
    fn a_list_removes_what_it_lacks_unless_that_may_be_newer() {
        let store = store();
        store.watched(volume("old", 3));
        store.watched(volume("kept", 2));
        store.answered(volume("own", 9));
        let unreadable = BTreeSet::from(["kept".to_owned()]);
        let doubtful = store.listed(vec![volume("v", 5)], &unreadable);
        assert_eq!(doubtful, ["own"]);
        let here: Vec<String> = store.read(|observed| observed.volumes.names().map(str::to_owned).collect());
        assert_eq!(here, ["kept", "own", "v"]);
    }

    #[test]
    fn a_change_wakes_the_object_and_those_it_concerns_and_an_echo_wakes_nobody() {
        let store = store();
        let drain = |store: &Datastore| {
            use futures::FutureExt;
            let mut woken = Vec::new();
            for kind in Kind::ALL {
                while let Some(key) = store.queue(kind).next().now_or_never() {
                    store.queue(kind).done(&key, crate::queue::Outcome::Done(None));
                    woken.push(key);
                }
            }
            woken
        };
        store.answered(volume("v", 2));
        let woken = drain(&store);
        assert!(woken.contains(&Key::new(Kind::Volume, "v")) && woken.contains(&Key::new(Kind::Engine, "v-e")));
        store.watched(volume("v", 2));
        assert_eq!(drain(&store), []);
    }
}
