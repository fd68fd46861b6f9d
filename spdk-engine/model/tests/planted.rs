//! Each rule that is broken on purpose is noticed. A checker that cannot fail proves nothing.

use mirror_model::{Bounds, Bug, Mirror, Set, check};

const LOST: &str = "no acknowledged write is lost";
const STALE: &str = "no read is stale";
const REPLACED: &str = "an engine that was replaced acknowledges nothing new";
const SOURCES: &str = "sources are members";

const THREE: Bounds = Bounds { number: 3, ..Bounds::new() };
const TWO: Bounds = Bounds { in_sync: Set::from_bits(0b011), ..THREE };
/// One member and one joiner that is connected and not copied yet.
const JOINER: Bounds = Bounds { in_sync: Set::from_bits(0b001), rebuilding: Set::from_bits(0b010), ..THREE };

fn is_found(bug: Bug, bounds: Bounds, by: &[&str]) {
    let report = check(Mirror::new(bounds, Some(bug)));
    assert!(!report.violations.is_empty(), "{bug:?} is not noticed in {} states", report.states);
    for (property, story) in &report.violations {
        println!("{bug:?}: {property}\n{story}");
        assert!(!story.contains("cannot be walked"), "{bug:?}: the counterexample cannot be told");
        assert!(by.contains(property), "{bug:?} breaks another property: {property}\n{story}");
    }
}

macro_rules! planted {
    ($($test:ident: $bug:ident in $bounds:expr, by $by:expr;)+) => {
        $(
            #[test]
            fn $test() {
                is_found(Bug::$bug, $bounds, &$by);
            }
        )+

        #[test]
        fn every_bug_is_planted() {
            let here = [$(Bug::$bug),+];
            let missing: Vec<_> = Bug::ALL.into_iter().filter(|bug| !here.contains(bug)).collect();
            assert!(missing.is_empty(), "{missing:?}");
        }
    };
}

planted! {
    rule_01_acknowledging_too_early_is_found: Rule01AckFirst in THREE, by [LOST, STALE];
    rule_03_reads_that_do_not_wait_are_found: Rule03ReadsDoNotWait in THREE, by [STALE];
    rule_06_acknowledging_before_the_swap_is_found: Rule06AckBeforeSwap in THREE, by [LOST, STALE];
    rule_06_shrinking_below_the_minimum_is_found: Rule06StrictShrinks in Bounds { members_min: 2, ..THREE },
        by ["S keeps its minimum"];
    rule_07_assuming_an_outcome_is_found: Rule07AssumeCommitted in THREE, by [LOST, STALE, SOURCES];
    rule_07_reading_for_an_outcome_is_found: Rule07RereadProves in Bounds { number: 4, ..JOINER },
        by [LOST, STALE, SOURCES];
    rule_08_a_number_that_stays_is_found: Rule08SameNumber in THREE, by ["k rises"];
    rule_09_joining_without_bits_is_found: Rule09JoinWithoutBits in Bounds {
        rebuilding: Set::from_bits(0b110), number: 4, written: 3, bits: true, ..JOINER
    }, by [STALE];
    rule_10_joining_without_mirroring_is_found: Rule10JoinWithoutMirroring in JOINER, by [LOST, STALE];
    rule_10_an_answer_that_is_not_required_is_found: Rule10AnswerNotRequired in JOINER, by [LOST, STALE];
    rule_13_going_on_when_fenced_is_found: Rule13FencedCountsAsDone in THREE, by [LOST, STALE, REPLACED];
    rule_13_a_session_that_is_not_drained_is_found: Rule13NoDrain in Bounds { written: 3, ..THREE }, by [LOST, STALE];
    rule_14_an_epoch_that_is_forgotten_is_found: Rule14EpochForgotten in TWO, by [LOST, STALE, REPLACED];
    rule_15_keeping_members_that_were_not_promoted_is_found: Rule15OpenKeepsUnpromoted
        in Bounds { instances: 3, ..THREE }, by [LOST, STALE];
    rule_15_opening_with_a_rebuilding_replica_is_found: Rule15OpenTakesRebuilding in JOINER, by [LOST, STALE];
    rule_15_bits_read_before_the_promote_are_found: Rule15BitsBeforePromote in Bounds { bits: true, ..TWO },
        by [STALE];
    rule_16_reading_without_a_lease_is_found: Rule16NoReadGate in TWO, by [STALE];
    rule_16_opening_without_waiting_is_found: Rule16NoWait in TWO, by [STALE];
    rule_16_waiting_after_the_swap_is_found: Rule16WaitAfterSwap in Bounds { instances: 3, number: 2, ..TWO },
        by [STALE];
    rule_16_a_lease_of_the_committed_set_is_found: Rule16LeaseOnCommittedSet in JOINER, by [STALE];
    rule_16_a_dead_last_owner_is_found: Rule16LastOwnerDead in Bounds { instances: 3, number: 2, ..TWO }, by [STALE];
    rule_18_reading_what_may_differ_is_found: Rule18ReadInherited in TWO, by [STALE];
    rule_18_data_before_bits_is_found: Rule18DataBeforeBits in Bounds { bits: true, ..TWO }, by [STALE];
    rule_18_clearing_during_a_write_is_found: Rule18ClearThoughWritten in Bounds { bits: true, ..TWO }, by [STALE];
}
