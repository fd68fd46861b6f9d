//! Each rule that is broken on purpose is noticed within 20 000 seeds. A simulator that cannot fail proves nothing.

use engine_sim::{ModelBug, Scenario, run, shrink};
use mirror_core::PlantedBug;

const SEEDS: u64 = 20_000;

/// A switch of the core or of what is around it.
trait Switch: std::fmt::Debug + Copy {
    fn plant(self, scenario: Scenario) -> Scenario;
}

impl Switch for PlantedBug {
    fn plant(self, scenario: Scenario) -> Scenario {
        Scenario { bug: Some(self), ..scenario }
    }
}

impl Switch for ModelBug {
    fn plant(self, scenario: Scenario) -> Scenario {
        Scenario { model_bug: Some(self), ..scenario }
    }
}

/// With `check_bits` the disks are looked at too; without, only what hosts see and what a clean close leaves.
fn first_failure(bug: impl Switch, check_bits: bool) -> Option<(u64, Scenario, engine_sim::Outcome)> {
    (0..SEEDS).find_map(|seed| {
        let scenario = bug.plant(Scenario { check_bits, ..Scenario::new(seed) });
        let outcome = run(&scenario);
        outcome.violation.is_some().then_some((seed, scenario, outcome))
    })
}

fn is_found(bug: impl Switch, by: &[&str]) {
    finds(bug, false, by);
}

fn is_found_on_disk(bug: impl Switch, by: &str) {
    finds(bug, true, &[by]);
}

fn finds(bug: impl Switch, check_bits: bool, by: &[&str]) {
    let found = first_failure(bug, check_bits);
    assert!(found.is_some(), "{bug:?} is not noticed within {SEEDS} seeds");
    if let Some((seed, _, outcome)) = found {
        let violation = outcome.violation.unwrap_or_default();
        println!("{bug:?}: seed {seed}: {violation}");
        assert!(by.iter().any(|what| violation.contains(what)), "{bug:?}, seed {seed}: {violation}");
    }
}

const HISTORY: &[&str] = &["a write was lost", "nobody wrote", "differ after a clean close", "copies of snapshot"];
/// Copies of a snapshot that differ, or that mix moments.
const SNAPSHOT: &[&str] = &["copies of snapshot", "has lost what it held", "a write was lost"];
/// Acknowledging what it must not can also be seen on an engine that was replaced.
const HISTORY_OR_OLD: &[&str] =
    &["a write was lost", "nobody wrote", "differ after a clean close", "was replaced and acknowledged"];

#[test]
fn rule_01_acknowledging_too_early_is_found() {
    is_found(PlantedBug::Rule01AckFirst, HISTORY);
}

#[test]
fn rule_01_a_source_without_its_cache_is_found() {
    is_found(PlantedBug::Rule01AnySource, HISTORY);
}

#[test]
fn rule_01_a_lost_cache_that_nobody_notices_is_found() {
    is_found(PlantedBug::Rule01CacheLossIgnored, HISTORY);
}

#[test]
fn rule_01_hosts_that_are_served_on_though_their_writes_are_lost_are_found() {
    is_found(ModelBug::Rule01HostsStay, HISTORY);
}

#[test]
fn rule_02_overlapping_writes_at_once_are_found() {
    is_found(PlantedBug::Rule02NoOverlapOrder, HISTORY);
}

#[test]
fn rule_03_reads_that_do_not_wait_are_found() {
    is_found(PlantedBug::Rule03ReadsDoNotWait, HISTORY);
}

#[test]
fn rule_04_capturing_the_payload_again_is_found() {
    is_found(ModelBug::Rule04CaptureAgain, HISTORY);
}

#[test]
fn rule_05_holes_that_keep_old_data_are_found() {
    is_found(ModelBug::Rule05UnmapIsAHint, HISTORY);
}

#[test]
fn rule_06_acknowledging_before_the_swap_is_found() {
    is_found(PlantedBug::Rule06AckBeforeSwap, HISTORY_OR_OLD);
}

#[test]
fn rule_06_a_strict_set_below_its_minimum_is_found() {
    is_found(PlantedBug::Rule06StrictShrinks, &["unlawful"]);
}

#[test]
fn rule_06_a_last_member_that_does_not_carry_the_record_is_found() {
    is_found(PlantedBug::Rule06BrokenNeedNotCarry, &["does not carry"]);
}

#[test]
fn rule_07_assuming_an_outcome_is_found() {
    is_found(
        PlantedBug::Rule07AssumeCommitted,
        &[
            "a write was lost",
            "is not in the recorded in-sync set",
            "unlawful",
            "was replaced and acknowledged",
            "not everything went on",
        ],
    );
}

#[test]
fn rule_08_a_number_used_twice_is_found() {
    is_found(PlantedBug::Rule08SameNumber, &["unlawful"]);
}

#[test]
fn rule_08_a_resumed_rebuild_that_takes_rewritten_regions_for_copied_ones_is_found() {
    is_found(PlantedBug::Rule08StampsByNumber, HISTORY);
}

#[test]
fn rule_09_joining_without_the_stamps_is_found() {
    is_found(PlantedBug::Rule09JoinWithoutStamps, HISTORY);
}

#[test]
fn rule_09_regions_that_keep_their_stamps_when_the_record_changes_are_found() {
    is_found(PlantedBug::Rule09DirtyNotStamped, HISTORY);
}

#[test]
fn rule_09_joining_without_the_bits_is_found() {
    is_found_on_disk(PlantedBug::Rule09JoinWithoutBits, "its bit is not set");
}

#[test]
fn rule_10_joining_without_mirroring_is_found() {
    is_found(PlantedBug::Rule10JoinWithoutMirroring, HISTORY);
}

#[test]
fn rule_11_a_rebuilt_record_of_the_old_lineage_is_found() {
    is_found(ModelBug::Rule11SameLineage, &["under the lineage"]);
}

#[test]
fn rule_12_ejecting_everybody_when_alone_is_found() {
    is_found(PlantedBug::Rule12EjectAlthoughSuspect, &["although it reaches none itself"]);
}

#[test]
fn rule_12_losses_that_are_judged_one_by_one_are_found() {
    is_found(PlantedBug::Rule12OneByOne, &["shortly after others"]);
}

#[test]
fn rule_13_going_on_when_fenced_is_found() {
    is_found(PlantedBug::Rule13FencedCountsAsDone, &["was replaced and acknowledged", "a write was lost"]);
}

#[test]
fn rule_13_a_ghost_write_of_a_session_that_was_not_drained_is_found() {
    is_found(ModelBug::Rule13NoDrain, HISTORY);
}

#[test]
fn rule_14_an_epoch_that_a_restart_forgets_is_found() {
    is_found(ModelBug::Rule14EpochForgotten, &["after it was promoted to"]);
}

#[test]
fn rule_15_keeping_members_that_were_not_promoted_is_found() {
    // Who was not promoted does not carry the record either.
    let seen = ["a write was lost", "differ after a clean close", "unlawful", "does not carry"];
    is_found(PlantedBug::Rule15OpenKeepsUnpromoted, &seen);
}

#[test]
fn rule_16_reading_without_the_members_confirmation_is_found() {
    is_found(PlantedBug::Rule16NoReadGate, &["a read was stale"]);
}

#[test]
fn rule_16_starting_before_the_old_lease_is_over_is_found() {
    is_found(PlantedBug::Rule16NoWait, &["a read was stale"]);
}

#[test]
fn rule_16_a_clock_that_stands_still_in_suspend_is_found() {
    is_found(ModelBug::Rule16ClockStops, &["a read was stale"]);
}

#[test]
fn rule_16_taking_all_engines_for_dead_because_the_last_owner_is_is_found() {
    is_found(ModelBug::Rule16LastOwnerDead, &["a read was stale"]);
}

#[test]
fn rule_17_late_commands_of_a_connection_that_was_replaced_are_found() {
    is_found(ModelBug::Rule17LateCommands, HISTORY);
}

#[test]
fn rule_18_data_before_bits_is_found() {
    // A bit that is late for its data may also be cleared in time for the wrong flush.
    finds(PlantedBug::Rule18DataBeforeBits, true, &["its bit is not set", "was cleared on"]);
}

#[test]
fn rule_18_reading_an_inherited_region_as_it_is_is_found() {
    is_found(PlantedBug::Rule18ReadInherited, HISTORY);
}

#[test]
fn rule_18_clearing_before_the_flush_is_found() {
    is_found_on_disk(PlantedBug::Rule18ClearBeforeFlush, "was flushed");
}

#[test]
fn rule_18_clearing_though_a_write_began_is_found() {
    is_found_on_disk(PlantedBug::Rule18ClearThoughWritten, "was flushed");
}

#[test]
fn rule_19_a_snapshot_of_members_that_may_differ_is_found() {
    is_found(PlantedBug::Rule19SnapshotWhileInherited, SNAPSHOT);
}

#[test]
fn rule_19_a_snapshot_that_hosts_write_under_is_found() {
    is_found(PlantedBug::Rule19SnapshotUnderWrites, SNAPSHOT);
}

#[test]
fn rule_19_a_snapshot_of_what_only_a_cache_holds_is_found() {
    is_found(PlantedBug::Rule19SnapshotUnflushed, &["has lost what it held"]);
}

#[test]
fn rule_19_a_member_without_the_snapshot_is_found() {
    is_found(PlantedBug::Rule19MissedStays, &["has not taken it"]);
}

#[test]
fn rule_21_an_old_copy_of_the_record_without_hold_is_found() {
    // Mostly replicas know better and nothing opens any more; else what is stale is served.
    is_found(ModelBug::Rule21NoHold, &["not everything went on", "a write was lost", "differ after a clean close"]);
}

#[test]
fn rule_21_recovering_from_replicas_that_were_not_fenced_is_found() {
    // A record that is older than what a replica knows may also open nothing any more.
    let seen = [
        "a write was lost",
        "differ after a clean close",
        "is not in the recorded in-sync set",
        "does not carry",
        "not everything went on",
    ];
    is_found(ModelBug::Rule21ReadUnfenced, &seen);
}

#[test]
fn rule_22_deleting_what_is_still_needed_is_found() {
    is_found(ModelBug::Rule22DeleteAtOnce, HISTORY);
}

#[test]
fn rule_23_swaps_by_a_manager_are_found() {
    is_found(ModelBug::Rule23ManagerSwaps, &["waited for somebody else"]);
}

/// Whoever adds a switch adds a test that finds it.
#[test]
fn every_bug_is_planted() {
    let source: String = include_str!("planted.rs").split_whitespace().collect();
    let is_planted = |bug: &str| {
        ["is_found(", "is_found_on_disk(", "finds("].iter().any(|finds| source.contains(&format!("{finds}{bug},")))
    };
    let core = PlantedBug::ALL.iter().map(|bug| format!("PlantedBug::{bug:?}"));
    let all: Vec<String> = core.chain(ModelBug::ALL.iter().map(|bug| format!("ModelBug::{bug:?}"))).collect();
    let missing: Vec<&String> = all.iter().filter(|bug| !is_planted(bug)).collect();
    assert!(missing.is_empty(), "no test plants {missing:?}");
    // Expansion is not built yet.
    for rule in (1..=23).filter(|rule| *rule != 20) {
        assert!(all.iter().any(|bug| bug.contains(&format!("Rule{rule:02}"))), "rule {rule} is never broken");
    }
}

#[test]
fn a_failing_run_shrinks_to_one_that_still_fails() {
    let found = first_failure(PlantedBug::Rule06AckBeforeSwap, false);
    assert!(found.is_some());
    if let Some((_, scenario, outcome)) = found {
        let small = shrink(&scenario, &outcome);
        assert!(small.outcome.violation.is_some());
        assert!(small.outcome.faults.len() <= outcome.faults.len());
        assert_eq!(run(&small.scenario).violation, small.outcome.violation, "it must be repeatable");
    }
}
