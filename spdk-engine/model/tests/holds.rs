//! The rules hold in every state of the quick scenarios, and what must happen in them does.

use mirror_model::{Mirror, SCENARIOS, Scenario, check};

fn holds(scenario: &Scenario) {
    let report = check(Mirror::new(scenario.bounds, None));
    println!("{}: {} states, {} steps, depth {}", scenario.name, report.states, report.steps, report.depth);
    if let Some((property, story)) = report.violations.first() {
        panic!("{}: violated: {property}\n{story}", scenario.name);
    }
    assert_eq!(report.unseen, scenario.unseen, "{}: what did not happen", scenario.name);
}

macro_rules! scenarios {
    ($($test:ident: $name:literal),+ $(,)?) => {
        $(
            #[test]
            fn $test() {
                let scenario = Scenario::named($name);
                assert!(scenario.is_some(), "no scenario is called {:?}", $name);
                scenario.into_iter().for_each(holds);
            }
        )+

        #[test]
        fn every_quick_scenario_is_looked_at() {
            let here = [$($name),+];
            let missing: Vec<_> = SCENARIOS.iter().filter(|s| s.quick && !here.contains(&s.name)).collect();
            assert!(missing.is_empty(), "{missing:?}");
        }
    };
}

scenarios! {
    connections_break: "three members, a takeover, connections break",
    a_member_leaves: "three members, one leaves, a takeover",
    a_replica_is_rebuilt: "two members, one rebuilt, a takeover",
    strict_mode_with_a_leave: "strict mode, three members, one leaves, a takeover",
    strict_mode_with_a_rebuild: "strict mode, two members, one rebuilt, a takeover, connections break",
    write_intent_bits: "bits, three members, a takeover",
    write_intent_bits_with_a_joiner: "bits, one member, a joiner, a takeover",
    two_takeovers: "two members, two takeovers",
}
