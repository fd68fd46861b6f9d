//! The product's own opener and core, tried in every order that a small world allows.
//!
//! *How.* Neither can be copied, so a state is the list of choices that lead to it, walked again from the start. Two
//! lists that end in the same state (as text, without numbers that are only names) are one. The search ends when no
//! new state is found, so a test that passes has looked at all of them.
//!
//! *What is looked at.* Every replica of the recorded `S` has every acknowledged write; no read returns less than was
//! acknowledged or read before it began; the engine that owns the epoch reads from members only; one that was replaced
//! acknowledges nothing new; the arbiter is given lawful records only.

#![allow(clippy::unwrap_used)]

mod world;

use std::collections::{BTreeSet, HashSet};
use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};

use mirror_core::PlantedBug;
use world::{Bounds, Choice, Happened, World};

struct Found {
    states: usize,
    /// Most choices on the shortest way to a state.
    depth: usize,
    happened: BTreeSet<Happened>,
    violation: Option<(String, Vec<Choice>)>,
}

fn walk(bounds: Bounds, way: &[Choice]) -> World {
    let mut world = World::new(bounds);
    way.iter().for_each(|choice| world.take(*choice));
    world
}

/// Every state that can be reached, or the shortest way to one that breaks something.
fn explore(bounds: Bounds) -> Found {
    let hasher = BuildHasherDefault::<DefaultHasher>::default();
    let mut known = HashSet::new();
    let mut found = Found { states: 0, depth: 0, happened: BTreeSet::new(), violation: None };
    let mut level: Vec<Vec<Choice>> = vec![Vec::new()];
    while !level.is_empty() {
        let mut next = Vec::new();
        for way in level {
            for choice in walk(bounds, &way).choices() {
                let mut longer = way.clone();
                longer.push(choice);
                let world = walk(bounds, &longer);
                if let Some(violation) = world.violation {
                    found.violation = Some((violation, longer));
                    return found;
                }
                if known.insert(hasher.hash_one(world.text())) {
                    found.happened.extend(world.happened);
                    next.push(longer);
                }
            }
        }
        found.depth += usize::from(!next.is_empty());
        level = next;
    }
    found.states = known.len();
    found
}

const BASE: Bounds = Bounds {
    replicas: 2,
    members: 2,
    strict: false,
    instances: 2,
    writes: 1,
    reads: 1,
    breaks: 0,
    unheard: 0,
    joins: 0,
    bits: false,
    times: 1,
    bug: None,
};
const JOIN: Bounds = Bounds { members: 1, joins: 1, ..BASE };
const BITS: Bounds = Bounds { bits: true, reads: 2, times: 0, ..BASE };

/// What must happen in every world; a takeover rebuilds in the available mode.
const ALWAYS: [Happened; 5] =
    [Happened::Acknowledged, Happened::AcknowledgedAfterTakeover, Happened::Read, Happened::Opened, Happened::Stopped];

fn holds(bounds: Bounds, also: &[Happened]) {
    let found = explore(bounds);
    println!("{bounds:?}: {} states, depth {}", found.states, found.depth);
    assert_eq!(found.violation, None, "{bounds:?}");
    for happened in ALWAYS.iter().chain(also) {
        assert!(found.happened.contains(happened), "{happened:?} did not happen");
    }
}

fn is_found(bug: PlantedBug, bounds: Bounds, by: &[&str]) {
    let found = explore(Bounds { bug: Some(bug), ..bounds });
    assert!(found.violation.is_some(), "{bug:?} is not noticed in {} states", found.states);
    if let Some((violation, way)) = found.violation {
        println!("{bug:?}: {violation}: {way:?}");
        assert!(by.iter().any(|what| violation.contains(what)), "{bug:?}: {violation}");
    }
}

#[test]
fn a_takeover() {
    holds(BASE, &[Happened::Left, Happened::Joined, Happened::OpenedWithoutAll]);
}

#[test]
fn a_rebuild_and_a_takeover() {
    holds(JOIN, &[Happened::Joined]);
}

#[test]
fn swaps_of_unknown_outcome() {
    holds(Bounds { unheard: 1, ..BASE }, &[Happened::Left, Happened::Joined, Happened::Unheard]);
}

#[test]
fn strict_mode_and_a_connection_that_breaks() {
    holds(Bounds { strict: true, breaks: 1, ..BASE }, &[Happened::Replayed]);
}

#[test]
fn write_intent_bits_and_a_takeover() {
    holds(BITS, &[]);
}

#[test]
#[ignore = "minutes; make model"]
fn write_intent_bits_and_time() {
    holds(Bounds { reads: 1, times: 1, ..BITS }, &[Happened::Left, Happened::OpenedWithoutAll]);
}

#[test]
#[ignore = "a minute; make model"]
fn a_connection_that_breaks() {
    holds(Bounds { breaks: 1, ..BASE }, &[Happened::Replayed, Happened::Left]);
}

#[test]
#[ignore = "a minute; make model"]
fn three_members() {
    holds(Bounds { replicas: 3, members: 3, ..BASE }, &[Happened::Left, Happened::Joined, Happened::OpenedWithoutAll]);
}

const LOST: &str = "is in the recorded S, holds";
const STALE: &str = "a read returned";
const UNLAWFUL: &str = "unlawful record";

#[test]
fn rule_01_acknowledging_too_early_is_found() {
    is_found(PlantedBug::Rule01AckFirst, BASE, &[LOST, STALE]);
}

#[test]
fn rule_03_reads_that_do_not_wait_are_found() {
    is_found(PlantedBug::Rule03ReadsDoNotWait, Bounds { reads: 2, ..BASE }, &[STALE]);
}

#[test]
fn rule_06_acknowledging_before_the_swap_is_found() {
    is_found(PlantedBug::Rule06AckBeforeSwap, Bounds { breaks: 1, ..BASE }, &[LOST, STALE]);
}

#[test]
fn rule_06_shrinking_below_the_minimum_is_found() {
    is_found(PlantedBug::Rule06StrictShrinks, Bounds { strict: true, breaks: 1, ..BASE }, &[UNLAWFUL]);
}

#[test]
fn rule_07_assuming_an_outcome_is_found() {
    is_found(PlantedBug::Rule07AssumeCommitted, Bounds { breaks: 1, unheard: 1, ..BASE }, &[LOST, STALE]);
}

#[test]
fn rule_08_a_number_that_stays_is_found() {
    is_found(PlantedBug::Rule08SameNumber, Bounds { breaks: 1, ..BASE }, &[UNLAWFUL]);
}

#[test]
fn rule_10_joining_without_mirroring_is_found() {
    is_found(PlantedBug::Rule10JoinWithoutMirroring, JOIN, &[LOST, STALE]);
}

#[test]
fn rule_13_going_on_when_fenced_is_found() {
    is_found(PlantedBug::Rule13FencedCountsAsDone, BASE, &[LOST, STALE, "was replaced"]);
}

#[test]
fn rule_15_keeping_members_that_were_not_promoted_is_found() {
    is_found(PlantedBug::Rule15OpenKeepsUnpromoted, BASE, &[LOST, STALE]);
}

#[test]
fn rule_16_reading_without_a_lease_is_found() {
    is_found(PlantedBug::Rule16NoReadGate, BASE, &[STALE]);
}

#[test]
fn rule_16_opening_without_waiting_is_found() {
    is_found(PlantedBug::Rule16NoWait, Bounds { reads: 2, ..BASE }, &[STALE]);
}

#[test]
fn rule_18_data_before_bits_is_found() {
    is_found(PlantedBug::Rule18DataBeforeBits, BITS, &[STALE]);
}

#[test]
fn rule_18_reading_what_may_differ_is_found() {
    is_found(PlantedBug::Rule18ReadInherited, BITS, &[STALE]);
}
