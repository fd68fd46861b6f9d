//! Looks for a smaller run that fails too: fewer faults, fewer commands, each tried in turn until none helps.

use crate::world::{Outcome, Scenario, run};

/// The smallest failing run that was found.
#[derive(Debug, Clone)]
pub struct Shrunk {
    /// It.
    pub scenario: Scenario,
    /// How it fails.
    pub outcome: Outcome,
    /// Runs that were tried.
    pub tries: u32,
}

/// Most runs that are tried.
const TRIES_MAX: u32 = 400;

/// Shrinks a failing scenario.
#[must_use]
pub fn shrink(scenario: &Scenario, outcome: &Outcome) -> Shrunk {
    let mut best = scenario.clone();
    best.trace = false;
    best.faults = Some(outcome.faults.clone());
    let mut found = Shrunk { scenario: best, outcome: outcome.clone(), tries: 0 };
    // With the faults given the random numbers run differently, so the run may pass; then there is nothing to shrink.
    loop {
        let smaller = candidates(&found.scenario).into_iter().find_map(|candidate| {
            found.tries += 1;
            let outcome = if found.tries <= TRIES_MAX { run(&candidate) } else { return None };
            outcome.violation.is_some().then_some((candidate, outcome))
        });
        match smaller {
            Some((scenario, outcome)) => (found.scenario, found.outcome) = (scenario, outcome),
            None => return found,
        }
    }
}

fn candidates(scenario: &Scenario) -> Vec<Scenario> {
    let faults = scenario.faults.clone().unwrap_or_default();
    let mut all = Vec::new();
    for i in 0..faults.len() {
        let mut fewer = faults.clone();
        fewer.remove(i);
        all.push(Scenario { faults: Some(fewer), ..scenario.clone() });
    }
    if scenario.ops > 8 {
        all.push(Scenario { ops: scenario.ops / 2, ..scenario.clone() });
        all.push(Scenario { ops: scenario.ops - scenario.ops / 4, ..scenario.clone() });
    }
    all
}
