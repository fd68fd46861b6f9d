//! Range locks against a naive list, and the rules one by one.

use super::*;
use proptest::prelude::*;

#[derive(Debug, Clone)]
enum Step {
    Acquire { start: u64, len: u64, kind: LockKind },
    Release(usize),
    Settle(usize),
    Hold(usize),
    Unhold(usize),
}

fn step() -> impl Strategy<Value = Step> {
    let kinds = [LockKind::Read, LockKind::Write, LockKind::Copy, LockKind::Equalise];
    let kind = proptest::sample::select(kinds.to_vec());
    prop_oneof![
        4 => (0u64..16, 1u64..6, kind).prop_map(|(start, len, kind)| Step::Acquire { start, len, kind }),
        3 => any::<usize>().prop_map(Step::Release),
        1 => any::<usize>().prop_map(Step::Settle),
        1 => any::<usize>().prop_map(Step::Hold),
        1 => any::<usize>().prop_map(Step::Unhold),
    ]
}

/// The naive model: every range lists those it waits for.
#[derive(Debug, Clone)]
struct Naive {
    owner: u32,
    start: u64,
    end: u64,
    held: Held,
    on_hold: bool,
    waits_for: Vec<u32>,
}

impl Naive {
    fn waits(&self) -> bool {
        self.on_hold || !self.waits_for.is_empty()
    }
}

fn arrive(list: &mut Vec<Naive>, mut fresh: Naive) {
    for other in list.iter_mut() {
        let apart = other.end <= fresh.start || fresh.end <= other.start;
        if apart || !conflicts(other.held, fresh.held) {
            continue;
        }
        if !fresh.held.is_host() && other.held.is_host() && other.waits() {
            other.waits_for.push(fresh.owner);
        } else {
            fresh.waits_for.push(other.owner);
        }
    }
    list.push(fresh);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn rule_02_locks_agree_with_a_naive_list(steps in proptest::collection::vec(step(), 1..80)) {
        let mut locks = RangeLocks::new(8, 2);
        let mut model: Vec<Naive> = Vec::new();
        let mut keys: Vec<LockKey> = Vec::new();
        let mut granted: Vec<u32> = Vec::new();
        for (owner, step) in (0u32..).zip(steps) {
            let mut fresh = Vec::new();
            match step {
                Step::Acquire { start, len, kind } => {
                    let end = start + len;
                    let (key, now) = locks.acquire(start, end, kind, owner);
                    let held = kind.into();
                    arrive(&mut model, Naive { owner, start, end, held, on_hold: false, waits_for: Vec::new() });
                    keys.push(key);
                    if now {
                        fresh.push(owner);
                    }
                }
                Step::Release(at) if !model.is_empty() => {
                    let at = at % model.len();
                    let (key, gone) = (keys.remove(at), model.remove(at));
                    model.iter_mut().for_each(|n| n.waits_for.retain(|o| *o != gone.owner));
                    granted.retain(|o| *o != gone.owner);
                    locks.release(key, &mut fresh);
                }
                Step::Settle(at) if !model.is_empty() => {
                    let at = at % model.len();
                    let owner = model[at].owner;
                    if model[at].held == Held::Write && !model[at].waits() {
                        model[at].held = Held::Settled;
                        let copies = model.iter_mut().filter(|n| n.held == Held::Copy);
                        copies.for_each(|n| n.waits_for.retain(|o| *o != owner));
                    }
                    locks.settle(keys[at], &mut fresh);
                }
                Step::Hold(at) if !model.is_empty() => {
                    let at = at % model.len();
                    let me = model[at].owner;
                    if matches!(model[at].held, Held::Read | Held::Write) && !model[at].waits() {
                        let copies = model.iter_mut().filter(|n| !n.held.is_host() && n.waits_for.contains(&me));
                        let passed: Vec<u32> = copies
                            .map(|n| {
                                n.waits_for.retain(|o| *o != me);
                                n.owner
                            })
                            .collect();
                        model[at].waits_for = passed;
                        model[at].on_hold = true;
                        granted.retain(|o| *o != me);
                        locks.hold(keys[at], &mut fresh);
                    }
                }
                Step::Unhold(at) if !model.is_empty() => {
                    let at = at % model.len();
                    if std::mem::take(&mut model[at].on_hold) {
                        locks.unhold(keys[at], &mut fresh);
                    }
                }
                Step::Release(_) | Step::Settle(_) | Step::Hold(_) | Step::Unhold(_) => {}
            }
            let in_order = fresh.windows(2).all(|w| w[0] < w[1]);
            prop_assert!(in_order, "granted out of order: {fresh:?}");
            granted.extend(fresh);
            granted.sort_unstable();
            let mut free: Vec<u32> =
                model.iter().filter(|n| !n.waits()).map(|n| n.owner).collect();
            free.sort_unstable();
            prop_assert_eq!(&granted, &free);
            prop_assert_eq!(locks.len(), model.len());
        }
    }
}

#[test]
fn rule_02_a_waiting_writer_is_not_overtaken_by_readers() {
    let mut locks = RangeLocks::new(4, 3);
    let (reader, now) = locks.acquire(0, 8, LockKind::Read, 1);
    assert!(now);
    let (writer, now) = locks.acquire(4, 12, LockKind::Write, 2);
    assert!(!now);
    let (_, now) = locks.acquire(4, 5, LockKind::Read, 3);
    assert!(!now, "a later reader must queue behind the writer");
    let mut granted = Vec::new();
    locks.release(reader, &mut granted);
    assert_eq!(granted, [2]);
    granted.clear();
    locks.release(writer, &mut granted);
    assert_eq!(granted, [3]);
}

#[test]
fn rule_06_a_settled_write_lets_copies_in_and_keeps_hosts_out() {
    let mut locks = RangeLocks::new(4, 3);
    let (writer, _) = locks.acquire(0, 8, LockKind::Write, 1);
    let (_, now) = locks.acquire(0, 8, LockKind::Copy, 2);
    assert!(!now);
    let (_, now) = locks.acquire(0, 1, LockKind::Read, 3);
    assert!(!now);
    let mut granted = Vec::new();
    locks.settle(writer, &mut granted);
    assert_eq!(granted, [2]);
    granted.clear();
    locks.release(writer, &mut granted);
    assert_eq!(granted, [3]);
}

#[test]
fn rule_17_a_command_on_hold_keeps_its_place_and_lets_copies_pass() {
    let mut locks = RangeLocks::new(4, 3);
    let (first, now) = locks.acquire(0, 8, LockKind::Write, 1);
    assert!(now);
    let mut granted = Vec::new();
    locks.hold(first, &mut granted);
    let (_, now) = locks.acquire(4, 6, LockKind::Write, 2);
    assert!(!now, "it came later");
    let (copy, now) = locks.acquire(0, 8, LockKind::Equalise, 3);
    assert!(now);
    locks.unhold(first, &mut granted);
    assert!(granted.is_empty(), "the copy runs");
    locks.release(copy, &mut granted);
    assert_eq!(granted, [1]);
    granted.clear();
    locks.release(first, &mut granted);
    assert_eq!(granted, [2]);
}

#[test]
fn rule_10_a_copy_passes_writes_that_wait_and_they_wait_for_it() {
    let mut locks = RangeLocks::new(4, 3);
    let (running, _) = locks.acquire(0, 8, LockKind::Write, 1);
    let (_, now) = locks.acquire(0, 8, LockKind::Write, 2);
    assert!(!now);
    let mut granted = Vec::new();
    locks.settle(running, &mut granted);
    let (copy, now) = locks.acquire(0, 8, LockKind::Copy, 3);
    assert!(now, "the waiting write must not hold up the copy");
    locks.release(running, &mut granted);
    assert!(granted.is_empty(), "the waiting write waits for the copy");
    locks.release(copy, &mut granted);
    assert_eq!(granted, [2]);
}
