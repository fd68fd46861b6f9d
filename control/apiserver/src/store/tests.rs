//! Unit and model tests of the store.

use std::collections::BTreeMap;

use proptest::prelude::*;
use serde_json::json;

use super::{
    log::{self, FILE_MAGIC, FrameKind, HEADER_BYTES},
    *,
};

fn key(name: &str) -> Key {
    Key::new("things.test", "default", name)
}

fn object(payload: u64) -> Value {
    json!({"metadata": {}, "payload": payload})
}

fn run<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
}

fn payloads(store: &Store) -> BTreeMap<String, (u64, u64)> {
    let listing = store.list(&Scope::all(), None, None).unwrap();
    let payload = |entry: &Entry| entry.value["payload"].as_u64().unwrap();
    listing.entries.iter().map(|(key, entry)| (key.name.clone(), (entry.revision, payload(entry)))).collect()
}

#[test]
fn expectations_are_checked_and_revisions_grow() {
    run(async {
        let store = Store::in_memory(StoreOptions::default());
        let first = store.commit(key("a"), Expect::Absent, Some(object(1))).await.unwrap();
        assert_eq!(first.revision, 1);
        assert_eq!(first.value["metadata"]["resourceVersion"], "1");
        let again = store.commit(key("a"), Expect::Absent, Some(object(2))).await.unwrap_err();
        assert!(matches!(again, StoreError::Conflict { current: 1 }));
        store.commit(key("a"), Expect::Revision(1), Some(object(2))).await.unwrap();
        let stale = store.commit(key("a"), Expect::Revision(1), None).await.unwrap_err();
        assert!(matches!(stale, StoreError::Conflict { current: 2 }));
        store.commit(key("a"), Expect::Revision(2), None).await.unwrap();
        assert!(store.get(&key("a")).is_none());
        assert_eq!(store.commit(key("a"), Expect::Absent, Some(object(3))).await.unwrap().revision, 4);
    });
}

#[test]
fn values_without_metadata_are_refused() {
    run(async {
        let store = Store::in_memory(StoreOptions::default());
        let refused = store.commit(key("a"), Expect::Absent, Some(json!({"payload": 1}))).await;
        assert!(matches!(refused, Err(StoreError::NotAnObject)));
    });
}

#[test]
fn a_watcher_sees_each_change_once_and_in_order() {
    run(async {
        let store = Store::in_memory(StoreOptions::default());
        store.commit(key("a"), Expect::Absent, Some(object(1))).await.unwrap();
        let mut watcher = store.watch(Scope::resource("things.test", None), 1).unwrap();
        let mut elsewhere = store.watch(Scope::resource("other.test", None), 1).unwrap();
        store.commit(key("a"), Expect::Revision(1), Some(object(2))).await.unwrap();
        store.commit(key("a"), Expect::Revision(2), None).await.unwrap();
        let batch = watcher.next().await.unwrap();
        assert_eq!(batch.iter().map(|event| event.revision).collect::<Vec<_>>(), [2, 3]);
        assert!(batch[1].value.is_none());
        assert_eq!(batch[1].previous.as_ref().unwrap().value["payload"], 2);
        assert!(elsewhere.take_ready().unwrap().is_empty());
        assert_eq!(elsewhere.position(), 3, "a watcher's position moves on without events, for bookmarks");
    });
}

#[test]
fn a_watcher_left_behind_is_told_so() {
    run(async {
        let store = Store::in_memory(StoreOptions { history_events_max: 2, ..StoreOptions::default() });
        let mut watcher = store.watch(Scope::all(), 0).unwrap();
        for n in 0..4 {
            store.commit(key(&n.to_string()), Expect::Absent, Some(object(n))).await.unwrap();
        }
        assert!(matches!(watcher.next().await, Err(StoreError::Expired { asked: 0, oldest: 2, newest: 4 })));
        assert!(store.watch(Scope::all(), 2).is_ok());
        assert!(matches!(store.watch(Scope::all(), 5), Err(StoreError::Expired { .. })), "never given out");
        store.compact_history();
        assert!(matches!(store.watch(Scope::all(), 3), Err(StoreError::Expired { .. })));
    });
}

#[test]
fn a_list_can_be_taken_in_the_past() {
    run(async {
        let store = Store::in_memory(StoreOptions::default());
        store.commit(key("a"), Expect::Absent, Some(object(1))).await.unwrap();
        store.commit(key("b"), Expect::Absent, Some(object(2))).await.unwrap();
        store.commit(key("a"), Expect::Revision(1), None).await.unwrap();
        store.commit(key("b"), Expect::Revision(2), Some(object(3))).await.unwrap();
        store.commit(key("c"), Expect::Absent, Some(object(4))).await.unwrap();
        let past = store.list(&Scope::all(), None, Some(2)).unwrap();
        let seen: Vec<_> = past.entries.iter().map(|(key, entry)| (key.name.as_str(), entry.revision)).collect();
        assert_eq!(seen, [("a", 1), ("b", 2)]);
        let rest = store.list(&Scope::all(), Some(&key("a")), Some(2)).unwrap();
        assert_eq!(rest.entries.len(), 1);
    });
}

#[test]
fn concurrent_commits_share_frames_and_survive_a_reopen() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("data");
    run(async {
        let store = Store::open(&path, StoreOptions::default()).unwrap();
        let keys: Vec<Key> = (0..200).map(|n| key(&n.to_string())).collect();
        let commits = keys.iter().map(|key| store.commit(key.clone(), Expect::Absent, Some(object(7))));
        for result in futures::future::join_all(commits).await {
            result.unwrap();
        }
        assert!(matches!(Store::open(&path, StoreOptions::default()), Err(StoreError::InUse(_))));
        drop(store);
        let frames = log::scan(&std::fs::read(&path).unwrap()).unwrap().frames;
        assert!(frames.len() < 150, "{} frames for 200 commits: no group commit", frames.len());
        let store = Store::open(&path, StoreOptions::default()).unwrap();
        assert_eq!(payloads(&store).len(), 200);
        assert_eq!(store.revision(), 200);
        assert!(store.watch(Scope::all(), 10).is_ok(), "the log doubles as history after a restart");
    });
}

#[test]
fn compaction_keeps_objects_and_counter_and_shrinks_the_file() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("data");
    let options = StoreOptions { compact_bytes_min: 4096, ..StoreOptions::default() };
    run(async {
        let store = Store::open(&path, options.clone()).unwrap();
        let mut revision = store.commit(key("a"), Expect::Absent, Some(object(0))).await.unwrap().revision;
        store.commit(key("gone"), Expect::Absent, Some(object(0))).await.unwrap();
        store.commit(key("gone"), Expect::Revision(2), None).await.unwrap();
        for n in 1..500 {
            revision = store.commit(key("a"), Expect::Revision(revision), Some(object(n))).await.unwrap().revision;
        }
        drop(store);
        assert!(std::fs::metadata(&path).unwrap().len() < 8192);
        let store = Store::open(&path, options).unwrap();
        assert_eq!(payloads(&store), BTreeMap::from([("a".to_owned(), (502, 499))]));
        assert_eq!(store.revision(), 502);
        assert!(matches!(store.watch(Scope::all(), 1), Err(StoreError::Expired { .. })));
        assert_eq!(store.commit(key("b"), Expect::Absent, Some(object(1))).await.unwrap().revision, 503);
    });
}

#[test]
fn a_failed_write_is_taken_back_as_if_never_made() {
    let mut state = state::State::new(StoreOptions::default(), true);
    let (staged, mut answer) = Staged::new(key("a"), Some(object(1)), None);
    state.stage(staged, Expect::Absent).unwrap();
    let batch = state.take_staged();
    let (behind, mut behind_answer) = Staged::new(key("a"), Some(object(2)), None);
    state.stage(behind, Expect::Revision(1)).unwrap();
    state.roll_back(batch.into_iter(), &StoreError::Write("disk full".to_owned()));
    assert!(matches!(answer.try_recv().unwrap(), Err(StoreError::Write(_))));
    assert!(matches!(behind_answer.try_recv().unwrap(), Err(StoreError::Write(_))), "it built on the failed one");
    let (again, _answer) = Staged::new(key("a"), Some(object(3)), None);
    state.stage(again, Expect::Absent).unwrap();
    assert_eq!(state.take_staged()[0].revision, 1);
}

#[test]
fn a_damaged_middle_is_refused_and_a_torn_tail_is_cut() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("data");
    run(async {
        let store = Store::open(&path, StoreOptions::default()).unwrap();
        for n in 0..3 {
            store.commit(key(&n.to_string()), Expect::Absent, Some(object(n))).await.unwrap();
        }
    });
    let good = std::fs::read(&path).unwrap();
    let first_log = FILE_MAGIC.len() + HEADER_BYTES;
    let mut damaged = good.clone();
    damaged[first_log + HEADER_BYTES + 3] ^= 1;
    std::fs::write(&path, &damaged).unwrap();
    let refused = Store::open(&path, StoreOptions::default()).unwrap_err();
    assert!(
        matches!(refused, StoreError::Corrupt { offset_bytes, .. } if offset_bytes == first_log as u64),
        "{refused}"
    );

    let mut torn = good.clone();
    *torn.last_mut().unwrap() ^= 1;
    std::fs::write(&path, &torn).unwrap();
    let store = Store::open(&path, StoreOptions::default()).unwrap();
    assert_eq!(payloads(&store).len(), 2);
}

/// One step of a random program.
#[derive(Debug, Clone)]
enum Step {
    Put(u8, u64),
    Delete(u8),
    Reopen,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        6 => (0_u8..6, any::<u64>()).prop_map(|(name, payload)| Step::Put(name, payload)),
        3 => (0_u8..6).prop_map(Step::Delete),
        1 => Just(Step::Reopen),
    ];
    prop::collection::vec(step, 1..40)
}

type Model = BTreeMap<String, (u64, u64)>;

/// Runs a program against a store and the model, comparing after each step. Returns the model after each revision.
async fn run_program(path: &std::path::Path, options: &StoreOptions, program: &[Step]) -> Vec<Model> {
    let mut store = Store::open(path, options.clone()).unwrap();
    let mut model = Model::new();
    let mut models = vec![model.clone()];
    for step in program {
        let (name, payload) = match step {
            Step::Put(name, payload) => (name.to_string(), Some(*payload)),
            Step::Delete(name) => (name.to_string(), None),
            Step::Reopen => {
                drop(store);
                store = Store::open(path, options.clone()).unwrap();
                assert_eq!(payloads(&store), model);
                continue;
            }
        };
        let expect = model.get(&name).map_or(Expect::Absent, |&(revision, _)| Expect::Revision(revision));
        if payload.is_none() && expect == Expect::Absent {
            continue;
        }
        let entry = store.commit(key(&name), expect, payload.map(object)).await.unwrap();
        match payload {
            Some(payload) => model.insert(name, (entry.revision, payload)),
            None => model.remove(&name),
        };
        models.push(model.clone());
        assert_eq!(entry.revision as usize, models.len() - 1);
        assert_eq!(payloads(&store), model);
    }
    models
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn the_store_behaves_as_a_map_across_reopens_and_compactions(program in steps()) {
        let directory = tempfile::tempdir().unwrap();
        let options = StoreOptions { compact_bytes_min: 256, ..StoreOptions::default() };
        run(run_program(&directory.path().join("data"), &options, &program));
    }

    #[test]
    fn past_lists_equal_the_model_at_that_revision(program in steps()) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("data");
        let models = run(run_program(&path, &StoreOptions::default(), &program));
        let store = Store::open(&path, StoreOptions::default()).unwrap();
        for (revision, model) in models.iter().enumerate() {
            let listing = store.list(&Scope::all(), None, Some(revision as u64)).unwrap();
            let seen: Model = listing.entries.iter().map(|(key, entry)| {
                (key.name.clone(), (entry.revision, entry.value["payload"].as_u64().unwrap()))
            }).collect();
            prop_assert_eq!(&seen, model);
        }
    }
}

/// Cuts the file at every byte, as a crash in the middle of any write would: what opens must be a state that was
/// acknowledged, and the newest whose frame is whole.
#[test]
fn every_truncation_opens_as_the_newest_whole_state_or_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("data");
    let program: Vec<Step> =
        (0..12).map(|n| if n % 4 == 3 { Step::Delete(0) } else { Step::Put(n % 3, u64::from(n)) }).collect();
    let models = run(run_program(&path, &StoreOptions::default(), &program));
    let whole = std::fs::read(&path).unwrap();
    let base = FILE_MAGIC.len() + HEADER_BYTES;
    for cut in 0..=whole.len() {
        let cut_path = directory.path().join("cut");
        std::fs::write(&cut_path, &whole[..cut]).unwrap();
        match Store::open(&cut_path, StoreOptions::default()) {
            Err(StoreError::Corrupt { .. }) => assert!(cut < base, "refused a torn tail at {cut}"),
            Err(other) => panic!("{other}"),
            Ok(store) => {
                assert!(cut >= base);
                let frames = log::scan(&whole[..cut]).unwrap().frames;
                let expected = frames.iter().filter(|frame| frame.kind == FrameKind::Log).count();
                assert_eq!(payloads(&store), models[expected], "cut at {cut}");
                assert_eq!(store.revision() as usize, expected);
            }
        }
    }
}
