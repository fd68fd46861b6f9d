//! `kill -9` at any moment loses no acknowledged write.
#![allow(clippy::unwrap_used)]

use std::{
    collections::HashMap,
    io::{BufRead, BufReader},
    path::Path,
    process::{Command, Stdio},
};

use addax_apiserver::store::{Expect, Key, Scope, Store, StoreOptions};
use serde_json::json;

/// Names the data file to a child process.
const CHILD: &str = "ADDAX_APISERVER_CRASH_TEST_FILE";
const KEYS: u64 = 5;

fn options() -> StoreOptions {
    // Small, so that some children die while they compact.
    StoreOptions { compact_bytes_min: 4096, ..StoreOptions::default() }
}

fn key(number: u64) -> Key {
    Key::new("things.test", "default", format!("k{}", number % KEYS))
}

/// In the child: writes for ever and prints each write once it is acknowledged. In the parent: nothing.
#[tokio::test]
async fn child() {
    let Ok(path) = std::env::var(CHILD) else { return };
    let store = Store::open(Path::new(&path), options()).unwrap();
    let mut number = store.revision();
    loop {
        number += 1;
        let expect = store.get(&key(number)).map_or(Expect::Absent, |entry| Expect::Revision(entry.revision));
        let value = json!({"metadata": {}, "number": number, "filler": "x".repeat(100)});
        let entry = store.commit(key(number), expect, Some(value)).await.unwrap();
        assert_eq!(entry.revision, number);
        println!("acknowledged {number}");
    }
}

#[test]
fn nothing_acknowledged_is_lost_to_a_kill() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("data");
    let mut acknowledged = 0;
    for round in 0..8 {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "child", "--nocapture"])
            .env(CHILD, &path)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let numbers =
            lines.by_ref().map_while(Result::ok).filter_map(|line| line.strip_prefix("acknowledged ")?.parse().ok());
        acknowledged = numbers.take(20 + round * 7).last().unwrap_or(acknowledged);
        child.kill().unwrap();
        // What was acknowledged between the last line read and the kill counts too.
        let rest = lines.map_while(Result::ok).filter_map(|line| line.strip_prefix("acknowledged ")?.parse().ok());
        acknowledged = rest.last().unwrap_or(acknowledged);
        child.wait().unwrap();
        check(&path, acknowledged);
    }
    assert!(acknowledged > 200);
}

fn check(path: &Path, acknowledged: u64) {
    let store = Store::open(path, options()).unwrap();
    assert!(store.revision() >= acknowledged, "{} acknowledged, {} there", acknowledged, store.revision());
    let newest = store.revision();
    let listing = store.list(&Scope::all(), None, None).unwrap();
    let found: HashMap<Key, u64> =
        listing.entries.into_iter().map(|(key, entry)| (key, entry.value["number"].as_u64().unwrap())).collect();
    for number in newest.saturating_sub(KEYS - 1).max(1)..=newest {
        assert_eq!(found.get(&key(number)), Some(&number));
    }
}
