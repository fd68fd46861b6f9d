//! The simulator over a modest range of seeds; `make sim SEEDS=…` runs more.

use engine_sim::{Fault, FaultKind, Scenario, run};

#[test]
fn seeds_pass_and_really_fail_over_rebuild_and_lose_answers() {
    let (mut opens, mut joins, mut unknown, mut acked) = (0, 0, 0, 0);
    for seed in 0..150 {
        let outcome = run(&Scenario::new(seed));
        assert_eq!(outcome.violation, None, "seed {seed}");
        opens += outcome.opens;
        joins += outcome.joins;
        unknown += outcome.unknown_swaps;
        acked += outcome.acked;
    }
    assert!(opens > 300, "only {opens} opens: the runs do not fail over");
    assert!(joins > 150, "only {joins} joins: the runs do not rebuild");
    assert!(unknown > 10, "only {unknown} swaps of unknown outcome");
    assert!(acked > 50_000, "only {acked} commands acknowledged");
}

/// Rule 18: an engine that dies with writes in flight leaves members unequal. The next one makes just those regions
/// equal whose bit is set (each run checks that), and copies nobody in full.
#[test]
fn rule_18_after_a_crash_only_regions_with_bits_are_made_equal() {
    let crash = Fault { at: 700_000_000, for_ns: 0, kind: FaultKind::EngineCrash };
    let (mut inherited, mut regions, mut cleared, mut without_copies) = (0, 0, 0, 0);
    for seed in 0..40 {
        let outcome = run(&Scenario { faults: Some(vec![crash]), ..Scenario::new(seed) });
        assert_eq!(outcome.violation, None, "seed {seed}");
        inherited += outcome.inherited;
        regions += outcome.inherited_of;
        cleared += outcome.cleared;
        without_copies += u32::from(outcome.joins == 0 && outcome.opens >= 3);
    }
    assert!(inherited > 40 && inherited * 2 < regions, "{inherited} of {regions} regions inherited");
    assert!(cleared > 1000, "only {cleared} bits cleared");
    assert!(without_copies >= 28, "only {without_copies} of 40 went on without a full copy");
}

#[test]
fn the_same_seed_gives_the_same_run() {
    let (a, b) = (run(&Scenario::new(77)), run(&Scenario::new(77)));
    assert_eq!((a.events, a.acked, a.opens, a.joins), (b.events, b.acked, b.opens, b.joins));
}

#[test]
fn faults_given_by_hand_replace_those_of_the_seed() {
    let drawn = run(&Scenario::new(31));
    let given = run(&Scenario { faults: Some(drawn.faults.clone()), ..Scenario::new(31) });
    assert_eq!((drawn.events, drawn.acked), (given.events, given.acked));
    let none = run(&Scenario { faults: Some(Vec::new()), ..Scenario::new(31) });
    // Open, close in order, open again.
    assert_eq!((none.violation, none.opens), (None, 2));
}
