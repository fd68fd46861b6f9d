//! The simulator over a modest range of seeds; `make sim SEEDS=…` runs more.

use engine_sim::{Scenario, run};

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
